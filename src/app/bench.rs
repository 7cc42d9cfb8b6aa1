//! `antiphon bench`: what an engine does for many listeners at once, without a network.
//!
//! Listeners are streams of the real scheduler with a playout clock: the first audio of a turn starts it, and
//! audio that comes after what was there has been played is an underrun. `talk` has every listener play in real
//! time and speak again when a turn is over, as calls do; `throughput` takes audio as fast as it comes. A backlog
//! of batch utterances may wait beside them all the time; side by side, each level is measured without and with it.

mod rates;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng, rngs::StdRng};
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

pub use self::rates::{Rate, rates};
use crate::audio;
use crate::clock;
use crate::synth::device::{Engine, Spent, StreamNote};
use crate::turn::{Class, Epoch, SpeechEvent, StreamId, TurnToken, Utterance, UtteranceEnd, UtteranceId};

/// Events that may wait for a listener: more than the lead limit can produce in 20 ms pieces.
const SINK: usize = 1_024;
/// The backlog of one level is gone before the next begins; it is given up on after this.
const CLEAR: Duration = Duration::from_secs(10);

/// How often the devices' memory is looked at.
const SAMPLING: Duration = Duration::from_millis(50);

/// What is measured.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Listeners at once, a level each.
    pub levels: Vec<u32>,
    /// How long each level is measured after every listener has begun.
    pub time: Duration,
    /// Turns begin independently of one another at this rate a second, up to the level; `None`: every listener
    /// begins its next turn when the last one has been played.
    pub arrivals: Option<f64>,
    /// What is said.
    pub text: String,
    /// The voice.
    pub voice: Option<String>,
    /// Listeners play in real time (`true`), or take what comes.
    pub paced: bool,
    /// Batch utterances that always wait beside the listeners.
    pub batch: u32,
    /// For the listeners' beginnings and pauses.
    pub seed: u64,
}

/// One level.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Level {
    /// Listeners at once.
    pub listeners: u32,
    /// Turns that began in the measured time.
    pub turns: usize,
    /// First audio in milliseconds: turn submitted to first PCM.
    pub first_p50_ms: f64,
    /// As above.
    pub first_p95_ms: f64,
    /// As above.
    pub first_p99_ms: f64,
    /// Synthesis time over audio time of finished turns, at the 95th percentile.
    pub rtf_p95: f64,
    /// Seconds of audio made per second.
    pub audio_per_second: f64,
    /// Characters of text spoken per second.
    pub chars_per_second: f64,
    /// Gaps that listeners heard.
    pub underruns: u64,
    /// Their length together, in milliseconds.
    pub underrun_ms: f64,
    /// Turns refused by admission.
    pub refused: u64,
    /// Turns that failed.
    pub failed: u64,
    /// Batch utterances that always waited.
    pub batch: u32,
    /// Seconds of batch audio made per second.
    pub batch_audio_per_second: f64,
    /// Device memory of utterances when it was most, in bytes.
    pub memory_used: u64,
    /// What all devices' memory was used for at that moment, in bytes.
    pub memory_parts: BTreeMap<&'static str, u64>,
    /// Seconds of audio that each device made.
    pub by_device: Vec<f64>,
    /// Seconds that the level took in all, with filling up before what is measured and running empty after it.
    pub level_seconds: f64,
    /// Where the devices' time went, from the level's begin to its end.
    pub shares: Vec<Share>,
}

/// A part of the devices' time.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Share {
    /// A stage; `between steps`; `idle`.
    pub stage: &'static str,
    /// Whose steps: `live`, `batch` or `both`; empty outside of steps.
    pub whose: &'static str,
    /// Of the time of all devices.
    pub share: f64,
    /// How many steps.
    pub steps: u64,
    /// Mean length of a step, in milliseconds.
    pub step_ms: f64,
    /// Mean number of slots in a step.
    pub width: f64,
}

