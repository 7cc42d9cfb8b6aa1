//! The GEMMs of a block: each through cuBLASLt, or through a kernel of ours where that was found faster.

use std::collections::HashMap;
use std::sync::Arc;

use super::super::compiler::Source;
use super::super::device::{Buf, Device, Elt, GpuError, Kernel, Module, Timer, start};
use super::super::gemm::{Act, Conv, Gemm, PLAIN, Tile};
use super::super::lt::{Lt, Operands, Shape};
use super::super::tuned::{Finding, Tuned};
use super::super::units;
use super::super::weights::Packed;
use super::Block;
use super::fp8::Fp8;

/// Rows of a block of a skinny GEMM, and warps that share its inputs; as in skinny.cu.
const SKINNY_BLOCK: usize = 56;
const SKINNY_WARPS: usize = 8;
/// Block shape of all GEMMs where a row's bits may not depend on the others'.
const SAME: Tile = Tile::N64T64;
/// Rows up to which those are tried, and the GEMMs of narrow.cu.
pub(super) const SKINNY_ROWS: usize = 400;
/// Frames of a chunk that a GEMM of narrow.cu has room for, blocks that share its inputs, as in narrow.cu and flow.cu.
const NARROW_FRAMES: usize = 56;
pub(super) const PARTS: usize = 4;
/// Inputs of a row that a block of two rows has room for at a time.
const NARROW_ROOM: usize = 512;

/// A kernel of narrow.cu.
#[derive(Clone, Copy)]
struct Narrow {
    name: &'static str,
    /// Outputs and inputs of a block.
    outputs: usize,
    inputs: usize,
    /// Whether other blocks have the rest of the inputs.
    shared: bool,
    /// Rows of chunks of a block.
    rows: usize,
}

impl Narrow {
    const fn new(name: &'static str, outputs: usize, inputs: usize, shared: bool, rows: usize) -> Self {
        Self { name, outputs, inputs, shared, rows }
    }

    /// Dynamic shared memory of a block: its weights and activations.
    fn memory(self) -> u32 {
        let held = if self.rows == 1 { self.inputs } else { self.inputs.min(NARROW_ROOM) };
        ((self.outputs * self.inputs + self.rows * NARROW_FRAMES * held) * 2) as u32
    }
}

const NARROW: [Narrow; 8] = [
    Narrow::new("narrow_48x1024", 48, 1024, false, 1),
    Narrow::new("narrow_32x1024", 32, 1024, false, 1),
    Narrow::new("shared_64x256", 64, 256, true, 1),
    Narrow::new("shared_64x512", 64, 512, true, 1),
    Narrow::new("narrow_48x1024_2", 48, 1024, false, 2),
    Narrow::new("narrow_32x1024_2", 32, 1024, false, 2),
    Narrow::new("shared_64x256_2", 64, 256, true, 2),
    Narrow::new("shared_64x512_2", 64, 512, true, 2),
];

/// One GEMM of a block, in the layouts it may run in.
pub(super) struct Linear {
    pub(super) packed: Packed,
    pub(super) plain: Option<(Buf, Buf)>,
    pub(super) fp8: Option<Fp8>,
    pub(super) n: usize,
    pub(super) k: usize,
}

/// A kernel of ours for a GEMM.
#[derive(Clone, Copy, Debug)]
pub(super) enum Choice {
    /// One of gemm.cu.
    Tile(Tile),
    /// A skinny GEMM: so many times 16 outputs a block.
    Skinny(usize),
    /// One of narrow.cu.
    Narrow(usize),
}

impl Choice {
    /// Whether it leaves parts for the norm that follows.
    fn shares(self) -> bool {
        matches!(self, Self::Narrow(which) if NARROW[which].shared)
    }
}

