//! Which of a peer's proved addresses a session's media goes to, when the peer has moved.
//!
//! Owns one session's path: where its ICE agent sends, where that goes instead, and when the peer was last heard there.
//! Reads no socket and no clock.
//!
//! # Why
//! The agent of the stack keeps the pair that was nominated first until ICE restarts. A peer whose address changes under it
//! (a NAT that forgets, a telephone that leaves its Wi-Fi, a browser that nominates a better path) would hear nothing more,
//! and after twelve seconds be lost. RFC 8445 section 7.3.1.5 has the controlled side follow the nomination. So the agent
//! goes on believing in the first address, and here media, DTLS and consent are carried between that and the present one:
//!
//! - what the agent sends to the pair it selected goes to where the peer is now, but for answers to checks, which go to who
//!   asked;
//! - what comes from there is shown to the agent as coming from the pair it selected, but for checks, so that each is
//!   answered with the address it came from.
//!
//! The peer has moved when something comes from another of its addresses while nothing does from the present one. An address
//! counts only while it is proved: by a check that knows our password, or by the answer to one of ours.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// How long nothing may have come from where we send before media or a nomination from elsewhere is followed. Packets of
/// two paths may overtake each other by as much.
const QUIET: Duration = Duration::from_millis(200);
/// The same for a check without nomination. A browser checks its paths every 2.5 s and sends no media while it only listens.
const QUIET_FOR_CHECKS: Duration = Duration::from_secs(6);
/// A proof is good for as long as consent is (RFC 7675 section 5.1).
const PROOF: Duration = Duration::from_secs(30);
/// Proved addresses that are remembered.
const ADDRESSES: usize = 16;
/// Checks of the agent that went to the new address and are not answered yet.
const CHECKS: usize = 16;

/// What a datagram is, as far as its path matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A connectivity check.
    Check {
        /// Only for those that came: whether it nominates its pair (USE-CANDIDATE).
        nominates: bool,
        /// Its transaction.
        transaction: [u8; 12],
    },
    /// The answer to a check.
    Answer([u8; 12]),
    /// DTLS, SRTP, SRTCP.
    Media,
}

/// The path of one session.
#[derive(Debug, Default)]
pub(super) struct Path {
    /// The remote address of the pair that the agent selected.
    selected: Option<SocketAddr>,
    /// Where the peer is now, if not there.
    moved: Option<SocketAddr>,
    /// When something last came from where we send; when that was chosen, before.
    heard: Option<Instant>,
    proved: VecDeque<(SocketAddr, Instant)>,
    redirected: VecDeque<[u8; 12]>,
}

impl Path {
    /// `source` has proved to be the peer.
    pub(super) fn prove(&mut self, now: Instant, source: SocketAddr) {
        self.proved.retain(|(address, _)| *address != source);
        if self.proved.len() == ADDRESSES {
            self.proved.pop_front();
        }
        self.proved.push_back((source, now));
    }

    /// ICE has restarted: its new checks find the path.
    pub(super) fn restart(&mut self) {
        *self = Self::default();
    }

    /// A datagram came from `source`. Gives the address that the agent is to believe it came from, and whether the peer has
    /// moved to `source` by it.
    pub(super) fn arrived(&mut self, now: Instant, source: SocketAddr, kind: Kind) -> (SocketAddr, bool) {
        let Some(present) = self.moved.or(self.selected) else { return (source, false) };
        let mut moves = false;
        if source == present {
            self.heard = Some(now);
        } else {
            let patience = match kind {
                Kind::Check { nominates: true, .. } | Kind::Media => Some(QUIET),
                Kind::Check { nominates: false, .. } => Some(QUIET_FOR_CHECKS),
                // To a check that the agent made of its own accord.
                Kind::Answer(_) => None,
            };
            let quiet = self.heard.map_or(Duration::MAX, |heard| now.saturating_duration_since(heard));
            if patience.is_some_and(|patience| quiet >= patience) && self.is_proved(now, source) {
                moves = true;
                self.moved = Some(source).filter(|source| Some(*source) != self.selected);
                self.heard = Some(now);
                self.redirected.clear();
            }
        }
        let (Some(selected), true) = (self.selected, self.moved == Some(source)) else { return (source, moves) };
        let shown = match kind {
            Kind::Media => selected,
            Kind::Answer(transaction) if self.redirected.contains(&transaction) => selected,
            Kind::Answer(_) | Kind::Check { .. } => source,
        };
        (shown, moves)
    }

    /// The agent sends a datagram to `destination`. Gives where it is to go.
    pub(super) fn leaves(&mut self, now: Instant, destination: SocketAddr, kind: Kind) -> SocketAddr {
        match kind {
            Kind::Answer(_) => destination,
            Kind::Media => {
                if self.selected != Some(destination) {
                    // Only to the pair that it selected does it send anything but STUN.
                    self.selected = Some(destination);
                    self.moved = None;
                    self.heard = Some(now);
                }
                self.moved.unwrap_or(destination)
            }
            Kind::Check { transaction, .. } => match self.moved {
                Some(moved) if self.selected == Some(destination) => {
                    if self.redirected.len() == CHECKS {
                        self.redirected.pop_front();
                    }
                    self.redirected.push_back(transaction);
                    moved
                }
                _ => destination,
            },
        }
    }

