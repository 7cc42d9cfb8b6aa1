//! Virtual time: arrivals, listeners, and a device with recorded costs, driven by the loop of the device thread.

mod report;
mod written;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use antiphon::audio::duration_of;
use antiphon::sched::{JobEnd, JobId, JobSpec, Load, Outcome, Refused, Step, StreamNote};
use antiphon::synth::device::cycle::{Cycle, Launched, Task};
use antiphon::turn::{Class, Epoch, StreamId};

pub(super) use self::report::{Report, quantile};
use super::engine::{Engine, TOKEN};
use super::policy::Policy;

/// From audio made to its first packet on the wire, and to the note that says so.
const SEND: Duration = Duration::from_millis(2);
/// What opening a slot costs the device thread.
const OPEN: Duration = Duration::from_micros(50);

/// Any instant serves as zero; one for all worlds.
pub(super) fn zero() -> Instant {
    static ZERO: OnceLock<Instant> = OnceLock::new();
    *ZERO.get_or_init(antiphon::clock::now)
}

#[derive(Clone, Debug)]
pub(super) enum Event {
    /// Utterances of these token counts on one stream, at once.
    Turn {
        stream: u64,
        class: Class,
        tenant: &'static str,
        tokens: Vec<u32>,
    },
    /// A turn whose text is written as it is spoken: its first sentence goes to the voice in `pieces` of so many tokens and
    /// characters, each `gap` after the one before. Refused, it is tried again as a call does.
    Written {
        stream: u64,
        pieces: Vec<(u32, u32)>,
        gap: Duration,
        /// The turn is new: not one that was refused.
        new: bool,
    },
    /// There is another piece of the text of `stream`, or (`last`) its end.
    Piece {
        stream: u64,
        tokens: u32,
        chars: u32,
        last: bool,
    },
    /// Barge-in or hang-up by epoch only.
    Interrupt {
        stream: u64,
    },
    Note {
        stream: u64,
        note: StreamNote,
    },
}

/// A turn's listener.
struct Listener {
    epoch: Epoch,
    /// Of the turn that speaks now: accepted at, and whether it has sounded.
    accepted: Instant,
    sounded: bool,
    class: Class,
    dry: Option<Instant>,
    held: Option<Instant>,
    /// Unfinished utterances of the turn.
    left: u32,
}

struct Utterance {
    stream: u64,
    tenant: &'static str,
    tokens: u32,
    /// Tokens that what is written of it becomes.
    written: u32,
    writing: bool,
    /// What the engine says that it will need is about so many tokens.
    sized: u32,
    /// Audio tokens of this opening, and those given to the listener.
    position: u32,
    given: u32,
    epoch: antiphon::turn::TurnToken,
    class: Class,
    submitted: Instant,
    /// Steps without any live work since this live job could have run.
    behind_batch: u32,
    /// When the last step of each stage before the first audio ended.
    reached: [Option<Instant>; 4],
}

pub(super) struct World {
    pub(super) now: Instant,
    pub(super) engine: Engine,
    policy: Box<dyn Policy>,
    events: BinaryHeap<Reverse<(Instant, u64)>>,
    bodies: HashMap<u64, Event>,
    next: u64,
    listeners: BTreeMap<u64, Listener>,
    jobs: BTreeMap<JobId, Utterance>,
    slots: HashMap<antiphon::sched::Slot, JobId>,
    pub(super) report: Report,
    /// Counted only from here on, so that what is learned at the start does not blur a measurement.
    pub(super) measure_from: Instant,
    /// Batch utterances are topped up to this many.
    pub(super) backlog: usize,
    pub(super) backlog_tokens: u32,
    /// Whose they are; as many of each.
    pub(super) backlog_tenants: Vec<&'static str>,
    backlog_jobs: BTreeMap<&'static str, usize>,
    last_batch: Option<Instant>,
    cycle: Cycle,
    flight: Option<Flight>,
    pub(super) trace: bool,
    /// Live turns that are over, and when each has been heard out or was refused.
    pub(super) over: Vec<(u64, Instant)>,
    /// When live turns sounded first, and when the last of their work ended.
    pub(super) sounded: Vec<(u64, Instant)>,
    pub(super) ended: Vec<(u64, Instant)>,
}

/// The launched step, as the device knows it.
struct Flight {
    step: Step,
    outcomes: Vec<Outcome>,
    left: Duration,
}

