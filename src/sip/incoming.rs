//! A call that rings here, as the application sees it: who calls, and what may be done about it.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use rsipstack::sip::{
    Header, Request,
    prelude::{HeadersExt, ToTypedHeader},
};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::{SipError, cause::Farewell, identity};
use crate::media::{
    leg::{Codec, PeerCause},
    sip::SipLeg,
};

/// Headers handed to the application at most, and their length.
const MAX_HEADERS: usize = 64;
const MAX_HEADER: usize = 2_048;

/// A call that rings here. Dropping it unanswered declines it with 480.
pub struct IncomingCall {
    /// URI of the caller (From), without display name.
    pub from: String,
    /// URI that was called (To).
    pub to: String,
    /// User part of the request URI: names the agent.
    pub user: String,
    /// Call-ID.
    pub call_id: String,
    /// Where the INVITE came from.
    pub source: SocketAddr,
    /// Name of the trunk that it comes by.
    pub trunk: Option<String>,
    /// Digest user, when `[sip] users` is set.
    pub account: Option<String>,
    /// Whether it is a trunk's or of an account. What nothing has proven may be forged until its ACK is here.
    pub trusted: bool,
    /// Headers that the stack does not use itself (`X-...`, `User-Agent`, `Diversion`), by name as written, and what
    /// they say of who calls: `X-Antiphon-Asserted`, `-Diverted-From`, `-Verstat`, `-Attestation` (a claim, not verified
    /// here), `-Attestation-Orig`, `-Attestation-Iat`.
    pub headers: BTreeMap<String, String>,
    /// Codecs offered, the caller's favourite first; empty for an INVITE without an offer.
    pub offered: Vec<Codec>,
    ends: Ends,
}

/// The application's ends of what connects it with the call's task.
pub(super) struct Ends {
    pub(super) commands: mpsc::Sender<Command>,
    /// It rings no longer.
    pub(super) gone: CancellationToken,
    /// What the caller says when it gives up.
    pub(super) farewell: Farewell,
}

pub(super) enum Command {
    Ringing,
    /// Sound before the answer.
    Sound(Vec<(String, String)>, oneshot::Sender<Result<SipLeg, SipError>>),
    /// The answer, where there is a leg already.
    Answer(Vec<(String, String)>, oneshot::Sender<Result<(), SipError>>),
    Accept(Vec<(String, String)>, oneshot::Sender<Result<SipLeg, SipError>>),
    Reject(Rejection),
}

/// Why a call is declined, and when the caller may come again.
pub(super) struct Rejection {
    pub(super) status: u16,
    pub(super) reason: String,
    pub(super) retry_after: Option<Duration>,
}

impl IncomingCall {
    /// Sends 180.
    pub fn ringing(&self) {
        // overflow: drops: it is full only while an earlier command is under way
        self.ends.commands.try_send(Command::Ringing).ok();
    }

    /// Sends 183 with a description, and gives the leg by which the caller hears what is said before the answer. It says
    /// [`LegEvent::Early`](crate::media::leg::LegEvent::Early) first; dropping it declines the call. Where the caller knows
    /// reliable provisional responses the 183 is one. [`IncomingCall::answer`] answers the call.
    ///
    /// # Errors
    /// The caller cancelled or sent no offer, no port is free, or nothing common was offered. Only where it cancelled is the
    /// call over.
    pub async fn sound(&self, headers: &[(&str, &str)]) -> Result<SipLeg, SipError> {
        let (reply, leg) = oneshot::channel();
        // overflow: awaited
        self.ends.commands.send(Command::Sound(owned(headers), reply)).await.map_err(|_| SipError::Cancelled)?;
        leg.await.map_err(|_| SipError::Cancelled)?
    }

    /// Answers with 200 what [`IncomingCall::sound`] has given a leg of. Waits for the caller's PRACK where one is due.
    ///
    /// # Errors
    /// The caller cancelled, or there is no such leg.
    pub async fn answer(self, headers: &[(&str, &str)]) -> Result<(), SipError> {
        let (reply, answered) = oneshot::channel();
        // overflow: awaited
        self.ends.commands.send(Command::Answer(owned(headers), reply)).await.map_err(|_| SipError::Cancelled)?;
        answered.await.map_err(|_| SipError::Cancelled)?
    }

    /// Answers with 200. The leg says `Connected` when the ACK is here. Where the INVITE had no offer, this
    /// waits for the ACK with the answer.
    ///
    /// # Errors
    /// The caller cancelled, no port is free, or nothing common was offered (answered 488).
    pub async fn accept(self) -> Result<SipLeg, SipError> {
        self.accept_with(&[]).await
    }

    /// As [`IncomingCall::accept`], with these headers in the 200.
    ///
    /// # Errors
    /// As [`IncomingCall::accept`].
    pub async fn accept_with(self, headers: &[(&str, &str)]) -> Result<SipLeg, SipError> {
        let (reply, answer) = oneshot::channel();
        // overflow: awaited
        self.ends.commands.send(Command::Accept(owned(headers), reply)).await.map_err(|_| SipError::Cancelled)?;
        answer.await.map_err(|_| SipError::Cancelled)?
    }

    /// Declines with a status of 300 to 699; others count as 480.
    pub fn reject(self, status: u16, reason: &str) {
        let status = if (300..700).contains(&status) { status } else { 480 };
        self.decline(Rejection { status, reason: reason.to_owned(), retry_after: None });
    }

