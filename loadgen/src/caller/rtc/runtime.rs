//! The runtime of a synthetic browser: tokio, but its sockets keep from the DTLS stack what a browser's own would bear
//! (see [`dtls_repeats`]).

use std::fmt;
use std::future::Future;
use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use dtls_repeats::Repeats;
use webrtc::runtime::{
    AsyncInterval, AsyncTcpListener, AsyncTcpStream, AsyncUdpSocket, JoinHandle, RecvMeta, Runtime, TokioRuntime,
    Transmit,
};

type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// As said.
#[derive(Debug)]
pub(super) struct Sparing(pub(super) TokioRuntime);

impl Runtime for Sparing {
    fn spawn(&self, future: Boxed<'static, ()>) -> Box<dyn JoinHandle> {
        self.0.spawn(future)
    }

    fn spawn_reactor(&self, size: usize, future: Boxed<'static, ()>) -> Box<dyn JoinHandle> {
        self.0.spawn_reactor(size, future)
    }

    fn wrap_udp_socket(&self, socket: UdpSocket) -> io::Result<Arc<dyn AsyncUdpSocket>> {
        Ok(Arc::new(Spared { socket: self.0.wrap_udp_socket(socket)?, repeats: Mutex::default() }))
    }

    fn wrap_tcp_listener(&self, listener: TcpListener) -> io::Result<Arc<dyn AsyncTcpListener>> {
        self.0.wrap_tcp_listener(listener)
    }

    fn connect_tcp<'a>(&'a self, address: SocketAddr) -> Boxed<'a, io::Result<Arc<dyn AsyncTcpStream>>> {
        self.0.connect_tcp(address)
    }

    fn resolve_host<'a>(&'a self, host: &'a str) -> Boxed<'a, io::Result<Vec<SocketAddr>>> {
        self.0.resolve_host(host)
    }

    fn sleep(&self, duration: Duration) -> Boxed<'static, ()> {
        self.0.sleep(duration)
    }

    fn interval(&self, period: Duration) -> Box<dyn AsyncInterval> {
        self.0.interval(period)
    }

    fn block_on(&self, future: Pin<Box<dyn Future<Output = ()> + '_>>) {
        self.0.block_on(future);
    }

    fn yield_now(&self) -> Boxed<'static, ()> {
        self.0.yield_now()
    }

    fn name(&self) -> &'static str {
        self.0.name()
    }
}

struct Spared {
    socket: Arc<dyn AsyncUdpSocket>,
    /// Only the driver locks it.
    repeats: Mutex<Repeats>,
}

impl fmt::Debug for Spared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.socket.fmt(f)
    }
}

impl AsyncUdpSocket for Spared {
    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    fn poll_send(&self, cx: &mut Context<'_>, transmit: &Transmit<'_>) -> Poll<io::Result<usize>> {
        if Repeats::concerns(transmit.contents) {
            self.repeats.lock().unwrap_or_else(PoisonError::into_inner).sent(transmit.contents);
        }
        self.socket.poll_send(cx, transmit)
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let received = ready!(self.socket.poll_recv(cx, bufs, meta));
        for (buf, meta) in bufs.iter().zip(meta).take(*received.as_ref().unwrap_or(&0)) {
            let run = buf.get(..meta.len).unwrap_or_default();
            if !Repeats::concerns(run) {
                continue;
            }
            let mut repeats = self.repeats.lock().unwrap_or_else(PoisonError::into_inner);
            // Each is looked at, also behind one that is new.
            let new = run.chunks(meta.stride.max(1)).filter(|datagram| !repeats.is_repeat(datagram)).count();
            if new == 0 {
                // An empty datagram is none for the driver.
                (meta.len, meta.stride) = (0, 1);
            }
        }
        Poll::Ready(received)
    }

    fn max_gso_segments(&self) -> usize {
        self.socket.max_gso_segments()
    }

    fn max_gro_segments(&self) -> usize {
        self.socket.max_gro_segments()
    }
}
