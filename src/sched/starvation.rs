//! Batch work that live work leaves nothing: how long it has waited, and the steps it may run all the same.

use std::time::{Duration, Instant};

use super::config::Config;

/// Batch starvation. Work that could run and does not for its patience gets a step, and another after a pause that
/// keeps it to its share; until it has finished a sentence in what live work leaves.
#[derive(Debug, Default)]
pub(super) struct Starvation {
    /// Since when batch work that could run has not run.
    since: Option<Instant>,
    /// Batch work that starved may run one step from then on.
    quantum: Option<Instant>,
    /// When it was last in a step that no listener waited for.
    leisure: Option<Instant>,
}

impl Starvation {
    /// Whether batch work has waited for its patience, or for the pause after the step it was then given.
    pub(super) fn starves(&self, now: Instant, config: &Config) -> bool {
        let patience = self.since.is_some_and(|since| now >= since + config.batch_patience());
        patience || self.quantum.is_some_and(|at| now >= at)
    }

    /// Whether batch work was within `period` in a step that no listener waited for, and has no claim to one besides: the device
    /// has time to spare. That it rides in urgent steps, where it costs next to nothing, is no sign of that.
    pub(super) fn had_leisure(&self, now: Instant, period: Duration) -> bool {
        self.quantum.is_none() && self.leisure.is_some_and(|at| now < at + period)
    }

    /// Batch work is in a step that no listener waits for.
    pub(super) fn at_leisure(&mut self, now: Instant) {
        self.leisure = Some(now);
    }

    /// Whether batch work starves, or did and has not yet finished a sentence in what live work leaves.
    pub(super) fn is_owed(&self, now: Instant, config: &Config) -> bool {
        self.quantum.is_some() || self.starves(now, config)
    }

    /// Batch work that starves can run now.
    pub(super) fn give_quantum(&mut self, now: Instant) {
        self.quantum.get_or_insert(now);
    }

    /// Batch work could run and does not; whether that begins now.
    pub(super) fn left_out(&mut self, now: Instant) -> bool {
        let begins = self.since.is_none();
        self.since.get_or_insert(now);
        begins
    }

    /// A step with batch work ended; `done`: it finished an utterance.
    pub(super) fn ran(&mut self, now: Instant, took: Duration, done: bool, config: &Config) {
        // Work that was given a quantum keeps its claim; only a sentence that it finishes in what live work left
        // over settles it: one that is displaced on the way has gained nothing.
        if self.quantum.is_some_and(|at| now >= at) {
            let pause = took.as_secs_f64() / config.batch_min_share.max(1e-3);
            self.quantum = Some(now + Duration::from_secs_f64(pause));
        } else if done {
            self.quantum = None;
        }
        self.since = None;
    }

    /// There is no batch work any more, however long the last of it had waited.
    pub(super) fn over(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_step_after_the_patience_and_then_by_the_share() {
        let config = Config { batch_patience_s: 2, batch_min_share: 0.05, ..Config::default() };
        let (start, mut batch) = (crate::clock::now(), Starvation::default());
        assert!(batch.left_out(start) && !batch.left_out(start + 10 * MS), "it begins once");
        assert!(!batch.starves(start + 1_999 * MS, &config));
        let now = start + 2_000 * MS;
        assert!(batch.starves(now, &config));
        batch.give_quantum(now);
        batch.ran(now + 5 * MS, 5 * MS, false, &config);
        // 5 ms are a twentieth of 100.
        let next = now + 105 * MS;
        assert!(
            !batch.starves(next - MS, &config) && batch.is_owed(next - MS, &config) && batch.starves(next, &config)
        );
        batch.at_leisure(next);
        assert!(!batch.had_leisure(next, 250 * MS), "not in what live work leaves");
        batch.ran(next - MS, MS, true, &config);
        assert!(!batch.is_owed(next, &config), "a sentence in what live work left settles it");
        assert!(batch.had_leisure(next, 250 * MS));
    }

    #[test]
    fn steps_of_listeners_in_which_batch_rides_are_no_time_to_spare() {
        let (config, now, mut batch) = (Config::default(), crate::clock::now(), Starvation::default());
        assert!(!batch.had_leisure(now, 250 * MS), "it has not run yet");
        batch.at_leisure(now);
        assert!(batch.had_leisure(now + 249 * MS, 250 * MS));
        batch.ran(now + 240 * MS, 5 * MS, false, &config);
        assert!(!batch.had_leisure(now + 250 * MS, 250 * MS));
    }
}
