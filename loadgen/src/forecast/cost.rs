//! What speech costs on a machine of a given price, beside the published systems and an interface that is paid by text.
//!
//! A machine is paid by the hour whatever it does, so its price is divided by what it makes at the knee: calls that are
//! talked on, and characters spoken in them. That is the least that a call or a character costs; who sizes for a busy hour
//! pays the busy hour over the mean one times as much. Batch work fills what calls leave, and is not counted here.

use serde::Serialize;

use crate::forecast::predict;
use crate::run::report::{PUBLISHED, Published, RTX5090_80, RTX5090_80_PEAK, Report};

/// Seconds of a day.
const DAY: f64 = 86_400.0;
/// An S1-mini service on A10G cards, as published for one request per user in five minutes: users and cards.
pub const S1_MINI_A10G: [(u64, u64); 3] = [(1_000, 3), (10_000, 30), (50_000, 150)];
/// Its requests a minute on one card, one at a time, in batches of four, and in batches of eight, which was not published.
pub const S1_MINI_PER_MINUTE: [(u32, Option<f64>); 3] = [(1, Some(24.0)), (4, Some(72.0)), (8, None)];

/// What a gateway makes in full use within the limits.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Output {
    /// Devices of the gateway: each is paid for.
    pub devices: u32,
    /// Calls at a time.
    pub calls: f64,
    /// Characters a second, all calls together.
    pub chars_per_s: f64,
    /// Turns a second, all calls together.
    pub turns_per_s: f64,
}

/// What that costs, in the currency of the price.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Cost {
    /// Of a million characters.
    pub million_chars: f64,
    /// Of a minute of a call.
    pub call_minute: f64,
    /// Of a day of the machine.
    pub day: f64,
    /// Characters a day in full use.
    pub chars_per_day: f64,
    /// Minutes of calls a day in full use.
    pub call_minutes_per_day: f64,
    /// Turns a day in full use.
    pub turns_per_day: f64,
}

impl Output {
    /// What the knee of a report made; `None` when no level passed, or nothing was spoken.
    pub fn from_report(report: &Report) -> Option<Output> {
        let knee = report.knee.filter(|knee| knee.level > 0)?;
        let level = report.at(knee.level).filter(|level| level.seconds > 0.0 && level.chars_per_s > 0.0)?;
        Some(Output {
            devices: predict::ready(report).count().max(1) as u32,
            calls: f64::from(knee.level),
            chars_per_s: level.chars_per_s,
            turns_per_s: level.turns as f64 / level.seconds,
        })
    }

    /// At so much for an hour of one device, used for `used` of its time on average, above 0 to 1.
    pub fn cost(&self, gpu_hour: f64, used: f64) -> Cost {
        let second = gpu_hour * f64::from(self.devices) / 3_600.0;
        let per = |rate: f64| second / (rate * used);
        Cost {
            million_chars: per(self.chars_per_s) * 1e6,
            call_minute: per(self.calls) * 60.0,
            day: second * DAY,
            chars_per_day: self.chars_per_s * DAY,
            call_minutes_per_day: self.calls * DAY / 60.0,
            turns_per_day: self.turns_per_s * DAY,
        }
    }
}

impl Cost {
    /// Characters a day from which on the machine costs less than an interface at `price` for a million, and the share of
    /// its day that this is; beyond 1 it never does.
    pub fn break_even(&self, price: f64) -> (f64, f64) {
        let chars = self.day / price * 1e6;
        (chars, chars / self.chars_per_day)
    }
}

/// A million characters on the published systems at the same price for an hour: the most that each was shown to make.
pub fn published(gpu_hour: f64) -> Vec<(&'static str, f64, f64)> {
    let mut best: Vec<(&'static str, f64)> = Vec::new();
    let rates = PUBLISHED.iter().filter_map(|Published { system, chars_per_s, .. }| Some((*system, (*chars_per_s)?)));
    for (system, rate) in rates.chain([(RTX5090_80, RTX5090_80_PEAK.1)]) {
        match best.iter_mut().find(|(name, _)| *name == system) {
            Some((_, most)) => *most = most.max(rate),
            None => best.push((system, rate)),
        }
    }
    best.into_iter().map(|(system, rate)| (system, rate, gpu_hour / 3_600.0 / rate * 1e6)).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::run::report::{Knee, Level};

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-9 * b.abs().max(1.0)
    }

    #[test]
    fn a_machine_is_paid_by_what_it_makes_at_its_knee() {
        let level =
            |n: u32| Level { level: n, seconds: 10.0, turns: 300, chars_per_s: f64::from(n) * 5.0, ..Level::default() };
        let report = Report {
            devices: json!([{"state": "ready"}, {"state": "ready"}, {"state": "failed"}]),
            levels: vec![level(100), level(200), level(300)],
            knee: Some(Knee { level: 200, broken_at: Some(300) }),
            ..Report::default()
        };
        let output = Output::from_report(&report).expect("a level passed");
        assert_eq!(output, Output { devices: 2, calls: 200.0, chars_per_s: 1_000.0, turns_per_s: 30.0 });
        // Two devices at 1.8 an hour are a thousandth a second: a thousand characters, 200 seconds of calls.
        let cost = output.cost(1.8, 1.0);
        assert!(close(cost.million_chars, 1.0) && close(cost.call_minute, 0.000_3), "{cost:?}");
        assert!(
            close(cost.day, 86.4) && close(cost.chars_per_day, 86.4e6) && close(cost.call_minutes_per_day, 288_000.0)
        );
        assert!(close(output.cost(1.8, 0.25).million_chars, 4.0), "three quarters of its time are paid for nothing");
        let (chars, share) = cost.break_even(16.0);
        assert!(close(chars, 5.4e6) && close(share, 0.0625));
        assert!(cost.break_even(0.5).1 > 1.0, "an interface that is cheaper than the machine in full use");
    }

    #[test]
    fn without_a_level_that_passed_nothing_has_a_price() {
        assert_eq!(Output::from_report(&Report::default()), None);
    }

    #[test]
    fn published_systems_cost_what_their_best_level_makes() {
        let all = published(3.6);
        assert_eq!(all.iter().map(|(_, rate, _)| *rate).collect::<Vec<_>>(), [53.03, 55.0], "{all:?}");
        assert!(close(all[0].2, 1e3 / 53.03) && close(all[1].2, 1e3 / 55.0), "{all:?}");
    }
}
