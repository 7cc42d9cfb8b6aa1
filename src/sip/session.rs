//! The signalling of one call: from the INVITE to the end of the dialog.
//!
//! A session task owns the dialog, the negotiation and the call's place under `max_calls`. It meets the
//! media side in two bounded channels ([`Signal`], [`Control`]) and the stack in the stream of dialog states.
//! Whatever ends first ends the rest: BYE closes the leg, dropping the leg sends BYE.
//!
//! # Why
//! *One exchange at a time.* Our own re-INVITE runs beside the loop so that a BYE is still heard, and while
//! it runs an incoming one is answered 491 (RFC 3261 section 14.2). Where ours meets one of the peer it is tried again
//! later, and until then the peer's is taken: otherwise two that hold at once refuse each other for good. A hold that is
//! asked for meanwhile waits, and the last wish counts. REFER changes nothing of the session and has a place of its own.
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
    sip::{Method, Request, Response, StatusCode, StatusCodeKind},
    transaction::key::TransactionRole,
};
use sdp::{Agreed, Negotiator};
use tokio::{sync::mpsc, time::timeout};
use tracing::{debug, info};

use super::{
    body::{self, Body},
    bye::bye,
    places::Place,
    quota::Lease,
    refer::{self, Outcome, Transfer},
    shared::Shared,
    timer::{Due, SessionTimer, until},
};
use crate::{
    clock,
    media::{
        leg::LegEnd,
        sip::{Control, Parts, Signal, SipLeg, latch::Peer, ports::PortPair},
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
/// Attempts at a re-INVITE that meets one of the peer (491).
const GLARE: usize = 3;
/// Between looks at what is left of a trunk's minutes.
const QUOTA: Duration = Duration::from_secs(5);

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
    /// What the INVITE and its answer settled of RFC 4028.
    pub(super) timer: Option<SessionTimer>,
}

/// What runs beside the loop.
type Work<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The running part of a session.
struct Running {
    session: Session,
    connected: bool,
    /// Our 2xx carried an offer: the ACK brings the answer.
    answer_due: bool,
    /// A re-INVITE of ours.
    exchange: Option<Work<Done>>,
    /// One that met a re-INVITE of the peer, and waits for its next attempt.
    retry: Option<Retry>,
    /// Whether the leg wants the peer held, where that waits for another exchange.
    wanted: Option<bool>,
    /// Our refresh is due and waits for another exchange.
    refresh: bool,
    referral: Option<Work<Result<Box<Transfer>, String>>>,
    transfer: Option<Box<Transfer>>,
    /// What a NOTIFY said before the answer to our REFER was here (RFC 6665 section 4.1.2.4 allows that).
    early: Option<Outcome>,
    /// When to look at the trunk's minutes again.
    quota: Option<Instant>,
    /// Nobody has acknowledged our answer.
    unacknowledged: bool,
}

/// The end of a re-INVITE of ours.
struct Done {
    why: Why,
    /// Attempts that are left, this one included.
    left: usize,
    response: Option<Response>,
}

/// The next attempt at one.
#[derive(Clone, Copy)]
struct Retry {
    at: Instant,
    why: Why,
    left: usize,
}

/// What a re-INVITE of ours is for. Every one refreshes the session, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    /// `before`: what held until then, and holds again where the peer refuses.
    Hold {
        hold: bool,
        before: bool,
    },
    Refresh,
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
    /// Makes the leg of what was agreed. The ports go with it.
    pub(super) fn leg(
        shared: &Shared,
        ports: PortPair,
        agreed: Agreed,
        peer: Peer,
        signals: mpsc::Receiver<Signal>,
        controls: mpsc::Sender<Control>,
    ) -> std::io::Result<SipLeg> {
        let media_timeout = Duration::from_secs(shared.config.media_timeout_s.max(1));
        let agreed = shared.reachable(agreed, peer);
        SipLeg::new(Parts { ports, agreed, peer, media_timeout, signals, controls })
    }

    /// Runs until the call is over.
    pub(super) async fn run(self) {
        // The state may have been taken from the stream already, by whoever waited for the ACK.
        let confirmed = self.dialog.state().is_confirmed();
        let mut running = Running {
            connected: false,
            answer_due: false,
            exchange: None,
            retry: None,
            wanted: None,
            refresh: false,
            referral: None,
            transfer: None,
            early: None,
            quota: self.lease.is_some().then(|| clock::now() + QUOTA),
            unacknowledged: false,
            session: self,
        };
        if confirmed {
            running.on_confirmed().await;
        }
        let ending = running.work().await;
        running.finish(ending).await;
    }
}

