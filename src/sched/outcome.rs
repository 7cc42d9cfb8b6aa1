//! What one outcome of a step means for the job that it is of: how far it is, what its stream has to be heard, what the device
//! learns of it, and whether it is over.

use std::time::{Duration, Instant};

use super::forecast::Forecast;
use super::job::{JobEnd, JobId};
use super::memory::Memory;
use super::step::{Outcome, PerStage, Stage, Step};
use super::table::Table;
use super::tenant::Tenants;

/// The parts that follow outcomes.
pub(super) struct Following<'a> {
    pub(super) table: &'a mut Table,
    pub(super) tenants: &'a mut Tenants,
    pub(super) forecast: &'a mut Forecast,
    pub(super) memory: &'a mut Memory,
}

/// What became of a job.
pub(super) struct Followed {
    pub(super) job: JobId,
    pub(super) is_live: bool,
    /// It is over: to be told to the scheduler.
    pub(super) end: Option<JobEnd>,
}

/// Euler steps of single chunks that a step of flow ran.
pub(super) fn chunk_rounds<'o>(step: &Step, outcomes: impl Iterator<Item = &'o Outcome>) -> u32 {
    outcomes.map(|outcome| outcome.chunk_rounds.unwrap_or(step.rounds)).sum()
}

impl Following<'_> {
    /// Follows `outcome` of `step`, which ended `now` and had the device for `took`; `None`: nothing is in its slot any more.
    pub(super) fn take(&mut self, now: Instant, took: Duration, step: &Step, outcome: &Outcome) -> Option<Followed> {
        let id = self.table.slots.job_in(outcome.slot)?;
        let job = self.table.job_mut(id)?;
        self.tenants.charge(job.tenant, took.as_secs_f64() / step.slots.len().max(1) as f64);
        let is_live = job.is_live();
        job.ready = outcome.ready;
        job.decoded = outcome.decoded;
        job.memory.wants = outcome.memory;
        if self.memory.grows() {
            job.memory.holds = job.memory.holds.min(outcome.memory);
        }
        job.service += took;
        job.rounds[step.stage] += step.rounds;
        if step.stage == Stage::Flow {
            job.chunk_rounds += outcome.chunk_rounds.unwrap_or(step.rounds);
        }
        if outcome.samples > 0 {
            job.resumes = false;
            self.forecast.produced(job, outcome.samples);
            job.samples += outcome.samples;
            job.service = Duration::ZERO;
            job.rounds = PerStage::default();
            job.chunk_rounds = 0;
        }
        let fresh = job.samples.saturating_sub(job.given).min(outcome.samples);
        job.given = job.given.max(job.samples);
        let (stream, samples, chars) = (job.spec.stream, job.samples, job.spec.chars);
        let (need, peak) = (job.memory.need, job.memory.peak);
        if let Some(stream) = self.table.stream_mut(stream) {
            stream.produced(now, fresh);
        }
        let end = match &outcome.failed {
            Some(reason) => Some(JobEnd::Failed(reason.clone())),
            None if outcome.done => {
                self.forecast.spoken(samples, chars);
                self.memory.learn(need, peak);
                Some(JobEnd::Done)
            }
            None => {
                self.table.advance(stream);
                None
            }
        };
        Some(Followed { job: id, is_live, end })
    }
}
