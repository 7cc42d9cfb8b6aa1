//! The speech engine: one thread a device, each with a loaded voice and its scheduler, behind one handle.
//!
//! Owns the placement of streams: a new turn goes to the device with its voice on which it will sound first
//! ([`by_suitability`]); a stream that has work stays where it is. What happens on a device is [`worker`]'s; what is next is [`crate::sched`]'s.
//!
//! # Failures
//! What ends one utterance ends only that. What ends a device ([`SynthError::Device`], or a panic inside a voice) ends
//! every utterance on it with the reason, and none elsewhere; its streams go to other devices with their next
//! utterance. The device's model is dropped and loaded again, after a pause that doubles from failure to failure up
//! to [`Recovery::most`] and begins anew once the device has worked for as long as that. A device that says at
//! its first load that it cannot run the voice ([`SynthError::Unusable`]) is not tried again.
//!
//! # Why
//! - **Scheduler and synthesizer share a thread**: no batching task, no queue task and no reply channel lie
//!   between the decision and the device call.
//! - **The scheduler is behind a mutex, not behind the thread's inbox**: a submission is accepted or refused
//!   at once, also while the thread is inside a long step. The thread holds the lock only to plan and to record
//!   (microseconds), never while it computes; a submitter holds it as briefly.

mod abilities;
mod awaited;
mod changes;
pub mod cycle;
mod delivery;
mod feed;
mod hub;
mod meter;
pub mod phrases;
mod place;
pub mod remote;
mod spent;
mod timeline;
mod trace;
mod worker;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use tokio::sync::watch;

use self::awaited::Awaited;
use self::hub::Hub;
pub use self::meter::{Meter, Spoken};
use self::phrases::{Phrases, Recorder};
use self::place::{Device, Devices, Local, has_voice, preferred, serves, suitable};
use self::remote::link::{Link, Worker};
pub use self::spent::{Spent, Steps};
pub use self::timeline::{StepRun, Timeline};
use self::worker::Shared;
use super::identity::Key;
use super::{Caps, Memory, SynthError, Synthesizer, VoiceInfo};
use crate::clock;
use crate::sched::{Config, Load, PerStage, Quotas};
pub use crate::sched::{Refused, RefusedReason, StreamNote};
use crate::turn::{Class, Saying, SpeechSink, StreamId, Utterance, UtteranceId};
use crate::voice::copies::{Library, is_content};

/// Loads one voice onto one device; called on the device's own thread, once at the start and again after each failure.
pub type Loader = Box<dyn Fn() -> Result<Box<dyn Synthesizer>, SynthError> + Send>;

/// How long a failed device rests before its voice is loaded again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recovery {
    /// After the first failure; twice as long after each further one.
    pub first: Duration,
    /// At most. A device that has worked for as long as this starts over from `first`.
    pub most: Duration,
    /// How long a step may take before its device is given up, where the device is not that slow.
    pub hangs: Duration,
}

impl Default for Recovery {
    fn default() -> Self {
        Self { first: Duration::from_secs(1), most: Duration::from_secs(60), hangs: Duration::from_secs(10) }
    }
}

impl Recovery {
    /// The pause after failure number `streak` in a row, counted from 1.
    fn pause(&self, streak: u32) -> Duration {
        let doublings = streak.saturating_sub(1).min(30);
        self.first.saturating_mul(1 << doublings).min(self.most)
    }
}

/// What clients are told to wait while no device is ready.
const LOADING: Duration = Duration::from_secs(2);
/// The longest that a caller waits for devices to look for voices.
const REFRESHED: Duration = Duration::from_secs(5);
/// Placements remembered before those of forgotten streams are dropped.
const PLACEMENTS: usize = 4096;
/// Numbers of the devices of this machine begin here; workers have smaller ones, for they come first.
const LOCAL: usize = usize::MAX / 2;

/// Whether a device can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The model is being read and warmed up.
    Loading,
    /// It speaks.
    Ready,
    /// It does not work, and why. It is loaded again after a while ([`DeviceStatus::retry_in`]), or never.
    Failed(String),
    /// It was shut down.
    Stopped,
}

