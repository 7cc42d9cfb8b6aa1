//! The engine on a backend that fails as told, runs short of memory, or takes less than it is given.

use std::collections::BTreeMap;
use std::sync::Arc;

use antiphon::synth::cosyvoice::backend::{self, Backend, Options};
use antiphon::synth::cosyvoice::config::Config;
use antiphon::synth::cosyvoice::cpu::CpuBackend;
use antiphon::synth::cosyvoice::probe::{self, Probe};
use antiphon::synth::cosyvoice::{CosyVoice, Settings, random};
use antiphon::synth::{Slot, Stage, Step, SynthError, Synthesizer};
use antiphon::turn::Utterance;

use crate::engine::{checkpoint, engine, speak, utterance};

/// A backend whose `prepare_voice` fails as told, whose vocoder takes half of what there is, and whose flow goes ahead beside
/// decoding; everything else is the CPU's.
struct Short {
    cpu: CpuBackend,
    error: fn() -> Option<SynthError>,
    /// Flow steps that went ahead.
    ahead: u32,
    /// The other halves.
    kept: BTreeMap<Slot, backend::Vocoded>,
}

impl Backend for Short {
    fn caps(&self) -> &backend::BackendCaps {
        self.cpu.caps()
    }

    fn hold_back(&self) -> u32 {
        self.cpu.hold_back()
    }

    fn add_voice(&mut self, prompt: Arc<backend::FlowPrompt>) -> Result<backend::VoiceHandle, SynthError> {
        self.cpu.add_voice(prompt)
    }

    fn prepare_voice(&mut self, voice: backend::VoiceHandle) -> Result<(), SynthError> {
        // The second of the checkpoint's two.
        if voice.0 == 1
            && let Some(error) = (self.error)()
        {
            return Err(error);
        }
        self.cpu.prepare_voice(voice)
    }

    fn release_voice(&mut self, voice: backend::VoiceHandle) {
        self.cpu.release_voice(voice);
    }

    fn open(&mut self, slot: Slot, request: backend::SlotRequest) -> Result<(), SynthError> {
        self.cpu.open(slot, request)
    }

    fn prefill(&mut self, slots: &[Slot], out: &mut Vec<backend::Prefilled>) -> Result<(), SynthError> {
        self.cpu.prefill(slots, out)
    }

    fn decode(&mut self, slots: &[Slot], rounds: u32, out: &mut Vec<backend::Decoded>) -> Result<(), SynthError> {
        self.cpu.decode(slots, rounds, out)
    }

    fn overlaps(&self) -> bool {
        true
    }

    fn decode_beside_flow(
        &mut self,
        slot: Slot,
        rounds: u32,
        out: &mut Vec<backend::Decoded>,
        flowed: &mut Vec<backend::Flowed>,
    ) -> Result<(), SynthError> {
        self.ahead += 1;
        self.flow(&[slot], 1, flowed)?;
        self.decode(&[slot], rounds, out)
    }

    fn flow_push(&mut self, slot: Slot, tokens: &[u32], last: bool) -> Result<(), SynthError> {
        self.cpu.flow_push(slot, tokens, last)
    }

    fn flow(&mut self, slots: &[Slot], rounds: u32, out: &mut Vec<backend::Flowed>) -> Result<(), SynthError> {
        self.cpu.flow(slots, rounds, out)
    }

    fn vocode(&mut self, slots: &[Slot], out: &mut Vec<backend::Vocoded>) -> Result<(), SynthError> {
        for &slot in slots {
            if let Some(rest) = self.kept.remove(&slot) {
                out.push(rest);
                continue;
            }
            self.cpu.vocode(&[slot], out)?;
            let half = out.last_mut().expect("one result");
            let pcm = half.pcm.split_off(half.pcm.len() / 960 * 480);
            self.kept.insert(slot, backend::Vocoded { slot, pcm, done: half.done, more: false, failed: None });
            (half.done, half.more) = (false, true);
        }
        Ok(())
    }

