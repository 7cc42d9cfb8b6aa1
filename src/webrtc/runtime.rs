//! The runtime a peer connection believes in: tokio, but for its sockets and its driver.
//!
//! One value a session: it hands out the session's share of the [`super::socket::Port`], and puts the driver where
//! [`Driver`] can move it.

use std::fmt;
use std::future::Future;
use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ::webrtc::runtime::{
    AsyncInterval, AsyncTcpListener, AsyncTcpStream, AsyncUdpSocket, JoinHandle, Runtime, TokioRuntime,
};

use super::socket::Seat;
use crate::clock;
use crate::media::webrtc::Driver;

type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What a session's connection runs on.
pub(super) struct SessionRuntime {
    tokio: TokioRuntime,
    seat: Arc<Seat>,
    driver: Driver,
    /// The first task a connection spawns is its driver.
    driver_started: AtomicBool,
}

impl SessionRuntime {
    /// For the session that has `seat`.
    pub(super) fn new(seat: Arc<Seat>, driver: Driver) -> Self {
        Self { tokio: TokioRuntime, seat, driver, driver_started: AtomicBool::new(false) }
    }
}

impl fmt::Debug for SessionRuntime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionRuntime").field("driver", &self.driver).finish_non_exhaustive()
    }
}

impl Runtime for SessionRuntime {
    fn spawn(&self, future: Boxed<'static, ()>) -> Box<dyn JoinHandle> {
        if self.driver_started.swap(true, Ordering::Relaxed) {
            return self.tokio.spawn(future);
        }
        self.driver.start(future);
        Box::new(self.driver.clone())
    }

    fn wrap_udp_socket(&self, socket: UdpSocket) -> io::Result<Arc<dyn AsyncUdpSocket>> {
        // The driver bound a port of its own and knows itself by it; the port is released here.
        self.seat.socket(socket.local_addr()?)
    }

    fn wrap_tcp_listener(&self, listener: TcpListener) -> io::Result<Arc<dyn AsyncTcpListener>> {
        self.seat.listener(listener.local_addr()?)
    }

    fn connect_tcp<'a>(&'a self, _: SocketAddr) -> Boxed<'a, io::Result<Arc<dyn AsyncTcpStream>>> {
        Box::pin(async { Err(io::Error::new(io::ErrorKind::Unsupported, "the gateway only accepts ICE over TCP")) })
    }

    fn resolve_host<'a>(&'a self, host: &'a str) -> Boxed<'a, io::Result<Vec<SocketAddr>>> {
        self.tokio.resolve_host(host)
    }

    fn now(&self) -> Instant {
        clock::now()
    }

    fn sleep(&self, duration: Duration) -> Boxed<'static, ()> {
        self.tokio.sleep(duration)
    }

    fn interval(&self, period: Duration) -> Box<dyn AsyncInterval> {
        self.tokio.interval(period)
    }

    fn block_on(&self, future: Pin<Box<dyn Future<Output = ()> + '_>>) {
        self.tokio.block_on(future);
    }

    fn yield_now(&self) -> Boxed<'static, ()> {
        self.tokio.yield_now()
    }

    fn name(&self) -> &'static str {
        "antiphon"
    }
}
