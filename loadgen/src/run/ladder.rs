//! The ladder: one load after the other, each heavier, and the search for the knee where the gateway ceases to be
//! good: the listed levels, on by doubling until one fails, then bisection between the last good and the first bad.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::caller::call::{CallError, Leg};
use crate::clock;
use crate::run::load::{self, Arrivals, Behaviour, Cycles, Load, Progress};
use crate::run::report::{Knee, Level, Limits, Report};
use crate::turns::corpus::Text;
use crate::turns::exchange::{Exchange, Plan, Turn};
use crate::turns::stats::Numbers;
use crate::under_test::process::Spawned;

/// Calls that measure at once how long an open loop's calls take, where the gateway takes so many.
const FIRST_CALLS: usize = 4;
/// Texts that they speak at most, all together. Three drawn at random had made calls 1.4 times as long as they were, and so levels 1.4
/// times as high as the calls at a time that they stood for.
const FIRST_TEXTS: usize = 16;

/// The levels of the published tables.
pub const LEVELS: [u32; 9] = [4, 8, 12, 16, 20, 24, 32, 40, 48];

/// How the ladder is climbed.
#[derive(Clone)]
pub struct Options {
    /// Levels to measure in any case.
    pub levels: Vec<u32>,
    /// No higher than this.
    pub most: u32,
    /// How long each level is measured.
    pub duration: Duration,
    /// Open loop: calls arrive as a Poisson process instead of being held.
    pub open_loop: bool,
    /// Open loop: calls per second for each unit of level; measured by a few calls when `None`.
    pub rate: Option<f64>,
    /// Turns of a call in the open loop.
    pub turns: RangeInclusive<u32>,
    /// Kinds of calls and their weights.
    pub legs: Vec<(Leg, f64)>,
    /// What is spoken.
    pub texts: Vec<&'static Text>,
    /// Between turns, seconds.
    pub think: (f64, f64),
    /// What callers do.
    pub behaviour: Behaviour,
    /// What passing means.
    pub limits: Limits,
    /// Draws texts and pauses.
    pub seed: u64,
    /// One turn in so many is compared sample by sample.
    pub sampled: u64,
    /// Whether to look for the knee beyond and between the listed levels.
    pub find_knee: bool,
    /// Cancelled: the climb ends at once, and the report has what was measured until then.
    pub stop: CancellationToken,
}

/// What a report that was cut short says of it.
pub const STOPPED: &str = "it was stopped by a signal";

/// Decides what level is next. A machine: results in, levels out.
#[derive(Clone, Debug)]
pub struct Search {
    listed: Vec<u32>,
    most: u32,
    find_knee: bool,
    results: Vec<(u32, bool)>,
}

impl Search {
    /// Begins with the listed levels, in order.
    pub fn new(mut listed: Vec<u32>, most: u32, find_knee: bool) -> Search {
        listed.retain(|l| *l > 0);
        listed.sort_unstable();
        listed.dedup();
        Search { listed, most, find_knee, results: Vec::new() }
    }

    /// The level to measure next; `None` when the knee is found.
    pub fn next(&self) -> Option<u32> {
        let tried = |level: u32| self.results.iter().any(|(l, _)| *l == level);
        // Beyond two failures in a row, listed levels only hurt.
        let in_a_row = self.results.iter().rev().take_while(|(_, pass)| !pass).count();
        let last_listed = self.results.iter().filter(|(l, _)| self.listed.contains(l)).count();
        if in_a_row < 2
            && let Some(level) = self.listed.get(last_listed)
        {
            return Some(*level);
        }
        if !self.find_knee {
            return None;
        }
        let knee = self.knee();
        match knee.broken_at {
            None => {
                let next = knee.level.saturating_mul(2).clamp(1, self.most.max(1));
                (!tried(next) && next > knee.level).then_some(next)
            }
            Some(bad) => {
                let apart = bad.saturating_sub(knee.level);
                // Within a tenth is as fine as repeated measurements agree.
                if apart <= 1.max(knee.level / 10) {
                    return None;
                }
                let next = knee.level + apart / 2;
                (!tried(next) && next > 0).then_some(next)
            }
        }
    }

    /// Takes the result of a level.
    pub fn record(&mut self, level: u32, pass: bool) {
        self.results.push((level, pass));
    }

    /// The knee as far as it is known: the highest level below every failure.
    pub fn knee(&self) -> Knee {
        let broken_at = self.results.iter().filter(|(_, pass)| !pass).map(|(l, _)| *l).min();
        let good = self.results.iter().filter(|(l, pass)| *pass && broken_at.is_none_or(|b| *l < b));
        Knee { level: good.map(|(l, _)| *l).max().unwrap_or(0), broken_at }
    }
}

