//! What happens when something goes wrong on the device: the one it happens to ends, the others go on to the bit.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use antiphon::clock;
use antiphon::sched::Config;
use antiphon::synth::cosyvoice::backend::{
    Backend, Embed, FinalChunk, FlowPrompt, MinLength, Options, Sampling, SlotRequest, VoiceHandle,
};
use antiphon::synth::cosyvoice::gpu::{self, Fault, GpuBackend, Precision};
use antiphon::synth::cosyvoice::selftest::Kit;
use antiphon::synth::cosyvoice::{CosyVoice, Settings, config, random};
use antiphon::synth::device::{Engine, Loader, Phase, Recovery};
use antiphon::synth::{Caps, Need, Progress, Seeds, Slot, Stage, Stages, Step, SynthError, Synthesizer, VoiceInfo};
use antiphon::turn::{Class, SpeechEvent, StreamId, Utterance, UtteranceEnd};

use super::{KIT, device};

/// Tokens of every utterance.
pub(super) const TOKENS: u32 = 80;

/// A backend over the kit's checkpoint, and a voice in it.
pub(super) struct Rig {
    pub(super) backend: GpuBackend,
    pub(super) voice: VoiceHandle,
}

pub(super) fn rig(final_chunk: FinalChunk) -> Rig {
    rig_of(final_chunk, 16, false)
}

/// With so many slots; `invariant`: the same bits in any company.
pub(super) fn rig_of(final_chunk: FinalChunk, slots: u32, invariant: bool) -> Rig {
    rig_on(0, final_chunk, slots, invariant)
}

fn rig_on(ordinal: u32, final_chunk: FinalChunk, slots: u32, invariant: bool) -> Rig {
    let kit = Kit::open(Path::new(KIT)).expect("the kit opens");
    let mut options = Options { slots: Some(slots), memory: Some(2 << 30), final_chunk, ..super::options(&kit) };
    options.hardware.invariant = invariant;
    let mut backend =
        GpuBackend::load(&kit.checkpoint_dir(), ordinal, options, Precision::default()).expect("the model loads");
    let made = random::voice(backend.config(), "voice", 40, 5);
    let prompt = FlowPrompt { tokens: made.tokens, mel: made.mel, speaker: made.speaker };
    let voice = backend.add_voice(Arc::new(prompt)).expect("a voice");
    backend.prepare_voice(voice).expect("its blocks");
    Rig { backend, voice }
}

/// One utterance's results.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Spoken {
    pub(super) tokens: Vec<u32>,
    pub(super) pcm: Vec<f32>,
    pub(super) failed: Option<String>,
}

/// What is done to the backend before a stage's call; the number counts the calls of that stage.
pub(super) type Before<'a> = &'a mut dyn FnMut(&mut GpuBackend, Stage, usize);

impl Rig {
    pub(super) fn open(&mut self, slot: Slot, speed: f32) {
        let config = self.backend.config().clone();
        let mut prefix = vec![Embed::Speech(config.llm.control(0))];
        prefix.extend((0..20 + slot.0).map(|i| Embed::Text((i * 13 + slot.0) % 900)));
        prefix.push(Embed::Speech(config.llm.control(2)));
        let sampling = Sampling {
            key: [slot.0, 7],
            min_len: TOKENS,
            max_len: TOKENS,
            min_length: MinLength::Intended,
            forced: None,
        };
        self.backend.open(slot, SlotRequest { voice: self.voice, prefix, sampling, speed }).expect("opens");
    }

    /// Speaks one utterance in each slot, all stages in calls of a few rounds, and closes them.
    pub(super) fn speak(&mut self, slots: &[(Slot, f32)], before: Before<'_>) -> Vec<Spoken> {
        self.speak_without(slots, None, before)
    }

