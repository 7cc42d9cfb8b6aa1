//! What encoder and decoder share: layers over `[positions, width]` tensors on the CPU.
//!
//! # Why
//! `candle-transformers` has this network too, but with the tanh form of GELU and a recomputed self attention, which
//! misses the reference's numbers (encoder output off by 1e-3) and costs a pass over the whole text for each token.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{CpuStorage, CustomOp1, D, DType, Device, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

use super::config::LoadError;

const EPSILON: f32 = 1e-5;

/// The tensors of a checkpoint, taken out one by one.
pub(super) struct Weights(HashMap<String, Tensor>);

impl Weights {
    /// Reads all of `path` into memory.
    pub(super) fn read(path: &Path) -> std::result::Result<Self, LoadError> {
        candle_core::safetensors::load(path, &Device::Cpu).map(Self).map_err(|e| LoadError::file(path, e))
    }

    /// Takes `name`, which must have `shape`, as `f32`.
    pub(super) fn take(&mut self, name: &str, shape: impl Into<Shape>) -> std::result::Result<Tensor, LoadError> {
        let shape = shape.into();
        let wrong =
            |found: String| LoadError::Tensor { name: name.into(), expected: format!("{:?}", shape.dims()), found };
        let tensor = self.0.remove(name).ok_or_else(|| wrong("none".into()))?;
        if tensor.shape() != &shape {
            return Err(wrong(format!("{:?}", tensor.dims())));
        }
        Ok(tensor.to_dtype(DType::F32)?)
    }
}

/// `x W + b`; the weight is kept as `[in, out]`, which makes products of one row several times faster.
pub(super) struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    pub(super) fn load(
        weights: &mut Weights,
        name: &str,
        (inp, out): (usize, usize),
        bias: bool,
    ) -> std::result::Result<Self, LoadError> {
        let weight = weights.take(&format!("{name}.weight"), (out, inp))?.t()?.contiguous()?;
        let bias = if bias { Some(weights.take(&format!("{name}.bias"), out)?) } else { None };
        Ok(Self { weight, bias })
    }

    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = x.matmul(&self.weight)?;
        match &self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }
}

/// Layer normalisation over the width.
pub(super) struct Norm {
    weight: Tensor,
    bias: Tensor,
}

impl Norm {
    pub(super) fn load(weights: &mut Weights, name: &str, width: usize) -> std::result::Result<Self, LoadError> {
        Ok(Self {
            weight: weights.take(&format!("{name}.weight"), width)?,
            bias: weights.take(&format!("{name}.bias"), width)?,
        })
    }

    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        candle_nn::ops::layer_norm(x, &self.weight, &self.bias, EPSILON)
    }
}

/// A convolution of three taps over time, padded by one position on both sides.
pub(super) struct Conv {
    /// `[3 * in, out]`, taps outermost.
    weight: Tensor,
    bias: Tensor,
    stride: usize,
}

impl Conv {
    pub(super) fn load(
        weights: &mut Weights,
        name: &str,
        (inp, out): (usize, usize),
        stride: usize,
    ) -> std::result::Result<Self, LoadError> {
        let weight = weights.take(&format!("{name}.weight"), (out, inp, 3))?;
        let weight = weight.permute((2, 1, 0))?.contiguous()?.reshape((3 * inp, out))?;
        Ok(Self { weight, bias: weights.take(&format!("{name}.bias"), out)?, stride })
    }

    /// `[n, in]` to `[n / stride, out]`; `n` must be a multiple of the stride.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (count, width) = x.dims2()?;
        let padded = x.pad_with_zeros(0, 1, 1)?;
        let taps = (0..3)
            .map(|tap| {
                let rows = padded.narrow(0, tap, count)?.contiguous()?;
                rows.reshape((count / self.stride, self.stride, width))?.narrow(1, 0, 1)?.contiguous()?.squeeze(1)
            })
            .collect::<Result<Vec<_>>>()?;
        Tensor::cat(&taps, 1)?.matmul(&self.weight)?.broadcast_add(&self.bias)
    }
}

/// The two linear layers behind attention, with the exact GELU between them.
pub(super) struct FeedForward {
    up: Linear,
    down: Linear,
}

impl FeedForward {
    pub(super) fn load(
        weights: &mut Weights,
        name: &str,
        width: usize,
        inner: usize,
    ) -> std::result::Result<Self, LoadError> {
        Ok(Self {
            up: Linear::load(weights, &format!("{name}.fc1"), (width, inner), true)?,
            down: Linear::load(weights, &format!("{name}.fc2"), (inner, width), true)?,
        })
    }

    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.down.forward(&gelu(&self.up.forward(x)?)?)
    }
}

/// Multi-head attention. The key projection has no bias.
pub(super) struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
    out: Linear,
    heads: usize,
    scale: f64,
}

/// Keys and values as `[heads, positions, width / heads]`. A clone shares them.
#[derive(Clone)]
pub(super) struct Memory {
    pub(super) keys: Tensor,
    pub(super) values: Tensor,
}

impl Memory {
    /// What `old` has, and behind it what this has.
    pub(super) fn behind(self, old: Option<Memory>) -> Result<Memory> {
        Ok(match old {
            None => self,
            Some(old) => Memory {
                keys: Tensor::cat(&[&old.keys, &self.keys], 1)?,
                values: Tensor::cat(&[&old.values, &self.values], 1)?,
            },
        })
    }

