//! What the three networks share: layers over `[frames, channels]` tensors on the CPU.
//!
//! # Why
//! Time is the leading axis everywhere, so that a causal convolution's window is a concatenation of contiguous
//! rows and one product, a history is a slice, and per-channel parameters broadcast along the last axis.

use candle_core::{DType, Device, Result, Tensor};

use crate::synth::cosyvoice::checkpoint::{CheckpointError, TensorFile};

/// Why a network cannot be built from a checkpoint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The checkpoint lacks something.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The sizes cannot be read.
    #[error(transparent)]
    Config(#[from] crate::synth::cosyvoice::config::ConfigError),
    /// The device failed.
    #[error("device: {0}")]
    Device(#[from] candle_core::Error),
}

/// `x W + b`.
///
/// # Why
/// Files hold `[out, in]`; kept as `[in, out]` a product of few rows, which is bound by reading the weight, is
/// several times faster.
#[derive(Clone)]
pub(super) struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    /// Reads `name.weight` and, if asked, `name.bias`.
    pub(super) fn load(
        file: &TensorFile,
        name: &str,
        out: usize,
        inp: usize,
        bias: bool,
    ) -> std::result::Result<Self, LoadError> {
        Self::stack(file, &[(name, out)], inp, bias)
    }

    /// Several layers with the same input as one: outputs follow each other.
    pub(super) fn stack(
        file: &TensorFile,
        parts: &[(&str, usize)],
        inp: usize,
        bias: bool,
    ) -> std::result::Result<Self, LoadError> {
        let outs: usize = parts.iter().map(|(_, out)| out).sum();
        let mut weight = vec![0f32; outs * inp];
        let mut from = 0;
        let mut biases = Vec::with_capacity(if bias { outs } else { 0 });
        for &(name, out) in parts {
            transpose(&file.floats(&format!("{name}.weight"), &[out, inp])?, inp, &mut weight, outs, from);
            from += out;
            if bias {
                biases.extend_from_slice(&file.floats(&format!("{name}.bias"), &[out])?);
            }
        }
        let weight = Tensor::from_vec(weight, (inp, outs), &Device::Cpu)?;
        let bias = if bias { Some(Tensor::from_vec(biases, outs, &Device::Cpu)?) } else { None };
        Ok(Self { weight, bias })
    }

    /// From a weight `[out, in]` alone.
    pub(super) fn from_weight(weight: &Tensor) -> Result<Self> {
        Ok(Self { weight: weight.t()?.contiguous()?, bias: None })
    }

    /// The weight, `[out][in]`, and the bias; zeros where there is none.
    pub(super) fn values(&self) -> Result<(Vec<f32>, Vec<f32>)> {
        let bias = match &self.bias {
            Some(bias) => bias.to_vec1()?,
            None => vec![0.0; self.weight.dim(1)?],
        };
        Ok((self.weight.t()?.flatten_all()?.to_vec1()?, bias))
    }

    /// Puts in place of the weight what `round` makes of it.
    pub(super) fn round(&mut self, round: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<()> {
        self.weight = round(&self.weight)?;
        Ok(())
    }

    /// `[.., in]` to `[.., out]`.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let dims = x.dims();
        let flat = if dims.len() == 2 { x.clone() } else { x.flatten_to(dims.len() - 2)? };
        let y = flat.matmul(&self.weight)?;
        let y = match &self.bias {
            Some(bias) => y.broadcast_add(bias)?,
            None => y,
        };
        if dims.len() == 2 {
            return Ok(y);
        }
        let mut shape = dims.to_vec();
        if let Some(last) = shape.last_mut() {
            *last = self.weight.dim(1)?;
        }
        y.reshape(shape)
    }
}

/// Copies `rows` (each of `width` values) into columns `from..` of `into` (each of its rows has `outs`), square by
/// square so that both sides stay in the cache: a full-size model has half a gigabyte of these.
fn transpose(rows: &[f32], width: usize, into: &mut [f32], outs: usize, from: usize) {
    const SIDE: usize = 32;
    let count = rows.len() / width.max(1);
    for top in (0..count).step_by(SIDE) {
        for left in (0..width).step_by(SIDE) {
            for column in left..(left + SIDE).min(width) {
                let bottom = (top + SIDE).min(count);
                let target = &mut into[column * outs + from + top..column * outs + from + bottom];
                for (value, row) in target.iter_mut().zip(top..) {
                    *value = rows[row * width + column];
                }
            }
        }
    }
}

