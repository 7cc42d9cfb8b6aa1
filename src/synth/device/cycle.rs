//! The loop of a device without the device: what is done next, and how long each step had the device.
//!
//! It takes `now` and owns no I/O. The device thread does with a [`Synthesizer`](crate::synth::Synthesizer) what it says; the
//! simulator does it with recorded costs, with this scheduler or another, so that both run the same loop.
//!
//! Contract: do what [`Cycle::next`] says before the next call, and answer [`Plan::Open`], [`Plan::Run`] and [`Plan::Launch`] as
//! the scheduler asks. [`Cycle::accepted`] and [`Cycle::written`] may be called at any time in between.
//!
//! # Why
//! - **A launched step that has ended comes first**: what follows from it may be more urgent than all that waits.
//! - **New utterances and new text come before the next plan**, and between two steps, when nothing else uses the voice: what the
//!   scheduler does not know of it cannot plan for.

use std::time::{Duration, Instant};

use crate::sched::{JobEnd, JobId, Plan, Slot, Step};

/// The loop of one device, from the loading of its voice until it fails or stops.
#[derive(Debug, Default)]
pub struct Cycle {
    /// Accepted, and the voice was not asked for their need of memory yet.
    fresh: Vec<JobId>,
    /// There is text of these that the voice was not given.
    written: Vec<JobId>,
    launched: Option<Launched>,
}

/// What is done next.
#[derive(Debug, PartialEq, Eq)]
pub enum Task {
    /// Take what the launched step did, and say it by [`Launched::ended`] and the scheduler's `complete`.
    Complete(Launched),
    /// Ask the voice what memory these need: the scheduler's `sized`.
    Size(Vec<JobId>),
    /// Give the voice what was written of those of these that are open: the scheduler's `fed`.
    Feed(Vec<JobId>),
    /// [`Plan::Open`], which gives the voice all text that there is: the scheduler's `opened`, and `fed`.
    Open {
        /// See [`Plan::Open`].
        slot: Slot,
        /// See [`Plan::Open`].
        job: JobId,
    },
    /// [`Plan::Displace`].
    Displace {
        /// See [`Plan::Displace`].
        slot: Slot,
        /// See [`Plan::Displace`].
        job: JobId,
    },
    /// [`Plan::Park`].
    Park {
        /// See [`Plan::Park`].
        slot: Slot,
        /// See [`Plan::Park`].
        job: JobId,
    },
    /// [`Plan::End`].
    End {
        /// See [`Plan::End`].
        job: JobId,
        /// See [`Plan::End`].
        slot: Option<Slot>,
        /// See [`Plan::End`].
        how: JobEnd,
        /// See [`Plan::End`].
        holding: Option<Duration>,
    },
    /// Run the step to its end, and say so by [`Cycle::ran`] and the scheduler's `record`.
    Run(Step),
    /// Launch the step, and say so by [`Cycle::launched`]; where that is not possible run it, and go on as with
    /// [`Task::Complete`].
    Launch(Step),
    /// Nothing runs beside the launched step: wait until it has ended, or something is new.
    Watch,
    /// Wait until something is new.
    Sleep {
        /// At the latest until then, if anything is to be done then.
        until: Option<Instant>,
    },
}

/// A step that was launched and is not waited for.
#[derive(Debug, PartialEq, Eq)]
pub struct Launched {
    /// What runs.
    pub step: Step,
    start: Instant,
    /// What steps took that ran meanwhile.
    concurrent: Duration,
}

/// A step that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ran {
    /// When it began.
    pub start: Instant,
    /// When its end was seen.
    pub end: Instant,
    /// How long it had the device: without steps that ran meanwhile.
    pub took: Duration,
    /// It was launched and not waited for: the scheduler's `complete` is told, not its `record`.
    pub launched: bool,
}

impl Cycle {
    /// The scheduler took `job` on.
    pub fn accepted(&mut self, job: JobId) {
        self.fresh.push(job);
    }

    /// The text of `job` goes on, or has ended.
    pub fn written(&mut self, job: JobId) {
        if !self.written.contains(&job) {
            self.written.push(job);
        }
    }

    /// Whether a step was launched and is not completed.
    pub fn is_in_flight(&self) -> bool {
        self.launched.is_some()
    }

