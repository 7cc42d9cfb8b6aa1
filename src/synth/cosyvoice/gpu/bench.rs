//! What each stage of the engine costs on this device, against what the device can do.
//!
//! Ceilings and stages are measured in the same run, on random data: zeros would run faster. Work and bytes are
//! counted from the model's sizes.

use std::fmt;
use std::sync::Arc;

use super::device::{GpuError, Launch, Timer, start};
use super::flight::Acoustic;
use super::flow::{self, ChunkRun};
use super::hift::Excerpt;
use super::llm::Llm;
use super::lt::{Operands, Shape};
use super::slots::{Next, Stream};
use super::voices::Voice;
use super::{Device, Elt, hift, llm, units, weights};
use crate::clock;
use crate::synth::cosyvoice::backend::{Embed, FlowPrompt, Hardware, MinLength, Sampling};
use crate::synth::cosyvoice::config::{SOS, TASK};

/// One measured thing.
#[derive(Clone, Debug, PartialEq)]
pub struct Cost {
    /// What: `decode`, `prefill`, `flow step`, `vocode`, `copy`, `gemm`, or calls side by side.
    pub stage: &'static str,
    /// Rows, chunks or utterances together.
    pub width: usize,
    /// Median of the repetitions.
    pub seconds: f64,
    /// Floating-point operations (a multiply-add is two); 0: not counted.
    pub flops: f64,
    /// Bytes that must move at least; 0: not counted.
    pub bytes: f64,
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let per = |n: f64| n / self.seconds;
        write!(
            f,
            "{:<10} {:>4}  {:>9.3} ms  {:>7.1} TFLOP/s  {:>7.1} GB/s",
            self.stage,
            self.width,
            self.seconds * 1e3,
            per(self.flops) / 1e12,
            per(self.bytes) / 1e9
        )
    }
}

/// Repetitions of a ceiling.
const REPEATS: usize = 5;

/// How much is measured.
#[derive(Clone, Debug)]
pub struct Effort {
    /// Frames or positions that are there already.
    pub visible: usize,
    /// Repetitions, of which the median counts.
    pub repeats: usize,
    /// Rounds of one decode or flow call.
    pub rounds: usize,
    /// Widths looked at; those that a stage has.
    pub widths: Vec<usize>,
}

impl Default for Effort {
    fn default() -> Self {
        Self { visible: 350, repeats: 5, rounds: 10, widths: vec![1, 2, 4, 8, 16, 32, 48, 64, 128, 256] }
    }
}

/// What one kernel costs inside a stage.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelCost {
    /// The kernel.
    pub name: &'static str,
    /// Blocks of its grid; 0 for cuBLASLt.
    pub blocks: u64,
    /// Launches.
    pub count: usize,
    /// Seconds of all of them, the gaps between launches and some 4.5 us each for timing it included. Only decoding has
    /// the host ahead of the device from its first launch on.
    pub seconds: f64,
    /// Seconds that the operations or the bytes of all of them take at least, whichever is more; 0: not counted.
    pub floor: f64,
}

impl fmt::Display for KernelCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let each = self.seconds * 1e6 / self.count.max(1) as f64;
        write!(
            f,
            "{:<16} {:>6} blocks {:>5} x {:>8.2} us (floor {:>7.2}) = {:>9.1} us",
            self.name,
            self.blocks,
            self.count,
            each,
            self.floor * 1e6 / self.count.max(1) as f64,
            self.seconds * 1e6
        )
    }
}

/// What keeps the device busy until the host is ahead of it, so that the first launch is not timed with a gap before it.
const HEAD_START: &str = "(head start)";

/// What an H200 was seen to reach (`ceilings`): operations a second on 16 bit tensor cores, bytes a second.
const PEAK: (f64, f64) = (7.0e14, 3.98e12);