#[derive(Default)]
struct Tally {
    first: Vec<f64>,
    rtf: Vec<f64>,
    samples: u64,
    chars: u64,
    turns: usize,
    underruns: u64,
    gap: Duration,
    refused: u64,
    failed: u64,
}

/// Measures every level on an engine that is ready.
pub async fn run(engine: &Engine, plan: &Plan, mut each: impl FnMut(&Level)) -> Vec<Level> {
    let mut levels = Vec::new();
    for &listeners in &plan.levels {
        let level = measure(engine, plan, listeners).await;
        each(&level);
        levels.push(level);
    }
    levels
}

/// The same listeners without and with a backlog of batch work, and that backlog alone.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SideBySide {
    /// No listener: what the engine makes of batch work.
    pub batch_alone: Level,
    /// A level each.
    pub pairs: Vec<Pair>,
}

/// One level, twice.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Pair {
    /// Without batch work.
    pub live: Level,
    /// With it.
    pub both: Level,
    /// First audio at the 95th percentile: with over without.
    pub first_p95_ratio: f64,
    /// Batch audio as a share of what the engine makes of batch work alone.
    pub batch_share: f64,
}

/// Measures every level without and with the plan's backlog on an engine that is ready.
pub async fn side_by_side(engine: &Engine, plan: &Plan, mut each: impl FnMut(&Level)) -> SideBySide {
    let batch_alone = measure(engine, plan, 0).await;
    each(&batch_alone);
    let without = Plan { batch: 0, ..plan.clone() };
    let mut pairs = Vec::new();
    for &listeners in &plan.levels {
        let live = measure(engine, &without, listeners).await;
        each(&live);
        let both = measure(engine, plan, listeners).await;
        each(&both);
        let first_p95_ratio = both.first_p95_ms / live.first_p95_ms;
        let batch_share = both.batch_audio_per_second / batch_alone.batch_audio_per_second;
        pairs.push(Pair { live, both, first_p95_ratio, batch_share });
    }
    SideBySide { batch_alone, pairs }
}

async fn measure(engine: &Engine, plan: &Plan, listeners: u32) -> Level {
    let begin = clock::now();
    // Beginnings are spread over a turn's length, as callers' are; the spread itself is not measured.
    let spread = if plan.paced { Duration::from_secs(8) } else { Duration::ZERO };
    let from = begin + spread;
    let until = from + plan.time;
    let mut tasks = JoinSet::new();
    for n in 0..listeners {
        let mut random = StdRng::seed_from_u64(plan.seed ^ u64::from(n) << 20 ^ u64::from(listeners));
        let start = begin + spread.mul_f64(random.random::<f64>());
        let listener = Listener { engine: engine.clone(), plan: plan.clone(), random, listeners, from, until };
        tasks.spawn(listener.listen(start));
    }
    let backlog = tokio::spawn(backlog(engine.clone(), plan.clone(), from, until));
    let mut all = Tally::default();
    let mut memory = Fullest::default();
    let made = |engine: &Engine| engine.status().iter().map(|device| device.produced).collect::<Vec<u64>>();
    let before = made(engine);
    let spent = |engine: &Engine| engine.status().into_iter().map(|device| device.spent).collect::<Vec<Spent>>();
    let spent_before = spent(engine);
    let mut tick = tokio::time::interval(SAMPLING);
    loop {
        let tally = tokio::select! {
            done = tasks.join_next() => match done {
                Some(Ok(tally)) => tally,
                _ => break,
            },
            _ = tick.tick() => {
                memory.look(engine);
                continue;
            }
        };
        all.first.extend(tally.first);
        all.rtf.extend(tally.rtf);
        all.samples += tally.samples;
        all.chars += tally.chars;
        all.turns += tally.turns;
        all.underruns += tally.underruns;
        all.gap += tally.gap;
        all.refused += tally.refused;
        all.failed += tally.failed;
    }
    let batch_samples = backlog.await.unwrap_or_default();
    let seconds = plan.time.as_secs_f64();
    let spent: Vec<Spent> = spent(engine).iter().zip(&spent_before).map(|(now, before)| now.since(before)).collect();
    Level {
        listeners,
        turns: all.turns,
        first_p50_ms: percentile(&mut all.first, 0.50) * 1e3,
        first_p95_ms: percentile(&mut all.first, 0.95) * 1e3,
        first_p99_ms: percentile(&mut all.first, 0.99) * 1e3,
        rtf_p95: percentile(&mut all.rtf, 0.95),
        audio_per_second: audio::duration_of(all.samples).as_secs_f64() / seconds,
        chars_per_second: all.chars as f64 / seconds,
        underruns: all.underruns,
        underrun_ms: all.gap.as_secs_f64() * 1e3,
        refused: all.refused,
        failed: all.failed,
        batch: plan.batch,
        batch_audio_per_second: audio::duration_of(batch_samples).as_secs_f64() / seconds,
        memory_used: memory.used,
        memory_parts: memory.parts,
        by_device: made(engine)
            .into_iter()
            .zip(before)
            .map(|(after, before)| audio::duration_of(after - before).as_secs_f64())
            .collect(),
        level_seconds: begin.elapsed().as_secs_f64(),
        shares: shares(&spent),
    }
}

