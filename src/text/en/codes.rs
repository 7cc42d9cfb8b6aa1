//! English addresses of all kinds, telephone numbers, codes, and numbers that nothing else took.

use super::numbers::{cardinal, decimal, digits, pairs, quantity, year};
use super::tables::{CODES, DATED, STREETS};
use super::words::spell as letters;
use super::{loose, number, rule};
use crate::text::address::spell;
use crate::text::scan::{Context, End, Rule};

/// House numbers and IP addresses.
pub(super) fn addresses(rules: &mut Vec<Rule>) {
    // "708 N 1st St": the way it goes and a number for a name.
    rule(rules, r"(\d{1,5}) ([NSEW]) (\d{1,3}(?:st|nd|rd|th)|[A-Z][a-z]+) ([A-Z][a-z]+)(\.?)", |c, context| {
        let kind = STREETS.iter().find(|(short, _)| *short == &c[4])?.1;
        let way = match &c[2] {
            "N" => "North",
            "S" => "South",
            "E" => "East",
            _ => "West",
        };
        let name = match c[3].trim_end_matches(char::is_alphabetic) {
            "" => c[3].to_owned(),
            nth => super::ordinal(number(nth)),
        };
        let ends = !c[5].is_empty()
            && (context.after.trim().is_empty() || context.next_word().starts_with(char::is_uppercase));
        Some(format!("{} {way} {name} {kind}{}", pairs(&c[1]), if ends { "." } else { "" }))
    });
    rule(rules, r"(\d{1,5})([A-Z]?)((?: [A-Z][a-z]+){1,3}) ([A-Z][a-z]+)(\.?)", |c, context| {
        let kind = STREETS.iter().find(|(short, _)| *short == &c[4])?.1;
        // The stop of a shortened word, unless it ends the sentence as well.
        let ends = !c[5].is_empty() && context.next_word().starts_with(char::is_uppercase);
        let door = if c[2].is_empty() { String::new() } else { format!(" {}", &c[2]) };
        Some(format!("{}{door}{} {kind}{}", pairs(&c[1]), &c[3], if ends { "." } else { "" }))
    });
    rule(rules, r"(\d{1,3})\.(\d{1,3})\.(\d{1,3})\.(\d{1,3})(?::(\d{1,5}))?(?:/(\d{1,2}))?", |c, _| {
        let part = |at: usize| digits(&c[at], "zero");
        let mut said = format!("{} dot {} dot {} dot {}", part(1), part(2), part(3), part(4));
        if c.get(5).is_some() {
            said.push_str(&format!(" port {}", part(5)));
        }
        if c.get(6).is_some() {
            said.push_str(&format!(" slash {}", quantity(&c[6])));
        }
        Some(said)
    });
    rule(rules, r"([2458])K", |c, context| {
        let shown =
            ["video", "videos", "TV", "TVs", "display", "monitor", "screen", "resolution", "camera", "footage", "UHD"];
        // At the end of a clause people say the letter, whatever it means.
        let ends = context.next().is_none_or(|next| matches!(next, '.' | ',' | '!' | '?' | ';' | ')'));
        (ends || shown.contains(&context.next_word())).then(|| format!("{} K", quantity(&c[1])))
    });
    // Addresses of the net may begin with a digit, too.
    links(rules);
}

