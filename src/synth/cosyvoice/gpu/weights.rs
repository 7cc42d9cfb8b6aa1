//! Weights on the device, in the layouts of the kernels.
//!
//! Values come as f32 from a [`Source`]; the device converts and reorders them, so that a load is bound by reading.

use std::sync::Arc;

use super::device::{Buf, Device, Elt, GpuError, Kernel, start};
use super::units;
use crate::synth::cosyvoice::checkpoint::{Checkpoint, Part, fold_weight_norm};

/// Where values come from: a checkpoint, or a generator when only speed matters.
pub trait Source {
    /// The values of `key`, row-major.
    ///
    /// # Errors
    /// There is no such tensor of that shape.
    fn floats(&self, part: Part, key: &str, shape: &[usize]) -> Result<Vec<f32>, GpuError>;

    /// A convolution's weight `[out, in/groups, kernel]` with weight norm folded in double, and its bias.
    ///
    /// # Errors
    /// As [`Self::floats`].
    fn convolution_f64(&self, part: Part, name: &str, shape: [usize; 3]) -> Result<(Vec<f64>, Vec<f32>), GpuError>;

    /// As [`Self::convolution_f64`], rounded.
    ///
    /// # Errors
    /// As [`Self::floats`].
    fn convolution(&self, part: Part, name: &str, shape: [usize; 3]) -> Result<(Vec<f32>, Vec<f32>), GpuError> {
        let (weight, bias) = self.convolution_f64(part, name, shape)?;
        Ok((weight.into_iter().map(|v| v as f32).collect(), bias))
    }
}

impl Source for Checkpoint {
    fn floats(&self, part: Part, key: &str, shape: &[usize]) -> Result<Vec<f32>, GpuError> {
        self.part(part).floats(key, shape).map_err(|e| GpuError::Model(e.to_string()))
    }

    fn convolution_f64(&self, part: Part, name: &str, shape: [usize; 3]) -> Result<(Vec<f64>, Vec<f32>), GpuError> {
        self.part(part).convolution_f64(name, shape).map_err(|e| GpuError::Model(e.to_string()))
    }
}

/// Values that make a network of the right size whose activations stay near one; for measuring.
pub struct Random {
    /// Changes every value.
    pub seed: u64,
}

impl Random {
    fn values(&self, key: &str, count: usize, deviation: f32, mean: f32) -> Vec<f32> {
        let start = key
            .bytes()
            .fold(self.seed ^ 0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        // Two uniform values a sample; their spread is what matters, not their shape.
        let scale = deviation * 3f32.sqrt() / 32768.0;
        let mut out = Vec::with_capacity(count + 3);
        let mut x = start | 1;
        while out.len() < count {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            let y = x.wrapping_mul(0x2545_f491_4f6c_dd1d);
            for shift in [0, 16, 32, 48] {
                out.push(f32::from((y >> shift) as u16 as i16) * scale + mean);
            }
        }
        out.truncate(count);
        out
    }
}

impl Source for Random {
    fn floats(&self, _: Part, key: &str, shape: &[usize]) -> Result<Vec<f32>, GpuError> {
        let count = shape.iter().product();
        let fan: usize = shape.iter().skip(1).product();
        let (deviation, mean) = match () {
            () if key.ends_with("alpha") => (0.2, 1.0),
            () if key.ends_with("norm.weight") => (0.05, 1.0),
            () if key.contains("embed") && shape.len() == 2 && !key.contains("proj") && !key.contains("time") => {
                (1.0, 0.0)
            }
            () if shape.len() == 1 => (0.02, 0.0),
            () if key.contains("norm.linear") || key.contains("norm_out") => (0.3 / (fan as f32).sqrt(), 0.0),
            () => (1.0 / (fan as f32).sqrt(), 0.0),
        };
        Ok(self.values(key, count, deviation, mean))
    }

