//! The gateway's side: a worker as one of its devices.

mod talk;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};
use tokio_rustls::TlsConnector;

use super::wire::{self, STATUS, Status};
use crate::clock;
use crate::sched::{EngineLimits, Load, Refused, RefusedReason, StreamNote};
use crate::secret::Secret;
use crate::synth::device::feed::Feed;
use crate::synth::device::phrases::Recorder;
use crate::synth::device::{DeviceStatus, Meter, Phase, Respeak, Spent};
use crate::synth::{Caps, Identity, Memory, VoiceInfo};
use crate::turn::{Class, Saying, SpeechEvent, SpeechSink, StreamId, Utterance, UtteranceEnd, UtteranceId, WordTimes};
use crate::voice::copies::{Library, is_content};

/// Orders that may wait for the connection; where there are more, it is not keeping up and is made anew.
const ORDERS: usize = 4_096;
/// How often tokens are looked at: a cancelled utterance stops a worker this much later at most.
const SWEEP: Duration = Duration::from_millis(20);
/// Pauses between attempts to connect: the first and the longest.
const PAUSES: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(10)];
/// How long behind its end it is waited for when the words of an utterance sound.
const WORDS: Duration = Duration::from_secs(30);

/// A worker as `[engine] workers` names it.
#[derive(Clone)]
pub struct Worker {
    /// `host:port`.
    pub address: String,
    /// What it must be told.
    pub token: Secret,
    /// `None`: no TLS.
    pub tls: Option<TlsConnector>,
}

/// A worker, connected or not. The engine holds it as a device.
pub(in crate::synth) struct Link {
    worker: Worker,
    orders: mpsc::Sender<Order>,
    state: Mutex<State>,
    /// Of the engine.
    meter: Arc<Meter>,
    /// What speaks the rest where the worker is lost.
    respeak: OnceLock<Weak<dyn Respeak>>,
    /// Voices that can be sent to it.
    library: Arc<OnceLock<Library>>,
}

struct State {
    phase: Phase,
    caps: Option<Caps>,
    /// As it told last; kept when it is lost, for the join.
    model: Option<String>,
    /// What decides how it sounds, by its model and the voices that it told of.
    identity: Option<Arc<Identity>>,
    contents: Option<Vec<(String, String)>>,
    voices: Vec<VoiceInfo>,
    /// Voices that it has as copies, by what they are, and after how much of a text each starts.
    copies: HashMap<String, Option<u32>>,
    status: Status,
    /// Texts that are still being written, all of what there is, and those of them that the worker has not all of.
    texts: HashMap<UtteranceId, Feed>,
    written: Vec<UtteranceId>,
    /// Utterances of each stream that are not over.
    working: HashMap<StreamId, u32>,
    /// Live ones handed over since the worker last told its load.
    since: u32,
    produced: u64,
    failures: u32,
    retry_at: Option<Instant>,
}

impl State {
    /// What the worker told last, with what was handed over since.
    fn load(&self) -> Load {
        let mut load = self.status.load;
        load.live = load.live.saturating_add(self.since);
        load
    }
}

enum Order {
    Submit(Box<Handed>),
    /// A voice will be wanted: its name here, and what it is.
    Expect(String, String),
    /// There is more of some text.
    Written,
    Note(StreamId, StreamNote),
    Refresh(oneshot::Sender<()>),
    /// Pieces of an utterance were handed on.
    Taken(u64, usize),
    Stop,
}

/// An utterance that was accepted.
struct Handed {
    utterance: Utterance,
    /// What its voice is, where that is one of this machine's files.
    content: Option<String>,
    sink: SpeechSink,
    /// Somebody wants to know when its words sound.
    words: bool,
    /// Keeps what is spoken.
    recorder: Option<Recorder>,
}

/// An utterance that the worker speaks.
struct Open {
    utterance: Utterance,
    sink: SpeechSink,
    /// To the task that hands its audio on; it has room for as much as there is credit.
    pieces: mpsc::Sender<SpeechEvent>,
    /// Samples given to that task.
    given: usize,
    accepted: Instant,
    cancelled: bool,
    /// The worker was asked when its words sound.
    words: bool,
    /// Keeps what is spoken.
    recorder: Option<Recorder>,
}

/// An utterance that is over, and the words of which somebody may still ask for.
struct Late {
    text: String,
    words: WordTimes,
    until: Instant,
}

