//! The flow on the device: ragged chunks of many utterances, each at its own Euler step, in one graph per width.
//!
//! Owns weights, folded modulation, scratch and graphs. Whose chunk is run, and where its state lies, comes with
//! every call as [`ChunkArgs`]; what an utterance keeps is the caller's ([`super::slots`]).
//!
//! [`load`] makes the model, [`linear`] chooses how its GEMMs run, [`fp8`] has those of 8 bits, [`attend`] how it attends,
//! [`position`] has the convolutions before the first block, [`unguided`] the rows that are known beforehand.

mod attend;
mod fp8;
mod linear;
pub(super) mod load;
mod position;
mod unguided;

use std::collections::BTreeMap;
use std::sync::Arc;

use self::attend::{Attention, Launch};
use self::linear::{Kind, Linear, Linears};
use self::position::{NARROW_TILE, Positions};
use self::unguided::Unguided;
use super::device::{Buf, Device, Elt, GpuError, Graph, Kernel, Staging, start};
use super::gemm::{Conv, Tile};
use super::mirror::mirrored;
use super::weights::{Packed, padded};
use crate::synth::cosyvoice::config::{CONV_POS_KERNEL, DEFAULT_LEAKY_SLOPE, FlowConfig, LAYER_NORM_EPS};

/// Widths in chunks that a graph is recorded for. Of 28, 42 and 63 the GEMMs' blocks fill the 132 multiprocessors of an H100 and
/// H200 evenly: 64 take 8 % longer than 63.
pub(super) const WIDTHS: [usize; 17] = [1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 36, 42, 48, 56, 63];
/// Most chunks of one step, by two rows each.
pub(super) const WIDTH: usize = WIDTHS[WIDTHS.len() - 1];
/// Most utterances of one step: their chunks are at all ten Euler steps, and at the first a row less is run of each.
pub(super) const STREAMS: usize = WIDTH * 20 / 19;
/// Chunks of a round up to which blocks of one utterance run side by side: a wider round costs in proportion.
pub(super) const PAYS: usize = 28;
/// Blocks that one utterance may have, prompt included.
pub(super) const PAGES: usize = 64;
/// Chunks that there is room for in one step: a full solve has every block of an utterance in one.
const ROOM: usize = if PAGES > STREAMS { PAGES } else { STREAMS };
/// Kernel of the second pre-lookahead convolution, which looks back.
const BACK: usize = 3;
/// Positions of a block of each pre-lookahead kernel, and outputs of the second; as in flow.cu.
const HIDDEN_ROWS: usize = 9;
const HIDDEN_PARTS: usize = 4;
const START_ROWS: usize = 5;
const START_OUTPUTS: usize = 8;
/// Dynamic shared memory that a kernel may take.
const MOST_SHARED: u32 = 200 << 10;

/// `Chunk` of flow.cu: one row of a chunk.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct ChunkArgs {
    pub(super) hist: u64,
    pub(super) cond: u64,
    pub(super) speaker: u64,
    pub(super) own: u64,
    pub(super) unguided: u64,
    pub(super) step: i32,
    pub(super) frame0: i32,
    pub(super) frames: i32,
    pub(super) keys: i32,
    pub(super) key0: i32,
    pub(super) cond_frames: i32,
    /// One of [`GUIDED`], [`UNGUIDED`] and [`NOBODY`].
    pub(super) row: i32,
    pub(super) flag: i32,
    pub(super) page: [u64; PAGES],
}

mirrored!(ChunkArgs as "Chunk" {
    hist, cond, speaker, own, unguided, step, frame0, frames, keys, key0, cond_frames, row, flag, page,
});

pub(super) const GUIDED: i32 = 0;
const UNGUIDED: i32 = 1;
const NOBODY: i32 = -1;

/// A chunk of one round, by its guided row. `tokens`: given at its first step, see [`Flow::window`].
pub(super) struct ChunkRun {
    pub(super) args: ChunkArgs,
    pub(super) tokens: Option<Vec<i32>>,
}

struct Block {
    qkv: Linear,
    out: Linear,
    up: Linear,
    down: Linear,
}

struct Kernels {
    hidden: Kernel,
    start: Kernel,
    input: Kernel,
    norm: Kernel,
    norm_shares: Kernel,
    /// Where GEMMs take 8 bits.
    norm_fp8: Option<Kernel>,
    euler: Kernel,
    attention: Attention,
    append: Kernel,
    neighbours: Kernel,
    keep: Kernel,
}

