//! What the device runs next. A pure state machine: it decides and never computes, it sees slots and stages and
//! never a tensor, a socket or a clock; every entry point takes `now`.
//!
//! Contract: call [`Scheduler::plan`] until it answers [`Plan::Idle`], and do what it says before the next call.
//! [`Plan::Open`] is answered with [`Scheduler::opened`], [`Plan::Run`] with [`Scheduler::record`], [`Plan::Begin`],
//! once that step has ended, with [`Scheduler::finished`]. All other entry points may be called at any time in between.
//! Every job ends with exactly one [`Plan::End`].
//!
//! Order of work, from the most urgent:
//! 1. a listener who is about to run dry (less left than its next chunk takes to make);
//! 2. the first audio of a silent live stream, by the instant it was promised for;
//! 3. speaking streams below their slack reserve, by the instant they run dry;
//! 4. speaking streams below their lead limit, by the same;
//! 5. streams without a listener's clock (downloads) beyond that;
//! 6. batch, by tenant, then first come.
//!
//! The most urgent job names the stage of the next step; others at that stage join as [`select`] describes.
//! Every step is bounded. Flow and vocoder steps are begun and not waited for, where the device can do that: what is
//! urgent meanwhile runs beside them, and before them wherever the device has room, but for the stage itself, which
//! waits ([`behind`]). Elsewhere nothing is preempted inside a step, and a new turn waits for at most one.
//!
//! # Why
//! - **Speaking before silent when it is critical**: an admitted stream has been promised no gap; a first audio
//!   is late by one chunk at most, a gap is heard by somebody in mid-sentence.
//! - **Batch is displaced before live work is refused**: its sinks commit whole utterances, so giving up a slot
//!   costs at most the work on one sentence; the same text and seed give the same audio again.
//! - **Cancelling is the stream's epoch**: stale jobs are dropped whenever `plan` is called, which is between any
//!   two steps. Nobody waits for an answer.
//! - **The playout anchor is followed by arithmetic** (see [`stream`]), so no buffer level is ever asked for.

mod admit;
mod behind;
mod config;
mod cost;
mod job;
mod load;
mod select;
mod step;
mod stream;
mod tenant;

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use self::admit::Learned;
pub use self::admit::{Refused, RefusedReason};
use self::behind::Behind;
pub use self::config::{Config, Tenant};
use self::cost::Costs;
use self::job::{Job, State};
pub use self::job::{JobEnd, JobId, JobSpec};
pub use self::load::Load;
pub use self::step::{Slot, Stage, Stages, Step};
use self::stream::Stream;
pub use self::stream::StreamNote;
use self::tenant::Tenants;
use crate::turn::{Class, StreamId};

/// A stream without work or sound is forgotten after this; one that comes back is simply a new stream.
const STREAM_IDLE: Duration = Duration::from_secs(60);
/// How often what is only queued is looked through for cancelled jobs and forgotten streams.
const SWEEP: Duration = Duration::from_millis(100);
/// A cancelled job that is open while nothing runs is noticed after this at the latest.
const WATCH: Duration = Duration::from_millis(10);

/// What the device can do.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Utterances open at once.
    pub slots: u32,
    /// Most slots in a step, per stage; 0: the engine has no such stage.
    pub width: [u32; 4],
    /// Most rounds of a step, per stage.
    pub rounds: [u32; 4],
    /// Whether parking a slot frees its memory.
    pub parks: bool,
    /// Whether flow and vocoder steps can be begun and finished later.
    pub background: bool,
    /// Bytes that open utterances may hold; 0: not limited.
    pub memory: u64,
    /// What the narrowest step of each stage took at warm-up.
    pub seeds: [Duration; 4],
}

/// What to do now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Prepare `slot` for `job`, then call [`Scheduler::opened`].
    Open {
        /// Where.
        slot: Slot,
        /// What.
        job: JobId,
    },
    /// Free `slot`: `job` gives it up for live work and starts its utterance again later.
    Displace {
        /// Where.
        slot: Slot,
        /// Whose.
        job: JobId,
    },
    /// Move the state in `slot` out of device memory; a later step that names the slot brings it back.
    Park {
        /// Where.
        slot: Slot,
        /// Whose.
        job: JobId,
    },
    /// `job` is over: free its slot if it has one, and tell its sink.
    End {
        /// Which.
        job: JobId,
        /// What it held.
        slot: Option<Slot>,
        /// How it ended.
        how: JobEnd,
        /// How long its live stream held its place, if it was the last of the stream's work.
        held: Option<Duration>,
    },
    /// Run this, then call [`Scheduler::record`].
    Run(Step),
    /// Start this behind whatever comes next; when it has ended, call [`Scheduler::finished`]. Where it cannot be
    /// started so, run it, and call that at once.
    Begin(Step),
    /// Nothing to do until then, or until something is submitted or noted.
    Idle {
        /// When to ask again; `None`: only when something happens.
        until: Option<Instant>,
    },
}

