//! How much may be called out: calls at a time, calls a minute, minutes a day, of a trunk or of a token.
//!
//! A state machine over `now`; a [`Meter`] shares one between calls, and a call holds a [`Lease`]. What a stolen token can
//! cost is bounded by these, whatever the prefixes of the trunk allow.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::{Duration, Instant},
};

use serde::Deserialize;

use crate::clock;

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3_600);
/// Hours that `minutes_per_day` looks back.
const HOURS: usize = 24;

/// How much; 0: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Calls out at a time.
    pub max_calls: usize,
    /// Calls out in a minute.
    pub calls_per_minute: usize,
    /// Minutes of calls out in 24 hours; when they are used up calls end.
    pub minutes_per_day: u32,
}

/// What is allowed, and what was used of it.
#[derive(Debug)]
struct Usage {
    /// Whose, as a refusal names it.
    name: String,
    limits: Limits,
    /// Calls that are up, and since when they are answered.
    calls: HashMap<u64, Option<Instant>>,
    /// When calls of the last minute began. Bounded by `calls_per_minute`.
    begun: VecDeque<Instant>,
    /// Time spent on calls that ended, by the hour in which they did: the last 24 of them.
    hours: VecDeque<(Instant, Duration)>,
    next: u64,
}

impl Usage {
    fn new(name: String, limits: Limits) -> Usage {
        let (calls, begun, hours) = Default::default();
        Usage { name, limits, calls, begun, hours, next: 0 }
    }

    /// Counts a call that is about to be placed; its number.
    fn begin(&mut self, now: Instant) -> Result<u64, String> {
        while self.begun.front().is_some_and(|at| now.saturating_duration_since(*at) >= MINUTE) {
            self.begun.pop_front();
        }
        let full = |key: &str, limit: usize| format!("{}: {key} = {limit} is reached", self.name);
        let Limits { max_calls, calls_per_minute, minutes_per_day } = self.limits;
        if max_calls > 0 && self.calls.len() >= max_calls {
            return Err(full("max_calls", max_calls));
        }
        if calls_per_minute > 0 && self.begun.len() >= calls_per_minute {
            return Err(full("calls_per_minute", calls_per_minute));
        }
        if self.is_exhausted(now) {
            return Err(full("minutes_per_day", usize::try_from(minutes_per_day).unwrap_or(usize::MAX)));
        }
        if calls_per_minute > 0 {
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
        if self.limits.minutes_per_day == 0 {
            return false;
        }
        let day = HOUR * 24;
        let ended = self.hours.iter().filter(|(at, _)| now.saturating_duration_since(*at) < day);
        let up = self.calls.values().flatten().map(|since| now.saturating_duration_since(*since).min(day));
        let used = ended.map(|(_, spent)| *spent).sum::<Duration>() + up.sum::<Duration>();
        used >= MINUTE * self.limits.minutes_per_day
    }
}

/// One usage. Clones mean the same.
#[derive(Clone, Debug)]
pub struct Meter(Arc<Mutex<Usage>>);

impl Meter {
    /// Nothing is used yet; `name` is how refusals name it.
    pub fn new(name: String, limits: Limits) -> Meter {
        Meter(Arc::new(Mutex::new(Usage::new(name, limits))))
    }

    /// Other limits; what was used stays.
    pub fn limit(&self, limits: Limits) {
        self.with(|usage| usage.limits = limits);
    }

    /// Counts a call for as long as the lease lives.
    ///
    /// # Errors
    /// A limit is reached; the text names its key.
    pub fn begin(&self) -> Result<Lease, String> {
        let call = self.with(|usage| usage.begin(clock::now()))?;
        Ok(Lease { meter: self.clone(), call })
    }

    fn with<T>(&self, work: impl FnOnce(&mut Usage) -> T) -> T {
        // Nothing here panics while it holds one.
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A call's part of a usage, until it is dropped.
#[derive(Debug)]
pub struct Lease {
    meter: Meter,
    call: u64,
}

impl Lease {
    /// Its minutes count from now.
    pub fn answered(&self) {
        self.meter.with(|usage| usage.answered(clock::now(), self.call));
    }

    /// Whether the minutes are used up.
    pub fn is_exhausted(&self) -> bool {
        self.meter.with(|usage| usage.is_exhausted(clock::now()))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.meter.with(|usage| usage.end(clock::now(), self.call));
    }
}

/// The usage of every trunk, in the order of the configuration. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Quotas(Arc<RwLock<Vec<Meter>>>);

impl Quotas {
    /// The trunks' names and limits, in the order of the configuration.
    pub(super) fn new(trunks: impl IntoIterator<Item = (String, Limits)>) -> Quotas {
        let quotas = Quotas(Arc::default());
        quotas.limit(trunks);
        quotas
    }

    /// Other limits of the trunks, and perhaps more of them; what was used stays.
    pub(super) fn limit(&self, trunks: impl IntoIterator<Item = (String, Limits)>) {
        let mut meters = self.0.write().unwrap_or_else(PoisonError::into_inner);
        for (index, (name, limits)) in trunks.into_iter().enumerate() {
            match meters.get(index) {
                Some(meter) => meter.limit(limits),
                None => meters.push(Meter::new(format!("[[sip.trunk]] `{name}`"), limits)),
            }
        }
    }

    /// Counts a call through the trunk at `index`, which is one of the configuration's, for as long as the lease lives.
    ///
    /// # Errors
    /// A limit is reached; the text names its key.
    pub(super) fn begin(&self, index: usize) -> Result<Lease, String> {
        let meter = self.0.read().unwrap_or_else(PoisonError::into_inner).get(index).cloned();
        meter.ok_or_else(|| format!("there is no trunk {index}"))?.begin()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(limits: &str) -> Usage {
        Usage::new("[[sip.trunk]] `t`".into(), toml::from_str(limits).expect("valid"))
    }

    #[test]
    fn other_limits_count_what_was_used_before() {
        let meter = Meter::new("the token `crm`".into(), Limits { calls_per_minute: 5, ..Limits::default() });
        let up = meter.begin().expect("free");
        meter.limit(Limits { max_calls: 1, ..Limits::default() });
        let full = meter.begin().expect_err("one is up");
        assert_eq!(full, "the token `crm`: max_calls = 1 is reached");
        drop(up);
        assert!(meter.begin().is_ok());
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
