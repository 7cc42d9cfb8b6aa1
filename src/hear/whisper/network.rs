//! Encoder and decoder of Whisper on the CPU: features to states, states and text to scores.
//!
//! Owns the weights; all that one recognition needs besides is in its [`Cache`].

use candle_core::{Device, IndexOp, Result, Tensor};

use super::HearError;
use super::config::{LoadError, Sizes};
use super::engine::{Beams, Engine, Text};
use super::layers::{Attention, Conv, FeedForward, Memory, Norm, Weights, gelu};
use super::stop::Stop;
use crate::voice::features::Matrix;

/// Both parts, in memory.
pub(super) struct Cpu {
    encoder: Encoder,
    decoder: Decoder,
}

impl Cpu {
    pub(super) fn load(weights: &mut Weights, sizes: &Sizes) -> std::result::Result<Self, LoadError> {
        Ok(Self { encoder: Encoder::load(weights, sizes)?, decoder: Decoder::load(weights, sizes)? })
    }

    fn states(&self, features: Matrix, stop: &Stop) -> Result<Option<Tensor>> {
        let features = Tensor::from_vec(features.data, (features.rows, features.cols), &Device::Cpu)?;
        self.encoder.forward(&features, stop)
    }

    fn text(&self, states: &Tensor) -> Result<CpuText<'_>> {
        Ok(CpuText { decoder: &self.decoder, cache: self.decoder.begin(states)? })
    }
}

impl Engine for Cpu {
    fn hear<'a>(&'a self, features: Matrix, stop: &Stop) -> std::result::Result<Option<Box<dyn Text + 'a>>, HearError> {
        let Some(states) = self.states(features, stop)? else { return Ok(None) };
        Ok(Some(Box::new(self.text(&states)?)))
    }

    fn states(&self, features: Matrix, stop: &Stop) -> std::result::Result<Option<Vec<f32>>, HearError> {
        let Some(states) = self.states(features, stop)? else { return Ok(None) };
        Ok(Some(states.flatten_all()?.to_vec1()?))
    }

    fn about<'a>(&'a self, states: &[f32]) -> std::result::Result<Box<dyn Text + 'a>, HearError> {
        let width = self.decoder.tokens.dim(1)?;
        let states = Tensor::from_slice(states, (states.len() / width, width), &Device::Cpu)?;
        Ok(Box::new(self.text(&states)?))
    }
}

struct CpuText<'a> {
    decoder: &'a Decoder,
    cache: Cache,
}

impl Text for CpuText<'_> {
    fn len(&self) -> usize {
        self.cache.length
    }

    fn rewind(&mut self, length: usize) -> std::result::Result<(), HearError> {
        Ok(self.cache.rewind(length)?)
    }

    fn next(&mut self, tokens: &[u32]) -> std::result::Result<Vec<f32>, HearError> {
        Ok(self.decoder.next(tokens, &mut self.cache)?)
    }

    fn each(&mut self, tokens: &[u32]) -> std::result::Result<Vec<f32>, HearError> {
        Ok(self.decoder.forward(tokens, &mut self.cache, None)?.flatten_all()?.to_vec1()?)
    }

    fn beams(&self, _width: usize) -> Option<Box<dyn Beams + '_>> {
        let Cache { text, heard, length } = &self.cache;
        Some(Box::new(CpuBeams { decoder: self.decoder, heard, texts: vec![text.clone()], length: *length }))
    }

    fn watched(&mut self, tokens: &[u32]) -> std::result::Result<(Vec<f32>, Option<Vec<Tensor>>), HearError> {
        let mut seen = Vec::new();
        let scores = self.decoder.forward(tokens, &mut self.cache, Some(&mut seen))?;
        Ok((scores.flatten_all()?.to_vec1()?, Some(seen)))
    }
}

/// What each of several texts of one length remembers of itself, by layer.
struct CpuBeams<'a> {
    decoder: &'a Decoder,
    heard: &'a [Memory],
    texts: Vec<Vec<Option<Memory>>>,
    length: usize,
}

impl Beams for CpuBeams<'_> {
    fn next(&mut self, from: &[(usize, u32)]) -> std::result::Result<Vec<Vec<f32>>, HearError> {
        self.texts = from.iter().map(|(parent, _)| self.texts[*parent].clone()).collect();
        let tokens: Vec<u32> = from.iter().map(|(_, token)| *token).collect();
        let scores = self.decoder.beside(&tokens, &mut self.texts, self.heard, self.length)?;
        self.length += 1;
        Ok(scores.to_vec2()?)
    }
}

/// The part that hears.
struct Encoder {
    conv1: Conv,
    conv2: Conv,
    positions: Tensor,
    layers: Vec<EncoderLayer>,
    norm: Norm,
}

