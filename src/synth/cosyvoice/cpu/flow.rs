//! Tokens to mel: the pre-lookahead layer, the guided Euler solver, and the state of one stream.
//!
//! A [`Stream`] is opened on a prompt, takes tokens by [`Stream::push`], and is advanced one Euler step of one
//! window at a time by [`Flow::advance`]: between any two steps it can be set aside and taken up again. A window is
//! one static block, or the rest at the end.

use std::sync::Arc;

use candle_core::{Device, Result, Tensor};

use super::dit::{Dit, Input, Mask, Modulation, StepState};
use super::ops::{Conv, ConvShape, Linear, LoadError, leaky, repeat_frames};
use crate::synth::cosyvoice::backend::{FinalChunk, FlowPrompt, Hardware};
use crate::synth::cosyvoice::checkpoint::TensorFile;
use crate::synth::cosyvoice::config::{Config, DEFAULT_LEAKY_SLOPE, FlowConfig};
use crate::synth::cosyvoice::noise;

/// The flow model.
pub(super) struct Flow {
    config: FlowConfig,
    ratio: usize,
    tokens: Tensor,
    speaker: Linear,
    ahead: Conv,
    behind: Conv,
    dit: Dit,
    /// Of the Euler steps.
    lengths: Vec<f32>,
    modulations: Vec<Modulation>,
    /// `[frames, mel]`.
    noise: Tensor,
}

/// A voice as the solver uses it.
pub(super) struct Prompt {
    tokens: Vec<u32>,
    /// `[frames, mel]`.
    mel: Tensor,
    frames: usize,
    /// `[spk]`.
    speaker: Tensor,
}

/// Prompt state that every utterance of a voice starts from.
#[derive(Clone)]
pub(super) struct Prefix {
    steps: Vec<StepState>,
    frames: usize,
}

/// One utterance.
pub(super) struct Stream {
    prompt: Arc<Prompt>,
    tokens: Vec<u32>,
    last: bool,
    /// Frames that were complete before the last push: always solved block by block.
    settled: usize,
    steps: Vec<StepState>,
    /// Frames whose state is carried, prompt included: finished windows but for a cut block.
    done: usize,
    /// Frames given out, prompt included.
    out: usize,
    /// Whether a push may end inside a static block, see [`Stream::cut_blocks`].
    cuts: bool,
    window: Option<Window>,
    final_chunk: FinalChunk,
}

struct Window {
    start: usize,
    frames: usize,
    /// Frames before this one are already out (a final full solve starts at 0).
    keep: usize,
    mask: Mask,
    step: usize,
    /// State of a full solve or of a cut block, separate from the stream's.
    own: Option<Vec<StepState>>,
    /// The rest of this block is yet to come.
    cut: bool,
    /// `[frames, mel]`.
    x: Tensor,
    mu: Tensor,
    cond: Tensor,
}

impl Flow {
    pub(super) fn load(file: &TensorFile, config: &Config, modes: &Hardware) -> std::result::Result<Self, LoadError> {
        let flow = &config.flow;
        let mut dit = Dit::load(file, flow, modes.int8_keys)?;
        let evaluations = flow.evaluations();
        let modulations =
            evaluations.iter().map(|(t, _)| dit.modulation(file, *t)).collect::<std::result::Result<Vec<_>, _>>()?;
        if modes.products.fp8() {
            dit.round_products(&modulations)?;
        }
        let noise = Tensor::from_vec(noise::flow_table(config), (flow.mel, config.noise_frames()), &Device::Cpu)?;
        let table = [flow.vocab, flow.input];
        let look = ConvShape::plain(flow.lookahead_channels, flow.input, flow.lookahead + 1);
        let back = ConvShape::plain(flow.input, flow.lookahead_channels, 3);
        Ok(Self {
            config: flow.clone(),
            ratio: config.token_mel_ratio,
            tokens: Tensor::from_slice(&file.floats("input_embedding.weight", &table)?, &table, &Device::Cpu)?,
            speaker: Linear::load(file, "spk_embed_affine_layer", flow.spk_dim, flow.speaker, true)?,
            ahead: Conv::load(file, "pre_lookahead_layer.conv1", look, candle_core::DType::F32)?,
            behind: Conv::load(file, "pre_lookahead_layer.conv2", back, candle_core::DType::F32)?,
            dit,
            lengths: evaluations.into_iter().map(|(_, length)| length).collect(),
            modulations,
            noise: noise.t()?.contiguous()?,
        })
    }

    pub(super) fn dit(&self) -> &Dit {
        &self.dit
    }

    /// The solver's times.
    pub(super) fn times(&self) -> Vec<f32> {
        self.config.times()
    }

    /// The first `frames` columns of the noise table, `[frames, mel]`.
    pub(super) fn noise(&self, frames: usize) -> Result<Tensor> {
        self.noise.narrow(0, 0, frames.min(self.noise.dim(0)?))
    }

    /// Frames that the noise table covers.
    pub(super) fn limit(&self) -> usize {
        self.noise.dims().first().copied().unwrap_or_default()
    }

