//! The work that listeners are owed by an instant: what admission compares with the time there is until then.
//!
//! Streams alone say little. A turn of three seconds is made within one, long before it has been heard; a device that
//! could keep up with two hundred streams at the pace of their listeners begins and speaks about 140 such turns a second.
//! Where more come, all of them are late together: each is promised its first audio and then, chunk by chunk, that it
//! has no gap. So the chunks that are due within some horizon are counted, over all streams, as device time in steps as
//! wide as so many streams allow, and more is not taken on than fits into each of some horizons beside the first audio of
//! the turns that will come meanwhile and be due in it, at the rate at which turns came of late: the processor demand
//! criterion of earliest-deadline-first scheduling (Baruah, Rosier, Howell, "Algorithms and Complexity Concerning the
//! Preemptive Scheduling of Periodic, Real-Time Tasks on One Processor", 1990).

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::forecast::{Forecast, Speech};
use super::job::Job;
use super::step::{PerStage, Stage};
use super::table::Table;
use crate::audio::duration_of;

/// Seconds in which turns that came fade to a third.
const FADING: f64 = 1.0;

/// So many of the latest turns are known one by one, which is more than begin within any promise.
const KEPT: usize = 512;

/// How many turns begin a second, of late.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    turns: f64,
    until: Option<Instant>,
    latest: VecDeque<Instant>,
}

/// What is left at `now` of a turn that came `at`.
fn faded(at: Instant, now: Instant) -> f64 {
    (-now.saturating_duration_since(at).as_secs_f64() / FADING).exp()
}

impl Arrivals {
    /// Turns a second.
    pub(super) fn rate(&self, now: Instant) -> f64 {
        self.until.map_or(0.0, |until| self.turns * faded(until, now)) / FADING
    }

    /// Turns a second by those that did not come within the last `promise`.
    ///
    /// # Why
    /// Those that did are owed their first audio, and counted so. Where many begin at the same instant, taken for what is to come
    /// every second they count twice: of 64, simulated on one H200, 16 were refused though the last of the others was heard after
    /// 84 ms.
    pub(super) fn rate_before(&self, now: Instant, promise: Duration) -> f64 {
        let within = self.latest.iter().rev().take_while(|at| now.saturating_duration_since(**at) < promise);
        (self.rate(now) - within.map(|at| faded(*at, now)).sum::<f64>() / FADING).max(0.0)
    }

    /// Whether none was taken on for so long.
    pub(super) fn none_for(&self, now: Instant, period: Duration) -> bool {
        self.until.is_none_or(|until| now >= until + period)
    }

    /// One was taken on.
    pub(super) fn add(&mut self, now: Instant) {
        self.turns = self.rate(now) * FADING + 1.0;
        self.until = Some(now);
        if self.latest.len() == KEPT {
            self.latest.pop_front();
        }
        self.latest.push_back(now);
    }
}

/// What one stream is owed.
#[derive(Clone, Copy, Debug)]
struct Owed {
    /// Its first audio is not made yet, and is due then, in seconds from now.
    first: Option<f64>,
    /// Its next chunk after that is due then.
    next: f64,
    /// Seconds of speech that are left, without the first audio.
    left: f64,
    /// What its next audio has had of each stage.
    had: PerStage<f64>,
}

/// What all live streams are owed at one instant.
#[derive(Debug)]
pub(super) struct Demand<'a> {
    forecast: &'a Forecast,
    speech: Speech,
    owed: Vec<Owed>,
}

impl<'a> Demand<'a> {
    /// Of the live streams of `table`; first audio is due `promise` after a turn was accepted, which is `target` before its
    /// deadline, and a chunk `ahead` before the one before it was heard. `None` until the voice is known.
    pub(super) fn of(
        table: &Table,
        forecast: &'a Forecast,
        now: Instant,
        target: Duration,
        promise: Duration,
        ahead: Duration,
    ) -> Option<Self> {
        let speech = forecast.speech()?;
        let mut owed = Vec::new();
        for stream in table.streams() {
            let mut jobs = stream.jobs.iter().filter_map(|id| table.job(*id)).filter(|job| job.is_live());
            let Some(front) = jobs.next() else { continue };
            // On hold no listener waits.
            if stream.is_held() {
                continue;
            }
            let seconds =
                |job: &Job| (forecast.seconds_of(job.spec.chars) - duration_of(job.samples).as_secs_f64()).max(0.0);
            let left = seconds(front).max(speech.chunk_seconds / 2.0) + jobs.map(seconds).sum::<f64>();
            let had = front.rounds.map(f64::from);
            let lead = stream.lead(now);
            let accepted = front.deadline.checked_sub(target).unwrap_or(front.deadline);
            owed.push(if lead.is_zero() && front.samples == 0 {
                Owed::silent(&speech, (accepted + promise).saturating_duration_since(now).as_secs_f64(), left, had)
            } else {
                Owed { first: None, next: lead.saturating_sub(ahead).as_secs_f64(), left, had }
            });
        }
        Some(Self { forecast, speech, owed })
    }

