//! What the signalling of an answered call does next: hold, resume, refresh of the session, transfer, glare.
//!
//! A state machine over `now`: what peer, leg and stack say comes in, [`Action`]s come out of [`Machine::poll`], and
//! at [`Machine::deadline`] it wants [`Machine::handle_timeout`]. It owns the negotiation of media and the session
//! timer, and no dialog, socket or task: [`super::session`] has those.
//!
//! # Why
//! *One exchange at a time.* While a re-INVITE of ours is under way, or the answer to an offer of ours is due in an ACK,
//! one of the peer is answered 491 (RFC 3261 section 14.2). Where ours meets one of the peer it is tried again
//! later, and until then the peer's is taken: otherwise two that hold at once refuse each other for good. A hold that is
//! asked for meanwhile waits, and the last wish counts. REFER changes nothing of the session and has a place of its own.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use rsipstack::sip::{Header, Method, Request, Response, StatusCode, StatusCodeKind};
use sdp::Negotiator;
use tracing::debug;

use super::{
    body::{self, Reply},
    refer::{self, Outcome},
    timer::{Due, SessionTimer},
};
use crate::media::{
    leg::LegEnd,
    sip::{Control, Signal},
};

/// Attempts at a re-INVITE that meets one of the peer (491), or is told of a longer interval (422).
const ATTEMPTS: usize = 3;

/// How long a peer that has taken a transfer on may take to tell how it ended: some never do. Shorter than the call itself
/// waits, so that what was kept for the transfer ends before another is asked for.
const TRANSFER: Duration = Duration::from_secs(170);

/// Steps of a transfer that are told at most.
const STEPS: usize = 16;

/// What is to be done.
#[derive(Debug)]
pub(super) enum Action {
    /// Tell the leg.
    Signal(Signal),
    /// Send a re-INVITE; what comes of it goes to [`Machine::answered`].
    Invite { headers: Vec<Header>, offer: Vec<u8> },
    /// Send REFER; what comes of it goes to [`Machine::referred`].
    Refer { to: String, attended: bool, limit: Option<Duration> },
    /// Send these digits by INFO.
    Digits(String),
    /// The transfer is over: end what was kept for it.
    EndConsultation,
    /// End the dialog, for this reason.
    End(LegEnd, &'static str),
}

/// The signalling of one answered call.
pub(super) struct Machine {
    /// The peer made the call.
    called: bool,
    negotiator: Negotiator,
    timer: Option<SessionTimer>,
    connected: bool,
    /// An offer of ours left in a 2xx: the ACK brings the answer.
    answer_due: bool,
    /// A re-INVITE of ours that is not answered yet.
    exchange: Option<Attempt>,
    /// One that met a re-INVITE of the peer, and waits for its next attempt.
    retry: Option<(Instant, Attempt)>,
    /// Whether the leg wants the peer held, where that waits for another exchange.
    wanted: Option<bool>,
    /// Our refresh is due and waits for another exchange.
    refresh: bool,
    transfer: Transfer,
    steps: Steps,
    actions: VecDeque<Action>,
}

/// A re-INVITE of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Attempt {
    why: Why,
    /// Attempts that are left, this one included.
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

/// How far a transfer is.
#[derive(Debug, Default, PartialEq, Eq)]
enum Transfer {
    #[default]
    None,
    /// REFER is not answered. A NOTIFY may say how it ended even before that (RFC 6665 section 4.1.2.4).
    Asked {
        early: Option<Outcome>,
        /// How long the peer may take once it has taken it on.
        limit: Duration,
    },
    /// The peer has taken it on, and has until then to tell how it ended.
    Taken(Instant),
}

/// Steps of one transfer that are told: a peer may repeat itself, and may never end.
#[derive(Debug, Default)]
struct Steps {
    last: Option<u16>,
    told: usize,
}

impl Steps {
    /// Whether a step is to be told.
    fn is_new(&mut self, status: u16) -> bool {
        if self.last == Some(status) || self.told == STEPS {
            return false;
        }
        self.last = Some(status);
        self.told += 1;
        true
    }
}

impl Machine {
    /// A call whose media is agreed; `called`: the peer made it. `timer`: what the INVITE and its answer settled of
    /// RFC 4028.
    pub(super) fn new(called: bool, negotiator: Negotiator, timer: Option<SessionTimer>) -> Machine {
        Machine {
            called,
            negotiator,
            timer,
            connected: false,
            answer_due: false,
            exchange: None,
            retry: None,
            wanted: None,
            refresh: false,
            transfer: Transfer::None,
            steps: Steps::default(),
            actions: VecDeque::new(),
        }
    }

