//! Mel to waveform, going on from call to call: every convolution keeps its history, nothing is computed twice.
//!
//! Owns the weights; a stream's histories are a [`Voice`], owned by the caller. Given `n` frames of a mel that goes
//! on, frames up to `n - look_right` pass through the network. Their source spectrum needs a few samples of the
//! excitation after them (F0 looks one frame less far than `conv_pre`, so they are there), and the last few samples
//! of their inverse transform need what follows; whole frames are given out, so one more is withheld.

use candle_core::{DType, Device, Result, Tensor};

use super::ops::{Conv, ConvShape, LoadError, leaky, repeat_frames};
use super::spectrum::{Analysis, Synthesis};
use crate::synth::cosyvoice::checkpoint::TensorFile;
use crate::synth::cosyvoice::config::{Config, DEFAULT_LEAKY_SLOPE, F0_AHEAD, HiftConfig};
use crate::synth::cosyvoice::noise::SineTable;
use crate::synth::cosyvoice::respeed;

/// Kernel of the F0 network's later layers.
const F0_KERNEL: usize = 3;
/// Layers of the F0 network.
const F0_LAYERS: usize = 5;
/// Kernel of `conv_post`.
const POST_KERNEL: usize = 7;

/// The vocoder.
pub(super) struct Hift {
    config: HiftConfig,
    rate: usize,
    f0: Vec<Conv>,
    f0_out: (Tensor, f64),
    source: (Vec<f32>, f32),
    pre: Conv,
    stages: Vec<StageNet>,
    post: Conv,
}

struct StageNet {
    up: Conv,
    rate: usize,
    down: Conv,
    /// Spectrum columns before the first of a frame that `down` looks at.
    down_reach: usize,
    source: ResBlock,
    blocks: Vec<ResBlock>,
}

struct ResBlock {
    layers: Vec<[(Snake, Conv); 2]>,
}

/// `x + sin(alpha x)^2 / (alpha + 1e-9)`.
struct Snake {
    alpha: Tensor,
    inverse: Tensor,
}

/// Histories of one residual block.
type BlockState = Vec<[Option<Tensor>; 2]>;

#[derive(Clone, Default)]
struct StageState {
    up: Option<Tensor>,
    source: BlockState,
    blocks: Vec<BlockState>,
}

/// The state of one stream.
#[derive(Clone)]
pub(super) struct Voice {
    /// Mel frames not yet through F0 / `conv_pre`: `[frames, mel]`, from frame `taken` on.
    mel: Option<Tensor>,
    received: usize,
    /// Frames whose F0 is known.
    f0_done: usize,
    f0: Vec<Option<Tensor>>,
    /// Running sums of the phase, in double, one a harmonic.
    phase: Vec<f64>,
    /// Frames through the network.
    done: usize,
    analysis: Analysis,
    /// Last spectrum columns, `[columns, rows]`.
    spectrum: Option<Tensor>,
    pre_from: usize,
    stages: Vec<StageState>,
    post: Option<Tensor>,
    synthesis: Synthesis,
    /// Exact samples of a frame that is not complete yet.
    ready: Vec<f32>,
    finished: bool,
}

/// Intermediate results of one call, for comparing stages; all `[steps, channels]`.
#[derive(Default)]
pub(super) struct Trace {
    pub(super) f0: Vec<f32>,
    pub(super) source: Vec<f32>,
    pub(super) spectrum: Option<Tensor>,
    pub(super) conv_pre: Option<Tensor>,
    pub(super) up0: Option<Tensor>,
    pub(super) source_block0: Option<Tensor>,
    pub(super) block0: Option<Tensor>,
    pub(super) conv_post: Option<Tensor>,
}

