//! The runtime a peer connection believes in: tokio, but for its sockets, its driver and the driver's timers.
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
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use ::webrtc::runtime::{
    AsyncInterval, AsyncTcpListener, AsyncTcpStream, AsyncUdpSocket, JoinHandle, Runtime, TokioRuntime,
};

use tokio::runtime::Handle;

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
        // The one name that the stack is given is that of the TURN server.
        Box::pin(async move {
            let found = self.tokio.resolve_host(host).await?;
            self.seat.resolved(&found);
            Ok(found)
        })
    }

    fn now(&self) -> Instant {
        clock::now()
    }

    fn sleep(&self, duration: Duration) -> Boxed<'static, ()> {
        Box::pin(Alarm::new(duration))
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

/// A timer that follows its task: polled on another runtime than before, it is set anew there.
///
/// # Why
/// A tokio timer stays with the runtime it was made on and panics when polled after that one has shut down. The
/// driver waits on the timer it made before it moved for as long as nothing else wakes it.
struct Alarm {
    deadline: tokio::time::Instant,
    home: tokio::runtime::Id,
    sleep: Pin<Box<tokio::time::Sleep>>,
}

impl Alarm {
    fn new(duration: Duration) -> Self {
        let deadline = tokio::time::Instant::now() + duration;
        Self { deadline, home: Handle::current().id(), sleep: Box::pin(tokio::time::sleep_until(deadline)) }
    }
}

impl Future for Alarm {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let here = Handle::current().id();
        if here != self.home {
            self.home = here;
            self.sleep = Box::pin(tokio::time::sleep_until(self.deadline));
        }
        self.sleep.as_mut().poll(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::runtime::Builder;

    use super::*;

    #[test]
    fn an_alarm_outlives_the_runtime_it_was_set_on() {
        let first = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("runtime");
        let entered = first.enter();
        let mut alarm = Box::pin(Alarm::new(Duration::from_millis(1)));
        let _ = alarm.as_mut().poll(&mut Context::from_waker(std::task::Waker::noop()));
        drop(entered);
        drop(first);
        let second = Builder::new_current_thread().enable_all().build().expect("runtime");
        second.block_on(alarm);
    }
}
