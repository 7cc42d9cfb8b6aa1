//! Loading the vocoder: its layers in the layouts of the kernels, room for every slot's histories, and scratch.

use std::collections::BTreeMap;

use super::super::device::{Buf, GpuError, Staging};
use super::super::gemm::{Gemm, Tile};
use super::super::weights::{Packed, Packer, Piece, Source, padded};
use super::{
    BLOCKS, F0_AHEAD, F0_KEEP, F0_LAYERS, F0_SHAPES, F0Shape, FRAMES, Hift, Kernels, LOW_SHAPES, Layer, PAGES,
    POST_KERNEL, POST_SHAPES, Place, RING, ResBlock, Scratch, Stage, Voc, WIDTH, defines, pages, reach,
};
use crate::synth::cosyvoice::backend::SineNoise;
use crate::synth::cosyvoice::checkpoint::Part;
use crate::synth::cosyvoice::config::{Config, NOISE_SECONDS};
use crate::synth::cosyvoice::gpu::{COMMON, HIFT, flow};
use crate::synth::cosyvoice::noise::SineTable;

/// Counts history rows while layers are loaded.
struct Histories(usize);

impl Histories {
    fn room(&mut self, packed: &Packed) -> usize {
        let at = self.0;
        self.0 += (packed.taps - 1) * packed.dil * packed.cin;
        at
    }
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
        let frame = h.frame_samples();
        let cols = frame / h.hop;
        let fits = h.upsample_rates.len() == 3
            && h.resblock_kernels.len() <= BLOCKS
            && h.resblock_dilations.iter().all(|d| d.len() == h.resblock_dilations[0].len())
            && h.f0_channels % 2 == 0
            && h.mel == config.flow.mel
            && h.look_right <= F0_AHEAD + 1
            && pages(config.flow.block) <= PAGES;
        if !fits {
            let block = config.flow.block;
            return Err(GpuError::Model(format!(
                "the vocoder's sizes, or blocks of {block} frames, do not fit the kernels: {h:?}"
            )));
        }
        let get = |key: &str, shape: &[usize]| source.floats(Part::Hift, key, shape);
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
        let f0_out = (
            device.upload("weights", &get("f0_predictor.classifier.weight", &[1, h.f0_channels])?)?,
            get("f0_predictor.classifier.bias", &[1])?[0],
        );
        let harmonics = h.harmonics + 1;
        let weights = get("m_source.l_linear.weight", &[1, harmonics])?.into_owned();
        let source_bias = get("m_source.l_linear.bias", &[1])?[0];
        // The noise enters only as its weighted sum: one value a sample.
        let mut table = SineTable::new(config, noise);
        let hiss_len = (NOISE_SECONDS * config.sample_rate).min(flow::PAGES * config.flow.block * frame);
        let hiss: Vec<f32> = table
            .prefix(hiss_len)
            .chunks_exact(harmonics)
            .map(|u| u.iter().zip(&weights).map(|(u, w)| u * w).sum())
            .collect();

        let mut histories = Histories(0);
        let conv = |name: &str, n: usize, cin: usize, taps: usize, dil: usize| -> Result<Packed, GpuError> {
            let (w, b) = source.convolution(Part::Hift, name, [n, cin, taps])?;
            Ok(Packed { dil, ..packer.whole(&w, n, cin, taps, Some(&b))? })
        };
        let alpha = |name: &str, n: usize| -> Result<Buf, GpuError> {
            let mut values = get(name, &[n])?.into_owned();
            values.resize(padded(n), 0.0);
            device.upload("weights", &values)
        };
        let resblock = |name: &str,
                        n: usize,
                        kernel: usize,
                        dilations: &[usize],
                        histories: &mut Histories|
         -> Result<ResBlock, GpuError> {
            let mut layers = Vec::with_capacity(dilations.len());
            for (d, &dilation) in dilations.iter().enumerate() {
                let mut layer = |which: usize, dilation: usize| -> Result<Layer, GpuError> {
                    let conv = conv(&format!("{name}.convs{which}.{d}"), n, n, kernel, dilation)?;
                    let hist = histories.room(&conv);
                    Ok(Layer { conv, hist, alpha: alpha(&format!("{name}.activations{which}.{d}.alpha"), n)? })
                };
                layers.push([layer(1, dilation)?, layer(2, 1)?]);
            }
            Ok(ResBlock { layers })
        };
        // Each frame's look-ahead lies in its row, so this is a plain product.
        let taps = h.look_right + 1;
        let (w, b) = source.convolution(Part::Hift, "conv_pre", [h.base_channels, h.mel, taps])?;
        let pre = packer.whole(&by_column(&w, h.mel, taps), h.base_channels, h.mel * taps, 1, Some(&b))?;
        let mut stages = Vec::with_capacity(h.upsample_rates.len());
        for (i, (&rate, &kernel)) in h.upsample_rates.iter().zip(&h.upsample_kernels).enumerate() {
            let channels = h.channels(i);
            let cin = if i == 0 { h.base_channels } else { h.channels(i - 1) };
            let (w, b) = source.convolution(Part::Hift, &format!("ups.{i}"), [channels, cin, kernel])?;
            let up = upsample(packer, &w, &b, channels, cin, kernel, rate)?;
            let up_hist = histories.room(&up);
            let (down_kernel, down_stride) = h.source_down(i);
            let rows = h.spectrum_rows();
            let (w, b) = source.convolution(Part::Hift, &format!("source_downs.{i}"), [channels, rows, down_kernel])?;
            let down = packer.whole(&by_column(&w, rows, down_kernel), channels, rows * down_kernel, 1, Some(&b))?;
            let source_block = resblock(
                &format!("source_resblocks.{i}"),
                channels,
                h.source_kernels[i],
                &h.source_dilations[i],
                &mut histories,
            )?;
            let count = h.resblock_kernels.len();
            let mut blocks = Vec::with_capacity(count);
            for (j, (&k, d)) in h.resblock_kernels.iter().zip(&h.resblock_dilations).enumerate() {
                blocks.push(resblock(&format!("resblocks.{}", i * count + j), channels, k, d, &mut histories)?);
            }
            stages.push(Stage {
                up,
                up_hist,
                rate,
                channels: padded(channels),
                down,
                down_kernel,
                down_stride,
                source: source_block,
                blocks,
            });
        }
        let post = conv("conv_post", h.spectrum_rows(), h.channels(stages.len() - 1), POST_KERNEL, 1)?;
        let post_hist = histories.room(&post);
        let gemm = Gemm::new(device, elt)?;
        check_windows(&gemm, &stages, &post)?;