/// What a step did for one slot.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// For whom.
    pub slot: Slot,
    /// What it can run next.
    pub ready: Stages,
    /// New audio, in samples.
    pub samples: u64,
    /// What the tokens so far stand for, in samples.
    pub decoded: u64,
    /// Nothing more will come.
    pub done: bool,
    /// Why it cannot go on.
    pub failed: Option<String>,
}

/// Why a slot could not be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OpenError {
    /// No memory now; it is tried again when some was freed.
    Memory,
    /// It never will.
    Failed(String),
}

/// A job that is over, what it held, how it ended, and since when the stream whose last work it was held its place.
type Ended = (JobId, Option<Slot>, JobEnd, Option<Instant>);

/// The scheduler of one device.
#[derive(Debug)]
pub struct Scheduler {
    config: Config,
    limits: Limits,
    costs: Costs,
    learned: Learned,
    tenants: Tenants,
    jobs: BTreeMap<JobId, Job>,
    streams: BTreeMap<StreamId, Stream>,
    slots: Vec<Option<JobId>>,
    /// Live jobs that may open.
    live_waiting: Vec<JobId>,
    /// Batch jobs that may open, by tenant, first come first.
    batch_waiting: BTreeMap<usize, VecDeque<JobId>>,
    /// Over, not yet told.
    ended: VecDeque<Ended>,
    next: u64,
    /// Live streams with unfinished work.
    live_streams: u32,
    live_jobs: u32,
    /// How long streams that ended held their places, all together.
    held: Duration,
    swept: Option<Instant>,
    /// Since when batch work that could run has not run.
    batch_hungry: Option<Instant>,
    /// Starving batch work may run one step from then on.
    batch_grant: Option<Instant>,
    preemptions: u64,
    /// An open failed for want of memory: nothing more is opened until a slot is freed.
    memory_short: bool,
    /// A listener with less left than this may run dry before his next chunk is made.
    critical: Duration,
    /// The step that was begun.
    behind: Option<Behind>,
}

impl Scheduler {
    /// A scheduler for one warmed-up device.
    pub fn new(config: Config, limits: Limits) -> Self {
        let slots = vec![None; limits.slots as usize];
        let costs = Costs::new(limits.seeds);
        Self {
            config,
            limits,
            costs,
            learned: Learned::default(),
            tenants: Tenants::default(),
            jobs: BTreeMap::new(),
            streams: BTreeMap::new(),
            slots,
            live_waiting: Vec::new(),
            batch_waiting: BTreeMap::new(),
            ended: VecDeque::new(),
            next: 0,
            live_streams: 0,
            live_jobs: 0,
            held: Duration::ZERO,
            swept: None,
            batch_hungry: None,
            batch_grant: None,
            preemptions: 0,
            memory_short: false,
            critical: Duration::ZERO,
            behind: None,
        }
    }

    /// Takes an utterance on, or refuses it at once.
    ///
    /// # Errors
    /// Accepting it would break a promise already made, or exceeds a limit.
    pub fn submit(&mut self, now: Instant, spec: JobSpec) -> Result<JobId, Refused> {
        self.follow(now, &spec);
        let tenant = self.tenants.index(&spec.tenant, &self.config, now);
        let begins = self.stream_begins(spec.stream);
        self.admit(now, &spec, tenant, begins)?;
        let id = JobId(self.next);
        self.next += 1;
        let live = spec.class == Class::Live;
        let stream = self.streams.entry(spec.stream).or_insert_with(|| Stream::new(now, spec.token.clone()));
        stream.token = spec.token.clone();
        stream.touched = now;
        stream.jobs.push_back(id);
        let counts = live && stream.counted.is_none();
        if counts {
            stream.counted = Some((tenant, now));
        }
        self.tenants.job_added(tenant, spec.chars, counts);
        self.live_jobs += u32::from(live);
        self.live_streams += u32::from(counts);
        let deadline = now + self.config.first_audio_target();
        let stream = spec.stream;
        self.jobs.insert(id, Job::new(spec, tenant, deadline));
        self.advance(stream);
        Ok(id)
    }

