//! Phrases on disk: one file each, owned by one thread.
//!
//! A file is the magic, the key, how many samples and words there are, the samples (32-bit floats), the words (bytes of the
//! text, samples), and a SHA-256 of all that; little-endian. It is written beside its place and then renamed, so that
//! what has its name is whole; what a disk made of it since then shows in the hash. When it was used last is its time of
//! modification.

use std::collections::HashMap;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime};

use sha2::{Digest, Sha256};

use super::{LONGEST, Shared, give};
use crate::clock;
use crate::file::replace;
use crate::synth::device::{Inner, Meter};
use crate::synth::identity::Key;
use crate::turn::{SpeechEvent, SpeechSink, Utterance, UtteranceEnd, WordEnd, WordTimes};
use crate::voice::file::hex;

const MAGIC: &[u8; 8] = b"PHRASE01";
/// Magic, key, and the two counts.
const HEAD: usize = 8 + 32 + 8;
const HASH: usize = 32;
/// Bytes of a word.
const WORD: usize = 16;
/// Words of a phrase at most: a minute has some two hundred.
const MOST_WORDS: usize = 4_096;
const ENDING: &str = "phrase";
/// How long a phrase waits for the times of its words before it is written without.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often it is looked whether they are there.
const LOOK: Duration = Duration::from_millis(250);

/// What the thread is to do.
pub(super) enum Order {
    /// Keep this.
    Write { key: Key, pcm: Arc<[f32]>, words: WordTimes },
    /// Give this to its sink; a device is to speak it where that cannot be.
    Read { key: Key, utterance: Box<Utterance>, sink: SpeechSink, engine: Weak<Inner>, meter: Arc<Meter> },
    /// It was used.
    Used(Key),
}

/// A file.
struct Entry {
    size: u64,
    used: SystemTime,
}

/// A phrase that waits for the times of its words.
struct Waiting {
    until: Instant,
    key: Key,
    pcm: Arc<[f32]>,
    words: WordTimes,
}

/// Owns the folder.
pub(super) struct Keeper {
    dir: PathBuf,
    /// Bytes of all files at most.
    limit: u64,
    shared: Arc<Shared>,
    files: HashMap<Key, Entry>,
    bytes: u64,
    waiting: Vec<Waiting>,
    /// What went wrong was told.
    told: bool,
}

impl Keeper {
    pub(super) fn new(dir: PathBuf, limit: u64, shared: Arc<Shared>) -> Self {
        Self { dir, limit, shared, files: HashMap::new(), bytes: 0, waiting: Vec::new(), told: false }
    }

    /// The body of the thread, until there are no more orders.
    pub(super) fn run(mut self, inbox: &Receiver<Order>) {
        self.scan();
        loop {
            let order = match self.waiting.is_empty() {
                true => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
                false => inbox.recv_timeout(LOOK),
            };
            match order {
                Ok(order) => self.obey(order),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return self.write_due(None),
            }
            self.write_due(Some(clock::now()));
        }
    }

