use tokio::sync::mpsc;

use std::collections::HashSet;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use super::*;
use crate::synth::espeak::tests::utterance;
use crate::synth::tone::Tone;
use crate::synth::{Progress, Slot, Stages, Step};
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

/// The tone on a device with room for two utterances, in slots or in memory.
struct Small {
    tone: Tone,
    caps: Caps,
    /// Utterances that memory has room for; 0: it has for all.
    memory: u64,
    open: HashSet<Slot>,
    parked: HashSet<Slot>,
    taken_away: Arc<AtomicU32>,
}

impl Small {
    fn loader(slots: u32, memory: u64, taken_away: &Arc<AtomicU32>) -> Loader {
        let taken_away = taken_away.clone();
        let tone = Tone::new();
        let caps = Caps { slots, parks: memory > 0, ..tone.caps().clone() };
        Box::new(move || Ok(Box::new(Self { tone, caps, memory, open: [].into(), parked: [].into(), taken_away })))
    }
}

impl Synthesizer for Small {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn voices(&self) -> Vec<VoiceInfo> {
        self.tone.voices()
    }

    fn open(&mut self, slot: Slot, utterance: &Utterance) -> Result<Stages, SynthError> {
        self.open.insert(slot);
        self.tone.open(slot, utterance)
    }

    fn run(&mut self, step: &Step, out: &mut Vec<Progress>) -> Result<(), SynthError> {
        step.slots.iter().for_each(|slot| drop(self.parked.remove(slot)));
        let resident = self.open.len() - self.parked.len();
        assert!(self.memory == 0 || resident as u64 <= self.memory, "{resident} utterances in memory");
        let first = out.len();
        self.tone.run(step, out)?;
        // What is over no longer counts as taken away when its slot is closed.
        out[first..]
            .iter()
            .filter(|progress| progress.done)
            .for_each(|progress| drop(self.open.remove(&progress.slot)));
        Ok(())
    }

    fn close(&mut self, slot: Slot) {
        self.parked.remove(&slot);
        self.taken_away.fetch_add(u32::from(self.open.remove(&slot)), SeqCst);
        self.tone.close(slot);
    }

    fn park(&mut self, slot: Slot) {
        self.parked.insert(slot);
        self.taken_away.fetch_add(1, SeqCst);
    }

    fn memory(&self) -> Memory {
        Memory { total: self.memory, used: (self.open.len() - self.parked.len()) as u64 }
    }

    fn memory_needed(&self, _: &Utterance) -> u64 {
        u64::from(self.memory > 0)
    }

    fn warm_up(&mut self) -> Result<[Duration; 4], SynthError> {
        self.tone.warm_up()
    }
}

/// The audio of two batch utterances from which live ones take slots, or memory, in their middle.
async fn disturbed(slots: u32, memory: u64) -> (Vec<Vec<f32>>, u32) {
    let taken_away = Arc::new(AtomicU32::new(0));
    let engine = Engine::start(vec![Small::loader(slots, memory, &taken_away)], Config::default()).expect("starts");
    engine.ready().await;
    let mut batch = Vec::new();
    for _ in 0..2 {
        let (sink, mut events) = mpsc::channel(1);
        engine.submit(Utterance { class: Class::Batch, ..utterance(&"word ".repeat(300)) }, sink).expect("accepted");
        let mut heard = Vec::new();
        // Some of it comes; then it stands, because nobody reads on.
        while heard.len() < 24_000 {
            let Some(SpeechEvent::Audio { pcm, .. }) = events.recv().await else { panic!("no audio") };
            heard.extend(pcm);
        }
        batch.push((events, heard));
    }
    let epoch = Epoch::default();
    let mut live = Vec::new();
    for _ in 0..2 {
        let (sink, mut events) = mpsc::channel(1_024);
        // Longer than any lead, so that both stay open until they are cancelled.
        let long = Utterance { token: epoch.token(), ..utterance(&"word ".repeat(300)) };
        engine.submit(long, sink).expect("accepted");
        let Some(SpeechEvent::Audio { .. }) = events.recv().await else { panic!("live speech waits for batch") };
        live.push(events);
    }
    epoch.raise();
    let mut all = Vec::new();
    for (mut events, mut heard) in batch {
        loop {
            match events.recv().await {
                Some(SpeechEvent::Audio { pcm, .. }) => heard.extend(pcm),
                Some(SpeechEvent::End { how, .. }) => break assert_eq!(how, UtteranceEnd::Done),
                None => panic!("no end"),
            }
        }
        all.push(heard);
    }
    engine.shutdown();
    (all, taken_away.load(SeqCst))
}

#[tokio::test]
async fn a_displaced_or_parked_utterance_sounds_as_one_that_nobody_disturbed() {
    let mut tone = Tone::new();
    let reference = crate::synth::espeak::tests::speak(&mut tone, utterance(&"word ".repeat(300)));
    for (name, slots, memory) in [("displaced", 3, 0), ("parked", 8, 2)] {
        let (batch, taken_away) = disturbed(slots, memory).await;
        // Two slots or two utterances' memory for live ones are closed at their cancelling, too.
        assert!(taken_away > 2, "{name}: nothing was taken from batch");
        for heard in batch {
            assert!(heard == reference, "{name}: {} samples, {} expected", heard.len(), reference.len());
        }
    }
}

#[tokio::test]
async fn a_consumer_that_left_ends_the_work_before_any_audio() {
    let engine = engine();
    engine.ready().await;
    assert_eq!(engine.has_room(), Ok(()));
    let (sink, events) = mpsc::channel(4);
    let long = Utterance { class: Class::Batch, ..utterance(&"word ".repeat(300)) };
    engine.submit(long, sink).expect("accepted");
    drop(events);
    while engine.status()[0].load.batch > 0 {
        tokio::task::yield_now().await;
    }
    engine.shutdown();
}
