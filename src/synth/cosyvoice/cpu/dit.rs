//! The diffusion transformer of the flow: one evaluation over new frames, with everything before them carried.
//!
//! Owns the weights. What one Euler step has to remember of a stream is a [`StepState`], owned by the stream.
//!
//! # Why
//! Keys and values are kept as a list of blocks rather than one growing tensor: blocks of a voice prefix are shared
//! between streams by reference, and nothing is copied when a stream grows.

use candle_core::{Device, Result, Tensor};
use candle_nn::ops::{layer_norm, softmax_last_dim};
use candle_nn::rotary_emb::rope_i;

use super::ops::{Linear, LoadError, mish};
use super::rounding::{fp8, int8_rows};
use crate::synth::cosyvoice::checkpoint::TensorFile;
use crate::synth::cosyvoice::config::{CONV_POS_GROUPS, CONV_POS_KERNEL, FlowConfig, LAYER_NORM_EPS, TIME_EMBED};
use crate::synth::cosyvoice::fp8::{Modulated, Ranges, largest};

const ROOT: &str = "decoder.estimator";
const EPS: f32 = LAYER_NORM_EPS as f32;

struct Block {
    qkv: Linear,
    out: Linear,
    up: Linear,
    down: Linear,
    /// What inputs are no larger than, where they are rounded to 8 bits.
    ranges: Option<Ranges>,
}

/// A grouped causal convolution, weights `[groups, kernel * in, out]`.
struct GroupedConv {
    weight: Tensor,
    bias: Tensor,
}

/// The estimator.
pub(super) struct Dit {
    config: FlowConfig,
    /// Whether keys and values are kept in 8 bits.
    int8_keys: bool,
    input: Linear,
    positions: [GroupedConv; 2],
    blocks: Vec<Block>,
    out: Linear,
    inv_freq: Vec<f32>,
}

/// Everything that depends on the time alone, folded: for the blocks and the end.
#[derive(Clone)]
pub(super) struct Modulation {
    /// The time embedding, `[dim]`.
    pub(super) embedding: Tensor,
    blocks: Vec<BlockModulation>,
    scale: Tensor,
    shift: Tensor,
}

#[derive(Clone)]
struct BlockModulation {
    shift_a: Tensor,
    scale_a: Tensor,
    gate_a: Tensor,
    shift_m: Tensor,
    scale_m: Tensor,
    gate_m: Tensor,
}

/// What one Euler step remembers of a stream: guidance rows first.
#[derive(Clone, Default)]
pub(super) struct StepState {
    /// Last inputs of the two position convolutions, `[rows, kernel - 1, dim]`.
    histories: [Option<Tensor>; 2],
    /// Per layer, per block of frames: keys and values `[rows * heads, frames, head_dim]`.
    blocks: Vec<Vec<(Tensor, Tensor)>>,
    /// Frames seen.
    frames: usize,
}

impl StepState {
    /// Bytes of keys, values and histories.
    pub(super) fn bytes(&self) -> u64 {
        let of = |t: &Tensor| t.elem_count() as u64 * 4;
        let cached: u64 = self.blocks.iter().flatten().map(|(k, v)| of(k) + of(v)).sum();
        cached + self.histories.iter().flatten().map(of).sum::<u64>()
    }
}

/// What a frame attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mask {
    /// Everything up to the end of its own block.
    Blocks,
    /// Everything.
    Full,
}

/// The input of one evaluation: new frames only.
pub(super) struct Input<'a> {
    /// `[rows, frames, mel]`.
    pub(super) x: &'a Tensor,
    /// `[rows, frames, mel]`.
    pub(super) cond: &'a Tensor,
    /// `[rows, frames, mel]`.
    pub(super) mu: &'a Tensor,
    /// `[rows, spk]`.
    pub(super) speaker: &'a Tensor,
}

/// Intermediate results, for comparing stages.
pub(super) struct Trace {
    /// After input projection and position embedding.
    pub(super) input_embed: Tensor,
    /// Attention output of the first block.
    pub(super) attention0: Tensor,
    /// Output of the first block.
    pub(super) block0: Tensor,
    /// The result, `[rows, frames, mel]`.
    pub(super) out: Tensor,
}