    /// Says how many bytes `job` will hold at its largest.
    pub fn sized(&mut self, job: JobId, bytes: u64) {
        let Some(state) = self.jobs.get_mut(&job) else { return };
        state.memory = bytes;
        self.learned.sized(bytes, state.spec.chars);
        self.refuse_too_large(job);
    }

    /// What open utterances may hold changed: voices came or went.
    pub fn limit_memory(&mut self, bytes: u64) {
        self.limits.memory = bytes;
        self.memory_short = false;
        let closed: Vec<JobId> = self.jobs.iter().filter(|(_, job)| job.slot().is_none()).map(|(id, _)| *id).collect();
        closed.into_iter().for_each(|job| self.refuse_too_large(job));
    }

    /// A job that needs more than there is would wait for ever, and everybody else behind it.
    fn refuse_too_large(&mut self, job: JobId) {
        let limit = self.limits.memory;
        let Some(bytes) = self.jobs.get(&job).map(|state| state.memory) else { return };
        if limit > 0 && bytes > limit {
            let reason =
                format!("this utterance needs {bytes} bytes of device memory, {limit} are there: make it shorter");
            self.finish(job, JobEnd::Failed(reason));
        }
    }

    /// Follows a stream's listener.
    pub fn note(&mut self, now: Instant, stream: StreamId, note: StreamNote) {
        let token = crate::turn::TurnToken::forever();
        let known = self.streams.contains_key(&stream);
        if !known && note != StreamNote::Unpaced {
            return;
        }
        let state = self.streams.entry(stream).or_insert_with(|| Stream::new(now, token));
        state.note(now, note);
        if note == StreamNote::Closed {
            let jobs: Vec<JobId> = state.jobs.iter().copied().collect();
            for job in jobs {
                self.finish(job, JobEnd::Cancelled);
            }
            self.streams.remove(&stream);
        }
    }

    /// What to do now.
    pub fn plan(&mut self, now: Instant) -> Plan {
        self.sweep(now);
        if let Some((job, slot, how, since)) = self.ended.pop_front() {
            let held = since.map(|since| now.saturating_duration_since(since));
            self.held += held.unwrap_or_default();
            return Plan::End { job, slot, how, held };
        }
        if let Some(plan) = self.place_live(now) {
            return plan;
        }
        self.rest(now);
        let candidates = self.candidates(now);
        if self.behind.is_some() {
            let step = self.select_beside(now, &candidates);
            return step.map_or_else(|| Plan::Idle { until: self.wake_at(now) }, Plan::Run);
        }
        let urgent = candidates.first().is_some_and(|c| c.rank <= select::RESERVE);
        let starving = self.batch_starves(now);
        if (!urgent || starving)
            && let Some(plan) = self.place_batch(starving)
        {
            return plan;
        }
        self.select(now, &candidates).unwrap_or_else(|| Plan::Idle { until: self.wake_at(now) })
    }

    /// Answers [`Plan::Open`].
    pub fn opened(&mut self, job: JobId, result: Result<Stages, OpenError>) {
        let Some(state) = self.jobs.get_mut(&job) else { return };
        let State::Opening(slot) = state.state else { return };
        match result {
            Ok(ready) => {
                state.state = State::Open(slot);
                state.ready = ready;
                let stream = state.spec.stream;
                self.advance(stream);
            }
            Err(OpenError::Memory) if self.holders() > 1 => {
                self.memory_short = true;
                self.give_up(job);
            }
            Err(OpenError::Memory) => {
                self.finish(job, JobEnd::Failed("this utterance needs more device memory than there is".into()));
            }
            Err(OpenError::Failed(reason)) => self.finish(job, JobEnd::Failed(reason)),
        }
    }

    /// Answers [`Plan::Run`]: `took` is how long the step ran, until `now`.
    pub fn record(&mut self, now: Instant, took: Duration, step: &Step, outcomes: &[Outcome]) {
        match &mut self.behind {
            // Neither takes as long as it does alone.
            Some(behind) => behind.crossed = true,
            None => self.costs.observe(step.stage, step.slots.len(), step.rounds, took),
        }
        self.account(now, took, step, outcomes);
    }

