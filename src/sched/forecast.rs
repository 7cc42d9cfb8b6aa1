//! What speech will cost, learned while it is made.
//!
//! # Why
//! The load is predicted from what speech costs in *rounds* (learned, the same at any load) and what rounds
//! cost at the *width* that so many streams would give (learned per width), not from how busy the device is:
//! a device that runs narrow steps is always busy and has most of its capacity left.

use std::time::Duration;

use super::cost::{Costs, Seeds};
use super::gather::TOGETHER;
use super::job::Job;
use super::step::{EngineLimits, PerStage, Stage, Step};
use crate::audio::duration_of;

/// Weight of a new observation in smoothed figures.
const WEIGHT: f64 = 0.1;
/// What remains of an observation after the next one: some hundreds of chunks count.
const FADE: f64 = 0.998;
/// Characters a second at a common speaking rate, until the voice is known.
const USUAL_RATE: f64 = 15.0;
/// More streams than any device is asked about.
const MOST_STREAMS: u32 = 1 << 16;
/// Wider steps than this save nothing, or never come about because what is urgent does not wait for so many: what a device
/// sustains is counted in steps of at most so many slots.
const WIDE: u32 = 32;
/// Steps of flow are so many times as wide as groups of new turns, since those that speak join them, within such bounds. Simulated
/// with the costs of one H200 where it makes the most turns, they cost as much for each chunk as at 20 where turns last 12 s, at 30 where
/// they last 3, and at 50 where they last 2.
const JOINED: f64 = 10.0;
const FLOW_WIDTH: (f64, f64) = (16.0, 64.0);

/// Seconds of audio that a chunk has at least: a frame.
const SHORTEST_CHUNK: f64 = 0.02;

/// What speech is made of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Speech {
    /// Rounds of each stage until first audio.
    pub(super) first: PerStage<f64>,
    /// Seconds that first audio lasts.
    pub(super) first_seconds: f64,
    /// Rounds of each stage for a second of audio.
    pub(super) second: PerStage<f64>,
    /// Seconds that a chunk after the first lasts.
    pub(super) chunk_seconds: f64,
}

/// What was made of late, all fading: of these the ratio is what a second of audio takes. (A mean of ratios would follow the short
/// first chunks.)
#[derive(Clone, Copy, Debug, Default)]
struct Made {
    /// Rounds of each stage.
    rounds: PerStage<f64>,
    /// Euler steps of single chunks.
    flow_chunks: f64,
    /// Seconds of audio.
    seconds: f64,
}

#[derive(Debug)]
pub(super) struct Forecast {
    costs: Costs,
    /// What rounds of flow cost by chunks in a round, where `costs` goes by slots.
    by_chunks: Costs,
    width: PerStage<u32>,
    /// Rounds of each stage until the first audio of a live utterance.
    first_rounds: Option<PerStage<f64>>,
    made: Made,
    /// Device time of the steps that a chunk after the first took part in, seconds.
    chunk_service: Option<f64>,
    /// Rounds of each stage that a chunk after the first takes.
    chunk_rounds: Option<PerStage<f64>>,
    /// Seconds of audio of the first chunk of a live utterance, and of one after it.
    first_seconds: Option<f64>,
    chunk_seconds: Option<f64>,
    /// Seconds that steps took and were predicted to take alone, both fading: their ratio is what steps beside others, and
    /// widths that were not seen alone yet, make of the predictions.
    took: f64,
    predicted: f64,
    /// Samples a character stands for.
    samples_per_char: Option<f64>,
    /// Bytes that are promised for a character, and for a live utterance.
    bytes_per_char: Option<f64>,
    bytes_each: Option<f64>,
}

