//! Whole numbers in English words.

use crate::text::english::{GROUPS, SMALL, TENS};

/// Decimal digits as words: `1005` is "one thousand and five", `1234567` "one million, two hundred and thirty-four
/// thousand, five hundred and sixty-seven". Numbers past the named scales are read digit by digit.
pub fn words(digits: &str) -> String {
    let values: Vec<usize> = digits.chars().filter_map(|c| c.to_digit(10)).map(|d| d as usize).collect();
    let significant: &[usize] = match values.iter().position(|&d| d != 0) {
        Some(first) => &values[first..],
        None => return SMALL[0].into(),
    };
    if significant.len() > 3 * GROUPS.len() {
        return significant.iter().map(|&d| SMALL[d]).collect::<Vec<_>>().join(" ");
    }
    let mut groups: Vec<(usize, usize)> =
        significant.rchunks(3).map(|g| g.iter().fold(0, |n, d| 10 * n + d)).enumerate().filter(|g| g.1 > 0).collect();
    groups.reverse();
    let mut out = String::new();
    for (scale, value) in groups {
        let short = scale == 0 && value < 100;
        if !out.is_empty() {
            out.push_str(if short { " and " } else { ", " });
        }
        out.push_str(&below_thousand(value));
        if scale > 0 {
            out.push(' ');
            out.push_str(GROUPS[scale]);
        }
    }
    out
}

fn below_thousand(value: usize) -> String {
    let (hundreds, rest) = (value / 100, value % 100);
    let small = match rest {
        0..20 => SMALL[rest].to_string(),
        _ if rest % 10 == 0 => TENS[rest / 10].to_string(),
        _ => format!("{}-{}", TENS[rest / 10], SMALL[rest % 10]),
    };
    match (hundreds, rest) {
        (0, _) => small,
        (_, 0) => format!("{} hundred", SMALL[hundreds]),
        _ => format!("{} hundred and {small}", SMALL[hundreds]),
    }
}

#[cfg(test)]
mod tests {
    use super::words;

    #[test]
    fn numbers_read_as_in_english() {
        for (digits, text) in [
            ("0", "zero"),
            ("007", "seven"),
            ("12", "twelve"),
            ("42", "forty-two"),
            ("100", "one hundred"),
            ("115", "one hundred and fifteen"),
            ("1005", "one thousand and five"),
            ("1023", "one thousand and twenty-three"),
            ("1234567", "one million, two hundred and thirty-four thousand, five hundred and sixty-seven"),
            ("1000000", "one million"),
            ("1005000", "one million, five thousand"),
        ] {
            assert_eq!(words(digits), text);
        }
        assert!(words(&"9".repeat(400)).starts_with("nine nine"));
    }
}