/// Climbs the ladder into `report`. `watch` is told of each level as it goes and once more when it is done.
pub async fn climb(
    plan: Arc<Plan>,
    options: &Options,
    spawned: &mut Option<Spawned>,
    pid: Option<u32>,
    report: &mut Report,
    mut watch: impl FnMut(u32, &Progress, Option<&Level>),
) {
    let rate = tokio::select! {
        rate = arrival_rate(&plan, options) => rate,
        () = options.stop.cancelled() => {
            report.ended_early = Some(format!("{STOPPED} before the first level"));
            return;
        }
    };
    let rate = match rate {
        Ok(rate) => rate,
        Err(error) => {
            report.ended_early = Some(format!("the first call failed: {error}"));
            return;
        }
    };
    // As long as a call: then as many end as begin.
    let warm_up = if rate > 0.0 { Duration::from_secs_f64((1.0 / rate).min(600.0)) } else { Duration::ZERO };
    let mut search = Search::new(options.levels.clone(), options.most, options.find_knee);
    let mut turns: Vec<(u32, Vec<Turn>)> = Vec::new();
    let mut cycles = Cycles::default();
    while let Some(number) = search.next() {
        // Callers of a closed loop begin over as long as the longest turn takes, and as long as that is to be measured.
        let longest = if options.open_loop { Duration::ZERO } else { cycles.longest() };
        let duration = (options.duration + warm_up).max(2 * longest);
        let arrivals = match options.open_loop {
            true => {
                let calls = rate * f64::from(number) * duration.as_secs_f64();
                Arrivals::Counted(calls.round().max(1.0) as u64)
            }
            false => Arrivals::Closed(number),
        };
        let load = Load {
            says: Vec::new(),
            arrivals,
            duration,
            warm_up,
            cycles: cycles.clone(),
            legs: options.legs.clone(),
            turns: options.open_loop.then(|| options.turns.clone()),
            think: options.think,
            texts: options.texts.clone(),
            behaviour: options.behaviour.clone(),
            // The same random samples at every level: what differs between them is the load and not luck.
            seed: options.seed,
            most: number.saturating_mul(4).saturating_add(50),
            sampled: options.sampled,
            stop: options.stop.clone(),
        };
        let (mut level, kept) = load::run(plan.clone(), load, pid, |p| watch(number, p, None)).await;
        level.level = number;
        if level.turns > 0 {
            cycles = Cycles::of(&level.service_shares, options.think, level.cycle.as_secs_f64());
        }
        if level.incomplete {
            report.ended_early = Some(format!("{STOPPED} at level {number}"));
        }
        level.broken = options.limits.broken(&level);
        watch(number, &Progress { done: 1.0, turns: level.turns, ..Progress::default() }, Some(&level));
        let stopped = level.incomplete;
        if !stopped {
            search.record(number, level.broken.is_empty());
        }
        report.levels.push(level);
        turns.push((number, kept));
        if stopped {
            break;
        }
        if let Some(why) = died(&plan, spawned).await {
            report.ended_early = Some(format!("{why} at level {number}"));
            break;
        }
    }
    report.levels.sort_by_key(|l| l.level);
    let knee = search.knee();
    report.knee = (!search.results.is_empty()).then_some(knee);
    let at_knee = turns.iter().find(|(l, _)| *l == knee.level).or(turns.first());
    report.waterfall = at_knee.and_then(|(_, kept)| typical(kept));
}

/// The waterfall of the turn with the median first audio.
pub fn typical(turns: &[Turn]) -> Option<crate::turns::exchange::Waterfall> {
    let mut good: Vec<&Turn> = turns.iter().filter(|t| t.fault.is_none() && t.first_audio.is_some()).collect();
    good.sort_by_key(|t| t.first_audio);
    good.get(good.len() / 2).map(|t| t.waterfall.clone())
}

/// Why the gateway is taken to be dead, if it is.
pub async fn died(plan: &Plan, spawned: &mut Option<Spawned>) -> Option<String> {
    if let Some(spawned) = spawned
        && let Some(status) = spawned.exited()
    {
        return Some(format!("the gateway died ({status}): {}", spawned.last_words()));
    }
    let gateway = plan.gateway.as_ref()?;
    match gateway.ready().await {
        // A gateway that only answers late is overloaded, not dead.
        Err(CallError::Http(error)) if error.is_connect() => {
            Some(format!("the gateway cannot be reached any more ({error})"))
        }
        _ => None,
    }
}

