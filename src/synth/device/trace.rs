//! When an utterance was in which stage until its first audio, told once, for traces.

use std::time::{Duration, Instant};

use crate::sched::Stage;
use crate::turn::UtteranceId;

/// The stages of one utterance so far. Costs nothing while tracing is off.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Trace {
    stages: [Option<Passage>; Stage::ALL.len()],
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
        if self.told || !tracing::enabled!(target: "antiphon::spans", tracing::Level::TRACE) {
            return;
        }
        let Some(passage) = self.stages.get_mut(stage as usize) else { return };
        let passage = passage.get_or_insert(Passage { began, ended, busy: Duration::ZERO, steps: 0 });
        passage.ended = ended;
        passage.busy += ended - began;
        passage.steps += 1;
    }

    /// Its first audio is made.
    pub(super) fn tell(&mut self, utterance: UtteranceId, now: Instant) {
        if std::mem::replace(&mut self.told, true) {
            return;
        }
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
