//! How text, clips and streamed audio get into the queue.
//!
//! Owns what is known of a stream of text whose turn was cut off while it was being written. The backlog has counted
//! text before it comes here: what is not queued is given back.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::outbox::Outbox;
use super::part::Part;
use super::queue::Entry;
use super::speaking::Speaking;
use super::speculation::Standing;
use super::turn::Turn;
use super::whole::WholeTurn;
use super::writing::Writing;
use crate::audio::{RATE, from_i16};
use crate::call::event::Cause;
use crate::call::handle::{PlayRequest, SpeakError, Style, TextDelta};
use crate::call::{CallEvent, EndReason, Interruptible, TurnId};
use crate::media::resample;
use crate::turn::SPEEDS;

/// The rest of a stream that was cut off is recognised by coming without a pause. Longer than the pause
/// between two tokens, shorter than any caller's sentence that leads to a new reply.
const STALE_PAUSE: Duration = Duration::from_millis(400);

/// Recordings of one call that are fetched at a time; the next waits until one is there.
const MAX_FETCHED: usize = 4;

/// Takes what the agent wants said.
#[derive(Debug, Default)]
pub(super) struct Intake {
    /// Text of a stream that was cut off is still arriving.
    stale: Option<StaleStream>,
}

/// The rest of a stream whose turn is over.
#[derive(Clone, Debug)]
struct StaleStream {
    turn: TurnId,
    latest: Instant,
}

impl Intake {
    /// A turn was cut off while its text was being written: the rest of it is not to be said.
    pub(super) fn cut_off(&mut self, now: Instant, turn: Option<TurnId>) {
        if let Some(turn) = turn {
            self.stale = Some(StaleStream { turn, latest: now });
        }
    }

    /// A whole turn.
    pub(super) fn turn(
        &mut self,
        now: Instant,
        whole: WholeTurn,
        speaking: &mut Speaking,
        out: &mut Outbox,
    ) -> Result<TurnId, SpeakError> {
        let bytes = whole.request.text.len();
        self.whole(now, whole, speaking, out).inspect_err(|_| out.shared.backlog.give_back(bytes))
    }

    fn whole(
        &mut self,
        now: Instant,
        WholeTurn { request, turn }: WholeTurn,
        speaking: &mut Speaking,
        out: &mut Outbox,
    ) -> Result<TurnId, SpeakError> {
        is_open(speaking)?;
        let mut turn = turn?;
        if request.interrupt {
            let cut = speaking.cancel(now, Cause::Agent, |_| false, out);
            self.cut_off(now, cut);
        }
        if !has_room(speaking, out) {
            return Err(SpeakError::Busy);
        }
        speaking.close_open(out);
        turn.accepted = now;
        speaking.synthesis.check_phonemes(&turn, out);
        speaking.synthesis.check_language(&turn, out);
        let id = self.begin(now, *turn, request.ahead, speaking, out);
        speaking.submit(now);
        // Refused at once and nothing of it was taken: the requester may go elsewhere with it.
        if !request.patient
            && let Some(retry_after) = speaking.take_back_refused(now, &id)
        {
            return Err(SpeakError::Refused { retry_after, reason: "the engine has no capacity now".into() });
        }
        told(&id, out);
        speaking.update_flow(out);
        Ok(id)
    }