impl Forecast {
    /// `seeds`: what steps took at warm-up.
    pub(super) fn new(limits: &EngineLimits, seeds: &Seeds) -> Self {
        Self {
            costs: Costs::new(seeds),
            by_chunks: Costs::new(seeds),
            width: limits.width,
            first_rounds: None,
            made: Made::default(),
            chunk_service: None,
            chunk_rounds: None,
            first_seconds: None,
            chunk_seconds: None,
            took: 0.0,
            predicted: 0.0,
            samples_per_char: None,
            bytes_per_char: None,
            bytes_each: None,
        }
    }

    /// A step that had the device to itself took so long; one of flow ran `chunk_rounds` Euler steps of single chunks.
    pub(super) fn observe(&mut self, step: &Step, took: Duration, chunk_rounds: u32) {
        self.costs.observe(step.stage, step.slots.len(), step.rounds, took);
        if step.stage == Stage::Flow {
            let each = (f64::from(chunk_rounds) / f64::from(step.rounds.max(1))).round() as usize;
            self.by_chunks.observe(step.stage, each.max(1), step.rounds, took);
        }
    }

    /// A step, alone or beside another, had the device for so long.
    pub(super) fn ran(&mut self, step: &Step, took: Duration) {
        self.took = self.took * FADE + took.as_secs_f64();
        self.predicted = self.predicted * FADE + self.costs.mean(step.stage, step.slots.len(), step.rounds);
    }

    /// `job` has just given `samples`; its counters are not reset yet.
    pub(super) fn produced(&mut self, job: &Job, samples: u64) {
        let rounds = job.rounds.map(f64::from);
        if job.samples == 0 && job.is_live() {
            smooth_all(&mut self.first_rounds, rounds);
            smooth(&mut self.first_seconds, duration_of(samples).as_secs_f64());
        }
        for (stage, new) in rounds.iter() {
            self.made.rounds[stage] = self.made.rounds[stage] * FADE + new;
        }
        self.made.flow_chunks = self.made.flow_chunks * FADE + f64::from(job.chunk_rounds);
        self.made.seconds = self.made.seconds * FADE + duration_of(samples).as_secs_f64();
        if job.samples > 0 {
            smooth(&mut self.chunk_service, job.service.as_secs_f64());
            smooth_all(&mut self.chunk_rounds, rounds);
            smooth(&mut self.chunk_seconds, duration_of(samples).as_secs_f64());
        }
    }

    /// What speech is made of; `None` until some was spoken.
    pub(super) fn speech(&self) -> Option<Speech> {
        let (first, first_seconds) = (self.first_rounds?, self.first_seconds?);
        let second = self.made.rounds.map(|rounds| rounds / self.made.seconds);
        let chunk_seconds = self.chunk_seconds.unwrap_or(first_seconds).max(SHORTEST_CHUNK);
        Some(Speech { first, first_seconds, second, chunk_seconds })
    }

    /// Device seconds for so many rounds of each stage, counted for each stream by itself, in steps of `width` streams.
    pub(super) fn device_seconds(&self, rows: &PerStage<f64>, width: u32) -> f64 {
        let seconds = |(stage, rows): (Stage, &f64)| {
            let width = width.min(self.width[stage]);
            if *rows <= 0.0 || width == 0 {
                return 0.0;
            }
            rows / f64::from(width) * self.costs.mean(stage, width as usize, 1)
        };
        let alone: f64 = rows.iter().map(seconds).sum();
        if self.predicted > 0.0 { alone * self.took / self.predicted } else { alone }
    }

    /// A text of so many characters became `samples`.
    pub(super) fn spoken(&mut self, samples: u64, chars: u32) {
        if chars > 0 {
            smooth(&mut self.samples_per_char, samples as f64 / f64::from(chars));
        }
    }

    /// A text of so many characters is promised `bytes`.
    pub(super) fn sized(&mut self, bytes: u64, chars: u32) {
        if bytes > 0 && chars > 0 {
            smooth(&mut self.bytes_per_char, bytes as f64 / f64::from(chars));
        }
    }

    /// A live utterance is promised `bytes`.
    pub(super) fn promised(&mut self, bytes: u64) {
        if bytes > 0 {
            smooth(&mut self.bytes_each, bytes as f64);
        }
    }