impl Dit {
    pub(super) fn load(
        file: &TensorFile,
        config: &FlowConfig,
        int8_keys: bool,
    ) -> std::result::Result<Self, LoadError> {
        let (dim, inner) = (config.dim, config.inner());
        let mut blocks = Vec::with_capacity(config.depth);
        for n in 0..config.depth {
            let name = |part: &str| format!("{ROOT}.transformer_blocks.{n}.{part}");
            let (q, k, v) = (name("attn.to_q"), name("attn.to_k"), name("attn.to_v"));
            blocks.push(Block {
                qkv: Linear::stack(file, &[(&q, inner), (&k, inner), (&v, inner)], dim, true)?,
                out: Linear::load(file, &name("attn.to_out.0"), dim, inner, true)?,
                up: Linear::load(file, &name("ff.ff.0.0"), config.ff(), dim, true)?,
                down: Linear::load(file, &name("ff.ff.2"), dim, config.ff(), true)?,
                ranges: None,
            });
        }
        let half = config.head_dim / 2;
        let key = format!("{ROOT}.rotary_embed.inv_freq");
        let conv = |n: usize| GroupedConv::load(file, &format!("{ROOT}.input_embed.conv_pos_embed.conv{n}.0"), dim);
        Ok(Self {
            config: config.clone(),
            int8_keys,
            input: Linear::load(file, &format!("{ROOT}.input_embed.proj"), dim, config.dit_in(), true)?,
            positions: [conv(1)?, conv(2)?],
            blocks,
            out: Linear::load(file, &format!("{ROOT}.proj_out"), config.mel, dim, true)?,
            inv_freq: file.floats(&key, &[half])?,
        })
    }

    /// Folds the time embedding and every modulation layer at time `t`.
    pub(super) fn modulation(&self, file: &TensorFile, t: f32) -> std::result::Result<Modulation, LoadError> {
        let dim = self.config.dim;
        let half = TIME_EMBED / 2;
        let rate = 10_000f64.ln() / (half - 1) as f64;
        let angles: Vec<f32> = (0..half).map(|i| 1000.0 * t * (-(i as f64) * rate).exp() as f32).collect();
        let wave: Vec<f32> = angles.iter().map(|a| a.sin()).chain(angles.iter().map(|a| a.cos())).collect();
        let wave = Tensor::from_vec(wave, (1, TIME_EMBED), &Device::Cpu)?;
        let layer = |name: String, out, inp| Linear::load(file, &name, out, inp, true);
        let hidden = layer(format!("{ROOT}.time_embed.time_mlp.0"), dim, TIME_EMBED)?.forward(&wave)?.silu()?;
        let embedding = layer(format!("{ROOT}.time_embed.time_mlp.2"), dim, dim)?.forward(&hidden)?;
        let active = embedding.silu()?;
        let mut blocks = Vec::with_capacity(self.config.depth);
        for n in 0..self.config.depth {
            let name = format!("{ROOT}.transformer_blocks.{n}.attn_norm.linear");
            let all = layer(name, 6 * dim, dim)?.forward(&active)?.squeeze(0)?;
            let part = |i: usize| all.narrow(0, i * dim, dim)?.contiguous();
            blocks.push(BlockModulation {
                shift_a: part(0)?,
                scale_a: (part(1)? + 1.0)?,
                gate_a: part(2)?,
                shift_m: part(3)?,
                scale_m: (part(4)? + 1.0)?,
                gate_m: part(5)?,
            });
        }
        // At the end the order is scale, shift.
        let end = layer(format!("{ROOT}.norm_out.linear"), 2 * dim, dim)?.forward(&active)?.squeeze(0)?;
        Ok(Modulation {
            embedding: embedding.squeeze(0)?,
            blocks,
            scale: (end.narrow(0, 0, dim)? + 1.0)?.contiguous()?,
            shift: end.narrow(0, dim, dim)?.contiguous()?,
        })
    }

    /// Has products multiply numbers of 8 bits from now on, in the ranges that `modulations`, of all Euler steps, leave.
    pub(super) fn round_products(&mut self, modulations: &[Modulation]) -> Result<()> {
        let inner = self.config.inner();
        for (n, block) in self.blocks.iter_mut().enumerate() {
            let modulated = |of: fn(&BlockModulation) -> (&Tensor, &Tensor)| -> Result<Modulated> {
                let steps = modulations.iter().filter_map(|m| m.blocks.get(n)).map(|m| {
                    let (scale, shift) = of(m);
                    Ok((scale.to_vec1()?, shift.to_vec1()?))
                });
                Ok(Modulated::of(steps.collect::<Result<Vec<_>>>()?))
            };
            let (attention, feed) =
                (modulated(|m| (&m.scale_a, &m.shift_a))?, modulated(|m| (&m.scale_m, &m.shift_m))?);
            let ((qkv, bias), up) = (block.qkv.values()?, block.up.values()?);
            let values = (&qkv[2 * inner * self.config.dim..], &bias[2 * inner..]);
            block.ranges = Some(Ranges::of(&attention, &feed, values, (&up.0, &up.1)));
            for layer in [&mut block.qkv, &mut block.out, &mut block.up, &mut block.down] {
                layer.round(|w| fp8(w, largest(&w.flatten_all()?.to_vec1()?)))?;
            }
        }
        Ok(())
    }

