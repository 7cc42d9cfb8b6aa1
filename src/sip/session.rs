//! The signalling of one call: from its answer to the end of the dialog.
//!
//! A session task owns the dialog and the call's place under `max_calls`, and does what its [`Machine`] decides. It
//! meets the media side in two bounded channels ([`Signal`], [`Control`]) and the stack in the stream of dialog states.
//! Whatever ends first ends the rest: BYE closes the leg, dropping the leg sends BYE.
//!
//! # Why
//! *Our own re-INVITE runs beside the loop*, so that a BYE is still heard; REFER likewise.
//!
//! *Nobody waits for a peer.* The leg asks and goes on sending; what the peer says comes to it as a signal.
//!
//! *BYE waits for the ACK* (RFC 3261 section 15): a peer that has not confirmed a call cannot be told that
//! it is over.

use std::{
    future::{Future, pending},
    ops::ControlFlow,
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use rsipstack::{
    dialog::{
        dialog::{DialogState, DialogStateReceiver, TerminatedReason, TransactionHandle},
        invite_dialog::InviteDialog,
    },
    sip::{Request, Response, StatusCode},
    transaction::key::TransactionRole,
};
use sdp::{Agreed, Negotiator};
use tokio::{sync::mpsc, time::timeout};
use tracing::info;

use super::{
    body::{self, Body},
    bye::bye,
    cause,
    config::Dtmf,
    machine::{Action, Machine},
    places::Place,
    quota::Lease,
    refer::Transfer,
    referred,
    shared::Shared,
    timer::{SessionTimer, until},
    up::Party,
};
use crate::{
    clock,
    media::{
        leg::LegEnd,
        sip::{Control, Early, Parts, Signal, SipLeg, latch::Peer, ports::PortPair},
    },
};

/// Signals that may wait for a leg.
pub(super) const SIGNALS: usize = 64;
/// Requests of a leg that may wait.
pub(super) const CONTROLS: usize = 8;
/// How long a leg may leave its signals unread before one is given up.
const UNREAD: Duration = Duration::from_secs(2);
/// How long the peer may take to answer a re-INVITE, provisional responses or not.
const ANSWER: Duration = Duration::from_secs(40);
/// Between looks at what is left of a trunk's minutes.
const QUOTA: Duration = Duration::from_secs(5);

/// The leg's ends of the two channels.
pub(super) type Ends = (mpsc::Receiver<Signal>, mpsc::Sender<Control>);

/// The signalling of one answered call.
pub(super) struct Session {
    pub(super) shared: Arc<Shared>,
    pub(super) dialog: InviteDialog,
    pub(super) states: DialogStateReceiver,
    pub(super) negotiator: Negotiator,
    pub(super) signals: mpsc::Sender<Signal>,
    pub(super) controls: mpsc::Receiver<Control>,
    /// The call's place under `max_calls`.
    pub(super) slot: Place,
    /// A call out through a trunk counts to what the trunk allows.
    pub(super) lease: Option<Lease>,
    pub(super) peer: Peer,
    /// Whose call it is.
    pub(super) party: Party,
    /// What the INVITE and its answer settled of RFC 4028.
    pub(super) timer: Option<SessionTimer>,
}

/// What runs beside the loop.
type Work<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The running part of a session.
struct Running {
    shared: Arc<Shared>,
    dialog: InviteDialog,
    states: DialogStateReceiver,
    machine: Machine,
    signals: mpsc::Sender<Signal>,
    controls: mpsc::Receiver<Control>,
    slot: Place,
    /// With it, when to look at the trunk's minutes again.
    lease: Option<(Lease, Instant)>,
    peer: Peer,
    /// A re-INVITE of ours; `None` comes of one that nobody answers.
    exchange: Option<Work<Option<Response>>>,
    /// A REFER of ours.
    referral: Option<Work<Result<Box<Transfer>, String>>>,
    /// What a transfer needs until it is over.
    transfer: Option<Box<Transfer>>,
    hand_over: HandOver,
    typed: Typed,
    /// Nobody has acknowledged our answer.
    unacknowledged: bool,
}

/// The peer sends us to somebody else.
struct HandOver {
    /// Who the peer is.
    party: Party,
    /// The call to where it sends us.
    call: Option<Work<Result<Box<SipLeg>, String>>>,
    /// Where that is.
    to: String,
    /// The peer wants to hear how it goes.
    told: bool,
    /// It has left meanwhile: what the call ends with unless the other one is answered.
    left: Option<LegEnd>,
}

/// Digits that go by INFO, one after the other: a carrier may answer them in any order.
#[derive(Default)]
struct Typed {
    waiting: String,
    sending: Option<Work<()>>,
}

impl Typed {
    /// Sends what waits, once nothing is under way.
    fn begin(&mut self, dialog: &InviteDialog) {
        if self.sending.is_none() && !self.waiting.is_empty() {
            let (dialog, digits) = (dialog.clone(), std::mem::take(&mut self.waiting));
            self.sending = Some(Box::pin(body::type_digits(dialog, digits)));
        }
    }
}

type Flow = ControlFlow<Ending>;

/// How the loop was left.
#[derive(Clone, Copy)]
enum Ending {
    /// The dialog is over.
    Dialog(LegEnd),
    /// We end it.
    Ours(LegEnd, &'static str),
}

impl Session {
    /// Makes the leg of what was agreed. The ports go with it. `early`: see [`Parts::early`].
    pub(super) fn leg(
        shared: &Shared,
        ports: PortPair,
        agreed: Agreed,
        peer: Peer,
        (signals, controls): Ends,
        early: Option<Early>,
    ) -> std::io::Result<SipLeg> {
        let media_timeout = Duration::from_secs(shared.config().media_timeout_s.max(1));
        let agreed = shared.reachable(agreed, peer);
        let trunk = shared.trunk_at(peer.signalling);
        let signals_digits = trunk.as_ref().is_some_and(|trunk| trunk.dtmf == Dtmf::Info);
        let trunk = trunk.map(|trunk| trunk.name.as_str().into());
        let identity = shared.media.identity.clone();
        SipLeg::new(Parts {
            ports,
            agreed,
            peer,
            media_timeout,
            early,
            signals_digits,
            trunk,
            identity,
            signals,
            controls,
        })
    }

    /// Runs until the call is over.
    pub(super) async fn run(self) {
        // The state may have been taken from the stream already, by whoever waited for the ACK.
        let confirmed = self.dialog.state().is_confirmed();
        let called = self.dialog.role() == TransactionRole::Server;
        let id = self.dialog.id();
        let farewell = self.shared.calls.farewells.enter(&id.call_id, &id.remote_tag);
        let _up = self.shared.calls.up.enter(id, self.party.clone(), &self.signals);
        let mut running = Running {
            machine: Machine::new(called, self.negotiator, self.timer),
            exchange: None,
            referral: None,
            transfer: None,
            hand_over: HandOver { party: self.party, call: None, to: String::new(), told: false, left: None },
            typed: Typed::default(),
            unacknowledged: false,
            shared: self.shared,
            dialog: self.dialog,
            states: self.states,
            signals: self.signals,
            controls: self.controls,
            slot: self.slot,
            lease: self.lease.map(|lease| (lease, clock::now() + QUOTA)),
            peer: self.peer,
        };
        if confirmed {
            running.on_confirmed();
        }
        let ending = running.work().await;
        running.finish(ending, &farewell).await;
    }
}

impl Running {
    async fn work(&mut self) -> Ending {
        let stop = self.shared.life.stop.clone();
        loop {
            if let ControlFlow::Break(ending) = self.act().await {
                return ending;
            }
            let deadline = self.machine.deadline();
            let (exchange, referral) = (under_way(&mut self.exchange), under_way(&mut self.referral));
            let handed = under_way(&mut self.hand_over.call);
            self.typed.begin(&self.dialog);
            let typed = under_way(&mut self.typed.sending);
            let quota = self.lease.as_ref().map(|(_, at)| *at);
            let flow = tokio::select! {
                biased;
                () = stop.cancelled() => ControlFlow::Break(Ending::Ours(LegEnd::Local, "shutting down")),
                state = self.states.recv(), if self.hand_over.left.is_none() => self.on_state(state).await,
                response = exchange => {
                    self.exchange = None;
                    self.machine.answered(clock::now(), response.as_ref(), rand::random());
                    ControlFlow::Continue(())
                }
                result = referral => {
                    self.referral = None;
                    let result = result.map(|transfer| self.transfer = Some(transfer));
                    self.machine.referred(clock::now(), result);
                    ControlFlow::Continue(())
                }
                leg = handed => self.on_handed_over(leg).await,
                control = self.controls.recv() => {
                    self.machine.control(control.unwrap_or(Control::HangUp));
                    ControlFlow::Continue(())
                }
                () = until(deadline) => {
                    self.machine.handle_timeout(clock::now());
                    ControlFlow::Continue(())
                }
                () = typed => {
                    self.typed.sending = None;
                    ControlFlow::Continue(())
                }
                () = until(quota) => self.on_quota(),
            };
            if let ControlFlow::Break(ending) = flow {
                return ending;
            }
        }
    }

    /// Does what the machine has decided.
    async fn act(&mut self) -> Flow {
        while let Some(action) = self.machine.poll(clock::now()) {
            match action {
                Action::Signal(signal) => self.signal(signal).await,
                Action::Invite { headers, offer } => {
                    let dialog = self.dialog.clone();
                    self.exchange = Some(Box::pin(async move {
                        let asked = dialog.reinvite(Some(headers), Some(offer));
                        timeout(ANSWER, asked).await.ok().and_then(Result::ok).flatten()
                    }));
                }
                Action::Digits(digits) => self.typed.waiting.push_str(&digits),
                Action::Refer { to, attended, limit } => {
                    let (shared, dialog) = (self.shared.clone(), self.dialog.clone());
                    self.referral = Some(Box::pin(async move {
                        Transfer::begin(&shared, &dialog, &to, attended, limit).await.map(Box::new)
                    }));
                }
                Action::EndConsultation => self.transfer = None,
                Action::End(end, reason) => return ControlFlow::Break(Ending::Ours(end, reason)),
            }
        }
        ControlFlow::Continue(())
    }

    async fn on_state(&mut self, state: Option<DialogState>) -> Flow {
        let Some(state) = state else { return ControlFlow::Break(Ending::Dialog(LegEnd::Failed)) };
        match state {
            DialogState::Confirmed(..) => self.on_confirmed(),
            DialogState::Updated(_, request, handle) => self.on_offer(&request, handle).await,
            DialogState::Info(_, request, handle) => {
                let status = match body::digit(&request) {
                    Body::Digit(digit) => {
                        self.signal(Signal::Digit(digit)).await;
                        StatusCode::OK
                    }
                    // An INFO without a body asks whether we live.
                    Body::Empty => StatusCode::OK,
                    Body::Unknown => StatusCode::UnsupportedMediaType,
                };
                handle.reply(status).await.ok();
            }
            DialogState::Options(_, _, handle) => {
                handle.respond(StatusCode::OK, Some(body::capabilities()), None).await.ok();
            }
            DialogState::Notify(_, request, handle) => {
                let status = self.machine.notified(&request);
                handle.reply(status).await.ok();
            }
            DialogState::Refer(_, request, handle) => self.on_refer(&request, handle).await,
            DialogState::Message(_, _, handle) | DialogState::Publish(_, _, handle) => {
                handle.respond(StatusCode::MethodNotAllowed, Some(vec![body::allow()]), None).await.ok();
            }
            DialogState::Terminated(_, reason) => {
                let end = self.end(&reason);
                // Who has sent us somewhere need not wait until we are there.
                if self.hand_over.call.is_none() || end != LegEnd::Remote {
                    return ControlFlow::Break(Ending::Dialog(end));
                }
                self.hand_over.left = Some(end);
            }
            DialogState::Calling(_) | DialogState::Trying(_) | DialogState::Early(..) | DialogState::WaitAck(..) => {}
        }
        ControlFlow::Continue(())
    }

    fn on_confirmed(&mut self) {
        if !self.machine.is_connected() {
            self.slot.confirm();
        }
        self.machine.confirmed(self.dialog.last_remote_ack().as_ref());
    }

    /// A re-INVITE or UPDATE.
    async fn on_offer(&mut self, request: &Request, handle: TransactionHandle) {
        let reply = self.machine.offered(clock::now(), request);
        if handle.respond(reply.status, Some(reply.headers), reply.body).await.is_err() {
            self.machine.unsent();
        }
    }

    /// The peer sends us to somebody else.
    async fn on_refer(&mut self, request: &Request, handle: TransactionHandle) {
        let wanted = match self.hand_over.call.is_some() || self.machine.is_transferring() {
            true => Err((StatusCode::RequestPending, vec![])),
            false => referred::wanted(&self.shared, &self.hand_over.party, request),
        };
        match wanted {
            Ok(referral) => {
                info!(id = %self.dialog.id(), to = referral.to(), "the peer hands the call over");
                (self.hand_over.told, self.hand_over.to) = (referral.told, referral.to().to_owned());
                handle.respond(StatusCode::Accepted, referral.headers(), None).await.ok();
                self.hand_over.call = Some(Box::pin(referral.follow(self.shared.clone(), self.dialog.clone())));
            }
            Err((status, headers)) => {
                info!(id = %self.dialog.id(), %status, "a REFER is refused");
                handle.respond(status, Some(headers), None).await.ok();
            }
        }
    }

    /// The call to where the peer has sent us is answered, or has failed.
    async fn on_handed_over(&mut self, leg: Result<Box<SipLeg>, String>) -> Flow {
        self.hand_over.call = None;
        match leg {
            Ok(leg) => {
                // First: a peer that hears of it hangs up, and nothing may end the agent's call then.
                let to = std::mem::take(&mut self.hand_over.to);
                self.signal(Signal::Moved(leg, to)).await;
                if self.hand_over.told {
                    referred::done(&self.dialog).await;
                }
                ControlFlow::Break(Ending::Ours(LegEnd::Local, "handed over"))
            }
            Err(reason) => {
                info!(id = %self.dialog.id(), reason, "the call was not handed over");
                self.hand_over.left.map_or(ControlFlow::Continue(()), |end| ControlFlow::Break(Ending::Dialog(end)))
            }
        }
    }

    /// Minutes that are used up end the calls that use them.
    fn on_quota(&mut self) -> Flow {
        let Some((lease, next)) = &mut self.lease else { return ControlFlow::Continue(()) };
        if lease.is_exhausted() {
            info!(id = %self.dialog.id(), "the trunk's minutes_per_day are used up: the call ends");
            return ControlFlow::Break(Ending::Ours(LegEnd::Local, "minutes used up"));
        }
        *next = clock::now() + QUOTA;
        ControlFlow::Continue(())
    }

    async fn signal(&mut self, signal: Signal) {
        let signal = match signal {
            Signal::Media(agreed) => Signal::Media(Box::new(self.shared.reachable(*agreed, self.peer))),
            Signal::TransferEnded(Err(reason)) => {
                info!(id = %self.dialog.id(), reason, "transfer failed; the call goes on");
                Signal::TransferEnded(Err(reason))
            }
            other => other,
        };
        // overflow: awaited, for a while: a leg reads its signals first, so one that does not is stuck or gone
        self.signals.send_timeout(signal, UNREAD).await.ok();
    }

    fn end(&mut self, reason: &TerminatedReason) -> LegEnd {
        let called = self.dialog.role() == TransactionRole::Server;
        match reason {
            TerminatedReason::UacBye => {
                if called {
                    LegEnd::Remote
                } else {
                    LegEnd::Local
                }
            }
            TerminatedReason::UasBye => {
                if called {
                    LegEnd::Local
                } else {
                    LegEnd::Remote
                }
            }
            TerminatedReason::UacCancel => LegEnd::Remote,
            TerminatedReason::Timeout => {
                self.unacknowledged = called && !self.machine.is_connected();
                LegEnd::Failed
            }
            _ => LegEnd::Failed,
        }
    }

    /// `farewell`: what the peer says when it ends the call.
    async fn finish(self, ending: Ending, farewell: &cause::Entry) {
        let Running { shared, dialog, states, machine, signals, slot, lease, unacknowledged, .. } = self;
        // Its place is free before the peer has taken notice: one that never does would keep it for a minute.
        let blame = slot.release();
        if unacknowledged {
            blame.penalise(clock::now());
        }
        let end = match ending {
            Ending::Dialog(end) => {
                shared.dialogs.remove_dialog(&dialog.id());
                if let Some(cause) = farewell.said().get() {
                    info!(id = %dialog.id(), q850 = cause.q850, sip = cause.sip, text = cause.text, "why the peer ends the call");
                    // overflow: awaited, for a while: see `signal`
                    signals.send_timeout(Signal::Cause(cause.clone()), UNREAD).await.ok();
                }
                end
            }
            Ending::Ours(end, _) => end,
        };
        // overflow: awaited, for a while: see `signal`. Dropping the sender afterwards says the same.
        signals.send_timeout(Signal::Closed(end), UNREAD).await.ok();
        drop((signals, lease));
        if let Ending::Ours(_, reason) = ending {
            let called = dialog.role() == TransactionRole::Server;
            let acknowledged = bye(&dialog, states, machine.is_connected(), reason).await;
            if called && !acknowledged {
                blame.penalise(clock::now());
            }
            shared.dialogs.remove_dialog(&dialog.id());
        }
    }
}

/// What is under way, if anything; else nothing, for ever.
async fn under_way<T>(work: &mut Option<Work<T>>) -> T {
    match work {
        Some(work) => work.await,
        None => pending().await,
    }
}
