//! The reference executor: candle on the CPU, single precision.
//!
//! What the GPU engine is held against, and what speaks where there is no GPU. The language model decodes its rows
//! together, because it is bound by reading weights; flow and vocoder are bound by arithmetic and run slot by slot.

mod dit;
mod flow;
mod hift;
mod llm;
mod ops;
mod probe;
mod rounding;
mod slot;
mod spectrum;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Tensor;

use self::flow::{Flow, Prefix, Prompt};
use self::hift::Hift;
use self::llm::Llm;
pub use self::ops::LoadError;
use self::slot::SlotState;
pub(super) use self::slot::{check as check_request, check_ids};
use super::backend::{
    Backend, BackendCaps, Decoded, End, Extent, FlowPrompt, Flowed, Options, Prefilled, SlotRequest, Stretch, Vocoded,
    VoiceHandle,
};
use super::checkpoint::{Part, TensorFile, find};
use super::config::{Config, FlowConfig};
use super::noise::SineTable;
use crate::synth::{EngineLimits, Memory, PerStage, Slot, SynthError};

/// Bytes for slots and voices unless told otherwise: an 8 s utterance of the full-size model behind a 3 s prompt
/// takes 2 GB, and weights and this together stay under 6 GB.
const DEFAULT_MEMORY: u64 = 3 << 30;
/// Utterances open at once unless told otherwise.
const DEFAULT_SLOTS: u32 = 8;
/// Rows decoded in one call.
const DECODE_WIDTH: u32 = 8;
/// Tokens decoded in one call: at full size a token takes about a tenth of a second.
const DECODE_ROUNDS: u32 = 8;
/// Longest language model sequence: 300 s of audio and as much text again.
const POSITIONS: u32 = 16_384;

/// CosyVoice3 on the CPU.
pub struct CpuBackend {
    config: Config,
    options: Options,
    caps: BackendCaps,
    dir: PathBuf,
    llm: Llm,
    flow: Flow,
    hift: Hift,
    noise: SineTable,
    voices: BTreeMap<VoiceHandle, VoiceEntry>,
    next_voice: u32,
    prefixes: u32,
    slots: BTreeMap<Slot, SlotState>,
}

struct VoiceEntry {
    prompt: Arc<Prompt>,
    prefix: Option<Prefix>,
    /// The caller and every slot that uses it.
    holds: u32,
}

impl CpuBackend {
    /// Loads the checkpoint in `dir`.
    ///
    /// # Errors
    /// A tensor is missing or malformed; [`super::verify`] lists all such at once.
    pub fn load(dir: &Path, options: Options) -> Result<Self, LoadError> {
        let config = Config::load(dir)?;
        // One map at a time: what has been copied out of a file need not stay resident.
        let open = |part: Part| TensorFile::open(&find(dir, part.stem()));
        let llm = Llm::load(&TensorFile::open(&find(dir, options.llm.stem()))?, &config.llm)?;
        let flow = Flow::load(&open(Part::Flow)?, &config, &options.hardware)?;
        let hift = Hift::load(&open(Part::Hift)?, &config)?;
        let slots = options.slots.unwrap_or(DEFAULT_SLOTS).max(1);
        let caps = BackendCaps {
            device: "cpu".into(),
            limits: EngineLimits {
                slots,
                width: PerStage::new([1, DECODE_WIDTH.min(slots), 1, 1]),
                rounds: PerStage::new([1, DECODE_ROUNDS, config.flow.steps as u32, 1]),
                parks: false,
                launches: false,
                grows: false,
            },
            positions: POSITIONS,
        };
        let noise = SineTable::new(&config, options.sine_noise);
        Ok(Self {
            config,
            options,
            caps,
            dir: dir.to_path_buf(),
            llm,
            flow,
            hift,
            noise,
            voices: BTreeMap::new(),
            next_voice: 0,
            prefixes: 0,
            slots: BTreeMap::new(),
        })
    }

    /// The sizes.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// How many flow prefixes were computed so far: one for each voice that was ever prepared, whatever its names.
    pub fn prefixes(&self) -> u32 {
        self.prefixes
    }

    fn drop_hold(&mut self, voice: VoiceHandle) {
        if let Some(entry) = self.voices.get_mut(&voice) {
            entry.holds = entry.holds.saturating_sub(1);
            if entry.holds == 0 {
                self.voices.remove(&voice);
            }
        }
    }

    /// Bytes of what voices share.
    fn shared(&self) -> u64 {
        self.voices.values().filter_map(|v| v.prefix.as_ref()).map(Prefix::bytes).sum()
    }

    /// Bytes of slots.
    fn held(&self) -> u64 {
        let slots: u64 = self.slots.values().map(|s| s.bytes(&self.config)).sum();
        // Slots count the prefix they share as their own until it is taken off here.
        let shared: u64 =
            self.slots.values().filter_map(|s| self.voices.get(&s.voice)?.prefix.as_ref()).map(Prefix::bytes).sum();
        slots.saturating_sub(shared)
    }

