//! CosyVoice3 on a CUDA device: a [`Backend`] with kernels of its own.
//!
//! The driver, its run-time compiler and cuBLASLt are opened at run time ([`libraries`]); nothing of CUDA is needed to
//! build, and [`absent`] says in one line why there is no GPU engine. [`target`] says what is compiled for which
//! architecture, [`compiler`] compiles it, [`facts`] is what the driver says of a device. [`context`] owns the driver's
//! context and every wait, [`device`] memory and launches, [`gemm`] products and convolutions, [`lt`] the flow's large
//! products, [`tuned`] what was found fastest, [`llm`], [`flow`] and [`hift`] one network each, [`flight`] calls of the
//! last two behind others, [`slabs`] the flow's memory, [`slots`] what the host knows of each utterance, [`ledger`] who
//! holds the device's memory, [`faults`] what can be made to go wrong.
//!
//! A step copies to the host drawn ids and samples, nothing else.
//!
//! # Failures
//! A row whose values are no numbers, and a step for which one utterance finds no memory, end that utterance: its
//! result says so, its memory is cleared and given back. A driver call that fails ends the device
//! ([`SynthError::Device`]), and so does one that has nothing to say for ten seconds: no wait is longer. Dropping the
//! backend lets go of its context without waiting for what does not end, and a new one is loaded in its place, after
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
//!   company. The flow's large products may round differently at another width, since cuBLASLt picks by shape, and so
//!   may the vocoder, whose narrow passes share their sums among warps. What was found fastest is kept ([`tuned`]), so
//!   that a reload in the same process gives the same audio.
//!
//! Why this file is long: it is the whole of one trait over three networks.

#![expect(unsafe_code, reason = "the driver is C; each block states what makes it right")]

pub mod bench;
mod compiler;
mod context;
mod device;
mod facts;
mod faults;
mod flight;
mod flow;
mod gemm;
mod hift;
mod ledger;
pub mod libraries;
mod llm;
mod lt;
mod probe;
pub mod products;
mod slabs;
mod slots;
mod target;
mod tuned;
mod weights;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use self::compiler::Unit;
use self::device::Device;
pub use self::device::{Elt, GpuError, absent, count, unusable};
pub use self::facts::Facts;
pub use self::faults::Fault;
use self::flight::Flight;
use self::flow::{ChunkArgs, ChunkRun, Flow};
use self::hift::Hift;
pub use self::ledger::Part;
use self::llm::Llm;
use self::slabs::{Pool, Slab, Slabs};
use self::slots::{Next, Prefix, SlotState, Stream, Voice};
use self::weights::Packer;
pub use self::weights::{Random, Source};
use super::backend::{
    Backend, BackendCaps, Decoded, End, Extent, FlowPrompt, Flowed, Options, Prefilled, SlotRequest, Vocoded,
    VoiceHandle,
};
use super::checkpoint::Checkpoint;
use super::config::{Config, EULER_STEPS};
use super::cpu;
use crate::synth::{EngineLimits, Memory, PerStage, Slot, Stage, SynthError};

const COMMON: &str = include_str!("kernels/common.cuh");
const SETUP: &str = include_str!("kernels/setup.cu");
const PRODUCT: &str = include_str!("kernels/product.cuh");
const GEMM: &str = include_str!("kernels/gemm.cu");
const GEMV: &str = include_str!("kernels/gemv.cu");
const WIDE: &str = include_str!("kernels/wide.cu");
const LLM: &str = include_str!("kernels/llm.cu");
const DRAW: &str = include_str!("kernels/draw.cu");
const FLOW: &str = include_str!("kernels/flow.cu");
const FEW: &str = include_str!("kernels/few.cu");
const HIFT: &str = include_str!("kernels/hift.cu");

/// Utterances open at once at most, unless told otherwise, and at least.
const SLOTS: std::ops::RangeInclusive<u64> = 8..=256;
/// Memory that a slot is reckoned to need: a tenth for its positions, the rest for some blocks of the flow.
const SLOT_BYTES: u64 = 256 << 20;
/// Positions of a language model slot unless memory is short.
const POSITIONS: usize = 2048;
/// Least speech ids that an utterance must have room for behind its prefix.
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

