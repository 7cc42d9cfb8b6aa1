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
/// A step wider than any that was seen is taken to cost this much more per bucket, by the root of two per octave:
/// optimistic (one device call is cheaper than two) but bounded, so that the first wide step teaches what it really is.
const GROWTH: f64 = 1.189_207_115_002_721;
/// How much longer or shorter than at warm-up steps may be taken to be that were not seen since.
const MOST_DRIFT: f64 = 3.0;

/// What one round of a step took at warm-up, by stage and width: what steps are taken to cost until they were seen.
///
/// # Why
/// From the narrowest steps alone nothing can be told of wide ones: of one GPU's, 64 chunks of flow cost fourteen times as much
/// as one, and 256 rows of decoding three times. A scheduler that has to guess admits and batches wrongly until it has
/// made every mistake once, in the ears of the first callers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seeds(PerStage<Vec<(usize, Duration)>>);

impl Seeds {
    /// One round of `stage` with `width` slots took so long; of several the shortest counts.
    pub fn add(&mut self, stage: Stage, width: usize, took: Duration) {
        let list = &mut self.0[stage];
        match list.iter_mut().find(|(known, _)| *known == width) {
            Some((_, shortest)) => *shortest = took.min(*shortest),
            None => list.push((width, took)),
        }
    }

    /// What was seen of `stage`.
    pub fn of(&self, stage: Stage) -> &[(usize, Duration)] {
        &self.0[stage]
    }
}

impl From<PerStage<Duration>> for Seeds {
    /// Of the narrowest steps; zero for stages that the voice lacks.
    fn from(narrowest: PerStage<Duration>) -> Self {
        Self(narrowest.map(|took| if took.is_zero() { Vec::new() } else { vec![(1, took)] }))
    }
}

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

/// What the steps of a stage took, and what the warm-up would have made of them, in seconds, both fading.
///
/// # Why
/// A warm-up speaks short texts: its chunks look back on little and its vocoder passes are short, so that a step of a call
/// takes up to twice as long at the same width. What light load shows of narrow steps holds for wide ones that nothing has
/// shown yet; without it a GPU promised to a capacity planner 516 streams where it keeps up with some 350.
#[derive(Clone, Copy, Debug, Default)]
struct Drift {
    took: f64,
    seeded: f64,
}

impl Drift {
    fn observe(&mut self, took: f64, seeded: f64) {
        self.took += WEIGHT * (took - self.took);
        self.seeded += WEIGHT * (seeded - self.seeded);
    }

    fn ratio(self) -> f64 {
        if self.seeded > 0.0 { (self.took / self.seeded).clamp(1.0 / MOST_DRIFT, MOST_DRIFT) } else { 1.0 }
    }
}

/// Step costs per stage, width and rounds.
#[derive(Debug)]
pub(super) struct Costs {
    table: PerStage<[[Option<Estimate>; ROUNDS]; WIDTHS]>,
    /// As it was after the warm-up.
    warm: PerStage<[Option<f64>; WIDTHS]>,
    drift: PerStage<Drift>,
}

impl Costs {
    /// Starts from what the warm-up took.
    pub(super) fn new(seeds: &Seeds) -> Self {
        let table = PerStage::from_fn(|stage| {
            let mut table = [[None; ROUNDS]; WIDTHS];
            for (width, took) in seeds.of(stage) {
                table[width_bucket(*width)][0] =
                    Some(Estimate { mean: took.as_secs_f64(), deviation: 0.0, seed: true });
            }
            table
        });
        let warm = PerStage::from_fn(|stage| {
            let mut warm = [None; WIDTHS];
            for (width, took) in seeds.of(stage) {
                warm[width_bucket(*width)] = Some(took.as_secs_f64());
            }
            warm
        });
        Self { table, warm, drift: PerStage::default() }
    }

    pub(super) fn observe(&mut self, stage: Stage, width: usize, rounds: u32, took: Duration) {
        let cell = &mut self.table[stage][width_bucket(width)][bucket(rounds as usize, ROUNDS)];
        let seconds = took.as_secs_f64();
        if let Some(seeded) = between(width, |w| self.warm[stage][w]) {
            self.drift[stage].observe(seconds, seeded * f64::from(rounds));
        }
        match cell {
            Some(estimate) => estimate.observe(seconds),
            None => *cell = Some(Estimate { mean: seconds, deviation: 0.0, seed: false }),
        }
    }

    /// What such a step will take, in seconds, with a mean deviation on top.
    pub(super) fn predict(&self, stage: Stage, width: usize, rounds: u32) -> f64 {
        self.of(stage, width, rounds, 1.0)
    }

    /// What such steps take in the mean, in seconds.
    pub(super) fn mean(&self, stage: Stage, width: usize, rounds: u32) -> f64 {
        self.of(stage, width, rounds, 0.0)
    }

    /// With so many mean deviations on top.
    fn of(&self, stage: Stage, width: usize, rounds: u32, deviations: f64) -> f64 {
        let table = &self.table[stage];
        let (w, r) = (width_bucket(width), bucket(rounds as usize, ROUNDS));
        let drift = self.drift[stage].ratio();
        let cost = |estimate: &Estimate| match estimate.seed {
            true => estimate.mean * drift,
            false => estimate.mean + deviations * estimate.deviation,
        };
        if let Some(estimate) = &table[w][r] {
            return cost(estimate);
        }
        // The nearest known cells: other rounds at this width first (rounds are all but proportional), then between the
        // next narrower and the next wider width.
        let scale = |from: usize, to: usize| f64::from(1u32 << to) / f64::from(1u32 << from);
        let at_width = |w: usize| {
            let near = (0..ROUNDS).filter(|&k| table[w][k].is_some()).min_by_key(|&k| k.abs_diff(r))?;
            table[w][near].as_ref().map(|e| cost(e) * scale(near, r))
        };
        between(width, at_width).unwrap_or(0.0)
    }
}

