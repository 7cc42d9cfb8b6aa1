//! One gateway's connection to a worker: what it says, and what it has here.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::{timeout, timeout_at};

use super::super::wire::{
    self, CREDIT, Frame, Note, Reader, SILENCE, STATUS, Submission, ToGateway, ToWorker, VERSION,
};
use super::forward::forward;
use super::status::{status, told_of};
use super::{Door, Service};
use crate::clock;
use crate::secret::same;
use crate::synth::device::{Engine, StreamNote};
use crate::turn::{Epoch, Saying, StageTimes, StreamId, Utterance, UtteranceId, WordTimes};
use crate::voice::copies;

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

/// One gateway, until it is gone.
pub(super) async fn session(
    stream: impl AsyncRead + AsyncWrite + Send + 'static,
    door: &Door,
    service: Service,
    mut stop: watch::Receiver<bool>,
) -> io::Result<()> {
    let (from, to) = tokio::io::split(stream);
    let (mut from, mut to) = (Reader::new(Box::pin(from)), Box::pin(to));
    let hello = tokio::select! {
        _ = stop.changed() => return Ok(()),
        hello = timeout(SILENCE, from.greeting()) => hello??,
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
    let mut told = None;
    let mut tick = tokio::time::interval(STATUS);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut heard = clock::now();
    loop {
        tokio::select! {
            // Also when its sender is gone.
            _ = stop.changed() => break,
            ended = &mut writing => return Err(ended.unwrap_or_else(io::Error::other)),
            frame = timeout_at((heard + SILENCE).into(), from.next::<ToWorker>()) => {
                let frame = frame.map_err(|_| io::Error::other("nothing heard from it"))??;
                heard = clock::now();
                match frame {
                    Frame::Message(message) => session.obey(message)?,
                    Frame::Voice { content, file } => session.take(content, file),
                    Frame::Audio { .. } => return Err(io::Error::other("a gateway sends no audio")),
                }
            }
            Some(content) = arrivals.recv() => session.here(&content),
            _ = tick.tick() => {
                let mut status = status(session.engine());
                status.draining = session.service.is_draining();
                status.copies = session.service.copies.is_some() && status.engine.as_deref() == Some(WITH_FILES);
                let voices = (session.engine().voices_and_copies(), session.engine().contents());
                if told.as_ref() != Some(&voices) {
                    status.voices = Some(voices.0.iter().map(told_of).collect());
                    status.contents = Some(voices.1.clone());
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
    utterance: UtteranceId,
    epoch: Epoch,
    credit: Arc<Semaphore>,
    open: Unfinished,
    /// What was written of its text meanwhile, and whether each is the last.
    more: Vec<(Saying, bool)>,
}

struct Job {
    /// Our names of it and of its stream.
    utterance: UtteranceId,
    stream: StreamId,
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
            ToWorker::Append { id, text, last, sounds, pinyin } => {
                self.append(id, Saying { text, sounds: wire::together(sounds, pinyin) }, last);
            }
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
        let utterance = UtteranceId::next();
        let stream = *self.streams.entry(submission.stream).or_insert_with(StreamId::next);
        let job = Job { utterance, stream, epoch: epoch.clone(), credit: credit.clone() };
        // A name that is used twice means the later one.
        if let Some(former) = self.jobs.insert(submission.id, job) {
            former.cancel();
        }
        let open = Unfinished::one_more(&self.service);
        self.begin(Waiting { submission, utterance, epoch, credit, open, more: Vec::new() });
    }

    /// Goes on with a text that is still being written. One that is over takes no more.
    fn append(&mut self, id: u64, said: Saying, last: bool) {
        let Some(job) = self.jobs.get(&id) else { return };
        match self.waiting.iter_mut().find(|waiting| waiting.utterance == job.utterance) {
            Some(waiting) => waiting.more.push((said, last)),
            None => self.engine().append(job.stream, job.utterance, &said, last),
        }
    }

    /// Speaks it, or has it wait for its voice, or behind another of its stream that does.
    fn begin(&mut self, waiting: Waiting) {
        let arriving = waiting.submission.content.as_ref().is_some_and(|content| self.arriving.contains_key(content));
        if arriving || self.waiting.iter().any(|other| other.submission.stream == waiting.submission.stream) {
            self.waiting.push(waiting);
            return;
        }
        let Waiting { submission, utterance: own, epoch, credit, open, more } = waiting;
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
            pinyin,
            tenant,
            streamed,
            words: wanted,
            stages: asked,
        } = submission;
        // By the name that it has at the gateway, and by what it is.
        let copied = |content: &String| {
            let name = voice.as_deref()?;
            Some(copies::copied(copies::parts(name).map_or(name, |(name, _)| name), content))
        };
        let voice = content.as_ref().and_then(copied).or(voice.clone());
        let stream = *self.streams.entry(stream).or_insert_with(StreamId::next);
        let words = WordTimes::default();
        if wanted && batch {
            // Of what hurries somebody holds them; of this the gateway keeps what it hears.
            words.keep();
        }
        let utterance = Utterance {
            id: own,
            stream,
            class: wire::class(batch),
            token: epoch.token(),
            text,
            streamed,
            voice,
            language,
            instructions,
            seed,
            speed,
            markup,
            sounds: wire::together(sounds, pinyin),
            words: words.clone(),
            stages: StageTimes::default(),
            tenant: tenant.into(),
        };
        let stages = asked.then(|| utterance.stages.clone());
        let (sink, events) = mpsc::channel(SINK);
        // Held from before a voice can look whether anybody wants to know.
        let words = wanted.then_some(words);
        let accepted = self.engine().submit(utterance, sink);
        for (said, last) in more {
            self.engine().append(stream, own, &said, last);
        }
        let forwarded = forward(id, accepted.err(), events, words, stages, credit, self.out.clone());
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
