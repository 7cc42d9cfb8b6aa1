//! The flow on the device: ragged chunks of many utterances, each at its own Euler step, in one graph per width.
//!
//! Owns weights, folded modulation, scratch and graphs. Whose chunk is run, and where its state lies, comes with
//! every call as [`ChunkArgs`]; what an utterance keeps is the caller's ([`super::slots`]).
//!
//! Why this file is long: loading and running name the same layers, and a step is one sequence of launches.

use std::collections::{BTreeMap, HashMap};
use std::f32::consts::PI;
use std::sync::Arc;

use super::device::{Buf, Device, Elt, GpuError, Graph, Kernel, Staging, Timer, start};
use super::gemm::{Act, Conv, Gemm, PLAIN, Tile};
use super::lt::{Lt, Operands, Shape};
use super::tuned::{Finding, Tuned};
use super::weights::{Packed, Packer, Piece, Source, padded};
use crate::synth::cosyvoice::checkpoint::Part;
use crate::synth::cosyvoice::config::{
    CONV_POS_GROUPS, CONV_POS_KERNEL, Config, DEFAULT_LEAKY_SLOPE, EULER_STEPS, FlowConfig, LAYER_NORM_EPS, TIME_EMBED,
};
use crate::synth::cosyvoice::noise;

/// Widths in chunks that a graph is recorded for.
pub(super) const WIDTHS: [usize; 13] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64];
/// Most chunks of one step.
pub(super) const WIDTH: usize = WIDTHS[WIDTHS.len() - 1];
/// Chunks of a round up to which blocks of one utterance run side by side: a wider round costs in proportion.
pub(super) const PAYS: usize = 32;
/// Most Euler steps of one call.
pub(super) const ROUNDS: usize = EULER_STEPS;
/// Blocks that one utterance may have, prompt included.
pub(super) const PAGES: usize = 64;
/// Kernel of the second pre-lookahead convolution, which looks back.
const BACK: usize = 3;
/// Positions of a block of each pre-lookahead kernel, and outputs of the second; as in flow.cu.
const HIDDEN_ROWS: usize = 9;
const HIDDEN_PARTS: usize = 4;
const START_ROWS: usize = 5;
const START_OUTPUTS: usize = 8;
/// Queries of an attention block, and keys of its tiles; as in flow.cu.
const QUERIES: usize = 64;
/// Rows of a block of a product of few rows, and warps that share its inputs; as in few.cu.
const PRODUCT_ROWS: usize = 56;
const PRODUCT_WARPS: usize = 8;
/// Rows up to which those are tried.
const FEW_ROWS: usize = 400;
/// Dynamic shared memory that attention may take.
const ATTEND_SHARED: u32 = 200 << 10;
/// What it has besides: where the pages lie.
const ATTEND_STATIC: u32 = (PAGES * 8) as u32;
/// Block shape of the position convolutions: one block has a whole sequence and a whole group of channels, because it
/// writes the history that it reads, and nothing orders it and another.
const POSITION_TILE: Tile = Tile::N64T64;
const ROOT: &str = "decoder.estimator";

/// `Chunk` of flow.cu.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct ChunkArgs {
    pub(super) hist: u64,
    pub(super) cond: u64,
    pub(super) speaker: u64,
    pub(super) step: i32,
    pub(super) frame0: i32,
    pub(super) frames: i32,
    pub(super) keys: i32,
    pub(super) key0: i32,
    pub(super) cond_frames: i32,
    pub(super) live: i32,
    pub(super) flag: i32,
    pub(super) page: [u64; PAGES],
}

/// A chunk of one round. `tokens`: given at its first step, see [`Flow::window`].
pub(super) struct ChunkRun {
    pub(super) args: ChunkArgs,
    pub(super) tokens: Option<Vec<i32>>,
}

/// One product of a block, in the layouts it may run in.
struct Linear {
    packed: Packed,
    plain: Option<(Buf, Buf)>,
    n: usize,
    k: usize,
}

struct Block {
    qkv: Linear,
    out: Linear,
    up: Linear,
    down: Linear,
}

/// A kernel of ours for a product.
#[derive(Clone, Copy, Debug)]
enum Choice {
    /// One of gemm.cu.
    Tile(Tile),
    /// For few rows: so many times 16 outputs a block.
    Few(usize),
}

impl Finding for Option<Choice> {
    const KIND: &'static str = "own 1";

    fn to_bytes(self) -> Vec<u8> {
        match self {
            None => Vec::new(),
            Some(Choice::Tile(tile)) => vec![0, tile as u8],
            Some(Choice::Few(tiles)) => vec![1, tiles as u8],
        }
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        match *bytes {
            [] => Some(None),
            [0, tile] => PLAIN.into_iter().find(|known| *known as u8 == tile).map(|tile| Some(Choice::Tile(tile))),
            [1, tiles] => Some(Some(Choice::Few(usize::from(tiles)))),
            _ => None,
        }
    }
}

