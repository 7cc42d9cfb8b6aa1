//! Recordings of calls: both directions in one stereo file, the caller on the left and the gateway on the right.
//!
//! A task a call listens to both directions and puts them side by side ([`mix`]); one thread encodes and writes
//! ([`writer`]). Beside each file lies a description of it, which says whose call it was.
//!
//! # Why
//! *A call never waits for a disk.* Frames come by the tap that media sockets use, and blocks go to the thread through a
//! bounded queue: where that is full the task keeps them for a while, then leaves silence in their place (counted), so
//! that what follows stays where it belongs.
//!
//! *A pause is silence*, and the file goes on: what was said at which time can be found by the clock of the call.

mod file;
mod mix;
mod seal;
mod timeline;
mod writer;

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use dashmap::DashMap;
use metrics::counter;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

pub use self::file::{Format, complete};
use self::mix::Mixer;
pub use self::seal::{Key, Opener, Sealer};
use self::timeline::Timeline;
use self::writer::Message;
use crate::call::{CallHandle, CallId, MediaFrame, TapDirection};
use crate::clock;
use crate::secret::Secret;
use crate::supervise::Part;

/// Samples a second of each channel: what telephones carry.
pub const RATE: u32 = 8_000;
/// Blocks that may wait for the disk: two seconds of five hundred calls.
const QUEUE: usize = 1_024;
/// Between blocks of one call.
const BLOCK: Duration = Duration::from_secs(1);
/// How long the channels wait for each other: longer than any packet is waited for.
const HORIZON: Duration = Duration::from_secs(1);
/// How long the recordings of the last calls may take to be handed on at a shutdown.
const LAST: Duration = Duration::from_secs(2);
/// Samples, of both channels, that a call keeps while the disk takes none: half a minute.
const KEPT: usize = 2 * 30 * RATE as usize;
/// A recording that was not completed and not written to for so long never will be: its gateway was killed.
const ABANDONED: Duration = Duration::from_secs(60);

/// `[recording]`
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Which calls are recorded.
    pub mode: Mode,
    /// Where recordings are; in the configuration, empty: `recordings` in the state directory.
    pub dir: PathBuf,
    /// Kind of file.
    pub format: Format,
    /// Recordings are deleted so many days after their call; 0 is never.
    pub keep_days: u32,
    /// Said before a recording begins; empty: nothing. An agent's own `consent` goes first.
    pub consent: String,
    /// What recordings are encrypted with: 64 hexadecimal digits.
    pub key: Option<Secret>,
}

impl Config {
    /// Whether calls of an agent that says `record` are recorded, and what is said before (`consent`: the agent's own).
    pub fn wanted<'a>(&'a self, record: Option<bool>, consent: Option<&'a str>) -> Option<&'a str> {
        let wanted = match self.mode {
            Mode::Off => false,
            Mode::Agents => record == Some(true),
            Mode::All => record != Some(false),
        };
        wanted.then(|| consent.unwrap_or(&self.consent).trim())
    }

    /// Checks what the types cannot say.
    ///
    /// # Errors
    /// The key and what it must be.
    pub fn validate(&self) -> Result<(), String> {
        self.sealing().map(|_| ()).map_err(|error| format!("key: {error}"))
    }

    /// The key of recordings, if they are encrypted.
    ///
    /// # Errors
    /// It is none.
    pub fn sealing(&self) -> Result<Option<Key>, String> {
        self.key.as_ref().map(Key::parse).transpose()
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            mode: Mode::Off,
            dir: PathBuf::new(),
            format: Format::Opus,
            keep_days: 30,
            consent: "This call is recorded.".into(),
            key: None,
        }
    }
}

/// Which calls are recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// None, whatever agents say.
    #[default]
    Off,
    /// Those of agents with `record = true`.
    Agents,
    /// Those of all agents but the ones with `record = false`.
    All,
}

/// What is known of a recording, as the file beside it says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Description {
    /// The call.
    pub id: String,
    /// Whose call it is; empty: the operator's.
    pub tenant: String,
    /// Its agent.
    pub agent: String,
    /// Kind of file.
    pub format: Format,
    /// Unix time of the beginning of its sound, in milliseconds.
    pub started_ms: u64,
    /// Length, once it is complete.
    pub duration_ms: Option<u64>,
    /// Whether sound was lost because the disk did not keep up, or refused it.
    pub gaps: bool,
    /// Whether the file is encrypted; see [`Opener`].
    #[serde(default)]
    pub encrypted: bool,
}

