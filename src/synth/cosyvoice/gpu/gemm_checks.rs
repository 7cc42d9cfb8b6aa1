//! Whether the language model's GEMMs keep their promise, and what each tile configuration costs.
//!
//! The promise: a row's results are the same bits however many rows there are and whatever kernel is chosen.

use std::fmt;
use std::sync::Arc;

use super::device::{Buf, Device, Elt, GpuError, Timer};
use super::gemm::{Act, Conv, Gemm, NARROW, PARTS, Squares, Tile, WARPGROUP_TILES, WarpgroupTile};
use super::weights::{Packed, Packer, Random, Source};
use crate::synth::cosyvoice::backend::Hardware;
use crate::synth::cosyvoice::checkpoint::Part;

/// One GEMM of a layer: outputs and inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
}

/// What a GEMM costs with one kernel and tile configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct GemmCost {
    /// Which GEMM.
    pub size: Size,
    /// Rows.
    pub rows: usize,
    /// The kernel and its block shape.
    pub kernel: String,
    /// Seconds of one, many being started one after another.
    pub seconds: f64,
    /// Whether it is the one that the model takes; of warpgroup GEMMs it times them itself.
    pub chosen: bool,
}

impl fmt::Display for GemmCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flops = 2.0 * (self.rows * self.size.n * self.size.k) as f64;
        write!(
            f,
            "{:>5} x {:<5} {:>4} rows {:<14} {:>8.2} us {:>7.1} TFLOP/s {:>7.1} GB/s of weights{}",
            self.size.n,
            self.size.k,
            self.rows,
            self.kernel,
            self.seconds * 1e6,
            flops / self.seconds / 1e12,
            (self.size.n * self.size.k * 2) as f64 / self.seconds / 1e9,
            if self.chosen { " *" } else { "" }
        )
    }
}

/// Rows that tiled operands have room for here.
const ROOM: usize = 512;
const EPSILON: f32 = 1e-6;
/// Launches that are timed together.
const CHAIN: usize = 50;

/// A GEMM with operands of its own.
struct Bench {
    device: Arc<Device>,
    gemm: Gemm,
    w: Packed,
    size: Size,
    /// The same activations, rows one after another and tiled.
    plain: Buf,
    tiled: Buf,
    rms: Buf,
    squares: Buf,
    out: Buf,
    rounded: Buf,
}

/// Where common.cuh's `tiled` puts (row, column).
fn place(row: usize, col: usize) -> usize {
    let pair = (col & 31) >> 1;
    let piece = ((col >> 5) & 1) * 4 + (pair & 3);
    ((col >> 6) * ROOM + row) * 64 + ((piece ^ (row & 7)) << 3) + (pair >> 2) * 2 + (col & 1)
}

impl Bench {
    fn new(device: &Arc<Device>, elt: Elt, size: Size) -> Result<Self, GpuError> {
        let Size { n, k } = size;
        let source = Random { seed: (n * 31 + k) as u64 };
        let floats = |name: &str, shape: &[usize]| source.floats(Part::Llm, name, shape);
        let packer = Packer::new(device, elt)?;
        let bias = floats("bias", &[n])?;
        let w = packer.tiled(packer.whole(&floats("weight", &[n, k])?, n, k, 1, Some(&bias))?)?;
        // Exact in sixteen bits of either kind: eight bits of fraction.
        let bits = |v: f32| {
            let v = (v.clamp(-4.0, 4.0) * 32.0).round() / 32.0;
            match elt {
                Elt::F16 => half::f16::from_f32(v).to_bits(),
                _ => (v.to_bits() >> 16) as u16,
            }
        };
        let values: Vec<u16> = floats("embed", &[ROOM, k])?.iter().map(|&v| bits(v)).collect();
        let mut tiled = vec![0u16; ROOM * k];
        for (row, line) in values.chunks_exact(k).enumerate() {
            for (col, &v) in line.iter().enumerate() {
                tiled[place(row, col)] = v;
            }
        }
        Ok(Self {
            device: device.clone(),
            gemm: Gemm::with_warpgroup(device, elt)?,
            w,
            size,
            plain: device.upload("activations", &values)?,
            tiled: device.upload("activations", &tiled)?,
            rms: device.zeros("activations", ROOM * 4)?,
            squares: device.zeros("activations", PARTS * ROOM * 4)?,
            out: device.zeros("results", ROOM * n * 4)?,
            rounded: device.zeros("results", ROOM * n * 2)?,
        })
    }