    /// The peer has acknowledged the call.
    pub(super) fn is_connected(&self) -> bool {
        self.connected
    }

    /// What is to be done next. To be asked until there is nothing, after everything that was told.
    pub(super) fn poll(&mut self, now: Instant) -> Option<Action> {
        if self.actions.is_empty() {
            self.begin(now);
        }
        self.actions.pop_front()
    }

    /// When [`Machine::handle_timeout`] is due.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let timer = self.timer.map(|timer| timer.deadline());
        let retry = self.retry.filter(|_| self.is_free()).map(|(at, _)| at);
        let transfer = match self.transfer {
            Transfer::Taken(until) => Some(until),
            Transfer::None | Transfer::Asked { .. } => None,
        };
        [timer, retry, transfer].into_iter().flatten().min()
    }

    /// A deadline has passed. An attempt that waited for it begins with the next [`Machine::poll`].
    pub(super) fn handle_timeout(&mut self, now: Instant) {
        if matches!(self.transfer, Transfer::Taken(until) if until <= now) {
            self.transferred(Err("the destination did not answer in time".to_owned()));
        }
        match self.timer.as_mut().and_then(|timer| Some((timer.due(now)?, timer))) {
            Some((Due::Expired, _)) => self.end(LegEnd::Lost, "session expired"),
            Some((Due::Refresh, timer)) => {
                timer.begun(now);
                self.refresh = true;
            }
            None => {}
        }
    }

    /// The peer has acknowledged a 2xx of ours, or ours has reached it; `ack`: the peer's last.
    pub(super) fn confirmed(&mut self, ack: Option<&Request>) {
        if !self.connected {
            self.connected = true;
            self.signal(Signal::Connected);
        }
        if std::mem::take(&mut self.answer_due) {
            let answer = ack.and_then(|ack| body::description(ack).ok().flatten());
            match answer.map(|answer| self.negotiator.accept(&answer)) {
                Some(Ok(agreed)) => self.signal(Signal::Media(Box::new(agreed))),
                // The session of before holds (RFC 3261 section 14.1).
                _ => debug!("ACK without a usable answer"),
            }
        }
    }

    /// The peer sends a re-INVITE or UPDATE.
    pub(super) fn offered(&mut self, now: Instant, request: &Request) -> Reply {
        if self.exchange.is_some() || self.answer_due {
            return Reply::new(StatusCode::RequestPending, vec![]);
        }
        let timer = match SessionTimer::asked(request, None, now) {
            Ok(timer) => timer,
            Err((status, headers)) => return Reply::new(status, headers),
        };
        let timed = timer.map(|timer| timer.answer_headers(request)).unwrap_or_default();
        let offer = match body::description(request) {
            Ok(offer) => offer,
            Err(refusal) => return refusal.into(),
        };
        let with_body = |description: &sdp::Description| Reply {
            status: StatusCode::OK,
            headers: body::sdp_headers().into_iter().chain(timed.clone()).collect(),
            body: Some(description.to_string().into_bytes()),
        };
        match offer {
            // A refresh of the target or of a session timer.
            None if request.method == Method::Update => {
                self.timer = timer;
                Reply::new(StatusCode::OK, timed)
            }
            None => {
                self.timer = timer;
                self.answer_due = true;
                with_body(&self.negotiator.offer())
            }
            Some(offer) => match self.negotiator.answer(&offer) {
                Ok((answer, agreed)) => {
                    self.timer = timer;
                    self.signal(Signal::Media(Box::new(agreed)));
                    with_body(&answer)
                }
                Err(error) => Reply::new(StatusCode::NotAcceptableHere, vec![body::warning(&error.to_string())]),
            },
        }
    }