impl Description {
    /// The name of its file.
    fn file_name(&self) -> String {
        let sealed = if self.encrypted { SEALED } else { "" };
        format!("{}.{}{sealed}", self.id, self.format.extension())
    }
}

/// What the names of encrypted recordings end with.
pub const SEALED: &str = ".enc";

/// Why a recording cannot be had or changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordingError {
    /// No recording is kept of that call, or it is deleted.
    #[error("there is no recording of this call")]
    NotFound,
    /// The call is live, or its last seconds are being written.
    #[error("the recording is not complete yet: the call goes on")]
    Open,
    /// The call is not recorded.
    #[error("this call is not being recorded")]
    NotRecorded,
    /// The disk.
    #[error("the recording cannot be read: {0}")]
    Io(#[from] std::io::Error),
}

/// What a live recording does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It takes sound.
    Recording,
    /// It takes silence.
    Paused,
}

/// The recordings of a gateway. Cheap to clone.
#[derive(Clone)]
pub struct Recordings(Arc<Inner>);

struct Inner {
    config: Config,
    /// Days that recordings are kept; 0: for ever.
    keep_days: Arc<AtomicU32>,
    key: Option<Key>,
    live: DashMap<CallId, watch::Sender<State>>,
    queue: SyncSender<Message>,
    thread: Mutex<Option<JoinHandle<()>>>,
    part: Arc<Part>,
    tasks: Arc<Tasks>,
}

/// How many tasks have sound of calls, and when that changes.
#[derive(Default)]
struct Tasks {
    count: Mutex<usize>,
    changed: Condvar,
}

/// A task that has sound of a call; not waited for any more when it is dropped.
struct Busy(Arc<Tasks>);

impl Busy {
    fn new(tasks: &Arc<Tasks>) -> Self {
        *tasks.count.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Self(tasks.clone())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        *self.0.count.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.changed.notify_all();
    }
}

impl Recordings {
    /// Starts the thread that writes. The folder is made by the first recording.
    ///
    /// # Errors
    /// The operating system refuses a thread.
    pub fn start(config: Config) -> std::io::Result<Self> {
        let (queue, messages) = std::sync::mpsc::sync_channel(QUEUE);
        let key = config.sealing().map_err(std::io::Error::other)?;
        let keep_days = Arc::new(AtomicU32::new(config.keep_days));
        let writer = writer::Writer::new(config.clone(), keep_days.clone(), key.clone());
        let part = Arc::new(Part::new("recordings"));
        let own = part.clone();
        let thread = std::thread::Builder::new().name("recordings".into());
        let thread = thread.spawn(move || writer.run(&messages, &own))?;
        let thread = Mutex::new(Some(thread));
        let live = DashMap::new();
        Ok(Self(Arc::new(Inner { config, keep_days, key, live, queue, thread, part, tasks: Arc::default() })))
    }

    /// Keeps recordings for so many days from now on; 0: for ever.
    pub fn keep(&self, days: u32) {
        self.0.keep_days.store(days, Ordering::Relaxed);
    }

    /// Whether calls of an agent that says `record` are recorded, and what is said before (`consent`: the agent's own).
    pub fn wanted(&self, record: Option<bool>, consent: Option<&str>) -> Option<String> {
        self.0.config.wanted(record, consent).map(str::to_owned)
    }

    /// Whether what writes has panicked and is about to be started again.
    pub fn are_down(&self) -> bool {
        self.0.part.is_down()
    }