/// What one device is and does, for people, metrics and placement.
#[derive(Clone, Debug)]
pub struct DeviceStatus {
    /// What the voice can do; `None` until it is loaded.
    pub caps: Option<Caps>,
    /// Whether it can be used.
    pub phase: Phase,
    /// Jobs, predicted load, slack.
    pub load: Load,
    /// Device memory of utterances.
    pub memory: Memory,
    /// Everything that its memory is used for; see [`Synthesizer::memory_parts`].
    pub parts: Vec<(&'static str, u64)>,
    /// Audio made since the start, in samples.
    pub produced: u64,
    /// Where its time went.
    pub spent: Spent,
    /// Whether its thread has not come back from a step: it may, but only a new process is sure to have it again.
    pub hangs: bool,
    /// How often it failed since the start.
    pub failures: u32,
    /// Time until a failed device is loaded again; `None` also where that is no use.
    pub retry_in: Option<Duration>,
    /// Predicted seconds of the narrowest step.
    pub step_seconds: PerStage<f64>,
}

/// A handle to all devices. Dropping the last one stops them.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

struct Inner {
    /// Replaced as a whole when a worker comes or goes, so that no reader waits.
    devices: RwLock<Arc<Devices>>,
    /// How many workers the configuration names: they stay.
    configured: usize,
    hub: Hub,
    /// Voices that workers are sent; not set: none are.
    library: Arc<OnceLock<Library>>,
    awaited: Awaited,
    /// Where each stream speaks. Locked before any device, never the other way round.
    placements: Mutex<HashMap<StreamId, Placement>>,
    meter: Arc<Meter>,
    /// What tenants have taken of their limits here.
    quotas: Arc<Quotas>,
    /// What is kept of what was spoken; not set: nothing.
    phrases: OnceLock<Arc<Phrases>>,
    /// Dropped, it ends the watch over devices that hang.
    _watch: std::sync::mpsc::SyncSender<()>,
}

#[derive(Clone, Copy)]
struct Placement {
    device: usize,
    /// Said once, when the stream began; a device that the stream comes to later has to be told.
    unpaced: bool,
}

/// What made the beginning of an utterance.
#[derive(Clone, Debug)]
pub(super) struct Sound {
    /// The kind of the voice.
    pub(super) kind: &'static str,
    /// Its model, where that is known.
    pub(super) model: Option<String>,
}

/// Speaks what another device has left unfinished.
pub(super) trait Respeak: Send + Sync {
    /// Has a device that sounds like this speak `utterance` from its beginning; `None`: any that has its voice. `text` is asked
    /// once one does: what was written behind the first piece, and whether each is the last; nothing may be written meanwhile.
    ///
    /// # Errors
    /// None can.
    fn respeak(
        &self,
        like: Option<Sound>,
        utterance: Utterance,
        text: &dyn Fn() -> Vec<(Saying, bool)>,
        sink: SpeechSink,
    ) -> Result<(), Refused>;
}

impl Engine {
    /// Starts one thread for each loader and returns at once; see [`Engine::ready`].
    ///
    /// # Errors
    /// There is no loader, the configuration is not valid, or a thread cannot be started.
    pub fn start(loaders: Vec<Loader>, config: Config) -> Result<Self, SynthError> {
        Self::start_with(loaders, config, Recovery::default())
    }

    /// As [`Engine::start`], with pauses of one's own after failures.
    ///
    /// # Errors
    /// As [`Engine::start`].
    pub fn start_with(loaders: Vec<Loader>, config: Config, recovery: Recovery) -> Result<Self, SynthError> {
        Self::start_with_workers(Vec::new(), loaders, config, recovery)
    }

    /// As [`Engine::start_with`], with devices of other machines before those of this one: without a voice by name, what
    /// comes first speaks.
    ///
    /// # Errors
    /// As [`Engine::start`].
    pub fn start_with_workers(
        workers: Vec<Worker>,
        loaders: Vec<Loader>,
        config: Config,
        recovery: Recovery,
    ) -> Result<Self, SynthError> {
        if loaders.is_empty() && workers.is_empty() {
            return Err(SynthError::Device("no voice is configured".into()));
        }
        config.validate().map_err(|e| SynthError::Input(format!("[scheduler] {e}")))?;
        let (mut devices, quotas, meter) = (Devices::new(), Arc::<Quotas>::default(), Arc::<Meter>::default());
        let mut watched = Vec::with_capacity(loaders.len());
        for (index, loader) in loaders.into_iter().enumerate() {
            let (tell, phase) = watch::channel(Phase::Loading);
            let tell = Arc::new(tell);
            let shared = Arc::new(Shared::new(quotas.clone(), meter.clone()));
            let (theirs, config) = (shared.clone(), config.clone());
            watched.push((shared.clone(), tell.clone()));
            let thread = std::thread::Builder::new()
                .name(format!("device-{index}"))
                .spawn(move || worker::run(&theirs, index, &loader, &config, recovery, &tell))
                .map_err(|e| SynthError::Device(format!("no thread for device {index}: {e}")))?;
            let local = Local { shared, phase, thread: Mutex::new(Some(thread)) };
            devices.insert(LOCAL + index, Device::Local(Arc::new(local)));
        }
        let watch =
            worker::watch_over(watched, recovery.hangs).map_err(|e| SynthError::Device(format!("no thread: {e}")));
        let inner = Arc::new(Inner {
            devices: RwLock::new(Arc::new(devices)),
            configured: workers.len(),
            hub: Hub::default(),
            library: Arc::default(),
            awaited: Awaited::default(),
            placements: Mutex::default(),
            meter,
            quotas,
            phrases: OnceLock::new(),
            _watch: watch?,
        });
        for worker in workers {
            inner.connect(worker).map_err(SynthError::Device)?;
        }
        Ok(Self { inner })
    }

