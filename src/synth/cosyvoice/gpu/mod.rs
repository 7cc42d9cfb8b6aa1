//! CosyVoice3 on a CUDA device: a [`Backend`] with kernels of its own.
//!
//! The driver, its run-time compiler and cuBLASLt are opened at run time ([`libraries`]); nothing of CUDA is needed to
//! build, and [`absent`] says in one line why there is no GPU engine. [`target`] says what is compiled for which
//! architecture, [`compiler`] compiles it, [`facts`] is what the driver says of a device. [`context`] owns the driver's
//! context and every wait, [`device`] memory and launches, [`units`] the sources and [`mirror`] the structs that they share
//! with Rust, [`gemm`] products of matrices (GEMMs) and convolutions, [`lt`] the flow's large GEMMs, [`tuned`] what was found fastest,
//! [`llm`], [`flow`] and [`hift`] one network each, [`decode`] what rounds of the first mean to utterances, [`solver`] streams
//! through the flow, [`flight`] calls of the last two at low priority, [`slabs`] the flow's memory, [`slots`] what the host
//! knows of each utterance and [`voices`] of each voice,
//! [`ledger`] who holds the device's memory, `faults` what tests make go wrong. [`whisper`] is a recogniser that may be
//! loaded beside the voice.
//!
//! A step copies sampled ids and audio to the host, nothing else.
//!
//! # Failures
//! A row whose values are no numbers, and a step for which one utterance finds no memory, end that utterance: its
//! result says so, its memory is cleared and given back. A driver call that fails ends the device
//! ([`SynthError::Device`]), and so does one that has nothing to say for ten seconds: no wait is longer. Dropping the
//! backend gives up its context without waiting for what does not end, and a new one is loaded in its place, after
//! such a silence only when the kernel has ended. After a kernel that failed (a trap, an illegal address) the driver
//! gives the process no context any more; the device then says so until there is a new process ([`context`]).
//!
//! # Why
//! - Nothing is moved out of device memory (`parks` is false). An utterance that is not scheduled keeps its state and
//!   goes on with identical results. Where its memory itself is wanted, carrying half a gigabyte over the bus and back
//!   takes as long as making some seconds of speech anew, so the scheduler starts such an utterance again instead.
//! - Only new frames are computed. Keys and values of the flow live per (Euler step, layer, guidance row) in slabs
//!   of one block; a voice's prompt blocks are solved once and shared.
//! - The language model's sums have one order whatever the batch, so a seed's tokens are the same alone and in
//!   company. The flow's large GEMMs may round differently at another width, since cuBLASLt picks by shape, and so
//!   may the vocoder, whose narrow passes share their sums among warps. What was found fastest is kept ([`tuned`]), so
//!   that a reload in the same process gives the same audio.

#![expect(unsafe_code, reason = "the driver is C; each block states what makes it right")]

pub mod bench;
pub mod capacity;
mod compiler;
mod context;
mod decode;
mod device;
mod facts;
#[cfg(feature = "fault-injection")]
mod faults;
mod flight;
mod flow;
mod gemm;
pub mod gemm_checks;
mod hift;
mod laps;
mod ledger;
pub mod libraries;
mod llm;
mod lt;
mod mirror;
mod probe;
mod slabs;
mod slots;
mod solver;
pub mod survey;
mod target;
mod tuned;
mod units;
mod voices;
mod weights;
pub mod whisper;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use self::bench::{Bench, Cost, Effort, KernelCost};
use self::decode::decode_rounds;
use self::device::Device;
pub use self::device::{Elt, GpuError, absent, count, unusable};
pub use self::facts::Facts;
#[cfg(feature = "fault-injection")]
pub use self::faults::Fault;
use self::flight::Acoustic;
use self::flow::Flow;
use self::hift::Hift;
use self::laps::Laps;
pub use self::ledger::Part;
use self::llm::Llm;
pub use self::llm::checks as sample_checks;
use self::slabs::Slabs;
use self::slots::{Past, SlotState, Stretched, Written};
use self::solver::Solver;
pub use self::units::{ARCHITECTURES, compile_all};
use self::voices::Voices;
use self::weights::Packer;
pub use self::weights::{Random, Source};
use self::whisper::seat::Seated;
use super::backend::{
    Backend, BackendCaps, Decoded, Extent, FlowPrompt, Flowed, Options, Prefilled, SlotRequest, Stretch, Vocoded,
    VoiceHandle,
};
use super::checkpoint::Checkpoint;
use super::config::Config;
use super::cpu;
use crate::synth::{EngineLimits, Memory, PerStage, Precedence, Slot, Stage, SynthError};

