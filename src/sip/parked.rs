//! Datagrams that are longer than the stack's buffer.
//!
//! # Why
//! The stack reads UDP into 8,192 bytes of its own and cuts what is longer; SIP allows what a datagram holds (RFC 3261
//! section 18.1.1), and an INVITE with many routes or an identity is longer soon. Such a message is parsed here and
//! waits, a short one goes to the stack in its place, and as that passes the stack's event hook the two change places.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
};

use async_trait::async_trait;
use rsipstack::{
    sip::{Host, SipMessage, Transport},
    transaction::endpoint::TransportEventInspector,
    transport::{SipConnection, TransportEvent},
};

/// Messages that may wait. The stack takes them at once, so that more are a sign of one that does not.
const MAX_PARKED: usize = 64;

/// Where they wait. Cheap to clone.
#[derive(Clone)]
pub(super) struct Parked {
    /// Domain of the stubs: random, so that no peer names it.
    domain: Arc<str>,
    messages: Arc<Mutex<Waiting>>,
}

#[derive(Default)]
struct Waiting {
    next: u64,
    messages: HashMap<u64, SipMessage>,
}

impl Parked {
    pub(super) fn new(secret: u128) -> Parked {
        Parked { domain: format!("{secret:032x}.invalid").into(), messages: Arc::default() }
    }

    /// Keeps a message that came over UDP; what the stack gets in its place. `None`: it cannot be kept.
    pub(super) fn park(&self, message: SipMessage, from: SocketAddr) -> Option<Vec<u8>> {
        let message = SipConnection::update_msg_received(message, from, Transport::Udp).ok()?;
        let mut waiting = self.messages.lock().unwrap_or_else(PoisonError::into_inner);
        // overflow: drops: its sender repeats it
        if waiting.messages.len() >= MAX_PARKED {
            return None;
        }
        waiting.next += 1;
        let (id, domain) = (waiting.next, &self.domain);
        waiting.messages.insert(id, message);
        let stub = format!(
            "OPTIONS sip:{id}@{domain} SIP/2.0\r\nVia: SIP/2.0/UDP {domain};branch=z9hG4bK{id}\r\n\
             From: <sip:{domain}>;tag={id}\r\nTo: <sip:{domain}>\r\nCall-ID: {id}\r\nCSeq: 1 OPTIONS\r\n\
             Content-Length: 0\r\n\r\n"
        );
        Some(stub.into_bytes())
    }

    /// The message that `stub` stands for, if it is one.
    fn unpark(&self, stub: &SipMessage) -> Option<SipMessage> {
        let SipMessage::Request(request) = stub else { return None };
        let Host::Domain(domain) = &request.uri.host_with_port.host else { return None };
        let id = (domain.0 == *self.domain).then(|| request.uri.user()?.parse::<u64>().ok())??;
        self.messages.lock().unwrap_or_else(PoisonError::into_inner).messages.remove(&id)
    }
}

#[async_trait]
impl TransportEventInspector for Parked {
    async fn handle(&self, event: TransportEvent) -> Option<TransportEvent> {
        let TransportEvent::Incoming(message, connection, from) = event else { return Some(event) };
        let message = self.unpark(&message).unwrap_or(message);
        Some(TransportEvent::Incoming(message, connection, from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_comes_back_once_for_its_stub_and_for_nothing_else() {
        let text = b"OPTIONS sip:x@y SIP/2.0\r\nVia: SIP/2.0/UDP h;branch=z9hG4bK1\r\nFrom: <sip:a@b>;tag=1\r\n\
            To: <sip:x@y>\r\nCall-ID: 1\r\nCSeq: 1 OPTIONS\r\nContent-Length: 0\r\n\r\n";
        let message = SipMessage::try_from(text.as_slice()).expect("parses");
        let parked = Parked::new(7);
        let from = SocketAddr::from(([192, 0, 2, 1], 5060));
        let stub = parked.park(message.clone(), from).expect("room");
        assert!(stub.len() < 1_000);
        let stub = SipMessage::try_from(stub.as_slice()).expect("parses");
        assert!(Parked::new(8).unpark(&stub).is_none());
        assert!(parked.unpark(&message).is_none());
        let back = parked.unpark(&stub).expect("it waits");
        assert!(back.to_string().contains("received=192.0.2.1"), "{back}");
        assert!(parked.unpark(&stub).is_none());
        assert_eq!((0..1_000).filter_map(|_| parked.park(message.clone(), from)).count(), MAX_PARKED);
    }
}
