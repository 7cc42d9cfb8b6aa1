//! The loop of one device thread: load, then plan, do, record; and again after a failure.

mod feeding;
mod guard;
mod hang;
mod launch;
mod sleep;

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{oneshot, watch};

pub(super) use self::guard::run;
use self::guard::{guarded, share, up};
use self::hang::Calls;
pub(super) use self::hang::watch_over;
use super::cycle::{Cycle, Ran, Task};
use super::delivery::Payload;
use super::feed::Feed;
use super::meter::Meter;
use super::phrases::Recorder;
use super::spent::Spent;
use super::timeline::Timeline;
use super::trace::Trace;
use super::{LOADING, Loader, Phase, Recovery, lock};
use crate::clock;
use crate::fault;
use crate::sched::{Config, JobEnd, JobId, JobSpec, OpenError, Quotas, Refused, RefusedReason, Scheduler, StreamNote};
use crate::synth::{
    Caps, EngineLimits, Identity, Memory, Precedence, Progress, Slot, Step, SynthError, Synthesizer, VoiceInfo,
};
use crate::turn::{SpeechSink, StreamId, Utterance, UtteranceId};

/// How often gauges are brought up to date.
const GAUGES: Duration = Duration::from_millis(250);

/// How long at a time a device that cannot be used does nothing.
const UNUSABLE: Duration = Duration::from_secs(3600);

/// How often full sinks are tried again while nothing else happens.
const RETRY: Duration = Duration::from_millis(5);

/// What the handle and the device thread share.
pub(super) struct Shared {
    state: Mutex<State>,
    wake: Condvar,
    /// Something happened since the last plan. Set while the state is locked, so that the thread does not fall asleep over it; read
    /// without, by a thread that looks out for it and would keep others from the state.
    poked: AtomicBool,
    calls: Calls,
    /// Of all devices.
    quotas: Arc<Quotas>,
}

