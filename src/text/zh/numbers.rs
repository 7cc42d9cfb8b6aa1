//! Chinese numbers in characters, and the words of the rules that Chinese shares with Japanese.

use super::tables::UNITS;
use crate::text::characters::{self, Characters};

const GROUPS: [&str; 6] = ["", "万", "亿", "万亿", "亿亿", "万亿亿"];
/// The language, for the rules that it shares with Japanese.
pub(super) struct Chinese;

impl Characters for Chinese {
    const DIGITS: [char; 10] = ['零', '一', '二', '三', '四', '五', '六', '七', '八', '九'];
    const LONGEST: usize = 16;
    const SIGNS: &'static [(char, &'static str)] = &[
        ('.', "点"),
        ('@', "艾特"),
        ('/', "斜杠"),
        ('-', "杠"),
        ('_', "下划线"),
        (':', "冒号"),
        ('?', "问号"),
        ('=', "等于"),
        ('&', "和"),
        ('#', "井号"),
        ('%', "百分号"),
        ('~', "波浪号"),
        ('+', "加"),
    ];
    const MINUS: &'static str = "负";
    const RANGE: &'static str = "[-~～—–至到]";
    const TO: &'static str = "到";
    const AND: &'static str = "又";
    const PARTS: &'static str = "分之";
    const UNITS: &'static [(&'static str, &'static str)] = UNITS;

    fn cardinal(n: u128) -> String {
        cardinal(n)
    }

    fn year(digits: &str) -> String {
        self::digits(digits)
    }

    fn address_digit(digit: &str) -> String {
        digits(digit)
    }

    fn operator(sign: &str) -> Option<(&'static str, &'static str)> {
        let word = match sign {
            "+" => "加",
            "-" | "−" => "减",
            "*" | "×" | "x" => "乘",
            "÷" => "除以",
            "=" => "等于",
            "≠" | "!=" => "不等于",
            "≈" => "约等于",
            "<" => "小于",
            ">" => "大于",
            "≤" | "<=" => "小于等于",
            "≥" | ">=" => "大于等于",
            _ => return None,
        };
        Some((word, ""))
    }
}

/// One by one.
pub(super) fn digits(text: &str) -> String {
    characters::digits::<Chinese>(text)
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
            said.push(Chinese::DIGITS[digit as usize]);
        }
        said.push_str(unit);
    }
    said
}

/// A number as a quantity.
pub(in crate::text) fn cardinal(n: u128) -> String {
    if n == 0 {
        return "零".into();
    }
    let mut said = String::new();
    let mut gap = false;
    for (place, value) in characters::groups(n).iter().enumerate().rev() {
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

/// Digits, with or without thousands separators and a point, as a quantity.
pub(super) fn quantity(text: &str) -> String {
    characters::quantity::<Chinese>(text)
}

/// As [`quantity`], before a word that counts: two is 两 there.
pub(super) fn counted(text: &str) -> String {
    if text == "2" { "两".into() } else { quantity(text) }
}