/// Calls per second for each unit of level, so that the level is the mean number of calls at a time if the gateway
/// keeps up: one over how long a call takes by itself.
///
/// # Errors
/// Why no call could be opened.
async fn arrival_rate(plan: &Arc<Plan>, options: &Options) -> Result<f64, CallError> {
    if !options.open_loop {
        return Ok(0.0);
    }
    if let Some(rate) = options.rate {
        return Ok(rate);
    }
    let texts = Arc::new(of_all_lengths(&options.texts));
    let next = Arc::new(AtomicUsize::new(0));
    let mut callers = JoinSet::new();
    for n in 0..FIRST_CALLS.min(texts.len().max(1)) {
        let leg = options.legs.get(n % options.legs.len().max(1)).map_or(Leg::Sip, |(leg, _)| *leg);
        callers.spawn(first_call(plan.clone(), leg, texts.clone(), next.clone()));
    }
    let (mut setups, mut turns, mut failed) = (Numbers::default(), Numbers::default(), None);
    while let Some(call) = callers.join_next().await {
        match call {
            Ok(Ok((setup, took))) => {
                setups.add(setup.as_secs_f64());
                took.iter().for_each(|turn| turns.add(turn.as_secs_f64()));
            }
            Ok(Err(error)) => failed = Some(error),
            Err(_) => {}
        }
    }
    let (setup, turn) = (setups.summary(), turns.summary());
    if let Some(error) = failed.filter(|_| setup.count == 0) {
        return Err(error);
    }
    let said = f64::from(*options.turns.start() + *options.turns.end()) / 2.0;
    let think = (options.think.0 + options.think.1) / 2.0;
    Ok(1.0 / (setup.mean + said * (turn.mean + think)).max(0.1))
}

/// Speaks what is left of `texts` on a call; gives how long it took to open, and each turn.
async fn first_call(
    plan: Arc<Plan>,
    leg: Leg,
    texts: Arc<Vec<&'static Text>>,
    next: Arc<AtomicUsize>,
) -> Result<(Duration, Vec<Duration>), CallError> {
    let start = clock::now();
    let (mut exchange, _) = Exchange::open(plan, leg).await?;
    let setup = clock::now() - start;
    let mut took = Vec::new();
    while let Some(text) = texts.get(next.fetch_add(1, Ordering::Relaxed)) {
        let start = clock::now();
        exchange.turn(text.text, None).await;
        took.push(clock::now() - start);
    }
    exchange.close().await;
    Ok((setup, took))
}

/// At most [`FIRST_TEXTS`] of `texts`, evenly by their length.
fn of_all_lengths(texts: &[&'static Text]) -> Vec<&'static Text> {
    let mut texts = texts.to_vec();
    texts.sort_by_key(|text| text.text.chars().count());
    let count = texts.len().min(FIRST_TEXTS);
    (0..count).map(|n| texts[(2 * n + 1) * texts.len() / (2 * count)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::turns::corpus;

    /// Searches for a knee at `knee`; gives the levels measured and what was found.
    fn search(listed: &[u32], most: u32, knee: u32) -> (Vec<u32>, Knee) {
        let mut search = Search::new(listed.to_vec(), most, true);
        let mut levels = Vec::new();
        while let Some(level) = search.next() {
            assert!(levels.len() < 40, "{levels:?}");
            assert!(!levels.contains(&level), "{level} twice: {levels:?}");
            levels.push(level);
            search.record(level, level <= knee);
        }
        (levels, search.knee())
    }

    #[test]
    fn a_knee_is_found_wherever_it_is() {
        for knee in [0, 1, 3, 4, 7, 13, 30, 48, 49, 77, 200, 500] {
            let (_, found) = search(&LEVELS, 1_000, knee);
            assert!(found.level <= knee, "{knee}: {found:?}");
            let broken = found.broken_at.unwrap();
            assert!(broken > knee && broken - found.level <= 1.max(found.level / 10), "{knee}: {found:?}");
        }
    }

    #[test]
    fn doubling_goes_beyond_the_list_and_ends_at_the_most() {
        assert_eq!(search(&[4, 8], 50, 1_000), (vec![4, 8, 16, 32, 50], Knee { level: 50, broken_at: None }));
    }

    #[test]
    fn a_few_of_many_texts_are_as_long_as_all() {
        let mean = |texts: &[&Text]| {
            texts.iter().map(|text| text.text.chars().count()).sum::<usize>() as f64 / texts.len() as f64
        };
        let all = corpus::select(&[], &[]);
        let few = of_all_lengths(&all);
        assert!(few.len() == FIRST_TEXTS && all.len() > FIRST_TEXTS);
        assert!((mean(&few) / mean(&all) - 1.0).abs() < 0.05, "{} {}", mean(&few), mean(&all));
        let english = corpus::select(&["en".to_owned()], &[]);
        assert_eq!(of_all_lengths(&english).len(), english.len());
        assert!(of_all_lengths(&[]).is_empty());
    }

    #[test]
    fn two_failures_in_a_row_end_the_list() {
        let (levels, _) = search(&LEVELS, 1_000, 5);
        assert_eq!(levels[..4], [4, 8, 12, 6]);
    }
}