/// What is faster than cuBLASLt.
static CHOICES: Tuned<Option<Choice>> = Tuned::new();

/// One of a block's products.
type Pick = fn(&Block) -> &Linear;

struct Kernels {
    hidden: Kernel,
    start: Kernel,
    input: Kernel,
    norm: Kernel,
    euler: Kernel,
    /// By how many groups of warps share a row's keys: 1, 2, 4.
    attend: [Kernel; 3],
    append: Kernel,
    neighbours: Kernel,
    /// Products of few rows, blocks of 16, 32 and 48 outputs; none in single precision.
    products: Vec<Kernel>,
}

/// The model.
pub(super) struct Flow {
    device: Arc<Device>,
    pub(super) config: FlowConfig,
    ratio: usize,
    gemm: Gemm,
    lt: Option<Lt>,
    /// Products that a kernel of ours does faster than cuBLASLt, found when they were prepared.
    choices: HashMap<Shape, Choice>,
    kernels: Kernels,
    input: Packed,
    positions: [Packed; 2],
    blocks: Vec<Block>,
    out: Packed,
    modulation: Buf,
    deltas: Buf,
    rope: Buf,
    noise: Buf,
    noise_frames: usize,
    table: Buf,
    ahead: [Buf; 2],
    behind: [Buf; 2],
    speaker: (Vec<f32>, Vec<f32>),
    scratch: Scratch,
    chunks: Vec<Staging>,
    current: Buf,
    tokens: Staging,
    bad: Staging,
    graphs: BTreeMap<usize, Graph>,
    pub(super) slab_bytes: usize,
    pub(super) x_offset: usize,
    pub(super) hist_bytes: usize,
    spare_hist: Buf,
}

