//! What a stranger's message meets, one part after the other, for fuzzing: the screen, and what passes it as the stack and as
//! we read it.

use std::net::SocketAddr;

use rsipstack::{
    dialog::DialogId,
    sip::{Method, Request, Response, SipMessage, prelude::HeadersExt},
    transaction::key::{TransactionKey, TransactionRole},
};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{
    auth::{Authenticator, Claim},
    body,
    cause::{self, Farewell},
    challenge,
    config::{DigestName, Secret, SipConfig, User},
    incoming::{Ends, incoming, parties},
    names::Naming,
    refer, referred,
    reliable::Wish,
    replaces,
    screen::{self, Verdict},
    timer::{self, SessionTimer},
};
use crate::clock;

/// Reads `bytes` as a datagram and as the head of a stream, as a socket would, and handles what passes.
///
/// # Panics
/// Where the answer to what is refused is no answer.
pub fn fuzz(bytes: &[u8]) {
    let from = SocketAddr::from(([192, 0, 2, 1], 5060));
    let _ = screen::frame(bytes);
    // Of a message, the description is what comes behind the empty line.
    let body = bytes.windows(4).position(|four| four == b"\r\n\r\n").map_or(bytes, |at| &bytes[at + 4..]);
    let _ = sdp::parse(body);
    match screen::screen(bytes, from, "antiphon") {
        Verdict::Pass { message, .. } => handle(*message, from),
        Verdict::Answer(answer) => assert!(answer.starts_with(b"SIP/2.0 ") && answer.ends_with(b"\r\n\r\n")),
        Verdict::Ignore(_) => {}
    }
}

fn handle(mut message: SipMessage, from: SocketAddr) {
    Naming::new(&SipConfig::default(), [from.ip()]).amend(&mut message, from);
    let _ = SipMessage::try_from(message.to_bytes().as_slice());
    match message {
        SipMessage::Request(request) => asked(&request, from),
        SipMessage::Response(response) => told(response),
    }
}

fn asked(request: &Request, from: SocketAddr) {
    let now = clock::now();
    let _ = TransactionKey::from_request(request, TransactionRole::Server);
    let _ = DialogId::try_from((request, TransactionRole::Server));
    let _ = (Wish::of(request), SessionTimer::asked(request, Some(1_800), now));
    let _ = (body::description(request), body::digit(request), body::takes_sdp(request), refer::progress(request));
    let _ = referred::read(request, |_| false);
    for header in request.headers.iter() {
        let _ = replaces::read(header.value());
    }
    for trunk in [None, Some("trunk".to_owned())] {
        let (commands, _unread) = mpsc::channel(1);
        let ends = Ends { commands, gone: CancellationToken::new(), farewell: Farewell::default() };
        let _ = incoming(request, from, trunk, None, Vec::new(), ends);
    }
    let _ = (cause::named(&request.headers), parties(request));
    let users = [User { username: "alice".to_owned(), password: Secret::new("wonderland") }];
    let digests = [DigestName::Sha512_256, DigestName::Sha256, DigestName::Md5];
    let guard = Authenticator::new("here", &users, &digests, [7; 32], now);
    let call_id = request.call_id_header().map(|id| id.value().to_owned()).unwrap_or_default();
    let credentials = request.header_value("Authorization");
    let claim = Claim {
        source: from.ip(),
        call_id: &call_id,
        method: request.method,
        uri: &request.uri,
        credentials: credentials.as_deref(),
    };
    if let Ok(read) = guard.refused(now, &claim) {
        let _ = guard.check(now, &claim, &read);
    }
}

fn told(mut response: Response) {
    let now = clock::now();
    let _ = DialogId::try_from((&response, TransactionRole::Client));
    if let Some(timer) = SessionTimer::answered(&response, now) {
        let _ = timer.longer(&response);
    }
    let _ = (timer::demanded(&response), body::description(&response));
    for realm in [None, Some("here")] {
        let _ = challenge::reduce(&mut response.headers, realm);
    }
    challenge::mend(&mut response.headers, Method::Invite, |_| Some(Secret::new("wonderland")));
}
