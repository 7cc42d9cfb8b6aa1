//! Answers that leave nothing behind (RFC 3261 section 8.2.7).
//!
//! # Why
//! The stack keeps every request and its answer for half a minute. For a call that is right; for the thousandth OPTIONS
//! or refusal of a second it is memory that a stranger spends. So what is refused, and what only asks, is answered from
//! the message alone; its sender repeats it where the answer is lost, and gets the same one.

use std::{net::SocketAddr, sync::Arc};

use rsipstack::{
    sip::{Header, Request, SipMessage, StatusCode, Transport, prelude::HeadersExt},
    transaction::{
        endpoint::EndpointInner,
        key::{TransactionKey, TransactionRole},
    },
    transport::SipConnection,
};
use sha2::{Digest, Sha256};

use super::tidy;

/// Answers that the stack keeps at most; beyond it new requests are refused. Each is at most as long as the headers
/// that it repeats, see [`super::screen`].
const MAX_KEPT: usize = 8_192;

/// A status and the headers that go with it.
pub(super) type Answer = (StatusCode, Vec<Header>);

/// Says what a new request is answered with at once; `None`: it is for the stack.
pub(super) type Judge = Arc<dyn Fn(&Request, SocketAddr) -> Option<Answer> + Send + Sync>;

/// Makes such answers.
#[derive(Clone)]
pub(super) struct Stateless {
    pub(super) stack: Arc<EndpointInner>,
    /// Random; To tags are made with it.
    pub(super) secret: [u8; 32],
    pub(super) judge: Judge,
}

impl Stateless {
    /// The answer to a message that needs no state, as bytes.
    pub(super) fn answer(&self, message: &SipMessage, from: SocketAddr, transport: Transport) -> Option<Vec<u8>> {
        let SipMessage::Request(request) = message else { return None };
        // Repetitions of what the stack has are the stack's.
        let key = TransactionKey::from_request(request, TransactionRole::Server).ok()?;
        if self.stack.transactions.get(&key).is_some() || self.stack.finished_transactions.get(&key).is_some() {
            return None;
        }
        let (status, headers) = (self.judge)(request, from)?;
        let message = SipConnection::update_msg_received(message.clone(), from, transport).ok()?;
        let SipMessage::Request(request) = message else { return None };
        let tag = self.tag(&request);
        let mut response = self.stack.make_response(&request, status, None);
        for header in response.headers.iter_mut() {
            if let Header::To(to) = header
                && to.tag().ok().flatten().is_none()
            {
                *to = to.clone().with_tag(tag.clone().into());
            }
        }
        response.headers.extend(headers);
        tidy::hide(&mut response);
        Some(SipMessage::Response(response).to_bytes())
    }

    /// Whether the stack keeps as many answers as it may.
    pub(super) fn is_full(stack: &EndpointInner) -> bool {
        stack.finished_transactions.len() >= MAX_KEPT
    }

    /// The same for the same request.
    fn tag(&self, request: &Request) -> String {
        let mut hasher = Sha256::new();
        hasher.update(self.secret);
        for value in [
            request.call_id_header().map(|header| header.value().to_owned()),
            request.from_header().map(|header| header.value().to_owned()),
            request.cseq_header().map(|header| header.value().to_owned()),
            request.top_via_header().map(|header| header.value().to_owned()),
        ] {
            hasher.update(Sha256::digest(value.unwrap_or_default()));
        }
        hasher.finalize()[..8].iter().map(|byte| format!("{byte:02x}")).collect()
    }
}
