//! How many calls at a time a gateway should sustain, by what calls cost where there was plenty of everything.
//!
//! Each of some things may run out first. What a call takes of each is measured on light loads, and the prediction is
//! the least of the loads at which one is used up:
//!
//! - **cpu**: cores of the gateway and of the generator by a power of the load ([`Light::grown`]), against a limit less what other
//!   programs took, but at least half of it. Threads that have frames to send against what the host's cores can bear beside those
//!   ([`host_ceiling`]); they and the processes that a voice starts, which give way to them and are ahead of what is heard, against
//!   [`ALL`] of the cores. What runs at the lowest priority, and is left out where there is no time, counts for nothing;
//! - **thread**: the gateway's busiest thread in the same way, against [`THREAD_CEILING`] of a core. A thread that waits
//!   for its device is as busy as the device, whatever it does itself: that time is taken off it;
//! - **device**: seconds of speech a second, against what the gateway says its devices could keep up with by what
//!   their steps have cost, at the widths of full use. How many callers speak on average counts, not how many
//!   do at times: turns that come together are late by what is in excess, which is less than they may be. In an open loop (Poisson arrivals) turns also wait for each other:
//!   Erlang C with the device's time for a turn as service time;
//! - **first audio** (closed loop): its 95th percentile grows with the square root of the ratio of used to unused device, as on
//!   one H200 (41, 51, 63, 86 and 125 ms at 48, 100, 200, 300 and 400 calls of 3 s turns);
//! - **capacity** or **memory**: streams that the gateway admits at once, and those that device memory has room for. A
//!   turn holds one until its speech is computed, which may be long before it is heard; the gateway tells for how long.
//!   Turns that are computed without a rest hold theirs longer as the device fills, and those that rest, far enough ahead, have less
//!   ahead. Engset's formula for a fixed number of callers, Erlang's first for an open loop;
//! - **max_calls**: as many at once as the gateway is configured to take.
//!
//! # Why
//! - **Only light loads are used** (up to half the knee, never the knee itself): a prediction is made to be had
//!   before anything breaks.
//! - **Poisson arrivals crowd**: of a load that is all a machine can bear on average, it cannot bear half of the time.
//!   So an open loop's load is the greatest that exceeds a limit no more often than turns may stall.

use std::ops::RangeInclusive;

use crate::forecast::erlang::{crowded, engset, erlang_b, erlang_c, greatest, late_share};
use crate::run::report::{Knee, Level, Report, Verdict};

/// A frame that is due may find all cores busy this often. Found on two cores with nothing else to do, where speech
/// begins to stall between 84 and 88 % of their time; for more cores Erlang's second formula tells what is the same.
const ALL_BUSY: f64 = 0.78;
/// What may be used of all cores where some of it can wait: about as much as two cores with the default voice use when turns begin to
/// stall.
const ALL: f64 = 0.95;
/// With what power of their number the cores grow that calls use. From light levels to the knee, or the most that were tried, it was 0.53
/// to 0.89 in seven ladders of the default voice on 2 and 16 cores; among light levels alone up to 1.09, as two of them differ by chance.
const POWERS: RangeInclusive<f64> = 0.5..=0.9;
/// What programs that take all there is leave of it to one that wants more: the operating system divides it fairly.
const FAIR: f64 = 0.5;
/// Share of a core that a thread with a deadline every 20 ms may use.
pub const THREAD_CEILING: f64 = 0.8;
/// As close to the knee as a prediction should be.
pub const CLOSE: f64 = 0.1;
/// How much longer turns hold their part of a device that is fuller than this is not known.
const CROWDED: f64 = 0.8;
/// Turns are computed to their end some time before they are heard to it. The part of that time that they lose on a full device, where it
/// grows with the square of the device's use. One H200, turns of 11 s: 3.8 s at light loads and 3.0 s with 413 calls, the most that pass,
/// which makes 0.33; simulated turns of 12 s at their knee make 0.19.
const AHEAD_LOST: f64 = 0.25;
/// Loads beyond this are not told apart.
const MOST: u64 = 1_000_000;
/// A device may be short for this share of the time, or for that of turns that may stall if it is more.
const SELDOM: f64 = 0.01;
/// Share of turns that may be late for the 95th percentile to hold.
const LATE: f64 = 0.05;
/// Beyond that much of the device its end is nearer than any limit of first audio.
const FULL: f64 = 0.95;

/// One thing that may run out.
#[derive(Clone, Debug, PartialEq)]
pub struct Bound {
    /// `cpu`, `thread`, `device`, `first audio`, `capacity`, `memory` or `max_calls`.
    pub what: &'static str,
    /// Calls at a time that use it up.
    pub calls: f64,
    /// From which figures.
    pub basis: String,
}

