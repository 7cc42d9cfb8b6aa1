//! Where the peer's media really comes from: symmetric RTP that is learned once.
//!
//! Peers behind NAT write an address into their SDP that cannot be reached, so media goes back to where it
//! comes from (RFC 7362 section 5). A stranger must not be able to take a call over with that, nor a caller to have
//! media sent to somebody who has nothing to do with the call.
//!
//! # Why
//! *Once.* The first packet of the signalled address fixes the stream to that address and its SSRC. Another address is
//! taken before that, for two packets in a row, and only from the host that signals, the host of the description or,
//! where that is a public one, its network: NAT changes ports, and media farms have several hosts. From then on only a
//! new description or a packet that SRTP proves moves the stream. For some seconds the signalled address still
//! corrects a neighbour that was quicker.
//!
//! *An SSRC of its own is pinned*, so that a forged source address is not enough to inject. A trunk may change it where
//! the old one has fallen silent: exchanges do when they bridge a call, and do not tell.
//!
//! *Nothing goes to who was not heard*, unless it is the host that signals or a trunk or account that has proven
//! itself: otherwise a description would be enough to flood anybody.

use std::{
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use crate::reach::{self, Scope};

/// How long the signalled address may take the stream back from another one that came first.
const EARLY: Duration = Duration::from_secs(3);
/// How long the SSRC of a trunk must be silent before another of the same source is taken.
const SILENCE: Duration = Duration::from_millis(500);

/// The other end of the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Peer {
    /// Where its signalling comes from.
    pub(crate) signalling: IpAddr,
    /// A trunk, or an account that has proven who it is: its descriptions are believed.
    pub(crate) trusted: bool,
}

/// What a stream is fixed to.
#[derive(Clone, Copy, Debug)]
struct Fixed {
    source: SocketAddr,
    ssrc: u32,
    since: Instant,
    heard: Instant,
}

/// Packets of one source that may become the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Candidate {
    source: SocketAddr,
    ssrc: u32,
    /// The sequence number that must come next.
    next: u16,
}

/// The peer's address and the guard before it.
#[derive(Debug)]
pub(super) struct Latch {
    peer: Peer,
    /// The address of the description.
    signalled: Option<SocketAddr>,
    fixed: Option<Fixed>,
    /// Where it was heard last; outlives a new description with the same address.
    heard_at: Option<SocketAddr>,
    candidate: Option<Candidate>,
}

impl Latch {
    /// `signalled` is the address of the SDP; `None`: it names none that may be used.
    pub(super) fn new(peer: Peer, signalled: Option<SocketAddr>) -> Latch {
        Latch { peer, signalled, fixed: None, heard_at: None, candidate: None }
    }

    /// A new description came: the stream may move. Until it does, media goes where it went, so that a hold with the
    /// same address changes nothing.
    pub(super) fn signal(&mut self, signalled: Option<SocketAddr>) {
        if signalled.is_some() && signalled != self.signalled {
            self.signalled = signalled;
            self.heard_at = None;
        }
        (self.fixed, self.candidate) = (None, None);
    }

    /// The peer has proven that it is at `source`: media goes there.
    pub(super) fn proven_at(&mut self, source: SocketAddr) {
        self.heard_at = Some(source);
    }

    /// Where to send.
    pub(super) fn target(&self) -> Option<SocketAddr> {
        self.heard_at.or(self.signalled.filter(|address| self.may_send_to(address.ip())))
    }

    /// Whether `ip` may be sent to.
    pub(super) fn may_send_to(&self, ip: IpAddr) -> bool {
        let heard = self.heard_at.is_some_and(|address| address.ip() == ip);
        heard || self.peer.trusted || same(ip, self.peer.signalling)
    }

    /// Whether what is not authenticated may come from `ip`.
    pub(super) fn may_come_from(&self, ip: IpAddr) -> bool {
        match self.heard_at {
            Some(address) => same(ip, address.ip()),
            None => self.is_near(ip),
        }
    }

    /// Whether `ip` is that of the signalling, that of the description, or in the network of the latter.
    fn is_near(&self, ip: IpAddr) -> bool {
        let near = |own: IpAddr| same(own, ip) || (reach::scope(own) == Some(Scope::Global) && same_network(own, ip));
        same(ip, self.peer.signalling) || self.signalled.is_some_and(|address| near(address.ip()))
    }