    /// Records `call` from now until it ends.
    pub fn record(&self, call: &CallHandle) {
        let (sender, state) = watch::channel(State::Recording);
        let id = call.id().clone();
        if self.0.live.insert(id.clone(), sender).is_some() {
            return;
        }
        let description = Description {
            id: id.to_string(),
            tenant: call.meta().tenant.to_string(),
            agent: call.meta().agent.clone(),
            format: self.0.config.format,
            started_ms: clock::wall().as_millis() as u64,
            duration_ms: None,
            gaps: false,
            encrypted: self.0.key.is_some(),
        };
        let mut tap = call.media_tap();
        let recordings = self.clone();
        let busy = Busy::new(&self.0.tasks);
        tokio::spawn(async move {
            let mut recorder = Recorder::new(description, state);
            let mut blocks = tokio::time::interval(BLOCK);
            loop {
                tokio::select! {
                    frame = tap.recv() => match frame {
                        Some(frame) => {
                            recorder.begin(clock::wall(), frame.at);
                            recorder.frame(clock::now(), &frame);
                        }
                        None => break,
                    },
                    _ = blocks.tick() => recorder.block(clock::now(), &recordings.0.queue),
                }
            }
            recordings.0.live.remove(&id);
            let queue = recordings.0.queue.clone();
            // overflow: awaited, off the runtime's workers: the end of a recording is not dropped
            let _ = tokio::task::spawn_blocking(move || {
                recorder.finish(&queue);
                drop(busy);
            })
            .await;
        });
    }

    /// What the recording of a live call does.
    pub fn state(&self, id: &CallId) -> Option<State> {
        self.0.live.get(id).map(|state| *state.borrow())
    }

    /// Pauses or resumes the recording of a live call.
    ///
    /// # Errors
    /// It is not being recorded.
    pub fn set(&self, id: &CallId, state: State) -> Result<(), RecordingError> {
        let live = self.0.live.get(id).ok_or(RecordingError::NotRecorded)?;
        live.send_replace(state);
        Ok(())
    }

    /// The description of a recording and its file. Reads the disk: call it where blocking is allowed.
    ///
    /// # Errors
    /// There is none, it is still written, or the disk fails.
    pub fn find(&self, id: &str) -> Result<(Description, PathBuf), RecordingError> {
        // An id of ours has no character that could lead out of the folder.
        let sound = !id.is_empty()
            && !id.starts_with('.')
            && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
        if !sound {
            return Err(RecordingError::NotFound);
        }
        let dir = &self.0.config.dir;
        let text = match std::fs::read(described(dir, id)) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(RecordingError::NotFound),
            read => read?,
        };
        let description: Description = serde_json::from_slice(&text).map_err(std::io::Error::from)?;
        let file = dir.join(description.file_name());
        match description.duration_ms {
            Some(_) => Ok((description, file)),
            None if !self.0.live.contains_key(&CallId::from(id)) && is_abandoned(&file) => {
                Ok((Description { gaps: true, ..description }, file))
            }
            None => Err(RecordingError::Open),
        }
    }

    /// The sound of a recording that [`Recordings::find`] has found encrypted. Blocks.
    ///
    /// # Errors
    /// It was encrypted with another key, or the disk fails.
    pub fn open(&self, description: &Description, file: &Path) -> Result<impl Read + Send + use<>, RecordingError> {
        let key = self.0.key.as_ref().ok_or_else(|| std::io::Error::other("[recording] key is not set any more"))?;
        let file = BufReader::new(File::open(file)?);
        Ok(Opener::new(file, key, description.duration_ms.is_none())?)
    }

    /// Writes what waits and joins the thread. Blocks. Calls have to be over; a task that takes longer than [`LAST`] to
    /// notice leaves a recording without its last seconds.
    pub fn shutdown(&self) {
        let tasks = &self.0.tasks;
        let count = tasks.count.lock().unwrap_or_else(PoisonError::into_inner);
        // Whether they were in time makes no difference to what follows.
        drop(tasks.changed.wait_timeout_while(count, LAST, |count| *count > 0));
        // overflow: awaited, the thread empties the queue
        let _ = self.0.queue.send(Message::Stop);
        let thread = self.0.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // A panic there was logged when it happened.
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Recordings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recordings").field("live", &self.0.live.len()).finish_non_exhaustive()
    }
}

/// The description of the recording `id`.
fn described(dir: &Path, id: &str) -> PathBuf {
    dir.join(format!("{id}.json"))
}

/// Whether a recording is no longer written to. Every second something is written, a pause included.
fn is_abandoned(file: &Path) -> bool {
    let now = SystemTime::UNIX_EPOCH + clock::wall();
    let written = std::fs::metadata(file).and_then(|file| file.modified());
    written.is_ok_and(|at| now.duration_since(at).is_ok_and(|age| age > ABANDONED))
}