/// Utterances open at once at most, unless told otherwise, and at least: more than decode together, since where a device is
/// full each is made just before it is heard, and is open for as long. Of 508 calls on a simulated H200 with 256 slots 20 turns were
/// refused, each for want of a slot, at a first audio p95 of 89 ms.
const SLOTS: std::ops::RangeInclusive<u64> = 8..=320;
/// Memory that a slot is reckoned to need: a tenth for its positions, the rest for some blocks of the flow.
const SLOT_BYTES: u64 = 256 << 20;
/// Positions of a language model slot unless memory is short.
const POSITIONS: usize = 2048;
/// Least speech ids that an utterance must have room for after its prefix.
const LEAST_SPEECH: usize = 25;
/// Share of the memory left after loading that slabs take; the rest is the driver's.
const SLAB_SHARE: f64 = 0.94;

/// Operand types of the three networks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    /// The language model.
    pub llm: Elt,
    /// The flow.
    pub flow: Elt,
    /// The vocoder.
    pub hift: Elt,
}

impl Precision {
    /// Single precision throughout: for comparing with the reference.
    pub const EXACT: Precision = Precision { llm: Elt::F32, flow: Elt::F32, hift: Elt::F32 };
}

impl Default for Precision {
    /// The language model in bfloat16 as it was trained; flow and vocoder in half, whose longer fraction they need
    /// and whose range they stay within (conversion saturates).
    fn default() -> Self {
        Precision { llm: Elt::Bf16, flow: Elt::F16, hift: Elt::F16 }
    }
}

/// CosyVoice3 on one CUDA device.
pub struct GpuBackend {
    /// Who computes beside it; leaves first.
    seated: Option<Seated>,
    device: Arc<Device>,
    config: Config,
    caps: BackendCaps,
    llm: Llm,
    acoustic: Acoustic,
}

impl GpuBackend {
    /// Loads the checkpoint in `dir` onto device `ordinal`.
    ///
    /// # Errors
    /// No such device, a tensor is missing or malformed, or there is not enough memory.
    pub fn load(dir: &Path, ordinal: u32, options: Options, precision: Precision) -> Result<Self, GpuError> {
        let model = |e: String| GpuError::Model(e);
        let config = Config::load(dir).map_err(|e| model(e.to_string()))?;
        let checkpoint = Checkpoint::open_with(dir, options.llm.stem()).map_err(|e| model(e.to_string()))?;
        Self::new(config, &checkpoint, ordinal, options, precision)
    }

