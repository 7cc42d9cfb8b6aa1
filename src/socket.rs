//! WebSockets that the gateway opens: TCP, TLS where the address wants it, and the handshake.

use std::io;
use std::sync::{Arc, OnceLock};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Error as WsError;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::http::{HeaderName, HeaderValue, Request};
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;

use crate::secret::Secret;

/// What a WebSocket reads at a time, in bytes. The library would set 128 KiB aside for each, also for those that carry nothing.
pub const READ_BUFFER: usize = 4 << 10;

/// A TCP or TLS connection.
pub trait Connection: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Connection for T {}

/// An open WebSocket.
pub type Socket = WebSocketStream<Box<dyn Connection>>;

/// Why there is none.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The URL or a header is not usable.
    #[error("url or headers: {0}")]
    Request(String),
    /// No connection.
    #[error("{host}: {source}")]
    Connect {
        /// Host and port.
        host: String,
        /// Why.
        source: io::Error,
    },
    /// The handshake failed; a status code other than 101 is in the text.
    #[error("handshake: {0}")]
    Handshake(#[from] Box<WsError>),
}

/// Opens a WebSocket at `url` (`ws://` or `wss://`). Messages of the peer have at most `largest` bytes.
///
/// # Errors
/// The URL or a header is not usable, no server is there, or the handshake fails.
pub async fn connect<'a>(
    url: &str,
    headers: impl Iterator<Item = (&'a str, &'a Secret)>,
    largest: usize,
) -> Result<Socket, ConnectError> {
    let request = request(url, headers)?;
    let uri = request.uri().clone();
    let host = uri.host().ok_or_else(|| ConnectError::Request("the url names no host".into()))?.to_owned();
    let tls = uri.scheme_str() == Some("wss");
    let port = uri.port_u16().unwrap_or(if tls { 443 } else { 80 });
    // An IPv6 literal stands in brackets in a URI and without them in a socket address.
    let name = host.trim_matches(['[', ']']).to_owned();
    let unreachable = |source| ConnectError::Connect { host: format!("{host}:{port}"), source };
    let stream = TcpStream::connect((name.as_str(), port)).await.map_err(unreachable)?;
    stream.set_nodelay(true).map_err(unreachable)?;
    let stream: Box<dyn Connection> =
        if tls { Box::new(secure(stream, name).await.map_err(unreachable)?) } else { Box::new(stream) };
    let config = WebSocketConfig::default()
        .max_message_size(Some(largest))
        .max_frame_size(Some(largest))
        .read_buffer_size(READ_BUFFER);
    let (socket, _) =
        tokio_tungstenite::client_async_with_config(request, stream, Some(config)).await.map_err(Box::new)?;
    Ok(socket)
}

fn request<'a>(url: &str, headers: impl Iterator<Item = (&'a str, &'a Secret)>) -> Result<Request<()>, ConnectError> {
    let mut request = url.into_client_request().map_err(|e| ConnectError::Request(e.to_string()))?;
    for (name, value) in headers {
        let bad = |e: &dyn std::fmt::Display| ConnectError::Request(format!("header `{name}`: {e}"));
        let header = HeaderName::try_from(name).map_err(|e| bad(&e))?;
        let mut value = HeaderValue::try_from(value.reveal()).map_err(|e| bad(&e))?;
        value.set_sensitive(true);
        request.headers_mut().insert(header, value);
    }
    Ok(request)
}

async fn secure(stream: TcpStream, name: String) -> io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
    let name = rustls::pki_types::ServerName::try_from(name).map_err(io::Error::other)?;
    tokio_rustls::TlsConnector::from(trust().map_err(io::Error::other)?).connect(name, stream).await
}

/// How the platform judges certificates, read once: reading takes milliseconds, and sessions are resumed by it. A
/// failure is not kept, as its cause may be mended.
pub(crate) fn trust() -> Result<Arc<rustls::ClientConfig>, rustls::Error> {
    use rustls_platform_verifier::ConfigVerifierExt;
    static TRUST: OnceLock<Arc<rustls::ClientConfig>> = OnceLock::new();
    if let Some(known) = TRUST.get() {
        return Ok(known.clone());
    }
    let config = Arc::new(rustls::ClientConfig::with_platform_verifier()?);
    Ok(TRUST.get_or_init(|| config).clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_of_the_platform_are_read_once() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        // Where there are none, there is nothing to keep.
        if let (Ok(first), Ok(second)) = (trust(), trust()) {
            assert!(Arc::ptr_eq(&first, &second));
        }
    }
}