    /// L2 normalisation and projection of a raw speaker vector: `[spk]`.
    pub(super) fn project(&self, speaker: &[f32]) -> Result<Tensor> {
        let norm = speaker.iter().map(|v| v * v).sum::<f32>().sqrt().max(1e-12);
        let unit: Vec<f32> = speaker.iter().map(|v| v / norm).collect();
        self.speaker.forward(&Tensor::from_vec(unit, (1, speaker.len()), &Device::Cpu)?)?.squeeze(0)
    }

    /// Takes a voice. Its sizes must fit the model.
    pub(super) fn prompt(&self, voice: &FlowPrompt) -> Result<Prompt> {
        let mel = self.config.mel;
        let frames = voice.mel.len() / mel;
        Ok(Prompt {
            tokens: voice.tokens.clone(),
            mel: Tensor::from_slice(&voice.mel, (frames, mel), &Device::Cpu)?,
            frames,
            speaker: self.project(&voice.speaker)?,
        })
    }

    /// The pre-lookahead layer's output for tokens `from..to` of `tokens`: `[to - from, input]`. Tokens after `to`
    /// are the look-ahead; past the last there are zeros.
    pub(super) fn look_ahead(&self, tokens: &[u32], from: usize, to: usize) -> Result<Tensor> {
        // The second convolution looks at two hidden frames before; before the start they are zeros.
        let back = self.behind.reach();
        let start = from.saturating_sub(back);
        let stop = (to + self.config.lookahead).min(tokens.len());
        let ids = Tensor::from_slice(&tokens[start..stop], stop - start, &Device::Cpu)?;
        let x = self.tokens.index_select(&ids, 0)?;
        let padded = x.pad_with_zeros(0, 0, to + self.config.lookahead - stop)?;
        let hidden = leaky(&self.ahead.forward(&padded)?, DEFAULT_LEAKY_SLOPE)?;
        let hidden = hidden.pad_with_zeros(0, back - (from - start), 0)?;
        self.behind.forward(&hidden)? + x.narrow(0, from - start, to - from)?
    }

    /// The state every utterance of this voice shares: complete prompt blocks whose look-ahead lies in the prompt.
    pub(super) fn prefix(&self, prompt: &Arc<Prompt>) -> Result<Prefix> {
        let mut stream = Stream::new(prompt.clone(), None, self.config.steps, FinalChunk::Causal);
        let frames = self.shared_frames(prompt);
        while stream.done < frames {
            self.advance(&mut stream, frames)?;
        }
        Ok(Prefix { steps: stream.steps, frames })
    }

    fn shared_frames(&self, prompt: &Prompt) -> usize {
        let known = prompt.tokens.len().saturating_sub(self.config.lookahead) * self.ratio;
        // A prompt whose mel is longer than its tokens still starts its blocks at frame 0.
        known / self.config.block * self.config.block
    }

    /// Appends generated tokens; with `last` nothing follows.
    pub(super) fn push(&self, stream: &mut Stream, tokens: &[u32], last: bool) {
        stream.tokens.extend_from_slice(tokens);
        stream.last |= last;
        if !last {
            stream.settled = self.ready(stream);
        }
    }

    /// Runs one Euler step of the stream's next window if there is one whose frames end at or before `limit`.
    /// Returns the mel frames `[frames, mel]` that became final, prompt frames left out.
    pub(super) fn advance(&self, stream: &mut Stream, limit: usize) -> Result<Option<Tensor>> {
        let window = match stream.window.take() {
            Some(window) => Some(window),
            None => self.next_window(stream, limit)?,
        };
        let Some(mut window) = window else { return Ok(None) };
        let step = window.step;
        let states = window.own.as_mut().unwrap_or(&mut stream.steps);
        let state = &mut states[step];
        let two = |t: &Tensor, second: &Tensor| Tensor::stack(&[t, second], 0);
        let input = Input {
            x: &two(&window.x, &window.x)?,
            cond: &two(&window.cond, &window.cond.zeros_like()?)?,
            mu: &two(&window.mu, &window.mu.zeros_like()?)?,
            speaker: &two(&stream.prompt.speaker, &stream.prompt.speaker.zeros_like()?)?,
        };
        let v = self.dit.forward(&input, &self.modulations[step], state, window.mask)?.out;
        let guidance = self.config.guidance;
        let v = ((v.get(0)? * (1.0 + guidance))? - (v.get(1)? * guidance)?)?;
        window.x = (window.x + (v * f64::from(self.lengths[step]))?)?;
        window.step += 1;
        if window.step < self.config.steps {
            stream.window = Some(window);
            return Ok(None);
        }
        stream.out = window.start + window.frames;
        if !window.cut {
            stream.done = stream.out;
        }
        let first = window.keep.max(stream.prompt.frames);
        if stream.out <= first {
            return Ok(None);
        }
        Ok(Some(window.x.narrow(0, first - window.start, stream.out - first)?.contiguous()?))
    }

