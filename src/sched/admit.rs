//! Whether new work is taken on: a promise that cannot be kept is not made.
//!
//! Only what begins something is refused. Further utterances of a stream that has unfinished work continue a turn
//! that was promised, so they are taken on up to the queue's bound.
//!
//! # Why
//! The load is predicted from what speech costs in *rounds* (learned, the same at any load) and what rounds
//! cost at the *width* that so many streams would give (learned per width), not from how busy the device is:
//! a device that runs narrow steps is always busy and has most of its capacity left.

use std::time::{Duration, Instant};

use super::Scheduler;
use super::job::{Job, JobSpec};
use super::step::Stage;
use crate::audio::duration_of;
use crate::turn::Class;

/// Weight of a new observation in smoothed figures.
const WEIGHT: f64 = 0.1;
/// What remains of an observation after the next one: some hundreds of chunks count.
const FADE: f64 = 0.998;
/// A new turn finds a step running and others ahead of it: what it needs alone, times this.
const QUEUEING: f64 = 1.5;
/// A promise no device can keep is not asked of it: the target is at least this many times what an idle
/// device needs.
const LENIENCE: f64 = 3.0;
/// Bounds of what clients are told to wait.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// More streams than any device is asked about.
const MOST_STREAMS: u32 = 1 << 16;

/// Why work was not taken on, and when to try again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}; try again in {} s", retry_after.as_secs_f64().ceil())]
pub struct Refused {
    /// Why.
    pub reason: RefusedReason,
    /// When trying again is worth while.
    pub retry_after: Duration,
}

/// Why work was not taken on. Closed: also a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RefusedReason {
    /// It would make speech that was promised late, or be late itself.
    #[error("the speech engine is at its limit")]
    Overloaded,
    /// `max_live` or `max_queued` is reached.
    #[error("too much speech is waiting already")]
    Full,
    /// The tenant has used up its rate.
    #[error("the rate limit of this API token is reached")]
    RateLimited,
    /// The tenant has as many live streams as it may.
    #[error("this API token speaks on as many calls as it may")]
    TenantFull,
    /// No device is ready.
    #[error("the speech engine is not ready")]
    NotReady,
}

impl RefusedReason {
    /// The metric label.
    pub fn label(self) -> &'static str {
        match self {
            RefusedReason::Overloaded => "overloaded",
            RefusedReason::Full => "full",
            RefusedReason::RateLimited => "rate_limited",
            RefusedReason::TenantFull => "tenant_full",
            RefusedReason::NotReady => "not_ready",
        }
    }
}

/// What speech takes on this engine, smoothed.
#[derive(Debug, Default)]
pub(super) struct Learned {
    /// Rounds of each stage until the first audio of a live utterance.
    first_rounds: Option<[f64; 4]>,
    /// Rounds of each stage and seconds of audio that they made, both fading: their ratio is what a second of
    /// audio takes. (A mean of ratios would follow the short first chunks.)
    rounds: [f64; 4],
    seconds: f64,
    /// Device time of the steps that a chunk after the first took part in, seconds.
    pub(super) chunk_service: Option<f64>,
    /// Rounds of each stage that a chunk after the first takes.
    chunk_rounds: Option<[f64; 4]>,
    /// Samples a character stands for.
    samples_per_char: Option<f64>,
    /// Bytes a character needs at most.
    bytes_per_char: Option<f64>,
}

impl Learned {
    /// `job` has just given `samples`, before its counters are reset.
    pub(super) fn produced(&mut self, job: &Job, samples: u64) {
        let rounds = job.rounds.map(f64::from);
        if job.samples == 0 && job.is_live() {
            smooth_all(&mut self.first_rounds, rounds);
        }
        let seconds = duration_of(samples).as_secs_f64();
        self.rounds.iter_mut().zip(rounds).for_each(|(sum, new)| *sum = *sum * FADE + new);
        self.seconds = self.seconds * FADE + seconds;
        if job.samples > 0 {
            smooth(&mut self.chunk_service, job.service.as_secs_f64());
            smooth_all(&mut self.chunk_rounds, rounds);
        }
    }

