//! Chinese, as it is said in Mandarin.
//!
//! The readings agree with the published test cases of WeTextProcessing. Punctuation stays as it is written, for the
//! voices were trained with it; erhua and interjections stay, for they were written to be said.

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
    Grammar { numbers, words, dense: true, joins: true, plain: |_, _| false }
});
