//! Who is in the next step.
//!
//! The most urgent job names the stage. Others that can run it join, most urgent first, while the predicted
//! cost stays within bounds:
//! - live work that is as urgent: while the step stays within `max_step_ms`;
//! - live work that is not, in steps for a first audio or a listener about to hear a gap: only at little cost, or at a few
//!   times the cost if it has not much ahead ([`NEAR`]) and the device no time to spare for it, or where memory runs short;
//! - live work at or below its slack reserve, where nothing is more urgent: while the step stays within `max_step_ms`;
//! - batch: only for next to nothing (`batch_ride`) while any of those is ready, and else while the step stays
//!   within `batch_step_ms` and every listener still has time for a chunk of his own.
//!
//! # Why
//! - **Streams with little ahead join urgent steps**: first audio comes in narrow steps, which waste most of what they
//!   cost. Streams that were kept out of them sank to their reserve all together and then delayed the first audio that
//!   they had made room for; on the recorded device at 80 % load that was 172 ms at p95 instead of 102.
//! - **Where batch work runs they do not**: the device has time to spare, so that they soon have a step of their own, and batch
//!   makes that step long, so that more of them have little ahead. Simulated with the costs of one H200, 45 listeners, first audio
//!   p95 beside batch is 23.1 ms in place of 26.9 (21.3 without batch), of 160 listeners 29.2 in place of 33.2 (29.3). What is in no hurry
//!   having run of late is no such sign: 60 turns of 7.6 s a second, more than the device makes, then have gaps. Nor is batch that
//!   rides in urgent steps: of the same turns, after batch that had the device before them, 393 of 2,155 were refused and 23 had gaps
//!   while it was taken for one; now 287 and none, as without batch.
//! - **Streams with much ahead do not**: with them first audio pays for a lead that no listener needs yet.
//! - **Where memory runs short they do**: a stream holds its memory until its last sample is made, and on a device that first audio
//!   keeps busy all are made just before they are heard. One H100, whose memory has room for 80 utterances of 8 s, refused turns
//!   from 400 calls on, some of them for want of it; simulated with its costs, 400 and 440 calls then have
//!   129 and 210 refusals in 6 s, with this rule none.
//! - **Where many new turns are under way steps are longer, not shorter**: each costs what its planning takes, and those that come
//!   join at the next one. Steps of an eighth of the longest had more of them than a device's host keeps up with: at 440 and 480
//!   calls p95 is 96 and 111 ms with these, 94 and 102 with half.
//! - **Where no turn came for a minute, steps take up to twice as long**: nobody is there who could lose to them but the first caller,
//!   once. Simulated with the costs of one H200, 64, 128 and 256 utterances of batch work alone make 602, 619 and 640 audio-seconds a
//!   second in place of 538, 598 and 632.
//! - **Nor those at their reserve whatever it costs**: with 255 streams that speak, all that were below it joined each
//!   step for a first audio, which took three times as long; new turns then came faster than they were served, and speaking
//!   streams had no step until they were critical together, too many for the time that was left.

use std::time::{Duration, Instant};

use super::Scheduler;
use super::config::Config;
use super::forecast::Forecast;
use super::job::State;
use super::memory::Memory;
use super::rank::{Candidate, Rank};
use super::step::{EngineLimits, Slot, Stage};
use super::table::Table;

/// By what a comfortable stream may multiply the cost of an urgent step.
const COMFORT_COST: f64 = 1.25;
/// The same for a stream with less than [`NEAR`] ahead.
const NEAR_COST: f64 = 4.0;
/// In slack reserves.
const NEAR: u32 = 4;
/// Where live utterances claim this share of the memory, streams with much ahead begin to join urgent steps at a higher cost; at the
/// second, at the same as those that are near.
const SHORT: (f64, f64) = (0.7, 0.95);
/// So many streams that are silent, or about to be, are many: steps are longer then.
const MANY: usize = 4;
/// Without a turn for so long, steps of batch work take up to [`LONGER`] times [`Config::batch_step_ms`].
const QUIET: Duration = Duration::from_secs(60);
const LONGER: u32 = 2;

