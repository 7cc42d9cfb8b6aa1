//! The worker's side: an engine that speaks for the gateways that connect.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use super::wire::{
    self, CREDIT, Frame, How, Note, SILENCE, STATUS, Status, Submission, ToGateway, ToWorker, VERSION, Voice,
};
use crate::clock;
use crate::secret::{Secret, same};
use crate::synth::VoiceInfo;
use crate::synth::device::{DeviceStatus, Engine, Phase, StreamNote};
use crate::turn::{Epoch, SpeechEvent, StreamId, Utterance, UtteranceEnd, UtteranceId, WordTimes};
use crate::voice::copies::{self, Copies};

/// Gateways at a time; more are refused.
const GATEWAYS: usize = 1_024;
/// Frames that may wait for the socket.
const FRAMES: usize = 256;
/// Events of an utterance that may wait for credit, as of a call in process.
const SINK: usize = 64;
/// Utterances, and streams, that one gateway may have here: hundreds of times what a machine of GPUs speaks.
const MAX_WORK: usize = 65_536;
/// Voices of which a session may be told at once that they were kept.
const ARRIVALS: usize = 16;
/// The kind of voice that speaks with files.
const WITH_FILES: &str = "cosyvoice3";

/// Who may connect.
#[derive(Clone)]
pub struct Door {
    /// What a gateway must know; empty: nothing.
    pub token: Secret,
    /// `None`: no TLS.
    pub tls: Option<TlsAcceptor>,
}

/// A worker's work, for its gateways and for who stops it. Clones mean the same.
#[derive(Clone)]
pub struct Service {
    engine: Engine,
    /// Where voices of gateways are kept.
    copies: Option<Copies>,
    draining: Arc<watch::Sender<bool>>,
    /// Utterances whose end was not told yet.
    open: Arc<watch::Sender<usize>>,
}

impl Service {
    /// What `engine` speaks is what gateways get.
    pub fn new(engine: Engine) -> Self {
        let (draining, open) = (Arc::new(watch::Sender::new(false)), Arc::new(watch::Sender::new(0)));
        Self { engine, copies: None, draining, open }
    }

    /// Takes voices of gateways into `copies`, a folder of which its devices speak.
    pub fn with_copies(self, copies: Copies) -> Self {
        Self { copies: Some(copies), ..self }
    }

    /// What speaks.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// From now on gateways begin nothing new here; streams that have work end it.
    pub fn drain(&self) {
        self.draining.send_replace(true);
    }

    /// Whether it drains.
    pub fn is_draining(&self) -> bool {
        *self.draining.borrow()
    }

    /// Utterances that are not over.
    pub fn open(&self) -> usize {
        *self.open.borrow()
    }

    /// Waits until there is none.
    pub async fn idle(&self) {
        // An error would say that this is gone.
        let _ = self.open.subscribe().wait_for(|open| *open == 0).await;
    }

    /// What it is and how busy, as gateways are told.
    pub fn told(&self) -> Told {
        let status = status(&self.engine);
        let most = f64::from(status.load.capacity);
        let sustainable = status.load.sustainable;
        Told {
            sustainable: if sustainable > 0.0 { sustainable.min(most) } else { most },
            live: status.load.live,
            engine: status.engine,
            model: status.model,
            draining: self.is_draining(),
        }
    }
}

/// What a worker tells those who do not know it yet.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Told {
    /// The kind of its voice; `None`: no device is ready.
    pub engine: Option<String>,
    /// What its model is; workers with the same one make the same audio.
    pub model: Option<String>,
    /// Live streams that it keeps up with.
    pub sustainable: f64,
    /// Live streams that it has.
    pub live: u32,
    /// Whether it takes no new ones.
    pub draining: bool,
}

/// Serves the gateways that connect to `listener` until `stop`.
pub async fn serve(listener: TcpListener, door: Door, service: Service, mut stop: watch::Receiver<bool>) {
    let room = Arc::new(Semaphore::new(GATEWAYS));
    let mut sessions = JoinSet::new();
    loop {
        let (stream, peer) = tokio::select! {
            _ = stop.changed() => break,
            // One that panicked ends alone.
            Some(_) = sessions.join_next() => continue,
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of descriptors, mostly: they come back as connections end.
                    tracing::warn!(%error, "a gateway was not accepted");
                    tokio::time::sleep(STATUS).await;
                    continue;
                }
            },
        };
        let Ok(permit) = room.clone().try_acquire_owned() else {
            tracing::warn!(%peer, "as many gateways as may are connected");
            continue;
        };
        let (door, service, stopped) = (door.clone(), service.clone(), stop.clone());
        sessions.spawn(async move {
            let _permit = permit;
            let served = async {
                stream.set_nodelay(true)?;
                match door.tls.clone() {
                    Some(tls) => session(handshake(tls, stream).await?, &door, service, stopped).await,
                    None => session(stream, &door, service, stopped).await,
                }
            };
            if let Err(error) = served.await {
                tracing::info!(%peer, %error, "a gateway is gone");
            }
        });
    }
    // Each ends within a moment, with its last words.
    while sessions.join_next().await.is_some() {}
}