pub(super) fn telephone(rules: &mut Vec<Rule>) {
    rule(
        rules,
        r"(?:\+(\d{1,3})[-. ]?)?\(?(\d{3})\)?[-. ](\d{3})[-. ](\d{4})((?:-\d{1,5})?)(?: ?(?:x|ext\.?) ?(\d{1,6}))?",
        |c, _| {
            let mut said = c.get(1).map(|code| format!("plus {}, ", digits(code.as_str(), "zero"))).unwrap_or_default();
            said.push_str(&format!("{}, {}, {}", area(&c[2]), digits(&c[3], "zero"), digits(&c[4], "zero")));
            if !c[5].is_empty() {
                said.push_str(&format!(", {}", digits(&c[5], "zero")));
            }
            if let Some(extension) = c.get(6) {
                said.push_str(&format!(", extension {}", digits(extension.as_str(), "zero")));
            }
            Some(said)
        },
    );
    rule(rules, r"\+?1[-. ]\(?(\d{3})\)?[-. ]([0-9A-Z][0-9A-Z-]{6,12})", |c, _| {
        let plus = if c[0].starts_with('+') { "plus one, " } else { "one, " };
        let (mut said, mut word) = (String::new(), String::new());
        for part in c[2].split('-') {
            let numeric = part.chars().all(|c| c.is_ascii_digit());
            let part = if numeric { digits(part, "zero") } else { part.to_owned() };
            let gap = if numeric { ", " } else { " " };
            if !word.is_empty() {
                word.push_str(gap);
            }
            word.push_str(&part);
        }
        said.push_str(&word);
        Some(format!("{plus}{}, {said}", area(&c[1])))
    });
    // +44 20 7946 0958
    rule(rules, r"\+(\d{1,3})((?:[-. ]\(?\d{1,5}\)?){2,5})", |c, _| {
        let groups: Vec<_> = c[2].split(['-', '.', ' ', '(', ')']).filter(|g| !g.is_empty()).collect();
        let groups: Vec<_> = groups.iter().map(|group| digits(group, "zero")).collect();
        Some(format!("plus {}, {}", digits(&c[1], "zero"), groups.join(", ")))
    });
    rule(rules, r"\+(\d{8,15})", |c, _| Some(format!("plus {}", digits(&c[1], "zero"))));
    rule(rules, r"(\d{3})-(\d{2})-(\d{4})", |c, _| {
        Some(format!("{}, {}, {}", digits(&c[1], "zero"), digits(&c[2], "zero"), digits(&c[3], "zero")))
    });
    rule(rules, r"(\d{3})-(\d{4})", |c, _| Some(format!("{}, {}", digits(&c[1], "zero"), digits(&c[2], "zero"))));
    // Cards and other numbers in groups, as of books.
    rule(rules, r"\d{1,5}(?:-\d{1,7}){3,6}", |c, _| {
        let groups: Vec<_> = c[0].split('-').map(|group| digits(group, "zero")).collect();
        Some(groups.join(", "))
    });
    rule(rules, r"\d{4}(?:[- ]\d{4}){2,4}", |c, _| {
        let groups: Vec<_> = c[0].split(['-', ' ']).map(|group| digits(group, "zero")).collect();
        Some(groups.join(", "))
    });
}

fn area(code: &str) -> String {
    match number(code) {
        n if n >= 100 && n.is_multiple_of(100) => cardinal(n),
        _ => digits(code, "zero"),
    }
}

/// Mail and web addresses.
pub(super) fn links(rules: &mut Vec<Rule>) {
    loose(
        rules,
        r"(?:mailto:)?[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63})*\.[A-Za-z]{2,12}",
        |c, context| {
            (!context.next().is_some_and(char::is_alphanumeric)).then(|| address(c[0].trim_start_matches("mailto:")))
        },
    );
    loose(rules, r"(?i:https?|ftp|file|sips?|wss?)://?([^\s<>()\x22\u{201d}\u{3000}-\u{9fff}]{2,160})", |c, _| {
        let end = c[0].trim_end_matches(['.', ',', '!', '?', ';', ':', '\'']).len();
        // The signs that end the sentence are kept as they are.
        let tail = &c[0][end..];
        let start = c[0].find("//").map_or(c[0].find(':')? + 1, |at| at + 2);
        (start < end).then(|| format!("{}{tail}", address(c[0][start..end].trim_end_matches('/'))))
    });
    loose(rules, r"www(?:\.[A-Za-z0-9-]{1,63}){1,4}\.([a-z]{2,6})((?:/[A-Za-z0-9_.~%#?&=+-]*)*)", |c, context| {
        let end = c[0].trim_end_matches(['.', '?', '/']).len();
        let carried = context.next().is_some_and(char::is_alphanumeric);
        (!carried).then(|| format!("{}{}", address(&c[0][..end]), c[0][end..].trim_start_matches('/')))
    });
    loose(
        rules,
        r"(?:www\.)?(?:[A-Za-z0-9_-]{1,63}\.){1,4}(com|org|net|edu|gov|io|ai|dev|app|info|co|uk|de|fr|es|eu|cn|jp|us|ca|me|tv|biz|xyz|int|mil)(:\d{2,5})?((?:/[A-Za-z0-9_.~%#?&=+-]*)*)",
        |c, context| {
            let text = &c[0];
            let end = text.trim_end_matches(['.', '?', '/']).len();
            let tail = text[end..].trim_start_matches('/');
            let known = text.contains('.')
                && !text.starts_with(|c: char| c.is_ascii_digit() && !text.contains(char::is_alphabetic));
            let carried = context.next().is_some_and(char::is_alphanumeric);
            // "Hello.me" at the end of a sentence that lacks its space: names of two letters need a small letter before.
            let sure = c[1].len() > 2 || text.starts_with(|c: char| c.is_lowercase() || c.is_ascii_digit());
            (known && !carried && sure).then(|| format!("{}{tail}", address(&text[..end])))
        },
    );
    loose(rules, r"[@]([A-Za-z][A-Za-z0-9_]{1,30})", |c, _| Some(format!("at {}", address(&c[1]))));
    rule(rules, r"#([A-Z0-9]{1,12}(?:-[A-Z0-9]{1,12}){0,4})", |c, _| {
        let coded = c[1].contains(|c: char| c.is_ascii_digit()) && c[1].contains(|c: char| !c.is_ascii_digit());
        coded.then(|| format!("number {}", c[1].split('-').map(letters).collect::<Vec<_>>().join(", ")))
    });
    loose(rules, r"#([A-Za-z][A-Za-z0-9_]{1,60})", |c, context| {
        // Inside a word it is the sign and nothing more.
        let inside = context.last().is_some_and(char::is_alphanumeric);
        Some(format!("{} {}", if inside { " hash" } else { "hashtag" }, address(&c[1])))
    });
}