struct EncoderLayer {
    attention_norm: Norm,
    attention: Attention,
    forward_norm: Norm,
    forward: FeedForward,
}

impl Encoder {
    fn load(weights: &mut Weights, sizes: &Sizes) -> std::result::Result<Self, LoadError> {
        let (root, width) = ("model.encoder", sizes.d_model);
        let layers = (0..sizes.encoder_layers).map(|n| {
            let name = format!("{root}.layers.{n}");
            Ok(EncoderLayer {
                attention_norm: Norm::load(weights, &format!("{name}.self_attn_layer_norm"), width)?,
                attention: Attention::load(
                    weights,
                    &format!("{name}.self_attn"),
                    width,
                    sizes.encoder_attention_heads,
                )?,
                forward_norm: Norm::load(weights, &format!("{name}.final_layer_norm"), width)?,
                forward: FeedForward::load(weights, &name, width, sizes.encoder_ffn_dim)?,
            })
        });
        let layers = layers.collect::<std::result::Result<_, LoadError>>()?;
        Ok(Self {
            layers,
            conv1: Conv::load(weights, &format!("{root}.conv1"), (sizes.num_mel_bins, width), 1)?,
            conv2: Conv::load(weights, &format!("{root}.conv2"), (width, width), 2)?,
            positions: weights.take(&format!("{root}.embed_positions.weight"), (sizes.max_source_positions, width))?,
            norm: Norm::load(weights, &format!("{root}.layer_norm"), width)?,
        })
    }

    /// States `[positions, width]` of features `[frames, bands]`; `None` when `stop` was set meanwhile.
    fn forward(&self, features: &Tensor, stop: &Stop) -> Result<Option<Tensor>> {
        let x = gelu(&self.conv1.forward(features)?)?;
        let x = gelu(&self.conv2.forward(&x)?)?;
        let mut x = (x + &self.positions)?;
        for layer in &self.layers {
            if stop.is_set() {
                return Ok(None);
            }
            let normed = layer.attention_norm.forward(&x)?;
            let (heard, _) = layer.attention.attend(&normed, &layer.attention.memory(&normed)?, None)?;
            x = (x + heard)?;
            x = (&x + layer.forward.forward(&layer.forward_norm.forward(&x)?)?)?;
        }
        self.norm.forward(&x).map(Some)
    }
}

/// The part that writes.
struct Decoder {
    /// `[vocabulary, width]`; also the last layer.
    tokens: Tensor,
    positions: Tensor,
    layers: Vec<DecoderLayer>,
    norm: Norm,
    scale: Option<f64>,
}

struct DecoderLayer {
    attention_norm: Norm,
    attention: Attention,
    heard_norm: Norm,
    heard: Attention,
    forward_norm: Norm,
    forward: FeedForward,
}

/// What the decoder remembers of one window: what was heard, and the text so far.
struct Cache {
    text: Vec<Option<Memory>>,
    heard: Vec<Memory>,
    length: usize,
}

impl Cache {
    /// Forgets all but the first `length` tokens.
    fn rewind(&mut self, length: usize) -> Result<()> {
        if length >= self.length {
            return Ok(());
        }
        for text in &mut self.text {
            *text = match text.take() {
                Some(old) if length > 0 => {
                    Some(Memory { keys: old.keys.narrow(1, 0, length)?, values: old.values.narrow(1, 0, length)? })
                }
                _ => None,
            };
        }
        self.length = length;
        Ok(())
    }
}

impl Decoder {
    fn load(weights: &mut Weights, sizes: &Sizes) -> std::result::Result<Self, LoadError> {
        let (root, width, heads) = ("model.decoder", sizes.d_model, sizes.decoder_attention_heads);
        let layers = (0..sizes.decoder_layers).map(|n| {
            let name = format!("{root}.layers.{n}");
            Ok(DecoderLayer {
                attention_norm: Norm::load(weights, &format!("{name}.self_attn_layer_norm"), width)?,
                attention: Attention::load(weights, &format!("{name}.self_attn"), width, heads)?,
                heard_norm: Norm::load(weights, &format!("{name}.encoder_attn_layer_norm"), width)?,
                heard: Attention::load(weights, &format!("{name}.encoder_attn"), width, heads)?,
                forward_norm: Norm::load(weights, &format!("{name}.final_layer_norm"), width)?,
                forward: FeedForward::load(weights, &name, width, sizes.decoder_ffn_dim)?,
            })
        });
        let layers = layers.collect::<std::result::Result<_, LoadError>>()?;
        Ok(Self {
            layers,
            tokens: weights.take(&format!("{root}.embed_tokens.weight"), (sizes.vocab_size, width))?,
            positions: weights.take(&format!("{root}.embed_positions.weight"), (sizes.max_target_positions, width))?,
            norm: Norm::load(weights, &format!("{root}.layer_norm"), width)?,
            scale: sizes.scale_embedding.then(|| (width as f64).sqrt()),
        })
    }