    /// Euler steps until everything pushed so far is out.
    pub(super) fn pending(&self, stream: &Stream) -> usize {
        let (ready, block) = (self.ready(stream), self.config.block);
        let current = stream.window.as_ref();
        let in_flight = current.map_or(0, |w| self.config.steps - w.step);
        let out = current.map_or(stream.out, |w| w.start + w.frames);
        let done = current.filter(|w| !w.cut).map_or(stream.done, |w| w.start + w.frames);
        if out >= ready {
            return in_flight;
        }
        let windows = if stream.last && stream.final_chunk == FinalChunk::Reference {
            let before = if out >= stream.settled { 0 } else { (stream.settled - done).div_ceil(block) };
            before + usize::from(ready > stream.settled)
        } else {
            (ready - done).div_ceil(block)
        };
        in_flight + windows * self.config.steps
    }

    /// Frames whose tokens and look-ahead are known.
    fn ready(&self, stream: &Stream) -> usize {
        let ahead = if stream.last { 0 } else { self.config.lookahead };
        stream.tokens.len().saturating_sub(ahead) * self.ratio
    }

    fn next_window(&self, stream: &mut Stream, limit: usize) -> Result<Option<Window>> {
        let (ready, block) = (self.ready(stream).min(limit), self.config.block);
        if stream.out >= ready {
            return Ok(None);
        }
        let whole = stream.last && stream.final_chunk == FinalChunk::Reference && stream.out >= stream.settled;
        let start = if whole { 0 } else { stream.done };
        let frames = if whole { ready } else { block.min(ready - start) };
        let cut = !whole && frames < block && !stream.last;
        if cut && !stream.cuts {
            return Ok(None);
        }
        let (from, to) = (start / self.ratio, (start + frames).div_ceil(self.ratio));
        let mu = repeat_frames(&self.look_ahead(&stream.tokens, from, to)?, self.ratio)?;
        let mu = mu.narrow(0, start - from * self.ratio, frames)?;
        let prompt = &stream.prompt;
        let known = prompt.frames.saturating_sub(start).min(frames);
        let cond = match known {
            0 => Tensor::zeros((frames, self.config.mel), candle_core::DType::F32, &Device::Cpu)?,
            _ => prompt.mel.narrow(0, start, known)?.pad_with_zeros(0, 0, frames - known)?,
        };
        let own = if cut { Some(stream.steps.clone()) } else { whole.then(|| fresh(self.config.steps)) };
        Ok(Some(Window {
            start,
            frames,
            keep: stream.out,
            mask: if whole { Mask::Full } else { Mask::Blocks },
            step: 0,
            own,
            cut,
            x: self.noise.narrow(0, start, frames)?,
            mu: mu.contiguous()?,
            cond,
        }))
    }

    /// The whole utterance in one call: `[frames, mel]` without the prompt's.
    pub(super) fn solve(&self, prompt: &Arc<Prompt>, tokens: &[u32], mask: Mask) -> Result<Tensor> {
        let choice = if mask == Mask::Full { FinalChunk::Reference } else { FinalChunk::Causal };
        let mut stream = Stream::new(prompt.clone(), None, self.config.steps, choice);
        self.push(&mut stream, tokens, true);
        let mut parts = Vec::new();
        while self.pending(&stream) > 0 {
            parts.extend(self.advance(&mut stream, usize::MAX)?);
        }
        match parts.len() {
            0 => Tensor::zeros((0, self.config.mel), candle_core::DType::F32, &Device::Cpu),
            _ => Tensor::cat(&parts, 0),
        }
    }
}

impl Stream {
    /// A stream behind `prompt`, from its shared prefix where there is one, of a solver of `steps` Euler steps.
    pub(super) fn new(prompt: Arc<Prompt>, prefix: Option<&Prefix>, steps: usize, final_chunk: FinalChunk) -> Self {
        let (steps, done) = match prefix {
            Some(prefix) => (prefix.steps.clone(), prefix.frames),
            None => (fresh(steps), 0),
        };
        Self {
            tokens: prompt.tokens.clone(),
            prompt,
            last: false,
            settled: 0,
            steps,
            done,
            out: done,
            cuts: false,
            window: None,
            final_chunk,
        }
    }

    /// Lets pushes end inside a static block: the block is solved as far as it goes, and again from its start when
    /// its rest is there, as a call over everything so far would.
    pub(super) fn cut_blocks(&mut self) {
        self.cuts = true;
    }

    /// Tokens so far, the prompt's included.
    pub(super) fn tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Whether the last token is known.
    pub(super) fn is_last(&self) -> bool {
        self.last
    }

    /// Bytes of its own state and the prefix it shares.
    pub(super) fn bytes(&self) -> u64 {
        let own = self.window.iter().filter_map(|w| w.own.as_ref()).flatten();
        self.steps.iter().chain(own).map(StepState::bytes).sum()
    }
}

impl Prefix {
    /// Bytes held.
    pub(super) fn bytes(&self) -> u64 {
        self.steps.iter().map(StepState::bytes).sum()
    }
}

fn fresh(steps: usize) -> Vec<StepState> {
    (0..steps).map(|_| StepState::default()).collect()
}
