//! Whether new work is taken on: a promise that cannot be kept is not made.
//!
//! Only what begins something is refused. Further utterances of a stream that has unfinished work, or whose listener still
//! hears what was made, continue a turn that was promised, so they are taken on up to the queue's bound. A sentence that
//! is written while the one before it sounds comes when the device has long made that one: taken for a new turn it was refused
//! where many were, and there was a gap in the midst of a turn.

use std::time::{Duration, Instant};

use super::Scheduler;
use super::config::Config;
use super::demand::{Arrivals, Demand};
use super::forecast::Forecast;
use super::gather::TOGETHER;
use super::job::{Job, JobSpec};
use super::latitude::Promise;
use super::memory::Memory;
use super::stream::Stream;
use super::table::Table;
use super::tenant::Tenants;
use crate::audio::duration_of;
use crate::turn::Class;

/// A new turn finds a step running and others ahead of it: what it needs alone, times this.
const QUEUEING: f64 = 1.5;
/// A promise no device can keep is not asked of it: the target is at least this many times what an idle
/// device needs.
const LENIENCE: f64 = 3.0;
/// Until when work is counted that is due, as multiples of the promise for first audio.
const HORIZONS: [f64; 5] = [1.0, 2.0, 4.0, 8.0, 16.0];
/// Turns do not come evenly: room is kept for their mean rate times this.
const BUNCHING: f64 = 1.2;
/// What part of the turns that come within a promise is not counted with what is due in it.
///
/// # Why
/// With all of them counted a tenth of a second was full while seconds were half empty: one H100 with 350 calls, and one H200 with 480,
/// refused turns at a first audio p95 of 80 and 90 ms. With none, an H200 took 580 calls on, p95 147 ms by ear, but simulated, 200 turns
/// a second have gaps, which is more than it makes; with a quarter left out none has.
const NOT_DUE: f64 = 0.25;
/// A tenant that has more than its share is given only so much of each limit while another is there: what is left takes on the turns
/// of those that have less. Without that a flood of one tenant, twice what the device makes, had half of the turns of
/// another refused, which asked for two a second.
const BESIDE_OTHERS: f64 = 0.9;
/// What part of the first audio target turns have that may be late.
const LATE: f64 = 0.75;
/// Bounds of what clients are told to wait.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

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

/// What decides about new work.
#[derive(Clone, Copy)]
pub(super) struct Admission<'a> {
    pub(super) config: &'a Config,
    pub(super) table: &'a Table,
    pub(super) forecast: &'a Forecast,
    pub(super) memory: &'a Memory,
    pub(super) tenants: &'a Tenants,
    /// Slots of the engine.
    pub(super) slots: u32,
    /// Room in memory is left to batch work that starves.
    pub(super) batch_is_owed: bool,
    /// A listener with less left than this may hear a gap before his next chunk is made.
    pub(super) critical: Duration,
    /// Turns that began of late.
    pub(super) arrivals: &'a Arrivals,
    /// One more turn may begin later than most.
    pub(super) may_be_late: bool,
}

impl<'a> Admission<'a> {
    /// Of `scheduler` as it is `now`.
    pub(super) fn of(scheduler: &'a Scheduler, now: Instant) -> Self {
        Self {
            config: &scheduler.config,
            table: &scheduler.table,
            forecast: &scheduler.forecast,
            memory: &scheduler.memory,
            tenants: &scheduler.tenants,
            slots: scheduler.limits.slots,
            batch_is_owed: scheduler.starvation.is_owed(now, &scheduler.config),
            critical: scheduler.critical,
            arrivals: &scheduler.arrivals,
            may_be_late: scheduler.latitude.is_left(),
        }
    }

    /// Whether one more job is taken on that continues speech that was promised.
    pub(super) fn check_more(&self) -> Result<(), Refused> {
        let (live, batch) = self.table.counts();
        if live + batch >= self.config.max_queued { Err(refused(RefusedReason::Full, RETRY.0)) } else { Ok(()) }
    }

    /// Whether one more job is taken on that goes on where a listener still hears what was made; `wait` as in
    /// [`Self::check_new`].
    pub(super) fn check_next(&self, wait: Option<Duration>) -> Result<(), Refused> {
        self.check_more()?;
        wait.map_or(Ok(()), |wait| Err(refused(RefusedReason::RateLimited, wait)))
    }

