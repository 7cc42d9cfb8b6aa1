//! HTTP connections: accepted up to a limit, with bounded patience, closed gracefully.
//!
//! # Why
//! `axum::serve` sets no time limit for a request's head, so that a client which connects and says nothing, or
//! one byte a minute, would hold a connection for ever. Here it holds it for [`HEAD_TIMEOUT`].

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tower::ServiceExt;

use crate::clock::{self, Sparse};

/// A request's head arrives within this, counted from the end of the request before.
const HEAD_TIMEOUT: Duration = Duration::from_secs(15);
/// Connections at once, long-lived sockets included; more wait in the kernel's backlog.
const MAX_CONNECTIONS: usize = 8_192;

/// Serves `router` until `stop` says so, then lets requests that are under way finish for `grace`.
pub async fn serve(listener: TcpListener, router: Router, mut stop: watch::Receiver<bool>, grace: Duration) {
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = async {
                // Never closed, so a permit always comes.
                let permit = slots.clone().acquire_owned().await;
                (permit, listener.accept().await)
            } => accepted,
            () = stopped(&mut stop) => break,
            Some(_) = connections.join_next() => continue,
        };
        match accepted {
            (permit, Ok((stream, peer))) => {
                let connection = Connection { stream, peer, router: router.clone(), stop: stop.clone() };
                connections.spawn(async move {
                    let _permit = permit;
                    connection.serve().await;
                });
            }
            (_, Err(error)) => {
                // Out of file descriptors, usually: the connections there are go on, and some will end.
                tracing::warn!(%error, "a connection was not accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
    drop(listener);
    let finished = async { while connections.join_next().await.is_some() {} };
    // Event streams and idle sockets would go on as long as they like; the drop closes them.
    let _ = tokio::time::timeout(grace, finished).await;
}

/// Waits for the word to stop; a sender that is gone means the same.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

struct Connection {
    stream: TcpStream,
    peer: SocketAddr,
    router: Router,
    stop: watch::Receiver<bool>,
}

impl Connection {
    async fn serve(mut self) {
        // Text in and events out are small and urgent: never wait for a full segment.
        let _ = self.stream.set_nodelay(true);
        let (router, peer) = (self.router, self.peer);
        let service = service_fn(move |mut request: axum::http::Request<Incoming>| {
            request.extensions_mut().insert(ConnectInfo(peer));
            router.clone().oneshot(request)
        });
        let mut http = hyper::server::conn::http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
        let connection = http.serve_connection(TokioIo::new(self.stream), service).with_upgrades();
        tokio::pin!(connection);
        let outcome = tokio::select! {
            outcome = connection.as_mut() => outcome,
            () = stopped(&mut self.stop) => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = outcome {
            static LINES: Sparse = Sparse::new();
            if let Some(missed) = LINES.admit(clock::now()) {
                tracing::info!(%peer, %error, missed, "a connection ended badly");
            }
        }
    }
}
