//! Loading the vocoder: its layers in the layouts of the kernels, room for every slot's histories, and scratch.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::device::{Buf, Device, GpuError, Module, Staging};
use super::super::gemm::{Gemm, Tile};
use super::super::units;
use super::super::weights::{Packed, Packer, Piece, Source, padded};
use super::shapes::{F0_SHAPES, F0Shape, LOW_SHAPES, POST_SHAPES};
use super::{
    BLOCKS, F0_AHEAD, F0_KEEP, F0_LAYERS, FRAMES, Hift, Kernels, Layer, PAGES, POST_KERNEL, Place, RING, ResBlock,
    Scratch, Slots, Stage, Voc, WIDTH, Weights, defines, pages, reach,
};
use crate::synth::cosyvoice::backend::SineNoise;
use crate::synth::cosyvoice::checkpoint::Part;
use crate::synth::cosyvoice::config::{Config, HiftConfig, NOISE_SECONDS};
use crate::synth::cosyvoice::gpu::flow;
use crate::synth::cosyvoice::noise::SineTable;

/// Where layers come from and how they are packed; counts history rows while layers are loaded.
struct Layers<'a> {
    packer: &'a Packer,
    source: &'a dyn Source,
    config: &'a HiftConfig,
    histories: usize,
}

impl Layers<'_> {
    /// Room for the history of a convolution.
    fn room(&mut self, packed: &Packed) -> usize {
        let at = self.histories;
        self.histories += (packed.taps - 1) * packed.dil * packed.cin;
        at
    }

    fn get(&self, key: &str, shape: &[usize]) -> Result<Vec<f32>, GpuError> {
        self.source.floats(Part::Hift, key, shape)
    }

    fn conv(&self, name: &str, n: usize, cin: usize, taps: usize, dil: usize) -> Result<Packed, GpuError> {
        let (w, b) = self.source.convolution(Part::Hift, name, [n, cin, taps])?;
        Ok(Packed { dil, ..self.packer.whole(&w, n, cin, taps, Some(&b))? })
    }

    fn alpha(&self, name: &str, n: usize) -> Result<Buf, GpuError> {
        let mut values = self.get(name, &[n])?;
        values.resize(padded(n), 0.0);
        self.packer.device.upload("weights", &values)
    }

    fn resblock(&mut self, name: &str, n: usize, kernel: usize, dilations: &[usize]) -> Result<ResBlock, GpuError> {
        let mut layers = Vec::with_capacity(dilations.len());
        for (d, &dilation) in dilations.iter().enumerate() {
            let mut layer = |which: usize, dilation: usize| -> Result<Layer, GpuError> {
                let conv = self.conv(&format!("{name}.convs{which}.{d}"), n, n, kernel, dilation)?;
                let hist = self.room(&conv);
                Ok(Layer { conv, hist, alpha: self.alpha(&format!("{name}.activations{which}.{d}.alpha"), n)? })
            };
            layers.push([layer(1, dilation)?, layer(2, 1)?]);
        }
        Ok(ResBlock { layers })
    }

    /// The F0 network's convolutions, tap by tap, in double.
    fn f0(&self) -> Result<Vec<(Buf, Buf)>, GpuError> {
        let (h, source, device) = (self.config, self.source, &self.packer.device);
        let mut f0 = Vec::with_capacity(F0_LAYERS);
        for n in 0..F0_LAYERS {
            let (cin, taps) = if n == 0 { (h.mel, F0_AHEAD + 1) } else { (h.f0_channels, F0_KEEP + 1) };
            let (w, b) = source.convolution_f64(
                Part::Hift,
                &format!("f0_predictor.condnet.{}", 2 * n),
                [h.f0_channels, cin, taps],
            )?;
            let mut by_tap = vec![0f64; w.len()];
            for (i, v) in w.iter().enumerate() {
                let (o, c, tap) = (i / (cin * taps), i / taps % cin, i % taps);
                by_tap[(tap * cin + c) * h.f0_channels + o] = *v;
            }
            f0.push((device.upload("weights", &by_tap)?, device.upload("weights", &b)?));
        }
        Ok(f0)
    }

    /// Stage `i`.
    fn stage(&mut self, i: usize) -> Result<Stage, GpuError> {
        let (h, packer, source) = (self.config, self.packer, self.source);
        let (rate, kernel) = (h.upsample_rates[i], h.upsample_kernels[i]);
        let channels = h.channels(i);
        let cin = if i == 0 { h.base_channels } else { h.channels(i - 1) };
        let (w, b) = source.convolution(Part::Hift, &format!("ups.{i}"), [channels, cin, kernel])?;
        let up = upsample(packer, &w, &b, channels, cin, kernel, rate)?;
        let up_hist = self.room(&up);
        let (down_kernel, down_stride) = h.source_down(i);
        let rows = h.spectrum_rows();
        let (w, b) = source.convolution(Part::Hift, &format!("source_downs.{i}"), [channels, rows, down_kernel])?;
        let down = packer.whole(&by_column(&w, rows, down_kernel), channels, rows * down_kernel, 1, Some(&b))?;
        let source_block =
            self.resblock(&format!("source_resblocks.{i}"), channels, h.source_kernels[i], &h.source_dilations[i])?;
        let count = h.resblock_kernels.len();
        let mut blocks = Vec::with_capacity(count);
        for (j, (&k, d)) in h.resblock_kernels.iter().zip(&h.resblock_dilations).enumerate() {
            blocks.push(self.resblock(&format!("resblocks.{}", i * count + j), channels, k, d)?);
        }
        Ok(Stage {
            up,
            up_hist,
            rate,
            channels: padded(channels),
            down,
            down_kernel,
            down_stride,
            source: source_block,
            blocks,
        })
    }

    fn weights(&mut self, config: &Config, noise: SineNoise) -> Result<Weights, GpuError> {
        let (h, packer, source, device) = (self.config, self.packer, self.source, &self.packer.device);
        let f0 = self.f0()?;
        let f0_out = (
            device.upload("weights", &self.get("f0_predictor.classifier.weight", &[1, h.f0_channels])?)?,
            self.get("f0_predictor.classifier.bias", &[1])?[0],
        );
        let harmonics = h.harmonics + 1;
        let weights = self.get("m_source.l_linear.weight", &[1, harmonics])?;
        let source_bias = self.get("m_source.l_linear.bias", &[1])?[0];
        // The noise enters only as its weighted sum: one value a sample.
        let mut table = SineTable::new(config, noise);
        let hiss_len = (NOISE_SECONDS * config.sample_rate).min(flow::PAGES * config.flow.block * h.frame_samples());
        let hiss: Vec<f32> = table
            .prefix(hiss_len)
            .chunks_exact(harmonics)
            .map(|u| u.iter().zip(&weights).map(|(u, w)| u * w).sum())
            .collect();
        // Each frame's look-ahead lies in its row, so this is a plain GEMM.
        let taps = h.look_right + 1;
        let (w, b) = source.convolution(Part::Hift, "conv_pre", [h.base_channels, h.mel, taps])?;
        let pre = packer.whole(&by_column(&w, h.mel, taps), h.base_channels, h.mel * taps, 1, Some(&b))?;
        let stages = (0..h.upsample_rates.len()).map(|i| self.stage(i)).collect::<Result<Vec<_>, _>>()?;
        let post = self.conv("conv_post", h.spectrum_rows(), h.channels(stages.len() - 1), POST_KERNEL, 1)?;
        let post_hist = self.room(&post);
        Ok(Weights {
            f0,
            f0_out,
            source: (device.upload("weights", &weights)?, source_bias),
            hiss: (device.upload("noise", &hiss)?, hiss_len),
            window: device.upload("window", &hann(h.n_fft))?,
            basis: device.upload("basis", &basis(h.n_fft))?,
            pre,
            stages,
            post,
            post_hist,
        })
    }
}

