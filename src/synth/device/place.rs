//! A device as the engine sees it: a thread of this process, or a worker on another machine.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use tokio::sync::{oneshot, watch};

use super::phrases::Recorder;
use super::worker::Shared;
use super::{DeviceStatus, Phase, lock};
use crate::clock;
use crate::sched::{Load, Refused, StreamNote, by_suitability};
use crate::synth::device::remote::link::Link;
use crate::synth::identity::Key;
use crate::synth::{Identity, VoiceInfo};
use crate::turn::{Class, Saying, SpeechSink, StreamId, Utterance, UtteranceId};
use crate::voice::copies::copied;

/// Devices by their numbers, which stay while others come and go: workers as `[engine] workers` lists them, those that were
/// found, and last those of this machine.
pub(super) type Devices = BTreeMap<usize, Device>;

/// Clones mean the same.
#[derive(Clone)]
pub(super) enum Device {
    Local(Arc<Local>),
    Worker(Arc<Link>),
}

/// A device with a thread of its own.
pub(super) struct Local {
    pub(super) shared: Arc<Shared>,
    pub(super) phase: watch::Receiver<Phase>,
    pub(super) thread: Mutex<Option<JoinHandle<()>>>,
}

/// As [`super::Engine::starts_after`], of those that serve. A voice that none of them has yet is sent to the one with the fewest
/// streams meanwhile: who asks has a text for it.
pub(super) fn starts_after(serving: &[&Device], voice: Option<&str>, content: Option<&str>) -> Option<u32> {
    // What a worker will say of a voice that it has not been sent yet the others say.
    let told = serving.iter().filter_map(|device| device.starts_after(voice, content));
    let told = told.reduce(|all, one| Some(all?.max(one?)));
    if let (None, Some(voice), Some(content)) = (told, voice, content) {
        let live = |device: &&&Device| device.load(clock::now()).map_or(u32::MAX, |load| load.live);
        if let Some(device) = serving.iter().min_by_key(live) {
            device.expect_voice(voice, content);
        }
    }
    told.flatten()
}

impl Device {
    /// `recorder` keeps what is spoken; `content` is what the voice is, where that is known.
    pub(super) fn submit(
        &self,
        utterance: &Utterance,
        content: Option<&str>,
        sink: &SpeechSink,
        recorder: Option<Recorder>,
    ) -> Result<(), Refused> {
        match self {
            Device::Local(local) => {
                // Of another machine's voice there is a copy, unless there is one of this name.
                let copy = copy_of(utterance, content, &local.shared.state().voices);
                match copy {
                    Some(voice) => {
                        let utterance = Utterance { voice: Some(voice), ..utterance.clone() };
                        local.shared.submit(&utterance, sink, recorder)
                    }
                    None => local.shared.submit(utterance, sink, recorder),
                }
            }
            Device::Worker(link) => link.submit(utterance, content.filter(|_| link.takes_copies()), sink, recorder),
        }
    }

    /// Whether it has a copy of this voice.
    pub(super) fn has_copy(&self, content: &str) -> bool {
        match self {
            Device::Local(local) => local.shared.state().voices.iter().any(|voice| voice.name == content),
            Device::Worker(link) => link.has_copy(content),
        }
    }

    /// Whether it speaks with voices that are sent to it.
    pub(super) fn takes_copies(&self) -> bool {
        match self {
            Device::Local(_) => false,
            Device::Worker(link) => link.takes_copies(),
        }
    }

    /// Goes on with the text of a streamed utterance.
    pub(super) fn append(&self, utterance: UtteranceId, said: &Saying, last: bool) {
        match self {
            Device::Local(local) => local.shared.append(utterance, said, last),
            Device::Worker(link) => link.append(utterance, said, last),
        }
    }

    /// Text ids after which a text sounds in this voice that is still being written ([`VoiceInfo::starts_after`]). The outer
    /// `None`: it can be sent the voice, and has not told yet.
    pub(super) fn starts_after(&self, voice: Option<&str>, content: Option<&str>) -> Option<Option<u32>> {
        match self {
            Device::Local(local) => {
                let state = local.shared.state();
                let voices = &state.voices;
                let has = |name: &str| voices.iter().find(|known| known.name == name);
                let known = match voice {
                    Some(voice) => has(voice).or_else(|| has(content?)),
                    None => voices.first(),
                };
                Some(known.and_then(|known| known.starts_after))
            }
            Device::Worker(link) => link.starts_after(voice, content),
        }
    }

    /// Somebody is about to speak with a voice that only this machine has: it is sent there ahead of the first text.
    fn expect_voice(&self, voice: &str, content: &str) {
        match self {
            // What speaks here reads the file itself.
            Device::Local(_) => {}
            Device::Worker(link) => link.expect_voice(voice, content),
        }
    }