async fn handshake(tls: TlsAcceptor, stream: TcpStream) -> io::Result<impl AsyncRead + AsyncWrite + Send + 'static> {
    timeout(SILENCE, tls.accept(stream)).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// One gateway, until it is gone.
async fn session(
    stream: impl AsyncRead + AsyncWrite + Send + 'static,
    door: &Door,
    service: Service,
    mut stop: watch::Receiver<bool>,
) -> io::Result<()> {
    let (from, to) = tokio::io::split(stream);
    let (mut from, mut to) = (Box::pin(from), Box::pin(to));
    let hello = tokio::select! {
        _ = stop.changed() => return Ok(()),
        hello = timeout(SILENCE, wire::greeting(&mut from)) => hello??,
    };
    let refusal = match hello {
        Frame::Message(ToWorker::Hello { version, .. }) if version != VERSION => {
            Some(format!("the worker speaks version {VERSION}, the gateway {version}: run the same antiphon on both"))
        }
        Frame::Message(ToWorker::Hello { token, .. }) if !same(token.as_bytes(), door.token.reveal().as_bytes()) => {
            Some("the token is another: [cluster] token must be the same on both".to_owned())
        }
        Frame::Message(ToWorker::Hello { .. }) => None,
        _ => Some("the first frame must be a hello".to_owned()),
    };
    let welcome = ToGateway::Welcome { version: VERSION, refusal: refusal.clone() };
    timeout(SILENCE, wire::write(&mut to, &wire::message(&welcome))).await??;
    if let Some(refusal) = refusal {
        return Err(io::Error::other(refusal));
    }
    let (out, mut frames) = mpsc::channel::<Vec<u8>>(FRAMES);
    let (arrived, mut arrivals) = mpsc::channel(ARRIVALS);
    let mut session = Session {
        service,
        out,
        arrived,
        streams: HashMap::new(),
        jobs: HashMap::new(),
        arriving: HashMap::new(),
        waiting: Vec::new(),
    };
    // Writing has a task: a gateway that takes nothing is still listened to, so that two sides with full buffers do not
    // wait for each other, and one that is gone is noticed by either.
    let mut writing = tokio::spawn(async move {
        while let Some(frame) = frames.recv().await {
            match timeout(SILENCE, wire::write(&mut to, &frame)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return error,
                Err(_) => return io::Error::other("it takes nothing"),
            }
        }
        io::ErrorKind::BrokenPipe.into()
    });
    let _writing = AbortOnDrop(writing.abort_handle());
    let mut told: Option<Vec<VoiceInfo>> = None;
    let mut tick = tokio::time::interval(STATUS);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // Reading is not cancel safe, so it has a task; it ends with the connection, or with this receiver.
    let (read, mut messages) = mpsc::channel(FRAMES);
    let reading = tokio::spawn(async move {
        loop {
            let frame = timeout(SILENCE, wire::read::<ToWorker>(&mut from)).await;
            let frame = frame.unwrap_or_else(|_| Err(io::Error::other("nothing heard from it")));
            let failed = frame.is_err();
            // overflow: awaited, the gateway is slowed by its own transport
            if read.send(frame).await.is_err() || failed {
                return;
            }
        }
    });
    let _reading = AbortOnDrop(reading.abort_handle());
    loop {
        tokio::select! {
            // Also when its sender is gone.
            _ = stop.changed() => break,
            ended = &mut writing => return Err(ended.unwrap_or_else(io::Error::other)),
            message = messages.recv() => match message {
                Some(Ok(Frame::Message(message))) => session.obey(message)?,
                Some(Ok(Frame::Voice { content, file })) => session.take(content, file),
                Some(Ok(Frame::Audio { .. })) => return Err(io::Error::other("a gateway sends no audio")),
                Some(Err(error)) => return Err(error),
                None => return Ok(()),
            },
            Some(content) = arrivals.recv() => session.here(&content),
            _ = tick.tick() => {
                let mut status = status(session.engine());
                status.draining = session.service.is_draining();
                status.copies = session.service.copies.is_some() && status.engine.as_deref() == Some(WITH_FILES);
                let voices = session.engine().voices_and_copies();
                if told.as_ref() != Some(&voices) {
                    let voice = |voice: &VoiceInfo| Voice { name: voice.name.clone(), languages: voice.languages.clone() };
                    status.voices = Some(voices.iter().map(voice).collect());
                }
                let status = ToGateway::Status(Box::new(status));
                // overflow: drops; frames that wait say that the worker lives, and the next status is newer
                if session.out.try_send(wire::message(&status)).is_ok() {
                    told = Some(voices);
                }
            }
        }
    }
    // What is unfinished another device speaks, and must not hear here that it was cancelled. Where all is over, the last
    // words still have to leave.
    if session.is_idle() {
        drop(session);
        // A gateway that takes nothing is not waited for.
        let _ = timeout(SILENCE, writing).await;
    }
    Ok(())
}

