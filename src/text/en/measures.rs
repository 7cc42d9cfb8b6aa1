//! English money, units, shares, sums and other numbers that a sign goes with.

use regex::Captures;

use super::numbers::{decimal, fraction, ordinal, quantity};
use super::tables::{CURRENCIES, Currency, UNITS};
use super::{loose, number, rule};
use crate::text::scan::Rule;

/// A number: 1,234.5, .5, 12.
const N: &str = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)";
const SIGN: &str = "[-−–]";
const MAGNITUDE: &str = "(?:thousand|million|billion|trillion|quadrillion|hundred)";
const CURRENCY: &str = r"(?:US\$|AU?\$|CA?\$|HK\$|NZ\$|S\$|USD|AUD|CAD|HKD|NZD|SGD|EUR|GBP|JPY|CNY|RMB|INR|KRW|RUB|CHF|AED|Rs\.?|BTC|TRY|ILS|[$€£¥￥₹₩₽₿₺₪])";
const UNIT: &str = r"(?:sq ?ft|sq ?mi|sq ?m|sq ?km|fl oz|[°º] ?[CF]|[℃℉°º%‰Ω]|[A-Za-zµμ]{1,4})";

/// What begins with a digit or a sign.
pub(super) fn rules(rules: &mut Vec<Rule>) {
    money(rules);
    // "3,5 hours": a comma before tenths, where a measure is behind it.
    rule(rules, &format!(r"(\d{{1,4}}),(\d{{1,2}}) ?({UNIT})"), |c, context| {
        let listed = context.before.ends_with([',', '.']);
        let (_, many) = named(&c[3]).filter(|_| !listed)?;
        Some(format!("{} {many}", decimal(&format!("{}.{}", &c[1], &c[2]))))
    });
    rule(rules, r"(\d{1,4}),(\d{1,2})", |c, context| {
        const MEASURES: [&str; 20] = [
            "hours",
            "minutes",
            "seconds",
            "days",
            "weeks",
            "months",
            "years",
            "percent",
            "degrees",
            "times",
            "million",
            "billion",
            "meters",
            "metres",
            "kilometers",
            "kilometres",
            "miles",
            "liters",
            "litres",
            "kilos",
        ];
        let measured = context.next() == Some(' ') && MEASURES.contains(&context.next_word());
        let listed = context.before.ends_with([',', '.']);
        (measured && !listed).then(|| decimal(&format!("{}.{}", &c[1], &c[2])))
    });
    // "2x daily"
    rule(rules, r"(\d{1,3}) ?[x×] (daily|weekly|monthly|yearly|a|per|each|every)", |c, _| {
        Some(format!("{} {} {}", quantity(&c[1]), if &c[1] == "1" { "time" } else { "times" }, &c[2]))
    });
    recipes(rules);
    // Blood pressure.
    rule(rules, r"(\d{2,3})/(\d{2,3})(?: ?mm ?Hg)", |c, _| {
        Some(format!("{} over {} millimeters of mercury", quantity(&c[1]), quantity(&c[2])))
    });
    rule(rules, &format!(r"({N})/({UNIT})"), |c, _| {
        let long = c[2].len() > 1 && !c[2].starts_with(|c: char| c.is_ascii_digit());
        long.then(|| Some(format!("{} per {}", decimal(&c[1]), named(&c[2])?.0))).flatten()
    });
    vulgar(rules);
    // 5'10"
    rule(rules, r#"(\d{1,2})['’′] ?(\d{1,2})(?:["”″]|'')"#, |c, _| {
        Some(format!("{} {}", counted(&c[1], "foot", "feet"), counted(&c[2], "inch", "inches")))
    });
    // A span with the measure at both ends.
    rule(rules, &format!(r"({SIGN}?)({N}) ?({UNIT})(?: ?[-–—~] ?| to )({SIGN}?)({N}) ?({UNIT})"), |c, _| {
        let one = |sign: &str, number: &str, unit: &str| {
            let sign = if sign.is_empty() { "" } else { "negative " };
            let unit = match thousands(unit) {
                Some(size) => size.to_owned(),
                None => named(unit).map(|(one, many)| if number == "1" { one } else { many })?.to_owned(),
            };
            Some(format!("{sign}{} {unit}", decimal(number)))
        };
        Some(format!("{} to {}", one(&c[1], &c[2], &c[3])?, one(&c[4], &c[5], &c[6])?))
    });
    // 4.4x
    rule(rules, &format!(r"({N})[x×]"), |c, context| {
        // "10x faster" is a factor, "a 4x zoom" a name.
        let next = context.next_word();
        let factor = matches!(next, "more" | "less" | "as" | "the") || next.len() > 4 && next.ends_with("er");
        Some(format!("{} {}", decimal(&c[1]), if factor { "times" } else { "x" }))
    });
    // A span of a measure, and a measure.
    rule(
        rules,
        &format!(r"({SIGN}?)({N}) ?(?:[-–—~]|to) ?({N}) ?({UNIT})([²³23]|\^[23])?(?:/({UNIT})([²³23])?)?"),
        |c, _| {
            let (_, unit) = unit(c, 4)?;
            let minus = if c[1].is_empty() { "" } else { "negative " };
            Some(format!("{minus}{} to {} {unit}", decimal(&c[2]), decimal(&c[3])))
        },
    );
    // Sides; with an asterisk it is a product.
    rule(rules, &format!(r"({N}) ?([*×x]) ?({N}) ?({UNIT})([²³23]|\^[23])?(?:/({UNIT})([²³23])?)?"), |c, _| {
        let (_, unit) = unit(c, 4)?;
        let sign = if &c[2] == "*" { "times" } else { "by" };
        Some(format!("{} {sign} {} {unit}", decimal(&c[1]), decimal(&c[3])))
    });
    rule(
        rules,
        &format!(r"({SIGN}?)({N})(?:[ -]({MAGNITUDE}))? ?({UNIT})([²³23]|\^[23])?(?:/({UNIT})([²³23])?)?"),
        measure,
    );
    rule(rules, &format!(r"({SIGN}?)({N}) ?(k|K|M|m|B|b|bn|T|tn)"), |c, _| {
        // "5 m" is metres and was taken above.
        let size = match &c[3] {
            "k" | "K" => "thousand",
            "M" | "m" => "million",
            "bn" => "billion",
            "tn" => "trillion",
            // "Level 5B"
            _ if !c[2].contains('.') => return None,
            "B" | "b" => "billion",
            _ => "trillion",
        };
        Some(format!("{}{} {size}", minus(&c[1], &c[2]), decimal(&c[2])))
    });
    rule(rules, &format!(r"({N})\^[-−](\d{{1,3}})"), |c, _| {
        Some(format!("{} to the power of minus {}", decimal(&c[1]), quantity(&c[2])))
    });
    // 1.2×10^5
    rule(rules, &format!(r"({SIGN}?)({N}) ?(?:×|\*|x) ?10\^(-?)(\d{{1,3}})"), |c, _| {
        let sign = if c[3].is_empty() { "" } else { "minus " };
        Some(format!("{}{} times ten to the power of {sign}{}", minus(&c[1], &c[2]), decimal(&c[2]), quantity(&c[4])))
    });
    rule(rules, r"(\d+(?:\.\d+)?)[eE]([-+]?)(\d{1,3})", |c, _| {
        let sign = if &c[2] == "-" { "minus " } else { "" };
        Some(format!("{} times ten to the power of {sign}{}", decimal(&c[1]), quantity(&c[3])))
    });
    sums(rules);
}