fn by_kernel(timed: Vec<Launch>) -> Vec<KernelCost> {
    let mut out: Vec<KernelCost> = Vec::new();
    for Launch { name, blocks, seconds, flops, bytes } in timed {
        if name == HEAD_START {
            continue;
        }
        let floor = (flops / PEAK.0).max(bytes / PEAK.1);
        match out.iter_mut().find(|k| k.name == name && k.blocks == blocks) {
            Some(k) => {
                k.count += 1;
                k.seconds += seconds;
                k.floor += floor;
            }
            None => out.push(KernelCost { name, blocks, count: 1, seconds, floor }),
        }
    }
    out.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    out
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// What device `ordinal` reaches at most: a large copy (bytes read and written) and a large GEMM.
///
/// # Errors
/// The device failed.
pub fn ceilings(ordinal: u32, hardware: &Hardware) -> Result<Vec<Cost>, GpuError> {
    let device = Device::open(ordinal, hardware)?;
    let module = device.compile(&units::SETUP, Elt::Bf16, &[])?;
    let (fill, copy, convert) =
        (module.kernel("random_fill", 0)?, module.kernel("copy_ceiling", 0)?, module.kernel("convert", 0)?);
    let timer = Timer::new(&device)?;
    let count = 1usize << 29;
    let (a, b) = (device.alloc("ceilings", count * 4)?, device.alloc("ceilings", count * 4)?);
    let grid = (count.div_ceil(256) as u32, 1, 1);
    start!(device, fill, grid, 256, 0; a.ptr, count as i64, 7u32, 1f32)?;
    let mut times = Vec::new();
    for _ in 0..REPEATS {
        timer.mark(0)?;
        start!(device, copy, (132 * 8, 1, 1), 512, 0; a.ptr, b.ptr, (count / 4) as i64)?;
        timer.mark(1)?;
        times.push(timer.seconds()?);
    }
    let mut out =
        vec![Cost { stage: "copy", width: 1, seconds: median(times), flops: 0.0, bytes: 2.0 * 4.0 * count as f64 }];
    let mut lt = super::lt::Lt::new(&device, Elt::Bf16)?;
    let n = 8192usize;
    start!(device, convert, ((n * n).div_ceil(256) as u32, 1, 1), 256, 0; a.ptr, b.ptr, (n * n) as i64)?;
    let (x, w) = (b.ptr, b.ptr + (n * n * 2) as u64);
    start!(device, convert, ((n * n).div_ceil(256) as u32, 1, 1), 256, 0; a.ptr + (n * n * 4) as u64, w, (n * n) as i64)?;
    for (m, n, k) in [
        (8192usize, 8192usize, 8192usize),
        (3200, 3072, 1024),
        (3200, 2048, 1024),
        (100, 3072, 1024),
        (100, 1024, 1024),
    ] {
        let shape = Shape { m, n, k, gelu: false, fp8: false };
        let on = Operands::whole(x, w, x, a.ptr);
        lt.prepare(shape, on)?;
        let mut times = Vec::new();
        for _ in 0..REPEATS {
            timer.mark(0)?;
            for _ in 0..8 {
                lt.run(shape, on)?;
            }
            timer.mark(1)?;
            times.push(timer.seconds()? / 8.0);
        }
        let flops = 2.0 * (m * n * k) as f64;
        out.push(Cost {
            stage: "gemm",
            width: m,
            seconds: median(times),
            flops,
            bytes: 2.0 * (m * k + n * k + m * n) as f64,
        });
    }
    Ok(out)
}

fn failed(e: crate::synth::SynthError) -> GpuError {
    GpuError::Model(e.to_string())
}

/// The parts of an engine that costs are measured on.
pub(super) struct Bench<'a> {
    pub(super) device: Arc<Device>,
    pub(super) llm: &'a mut Llm,
    pub(super) acoustic: &'a mut Acoustic,
    /// Slots that callers see.
    pub(super) slots: usize,
}

