//! The way to a TURN server (RFC 8656), for a gateway that browsers cannot reach at its own port: behind a NAT that maps each
//! of them to another address, or a firewall.
//!
//! Owns one connection to the server for each session. Speaks no TURN: the stack's client does, and believes that it sends
//! datagrams to the server's address; here they are carried, over UDP as they are, over TCP one after the other.
//!
//! # Why
//! An allocation belongs to the address that asked for it, so the sessions of the one port cannot share it. And a network
//! that lets no UDP out is a reason to need a relay.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

/// Datagrams on their way to the server: five seconds of audio.
const QUEUE: usize = 256;
/// Nothing that a relay carries is longer.
const LONGEST: usize = 2048;

/// A TURN server as it is configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Server {
    host: String,
    tcp: bool,
}

impl Server {
    /// Reads `turn:host[:port][?transport=udp|tcp]` (RFC 7065).
    ///
    /// # Errors
    /// What to change.
    pub(super) fn parse(url: &str) -> Result<Self, String> {
        let rest = url.strip_prefix("turn:").ok_or_else(|| {
            format!("`{url}`: a relay for the gateway itself is `turn:host:port`, over UDP or with `?transport=tcp`")
        })?;
        let (host, transport) = rest.split_once('?').unwrap_or((rest, "transport=udp"));
        let tcp = match transport {
            "transport=udp" => false,
            "transport=tcp" => true,
            other => return Err(format!("`{url}`: `{other}` is neither `transport=udp` nor `transport=tcp`")),
        };
        // A colon behind the last bracket, or without brackets, begins the port.
        let has_port = host.rsplit(']').next().is_some_and(|tail| tail.contains(':'));
        let host = if has_port { host.to_owned() } else { format!("{host}:3478") };
        let named = host.rsplit_once(':').is_some_and(|(name, port)| !name.is_empty() && port.parse::<u16>().is_ok());
        if named { Ok(Self { host, tcp }) } else { Err(format!("`{url}`: no host and port in it")) }
    }

    /// What the stack is told: to it the server is always reached over UDP.
    pub(super) fn url(&self) -> String {
        format!("turn:{}?transport=udp", self.host)
    }
}

/// One session's connection to the server. Dropping it closes it.
pub(super) struct Relay {
    /// Where the server is, once its name is resolved.
    addresses: Mutex<Vec<SocketAddr>>,
    out: mpsc::Sender<(SocketAddr, Bytes)>,
    _task: AbortOnDropHandle<()>,
}

impl fmt::Debug for Relay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay").finish_non_exhaustive()
    }
}

impl Relay {
    /// Connects when the first datagram is to go; `deliver` gets what comes, and from where.
    pub(super) fn start(server: &Server, deliver: impl Fn(SocketAddr, &[u8]) + Send + Sync + 'static) -> Self {
        let (out, queue) = mpsc::channel(QUEUE);
        let tcp = server.tcp;
        let task = tokio::spawn(async move {
            let carried = if tcp { over_tcp(queue, deliver).await } else { over_udp(queue, deliver).await };
            if let Err(error) = carried {
                tracing::warn!(%error, "the connection to the TURN server");
            }
        });
        Self { addresses: Mutex::default(), out, _task: AbortOnDropHandle::new(task) }
    }

    /// The server has these addresses.
    pub(super) fn resolved(&self, addresses: &[SocketAddr]) {
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(addresses);
    }

    /// Takes a datagram if `to` is the server.
    pub(super) fn take(&self, to: SocketAddr, datagram: &[u8]) -> bool {
        let known = self.addresses.lock().unwrap_or_else(PoisonError::into_inner).contains(&to);
        // overflow: drops (counted). A late packet is worth no more than a lost one.
        if known && self.out.try_send((to, Bytes::copy_from_slice(datagram))).is_err() {
            metrics::counter!("antiphon_webrtc_sends_failed_total", "reason" => "buffer_full").increment(1);
        }
        known
    }
}

async fn over_udp(
    mut queue: mpsc::Receiver<(SocketAddr, Bytes)>,
    deliver: impl Fn(SocketAddr, &[u8]),
) -> io::Result<()> {
    let Some((server, first)) = queue.recv().await else { return Ok(()) };
    let any = if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind(SocketAddr::new(any, 0)).await?;
    // Nobody else is listened to.
    socket.connect(server).await?;
    socket.send(&first).await?;
    let mut buffer = vec![0; LONGEST];
    loop {
        tokio::select! {
            next = queue.recv() => match next {
                // A full buffer or an unreachable server is one more loss.
                Some((_, datagram)) => drop(socket.send(&datagram).await),
                None => return Ok(()),
            },
            received = socket.recv(&mut buffer) => if let Ok(length) = received {
                deliver(server, buffer.get(..length).unwrap_or_default());
            },
        }
    }
}