    /// The next piece of a turn that is still being written.
    pub(super) fn text(&mut self, now: Instant, delta: TextDelta, speaking: &mut Speaking, out: &mut Outbox) {
        let bytes = delta.token.len();
        let standing = delta.style.speculation.map_or(Standing::Stands, |eager| speaking.speculation.standing(eager));
        if standing == Standing::Stale || is_open(speaking).is_err() || self.swallows(now, &delta) {
            return out.shared.backlog.give_back(bytes);
        }
        let other = |turn: &mut Turn| delta.id.as_ref().is_some_and(|id| *id != turn.id);
        if speaking.queue.open().is_some_and(other) {
            speaking.close_open(out);
        }
        if speaking.queue.open().is_none() {
            if delta.token.is_empty() {
                return;
            }
            if !has_room(speaking, out) {
                out.shared.backlog.give_back(bytes);
                if !delta.last {
                    // No turn begins in the middle of its text when there is room again.
                    self.cut_off(now, Some(delta.id.unwrap_or_else(TurnId::next)));
                }
                return out.error("too much is queued on this call: text was dropped".into());
            }
            let style = Style { speed: delta.style.speed.clamp(*SPEEDS.start(), *SPEEDS.end()), ..delta.style };
            let mut turn = new_turn(now, delta.id, style);
            turn.held = standing == Standing::Waits;
            turn.streams = speaking.synthesis.streams(&turn.style);
            let writing = Writing::new(&out.shared.config.segment, turn.style.stream, now);
            turn.writing = Some(writing.reading(&turn.style.lexicon));
            let id = self.begin(now, turn, false, speaking, out);
            told(&id, out);
        }
        let Some(turn) = speaking.queue.open() else { return };
        turn.bytes += bytes;
        for mistake in turn.write(now, &delta.token) {
            out.error(mistake);
        }
        if let Some(turn) = speaking.queue.turns().find(|turn| turn.is_open()) {
            speaking.synthesis.check_phonemes(turn, out);
            speaking.synthesis.check_language(turn, out);
        }
        if delta.last {
            speaking.close_open(out);
        }
        speaking.update_flow(out);
    }

    /// Recorded audio.
    pub(super) fn clip(
        &mut self,
        now: Instant,
        request: PlayRequest,
        clip: Arc<[f32]>,
        speaking: &mut Speaking,
        out: &mut Outbox,
    ) -> Result<TurnId, SpeakError> {
        let times = request.times;
        self.sound(now, request, speaking, out, |turn| turn.add_clip(clip, times))
    }

    /// Recorded audio that is being fetched: it has its place, and what comes later waits for it.
    pub(super) fn awaited(
        &mut self,
        now: Instant,
        request: PlayRequest,
        wanted: oneshot::Sender<Infallible>,
        speaking: &mut Speaking,
        out: &mut Outbox,
    ) -> Result<TurnId, SpeakError> {
        if speaking.queue.turns().flat_map(|turn| &turn.parts).filter(|part| part.is_fetched()).count() >= MAX_FETCHED {
            return Err(SpeakError::Busy);
        }
        let times = request.times;
        self.sound(now, request, speaking, out, |turn| turn.await_clip(wanted, times))
    }

    fn sound(
        &mut self,
        now: Instant,
        request: PlayRequest,
        speaking: &mut Speaking,
        out: &mut Outbox,
        add: impl FnOnce(&mut Turn),
    ) -> Result<TurnId, SpeakError> {
        has_room_for_sound(speaking, out)?;
        speaking.close_open(out);
        let PlayRequest { id, interruptible, preemptible, .. } = request;
        let style = Style { interruptible, preemptible, ..Style::default() };
        let mut turn = new_turn(now, id, style);
        add(&mut turn);
        let id = self.begin(now, turn, false, speaking, out);
        told(&id, out);
        Ok(id)
    }

    /// The next piece of streamed audio: mono samples, `rate` of them a second.
    pub(super) fn audio(
        &mut self,
        now: Instant,
        (pcm, rate): (&[i16], u32),
        interruptible: Option<Interruptible>,
        speaking: &mut Speaking,
        out: &mut Outbox,
    ) {
        if is_open(speaking).is_err() {
            return;
        }
        if !has_room(speaking, out) || speaking.waiting_seconds() > out.shared.config.max_clip_s {
            return out.error("too much audio is queued on this call: some was dropped".into());
        }
        let pcm = pcm.iter().map(|s| from_i16(*s)).collect::<Vec<_>>();
        let pcm = match resample::whole(&pcm, rate, RATE) {
            Ok(pcm) => pcm,
            Err(error) => return out.error(format!("audio could not be converted: {error}")),
        };
        if let Some(Entry::Turn(turn)) = speaking.queue.entries.back_mut()
            && turn.silent
            && turn.style.interruptible == interruptible
        {
            return turn.add_pcm(pcm);
        }
        let style = Style { interruptible, ..Style::default() };
        let mut turn = Turn::new(TurnId::next(), style, now, speaking.queue.front().is_none());
        turn.silent = true;
        turn.add_pcm(pcm);
        speaking.add(turn, false);
    }