/// Weights of the transformer and what is folded beforehand.
struct Weights {
    input: Packed,
    blocks: Vec<Block>,
    out: Packed,
    modulation: Buf,
    deltas: Buf,
    rope: Buf,
}

/// What makes conditioning and noise of tokens.
struct Front {
    noise: Buf,
    noise_frames: usize,
    table: Buf,
    /// Weight and bias of the convolution that looks ahead, and of the one that looks back.
    ahead: [Buf; 2],
    back: [Buf; 2],
    /// Weight and bias of the speaker's projection.
    speaker: (Vec<f32>, Vec<f32>),
}

impl Front {
    /// Frames that the noise table covers, of as many blocks as an utterance may have.
    fn limit(&self, f: &FlowConfig) -> usize {
        self.noise_frames.min(PAGES * f.block)
    }
}

/// What steps are told and what they find out.
struct Staged {
    /// Rows of a call's steps, one step after another; the device has those of the step that is next.
    chunks: Staging,
    tokens: Staging,
    bad: Staging,
    spare_hist: Buf,
}

struct Scratch {
    input: Buf,
    hist: Buf,
    tiles: Buf,
    /// As [`NARROW_TILE`] needs them.
    narrow_tiles: Buf,
    h0: Buf,
    h0e: Buf,
    c1: Buf,
    h: Buf,
    a: Buf,
    qkv: Buf,
    heard: Buf,
    ff: Buf,
    v: Buf,
    hidden: Buf,
}

/// The model.
pub(super) struct Flow {
    device: Arc<Device>,
    config: FlowConfig,
    ratio: usize,
    linears: Linears,
    kernels: Kernels,
    positions: Positions,
    weights: Weights,
    front: Front,
    scratch: Scratch,
    staged: Staged,
    unguided: Unguided,
    graphs: BTreeMap<usize, Graph>,
    pub(super) slab_bytes: usize,
    pub(super) x_offset: usize,
    pub(super) hist_bytes: usize,
}

impl Flow {
    /// Frames that the noise table covers.
    pub(super) fn limit(&self) -> usize {
        self.front.limit(&self.config)
    }

    /// Bytes of a block's keys and values at one Euler step.
    pub(super) fn step_bytes(&self) -> usize {
        self.x_offset / self.config.steps
    }

    /// Bytes of a block's x and mu.
    pub(super) fn part_bytes(&self) -> usize {
        2 * self.config.block * self.config.mel * 4
    }

    /// L2 normalisation and projection of a raw speaker vector.
    pub(super) fn project(&self, speaker: &[f32]) -> Vec<f32> {
        let norm = speaker.iter().map(|v| v * v).sum::<f32>().sqrt().max(1e-12);
        let (w, b) = &self.front.speaker;
        let row = |(w, b): (&[f32], &f32)| w.iter().zip(speaker).map(|(w, s)| w * (s / norm)).sum::<f32>() + b;
        w.chunks_exact(speaker.len().max(1)).zip(b).map(row).collect()
    }

    /// A chunk's tokens with their context, as the kernels take them: two before, a block, the look-ahead.
    pub(super) fn window(&self, tokens: &[u32], from: usize) -> Vec<i32> {
        let per = self.config.block / self.ratio;
        let back = BACK - 1;
        (0..per + back + self.config.lookahead)
            .map(|i| (from + i).checked_sub(back).and_then(|t| tokens.get(t)).map_or(-1, |&t| t as i32))
            .collect()
    }

    /// What stands in a row that nobody uses.
    fn idle(&self) -> ChunkArgs {
        ChunkArgs {
            hist: self.staged.spare_hist.ptr,
            cond: 0,
            speaker: 0,
            own: 0,
            unguided: 0,
            step: 0,
            frame0: 0,
            frames: 0,
            keys: 0,
            key0: 0,
            cond_frames: 0,
            row: NOBODY,
            flag: 0,
            page: [0; PAGES],
        }
    }

    /// Runs `rounds`, each one Euler step of its chunks; chunks of a later round may depend on earlier ones.
    /// Returns, by flag, which chunks are no longer finite. `rounds` and each round's width are within bounds.
    pub(super) fn run(&mut self, rounds: &[Vec<ChunkRun>]) -> Result<Vec<bool>, GpuError> {
        self.start(rounds)?;
        self.device.sync()?;
        Ok(self.flags())
    }