impl Link {
    /// A worker that is not connected yet, and what connects it: to be run for as long as the link is used.
    pub(in crate::synth) fn new(
        worker: Worker,
        meter: Arc<Meter>,
        library: Arc<OnceLock<Library>>,
    ) -> (Arc<Self>, impl Future<Output = ()> + Send) {
        let (orders, inbox) = mpsc::channel(ORDERS);
        let state = State {
            phase: Phase::Loading,
            caps: None,
            model: None,
            identity: None,
            contents: None,
            voices: Vec::new(),
            copies: HashMap::new(),
            status: Status::default(),
            texts: HashMap::new(),
            written: Vec::new(),
            working: HashMap::new(),
            since: 0,
            produced: 0,
            failures: 0,
            retry_at: None,
        };
        let link = Self { worker, orders, state: Mutex::new(state), meter, respeak: OnceLock::new(), library };
        let link = Arc::new(link);
        (link.clone(), talk::run(link, inbox))
    }

    /// `host:port`.
    pub(in crate::synth) fn address(&self) -> &str {
        &self.worker.address
    }

    /// What speaks the rest of what this worker leaves unfinished; set once, before the first utterance.
    pub(in crate::synth) fn respeak_with(&self, respeak: Weak<dyn Respeak>) {
        // A second one would be the same engine's.
        let _ = self.respeak.set(respeak);
    }

    /// `content`: what the voice is, where it is one of this machine's files.
    pub(in crate::synth) fn submit(
        &self,
        utterance: &Utterance,
        content: Option<&str>,
        sink: &SpeechSink,
        recorder: Option<Recorder>,
    ) -> Result<(), Refused> {
        let refused = |reason| Err(Refused { reason, retry_after: STATUS });
        let mut state = self.state();
        if state.phase != Phase::Ready {
            return refused(RefusedReason::NotReady);
        }
        let new = !state.working.contains_key(&utterance.stream);
        // What a stream has begun there it ends there, so that it is heard in order.
        if new && state.status.draining {
            return refused(RefusedReason::NotReady);
        }
        if let Some(refusal) = state.status.refusal.as_ref().filter(|_| new && utterance.class == Class::Live) {
            return Err(refusal.into());
        }
        // As voices in process look at it.
        let words = utterance.words.is_kept() || (utterance.class == Class::Live && utterance.words.is_wanted());
        let (content, sink) = (content.map(str::to_owned), sink.clone());
        let handed = Box::new(Handed { utterance: utterance.clone(), content, sink, words, recorder });
        // overflow: refused
        if self.orders.try_send(Order::Submit(handed)).is_err() {
            return refused(RefusedReason::Full);
        }
        if utterance.streamed {
            let mut text = Feed::new(utterance.said());
            // It goes with the utterance.
            text.take();
            state.texts.insert(utterance.id, text);
        }
        *state.working.entry(utterance.stream).or_default() += 1;
        state.since += u32::from(utterance.class == Class::Live);
        Ok(())
    }

    /// Goes on with the text of a streamed utterance; one that is over takes none.
    pub(in crate::synth) fn append(&self, utterance: UtteranceId, said: &Saying, last: bool) {
        let mut state = self.state();
        // Bounded by who writes, as in process.
        if !state.texts.get_mut(&utterance).is_some_and(|feed| feed.push(said, last)) {
            return;
        }
        if !state.written.contains(&utterance) {
            state.written.push(utterance);
        }
        drop(state);
        // overflow: drops; the text is kept, and looked for at the next sweep
        let _ = self.orders.try_send(Order::Written);
    }

    /// Ends the text of an utterance that goes to another device: what is written behind the first piece.
    fn take_text(&self, utterance: UtteranceId) -> Vec<(Saying, bool)> {
        let mut state = self.state();
        state.written.retain(|written| *written != utterance);
        state.texts.remove(&utterance).map(Feed::behind_first).unwrap_or_default()
    }

    /// Text ids after which a text sounds in this voice that is still being written ([`VoiceInfo::starts_after`]); `content` is
    /// what the voice is, where the worker takes voices. The outer `None`: it was not sent the voice yet.
    pub(in crate::synth) fn starts_after(&self, voice: Option<&str>, content: Option<&str>) -> Option<Option<u32>> {
        let state = self.state();
        match content.filter(|_| state.status.copies) {
            Some(content) => state.copies.get(content).copied(),
            None => {
                let named = |known: &&VoiceInfo| voice.is_none_or(|voice| known.name == voice);
                Some(state.voices.iter().find(named).and_then(|known| known.starts_after))
            }
        }
    }

