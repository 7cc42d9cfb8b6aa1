//! Japanese numbers in kanji.

const DIGITS: [char; 10] = ['〇', '一', '二', '三', '四', '五', '六', '七', '八', '九'];
const GROUPS: [&str; 5] = ["", "万", "億", "兆", "京"];
/// Longer numbers are read digit by digit.
const LONGEST: usize = 20;

/// One by one.
pub(super) fn digits(text: &str) -> String {
    text.chars().filter_map(|c| DIGITS.get(c.to_digit(10)? as usize)).collect()
}

/// One by one, as telephone numbers are read.
pub(super) fn phone(text: &str) -> String {
    digits(text).replace('〇', "ゼロ")
}

/// A number as a quantity: hundreds and tens have no one before them, thousands only before a larger unit.
pub(super) fn cardinal(n: u128) -> String {
    if n == 0 {
        return DIGITS[0].into();
    }
    let (mut groups, mut rest) = (Vec::new(), n);
    while rest > 0 {
        groups.push((rest % 10_000) as u64);
        rest /= 10_000;
    }
    let mut said = String::new();
    for (place, value) in groups.iter().enumerate().rev() {
        for (unit, name) in [(1_000, "千"), (100, "百"), (10, "十"), (1, "")] {
            let digit = value / unit % 10;
            if digit == 0 {
                continue;
            }
            if digit > 1 || unit == 1 || (unit == 1_000 && place > 0) {
                said.push(DIGITS[digit as usize]);
            }
            said.push_str(name);
        }
        if *value > 0 {
            said.push_str(GROUPS.get(place).copied().unwrap_or_default());
        }
    }
    said
}

/// Digits, with or without thousands separators and a point, as a quantity; those with a leading zero and very long
/// ones one by one.
pub(super) fn quantity(text: &str) -> String {
    let (whole, part) = text.split_once('.').map_or((text, None), |(whole, part)| (whole, Some(part)));
    let bare: String = whole.chars().filter(char::is_ascii_digit).collect();
    let coded = bare.len() > 1 && bare.starts_with('0');
    let said = match bare.parse() {
        Ok(n) if !coded && bare.len() <= LONGEST => cardinal(n),
        _ => digits(&bare),
    };
    match part {
        Some(part) => format!("{said}点{}", digits(part)),
        None => said,
    }
}
