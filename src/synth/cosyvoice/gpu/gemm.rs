//! GEMMs and causal convolutions with packed weights: chooses the kernel of gemm.cu and fills its parameters.
//!
//! # Why
//! The language model's sums run in one order whatever the batch ([`Gemm::linear`]), so a token does not depend on
//! what else is decoded. On Hopper many rows go through warpgroup GEMMs ([`Gemm::warpgroup`]), whose sums are the same
//! bits; on any other device, through the kernels that split. cuBLASLt picks
//! kernels by shape and cannot promise that; it serves the flow alone. Because all tile configurations of a warpgroup GEMM
//! give the same bits, which one runs may be timed at every load.

mod tiles;

use std::sync::Arc;

use self::tiles::{Groups, Room, Window};
pub(super) use self::tiles::{PARTS, PLAIN, Tile, TileEntry, WARPGROUP_TILES, WHOLE_PARTS, WarpgroupTile};
use super::device::{Device, Elt, GpuError, Kernel, start};
use super::mirror::mirrored;
use super::units;
use super::weights::Packed;

/// What happens to a result before it is stored; values are those of gemm.cuh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum Act {
    #[default]
    None = 0,
    Snake = 1,
    Leaky = 2,
    Mish = 3,
    SiluGate = 4,
    Gelu = 5,
}

/// `Conv` of gemm.cuh. Null pointers leave a feature out.
///
/// Why this struct is large: one kernel does every convolution and GEMM, and this is all it is told.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Conv {
    pub(super) x: u64,
    pub(super) w: u64,
    pub(super) bias: u64,
    pub(super) tiles: u64,
    pub(super) hist_in: u64,
    pub(super) hist_out: u64,
    pub(super) res: u64,
    pub(super) post: u64,
    pub(super) sum: u64,
    pub(super) out: u64,
    pub(super) oute: u64,
    pub(super) alpha: u64,
    pub(super) rowscale: u64,
    pub(super) hist_off: i64,
    pub(super) ldx: i32,
    pub(super) ldo: i32,
    pub(super) lde: i32,
    pub(super) rows: i32,
    pub(super) cin: i32,
    pub(super) taps: i32,
    pub(super) dil: i32,
    pub(super) n: i32,
    pub(super) group: i32,
    pub(super) act: Act,
    pub(super) scale: f32,
    pub(super) slope: f32,
    pub(super) eps: f32,
    pub(super) kreal: i32,
}

mirrored!(Conv as "Conv" {
    x, w, bias, tiles, hist_in, hist_out, res, post, sum, out, oute, alpha, rowscale, hist_off, ldx, ldo, lde, rows, cin,
    taps, dil, n, group, act, scale, slope, eps, kreal,
});

/// Sums of squares of rows, `[part][rows]` as warpgroup.cu has them: those of the inputs, which a norm needs, and where
/// those of the results go. Null: none.
#[derive(Clone, Copy, Default)]
pub(super) struct Squares {
    pub(super) inputs: u64,
    pub(super) results: u64,
}