    /// A mark after everything that is queued.
    pub(super) fn mark(&mut self, name: String, speaking: &mut Speaking, out: &mut Outbox) {
        if has_room(speaking, out) {
            speaking.queue.entries.push_back(Entry::Mark(name));
        } else {
            out.event(CallEvent::Mark { name, played: false });
        }
    }

    /// The end of the call after everything that is queued.
    pub(super) fn end(&mut self, reason: EndReason, speaking: &mut Speaking, out: &mut Outbox) {
        if !speaking.queue.is_ending() {
            speaking.close_open(out);
            speaking.queue.entries.push_back(Entry::End(reason));
        }
    }

    /// Queues a turn; the turns that later ones may cut off end.
    fn begin(
        &mut self,
        now: Instant,
        mut turn: Turn,
        ahead: bool,
        speaking: &mut Speaking,
        out: &mut Outbox,
    ) -> TurnId {
        if speaking.queue.turns().any(|turn| turn.style.preemptible) {
            let cut = speaking.cancel(now, Cause::Preempted, |turn| !turn.style.preemptible, out);
            self.cut_off(now, cut);
        }
        turn.immediate = speaking.queue.front().is_none() && !speaking.pause.is_unanswered();
        let id = turn.id.clone();
        speaking.add(turn, ahead);
        id
    }

    /// Whether `delta` is the rest of a stream whose turn was cut off: with an id that is certain, without one
    /// it is what comes without a pause.
    fn swallows(&mut self, now: Instant, delta: &TextDelta) -> bool {
        let Some(stale) = &mut self.stale else { return false };
        let same = match &delta.id {
            Some(id) => *id == stale.turn,
            None => now.saturating_duration_since(stale.latest) < STALE_PAUSE,
        };
        if same && !delta.last {
            stale.latest = now;
        } else {
            self.stale = None;
        }
        same
    }
}

fn new_turn(now: Instant, id: Option<TurnId>, style: Style) -> Turn {
    Turn::new(id.unwrap_or_else(TurnId::next), style, now, false)
}

fn is_open(speaking: &Speaking) -> Result<(), SpeakError> {
    if speaking.is_closed() {
        Err(SpeakError::Ended)
    } else if speaking.queue.is_ending() {
        Err(SpeakError::Draining)
    } else {
        Ok(())
    }
}

fn has_room(speaking: &Speaking, out: &Outbox) -> bool {
    speaking.queue.entries.len() < out.shared.config.max_backlog_entries
}

/// Whether recorded audio is taken now.
pub(super) fn has_room_for_sound(speaking: &Speaking, out: &Outbox) -> Result<(), SpeakError> {
    is_open(speaking)?;
    // There will never be room behind it: waiting for that would be waiting for ever.
    if speaking.queue.turns().flat_map(|turn| &turn.parts).any(Part::is_endless) {
        return Err(SpeakError::Invalid("a recording without end plays: clear it first".into()));
    }
    if !has_room(speaking, out) || speaking.waiting_seconds() > out.shared.config.max_clip_s {
        return Err(SpeakError::Busy);
    }
    Ok(())
}

