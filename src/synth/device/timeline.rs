//! What a device did last, step by step, for somebody who looks at it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::place::Device;
use super::{DeviceStatus, Engine, Inner};
use crate::clock;
use crate::sched::{Stage, Step};
use crate::turn::Class;

/// Steps that are kept of a device: a second or two of a GPU that is full. They take some 20 kB.
const STEPS: usize = 512;
/// Looks at the slack that are kept: two minutes.
const LOOKS: usize = 480;

/// One step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRun {
    /// What it did.
    pub stage: Stage,
    /// When it began.
    pub began: Instant,
    /// From its begin to its end: one that is launched and not waited for has others within it.
    pub lasted: Duration,
    /// Rows of live utterances, and of batch ones.
    pub live: u16,
    /// See `live`.
    pub batch: u16,
    /// Tokens, or Euler steps, or chunks of each row.
    pub rounds: u32,
}

/// The latest steps, and the slack of the device's live streams every now and then. The oldest go first.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    /// Steps in the order in which they ended.
    pub steps: VecDeque<StepRun>,
    /// Seconds until the stream that is nearest to silence would be silent, and when that was so.
    pub slack: VecDeque<(Instant, f64)>,
}

impl Timeline {
    /// A step ended that had rows of these classes.
    pub(super) fn ran(
        &mut self,
        (began, ended): (Instant, Instant),
        step: &Step,
        classes: impl Iterator<Item = Class> + Clone,
    ) {
        let rows = |class| classes.clone().filter(|of| *of == class).count().try_into().unwrap_or(u16::MAX);
        let (live, batch) = (rows(Class::Live), rows(Class::Batch));
        let lasted = ended.saturating_duration_since(began);
        let run = StepRun { stage: step.stage, began, lasted, live, batch, rounds: step.rounds };
        keep(&mut self.steps, STEPS, run);
    }

    /// The least slack is so many seconds `now`.
    pub(super) fn looked(&mut self, now: Instant, slack: f64) {
        keep(&mut self.slack, LOOKS, (now, slack));
    }
}

fn keep<T>(all: &mut VecDeque<T>, most: usize, one: T) {
    if all.len() == most {
        all.pop_front();
    }
    all.push_back(one);
}

impl Engine {
    /// What device number `number` of [`Engine::status`] did last, and what it is. `None`: there is no such device. One of
    /// another machine does not tell its steps.
    pub fn timeline(&self, number: usize) -> Option<(DeviceStatus, Option<Timeline>)> {
        let devices = Inner::devices(&self.inner);
        let device = devices.values().nth(number)?;
        let timeline = match device {
            Device::Local(local) => Some(local.shared.state().timeline.clone()),
            Device::Worker(_) => None,
        };
        Some((device.status(clock::now()), timeline))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sched::Slot;

    #[test]
    fn the_latest_steps_are_kept_with_whose_rows_they_had() {
        let start = clock::now();
        let at = |n: u64| start + Duration::from_millis(n);
        let mut timeline = Timeline::default();
        for n in 0..STEPS as u64 + 3 {
            let step = Step { stage: Stage::Decode, slots: vec![Slot(0), Slot(1), Slot(2)], rounds: 2 };
            let classes = [Class::Live, Class::Batch, Class::Live];
            timeline.ran((at(10 * n), at(10 * n + 7)), &step, classes.into_iter());
            timeline.looked(at(n), 0.5);
        }
        assert_eq!((timeline.steps.len(), timeline.slack.len()), (STEPS, LOOKS));
        let lasted = Duration::from_millis(7);
        let first = StepRun { stage: Stage::Decode, began: at(30), lasted, live: 2, batch: 1, rounds: 2 };
        assert_eq!(timeline.steps[0], first);
    }
}
