//! What steps cost, learned while they run.

use std::time::Duration;

use super::step::{PerStage, Stage};

/// Width buckets, two an octave: 1, 2, 3, 4, 5-6, 7-8, 9-12, ..., 769-1024. Engines run widths much like these, and
/// a step that has to stay below some time is often best between two powers of two.
const WIDTHS: usize = 20;
/// Round buckets: 1, 2, 3-4, ..., 33-64.
const ROUNDS: usize = 7;
/// Weight of a new observation. Costs drift with context lengths, over tens of steps.
const WEIGHT: f64 = 0.1;
/// A wider step that was never seen is taken to cost this much more per bucket, by the root of two per octave:
/// optimistic (one device call is cheaper than two) but bounded, so that the first wide step teaches what it really is.
const GROWTH: f64 = 1.189_207_115_002_721;

/// Smoothed mean and mean deviation, in seconds, as in TCP's round-trip estimator (RFC 6298).
#[derive(Clone, Copy, Debug)]
struct Estimate {
    mean: f64,
    deviation: f64,
    /// From warm-up only: the first real observation replaces it.
    seed: bool,
}

impl Estimate {
    fn observe(&mut self, seconds: f64) {
        if self.seed {
            *self = Estimate { mean: seconds, deviation: 0.0, seed: false };
            return;
        }
        self.deviation += WEIGHT * ((seconds - self.mean).abs() - self.deviation);
        self.mean += WEIGHT * (seconds - self.mean);
    }
}

/// Step costs per stage, width and rounds.
#[derive(Debug)]
pub(super) struct Costs {
    table: PerStage<[[Option<Estimate>; ROUNDS]; WIDTHS]>,
}

impl Costs {
    /// Starts from the narrowest steps of the warm-up.
    pub(super) fn new(seeds: PerStage<Duration>) -> Self {
        let table = seeds.map(|seed| {
            let mut table = [[None; ROUNDS]; WIDTHS];
            table[0][0] = Some(Estimate { mean: seed.as_secs_f64(), deviation: 0.0, seed: true });
            table
        });
        Self { table }
    }

    pub(super) fn observe(&mut self, stage: Stage, width: usize, rounds: u32, took: Duration) {
        let cell = &mut self.table[stage][width_bucket(width)][bucket(rounds as usize, ROUNDS)];
        let seconds = took.as_secs_f64();
        match cell {
            Some(estimate) => estimate.observe(seconds),
            None => *cell = Some(Estimate { mean: seconds, deviation: 0.0, seed: false }),
        }
    }

    /// What such a step will take, in seconds, with a mean deviation on top.
    pub(super) fn predict(&self, stage: Stage, width: usize, rounds: u32) -> f64 {
        let table = &self.table[stage];
        let (w, r) = (width_bucket(width), bucket(rounds as usize, ROUNDS));
        let cost = |estimate: &Estimate| estimate.mean + estimate.deviation;
        if let Some(estimate) = &table[w][r] {
            return cost(estimate);
        }
        // The nearest known cell: fewer rounds at this width first (rounds are all but proportional), then
        // narrower, then wider.
        let scale = |from: usize, to: usize| f64::from(1u32 << to) / f64::from(1u32 << from);
        let at_width = |w: usize| {
            let near = (0..ROUNDS).filter(|&k| table[w][k].is_some()).min_by_key(|&k| k.abs_diff(r))?;
            table[w][near].as_ref().map(|e| cost(e) * scale(near, r))
        };
        if let Some(cost) = at_width(w) {
            return cost;
        }
        let narrower = (0..w).rev().find_map(|k| Some(at_width(k)? * GROWTH.powi((w - k) as i32)));
        narrower.or_else(|| (w + 1..WIDTHS).find_map(at_width)).unwrap_or(0.0)
    }
}

fn width_bucket(width: usize) -> usize {
    let octave = bucket(width, usize::MAX);
    let lower = octave > 1 && width <= 3 << (octave - 2);
    (2 * octave).saturating_sub(usize::from(octave > 0) + usize::from(lower)).min(WIDTHS - 1)
}

fn bucket(n: usize, buckets: usize) -> usize {
    (n.max(1).next_power_of_two().trailing_zeros() as usize).min(buckets - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: f64) -> Duration {
        Duration::from_secs_f64(ms / 1e3)
    }

    #[test]
    fn the_first_step_replaces_the_seed_and_later_ones_are_smoothed() {
        let mut costs = Costs::new(PerStage::splat(ms(1.0)));
        assert!((costs.predict(Stage::Flow, 1, 1) - 1e-3).abs() < 1e-12);
        costs.observe(Stage::Flow, 1, 1, ms(2.0));
        assert!((costs.predict(Stage::Flow, 1, 1) - 2e-3).abs() < 1e-12);
        costs.observe(Stage::Flow, 1, 1, ms(12.0));
        let predicted = costs.predict(Stage::Flow, 1, 1);
        assert!((3e-3..5e-3).contains(&predicted), "{predicted}");
    }

    #[test]
    fn widths_have_two_buckets_an_octave() {
        let buckets: Vec<usize> =
            [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 48, 49, 64, 769, 5000].map(width_bucket).into();
        assert_eq!(buckets, [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7, 10, 11, 11, 19, 19]);
    }

    #[test]
    fn unseen_widths_grow_from_the_nearest_and_are_learned() {
        let mut costs = Costs::new(PerStage::splat(ms(1.0)));
        costs.observe(Stage::Decode, 4, 1, ms(3.0));
        let wide = costs.predict(Stage::Decode, 16, 1);
        assert!((wide - 6e-3).abs() < 1e-9, "{wide}");
        costs.observe(Stage::Decode, 16, 1, ms(4.0));
        assert!((costs.predict(Stage::Decode, 16, 1) - 4e-3).abs() < 1e-12);
        assert!((costs.predict(Stage::Decode, 4, 8) - 24e-3).abs() < 1e-9, "rounds are proportional until seen");
    }
}