    /// As [`super::Engine::rouse`].
    pub(super) fn rouse(&self) {
        match self {
            Device::Local(local) => local.shared.rouse(),
            // It would be there no sooner than the utterance.
            Device::Worker(_) => {}
        }
    }

    pub(super) fn has_room(&self) -> Result<(), Refused> {
        match self {
            Device::Local(local) => local.shared.has_room(),
            Device::Worker(link) => link.has_room(),
        }
    }

    pub(super) fn note(&self, now: Instant, stream: StreamId, note: StreamNote) {
        match self {
            Device::Local(local) => local.shared.note(now, stream, note),
            Device::Worker(link) => link.note(stream, note),
        }
    }

    /// Whether it would miss the stream's notes.
    pub(super) fn knows(&self, stream: StreamId) -> bool {
        match self {
            Device::Local(local) => local.shared.knows(stream),
            Device::Worker(link) => link.has_work(stream),
        }
    }

    pub(super) fn has_work(&self, stream: StreamId) -> bool {
        match self {
            Device::Local(local) => local.shared.has_work(stream),
            Device::Worker(link) => link.has_work(stream),
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        match self {
            Device::Local(local) => local.shared.is_ready(),
            Device::Worker(link) => link.phase() == Phase::Ready,
        }
    }

    /// The kind of its voice, once that is known.
    pub(super) fn kind(&self) -> Option<&'static str> {
        match self {
            Device::Local(local) => local.shared.state().caps.as_ref().map(|caps| caps.name),
            Device::Worker(link) => link.kind(),
        }
    }

    /// What its model is, where that is known; see [`Identity::model`].
    pub(super) fn model(&self) -> Option<String> {
        match self {
            Device::Local(local) => local.shared.state().identity.as_ref()?.model(),
            Device::Worker(link) => link.model(),
        }
    }

    pub(super) fn voices(&self) -> Vec<VoiceInfo> {
        match self {
            Device::Local(local) => local.shared.state().voices.clone(),
            Device::Worker(link) => link.voices(),
        }
    }

    /// What decides how it sounds; `None`: it does not say.
    pub(super) fn identity(&self) -> Option<Arc<Identity>> {
        match self {
            Device::Local(local) => local.shared.state().identity.clone(),
            Device::Worker(link) => link.identity(),
        }
    }

    /// What names the sound of `utterance`, whose voice is `content`, on this device; see [`Identity::key`].
    pub(super) fn key(&self, utterance: &Utterance, content: Option<&str>) -> Option<Key> {
        let identity = self.identity()?;
        match (self, content) {
            // There the voice is a copy, whose name is what it holds; before it was sent nothing is known of it.
            (Device::Worker(link), Some(content)) if link.takes_copies() => {
                identity.key(&Utterance { voice: Some(content.to_owned()), ..utterance.clone() })
            }
            _ => identity.key(utterance),
        }
    }

    /// `None` unless it is ready.
    pub(super) fn load(&self, now: Instant) -> Option<Load> {
        match self {
            Device::Local(local) => Some(local.shared.state().sched.as_ref()?.load(now)),
            Device::Worker(link) => link.load(),
        }
    }

    pub(super) fn status(&self, now: Instant) -> DeviceStatus {
        let local = match self {
            Device::Local(local) => local,
            Device::Worker(link) => return link.status(),
        };
        let state = local.shared.state();
        DeviceStatus {
            caps: state.caps.clone(),
            phase: local.phase.borrow().clone(),
            load: state.sched.as_ref().map(|sched| sched.load(now)).unwrap_or_default(),
            memory: state.memory,
            parts: state.parts.clone(),
            produced: state.produced,
            spent: state.spent.clone(),
            hangs: state.hangs,
            failures: state.failures,
            retry_in: state.retry_at.map(|at| at.saturating_duration_since(now)),
            step_seconds: state.sched.as_ref().map(|sched| sched.step_seconds()).unwrap_or_default(),
        }
    }

    /// Waits until it is not loading any more. A worker is not waited for: its machine may be off for days.
    pub(super) async fn settled(&self) {
        if let Device::Local(local) = self {
            let mut phase = local.phase.clone();
            // An error means that the thread is gone, which is as settled as it gets.
            let _ = phase.wait_for(|phase| *phase != Phase::Loading).await;
        }
    }

    /// Has it look for new and removed voices; what is told when it has, if it is ready to look.
    pub(super) fn refresh(&self) -> Option<oneshot::Receiver<()>> {
        let (told, looked) = oneshot::channel();
        match self {
            Device::Local(local) => local.shared.poke(|state| {
                state.refresh.retain(|waiting| !waiting.is_closed());
                state.refresh.push(told);
            }),
            Device::Worker(link) => link.refresh(told),
        }
        self.is_ready().then_some(looked)
    }

    pub(super) fn stop(&self) {
        match self {
            Device::Local(local) => local.shared.poke(|state| state.stop = true),
            Device::Worker(link) => link.stop(),
        }
    }