    /// As [`Self::speak`], but `left` is not asked from that call of its stage on: what is left to the others when it
    /// fails before. They keep each other company as they do then, on which their last bits depend.
    fn speak_without(
        &mut self,
        slots: &[(Slot, f32)],
        left: Option<(Slot, Stage, usize)>,
        before: Before<'_>,
    ) -> Vec<Spoken> {
        for &(slot, speed) in slots {
            self.open(slot, speed);
        }
        let all: Vec<Slot> = slots.iter().map(|s| s.0).collect();
        let mut spoken = vec![Spoken::default(); all.len()];
        let at = |slot: Slot| all.iter().position(|s| *s == slot).expect("one of ours");
        let alive = |spoken: &[Spoken], stage: Stage, call: usize| -> Vec<Slot> {
            let stays = |slot: Slot| left.is_none_or(|(gone, from, at)| slot != gone || (stage, call) < (from, at));
            let going = all.iter().zip(spoken).filter(|(slot, s)| s.failed.is_none() && stays(**slot));
            going.map(|(slot, _)| *slot).collect()
        };
        let mut first = Vec::new();
        self.backend.prefill(&all, &mut first).expect("prefill");
        first.into_iter().for_each(|p| spoken[at(p.slot)].tokens = p.tokens);
        for call in 0..TOKENS as usize / 16 {
            before(&mut self.backend, Stage::Decode, call);
            let mut out = Vec::new();
            self.backend.decode(&alive(&spoken, Stage::Decode, call), 16, &mut out).expect("decode");
            for d in out {
                let s = &mut spoken[at(d.slot)];
                s.tokens.extend(d.tokens);
                s.failed = d.failed.map(|e| e.to_string());
            }
        }
        for slot in alive(&spoken, Stage::Flow, 0) {
            let tokens = spoken[at(slot)].tokens.clone();
            self.backend.flow_push(slot, &tokens, true).expect("whole utterances");
        }
        for call in 0.. {
            before(&mut self.backend, Stage::Flow, call);
            let mut out = Vec::new();
            self.backend.flow(&alive(&spoken, Stage::Flow, call), 3, &mut out).expect("flow");
            let pending = out.iter().any(|f| f.failed.is_none() && f.pending > 0);
            out.into_iter().for_each(|f| spoken[at(f.slot)].failed = f.failed.map(|e| e.to_string()));
            if !pending {
                break;
            }
        }
        for call in 0.. {
            before(&mut self.backend, Stage::Vocode, call);
            let mut out = Vec::new();
            self.backend.vocode(&alive(&spoken, Stage::Vocode, call), &mut out).expect("vocode");
            let more = out.iter().any(|v| v.failed.is_none() && !v.done);
            for v in out {
                let s = &mut spoken[at(v.slot)];
                s.pcm.extend(v.pcm);
                s.failed = v.failed.map(|e| e.to_string());
            }
            if !more {
                break;
            }
        }
        all.into_iter().for_each(|slot| self.backend.close(slot));
        spoken
    }
}

impl Spoken {
    /// That it said as much as `whole` did, of the same tokens.
    fn is_like(&self, whole: &Spoken) {
        assert_eq!((&self.tokens, &self.failed, self.pcm.len()), (&whole.tokens, &None, whole.pcm.len()));
    }
}

fn eight() -> Vec<(Slot, f32)> {
    (0..8).map(|n| (Slot(n), 1.0)).collect()
}

#[test]
fn a_poisoned_row_ends_alone_and_leaves_nothing_behind() {
    let Some(_device) = device() else { return };
    let mut rig = rig(FinalChunk::Causal);
    let memory = rig.backend.memory();
    let clean = rig.speak(&eight(), &mut |_, _, _| {});
    assert!(clean.iter().all(|s| s.failed.is_none() && s.pcm.len() > 24_000));
    let victim = 3;
    for stage in [Stage::Decode, Stage::Flow, Stage::Vocode] {
        let mut reached = false;
        // The vocoder has no history before its first call: what it is given last is poisoned instead.
        let call_of = if stage == Stage::Vocode { 0 } else { 1 };
        let spoken = rig.speak(&eight(), &mut |backend, at, call| {
            if at == stage && call == call_of {
                backend.inject(Fault::NotANumber(Slot(victim), stage)).expect("injected");
                reached = true;
            }
        });
        assert!(reached);
        // Seven utterances may run in another width than eight, whose sums differ: what counts is that they are as where nothing
        // was poisoned and the eighth left when it did.
        let left = Some((Slot(victim), stage, call_of + 1));
        let without = rig.speak_without(&eight(), left, &mut |_, _, _| {});
        for (n, (spoken, without)) in spoken.iter().zip(&without).enumerate() {
            if n == victim as usize {
                let reason = spoken.failed.as_deref().unwrap_or_else(|| panic!("{stage:?}: it went on"));
                assert!(reason.contains("not a number") || reason.contains("not numbers"), "{stage:?}: {reason}");
            } else {
                assert_eq!(spoken, without, "{stage:?}: slot {n}");
                spoken.is_like(&clean[n]);
            }
        }
        assert_eq!(rig.backend.memory(), memory, "{stage:?}");
        // The next in that slot finds nothing of it.
        assert_eq!(rig.speak(&eight(), &mut |_, _, _| {}), clean, "{stage:?}, afterwards");
    }
}