impl World {
    pub(super) fn new(engine: Engine, policy: Box<dyn Policy>) -> Self {
        Self {
            now: zero(),
            engine,
            policy,
            events: BinaryHeap::new(),
            bodies: HashMap::new(),
            next: 0,
            listeners: BTreeMap::new(),
            jobs: BTreeMap::new(),
            slots: HashMap::new(),
            report: Report::default(),
            measure_from: zero(),
            backlog: 0,
            backlog_tokens: 125,
            backlog_tenants: vec!["book"],
            backlog_jobs: BTreeMap::new(),
            last_batch: None,
            cycle: Cycle::default(),
            flight: None,
            trace: false,
            over: Vec::new(),
            sounded: Vec::new(),
            ended: Vec::new(),
        }
    }

    pub(super) fn at(&mut self, at: Duration, event: Event) {
        self.events.push(Reverse((zero() + at, self.next)));
        self.bodies.insert(self.next, event);
        self.next += 1;
    }

    /// Runs until `end`, or until nothing is left to do.
    pub(super) fn run(&mut self, end: Duration) {
        let end = zero() + end;
        while self.now < end {
            self.handle_events(self.now);
            self.top_up();
            let ended = self.flight.as_ref().is_some_and(|flight| flight.left.is_zero());
            match self.cycle.next(self.now, ended, |now| self.policy.plan(now)) {
                Task::Complete(launched) => self.complete(&launched),
                Task::Size(jobs) => self.size(&jobs),
                Task::Feed(jobs) => self.feed(&jobs),
                Task::Open { slot, job } => {
                    let Utterance { tokens, written, writing, .. } = self.jobs[&job];
                    self.slots.insert(slot, job);
                    self.jobs.get_mut(&job).expect("known").position = 0;
                    let ready = self.engine.open(slot, tokens, written);
                    self.pass(OPEN);
                    self.policy.opened(job, Ok(ready));
                    self.policy.fed(self.now, job, ready, !writing);
                }
                Task::Displace { slot, job } => {
                    assert_eq!(self.slots.remove(&slot), Some(job));
                    let live = self.jobs[&job].class == Class::Live;
                    assert!(!live || self.engine.costs.grows, "live work gives way only where memory ran out");
                    self.engine.close(slot);
                    self.report.displaced += 1;
                    self.report.restarted += u32::from(live);
                }
                Task::Park { slot, job } => {
                    assert_eq!(self.slots.get(&slot), Some(&job));
                    self.engine.park(slot);
                    self.report.parked += 1;
                }
                Task::End { job, slot, how, .. } => self.end(job, slot, how),
                Task::Run(step) => self.step(&step),
                Task::Launch(step) => self.launch(step),
                Task::Watch => self.fly(),
                Task::Sleep { until } => {
                    let event = self.events.peek().map(|Reverse((at, _))| *at);
                    let Some(next) = until.into_iter().chain(event).min() else { break };
                    self.now = next.max(self.now + Duration::from_nanos(1)).min(end);
                }
            }
        }
        let since_batch = self.last_batch.map_or(Duration::ZERO, |last| self.now - last);
        self.report.longest_without_batch = self.report.longest_without_batch.max(since_batch);
        self.now = self.now.max(end);
    }

    /// What the scheduler says of itself.
    pub(super) fn load(&self, now: Instant) -> Load {
        self.policy.load(now)
    }

    /// Whether one more live turn would be taken on.
    pub(super) fn has_room(&self, now: Instant) -> bool {
        self.policy.has_room(now)
    }

    /// Nothing may be left: no job, no slot, no byte.
    pub(super) fn assert_empty(&self) {
        let load = self.load(self.now);
        let left = (load.live, load.batch, load.live_open, load.batch_open, load.memory);
        assert_eq!(left, (0, 0, 0, 0, 0), "the scheduler remembers work");
        assert!(self.jobs.is_empty(), "jobs lost: {:?}", self.jobs.keys());
        assert_eq!(self.engine.memory(), 0);
        assert!(self.slots.is_empty());
        assert_eq!(self.report.done + self.report.cancelled + self.report.unplaced, self.report.submitted);
    }

    fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        self.handle_events(until);
        self.now = until;
    }

    fn handle_events(&mut self, until: Instant) {
        while let Some(Reverse((at, id))) = self.events.peek().copied() {
            if at > until {
                return;
            }
            self.events.pop();
            let event = self.bodies.remove(&id).expect("scheduled");
            self.handle(at, event);
        }
    }

    fn handle(&mut self, at: Instant, event: Event) {
        if self.trace {
            println!("{:?} {event:?}", at - zero());
        }
        match event {
            Event::Turn { stream, class, tenant, tokens } => self.turn(at, stream, class, tenant, &tokens),
            Event::Written { stream, pieces, gap, new } => self.begin_writing(at, stream, pieces, gap, new),
            Event::Piece { stream, tokens, chars, last } => self.go_on(stream, (tokens, chars), last),
            Event::Interrupt { stream } => {
                if let Some(listener) = self.listeners.get_mut(&stream) {
                    listener.epoch.raise();
                    listener.dry = None;
                    listener.left = 0;
                }
            }
            Event::Note { stream, note } => {
                // A stream that has not spoken yet has no listener who could hold; only what it is may be said before.
                if !self.listeners.contains_key(&stream) && note != StreamNote::Unpaced {
                    return;
                }
                if let Some(listener) = self.listeners.get_mut(&stream) {
                    match note {
                        StreamNote::Held => drop(listener.held.get_or_insert(at)),
                        StreamNote::Resumed => {
                            if let (Some(since), Some(dry)) = (listener.held.take(), &mut listener.dry) {
                                *dry += at - since;
                            }
                        }
                        StreamNote::Closed | StreamNote::Interrupted => listener.dry = None,
                        StreamNote::Anchored { .. } | StreamNote::Skipped { .. } | StreamNote::Unpaced => {}
                    }
                }
                self.policy.note(at, StreamId(stream), note);
            }
        }
    }

    fn turn(&mut self, at: Instant, stream: u64, class: Class, tenant: &'static str, tokens: &[u32]) {
        let listener = self.listeners.entry(stream).or_insert_with(|| Listener {
            epoch: Epoch::default(),
            accepted: at,
            sounded: false,
            class,
            dry: None,
            held: None,
            left: 0,
        });
        if listener.left == 0 {
            listener.accepted = at;
            listener.sounded = false;
        }
        self.report.turns += u32::from(class == Class::Live);
        for &tokens in tokens {
            let token = listener.epoch.token();
            // 15 characters a second, 25 tokens a second.
            let chars = tokens * 15 / 25 + 1;
            let spec = JobSpec { stream: StreamId(stream), class, token: token.clone(), tenant: tenant.into(), chars };
            match self.policy.submit(at, spec) {
                Ok(job) => {
                    self.cycle.accepted(job);
                    self.report.submitted += 1;
                    listener.left += 1;
                    let utterance = Utterance {
                        stream,
                        tenant,
                        tokens,
                        written: tokens,
                        writing: false,
                        sized: tokens,
                        position: 0,
                        given: 0,
                        epoch: token,
                        class,
                        submitted: at,
                        behind_batch: 0,
                        reached: [None; 4],
                    };
                    self.jobs.insert(job, utterance);
                }
                Err(Refused { retry_after, reason }) => {
                    assert!(retry_after >= Duration::from_secs(1));
                    self.report.refused += 1;
                    *self.report.refused_by.entry((tenant, reason.label())).or_default() += 1;
                    if class == Class::Live {
                        self.over.push((stream, at + retry_after));
                    }
                    return;
                }
            }
        }
    }

    fn top_up(&mut self) {
        for tenant in self.backlog_tenants.clone() {
            while self.backlog_jobs.get(tenant).is_none_or(|jobs| *jobs < self.backlog) && self.backlog > 0 {
                // A lane a sentence: the order of a book is restored where it is stored.
                self.next += 1;
                let stream = 1 << 40 | self.next;
                self.turn(self.now, stream, Class::Batch, tenant, &[self.backlog_tokens]);
                *self.backlog_jobs.entry(tenant).or_default() += 1;
            }
        }
    }

    /// Says what memory new utterances will need.
    fn size(&mut self, jobs: &[JobId]) {
        for job in jobs {
            self.policy.sized(*job, self.engine.costs.need(self.jobs[job].sized));
        }
    }

    fn step(&mut self, step: &Step) {
        let step = &self.engine.useful(step);
        let (mut took, outcomes) = self.start(step);
        if let (Some(flight), Some((longer, share))) = (&mut self.flight, self.engine.costs.concurrent) {
            let apart = flight.step.slots.iter().all(|slot| !step.slots.contains(slot));
            assert!(flight.step.stage != step.stage && apart, "{step:?} beside {:?}", flight.step);
            took = took.mul_f64(longer);
            flight.left = flight.left.saturating_sub(took.mul_f64(share));
        }
        let start = self.now;
        self.pass(took);
        let ran = self.cycle.ran(start, self.now);
        self.measure(step, ran.took);
        self.hear(step, &outcomes);
        self.policy.record(ran.end, ran.took, step, &outcomes);
        self.between();
    }

    fn launch(&mut self, step: Step) {
        assert!(self.flight.is_none(), "one at a time");
        let step = self.engine.useful(&step);
        let (left, outcomes) = self.start(&step);
        self.flight = Some(Flight { step: step.clone(), outcomes, left });
        self.cycle.launched(Launched::new(step, self.now));
    }

    /// Lets the time pass that the host takes between two steps; what is in flight goes on.
    fn between(&mut self) {
        let host = self.engine.host();
        if let Some(flight) = &mut self.flight {
            flight.left = flight.left.saturating_sub(host);
        }
        self.pass(host);
    }

    /// Lets the launched step go on until it has ended or something happens.
    fn fly(&mut self) {
        let event = self.events.peek().map(|Reverse((at, _))| *at);
        let Some(flight) = &mut self.flight else { return };
        let end = self.now + flight.left;
        let next = event.map_or(end, |event| event.clamp(self.now, end));
        flight.left = end - next;
        self.now = next;
    }

    /// Takes what the launched step did.
    fn complete(&mut self, launched: &Launched) {
        let Some(Flight { mut outcomes, .. }) = self.flight.take() else { panic!("{launched:?} is not in flight") };
        // Of a text that is still being written there may be more than when the step began.
        for outcome in outcomes.iter_mut() {
            outcome.ready = self.engine.ready(outcome.slot);
        }
        let ran = launched.ended(self.now);
        self.measure(&launched.step, ran.took);
        self.hear(&launched.step, &outcomes);
        self.policy.complete(ran.end, ran.took, &launched.step, &outcomes);
        self.between();
    }

    fn hear(&mut self, step: &Step, outcomes: &[Outcome]) {
        for outcome in outcomes {
            let job = self.slots[&outcome.slot];
            let utterance = self.jobs.get_mut(&job).expect("known");
            if utterance.given == 0 {
                utterance.reached[step.stage as usize] = Some(self.now);
            }
            self.audio(self.now, job, outcome.samples);
        }
    }

    /// How long a step takes alone and what it does.
    fn start(&mut self, step: &Step) -> (Duration, Vec<Outcome>) {
        let jobs: Vec<JobId> = step.slots.iter().map(|slot| self.slots[slot]).collect();
        for job in &jobs {
            assert!(!self.jobs[job].epoch.is_stale(), "work for nobody: {job:?}");
        }
        let live = jobs.iter().any(|job| self.jobs[job].class == Class::Live);
        self.count_waiting(live);
        if jobs.iter().any(|job| self.jobs[job].class == Class::Batch) {
            let since = self.last_batch.replace(self.now).unwrap_or(self.now);
            self.report.longest_without_batch = self.report.longest_without_batch.max(self.now - since);
        }
        let (took, outcomes) = self.engine.run(step);
        if self.trace {
            println!("{:?} {step:?} {jobs:?} took {took:?}", self.now - zero());
        }
        self.report.steps += 1;
        (took, outcomes)
    }

    /// Who had the device, and how much of it live work would have needed by itself.
    fn measure(&mut self, step: &Step, took: Duration) {
        if self.now < self.measure_from {
            return;
        }
        let jobs: Vec<JobId> = step.slots.iter().map(|slot| self.slots[slot]).collect();
        let seconds = took.as_secs_f64();
        let (total, slots) = &mut self.report.widths[step.stage as usize];
        *total += seconds;
        *slots += seconds * step.slots.len() as f64;
        self.report.busy += seconds;
        for job in &jobs {
            *self.report.device_by.entry(self.jobs[job].tenant).or_default() += seconds / jobs.len() as f64;
        }
        let live = jobs.iter().filter(|job| self.jobs[job].class == Class::Live).count();
        let whose = match live {
            0 => "batch",
            live if live == jobs.len() => "live",
            _ => "both",
        };
        let kind = self.report.kinds.entry((step.stage.label(), whose)).or_default();
        *kind = (kind.0 + 1, kind.1 + seconds, kind.2 + jobs.len());
        if live > 0 {
            let costs = &self.engine.costs;
            let share =
                costs.step(step.stage, live, 1).as_secs_f64() / costs.step(step.stage, jobs.len(), 1).as_secs_f64();
            self.report.live_busy += seconds * share;
            // Nothing runs while the host plans what follows, unless a step is in flight.
            if self.flight.is_none() {
                self.report.live_busy += self.engine.host().as_secs_f64();
            }
        }
    }

    /// Counts, for every live job whose listener hears nothing, the steps without live work.
    fn count_waiting(&mut self, live: bool) {
        let mut seen = std::collections::HashSet::new();
        for utterance in self.jobs.values_mut().filter(|utterance| utterance.class == Class::Live) {
            let front = seen.insert(utterance.stream);
            let listener = self.listeners.get(&utterance.stream);
            let waits = listener.is_some_and(|l| l.dry.is_none_or(|dry| dry <= self.now) && l.held.is_none());
            if !front || !waits || utterance.submitted > self.now {
                utterance.behind_batch = 0;
                continue;
            }
            utterance.behind_batch = if live { 0 } else { utterance.behind_batch + 1 };
            self.report.most_behind_batch = self.report.most_behind_batch.max(utterance.behind_batch);
        }
    }

    fn audio(&mut self, now: Instant, job: JobId, samples: u64) {
        let utterance = self.jobs.get_mut(&job).expect("known");
        let start = utterance.position;
        utterance.position += (samples / TOKEN) as u32;
        let fresh = utterance.position.saturating_sub(utterance.given.max(start));
        utterance.given = utterance.given.max(utterance.position);
        if fresh == 0 {
            return;
        }
        let first = self.jobs.iter().find(|(_, u)| u.stream == self.jobs[&job].stream).map(|(id, _)| *id);
        assert_eq!(first, Some(job), "audio of a stream out of order");
        let utterance = &self.jobs[&job];
        if utterance.epoch.is_stale() {
            return;
        }
        let samples = u64::from(fresh) * TOKEN;
        let measured = now >= self.measure_from;
        match utterance.class {
            Class::Live if measured => self.report.live_samples += samples,
            Class::Batch if measured => self.report.batch_samples += samples,
            _ => {}
        }
        let (stream, tenant) = (utterance.stream, utterance.tenant);
        let listener = self.listeners.get_mut(&stream).expect("known");
        if listener.class == Class::Batch {
            return;
        }
        let heard = now + SEND;
        // On hold the listener's clock stands.
        let clock = listener.held.unwrap_or(heard);
        match listener.dry {
            Some(dry) if dry >= clock => listener.dry = Some(dry + duration_of(samples)),
            dry => {
                if listener.sounded && listener.accepted >= self.measure_from {
                    self.report.underruns.push(clock - dry.unwrap_or(clock));
                    self.report.gapped.insert(stream);
                }
                listener.dry = Some(clock + duration_of(samples));
                // On hold nothing leaves, so nobody tells of it.
                if listener.held.is_none() {
                    self.events.push(Reverse((heard, self.next)));
                    let note = StreamNote::Anchored { at: heard };
                    self.bodies.insert(self.next, Event::Note { stream, note });
                    self.next += 1;
                }
            }
        }
        if !listener.sounded {
            listener.sounded = true;
            self.sounded.push((stream, heard));
            if listener.accepted >= self.measure_from {
                let mut from = listener.accepted;
                for (sum, reached) in self.report.until_first.iter_mut().zip(utterance.reached) {
                    let reached = reached.unwrap_or(from);
                    *sum += reached.saturating_duration_since(from).as_secs_f64();
                    from = reached;
                }
                self.report.first_audio.push(heard - listener.accepted);
                self.report.first_by.entry(tenant).or_default().push(heard - listener.accepted);
            }
        }
    }

    fn end(&mut self, job: JobId, slot: Option<antiphon::sched::Slot>, how: JobEnd) {
        if let Some(slot) = slot {
            assert_eq!(self.slots.remove(&slot), Some(job));
            self.engine.close(slot);
        }
        let utterance = self.jobs.remove(&job).expect("ended twice");
        match how {
            JobEnd::Done => {
                assert_eq!(utterance.given, utterance.tokens, "audio lost or doubled");
                self.report.done += 1;
            }
            JobEnd::Cancelled => self.report.cancelled += 1,
            // Another voice speaks in its place.
            JobEnd::Failed(reason) if reason.contains("had no room") => self.report.unplaced += 1,
            JobEnd::Failed(reason) => panic!("{job:?} failed: {reason}"),
        }
        if utterance.class == Class::Batch && utterance.stream >= 1 << 40 {
            *self.backlog_jobs.entry(utterance.tenant).or_default() -= 1;
            self.listeners.remove(&utterance.stream);
        } else if let Some(listener) = self.listeners.get_mut(&utterance.stream) {
            listener.left = listener.left.saturating_sub(1);
            if listener.left == 0 && utterance.class == Class::Live {
                self.ended.push((utterance.stream, self.now));
                self.over.push((utterance.stream, listener.dry.unwrap_or(self.now).max(self.now)));
            }
        }
    }
}
