//! A gateway's engine and its workers over real sockets.

mod voices;
mod written;

use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::link::Worker;
use super::serve::{Door, Service, serve};
use crate::sched::{Config, StreamNote};
use crate::secret::Secret;
use crate::synth::device::{Engine, Loader, Phase, Recovery, phrases};
use crate::synth::tone::Tone;
use crate::turn::{Class, Epoch, SpeechEvent, StreamId, Utterance, UtteranceEnd};

const PATIENCE: Duration = Duration::from_secs(60);
const TOKEN: &str = "between-machines";

fn tone() -> Vec<Loader> {
    vec![Box::new(|| Ok(Box::new(Tone::new())))]
}

/// A worker that can be stopped.
struct Running {
    engine: Engine,
    service: Service,
    address: String,
    stop: watch::Sender<bool>,
    served: JoinHandle<()>,
}

impl Running {
    async fn start() -> Self {
        let engine = Engine::start(tone(), Config::default()).expect("starts");
        engine.ready().await;
        Self::serving(Service::new(engine)).await
    }

    async fn serving(service: Service) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound").to_string();
        let (stop, stopped) = watch::channel(false);
        let door = Door { token: Secret::new(TOKEN), tls: None };
        let served = tokio::spawn(serve(listener, door, service.clone(), stopped));
        Self { engine: service.engine().clone(), service, address, stop, served }
    }

    fn worker(&self, token: &str) -> Worker {
        Worker { address: self.address.clone(), token: Secret::new(token), tls: None }
    }

    async fn stop(self) {
        self.stop.send(true).expect("it runs");
        self.served.await.expect("no panic");
    }
}

fn gateway(workers: Vec<Worker>, loaders: Vec<Loader>) -> Engine {
    Engine::start_with_workers(workers, loaders, Config::default(), Recovery::default()).expect("starts")
}

