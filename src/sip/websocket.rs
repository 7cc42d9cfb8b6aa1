//! SIP over WebSocket (RFC 7118): the upgrade, and messages one a frame.
//!
//! A browser cannot be called back at an address: what its `Via` and `Contact` name leads nowhere. Responses and requests
//! inside a dialog go over the connection that the INVITE came by (RFC 5626 section 5.3), which the stack remembers.

use std::sync::Arc;

use rsipstack::sip::Transport;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_tungstenite::{
    WebSocketStream, accept_hdr_async_with_config,
    tungstenite::{
        handshake::server::{Callback, ErrorResponse, Request, Response},
        http::{HeaderMap, HeaderValue, StatusCode, header},
        protocol::{Message, WebSocketConfig},
    },
};

use super::screen::MAX_MESSAGE;
use crate::socket::READ_BUFFER;

/// The subprotocol (RFC 7118 section 4).
const PROTOCOL: &str = "sip";

/// Which pages may connect, by `Origin` (RFC 6454). A browser lets every page open a WebSocket to anywhere, so that the
/// server has to say no; what is no browser sends none.
#[derive(Clone, Debug, Default)]
pub(super) struct Origins(Arc<[String]>);

impl Origins {
    /// `https://host[:port]`, or `*` for all; none: only pages of the host that they connect to.
    pub(super) fn new(allowed: &[String]) -> Self {
        Self(allowed.into())
    }

    fn admit(&self, headers: &HeaderMap) -> bool {
        let Some(origin) = headers.get(header::ORIGIN) else { return true };
        let Ok(origin) = origin.to_str() else { return false };
        if self.0.iter().any(|allowed| allowed == "*" || allowed.eq_ignore_ascii_case(origin)) {
            return true;
        }
        // Of the page's host alone: this listener has a port of its own.
        let host = |authority: &str| {
            let end = authority.rfind(':').filter(|at| !authority[*at..].contains(']')).unwrap_or(authority.len());
            authority[..end].to_ascii_lowercase()
        };
        let ours = headers.get(header::HOST).and_then(|value| value.to_str().ok()).map(host);
        let theirs = origin.split_once("://").map(|(_, authority)| host(authority));
        self.0.is_empty() && theirs.is_some() && theirs == ours
    }
}

/// Whether `protocols` asks for SIP.
fn asks_for_sip(headers: &HeaderMap) -> bool {
    let lists = headers.get_all(header::SEC_WEBSOCKET_PROTOCOL).iter().filter_map(|value| value.to_str().ok());
    lists.flat_map(|list| list.split(',')).any(|protocol| protocol.trim().eq_ignore_ascii_case(PROTOCOL))
}

/// Judges an upgrade.
struct Judge<'a>(&'a Origins);

impl Callback for Judge<'_> {
    fn on_request(self, request: &Request, mut response: Response) -> Result<Response, ErrorResponse> {
        if !self.0.admit(request.headers()) {
            return Err(refusal(StatusCode::FORBIDDEN, "this Origin is not among [sip] ws_origins"));
        }
        if !asks_for_sip(request.headers()) {
            return Err(refusal(StatusCode::BAD_REQUEST, "Sec-WebSocket-Protocol must name `sip` (RFC 7118)"));
        }
        response.headers_mut().insert(header::SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(PROTOCOL));
        Ok(response)
    }
}

fn refusal(status: StatusCode, why: &str) -> ErrorResponse {
    let mut refusal = ErrorResponse::new(Some(why.to_owned()));
    *refusal.status_mut() = status;
    refusal
}

/// Upgrades a connection. `None`: it was refused, or is no WebSocket.
pub(super) async fn accept<S>(stream: S, origins: &Origins) -> Option<WebSocketStream<S>>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let config = WebSocketConfig::default()
        .max_message_size(Some(MAX_MESSAGE))
        .max_frame_size(Some(MAX_MESSAGE))
        .max_write_buffer_size(4 * MAX_MESSAGE)
        .read_buffer_size(READ_BUFFER);
    accept_hdr_async_with_config(stream, Judge(origins), Some(config)).await.ok()
}

/// What a SIP message travels in: text where it can (RFC 7118 section 5).
pub(super) fn message(bytes: Vec<u8>) -> Message {
    match String::from_utf8(bytes) {
        Ok(text) => Message::text(text),
        Err(other) => Message::binary(other.into_bytes()),
    }
}

/// The transport of a WebSocket.
pub(super) fn transport(secure: bool) -> Transport {
    if secure { Transport::Wss } else { Transport::Ws }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(list: &[(&'static str, &str)]) -> HeaderMap {
        list.iter().map(|(name, value)| (name.parse().expect("a name"), value.parse().expect("a value"))).collect()
    }

    #[test]
    fn pages_of_other_hosts_are_refused_unless_they_are_listed() {
        let own = Origins::default();
        let from = |origin: &str, host: &str| headers(&[("origin", origin), ("host", host)]);
        assert!(own.admit(&headers(&[("host", "a.example")])), "no browser");
        assert!(own.admit(&from("https://a.example", "a.example:8443")));
        assert!(own.admit(&from("http://[::1]:8080", "[::1]:5066")));
        for wrong in ["https://b.example", "null", "", "https://a.example.evil", "a.example"] {
            assert!(!own.admit(&from(wrong, "a.example")), "{wrong}");
        }
        let listed = Origins::new(&["https://b.example".to_owned()]);
        assert!(listed.admit(&from("https://b.example", "a.example")));
        assert!(!listed.admit(&from("https://a.example", "a.example")), "the list says all");
        assert!(Origins::new(&["*".to_owned()]).admit(&from("https://c.example", "a.example")));
    }

    #[test]
    fn the_subprotocol_is_asked_for_among_others() {
        for (asked, sip) in [("sip", true), ("msrp, SIP", true), ("msrp", false), ("sips", false)] {
            assert_eq!(asks_for_sip(&headers(&[("sec-websocket-protocol", asked)])), sip, "{asked}");
        }
        assert!(!asks_for_sip(&HeaderMap::new()));
    }
}
