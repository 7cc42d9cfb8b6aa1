//! Japanese numbers in kanji, and the words of the rules that Japanese shares with Chinese.

use super::tables::UNITS;
use crate::text::characters::{self, Characters};

const GROUPS: [&str; 5] = ["", "万", "億", "兆", "京"];
/// The language, for the rules that it shares with Chinese.
pub(super) struct Japanese;

impl Characters for Japanese {
    const DIGITS: [char; 10] = ['〇', '一', '二', '三', '四', '五', '六', '七', '八', '九'];
    const LONGEST: usize = 20;
    const SIGNS: &'static [(char, &'static str)] = &[
        ('.', "ドット"),
        ('@', "アットマーク"),
        ('/', "スラッシュ"),
        ('-', "ハイフン"),
        ('_', "アンダーバー"),
        (':', "コロン"),
        ('?', "クエスチョン"),
        ('=', "イコール"),
        ('&', "アンド"),
        ('#', "シャープ"),
        ('%', "パーセント"),
        ('~', "チルダ"),
        ('+', "プラス"),
    ];
    const MINUS: &'static str = "マイナス";
    const RANGE: &'static str = "[-~～〜—–]";
    const TO: &'static str = "から";
    const AND: &'static str = "と";
    const PARTS: &'static str = "分の";
    const UNITS: &'static [(&'static str, &'static str)] = UNITS;

    fn cardinal(n: u128) -> String {
        cardinal(n)
    }

    fn year(digits: &str) -> String {
        cardinal(characters::number(digits))
    }

    fn address_digit(digit: &str) -> String {
        phone(digit)
    }

    fn operator(sign: &str) -> Option<(&'static str, &'static str)> {
        Some(match sign {
            "+" => ("プラス", ""),
            "-" | "−" => ("マイナス", ""),
            "*" | "×" => ("カケル", ""),
            "÷" => ("ワル", ""),
            "=" => ("イコール", ""),
            "≠" | "!=" => ("ノットイコール", ""),
            "≈" => ("ニアリーイコール", ""),
            // The names of the signs, which a chain of them keeps: "3≥2≥1".
            "<" => ("小なり", ""),
            ">" => ("大なり", ""),
            "≤" | "<=" => ("小なりイコール", ""),
            "≥" | ">=" => ("大なりイコール", ""),
            _ => return None,
        })
    }
}

/// One by one.
pub(super) fn digits(text: &str) -> String {
    characters::digits::<Japanese>(text)
}

/// One by one, as telephone numbers are read.
pub(super) fn phone(text: &str) -> String {
    digits(text).replace('〇', "ゼロ")
}

/// A number as a quantity: hundreds and tens have no one before them, thousands only before a larger unit.
pub(in crate::text) fn cardinal(n: u128) -> String {
    if n == 0 {
        return Japanese::DIGITS[0].into();
    }
    let mut said = String::new();
    for (place, value) in characters::groups(n).iter().enumerate().rev() {
        for (unit, name) in [(1_000, "千"), (100, "百"), (10, "十"), (1, "")] {
            let digit = value / unit % 10;
            if digit == 0 {
                continue;
            }
            if digit > 1 || unit == 1 || (unit == 1_000 && place > 0) {
                said.push(Japanese::DIGITS[digit as usize]);
            }
            said.push_str(name);
        }
        if *value > 0 {
            said.push_str(GROUPS.get(place).copied().unwrap_or_default());
        }
    }
    said
}

/// Digits, with or without thousands separators and a point, as a quantity.
pub(super) fn quantity(text: &str) -> String {
    characters::quantity::<Japanese>(text)
}
