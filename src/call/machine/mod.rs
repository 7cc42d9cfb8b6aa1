//! The decisions of one call, without I/O: what is said when, what cuts it off, what is told to whom.
//!
//! Never sends, waits, or reads a clock. Contract: after every `handle_*` call [`Machine::poll`] until it returns
//! nothing and carry out the actions in order; then again at [`Machine::deadline`]. [`Machine::finish`] is the last
//! call.
//!
//! [`Machine`] takes what happens and hands it to the part that it concerns; each part owns its own state:
//!
//! - [`intake`]: text, clips and streamed audio on their way into the queue; [`whole`]: turns whose text is all there
//! - [`speaking`]: what is said, made of [`queue`] (turns in order, of [`turn`], and [`writing`] while their text comes),
//!   [`synthesis`] (the engine's side), [`output`] (encoder and playout), [`pause`] (hold, and a barge-in that waits for
//!   the agent), [`speculation`] (answers made before it is certain that the caller has finished) and [`latency`] (what
//!   the caller waited for)
//! - [`super::caller`]: what the caller says and presses; [`hearing`]: what a recogniser made of it
//! - [`bridge`]: what is different while the peer speaks with a human
//! - [`transfer`], [`lifetime`]: handing the peer over; the limits of the call
//! - [`spans`]: the times of a turn, for traces
//! - [`outbox`]: actions, events and figures on their way out
//!
//! # Why
//! The engine is called directly ([`Speech`] never waits), because its refusal has to be known at once; packets
//! and signalling are actions, because sending them may wait.

mod bridge;
#[cfg(test)]
pub(crate) mod fixture;
mod hearing;
mod intake;
mod latency;
mod lifetime;
mod outbox;
mod output;
mod part;
mod pause;
mod phrases;
mod queue;
mod quiet;
mod spans;
mod speaking;
mod speculation;
mod synthesis;
mod transfer;
mod turn;
mod whole;
mod writing;

pub use self::phrases::{streamed_utterances, utterances};
pub use self::whole::WholeTurn;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use self::bridge::{Around, Bridge};
use self::hearing::{Hearing, Weight};
use self::intake::Intake;
use self::lifetime::Lifetime;
use self::outbox::Outbox;
use self::speaking::{Speaking, Step};
use self::transfer::Transfer;
use super::bridge::{BridgeRequest, Piece};
use super::caller::{CallerInput, Signal};
use super::command::Command;
use super::event::{BargeInOutcome, Cause};
use super::handle::{CallHandle, CallMeta};
use super::info::{Shared, codec_number};
use super::settings::CallConfig;
use super::speech::Speech;
use super::{CallEvent, Direction, EndReason};
use crate::hear::{Feed, HearEvent, Phase, TurnEvent};
use crate::media::answer::{Answerer, Finding};
use crate::media::encode::{CodecError, Encoder, OpusSettings};
use crate::media::leg::{LegEnd, LegEvent, MediaFormat, OutPacket, PeerReport};
use crate::turn::{SpeechEvent, SpeechSink};

/// A caller who has spoken over us for so long means it, whatever the words are; "mm-hm" takes half of it.
const MEANT: Duration = Duration::from_millis(900);

/// What the driver has to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Hand a packet to the leg.
    Send(OutPacket),
    /// Tell the listeners.
    Event(CallEvent),
    /// Tell who watches all calls. The call's own listeners, its agent among them, hear of it only from its answer on.
    Watched(CallEvent),
    /// Send text on the data channel.
    Message(String),
    /// Send text on the data channel, if there is one.
    Caption(String),
    /// Hand text that came on the data channel to the agent.
    Deliver(String),
    /// Ask the peer to hold or to resume.
    Hold(bool),
    /// Hand the peer over.
    Transfer {
        /// To whom.
        to: String,
        /// Whether we speak to them first.
        attended: bool,
        /// How long they may take to answer; `None`: as long as telephones ring.
        limit: Option<Duration>,
    },
    /// Send digits beside the media.
    Dial(String),
    /// Call a human, to be joined with the peer.
    Bridge(BridgeRequest),
    /// Listen to the other call no more.
    Unlink,
    /// End the call.
    End(EndReason),
}

/// The state of one call.
///
/// Why this struct is large: each of its parts is a type of its own; here is a method for each thing that happens to them.
pub struct Machine {
    out: Outbox,
    speaking: Speaking,
    intake: Intake,
    caller: CallerInput,
    hearing: Hearing,
    transfer: Transfer,
    bridge: Bridge,
    lifetime: Lifetime,
}

