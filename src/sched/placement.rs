//! Who gets a slot, and who gives one up.

use std::time::{Duration, Instant};

use super::Scheduler;
use super::config::Config;
use super::inflight::InFlight;
use super::job::{Job, JobId, State};
use super::memory::{Lack, Memory};
use super::plan::Plan;
use super::step::EngineLimits;
use super::table::Table;
use super::tenant::Tenants;

/// One slot in this many stays free for live work: what is displaced loses its sentence so far.
const LIVE_RESERVE: u32 = 4;
/// Where so many slots are in use, batch opens no more: those beyond are for live work, which is short of them on a full
/// device. With batch in three quarters of 320 it filled the memory: simulated on one H200 at 80 % load, 48 of 1,794 turns had a gap
/// beside it, and none has.
const MOST_BESIDE: u32 = 192;
/// One slot in this many, and one at least, stays free of utterances that only decode ahead of their turn to sound. Else
/// those of speaking streams take the last slots, and new turns wait for one: simulated on the measured device at 80 %
/// load, up to 17 at a time though some 200 streams spoke on 256 slots, and first audio p99 158 ms where it is 77.
const AHEAD_RESERVE: u32 = 8;
/// A listener with so much ahead does not notice that the rest of his utterance is made again.
const SPARED: Duration = Duration::from_secs(1);

/// Live work that was promised and has no room so long after is given to another voice.
pub(super) const UNPLACED: Duration = Duration::from_secs(10);

/// What gives out slots.
pub(super) struct Placement<'a> {
    pub(super) config: &'a Config,
    pub(super) limits: &'a EngineLimits,
    pub(super) tenants: &'a Tenants,
    pub(super) inflight: &'a InFlight,
    pub(super) table: &'a mut Table,
    pub(super) memory: &'a mut Memory,
    pub(super) preemptions: &'a mut u64,
}

impl<'a> Placement<'a> {
    /// Of `scheduler`.
    pub(super) fn of(scheduler: &'a mut Scheduler) -> Self {
        Self {
            config: &scheduler.config,
            limits: &scheduler.limits,
            tenants: &scheduler.tenants,
            inflight: &scheduler.inflight,
            table: &mut scheduler.table,
            memory: &mut scheduler.memory,
            preemptions: &mut scheduler.preemptions,
        }
    }

    /// A slot for the most urgent live job without one, or the displacement that it needs. What only decodes ahead of
    /// its turn takes nothing from batch and not the last slots; while batch work is owed a step none begins.
    pub(super) fn live(&mut self, batch_is_owed: bool) -> Option<Plan> {
        let id = self.most_urgent()?;
        let needed = self.table.job(id)?.memory.claim();
        let fits = self.memory.fits(self.table, needed);
        let reserve = (self.limits.slots / AHEAD_RESERVE).max(1);
        if !self.table.is_front(id) && (self.table.slots.free() <= reserve || !fits || batch_is_owed) {
            return None;
        }
        match self.table.slots.first_free() {
            Some(slot) if fits => {
                self.table.open(id, slot);
                Some(Plan::Open { slot, job: id })
            }
            free => self.displace(free.is_none(), None),
        }
    }

    /// The live job that a slot is most urgent for.
    fn most_urgent(&self) -> Option<JobId> {
        let least = self.tenants.least();
        let key = |id: JobId| -> Option<(bool, Instant, JobId)> {
            let job = self.table.job(id)?;
            let stream = self.table.stream(job.spec.stream)?;
            let due = stream.underrun_at().map_or(job.deadline, |underrun| underrun.max(job.deadline));
            let lag = self.tenants.lag(job.tenant, least, self.config.first_audio_target());
            Some((!self.table.is_front(id), due + lag, id))
        };
        self.table.live_waiting().filter_map(|(id, _)| key(id)).min().map(|(_, _, id)| id)
    }

