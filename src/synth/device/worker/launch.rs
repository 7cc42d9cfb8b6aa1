//! The step that is launched and not waited for.

use super::{Worker, share};
use crate::clock;
use crate::synth::device::cycle::Launched;
use crate::synth::{Progress, Step, SynthError, Synthesizer};

impl Worker<'_> {
    /// Launches `step`; runs it where that is not possible.
    pub(super) fn launch(&mut self, step: Step) -> Result<(), SynthError> {
        let start = clock::now();
        self.shared.state().spent.launched(start);
        let possible = self.shared.calls.within(|| self.synth.launch(&step))?;
        let launched = Launched::new(step, start);
        if possible {
            self.shared.state().cycle.launched(launched);
            self.shared.calls.launches(true);
            return Ok(());
        }
        self.end_launched(launched, |synth, step, progress| synth.run(step, progress))
    }

    /// Takes what the launched step did.
    pub(super) fn complete(&mut self, launched: Launched) -> Result<(), SynthError> {
        self.end_launched(launched, |synth, _, progress| synth.complete(progress))
    }

    /// Gives out what a step did, as `tell` says.
    fn end_launched(
        &mut self,
        launched: Launched,
        tell: impl FnOnce(&mut dyn Synthesizer, &Step, &mut Vec<Progress>) -> Result<(), SynthError>,
    ) -> Result<(), SynthError> {
        let step = &launched.step;
        let mut progress = Vec::with_capacity(step.slots.len());
        share(self.shared.calls.within(|| tell(self.synth, step, &mut progress)), step, &mut progress)?;
        self.shared.calls.launches(false);
        self.hand_out(step, launched.ended(clock::now()), progress);
        Ok(())
    }

    /// Waits until the launched step has ended or there is something new to look at.
    pub(super) fn watch(&mut self) -> Result<(), SynthError> {
        while !self.shared.is_poked() && !self.shared.calls.within(|| self.synth.poll())? {
            std::thread::yield_now();
        }
        Ok(())
    }
}