/// Architectures that kernels are compiled for here, and the shared memory of a block there in KiB.
pub const ARCHITECTURES: [(&str, u32); 6] =
    [("sm_80", 163), ("sm_86", 99), ("sm_89", 99), ("sm_90a", 227), ("sm_100", 227), ("sm_120", 99)];

/// Compiles every kernel that a load for `arch` compiles, with the sizes of `config`, in every type of operands that
/// [`Precision`] has a name for. Needs the run-time compiler but no device; `None` where that is missing.
///
/// # Errors
/// What does not compile.
pub fn compile_all(config: &Config, arch: &str, shared_kib: u32) -> Option<Result<(), GpuError>> {
    libraries::open_compiler().then(|| {
        let (llm, flow, hift) = (llm::defines(&config.llm), flow::defines(&config.flow), hift::defines(config, 0));
        let gemm = gemm::defines(shared_kib << 10);
        for Precision { llm: l, flow: f, hift: h } in [Precision::default(), Precision::EXACT] {
            let mut units = vec![
                Unit { name: "llm.cu", sources: &[COMMON, LLM, DRAW], elt: l, defines: &llm },
                Unit { name: "wide.cu", sources: &[COMMON, PRODUCT, WIDE], elt: l, defines: &[] },
                Unit { name: "flow.cu", sources: &[COMMON, FLOW, FEW], elt: f, defines: &flow },
                Unit { name: "hift.cu", sources: &[COMMON, HIFT], elt: h, defines: &hift },
            ];
            let mut elts = vec![l, f, h];
            elts.dedup();
            for elt in elts {
                units.push(Unit { name: "setup.cu", sources: &[COMMON, SETUP], elt, defines: &[] });
                units.push(Unit { name: "gemm.cu", sources: &[COMMON, PRODUCT, GEMM, GEMV], elt, defines: &gemm });
            }
            units.iter().try_for_each(|unit| unit.code(arch, None).map(drop))?;
        }
        Ok(())
    })
}