impl Finding for Option<Choice> {
    const KIND: &'static str = "own 2";
    const KERNELS: &'static [&'static Source] = &[&units::FLOW, &units::GEMM];

    fn to_bytes(self) -> Vec<u8> {
        match self {
            None => Vec::new(),
            Some(Choice::Tile(tile)) => vec![0, tile as u8],
            Some(Choice::Skinny(tiles)) => vec![1, tiles as u8],
            Some(Choice::Narrow(which)) => vec![2, which as u8],
        }
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        match *bytes {
            [] => Some(None),
            [0, tile] => PLAIN.into_iter().find(|known| *known as u8 == tile).map(|tile| Some(Choice::Tile(tile))),
            [1, tiles] => Some(Some(Choice::Skinny(usize::from(tiles)))),
            [2, which] => (usize::from(which) < NARROW.len()).then_some(Some(Choice::Narrow(usize::from(which)))),
            _ => None,
        }
    }
}

/// What is faster than cuBLASLt.
static CHOICES: Tuned<Option<Choice>> = Tuned::new();

/// One of a block's GEMMs.
pub(super) type Pick = fn(&Block) -> &Linear;

/// The norm that follows a GEMM; `true`: it adds up the parts of [`Linears::shares`].
pub(super) type Follow<'a> = &'a dyn Fn(&Linear, bool) -> Result<(), GpuError>;

/// A GEMM of every block, with its operands in the scratch: what [`Linears::prepare`] times.
pub(super) struct Kind<'a> {
    pub(super) pick: Pick,
    pub(super) x: u64,
    pub(super) y: u64,
    pub(super) gelu: bool,
    /// What is timed with it: a GEMM that leaves parts costs the norm more.
    pub(super) follow: Option<Follow<'a>>,
}

/// How the GEMMs run.
pub(super) struct Linears {
    pub(super) device: Arc<Device>,
    pub(super) gemm: Gemm,
    pub(super) lt: Option<Lt>,
    /// GEMMs that a kernel of ours does faster than cuBLASLt, found when they were prepared.
    pub(super) choices: HashMap<Shape, Choice>,
    /// Skinny GEMMs, blocks of 16, 32 and 48 outputs; none in single precision.
    pub(super) skinny: Vec<Kernel>,
    /// Those of narrow.cu; none where the device or a chunk's frames are not for them.
    pub(super) narrow: Vec<Kernel>,
    /// Frames of a chunk.
    pub(super) block: usize,
    /// What blocks that share a GEMM's inputs find: [`PARTS`] of [`SKINNY_ROWS`] rows.
    pub(super) parts: Buf,
    /// Rows from which GEMMs multiply numbers of 8 bits, if any do.
    pub(super) fp8_rows: Option<usize>,
}

/// The kernels of narrow.cu that `device` runs for chunks of `block` frames.
pub(super) fn narrow_kernels(
    device: &Device,
    module: &Module,
    elt: Elt,
    block: usize,
) -> Result<Vec<Kernel>, GpuError> {
    let most = NARROW.into_iter().map(Narrow::memory).max().unwrap_or(0);
    if !device.hopper || elt == Elt::F32 || block > NARROW_FRAMES || most > device.shared {
        return Ok(Vec::new());
    }
    NARROW.into_iter().map(|narrow| module.kernel(narrow.name, narrow.memory())).collect()
}

impl Linears {
    /// `rows` rows at `x` through `l` to `y`.
    pub(super) fn run(&self, l: &Linear, rows: usize, x: u64, y: u64, gelu: bool) -> Result<(), GpuError> {
        if let (Some(weight), Some(lt)) = (self.in_fp8(l, rows), &self.lt) {
            return lt.run(Shape { m: rows, n: l.n, k: l.k, gelu, fp8: true }, weight.operands(x, y));
        }
        let shape = Shape { m: rows, n: l.n, k: l.k, gelu, fp8: false };
        if self.device.invariant {
            // One block shape at every width: cuBLASLt picks by the rows, and so would timing.
            return self.own(l, SAME, shape, x, y);
        }
        match self.choices.get(&shape) {
            Some(&choice) => self.chosen(l, choice, shape, x, y),
            None => self.library(l, shape, x, y),
        }
    }

