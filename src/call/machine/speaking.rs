//! The speaking half of a call: what is said, from the queue through the engine to the wire.
//!
//! Owns the queue of turns, their stream on the engine, the output, and the reasons for a pause. Takes turns from
//! [`super::intake`] and signs of the caller from the machine.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use super::Action;
use super::latency::{Latency, Milestones};
use super::outbox::{Outbox, age};
use super::output::{Output, Spoken};
use super::part::{Part, PartState};
use super::pause::{Pause, Reaction};
use super::queue::{Entry, TurnQueue};
use super::spans::{parent, trace_answer, trace_first_audio};
use super::speculation::Speculation;
use super::synthesis::Synthesis;
use super::turn::Turn;
use crate::audio::{FRAME, FRAME_SAMPLES, RATE};
use crate::call::event::{BargeInOutcome, Cause, TurnHow};
use crate::call::handle::Style;
use crate::call::info::Shared;
use crate::call::speech::{Speech, StreamState};
use crate::call::{CallEvent, EndReason, Interruptible, TurnId};
use crate::media::dtmf;
use crate::media::encode::CodecError;
use crate::media::leg::MediaFormat;
use crate::media::playout::Departure;
use crate::turn::{SpeechEvent, SpeechSink};

/// How long the end of a call waits after its last words: the most that jitter buffers of telephones hold.
const LINGER: Duration = Duration::from_millis(120);

/// Speech that waits from which on a caller's "yes" is no answer to it, but says: go on. 1.5 s.
const MUCH: usize = RATE as usize * 3 / 2;

/// What a call says.
///
/// Why this struct is large: queue, pause, latency, synthesis and output are types of their own; here is what happens
/// between them, a method for each event.
pub(super) struct Speaking {
    pub(super) queue: TurnQueue,
    pub(super) output: Output,
    pub(super) pause: Pause,
    pub(super) speculation: Speculation,
    pub(super) latency: Latency,
    pub(super) synthesis: Synthesis,
    /// More text is welcome, as was told last.
    flow_open: bool,
    /// When the last frame of speech left.
    last_spoken: Option<Instant>,
    /// Since when the listener hears silence because nothing more was written.
    starved: Option<Instant>,
    /// When it was stepped last: now, for spans.
    stepped: Instant,
    /// Speech that has left since, and when: its packet goes before anybody is told.
    departed: Option<(Instant, Spoken)>,
    /// Digits go beside the media.
    pub(super) signals_digits: bool,
    closed: bool,
}

/// What one step did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// There is nothing to do before the deadline.
    Nothing,
    /// A frame was encoded.
    Prepared,
    /// A packet leaves; whether it carries speech of a turn.
    Left {
        /// It does.
        speech: bool,
    },
}

impl Speaking {
    pub(super) fn new(
        shared: &Shared,
        format: &MediaFormat,
        speech: Arc<dyn Speech>,
        sink: SpeechSink,
        random: u64,
        now: Instant,
    ) -> Result<Self, CodecError> {
        let mut output = Output::new(format, random, shared.tap.clone())?;
        if shared.config.quiet_bed {
            output.fill_silence(now, random as u32);
        }
        Ok(Self {
            queue: TurnQueue::default(),
            output,
            pause: Pause::default(),
            speculation: Speculation::default(),
            latency: Latency::default(),
            synthesis: Synthesis::new(speech, sink, shared.meta.tenant.clone()),
            flow_open: true,
            last_spoken: None,
            starved: None,
            stepped: now,
            departed: None,
            signals_digits: false,
            closed: false,
        })
    }