/// CosyVoice3 on one CUDA device.
pub struct GpuBackend {
    device: Arc<Device>,
    config: Config,
    options: Options,
    caps: BackendCaps,
    llm: Llm,
    flow: Flow,
    hift: Hift,
    slabs: Slabs,
    /// Histories of the flow's position convolutions, one a slot.
    hists: device::Buf,
    voices: BTreeMap<VoiceHandle, Voice>,
    next_voice: u32,
    slots: BTreeMap<Slot, SlotState>,
    flight: Option<Flight>,
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
        let device = Device::open(ordinal, &options.hardware)?;
        let free = device.room()?;
        let slots = options.slots.unwrap_or_else(|| slots_for(free)).clamp(1, 1024);
        // One slot more than callers see: for looking into the networks.
        let room = slots as usize + 1;
        let position = 2 * config.llm.layers * config.llm.kv_heads * config.llm.head_dim * precision.llm.size();
        let affordable = (free as usize / 8) / (position * room);
        let positions = POSITIONS.min(affordable).max(256);
        let llm = Llm::load(&Packer::new(&device, precision.llm)?, source, &config.llm, room, positions)?;
        let flow = Flow::load(&Packer::new(&device, precision.flow)?, source, &config)?;
        let packer = Packer::new(&device, precision.hift)?;
        let hift = Hift::load(&packer, source, &config, options.sine_noise, room, flow.x_offset)?;
        let hists = device.zeros("flow histories", room * flow.hist_bytes)?;
        device.settle(Part::Code)?;
        let free = device.room()?;
        let budget = options.memory.unwrap_or((free as f64 * SLAB_SHARE) as u64).min(free);
        let slabs = Slabs::new(&device, flow.slab_bytes, budget)?;
        let widest = |most: usize| most.min(slots as usize) as u32;
        let caps = BackendCaps {
            device: format!("cuda:{ordinal}"),
            limits: EngineLimits {
                slots,
                width: PerStage::new([
                    widest(64),
                    widest(llm::WIDTHS[llm::WIDTHS.len() - 1]),
                    widest(flow::WIDTH),
                    widest(hift::WIDTH),
                ]),
                rounds: PerStage::new([1, llm::ROUNDS as u32, EULER_STEPS as u32, 1]),
                parks: false,
                launches: true,
                grows: true,
            },
            positions: positions as u32,
        };
        let (voices, slots) = (BTreeMap::new(), BTreeMap::new());
        let mut backend = Self {
            device,
            config,
            options,
            caps,
            llm,
            flow,
            hift,
            slabs,
            hists,
            voices,
            next_voice: 0,
            slots,
            flight: None,
        };
        backend.warm_up()?;
        backend.device.settle(Part::Graphs)?;
        Ok(backend)
    }

    /// Records every graph, so that no caller waits for one.
    fn warm_up(&mut self) -> Result<(), GpuError> {
        self.llm.warm_up(self.caps.limits.width[Stage::Decode] as usize)?;
        self.flow.warm_up(self.caps.limits.width[Stage::Flow] as usize)?;
        self.hift.warm_up(self.caps.limits.width[Stage::Vocode] as usize)?;
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
            Part::SlabsUsed => self.slabs.used(),
            Part::SlabsFree => ledger.of(part).saturating_sub(self.slabs.used()),
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

    /// Bytes of the slabs that voices hold.
    fn shared_bytes(&self) -> u64 {
        let slabs: usize = self.voices.values().filter_map(|v| v.prefix.as_ref()).map(|p| p.slabs.len()).sum();
        slabs as u64 * self.slabs.size()
    }

    /// The device's name.
    pub fn device_name(&self) -> &str {
        &self.device.name
    }

    fn hist_of(&self, slot: usize) -> u64 {
        self.hists.ptr + (slot * self.flow.hist_bytes) as u64
    }

    fn drop_hold(&mut self, voice: VoiceHandle) {
        let Some(entry) = self.voices.get_mut(&voice) else { return };
        entry.holds = entry.holds.saturating_sub(1);
        if entry.holds == 0
            && let Some(prefix) = self.voices.remove(&voice).and_then(|v| v.prefix)
        {
            prefix.slabs.into_iter().for_each(|s| self.slabs.put(s));
        }
    }

    fn make_voice(&self, prompt: &Arc<FlowPrompt>) -> Result<Voice, SynthError> {
        cpu::check_voice(prompt, &self.config.flow)?;
        Ok(Voice {
            prompt: prompt.clone(),
            frames: prompt.mel.len() / self.config.flow.mel,
            cond: self.device.upload("a voice", &prompt.mel)?,
            speaker: self.device.upload("a voice", &self.flow.project(&prompt.speaker))?,
            prefix: None,
            holds: 1,
        })
    }

    /// The kernels' view of one chunk. `slabs`: the utterance's, at least up to the chunk's own block.
    fn chunk(&self, voice: &Voice, hist: u64, next: &Next, slabs: &[Slab], seen: usize, flag: usize) -> ChunkArgs {
        let mut page = [0u64; flow::PAGES];
        for (to, &slab) in page.iter_mut().zip(slabs) {
            *to = self.slabs.address(slab);
        }
        let block = self.config.flow.block;
        let left = self.config.flow.left_blocks.map_or(0, |n| (next.start / block).saturating_sub(n) * block);
        ChunkArgs {
            hist,
            cond: voice.cond.ptr,
            speaker: voice.speaker.ptr,
            step: next.step as i32,
            frame0: next.start as i32,
            frames: next.frames as i32,
            keys: seen as i32,
            key0: left as i32,
            cond_frames: voice.frames as i32,
            live: 1,
            flag: flag as i32,
            page,
        }
    }

    fn tokens_for(&self, tokens: &[u32], next: &Next, start: usize) -> Option<Vec<i32>> {
        (next.step == 0).then(|| self.flow.window(tokens, start / self.config.token_mel_ratio))
    }

    /// Runs one Euler step of a full solve.
    fn whole_step(
        &mut self,
        voice: VoiceHandle,
        tokens: &[u32],
        next: &Next,
        own: &[Slab],
    ) -> Result<bool, SynthError> {
        let block = self.config.flow.block;
        let scratch = self.device.zeros("a full solve", own.len() * self.flow.hist_bytes)?;
        let Some(voice) = self.voices.get(&voice) else { return Ok(false) };
        let runs: Vec<ChunkRun> = (0..own.len())
            .map(|n| {
                let part = Next { start: n * block, frames: block.min(next.frames - n * block), ..next.clone() };
                let hist = scratch.ptr + (n * self.flow.hist_bytes) as u64;
                let mut args = self.chunk(voice, hist, &part, own, next.frames, 0);
                args.key0 = 0;
                ChunkRun { args, tokens: self.tokens_for(tokens, next, n * block) }
            })
            .collect();
        Ok(self.flow.run_whole(&runs)?)
    }

    /// Starts Euler steps of `streams` up to `rounds` each, chunks that end at or before `limit`. Returns whether there
    /// were any, whose flags are then to be waited for, and what failed before.
    fn advance(
        &mut self,
        streams: &mut [Job<'_>],
        rounds: usize,
        limit: usize,
    ) -> Result<(bool, Vec<Option<SynthError>>), SynthError> {
        let mut failed: Vec<Option<SynthError>> = streams.iter().map(|_| None).collect();
        let mut plan: Vec<Vec<ChunkRun>> = Vec::with_capacity(rounds);
        for _ in 0..rounds.min(flow::ROUNDS) {
            let mut round = Vec::with_capacity(streams.len());
            // Blocks of one stream in a round beyond its first: as many as keep the round below what pays.
            let mut spare = flow::PAYS.saturating_sub(streams.len());
            for (n, job) in streams.iter_mut().enumerate() {
                if failed[n].is_some() {
                    continue;
                }
                let chunks = match job.stream.next(limit, 1 + spare, &mut self.slabs) {
                    Ok(chunks) => chunks,
                    Err(e) => {
                        failed[n] = Some(e);
                        continue;
                    }
                };
                spare -= chunks.len().saturating_sub(1);
                for next in chunks {
                    if let Some(own) = &next.whole {
                        match self.whole_step(job.voice, &job.stream.tokens, &next, own) {
                            Ok(false) => {}
                            Ok(true) => failed[n] = Some(poisoned()),
                            Err(e @ SynthError::Device(_)) => return Err(e),
                            Err(e) => failed[n] = Some(e),
                        }
                        continue;
                    }
                    let Some(voice) = self.voices.get(&job.voice) else { continue };
                    let args = self.chunk(voice, job.hist, &next, &job.stream.slabs, next.start + next.frames, n);
                    round.push(ChunkRun { args, tokens: self.tokens_for(&job.stream.tokens, &next, next.start) });
                }
            }
            if round.is_empty() {
                continue;
            }
            plan.push(round);
        }
        if !plan.is_empty() {
            self.flow.start(&plan)?;
        }
        Ok((!plan.is_empty(), failed))
    }

    /// Runs every Euler step of one stream's next chunks that end at or before `limit`. Returns what failed.
    fn advance_now(&mut self, job: Job<'_>, limit: usize) -> Result<Option<SynthError>, SynthError> {
        let (started, mut failed) = self.advance(&mut [job], EULER_STEPS, limit)?;
        self.device.sync()?;
        self.settle(started, &mut failed);
        Ok(failed.pop().flatten())
    }

    /// Adds what the steps that have ended say to what failed before.
    fn settle(&mut self, started: bool, failed: &mut [Option<SynthError>]) {
        let flags = if started { self.flow.flags() } else { Vec::new() };
        for (flag, failed) in flags.into_iter().zip(failed) {
            if flag && failed.is_none() {
                *failed = Some(poisoned());
            }
        }
    }

    /// Frames a voice's utterances share.
    fn shared_frames(&self, prompt: &FlowPrompt) -> usize {
        let flow = &self.config.flow;
        let known = prompt.tokens.len().saturating_sub(flow.lookahead) * self.config.token_mel_ratio;
        known / flow.block * flow.block
    }

    /// Solves the shared blocks of `voice`.
    fn solve_prefix(&mut self, handle: VoiceHandle) -> Result<(), SynthError> {
        let Some(voice) = self.voices.get(&handle).filter(|v| v.prefix.is_none()) else { return Ok(()) };
        let prompt = voice.prompt.clone();
        self.catch_up()?;
        let frames = self.shared_frames(&prompt);
        let hist = self.device.zeros("a voice", self.flow.hist_bytes)?;
        let tokens = prompt.tokens.clone();
        let mut stream =
            Stream::new(tokens, &[], &self.config.flow, self.config.token_mel_ratio, self.options.final_chunk);
        while stream.done < frames {
            let job = Job { voice: handle, hist: hist.ptr, stream: &mut stream };
            if let Some(e) = self.advance_now(job, frames)? {
                if matches!(e, SynthError::Utterance(_)) {
                    stream.own().try_for_each(|slab| self.slabs.scrub(slab))?;
                }
                stream.free(&mut self.slabs);
                return Err(e);
            }
        }
        if let Some(voice) = self.voices.get_mut(&handle) {
            voice.prefix = Some(Prefix { slabs: stream.into_slabs(), hist });
        }
        Ok(())
    }

    /// Addresses of an utterance's slabs.
    fn addresses(&self, slabs: &[Slab]) -> Vec<u64> {
        slabs.iter().map(|&s| self.slabs.address(s)).collect()
    }

    /// Mel frames `from..to` (prompt included in the count) of a stream, `[frames, mel]`.
    fn read_mel(&self, slabs: &[Slab], from: usize, to: usize) -> Result<Vec<f32>, SynthError> {
        let (block, mel) = (self.config.flow.block, self.config.flow.mel);
        let mut out = vec![0f32; to.saturating_sub(from) * mel];
        for (frame, row) in (from..to).zip(out.chunks_exact_mut(mel)) {
            let Some(&slab) = slabs.get(frame / block) else { break };
            let at = self.slabs.address(slab) + (self.flow.x_offset + frame % block * mel * 4) as u64;
            self.device.read(at, row)?;
        }
        Ok(out)
    }

    /// A mel of its own as the vocoder finds slabs: addresses such that its frames lie where a slab's would.
    fn pages_of(&self, mel: &device::Buf, frames: usize) -> Vec<u64> {
        let block = self.config.flow.block;
        let bytes = block * self.config.flow.mel * 4;
        (0..frames.div_ceil(block))
            .map(|n| (mel.ptr + (n * bytes) as u64).wrapping_sub(self.flow.x_offset as u64))
            .collect()
    }

    /// The mel of a slot that is played at another speed, once all of it is there.
    fn stretch(&mut self, slot: Slot) -> Result<(), SynthError> {
        let Some(state) = self.slots.get(&slot) else { return Ok(()) };
        let Some(voice) = self.voices.get(&state.voice) else { return Ok(()) };
        let mel = self.read_mel(&state.stream.slabs, voice.frames, state.stream.done)?;
        let mel = cpu::respeed(&mel, self.config.flow.mel, state.request.speed)
            .map_err(|e| SynthError::Utterance(e.to_string()))?;
        let frames = mel.len() / self.config.flow.mel;
        // A pass may read to the end of the last block.
        let mut padded = mel;
        padded.resize(frames.next_multiple_of(self.config.flow.block) * self.config.flow.mel, 0.0);
        let buf = self.device.upload("a mel", &padded)?;
        if let Some(state) = self.slots.get_mut(&slot) {
            state.stretched = Some((buf, frames));
        }
        Ok(())
    }
}

/// Slots for `free` bytes of device memory.
fn slots_for(free: u64) -> u32 {
    (free / SLOT_BYTES).clamp(*SLOTS.start(), *SLOTS.end()) as u32
}

/// Speech ids that an utterance may have at most: what it asked for, or what there is room for behind a prefix of `prefix`
/// of `positions` positions, and behind `prompt` of the `flow` tokens that the flow has blocks for.
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

/// One stream that is to be advanced.
struct Job<'a> {
    voice: VoiceHandle,
    hist: u64,
    stream: &'a mut Stream,
}

