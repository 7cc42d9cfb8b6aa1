//! Panics on demand, for the tests of what watches a part. The program as shipped has none of this: the feature
//! `fault-injection` is switched on by tests only.

use std::fmt::Display;
#[cfg(feature = "fault-injection")]
use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
};

/// Names a part to panic in a process that is started for that.
#[cfg(feature = "fault-injection")]
const VARIABLE: &str = "ANTIPHON_PANIC_IN";

/// Parts that are to panic, each with what tells the one that is meant from others: a process of tests has many gateways.
#[cfg(feature = "fault-injection")]
static ARMED: Mutex<BTreeSet<(String, String)>> = Mutex::new(BTreeSet::new());

/// Makes `part` panic the next time that it has something to do. `whose`: the SIP port of its gateway, or what the part has of its
/// own: a database, a folder, an address, a text.
#[cfg(feature = "fault-injection")]
pub fn arm(part: &str, whose: impl Display) {
    ARMED.lock().unwrap_or_else(PoisonError::into_inner).insert((part.to_owned(), whose.to_string()));
}

/// Where `part` panics if it is to.
#[cfg(feature = "fault-injection")]
#[expect(clippy::disallowed_methods, reason = "no key of the configuration: only programs built for tests have it")]
pub(crate) fn point(part: &str, whose: impl Display) {
    let armed = ARMED.lock().unwrap_or_else(PoisonError::into_inner).remove(&(part.to_owned(), whose.to_string()));
    assert!(!armed && std::env::var(VARIABLE).as_deref() != Ok(part), "a panic that was asked for, in `{part}`");
}

/// Nothing.
#[cfg(not(feature = "fault-injection"))]
pub(crate) fn point(_part: &str, _whose: impl Display) {}