/// An amount with the comma before its cents: what is no thousand, and stands with a currency.
const COMMA: &str = r"(\d{1,3}(?:\.\d{3})*|\d{1,9}),(\d{2})";

fn money(rules: &mut Vec<Rule>) {
    // "$5M-$10M": each with its size.
    rule(
        rules,
        &format!(
            r"({CURRENCY}) ?({N}) ?({MAGNITUDE}|bn|tn|[kKMBmb]) ?[-–—] ?({CURRENCY}) ?({N}) ?({MAGNITUDE}|bn|tn|[kKMBmb])"
        ),
        |c, _| {
            let one = |at: usize| Some(amount(currency(&c[at])?, &c[at + 1], Some(&c[at + 2])));
            Some(format!("{} to {}", one(1)?, one(4)?))
        },
    );
    // The groups of India.
    rule(rules, &format!(r"({CURRENCY}) ?(\d{{1,2}}(?:,\d{{2}})+,\d{{3}})"), |c, _| {
        Some(amount(currency(&c[1])?, &c[2].replace(',', ""), None))
    });
    rule(rules, &format!(r"({CURRENCY}) ?{COMMA}"), |c, _| {
        Some(amount(currency(&c[1])?, &format!("{}.{}", c[2].replace('.', ""), &c[3]), None))
    });
    rule(rules, &format!(r"{COMMA} ?({CURRENCY})"), |c, _| {
        Some(amount(currency(&c[3])?, &format!("{}.{}", c[1].replace('.', ""), &c[2]), None))
    });
    rule(
        rules,
        &format!(r"({CURRENCY}) ?({N}) ?[-–—] ?(?:{CURRENCY})? ?({N})(?: ?({MAGNITUDE}|bn|[kKMBm]))?"),
        |c, _| {
            let currency = currency(&c[1])?;
            if c.get(4).is_none() && (c[2].contains('.') || c[3].contains('.')) {
                return Some(format!("{} to {}", amount(currency, &c[2], None), amount(currency, &c[3], None)));
            }
            let size = size(c.get(4).map(|size| size.as_str()));
            Some(format!("{} to {}{size} {}", decimal(&c[2]), decimal(&c[3]), currency.names.1))
        },
    );
    rule(
        rules,
        &format!(r"({SIGN}?)({CURRENCY}) ?({SIGN}?)({N})(?:[ -]?({MAGNITUDE}|bn|tn|[kKMBmb]))?(?:/([a-z]{{2,8}}))?"),
        |c, _| {
            let said = amount(currency(&c[2])?, &c[4], c.get(5).map(|size| size.as_str()));
            let minus = if c[1].is_empty() && c[3].is_empty() { "" } else { "minus " };
            Some(format!("{minus}{said}{}", per(c.get(6).map(|per| per.as_str()))))
        },
    );
    rule(rules, &format!(r"({SIGN}?)({N}) ?({MAGNITUDE})? ?({CURRENCY})"), |c, _| {
        let said = amount(currency(&c[4])?, &c[2], c.get(3).map(|size| size.as_str()));
        Some(format!("{}{said}", minus(&c[1], &c[2])))
    });
    rule(rules, r"(\d+)(?:¢|￠)", |c, _| Some(counted(&c[1], "cent", "cents")));
}