    /// Has workers speak with the voices of `library`, which are sent to those that have them not. Said once; later words have
    /// no effect.
    pub fn lend_voices(&self, library: Library) {
        let _ = self.inner.library.set(library);
    }

    /// Accepts or refuses `utterance` at once; its events go to `sink`. Never blocks on a device.
    ///
    /// # Errors
    /// No device is ready, or accepting would break a promise already made.
    pub fn submit(&self, utterance: Utterance, sink: SpeechSink) -> Result<(), Refused> {
        if let Some(taken) = self.inner.awaits(&utterance, &sink) {
            return taken;
        }
        let spoken = self
            .inner
            .phrase(&utterance)
            .is_some_and(|(phrases, key)| phrases.speak(key, &utterance, &sink, &Arc::downgrade(&self.inner)));
        if spoken { Ok(()) } else { self.inner.speak_anew(&utterance, &sink) }
    }

    /// Goes on with the text of a streamed utterance that was taken; behind the `last` piece none follows. A piece ends
    /// where a word does. One that is over is ignored.
    pub fn append(&self, stream: StreamId, utterance: UtteranceId, said: &Saying, last: bool) {
        let devices = self.inner.devices();
        // Held until it is taken: an utterance that moves to another device takes all of its text there, or none of this.
        let placements = lock(&self.inner.placements);
        if let Some(device) = placements.get(&stream).and_then(|placement| devices.get(&placement.device)) {
            device.append(utterance, said, last);
        }
    }

    /// Has devices of this machine that sleep wake up for an utterance that comes within a millisecond. Never blocks.
    pub fn rouse(&self) {
        self.inner.devices().values().for_each(Device::rouse);
    }

    /// Whether a new live stream would be taken on now, by some device.
    ///
    /// # Errors
    /// None would, and when to ask again.
    pub fn has_room(&self) -> Result<(), Refused> {
        let mut refused = Refused { reason: RefusedReason::NotReady, retry_after: LOADING };
        for device in self.inner.devices().values() {
            match device.has_room() {
                Ok(()) => return Ok(()),
                Err(error) if error.reason != RefusedReason::NotReady => refused = error,
                Err(_) => {}
            }
        }
        Err(refused)
    }

    /// Follows the listener of `stream`. Unknown streams are ignored.
    pub fn note(&self, stream: StreamId, note: StreamNote) {
        let now = clock::now();
        let devices = self.inner.devices();
        let mut placements = lock(&self.inner.placements);
        let device = match (placements.get_mut(&stream), note) {
            (Some(placement), StreamNote::Closed) => {
                let device = placement.device;
                placements.remove(&stream);
                device
            }
            (Some(placement), note) => {
                placement.unpaced |= note == StreamNote::Unpaced;
                placement.device
            }
            // Said before the first utterance: the stream is placed now, so that it is known there.
            (None, StreamNote::Unpaced) => {
                let device = suitable(&devices, Class::Live, None, |_| true).first().copied();
                placements.insert(stream, Placement { device: device.unwrap_or_default(), unpaced: true });
                let Some(device) = device else { return };
                device
            }
            (None, _) => return,
        };
        if let Some(device) = devices.get(&device) {
            device.note(now, stream, note);
        }
    }

    /// Every voice of every device that is ready, without copies of other machines'; the first is the default.
    pub fn voices(&self) -> Vec<VoiceInfo> {
        let mut voices = self.voices_and_copies();
        voices.retain(|voice| !is_content(&voice.name));
        voices
    }

    /// As [`Engine::voices`], with copies, whose names are what they are.
    pub(crate) fn voices_and_copies(&self) -> Vec<VoiceInfo> {
        let mut voices: Vec<VoiceInfo> = Vec::new();
        for device in self.inner.devices().values() {
            for voice in device.voices() {
                if !voices.iter().any(|known| known.name == voice.name) {
                    voices.push(voice);
                }
            }
        }
        voices
    }

