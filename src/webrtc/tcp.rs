//! ICE over TCP (RFC 6544) on one listening port, for browsers whose network lets no UDP out.
//!
//! Owns the listening socket and every connection until its first frame has said whose it is; then the session's
//! agent owns it. Only passive: the gateway never connects out.
//!
//! # Why
//! The first frame (RFC 4571) must be a connectivity check that proves our password, within [`PROOF`]: until then a
//! connection costs a buffer of 1.5 kB, and no more than [`STRANGERS`] are kept.

use std::fmt;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ::webrtc::runtime::{AsyncTcpListener, AsyncTcpStream};
use bytes::Bytes;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinHandle;

use crate::handover::Place;

/// How long a connection may take to prove whose it is.
const PROOF: Duration = Duration::from_secs(5);
/// Connections that have not.
const STRANGERS: usize = 128;
/// Connections a session may have; a browser has one for each of its interfaces.
pub(super) const PER_SESSION: usize = 8;
/// A peer that takes no bytes for so long is gone. While it stalls its own driver waits, and no other.
const STALL: Duration = Duration::from_secs(1);
/// No check is longer.
const LONGEST: usize = 1500;
const BACKLOG: i32 = 128;

/// A connection that has proved whose it is.
pub(super) struct Proved {
    stream: TcpStream,
    peer: SocketAddr,
    /// The frame that proved it, as it came, still to be given to the agent.
    first: Bytes,
    place: OwnedSemaphorePermit,
}

/// Where a session's connections go.
#[derive(Clone)]
pub(super) struct Inlet {
    /// overflow: refused (closed)
    pub(super) v4: mpsc::Sender<Proved>,
    /// overflow: refused (closed)
    pub(super) v6: mpsc::Sender<Proved>,
    pub(super) places: Arc<Semaphore>,
}

/// Binds `address` for listening.
///
/// # Errors
/// It cannot be bound.
pub(super) fn bind(address: SocketAddr) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if address.is_ipv6() {
        socket.set_only_v6(!address.ip().is_unspecified())?;
    }
    // A restarted gateway gets its port back although old connections linger.
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Accepts until aborted, while `place` is held. `owner` says whose check a datagram is.
pub(super) fn accept<F>(listener: TcpListener, place: Place, owner: F) -> JoinHandle<()>
where
    F: Fn(&[u8]) -> Option<Inlet> + Clone + Send + Sync + 'static,
{
    let strangers = Arc::new(Semaphore::new(STRANGERS));
    tokio::spawn(async move {
        loop {
            let Ok(room) = strangers.clone().acquire_owned().await else { return };
            let (stream, peer) = match place.accept(&listener).await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of descriptors, mostly: some are given back before long.
                    tracing::warn!(%error, "accepting on the WebRTC TCP port");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let owner = owner.clone();
            tokio::spawn(async move {
                let _room = room;
                let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
                let proof = tokio::time::timeout(PROOF, prove(stream, peer, owner)).await;
                if !matches!(proof, Ok(Ok(()))) {
                    metrics::counter!("antiphon_webrtc_tcp_refused_total").increment(1);
                }
            });
        }
    })
}

async fn prove<F>(mut stream: TcpStream, peer: SocketAddr, owner: F) -> io::Result<()>
where
    F: Fn(&[u8]) -> Option<Inlet>,
{
    let stranger = || io::Error::from(io::ErrorKind::PermissionDenied);
    let mut head = [0; 2];
    stream.read_exact(&mut head).await?;
    let length = usize::from(u16::from_be_bytes(head));
    if length == 0 || length > LONGEST {
        return Err(stranger());
    }
    let mut first = vec![0; 2 + length];
    let (prefix, frame) = first.split_at_mut(2);
    prefix.copy_from_slice(&head);
    stream.read_exact(frame).await?;
    let inlet = owner(frame).ok_or_else(stranger)?;
    let place = inlet.places.try_acquire_owned().map_err(|_| stranger())?;
    stream.set_nodelay(true)?;
    let proved = Proved { stream, peer, first: first.into(), place };
    let queue = if peer.is_ipv4() { inlet.v4 } else { inlet.v6 };
    // overflow: refused
    queue.try_send(proved).map_err(|_| stranger())
}

