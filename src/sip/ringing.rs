//! A call that rings here, until it is answered.
//!
//! Its task owns the dialog; the application tells it by [`Command`]s what to do.

use std::{sync::Arc, time::Duration};

use rsipstack::{
    dialog::{
        dialog::{DialogState, DialogStateReceiver, TerminatedReason},
        invite_dialog::InviteDialog,
    },
    sip::{Header, StatusCode},
    transaction::transaction::{TransactionEvent, TransactionEventSender},
};
use sdp::{Description, Negotiator, Policy};
use tokio::{
    sync::{mpsc, oneshot},
    time::sleep,
};
use tokio_util::sync::CancellationToken;

use super::{
    SipError, body,
    bye::bye,
    cause,
    incoming::{Command, Rejection},
    places::{FULL, Place},
    reliable::{self, Due, Wish},
    session::{CONTROLS, SIGNALS, Session},
    shared::{RESTART, Shared},
    timer::SessionTimer,
    up::Party,
};
use crate::{
    clock,
    media::{
        leg::LegEnd,
        sip::{Control, Early, Signal, SipLeg, latch::Peer},
    },
};

/// How long a call may ring here before it is declined.
const RINGING: Duration = Duration::from_secs(180);
/// What a leg is told that asks for something before the answer.
const UNANSWERED: &str = "the call is not answered yet";

/// A call that rings: what its task owns until it is answered.
pub(super) struct Ringing {
    pub(super) shared: Arc<Shared>,
    pub(super) dialog: InviteDialog,
    pub(super) states: DialogStateReceiver,
    /// What the INVITE's transaction is to answer.
    pub(super) responses: TransactionEventSender,
    pub(super) offer: Option<Description>,
    pub(super) policy: Policy,
    pub(super) slot: Place,
    pub(super) peer: Peer,
    pub(super) party: Party,
    pub(super) gone: CancellationToken,
    /// What the caller says when it gives up.
    pub(super) farewell: cause::Entry,
    /// How provisional responses may be sent.
    pub(super) wish: Wish,
    /// What the 200 settles of RFC 4028, and how it says so.
    pub(super) timer: Option<(SessionTimer, Vec<Header>)>,
    /// Sound before the answer, once there is some.
    pub(super) sound: Option<Sound>,
}

/// What a call that is heard before its answer has settled.
pub(super) struct Sound {
    negotiator: Negotiator,
    description: Vec<u8>,
    /// What its leg asks for.
    controls: mpsc::Receiver<Control>,
}

/// The answer that waits for a PRACK.
type Answering = (Vec<(String, String)>, oneshot::Sender<Result<(), SipError>>);

/// The ends of the channel to a leg.
type Signals = (mpsc::Sender<Signal>, Option<mpsc::Receiver<Signal>>);

/// Forgets what waits for a PRACK when the call rings no longer.
struct Rings {
    shared: Arc<Shared>,
    tag: String,
}

impl Drop for Rings {
    fn drop(&mut self) {
        self.shared.reliable.forget(&self.tag);
    }
}