    /// Bytes that a live utterance of late is promised; `None` until one was.
    pub(super) fn bytes_each(&self) -> Option<f64> {
        self.bytes_each
    }

    /// Seconds of speech that so many characters become.
    pub(super) fn seconds_of(&self, chars: u32) -> f64 {
        let rate = f64::from(crate::audio::RATE);
        f64::from(chars) * self.samples_per_char.map_or(1.0 / USUAL_RATE, |samples| samples / rate)
    }

    /// Bytes that are promised for so many characters.
    pub(super) fn bytes_of(&self, chars: u32) -> f64 {
        self.bytes_per_char.unwrap_or(0.0) * f64::from(chars)
    }

    /// What such a step will take, in seconds.
    pub(super) fn cost(&self, stage: Stage, width: usize, rounds: u32) -> f64 {
        self.costs.predict(stage, width, rounds)
    }

    /// Share of the device that `streams` speaking streams need. They are taken to meet in steps half as wide as
    /// their number: they are in different stages.
    pub(super) fn load(&self, streams: u32) -> f64 {
        if self.made.seconds == 0.0 {
            return 0.0;
        }
        let rounds = self.made.rounds.map(|rounds| rounds / self.made.seconds);
        let per_second = self.seconds_for(&rounds, (streams / 2).max(1));
        per_second * f64::from(streams) / f64::from((streams / 2).max(1))
    }

    /// How many speaking streams the device is predicted to keep up with at a load of `limit`, where a group of new turns begins
    /// every `period`; 0 until something was spoken.
    pub(super) fn sustainable(&self, limit: f64, period: Duration) -> f64 {
        if self.made.seconds == 0.0 {
            return 0.0;
        }
        let fits = |streams: &u32| self.full_load(*streams, period) <= limit;
        let (mut good, mut bad) = (0, 1);
        while bad < MOST_STREAMS && fits(&bad) {
            (good, bad) = (bad, bad * 2);
        }
        while bad - good > 1 {
            let middle = good + (bad - good) / 2;
            if fits(&middle) { good = middle } else { bad = middle }
        }
        // What is left over is part of a stream: the load grows evenly between two widths.
        let streams = good.max(1);
        f64::from(streams) * limit / self.full_load(streams, period).max(f64::MIN_POSITIVE)
    }

    /// As [`Self::load`], of a device in full use, by the mean of what steps cost: new turns begin at most [`TOGETHER`] at a time,
    /// and no step is wider than [`WIDE`], of flow than [`JOINED`] says.
    ///
    /// # Why
    /// - **Flow is counted by chunks.** A device that is nearly idle runs several chunks of a stream in one round, for hardly more
    ///   than one costs; in full use each round has one chunk of each stream, so that the same speech takes a third more.
    /// - **First audio decodes in rounds of its own, whoever joins them**: a group of new turns takes as many rounds as one, and there
    ///   is a group every `period`, so that where turns are many it takes the same part of the device at any rate of them. Of one
    ///   H200, calls with a first hop of 10 tokens decoded for 25 % of the time and calls of which half have 25 for 37 % (13 and 20
    ///   rounds each 36 ms: 20 and 31 %); counted by rows in full steps both were 20 %, and 490 to 528 calls of two voices were
    ///   foreseen where 380 passed and 430 did not.
    /// - **What steps beside others gain is not counted**: narrow ones overlap well, and a device in full use has few of them.
    fn full_load(&self, streams: u32, period: Duration) -> f64 {
        let per_second = |rounds: f64| rounds / self.made.seconds * f64::from(streams);
        let turns = per_second(self.made.rounds[Stage::Prefill]);
        let groups = groups(turns, period);
        let flow =
            if groups > 0.0 { (JOINED * turns / groups).clamp(FLOW_WIDTH.0, FLOW_WIDTH.1) } else { FLOW_WIDTH.1 };
        let each = |(stage, rounds): (Stage, &f64)| {
            let most = match stage {
                Stage::Prefill => TOGETHER as u32,
                Stage::Flow => flow as u32,
                Stage::Decode | Stage::Vocode => WIDE,
            };
            let width = f64::from((streams / 2).clamp(1, self.width[stage].clamp(1, most)));
            let (rows, costs) = match stage {
                Stage::Flow => (per_second(self.made.flow_chunks), &self.by_chunks),
                _ => (per_second(*rounds), &self.costs),
            };
            let first = self.first_rounds.map_or(0.0, |first| first[Stage::Decode]);
            let least = if stage == Stage::Decode { first * groups } else { 0.0 };
            let rounds = (rows / width).max(least);
            if rounds <= 0.0 { 0.0 } else { rounds * costs.mean(stage, (rows / rounds).round().max(1.0) as usize, 1) }
        };
        self.made.rounds.iter().map(each).sum::<f64>()
    }

