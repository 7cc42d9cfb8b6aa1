//! A bad network in user space: a relay between caller and gateway that loses, delays, shakes and reorders.
//!
//! [`Impair`] decides (a machine without I/O: packet and time in, when to deliver out); [`Relay`] moves datagrams of
//! an RTP and RTCP port pair, or of one port that carries everything, by its decisions.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};
use tokio::net::UdpSocket;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use crate::caller::call::CallError;
use crate::clock;

/// What the network does to datagrams, each way on its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Impairment {
    /// Share that is lost, 0 to 1.
    pub loss: f64,
    /// Mean number lost in a row; 1 is independent loss.
    pub burst: f64,
    /// Delay of all, milliseconds.
    pub delay_ms: f64,
    /// Delay on top, evenly spread between 0 and this, milliseconds. Order is kept.
    pub jitter_ms: f64,
    /// Share that is overtaken by the one behind it.
    pub reorder: f64,
    /// Share that arrives twice.
    pub duplicate: f64,
}

impl Impairment {
    /// Whether it does anything.
    pub fn is_none(&self) -> bool {
        *self == Impairment { burst: self.burst, ..Impairment::default() }
    }

    /// What is wrong with the figures: name of the key and the reason.
    ///
    /// # Errors
    /// A share is not within 0 to 1, or a time is negative.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        for (key, share) in [("loss", self.loss), ("reorder", self.reorder), ("duplicate", self.duplicate)] {
            if !(0.0..=1.0).contains(&share) {
                return Err((key, format!("{share} is not between 0 and 1")));
            }
        }
        for (key, ms) in [("delay_ms", self.delay_ms), ("jitter_ms", self.jitter_ms), ("burst", self.burst)] {
            if !(0.0..=60_000.0).contains(&ms) {
                return Err((key, format!("{ms} is not between 0 and 60000")));
            }
        }
        Ok(())
    }
}

/// One way through the bad network.
pub struct Impair {
    what: Impairment,
    rng: StdRng,
    losing: bool,
    /// Order is kept: nothing is delivered before what was sent earlier.
    last: Option<Instant>,
}

impl Impair {
    /// The same seed gives the same fate to the same packets.
    pub fn new(what: Impairment, seed: u64) -> Impair {
        Impair { what, rng: StdRng::seed_from_u64(seed), losing: false, last: None }
    }

    /// When the packet sent at `now` arrives: never, once, or twice.
    pub fn fate(&mut self, now: Instant) -> Vec<Instant> {
        if self.loses() {
            return Vec::new();
        }
        let ms = |ms: f64| Duration::from_secs_f64(ms.max(0.0) / 1_000.0);
        let mut at = now + ms(self.what.delay_ms);
        if self.what.jitter_ms > 0.0 {
            at += ms(self.rng.random_range(0.0..=self.what.jitter_ms));
        }
        at = self.last.map_or(at, |last| last.max(at));
        if self.chance(self.what.reorder) {
            // Late enough for the next packet of a 20 ms stream to pass; what comes next keeps its own time.
            return vec![at + Duration::from_millis(25)];
        }
        self.last = Some(at);
        if self.chance(self.what.duplicate) { vec![at, at] } else { vec![at] }
    }

    /// Gilbert's model: bursts of the wanted mean length, as often as the wanted share needs.
    fn loses(&mut self) -> bool {
        let (loss, burst) = (self.what.loss, self.what.burst.max(1.0));
        if loss <= 0.0 {
            return false;
        }
        if loss >= 1.0 {
            return true;
        }
        let end = 1.0 / burst;
        let start = (loss * end / (1.0 - loss)).min(1.0);
        // Independent loss is the case in which losing does not depend on having lost.
        self.losing = if burst <= 1.0 {
            self.chance(loss)
        } else if self.losing {
            !self.chance(end)
        } else {
            self.chance(start)
        };
        self.losing
    }

    fn chance(&mut self, share: f64) -> bool {
        share > 0.0 && self.rng.random_bool(share.clamp(0.0, 1.0))
    }
}

/// Stands between a caller and a gateway. The gateway is told [`Relay::outer`]; the caller sends to
/// [`Relay::inner`]; both hear from the address they send to.
pub struct Relay {
    outer: SocketAddr,
    inner: [SocketAddr; 2],
    remote: watch::Sender<[Option<SocketAddr>; 2]>,
    _tasks: Vec<AbortOnDropHandle<()>>,
}

