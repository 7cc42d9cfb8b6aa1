//! Who gets a slot, and who is in the next step.
//!
//! The most urgent job names the stage. Others that can run it join, most urgent first, while the predicted
//! cost stays within bounds:
//! - live work at or below its slack reserve: while the step stays within `max_step_ms`. Under load streams sink to
//!   their reserve, so this is what makes steps wide when width is needed;
//! - live work with more than that: beside a first audio or a listener about to run dry only at little cost, or
//!   at some if it has not much more;
//! - batch: only for next to nothing (`batch_ride`) while any of those is ready, and else while the step stays
//!   within `batch_step_ms` and every listener still has time for a chunk of his own.
//!
//! # Why
//! - **Streams with little ahead ride urgent steps**: first audio comes in narrow steps, which waste most of what they
//!   cost. Streams that were kept out of them sank to their reserve all together and then delayed the first audio that
//!   they had made room for; on the recorded device at 80 % load that was 172 ms at p95 instead of 102.
//! - **Streams with much ahead do not**: with them first audio pays for a lead that nobody needs yet.

use std::time::{Duration, Instant};

use super::job::{Job, State};
use super::step::{Slot, Stage, Stages, Step};
use super::{JobId, Plan, SWEEP, Scheduler, WATCH};
use crate::audio::duration_of;
use crate::turn::Class;

/// Ranks, from the most urgent.
const CRITICAL: u8 = 0;
pub(super) const FIRST: u8 = 1;
pub(super) const RESERVE: u8 = 2;
const COMFORT: u8 = 3;
const SURPLUS: u8 = 4;
const BATCH: u8 = 5;

/// By what a comfortable stream may multiply the cost of an urgent step.
const LIVE_RIDE: f64 = 1.25;
/// The same for a stream with less than [`NEAR`] ahead.
const NEAR_RIDE: f64 = 3.0;
/// In slack reserves.
const NEAR: u32 = 4;
/// A stream rests at its lead limit until it is down to this part of it, so that it works in bursts.
const RESUME: f64 = 0.75;
/// One slot in this many stays free for live work: what is displaced loses its sentence so far.
const LIVE_RESERVE: u32 = 4;

/// A job that could be in the next step.
#[derive(Debug)]
pub(super) struct Candidate {
    job: JobId,
    slot: Slot,
    pub(super) rank: u8,
    /// Within the rank: the earlier the sooner.
    key: Instant,
    /// Batch: the tenant's virtual time, then order of arrival.
    share: f64,
    /// Not for its listener but to free memory: it does not make a first audio wait.
    finishing: bool,
    /// When its listener runs dry, if there is one.
    dry: Option<Instant>,
    /// What it would run by itself.
    pub(super) stage: Stage,
    /// What it can run.
    stages: Stages,
}

impl Scheduler {
    /// A slot for the most urgent live job without one, or the displacement that it needs. What only decodes ahead of
    /// its turn takes nothing from batch and not the last slot; while batch starves none begins.
    pub(super) fn place_live(&mut self, now: Instant) -> Option<Plan> {
        let least = self.tenants.least();
        let key = |id: &JobId| {
            let job = self.jobs.get(id)?;
            let stream = self.streams.get(&job.spec.stream)?;
            let due = stream.dry_at().map_or(job.deadline, |dry| dry.max(job.deadline));
            Some((!self.is_front(job), due + self.lag(job, least), *id))
        };
        let (_, _, id) = self.live_waiting.iter().filter_map(key).min()?;
        let needed = self.jobs.get(&id)?.memory;
        let free = self.slots.iter().position(Option::is_none);
        let front = self.jobs.get(&id).is_some_and(|job| self.is_front(job));
        let spare = self.slots.iter().filter(|slot| slot.is_none()).count();
        if !front && (spare < 2 || !self.fits(needed) || self.batch_is_aged(now)) {
            return None;
        }
        if let Some(free) = free
            && self.fits(needed)
        {
            self.live_waiting.retain(|other| *other != id);
            return Some(self.open(id, free));
        }
        self.displace(free.is_none())
    }

