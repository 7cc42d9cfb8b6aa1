//! What other gateways mean for this one: who registers at a trunk, and where a call goes that is not taken here.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use rsipstack::sip::{Auth, Header, Param, Request, Scheme, Transport, Uri, prelude::HeadersExt, typed};

use tokio::sync::mpsc;

use super::{refused::RefusedCall, resolve::NameSource};
use crate::handover::Place;

/// Who else there is.
#[derive(Clone, Default)]
pub struct Beside {
    /// Where listeners come from, and the gateway before or after this one.
    pub place: Place,
    /// Other gateways of the cluster.
    pub neighbours: Option<Arc<dyn Neighbours>>,
    /// Who is asked where the hosts of trunks are; `None`: the system's name servers.
    pub names: Option<Arc<dyn NameSource>>,
    /// Who is told of calls that trunks send and that are refused before they ring.
    pub refused: Option<mpsc::Sender<RefusedCall>>,
}

/// Knows the other gateways. Asked for every INVITE and OPTIONS: it answers from memory.
pub trait Neighbours: Send + Sync {
    /// Whether this gateway is the one of all that registers at `trunk` now.
    fn registers(&self, trunk: &str) -> bool;

    /// Whether a new call would be taken.
    fn admission(&self) -> Admission;
}

/// Whether a new call would be taken, and what becomes of it if not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// It would.
    Open,
    /// It would not.
    Closed {
        /// When it may come again.
        retry_after: Duration,
        /// The gateway that would take it.
        elsewhere: Option<Addresses>,
    },
}

/// Where a gateway takes calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// Where UDP comes in.
    pub udp: Option<SocketAddr>,
    /// TCP.
    pub tcp: Option<SocketAddr>,
    /// TLS.
    pub tls: Option<SocketAddr>,
}

impl Addresses {
    /// The `Contact` by which an INVITE goes on there (RFC 3261 section 8.1.3.4): over the transport that it came by where
    /// the other gateway has that, and never from TLS to one that can be read.
    pub(super) fn contact(&self, request: &Request) -> Option<Header> {
        let via = request.top_via_header().map(|via| via.value().to_ascii_uppercase()).unwrap_or_default();
        let udp = self.udp.map(|address| (address, Transport::Udp));
        let tcp = self.tcp.map(|address| (address, Transport::Tcp));
        let tls = self.tls.map(|address| (address, Transport::Tls));
        let (address, transport) = match via.split_whitespace().next() {
            Some("SIP/2.0/TLS") => tls,
            // A browser reaches neither.
            Some("SIP/2.0/WS" | "SIP/2.0/WSS") => None,
            Some("SIP/2.0/TCP") => tcp.or(udp),
            _ => udp.or(tcp),
        }?;
        let params = if transport == Transport::Udp { vec![] } else { vec![Param::Transport(transport)] };
        let user = request.uri.auth.as_ref().map(|auth| auth.user.clone());
        let uri = Uri {
            scheme: Some(Scheme::Sip),
            auth: user.map(|user| Auth { user, password: None }),
            host_with_port: address.into(),
            params,
            headers: vec![],
        };
        Some(Header::Contact(typed::Contact { display_name: None, uri, params: vec![] }.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn invite(transport: &str) -> Request {
        let text = format!(
            "INVITE sip:+4930@192.0.2.1 SIP/2.0\r\nVia: SIP/2.0/{transport} 192.0.2.9;branch=z9hG4bK1\r\nContent-Length: 0\r\n\r\n"
        );
        Request::try_from(text.as_bytes()).expect("a request")
    }

    #[test]
    fn a_call_goes_on_by_the_transport_that_it_came_by_and_never_in_the_clear_from_tls() {
        let at = |port: u16| Some(SocketAddr::from(([192, 0, 2, 2], port)));
        let all = Addresses { udp: at(1), tcp: at(2), tls: at(3) };
        let open = Addresses { tls: None, ..all };
        let tcp = Addresses { udp: None, ..open };
        let told = |listeners: &Addresses, by| listeners.contact(&invite(by)).map(|header| header.to_string());
        for (listeners, by, wanted) in [
            (all, "UDP", Some("sip:+4930@192.0.2.2:1")),
            (all, "TCP", Some("sip:+4930@192.0.2.2:2;transport=TCP")),
            (all, "TLS", Some("sip:+4930@192.0.2.2:3;transport=TLS")),
            (tcp, "UDP", Some("sip:+4930@192.0.2.2:2;transport=TCP")),
            (open, "TLS", None),
            (Addresses::default(), "UDP", None),
        ] {
            let told = told(&listeners, by).map(|text| text.to_ascii_lowercase());
            assert_eq!(told.is_some(), wanted.is_some(), "{by}: {told:?}");
            if let (Some(told), Some(wanted)) = (told, wanted) {
                assert!(told.contains(&format!("<{}>", wanted.to_ascii_lowercase())), "{told}");
            }
        }
    }
}