    /// Follows what `outcomes` say of the slots of a step that ended `now` and had the device for `took`.
    fn account(&mut self, now: Instant, took: Duration, step: &Step, outcomes: &[Outcome]) {
        let share = took.as_secs_f64() / step.slots.len().max(1) as f64;
        let stage = step.stage as usize;
        let (mut batch_ran, mut batch_done) = (false, false);
        for outcome in outcomes {
            let Some(Some(id)) = self.slots.get(outcome.slot.0 as usize).copied() else { continue };
            let Some(job) = self.jobs.get_mut(&id) else { continue };
            self.tenants.charge(job.tenant, share);
            batch_ran |= !job.is_live();
            batch_done |= !job.is_live() && outcome.done;
            job.ready = outcome.ready;
            job.decoded = outcome.decoded;
            job.service += took;
            job.rounds[stage] += step.rounds;
            if outcome.samples > 0 {
                self.learned.produced(job, outcome.samples);
                job.samples += outcome.samples;
                job.service = Duration::ZERO;
                job.rounds = [0; 4];
            }
            let stream = job.spec.stream;
            if let Some(stream) = self.streams.get_mut(&stream) {
                stream.produced(now, outcome.samples);
            }
            if let Some(reason) = &outcome.failed {
                self.finish(id, JobEnd::Failed(reason.clone()));
            } else if outcome.done {
                self.learned.spoken(job.samples, job.spec.chars);
                self.finish(id, JobEnd::Done);
            } else {
                self.advance(stream);
            }
        }
        if batch_ran {
            let aged = self.batch_grant.is_some_and(|grant| now >= grant);
            let pause = took.as_secs_f64() / self.config.batch_min_share.max(1e-3);
            // What a starving lane was granted keeps it aged; only a sentence that it finishes in what live work left
            // over feeds it: one that is displaced on the way has gained nothing.
            if aged {
                self.batch_grant = Some(now + Duration::from_secs_f64(pause));
            } else if batch_done {
                self.batch_grant = None;
            }
            self.batch_hungry = None;
        }
    }

    /// Whether the sink of `job` is full: it is not run until that is over.
    pub fn block(&mut self, job: JobId, blocked: bool) {
        if let Some(job) = self.jobs.get_mut(&job) {
            job.blocked = blocked;
        }
    }

    /// Ends `job` from outside: its sink is gone or broken.
    pub fn end(&mut self, job: JobId, how: JobEnd) {
        self.finish(job, how);
    }

    /// The ids of all jobs that have not ended.
    pub fn jobs(&self) -> impl Iterator<Item = JobId> {
        self.jobs.keys().copied()
    }

    /// Whose state is in `slot`.
    pub fn job_in(&self, slot: Slot) -> Option<JobId> {
        self.slots.get(slot.0 as usize).copied().flatten()
    }

    /// Whether `job` may wait for room in its sink: nobody hears it as it is made.
    pub fn may_wait(&self, job: JobId) -> bool {
        let Some(job) = self.jobs.get(&job) else { return false };
        !job.is_live() || self.streams.get(&job.spec.stream).is_some_and(|stream| !stream.paced)
    }

    /// Whether `stream` has unfinished work here.
    pub fn has_work(&self, stream: StreamId) -> bool {
        !self.stream_begins(stream)
    }

    /// Whether `stream` has work or sound here.
    pub fn knows(&self, stream: StreamId) -> bool {
        self.streams.contains_key(&stream)
    }

    /// A stream whose last token went stale was interrupted: what it had produced has been flushed and what is
    /// left of it is not wanted, whatever the next job says.
    fn follow(&mut self, now: Instant, spec: &JobSpec) {
        let Some(stream) = self.streams.get_mut(&spec.stream) else { return };
        if !stream.token.is_stale() {
            return;
        }
        stream.flush();
        stream.touched = now;
        let stale: Vec<JobId> = stream.jobs.iter().copied().collect();
        for job in stale {
            if self.jobs.get(&job).is_some_and(|job| job.spec.token.is_stale()) {
                self.finish(job, JobEnd::Cancelled);
            }
        }
    }

    /// Whether a job for `stream` would begin new speech rather than continue some that was promised.
    fn stream_begins(&self, stream: StreamId) -> bool {
        self.streams.get(&stream).is_none_or(|stream| stream.jobs.is_empty())
    }