async fn over_tcp(
    mut queue: mpsc::Receiver<(SocketAddr, Bytes)>,
    deliver: impl Fn(SocketAddr, &[u8]),
) -> io::Result<()> {
    let Some((server, first)) = queue.recv().await else { return Ok(()) };
    let stream = TcpStream::connect(server).await?;
    stream.set_nodelay(true)?;
    let (read, mut write) = stream.into_split();
    send(&mut write, &first).await?;
    let writing = async {
        while let Some((_, message)) = queue.recv().await {
            send(&mut write, &message).await?;
        }
        io::Result::Ok(())
    };
    tokio::select! {
        end = writing => end,
        end = receive(read, server, deliver) => end,
    }
}

/// Channel data is filled up to a multiple of four octets on a stream (RFC 8656 section 12.5); STUN is one by itself.
async fn send(stream: &mut OwnedWriteHalf, message: &[u8]) -> io::Result<()> {
    stream.write_all(message).await?;
    let rest = message.len().next_multiple_of(4) - message.len();
    stream.write_all([0; 3].get(..rest).unwrap_or_default()).await
}

async fn receive(mut stream: OwnedReadHalf, server: SocketAddr, deliver: impl Fn(SocketAddr, &[u8])) -> io::Result<()> {
    let mut buffer = vec![0; LONGEST];
    loop {
        let mut head = [0; 4];
        stream.read_exact(&mut head).await?;
        let length = extent(head).filter(|length| length.next_multiple_of(4) <= LONGEST);
        let length = length.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
        let Some(message) = buffer.get_mut(..length.next_multiple_of(4)) else { return Ok(()) };
        let (begin, rest) = message.split_at_mut(4);
        begin.copy_from_slice(&head);
        stream.read_exact(rest).await?;
        deliver(server, message.get(..length).unwrap_or_default());
    }
}

/// How long the message is that begins with `head`: STUN (RFC 8489 section 5) or channel data (RFC 8656 section 12.4).
fn extent([first, _, high, low]: [u8; 4]) -> Option<usize> {
    let length = usize::from(u16::from_be_bytes([high, low]));
    match first {
        0..=3 => Some(20 + length),
        64..=79 => Some(4 + length),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_read_and_what_is_none_is_told() {
        let read = |url: &str| Server::parse(url).map(|server| (server.url(), server.tcp));
        assert_eq!(read("turn:relay.example"), Ok(("turn:relay.example:3478?transport=udp".to_owned(), false)));
        assert_eq!(read("turn:[2001:db8::1]"), Ok(("turn:[2001:db8::1]:3478?transport=udp".to_owned(), false)));
        let tcp = Ok(("turn:192.0.2.1:80?transport=udp".to_owned(), true));
        assert_eq!(read("turn:192.0.2.1:80?transport=tcp"), tcp);
        for (url, word) in [
            ("stun:a:1", "turn:host:port"),
            ("turns:a:1", "turn:host:port"),
            ("turn:a:1?transport=sctp", "transport=tcp"),
            ("turn::1", "no host"),
            ("turn:a:b", "no host"),
        ] {
            let error = read(url).expect_err(url);
            assert!(error.contains(word), "{url}: {error}");
        }
    }

    #[tokio::test]
    async fn messages_pass_over_tcp_one_by_one() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let (tell, mut told) = mpsc::channel(8);
        let server = Server::parse(&format!("turn:{address}?transport=tcp")).expect("a server");
        let relay = Relay::start(&server, move |from, message| {
            tell.try_send((from, message.to_vec())).expect("room");
        });
        assert!(!relay.take(address, b"before its name is known"));
        relay.resolved(&[address]);
        // Channel data of five octets, and a STUN message without attributes.
        let (data, stun) = ([64, 1, 0, 5, 1, 2, 3, 4, 5], [[0, 1, 0, 0].as_slice(), &[7; 16]].concat());
        assert!(relay.take(address, &data) && relay.take(address, &stun));
        let (mut stream, _) = listener.accept().await.expect("a connection");
        let mut sent = vec![0; 12 + 20];
        stream.read_exact(&mut sent).await.expect("both");
        assert_eq!(sent, [&data[..], &[0; 3], &stun[..]].concat());
        stream.write_all(&sent).await.expect("echoed");
        assert_eq!(told.recv().await.expect("data"), (address, data.to_vec()));
        assert_eq!(told.recv().await.expect("STUN"), (address, stun));
    }
}