/// What begins with a letter: codes of currencies before their amount.
pub(super) fn words(rules: &mut Vec<Rule>) {
    money(rules);
}

fn currency(sign: &str) -> Option<&'static Currency> {
    CURRENCIES.iter().find(|currency| currency.signs.contains(&sign))
}

fn size(sign: Option<&str>) -> String {
    let word = match sign {
        None => return String::new(),
        Some("k" | "K") => "thousand",
        Some("M" | "m") => "million",
        Some("B" | "b" | "bn") => "billion",
        Some("tn") => "trillion",
        Some(word) => word,
    };
    format!(" {word}")
}

fn per(unit: Option<&str>) -> String {
    let word = match unit {
        None => return String::new(),
        Some("mo") => "month",
        Some("ea") => return " each".to_owned(),
        Some("yr") => "year",
        Some("hr") => "hour",
        Some("wk") => "week",
        Some(word) => UNITS.iter().find(|(sign, ..)| *sign == word).map_or(word, |(_, one, _)| one),
    };
    format!(" per {word}")
}

/// Two places behind the point are cents; with more, or with a magnitude, the number is read as it is.
fn amount(currency: &Currency, number: &str, magnitude: Option<&str>) -> String {
    let (one, many) = currency.names;
    if magnitude.is_some() {
        return format!("{}{} {many}", decimal(number), size(magnitude));
    }
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    let part = part.trim_end_matches('0');
    let (cent, cents) = currency.parts;
    if part.is_empty() {
        return counted(whole, one, many);
    }
    if part.len() > 2 || cent.is_empty() {
        return format!("{} {many}", decimal(&format!("{whole}.{part}")));
    }
    let part = format!("{part:0<2}");
    let part = counted(part.trim_start_matches('0'), cent, cents);
    if whole.is_empty() || whole == "0" { part } else { format!("{} {part}", counted(whole, one, many)) }
}

fn counted(number: &str, one: &str, many: &str) -> String {
    format!("{} {}", decimal(number), if number == "1" { one } else { many })
}

fn minus(sign: &str, number: &str) -> &'static str {
    match (sign, number.contains('.')) {
        ("", _) => "",
        (_, true) => "minus ",
        (_, false) => "negative ",
    }
}