    pub(super) fn spoken(&mut self, samples: u64, chars: u32) {
        if chars > 0 {
            smooth(&mut self.samples_per_char, samples as f64 / f64::from(chars));
        }
    }

    pub(super) fn sized(&mut self, bytes: u64, chars: u32) {
        if bytes > 0 && chars > 0 {
            smooth(&mut self.bytes_per_char, bytes as f64 / f64::from(chars));
        }
    }

    pub(super) fn seconds_of(&self, chars: u32) -> f64 {
        // 15 characters a second is a common speaking rate, until the voice is known.
        f64::from(chars) * self.samples_per_char.map_or(1.0 / 15.0, |s| s / f64::from(crate::audio::RATE))
    }
}

impl Scheduler {
    pub(super) fn admit(&mut self, now: Instant, spec: &JobSpec, tenant: usize, begins: bool) -> Result<(), Refused> {
        let refuse =
            |reason, retry_after: Duration| Err(Refused { reason, retry_after: retry_after.clamp(RETRY.0, RETRY.1) });
        if self.jobs.len() >= self.config.max_queued as usize {
            return refuse(RefusedReason::Full, RETRY.0);
        }
        if !begins {
            return Ok(());
        }
        if let Some(wait) = self.tenants.rate(tenant, now) {
            return refuse(RefusedReason::RateLimited, wait);
        }
        if spec.class == Class::Batch {
            return Ok(());
        }
        if !self.tenants.may_add_stream(tenant) {
            return refuse(RefusedReason::TenantFull, self.until_a_stream_ends(now));
        }
        self.takes_a_stream(now, spec.chars)
    }

    /// Whether one more live stream would be taken on, of whatever tenant.
    ///
    /// # Errors
    /// It would not, and when to ask again.
    pub fn has_room(&self, now: Instant) -> Result<(), Refused> {
        if self.jobs.len() >= self.config.max_queued as usize {
            return Err(Refused { reason: RefusedReason::Full, retry_after: RETRY.0 });
        }
        self.takes_a_stream(now, 0)
    }

    fn takes_a_stream(&self, now: Instant, chars: u32) -> Result<(), Refused> {
        let refuse =
            |reason| Err(Refused { reason, retry_after: self.until_a_stream_ends(now).clamp(RETRY.0, RETRY.1) });
        if self.live_streams >= self.config.max_live {
            return refuse(RefusedReason::Full);
        }
        // An idle device takes on whatever comes: it is as good as it gets.
        if self.live_streams == 0 {
            return Ok(());
        }
        let (load, first) = (self.predicted_load(self.live_streams + 1), self.predicted_first_audio());
        let (promise, memory) = (self.promise(), self.has_memory_for(now, chars));
        let over =
            self.live_streams >= self.live_slots() || load > self.config.load_limit || first > promise || !memory;
        if over {
            tracing::debug!(streams = self.live_streams, load, first, promise, memory, "speech was refused");
            return refuse(RefusedReason::Overloaded);
        }
        Ok(())
    }

    /// Slots that live streams may have: one is left for batch that has starved for its patience.
    pub(super) fn live_slots(&self) -> u32 {
        self.limits.slots - u32::from(self.limits.slots > 1)
    }

    /// Share of the device that `streams` speaking streams need. They are taken to meet in steps half as wide as
    /// their number: they are in different stages.
    pub(super) fn predicted_load(&self, streams: u32) -> f64 {
        if self.learned.seconds == 0.0 {
            return 0.0;
        }
        let rounds = self.learned.rounds.map(|rounds| rounds / self.learned.seconds);
        let per_second = self.seconds_for(&rounds, (streams / 2).max(1));
        per_second * f64::from(streams) / f64::from((streams / 2).max(1))
    }

    /// How many speaking streams the device is predicted to keep up with; 0 until something was spoken.
    pub(super) fn carries(&self) -> f64 {
        if self.learned.seconds == 0.0 {
            return 0.0;
        }
        let fits = |streams: &u32| self.predicted_load(*streams) <= self.config.load_limit;
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
        f64::from(streams) * self.config.load_limit / self.predicted_load(streams).max(f64::MIN_POSITIVE)
    }

