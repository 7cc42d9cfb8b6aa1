//! Panics on demand, for the tests of what watches a part. The program as shipped has none of this: the feature
//! `fault-injection` is switched on by tests only.

#[cfg(feature = "fault-injection")]
use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
};

/// Names a part to panic in a process that is started for that.
#[cfg(feature = "fault-injection")]
const VARIABLE: &str = "ANTIPHON_PANIC_IN";

/// Parts that are to panic, each with the port of the gateway that is meant: a process of tests has many.
#[cfg(feature = "fault-injection")]
static ARMED: Mutex<BTreeSet<(String, u16)>> = Mutex::new(BTreeSet::new());

/// Makes `part` of the gateway with SIP at `port` panic the next time that it has something to do.
#[cfg(feature = "fault-injection")]
pub fn arm(part: &str, port: u16) {
    ARMED.lock().unwrap_or_else(PoisonError::into_inner).insert((part.to_owned(), port));
}

/// Where `part` panics if it is to.
#[cfg(feature = "fault-injection")]
#[expect(clippy::disallowed_methods, reason = "no key of the configuration: only programs built for tests have it")]
pub(crate) fn point(part: &str, port: Option<u16>) {
    let armed = ARMED.lock().unwrap_or_else(PoisonError::into_inner).remove(&(part.to_owned(), port.unwrap_or(0)));
    assert!(!armed && std::env::var(VARIABLE).as_deref() != Ok(part), "a panic that was asked for, in `{part}`");
}

/// Nothing.
#[cfg(not(feature = "fault-injection"))]
pub(crate) fn point(_part: &str, _port: Option<u16>) {}