struct Scratch {
    input: Buf,
    hist: Buf,
    tiles: Buf,
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

impl Flow {
    pub(super) fn load(packer: &Packer, source: &dyn Source, config: &Config) -> Result<Self, GpuError> {
        let device = &packer.device;
        let (f, elt) = (&config.flow, packer.elt);
        let (dim, inner, ff, size) = (f.dim, f.inner(), f.ff(), elt.size());
        let (outputs, positions) = POSITION_TILE.shape();
        let fits = f.head_dim % 16 == 0
            && (f.head_dim / 8).is_power_of_two()
            && attend_shared(0, f.head_dim) + ATTEND_STATIC <= device.shared
            && f.head_dim <= 128
            && f.block <= positions.min(QUERIES)
            && dim % 64 == 0
            && dim / CONV_POS_GROUPS <= outputs
            && f.input == f.mel
            && f.lookahead_channels % 4 == 0
            && f.input % 4 == 0
            && inner % 32 == 0
            && f.block % config.token_mel_ratio == 0;
        if !fits {
            return Err(GpuError::Model(format!("the flow's sizes do not fit the kernels: {f:?}")));
        }
        let get = |key: &str, shape: &[usize]| source.floats(Part::Flow, key, shape);
        let pair = |name: &str, n: usize, k: usize| -> Result<_, GpuError> {
            Ok((get(&format!("{name}.weight"), &[n, k])?, get(&format!("{name}.bias"), &[n])?))
        };
        let linear = |parts: &[(String, usize)], k: usize| -> Result<Linear, GpuError> {
            let (mut w, mut b) = (Vec::new(), Vec::new());
            for (name, n) in parts {
                let (wn, bn) = pair(name, *n, k)?;
                w.extend_from_slice(&wn);
                b.extend_from_slice(&bn);
            }
            let n = b.len();
            let packed = packer.whole(&w, n, k, 1, Some(&b))?;
            let plain = if elt == Elt::F32 { None } else { Some((packer.elements(&w)?, packer.elements(&b)?)) };
            Ok(Linear { packed, plain, n, k })
        };
        let mut blocks = Vec::with_capacity(f.depth);
        for n in 0..f.depth {
            let name = |part: &str| format!("{ROOT}.transformer_blocks.{n}.{part}");
            blocks.push(Block {
                qkv: linear(
                    &[(name("attn.to_q"), inner), (name("attn.to_k"), inner), (name("attn.to_v"), inner)],
                    dim,
                )?,
                out: linear(&[(name("attn.to_out.0"), dim)], inner)?,
                up: linear(&[(name("ff.ff.0.0"), ff)], dim)?,
                down: linear(&[(name("ff.ff.2"), dim)], ff)?,
            });
        }
        let (w, b) = pair(&format!("{ROOT}.input_embed.proj"), dim, f.dit_in())?;
        let input = packer.whole(&w, dim, f.dit_in(), 1, Some(&b))?;
        let position = |n: usize| -> Result<Packed, GpuError> {
            let name = format!("{ROOT}.input_embed.conv_pos_embed.conv{n}.0");
            let cin = dim / CONV_POS_GROUPS;
            let w = get(&format!("{name}.weight"), &[dim, cin, CONV_POS_KERNEL])?;
            let b = get(&format!("{name}.bias"), &[dim])?;
            let piece = [Piece { values: &w, n: dim, mul: 1, off: 0 }];
            packer.pack_groups(&piece, dim, cin, CONV_POS_KERNEL, CONV_POS_GROUPS, Some(&b), None)
        };
        let positions = [position(1)?, position(2)?];
        let (w, b) = pair(&format!("{ROOT}.proj_out"), f.mel, dim)?;
        let out = packer.whole(&w, f.mel, dim, 1, Some(&b))?;

        let times = times();
        let visited = evaluation_times(&times);
        let deltas: Vec<f32> = (0..EULER_STEPS).map(|k| times[k + 1] - visited[k]).collect();
        let modulation = modulation(packer, source, f, &visited)?;
        let noise_frames = config.noise_frames();
        let rope =
            rope_table(&get(&format!("{ROOT}.rotary_embed.inv_freq"), &[f.head_dim / 2])?, noise_frames + f.block);
        let table = noise::flow_table(config);
        // Frames after the table's end are only ever padding of a last block.
        let mut by_frame = vec![0f32; (noise_frames + f.block) * f.mel];
        for (channel, row) in table.chunks_exact(noise_frames).enumerate() {
            for (frame, v) in row.iter().enumerate() {
                by_frame[frame * f.mel + channel] = *v;
            }
        }
        let (look, ch) = (f.lookahead, f.lookahead_channels);
        let w = get("pre_lookahead_layer.conv1.weight", &[ch, f.input, look + 1])?;
        let mut ahead = vec![0f32; w.len()];
        for (i, v) in w.iter().enumerate() {
            let (o, c, tap) = (i / (f.input * (look + 1)), i / (look + 1) % f.input, i % (look + 1));
            ahead[(tap * f.input + c) * ch + o] = *v;
        }
        let w = get("pre_lookahead_layer.conv2.weight", &[f.input, ch, BACK])?;
        let mut behind = vec![0f32; w.len()];
        for (i, v) in w.iter().enumerate() {
            let (o, c, tap) = (i / (ch * BACK), i / BACK % ch, i % BACK);
            behind[(o * BACK + tap) * ch + c] = *v;
        }
        let speaker = (
            get("spk_embed_affine_layer.weight", &[f.spk_dim, f.speaker])?.into_owned(),
            get("spk_embed_affine_layer.bias", &[f.spk_dim])?.into_owned(),
        );

        let x_offset = EULER_STEPS * f.depth * 4 * f.block * inner * size;
        let module = device.compile("flow.cu", &[super::COMMON, super::FLOW, super::FEW], elt, &defines(f))?;
        let kernels = Kernels {
            hidden: module.kernel("flow_hidden", ATTEND_SHARED)?,
            start: module.kernel("flow_start", ATTEND_SHARED)?,
            input: module.kernel("flow_input", 0)?,
            norm: module.kernel("flow_norm", 0)?,
            euler: module.kernel("flow_euler", 0)?,
            attend: if elt == Elt::F32 {
                [module.kernel("flow_attend", 0)?; 3]
            } else {
                [
                    module.kernel("flow_attend", ATTEND_SHARED)?,
                    module.kernel("flow_attend_2", ATTEND_SHARED)?,
                    module.kernel("flow_attend_4", ATTEND_SHARED)?,
                ]
            },
            append: module.kernel("flow_append", 0)?,
            neighbours: module.kernel("flow_neighbours", 0)?,
            products: match elt {
                Elt::F32 => Vec::new(),
                _ => ["flow_product_16", "flow_product_32", "flow_product_48"]
                    .into_iter()
                    .map(|name| module.kernel(name, ATTEND_SHARED))
                    .collect::<Result<_, _>>()?,
            },
        };
        let rows = WIDTH * 2 * f.block;
        let act = |width: usize, bytes: usize| device.zeros("activations", rows * width * bytes);
        let tiles: Vec<[i32; 4]> =
            (0..WIDTH * 2).map(|r| [r as i32, 0, (r * f.block) as i32, f.block as i32]).collect();
        let scratch = Scratch {
            input: act(padded(f.dit_in()), size)?,
            hist: device.zeros("activations", WIDTH * 2 * 8)?,
            tiles: device.upload("tiles", &tiles)?,
            h0: act(dim, 4)?,
            h0e: act(dim, size)?,
            c1: act(dim, size)?,
            h: act(dim, 4)?,
            a: act(dim.max(inner), size)?,
            qkv: act(3 * inner, size)?,
            heard: act(dim.max(inner), size)?,
            ff: act(ff, size)?,
            v: act(padded(f.mel), 4)?,
            hidden: device.zeros("activations", WIDTH * (f.block / config.token_mel_ratio + 2) * ch * 4)?,
        };
        let per_row = f.block / config.token_mel_ratio + 2 + look;
        let hist_bytes = EULER_STEPS * 2 * 2 * (CONV_POS_KERNEL - 1) * dim * size;
        let chunk_bytes = WIDTH * size_of::<ChunkArgs>();
        Ok(Self {
            device: device.clone(),
            config: f.clone(),
            ratio: config.token_mel_ratio,
            gemm: Gemm::new(device, elt)?,
            lt: if elt == Elt::F32 { None } else { Some(Lt::new(device, elt)?) },
            choices: HashMap::new(),
            kernels,
            input,
            positions,
            blocks,
            out,
            modulation,
            deltas: device.upload("times", &deltas)?,
            rope: device.upload("rotary angles", &rope)?,
            noise: device.upload("noise", &by_frame)?,
            noise_frames,
            table: device.upload("tokens", &get("input_embedding.weight", &[f.vocab, f.input])?)?,
            ahead: [
                device.upload("weights", &ahead)?,
                device.upload("weights", &get("pre_lookahead_layer.conv1.bias", &[ch])?)?,
            ],
            behind: [
                device.upload("weights", &behind)?,
                device.upload("weights", &get("pre_lookahead_layer.conv2.bias", &[f.input])?)?,
            ],
            speaker,
            scratch,
            chunks: (0..ROUNDS).map(|_| Staging::new(device, "chunks", chunk_bytes)).collect::<Result<_, _>>()?,
            current: device.zeros("chunks", chunk_bytes)?,
            tokens: Staging::new(device, "chunk tokens", ROUNDS * WIDTH * (per_row + size_of::<ChunkArgs>()) * 4)?,
            bad: Staging::new(device, "flags", WIDTH * 4)?,
            graphs: BTreeMap::new(),
            slab_bytes: x_offset + 2 * f.block * f.mel * 4,
            x_offset,
            hist_bytes,
            spare_hist: device.zeros("histories", hist_bytes)?,
        })
    }

