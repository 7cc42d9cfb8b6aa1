use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use tokio::sync::mpsc;

use super::*;
use crate::synth::espeak::tests::utterance;
use crate::synth::tone::Tone;
use crate::synth::{EngineLimits, Need, Precedence, Progress, Seeds, Slot, Stages, Step};
use crate::turn::{Class, Epoch, SpeechEvent, UtteranceEnd};

mod hanging;
mod panics;
mod placement;
mod roused;
mod shown;

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
    let stream = long.stream;
    engine.submit(long, sink).expect("accepted");
    epoch.raise();
    engine.note(stream, StreamNote::Interrupted);
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

/// What a [`Flaky`] voice does at its next step.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    /// The device is lost.
    Device,
    /// The voice panics.
    Panic,
    /// The first slot of the step cannot go on.
    Row,
    /// The step finds no memory.
    Memory,
}

#[derive(Default)]
struct Script {
    fault: Mutex<Option<Fault>>,
    loads: AtomicU32,
    /// Loads that fail, counted from the second.
    broken_loads: AtomicU32,
    /// Utterances are open and never have anything to run: nothing is learned of what steps cost.
    mute: AtomicBool,
    /// The second load panics when it is over, outside of what the device is asked for.
    beside: AtomicBool,
    /// How often it rehearsed.
    rehearsals: AtomicU32,
}

impl Script {
    fn next(&self, fault: Fault) {
        *lock(&self.fault) = Some(fault);
    }
}

/// The tone, failing as its script says.
struct Flaky {
    tone: Tone,
    script: Arc<Script>,
}

fn flaky(script: &Arc<Script>) -> Loader {
    let script = script.clone();
    Box::new(move || {
        let loads = script.loads.fetch_add(1, Ordering::Relaxed);
        if loads > 0 && script.broken_loads.load(Ordering::Relaxed) >= loads {
            let gone = "still gone".into();
            // Whatever a device that has worked says, it may work again.
            return Err(if loads.is_multiple_of(2) { SynthError::Unusable(gone) } else { SynthError::Device(gone) });
        }
        Ok(Box::new(Flaky { tone: Tone::new(), script: script.clone() }))
    })
}

impl Synthesizer for Flaky {
    fn caps(&self) -> &Caps {
        self.tone.caps()
    }

    fn voices(&self) -> Vec<VoiceInfo> {
        self.tone.voices()
    }

    fn open(&mut self, slot: Slot, utterance: &Utterance) -> Result<Stages, SynthError> {
        let ready = self.tone.open(slot, utterance)?;
        Ok(if self.script.mute.load(Ordering::Relaxed) { Stages::NONE } else { ready })
    }

    fn run(&mut self, step: &Step, out: &mut Vec<Progress>) -> Result<(), SynthError> {
        let fault = lock(&self.script.fault).take();
        match fault {
            Some(Fault::Device) => return Err(SynthError::Device("the cable was pulled".into())),
            Some(Fault::Panic) => panic!("a bug"),
            Some(Fault::Memory) => return Err(SynthError::Memory { needed: 2, free: 1 }),
            Some(Fault::Row) | None => {}
        }
        let first = out.len();
        self.tone.run(step, out)?;
        if fault == Some(Fault::Row) {
            let row = &mut out[first];
            row.outcome.failed = Some("a sample is not a number".into());
            row.outcome.ready = Stages::NONE;
        }
        Ok(())
    }

    fn close(&mut self, slot: Slot) {
        self.tone.close(slot);
    }

