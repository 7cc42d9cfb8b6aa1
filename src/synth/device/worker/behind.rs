//! The step that is begun and not waited for.

use std::time::{Duration, Instant};

use super::{Ran, Worker, guarded, share};
use crate::clock;
use crate::synth::{Progress, Step, SynthError, Synthesizer};

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
        self.shared.state().spent.begun(start);
        let started = guarded(|| self.synth.begin(&step))?;
        let begun = Begun { step, start, beside: Duration::ZERO };
        if started {
            self.behind = Some(begun);
            return Ok(());
        }
        self.end(begun, |synth, step, progress| synth.run(step, progress))
    }

    /// Takes what the step did that was begun.
    pub(super) fn finish(&mut self) -> Result<(), SynthError> {
        let Some(begun) = self.behind.take() else { return Ok(()) };
        self.end(begun, |synth, _, progress| synth.finish(progress))
    }

    /// Gives out what a step did, as `tell` says.
    fn end(
        &mut self,
        Begun { step, start, beside }: Begun,
        tell: impl FnOnce(&mut dyn Synthesizer, &Step, &mut Vec<Progress>) -> Result<(), SynthError>,
    ) -> Result<(), SynthError> {
        let mut progress = Vec::with_capacity(step.slots.len());
        share(guarded(|| tell(self.synth, &step, &mut progress)), &step, &mut progress)?;
        let end = clock::now();
        let took = (end - start).saturating_sub(beside);
        self.hand_out(&step, &Ran { start, end, took, behind: true }, progress);
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
