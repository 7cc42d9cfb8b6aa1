//! The step that was begun and is not waited for, and what may run beside it.
//!
//! Its slots are busy: nothing else is asked of them until it has ended. A job that ends meanwhile leaves its line at
//! once, but its slot is freed, and its end told, only then.
//!
//! # Why
//! - **Only what is urgent runs beside it**: two steps at once take longer than either alone, and a wide one loses more
//!   than a second wide one gains.
//! - **Nothing is begun while something is urgent**: first audio would pay for it.

use std::time::{Duration, Instant};

use super::select::{Candidate, FIRST};
use super::step::{Slot, Stage, Step};
use super::{Ended, Outcome, Plan, Scheduler};

/// A step that was begun.
#[derive(Debug)]
pub(super) struct Behind {
    step: Step,
    /// Something ran beside it.
    pub(super) crossed: bool,
    /// Jobs of its slots that are over.
    ended: Vec<Ended>,
    /// Bytes that these hold until then.
    pub(super) held: u64,
}

impl Behind {
    pub(super) fn has(&self, slot: Slot) -> bool {
        self.step.slots.contains(&slot)
    }
}

impl Scheduler {
    /// The step of [`Plan::Begin`] was started.
    pub fn begun(&mut self, step: Step) {
        self.behind = Some(Behind { step, crossed: false, ended: Vec::new(), held: 0 });
    }

    /// The step that was begun ended `now`; `took` is how long, without the steps that were run meanwhile. `step`: what
    /// was really run of it.
    pub fn finished(&mut self, now: Instant, took: Duration, step: &Step, outcomes: &[Outcome]) {
        let Some(behind) = self.behind.take() else { return };
        if !behind.crossed {
            self.costs.observe(step.stage, step.slots.len(), step.rounds, took);
        }
        self.account(now, took, step, outcomes);
        for (job, slot, how, since) in behind.ended {
            if let Some(slot) = slot {
                self.slots[slot.0 as usize] = None;
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

    /// How `step` is to be run.
    pub(super) fn plan_for(&self, step: Step) -> Plan {
        let can = self.limits.background && matches!(step.stage, Stage::Flow | Stage::Vocode);
        if can { Plan::Begin(step) } else { Plan::Run(step) }
    }

    /// What is urgent and need not wait for the step that was begun.
    pub(super) fn select_beside(&self, candidates: &[Candidate]) -> Option<Step> {
        let taken = self.behind.as_ref()?.step.stage;
        let urgent = || candidates.iter().filter(|c| c.rank <= FIRST && self.is_resident(c));
        let stage = urgent().map(|c| c.stage).find(|stage| *stage != taken)?;
        let budget = self.config.max_step().as_secs_f64();
        let mut slots: Vec<Slot> = Vec::new();
        for slot in urgent().filter(|c| c.stages.has(stage)).map(|c| c.slot) {
            let wider = slots.len() + 1;
            if wider > self.width(stage) || wider > 1 && self.costs.predict(stage, wider, 1) > budget {
                break;
            }
            slots.push(slot);
        }
        let rounds = self.rounds(stage, slots.len(), false);
        Some(Step { stage, slots, rounds })
    }
}