    /// Builds the model of `config` from `source` on device `ordinal`.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn new(
        config: Config,
        source: &dyn Source,
        ordinal: u32,
        options: Options,
        precision: Precision,
    ) -> Result<Self, GpuError> {
        let mut laps = Laps::start();
        let device = Device::open(ordinal, &options.hardware)?;
        if let Some(why) = device.target.refuses(&device.name, &options.hardware, precision.flow) {
            return Err(GpuError::Model(why));
        }
        laps.end("device");
        // Before memory is counted: what is left is the voice's.
        let seated = options.seat.as_ref().map(|seat| seat.settle(&device));
        let free = device.room()?;
        let slots = options.slots.unwrap_or_else(|| slots_for(free)).clamp(1, 1024);
        // One slot more than callers see: for looking into the networks.
        let room = slots as usize + 1;
        let position = 2 * config.llm.layers * config.llm.kv_heads * config.llm.head_dim * precision.llm.size();
        let affordable = (free as usize / 8) / (position * room);
        let positions = POSITIONS.min(affordable).max(256);
        let llm = Llm::load(&Packer::new(&device, precision.llm)?, source, &config.llm, room, positions)?;
        laps.end("language model");
        let flow = Flow::load(&Packer::new(&device, precision.flow)?, source, &config)?;
        laps.end("flow");
        let packer = Packer::new(&device, precision.hift)?;
        let hift = Hift::load(&packer, source, &config, options.sine_noise, room, flow.x_offset)?;
        laps.end("vocoder");
        let hists = device.zeros("flow histories", room * flow.hist_bytes)?;
        device.settle(Part::Code)?;
        let free = device.room()?;
        let budget = options.memory.unwrap_or((free as f64 * SLAB_SHARE) as u64).min(free);
        let slabs = Slabs::new(&device, flow.slab_bytes, budget)?;
        laps.end("memory");
        let widest = |most: usize| most.min(slots as usize) as u32;
        let caps = BackendCaps {
            device: format!("cuda:{ordinal}"),
            limits: EngineLimits {
                slots,
                width: PerStage::new([
                    widest(64),
                    widest(llm::WIDTHS[llm::WIDTHS.len() - 1]),
                    widest(flow::STREAMS),
                    widest(hift::WIDTH),
                ]),
                rounds: PerStage::new([1, llm::ROUNDS as u32, config.flow.steps as u32, 1]),
                parks: false,
                launches: true,
                grows: true,
            },
            positions: positions as u32,
        };
        let (final_chunk, flow_config) = (options.final_chunk, config.clone());
        let solver = Solver { device: device.clone(), config: flow_config, final_chunk, flow, slabs, hists };
        let acoustic = Acoustic {
            device: device.clone(),
            solver,
            hift,
            voices: Voices::default(),
            slots: BTreeMap::new(),
            flight: None,
        };
        let mut backend = Self { seated, device, config, caps, llm, acoustic };
        backend.warm_up()?;
        backend.device.settle(Part::Graphs)?;
        laps.end("graphs");
        tracing::info!(device = ordinal, took = ?laps.took, "the model is on the device");
        Ok(backend)
    }

    /// Records every graph, so that no caller waits for one.
    fn warm_up(&mut self) -> Result<(), GpuError> {
        self.llm.warm_up(self.caps.limits.width[Stage::Decode] as usize)?;
        self.acoustic.solver.flow.warm_up(self.caps.limits.width[Stage::Flow] as usize)?;
        self.acoustic.hift.warm_up(self.caps.limits.width[Stage::Vocode] as usize)?;
        self.device.sync()
    }

    /// The sizes.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What holds the device's memory, in bytes; see [`Part`].
    pub fn inventory(&self) -> Vec<(Part, u64)> {
        let ledger = &self.device.ledger;
        let bytes = |part| match part {
            Part::SlabsUsed => self.acoustic.solver.slabs.used(),
            Part::SlabsFree => ledger.of(part).saturating_sub(self.acoustic.solver.slabs.used()),
            _ => ledger.of(part),
        };
        Part::ALL.into_iter().map(|part| (part, bytes(part))).collect()
    }

    /// Bytes of the device's memory that are in use, as the driver says, by whomever.
    ///
    /// # Errors
    /// The device does not answer.
    pub fn driver_used(&self) -> Result<u64, GpuError> {
        let (free, total) = self.device.memory()?;
        Ok(total.saturating_sub(free))
    }

    /// The device's name.
    pub fn device_name(&self) -> &str {
        &self.device.name
    }

    /// What costs are measured on.
    fn bench(&mut self) -> Bench<'_> {
        let slots = self.caps.limits.slots as usize;
        Bench { device: self.device.clone(), llm: &mut self.llm, acoustic: &mut self.acoustic, slots }
    }

    /// The cost of every stage at several widths. Uses slots `0..` and leaves nothing open; nothing may be open
    /// before.
    ///
    /// # Errors
    /// The device failed or has too little memory.
    pub fn stage_costs(&mut self, effort: &Effort) -> Result<Vec<Cost>, GpuError> {
        self.bench().stage_costs(effort)
    }

    /// Where the time of each stage goes, kernel by kernel, at the effort's first width.
    ///
    /// # Errors
    /// The device failed.
    pub fn kernel_costs(&mut self, effort: &Effort) -> Result<Vec<(&'static str, Vec<KernelCost>)>, GpuError> {
        self.bench().kernel_costs(effort)
    }

    /// Makes something go wrong; see [`Fault`].
    ///
    /// # Errors
    /// The device does not work already, or the slot of [`Fault::NotANumber`] is not open.
    #[cfg(feature = "fault-injection")]
    pub fn inject(&mut self, fault: Fault) -> Result<(), SynthError> {
        fault.happen(&self.device, &self.llm, &mut self.acoustic)
    }
}