/// All devices together, the largest part first.
fn shares(devices: &[Spent]) -> Vec<Share> {
    let mut parts: BTreeMap<(&'static str, &'static str), (f64, u64, u64)> = BTreeMap::new();
    for device in devices {
        for (kind, steps) in &device.steps {
            let part = parts.entry(*kind).or_default();
            *part = (part.0 + steps.time.as_secs_f64(), part.1 + steps.count, part.2 + steps.slots);
        }
        for (name, time) in [("between steps", device.between), ("idle", device.idle)] {
            parts.entry((name, "")).or_default().0 += time.as_secs_f64();
        }
    }
    let all: f64 = parts.values().map(|(seconds, ..)| seconds).sum();
    let mut shares: Vec<Share> = parts
        .into_iter()
        .map(|((stage, whose), (seconds, steps, slots))| Share {
            stage,
            whose,
            share: seconds / all.max(f64::MIN_POSITIVE),
            steps,
            step_ms: seconds * 1e3 / steps.max(1) as f64,
            width: slots as f64 / steps.max(1) as f64,
        })
        .collect();
    shares.sort_by(|a, b| b.share.total_cmp(&a.share));
    shares
}

/// The devices' memory when utterances held most of it.
#[derive(Default)]
struct Fullest {
    used: u64,
    parts: BTreeMap<&'static str, u64>,
}

impl Fullest {
    fn look(&mut self, engine: &Engine) {
        let status = engine.status();
        let used = status.iter().map(|device| device.memory.used).sum();
        if used < self.used && !self.parts.is_empty() {
            return;
        }
        self.used = used;
        self.parts.clear();
        for (part, bytes) in status.into_iter().flat_map(|device| device.parts) {
            *self.parts.entry(part).or_default() += bytes;
        }
    }
}