/// Letters stay words, signs are named, digits are read in short runs.
pub(super) fn address(text: &str) -> String {
    let number =
        |text: &str| if text.len() <= 2 && !text.starts_with('0') { quantity(text) } else { digits(text, "zero") };
    spell(text, word, number, sign)
}

/// A word of an address.
fn word(text: &str) -> &str {
    if text == "www" { "WWW" } else { text }
}

fn sign(c: char) -> &'static str {
    match c {
        '.' => "dot",
        '@' => "at",
        '/' => "slash",
        '-' => "dash",
        '_' => "underscore",
        ':' => "colon",
        '?' => "question mark",
        '=' => "equals",
        '&' => "and",
        '+' => "plus",
        '#' => "hash",
        '%' => "percent",
        '~' => "tilde",
        _ => "",
    }
}

/// What nothing else took.
pub(super) fn numbers(rules: &mut Vec<Rule>) {
    // Lines of a picture: "1080p".
    rule(rules, r"(480|576|720|1080|1440|2160)([pi])", |c, _| Some(format!("{} {}", pairs(&c[1]), &c[2])));
    // What is no time of day is a share of something, or how a match ended.
    rule(rules, r"(\d{1,4}):(\d{1,4})", |c, _| Some(format!("{} to {}", quantity(&c[1]), quantity(&c[2]))));
    loose(rules, r"[<>]", |c, context| {
        let apart = context.last() == Some(' ') && context.next() == Some(' ') && !context.before.trim().is_empty();
        apart.then(|| if &c[0] == "<" { "less than" } else { "greater than" }.into())
    });
    loose(rules, r"(401|403|457)\(([kb])\)", |c, _| Some(format!("{} {}", digits(&c[1], "oh"), &c[2])));
    rule(rules, r"#(\d+)", |c, _| Some(format!("number {}", quantity(&c[1]))));
    // Versions: more than one point.
    rule(rules, r"\d+(?:\.\d+){2,5}", |c, _| {
        let parts: Vec<_> = c[0].split('.').map(quantity).collect();
        Some(parts.join(" point "))
    });
    rule(rules, r"[-−]?(?:\d{1,3}(?:,\d{3})+|\d+)?\.\d+", |c, context| {
        // "114...48"
        if c[0].starts_with('.') && context.last() == Some('.') {
            return None;
        }
        let text = c[0].trim_start_matches(['-', '−']);
        let joined = context.last().is_some_and(char::is_alphanumeric);
        let sign = match text.len() == c[0].len() {
            true => "",
            // A hyphen.
            false if joined => " ",
            false => "minus ",
        };
        Some(format!("{sign}{}", decimal(text)))
    });
    rule(rules, r"[-−](\d{1,3}(?:,\d{3})+|\d+)", |c, context| {
        let joined = context.last().is_some_and(|last| last.is_alphanumeric() || last == ')');
        let said = quantity(&c[1]);
        Some(if joined { format!(" {said}") } else { format!("negative {said}") })
    });
    rule(rules, r"\d{1,3}(?:,\d{3})+", |c, _| Some(quantity(&c[0])));
    rule(rules, r"0x[0-9A-Fa-f]{1,16}", |c, _| Some(address(&c[0])));
    rule(rules, r"\d+", |c, context| {
        (!context.last().is_some_and(char::is_alphanumeric)).then(|| bare(&c[0], context))
    });
    loose(rules, r"([0-9]+)([A-Za-z]?)", mixed);
    // Signs by themselves.
    loose(rules, r"\*", |_, context| {
        let number = |c: Option<char>| c.is_some_and(|c| c.is_ascii_digit());
        let behind = context.after.trim_start().chars().next();
        (number(context.before.trim_end().chars().next_back()) && number(behind)).then(|| "times".into())
    });
    loose(rules, "§§", |_, _| Some("sections".into()));
    rules.push(Rule::new(r"[&%£€¥$°±×÷≈≠≤≥∞√→©§¶∑∫=+@]", End::Any, |c, context| {
        let sign = c[0].chars().next()?;
        let word = super::tables::SIGNS.iter().find(|(known, _)| *known == sign)?.1;
        let before = if context.last().is_none_or(char::is_whitespace) { "" } else { " " };
        let behind = if context.next().is_some_and(char::is_alphanumeric) { " " } else { "" };
        Some(format!("{before}{word}{behind}"))
    }));
    loose(rules, "[™®]", |_, _| Some(String::new()));
}

