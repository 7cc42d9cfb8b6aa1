//! Chinese numbers in characters.

const DIGITS: [char; 10] = ['零', '一', '二', '三', '四', '五', '六', '七', '八', '九'];
const GROUPS: [&str; 6] = ["", "万", "亿", "万亿", "亿亿", "万亿亿"];
/// Longer numbers are read digit by digit.
const LONGEST: usize = 16;

/// One by one.
pub(super) fn digits(text: &str) -> String {
    text.chars().filter_map(|c| DIGITS.get(c.to_digit(10)? as usize)).collect()
}

/// One by one, with a one that cannot be misheard, as telephone numbers are read.
pub(super) fn phone(text: &str) -> String {
    digits(text).replace('一', "幺")
}

/// Less than ten thousand.
fn group(n: u64, head: bool) -> String {
    let mut said = String::new();
    let mut skipped = false;
    for (place, unit) in [(1_000, "千"), (100, "百"), (10, "十"), (1, "")] {
        let digit = n / place % 10;
        if digit == 0 {
            skipped = true;
            continue;
        }
        if skipped && (!said.is_empty() || !head) {
            said.push('零');
        }
        skipped = false;
        // A ten that begins the number has no one before it.
        if !(digit == 1 && place == 10 && said.is_empty() && head) {
            said.push(DIGITS[digit as usize]);
        }
        said.push_str(unit);
    }
    said
}

/// A number as a quantity.
pub(super) fn cardinal(n: u128) -> String {
    if n == 0 {
        return "零".into();
    }
    let mut groups = Vec::new();
    let mut rest = n;
    while rest > 0 {
        groups.push((rest % 10_000) as u64);
        rest /= 10_000;
    }
    let mut said = String::new();
    let mut gap = false;
    for (place, value) in groups.iter().enumerate().rev() {
        if *value == 0 {
            gap = !said.is_empty();
            continue;
        }
        let head = said.is_empty();
        let words = group(*value, head);
        if gap && !words.starts_with('零') {
            said.push('零');
        }
        gap = false;
        said.push_str(&words);
        said.push_str(GROUPS.get(place).copied().unwrap_or_default());
    }
    // Two of the largest unit is 两.
    let mut chars = said.chars();
    match (chars.next(), chars.next()) {
        (Some('二'), Some('百' | '千' | '万' | '亿')) => said.replacen('二', "两", 1),
        _ => said,
    }
}

/// Digits, with or without thousands separators and a point, as a quantity; those with a leading zero and very long
/// ones one by one.
pub(super) fn quantity(text: &str) -> String {
    let (whole, part) = text.split_once('.').map_or((text, None), |(whole, part)| (whole, Some(part)));
    let bare: String = whole.chars().filter(char::is_ascii_digit).collect();
    let coded = bare.len() > 1 && bare.starts_with('0');
    let said = match bare.parse() {
        Ok(n) if !coded && bare.len() <= LONGEST => cardinal(n),
        Err(_) if bare.is_empty() => "零".into(),
        _ => digits(&bare),
    };
    match part {
        Some(part) => format!("{said}点{}", digits(part)),
        None => said,
    }
}

/// As [`quantity`], before a word that counts: two is 两 there.
pub(super) fn counted(text: &str) -> String {
    if text == "2" { "两".into() } else { quantity(text) }
}