impl Relay {
    /// Opens a pair of ports on each side at `address`.
    ///
    /// # Errors
    /// No ports are free.
    pub async fn start(address: IpAddr, what: Impairment, seed: u64) -> Result<Relay, CallError> {
        let outer = port_pair(address).await?;
        let inner = port_pair(address).await?;
        let local = |socket: &UdpSocket| socket.local_addr().map_err(CallError::io("local address"));
        let (outer_address, inner_addresses) = (local(&outer.0)?, [local(&inner.0)?, local(&inner.1)?]);
        let remote = watch::Sender::new([None, None]);
        let pairs = [(outer.0, inner.0), (outer.1, inner.1)];
        let tasks = pairs.into_iter().enumerate().map(|(n, (outer, inner))| {
            let seed = seed.wrapping_mul(31).wrapping_add(n as u64);
            let line = Line { outer, inner, remote: remote.subscribe(), index: n, caller: None };
            AbortOnDropHandle::new(tokio::spawn(line.run(what, seed)))
        });
        let tasks = tasks.collect();
        Ok(Relay { outer: outer_address, inner: inner_addresses, remote, _tasks: tasks })
    }

    /// Where the gateway is to send RTP; RTCP goes to the next port.
    pub fn outer(&self) -> SocketAddr {
        self.outer
    }

    /// Where the caller is to send RTP and RTCP.
    pub fn inner(&self) -> [SocketAddr; 2] {
        self.inner
    }

    /// Where the gateway receives RTP and RTCP.
    pub fn set_remote(&self, rtp: Option<SocketAddr>, rtcp: Option<SocketAddr>) {
        self.remote.send_replace([rtp, rtcp]);
    }
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Held {
    at: Instant,
    /// Keeps order among equals.
    number: u64,
    to_caller: bool,
    bytes: Vec<u8>,
}

struct Line {
    outer: UdpSocket,
    inner: UdpSocket,
    remote: watch::Receiver<[Option<SocketAddr>; 2]>,
    index: usize,
    caller: Option<SocketAddr>,
}

/// Held back at most; beyond it the network is full and loses.
const QUEUE: usize = 4_096;

impl Line {
    async fn run(mut self, what: Impairment, seed: u64) {
        let mut ways = [Impair::new(what, seed), Impair::new(what, seed ^ 0x5555)];
        let mut queue: BinaryHeap<Reverse<Held>> = BinaryHeap::new();
        let mut number = 0;
        let (mut from_gateway, mut from_caller) = (vec![0; 2048], vec![0; 2048]);
        loop {
            let due = queue.peek().map(|Reverse(held)| held.at);
            let (to_caller, bytes) = tokio::select! {
                Ok((n, _)) = self.outer.recv_from(&mut from_gateway) => (true, from_gateway[..n].to_vec()),
                Ok((n, from)) = self.inner.recv_from(&mut from_caller) => {
                    self.caller = Some(from);
                    (false, from_caller[..n].to_vec())
                }
                () = clock::sleep_until(due.unwrap_or_else(clock::now)), if due.is_some() => {
                    self.deliver(&mut queue);
                    continue;
                }
                // Neither socket can be read any more.
                else => return,
            };
            for at in ways[usize::from(to_caller)].fate(clock::now()) {
                number += 1;
                if queue.len() < QUEUE {
                    queue.push(Reverse(Held { at, number, to_caller, bytes: bytes.clone() }));
                }
            }
            self.deliver(&mut queue);
        }
    }

