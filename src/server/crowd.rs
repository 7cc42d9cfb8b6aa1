//! How many connections there may be, in all and from one address. A state machine without I/O.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};

/// Bounds of `[http]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Connections at once, long-lived sockets included.
    pub all: usize,
    /// Of these, from one address (IPv6: one /64). Loopback is not held to it: a proxy there speaks for everybody.
    pub per_address: usize,
}

/// Of four places, those that sockets may take which stay open (WebSockets): requests find room beside them.
const SOCKETS: usize = 3;

/// What becomes of one who comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// There is room.
    In,
    /// There are as many as there may be.
    Full,
    /// There are as many from that address as there may be.
    Share,
}

/// Who is connected.
#[derive(Debug)]
pub(super) struct Crowd {
    bounds: Bounds,
    all: usize,
    sockets: usize,
    by_address: HashMap<IpAddr, usize>,
}

impl Crowd {
    pub(super) fn new(bounds: Bounds) -> Self {
        Self { bounds, all: 0, sockets: 0, by_address: HashMap::new() }
    }

    /// Counts a connection in where there is room. `displaces`: one that is there leaves for it.
    pub(super) fn enter(&mut self, peer: IpAddr, displaces: bool) -> Entry {
        let peer = network(peer);
        let here = self.by_address.get(&peer).copied().unwrap_or_default();
        if here >= self.bounds.per_address && !peer.is_loopback() {
            return Entry::Share;
        }
        if self.all >= self.bounds.all && !displaces {
            return Entry::Full;
        }
        self.by_address.insert(peer, here + 1);
        self.all += 1;
        Entry::In
    }

    /// Counts one of those who are there as a socket that stays open; `false`: there are as many of these as there may be.
    pub(super) fn stay(&mut self) -> bool {
        let room = self.sockets < (self.bounds.all * SOCKETS).div_ceil(4);
        self.sockets += usize::from(room);
        room
    }

    /// A socket that [`Crowd::stay`] counted ends.
    pub(super) fn end_stay(&mut self) {
        self.sockets -= 1;
    }

    /// Counts one out that [`Crowd::enter`] counted in.
    pub(super) fn leave(&mut self, peer: IpAddr) {
        let peer = network(peer);
        self.all -= 1;
        if let Some(here) = self.by_address.get_mut(&peer) {
            *here -= 1;
            if *here == 0 {
                self.by_address.remove(&peer);
            }
        }
    }
}

/// A client with one IPv6 address has all of its /64.
fn network(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(address) if !address.is_loopback() => {
            let [a, b, c, d, ..] = address.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn one_address_takes_its_share_and_no_more() {
        let mut crowd = Crowd::new(Bounds { all: 5, per_address: 2 });
        for (peer, entry) in [
            ("192.0.2.1", Entry::In),
            ("::ffff:192.0.2.1", Entry::In),
            ("192.0.2.1", Entry::Share),
            ("2001:db8::1", Entry::In),
            ("2001:db8::2", Entry::In),
            // A /64 is one.
            ("2001:db8::3", Entry::Share),
            ("127.0.0.1", Entry::In),
            ("127.0.0.1", Entry::Full),
        ] {
            assert_eq!(crowd.enter(ip(peer), false), entry, "{peer}");
        }
        assert_eq!(crowd.enter(ip("2001:db8::3"), true), Entry::Share, "nobody leaves for who has his share");
        assert_eq!(crowd.enter(ip("127.0.0.1"), true), Entry::In);
        for peer in ["192.0.2.1", "192.0.2.1", "2001:db8::7", "2001:db8::8", "127.0.0.1", "127.0.0.1"] {
            crowd.leave(ip(peer));
        }
        assert!(crowd.all == 0 && crowd.by_address.is_empty());
        assert!((0..3).all(|_| crowd.enter(ip("127.0.0.1"), false) == Entry::In), "loopback has no share of its own");
    }

    #[test]
    fn sockets_that_stay_open_leave_a_quarter_to_requests() {
        let mut crowd = Crowd::new(Bounds { all: 8, per_address: 8 });
        assert_eq!((0..8).filter(|_| crowd.stay()).count(), 6);
        crowd.end_stay();
        assert!(crowd.stay() && !crowd.stay());
        assert!(Crowd::new(Bounds { all: 1, per_address: 1 }).stay(), "where there is one place a socket may have it");
    }
}