#[derive(Default)]
pub(super) struct State {
    /// `None` until the voice is loaded, and after it failed.
    pub(super) sched: Option<Scheduler>,
    /// Of the loaded voice.
    pub(super) cycle: Cycle,
    pub(super) caps: Option<Caps>,
    pub(super) voices: Vec<VoiceInfo>,
    /// What decides how it sounds, where it says so.
    pub(super) identity: Option<Arc<Identity>>,
    pub(super) memory: Memory,
    pub(super) parts: Vec<(&'static str, u64)>,
    pub(super) produced: u64,
    /// Of all devices.
    pub(super) meter: Arc<Meter>,
    pub(super) spent: Spent,
    pub(super) timeline: Timeline,
    pub(super) failures: u32,
    /// When a failed device is loaded again.
    pub(super) retry_at: Option<Instant>,
    /// Voices were added or removed; these are told when the thread has looked.
    pub(super) refresh: Vec<oneshot::Sender<()>>,
    pub(super) stop: bool,
    /// Its thread has not come back from the voice for so long that it was given up.
    pub(super) hangs: bool,
    /// The thread sleeps.
    pub(super) asleep: bool,
    /// An utterance is on its way: the thread does not sleep until then.
    roused: Option<Instant>,
    pub(super) payloads: HashMap<JobId, Payload>,
    /// Utterances whose text is still being written.
    pub(super) feeds: HashMap<UtteranceId, JobId>,
    /// Their sinks were full.
    pub(super) blocked: Vec<JobId>,
    /// Ended, with events that their sinks had no room for.
    pub(super) leaving: Vec<Payload>,
}

impl Shared {
    pub(super) fn new(quotas: Arc<Quotas>, meter: Arc<Meter>) -> Self {
        let state = State { meter, ..State::default() };
        let (wake, poked) = (Condvar::new(), AtomicBool::new(false));
        Self { state: Mutex::new(state), wake, poked, calls: Calls::default(), quotas }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Changes the state and has the thread look at it.
    pub(super) fn poke(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state();
        change(&mut state);
        self.changed(state);
    }

    /// Has the thread look at what was changed.
    fn changed(&self, state: MutexGuard<'_, State>) {
        self.poked.store(true, Release);
        drop(state);
        self.wake.notify_one();
    }

    /// Whether something happened since the last plan.
    fn is_poked(&self) -> bool {
        self.poked.load(Acquire)
    }

    pub(super) fn is_ready(&self) -> bool {
        self.state().sched.is_some()
    }

    pub(super) fn knows(&self, stream: StreamId) -> bool {
        self.state().sched.as_ref().is_some_and(|sched| sched.knows(stream))
    }

    pub(super) fn has_room(&self) -> Result<(), Refused> {
        match &self.state().sched {
            Some(sched) => sched.has_room(clock::now()),
            None => Err(Refused { reason: RefusedReason::NotReady, retry_after: LOADING }),
        }
    }

    pub(super) fn has_work(&self, stream: StreamId) -> bool {
        self.state().sched.as_ref().is_some_and(|sched| sched.has_work(stream))
    }

    pub(super) fn note(&self, now: Instant, stream: StreamId, note: StreamNote) {
        self.poke(|state| {
            if let Some(sched) = &mut state.sched {
                sched.note(now, stream, note);
            }
        });
    }

    pub(super) fn submit(
        &self,
        utterance: &Utterance,
        sink: &SpeechSink,
        recorder: Option<Recorder>,
    ) -> Result<(), Refused> {
        let now = clock::now();
        let spec = JobSpec {
            stream: utterance.stream,
            class: utterance.class,
            token: utterance.token.clone(),
            tenant: utterance.tenant.clone(),
            chars: utterance.text.chars().count().try_into().unwrap_or(u32::MAX),
        };
        let mut state = self.state();
        let Some(sched) = &mut state.sched else {
            return Err(Refused { reason: RefusedReason::NotReady, retry_after: LOADING });
        };
        let job = sched.submit(now, spec)?;
        let feed = utterance.streamed.then(|| Feed::new(utterance.said()));
        if feed.is_some() {
            sched.begin_writing(job);
            state.feeds.insert(utterance.id, job);
        }
        let payload = Payload {
            feed,
            recorder,
            utterance: Arc::new(utterance.clone()),
            sink: sink.clone(),
            outbox: VecDeque::new(),
            position: 0,
            given: 0,
            trace: Trace::default(),
            accepted: now,
        };
        state.payloads.insert(job, payload);
        state.cycle.accepted(job);
        self.changed(state);
        Ok(())
    }
}

/// The body of a device thread, until it is stopped or panics.
fn serve(
    shared: &Shared,
    index: usize,
    loader: &Loader,
    config: &Config,
    recovery: Recovery,
    phase: &watch::Sender<Phase>,
) {
    let mut streak = 0;
    let mut worked = false;
    loop {
        let mut began = None;
        let mut loaded = load(shared, loader, config);
        let result = match &mut loaded {
            Ok(synth) => {
                began = Some(clock::now());
                worked = true;
                up(shared, index, true);
                phase.send_replace(Phase::Ready);
                let precedence = synth.precedence();
                let (synth, gauges) = (&mut **synth, clock::now());
                let mut worker = Worker { shared, synth, precedence, gauges, idle: false, preemptions: 0 };
                guarded(|| worker.work())
            }
            // What has worked may work again.
            Err(SynthError::Unusable(reason)) if worked => Err(SynthError::Device(std::mem::take(reason))),
            Err(SynthError::Unusable(reason)) => Err(SynthError::Unusable(std::mem::take(reason))),
            Err(error) => Err(SynthError::Device(match error {
                SynthError::Device(reason) => std::mem::take(reason),
                other => other.to_string(),
            })),
        };
        let now = clock::now();
        if began.is_some_and(|began| now.saturating_duration_since(began) >= recovery.most) {
            streak = 0;
        }
        streak += 1;
        let pause = recovery.pause(streak);
        let again = !matches!(result, Err(SynthError::Unusable(_)));
        match &result {
            Ok(()) => shared.abandon("the speech engine was shut down", 0, None, || phase.send_replace(Phase::Stopped)),
            Err(error) => {
                let again_in = again.then_some(pause);
                tracing::error!(device = index, %error, ?again_in, "speech device failed");
                let label = up(shared, index, false);
                metrics::counter!("antiphon_device_failures_total", "device" => label).increment(1);
                let reason = error.to_string();
                let at = again_in.map(|pause| now + pause);
                shared.abandon(&reason, 1, at, || phase.send_replace(Phase::Failed(reason.clone())));
            }
        }
        // Dropping a model may take a while and may fail as the device does; its streams have been told already.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(loaded)));
        shared.state().hangs = false;
        shared.calls.launches(false);
        if result.is_ok() {
            return;
        }
        let goes_on = if again {
            shared.rest(now + pause)
        } else {
            while shared.rest(clock::now() + UNUSABLE) {}
            false
        };
        if !goes_on {
            phase.send_replace(Phase::Stopped);
            return;
        }
        phase.send_replace(Phase::Loading);
    }
}

impl Shared {
    /// Ends all work with `reason`, and takes none until the voice is loaded again. `tell` makes the phase known:
    /// before any job ends, since a sink that hears of that may look at it.
    fn abandon<T>(&self, reason: &str, failures: u32, retry_at: Option<Instant>, tell: impl FnOnce() -> T) {
        let mut state = self.state();
        state.sched = None;
        state.spent.lapse();
        state.voices.clear();
        state.identity = None;
        state.cycle = Cycle::default();
        state.blocked.clear();
        // Nothing will look now; a voice that is loaded again finds what there is.
        state.refresh.clear();
        state.memory = Memory::default();
        for (part, _) in std::mem::take(&mut state.parts) {
            state.gauge(part, 0);
        }
        state.retry_at = retry_at;
        state.failures += failures;
        tell();
        let jobs: Vec<JobId> = state.payloads.keys().copied().collect();
        for job in jobs {
            state.end(job, JobEnd::Failed(reason.to_string()));
        }
    }

