//! Phrases that were spoken before, kept in memory and on disk, so that they need no device.
//!
//! Lies between who wants an utterance spoken and the devices, so that calls, requests and batch jobs all have it. A
//! phrase that is kept goes to its sink at once and in one piece, with the times of its words; how fast it is played is
//! the listener's, as with any audio that was made ahead. It may be there before an earlier utterance of its stream has
//! been made: a speaker of several tells them apart by their ids.
//!
//! # Why
//! - **The key is everything that decides the samples** ([`Identity`]): text as it is said, voice and model by content,
//!   seed, settings, device, and this build of the program. What is kept is what the device gave, to the bit. Seeds are fixed
//!   (0, or what a request says), so that a second synthesis would give the same; on a GPU without `[engine] invariant` only
//!   as far as that setting goes: the last bits there depend on what else is spoken.
//! - **By default only the phrases of the configuration are kept** ([`Keep::Fixed`]): greetings, apologies, consent. An
//!   agent's sentences seldom come twice, and capacity that was measured with a repeated text would be a cache's.
//! - **The disk is another thread's**: calls' tasks look into memory only. Whatever is wrong with a file, the device
//!   speaks instead, and the file goes.

mod disk;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use serde::{Deserialize, Serialize};

use self::disk::Order;
use super::{Inner, Meter, lock};
use crate::audio::{RATE, duration_of};
use crate::synth::identity::Key;
use crate::turn::{SpeechEvent, SpeechSink, Utterance, UtteranceEnd, WordTimes};

/// Longest phrase that is kept, in samples: a minute.
const LONGEST: usize = 60 * RATE as usize;
/// What the disk's thread has not done yet.
const ORDERS: usize = 64;

/// `[engine.phrases]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Which phrases are kept.
    pub keep: Keep,
    /// Their folder; in the configuration, empty: `phrases` in the state directory.
    pub dir: PathBuf,
    /// Bytes in memory at most, MiB: ten seconds of speech are about one.
    pub memory_mib: u32,
    /// Bytes on disk at most, MiB; 0: nothing is written.
    pub disk_mib: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self { keep: Keep::Fixed, dir: PathBuf::new(), memory_mib: 64, disk_mib: 512 }
    }
}

/// Which phrases are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Keep {
    /// None.
    Off,
    /// Those that the configuration names.
    #[default]
    Fixed,
    /// Every utterance of up to a minute, as long as there is room.
    All,
}

/// The phrases of an engine.
pub(super) struct Phrases {
    keep: Keep,
    shared: Arc<Shared>,
    meter: Arc<Meter>,
    /// None: nothing is written.
    disk: Option<SyncSender<Order>>,
}

/// What calls and the disk's thread share.
struct Shared {
    table: Mutex<Table>,
    /// Bytes.
    memory: usize,
}

#[derive(Default)]
struct Table {
    kept: HashMap<Key, Kept>,
    /// By when each was used last.
    order: BTreeMap<u64, Key>,
    uses: u64,
    bytes: usize,
    /// Phrases of the configuration.
    fixed: HashSet<Key>,
    /// What is on disk, as far as its thread has told.
    stored: HashSet<Key>,
}

#[derive(Clone)]
struct Kept {
    pcm: Arc<[f32]>,
    /// Told once the voice knows.
    words: WordTimes,
    used: u64,
}

/// What there is of a phrase.
enum Found {
    Here(Kept),
    Stored,
    Nothing,
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }

    /// Keeps a phrase in memory; what was used longest ago makes room, phrases of the configuration last.
    fn insert(&self, key: Key, pcm: Arc<[f32]>, words: WordTimes) {
        let size = size_of_val(&*pcm);
        if size > self.memory {
            return;
        }
        let mut table = self.table();
        table.remove(&key);
        while table.bytes + size > self.memory {
            let oldest = table.order.values().find(|key| !table.fixed.contains(*key)).or(table.order.values().next());
            let Some(oldest) = oldest.copied() else { break };
            table.remove(&oldest);
        }
        table.uses += 1;
        let used = table.uses;
        table.order.insert(used, key);
        table.bytes += size;
        table.kept.insert(key, Kept { pcm, words, used });
        metrics::gauge!("antiphon_phrase_bytes", "place" => "memory").set(table.bytes as f64);
    }
}

impl Table {
    fn remove(&mut self, key: &Key) {
        if let Some(old) = self.kept.remove(key) {
            self.order.remove(&old.used);
            self.bytes -= size_of_val(&*old.pcm);
        }
    }

    fn find(&mut self, key: &Key) -> Found {
        self.uses += 1;
        let Some(kept) = self.kept.get_mut(key) else {
            return if self.stored.contains(key) { Found::Stored } else { Found::Nothing };
        };
        self.order.remove(&kept.used);
        kept.used = self.uses;
        self.order.insert(kept.used, *key);
        Found::Here(kept.clone())
    }
}

