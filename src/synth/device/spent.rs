//! Where a device's time goes: by stage and by whose work it was, between steps, and in waiting for something to do.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::sched::Step;
use crate::turn::Class;

/// A device's time since its first step.
#[derive(Clone, Debug, Default)]
pub struct Spent {
    /// Steps by stage and by whose they were: `live`, `batch` or `both`.
    pub steps: BTreeMap<(&'static str, &'static str), Steps>,
    /// Between two steps: deciding, opening and closing, handing out.
    pub between: Duration,
    /// Nothing to do.
    pub idle: Duration,
    /// Until when all of the above is counted.
    until: Option<Instant>,
}

/// Steps of one kind.
#[derive(Clone, Copy, Debug, Default)]
pub struct Steps {
    /// How many.
    pub count: u64,
    /// Their slots together.
    pub slots: u64,
    /// What they took together.
    pub time: Duration,
}

impl Spent {
    /// A step ran from `start` to `end`, with slots of these classes.
    pub(super) fn ran(&mut self, start: Instant, end: Instant, step: &Step, classes: impl Iterator<Item = Class>) {
        self.pass(start, false);
        self.until = Some(end);
        let (mut live, mut batch) = (false, false);
        classes.for_each(|class| match class {
            Class::Live => live = true,
            Class::Batch => batch = true,
        });
        let whose = match (live, batch) {
            (true, true) => "both",
            (false, true) => "batch",
            _ => "live",
        };
        let kind = self.steps.entry((step.stage.label(), whose)).or_default();
        kind.count += 1;
        kind.slots += step.slots.len() as u64;
        kind.time += end - start;
    }

    /// Nothing ran until `now`; `idle`: because there was nothing to do.
    pub(super) fn pass(&mut self, now: Instant, idle: bool) {
        let Some(until) = self.until.replace(now) else { return };
        let passed = now.saturating_duration_since(until);
        *if idle { &mut self.idle } else { &mut self.between } += passed;
    }

    /// What was spent since `before`, an earlier copy.
    pub fn since(&self, before: &Spent) -> Spent {
        let mut steps = self.steps.clone();
        for (kind, old) in &before.steps {
            if let Some(new) = steps.get_mut(kind) {
                new.count -= old.count;
                new.slots -= old.slots;
                new.time -= old.time;
            }
        }
        steps.retain(|_, kind| kind.count > 0);
        let (between, idle) = (self.between - before.between, self.idle - before.idle);
        Spent { steps, between, idle, until: self.until }
    }
}