/// What composes steps.
#[derive(Clone, Copy)]
pub(super) struct Batching<'a> {
    pub(super) config: &'a Config,
    pub(super) limits: &'a EngineLimits,
    pub(super) forecast: &'a Forecast,
    pub(super) table: &'a Table,
    pub(super) memory: &'a Memory,
    /// A listener with less left than this may hear a gap before his next chunk is made.
    pub(super) critical: Duration,
    /// The device has time to spare: batch work ran of late in a step that no listener waited for.
    pub(super) spare: bool,
    /// No turn came for [`QUIET`].
    pub(super) quiet: bool,
}

impl<'a> Batching<'a> {
    /// Of `scheduler` as it is `now`.
    pub(super) fn of(scheduler: &'a Scheduler, now: Instant) -> Self {
        let Scheduler { config, limits, forecast, table, memory, critical, starvation, arrivals, .. } = scheduler;
        let (live, batch) = table.counts();
        let quiet = live == 0 && arrivals.none_for(now, QUIET);
        let spare = batch > 0 && starvation.had_leisure(now, config.slack_reserve());
        Self { config, limits, forecast, table, memory, critical: *critical, spare, quiet }
    }

    /// The stage and the members of a step for `head`. `starving`: it is batch work that has to run now.
    pub(super) fn step<'c>(
        &self,
        now: Instant,
        head: &'c Candidate,
        starving: bool,
        candidates: &'c [Candidate],
    ) -> (Stage, Vec<&'c Candidate>) {
        if head.rank.is_hurried() {
            return (head.stage, self.urgent(now, head, candidates));
        }
        let stage = self.fullest(candidates).filter(|_| !starving).unwrap_or(head.stage);
        (stage, self.full(now, starving.then_some(head), stage, candidates))
    }

    /// The members of a step for the sake of `head`, which does not wait for others.
    pub(super) fn urgent<'c>(
        &self,
        now: Instant,
        head: &'c Candidate,
        candidates: &'c [Candidate],
    ) -> Vec<&'c Candidate> {
        let stage = head.stage;
        let cost = |width: usize| self.forecast.cost(stage, width, 1);
        let most = self.width(stage);
        let budget = self.config.max_step().as_secs_f64().max(cost(1));
        let near = self.config.slack_reserve() * NEAR;
        let comfort_cost = self.comfort_cost();
        let mut members = vec![head];
        let mut urgent = 1;
        let others = candidates.iter().filter(|c| c.job != head.job && c.stages.has(stage));
        for other in others.clone().filter(|c| c.is_live()) {
            let wider = cost(members.len() + 1);
            if members.len() >= most || wider > budget {
                break;
            }
            let hurried = head.rank.is_urgent() && (!other.rank.is_urgent() || other.finishing);
            let near = other.underrun.is_some_and(|underrun| underrun.saturating_duration_since(now) < near);
            // Where batch may cost more than that, live work that could wait may as well: it frees its slot sooner.
            let most_cost = if near && !self.spare { NEAR_COST } else { comfort_cost }.max(self.config.batch_ride);
            if hurried && wider > cost(urgent) * most_cost {
                break;
            }
            members.push(other);
            if !hurried {
                urgent = members.len();
            }
        }
        let hurry = candidates.iter().any(|c| c.rank.is_urgent());
        let limit = if hurry {
            cost(members.len()) * self.config.batch_ride
        } else {
            self.batch_step().as_secs_f64().max(cost(members.len())).min(self.time_left(now, candidates))
        };
        self.add_batch(&mut members, others, stage, limit);
        members
    }

    /// A step for the sake of throughput: everything that can run `stage`, live first, within the batch bound. A
    /// starving batch job is in it in any case.
    fn full<'c>(
        &self,
        now: Instant,
        starving: Option<&'c Candidate>,
        stage: Stage,
        candidates: &'c [Candidate],
    ) -> Vec<&'c Candidate> {
        let limit = self.batch_step().as_secs_f64().min(self.time_left(now, candidates));
        let mut members: Vec<&Candidate> = starving.into_iter().collect();
        for live in candidates.iter().filter(|c| c.is_live() && c.stages.has(stage)) {
            if self.is_full(&members, stage, limit) {
                break;
            }
            members.push(live);
        }
        let others = candidates.iter().filter(|c| c.stages.has(stage) && members.iter().all(|m| m.job != c.job));
        let others: Vec<&Candidate> = others.collect();
        self.add_batch(&mut members, others.into_iter(), stage, limit);
        members
    }

    /// The stage in which most of a step's width would be used; the one nearest to sound where there are several.
    fn fullest(&self, candidates: &[Candidate]) -> Option<Stage> {
        let fill = |stage: Stage| {
            let ready = candidates.iter().filter(|c| c.stages.has(stage) && self.can_be_resident(c)).count();
            ready.min(self.width(stage)) * 1_000 / self.width(stage)
        };
        Stage::ALL.into_iter().filter(|stage| fill(*stage) > 0).max_by_key(|stage| fill(*stage))
    }

    /// Adds batch jobs while the step costs no more than `limit` seconds and their memory fits.
    fn add_batch<'c>(
        &self,
        members: &mut Vec<&'c Candidate>,
        others: impl Iterator<Item = &'c Candidate>,
        stage: Stage,
        limit: f64,
    ) {
        // Those that were parked come back only as far as memory reaches, counted together.
        let mut resident = self.table.claimed() + members.iter().map(|m| m.memory_to_resume).sum::<u64>();
        for other in others.filter(|c| !c.is_live()) {
            if self.is_full(members, stage, limit) {
                break;
            }
            if other.memory_to_resume > 0 && !self.memory.has(resident, other.memory_to_resume) {
                continue;
            }
            resident += other.memory_to_resume;
            members.push(other);
        }
    }

    /// Whether one more member is too many for a step of `limit` seconds. One there is always room for.
    fn is_full(&self, members: &[&Candidate], stage: Stage, limit: f64) -> bool {
        let wider = members.len() + 1;
        wider > self.width(stage) || wider > 1 && self.forecast.cost(stage, wider, 1) > limit
    }

    pub(super) fn can_be_resident(&self, candidate: &Candidate) -> bool {
        let needed = candidate.memory_to_resume;
        needed == 0 || self.table.live_waiting().next().is_none() && self.memory.fits(self.table, needed)
    }

    /// By what a stream that is not near may multiply the cost of an urgent step.
    fn comfort_cost(&self) -> f64 {
        let (from, to) = SHORT;
        let short = ((self.memory.live_share(self.table) - from) / (to - from)).clamp(0.0, 1.0);
        COMFORT_COST + (NEAR_COST - COMFORT_COST) * short
    }

    /// Seconds that a step may take before some listener gets into the time his own next chunk needs.
    fn time_left(&self, now: Instant, candidates: &[Candidate]) -> f64 {
        let first = candidates.iter().filter_map(|c| c.underrun).min();
        let slack = first.map(|underrun| underrun.saturating_duration_since(now).saturating_sub(self.critical));
        slack.map_or(f64::INFINITY, |slack| slack.as_secs_f64())
    }

    /// What a step that is not in a hurry may take.
    fn batch_step(&self) -> Duration {
        self.config.batch_step() * if self.quiet { LONGER } else { 1 }
    }

    fn width(&self, stage: Stage) -> usize {
        self.limits.width[stage].max(1) as usize
    }

    /// Rounds amortise what a device call costs whatever it does; a quarter of the longest step is enough for
    /// that, and all a new turn has to wait. Where many new turns are under way it is half of it, as a
    /// quarter would hold one round, and each step costs its planning.
    pub(super) fn rounds(&self, stage: Stage, width: usize, rank: Rank, candidates: &[Candidate]) -> u32 {
        let many = candidates.iter().take_while(|c| c.rank.is_urgent()).count() >= MANY;
        let part = if many { 2 } else { 4 };
        let limit = if rank.is_hurried() { self.config.max_step() / part } else { self.batch_step() };
        self.rounds_within(stage, width, limit)
    }

    /// Rounds that take no more than `limit`, one at least.
    pub(super) fn rounds_within(&self, stage: Stage, width: usize, limit: Duration) -> u32 {
        let most = self.limits.rounds[stage].max(1);
        let mut rounds = 1;
        while rounds * 2 <= most && self.forecast.cost(stage, width, rounds * 2) <= limit.as_secs_f64() {
            rounds *= 2;
        }
        rounds
    }
}

/// The slots of `members`, whose states are on the device from now on and have what a step of `stage` takes.
pub(super) fn start(table: &mut Table, stage: Stage, members: &[&Candidate]) -> Vec<Slot> {
    for member in members {
        let Some(job) = table.job_mut(member.job) else { continue };
        if job.is_parked() {
            job.state = State::Open(member.slot);
        }
        if stage == Stage::Flow {
            job.memory.grow();
        }
    }
    members.iter().map(|member| member.slot).collect()
}