fn not_open() -> SynthError {
    SynthError::Utterance("the slot is not open".into())
}

fn poisoned() -> SynthError {
    SynthError::Utterance("a mel value is not a number".into())
}

impl Backend for GpuBackend {
    fn caps(&self) -> &BackendCaps {
        &self.caps
    }

    fn hold_back(&self) -> u32 {
        self.hift.hold_back() as u32
    }

    fn add_voice(&mut self, prompt: Arc<FlowPrompt>) -> Result<VoiceHandle, SynthError> {
        let voice = self.make_voice(&prompt)?;
        let handle = VoiceHandle(self.next_voice);
        self.next_voice += 1;
        self.voices.insert(handle, voice);
        Ok(handle)
    }

    fn prepare_voice(&mut self, voice: VoiceHandle) -> Result<(), SynthError> {
        self.solve_prefix(voice)
    }

    fn release_voice(&mut self, voice: VoiceHandle) {
        self.drop_hold(voice);
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
        let hist = self.hist_of(slot.0 as usize);
        let entry = self.voices.get_mut(&voice).ok_or_else(|| SynthError::Input("the voice was removed".into()))?;
        let shared = entry.prefix.as_ref().map_or(&[][..], |p| &p.slabs);
        let tokens = entry.prompt.tokens.clone();
        let (positions, blocks) = (self.caps.positions as usize, self.flow.limit() / self.config.token_mel_ratio);
        let sampling = &mut request.sampling;
        sampling.max_len = longest(sampling.max_len, request.prefix.len(), positions, tokens.len(), blocks)?;
        sampling.min_len = sampling.min_len.min(sampling.max_len);
        let stream =
            Stream::new(tokens, shared, &self.config.flow, self.config.token_mel_ratio, self.options.final_chunk);
        match &entry.prefix {
            Some(prefix) => self.device.copy(hist, prefix.hist.ptr, self.flow.hist_bytes)?,
            None => self.device.fill_zero(hist, self.flow.hist_bytes)?,
        }
        self.hift.open(slot.0 as usize)?;
        entry.holds += 1;
        let state = SlotState {
            voice,
            request,
            prefilled: false,
            emitted: 0,
            ended: None,
            stream,
            stretched: None,
            poisoned: false,
        };
        self.slots.insert(slot, state);
        Ok(())
    }

