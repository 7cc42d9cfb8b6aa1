//! The step that is begun and not waited for.

use std::time::{Duration, Instant};

use super::{Ran, Worker, guarded, share};
use crate::clock;
use crate::synth::{Step, SynthError};

/// A step that is not waited for.
pub(super) struct Begun {
    step: Step,
    start: Instant,
    /// What steps took that ran meanwhile.
    pub(super) beside: Duration,
}

impl Worker<'_> {
    /// Starts `step` and does not wait for it, if that is possible.
    pub(super) fn begin(&mut self, step: Step) -> Result<(), SynthError> {
        let start = clock::now();
        if !guarded(|| self.synth.begin(&step))? {
            return self.step(&step);
        }
        let mut state = self.shared.state();
        state.spent.begun(start);
        if let Some(sched) = &mut state.sched {
            sched.begun(start, step.clone());
        }
        self.behind = Some(Begun { step, start, beside: Duration::ZERO });
        Ok(())
    }

    /// Takes what the step did that was begun.
    pub(super) fn finish(&mut self) -> Result<(), SynthError> {
        let Some(Begun { step, start, beside }) = self.behind.take() else { return Ok(()) };
        let mut progress = Vec::with_capacity(step.slots.len());
        share(guarded(|| self.synth.finish(&mut progress)), &step, &mut progress)?;
        let now = clock::now();
        let took = (now - start).saturating_sub(beside);
        self.hand_out(&step, &Ran { start, end: now, took, behind: true }, progress);
        Ok(())
    }

    /// Waits until the step that was begun has ended or there is something new to look at.
    pub(super) fn watch(&mut self) -> Result<(), SynthError> {
        while !guarded(|| self.synth.has_ended())? {
            let state = self.shared.state();
            if state.poked || state.stop {
                break;
            }
            drop(state);
            std::thread::yield_now();
        }
        Ok(())
    }
}