    /// Declines with 503, and says when another call is worth while.
    pub fn reject_for(self, retry_after: Duration, reason: &str) {
        self.decline(Rejection::for_now(retry_after, reason));
    }

    fn decline(self, rejection: Rejection) {
        // overflow: drops: then dropping the sender declines with 480
        self.ends.commands.try_send(Command::Reject(rejection)).ok();
    }

    /// Why the caller gives up, once it has said so; may be asked when the call itself has been used up.
    pub fn farewell(&self) -> impl Fn() -> Option<PeerCause> + Send + use<> {
        let said = self.ends.farewell.clone();
        move || said.get().cloned()
    }

    /// Returns when the caller gives up. Cancel safe.
    pub async fn cancelled(&self) {
        self.ends.gone.cancelled().await;
    }
}

fn owned(headers: &[(&str, &str)]) -> Vec<(String, String)> {
    headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

impl Rejection {
    pub(super) fn not_answered() -> Rejection {
        Rejection { status: 480, reason: "the call was not answered".to_owned(), retry_after: None }
    }

    pub(super) fn for_now(retry_after: Duration, reason: &str) -> Rejection {
        Rejection { status: 503, reason: reason.to_owned(), retry_after: Some(retry_after) }
    }
}

pub(super) fn incoming(
    request: &Request,
    source: SocketAddr,
    trunk: Option<String>,
    account: Option<String>,
    offered: Vec<Codec>,
    ends: Ends,
) -> IncomingCall {
    let Parties { from, to, user } = parties(request);
    let mut headers = headers(request);
    identity::complete(&mut headers, &from, trunk.is_some());
    IncomingCall {
        from,
        to,
        user,
        call_id: request.call_id_header().map(|id| id.value().to_owned()).unwrap_or_default(),
        source,
        trunk,
        account,
        trusted: false,
        headers,
        offered,
        ends,
    }
}

/// Who calls whom.
pub(super) struct Parties {
    pub(super) from: String,
    pub(super) to: String,
    pub(super) user: String,
}

pub(super) fn parties(request: &Request) -> Parties {
    let from = request.from_header().ok().and_then(|h| h.typed().ok()).map(|h| h.uri.to_string());
    let to = request.to_header().ok().and_then(|h| h.typed().ok()).map(|h| h.uri.to_string());
    let user = request.uri.user().unwrap_or_default();
    // A password in a URI, or the subscriber parameters of a number, name no agent.
    let user = user.split([':', ';']).next().unwrap_or_default();
    Parties {
        from: from.unwrap_or_default(),
        to: to.unwrap_or_default(),
        user: rsipstack::sip::event_packages::percent_decode(user),
    }
}

/// Headers with a meaning to the application.
fn headers(request: &Request) -> BTreeMap<String, String> {
    let told = request.headers.iter().filter(|header| {
        !matches!(
            header,
            Header::Via(_)
                | Header::From(_)
                | Header::To(_)
                | Header::CallId(_)
                | Header::CSeq(_)
                | Header::Contact(_)
                | Header::MaxForwards(_)
                | Header::ContentLength(_)
                | Header::ContentType(_)
                | Header::Route(_)
                | Header::RecordRoute(_)
                | Header::Authorization(_)
                | Header::ProxyAuthorization(_)
                | Header::Allow(_)
                | Header::Supported(_)
        )
    });
    let told = told.filter(|header| header.value().len() <= MAX_HEADER).take(MAX_HEADERS);
    let mut found: BTreeMap<String, String> = BTreeMap::new();
    for header in told {
        let (name, value) = (header.name(), header.value());
        match found.iter_mut().find(|(known, _)| known.eq_ignore_ascii_case(name)) {
            // Lines of one name are one list (RFC 3261 section 7.3.1): the first Diversion is the latest.
            Some((_, known)) if known.len() + value.len() + 2 <= MAX_HEADER => {
                known.push_str(", ");
                known.push_str(value);
            }
            Some(_) => {}
            None => drop(found.insert(name.to_owned(), value.to_owned())),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_one_header_are_one_list_in_their_order() {
        let long = "x".repeat(MAX_HEADER);
        let text = format!(
            "INVITE sip:x@192.0.2.9 SIP/2.0\r\nVia: SIP/2.0/UDP h;branch=z9hG4bK1\r\nFrom: <sip:a@b>;tag=1\r\n\
             To: <sip:x@y>\r\nCall-ID: 1\r\nCSeq: 1 INVITE\r\nDiversion: <sip:+492@h>;reason=no-answer\r\n\
             X-Long: {long}\r\ndiversion: <sip:+491@h>;reason=unconditional\r\nX-Long: y\r\nContent-Length: 0\r\n\r\n"
        );
        let request = rsipstack::sip::SipMessage::try_from(text.as_bytes()).expect("parses");
        let rsipstack::sip::SipMessage::Request(request) = request else { panic!("a request") };
        let mut found = headers(&request);
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!(found["X-Long"].len(), MAX_HEADER, "what does not fit is left out");
        identity::complete(&mut found, "sip:a@b", true);
        assert_eq!(found["X-Antiphon-Diverted-From"], "+492", "the latest diversion");
    }
}