/// Waits until so many devices are ready.
async fn ready(engine: &Engine, count: usize) {
    let all = async {
        while engine.status().iter().filter(|device| device.phase == Phase::Ready).count() < count {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, all).await.expect("ready in time");
}

fn utterance(stream: StreamId, text: &str) -> Utterance {
    Utterance { seed: 7, ..Utterance::plain(stream, Class::Live, text) }
}

/// What is left of an utterance.
async fn rest(events: &mut mpsc::Receiver<SpeechEvent>) -> (Vec<f32>, UtteranceEnd) {
    let mut heard = Vec::new();
    loop {
        match timeout(PATIENCE, events.recv()).await.expect("in time").expect("an end before the close") {
            SpeechEvent::Audio { pcm, .. } => heard.extend(pcm),
            SpeechEvent::End { how, .. } => return (heard, how),
        }
    }
}

async fn spoken(engine: &Engine, text: &str) -> Vec<f32> {
    let (sink, mut events) = mpsc::channel(8);
    let stream = StreamId::next();
    engine.note(stream, StreamNote::Unpaced);
    engine.submit(utterance(stream, text), sink).expect("accepted");
    let (heard, how) = rest(&mut events).await;
    assert_eq!(how, UtteranceEnd::Done);
    engine.note(stream, StreamNote::Closed);
    heard
}

#[tokio::test]
async fn a_worker_speaks_to_the_bit_what_a_device_in_process_does() {
    let running = Running::start().await;
    let engine = gateway(vec![running.worker(TOKEN)], Vec::new());
    ready(&engine, 1).await;
    let text = "Nothing of this was made here.";
    assert_eq!(spoken(&engine, text).await, spoken(&running.engine, text).await);
    assert_eq!(engine.voices(), running.engine.voices());
    let status = &engine.status()[0];
    assert_eq!(status.caps.as_ref().map(|caps| caps.name), Some("tone"));
    assert!(status.produced > 0 && engine.has_room().is_ok());
    running.stop().await;
}

/// What a worker spoke once needs none again, and is kept apart from what another model would say.
#[tokio::test]
async fn a_phrase_that_a_worker_spoke_is_kept_here() {
    let running = Running::start().await;
    let engine = gateway(vec![running.worker(TOKEN)], Vec::new());
    ready(&engine, 1).await;
    engine.keep_phrases(&phrases::Config { disk_mib: 0, ..phrases::Config::default() });
    let text = "Hello, you have reached support.";
    let known = async {
        while engine.fix_phrases(&[utterance(StreamId::next(), text)]).is_none_or(|missing| missing.is_empty()) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, known).await.expect("the worker tells what its voice is");
    let first = spoken(&engine, text).await;
    let made = running.engine.status()[0].produced;
    assert_eq!(engine.fix_phrases(&[utterance(StreamId::next(), text)]).map(|missing| missing.len()), Some(0));
    assert_eq!(spoken(&engine, text).await, first);
    assert_eq!(spoken(&engine, "Something else.").await, spoken(&running.engine, "Something else.").await);
    let worker = running.engine.status()[0].produced;
    assert!(made > 0 && worker > made, "the worker spoke the other text");
    // With another seed it is another phrase.
    let other = Utterance { seed: 8, ..utterance(StreamId::next(), text) };
    assert_eq!(engine.fix_phrases(&[other]).map(|missing| missing.len()), Some(1));
    running.stop().await;
}

#[tokio::test]
async fn what_is_cancelled_here_ends_there() {
    let running = Running::start().await;
    let engine = gateway(vec![running.worker(TOKEN)], Vec::new());
    ready(&engine, 1).await;
    let (stream, epoch) = (StreamId::next(), Epoch::default());
    let (sink, mut events) = mpsc::channel(8);
    let long = "This is said for a long time. ".repeat(40);
    engine.submit(Utterance { token: epoch.token(), ..utterance(stream, &long) }, sink).expect("accepted");
    assert!(matches!(timeout(PATIENCE, events.recv()).await.expect("in time"), Some(SpeechEvent::Audio { .. })));
    epoch.raise();
    engine.note(stream, StreamNote::Interrupted);
    let (_, how) = rest(&mut events).await;
    assert_eq!(how, UtteranceEnd::Cancelled);
    let idle = async {
        while running.engine.status()[0].load.live > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, idle).await.expect("the worker has nothing left");
    running.stop().await;
}

#[tokio::test]
async fn a_lost_workers_speech_goes_on_at_another_without_a_join() {
    let text = "This sentence is begun by one worker and finished by another one. ".repeat(12);
    let (first, second) = (Running::start().await, Running::start().await);
    let whole = spoken(&second.engine, &text).await;
    let engine = gateway(vec![first.worker(TOKEN), second.worker(TOKEN)], Vec::new());
    ready(&engine, 2).await;

    // Nobody reads on, so that the worker cannot finish before it is lost.
    let (sink, mut events) = mpsc::channel(1);
    let stream = StreamId::next();
    engine.note(stream, StreamNote::Unpaced);
    engine.submit(utterance(stream, &text), sink).expect("accepted");
    let mut heard = match timeout(PATIENCE, events.recv()).await.expect("in time") {
        Some(SpeechEvent::Audio { pcm, .. }) => pcm,
        other => panic!("{other:?}"),
    };
    let speaks = |running: &Running| running.engine.status()[0].load.live > 0;
    assert!(speaks(&first) != speaks(&second), "one of them speaks");
    let (lost, other) = if speaks(&first) { (first, second) } else { (second, first) };
    lost.stop().await;
    let (more, how) = rest(&mut events).await;
    heard.extend(more);
    assert_eq!(how, UtteranceEnd::Done);
    assert!(heard == whole, "{} samples of {}", heard.len(), whole.len());
    other.stop().await;
}

#[tokio::test]
async fn the_voice_of_this_machine_speaks_while_no_worker_can() {
    let engine = gateway(vec![Worker { address: "127.0.0.1:9".into(), token: Secret::new(""), tls: None }], tone());
    ready(&engine, 1).await;
    assert!(!spoken(&engine, "Here it is.").await.is_empty());
    assert!(engine.has_room().is_ok());
}

#[tokio::test]
async fn a_gateway_that_does_not_know_the_token_is_told_so() {
    let running = Running::start().await;
    let engine = gateway(vec![running.worker("something else")], Vec::new());
    let refused = async {
        loop {
            if let Phase::Failed(reason) = &engine.status()[0].phase {
                return reason.clone();
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let reason = timeout(PATIENCE, refused).await.expect("in time");
    assert!(reason.contains("[cluster] token"), "{reason}");
    let (sink, _events) = mpsc::channel(8);
    assert!(engine.submit(utterance(StreamId::next(), "No."), sink).is_err());
    running.stop().await;
}

/// The utterance's first audio.
async fn begun(events: &mut mpsc::Receiver<SpeechEvent>) -> Vec<f32> {
    match timeout(PATIENCE, events.recv()).await.expect("in time") {
        Some(SpeechEvent::Audio { pcm, .. }) => pcm,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_worker_that_drains_ends_what_it_has_and_begins_nothing() {
    let text = "What was begun here is ended here, and only then the worker goes. ".repeat(8);
    let (first, second) = (Running::start().await, Running::start().await);
    let whole = spoken(&second.engine, &text).await;
    let engine = gateway(vec![first.worker(TOKEN), second.worker(TOKEN)], Vec::new());
    ready(&engine, 2).await;
    let (sink, mut events) = mpsc::channel(1);
    let stream = StreamId::next();
    engine.note(stream, StreamNote::Unpaced);
    engine.submit(utterance(stream, &text), sink).expect("accepted");
    let mut heard = begun(&mut events).await;
    let (leaves, stays) = if first.service.open() == 1 { (first, second) } else { (second, first) };
    assert_eq!((leaves.service.open(), stays.service.open()), (1, 0));
    leaves.service.drain();
    assert!(leaves.service.told().draining);
    let told = async {
        // A link that drains has no load for new work.
        while engine.inner.devices().values().filter_map(|device| device.load(crate::clock::now())).count() == 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, told).await.expect("the gateway hears that it drains");
    let made = |running: &Running| running.engine.status()[0].produced;
    let before = made(&stays);
    for _ in 0..3 {
        assert!(!spoken(&engine, "Another stream speaks at the other one.").await.is_empty());
    }
    assert!(made(&stays) > before && leaves.service.open() == 1);
    let before = made(&stays);

    // The worker is not idle before the last of it was taken, and stops without a loss.
    let (rest, ()) = tokio::join!(rest(&mut events), leaves.service.idle());
    assert_eq!(made(&leaves), whole.len() as u64, "nothing but this");
    leaves.stop().await;
    heard.extend(rest.0);
    assert!(heard == whole && rest.1 == UtteranceEnd::Done, "{} samples of {}", heard.len(), whole.len());
    assert_eq!(made(&stays), before, "it was not spoken again");
    stays.stop().await;
}

#[tokio::test]
async fn workers_come_and_go_while_the_engine_runs() {
    let engine = gateway(Vec::new(), tone());
    ready(&engine, 1).await;
    let (first, second) = (Running::start().await, Running::start().await);
    engine.keep_workers(vec![first.worker(TOKEN), second.worker(TOKEN)]);
    ready(&engine, 3).await;
    let text = "Said by whoever is there. ".repeat(20);
    let whole = spoken(&engine, &text).await;
    let made = |engine: &Engine| -> Vec<u64> { engine.status().iter().map(|device| device.produced).collect() };
    assert_eq!(made(&engine)[2], 0, "workers come before this machine: {:?}", made(&engine));

    // A registry that has lost everything ends nothing: who is connected stays.
    engine.keep_workers(Vec::new());
    assert_eq!(engine.status().len(), 3);

    // One leaves in the middle of an utterance; the registry says so a moment later.
    let (sink, mut events) = mpsc::channel(1);
    let stream = StreamId::next();
    engine.note(stream, StreamNote::Unpaced);
    engine.submit(utterance(stream, &text), sink).expect("accepted");
    let mut heard = begun(&mut events).await;
    let (lost, other) = if first.service.open() == 1 { (first, second) } else { (second, first) };
    assert_eq!(lost.service.open(), 1);
    let gone = lost.address.clone();
    lost.stop().await;
    let (more, how) = rest(&mut events).await;
    heard.extend(more);
    assert!(how == UtteranceEnd::Done && heard == whole, "{} samples of {}", heard.len(), whole.len());
    let forgotten = async {
        while engine.status().len() > 2 {
            engine.keep_workers(vec![other.worker(TOKEN)]);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, forgotten).await.expect("who is gone is no device any more");
    assert!(!engine.status().iter().any(|device| device.caps.as_ref().is_some_and(|caps| caps.device.contains(&gone))));
    // The stream that was placed there speaks on elsewhere.
    let (sink, mut events) = mpsc::channel(8);
    engine.submit(utterance(stream, "Here still."), sink).expect("accepted");
    assert_eq!(rest(&mut events).await.1, UtteranceEnd::Done);
    other.stop().await;
}