    /// A text in this voice is being written: the voice is sent now, so that the next text is spoken as it is written.
    pub(in crate::synth) fn expect_voice(&self, voice: &str, content: &str) {
        let state = self.state();
        if state.phase == Phase::Ready && state.status.copies && !state.copies.contains_key(content) {
            // overflow: drops; it is sent with the first text then
            let _ = self.orders.try_send(Order::Expect(voice.to_owned(), content.to_owned()));
        }
    }

    pub(in crate::synth) fn has_room(&self) -> Result<(), Refused> {
        let state = self.state();
        match (&state.phase, &state.status.refusal) {
            (Phase::Ready, None) if !state.status.draining => Ok(()),
            (Phase::Ready, Some(refusal)) => Err(refusal.into()),
            _ => Err(Refused { reason: RefusedReason::NotReady, retry_after: PAUSES[0] }),
        }
    }

    pub(in crate::synth) fn note(&self, stream: StreamId, note: StreamNote) {
        // overflow: drops; a worker that takes no orders is about to be given up
        let _ = self.orders.try_send(Order::Note(stream, note));
    }

    pub(in crate::synth) fn has_work(&self, stream: StreamId) -> bool {
        self.state().working.contains_key(&stream)
    }

    pub(in crate::synth) fn phase(&self) -> Phase {
        self.state().phase.clone()
    }

