//! Batch work: long texts become files, durably, on the device time that live speech leaves over.
//!
//! Owns the database of jobs, the folder of their audio and one thread that feeds the engine. Never decides when
//! something runs: every utterance is a batch stream of the scheduler. Several gateways may work on the jobs of one
//! PostgreSQL, each on utterances of its own, with their audio in one folder that all of them see; see [`store`].
//!
//! A job that [`Batch::submit`] returned survives the loss of the process at any instant, and is finished after
//! the next start without making any finished utterance again, with the same bytes as if nothing had happened.
//!
//! # Why
//! - **The utterance is the unit of everything**: a sentence or two is what is synthesised, stored, repeated
//!   after a crash and displaced by live work, so at most one sentence a lane is ever lost.
//! - **Audio, then row**: an utterance's samples go to a temporary file, to the disk, to their final name, and only
//!   then is the utterance marked as finished. A file without its row is whole, so a restart takes it over; a
//!   temporary file is dropped.
//! - **16-bit samples on disk, the format at the door**: what is asked for is encoded when it is read, joined over
//!   all utterances as one stream, always from the same samples by the same encoder.
//! - **A sentence that makes devices fail is found and left out**, for each failure ends live calls; see [`blame`].
//! - **A full disk stops, it does not fail**: the jobs say why they stand still and go on when there is room. So does an
//!   object store that is away.

mod audio;
mod blame;
mod changes;
mod cue;
mod jobs;
mod runner;
mod shared;
mod store;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use self::audio::Place;
pub use self::audio::{JobAudio, S3};
pub use self::changes::{Changes, ChangesReader};
pub use self::jobs::{Jobs, JobsFault};
use self::shared::Shared;
use self::store::{NewJob, Postgres, Sqlite, Store};
use crate::audio_file::{AudioFileError, Format};
use crate::clock;
use crate::node::{NodeName, fresh_id};
use crate::postgres::{self, Database, Health};
use crate::synth::device::Engine;
use crate::text::CurrentLexicon;
use crate::turn::{Markup, checked_speed};

/// Most jobs that are listed at once.
pub const PAGE: u32 = 1_000;

/// `[batch]` of the configuration.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The SQLite file of jobs (in the configuration, empty: `batch.sqlite` in the state directory), or the PostgreSQL
    /// that other gateways use, too.
    pub database: Database,
    /// The folder of their audio; in the configuration, empty: `batch` in the state directory.
    pub audio_dir: PathBuf,
    /// `s3://BUCKET` or `s3://BUCKET/PREFIX`: an object store in place of that folder; empty: the folder.
    pub audio: String,
    /// How that is reached.
    pub s3: S3,
    /// Utterances handed to the engine at once. More fill wider steps; each may be lost in a crash.
    pub lanes: usize,
    /// Most texts in one job.
    pub max_items: usize,
    /// Most characters of text in one job: a long novel has about two million.
    pub max_chars: usize,
    /// Most jobs that are not over.
    pub max_jobs: u32,
    /// Jobs that are over are forgotten with their audio after so many days.
    pub keep_days: u32,
    /// The audio of jobs that are over is dropped, oldest first, while all audio is larger than this, MiB.
    pub max_audio_mib: u64,
    /// With PostgreSQL: another gateway begins anew what one that has said nothing for so long was speaking, seconds.
    pub lease_s: u32,
    /// What ids of jobs begin with, where there are other machines.
    #[serde(skip)]
    pub node: Option<NodeName>,
    /// Words that are said otherwise than they are written.
    #[serde(skip)]
    pub lexicon: CurrentLexicon,
    /// With PostgreSQL: utterances in voices that the engine has not are left to others, who may have them.
    #[serde(skip)]
    pub own_voices: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            database: Database::default(),
            audio_dir: PathBuf::new(),
            audio: String::new(),
            s3: S3::default(),
            lanes: 64,
            max_items: 10_000,
            max_chars: 5_000_000,
            max_jobs: 1_000,
            keep_days: 7,
            max_audio_mib: 50 << 10,
            lease_s: 30,
            node: None,
            lexicon: CurrentLexicon::default(),
            own_voices: false,
        }
    }
}

impl Config {
    /// Checks what the types cannot say.
    ///
    /// # Errors
    /// The key and what it must be.
    pub fn validate(&self) -> Result<(), String> {
        if self.lease_s == 0 {
            return Err("lease_s must be 1 or more: what is spoken would be taken from its gateway at once".into());
        }
        if self.audio.is_empty() { Ok(()) } else { self.s3.validate(&self.audio) }
    }
}

/// One text of a job.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Item {
    /// What to say.
    pub input: String,
    /// Voice name; `None` is the job's.
    pub voice: Option<String>,
    /// Manner of speaking; `None` is the job's.
    pub instructions: Option<String>,
    /// Same text, voice and seed: same audio; `None`: from the job's seed and the place in the job.
    pub seed: Option<u64>,
    /// What of the text is markup.
    pub markup: Markup,
}

