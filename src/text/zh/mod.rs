//! Chinese, as it is said in Mandarin.
//!
//! The readings agree with the published test cases of WeTextProcessing. Punctuation stays as it is written, for the
//! voices were trained with it; erhua and interjections stay, for they were written to be said. So do traditional
//! characters, but for those of what a rule says: rules are written in simplified ones.

mod numbers;
mod rules;
#[rustfmt::skip]
mod tables;

use std::collections::BTreeMap;
use std::sync::LazyLock;

pub(in crate::text) use self::numbers::cardinal;
use super::scan::{Grammar, Spoken};

/// The rules. Within a list the first that matches is taken, so the longer forms stand first.
static GRAMMAR: LazyLock<Grammar> = LazyLock::new(|| {
    let (mut numbers, mut words) = (Vec::new(), Vec::new());
    rules::numbers(&mut numbers);
    rules::words(&mut words);
    Grammar { numbers, words, dense: true, joins: true, plain: |_, _| false }
});

static SIMPLIFIED: LazyLock<BTreeMap<char, char>> = LazyLock::new(|| {
    let (mut pairs, mut rest) = (BTreeMap::new(), tables::TRADITIONAL.chars());
    while let (Some(traditional), Some(simplified)) = (rest.next(), rest.next()) {
        pairs.insert(traditional, simplified);
    }
    pairs
});

/// `text` as it is said, be it in traditional or in simplified characters.
pub(super) fn say(text: &str) -> Spoken {
    if !text.contains(|c| SIMPLIFIED.contains_key(&c)) {
        return GRAMMAR.say(text);
    }
    let simple: String = text.chars().map(|c| SIMPLIFIED.get(&c).copied().unwrap_or(c)).collect();
    let mut spoken = GRAMMAR.say(&simple);
    // A character and its simplified form have as many bytes, so that what was copied lies at the same place.
    let pieces = spoken.spans.iter().map(|span| match span.copied {
        true => &text[span.written.clone()],
        false => &spoken.text[span.spoken.clone()],
    });
    spoken.text = pieces.collect();
    spoken
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_a_character_have_three_bytes_and_lead_no_further() {
        assert_eq!(SIMPLIFIED.len() * 6, tables::TRADITIONAL.len());
        for (traditional, simplified) in SIMPLIFIED.iter() {
            assert_eq!((traditional.len_utf8(), simplified.len_utf8()), (3, 3), "{traditional}{simplified}");
            assert!(!SIMPLIFIED.contains_key(simplified), "{traditional}{simplified}");
        }
    }
}