impl Ringing {
    pub(super) async fn run(mut self, mut commands: mpsc::Receiver<Command>, taken: bool) {
        // Told to everybody who waits, on every way out.
        let _gone = self.gone.clone().drop_guard();
        let tag = self.dialog.id().local_tag;
        let _ringing = Rings { shared: self.shared.clone(), tag: tag.clone() };
        // What comes before the answer waits in it for the leg.
        let (signals, receiver) = mpsc::channel(SIGNALS);
        let entered = self.shared.calls.ringing.enter(self.dialog.id(), self.party.clone(), &signals);
        let mut signals: Signals = (signals, Some(receiver));
        let mut headers = vec![body::allow()];
        let mut answering: Option<Answering> = None;
        if !taken {
            return self.reject(Rejection::for_now(FULL, "no more calls can be taken"));
        }
        let limit = sleep(RINGING);
        tokio::pin!(limit);
        let stop = self.shared.life.stop.clone();
        loop {
            tokio::select! {
                biased;
                state = self.states.recv() => match state {
                    None => return self.forget(),
                    // BYE ends a call that rings, too, and leaves its INVITE open (RFC 3261 section 15.1.2).
                    Some(DialogState::Terminated(_, reason)) => {
                        if matches!(reason, TerminatedReason::UacBye) {
                            self.respond(StatusCode::RequestTerminated, vec![]);
                        }
                        if let Some(cause) = self.farewell.said().get() {
                            // overflow: drops: as below
                            signals.0.try_send(Signal::Cause(cause.clone())).ok();
                        }
                        // overflow: drops: a leg that reads nothing ends with the channel
                        signals.0.try_send(Signal::Closed(LegEnd::Remote)).ok();
                        return self.forget();
                    }
                    // Requests of the caller are answered where they come in: see `early`.
                    Some(_) => {}
                },
                () = stop.cancelled() => return self.reject(Rejection::for_now(RESTART, "shutting down")),
                () = reliable::due(&self.shared.reliable, &tag) => match self.shared.reliable.due(clock::now(), &tag) {
                    Some(Due::Repeat) => {
                        let description = self.sound.as_ref().map(|sound| sound.description.clone());
                        self.dialog.ringing(Some(headers.clone()), description).ok();
                    }
                    // RFC 3262 section 3.
                    Some(Due::GiveUp) => return self.reject(Rejection {
                        status: 504,
                        reason: "no PRACK".to_owned(),
                        retry_after: None,
                    }),
                    None => {}
                },
                // RFC 3262 section 3: a description that is not acknowledged yet may still be repeated.
                () = self.shared.reliable.settled(&tag), if answering.is_some() => {
                    drop(entered);
                    let Some((extra, reply)) = answering else { return self.forget() };
                    return self.answer(extra, reply, signals.0).await;
                }
                control = asked(&mut self.sound) => match control {
                    None | Some(Control::HangUp | Control::Lost) => {
                        return self.reject(Rejection::not_answered());
                    }
                    // overflow: drops: as a leg that reads nothing
                    // Who is not connected yet takes no digits.
                    Some(Control::Digits(_)) => {}
                    // overflow: drops: as a leg that reads nothing
                    Some(Control::Hold(hold)) => {
                        signals.0.try_send(Signal::HoldAnswered(hold, Err(UNANSWERED.to_owned()))).ok();
                    }
                    // overflow: drops: as above
                    Some(_) => {
                        signals.0.try_send(Signal::TransferAnswered(Err(UNANSWERED.to_owned()))).ok();
                    }
                },
                command = commands.recv(), if answering.is_none() => match command {
                    // Who hears something need not be told that it rings.
                    Some(Command::Ringing) if self.sound.is_some() => {}
                    Some(Command::Ringing) => {
                        match (self.wish, &self.offer) {
                            // It would have to bring our offer; see `reliable`.
                            (Wish::Demanded, None) => continue,
                            (Wish::Unknown, _) | (Wish::Known, None) => {}
                            (Wish::Known | Wish::Demanded, Some(_)) => {
                                headers.truncate(1);
                                headers.extend(self.reliably(&tag));
                            }
                        }
                        self.dialog.ringing(Some(headers.clone()), None).ok();
                    }
                    Some(Command::Sound(extra, reply)) => {
                        let leg = self.sound(&mut signals);
                        if let (Ok(_), Some(sound)) = (&leg, &self.sound) {
                            headers = body::sdp_headers();
                            headers.extend(extra.into_iter().map(|(name, value)| Header::Other(name, value)));
                            if self.wish != Wish::Unknown {
                                headers.extend(self.reliably(&tag));
                            }
                            self.dialog.ringing(Some(headers.clone()), Some(sound.description.clone())).ok();
                        }
                        reply.send(leg).ok();
                    }
                    Some(Command::Answer(_, reply)) if self.sound.is_none() => {
                        reply.send(Err(SipError::NotAcceptable("nothing was heard of the call".to_owned()))).ok();
                        return self.reject(Rejection::not_answered());
                    }
                    Some(Command::Answer(extra, reply)) => answering = Some((extra, reply)),
                    Some(Command::Accept(headers, reply)) => {
                        let (signals, Some(receiver)) = signals else {
                            let why = "its leg is there already".to_owned();
                            reply.send(Err(SipError::NotAcceptable(why))).ok();
                            return self.reject(Rejection::not_answered());
                        };
                        drop(entered);
                        return self.accept(headers, reply, (signals, receiver)).await;
                    }
                    Some(Command::Reject(rejection)) => return self.reject(rejection),
                    None => return self.reject(Rejection::not_answered()),
                },
                () = &mut limit => return self.reject(Rejection::not_answered()),
            }
        }
    }

