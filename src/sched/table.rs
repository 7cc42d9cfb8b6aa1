//! The jobs, the streams that they are heard on, and the slots that hold their state.
//!
//! Owns who stands where: which job is the first of its stream, which may open, which has which slot. It decides
//! nothing about time or importance.
//!
//! # Why
//! Jobs and streams are hashed, and by a hash that is a multiplication: each plan looks every open job up a dozen times, and
//! a thousand streams may be remembered. In ordered maps that was most of what planning took, and the device waited for it:
//! one H100 with 180 open utterances had nothing to do for 9 % of its time.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use rustc_hash::FxHashMap;

use super::job::{Job, JobId, JobSpec, State};
use super::slots::Slots;
use super::step::Slot;
use super::stream::Stream;
use super::tenant::Permit;
use crate::turn::{Class, StreamId};

/// A job that was taken out of the table.
#[derive(Debug)]
pub(super) struct Removed {
    pub(super) job: Job,
    /// It was the last work of a live stream, which had some since then.
    pub(super) stream_done: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct Table {
    jobs: FxHashMap<JobId, Job>,
    streams: FxHashMap<StreamId, Stream>,
    pub(super) slots: Slots,
    /// Live jobs that may open.
    live_waiting: Vec<JobId>,
    /// Batch jobs that may open, by tenant, first come first.
    batch_waiting: BTreeMap<usize, VecDeque<JobId>>,
    next: u64,
    live_jobs: u32,
    /// Live streams with unfinished work.
    live_streams: u32,
    /// Whether the engine has tokens: then a job may be decoded while the one before it sounds.
    decodes: bool,
}

impl Table {
    pub(super) fn new(slots: u32, decodes: bool) -> Self {
        Self {
            jobs: FxHashMap::default(),
            streams: FxHashMap::default(),
            slots: Slots::new(slots),
            live_waiting: Vec::new(),
            batch_waiting: BTreeMap::new(),
            next: 0,
            live_jobs: 0,
            live_streams: 0,
            decodes,
        }
    }

    /// Takes a job on. `permit` gives a live stream its part of its tenant's limit.
    pub(super) fn add(
        &mut self,
        now: Instant,
        spec: JobSpec,
        tenant: usize,
        deadline: Instant,
        permit: impl FnOnce() -> Permit,
    ) -> JobId {
        let id = JobId(self.next);
        self.next += 1;
        let live = spec.class == Class::Live;
        let stream = self.streams.entry(spec.stream).or_insert_with(|| Stream::new(now, spec.token.clone()));
        stream.token = spec.token.clone();
        stream.touched = now;
        stream.jobs.push_back(id);
        if live && stream.counted.is_none() {
            stream.counted = Some((now, permit()));
            self.live_streams += 1;
        }
        self.live_jobs += u32::from(live);
        let stream = spec.stream;
        self.jobs.insert(id, Job::new(spec, tenant, deadline));
        self.advance(stream);
        id
    }

    /// Takes a job out. `keeps_slot`: a launched step still works on its state; the slot is released later.
    pub(super) fn remove(&mut self, id: JobId, keeps_slot: bool) -> Option<Removed> {
        let job = self.jobs.remove(&id)?;
        if let Some(slot) = job.slot() {
            match keeps_slot {
                true => self.slots.keep(slot, id, job.resident()),
                false => self.slots.release(slot),
            }
        } else if job.is_live() {
            self.live_waiting.retain(|other| *other != id);
        } else if let Some(queue) = self.batch_waiting.get_mut(&job.tenant) {
            queue.retain(|other| *other != id);
        }
        self.live_jobs -= u32::from(job.is_live());
        let mut stream_done = None;
        if let Some(stream) = self.streams.get_mut(&job.spec.stream) {
            stream.jobs.retain(|other| *other != id);
            if stream.jobs.is_empty() {
                stream_done = stream.counted.take().map(|(since, _)| since);
                self.live_streams -= u32::from(stream_done.is_some());
            }
        }
        self.advance(job.spec.stream);
        Some(Removed { job, stream_done })
    }

    /// Gives `slot` to a waiting job.
    pub(super) fn open(&mut self, id: JobId, slot: Slot) {
        self.slots.take(slot, id);
        let Some(job) = self.jobs.get_mut(&id) else { return };
        job.state = State::Opening(slot);
        job.memory.holds = job.memory.initial;
        if job.is_live() {
            self.live_waiting.retain(|other| *other != id);
        } else if let Some(queue) = self.batch_waiting.get_mut(&job.tenant) {
            queue.retain(|other| *other != id);
        }
    }

