//! Datagrams with the instant at which they reached this machine.
//!
//! # Why
//! A generator with hundreds of calls gets to a datagram later than the network brought it: its thread has to wake up, a tenth of a
//! millisecond on an idle virtual machine and many on a full one. That is no lateness of the gateway, and no listener's
//! telephone has it. The kernel notes when each datagram came (`SO_TIMESTAMPNS`, socket(7)).

use std::io::{self, IoSliceMut};
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use nix::cmsg_space;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg, setsockopt, sockopt};
use nix::sys::time::TimeSpec;
use tokio::io::Interest;
use tokio::net::UdpSocket;

use crate::clock;

/// A datagram that waited longer than this was not: the wall clock, by which the kernel notes it, was set meanwhile.
const LONGEST: Duration = Duration::from_secs(1);

/// Reads the datagrams of one socket.
pub(crate) struct Arrivals {
    /// Room for what the kernel tells beside a datagram.
    control: Vec<u8>,
    /// When the datagram before came: none comes earlier than that.
    latest: Instant,
}

impl Arrivals {
    /// Has the kernel note when datagrams come.
    ///
    /// # Errors
    /// It does not do so.
    pub(crate) fn of(socket: &UdpSocket) -> io::Result<Self> {
        setsockopt(socket, sockopt::ReceiveTimestampns, &true)?;
        Ok(Self { control: cmsg_space!(TimeSpec), latest: clock::now() })
    }

    /// The next datagram that is there: its length and when it came.
    ///
    /// # Errors
    /// There is none ([`io::ErrorKind::WouldBlock`]), or the socket has one.
    pub(crate) fn next(&mut self, socket: &UdpSocket, buffer: &mut [u8]) -> io::Result<(usize, Instant)> {
        let (length, stamp) = socket.try_io(Interest::READABLE, || {
            let mut parts = [IoSliceMut::new(buffer)];
            let message =
                recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut self.control), MsgFlags::MSG_DONTWAIT)?;
            let stamp = message.cmsgs()?.find_map(|told| match told {
                ControlMessageOwned::ScmTimestampns(stamp) => Some(Duration::from(stamp)),
                _ => None,
            });
            Ok((message.bytes, stamp))
        })?;
        let (now, wall) = both_clocks();
        self.latest = self.latest.max(now - stamp.map_or(Duration::ZERO, |stamp| waited(wall, stamp)));
        Ok((length, self.latest))
    }
}

/// How long a datagram has waited that came at `stamp` by the wall clock, at which it is `wall` now.
fn waited(wall: Duration, stamp: Duration) -> Duration {
    let waited = wall.saturating_sub(stamp);
    if waited > LONGEST { Duration::ZERO } else { waited }
}

/// The monotonic clock and the wall clock at one instant: of three readings the one in which least time passed between
/// the two, as the thread may lose its processor there.
fn both_clocks() -> (Instant, Duration) {
    let mut readings = [(); 3].map(|()| (clock::now(), clock::wall(), clock::now()));
    readings.sort_by_key(|(before, _, after)| *after - *before);
    let [(now, wall, _), ..] = readings;
    (now, wall)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_was_set_says_nothing_of_how_long_a_datagram_has_waited() {
        let (wall, ms) = (Duration::from_secs(1_000), Duration::from_millis);
        assert_eq!(waited(wall, wall - ms(3)), ms(3));
        assert_eq!(waited(wall, wall + ms(3)), Duration::ZERO, "set back");
        assert_eq!(waited(wall, wall - Duration::from_secs(60)), Duration::ZERO, "set forward");
    }

    #[tokio::test]
    #[allow(clippy::disallowed_methods, reason = "datagrams wait while real time passes")]
    async fn a_datagram_came_when_it_reached_the_socket_and_not_when_it_is_read() {
        let (to, from) = (UdpSocket::bind("127.0.0.1:0").await.unwrap(), UdpSocket::bind("127.0.0.1:0").await.unwrap());
        let mut arrivals = Arrivals::of(&to).unwrap();
        let mut buffer = [0; 16];
        assert_eq!(arrivals.next(&to, &mut buffer).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let address = to.local_addr().unwrap();
        let before = clock::now();
        from.send_to(b"one", address).await.unwrap();
        std::thread::sleep(Duration::from_millis(20));
        from.send_to(b"second", address).await.unwrap();
        std::thread::sleep(Duration::from_millis(20));
        to.readable().await.unwrap();
        let (length, first) = arrivals.next(&to, &mut buffer).unwrap();
        assert_eq!(&buffer[..length], b"one");
        // The clocks are read one after the other.
        let about = Duration::from_millis(1);
        assert!(first + about >= before);
        let (length, second) = arrivals.next(&to, &mut buffer).unwrap();
        assert_eq!(&buffer[..length], b"second");
        assert!(second - first >= Duration::from_millis(20) - about, "both were read at once");
        assert!(clock::now() - second >= Duration::from_millis(20) - about, "as long as it has waited");
    }
}
