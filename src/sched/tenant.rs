//! Fairness between API tokens, and their limits.
//!
//! Each tenant has a virtual time: the device time its jobs were charged, divided by its weight. Inside a
//! class the tenant with the least goes first (weighted fair queueing). One that comes back after a pause
//! starts at the least time of those that are active, so that a pause earns no credit.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::config::{Config, Tenant as Limits};

/// Names come from configured tokens, so there are few; beyond this many, newcomers share the first entry.
const MAX_TENANTS: usize = 4096;

#[derive(Debug)]
struct Tenant {
    limits: Limits,
    /// Charged device seconds divided by the weight.
    time: f64,
    /// Jobs in the scheduler.
    jobs: u32,
    /// Live streams with unfinished work.
    live_streams: u32,
    /// Characters that may come now; negative while in debt (text of an accepted turn is never cut off).
    chars: f64,
    refilled: Instant,
}

/// All tenants seen so far, by index.
#[derive(Debug, Default)]
pub(super) struct Tenants {
    names: HashMap<Arc<str>, usize>,
    all: Vec<Tenant>,
}

impl Tenants {
    pub(super) fn index(&mut self, name: &Arc<str>, config: &Config, now: Instant) -> usize {
        if let Some(&index) = self.names.get(name) {
            return index;
        }
        if self.all.len() >= MAX_TENANTS {
            return 0;
        }
        let limits = config.tenants.get(&**name).unwrap_or(&config.tenant_default).clone();
        let chars = f64::from(limits.chars_per_minute);
        self.all.push(Tenant { limits, time: 0.0, jobs: 0, live_streams: 0, chars, refilled: now });
        self.names.insert(name.clone(), self.all.len() - 1);
        self.all.len() - 1
    }

    /// Takes `chars` off the tenant's rate; how long until it may begin something new, if it may not now.
    pub(super) fn rate(&mut self, index: usize, now: Instant) -> Option<Duration> {
        let tenant = &mut self.all[index];
        let per_minute = f64::from(tenant.limits.chars_per_minute);
        if per_minute == 0.0 {
            return None;
        }
        let passed = now.saturating_duration_since(tenant.refilled).as_secs_f64();
        tenant.refilled = now;
        tenant.chars = (tenant.chars + passed * per_minute / 60.0).min(per_minute);
        (tenant.chars <= 0.0).then(|| Duration::from_secs_f64((1.0 - tenant.chars) * 60.0 / per_minute))
    }

    pub(super) fn may_add_stream(&self, index: usize) -> bool {
        let tenant = &self.all[index];
        tenant.limits.max_live == 0 || tenant.live_streams < tenant.limits.max_live
    }

    pub(super) fn job_added(&mut self, index: usize, chars: u32, new_live_stream: bool) {
        if self.all[index].jobs == 0 {
            let least = self.all.iter().filter(|t| t.jobs > 0).map(|t| t.time).reduce(f64::min);
            let tenant = &mut self.all[index];
            tenant.time = tenant.time.max(least.unwrap_or(0.0));
        }
        let tenant = &mut self.all[index];
        tenant.jobs += 1;
        tenant.live_streams += u32::from(new_live_stream);
        if tenant.limits.chars_per_minute > 0 {
            tenant.chars -= f64::from(chars);
        }
    }

    pub(super) fn job_ended(&mut self, index: usize) {
        self.all[index].jobs -= 1;
    }

    pub(super) fn stream_ended(&mut self, index: usize) {
        self.all[index].live_streams -= 1;
    }

    pub(super) fn charge(&mut self, index: usize, seconds: f64) {
        let tenant = &mut self.all[index];
        tenant.time += seconds / tenant.limits.weight;
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
