//! Datagrams at a rate, from many addresses, and what comes back to them.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use tokio::net::UdpSocket;

use crate::caller::call::CallError;
use crate::clock;

/// How often a burst leaves.
const TICK: Duration = Duration::from_millis(10);
/// How long answers are waited for behind the last datagram.
const LAST: Duration = Duration::from_millis(300);

/// The sockets of an attacker, each with an address of its own.
pub(super) struct Flood {
    sockets: Vec<UdpSocket>,
}

/// What was sent and what came back.
#[derive(Debug, Default)]
pub(super) struct Back {
    /// Datagrams that left.
    pub(super) sent: u64,
    /// SIP responses by status, and everything else as 0, by the attacker's socket.
    pub(super) answers: BTreeMap<(usize, u16), u64>,
    /// When the refusals of evaluated credentials (403) came, by the attacker's socket.
    refused: BTreeMap<usize, Vec<Instant>>,
}

impl Back {
    /// Answers that `wanted` is true of, by their status.
    pub(super) fn count(&self, wanted: impl Fn(u16) -> bool) -> f64 {
        self.answers.iter().filter(|((_, status), _)| wanted(*status)).map(|(_, count)| *count).sum::<u64>() as f64
    }

    /// The most 403s that one socket got in any `span`.
    pub(super) fn most_in(&self, span: Duration) -> f64 {
        let of = |times: &Vec<Instant>| {
            let within = |(n, from): (usize, &Instant)| times[n..].iter().take_while(|at| **at - *from < span).count();
            times.iter().enumerate().map(within).max()
        };
        self.refused.values().filter_map(of).max().unwrap_or(0) as f64
    }
}

impl Flood {
    /// `count` sockets at loopback addresses that differ in their last two bytes, from `127.NET.0.1` on.
    pub(super) async fn bind(net: u8, count: usize) -> Result<Flood, CallError> {
        let mut sockets = Vec::with_capacity(count);
        for n in 0..count {
            let address = source(net, n);
            let socket = UdpSocket::bind((address, 0)).await.map_err(CallError::io(format!("bind {address}")))?;
            sockets.push(socket);
        }
        Ok(Flood { sockets })
    }

    /// Sends `rate` datagrams a second for as long as it `lasts`, the sockets in turn; each datagram goes where it says.
    pub(super) async fn send(
        &self,
        rate: f64,
        lasts: Duration,
        mut make: impl FnMut(usize) -> (Vec<u8>, SocketAddr),
    ) -> Back {
        let (began, mut back) = (clock::now(), Back::default());
        loop {
            let passed = clock::now().saturating_duration_since(began);
            let due = (passed.min(lasts).as_secs_f64() * rate) as u64;
            while back.sent < due {
                let turn = back.sent as usize % self.sockets.len();
                let (datagram, target) = make(turn);
                // What the system has no room for is not sent: the rate is what it takes.
                let _ = self.sockets[turn].try_send_to(&datagram, target);
                back.sent += 1;
            }
            self.read(&mut back);
            if passed >= lasts {
                break;
            }
            clock::sleep_until(clock::now() + TICK).await;
        }
        clock::sleep_until(clock::now() + LAST).await;
        self.read(&mut back);
        back
    }

    /// Sends one datagram from one socket and waits a moment for the first response.
    pub(super) async fn ask(&self, turn: usize, request: &str, target: SocketAddr) -> Option<String> {
        self.sockets[turn].send_to(request.as_bytes(), target).await.ok()?;
        let mut buffer = vec![0; 4_096];
        let answer = async {
            loop {
                let (length, _) = self.sockets[turn].recv_from(&mut buffer).await.ok()?;
                let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
                if status(text.as_bytes()) >= 200 {
                    return Some(text);
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(5), answer).await.ok().flatten()
    }

    fn read(&self, back: &mut Back) {
        let mut buffer = [0; 2_048];
        for (turn, socket) in self.sockets.iter().enumerate() {
            while let Ok((length, _)) = socket.try_recv_from(&mut buffer) {
                let status = status(&buffer[..length]);
                *back.answers.entry((turn, status)).or_default() += 1;
                if status == 403 {
                    back.refused.entry(turn).or_default().push(clock::now());
                }
            }
        }
    }
}

/// The `n`th loopback address of an attacker.
pub(super) fn source(net: u8, n: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(127, net, (n / 250) as u8, (n % 250) as u8 + 1))
}

/// The status of a SIP response; 0: it is none.
pub(super) fn status(datagram: &[u8]) -> u16 {
    let text = datagram.strip_prefix(b"SIP/2.0 ").and_then(|rest| rest.get(..3));
    text.and_then(|text| std::str::from_utf8(text).ok()?.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn datagrams_leave_at_their_rate_and_answers_are_counted_by_status() {
        let gateway = UdpSocket::bind("127.0.0.1:0").await.expect("a free port");
        let target = gateway.local_addr().expect("bound");
        let answering = tokio::spawn(async move {
            let (mut buffer, mut answered) = ([0; 64], 0);
            while answered < 50 {
                let (_, from) = gateway.recv_from(&mut buffer).await.expect("a datagram");
                let text = if answered % 2 == 0 { "SIP/2.0 403 No\r\n" } else { "noise" };
                gateway.send_to(text.as_bytes(), from).await.expect("sent");
                answered += 1;
            }
        });
        let flood = Flood::bind(77, 3).await.expect("loopback addresses");
        let back = flood.send(250.0, Duration::from_millis(200), |turn| (vec![turn as u8], target)).await;
        assert_eq!(back.sent, 50);
        tokio::time::timeout(Duration::from_secs(20), answering).await.expect("all came").expect("no panic");
        let counted = back.count(|status| status == 403) + back.count(|status| status == 0);
        let refused = back.count(|status| status == 403);
        assert!(counted <= 50.0 && back.most_in(LAST * 100) <= refused && back.most_in(Duration::ZERO) == 0.0);
        assert_eq!((source(3, 0).to_string(), source(3, 250).to_string()), ("127.3.0.1".into(), "127.3.1.1".into()));
    }
}