/// Which of the networks of `config` the kernels cannot run where a block has `shared_kib` KiB of shared memory, and why: by
/// the names of the self-test's stages. Needs no device.
pub fn misfits(config: &Config, precision: Precision, shared_kib: u32) -> Vec<(&'static str, String)> {
    let shared = shared_kib << 10;
    let checks = [
        ("llm", llm::load::check(&config.llm, precision.llm, shared)),
        ("flow", flow::load::check(config, shared, false)),
        ("hift", hift::load::check(config)),
    ];
    checks.into_iter().filter_map(|(stage, check)| Some((stage, check.err()?.to_string()))).collect()
}

/// Slots for `free` bytes of device memory.
fn slots_for(free: u64) -> u32 {
    (free / SLOT_BYTES).clamp(*SLOTS.start(), *SLOTS.end()) as u32
}

/// Speech ids that an utterance may have at most: what it asked for, or what there is room for after a prefix of `prefix`
/// of `positions` positions, and after `prompt` of the `flow` tokens that the flow has blocks for.
///
/// # Errors
/// There is room for next to nothing.
fn longest(asked: u32, prefix: usize, positions: usize, prompt: usize, flow: usize) -> Result<u32, SynthError> {
    let room = positions.saturating_sub(prefix).min(flow.saturating_sub(prompt));
    if room < LEAST_SPEECH.min(asked as usize) {
        return Err(SynthError::Input(format!(
            "the text is too long: split it (its {prefix} ids leave {room} of {positions} positions for speech)"
        )));
    }
    Ok(asked.min(room as u32))
}

fn not_open() -> SynthError {
    SynthError::Utterance("the slot is not open".into())
}

impl Backend for GpuBackend {
    fn caps(&self) -> &BackendCaps {
        &self.caps
    }

    fn product(&self) -> String {
        self.device.name.clone()
    }

    fn hold_back(&self) -> u32 {
        self.acoustic.hift.hold_back() as u32
    }

    fn add_voice(&mut self, prompt: Arc<FlowPrompt>) -> Result<VoiceHandle, SynthError> {
        let voice = self.acoustic.solver.make_voice(&prompt)?;
        Ok(self.acoustic.voices.add(voice))
    }

    fn prepare_voice(&mut self, voice: VoiceHandle) -> Result<(), SynthError> {
        if self.acoustic.voices.get(voice).is_none_or(|v| v.prefix.is_some()) {
            return Ok(());
        }
        self.acoustic.catch_up()?;
        self.acoustic.solver.solve_prefix(&mut self.acoustic.voices, voice)
    }