    /// What the model of the first device is that is ready, once that is known.
    pub fn model(&self) -> Option<String> {
        self.inner.devices().values().filter(|device| device.is_ready()).find_map(Device::model)
    }

    /// Voices of the first device that is ready and what each holds, the default first; none where a voice's name says all.
    pub(crate) fn contents(&self) -> Vec<(String, String)> {
        let devices = self.inner.devices();
        let first = devices.values().filter(|device| device.is_ready()).find_map(Device::identity);
        first.map(|identity| identity.voices().to_vec()).unwrap_or_default()
    }

    /// Keeps phrases from now on, as `config` says. Said once; later words have no effect.
    pub fn keep_phrases(&self, config: &phrases::Config) {
        if let Some(phrases) = Phrases::start(config, self.inner.meter.clone()) {
            let _ = self.inner.phrases.set(phrases);
        }
    }

    /// Makes `utterances` the phrases that are kept for good, and gives those that are not in memory: who has them spoken
    /// once, has them kept. `None`: some device cannot tell yet what it would say; ask again.
    pub fn fix_phrases(&self, utterances: &[Utterance]) -> Option<Vec<Utterance>> {
        let Some(phrases) = self.inner.phrases.get() else { return Some(Vec::new()) };
        let identities: Vec<_> = self.inner.devices().values().filter_map(Device::identity).collect();
        if identities.iter().any(|identity| !identity.is_known()) {
            return None;
        }
        let devices = self.inner.devices();
        let keys = utterances.iter().flat_map(|utterance| {
            let content = self.inner.content(utterance.voice.as_deref());
            devices.values().filter_map(move |device| device.key(utterance, content.as_deref()))
        });
        phrases.fix(keys.collect());
        let missing =
            |utterance: &&Utterance| self.inner.phrase(utterance).is_some_and(|(phrases, key)| !phrases.has(&key));
        Some(utterances.iter().filter(missing).cloned().collect())
    }

    /// What tenants have had of these devices.
    pub fn meter(&self) -> Arc<Meter> {
        self.inner.meter.clone()
    }

    /// What each device is and does.
    pub fn status(&self) -> Vec<DeviceStatus> {
        let now = clock::now();
        self.inner.devices().values().map(|device| device.status(now)).collect()
    }

    /// Waits until no device is loading for the first time, or again, any more. Cancel safe.
    pub async fn ready(&self) {
        let devices = self.inner.devices();
        for device in devices.values() {
            device.settled().await;
        }
    }

    /// Has every device look for new and removed voices. Returns when those that are ready have looked: within a
    /// step or two, at most after [`REFRESHED`]. A device that still loads looks when it is loaded.
    pub async fn refresh_voices(&self) {
        self.inner.refresh_voices().await;
    }