    /// One more turn of so many characters begins.
    pub(super) fn add(&mut self, chars: u32, promise: Duration) {
        let left = self.forecast.seconds_of(chars);
        self.owed.push(Owed::silent(&self.speech, promise.as_secs_f64(), left, PerStage::default()));
    }

    /// Device seconds of what is due within `horizon` seconds.
    pub(super) fn within(&self, horizon: f64) -> f64 {
        let mut rows = PerStage::<f64>::default();
        let mut streams = 0;
        for owed in &self.owed {
            let due = owed.due(&self.speech, horizon);
            streams += u32::from(due.iter().any(|(_, rounds)| *rounds > 0.0));
            due.iter().for_each(|(stage, rounds)| rows[stage] += rounds);
        }
        // They are in different stages: they meet in steps half as wide as their number.
        self.forecast.device_seconds(&rows, streams.div_ceil(2).max(1))
    }
}

impl Owed {
    /// Of a stream whose first audio is due in `due` seconds, with so many seconds of `speech` in all.
    fn silent(speech: &Speech, due: f64, left: f64, had: PerStage<f64>) -> Self {
        let next = due + speech.first_seconds;
        Self { first: Some(due), next, left: (left - speech.first_seconds).max(0.0), had }
    }

    /// Rounds of each stage that are due within `horizon` seconds.
    fn due(&self, speech: &Speech, horizon: f64) -> PerStage<f64> {
        let mut due = PerStage::<f64>::default();
        if self.first.is_some_and(|first| first <= horizon) {
            due = speech.first;
        }
        if self.next <= horizon {
            // A chunk is due whole when the one before it has been heard.
            let chunks = ((horizon - self.next) / speech.chunk_seconds).floor() + 1.0;
            let seconds = (chunks * speech.chunk_seconds).min(self.left);
            speech.second.iter().for_each(|(stage, rounds)| due[stage] += rounds * seconds);
        }
        PerStage::from_fn(|stage: Stage| (due[stage] - self.had[stage]).max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speech() -> Speech {
        let first = PerStage::new([1.0, 10.0, 10.0, 1.0]);
        let second = PerStage::new([0.0, 25.0, 10.0, 1.0]);
        Speech { first, first_seconds: 0.4, second, chunk_seconds: 1.0 }
    }

    #[test]
    fn turns_that_came_within_the_promise_are_not_what_is_to_come() {
        let start = crate::clock::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut arrivals = Arrivals::default();
        // Ten a second for ten seconds, then forty at once.
        (0..100).for_each(|n| arrivals.add(at(100 * n)));
        let promise = Duration::from_millis(150);
        let usual = arrivals.rate_before(at(10_000), promise);
        assert!((8.0..11.0).contains(&usual), "{usual}");
        (0..40).for_each(|_| arrivals.add(at(10_000)));
        assert!(arrivals.rate(at(10_000)) > 45.0);
        assert!((arrivals.rate_before(at(10_000), promise) - usual).abs() < 1e-9);
        assert!(arrivals.rate_before(at(10_150), promise) > 40.0, "more than that are known to come");
    }

    #[test]
    fn a_chunk_is_due_when_the_one_before_it_was_heard() {
        let speech = speech();
        let owed = Owed::silent(&speech, 0.15, 2.0, PerStage::default());
        let flow = |horizon: f64| owed.due(&speech, horizon)[Stage::Flow];
        assert_eq!(flow(0.1), 0.0);
        assert_eq!(flow(0.15), 10.0);
        assert_eq!(flow(0.5), 10.0, "0.4 s are heard meanwhile");
        assert_eq!(flow(0.56), 20.0);
        assert!((flow(1.6) - 26.0).abs() < 1e-9, "of 2 s, 0.4 are first audio: {}", flow(1.6));
        assert!((flow(9.0) - 26.0).abs() < 1e-9);
    }

    #[test]
    fn what_a_chunk_has_had_is_not_due_again() {
        let speech = speech();
        let had = PerStage::new([1.0, 10.0, 4.0, 0.0]);
        let due = Owed::silent(&speech, 0.0, 2.0, had).due(&speech, 0.1);
        assert_eq!(due, PerStage::new([0.0, 0.0, 6.0, 1.0]));
    }
}
