//! What attributes and entities of SSML say.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{cut, is_inline};
use crate::turn::SPEEDS;

/// The longest break.
const LONGEST_BREAK: Duration = Duration::from_secs(10);

pub(super) fn decoded(entity: &str) -> Option<char> {
    let code = |digits: &str, radix| u32::from_str_radix(digits, radix).ok().and_then(char::from_u32);
    let c = match entity {
        "lt" => '<',
        "gt" => '>',
        "amp" => '&',
        "quot" => '"',
        "apos" => '\'',
        "nbsp" => '\u{a0}',
        _ => match entity.strip_prefix('#')?.strip_prefix(['x', 'X']) {
            Some(digits) => code(digits, 16)?,
            None => code(entity.strip_prefix('#')?, 10)?,
        },
    };
    (!is_inline(c) && !c.is_control()).then_some(c)
}

pub(super) fn attributes_of(text: &str) -> Result<BTreeMap<String, String>, String> {
    let (mut attributes, mut rest) = (BTreeMap::new(), text.trim());
    while !rest.is_empty() {
        let (name, behind) = rest.split_once('=').ok_or("an attribute is written as name=\"value\"")?;
        let behind = behind.trim_start();
        let quote = behind.chars().next().filter(|c| matches!(c, '"' | '\''));
        let quote = quote.ok_or("the value of an attribute stands in quotes")?;
        let (value, behind) = behind[1..].split_once(quote).ok_or("a quote is never closed")?;
        let (mut plain, mut left) = (String::new(), value);
        while let Some((before, entity)) = left.split_once('&') {
            plain.push_str(before);
            left = match entity.split_once(';').and_then(|(name, behind)| Some((decoded(name)?, behind))) {
                Some((c, behind)) => {
                    plain.push(c);
                    behind
                }
                None => {
                    plain.push('&');
                    entity
                }
            };
        }
        plain.push_str(left);
        plain.retain(|c| !is_inline(c));
        attributes.insert(name.trim().to_owned(), plain);
        rest = behind.trim_start();
    }
    Ok(attributes)
}

pub(super) fn break_of(time: Option<&str>, strength: Option<&str>) -> Result<Duration, String> {
    let Some(time) = time else {
        let ms = match strength.unwrap_or("medium") {
            "none" => 0,
            "x-weak" => 100,
            "weak" => 200,
            "medium" => 400,
            "strong" => 700,
            "x-strong" => 1_000,
            other => {
                let known = "none, x-weak, weak, medium, strong or x-strong";
                return Err(format!("strength=\"{}\": expected {known}", cut(other)));
            }
        };
        return Ok(Duration::from_millis(ms));
    };
    let (number, unit) = match time.strip_suffix("ms") {
        Some(number) => (number, 0.001),
        None => (time.strip_suffix('s').unwrap_or("?"), 1.0),
    };
    let seconds = number.trim().parse::<f64>().ok().map(|n| n * unit);
    let length = seconds.and_then(|s| Duration::try_from_secs_f64(s).ok()).filter(|length| *length <= LONGEST_BREAK);
    length.ok_or_else(|| format!("time=\"{}\": expected 500ms or 1.5s, at most 10s", cut(time)))
}

pub(super) fn rate_of(text: &str) -> Result<f32, String> {
    let named = match text {
        "x-slow" => Some(0.5),
        "slow" => Some(0.75),
        "medium" | "default" => Some(1.0),
        "fast" => Some(1.25),
        "x-fast" => Some(1.5),
        _ => None,
    };
    let rate = named.or_else(|| match text.strip_suffix('%') {
        // With a sign it is a change, without one a share.
        Some(share) if share.starts_with(['+', '-']) => share.parse::<f32>().ok().map(|n| 1.0 + n / 100.0),
        Some(share) => share.parse::<f32>().ok().map(|n| n / 100.0),
        None => text.parse::<f32>().ok(),
    });
    rate.filter(|rate| SPEEDS.contains(rate)).ok_or_else(|| {
        let text = cut(text);
        format!("rate=\"{text}\": expected x-slow, slow, medium, fast, x-fast, or a share such as 120%, 25% to 400%")
    })
}

pub(super) fn gain_of(text: &str) -> Result<f32, String> {
    let decibels = |db: f32| 10f32.powf(db / 20.0);
    let gain = match text {
        "silent" => Some(0.0),
        "x-soft" => Some(decibels(-12.0)),
        "soft" => Some(decibels(-6.0)),
        "medium" | "default" => Some(1.0),
        "loud" => Some(decibels(6.0)),
        "x-loud" => Some(decibels(12.0)),
        other => {
            let db = other.strip_suffix("dB").or_else(|| other.strip_suffix("db"));
            db.and_then(|db| db.parse::<f32>().ok()).filter(|db| (-60.0..=12.0).contains(db)).map(decibels)
        }
    };
    gain.ok_or_else(|| {
        let text = cut(text);
        format!(
            "volume=\"{text}\": expected silent, x-soft, soft, medium, loud, x-loud or decibels from -60dB to +12dB"
        )
    })
}