/// What should be the knee.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// Calls at a time.
    pub capacity: f64,
    /// What runs out first.
    pub bound: &'static str,
    /// The levels that were used.
    pub from: Vec<u32>,
    /// Everything that may run out, the first to do so first.
    pub bounds: Vec<Bound>,
}

impl Prediction {
    /// By how much it is above (or, negative, below) the knee, as a share; `None` while nothing broke.
    pub fn deviation(&self, knee: &Knee) -> Option<f64> {
        knee.broken_at.map(|_| self.capacity / f64::from(knee.level.max(1)) - 1.0)
    }

    /// The levels that were used, for people.
    pub fn levels(&self) -> String {
        self.from.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
    }
}

/// Predicts the knee; `None` without levels below it, or where nothing is known that could run out.
pub fn predict(report: &Report) -> Option<Prediction> {
    let used = light(report);
    let light = Light::of(&used)?;
    let sustained = sustained(report, &light);
    let device = device(report, &light, sustained);
    let capacity = capacity(report, &light, sustained);
    let mut bounds: Vec<Bound> = [
        cpu(report, &light),
        thread(report, &light),
        first_audio(report, &light),
        device,
        capacity,
        max_calls(report, &light),
    ]
    .into_iter()
    .flatten()
    .collect();
    bounds.sort_by(|a, b| a.calls.total_cmp(&b.calls));
    let first = bounds.first()?;
    let (capacity, bound) = (first.calls, first.what);
    Some(Prediction { capacity, bound, from: used.iter().map(|l| l.level).collect(), bounds })
}

/// Prediction and knee beside each other, as a verdict; `None` when there is nothing to compare.
pub fn verdict(report: &Report) -> Option<Verdict> {
    let predicted = predict(report)?;
    let knee = report.knee?;
    let rest: Vec<String> = predicted.bounds.iter().skip(1).map(|b| format!("{} {:.0}", b.what, b.calls)).collect();
    let rest = if rest.is_empty() { String::new() } else { format!("; beyond it {}", rest.join(", ")) };
    let head = format!(
        "{:.0} calls from levels {} ({} runs out{rest})",
        predicted.capacity,
        predicted.levels(),
        predicted.bound
    );
    let (holds, text) = match predicted.deviation(&knee) {
        Some(off) => {
            let text = format!("{head}; found {}, {:+.0} % ({:.0} % at most)", knee.level, off * 100.0, CLOSE * 100.0);
            (off.abs() <= CLOSE + 1e-9, text)
        }
        None => (predicted.capacity >= f64::from(knee.level), format!("{head}; not reached at {}", knee.level)),
    };
    Some(Verdict { name: "Prediction".into(), holds, text })
}

/// Erlangs of work that `cores` cores can bear beside deadlines.
pub fn host_ceiling(cores: u64) -> f64 {
    let hundredths = greatest(cores.saturating_mul(100), |n| erlang_c(cores, n as f64 / 100.0) <= ALL_BUSY);
    hundredths as f64 / 100.0
}

/// The levels up to half the knee, but at least the two lowest below it.
fn light(report: &Report) -> Vec<&Level> {
    let knee = report.knee.unwrap_or(Knee { level: u32::MAX, broken_at: None });
    let below = |l: &&Level| l.turns > 0 && l.broken.is_empty() && l.level < knee.level;
    let all: Vec<&Level> = report.levels.iter().filter(below).collect();
    let half = all.iter().filter(|l| l.level <= knee.level / 2).count();
    all.into_iter().take(half.max(2)).collect()
}

/// What light loads have in common.
struct Light<'a> {
    used: &'a [&'a Level],
    /// Whether calls arrive as a Poisson process (open loop).
    open: bool,
    /// For each call at a time: turns a second, and seconds of speech a second.
    turns: f64,
    speech: f64,
    /// Mean seconds a measurement lasted.
    seconds: f64,
}