#[test]
fn a_failed_allocation_ends_one_utterance_and_memory_returns() {
    let Some(_device) = device() else { return };
    // Another speed is an allocation in the vocoder's stage.
    let mut one = rig(FinalChunk::Causal);
    let slots = [(Slot(0), 1.0), (Slot(1), 1.25), (Slot(2), 1.25)];
    let memory = one.backend.memory();
    let clean = one.speak(&slots, &mut |_, _, _| {});
    let spoken = one.speak(&slots, &mut |backend, stage, call| {
        if stage == Stage::Vocode && call == 0 {
            backend.inject(Fault::Allocation(1)).expect("armed");
        }
    });
    assert!(spoken[1].failed.as_deref().is_some_and(|r| r.contains("not enough device memory")), "{:?}", spoken[1]);
    let without = one.speak_without(&slots, Some((Slot(1), Stage::Vocode, 0)), &mut |_, _, _| {});
    for n in [0, 2] {
        assert_eq!(spoken[n], without[n]);
        without[n].is_like(&clean[n]);
    }
    assert_eq!(one.backend.memory(), memory);
    assert_eq!(one.speak(&slots, &mut |_, _, _| {}), clean);
    drop(one);
    // The full solve of a last chunk is one in the flow's.
    let mut two = rig(FinalChunk::Reference);
    let memory = two.backend.memory();
    let slots = [(Slot(0), 1.0), (Slot(1), 1.0)];
    let clean = two.speak(&slots, &mut |_, _, _| {});
    let spoken = two.speak(&slots, &mut |backend, stage, call| {
        if stage == Stage::Flow && call == 0 {
            backend.inject(Fault::Allocation(1)).expect("armed");
        }
    });
    assert!(spoken[0].failed.as_deref().is_some_and(|r| r.contains("not enough device memory")), "{:?}", spoken[0]);
    let without = two.speak_without(&slots, Some((Slot(0), Stage::Flow, 0)), &mut |_, _, _| {});
    assert_eq!(spoken[1], without[1]);
    without[1].is_like(&clean[1]);
    assert_eq!(two.backend.memory(), memory);
    // No slab is left: nobody gets further, and the device is none the worse.
    let spoken = two.speak(&slots, &mut |backend, stage, call| {
        if stage == Stage::Flow && call == 0 {
            backend.inject(Fault::Slabs).expect("taken");
        }
    });
    for spoken in spoken {
        assert!(spoken.failed.is_some_and(|r| r.contains("not enough device memory")));
    }
    two.backend.sync().expect("the device works");
}

/// An utterance that nobody schedules for a while, and whose neighbours work meanwhile, goes on to the bit: also
/// between the Euler steps of a window.
#[test]
fn an_utterance_left_alone_between_any_two_steps_goes_on_to_the_bit() {
    let Some(_device) = device() else { return };
    let mut rig = rig(FinalChunk::Causal);
    let alone = rig.speak(&[(Slot(0), 1.0)], &mut |_, _, _| {});
    let (voice, others) = (rig.voice, [Slot(4), Slot(5), Slot(6)]);
    let mut busy = |backend: &mut GpuBackend, _: Stage, _: usize| {
        backend.park(Slot(0));
        for slot in others {
            let sampling =
                Sampling { key: [slot.0, 1], min_len: 0, max_len: 40, min_length: MinLength::Intended, forced: None };
            let prefix = vec![Embed::Text(slot.0), Embed::Text(9)];
            backend.open(slot, SlotRequest { voice, prefix, sampling, speed: 1.0 }).expect("opens");
        }
        backend.prefill(&others, &mut Vec::new()).expect("prefill");
        backend.decode(&others, 5, &mut Vec::new()).expect("decode");
        for slot in others {
            backend.flow_push(slot, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], true).expect("tokens");
        }
        backend.flow(&others, 10, &mut Vec::new()).expect("flow");
        backend.vocode(&others, &mut Vec::new()).expect("vocode");
        others.into_iter().for_each(|slot| backend.close(slot));
    };
    assert_eq!(rig.speak(&[(Slot(0), 1.0)], &mut busy), alone);
}

