//! English numbers in words.

use crate::text::english::{GROUPS, SMALL, TENS};

/// Longer numbers are read digit by digit.
const LONGEST: usize = 24;

/// Less than a hundred.
fn tens(n: u64) -> String {
    let (ten, one) = (n / 10 % 10, n % 10);
    match (n, one) {
        (0..20, _) => SMALL[n as usize].into(),
        (_, 0) => TENS[ten as usize].into(),
        _ => format!("{} {}", TENS[ten as usize], SMALL[one as usize]),
    }
}

/// Less than a thousand; `and` before the tens.
fn hundreds(n: u64, and: bool) -> String {
    let (hundred, rest) = (n / 100, n % 100);
    let and = if and { " and " } else { " " };
    match (hundred, rest) {
        (0, _) => tens(rest),
        (_, 0) => format!("{} hundred", SMALL[hundred as usize]),
        _ => format!("{} hundred{and}{}", SMALL[hundred as usize], tens(rest)),
    }
}

/// A number as a quantity: "one hundred one thousand one hundred and eleven".
pub(in crate::text) fn cardinal(n: u128) -> String {
    if n == 0 {
        return SMALL[0].into();
    }
    let (mut parts, mut rest, mut group) = (Vec::new(), n, 0);
    while rest > 0 {
        let value = (rest % 1_000) as u64;
        if value > 0 {
            let mut words = hundreds(value, group == 0);
            match GROUPS.get(group).copied().unwrap_or_default() {
                "" if value < 100 && n >= 1_000 => words.insert_str(0, "and "),
                "" => {}
                name => words = format!("{words} {name}"),
            }
            parts.push(words);
        }
        (rest, group) = (rest / 1_000, group + 1);
    }
    parts.reverse();
    parts.join(" ")
}

/// Digits, with or without thousands separators, as a quantity; those with a leading zero and very long ones one by
/// one.
pub(super) fn quantity(text: &str) -> String {
    let bare: String = text.chars().filter(char::is_ascii_digit).collect();
    let coded = bare.len() > 1 && bare.starts_with('0');
    match bare.parse() {
        Ok(n) if !coded && bare.len() <= LONGEST => cardinal(n),
        _ => digits(&bare, "oh"),
    }
}

/// One by one; a zero is `zero`, "oh" or "zero".
pub(super) fn digits(text: &str, zero: &str) -> String {
    let word = |c: char| match c.to_digit(10) {
        Some(0) => Some(zero),
        Some(d) => Some(SMALL[d as usize]),
        None => None,
    };
    text.chars().filter_map(word).collect::<Vec<_>>().join(" ")
}

/// "3.05", ".5", "1,234.5": the point is said, what follows it one by one.
pub(super) fn decimal(text: &str) -> String {
    let Some((whole, part)) = text.split_once('.') else { return quantity(text) };
    let part = if part == "0" { SMALL[0].to_owned() } else { digits(part, "oh") };
    if whole.is_empty() { format!("point {part}") } else { format!("{} point {part}", quantity(whole)) }
}

/// "twenty first".
pub(in crate::text) fn ordinal(n: u128) -> String {
    let words = cardinal(n);
    let (head, last) = words.rsplit_once(' ').map_or(("", words.as_str()), |(head, last)| (head, last));
    let last = match last {
        "one" => "first".to_owned(),
        "two" => "second".into(),
        "three" => "third".into(),
        "five" => "fifth".into(),
        "eight" => "eighth".into(),
        "nine" => "ninth".into(),
        "twelve" => "twelfth".into(),
        other => match other.strip_suffix('y') {
            Some(stem) => format!("{stem}ieth"),
            None => format!("{other}th"),
        },
    };
    if head.is_empty() { last } else { format!("{head} {last}") }
}

/// As a year is read: "nineteen oh five", "two thousand five", "twenty twelve".
pub(in crate::text) fn year(n: u128) -> String {
    let (century, rest) = ((n / 100) as u64, (n % 100) as u64);
    match (n, rest) {
        (0..1_000, _) | (10_000.., _) | (2_000..2_010, _) => cardinal(n).replace(" and ", " "),
        (_, 0) if century.is_multiple_of(10) => cardinal(n),
        (_, 0) => format!("{} hundred", tens(century)),
        (_, 1..10) => format!("{} oh {}", tens(century), tens(rest)),
        _ => format!("{} {}", tens(century), tens(rest)),
    }
}

/// In pairs, as house numbers: "twenty seven eighty eight", "one twenty three", "two hundred".
pub(super) fn pairs(text: &str) -> String {
    let n: u128 = text.parse().unwrap_or_default();
    match n {
        0..100 => cardinal(n),
        100..1_000 if n.is_multiple_of(100) => cardinal(n),
        100..1_000 if n % 100 < 10 => format!("{} oh {}", cardinal(n / 100), cardinal(n % 100)),
        100..1_000 => format!("{} {}", cardinal(n / 100), cardinal(n % 100)),
        1_000..10_000 if !n.is_multiple_of(1_000) => year(n),
        1_000..10_000 => cardinal(n),
        _ => digits(text, "oh"),
    }
}

/// The last word in the plural: "seventies", "fifths".
pub(super) fn plural(words: &str) -> String {
    match words.strip_suffix('y') {
        Some(stem) => format!("{stem}ies"),
        None if words.ends_with('x') => format!("{words}es"),
        None => format!("{words}s"),
    }
}

/// "one half", "three quarters", "twenty three forty fourths".
pub(super) fn fraction(top: &str, bottom: &str) -> String {
    let n: u128 = top.parse().unwrap_or_default();
    let below = match bottom.parse() {
        Ok(2) if n == 1 => return "one half".into(),
        Ok(2) => return format!("{} halves", quantity(top)),
        Ok(4) => "quarter".to_owned(),
        Ok(bottom) => ordinal(bottom),
        Err(_) => return format!("{} over {}", quantity(top), quantity(bottom)),
    };
    format!("{} {}", quantity(top), if n == 1 { below } else { plural(&below) })
}
