//! What the device runs next. A pure state machine: it decides and never computes, it sees slots and stages and
//! never a tensor, a socket or a clock; every entry point takes `now`.
//!
//! Contract: call [`Scheduler::plan`] until it answers [`Plan::Idle`], and do what it says before the next call.
//! [`Plan::Open`] is answered with [`Scheduler::opened`], [`Plan::Run`] with [`Scheduler::record`], [`Plan::Launch`],
//! once that step is complete, with [`Scheduler::complete`]. All other entry points may be called at any time in
//! between. Every job ends with exactly one [`Plan::End`].
//!
//! Order of work, from the most urgent (`Rank`):
//! 1. a listener who is about to hear a gap (less left than its next chunk takes to make);
//! 2. the first audio of a silent live stream, by the instant it was promised for;
//! 3. speaking streams below their slack reserve, by the instant of their underrun;
//! 4. speaking streams below their lead limit, by the same;
//! 5. streams without a listener's clock (downloads) beyond that;
//! 6. batch, by tenant, then first come.
//!
//! The most urgent job names the stage of the next step; others at that stage join as [`batching`] describes. New turns
//! wait a little for each other where that is worth while ([`gather`]). Every step is bounded. Where the device can do that,
//! flow and vocoder steps are launched and not waited for: what is urgent meanwhile runs concurrently, but for the stage
//! itself ([`inflight`]). Elsewhere nothing is preempted inside a step, and a new turn waits for at most one.
//!
//! # Parts
//! [`table`] owns jobs, streams and slots; [`forecast`] what speech costs; [`memory`] how much there is; [`tenant`]
//! shares; [`starvation`] the claims of batch work; [`latitude`] how many turns may be late; [`inflight`] the launched step. [`admission`] (by what is due,
//! [`demand`]), [`placement`], [`rank`], [`gather`], [`batching`], [`writing`] and [`outcome`] work on these and own nothing.
//!
//! # Why
//! - **Speaking before silent when it is critical**: an admitted stream has been promised no gap; a first audio
//!   is late by one chunk at most, a gap is heard by a listener in mid-sentence.
//! - **Batch is displaced before live work is refused**: its sinks commit whole utterances, so giving up a slot costs the
//!   work on one sentence at most. **Cancelling is the stream's epoch**: whenever `plan` is called stale jobs are dropped.
//! - **The playout anchor is followed by arithmetic** (see [`stream`]), so no buffer level is ever asked for.

mod admission;
mod batching;
mod config;
mod cost;
mod demand;
mod forecast;
mod gather;
mod inflight;
mod job;
mod latitude;
mod load;
mod memory;
mod outcome;
mod placement;
mod plan;
mod rank;
mod slots;
mod starvation;
mod step;
mod stream;
mod table;
mod tenant;
mod writing;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::admission::Admission;
pub use self::admission::{Refused, RefusedReason};
use self::batching::Batching;
pub use self::config::{Config, Tenant};
pub use self::cost::Seeds;
use self::demand::Arrivals;
use self::forecast::Forecast;
use self::inflight::{Ended, InFlight};
use self::job::State;
pub use self::job::{JobEnd, JobId, JobSpec};
use self::latitude::Latitude;
pub use self::load::{Load, by_suitability};
pub use self::memory::Need;
use self::memory::{Holding, Memory};
use self::outcome::{Followed, Following, chunk_rounds};
use self::placement::Placement;
pub use self::plan::{OpenError, Plan};
use self::rank::{Candidate, Ranking};
use self::starvation::Starvation;
pub use self::step::{EngineLimits, Outcome, PerStage, Slot, Stage, Stages, Step};
use self::stream::Stream;
pub use self::stream::StreamNote;
use self::table::Table;
pub use self::tenant::Quotas;
use self::tenant::Tenants;
use crate::turn::{Class, StreamId, TurnToken};

