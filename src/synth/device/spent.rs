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
    /// A launched step has not ended: all time is steps' time.
    in_flight: bool,
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
        self.count(end - start, step, classes);
    }

    /// A step was launched at `now` and is not waited for.
    pub(super) fn launched(&mut self, now: Instant) {
        self.pass(now, false);
        self.in_flight = true;
    }

    /// It ended `now`; `took`: without the steps that ran meanwhile.
    pub(super) fn completed(
        &mut self,
        now: Instant,
        took: Duration,
        step: &Step,
        classes: impl Iterator<Item = Class>,
    ) {
        self.in_flight = false;
        self.until = Some(now);
        self.count(took, step, classes);
    }

    /// The device failed: what comes until its next step is not counted.
    pub(super) fn lapse(&mut self) {
        self.in_flight = false;
        self.until = None;
    }

    fn count(&mut self, took: Duration, step: &Step, classes: impl Iterator<Item = Class>) {
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
        kind.time += took;
    }

    /// Nothing ran until `now`; `idle`: because there was nothing to do.
    pub(super) fn pass(&mut self, now: Instant, idle: bool) {
        let Some(until) = self.until.replace(now).filter(|_| !self.in_flight) else { return };
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
        Spent { steps, between, idle, until: self.until, in_flight: self.in_flight }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sched::{Slot, Stage};

    #[test]
    fn a_step_in_flight_under_others_has_the_time_that_they_leave_and_an_outage_is_not_counted() {
        let start = crate::clock::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let step = |stage| Step { stage, slots: vec![Slot(0)], rounds: 1 };
        let mut spent = Spent::default();
        spent.pass(at(0), false);
        spent.launched(at(1));
        spent.ran(at(2), at(4), &step(Stage::Decode), [Class::Live].into_iter());
        spent.ran(at(5), at(6), &step(Stage::Decode), [Class::Live].into_iter());
        spent.completed(at(9), Duration::from_millis(5), &step(Stage::Flow), [Class::Batch].into_iter());
        spent.pass(at(10), false);
        let time = |spent: &Spent, kind| spent.steps[&kind].time.as_millis();
        assert_eq!((time(&spent, ("flow", "batch")), time(&spent, ("decode", "live"))), (5, 3));
        assert_eq!((spent.between.as_millis(), spent.idle.as_millis()), (2, 0));
        spent.lapse();
        spent.ran(at(90), at(91), &step(Stage::Flow), [Class::Batch].into_iter());
        assert_eq!(spent.between.as_millis(), 2);
    }

    #[test]
    fn every_moment_is_counted_once() {
        let start = crate::clock::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let step = Step { stage: Stage::Flow, slots: vec![Slot(0), Slot(1)], rounds: 1 };
        let mut spent = Spent::default();
        spent.ran(at(0), at(5), &step, [Class::Live, Class::Batch].into_iter());
        spent.ran(at(6), at(10), &step, [Class::Live].into_iter());
        let before = spent.clone();
        spent.pass(at(11), false);
        spent.pass(at(20), true);
        spent.ran(at(22), at(25), &step, [Class::Live].into_iter());
        let live = spent.steps[&("flow", "live")];
        assert_eq!((live.count, live.slots, live.time), (2, 4, Duration::from_millis(7)));
        let all = spent.steps.values().map(|steps| steps.time).sum::<Duration>() + spent.between + spent.idle;
        assert_eq!((all, spent.idle), (Duration::from_millis(25), Duration::from_millis(9)));
        let since = spent.since(&before);
        assert_eq!(since.steps.keys().copied().collect::<Vec<_>>(), [("flow", "live")]);
        assert_eq!((since.between, since.idle), (Duration::from_millis(3), Duration::from_millis(9)));
    }
}