/// Whether the kernels run a vocoder of these sizes.
pub(in super::super) fn check(config: &Config) -> Result<(), GpuError> {
    let h = &config.hift;
    let fits = h.upsample_rates.len() == 3
        && h.resblock_kernels.len() <= BLOCKS
        && h.resblock_dilations.iter().all(|d| d.len() == h.resblock_dilations[0].len())
        && h.f0_channels.is_multiple_of(2)
        && h.mel == config.flow.mel
        && h.look_right <= F0_AHEAD + 1
        && pages(config.flow.block) <= PAGES;
    if !fits {
        let block = config.flow.block;
        return Err(GpuError::Model(format!(
            "the vocoder's sizes, or blocks of {block} frames, do not fit the kernels: {h:?}"
        )));
    }
    Ok(())
}

fn kernels(module: &Module) -> Result<Kernels, GpuError> {
    let f0_kernel = |shape: &F0Shape| module.kernel(shape.kernel, shape.shared());
    Ok(Kernels {
        f0: [f0_kernel(&F0_SHAPES[0])?, f0_kernel(&F0_SHAPES[1])?, f0_kernel(&F0_SHAPES[2])?],
        f0_out: module.kernel("voc_f0_out", 0)?,
        tone: module.kernel("voc_tone", 0)?,
        spectrum: module.kernel("voc_spectrum", 0)?,
        columns: module.kernel("voc_columns", 0)?,
        frames: module.kernel("voc_frames", 0)?,
        merge: module.kernel("voc_merge", 0)?,
        samples: module.kernel("voc_samples", 0)?,
    })
}

