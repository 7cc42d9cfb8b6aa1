//! The HTTP client of this crate: one TLS provider, certificates not verified (a test instrument calls gateways
//! with certificates they made for themselves).

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use crate::clock;

/// A client; TLS by `ring`, whatever else the process has installed.
///
/// # Errors
/// The TLS part could not be built.
pub fn client() -> reqwest::Result<reqwest::Client> {
    // reqwest takes the process's provider; installing it twice is no error worth telling.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder()
        .connect_timeout(Duration::from_secs(5))
        .timeout(Duration::from_secs(30))
        .tls_danger_accept_invalid_certs(true)
        .build()
}

/// The body of a request, which notes when its connection takes it: what comes before, a tenth of a millisecond where the
/// processor did something else meanwhile, is the client's.
#[derive(Debug)]
pub struct Noted {
    body: Bytes,
    taken: Arc<OnceLock<Instant>>,
}

impl Noted {
    /// `body`, and where it is told when it was taken first.
    pub fn new(body: impl Into<Bytes>) -> (Self, Arc<OnceLock<Instant>>) {
        let taken = Arc::new(OnceLock::new());
        (Self { body: body.into(), taken: taken.clone() }, taken)
    }
}

impl Body for Noted {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.is_end_stream() {
            return Poll::Ready(None);
        }
        self.taken.get_or_init(clock::now);
        Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut self.body)))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.body.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn a_body_is_sent_whole_and_notes_when_it_was_taken() {
        let socket = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}/", socket.local_addr().expect("bound"));
        let (body, taken) = Noted::new("twelve bytes");
        let before = clock::now();
        let request = tokio::spawn(client().expect("a client").post(url).body(reqwest::Body::wrap(body)).send());
        let (mut server, _) = socket.accept().await.expect("a connection");
        let mut read = Vec::new();
        while !read.ends_with(b"twelve bytes") {
            assert!(server.read_buf(&mut read).await.expect("a request") > 0);
        }
        let head = String::from_utf8_lossy(&read).to_lowercase();
        assert!(head.contains("content-length: 12\r\n"), "{head}");
        assert!(*taken.get().expect("it was taken") >= before);
        server.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await.expect("an answer");
        assert_eq!(request.await.expect("no panic").expect("answered").status(), 204);
    }
}