/// A stream without work or sound is forgotten after this; one that comes back is simply a new stream.
const STREAM_IDLE: Duration = Duration::from_secs(60);
/// How often what is only queued is looked through for cancelled jobs and forgotten streams.
const SWEEP: Duration = Duration::from_millis(100);

/// The scheduler of one device.
///
/// Why this struct is large: it is the one door to everything that decides, each part of which is a module of its own.
#[derive(Debug)]
pub struct Scheduler {
    config: Config,
    limits: EngineLimits,
    table: Table,
    forecast: Forecast,
    tenants: Tenants,
    memory: Memory,
    starvation: Starvation,
    inflight: InFlight,
    /// Over, not yet told.
    ended: VecDeque<Ended>,
    /// How long live streams that are done had unfinished work, all together.
    holding: Duration,
    /// Device time of late.
    recent: load::Recent,
    swept: Option<Instant>,
    preemptions: u64,
    /// A listener with less left than this may hear a gap before his next chunk is made.
    critical: Duration,
    /// Live turns that began of late.
    arrivals: Arrivals,
    latitude: Latitude,
    /// A listener in silence waits, or one who is about to hear a gap.
    urgent: bool,
}

impl Scheduler {
    /// A scheduler for one device. `memory`: bytes that utterances may hold, 0: no limit; `seeds`: from its warm-up.
    pub fn new(config: Config, limits: EngineLimits, memory: u64, seeds: &Seeds) -> Self {
        Self {
            config,
            table: Table::new(limits.slots, limits.width[Stage::Decode] > 0),
            forecast: Forecast::new(&limits, seeds),
            memory: Memory::new(memory, limits.grows),
            limits,
            tenants: Tenants::default(),
            starvation: Starvation::default(),
            inflight: InFlight::default(),
            ended: VecDeque::new(),
            holding: Duration::ZERO,
            recent: load::Recent::default(),
            swept: None,
            preemptions: 0,
            critical: Duration::ZERO,
            arrivals: Arrivals::default(),
            latitude: Latitude::default(),
            urgent: false,
        }
    }

    /// Counts limits of tenants together with the schedulers of other devices.
    #[must_use]
    pub fn sharing(self, quotas: Arc<Quotas>) -> Self {
        Self { tenants: Tenants::new(quotas), ..self }
    }

    /// Takes an utterance on, or refuses it at once.
    ///
    /// # Errors
    /// Accepting it would break a promise already made, or exceeds a limit.
    pub fn submit(&mut self, now: Instant, spec: JobSpec) -> Result<JobId, Refused> {
        self.drop_interrupted(now, &spec);
        let tenant = self.tenants.index(&spec.tenant, &self.config, now);
        if spec.class == Class::Live {
            self.tenants.asks(tenant, now);
        }
        if self.has_work(spec.stream) {
            Admission::of(self, now).check_more()?;
        } else {
            let wait = self.tenants.rate(tenant, now);
            // What follows speech that is still heard was promised with it, though all of that is made.
            let heard = |stream: &Stream| stream.paced && !stream.lead(now).is_zero();
            if spec.class == Class::Live && self.table.stream(spec.stream).is_some_and(heard) {
                Admission::of(self, now).check_next(wait)?;
            } else {
                let promise = Admission::of(self, now).check_new(now, &spec, tenant, wait)?;
                if spec.class == Class::Live {
                    self.arrivals.add(now);
                    self.latitude.taken(promise);
                }
            }
        }
        let (chars, deadline) = (spec.chars, now + self.config.first_audio_target());
        let id = self.table.add(now, spec, tenant, deadline, || self.tenants.permit(tenant));
        self.tenants.job_added(tenant, chars);
        Ok(id)
    }

    /// Whether one more live stream would be taken on, of whatever tenant.
    ///
    /// # Errors
    /// It would not, and when to ask again.
    pub fn has_room(&self, now: Instant) -> Result<(), Refused> {
        Admission::of(self, now).has_room(now)
    }

