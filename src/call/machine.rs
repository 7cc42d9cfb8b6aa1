//! The decisions of one call, without I/O: what is said when, what cuts it off, what is told to whom.
//!
//! Owns the queue, the playout, the codecs and the listening half of one call. Never sends, waits, or reads a
//! clock. Contract: after every `handle_*` call [`Machine::poll`] until it returns nothing and carry out the
//! actions in order; then again at [`Machine::deadline`]. [`Machine::end`] is the last call.
//!
//! # Why
//! The engine is called directly ([`Speech`] never waits), because its refusal has to be known at once; packets
//! and signalling are actions, because sending them may wait.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::ear::{Ear, Sign};
use super::event::{BargeInOutcome, Cause, TurnHow};
use super::handle::{CallHandle, CallMeta, Command};
use super::info::{Shared, codec_number};
use super::meters::Meters;
use super::settings::CallConfig;
use super::speech::{Speech, StreamState};
use super::stream::{Entry, PartState, Stream, Turn};
use super::{CallEvent, EndReason, TurnId};
use crate::media::encode::{CodecError, Encoder, OpusSettings};
use crate::media::leg::{LegEnd, LegEvent, MediaFormat, OutPacket, PeerReport};
use crate::media::playout::Playout;
use crate::media::resample::Converter;
use crate::turn::{SpeechEvent, SpeechSink, StreamId, UtteranceEnd, UtteranceId};

mod accept;
mod caller;
mod speak;

/// What the driver has to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Hand a packet to the leg.
    Send(OutPacket),
    /// Tell the listeners.
    Event(CallEvent),
    /// Send text on the data channel.
    Message(String),
    /// Ask the peer to hold or to resume.
    Hold(bool),
    /// Hand the peer over.
    Transfer {
        /// To whom.
        to: String,
        /// Whether we speak to them first.
        attended: bool,
    },
    /// End the call.
    End(EndReason),
}

/// The state of one call.
pub struct Machine {
    shared: Arc<Shared>,
    speech: Arc<dyn Speech>,
    sink: SpeechSink,
    stream_id: StreamId,
    meters: Meters,
    format: MediaFormat,
    encoder: Encoder,
    playout: Playout,
    ear: Ear,
    stream: Stream,
    actions: VecDeque<Action>,
    /// PCM of the frames of speech that wait in the playout: to fade out from where it stops, and to encode
    /// them anew when the codec changes.
    prepared: VecDeque<(UtteranceId, Vec<f32>)>,
    /// The last frame that was prepared was speech: silence follows, to empty the codec's delay.
    tail_due: bool,
    tap: Option<Converter>,
    started: Instant,
    connected: Option<Instant>,
    last_activity: Instant,
    /// When it was polled last: now, for what needs no better.
    polled: Instant,
    /// When the last frame of speech left.
    last_spoken: Option<Instant>,
    barge_in: Option<PendingBargeIn>,
    held: bool,
    peer_held: bool,
    transfer: Option<Transfer>,
    /// When to submit again what was refused.
    retry_at: Option<Instant>,
    /// Text of a stream that was cut off is still arriving.
    stale: Option<StaleStream>,
    flow_open: bool,
    ended: bool,
}

/// The caller may be barging in; speech is silent until the agent has decided.
#[derive(Clone, Debug)]
struct PendingBargeIn {
    turn: TurnId,
    cause: Cause,
    until: Instant,
}

/// Where a transfer stands that the agent has asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transfer {
    /// The peer has not answered.
    Asked,
    /// The peer has taken it on; it ends by what it tells, by its hang-up, or at this instant without a word.
    Accepted { until: Instant },
}

