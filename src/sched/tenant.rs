//! Fairness between API tokens, and their limits.
//!
//! Each tenant has a virtual time: the device time its jobs were charged, divided by its weight. Inside a
//! class the tenant with the least goes first (weighted fair queueing). One that comes back after a pause
//! starts at the least time of those that are active, so that a pause earns no credit.
//!
//! Shares are of one device, so each scheduler has its own. What a token may take is the same however many devices
//! there are, so the schedulers of all devices count in the same [`Quotas`].

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use super::config::{Config, Tenant as Limits};

/// A tenant counts as there for so long after it last asked for live speech.
const RECENT: Duration = Duration::from_secs(10);
/// Names come from configured tokens, so there are few; beyond this many, newcomers share the first entry.
const MAX_TENANTS: usize = 4096;

/// What tenants have taken of their limits, on all devices together.
#[derive(Debug, Default)]
pub struct Quotas {
    all: Mutex<HashMap<Arc<str>, Arc<Quota>>>,
    /// The limits of each, and of those that are not named, where they are others than schedulers began with.
    limits: RwLock<Option<(BTreeMap<String, Limits>, Limits)>>,
}

impl Quotas {
    /// Other limits from now on; what was taken of them stays taken.
    pub fn limit(&self, tenants: &BTreeMap<String, Limits>, others: &Limits) {
        let mut limits = self.limits.write().unwrap_or_else(PoisonError::into_inner);
        *limits = Some((tenants.clone(), others.clone()));
        for (name, quota) in &*self.all.lock().unwrap_or_else(PoisonError::into_inner) {
            quota.limit(tenants.get(&**name).unwrap_or(others));
        }
    }

    fn of(&self, name: &Arc<str>, config: &Config, now: Instant) -> Arc<Quota> {
        // Insertion leaves no half state behind a panic.
        let changed = self.limits.read().unwrap_or_else(PoisonError::into_inner);
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || {
            let (tenants, others) = match &*changed {
                Some((tenants, others)) => (tenants, others),
                None => (&config.tenants, &config.tenant_default),
            };
            Arc::new(Quota::new(tenants.get(&**name).unwrap_or(others), now))
        };
        all.entry(name.clone()).or_insert_with(new).clone()
    }
}

#[derive(Debug)]
struct Quota {
    /// As [`Limits`] has them; the weight by its bits. Read by every comparison of ranks, and seldom changed.
    weight: AtomicU64,
    chars_per_minute: AtomicU32,
    max_live: AtomicU32,
    /// Live streams with unfinished work.
    live_streams: AtomicU32,
    bucket: Mutex<Bucket>,
}

#[derive(Debug)]
struct Bucket {
    /// Characters that may come now; negative while in debt (text of an accepted turn is never cut off).
    chars: f64,
    refilled: Instant,
}

impl Quota {
    fn new(limits: &Limits, now: Instant) -> Self {
        let chars = f64::from(limits.chars_per_minute);
        let quota = Self {
            weight: AtomicU64::default(),
            chars_per_minute: AtomicU32::default(),
            max_live: AtomicU32::default(),
            live_streams: AtomicU32::new(0),
            bucket: Mutex::new(Bucket { chars, refilled: now }),
        };
        quota.limit(limits);
        quota
    }

    fn limit(&self, limits: &Limits) {
        self.weight.store(limits.weight.to_bits(), Ordering::Relaxed);
        self.chars_per_minute.store(limits.chars_per_minute, Ordering::Relaxed);
        self.max_live.store(limits.max_live, Ordering::Relaxed);
    }

