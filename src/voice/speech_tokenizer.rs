//! The speech tokenizer: `speech_tokenizer_v3.onnx` as a candle network, log-mel in, 25 tokens a second out.
//!
//! Owns the network and its sizes, all read from the file. Source: s3tokenizer (version 3), an encoder of
//! transformer blocks with a memory convolution, and a finite scalar quantiser.
//!
//! # Why
//! - Blocks are copied out of the mapped file when they run and dropped after. Enrolment is rare and its result is
//!   a file, so one gigabyte of weights has no business staying in a gateway's memory; the copying costs a fraction
//!   of a second against seconds of arithmetic.
//! - Everything is `f32` and rounding is half-to-even, as in the reference: tokens are near-ties.

use std::path::Path;

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::ops::{layer_norm, softmax_last_dim};

use super::features::Matrix;
use super::onnx::{Binder, Model, OnnxError, Weight};

/// Size of an attention head; the rotary tables of the original are made for it.
const HEAD: usize = 64;
const ROPE_BASE: f64 = 10_000.0;
/// Of the normalisations, when the graph does not say.
const EPS: f32 = 1e-5;
/// Levels of each quantised value: 0, 1, 2.
const LEVELS: u32 = 3;
/// What keeps `tanh` off the rounding limit. In single precision, as the original: 0.9990000128746033.
const SQUEEZE: f32 = 0.999;
/// Added to the scores of padding.
const MASKED: f64 = -1e10;
/// Longest input in frames: 30 s, beyond which the reference refuses.
pub const MAX_FRAMES: usize = 3000;

/// Where a forward pass stops to show its inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// `[N, width]` after the two strided convolutions.
    Subsampled,
    /// `[N, width]` after the first block.
    Block0,
    /// `[N, values]` before `tanh` and rounding.
    Projection,
}

/// An opened tokenizer.
pub struct SpeechTokenizer {
    model: Model,
    conv1: (Weight, Weight),
    conv2: (Weight, Weight),
    blocks: Vec<BlockPlan>,
    project: (Weight, Weight),
    bands: usize,
    heads: usize,
}

struct BlockPlan {
    attn_norm: NormPlan,
    query: (Weight, Weight),
    key: Weight,
    value: (Weight, Weight),
    out: (Weight, Weight),
    memory: Weight,
    mlp_norm: NormPlan,
    up: (Weight, Weight),
    down: (Weight, Weight),
}

struct NormPlan {
    scale: Weight,
    shift: Weight,
    eps: f32,
}

impl SpeechTokenizer {
    /// Maps the file and binds every parameter; copies none.
    ///
    /// # Errors
    /// The file is not readable, or its parameters are not those of a tokenizer of this kind.
    pub fn open(path: &Path) -> std::result::Result<Self, OnnxError> {
        let model = Model::open(path)?;
        let mut b = Binder::new(&model);
        let conv1 = b.input("/conv1/Conv", 1, &[None, None, Some(3)]);
        let width = conv1.dim(0);
        let bands = conv1.dim(1).unwrap_or(0);
        let conv1 = (conv1, b.input("/conv1/Conv", 2, &[width]));
        let conv2 = b.input("/conv2/Conv", 1, &[width, width, Some(3)]);
        let conv2 = (conv2, b.input("/conv2/Conv", 2, &[width]));
        for node in ["/conv1/Conv", "/conv2/Conv"] {
            let stride = model.attribute(node, "strides").unwrap_or(2);
            if stride != 2 {
                b.complain(format!("node `{node}`: stride {stride}, expected 2"));
            }
        }
        let count = model.count(0, |i| format!("/blocks.{i}/attn/query/MatMul")).max(1);
        let blocks: Vec<BlockPlan> = (0..count).map(|i| BlockPlan::bind(&mut b, &model, i, width)).collect();
        let project = b.operand("/quantizer/project_in/MatMul", &[width, None]);
        let project_bias = b.operand("/quantizer/project_in/Add", &[project.dim(1)]);
        if project.dim(1).is_some_and(|values| LEVELS.checked_pow(values as u32).is_none()) {
            b.complain("node `/quantizer/project_in/MatMul`: its ids would not fit into 32 bits".into());
        }
        if width.is_some_and(|w| w == 0 || !w.is_multiple_of(HEAD)) {
            b.complain(format!("width {width:?} is no multiple of the head size {HEAD}"));
        }
        b.finish()?;
        let heads = width.unwrap_or(0) / HEAD;
        Ok(Self { conv1, conv2, blocks, project: (project, project_bias), bands, heads, model })
    }

