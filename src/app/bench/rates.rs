//! `antiphon bench --turn-rates`: how many turns a second an engine begins and speaks (open loop).
//!
//! Turns arrive as a Poisson process, each on a stream of its own, whatever the engine does: what calls with short turns
//! ask of it, without a number of listeners that would bound the load. What a turn waits for is counted from the
//! instant at which it should have begun, so that a generator which is late itself hides nothing.

use std::fmt;
use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng, rngs::StdRng};
use serde::Serialize;
use tokio::task::JoinSet;

use super::{CLEAR, Plan, Share, Turn, percentile, shares, turn};
use crate::audio;
use crate::clock;
use crate::synth::device::{Engine, Spent, StreamNote};
use crate::turn::{StreamId, UtteranceEnd};

/// First audio that a caller takes for an answer at once.
const SOON: Duration = Duration::from_millis(100);
/// So long turns arrive before they are measured: longer than the turns that begin last are made for.
const WARM_UP: Duration = Duration::from_secs(4);

/// One rate.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Rate {
    /// Turns a second that arrive, on average.
    pub rate: f64,
    /// Turns that arrived in the measured time.
    pub turns: usize,
    /// First audio in milliseconds: the turn's instant to its first PCM.
    pub first_p50_ms: f64,
    /// As above.
    pub first_p95_ms: f64,
    /// As above.
    pub first_p99_ms: f64,
    /// Turns in which a listener heard a gap.
    pub stalled: usize,
    /// The length of all gaps together, in milliseconds.
    pub stalled_ms: f64,
    /// Turns refused by admission.
    pub refused: usize,
    /// Turns that failed.
    pub failed: usize,
    /// Share of the turns that sounded within 100 ms and had no gap.
    pub in_time: f64,
    /// Whether first audio is below 100 ms at the 95th percentile, and no turn stalled, failed or was refused.
    pub holds: bool,
    /// Seconds of audio of these turns per second.
    pub audio_per_second: f64,
    /// Device time of steps for each turn that was spoken, in milliseconds.
    pub device_ms: f64,
    /// Where the devices' time went while turns were measured.
    pub shares: Vec<Share>,
}

/// Measures every rate on an engine that is ready. Of `plan` what is said, how long and by whom is used.
pub async fn rates(engine: &Engine, plan: &Plan, rates: &[f64], mut each: impl FnMut(&Rate)) -> Vec<Rate> {
    let mut all = Vec::new();
    for &rate in rates {
        let measured = measure(engine, plan, rate).await;
        each(&measured);
        all.push(measured);
    }
    all
}

async fn measure(engine: &Engine, plan: &Plan, rate: f64) -> Rate {
    let begin = clock::now();
    let (from, until) = (begin + WARM_UP, begin + WARM_UP + plan.time);
    let mut random = StdRng::seed_from_u64(plan.seed ^ rate.to_bits());
    let mut tasks = JoinSet::new();
    let spent = |engine: &Engine| engine.status().into_iter().map(|device| device.spent).collect::<Vec<Spent>>();
    let mut before = None;
    let (mut at, mut number) = (begin, 0);
    loop {
        let pause = -(1.0 - random.random::<f64>()).ln() / rate.max(f64::MIN_POSITIVE);
        at += Duration::from_secs_f64(pause.min(3_600.0));
        if at >= from && before.is_none() {
            tokio::time::sleep_until(from.into()).await;
            before = Some(spent(engine));
        }
        if at >= until {
            break;
        }
        tokio::time::sleep_until(at.into()).await;
        number += 1;
        tasks.spawn(one(engine.clone(), plan.clone(), at, number));
    }
    tokio::time::sleep_until(until.into()).await;
    let (before, after) = (before.unwrap_or_default(), spent(engine));
    let mut turns = Vec::new();
    while let Some(Ok((asked, turn))) = tasks.join_next().await {
        if asked >= from {
            turns.push(turn);
        }
    }
    settle(engine).await;
    let spent: Vec<Spent> = after.iter().zip(&before).map(|(after, before)| after.since(before)).collect();
    summary(rate, plan.time, turns, &spent)
}

/// One turn on a stream of its own.
async fn one(engine: Engine, plan: Plan, asked: Instant, seed: u64) -> (Instant, Turn) {
    let stream = StreamId::next();
    let turn = turn(&engine, &plan, stream, asked, seed).await;
    engine.note(stream, StreamNote::Closed);
    (asked, turn)
}