    /// One position of it.
    pub(super) fn at(&self, position: usize) -> Result<Memory> {
        Ok(Memory { keys: self.keys.narrow(1, position, 1)?, values: self.values.narrow(1, position, 1)? })
    }
}

impl Attention {
    pub(super) fn load(
        weights: &mut Weights,
        name: &str,
        width: usize,
        heads: usize,
    ) -> std::result::Result<Self, LoadError> {
        let mut linear =
            |part: &str, bias: bool| Linear::load(weights, &format!("{name}.{part}"), (width, width), bias);
        Ok(Self {
            query: linear("q_proj", true)?,
            key: linear("k_proj", false)?,
            value: linear("v_proj", true)?,
            out: linear("out_proj", true)?,
            heads,
            scale: ((width / heads) as f64).powf(-0.5),
        })
    }

    /// Keys and values of `x`.
    pub(super) fn memory(&self, x: &Tensor) -> Result<Memory> {
        Ok(Memory { keys: self.split(&self.key.forward(x)?)?, values: self.split(&self.value.forward(x)?)? })
    }

    /// What `x` takes from `memory`, and the weights `[heads, positions of x, positions of memory]`. `mask` is added
    /// to the scores.
    pub(super) fn attend(&self, x: &Tensor, memory: &Memory, mask: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
        let query = self.split(&(self.query.forward(x)? * self.scale)?)?;
        let scores = query.matmul(&memory.keys.transpose(D::Minus2, D::Minus1)?)?;
        let scores = match mask {
            Some(mask) => scores.broadcast_add(mask)?,
            None => scores,
        };
        let weights = candle_nn::ops::softmax_last_dim(&scores)?;
        let (count, width) = x.dims2()?;
        let mixed = weights.matmul(&memory.values)?.transpose(0, 1)?.contiguous()?.reshape((count, width))?;
        Ok((self.out.forward(&mixed)?, weights))
    }

    fn split(&self, x: &Tensor) -> Result<Tensor> {
        let (count, width) = x.dims2()?;
        x.reshape((count, self.heads, width / self.heads))?.transpose(0, 1)?.contiguous()
    }
}

/// `x * (1 + erf(x / sqrt(2))) / 2`.
pub(super) fn gelu(x: &Tensor) -> Result<Tensor> {
    x.contiguous()?.apply_op1_no_bwd(&Gelu)
}

/// The exact GELU on all threads of the pool: candle's runs on one, and the encoder of the smallest model has eleven
/// million of them.
struct Gelu;

impl CustomOp1 for Gelu {
    fn name(&self) -> &'static str {
        "gelu-erf"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let CpuStorage::F32(values) = storage else { candle_core::bail!("gelu of something else than f32") };
        let Some((from, to)) = layout.contiguous_offsets() else { candle_core::bail!("gelu of a strided tensor") };
        let values = &values[from..to];
        let mut out = vec![0f32; values.len()];
        out.par_chunks_mut(4_096).zip(values.par_chunks(4_096)).for_each(|(out, values)| {
            for (out, x) in out.iter_mut().zip(values) {
                *out = 0.5 * x * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2));
            }
        });
        Ok((CpuStorage::F32(out), layout.shape().clone()))
    }
}

/// The error function by the rational approximation that Eigen and XLA use for single precision: `x P(x^2) / Q(x^2)`
/// on -4..=4, outside of which it is 1 to the last digit. Without branches, so that it runs on vectors.
fn erf(x: f32) -> f32 {
    const P: [f32; 7] = [
        -1.609_603_3e-2,
        -2.954_6e-3,
        -7.349_906_3e-4,
        -5.692_506_4e-5,
        -2.101_024e-6,
        2.770_681_4e-8,
        -2.726_142_3e-10,
    ];
    const Q: [f32; 5] = [-1.426_473_9e-2, -7.373_329_2e-3, -1.682_827e-3, -2.133_740_6e-4, -1.456_607_2e-5];
    let x = x.clamp(-4.0, 4.0);
    let square = x * x;
    let polynomial = |terms: &[f32]| terms.iter().rev().fold(0.0, |sum, term| sum * square + term);
    x * polynomial(&P) / polynomial(&Q)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_function_is_exact_to_single_precision() {
        let worst = (-60_000..60_000)
            .map(|n| n as f32 / 10_000.0)
            .map(|x| (f64::from(erf(x)) - candle_core::cpu::erf::erf_f64(f64::from(x))).abs())
            .fold(0.0, f64::max);
        assert!(worst < 5e-7, "{worst:e}");
    }

    #[test]
    fn a_convolution_is_centred_and_strides() {
        let mut tensors = HashMap::new();
        // One channel: the output is previous + 10 * this + 100 * next.
        tensors.insert("c.weight".into(), Tensor::new(&[[[1f32, 10.0, 100.0]]], &Device::Cpu).expect("a tensor"));
        tensors.insert("c.bias".into(), Tensor::new(&[0.5f32], &Device::Cpu).expect("a tensor"));
        let x = Tensor::new(&[[1f32], [2.0], [3.0], [4.0]], &Device::Cpu).expect("a tensor");
        for (stride, expected) in [(1, vec![210.5, 321.5, 432.5, 43.5]), (2, vec![210.5, 432.5])] {
            let conv = Conv::load(&mut Weights(tensors.clone()), "c", (1, 1), stride).expect("it fits");
            let y = conv.forward(&x).expect("it runs").flatten_all().expect("flat").to_vec1::<f32>().expect("f32");
            assert_eq!(y, expected);
        }
    }
}