    /// `rows` rows from `first` on, as the model runs a GEMM that follows a norm.
    fn plain(&self, first: usize, rows: usize, tile: Option<Tile>) -> Result<(), GpuError> {
        let Size { n, k } = self.size;
        let p = Conv {
            x: self.plain.ptr + (first * k * 2) as u64,
            out: self.out.ptr + (first * n * 4) as u64,
            ldx: k as i32,
            ldo: n as i32,
            rows: rows as i32,
            scale: 1.0,
            ..Conv::default()
        };
        match tile {
            None => self.gemm.linear(&self.w, p, Some((EPSILON, k)), self.rms.ptr),
            Some(tile) => self.gemm.split(&self.w, p, Some((EPSILON, k)), self.rms.ptr, tile),
        }
    }

    /// What a norm divides by, for tiled operands.
    fn squares(&self, rows: usize) -> Result<(), GpuError> {
        self.gemm.squares(self.tiled.ptr, self.squares.ptr, ROOM, rows, self.size.k)
    }

    fn tiled(&self, rows: usize, tile: WarpgroupTile) -> Result<(), GpuError> {
        let Size { n, k } = self.size;
        let p = Conv {
            x: self.tiled.ptr,
            out: self.out.ptr,
            ldx: ROOM as i32,
            ldo: n as i32,
            rows: rows as i32,
            scale: 1.0,
            ..Conv::default()
        };
        self.gemm.warpgroup(&self.w, p, Some((EPSILON, k)), Squares { inputs: self.squares.ptr, results: 0 }, tile)
    }

    /// The gated form, which writes rounded values only.
    fn gated(&self, rows: usize, tile: Option<WarpgroupTile>) -> Result<Vec<u16>, GpuError> {
        let Size { n, k } = self.size;
        self.device.fill_zero(self.rounded.ptr, self.rounded.bytes)?;
        let p = Conv { oute: self.rounded.ptr, act: Act::SiluGate, rows: rows as i32, scale: 1.0, ..Conv::default() };
        let norm = Some((EPSILON, k));
        match tile {
            Some(tile) => {
                let p = Conv { x: self.tiled.ptr, ldx: ROOM as i32, lde: ROOM as i32, ..p };
                self.squares(rows)?;
                self.gemm.warpgroup(&self.w, p, norm, Squares { inputs: self.squares.ptr, results: 0 }, tile)?;
            }
            None => {
                let p = Conv { x: self.plain.ptr, ldx: k as i32, lde: (n / 2) as i32, ..p };
                self.gemm.linear(&self.w, p, norm, self.rms.ptr)?;
            }
        }
        let mut all = vec![0u16; ROOM * n / 2];
        self.device.read(self.rounded.ptr, &mut all)?;
        let at = |row: usize, col: usize| if tile.is_some() { place(row, col) } else { row * n / 2 + col };
        Ok((0..rows * n / 2).map(|i| all[at(i / (n / 2), i % (n / 2))]).collect())
    }

    fn results(&self, rows: usize) -> Result<Vec<u32>, GpuError> {
        let mut out = vec![0u32; rows * self.size.n];
        self.device.read(self.out.ptr, &mut out)?;
        // What is not written must not look right the next time.
        self.device.fill_zero(self.out.ptr, self.out.bytes)?;
        Ok(out)
    }