fn measure(c: &Captures<'_>, context: &crate::text::scan::Context<'_>) -> Option<String> {
    let (one, many) = unit(c, 4)?;
    let text = &c[0];
    // Words that are units only when nothing stands between: "5 in the box", "1 a", "2 ha".
    let apart = text.trim_end_matches(char::is_alphabetic).ends_with(' ');
    if apart && matches!(&c[4], "in" | "us" | "ac" | "pt" | "bar" | "bit" | "ms" | "mo" | "cal" | "hp") {
        let ends = context.next().is_none_or(|next| matches!(next, '.' | ',' | ')' | ';'));
        (ends || matches!(&c[4], "ms" | "bar" | "bit" | "hp" | "cal")).then_some(())?;
    }
    // "100K users": without a space a thousand, with one the unit of heat.
    if &c[4] == "K" && !apart {
        return None;
    }
    let magnitude = c.get(3).map(|size| format!(" {}", size.as_str())).unwrap_or_default();
    // "a 5 GB file", but "a 50% rise" either way.
    let attributive = matches!(context.last_word(), "a" | "an" | "A" | "An")
        && context.next() == Some(' ')
        && context.next_word().starts_with(char::is_lowercase);
    let unit = if (&c[2] == "1" && magnitude.is_empty()) || attributive { one } else { many };
    let sign = match context.last() {
        _ if c[1].is_empty() => "",
        // A hyphen.
        Some(last) if last.is_alphanumeric() || last == ')' => " ",
        _ => "negative ",
    };
    Some(format!("{sign}{}{magnitude} {unit}", decimal(&c[2])))
}

/// The unit in group `at`, its power behind it, and what it is measured by: one, several.
fn unit(c: &Captures<'_>, at: usize) -> Option<(String, String)> {
    let (one, many) = named(c.get(at)?.as_str())?;
    let power = power(c.get(at + 1).map(|power| power.as_str()), one)?;
    let Some(by) = c.get(at + 2) else { return Some((format!("{power}{one}"), format!("{power}{many}"))) };
    let by_power = self::power(c.get(at + 3).map(|power| power.as_str()), "")?;
    let by = match by.as_str() {
        "s" => "second",
        other => named(other)?.0,
    };
    Some((format!("{power}{one} per {by_power}{by}"), format!("{power}{many} per {by_power}{by}")))
}

/// Whether `sign` is of a unit.
pub(super) fn is_unit(sign: &str) -> bool {
    named(sign).is_some()
}

fn named(sign: &str) -> Option<(&'static str, &'static str)> {
    let sign = sign.replace('º', "°");
    let sign = sign.as_str();
    let sign = if sign.starts_with('°') || sign.starts_with("sq") { sign.replace(' ', "") } else { sign.to_owned() };
    UNITS
        .iter()
        .find(|(known, ..)| known.replace(' ', "") == sign || *known == sign)
        .map(|(_, one, many)| (*one, *many))
}

/// Lengths have squares and cubes; a digit behind another unit is none.
fn power(sign: Option<&str>, unit: &str) -> Option<&'static str> {
    match sign.map(|sign| sign.trim_start_matches('^')) {
        None => Some(""),
        _ if !unit.is_empty() && !unit.ends_with("meter") && !matches!(unit, "foot" | "inch" | "mile" | "yard") => None,
        Some("²" | "2") => Some("square "),
        Some(_) => Some("cubic "),
    }
}

/// Shares: 1/2, 23 4/5, ¾, 2½.
fn vulgar(rules: &mut Vec<Rule>) {
    rule(rules, r"24/7", |_, _| Some("twenty four seven".into()));
    rule(rules, r"24/7/365", |_, _| Some("twenty four seven three sixty five".into()));
    // "80/20": two parts of a hundred.
    rule(rules, r"([1-9]0)/([1-9]0)", |c, _| {
        (number(&c[1]) + number(&c[2]) == 100).then(|| format!("{} {}", quantity(&c[1]), quantity(&c[2])))
    });
    rule(rules, r"9/11", |_, _| Some("nine eleven".into()));
    // "1-1/2 cups", too.
    rule(rules, r"(-?)(\d{1,6})[ -](\d{1,3})[/⁄](\d{1,4})(?:st|nd|rd|th)?", |c, _| {
        (number(&c[3]) < number(&c[4])).then(|| {
            let sign = if c[1].is_empty() { "" } else { "negative " };
            format!("{sign}{} and {}", quantity(&c[2]), part(&c[3], &c[4]))
        })
    });
    // Numbers of files and the like: three and more are no share.
    rule(rules, r"\d{1,7}(?:/\d{1,7}){2,5}", |c, _| {
        Some(c[0].split('/').map(quantity).collect::<Vec<_>>().join(" slash "))
    });
    rule(rules, r"(-?)(\d{1,6})[/⁄](\d{1,6})(?:st|nd|rds?|ths?)?", |c, context| {
        let sign = match context.last() {
            _ if c[1].is_empty() => "",
            // A hyphen.
            Some(last) if last.is_alphanumeric() => " ",
            _ => "negative ",
        };
        (number(&c[3]) > 1).then(|| format!("{sign}{}", fraction(&c[2], &c[3])))
    });
    loose(rules, r"(\d{0,6}) ?([½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞])", |c, _| {
        let share = vulgar_parts(&c[2]);
        Some(match &c[1] {
            "" => fraction(share.0, share.1),
            whole => format!("{} and {}", quantity(whole), part(share.0, share.1)),
        })
    });
}

