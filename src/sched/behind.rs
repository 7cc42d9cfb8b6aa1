//! The step that was begun and is not waited for, and what may run beside it.
//!
//! Its slots are busy: nothing else is asked of them until it has ended. A job that ends meanwhile leaves its stream at
//! once, but its slot is freed, and its end told, only then.
//!
//! # Why
//! - **Only what is urgent runs beside it**: two steps at once take longer than either alone, and two wide ones together
//!   hardly less than one after the other.
//! - **Steps that make first audio are begun as well**, so that the next new turn decodes beside them. Simulated with
//!   the costs of one H200, 12.5 and 37 turns of 8 s a second: first audio p95 31.7 and 44.8 ms, where only steps that
//!   nobody waits for are begun 40.4 and 54.0, where none is 39.7 and 53.3; beside batch 31.4, 38.3 and 36.8.
//! - **Beside such a step only short ones run** ([`BESIDE`]): the next step of the turn that it is for waits for them.

use std::time::{Duration, Instant};

use super::select::{Candidate, FIRST};
use super::step::{Slot, Stage, Step};
use super::{Ended, Outcome, Plan, Scheduler};

/// What a step takes at most, if one round does, beside one that somebody waits for.
const BESIDE: Duration = Duration::from_millis(1);

/// A step that was begun.
#[derive(Debug)]
pub(super) struct Behind {
    step: Step,
    /// Somebody waits for it.
    urgent: bool,
    /// Something ran beside it.
    pub(super) crossed: bool,
    /// Jobs of its slots that are over.
    pub(super) ended: Vec<Ended>,
    /// Bytes that these hold until then.
    pub(super) held: u64,
}

impl Behind {
    pub(super) fn has(&self, slot: Slot) -> bool {
        self.step.slots.contains(&slot)
    }
}

impl Scheduler {
    /// Answers [`Plan::Begin`]: the step ended `now`; `took` is how long it had the device, without the steps that ran
    /// meanwhile. `step`: what was really run of it.
    pub fn finished(&mut self, now: Instant, took: Duration, step: &Step, outcomes: &[Outcome]) {
        let Some(behind) = self.behind.take() else { return };
        if !behind.crossed {
            self.costs.observe(step.stage, step.slots.len(), step.rounds, took);
        }
        self.account(now, took, step, outcomes);
        for (job, slot, how, since) in behind.ended {
            if let Some(slot) = slot {
                self.slots[slot.0 as usize] = None;
                self.memory_short = false;
            }
            self.ended.push_back((job, slot, how, since));
        }
    }

    /// Whether a step that was begun has `slot`.
    pub(super) fn is_busy(&self, slot: Slot) -> bool {
        self.behind.as_ref().is_some_and(|behind| behind.has(slot))
    }

    /// Tells of a job that is over, as soon as its slot can be freed.
    pub(super) fn tell(&mut self, ended: Ended) {
        match &mut self.behind {
            Some(behind) if ended.1.is_some_and(|slot| behind.has(slot)) => behind.ended.push(ended),
            _ => self.ended.push_back(ended),
        }
    }

    /// How `step` is to be run; `urgent`: somebody waits for it.
    pub(super) fn plan_for(&mut self, step: Step, urgent: bool) -> Plan {
        if !self.limits.background || !matches!(step.stage, Stage::Flow | Stage::Vocode) {
            return Plan::Run(step);
        }
        self.behind = Some(Behind { step: step.clone(), urgent, crossed: false, ended: Vec::new(), held: 0 });
        Plan::Begin(step)
    }

    /// What is urgent and need not wait for the step that was begun; candidates come the most urgent first.
    pub(super) fn select_beside(&mut self, now: Instant, candidates: &[Candidate]) -> Option<Step> {
        let behind = self.behind.as_ref()?;
        let urgent = &candidates[..candidates.partition_point(|c| c.rank <= FIRST)];
        let head = urgent.iter().find(|c| c.stage != behind.step.stage)?;
        let limit = if behind.urgent { BESIDE } else { self.config.max_step() / 4 };
        let members = self.live_members(now, head, urgent);
        let rounds = self.rounds_within(head.stage, members.len(), limit);
        Some(Step { stage: head.stage, slots: self.resumed(&members), rounds })
    }
}

#[cfg(test)]
mod tests;