    fn frame_bytes(&self) -> u64 {
        let flow = &self.config.flow;
        (flow.steps * flow.depth * 2 * 2 * flow.inner() * 4) as u64
    }
}

/// A candle error is the device's: shapes were checked before.
fn device(error: candle_core::Error) -> SynthError {
    SynthError::Device(error.to_string())
}

fn load_failed(error: LoadError) -> SynthError {
    SynthError::Device(error.to_string())
}

fn not_open() -> SynthError {
    SynthError::Utterance("the slot is not open".into())
}

impl Backend for CpuBackend {
    fn caps(&self) -> &BackendCaps {
        &self.caps
    }

    fn hold_back(&self) -> u32 {
        self.hift.hold_back() as u32
    }

    fn add_voice(&mut self, prompt: Arc<FlowPrompt>) -> Result<VoiceHandle, SynthError> {
        check_voice(&prompt, &self.config.flow)?;
        let handle = VoiceHandle(self.next_voice);
        self.next_voice += 1;
        let prompt = Arc::new(self.flow.prompt(&prompt).map_err(device)?);
        self.voices.insert(handle, VoiceEntry { prompt, prefix: None, holds: 1 });
        Ok(handle)
    }

    fn prepare_voice(&mut self, voice: VoiceHandle) -> Result<(), SynthError> {
        let Some(entry) = self.voices.get_mut(&voice).filter(|v| v.prefix.is_none()) else { return Ok(()) };
        entry.prefix = Some(self.flow.prefix(&entry.prompt).map_err(device)?);
        self.prefixes += 1;
        Ok(())
    }

    fn release_voice(&mut self, voice: VoiceHandle) {
        self.drop_hold(voice);
    }

    fn open(&mut self, slot: Slot, request: SlotRequest) -> Result<(), SynthError> {
        self.close(slot);
        if request.prefix.len() + request.sampling.max_len as usize > self.caps.positions as usize {
            return Err(SynthError::Input(format!(
                "the text is too long: split it (over {} positions)",
                self.caps.positions
            )));
        }
        slot::check(&request, &self.config)?;
        let voice = request.voice;
        let entry = self.voices.get_mut(&voice).ok_or_else(|| SynthError::Input("the voice was removed".into()))?;
        entry.holds += 1;
        let stream = flow::Stream::new(
            entry.prompt.clone(),
            entry.prefix.as_ref(),
            self.config.flow.steps,
            self.options.final_chunk,
        );
        self.slots.insert(slot, SlotState::new(request, &self.config, stream, self.hift.start()));
        Ok(())
    }

    fn extends(&self) -> bool {
        true
    }

    fn extend(&mut self, slot: Slot, stretch: Stretch) -> Result<(), SynthError> {
        let state = self.slots.get_mut(&slot).ok_or_else(not_open)?;
        state.extend(stretch, &self.config.llm, self.caps.positions as usize)
    }

    fn prefill(&mut self, slots: &[Slot], out: &mut Vec<Prefilled>) -> Result<(), SynthError> {
        for &slot in slots {
            let failed = match self.slots.get_mut(&slot) {
                Some(state) => state.prefill(&self.llm).map_err(load_failed).map(|()| None)?,
                None => Some(not_open()),
            };
            out.push(Prefilled { slot, tokens: Vec::new(), ended: None, failed });
        }
        Ok(())
    }

    fn decode(&mut self, slots: &[Slot], rounds: u32, out: &mut Vec<Decoded>) -> Result<(), SynthError> {
        let first = out.len();
        for &slot in slots {
            let state = self.slots.get(&slot);
            let failed = match state {
                Some(state) if !state.is_prefilled() => {
                    Some(SynthError::Utterance("decoded before its prefill".into()))
                }
                Some(_) => None,
                None => Some(not_open()),
            };
            out.push(Decoded { slot, tokens: Vec::new(), ended: state.and_then(|s| s.ended()), failed });
        }
        for _ in 0..rounds {
            let mut rows: Vec<(&mut SlotState, &mut Decoded)> = Vec::with_capacity(slots.len());
            let mut results: BTreeMap<Slot, &mut Decoded> = out[first..]
                .iter_mut()
                .filter(|d| d.ended.is_none() && d.failed.is_none())
                .map(|d| (d.slot, d))
                .collect();
            for (slot, state) in &mut self.slots {
                if let Some(result) = results.remove(slot) {
                    rows.push((state, result));
                }
            }
            if rows.is_empty() {
                break;
            }
            slot::decode_round(&self.llm, &self.config.llm, &mut rows).map_err(load_failed)?;
        }
        Ok(())
    }