impl Running {
    async fn work(&mut self) -> Ending {
        let stop = self.session.shared.stop.clone();
        loop {
            let retry = self.retry_at();
            let (exchange, referral) = (under_way(&mut self.exchange), under_way(&mut self.referral));
            let flow = tokio::select! {
                biased;
                () = stop.cancelled() => ControlFlow::Break(Ending::Ours(LegEnd::Local, "shutting down")),
                state = self.session.states.recv() => self.on_state(state).await,
                done = exchange => {
                    self.exchange = None;
                    self.on_done(done).await
                }
                result = referral => {
                    self.referral = None;
                    self.on_referred(result).await
                }
                control = self.session.controls.recv() => self.on_control(control).await,
                () = until(self.session.timer.map(|timer| timer.deadline())) => self.on_timer(),
                () = until(self.quota) => self.on_quota(),
                // It begins below.
                () = until(retry) => ControlFlow::Continue(()),
            };
            if let ControlFlow::Break(ending) = flow {
                return ending;
            }
            self.begin_wanted();
        }
    }

    async fn on_state(&mut self, state: Option<DialogState>) -> Flow {
        let Some(state) = state else { return ControlFlow::Break(Ending::Dialog(LegEnd::Failed)) };
        match state {
            DialogState::Confirmed(..) => self.on_confirmed().await,
            DialogState::Updated(_, request, handle) => return self.on_offer(&request, handle).await,
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
                let known = self.transfer.is_some() || self.referral.is_some();
                let status = if known { StatusCode::OK } else { StatusCode::CallTransactionDoesNotExist };
                handle.reply(status).await.ok();
                let outcome = known.then(|| refer::progress(&request));
                if self.transfer.is_none() {
                    self.early = outcome.filter(|outcome| *outcome != Outcome::Pending).or(self.early.take());
                } else if let Some(outcome) = outcome {
                    return self.on_progress(outcome).await;
                }
            }
            // Being sent elsewhere by a peer is nothing a voice agent should obey.
            DialogState::Refer(_, _, handle) => {
                handle.reply(StatusCode::Decline).await.ok();
            }
            DialogState::Message(_, _, handle) | DialogState::Publish(_, _, handle) => {
                handle.respond(StatusCode::MethodNotAllowed, Some(vec![body::allow()]), None).await.ok();
            }
            DialogState::Terminated(_, reason) => return ControlFlow::Break(Ending::Dialog(self.end(&reason))),
            DialogState::Calling(_) | DialogState::Trying(_) | DialogState::Early(..) | DialogState::WaitAck(..) => {}
        }
        ControlFlow::Continue(())
    }

    async fn on_confirmed(&mut self) {
        if !self.connected {
            self.connected = true;
            self.session.slot.confirm();
            self.signal(Signal::Connected).await;
        }
        if std::mem::take(&mut self.answer_due) {
            let ack = self.session.dialog.last_remote_ack();
            let answer = ack.as_ref().and_then(|ack| body::description(ack).ok().flatten());
            match answer.map(|answer| self.session.negotiator.accept(&answer)) {
                Some(Ok(agreed)) => self.media(agreed).await,
                // The session of before holds (RFC 3261 section 14.1).
                _ => debug!(id = %self.session.dialog.id(), "ACK without a usable answer"),
            }
        }
    }

    /// A re-INVITE or UPDATE.
    async fn on_offer(&mut self, request: &Request, handle: TransactionHandle) -> Flow {
        if self.exchange.is_some() || self.answer_due {
            handle.reply(StatusCode::RequestPending).await.ok();
            return ControlFlow::Continue(());
        }
        let timer = match SessionTimer::asked(request, clock::now()) {
            Ok(timer) => timer,
            Err((status, headers)) => {
                handle.respond(status, Some(headers), None).await.ok();
                return ControlFlow::Continue(());
            }
        };
        let timed = timer.map(|timer| timer.answer_headers(request)).unwrap_or_default();
        let with_body = || body::sdp_headers().into_iter().chain(timed.clone()).collect::<Vec<_>>();
        let offer = match body::description(request) {
            Ok(offer) => offer,
            Err(refusal) => {
                handle.respond(refusal.status.clone(), Some(refusal.headers()), None).await.ok();
                return ControlFlow::Continue(());
            }
        };
        let Some(offer) = offer else {
            if request.method == Method::Update {
                // A refresh of the target or of a session timer.
                handle.respond(StatusCode::OK, Some(timed), None).await.ok();
            } else {
                let ours = self.session.negotiator.offer().to_string();
                let sent = handle.respond(StatusCode::OK, Some(with_body()), Some(ours.into_bytes())).await;
                self.answer_due = sent.is_ok();
            }
            self.session.timer = timer;
            return ControlFlow::Continue(());
        };
        match self.session.negotiator.answer(&offer) {
            Ok((answer, agreed)) => {
                let body = answer.to_string().into_bytes();
                handle.respond(StatusCode::OK, Some(with_body()), Some(body)).await.ok();
                self.session.timer = timer;
                self.media(agreed).await;
            }
            Err(error) => {
                let headers = vec![body::warning(&error.to_string())];
                handle.respond(StatusCode::NotAcceptableHere, Some(headers), None).await.ok();
            }
        }
        ControlFlow::Continue(())
    }

    async fn on_control(&mut self, control: Option<Control>) -> Flow {
        match control {
            Some(Control::HangUp) | None => ControlFlow::Break(Ending::Ours(LegEnd::Local, "normal clearing")),
            Some(Control::Lost) => ControlFlow::Break(Ending::Ours(LegEnd::Lost, "media timeout")),
            Some(Control::Hold(hold)) => {
                self.wanted = Some(hold);
                ControlFlow::Continue(())
            }
            Some(Control::Transfer { to, attended }) => {
                let reason = if !self.connected {
                    "the call is not confirmed yet"
                } else if self.referral.is_some() || self.transfer.is_some() {
                    "another transfer is under way"
                } else {
                    let (shared, dialog) = (self.session.shared.clone(), self.session.dialog.clone());
                    self.referral =
                        Some(Box::pin(
                            async move { Transfer::begin(&shared, &dialog, &to, attended).await.map(Box::new) },
                        ));
                    return ControlFlow::Continue(());
                };
                self.signal(Signal::TransferAnswered(Err(reason.to_owned()))).await;
                ControlFlow::Continue(())
            }
        }
    }

    /// Begins what the leg wants, once nothing stands against it.
    fn begin_wanted(&mut self) {
        if !self.connected || self.exchange.is_some() || self.answer_due {
            return;
        }
        let due = self.retry.filter(|retry| retry.at <= clock::now());
        let (why, left) = match (self.wanted.take(), std::mem::take(&mut self.refresh), due) {
            (Some(hold), ..) => {
                // It takes the place of one that waits: what held before that comes back where the peer refuses.
                let before = match self.retry.map(|retry| retry.why) {
                    Some(Why::Hold { before, .. }) => before,
                    _ => self.session.negotiator.is_holding(),
                };
                (Why::Hold { hold, before }, GLARE)
            }
            (None, _, Some(retry)) => (retry.why, retry.left),
            // What waits refreshes, too.
            (None, true, None) if self.retry.is_none() => (Why::Refresh, GLARE),
            (None, ..) => return,
        };
        self.retry = None;
        if let Why::Hold { hold, .. } = why {
            self.session.negotiator.set_holding(hold);
        }
        let offer = self.session.negotiator.offer().to_string().into_bytes();
        let dialog = self.session.dialog.clone();
        let mut headers = body::sdp_headers();
        if let Some(timer) = &mut self.session.timer {
            timer.begun(clock::now());
            headers.extend(timer.request_headers());
        }
        self.exchange = Some(Box::pin(async move {
            let asked = dialog.reinvite(Some(headers), Some(offer));
            let response = timeout(ANSWER, asked).await.ok().and_then(Result::ok).flatten();
            Done { why, left, response }
        }));
    }

    /// When the next attempt may begin, where nothing stands against it.
    fn retry_at(&self) -> Option<Instant> {
        let free = self.connected && self.exchange.is_none() && !self.answer_due;
        self.retry.filter(|_| free).map(|retry| retry.at)
    }

    /// How long to wait after glare: the side that made the call longer than the other (RFC 3261 section 14.1).
    fn backoff(&self) -> Duration {
        let called = self.session.dialog.role() == TransactionRole::Server;
        Duration::from_millis(10 * if called { rand::random_range(0..=200) } else { rand::random_range(210..=400) })
    }

    /// A refresh is due, ours or theirs.
    fn on_timer(&mut self) -> Flow {
        let now = clock::now();
        match self.session.timer.as_mut().and_then(|timer| Some((timer.due(now)?, timer))) {
            Some((Due::Expired, _)) => ControlFlow::Break(Ending::Ours(LegEnd::Lost, "session expired")),
            Some((Due::Refresh, timer)) => {
                timer.begun(now);
                self.refresh = true;
                ControlFlow::Continue(())
            }
            None => ControlFlow::Continue(()),
        }
    }

    /// Minutes that are used up end the calls that use them.
    fn on_quota(&mut self) -> Flow {
        if self.session.lease.as_ref().is_some_and(Lease::is_exhausted) {
            info!(id = %self.session.dialog.id(), "the trunk's minutes_per_day are used up: the call ends");
            return ControlFlow::Break(Ending::Ours(LegEnd::Local, "minutes used up"));
        }
        self.quota = Some(clock::now() + QUOTA);
        ControlFlow::Continue(())
    }

    async fn on_done(&mut self, done: Done) -> Flow {
        let Done { why, left, response } = done;
        let glare = response.as_ref().is_some_and(|response| response.status_code == StatusCode::RequestPending);
        if glare && left > 1 {
            self.retry = Some(Retry { at: clock::now() + self.backoff(), why, left: left - 1 });
            return ControlFlow::Continue(());
        }
        let accepted = response.as_ref().filter(|r| r.status_code.kind() == StatusCodeKind::Successful);
        if let Some(accepted) = accepted {
            self.session.timer = SessionTimer::answered(accepted, clock::now());
        }
        let result = match &response {
            None => Err("the peer does not answer".to_owned()),
            Some(response) if accepted.is_some() => match body::description(response) {
                Ok(Some(answer)) => self.session.negotiator.accept(&answer).map_err(|e| e.to_string()),
                Ok(None) => Err("the peer accepted without an answer".to_owned()),
                Err(refusal) => Err(refusal.reason),
            },
            Some(response) => Err(format!("the peer refused: {}", response.status_code)),
        };
        let outcome = match result {
            Ok(agreed) => {
                self.media(agreed).await;
                Ok(())
            }
            Err(reason) => {
                if let Why::Hold { before, .. } = why {
                    self.session.negotiator.set_holding(before);
                }
                Err(reason)
            }
        };
        match why {
            // A wish that was overtaken is answered with the one that did.
            Why::Hold { hold, .. } if self.wanted.is_none() => {
                self.signal(Signal::HoldAnswered(hold, outcome)).await;
            }
            Why::Hold { .. } => {}
            Why::Refresh => {
                if let Err(reason) = outcome {
                    debug!(id = %self.session.dialog.id(), reason, "the session was not refreshed");
                }
            }
        }
        // RFC 3261 section 12.2.1.2: these say that the dialog is gone.
        if response.is_some_and(|response| matches!(response.status_code.code(), 408 | 481)) {
            return ControlFlow::Break(Ending::Ours(LegEnd::Failed, "the peer lost the call"));
        }
        ControlFlow::Continue(())
    }

    /// The peer has answered REFER.
    async fn on_referred(&mut self, result: Result<Box<Transfer>, String>) -> Flow {
        let early = self.early.take();
        match result {
            Ok(transfer) => {
                self.transfer = Some(transfer);
                self.signal(Signal::TransferAnswered(Ok(()))).await;
                match early {
                    Some(outcome) => self.on_progress(outcome).await,
                    None => ControlFlow::Continue(()),
                }
            }
            Err(reason) => {
                self.signal(Signal::TransferAnswered(Err(reason))).await;
                ControlFlow::Continue(())
            }
        }
    }

    /// The peer tells how far it has got.
    async fn on_progress(&mut self, outcome: Outcome) -> Flow {
        let outcome = match outcome {
            Outcome::Pending => return ControlFlow::Continue(()),
            Outcome::Done => Ok(()),
            Outcome::Failed(Some(status)) => Err(format!("the target answered {status}")),
            Outcome::Failed(None) => Err("the peer gave up before it knew".to_owned()),
        };
        if let Err(reason) = &outcome {
            info!(id = %self.session.dialog.id(), reason, "transfer failed; the call goes on");
        }
        // With it goes the consultation call.
        self.transfer = None;
        let done = outcome.is_ok();
        self.signal(Signal::TransferEnded(outcome)).await;
        if done {
            return ControlFlow::Break(Ending::Ours(LegEnd::Local, "transferred"));
        }
        ControlFlow::Continue(())
    }

    async fn media(&mut self, agreed: Agreed) {
        let agreed = self.session.shared.reachable(agreed, self.session.peer);
        self.signal(Signal::Media(Box::new(agreed))).await;
    }

    async fn signal(&mut self, signal: Signal) {
        // overflow: awaited, for a while: a leg reads its signals first, so one that does not is stuck or gone
        self.session.signals.send_timeout(signal, UNREAD).await.ok();
    }

    fn end(&mut self, reason: &TerminatedReason) -> LegEnd {
        let called = self.session.dialog.role() == TransactionRole::Server;
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
                self.unacknowledged = called && !self.connected;
                LegEnd::Failed
            }
            _ => LegEnd::Failed,
        }
    }

    async fn finish(self, ending: Ending) {
        let Running { session, connected, exchange, referral, transfer, unacknowledged, .. } = self;
        drop((exchange, referral, transfer));
        let Session { shared, dialog, states, signals, slot, lease, .. } = session;
        // Its place is free before the peer has taken notice: one that never does would keep it for a minute.
        let blame = slot.release();
        if unacknowledged {
            blame.strike(clock::now());
        }
        let end = match ending {
            Ending::Dialog(end) => {
                shared.dialogs.remove_dialog(&dialog.id());
                end
            }
            Ending::Ours(end, _) => end,
        };
        // overflow: awaited, for a while: see `signal`. Dropping the sender afterwards says the same.
        signals.send_timeout(Signal::Closed(end), UNREAD).await.ok();
        drop((signals, lease));
        if let Ending::Ours(_, reason) = ending {
            let called = dialog.role() == TransactionRole::Server;
            let acknowledged = bye(&dialog, states, connected, reason).await;
            if called && !acknowledged {
                blame.strike(clock::now());
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
