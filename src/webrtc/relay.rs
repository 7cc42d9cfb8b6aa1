//! The way to a TURN server (RFC 8656), for a gateway that browsers cannot reach at its own port: behind a NAT that maps each
//! of them to another address, or a firewall.
//!
//! Owns one connection to the server for each session. Speaks no TURN: the stack's client does, and believes that it sends
//! datagrams to the server's address; here they are carried, over UDP as they are, over TCP and TLS one after the other.
//!
//! # Why
//! An allocation belongs to the address that asked for it, so the sessions of the one port cannot share it. And a network
//! that lets no UDP out is a reason to need a relay.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::mpsc;
use tokio_rustls::TlsConnector;
use tokio_util::task::AbortOnDropHandle;

use crate::socket;

/// Datagrams on their way to the server: five seconds of audio.
const QUEUE: usize = 256;
/// Nothing that a relay carries is longer.
const LONGEST: usize = 2048;

/// A TURN server as it is configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Server {
    host: String,
    carrier: Carrier,
}

/// What carries messages to a server and back.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Carrier {
    Udp,
    Tcp,
    /// The certificate is to be of this name.
    Tls(ServerName<'static>),
}

impl Server {
    /// Reads `turn:host[:port][?transport=udp|tcp]` and `turns:host[:port]`, which is TLS (RFC 7065).
    ///
    /// # Errors
    /// What to change.
    pub(super) fn parse(url: &str) -> Result<Self, String> {
        let (rest, is_secure) = match (url.strip_prefix("turn:"), url.strip_prefix("turns:")) {
            (Some(rest), _) => (rest, false),
            (None, Some(rest)) => (rest, true),
            (None, None) => {
                return Err(format!(
                    "`{url}`: a relay for the gateway itself is `turn:host:port`, over UDP or with `?transport=tcp`, or \
                     `turns:host:port`, which is TLS"
                ));
            }
        };
        let (host, transport) = match rest.split_once('?') {
            Some((host, transport)) => (host, Some(transport)),
            None => (rest, None),
        };
        let tcp = match (is_secure, transport) {
            (false, None | Some("transport=udp")) => false,
            (false, Some("transport=tcp")) | (true, None | Some("transport=tcp")) => true,
            (true, Some("transport=udp")) => {
                return Err(format!("`{url}`: `turns:` goes over TCP, `?transport=tcp`; DTLS there is none"));
            }
            (_, Some(other)) => {
                return Err(format!("`{url}`: `{other}` is neither `transport=udp` nor `transport=tcp`"));
            }
        };
        // A colon behind the last bracket, or without brackets, begins the port.
        let has_port = host.rsplit(']').next().is_some_and(|tail| tail.contains(':'));
        let host = if has_port { host.to_owned() } else { format!("{host}:{}", if is_secure { 5349 } else { 3478 }) };
        let name = host.rsplit_once(':').filter(|(name, port)| !name.is_empty() && port.parse::<u16>().is_ok());
        let Some((name, _)) = name else { return Err(format!("`{url}`: no host and port in it")) };
        let carrier = match (is_secure, tcp) {
            (true, _) => {
                let name = name.trim_start_matches('[').trim_end_matches(']').to_owned();
                Carrier::Tls(ServerName::try_from(name).map_err(|error| format!("`{url}`: {error}"))?)
            }
            (false, true) => Carrier::Tcp,
            (false, false) => Carrier::Udp,
        };
        Ok(Self { host, carrier })
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
        let carrier = server.carrier.clone();
        let task = tokio::spawn(async move {
            let carried = match carrier {
                Carrier::Udp => over_udp(queue, deliver).await,
                Carrier::Tcp => over_tcp(queue, deliver, None).await,
                Carrier::Tls(name) => match socket::trust() {
                    Ok(trust) => over_tcp(queue, deliver, Some((TlsConnector::from(trust), name))).await,
                    Err(error) => Err(io::Error::other(error)),
                },
            };
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
    // What other addresses send is not read.
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
    secure: Option<(TlsConnector, ServerName<'static>)>,
) -> io::Result<()> {
    let Some((server, first)) = queue.recv().await else { return Ok(()) };
    let stream = TcpStream::connect(server).await?;
    stream.set_nodelay(true)?;
    match secure {
        Some((connector, name)) => {
            let stream = connector.connect(name, stream).await?;
            over_stream(stream, server, first, queue, deliver).await
        }
        None => over_stream(stream, server, first, queue, deliver).await,
    }
}

async fn over_stream(
    stream: impl AsyncRead + AsyncWrite,
    server: SocketAddr,
    first: Bytes,
    mut queue: mpsc::Receiver<(SocketAddr, Bytes)>,
    deliver: impl Fn(SocketAddr, &[u8]),
) -> io::Result<()> {
    let (read, mut write) = tokio::io::split(stream);
    let writing = async {
        send(&mut write, &first).await?;
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
async fn send(stream: &mut (impl AsyncWrite + Unpin), message: &[u8]) -> io::Result<()> {
    // At once, for each piece is a record of its own where the stream is secured.
    let mut whole = message.to_vec();
    whole.resize(message.len().next_multiple_of(4), 0);
    stream.write_all(&whole).await?;
    stream.flush().await
}

async fn receive(
    mut stream: impl AsyncRead + Unpin,
    server: SocketAddr,
    deliver: impl Fn(SocketAddr, &[u8]),
) -> io::Result<()> {
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
        let read = |url: &str| Server::parse(url).map(|server| (server.url(), server.carrier));
        let named = |name: &'static str| Carrier::Tls(ServerName::try_from(name).expect("a name"));
        for (url, address, carrier) in [
            ("turn:relay.example", "relay.example:3478", Carrier::Udp),
            ("turn:[2001:db8::1]", "[2001:db8::1]:3478", Carrier::Udp),
            ("turn:192.0.2.1:80?transport=tcp", "192.0.2.1:80", Carrier::Tcp),
            ("turns:relay.example", "relay.example:5349", named("relay.example")),
            ("turns:[2001:db8::1]:443?transport=tcp", "[2001:db8::1]:443", named("2001:db8::1")),
        ] {
            assert_eq!(read(url), Ok((format!("turn:{address}?transport=udp"), carrier)));
        }
        for (url, word) in [
            ("stun:a:1", "turn:host:port"),
            ("turns:a:1?transport=udp", "transport=tcp"),
            ("turns:a b:1", "turns:a b:1"),
            ("turn:a:1?transport=sctp", "transport=tcp"),
            ("turn::1", "no host"),
            ("turn:a:b", "no host"),
        ] {
            let error = read(url).expect_err(url);
            assert!(error.contains(word), "{url}: {error}");
        }
    }

    /// The server's end of a connection, over TCP as it is or with what `secure` makes of it.
    async fn pass_one_by_one<S: AsyncRead + AsyncWrite + Unpin>(
        trusted: Option<(TlsConnector, ServerName<'static>)>,
        secure: impl AsyncFnOnce(TcpStream) -> S,
    ) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let (tell, mut told) = mpsc::channel(8);
        let deliver = move |from, message: &[u8]| {
            tell.try_send((from, message.to_vec())).expect("room");
        };
        let (out, queue) = mpsc::channel(QUEUE);
        let task = AbortOnDropHandle::new(tokio::spawn(over_tcp(queue, deliver, trusted)));
        let relay = Relay { addresses: Mutex::default(), out, _task: AbortOnDropHandle::new(tokio::spawn(async {})) };
        assert!(!relay.take(address, b"before its name is known"));
        relay.resolved(&[address]);
        // Channel data of five octets, and a STUN message without attributes.
        let (data, stun) = ([64, 1, 0, 5, 1, 2, 3, 4, 5], [[0, 1, 0, 0].as_slice(), &[7; 16]].concat());
        assert!(relay.take(address, &data) && relay.take(address, &stun));
        let (stream, _) = listener.accept().await.expect("a connection");
        let mut stream = secure(stream).await;
        let mut sent = vec![0; 12 + 20];
        stream.read_exact(&mut sent).await.expect("both");
        assert_eq!(sent, [&data[..], &[0; 3], &stun[..]].concat());
        stream.write_all(&sent).await.expect("echoed");
        stream.flush().await.expect("echoed");
        assert_eq!(told.recv().await.expect("data"), (address, data.to_vec()));
        assert_eq!(told.recv().await.expect("STUN"), (address, stun));
        drop(task);
    }

    #[tokio::test]
    async fn messages_pass_over_tcp_one_by_one() {
        pass_one_by_one(None, async |stream| stream).await;
    }

    #[tokio::test]
    async fn messages_pass_over_tls_to_whom_the_certificate_names_and_to_no_other() {
        let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
        let own = rcgen::generate_simple_self_signed(["relay.example".to_owned()]).expect("a certificate");
        let mut roots = rustls::RootCertStore::empty();
        roots.add(own.cert.der().clone()).expect("a root");
        let key = rustls::pki_types::PrivateKeyDer::Pkcs8(own.signing_key.serialize_der().into());
        let server = rustls::ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![own.cert.der().clone()], key)
            .expect("a server");
        let acceptor = tokio_rustls::TlsAcceptor::from(std::sync::Arc::new(server));
        let client = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_root_certificates(roots)
            .with_no_client_auth();
        let connector = TlsConnector::from(std::sync::Arc::new(client));
        let name = |name: &'static str| ServerName::try_from(name).expect("a name");
        let secured = Some((connector.clone(), name("relay.example")));
        let accept = acceptor.clone();
        pass_one_by_one(secured, async |stream| accept.accept(stream).await.expect("TLS")).await;

        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let (out, queue) = mpsc::channel(1);
        out.try_send((address, Bytes::from_static(b"secret"))).expect("room");
        let other = over_tcp(queue, |_, _| {}, Some((connector, name("other.example"))));
        let accepted = async {
            let (stream, _) = listener.accept().await.expect("a connection");
            acceptor.accept(stream).await.map(drop)
        };
        let (refused, accepted) = tokio::join!(other, accepted);
        assert!(refused.is_err() && accepted.is_err(), "{refused:?}, {accepted:?}");
    }
}