    /// Starts `rounds` as [`Self::run`] does. Nothing else may be started here before they have ended and
    /// [`Self::flags`] were read.
    pub(super) fn start(&mut self, rounds: &[Vec<ChunkRun>]) -> Result<(), GpuError> {
        self.device.fill_zero(self.staged.bad.dev.ptr, ROOM * 4)?;
        let mut used = 0usize;
        for (n, round) in rounds.iter().enumerate() {
            let starters: Vec<&ChunkRun> = round.iter().filter(|r| r.tokens.is_some()).collect();
            if !starters.is_empty() {
                used = self.begin(&starters, used)?;
            }
            let rows = self.rows(round, false)?;
            self.solve(n, &rows)?;
        }
        self.staged.bad.fetch(ROOM * 4)
    }

    /// Starts one Euler step of `rows`, told as the `n`th of a call.
    fn solve(&mut self, n: usize, rows: &[ChunkArgs]) -> Result<(), GpuError> {
        let chunks = rows.len().div_ceil(2);
        let Some(width) = WIDTHS.into_iter().find(|&w| w >= chunks) else {
            return Err(GpuError::Model(format!("{chunks} chunks are more than a step takes")));
        };
        self.tell(n, rows, width)?;
        match self.graphs.get(&width).filter(|_| !self.device.traced()) {
            Some(graph) => graph.launch(),
            None => self.step(width, false),
        }
    }

    /// Puts `rows` where the kernels of a step of `width` chunks find them.
    fn tell(&mut self, n: usize, rows: &[ChunkArgs], width: usize) -> Result<(), GpuError> {
        let (idle, size, first) = (self.idle(), size_of::<ChunkArgs>(), n * 2 * ROOM);
        let staging = &mut self.staged.chunks;
        for (i, row) in staging.as_mut::<ChunkArgs>()[first..][..2 * width].iter_mut().enumerate() {
            *row = rows.get(i).copied().unwrap_or(idle);
        }
        staging.send_from(first * size, 2 * width * size)
    }

    /// The rows of `round`: two of each chunk, or one where the other is known; `whole`: as [`Self::step`] has it.
    fn rows(&self, round: &[ChunkRun], whole: bool) -> Result<Vec<ChunkArgs>, GpuError> {
        let mut rows = Vec::with_capacity(2 * round.len());
        for ChunkRun { args, .. } in round {
            let known = self.unguided.result(args).filter(|_| !whole);
            if let Some(unguided) = known {
                rows.push(ChunkArgs { unguided, ..*args });
                continue;
            }
            let unguided = self.scratch.v.ptr + ((rows.len() + 1) * result_bytes(&self.config)) as u64;
            rows.push(ChunkArgs { unguided, ..*args });
            rows.push(match !whole && args.step == 0 {
                true => self.unguided.continued(args)?,
                false => ChunkArgs { row: UNGUIDED, ..*args },
            });
        }
        Ok(rows)
    }

    /// How many rows of a chunk are run.
    pub(super) fn rows_of(&self, args: &ChunkArgs) -> usize {
        if self.unguided.result(args).is_some() { 1 } else { 2 }
    }

    /// The first frame that those of a block from `start` on may see.
    pub(super) fn first_key(&self, start: usize) -> usize {
        let block = self.config.block;
        self.config.left_blocks.map_or(0, |n| (start / block).saturating_sub(n) * block)
    }

    /// Which chunks of the rounds that have ended are no longer finite, by flag.
    pub(super) fn flags(&mut self) -> Vec<bool> {
        self.staged.bad.as_mut::<i32>().iter().map(|&b| b != 0).collect()
    }

    /// One Euler step of a whole utterance whose blocks see each other fully; `blocks` in order. They are given
    /// tokens at the first step. Returns whether a value is no longer finite.
    pub(super) fn run_whole(&mut self, blocks: &[ChunkRun]) -> Result<bool, GpuError> {
        self.device.fill_zero(self.staged.bad.dev.ptr, ROOM * 4)?;
        let starters: Vec<&ChunkRun> = blocks.iter().filter(|r| r.tokens.is_some()).collect();
        if !starters.is_empty() {
            self.begin(&starters, 0)?;
        }
        let rows = self.rows(blocks, true)?;
        self.tell(0, &rows, blocks.len())?;
        self.prepare(blocks.len())?;
        self.step(blocks.len(), true)?;
        self.staged.bad.fetch(ROOM * 4)?;
        self.device.sync()?;
        Ok(self.flags().contains(&true))
    }

