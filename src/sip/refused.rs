//! Calls of trunks that are refused before they ring: who keeps accounts is told of them.
//!
//! # Why
//! *An operator looks for a call that a customer says failed*, and a call that no codec was found for, or that came while
//! every place was taken, is one. Of strangers nothing is told: scanners are refused all day. A trunk is known by the address
//! of its packets, which over UDP may be forged, so no more are told of than an account can hold.

use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use rsipstack::sip::{Request, StatusCode, StatusCodeKind, prelude::HeadersExt};

use super::incoming::{Parties, parties};
use crate::clock::Sparse;

/// Calls told of in [`SPAN`]: more than one a second for a minute is a fault that the first of them show.
const MOST: u32 = 60;
const SPAN: Duration = Duration::from_secs(60);
/// Call-IDs remembered: an INVITE that is repeated is the same call.
const REMEMBERED: usize = 128;

/// A call of a trunk that was refused before it rang.
#[derive(Clone, Debug)]
pub struct RefusedCall {
    /// As of a call that rings.
    pub from: String,
    /// As of a call that rings.
    pub to: String,
    /// As of a call that rings.
    pub user: String,
    /// Name of the trunk.
    pub trunk: String,
    /// What it was answered.
    pub status: u16,
    /// Its reason phrase.
    pub reason: String,
}

/// Which refusals are told of.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    state: Mutex<State>,
    lines: Sparse,
}

#[derive(Debug, Default)]
struct State {
    recent: VecDeque<String>,
    since: Option<Instant>,
    told: u32,
}

impl Refusals {
    /// What is to be told of `request`, which `trunk` sent and `status` answers.
    pub(super) fn of(&self, now: Instant, request: &Request, trunk: &str, status: &StatusCode) -> Option<RefusedCall> {
        // A redirection sends it on, and a challenge asks for it again.
        let over = status.kind() != StatusCodeKind::Redirection && !matches!(status.code(), 401 | 407);
        let call_id = request.call_id_header().ok().filter(|_| over)?.value();
        if !self.admits(now, call_id) {
            return None;
        }
        let Parties { from, to, user } = parties(request);
        let (trunk, reason) = (trunk.to_owned(), status.text().to_owned());
        Some(RefusedCall { from, to, user, trunk, status: status.code(), reason })
    }

    fn admits(&self, now: Instant, call_id: &str) -> bool {
        // Nothing here panics while it holds it.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.recent.iter().any(|known| known == call_id) {
            return false;
        }
        if state.since.is_none_or(|since| now.saturating_duration_since(since) >= SPAN) {
            (state.since, state.told) = (Some(now), 0);
        }
        if state.told == MOST {
            if let Some(missed) = self.lines.admit(now) {
                tracing::warn!(missed, "trunks are refused so many calls that some have no record");
            }
            return false;
        }
        state.told += 1;
        if state.recent.len() == REMEMBERED {
            state.recent.pop_front();
        }
        state.recent.push_back(call_id.to_owned());
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_call_is_told_of_once_and_of_a_flood_only_so_many() {
        let (refusals, start) = (Refusals::default(), crate::clock::now());
        assert!(refusals.admits(start, "0"));
        assert!(!refusals.admits(start, "0"), "the same INVITE again");
        let told = |at, from: u32| (from..from + 1_000).filter(|n| refusals.admits(at, &n.to_string())).count();
        assert_eq!(told(start, 1), MOST as usize - 1);
        assert_eq!(told(start + SPAN / 2, 2_000), 0);
        assert_eq!(told(start + SPAN, 4_000), MOST as usize);
        let kept = refusals.state.lock().expect("sound").recent.len();
        assert!(kept <= REMEMBERED, "{kept}");
    }
}
