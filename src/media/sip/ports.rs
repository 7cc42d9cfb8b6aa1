//! UDP ports of calls: an even one for RTP and the odd one above it for RTCP.
//!
//! # Why
//! Pairs are handed out in turn through the whole range rather than lowest first, so that packets still in
//! flight for a call that just ended do not reach the next one.

use std::{
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use socket2::{Domain, Protocol, Socket, Type};

/// Expedited forwarding (DSCP 46, RFC 3246) in the place of the TOS octet.
const EXPEDITED: u32 = 46 << 2;
/// Datagrams thrown away at most: more than a socket of usual size holds.
const MAX_EARLY: usize = 4_096;

/// Hands out pairs of bound sockets. Cheap to clone; clones share the turn.
#[derive(Clone, Debug)]
pub(crate) struct PortPool {
    bind: IpAddr,
    first: u16,
    pairs: u32,
    next: Arc<AtomicU32>,
}

/// Two bound sockets that do not block.
#[derive(Debug)]
pub(crate) struct PortPair {
    pub(crate) rtp: UdpSocket,
    pub(crate) rtcp: UdpSocket,
    pub(crate) port: u16,
}

impl PortPair {
    /// Throws away what came before the called party answered: ringing tones and announcements, some of them seconds
    /// old, are nothing that it says.
    pub(crate) fn discard(&self) {
        for socket in [&self.rtp, &self.rtcp] {
            // The bound is for who sends faster than this reads. An error left by an earlier send takes a turn, too.
            for _ in 0..MAX_EARLY {
                if socket.recv_from(&mut [0; 1]).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
                    break;
                }
            }
        }
    }
}

impl PortPool {
    /// Ports from `min` to `max`, inclusive, on `bind`. `None`: not one pair fits.
    pub(crate) fn new(bind: IpAddr, min: u16, max: u16) -> Option<PortPool> {
        let first = min.checked_next_multiple_of(2)?;
        let pairs = (u32::from(max) + 1).checked_sub(u32::from(first))? / 2;
        (pairs > 0 && first > 0).then(|| PortPool { bind, first, pairs, next: Arc::default() })
    }

    /// Binds the next pair that is free.
    pub(crate) fn bind(&self) -> io::Result<PortPair> {
        let mut error = io::Error::from(io::ErrorKind::AddrInUse);
        for _ in 0..self.pairs {
            let turn = self.next.fetch_add(1, Ordering::Relaxed) % self.pairs;
            // In range by construction: `first + 2 * pairs - 1 <= max`.
            let port = self.first + u16::try_from(2 * turn).unwrap_or(0);
            match self.bind_at(port) {
                Ok(pair) => return Ok(pair),
                Err(e) => error = e,
            }
            // Anything but a taken port, such as no more descriptors, fails for the next one too.
            if error.kind() != io::ErrorKind::AddrInUse {
                break;
            }
        }
        Err(error)
    }

    fn bind_at(&self, port: u16) -> io::Result<PortPair> {
        Ok(PortPair { rtp: socket(self.bind, port)?, rtcp: socket(self.bind, port + 1)?, port })
    }
}

fn socket(ip: IpAddr, port: u16) -> io::Result<UdpSocket> {
    let domain = if ip.is_ipv4() { Domain::IPV4 } else { Domain::IPV6 };
    let socket = Socket::new(domain, Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_nonblocking(true)?;
    // Marking is a courtesy to the network; without permission for it the call works all the same.
    if ip.is_ipv4() {
        socket.set_tos_v4(EXPEDITED).ok();
    } else {
        socket.set_tclass_v6(EXPEDITED).ok();
    }
    socket.bind(&SocketAddr::new(ip, port).into())?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn ranges_without_a_pair_are_refused() {
        let pool = |min, max| PortPool::new(Ipv4Addr::LOCALHOST.into(), min, max);
        assert!(pool(10_001, 10_002).is_none());
        assert!(pool(10_002, 10_000).is_none());
        assert!(pool(65_535, 65_535).is_none());
        assert_eq!(pool(10_001, 10_003).map(|p| (p.first, p.pairs)), Some((10_002, 1)));
        assert_eq!(pool(65_534, 65_535).map(|p| p.pairs), Some(1));
        assert_eq!(pool(2, 65_535).map(|p| p.pairs), Some(32_767));
    }

    #[test]
    fn pairs_are_even_and_rotate_until_all_are_taken() {
        // Below the ports that systems give to sockets that ask for any.
        let pool = PortPool::new(Ipv4Addr::LOCALHOST.into(), 26_100, 26_105).expect("three pairs");
        let mut held: Vec<_> = (0..3).map(|_| pool.bind().expect("free")).collect();
        assert!(held.iter().all(|pair| pair.port % 2 == 0));
        assert_eq!(pool.bind().expect_err("all taken").kind(), io::ErrorKind::AddrInUse);
        held.pop();
        assert!(pool.bind().is_ok());
    }
}
