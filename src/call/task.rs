//! The one select loop of a call: moves packets, commands, speech and time into the machine and its actions
//! out. Decides nothing.

use std::sync::Arc;
use std::time::Duration;

use metrics::{SharedString, histogram};
use rand::Rng as _;
use tokio::sync::{broadcast, mpsc};
use tokio::time::{Instant as Alarm, sleep_until, timeout};

use super::bridge::{BridgeRequest, BridgeState, Piece};
use super::command::Command;
use super::info::{Shared, Tellers};
use super::machine::{Action, Machine};
use super::speech::Speech;
use super::{CallEvent, CallId, Dialling, EndReason, Witness};
use crate::clock;
use crate::hear::{Ears, HearEvent};
use crate::media::leg::{LegEvent, MediaLeg};

/// Speech events that may wait for the task: minutes of a lead-limited voice. A full channel fails the
/// utterance at the engine's end.
const SPEECH: usize = 256;

/// How long a peer may take to hear that the call is over.
const GOODBYE: Duration = Duration::from_secs(2);

/// A call on its shard.
pub(super) struct CallTask<L> {
    shared: Arc<Shared>,
    leg: L,
    speech: Arc<dyn Speech>,
    ears: Option<Ears>,
    inbox: mpsc::Receiver<Command>,
    /// What the other call of a bridge sends.
    link: Option<mpsc::Receiver<Piece>>,
    tellers: Tellers,
    told: Told,
}

/// Who hears of every call.
pub(super) struct Told {
    pub(super) all: broadcast::Sender<(CallId, CallEvent)>,
    pub(super) witness: Option<Arc<dyn Witness>>,
    /// Who dials for calls.
    pub(super) bridges: Option<mpsc::Sender<(CallId, BridgeRequest)>>,
}

impl<L: MediaLeg> CallTask<L> {
    pub(super) fn new(
        shared: Arc<Shared>,
        leg: L,
        (speech, ears): (Arc<dyn Speech>, Option<Ears>),
        inbox: mpsc::Receiver<Command>,
        tellers: Tellers,
        told: Told,
    ) -> Self {
        Self { shared, leg, speech, ears, inbox, link: None, tellers, told }
    }

    /// Runs the call to its end; gives why it ended and how long it lasted. To be dropped when that is known to others.
    pub(super) async fn run(&mut self) -> (EndReason, Duration) {
        let reason = match self.leg.attach().await {
            Ok(()) => self.converse().await,
            Err(error) => {
                tracing::warn!(call = %self.shared.meta.id, %error, "the leg cannot be attached");
                self.tell(CallEvent::Ended(EndReason::Failed));
                EndReason::Failed
            }
        };
        self.count_arrivals();
        self.tell_quality();
        let lasted = clock::now() - self.shared.started;
        tracing::trace!(
            target: "antiphon::spans",
            kind = "call",
            call = %self.shared.meta.id,
            leg = self.shared.leg,
            direction = ?self.shared.meta.direction,
            agent = self.shared.meta.agent,
            reason = reason.label(),
            began_us = lasted.as_micros() as u64,
        );
        (reason, lasted)
    }

    async fn converse(&mut self) -> EndReason {
        let (sink, mut speech) = mpsc::channel(SPEECH);
        let random = rand::rng().random();
        let machine =
            Machine::new(self.shared.clone(), self.leg.format(), self.speech.clone(), sink, random, clock::now());
        let mut machine = match machine {
            Ok(machine) => machine,
            Err(error) => {
                tracing::error!(call = %self.shared.meta.id, %error, "no codec");
                self.tell(CallEvent::Ended(EndReason::Failed));
                return EndReason::Failed;
            }
        };
        let mut heard = self.ears.take().map(|ears| {
            let (feed, heard) = ears.open();
            machine.hear(feed, ears.apology());
            heard
        });
        let shared = self.shared.clone();
        let mut alarm = std::pin::pin!(sleep_until(Alarm::now()));
        loop {
            // Another leg may have taken the place of the one before.
            machine.signal_digits(self.leg.signals_digits());
            while let Some(action) = machine.poll(clock::now()) {
                if let Some(reason) = self.act(&mut machine, action).await {
                    return reason;
                }
            }
            let deadline = machine.deadline();
            if let Some(deadline) = deadline
                && alarm.deadline().into_std() != deadline
            {
                alarm.as_mut().reset(deadline.into());
            }
            // Every branch is cancel safe. No fixed order: a flood of one source must not starve the others.
            // Packets that are due do not wait for their branch, as the machine is polled after every wake.
            tokio::select! {
                () = &mut alarm, if deadline.is_some() => {}
                () = shared.end_wanted() => {
                    if let Some(reason) = shared.end_asked() {
                        machine.finish(reason);
                    }
                }
                event = self.leg.recv() => {
                    // As often as the peer's own reports, which are shown beside it.
                    if matches!(event, LegEvent::Report(_)) {
                        self.count_arrivals();
                    }
                    machine.handle_leg(clock::now(), event);
                }
                Some(event) = speech.recv() => machine.handle_speech(clock::now(), event),
                Some(event) = next(&mut heard) => machine.handle_heard(clock::now(), event),
                piece = next_piece(&mut self.link) => {
                    if piece.is_none() {
                        self.link = None;
                    }
                    machine.handle_piece(clock::now(), piece);
                }
                Some(mut command) = self.inbox.recv() => {
                    if let Command::Join(link) = &mut command {
                        // The way in is the task's to read, the way out the machine's to fill.
                        let (_, none) = mpsc::channel(1);
                        self.link = Some(std::mem::replace(&mut link.from, none));
                    }
                    machine.handle_command(clock::now(), command);
                }
            }
        }
    }