/// Waits until nothing is left that would blur the next rate.
async fn settle(engine: &Engine) {
    let empty = async {
        while engine.status().iter().any(|device| device.load.live > 0) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    // What is left after that only blurs the next rate.
    let _ = tokio::time::timeout(CLEAR, empty).await;
}

fn summary(rate: f64, time: Duration, turns: Vec<Turn>, spent: &[Spent]) -> Rate {
    let mut first: Vec<f64> = turns.iter().filter_map(|turn| Some(turn.first?.as_secs_f64())).collect();
    let count = |which: &dyn Fn(&Turn) -> bool| turns.iter().filter(|turn| which(turn)).count();
    let refused = count(&|turn| matches!(turn.end, UtteranceEnd::Refused { .. }));
    let failed = count(&|turn| matches!(turn.end, UtteranceEnd::Failed(_)));
    let stalled = count(&|turn| !turn.gaps.is_empty());
    let in_time = count(&|turn| turn.gaps.is_empty() && turn.first.is_some_and(|first| first <= SOON));
    let first_p95 = percentile(&mut first, 0.95);
    let busy: f64 = spent.iter().flat_map(|s| s.steps.values()).map(|steps| steps.time.as_secs_f64()).sum();
    let samples: u64 = turns.iter().map(|turn| turn.samples).sum();
    Rate {
        rate,
        turns: turns.len(),
        first_p50_ms: percentile(&mut first, 0.50) * 1e3,
        first_p95_ms: first_p95 * 1e3,
        first_p99_ms: percentile(&mut first, 0.99) * 1e3,
        stalled,
        stalled_ms: turns.iter().flat_map(|turn| &turn.gaps).map(Duration::as_secs_f64).sum::<f64>() * 1e3,
        refused,
        failed,
        in_time: in_time as f64 / turns.len().max(1) as f64,
        holds: first_p95 <= SOON.as_secs_f64() && stalled + refused + failed == 0,
        audio_per_second: audio::duration_of(samples).as_secs_f64() / time.as_secs_f64(),
        device_ms: busy * 1e3 / first.len().max(1) as f64,
        shares: shares(spent),
    }
}

impl Rate {
    /// The head of the table whose rows are rates.
    pub fn header() -> String {
        format!(
            "{:>7} {:>6} {:>8} {:>8} {:>8} {:>7} {:>8} {:>6} {:>8} {:>9} {:>8}",
            "turns/s",
            "turns",
            "p50 ms",
            "p95 ms",
            "p99 ms",
            "stalled",
            "refused",
            "failed",
            "in time",
            "audio s/s",
            "ms/turn"
        )
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:>7.1} {:>6} {:>8.1} {:>8.1} {:>8.1} {:>7} {:>8} {:>6} {:>6.1} % {:>9.2} {:>8.2}  {}",
            self.rate,
            self.turns,
            self.first_p50_ms,
            self.first_p95_ms,
            self.first_p99_ms,
            self.stalled,
            self.refused,
            self.failed,
            self.in_time * 100.0,
            self.audio_per_second,
            self.device_ms,
            if self.holds { "ok" } else { "" },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spoken(first_ms: u64, gaps: &[Duration]) -> Turn {
        Turn {
            first: Some(Duration::from_millis(first_ms)),
            made: Duration::from_millis(200),
            samples: u64::from(audio::RATE),
            played: clock::now(),
            gaps: gaps.to_vec(),
            end: UtteranceEnd::Done,
        }
    }

    #[test]
    fn a_rate_holds_where_all_turns_sound_soon_and_none_stalls_or_is_refused() {
        let second = Duration::from_secs(1);
        let alike = |ms| (0..20).map(|_| spoken(ms, &[])).collect::<Vec<Turn>>();
        let good = summary(20.0, second, alike(90), &[]);
        assert!(good.holds && good.in_time == 1.0 && good.turns == 20, "{good:?}");
        assert!((good.audio_per_second - 20.0).abs() < 1e-9);
        assert!(!summary(20.0, second, alike(101), &[]).holds, "late");
        let mut turns = alike(90);
        turns[3].gaps.push(Duration::from_millis(40));
        let stalled = summary(20.0, second, turns, &[]);
        assert_eq!((stalled.holds, stalled.stalled, stalled.in_time), (false, 1, 0.95));
        let mut turns = alike(90);
        let end = UtteranceEnd::Refused { retry_after: second };
        turns.push(Turn { first: None, samples: 0, end, ..spoken(0, &[]) });
        let refused = summary(20.0, second, turns, &[]);
        assert_eq!((refused.holds, refused.refused, refused.turns), (false, 1, 21));
        assert!((refused.first_p95_ms - 90.0).abs() < 1e-9, "a refused turn has no first audio");
    }
}