/// The listener that a session's agent believes it has.
pub(super) struct Virtual {
    /// The address that the ICE agent was told; it never leaves this process.
    local: SocketAddr,
    queue: tokio::sync::Mutex<mpsc::Receiver<Proved>>,
    ended: Arc<Notify>,
}

impl Virtual {
    /// Of the agent that knows itself by `local`; `ended` is notified when the peer closes a connection.
    pub(super) fn new(local: SocketAddr, queue: mpsc::Receiver<Proved>, ended: Arc<Notify>) -> Self {
        Self { local, queue: tokio::sync::Mutex::new(queue), ended }
    }
}

impl fmt::Debug for Virtual {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Virtual").field("local", &self.local).finish_non_exhaustive()
    }
}

type Boxed<'a, T> = Pin<Box<dyn Future<Output = io::Result<T>> + Send + 'a>>;

impl AsyncTcpListener for Virtual {
    fn accept<'a>(&'a self) -> Boxed<'a, (Arc<dyn AsyncTcpStream>, SocketAddr)> {
        Box::pin(async move {
            let Some(proved) = self.queue.lock().await.recv().await else {
                // The session has left the port; its end arrives by another way.
                return std::future::pending().await;
            };
            let peer = proved.peer;
            let stream = Stream {
                stream: proved.stream,
                local: self.local,
                peer,
                first: Mutex::new(proved.first),
                ended: self.ended.clone(),
                _place: proved.place,
            };
            Ok((Arc::new(stream) as Arc<dyn AsyncTcpStream>, peer))
        })
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.local)
    }
}

/// A proved connection, as the agent reads it: from its first frame on.
struct Stream {
    stream: TcpStream,
    local: SocketAddr,
    peer: SocketAddr,
    first: Mutex<Bytes>,
    ended: Arc<Notify>,
    _place: OwnedSemaphorePermit,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").finish_non_exhaustive()
    }
}

impl Stream {
    /// What is left of the first frame, as much as fits.
    fn take_first(&self, buf: &mut [u8]) -> usize {
        let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = first.len().min(buf.len());
        let taken = first.split_to(fits);
        for (to, from) in buf.iter_mut().zip(&taken) {
            *to = *from;
        }
        taken.len()
    }

    async fn write_frame(&self, mut frame: &[u8]) -> io::Result<()> {
        let whole = frame.len();
        while !frame.is_empty() {
            match self.stream.try_write(frame) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => frame = frame.get(written..).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if frame.len() == whole {
                        // overflow: drops (counted). Nothing of it has left, so the frames stay whole.
                        metrics::counter!("antiphon_webrtc_sends_failed_total", "reason" => "buffer_full").increment(1);
                        return Ok(());
                    }
                    self.stream.writable().await?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl AsyncTcpStream for Stream {
    fn read<'a, 'b>(&'a self, buf: &'b mut [u8]) -> Boxed<'b, usize>
    where
        'a: 'b,
    {
        Box::pin(async move {
            let first = self.take_first(buf);
            if first > 0 {
                return Ok(first);
            }
            loop {
                self.stream.readable().await?;
                match self.stream.try_read(buf) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    read => {
                        // The agent has dealt with all before it, such as the peer's good-bye.
                        if matches!(read, Ok(0) | Err(_)) {
                            self.ended.notify_one();
                        }
                        return read;
                    }
                }
            }
        })
    }

    fn write_all<'a, 'b>(&'a self, buf: &'b [u8]) -> Boxed<'b, ()>
    where
        'a: 'b,
    {
        Box::pin(async move {
            match tokio::time::timeout(STALL, self.write_frame(buf)).await {
                Ok(written) => written,
                Err(_) => Err(io::ErrorKind::TimedOut.into()),
            }
        })
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.local)
    }

    fn peer_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.peer)
    }
}
