//! Distributions and their summaries.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// A distribution of durations, exact to 0.1 % and to the microsecond.
#[derive(Clone, Debug)]
pub struct Spread(Histogram<u64>);

impl Default for Spread {
    fn default() -> Self {
        Spread(Histogram::new(3).expect("three digits are within 1..=5"))
    }
}

impl Spread {
    /// Counts one.
    pub fn add(&mut self, duration: Duration) {
        // It grows with what it is given; an hour is the longest that makes sense here.
        let _ = self.0.record(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX).min(3_600_000_000));
    }

    /// Counts all of another.
    pub fn merge(&mut self, other: &Spread) {
        // Both resize themselves, so adding cannot overflow a range.
        let _ = self.0.add(&other.0);
    }

    /// How many were counted.
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// The value that `percentile` (0 to 100) of all do not exceed.
    pub fn percentile(&self, percentile: f64) -> Duration {
        Duration::from_micros(self.0.value_at_quantile(percentile / 100.0))
    }

    /// So many values that stand for all of them, each for an equal share, the smallest first; none where there are none.
    pub fn shares(&self, count: u32) -> Vec<Duration> {
        let count = if self.0.is_empty() { 0 } else { count };
        (0..count).map(|n| self.percentile(100.0 * (f64::from(n) + 0.5) / f64::from(count))).collect()
    }

    /// The figures for a report, in seconds.
    pub fn summary(&self) -> Summary {
        let at = |p: f64| self.percentile(p).as_secs_f64();
        Summary {
            count: self.count(),
            mean: self.0.mean() / 1e6,
            min: if self.0.is_empty() { 0.0 } else { self.0.min() as f64 / 1e6 },
            p50: at(50.0),
            p95: at(95.0),
            p99: at(99.0),
            max: self.0.max() as f64 / 1e6,
        }
    }
}

/// What a report says about a distribution, in its unit (seconds, or a plain number).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// How many.
    pub count: u64,
    /// Mean.
    pub mean: f64,
    /// Smallest.
    pub min: f64,
    /// Median.
    pub p50: f64,
    /// 95 of 100 are not above.
    pub p95: f64,
    /// 99 of 100 are not above.
    pub p99: f64,
    /// Largest.
    pub max: f64,
}

/// A distribution of plain numbers (ratios, scores), kept as they are.
#[derive(Clone, Debug, Default)]
pub struct Numbers(Vec<f64>);

impl Numbers {
    /// Counts one; what is no number is left out.
    pub fn add(&mut self, value: f64) {
        if value.is_finite() {
            self.0.push(value);
        }
    }

    /// Counts all of another.
    pub fn merge(&mut self, other: &Numbers) {
        self.0.extend_from_slice(&other.0);
    }

    /// Squared coefficient of variation: variance over squared mean; 0 where there is none.
    pub fn spread(&self) -> f64 {
        let n = self.0.len() as f64;
        let mean = self.0.iter().sum::<f64>() / n;
        let variance = self.0.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
        if mean > 0.0 { variance / (mean * mean) } else { 0.0 }
    }

    /// The figures for a report.
    pub fn summary(&self) -> Summary {
        let mut all = self.0.clone();
        all.sort_by(f64::total_cmp);
        // Nearest rank: the smallest value that at least `p` percent do not exceed.
        let at = |p: f64| {
            let rank = (p / 100.0 * all.len() as f64).ceil().max(1.0) as usize;
            all.get(rank - 1).copied().unwrap_or(0.0)
        };
        Summary {
            count: all.len() as u64,
            mean: if all.is_empty() { 0.0 } else { all.iter().sum::<f64>() / all.len() as f64 },
            min: all.first().copied().unwrap_or(0.0),
            p50: at(50.0),
            p95: at(95.0),
            p99: at(99.0),
            max: all.last().copied().unwrap_or(0.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_the_values() {
        let (mut spread, mut numbers) = (Spread::default(), Numbers::default());
        for n in 1..=100u64 {
            spread.add(Duration::from_millis(n));
            numbers.add(n as f64);
        }
        let (a, b) = (spread.summary(), numbers.summary());
        for (seconds, value) in [(a.p50, b.p50), (a.p95, b.p95), (a.p99, b.p99), (a.max, b.max), (a.mean, b.mean)] {
            assert!((seconds * 1_000.0 - value).abs() < value * 0.002, "{seconds} {value}");
        }
        assert_eq!((b.p50, b.p95, b.p99), (50.0, 95.0, 99.0));
        // Evenly spread numbers from 1 to n: (n^2 - 1) / 12 over ((n + 1) / 2)^2.
        assert!((numbers.spread() - (9_999.0 / 12.0) / 50.5f64.powi(2)).abs() < 1e-9);
    }

    #[test]
    fn nothing_counted_is_all_zero() {
        assert_eq!(Spread::default().summary(), Summary::default());
        assert_eq!(Numbers::default().summary(), Summary::default());
        assert_eq!(Numbers::default().spread(), 0.0);
    }
}
