//! The policies that are compared: ours, and two that everybody knows.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use antiphon::sched::{
    Config, EngineLimits, JobEnd, JobId, JobSpec, Load, Need, OpenError, Outcome, Plan, Refused, Scheduler, Slot,
    Stage, Stages, Step, StreamNote,
};
use antiphon::turn::StreamId;

use super::engine::Costs;

/// What the world asks of a scheduler.
pub(super) trait Policy {
    fn submit(&mut self, now: Instant, spec: JobSpec) -> Result<JobId, Refused>;
    fn sized(&mut self, job: JobId, need: Need);
    fn note(&mut self, now: Instant, stream: StreamId, note: StreamNote);
    /// The text of `job` is still being written, so many characters of it more, and the engine has all of it so far.
    fn begin_writing(&mut self, _job: JobId) {}
    fn written(&mut self, _job: JobId, _chars: u32) {}
    fn fed(&mut self, _now: Instant, _job: JobId, _ready: Stages, _last: bool) {}
    fn plan(&mut self, now: Instant) -> Plan;
    fn opened(&mut self, job: JobId, result: Result<Stages, OpenError>);
    fn record(&mut self, now: Instant, took: Duration, step: &Step, outcomes: &[Outcome]);
    fn complete(&mut self, now: Instant, took: Duration, step: &Step, outcomes: &[Outcome]);
    /// What it says of itself.
    fn load(&self, now: Instant) -> Load;
    /// Whether it would take one more live turn on.
    fn has_room(&self, _now: Instant) -> bool {
        true
    }
}

impl Policy for Scheduler {
    fn submit(&mut self, now: Instant, spec: JobSpec) -> Result<JobId, Refused> {
        self.submit(now, spec)
    }

    fn sized(&mut self, job: JobId, need: Need) {
        self.sized(job, need);
    }

    fn note(&mut self, now: Instant, stream: StreamId, note: StreamNote) {
        self.note(now, stream, note);
    }

    fn begin_writing(&mut self, job: JobId) {
        self.begin_writing(job);
    }

    fn written(&mut self, job: JobId, chars: u32) {
        self.written(job, chars);
    }

    fn fed(&mut self, now: Instant, job: JobId, ready: Stages, last: bool) {
        self.fed(now, job, ready, last);
    }

    fn plan(&mut self, now: Instant) -> Plan {
        self.plan(now)
    }

    fn opened(&mut self, job: JobId, result: Result<Stages, OpenError>) {
        self.opened(job, result);
    }

    fn record(&mut self, now: Instant, took: Duration, step: &Step, outcomes: &[Outcome]) {
        self.record(now, took, step, outcomes);
    }

    fn complete(&mut self, now: Instant, took: Duration, step: &Step, outcomes: &[Outcome]) {
        self.complete(now, took, step, outcomes);
    }

    fn load(&self, now: Instant) -> Load {
        self.load(now)
    }

    fn has_room(&self, now: Instant) -> bool {
        self.has_room(now).is_ok()
    }
}

#[derive(Clone, Debug)]
pub(super) enum Kind {
    Ours(Config),
    Fifo,
    ShortestFirst,
}

impl Kind {
    /// Ours as it is by default.
    pub(super) fn ours() -> Self {
        Kind::Ours(Config::default())
    }

    pub(super) fn build(&self, costs: &Costs) -> Box<dyn Policy> {
        // Those two take memory to be enough.
        let limits = costs.limits();
        match self {
            Kind::Ours(config) => Box::new(costs.scheduler(config.clone())),
            Kind::Fifo => Box::new(Simple::new(limits, |_, order| order)),
            Kind::ShortestFirst => Box::new(Simple::new(limits, |spec, _| u64::from(spec.chars))),
        }
    }
}