    pub(in crate::synth) fn kind(&self) -> Option<&'static str> {
        self.state().caps.as_ref().map(|caps| caps.name)
    }

    pub(in crate::synth) fn voices(&self) -> Vec<VoiceInfo> {
        self.state().voices.clone()
    }

    /// Whether it has told that it has a copy of this voice.
    pub(in crate::synth) fn has_copy(&self, content: &str) -> bool {
        self.state().copies.contains_key(content)
    }

    /// Whether it speaks with voices that are sent to it.
    pub(in crate::synth) fn takes_copies(&self) -> bool {
        self.state().status.copies
    }

    /// As the worker told last, with what was handed over since. `None` unless it is ready and takes new streams.
    pub(in crate::synth) fn load(&self) -> Option<Load> {
        let state = self.state();
        (state.phase == Phase::Ready && !state.status.draining).then(|| state.load())
    }

    /// What its model is, where it tells: workers with the same one make the same audio.
    pub(in crate::synth) fn model(&self) -> Option<String> {
        self.state().model.clone()
    }

    /// What decides how it sounds, where it tells.
    pub(in crate::synth) fn identity(&self) -> Option<Arc<Identity>> {
        self.state().identity.clone()
    }

    /// As the worker told last.
    pub(in crate::synth) fn status(&self) -> DeviceStatus {
        let state = self.state();
        DeviceStatus {
            caps: state.caps.clone(),
            phase: state.phase.clone(),
            load: state.load(),
            memory: Memory { total: state.status.memory_total, used: state.status.memory_used },
            parts: Vec::new(),
            produced: state.produced,
            spent: Spent::default(),
            hangs: false,
            failures: state.failures,
            retry_in: state.retry_at.map(|at| at.saturating_duration_since(clock::now())),
            step_seconds: Default::default(),
        }
    }

    /// `told` when the worker was asked to look; it has looked by its next status or two.
    pub(in crate::synth) fn refresh(&self, told: oneshot::Sender<()>) {
        // overflow: drops, which tells at once
        let _ = self.orders.try_send(Order::Refresh(told));
    }

    pub(in crate::synth) fn stop(&self) {
        // overflow: drops; the task ends with the runtime that it runs on
        let _ = self.orders.try_send(Order::Stop);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It cannot be used now.
    fn down(&self, phase: Phase, retry: Duration) {
        let mut state = self.state();
        state.phase = phase;
        state.retry_at = Some(clock::now() + retry);
        state.voices.clear();
        state.copies.clear();
        (state.identity, state.contents) = (None, None);
        state.working.clear();
        state.written.clear();
        state.status = Status::default();
        drop(state);
        self.up(false);
    }

    fn up(&self, up: bool) {
        metrics::gauge!("antiphon_worker_up", "worker" => self.worker.address.clone()).set(f64::from(u8::from(up)));
    }

    fn hear(&self, status: Status) {
        let mut state = self.state();
        state.since = 0;
        if let Some(voices) = &status.voices {
            let voice = |voice: &wire::Voice| VoiceInfo {
                name: voice.name.clone(),
                languages: voice.languages.clone(),
                starts_after: voice.starts_after,
            };
            let (copies, named): (Vec<_>, Vec<_>) = voices.iter().partition(|voice| is_content(&voice.name));
            state.copies = copies.into_iter().map(|voice| (voice.name.clone(), voice.starts_after)).collect();
            state.voices = named.into_iter().map(voice).collect();
        }
        let kind = status.engine.as_deref().and_then(known);
        state.caps = kind.map(|name| Caps {
            name,
            device: format!("worker {}", self.worker.address),
            limits: EngineLimits::of_one_stage(status.slots, status.slots),
        });
        let news = status.contents.is_some() || state.model != status.model || state.identity.is_none();
        state.contents = status.contents.clone().or(state.contents.take());
        // One that does not tell what its voices hold is not known by its model alone.
        if news {
            let known = status.model.as_deref().zip(state.contents.clone());
            state.identity = known.map(|(model, contents)| Arc::new(Identity::of_worker(model, contents)));
        }
        state.model.clone_from(&status.model);
        let was = state.phase == Phase::Ready;
        state.phase = if kind.is_some() { Phase::Ready } else { Phase::Loading };
        state.retry_at = None;
        // Where all speak elsewhere nothing here runs steps that would tell.
        if let Some(slack) = status.load.slack.filter(|slack| slack.is_finite()) {
            metrics::histogram!("antiphon_slack_seconds").record(slack);
        }
        state.status = status;
        drop(state);
        if was != kind.is_some() {
            self.up(kind.is_some());
            match kind {
                Some(kind) => tracing::info!(worker = %self.worker.address, kind, "a worker speaks"),
                None => tracing::warn!(worker = %self.worker.address, "no device of a worker is ready"),
            }
        }
    }

    /// An utterance is over.
    fn over(&self, open: &Open, how: &UtteranceEnd) {
        let utterance = &open.utterance;
        let text = {
            let mut state = self.state();
            if let Some(count) = state.working.get_mut(&utterance.stream) {
                *count -= 1;
                if *count == 0 {
                    state.working.remove(&utterance.stream);
                }
            }
            state.produced += open.given as u64;
            state.written.retain(|written| *written != utterance.id);
            state.texts.remove(&utterance.id)
        };
        let (class, outcome) = (utterance.class.label(), how.label());
        metrics::counter!("voice_requests_total", "class" => class, "outcome" => outcome).increment(1);
        let took = clock::now().saturating_duration_since(open.accepted);
        metrics::histogram!("voice_request_duration_seconds", "class" => class).record(took);
        let audio = crate::audio::duration_of(open.given as u64);
        let chars = text.as_ref().map_or_else(|| utterance.text.chars().count(), Feed::chars);
        self.meter.add(&utterance.tenant, utterance.class, chars, audio);
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("worker", &self.worker.address).finish_non_exhaustive()
    }
}

/// The kinds of voices that there are, by the name that a worker tells.
fn known(name: &str) -> Option<&'static str> {
    ["cosyvoice3", "espeak", "tone"].into_iter().find(|kind| *kind == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_close_a_worker_is_to_a_gap_is_shown_at_its_gateway() {
        let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
        let worker = Worker { address: "127.0.0.1:1".into(), token: Secret::new("between-machines"), tls: None };
        let (link, _connects) = Link::new(worker, Arc::default(), Arc::default());
        let told = |slack| {
            let mut status = Status { engine: Some("tone".into()), ..Status::default() };
            status.load.slack = slack;
            metrics::with_local_recorder(&recorder, || link.hear(status));
            recorder.handle().render()
        };
        assert!(!told(None).contains("antiphon_slack_seconds"), "nobody listens");
        assert!(told(Some(0.4)).contains("antiphon_slack_seconds_count 1"));
        assert_eq!(link.load().and_then(|load| load.slack), Some(0.4), "and told to the others");
    }
}