    fn convolution_f64(&self, _: Part, name: &str, shape: [usize; 3]) -> Result<(Vec<f64>, Vec<f32>), GpuError> {
        let row = shape[1] * shape[2];
        // Residual branches add up over a stage; half their natural gain keeps the sum near one.
        let gain = if name.contains("resblocks") { 0.4 } else { 0.8 };
        let direction = self.values(name, shape[0] * row, 1.0, 0.0);
        Ok((
            fold_weight_norm(&vec![gain; shape[0]], &direction, row),
            self.values(&format!("{name}.bias"), shape[0], 0.02, 0.0),
        ))
    }
}

/// `n` rounded up to a multiple of `to`.
pub(super) fn round_up(n: usize, to: usize) -> usize {
    n.div_ceil(to) * to
}

/// Channels of a row: a multiple of what a step of a GEMM takes.
pub(super) fn padded(channels: usize) -> usize {
    round_up(channels, 32)
}

/// A packed operand of gemm.cu with its sizes.
pub(super) struct Packed {
    /// What its GEMMs are listed as when launches are timed; empty: as their kernel.
    pub(super) name: &'static str,
    pub(super) w: Buf,
    /// The same as warpgroup.cu takes them.
    pub(super) tiled: Option<Buf>,
    pub(super) bias: Option<Buf>,
    /// Outputs, a multiple of 32.
    pub(super) n: usize,
    /// Input channels a group, a multiple of 32.
    pub(super) cin: usize,
    pub(super) taps: usize,
    pub(super) dil: usize,
    /// Outputs a group; 0 for one group.
    pub(super) group: usize,
}

/// Part of the outputs of a [`Packed`]: `values` `[n][cin][taps]`, output `i` becoming row `i * mul + off`.
pub(super) struct Piece<'a> {
    pub(super) values: &'a [f32],
    pub(super) n: usize,
    pub(super) mul: usize,
    pub(super) off: usize,
}

/// Makes device layouts. Temporary buffers live for one call.
pub(super) struct Packer {
    pub(super) device: Arc<Device>,
    pub(super) elt: Elt,
    pack: Kernel,
    convert: Kernel,
    linear: Kernel,
    /// None in single precision.
    tile: Option<Kernel>,
    /// None where nothing has 8 bits.
    fp8: Option<Kernel>,
}

impl Packer {
    pub(super) fn new(device: &Arc<Device>, elt: Elt) -> Result<Self, GpuError> {
        let module = device.compile(&units::SETUP, elt, &[])?;
        Ok(Self {
            device: device.clone(),
            elt,
            pack: module.kernel("pack", 0)?,
            convert: module.kernel("convert", 0)?,
            linear: module.kernel("linear_exact", 0)?,
            tile: if elt == Elt::F32 { None } else { Some(module.kernel("tile_weights", 0)?) },
            fp8: device.modes.products.fp8().then(|| module.kernel("convert_fp8", 0)).transpose()?,
        })
    }