impl<T: Into<String>> From<T> for Item {
    fn from(input: T) -> Self {
        Self { input: input.into(), ..Self::default() }
    }
}

/// What is asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct JobSpec {
    /// The texts, joined in this order; each may be a whole chapter.
    pub items: Vec<Item>,
    /// Voice name of items that name none; `None` is the engine's default.
    pub voice: Option<String>,
    /// BCP 47 tag.
    pub language: Option<String>,
    /// Manner of speaking of items that name none, for voices that can.
    pub instructions: Option<String>,
    /// Speaking rate, 1.0 as recorded.
    pub speed: f32,
    /// Same job, same audio.
    pub seed: u64,
    /// What [`Batch::audio`] gives.
    pub format: Format,
    /// Name of the API token, empty when there is none.
    pub tenant: String,
    /// Jobs of a higher one come before others of the same tenant; 0 unless the client says.
    pub priority: i32,
}

/// Where a job stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JobState {
    /// Nothing of it is finished.
    Queued,
    /// Some of it is.
    Running,
    /// Over; at least one item has audio.
    Done,
    /// Over; no item has audio.
    Failed,
    /// Over before its time.
    Cancelled,
}

impl JobState {
    /// Every state.
    pub const ALL: [JobState; 5] =
        [JobState::Queued, JobState::Running, JobState::Done, JobState::Failed, JobState::Cancelled];

    /// Its name in the database, in metrics and for clients.
    pub fn name(self) -> &'static str {
        match self {
            JobState::Queued => "queued",
            JobState::Running => "running",
            JobState::Done => "done",
            JobState::Failed => "failed",
            JobState::Cancelled => "cancelled",
        }
    }
}

/// A job as clients see it.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Job {
    /// Its name.
    pub id: String,
    /// Where it stands.
    pub state: JobState,
    /// Utterances in all.
    pub total: u32,
    /// Utterances that are over.
    pub finished: u32,
    /// Seconds until it is done, when that can be told.
    pub eta_seconds: Option<f64>,
    /// Why it stands still, if it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// One for each item.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub results: Vec<ItemResult>,
}

/// Where one item of a job stands.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ItemResult {
    /// Its place in the job, from 0.
    pub index: u32,
    /// Where it stands.
    pub status: JobState,
    /// How long the audio made so far is, in milliseconds.
    pub duration_ms: u64,
    /// Why it has no audio, or not all of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Some of the jobs, the newest first.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct JobPage {
    /// These, without their items.
    pub jobs: Vec<Job>,
    /// Whether there are older ones.
    pub has_more: bool,
}