    /// How long first audio takes where `streams` streams need it at the same time, in seconds.
    pub(super) fn first_audio(&self, streams: u32) -> f64 {
        self.first_rounds.as_ref().map_or(0.0, |rounds| self.seconds_for(rounds, streams))
    }

    /// How long a chunk takes where `streams` streams need one at the same time, in seconds: not what chunks took of
    /// late, in steps with batch and in no hurry, if they would take less without it.
    pub(super) fn chunk(&self, streams: u32) -> f64 {
        let alone = self.chunk_rounds.as_ref().map_or(0.0, |rounds| self.seconds_for(rounds, streams));
        self.chunk_service.unwrap_or(0.0).min(alone)
    }

    /// Device seconds for so many rounds of each stage by `streams` streams together, in steps as wide as they allow.
    fn seconds_for(&self, rounds: &PerStage<f64>, streams: u32) -> f64 {
        let seconds = |(stage, rounds): (Stage, &f64)| {
            let most = self.width[stage];
            if *rounds <= 0.0 || most == 0 {
                return 0.0;
            }
            let width = streams.clamp(1, most);
            let times = f64::from(streams.max(1)) / f64::from(width);
            rounds * self.cost(stage, width as usize, 1) * times
        };
        rounds.iter().map(seconds).sum()
    }
}

/// Groups a second in which so many turns begin, of which one begins every `period` at most unless they are full before.
fn groups(turns: f64, period: Duration) -> f64 {
    turns.min((1.0 / period.as_secs_f64()).max(turns / TOGETHER as f64))
}

fn smooth(value: &mut Option<f64>, new: f64) {
    *value = Some(value.map_or(new, |old| old + WEIGHT * (new - old)));
}