    /// Angles of the first `frames` positions as the reference tabulates them: `[frames, head_dim]`, pairs doubled.
    pub(super) fn angles(&self, frames: usize) -> Vec<f32> {
        (0..frames).flat_map(|p| self.inv_freq.iter().flat_map(move |f| [p as f32 * f; 2])).collect()
    }

    /// Evaluates new frames behind those in `state`, which moves on by them.
    pub(super) fn forward(
        &self,
        input: &Input<'_>,
        modulation: &Modulation,
        state: &mut StepState,
        mask: Mask,
    ) -> Result<Trace> {
        let (rows, frames, _) = input.x.dims3()?;
        let speaker = input.speaker.unsqueeze(1)?.broadcast_as((rows, frames, self.config.spk_dim))?;
        let joined = Tensor::cat(&[input.x, input.cond, input.mu, &speaker.contiguous()?], 2)?;
        let h = self.input.forward(&joined)?;
        let mut wave = h.clone();
        for (conv, history) in self.positions.iter().zip(&mut state.histories) {
            wave = mish(&conv.forward(&wave, history)?)?;
        }
        let mut h = (h + wave)?;
        let input_embed = h.clone();
        let mut first = None;
        let (cos, sin) = self.rotations(state.frames, frames)?;
        state.blocks.resize_with(self.blocks.len(), Vec::new);
        for ((block, m), cache) in self.blocks.iter().zip(&modulation.blocks).zip(&mut state.blocks) {
            // What a product takes.
            let input = |x: Tensor, range: fn(&Ranges) -> f32| match &block.ranges {
                Some(ranges) => fp8(&x, range(ranges)),
                None => Ok(x),
            };
            let normed = input(layer_norm(&h, &m.scale_a, &m.shift_a, EPS)?, |r| r.qkv)?;
            let heard = self.attend(&block.qkv.forward(&normed)?, &cos, &sin, cache, state.frames, mask)?;
            let heard = block.out.forward(&input(heard, |r| r.out)?)?;
            h = (h + heard.broadcast_mul(&m.gate_a)?)?;
            let normed = input(layer_norm(&h, &m.scale_m, &m.shift_m, EPS)?, |r| r.up)?;
            let grown = block.up.forward(&normed)?.gelu()?;
            let grown = block.down.forward(&input(grown, |r| r.down)?)?;
            h = (h + grown.broadcast_mul(&m.gate_m)?)?;
            first.get_or_insert_with(|| (heard, h.clone()));
        }
        state.frames += frames;
        let out = self.out.forward(&layer_norm(&h, &modulation.scale, &modulation.shift, EPS)?)?;
        let (attention0, block0) = first.unwrap_or_else(|| (h.clone(), h));
        Ok(Trace { input_embed, attention0, block0, out })
    }

