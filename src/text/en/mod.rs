//! English.
//!
//! The readings agree with the published test cases of WeTextProcessing where those agree with each other: dates as
//! "the fifth of january twenty twelve", "and" before the tens of the last group, a zero behind a point as "oh".
//! A year is four digits from 1010 to 2999 that nothing else claims.

mod codes;
mod dates;
mod measures;
mod numbers;
#[rustfmt::skip]
mod tables;
mod words;

use std::sync::LazyLock;

pub(in crate::text) use self::numbers::{cardinal, ordinal, year};
pub(in crate::text) use self::words::roman;
use super::scan::{End, Grammar, Rule};

/// The name of a month, from one.
pub(super) fn month(month: u128) -> Option<&'static str> {
    tables::MONTHS.get(usize::try_from(month).ok()?.checked_sub(1)?).map(|(name, _)| *name)
}

/// The rules. Within a list the first that matches is taken, so the longer forms stand first.
pub(super) static GRAMMAR: LazyLock<Grammar> = LazyLock::new(|| {
    let mut rules: Vec<Rule> = Vec::new();
    codes::addresses(&mut rules);
    dates::rules(&mut rules);
    codes::telephone(&mut rules);
    measures::rules(&mut rules);
    codes::numbers(&mut rules);
    let mut letters = Vec::new();
    codes::links(&mut letters);
    dates::words(&mut letters);
    measures::words(&mut letters);
    words::rules(&mut letters);
    Grammar { numbers: rules, words: letters, dense: false, joins: false, plain: words::is_plain }
});

fn rule(rules: &mut Vec<Rule>, pattern: &str, say: super::scan::Say) {
    rules.push(Rule::new(pattern, End::Word, say));
}

fn loose(rules: &mut Vec<Rule>, pattern: &str, say: super::scan::Say) {
    rules.push(Rule::new(pattern, End::Any, say));
}

fn number(text: &str) -> u128 {
    text.parse().unwrap_or(u128::MAX)
}
