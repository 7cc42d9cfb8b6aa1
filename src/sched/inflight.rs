//! The step that was launched and is not waited for, and what may run while it is in flight.
//!
//! Its slots are busy: nothing else is asked of them until it is complete. A job that ends meanwhile leaves its stream
//! at once, but its slot is freed, and its end told, only then.
//!
//! # Why
//! - **Only what is urgent runs concurrently**: two steps at once take longer than either alone, and two wide ones
//!   together hardly less than one after the other.
//! - **Steps that make first audio are launched as well**, so that the next new turn decodes meanwhile. Simulated with
//!   the costs of one H200, 12.5 and 37 turns of 8 s a second: first audio p95 31.7 and 44.8 ms, where only steps that
//!   make no first audio are launched 40.4 and 54.0, where none is 39.7 and 53.3; with batch 31.4, 38.3 and 36.8.
//! - **Batch work is opened beside a step** and not between two: some eighty utterances a second end and begin where batch has
//!   the device, which stood still for each. Not beside a step that makes first audio, whose next step would wait for it.
//! - **While such a step is in flight only short ones run** ([`SHORT`]): the next step of the turn that it is for waits
//!   for them.
//! - **Never the stage that is in flight**, which would need a second set of buffers. Simulated with first audio's flow beside a
//!   wide step of flow, 24 to 125 turns a second: p50 and p95 differ by chance only. That step mostly ends while the new
//!   turn decodes.

use std::time::{Duration, Instant};

use super::config::Config;
use super::job::{JobEnd, JobId};
use super::step::{Slot, Stage, Step};

/// What a step takes at most, if one round does, while one that makes first audio is in flight.
const SHORT: Duration = Duration::from_millis(1);

/// A job that is over and not yet told: what it held, how it ended, and since when the live stream whose last work it
/// was had unfinished work.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) job: JobId,
    pub(super) slot: Option<Slot>,
    pub(super) how: JobEnd,
    pub(super) since: Option<Instant>,
}

#[derive(Debug)]
struct Launched {
    step: Step,
    /// It makes first audio, or sound for a listener who is about to hear a gap.
    urgent: bool,
    /// Another step ran meanwhile.
    crossed: bool,
    /// Jobs of its slots that are over.
    ended: Vec<Ended>,
}

/// At most one launched step.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    launched: Option<Launched>,
}

impl InFlight {
    pub(super) fn launch(&mut self, step: Step, urgent: bool) {
        self.launched = Some(Launched { step, urgent, crossed: false, ended: Vec::new() });
    }

    /// The stage of the launched step, and what a round of another step may take until it is complete.
    pub(super) fn concurrent(&self, config: &Config) -> Option<(Stage, Duration)> {
        let launched = self.launched.as_ref()?;
        Some((launched.step.stage, if launched.urgent { SHORT } else { config.max_step() / 4 }))
    }

    /// Whether a step is in flight that makes first audio, or sound for a listener who is about to hear a gap.
    pub(super) fn is_urgent(&self) -> bool {
        self.launched.as_ref().is_some_and(|launched| launched.urgent)
    }

    /// Whether the launched step has `slot`.
    pub(super) fn is_busy(&self, slot: Slot) -> bool {
        self.launched.as_ref().is_some_and(|launched| launched.step.slots.contains(&slot))
    }

    /// Another step ended; whether it ran while one was in flight, so that neither took as long as it does alone.
    pub(super) fn cross(&mut self) -> bool {
        let Some(launched) = &mut self.launched else { return false };
        launched.crossed = true;
        true
    }

    /// Keeps the end of a job until its slot can be freed; gives it back if that is now.
    pub(super) fn keep(&mut self, ended: Ended) -> Option<Ended> {
        match &mut self.launched {
            Some(launched) if ended.slot.is_some_and(|slot| launched.step.slots.contains(&slot)) => {
                launched.ended.push(ended);
                None
            }
            _ => Some(ended),
        }
    }

    /// The launched step is complete: whether it had the device to itself, and the ends that were kept.
    pub(super) fn complete(&mut self) -> Option<(bool, Vec<Ended>)> {
        self.launched.take().map(|launched| (!launched.crossed, launched.ended))
    }
}