    /// `qkv` `[rows, frames, 3 * inner]` to `[rows, frames, inner]`.
    fn attend(
        &self,
        qkv: &Tensor,
        cos: &Tensor,
        sin: &Tensor,
        cache: &mut Vec<(Tensor, Tensor)>,
        past: usize,
        mask: Mask,
    ) -> Result<Tensor> {
        let FlowConfig { heads, head_dim, block, left_blocks, .. } = self.config;
        let inner = heads * head_dim;
        let (rows, frames, _) = qkv.dims3()?;
        let split = |n: usize| -> Result<Tensor> {
            qkv.narrow(2, n * inner, inner)?.reshape((rows, frames, heads, head_dim))?.transpose(1, 2)?.contiguous()
        };
        // Only the first head_dim channels turn, and they are the first head.
        let turn = |x: Tensor| -> Result<Tensor> {
            let first = rope_i(&x.narrow(1, 0, 1)?.contiguous()?, cos, sin)?;
            if heads == 1 { Ok(first) } else { Tensor::cat(&[&first, &x.narrow(1, 1, heads - 1)?], 1) }
        };
        let flat = |x: Tensor| x.contiguous()?.reshape((rows * heads, frames, head_dim));
        let q = (flat(turn(split(0)?)?)? * (1.0 / (head_dim as f64).sqrt()))?;
        let own = (flat(turn(split(1)?)?)?, flat(split(2)?)?);
        cache.push(self.kept(&own)?);
        let keys: Vec<&Tensor> = cache.iter().map(|(k, _)| k).collect();
        let values: Vec<&Tensor> = cache.iter().map(|(_, v)| v).collect();
        let (keys, values) = (Tensor::cat(&keys, 1)?, Tensor::cat(&values, 1)?);
        let total = past + frames;
        let mut heard = Vec::with_capacity(frames.div_ceil(block));
        let mut at = 0;
        while at < frames {
            let index = (past + at) / block;
            let stop = ((index + 1) * block).min(total);
            let count = stop - past - at;
            let (from, to) = match mask {
                Mask::Full => (0, total),
                Mask::Blocks => (left_blocks.map_or(0, |n| index.saturating_sub(n) * block), stop),
            };
            // A block sees itself as it is, and others as they are kept.
            let seen = |kept: &Tensor, own: &Tensor| match mask {
                Mask::Blocks if self.int8_keys => {
                    let own = own.narrow(1, at, count)?;
                    if from == past + at {
                        Ok(own)
                    } else {
                        Tensor::cat(&[&kept.narrow(1, from, past + at - from)?, &own], 1)
                    }
                }
                _ => kept.narrow(1, from, to - from),
            };
            let (k, v) = (seen(&keys, &own.0)?, seen(&values, &own.1)?.contiguous()?);
            let scores = q.narrow(1, at, count)?.matmul(&k.transpose(1, 2)?)?;
            heard.push(softmax_last_dim(&scores)?.matmul(&v)?);
            at += count;
        }
        let heard = if heard.len() == 1 { heard.remove(0) } else { Tensor::cat(&heard, 1)? };
        heard.reshape((rows, heads, frames, head_dim))?.transpose(1, 2)?.contiguous()?.reshape((rows, frames, inner))
    }

    /// Keys and values as later blocks find them.
    fn kept(&self, (keys, values): &(Tensor, Tensor)) -> Result<(Tensor, Tensor)> {
        if self.int8_keys {
            return Ok((int8_rows(keys)?, int8_rows(values)?));
        }
        Ok((keys.clone(), values.clone()))
    }

    fn rotations(&self, from: usize, count: usize) -> Result<(Tensor, Tensor)> {
        let angles: Vec<f32> =
            (from..from + count).flat_map(|p| self.inv_freq.iter().map(move |f| p as f32 * f)).collect();
        let shape = (count, self.inv_freq.len());
        let table = |f: fn(f32) -> f32| Tensor::from_vec(angles.iter().map(|&a| f(a)).collect(), shape, &Device::Cpu);
        Ok((table(f32::cos)?, table(f32::sin)?))
    }
}

impl GroupedConv {
    fn load(file: &TensorFile, name: &str, dim: usize) -> std::result::Result<Self, LoadError> {
        let (groups, kernel) = (CONV_POS_GROUPS, CONV_POS_KERNEL);
        let part = dim / groups;
        let weight = file.floats(&format!("{name}.weight"), &[dim, part, kernel])?;
        let weight = Tensor::from_slice(&weight, (groups, part, part, kernel), &Device::Cpu)?;
        // [group, out, in, tap] to [group, tap, in, out]
        let weight = weight.permute((0, 3, 2, 1))?.contiguous()?.reshape((groups, kernel * part, part))?;
        let bias = Tensor::from_slice(&file.floats(&format!("{name}.bias"), &[dim])?, dim, &Device::Cpu)?;
        Ok(Self { weight, bias })
    }

    /// `[rows, frames, dim]` to the same; the history holds the last `kernel - 1` inputs.
    fn forward(&self, x: &Tensor, history: &mut Option<Tensor>) -> Result<Tensor> {
        let (rows, frames, dim) = x.dims3()?;
        let (groups, kernel) = (CONV_POS_GROUPS, CONV_POS_KERNEL);
        let part = dim / groups;
        let reach = kernel - 1;
        let before = match history.take() {
            Some(before) => before,
            None => Tensor::zeros((rows, reach, dim), x.dtype(), x.device())?,
        };
        let all = Tensor::cat(&[&before, x], 1)?;
        *history = Some(all.narrow(1, frames, reach)?.contiguous()?);
        let mut outs = Vec::with_capacity(rows);
        for row in 0..rows {
            let grouped = all.get(row)?.reshape((reach + frames, groups, part))?.transpose(0, 1)?.contiguous()?;
            let taps = (0..kernel).map(|k| grouped.narrow(1, k, frames)).collect::<Result<Vec<_>>>()?;
            let y = Tensor::cat(&taps, 2)?.matmul(&self.weight)?;
            outs.push(y.transpose(0, 1)?.contiguous()?.reshape((frames, dim))?.broadcast_add(&self.bias)?);
        }
        Tensor::stack(&outs, 0)
    }
}