    /// Whether the call is over.
    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    /// When to step again at the latest.
    pub(super) fn deadline(&self) -> Option<Instant> {
        [
            self.output.playout.deadline(),
            self.pause.deadline(),
            self.synthesis.retry_at(),
            self.queue.look_at(),
            self.lingers_until().filter(|_| self.queue.is_last()),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Takes what the engine made.
    pub(super) fn receive(&mut self, now: Instant, event: SpeechEvent) {
        self.synthesis.receive(now, &mut self.queue, event);
    }

    /// The caller's turn has ended with `words`, or goes on (`None`): answers that were made before it was certain may
    /// leave, or are dropped. Gives the eager end of turn whose answers may.
    pub(super) fn settle_speculation(&mut self, now: Instant, words: Option<&str>, out: &mut Outbox) -> Option<u64> {
        let stands = self.speculation.close(words);
        if !self.queue.turns().any(|turn| turn.held) {
            return stands;
        }
        if stands.is_some() {
            for turn in self.queue.turns_mut().filter(|turn| turn.held) {
                turn.held = false;
                // From here on somebody waits for it.
                turn.accepted = now;
            }
        } else {
            let dropped = self.queue.take_held();
            for turn in dropped {
                // No event told of it, so that it was no interruption.
                self.turn_ended(turn, TurnHow::Cancelled, out);
            }
            self.update_flow(out);
        }
        self.apply_pause(now);
        stands
    }

    /// Adds a turn after the others, or after the one that sounds (`ahead`).
    pub(super) fn add(&mut self, turn: Turn, ahead: bool) {
        self.queue.add(turn, ahead, &mut self.output.playout);
        // What was withdrawn is made anew under other names.
        let queue = &mut self.queue;
        self.output.forget_unless(|owner| queue.part(owner).is_some());
    }

    /// Hands the next utterances to the engine.
    pub(super) fn submit(&mut self, now: Instant) {
        let submitted = self.synthesis.submit(now, &mut self.queue);
        // The caller does not hear it yet: the engine makes it when it has nothing more urgent to do. Told behind every
        // submission, as the engine knows a stream only while it has work.
        if submitted && self.queue.front().is_some_and(|turn| turn.held) {
            self.synthesis.note(StreamState::Held);
        }
    }

    /// Takes back a turn that the engine refused before it took anything of it; gives when to come back.
    pub(super) fn take_back_refused(&mut self, now: Instant, id: &TurnId) -> Option<Duration> {
        let refused = |turn: &Turn| {
            turn.id == *id && turn.refusals > 0 && turn.parts.iter().all(|part| part.state == PartState::Waiting)
        };
        if !self.queue.turns().any(refused) {
            return None;
        }
        self.queue.entries.retain(|entry| !matches!(entry, Entry::Turn(turn) if refused(turn)));
        Some(self.synthesis.give_up(now))
    }

    /// Prepares or sends one frame; `connected`: when media began to flow.
    pub(super) fn step(&mut self, now: Instant, connected: Option<Instant>, out: &mut Outbox) -> Step {
        self.stepped = now;
        if let Some((at, spoken)) = self.departed.take() {
            self.speech_left(at, spoken, out);
        }
        self.synthesis.tick(now);
        self.queue.look(now);
        self.submit(now);
        // At least one frame before the playout is asked, the second after it: what is due leaves first.
        if self.output.playout.is_empty() {
            self.prepare(now, out);
        }
        self.starve(out);
        // Once the writer is what is waited for, the engine's share of the gap is no underrun.
        let awaited = self.queue.front().is_some_and(|turn| turn.sounded && turn.awaits_audio());
        self.output.playout.expect_more(awaited && self.starved.is_none());
        let coming = self.queue.front().is_some_and(|turn| !turn.held && turn.awaits_onset());
        self.output.playout.await_speech(now, coming);
        if let Some(departure) = self.output.playout.poll(now) {
            return Step::Left { speech: self.depart(now, departure, connected, out) };
        }
        if self.output.playout.wants_frame() && self.prepare(now, out) {
            return Step::Prepared;
        }
        Step::Nothing
    }

    /// Removes what is over from the queue; gives why the call ends, where its end was queued and has come.
    pub(super) fn retire(&mut self, now: Instant, out: &mut Outbox) -> Option<EndReason> {
        let may_end = self.lingers_until().is_none_or(|until| until <= now);
        while let Some(entry) = self.queue.retire(&self.output.playout, may_end) {
            match entry {
                Entry::Mark(name) => out.event(CallEvent::Mark { name, played: true }),
                Entry::End(reason) => return Some(reason),
                Entry::Turn(mut turn) => {
                    let how = turn.trouble.take().unwrap_or(TurnHow::Done);
                    self.turn_ended(*turn, how, out);
                }
            }
            self.update_flow(out);
        }
        None
    }

    /// Whether something sounds that goes on for more than the end of a sentence.
    pub(super) fn has_much_to_say(&self) -> bool {
        self.queue.front().is_some_and(|turn| {
            let waits = turn.parts.iter().fold(0usize, |sum, part| sum.saturating_add(part.available()));
            turn.sounded && (turn.is_open() || turn.awaits_audio() || waits >= MUCH)
        })
    }

    /// Whether something sounds.
    pub(super) fn is_sounding(&self) -> bool {
        self.queue.front().is_some_and(|turn| turn.sounded)
    }

    /// The caller did something that may interrupt; whether speech is to be cut off now. `hears`: words will say whether it
    /// was meant.
    pub(super) fn barge_in(&mut self, now: Instant, cause: Cause, hears: bool, out: &mut Outbox) -> bool {
        let config = &out.shared.config.barge_in;
        // What the caller does not hear is not interrupted.
        let Some(front) = self.queue.front().filter(|turn| !turn.held) else { return false };
        let interruptible = front.style.interruptible.unwrap_or(config.interruptible);
        match self.pause.barge_in(now, cause, (&front.id, interruptible), config, hears) {
            Reaction::None => false,
            Reaction::Interrupt => true,
            Reaction::Ask(grace) => {
                let turn = front.id.clone();
                self.apply_pause(now);
                out.event(CallEvent::BargeInPending { turn, cause, grace });
                false
            }
        }
    }

    /// A pending barge-in is decided. As [`Speaking::cancel`] where it cuts speech off.
    pub(super) fn resolve_barge_in(
        &mut self,
        now: Instant,
        outcome: BargeInOutcome,
        out: &mut Outbox,
    ) -> Option<TurnId> {
        let decided = self.pause.resolve(outcome)?;
        out.event(CallEvent::BargeInResolved { turn: decided.turn, outcome });
        let cut = decided.interrupts.and_then(|cause| self.interrupt(now, cause, out));
        self.apply_pause(now);
        cut
    }

    /// Cuts off what sounds and forgets what waits, except turns that `cause` may not interrupt; as
    /// [`Speaking::cancel`].
    pub(super) fn interrupt(&mut self, now: Instant, cause: Cause, out: &mut Outbox) -> Option<TurnId> {
        let default = out.shared.config.barge_in.interruptible;
        self.cancel(now, cause, |turn| !turn.style.interruptible.unwrap_or(default).by(cause), out)
    }

    /// Ends the turns that `spared` does not spare, silently and at once; gives the one whose text was still being
    /// written.
    pub(super) fn cancel(
        &mut self,
        now: Instant,
        cause: Cause,
        spared: impl Fn(&Turn) -> bool,
        out: &mut Outbox,
    ) -> Option<TurnId> {
        if self.pause.forget_barge_in() {
            self.apply_pause(now);
        }
        let sounding = self.queue.front().is_some_and(|turn| turn.sounded && !spared(turn));
        let queue = &mut self.queue;
        self.output.cut(now, sounding, |owner| queue.turn_of(owner).is_some_and(|turn| spared(turn)), out);
        let (mut open, mut first) = (None, true);
        for entry in self.queue.take_unless(&spared) {
            match entry {
                Entry::Turn(turn) => {
                    if turn.is_open() {
                        open = Some(turn.id.clone());
                    }
                    let heard = turn.heard(&self.output.playout, &self.queue.pace);
                    let how = if turn.sounded { TurnHow::Interrupted(cause) } else { TurnHow::Cancelled };
                    // One interruption, told of the turn that sounded or was about to.
                    if std::mem::take(&mut first) && !turn.silent {
                        out.meters.interrupted(&out.shared.stats, cause);
                        out.event(CallEvent::Interrupted { turn: turn.id.clone(), cause, heard });
                    }
                    self.turn_ended(*turn, how, out);
                }
                Entry::Mark(name) => out.event(CallEvent::Mark { name, played: false }),
                Entry::End(_) => {}
            }
        }
        self.synthesis.note(StreamState::Interrupted);
        self.update_flow(out);
        open
    }

    /// We hold the peer (`true`) or resume, or the peer does (`by_peer`); `false` when that is no change.
    pub(super) fn hold(&mut self, now: Instant, held: bool, by_peer: bool, out: &mut Outbox) -> bool {
        let changed = if by_peer { self.pause.peer_hold(held) } else { self.pause.hold(held) };
        if !changed {
            return false;
        }
        if by_peer {
            self.output.playout.mute(now, held);
        } else {
            out.push(Action::Hold(held));
        }
        self.held(now, held, by_peer, out);
        true
    }

    /// The peer did not do what [`Speaking::hold`] asked of it with `held`: all is as before, and it can be asked again.
    pub(super) fn hold_failed(&mut self, now: Instant, held: bool, out: &mut Outbox) {
        if self.pause.hold(!held) {
            self.held(now, !held, false, out);
        }
    }

    fn held(&mut self, now: Instant, held: bool, by_peer: bool, out: &mut Outbox) {
        out.shared.stats.held.store(self.pause.is_held(), Relaxed);
        self.apply_pause(now);
        out.event(CallEvent::Held { held, by_peer });
    }

    /// Says nothing from now on until it is known who answered (`true`), or begins to.
    pub(super) fn await_answer(&mut self, now: Instant, waits: bool) {
        if self.pause.await_answer(waits) {
            // The engine goes on: what it makes meanwhile sounds at once.
            self.output.playout.pause(now, self.pause.is_on());
        }
    }

    /// Sends digits to the peer.
    pub(super) fn dial(&mut self, now: Instant, digits: &str, out: &mut Outbox) {
        if self.signals_digits {
            return out.push(Action::Dial(digits.to_owned()));
        }
        if !self.output.playout.dial(now, digits) {
            // No events were agreed: the tones go as sound.
            // Half a number is none: nothing that the peer does cuts it off.
            let style = Style { interruptible: Some(Interruptible::None), ..Style::default() };
            let mut turn = Turn::new(TurnId::next(), style, now, false);
            turn.silent = true;
            turn.add_clip(dtmf::tones(digits).into(), 1);
            self.add(turn, true);
        }
    }

    /// The call is over: ends every turn.
    pub(super) fn close(&mut self, out: &mut Outbox) {
        self.closed = true;
        self.output.playout.flush(|_| false);
        for entry in std::mem::take(&mut self.queue.entries) {
            match entry {
                Entry::Turn(turn) => self.turn_ended(*turn, TurnHow::CallEnded, out),
                Entry::Mark(name) => out.event(CallEvent::Mark { name, played: false }),
                Entry::End(_) => {}
            }
        }
        self.synthesis.note(StreamState::Closed);
        out.shared.stats.speaking.store(false, Relaxed);
    }

    /// The text of the open turn is complete: its agent is told of mistakes in its markup.
    pub(super) fn close_open(&mut self, out: &mut Outbox) {
        self.queue.close_open().into_iter().for_each(|mistake| out.error(mistake));
    }

    /// Seconds of speech and recorded audio that wait.
    pub(super) fn waiting_seconds(&self) -> u64 {
        (self.queue.waiting_samples() / RATE as usize) as u64
    }

    /// Recorded audio of `turn` was fetched, or cannot be. A turn that was cut off meanwhile has no more use for it.
    pub(super) fn arrived(&mut self, turn: &TurnId, clip: Result<Arc<[f32]>, String>) {
        let waits = |turn: &&mut Turn| turn.parts.iter().any(Part::is_fetched);
        let Some(turn) = self.queue.turns_mut().filter(waits).find(|waiting| waiting.id == *turn) else { return };
        if let Err(reason) = turn.clip_arrived(clip) {
            turn.trouble = Some(TurnHow::Failed(reason));
        }
    }

    /// Tells when the backlog becomes too long or short again; two limits, so that it does not flutter.
    pub(super) fn update_flow(&mut self, out: &mut Outbox) {
        let (used, limit) = (out.shared.backlog.used(), out.shared.backlog.limit());
        let open = if self.flow_open { used <= limit / 4 * 3 } else { used <= limit / 4 };
        if open != self.flow_open {
            self.flow_open = open;
            out.event(CallEvent::Flow { open });
        }
    }

    fn apply_pause(&mut self, now: Instant) {
        let paused = self.pause.is_on();
        self.output.playout.pause(now, paused);
        self.synthesis.note(if paused { StreamState::Held } else { StreamState::Resumed });
    }

    /// Finds out whether the listener waits for the writer of the turn that sounds.
    fn starve(&mut self, out: &mut Outbox) {
        let Some(turn) = self.queue.front().filter(|turn| turn.sounded) else {
            self.starved = None;
            return;
        };
        if self.pause.is_on() || !(turn.is_open() || turn.awaits_audio()) {
            self.starved = None;
        } else if self.starved.is_none()
            && (!turn.awaits_audio() || turn.is_streaming())
            && self.output.playout.is_empty()
            && self.queue.waiting_samples() == 0
        {
            self.starved = self.last_spoken.map(|at| at + FRAME);
            out.event(CallEvent::Starved { turn: turn.id.clone() });
        }
    }

    /// Encodes the next frame; `false` when there is none.
    fn prepare(&mut self, now: Instant, out: &mut Outbox) -> bool {
        let mut pcm = Vec::with_capacity(FRAME_SAMPLES);
        if let Some(owner) = self.queue.take_frame(&mut pcm) {
            self.output.push(now, owner, pcm, out);
            return true;
        }
        if self.output.owes_tail() && !self.queue.front().is_some_and(|turn| !turn.held && turn.awaits_audio()) {
            self.output.push_tail(now, out);
            return true;
        }
        false
    }

    /// Sends what is due; whether it is speech.
    fn depart(&mut self, now: Instant, departure: Departure, connected: Option<Instant>, out: &mut Outbox) -> bool {
        if !departure.left_out {
            out.meters.sent(&out.shared.stats, departure.late, departure.stalled.is_some());
        }
        let (packet, spoken) = self.output.packet(now, departure, connected, out);
        if let Some(packet) = packet {
            out.push(Action::Send(packet));
        }
        self.departed = spoken.map(|spoken| (now, spoken));
        spoken.is_some()
    }

    /// Speech left at `now`: tells so, and what that means.
    fn speech_left(&mut self, now: Instant, spoken: Spoken, out: &mut Outbox) {
        if let Some(since) = self.starved.take() {
            out.meters.starved(now.saturating_duration_since(since));
        }
        self.last_spoken = Some(now);
        out.shared.stats.frames_spoken.fetch_add(1, Relaxed);
        if let Some(at) = spoken.anchored {
            self.synthesis.note(StreamState::Anchored { at });
        }
        let codec = self.output.format().codec.label();
        let pace = self.queue.pace;
        let Some(turn) = self.queue.turn_of(spoken.utterance) else { return };
        if !turn.sounded {
            turn.sounded = true;
            let after = now.saturating_duration_since(turn.accepted);
            out.shared.stats.speaking.store(true, Relaxed);
            let part = turn.parts.iter().find(|part| part.utterance == spoken.utterance);
            let milestones = Milestones {
                accepted: turn.accepted,
                submitted: part.and_then(|part| part.submitted),
                made: part.and_then(|part| part.made),
                voice: part.and_then(|part| part.voice),
                network: out.shared.stats.one_way(),
            };
            let early = turn.style.speculation.is_some();
            let answer = self.latency.answered(now, milestones, early).filter(|_| !turn.silent);
            if !turn.silent {
                trace_first_audio(now, turn, spoken.utterance, codec, out);
                if turn.immediate {
                    out.meters.first_audio(&out.shared.stats, after);
                }
                let stages = milestones.own(now);
                out.event(CallEvent::FirstAudio { turn: turn.id.clone(), after, immediate: turn.immediate, stages });
            }
            if let Some((asked, stages)) = answer {
                out.meters.answered(&stages);
                trace_answer(now, turn, asked, &stages, codec, out);
                out.event(CallEvent::Answered { turn: turn.id.clone(), stages });
            }
        }
        if !turn.silent
            && let Some((text, lasts)) = turn.begins(spoken.utterance, &pace)
        {
            out.event(CallEvent::Speaking { turn: turn.id.clone(), text, lasts });
        }
        for name in turn.reached(&self.output.playout, &pace) {
            out.event(CallEvent::Mark { name, played: true });
        }
        if let Some(gap) = spoken.underrun {
            out.meters.underrun(&out.shared.stats, gap);
            out.event(CallEvent::Underrun { turn: turn.id.clone(), gap });
        }
    }

    /// When the call may end although its last words have left: the peer's jitter buffer still holds them.
    fn lingers_until(&self) -> Option<Instant> {
        self.last_spoken.map(|at| at + LINGER)
    }

    fn turn_ended(&mut self, mut turn: Turn, how: TurnHow, out: &mut Outbox) {
        turn.epoch.raise();
        out.shared.backlog.give_back(turn.bytes);
        let played = how == TurnHow::Done;
        for name in turn.unreached() {
            out.event(CallEvent::Mark { name, played });
        }
        let heard = turn.heard(&self.output.playout, &self.queue.pace);
        for part in &turn.parts {
            self.output.playout.forget(part.utterance);
        }
        out.shared.stats.speaking.store(self.queue.front().is_some_and(|front| front.sounded), Relaxed);
        if !turn.silent {
            out.meters.turn_ended(&how);
            tracing::trace!(
                target: "antiphon::spans",
                kind = "turn",
                call = %out.shared.meta.id,
                turn = %turn.id,
                parent = parent(&turn, out).map(tracing::field::display),
                leg = out.shared.leg,
                codec = self.output.format().codec.label(),
                outcome = how.label(),
                accepted_us = age(self.stepped, turn.accepted),
                sent_ms = heard.sent_ms,
            );
            if let Some(trouble) = how.trouble() {
                let (call, sent_ms) = (&out.shared.meta.id, heard.sent_ms);
                tracing::warn!(%call, turn = %turn.id, sent_ms, reason = %trouble, "a turn is not spoken to its end");
                out.error(format!("turn `{}` is not spoken to its end: {trouble}", turn.id));
            }
            out.event(CallEvent::TurnEnded { turn: turn.id, how, heard });
        }
    }
}

impl Drop for Speaking {
    fn drop(&mut self) {
        // Not closed only when the task was dropped or panicked: the engine must not work on.
        for turn in self.queue.turns() {
            turn.epoch.raise();
        }
        if !self.closed {
            self.synthesis.note(StreamState::Closed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::machine::fixture;
    use crate::clock;

    #[test]
    fn a_caller_who_speaks_does_not_cut_off_the_tones_of_a_number() {
        let now = clock::now();
        let mut out = fixture::outbox(now);
        let mut speaking = fixture::speaking(now, &out);
        speaking.dial(now, "12", &mut out);
        assert!(!speaking.barge_in(now, Cause::Speech, false, &mut out));
        speaking.interrupt(now, Cause::Speech, &mut out);
        assert!(speaking.queue.waiting_samples() > 0, "they wait still");
        speaking.interrupt(now, Cause::Agent, &mut out);
        assert_eq!(speaking.queue.waiting_samples(), 0);
    }

    #[test]
    fn a_hold_that_failed_is_undone_and_can_be_asked_for_again() {
        let now = clock::now();
        let mut out = fixture::outbox(now);
        let mut speaking = fixture::speaking(now, &out);
        assert!(speaking.hold(now, true, false, &mut out) && speaking.pause.is_held());
        speaking.hold_failed(now, true, &mut out);
        assert!(!speaking.pause.is_held() && !out.shared.stats.held.load(Relaxed));
        assert!(speaking.hold(now, true, false, &mut out), "again");
        assert!(speaking.hold(now, false, false, &mut out));
        speaking.hold_failed(now, false, &mut out);
        assert!(speaking.pause.is_held() && speaking.hold(now, false, false, &mut out), "again");
        let told: Vec<_> = std::iter::from_fn(|| out.pop())
            .filter_map(|action| match action {
                Action::Event(CallEvent::Held { held, by_peer: false }) => Some(held),
                _ => None,
            })
            .collect();
        assert_eq!(told, [true, false, true, false, true, false]);
    }
}