impl Bench<'_> {
    /// The cost of every stage at several widths. Uses slots `0..` and leaves nothing open; nothing may be open
    /// before.
    ///
    /// # Errors
    /// The device failed or has too little memory.
    pub(super) fn stage_costs(&mut self, effort: &Effort) -> Result<Vec<Cost>, GpuError> {
        let mut out = Vec::new();
        self.llm_costs(effort, &mut out)?;
        self.flow_costs(effort, &mut out)?;
        self.vocoder_costs(effort, &mut out)?;
        self.beside_costs(effort, &mut out)?;
        Ok(out)
    }

    /// Where the time of each stage goes, kernel by kernel, at the effort's first width.
    ///
    /// # Errors
    /// The device failed.
    pub(super) fn kernel_costs(&mut self, effort: &Effort) -> Result<Vec<(&'static str, Vec<KernelCost>)>, GpuError> {
        let device = self.device.clone();
        let once = Effort { repeats: 1, rounds: 1, ..effort.clone() };
        let mut all = Vec::new();
        let mut out = Vec::new();
        // Once before: what is measured is not the first of its kind.
        self.stage_costs(&once)?;
        let width = effort.widths.iter().copied().max().unwrap_or(1).min(self.slots);
        let slots: Vec<usize> = (0..width).collect();
        let visible = effort.visible;
        self.prefill_first(width, visible)?;
        let scratch = device.alloc("ceilings", 2 << 30)?;
        let decode = by_kernel(device.timed(|| {
            device.fill_zero(scratch.ptr, scratch.bytes)?;
            device.note(HEAD_START, 0)?;
            self.llm.decode(&slots, 1, || ()).map(drop)
        })?);
        drop(scratch);
        all.push(("decode", self.with_floors(decode, width, visible * width)));
        let (prefix, sampling) = self.speech(visible);
        let rows: Vec<(usize, &[Embed], &Sampling)> = slots.iter().map(|&s| (s, &prefix[..], &sampling)).collect();
        let prefill = by_kernel(device.timed(|| self.llm.prefill(&rows))?);
        // Prefixes are cut into passes, so that floors are right where one is enough.
        let rows = (visible - 1) * width;
        all.push(("prefill", self.with_floors(prefill, rows, rows * visible / 2)));
        let mut flow = by_kernel(device.timed(|| self.flow_costs(&once, &mut out))?);
        // What attention reads, only this knows: earlier keys and values, then the chunk's own row by row.
        let (block, inner) = (self.acoustic.solver.config.flow.block, self.acoustic.solver.config.flow.inner());
        let frames = 2 * (effort.visible / block * block) + 6 * block;
        let bytes = effort.widths.first().map_or(0, |w| w * 2 * frames * inner * 2);
        for k in flow.iter_mut().filter(|k| k.name.starts_with("flow_attend")) {
            k.floor = k.count as f64 * bytes as f64 / PEAK.1;
        }
        all.push(("flow", flow));
        all.push(("vocoder", by_kernel(device.timed(|| self.vocoder_costs(&once, &mut out))?)));
        Ok(all)
    }

    /// A prefix of `visible` positions and what follows it.
    fn speech(&self, visible: usize) -> (Vec<Embed>, Sampling) {
        let c = &self.acoustic.solver.config.llm;
        let sampling = Sampling {
            key: [1, 2],
            min_len: 0,
            max_len: u32::MAX,
            min_length: MinLength::Intended,
            // Work is the same whatever is sampled.
            forced: Some(Arc::from((0..600).map(|i| i % c.speech_tokens as u32).collect::<Vec<_>>())),
        };
        let mut prefix = vec![Embed::Speech(c.control(SOS))];
        prefix.extend((0..visible.saturating_sub(2)).map(|i| Embed::Text(i as u32 % c.vocab as u32)));
        prefix.push(Embed::Speech(c.control(TASK)));
        (prefix, sampling)
    }

    /// Puts a prefix of `visible` positions into each of the first `slots` slots.
    fn prefill_first(&mut self, slots: usize, visible: usize) -> Result<(), GpuError> {
        let (prefix, sampling) = self.speech(visible);
        let rows: Vec<(usize, &[Embed], &Sampling)> = (0..slots).map(|s| (s, &prefix[..], &sampling)).collect();
        rows.chunks(32).try_for_each(|rows| self.llm.prefill(rows))
    }

    /// The language model's kernels with what each launch must at least take: every byte once at the speed of a large
    /// copy, or its arithmetic at that of a large GEMM. `seen`: cached positions that all rows together attend to.
    fn with_floors(&self, mut kernels: Vec<KernelCost>, rows: usize, seen: usize) -> Vec<KernelCost> {
        let c = &self.acoustic.solver.config.llm;
        let (hidden, inner) = (c.hidden, c.intermediate);
        let (queries, keys) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let gemm = |n: usize, k: usize, out: usize| {
            let bytes = 2 * n * k + rows * (2 * k + out);
            (bytes as f64 / PEAK.1).max(2.0 * (rows * n * k) as f64 / PEAK.0)
        };
        for kernel in &mut kernels {
            let each = match kernel.name {
                "qkv" => gemm(queries + 2 * keys, hidden, 4 * (queries + 2 * keys)),
                "out" => gemm(hidden, queries, 10 * hidden),
                "gate-up" => gemm(2 * inner, hidden, 2 * inner),
                "down" => gemm(hidden, inner, 10 * hidden),
                "head" => gemm(c.speech_rows(), hidden, 4 * c.speech_rows()),
                name if name.starts_with("llm_attend") => {
                    let bytes = 4 * seen * keys + rows * (4 * (queries + 2 * keys) + 2 * queries);
                    (bytes as f64 / PEAK.1).max(4.0 * (seen * queries) as f64 / PEAK.0)
                }
                "llm_sample" => (4 * rows * c.speech_rows()) as f64 / PEAK.1,
                "llm_embed" => (8 * rows * hidden) as f64 / PEAK.1,
                _ => 0.0,
            };
            kernel.floor = each * kernel.count as f64;
        }
        kernels
    }

    fn llm_costs(&mut self, effort: &Effort, out: &mut Vec<Cost>) -> Result<(), GpuError> {
        let visible = effort.visible;
        let c = self.acoustic.solver.config.llm.clone();
        let active = c.layers
            * (c.hidden * (2 * c.heads + 2 * c.kv_heads) * c.head_dim + 3 * c.hidden * c.intermediate)
            + c.hidden * c.speech_rows();
        let size = 2.0;
        let kv = (2 * c.layers * c.kv_heads * c.head_dim) as f64 * size * visible as f64;
        let (prefix, sampling) = self.speech(visible);
        let slots = self.slots;
        for count in [1usize, 8, 32].into_iter().filter(|n| *n <= slots && effort.widths.contains(n)) {
            let rows: Vec<(usize, &[Embed], &Sampling)> = (0..count).map(|s| (s, &prefix[..], &sampling)).collect();
            let mut times = Vec::new();
            for _ in 0..effort.repeats {
                let from = clock::now();
                self.llm.prefill(&rows)?;
                times.push(from.elapsed().as_secs_f64());
            }
            let flops = 2.0 * (active - c.hidden * c.speech_rows()) as f64 * (count * visible) as f64;
            out.push(Cost {
                stage: "prefill",
                width: count,
                seconds: median(times),
                flops,
                bytes: active as f64 * size,
            });
        }
        for width in llm::WIDTHS.into_iter().filter(|w| *w <= slots && effort.widths.contains(w)) {
            // Rounds of the width before have made its sequences longer.
            self.prefill_first(width, visible)?;
            let rows: Vec<usize> = (0..width).collect();
            let mut times = Vec::new();
            for _ in 0..effort.repeats {
                let from = clock::now();
                self.llm.decode(&rows, effort.rounds, || ())?;
                times.push(from.elapsed().as_secs_f64() / effort.rounds as f64);
            }
            let flops = 2.0 * active as f64 * width as f64;
            out.push(Cost {
                stage: "decode",
                width,
                seconds: median(times),
                flops,
                bytes: active as f64 * size + kv * width as f64,
            });
        }
        Ok(())
    }

    /// A voice whose prompt is `before` whole blocks, and one more of tokens that follow.
    fn prompt(&self, before: usize) -> FlowPrompt {
        let f = &self.acoustic.solver.config.flow;
        FlowPrompt {
            tokens: (0..(before + 1) * self.acoustic.solver.config.block_tokens())
                .map(|i| i as u32 % f.vocab as u32)
                .collect(),
            mel: vec![0.1; before * f.block * f.mel],
            speaker: vec![0.5; f.speaker],
        }
    }

    /// `width` streams that come after `before` blocks of their own, so that nothing is read from a cache that would
    /// not be; `None`: there is not so much memory.
    fn streams(&mut self, prompt: &FlowPrompt, before: usize, width: usize) -> Option<Vec<(u64, Stream)>> {
        let mut held = Vec::new();
        for n in 0..width {
            let mut stream = self.acoustic.solver.stream(&prompt.tokens, &[]);
            let room = stream.take_blocks(before + 1, &mut self.acoustic.solver.slabs);
            held.push((self.acoustic.solver.hist_of(n % self.slots), stream));
            if room.is_err() {
                held.iter_mut().for_each(|(_, s)| s.free(&mut self.acoustic.solver.slabs));
                return None;
            }
        }
        Some(held)
    }

    /// The first `steps` Euler steps of the next block of each.
    fn steps(&self, voice: &Voice, held: &[(u64, Stream)], before: usize, steps: usize) -> Vec<Vec<ChunkRun>> {
        let block = self.acoustic.solver.config.flow.block;
        let of = |step: usize| {
            let next = Next { step, start: before * block, frames: block, whole: None };
            let chunk = |(n, (hist, stream)): (usize, &(u64, Stream))| ChunkRun {
                args: self.acoustic.solver.chunk(voice, *hist, &next, &stream.places, (before + 1) * block, n),
                tokens: self.acoustic.solver.tokens_for(&stream.tokens, &next, next.start),
            };
            held.iter().enumerate().map(chunk).collect()
        };
        (0..steps).map(of).collect()
    }

    fn flow_costs(&mut self, effort: &Effort, out: &mut Vec<Cost>) -> Result<(), GpuError> {
        let f = self.acoustic.solver.config.flow.clone();
        let (visible, steps) = (effort.visible, effort.rounds.min(f.steps));
        let block = f.block;
        let before = visible / block;
        let prompt = self.prompt(before);
        let voice = self.acoustic.solver.make_voice(&Arc::new(prompt.clone())).map_err(failed)?;
        let inner = f.inner();
        let linear = f.depth * (f.dim * 3 * inner + inner * f.dim + 2 * f.dim * f.ff()) + f.dim * (f.dit_in() + f.mel);
        let position = 2 * f.dim * f.dim / 16 * 31;
        for width in flow::WIDTHS.into_iter().filter(|w| effort.widths.contains(w)) {
            let Some(mut held) = self.streams(&prompt, before, width) else { break };
            let mut times = Vec::new();
            for repeat in 0..=effort.repeats {
                let rounds = self.steps(&voice, &held, before, steps);
                let from = clock::now();
                self.acoustic.solver.flow.run(&rounds)?;
                if repeat > 0 {
                    times.push(from.elapsed().as_secs_f64() / steps as f64);
                }
            }
            held.iter_mut().for_each(|(_, s)| s.free(&mut self.acoustic.solver.slabs));
            // One row of a chunk's first step is not run.
            let rows = ((2 * steps - 1) * block * width) as f64 / steps as f64;
            let seen = ((before + 1) * block) as f64;
            let flops = rows * (2.0 * (linear + position) as f64 + 4.0 * seen * (f.depth * inner) as f64);
            let kv = 2.0 * 2.0 * (f.depth * inner) as f64 * 2.0 * width as f64 * seen;
            out.push(Cost {
                stage: "flow step",
                width,
                seconds: median(times),
                flops,
                bytes: 2.0 * linear as f64 + kv,
            });
        }
        Ok(())
    }

    /// What narrow calls take beside Euler steps of several widths that were begun before them, and both together: by
    /// the number of chunks. Slot 0 is used.
    fn beside_costs(&mut self, effort: &Effort, out: &mut Vec<Cost>) -> Result<(), GpuError> {
        let before = effort.visible / self.acoustic.solver.config.flow.block;
        let prompt = self.prompt(before);
        let voice = self.acoustic.solver.make_voice(&Arc::new(prompt.clone())).map_err(failed)?;
        self.prefill_first(1, effort.visible)?;
        let device = self.device.clone();
        for width in flow::WIDTHS.into_iter().filter(|w| effort.widths.contains(w)) {
            let Some(mut held) = self.streams(&prompt, before, width) else { break };
            let names = ["flow x4", "decode x13", "decode beside", "flow and decode"];
            let mut times: [Vec<f64>; 4] = Default::default();
            for _ in 0..effort.repeats {
                let pair = |this: &mut Self, flow: bool, decode: bool| -> Result<(f64, f64), GpuError> {
                    let rounds = this.steps(&voice, &held, before, 4);
                    let from = clock::now();
                    if flow {
                        device.context.low_priority(|| this.acoustic.solver.flow.start(&rounds))?;
                    }
                    if decode {
                        this.llm.decode(&[0], 13, || ())?;
                    }
                    let front = from.elapsed().as_secs_f64();
                    device.context.wait_all()?;
                    Ok((front, from.elapsed().as_secs_f64()))
                };
                times[0].push(pair(self, true, false)?.1);
                times[1].push(pair(self, false, true)?.0);
                let (beside, both) = pair(self, true, true)?;
                times[2].push(beside);
                times[3].push(both);
            }
            held.iter_mut().for_each(|(_, s)| s.free(&mut self.acoustic.solver.slabs));
            for (stage, times) in names.into_iter().zip(times) {
                out.push(Cost { stage, width, seconds: median(times), flops: 0.0, bytes: 0.0 });
            }
        }
        Ok(())
    }

    fn vocoder_costs(&mut self, effort: &Effort, out: &mut Vec<Cost>) -> Result<(), GpuError> {
        let (block, mel) = (self.acoustic.solver.config.flow.block, self.acoustic.solver.config.flow.mel);
        let frames = 4 * block;
        let values: Vec<f32> = (0..frames * mel).map(|i| ((i * 7919) % 1000) as f32 * 0.002 - 1.0).collect();
        let buf = self.device.upload("a mel", &values)?;
        let slabs = self.acoustic.solver.pages_of(&buf, frames);
        let most = hift::WIDTH.min(self.slots);
        for width in effort.widths.iter().copied().filter(|&w| w <= most) {
            for count in [12usize, block] {
                let mut times = Vec::new();
                for _ in 0..effort.repeats {
                    for slot in 0..width {
                        self.acoustic.hift.open(slot)?;
                    }
                    let at = |total: usize| -> Vec<Excerpt<'_>> {
                        (0..width).map(|slot| Excerpt { slot, frame0: 0, total, last: false, slabs: &slabs }).collect()
                    };
                    // A first piece, so that histories and the steady length are those of a running stream.
                    self.acoustic.hift.run(&at(block))?;
                    self.device.sync()?;
                    let from = clock::now();
                    self.acoustic.hift.run(&at(block + count))?;
                    times.push(from.elapsed().as_secs_f64());
                }
                let flops = 0.674e9 * (count * width) as f64;
                let stage = if count == block { "vocode" } else { "vocode 12" };
                out.push(Cost { stage, width, seconds: median(times), flops, bytes: 0.0 });
            }
        }
        Ok(())
    }
}

/// Weights of the right sizes for measuring.
pub fn random_source(seed: u64) -> weights::Random {
    weights::Random { seed }
}