    /// Conditioning and noise of chunks at their first step; `used`: words of the staging memory already taken in this
    /// call. A send of those may be in flight: only words after them are written ([`Staging::as_mut`]).
    fn begin(&mut self, starters: &[&ChunkRun], used: usize) -> Result<usize, GpuError> {
        let f = &self.config;
        let (per, back) = (f.block / self.ratio, BACK - 1);
        let per_row = per + back + f.lookahead;
        let words = size_of::<ChunkArgs>() / 4;
        // Arguments first: they hold addresses and need their alignment.
        let args_at = used.next_multiple_of(2);
        let tokens_at = args_at + starters.len() * words;
        let end = tokens_at + starters.len() * per_row;
        let staging = self.staged.tokens.as_mut::<i32>();
        for (i, s) in starters.iter().enumerate() {
            // SAFETY: `ChunkArgs` is plain data without padding, a whole number of words.
            let bits = unsafe { std::slice::from_raw_parts(std::ptr::from_ref(&s.args).cast::<i32>(), words) };
            staging[args_at + i * words..][..words].copy_from_slice(bits);
            if let Some(tokens) = &s.tokens {
                staging[tokens_at + i * per_row..][..per_row].copy_from_slice(tokens);
            }
        }
        // The whole prefix is sent again: earlier parts are unchanged, so that kernels which still read them read the
        // same values before, during and after.
        self.staged.tokens.send(end * 4)?;
        let (args, tokens) =
            (self.staged.tokens.dev.ptr + 4 * args_at as u64, self.staged.tokens.dev.ptr + 4 * tokens_at as u64);
        let (ins, ch, ratio) = (f.input as i32, f.lookahead_channels as i32, self.ratio as i32);
        let rows = starters.len() as u32;
        let sums = (HIDDEN_PARTS - 1) * HIDDEN_ROWS * 256;
        let shared = ((sums + (HIDDEN_ROWS + f.lookahead) * f.input) * 4) as u32;
        let grid = ((per + back).div_ceil(HIDDEN_ROWS) as u32, rows, f.lookahead_channels.div_ceil(256) as u32);
        let slope = DEFAULT_LEAKY_SLOPE as f32;
        start!(self.device, self.kernels.hidden, grid, 64 * HIDDEN_PARTS as u32, shared;
            args, tokens, per_row as i32, (per + back) as i32, self.front.table.ptr, self.front.ahead[0].ptr, self.front.ahead[1].ptr, self.scratch.hidden.ptr,
            ins, ch, f.lookahead as i32, ratio, slope)?;
        let shared = ((START_ROWS + BACK - 1) * f.lookahead_channels * 4) as u32;
        let grid = (per.div_ceil(START_ROWS) as u32, rows, f.input.div_ceil(START_OUTPUTS) as u32);
        start!(self.device, self.kernels.start, grid, 256, shared;
            args, tokens, per_row as i32, per as i32, self.front.table.ptr, self.front.back[0].ptr, self.front.back[1].ptr, self.scratch.hidden.ptr,
            self.front.noise.ptr, ins, ch, ratio)?;
        Ok(end)
    }

