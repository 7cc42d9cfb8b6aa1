//! The layers of the language model over the rows of one step, and how each of their projections runs.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::compiler::Source;
use super::super::device::{Buf, Device, Elt, GpuError, Kernel, Timer, start};
use super::super::gemm::{Act, Conv, Gemm, Squares, WARPGROUP_TILES, WarpgroupTile};
use super::super::lt::Shape;
use super::super::mirror::mirrored;
use super::super::tuned::{Finding, Tuned};
use super::super::units;
use super::super::weights::Packed;
use super::{ATTEND_WARPS, PASS, WIDTHS};
use crate::synth::cosyvoice::config::LlmConfig;

/// Rows that tile configurations of warpgroup GEMMs are timed at; fewer take the next.
const BUCKETS: [usize; 11] = [16, 32, 64, 96, 128, 192, 256, 384, 768, 1536, PASS];
/// Tiles that a warp of attention has room for, of keys and of values together.
pub(super) const TILES: usize = 4;
/// The same for up to [`DEEP_ROWS`] rows.
pub(super) const DEEP_TILES: usize = 8;
/// The same where four blocks share a multiprocessor.
pub(super) const LEAN_TILES: usize = 2;
/// Rows up to which an attention block may have a multiprocessor to itself.
const DEEP_ROWS: usize = 32;

/// `Llm` of llm.cu.
///
/// Why this struct is large: every kernel of the model takes it.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Args {
    pub(super) text: u64,
    pub(super) speech: u64,
    pub(super) rope: u64,
    pub(super) cache: u64,
    pub(super) seq: u64,
    pub(super) forced: u64,
    pub(super) x: u64,
    pub(super) xe: u64,
    pub(super) row_slot: u64,
    pub(super) row_pos: u64,
    pub(super) slots: u64,
    pub(super) ids: u64,
    pub(super) slot_stride: i64,
    pub(super) layer_stride: i64,
    pub(super) hidden: i32,
    pub(super) positions: i32,
    pub(super) rows: i32,
    pub(super) tiled_rows: i32,
}

mirrored!(Args as "Llm" {
    text, speech, rope, cache, seq, forced, x, xe, row_slot, row_pos, slots, ids, slot_stride, layer_stride, hidden,
    positions, rows, tiled_rows,
});

pub(super) struct Layer {
    pub(super) qkv: Packed,
    pub(super) out: Packed,
    pub(super) gate_up: Packed,
    pub(super) down: Packed,
}

/// A projection: one GEMM of a layer, or the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Projection {
    Qkv,
    Out,
    GateUp,
    Down,
    Head,
}

const PROJECTIONS: [Projection; 5] =
    [Projection::Qkv, Projection::Out, Projection::GateUp, Projection::Down, Projection::Head];

/// The fastest tile configurations of warpgroup GEMMs; all give the same bits.
static TILE_CHOICES: Tuned<WarpgroupTile> = Tuned::new();

impl Finding for WarpgroupTile {
    const KIND: &'static str = "warpgroup 1";
    const KERNELS: &'static [&'static Source] = &[&units::WARPGROUP];

    fn to_bytes(self) -> Vec<u8> {
        vec![self as u8]
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        WARPGROUP_TILES.into_iter().find(|tile| *bytes == [*tile as u8])
    }
}

/// The model's kernels.
pub(super) struct Kernels {
    pub(super) embed: Kernel,
    pub(super) append: Kernel,
    pub(super) last: Kernel,
    pub(super) attend: Kernel,
    /// The same for three blocks a multiprocessor, and for four with [`LEAN_TILES`], where there is room for so many.
    pub(super) attend_three: Option<Kernel>,
    pub(super) attend_four: Option<Kernel>,
    /// As `attend`, with more in flight; up to [`DEEP_ROWS`], where a block has room for it.
    pub(super) attend_deep: Option<Kernel>,
    /// For prefixes.
    pub(super) attend_prefix: Kernel,
    pub(super) sample: Kernel,
}

/// What projections hand on, for [`PASS`] rows.
pub(super) struct Scratch {
    pub(super) qkv: Buf,
    pub(super) heard: Buf,
    pub(super) inner: Buf,
    pub(super) logits: Buf,
    pub(super) rms: Buf,
    /// Sums of squares of the residual stream's rows, where activations are tiled.
    pub(super) squares: Buf,
    /// Residual stream and projections of prefixes' last rows, as many as a round has.
    pub(super) last: (Buf, Buf),
}

/// All layers and the head.
pub(super) struct Network {
    pub(super) device: Arc<Device>,
    pub(super) config: LlmConfig,
    pub(super) gemm: Gemm,
    /// Whether every projection's inputs come in the pieces of tiled operands.
    pub(super) tileable: bool,
    /// The fastest tile configuration of each projection for up to so many rows.
    pub(super) tiles: BTreeMap<(usize, Projection), WarpgroupTile>,
    pub(super) layers: Vec<Layer>,
    pub(super) head: Packed,
    pub(super) args: Args,
    pub(super) kernels: Kernels,
    pub(super) scratch: Scratch,
}

