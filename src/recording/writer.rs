//! The thread that writes recordings, and deletes those that are old.

use std::collections::HashMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant, SystemTime};

use metrics::counter;

use super::file::Stereo;
use super::{Config, Description, Key, RATE, described};
use crate::clock::{self, Age, DAY, Sparse};
use crate::fault;
use crate::file::replace;
use crate::supervise::Part;

/// How often old recordings are looked for.
const TIDY: Duration = Duration::from_secs(3_600);
/// Silence that is written at a time.
const SILENCE: usize = 2 * RATE as usize;

pub(super) enum Message {
    /// A recording begins.
    Open(Box<Description>),
    /// The next of its sound, left and right in turn, after `skipped` samples of both that are lost.
    Samples { id: String, skipped: usize, pcm: Vec<i16> },
    /// It ends.
    Close { id: String, gaps: bool },
    /// Write what waits and end.
    Stop,
}

pub(super) struct Writer {
    config: Config,
    keep_days: Arc<AtomicU32>,
    key: Option<Key>,
    open: HashMap<String, Open>,
    tidied: Option<Instant>,
    age: Age,
    /// The recording that a message is being taken for; still so after a panic there.
    current: Option<String>,
}

struct Open {
    description: Description,
    file: Stereo,
    /// Samples of one channel.
    written: u64,
}

impl Writer {
    pub(super) fn new(config: Config, keep_days: Arc<AtomicU32>, key: Option<Key>) -> Self {
        Self { config, keep_days, key, open: HashMap::new(), tidied: None, age: Age::default(), current: None }
    }

    /// Until it is told to stop, also when it panics: other recordings than the one that did it go on.
    pub(super) fn run(mut self, messages: &Receiver<Message>, part: &Part) {
        while catch_unwind(AssertUnwindSafe(|| self.work(messages))).is_err() {
            part.fell().rest_here();
            self.recover();
        }
        // Calls whose tasks had no time to end: what is there is kept.
        for (_, open) in self.open.drain() {
            close(&self.config.dir, open, true).unwrap_or_else(tell);
        }
    }

    /// After a panic. The encoder may have stopped half way, so the rest of that recording is lost, as where the disk is full.
    fn recover(&mut self) {
        let Some(open) = self.current.take().and_then(|id| self.open.remove(&id)) else { return };
        counter!("antiphon_recording_errors_total").increment(1);
        tracing::error!(id = open.description.id, "the rest of a recording is lost");
        let dir = &self.config.dir;
        if let Ok(closed) = catch_unwind(AssertUnwindSafe(|| close(dir, open, true))) {
            closed.unwrap_or_else(tell);
        }
    }