    fn prefill(&mut self, slots: &[Slot], out: &mut Vec<Prefilled>) -> Result<(), SynthError> {
        let mut rows = Vec::with_capacity(slots.len());
        for slot in slots {
            if let Some(state) = self.slots.get(slot).filter(|s| !s.prefilled && !s.request.prefix.is_empty()) {
                rows.push((slot.0 as usize, &state.request.prefix[..], &state.request.sampling));
            }
        }
        self.llm.prefill(&rows)?;
        for &slot in slots {
            let state = self.slots.get_mut(&slot);
            let failed = if state.is_none() { Some(not_open()) } else { None };
            if let Some(state) = state {
                state.prefilled = true;
            }
            out.push(Prefilled { slot, failed });
        }
        Ok(())
    }

    fn decode(&mut self, slots: &[Slot], rounds: u32, out: &mut Vec<Decoded>) -> Result<(), SynthError> {
        let first = out.len();
        let mut rows = Vec::with_capacity(slots.len());
        for (n, &slot) in slots.iter().enumerate() {
            let state = self.slots.get(&slot);
            let failed = match state {
                Some(state) if !state.prefilled => Some(SynthError::Utterance("decoded before its prefill".into())),
                Some(_) => None,
                None => Some(not_open()),
            };
            let ended = state.and_then(|s| s.ended);
            if failed.is_none() && ended.is_none() {
                rows.push((n, slot));
            }
            out.push(Decoded { slot, tokens: Vec::new(), ended, failed });
        }
        if rows.is_empty() {
            return Ok(());
        }
        let numbers: Vec<usize> = rows.iter().map(|(_, s)| s.0 as usize).collect();
        let drawn = self.llm.decode(&numbers, rounds as usize)?;
        for ((n, slot), drawn) in rows.into_iter().zip(drawn) {
            let Some(state) = self.slots.get_mut(&slot) else { continue };
            let result = &mut out[first + n];
            state.emitted += drawn.tokens.len() as u32;
            let sampling = &state.request.sampling;
            let forced = sampling.forced.as_ref().map_or(u32::MAX, |f| f.len() as u32);
            if drawn.bad {
                state.poisoned = true;
                result.failed = Some(SynthError::Utterance("the language model's scores are not numbers".into()));
            } else if drawn.eos {
                state.ended = Some(End::Eos);
            } else if state.emitted >= sampling.max_len.min(forced) {
                state.ended = Some(End::Length);
            }
            result.tokens = drawn.tokens;
            result.ended = state.ended;
        }
        Ok(())
    }