/// The cost of a step of `width` by what is `known` of buckets of widths: of its own, or on a line between the next narrower
/// and the next wider one.
fn between(width: usize, known: impl Fn(usize) -> Option<f64>) -> Option<f64> {
    let w = width_bucket(width);
    if let Some(cost) = known(w) {
        return Some(cost);
    }
    let narrower = (0..w).rev().find_map(|k| Some((k, known(k)?)));
    let wider = (w + 1..WIDTHS).find_map(|k| Some((k, known(k)?)));
    match (narrower, wider) {
        (Some((k, low)), Some((l, high))) => {
            let (from, to) = (widest(k) as f64, widest(l) as f64);
            Some(low + (high - low) * ((width as f64 - from) / (to - from)).clamp(0.0, 1.0))
        }
        (Some((k, low)), None) => Some(low * GROWTH.powi((w - k) as i32)),
        (None, wider) => wider.map(|(_, high)| high),
    }
}

fn width_bucket(width: usize) -> usize {
    let octave = bucket(width, usize::MAX);
    let lower = octave > 1 && width <= 3 << (octave - 2);
    (2 * octave).saturating_sub(usize::from(octave > 0) + usize::from(lower)).min(WIDTHS - 1)
}

/// The widest step of a bucket.
fn widest(bucket: usize) -> usize {
    if bucket.is_multiple_of(2) && bucket > 0 { 3 << (bucket / 2 - 1) } else { 1 << bucket.div_ceil(2) }
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
        let mut costs = Costs::new(&PerStage::splat(ms(1.0)).into());
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
    fn every_bucket_knows_its_widest_step() {
        for bucket in 0..WIDTHS {
            assert_eq!(width_bucket(widest(bucket)), bucket);
            assert_eq!(width_bucket(widest(bucket) + 1), (bucket + 1).min(WIDTHS - 1));
        }
    }

    #[test]
    fn between_two_widths_of_the_warm_up_costs_lie_on_a_line_until_they_are_seen() {
        let mut seeds = Seeds::default();
        for (width, took) in [(1, 0.7), (1, 0.6), (8, 1.4), (64, 8.0)] {
            seeds.add(Stage::Flow, width, ms(took));
        }
        assert_eq!(seeds.of(Stage::Flow)[0], (1, ms(0.6)), "the shortest counts");
        let mut costs = Costs::new(&seeds);
        let cost = |costs: &Costs, width| (costs.predict(Stage::Flow, width, 1) * 1e6).round();
        assert_eq!([1, 8, 64].map(|width| cost(&costs, width)), [600.0, 1_400.0, 8_000.0]);
        assert_eq!(cost(&costs, 36), 4_700.0, "half way from 8 to 64");
        assert!(cost(&costs, 128) > 8_000.0);
        assert_eq!(costs.predict(Stage::Vocode, 4, 1), 0.0, "a stage that the voice lacks");
        // A first wide step is a surprise: seeds give way to it, and what lies between follows.
        costs.observe(Stage::Flow, 32, 1, ms(5.0));
        assert_eq!(cost(&costs, 32), 5_000.0);
        assert!((3_200.0..3_400.0).contains(&cost(&costs, 20)), "{}", cost(&costs, 20));
    }

    #[test]
    fn what_narrow_steps_take_longer_than_at_warm_up_wide_ones_are_taken_to() {
        let truth = |width: usize| ms(0.4 + 0.12 * width as f64);
        let mut seeds = Seeds::default();
        for width in [1, 2, 4, 8, 16, 32, 64] {
            seeds.add(Stage::Flow, width, truth(width).mul_f64(0.6));
        }
        let mut costs = Costs::new(&seeds);
        let error = |costs: &Costs, width| costs.predict(Stage::Flow, width, 1) / truth(width).as_secs_f64();
        assert!((0.59..0.61).contains(&error(&costs, 64)), "nothing was seen yet");
        for width in [1, 2, 3, 1, 4] {
            costs.observe(Stage::Flow, width, 10, 10 * truth(width));
        }
        for width in [8, 32, 48, 64] {
            assert!((0.97..1.03).contains(&error(&costs, width)), "{width}: {}", error(&costs, width));
        }
        // One step that waited for something else changes little, and other stages nothing.
        costs.observe(Stage::Flow, 2, 10, ms(60.0));
        assert!(error(&costs, 64) < 1.9, "{}", error(&costs, 64));
        assert_eq!(costs.predict(Stage::Decode, 8, 1), 0.0);
    }

    #[test]
    fn unseen_widths_grow_from_the_nearest_and_are_learned() {
        let mut costs = Costs::new(&PerStage::splat(ms(1.0)).into());
        costs.observe(Stage::Decode, 4, 1, ms(3.0));
        let wide = costs.predict(Stage::Decode, 16, 1);
        assert!((wide - 6e-3).abs() < 1e-9, "{wide}");
        costs.observe(Stage::Decode, 16, 1, ms(4.0));
        assert!((costs.predict(Stage::Decode, 16, 1) - 4e-3).abs() < 1e-12);
        assert!((costs.predict(Stage::Decode, 4, 8) - 24e-3).abs() < 1e-9, "rounds are proportional until seen");
    }
}