    /// A [`Reply`] did not leave: no ACK will answer it.
    pub(super) fn unsent(&mut self) {
        self.answer_due = false;
    }

    /// What the leg wants.
    pub(super) fn control(&mut self, control: Control) {
        match control {
            Control::HangUp => self.end(LegEnd::Local, "normal clearing"),
            Control::Lost => self.end(LegEnd::Lost, "media timeout"),
            Control::Hold(hold) => self.wanted = Some(hold),
            Control::Digits(digits) => self.actions.push_back(Action::Digits(digits)),
            Control::Transfer { to, attended, limit } => {
                let refusal = match self.transfer {
                    _ if !self.connected => "the call is not confirmed yet",
                    Transfer::None => {
                        self.steps = Steps::default();
                        self.transfer = Transfer::Asked { early: None, limit: limit.unwrap_or(TRANSFER) };
                        return self.actions.push_back(Action::Refer { to, attended, limit });
                    }
                    Transfer::Asked { .. } | Transfer::Taken(_) => "another transfer is under way",
                };
                self.signal(Signal::TransferAnswered(Err(refusal.to_owned())));
            }
        }
    }

    /// Our re-INVITE is answered, or (`None`) is not. `random`, from 0 to 1, spreads the next attempt after glare.
    pub(super) fn answered(&mut self, now: Instant, response: Option<&Response>, random: f64) {
        let Some(Attempt { why, left }) = self.exchange.take() else { return };
        let status = response.map(|response| response.status_code.code());
        let again = Attempt { why, left: left.saturating_sub(1) };
        if status == Some(491) && left > 1 {
            self.retry = Some((now + self.backoff(random), again));
            return;
        }
        // The interval is too short for the peer (RFC 4028 section 7.4): once more, at once.
        let longer = self.timer.zip(response.filter(|_| status == Some(422)));
        let longer = longer.and_then(|(timer, response)| timer.longer(response));
        if let Some(longer) = longer.filter(|_| left > 1) {
            self.timer = Some(longer);
            self.retry = Some((now, again));
            return;
        }
        let accepted = response.filter(|r| r.status_code.kind() == StatusCodeKind::Successful);
        if let Some(accepted) = accepted {
            self.timer = SessionTimer::answered(accepted, now);
        }
        let result = match response {
            None => Err("the peer does not answer".to_owned()),
            Some(response) if accepted.is_some() => match body::description(response) {
                Ok(Some(answer)) => self.negotiator.accept(&answer).map_err(|e| e.to_string()),
                Ok(None) => Err("the peer accepted without an answer".to_owned()),
                Err(refusal) => Err(refusal.reason),
            },
            Some(response) => Err(format!("the peer refused: {}", response.status_code)),
        };
        let outcome = match result {
            Ok(agreed) => {
                self.signal(Signal::Media(Box::new(agreed)));
                Ok(())
            }
            Err(reason) => {
                if let Why::Hold { before, .. } = why {
                    self.negotiator.set_holding(before);
                }
                Err(reason)
            }
        };
        match why {
            // A wish that was overtaken is answered with the one that did.
            Why::Hold { hold, .. } if self.wanted.is_none() => self.signal(Signal::HoldAnswered(hold, outcome)),
            Why::Hold { .. } => {}
            Why::Refresh => {
                if let Err(reason) = outcome {
                    debug!(reason, "the session was not refreshed");
                }
            }
        }
        // RFC 3261 section 12.2.1.2: these say that the dialog is gone.
        if matches!(status, Some(408 | 481)) {
            self.end(LegEnd::Failed, "the peer lost the call");
        }
    }

    /// REFER is answered.
    pub(super) fn referred(&mut self, now: Instant, result: Result<(), String>) {
        let (early, limit) = match std::mem::take(&mut self.transfer) {
            Transfer::Asked { early, limit } => (early, limit),
            Transfer::None | Transfer::Taken(_) => (None, TRANSFER),
        };
        if result.is_ok() {
            self.transfer = Transfer::Taken(now + limit);
        }
        self.signal(Signal::TransferAnswered(result));
        if let (Transfer::Taken(_), Some(outcome)) = (&self.transfer, early) {
            self.progress(outcome);
        }
    }