impl<'a> Light<'a> {
    fn of(used: &'a [&'a Level]) -> Option<Light<'a>> {
        let sum = |value: fn(&Level) -> f64| used.iter().map(|l| value(l)).sum::<f64>();
        let calls = sum(|l| f64::from(l.level) * l.seconds);
        let turns = sum(|l| l.turns as f64);
        if calls <= 0.0 || turns <= 0.0 {
            return None;
        }
        let said = sum(|l| l.speech.mean * l.turns as f64) / turns;
        // How many were offered is known better than how many of them chance had come in time.
        let offered = sum(|l| l.offered.unwrap_or(0.0) * l.turns_per_call * l.seconds);
        let open = used.iter().any(|l| l.mode == "open");
        // Turns are counted that are sent in the window, which are too few where callers speak together and the window is not some
        // whole turns long: of turns of 11 s in windows of 12 and 18 a seventh was missing.
        let heard = sum(|l| l.audio_s_per_s * l.seconds);
        let turns = match (offered > 0.0, heard > 0.0 && said > 0.0 && !open) {
            (true, _) => offered / calls,
            (false, true) => heard / said / calls,
            (false, false) => turns / calls,
        };
        Some(Light {
            used,
            open,
            turns,
            speech: turns * said,
            seconds: used.iter().map(|l| l.seconds).sum::<f64>() / used.len() as f64,
        })
    }

    /// Other programs' cores, the median: one that ran for a while at one of the levels is not there for ever.
    fn others(&self) -> f64 {
        let mut known: Vec<f64> = self.used.iter().filter_map(|l| l.others).collect();
        known.sort_by(f64::total_cmp);
        let middle = (known.len().saturating_sub(1) / 2, known.len() / 2);
        known.get(middle.0).zip(known.get(middle.1)).map_or(0.0, |(low, high)| f64::midpoint(*low, *high))
    }

    fn mean(&self, value: impl Fn(&Level) -> Option<f64>) -> Option<f64> {
        let known: Vec<f64> = self.used.iter().filter_map(|l| value(l)).collect();
        (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64)
    }

    /// Streams that speak that the devices keep up with, as the gateway tells after the last level.
    fn sustained(&self) -> Option<f64> {
        self.used.last().and_then(|l| l.metrics.sustainable()).filter(|c| *c > 0.0 && self.speech > 0.0)
    }

    /// Calls at a time that use up `limit` (above 0) of something, and what each uses at the last level. What `n` of them use is taken to be
    /// `a n^b`, `b` in [`POWERS`]: least squares of the logarithms, each level by its turns.
    ///
    /// # Why
    /// A call costs the less the more there are: what wakes a thread finds more to do. On two cores it takes 1.3 % of one for threads
    /// of the gateway and the generator at 48 calls and 0.8 % at 132; by straight lines 103 calls of 132 were foreseen.
    fn grown(&self, value: impl Fn(&Level) -> Option<f64>, limit: f64) -> Option<(f64, f64)> {
        let used =
            |l: &&Level| value(l).filter(|used| *used > 0.0).map(|used| (f64::from(l.level), used, l.turns as f64));
        let points: Vec<(f64, f64, f64)> = self.used.iter().filter_map(used).collect();
        let (last, used, _) = *points.last()?;
        let weight: f64 = points.iter().map(|p| p.2).sum();
        let mean = |of: &dyn Fn(&(f64, f64, f64)) -> f64| points.iter().map(|p| p.2 * of(p)).sum::<f64>() / weight;
        let (mx, my) = (mean(&|p| p.0.ln()), mean(&|p| p.1.ln()));
        let spread = mean(&|p| (p.0.ln() - mx).powi(2));
        let power = match spread > 0.0 {
            true => (mean(&|p| (p.0.ln() - mx) * (p.1.ln() - my)) / spread).clamp(*POWERS.start(), *POWERS.end()),
            false => *POWERS.end(),
        };
        Some(((mx + (limit.ln() - my) / power).exp(), used / last))
    }

    /// The load of which `calls` at a time are the most that can be borne: less than that in an open loop.
    fn bear(&self, report: &Report, calls: f64) -> f64 {
        match self.open {
            false => calls,
            true => {
                let most = calls as u64;
                greatest(MOST.min(most), |n| crowded(most, n as f64) <= seldom(report)) as f64
            }
        }
    }
}

fn cpu(report: &Report, light: &Light<'_>) -> Option<Bound> {
    let cores = report.host.cores as u64;
    let others = light.others();
    let bound = |ceiling: f64, used: &dyn Fn(&Level) -> Option<f64>, whose: &str| {
        let free = (ceiling - others).max(ceiling * FAIR);
        let (calls, each) = light.grown(used, free)?;
        let basis = format!(
            "{:.2} % of a core a call, generator included; {ceiling:.2} of {cores} cores can be used {whose}, other programs take \
             {others:.2}",
            each * 100.0
        );
        Some(Bound { what: "cpu", calls: light.bear(report, calls), basis })
    };
    let threads = |l: &Level| Some(l.gateway?.cores - l.gateway?.children + l.generator?.cores);
    let all = |l: &Level| Some(l.gateway?.cores + l.generator?.cores - l.metrics.background_seconds / l.seconds);
    let due = bound(host_ceiling(cores), &threads, "by threads with frames that are due");
    let all = bound(cores as f64 * ALL, &all, "by those and a voice's processes");
    due.into_iter().chain(all).min_by(|a, b| a.calls.total_cmp(&b.calls))
}