    /// Frames that the noise table covers.
    pub(super) fn limit(&self) -> usize {
        self.noise_frames.min(PAGES * self.config.block)
    }

    /// L2 normalisation and projection of a raw speaker vector.
    pub(super) fn project(&self, speaker: &[f32]) -> Vec<f32> {
        let norm = speaker.iter().map(|v| v * v).sum::<f32>().sqrt().max(1e-12);
        let (w, b) = &self.speaker;
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
            hist: self.spare_hist.ptr,
            cond: 0,
            speaker: 0,
            step: 0,
            frame0: 0,
            frames: 0,
            keys: 0,
            key0: 0,
            cond_frames: 0,
            live: 0,
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
        self.device.fill_zero(self.bad.dev.ptr, WIDTH * 4)?;
        let mut used = 0usize;
        for (n, round) in rounds.iter().enumerate() {
            let Some(width) = WIDTHS.into_iter().find(|&w| w >= round.len()) else {
                return Err(GpuError::Model(format!("{} chunks are more than a step takes", round.len())));
            };
            let idle = self.idle();
            let chunks = self.chunks[n].as_mut::<ChunkArgs>();
            for (i, c) in chunks.iter_mut().take(width).enumerate() {
                *c = round.get(i).map_or(idle, |r| r.args);
            }
            let starters: Vec<&ChunkRun> = round.iter().filter(|r| r.tokens.is_some()).collect();
            if !starters.is_empty() {
                used = self.begin(&starters, used)?;
            }
            self.chunks[n].send(width * size_of::<ChunkArgs>())?;
            self.device.copy(self.current.ptr, self.chunks[n].dev.ptr, width * size_of::<ChunkArgs>())?;
            match self.graphs.get(&width).filter(|_| !self.device.traced()) {
                Some(graph) => graph.launch()?,
                None => self.step(width, false)?,
            }
        }
        self.bad.fetch(WIDTH * 4)
    }

    /// Which chunks of the rounds that have ended are no longer finite, by flag.
    pub(super) fn flags(&mut self) -> Vec<bool> {
        self.bad.as_mut::<i32>().iter().map(|&b| b != 0).collect()
    }

    /// One Euler step of a whole utterance whose blocks see each other fully; `blocks` in order. They are given
    /// tokens at the first step. Returns whether a value is no longer finite.
    pub(super) fn run_whole(&mut self, blocks: &[ChunkRun]) -> Result<bool, GpuError> {
        self.device.fill_zero(self.bad.dev.ptr, WIDTH * 4)?;
        let starters: Vec<&ChunkRun> = blocks.iter().filter(|r| r.tokens.is_some()).collect();
        if !starters.is_empty() {
            self.begin(&starters, 0)?;
        }
        let bytes = std::mem::size_of::<ChunkArgs>() * blocks.len();
        for (to, from) in self.chunks[0].as_mut::<ChunkArgs>().iter_mut().zip(blocks) {
            *to = from.args;
        }
        self.chunks[0].send(bytes)?;
        self.device.copy(self.current.ptr, self.chunks[0].dev.ptr, bytes)?;
        self.prepare(blocks.len())?;
        self.step(blocks.len(), true)?;
        self.bad.fetch(WIDTH * 4)?;
        self.device.sync()?;
        Ok(self.flags().contains(&true))
    }