    fn deliver(&self, queue: &mut BinaryHeap<Reverse<Held>>) {
        let now = clock::now();
        while queue.peek().is_some_and(|Reverse(held)| held.at <= now) {
            let Some(Reverse(held)) = queue.pop() else { return };
            let (socket, to) = match held.to_caller {
                true => (&self.inner, self.caller),
                false => (&self.outer, self.remote.borrow()[self.index]),
            };
            if let Some(to) = to {
                // A full socket buffer is one more loss.
                let _ = socket.try_send_to(&held.bytes, to);
            }
        }
    }
}

/// An even port and the next one.
pub(crate) async fn port_pair(address: IpAddr) -> Result<(UdpSocket, UdpSocket), CallError> {
    let mut held = Vec::new();
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for _ in 0..64 {
        let first = UdpSocket::bind((address, 0)).await.map_err(CallError::io(format!("bind rtp on {address}")))?;
        let port = first.local_addr().map_err(CallError::io("local address"))?.port();
        let other = if port % 2 == 0 { port.checked_add(1) } else { port.checked_sub(1) };
        match UdpSocket::bind((address, other.unwrap_or(0))).await {
            Ok(second) if other.is_some() => return Ok(if port % 2 == 0 { (first, second) } else { (second, first) }),
            Ok(second) => held.push(second),
            Err(error) => last = error,
        }
        // Kept, so that the next try is given another port.
        held.push(first);
    }
    Err(CallError::Io { what: format!("find two ports in a row on {address}"), source: last })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fates(what: Impairment, n: usize) -> (Instant, Vec<Vec<Instant>>) {
        let start = clock::now();
        let mut impair = Impair::new(what, 7);
        (start, (0..n).map(|i| impair.fate(start + Duration::from_millis(20) * i as u32)).collect())
    }

    #[test]
    fn loss_is_as_frequent_and_as_bursty_as_asked() {
        for burst in [1.0, 3.0] {
            let (_, fates) = fates(Impairment { loss: 0.1, burst, ..Impairment::default() }, 20_000);
            let lost: Vec<bool> = fates.iter().map(Vec::is_empty).collect();
            let share = lost.iter().filter(|l| **l).count() as f64 / lost.len() as f64;
            assert!((share - 0.1).abs() < 0.015, "{share}");
            let runs = lost.windows(2).filter(|w| w[1] && !w[0]).count() as f64;
            let mean = share * lost.len() as f64 / runs;
            assert!((mean - burst.max(1.11)).abs() < 0.3, "{burst}: {mean}");
        }
    }

    #[test]
    fn delay_and_jitter_keep_order() {
        let (start, fates) = fates(Impairment { delay_ms: 50.0, jitter_ms: 60.0, ..Impairment::default() }, 2_000);
        let at: Vec<_> = fates.into_iter().flatten().collect();
        assert!(at.windows(2).all(|w| w[0] <= w[1]));
        for (n, at) in at.iter().enumerate() {
            let delay = *at - start - Duration::from_millis(20) * n as u32;
            assert!((50..=111).contains(&(delay.as_millis() as u64)), "{delay:?}");
        }
    }

    #[test]
    fn the_reordered_are_passed_by_the_next() {
        let (_, fates) = fates(Impairment { reorder: 0.2, ..Impairment::default() }, 1_000);
        let at: Vec<_> = fates.into_iter().flatten().collect();
        let passed = at.windows(2).filter(|w| w[0] > w[1]).count();
        assert!((100..300).contains(&passed), "{passed}");
    }

    #[test]
    fn figures_out_of_range_are_named() {
        assert_eq!(Impairment { loss: 1.5, ..Impairment::default() }.check().unwrap_err().0, "loss");
        assert_eq!(Impairment { jitter_ms: -1.0, ..Impairment::default() }.check().unwrap_err().0, "jitter_ms");
        assert!(Impairment::default().is_none());
    }

    #[tokio::test]
    async fn datagrams_pass_both_ways() {
        let local = IpAddr::from([127, 0, 0, 1]);
        let relay = Relay::start(local, Impairment { delay_ms: 30.0, ..Impairment::default() }, 1).await.unwrap();
        let (caller, gateway) =
            (UdpSocket::bind((local, 0)).await.unwrap(), UdpSocket::bind((local, 0)).await.unwrap());
        relay.set_remote(Some(gateway.local_addr().unwrap()), None);
        let sent = clock::now();
        caller.send_to(b"ping", relay.inner()[0]).await.unwrap();
        let mut buffer = [0; 16];
        let (n, from) = gateway.recv_from(&mut buffer).await.unwrap();
        assert_eq!((&buffer[..n], from), (&b"ping"[..], relay.outer()));
        gateway.send_to(b"pong", from).await.unwrap();
        let (n, from) = caller.recv_from(&mut buffer).await.unwrap();
        assert_eq!((&buffer[..n], from), (&b"pong"[..], relay.inner()[0]));
        assert!(clock::now() - sent >= Duration::from_millis(60));
    }
}
