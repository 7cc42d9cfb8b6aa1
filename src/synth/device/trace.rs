//! When an utterance was in which stage until its first audio: told once to whom it is spoken for, and to traces.

use std::time::{Duration, Instant};

use crate::sched::Stage;
use crate::turn::{UtteranceId, VoiceStages};

/// The stages of one utterance so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Trace {
    stages: [Option<Passage>; Stage::ALL.len()],
    /// When the language model had read what it needs for the first token, the first token was there, and the mel frames of the
    /// first audio: stages go on and take turns behind that.
    read: Option<Instant>,
    token: Option<Instant>,
    mel: Option<Instant>,
    told: bool,
}

/// Its time in one stage.
#[derive(Clone, Copy, Debug)]
struct Passage {
    began: Instant,
    ended: Instant,
    /// Device time of the steps it took part in, shared with others or not.
    busy: Duration,
    steps: u64,
}

impl Trace {
    /// A step of `stage` with it is done.
    pub(super) fn ran(&mut self, stage: Stage, began: Instant, ended: Instant) {
        if self.told {
            return;
        }
        match stage {
            Stage::Prefill if self.token.is_none() => self.read = Some(ended),
            Stage::Decode => drop(self.token.get_or_insert(ended)),
            Stage::Flow if self.stages[Stage::Vocode as usize].is_none() => self.mel = Some(ended),
            _ => {}
        }
        let passage = &mut self.stages[stage as usize];
        let passage = passage.get_or_insert(Passage { began, ended, busy: Duration::ZERO, steps: 0 });
        passage.ended = ended;
        passage.busy += ended - began;
        passage.steps += 1;
    }

    /// It lost its place on the device and begins anew: what was done of it counts as waiting.
    pub(super) fn restart(&mut self) {
        if !self.told {
            *self = Self::default();
        }
    }

    /// Its first audio is made. The stages, the first time; it was accepted at `accepted`.
    pub(super) fn tell(&mut self, utterance: UtteranceId, accepted: Instant, now: Instant) -> Option<VoiceStages> {
        if std::mem::replace(&mut self.told, true) {
            return None;
        }
        if tracing::enabled!(target: "antiphon::spans", tracing::Level::TRACE) {
            self.trace(utterance, now);
        }
        let began = self.stages.iter().flatten().map(|passage| passage.began).min()?;
        let mut from = began;
        let mut part = |to: Instant| {
            let took = to.saturating_duration_since(from);
            from = from.max(to);
            took
        };
        let (prefill, first_token) = (self.read.map(&mut part), self.token.map(&mut part));
        let (first_mel, first_pcm) = (self.mel.map(&mut part), part(now));
        let wait = began.saturating_duration_since(accepted);
        Some(VoiceStages { wait, prefill, first_token, first_mel, first_pcm })
    }

    fn trace(&self, utterance: UtteranceId, now: Instant) {
        let age = |at: Instant| now.saturating_duration_since(at).as_micros() as u64;
        for (stage, passage) in Stage::ALL.iter().zip(self.stages).filter_map(|(s, p)| Some((s, p?))) {
            tracing::trace!(
                target: "antiphon::spans",
                kind = "stage",
                %utterance,
                stage = stage.label(),
                began_us = age(passage.began),
                ended_us = age(passage.ended),
                busy_us = passage.busy.as_micros() as u64,
                steps = passage.steps,
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn the_parts_add_up_although_stages_take_turns() {
        let start = clock::now();
        let (mut trace, at) = (Trace::default(), |time: u64| start + ms(time));
        for (stage, began, ended) in [
            (Stage::Prefill, 10, 30),
            (Stage::Decode, 35, 60),
            (Stage::Decode, 60, 85),
            // More of a text that is still being written.
            (Stage::Prefill, 85, 90),
            (Stage::Flow, 90, 110),
            (Stage::Decode, 110, 120),
            (Stage::Flow, 120, 140),
            (Stage::Vocode, 140, 150),
            // Of what follows, launched before the first audio was handed over.
            (Stage::Flow, 150, 170),
        ] {
            trace.ran(stage, at(began), at(ended));
        }
        let told = trace.tell(UtteranceId(1), start, at(171)).expect("told");
        let expected = VoiceStages {
            wait: ms(10),
            prefill: Some(ms(20)),
            first_token: Some(ms(30)),
            first_mel: Some(ms(80)),
            first_pcm: ms(31),
        };
        assert_eq!(told, expected);
        assert_eq!(trace.tell(UtteranceId(1), start, at(180)), None, "once");
        // The wait of who asked earlier, and of who asked when half of it was done.
        assert_eq!(told.within(ms(180)), VoiceStages { wait: ms(19), ..expected });
        let late = VoiceStages {
            wait: Duration::ZERO,
            prefill: Some(Duration::ZERO),
            first_token: Some(Duration::ZERO),
            ..expected
        };
        assert_eq!(told.within(ms(100)), VoiceStages { first_mel: Some(ms(69)), ..late });
    }

    #[test]
    fn what_is_displaced_waits_and_a_simple_voice_has_one_stage() {
        let start = clock::now();
        let (mut trace, at) = (Trace::default(), |time: u64| start + ms(time));
        trace.ran(Stage::Prefill, at(0), at(10));
        trace.restart();
        trace.ran(Stage::Vocode, at(50), at(57));
        let told = trace.tell(UtteranceId(1), start, at(60)).expect("told");
        assert_eq!(told, VoiceStages { wait: ms(50), first_pcm: ms(10), ..VoiceStages::default() });
    }
}