    /// Ends all work and joins the threads. Blocks for at most a step of each device: not for async code. A voice that
    /// is being loaded cannot be told to stop and is not waited for: its thread ends when it has loaded, or with the
    /// process.
    pub fn shutdown(self) {
        self.inner.stop();
        for device in self.inner.devices().values() {
            device.join();
        }
    }
}

impl Inner {
    fn devices(&self) -> Arc<Devices> {
        self.devices.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn change(&self, change: impl FnOnce(&mut Devices)) {
        let mut devices = self.devices.write().unwrap_or_else(PoisonError::into_inner);
        change(Arc::make_mut(&mut devices));
    }

    /// Makes a device of `worker`, behind those workers that there are.
    fn connect(self: &Arc<Self>, worker: Worker) -> Result<(), String> {
        let (link, connection) = Link::new(worker, self.meter.clone(), self.library.clone());
        let respeak: Arc<dyn Respeak> = self.clone();
        link.respeak_with(Arc::downgrade(&respeak));
        self.hub.run(connection)?;
        self.change(|devices| {
            let next = devices.range(..LOCAL).next_back().map_or(0, |(last, _)| last + 1);
            devices.insert(next, Device::Worker(link));
        });
        Ok(())
    }

    async fn refresh_voices(&self) {
        let looked: Vec<_> = self.devices().values().filter_map(Device::refresh).collect();
        // An error means that the device stopped meanwhile and speaks with no voice at all.
        let _ = tokio::time::timeout(REFRESHED, futures_util::future::join_all(looked)).await;
    }

    /// What `voice` is, where it is one of this machine's files.
    fn content(&self, voice: Option<&str>) -> Option<String> {
        self.library.get()?.content(voice?)
    }

    /// Has a device speak `utterance`, whether or not it is kept.
    fn speak_anew(&self, utterance: &Utterance, sink: &SpeechSink) -> Result<(), Refused> {
        let (devices, content) = (self.devices(), self.content(utterance.voice.as_deref()));
        let content = content.as_deref();
        self.submit(&devices, utterance, content, sink, None, |last| preferred(&devices, utterance, content, last))
    }

    /// Where phrases are kept, and the key of `utterance` on the device that would speak it.
    fn phrase(&self, utterance: &Utterance) -> Option<(&Arc<Phrases>, Key)> {
        let (phrases, devices) = (self.phrases.get()?, self.devices());
        let last = lock(&self.placements).get(&utterance.stream).map(|placement| placement.device);
        let content = self.content(utterance.voice.as_deref());
        let device = *preferred(&devices, utterance, content.as_deref(), last).first()?;
        Some((phrases, devices.get(&device)?.key(utterance, content.as_deref())?))
    }

    /// What keeps `utterance` while `device` speaks it, if it is to be kept.
    fn recorder(&self, device: &Device, utterance: &Utterance, content: Option<&str>) -> Option<Recorder> {
        let phrases = self.phrases.get()?;
        phrases.record(device.key(utterance, content)?, utterance)
    }

    /// Has one of `devices` speak `utterance`, whose voice is `content`; which to try in turn `order` says by where its stream
    /// spoke last. `again`: another device has begun it, what is spoken is not kept, and this was written on meanwhile.
    fn submit(
        &self,
        devices: &Devices,
        utterance: &Utterance,
        content: Option<&str>,
        sink: &SpeechSink,
        again: Option<&dyn Fn() -> Vec<(Saying, bool)>>,
        order: impl FnOnce(Option<usize>) -> Vec<usize>,
    ) -> Result<(), Refused> {
        let mut placements = lock(&self.placements);
        if placements.len() > PLACEMENTS {
            placements
                .retain(|stream, placement| devices.get(&placement.device).is_some_and(|device| device.knows(*stream)));
        }
        let stream = utterance.stream;
        let placement = placements.get(&stream).copied();
        let unpaced = placement.is_some_and(|placement| placement.unpaced);
        let mut refused = Refused { reason: RefusedReason::NotReady, retry_after: LOADING };
        for number in order(placement.map(|placement| placement.device)) {
            let Some(device) = devices.get(&number) else { continue };
            if unpaced && !device.knows(stream) {
                device.note(clock::now(), stream, StreamNote::Unpaced);
            }
            let recorder = if again.is_none() { self.recorder(device, utterance, content) } else { None };
            match device.submit(utterance, content, sink, recorder) {
                Ok(()) => {
                    placements.insert(stream, Placement { device: number, unpaced });
                    for (said, last) in again.map(|text| text()).unwrap_or_default() {
                        device.append(utterance.id, &said, last);
                    }
                    return Ok(());
                }
                Err(error) => refused = error,
            }
        }
        let class = utterance.class.label();
        metrics::counter!("voice_requests_total", "class" => class, "outcome" => "refused").increment(1);
        let reason = refused.reason.label();
        metrics::counter!("antiphon_refusals_total", "class" => class, "reason" => reason).increment(1);
        Err(refused)
    }

    fn stop(&self) {
        self.devices().values().for_each(Device::stop);
    }
}

impl Respeak for Inner {
    fn respeak(
        &self,
        like: Option<Sound>,
        utterance: Utterance,
        text: &dyn Fn() -> Vec<(Saying, bool)>,
        sink: SpeechSink,
    ) -> Result<(), Refused> {
        let (devices, content) = (self.devices(), self.content(utterance.voice.as_deref()));
        let (content, voice) = (content.as_deref(), utterance.voice.as_deref());
        // What it was given in pieces goes on in pieces.
        let streams = |device: &Device| {
            !utterance.streamed || device.starts_after(voice, content).is_none_or(|after| after.is_some())
        };
        let like = |device: &Device| match &like {
            Some(Sound { kind, model }) => {
                // Of another model the beginning would be as long as it likes, and the join would repeat or lose words.
                let other = matches!((model, device.model()), (Some(model), Some(its)) if *model != its);
                device.kind() == Some(*kind) && !other && has_voice(device, voice, content) && streams(device)
            }
            None => serves(&devices, device, voice, content) && streams(device),
        };
        // Its sink has a part of it already: what comes is not the whole.
        self.submit(&devices, &utterance, content, &sink, Some(text), |_| {
            suitable(&devices, utterance.class, None, like)
        })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A poisoned lock only says that another thread panicked; the state behind these is consistent between calls.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