    fn close(&mut self, slot: Slot) {
        self.kept.remove(&slot);
        self.cpu.close(slot);
    }

    fn memory(&self) -> antiphon::synth::Memory {
        self.cpu.memory()
    }

    fn memory_needed(&self, extent: backend::Extent) -> u64 {
        self.cpu.memory_needed(extent)
    }
}

impl Probe for Short {
    fn llm(&mut self, prefix: &[backend::Embed], forced: &[u32]) -> Result<probe::LlmProbe, SynthError> {
        self.cpu.llm(prefix, forced)
    }

    fn llm_feed(&mut self, feed: probe::Feed<'_>) -> Result<(), SynthError> {
        self.cpu.llm_feed(feed)
    }

    fn times(&self) -> Vec<f32> {
        self.cpu.times()
    }

    fn flow_noise(&mut self, frames: usize) -> Result<probe::Values, SynthError> {
        self.cpu.flow_noise(frames)
    }

    fn angles(&self, frames: usize) -> Option<probe::Values> {
        self.cpu.angles(frames)
    }

    fn speaker(&mut self, raw: &[f32]) -> Result<Option<probe::Values>, SynthError> {
        self.cpu.speaker(raw)
    }

    fn look_ahead(&mut self, tokens: &[u32], last: bool) -> Result<Option<probe::Values>, SynthError> {
        self.cpu.look_ahead(tokens, last)
    }

    fn dit(&mut self, input: &probe::DitInput) -> Result<probe::DitProbe, SynthError> {
        self.cpu.dit(input)
    }

    fn mel(
        &mut self,
        prompt: &backend::FlowPrompt,
        tokens: &[u32],
        streaming: bool,
    ) -> Result<probe::Values, SynthError> {
        self.cpu.mel(prompt, tokens, streaming)
    }

    fn mel_chunks(
        &mut self,
        prompt: &backend::FlowPrompt,
        tokens: &[u32],
        cuts: &[usize],
        end: backend::FinalChunk,
    ) -> Result<probe::Values, SynthError> {
        self.cpu.mel_chunks(prompt, tokens, cuts, end)
    }

    fn respeed(&mut self, mel: &probe::Values, speed: f32) -> Result<probe::Values, SynthError> {
        self.cpu.respeed(mel, speed)
    }

    fn hift(&mut self, mel: &probe::Values, last: bool) -> Result<probe::HiftProbe, SynthError> {
        self.cpu.hift(mel, last)
    }

    fn hift_chunks(&mut self, mel: &probe::Values, cuts: &[usize]) -> Result<probe::Values, SynthError> {
        self.cpu.hift_chunks(mel, cuts)
    }
}

fn short(error: fn() -> Option<SynthError>) -> CosyVoice<Short> {
    let config = Config::load(checkpoint()).expect("sizes");
    let cpu = CpuBackend::load(checkpoint(), Options::default()).expect("loads");
    CosyVoice::new(Short { cpu, error, ahead: 0, kept: BTreeMap::new() }, checkpoint(), config, Settings::default())
        .expect("a voice")
}

#[test]
fn a_voice_without_memory_ends_its_utterance_and_no_other() {
    let mut engine = short(|| Some(SynthError::Memory { needed: 2, free: 1 }));
    engine.warm_up().expect("other voices are warm");
    let names: Vec<String> = engine.voices().into_iter().map(|v| v.name).collect();
    assert_eq!(names.len(), 2, "{names:?}");
    let mut out = Vec::new();
    let mut failed = 0;
    for (n, name) in names.iter().enumerate() {
        let slot = Slot(n as u32);
        engine.open(slot, &Utterance { voice: Some(name.clone()), ..utterance("One two.", 1) }).expect("opens");
        engine.run(&Step { stage: Stage::Prefill, slots: vec![slot], rounds: 1 }, &mut out).expect("the device works");
        let progress = out.pop().expect("one result");
        match progress.outcome.failed {
            Some(error) => {
                assert!(error.contains("not enough device memory"), "{error}");
                assert!(progress.outcome.ready.is_empty());
                failed += 1;
            }
            None => assert!(progress.outcome.ready.has(Stage::Decode)),
        }
        engine.close(slot);
    }
    assert_eq!(failed, 1, "only the voice that has no memory");
}