    /// Takes the slot off `id`, which opens again later and starts from its text.
    pub(super) fn restart(&mut self, id: JobId) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if let Some(slot) = job.slot() {
            self.slots.release(slot);
        }
        job.restart();
        match job.spec.class {
            Class::Live => self.live_waiting.push(id),
            Class::Batch => self.batch_waiting.entry(job.tenant).or_default().push_front(id),
        }
    }

    /// Puts the jobs of `stream` that may open now into a waiting list: the first, and the second as soon as the
    /// first has all its tokens, so that decoding goes on while it sounds.
    pub(super) fn advance(&mut self, stream: StreamId) {
        let Some(stream) = self.streams.get(&stream) else { return };
        let Some(&first) = stream.jobs.front() else { return };
        let second = stream.jobs.get(1).copied();
        self.enqueue(first);
        if let Some(second) = second
            && self.decodes
            && self.jobs.get(&first).is_some_and(Job::is_decoded)
        {
            self.enqueue(second);
        }
    }

    fn enqueue(&mut self, id: JobId) {
        let Some(job) = self.jobs.get_mut(&id).filter(|job| job.state == State::Queued) else { return };
        job.state = State::Waiting;
        match job.spec.class {
            Class::Live => self.live_waiting.push(id),
            Class::Batch => self.batch_waiting.entry(job.tenant).or_default().push_back(id),
        }
    }

    pub(super) fn job(&self, id: JobId) -> Option<&Job> {
        self.jobs.get(&id)
    }

    pub(super) fn job_mut(&mut self, id: JobId) -> Option<&mut Job> {
        self.jobs.get_mut(&id)
    }

    /// All jobs, in no order.
    pub(super) fn jobs(&self) -> impl Iterator<Item = (JobId, &Job)> {
        self.jobs.iter().map(|(id, job)| (*id, job))
    }

    /// Live and batch jobs.
    pub(super) fn counts(&self) -> (u32, u32) {
        (self.live_jobs, self.jobs.len() as u32 - self.live_jobs)
    }

    /// Live streams with unfinished work.
    pub(super) fn live_streams(&self) -> u32 {
        self.live_streams
    }

    pub(super) fn stream(&self, id: StreamId) -> Option<&Stream> {
        self.streams.get(&id)
    }

    pub(super) fn stream_mut(&mut self, id: StreamId) -> Option<&mut Stream> {
        self.streams.get_mut(&id)
    }

    pub(super) fn streams(&self) -> impl Iterator<Item = &Stream> {
        self.streams.values()
    }

    /// The stream, which is made if there is none.
    pub(super) fn stream_or(&mut self, id: StreamId, new: impl FnOnce() -> Stream) -> &mut Stream {
        self.streams.entry(id).or_insert_with(new)
    }

    pub(super) fn forget_stream(&mut self, id: StreamId) {
        self.streams.remove(&id);
    }

    /// Forgets streams that `keep` does not want.
    pub(super) fn retain_streams(&mut self, mut keep: impl FnMut(&Stream) -> bool) {
        self.streams.retain(|_, stream| keep(stream));
    }

    /// Jobs with a slot, in the order of slots.
    pub(super) fn open_jobs(&self) -> impl Iterator<Item = (JobId, &Job)> {
        self.slots.jobs().filter_map(|id| Some((id, self.jobs.get(&id)?)))
    }

    /// Calls `follow` with each live job that has a slot and its stream.
    pub(super) fn each_open_live(&mut self, mut follow: impl FnMut(JobId, &Job, &mut Stream)) {
        for id in self.slots.jobs() {
            let Some(job) = self.jobs.get(&id).filter(|job| job.is_live()) else { continue };
            let Some(stream) = self.streams.get_mut(&job.spec.stream) else { continue };
            follow(id, job, stream);
        }
    }

    /// Live jobs that may open.
    pub(super) fn live_waiting(&self) -> impl Iterator<Item = (JobId, &Job)> {
        self.live_waiting.iter().filter_map(|id| Some((*id, self.jobs.get(id)?)))
    }

    /// The first of each tenant's batch jobs that may open.
    pub(super) fn batch_waiting(&self) -> impl Iterator<Item = (JobId, &Job)> {
        self.batch_waiting.values().filter_map(|queue| {
            let id = *queue.front()?;
            Some((id, self.jobs.get(&id)?))
        })
    }