    /// Says what memory `job` will need.
    pub fn sized(&mut self, job: JobId, need: Need) {
        let Some(state) = self.table.job_mut(job) else { return };
        let initial = if self.memory.grows() { 0 } else { need.most };
        let (expected, in_full) = (self.memory.expected(need), !state.is_live());
        state.memory = Holding { need, expected, initial, in_full, ..Holding::default() };
        self.forecast.sized(state.memory.claim(), state.spec.chars);
        if state.is_live() {
            self.forecast.promised(expected);
        }
        self.fail_if_too_large(job, initial);
    }

    /// What open utterances may hold changed: voices came or went.
    pub fn limit_memory(&mut self, bytes: u64) {
        self.memory.set_limit(bytes);
        let closed = self.table.jobs().filter(|(_, job)| job.slot().is_none());
        let closed: Vec<(JobId, u64)> = closed.map(|(id, job)| (id, job.memory.initial)).collect();
        for (job, initial) in closed {
            self.fail_if_too_large(job, initial);
        }
    }

    /// A job that takes more `bytes` than there are would wait for ever, and all others after it. Whether it is one.
    fn fail_if_too_large(&mut self, job: JobId, bytes: u64) -> bool {
        let limit = self.memory.limit();
        let too_large = limit > 0 && bytes > limit;
        if too_large {
            // Voices cut what they speak to what the device has for it, so the text is not what is to be changed.
            let reason = format!(
                "this utterance needs {bytes} bytes of device memory, {limit} are there for speech: another program or \
                 the other voices hold the rest; free some and start the gateway again"
            );
            self.end(job, JobEnd::Failed(reason));
        }
        too_large
    }

    /// Follows a stream's listener.
    pub fn note(&mut self, now: Instant, stream: StreamId, note: StreamNote) {
        if self.table.stream(stream).is_none() && note != StreamNote::Unpaced {
            return;
        }
        let state = self.table.stream_or(stream, || Stream::new(now, TurnToken::forever()));
        state.note(now, note);
        if note == StreamNote::Closed {
            let jobs: Vec<JobId> = state.jobs.iter().copied().collect();
            for job in jobs {
                self.end(job, JobEnd::Cancelled);
            }
            self.table.forget_stream(stream);
        }
    }

    /// What to do now.
    pub fn plan(&mut self, now: Instant) -> Plan {
        self.sweep(now);
        if let Some(Ended { job, slot, how, since }) = self.ended.pop_front() {
            let holding = since.map(|since| now.saturating_duration_since(since));
            self.holding += holding.unwrap_or_default();
            return Plan::End { job, slot, how, holding };
        }
        let batch_is_owed = self.starvation.is_owed(now, &self.config);
        if let Some(plan) = Placement::of(self).live(batch_is_owed) {
            return plan;
        }
        self.critical = rank::rest(&mut self.table, now, &self.config, &self.forecast, &self.memory);
        let mut candidates = Ranking::of(self).candidates(now);
        self.urgent = self.inflight.is_urgent() || candidates.first().is_some_and(|c| c.rank.is_urgent());
        if self.memory.grows()
            && let Some(lack) = self.memory.gate(&self.table, &mut candidates)
        {
            if let Some(plan) = Placement::of(self).relieve(now, lack) {
                return plan;
            }
            let wants = self.table.job(lack.job).map_or(0, |job| job.memory.wants);
            if self.table.holders() == 1 && self.fail_if_too_large(lack.job, wants) {
                return self.plan(now);
            }
        }
        if self.arrivals.rate(now) >= gather::CROWDED {
            gather::hold_back(&mut candidates, &self.table, &self.config, now, self.inflight.is_urgent());
        }
        let hurried = self.inflight.is_urgent() || candidates.first().is_some_and(|c| c.rank.is_hurried());
        let beside = self.inflight.concurrent(&self.config);
        let starving = beside.is_none() && self.starvation.starves(now, &self.config);
        // There is time to open batch work while a launched step runs.
        let launches = self.limits.launches && candidates.first().is_some_and(|c| c.stage.is_launched());
        let opens_first = starving || !hurried && !launches && beside.is_none();
        if opens_first && let Some(plan) = Placement::of(self).batch(starving) {
            return plan;
        }
        let plan = match beside {
            Some((stage, limit)) => self.select_concurrent(now, &candidates, stage, limit).map(Plan::Run),
            None => self.select(now, &candidates, starving),
        };
        let plan = plan.or_else(|| if opens_first || hurried { None } else { Placement::of(self).batch(false) });
        plan.unwrap_or_else(|| Plan::Idle { until: rank::wake_at(&self.table, now, &self.config) })
    }