    /// One Euler step of the `width` chunks that [`Self::tell`] described; `whole`: they are all blocks of one utterance
    /// and see each other.
    fn step(&self, width: usize, whole: bool) -> Result<(), GpuError> {
        let (f, k, s) = (&self.config, &self.kernels, &self.scratch);
        let rows = width * 2 * f.block;
        let (dim, inner, chunks) = (f.dim as i32, f.inner(), self.staged.chunks.dev.ptr);
        let ldx = padded(f.dit_in()) as i32;
        let halo = (CONV_POS_KERNEL - 1) as i32;
        start!(self.device, k.input, (f.block as u32, 2 * width as u32, 1), ldx.min(1024) as u32, 0;
            chunks, s.input.ptr, s.hist.ptr, f.spk_dim as i32, halo, ldx)?;
        let base = Conv { rows: rows as i32, scale: 1.0, ..Conv::default() };
        let first = Conv { x: s.input.ptr, ldx, out: s.h0.ptr, oute: s.h0e.ptr, ldo: dim, lde: dim, ..base };
        let plain = if !whole && position::is_narrow(self, width) { NARROW_TILE } else { Tile::N64T64 };
        self.linears.gemm.conv(&self.weights.input, plain, 0, first)?;
        position::convolve(self, width, whole)?;

        let (norms, by) = (self.norms(rows), |l: &Linear| self.linears.scale(l, rows));
        for (n, block) in self.weights.blocks.iter().enumerate() {
            let at = 6 * n as i64;
            // The gate of the previous block's second half is applied in the same pass.
            match n.checked_sub(1).and_then(|before| self.weights.blocks.get(before)) {
                None => norms.run(None, false, [0, at, at + 1], by(&block.qkv))?,
                Some(b) => {
                    let shares = self.linears.shares(&b.down, rows);
                    norms.run(Some(&b.down), shares, [at - 1, at, at + 1], by(&block.qkv))?
                }
            }
            self.linears.run(&block.qkv, rows, s.a.ptr, s.qkv.ptr, false)?;
            let Launch { kernel, grid, threads, shared } = k.attention.launch(width, whole);
            if whole {
                let grid = (f.heads as u32, 2 * width as u32, 1);
                start!(self.device, k.append, grid, 128, 0; chunks, s.qkv.ptr, self.weights.rope.ptr, n as i32)?;
            }
            start!(self.device, kernel, grid, threads, shared;
                chunks, s.qkv.ptr, s.a.ptr, self.weights.rope.ptr, n as i32, i32::from(!whole), by(&block.out))?;
            debug_assert_eq!(block.out.k, inner);
            self.linears.run(&block.out, rows, s.a.ptr, s.heard.ptr, false)?;
            let shares = self.linears.shares(&block.out, rows);
            norms.run(Some(&block.out), shares, [at + 2, at + 3, at + 4], by(&block.up))?;
            self.linears.run(&block.up, rows, s.a.ptr, s.ff.ptr, true)?;
            self.linears.run(&block.down, rows, s.ff.ptr, s.heard.ptr, false)?;
        }
        let at = 6 * f.depth as i64;
        // The last layer stores scale before shift.
        if let Some(b) = self.weights.blocks.last() {
            norms.run(Some(&b.down), self.linears.shares(&b.down, rows), [at - 1, at + 1, at], 0.0)?;
        }
        let ld = padded(f.mel) as i32;
        let last = Conv { x: s.a.ptr, ldx: dim, out: s.v.ptr, ldo: ld, ..base };
        self.linears.gemm.conv(&self.weights.out, plain, 0, last)?;
        let grid = ((f.block * f.mel).div_ceil(256) as u32, 2 * width as u32, 1);
        start!(self.device, k.euler, grid, 256, 0;
            chunks, s.v.ptr, self.weights.deltas.ptr, f.guidance as f32, ld, self.staged.bad.dev.ptr)
    }

    /// The norms of a step of `rows` rows.
    fn norms(&self, rows: usize) -> Norms<'_> {
        Norms {
            device: &self.device,
            kernels: &self.kernels,
            weights: &self.weights,
            scratch: &self.scratch,
            chunks: self.staged.chunks.dev.ptr,
            parts: (self.linears.parts.ptr, self.linears.stride()),
            config: &self.config,
            elt: self.linears.gemm.elt,
            rows,
        }
    }

    /// Makes plans and graphs for steps of up to `most` utterances, which may have several blocks in a step; with them it solves
    /// what is known beforehand.
    pub(super) fn warm_up(&mut self, most: usize) -> Result<(), GpuError> {
        let last = WIDTHS.into_iter().find(|&w| w >= most.max(PAYS)).unwrap_or(WIDTH);
        for width in WIDTHS.into_iter().filter(|&w| w <= last) {
            self.prepare(width)?;
            self.tell(0, &[], width)?;
            self.step(width, false)?;
            self.device.sync()?;
            let graph = self.device.capture(|| self.step(width, false))?;
            self.graphs.insert(width, graph);
        }
        unguided::solve(self)
    }

    /// Plans for the GEMMs of steps of `width` chunks.
    fn prepare(&mut self, width: usize) -> Result<(), GpuError> {
        let (s, rows) = (&self.scratch, width * 2 * self.config.block);
        let norms = Norms {
            device: &self.device,
            kernels: &self.kernels,
            weights: &self.weights,
            scratch: &self.scratch,
            chunks: self.staged.chunks.dev.ptr,
            parts: (self.linears.parts.ptr, self.linears.stride()),
            config: &self.config,
            elt: self.linears.gemm.elt,
            rows,
        };
        // Whose modulation it is does not matter for the time.
        let follow = |l: &Linear, shares: bool| norms.run(Some(l), shares, [2, 3, 4], 0.0);
        let kind = |pick, x: &Buf, y: &Buf, gelu| Kind { pick, x: x.ptr, y: y.ptr, gelu, follow: None };
        let kinds: [Kind<'_>; 4] = [
            kind(|b| &b.qkv, &s.a, &s.qkv, false),
            Kind { follow: Some(&follow), ..kind(|b| &b.out, &s.a, &s.heard, false) },
            kind(|b| &b.up, &s.a, &s.ff, true),
            Kind { follow: Some(&follow), ..kind(|b| &b.down, &s.ff, &s.heard, false) },
        ];
        self.linears.prepare(rows, &self.weights.blocks, &kinds)
    }
}