fn thread(report: &Report, light: &Light<'_>) -> Option<Bound> {
    let devices = ready(report).count().max(1) as f64;
    let used = |l: &Level| {
        let computes = l.metrics.stage_seconds.values().sum::<f64>() / l.seconds / devices;
        // Only a language model has a thread that does little else than wait for its device.
        let waits = l.metrics.stage_seconds.get("decode").is_some_and(|seconds| *seconds > 0.0);
        let own = |thread: f64| (thread - computes).max(0.0);
        match (l.busiest_thread, l.device_thread) {
            (busiest, Some(device)) => Some(busiest.unwrap_or(0.0).max(own(device))),
            (Some(busiest), None) if waits && busiest >= 0.9 * computes => Some(own(busiest)),
            (busiest, None) => busiest,
        }
    };
    let (calls, each) = light.grown(used, THREAD_CEILING)?;
    let basis = format!(
        "the busiest thread takes {:.2} % of a core a call, without waiting for devices, of {:.0} %",
        each * 100.0,
        THREAD_CEILING * 100.0
    );
    Some(Bound { what: "thread", calls: light.bear(report, calls), basis })
}

/// The share of the time for which more may be there than can be borne.
fn seldom(report: &Report) -> f64 {
    report.limits.stalled_turns.max(SELDOM)
}

/// Streams that speak that the devices keep up with in full use.
fn sustained(report: &Report, light: &Light<'_>) -> Option<f64> {
    light.sustained().or_else(|| {
        // A gateway that does not tell: as if speech cost the same device time at any load.
        let busy = light.mean(|l| {
            let seconds: f64 = l.metrics.stage_seconds.values().sum();
            (seconds > 0.0 && l.audio_s_per_s > 0.0).then(|| seconds / l.seconds / l.audio_s_per_s)
        })?;
        Some(ready(report).count().max(1) as f64 / busy)
    })
}

fn device(report: &Report, light: &Light<'_>, sustained: Option<f64>) -> Option<Bound> {
    let devices = ready(report).count().max(1) as u64;
    let sustained = sustained?;
    if light.speech <= 0.0 || light.turns <= 0.0 {
        return None;
    }
    let most = sustained / light.speech;
    // Device seconds of a turn where the device is in full use.
    let service = light.speech / light.turns * devices as f64 / sustained;
    let alone = light.mean(|l| Some(l.first_audio.p50)).unwrap_or(0.0);
    let spread = light.mean(|l| Some(l.speech_spread)).unwrap_or(1.0);
    let wait = (report.limits.first_audio_p95 - alone).max(0.0);
    let in_time = |n: u64| late_share(devices, n as f64 / most * devices as f64, service, spread, wait) <= LATE;
    let calls = if light.open { greatest(MOST, in_time) as f64 } else { most };
    let basis = format!(
        "{devices} device(s) keep up with {sustained:.0} streams that speak; a call speaks {:.0} % of its time; {:.1} ms of \
         device time a turn",
        light.speech * 100.0,
        service * 1e3
    );
    Some(Bound { what: "device", calls, basis })
}

/// The load at which first audio is as late as it may be, by how it has grown over the light levels. In an open loop what
/// turns wait for is counted with the device.
fn first_audio(report: &Report, light: &Light<'_>) -> Option<Bound> {
    let sustained = light.sustained().filter(|_| !light.open)?;
    let most = sustained / light.speech;
    let point = |l: &&Level| {
        let used = f64::from(l.level) / most;
        (used < 1.0).then(|| ((used / (1.0 - used)).sqrt(), l.first_audio.p95))
    };
    let points: Vec<(f64, f64)> = light.used.iter().filter_map(point).collect();
    let (base, each) = line(&points).filter(|(_, each)| points.len() > 1 && *each > 0.0)?;
    let limit = report.limits.first_audio_p95;
    let root = ((limit - base) / each).max(0.0);
    let used = root * root / (1.0 + root * root);
    let basis = format!(
        "{:.0} ms at an idle device and {:.0} ms at one that is half used, at the 95th percentile, of {:.0} ms",
        base * 1e3,
        (base + each) * 1e3,
        limit * 1e3
    );
    (used < FULL).then_some(Bound { what: "first audio", calls: used * most, basis })
}