    /// A slot for the next batch job, while enough stay free for live work; any one where batch starves, for one job.
    pub(super) fn place_batch(&mut self, starving: bool) -> Option<Plan> {
        if self.batch_waiting.values().all(|queue| queue.is_empty()) {
            return None;
        }
        let first = starving && !self.jobs.values().any(|job| !job.is_live() && job.slot().is_some());
        let reserve = if first { 0 } else { (self.limits.slots / LIVE_RESERVE).max(u32::from(self.limits.slots > 1)) };
        let free = self.slots.iter().filter(|slot| slot.is_none()).count() as u32;
        let parked = self.jobs.values().any(|job| matches!(job.state, State::Parked(_)));
        let live_waits = self.live_waiting.iter().filter_map(|id| self.jobs.get(id)).any(|job| self.is_front(job));
        if free <= reserve || parked || live_waits {
            return None;
        }
        let waiting = self.batch_waiting.iter().filter(|(_, queue)| !queue.is_empty());
        let tenant = waiting
            .map(|(tenant, _)| *tenant)
            .min_by(|a, b| self.tenants.time(*a).total_cmp(&self.tenants.time(*b)))?;
        let id = *self.batch_waiting.get(&tenant)?.front()?;
        let job = self.jobs.get(&id)?;
        if !self.fits(job.memory) || !self.is_front(job) && !self.front_is_open(job) {
            return None;
        }
        let slot = self.slots.iter().position(Option::is_none)?;
        self.batch_waiting.get_mut(&tenant)?.pop_front();
        Some(self.open(id, slot))
    }

    fn open(&mut self, id: JobId, slot: usize) -> Plan {
        self.slots[slot] = Some(id);
        let slot = Slot(slot as u32);
        if let Some(job) = self.jobs.get_mut(&id) {
            job.state = State::Opening(slot);
        }
        Plan::Open { slot, job: id }
    }

    fn fits(&self, needed: u64) -> bool {
        !self.memory_short && (self.limits.memory == 0 || self.reserved() + needed <= self.limits.memory)
    }

    /// Makes room at the cost of the batch job with the least work to lose. Parking frees only memory.
    fn displace(&mut self, slot_short: bool) -> Option<Plan> {
        let batch = self.slots.iter().flatten().filter_map(|id| Some((*id, self.jobs.get(id)?)));
        let batch = batch.filter(|(_, job)| !job.is_live() && job.slot().is_some_and(|slot| !self.is_busy(slot)));
        let parks = self.limits.parks && !slot_short;
        let victim = batch.filter(|(_, job)| !parks || matches!(job.state, State::Open(_)));
        // A front that gave up what it needs while its successor keeps it could never go on, nor could the successor.
        let (id, _) = victim.min_by_key(|(_, job)| (self.is_front(job), job.samples.max(job.decoded)))?;
        let job = self.jobs.get_mut(&id)?;
        let slot = job.slot()?;
        self.preemptions += 1;
        self.memory_short = false;
        if parks {
            job.state = State::Parked(slot);
            return Some(Plan::Park { slot, job: id });
        }
        self.give_up(id);
        Some(Plan::Displace { slot, job: id })
    }

    /// Streams that reached their lead limit rest until part of it is used up. While memory is short, one whose
    /// utterance can be finished within twice that limit does not: an utterance holds its memory until its last
    /// sample is made, so few at a time and each to its end hold less than all of them side by side.
    pub(super) fn rest(&mut self, now: Instant) {
        let limit = self.config.max_lead();
        let open = || self.slots.iter().flatten().filter_map(|id| self.jobs.get(id));
        // What batch holds can be had without waiting for anybody's end.
        let held: u64 = open().filter(|job| job.is_live()).map(Job::resident).sum();
        let short = self.limits.memory > 0 && held > self.limits.memory / 2;
        let mut awake = 0;
        for id in self.slots.iter().flatten() {
            let Some(job) = self.jobs.get(id).filter(|job| job.is_live()) else { continue };
            let Some(stream) = self.streams.get_mut(&job.spec.stream) else { continue };
            let lead = stream.lead(now);
            if stream.jobs.front() == Some(id) {
                let left = self.learned.seconds_of(job.spec.chars) - duration_of(job.samples).as_secs_f64();
                let left = Duration::from_secs_f64(left.clamp(0.0, 60.0));
                stream.finishing = (short && job.samples > 0 && lead + left <= 2 * limit).then_some(left);
            }
            let resting = lead >= limit || stream.resting && lead > limit.mul_f64(RESUME);
            stream.resting = stream.paced && stream.finishing.is_none() && resting;
            awake += u32::from(!stream.resting && stream.jobs.front() == Some(id));
        }
        self.critical = self.critical_with(awake);
    }