impl Phrases {
    /// None where nothing is to be kept.
    pub(super) fn start(config: &Config, meter: Arc<Meter>) -> Option<Arc<Self>> {
        if config.keep == Keep::Off {
            return None;
        }
        let memory = (config.memory_mib as usize) << 20;
        let shared = Arc::new(Shared { table: Mutex::default(), memory });
        let writes = config.disk_mib > 0 && !config.dir.as_os_str().is_empty();
        let disk = writes.then(|| {
            let (orders, inbox) = sync_channel(ORDERS);
            let keeper = disk::Keeper::new(config.dir.clone(), u64::from(config.disk_mib) << 20, shared.clone());
            let thread = std::thread::Builder::new().name("phrases".into());
            if let Err(error) = thread.spawn(move || keeper.run(&inbox)) {
                // The inbox is closed with it: orders are refused.
                tracing::warn!(%error, "phrases are kept in memory only");
            }
            orders
        });
        Some(Arc::new(Self { keep: config.keep, shared, meter, disk }))
    }

    /// Gives `utterance` to its sink, where it is kept. `false`: it is not, or its sink has no room for it; a device is to
    /// speak it. `engine` does so, too, where a file turns out to be damaged.
    pub(super) fn speak(&self, key: Key, utterance: &Utterance, sink: &SpeechSink, engine: &Weak<Inner>) -> bool {
        let found = self.shared.table().find(&key);
        let given = match found {
            Found::Here(kept) => {
                self.order(Order::Used(key));
                give(&kept.pcm, kept.words.known(), utterance, sink, &self.meter)
            }
            Found::Stored => self.order(Order::Read {
                key,
                utterance: Box::new(utterance.clone()),
                sink: sink.clone(),
                engine: engine.clone(),
                meter: self.meter.clone(),
            }),
            Found::Nothing => false,
        };
        let result = if given { "hit" } else { "miss" };
        metrics::counter!("antiphon_phrases_total", "result" => result).increment(1);
        given
    }

    fn order(&self, order: Order) -> bool {
        // overflow: refused, a device speaks it; what was to be written is not kept on disk, and what was used counts as
        // used earlier
        self.disk.as_ref().is_some_and(|disk| disk.try_send(order).is_ok())
    }

    /// What keeps `utterance` while a device speaks it, if it is to be kept.
    pub(super) fn record(self: &Arc<Self>, key: Key, utterance: &Utterance) -> Option<Recorder> {
        let table = self.shared.table();
        let fixed = table.fixed.contains(&key);
        if !(fixed || self.keep == Keep::All) || table.kept.contains_key(&key) {
            return None;
        }
        drop(table);
        // When words sound is found out for those who ask: a call, and phrases that calls will use.
        let words = if fixed || utterance.words.is_wanted() { utterance.words.clone() } else { WordTimes::default() };
        if fixed {
            words.keep();
        }
        Some(Recorder { phrases: self.clone(), key, pcm: Vec::new(), words })
    }

    /// Makes these the phrases of the configuration.
    pub(super) fn fix(&self, keys: HashSet<Key>) {
        self.shared.table().fixed = keys;
    }

    /// Whether a phrase is in memory.
    pub(super) fn has(&self, key: &Key) -> bool {
        self.shared.table().kept.contains_key(key)
    }
}

/// Keeps an utterance that a device speaks.
pub(in crate::synth) struct Recorder {
    phrases: Arc<Phrases>,
    key: Key,
    pcm: Vec<f32>,
    words: WordTimes,
}

impl Recorder {
    /// The next audio that its sink got.
    pub(super) fn hear(&mut self, pcm: &[f32]) {
        if self.pcm.len() <= LONGEST {
            self.pcm.extend_from_slice(pcm);
        }
    }

    /// It was spoken to its end.
    pub(super) fn keep(self) {
        if self.pcm.is_empty() || self.pcm.len() > LONGEST {
            return;
        }
        let pcm: Arc<[f32]> = self.pcm.into();
        self.phrases.shared.insert(self.key, pcm.clone(), self.words.clone());
        self.phrases.order(Order::Write { key: self.key, pcm, words: self.words });
    }
}

/// Hands a phrase to the sink of `utterance`; `false`: it has no room.
fn give(
    pcm: &[f32],
    words: Option<&[crate::turn::WordEnd]>,
    utterance: &Utterance,
    sink: &SpeechSink,
    meter: &Meter,
) -> bool {
    // overflow: refused, a device speaks it
    let Ok(mut places) = sink.try_reserve_many(2) else { return false };
    let id = utterance.id;
    let how = if utterance.token.is_stale() { UtteranceEnd::Cancelled } else { UtteranceEnd::Done };
    metrics::counter!("voice_requests_total", "class" => utterance.class.label(), "outcome" => how.label())
        .increment(1);
    if how == UtteranceEnd::Done {
        if let Some(words) = words {
            utterance.words.tell(words.to_vec());
        }
        let audio = duration_of(pcm.len() as u64);
        meter.add(&utterance.tenant, utterance.class, utterance.text.chars().count(), audio);
        if let Some(place) = places.next() {
            place.send(SpeechEvent::Audio { utterance: id, pcm: pcm.to_vec() });
        }
    }
    if let Some(place) = places.next() {
        place.send(SpeechEvent::End { utterance: id, how });
    }
    true
}

#[cfg(test)]
mod tests;