fn bare(text: &str, context: &Context<'_>) -> String {
    let n = number(text);
    let last = context.last_word().to_lowercase();
    let coded = CODES.contains(&last.as_str())
        || (matches!(last.as_str(), "is" | "number" | "in")
            && CODES.iter().any(|code| ends_before(context.before, code)));
    if coded && text.len() >= 3 {
        return digits(text, "zero");
    }
    let called = matches!(last.as_str(), "call" | "called" | "calling" | "dial" | "dialed" | "ring" | "phone");
    if called && matches!(text, "911" | "999" | "112" | "311" | "411" | "988") {
        return digits(text, "zero");
    }
    match text.len() {
        4 if is_year(n, &last, context) => year(n),
        5 if is_state(context.before) => digits(text, "oh"),
        _ => quantity(text),
    }
}

/// Whether four digits are a year. Those that years of which people talk seldom have need a word before them that years
/// have, or nothing behind them that is counted.
fn is_year(n: u128, last: &str, context: &Context<'_>) -> bool {
    let dated = DATED.contains(&last);
    let next = context.next_word();
    let counted = context.next() == Some(' ')
        && (next == "people" || (next.len() > 3 && next.ends_with('s') && next.chars().all(char::is_lowercase)));
    match n {
        1_010..1_100 => dated,
        1_100..1_500 | 2_100..3_000 => dated || !counted,
        1_500..2_100 => true,
        _ => false,
    }
}

/// Whether `word` is the last but one, or the one before it.
fn ends_before(before: &str, word: &str) -> bool {
    before
        .rsplit(|c: char| !c.is_alphanumeric())
        .filter(|part| !part.is_empty())
        .take(3)
        .any(|part| part.eq_ignore_ascii_case(word))
}

fn is_state(before: &str) -> bool {
    let word = before.trim_end().trim_end_matches(',');
    super::tables::STATES.iter().any(|(short, _)| word.strip_suffix(short).is_some_and(|rest| rest.ends_with(", ")))
}

/// A number and letters without a space between: "4G", "A4", "X7K9Q2". Also the last resort of every number.
pub(super) fn mixed(c: &regex::Captures<'_>, context: &Context<'_>) -> Option<String> {
    let joined = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
    let before = if joined(context.last()) { " " } else { "" };
    let behind = if c[2].is_empty() && joined(context.next()) { " " } else { "" };
    let number = &c[1];
    let said = match number.len() {
        1 | 2 if !number.starts_with('0') => quantity(number),
        3 if joined(context.last()) => pairs(number),
        1..=4 if !joined(context.last()) && c[2].is_empty() => quantity(number),
        _ => digits(number, "zero"),
    };
    // The first of several letters goes with the others: "A321neo".
    let gap = if context.next().is_some_and(char::is_alphabetic) { "" } else { behind };
    let letter = if c[2].is_empty() { String::new() } else { format!(" {}", &c[2]) };
    let behind = if c[2].is_empty() { behind } else { gap };
    Some(format!("{before}{said}{letter}{behind}"))
}