impl Machine {
    /// A call on a leg with `format`. `random` seeds the RTP numbers; `sink` leads to
    /// [`Machine::handle_speech`].
    pub(super) fn new(
        shared: Arc<Shared>,
        format: &MediaFormat,
        speech: Arc<dyn Speech>,
        sink: SpeechSink,
        random: u64,
        now: Instant,
    ) -> Result<Self, CodecError> {
        Ok(Self {
            speaking: Speaking::new(&shared, format, speech, sink, random, now)?,
            intake: Intake::default(),
            caller: CallerInput::new(format, &shared.config)?,
            hearing: Hearing::default(),
            transfer: Transfer::default(),
            bridge: Bridge::default(),
            lifetime: Lifetime::new(now),
            out: Outbox::new(shared),
        })
    }

    /// A call without a task, for drivers with a time of their own. What the handle sends arrives in the first
    /// receiver and belongs into [`Machine::handle_command`], what the engine makes arrives in the second and
    /// belongs into [`Machine::handle_speech`].
    ///
    /// # Errors
    /// A codec library cannot be set up.
    pub fn detached(
        meta: CallMeta,
        config: CallConfig,
        leg: (&'static str, &MediaFormat),
        speech: Arc<dyn Speech>,
        now: Instant,
    ) -> Result<(Self, CallHandle, mpsc::Receiver<Command>, mpsc::Receiver<SpeechEvent>), CodecError> {
        let (commands, inbox) = mpsc::channel(256);
        let (sink, made) = mpsc::channel(256);
        let (shared, _) = Shared::new(meta, Arc::new(config), leg.0, leg.1.codec, now, Duration::ZERO);
        let shared = Arc::new(shared);
        let handle = CallHandle { shared: shared.clone(), commands, speech: Arc::downgrade(&speech) };
        let machine = Self::new(shared, leg.1, speech, sink, 0, now)?;
        Ok((machine, handle, inbox, made))
    }

    /// What the caller says from now on goes to `feed`, too; what becomes of it belongs into
    /// [`Machine::handle_heard`]. `apology`: what is said when a turn was not heard; empty: nothing.
    pub fn hear(&mut self, feed: Feed, apology: &str) {
        self.caller.hear(feed);
        self.hearing.apology = apology.trim().to_owned();
    }

    /// Takes what was recognised.
    pub fn handle_heard(&mut self, now: Instant, event: HearEvent) {
        self.lifetime.active(now);
        if let HearEvent::Turn(turn) = &event {
            self.caller.understood(&turn.text);
            // On a bridged call the peer does not speak to the agent.
            let addressed = !self.bridge.is_up();
            if addressed {
                self.weigh(now, turn);
            }
            if addressed && turn.phase == Phase::EndOfTurn && !turn.text.is_empty() && !self.hearing.is_aside() {
                self.speaking.latency.asked(now, self.lifetime.media_start() + turn.end);
            }
        }
        if let Some(apology) = self.hearing.take(now, event, &mut self.speaking, &mut self.out) {
            // Refused where too much waits already, or the call is ending: then there is nothing to say either.
            if !self.bridge.is_up() && self.out.shared.backlog.take(apology.text.len()) {
                let apology = WholeTurn::read(apology, &self.out.shared.config.segment);
                let _ = self.intake.turn(now, apology, &mut self.speaking, &mut self.out);
            }
        }
    }

    /// Whether digits go beside the media from now on.
    pub fn signal_digits(&mut self, beside: bool) {
        self.speaking.signals_digits = beside;
    }

    /// Takes what happened on the leg.
    pub fn handle_leg(&mut self, now: Instant, event: LegEvent) {
        match event {
            LegEvent::Early { sends, speaks } => {
                self.lifetime.ring(now);
                // Who has not answered is not spoken to.
                self.speaking.await_answer(now, !speaks);
                if sends {
                    self.speaking.output.playout.start(now);
                }
            }
            LegEvent::Connected => {
                let rang = self.lifetime.is_early();
                if self.lifetime.connect(now) {
                    if rang && !self.caller.is_detecting() {
                        self.speaking.await_answer(now, false);
                    }
                    self.out.shared.stats.connected.store(true, Relaxed);
                    self.speaking.output.playout.start(now);
                    self.out.event(CallEvent::Connected);
                }
            }
            LegEvent::Rtp(packet) => {
                self.out.meters.received(&self.out.shared.stats);
                self.caller.push(packet);
            }
            LegEvent::Digit(digit) => self.caller_did(now, Signal::Digit(digit)),
            LegEvent::Message(text) => {
                self.lifetime.active(now);
                self.out.event(CallEvent::Message { bytes: text.len() });
                self.out.push(Action::Deliver(text));
            }
            LegEvent::Prompt(text) => {
                self.lifetime.active(now);
                self.out.event(CallEvent::Prompt { text, lang: String::new(), last: true, eager: None });
            }
            LegEvent::Report(report) => self.report(&report),
            LegEvent::Held(held) => {
                if self.speaking.hold(now, held, true, &mut self.out) {
                    self.lifetime.active(now);
                }
            }
            LegEvent::Format(format) => self.set_format(now, format),
            LegEvent::HoldAnswered { hold, outcome } => {
                if let Err(reason) = outcome {
                    let what = if hold { "on" } else { "off" };
                    self.out.error(format!("the peer was not put {what} hold: {reason}"));
                    self.speaking.hold_failed(now, hold, &mut self.out);
                }
            }
            LegEvent::TransferAnswered(outcome) => {
                let event = self.transfer.answered(now, outcome);
                self.out.event(event);
            }
            LegEvent::TransferProgress(status) => self.out.event(CallEvent::TransferProgress(status)),
            LegEvent::TransferEnded(outcome) => self.transfer_ended(outcome),
            LegEvent::Moved(with) => {
                self.lifetime.active(now);
                self.out.event(CallEvent::HandedOver(with));
            }
            LegEvent::Cause(cause) => {
                self.out.shared.set_peer_cause(cause.clone());
                self.out.event(CallEvent::PeerCause(cause));
            }
            // A peer that has taken a transfer on and hangs up has gone where it was sent.
            LegEvent::Closed(LegEnd::Remote) if self.transfer.is_accepted() => self.transfer_ended(Ok(())),
            LegEvent::Closed(LegEnd::Remote)
                if self.lifetime.is_early() && self.out.shared.meta.direction == Direction::Inbound =>
            {
                self.finish(EndReason::Cancelled);
            }
            LegEvent::Closed(end) => self.finish(end.into()),
        }
    }

    /// Takes what a handle asks for.
    pub fn handle_command(&mut self, now: Instant, command: Command) {
        self.lifetime.active(now);
        let (bridge, mut around) = self.bridged();
        let command = match bridge.command(now, command, &mut around) {
            ControlFlow::Continue(command) => command,
            ControlFlow::Break(Some(reason)) => return self.finish(reason),
            ControlFlow::Break(None) => return,
        };
        let (speaking, out) = (&mut self.speaking, &mut self.out);
        match command {
            Command::Wake => {}
            Command::Speak { turn, reply } => {
                // A requester that is gone needs no answer.
                let _ = reply.send(self.intake.turn(now, turn, speaking, out));
            }
            Command::Text(delta) => self.intake.text(now, delta, speaking, out),
            Command::Room { reply } => drop(reply.send(intake::has_room_for_sound(speaking, out))),
            Command::Play { request, clip, reply } => {
                let _ = reply.send(self.intake.clip(now, request, clip, speaking, out));
            }
            Command::Await { request, wanted, reply } => {
                let _ = reply.send(self.intake.awaited(now, request, wanted, speaking, out));
            }
            Command::Arrived { turn, clip } => speaking.arrived(&turn, clip),
            Command::Audio { pcm, rate, interruptible } => {
                self.intake.audio(now, (&pcm, rate), interruptible, speaking, out);
            }
            Command::Mark(name) => self.intake.mark(name, speaking, out),
            Command::Interrupt | Command::Clear => self.interrupt(now, Cause::Agent),
            Command::ResolveBargeIn(outcome) => self.resolve_barge_in(now, outcome),
            Command::Hold(hold) => {
                speaking.hold(now, hold, false, out);
            }
            Command::Transfer { to, attended, limit } => match self.transfer.ask(limit) {
                Ok(()) => out.push(Action::Transfer { to, attended, limit }),
                Err(reason) => out.event(CallEvent::Transferred(Err(reason))),
            },
            Command::Digits(digits) => speaking.dial(now, &digits, out),
            Command::Handoff(data) => out.event(CallEvent::Handoff(data)),
            Command::DetectAnswer { hold } => {
                self.caller.detect(now);
                speaking.await_answer(now, hold);
            }
            Command::Prompt { text, lang } => {
                // What a recogniser elsewhere heard is answered to as what one here did.
                if let Some(spoke) = self.caller.last_voice(now) {
                    speaking.latency.asked(now, spoke);
                }
                out.event(CallEvent::Prompt { text, lang, last: true, eager: None });
            }
            Command::Message(text) => out.push(Action::Message(text)),
            Command::Caption(text) => out.push(Action::Caption(text)),
            Command::Listen(listen) => {
                if let Some(feed) = self.caller.feed() {
                    feed.listen(listen);
                }
            }
            Command::Finish(reason) => self.intake.end(reason, speaking, out),
            // Taken by the bridge.
            Command::Bridge(_)
            | Command::BridgeRefused(_)
            | Command::Bridging { .. }
            | Command::Join(_)
            | Command::BridgeMode(_)
            | Command::EndBridge => {}
        }
    }

    /// Takes what the other call of a bridge sends; `None`: it is gone.
    pub fn handle_piece(&mut self, now: Instant, piece: Option<Piece>) {
        let (bridge, mut around) = self.bridged();
        if let Some(reason) = bridge.take(now, piece, &mut around) {
            self.finish(reason);
        }
    }

    fn bridged(&mut self) -> (&mut Bridge, Around<'_>) {
        let Self { out, speaking, intake, caller, lifetime, bridge, .. } = self;
        (bridge, Around { out, speaking, intake, caller, lifetime })
    }

    /// Takes what the engine made.
    pub fn handle_speech(&mut self, now: Instant, event: SpeechEvent) {
        self.speaking.receive(now, event);
    }

    /// The next thing to do now.
    pub fn poll(&mut self, now: Instant) -> Option<Action> {
        loop {
            if let Some(action) = self.out.pop() {
                return Some(match action {
                    Action::Event(event)
                        if is_of_caller(&event) && (self.lifetime.is_early() || self.bridge.is_up()) =>
                    {
                        self.bridge.overhear(&event, &mut self.out);
                        Action::Watched(event)
                    }
                    action => action,
                });
            }
            if self.lifetime.has_ended() {
                return None;
            }
            self.timers(now);
            let (since, echo) = (self.lifetime.media_start(), &mut self.speaking.output.echo);
            if let Some(signal) = self.caller.poll(now, since, &self.out.shared.tap, echo) {
                self.caller_did(now, signal);
                continue;
            }
            let connected = self.lifetime.connected().map(|_| since);
            let step = self.speaking.step(now, connected, &mut self.out);
            self.intake.cut_off(now, self.speaking.synthesis.take_given_up());
            match step {
                Step::Left { speech: true } => self.lifetime.active(now),
                Step::Left { speech: false } | Step::Prepared => {}
                Step::Nothing => {
                    if let Some(reason) = self.speaking.retire(now, &mut self.out) {
                        self.finish(reason);
                    }
                    if self.out.is_empty() {
                        return None;
                    }
                }
            }
        }
    }

    /// When to poll again at the latest.
    pub fn deadline(&self) -> Option<Instant> {
        if self.lifetime.has_ended() {
            return None;
        }
        [
            self.speaking.deadline(),
            self.caller.deadline(),
            self.transfer.deadline(),
            self.lifetime.deadline(&self.out.shared.config),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// The call is over: closes every turn and tells everybody. Idempotent.
    pub fn finish(&mut self, reason: EndReason) {
        if !self.lifetime.end() {
            return;
        }
        self.bridge.over(reason);
        self.speaking.close(&mut self.out);
        self.out.meters.ended(reason);
        self.out.event(CallEvent::Ended(reason));
        self.out.push(Action::End(reason));
    }

    /// Takes the failure of [`Action::Message`].
    pub fn handle_failure(&mut self, what: String) {
        self.out.error(what);
    }

    fn timers(&mut self, now: Instant) {
        let config = self.out.shared.config.clone();
        if let Some(reason) = self.lifetime.due(now, &config) {
            return self.finish(reason);
        }
        if let Some(outcome) = self.speaking.pause.timed_out(now, &config.barge_in) {
            self.resolve_barge_in(now, outcome);
        }
        if self.speaking.pause.awaits_words() && self.caller.voiced() >= MEANT {
            self.resolve_barge_in(now, BargeInOutcome::Confirmed);
        }
        if self.transfer.is_overdue(now) {
            self.transfer_ended(Err("the peer never said how it went".into()));
        }
    }

    fn caller_did(&mut self, now: Instant, signal: Signal) {
        self.lifetime.active(now);
        match signal {
            Signal::Digit(digit) => {
                self.bridge.pass_digit(digit);
                self.out.event(CallEvent::Digit(digit));
                self.barge_in(now, Cause::Dtmf);
            }
            Signal::Speaking(speaking) => {
                self.out.shared.stats.caller_speaking.store(speaking, Relaxed);
                if speaking {
                    // First the silence, then the news of it.
                    self.barge_in(now, Cause::Speech);
                }
                self.out.event(CallEvent::Vad { speaking });
            }
            Signal::Found(Finding::Answered(by)) => {
                self.out.event(CallEvent::AnsweredBy(by));
                // A machine is spoken to after its beep.
                self.speaking.await_answer(now, self.speaking.pause.is_unanswered() && by == Answerer::Machine);
            }
            Signal::Found(Finding::MessageOver { beep }) => {
                self.out.event(CallEvent::MessageOver { beep });
                self.speaking.await_answer(now, false);
            }
        }
    }

    /// Words of the caller came: whether they interrupt, are said by somebody who listens, or were none.
    fn weigh(&mut self, now: Instant, turn: &TurnEvent) {
        let awaited = self.speaking.pause.awaits_words();
        let (sounds, much) = (self.speaking.is_sounding(), self.speaking.has_much_to_say());
        match self.hearing.weigh(turn, sounds, much) {
            Weight::Unknown => {}
            Weight::Aside if awaited => self.resolve_barge_in(now, BargeInOutcome::Rejected),
            Weight::Meant { .. } if awaited => self.resolve_barge_in(now, BargeInOutcome::Confirmed),
            // "Mm-hm" let speech go on, and more followed it.
            Weight::Meant { after_all: true } if self.out.shared.config.barge_in.reversible => {
                if self.speaking.barge_in(now, Cause::Speech, false, &mut self.out) {
                    self.interrupt(now, Cause::Speech);
                }
            }
            Weight::Aside | Weight::Meant { .. } => {}
        }
    }

    fn barge_in(&mut self, now: Instant, cause: Cause) {
        // Who speaks to a human does not interrupt what the agent says to them.
        if self.bridge.is_up() {
            return;
        }
        let hears = self.caller.feed().is_some();
        if self.speaking.barge_in(now, cause, hears, &mut self.out) {
            self.interrupt(now, cause);
        }
    }

    fn resolve_barge_in(&mut self, now: Instant, outcome: BargeInOutcome) {
        let cut = self.speaking.resolve_barge_in(now, outcome, &mut self.out);
        self.intake.cut_off(now, cut);
    }

    fn interrupt(&mut self, now: Instant, cause: Cause) {
        let cut = self.speaking.interrupt(now, cause, &mut self.out);
        self.intake.cut_off(now, cut);
    }

    fn transfer_ended(&mut self, outcome: Result<(), String>) {
        let gone = outcome.is_ok();
        let event = self.transfer.ended(outcome);
        self.out.event(event);
        if gone {
            self.finish(EndReason::Transferred);
        }
    }

    fn report(&mut self, report: &PeerReport) {
        self.speaking.output.report(report);
        let stats = &self.out.shared.stats;
        stats.reported.store(true, Relaxed);
        let jitter = f64::from(report.jitter) / f64::from(self.speaking.output.format().codec.clock_rate());
        stats.jitter_us.store((jitter * 1e6) as u64, Relaxed);
        stats.lost.store(i64::from(report.lost) as u64, Relaxed);
        stats.fraction_lost_bits.store(report.fraction_lost.to_bits(), Relaxed);
        if let Some(round_trip) = report.round_trip {
            // 0 means none yet.
            stats.round_trip_us.store((round_trip.as_micros() as u64).max(1), Relaxed);
        }
    }

    fn set_format(&mut self, now: Instant, format: MediaFormat) {
        if format == *self.speaking.output.format() {
            return;
        }
        let rebuilt = Encoder::new(&format, OpusSettings::default()).and_then(|encoder| {
            self.caller.set_format(&format)?;
            Ok(encoder)
        });
        match rebuilt {
            Ok(encoder) => {
                self.out.shared.stats.codec.store(codec_number(format.codec), Relaxed);
                self.speaking.output.set_format(now, format, encoder, &mut self.out);
            }
            Err(error) => self.out.error(format!("the new format cannot be used: {error}")),
        }
    }
}

/// Whether an event tells what the other side says or presses.
fn is_of_caller(event: &CallEvent) -> bool {
    matches!(
        event,
        CallEvent::Vad { .. }
            | CallEvent::Heard(_)
            | CallEvent::Prompt { .. }
            | CallEvent::Deaf { .. }
            | CallEvent::Digit(_)
    )
}

impl std::fmt::Debug for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let queue = &self.speaking.queue;
        f.debug_struct("Machine").field("call", &self.out.shared.meta.id).field("queue", queue).finish_non_exhaustive()
    }
}
