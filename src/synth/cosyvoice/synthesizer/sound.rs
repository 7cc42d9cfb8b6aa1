//! The stages that make sound of tokens: run while the caller waits, or launched and completed later.

use std::collections::BTreeMap;

use super::super::backend::{Backend, Extent, Flowed, Vocoded};
use super::super::probe::Probe;
use super::{CosyVoice, Made};
use crate::synth::{Outcome, Progress, Slot, Stage, Stages, Step, SynthError};

impl<B: Backend + Probe> CosyVoice<B> {
    /// [`crate::synth::Synthesizer::launch`].
    pub(super) fn launch_sound(&mut self, step: &Step) -> Result<bool, SynthError> {
        let rounds = self.useful_rounds(step);
        let launched = match step.stage {
            Stage::Flow => self.backend.launch_flow(&step.slots, rounds)?,
            Stage::Vocode => self.backend.launch_vocode(&self.unfinished(&step.slots))?,
            Stage::Prefill | Stage::Decode => false,
        };
        if launched {
            self.launched = Some((step.clone(), rounds));
        }
        Ok(launched)
    }

    /// [`crate::synth::Synthesizer::complete`].
    pub(super) fn complete_sound(&mut self, out: &mut Vec<Progress>) -> Result<(), SynthError> {
        let Some((step, rounds)) = self.launched.take() else { return Ok(()) };
        let mut results = BTreeMap::new();
        if step.stage == Stage::Flow {
            let mut made = Vec::with_capacity(step.slots.len());
            self.backend.complete_flow(&mut made)?;
            self.take_mel(made, &mut results);
        } else {
            let mut made = Vec::with_capacity(step.slots.len());
            self.backend.complete_vocode(&mut made)?;
            self.take_pcm(made, &mut results);
        }
        self.ran = rounds;
        self.report(&step, results, out);
        Ok(())
    }

    /// Slots that have samples left to give.
    pub(super) fn unfinished(&self, slots: &[Slot]) -> Vec<Slot> {
        slots.iter().copied().filter(|slot| self.jobs.get(slot).is_some_and(|job| !job.now.finished)).collect()
    }

    pub(super) fn take_mel(&mut self, made: Vec<Flowed>, results: &mut BTreeMap<Slot, Made>) {
        for result in made {
            if let Some(job) = self.jobs.get_mut(&result.slot) {
                job.now.frames += result.frames;
                job.now.pending = result.pending;
            }
            let made = results.entry(result.slot).or_default();
            made.chunk_rounds = Some(result.windows);
            made.failed = result.failed;
        }
    }

    pub(super) fn take_pcm(&mut self, made: Vec<Vocoded>, results: &mut BTreeMap<Slot, Made>) {
        for result in made {
            let made = results.entry(result.slot).or_default();
            if let Some(job) = self.jobs.get_mut(&result.slot) {
                if !result.more {
                    job.now.vocoded = job.now.frames;
                }
                job.now.finished = result.done;
                if result.done {
                    job.before += job.samples(&self.config);
                }
            }
            made.pcm = result.pcm;
            made.failed = result.failed;
            if result.done
                && made.failed.is_none()
                && self.jobs.get(&result.slot).is_some_and(|j| !j.segments.is_empty())
            {
                made.failed = self.start_segment(result.slot).err();
            }
        }
    }

    /// What the slots of a step that has ended have to say.
    pub(super) fn report(&mut self, step: &Step, mut results: BTreeMap<Slot, Made>, out: &mut Vec<Progress>) {
        let hold_back = self.backend.hold_back();
        for &slot in &step.slots {
            let Made { mut pcm, chunk_rounds, failed } = results.remove(&slot).unwrap_or_default();
            let Some(job) = self.jobs.get_mut(&slot) else {
                let error = SynthError::Utterance("the slot is not open".into());
                out.push(Progress::new(Outcome::failed(slot, error.to_string()), pcm));
                continue;
            };
            job.level.process(&mut pcm);
            let done = failed.is_none() && job.now.finished && job.segments.is_empty();
            let current = if job.now.finished { 0 } else { job.samples(&self.config) };
            let ready = if failed.is_some() { Stages::NONE } else { job.ready(hold_back) };
            let failed = failed.map(|error| error.to_string());
            let decoded = job.before + current;
            let frames = job.now.hops.pushed() * self.config.token_mel_ratio as u32;
            let grows = self.caps.limits.grows && !done;
            let at_most = || self.backend.memory_needed(Extent { positions: 0, frames });
            let memory = if grows { self.backend.memory_when_flowed(slot).unwrap_or_else(at_most) } else { 0 };
            let outcome = Outcome { decoded, chunk_rounds, memory, done, failed, ..Outcome::ready(slot, ready) };
            out.push(Progress::new(outcome, pcm));
        }
    }
}