    /// Waits for the thread of a device that was told to stop.
    pub(super) fn join(&self) {
        let Device::Local(local) = self else { return };
        let Some(thread) = lock(&local.thread).take() else { return };
        // Told to stop, a device that is not loading now does not begin to, unless it was just about to. One that hangs is not
        // waited for.
        if *local.phase.borrow() != Phase::Loading && !local.shared.state().hangs {
            // A device thread that panicked has said so in its phase.
            let _ = thread.join();
        }
    }
}

/// By what a device with these voices calls the voice of `utterance`, where it has it as a copy only.
fn copy_of(utterance: &Utterance, content: Option<&str>, voices: &[VoiceInfo]) -> Option<String> {
    let (name, content) = (utterance.voice.as_deref()?, content?);
    let has = |name: &str| voices.iter().any(|voice| voice.name == name);
    (!has(name) && has(content)).then(|| copied(name, content))
}

/// The devices to try, best first. A stream with work stays where it is, whatever else happens: its utterances are
/// heard in order.
pub(super) fn preferred(
    devices: &Devices,
    utterance: &Utterance,
    content: Option<&str>,
    last: Option<usize>,
) -> Vec<usize> {
    let working = |number: &usize| devices.get(number).is_some_and(|device| device.has_work(utterance.stream));
    if let Some(number) = last.filter(working) {
        return vec![number];
    }
    let serving =
        suitable(devices, utterance.class, last, |device| serves(devices, device, utterance.voice.as_deref(), content));
    if !serving.is_empty() {
        return serving;
    }
    // No device has that voice: any of them gives the error that names those there are.
    suitable(devices, utterance.class, last, |_| true)
}

/// Whether `device` has the voice; without a name, whether it is of the kind that comes first.
pub(super) fn serves(devices: &Devices, device: &Device, voice: Option<&str>, content: Option<&str>) -> bool {
    if voice.is_none() {
        let first = devices.values().filter(|device| device.is_ready()).find_map(Device::kind);
        return device.kind() == first;
    }
    has_voice(device, voice, content)
}

/// Whether `device` has the voice of this name, or can be sent it; without one, yes.
pub(super) fn has_voice(device: &Device, voice: Option<&str>, content: Option<&str>) -> bool {
    let Some(voice) = voice else { return true };
    if content.is_some_and(|content| device.takes_copies() || device.has_copy(content)) {
        return true;
    }
    // `en+f3` is a variant of `en`.
    let base = voice.split('+').next().unwrap_or(voice);
    let has = |known: &VoiceInfo| known.name == voice || known.name.eq_ignore_ascii_case(base);
    device.voices().iter().any(has)
}

/// Languages that the model of CosyVoice3 speaks in any voice, by its authors' word.
const OF_COSYVOICE3: [&str; 10] = ["zh", "cmn", "en", "ja", "ko", "de", "es", "fr", "it", "ru"];

/// Whether the voice of this name on `device` speaks the language of `tag`, as far as is known. Without a name espeak-ng
/// picks the voice by the language.
pub(super) fn speaks(device: &Device, voice: Option<&str>, tag: &str) -> bool {
    let wanted = primary(tag);
    let known = device.voices();
    let speaks =
        |info: &VoiceInfo| info.languages.is_empty() || info.languages.iter().any(|tag| primary(tag) == wanted);
    let base = voice.map(|voice| voice.split('+').next().unwrap_or(voice));
    match (device.kind(), base) {
        (Some("espeak"), None) => known.is_empty() || known.iter().any(speaks),
        (Some("cosyvoice3"), _) if OF_COSYVOICE3.contains(&wanted.as_str()) => true,
        (_, None) => known.first().is_none_or(speaks),
        (_, Some(base)) => known.iter().find(|info| info.name.eq_ignore_ascii_case(base)).is_none_or(speaks),
    }
}

/// The language of a BCP 47 tag, without region or script; of several names the one that voices are listed by.
fn primary(tag: &str) -> String {
    let primary = tag.split(['-', '_']).next().unwrap_or_default().to_ascii_lowercase();
    match primary.as_str() {
        "no" => "nb".to_owned(),
        "iw" => "he".to_owned(),
        "cmn" => "zh".to_owned(),
        _ => primary,
    }
}

/// Ready devices, the best for new work first.
pub(super) fn suitable(
    devices: &Devices,
    class: Class,
    last: Option<usize>,
    wanted: impl Fn(&Device) -> bool,
) -> Vec<usize> {
    let now = clock::now();
    let wanted = devices.iter().filter(|(_, device)| wanted(device));
    by_suitability(class, last, wanted.filter_map(|(number, device)| Some((*number, device.load(now)?))).collect())
}

#[cfg(test)]
impl Device {
    /// The device, which is one of this process.
    pub(super) fn local(&self) -> &Local {
        match self {
            Device::Local(local) => local,
            Device::Worker(link) => panic!("{link:?} is no thread of this process"),
        }
    }
}
