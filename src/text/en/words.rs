//! English abbreviations, initials, Roman numerals and other words that are not said as they are written.

use super::numbers::{cardinal, digits, ordinal, quantity};
use super::tables::{ABBREVIATIONS, BARE, DOTTED, GREEK, NUMBERED, RULERS, STATES, STREETS};
use super::{loose, rule};
use crate::text::scan::Rule;

/// Whether a run of letters is a word that needs no rule: small letters, and behind it no sign that could make it the
/// beginning of something else.
pub(super) fn is_plain(run: &str, behind: &str) -> bool {
    let next = behind.chars().next();
    let second = behind.chars().nth(1);
    let ends = match next {
        None => true,
        Some('.' | '-' | '\'' | '+' | '_' | ':' | '/' | '@') => second.is_none_or(char::is_whitespace),
        Some(c) => !c.is_ascii_digit(),
    };
    if !ends || !run.chars().all(|c| c.is_lowercase()) {
        return false;
    }
    let dotted = next == Some('.');
    // Shortened words, months, and the letters of other alphabets.
    !(dotted || run.len() <= 4 || is_month(run) || !run.is_ascii())
}

fn is_month(run: &str) -> bool {
    super::tables::MONTHS.iter().any(|(long, _)| run == *long)
}

pub(super) fn rules(rules: &mut Vec<Rule>) {
    initials(rules);
    abbreviations(rules);
    numerals(rules);
    loose(rules, r"(?:and|or|he|she|him|his|her|yes|no|n)/(?:or|and|she|he|her|hers|no|yes|a)", |c, context| {
        let carried = context.next().is_some_and(char::is_alphanumeric);
        (!carried).then(|| match &c[0] {
            "n/a" => "not applicable".into(),
            text => text.replace('/', " "),
        })
    });
    rule(rules, r"N/A", |_, _| Some("not applicable".into()));
    rule(rules, r"w/o", |_, _| Some("without".into()));
    loose(rules, r"w/ ?", |_, context| context.next().is_some_and(char::is_alphabetic).then(|| "with ".into()));
    rule(rules, r"FY ?((?:19|20)\d{2}|\d{2})", |c, _| {
        let of = if c[1].len() == 2 { super::numbers::pairs(&c[1]) } else { super::year(super::number(&c[1])) };
        Some(format!("FY {of}"))
    });
    rule(rules, r"([A-Z])(\d)-([A-Z])(\d)", |c, _| {
        Some(format!("{} {} {} {}", &c[1], quantity(&c[2]), &c[3], quantity(&c[4])))
    });
    rule(rules, r"([A-Z]\w*)&([A-Z]\w*)", |c, _| Some(format!("{} and {}", &c[1], &c[2])));
    // "O2O", "B2B", "P2P": a two between letters is "to".
    rule(rules, r"([A-Z])2([A-Z])", |c, _| {
        // Water, laughing gas and what smells of rotten eggs.
        let two = matches!(&c[0], "H2O" | "N2O" | "H2S");
        Some(format!("{} {} {}", &c[1], if two { "two" } else { "to" }, &c[2]))
    });
    rule(rules, r"([CF])#", |c, _| Some(format!("{} sharp", &c[1])));
    rule(rules, r"([A-Za-z]{1,3})(?:([²³])|\^(-?)(\d{1,3}))", |c, _| {
        let group = |at: usize| c.get(at).map_or("", |group| group.as_str());
        let power = match (group(2), group(3), group(4)) {
            ("²", ..) | ("", "", "2") => "squared".to_owned(),
            ("³", ..) | ("", "", "3") => "cubed".to_owned(),
            (_, "", power) => format!("to the power of {}", quantity(power)),
            (_, _, power) => format!("to the power of minus {}", quantity(power)),
        };
        Some(format!("{} {power}", &c[1]))
    });
    rule(rules, r"[vV](?:er|ersion)?\.? ?(\d{1,4}(?:\.\d{1,6}){1,4})", |c, _| {
        let parts: Vec<_> = c[1].split('.').map(quantity).collect();
        Some(format!("version {}", parts.join(" point ")))
    });
    rule(rules, r"v(\d{1,3})", |c, _| Some(format!("version {}", quantity(&c[1]))));
    // "COVID-19", "F-16": the hyphen is not a minus.
    rule(rules, r"([A-Za-z]{1,24})[-–](\d{1,3})", |c, _| Some(format!("{} {}", &c[1], quantity(&c[2]))));
    // An account as banks write it all over the world (ISO 13616): four characters, then groups of four.
    rule(rules, r"[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?", |c, _| {
        let plain: Vec<char> = c[0].chars().filter(|c| *c != ' ').collect();
        let account = plain.iter().filter(|c| c.is_ascii_digit()).count() >= 10 && plain.len() >= 15;
        let groups = plain.chunks(4).map(|group| spell(&group.iter().collect::<String>()));
        account.then(|| groups.collect::<Vec<_>>().join(", "))
    });
    // Codes: letters and digits change more than twice.
    rule(rules, r"[A-Z0-9]{5,24}", |c, _| is_code(&c[0]).then(|| spell(&c[0])));
    rule(rules, r"[A-Z0-9]{2,8}(?:-[A-Z0-9]{1,8}){1,6}", |c, _| {
        let parts: Vec<_> = c[0].split('-').collect();
        let coded =
            c[0].contains(|c: char| c.is_ascii_digit()) && parts.iter().any(|part| is_code(part) || part.len() > 3);
        coded.then(|| parts.iter().map(|part| spell(part)).collect::<Vec<_>>().join(", "))
    });
    loose(rules, r"([A-Za-z]{1,24})(\d{1,12})([A-Za-z]?)", |c, context| {
        let text = format!("{}{}", &c[2], &c[3]);
        let carried = context.next().is_some_and(char::is_alphanumeric);
        let number = match c[2].len() {
            1 | 2 if !c[2].starts_with('0') => quantity(&c[2]),
            3 => super::numbers::pairs(&c[2]),
            _ => digits(&c[2], "zero"),
        };
        // What follows digits puts a space before itself.
        let gap = if carried && context.next().is_some_and(char::is_alphabetic) { " " } else { "" };
        (!text.is_empty()).then(|| match &c[3] {
            "" => format!("{} {number}{gap}", &c[1]),
            letter => format!("{} {number} {letter}{gap}", &c[1]),
        })
    });
    // Two words that an underscore joins.
    loose(rules, r"([A-Za-z]+)_([A-Za-z_]+)", |c, _| Some(format!("{} {}", &c[1], c[2].replace('_', " ").trim())));
    loose(rules, r"([Α-Ωα-ω])", |c, context| {
        let alone = |c: Option<char>| c.is_none_or(|c| !c.is_alphabetic());
        let small = c[1].to_lowercase().chars().next()?;
        let name = GREEK.iter().find(|(letter, _)| *letter == small)?.1;
        (alone(context.last()) && alone(context.next())).then(|| name.to_owned())
    });
}