/// Why batch work was not taken on or could not be looked at.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BatchError {
    /// The request cannot be done; the message says what to change.
    #[error("{0}")]
    Input(String),
    /// There are as many jobs as there may be.
    #[error("{0} jobs are waiting already, as many as may; try again later")]
    Full(u32),
    /// A tenant's limit.
    #[error("the job has {chars} characters, and {used} of the {limit} a day are used: wait for another day (UTC)")]
    UsedUp {
        /// Of the job.
        chars: u64,
        /// Of the day's jobs before it.
        used: u64,
        /// Of a day.
        limit: u64,
        /// Until the next day.
        retry_after: Duration,
    },
    /// No such job or item.
    #[error("there is no {0}")]
    NotFound(String),
    /// The audio is not complete yet.
    #[error("{0} is not finished yet")]
    Unfinished(String),
    /// Another process does the work from now on.
    #[error("another gateway takes the place of this one and does the batch work: try again")]
    Parked,
    /// The database failed.
    #[error("job database: {0}")]
    Database(#[from] rusqlite::Error),
    /// The database of several gateways failed.
    #[error("job database: {0}")]
    Postgres(#[from] postgres::Error),
    /// The database was lost while it took a job on.
    #[error("the job database was lost just then: ask for job `{0}` before it is handed in again")]
    Uncertain(String),
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// Which.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// The object store did not do what it was asked.
    #[error("{0}")]
    Objects(String),
    /// Encoding failed.
    #[error(transparent)]
    Audio(#[from] AudioFileError),
}

/// All batch work of a gateway. Methods read and write the database and take milliseconds: call them where
/// blocking is allowed. The last handle to be dropped stops the work; it goes on when opened again.
#[derive(Clone)]
pub struct Batch {
    inner: Arc<Inner>,
}

struct Inner {
    config: Config,
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Of a database that may be away.
    health: Option<Arc<Health>>,
}

impl Batch {
    /// Opens the database, or makes it, and goes on with what is unfinished. A PostgreSQL is connected to later, and may
    /// be away for the time being.
    ///
    /// # Errors
    /// The database or the folder cannot be used.
    pub fn open(config: Config, engine: Engine) -> Result<Self, BatchError> {
        Self::open_telling(config, engine, Changes::default())
    }

    /// As [`Batch::open`], where `changes` are told of what happens to jobs, here or at the other gateways of a PostgreSQL.
    ///
    /// # Errors
    /// As there.
    pub fn open_telling(config: Config, engine: Engine, changes: Changes) -> Result<Self, BatchError> {
        let place = Place::of(&config)?;
        let changed = Arc::new(Notify::new());
        let (store, health): (Box<dyn Store>, _) = match &config.database {
            Database::File(path) => {
                if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
                    std::fs::create_dir_all(folder).map_err(io(folder))?;
                }
                let mut store = Sqlite::open(path)?;
                place.recover(&mut store)?;
                (Box::new(store), None)
            }
            Database::Postgres(address) => {
                let lease = Duration::from_secs(config.lease_s.max(1).into());
                let store = Postgres::new(address, Box::new(place.clone()), lease, changed.clone(), changes.clone())?;
                let health = store.health();
                (Box::new(store), Some(health))
            }
        };
        let shared = Arc::new(Shared::new(store, changed, place, changes));
        shared.keep_days.store(config.keep_days, Ordering::Relaxed);
        let (settings, theirs) = (config.clone(), shared.clone());
        let thread = std::thread::Builder::new()
            .name("batch".into())
            .spawn(move || runner::run_for_ever(&settings, &engine, &theirs));
        let thread = thread.map_err(io(&config.audio_dir))?;
        Ok(Self { inner: Arc::new(Inner { config, shared, thread: Mutex::new(Some(thread)), health }) })
    }

    /// Keeps jobs that are over for so many days from now on.
    pub fn keep(&self, days: u32) {
        self.inner.shared.keep_days.store(days, Ordering::Relaxed);
    }

    /// Takes a job on. When this returns, the job is on disk.
    ///
    /// # Errors
    /// Nothing to say, more than may be, or no room in the database.
    pub fn submit(&self, spec: JobSpec) -> Result<Job, BatchError> {
        self.submit_within(spec, 0)
    }

    /// As [`Batch::submit`], where the tenant may hand in so many characters a day (UTC); 0: no limit.
    ///
    /// # Errors
    /// As there, and [`BatchError::UsedUp`].
    pub fn submit_within(&self, spec: JobSpec, chars_per_day: u64) -> Result<Job, BatchError> {
        let config = &self.inner.config;
        if spec.items.is_empty() || spec.items.len() > config.max_items {
            return Err(BatchError::Input(format!(
                "a job has 1 to {} texts, this one {}",
                config.max_items,
                spec.items.len()
            )));
        }
        let chars: usize = spec.items.iter().map(|item| item.input.chars().count()).sum();
        if chars > config.max_chars {
            return Err(BatchError::Input(format!(
                "{chars} characters are more than a job may have ({}): make several",
                config.max_chars
            )));
        }
        checked_speed(spec.speed).map_err(BatchError::Input)?;
        let (language, lexicon) = (spec.language.as_deref(), config.lexicon.get());
        let mut items: Vec<Vec<String>> = Vec::with_capacity(spec.items.len());
        for (n, item) in spec.items.iter().enumerate() {
            let parts = cue::split(item, language, &lexicon);
            items.push(parts.map_err(|mistake| BatchError::Input(format!("text {n}: {mistake}")))?);
        }
        if let Some(empty) = items.iter().position(Vec::is_empty) {
            return Err(BatchError::Input(format!("text {empty} has nothing to say")));
        }
        let id = fresh_id(config.node.as_ref());
        let (now, max_jobs) = (clock::wall(), config.max_jobs);
        self.store().insert(&NewJob { id: &id, now, spec: &spec, items: &items, max_jobs, chars_per_day })?;
        self.inner.shared.changed.notify_one();
        self.inner.shared.changes.of(&id);
        match self.job(&id) {
            // It is taken on, whatever became of the database since.
            Err(BatchError::Postgres(_)) => {
                let result = |index| ItemResult { index, status: JobState::Queued, duration_ms: 0, error: None };
                let total = items.iter().map(Vec::len).sum::<usize>() as u32;
                let results = (0..items.len() as u32).map(result).collect();
                Ok(Job { id, state: JobState::Queued, total, finished: 0, eta_seconds: None, reason: None, results })
            }
            job => job,
        }
    }

    /// One job, with its items.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn job(&self, id: &str) -> Result<Job, BatchError> {
        let mut job = self.store().job(id)?;
        self.annotate(std::slice::from_mut(&mut job))?;
        Ok(job)
    }

    /// Those of these jobs that there are, without their items.
    ///
    /// # Errors
    /// The database failed.
    pub fn jobs(&self, ids: &BTreeSet<Arc<str>>) -> Result<Vec<Job>, BatchError> {
        let mut jobs = self.store().named(ids)?;
        self.annotate(&mut jobs)?;
        Ok(jobs)
    }

    /// Jobs from the newest on, or from the one that came before the job `after`, at most `limit` and [`PAGE`].
    ///
    /// # Errors
    /// There is no job `after` (any more), or the database failed.
    pub fn list(&self, limit: u32, after: Option<&str>) -> Result<JobPage, BatchError> {
        self.list_of(|_| true, limit, after)
    }

    /// As [`Batch::list`], of those tenants only that `whose` says.
    ///
    /// # Errors
    /// As there; a job `after` of another tenant is none.
    pub fn list_of(
        &self,
        whose: impl Fn(&str) -> bool,
        limit: u32,
        after: Option<&str>,
    ) -> Result<JobPage, BatchError> {
        let limit = limit.min(PAGE);
        if let Some(id) = after
            && !whose(&self.owner(id)?)
        {
            return Err(BatchError::NotFound(format!("job `{id}`")));
        }
        let mut jobs = self.store().list(limit + 1, after, &whose)?;
        let has_more = jobs.len() > limit as usize;
        jobs.truncate(limit as usize);
        self.annotate(&mut jobs)?;
        Ok(JobPage { jobs, has_more })
    }

    /// The tenant that a job belongs to.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn owner(&self, id: &str) -> Result<String, BatchError> {
        self.store().owner(id)
    }

    /// Ends a job at once and drops its audio. A job that is over stays as it is.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn cancel(&self, id: &str) -> Result<Job, BatchError> {
        let cancelled = self.store().cancel(id, clock::wall())?;
        if cancelled {
            self.inner.shared.changed.notify_one();
            self.inner.shared.changes.of(id);
            self.inner.shared.place.remove(id)?;
        }
        self.job(id)
    }

    /// The audio of a job, or of one item of it, in the job's format.
    ///
    /// # Errors
    /// There is none of that name, or it is not finished.
    pub fn audio(&self, id: &str, item: Option<u32>) -> Result<JobAudio, BatchError> {
        let job = self.job(id)?;
        let (name, status) = match item {
            None => (format!("job {id}"), job.state),
            Some(index) => {
                let found = job.results.iter().find(|result| result.index == index);
                let name = format!("item {index} of job {id}");
                (name.clone(), found.ok_or(BatchError::NotFound(name))?.status)
            }
        };
        match status {
            JobState::Done => {}
            JobState::Queued | JobState::Running => return Err(BatchError::Unfinished(name)),
            JobState::Failed | JobState::Cancelled => return Err(BatchError::NotFound(format!("audio of {name}"))),
        }
        let (format, made) = self.store().made(id, item)?;
        self.inner.shared.place.open(id, format, &made)
    }

    /// Jobs by state, for metrics.
    ///
    /// # Errors
    /// The database failed.
    pub fn counts(&self) -> Result<[(JobState, u32); 5], BatchError> {
        self.store().counts()
    }

    /// Why the database cannot be used, where it is one that may be away.
    pub fn fault(&self) -> Option<String> {
        self.inner.health.as_ref().and_then(|health| health.fault())
    }

    /// Whether the thread panicked and was not started again yet.
    pub fn is_down(&self) -> bool {
        self.inner.shared.is_down()
    }

    /// Stops handing out work and waits for the thread. What was not finished goes on after the next start.
    pub fn shutdown(self) {
        self.inner.shared.stop();
        let thread = self.inner.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // A panic there was logged when it happened.
            let _ = thread.join();
        }
    }

    fn store(&self) -> MutexGuard<'_, Box<dyn Store>> {
        self.inner.shared.store()
    }

    /// What the database does not know: how fast it goes, and whether it goes.
    fn annotate(&self, jobs: &mut [Job]) -> Result<(), BatchError> {
        let mut unfinished =
            jobs.iter_mut().filter(|job| matches!(job.state, JobState::Queued | JobState::Running)).peekable();
        if unfinished.peek().is_none() {
            return Ok(());
        }
        let reason = self.inner.shared.stalled();
        let mut store = self.store();
        let rate = store.speed(self.inner.shared.chars_per_second())?.filter(|rate| *rate > 0.0);
        let ahead = if rate.is_some() { store.chars_ahead()? } else { Default::default() };
        for job in unfinished {
            job.reason.clone_from(&reason);
            job.eta_seconds = rate.and_then(|rate| Some(*ahead.get(&job.id)? as f64 / rate));
        }
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.stop();
    }
}

fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> BatchError {
    let path = path.into().display().to_string();
    move |source| BatchError::Io { path, source }
}

/// How often jobs that are over are looked through for those to forget.
const HOUSEKEEPING: Duration = Duration::from_secs(600);

#[cfg(test)]
mod tests;
