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
/// Tiles of keys and of values that a warp has room for, and up to [`DEEP_ROWS`].
pub(super) const TILES: usize = 4;
pub(super) const DEEP_TILES: usize = 8;
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
    pub(super) attend: Kernel,
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
    /// All layers over `rows` rows; what they are is on the device: of a prefix ids, then slots, then positions, each with
    /// room for [`PASS`].
    pub(super) fn run(&self, rows: usize, prefill: bool) -> Result<(), GpuError> {
        let c = &self.config;
        let tiled = self.tiled(rows);
        let mut args = Args { rows: rows as i32, tiled_rows: if tiled { PASS as i32 } else { 0 }, ..self.args };
        if prefill {
            args.row_slot = args.ids + 4 * PASS as u64;
            args.row_pos = args.ids + 8 * PASS as u64;
        }
        let grid = (rows as u32, 1, 1);
        start!(self.device, self.kernels.embed, grid, 256, 0; args, i32::from(prefill))?;
        if tiled {
            self.gemm.squares(args.xe, self.scratch.squares.ptr, PASS, rows, c.hidden)?;
        }
        let f32 = self.gemm.elt == Elt::F32;
        // The kernel, its tiles, and whether a block has two rows.
        let (attend, tiles, pair) = match self.kernels.attend_deep {
            _ if prefill => (self.kernels.attend_prefix, TILES, !f32),
            Some(deep) if rows <= DEEP_ROWS => (deep, DEEP_TILES, false),
            _ => (self.kernels.attend, TILES, false),
        };
        let shared = if f32 { 0 } else { attend_shared(tiles, c.head_dim) };
        let heads = (if pair { rows.div_ceil(2) } else { rows } as u32, c.kv_heads as u32, 1);
        for n in 0..self.layers.len() {
            self.project(Projection::Qkv, n, rows)?;
            if prefill {
                start!(self.device, self.kernels.append, grid, 128, 0; args, self.scratch.qkv.ptr, n as i32)?;
                // Of the last layer a prefix leaves its keys and values, and no more.
                if n + 1 == self.layers.len() {
                    break;
                }
            }
            start!(self.device, attend, heads, 256, shared; args, self.scratch.qkv.ptr, self.scratch.heard.ptr, n as i32)?;
            self.project(Projection::Out, n, rows)?;
            self.project(Projection::GateUp, n, rows)?;
            self.project(Projection::Down, n, rows)?;
        }
        Ok(())
    }

    /// Whether activations of `rows` rows are tiled.
    fn tiled(&self, rows: usize) -> bool {
        self.tileable && self.gemm.tiled(rows)
    }

    /// One projection over `rows` rows, of layer `layer` where it is a layer's.
    pub(super) fn project(&self, which: Projection, layer: usize, rows: usize) -> Result<(), GpuError> {
        let bucket = BUCKETS.into_iter().find(|&most| most >= rows).unwrap_or(PASS);
        self.project_by(which, layer, rows, self.tiles.get(&(bucket, which)).copied())
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
        let residual = Conv { res: a.x, out: a.x, oute: a.xe, ldo: c.hidden as i32, lde: hidden, ..base };
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
            let shape = Shape { m: rows, n, k, gelu: false };
            let tile = TILE_CHOICES.of(&self.device, self.gemm.elt, shape, || self.fastest(which, rows, &timer))?;
            self.tiles.insert((rows, which), tile);
        }
        Ok(())
    }

    fn fastest(&self, which: Projection, rows: usize, timer: &Timer) -> Result<WarpgroupTile, GpuError> {
        let mut best: Option<(f64, WarpgroupTile)> = None;
        for tile in WARPGROUP_TILES.into_iter().filter(|tile| tile.fits(self.weights(which, 0))) {
            // All layers in turn, so that weights come from where they do in a round.
            let all = || (0..self.layers.len()).try_for_each(|n| self.project_by(which, n, rows, Some(tile)));
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