    /// Whether `spec` is taken on, which begins new speech; `wait`: the tenant has used up its rate for so long.
    pub(super) fn check_new(
        &self,
        now: Instant,
        spec: &JobSpec,
        tenant: usize,
        wait: Option<Duration>,
    ) -> Result<Promise, Refused> {
        self.check_more()?;
        if let Some(wait) = wait {
            return Err(refused(RefusedReason::RateLimited, wait));
        }
        if spec.class == Class::Batch {
            return Ok(Promise::Usual);
        }
        if !self.tenants.may_add_stream(tenant) {
            return Err(refused(RefusedReason::TenantFull, self.until_a_stream_ends(now)));
        }
        let crowds = self.tenants.has_more_than_its_share(tenant, now);
        self.check_live(now, spec.chars, if crowds { BESIDE_OTHERS } else { 1.0 })
    }

    /// Whether one more live stream would be taken on, of whatever tenant.
    pub(super) fn has_room(&self, now: Instant) -> Result<(), Refused> {
        self.check_more()?;
        self.check_live(now, 0, 1.0).map(|_| ())
    }

    /// Live streams that may have unfinished work at once: one slot is left for batch that has starved for its patience.
    pub(super) fn capacity(&self) -> u32 {
        self.config.max_live.min(self.live_slots())
    }

    fn live_slots(&self) -> u32 {
        self.slots - u32::from(self.slots > 1)
    }

    /// Whether one more live turn fits into `part` of what there is, and when it is then to be heard.
    fn check_live(&self, now: Instant, chars: u32, part: f64) -> Result<Promise, Refused> {
        let streams = self.table.live_streams();
        if streams >= self.config.max_live {
            return Err(refused(RefusedReason::Full, self.until_a_stream_ends(now)));
        }
        // An idle device takes on whatever comes: it is as good as it gets.
        if streams == 0 {
            return Ok(Promise::Usual);
        }
        let load = self.forecast.load(streams + 1);
        let first = self.forecast.first_audio(self.silent_streams(now) + 1) * QUEUEING;
        let target = self.config.first_audio_target().as_secs_f64();
        let promise = target.max(self.forecast.first_audio(1) * LENIENCE);
        let memory = self.has_memory_for(chars, part);
        // What is owed to starving batch work is not promised to listeners as well.
        let owed = if self.batch_is_owed { self.config.batch_min_share } else { 0.0 };
        let limit = self.config.load_limit * (1.0 - owed) * part;
        let slots = f64::from(streams) < f64::from(self.live_slots()) * part;
        // Half of the target: it is what most turns are to have, not their mean.
        let due = self.due(now, chars, 0.5);
        if slots && load <= limit && first <= promise * part && memory {
            if due <= limit {
                return Ok(Promise::Usual);
            }
            if self.may_be_late && part >= 1.0 && self.due(now, chars, LATE) <= limit {
                return Ok(Promise::Late);
            }
        }
        tracing::debug!(streams, load, first, promise, memory, due, part, "speech was refused");
        Err(refused(RefusedReason::Overloaded, self.until_a_stream_ends(now)))
    }

    /// The share of the device that with one more turn is due within the horizon that has the most of it, with the first audio of
    /// the turns that come meanwhile, where first audio is promised within `part` of its target; 0 until the voice is known.
    ///
    /// Of the turns that come within a horizon only those are due in it that come a promise before its end, but what speaks waits
    /// for all of them: see [`NOT_DUE`].
    fn due(&self, now: Instant, chars: u32, part: f64) -> f64 {
        let target = self.config.first_audio_target();
        let alone = Duration::from_secs_f64(self.forecast.first_audio(1) * LENIENCE);
        let promise = alone.max(target.mul_f64(part));
        let Some(mut demand) = Demand::of(self.table, self.forecast, now, target, promise, self.critical) else {
            return 0.0;
        };
        demand.add(chars, promise);
        let each = self.forecast.first_audio(TOGETHER as u32) / TOGETHER as f64;
        let to_come = self.arrivals.rate_before(now, promise) * each * BUNCHING;
        let promise = promise.as_secs_f64();
        let due = |multiple: f64| {
            demand.within(multiple * promise) / (multiple * promise) + to_come * (1.0 - NOT_DUE / multiple)
        };
        HORIZONS.map(due).into_iter().fold(0.0, f64::max)
    }

