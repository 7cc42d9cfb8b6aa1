//! A step that does not come back.

use super::*;

/// The tone, whose steps wait while it is told to hang: within the call, or as a launched step that never ends.
struct Hanging {
    tone: Tone,
    caps: Caps,
    hangs: Arc<AtomicBool>,
    launched: Option<Step>,
}

fn hanging(hangs: &Arc<AtomicBool>, launches: bool) -> Loader {
    let hangs = hangs.clone();
    Box::new(move || {
        let tone = Tone::new();
        let mut caps = tone.caps().clone();
        caps.limits.launches = launches;
        Ok(Box::new(Hanging { tone, caps, hangs: hangs.clone(), launched: None }))
    })
}

impl Synthesizer for Hanging {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn voices(&self) -> Vec<VoiceInfo> {
        self.tone.voices()
    }

    fn open(&mut self, slot: Slot, utterance: &Utterance) -> Result<Stages, SynthError> {
        self.tone.open(slot, utterance)
    }

    fn run(&mut self, step: &Step, out: &mut Vec<Progress>) -> Result<(), SynthError> {
        while self.hangs.load(Ordering::Relaxed) {
            std::thread::park_timeout(Duration::from_millis(1));
        }
        self.tone.run(step, out)
    }

    fn launch(&mut self, step: &Step) -> Result<bool, SynthError> {
        self.launched = Some(step.clone());
        Ok(true)
    }

    fn poll(&mut self) -> Result<bool, SynthError> {
        Ok(!self.hangs.load(Ordering::Relaxed))
    }

    fn complete(&mut self, out: &mut Vec<Progress>) -> Result<(), SynthError> {
        let step = self.launched.take().expect("one was launched");
        self.tone.run(&step, out)
    }

    fn close(&mut self, slot: Slot) {
        self.tone.close(slot);
    }

    fn warm_up(&mut self) -> Result<Seeds, SynthError> {
        self.tone.warm_up()
    }
}

/// Soon, and long enough for a step of the tone on a busy machine.
const HANGS: Recovery = Recovery { hangs: Duration::from_millis(400), ..SOON };

#[tokio::test]
async fn a_device_that_hangs_is_given_up_the_others_speak_and_one_that_comes_back_is_loaded_again() {
    for launches in [false, true] {
        let hangs = Arc::new(AtomicBool::new(false));
        let other: Loader = Box::new(|| Ok(Box::new(Tone::new())));
        let engine = Engine::start_with(vec![hanging(&hangs, launches), other], Config::default(), HANGS);
        let engine = engine.expect("starts");
        engine.ready().await;
        assert!(engine.status().iter().all(|device| !device.hangs));
        hangs.store(true, Ordering::Relaxed);
        let (sink, events) = mpsc::channel(64);
        let first = utterance("one two");
        let stream = first.stream;
        engine.submit(first, sink).expect("accepted");
        let reason = failed(heard(events).await.1);
        assert!(reason.contains("it hangs"), "{reason}");
        let status = engine.status();
        assert_eq!([&status[0], &status[1]].map(|device| (device.hangs, device.failures)), [(true, 1), (false, 0)]);
        assert!(matches!(&status[0].phase, Phase::Failed(why) if why.contains("it hangs")), "{:?}", status[0].phase);
        // The stream goes on elsewhere; word of its listener reaches the device that hangs, too.
        engine.note(stream, StreamNote::Interrupted);
        let (sink, events) = mpsc::channel(64);
        engine.submit(Utterance { stream, ..utterance("one three") }, sink).expect("accepted by the other");
        assert_eq!(heard(events).await, ((255 + 345) * 24, Some(UtteranceEnd::Done)));
        hangs.store(false, Ordering::Relaxed);
        phase(&engine, 0, |phase| *phase == Phase::Ready).await;
        assert!(!engine.status()[0].hangs);
        engine.shutdown();
    }
}

#[tokio::test]
async fn an_engine_is_shut_down_beside_a_device_that_hangs() {
    let hangs = Arc::new(AtomicBool::new(true));
    let engine = Engine::start_with(vec![hanging(&hangs, false)], Config::default(), HANGS).expect("starts");
    engine.ready().await;
    let (sink, events) = mpsc::channel(64);
    engine.submit(utterance("one two"), sink).expect("accepted");
    failed(heard(events).await.1);
    let refused = engine.submit(utterance("x"), mpsc::channel(1).0).expect_err("nothing speaks");
    assert_eq!(refused.reason, RefusedReason::NotReady);
    // Else this would never return.
    engine.shutdown();
    hangs.store(false, Ordering::Relaxed);
}