struct AbortOnDrop(tokio::task::AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What one gateway has here.
struct Session {
    service: Service,
    out: mpsc::Sender<Vec<u8>>,
    /// Its names of streams to ours.
    streams: HashMap<u64, StreamId>,
    jobs: HashMap<u64, Job>,
    /// Told when a voice was kept, or could not be.
    arrived: mpsc::Sender<String>,
    /// Voices that are being kept, by what they are, and how often.
    arriving: HashMap<String, u32>,
    /// Utterances that wait for one, and those behind them in their streams, in order.
    waiting: Vec<Waiting>,
}

struct Waiting {
    submission: Submission,
    epoch: Epoch,
    credit: Arc<Semaphore>,
    open: Unfinished,
}

struct Job {
    epoch: Epoch,
    /// Closed: its audio is not wanted.
    credit: Arc<Semaphore>,
}

impl Job {
    fn cancel(&self) {
        self.epoch.raise();
        // Who takes no audio any more gives no credit either, and the end must not wait for it.
        self.credit.close();
    }
}

impl Session {
    fn engine(&self) -> &Engine {
        &self.service.engine
    }

    /// Whether the end of everything was told.
    fn is_idle(&self) -> bool {
        // What is not over holds its credit.
        self.jobs.values().all(|job| Arc::strong_count(&job.credit) == 1)
    }

    fn obey(&mut self, message: ToWorker) -> io::Result<()> {
        if self.jobs.len() >= MAX_WORK || self.streams.len() >= MAX_WORK {
            return Err(io::Error::other(format!("it has more than {MAX_WORK} utterances or streams here")));
        }
        match message {
            ToWorker::Submit(submission) => self.submit(*submission),
            ToWorker::Cancel { id } => {
                if let Some(job) = self.jobs.get(&id) {
                    job.cancel();
                }
            }
            ToWorker::Taken { id, pieces } => {
                if let Some(job) = self.jobs.get(&id) {
                    job.credit.add_permits(pieces.min(CREDIT));
                }
            }
            ToWorker::Note { stream, note } => self.note(stream, &note),
            ToWorker::Refresh => {
                let engine = self.engine().clone();
                tokio::spawn(async move { engine.refresh_voices().await });
            }
            ToWorker::Hello { .. } | ToWorker::Alive => {}
        }
        // Those that are over: nothing holds their credit but this.
        self.jobs.retain(|_, job| Arc::strong_count(&job.credit) > 1);
        Ok(())
    }

    /// Keeps a voice of the gateway.
    fn take(&mut self, content: String, file: Vec<u8>) {
        let Some(copies) = self.service.copies.clone() else { return };
        *self.arriving.entry(content.clone()).or_default() += 1;
        let (engine, arrived) = (self.engine().clone(), self.arrived.clone());
        tokio::spawn(async move {
            let what = content.clone();
            let kept = tokio::task::spawn_blocking(move || copies.take(&what, &file)).await;
            match kept {
                Ok(Ok(())) => engine.refresh_voices().await,
                // Utterances that want it say that there is no such voice.
                Ok(Err(error)) => tracing::error!(%error, voice = content, "a voice of a gateway was not kept"),
                Err(error) => tracing::error!(%error, voice = content, "a voice of a gateway was not kept"),
            }
            // overflow: awaited; a gateway that is gone waits for none
            let _ = arrived.send(content).await;
        });
    }

    /// A voice was kept, or could not be: what waited for it is begun.
    fn here(&mut self, content: &str) {
        if let Some(count) = self.arriving.get_mut(content) {
            *count -= 1;
            if *count == 0 {
                self.arriving.remove(content);
            }
        }
        for waiting in std::mem::take(&mut self.waiting) {
            self.begin(waiting);
        }
    }

    fn submit(&mut self, submission: Submission) {
        let (epoch, credit) = (Epoch::default(), Arc::new(Semaphore::new(CREDIT)));
        let job = Job { epoch: epoch.clone(), credit: credit.clone() };
        // A name that is used twice means the later one.
        if let Some(former) = self.jobs.insert(submission.id, job) {
            former.cancel();
        }
        let open = Unfinished::one_more(&self.service);
        self.begin(Waiting { submission, epoch, credit, open });
    }

    /// Speaks it, or has it wait for its voice, or behind another of its stream that does.
    fn begin(&mut self, waiting: Waiting) {
        let arriving = waiting.submission.content.as_ref().is_some_and(|content| self.arriving.contains_key(content));
        if arriving || self.waiting.iter().any(|other| other.submission.stream == waiting.submission.stream) {
            self.waiting.push(waiting);
            return;
        }
        let Waiting { submission, epoch, credit, open } = waiting;
        let Submission {
            id,
            stream,
            batch,
            text,
            voice,
            content,
            language,
            instructions,
            seed,
            speed,
            markup,
            sounds,
            tenant,
        } = submission;
        // By the name that it has at the gateway, and by what it is.
        let copied = |content: &String| {
            let name = voice.as_deref()?;
            Some(copies::copied(copies::parts(name).map_or(name, |(name, _)| name), content))
        };
        let voice = content.as_ref().and_then(copied).or(voice.clone());
        let utterance = Utterance {
            id: UtteranceId::next(),
            stream: *self.streams.entry(stream).or_insert_with(StreamId::next),
            class: wire::class(batch),
            token: epoch.token(),
            text,
            streamed: false,
            voice,
            language,
            instructions,
            seed,
            speed,
            markup,
            sounds,
            words: WordTimes::default(),
            tenant: tenant.into(),
        };
        let (sink, events) = mpsc::channel(SINK);
        let accepted = self.engine().submit(utterance, sink);
        let forwarded = forward(id, accepted.err(), events, credit, self.out.clone());
        tokio::spawn(async move {
            let _open = open;
            forwarded.await;
        });
    }

    fn note(&mut self, name: u64, note: &Note) {
        let stream = match note {
            Note::Closed => self.streams.remove(&name),
            // Said before the first utterance.
            Note::Unpaced => Some(*self.streams.entry(name).or_insert_with(StreamId::next)),
            _ => self.streams.get(&name).copied(),
        };
        let Some(stream) = stream else { return };
        let note = match note {
            Note::Anchored { ago_us } => {
                let now = clock::now();
                StreamNote::Anchored { at: now.checked_sub(std::time::Duration::from_micros(*ago_us)).unwrap_or(now) }
            }
            Note::Skipped { samples } => StreamNote::Skipped { samples: *samples },
            Note::Held => StreamNote::Held,
            Note::Resumed => StreamNote::Resumed,
            Note::Interrupted => StreamNote::Interrupted,
            Note::Unpaced => StreamNote::Unpaced,
            Note::Closed => StreamNote::Closed,
        };
        self.engine().note(stream, note);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.jobs.values().for_each(Job::cancel);
        self.streams.values().for_each(|stream| self.engine().note(*stream, StreamNote::Closed));
    }
}

/// Counts as an open utterance for as long as it lives.
struct Unfinished(Arc<watch::Sender<usize>>);

impl Unfinished {
    fn one_more(service: &Service) -> Self {
        service.open.send_modify(|open| *open += 1);
        Self(service.open.clone())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        self.0.send_modify(|open| *open -= 1);
    }
}

/// Sends the audio of one utterance as there is credit, and its end.
async fn forward(
    id: u64,
    refused: Option<crate::synth::device::Refused>,
    mut events: mpsc::Receiver<SpeechEvent>,
    credit: Arc<Semaphore>,
    out: mpsc::Sender<Vec<u8>>,
) {
    let mut how = refused.map(|refused| How::Refused { retry_after_ms: refused.retry_after.as_millis() as u64 });
    while how.is_none() {
        let frame = match events.recv().await {
            Some(SpeechEvent::Audio { pcm, .. }) => {
                let Ok(permit) = credit.acquire().await else { continue };
                permit.forget();
                wire::audio(id, &pcm)
            }
            Some(SpeechEvent::End { how: ended, .. }) => {
                how = Some(ended.into());
                continue;
            }
            None => {
                how = Some(UtteranceEnd::Failed("the worker is going down".into()).into());
                continue;
            }
        };
        // overflow: awaited, the socket empties it
        if out.send(frame).await.is_err() {
            return;
        }
    }
    let Some(how) = how else { return };
    // A gateway that is gone needs no answer.
    let _ = out.send(wire::message(&ToGateway::End { id, how })).await;
}

/// All devices together, as one.
fn status(engine: &Engine) -> Status {
    let devices: Vec<DeviceStatus> = engine.status();
    let ready: Vec<&DeviceStatus> = devices.iter().filter(|device| device.phase == Phase::Ready).collect();
    let Some(first) = ready.first().and_then(|device| device.caps.as_ref()) else { return Status::default() };
    let mut load = ready[0].load;
    for device in &ready[1..] {
        let other = &device.load;
        load.live += other.live;
        load.batch += other.batch;
        load.live_open += other.live_open;
        load.batch_open += other.batch_open;
        load.capacity += other.capacity;
        load.sustainable += other.sustainable;
        load.holding += other.holding;
        load.load += other.load;
        load.recent += other.recent;
        load.memory += other.memory;
        load.preemptions += other.preemptions;
        let least = |a: Option<f64>, b: Option<f64>| [a, b].into_iter().flatten().reduce(f64::min);
        load.first_audio = least(load.first_audio, other.first_audio);
        load.slack = least(load.slack, other.slack);
    }
    // Shares of one device each. JSON knows no infinity: what is not known yet is nothing.
    for (value, of) in [
        (&mut load.load, ready.len() as f64),
        (&mut load.recent, ready.len() as f64),
        (&mut load.sustainable, 1.0),
        (&mut load.holding, 1.0),
    ] {
        *value = if value.is_finite() { *value / of } else { 0.0 };
    }
    load.first_audio = load.first_audio.filter(|seconds| seconds.is_finite());
    Status {
        engine: Some(first.name.to_owned()),
        slots: ready.iter().filter_map(|device| Some(device.caps.as_ref()?.limits.slots)).sum(),
        voices: None,
        load,
        memory_total: ready.iter().map(|device| device.memory.total).sum(),
        memory_used: ready.iter().map(|device| device.memory.used).sum(),
        refusal: engine.has_room().err().map(Into::into),
        draining: false,
        model: engine.model(),
        copies: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_cancelled_ends_without_the_credit_of_who_listens_no_more() {
        let (sink, events) = mpsc::channel(8);
        let (out, mut frames) = mpsc::channel(8);
        let job = Job { epoch: Epoch::default(), credit: Arc::new(Semaphore::new(1)) };
        let forwarding = tokio::spawn(forward(7, None, events, job.credit.clone(), out));
        let utterance = UtteranceId::next();
        for _ in 0..3 {
            sink.send(SpeechEvent::Audio { utterance, pcm: vec![0.5] }).await.expect("room");
        }
        assert_eq!(frames.recv().await.expect("a frame"), wire::audio(7, &[0.5]));
        job.cancel();
        sink.send(SpeechEvent::End { utterance, how: UtteranceEnd::Cancelled }).await.expect("room");
        let end = wire::message(&ToGateway::End { id: 7, how: How::Cancelled });
        assert_eq!(frames.recv().await.expect("the end, and no more audio"), end);
        forwarding.await.expect("over");
    }

    #[tokio::test]
    async fn a_gateway_that_is_gone_leaves_nothing_waiting() {
        let (sink, events) = mpsc::channel(8);
        let (out, frames) = mpsc::channel(8);
        let job = Job { epoch: Epoch::default(), credit: Arc::new(Semaphore::new(0)) };
        let forwarding = tokio::spawn(forward(7, None, events, job.credit.clone(), out));
        let pcm = vec![0.5];
        sink.send(SpeechEvent::Audio { utterance: UtteranceId::next(), pcm }).await.expect("room");
        drop(frames);
        // As the session does when it is dropped.
        job.cancel();
        drop(sink);
        timeout(std::time::Duration::from_secs(30), forwarding).await.expect("in time").expect("over");
    }
}