    fn release_voice(&mut self, voice: VoiceHandle) {
        self.acoustic.voices.release(voice, &mut self.acoustic.solver.slabs);
    }

    fn open(&mut self, slot: Slot, mut request: SlotRequest) -> Result<(), SynthError> {
        self.close(slot);
        if slot.0 >= self.caps.limits.slots {
            return Err(SynthError::Utterance(format!(
                "slot {} is past the {} there are",
                slot.0, self.caps.limits.slots
            )));
        }
        cpu::check_request(&request, &self.config)?;
        let voice = request.voice;
        let Acoustic { solver, hift, voices, slots, .. } = &mut self.acoustic;
        let entry = voices.get_mut(voice).ok_or_else(|| SynthError::Input("the voice was removed".into()))?;
        let shared = entry.prefix.as_ref().map_or(&[][..], |p| &p.slabs);
        let tokens = &entry.prompt.tokens;
        let (positions, blocks) = (self.caps.positions as usize, solver.flow.limit() / self.config.token_mel_ratio);
        let sampling = &mut request.sampling;
        sampling.max_len = longest(sampling.max_len, request.prefix.len(), positions, tokens.len(), blocks)?;
        sampling.min_len = sampling.min_len.min(sampling.max_len);
        let stream = solver.stream(tokens, shared);
        let past = entry.prefix.as_ref().map_or(Past::Nothing, |prefix| Past::Prompt(prefix.hist.ptr));
        hift.reset(slot.0 as usize);
        entry.holds += 1;
        let state = SlotState {
            voice,
            stretched: Stretched::new(&self.config.flow, request.speed),
            request,
            prefilled: false,
            emitted: 0,
            ended: None,
            written: None,
            stream,
            poisoned: false,
            past: Some(past),
        };
        slots.insert(slot, state);
        Ok(())
    }

    fn prefill(&mut self, slots: &[Slot], out: &mut Vec<Prefilled>) -> Result<(), SynthError> {
        let pasts = self.acoustic.take_pasts(slots);
        let mut rows = Vec::with_capacity(slots.len());
        let mut of = Vec::with_capacity(slots.len());
        for (n, slot) in slots.iter().enumerate() {
            let Some(state) = self.acoustic.slots.get(slot).filter(|state| !state.prefilled) else { continue };
            let (number, sampling) = (slot.0 as usize, &state.request.sampling);
            rows.push(match &state.written {
                Some(written @ Written { input, stretch: Some(stretch), .. }) if !input.is_empty() => {
                    self.llm.appended(number, written.from(), input, sampling.key, stretch)
                }
                Some(_) => continue,
                None if state.request.prefix.is_empty() => continue,
                None => self.llm.whole(number, &state.request.prefix, sampling),
            });
            of.push(n);
        }
        let first = out.len();
        out.extend(slots.iter().map(|&slot| Prefilled { slot, tokens: Vec::new(), ended: None, failed: None }));
        // Only flow and vocoder read these: the host starts them while the device works on the prefixes, not before.
        let sampled = self.llm.feed(&rows, || self.acoustic.put_pasts(&pasts))?;
        for (n, sampled) in of.into_iter().zip(sampled) {
            let result = &mut out[first + n];
            if let (Some(state), Some(sampled)) = (self.acoustic.slots.get_mut(&result.slot), sampled) {
                (result.ended, result.failed) = state.sampled(&sampled);
                result.tokens = sampled.tokens;
            }
        }
        for result in &mut out[first..] {
            match self.acoustic.slots.get_mut(&result.slot) {
                Some(state) => {
                    state.prefilled = true;
                    state.written.iter_mut().for_each(Written::prefilled);
                }
                None => result.failed = Some(not_open()),
            }
        }
        Ok(())
    }

    fn rehearse(&mut self) -> Result<(), SynthError> {
        Ok(self.llm.rehearse()?)
    }

