//! The language model: a Qwen2 decoder over text and speech embeddings, rows of different lengths in one batch.
//!
//! Owns the weights; the state of a row is a [`Row`], owned by the caller. The text table is not loaded: rows are
//! read from the mapped checkpoint as they are needed.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::kv_cache::KvCache;
use candle_nn::ops::{rms_norm, silu, softmax_last_dim};
use candle_nn::rotary_emb::rope;

use super::ops::{Linear, LoadError};
use crate::synth::cosyvoice::backend::Embed;
use crate::synth::cosyvoice::checkpoint::TensorFile;
use crate::synth::cosyvoice::config::LlmConfig;

const BODY: &str = "llm.model.model";
/// Positions that a row's cache grows by.
const CACHE_STEP: usize = 256;
/// Fewest rows of a product in a decode step, unused ones zero. A product of one row sums in another order than a
/// product of several; those give each row the same bits whatever their number.
const LEAST_ROWS: usize = 2;

struct Layer {
    input_norm: Tensor,
    qkv: Linear,
    out: Linear,
    post_norm: Tensor,
    gate_up: Linear,
    down: Linear,
}

/// The model.
pub(super) struct Llm {
    config: LlmConfig,
    text: TensorFile,
    speech: Tensor,
    layers: Vec<Layer>,
    norm: Tensor,
    head: Linear,
    inv_freq: Vec<f32>,
}

/// The cached keys and values of one sequence.
pub(super) struct Row {
    caches: Vec<KvCache>,
    len: usize,
}

impl Row {
    /// An empty sequence.
    pub(super) fn new(config: &LlmConfig) -> Self {
        Self { caches: (0..config.layers).map(|_| KvCache::new(1, CACHE_STEP)).collect(), len: 0 }
    }

    /// Positions in the cache.
    pub(super) fn len(&self) -> usize {
        self.len
    }
}

/// What a pass gives besides the final hidden states, for comparing stages.
pub(super) struct Trace {
    /// `[positions, hidden]`, after the final norm.
    pub(super) hidden: Tensor,
    /// `[positions, hidden]`, the residual stream after the first layer.
    pub(super) after_first: Tensor,
}

impl Llm {
    pub(super) fn load(file: &TensorFile, config: &LlmConfig) -> std::result::Result<Self, LoadError> {
        let (hidden, head_dim) = (config.hidden, config.head_dim);
        let (queries, keys) = (config.heads * head_dim, config.kv_heads * head_dim);
        let vector = |name: &str| -> std::result::Result<Tensor, LoadError> {
            Ok(Tensor::from_slice(&file.floats(name, &[hidden])?, hidden, &Device::Cpu)?)
        };
        let table = |name: &str| -> std::result::Result<Tensor, LoadError> {
            let shape = [config.speech_rows(), hidden];
            Ok(Tensor::from_slice(&file.floats(name, &shape)?, &shape, &Device::Cpu)?)
        };
        let mut layers = Vec::with_capacity(config.layers);
        for n in 0..config.layers {
            let at = format!("{BODY}.layers.{n}");
            let name = |part: &str| format!("{at}.{part}");
            let (q, k, v) = (name("self_attn.q_proj"), name("self_attn.k_proj"), name("self_attn.v_proj"));
            let (gate, up) = (name("mlp.gate_proj"), name("mlp.up_proj"));
            let inner = config.intermediate;
            layers.push(Layer {
                input_norm: vector(&name("input_layernorm.weight"))?,
                qkv: Linear::stack(file, &[(&q, queries), (&k, keys), (&v, keys)], hidden, true)?,
                out: Linear::load(file, &name("self_attn.o_proj"), hidden, queries, false)?,
                post_norm: vector(&name("post_attention_layernorm.weight"))?,
                gate_up: Linear::stack(file, &[(&gate, inner), (&up, inner)], hidden, false)?,
                down: Linear::load(file, &name("mlp.down_proj"), hidden, inner, false)?,
            });
        }
        let inv_freq = (0..head_dim / 2)
            .map(|i| 1.0 / (config.rope_theta as f32).powf((2 * i) as f32 / head_dim as f32))
            .collect();
        Ok(Self {
            config: config.clone(),
            // Opened for itself: the one that the weights were read from goes.
            text: TensorFile::open(file.path())?,
            speech: table("speech_embedding.weight")?,
            layers,
            norm: vector(&format!("{BODY}.norm.weight"))?,
            head: Linear::from_weight(&table("llm_decoder.weight")?)?,
            inv_freq,
        })
    }

    /// Input vectors `[ids, hidden]`. The ids must be in range.
    pub(super) fn embed(&self, ids: &[Embed]) -> std::result::Result<Tensor, LoadError> {
        let mut values = Vec::with_capacity(ids.len() * self.config.hidden);
        for id in ids {
            match id {
                Embed::Text(id) => {
                    values.extend_from_slice(&self.text.row(&format!("{BODY}.embed_tokens.weight"), *id as usize)?);
                }
                Embed::Speech(id) => values.extend(self.speech.get(*id as usize)?.to_vec1::<f32>()?),
            }
        }
        Ok(Tensor::from_vec(values, (ids.len(), self.config.hidden), &Device::Cpu)?)
    }

    /// Appends `x` `[positions, hidden]` to one row.
    pub(super) fn extend(&self, row: &mut Row, x: &Tensor) -> Result<Trace> {
        let count = x.dim(0)?;
        let mask = causal_mask(count, row.len)?;
        let (cos, sin) = self.angles(row.len, count)?;
        let mut x = x.clone();
        let mut after_first = x.clone();
        for (n, layer) in self.layers.iter().enumerate() {
            let normed = rms_norm(&x, &layer.input_norm, self.config.rms_eps as f32)?;
            let qkv = layer.qkv.forward(&normed)?;
            let heard = self.attend(&qkv, &cos, &sin, &mut row.caches[n], Some(&mask))?;
            x = (x + layer.out.forward(&heard)?)?;
            x = self.mlp(layer, &x)?;
            if n == 0 {
                after_first = x.clone();
            }
        }
        row.len += count;
        Ok(Trace { hidden: rms_norm(&x, &self.norm, self.config.rms_eps as f32)?, after_first })
    }

