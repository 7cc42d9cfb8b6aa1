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

use super::ear::{Ear, Sign, to_narrow};
use super::event::{BargeInOutcome, Cause, TurnHow};
use super::handle::{CallHandle, CallMeta, Command};
use super::info::{MediaFrame, Shared, TapDirection, codec_number};
use super::line::{Entry, Line, PartState, Turn};
use super::meters::Meters;
use super::settings::CallConfig;
use super::speech::{LineState, Speech};
use super::{CallEvent, EndReason, TurnId};
use crate::audio::{FRAME_SAMPLES, RATE};
use crate::media::dtmf;
use crate::media::encode::{CodecError, Encoder, OpusSettings};
use crate::media::leg::{LegEvent, MediaFormat, OutPacket, PeerReport};
use crate::media::playout::{Body, Departure, Frame, Playout};
use crate::media::resample::Converter;
use crate::turn::{Class, LineId, SpeechEvent, SpeechSink, Utterance, UtteranceEnd};

mod accept;

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
    line_id: LineId,
    meters: Meters,
    format: MediaFormat,
    encoder: Encoder,
    playout: Playout,
    ear: Ear,
    line: Line,
    actions: VecDeque<Action>,
    /// PCM of the frames that wait in the playout, to fade out from where it stops.
    prepared: VecDeque<Vec<f32>>,
    /// The last frame that was prepared was speech: silence follows, to empty the codec's delay.
    tail_due: bool,
    tap: Option<Converter>,
    started: Instant,
    connected: Option<Instant>,
    last_activity: Instant,
    /// When the last frame of speech left.
    last_spoken: Option<Instant>,
    barge_in: Option<PendingBargeIn>,
    held: bool,
    peer_held: bool,
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
            line_id: LineId::next(),
            encoder: Encoder::new(format, OpusSettings::default())?,
            playout: Playout::new(format, random as u16, (random >> 16) as u32),
            ear: Ear::new(format, &shared.config.vad)?,
            format: format.clone(),
            line: Line::default(),
            actions: VecDeque::new(),
            prepared: VecDeque::new(),
            tail_due: false,
            tap: None,
            started: now,
            connected: None,
            last_activity: now,
            last_spoken: None,
            barge_in: None,
            held: false,
            peer_held: false,
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
            LegEvent::Format(format) => self.set_format(format),
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
                    self.line.entries.push_back(Entry::Mark(name));
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
            Command::Transfer { to, attended } => self.actions.push_back(Action::Transfer { to, attended }),
            Command::Digits(digits) => self.dial(now, &digits),
            Command::Message(text) => self.actions.push_back(Action::Message(text)),
            Command::Finish(reason) => {
                if !self.line.is_ending() {
                    self.close_stream(now);
                    self.line.entries.push_back(Entry::End(reason));
                }
            }
        }
    }

    /// Takes what the engine made.
    pub fn handle_speech(&mut self, now: Instant, event: SpeechEvent) {
        match event {
            // What belongs to no part was cancelled or withdrawn: late audio is dropped on sight.
            SpeechEvent::Audio { utterance, pcm } => {
                if let Some(part) = self.line.part(utterance) {
                    part.receive(pcm);
                }
            }
            SpeechEvent::End { utterance, how } => {
                let Some(part) = self.line.part(utterance) else { return };
                if let UtteranceEnd::Refused { retry_after } = how
                    && part.received() == 0
                {
                    part.state = PartState::Waiting;
                    self.refused(now, utterance, retry_after);
                    return;
                }
                part.state = PartState::Ended;
                if how == UtteranceEnd::Done {
                    let (text, samples) = (std::mem::take(&mut part.text), part.received());
                    self.line.pace.learn(&text, samples);
                    if let Some(part) = self.line.part(utterance) {
                        part.text = text;
                    }
                    return;
                }
                if let Some(turn) = self.line.turn_of(utterance) {
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
            self.playout.expect_more(self.line.front().is_some_and(|turn| turn.sounded && turn.awaits_audio()));
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
            self.line.settles_at(),
            self.lingers_until().filter(|_| self.line.is_last()),
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
        for entry in std::mem::take(&mut self.line.entries) {
            match entry {
                Entry::Turn(turn) => self.turn_ended(*turn, TurnHow::CallEnded),
                Entry::Mark(name) => self.event(CallEvent::Mark { name, played: false }),
                Entry::End(_) => {}
            }
        }
        self.speech.note(self.line_id, LineState::Closed);
        self.meters.ended(reason);
        self.shared.stats.speaking.store(false, Relaxed);
        self.event(CallEvent::Ended(reason));
        self.actions.push_back(Action::End(reason));
    }

    /// Takes the outcome of [`Action::Transfer`]. A blind transfer that was accepted ends the call.
    pub fn handle_transferred(&mut self, outcome: Result<(), String>) {
        let done = outcome.is_ok();
        self.event(CallEvent::Transferred(outcome));
        if done {
            self.finish(EndReason::Transferred);
        }
    }

    /// Takes the failure of [`Action::Hold`] or [`Action::Message`].
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
            self.resolve_barge_in(now, match config.barge_in.confirm_by_default {
                true => BargeInOutcome::TimedOutConfirmed,
                false => BargeInOutcome::TimedOutRejected,
            });
        }
        self.retry_at = self.retry_at.filter(|at| *at > now);
        if self.line.settles_at().is_some_and(|at| at <= now)
            && let Some(turn) = self.line.open()
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

    fn set_format(&mut self, format: MediaFormat) {
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
                self.prepared.clear();
                self.shared.stats.codec.store(codec_number(format.codec), Relaxed);
                self.format = format;
            }
            Err(error) => self.event(CallEvent::Error(format!("the new format cannot be used: {error}"))),
        }
    }

    // --- what the caller does ---

    fn caller_did(&mut self, now: Instant, sign: Sign) {
        self.last_activity = now;
        match sign {
            Sign::Digit(digit) => {
                self.event(CallEvent::Digit(digit));
                self.barge_in(now, Cause::Dtmf);
            }
            Sign::Speaking(speaking) => {
                self.shared.stats.caller_speaking.store(speaking, Relaxed);
                if speaking {
                    // First the silence, then the news of it.
                    self.barge_in(now, Cause::Speech);
                }
                self.event(CallEvent::Vad { speaking });
            }
        }
    }

    fn barge_in(&mut self, now: Instant, cause: Cause) {
        let config = &self.shared.config.barge_in;
        let Some(front) = self.line.front() else { return };
        if self.barge_in.is_some() || !front.style.interruptible.unwrap_or(config.interruptible).by(cause) {
            return;
        }
        let grace = config.grace();
        if grace.is_zero() {
            return self.interrupt(now, cause);
        }
        let turn = front.id.clone();
        self.barge_in = Some(PendingBargeIn { turn: turn.clone(), cause, until: now + grace });
        self.apply_pause(now);
        self.event(CallEvent::BargeInPending { turn, cause, grace });
    }

    fn resolve_barge_in(&mut self, now: Instant, outcome: BargeInOutcome) {
        let Some(pending) = self.barge_in.take() else { return };
        self.event(CallEvent::BargeInResolved { turn: pending.turn, outcome });
        if matches!(outcome, BargeInOutcome::Confirmed | BargeInOutcome::TimedOutConfirmed) {
            self.interrupt(now, pending.cause);
        }
        self.apply_pause(now);
    }

    /// Cuts off what sounds and forgets what waits, except turns that `cause` may not interrupt.
    fn interrupt(&mut self, now: Instant, cause: Cause) {
        let default = self.shared.config.barge_in.interruptible;
        let spared = |turn: &Turn| !turn.style.interruptible.unwrap_or(default).by(cause);
        self.cancel(now, cause, spared);
    }

    /// Ends the turns that `spared` does not spare, silently and at once.
    fn cancel(&mut self, now: Instant, cause: Cause, spared: impl Fn(&Turn) -> bool) {
        if self.barge_in.take().is_some() {
            self.apply_pause(now);
        }
        let sounding = self.line.front().is_some_and(|turn| turn.sounded && !spared(turn));
        let line = &mut self.line;
        self.playout.flush(|owner| line.turn_of(owner).is_some_and(|turn| spared(turn)));
        if sounding {
            self.fade(now);
        }
        let (mut kept, mut interrupted) = (VecDeque::new(), true);
        for entry in std::mem::take(&mut self.line.entries) {
            match entry {
                Entry::Turn(turn) if spared(&turn) => kept.push_back(Entry::Turn(turn)),
                Entry::Turn(turn) => {
                    if turn.is_open() {
                        self.stale = Some(StaleStream { turn: turn.id.clone(), latest: now });
                    }
                    let heard = turn.heard(&self.playout, &self.line.pace);
                    let how = if turn.sounded { TurnHow::Interrupted(cause) } else { TurnHow::Cancelled };
                    // One interruption, told of the turn that sounded or was about to.
                    if std::mem::take(&mut interrupted) && !turn.silent {
                        self.meters.interrupted(&self.shared.stats, cause);
                        self.event(CallEvent::Interrupted { turn: turn.id.clone(), cause, heard });
                    }
                    self.turn_ended(*turn, how);
                }
                // A mark behind a turn that goes on still has something to wait for.
                Entry::Mark(name) if kept.is_empty() => self.event(CallEvent::Mark { name, played: false }),
                entry @ (Entry::Mark(_) | Entry::End(_)) => kept.push_back(entry),
            }
        }
        self.line.entries = kept;
        self.update_flow();
    }

    /// Lets sound that is cut off fall to silence within a frame instead of breaking off, which clicks, and
    /// which the far end's concealment would stretch.
    fn fade(&mut self, now: Instant) {
        let mut pcm = self.prepared.pop_front().unwrap_or_default();
        self.prepared.clear();
        if pcm.is_empty() {
            return;
        }
        for (n, sample) in pcm.iter_mut().enumerate() {
            *sample *= (1.0 - n as f32 / FADE_SAMPLES as f32).max(0.0);
        }
        self.tail_due = true;
        self.push_frame(now, &pcm, None);
        self.push_tail(now);
    }

    fn apply_hold(&mut self, now: Instant, held: bool, by_peer: bool) {
        self.shared.stats.held.store(self.held || self.peer_held, Relaxed);
        self.apply_pause(now);
        self.event(CallEvent::Held { held, by_peer });
    }

    fn apply_pause(&mut self, now: Instant) {
        let paused = self.held || self.peer_held || self.barge_in.is_some();
        self.playout.pause(now, paused);
        self.speech.note(self.line_id, if paused { LineState::Held } else { LineState::Resumed });
    }

    fn dial(&mut self, now: Instant, digits: &str) {
        if !self.playout.dial(now, digits) {
            // No events were agreed: the tones go as sound.
            let mut turn = Turn::new(TurnId::next(), super::handle::Style::default(), now, false);
            turn.silent = true;
            turn.add_clip(dtmf::tones(digits).into(), 1);
            self.line.add(turn, true, &mut self.playout);
        }
    }

    // --- speech out ---

    fn submit(&mut self, now: Instant) {
        if self.retry_at.is_some() {
            return;
        }
        while let Some((turn, place)) = self.line.next_to_submit() {
            let part = &mut turn.parts[place];
            let utterance = Utterance {
                id: part.utterance,
                line: self.line_id,
                class: Class::Live,
                token: turn.epoch.token(),
                text: part.text.clone(),
                voice: turn.style.voice.clone(),
                language: turn.style.language.clone(),
                instructions: turn.style.instructions.clone(),
                seed: turn.style.seed,
                speed: turn.style.speed,
                tenant: self.shared.meta.tenant.clone(),
            };
            match self.speech.submit(utterance, self.sink.clone()) {
                Ok(()) => {
                    part.state = PartState::Submitted;
                    turn.refusals = 0;
                }
                Err(refusal) => {
                    let utterance = part.utterance;
                    return self.refused(now, utterance, refusal.retry_after);
                }
            }
        }
    }

    /// What was accepted is not lost by one refusal: it is tried again a few times, then its turn ends.
    fn refused(&mut self, now: Instant, utterance: crate::turn::UtteranceId, retry_after: Duration) {
        let Some(turn) = self.line.turn_of(utterance) else { return };
        turn.refusals += 1;
        if turn.refusals < MAX_REFUSALS {
            self.retry_at = Some(now + retry_after.clamp(MIN_RETRY, MAX_RETRY));
            return;
        }
        turn.trouble = Some(TurnHow::Refused { retry_after });
        turn.segmenter = None;
        turn.parts.retain(|part| part.state != PartState::Waiting);
    }

    /// Encodes the next frame; `false` when there is none.
    fn prepare(&mut self, now: Instant) -> bool {
        let mut pcm = Vec::with_capacity(FRAME_SAMPLES);
        if let Some(owner) = self.line.take_frame(&mut pcm) {
            self.tail_due = true;
            self.push_frame(now, &pcm, Some(owner));
            self.prepared.push_back(pcm);
            return true;
        }
        if self.tail_due && !self.line.front().is_some_and(Turn::awaits_audio) {
            self.push_tail(now);
            return true;
        }
        false
    }

    /// One frame of silence behind speech empties the delay of codec and resampler, which hold its last
    /// milliseconds. A continuous stream does so by itself.
    fn push_tail(&mut self, now: Instant) {
        self.tail_due = false;
        if !self.format.continuous {
            self.push_frame(now, &[0.0; FRAME_SAMPLES], None);
        }
    }

    fn push_frame(&mut self, now: Instant, pcm: &[f32], owner: Option<crate::turn::UtteranceId>) {
        let payload = match self.encoder.encode(pcm) {
            Ok(payload) => payload,
            Err(error) => return self.event(CallEvent::Error(format!("a frame could not be encoded: {error}"))),
        };
        let tap = if self.shared.tap.receiver_count() > 0 {
            if self.tap.is_none() {
                self.tap = Converter::new(RATE, 8_000).ok();
            }
            self.tap.as_mut().map(|converter| to_narrow(converter, pcm.iter().copied()))
        } else {
            None
        };
        self.playout.push(now, Frame { payload, owner, samples: pcm.len() as u32, tap });
    }

    fn depart(&mut self, now: Instant, departure: Departure) {
        self.meters.sent(&self.shared.stats, departure.late);
        let payload = match departure.body {
            Body::Event(payload) => payload,
            Body::Silence => match self.encoder.silence() {
                Ok(payload) => payload,
                Err(error) => return self.event(CallEvent::Error(format!("silence could not be encoded: {error}"))),
            },
            Body::Speech(frame) => {
                if let Some(owner) = frame.owner {
                    self.prepared.pop_front();
                    self.last_activity = now;
                    self.last_spoken = Some(now);
                    self.shared.stats.frames_spoken.fetch_add(1, Relaxed);
                    self.speech_left(now, owner, departure.anchored, departure.underrun);
                }
                if let (Some(pcm), Some(connected)) = (frame.tap, self.connected) {
                    let at = now.saturating_duration_since(connected);
                    // overflow: drops the oldest (counted by the tap)
                    let _ = self.shared.tap.send(MediaFrame { direction: TapDirection::Outbound, at, pcm });
                }
                frame.payload
            }
        };
        self.actions.push_back(Action::Send(OutPacket {
            payload_type: departure.payload_type,
            marker: departure.marker,
            sequence: departure.sequence,
            timestamp: departure.timestamp,
            payload,
        }));
    }

    fn speech_left(
        &mut self,
        now: Instant,
        owner: crate::turn::UtteranceId,
        anchored: Option<Instant>,
        underrun: Option<Duration>,
    ) {
        if let Some(at) = anchored {
            self.speech.note(self.line_id, LineState::Anchored { at });
        }
        let Some(turn) = self.line.turn_of(owner) else { return };
        let id = turn.id.clone();
        if !turn.sounded {
            turn.sounded = true;
            let (after, immediate, silent) = (now.saturating_duration_since(turn.accepted), turn.immediate, turn.silent);
            self.shared.stats.speaking.store(true, Relaxed);
            if !silent {
                if immediate {
                    self.meters.first_audio(&self.shared.stats, after);
                }
                self.event(CallEvent::FirstAudio { turn: id.clone(), after, immediate });
            }
        }
        if let Some(gap) = underrun {
            self.meters.underrun(&self.shared.stats, gap);
            self.event(CallEvent::Underrun { turn: id, gap });
        }
    }

    /// Removes what is over from the queue.
    fn retire(&mut self, now: Instant) {
        while let Some(entry) = self.line.retire(&self.playout, self.lingers_until().is_none_or(|until| until <= now)) {
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
        let heard = turn.heard(&self.playout, &self.line.pace);
        for part in &turn.parts {
            self.playout.forget(part.utterance);
        }
        self.shared.stats.speaking.store(self.line.front().is_some_and(|front| front.sounded), Relaxed);
        if !turn.silent {
            self.meters.turn_ended(&how);
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

impl Drop for Machine {
    fn drop(&mut self) {
        // Reached without an end only when the task was dropped or panicked: the engine must not work on.
        for turn in self.line.turns() {
            turn.epoch.raise();
        }
        if !self.ended {
            self.speech.note(self.line_id, LineState::Closed);
        }
    }
}

impl std::fmt::Debug for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Machine").field("call", &self.shared.meta.id).field("line", &self.line).finish_non_exhaustive()
    }
}

/// How long sound takes to fall to silence: 5 ms.
const FADE_SAMPLES: usize = RATE as usize / 200;
/// How long the end of a call waits behind its last words: what jitter buffers of telephones hold at most.
const LINGER: Duration = Duration::from_millis(120);
/// Refusals in a row that end a turn.
const MAX_REFUSALS: u32 = 6;
/// Bounds of the wait after a refusal.
const MIN_RETRY: Duration = Duration::from_millis(50);
const MAX_RETRY: Duration = Duration::from_secs(2);
