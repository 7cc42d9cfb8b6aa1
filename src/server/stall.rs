//! Connections that stand still: a body that trickles, and a reader that reads no more.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use futures_util::{StreamExt, stream};
use hyper::body::Incoming;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep, timeout_at};

/// Longest pause inside a body.
const BODY_PAUSE: Duration = Duration::from_secs(15);
/// A body may take this long, and longer by what it has brought at [`BODY_RATE`].
const BODY_TIME: Duration = Duration::from_secs(30);
/// Slowest honest upload, bytes a second: a modem's.
const BODY_RATE: u64 = 4_096;
/// A reader that takes nothing for so long is gone. Players that pause read on before.
const WRITE_PAUSE: Duration = Duration::from_secs(300);

/// `body`, which fails once its sender is slower than it may be; `whole` is called when all of it has come.
pub(super) fn hurried(body: Incoming, whole: impl Fn() + Send + 'static) -> Body {
    hurry(Body::new(body), BODY_PAUSE, whole)
}

fn hurry(body: Body, pause: Duration, whole: impl Fn() + Send + 'static) -> Body {
    let begun = Instant::now();
    let pieces = body.into_data_stream();
    Body::from_stream(stream::unfold((pieces, 0u64, whole), move |(mut pieces, received, whole)| async move {
        let allowed = begun + BODY_TIME + Duration::from_secs(received / BODY_RATE);
        let deadline = allowed.min(Instant::now() + pause);
        match timeout_at(deadline, pieces.next()).await {
            Ok(Some(Ok(piece))) => {
                let received = received + piece.len() as u64;
                Some((Ok(piece), (pieces, received, whole)))
            }
            Ok(Some(Err(error))) => Some((Err(io::Error::other(error)), (pieces, received, whole))),
            Ok(None) => {
                whole();
                None
            }
            Err(_) => {
                let error = io::Error::new(io::ErrorKind::TimedOut, "the body came too slowly");
                Some((Err(error), (pieces, received, whole)))
            }
        }
    }))
}

/// A connection whose writes fail once its peer has read nothing for a while.
pub(super) struct Patient<S, K = ()> {
    stream: S,
    waiting: Option<Pin<Box<Sleep>>>,
    pause: Duration,
    /// Lives as long as the connection, whoever has it.
    _kept: K,
}

impl<S> Patient<S> {
    pub(super) fn new(stream: S) -> Self {
        Patient::holding(stream, ())
    }
}

impl<S, K> Patient<S, K> {
    /// As [`Patient::new`]; `kept` is dropped with the connection.
    pub(super) fn holding(stream: S, kept: K) -> Self {
        Self { stream, waiting: None, pause: WRITE_PAUSE, _kept: kept }
    }

    /// Passes a result of the stream on, unless it is the same wait for too long.
    fn judge<T>(&mut self, context: &mut Context<'_>, poll: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if poll.is_ready() {
            self.waiting = None;
            return poll;
        }
        let pause = self.pause;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(sleep(pause)));
        match waiting.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer reads no more"))),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncRead + Unpin, K: Unpin> AsyncRead for Patient<S, K> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin, K: Unpin> AsyncWrite for Patient<S, K> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.judge(cx, poll)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let poll = Pin::new(&mut self.stream).poll_flush(cx);
        self.judge(cx, poll)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let poll = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.judge(cx, poll)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.judge(cx, poll)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    #[tokio::test]
    async fn a_body_that_stands_still_fails_and_one_that_comes_is_whole() {
        let first = || stream::iter([Ok::<_, io::Error>("abc")]);
        let whole = hurry(Body::from_stream(first()), BODY_PAUSE, || ());
        assert_eq!(&axum::body::to_bytes(whole, 100).await.expect("all of it")[..], b"abc");
        let stands = hurry(Body::from_stream(first().chain(stream::pending())), Duration::from_millis(10), || ());
        axum::body::to_bytes(stands, 100).await.expect_err("the rest does not come");
    }

    #[tokio::test]
    async fn a_reader_that_stands_still_ends_the_connection() {
        let (ours, theirs) = tokio::io::duplex(8);
        let mut ours = Patient { pause: Duration::from_millis(10), ..Patient::new(ours) };
        let error = ours.write_all(&[0; 64]).await.expect_err("nobody reads");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(theirs);
    }
}