    /// Bands of the log-mel it reads: 128.
    pub fn bands(&self) -> usize {
        self.bands
    }

    /// Number of different tokens: 6561 at full size.
    pub fn vocabulary(&self) -> u32 {
        LEVELS.pow(self.project.1.dim(0).unwrap_or(0) as u32)
    }

    /// Tokens of a log-mel `[bands, frames]`, one for each four frames begun.
    ///
    /// # Errors
    /// No frame, more than [`MAX_FRAMES`], or the wrong number of bands.
    pub fn tokens(&self, mel: &Matrix) -> Result<Vec<u32>> {
        self.tokens_of(mel, mel.cols)
    }

    /// As [`SpeechTokenizer::tokens`]; `tell` hears behind each layer what share of the work is done.
    ///
    /// # Errors
    /// As [`SpeechTokenizer::tokens`].
    pub fn tokens_telling(&self, mel: &Matrix, tell: &dyn Fn(f64)) -> Result<Vec<u32>> {
        let projected: Vec<Vec<f32>> = self.run(mel, mel.cols, Probe::Projection, tell)?.to_vec2()?;
        Ok(projected.iter().map(|values| token(values)).collect())
    }

    /// Tokens of a padded log-mel of which only the first `length` frames count. What comes after them in the
    /// result stands for padding.
    ///
    /// # Errors
    /// As [`SpeechTokenizer::tokens`]; also when `length` is not in `1..=frames`.
    pub fn tokens_of(&self, mel: &Matrix, length: usize) -> Result<Vec<u32>> {
        let projected: Vec<Vec<f32>> = self.probe(mel, length, Probe::Projection)?.to_vec2()?;
        Ok(projected.iter().map(|values| token(values)).collect())
    }

    /// Runs as far as `probe` and returns what is there.
    ///
    /// # Errors
    /// As [`SpeechTokenizer::tokens_of`].
    pub fn probe(&self, mel: &Matrix, length: usize, probe: Probe) -> Result<Tensor> {
        self.run(mel, length, probe, &|_| ())
    }

    fn run(&self, mel: &Matrix, length: usize, probe: Probe, tell: &dyn Fn(f64)) -> Result<Tensor> {
        if mel.rows != self.bands || !(1..=MAX_FRAMES).contains(&mel.cols) || !(1..=mel.cols).contains(&length) {
            candle_core::bail!(
                "a log-mel of {} x {} with {length} frames in use, expected {} bands and 1 to {MAX_FRAMES} frames",
                mel.rows,
                mel.cols,
                self.bands
            );
        }
        let x = Tensor::from_slice(&mel.data, (1, mel.rows, mel.cols), &Device::Cpu)?;
        let x = self.halve(&cut(&x, length)?, &self.conv1)?;
        let length = length.div_ceil(2);
        let x = self.halve(&cut(&x, length)?, &self.conv2)?;
        let length = length.div_ceil(2);
        let mut x = x.squeeze(0)?.t()?.contiguous()?;
        if probe == Probe::Subsampled {
            return Ok(x);
        }
        let frames = x.dim(0)?;
        let rotary = Rotary::new(frames)?;
        let padding = Padding::new(frames, length)?;
        for (index, block) in self.blocks.iter().enumerate() {
            x = block.forward(&self.model, &x, self.heads, &rotary, padding.as_ref())?;
            tell((index + 1) as f64 / self.blocks.len() as f64);
            if probe == Probe::Block0 {
                return Ok(x);
            }
        }
        linear(&self.model, &x, &self.project)
    }

