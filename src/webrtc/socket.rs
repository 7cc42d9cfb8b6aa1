//! The one UDP port of all sessions, and the TCP port of the same number where that is on.
//!
//! Owns the socket, the task that reads it, and the queue of every session. Decides nothing: [`Demux`] does.
//!
//! # What runs where
//! One task on the runtime that called [`Port::bind`] reads for all sessions, many datagrams a system call, and
//! puts each into its session's queue. Sending takes no task and no lock but that of the session's own path: a session's
//! driver calls the kernel from its own thread.
//!
//! # Why
//! A full socket buffer loses the datagram rather than make a driver wait: a readiness registration has one waker
//! a direction, so sessions that share it would steal each other's wake, and late audio is worth no more than lost
//! audio. DTLS, SCTP and ICE repeat what they lose.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Instant;

use ::webrtc::peer_connection::crypto::RTCCryptoProvider;
use ::webrtc::runtime::{AsyncTcpListener, AsyncUdpSocket, BATCH_SIZE, RecvMeta, Transmit, UdpSockRef, UdpSocketState};
use bytes::Bytes;
use dtls_repeats::Repeats;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::Interest;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::task::JoinHandle;

use super::demux::{Demux, Dropped, Key, Stranger};
use super::path::{Kind, Path};
use super::relay::{Relay, Server};
use super::{stun, tcp};
use crate::clock::{self, Sparse};
use crate::handover::{self, Arrived, Name, Place};

/// Datagrams a session's driver may be behind: five seconds of audio. More are dropped, counted.
const QUEUE: usize = 256;
/// What the kernel may hold for us while the reader waits for its turn.
const KERNEL_BUFFER: usize = 4 * 1024 * 1024;
/// The largest run of datagrams that the kernel hands over as one.
const COALESCED: usize = 65_535;

/// The shared port.
pub(super) struct Port {
    shared: Arc<Shared>,
    reader: JoinHandle<()>,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    socket: UdpSocket,
    local: SocketAddr,
    demux: Mutex<Demux<Inbox>>,
    next: AtomicU64,
    told: Sparse,
    place: Place,
}

/// Where the reader puts a session's datagrams: a queue for each family its agent knows.
struct Inbox {
    v4: mpsc::Sender<Datagram>,
    v6: mpsc::Sender<Datagram>,
    connections: tcp::Inlet,
    path: Arc<Mutex<Path>>,
}

struct Datagram {
    source: SocketAddr,
    bytes: Bytes,
}