    /// Finds what is there. What is no phrase is left alone, but for what a crash left half written.
    fn scan(&mut self) {
        let Ok(entries) = fs::read_dir(&self.dir) else { return };
        for path in entries.flatten().map(|entry| entry.path()) {
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
            if name.ends_with(".part") {
                let _ = fs::remove_file(&path);
                continue;
            }
            let (Some(key), Ok(metadata)) = (key_of(name), path.metadata()) else { continue };
            let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            self.bytes += metadata.len();
            self.files.insert(key, Entry { size: metadata.len(), used });
        }
        self.make_room(0);
        self.shared.table().stored.extend(self.files.keys());
        self.measure();
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Write { key, pcm, words } => {
                self.waiting.push(Waiting { until: clock::now() + PATIENCE, key, pcm, words });
            }
            Order::Used(key) => self.touch(&key),
            Order::Read { key, utterance, sink, engine, meter } => {
                match self.read(&key) {
                    Ok((pcm, words)) => {
                        let times = WordTimes::default();
                        if !words.is_empty() {
                            times.tell(words);
                        }
                        let given = give(&pcm, times.known(), &utterance, &sink, &meter);
                        self.touch(&key);
                        self.shared.insert(key, pcm.into(), times);
                        if given {
                            return;
                        }
                    }
                    Err(error) => {
                        tracing::warn!(%error, file = %self.path(&key).display(), "a kept phrase is spoken anew");
                        self.drop_file(&key);
                    }
                }
                let (id, class) = (utterance.id, utterance.class);
                let refused = engine.upgrade().and_then(|engine| engine.speak_anew(&utterance, &sink).err());
                if let Some(refused) = refused {
                    let how = UtteranceEnd::Refused { retry_after: refused.retry_after };
                    metrics::counter!("voice_requests_total", "class" => class.label(), "outcome" => how.label())
                        .increment(1);
                    // overflow: a sink that takes nothing any more belongs to a listener that is gone
                    let _ = sink.try_send(SpeechEvent::End { utterance: id, how });
                }
            }
        }
    }

    /// Writes what has its words, or has waited long enough; `None`: everything.
    fn write_due(&mut self, now: Option<Instant>) {
        let is_due = |waiting: &Waiting| {
            waiting.words.known().is_some() || !waiting.words.is_kept() || now.is_none_or(|now| now >= waiting.until)
        };
        let due: Vec<Waiting> = self.waiting.extract_if(.., |waiting| is_due(waiting)).collect();
        for Waiting { key, pcm, words, .. } in due {
            match self.write(&key, &pcm, words.known().unwrap_or_default()) {
                Ok(()) => self.told = false,
                Err(error) if !std::mem::replace(&mut self.told, true) => {
                    tracing::warn!(%error, dir = %self.dir.display(), "phrases cannot be written: they are kept in memory");
                }
                Err(_) => {}
            }
        }
    }

    fn write(&mut self, key: &Key, pcm: &[f32], words: &[WordEnd]) -> io::Result<()> {
        let bytes = encode(key, pcm, words);
        let size = bytes.len() as u64;
        if size > self.limit {
            return Ok(());
        }
        // What callers are told may be private.
        DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
        self.make_room(size);
        let path = self.path(key);
        replace(&path, &bytes)?;
        let old = self.files.insert(*key, Entry { size, used: SystemTime::UNIX_EPOCH + clock::wall() });
        self.bytes = self.bytes + size - old.map_or(0, |old| old.size);
        self.shared.table().stored.insert(*key);
        self.measure();
        Ok(())
    }

    fn read(&self, key: &Key) -> io::Result<(Vec<f32>, Vec<WordEnd>)> {
        let file = File::open(self.path(key))?;
        let mut bytes = Vec::new();
        let longest = HEAD + (LONGEST + RATE_SLACK) * 4 + MOST_WORDS * WORD + HASH;
        file.take(longest as u64 + 1).read_to_end(&mut bytes)?;
        decode(key, &bytes).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the file is damaged"))
    }

    /// Drops what was used longest ago until so many bytes more fit.
    fn make_room(&mut self, size: u64) {
        if self.bytes + size <= self.limit {
            return;
        }
        let mut by_use: Vec<(SystemTime, Key)> = self.files.iter().map(|(key, entry)| (entry.used, *key)).collect();
        by_use.sort();
        for (_, key) in by_use {
            if self.bytes + size <= self.limit {
                return;
            }
            self.drop_file(&key);
        }
    }

    fn drop_file(&mut self, key: &Key) {
        let _ = fs::remove_file(self.path(key));
        if let Some(old) = self.files.remove(key) {
            self.bytes -= old.size;
        }
        self.shared.table().stored.remove(key);
        self.measure();
    }

    fn touch(&mut self, key: &Key) {
        let Some(entry) = self.files.get_mut(key) else { return };
        entry.used = SystemTime::UNIX_EPOCH + clock::wall();
        // Only which goes first after a restart depends on it.
        let _ = File::options()
            .write(true)
            .open(self.dir.join(name_of(key)))
            .and_then(|file| file.set_modified(entry.used));
    }

    fn path(&self, key: &Key) -> PathBuf {
        self.dir.join(name_of(key))
    }

    fn measure(&self) {
        metrics::gauge!("antiphon_phrase_bytes", "place" => "disk").set(self.bytes as f64);
    }
}

/// The last chunk of a phrase may go beyond its limit.
const RATE_SLACK: usize = 60 * crate::audio::RATE as usize;

fn name_of(key: &Key) -> String {
    format!("{}.{ENDING}", hex(key))
}

fn key_of(name: &str) -> Option<Key> {
    let path = Path::new(name);
    let stem = path.file_stem()?.to_str().filter(|stem| stem.len() == 64 && stem.is_ascii())?;
    if path.extension()? != ENDING {
        return None;
    }
    let mut key = [0; 32];
    for (byte, at) in key.iter_mut().zip((0..64).step_by(2)) {
        *byte = u8::from_str_radix(stem.get(at..at + 2)?, 16).ok()?;
    }
    Some(key)
}

pub(super) fn encode(key: &Key, pcm: &[f32], words: &[WordEnd]) -> Vec<u8> {
    let words = &words[..words.len().min(MOST_WORDS)];
    let mut bytes = Vec::with_capacity(HEAD + pcm.len() * 4 + words.len() * WORD + HASH);
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(key);
    bytes.extend_from_slice(&(pcm.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&(words.len() as u32).to_le_bytes());
    pcm.iter().for_each(|sample| bytes.extend_from_slice(&sample.to_le_bytes()));
    for word in words {
        bytes.extend_from_slice(&(word.text as u64).to_le_bytes());
        bytes.extend_from_slice(&word.samples.to_le_bytes());
    }
    let hash = Sha256::digest(&bytes);
    bytes.extend_from_slice(&hash);
    bytes
}

pub(super) fn decode(key: &Key, bytes: &[u8]) -> Option<(Vec<f32>, Vec<WordEnd>)> {
    let (body, hash) = bytes.split_at_checked(bytes.len().checked_sub(HASH)?)?;
    if Sha256::digest(body)[..] != *hash {
        return None;
    }
    let (head, rest) = body.split_at_checked(HEAD)?;
    if head[..8] != *MAGIC || head[8..40] != *key {
        return None;
    }
    let count = |at: usize| Some(u32::from_le_bytes(head.get(at..at + 4)?.try_into().ok()?) as usize);
    let (samples, words) = (count(40)?, count(44)?);
    let (pcm, rest) = rest.split_at_checked(samples.checked_mul(4)?)?;
    if rest.len() != words.checked_mul(WORD)? {
        return None;
    }
    let (floats, _) = pcm.as_chunks::<4>();
    let (ends, _) = rest.as_chunks::<WORD>();
    let word = |bytes: &[u8; WORD]| {
        let half = |from: usize| Some(u64::from_le_bytes(bytes.get(from..from + 8)?.try_into().ok()?));
        Some(WordEnd { text: usize::try_from(half(0)?).ok()?, samples: half(8)? })
    };
    Some((floats.iter().map(|four| f32::from_le_bytes(*four)).collect(), ends.iter().map(word).collect::<Option<_>>()?))
}
