//! How text, clips and streamed audio get into the queue.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use super::speak::MAX_RETRY;
use super::{Machine, StaleStream};
use crate::audio::{RATE, from_i16};
use crate::call::event::Cause;
use crate::call::handle::{PlayRequest, SpeakError, Style, TextDelta, TurnRequest};
use crate::call::segment::Segmenter;
use crate::call::stream::{Entry, PartState, Turn};
use crate::call::{CallEvent, TurnId};
use crate::media::resample;

/// The rest of a stream that was cut off is recognised by coming without a pause. Longer than the pause
/// between two tokens, shorter than any caller's sentence that leads to a new reply.
const STALE_PAUSE: Duration = Duration::from_millis(400);

impl Machine {
    pub(super) fn has_room(&self) -> bool {
        self.stream.entries.len() < self.shared.config.max_backlog_entries
    }

    /// The backlog has counted the text already: whatever is not queued is given back here.
    pub(super) fn accept_turn(&mut self, now: Instant, request: TurnRequest) -> Result<TurnId, SpeakError> {
        let bytes = request.text.len();
        let refuse = |machine: &Self, error| {
            machine.shared.backlog.give_back(bytes);
            Err(error)
        };
        if self.ended {
            return refuse(self, SpeakError::Ended);
        }
        if self.stream.is_ending() {
            return refuse(self, SpeakError::Draining);
        }
        if !(0.25..=4.0).contains(&request.style.speed) {
            return refuse(self, SpeakError::Invalid("speed must be between 0.25 and 4".into()));
        }
        let mut texts = Vec::new();
        Segmenter::new(self.shared.config.segment.clone()).whole(&request.text, &mut texts);
        if texts.is_empty() {
            return refuse(self, SpeakError::Empty);
        }
        if request.interrupt {
            self.cancel(now, Cause::Agent, |_| false);
        }
        if !self.has_room() {
            return refuse(self, SpeakError::Busy);
        }
        self.close_stream(now);
        let id = self.begin_turn(now, request.id, request.style, request.ahead, |turn| {
            turn.bytes = bytes;
            turn.add_text(texts);
        });
        self.submit(now);
        // Refused at once and nothing of it was taken: the requester may go elsewhere with it.
        let refused = |turn: &Turn| {
            turn.id == id && turn.refusals > 0 && turn.parts.iter().all(|part| part.state == PartState::Waiting)
        };
        if self.stream.turns().any(refused) {
            let retry_after = self.retry_at.map_or(MAX_RETRY, |at| at.saturating_duration_since(now));
            self.stream.entries.retain(|entry| !matches!(entry, Entry::Turn(turn) if refused(turn)));
            self.retry_at = None;
            return refuse(self, SpeakError::Refused { retry_after, reason: "the engine has no capacity now".into() });
        }
        self.shared.stats.turns.fetch_add(1, Relaxed);
        self.event(CallEvent::TurnStarted { turn: id.clone() });
        self.update_flow();
        Ok(id)
    }

    pub(super) fn accept_text(&mut self, now: Instant, delta: TextDelta) {
        let bytes = delta.token.len();
        if self.ended || self.stream.is_ending() || self.is_stale(now, &delta) {
            self.shared.backlog.give_back(bytes);
            return;
        }
        let other = |turn: &mut Turn| delta.id.as_ref().is_some_and(|id| *id != turn.id);
        if self.stream.open().is_some_and(other) {
            self.close_stream(now);
        }
        if self.stream.open().is_none() {
            if delta.token.is_empty() {
                return;
            }
            if !self.has_room() {
                self.shared.backlog.give_back(bytes);
                return self.event(CallEvent::Error("too much is queued on this call: text was dropped".into()));
            }
            let segmenter = Segmenter::new(self.shared.config.segment.clone());
            let style = Style { speed: delta.style.speed.clamp(0.25, 4.0), ..delta.style };
            let id = self.begin_turn(now, delta.id, style, false, |turn| turn.segmenter = Some(segmenter));
            self.shared.stats.turns.fetch_add(1, Relaxed);
            self.event(CallEvent::TurnStarted { turn: id });
        }
        let Some(turn) = self.stream.open() else { return };
        turn.bytes += bytes;
        turn.written = now;
        let mut texts = Vec::new();
        if let Some(segmenter) = &mut turn.segmenter {
            segmenter.push(&delta.token, &mut texts);
        }
        turn.add_text(texts);
        if delta.last {
            self.close_stream(now);
        }
        self.update_flow();
    }