    /// Conditioning and noise of chunks at their first step; `used`: words of the staging memory already taken in this
    /// call. A send of those may be under way: only words behind them are written ([`Staging::as_mut`]).
    fn begin(&mut self, starters: &[&ChunkRun], used: usize) -> Result<usize, GpuError> {
        let f = &self.config;
        let (per, back) = (f.block / self.ratio, BACK - 1);
        let per_row = per + back + f.lookahead;
        let words = size_of::<ChunkArgs>() / 4;
        // Arguments first: they hold addresses and need their alignment.
        let args_at = used.next_multiple_of(2);
        let tokens_at = args_at + starters.len() * words;
        let end = tokens_at + starters.len() * per_row;
        let staging = self.tokens.as_mut::<i32>();
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
        self.tokens.send(end * 4)?;
        let (args, tokens) = (self.tokens.dev.ptr + 4 * args_at as u64, self.tokens.dev.ptr + 4 * tokens_at as u64);
        let (ins, ch, ratio) = (f.input as i32, f.lookahead_channels as i32, self.ratio as i32);
        let rows = starters.len() as u32;
        let sums = (HIDDEN_PARTS - 1) * HIDDEN_ROWS * 256;
        let shared = ((sums + (HIDDEN_ROWS + f.lookahead) * f.input) * 4) as u32;
        let grid = ((per + back).div_ceil(HIDDEN_ROWS) as u32, rows, f.lookahead_channels.div_ceil(256) as u32);
        let slope = DEFAULT_LEAKY_SLOPE as f32;
        start!(self.device, self.kernels.hidden, grid, 64 * HIDDEN_PARTS as u32, shared;
            args, tokens, per_row as i32, (per + back) as i32, self.table.ptr, self.ahead[0].ptr, self.ahead[1].ptr, self.scratch.hidden.ptr,
            ins, ch, f.lookahead as i32, ratio, slope)?;
        let shared = ((START_ROWS + BACK - 1) * f.lookahead_channels * 4) as u32;
        let grid = (per.div_ceil(START_ROWS) as u32, rows, f.input.div_ceil(START_OUTPUTS) as u32);
        start!(self.device, self.kernels.start, grid, 256, shared;
            args, tokens, per_row as i32, per as i32, self.table.ptr, self.behind[0].ptr, self.behind[1].ptr, self.scratch.hidden.ptr,
            self.noise.ptr, ins, ch, ratio)?;
        Ok(end)
    }

