//! What the rules of Chinese and Japanese share: numbers written in groups of ten thousand, addresses character by
//! character, sums.

use super::scan::{End, Rule, Say};

/// A number: 1,234.5, 12.
pub(super) const NUMBER: &str = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?)";

/// What the shared rules need of a language.
pub(super) trait Characters: 'static {
    /// The digits from zero.
    const DIGITS: [char; 10];
    /// Numbers with more digits are read digit by digit.
    const LONGEST: usize;
    /// The signs of addresses in words.
    const SIGNS: &'static [(char, &'static str)];
    /// Before a negative number.
    const MINUS: &'static str;
    /// What stands between the ends of a span, as a class of a pattern.
    const RANGE: &'static str;
    /// From one to the other.
    const TO: &'static str;
    /// Between a whole number and a part.
    const AND: &'static str;
    /// Between the parts of a fraction, of which the one below stands first.
    const PARTS: &'static str;
    /// Units by their sign.
    const UNITS: &'static [(&'static str, &'static str)];

    /// A number as a quantity.
    fn cardinal(n: u128) -> String;

    /// The digits of a year.
    fn year(digits: &str) -> String;

    /// A digit of an address.
    fn address_digit(digit: &str) -> String;

    /// The words of an operator: between its numbers, and after the second.
    fn operator(sign: &str) -> Option<(&'static str, &'static str)>;
}

/// A rule whose match no digit follows.
pub(super) fn rule(rules: &mut Vec<Rule>, pattern: &str, say: Say) {
    rules.push(Rule::new(pattern, End::Number, say));
}

/// A rule whose match anything may follow.
pub(super) fn loose(rules: &mut Vec<Rule>, pattern: &str, say: Say) {
    rules.push(Rule::new(pattern, End::Any, say));
}

/// Digits as a value; one that no integer holds is larger than any limit that it is compared to.
pub(super) fn number(text: &str) -> u128 {
    text.parse().unwrap_or(u128::MAX)
}

/// Digits one by one.
pub(super) fn digits<C: Characters>(text: &str) -> String {
    text.chars().filter_map(|c| C::DIGITS.get(c.to_digit(10)? as usize)).collect()
}

/// `n` in groups of ten thousand, the lowest first.
pub(super) fn groups(n: u128) -> Vec<u64> {
    let (mut groups, mut rest) = (Vec::new(), n);
    while rest > 0 {
        groups.push((rest % 10_000) as u64);
        rest /= 10_000;
    }
    groups
}

/// Digits, with or without thousands separators and a point, as a quantity; those with a leading zero and very long
/// ones one by one.
pub(super) fn quantity<C: Characters>(text: &str) -> String {
    let (whole, part) = text.split_once('.').map_or((text, None), |(whole, part)| (whole, Some(part)));
    let bare: String = whole.chars().filter(char::is_ascii_digit).collect();
    let coded = bare.len() > 1 && bare.starts_with('0');
    let said = match bare.parse() {
        Ok(n) if !coded && bare.len() <= C::LONGEST => C::cardinal(n),
        Err(_) if bare.is_empty() => C::DIGITS[0].into(),
        _ => digits::<C>(&bare),
    };
    match part {
        Some(part) => format!("{said}点{}", digits::<C>(part)),
        None => said,
    }
}

/// The word for the sign before a number, if there is one.
pub(super) fn minus<C: Characters>(sign: &str) -> &'static str {
    if sign.is_empty() { "" } else { C::MINUS }
}

/// Mail and web addresses.
pub(super) fn link<C: Characters>(rules: &mut Vec<Rule>) {
    loose(rules, r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63})*\.[A-Za-z]{2,12}", |c, _| {
        Some(address::<C>(&c[0]))
    });
    loose(rules, r"https?://([A-Za-z0-9_.~:/?#&=%+-]{2,160})", |c, _| {
        Some(address::<C>(c[1].trim_end_matches(['.', ',', '?', '/'])))
    });
    loose(rules, r"www\.[A-Za-z0-9-]+(?:\.[A-Za-z]{2,12})+(?:/[A-Za-z0-9_.~%#?&=+-]*)*", |c, _| {
        Some(address::<C>(&c[0]))
    });
}