/// The calls that the gateway takes at once. Two H200s had device time for more than the 1,000 that these are unless it is told otherwise.
fn max_calls(report: &Report, light: &Light<'_>) -> Option<Bound> {
    let most = light.used.last().and_then(|l| l.metrics.max_calls).filter(|most| *most > 0.0)?;
    let basis = format!("the gateway takes {most:.0} calls at once: max_calls in [call] of its configuration");
    Some(Bound { what: "max_calls", calls: light.bear(report, most), basis })
}

fn capacity(report: &Report, light: &Light<'_>, sustained: Option<f64>) -> Option<Bound> {
    // A gateway of the last release says `places`.
    let told = |device: &serde_json::Value| device["capacity"].as_u64().or(device["places"].as_u64());
    let admitted: u64 = ready(report).filter_map(told).sum();
    if admitted == 0 {
        return None;
    }
    // What memory has room for is known by the texts that were spoken.
    let memory = light.used.last().and_then(|l| l.metrics.memory_streams).filter(|streams| *streams > 0.0);
    let memory = memory.map(|streams| streams as u64).filter(|streams| *streams < admitted);
    let (capacity, what) = memory.map_or((admitted, "capacity"), |streams| (streams, "memory"));
    let told: f64 = light.used.iter().filter_map(|l| l.metrics.holding()).sum();
    let calls: f64 = light.used.iter().map(|l| f64::from(l.level) * l.seconds).sum();
    let (occupied, whose) = if told > 0.0 {
        (told / calls, "until it is computed")
    } else {
        let turns: f64 = light.used.iter().map(|l| l.turns as f64).sum();
        let heard: f64 = light.used.iter().map(|l| l.service.mean * l.turns as f64).sum();
        (heard / turns * light.turns, "until it is heard")
    };
    if occupied <= 0.0 {
        return None;
    }
    let held = occupied / light.turns;
    // For how much of that the device computes. For the rest the turn is far enough ahead and waits for its listener: until he is
    // near enough, however long the computing took. So only what turns compute that do not wait is longer on a full device,
    // and their part of all computing is taken to be the computing's part of the time.
    let steps: f64 = light.used.iter().flat_map(|l| l.metrics.stage_seconds.values()).sum();
    let computes = if told > 0.0 && steps > 0.0 { (steps / told).min(1.0) } else { 1.0 };
    let full = sustained.filter(|_| light.speech > 0.0);
    let ahead = if told > 0.0 { (light.speech / occupied - 1.0).max(0.0) } else { 0.0 };
    let fits = |level: u64| {
        // A device that fills makes less at a time of each stream, which holds its part for longer.
        let used = full.map_or(0.0, |streams| (light.speech * level as f64 / streams).min(CROWDED));
        let longer = 1.0 + computes.powi(2) * (1.0 / (1.0 - used).sqrt() - 1.0);
        // And one that rests has less ahead of its listener when the last of it is made.
        let longer = longer + (1.0 - computes) * ahead * AHEAD_LOST * used.powi(2);
        let refused = match light.open {
            true => erlang_b(capacity, light.turns * held * longer * level as f64),
            false => engset(capacity, level, (occupied * longer).min(1.0)),
        };
        // Less than one turn of a level where none may be refused.
        let turns = light.turns * light.seconds * level as f64;
        refused * turns <= (report.limits.failures * turns).max(0.5)
    };
    let of = if what == "memory" { "have room in device memory" } else { "are admitted" };
    let basis = format!("{capacity} streams {of} at once; a turn holds one for {held:.2} s, {whose}");
    Some(Bound { what, calls: greatest(MOST, fits) as f64, basis })
}

/// The devices that speak.
pub(super) fn ready(report: &Report) -> impl Iterator<Item = &serde_json::Value> {
    report.devices.as_array().into_iter().flatten().filter(|d| d["state"].as_str().is_none_or(|s| s == "ready"))
}

/// Least squares; a single point is taken as a line through nothing.
fn line(points: &[(f64, f64)]) -> Option<(f64, f64)> {
    let n = points.len() as f64;
    let (mx, my) = (points.iter().map(|p| p.0).sum::<f64>() / n, points.iter().map(|p| p.1).sum::<f64>() / n);
    let spread: f64 = points.iter().map(|p| (p.0 - mx).powi(2)).sum();
    match points {
        [] => None,
        [(x, y)] => (*x > 0.0).then(|| (0.0, y / x)),
        _ if spread <= 0.0 => None,
        _ => {
            let each = points.iter().map(|p| (p.0 - mx) * (p.1 - my)).sum::<f64>() / spread;
            Some((my - each * mx, each))
        }
    }
}

#[cfg(test)]
mod tests;
