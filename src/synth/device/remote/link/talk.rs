//! One link's conversation with its worker: connecting, orders out, audio in, and what becomes of both when it breaks.

use std::collections::{HashMap, HashSet};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, ReadHalf, WriteHalf};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::{timeout, timeout_at};

use super::super::wire::{self, CREDIT, Frame, How, Note, Reader, SILENCE, Submission, ToGateway, ToWorker, VERSION};
use super::{Handed, Late, Link, Open, Order, PAUSES, SWEEP, WORDS, Worker};
use crate::clock;
use crate::sched::StreamNote;
use crate::synth::device::feed::Feed;
use crate::synth::device::phrases::Recorder;
use crate::synth::device::{Phase, Sound};
use crate::turn::{Class, NotBefore, Saying, SpeechEvent, SpeechSink, Utterance, UtteranceEnd, UtteranceId, WordEnd};

/// Keeps the link connected until it is stopped or forgotten.
pub(super) async fn run(link: Arc<Link>, mut orders: mpsc::Receiver<Order>) {
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
        // It said that it would go.
        let drained = open.is_empty() && link.state().status.draining;
        link.state().failures += u32::from(!drained);
        link.down(Phase::Failed(format!("worker {}: {reason}", link.worker.address)), pause);
        if drained {
            tracing::info!(worker = %link.worker.address, "a worker has ended what it had");
        } else if was_up || told.as_ref() != Some(&reason) {
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

/// Takes the orders while there is no worker, so that no call waits for room among them; returns when the link is to
/// stop. Cancel safe.
async fn without_worker(link: &Arc<Link>, orders: &mut mpsc::Receiver<Order>) {
    loop {
        match orders.recv().await {
            // It was accepted a moment before the worker was lost.
            Some(Order::Submit(handed)) => {
                hand_over(link, begun(link, handed.utterance, handed.sink, handed.words, None).0)
            }
            Some(Order::Stop) | None => return link.down(Phase::Stopped, Duration::ZERO),
            Some(Order::Expect(..) | Order::Note(..) | Order::Refresh(_) | Order::Taken(..) | Order::Written) => {}
        }
    }
}

trait Stream: AsyncRead + AsyncWrite + Send {}
impl<T: AsyncRead + AsyncWrite + Send> Stream for T {}

type Connection = (Reader<ReadHalf<Pin<Box<dyn Stream>>>>, WriteHalf<Pin<Box<dyn Stream>>>);

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
    let (from, mut to) = tokio::io::split(stream);
    let mut from = Reader::new(from);
    let hello = ToWorker::Hello { version: VERSION, token: token.reveal().to_owned() };
    timeout(SILENCE, wire::write(&mut to, &wire::message(&hello))).await??;
    match timeout(SILENCE, from.greeting()).await?? {
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
    let mut sweep = tokio::time::interval(SWEEP);
    sweep.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (mut said, mut heard) = (clock::now(), clock::now());
    // Voices that were sent, and of which the worker has not told yet.
    let mut sent = HashSet::new();
    let mut late = HashMap::new();
    loop {
        let mut out: Vec<u8> = Vec::new();
        tokio::select! {
            order = orders.recv() => match order {
                Some(Order::Stop) | None => return Ok(()),
                Some(order) => obey(link, order, open, &mut sent, &mut out),
            },
            frame = timeout_at((heard + SILENCE).into(), from.next::<ToGateway>()) => {
                let frame = frame.map_err(|_| io::Error::other("nothing heard from it"))??;
                heard = clock::now();
                hear(link, frame, open, &mut late)?;
                sent.retain(|content| !link.state().copies.contains_key(content));
            }
            _ = sweep.tick() => {
                for (id, open) in open.iter_mut().filter(|(_, open)| !open.cancelled) {
                    if open.utterance.token.is_stale() || open.sink.is_closed() {
                        open.cancelled = true;
                        out.extend(wire::message(&ToWorker::Cancel { id: *id }));
                    }
                }
                write_on(link, open, &mut out);
                let now = clock::now();
                late.retain(|_, late: &mut Late| now < late.until && late.words.is_wanted());
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
}

/// Sends what was written on of texts that the worker has the beginning of.
fn write_on(link: &Link, open: &HashMap<u64, Open>, out: &mut Vec<u8>) {
    let mut state = link.state();
    let (mine, later): (Vec<_>, _) =
        std::mem::take(&mut state.written).into_iter().partition(|id: &UtteranceId| open.contains_key(&id.0));
    state.written = later;
    for id in mine {
        for (Saying { text, sounds }, last) in state.texts.get_mut(&id).map(Feed::take).unwrap_or_default() {
            let (sounds, pinyin) = wire::apart(&sounds);
            out.extend(wire::message(&ToWorker::Append { id: id.0, text, last, sounds, pinyin }));
        }
    }
}

/// An utterance that was accepted, and the audio that its task hands on.
fn begun(link: &Link, utterance: Utterance, sink: SpeechSink, words: bool, recorder: Option<Recorder>) -> (Open, u64) {
    let (pieces, waiting) = mpsc::channel(CREDIT + 1);
    let id = utterance.id.0;
    tokio::spawn(hand_on(id, waiting, sink.clone(), link.orders.clone()));
    (Open { utterance, sink, pieces, given: 0, accepted: clock::now(), cancelled: false, words, recorder }, id)
}

fn obey(link: &Link, order: Order, open: &mut HashMap<u64, Open>, sent: &mut HashSet<String>, out: &mut Vec<u8>) {
    match order {
        Order::Submit(handed) => {
            let Handed { utterance, content, sink, words, recorder } = *handed;
            let content = content.filter(|content| has(link, utterance.voice.as_deref(), content, sent, out));
            let (sounds, pinyin) = wire::apart(&utterance.sounds);
            let submission = Submission {
                id: utterance.id.0,
                stream: utterance.stream.0,
                batch: utterance.class == Class::Batch,
                text: utterance.text.clone(),
                voice: utterance.voice.clone(),
                content,
                language: utterance.language.clone(),
                instructions: utterance.instructions.clone(),
                seed: utterance.seed,
                speed: utterance.speed,
                markup: utterance.markup,
                sounds,
                pinyin,
                tenant: utterance.tenant.to_string(),
                streamed: utterance.streamed,
                words,
                stages: utterance.class == Class::Live,
            };
            out.extend(wire::message(&ToWorker::Submit(Box::new(submission))));
            let (begun, id) = begun(link, utterance, sink, words, recorder);
            open.insert(id, begun);
            write_on(link, open, out);
        }
        Order::Expect(voice, content) => {
            // One that cannot be sent fails where somebody speaks with it.
            has(link, Some(&voice), &content, sent, out);
        }
        Order::Written => write_on(link, open, out),
        Order::Note(stream, note) => {
            let note = match note {
                StreamNote::Anchored { at } => {
                    Note::Anchored { ago_us: clock::now().saturating_duration_since(at).as_micros() as u64 }
                }
                StreamNote::Skipped { samples } => Note::Skipped { samples },
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
            // It may not be waited for.
            let _ = told.send(());
        }
        Order::Taken(id, pieces) if open.contains_key(&id) => {
            out.extend(wire::message(&ToWorker::Taken { id, pieces }));
        }
        Order::Taken(..) | Order::Stop => {}
    }
}

/// Has the worker have `voice`: it is sent before the first utterance that wants it. `false`: it cannot be,
/// and the worker says that it does not know the name, unless it does.
fn has(link: &Link, voice: Option<&str>, content: &str, sent: &mut HashSet<String>, out: &mut Vec<u8>) -> bool {
    if sent.contains(content) || link.state().copies.contains_key(content) {
        return true;
    }
    // A file of half a megabyte, once for each voice and worker: what else this thread carries waits that long.
    let library = link.library.get();
    let file = library.and_then(|library| library.file(voice?, content));
    match file.and_then(|file| wire::voice(content, &file)) {
        Some(frame) => {
            tracing::info!(worker = %link.worker.address, voice = content, bytes = frame.len(), "a voice is sent");
            metrics::counter!("antiphon_voices_copied_total").increment(1);
            out.extend(frame);
            sent.insert(content.to_owned());
            true
        }
        None => false,
    }
}

fn hear(
    link: &Link,
    frame: Frame<ToGateway>,
    open: &mut HashMap<u64, Open>,
    late: &mut HashMap<u64, Late>,
) -> io::Result<()> {
    match frame {
        Frame::Audio { id, pcm } => {
            // Of one that was cancelled, perhaps.
            let Some(open) = open.get_mut(&id) else { return Ok(()) };
            open.given += pcm.len();
            if let Some(recorder) = &mut open.recorder {
                recorder.hear(&pcm);
            }
            // overflow: never, there is room for all that the worker has credit for
            if let Err(mpsc::error::TrySendError::Full(_)) =
                open.pieces.try_send(SpeechEvent::Audio { utterance: open.utterance.id, pcm })
            {
                return Err(io::Error::other("it sends more audio than it was given credit for"));
            }
        }
        Frame::Message(ToGateway::End { id, how }) => {
            if let Some(mut ended) = open.remove(&id) {
                if let Some(recorder) = ended.recorder.take().filter(|_| how == How::Done) {
                    recorder.keep();
                }
                let Utterance { text, words, streamed, .. } = &ended.utterance;
                if ended.words && how == How::Done && !streamed && words.known().is_none() {
                    let until = clock::now() + WORDS;
                    late.insert(id, Late { text: text.clone(), words: words.clone(), until });
                }
                end(link, ended, how.into());
            }
        }
        Frame::Message(ToGateway::Words { id, begins, ends }) => {
            if let Some(Open { utterance: Utterance { text, words, streamed, .. }, .. }) = open.get(&id) {
                begins.into_iter().for_each(|(letters, samples)| words.begin(NotBefore { letters, samples }));
                // Of a text that is being written only its beginning is known here, and voices tell no more of it.
                if let Some(ends) = ends.filter(|_| !streamed).and_then(|ends| checked(text, ends)) {
                    words.tell(ends);
                }
            } else if let Some(Late { text, words, .. }) = late.remove(&id)
                && let Some(ends) = ends.and_then(|ends| checked(&text, ends))
            {
                words.tell(ends);
            }
        }
        Frame::Message(ToGateway::Stages { id, stages }) => {
            if let Some(open) = open.get(&id) {
                open.utterance.stages.tell(stages.into());
            }
        }
        Frame::Message(ToGateway::Status(status)) => link.hear(*status),
        Frame::Message(ToGateway::Welcome { .. }) | Frame::Voice { .. } => {}
    }
    Ok(())
}

/// The ends of words of `text`; `None`: they are none.
fn checked(text: &str, ends: Vec<(usize, u64)>) -> Option<Vec<WordEnd>> {
    let grow = ends.windows(2).all(|two| two[0].0 <= two[1].0 && two[0].1 <= two[1].1);
    let are = grow && ends.iter().all(|(at, _)| text.is_char_boundary(*at));
    are.then(|| ends.into_iter().map(|(text, samples)| WordEnd { text, samples }).collect())
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
    let like = link.kind().filter(|_| open.given > 0).map(|kind| Sound { kind, model: link.model() });
    let (sink, mut rest) = mpsc::channel(CREDIT);
    if let Err(refused) = respeak.respeak(like, utterance, &|| link.take_text(id), sink) {
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
        // overflow: awaited; the receiver may be gone
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