    fn is_proved(&self, now: Instant, source: SocketAddr) -> bool {
        let fresh = |at: &Instant| now.saturating_duration_since(*at) <= PROOF;
        self.proved.iter().any(|(address, at)| *address == source && fresh(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    const MS: Duration = Duration::from_millis(1);

    fn address(port: u16) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, 1], port))
    }

    fn check(nominates: bool) -> Kind {
        Kind::Check { nominates, transaction: [1; 12] }
    }

    /// A path on which media flows to and from port 1.
    fn path(now: Instant) -> Path {
        let mut path = Path::default();
        path.prove(now, address(1));
        assert_eq!(path.arrived(now, address(1), check(true)), (address(1), false));
        assert_eq!(path.leaves(now, address(1), Kind::Media), address(1));
        assert_eq!(path.arrived(now, address(1), Kind::Media), (address(1), false));
        path
    }

    #[test]
    fn media_follows_a_peer_that_moved_and_the_agent_sees_no_difference() {
        let now = clock::now();
        let mut path = path(now);
        let later = now + 300 * MS;
        assert_eq!(path.arrived(later, address(2), Kind::Media), (address(2), false), "not proved");
        path.prove(later, address(2));
        assert_eq!(path.arrived(later, address(2), Kind::Media), (address(1), true));
        assert_eq!(path.leaves(later, address(1), Kind::Media), address(2));
        assert_eq!(path.arrived(later, address(2), Kind::Media), (address(1), false));
        // Its consent is asked for and given there.
        let consent = Kind::Check { nominates: false, transaction: [7; 12] };
        assert_eq!(path.leaves(later, address(1), consent), address(2));
        assert_eq!(path.arrived(later, address(2), Kind::Answer([7; 12])), (address(1), false));
        // Checks are between those who make them.
        assert_eq!(path.arrived(later, address(2), check(false)), (address(2), false));
        assert_eq!(path.leaves(later, address(2), Kind::Answer([1; 12])), address(2));
        assert_eq!(path.leaves(later, address(2), Kind::Check { nominates: false, transaction: [8; 12] }), address(2));
        assert_eq!(path.arrived(later, address(2), Kind::Answer([8; 12])), (address(2), false));
    }

    #[test]
    fn the_present_address_stays_while_it_is_heard() {
        let now = clock::now();
        let mut path = path(now);
        path.prove(now, address(2));
        for step in 1..100 {
            let at = now + 20 * MS * step;
            assert_eq!(path.arrived(at, address(2), Kind::Media), (address(2), false));
            assert_eq!(path.arrived(at, address(2), check(true)), (address(2), false));
            assert_eq!(path.arrived(at, address(1), Kind::Media), (address(1), false));
            assert_eq!(path.leaves(at, address(1), Kind::Media), address(1));
        }
    }

    #[test]
    fn a_check_alone_moves_a_peer_only_when_it_nominates_or_the_present_address_is_long_silent() {
        let now = clock::now();
        let mut nominated = path(now);
        nominated.prove(now, address(2));
        assert_eq!(nominated.arrived(now + 199 * MS, address(2), check(true)), (address(2), false));
        assert_eq!(nominated.arrived(now + 200 * MS, address(2), check(true)), (address(2), true));
        let mut plain = path(now);
        plain.prove(now, address(2));
        assert_eq!(plain.arrived(now + 5_900 * MS, address(2), check(false)), (address(2), false));
        assert_eq!(plain.arrived(now + 6_000 * MS, address(2), check(false)), (address(2), true));
        assert_eq!(plain.leaves(now + 6_000 * MS, address(1), Kind::Media), address(2));
    }

    #[test]
    fn an_old_proof_is_none_and_a_peer_may_come_back() {
        let now = clock::now();
        let mut path = path(now);
        path.prove(now, address(2));
        let late = now + PROOF + MS;
        assert_eq!(path.arrived(late, address(2), Kind::Media), (address(2), false));
        path.prove(late, address(2));
        assert!(path.arrived(late, address(2), Kind::Media).1);
        path.prove(late + 250 * MS, address(1));
        assert_eq!(path.arrived(late + 250 * MS, address(1), Kind::Media), (address(1), true));
        assert_eq!(path.leaves(late + 250 * MS, address(1), Kind::Media), address(1));
    }

    #[test]
    fn a_restart_begins_anew() {
        let now = clock::now();
        let mut path = path(now);
        path.prove(now, address(2));
        assert!(path.arrived(now + 300 * MS, address(2), Kind::Media).1);
        path.restart();
        assert_eq!(path.arrived(now + 400 * MS, address(3), Kind::Media), (address(3), false));
        assert_eq!(path.leaves(now + 400 * MS, address(3), Kind::Media), address(3));
    }
}