fn address<C: Characters>(text: &str) -> String {
    let mut said = String::new();
    for c in text.chars() {
        match C::SIGNS.iter().find(|(sign, _)| *sign == c) {
            Some((_, word)) => said.push_str(word),
            None if c.is_ascii_digit() => said.push_str(&C::address_digit(c.encode_utf8(&mut [0; 4]))),
            None => said.push(c),
        }
    }
    said
}

/// Four numbers with points between.
pub(super) fn internet_address<C: Characters>(rules: &mut Vec<Rule>) {
    rule(rules, r"\d{1,3}(?:\.\d{1,3}){3}", |c, _| {
        Some(c[0].split('.').map(digits::<C>).collect::<Vec<_>>().join("点"))
    });
}

/// A date; `None` where month or day is none.
pub(super) fn date<C: Characters>(of: Option<&str>, month: &str, day: Option<&str>) -> Option<String> {
    let n = number(month);
    (1..=12).contains(&n).then_some(())?;
    let mut said = of.map(|of| format!("{}年", C::year(of))).unwrap_or_default();
    said.push_str(&format!("{}月", C::cardinal(n)));
    if let Some(day) = day {
        let n = number(day);
        (1..=31).contains(&n).then_some(())?;
        said.push_str(&format!("{}日", C::cardinal(n)));
    }
    Some(said)
}

/// Year, month and day, and spans of them.
pub(super) fn full_dates<C: Characters>(rules: &mut Vec<Rule>) {
    let range = C::RANGE;
    rule(
        rules,
        &format!(r"(\d{{4}})([-/.])(\d{{1,2}})[-/.](\d{{1,2}}) ?{range} ?(\d{{4}})[-/.](\d{{1,2}})[-/.](\d{{1,2}})"),
        |c, _| {
            let from = date::<C>(Some(&c[1]), &c[3], Some(&c[4]))?;
            Some(format!("{from}{}{}", C::TO, date::<C>(Some(&c[5]), &c[6], Some(&c[7]))?))
        },
    );
    rule(rules, r"(\d{4})([-/.·])(\d{1,2})([-/.·])(\d{1,2})", |c, _| {
        (c[2] == c[4]).then(|| date::<C>(Some(&c[1]), &c[3], Some(&c[5]))).flatten()
    });
}

/// A year of two digits, month and day: "24/1/30".
pub(super) fn short_dates<C: Characters>(rules: &mut Vec<Rule>) {
    rule(rules, r"(\d{2})/(\d{1,2})/(\d{1,2})", |c, _| date::<C>(Some(&c[1]), &c[2], Some(&c[3])));
}

/// Year and month, and month and day, with zeros that tell them from other numbers.
pub(super) fn partial_dates<C: Characters>(rules: &mut Vec<Rule>) {
    rule(rules, r"((?:1[5-9]|20)\d{2})[-/.](0[1-9]|1[0-2])", |c, _| date::<C>(Some(&c[1]), &c[2], None));
    rule(rules, r"(0[1-9]|1[0-2])[-/.]((?:1[5-9]|20)\d{2})", |c, _| date::<C>(Some(&c[2]), &c[1], None));
    rule(rules, r"(0[1-9])[-/.](0[1-9]|[12]\d|3[01])", |c, _| date::<C>(None, &c[1], Some(&c[2])));
    rule(rules, r"(1[0-2])/(0[1-9]|[12]\d|3[01])", |c, _| date::<C>(None, &c[1], Some(&c[2])));
}

/// Signs of fractions, the part above and the one below.
const FRACTIONS: [(&str, u128, u128); 9] = [
    ("½", 1, 2),
    ("⅓", 1, 3),
    ("⅔", 2, 3),
    ("¼", 1, 4),
    ("¾", 3, 4),
    ("⅕", 1, 5),
    ("⅛", 1, 8),
    ("⅜", 3, 8),
    ("⅝", 5, 8),
];