fn scratch(packer: &Packer, h: &HiftConfig, weights: &Weights) -> Result<Scratch, GpuError> {
    let (device, size) = (&packer.device, packer.elt.size());
    let (stages, pre, post) = (&weights.stages, &weights.pre, &weights.post);
    let cols = h.frame_samples() / h.hop;
    let most = WIDTH * FRAMES;
    // Values of the widest rate: rows times channels.
    let mut steps = 1;
    let mut widest = 0;
    for s in stages {
        steps *= s.rate;
        widest = widest.max((most * steps + WIDTH) * s.channels);
    }
    let columns = stages
        .iter()
        .scan(1, |n, s| {
            *n *= s.rate;
            Some((most * *n + WIDTH) * s.down.cin)
        })
        .max()
        .unwrap_or(0);
    let f = |bytes: usize| device.zeros("activations", bytes);
    Ok(Scratch {
        f0: twice(device, "activations", (most + WIDTH * 8) * h.f0_channels * 8)?,
        f0_hz: f((most + WIDTH * 8) * 4)?,
        spectrum: f((most * cols + WIDTH * (reach(stages) + 1)) * h.spectrum_rows() * 4)?,
        columns: f(columns * size)?,
        frames: f(most * pre.cin * size)?,
        x0: f(most * pre.n * size)?,
        up: f(widest * 4)?,
        source: f(widest * 4)?,
        x: f(widest * 4)?,
        run: (0..BLOCKS).map(|_| f(widest * 4)).collect::<Result<_, _>>()?,
        sum: f(widest * 4)?,
        act: (0..BLOCKS).map(|_| f(widest * size)).collect::<Result<_, _>>()?,
        mid: (0..BLOCKS).map(|_| f(widest * size)).collect::<Result<_, _>>()?,
        next: f(widest * size)?,
        post: f((most * cols + WIDTH) * post.n * 4)?,
    })
}

/// Two copies of a buffer.
fn twice(device: &Arc<Device>, what: &'static str, bytes: usize) -> Result<[Buf; 2], GpuError> {
    Ok([device.zeros(what, bytes)?, device.zeros(what, bytes)?])
}

/// Bytes of what a pass is told: pieces, then tiles of the F0 network and of every rate, then history addresses.
fn desc_bytes(h: &HiftConfig) -> usize {
    let most = WIDTH * FRAMES;
    let rates = |l: usize| h.upsample_rates[..l].iter().product::<usize>();
    let tiles = (most + WIDTH * 8) / F0_SHAPES[0].frames
        + WIDTH * 2
        + (0..=h.upsample_rates.len()).map(|l| most * rates(l) / 32 + WIDTH * 2).sum::<usize>();
    WIDTH * size_of::<Voc>() + tiles * 16 + 2 * WIDTH * 8
}