    fn flow_push(&mut self, slot: Slot, tokens: &[u32], last: bool) -> Result<(), SynthError> {
        let limit = self.flow.limit();
        let state = self.slots.get_mut(&slot).ok_or_else(not_open)?;
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
        self.run_flow(slots, rounds, out)
    }

    fn flow_rounds(&self, slot: Slot) -> u32 {
        self.slots.get(&slot).map_or(0, |state| state.stream.pending() as u32)
    }

    fn vocode(&mut self, slots: &[Slot], out: &mut Vec<Vocoded>) -> Result<(), SynthError> {
        self.run_vocode(slots, out)
    }

    fn launch_flow(&mut self, slots: &[Slot], rounds: u32) -> Result<bool, SynthError> {
        self.start_flow_behind(slots, rounds)
    }

    fn launch_vocode(&mut self, slots: &[Slot]) -> Result<bool, SynthError> {
        self.start_vocode_behind(slots)
    }

    fn poll(&mut self) -> Result<bool, SynthError> {
        self.flight_has_ended()
    }

    fn complete_flow(&mut self, out: &mut Vec<Flowed>) -> Result<(), SynthError> {
        self.land_flow(out)
    }

    fn complete_vocode(&mut self, out: &mut Vec<Vocoded>) -> Result<(), SynthError> {
        self.land_vocode(out)
    }