    /// Convolution of kernel 3 and stride 2 over `[1, channels, T]`, then GELU.
    fn halve(&self, x: &Tensor, (kernel, bias): &(Weight, Weight)) -> Result<Tensor> {
        let bias = self.model.tensor(bias)?.reshape((1, (), 1))?;
        x.conv1d(&self.model.tensor(kernel)?, 1, 2, 1, 1)?.broadcast_add(&bias)?.gelu_erf()
    }
}

impl BlockPlan {
    fn bind(b: &mut Binder<'_>, model: &Model, index: usize, width: Option<usize>) -> Self {
        let node = |part: &str| format!("/blocks.{index}/{part}");
        let linear = |b: &mut Binder<'_>, part: &str, input, output| {
            let weight = b.operand(&node(&format!("{part}/MatMul")), &[input, output]);
            let bias = b.operand(&node(&format!("{part}/Add")), &[weight.dim(1)]);
            (weight, bias)
        };
        let norm = |b: &mut Binder<'_>, part: &str| NormPlan {
            scale: b.operand(&node(&format!("{part}/Mul")), &[width]),
            shift: b.operand(&node(&format!("{part}/Add_1")), &[width]),
            eps: model.constant(&node(&format!("{part}/Add"))).unwrap_or(EPS),
        };
        let attn_norm = norm(b, "attn_ln");
        let query = linear(b, "attn/query", width, width);
        let key = b.operand(&node("attn/key/MatMul"), &[width, width]);
        let value = linear(b, "attn/value", width, width);
        let out = linear(b, "attn/out", width, width);
        let memory = b.input(&node("attn/fsmn_block/Conv"), 1, &[width, Some(1), None]);
        if memory.dim(2).is_some_and(|taps| taps % 2 == 0) {
            b.complain(format!("node `{}`: an even kernel has no centre", node("attn/fsmn_block/Conv")));
        }
        let mlp_norm = norm(b, "mlp_ln");
        let up = linear(b, "mlp/mlp.0", width, None);
        let down = linear(b, "mlp/mlp.2", up.0.dim(1), width);
        Self { attn_norm, query, key, value, out, memory, mlp_norm, up, down }
    }

    fn forward(
        &self,
        model: &Model,
        x: &Tensor,
        heads: usize,
        rotary: &Rotary,
        padding: Option<&Padding>,
    ) -> Result<Tensor> {
        let y = self.attn_norm.forward(model, x)?;
        let query = linear(model, &y, &self.query)?;
        let key = y.matmul(&model.tensor(&self.key)?)?;
        let value = linear(model, &y, &self.value)?;
        let attended = attention(&query, &key, &value, heads, rotary, padding)?;
        let memory = remember(&value, &model.tensor(&self.memory)?, padding)?;
        let x = ((x + linear(model, &attended, &self.out)?)? + memory)?;
        let y = self.mlp_norm.forward(model, &x)?;
        let y = linear(model, &y, &self.up)?.gelu_erf()?;
        x + linear(model, &y, &self.down)?
    }
}

impl NormPlan {
    fn forward(&self, model: &Model, x: &Tensor) -> Result<Tensor> {
        layer_norm(x, &model.tensor(&self.scale)?, &model.tensor(&self.shift)?, self.eps)
    }
}

/// Rotary angles `[N, HEAD / 2]`.
struct Rotary {
    cos: Tensor,
    sin: Tensor,
}

impl Rotary {
    fn new(frames: usize) -> Result<Self> {
        let rate = |i: usize| ROPE_BASE.powf(-((2 * i) as f64) / HEAD as f64);
        let angles: Vec<f32> =
            (0..frames).flat_map(|t| (0..HEAD / 2).map(move |i| (t as f64 * rate(i)) as f32)).collect();
        let angles = Tensor::from_vec(angles, (frames, HEAD / 2), &Device::Cpu)?;
        Ok(Self { cos: angles.cos()?, sin: angles.sin()? })
    }
}

/// What keeps frames beyond the length out; absent when there are none.
struct Padding {
    /// `[N, 1]`: 1 for frames that count.
    keep: Tensor,
    /// `[N]`: added to the scores.
    penalty: Tensor,
}