    /// The weight of the GEMM of `rows` rows, if it multiplies numbers of 8 bits.
    fn in_fp8<'a>(&self, l: &'a Linear, rows: usize) -> Option<&'a Fp8> {
        l.fp8.as_ref().filter(|_| self.fp8_rows.is_some_and(|least| rows >= least))
    }

    /// What the inputs of the GEMM of `rows` rows are multiplied with before they are rounded to 8 bits; zero: they are elements.
    pub(super) fn scale(&self, l: &Linear, rows: usize) -> f32 {
        self.in_fp8(l, rows).map_or(0.0, |weight| weight.inputs)
    }

    /// A GEMM through cuBLASLt, or through our kernels where it does not serve.
    fn library(&self, l: &Linear, shape: Shape, x: u64, y: u64) -> Result<(), GpuError> {
        match (&self.lt, &l.plain) {
            (Some(lt), Some((w, bias))) => lt.run(shape, Operands::whole(x, w.ptr, bias.ptr, y)),
            _ => self.own(l, Tile::N64T64, shape, x, y),
        }
    }

    fn chosen(&self, l: &Linear, choice: Choice, shape: Shape, x: u64, y: u64) -> Result<(), GpuError> {
        match choice {
            Choice::Tile(tile) => self.own(l, tile, shape, x, y),
            Choice::Skinny(tiles) => self.skinny(l, tiles, shape, x, y),
            Choice::Narrow(which) => self.narrow(l, which, shape, x, y),
        }
    }

    /// Whether the GEMM of `rows` rows leaves parts, without its bias, for the norm that follows it.
    pub(super) fn shares(&self, l: &Linear, rows: usize) -> bool {
        let shape = Shape { m: rows, n: l.n, k: l.k, gelu: false, fp8: false };
        // Of those in 8 bits no choice was made.
        !self.device.invariant && self.choices.get(&shape).is_some_and(|choice| choice.shares())
    }

    /// A GEMM of narrow.cu; to the parts where blocks share its inputs.
    fn narrow(&self, l: &Linear, which: usize, shape: Shape, x: u64, y: u64) -> Result<(), GpuError> {
        let Shape { m, n, k, gelu, .. } = shape;
        let (Some(kernel), Some((w, _)), Some(bias)) = (self.narrow.get(which), &l.plain, &l.packed.bias) else {
            return self.library(l, shape, x, y);
        };
        let narrow = NARROW[which];
        let (y, parts) = if narrow.shared { (self.parts.ptr, PARTS as u32) } else { (y, 1) };
        self.device.expect(2.0 * (m * n * k) as f64, 2.0 * (n * k + m * (n + k)) as f64);
        let grid = (n.div_ceil(narrow.outputs) as u32, m.div_ceil(narrow.rows * self.block) as u32, parts);
        start!(self.device, *kernel, grid, 256 * narrow.rows as u32, narrow.memory();
            x, w.ptr, bias.ptr, y, self.stride(), m as i32, n as i32, k as i32, i32::from(gelu))
    }

    /// Values from one of [`PARTS`] to the next.
    pub(super) fn stride(&self) -> i64 {
        (self.parts.bytes / (PARTS * 4)) as i64
    }

    /// The GEMMs of narrow.cu that fit: those that leave parts only where a norm follows, those of two rows where there are more.
    fn narrow_choices(&self, l: &Linear, shape: Shape, follow: bool) -> impl Iterator<Item = Choice> {
        let fits = shape.m <= SKINNY_ROWS && shape.m.is_multiple_of(self.block) && l.plain.is_some();
        let (n, k, count) = (l.n, l.k, if fits { self.narrow.len() } else { 0 });
        let rows = shape.m / self.block.max(1);
        let of = move |narrow: Narrow| {
            n.is_multiple_of(narrow.outputs)
                && k == if narrow.shared { PARTS * narrow.inputs } else { narrow.inputs }
                && (follow || !narrow.shared)
                && (narrow.rows == 1 || rows > 2)
        };
        (0..count).filter(move |&which| of(NARROW[which])).map(Choice::Narrow)
    }

    /// A skinny GEMM.
    fn skinny(&self, l: &Linear, tiles: usize, shape: Shape, x: u64, y: u64) -> Result<(), GpuError> {
        let Shape { m, n, k, gelu, .. } = shape;
        let (Some(kernel), Some(bias)) = (self.skinny.get(tiles - 1), &l.packed.bias) else {
            return self.library(l, shape, x, y);
        };
        self.device.expect(2.0 * (m * n * k) as f64, 2.0 * (n * k + m * (n + k)) as f64);
        let grid = (n.div_ceil(16 * tiles) as u32, m.div_ceil(SKINNY_BLOCK) as u32, 1);
        start!(self.device, *kernel, grid, 32 * SKINNY_WARPS as u32, skinny_shared(tiles);
            x, l.packed.w.ptr, bias.ptr, y, m as i32, n as i32, k as i32, i32::from(gelu))
    }

    fn own(&self, l: &Linear, tile: Tile, shape: Shape, x: u64, y: u64) -> Result<(), GpuError> {
        let Shape { m: rows, gelu, .. } = shape;
        let act = if gelu { Act::Gelu } else { Act::None };
        let (n, k) = (l.n as i32, l.k as i32);
        let p = Conv { x, ldx: k, oute: y, lde: n, ldo: n, rows: rows as i32, act, scale: 1.0, ..Conv::default() };
        self.gemm.conv(&l.packed, tile, 0, p)
    }

    /// Plans for the GEMMs of `rows` rows: cuBLASLt's fastest, or a kernel of ours that beats it.
    pub(super) fn prepare(&mut self, rows: usize, blocks: &[Block], kinds: &[Kind<'_>]) -> Result<(), GpuError> {
        let Some(block) = blocks.first().filter(|_| !self.device.invariant) else { return Ok(()) };
        let mut choices = Vec::new();
        for kind in kinds {
            let Kind { pick, x, y, gelu, .. } = *kind;
            let l = pick(block);
            let fp8 = self.in_fp8(l, rows);
            let shape = Shape { m: rows, n: l.n, k: l.k, gelu, fp8: fp8.is_some() };
            let (Some(lt), Some((w, bias))) = (&mut self.lt, &l.plain) else { return Ok(()) };
            if lt.prepared(shape) || self.choices.contains_key(&shape) {
                continue;
            }
            if let Some(weight) = fp8 {
                weight.prepare(lt, shape, x, y)?;
                continue;
            }
            lt.prepare(shape, Operands::whole(x, w.ptr, bias.ptr, y))?;
            let faster = CHOICES.of(&self.device, self.gemm.elt, shape, || self.faster(blocks, kind, shape))?;
            choices.extend(faster.map(|choice| (shape, choice)));
        }
        self.choices.extend(choices);
        Ok(())
    }

    /// A kernel of ours that is faster than the library at one of the GEMMs.
    fn faster(&self, blocks: &[Block], kind: &Kind<'_>, shape: Shape) -> Result<Option<Choice>, GpuError> {
        let Kind { pick, x, y, follow, .. } = *kind;
        let Some(l) = blocks.first().map(pick) else { return Ok(None) };
        let timer = Timer::new(&self.device)?;
        let time = |choice: Option<Choice>| -> Result<f64, GpuError> {
            let run = |l: &Linear| {
                match choice {
                    Some(choice) => self.chosen(l, choice, shape, x, y)?,
                    None => self.library(l, shape, x, y)?,
                }
                follow.map_or(Ok(()), |follow| follow(l, choice.is_some_and(Choice::shares)))
            };
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
        let mut best = (time(None)?, None);
        // Blocks of outputs that divide what there are, and inputs in groups of 32.
        let skinny = (1..=self.skinny.len()).filter(|t| shape.m <= SKINNY_ROWS && l.n % (16 * t) == 0);
        let skinny =
            skinny.filter(|_| l.k % 32 == 0 && l.packed.cin == l.k).filter(|&t| skinny_shared(t) <= self.device.shared);
        let tiles = PLAIN.into_iter().filter(|&tile| self.gemm.takes(&l.packed, tile)).map(Choice::Tile);
        let narrow = self.narrow_choices(l, shape, follow.is_some());
        for choice in tiles.chain(skinny.map(Choice::Skinny)).chain(narrow) {
            let seconds = time(Some(choice))?;
            if seconds < best.0 {
                best = (seconds, Some(choice));
            }
        }
        Ok(best.1)
    }
}

/// Dynamic shared memory of a skinny GEMM with `tiles` times 16 outputs a block: each warp's sums, padded.
fn skinny_shared(tiles: usize) -> u32 {
    (SKINNY_WARPS * SKINNY_BLOCK * (16 * tiles + 8) * 4) as u32
}
