//! What each token may have called out: `outbound` of `[http] tokens` and of a tenant's.
//!
//! A trunk bounds what all of its callers cost together, a token's limits what one of them does: a token that leaked is used
//! up before it is noticed, and the others' calls go on. Transfers that a token asks for count as its calls.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::GatewayError;
use crate::call::{CallHandle, EndReason};
use crate::sip::quota::{Lease, Limits, Meter};

/// When a call may have ended, or a minute be over.
const BUSY: Duration = Duration::from_secs(10);
/// How often it is looked whether the minutes are used up.
const LOOK: Duration = Duration::from_secs(1);

/// A token with limits of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dialer {
    /// What tells tokens apart, whatever they are called: a digest of the text.
    pub key: [u8; 32],
    /// As refusals and logs name it.
    pub name: Arc<str>,
    /// How much.
    pub limits: Limits,
}

/// What tokens have used. Clones mean the same; a reload that changes limits forgets nothing.
#[derive(Clone, Debug, Default)]
pub struct Dialers(Arc<Mutex<HashMap<[u8; 32], Meter>>>);

impl Dialers {
    /// Counts a call out for as long as the lease lives.
    ///
    /// # Errors
    /// A limit of the token is reached.
    pub fn begin(&self, dialer: &Dialer) -> Result<Lease, GatewayError> {
        let mut meters = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let name = || match &*dialer.name {
            "" => "the token, `outbound`".to_owned(),
            name => format!("the token `{name}`, `outbound`"),
        };
        let meter = meters.entry(dialer.key).or_insert_with(|| Meter::new(name(), dialer.limits));
        meter.limit(dialer.limits);
        meter.begin().map_err(|what| GatewayError::TenantFull { what, retry_after: BUSY })
    }
}

/// Ends `call` when the minutes of its token are used up. Ends with it.
pub(super) async fn watch(call: CallHandle, lease: Lease) {
    lease.answered();
    loop {
        tokio::select! {
            _ = call.ended() => return,
            () = tokio::time::sleep(LOOK) => {}
        }
        if lease.is_exhausted() {
            tracing::info!(call = %call.id(), "minutes_per_day of its token are used up: the call ends");
            call.hang_up(EndReason::HungUp);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_held_to_its_own_limits_and_keeps_its_usage_over_a_reload() {
        let dialers = Dialers::default();
        let limits = Limits { calls_per_minute: 2, ..Limits::default() };
        let crm = Dialer { key: [1; 32], name: "crm".into(), limits };
        let (first, _second) = (dialers.begin(&crm).expect("free"), dialers.begin(&crm).expect("free"));
        let error = dialers.begin(&crm).expect_err("two in a minute");
        assert_eq!(error.to_string(), "the token `crm`, `outbound`: calls_per_minute = 2 is reached");
        assert!(error.retry_after().is_some());
        let other = Dialer { key: [2; 32], ..crm.clone() };
        assert!(dialers.begin(&other).is_ok(), "another token of the same name");
        let reloaded = Dialer { limits: Limits { max_calls: 2, ..Limits::default() }, ..crm };
        assert!(dialers.begin(&reloaded).expect_err("two are up").to_string().contains("max_calls = 2"));
        drop(first);
        assert!(dialers.begin(&reloaded).is_ok());
    }
}
