//! How much may be called through a trunk: calls at a time, calls a minute, minutes a day.
//!
//! A state machine over `now`; [`Quotas`] shares one a trunk between calls, and a call holds a [`Lease`]. What a stolen
//! token can cost is bounded by these, whatever its prefixes allow.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use super::config::TrunkConfig;
use crate::clock;

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3_600);
/// Hours that `minutes_per_day` looks back.
const HOURS: usize = 24;

/// What one trunk allows and what was used of it. 0 means no limit.
#[derive(Debug)]
struct Usage {
    name: String,
    max_calls: usize,
    calls_per_minute: usize,
    per_day: Duration,
    /// Calls that are up, and since when they are answered.
    calls: HashMap<u64, Option<Instant>>,
    /// When calls of the last minute began. Bounded by `calls_per_minute`.
    begun: VecDeque<Instant>,
    /// Time spent on calls that ended, by the hour in which they did: the last 24 of them.
    hours: VecDeque<(Instant, Duration)>,
    next: u64,
}

impl Usage {
    fn new(trunk: &TrunkConfig) -> Usage {
        Usage {
            name: trunk.name.clone(),
            max_calls: trunk.max_calls,
            calls_per_minute: trunk.calls_per_minute,
            per_day: MINUTE * trunk.minutes_per_day,
            calls: HashMap::new(),
            begun: VecDeque::new(),
            hours: VecDeque::new(),
            next: 0,
        }
    }

    /// Counts a call that is about to be placed; its number.
    fn begin(&mut self, now: Instant) -> Result<u64, String> {
        while self.begun.front().is_some_and(|at| now.saturating_duration_since(*at) >= MINUTE) {
            self.begun.pop_front();
        }
        let full = |key: &str, limit: usize| format!("[[sip.trunk]] `{}`: {key} = {limit} is reached", self.name);
        if self.max_calls > 0 && self.calls.len() >= self.max_calls {
            return Err(full("max_calls", self.max_calls));
        }
        if self.calls_per_minute > 0 && self.begun.len() >= self.calls_per_minute {
            return Err(full("calls_per_minute", self.calls_per_minute));
        }
        if self.is_exhausted(now) {
            let minutes = usize::try_from(self.per_day.as_secs() / 60).unwrap_or(usize::MAX);
            return Err(full("minutes_per_day", minutes));
        }
        if self.calls_per_minute > 0 {
            self.begun.push_back(now);
        }
        self.next += 1;
        self.calls.insert(self.next, None);
        Ok(self.next)
    }

    fn answered(&mut self, now: Instant, call: u64) {
        if let Some(since) = self.calls.get_mut(&call) {
            *since = Some(now);
        }
    }

    fn end(&mut self, now: Instant, call: u64) {
        let Some(Some(since)) = self.calls.remove(&call) else { return };
        let spent = now.saturating_duration_since(since);
        match self.hours.back_mut().filter(|(at, _)| now.saturating_duration_since(*at) < HOUR) {
            Some((_, sum)) => *sum += spent,
            None => self.hours.push_back((now, spent)),
        }
        while self.hours.len() > HOURS {
            self.hours.pop_front();
        }
    }

    /// Whether the minutes of the last 24 hours are used up, those of calls that are up included.
    fn is_exhausted(&self, now: Instant) -> bool {
        if self.per_day.is_zero() {
            return false;
        }
        let day = HOUR * 24;
        let ended = self.hours.iter().filter(|(at, _)| now.saturating_duration_since(*at) < day);
        let up = self.calls.values().flatten().map(|since| now.saturating_duration_since(*since).min(day));
        ended.map(|(_, spent)| *spent).sum::<Duration>() + up.sum::<Duration>() >= self.per_day
    }
}

/// The usage of every trunk, in the order of the configuration. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Quotas(Arc<Vec<Mutex<Usage>>>);

impl Quotas {
    pub(super) fn new(trunks: &[TrunkConfig]) -> Quotas {
        Quotas(Arc::new(trunks.iter().map(|trunk| Mutex::new(Usage::new(trunk))).collect()))
    }

    /// Counts a call through the trunk at `index` for as long as the lease lives.
    ///
    /// # Errors
    /// A limit is reached; the text names its key.
    pub(super) fn begin(&self, index: usize) -> Result<Lease, String> {
        let call = match self.with(index, |usage| usage.begin(clock::now())) {
            Some(begun) => begun?,
            None => 0,
        };
        Ok(Lease { quotas: self.clone(), index, call })
    }

    fn with<T>(&self, index: usize, work: impl FnOnce(&mut Usage) -> T) -> Option<T> {
        // Nothing here panics while it holds one.
        self.0.get(index).map(|usage| work(&mut usage.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

/// A call's place in the usage of its trunk.
#[derive(Debug)]
pub(super) struct Lease {
    quotas: Quotas,
    index: usize,
    call: u64,
}

impl Lease {
    /// Its minutes count from now.
    pub(super) fn answered(&self) {
        self.quotas.with(self.index, |usage| usage.answered(clock::now(), self.call));
    }

    /// Whether the trunk's minutes are used up.
    pub(super) fn is_exhausted(&self) -> bool {
        self.quotas.with(self.index, |usage| usage.is_exhausted(clock::now())).unwrap_or(false)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.quotas.with(self.index, |usage| usage.end(clock::now(), self.call));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(limits: &str) -> Usage {
        let trunk = toml::from_str(&format!("name = \"t\"\nhost = \"h\"\n{limits}")).expect("valid");
        Usage::new(&trunk)
    }

    #[test]
    fn calls_at_a_time_and_a_minute_are_bounded() {
        let now = clock::now();
        let mut usage = usage("max_calls = 2\ncalls_per_minute = 3\nminutes_per_day = 0");
        let (first, _second) = (usage.begin(now).expect("free"), usage.begin(now).expect("free"));
        assert!(usage.begin(now).expect_err("full").contains("max_calls = 2"));
        usage.end(now, first);
        let third = usage.begin(now).expect("free again");
        usage.end(now, third);
        assert!(usage.begin(now + MINUTE / 2).expect_err("too fast").contains("calls_per_minute = 3"));
        assert!(usage.begin(now + MINUTE).is_ok());
    }

    #[test]
    fn minutes_count_from_the_answer_and_come_back_a_day_later() {
        let now = clock::now();
        let mut usage = usage("max_calls = 0\ncalls_per_minute = 0\nminutes_per_day = 10");
        let call = usage.begin(now).expect("free");
        assert!(!usage.is_exhausted(now + MINUTE * 60), "it only rings");
        usage.answered(now, call);
        assert!(!usage.is_exhausted(now + MINUTE * 9));
        assert!(usage.is_exhausted(now + MINUTE * 10), "while it is up");
        usage.end(now + MINUTE * 10, call);
        assert!(usage.begin(now + MINUTE * 20).expect_err("used up").contains("minutes_per_day = 10"));
        assert!(usage.begin(now + MINUTE * 10 + HOUR * 24).is_ok());
        for hour in 0..100 {
            let at = now + HOUR * (30 + hour);
            let Ok(call) = usage.begin(at) else { continue };
            usage.answered(at, call);
            usage.end(at + Duration::from_secs(1), call);
        }
        assert!(usage.hours.len() <= HOURS, "memory is bounded");
    }
}