/// A fraction behind a whole number, and one that is a single sign: "1 1/2", "2½", "¾".
pub(super) fn mixed<C: Characters>(rules: &mut Vec<Rule>) {
    rule(rules, r"(\d{1,3})(?: |と|又)(\d{1,2})[/⁄](\d{1,2})|(\d{0,3}) ?([½⅓⅔¼¾⅕⅛⅜⅝])", |c, _| {
        let (whole, top, bottom) = match c.get(5) {
            Some(sign) => {
                FRACTIONS.iter().find(|(known, ..)| *known == sign.as_str()).map(|(_, t, b)| (&c[4], *t, *b))?
            }
            None => (&c[1], number(&c[2]), number(&c[3])),
        };
        (0 < top && top < bottom).then_some(())?;
        let whole = if whole.is_empty() { String::new() } else { quantity::<C>(whole) + C::AND };
        Some(format!("{whole}{}{}{}", C::cardinal(bottom), C::PARTS, C::cardinal(top)))
    });
}

/// A Roman numeral that numbers what follows it: "第III章", "第Ⅳ卷".
pub(super) fn roman<C: Characters>(rules: &mut Vec<Rule>) {
    const SIGNS: [char; 12] = ['Ⅰ', 'Ⅱ', 'Ⅲ', 'Ⅳ', 'Ⅴ', 'Ⅵ', 'Ⅶ', 'Ⅷ', 'Ⅸ', 'Ⅹ', 'Ⅺ', 'Ⅻ'];
    loose(
        rules,
        r"第?([IVX]{1,6}|[Ⅰ-Ⅻ])([章节節卷巻部篇编編届回集幕条期类類级級型度代]|阶段)",
        |c, _| {
            // Letters without the sign before them may be a name.
            let sure = c[0].starts_with('第') || !c[1].is_ascii();
            sure.then_some(())?;
            let before = if c[0].starts_with('第') { "第" } else { "" };
            let sign = SIGNS.iter().position(|sign| c[1].starts_with(*sign)).map(|at| at as u128 + 1);
            Some(format!("{before}{}{}", C::cardinal(sign.or_else(|| super::en::roman(&c[1]))?), &c[2]))
        },
    );
}

/// More points than a number has: a version.
pub(super) fn version<C: Characters>(rules: &mut Vec<Rule>) {
    rule(rules, r"\d+(?:\.\d+){2,5}", |c, _| Some(c[0].split('.').map(quantity::<C>).collect::<Vec<_>>().join("点")));
}

/// A unit by its sign; only lengths have powers. `renamed`: the name that a length has before a power, where it is
/// another one.
pub(super) fn unit<C: Characters>(sign: &str, power: Option<&str>, renamed: &[(&str, &str)]) -> Option<String> {
    let bare = sign.replace(' ', "");
    let name = C::UNITS.iter().find(|(known, _)| *known == bare)?.1;
    Some(match power {
        None => name.to_owned(),
        Some(power) if bare.ends_with('m') => {
            let name = renamed.iter().find(|(known, _)| *known == name).map_or(name, |(_, other)| other);
            format!("{}{name}", if matches!(power, "²" | "2") { "平方" } else { "立方" })
        }
        Some(_) => return None,
    })
}

/// A number with its sign, and the operators and numbers behind it.
pub(super) fn sum<C: Characters>(sign: &str, first: &str, rest: &str) -> Option<String> {
    let mut said = format!("{}{}", minus::<C>(sign), quantity::<C>(first));
    let mut rest = rest;
    while !rest.is_empty() {
        let text = rest.trim_start();
        let end = text.find(|c: char| c.is_ascii_digit() || c == ' ')?;
        // A minus after an operator belongs to the number.
        let (sign, negative) = match text[..end].strip_suffix('-') {
            Some(sign) if !sign.is_empty() => (sign, C::MINUS),
            _ => (&text[..end], ""),
        };
        let (between, after) = C::operator(sign)?;
        let text = text[end..].trim_start();
        let (text, negative) = text.strip_prefix('-').map_or((text, negative), |text| (text, C::MINUS));
        let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == ',')).unwrap_or(text.len());
        said.push_str(&format!("{between}{negative}{}{after}", quantity::<C>(&text[..end])));
        rest = &text[end..];
    }
    Some(said)
}