/// The rest of a stream whose turn is over.
#[derive(Clone, Debug)]
struct StaleStream {
    turn: TurnId,
    latest: Instant,
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
            meters: Meters::new(shared.leg),
            speech,
            sink,
            stream_id: StreamId::next(),
            encoder: Encoder::new(format, OpusSettings::default())?,
            playout: Playout::new(format, random as u16, (random >> 16) as u32),
            ear: Ear::new(format, &shared.config.vad)?,
            format: format.clone(),
            stream: Stream::default(),
            actions: VecDeque::new(),
            prepared: VecDeque::new(),
            tail_due: false,
            tap: None,
            started: now,
            connected: None,
            last_activity: now,
            polled: now,
            last_spoken: None,
            barge_in: None,
            held: false,
            peer_held: false,
            transfer: None,
            retry_at: None,
            stale: None,
            flow_open: true,
            ended: false,
            shared,
        })
    }

    /// A call without a task, for whoever drives it in a time of their own. What the handle sends arrives in
    /// the first receiver and belongs into [`Machine::handle_command`], what the engine makes arrives in the
    /// second and belongs into [`Machine::handle_speech`].
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
        let machine = Self::new(shared.clone(), leg.1, speech, sink, 0, now)?;
        Ok((machine, CallHandle { shared, commands }, inbox, made))
    }

    /// Takes what happened on the leg.
    pub fn handle_leg(&mut self, now: Instant, event: LegEvent) {
        match event {
            LegEvent::Connected => {
                if self.connected.is_none() {
                    self.connected = Some(now);
                    self.last_activity = now;
                    self.shared.stats.connected.store(true, Relaxed);
                    self.playout.start(now);
                    self.event(CallEvent::Connected);
                }
            }
            LegEvent::Rtp(packet) => {
                self.meters.received(&self.shared.stats);
                self.ear.push(packet);
            }
            LegEvent::Digit(digit) => self.caller_did(now, Sign::Digit(digit)),
            LegEvent::Message(text) => {
                self.last_activity = now;
                self.event(CallEvent::Message(text));
            }
            LegEvent::Report(report) => self.report(&report),
            LegEvent::Held(held) => {
                if self.peer_held != held {
                    self.peer_held = held;
                    self.last_activity = now;
                    self.playout.mute(now, held);
                    self.apply_hold(now, held, true);
                }
            }
            LegEvent::Format(format) => self.set_format(now, format),
            LegEvent::HoldAnswered { hold, outcome } => {
                if let Err(reason) = outcome {
                    let what = if hold { "on" } else { "off" };
                    self.event(CallEvent::Error(format!("the peer was not put {what} hold: {reason}")));
                }
            }
            LegEvent::TransferAnswered(outcome) => self.transfer_answered(now, outcome),
            LegEvent::TransferEnded(outcome) => self.transfer_ended(outcome),
            // Who has taken a transfer on and hangs up has gone where it was sent.
            LegEvent::Closed(LegEnd::Remote) if matches!(self.transfer, Some(Transfer::Accepted { .. })) => {
                self.transfer_ended(Ok(()));
            }
            LegEvent::Closed(end) => self.finish(end.into()),
        }
    }

    /// Takes what a handle asks for.
    pub fn handle_command(&mut self, now: Instant, command: Command) {
        self.last_activity = now;
        match command {
            Command::Speak { turn, reply } => {
                // A requester that is gone needs no answer.
                let _ = reply.send(self.accept_turn(now, turn));
            }
            Command::Text(delta) => self.accept_text(now, delta),
            Command::Play { request, clip, reply } => {
                let _ = reply.send(self.accept_clip(now, request, clip));
            }
            Command::Audio { pcm, rate } => self.accept_audio(now, &pcm, rate),
            Command::Mark(name) => {
                if self.has_room() {
                    self.stream.entries.push_back(Entry::Mark(name));
                } else {
                    self.event(CallEvent::Mark { name, played: false });
                }
            }
            Command::Interrupt | Command::Clear => self.interrupt(now, Cause::Agent),
            Command::ResolveBargeIn(outcome) => self.resolve_barge_in(now, outcome),
            Command::Hold(hold) => {
                if self.held != hold {
                    self.held = hold;
                    self.actions.push_back(Action::Hold(hold));
                    self.apply_hold(now, hold, false);
                }
            }
            Command::Transfer { to, attended } => {
                if self.transfer.is_some() {
                    self.event(CallEvent::Transferred(Err("another transfer is under way".into())));
                } else {
                    self.transfer = Some(Transfer::Asked);
                    self.actions.push_back(Action::Transfer { to, attended });
                }
            }
            Command::Digits(digits) => self.dial(now, &digits),
            Command::Message(text) => self.actions.push_back(Action::Message(text)),
            Command::Finish(reason) => {
                if !self.stream.is_ending() {
                    self.close_stream(now);
                    self.stream.entries.push_back(Entry::End(reason));
                }
            }
        }
    }

    /// Takes what the engine made.
    pub fn handle_speech(&mut self, now: Instant, event: SpeechEvent) {
        match event {
            // What belongs to no part was cancelled or withdrawn: late audio is dropped on sight.
            SpeechEvent::Audio { utterance, pcm } => {
                if let Some(part) = self.stream.part(utterance) {
                    part.made.get_or_insert(now);
                    part.receive(pcm);
                }
            }
            SpeechEvent::End { utterance, how } => {
                let Some(part) = self.stream.part(utterance) else { return };
                if let UtteranceEnd::Refused { retry_after } = how
                    && part.received() == 0
                {
                    part.state = PartState::Waiting;
                    self.refused(now, utterance, retry_after);
                    return;
                }
                if let UtteranceEnd::Failed(reason) = &how
                    && self.rescue(utterance)
                {
                    tracing::warn!(%reason, "an utterance failed; the default voice speaks it");
                    return;
                }
                let Some(part) = self.stream.part(utterance) else { return };
                part.state = PartState::Ended;
                if how == UtteranceEnd::Done {
                    let (text, samples) = (std::mem::take(&mut part.text), part.received());
                    self.stream.pace.learn(&text, samples);
                    if let Some(part) = self.stream.part(utterance) {
                        part.text = text;
                    }
                    return;
                }
                if let Some(turn) = self.stream.turn_of(utterance) {
                    turn.trouble = Some(match how {
                        UtteranceEnd::Failed(reason) => TurnHow::Failed(reason),
                        UtteranceEnd::Refused { retry_after } => TurnHow::Refused { retry_after },
                        UtteranceEnd::Done | UtteranceEnd::Cancelled => TurnHow::Failed("the engine gave it up".into()),
                    });
                }
            }
        }
    }

    /// The next thing to do now.
    pub fn poll(&mut self, now: Instant) -> Option<Action> {
        self.polled = now;
        loop {
            if let Some(action) = self.actions.pop_front() {
                return Some(action);
            }
            if self.ended {
                return None;
            }
            self.timers(now);
            if let Some(sign) = self.ear.poll(now, self.connected.unwrap_or(self.started), &self.shared.tap) {
                self.caller_did(now, sign);
                continue;
            }
            self.submit(now);
            // At least one frame before the playout is asked, the second after it: what is due leaves first.
            if self.playout.is_empty() {
                self.prepare(now);
            }
            self.playout.expect_more(self.stream.front().is_some_and(|turn| turn.sounded && turn.awaits_audio()));
            if let Some(departure) = self.playout.poll(now) {
                self.depart(now, departure);
                continue;
            }
            if self.playout.wants_frame() && self.prepare(now) {
                continue;
            }
            self.retire(now);
            if self.actions.is_empty() {
                return None;
            }
        }
    }

    /// When to poll again at the latest.
    pub fn deadline(&self) -> Option<Instant> {
        if self.ended {
            return None;
        }
        let config = &self.shared.config;
        let limit = |from: Instant, seconds: u64| (seconds > 0).then(|| from + Duration::from_secs(seconds));
        let setup = if self.connected.is_none() { limit(self.started, config.setup_timeout_s) } else { None };
        [
            self.playout.deadline(),
            self.ear.deadline(),
            self.barge_in.as_ref().map(|pending| pending.until),
            self.retry_at,
            self.transfer.and_then(|transfer| match transfer {
                Transfer::Asked => None,
                Transfer::Accepted { until } => Some(until),
            }),
            self.stream.settles_at(),
            self.lingers_until().filter(|_| self.stream.is_last()),
            setup,
            limit(self.started, config.max_duration_s),
            limit(self.last_activity, config.max_idle_s),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// The call is over: closes every turn and tells everybody. Idempotent.
    pub fn finish(&mut self, reason: EndReason) {
        if self.ended {
            return;
        }
        self.ended = true;
        self.playout.flush(|_| false);
        for entry in std::mem::take(&mut self.stream.entries) {
            match entry {
                Entry::Turn(turn) => self.turn_ended(*turn, TurnHow::CallEnded),
                Entry::Mark(name) => self.event(CallEvent::Mark { name, played: false }),
                Entry::End(_) => {}
            }
        }
        self.speech.note(self.stream_id, StreamState::Closed);
        self.meters.ended(reason);
        self.shared.stats.speaking.store(false, Relaxed);
        self.event(CallEvent::Ended(reason));
        self.actions.push_back(Action::End(reason));
    }

    /// Takes the failure of [`Action::Message`].
    pub fn handle_failure(&mut self, what: String) {
        self.event(CallEvent::Error(what));
    }

    fn event(&mut self, event: CallEvent) {
        self.actions.push_back(Action::Event(event));
    }

    fn timers(&mut self, now: Instant) {
        let config = self.shared.config.clone();
        let over = |from: Instant, seconds: u64| seconds > 0 && now >= from + Duration::from_secs(seconds);
        if self.connected.is_none() && over(self.started, config.setup_timeout_s) {
            return self.finish(EndReason::SetupTimeout);
        }
        if over(self.started, config.max_duration_s) {
            return self.finish(EndReason::TooLong);
        }
        if over(self.last_activity, config.max_idle_s) {
            return self.finish(EndReason::Idle);
        }
        if self.barge_in.as_ref().is_some_and(|pending| pending.until <= now) {
            self.resolve_barge_in(
                now,
                match config.barge_in.confirm_by_default {
                    true => BargeInOutcome::TimedOutConfirmed,
                    false => BargeInOutcome::TimedOutRejected,
                },
            );
        }
        if matches!(self.transfer, Some(Transfer::Accepted { until }) if until <= now) {
            self.transfer_ended(Err("the peer never said how it went".into()));
        }
        self.retry_at = self.retry_at.filter(|at| *at > now);
        if self.stream.settles_at().is_some_and(|at| at <= now)
            && let Some(turn) = self.stream.open()
        {
            turn.settle();
        }
    }

    fn report(&mut self, report: &PeerReport) {
        self.playout.acknowledge(report.highest_sequence);
        let stats = &self.shared.stats;
        stats.lost.store(i64::from(report.lost) as u64, Relaxed);
        stats.fraction_lost_bits.store(report.fraction_lost.to_bits(), Relaxed);
        if let Some(round_trip) = report.round_trip {
            stats.round_trip_us.store(round_trip.as_micros() as u64, Relaxed);
        }
        if let Err(error) = self.encoder.report_loss(report.fraction_lost) {
            tracing::warn!(%error, "the encoder keeps its profile");
        }
    }

    fn set_format(&mut self, now: Instant, format: MediaFormat) {
        if format == self.format {
            return;
        }
        let rebuilt = Encoder::new(&format, OpusSettings::default()).and_then(|encoder| {
            self.ear.set_format(&format)?;
            Ok(encoder)
        });
        match rebuilt {
            Ok(encoder) => {
                self.encoder = encoder;
                self.playout.set_format(&format);
                self.shared.stats.codec.store(codec_number(format.codec), Relaxed);
                self.format = format;
                for (owner, pcm) in self.prepared.clone() {
                    self.push_frame(now, &pcm, Some(owner));
                }
            }
            Err(error) => self.event(CallEvent::Error(format!("the new format cannot be used: {error}"))),
        }
    }

    /// Removes what is over from the queue.
    fn retire(&mut self, now: Instant) {
        while let Some(entry) = self.stream.retire(&self.playout, self.lingers_until().is_none_or(|until| until <= now))
        {
            match entry {
                Entry::Mark(name) => self.event(CallEvent::Mark { name, played: true }),
                Entry::End(reason) => return self.finish(reason),
                Entry::Turn(mut turn) => {
                    let how = turn.trouble.take().unwrap_or(TurnHow::Done);
                    self.turn_ended(*turn, how);
                }
            }
            self.update_flow();
        }
    }

    /// When the call may end although its last words have left: the peer's jitter buffer still holds them.
    fn lingers_until(&self) -> Option<Instant> {
        self.last_spoken.map(|at| at + LINGER)
    }

    fn turn_ended(&mut self, turn: Turn, how: TurnHow) {
        turn.epoch.raise();
        self.shared.backlog.give_back(turn.bytes);
        let heard = turn.heard(&self.playout, &self.stream.pace);
        for part in &turn.parts {
            self.playout.forget(part.utterance);
        }
        self.shared.stats.speaking.store(self.stream.front().is_some_and(|front| front.sounded), Relaxed);
        if !turn.silent {
            self.meters.turn_ended(&how);
            tracing::trace!(
                target: "antiphon::spans",
                kind = "turn",
                call = %self.shared.meta.id,
                turn = %turn.id,
                leg = self.shared.leg,
                codec = self.format.codec.label(),
                outcome = how.label(),
                accepted_us = age(self.polled, turn.accepted),
                sent_ms = heard.sent_ms,
            );
            self.event(CallEvent::TurnEnded { turn: turn.id, how, heard });
        }
    }

    /// Tells when the backlog becomes too long or short again; two limits, so that it does not flutter.
    fn update_flow(&mut self) {
        let (used, limit) = (self.shared.backlog.used(), self.shared.backlog.limit());
        let open = if self.flow_open { used <= limit / 4 * 3 } else { used <= limit / 4 };
        if open != self.flow_open {
            self.flow_open = open;
            self.event(CallEvent::Flow { open });
        }
    }
}

/// Microseconds from `at` to `now`.
fn age(now: Instant, at: Instant) -> u64 {
    now.saturating_duration_since(at).as_micros() as u64
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Reached without an end only when the task was dropped or panicked: the engine must not work on.
        for turn in self.stream.turns() {
            turn.epoch.raise();
        }
        if !self.ended {
            self.speech.note(self.stream_id, StreamState::Closed);
        }
    }
}

impl std::fmt::Debug for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Machine")
            .field("call", &self.shared.meta.id)
            .field("stream", &self.stream)
            .finish_non_exhaustive()
    }
}

/// How long the end of a call waits behind its last words: what jitter buffers of telephones hold at most.
const LINGER: Duration = Duration::from_millis(120);