fn told(turn: &TurnId, out: &mut Outbox) {
    out.shared.stats.turns.fetch_add(1, Relaxed);
    out.event(CallEvent::TurnStarted { turn: turn.clone() });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::machine::fixture;
    use crate::call::segment::SegmentConfig;
    use crate::call::{Refusal, Speech, StreamState, TurnRequest};
    use crate::clock;
    use crate::turn::{SpeechSink, StreamId, Utterance};

    fn delta(id: Option<&TurnId>, last: bool) -> TextDelta {
        TextDelta { id: id.cloned(), token: "word ".into(), last, style: Style::default() }
    }

    fn whole(request: TurnRequest) -> WholeTurn {
        WholeTurn::read(request, &SegmentConfig::default())
    }

    /// An engine without capacity.
    struct Full;

    impl Speech for Full {
        fn submit(&self, _utterance: Utterance, _sink: SpeechSink) -> Result<(), Refusal> {
            Err(Refusal { retry_after: Duration::from_secs(1), reason: "full".into() })
        }

        fn note(&self, _stream: StreamId, _note: StreamState) {}
    }

    #[test]
    fn a_patient_turn_waits_for_capacity_and_another_is_refused() {
        let now = clock::now();
        let mut out = fixture::outbox(now);
        let mut speaking = fixture::speaking_with(now, &out, Arc::new(Full));
        let mut intake = Intake::default();
        assert!(out.shared.backlog.take(1_000), "as the handle does");
        let refused = intake.turn(now, whole(TurnRequest::new("Hello.")), &mut speaking, &mut out);
        assert!(matches!(refused, Err(SpeakError::Refused { .. })) && speaking.queue.front().is_none());
        let patient = TurnRequest { patient: true, ..TurnRequest::new("Hello.") };
        assert!(intake.turn(now, whole(patient), &mut speaking, &mut out).is_ok());
        assert!(speaking.queue.front().is_some() && speaking.synthesis.retry_at().is_some());
    }

    #[test]
    fn a_stream_that_there_was_no_room_for_does_not_begin_in_its_middle() {
        let now = clock::now();
        for id in [Some(TurnId::next()), None] {
            let mut out = fixture::outbox(now);
            let (mut speaking, mut intake) = (fixture::speaking(now, &out), Intake::default());
            assert!(out.shared.backlog.take(1_000), "as the handle does");
            for _ in 0..out.shared.config.max_backlog_entries {
                intake.mark("m".into(), &mut speaking, &mut out);
            }
            intake.text(now, delta(id.as_ref(), false), &mut speaking, &mut out);
            speaking.queue.entries.clear();
            intake.text(now, delta(id.as_ref(), false), &mut speaking, &mut out);
            intake.text(now, delta(id.as_ref(), true), &mut speaking, &mut out);
            assert!(speaking.queue.front().is_none(), "{id:?}: the rest of what was dropped");
            intake.text(now, delta(id.as_ref(), true), &mut speaking, &mut out);
            assert!(speaking.queue.front().is_some(), "{id:?}: another");
        }
    }

    #[test]
    fn nothing_is_queued_behind_a_recording_without_end_before_it_is_cleared() {
        let now = clock::now();
        let mut out = fixture::outbox(now);
        let (mut speaking, mut intake) = (fixture::speaking(now, &out), Intake::default());
        let play =
            |times| PlayRequest { id: None, source: "a.wav".into(), times, interruptible: None, preemptible: false };
        let clip: Arc<[f32]> = vec![0.5; 480].into();
        assert!(intake.clip(now, play(0), clip.clone(), &mut speaking, &mut out).is_ok());
        assert!(matches!(has_room_for_sound(&speaking, &out), Err(SpeakError::Invalid(_))));
        let second = intake.clip(now, play(1), clip.clone(), &mut speaking, &mut out);
        assert!(matches!(second, Err(SpeakError::Invalid(why)) if why.contains("clear")));
        speaking.interrupt(now, Cause::Agent, &mut out);
        assert!(intake.clip(now, play(1), clip, &mut speaking, &mut out).is_ok());
    }

    #[test]
    fn the_rest_of_a_stream_that_was_cut_off_is_swallowed_until_it_pauses_or_ends() {
        let (now, turn, pause) = (clock::now(), TurnId::next(), STALE_PAUSE);
        let mut intake = Intake::default();
        assert!(!intake.swallows(now, &delta(None, false)), "nothing was cut off");
        intake.cut_off(now, Some(turn.clone()));
        let soon = now + pause / 2;
        assert!(intake.swallows(soon, &delta(None, false)));
        assert!(intake.swallows(soon + pause / 2, &delta(None, false)), "the pause counts from the latest piece");
        assert!(!intake.swallows(soon + pause * 2, &delta(None, false)), "after a pause it is another turn");
        assert!(!intake.swallows(soon + pause * 2, &delta(None, false)));
    }

    #[test]
    fn with_an_id_no_pause_counts_and_the_last_piece_ends_it() {
        let (now, turn, other) = (clock::now(), TurnId::next(), TurnId::next());
        let mut intake = Intake::default();
        intake.cut_off(now, Some(turn.clone()));
        let late = now + STALE_PAUSE * 10;
        assert!(intake.swallows(late, &delta(Some(&turn), false)));
        assert!(intake.swallows(late, &delta(Some(&turn), true)), "its last piece is swallowed, too");
        assert!(!intake.swallows(late, &delta(Some(&turn), false)), "then the name is free again");
        intake.cut_off(now, Some(turn.clone()));
        assert!(!intake.swallows(now, &delta(Some(&other), false)));
    }
}
