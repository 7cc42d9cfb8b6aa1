//! Speech on its way out: text to the engine, PCM to the encoder, frames to the leg.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use super::{Action, Machine, age};
use crate::audio::{FRAME_SAMPLES, RATE};
use crate::call::CallEvent;
use crate::call::ear::to_narrow;
use crate::call::event::TurnHow;
use crate::call::info::{MediaFrame, TapDirection};
use crate::call::speech::StreamState;
use crate::call::stream::{Part, PartState, Turn};
use crate::media::leg::OutPacket;
use crate::media::playout::{Body, Departure, Frame};
use crate::media::resample::Converter;
use crate::turn::UtteranceId;

/// Refusals in a row that end a turn.
const MAX_REFUSALS: u32 = 6;
/// Bounds of the wait after a refusal.
const MIN_RETRY: Duration = Duration::from_millis(50);
pub(super) const MAX_RETRY: Duration = Duration::from_secs(2);

impl Machine {
    pub(super) fn submit(&mut self, now: Instant) {
        if self.retry_at.is_some() {
            return;
        }
        while let Some((turn, place)) = self.stream.next_to_submit() {
            let utterance = turn.utterance(place, self.stream_id, &self.shared.meta.tenant);
            let taken = if turn.fallback {
                self.speech.fallback(utterance, self.sink.clone())
            } else {
                self.speech.submit(utterance.clone(), self.sink.clone()).or_else(|refusal| {
                    // What the first engine says of when to come back counts, not what the other does.
                    self.speech.fallback(utterance, self.sink.clone()).map_err(|_| refusal)?;
                    turn.fallback = true;
                    Ok(())
                })
            };
            let part = &mut turn.parts[place];
            match taken {
                Ok(()) => {
                    part.state = PartState::Submitted;
                    part.fallback = turn.fallback;
                    part.submitted = Some(now);
                    turn.refusals = 0;
                }
                Err(refusal) => {
                    let utterance = part.utterance;
                    return self.refused(now, utterance, refusal.retry_after);
                }
            }
        }
    }

    /// A part that the engine failed at is spoken from its beginning by another voice, where there is one. What was
    /// heard of it already is heard again: the sentence is whole, and nobody can say where a broken one stopped.
    pub(super) fn rescue(&mut self, utterance: UtteranceId) -> bool {
        let Some(turn) = self.stream.turn_of(utterance) else { return false };
        // Its neighbours may have been with the engine that failed, too: each is rescued, once.
        let Some(place) = turn.parts.iter().position(|part| part.utterance == utterance && !part.fallback) else {
            return false;
        };
        let again = turn.utterance(place, self.stream_id, &self.shared.meta.tenant);
        if self.speech.fallback(again, self.sink.clone()).is_err() {
            return false;
        }
        turn.parts[place].fallback = true;
        turn.fallback = true;
        true
    }

    /// What was accepted is not lost by one refusal: it is tried again a few times, then its turn ends.
    pub(super) fn refused(&mut self, now: Instant, utterance: UtteranceId, retry_after: Duration) {
        let Some(turn) = self.stream.turn_of(utterance) else { return };
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
    pub(super) fn prepare(&mut self, now: Instant) -> bool {
        let mut pcm = Vec::with_capacity(FRAME_SAMPLES);
        if let Some(owner) = self.stream.take_frame(&mut pcm) {
            self.tail_due = true;
            self.push_frame(now, &pcm, Some(owner));
            self.prepared.push_back((owner, pcm));
            return true;
        }
        if self.tail_due && !self.stream.front().is_some_and(Turn::awaits_audio) {
            self.push_tail(now);
            return true;
        }
        false
    }

    /// One frame of silence behind speech empties the delay of codec and resampler, which hold its last
    /// milliseconds. A continuous stream does so by itself.
    pub(super) fn push_tail(&mut self, now: Instant) {
        self.tail_due = false;
        if !self.format.continuous {
            self.push_frame(now, &[0.0; FRAME_SAMPLES], None);
        }
    }

    pub(super) fn push_frame(&mut self, now: Instant, pcm: &[f32], owner: Option<UtteranceId>) {
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

    pub(super) fn depart(&mut self, now: Instant, departure: Departure) {
        self.meters.sent(&self.shared.stats, departure.late, departure.stalled.is_some());
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

    fn trace_first_audio(&mut self, now: Instant, owner: UtteranceId) {
        if !tracing::enabled!(target: "antiphon::spans", tracing::Level::TRACE) {
            return;
        }
        let Some(turn) = self.stream.turn_of(owner) else { return };
        let part = turn.parts.iter().find(|part| part.utterance == owner);
        let at = |field: fn(&Part) -> Option<Instant>| part.and_then(field).map(|at| age(now, at));
        tracing::trace!(
            target: "antiphon::spans",
            kind = "first",
            call = %self.shared.meta.id,
            turn = %turn.id,
            leg = self.shared.leg,
            codec = self.format.codec.label(),
            utterance = %owner,
            accepted_us = age(now, turn.accepted),
            submitted_us = at(|part| part.submitted),
            made_us = at(|part| part.made),
        );
    }

    fn speech_left(&mut self, now: Instant, owner: UtteranceId, anchored: Option<Instant>, underrun: Option<Duration>) {
        if let Some(at) = anchored {
            self.speech.note(self.stream_id, StreamState::Anchored { at });
        }
        let Some(turn) = self.stream.turn_of(owner) else { return };
        let id = turn.id.clone();
        if !turn.sounded {
            turn.sounded = true;
            let (after, immediate, silent) =
                (now.saturating_duration_since(turn.accepted), turn.immediate, turn.silent);
            self.shared.stats.speaking.store(true, Relaxed);
            if !silent {
                self.trace_first_audio(now, owner);
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
}
