//! Calls before they are answered: what is said, asked and settled in their early dialogs (RFC 3261 section 12.1).
//!
//! # Why
//! *The stack knows a dialog when it is confirmed.* Of one that rings it answers PRACK and BYE; what else comes is answered
//! here, for a carrier that asks whether a ringing call lives, or moves its ring-back tone, ends it where it is refused.
//!
//! *An UPDATE with an offer* needs the exchange of the INVITE to be over (RFC 3311 section 5.2). Where we call it is when a
//! reliable provisional response has brought the answer; before, our own offer is open (491). Where we are called it never
//! is, as our provisional responses bring no description: the caller's offer is open (500).
//!
//! *What an UPDATE has settled the 200 does not undo*: a description that comes there again is the answer of before, and not
//! looked at (RFC 3261 section 13.2.1).

use std::{future::Future, pin::pin, time::Duration};

use rsipstack::{
    dialog::{
        DialogId,
        dialog::{Dialog, DialogState, DialogStateReceiver},
        invite_dialog::InviteDialog,
    },
    sip::{
        Contact, Header, Method, Request, Response, StatusCode,
        prelude::{HeadersExt, ToTypedHeader},
    },
    transaction::key::TransactionRole,
};
use sdp::{Agreed, Negotiator};
use tokio::sync::mpsc;

use super::{
    body::{self, Body, Reply},
    calling::{Asked, Attempt, Replacement},
    shared::Shared,
    timer,
};
use crate::{clock, media::sip::Signal};

/// Digits that wait for the answer of a call which rings here.
const DIGITS: usize = 32;

/// What the called side says before it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provisional {
    /// It rings, or is looked for.
    Ringing {
        /// SIP status, 180 to 199.
        status: u16,
    },
    /// It sends sound already: see [`super::Endpoint::dial_early`].
    EarlyMedia {
        /// SIP status, 180 to 199.
        status: u16,
    },
}

impl Provisional {
    /// SIP status, 180 to 199.
    pub(super) fn status(self) -> u16 {
        match self {
            Provisional::Ringing { status } | Provisional::EarlyMedia { status } => status,
        }
    }
}

/// Who is told of provisional responses.
pub(super) type Tell<'a> = &'a (dyn Fn(Provisional) + Send + Sync);

/// A call out before its answer.
pub(super) struct Early<'a> {
    /// As our offer has left it.
    negotiator: Negotiator,
    attempt: &'a mut Attempt,
    signals: mpsc::Sender<Signal>,
    tell: Tell<'a>,
    /// Gets what a description before the answer agrees to.
    sound: &'a mut (dyn FnMut(Agreed) + Send),
    /// There was a response.
    pub(super) anything: bool,
    settled: Option<Settled>,
}

/// An exchange that is over before the answer.
struct Settled {
    /// Of whose dialog: a call may ring at several telephones.
    tag: String,
    negotiator: Negotiator,
    agreed: Agreed,
    /// An UPDATE has settled it anew.
    updated: bool,
}

/// What the answer of a call settles.
pub(super) struct Answer {
    pub(super) negotiator: Negotiator,
    /// Or why it cannot be used.
    pub(super) agreed: Result<Agreed, String>,
}

/// How the wait for an answer has ended.
pub(super) enum Ended<T> {
    With(T),
    /// Nothing was heard for too long.
    Silent,
    /// Another call has taken its place.
    Replaced(Replacement),
}

impl<'a> Early<'a> {
    pub(super) fn new(
        negotiator: Negotiator,
        attempt: &'a mut Attempt,
        signals: mpsc::Sender<Signal>,
        tell: Tell<'a>,
        sound: &'a mut (dyn FnMut(Agreed) + Send),
    ) -> Early<'a> {
        Early { negotiator, attempt, signals, tell, sound, anything: false, settled: None }
    }

    fn heard(&mut self, state: DialogState) {
        self.anything |= matches!(state, DialogState::Trying(_));
        let DialogState::Early(_, response) = state else { return };
        self.anything = true;
        let id = DialogId::try_from((&response, TransactionRole::Client)).ok();
        let tag = id.as_ref().map(|id| id.remote_tag.clone()).unwrap_or_default();
        if let Some(id) = id {
            self.attempt.rings(id);
        }
        let description = body::description(&response).ok().flatten();
        let status = response.status_code.code();
        (self.tell)(match description {
            Some(_) => Provisional::EarlyMedia { status },
            None => Provisional::Ringing { status },
        });
        let Some(description) = description else { return };
        if self.settled.as_ref().is_some_and(|settled| settled.updated && settled.tag == tag) {
            return;
        }
        // A copy: what an answer settles is settled once.
        let mut negotiator = self.negotiator.clone();
        let Ok(agreed) = negotiator.accept(&description) else { return };
        if response.header_contains_token("Require", "100rel") {
            self.settled = Some(Settled { tag, negotiator, agreed: agreed.clone(), updated: false });
        }
        (self.sound)(agreed);
    }

    /// What a request of the called side is answered with.
    fn reply(&mut self, request: &Request) -> Reply {
        match request.method {
            Method::Options => Reply::new(StatusCode::OK, body::capabilities()),
            Method::Info => match body::digit(request) {
                Body::Digit(digit) => {
                    // overflow: drops: only where an early leg reads nothing
                    self.signals.try_send(Signal::Digit(digit)).ok();
                    Reply::new(StatusCode::OK, vec![])
                }
                Body::Empty => Reply::new(StatusCode::OK, vec![]),
                Body::Unknown => Reply::new(StatusCode::UnsupportedMediaType, vec![]),
            },
            Method::Update => self.update(request),
            // Another INVITE while ours is open (RFC 3261 section 14.2).
            _ => Reply::new(StatusCode::RequestPending, vec![]),
        }
    }

    fn update(&mut self, request: &Request) -> Reply {
        let offer = match body::description(request) {
            Ok(Some(offer)) => offer,
            Ok(None) => return Reply::new(StatusCode::OK, vec![]),
            Err(refusal) => return refusal.into(),
        };
        let tag = DialogId::try_from((request, TransactionRole::Server)).map(|id| id.remote_tag).unwrap_or_default();
        let Some(settled) = self.settled.as_mut().filter(|settled| settled.tag == tag) else {
            return Reply::new(StatusCode::RequestPending, vec![]);
        };
        match settled.negotiator.answer(&offer) {
            Ok((answer, agreed)) => {
                (settled.agreed, settled.updated) = (agreed.clone(), true);
                (self.sound)(agreed);
                let body = Some(answer.to_string().into_bytes());
                Reply { status: StatusCode::OK, headers: body::sdp_headers(), body }
            }
            Err(error) => Reply::new(StatusCode::NotAcceptableHere, vec![body::warning(&error.to_string())]),
        }
    }

    /// What `response`, the answer, settles.
    pub(super) fn answered(self, response: &Response) -> Answer {
        let tag = DialogId::try_from((response, TransactionRole::Client)).map(|id| id.remote_tag).unwrap_or_default();
        let described = body::description(response);
        if let Some(settled) = self.settled
            && (matches!(described, Ok(None)) || settled.updated && settled.tag == tag)
        {
            // The answer of a reliable provisional response need not come again (RFC 3262 section 5).
            return Answer { negotiator: settled.negotiator, agreed: Ok(settled.agreed) };
        }
        let mut negotiator = self.negotiator;
        let agreed = match described {
            Ok(Some(answer)) => negotiator.accept(&answer).map_err(|error| error.to_string()),
            Ok(None) => Err("200 without a description".to_owned()),
            Err(refusal) => Err(refusal.reason),
        };
        Answer { negotiator, agreed }
    }
}