impl Port {
    /// Binds `address` and starts to read, as soon as `place` is held; with `tcp`, listens on the same number too.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub(super) fn bind(
        address: SocketAddr,
        tcp: bool,
        crypto: Arc<dyn RTCCryptoProvider>,
        place: &Place,
    ) -> io::Result<Self> {
        let (socket, listener) = bind(address, tcp, place)?;
        let local = socket.local_addr()?;
        let reading = tokio::net::UdpSocket::from_std(socket.try_clone()?)?;
        let state = UdpSocketState::new(UdpSockRef::from(&reading))?;
        let demux = Mutex::new(Demux::new(crypto));
        let (next, told, place) = (AtomicU64::new(0), Sparse::new(), place.clone());
        let shared = Arc::new(Shared { socket, local, demux, next, told, place: place.clone() });
        let reader = tokio::spawn(read(reading, state, shared.clone(), place.arrived(handover::Kind::WebRtc)));
        let acceptor = listener.map(|listener| {
            let shared = shared.clone();
            tcp::accept(listener, place, move |check| {
                shared.lock().claim(check).ok().map(|inbox| inbox.connections.clone())
            })
        });
        Ok(Self { shared, reader, acceptor })
    }

    /// Where it is bound.
    pub(super) fn local_addr(&self) -> SocketAddr {
        self.shared.local
    }

    /// A session's share of the port, and of the TURN server where there is one. Must run on the control runtime.
    pub(super) fn open(&self, server: Option<&Server>) -> Seat {
        let key = Key(self.shared.next.fetch_add(1, Ordering::Relaxed));
        // overflow: drops (counted), by the reader
        let (v4, read_v4) = mpsc::channel(QUEUE);
        let (v6, read_v6) = mpsc::channel(QUEUE);
        // overflow: refused, by the acceptor
        let (tcp_v4, accept_v4) = mpsc::channel(tcp::PER_SESSION);
        let (tcp_v6, accept_v6) = mpsc::channel(tcp::PER_SESSION);
        let places = Arc::new(Semaphore::new(tcp::PER_SESSION));
        let connections = tcp::Inlet { v4: tcp_v4, v6: tcp_v6, places };
        let relay = server.map(|server| {
            let (v4, v6) = (v4.clone(), v6.clone());
            Arc::new(Relay::start(server, move |source, datagram| {
                let queue = if source.is_ipv4() { &v4 } else { &v6 };
                // overflow: drops (counted)
                if queue.try_send(Datagram { source, bytes: Bytes::copy_from_slice(datagram) }).is_err() {
                    metrics::counter!("antiphon_webrtc_datagrams_dropped_total", "reason" => "queue_full").increment(1);
                }
            }))
        });
        let path = Arc::new(Mutex::new(Path::default()));
        self.shared.lock().insert(key, Inbox { v4, v6, connections, path: path.clone() });
        let queues = Mutex::new(Queues {
            v4: Family { datagrams: Some(read_v4), connections: Some(accept_v4) },
            v6: Family { datagrams: Some(read_v6), connections: Some(accept_v6) },
        });
        Seat { key, shared: self.shared.clone(), queues, path, relay, alert: Arc::new(Notify::new()) }
    }

    /// Stops reading. Sessions that are still open can send but not receive.
    pub(super) fn close(&self) {
        self.reader.abort();
        if let Some(acceptor) = &self.acceptor {
            acceptor.abort();
        }
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Demux<Inbox>> {
        // The tables are consistent between calls, so a panic elsewhere does not spoil them.
        self.demux.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn deliver(&self, source: SocketAddr, datagram: &[u8]) {
        let (source, now) = (unmapped(source), clock::now());
        let mut demux = self.lock();
        let dropped = match demux.route(source, datagram) {
            Ok((_, inbox, kind)) => match inbox.take(now, source, kind, datagram) {
                Ok(()) => return,
                Err(reason) => reason,
            },
            Err(Dropped::Stranger) => match demux.stranger(now, source, datagram) {
                Stranger::Proved(inbox) => return lock(&inbox.path).prove(now, source),
                Stranger::Ask(check) => {
                    // overflow: drops; the stranger's next packet asks again.
                    let _ = self.socket.send_to(&check, mapped(source, self.local));
                    Dropped::Stranger.label()
                }
                // It may be of a session of the gateway whose place this one took.
                Stranger::Unknown if self.place.pass(handover::Kind::WebRtc, source, datagram) => return,
                Stranger::Unknown => Dropped::Stranger.label(),
            },
            Err(Dropped::NoSession) if self.place.pass(handover::Kind::WebRtc, source, datagram) => return,
            Err(reason) => reason.label(),
        };
        // Writing a line may take a while.
        drop(demux);
        if let Some(missed) = self.told.admit(now) {
            tracing::info!(from = %source, reason = dropped, missed, "a datagram was dropped");
        }
        metrics::counter!("antiphon_webrtc_datagrams_dropped_total", "reason" => dropped).increment(1);
    }
}

impl Inbox {
    /// Queues a datagram for the session's driver, from where its agent is to believe that it came.
    ///
    /// # Errors
    /// The label of why not.
    fn take(&self, now: Instant, source: SocketAddr, kind: Kind, datagram: &[u8]) -> Result<(), &'static str> {
        let (shown, moved) = {
            let mut path = lock(&self.path);
            if let Kind::Check { .. } = kind {
                path.prove(now, source);
            }
            path.arrived(now, source, kind)
        };
        if moved {
            metrics::counter!("antiphon_webrtc_moves_total").increment(1);
            tracing::info!(to = %source, "a browser has moved");
        }
        let queue = if shown.is_ipv4() { &self.v4 } else { &self.v6 };
        // overflow: drops (counted)
        queue.try_send(Datagram { source: shown, bytes: Bytes::copy_from_slice(datagram) }).map_err(|_| "queue_full")
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What they guard is whole between calls, so a panic elsewhere does not spoil it.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A session's share of the port. Dropping it forgets the session's addresses.
pub(super) struct Seat {
    key: Key,
    shared: Arc<Shared>,
    queues: Mutex<Queues>,
    path: Arc<Mutex<Path>>,
    relay: Option<Arc<Relay>>,
    alert: Arc<Notify>,
}

struct Queues {
    v4: Family,
    v6: Family,
}

/// What arrives for one family, until its sockets take it.
struct Family {
    datagrams: Option<mpsc::Receiver<Datagram>>,
    connections: Option<mpsc::Receiver<tcp::Proved>>,
}

impl Queues {
    fn of(&mut self, local: SocketAddr) -> &mut Family {
        if local.is_ipv4() { &mut self.v4 } else { &mut self.v6 }
    }
}

impl Seat {
    /// Lets checks in that are protected with our `password`; `peer`: its fragment and password.
    pub(super) fn credentials(&self, fragment: &str, password: &str, peer: (&str, &str)) {
        if self.shared.lock().credentials(self.key, fragment, password, peer) {
            lock(&self.path).restart();
        }
    }

    /// The TURN server has these addresses.
    pub(super) fn resolved(&self, addresses: &[SocketAddr]) {
        if let Some(relay) = &self.relay {
            relay.resolved(addresses);
        }
    }

    /// Waits until the connection has dealt with a DTLS alert, or a TCP connection ended: the peer may have closed.
    pub(super) async fn alerted(&self) {
        self.alert.notified().await;
    }

    /// Forgets the session's addresses and credentials.
    pub(super) fn leave(&self) {
        self.shared.lock().remove(self.key);
    }

    /// The socket that the session's agent believes it bound at `local`.
    ///
    /// # Errors
    /// It has been taken already: a session has one of each family.
    pub(super) fn socket(&self, local: SocketAddr) -> io::Result<Arc<dyn AsyncUdpSocket>> {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        let queue = queues.of(local).datagrams.take();
        let queue =
            queue.ok_or_else(|| io::Error::new(io::ErrorKind::AddrInUse, "a session has one socket a family"))?;
        let inlet = Mutex::new(Inlet { queue, alerting: false });
        let (shared, path, alert) = (self.shared.clone(), self.path.clone(), self.alert.clone());
        let (repeats, relay) = (Mutex::default(), self.relay.clone());
        Ok(Arc::new(Virtual { local, key: self.key, shared, path, relay, inlet, alert, repeats }))
    }

    /// The TCP listener that the session's agent believes it bound at `local`.
    ///
    /// # Errors
    /// It has been taken already.
    pub(super) fn listener(&self, local: SocketAddr) -> io::Result<Arc<dyn AsyncTcpListener>> {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        let queue = queues.of(local).connections.take();
        let queue =
            queue.ok_or_else(|| io::Error::new(io::ErrorKind::AddrInUse, "a session has one listener a family"))?;
        Ok(Arc::new(tcp::Virtual::new(local, queue, self.alert.clone())))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.leave();
    }
}

/// A socket of one session: sends through the shared one, receives what the reader found to be its own.
struct Virtual {
    /// The address that the ICE agent was told; it never leaves this process.
    local: SocketAddr,
    key: Key,
    shared: Arc<Shared>,
    path: Arc<Mutex<Path>>,
    relay: Option<Arc<Relay>>,
    /// Only the driver locks it.
    inlet: Mutex<Inlet>,
    alert: Arc<Notify>,
    /// What the DTLS stack has answered. Only the driver locks it.
    repeats: Mutex<Repeats>,
}

struct Inlet {
    queue: mpsc::Receiver<Datagram>,
    /// The datagram handed out last was a DTLS alert. The driver has dealt with it when it asks for the next.
    alerting: bool,
}

impl fmt::Debug for Virtual {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Virtual").field("key", &self.key).finish_non_exhaustive()
    }
}

impl AsyncUdpSocket for Virtual {
    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.local)
    }

    fn poll_send(&self, _: &mut Context<'_>, transmit: &Transmit<'_>) -> Poll<io::Result<usize>> {
        if self.relay.as_ref().is_some_and(|relay| relay.take(transmit.destination, transmit.contents)) {
            return Poll::Ready(Ok(transmit.contents.len()));
        }
        if Repeats::concerns(transmit.contents) {
            lock(&self.repeats).sent(transmit.contents);
        }
        let kind = stun::outgoing(transmit.contents);
        if let Kind::Check { transaction, .. } = kind {
            self.shared.lock().expect(self.key, transaction);
        }
        let destination = lock(&self.path).leaves(clock::now(), transmit.destination, kind);
        let destination = mapped(destination, self.shared.local);
        // overflow: drops (counted). An unreachable candidate fails the same way; its check times out.
        if let Err(error) = self.shared.socket.send_to(transmit.contents, destination) {
            let reason = if error.kind() == io::ErrorKind::WouldBlock { "buffer_full" } else { "unreachable" };
            metrics::counter!("antiphon_webrtc_sends_failed_total", "reason" => reason).increment(1);
        }
        Poll::Ready(Ok(transmit.contents.len()))
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let (Some(buf), Some(meta)) = (bufs.first_mut(), meta.first_mut()) else { return Poll::Ready(Ok(0)) };
        let mut inlet = self.inlet.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::take(&mut inlet.alerting) {
            self.alert.notify_one();
        }
        loop {
            let Some(datagram) = std::task::ready!(inlet.queue.poll_recv(cx)) else {
                // The session's seat is gone; its end arrives by another way.
                return Poll::Pending;
            };
            if Repeats::concerns(&datagram.bytes) && lock(&self.repeats).is_repeat(&datagram.bytes) {
                continue;
            }
            // Longer than any path carries, so nothing that ICE, DTLS or SRTP sent.
            let Some(space) = buf.get_mut(..datagram.bytes.len()) else { continue };
            space.copy_from_slice(&datagram.bytes);
            *meta = RecvMeta::default();
            meta.addr = datagram.source;
            meta.len = datagram.bytes.len();
            meta.stride = meta.len.max(1);
            inlet.alerting = datagram.bytes.first() == Some(&DTLS_ALERT);
            return Poll::Ready(Ok(1));
        }
    }
}