    /// All that could run now, the most urgent first.
    pub(super) fn candidates(&self, now: Instant) -> Vec<Candidate> {
        let least = self.tenants.least();
        let mut all: Vec<Candidate> =
            self.slots.iter().flatten().filter_map(|id| self.candidate(now, least, *id)).collect();
        all.sort_by(|a, b| {
            a.rank
                .cmp(&b.rank)
                .then_with(|| a.key.cmp(&b.key))
                .then_with(|| a.share.total_cmp(&b.share))
                .then(a.job.cmp(&b.job))
        });
        all
    }

    fn candidate(&self, now: Instant, least: f64, id: JobId) -> Option<Candidate> {
        let job = self.jobs.get(&id)?;
        let slot = match job.state {
            State::Open(slot) | State::Parked(slot) if !job.blocked && !self.is_busy(slot) => slot,
            _ => return None,
        };
        let stream = self.streams.get(&job.spec.stream)?;
        let front = stream.jobs.front() == Some(&id);
        if !front && matches!(job.state, State::Parked(_)) && !self.front_is_open(job) {
            // For the same reason as in `displace`: the front comes back first.
            return None;
        }
        let mut stages = Stages::NONE;
        for stage in Stage::ALL {
            let sounds = matches!(stage, Stage::Flow | Stage::Vocode);
            if job.ready.has(stage) && (front || !sounds) {
                stages = stages.with(stage);
            }
        }
        if !job.is_live() {
            let stage = last(stages)?;
            let share = self.tenants.time(job.tenant);
            return Some(Candidate {
                job: id,
                slot,
                rank: BATCH,
                key: now,
                share,
                finishing: false,
                dry: None,
                stage,
                stages,
            });
        }
        if stream.resting {
            return None;
        }
        let lead = stream.lead(now);
        let ahead = job.decoded.saturating_sub(job.samples);
        let limit = self.config.max_lead();
        // A chunk may need more tokens than the lead limit has room for: then decoding is the only way to sound.
        let finishing = stream.finishing.filter(|_| front && !stream.is_held());
        let can_wait = !front || stages.has(Stage::Flow) || stages.has(Stage::Vocode);
        if stream.paced && finishing.is_none() && can_wait && lead + duration_of(ahead) >= limit {
            // Enough tokens for now: only what makes sound of them.
            stages = [Stage::Flow, Stage::Vocode]
                .iter()
                .filter(|s| stages.has(**s))
                .fold(Stages::NONE, |set, s| set.with(*s));
        }
        let stage = last(stages)?;
        let dry = stream.dry_at();
        let (rank, due) = self.urgency(now, job, front, lead, dry, stream.is_held());
        let (rank, due, finishing) = match (rank, finishing) {
            // Behind all that are at their reserve, and what is nearest to its end first.
            (COMFORT, Some(left)) => (RESERVE, now + self.reserve() + left, true),
            _ if !stream.paced && lead >= limit => (SURPLUS, due, false),
            _ => (rank, due, false),
        };
        let lag = if rank == FIRST { self.lag(job, least) } else { Duration::ZERO };
        Some(Candidate { job: id, slot, rank, key: due + lag, share: 0.0, finishing, dry, stage, stages })
    }