impl Hift {
    pub(super) fn load(file: &TensorFile, config: &Config) -> std::result::Result<Self, LoadError> {
        let h = &config.hift;
        let (f64_, f32_) = (DType::F64, DType::F32);
        let mut f0 = Vec::with_capacity(F0_LAYERS);
        for n in 0..F0_LAYERS {
            let (inp, kernel) = if n == 0 { (h.mel, F0_AHEAD + 1) } else { (h.f0_channels, F0_KERNEL) };
            let shape = ConvShape::plain(h.f0_channels, inp, kernel);
            // Layers of the original's sequence alternate with activations.
            f0.push(Conv::load(file, &format!("f0_predictor.condnet.{}", 2 * n), shape, f64_)?);
        }
        let f0_weight = file.floats("f0_predictor.classifier.weight", &[1, h.f0_channels])?;
        let f0_weight = Tensor::from_slice(&f0_weight, (h.f0_channels, 1), &Device::Cpu)?.to_dtype(f64_)?;
        let f0_bias = file.floats("f0_predictor.classifier.bias", &[1])?;
        let harmonics = h.harmonics + 1;
        let source = file.floats("m_source.l_linear.weight", &[1, harmonics])?;
        let source_bias = file.floats("m_source.l_linear.bias", &[1])?;
        let mut stages = Vec::with_capacity(h.upsample_rates.len());
        for (i, (&rate, &kernel)) in h.upsample_rates.iter().zip(&h.upsample_kernels).enumerate() {
            let channels = h.channels(i);
            let inp = if i == 0 { h.base_channels } else { h.channels(i - 1) };
            let (down, stride) = h.source_down(i);
            let down_shape = ConvShape { out: channels, inp: h.spectrum_rows(), kernel: down, dilation: 1, stride };
            let source = (h.source_kernels[i], &h.source_dilations[i]);
            let blocks = h.resblock_kernels.iter().zip(&h.resblock_dilations).enumerate();
            let count = h.resblock_kernels.len();
            stages.push(StageNet {
                up: Conv::load(file, &format!("ups.{i}"), ConvShape::plain(channels, inp, kernel), f32_)?,
                rate,
                down: Conv::load(file, &format!("source_downs.{i}"), down_shape, f32_)?,
                down_reach: stride - 1,
                source: ResBlock::load(file, &format!("source_resblocks.{i}"), channels, source)?,
                blocks: blocks
                    .map(|(j, (&k, d))| ResBlock::load(file, &format!("resblocks.{}", i * count + j), channels, (k, d)))
                    .collect::<std::result::Result<_, _>>()?,
            });
        }
        let last = h.channels(stages.len() - 1);
        Ok(Self {
            config: h.clone(),
            rate: config.sample_rate,
            f0,
            f0_out: (f0_weight, f64::from(f0_bias[0])),
            source: (source, source_bias[0]),
            pre: Conv::load(file, "conv_pre", ConvShape::plain(h.base_channels, h.mel, h.look_right + 1), f32_)?,
            stages,
            post: Conv::load(file, "conv_post", ConvShape::plain(h.spectrum_rows(), last, POST_KERNEL), f32_)?,
        })
    }

    /// Frames withheld while the mel goes on.
    pub(super) fn hold_back(&self) -> usize {
        self.ahead() + 1
    }

    /// Frames the network withholds: `conv_pre` looks ahead, and the source spectrum needs the frame after.
    fn ahead(&self) -> usize {
        self.config.look_right.max(F0_AHEAD + 1)
    }

    /// Mel channels.
    pub(super) fn mel_channels(&self) -> usize {
        self.config.mel
    }

    /// The start of a stream.
    pub(super) fn start(&self) -> Voice {
        let blank = |block: &ResBlock| vec![[None, None]; block.layers.len()];
        Voice {
            mel: None,
            received: 0,
            f0_done: 0,
            f0: vec![None; F0_LAYERS],
            phase: vec![0.0; self.config.harmonics + 1],
            done: 0,
            analysis: Analysis::new(self.config.n_fft, self.config.hop),
            spectrum: None,
            pre_from: 0,
            stages: self
                .stages
                .iter()
                .map(|s| StageState {
                    up: None,
                    source: blank(&s.source),
                    blocks: s.blocks.iter().map(blank).collect(),
                })
                .collect(),
            post: None,
            synthesis: Synthesis::new(self.config.n_fft, self.config.hop, self.config.limit),
            ready: Vec::new(),
            finished: false,
        }
    }

    /// Takes new mel frames `[frames, mel]` and returns every sample they make exact, in whole frames.
    pub(super) fn push(&self, voice: &mut Voice, mel: &Tensor, last: bool, noise: &mut SineTable) -> Result<Vec<f32>> {
        self.push_traced(voice, mel, last, noise, None)
    }

    /// As [`Self::push`], keeping intermediate results.
    pub(super) fn push_traced(
        &self,
        voice: &mut Voice,
        mel: &Tensor,
        last: bool,
        noise: &mut SineTable,
        mut trace: Option<&mut Trace>,
    ) -> Result<Vec<f32>> {
        if voice.finished {
            return Ok(Vec::new());
        }
        voice.received += mel.dim(0)?;
        let mut known = match voice.mel.take() {
            Some(before) => Tensor::cat(&[&before, mel], 0)?,
            None => mel.clone(),
        };
        if last {
            voice.finished = true;
            known = known.pad_with_zeros(0, 0, self.config.look_right.max(F0_AHEAD))?;
        }
        let total = voice.received;
        let f0_to = if last { total } else { total.saturating_sub(F0_AHEAD) };
        if f0_to > voice.f0_done {
            let from = voice.f0_done - voice.pre_from;
            let x = known.narrow(0, from, f0_to - voice.f0_done + F0_AHEAD)?;
            let f0 = self.fundamental(voice, &x)?;
            let source = self.excite(voice, &f0, noise);
            voice.f0_done = f0_to;
            if let Some(trace) = trace.as_deref_mut() {
                trace.f0.extend_from_slice(&f0);
                trace.source.extend_from_slice(&source);
            }
            voice.analysis.push(&source);
        }
        let to = if last { total } else { total.saturating_sub(self.ahead()) };
        let mut pcm = Vec::new();
        if to > voice.done {
            let x = known.narrow(0, voice.done - voice.pre_from, to - voice.done + self.config.look_right)?;
            pcm = self.network(voice, &x, to, last, trace)?;
        }
        // Both networks start again where the later of them stopped.
        let keep = voice.done.min(voice.f0_done);
        let drop = keep - voice.pre_from;
        let left = known.dim(0)? - drop;
        voice.mel = (!last && left > 0).then(|| known.narrow(0, drop, left)?.contiguous()).transpose()?;
        voice.pre_from = keep;
        Ok(self.whole_frames(voice, pcm, last))
    }