/// The macros of gemm.cu where a block may ask for `shared` bytes.
pub(super) fn defines(shared: u32) -> [(&'static str, i64); 3] {
    Room::of(shared).defines()
}

/// The kernels of gemm.cu and gemv.cu and, on Hopper, of warpgroup.cu.
pub(super) struct Gemm {
    device: Arc<Device>,
    pub(super) elt: Elt,
    room: Room,
    conv: [Kernel; 8],
    /// For three convolutions at once: 64 x 32, 64 x 128, 128 x 128.
    three: [Kernel; 3],
    /// 64 x 32 for few blocks, by what [`Groups`] says; then for three at once.
    grouped: [[Kernel; 2]; 2],
    gemv: [Kernel; 5],
    /// On Hopper: `gemv` with all of a block's weights in flight, for short inputs and for long ones; for eight
    /// rows, then for sixteen.
    ahead: Option<[[Kernel; 2]; 2]>,
    rms: Kernel,
    warpgroup: Option<([Kernel; WARPGROUP_TILES.len()], Kernel)>,
}

/// Most rows that go through `gemv`.
pub(super) const NARROW: usize = 32;
/// Most rows that do where there are warpgroup GEMMs.
pub(super) const SKINNY: usize = 16;
/// Inputs up to which a skinny GEMM needs few registers.
const SHORT: usize = 1024;
/// Most shared memory that weights in flight may take, tiles of a block, and inputs, as in gemv.cu.
const AHEAD_SHARED: u32 = 200 << 10;
const AHEAD_TILES: usize = 8;
const AHEAD_INPUTS: usize = 5 * 64 * PARTS;

impl Gemm {
    pub(super) fn new(device: &Arc<Device>, elt: Elt) -> Result<Self, GpuError> {
        let room = Room::of(device.shared);
        let module = device.compile(&units::GEMM, elt, &room.defines())?;
        let rms = module.kernel("row_rms", 0)?;
        if elt == Elt::F32 {
            let plain = module.kernel("conv_f32", room.bytes)?;
            return Ok(Self {
                device: device.clone(),
                elt,
                room,
                conv: [plain; 8],
                three: [plain; 3],
                grouped: [[plain; 2]; 2],
                gemv: [plain; 5],
                ahead: None,
                rms,
                warpgroup: None,
            });
        }
        let conv = |name: &'static str| module.kernel(name, room.bytes);
        Ok(Self {
            device: device.clone(),
            elt,
            room,
            conv: [
                conv("conv_32x32")?,
                conv("conv_64x32")?,
                conv("conv_64x64")?,
                conv("conv_64x128")?,
                conv("conv_128x128")?,
                conv("conv_32x128")?,
                conv("split_64x32")?,
                conv("split_128x64")?,
            ],
            three: [conv("three_64x32")?, conv("three_64x128")?, conv("three_128x128")?],
            grouped: [[conv("conv_64x32_2")?, conv("conv_64x32_4")?], [conv("three_64x32_2")?, conv("three_64x32_4")?]],
            gemv: [
                module.kernel("gemv_8", 0)?,
                module.kernel("gemv_16", 0)?,
                module.kernel("gemv_32", 0)?,
                module.kernel("gemv_8s", 0)?,
                module.kernel("gemv_16s", 0)?,
            ],
            ahead: if device.hopper {
                let ahead = |name: &'static str| module.kernel(name, AHEAD_SHARED);
                Some([
                    [ahead("gemv_ahead_2x8")?, ahead("gemv_ahead_10x8")?],
                    [ahead("gemv_ahead_2x16")?, ahead("gemv_ahead_10x16")?],
                ])
            } else {
                None
            },
            rms,
            warpgroup: None,
        })
    }

    /// As [`Self::new`], with warpgroup GEMMs where the device has them.
    pub(super) fn with_warpgroup(device: &Arc<Device>, elt: Elt) -> Result<Self, GpuError> {
        let mut this = Self::new(device, elt)?;
        if device.hopper && elt != Elt::F32 {
            let module = device.compile(&units::WARPGROUP, elt, &[])?;
            let mut all = [this.rms; WARPGROUP_TILES.len()];
            for (to, tile) in all.iter_mut().zip(WARPGROUP_TILES) {
                *to = module.kernel(tile.kernel(), tile.shared())?;
            }
            this.warpgroup = Some((all, module.kernel("warpgroup_squares", 0)?));
        }
        Ok(this)
    }

    /// Whether operands of `rows` rows are to be tiled, for [`Self::warpgroup`]; else [`Self::linear`].
    pub(super) fn tiled(&self, rows: usize) -> bool {
        self.warpgroup.is_some() && rows > SKINNY
    }

    /// As [`Self::linear`], to the bit, for tiled operands (common.cuh): `p.ldx` and `p.lde` are the rows that there
    /// is room for, a multiple of 128 as the tallest blocks. Only where [`Self::tiled`], for weights with a tiled copy.
    pub(super) fn warpgroup(
        &self,
        w: &Packed,
        p: Conv,
        norm: Option<(f32, usize)>,
        squares: Squares,
        tile: WarpgroupTile,
    ) -> Result<(), GpuError> {
        let (Some((kernels, _)), Some(tiled)) = (&self.warpgroup, &w.tiled) else {
            return Err(GpuError::Model("tiled GEMMs need a Hopper device and tiled weights".into()));
        };
        let (eps, width) = norm.unwrap_or((0.0, 0));
        let p = Conv {
            w: tiled.ptr,
            bias: w.bias.as_ref().map_or(0, |b| b.ptr),
            cin: w.cin as i32,
            n: w.n as i32,
            eps,
            kreal: width as i32,
            ..p
        };
        if !tile.fits(w) {
            return Err(GpuError::Model(format!("{tile:?} is not for {} inputs", w.cin)));
        }
        let (outputs, rows, _) = tile.shape();
        let cluster = tile.cluster();
        let grid = (cluster, (p.rows as usize).div_ceil(rows) as u32, w.n.div_ceil(outputs) as u32);
        let Squares { inputs, results } = squares;
        let args = [
            std::ptr::from_ref(&p).cast::<std::ffi::c_void>(),
            std::ptr::from_ref(&inputs).cast(),
            std::ptr::from_ref(&results).cast(),
        ];
        // SAFETY: the kernels' parameters are a `Conv` and two addresses; all are of buffers of the calling model.
        unsafe {
            self.device.launch(
                kernels[tile as usize].called(w.name),
                cluster,
                grid,
                tile.threads(),
                tile.shared(),
                &args,
            )
        }
    }

    /// Squares of `rows` tiled rows at `x`, in a layout `height` rows high, that no GEMM handed on.
    pub(super) fn squares(&self, x: u64, out: u64, height: usize, rows: usize, k: usize) -> Result<(), GpuError> {
        let Some((_, squares)) = self.warpgroup else {
            return Err(GpuError::Model("tiled operands need a Hopper device".into()));
        };
        let grid = (rows.div_ceil(64) as u32, PARTS as u32, 1);
        start!(self.device, squares, grid, 256, 0; x, out, height as i32, rows as i32, k as i32)
    }

    /// Positions of a block of `tile`, which tile tables are cut by.
    pub(super) fn positions(&self, tile: Tile) -> usize {
        if self.elt == Elt::F32 { 64 } else { tile.shape().1 }
    }

    /// Runs up to three convolutions of equally many outputs over the same tile table, side by side. None reads what
    /// another writes.
    pub(super) fn side_by_side(&self, convs: &[(&Packed, Conv)], tile: Tile, blocks: usize) -> Result<(), GpuError> {
        let which = match tile {
            Tile::N64T32 => 0,
            Tile::N64T128 => 1,
            Tile::N128T128 => 2,
            _ => usize::MAX,
        };
        let Some(kernel) = self.three.get(which).filter(|_| self.elt != Elt::F32 && convs.len() <= 3) else {
            return convs.iter().try_for_each(|(w, p)| self.conv(w, tile, blocks, *p));
        };
        let (each, positions) = tile.shape();
        let outputs = convs.iter().map(|(w, _)| w.n).max().unwrap_or(0);
        let grid = (blocks as u32, outputs.div_ceil(each) as u32, convs.len() as u32);
        let shared =
            |groups| convs.iter().map(|(w, _)| Window::of(w).shared(tile, groups, self.room)).max().unwrap_or(0);
        let groups = self.groups(tile, grid, shared);
        let kernel = groups.index().map_or(*kernel, |g| self.grouped[1][g]);
        let mut all = [Conv::default(); 3];
        for (to, (w, p)) in all.iter_mut().zip(convs) {
            *to = Self::filled(w, *p);
        }
        self.expect(convs, blocks * positions);
        start!(self.device, kernel, grid, self.room.threads(tile) * groups as u32, shared(groups); all)
    }

    /// How many groups of warps share a block's sums: more where there are few blocks, unless bits are to be equal.
    fn groups(&self, tile: Tile, grid: (u32, u32, u32), shared: impl Fn(Groups) -> u32) -> Groups {
        match self.device.invariant {
            true => Groups::One,
            false => Groups::of(tile, grid, self.device.multiprocessors, self.room.bytes, shared),
        }
    }

    /// Says what convolutions over at most `rows` positions cannot do without.
    fn expect(&self, convs: &[(&Packed, Conv)], rows: usize) {
        if !self.device.traced() {
            return;
        }
        let (mut flops, mut bytes) = (0.0, 0.0);
        for (w, p) in convs {
            let rows = if p.rows > 0 { p.rows as usize } else { rows };
            let results = rows * w.n;
            // Inputs once; what is added, and what is stored, where there is any.
            let singles = [p.res, p.post, p.sum, p.out].iter().filter(|ptr| **ptr != 0).count();
            let per = 4 * singles + if p.oute != 0 { self.elt.size() } else { 0 };
            flops += 2.0 * (results * w.cin * w.taps) as f64;
            bytes += (w.w.bytes + rows * w.cin * self.elt.size() + results * per) as f64;
        }
        self.device.expect(flops, bytes);
    }

    /// `p` with what its weights say.
    fn filled(w: &Packed, p: Conv) -> Conv {
        Conv {
            w: w.w.ptr,
            bias: w.bias.as_ref().map_or(0, |b| b.ptr),
            cin: w.cin as i32,
            taps: w.taps as i32,
            dil: w.dil as i32,
            n: w.n as i32,
            group: w.group as i32,
            ..p
        }
    }

    /// Whether a convolution with these weights can run in blocks of `tile`.
    pub(super) fn takes(&self, w: &Packed, tile: Tile) -> bool {
        let window = Window::of(w);
        let shared =
            if self.elt == Elt::F32 { window.shared_f32() } else { window.shared(tile, Groups::One, self.room) };
        shared <= self.room.bytes
    }

    /// Runs a convolution over `blocks` entries of the tile table in `p`, or over `p.rows` rows where it has none.
    pub(super) fn conv(&self, w: &Packed, tile: Tile, blocks: usize, p: Conv) -> Result<(), GpuError> {
        let (outputs, positions) = if self.elt == Elt::F32 { (64, 64) } else { tile.shape() };
        let p = Self::filled(w, p);
        self.expect(&[(w, p)], blocks * positions);
        let blocks = if p.tiles == 0 { (p.rows as usize).div_ceil(positions) } else { blocks };
        let grid = (blocks as u32, w.n.div_ceil(outputs) as u32, 1);
        if self.elt == Elt::F32 {
            return start!(self.device, self.conv[0].called(w.name), grid, 256, Window::of(w).shared_f32(); p);
        }
        let shared = |groups| Window::of(w).shared(tile, groups, self.room);
        let groups = self.groups(tile, grid, shared);
        let kernel = groups.index().map_or(self.conv[tile as usize], |g| self.grouped[0][g]);
        let threads = self.room.threads(tile) * groups as u32;
        start!(self.device, kernel.called(w.name), grid, threads, shared(groups); p)
    }

    /// `p.rows` rows through `w` with an order of sums that does not depend on how many there are. With
    /// `norm = (epsilon, width)` each row is divided by its root mean square; `rms` is room for one value a row.
    pub(super) fn linear(&self, w: &Packed, p: Conv, norm: Option<(f32, usize)>, rms: u64) -> Result<(), GpuError> {
        let rows = p.rows as usize;
        let (eps, width) = norm.unwrap_or((0.0, 0));
        if self.elt != Elt::F32 && rows <= NARROW {
            let p = Conv {
                w: w.w.ptr,
                bias: w.bias.as_ref().map_or(0, |b| b.ptr),
                cin: w.cin as i32,
                taps: 1,
                dil: 1,
                n: w.n as i32,
                eps,
                kreal: width as i32,
                ..p
            };
            let short = if w.cin <= SHORT { 3 } else { 0 };
            let which = if rows <= 8 {
                short
            } else if rows <= 16 {
                short + 1
            } else {
                2
            };
            // As many blocks as run at once, each with as many tiles of outputs as any other.
            let (tiles, blocks) = (w.n / 16, if which > 2 { 2 } else { 1 });
            let each = tiles.div_ceil(self.device.multiprocessors * blocks);
            let grid = (tiles.div_ceil(each) as u32, 1, 1);
            // Where a multiprocessor's blocks have room for all of their weights, these are in flight from the start.
            let shared = each * w.cin * 32;
            if let Some(kernels) = &self.ahead
                && rows <= SKINNY
                && each <= AHEAD_TILES
                && w.cin <= AHEAD_INPUTS
                && shared * blocks <= AHEAD_SHARED as usize
            {
                let kernel = kernels[usize::from(rows > 8)][usize::from(w.cin > SHORT)].called(w.name);
                return start!(self.device, kernel, grid, 512, shared as u32; p);
            }
            return start!(self.device, self.gemv[which].called(w.name), grid, 512, 0; p);
        }
        let many = w.n >= 2048 && rows > 64 || rows > 512;
        self.split(w, p, norm, rms, if many { Tile::Split128 } else { Tile::Split64 })
    }

    /// As [`Self::linear`] for many rows, by a given block shape that splits.
    pub(super) fn split(
        &self,
        w: &Packed,
        mut p: Conv,
        norm: Option<(f32, usize)>,
        rms: u64,
        tile: Tile,
    ) -> Result<(), GpuError> {
        if let Some((eps, width)) = norm {
            let (per, threads) = if self.elt == Elt::F32 { (1, 32) } else { (8, 512) };
            let grid = ((p.rows as usize).div_ceil(per) as u32, 1, 1);
            let (r, k, ldx, real) = (p.rows, w.cin as i32, p.ldx, width as i32);
            start!(self.device, self.rms, grid, threads, 0; p.x, rms, r, k, ldx, real, eps)?;
            p.rowscale = rms;
        }
        self.conv(w, tile, 0, p)
    }
}