    fn change<T>(&self, change: impl FnOnce(&mut Bucket) -> T) -> T {
        change(&mut self.bucket.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A live stream's part of its tenant's limit, until it is dropped.
#[derive(Debug)]
pub(super) struct Permit(Arc<Quota>);

#[cfg(test)]
impl Permit {
    /// A part of no limit.
    pub(super) fn unlimited() -> Self {
        let quota = Quota::new(&Limits::default(), crate::clock::now());
        quota.live_streams.store(1, Ordering::Relaxed);
        Self(Arc::new(quota))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.live_streams.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Debug)]
struct Tenant {
    quota: Arc<Quota>,
    /// Charged device seconds divided by the weight.
    time: f64,
    /// Jobs in the scheduler.
    jobs: u32,
    /// When it last asked for live speech.
    asked: Option<Instant>,
}

impl Tenant {
    /// Whether it has live streams, or asked for one of late. Batch is refused nothing, and needs no room kept.
    fn is_there(&self, now: Instant) -> bool {
        self.streams() > 0.0 || self.asked.is_some_and(|at| now.saturating_duration_since(at) < RECENT)
    }

    fn streams(&self) -> f64 {
        f64::from(self.quota.live_streams.load(Ordering::Relaxed))
    }

    fn weight(&self) -> f64 {
        f64::from_bits(self.quota.weight.load(Ordering::Relaxed))
    }
}

/// All tenants seen so far, by index.
#[derive(Debug, Default)]
pub(super) struct Tenants {
    quotas: Arc<Quotas>,
    names: HashMap<Arc<str>, usize>,
    all: Vec<Tenant>,
}

impl Tenants {
    pub(super) fn new(quotas: Arc<Quotas>) -> Self {
        Self { quotas, ..Self::default() }
    }

    pub(super) fn index(&mut self, name: &Arc<str>, config: &Config, now: Instant) -> usize {
        if let Some(&index) = self.names.get(name) {
            return index;
        }
        if self.all.len() >= MAX_TENANTS {
            return 0;
        }
        self.all.push(Tenant { quota: self.quotas.of(name, config, now), time: 0.0, jobs: 0, asked: None });
        self.names.insert(name.clone(), self.all.len() - 1);
        self.all.len() - 1
    }

    /// How long until the tenant may begin something new, if its rate is used up.
    pub(super) fn rate(&self, index: usize, now: Instant) -> Option<Duration> {
        let quota = &self.all[index].quota;
        let per_minute = f64::from(quota.chars_per_minute.load(Ordering::Relaxed));
        if per_minute == 0.0 {
            return None;
        }
        quota.change(|bucket| {
            let passed = now.saturating_duration_since(bucket.refilled).as_secs_f64();
            bucket.refilled = bucket.refilled.max(now);
            bucket.chars = (bucket.chars + passed * per_minute / 60.0).min(per_minute);
            (bucket.chars <= 0.0).then(|| Duration::from_secs_f64((1.0 - bucket.chars) * 60.0 / per_minute))
        })
    }

    pub(super) fn may_add_stream(&self, index: usize) -> bool {
        let quota = &self.all[index].quota;
        let most = quota.max_live.load(Ordering::Relaxed);
        most == 0 || quota.live_streams.load(Ordering::Relaxed) < most
    }

    /// Counts a live stream of the tenant.
    pub(super) fn permit(&self, index: usize) -> Permit {
        let quota = self.all[index].quota.clone();
        quota.live_streams.fetch_add(1, Ordering::Relaxed);
        Permit(quota)
    }

    /// The text of a job became so many characters longer.
    pub(super) fn wrote(&self, index: usize, chars: u32) {
        let quota = &self.all[index].quota;
        if quota.chars_per_minute.load(Ordering::Relaxed) > 0 {
            quota.change(|bucket| bucket.chars -= f64::from(chars));
        }
    }

    /// A job of so many characters was taken on.
    pub(super) fn job_added(&mut self, index: usize, chars: u32) {
        if self.all[index].jobs == 0 {
            let least = self.all.iter().filter(|t| t.jobs > 0).map(|t| t.time).reduce(f64::min);
            let tenant = &mut self.all[index];
            tenant.time = tenant.time.max(least.unwrap_or(0.0));
        }
        self.all[index].jobs += 1;
        self.wrote(index, chars);
    }

    pub(super) fn job_ended(&mut self, index: usize) {
        self.all[index].jobs -= 1;
    }

    pub(super) fn charge(&mut self, index: usize, seconds: f64) {
        let tenant = &mut self.all[index];
        tenant.time += seconds / tenant.weight();
    }

    /// The tenant asks for live speech.
    pub(super) fn asks(&mut self, index: usize, now: Instant) {
        self.all[index].asked = Some(now);
    }

    /// Whether the tenant has more of the live streams than its weight among those that are there, and is not the only one.
    pub(super) fn has_more_than_its_share(&self, index: usize, now: Instant) -> bool {
        let there = || self.all.iter().filter(|tenant| tenant.is_there(now));
        let (streams, weights): (f64, f64) = (there().map(Tenant::streams).sum(), there().map(Tenant::weight).sum());
        let tenant = &self.all[index];
        there().count() > 1 && tenant.streams() * weights > streams * tenant.weight()
    }

    pub(super) fn time(&self, index: usize) -> f64 {
        self.all[index].time
    }

    /// How much later a tenant's first audio counts for having used more than the one with the `least`. Bounded by the
    /// target of first audio, so that no turn is late by fairness alone for more than that.
    pub(super) fn lag(&self, index: usize, least: f64, target: Duration) -> Duration {
        if self.active() < 2 {
            return Duration::ZERO;
        }
        let ahead = (self.time(index) - least).max(0.0);
        Duration::from_secs_f64(ahead.min(target.as_secs_f64()))
    }

    /// The least virtual time of those that have work.
    pub(super) fn least(&self) -> f64 {
        self.all.iter().filter(|t| t.jobs > 0).map(|t| t.time).reduce(f64::min).unwrap_or(0.0)
    }

    /// How many have work.
    fn active(&self) -> usize {
        self.all.iter().filter(|t| t.jobs > 0).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_has_more_than_its_share_only_beside_others() {
        let (now, mut tenants, mut config) = (crate::clock::now(), Tenants::default(), Config::default());
        config.tenants.insert("heavy".into(), Limits { weight: 3.0, ..Limits::default() });
        let heavy = tenants.index(&"heavy".into(), &config, now);
        let _six: Vec<Permit> = (0..6).map(|_| tenants.permit(heavy)).collect();
        let light = tenants.index(&"light".into(), &config, now);
        tenants.job_added(light, 1);
        assert!(!tenants.has_more_than_its_share(heavy, now), "the other has batch only");
        tenants.asks(light, now);
        assert!(tenants.has_more_than_its_share(heavy, now) && !tenants.has_more_than_its_share(light, now));
        let two = [tenants.permit(light), tenants.permit(light)];
        assert!(!tenants.has_more_than_its_share(heavy, now), "six to two is three to one");
        let third = tenants.permit(light);
        assert!(tenants.has_more_than_its_share(light, now) && !tenants.has_more_than_its_share(heavy, now));
        drop((two, third));
        assert!(tenants.has_more_than_its_share(heavy, now + RECENT / 2), "the other asked a moment ago");
        assert!(!tenants.has_more_than_its_share(heavy, now + RECENT), "it has gone");
    }

    #[test]
    fn other_limits_count_for_who_is_there_and_for_who_comes_and_forget_nothing() {
        let (now, config, quotas) = (crate::clock::now(), Config::default(), Arc::new(Quotas::default()));
        let mut tenants = Tenants::new(quotas.clone());
        let here = tenants.index(&"here".into(), &config, now);
        let _stream = tenants.permit(here);
        assert!(tenants.may_add_stream(here) && tenants.rate(here, now).is_none());
        let one = Limits { max_live: 1, weight: 4.0, ..Limits::default() };
        let others = Limits { chars_per_minute: 60, ..Limits::default() };
        quotas.limit(&BTreeMap::from([("here".to_owned(), one)]), &others);
        assert!(!tenants.may_add_stream(here), "the stream from before counts");
        tenants.charge(here, 2.0);
        assert_eq!(tenants.time(here), 0.5, "by its new weight");
        let new = tenants.index(&"new".into(), &config, now);
        tenants.wrote(new, 60);
        assert!(tenants.rate(new, now).is_some(), "not as its scheduler began with");
        quotas.limit(&BTreeMap::new(), &Limits::default());
        assert!(tenants.may_add_stream(here) && tenants.rate(new, now).is_none());
    }

    #[test]
    fn limits_hold_for_all_devices_together() {
        let now = crate::clock::now();
        let limit = Limits { max_live: 2, chars_per_minute: 60, ..Limits::default() };
        let config = Config { tenant_default: limit, ..Config::default() };
        let quotas = Arc::new(Quotas::default());
        let mut devices = [Tenants::new(quotas.clone()), Tenants::new(quotas)];
        let of = devices.each_mut().map(|tenants| tenants.index(&"one".into(), &config, now));
        let first = devices[0].permit(of[0]);
        let _second = devices[1].permit(of[1]);
        assert!(!devices[0].may_add_stream(of[0]) && !devices[1].may_add_stream(of[1]));
        drop(first);
        assert!(devices[1].may_add_stream(of[1]));
        devices[0].job_added(of[0], 60);
        assert!(devices[1].rate(of[1], now).is_some(), "a minute's worth was spoken on the other device");
        assert_eq!(devices[0].rate(of[0], now + Duration::from_secs(2)), None, "it refills once, not once a device");
        assert!(devices[1].rate(of[1], now + Duration::from_secs(2)).is_none());
    }
}
