use tokio::sync::mpsc;

use super::*;
use crate::synth::espeak::tests::utterance;
use crate::synth::tone::Tone;
use crate::turn::{Class, Epoch, SpeechEvent, UtteranceEnd};

fn engine() -> Engine {
    let loader: Loader = Box::new(|| Ok(Box::new(Tone::new())));
    Engine::start(vec![loader], Config::default()).expect("starts")
}

async fn heard(mut events: mpsc::Receiver<SpeechEvent>) -> (usize, Option<UtteranceEnd>) {
    let mut samples = 0;
    while let Some(event) = events.recv().await {
        match event {
            SpeechEvent::Audio { pcm, .. } => samples += pcm.len(),
            SpeechEvent::End { how, .. } => return (samples, Some(how)),
        }
    }
    (samples, None)
}

#[tokio::test]
async fn an_utterance_is_spoken_and_ends() {
    let engine = engine();
    engine.ready().await;
    assert_eq!(engine.voices()[0].name, "tone");
    let (sink, events) = mpsc::channel(64);
    engine.submit(utterance("one three"), sink).expect("accepted");
    assert_eq!(heard(events).await, ((255 + 345) * 24, Some(UtteranceEnd::Done)));
    engine.shutdown();
}

#[tokio::test]
async fn a_raised_epoch_ends_the_utterance_and_frees_its_slot() {
    let engine = engine();
    engine.ready().await;
    let epoch = Epoch::default();
    let (sink, events) = mpsc::channel(64);
    // Longer than the lead limit, so that it cannot be finished before it is cancelled.
    let long = Utterance { token: epoch.token(), ..utterance(&"word ".repeat(200)) };
    let line = long.line;
    engine.submit(long, sink).expect("accepted");
    epoch.raise();
    engine.note(line, LineNote::Interrupted);
    assert_eq!(heard(events).await.1, Some(UtteranceEnd::Cancelled));
    assert_eq!(engine.status()[0].load.live_open, 0);
    engine.shutdown();
}

#[tokio::test]
async fn a_slow_batch_consumer_delays_but_loses_nothing() {
    let engine = engine();
    engine.ready().await;
    let (sink, mut events) = mpsc::channel(1);
    let batch = Utterance { class: Class::Batch, ..utterance(&"word ".repeat(50)) };
    engine.submit(batch, sink).expect("accepted");
    let mut samples = 0;
    while let Some(event) = events.recv().await {
        tokio::task::yield_now().await;
        match event {
            SpeechEvent::Audio { pcm, .. } => samples += pcm.len(),
            SpeechEvent::End { how, .. } => assert_eq!(how, UtteranceEnd::Done),
        }
    }
    assert_eq!(samples, 50 * (60 + 4 * 45 + 60) * 24);
    engine.shutdown();
}

#[tokio::test]
async fn a_closed_sink_cancels_and_an_unknown_voice_fails_by_name() {
    let engine = engine();
    engine.ready().await;
    let (sink, events) = mpsc::channel(64);
    drop(events);
    engine.submit(utterance(&"word ".repeat(100)), sink).expect("accepted");
    let (sink, mut events) = mpsc::channel(64);
    engine.submit(Utterance { voice: Some("nobody".into()), ..utterance("x") }, sink).expect("accepted");
    let Some(SpeechEvent::End { how: UtteranceEnd::Failed(reason), .. }) = events.recv().await else {
        panic!("not failed")
    };
    assert!(reason.contains("nobody") && reason.contains("tone"), "{reason}");
    engine.shutdown();
}

#[tokio::test]
async fn a_device_that_does_not_load_refuses_and_says_why() {
    let loader: Loader = Box::new(|| Err(SynthError::Device("no such device".into())));
    let engine = Engine::start(vec![loader], Config::default()).expect("starts");
    engine.ready().await;
    let (sink, _events) = mpsc::channel(4);
    let refused = engine.submit(utterance("x"), sink).expect_err("refused");
    assert_eq!(refused.reason, RefusedReason::NotReady);
    assert!(matches!(&engine.status()[0].phase, Phase::Failed(reason) if reason.contains("no such device")));
    engine.shutdown();
}

#[tokio::test]
async fn a_panicking_voice_fails_its_device_only() {
    let loaders: Vec<Loader> = vec![Box::new(|| panic!("broken")), Box::new(|| Ok(Box::new(Tone::new())))];
    let engine = Engine::start(loaders, Config::default()).expect("starts");
    engine.ready().await;
    let (sink, events) = mpsc::channel(64);
    engine.submit(utterance("still here"), sink).expect("accepted by the other");
    assert_eq!(heard(events).await.1, Some(UtteranceEnd::Done));
    engine.shutdown();
}