/// A voice on the GPU that can be made to fail in the middle of a step.
struct Breakable {
    voice: CosyVoice<GpuBackend>,
    fault: Arc<std::sync::Mutex<Option<Fault>>>,
}

impl Synthesizer for Breakable {
    fn caps(&self) -> &Caps {
        self.voice.caps()
    }

    fn voices(&self) -> Vec<VoiceInfo> {
        self.voice.voices()
    }

    fn open(&mut self, slot: Slot, utterance: &Utterance) -> Result<Stages, SynthError> {
        self.voice.open(slot, utterance)
    }

    fn run(&mut self, step: &Step, out: &mut Vec<Progress>) -> Result<(), SynthError> {
        if step.stage == Stage::Flow
            && let Some(fault) = self.fault.lock().expect("unpoisoned").take()
        {
            self.voice.backend_mut().inject(fault)?;
        }
        self.voice.run(step, out)
    }

    fn close(&mut self, slot: Slot) {
        self.voice.close(slot);
    }

    fn memory(&self) -> antiphon::synth::Memory {
        self.voice.memory()
    }

    fn prepare(&mut self, utterance: &Utterance) -> Result<Need, SynthError> {
        self.voice.prepare(utterance)
    }

    fn forget(&mut self, utterance: antiphon::turn::UtteranceId) {
        self.voice.forget(utterance);
    }

    fn warm_up(&mut self) -> Result<Seeds, SynthError> {
        self.voice.warm_up()
    }
}

async fn speak(engine: &Engine) -> (Vec<f32>, UtteranceEnd) {
    let (sink, mut events) = tokio::sync::mpsc::channel(1024);
    let utterance = Utterance { seed: 3, ..Utterance::plain(StreamId::next(), Class::Batch, "One two three four.") };
    engine.submit(utterance, sink).expect("accepted");
    let told = async {
        let mut all = Vec::new();
        while let Some(event) = events.recv().await {
            match event {
                SpeechEvent::Audio { pcm, .. } => all.extend(pcm),
                SpeechEvent::End { how, .. } => return (all, how),
            }
        }
        panic!("no end");
    };
    tokio::time::timeout(Duration::from_secs(60), told).await.expect("the stream is told of its end within a minute")
}

