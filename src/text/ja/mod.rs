//! Japanese.
//!
//! Numbers are written in kanji, as the published test cases of WeTextProcessing have them: how a kanji number is
//! read behind a counter is the voice's business. Telephone numbers say ゼロ for zero and の for the hyphen.

mod numbers;
mod rules;
#[rustfmt::skip]
mod tables;

use std::sync::LazyLock;

pub(in crate::text) use self::numbers::cardinal;
use super::scan::Grammar;

/// The rules. Within a list the first that matches is taken, so the longer forms stand first.
pub(super) static GRAMMAR: LazyLock<Grammar> = LazyLock::new(|| {
    let (mut numbers, mut words) = (Vec::new(), Vec::new());
    rules::numbers(&mut numbers);
    rules::words(&mut words);
    Grammar { numbers, words, dense: true, joins: false, plain: |_, _| false }
});