impl Network {
    /// A round's `rows` rows, up to their scores; what they are is on the device.
    pub(super) fn round(&self, rows: usize) -> Result<(), GpuError> {
        let args = self.embed(self.args, rows, false)?;
        for n in 0..self.layers.len() {
            self.project(Projection::Qkv, n, rows, args.x)?;
            self.attend(args, self.scratch.qkv.ptr, n, rows)?;
            self.behind_attention(n, rows, args.x)?;
        }
        self.project(Projection::Head, 0, rows, args.x)
    }

    /// The `rows` rows of a prefill pass; what they are is on the device: of a prefix ids, then slots, then positions, each with
    /// room for [`PASS`], then the places of `ends` rows. Those get scores as rows of a round do; of the others nothing is left but
    /// keys and values.
    pub(super) fn pass(&self, rows: usize, ends: usize) -> Result<(), GpuError> {
        let ids = self.args.ids;
        let own = Args { row_slot: ids + 4 * PASS as u64, row_pos: ids + 8 * PASS as u64, ..self.args };
        let args = self.embed(own, rows, true)?;
        let qkv = self.scratch.qkv.ptr;
        // Two rows a block in 16 bit.
        let (f32, grid) = (self.gemm.elt == Elt::F32, (rows as u32, 1, 1));
        let shared = if f32 { 0 } else { attend_shared(TILES, self.config.head_dim) };
        let heads = (if f32 { rows } else { rows.div_ceil(2) } as u32, self.config.kv_heads as u32, 1);
        let last = self.layers.len() - 1;
        for n in 0..=last {
            self.project(Projection::Qkv, n, rows, args.x)?;
            start!(self.device, self.kernels.append, grid, 128, 0; args, qkv, n as i32)?;
            if n < last {
                start!(self.device, self.kernels.attend_prefix, heads, 256, shared; args, qkv, self.scratch.heard.ptr, n as i32)?;
                self.behind_attention(n, rows, args.x)?;
            }
        }
        if ends == 0 {
            return Ok(());
        }
        let (x, own) = (self.scratch.last.0.ptr, self.scratch.last.1.ptr);
        let args = Args { x, ..self.sized(self.args, ends) };
        let places = ids + 12 * PASS as u64;
        start!(self.device, self.kernels.last, (ends as u32, 1, 1), 256, 0; args, self.args.x, qkv, own, places)?;
        self.attend(args, own, last, ends)?;
        self.behind_attention(last, ends, x)?;
        self.project(Projection::Head, 0, ends, x)
    }

    /// `args` for `rows` rows.
    fn sized(&self, args: Args, rows: usize) -> Args {
        Args { rows: rows as i32, tiled_rows: if self.tiled(rows) { PASS as i32 } else { 0 }, ..args }
    }

    fn embed(&self, args: Args, rows: usize, prefill: bool) -> Result<Args, GpuError> {
        let args = self.sized(args, rows);
        start!(self.device, self.kernels.embed, (rows as u32, 1, 1), 256, 0; args, i32::from(prefill))?;
        if self.tiled(rows) {
            self.gemm.squares(args.xe, self.scratch.squares.ptr, PASS, rows, self.config.hidden)?;
        }
        Ok(args)
    }

    /// Attention of a round's rows, whose projections are at `qkv`, in layer `layer`.
    fn attend(&self, args: Args, qkv: u64, layer: usize, rows: usize) -> Result<(), GpuError> {
        let c = &self.config;
        // Blocks that wait for a place begin when others end: of 384 on 264 places the last third runs alone.
        let kernels = &self.kernels;
        let (attend, tiles) = match (rows * c.kv_heads).div_ceil(self.device.multiprocessors) {
            _ if rows <= DEEP_ROWS => (kernels.attend_deep, DEEP_TILES),
            3 => (kernels.attend_three, TILES),
            4 => (kernels.attend_four, LEAN_TILES),
            _ => (None, TILES),
        };
        let (attend, tiles) = attend.map_or((kernels.attend, TILES), |attend| (attend, tiles));
        let shared = if self.gemm.elt == Elt::F32 { 0 } else { attend_shared(tiles, c.head_dim) };
        let grid = (rows as u32, c.kv_heads as u32, 1);
        start!(self.device, attend, grid, 256, shared; args, qkv, self.scratch.heard.ptr, layer as i32)
    }

    /// What of a layer comes behind attention; the residual stream is at `x`.
    fn behind_attention(&self, layer: usize, rows: usize, x: u64) -> Result<(), GpuError> {
        [Projection::Out, Projection::GateUp, Projection::Down]
            .into_iter()
            .try_for_each(|which| self.project(which, layer, rows, x))
    }

    /// Whether activations of `rows` rows are tiled.
    fn tiled(&self, rows: usize) -> bool {
        self.tileable && self.gemm.tiled(rows)
    }

    /// One projection over `rows` rows whose residual stream is at `x`, of layer `layer` where it is a layer's.
    fn project(&self, which: Projection, layer: usize, rows: usize, x: u64) -> Result<(), GpuError> {
        let bucket = BUCKETS.into_iter().find(|&most| most >= rows).unwrap_or(PASS);
        self.project_by(which, layer, rows, x, self.tiles.get(&(bucket, which)).copied())
    }