    /// Live streams whose listeners wait for a turn to sound. One that still speaks an utterance made before is not silent,
    /// though its next has made no sound yet: counted as such, a hundred of two hundred streams were, and turns were refused
    /// at half the load.
    fn silent_streams(&self, now: Instant) -> u32 {
        let waits = |stream: &&Stream| {
            let front = stream.jobs.front().and_then(|id| self.table.job(*id));
            front.is_some_and(|job| job.is_live() && job.samples == 0)
                && !stream.is_held()
                && stream.lead(now).is_zero()
        };
        self.table.streams().filter(waits).count() as u32
    }

    fn has_memory_for(&self, chars: u32, part: f64) -> bool {
        let live = self.table.jobs().filter(|(id, job)| job.is_live() && self.table.is_front(*id));
        let held: u64 = live.map(|(_, job)| job.memory.claim()).sum();
        // Streams that rest at their lead limit hold theirs as well: while batch starves, room for a sentence is left to it.
        let batch = self.table.jobs().filter(|(_, job)| self.batch_is_owed && !job.is_live());
        let batch = batch.map(|(_, job)| job.memory.claim()).max().unwrap_or(0);
        let limit = self.memory.limit() as f64 * part;
        self.memory.limit() == 0 || (held + batch) as f64 + self.forecast.bytes_of(chars) <= limit
    }

    /// When the live stream nearest to its end will have been produced.
    fn until_a_stream_ends(&self, now: Instant) -> Duration {
        let left = |job: &Job| {
            let text = self.forecast.seconds_of(job.spec.chars) - duration_of(job.samples).as_secs_f64();
            let lead = self.table.stream(job.spec.stream).map_or(Duration::ZERO, |stream| stream.lead(now));
            text.max(0.0) + lead.saturating_sub(self.config.max_lead()).as_secs_f64()
        };
        let least = self.table.jobs().filter(|(_, job)| job.is_live()).map(|(_, job)| left(job)).reduce(f64::min);
        Duration::from_secs_f64(least.unwrap_or(0.0).min(RETRY.1.as_secs_f64()))
    }
}

fn refused(reason: RefusedReason, retry_after: Duration) -> Refused {
    Refused { reason, retry_after: retry_after.clamp(RETRY.0, RETRY.1) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sched::step::PerStage;
    use crate::sched::tests::{LIMITS, spec};

    fn reasons(config: &Config, memory: u64, held: u64) -> Option<RefusedReason> {
        let now = crate::clock::now();
        let (mut table, mut tenants) = (Table::new(4, false), Tenants::default());
        let mut forecast = Forecast::new(&LIMITS, &PerStage::splat(Duration::from_millis(1)).into());
        forecast.sized(100, 100);
        let tenant = tenants.index(&"".into(), config, now);
        let id = table.add(now, spec(1, Class::Live), tenant, now, || tenants.permit(tenant));
        let job = table.job_mut(id).expect("there");
        (job.memory.expected, job.memory.initial) = (held, held);
        let (table, forecast, memory, tenants) = (&table, &forecast, &Memory::new(memory, false), &tenants);
        let admission = Admission {
            config,
            table,
            forecast,
            memory,
            tenants,
            slots: 4,
            batch_is_owed: false,
            critical: Duration::ZERO,
            arrivals: &Arrivals::default(),
            may_be_late: false,
        };
        assert_eq!(admission.check_more(), Ok(()), "a stream that has work goes on");
        let result = admission.check_new(now, &spec(2, Class::Live), tenant, None);
        result.err().map(|refused| refused.reason)
    }

    #[test]
    fn each_limit_refuses_with_its_reason() {
        let config = Config::default();
        assert_eq!(reasons(&config, 0, 0), None);
        assert_eq!(reasons(&config, 250, 150), None, "100 bytes are left for 100 characters");
        assert_eq!(reasons(&config, 249, 150), Some(RefusedReason::Overloaded));
        assert_eq!(reasons(&Config { max_live: 1, ..config.clone() }, 0, 0), Some(RefusedReason::Full));
        let one = crate::sched::Tenant { max_live: 1, ..Default::default() };
        let config = Config { tenant_default: one, ..config };
        assert_eq!(reasons(&config, 0, 0), Some(RefusedReason::TenantFull));
    }
}