    /// One Euler step of the `width` chunks that `current` describes; `whole`: they are all blocks of one utterance
    /// and see each other.
    fn step(&self, width: usize, whole: bool) -> Result<(), GpuError> {
        let (f, k, s) = (&self.config, &self.kernels, &self.scratch);
        let rows = width * 2 * f.block;
        let (dim, inner, chunks) = (f.dim as i32, f.inner(), self.current.ptr);
        let wide = padded(f.dit_in()) as i32;
        let halo = (CONV_POS_KERNEL - 1) as i32;
        start!(self.device, k.input, (f.block as u32, 2 * width as u32, 1), 128, 0;
            chunks, s.input.ptr, s.hist.ptr, f.spk_dim as i32, halo, wide)?;
        let base = Conv { rows: rows as i32, scale: 1.0, ..Conv::default() };
        let first = Conv { x: s.input.ptr, ldx: wide, out: s.h0.ptr, oute: s.h0e.ptr, ldo: dim, lde: dim, ..base };
        self.gemm.conv(&self.input, Tile::N64T64, 0, first)?;
        let position = Conv {
            tiles: s.tiles.ptr,
            hist_in: s.hist.ptr,
            hist_out: if whole { 0 } else { s.hist.ptr },
            ldx: dim,
            ldo: dim,
            lde: dim,
            act: Act::Mish,
            ..base
        };
        let neighbours = |x: u64, off: i64| match whole {
            true => {
                start!(self.device, k.neighbours, (halo as u32, 2 * width as u32, 1), 128, 0; x, s.hist.ptr, off, halo)
            }
            false => Ok(()),
        };
        neighbours(s.h0e.ptr, 0)?;
        let one = Conv { x: s.h0e.ptr, oute: s.c1.ptr, ..position };
        self.gemm.conv(&self.positions[0], POSITION_TILE, 2 * width, one)?;
        let off = i64::from(halo) * i64::from(dim);
        neighbours(s.c1.ptr, off)?;
        let two = Conv { x: s.c1.ptr, post: s.h0.ptr, out: s.h.ptr, hist_off: off, ..position };
        self.gemm.conv(&self.positions[1], POSITION_TILE, 2 * width, two)?;

        let d = f.dim as i64;
        let stride = d * (6 * f.depth as i64 + 2);
        let size = self.gemm.elt.size();
        let norm = |y: u64, gate: i64, shift: i64, scale: i64| {
            self.device.expect(0.0, (rows * f.dim * (if y == 0 { 4 } else { 8 + size } + size)) as f64);
            start!(self.device, k.norm, (rows as u32, 1, 1), 128, 0;
                chunks, s.h.ptr, y, s.a.ptr, self.modulation.ptr, stride, gate * d, shift * d, scale * d,
                LAYER_NORM_EPS as f32)
        };
        for (n, block) in self.blocks.iter().enumerate() {
            let at = 6 * n as i64;
            // The gate of the previous block's second half is applied on the way.
            if n == 0 {
                norm(0, 0, at, at + 1)?
            } else {
                norm(s.heard.ptr, at - 1, at, at + 1)?
            };
            self.linear(&block.qkv, rows, s.a.ptr, s.qkv.ptr, false)?;
            let grid = (f.heads as u32, 2 * width as u32, 1);
            let (attend, threads, shared) = self.attend(width);
            if whole {
                start!(self.device, k.append, grid, 128, 0; chunks, s.qkv.ptr, self.rope.ptr, n as i32)?;
            }
            start!(self.device, attend, grid, threads, shared;
                chunks, s.qkv.ptr, s.a.ptr, self.rope.ptr, n as i32, i32::from(!whole))?;
            debug_assert_eq!(block.out.k, inner);
            self.linear(&block.out, rows, s.a.ptr, s.heard.ptr, false)?;
            norm(s.heard.ptr, at + 2, at + 3, at + 4)?;
            self.linear(&block.up, rows, s.a.ptr, s.ff.ptr, true)?;
            self.linear(&block.down, rows, s.ff.ptr, s.heard.ptr, false)?;
        }
        let at = 6 * f.depth as i64;
        // The last layer stores scale before shift.
        norm(s.heard.ptr, at - 1, at + 1, at)?;
        let ld = padded(f.mel) as i32;
        let last = Conv { x: s.a.ptr, ldx: dim, out: s.v.ptr, ldo: ld, ..base };
        self.gemm.conv(&self.out, Tile::N64T64, 0, last)?;
        let grid = ((f.block * f.mel).div_ceil(256) as u32, width as u32, 1);
        start!(self.device, k.euler, grid, 256, 0;
            chunks, s.v.ptr, self.deltas.ptr, f.guidance as f32, ld, self.bad.dev.ptr)
    }

    /// The attention kernel for so many chunks, its threads and its shared memory.
    fn attend(&self, width: usize) -> (Kernel, u32, u32) {
        let f = &self.config;
        if self.gemm.elt == Elt::F32 {
            return (self.kernels.attend[0], 256, 0);
        }
        // Groups of four warps, until there is a block for every multiprocessor, and as many as a block has room for.
        let (blocks, at_once) = (2 * width * f.heads, self.device.multiprocessors);
        let wanted = usize::from(blocks <= at_once) + usize::from(blocks <= 2 * at_once);
        let shared = |which: usize| attend_shared(which, f.head_dim);
        let fits = |which: &usize| shared(*which) + ATTEND_STATIC <= self.device.shared;
        let which = (0..=wanted).rev().find(fits).unwrap_or(0);
        (self.kernels.attend[which], 128 << which, shared(which))
    }

    fn linear(&self, l: &Linear, rows: usize, x: u64, y: u64, gelu: bool) -> Result<(), GpuError> {
        let shape = Shape { m: rows, n: l.n, k: l.k, gelu };
        match self.choices.get(&shape) {
            Some(&choice) => self.chosen(l, choice, shape, x, y),
            None => self.library(l, shape, x, y),
        }
    }

    /// A product through cuBLASLt, or through our kernels where it does not serve.
    fn library(&self, l: &Linear, shape: Shape, x: u64, y: u64) -> Result<(), GpuError> {
        match (&self.lt, &l.plain) {
            (Some(lt), Some((w, bias))) => lt.run(shape, Operands { x, w: w.ptr, bias: bias.ptr, y }),
            _ => self.own(l, Tile::N64T64, shape, x, y),
        }
    }

    fn chosen(&self, l: &Linear, choice: Choice, shape: Shape, x: u64, y: u64) -> Result<(), GpuError> {
        match choice {
            Choice::Tile(tile) => self.own(l, tile, shape, x, y),
            Choice::Few(tiles) => self.few(l, tiles, shape, x, y),
        }
    }

