//! Where the peer's media really comes from: symmetric RTP with a guard.
//!
//! Peers behind NAT write an address into their SDP that nobody can reach, so media goes back to where it
//! comes from (RFC 7362 section 5). A stranger must not be able to take a call over with that.
//!
//! # Why
//! The signalled address wins at once and always. Any other must show two packets in a row of one source,
//! while nothing else is heard. Once heard, a source keeps the stream until it has been silent a second.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

/// A source that has been silent for this long can be replaced.
const SILENCE: Duration = Duration::from_secs(1);

/// The current peer address and the candidate to replace it.
#[derive(Debug)]
pub(super) struct Latch {
    signalled: Option<SocketAddr>,
    current: Option<SocketAddr>,
    heard: Option<Instant>,
    /// Source, SSRC and the sequence number that must come next.
    candidate: Option<(SocketAddr, u32, u16)>,
}

impl Latch {
    /// `signalled` is the address of the SDP.
    pub(super) fn new(signalled: Option<SocketAddr>) -> Latch {
        Latch { signalled, current: signalled, heard: None, candidate: None }
    }

    /// A new description came. The same address as before changes nothing, so a hold does not unlatch.
    pub(super) fn signal(&mut self, signalled: Option<SocketAddr>) {
        if signalled.is_some() && signalled != self.signalled {
            *self = Latch::new(signalled);
        }
    }

    /// Where to send.
    pub(super) fn target(&self) -> Option<SocketAddr> {
        self.current
    }

    /// Whether a well-formed packet from `from` belongs to the call. `proven`: it was authenticated.
    pub(super) fn admit(&mut self, now: Instant, from: SocketAddr, ssrc: u32, sequence: u16, proven: bool) -> bool {
        let known = Some(from) == self.current || Some(from) == self.signalled;
        if !known && !proven {
            let busy = self.heard.is_some_and(|at| now.saturating_duration_since(at) < SILENCE);
            if busy {
                return false;
            }
            if self.candidate != Some((from, ssrc, sequence)) {
                self.candidate = Some((from, ssrc, sequence.wrapping_add(1)));
                return false;
            }
        }
        self.current = Some(from);
        self.heard = Some(now);
        self.candidate = None;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(port: u16) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, 1], port))
    }

    #[test]
    fn peer_behind_nat_is_learned_from_two_packets() {
        let now = crate::clock::now();
        let mut latch = Latch::new(Some(at(1)));
        assert!(!latch.admit(now, at(2), 7, 10, false));
        assert!(!latch.admit(now, at(2), 7, 12, false), "not in a row");
        assert!(latch.admit(now, at(2), 7, 13, false));
        assert_eq!(latch.target(), Some(at(2)));
    }

    #[test]
    fn stranger_cannot_take_over_a_living_stream() {
        let now = crate::clock::now();
        let mut latch = Latch::new(Some(at(1)));
        assert!(latch.admit(now, at(1), 7, 10, false));
        for sequence in 0..100 {
            assert!(!latch.admit(now, at(2), 8, sequence, false));
        }
        assert_eq!(latch.target(), Some(at(1)));
        let later = now + SILENCE;
        assert!(!latch.admit(later, at(2), 8, 5, false));
        assert!(latch.admit(later, at(2), 8, 6, false), "the old source has gone");
        assert!(latch.admit(later, at(1), 7, 90, false), "the signalled one wins back at once");
        assert_eq!(latch.target(), Some(at(1)));
    }

    #[test]
    fn authenticated_packets_need_no_proof() {
        let mut latch = Latch::new(None);
        assert!(latch.admit(crate::clock::now(), at(3), 7, 10, true));
        assert_eq!(latch.target(), Some(at(3)));
    }

    #[test]
    fn new_description_starts_over_and_a_hold_does_not() {
        let now = crate::clock::now();
        let mut latch = Latch::new(Some(at(1)));
        latch.admit(now, at(2), 7, 1, true);
        latch.signal(None);
        latch.signal(Some(at(1)));
        assert_eq!(latch.target(), Some(at(2)));
        latch.signal(Some(at(4)));
        assert_eq!(latch.target(), Some(at(4)));
    }
}