    /// Packs one group's worth of layout from pieces. `scale`: one factor per input channel.
    pub(super) fn pack(
        &self,
        pieces: &[Piece<'_>],
        n: usize,
        cin: usize,
        taps: usize,
        bias: Option<&[f32]>,
        scale: Option<&[f32]>,
    ) -> Result<Packed, GpuError> {
        self.pack_groups(pieces, n, cin, taps, 1, bias, scale)
    }

    /// As [`Self::pack`] with `groups` groups of outputs, each over its own `cin` channels. Groups narrower than a
    /// block of 64 outputs are merged, other groups' weights being zero.
    #[expect(clippy::too_many_arguments, reason = "the sizes of one operand")]
    pub(super) fn pack_groups(
        &self,
        pieces: &[Piece<'_>],
        n: usize,
        cin: usize,
        taps: usize,
        groups: usize,
        bias: Option<&[f32]>,
        scale: Option<&[f32]>,
    ) -> Result<Packed, GpuError> {
        let coutg = n / groups;
        let merge = if groups == 1 { 1 } else { (64 / coutg.min(64)).min(groups) };
        if groups > 1 && (!(coutg * merge).is_multiple_of(64) || !groups.is_multiple_of(merge)) {
            return Err(GpuError::Model(format!("{groups} groups of {coutg} channels cannot be laid out")));
        }
        let (npad, cinpad) = (padded(n), padded(cin * merge));
        let w = self.device.zeros("weights", npad * cinpad * taps * self.elt.size())?;
        let scale = scale.map(|s| self.device.upload("a scale", s)).transpose()?;
        for p in pieces {
            let count = p.n * cin * taps;
            if p.values.len() != count {
                return Err(GpuError::Model(format!("a weight has {} values, expected {count}", p.values.len())));
            }
            let src = self.device.upload("a weight", p.values)?;
            let grid = (count.div_ceil(256) as u32, 1, 1);
            let scale = scale.as_ref().map_or(0u64, |s| s.ptr);
            let i = |v: usize| v as i32;
            start!(self.device, self.pack, grid, 256, 0;
                src.ptr, w.ptr, scale, i(p.n), i(cin), i(taps), i(cinpad), i(npad), i(p.mul), i(p.off), i(coutg), i(merge))?;
            self.device.sync()?;
        }
        let bias = match bias {
            Some(bias) => {
                let mut values = bias.to_vec();
                values.resize(npad, 0.0);
                Some(self.device.upload("a bias", &values)?)
            }
            None => None,
        };
        let group = if groups == 1 || groups == merge { 0 } else { coutg * merge };
        Ok(Packed { name: "", w, tiled: None, bias, n: npad, cin: cinpad, taps, dil: 1, group })
    }

    /// One plain operand.
    pub(super) fn whole(
        &self,
        values: &[f32],
        n: usize,
        cin: usize,
        taps: usize,
        bias: Option<&[f32]>,
    ) -> Result<Packed, GpuError> {
        self.pack(&[Piece { values, n, mul: 1, off: 0 }], n, cin, taps, bias, None)
    }

    /// `w` with a second copy for warpgroup GEMMs, where the device has them and the size fits.
    pub(super) fn tiled(&self, w: Packed) -> Result<Packed, GpuError> {
        let Some(tile) = self.tile.filter(|_| self.device.hopper && w.taps == 1 && w.cin.is_multiple_of(64)) else {
            return Ok(w);
        };
        let height = round_up(w.n, 128);
        let tiled = self.device.zeros("weights", height * w.cin * self.elt.size())?;
        let grid = ((w.n * w.cin / 8).div_ceil(256) as u32, 1, 1);
        start!(self.device, tile, grid, 256, 0; w.w.ptr, tiled.ptr, w.n as i32, w.cin as i32, height as i32)?;
        self.device.sync()?;
        Ok(Packed { tiled: Some(tiled), ..w })
    }

    /// The values as elements, in their own order.
    pub(super) fn elements(&self, values: &[f32]) -> Result<Buf, GpuError> {
        let src = self.device.upload("a weight", values)?;
        let dst = self.device.alloc("weights", values.len() * self.elt.size())?;
        let grid = (values.len().div_ceil(256) as u32, 1, 1);
        start!(self.device, self.convert, grid, 256, 0; src.ptr, dst.ptr, values.len() as i64)?;
        self.device.sync()?;
        Ok(dst)
    }

    /// An even number of values, times `by`, in 8 bits, in their own order.
    pub(super) fn fp8(&self, values: &[f32], by: f32) -> Result<Buf, GpuError> {
        let Some(convert) = self.fp8.filter(|_| values.len().is_multiple_of(2)) else {
            return Err(GpuError::Model("a weight that is to have 8 bits cannot be converted".into()));
        };
        let src = self.device.upload("a weight", values)?;
        let dst = self.device.alloc("weights", values.len())?;
        let pairs = values.len() / 2;
        start!(self.device, convert, (pairs.div_ceil(256) as u32, 1, 1), 256, 0; src.ptr, dst.ptr, pairs as i64, by)?;
        self.device.sync()?;
        Ok(dst)
    }

    /// `y[m * stride..][n] = x w^T + bias`, exact to single precision; for what is folded at load.
    #[expect(clippy::too_many_arguments, reason = "the sizes and places of one GEMM")]
    pub(super) fn linear(
        &self,
        x: &Buf,
        m: usize,
        w: &[f32],
        bias: &[f32],
        k: usize,
        y: u64,
        stride: usize,
    ) -> Result<(), GpuError> {
        let n = bias.len();
        let (w, bias) = (self.device.upload("a weight", w)?, self.device.upload("a bias", bias)?);
        let grid = ((m * n * 32).div_ceil(256) as u32, 1, 1);
        start!(self.device, self.linear, grid, 256, 0;
            x.ptr, w.ptr, bias.ptr, y, m as i32, n as i32, k as i32, stride as i64)?;
        self.device.sync()
    }
}