    fn decode(&mut self, slots: &[Slot], rounds: u32, out: &mut Vec<Decoded>) -> Result<(), SynthError> {
        decode_rounds(&mut self.llm, &mut self.acoustic, slots, rounds, out, None)
    }

    fn overlaps(&self) -> bool {
        self.acoustic.overlaps()
    }

    fn decode_beside_flow(
        &mut self,
        slot: Slot,
        rounds: u32,
        out: &mut Vec<Decoded>,
        flowed: &mut Vec<Flowed>,
    ) -> Result<(), SynthError> {
        // What the flow reads was written in front.
        self.device.sync()?;
        decode_rounds(&mut self.llm, &mut self.acoustic, &[slot], rounds, out, Some(flowed))
    }

    fn extends(&self) -> bool {
        true
    }

    fn extend(&mut self, slot: Slot, stretch: Stretch) -> Result<(), SynthError> {
        let positions = self.caps.positions as usize;
        cpu::check_ids(&stretch.input, &self.config.llm)?;
        let state = self.acoustic.slots.get_mut(&slot).ok_or_else(not_open)?;
        state.written.get_or_insert_default().extend(stretch, positions)?;
        (state.prefilled, state.ended) = (false, None);
        Ok(())
    }

    fn flow_push(&mut self, slot: Slot, tokens: &[u32], last: bool) -> Result<(), SynthError> {
        let limit = self.acoustic.solver.flow.limit();
        // Where there was no prefill.
        self.acoustic.begin(slot)?;
        let state = self.acoustic.slots.get_mut(&slot).ok_or_else(not_open)?;
        let refuse = |text: String| Err(SynthError::Utterance(text));
        if state.stream.last {
            return refuse("tokens were pushed after the last".into());
        }
        if let Some(token) = tokens.iter().find(|&&t| t as usize >= self.config.flow.vocab) {
            return Err(SynthError::Input(format!(
                "speech token {token} is past the model's {}",
                self.config.flow.vocab
            )));
        }
        let all = state.stream.tokens.len() + tokens.len();
        let settled = all.saturating_sub(self.config.flow.lookahead);
        if !last && !settled.is_multiple_of(self.config.block_tokens()) {
            return refuse(format!("{all} tokens less the look-ahead are no whole blocks"));
        }
        if all * self.config.token_mel_ratio > limit {
            let seconds = limit / self.config.frame_rate();
            return Err(SynthError::Input(format!(
                "the utterance is longer than the engine's {seconds} s; split the text"
            )));
        }
        state.stream.push(tokens, last);
        Ok(())
    }

    fn flow(&mut self, slots: &[Slot], rounds: u32, out: &mut Vec<Flowed>) -> Result<(), SynthError> {
        self.acoustic.run_flow(slots, rounds, out)
    }

    fn flow_rounds(&self, slot: Slot) -> u32 {
        self.acoustic.slots.get(&slot).map_or(0, |state| state.stream.pending() as u32)
    }

    fn vocode(&mut self, slots: &[Slot], out: &mut Vec<Vocoded>) -> Result<(), SynthError> {
        self.acoustic.run_vocode(slots, out)
    }

    fn launch_flow(&mut self, slots: &[Slot], rounds: u32) -> Result<bool, SynthError> {
        self.acoustic.launch_flow(slots, rounds)
    }

    fn launch_vocode(&mut self, slots: &[Slot]) -> Result<bool, SynthError> {
        self.acoustic.launch_vocode(slots)
    }

    fn poll(&mut self) -> Result<bool, SynthError> {
        self.acoustic.flight_has_ended()
    }

    fn complete_flow(&mut self, out: &mut Vec<Flowed>) -> Result<(), SynthError> {
        self.acoustic.land_flow(out)
    }

    fn complete_vocode(&mut self, out: &mut Vec<Vocoded>) -> Result<(), SynthError> {
        self.acoustic.land_vocode(out)
    }