/// Continuous batching as engines without classes do it: slots are given out in one fixed order, and the stages
/// take turns, each with all that is ready for it. As efficient as the engine allows; no deadlines, no admission;
/// memory is taken to be enough.
struct Simple {
    limits: EngineLimits,
    order: fn(&JobSpec, u64) -> u64,
    next: u64,
    /// In order.
    waiting: BTreeMap<(u64, JobId), JobSpec>,
    open: BTreeMap<(u64, JobId), (Slot, Stages, JobSpec)>,
    turn: usize,
    opening: Option<((u64, JobId), Slot, JobSpec)>,
    ended: Vec<(JobId, Option<Slot>, JobEnd)>,
}

impl Simple {
    fn new(limits: EngineLimits, order: fn(&JobSpec, u64) -> u64) -> Self {
        let (waiting, open) = (BTreeMap::new(), BTreeMap::new());
        Self { limits, order, next: 0, waiting, open, turn: 0, opening: None, ended: Vec::new() }
    }

    fn free(&self) -> Option<Slot> {
        let taken = |slot: Slot| self.open.values().any(|(s, ..)| *s == slot);
        (0..self.limits.slots).map(Slot).find(|slot| !taken(*slot))
    }
}

impl Policy for Simple {
    fn submit(&mut self, _: Instant, spec: JobSpec) -> Result<JobId, Refused> {
        let id = JobId(self.next);
        self.next += 1;
        self.waiting.insert(((self.order)(&spec, id.0), id), spec);
        Ok(id)
    }

    fn sized(&mut self, _: JobId, _: Need) {}

    fn note(&mut self, _: Instant, _: StreamId, _: StreamNote) {}

    fn plan(&mut self, _: Instant) -> Plan {
        if let Some((job, slot, how)) = self.ended.pop() {
            return Plan::End { job, slot, how, holding: None };
        }
        if let Some(slot) = self.free() {
            // Streams are heard in order: the first of each stream that is not open yet may open.
            let busy = |stream: StreamId| self.open.values().any(|(_, _, spec)| spec.stream == stream);
            let first =
                |id: JobId, stream: StreamId| self.waiting.iter().all(|((_, o), s)| s.stream != stream || *o >= id);
            let next = self.waiting.iter().find(|((_, id), spec)| !busy(spec.stream) && first(*id, spec.stream));
            if let Some((key, spec)) = next.map(|(key, spec)| (*key, spec.clone())) {
                self.waiting.remove(&key);
                self.opening = Some((key, slot, spec));
                return Plan::Open { slot, job: key.1 };
            }
        }
        let any = |stage: Stage| self.open.values().any(|(_, ready, _)| ready.has(stage));
        let Some(stage) = (1..=4).map(|n| Stage::ALL[(self.turn + n) % 4]).find(|stage| any(*stage)) else {
            return Plan::Idle { until: None };
        };
        self.turn = stage as usize;
        let most = self.limits.width[stage] as usize;
        let slots =
            self.open.values().filter(|(_, ready, _)| ready.has(stage)).map(|(slot, ..)| *slot).take(most).collect();
        Plan::Run(Step { stage, slots, rounds: self.limits.rounds[stage] })
    }

    fn opened(&mut self, _: JobId, result: Result<Stages, OpenError>) {
        if let (Some((key, slot, spec)), Ok(ready)) = (self.opening.take(), result) {
            self.open.insert(key, (slot, ready, spec));
        }
    }

    fn record(&mut self, _: Instant, _: Duration, _: &Step, outcomes: &[Outcome]) {
        for outcome in outcomes {
            let Some((key, state)) = self.open.iter_mut().find(|(_, state)| state.0 == outcome.slot) else { continue };
            state.1 = outcome.ready;
            let key = *key;
            if outcome.done {
                self.open.remove(&key);
                self.ended.push((key.1, Some(outcome.slot), JobEnd::Done));
            }
        }
    }

    fn complete(&mut self, _: Instant, _: Duration, _: &Step, _: &[Outcome]) {
        unreachable!("it waits for every step");
    }

    fn load(&self, _: Instant) -> Load {
        let (live, live_open) = ((self.waiting.len() + self.open.len()) as u32, self.open.len() as u32);
        Load { live, live_open, ..Load::default() }
    }
}