    /// Whether a transfer of ours is under way.
    pub(super) fn is_transferring(&self) -> bool {
        self.transfer != Transfer::None
    }

    /// The peer tells how far it has got with a transfer.
    pub(super) fn notified(&mut self, request: &Request) -> StatusCode {
        if self.transfer != Transfer::None
            && let Some(status) = refer::status(&request.body).filter(|status| self.steps.is_new(*status))
        {
            self.signal(Signal::TransferProgress(status));
        }
        match &mut self.transfer {
            Transfer::None => return StatusCode::CallTransactionDoesNotExist,
            Transfer::Asked { early, .. } => {
                *early = Some(refer::progress(request)).filter(|outcome| *outcome != Outcome::Pending).or(early.take());
            }
            Transfer::Taken(_) => self.progress(refer::progress(request)),
        }
        StatusCode::OK
    }

    fn progress(&mut self, outcome: Outcome) {
        self.transferred(match outcome {
            Outcome::Pending => return,
            Outcome::Done => Ok(()),
            Outcome::Failed(Some(status)) => Err(format!("the target answered {status}")),
            Outcome::Failed(None) => Err("the peer gave up before it knew".to_owned()),
        });
    }

    fn transferred(&mut self, outcome: Result<(), String>) {
        self.transfer = Transfer::None;
        self.actions.push_back(Action::EndConsultation);
        let done = outcome.is_ok();
        self.signal(Signal::TransferEnded(outcome));
        if done {
            self.end(LegEnd::Local, "transferred");
        }
    }

    /// Whether an exchange of ours may begin.
    fn is_free(&self) -> bool {
        self.connected && self.exchange.is_none() && !self.answer_due
    }

    /// Begins what is wanted, once nothing stands against it.
    fn begin(&mut self, now: Instant) {
        if !self.is_free() {
            return;
        }
        let due = self.retry.filter(|(at, _)| *at <= now).map(|(_, attempt)| attempt);
        let attempt = match (self.wanted.take(), std::mem::take(&mut self.refresh), due) {
            (Some(hold), ..) => {
                // It takes the place of one that waits: what held before that comes back where the peer refuses.
                let before = match self.retry.map(|(_, attempt)| attempt.why) {
                    Some(Why::Hold { before, .. }) => before,
                    _ => self.negotiator.is_holding(),
                };
                Attempt { why: Why::Hold { hold, before }, left: ATTEMPTS }
            }
            (None, _, Some(again)) => again,
            // What waits refreshes, too.
            (None, true, None) if self.retry.is_none() => Attempt { why: Why::Refresh, left: ATTEMPTS },
            (None, ..) => return,
        };
        self.retry = None;
        if let Why::Hold { hold, .. } = attempt.why {
            self.negotiator.set_holding(hold);
        }
        let offer = self.negotiator.offer().to_string().into_bytes();
        let mut headers = body::sdp_headers();
        if let Some(timer) = &mut self.timer {
            timer.begun(now);
            headers.extend(timer.request_headers());
        }
        self.exchange = Some(attempt);
        self.actions.push_back(Action::Invite { headers, offer });
    }

    /// How long to wait after glare: the side that made the call longer than the other (RFC 3261 section 14.1).
    fn backoff(&self, random: f64) -> Duration {
        let (from, to) = if self.called { (0.0, 2.0) } else { (2.1, 4.0) };
        // In steps of 10 ms, as the section has it.
        Duration::from_millis(10 * ((from + (to - from) * random.clamp(0.0, 1.0)) * 100.0) as u64)
    }

    fn signal(&mut self, signal: Signal) {
        self.actions.push_back(Action::Signal(signal));
    }

    fn end(&mut self, end: LegEnd, reason: &'static str) {
        self.actions.push_back(Action::End(end, reason));
    }
}

#[cfg(test)]
mod tests;