    /// Answers [`Plan::Open`].
    pub fn opened(&mut self, job: JobId, result: Result<Stages, OpenError>) {
        let Some(state) = self.table.job_mut(job) else { return };
        let State::Opening(slot) = state.state else { return };
        match result {
            Ok(ready) => {
                state.state = State::Open(slot);
                state.ready = ready;
                let stream = state.spec.stream;
                self.table.advance(stream);
            }
            Err(OpenError::Memory) if self.table.holders() > 1 => {
                self.memory.ran_short();
                self.table.restart(job);
            }
            Err(OpenError::Memory) => {
                self.end(job, JobEnd::Failed("this utterance needs more device memory than there is".into()));
            }
            Err(OpenError::Failed(reason)) => self.end(job, JobEnd::Failed(reason)),
        }
    }

    /// Answers [`Plan::Run`]: `took` is how long the step ran, until `now`; `step` what was really run of it.
    pub fn record<'o>(
        &mut self,
        now: Instant,
        took: Duration,
        step: &Step,
        outcomes: impl IntoIterator<Item = &'o Outcome, IntoIter: Clone>,
    ) {
        let outcomes = outcomes.into_iter();
        if !self.inflight.cross() {
            self.forecast.observe(step, took, chunk_rounds(step, outcomes.clone()));
        }
        self.account(now, took, step, outcomes);
    }

    /// Answers [`Plan::Launch`] as [`Self::record`] does; `took` is without the steps that ran meanwhile.
    pub fn complete<'o>(
        &mut self,
        now: Instant,
        took: Duration,
        step: &Step,
        outcomes: impl IntoIterator<Item = &'o Outcome, IntoIter: Clone>,
    ) {
        let (Some((alone, ended)), outcomes) = (self.inflight.complete(), outcomes.into_iter()) else { return };
        if alone {
            self.forecast.observe(step, took, chunk_rounds(step, outcomes.clone()));
        }
        self.account(now, took, step, outcomes);
        for end in ended {
            if let Some(slot) = end.slot {
                self.table.slots.release(slot);
                self.memory.freed();
            }
            self.ended.push_back(end);
        }
    }

    /// Follows the `outcomes` of a step that ended `now` and had the device for `took`.
    fn account<'o>(
        &mut self,
        now: Instant,
        took: Duration,
        step: &Step,
        outcomes: impl IntoIterator<Item = &'o Outcome>,
    ) {
        self.recent.add(now, took);
        self.forecast.ran(step, took);
        let (mut batch_ran, mut batch_done) = (false, false);
        for outcome in outcomes {
            let Self { table, tenants, forecast, memory, .. } = self;
            let followed = Following { table, tenants, forecast, memory }.take(now, took, step, outcome);
            let Some(Followed { job, is_live, end }) = followed else { continue };
            batch_ran |= !is_live;
            batch_done |= !is_live && outcome.done;
            if let Some(how) = end {
                self.end(job, how);
            }
        }
        if batch_ran {
            self.starvation.ran(now, took, batch_done, &self.config);
        }
    }

    /// The text of `job` is still being written: while it is open it keeps its slot, and waits for more.
    pub fn begin_writing(&mut self, job: JobId) {
        writing::begin(&mut self.table, job);
    }

    /// So many characters more of the text of `job` were written.
    pub fn written(&mut self, job: JobId, chars: u32) {
        writing::written(&mut self.table, &mut self.tenants, job, chars);
    }

    /// The voice was given more of the text of `job`, or all of it (`last`): what it can run now.
    pub fn fed(&mut self, now: Instant, job: JobId, ready: Stages, last: bool) {
        writing::fed(&mut self.table, now, self.config.first_audio_target(), job, (ready, last));
    }

    /// Whether the sink of `job` is full: it is not run until that is over.
    pub fn block(&mut self, job: JobId, blocked: bool) {
        if let Some(job) = self.table.job_mut(job) {
            job.blocked = blocked;
        }
    }

    /// Ends `job`: it is forgotten at once, and [`Self::plan`] tells. Also from outside, when its sink is gone or broken.
    pub fn end(&mut self, job: JobId, how: JobEnd) {
        let keeps_slot = self.table.job(job).and_then(|job| job.slot()).is_some_and(|slot| self.inflight.is_busy(slot));
        let Some(removed) = self.table.remove(job, keeps_slot) else { return };
        let slot = removed.job.slot();
        if slot.is_some() {
            self.memory.freed();
        }
        self.tenants.job_ended(removed.job.tenant);
        if self.table.counts().1 == 0 {
            self.starvation.over();
        }
        let since = removed.stream_done;
        self.ended.extend(self.inflight.keep(Ended { job, slot, how, since }));
    }

    /// Whose state is in `slot`.
    pub fn job_in(&self, slot: Slot) -> Option<JobId> {
        self.table.slots.job_in(slot)
    }

    /// The slot of `job`, if its state is in one.
    pub fn slot_of(&self, job: JobId) -> Option<Slot> {
        let job = self.table.job(job)?;
        if matches!(job.state, State::Open(_) | State::Parked(_)) { job.slot() } else { None }
    }

    /// Whether first audio, or a gap about to be heard, was planned last or could be: what else computes gives way.
    pub fn is_urgent(&self) -> bool {
        self.urgent
    }

    /// Numbers for people and metrics.
    pub fn load(&self, now: Instant) -> Load {
        let load = load::of(&self.table, now);
        Load {
            holding: load.holding + self.holding.as_secs_f64(),
            load: self.forecast.load(self.table.live_streams()),
            sustainable: self.forecast.sustainable(self.config.load_limit, gather::period(&self.config)),
            capacity: Admission::of(self, now).capacity(),
            memory_streams: self.memory.streams(self.forecast.bytes_each()),
            preemptions: self.preemptions,
            recent: self.recent.at(now),
            first_audio: Some(self.forecast.first_audio(1)).filter(|seconds| *seconds > 0.0),
            ..load
        }
    }

    /// Predicted seconds of the narrowest step.
    pub fn step_seconds(&self) -> PerStage<f64> {
        PerStage::from_fn(|stage| self.forecast.cost(stage, 1, 1))
    }

    /// Whether `job` may wait for room in its sink: it is not heard as it is made.
    pub fn may_wait(&self, job: JobId) -> bool {
        let Some(job) = self.table.job(job) else { return false };
        !job.is_live() || self.table.stream(job.spec.stream).is_some_and(|stream| !stream.paced)
    }

    /// Whether `stream` has unfinished work here: a further job continues speech that was promised.
    pub fn has_work(&self, stream: StreamId) -> bool {
        self.table.stream(stream).is_some_and(|stream| !stream.jobs.is_empty())
    }

    /// Whether `stream` has work or sound here.
    pub fn knows(&self, stream: StreamId) -> bool {
        self.table.stream(stream).is_some()
    }

    /// A stream whose last token went stale was interrupted: what is left is not wanted, whatever the next job says.
    fn drop_interrupted(&mut self, now: Instant, spec: &JobSpec) {
        let Some(stream) = self.table.stream_mut(spec.stream).filter(|stream| stream.token.is_stale()) else { return };
        stream.flush();
        stream.touched = now;
        let jobs: Vec<JobId> = stream.jobs.iter().copied().collect();
        for job in jobs {
            if self.table.job(job).is_some_and(|job| job.spec.token.is_stale()) {
                self.end(job, JobEnd::Cancelled);
            }
        }
    }

    /// Drops cancelled work: what is open or about to be, every time; what is only queued, every [`SWEEP`].
    fn sweep(&mut self, now: Instant) {
        let cancelled: Vec<JobId> = if self.swept.is_none_or(|at| now >= at + SWEEP) {
            self.swept = Some(now);
            self.table.retain_streams(|stream| {
                let quiet = stream.jobs.is_empty() && stream.lead(now).is_zero();
                !(quiet && now.saturating_duration_since(stream.touched) > STREAM_IDLE)
            });
            self.fail_unplaced(now);
            self.table.jobs().filter(|(_, job)| job.spec.token.is_stale()).map(|(id, _)| id).collect()
        } else {
            let soon = self.table.open_jobs().chain(self.table.live_waiting());
            soon.filter(|(_, job)| job.spec.token.is_stale()).map(|(id, _)| id).collect()
        };
        for id in cancelled {
            let stream = self.table.job(id).map(|job| job.spec.stream);
            if let Some(stream) = stream.and_then(|stream| self.table.stream_mut(stream))
                && stream.token.is_stale()
            {
                stream.flush();
            }
            self.end(id, JobEnd::Cancelled);
        }
    }

    /// Live work that has no room long after its promise fails: another voice speaks in its place then.
    fn fail_unplaced(&mut self, now: Instant) {
        for job in placement::unplaced(&self.table, now) {
            let reason = format!("the speech engine had no room for it for {} s", placement::UNPLACED.as_secs());
            self.end(job, JobEnd::Failed(reason));
        }
    }

    /// The next step.
    fn select(&mut self, now: Instant, candidates: &[Candidate], starving: bool) -> Option<Plan> {
        let batching = Batching::of(self, now);
        let batch = candidates.iter().find(|c| !c.is_live() && batching.can_be_resident(c));
        let live = candidates.iter().find(|c| c.is_live());
        let starving = starving && batch.is_some();
        let head = if starving { batch } else { live.or(batch) }?;
        let (stage, members) = batching.step(now, head, starving, candidates);
        let rounds = batching.rounds(stage, members.len(), head.rank, candidates);
        let batch_waits = batch.is_some() || self.table.batch_waiting().next().is_some();
        if starving {
            self.starvation.give_quantum(now);
        }
        if batch_waits && members.iter().all(|c| c.is_live()) && self.starvation.left_out(now) {
            self.preemptions += 1;
        }
        if !starving && !head.rank.is_hurried() && members.iter().any(|c| !c.is_live()) {
            self.starvation.at_leisure(now);
        }
        let urgent = members.iter().any(|c| c.rank.is_urgent());
        let step = Step { stage, slots: batching::start(&mut self.table, stage, &members), rounds };
        if !self.limits.launches || !stage.is_launched() {
            return Some(Plan::Run(step));
        }
        self.inflight.launch(step.clone(), urgent);
        Some(Plan::Launch(step))
    }

    /// What is urgent and need not wait for the step in flight, which is of `stage`: a round takes no more than `limit`.
    /// Speaking streams join it where it decodes: a row more costs next to nothing there, and rounds of their own a step.
    fn select_concurrent(
        &mut self,
        now: Instant,
        candidates: &[Candidate],
        stage: Stage,
        limit: Duration,
    ) -> Option<Step> {
        let urgent = &candidates[..candidates.partition_point(|c| c.rank.is_urgent())];
        let head = urgent.iter().find(|c| c.stage != stage)?;
        let speaking = &candidates[..candidates.partition_point(|c| c.rank.is_awaited())];
        let others = if head.stage == Stage::Decode { speaking } else { urgent };
        let batching = Batching::of(self, now);
        let members = batching.urgent(now, head, others);
        let rounds = batching.rounds_within(head.stage, members.len(), limit);
        Some(Step { stage: head.stage, slots: batching::start(&mut self.table, head.stage, &members), rounds })
    }
}

#[cfg(test)]
mod tests;
