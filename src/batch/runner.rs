//! The thread that feeds the engine: keeps its lanes filled, stores what comes back, tidies up.

use std::collections::{BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::audio::{Answer, Stored, Written};
use super::blame::{Blame, LOSSES, Turn};
use super::shared::{Shared, lock};
use super::store::{Finish, PartId, Work};
use super::{BatchError, Config, HOUSEKEEPING, cue};
use crate::audio::to_i16;
use crate::clock::{self, Age};
use crate::fault;
use crate::supervise::RESTART;
use crate::synth::device::{Engine, Phase, StreamNote};
use crate::turn::{Class, SpeechEvent, SpeechSink, StreamId, Utterance, UtteranceEnd, UtteranceId};

/// Events of all lanes on their way here; a full channel only delays batch work.
const EVENTS: usize = 256;
/// After a disk or database error. Tests of what follows do not wait as long as disks do.
const STALL: Duration = if cfg!(test) { Duration::from_millis(50) } else { Duration::from_secs(10) };
/// After an error of a database that may be away: the link rests by itself.
const AWAY: Duration = if cfg!(test) { Duration::from_millis(50) } else { Duration::from_secs(1) };
/// An utterance that fails is tried so often, not counting the times when the device failed under it.
const ATTEMPTS: u32 = 3;
/// What no device fails at, spoken to see whether it fails at everything.
const PROBE: &str = "One, two, three, four, five.";
/// Weight of a new observation of the speed.
const WEIGHT: f64 = 0.2;
/// The speed is observed over at least this long.
const WINDOW: Duration = Duration::from_secs(2);

/// The body of the thread: a runner, and another one after each that panicked. What a panic loses is the utterances
/// that were in the engine, which are made again.
pub(super) fn run_for_ever(config: &Config, engine: &Engine, shared: &Arc<Shared>) {
    while !shared.is_stopped() {
        let runner = Runner::new(config.clone(), engine.clone(), shared.clone());
        if catch_unwind(AssertUnwindSafe(|| runner.run())).is_ok() {
            return;
        }
        let _down = shared.part.fell();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        if let Ok(runtime) = runtime {
            // Jobs wake it as well as the word to stop, and wait: a fault that is over at once is seen by nobody.
            let stopped = async {
                while !shared.is_stopped() {
                    shared.changed.notified().await;
                }
            };
            let _ = runtime.block_on(async { tokio::time::timeout(RESTART, stopped).await });
        }
    }
}

pub(super) struct Runner {
    config: Config,
    engine: Engine,
    shared: Arc<Shared>,
    lanes: HashMap<UtteranceId, Lane>,
    /// How often what failed has been tried.
    attempts: HashMap<PartId, u32>,
    /// Who may have made a device fail.
    blame: Blame,
    probe: Option<Probe>,
    /// Of the probe and of the suspects after it, so that they speak on the device that the probe spoke on.
    trial: Option<StreamId>,
    /// Over, their audio on disk, and not in the database yet because that is full or away: made once is made for good.
    unrecorded: Vec<Over>,
    /// Spoken, and on its way to an object store; by its number.
    storing: HashMap<u64, Over>,
    number: u64,
    /// What becomes of those. Bounded like the events: where it is full the writes wait.
    stored: (Answer, mpsc::Receiver<Stored>),
    /// When the leases were renewed.
    renewed: Option<Instant>,
    /// Nothing is started before then.
    pause: Option<Instant>,
    tidied: Option<Instant>,
    age: Age,
    /// Characters finished since then; `None` while there is nothing to do, which says nothing about the speed.
    observed: Option<(Instant, u64)>,
}

/// An utterance in the engine.
struct Lane {
    work: Work,
    stream: StreamId,
    pcm: Vec<i16>,
    /// [`Runner::failures`] when it was handed out.
    failures: u32,
}

/// An utterance that is over: with so many samples of audio, or with the reason why not.
struct Over {
    id: PartId,
    fence: i64,
    job: String,
    result: Result<u64, String>,
}

/// The harmless sentence in the engine.
struct Probe {
    id: UtteranceId,
    failures: u32,
}

impl Runner {
    pub(super) fn new(config: Config, engine: Engine, shared: Arc<Shared>) -> Self {
        Self {
            config,
            engine,
            shared,
            lanes: HashMap::new(),
            attempts: HashMap::new(),
            blame: Blame::new(),
            probe: None,
            trial: None,
            unrecorded: Vec::new(),
            storing: HashMap::new(),
            number: 0,
            stored: mpsc::channel(EVENTS),
            renewed: None,
            pause: None,
            tidied: None,
            age: Age::default(),
            observed: None,
        }
    }

    pub(super) fn run(mut self) {
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_time().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                *lock(&self.shared.stalled) = Some(error.to_string());
                tracing::error!(%error, "batch work cannot start");
                return;
            }
        };
        let (sink, mut events) = mpsc::channel(EVENTS);
        runtime.block_on(async {
            self.loaded().await;
            while !self.shared.is_stopped() {
                let now = clock::now();
                fault::point("batch", self.config.database.path().unwrap_or(Path::new("")).display());
                self.renew(now);
                self.tidy(now);
                if self.pause.is_none_or(|until| now >= until) {
                    self.pause = None;
                    self.fill(now, &sink);
                }
                let until = self.pause.unwrap_or(now + HOUSEKEEPING).min(now + self.patience());
                tokio::select! {
                    event = events.recv() => if let Some(event) = event {
                        self.handle(event);
                    },
                    Some((number, written)) = self.stored.1.recv() => if let Some(over) = self.storing.remove(&number) {
                        self.written(clock::now(), over, written);
                    },
                    () = self.shared.changed.notified() => self.drop_cancelled(),
                    () = tokio::time::sleep_until(until.into()) => {}
                }
            }
        });
        for stream in self.lanes.values().map(|lane| lane.stream).chain(self.trial) {
            self.engine.note(stream, StreamNote::Closed);
        }
        // Others need not wait for the leases to end; where this cannot be said they do.
        let _ = self.shared.store().release();
    }

    /// How often leases are renewed, and those that others have let end are looked for.
    fn patience(&self) -> Duration {
        self.shared.store().lease().map_or(HOUSEKEEPING, |lease| lease / 3)
    }

    /// Renews the leases, and gives up what another gateway has by now.
    fn renew(&mut self, now: Instant) {
        let every = self.patience();
        if self.renewed.is_some_and(|at| now.saturating_duration_since(at) < every) {
            return;
        }
        self.renewed = Some(now);
        let speed = self.shared.chars_per_second().filter(|_| !self.lanes.is_empty());
        let renewed = self.shared.store().renew(speed);
        match renewed {
            Ok(Some(held)) => {
                let holds = |lane: &Lane| held.contains(&(lane.work.id.clone(), lane.work.fence));
                let lost = self.lanes.iter().filter(|(_, lane)| !holds(lane)).map(|(id, _)| *id).collect();
                for lane in self.give_up(lost) {
                    tracing::info!(
                        job = lane.work.job,
                        "another gateway has taken over a sentence, or its job is over"
                    );
                }
            }
            Ok(None) => {}
            Err(error) => self.stall_of_database(now, &error),
        }
    }

    /// Takes lanes out of the engine.
    fn give_up(&mut self, over: Vec<UtteranceId>) -> Vec<Lane> {
        let mut lanes = Vec::new();
        for lane in over.iter().filter_map(|id| self.lanes.remove(id)).collect::<Vec<_>>() {
            self.blame.forget(&lane.work.id);
            self.trial.take_if(|stream| *stream == lane.stream);
            self.close(lane.stream);
            lanes.push(lane);
        }
        lanes
    }

    /// Waits until a device speaks, or until this is stopped: a model may take minutes to load.
    async fn loaded(&self) {
        while !self.shared.is_stopped() {
            tokio::select! {
                () = self.engine.ready() => return,
                () = self.shared.changed.notified() => {}
            }
        }
    }

    /// Hands out work until all lanes are busy. Tenants take turns: the one with the fewest lanes gets the next.
    fn fill(&mut self, now: Instant, sink: &SpeechSink) {
        while let Some(over) = self.unrecorded.pop() {
            if !self.record(now, over) {
                return;
            }
        }
        let failures = self.failures();
        // What is spoken faster than an object store takes it waits there, and not in memory.
        let most = self.config.lanes.max(1);
        while self.lanes.len() < most && self.storing.len() < most {
            let busy = !self.lanes.is_empty() || self.probe.is_some();
            let (work, stream) = match self.blame.next(now, busy) {
                Turn::Hold => return,
                Turn::Wait(until) => {
                    self.pause = Some(until);
                    return;
                }
                Turn::Probe => return self.probe(now, failures, sink),
                Turn::Alone(id) => {
                    let work = self.shared.store().part(&id);
                    if work.as_ref().is_ok_and(Option::is_none) {
                        self.blame.forget(&id);
                        continue;
                    }
                    (work, *self.trial.get_or_insert_with(StreamId::next))
                }
                Turn::Free => {
                    self.end_trial();
                    // A stream each: the order of a text is restored where it is stored.
                    (self.next(), StreamId::next())
                }
            };
            let work = match work {
                Ok(Some(work)) => work,
                Ok(None) => {
                    self.observed = self.observed.take().filter(|_| !self.lanes.is_empty());
                    return;
                }
                Err(error) => return self.stall_of_database(now, &error),
            };
            if let Some(silence) = cue::silence(&work) {
                self.ended(Lane { work, stream, pcm: vec![0; silence], failures }, UtteranceEnd::Done);
                if self.pause.is_some() {
                    return;
                }
                continue;
            }
            let utterance = cue::utterance(&work, stream, &self.config.lexicon.get());
            let id = utterance.id;
            if let Err(refused) = self.engine.submit(utterance, sink.clone()) {
                self.pause = Some(now + refused.retry_after);
                // Another gateway may have room; where this cannot be said they wait until the lease ends.
                let _ = self.shared.store().give_back(&work.id, work.fence);
                return;
            }
            if self.trial == Some(stream) {
                self.blame.started(&work.id);
            }
            self.observed.get_or_insert((now, 0));
            self.lanes.insert(id, Lane { work, stream, pcm: Vec::new(), failures });
        }
    }

    /// Has a harmless sentence spoken, on a stream that the suspects will speak on.
    fn probe(&mut self, now: Instant, failures: u32, sink: &SpeechSink) {
        let stream = *self.trial.get_or_insert_with(StreamId::next);
        let utterance = Utterance::plain(stream, Class::Batch, PROBE);
        let id = utterance.id;
        match self.engine.submit(utterance, sink.clone()) {
            Ok(()) => self.probe = Some(Probe { id, failures }),
            Err(refused) => self.pause = Some(now + refused.retry_after),
        }
    }

    fn end_trial(&mut self) {
        if let Some(stream) = self.trial.take() {
            self.engine.note(stream, StreamNote::Closed);
        }
    }

    /// Gives a stream up, unless more is to be spoken where it speaks.
    fn close(&self, stream: StreamId) {
        if self.trial != Some(stream) {
            self.engine.note(stream, StreamNote::Closed);
        }
    }

    /// How often any device has failed: a sentence that ends as failed was on a device that was lost if that has changed.
    fn failures(&self) -> u32 {
        self.engine.status().iter().map(|device| device.failures).sum()
    }

    fn next(&self) -> Result<Option<Work>, BatchError> {
        let mut store = self.shared.store();
        let mut tenants = store.tenants()?;
        let lanes = || self.lanes.values().map(|lane| &lane.work);
        let named = || self.engine.voices().into_iter().map(|voice| voice.name).collect::<Vec<_>>();
        let voices = self.config.own_voices.then(named);
        tenants.sort_by_cached_key(|tenant| lanes().filter(|work| work.tenant == *tenant).count());
        for tenant in tenants {
            let made = self.unrecorded.iter().chain(self.storing.values()).map(|over| &over.id);
            let spoken = lanes().filter(|work| work.tenant == tenant).map(|work| &work.id);
            let busy: Vec<&PartId> = spoken.chain(made).collect();
            let free = store.claim(&tenant, &busy, voices.as_deref())?;
            if free.is_some() {
                return Ok(free);
            }
        }
        Ok(None)
    }

    fn handle(&mut self, event: SpeechEvent) {
        match event {
            SpeechEvent::Audio { utterance, pcm } => {
                if let Some(lane) = self.lanes.get_mut(&utterance) {
                    lane.pcm.extend(pcm.into_iter().map(to_i16));
                }
            }
            SpeechEvent::End { utterance, how } => {
                if let Some(probe) = self.probe.take_if(|probe| probe.id == utterance) {
                    return self.probed(&probe, how);
                }
                let Some(lane) = self.lanes.remove(&utterance) else { return };
                self.close(lane.stream);
                if !self.shared.is_stopped() {
                    self.ended(lane, how);
                }
            }
        }
    }

    fn probed(&mut self, probe: &Probe, how: UtteranceEnd) {
        let now = clock::now();
        match how {
            UtteranceEnd::Refused { retry_after } => self.pause = Some(now + retry_after),
            UtteranceEnd::Cancelled => {}
            UtteranceEnd::Failed(reason) if self.failures() != probe.failures => {
                self.end_trial();
                self.blame.broken(now);
                self.tell(format!("{reason}; it fails at any sentence, and is tried again from time to time"));
            }
            UtteranceEnd::Done | UtteranceEnd::Failed(_) => {
                *lock(&self.shared.stalled) = None;
                self.blame.proved();
            }
        }
    }

    fn ended(&mut self, mut lane: Lane, how: UtteranceEnd) {
        let now = clock::now();
        cue::level(&lane.work, &mut lane.pcm);
        let id = &lane.work.id;
        let result = match how {
            UtteranceEnd::Done => {
                self.blame.finished(id);
                return self.store(now, lane);
            }
            UtteranceEnd::Cancelled => return self.blame.returned(id),
            UtteranceEnd::Refused { retry_after } => {
                self.blame.returned(id);
                self.pause = Some(now + retry_after);
                return;
            }
            UtteranceEnd::Failed(_) if self.engine.status().iter().all(|device| device.phase == Phase::Stopped) => {
                return;
            }
            UtteranceEnd::Failed(reason) if self.failures() != lane.failures => {
                self.end_trial();
                if !self.blame.lost(now, id) {
                    let what = "the sentences it was lost with are spoken one at a time when it works again";
                    return self.tell(format!("{reason}; {what}"));
                }
                self.attempts.remove(id);
                Err(format!(
                    "the speech device failed {LOSSES} times while this sentence was spoken alone, so it is left \
                     out; change its text or its voice: {reason}"
                ))
            }
            UtteranceEnd::Failed(reason) => {
                self.blame.forget(id);
                let attempts = self.attempts.entry(id.clone()).or_default();
                *attempts += 1;
                if *attempts < ATTEMPTS {
                    return;
                }
                self.attempts.remove(id);
                Err(reason)
            }
        };
        self.record(now, Over { id: id.clone(), fence: lane.work.fence, job: lane.work.job, result });
    }

    /// Puts what was spoken where audio lies.
    fn store(&mut self, now: Instant, lane: Lane) {
        let Lane { work, pcm, .. } = lane;
        let over = Over { id: work.id, fence: work.fence, job: work.job, result: Ok(pcm.len() as u64) };
        self.number += 1;
        let place = &self.shared.place;
        match place.write(&over.job, &over.id, over.fence, &pcm, self.number, &self.stored.0) {
            Written::Now(written) => {
                let written = written.map_err(|error| format!("{}: {error}", place.name()));
                self.written(now, over, written);
            }
            Written::Later => drop(self.storing.insert(self.number, over)),
        }
    }

    /// Audio is there, or could not be written.
    fn written(&mut self, now: Instant, over: Over, written: Result<(), String>) {
        if self.are_cancelled(&BTreeSet::from([over.job.as_str()])).contains(&over.job) {
            // Cancelled while this was written, which may have failed for that, or else left a file behind.
            return self.drop_audio(&over.job);
        }
        if let Err(error) = written {
            return self.stall(now, format!("{error}; it goes on when that is mended"));
        }
        self.attempts.remove(&over.id);
        self.record(now, over);
    }

    /// Marks an utterance as over; kept for later, and `false`, where the database cannot take it.
    fn record(&mut self, now: Instant, over: Over) -> bool {
        let outcome = over.result.as_ref().map(|samples| *samples).map_err(String::as_str);
        let finished = self.shared.store().finish(&over.id, over.fence, outcome, clock::wall());
        match finished {
            Ok(Finish::Counted(chars)) => {
                *lock(&self.shared.stalled) = None;
                self.shared.changes.of(&over.job);
                self.observe(now, chars);
                // One that was killed between its file and its row left the file.
                if over.result.is_ok()
                    && let Err(error) = self.shared.place.discard_earlier(&over.job, &over.id, over.fence)
                {
                    tracing::warn!(%error, "audio that a gateway left unrecorded was not removed");
                }
                true
            }
            Ok(Finish::Void) => {
                *lock(&self.shared.stalled) = None;
                if let Err(error) = self.shared.place.discard(&over.job, &over.id, over.fence) {
                    tracing::warn!(%error, "audio that another gateway has made, too, was not removed");
                }
                true
            }
            Err(error) => {
                self.unrecorded.push(over);
                self.stall_of_database(now, &error);
                false
            }
        }
    }

    /// Those of `jobs` that were cancelled or forgotten; none where the database does not say.
    fn are_cancelled(&self, jobs: &BTreeSet<&str>) -> BTreeSet<String> {
        self.shared.store().without_audio(jobs).unwrap_or_default()
    }

    /// Lanes of cancelled jobs are given up; their files, if one was written meanwhile, are dropped.
    fn drop_cancelled(&mut self) {
        let cancelled = self.are_cancelled(&self.lanes.values().map(|lane| lane.work.job.as_str()).collect());
        let over =
            self.lanes.iter().filter(|(_, lane)| cancelled.contains(&lane.work.job)).map(|(id, _)| *id).collect();
        for lane in self.give_up(over) {
            self.drop_audio(&lane.work.job);
        }
    }

    /// Of a cancelled job.
    fn drop_audio(&self, job: &str) {
        if let Err(error) = self.shared.place.remove(job) {
            tracing::warn!(%error, "audio of a cancelled job was not removed");
        }
    }

    fn stall_of_database(&mut self, now: Instant, error: &BatchError) {
        self.tell(error.to_string());
        self.pause = Some(now + if matches!(error, BatchError::Postgres(_)) { AWAY } else { STALL });
    }

    fn stall(&mut self, now: Instant, reason: String) {
        self.tell(reason);
        self.pause = Some(now + STALL);
    }

    /// Says why nothing is finished, until something is.
    fn tell(&self, reason: String) {
        let mut stalled = lock(&self.shared.stalled);
        if stalled.as_ref() != Some(&reason) {
            tracing::warn!(%reason, "batch work stands still");
        }
        *stalled = Some(reason);
    }

    fn observe(&mut self, now: Instant, chars: u64) {
        let Some((since, sum)) = &mut self.observed else { return };
        *sum += chars;
        let passed = now - *since;
        if passed < WINDOW {
            return;
        }
        let new = *sum as f64 / passed.as_secs_f64();
        let mut speed = lock(&self.shared.speed);
        *speed = Some(speed.map_or(new, |old| old + WEIGHT * (new - old)));
        self.observed = Some((now, 0));
    }

    /// Forgets what is over and too old, or too much.
    fn tidy(&mut self, now: Instant) {
        if self.tidied.is_some_and(|at| now < at + HOUSEKEEPING) {
            return;
        }
        self.tidied = Some(now);
        let trusted = self.age.trusted(now, clock::wall());
        if let Err(error) = self.forget_old(trusted) {
            tracing::warn!(%error, "old jobs could not be forgotten");
        }
    }

    /// `now`: the wall-clock time, as far as it can be trusted; `None`: nothing is forgotten for its age.
    fn forget_old(&self, now: Option<Duration>) -> Result<(), super::BatchError> {
        let mut store = self.shared.store();
        let kept = Duration::from_secs(u64::from(self.shared.keep_days.load(Ordering::Relaxed)) * 86_400);
        let oldest = now.map_or(Duration::ZERO, |now| now.saturating_sub(kept));
        let limit = self.config.max_audio_mib << 20;
        let mut bytes = store.bytes()?;
        for (job, ended, size) in store.over()? {
            if ended >= oldest && bytes <= limit {
                continue;
            }
            // The audio first: a job without audio is found again, audio without a job is not.
            self.shared.place.remove(&job)?;
            store.forget(&job)?;
            bytes -= size.min(bytes);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Changes;
    use super::super::audio::Place;
    use super::super::store::{NewJob, Sqlite, Store};
    use super::super::tests::{config, engine, spec};
    use super::*;
    use crate::audio_file::Format;

    #[test]
    fn a_job_cancelled_while_its_audio_is_written_stops_no_other_and_leaves_nothing() {
        for in_the_way in [true, false] {
            let folder = tempfile::tempdir().expect("temp dir");
            let config = config(folder.path());
            let mut store = Sqlite::open(config.database.path().expect("a file")).expect("opens");
            let items = [vec!["Hello there.".to_string()]];
            let spec = spec(&["Hello there."], Format::Wav);
            store.insert(&NewJob::plain("job", &spec, &items)).expect("inserts");
            let work = store.waiting("", 1).expect("reads").remove(0);
            assert!(store.cancel("job", Duration::ZERO).expect("known"));
            if in_the_way {
                // As where the folder of the job is removed between any two calls of the writer.
                std::fs::write(&config.audio_dir, b"in the way").expect("writes");
            }
            let place = Place::Folder(config.audio_dir.clone());
            let shared = Arc::new(Shared::new(Box::new(store), Arc::default(), place, Changes::default()));
            let audio = config.audio_dir.join("job");
            let mut runner = Runner::new(config, engine(), shared.clone());
            let lane = Lane { work, stream: StreamId::next(), pcm: vec![0; 480], failures: 0 };
            runner.ended(lane, UtteranceEnd::Done);
            assert_eq!((shared.stalled(), runner.pause), (None, None));
            assert!(!audio.exists());
            assert_eq!(shared.store().bytes().expect("reads"), 0);
        }
    }

    #[test]
    fn a_runner_that_panics_is_followed_by_another_that_finishes_the_job() {
        let folder = tempfile::tempdir().expect("temp dir");
        let config = config(folder.path());
        let mut store = Sqlite::open(config.database.path().expect("a file")).expect("opens");
        let spec = spec(&["Hello there."], Format::Wav);
        store.insert(&NewJob::plain("job", &spec, &[vec!["Hello there.".into()]])).expect("inserts");
        let place = Place::Folder(config.audio_dir.clone());
        let shared = Arc::new(Shared::new(Box::new(store), Arc::default(), place, Changes::default()));
        fault::arm("batch", config.database.path().expect("a file").display());
        let thread = std::thread::spawn({
            let (config, shared) = (config.clone(), shared.clone());
            move || run_for_ever(&config, &engine(), &shared)
        });
        let begun = clock::now();
        while shared.store().job("job").expect("known").state != super::super::JobState::Done {
            assert!(clock::now() - begun < Duration::from_secs(60), "the job is never done");
            std::thread::park_timeout(Duration::from_millis(10));
        }
        assert!(!shared.is_down());
        shared.stop();
        thread.join().expect("it ends");
    }
}