/// A one-dimensional convolution over `[frames, channels]` without padding of its own.
#[derive(Clone)]
pub(super) struct Conv {
    /// `[kernel * in, out]`, taps outermost.
    weight: Tensor,
    bias: Tensor,
    kernel: usize,
    dilation: usize,
    stride: usize,
    inputs: usize,
}

/// Size of a convolution.
#[derive(Clone, Copy)]
pub(super) struct ConvShape {
    pub(super) out: usize,
    pub(super) inp: usize,
    pub(super) kernel: usize,
    pub(super) dilation: usize,
    pub(super) stride: usize,
}

impl ConvShape {
    pub(super) fn plain(out: usize, inp: usize, kernel: usize) -> Self {
        Self { out, inp, kernel, dilation: 1, stride: 1 }
    }
}

impl Conv {
    /// Reads `name`, weight norm folded, in precision `dtype`.
    pub(super) fn load(
        file: &TensorFile,
        name: &str,
        shape: ConvShape,
        dtype: DType,
    ) -> std::result::Result<Self, LoadError> {
        let ConvShape { out, inp, kernel, dilation, stride } = shape;
        let (weight, bias) = file.convolution_f64(name, [out, inp, kernel])?;
        let weight = Tensor::from_vec(weight, (out, inp, kernel), &Device::Cpu)?;
        let weight = weight.to_dtype(dtype)?.permute((2, 1, 0))?.contiguous()?.reshape((kernel * inp, out))?;
        let bias = Tensor::from_vec(bias, out, &Device::Cpu)?.to_dtype(dtype)?;
        Ok(Self { weight, bias, kernel, dilation, stride, inputs: inp })
    }

    /// Frames of history that make the output as long as the input (stride 1).
    pub(super) fn reach(&self) -> usize {
        (self.kernel - 1) * self.dilation
    }

    /// `[frames, in]` to `[(frames - reach - 1) / stride + 1, out]`.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let frames = x.dim(0)?;
        let span = frames - self.reach();
        let windows = if self.kernel == 1 && self.stride == 1 {
            x.clone()
        } else {
            let taps = (0..self.kernel).map(|k| x.narrow(0, k * self.dilation, span)).collect::<Result<Vec<_>>>()?;
            let all = Tensor::cat(&taps, 1)?;
            if self.stride == 1 {
                all
            } else {
                let outs = (span - 1) / self.stride + 1;
                let index: Vec<u32> = (0..outs).map(|o| (o * self.stride) as u32).collect();
                all.index_select(&Tensor::from_vec(index, outs, &Device::Cpu)?, 0)?
            }
        };
        windows.matmul(&self.weight)?.broadcast_add(&self.bias)
    }

    /// As a causal layer that goes on: `history` holds the last [`Self::reach`] input frames and is moved on.
    pub(super) fn causal(&self, x: &Tensor, history: &mut Option<Tensor>) -> Result<Tensor> {
        let reach = self.reach();
        if reach == 0 {
            return self.forward(x);
        }
        let before = match history.take() {
            Some(before) => before,
            None => Tensor::zeros((reach, self.inputs), x.dtype(), x.device())?,
        };
        let all = Tensor::cat(&[&before, x], 0)?;
        *history = Some(all.narrow(0, all.dim(0)? - reach, reach)?.contiguous()?);
        self.forward(&all)
    }
}

/// `max(x, 0) + slope * min(x, 0)`.
pub(super) fn leaky(x: &Tensor, slope: f64) -> Result<Tensor> {
    candle_nn::ops::leaky_relu(x, slope)
}

/// `x * tanh(softplus(x))`; the form of softplus cannot overflow.
pub(super) fn mish(x: &Tensor) -> Result<Tensor> {
    // softplus(x) = max(x, 0) + ln(1 + exp(-|x|))
    let softplus = (x.relu()? + (x.abs()?.neg()?.exp()? + 1.0)?.log()?)?;
    x * softplus.tanh()?
}

/// Each frame `times` times.
pub(super) fn repeat_frames(x: &Tensor, times: usize) -> Result<Tensor> {
    let (frames, channels) = x.dims2()?;
    x.unsqueeze(1)?.expand((frames, times, channels))?.contiguous()?.reshape((frames * times, channels))
}
