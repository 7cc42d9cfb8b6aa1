//! The gateway's side: a worker as one of its devices.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, ReadHalf, WriteHalf};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::wire::{self, CREDIT, Frame, Note, SILENCE, STATUS, Status, Submission, ToGateway, ToWorker, VERSION};
use crate::clock;
use crate::sched::{EngineLimits, Load, Refused, RefusedReason, StreamNote};
use crate::secret::Secret;
use crate::synth::device::{DeviceStatus, Meter, Phase, Respeak, Spent};
use crate::synth::{Caps, Memory, VoiceInfo};
use crate::turn::{Class, SpeechEvent, SpeechSink, StreamId, Utterance, UtteranceEnd};

/// Orders that may wait for the connection; where there are more, it is not keeping up and is made anew.
const ORDERS: usize = 4_096;
/// How often tokens are looked at: a cancelled utterance stops a worker this much later at most.
const SWEEP: Duration = Duration::from_millis(20);
/// Pauses between attempts to connect: the first and the longest.
const PAUSES: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(10)];

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
}

struct State {
    phase: Phase,
    caps: Option<Caps>,
    voices: Vec<VoiceInfo>,
    status: Status,
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
    Submit(Box<Utterance>, SpeechSink),
    Note(StreamId, StreamNote),
    Refresh(oneshot::Sender<()>),
    /// Pieces of an utterance were handed on.
    Taken(u64, usize),
    Stop,
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
}

impl Link {
    /// A worker that is not connected yet, and what connects it: to be run for as long as the link is used.
    pub(in crate::synth) fn new(worker: Worker, meter: Arc<Meter>) -> (Arc<Self>, impl Future<Output = ()> + Send) {
        let (orders, inbox) = mpsc::channel(ORDERS);
        let state = State {
            phase: Phase::Loading,
            caps: None,
            voices: Vec::new(),
            status: Status::default(),
            working: HashMap::new(),
            since: 0,
            produced: 0,
            failures: 0,
            retry_at: None,
        };
        let link = Self { worker, orders, state: Mutex::new(state), meter, respeak: OnceLock::new() };
        let link = Arc::new(link);
        (link.clone(), run(link, inbox))
    }

    /// What speaks the rest of what this worker leaves unfinished; set once, before the first utterance.
    pub(in crate::synth) fn respeak_with(&self, respeak: Weak<dyn Respeak>) {
        // A second one would be the same engine's.
        let _ = self.respeak.set(respeak);
    }

    pub(in crate::synth) fn submit(&self, utterance: &Utterance, sink: &SpeechSink) -> Result<(), Refused> {
        let refused = |reason| Err(Refused { reason, retry_after: STATUS });
        let mut state = self.state();
        if state.phase != Phase::Ready {
            return refused(RefusedReason::NotReady);
        }
        let new = !state.working.contains_key(&utterance.stream);
        if let Some(refusal) = state.status.refusal.as_ref().filter(|_| new && utterance.class == Class::Live) {
            return Err(refusal.into());
        }
        // overflow: refused
        if self.orders.try_send(Order::Submit(Box::new(utterance.clone()), sink.clone())).is_err() {
            return refused(RefusedReason::Full);
        }
        *state.working.entry(utterance.stream).or_default() += 1;
        state.since += u32::from(utterance.class == Class::Live);
        Ok(())
    }