#[test]
fn a_vocoder_that_takes_less_than_there_is_is_asked_again() {
    let spoken = utterance("Hello there, how are you?", 7);
    assert_eq!(speak(&mut short(|| None), &spoken), speak(&mut engine(), &spoken));
}

#[test]
fn a_block_whose_flow_went_ahead_of_its_hop_sounds_the_same() {
    let mut engine = engine();
    let mut ahead = short(|| None);
    for (text, seed) in [("Hello there, how are you?", 7), ("No.", 8)] {
        let spoken = utterance(text, seed);
        assert_eq!(speak(&mut ahead, &spoken), speak(&mut engine, &spoken), "{text}");
    }
    assert_eq!(ahead.backend_mut().ahead, 2, "one step of each");
    let open = |ahead: &mut CosyVoice<Short>, slot| {
        let ready = ahead.open(slot, &utterance("Hello there, how are you?", 7)).expect("opens");
        assert!(ready.has(Stage::Prefill));
        let mut out = Vec::new();
        ahead.run(&Step { stage: Stage::Prefill, slots: vec![slot], rounds: 1 }, &mut out).expect("the device works");
        for _ in 0..3 {
            ahead
                .run(&Step { stage: Stage::Decode, slots: vec![slot], rounds: 3 }, &mut out)
                .expect("the device works");
        }
    };
    open(&mut ahead, Slot(0));
    open(&mut ahead, Slot(1));
    assert_eq!(ahead.backend_mut().ahead, 3, "the second has company");
}

#[test]
fn a_device_that_fails_under_one_voice_fails_as_a_device() {
    let mut engine = short(|| Some(SynthError::Device("gone".into())));
    assert!(matches!(engine.warm_up(), Err(SynthError::Device(_))));
}

#[test]
fn a_row_that_is_no_number_ends_alone() {
    let config = Config::load(checkpoint()).expect("sizes");
    let mut cpu = CpuBackend::load(checkpoint(), Options::default()).expect("loads");
    let made = random::voice(&config, "voice", 40, 5);
    let mut prompt = backend::FlowPrompt { tokens: made.tokens, mel: made.mel, speaker: made.speaker };
    let good = cpu.add_voice(Arc::new(prompt.clone())).expect("a voice");
    prompt.mel[3] = f32::NAN;
    let bad = cpu.add_voice(Arc::new(prompt)).expect("its shape is right");
    let empty = cpu.memory();
    let mut speak = |voices: &[backend::VoiceHandle]| {
        let slots: Vec<Slot> = (0..voices.len() as u32).map(Slot).collect();
        for (&slot, &voice) in slots.iter().zip(voices) {
            let sampling = backend::Sampling {
                key: [0; 2],
                min_len: 0,
                max_len: 0,
                min_length: backend::MinLength::Intended,
                forced: None,
            };
            let request = backend::SlotRequest { voice, prefix: Vec::new(), sampling, speed: 1.0 };
            cpu.open(slot, request).expect("opens");
            cpu.flow_push(slot, &[1, 2, 3, 4, 5, 6, 7, 8], true).expect("tokens");
        }
        let (mut flowed, mut pcm) = (Vec::new(), Vec::new());
        cpu.flow(&slots, 100, &mut flowed).expect("the device works");
        cpu.vocode(&slots, &mut pcm).expect("the device works");
        slots.iter().for_each(|&slot| cpu.close(slot));
        let failed: Vec<bool> = flowed.iter().map(|f| f.failed.is_some()).collect();
        (failed, pcm.remove(0).pcm)
    };
    let (failed, alone) = speak(&[good]);
    assert_eq!(failed, [false]);
    let (failed, beside) = speak(&[good, bad, good]);
    assert_eq!(failed, [false, true, false]);
    assert_eq!(beside, alone);
    assert_eq!(cpu.memory(), empty);
}