    /// How long the first audio of one more silent stream would take, in seconds.
    fn predicted_first_audio(&self) -> f64 {
        let Some(rounds) = &self.learned.first_rounds else { return 0.0 };
        let silent = self.jobs.values().filter(|job| job.is_live() && job.samples == 0);
        let silent = silent.filter(|job| self.is_front(job)).count() as u32;
        self.seconds_for(rounds, silent + 1) * QUEUEING
    }

    /// What is promised to a new turn, in seconds.
    fn promise(&self) -> f64 {
        let alone = self.learned.first_rounds.as_ref().map_or(0.0, |rounds| self.seconds_for(rounds, 1));
        self.config.first_audio_target().as_secs_f64().max(alone * LENIENCE)
    }

    /// Device seconds for so many rounds of each stage by `streams` streams together, in steps as wide as they allow.
    fn seconds_for(&self, rounds: &[f64; 4], streams: u32) -> f64 {
        let stages = Stage::ALL.iter().zip(rounds).zip(self.limits.width);
        stages
            .filter(|((_, rounds), width)| **rounds > 0.0 && *width > 0)
            .map(|((stage, rounds), most)| {
                let width = streams.clamp(1, most);
                let times = f64::from(streams.max(1)) / f64::from(width);
                rounds * self.costs.predict(*stage, width as usize, 1) * times
            })
            .sum()
    }

    /// How long a chunk takes where `streams` streams need one at the same time and nothing else is in their steps, in
    /// seconds.
    pub(super) fn chunk_seconds(&self, streams: u32) -> f64 {
        self.learned.chunk_rounds.as_ref().map_or(0.0, |rounds| self.seconds_for(rounds, streams))
    }

    fn has_memory_for(&self, now: Instant, chars: u32) -> bool {
        if self.limits.memory == 0 {
            return true;
        }
        let needed = self.learned.bytes_per_char.unwrap_or(0.0) * f64::from(chars);
        let live = self.jobs.values().filter(|job| job.is_live() && self.is_front(job));
        let held: u64 = live.map(|job| job.memory).sum();
        // Streams that rest at their lead limit hold theirs as well: while batch starves, room for a sentence is left to it.
        let aged = self.batch_is_aged(now);
        let batch = self.jobs.values().filter(|job| aged && !job.is_live()).map(|job| job.memory).max().unwrap_or(0);
        (held + batch) as f64 + needed <= self.limits.memory as f64
    }

    pub(super) fn is_front(&self, job: &Job) -> bool {
        let front = self.streams.get(&job.spec.stream).and_then(|stream| stream.jobs.front());
        front.and_then(|id| self.jobs.get(id)).is_some_and(|front| std::ptr::eq(front, job))
    }

    /// When the live stream nearest to its end will have been produced.
    fn until_a_stream_ends(&self, now: Instant) -> Duration {
        let left = |job: &Job| {
            let text = self.learned.seconds_of(job.spec.chars) - duration_of(job.samples).as_secs_f64();
            let lead = self.streams.get(&job.spec.stream).map_or(Duration::ZERO, |stream| stream.lead(now));
            text.max(0.0) + lead.saturating_sub(self.config.max_lead()).as_secs_f64()
        };
        let least = self.jobs.values().filter(|job| job.is_live()).map(left).reduce(f64::min);
        Duration::from_secs_f64(least.unwrap_or(0.0).min(RETRY.1.as_secs_f64()))
    }
}

fn smooth(value: &mut Option<f64>, new: f64) {
    *value = Some(value.map_or(new, |old| old + WEIGHT * (new - old)));
}

fn smooth_all(values: &mut Option<[f64; 4]>, new: [f64; 4]) {
    match values {
        Some(old) => old.iter_mut().zip(new).for_each(|(old, new)| *old += WEIGHT * (new - *old)),
        None => *values = Some(new),
    }
}