    fn close(&mut self, slot: Slot) {
        let Some(mut state) = self.acoustic.take_for_closing(slot) else { return };
        let Acoustic { solver, voices, .. } = &mut self.acoustic;
        if state.poisoned {
            let slabs = state.stream.own().try_for_each(|slab| solver.slabs.scrub(slab));
            if let Err(error) = slabs.and_then(|()| self.llm.scrub(slot.0 as usize)) {
                tracing::error!(%error, slot = slot.0, "a slot could not be cleared");
            }
        }
        state.stream.free(&mut solver.slabs);
        voices.release(state.voice, &mut solver.slabs);
    }

    fn memory(&self) -> Memory {
        let slabs = &self.acoustic.solver.slabs;
        let voices = self.acoustic.voices.slabs() as u64 * slabs.size();
        // Nothing left is not the same as no limit.
        Memory { total: slabs.total().saturating_sub(voices).max(1), used: slabs.used().saturating_sub(voices) }
    }

    fn memory_parts(&self) -> Vec<(&'static str, u64)> {
        self.inventory().into_iter().map(|(part, bytes)| (part.label(), bytes)).collect()
    }

    fn memory_needed(&self, extent: Extent) -> u64 {
        // The prompt's part that is not shared takes a block, and the end of the last block may be empty.
        let blocks = (extent.frames as usize).div_ceil(self.config.flow.block) + 1;
        blocks as u64 * self.acoustic.solver.slabs.size()
    }

    fn memory_when_flowed(&self, slot: Slot) -> Option<u64> {
        let state = self.acoustic.slots.get(&slot)?;
        Some(state.stream.slabs_in_the_end() as u64 * self.acoustic.solver.slabs.size())
    }

    fn sync(&mut self) -> Result<(), SynthError> {
        self.acoustic.catch_up()?;
        Ok(self.device.sync()?)
    }

    fn precedence(&self) -> Option<Arc<Precedence>> {
        self.seated.as_ref().map(Seated::precedence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_follow_memory_and_their_positions_stay_whole() {
        let position = 2 * 24 * 2 * 64 * 2;
        for (gb, slots) in [(7, 26), (15, 55), (23, 85), (31, 115), (78, 290), (139, 320)] {
            let free = gb * 1_000_000_000;
            assert_eq!(slots_for(free), slots, "{gb} GB");
            let affordable = free as usize / 8 / (position * (slots as usize + 1));
            assert!(affordable >= POSITIONS, "{gb} GB: {affordable}");
        }
        assert_eq!(slots_for(0), 8);
    }

    #[test]
    fn networks_that_the_kernels_cannot_run_are_told_one_by_one() {
        let kit = |name: &str| {
            let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden");
            Config::load(&root.join(name).join("checkpoint")).expect("its sizes")
        };
        for precision in [Precision::default(), Precision::EXACT] {
            assert_eq!(misfits(&kit("cosyvoice3"), precision, 99), []);
            let other: Vec<&str> = misfits(&kit("cosyvoice3-sizes"), precision, 99).into_iter().map(|m| m.0).collect();
            assert!(other.contains(&"flow"), "{other:?}");
        }
    }

    #[test]
    fn a_long_text_in_a_long_voice_is_given_what_room_there_is() {
        // 80 ids in a voice of 3 s, then of 30 s: its text and its 750 speech ids are in the prefix.
        assert_eq!(longest(1600, 80 + 30 + 75, 2048, 75, 1600).expect("fits"), 1525);
        assert_eq!(longest(1600, 80 + 150 + 750, 2048, 750, 1600).expect("is cut"), 850);
        assert_eq!(longest(200, 185, 2048, 75, 1600).expect("fits"), 200);
        let error = longest(1600, 2040, 2048, 75, 1600).expect_err("no room").to_string();
        assert!(error.contains("split it"), "{error}");
        assert_eq!(longest(5, 2043, 2048, 75, 1600).expect("all of it"), 5);
    }
}