        let module = device.compile("hift.cu", &[COMMON, HIFT], elt, &defines(config, x_offset))?;
        let f0_kernel = |shape: &F0Shape| module.kernel(shape.kernel, shape.shared());
        let kernels = Kernels {
            f0: [f0_kernel(&F0_SHAPES[0])?, f0_kernel(&F0_SHAPES[1])?, f0_kernel(&F0_SHAPES[2])?],
            f0_out: module.kernel("voc_f0_out", 0)?,
            tone: module.kernel("voc_tone", 0)?,
            spectrum: module.kernel("voc_spectrum", 0)?,
            columns: module.kernel("voc_columns", 0)?,
            frames: module.kernel("voc_frames", 0)?,
            merge: module.kernel("voc_merge", 0)?,
            samples: module.kernel("voc_samples", 0)?,
        };
        let most = WIDTH * FRAMES;
        // Values of the widest rate: rows times channels.
        let mut steps = 1;
        let mut widest = 0;
        for s in &stages {
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
        let hist_elems = histories.0;
        let f0_hist_bytes = 4 * F0_KEEP * h.f0_channels * 8;
        let post_bytes = (cols + h.n_fft / h.hop) * h.spectrum_rows() * 4;
        let twice = |what, bytes: usize| -> Result<[Buf; 2], GpuError> {
            Ok([device.zeros(what, bytes)?, device.zeros(what, bytes)?])
        };
        let f = |bytes: usize| device.zeros("activations", bytes);
        let scratch = Scratch {
            f0: twice("activations", (most + WIDTH * 8) * h.f0_channels * 8)?,
            f0_hz: f((most + WIDTH * 8) * 4)?,
            spectrum: f((most * cols + WIDTH * (reach(&stages) + 1)) * h.spectrum_rows() * 4)?,
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
            pcm: Staging::new(device, "samples", WIDTH * (FRAMES + 1) * frame * 4)?,
        };
        // Tables: pieces, then tiles of the F0 network and of every rate, then history addresses.
        let tiles = (most + WIDTH * 8) / F0_SHAPES[0].frames
            + WIDTH * 2
            + (0..=stages.len())
                .map(|l| most * h.upsample_rates[..l].iter().product::<usize>() / 32 + WIDTH * 2)
                .sum::<usize>();
        let desc_bytes = WIDTH * size_of::<Voc>() + tiles * 16 + 2 * WIDTH * 8;
        Ok(Self {
            gemm,
            kernels,
            f0,
            f0_out,
            source_bias,
            hiss: device.upload("noise", &hiss)?,
            hiss_len,
            window: device.upload("window", &hann(h.n_fft))?,
            basis: device.upload("basis", &basis(h.n_fft))?,
            pre,
            stages,
            post,
            post_hist,
            hist: twice("vocoder slots", slots * hist_elems * size)?,
            f0_hist: twice("vocoder slots", slots * f0_hist_bytes)?,
            post_keep: twice("vocoder slots", slots * post_bytes)?,
            tones: device.zeros("vocoder slots", slots * RING * 8)?,
            phase: device.zeros("vocoder slots", slots * harmonics * 8)?,
            places: vec![Place::default(); slots],
            desc: Staging::new(device, "pieces", desc_bytes)?,
            bad: Staging::new(device, "flags", WIDTH * 4)?,
            scratch,
            source_weights: device.upload("weights", &weights)?,
            block_frames: config.flow.block,
            graphs: BTreeMap::new(),
            device: device.clone(),
            config: h.clone(),
            rate: config.sample_rate,
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