    /// A product of few rows.
    fn few(&self, l: &Linear, tiles: usize, shape: Shape, x: u64, y: u64) -> Result<(), GpuError> {
        let Shape { m, n, k, gelu } = shape;
        let (Some(kernel), Some(bias)) = (self.kernels.products.get(tiles - 1), &l.packed.bias) else {
            return self.library(l, shape, x, y);
        };
        self.device.expect(2.0 * (m * n * k) as f64, 2.0 * (n * k + m * (n + k)) as f64);
        let grid = (n.div_ceil(16 * tiles) as u32, m.div_ceil(PRODUCT_ROWS) as u32, 1);
        start!(self.device, *kernel, grid, 32 * PRODUCT_WARPS as u32, few_shared(tiles);
            x, l.packed.w.ptr, bias.ptr, y, m as i32, n as i32, k as i32, i32::from(gelu))
    }

    fn own(&self, l: &Linear, tile: Tile, shape: Shape, x: u64, y: u64) -> Result<(), GpuError> {
        let Shape { m: rows, gelu, .. } = shape;
        let act = if gelu { Act::Gelu } else { Act::None };
        let (n, k) = (l.n as i32, l.k as i32);
        let p = Conv { x, ldx: k, oute: y, lde: n, ldo: n, rows: rows as i32, act, scale: 1.0, ..Conv::default() };
        self.gemm.conv(&l.packed, tile, 0, p)
    }

    /// Makes plans and graphs for steps of up to `most` utterances, which may have several blocks in a step.
    pub(super) fn warm_up(&mut self, most: usize) -> Result<(), GpuError> {
        let last = WIDTHS.into_iter().find(|&w| w >= most.max(PAYS)).unwrap_or(WIDTH);
        for width in WIDTHS.into_iter().filter(|&w| w <= last) {
            self.prepare(width)?;
            let idle = self.idle();
            self.chunks[0].as_mut::<ChunkArgs>()[..width].fill(idle);
            self.chunks[0].send(width * size_of::<ChunkArgs>())?;
            self.device.copy(self.current.ptr, self.chunks[0].dev.ptr, width * size_of::<ChunkArgs>())?;
            self.step(width, false)?;
            self.device.sync()?;
            let graph = self.device.capture(|| self.step(width, false))?;
            self.graphs.insert(width, graph);
        }
        Ok(())
    }

    /// Plans for the products of one width: cuBLASLt's fastest, or a kernel of ours that beats it.
    pub(super) fn prepare(&mut self, width: usize) -> Result<(), GpuError> {
        let rows = width * 2 * self.config.block;
        let Some(block) = self.blocks.first() else { return Ok(()) };
        let s = &self.scratch;
        let mut choices = Vec::new();
        let kinds: [(Pick, u64, u64, bool); 4] = [
            (|b| &b.qkv, s.a.ptr, s.qkv.ptr, false),
            (|b| &b.out, s.a.ptr, s.heard.ptr, false),
            (|b| &b.up, s.a.ptr, s.ff.ptr, true),
            (|b| &b.down, s.ff.ptr, s.heard.ptr, false),
        ];
        for (pick, x, y, gelu) in kinds {
            let l = pick(block);
            let shape = Shape { m: rows, n: l.n, k: l.k, gelu };
            let (Some(lt), Some((w, bias))) = (&mut self.lt, &l.plain) else { return Ok(()) };
            if lt.prepared(shape) || self.choices.contains_key(&shape) {
                continue;
            }
            lt.prepare(shape, Operands { x, w: w.ptr, bias: bias.ptr, y })?;
            let faster = CHOICES.of(&self.device, self.gemm.elt, shape, || self.faster(pick, shape, x, y))?;
            choices.extend(faster.map(|choice| (shape, choice)));
        }
        self.choices.extend(choices);
        Ok(())
    }