/// What the norms of a step of `rows` rows work on.
struct Norms<'a> {
    device: &'a Device,
    kernels: &'a Kernels,
    weights: &'a Weights,
    scratch: &'a Scratch,
    chunks: u64,
    /// Where GEMMs whose inputs are shared leave their parts, and values from one to the next.
    parts: (u64, i64),
    config: &'a FlowConfig,
    elt: Elt,
    rows: usize,
}

impl Norms<'_> {
    /// Adds what the GEMM `y` left to the residual stream, as parts where it `shares`, and puts the norm of it where
    /// GEMMs read: as elements, or times `by` in 8 bits where that is not zero. `modulation`: which rows of it are gate, shift and
    /// scale.
    fn run(&self, y: Option<&Linear>, shares: bool, modulation: [i64; 3], by: f32) -> Result<(), GpuError> {
        let (f, s, mods) = (self.config, self.scratch, self.weights.modulation.ptr);
        let d = f.dim as i64;
        let stride = d * (6 * f.depth as i64 + 2);
        let [gate, shift, scale] = modulation.map(|row| row * d);
        let (grid, eps, size) = ((self.rows as u32, 1, 1), LAYER_NORM_EPS as f32, self.elt.size());
        let fp8 = self.kernels.norm_fp8.filter(|_| by != 0.0);
        let adds = if y.is_none() { 4 } else { 8 + size };
        let result = if fp8.is_some() { 1 } else { size };
        self.device.expect(0.0, (self.rows * f.dim * (adds + result)) as f64);
        if let Some(bias) = y.filter(|_| shares).and_then(|l| l.packed.bias.as_ref()) {
            let (parts, apart) = self.parts;
            return start!(self.device, self.kernels.norm_shares, grid, 128, 0;
                self.chunks, s.h.ptr, parts, apart, bias.ptr, s.a.ptr, mods, stride, gate, shift, scale, eps);
        }
        let y = y.map_or(0, |_| s.heard.ptr);
        if let Some(kernel) = fp8 {
            return start!(self.device, kernel, grid, 128, 0;
                self.chunks, s.h.ptr, y, s.a.ptr, mods, stride, gate, shift, scale, eps, by);
        }
        start!(self.device, self.kernels.norm, grid, 128, 0;
            self.chunks, s.h.ptr, y, s.a.ptr, mods, stride, gate, shift, scale, eps)
    }
}

/// Bytes of what a step gives for one row.
fn result_bytes(f: &FlowConfig) -> usize {
    f.block * padded(f.mel) * 4
}

/// Bytes of a head's keys, or values, of a block at one Euler step; in 8 bits with a scale for each frame after them.
fn head_bytes(f: &FlowConfig, elt: Elt, int8: bool) -> usize {
    match int8 {
        true => (f.block * (f.head_dim + 4)).next_multiple_of(16),
        false => f.block * f.head_dim * elt.size(),
    }
}

/// The macros of flow.cu; `int8`: whether keys and values are kept in 8 bits; `fp8`: whether GEMMs may multiply in 8 bits.
pub(super) fn defines(f: &FlowConfig, int8: bool, fp8: bool) -> Vec<(&'static str, i64)> {
    vec![
        ("INT8", int8.into()),
        ("FP8", fp8.into()),
        ("HD", f.head_dim as i64),
        ("HEADS", f.heads as i64),
        ("DIM", f.dim as i64),
        ("MEL", f.mel as i64),
        ("BLOCK", f.block as i64),
        ("LAYERS", f.depth as i64),
        ("STEPS", f.steps as i64),
        ("POSITION_TAPS", CONV_POS_KERNEL as i64),
    ]
}