    fn weights(&self, which: Projection, layer: usize) -> &Packed {
        let at = &self.layers[layer];
        match which {
            Projection::Qkv => &at.qkv,
            Projection::Out => &at.out,
            Projection::GateUp => &at.gate_up,
            Projection::Down => &at.down,
            Projection::Head => &self.head,
        }
    }

    fn project_by(
        &self,
        which: Projection,
        layer: usize,
        rows: usize,
        x: u64,
        tile: Option<WarpgroupTile>,
    ) -> Result<(), GpuError> {
        let c = &self.config;
        let (a, w) = (&self.args, self.weights(which, layer));
        let width = ((c.heads + 2 * c.kv_heads) * c.head_dim) as i32;
        let tiled = self.tiled(rows);
        // Of tiled operands the leading dimension is their height.
        let ld = |width: usize| if tiled { PASS as i32 } else { width as i32 };
        let hidden = ld(c.hidden);
        let base = Conv { rows: rows as i32, scale: 1.0, ..Conv::default() };
        let normed = Conv { x: a.xe, ldx: hidden, ..base };
        let residual = Conv { res: x, out: x, oute: a.xe, ldo: c.hidden as i32, lde: hidden, ..base };
        let p = match which {
            Projection::Qkv => Conv { out: self.scratch.qkv.ptr, ldo: width, ..normed },
            Projection::Out => Conv { x: self.scratch.heard.ptr, ldx: ld(c.heads * c.head_dim), ..residual },
            Projection::GateUp => {
                Conv { oute: self.scratch.inner.ptr, lde: ld(c.intermediate), act: Act::SiluGate, ..normed }
            }
            Projection::Down => Conv { x: self.scratch.inner.ptr, ldx: ld(c.intermediate), ..residual },
            Projection::Head => Conv { out: self.scratch.logits.ptr, ldo: self.head.n as i32, ..normed },
        };
        let makes_rows = matches!(which, Projection::Out | Projection::Down);
        let norm = (!makes_rows).then_some((c.rms_eps as f32, c.hidden));
        if !tiled {
            return self.gemm.linear(w, p, norm, self.scratch.rms.ptr);
        }
        let squares = if makes_rows {
            Squares { inputs: 0, results: self.scratch.squares.ptr }
        } else {
            Squares { inputs: self.scratch.squares.ptr, results: 0 }
        };
        let first = || WARPGROUP_TILES.into_iter().find(|tile| tile.fits(w)).unwrap_or(WarpgroupTile::N128T64);
        self.gemm.warpgroup(w, p, norm, squares, tile.unwrap_or_else(first))
    }

    /// Finds out the fastest tile configuration of every projection at every number of rows that a step may have.
    pub(super) fn tune_all(&mut self) -> Result<(), GpuError> {
        if !self.tiled(PASS) {
            return Ok(());
        }
        BUCKETS.into_iter().try_for_each(|rows| self.tune(rows))
    }

    /// Finds out the fastest tile configuration of every projection over `rows` rows; all give the same bits.
    fn tune(&mut self, rows: usize) -> Result<(), GpuError> {
        let timer = Timer::new(&self.device)?;
        for which in PROJECTIONS {
            if which == Projection::Head && rows > WIDTHS[WIDTHS.len() - 1] {
                continue;
            }
            let (n, k) = (self.weights(which, 0).n, self.weights(which, 0).cin);
            let shape = Shape { m: rows, n, k, gelu: false, fp8: false };
            let tile = TILE_CHOICES.of(&self.device, self.gemm.elt, shape, || self.fastest(which, rows, &timer))?;
            self.tiles.insert((rows, which), tile);
        }
        Ok(())
    }

    fn fastest(&self, which: Projection, rows: usize, timer: &Timer) -> Result<WarpgroupTile, GpuError> {
        let mut best: Option<(f64, WarpgroupTile)> = None;
        for tile in WARPGROUP_TILES.into_iter().filter(|tile| tile.fits(self.weights(which, 0))) {
            // All layers in turn, so that weights come from where they do in a round.
            let all =
                || (0..self.layers.len()).try_for_each(|n| self.project_by(which, n, rows, self.args.x, Some(tile)));
            all()?;
            let mut least = f64::INFINITY;
            for _ in 0..3 {
                timer.mark(0)?;
                all()?;
                timer.mark(1)?;
                least = least.min(timer.seconds()?);
            }
            if best.is_none_or(|(seconds, _)| least < seconds) {
                best = Some((least, tile));
            }
        }
        best.map(|(_, tile)| tile)
            .ok_or_else(|| GpuError::Model("no tile configuration of a warpgroup GEMM fits its weights".into()))
    }
}

/// Dynamic shared memory of attention in 16 bit over heads of `hd` values.
pub(super) fn attend_shared(tiles: usize, hd: usize) -> u32 {
    (ATTEND_WARPS * tiles * 16 * hd * 2) as u32
}