    /// Appends one position to each of several rows: `x` is `[rows, hidden]`, so is the result.
    pub(super) fn step(&self, rows: &mut [&mut Row], x: &Tensor) -> Result<Tensor> {
        let count = rows.len();
        let angles = rows.iter().map(|row| self.angles(row.len, 1)).collect::<Result<Vec<_>>>()?;
        let mut x = widened(x)?;
        for (n, layer) in self.layers.iter().enumerate() {
            let normed = rms_norm(&x, &layer.input_norm, self.config.rms_eps as f32)?;
            let qkv = layer.qkv.forward(&normed)?;
            let mut heard = Vec::with_capacity(count);
            for (r, (row, (cos, sin))) in rows.iter_mut().zip(&angles).enumerate() {
                heard.push(self.attend(&qkv.narrow(0, r, 1)?, cos, sin, &mut row.caches[n], None)?);
            }
            x = (x + layer.out.forward(&widened(&Tensor::cat(&heard, 0)?)?)?)?;
            x = self.mlp(layer, &x)?;
        }
        for row in rows.iter_mut() {
            row.len += 1;
        }
        rms_norm(&x, &self.norm, self.config.rms_eps as f32)?.narrow(0, 0, count)
    }

    /// Scores over the speech table, `[rows, speech rows]`.
    pub(super) fn scores(&self, hidden: &Tensor) -> Result<Tensor> {
        self.head.forward(&widened(hidden)?)?.narrow(0, 0, hidden.dim(0)?)
    }

    fn mlp(&self, layer: &Layer, x: &Tensor) -> Result<Tensor> {
        let normed = rms_norm(x, &layer.post_norm, self.config.rms_eps as f32)?;
        let both = layer.gate_up.forward(&normed)?;
        let inner = self.config.intermediate;
        let gated = (silu(&both.narrow(D::Minus1, 0, inner)?)? * both.narrow(D::Minus1, inner, inner)?)?;
        x + layer.down.forward(&gated)?
    }

    /// Attention of new positions of one row over its cache: `qkv` `[positions, q+k+v]` to `[positions, q]`.
    fn attend(
        &self,
        qkv: &Tensor,
        cos: &Tensor,
        sin: &Tensor,
        cache: &mut KvCache,
        mask: Option<&Tensor>,
    ) -> Result<Tensor> {
        let LlmConfig { heads, kv_heads, head_dim, .. } = self.config;
        let count = qkv.dim(0)?;
        let split = |start: usize, heads: usize| -> Result<Tensor> {
            qkv.narrow(1, start * head_dim, heads * head_dim)?
                .reshape((count, heads, head_dim))?
                .transpose(0, 1)?
                .contiguous()
        };
        let turn = |x: Tensor| rope(&x.unsqueeze(0)?, cos, sin)?.squeeze(0);
        let q = turn(split(0, heads)?)?;
        let k = turn(split(heads, kv_heads)?)?;
        let v = split(heads + kv_heads, kv_heads)?;
        let (k, v) = cache.append(&k, &v)?;
        let group = heads / kv_heads;
        let seen = k.dim(1)?;
        let q = (q.reshape((kv_heads, group * count, head_dim))? * (1.0 / (head_dim as f64).sqrt()))?;
        let scores = q.matmul(&k.transpose(1, 2)?)?;
        let scores = match mask {
            Some(mask) => {
                scores.reshape((heads, count, seen))?.broadcast_add(mask)?.reshape((kv_heads, group * count, seen))?
            }
            None => scores,
        };
        let heard = softmax_last_dim(&scores)?.matmul(&v.contiguous()?)?;
        heard.reshape((heads, count, head_dim))?.transpose(0, 1)?.contiguous()?.reshape((count, heads * head_dim))
    }

    fn angles(&self, from: usize, count: usize) -> Result<(Tensor, Tensor)> {
        let half = self.inv_freq.len();
        let angles: Vec<f32> =
            (from..from + count).flat_map(|p| self.inv_freq.iter().map(move |f| p as f32 * f)).collect();
        let table =
            |f: fn(f32) -> f32| Tensor::from_vec(angles.iter().map(|&a| f(a)).collect(), (count, half), &Device::Cpu);
        Ok((table(f32::cos)?, table(f32::sin)?))
    }
}

/// With zero rows up to [`LEAST_ROWS`].
fn widened(x: &Tensor) -> Result<Tensor> {
    match LEAST_ROWS.checked_sub(x.dim(0)?) {
        Some(missing) if missing > 0 => x.pad_with_zeros(0, 0, missing),
        _ => x.contiguous(),
    }
}

/// `[count, past + count]`: 0 where a position may look, minus infinity where not.
fn causal_mask(count: usize, past: usize) -> Result<Tensor> {
    let seen = past + count;
    let mask: Vec<f32> =
        (0..count).flat_map(|i| (0..seen).map(move |j| if j <= past + i { 0.0 } else { f32::NEG_INFINITY })).collect();
    Tensor::from_vec(mask, (count, seen), &Device::Cpu)?.to_dtype(DType::F32)
}

/// Bytes of one position's keys and values.
pub(super) fn position_bytes(config: &LlmConfig) -> u64 {
    (config.layers * 2 * config.kv_heads * config.head_dim * 4) as u64
}