    /// Whether a well-formed packet from `from` belongs to the call. `proven`: it was authenticated.
    pub(super) fn admit(&mut self, now: Instant, from: SocketAddr, ssrc: u32, sequence: u16, proven: bool) -> bool {
        let exact = Some(from) == self.signalled;
        match self.fixed {
            Some(fixed) if fixed.source == from && fixed.ssrc == ssrc => {
                self.fixed = Some(Fixed { heard: now, ..fixed });
                return true;
            }
            _ if proven => {}
            Some(fixed) => {
                let since = |at: Instant| now.saturating_duration_since(at);
                let corrects = exact && fixed.source != from && since(fixed.since) < EARLY;
                let renamed = fixed.source == from && self.peer.trusted && since(fixed.heard) >= SILENCE;
                if !(corrects || renamed) || (renamed && !self.in_a_row(from, ssrc, sequence)) {
                    return false;
                }
            }
            None if exact => {}
            None if self.is_near(from.ip()) => {
                if !self.in_a_row(from, ssrc, sequence) {
                    return false;
                }
            }
            None => return false,
        }
        self.fixed = Some(Fixed { source: from, ssrc, since: now, heard: now });
        self.heard_at = Some(from);
        self.candidate = None;
        true
    }

    /// Whether this is the second packet of its source in a row.
    fn in_a_row(&mut self, source: SocketAddr, ssrc: u32, sequence: u16) -> bool {
        let second = self.candidate == Some(Candidate { source, ssrc, next: sequence });
        self.candidate = Some(Candidate { source, ssrc, next: sequence.wrapping_add(1) });
        second
    }
}

fn same(a: IpAddr, b: IpAddr) -> bool {
    a.to_canonical() == b.to_canonical()
}