    async fn act(&mut self, machine: &mut Machine, action: Action) -> Option<EndReason> {
        match action {
            Action::Send(packet) => {
                if let Err(end) = self.leg.send(packet).await {
                    machine.finish(end.into());
                }
            }
            Action::Event(event) => self.tell(event),
            Action::Watched(event) => self.tell_watchers(&event),
            Action::Message(text) => {
                if !self.leg.send_message(&text) {
                    machine.handle_failure("there is no data channel, or it is full: a message was lost".into());
                }
            }
            Action::Caption(text) => {
                // overflow: drops; a page that reads nothing misses captions only
                let _ = self.leg.send_message(&text);
            }
            Action::Deliver(text) => self.tellers.deliver.deliver(text),
            Action::Hold(hold) => {
                if let Err(reason) = self.leg.hold(hold) {
                    machine.handle_leg(clock::now(), LegEvent::HoldAnswered { hold, outcome: Err(reason) });
                }
            }
            Action::Dial(digits) => {
                if let Err(reason) = self.leg.dial(&digits) {
                    machine.handle_failure(format!("digits were not sent: {reason}"));
                }
            }
            Action::Transfer { to, attended, limit } => {
                if let Err(reason) = self.leg.transfer(&to, attended, limit) {
                    machine.handle_leg(clock::now(), LegEvent::TransferAnswered(Err(reason)));
                }
            }
            Action::Bridge(request) => self.dial(request),
            Action::Unlink => self.link = None,
            Action::End(reason) => {
                // A peer that does not answer must not keep the call.
                let _ = timeout(GOODBYE, self.leg.hang_up()).await;
                return Some(reason);
            }
        }
        None
    }

    /// Has a human called; what comes of it arrives as commands.
    fn dial(&self, request: BridgeRequest) {
        let asked = match &self.told.bridges {
            // overflow: refused
            Some(bridges) => bridges.try_send((self.shared.meta.id.clone(), request)).is_ok(),
            None => false,
        };
        if !asked {
            let state = Dialling::Failed { reason: "this gateway places no calls now".into() };
            self.tell(CallEvent::Bridge { with: None, state: BridgeState::Dialling(state) });
        }
    }

    fn count_arrivals(&self) {
        if let Some(arrivals) = self.leg.arrivals() {
            self.shared.stats.arrivals(arrivals);
        }
    }

    /// How good the call can have sounded, each way, as metrics.
    fn tell_quality(&self) {
        let (info, leg, codec) = (self.shared.info(), self.leg.kind(), self.leg.format().codec.label());
        let trunk = || self.leg.trunk().map_or(SharedString::const_str(""), |trunk| SharedString::from(trunk.clone()));
        for (direction, score) in [("sent", info.mos), ("received", info.received_mos)] {
            if let Some(score) = score {
                histogram!(
                    "antiphon_call_mos",
                    "leg" => leg, "direction" => direction, "codec" => codec, "trunk" => trunk()
                )
                .record(score);
            }
        }
    }

    fn tell(&self, event: CallEvent) {
        self.tell_watchers(&event);
        // overflow: drops the oldest; the listener is told how many. No listener is fine, too.
        let _ = self.tellers.events.send(event);
    }

    fn tell_watchers(&self, event: &CallEvent) {
        tracing::debug!(call = %self.shared.meta.id, ?event, "call");
        if let Some(witness) = &self.told.witness {
            witness.happened(&self.shared.meta, event);
        }
        // overflow: as above
        let _ = self.told.all.send((self.shared.meta.id.clone(), event.clone()));
    }
}

/// The next piece of the other call, `None` once when it is gone; never where there is none.
async fn next_piece(link: &mut Option<mpsc::Receiver<Piece>>) -> Option<Piece> {
    match link {
        Some(link) => link.recv().await,
        None => std::future::pending().await,
    }
}

/// The next thing heard; never where nothing hears.
async fn next(heard: &mut Option<mpsc::Receiver<HearEvent>>) -> Option<HearEvent> {
    match heard {
        Some(heard) => heard.recv().await,
        None => std::future::pending().await,
    }
}