    /// A kernel of ours that is faster than the library at one of the products.
    fn faster(&self, pick: Pick, shape: Shape, x: u64, y: u64) -> Result<Option<Choice>, GpuError> {
        let Some(l) = self.blocks.first().map(pick) else { return Ok(None) };
        let timer = Timer::new(&self.device)?;
        let time = |run: &dyn Fn(&Linear) -> Result<(), GpuError>| -> Result<f64, GpuError> {
            // As part of a graph: gaps between launches made one by one would hide the difference. Each layer's
            // weights once: in a step they are never in the cache.
            let graph = self.device.capture(|| self.blocks.iter().try_for_each(|b| run(pick(b))))?;
            let mut best = f64::INFINITY;
            for _ in 0..3 {
                timer.mark(0)?;
                graph.launch()?;
                timer.mark(1)?;
                best = best.min(timer.seconds()?);
            }
            Ok(best)
        };
        let mut best = (time(&|l| self.library(l, shape, x, y))?, None);
        // Blocks of outputs that divide what there are, and inputs in groups of 32.
        let few = (1..=self.kernels.products.len()).filter(|t| shape.m <= FEW_ROWS && l.n % (16 * t) == 0);
        let few = few.filter(|_| l.k % 32 == 0 && l.packed.cin == l.k).filter(|&t| few_shared(t) <= self.device.shared);
        let tiles = PLAIN.into_iter().filter(|&tile| self.gemm.takes(&l.packed, tile)).map(Choice::Tile);
        for choice in tiles.chain(few.map(Choice::Few)) {
            let seconds = time(&|l| self.chosen(l, choice, shape, x, y))?;
            if seconds < best.0 {
                best = (seconds, Some(choice));
            }
        }
        Ok(best.1)
    }
}

/// Dynamic shared memory of attention in 16 bit by `1 << which` groups of warps: queries, then two tiles of keys and of
/// values a group.
fn attend_shared(which: usize, head_dim: usize) -> u32 {
    ((1 + (4 << which)) * QUERIES * head_dim * 2) as u32
}

/// Dynamic shared memory of a product of few rows with `tiles` times 16 outputs a block: each warp's sums, padded.
fn few_shared(tiles: usize) -> u32 {
    (PRODUCT_WARPS * PRODUCT_ROWS * (16 * tiles + 8) * 4) as u32
}

/// The macros of flow.cu.
pub(super) fn defines(f: &FlowConfig) -> Vec<(&'static str, i64)> {
    vec![
        ("HD", f.head_dim as i64),
        ("HEADS", f.heads as i64),
        ("DIM", f.dim as i64),
        ("MEL", f.mel as i64),
        ("BLOCK", f.block as i64),
        ("LAYERS", f.depth as i64),
        ("STEPS", EULER_STEPS as i64),
    ]
}

/// `[positions][pairs]` cosines and sines.
fn rope_table(frequencies: &[f32], positions: usize) -> Vec<[f32; 2]> {
    (0..positions)
        .flat_map(|p| frequencies.iter().map(move |f| p as f32 * f).map(|a| [a.cos(), a.sin()]).collect::<Vec<_>>())
        .collect()
}

/// The solver's times: `1 - cos(pi/2 * k/steps)`, in single precision as the reference computes them.
pub(super) fn times() -> Vec<f32> {
    (0..=EULER_STEPS).map(|k| 1.0 - (k as f32 / EULER_STEPS as f32 * 0.5 * PI).cos()).collect()
}

/// The times at which the network is evaluated: accumulated, as the reference does.
fn evaluation_times(times: &[f32]) -> Vec<f32> {
    let (mut t, mut dt) = (times[0], times[1] - times[0]);
    let mut visited = Vec::with_capacity(EULER_STEPS);
    for k in 1..times.len() {
        visited.push(t);
        t += dt;
        dt = times.get(k + 1).map_or(dt, |next| next - t);
    }
    visited
}

/// `[step][6 * depth + 2][dim]`: what every modulation layer gives at each time, folded once.
fn modulation(packer: &Packer, source: &dyn Source, f: &FlowConfig, times: &[f32]) -> Result<Buf, GpuError> {
    let device = &packer.device;
    let (dim, half) = (f.dim, TIME_EMBED / 2);
    let rate = 10_000f64.ln() / (half - 1) as f64;
    let mut waves = Vec::with_capacity(times.len() * TIME_EMBED);
    for &t in times {
        let angles: Vec<f32> = (0..half).map(|i| 1000.0 * t * (-(i as f64) * rate).exp() as f32).collect();
        waves.extend(angles.iter().map(|a| a.sin()));
        waves.extend(angles.iter().map(|a| a.cos()));
    }
    let get = |key: &str, shape: &[usize]| source.floats(Part::Flow, &format!("{ROOT}.{key}"), shape);
    let silu = |v: &mut f32| *v /= 1.0 + (-*v).exp();
    let layer = |x: &[f32], name: &str, n: usize, k: usize| -> Result<Vec<f32>, GpuError> {
        let (x, y) = (device.upload("times", x)?, device.zeros("times", times.len() * n * 4)?);
        let (w, b) = (get(&format!("{name}.weight"), &[n, k])?, get(&format!("{name}.bias"), &[n])?);
        packer.linear(&x, times.len(), &w, &b, k, y.ptr, n)?;
        let mut out = vec![0f32; times.len() * n];
        device.read(y.ptr, &mut out)?;
        Ok(out)
    };
    let mut hidden = layer(&waves, "time_embed.time_mlp.0", dim, TIME_EMBED)?;
    hidden.iter_mut().for_each(silu);
    let mut active = layer(&hidden, "time_embed.time_mlp.2", dim, dim)?;
    active.iter_mut().for_each(silu);
    let active = device.upload("times", &active)?;
    let stride = dim * (6 * f.depth + 2);
    let out = device.zeros("modulation", times.len() * stride * 4)?;
    for n in 0..=f.depth {
        let (name, parts) = if n < f.depth {
            (format!("transformer_blocks.{n}.attn_norm.linear"), 6)
        } else {
            ("norm_out.linear".into(), 2)
        };
        let (w, b) =
            (get(&format!("{name}.weight"), &[parts * dim, dim])?, get(&format!("{name}.bias"), &[parts * dim])?);
        packer.linear(&active, times.len(), &w, &b, dim, out.ptr + (n * 6 * dim * 4) as u64, stride)?;
    }
    Ok(out)
}