impl Padding {
    fn new(frames: usize, length: usize) -> Result<Option<Self>> {
        if frames == length {
            return Ok(None);
        }
        let keep: Vec<f32> = (0..frames).map(|t| if t < length { 1.0 } else { 0.0 }).collect();
        let keep = Tensor::from_vec(keep, (frames, 1), &Device::Cpu)?;
        let penalty = keep.squeeze(1)?.affine(-MASKED, MASKED)?;
        Ok(Some(Self { keep, penalty }))
    }
}

/// Full bidirectional attention over `[N, width]`.
fn attention(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    heads: usize,
    rotary: &Rotary,
    padding: Option<&Padding>,
) -> Result<Tensor> {
    let (frames, width) = query.dims2()?;
    let split = |x: &Tensor| x.reshape((1, frames, heads, HEAD))?.transpose(1, 2)?.contiguous();
    let scale = (HEAD as f64).powf(-0.25);
    let turn = |x: &Tensor| candle_nn::rotary_emb::rope(&split(x)?, &rotary.cos, &rotary.sin)? * scale;
    let mut scores = turn(query)?.matmul(&turn(key)?.t()?.contiguous()?)?;
    if let Some(padding) = padding {
        scores = scores.broadcast_add(&padding.penalty)?;
    }
    softmax_last_dim(&scores)?.matmul(&split(value)?)?.transpose(1, 2)?.reshape((frames, width))
}

/// The memory: a convolution along time of each channel by itself, plus the channel.
///
/// # Why
/// A loop over the taps with whole-row products: candle's grouped convolution would run once for each channel.
fn remember(value: &Tensor, kernel: &Tensor, padding: Option<&Padding>) -> Result<Tensor> {
    let value = match padding {
        Some(p) => value.broadcast_mul(&p.keep)?,
        None => value.clone(),
    };
    let (frames, width) = value.dims2()?;
    let taps = kernel.dim(D::Minus1)?;
    // [width, 1, taps] -> [taps, width]
    let kernel = kernel.reshape((width, taps))?.t()?.contiguous()?.to_dtype(DType::F32)?;
    let padded = value.pad_with_zeros(0, taps / 2, taps / 2)?;
    let mut memory = value;
    for tap in 0..taps {
        let weight = kernel.narrow(0, tap, 1)?;
        memory = (memory + padded.narrow(0, tap, frames)?.broadcast_mul(&weight)?)?;
    }
    match padding {
        Some(p) => memory.broadcast_mul(&p.keep),
        None => Ok(memory),
    }
}

/// `[N, in]` times a stored `[in, out]`, plus its bias.
fn linear(model: &Model, x: &Tensor, (weight, bias): &(Weight, Weight)) -> Result<Tensor> {
    x.matmul(&model.tensor(weight)?)?.broadcast_add(&model.tensor(bias)?)
}

/// Zeroes the frames of `[1, channels, T]` from `length` on.
fn cut(x: &Tensor, length: usize) -> Result<Tensor> {
    let frames = x.dim(2)?;
    if length >= frames { Ok(x.clone()) } else { x.narrow(2, 0, length)?.pad_with_zeros(2, 0, frames - length) }
}

/// Finite scalar quantisation: each value becomes a digit in base 3, the first the least significant.
fn token(values: &[f32]) -> u32 {
    let digit = |value: &f32| (value.tanh() * SQUEEZE).round_ties_even() as i32 + 1;
    values.iter().rev().fold(0, |id, value| id * LEVELS + digit(value) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_value_is_the_least_significant_digit() {
        assert_eq!(token(&[-5.0, -5.0]), 0);
        assert_eq!(token(&[5.0, -5.0]), 2);
        assert_eq!(token(&[0.0, 5.0]), 1 + 3 * 2);
    }

    #[test]
    fn the_threshold_is_after_the_squeeze() {
        // tanh(0.5498) * 0.999 is just below one half, tanh(0.5512) * 0.999 just above.
        assert_eq!(token(&[0.5498]), 1);
        assert_eq!(token(&[0.5512]), 2);
    }
}