    fn flow_push(&mut self, slot: Slot, tokens: &[u32], last: bool) -> Result<(), SynthError> {
        let Memory { total, used } = self.memory();
        let frame_bytes = self.frame_bytes();
        let state = self.slots.get_mut(&slot).ok_or_else(not_open)?;
        let refuse = |text: String| Err(SynthError::Utterance(text));
        if state.stream.is_last() {
            return refuse("tokens were pushed after the last".into());
        }
        if let Some(token) = tokens.iter().find(|&&t| t as usize >= self.config.flow.vocab) {
            return Err(SynthError::Input(format!(
                "speech token {token} is past the model's {}",
                self.config.flow.vocab
            )));
        }
        let all = state.stream.tokens() + tokens.len();
        let settled = all.saturating_sub(self.config.flow.lookahead);
        if !last && !settled.is_multiple_of(self.config.block_tokens()) {
            return refuse(format!("{all} tokens less the look-ahead are no whole blocks"));
        }
        if all * self.config.token_mel_ratio > self.flow.limit() {
            return Err(SynthError::Input("the utterance is longer than the model's 300 s; split the text".into()));
        }
        let needed = (tokens.len() * self.config.token_mel_ratio) as u64 * frame_bytes;
        if used + needed > total {
            return Err(SynthError::Memory { needed, free: total.saturating_sub(used) });
        }
        self.flow.push(&mut state.stream, tokens, last);
        Ok(())
    }

    fn flow(&mut self, slots: &[Slot], rounds: u32, out: &mut Vec<Flowed>) -> Result<(), SynthError> {
        for &slot in slots {
            let Some(state) = self.slots.get_mut(&slot) else {
                out.push(Flowed { slot, frames: 0, windows: 0, pending: 0, failed: Some(not_open()) });
                continue;
            };
            let (mut frames, mut windows) = (0, 0);
            for _ in 0..rounds {
                if self.flow.pending(&state.stream) == 0 {
                    break;
                }
                windows += 1;
                if let Some(mel) = self.flow.advance(&mut state.stream, usize::MAX).map_err(device)? {
                    frames += mel.dim(0).map_err(device)? as u32;
                    state.mel.push(mel);
                }
            }
            let pending = self.flow.pending(&state.stream) as u32;
            state.mel_ended = pending == 0 && state.stream.is_last();
            let failed = state.poisoned().map_err(device)?;
            out.push(Flowed { slot, frames, windows, pending, failed });
        }
        Ok(())
    }

    fn vocode(&mut self, slots: &[Slot], out: &mut Vec<Vocoded>) -> Result<(), SynthError> {
        for &slot in slots {
            let Some(state) = self.slots.get_mut(&slot) else {
                out.push(Vocoded { slot, pcm: Vec::new(), done: false, more: false, failed: Some(not_open()) });
                continue;
            };
            let pcm = state.vocode(&self.hift, &mut self.noise).map_err(device)?;
            let failed =
                pcm.iter().any(|v| !v.is_finite()).then(|| SynthError::Utterance("a sample is not a number".into()));
            out.push(Vocoded { slot, pcm, done: state.vocoder.finished(), more: false, failed });
        }
        Ok(())
    }

    fn close(&mut self, slot: Slot) {
        if let Some(state) = self.slots.remove(&slot) {
            self.drop_hold(state.voice);
        }
    }

    fn memory(&self) -> Memory {
        let total = self.options.memory.unwrap_or(DEFAULT_MEMORY).saturating_sub(self.shared());
        // Nothing left is not the same as no limit.
        Memory { total: total.max(1), used: self.held() }
    }

    fn memory_parts(&self) -> Vec<(&'static str, u64)> {
        vec![("utterances", self.held()), ("voices", self.shared())]
    }

    fn memory_needed(&self, extent: Extent) -> u64 {
        u64::from(extent.frames) * self.frame_bytes()
            + u64::from(extent.positions) * llm::position_bytes(&self.config.llm)
    }
}

/// Joins frames along time; `None` for none.
fn join(parts: &[Tensor]) -> candle_core::Result<Option<Tensor>> {
    match parts {
        [] => Ok(None),
        [one] => Ok(Some(one.clone())),
        many => Tensor::cat(many, 0).map(Some),
    }
}

/// How a sampled id ends decoding.
fn ending(id: u32, emitted: usize, config: &super::config::LlmConfig, max_len: u32) -> Option<End> {
    if id as usize >= config.speech_tokens {
        Some(End::Eos)
    } else if emitted >= max_len as usize {
        Some(End::Length)
    } else {
        None
    }
}

/// Whether a voice prompt fits the model; the same on every device.
pub(in crate::synth::cosyvoice) fn check_voice(prompt: &FlowPrompt, flow: &FlowConfig) -> Result<(), SynthError> {
    let input = |text: String| Err(SynthError::Input(text));
    if prompt.speaker.len() != flow.speaker {
        return input(format!(
            "the voice's speaker vector has {} values, the model wants {}",
            prompt.speaker.len(),
            flow.speaker
        ));
    }
    if !prompt.mel.len().is_multiple_of(flow.mel) {
        return input(format!("the voice's mel is not made of frames of {} values", flow.mel));
    }
    if let Some(token) = prompt.tokens.iter().find(|&&t| t as usize >= flow.vocab) {
        return input(format!("the voice holds speech token {token}, the model knows {}", flow.vocab));
    }
    if prompt.tokens.is_empty() || prompt.mel.is_empty() {
        return input("the voice holds no speech tokens or no mel".into());
    }
    Ok(())
}
