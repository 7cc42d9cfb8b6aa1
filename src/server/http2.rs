//! HTTP/2 on connections whose TLS handshake chose it (RFC 9113).
//!
//! # Why
//! A connection of HTTP/2 carries many requests, so that what bounds connections bounds too little: streams are bounded
//! here, headers, what waits to be read, and how many requests may be taken back. A client that opens streams and resets
//! them at once makes the server work for nothing (CVE-2023-44487); browsers take some requests back, and are answered most
//! of the time, so the count goes down by each answer.
//!
//! WebSockets stay on HTTP/1.1: extended CONNECT (RFC 8441) is not offered, and browsers open a connection of its own then.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes, HttpBody};
use axum::response::Response;
use hyper::body::{Frame, SizeHint};
use hyper::server::conn::http2::Builder;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::sync::Notify;

use super::listen::MAX_HEAD;
use crate::clock;

/// Requests at a time on one connection: as many as RFC 9113 section 6.5.2 asks for at least.
const STREAMS: u32 = 100;
/// Requests that may be taken back beyond those that are answered.
const TAKEN_BACK: u32 = 2 * STREAMS;
/// Of these, ones that were not even looked at yet.
const UNSEEN: usize = 20;
/// What may wait for a reader of one answer, bytes.
const UNREAD: usize = 64 << 10;
/// A connection without a request is closed after this; a browser opens another one when it needs one.
const IDLE: Duration = Duration::from_secs(60);
/// The same where requests are open and nothing moves: as for a reader of HTTP/1.1 that reads no more.
const STILL: Duration = Duration::from_secs(300);
/// How often the peer is asked whether it is there, and how long it may take to say so.
const PING: Duration = Duration::from_secs(30);
const PONG: Duration = Duration::from_secs(15);

/// How connections are served; one that found no room has one request at a time.
pub(super) fn builder(full: bool) -> Builder<TokioExecutor> {
    let mut http = Builder::new(TokioExecutor::new());
    http.timer(TokioTimer::new())
        .max_concurrent_streams(if full { 1 } else { STREAMS })
        .max_header_list_size(MAX_HEAD as u32)
        .max_pending_accept_reset_streams(UNSEEN)
        .max_local_error_reset_streams(Some(TAKEN_BACK as usize))
        .max_send_buf_size(UNREAD)
        .keep_alive_interval(Some(PING))
        .keep_alive_timeout(PONG);
    http
}

/// What happens on one connection. Clones mean the same.
#[derive(Clone)]
pub(super) struct Streams(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    changed: Notify,
}

/// Time is an argument.
#[derive(Debug)]
struct State {
    open: u32,
    taken_back: u32,
    moved: Instant,
}

impl State {
    fn begin(&mut self, now: Instant) {
        (self.open, self.moved) = (self.open + 1, now);
    }

    /// A request is over; `answered`: its client did not take it back.
    fn end(&mut self, now: Instant, answered: bool) {
        (self.open, self.moved) = (self.open.saturating_sub(1), now);
        self.taken_back = if answered { self.taken_back.saturating_sub(1) } else { self.taken_back + 1 };
    }

    fn is_abused(&self) -> bool {
        self.taken_back > TAKEN_BACK
    }

    /// When the connection has been idle for too long.
    fn due(&self) -> Instant {
        self.moved + if self.open == 0 { IDLE } else { STILL }
    }
}

/// Why a connection is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Over {
    /// Nothing is asked, or nothing read.
    Idle,
    /// Too many requests were taken back.
    Abused,
}

impl Streams {
    pub(super) fn new() -> Self {
        let state = Mutex::new(State { open: 0, taken_back: 0, moved: clock::now() });
        Self(Arc::new(Shared { state, changed: Notify::new() }))
    }

    /// A request begins.
    pub(super) fn begin(&self) -> Open {
        self.with(|state| state.begin(clock::now()));
        Open { streams: self.clone(), answered: false }
    }

    /// Waits until the connection is to end.
    pub(super) async fn over(&self) -> Over {
        loop {
            let changed = self.0.changed.notified();
            let (due, abused) = self.with(|state| (state.due(), state.is_abused()));
            if abused {
                return Over::Abused;
            }
            if due <= clock::now() {
                return Over::Idle;
            }
            // A change only makes it later, so it may be looked at when the time has come; abuse is told at once.
            tokio::select! {
                () = changed => {}
                () = tokio::time::sleep_until(due.into()) => {}
            }
        }
    }

    fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.0.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A request until its answer has been handed on whole; dropped before, it was taken back.
pub(super) struct Open {
    streams: Streams,
    answered: bool,
}

impl Open {
    /// `response`, whose end is the end of the request.
    pub(super) fn hold(self, response: Response) -> Response {
        response.map(|body| Body::new(Held { body, open: Some(self) }))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let answered = self.answered;
        let tell = self.streams.with(|state| {
            state.end(clock::now(), answered);
            state.is_abused()
        });
        if tell {
            self.streams.0.changed.notify_waiters();
        }
    }
}

/// The body of an answer.
struct Held {
    body: Body,
    open: Option<Open>,
}

impl Held {
    fn end(&mut self) {
        if let Some(mut open) = self.open.take() {
            open.answered = true;
        }
    }
}

impl HttpBody for Held {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        if let (Poll::Ready(_), Some(open)) = (&frame, &self.open) {
            open.streams.with(|state| state.moved = clock::now());
        }
        if matches!(frame, Poll::Ready(None | Some(Err(_)))) || self.body.is_end_stream() {
            self.end();
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // A body that has nothing in it is not asked for anything.
        if self.body.is_end_stream() {
            self.end();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_takes_requests_back_is_told_from_who_waits_for_answers() {
        let now = clock::now();
        let mut state = State { open: 0, taken_back: 0, moved: now };
        for n in 0..10 * TAKEN_BACK {
            state.begin(now);
            // A page that is left takes back half of what it asked for.
            state.end(now, n % 2 == 0);
        }
        assert!(!state.is_abused());
        for _ in 0..=TAKEN_BACK {
            state.begin(now);
            state.end(now, false);
        }
        assert!(state.is_abused() && state.open == 0);
    }

    #[test]
    fn a_connection_without_requests_is_idle_and_one_whose_answers_move_is_not() {
        let now = clock::now();
        let mut state = State { open: 0, taken_back: 0, moved: now };
        assert_eq!(state.due(), now + IDLE);
        state.begin(now + IDLE / 2);
        assert_eq!(state.due(), now + IDLE / 2 + STILL);
        state.end(now + STILL, true);
        assert_eq!(state.due(), now + STILL + IDLE);
    }

    #[tokio::test]
    async fn a_body_that_is_read_to_its_end_was_answered_and_one_that_is_dropped_was_not() {
        let streams = Streams::new();
        let taken_back = || streams.with(|state| (state.open, state.taken_back));
        let dropped = streams.begin().hold(Response::new(Body::from("never read")));
        assert_eq!(taken_back(), (1, 0));
        drop(dropped);
        drop(streams.begin());
        assert_eq!(taken_back(), (0, 2));
        let read = streams.begin().hold(Response::new(Body::from("read")));
        assert_eq!(axum::body::to_bytes(read.into_body(), 64).await.expect("bytes").as_ref(), b"read");
        assert_eq!(taken_back(), (0, 1));
        drop(streams.begin().hold(Response::new(Body::empty())));
        assert_eq!(taken_back(), (0, 0));
    }
}
