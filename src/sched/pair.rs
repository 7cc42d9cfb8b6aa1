//! Two stages at once: a decode step of some slots beside a flow or vocoder step of others, for devices that can.
//!
//! Only while nobody waits for first audio or is about to run dry: their steps are alone on the device. Both steps are
//! planned together and reported together, so between any two plans nothing runs, as ever.
//!
//! # Why
//! - **Decoding beside the rest**: a decode round waits for its weights from memory and for its launches, narrow or
//!   wide; flow and vocoder wait for arithmetic. A line that decodes its next chunk by itself, beside batch work that
//!   flows, costs that work next to nothing; one after the other, its rounds are time that nobody else has.
//! - **Together to the end, not each for itself**: there is nothing in flight while a plan is made, so cancelling,
//!   closing and displacing need not wait for anything, and a new turn waits for one step. What is lost is the
//!   difference of the two lengths, and rounds are chosen to make that small.

use std::time::Instant;

use super::Scheduler;
use super::select::Candidate;
use super::step::{Slot, Stage, Step};

impl Scheduler {
    /// What runs beside `step`: its stage, slots and rounds, as long as both take no longer together than a batch step
    /// may, or than `step` alone does if that is more.
    pub(super) fn partner(&self, now: Instant, step: &Step, candidates: &[Candidate]) -> Option<Step> {
        let others = candidates.iter().filter(|c| !step.slots.contains(&c.slot) && self.is_resident(c));
        let stages: &[Stage] = match step.stage {
            Stage::Prefill => return None,
            Stage::Decode => &[Stage::Flow, Stage::Vocode],
            Stage::Flow | Stage::Vocode => &[Stage::Decode],
        };
        let stage = self.fullest(stages, others.clone())?;
        let first = self.costs.predict(step.stage, step.slots.len(), step.rounds);
        let limit = self.config.batch_step().as_secs_f64().max(first).min(self.room(now, candidates));
        let fits = |width: usize, rounds: u32| {
            let seconds = self.costs.predict(stage, width, rounds);
            // Beside a longer one the shorter is all but free; where they are alike it is what they share that counts.
            self.costs.both(first, seconds) <= limit.max(first * SPARE)
        };
        let mut slots: Vec<Slot> = Vec::new();
        for other in others.filter(|c| c.stages.has(stage)).take(self.width(stage)) {
            if !fits(slots.len() + 1, 1) {
                break;
            }
            slots.push(other.slot);
        }
        if slots.is_empty() {
            return None;
        }
        let most = self.limits.rounds[stage as usize].max(1);
        let mut rounds = 1;
        while rounds * 2 <= most
            && self.costs.predict(stage, slots.len(), rounds * 2) <= first
            && fits(slots.len(), rounds * 2)
        {
            rounds *= 2;
        }
        Some(Step { stage, slots, rounds })
    }
}

/// By what a partner may lengthen a step that is at its limit already.
const SPARE: f64 = 1.15;