    fn seconds(&self, mut run: impl FnMut() -> Result<(), GpuError>) -> Result<f64, GpuError> {
        let timer = Timer::new(&self.device)?;
        let mut times = Vec::new();
        for _ in 0..4 {
            timer.mark(0)?;
            for _ in 0..CHAIN {
                run()?;
            }
            timer.mark(1)?;
            times.push(timer.seconds()? / CHAIN as f64);
        }
        times.sort_by(f64::total_cmp);
        Ok(times[1])
    }
}

/// How the bits of each kernel differ from those of one row at a time: nothing when all agree. `size.n` and `size.k`
/// are multiples of 64.
///
/// # Errors
/// The device failed.
pub fn disagreements(ordinal: u32, hardware: &Hardware, size: Size) -> Result<Vec<String>, GpuError> {
    let device = Device::open(ordinal, hardware)?;
    let mut out = Vec::new();
    for elt in [Elt::Bf16, Elt::F16] {
        let bench = Bench::new(&device, elt, size)?;
        let rows = 200;
        for row in 0..rows {
            bench.plain(row, 1, None)?;
        }
        let alone = bench.results(rows)?;
        let check = |out: &mut Vec<String>, what: String, rows: usize| -> Result<(), GpuError> {
            let got = bench.results(rows)?;
            let wrong: Vec<usize> = (0..got.len()).filter(|&i| got[i] != alone[i]).collect();
            if let Some(&first) = wrong.first() {
                let (row, col) = (first / size.n, first % size.n);
                let value = |v: &[u32]| f32::from_bits(v[first]);
                let (a, b) = (value(&alone), value(&got));
                let count = wrong.len();
                out.push(format!("{elt:?} {size:?} {what}: {count} of {}, first {row},{col}: {a} {b}", got.len()));
            }
            Ok(())
        };
        for count in [8, 16, NARROW] {
            bench.plain(0, count, None)?;
            check(&mut out, format!("gemv of {count}"), count)?;
        }
        for tile in [Tile::Split64, Tile::Split128] {
            bench.plain(0, rows, Some(tile))?;
            check(&mut out, format!("{tile:?}"), rows)?;
        }
        if device.hopper {
            for tile in WARPGROUP_TILES.into_iter().filter(|tile| tile.fits(&bench.w)) {
                for count in [9, 33, 64, rows] {
                    bench.squares(count)?;
                    bench.tiled(count, tile)?;
                    check(&mut out, format!("{tile:?} of {count}"), count)?;
                }
                let (plain, tiled) = (bench.gated(NARROW, None)?, bench.gated(NARROW, Some(tile))?);
                if plain != tiled {
                    let wrong = plain.iter().zip(&tiled).filter(|(a, b)| a != b).count();
                    out.push(format!("{elt:?} {size:?} {tile:?} gated: {wrong} of {}", plain.len()));
                }
            }
        }
    }
    Ok(out)
}

/// What GEMMs of `sizes` cost with each kernel and tile configuration,  at `rows` rows.
///
/// # Errors
/// The device failed.
pub fn costs(ordinal: u32, hardware: &Hardware, sizes: &[Size], rows: &[usize]) -> Result<Vec<GemmCost>, GpuError> {
    let device = Device::open(ordinal, hardware)?;
    let mut out = Vec::new();
    for &size in sizes {
        let bench = Bench::new(&device, Elt::Bf16, size)?;
        for &rows in rows {
            let mut add = |kernel: String, seconds: f64, chosen: bool| {
                out.push(GemmCost { size, rows, kernel, seconds, chosen });
            };
            let tiled = bench.gemm.tiled(rows);
            let kernel = if rows <= NARROW { "gemv" } else { "split" };
            add(kernel.into(), bench.seconds(|| bench.plain(0, rows, None))?, !tiled);
            if tiled {
                bench.squares(rows)?;
                for tile in WARPGROUP_TILES.into_iter().filter(|tile| tile.fits(&bench.w)) {
                    add(format!("{tile:?}"), bench.seconds(|| bench.tiled(rows, tile))?, false);
                }
            }
        }
    }
    Ok(out)
}
