//! The step that is launched and not waited for.

use std::time::{Duration, Instant};

use super::{Ran, Worker, guarded, share};
use crate::clock;
use crate::synth::{Progress, Step, SynthError, Synthesizer};

/// A step that is not waited for.
pub(super) struct Launched {
    step: Step,
    start: Instant,
    /// What steps took that ran meanwhile.
    pub(super) concurrent: Duration,
}

impl Worker<'_> {
    /// Launches `step`; runs it where that is not possible.
    pub(super) fn launch(&mut self, step: Step) -> Result<(), SynthError> {
        let start = clock::now();
        self.shared.state().spent.launched(start);
        let possible = guarded(|| self.synth.launch(&step))?;
        let launched = Launched { step, start, concurrent: Duration::ZERO };
        if possible {
            self.launched = Some(launched);
            return Ok(());
        }
        self.end_launched(launched, |synth, step, progress| synth.run(step, progress))
    }

    /// Takes what the launched step did.
    pub(super) fn complete(&mut self) -> Result<(), SynthError> {
        let Some(launched) = self.launched.take() else { return Ok(()) };
        self.end_launched(launched, |synth, _, progress| synth.complete(progress))
    }

    /// Gives out what a step did, as `tell` says.
    fn end_launched(
        &mut self,
        Launched { step, start, concurrent }: Launched,
        tell: impl FnOnce(&mut dyn Synthesizer, &Step, &mut Vec<Progress>) -> Result<(), SynthError>,
    ) -> Result<(), SynthError> {
        let mut progress = Vec::with_capacity(step.slots.len());
        share(guarded(|| tell(self.synth, &step, &mut progress)), &step, &mut progress)?;
        let end = clock::now();
        let took = (end - start).saturating_sub(concurrent);
        self.hand_out(&step, &Ran { start, end, took, launched: true }, progress);
        Ok(())
    }

    /// Waits until the launched step has ended or there is something new to look at.
    pub(super) fn watch(&mut self) -> Result<(), SynthError> {
        while !guarded(|| self.synth.poll())? {
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