fn smooth_all(values: &mut Option<PerStage<f64>>, new: PerStage<f64>) {
    match values {
        Some(old) => new.iter().for_each(|(stage, new)| old[stage] += WEIGHT * (new - old[stage])),
        None => *values = Some(new),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sched::step::Slot;
    use crate::sched::tests::{LIMITS, spec};
    use crate::turn::Class;

    const PERIOD: Duration = Duration::from_millis(33);

    #[test]
    fn streams_that_meet_in_wide_steps_cost_less_each() {
        let now = crate::clock::now();
        let mut forecast = Forecast::new(&LIMITS, &PerStage::splat(Duration::from_millis(10)).into());
        assert_eq!((forecast.load(5), forecast.sustainable(0.9, PERIOD)), (0.0, 0.0), "nothing is known yet");
        let mut job = Job::new(spec(1, Class::Live), 0, now);
        job.rounds[Stage::Vocode] = 2;
        // Two steps of 10 ms make half a second.
        forecast.produced(&job, 12_000);
        assert!((forecast.load(1) - 0.04).abs() < 1e-9, "{}", forecast.load(1));
        assert!((forecast.first_audio(1) - 0.02).abs() < 1e-9);
        // A step of two is taken to cost 1.19 times one of one until it was seen: four streams are two such pairs.
        assert!(forecast.load(4) < 4.0 * forecast.load(1));
        let most = forecast.sustainable(0.9, PERIOD);
        assert!((forecast.load(most as u32) - 0.9).abs() < 0.05, "{most}");
    }

    #[test]
    fn flow_in_full_use_is_counted_by_chunks() {
        let now = crate::clock::now();
        let limits = EngineLimits { width: PerStage::new([0, 0, 32, 32]), ..LIMITS };
        // A chunk takes a millisecond, however many are in a round.
        let mut seeds = Seeds::default();
        for width in [1, 2, 4, 8, 16, 32] {
            seeds.add(Stage::Flow, width, Duration::from_millis(width as u64));
        }
        let mut forecast = Forecast::new(&limits, &seeds);
        // Four chunks in 13 rounds of one stream, a second of audio each.
        let step = Step { stage: Stage::Flow, slots: vec![Slot(0)], rounds: 13 };
        forecast.observe(&step, Duration::from_millis(40), 40);
        let mut job = Job::new(spec(1, Class::Live), 0, now);
        (job.rounds[Stage::Flow], job.chunk_rounds) = (13, 40);
        forecast.produced(&job, 96_000);
        let counted = forecast.sustainable(1.0, PERIOD);
        assert!((90.0..110.0).contains(&counted), "40 ms are 4 s of speech: {counted}");
    }

    #[test]
    fn steps_of_flow_are_wider_where_turns_are_shorter() {
        let limits = EngineLimits { width: PerStage::new([32, 256, 64, 32]), ..LIMITS };
        let mut seeds = Seeds::default();
        for width in [1, 16, 64] {
            seeds.add(Stage::Flow, width, Duration::from_micros(900 + 100 * width as u64));
        }
        let load = |seconds: u32| {
            let mut forecast = Forecast::new(&limits, &seeds);
            let mut job = Job::new(spec(1, Class::Live), 0, crate::clock::now());
            (job.rounds, job.chunk_rounds) = (PerStage::new([1, 0, 10 * seconds, 0]), 10 * seconds);
            forecast.produced(&job, 24_000 * u64::from(seconds));
            forecast.full_load(200, PERIOD)
        };
        // 2,000 rounds of a chunk: at 33, as 100 turns a second begin in 30 groups, and at 16.
        assert!((load(2) - 2_000.0 / 33.0 * 4.2e-3).abs() < 0.003, "{}", load(2));
        assert!((load(12) - 2_000.0 / 16.0 * 2.5e-3).abs() < 0.003, "{}", load(12));
    }

    /// Steps take a millisecond, whatever their width.
    #[test]
    fn first_audio_decodes_in_rounds_of_its_own() {
        let limits = EngineLimits { width: PerStage::new([32, 256, 32, 32]), ..LIMITS };
        let mut seeds = Seeds::default();
        for stage in Stage::ALL {
            seeds.add(stage, 1, Duration::from_millis(1));
            seeds.add(stage, 256, Duration::from_millis(1));
        }
        let mut forecast = Forecast::new(&limits, &seeds);
        let mut job = Job::new(spec(1, Class::Live), 0, crate::clock::now());
        job.rounds = PerStage::new([1, 13, 0, 0]);
        forecast.produced(&job, 24_000);
        // Each by itself, in groups, and in groups that are full before their time.
        for (turns, expected) in [(0.0, 0.0), (10.0, 10.0), (100.0, 1.0 / 0.033), (400.0, 50.0)] {
            let found = groups(turns, PERIOD);
            assert!((found - expected).abs() < 1e-6, "{found} groups of {turns} turns");
        }
        // A hundred turns of a second: 394 rounds, where 41 would be as wide as they may be, and 13 prefills.
        let load = forecast.full_load(100, PERIOD);
        assert!((load - 0.406).abs() < 0.001, "{load}");
    }
}