    /// A slot for the next batch job, while enough stay free for live work; any one where batch starves, for one job.
    pub(super) fn batch(&mut self, starving: bool) -> Option<Plan> {
        let tenant = |tenant: usize| self.tenants.time(tenant);
        let (id, job) =
            self.table.batch_waiting().min_by(|(_, a), (_, b)| tenant(a.tenant).total_cmp(&tenant(b.tenant)))?;
        let (needed, needs_front) = (job.memory.claim(), !self.table.is_front(id) && !self.table.front_is_open(job));
        let batch_is_open = self.table.open_jobs().any(|(_, job)| !job.is_live());
        let slots = self.limits.slots;
        let usual = (slots / LIVE_RESERVE).max(u32::from(slots > 1)).max(slots.saturating_sub(MOST_BESIDE));
        let reserve = if starving && !batch_is_open { 0 } else { usual };
        let parked = self.table.open_jobs().any(|(_, job)| job.is_parked());
        let live_waits = self.table.live_waiting().any(|(id, _)| self.table.is_front(id));
        if self.table.slots.free() <= reserve || parked || live_waits {
            return None;
        }
        if needs_front || !self.memory.fits(self.table, needed) {
            return None;
        }
        let slot = self.table.slots.first_free()?;
        self.table.open(id, slot);
        Some(Plan::Open { slot, job: id })
    }

    /// Memory for a job that cannot go on: from batch, or for what cannot wait from the live job that is harmed least.
    pub(super) fn relieve(&mut self, now: Instant, lack: Lack) -> Option<Plan> {
        let restarts = lack.stuck || lack.live && lack.urgent;
        let plan =
            self.displace(false, Some(lack.job)).or_else(|| if restarts { self.restart(now, lack) } else { None })?;
        // What was freed is for the one that lacks it.
        self.memory.ran_short();
        Some(plan)
    }

    /// Has a live job other than the one that lacks memory start again: of those whose listeners have enough ahead
    /// meanwhile, the one with the most; else, of those that nothing was heard of, the latest. Where all are stuck, any.
    fn restart(&mut self, now: Instant, lack: Lack) -> Option<Plan> {
        let deadline = self.table.job(lack.job)?.deadline;
        let victim = |id: JobId, job: &Job| {
            let slot = job.slot().filter(|slot| !self.inflight.is_busy(*slot))?;
            let lead = self.table.stream(job.spec.stream)?.lead(now);
            let later = job.given == 0 && lead.is_zero() && job.deadline > deadline;
            let holds = id != lack.job && job.is_live() && job.resident() > 0;
            (holds && (lead >= SPARED || later || lack.stuck)).then_some(((lead, job.deadline), id, slot))
        };
        let (_, job, slot) = self.table.open_jobs().filter_map(|(id, job)| victim(id, job)).max()?;
        *self.preemptions += 1;
        self.table.restart(job);
        Some(Plan::Displace { slot, job })
    }

    /// Makes room at the cost of the batch job, other than `but`, with the least work to lose. Parking frees only memory.
    fn displace(&mut self, slot_short: bool, but: Option<JobId>) -> Option<Plan> {
        let parks = self.limits.parks && !slot_short;
        let batch = self.table.open_jobs().filter(|(id, job)| !job.is_live() && Some(*id) != but);
        let batch = batch.filter(|(_, job)| job.slot().is_some_and(|slot| !self.inflight.is_busy(slot)));
        let victims = batch.filter(|(_, job)| !parks || matches!(job.state, State::Open(_)));
        // A front that gave up what it needs while its successor keeps it could never go on, nor could the successor.
        let least = victims.min_by_key(|(id, job)| (self.table.is_front(*id), job.samples.max(job.decoded)));
        let (job, slot) = least.and_then(|(id, job)| Some((id, job.slot()?)))?;
        *self.preemptions += 1;
        self.memory.freed();
        if parks {
            self.table.job_mut(job)?.state = State::Parked(slot);
            return Some(Plan::Park { slot, job });
        }
        self.table.restart(job);
        Some(Plan::Displace { slot, job })
    }
}

/// Live jobs that were promised and have had no room for [`UNPLACED`], while their listeners hear nothing.
pub(super) fn unplaced(table: &Table, now: Instant) -> Vec<JobId> {
    let silent = |job: &Job| {
        let stream = table.stream(job.spec.stream).filter(|stream| stream.paced && !stream.is_held());
        stream.is_some_and(|s| s.lead(now).is_zero() && now > job.deadline.max(s.touched) + UNPLACED)
    };
    let late = table.live_waiting().filter(|(id, job)| table.is_front(*id) && silent(job));
    late.map(|(id, _)| id).collect()
}