/// Digits next to letters more than once, or a digit between letters.
fn is_code(text: &str) -> bool {
    let changes =
        text.as_bytes().windows(2).filter(|pair| pair[0].is_ascii_digit() != pair[1].is_ascii_digit()).count();
    changes >= 2 && text.contains(|c: char| c.is_ascii_alphabetic())
}

/// Letter by letter, digit by digit.
pub(super) fn spell(text: &str) -> String {
    let one = |c: char| if c.is_ascii_digit() { digits(&c.to_string(), "zero") } else { c.to_string() };
    text.chars().map(one).collect::<Vec<_>>().join(" ")
}

/// Letters with stops between them.
fn initials(rules: &mut Vec<Rule>) {
    loose(rules, r"(?i)((?:ph|[a-z])(?:\.[a-z])+)(\.?)", |c, context| {
        let whole = &c[1];
        if context.next().is_some_and(char::is_alphanumeric) {
            return None;
        }
        let known = DOTTED.iter().find(|(short, _)| whole.eq_ignore_ascii_case(short));
        Some(match known {
            Some((_, long)) => (*long).to_owned(),
            // Small letters that are no known abbreviation are a broken sentence or a name.
            None if whole.starts_with(char::is_lowercase) && !matches!(whole, "a.m" | "p.m") => return None,
            None => whole.replace('.', "").to_uppercase(),
        })
    });
}