    fn urgency(
        &self,
        now: Instant,
        job: &Job,
        front: bool,
        lead: Duration,
        dry: Option<Instant>,
        held: bool,
    ) -> (u8, Instant) {
        let Some(dry) = dry else {
            // Nobody hears anything while on hold; what is made then is only for a smooth return.
            return if held { (COMFORT, now + self.config.max_lead()) } else { (FIRST, job.deadline) };
        };
        if dry <= now {
            // A gap in mid-utterance is heard; between utterances it is a first audio again.
            return if front && job.samples > 0 { (CRITICAL, dry) } else { (FIRST, dry.max(job.deadline)) };
        }
        let decoded = if front { Duration::ZERO } else { duration_of(self.undelivered(job)) };
        let slack = lead + decoded;
        let due = dry + decoded;
        if slack < self.critical {
            (CRITICAL, due)
        } else if slack < self.reserve() {
            (RESERVE, due)
        } else {
            (COMFORT, due)
        }
    }

    fn front_is_open(&self, job: &Job) -> bool {
        let front = self.streams.get(&job.spec.stream).and_then(|stream| stream.jobs.front());
        front.and_then(|id| self.jobs.get(id)).is_some_and(|front| matches!(front.state, State::Open(_)))
    }

    /// Samples that the jobs before `job` on its stream hold as tokens.
    fn undelivered(&self, job: &Job) -> u64 {
        let Some(stream) = self.streams.get(&job.spec.stream) else { return 0 };
        let before =
            stream.jobs.iter().filter_map(|id| self.jobs.get(id)).take_while(|other| !std::ptr::eq(*other, job));
        before.map(|other| other.decoded.saturating_sub(other.samples)).sum()
    }

    /// [`Scheduler::critical`] where so many live streams do not rest: not by what chunks took of late, beside batch and in
    /// no hurry, if they would take less without it.
    fn critical_with(&self, awake: u32) -> Duration {
        let taken = self.learned.chunk_service.unwrap_or(0.0);
        // Streams that work are in different stages: they meet in steps half as wide as their number.
        let chunk = Duration::from_secs_f64(taken.min(self.chunk_seconds((awake / 2).max(1))).min(60.0));
        (chunk.mul_f64(1.5) + 2 * self.config.max_step()).min(self.config.max_lead() / 2)
    }

    fn reserve(&self) -> Duration {
        self.config.slack_reserve().max(2 * self.critical).min(self.config.max_lead().mul_f64(RESUME))
    }

    /// How much later a tenant's first audio counts for having used more than others. Bounded by the target, so
    /// that nobody is late by fairness alone for more than that.
    fn lag(&self, job: &Job, least: f64) -> Duration {
        if self.tenants.active() < 2 {
            return Duration::ZERO;
        }
        let ahead = (self.tenants.time(job.tenant) - least).max(0.0);
        Duration::from_secs_f64(ahead.min(self.config.first_audio_target().as_secs_f64()))
    }

    /// The next step.
    pub(super) fn select(&mut self, now: Instant, candidates: &[Candidate]) -> Option<Plan> {
        let batch_ready = candidates.iter().find(|c| c.rank == BATCH && self.can_be_resident(c));
        let aged = self.batch_starves(now);
        if aged && batch_ready.is_some() {
            self.batch_grant.get_or_insert(now);
        }
        let head = match batch_ready {
            Some(batch) if aged => batch,
            _ => candidates.iter().find(|c| c.rank != BATCH).or(batch_ready)?,
        };
        let starving = aged && head.rank == BATCH;
        let stage = match self.fullest(candidates) {
            Some(fullest) if head.rank >= COMFORT && !starving => fullest,
            _ => head.stage,
        };
        let members = if head.rank >= COMFORT {
            self.filled(now, starving.then_some(head), stage, candidates)
        } else {
            self.live_members(now, head, candidates)
        };
        let runs_batch = members.iter().any(|c| c.rank == BATCH);
        let batch_waits = batch_ready.is_some() || self.batch_waiting.values().any(|queue| !queue.is_empty());
        if batch_waits && !runs_batch {
            if self.batch_hungry.is_none() {
                self.preemptions += 1;
            }
            self.batch_hungry.get_or_insert(now);
        }
        let rounds = self.rounds(stage, members.len(), head.rank >= COMFORT);
        let urgent = members.iter().any(|c| c.rank <= FIRST);
        let slots = self.resumed(&members);
        Some(self.plan_for(Step { stage, slots, rounds }, urgent))
    }