    /// Drops cancelled work: what is open or about to be, every time; what is only queued, every [`SWEEP`].
    fn sweep(&mut self, now: Instant) {
        let stale = |job: &JobId, jobs: &BTreeMap<JobId, Job>| jobs.get(job).is_some_and(|j| j.spec.token.is_stale());
        let mut cancelled: Vec<JobId> = self.slots.iter().flatten().copied().filter(|j| stale(j, &self.jobs)).collect();
        cancelled.extend(self.live_waiting.iter().copied().filter(|j| stale(j, &self.jobs)));
        if self.swept.is_none_or(|at| now >= at + SWEEP) {
            self.swept = Some(now);
            cancelled = self.jobs.iter().filter(|(_, job)| job.spec.token.is_stale()).map(|(id, _)| *id).collect();
            self.streams.retain(|_, stream| {
                let quiet = stream.jobs.is_empty() && stream.lead(now).is_zero();
                !(quiet && now.saturating_duration_since(stream.touched) > STREAM_IDLE)
            });
        }
        for job in cancelled {
            if let Some(stream) = self.jobs.get(&job).and_then(|j| self.streams.get_mut(&j.spec.stream))
                && stream.token.is_stale()
            {
                stream.flush();
            }
            self.finish(job, JobEnd::Cancelled);
        }
    }

    /// Puts the jobs of `stream` that may open now into a waiting list: the first, and the second as soon as the
    /// first has all its tokens, so that decoding goes on while it sounds.
    fn advance(&mut self, stream: StreamId) {
        let Some(stream) = self.streams.get(&stream) else { return };
        let Some(&first) = stream.jobs.front() else { return };
        let second = stream.jobs.get(1).copied();
        self.enqueue(first);
        let decodes = self.limits.width[Stage::Decode as usize] > 0;
        if let Some(second) = second
            && decodes
            && self.jobs.get(&first).is_some_and(Job::is_decoded)
        {
            self.enqueue(second);
        }
    }

    fn enqueue(&mut self, id: JobId) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if job.state != State::Behind {
            return;
        }
        job.state = State::Waiting;
        match job.spec.class {
            Class::Live => self.live_waiting.push(id),
            Class::Batch => self.batch_waiting.entry(job.tenant).or_default().push_back(id),
        }
    }

    /// Takes the slot off `id`; it opens again later.
    fn give_up(&mut self, id: JobId) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if let Some(slot) = job.slot() {
            self.slots[slot.0 as usize] = None;
        }
        job.restart();
        match job.spec.class {
            Class::Live => self.live_waiting.push(id),
            Class::Batch => self.batch_waiting.entry(job.tenant).or_default().push_front(id),
        }
    }

    /// Forgets `id`; `plan` tells.
    fn finish(&mut self, id: JobId, how: JobEnd) {
        let Some(job) = self.jobs.remove(&id) else { return };
        let slot = job.slot();
        if let Some(slot) = slot {
            match &mut self.behind {
                Some(behind) if behind.has(slot) => behind.held += job.resident(),
                _ => self.slots[slot.0 as usize] = None,
            }
            self.memory_short = false;
        } else if job.is_live() {
            self.live_waiting.retain(|other| *other != id);
        } else if let Some(queue) = self.batch_waiting.get_mut(&job.tenant) {
            queue.retain(|other| *other != id);
        }
        self.tenants.job_ended(job.tenant);
        self.live_jobs -= u32::from(job.is_live());
        if self.jobs.len() == self.live_jobs as usize {
            // Nobody starves any more, however long whoever went had waited.
            self.batch_hungry = None;
            self.batch_grant = None;
        }
        let mut since = None;
        if let Some(stream) = self.streams.get_mut(&job.spec.stream) {
            stream.jobs.retain(|other| *other != id);
            if stream.jobs.is_empty()
                && let Some((tenant, counted)) = stream.counted.take()
            {
                since = Some(counted);
                self.tenants.stream_ended(tenant);
                self.live_streams -= 1;
            }
        }
        self.tell((id, slot, how, since));
        self.advance(job.spec.stream);
    }

    /// How many slots hold memory: only what they give up can ever be had.
    fn holders(&self) -> usize {
        let jobs = self.slots.iter().flatten().filter_map(|id| self.jobs.get(id));
        let over = self.behind.as_ref().map_or(0, |behind| behind.ended.len());
        over + jobs.filter(|job| !matches!(job.state, State::Parked(_))).count()
    }

    /// Bytes reserved by what is on the device.
    fn reserved(&self) -> u64 {
        let open = self.slots.iter().flatten().filter_map(|id| self.jobs.get(id));
        open.map(Job::resident).sum::<u64>() + self.behind.as_ref().map_or(0, |behind| behind.held)
    }
}

#[cfg(test)]
mod tests;