    fn rehearse(&mut self) -> Result<(), SynthError> {
        self.script.rehearsals.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn warm_up(&mut self) -> Result<Seeds, SynthError> {
        self.tone.warm_up()
    }

    fn precedence(&self) -> Option<Arc<Precedence>> {
        let second = self.script.loads.load(Ordering::Relaxed) == 2;
        assert!(!second || !self.script.beside.load(Ordering::Relaxed), "a bug beside the voice");
        None
    }
}

/// Pauses that a test can wait for.
const SOON: Recovery = Recovery { first: Duration::from_millis(1), most: Duration::from_millis(4), hangs: LONG };
/// Pauses that no test waits for.
const NEVER: Recovery = Recovery { first: Duration::from_secs(3600), most: Duration::from_secs(3600), hangs: LONG };
/// No test takes so long.
const LONG: Duration = Duration::from_secs(3600);

fn engine_of(scripts: &[&Arc<Script>], recovery: Recovery) -> Engine {
    let loaders = scripts.iter().map(|script| flaky(script)).collect();
    Engine::start_with(loaders, Config::default(), recovery).expect("starts")
}

/// The device of this number, from 0.
fn device_of(engine: &Engine, device: usize) -> Device {
    engine.inner.devices()[&(LOCAL + device)].clone()
}

async fn phase(engine: &Engine, device: usize, wanted: impl FnMut(&Phase) -> bool) {
    let mut phase = device_of(engine, device).local().phase.clone();
    phase.wait_for(wanted).await.expect("the thread lives");
}

/// Long enough that it is not finished before something else happens: the lead limit stops it, its listener never
/// anchors it.
fn long() -> Utterance {
    utterance(&"word ".repeat(400))
}

fn failed(how: Option<UtteranceEnd>) -> String {
    match how {
        Some(UtteranceEnd::Failed(reason)) => reason,
        other => panic!("not failed: {other:?}"),
    }
}

#[tokio::test]
async fn a_device_that_failed_tells_its_streams_why_and_comes_back() {
    for fault in [Fault::Device, Fault::Panic] {
        let script = Arc::new(Script::default());
        let engine = engine_of(&[&script], SOON);
        engine.ready().await;
        script.broken_loads.store(3, Ordering::Relaxed);
        script.next(fault);
        let (sink, events) = mpsc::channel(64);
        engine.submit(utterance("one two"), sink).expect("accepted");
        let reason = failed(heard(events).await.1);
        assert!(reason.contains(if fault == Fault::Device { "the cable was pulled" } else { "a bug" }), "{reason}");
        let mut phases = device_of(&engine, 0).local().phase.clone();
        while *phases.borrow_and_update() != Phase::Ready {
            phases.changed().await.expect("the thread lives");
        }
        // The failure, and three loads that failed.
        let status = &engine.status()[0];
        assert_eq!((status.failures, status.retry_in), (4, None));
        assert_eq!(script.loads.load(Ordering::Relaxed), 5);
        let (sink, events) = mpsc::channel(64);
        engine.submit(utterance("one three"), sink).expect("accepted");
        assert_eq!(heard(events).await, ((255 + 345) * 24, Some(UtteranceEnd::Done)));
        engine.shutdown();
    }
}

#[tokio::test]
async fn a_device_that_cannot_be_used_says_why_and_is_not_tried_again() {
    let loads = Arc::new(AtomicU32::new(0));
    let counted = loads.clone();
    let loader: Loader = Box::new(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        Err(SynthError::Unusable("of compute capability 7.5".into()))
    });
    // Whatever were tried again would be so at once.
    let recovery = Recovery { first: Duration::ZERO, most: Duration::ZERO, ..Recovery::default() };
    let engine = Engine::start_with(vec![loader], Config::default(), recovery).expect("it starts");
    engine.ready().await;
    let status = &engine.status()[0];
    assert!(matches!(&status.phase, Phase::Failed(reason) if reason.contains("7.5")), "{:?}", status.phase);
    assert_eq!((status.failures, status.retry_in), (1, None));
    engine.shutdown();
    assert_eq!(loads.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn the_other_devices_go_on_and_take_the_streams_over() {
    let scripts = [Arc::new(Script::default()), Arc::new(Script::default())];
    let engine = engine_of(&[&scripts[0], &scripts[1]], NEVER);
    engine.ready().await;
    // One stream on each: the second goes where there is more room.
    let (sink, on_first) = mpsc::channel(1024);
    let first = long();
    let stream = first.stream;
    engine.submit(first, sink).expect("accepted");
    let (sink, on_second) = mpsc::channel(1024);
    let epoch = Epoch::default();
    engine.submit(Utterance { token: epoch.token(), ..long() }, sink).expect("accepted");
    assert_eq!(engine.status().iter().map(|d| d.load.live).collect::<Vec<_>>(), [1, 1]);
    scripts[0].next(Fault::Device);
    // The first device rests at its lead limit by now or soon; another utterance of the stream makes it step.
    engine.note(stream, StreamNote::Anchored { at: clock::now() - Duration::from_secs(600) });
    assert!(failed(heard(on_first).await.1).contains("the cable was pulled"));
    let status = engine.status();
    assert!(matches!(&status[0].phase, Phase::Failed(reason) if reason.contains("the cable was pulled")));
    assert!(status[0].retry_in.is_some_and(|wait| wait > Duration::from_secs(3000)));
    assert_eq!((&status[1].phase, status[1].load.live), (&Phase::Ready, 1), "the other has its stream");
    // The stream speaks on, on the device that is left; so do new ones.
    for stream in [stream, StreamId::next()] {
        let (sink, events) = mpsc::channel(64);
        engine.submit(Utterance { stream, ..utterance("still here") }, sink).expect("accepted");
        assert_eq!(heard(events).await.1, Some(UtteranceEnd::Done));
    }
    epoch.raise();
    engine.note(StreamId(0), StreamNote::Interrupted);
    assert_eq!(heard(on_second).await.1, Some(UtteranceEnd::Cancelled), "not failed");
    // A device at rest is shut down at once.
    engine.shutdown();
}

#[tokio::test]
async fn a_row_that_fails_ends_alone() {
    let script = Arc::new(Script::default());
    let engine = engine_of(&[&script], NEVER);
    engine.ready().await;
    let mut all = Vec::new();
    script.next(Fault::Row);
    for _ in 0..4 {
        let (sink, events) = mpsc::channel(64);
        engine.submit(utterance("one three"), sink).expect("accepted");
        all.push(events);
    }
    let mut failures = 0;
    for events in all {
        match heard(events).await {
            (samples, Some(UtteranceEnd::Done)) => assert_eq!(samples, (255 + 345) * 24),
            (_, how) => {
                assert!(failed(how).contains("not a number"));
                failures += 1;
            }
        }
    }
    assert_eq!(failures, 1);
    assert_eq!((engine.status()[0].failures, &engine.status()[0].phase), (0, &Phase::Ready));
    engine.shutdown();
}

#[tokio::test]
async fn a_step_without_memory_ends_its_utterances_and_not_the_device() {
    let script = Arc::new(Script::default());
    let engine = engine_of(&[&script], NEVER);
    engine.ready().await;
    script.next(Fault::Memory);
    let (sink, events) = mpsc::channel(64);
    engine.submit(utterance("one three"), sink).expect("accepted");
    assert!(failed(heard(events).await.1).contains("not enough device memory"));
    let (sink, events) = mpsc::channel(64);
    engine.submit(utterance("one three"), sink).expect("accepted");
    assert_eq!(heard(events).await.1, Some(UtteranceEnd::Done));
    assert_eq!(engine.status()[0].failures, 0);
    engine.shutdown();
}

#[tokio::test]
async fn a_slow_reader_hears_how_it_ended_after_its_device_failed() {
    let script = Arc::new(Script::default());
    let engine = engine_of(&[&script], NEVER);
    engine.ready().await;
    let (sink, events) = mpsc::channel(1);
    let batch = Utterance { class: Class::Batch, ..long() };
    engine.submit(batch, sink).expect("accepted");
    // Its sink is full and it waits; the device fails under another utterance.
    let mut made = device_of(&engine, 0).local().phase.clone();
    while engine.status()[0].produced == 0 {
        tokio::task::yield_now().await;
    }
    script.next(Fault::Device);
    let (sink, other) = mpsc::channel(64);
    match engine.submit(utterance("one"), sink) {
        Ok(()) => assert!(failed(heard(other).await.1).contains("the cable was pulled")),
        // It failed under a step of the slow reader's own that was on its way.
        Err(refused) => assert_eq!(refused.reason, RefusedReason::NotReady),
    }
    made.wait_for(|phase| matches!(phase, Phase::Failed(_))).await.expect("the thread lives");
    assert!(failed(heard(events).await.1).contains("the cable was pulled"));
    engine.shutdown();
}

#[tokio::test]
async fn a_device_that_never_loads_does_not_keep_the_others_from_speaking() {
    let broken: Loader = Box::new(|| Err(SynthError::Device("no such device".into())));
    let loaders = vec![broken, Box::new(|| Ok(Box::new(Tone::new()) as Box<dyn Synthesizer>)) as Loader];
    let engine = Engine::start_with(loaders, Config::default(), SOON).expect("starts");
    phase(&engine, 1, |phase| *phase == Phase::Ready).await;
    for _ in 0..20 {
        let (sink, events) = mpsc::channel(64);
        engine.submit(utterance("still here"), sink).expect("accepted by the other");
        assert_eq!(heard(events).await.1, Some(UtteranceEnd::Done));
    }
    engine.shutdown();
}

#[test]
fn pauses_double_up_to_the_most() {
    let recovery = Recovery { first: Duration::from_secs(1), most: Duration::from_secs(60), ..Recovery::default() };
    let pauses: Vec<u64> = [1, 2, 3, 6, 7, 8, 40, u32::MAX].map(|n| recovery.pause(n).as_secs()).to_vec();
    assert_eq!(pauses, [1, 2, 4, 32, 60, 60, 60, 60]);
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
    /// The launched step, and how often it is still asked for.
    launched: Option<(Step, u32)>,
}

impl Small {
    fn loader(slots: u32, memory: u64, launches: bool, taken_away: &Arc<AtomicU32>) -> Loader {
        let taken_away = taken_away.clone();
        Box::new(move || {
            let (tone, taken_away) = (Tone::new(), taken_away.clone());
            let limits = EngineLimits { slots, parks: memory > 0, launches, ..tone.caps().limits.clone() };
            let caps = Caps { limits, ..tone.caps().clone() };
            Ok(Box::new(Self { tone, caps, memory, open: [].into(), parked: [].into(), taken_away, launched: None }))
        })
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
        self.parked.retain(|slot| !step.slots.contains(slot));
        let resident = self.open.len() - self.parked.len();
        assert!(self.memory == 0 || resident as u64 <= self.memory, "{resident} utterances in memory");
        let first = out.len();
        self.tone.run(step, out)?;
        // What is over no longer counts as taken away when its slot is closed.
        self.open.retain(|slot| {
            !out[first..].iter().any(|progress| progress.outcome.done && progress.outcome.slot == *slot)
        });
        Ok(())
    }

    fn launch(&mut self, step: &Step) -> Result<bool, SynthError> {
        assert!(self.caps.limits.launches && self.launched.is_none());
        // One in three cannot be launched.
        let can = step.slots[0].0 % 3 != 2;
        self.launched = can.then(|| (step.clone(), 5));
        Ok(can)
    }

    fn poll(&mut self) -> Result<bool, SynthError> {
        let Some((_, asked)) = &mut self.launched else { return Ok(true) };
        *asked = asked.saturating_sub(1);
        Ok(*asked == 0)
    }

    fn complete(&mut self, out: &mut Vec<Progress>) -> Result<(), SynthError> {
        let (step, _) = self.launched.take().expect("it was launched");
        self.run(&step, out)
    }

    fn close(&mut self, slot: Slot) {
        assert!(self.launched.as_ref().is_none_or(|(step, _)| !step.slots.contains(&slot)), "{slot:?} is busy");
        self.parked.remove(&slot);
        self.taken_away.fetch_add(u32::from(self.open.remove(&slot)), Ordering::SeqCst);
        self.tone.close(slot);
    }

    fn park(&mut self, slot: Slot) {
        self.parked.insert(slot);
        self.taken_away.fetch_add(1, Ordering::SeqCst);
    }

    fn memory(&self) -> Memory {
        Memory { total: self.memory, used: (self.open.len() - self.parked.len()) as u64 }
    }

    fn prepare(&mut self, _: &Utterance) -> Result<Need, SynthError> {
        Ok(Need::exactly(u64::from(self.memory > 0)))
    }

    fn warm_up(&mut self) -> Result<Seeds, SynthError> {
        self.tone.warm_up()
    }
}

/// The audio of two batch utterances from which live ones take slots, or memory, in their middle.
async fn disturbed(slots: u32, memory: u64, launches: bool) -> (Vec<Vec<f32>>, u32) {
    let taken_away = Arc::new(AtomicU32::new(0));
    let engine =
        Engine::start(vec![Small::loader(slots, memory, launches, &taken_away)], Config::default()).expect("starts");
    engine.ready().await;
    let mut batch = Vec::new();
    for _ in 0..2 {
        let (sink, mut events) = mpsc::channel(1);
        engine.submit(Utterance { class: Class::Batch, ..utterance(&"word ".repeat(300)) }, sink).expect("accepted");
        let mut heard = Vec::new();
        // Some of it comes; then it stands, because its sink is not read.
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
    (all, taken_away.load(Ordering::SeqCst))
}

#[tokio::test]
async fn a_displaced_or_parked_utterance_sounds_as_one_that_was_not_disturbed() {
    let mut tone = Tone::new();
    let reference = crate::synth::espeak::tests::speak(&mut tone, utterance(&"word ".repeat(300)));
    for (name, slots, memory, launches) in
        [("displaced", 3, 0, false), ("parked", 8, 2, false), ("displaced, steps launched", 3, 0, true)]
    {
        let (batch, taken_away) = disturbed(slots, memory, launches).await;
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