    /// Whether `id` is the first job of its stream.
    pub(super) fn is_front(&self, id: JobId) -> bool {
        let stream = self.jobs.get(&id).and_then(|job| self.streams.get(&job.spec.stream));
        stream.is_some_and(|stream| stream.jobs.front() == Some(&id))
    }

    /// Whether the first job of the same stream is on the device.
    pub(super) fn front_is_open(&self, job: &Job) -> bool {
        let front = self.streams.get(&job.spec.stream).and_then(|stream| stream.jobs.front());
        front.and_then(|id| self.jobs.get(id)).is_some_and(|front| matches!(front.state, State::Open(_)))
    }

    /// Samples that the jobs before `id` on its stream hold as tokens.
    pub(super) fn undelivered_before(&self, id: JobId) -> u64 {
        let stream = self.jobs.get(&id).and_then(|job| self.streams.get(&job.spec.stream));
        let before = stream.into_iter().flat_map(|stream| &stream.jobs).take_while(|other| **other != id);
        before.filter_map(|id| self.jobs.get(id)).map(|other| other.decoded.saturating_sub(other.samples)).sum()
    }

    /// How many slots hold memory: more becomes free only when one of them gives it back.
    pub(super) fn holders(&self) -> usize {
        self.slots.kept().0 + self.open_jobs().filter(|(_, job)| !job.is_parked()).count()
    }

    /// Bytes held by the states that are on the device.
    pub(super) fn reserved(&self) -> u64 {
        self.slots.kept().1 + self.open_jobs().map(|(_, job)| job.resident()).sum::<u64>()
    }

    /// Bytes promised to the states that are on the device.
    pub(super) fn claimed(&self) -> u64 {
        self.slots.kept().1 + self.open_jobs().map(|(_, job)| job.claimed()).sum::<u64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sched::step::{Stage, Stages};
    use crate::turn::TurnToken;

    fn spec(stream: u64) -> JobSpec {
        let (stream, class) = (StreamId(stream), Class::Live);
        JobSpec { stream, class, token: TurnToken::forever(), tenant: "".into(), chars: 1 }
    }

    fn add(table: &mut Table, now: Instant, stream: u64) -> JobId {
        table.add(now, spec(stream), 0, now, Permit::unlimited)
    }

    fn waiting(table: &Table) -> Vec<JobId> {
        table.live_waiting().map(|(id, _)| id).collect()
    }

    #[test]
    fn the_second_job_of_a_stream_may_open_once_the_first_is_decoded() {
        let now = crate::clock::now();
        let mut table = Table::new(2, true);
        let first = add(&mut table, now, 1);
        let second = add(&mut table, now, 1);
        assert_eq!(table.live_streams(), 1, "a stream counts once");
        assert_eq!(waiting(&table), [first]);
        table.open(first, Slot(0));
        let job = table.job_mut(first).expect("there");
        (job.state, job.ready) = (State::Open(Slot(0)), Stages::NONE.with(Stage::Decode));
        table.advance(StreamId(1));
        assert_eq!(waiting(&table), []);
        table.job_mut(first).expect("there").ready = Stages::NONE.with(Stage::Flow);
        table.advance(StreamId(1));
        assert_eq!(waiting(&table), [second]);
    }

    #[test]
    fn a_slot_whose_job_ended_under_a_step_is_neither_free_nor_work() {
        let now = crate::clock::now();
        let mut table = Table::new(1, false);
        let job = add(&mut table, now, 1);
        table.job_mut(job).expect("there").memory.initial = 7;
        table.open(job, Slot(0));
        let removed = table.remove(job, true).expect("there");
        assert_eq!(removed.stream_done, Some(now));
        assert_eq!((table.slots.first_free(), table.open_jobs().count()), (None, 0));
        assert_eq!((table.reserved(), table.holders(), table.slots.job_in(Slot(0))), (7, 1, Some(job)));
        table.slots.release(Slot(0));
        assert_eq!((table.reserved(), table.slots.first_free()), (0, Some(Slot(0))));
    }

    #[test]
    fn a_job_that_restarts_keeps_its_place_in_its_stream() {
        let now = crate::clock::now();
        let mut table = Table::new(1, false);
        let first = add(&mut table, now, 1);
        let second = add(&mut table, now, 1);
        table.open(first, Slot(0));
        table.restart(first);
        assert_eq!(waiting(&table), [first]);
        assert!(table.is_front(first) && !table.is_front(second) && table.slots.is_idle());
    }
}