    pub(super) fn accept_clip(
        &mut self,
        now: Instant,
        request: PlayRequest,
        clip: Arc<[f32]>,
    ) -> Result<TurnId, SpeakError> {
        if self.ended {
            return Err(SpeakError::Ended);
        }
        if self.stream.is_ending() {
            return Err(SpeakError::Draining);
        }
        if !self.has_room() || self.waiting_seconds() > self.shared.config.max_clip_s {
            return Err(SpeakError::Busy);
        }
        self.close_stream(now);
        let style =
            Style { interruptible: request.interruptible, preemptible: request.preemptible, ..Style::default() };
        let id = self.begin_turn(now, request.id, style, false, |turn| turn.add_clip(clip, request.times));
        self.shared.stats.turns.fetch_add(1, Relaxed);
        self.event(CallEvent::TurnStarted { turn: id.clone() });
        Ok(id)
    }

    pub(super) fn accept_audio(&mut self, now: Instant, pcm: &[i16], rate: u32) {
        if self.ended || self.stream.is_ending() {
            return;
        }
        if !self.has_room() || self.waiting_seconds() > self.shared.config.max_clip_s {
            return self.event(CallEvent::Error("too much audio is queued on this call: some was dropped".into()));
        }
        let pcm = pcm.iter().map(|s| from_i16(*s)).collect::<Vec<_>>();
        let pcm = match resample::whole(&pcm, rate, RATE) {
            Ok(pcm) => pcm,
            Err(error) => return self.event(CallEvent::Error(format!("audio could not be converted: {error}"))),
        };
        if let Some(Entry::Turn(turn)) = self.stream.entries.back_mut()
            && turn.silent
        {
            return turn.add_pcm(pcm);
        }
        let mut turn = Turn::new(TurnId::next(), Style::default(), now, self.stream.front().is_none());
        turn.silent = true;
        turn.add_pcm(pcm);
        self.stream.add(turn, false, &mut self.playout);
    }

    /// The text of the open turn is complete.
    pub(super) fn close_stream(&mut self, _now: Instant) {
        let Some(turn) = self.stream.open() else { return };
        let mut texts = Vec::new();
        if let Some(mut segmenter) = turn.segmenter.take() {
            segmenter.finish(&mut texts);
        }
        turn.add_text(texts);
    }

    fn begin_turn(
        &mut self,
        now: Instant,
        id: Option<TurnId>,
        style: Style,
        ahead: bool,
        fill: impl FnOnce(&mut Turn),
    ) -> TurnId {
        if self.stream.turns().any(|turn| turn.style.preemptible) {
            self.cancel(now, Cause::Preempted, |turn| !turn.style.preemptible);
        }
        let id = id.unwrap_or_else(TurnId::next);
        let mut turn = Turn::new(id.clone(), style, now, self.stream.front().is_none());
        fill(&mut turn);
        self.stream.add(turn, ahead, &mut self.playout);
        // What was withdrawn is made anew under other names.
        let stream = &mut self.stream;
        self.prepared.retain(|(owner, _)| stream.part(*owner).is_some());
        id
    }

    /// Whether `delta` is the rest of a stream whose turn was cut off: with an id that is certain, without one
    /// it is what comes without a pause.
    fn is_stale(&mut self, now: Instant, delta: &TextDelta) -> bool {
        let Some(stale) = &mut self.stale else { return false };
        let same = match &delta.id {
            Some(id) => *id == stale.turn,
            None => now.saturating_duration_since(stale.latest) < STALE_PAUSE,
        };
        if !same || delta.last {
            let over = same;
            self.stale = None;
            return over;
        }
        *stale = StaleStream { turn: stale.turn.clone(), latest: now };
        true
    }

    fn waiting_seconds(&self) -> u64 {
        (self.stream.waiting_samples() / RATE as usize) as u64
    }
}