    fn work(&mut self, messages: &Receiver<Message>) {
        loop {
            self.tidy(clock::now(), clock::wall());
            fault::point("recordings", self.config.dir.display());
            match messages.recv_timeout(TIDY) {
                Ok(Message::Stop) | Err(RecvTimeoutError::Disconnected) => break,
                Ok(message) => self.take(message),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    fn take(&mut self, message: Message) {
        self.current = match &message {
            Message::Open(description) => Some(description.id.clone()),
            Message::Samples { id, .. } | Message::Close { id, .. } => Some(id.clone()),
            Message::Stop => None,
        };
        let done = match message {
            Message::Open(description) => self.begin(*description),
            Message::Samples { id, skipped, pcm } => {
                fault::point("recording", &id);
                let done = self.open.get_mut(&id).map_or(Ok(()), |open| open.push(skipped, &pcm));
                // The disk is full, or gone: the rest of this call is lost, and others are tried.
                if done.is_err()
                    && let Some(open) = self.open.remove(&id)
                {
                    close(&self.config.dir, open, true).ok();
                }
                done
            }
            Message::Close { id, gaps } => match self.open.remove(&id) {
                Some(open) => close(&self.config.dir, open, gaps),
                None => Ok(()),
            },
            Message::Stop => Ok(()),
        };
        self.current = None;
        done.unwrap_or_else(tell);
    }

    fn begin(&mut self, description: Description) -> io::Result<()> {
        let dir = &self.config.dir;
        std::fs::create_dir_all(dir)?;
        let key = self.key.as_ref().filter(|_| description.encrypted);
        let file = Stereo::create(&dir.join(description.file_name()), description.format, key)?;
        describe(dir, &description)?;
        self.open.insert(description.id.clone(), Open { description, file, written: 0 });
        Ok(())
    }

    /// Deletes what is older than `keep_days`, as far as the wall clock can be trusted with that.
    fn tidy(&mut self, now: Instant, wall: Duration) {
        let due = self.tidied.is_none_or(|at| now.saturating_duration_since(at) >= TIDY);
        let days = self.keep_days.load(Ordering::Relaxed);
        if days == 0 || !due {
            return;
        }
        self.tidied = Some(now);
        let Some(today) = self.age.trusted(now, wall) else { return };
        match forget(&self.config.dir, SystemTime::UNIX_EPOCH + today, DAY * days) {
            Ok(0) => {}
            Ok(files) => tracing::info!(files, "old recordings were deleted"),
            Err(error) => tracing::warn!(%error, "old recordings were not deleted"),
        }
    }
}

impl Open {
    fn push(&mut self, skipped: usize, pcm: &[i16]) -> io::Result<()> {
        let mut left = skipped;
        while left > 0 {
            let now = left.min(SILENCE);
            self.file.push(&vec![0; now])?;
            left -= now;
        }
        self.file.push(pcm)?;
        self.written += (skipped + pcm.len()) as u64 / 2;
        Ok(())
    }
}

fn close(dir: &Path, open: Open, gaps: bool) -> io::Result<()> {
    let Open { mut description, file, written } = open;
    file.finish()?;
    description.duration_ms = Some(written * 1_000 / u64::from(RATE));
    description.gaps |= gaps;
    describe(dir, &description)
}

/// Writes the description of a recording, whole or not at all.
fn describe(dir: &Path, description: &Description) -> io::Result<()> {
    replace(&described(dir, &description.id), &serde_json::to_vec(description)?)
}

/// Deletes recordings, and nothing else that lies there, which have not been written to for `keep`.
pub(super) fn forget(dir: &Path, now: SystemTime, keep: Duration) -> io::Result<usize> {
    let entries = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        entries => entries?,
    };
    let mut deleted = 0;
    for entry in entries {
        let path = entry?.path();
        // The folder may be one that others use: what has the name of a call is ours.
        let parts = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.split_once('.'));
        const ENDS: [&str; 5] = ["opus", "wav", "json", "opus.enc", "wav.enc"];
        let ours = parts.is_some_and(|(name, end)| is_call(name) && ENDS.contains(&end));
        let written = std::fs::metadata(&path).and_then(|file| file.modified());
        let old = written.is_ok_and(|at| now.duration_since(at).is_ok_and(|age| age > keep));
        if ours && old {
            std::fs::remove_file(&path)?;
            deleted += 1;
        }
    }
    Ok(deleted)
}

/// Whether `name` is an id that the gateway gives to calls.
fn is_call(name: &str) -> bool {
    name.len() == 32 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn tell(error: io::Error) {
    static LINES: Sparse = Sparse::new();
    counter!("antiphon_recording_errors_total").increment(1);
    if let Some(missed) = LINES.admit(clock::now()) {
        tracing::error!(%error, missed, "a recording cannot be written");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_jumps_ten_days_deletes_nothing() {
        let dir = tempfile::tempdir().expect("a folder");
        let file = dir.path().join(format!("{}.opus", "0123456789abcdef".repeat(2)));
        std::fs::write(&file, b"x").expect("written");
        let config = Config { dir: dir.path().to_owned(), keep_days: 7, ..Config::default() };
        let (start, wall, ten) = (clock::now(), clock::wall(), DAY * 10);
        let keep_days = Arc::new(AtomicU32::new(config.keep_days));
        let mut writer = Writer::new(config, keep_days, None);
        for jumped in [wall, wall + ten, wall - ten, wall] {
            // Looked at each time, though no hour has passed.
            writer.tidied = None;
            writer.tidy(start, jumped);
            assert!(file.exists(), "{jumped:?} in place of {wall:?}");
        }
        // From the earliest reading on ages are counted by what has passed: too long is better than too short.
        for (days, there) in [(6, true), (16, true), (18, false)] {
            writer.tidied = None;
            writer.tidy(start + DAY * days, wall + DAY * days);
            assert_eq!(file.exists(), there, "after {days} days on both clocks");
        }
    }
}
