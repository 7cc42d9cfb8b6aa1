//! Calls that came and were never live: refused, or given up before the answer.
//!
//! Of strangers nothing is told here, as for [`crate::sip`]: what nobody has proven to have sent fills no disk.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::Gateway;
use crate::call::{CallEvent, CallId, CallMeta, Direction, Missed};
use crate::clock::{self, Sparse};
use crate::cluster::Nodes;
use crate::sip::{IncomingCall, RefusedCall, SipError};

/// Missed calls told of in [`SPAN`]: an address may be forged over UDP, and a disk holds so many for long.
const MOST: u32 = 600;
const SPAN: Duration = Duration::from_secs(60);

/// How many were told of, and since when.
#[derive(Debug)]
struct Bound(Mutex<(Option<Instant>, u32)>);

impl Bound {
    const fn new() -> Self {
        Self(Mutex::new((None, 0)))
    }

    fn admits(&self, now: Instant) -> bool {
        // Nothing here panics while it holds it.
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.0.is_none_or(|since| now.saturating_duration_since(since) >= SPAN) {
            *state = (Some(now), 0);
        }
        state.1 = (state.1 + 1).min(MOST + 1);
        state.1 <= MOST
    }
}

/// A call as it came: what is left of one that cannot be asked any more.
#[derive(Clone, Debug)]
pub(super) struct Came {
    from: String,
    to: String,
    user: String,
    headers: BTreeMap<String, String>,
    trunk: Option<String>,
}

impl Came {
    /// `None`: nothing is known of who calls.
    pub(super) fn of(call: &IncomingCall) -> Option<Self> {
        call.trusted.then(|| Self {
            from: call.from.clone(),
            to: call.to.clone(),
            user: call.user.clone(),
            headers: call.headers.clone(),
            trunk: call.trunk.clone(),
        })
    }
}

/// Why a call that was to be answered was not.
pub(super) fn unanswered(error: &SipError) -> Missed {
    let status = match error {
        SipError::Cancelled => 487,
        SipError::NotAcceptable(_) => 488,
        SipError::NoPort(_) | SipError::Closed => 503,
        _ => 500,
    };
    let by_peer = matches!(error, SipError::Cancelled);
    Missed { trunk: None, status, reason: error.to_string(), by_peer, cause: None }
}

impl Gateway {
    /// Tells of a call that came and is over, and why.
    pub(super) fn missed(&self, came: Came, missed: Missed) {
        static TOLD: Bound = Bound::new();
        static LINES: Sparse = Sparse::new();
        let now = clock::now();
        if !TOLD.admits(now) {
            if let Some(more) = LINES.admit(now) {
                tracing::warn!(more, "so many calls are missed that some have no record");
            }
            return;
        }
        let Came { from, to, user, headers, trunk } = came;
        // As it would have been answered.
        let found = self.agents.find(&user);
        let agent = if found.is_some() { user } else { self.default_agent.to_string() };
        let owner = found.or_else(|| self.agents.find(&agent)).and_then(|agent| agent.tenant.clone());
        let id = CallId::of(self.nodes.as_ref().map(Nodes::name));
        let tenant = owner.as_deref().unwrap_or_default().into();
        let meta = CallMeta { id, direction: Direction::Inbound, from, to, agent, headers, tenant, trace: None };
        self.calls.tell(&meta, CallEvent::Missed(Missed { trunk, ..missed }));
    }
}

/// Tells of the calls of trunks that the SIP endpoint refuses, until it is gone.
pub async fn refused(gateway: Gateway, mut calls: mpsc::Receiver<RefusedCall>) {
    while let Some(call) = calls.recv().await {
        let RefusedCall { from, to, user, trunk, status, reason } = call;
        let came = Came { from, to, user, headers: BTreeMap::new(), trunk: Some(trunk) };
        gateway.missed(came, Missed { trunk: None, status, reason, by_peer: false, cause: None });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_missed_calls_is_told_of_up_to_its_bound() {
        let (bound, start) = (Bound::new(), clock::now());
        let told = |at| (0..2 * MOST).filter(|_| bound.admits(at)).count() as u32;
        assert_eq!((told(start), told(start + SPAN / 2), told(start + SPAN)), (MOST, 0, MOST));
    }

    #[test]
    fn what_kept_a_call_from_its_answer_has_a_status() {
        for (error, status, by_peer) in [
            (SipError::Cancelled, 487, true),
            (SipError::NotAcceptable("no codec".to_owned()), 488, false),
            (SipError::NoPort(std::io::ErrorKind::AddrInUse.into()), 503, false),
        ] {
            let missed = unanswered(&error);
            assert_eq!((missed.status, missed.by_peer), (status, by_peer), "{error}");
        }
    }
}