fn abbreviations(rules: &mut Vec<Rule>) {
    rule(rules, r"(No|no|Nos|nos)\. ?(\d{1,9})", |c, _| {
        let capital = c[1].starts_with('N');
        Some(format!("{} {}", if capital { "Number" } else { "number" }, quantity(&c[2])))
    });
    rule(rules, r"(pp?|vol|ch|sec|fig|art|para)\. ?(\d{1,6})", |c, _| {
        let long = match &c[1] {
            "p" => "page",
            "pp" => return None,
            "art" => "article",
            "para" => "paragraph",
            other => ABBREVIATIONS.iter().find(|(short, _)| *short == other)?.1,
        };
        Some(format!("{long} {}", quantity(&c[2])))
    });
    // "St. Louis" is a saint, "Main St." a street; the same with "Dr.".
    loose(rules, r"(St|Dr)\.", |c, context| {
        let next = context.next_word();
        let before = context.last_word();
        let name = next.starts_with(char::is_uppercase) && context.after.starts_with([' ', '\u{a0}']);
        let behind_name = before.starts_with(char::is_uppercase) || before.starts_with(|c: char| c.is_ascii_digit());
        Some(match (&c[1], name && !(behind_name && STREETS.iter().any(|(kind, _)| next == *kind))) {
            ("St", true) if !behind_name => "Saint".into(),
            ("St", _) => "Street".into(),
            (_, true) => "doctor".into(),
            (_, false) if behind_name => "Drive".into(),
            _ => "doctor".into(),
        })
    });
    loose(rules, r"([A-Za-z]{2,6})\.", |c, context| {
        // A time zone.
        let low = Some(c[1].to_lowercase()).filter(|_| &c[1] != "EST")?;
        let long = ABBREVIATIONS.iter().find(|(short, _)| *short == low)?.1;
        // What is a word as well is an abbreviation only where something follows it.
        let word = matches!(
            low.as_str(),
            "no" | "gen"
                | "col"
                | "rep"
                | "fig"
                | "ch"
                | "ed"
                | "sec"
                | "min"
                | "max"
                | "temp"
                | "pres"
                | "hon"
                | "ca"
                | "ms"
        );
        let ends = context.after.trim().is_empty();
        let all = context.before.trim().is_empty() && ends;
        (!word || all || !ends).then_some(())?;
        let before_name = context.next_word().starts_with(char::is_uppercase);
        if matches!(low.as_str(), "ft" | "mt" | "gen" | "col" | "rep" | "pres") && !(before_name || all) {
            return None;
        }
        let capital = c[1].starts_with(char::is_uppercase)
            && !matches!(low.as_str(), "hon" | "jr" | "sr" | "co" | "corp" | "ltd" | "inc");
        let mut chars = long.chars();
        Some(match chars.next() {
            Some(first) if capital => format!("{}{}", first.to_uppercase(), chars.as_str()),
            _ => long.to_owned(),
        })
    });
    rule(rules, r"[A-Z][a-z]{1,4}|vs|etc", |c, context| {
        let long = BARE.iter().find(|(short, _)| *short == &c[0])?.1;
        (!matches!(context.next(), Some('.' | '\''))).then(|| long.to_owned())
    });
    // "Stroudsburg, PA"
    rule(rules, r"[A-Z]{2}", |c, context| {
        let state = STATES.iter().find(|(short, _)| *short == &c[0])?.1;
        let place = context.before.strip_suffix(", ")?;
        let city = place.rsplit(' ').next().unwrap_or_default();
        let is_city =
            city.starts_with(char::is_uppercase) && city.chars().skip(1).all(char::is_lowercase) && city.len() > 2;
        is_city.then(|| state.to_owned())
    });
}

/// Roman numerals: of rulers and centuries, and behind a capital.
fn numerals(rules: &mut Vec<Rule>) {
    rule(rules, r"[IVXLC]{1,9}", |c, context| {
        // "Appendix C", "Mary L.": by itself the sign of fifty or a hundred is a letter.
        let value = roman(&c[0]).filter(|_| !matches!(&c[0], "L" | "C"))?;
        let before = context.last_word();
        // "Elizabeth I" at the end of something; before a verb it is the pronoun.
        if RULERS.contains(&before) && (c[0].len() > 1 || context.next().is_none_or(|c| !c.is_whitespace())) {
            return Some(format!("the {}", ordinal(value)));
        }
        if matches!(context.next_word(), "century" | "centuries") {
            return Some(ordinal(value));
        }
        let numbered = NUMBERED.contains(&before.to_lowercase().as_str());
        // "Size XL", "a CV"
        if numbered || c[0].contains(['L', 'C']) {
            return numbered.then(|| cardinal(value));
        }
        let alone = context.before.trim().is_empty() && context.after.trim().is_empty();
        let named = before.starts_with(char::is_uppercase) && !before.chars().skip(1).any(char::is_uppercase);
        ((alone || named) && c[0].len() > 1).then(|| cardinal(value))
    });
}

/// The value of a well-formed Roman numeral up to 399.
pub(in crate::text) fn roman(text: &str) -> Option<u128> {
    const HUNDREDS: [&str; 4] = ["", "C", "CC", "CCC"];
    const TENS: [&str; 10] = ["", "X", "XX", "XXX", "XL", "L", "LX", "LXX", "LXXX", "XC"];
    const ONES: [&str; 10] = ["", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX"];
    // The longest that begins it, of each place; what is left over shows that it is none.
    let longest = |digits: &[&str], text: &str| {
        let found = (0..digits.len()).filter(|at| text.starts_with(digits[*at]));
        found.max_by_key(|at| digits[*at].len()).unwrap_or_default()
    };
    let hundreds = longest(&HUNDREDS, text);
    let text = &text[HUNDREDS[hundreds].len()..];
    let tens = longest(&TENS, text);
    let text = &text[TENS[tens].len()..];
    let ones = longest(&ONES, text);
    let value = (hundreds * 100 + tens * 10 + ones) as u128;
    (text.len() == ONES[ones].len() && value > 0).then_some(value)
}