    fn whole_frames(&self, voice: &mut Voice, pcm: Vec<f32>, last: bool) -> Vec<f32> {
        voice.ready.extend(pcm);
        let frame = self.config.frame_samples();
        let out = if last { voice.ready.len() } else { voice.ready.len() / frame * frame };
        let rest = voice.ready.split_off(out);
        std::mem::replace(&mut voice.ready, rest)
    }

    /// F0 in Hz, one a frame: `x` has [`F0_AHEAD`] more frames than the result.
    fn fundamental(&self, voice: &mut Voice, x: &Tensor) -> Result<Vec<f32>> {
        let mut x = x.to_dtype(DType::F64)?;
        for (n, (conv, history)) in self.f0.iter().zip(&mut voice.f0).enumerate() {
            x = if n == 0 { conv.forward(&x)? } else { conv.causal(&x, history)? };
            x = x.elu(1.0)?;
        }
        let f0 = (x.matmul(&self.f0_out.0)? + self.f0_out.1)?.abs()?;
        f0.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
    }

    /// The excitation of new frames. Rounding follows the reference on the CPU: the phase is summed in double and
    /// every product rounded to single.
    fn excite(&self, voice: &mut Voice, f0: &[f32], noise: &mut SineTable) -> Vec<f32> {
        let h = &self.config;
        let samples = h.frame_samples();
        let (weights, bias) = &self.source;
        let rows = noise.rows();
        let start = voice.f0_done * samples;
        let table = noise.prefix(start + f0.len() * samples);
        let mut out = Vec::with_capacity(f0.len() * samples);
        for (n, &f0) in f0.iter().enumerate() {
            let voiced = f64::from(f0) > h.voiced_threshold;
            let mut tone = 0f32;
            for (k, (sum, &weight)) in voice.phase.iter_mut().zip(weights).enumerate() {
                let turn = f0 * (k + 1) as f32 / self.rate as f32;
                *sum += f64::from(turn % 1.0);
                let phase = *sum as f32 * 2.0 * std::f32::consts::PI * samples as f32;
                if voiced {
                    tone += phase.sin() * h.sine_amp as f32 * weight;
                }
            }
            let loudness = if voiced { h.noise_std as f32 } else { h.sine_amp as f32 / 3.0 };
            let at = (start + n * samples) * rows;
            for sample in 0..samples {
                let row = table.get(at + sample * rows..at + (sample + 1) * rows).unwrap_or_default();
                let hiss: f32 = row.iter().zip(weights).map(|(u, w)| u * w).sum();
                out.push((tone + hiss * loudness + bias).tanh());
            }
        }
        out
    }