/// Parts of units, and from one part to another: "4 1/2 lbs", "1/2 tsp. of", "1/4-1/2 cup".
fn recipes(rules: &mut Vec<Rule>) {
    const SHARE: &str = r"(?:(\d{1,6})(?:[ -](\d{1,2})[/⁄](\d{1,2})| ?([½⅓⅔¼¾⅛]))|(\d{1,2})[/⁄](\d{1,2})|([½⅓⅔¼¾⅛]))";
    /// The amount that the groups from `from` are, if it is one.
    fn amount(c: &Captures<'_>, from: usize) -> Option<String> {
        let group = |at: usize| c.get(from + at).map(|group| group.as_str());
        let (top, bottom) = match group(3).or(group(6)) {
            Some(sign) => vulgar_parts(sign),
            None => (group(1).or(group(4))?, group(2).or(group(5))?),
        };
        let share = number(top) > 0 && number(top) < number(bottom) && !top.starts_with('0');
        share.then(|| match group(0) {
            Some(whole) => format!("{} and {}", quantity(whole), part(top, bottom)),
            None => fraction(top, bottom),
        })
    }
    rule(rules, &format!("{SHARE} ?[-–] ?{SHARE}(?: ?({UNIT}))?"), |c, _| {
        let unit = match c.get(15) {
            Some(unit) => format!(" {}", named(unit.as_str())?.1),
            None => String::new(),
        };
        Some(format!("{} to {}{unit}", amount(c, 1)?, amount(c, 8)?))
    });
    rule(rules, &format!("{SHARE} ?[-–] ?{SHARE}"), |c, _| Some(format!("{} to {}", amount(c, 1)?, amount(c, 8)?)));
    // The stop of a shortened unit, where the sentence goes on.
    const SHORT: &str = r"(tsps?|tbsps?|oz|lbs?|hrs?|mins?|secs?|yrs?|ft|pt|gal)\. ";
    loose(rules, &format!("(?:{SHARE}|({N})) ?{SHORT}"), |c, context| {
        let (one, many) = named(&c[9]).filter(|_| context.next().is_some_and(char::is_lowercase))?;
        let single = c.get(8).map_or(c.get(1).is_none(), |whole| whole.as_str() == "1");
        let said = c.get(8).map_or_else(|| amount(c, 1), |whole| Some(decimal(whole.as_str())))?;
        Some(format!("{said} {} ", if single { one } else { many }))
    });
    rule(rules, &format!("{SHARE} ?({UNIT})"), |c, _| {
        let (one, many) = named(&c[8]).filter(|_| &c[8] != "%")?;
        Some(format!("{} {}", amount(c, 1)?, if c.get(1).is_none() { one } else { many }))
    });
}

/// The parts of a sign.
fn vulgar_parts(sign: &str) -> (&'static str, &'static str) {
    match sign {
        "½" => ("1", "2"),
        "⅓" => ("1", "3"),
        "⅔" => ("2", "3"),
        "¼" => ("1", "4"),
        "¾" => ("3", "4"),
        "⅕" => ("1", "5"),
        "⅖" => ("2", "5"),
        "⅗" => ("3", "5"),
        "⅘" => ("4", "5"),
        "⅙" => ("1", "6"),
        "⅚" => ("5", "6"),
        "⅛" => ("1", "8"),
        "⅜" => ("3", "8"),
        "⅝" => ("5", "8"),
        _ => ("7", "8"),
    }
}

/// Behind a whole number one half is "a half".
fn part(top: &str, bottom: &str) -> String {
    if (top, bottom) == ("1", "2") { "a half".into() } else { fraction(top, bottom) }
}