/// The same /24 or /64.
fn same_network(a: IpAddr, b: IpAddr) -> bool {
    match (a.to_canonical(), b.to_canonical()) {
        (IpAddr::V4(a), IpAddr::V4(b)) => a.octets()[..3] == b.octets()[..3],
        (IpAddr::V6(a), IpAddr::V6(b)) => a.octets()[..8] == b.octets()[..8],
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STRANGER: [u8; 4] = [203, 0, 113, 66];

    fn at(ip: [u8; 4], port: u16) -> SocketAddr {
        SocketAddr::from((ip, port))
    }

    /// A caller at 192.0.2.1 that signals from there.
    fn latch(signalled: Option<SocketAddr>) -> Latch {
        Latch::new(Peer { signalling: IpAddr::from([192, 0, 2, 1]), trusted: false }, signalled)
    }

    fn caller(port: u16) -> SocketAddr {
        at([192, 0, 2, 1], port)
    }

    #[test]
    fn a_peer_behind_nat_is_learned_from_two_packets_of_its_host() {
        let now = crate::clock::now();
        // What it wrote into its description cannot be reached, and the policy has taken it out.
        let mut latch = latch(None);
        assert_eq!(latch.target(), None, "nobody is guessed at");
        assert!(!latch.admit(now, caller(2), 7, 10, false));
        assert!(!latch.admit(now, caller(2), 7, 12, false), "not in a row");
        assert!(latch.admit(now, caller(2), 7, 13, false));
        assert_eq!(latch.target(), Some(caller(2)));
    }

    #[test]
    fn no_stranger_takes_a_call_before_within_or_after_silence() {
        let now = crate::clock::now();
        let mut latch = latch(Some(caller(1)));
        let at_port = |port| at(STRANGER, port);
        for sequence in 0..100 {
            assert!(!latch.admit(now, at_port(9), 8, sequence, false), "before the caller has sent anything");
        }
        assert!(latch.admit(now, caller(1), 7, 10, false));
        for seconds in [0, 1, 2, 60, 3_600] {
            let later = now + Duration::from_secs(seconds);
            for sequence in 0..100 {
                assert!(!latch.admit(later, at_port(9), 8, sequence, false));
                assert!(!latch.admit(later, at_port(9), 7, 11 + sequence, false), "with the caller's SSRC");
                assert!(!latch.admit(later, caller(2), 7, 11 + sequence, false), "of the same host");
                assert!(!latch.admit(later, caller(1), 8, sequence, false), "with a forged source");
            }
        }
        assert_eq!(latch.target(), Some(caller(1)));
        assert!(latch.admit(now + Duration::from_secs(3_601), caller(1), 7, 11, false), "the caller goes on");
    }

    #[test]
    fn the_signalled_address_corrects_a_neighbour_that_was_quicker() {
        let now = crate::clock::now();
        let mut latch = latch(Some(caller(1)));
        latch.admit(now, caller(2), 8, 1, false);
        assert!(latch.admit(now, caller(2), 8, 2, false));
        assert!(latch.admit(now + EARLY / 2, caller(1), 7, 1, false));
        assert_eq!(latch.target(), Some(caller(1)));
        assert!(!latch.admit(now + EARLY / 2, caller(2), 8, 3, false));
        // Later it does not.
        let mut latch = self::latch(Some(caller(1)));
        latch.admit(now, caller(2), 8, 1, false);
        latch.admit(now, caller(2), 8, 2, false);
        assert!(!latch.admit(now + EARLY, caller(1), 7, 1, false));
    }

    #[test]
    fn media_farms_are_neighbours_and_private_networks_are_not() {
        let now = crate::clock::now();
        let farm = at([198, 51, 100, 7], 4_000);
        let mut latch = latch(Some(farm));
        let neighbour = at([198, 51, 100, 8], 4_000);
        assert!(!latch.admit(now, neighbour, 1, 1, false) && latch.admit(now, neighbour, 1, 2, false));
        let mut latch = self::latch(Some(at([10, 0, 0, 7], 4_000)));
        let neighbour = at([10, 0, 0, 8], 4_000);
        assert!(!latch.admit(now, neighbour, 1, 1, false) && !latch.admit(now, neighbour, 1, 2, false));
    }

    #[test]
    fn nothing_is_reflected_to_who_was_not_heard() {
        let now = crate::clock::now();
        let victim = at([198, 51, 100, 7], 4_000);
        let mut latch = latch(Some(victim));
        assert_eq!(latch.target(), None, "the signalling is elsewhere");
        assert!(!latch.may_send_to(victim.ip()));
        assert!(latch.admit(now, victim, 1, 1, false));
        assert_eq!(latch.target(), Some(victim), "it takes part");
        assert_eq!(self::latch(Some(caller(4))).target(), Some(caller(4)));
        let trunk = Peer { signalling: IpAddr::from([192, 0, 2, 1]), trusted: true };
        assert_eq!(Latch::new(trunk, Some(victim)).target(), Some(victim));
    }

    #[test]
    fn a_trunk_may_change_its_ssrc_after_silence() {
        let now = crate::clock::now();
        let trunk = Peer { signalling: IpAddr::from([192, 0, 2, 1]), trusted: true };
        let mut latch = Latch::new(trunk, Some(caller(1)));
        assert!(latch.admit(now, caller(1), 7, 1, false));
        assert!(!latch.admit(now, caller(1), 8, 1, false) && !latch.admit(now, caller(1), 8, 2, false));
        let later = now + SILENCE;
        assert!(!latch.admit(later, caller(1), 8, 50, false));
        assert!(latch.admit(later, caller(1), 8, 51, false));
        assert!(!latch.admit(later + SILENCE, at(STRANGER, 1), 9, 1, false));
        assert!(!latch.admit(later + SILENCE, at(STRANGER, 1), 9, 2, false));
    }

    #[test]
    fn authenticated_packets_move_the_stream() {
        let now = crate::clock::now();
        let mut latch = latch(None);
        assert!(latch.admit(now, at(STRANGER, 3), 7, 10, true));
        assert_eq!(latch.target(), Some(at(STRANGER, 3)));
        assert!(latch.admit(now, at(STRANGER, 4), 7, 11, true), "a handover");
        assert_eq!(latch.target(), Some(at(STRANGER, 4)));
    }

    #[test]
    fn new_description_starts_over_and_a_hold_does_not() {
        let now = crate::clock::now();
        let mut latch = latch(Some(caller(1)));
        latch.admit(now, caller(2), 7, 1, true);
        latch.signal(None);
        latch.signal(Some(caller(1)));
        assert_eq!(latch.target(), Some(caller(2)));
        assert!(latch.admit(now, caller(1), 9, 1, false), "told by signalling, it may move and be another stream");
        latch.signal(Some(caller(4)));
        assert_eq!(latch.target(), Some(caller(4)));
    }
}