/// Keeps the plan's batch utterances waiting until `until`; gives the samples that came after `from`.
async fn backlog(engine: Engine, plan: Plan, from: Instant, until: Instant) -> u64 {
    let (sink, mut events) = mpsc::channel(SINK);
    let epoch = Epoch::default();
    let mut open: HashMap<UtteranceId, StreamId> = HashMap::new();
    let (mut samples, mut seed) = (0, plan.seed << 32);
    let mut pause = clock::now();
    while clock::now() < until {
        while open.len() < plan.batch as usize && clock::now() >= pause {
            seed += 1;
            // A stream each, as the sentences of a book have.
            let utterance = plan.utterance(StreamId::next(), Class::Batch, epoch.token(), seed);
            let (id, stream) = (utterance.id, utterance.stream);
            match engine.submit(utterance, sink.clone()) {
                Ok(()) => drop(open.insert(id, stream)),
                Err(refused) => pause = clock::now() + refused.retry_after,
            }
        }
        let next = if open.len() < plan.batch as usize { pause.min(until) } else { until };
        tokio::select! {
            event = events.recv() => match event {
                Some(SpeechEvent::Audio { pcm, .. }) if clock::now() >= from => samples += pcm.len() as u64,
                Some(SpeechEvent::End { utterance, how }) => {
                    if let Some(stream) = open.remove(&utterance) {
                        engine.note(stream, StreamNote::Closed);
                    }
                    if let UtteranceEnd::Failed(reason) = how {
                        tracing::warn!(%reason, "batch work failed");
                        pause = clock::now() + Duration::from_secs(1);
                    }
                }
                _ => {}
            },
            () = tokio::time::sleep_until(next.into()) => {}
        }
    }
    epoch.raise();
    open.into_values().for_each(|stream| engine.note(stream, StreamNote::Closed));
    let cleared = async {
        while engine.status().iter().any(|device| device.load.batch > 0) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    // What is left after that only blurs the next level.
    let _ = tokio::time::timeout(CLEAR, cleared).await;
    samples
}

impl Plan {
    fn utterance(&self, stream: StreamId, class: Class, token: TurnToken, seed: u64) -> Utterance {
        let plain = Utterance::plain(stream, class, self.text.clone());
        Utterance { token, voice: self.voice.clone(), seed, ..plain }
    }
}

struct Listener {
    engine: Engine,
    plan: Plan,
    random: StdRng,
    listeners: u32,
    from: Instant,
    until: Instant,
}

/// One turn as its listener saw it.
struct Turn {
    first: Option<Duration>,
    made: Duration,
    samples: u64,
    /// When the last sample has been played.
    played: Instant,
    gaps: Vec<Duration>,
    end: UtteranceEnd,
}

impl Listener {
    async fn listen(mut self, start: Instant) -> Tally {
        let mut tally = Tally::default();
        let stream = StreamId::next();
        if !self.plan.paced {
            self.engine.note(stream, StreamNote::Unpaced);
        }
        tokio::time::sleep_until(start.into()).await;
        let mut seed = 0;
        while clock::now() < self.until {
            seed += 1;
            let asked = clock::now();
            let turn = turn(&self.engine, &self.plan, stream, asked, seed).await;
            if asked >= self.from {
                tally.turns += 1;
                match &turn.end {
                    UtteranceEnd::Done => {
                        tally.chars += self.plan.text.chars().count() as u64;
                        let length = audio::duration_of(turn.samples).as_secs_f64();
                        tally.rtf.push(turn.made.as_secs_f64() / length.max(f64::MIN_POSITIVE));
                    }
                    UtteranceEnd::Refused { .. } => tally.refused += 1,
                    UtteranceEnd::Failed(reason) => {
                        tracing::warn!(%reason, "a turn failed");
                        tally.failed += 1;
                    }
                    UtteranceEnd::Cancelled => {}
                }
                tally.first.extend(turn.first.map(|first| first.as_secs_f64()));
                tally.samples += turn.samples;
                tally.underruns += turn.gaps.len() as u64;
                tally.gap += turn.gaps.iter().sum::<Duration>();
            }
            if let UtteranceEnd::Refused { retry_after } = turn.end {
                tokio::time::sleep_until((clock::now() + retry_after).min(self.until).into()).await;
            }
            // What comes after the measured time is not waited for.
            if self.plan.paced {
                tokio::time::sleep_until(turn.played.min(self.until).into()).await;
            }
            if let Some(rate) = self.plan.arrivals {
                // Each listener's share of a Poisson process.
                let mean = f64::from(self.listeners) / rate.max(f64::MIN_POSITIVE);
                let pause = -mean * (1.0 - self.random.random::<f64>()).ln();
                let next = asked + Duration::from_secs_f64(pause.min(3_600.0));
                tokio::time::sleep_until(next.min(self.until).into()).await;
            }
        }
        self.engine.note(stream, StreamNote::Closed);
        tally
    }
}

/// One turn on `stream`, heard from `asked` on.
async fn turn(engine: &Engine, plan: &Plan, stream: StreamId, asked: Instant, seed: u64) -> Turn {
    let (sink, mut events) = mpsc::channel(SINK);
    let mut turn = Turn {
        first: None,
        made: Duration::ZERO,
        samples: 0,
        played: asked,
        gaps: Vec::new(),
        end: UtteranceEnd::Cancelled,
    };
    let utterance = plan.utterance(stream, Class::Live, TurnToken::forever(), seed);
    if let Err(refused) = engine.submit(utterance, sink) {
        turn.end = UtteranceEnd::Refused { retry_after: refused.retry_after };
        return turn;
    }
    while let Some(event) = events.recv().await {
        let now = clock::now();
        match event {
            SpeechEvent::Audio { pcm, .. } => {
                if turn.first.is_none() {
                    turn.first = Some(now - asked);
                    turn.played = now;
                    if plan.paced {
                        engine.note(stream, StreamNote::Anchored { at: now });
                    }
                } else if now > turn.played && plan.paced {
                    turn.gaps.push(now - turn.played);
                    turn.played = now;
                    engine.note(stream, StreamNote::Anchored { at: now });
                }
                turn.samples += pcm.len() as u64;
                turn.played += audio::duration_of(pcm.len() as u64);
            }
            SpeechEvent::End { how, .. } => {
                turn.made = now - asked;
                turn.end = how;
                break;
            }
        }
    }
    turn
}

/// The nearest-rank percentile; NaN of nothing.
fn percentile(values: &mut [f64], share: f64) -> f64 {
    if values.is_empty() {
        return f64::NAN;
    }
    values.sort_by(f64::total_cmp);
    let rank = (share * values.len() as f64).ceil() as usize;
    values[rank.clamp(1, values.len()) - 1]
}

impl Level {
    /// The head of the table whose rows are levels.
    pub fn header() -> String {
        format!(
            "{:>9} {:>5} {:>6} {:>8} {:>8} {:>8} {:>7} {:>9} {:>9} {:>9} {:>9} {:>8} {:>7} {:>7}",
            "listeners",
            "batch",
            "turns",
            "p50 ms",
            "p95 ms",
            "p99 ms",
            "RTF p95",
            "audio s/s",
            "batch s/s",
            "chars/s",
            "underruns",
            "refused",
            "GB",
            "took s"
        )
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:>9} {:>5} {:>6} {:>8.1} {:>8.1} {:>8.1} {:>7.3} {:>9.2} {:>9.2} {:>9.1} {:>9} {:>8} {:>7.2} {:>7.1}",
            self.listeners,
            self.batch,
            self.turns,
            self.first_p50_ms,
            self.first_p95_ms,
            self.first_p99_ms,
            self.rtf_p95,
            self.audio_per_second,
            self.batch_audio_per_second,
            self.chars_per_second,
            self.underruns,
            self.refused + self.failed,
            self.memory_used as f64 / 1e9,
            self.level_seconds,
        )
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>16} {:<5} {:>5.1} %", self.stage, self.whose, self.share * 100.0)?;
        match self.steps {
            0 => Ok(()),
            steps => write!(f, "  {steps:>6} steps of {:>6.2} ms, {:>5.1} slots", self.step_ms, self.width),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_ranks() {
        let mut values: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(percentile(&mut values, 0.5), 50.0);
        assert_eq!(percentile(&mut values, 0.99), 99.0);
        assert_eq!(percentile(&mut [7.0], 0.95), 7.0);
        assert!(percentile(&mut [], 0.5).is_nan());
    }
}