/// One call's recording until it is with the thread.
struct Recorder {
    description: Description,
    state: watch::Receiver<State>,
    timelines: [Timeline; 2],
    mixer: Mixer,
    /// The last frame's time in the call, and when it was here: what time it is in the call.
    latest: Option<(Duration, Instant)>,
    /// Where in the call the file begins, in samples.
    origin: Option<i64>,
    opened: bool,
    /// What the queue has not taken.
    waiting: Vec<i16>,
    /// Samples of both channels, before `waiting`, that were given up.
    skipped: usize,
}

impl Recorder {
    fn new(description: Description, state: watch::Receiver<State>) -> Self {
        Self {
            description,
            state,
            timelines: [Timeline::new(RATE), Timeline::new(RATE)],
            mixer: Mixer::new(),
            latest: None,
            origin: None,
            opened: false,
            waiting: Vec::new(),
            skipped: 0,
        }
    }

    /// The first frame is here, at `at` in the call: the file begins with it, and not with the call, of which a consent
    /// or the ringing may have gone before.
    fn begin(&mut self, wall: Duration, at: Duration) {
        if self.origin.is_none() {
            self.origin = Some(samples(at));
            self.description.started_ms = wall.as_millis() as u64;
        }
    }

    fn frame(&mut self, now: Instant, frame: &MediaFrame) {
        self.latest = Some((frame.at, now));
        let channel = match frame.direction {
            TapDirection::Inbound => 0,
            TapDirection::Outbound => 1,
        };
        // Also while it is paused: the clocks go on.
        let index = self.timelines[channel].place(frame.position, frame.at);
        if *self.state.borrow() == State::Recording {
            self.mixer.add(channel, index - self.origin.unwrap_or(0), &frame.pcm);
        }
    }

    /// Hands on what is old enough to be complete.
    fn block(&mut self, now: Instant, queue: &SyncSender<Message>) {
        let Some((at, when)) = self.latest else { return };
        let time = (at + now.saturating_duration_since(when)).saturating_sub(HORIZON);
        self.waiting.extend(self.mixer.take(samples(time) - self.origin.unwrap_or(0)));
        if self.waiting.len() > KEPT {
            // overflow: drops (counted): silence takes its place
            self.skipped += self.waiting.len();
            self.description.gaps = true;
            let seconds = (self.waiting.len() / 2 / RATE as usize) as u64;
            counter!("antiphon_recording_dropped_seconds_total").increment(seconds);
            counter!("antiphon_recording_dropped_seconds").increment(seconds);
            self.waiting.clear();
        }
        if !self.opened {
            let message = Message::Open(Box::new(self.description.clone()));
            // overflow: kept, for a while: see above
            self.opened = queue.try_send(message).is_ok();
        }
        if self.opened && (self.skipped > 0 || !self.waiting.is_empty()) {
            let message = self.message();
            // overflow: kept, for a while: see above
            if let Err(TrySendError::Full(message) | TrySendError::Disconnected(message)) = queue.try_send(message) {
                self.take_back(message);
            }
        }
    }

    fn message(&mut self) -> Message {
        let (skipped, pcm) = (std::mem::take(&mut self.skipped), std::mem::take(&mut self.waiting));
        Message::Samples { id: self.description.id.clone(), skipped, pcm }
    }

    fn take_back(&mut self, message: Message) {
        if let Message::Samples { skipped, pcm, .. } = message {
            (self.skipped, self.waiting) = (skipped, pcm);
        }
    }

    /// Hands on everything. Blocks.
    fn finish(mut self, queue: &SyncSender<Message>) {
        let rest = self.mixer.take_all();
        self.waiting.extend(rest);
        // overflow: awaited, all three
        if !self.opened && queue.send(Message::Open(Box::new(self.description.clone()))).is_err() {
            return;
        }
        let message = self.message();
        let _ = queue.send(message);
        let _ = queue.send(Message::Close { id: self.description.id, gaps: self.description.gaps });
    }
}

/// `time` in samples of one channel.
fn samples(time: Duration) -> i64 {
    (time.as_micros() as i64) * i64::from(RATE) / 1_000_000
}

#[cfg(test)]
mod tests;