    /// What to do at `now`; `ended`: the launched step has. `plan` asks the scheduler.
    pub fn next(&mut self, now: Instant, ended: bool, plan: impl FnOnce(Instant) -> Plan) -> Task {
        if let Some(launched) = self.launched.take_if(|_| ended) {
            return Task::Complete(launched);
        }
        if !self.fresh.is_empty() {
            return Task::Size(std::mem::take(&mut self.fresh));
        }
        if !self.written.is_empty() {
            return Task::Feed(std::mem::take(&mut self.written));
        }
        match plan(now) {
            Plan::Open { slot, job } => Task::Open { slot, job },
            Plan::Displace { slot, job } => Task::Displace { slot, job },
            Plan::Park { slot, job } => Task::Park { slot, job },
            Plan::End { job, slot, how, holding } => Task::End { job, slot, how, holding },
            Plan::Run(step) => Task::Run(step),
            Plan::Launch(step) => Task::Launch(step),
            Plan::Idle { .. } if self.is_in_flight() => Task::Watch,
            Plan::Idle { until } => Task::Sleep { until },
        }
    }

    /// A step ran from `start` to `end`: a launched one did not have the device meanwhile.
    pub fn ran(&mut self, start: Instant, end: Instant) -> Ran {
        let took = end - start;
        if let Some(launched) = &mut self.launched {
            launched.concurrent += took;
        }
        Ran { start, end, took, launched: false }
    }

    /// A step is in flight.
    pub fn launched(&mut self, launched: Launched) {
        self.launched = Some(launched);
    }
}

impl Launched {
    /// `step` was launched at `start`.
    pub fn new(step: Step, start: Instant) -> Self {
        Self { step, start, concurrent: Duration::ZERO }
    }

    /// It ended at `end`.
    pub fn ended(&self, end: Instant) -> Ran {
        let took = (end - self.start).saturating_sub(self.concurrent);
        Ran { start: self.start, end, took, launched: true }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;
    use crate::sched::Stage;

    fn step(stage: Stage) -> Step {
        Step { stage, slots: vec![Slot(0)], rounds: 1 }
    }

    fn unasked(_: Instant) -> Plan {
        panic!("the scheduler is asked too early")
    }

    #[test]
    fn what_is_new_comes_before_the_next_plan_and_what_has_ended_before_both() {
        let (now, mut cycle) = (clock::now(), Cycle::default());
        let launched = || Launched::new(step(Stage::Flow), now);
        cycle.launched(launched());
        cycle.accepted(JobId(1));
        cycle.accepted(JobId(2));
        cycle.written(JobId(1));
        cycle.written(JobId(1));
        assert_eq!(cycle.next(now, true, unasked), Task::Complete(launched()));
        assert_eq!(cycle.next(now, true, unasked), Task::Size(vec![JobId(1), JobId(2)]), "it is completed once");
        assert_eq!(cycle.next(now, false, unasked), Task::Feed(vec![JobId(1)]), "each is given what there is once");
        let run = step(Stage::Decode);
        assert_eq!(cycle.next(now, false, |_| Plan::Run(run.clone())), Task::Run(run));
    }

    #[test]
    fn nothing_to_do_beside_a_step_in_flight_is_no_sleep() {
        let (now, mut cycle) = (clock::now(), Cycle::default());
        let idle = |_| Plan::Idle { until: Some(now) };
        assert_eq!(cycle.next(now, false, idle), Task::Sleep { until: Some(now) });
        cycle.launched(Launched::new(step(Stage::Flow), now));
        assert_eq!(cycle.next(now, false, idle), Task::Watch);
    }

    #[test]
    fn a_launched_step_took_what_the_steps_leave_that_ran_meanwhile() {
        let start = clock::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut cycle = Cycle::default();
        let alone = cycle.ran(at(0), at(3));
        assert_eq!((alone.took, alone.launched), (Duration::from_millis(3), false));
        cycle.launched(Launched::new(step(Stage::Flow), at(3)));
        cycle.ran(at(4), at(6));
        assert_eq!(cycle.ran(at(7), at(8)).took, Duration::from_millis(1));
        let Task::Complete(launched) = cycle.next(at(10), true, unasked) else { panic!("it has ended") };
        let ran = launched.ended(at(10));
        assert_eq!(ran, Ran { start: at(3), end: at(10), took: Duration::from_millis(4), launched: true });
    }
}