fn sums(rules: &mut Vec<Rule>) {
    // A whole sum: at least one sign of it is no hyphen.
    loose(rules, &format!(r"({N})(?: ?([-+*×x÷/^=−±≤≥≦≧≠≈∗∙⋅∕<>]) ?({N}))+"), |c, context| {
        let text = &c[0];
        let certain = text
            .contains(['+', '×', '÷', '=', '*', '^', '±', '≤', '≥', '≦', '≧', '≠', '≈', '∗', '∙', '⋅', '∕', '<', '>'])
            || text.contains(" x ")
            || is_product(text);
        let carried = context.next().is_some_and(char::is_alphanumeric);
        (certain && !carried).then(|| sum(text))
    });
    rule(rules, &format!(r"\+({N})"), |c, _| Some(format!("plus {}", decimal(&c[1]))));
    rule(rules, &format!(r"±({N})"), |c, _| Some(format!("plus or minus {}", decimal(&c[1]))));
    loose(rules, "~", |_, context| {
        let apart = context.last().is_none_or(|last| last.is_whitespace() || last == '(');
        (apart && context.next().is_some_and(|next| next.is_ascii_digit() || "$€£".contains(next)))
            .then(|| "about ".into())
    });
    rule(rules, &format!(r"([<>≤≥]=?) ?({N})"), |c, _| {
        let word = match &c[1] {
            "<" => "less than",
            ">" => "greater than",
            "≤" | "<=" => "less than or equal to",
            _ => "greater than or equal to",
        };
        Some(format!("{word} {}", decimal(&c[2])))
    });
    // Spans of bare numbers.
    rule(rules, &format!(r"({N}) ?[-–—] ?({N})"), |c, _| {
        let short = |text: &str| text.trim_end_matches(char::is_numeric).len() + 6 >= text.len();
        (short(&c[1]) && short(&c[2])).then(|| format!("{} to {}", decimal(&c[1]), decimal(&c[2])))
    });
    rule(rules, r"(\d+)(?:st|nd|rd|th) ?[-–—] ?(\d+)(?:st|nd|rd|th)", |c, _| {
        Some(format!("{} to {}", ordinal(number(&c[1])), ordinal(number(&c[2]))))
    });
    rule(rules, r"(\d{1,9})(?:st|nd|rd|th) ?/ ?(\d{1,9})(?:st|nd|rd|th)", |c, _| {
        Some(format!("{} or {}", ordinal(number(&c[1])), ordinal(number(&c[2]))))
    });
    rule(rules, r"(\d{1,3}(?:,\d{3})+|\d{1,30})(?:st|nd|rd|th|ᵗʰ)", |c, _| {
        let bare: String = c[1].chars().filter(char::is_ascii_digit).collect();
        Some(ordinal(bare.parse().ok()?))
    });
    rule(rules, &format!(r"({SIGN}?)({N})[ -]({MAGNITUDE})"), |c, _| {
        Some(format!("{}{} {}", minus(&c[1], &c[2]), decimal(&c[2]), &c[3]))
    });
}

/// What a letter behind a number multiplies it by.
fn thousands(letter: &str) -> Option<&'static str> {
    Some(match letter {
        "k" | "K" => "thousand",
        "M" => "million",
        "B" | "bn" => "billion",
        _ => return None,
    })
}

/// "3x4", but not "0x41".
fn is_product(text: &str) -> bool {
    text.contains('x') && !text.starts_with('0')
}

fn sum(text: &str) -> String {
    let mut said = String::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let end = rest.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == ',')).unwrap_or(rest.len());
        let (word, length) = match c {
            c if c.is_ascii_digit() || c == '.' => (decimal(&rest[..end]), end),
            '+' => ("plus".into(), 1),
            '-' | '−' => ("minus".into(), c.len_utf8()),
            '*' | '×' | 'x' | '∗' | '∙' | '⋅' => ("times".into(), c.len_utf8()),
            '÷' | '/' | '∕' => ("divided by".into(), c.len_utf8()),
            '±' => ("plus or minus".into(), c.len_utf8()),
            '≤' | '≦' => ("less than or equal to".into(), c.len_utf8()),
            '≥' | '≧' => ("greater than or equal to".into(), c.len_utf8()),
            '<' => ("less than".into(), 1),
            '>' => ("greater than".into(), 1),
            '≠' => ("is not equal to".into(), c.len_utf8()),
            '≈' => ("is approximately".into(), c.len_utf8()),
            '^' => ("to the power of".into(), 1),
            '=' => ("equals".into(), 1),
            _ => (String::new(), c.len_utf8()),
        };
        if !word.is_empty() {
            if !said.is_empty() {
                said.push(' ');
            }
            said.push_str(&word);
        }
        rest = &rest[length.max(1)..];
    }
    said
}
