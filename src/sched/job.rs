//! One utterance as the scheduler sees it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::memory::Holding;
use super::step::{PerStage, Slot, Stage, Stages};
use crate::turn::{Class, StreamId, TurnToken};

/// One job, unique within its scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId(pub u64);

/// What the scheduler knows of an utterance.
#[derive(Clone, Debug)]
pub struct JobSpec {
    /// Heard on, in order of submission.
    pub stream: StreamId,
    /// Live or batch.
    pub class: Class,
    /// Whether its result is still wanted.
    pub token: TurnToken,
    /// Whose share of the device it uses; empty when there is no token.
    pub tenant: Arc<str>,
    /// Length of the text, for predictions.
    pub chars: u32,
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobEnd {
    /// All of it was produced.
    Done,
    /// Its result is no longer wanted.
    Cancelled,
    /// It cannot be produced; the reason is for people.
    Failed(String),
}

/// Where a job stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Other jobs of its stream come first.
    Queued,
    /// May open; is in a waiting list.
    Waiting,
    /// `Plan::Open` was given out, `opened` has not come back.
    Opening(Slot),
    /// Its state is on the device.
    Open(Slot),
    /// Its state was moved off the device; the slot is still its.
    Parked(Slot),
}

#[derive(Debug)]
pub(super) struct Job {
    pub(super) spec: JobSpec,
    /// Index into the tenants.
    pub(super) tenant: usize,
    pub(super) state: State,
    pub(super) ready: Stages,
    pub(super) memory: Holding,
    /// First audio of a silent stream is promised by then.
    pub(super) deadline: Instant,
    /// Produced since it was opened, in samples.
    pub(super) samples: u64,
    /// Produced since it was first opened: what it makes again after a restart was heard already.
    pub(super) given: u64,
    /// What the tokens so far stand for, in samples.
    pub(super) decoded: u64,
    /// Its sink is full: not run until there is room.
    pub(super) blocked: bool,
    /// Its text is still being written.
    pub(super) writing: bool,
    /// It was silent because it waited for text, and has sounded nothing since.
    pub(super) resumes: bool,
    /// Device time of the steps it took part in since it last gave audio.
    pub(super) service: Duration,
    /// Rounds of each stage it took part in since it last gave audio.
    pub(super) rounds: PerStage<u32>,
    /// Euler steps of single chunks since then: [`Outcome::chunk_rounds`](super::Outcome::chunk_rounds).
    pub(super) chunk_rounds: u32,
}

impl Job {
    pub(super) fn new(spec: JobSpec, tenant: usize, deadline: Instant) -> Self {
        Self {
            spec,
            tenant,
            state: State::Queued,
            ready: Stages::NONE,
            memory: Holding::default(),
            deadline,
            samples: 0,
            given: 0,
            decoded: 0,
            blocked: false,
            writing: false,
            resumes: false,
            service: Duration::ZERO,
            rounds: PerStage::default(),
            chunk_rounds: 0,
        }
    }

    pub(super) fn slot(&self) -> Option<Slot> {
        match self.state {
            State::Queued | State::Waiting => None,
            State::Opening(slot) | State::Open(slot) | State::Parked(slot) => Some(slot),
        }
    }

    pub(super) fn is_live(&self) -> bool {
        self.spec.class == Class::Live
    }

    pub(super) fn is_parked(&self) -> bool {
        matches!(self.state, State::Parked(_))
    }

    /// Whether its state is on the device.
    pub(super) fn is_resident(&self) -> bool {
        matches!(self.state, State::Opening(_) | State::Open(_))
    }

    /// Bytes it holds on the device now.
    pub(super) fn resident(&self) -> u64 {
        if self.is_resident() { self.memory.holds } else { 0 }
    }

    /// Bytes that are promised to it while it is on the device.
    pub(super) fn claimed(&self) -> u64 {
        if self.is_resident() { self.memory.claim() } else { 0 }
    }

    /// Bytes that it has to get back before a step can name it.
    pub(super) fn memory_to_resume(&self) -> u64 {
        if self.is_parked() { self.memory.claim() } else { 0 }
    }

    /// Bytes that its flow takes when it runs, those included that it has to get back.
    pub(super) fn growth(&self) -> u64 {
        let Holding { holds, wants, .. } = self.memory;
        if self.is_parked() { wants.max(holds) } else { wants.saturating_sub(holds) }
    }

    /// Bytes that it is expected to take yet, those included that it has to get back.
    pub(super) fn remaining(&self) -> u64 {
        self.memory.in_the_end().saturating_sub(self.resident())
    }

    /// Whether it is open and all its tokens are there.
    pub(super) fn is_decoded(&self) -> bool {
        let decodes = self.ready.has(Stage::Prefill) || self.ready.has(Stage::Decode);
        matches!(self.state, State::Open(_)) && !decodes && !self.writing
    }

    /// Whether it can do nothing until more of its text is written.
    pub(super) fn awaits_text(&self) -> bool {
        self.writing && self.ready.is_empty() && matches!(self.state, State::Open(_) | State::Parked(_))
    }

    /// Forgets what an opening produced: it restarts from its text.
    pub(super) fn restart(&mut self) {
        self.state = State::Waiting;
        self.ready = Stages::NONE;
        self.memory.restart();
        self.samples = 0;
        self.decoded = 0;
        self.service = Duration::ZERO;
        self.rounds = PerStage::default();
        self.chunk_rounds = 0;
    }
}