    /// Headers of a provisional response that is to be acknowledged.
    fn reliably(&self, tag: &str) -> Vec<Header> {
        self.shared.reliable.begin(clock::now(), tag, &self.dialog.initial_request(), rand::random())
    }

    /// The leg by which the caller is spoken to before the answer.
    fn sound(&mut self, signals: &mut Signals) -> Result<SipLeg, SipError> {
        let offer = self.offer.as_ref().filter(|_| signals.1.is_some());
        let offer = offer.ok_or_else(|| SipError::NotAcceptable("the INVITE has no offer".to_owned()))?;
        let ports = self.shared.media.ports.bind().map_err(SipError::NoPort)?;
        let local =
            body::local_media(self.shared.media_ip(self.peer.signalling), ports.port, &self.shared.media.identity);
        let mut negotiator = Negotiator::new(self.policy.clone(), local);
        let (answer, agreed) = negotiator.answer(offer).map_err(|error| SipError::NotAcceptable(error.to_string()))?;
        let Some(receiver) = signals.1.take() else { return Err(SipError::Closed) };
        let (sender, controls) = mpsc::channel(CONTROLS);
        let leg = Session::leg(&self.shared, ports, agreed, self.peer, (receiver, sender), Some(Early::Speaks));
        self.sound = Some(Sound { negotiator, description: answer.to_string().into_bytes(), controls });
        leg.map_err(SipError::NoPort)
    }

    /// Answers a call whose leg is there.
    async fn answer(
        self,
        extra: Vec<(String, String)>,
        reply: oneshot::Sender<Result<(), SipError>>,
        signals: mpsc::Sender<Signal>,
    ) {
        let (timer, timed) = self.timer.clone().unzip();
        let mut headers = body::sdp_headers();
        headers.extend(timed.into_iter().flatten());
        headers.extend(extra.into_iter().map(|(name, value)| Header::Other(name, value)));
        let description = self.sound.as_ref().map(|sound| sound.description.clone());
        let over = self.dialog.state().is_terminated();
        // The answer of before once more: who got no reliable one knows only this (RFC 6337 section 3.1.1).
        if over || self.dialog.accept(Some(headers), description).is_err() {
            reply.send(Err(SipError::Cancelled)).ok();
            return self.forget();
        }
        let Ringing { shared, dialog, states, slot, peer, party, gone, sound, .. } = self;
        gone.cancel();
        let Some(Sound { negotiator, controls, .. }) = sound else { return };
        reply.send(Ok(())).ok();
        let timer = timer.map(|timer| timer.restarted(clock::now()));
        let lease = None;
        let session =
            Session { shared, dialog, states, negotiator, signals, controls, slot, lease, peer, party, timer };
        session.run().await;
    }

    fn reject(self, rejection: Rejection) {
        let Rejection { status, reason, retry_after } = rejection;
        let text: String = reason.chars().filter(|c| !matches!(c, '"' | '\\') && !c.is_control()).take(100).collect();
        let cause = (!text.is_empty()).then(|| format!("SIP;cause={status};text=\"{text}\""));
        let status = StatusCode::from(status);
        if let Some(wait) = retry_after {
            // The stack's own rejection takes no headers. A transaction sends the first final response that it is
            // given and drops later ones, so that after this one the stack's only ends the dialog.
            let reason = cause.as_ref().map(|cause| Header::Reason(cause.clone().into()));
            self.respond(status.clone(), [body::retry_after(wait)].into_iter().chain(reason).collect());
        }
        self.dialog.reject(Some(status), cause).ok();
        self.forget();
    }

    /// Answers the INVITE past the stack's dialog.
    fn respond(&self, status: StatusCode, headers: Vec<Header>) {
        let mut response = self.shared.stack.make_response(&self.dialog.initial_request(), status, None);
        let tag = self.dialog.id().local_tag;
        for header in response.headers.iter_mut() {
            if let Header::To(to) = header {
                *to = to.with_tag(tag.clone().into());
            }
        }
        headers.into_iter().for_each(|header| response.headers.push(header));
        self.responses.send(TransactionEvent::Respond(response)).ok();
    }

    fn forget(self) {
        self.shared.dialogs.remove_dialog(&self.dialog.id());
    }