    pub(in crate::synth) fn has_room(&self) -> Result<(), Refused> {
        let state = self.state();
        match (&state.phase, &state.status.refusal) {
            (Phase::Ready, None) => Ok(()),
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

    /// As the worker told last, with what was handed over since. `None` unless it is ready.
    pub(in crate::synth) fn load(&self) -> Option<Load> {
        let state = self.state();
        (state.phase == Phase::Ready).then(|| state.load())
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
        state.working.clear();
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
            // Texts go to a worker whole: what is written on would pause for the network at each word.
            let voice = |voice: &wire::Voice| VoiceInfo {
                name: voice.name.clone(),
                languages: voice.languages.clone(),
                starts_after: None,
            };
            state.voices = voices.iter().map(voice).collect();
        }
        let kind = status.engine.as_deref().and_then(known);
        state.caps = kind.map(|name| Caps {
            name,
            device: format!("worker {}", self.worker.address),
            limits: EngineLimits::of_one_stage(status.slots, status.slots),
        });
        let was = state.phase == Phase::Ready;
        state.phase = if kind.is_some() { Phase::Ready } else { Phase::Loading };
        state.retry_at = None;
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
        {
            let mut state = self.state();
            if let Some(count) = state.working.get_mut(&utterance.stream) {
                *count -= 1;
                if *count == 0 {
                    state.working.remove(&utterance.stream);
                }
            }
            state.produced += open.given as u64;
        }
        let (class, outcome) = (utterance.class.label(), how.label());
        metrics::counter!("voice_requests_total", "class" => class, "outcome" => outcome).increment(1);
        let took = clock::now().saturating_duration_since(open.accepted);
        metrics::histogram!("voice_request_duration_seconds", "class" => class).record(took);
        let audio = crate::audio::duration_of(open.given as u64);
        self.meter.add(&utterance.tenant, utterance.class, utterance.text.chars().count(), audio);
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

/// Keeps the link connected until it is stopped or forgotten.
async fn run(link: Arc<Link>, mut orders: mpsc::Receiver<Order>) {
    let mut pause = PAUSES[0];
    let mut told = None;
    loop {
        let mut open = HashMap::new();
        let connection = tokio::select! {
            connection = dial(&link) => connection,
            () = without_worker(&link, &mut orders) => return,
        };
        let ended = match connection {
            Ok(connection) => talk(&link, connection, &mut orders, &mut open).await,
            Err(error) => Err(error),
        };
        let (reason, was_up) = match ended {
            Ok(()) => {
                link.down(Phase::Stopped, Duration::ZERO);
                open.into_values().for_each(|open| fail(&link, open, "the speech engine was shut down"));
                return;
            }
            Err(error) => (error.to_string(), link.phase() == Phase::Ready),
        };
        if was_up {
            pause = PAUSES[0];
        }
        link.state().failures += 1;
        link.down(Phase::Failed(format!("worker {}: {reason}", link.worker.address)), pause);
        if was_up || told.as_ref() != Some(&reason) {
            tracing::error!(worker = %link.worker.address, %reason, utterances = open.len(), "a worker cannot be used");
            told = Some(reason);
        }
        // After the phase is known: what they were said on must not be tried again.
        open.into_values().for_each(|open| hand_over(&link, open));
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = without_worker(&link, &mut orders) => return,
        }
        pause = (pause * 2).min(PAUSES[1]);
    }
}

/// Takes the orders while there is no worker, so that nobody waits for room among them; returns when the link is to
/// stop. Cancel safe.
async fn without_worker(link: &Arc<Link>, orders: &mut mpsc::Receiver<Order>) {
    loop {
        match orders.recv().await {
            // It was accepted a moment before the worker was lost.
            Some(Order::Submit(utterance, sink)) => hand_over(link, begun(link, *utterance, sink).0),
            Some(Order::Stop) | None => return link.down(Phase::Stopped, Duration::ZERO),
            Some(Order::Note(..) | Order::Refresh(_) | Order::Taken(..)) => {}
        }
    }
}

trait Stream: AsyncRead + AsyncWrite + Send {}
impl<T: AsyncRead + AsyncWrite + Send> Stream for T {}

type Connection = (ReadHalf<Pin<Box<dyn Stream>>>, WriteHalf<Pin<Box<dyn Stream>>>);

/// A connection to the worker, which has let us in.
async fn dial(link: &Link) -> io::Result<Connection> {
    let Worker { address, tls, token } = &link.worker;
    let stream = timeout(SILENCE, TcpStream::connect(address.as_str())).await??;
    stream.set_nodelay(true)?;
    let stream: Pin<Box<dyn Stream>> = match tls {
        None => Box::pin(stream),
        Some(tls) => {
            let host = address.rsplit_once(':').map_or(address.as_str(), |(host, _)| host).trim_matches(['[', ']']);
            let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
            Box::pin(timeout(SILENCE, tls.connect(name, stream)).await??)
        }
    };
    let (mut from, mut to) = tokio::io::split(stream);
    let hello = ToWorker::Hello { version: VERSION, token: token.reveal().to_owned() };
    timeout(SILENCE, wire::write(&mut to, &wire::message(&hello))).await??;
    match timeout(SILENCE, wire::greeting(&mut from)).await?? {
        Frame::Message(ToGateway::Welcome { refusal: None, version: VERSION }) => Ok((from, to)),
        Frame::Message(ToGateway::Welcome { refusal, version }) => {
            let reason = refusal.unwrap_or_else(|| format!("it speaks version {version}, this is {VERSION}"));
            Err(io::Error::other(reason))
        }
        _ => Err(io::Error::other("it is no antiphon worker")),
    }
}

/// One connection until it ends; `Ok` when the link is to stop.
async fn talk(
    link: &Arc<Link>,
    (mut from, mut to): Connection,
    orders: &mut mpsc::Receiver<Order>,
    open: &mut HashMap<u64, Open>,
) -> io::Result<()> {
    // Reading is not cancel safe, so it has a task; a few frames ahead, and TCP slows the rest.
    let (read, mut frames) = mpsc::channel(8);
    let reading = tokio::spawn(async move {
        loop {
            let frame = timeout(SILENCE, wire::read::<ToGateway>(&mut from)).await;
            let frame = frame.unwrap_or_else(|_| Err(io::Error::other("nothing heard from it")));
            let failed = frame.is_err();
            // overflow: awaited
            if read.send(frame).await.is_err() || failed {
                return;
            }
        }
    });
    let ended = async {
        let mut sweep = tokio::time::interval(SWEEP);
        sweep.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut said = clock::now();
        loop {
            let mut out: Vec<u8> = Vec::new();
            tokio::select! {
                order = orders.recv() => match order {
                    Some(Order::Stop) | None => return Ok(()),
                    Some(order) => obey(link, order, open, &mut out),
                },
                frame = frames.recv() => match frame {
                    Some(Ok(frame)) => hear(link, frame, open)?,
                    Some(Err(error)) => return Err(error),
                    None => return Err(io::ErrorKind::UnexpectedEof.into()),
                },
                _ = sweep.tick() => {
                    for (id, open) in open.iter_mut().filter(|(_, open)| !open.cancelled) {
                        if open.utterance.token.is_stale() || open.sink.is_closed() {
                            open.cancelled = true;
                            out.extend(wire::message(&ToWorker::Cancel { id: *id }));
                        }
                    }
                    let now = clock::now();
                    if out.is_empty() && now.saturating_duration_since(said) >= SILENCE / 6 {
                        out.extend(wire::message(&ToWorker::Alive));
                    }
                }
            }
            if !out.is_empty() {
                said = clock::now();
                timeout(SILENCE, wire::write(&mut to, &out)).await??;
            }
        }
    };
    let ended = ended.await;
    reading.abort();
    ended
}

/// An utterance that was accepted, and the audio that its task hands on.
fn begun(link: &Link, utterance: Utterance, sink: SpeechSink) -> (Open, u64) {
    let (pieces, waiting) = mpsc::channel(CREDIT + 1);
    let id = utterance.id.0;
    tokio::spawn(hand_on(id, waiting, sink.clone(), link.orders.clone()));
    (Open { utterance, sink, pieces, given: 0, accepted: clock::now(), cancelled: false }, id)
}

fn obey(link: &Link, order: Order, open: &mut HashMap<u64, Open>, out: &mut Vec<u8>) {
    match order {
        Order::Submit(utterance, sink) => {
            let submission = Submission {
                id: utterance.id.0,
                stream: utterance.stream.0,
                batch: utterance.class == Class::Batch,
                text: utterance.text.clone(),
                voice: utterance.voice.clone(),
                language: utterance.language.clone(),
                instructions: utterance.instructions.clone(),
                seed: utterance.seed,
                speed: utterance.speed,
                markup: utterance.markup,
                sounds: utterance.sounds.clone(),
                tenant: utterance.tenant.to_string(),
            };
            out.extend(wire::message(&ToWorker::Submit(Box::new(submission))));
            let (begun, id) = begun(link, *utterance, sink);
            open.insert(id, begun);
        }
        Order::Note(stream, note) => {
            let note = match note {
                StreamNote::Anchored { at } => {
                    Note::Anchored { ago_us: clock::now().saturating_duration_since(at).as_micros() as u64 }
                }
                StreamNote::Held => Note::Held,
                StreamNote::Resumed => Note::Resumed,
                StreamNote::Interrupted => Note::Interrupted,
                StreamNote::Unpaced => Note::Unpaced,
                StreamNote::Closed => Note::Closed,
            };
            // What was interrupted is not wanted: before the worker hears so, it hears of what.
            for (id, open) in open.iter_mut().filter(|(_, open)| open.utterance.stream == stream && !open.cancelled) {
                if open.utterance.token.is_stale() {
                    open.cancelled = true;
                    out.extend(wire::message(&ToWorker::Cancel { id: *id }));
                }
            }
            out.extend(wire::message(&ToWorker::Note { stream: stream.0, note }));
        }
        Order::Refresh(told) => {
            out.extend(wire::message(&ToWorker::Refresh));
            // Nobody need wait for it.
            let _ = told.send(());
        }
        Order::Taken(id, pieces) if open.contains_key(&id) => {
            out.extend(wire::message(&ToWorker::Taken { id, pieces }));
        }
        Order::Taken(..) | Order::Stop => {}
    }
}

fn hear(link: &Link, frame: Frame<ToGateway>, open: &mut HashMap<u64, Open>) -> io::Result<()> {
    match frame {
        Frame::Audio { id, pcm } => {
            // Of one that was cancelled, perhaps.
            let Some(open) = open.get_mut(&id) else { return Ok(()) };
            open.given += pcm.len();
            // overflow: never, there is room for all that the worker has credit for
            if let Err(mpsc::error::TrySendError::Full(_)) =
                open.pieces.try_send(SpeechEvent::Audio { utterance: open.utterance.id, pcm })
            {
                return Err(io::Error::other("it sends more audio than it was given credit for"));
            }
        }
        Frame::Message(ToGateway::End { id, how }) => {
            if let Some(ended) = open.remove(&id) {
                end(link, ended, how.into());
            }
        }
        Frame::Message(ToGateway::Status(status)) => link.hear(*status),
        Frame::Message(ToGateway::Welcome { .. }) => {}
    }
    Ok(())
}

/// Tells the sink, after all of its audio.
fn end(link: &Link, open: Open, how: UtteranceEnd) {
    link.over(&open, &how);
    // overflow: never, there is room for the end beside all credit
    let _ = open.pieces.try_send(SpeechEvent::End { utterance: open.utterance.id, how });
}

fn fail(link: &Link, open: Open, reason: &str) {
    end(link, open, UtteranceEnd::Failed(reason.to_owned()));
}

/// The worker is gone: another device speaks the rest.
fn hand_over(link: &Link, open: Open) {
    if open.utterance.token.is_stale() || open.sink.is_closed() {
        return end(link, open, UtteranceEnd::Cancelled);
    }
    let (utterance, id) = (open.utterance.clone(), open.utterance.id);
    let reason = format!("the worker {} is gone", link.worker.address);
    let Some(respeak) = link.respeak.get().and_then(Weak::upgrade) else { return fail(link, open, &reason) };
    // What has begun in one voice does not go on in another.
    let kind = link.kind().filter(|_| open.given > 0);
    let (sink, mut rest) = mpsc::channel(CREDIT);
    if let Err(refused) = respeak.respeak(kind, utterance, sink) {
        return fail(link, open, &format!("{reason}, and no other speaks the rest: {refused}"));
    }
    metrics::counter!("antiphon_worker_handovers_total").increment(1);
    // The other device counts what it makes, and its end.
    let Open { given: mut skip, pieces, .. } = open;
    tokio::spawn(async move {
        while let Some(event) = rest.recv().await {
            let event = match event {
                SpeechEvent::Audio { mut pcm, .. } => {
                    let left_out = skip.min(pcm.len());
                    skip -= left_out;
                    pcm.drain(..left_out);
                    if pcm.is_empty() {
                        continue;
                    }
                    SpeechEvent::Audio { utterance: id, pcm }
                }
                SpeechEvent::End { how, .. } => SpeechEvent::End { utterance: id, how },
            };
            let over = matches!(event, SpeechEvent::End { .. });
            // overflow: awaited; a device in process fails or waits as it does for any sink that is full
            if pieces.send(event).await.is_err() || over {
                return;
            }
        }
        // The other one is gone, too, without a word.
        let how = UtteranceEnd::Failed("the device that went on for a lost worker is gone".to_owned());
        // overflow: awaited; nobody need be there any more
        let _ = pieces.send(SpeechEvent::End { utterance: id, how }).await;
    });
}

/// Hands the audio of one utterance on and tells the worker of every piece that was taken.
async fn hand_on(id: u64, mut pieces: mpsc::Receiver<SpeechEvent>, sink: SpeechSink, orders: mpsc::Sender<Order>) {
    while let Some(event) = pieces.recv().await {
        let audio = matches!(event, SpeechEvent::Audio { .. });
        // overflow: awaited, and the worker waits for credit
        if sink.send(event).await.is_err() {
            return;
        }
        // overflow: awaited, the link empties it; a link that is gone needs no credit
        if audio && orders.send(Order::Taken(id, 1)).await.is_err() {
            continue;
        }
    }
}