    /// Begins a text about what was heard: `states` of the encoder.
    fn begin(&self, states: &Tensor) -> Result<Cache> {
        let heard = self.layers.iter().map(|layer| layer.heard.memory(states)).collect::<Result<_>>()?;
        Ok(Cache { text: self.layers.iter().map(|_| None).collect(), heard, length: 0 })
    }

    /// Scores `[tokens, vocabulary]` of what follows each of the next `tokens`. Puts the weights of each layer over
    /// what was heard into `seen`.
    fn forward(&self, tokens: &[u32], cache: &mut Cache, mut seen: Option<&mut Vec<Tensor>>) -> Result<Tensor> {
        let (count, before) = (tokens.len(), cache.length);
        if before + count > self.positions.dim(0)? {
            candle_core::bail!("a text of {} tokens is longer than the model's positions", before + count);
        }
        let mut x = (self.embed(tokens)? + self.positions.narrow(0, before, count)?)?;
        let mask = if count > 1 { Some(mask(count, before)?) } else { None };
        for ((layer, text), heard) in self.layers.iter().zip(&mut cache.text).zip(&cache.heard) {
            let normed = layer.attention_norm.forward(&x)?;
            let new = layer.attention.memory(&normed)?;
            let all = new.behind(text.take())?;
            let (written, _) = layer.attention.attend(&normed, &all, mask.as_ref())?;
            *text = Some(all);
            x = (x + written)?;
            let (taken, weights) = layer.heard.attend(&layer.heard_norm.forward(&x)?, heard, None)?;
            if let Some(seen) = &mut seen {
                seen.push(weights);
            }
            x = (x + taken)?;
            x = (&x + layer.forward.forward(&layer.forward_norm.forward(&x)?)?)?;
        }
        cache.length += count;
        self.scores(&x)
    }

    /// Scores `[texts, vocabulary]` of what follows `tokens`, one of each text. `texts`: what each remembers of its own
    /// `before` tokens, by layer.
    fn beside(
        &self,
        tokens: &[u32],
        texts: &mut [Vec<Option<Memory>>],
        heard: &[Memory],
        before: usize,
    ) -> Result<Tensor> {
        if before >= self.positions.dim(0)? {
            candle_core::bail!("a text of {} tokens is longer than the model's positions", before + 1);
        }
        let mut x = self.embed(tokens)?.broadcast_add(&self.positions.narrow(0, before, 1)?)?;
        for (n, (layer, heard)) in self.layers.iter().zip(heard).enumerate() {
            let normed = layer.attention_norm.forward(&x)?;
            let new = layer.attention.memory(&normed)?;
            let own = |(row, text): (usize, &mut Vec<Option<Memory>>)| {
                let all = new.at(row)?.behind(text[n].take())?;
                let (written, _) = layer.attention.attend(&normed.narrow(0, row, 1)?, &all, None)?;
                text[n] = Some(all);
                Ok(written)
            };
            // All that they do not share is what was written.
            let written = texts.iter_mut().enumerate().map(own).collect::<Result<Vec<_>>>()?;
            x = (x + Tensor::cat(&written, 0)?)?;
            let (taken, _) = layer.heard.attend(&layer.heard_norm.forward(&x)?, heard, None)?;
            x = (x + taken)?;
            x = (&x + layer.forward.forward(&layer.forward_norm.forward(&x)?)?)?;
        }
        self.scores(&x)
    }

    fn embed(&self, tokens: &[u32]) -> Result<Tensor> {
        let x = self.tokens.index_select(&Tensor::new(tokens, &Device::Cpu)?, 0)?;
        match self.scale {
            Some(scale) => x * scale,
            None => Ok(x),
        }
    }

    fn scores(&self, x: &Tensor) -> Result<Tensor> {
        // The vocabulary's rows are contiguous in memory, so each score is a product of two contiguous vectors.
        self.norm.forward(x)?.matmul(&self.tokens.t()?)
    }

    /// As [`Decoder::forward`], the scores behind the last of `tokens` alone.
    fn next(&self, tokens: &[u32], cache: &mut Cache) -> Result<Vec<f32>> {
        let scores = self.forward(tokens, cache, None)?;
        scores.i(scores.dim(0)? - 1)?.to_vec1()
    }
}

/// Each of `count` tokens sees the `before` older ones and itself, nothing later.
fn mask(count: usize, before: usize) -> Result<Tensor> {
    let row =
        |token: usize| (0..before + count).map(move |seen| if seen > before + token { f32::NEG_INFINITY } else { 0.0 });
    Tensor::from_vec((0..count).flat_map(row).collect(), (count, before + count), &Device::Cpu)
}
