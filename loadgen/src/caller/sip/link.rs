//! How SIP messages come and go: one UDP socket, or connections to and from the gateway.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use super::Transport;
use super::message::Message;
use crate::caller::call::CallError;

/// Where a message came from or goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Peer {
    Address(SocketAddr),
    Connection(u64),
}

pub(super) enum Link {
    Udp { socket: UdpSocket, local: SocketAddr, buffer: Vec<u8> },
    Stream(Streams),
}

pub(super) struct Streams {
    tls: bool,
    local: SocketAddr,
    /// The gateway may connect to us for requests of its own; not under TLS, for which we have no certificate.
    listener: TcpListener,
    connections: HashMap<u64, Connection>,
    next: u64,
    received: mpsc::Receiver<(u64, Message)>,
    sender: mpsc::Sender<(u64, Message)>,
}

struct Connection {
    write: Box<dyn AsyncWrite + Send + Unpin>,
    _reader: AbortOnDropHandle<()>,
}

impl Link {
    pub(super) async fn bind(address: IpAddr, transport: Transport) -> Result<Link, CallError> {
        let any = SocketAddr::new(address, 0);
        if transport == Transport::Udp {
            let socket = UdpSocket::bind(any).await.map_err(CallError::io(format!("bind udp {any}")))?;
            let local = socket.local_addr().map_err(CallError::io("local address"))?;
            return Ok(Link::Udp { socket, local, buffer: vec![0; 65_536] });
        }
        let listener = TcpListener::bind(any).await.map_err(CallError::io(format!("listen on tcp {any}")))?;
        let local = listener.local_addr().map_err(CallError::io("local address"))?;
        let (sender, received) = mpsc::channel(32);
        let tls = transport == Transport::Tls;
        Ok(Link::Stream(Streams { tls, local, listener, connections: HashMap::new(), next: 0, received, sender }))
    }

    pub(super) fn local(&self) -> SocketAddr {
        match self {
            Link::Udp { local, .. } => *local,
            Link::Stream(streams) => streams.local,
        }
    }

    /// A way to `host:port`: its address, or a new connection.
    pub(super) async fn connect(&mut self, host: &str) -> Result<Peer, CallError> {
        let address = tokio::net::lookup_host(host)
            .await
            .map_err(CallError::io(format!("look up {host}")))?
            .next()
            .ok_or_else(|| CallError::Target(host.to_owned()))?;
        match self {
            Link::Udp { .. } => Ok(Peer::Address(address)),
            Link::Stream(streams) => streams.connect(address, host).await,
        }
    }

    pub(super) async fn send(&mut self, bytes: &[u8], peer: Peer) -> io::Result<()> {
        match (self, peer) {
            (Link::Udp { socket, .. }, Peer::Address(address)) => socket.send_to(bytes, address).await.map(drop),
            (Link::Stream(streams), Peer::Connection(id)) => match streams.connections.get_mut(&id) {
                Some(connection) => connection.write.write_all(bytes).await,
                None => Err(io::ErrorKind::NotConnected.into()),
            },
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// The next message; what is none is passed over. Cancel safe.
    pub(super) async fn recv(&mut self) -> (Message, Peer) {
        match self {
            Link::Udp { socket, buffer, .. } => loop {
                match socket.recv_from(buffer).await {
                    Ok((n, from)) => match Message::parse(&buffer[..n]) {
                        Ok(message) => return (message, Peer::Address(from)),
                        Err(error) => tracing::debug!(%from, %error, "ignored a datagram that is no SIP message"),
                    },
                    // An ICMP error about something sent before; the timers deal with silence.
                    Err(error) => tracing::debug!(%error, "udp"),
                }
            },
            Link::Stream(streams) => loop {
                tokio::select! {
                    // `streams` keeps a sender, so this never ends.
                    Some((id, message)) = streams.received.recv() => return (message, Peer::Connection(id)),
                    Ok((stream, _)) = streams.listener.accept(), if !streams.tls => {
                        let (read, write) = stream.into_split();
                        streams.add(read, write);
                    }
                }
            },
        }
    }
}

impl Streams {
    async fn connect(&mut self, address: SocketAddr, host: &str) -> Result<Peer, CallError> {
        let stream = TcpStream::connect(address).await.map_err(CallError::io(format!("connect to {address}")))?;
        stream.set_nodelay(true).map_err(CallError::io("no delay"))?;
        let id = if self.tls {
            let name = host.rsplit_once(':').map_or(host, |(name, _)| name).trim_matches(['[', ']']).to_owned();
            let name = ServerName::try_from(name).map_err(|_| CallError::Target(host.to_owned()))?;
            let stream = connector().connect(name, stream).await.map_err(CallError::io(format!("TLS to {address}")))?;
            let (read, write) = tokio::io::split(stream);
            self.add(read, write)
        } else {
            let (read, write) = stream.into_split();
            self.add(read, write)
        };
        Ok(Peer::Connection(id))
    }

    fn add(
        &mut self,
        read: impl AsyncRead + Send + Unpin + 'static,
        write: impl AsyncWrite + Send + Unpin + 'static,
    ) -> u64 {
        self.next += 1;
        let reader = AbortOnDropHandle::new(tokio::spawn(read_messages(read, self.next, self.sender.clone())));
        self.connections.insert(self.next, Connection { write: Box::new(write), _reader: reader });
        self.next
    }
}

async fn read_messages(mut read: impl AsyncRead + Unpin, id: u64, sender: mpsc::Sender<(u64, Message)>) {
    let mut stream = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(n @ 1..) = read.read(&mut buffer).await {
        stream.extend_from_slice(&buffer[..n]);
        loop {
            match Message::take(&mut stream) {
                // overflow: awaited; TCP slows the sender down.
                Ok(Some(message)) => {
                    if sender.send((id, message)).await.is_err() {
                        return;
                    }
                }
                Ok(None) => break,
                Err(error) => {
                    tracing::debug!(%error, "closed a connection that does not speak SIP");
                    return;
                }
            }
        }
    }
}

fn connector() -> tokio_rustls::TlsConnector {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .expect("ring has the suites of TLS 1.2 and 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyCertificate(provider)))
        .with_no_client_auth();
    tokio_rustls::TlsConnector::from(Arc::new(config))
}

/// Takes any certificate: the gateway under test has one it made for itself.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