/// A device that is lost tells its streams and is loaded again, by an injected error or by a kernel that does not end in
/// time: the same process speaks the same afterwards, in the working precision. After a kernel that fails, the driver
/// may not allow that; then the device says that it takes a new process.
#[test]
#[ignore = "takes the device from whoever else uses it"]
fn a_device_that_is_lost_is_loaded_again_and_speaks_the_same() {
    let Some(_device) = device() else { return };
    let kit = Kit::open(Path::new(KIT)).expect("the kit opens");
    let (dir, voices) = (kit.checkpoint_dir(), tempfile::tempdir().expect("temp dir"));
    let sizes = config::Config::load(&dir).expect("sizes");
    let voice = random::voice(&sizes, "voice", 40, 5).to_bytes();
    std::fs::write(voices.path().join("voice.safetensors"), voice).expect("written");
    let fault = Arc::new(std::sync::Mutex::new(None));
    let loads = Arc::new(AtomicU32::new(0));
    let loader: Loader = {
        let settings = Settings { voice_dirs: vec![voices.path().to_path_buf()], ..Settings::default() };
        let (fault, loads) = (fault.clone(), loads.clone());
        Box::new(move || {
            loads.fetch_add(1, Ordering::Relaxed);
            let options =
                Options { slots: Some(8), memory: Some(2 << 30), hardware: super::hardware(), ..Options::default() };
            let backend = GpuBackend::load(&dir, 0, options, Precision::default())?;
            let mut voice = CosyVoice::new(backend, &dir, sizes.clone(), settings.clone())?;
            voice.force_length(Some(60));
            Ok(Box::new(Breakable { voice, fault: fault.clone() }))
        })
    };
    let recovery =
        Recovery { first: Duration::from_millis(10), most: Duration::from_millis(10), ..Recovery::default() };
    let engine = Engine::start_with(vec![loader], Config::default(), recovery).expect("starts");
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime").block_on(async {
        engine.ready().await;
        assert_eq!(engine.status()[0].phase, Phase::Ready);
        let (clean, how) = speak(&engine).await;
        assert_eq!(how, UtteranceEnd::Done);
        assert!(clean.len() > 24_000);
        // It ends after all, since the test has to; the device is given up long before.
        let hang = Fault::Hang { lasts: Duration::from_secs(6), patience: Duration::from_millis(300) };
        let faults = [Fault::Lost(5), Fault::Lost(50), hang, Fault::Trap];
        for (n, lost) in faults.into_iter().enumerate() {
            *fault.lock().expect("unpoisoned") = Some(lost);
            let from = clock::now();
            let (_, how) = speak(&engine).await;
            let UtteranceEnd::Failed(reason) = how else { panic!("{lost:?}: {how:?}") };
            println!("{lost:?}: told after {:?}: {reason}", from.elapsed());
            assert!(reason.contains("device failed") && reason.contains("CUDA"), "{reason}");
            let wait = async {
                loop {
                    match &engine.status()[0].phase {
                        Phase::Ready => return true,
                        Phase::Failed(reason) if reason.contains("start a new one") => return false,
                        _ => tokio::time::sleep(Duration::from_millis(5)).await,
                    }
                }
            };
            let back = tokio::time::timeout(Duration::from_secs(60), wait).await.expect("it is one or the other");
            let status = &engine.status()[0];
            println!("{lost:?}: back {back} after {:?}, {:?}", from.elapsed(), status.phase);
            if lost == Fault::Trap && !back {
                break;
            }
            assert!(back, "{lost:?}");
            let (failures, loads, n) = (status.failures, loads.load(Ordering::Relaxed), n as u32);
            if matches!(lost, Fault::Lost(_)) {
                assert_eq!((failures, loads), (n + 1, n + 2));
            } else {
                // Loading is tried until a kernel that was given up has ended.
                assert!(failures > n && loads > n + 1, "{lost:?}: {failures} failures, {loads} loads");
            }
            let (again, how) = speak(&engine).await;
            assert_eq!(how, UtteranceEnd::Done, "{lost:?}");
            assert!(again == clean, "the same seed gives the same audio after {lost:?}");
        }
    });
    engine.shutdown();
}

/// The driver ends a process's use of CUDA after a kernel's fault, on every GPU of it: a second device says so at once, so that
/// its streams end with the reason. Where GPUs are not to share that, each has a process (`antiphon worker`).
#[test]
#[ignore = "needs two devices, and takes both from whoever else uses them"]
fn a_trap_on_one_of_two_devices_is_told_by_both() {
    let Some(_device) = device() else { return };
    if gpu::count() < 2 {
        return antiphon_skip::skip("gpu", "there is no second device");
    }
    let [mut one, mut two] = [0, 1].map(|ordinal| rig_on(ordinal, FinalChunk::Causal, 4, false));
    assert!(!two.speak(&[(Slot(0), 1.0)], &mut |_, _, _| ())[0].pcm.is_empty(), "the second speaks");
    one.backend.inject(Fault::Trap).expect("the kernel starts");
    let told = |backend: &mut GpuBackend| backend.sync().expect_err("no context is left").to_string();
    for error in [told(&mut one.backend), told(&mut two.backend)] {
        assert!(error.contains("CUDA_ERROR_LAUNCH_FAILED"), "{error}");
    }
}