impl Hift {
    pub(in super::super) fn load(
        packer: &Packer,
        source: &dyn Source,
        config: &Config,
        noise: SineNoise,
        slots: usize,
        x_offset: usize,
    ) -> Result<Self, GpuError> {
        let device = &packer.device;
        let (h, elt, size) = (&config.hift, packer.elt, packer.elt.size());
        let (frame, harmonics) = (h.frame_samples(), h.harmonics + 1);
        check(config)?;
        let mut layers = Layers { packer, source, config: h, histories: 0 };
        let weights = layers.weights(config, noise)?;
        let gemm = Gemm::new(device, elt)?;
        check_windows(&gemm, &weights.stages, &weights.post)?;
        let module = device.compile(&units::HIFT, elt, &defines(config, x_offset))?;
        let f0_hist_bytes = 4 * F0_KEEP * h.f0_channels * 8;
        let post_bytes = (frame / h.hop + h.n_fft / h.hop) * h.spectrum_rows() * 4;
        let slots = Slots {
            hist: twice(device, "vocoder slots", slots * layers.histories * size)?,
            f0_hist: twice(device, "vocoder slots", slots * f0_hist_bytes)?,
            post_keep: twice(device, "vocoder slots", slots * post_bytes)?,
            tones: device.zeros("vocoder slots", slots * RING * 8)?,
            phase: device.zeros("vocoder slots", slots * harmonics * 8)?,
            places: vec![Place::default(); slots],
        };
        Ok(Self {
            device: device.clone(),
            config: h.clone(),
            rate: config.sample_rate,
            block_frames: config.flow.block,
            gemm,
            kernels: kernels(&module)?,
            scratch: scratch(packer, h, &weights)?,
            weights,
            slots,
            desc: Staging::new(device, "pieces", desc_bytes(h))?,
            bad: Staging::new(device, "flags", WIDTH * 4)?,
            pcm: Staging::new(device, "samples", WIDTH * (FRAMES + 1) * frame * 4)?,
            graphs: BTreeMap::new(),
        })
    }
}

/// Every convolution must run in every block shape that a pass may choose for it.
fn check_windows(gemm: &Gemm, stages: &[Stage], post: &Packed) -> Result<(), GpuError> {
    let check = |w: &Packed, shapes: &[Tile]| match shapes.iter().all(|&tile| gemm.takes(w, tile)) {
        true => Ok(()),
        false => Err(GpuError::Model(format!(
            "a vocoder convolution of {} taps, {} steps apart, needs more shared memory than a block has",
            w.taps, w.dil
        ))),
    };
    let mut before = &LOW_SHAPES[..];
    for stage in stages {
        check(&stage.up, before)?;
        before = stage.shapes();
        let layers = stage.blocks.iter().chain([&stage.source]).flat_map(|b| b.layers.iter().flatten());
        layers.map(|layer| &layer.conv).try_for_each(|w| check(w, before))?;
    }
    check(post, &POST_SHAPES)
}

/// `[out][channels][taps]` to `[out][taps][channels]`.
fn by_column(w: &[f32], channels: usize, taps: usize) -> Vec<f32> {
    let mut out = vec![0f32; w.len()];
    for (i, v) in w.iter().enumerate() {
        let (o, c, tap) = (i / (channels * taps), i / taps % channels, i % taps);
        out[(o * taps + tap) * channels + c] = *v;
    }
    out
}

/// "Repeat each step `rate` times, then convolve" as one convolution at the low rate with `rate` times the outputs:
/// taps that fall on the same input step are added beforehand.
fn upsample(
    packer: &Packer,
    w: &[f32],
    b: &[f32],
    n: usize,
    cin: usize,
    kernel: usize,
    rate: usize,
) -> Result<Packed, GpuError> {
    let npad = padded(n);
    let reach = (kernel - 1).div_ceil(rate);
    let taps = reach + 1;
    let mut values = vec![0f32; rate * npad * cin * taps];
    for phase in 0..rate {
        for j in 0..kernel {
            // Position phase + j - (kernel - 1) of the repeated signal is step floor(that / rate).
            let tap = (phase + j + reach * rate - (kernel - 1)) / rate;
            for o in 0..n {
                for c in 0..cin {
                    values[((phase * npad + o) * cin + c) * taps + tap] += w[(o * cin + c) * kernel + j];
                }
            }
        }
    }
    let mut bias = vec![0f32; rate * npad];
    for phase in 0..rate {
        bias[phase * npad..][..n].copy_from_slice(b);
    }
    packer.pack(&[Piece { values: &values, n: rate * npad, mul: 1, off: 0 }], rate * npad, cin, taps, Some(&bias), None)
}

/// Periodic Hann window.
fn hann(n: usize) -> Vec<f32> {
    (0..n).map(|i| (0.5 - 0.5 * (std::f64::consts::TAU * i as f64 / n as f64).cos()) as f32).collect()
}

/// `[bins]` rows of cosines, then of negated sines, `n` values each.
fn basis(n: usize) -> Vec<f32> {
    let angle = |k: usize, i: usize| std::f64::consts::TAU * ((k * i) % n) as f64 / n as f64;
    let bins = n / 2 + 1;
    let cosines = (0..bins).flat_map(|k| (0..n).map(move |i| angle(k, i).cos() as f32));
    let sines = (0..bins).flat_map(|k| (0..n).map(move |i| -angle(k, i).sin() as f32));
    cosines.chain(sines).collect()
}