    /// The slots of `members`, which are on the device from now on.
    pub(super) fn resumed(&mut self, members: &[&Candidate]) -> Vec<Slot> {
        for member in members {
            if let Some(job) = self.jobs.get_mut(&member.job)
                && let State::Parked(slot) = job.state
            {
                job.state = State::Open(slot);
            }
        }
        members.iter().map(|member| member.slot).collect()
    }

    /// Whether batch work has waited for its patience, or for the pause after what it was then granted.
    pub(super) fn batch_starves(&self, now: Instant) -> bool {
        let patience = self.batch_hungry.is_some_and(|since| now >= since + self.config.batch_patience());
        patience || self.batch_grant.is_some_and(|grant| now >= grant)
    }

    /// Whether batch work starves, or did and has not yet finished a sentence in what live work leaves.
    pub(super) fn batch_is_aged(&self, now: Instant) -> bool {
        self.batch_grant.is_some() || self.batch_starves(now)
    }

    pub(super) fn live_members<'a>(
        &self,
        now: Instant,
        head: &'a Candidate,
        candidates: &'a [Candidate],
    ) -> Vec<&'a Candidate> {
        let stage = head.stage;
        let cost = |width: usize| self.costs.predict(stage, width, 1);
        let most = self.width(stage);
        let budget = self.config.max_step().as_secs_f64().max(cost(1));
        let near = self.config.slack_reserve() * NEAR;
        let mut members = vec![head];
        let mut urgent = 1;
        let others = candidates.iter().filter(|c| c.job != head.job && c.stages.has(stage));
        for other in others.clone().filter(|c| c.rank != BATCH) {
            let wider = cost(members.len() + 1);
            if members.len() >= most || wider > budget {
                break;
            }
            let hurried = head.rank <= FIRST && (other.rank > RESERVE || other.finishing);
            let near = other.dry.is_some_and(|dry| dry.saturating_duration_since(now) < near);
            // Where batch may cost more than that, live work that could wait may as well: it frees its slot sooner.
            let ride = if near { NEAR_RIDE } else { LIVE_RIDE }.max(self.config.batch_ride);
            if hurried && wider > cost(urgent) * ride {
                break;
            }
            members.push(other);
            if !hurried {
                urgent = members.len();
            }
        }
        let hurry = candidates.iter().any(|c| c.rank <= FIRST);
        let limit = if hurry {
            cost(members.len()) * self.config.batch_ride
        } else {
            self.config.batch_step().as_secs_f64().max(cost(members.len())).min(self.room(now, candidates))
        };
        self.fill(&mut members, others, stage, limit);
        members
    }

    /// A step for the sake of throughput: everything that is in `stage`, live first, within the batch bound. A
    /// starving batch job is in it whatever else is.
    fn filled<'a>(
        &self,
        now: Instant,
        starving: Option<&'a Candidate>,
        stage: Stage,
        candidates: &'a [Candidate],
    ) -> Vec<&'a Candidate> {
        let room = self.room(now, candidates);
        let limit = self.config.batch_step().as_secs_f64().min(room);
        let mut members: Vec<&Candidate> = starving.into_iter().collect();
        let most = self.width(stage);
        for live in candidates.iter().filter(|c| c.rank != BATCH && c.stages.has(stage)) {
            if members.len() >= most || !members.is_empty() && self.costs.predict(stage, members.len() + 1, 1) > limit {
                break;
            }
            members.push(live);
        }
        let others = candidates.iter().filter(|c| c.stages.has(stage) && members.iter().all(|m| m.job != c.job));
        let others: Vec<&Candidate> = others.collect();
        self.fill(&mut members, others.into_iter(), stage, limit);
        members
    }

    /// The stage in which most of a step's width would be used, of those nobody is waiting for; the one nearest to
    /// sound where there are several.
    fn fullest(&self, candidates: &[Candidate]) -> Option<Stage> {
        let fill = |stage: Stage| {
            let ready = candidates.iter().filter(|c| c.stages.has(stage) && self.can_be_resident(c)).count();
            ready.min(self.width(stage)) * 1_000 / self.width(stage)
        };
        Stage::ALL.into_iter().filter(|stage| fill(*stage) > 0).max_by_key(|stage| fill(*stage))
    }

    /// Adds batch jobs while the step costs no more than `limit` seconds and their memory fits.
    fn fill<'a>(
        &self,
        members: &mut Vec<&'a Candidate>,
        others: impl Iterator<Item = &'a Candidate>,
        stage: Stage,
        limit: f64,
    ) {
        let most = self.width(stage);
        // Those that were parked come back only as far as memory reaches, counted together.
        let mut resident = self.reserved();
        for member in members.iter() {
            resident += self.memory_to_resume(member);
        }
        for other in others.filter(|c| c.rank == BATCH) {
            if members.len() >= most || !members.is_empty() && self.costs.predict(stage, members.len() + 1, 1) > limit {
                break;
            }
            let needed = self.memory_to_resume(other);
            if needed > 0 && (self.memory_short || resident + needed > self.limits.memory) {
                continue;
            }
            resident += needed;
            members.push(other);
        }
    }

    fn memory_to_resume(&self, candidate: &Candidate) -> u64 {
        let parked = self.jobs.get(&candidate.job).filter(|job| matches!(job.state, State::Parked(_)));
        parked.map_or(0, |job| job.memory)
    }

    fn can_be_resident(&self, candidate: &Candidate) -> bool {
        let needed = self.memory_to_resume(candidate);
        needed == 0 || self.live_waiting.is_empty() && self.fits(needed)
    }

    /// Seconds that a step may take before some listener gets into the time his own next chunk needs.
    fn room(&self, now: Instant, candidates: &[Candidate]) -> f64 {
        let first = candidates.iter().filter_map(|c| c.dry).min();
        let slack = first.map(|dry| dry.saturating_duration_since(now).saturating_sub(self.critical));
        slack.map_or(f64::INFINITY, |slack| slack.as_secs_f64())
    }

    fn width(&self, stage: Stage) -> usize {
        self.limits.width[stage as usize].max(1) as usize
    }

    /// Rounds amortise what a device call costs whatever it does; a quarter of the longest step is enough for
    /// that, and all a new turn has to wait.
    fn rounds(&self, stage: Stage, width: usize, batch: bool) -> u32 {
        let limit = if batch { self.config.batch_step() } else { self.config.max_step() / 4 };
        self.rounds_within(stage, width, limit)
    }

    /// Rounds that take no more than `limit`, one at least.
    pub(super) fn rounds_within(&self, stage: Stage, width: usize, limit: Duration) -> u32 {
        let most = self.limits.rounds[stage as usize].max(1);
        let mut rounds = 1;
        while rounds * 2 <= most && self.costs.predict(stage, width, rounds * 2) <= limit.as_secs_f64() {
            rounds *= 2;
        }
        rounds
    }

    /// When something becomes possible that is not now.
    pub(super) fn wake_at(&self, now: Instant) -> Option<Instant> {
        if self.jobs.is_empty() {
            return None;
        }
        let open = self.slots.iter().flatten().filter_map(|id| self.jobs.get(id));
        let mut wake = if self.slots.iter().any(Option::is_some) { now + WATCH } else { now + SWEEP };
        for job in open.filter(|job| job.spec.class == Class::Live) {
            let Some(stream) = self.streams.get(&job.spec.stream) else { continue };
            if stream.resting
                && let Some(dry) = stream.dry_at()
                && let Some(resume) = dry.checked_sub(self.config.max_lead().mul_f64(RESUME))
            {
                wake = wake.min(resume.max(now + Duration::from_micros(100)));
            }
        }
        Some(wake)
    }
}

/// The furthest stage of the set: what is nearest to sound goes first.
fn last(stages: Stages) -> Option<Stage> {
    Stage::ALL.into_iter().rev().find(|stage| stages.has(*stage))
}

#[cfg(test)]
mod tests;
