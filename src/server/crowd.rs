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

/// Who is connected.
#[derive(Debug)]
pub(super) struct Crowd {
    bounds: Bounds,
    all: usize,
    by_address: HashMap<IpAddr, usize>,
}

impl Crowd {
    pub(super) fn new(bounds: Bounds) -> Self {
        Self { bounds, all: 0, by_address: HashMap::new() }
    }

    /// Counts a connection in; `false`: there is no room for it.
    pub(super) fn enter(&mut self, peer: IpAddr) -> bool {
        let peer = network(peer);
        let here = self.by_address.entry(peer).or_default();
        if self.all >= self.bounds.all || (*here >= self.bounds.per_address && !peer.is_loopback()) {
            if *here == 0 {
                self.by_address.remove(&peer);
            }
            return false;
        }
        *here += 1;
        self.all += 1;
        true
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
        assert!(crowd.enter(ip("192.0.2.1")) && crowd.enter(ip("::ffff:192.0.2.1")));
        assert!(!crowd.enter(ip("192.0.2.1")));
        assert!(crowd.enter(ip("2001:db8::1")) && crowd.enter(ip("2001:db8::2")));
        assert!(!crowd.enter(ip("2001:db8::3")), "a /64 is one");
        assert!(crowd.enter(ip("127.0.0.1")) && !crowd.enter(ip("127.0.0.1")), "five in all");
        for peer in ["192.0.2.1", "192.0.2.1", "2001:db8::7", "2001:db8::8", "127.0.0.1"] {
            crowd.leave(ip(peer));
        }
        assert!(crowd.all == 0 && crowd.by_address.is_empty());
        assert!((0..3).all(|_| crowd.enter(ip("127.0.0.1"))), "loopback has no share of its own");
    }
}