    async fn accept(
        self,
        extra: Vec<(String, String)>,
        reply: oneshot::Sender<Result<SipLeg, SipError>>,
        (signals, receiver): (mpsc::Sender<Signal>, mpsc::Receiver<Signal>),
    ) {
        if self.dialog.state().is_terminated() {
            reply.send(Err(SipError::Cancelled)).ok();
            return self.forget();
        }
        let ports = match self.shared.media.ports.bind() {
            Ok(ports) => ports,
            Err(error) => {
                reply.send(Err(SipError::NoPort(error))).ok();
                return self.reject(Rejection::for_now(FULL, "no media port is free"));
            }
        };
        let local =
            body::local_media(self.shared.media_ip(self.peer.signalling), ports.port, &self.shared.media.identity);
        let mut negotiator = Negotiator::new(self.policy.clone(), local);
        let (description, agreed) = match &self.offer {
            None => (negotiator.offer(), None),
            Some(offer) => match negotiator.answer(offer) {
                Ok((answer, agreed)) => (answer, Some(agreed)),
                Err(error) => {
                    reply.send(Err(SipError::NotAcceptable(error.to_string()))).ok();
                    let reason = "nothing in common".to_owned();
                    return self.reject(Rejection { status: 488, reason, retry_after: None });
                }
            },
        };
        let (timer, timed) = self.timer.clone().unzip();
        let mut headers = body::sdp_headers();
        headers.extend(timed.into_iter().flatten());
        headers.extend(extra.into_iter().map(|(name, value)| rsipstack::sip::Header::Other(name, value)));
        let sent = self.dialog.accept(Some(headers), Some(description.to_string().into_bytes()));
        if sent.is_err() {
            reply.send(Err(SipError::Cancelled)).ok();
            return self.forget();
        }
        let Ringing { shared, dialog, mut states, slot, peer, party, gone, .. } = self;
        gone.cancel();
        let agreed = match agreed {
            Some(agreed) => agreed,
            None => match answer_in_ack(&dialog, &mut states, &mut negotiator).await {
                Ok(agreed) => agreed,
                Err(error) => {
                    // Without the ACK the stack gives up after half a minute, and so much again may pass until a BYE
                    // is: its place is free before.
                    let blame = slot.release();
                    if matches!(error, SipError::Cancelled) {
                        blame.penalise(clock::now());
                    }
                    reply.send(Err(error)).ok();
                    bye(&dialog, states, false, "no usable answer").await;
                    return shared.dialogs.remove_dialog(&dialog.id());
                }
            },
        };
        // It counts from the 200, not from the INVITE.
        let timer = timer.map(|timer| timer.restarted(clock::now()));
        let (sender, controls) = mpsc::channel(CONTROLS);
        let leg = Session::leg(&shared, ports, agreed, peer, (receiver, sender), None);
        // A leg that no call takes is dropped here, and the session then hangs up.
        reply.send(leg.map_err(SipError::NoPort)).ok();
        let lease = None;
        let session =
            Session { shared, dialog, states, negotiator, signals, controls, slot, lease, peer, party, timer };
        session.run().await;
    }
}

/// What the leg of a call that is not answered asks for. Never where there is none.
async fn asked(sound: &mut Option<Sound>) -> Option<Control> {
    match sound {
        Some(sound) => sound.controls.recv().await,
        None => std::future::pending().await,
    }
}

/// Waits for the ACK of a 2xx that carried our offer, and takes its answer.
async fn answer_in_ack(
    dialog: &InviteDialog,
    states: &mut DialogStateReceiver,
    negotiator: &mut Negotiator,
) -> Result<sdp::Agreed, SipError> {
    loop {
        match states.recv().await {
            None | Some(DialogState::Terminated(..)) => return Err(SipError::Cancelled),
            Some(DialogState::Confirmed(..)) => break,
            Some(_) => {}
        }
    }
    let ack = dialog.last_remote_ack().ok_or(SipError::Cancelled)?;
    let answer = body::description(&ack).map_err(|refusal| SipError::NotAcceptable(refusal.reason))?;
    let answer = answer.ok_or_else(|| SipError::NotAcceptable("the ACK brings no answer".to_owned()))?;
    negotiator.accept(&answer).map_err(|error| SipError::NotAcceptable(error.to_string()))
}