fn bind(address: SocketAddr, tcp: bool, place: &Place) -> io::Result<(UdpSocket, Option<tokio::net::TcpListener>)> {
    if place.has(Name::WebRtcUdp) || !tcp {
        let socket = place.datagrams(Name::WebRtcUdp, address, bind_udp)?;
        let local = socket.local_addr()?;
        let listener = tcp.then(|| place.listener(Name::WebRtcTcp, local, tcp::bind)).transpose()?;
        return Ok((socket, listener));
    }
    // A free UDP port may be taken in TCP: then the kernel is asked for another.
    let attempts = if address.port() == 0 { 8 } else { 1 };
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for _ in 0..attempts {
        let socket = bind_udp(address)?;
        let local = socket.local_addr()?;
        match tcp::bind(local) {
            Ok(listener) => {
                let socket = place.datagrams(Name::WebRtcUdp, local, |_| Ok(socket))?;
                let listener = place.listener(Name::WebRtcTcp, local, |_| Ok(listener))?;
                return Ok((socket, Some(listener)));
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn bind_udp(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    if address.is_ipv6() {
        socket.set_only_v6(!address.ip().is_unspecified())?;
    }
    // Both are best effort: the kernel caps them at its own limits.
    let _ = socket.set_recv_buffer_size(KERNEL_BUFFER);
    let _ = socket.set_send_buffer_size(KERNEL_BUFFER);
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(UdpSocket::from(socket))
}

/// Reads until aborted: the port, while the place is this process's, and what the next one passes on.
async fn read(socket: tokio::net::UdpSocket, state: UdpSocketState, shared: Arc<Shared>, mut arrived: Arrived) {
    let size = if state.gro_segments() > 1 { COALESCED } else { 2048 };
    let mut storage: Vec<Vec<u8>> = (0..BATCH_SIZE).map(|_| vec![0; size]).collect();
    let mut metas = [RecvMeta::default(); BATCH_SIZE];
    let mut failures = Failures::default();
    loop {
        let mut bufs: Vec<IoSliceMut<'_>> = storage.iter_mut().map(|buf| IoSliceMut::new(buf)).collect();
        let held = shared.place.is_held();
        let receive = socket.async_io(Interest::READABLE, || {
            // Another process reads it from the moment on that this one does not hold the place.
            if !shared.place.is_held() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            state.recv(UdpSockRef::from(&socket), &mut bufs, &mut metas)
        });
        let received = tokio::select! {
            received = receive, if held => received,
            Some(datagram) = arrived.recv() => {
                shared.deliver(datagram.from, &datagram.bytes);
                continue;
            }
            () = shared.place.until(!held) => continue,
        };
        drop(bufs);
        let count = match received {
            Ok(count) => count,
            Err(error) => {
                // One peer's ICMP error must not end the port of all the others.
                if failures.note() {
                    tracing::warn!(%error, "reading the WebRTC port");
                }
                tokio::task::yield_now().await;
                continue;
            }
        };
        for (buf, meta) in storage.iter().zip(&metas).take(count) {
            let Some(run) = buf.get(..meta.len) else { continue };
            for datagram in run.chunks(meta.stride.max(1)) {
                shared.deliver(meta.addr, datagram);
            }
        }
        // A flood must not keep everything else on this thread from running.
        tokio::task::yield_now().await;
    }
}

/// Lets every power of two of failures be logged.
#[derive(Default)]
struct Failures(u64);

impl Failures {
    fn note(&mut self) -> bool {
        self.0 += 1;
        self.0.is_power_of_two()
    }
}

/// The IPv4 address inside `::ffff:a.b.c.d`, as a socket for both families reports it.
fn unmapped(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// What a socket bound at `local` must be given to reach `destination`.
fn mapped(destination: SocketAddr, local: SocketAddr) -> SocketAddr {
    match (destination.ip(), local) {
        (IpAddr::V4(ip), SocketAddr::V6(_)) => SocketAddr::new(IpAddr::V6(ip.to_ipv6_mapped()), destination.port()),
        _ => destination,
    }
}

/// The addresses that peers are told, for a port bound at `local`: `public` where it is set, else the bound one,
/// else those of the interfaces.
///
/// # Errors
/// The interfaces cannot be listed.
pub(super) fn advertised(local: SocketAddr, public: &[IpAddr]) -> io::Result<Vec<SocketAddr>> {
    let mut addresses = VecDeque::new();
    if !public.is_empty() {
        // One that stands there twice would be two candidates of one address.
        public.iter().for_each(|ip| {
            if !addresses.contains(ip) {
                addresses.push_back(*ip)
            }
        });
    } else if !local.ip().is_unspecified() {
        addresses.push_back(local.ip());
    } else {
        for interface in rtc::shared::ifaces::ifaces()? {
            let Some(ip) = interface.addr.map(|address| address.ip()) else { continue };
            let fits = local.is_ipv6() || ip.is_ipv4();
            if fits && !ip.is_loopback() && !ip.is_unspecified() && !link_local(ip) && !addresses.contains(&ip) {
                addresses.push_back(ip);
            }
        }
        if addresses.is_empty() {
            let loopback = if local.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { IpAddr::V6(Ipv6Addr::LOCALHOST) };
            addresses.push_back(loopback);
        }
    }
    Ok(addresses.into_iter().map(|ip| SocketAddr::new(ip, local.port())).collect())
}

/// Useless to a peer: an IPv6 one needs a scope that a candidate cannot carry.
fn link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// First byte of a DTLS alert record (RFC 6347); its content is encrypted.
const DTLS_ALERT: u8 = 21;