    /// Frames `voice.done..to` through the convolutions; `x` has the look-ahead of `conv_pre` behind them.
    fn network(
        &self,
        voice: &mut Voice,
        x: &Tensor,
        to: usize,
        last: bool,
        mut trace: Option<&mut Trace>,
    ) -> Result<Vec<f32>> {
        let steps: usize = self.config.upsample_rates.iter().product();
        let first = voice.done == 0;
        let columns = voice.analysis.columns(to * steps + 1, last);
        let rows = self.config.spectrum_rows();
        let fresh = Tensor::from_vec(columns, ((to - voice.done) * steps + usize::from(first), rows), &Device::Cpu)?;
        // What comes before the first column is padding.
        let reach = self.stages.iter().map(|s| s.down_reach).max().unwrap_or_default();
        let spectrum = match voice.spectrum.take() {
            Some(before) => Tensor::cat(&[&before, &fresh], 0)?,
            None => fresh.pad_with_zeros(0, reach, 0)?,
        };
        let mut x = self.pre.forward(x)?;
        if let Some(trace) = trace.as_deref_mut() {
            trace.spectrum = Some(fresh.clone());
            trace.conv_pre = Some(x.clone());
        }
        let ends = self.stages.len() - 1;
        for (i, (net, state)) in self.stages.iter().zip(&mut voice.stages).enumerate() {
            x = leaky(&x, self.config.slope)?;
            x = net.up.causal(&repeat_frames(&x, net.rate)?, &mut state.up)?;
            if let Some(trace) = trace.as_deref_mut().filter(|_| i == 0) {
                trace.up0 = Some(x.clone());
            }
            if i == ends && first {
                // One step reflected at the start of the stream.
                x = Tensor::cat(&[&x.narrow(0, 1, 1)?, &x], 0)?;
            }
            let skip = if net.down_reach == 0 && !first { reach + 1 } else { reach - net.down_reach };
            let view = spectrum.narrow(0, skip, spectrum.dim(0)? - skip)?;
            let source = net.source.forward(&net.down.forward(&view)?, &mut state.source)?;
            if let Some(trace) = trace.as_deref_mut().filter(|_| i == 0) {
                trace.source_block0 = Some(source.clone());
            }
            x = (x + source)?;
            let mut sum: Option<Tensor> = None;
            for (n, (block, state)) in net.blocks.iter().zip(&mut state.blocks).enumerate() {
                let y = block.forward(&x, state)?;
                if let Some(trace) = trace.as_deref_mut().filter(|_| i == 0 && n == 0) {
                    trace.block0 = Some(y.clone());
                }
                sum = Some(match sum {
                    Some(sum) => (sum + y)?,
                    None => y,
                });
            }
            x = (sum.unwrap_or(x) / net.blocks.len() as f64)?;
        }
        let keep = reach + 1;
        voice.spectrum = Some(spectrum.narrow(0, spectrum.dim(0)? - keep, keep)?.contiguous()?);
        let x = leaky(&x, DEFAULT_LEAKY_SLOPE)?;
        let x = self.post.causal(&x, &mut voice.post)?;
        voice.done = to;
        let columns: Vec<f32> = x.flatten_all()?.to_vec1()?;
        if let Some(trace) = trace {
            trace.conv_post = Some(x);
        }
        Ok(voice.synthesis.push(&columns, last.then_some(to * self.config.frame_samples())))
    }
}

impl Voice {
    /// Whether the last frame has been taken.
    pub(super) fn finished(&self) -> bool {
        self.finished
    }
}

impl ResBlock {
    fn load(
        file: &TensorFile,
        name: &str,
        channels: usize,
        shape: (usize, &Vec<usize>),
    ) -> std::result::Result<Self, LoadError> {
        let (kernel, dilations) = shape;
        let mut layers = Vec::with_capacity(dilations.len());
        for (d, &dilation) in dilations.iter().enumerate() {
            let conv = |which: &str, dilation: usize| {
                let shape = ConvShape { dilation, ..ConvShape::plain(channels, channels, kernel) };
                Conv::load(file, &format!("{name}.{which}.{d}"), shape, DType::F32)
            };
            let snake = |which: &str| Snake::load(file, &format!("{name}.{which}.{d}.alpha"), channels);
            layers.push([
                (snake("activations1")?, conv("convs1", dilation)?),
                (snake("activations2")?, conv("convs2", 1)?),
            ]);
        }
        Ok(Self { layers })
    }

    fn forward(&self, x: &Tensor, state: &mut BlockState) -> Result<Tensor> {
        let mut x = x.clone();
        for (layer, histories) in self.layers.iter().zip(state) {
            let mut y = x.clone();
            for ((snake, conv), history) in layer.iter().zip(histories) {
                y = conv.causal(&snake.forward(&y)?, history)?;
            }
            x = (x + y)?;
        }
        Ok(x)
    }
}

impl Snake {
    fn load(file: &TensorFile, name: &str, channels: usize) -> std::result::Result<Self, LoadError> {
        let alpha = file.floats(name, &[channels])?;
        let inverse: Vec<f32> = alpha.iter().map(|a| 1.0 / (a + 1e-9)).collect();
        Ok(Self {
            alpha: Tensor::from_slice(&alpha, channels, &Device::Cpu)?,
            inverse: Tensor::from_vec(inverse, channels, &Device::Cpu)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x + x.broadcast_mul(&self.alpha)?.sin()?.sqr()?.broadcast_mul(&self.inverse)?
    }
}

/// A mel `[frames, mel]` played `speed` times as fast, all at once.
pub(super) fn respeed(mel: &Tensor, speed: f32) -> Result<Tensor> {
    let channels = mel.dim(1)?;
    let values: Vec<f32> = mel.contiguous()?.flatten_all()?.to_vec1()?;
    let values = respeed::whole(&values, channels, speed);
    let frames = values.len() / channels;
    Tensor::from_vec(values, (frames, channels), &Device::Cpu)
}