    fn close(&mut self, slot: Slot) {
        if let Some(mut state) = self.take_for_closing(slot) {
            if state.poisoned {
                let slabs = state.stream.own().try_for_each(|slab| self.slabs.scrub(slab));
                if let Err(error) = slabs.and_then(|()| self.llm.scrub(slot.0 as usize)) {
                    tracing::error!(%error, slot = slot.0, "a slot could not be cleared");
                }
            }
            state.stream.free(&mut self.slabs);
            self.drop_hold(state.voice);
        }
    }

    fn memory(&self) -> Memory {
        let voices = self.shared_bytes();
        // Nothing left is not the same as no limit.
        Memory {
            total: self.slabs.total().saturating_sub(voices).max(1),
            used: self.slabs.used().saturating_sub(voices),
        }
    }

    fn memory_parts(&self) -> Vec<(&'static str, u64)> {
        self.inventory().into_iter().map(|(part, bytes)| (part.label(), bytes)).collect()
    }

    fn memory_needed(&self, extent: Extent) -> u64 {
        // The prompt's part that is not shared takes a block, and the end of the last block may be empty.
        let blocks = (extent.frames as usize).div_ceil(self.config.flow.block) + 1;
        blocks as u64 * self.slabs.size()
    }

    fn sync(&mut self) -> Result<(), SynthError> {
        self.catch_up()?;
        Ok(self.device.sync()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_follow_memory_and_their_positions_stay_whole() {
        let position = 2 * 24 * 2 * 64 * 2;
        for (gb, slots) in [(7, 26), (15, 55), (23, 85), (31, 115), (78, 256), (139, 256)] {
            let free = gb * 1_000_000_000;
            assert_eq!(slots_for(free), slots, "{gb} GB");
            let affordable = free as usize / 8 / (position * (slots as usize + 1));
            assert!(affordable >= POSITIONS, "{gb} GB: {affordable}");
        }
        assert_eq!(slots_for(0), 8);
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