    /// Waits until `until`, handing out what full sinks have room for meanwhile. Whether the device is to go on.
    fn rest(&self, until: Instant) -> bool {
        let mut state = self.state();
        loop {
            state.leaving.retain_mut(|payload| !payload.flush());
            let left = until.saturating_duration_since(clock::now());
            if state.stop || left.is_zero() {
                return !state.stop;
            }
            let wait = if state.leaving.is_empty() { left } else { left.min(RETRY) };
            let waited = self.wake.wait_timeout_while(state, wait, |state| !state.stop);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

fn load(shared: &Shared, loader: &Loader, config: &Config) -> Result<Box<dyn Synthesizer>, SynthError> {
    let mut synth = guarded(loader)?;
    let seeds = guarded(|| synth.warm_up())?;
    let caps = synth.caps().clone();
    let (memory, parts) = (synth.memory(), synth.memory_parts());
    let identity = guarded(|| Ok(synth.identity()))?.map(Arc::new);
    let limits = EngineLimits { slots: caps.limits.slots.max(1), ..caps.limits.clone() };
    tracing::info!(engine = caps.name, device = %caps.device, slots = limits.slots, ?seeds, "voice loaded");
    let mut state = shared.state();
    state.sched = Some(Scheduler::new(config.clone(), limits, memory.total, &seeds).sharing(shared.quotas.clone()));
    state.voices = synth.voices();
    state.identity = identity;
    state.caps = Some(caps);
    state.memory = memory;
    state.parts = parts;
    state.retry_at = None;
    drop(state);
    Ok(synth)
}

struct Worker<'a> {
    shared: &'a Shared,
    synth: &'a mut dyn Synthesizer,
    precedence: Option<Arc<Precedence>>,
    gauges: Instant,
    /// There was nothing to do when this was last looked at.
    idle: bool,
    preemptions: u64,
}

impl Worker<'_> {
    fn work(&mut self) -> Result<(), SynthError> {
        loop {
            let mut state = self.shared.state();
            let mut ended = false;
            if state.cycle.is_in_flight() {
                drop(state);
                ended = self.shared.calls.within(|| self.synth.poll())?;
                state = self.shared.state();
            }
            // What has ended is given out first.
            if state.stop && !ended {
                return Ok(());
            }
            if !state.refresh.is_empty() && !ended {
                let waiting = std::mem::take(&mut state.refresh);
                drop(state);
                self.shared.calls.within(|| {
                    self.synth.refresh_voices();
                    Ok(())
                })?;
                let (voices, memory) = (self.synth.voices(), self.synth.memory());
                let identity = self.shared.calls.within(|| Ok(self.synth.identity()))?.map(Arc::new);
                let mut state = self.shared.state();
                (state.voices, state.identity) = (voices, identity);
                state.remember(memory);
                drop(state);
                for waiting in waiting {
                    // The caller may have gone.
                    let _ = waiting.send(());
                }
                continue;
            }
            self.shared.poked.store(false, Relaxed);
            state.drain();
            let now = clock::now();
            let State { cycle, sched: Some(sched), .. } = &mut *state else {
                drop(state);
                return Err(self.late());
            };
            let task = cycle.next(now, ended, |now| sched.plan(now));
            if let Some(precedence) = &self.precedence {
                precedence.set(sched.is_urgent());
            }
            self.measure(&mut state, now, &task);
            match task {
                Task::Complete(launched) => {
                    drop(state);
                    self.complete(launched)?;
                }
                Task::Size(fresh) => self.prepare(state, &fresh)?,
                Task::Feed(written) => self.feed(state, written)?,
                Task::Open { slot, job } => self.open(state, slot, job)?,
                Task::Displace { slot, job } => {
                    if let Some(payload) = state.payloads.get_mut(&job) {
                        payload.position = 0;
                        payload.trace.restart();
                    }
                    drop(state);
                    self.close(slot)?;
                }
                Task::Park { slot, .. } => {
                    drop(state);
                    self.shared.calls.within(|| {
                        self.synth.park(slot);
                        Ok(())
                    })?;
                }
                Task::End { job, slot, how, holding } => {
                    if let Some(holding) = holding {
                        metrics::histogram!("antiphon_stream_seconds").record(holding.as_secs_f64());
                        // The former name, for one release.
                        metrics::histogram!("antiphon_line_seconds").record(holding.as_secs_f64());
                    }
                    if let Some(slot) = slot {
                        drop(state);
                        self.close(slot)?;
                        state = self.shared.state();
                    }
                    let utterance = state.payloads.get(&job).map(|payload| payload.utterance.id);
                    state.end(job, how);
                    utterance.into_iter().for_each(|id| self.synth.forget(id));
                    state.remember(self.synth.memory());
                }
                Task::Run(step) => {
                    drop(state);
                    self.step(&step)?;
                }
                Task::Launch(step) => {
                    drop(state);
                    self.launch(step)?;
                }
                Task::Watch => {
                    drop(state);
                    self.watch()?;
                }
                Task::Sleep { until } => self.sleep(state, until)?,
            }
        }
    }

    /// Has the voice look at new utterances: what memory they will need, and whether they can be spoken at all.
    fn prepare(&mut self, state: MutexGuard<'_, State>, fresh: &[JobId]) -> Result<(), SynthError> {
        let wanted: Vec<(JobId, Arc<Utterance>)> =
            fresh.iter().filter_map(|job| Some((*job, state.payloads.get(job)?.utterance.clone()))).collect();
        drop(state);
        for (job, utterance) in wanted {
            let result = match self.shared.calls.within(|| Ok(self.synth.prepare(&utterance)))? {
                Err(error @ SynthError::Device(_)) => return Err(error),
                result => result,
            };
            let Some(sched) = &mut self.shared.state().sched else { return Ok(()) };
            match result {
                Ok(need) => sched.sized(job, need),
                Err(error) => sched.end(job, JobEnd::Failed(error.to_string())),
            }
        }
        Ok(())
    }

    fn open(&mut self, state: MutexGuard<'_, State>, slot: Slot, job: JobId) -> Result<(), SynthError> {
        let utterance = state.payloads.get(&job).map(|payload| payload.utterance.clone());
        drop(state);
        if let Some(utterance) = &utterance {
            fault::point("device", &utterance.text);
        }
        let result = match utterance {
            Some(utterance) if utterance.streamed => {
                self.shared.calls.within(|| Ok(self.open_streamed(slot, job, &utterance)))?
            }
            Some(utterance) => {
                self.shared.calls.within(|| Ok(self.synth.open(slot, &utterance).map(|ready| (ready, true))))?
            }
            None => Err(SynthError::Utterance("it was forgotten".into())),
        };
        let result = match result {
            Ok(ready) => Ok(ready),
            Err(error @ SynthError::Device(_)) => return Err(error),
            Err(SynthError::Memory { .. }) => Err(OpenError::Memory),
            Err(error) => Err(OpenError::Failed(error.to_string())),
        };
        if let Some(sched) = &mut self.shared.state().sched {
            let given = result.as_ref().ok().copied();
            sched.opened(job, result.map(|(ready, _)| ready));
            if let Some((ready, last)) = given {
                sched.fed(clock::now(), job, ready, last);
            }
        }
        Ok(())
    }

    fn close(&mut self, slot: Slot) -> Result<(), SynthError> {
        self.shared.calls.within(|| {
            self.synth.close(slot);
            Ok(())
        })
    }

    fn step(&mut self, step: &Step) -> Result<(), SynthError> {
        let start = clock::now();
        let mut progress = Vec::with_capacity(step.slots.len());
        share(self.shared.calls.within(|| self.synth.run(step, &mut progress)), step, &mut progress)?;
        let ran = self.shared.state().cycle.ran(start, clock::now());
        self.hand_out(step, ran, progress);
        Ok(())
    }

    /// Gives out what a step did.
    fn hand_out(&mut self, step: &Step, ran: Ran, mut progress: Vec<Progress>) {
        // What was not run has no cost and made nothing.
        let step = &Step { rounds: self.synth.rounds_run().unwrap_or(step.rounds), ..step.clone() };
        metrics::histogram!("antiphon_step_seconds", "stage" => step.stage.label()).record(ran.took.as_secs_f64());
        let memory = self.synth.memory();
        let mut state = self.shared.state();
        state.remember(memory);
        state.produced += progress.iter().map(|p| p.pcm.len() as u64).sum::<u64>();
        let State { sched: Some(sched), spent, timeline, payloads, .. } = &mut *state else { return };
        let jobs: Vec<Option<JobId>> = progress.iter().map(|p| sched.job_in(p.outcome.slot)).collect();
        let classes = jobs.iter().flatten().filter_map(|job| Some(payloads.get(job)?.utterance.class));
        timeline.ran((ran.start, ran.end), step, classes.clone());
        if ran.launched {
            spent.completed(ran.end, ran.took, step, classes);
        } else {
            spent.ran(ran.start, ran.end, step, classes);
        }
        // Audio first: the scheduler ends what is done, and its end must come after its audio.
        for (job, progress) in jobs.into_iter().zip(&mut progress) {
            let Some(job) = job else { continue };
            if let Some(payload) = state.payloads.get_mut(&job) {
                payload.trace.ran(step.stage, ran.start, ran.end);
            }
            state.deliver(job, std::mem::take(&mut progress.pcm));
        }
        let outcomes = progress.iter().map(|progress| &progress.outcome);
        match &mut state.sched {
            Some(sched) if ran.launched => sched.complete(ran.end, ran.took, step, outcomes),
            Some(sched) => sched.record(ran.end, ran.took, step, outcomes),
            None => {}
        }
    }

    /// Brings gauges up to date before `task`. A caller's work does not wait for them: after a pause, when little of this is in the
    /// processor's caches, it is one turn's first audio that would. So they come while nothing is to be done, and otherwise later.
    fn measure(&mut self, state: &mut State, now: Instant, task: &Task) {
        let idles = matches!(task, Task::Sleep { until: None });
        if self.idle && !idles {
            self.gauges = now + GAUGES;
        }
        let at = match task {
            // Nothing may happen for long: what they say then has to hold.
            _ if idles && !self.idle => now,
            Task::Sleep { .. } | Task::Watch => self.gauges,
            _ => self.gauges + GAUGES,
        };
        self.idle = idles;
        if now < at {
            return;
        }
        self.gauges = now + GAUGES;
        let Some(load) = state.sched.as_ref().map(|sched| sched.load(now)) else { return };
        let device = state.caps.as_ref().map(|caps| caps.device.clone()).unwrap_or_default();
        let depth = |class: &'static str, jobs: u32, open: u32| {
            metrics::gauge!("antiphon_scheduler_queue_depth", "class" => class, "device" => device.clone())
                .set(f64::from(jobs.saturating_sub(open)));
        };
        depth("live", load.live, load.live_open);
        depth("batch", load.batch, load.batch_open);
        state.parts = self.synth.memory_parts();
        for &(part, bytes) in &state.parts {
            state.gauge(part, bytes);
        }
        if let Some(slack) = load.slack {
            metrics::histogram!("antiphon_slack_seconds").record(slack);
            state.timeline.looked(now, slack);
        }
        metrics::counter!("antiphon_preemptions_total").increment(load.preemptions - self.preemptions);
        self.preemptions = load.preemptions;
    }
}

impl State {
    fn gauge(&self, part: &'static str, bytes: u64) {
        let device = self.caps.as_ref().map(|caps| caps.device.clone()).unwrap_or_default();
        metrics::gauge!("voice_gpu_memory_bytes", "device" => device, "part" => part).set(bytes as f64);
    }

    /// Keeps the memory's state; what utterances may hold changes as voices come and go.
    fn remember(&mut self, memory: Memory) {
        if memory.total != self.memory.total
            && let Some(sched) = &mut self.sched
        {
            sched.limit_memory(memory.total);
        }
        self.memory = memory;
    }
}
