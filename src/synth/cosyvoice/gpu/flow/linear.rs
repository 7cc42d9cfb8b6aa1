//! The products of a block: each through cuBLASLt, or through a kernel of ours where that was found faster.

use std::collections::HashMap;
use std::sync::Arc;

use super::super::device::{Buf, Device, GpuError, Kernel, Timer, start};
use super::super::gemm::{Act, Conv, Gemm, PLAIN, Tile};
use super::super::lt::{Lt, Operands, Shape};
use super::super::tuned::{Finding, Tuned};
use super::super::weights::Packed;
use super::Block;

/// Rows of a block of a product of few rows, and warps that share its inputs; as in few.cu.
const PRODUCT_ROWS: usize = 56;
const PRODUCT_WARPS: usize = 8;
/// Block shape of all products where a row's bits may not depend on the others'.
const SAME: Tile = Tile::N64T64;
/// Rows up to which those are tried.
const FEW_ROWS: usize = 400;

/// One product of a block, in the layouts it may run in.
pub(super) struct Linear {
    pub(super) packed: Packed,
    pub(super) plain: Option<(Buf, Buf)>,
    pub(super) n: usize,
    pub(super) k: usize,
}

/// A kernel of ours for a product.
#[derive(Clone, Copy, Debug)]
pub(super) enum Choice {
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
pub(super) type Pick = fn(&Block) -> &Linear;

/// A product of every block, with its operands in the scratch: what [`Linears::prepare`] times.
pub(super) struct Kind {
    pub(super) pick: Pick,
    pub(super) x: u64,
    pub(super) y: u64,
    pub(super) gelu: bool,
}

/// How the products run.
pub(super) struct Linears {
    pub(super) device: Arc<Device>,
    pub(super) gemm: Gemm,
    pub(super) lt: Option<Lt>,
    /// Products that a kernel of ours does faster than cuBLASLt, found when they were prepared.
    pub(super) choices: HashMap<Shape, Choice>,
    /// Products of few rows, blocks of 16, 32 and 48 outputs; none in single precision.
    pub(super) few: Vec<Kernel>,
}

impl Linears {
    /// `rows` rows at `x` through `l` to `y`.
    pub(super) fn run(&self, l: &Linear, rows: usize, x: u64, y: u64, gelu: bool) -> Result<(), GpuError> {
        let shape = Shape { m: rows, n: l.n, k: l.k, gelu };
        if self.device.invariant {
            // One block shape at every width: cuBLASLt picks by the rows, and so would timing.
            return self.own(l, SAME, shape, x, y);
        }
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
        let (Some(kernel), Some(bias)) = (self.few.get(tiles - 1), &l.packed.bias) else {
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

    /// Plans for the products of `rows` rows: cuBLASLt's fastest, or a kernel of ours that beats it.
    pub(super) fn prepare(&mut self, rows: usize, blocks: &[Block], kinds: &[Kind]) -> Result<(), GpuError> {
        let Some(block) = blocks.first().filter(|_| !self.device.invariant) else { return Ok(()) };
        let mut choices = Vec::new();
        for &Kind { pick, x, y, gelu } in kinds {
            let l = pick(block);
            let shape = Shape { m: rows, n: l.n, k: l.k, gelu };
            let (Some(lt), Some((w, bias))) = (&mut self.lt, &l.plain) else { return Ok(()) };
            if lt.prepared(shape) || self.choices.contains_key(&shape) {
                continue;
            }
            lt.prepare(shape, Operands { x, w: w.ptr, bias: bias.ptr, y })?;
            let faster = CHOICES.of(&self.device, self.gemm.elt, shape, || self.faster(blocks, pick, shape, x, y))?;
            choices.extend(faster.map(|choice| (shape, choice)));
        }
        self.choices.extend(choices);
        Ok(())
    }

    /// A kernel of ours that is faster than the library at one of the products.
    fn faster(&self, blocks: &[Block], pick: Pick, shape: Shape, x: u64, y: u64) -> Result<Option<Choice>, GpuError> {
        let Some(l) = blocks.first().map(pick) else { return Ok(None) };
        let timer = Timer::new(&self.device)?;
        let time = |run: &dyn Fn(&Linear) -> Result<(), GpuError>| -> Result<f64, GpuError> {
            // As part of a graph: gaps between launches made one by one would hide the difference. Each layer's
            // weights once: in a step they are never in the cache.
            let graph = self.device.capture(|| blocks.iter().try_for_each(|b| run(pick(b))))?;
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
        let few = (1..=self.few.len()).filter(|t| shape.m <= FEW_ROWS && l.n % (16 * t) == 0);
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

/// Dynamic shared memory of a product of few rows with `tiles` times 16 outputs a block: each warp's sums, padded.
fn few_shared(tiles: usize) -> u32 {
    (PRODUCT_WARPS * PRODUCT_ROWS * (16 * tiles + 8) * 4) as u32
}