/// Waits for the end of an INVITE and deals meanwhile with what comes before it. `patience`: how long nothing at all may be
/// heard. Takes what happens until the call is confirmed from the stream, and that; the session asks the dialog.
pub(super) async fn watch<T>(
    invite: impl Future<Output = T>,
    states: &mut DialogStateReceiver,
    early: &mut Early<'_>,
    patience: Option<Duration>,
) -> Ended<T> {
    let mut invite = pin!(invite);
    let silent = patience.map(|patience| clock::now() + patience);
    // What follows is the session's: a peer may hold in the moment of our ACK, and its request must not be lost here.
    let mut confirmed = false;
    loop {
        tokio::select! {
            biased;
            ended = &mut invite => {
                while !confirmed && let Ok(state) = states.try_recv() {
                    confirmed = matches!(state, DialogState::Confirmed(..));
                    early.heard(state);
                }
                return Ended::With(ended);
            }
            Some(state) = states.recv(), if !confirmed => {
                confirmed = matches!(state, DialogState::Confirmed(..));
                early.heard(state);
            }
            asked = early.attempt.asked() => match asked {
                Asked::Request(request, answer) => drop(answer.send(early.reply(&request))),
                Asked::Replaced(replacement) => return Ended::Replaced(replacement),
            },
            () = timer::until(silent.filter(|_| !early.anything)) => return Ended::Silent,
        }
    }
}

/// What a request in the dialog of a call that rings here is answered with; `None`: the stack or its caller does that.
pub(super) fn ringing(shared: &Shared, dialog: &InviteDialog, request: &Request) -> Option<Reply> {
    let state = dialog.state();
    let rings = matches!(state, DialogState::Calling(_) | DialogState::Trying(_) | DialogState::Early(..));
    match request.method {
        Method::Options if rings || state.waiting_ack() => Some(Reply::new(StatusCode::OK, body::capabilities())),
        Method::Info if rings => Some(match body::digit(request) {
            Body::Digit(digit) => {
                let signals = shared.calls.ringing.get(&dialog.id()).and_then(|call| call.signals());
                // Its leg is there with the answer, and reads them then.
                if let Some(signals) = signals.filter(|s| s.max_capacity() - s.capacity() < DIGITS) {
                    // overflow: drops: who types so much before anybody listens
                    signals.try_send(Signal::Digit(digit)).ok();
                }
                Reply::new(StatusCode::OK, vec![])
            }
            Body::Empty => Reply::new(StatusCode::OK, vec![]),
            Body::Unknown => Reply::new(StatusCode::UnsupportedMediaType, vec![]),
        }),
        Method::Update if rings => Some(match body::description(request) {
            Ok(Some(_)) => {
                // At random from 0 to 10 s (RFC 3311 section 5.2).
                let wait = Duration::from_millis(rand::random_range(0..=10_000));
                Reply::new(StatusCode::ServerInternalError, vec![body::retry_after(wait)])
            }
            Ok(None) => Reply::new(StatusCode::OK, vec![]),
            Err(refusal) => refusal.into(),
        }),
        _ => None,
    }
}

/// The peer is at another address from now on, as a re-INVITE or UPDATE that was answered says (RFC 3261 section 12.2.2).
pub(super) fn follow(dialog: &InviteDialog, request: &Request) {
    let contact: Option<&Contact> = request.contact_header().ok();
    let Some(uri) = contact.and_then(|contact| contact.typed().ok()).map(|contact| contact.uri) else { return };
    Dialog::Invite(dialog.clone()).set_remote_target(uri, contact.cloned());
}

/// `Contact` of an answer that changes where requests go.
pub(super) fn contact(uri: &rsipstack::sip::Uri) -> Header {
    Header::Contact(Contact::new(format!("<{uri}>")))
}
