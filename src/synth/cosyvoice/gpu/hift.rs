//! The vocoder on the device: pieces of many utterances, of any lengths, in one pass.
//!
//! Owns weights, scratch, and per slot the histories of every convolution. Rows of all utterances lie one after
//! another at each rate; tile tables say which block of a launch belongs to whom. Passes of few utterances run as
//! graphs, recorded for so many utterances and frames at most: what a launch has too much of is told to do nothing.
//!
//! Operands are 16 bit with sums and the residual stream in single precision; F0 is computed in double.
//!
//! Why this file is long: loading and running name the same few dozen layers in the same order.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::device::{Buf, Device, GpuError, Graph, Kernel, Staging, start};
use super::gemm::{Act, Conv, Gemm, Tile, TileEntry};
use super::weights::{Packed, Packer, Piece, Source, padded};
use crate::synth::cosyvoice::backend::SineNoise;
use crate::synth::cosyvoice::checkpoint::Part;
use crate::synth::cosyvoice::config::{Config, DEFAULT_LEAKY_SLOPE, HiftConfig, NOISE_SECONDS};
use crate::synth::cosyvoice::noise::SineTable;

/// Utterances of one pass.
pub(super) const WIDTH: usize = 32;
/// Frames of one utterance in one pass; more are cut.
pub(super) const FRAMES: usize = 64;
/// Frames the F0 network looks ahead.
const F0_AHEAD: usize = 3;
/// Frames that its later layers look back.
const F0_KEEP: usize = 2;
const F0_LAYERS: usize = 5;
const POST_KERNEL: usize = 7;
/// What an operation in double takes, in operations of 16 bit: 67 against 700 TFLOP/s.
const DOUBLE: f64 = 10.4;
/// Most residual blocks of a stage.
const BLOCKS: usize = 3;
/// Slabs whose mel one pass may read for one utterance.
const PAGES: usize = 8;
/// Frames of tones kept.
const RING: usize = 128;
/// Frames of a pass below which blocks of its first products are short.
const FEW_FRAMES: usize = 256;
/// Blocks that keep a device busy: two a multiprocessor.
const ENOUGH_BLOCKS: usize = 264;
/// A block shape of the F0 convolutions.
#[derive(Debug)]
struct F0Shape {
    kernel: &'static str,
    /// Frames and channels of a block.
    frames: usize,
    channels: usize,
    threads: u32,
    /// Input channels of one of its four stages.
    stage: usize,
    /// Frames of a pass up to which it is the fastest.
    most: usize,
}

impl F0Shape {
    fn shared(&self) -> u32 {
        let weights = 4 * self.stage * (self.channels + 4);
        (8 * (weights + (self.frames + F0_AHEAD) * (self.stage + 4))) as u32
    }
}

/// As measured at 12 and 50 frames of 1, 8 and 32 utterances.
const F0_SHAPES: [F0Shape; 3] = [
    F0Shape { kernel: "voc_f0_16x32", frames: 16, channels: 32, threads: 128, stage: 64, most: 256 },
    F0Shape { kernel: "voc_f0_32x32", frames: 32, channels: 32, threads: 128, stage: 64, most: 1200 },
    F0Shape { kernel: "voc_f0_64x128", frames: 64, channels: 128, threads: 256, stage: 32, most: usize::MAX },
];
/// Utterances of a pass that a graph is recorded for, and frames of each on average. Wider passes take so long that
/// starting their launches one by one costs nothing.
const RECORDED: ([usize; 4], [usize; 3]) = ([1, 2, 4, 8], [16, 32, FRAMES]);
/// `Voc` of hift.cu.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Voc {
    f0_in: u64,
    f0_out: u64,
    post_in: u64,
    post_out: u64,
    tones: u64,
    phase: u64,
    frame0: i32,
    f0_from: i32,
    f0_to: i32,
    from: i32,
    to: i32,
    total: i32,
    last: i32,
    f0_row: i32,
    row: i32,
    spec_row: i32,
    top_row: i32,
    pcm_row: i32,
    page_first: i32,
    live: i32,
    page: [u64; PAGES],
}

const VOC_WORDS: usize = size_of::<Voc>() / 4;
/// A block that has nothing to do.
const IDLE: TileEntry = [-1, 0, 0, 0];

/// Everything that the launches of a pass depend on.
#[derive(Clone, Debug)]
struct Extent {
    pieces: usize,
    frames: usize,
    f0_frames: usize,
    /// Columns of an utterance's spectrum at most.
    columns: usize,
    /// Which of [`F0_SHAPES`].
    f0: usize,
    /// Block shapes: of the mel's rate, then of every stage's.
    tiles: Vec<Tile>,
    /// Entries of the tile tables: F0, the mel's rate, every stage's.
    entries: Vec<usize>,
}

impl Extent {
    /// Where the addresses of histories lie among the descriptors, in words: read, then written.
    fn histories() -> [usize; 2] {
        [WIDTH * VOC_WORDS, WIDTH * (VOC_WORDS + 2)]
    }

    /// Where the tile tables lie, in words, and where they end.
    fn tables(&self) -> (Vec<usize>, usize) {
        let mut at = (WIDTH * (VOC_WORDS + 4)).next_multiple_of(4);
        let starts = self
            .entries
            .iter()
            .map(|n| {
                at += 4 * n;
                at - 4 * n
            })
            .collect();
        (starts, at)
    }
}

/// What one utterance gives to a pass.
pub(super) struct Excerpt<'a> {
    pub(super) slot: usize,
    /// Frames of the prompt, which come first in the slabs.
    pub(super) frame0: usize,
    /// Mel frames there are, the prompt's not counted.
    pub(super) total: usize,
    pub(super) last: bool,
    /// Addresses of the utterance's slabs.
    pub(super) slabs: &'a [u64],
}

/// Where a slot's stream stands.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    done: usize,
    f0_done: usize,
    /// Which copy of the histories is current.
    side: usize,
}

struct Layer {
    conv: Packed,
    hist: usize,
    alpha: Buf,
}

struct ResBlock {
    layers: Vec<[Layer; 2]>,
}

struct Stage {
    up: Packed,
    up_hist: usize,
    rate: usize,
    channels: usize,
    down: Packed,
    down_kernel: usize,
    down_stride: usize,
    source: ResBlock,
    blocks: Vec<ResBlock>,
}

struct Kernels {
    f0: [Kernel; F0_SHAPES.len()],
    f0_out: Kernel,
    tone: Kernel,
    spectrum: Kernel,
    columns: Kernel,
    frames: Kernel,
    merge: Kernel,
    samples: Kernel,
}

struct Scratch {
    f0: [Buf; 2],
    f0_hz: Buf,
    spectrum: Buf,
    columns: Buf,
    frames: Buf,
    x0: Buf,
    up: Buf,
    source: Buf,
    x: Buf,
    /// Residual streams and inner activations of the blocks of a stage, which run side by side.
    run: Vec<Buf>,
    sum: Buf,
    act: Vec<Buf>,
    mid: Vec<Buf>,
    next: Buf,
    post: Buf,
    pcm: Staging,
}

/// The model.
pub(super) struct Hift {
    device: Arc<Device>,
    config: HiftConfig,
    rate: usize,
    gemm: Gemm,
    kernels: Kernels,
    f0: Vec<(Buf, Buf)>,
    f0_out: (Buf, f32),
    source_bias: f32,
    hiss: Buf,
    hiss_len: usize,
    window: Buf,
    basis: Buf,
    pre: Packed,
    stages: Vec<Stage>,
    post: Packed,
    post_hist: usize,
    hist: [Buf; 2],
    f0_hist: [Buf; 2],
    post_keep: [Buf; 2],
    tones: Buf,
    phase: Buf,
    places: Vec<Place>,
    desc: Staging,
    bad: Staging,
    scratch: Scratch,
    source_weights: Buf,
    block_frames: usize,
    /// By utterances and frames.
    graphs: BTreeMap<(usize, usize), Graph>,
}

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
    pub(super) fn load(
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
            && h.look_right <= F0_AHEAD + 1;
        if !fits {
            return Err(GpuError::Model(format!("the vocoder's sizes do not fit the kernels: {h:?}")));
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
        let hiss_len = (NOISE_SECONDS * config.sample_rate).min(super::flow::PAGES * config.flow.block * frame);
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

        let module = device.compile("hift.cu", &[super::COMMON, super::HIFT], elt, &defines(config, x_offset))?;
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
            spectrum: f((most * cols + WIDTH * 32) * h.spectrum_rows() * 4)?,
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
            gemm: Gemm::new(device, elt)?,
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

    /// Frames the network withholds while the mel goes on.
    fn ahead(&self) -> usize {
        self.config.look_right.max(F0_AHEAD + 1)
    }

    /// Frames whose samples are withheld: the last of the network's is not complete without the next.
    pub(super) fn hold_back(&self) -> usize {
        self.ahead() + 1
    }

    /// Where the convolution histories of a slot lie, and their bytes.
    pub(super) fn histories(&self, slot: usize) -> Vec<(u64, usize)> {
        let slots = self.places.len();
        self.hist.iter().map(|b| (b.ptr + (slot * (b.bytes / slots)) as u64, b.bytes / slots)).collect()
    }

    /// F0 in Hz of the first `count` frames that the last pass looked at.
    pub(super) fn last_f0(&self, count: usize) -> Result<Vec<f32>, GpuError> {
        let mut out = vec![0f32; count];
        self.device.read(self.scratch.f0_hz.ptr, &mut out)?;
        Ok(out)
    }

    /// Frames of a slot whose F0 is known.
    pub(super) fn f0_done(&self, slot: usize) -> usize {
        self.places[slot].f0_done
    }

    /// The start of a stream.
    pub(super) fn open(&mut self, slot: usize) -> Result<(), GpuError> {
        self.places[slot] = Place::default();
        let slots = self.places.len();
        for b in [&self.hist[0], &self.f0_hist[0], &self.post_keep[0], &self.phase] {
            let each = b.bytes / slots;
            self.device.fill_zero(b.ptr + (slot * each) as u64, each)?;
        }
        Ok(())
    }

    /// Whether a stream has given out everything.
    pub(super) fn finished(&self, slot: usize, total: usize, last: bool) -> bool {
        last && self.places[slot].done >= total
    }

    /// New samples of each piece, everything that is exact; `None` for one whose values are no longer finite.
    pub(super) fn run(&mut self, pieces: &[Excerpt<'_>]) -> Result<Vec<Option<Vec<f32>>>, GpuError> {
        let mut out: Vec<Option<Vec<f32>>> = pieces.iter().map(|_| Some(Vec::new())).collect();
        loop {
            let mut group = Vec::new();
            for (i, p) in pieces.iter().enumerate() {
                let done = self.places[p.slot].done;
                let target = if p.last { p.total } else { p.total.saturating_sub(self.ahead()) };
                if done < target && group.len() < WIDTH && out[i].is_some() {
                    group.push((i, target.min(done + FRAMES)));
                }
            }
            if group.is_empty() {
                return Ok(out);
            }
            self.pass(pieces, &group, &mut out)?;
        }
    }

    fn pass(
        &mut self,
        pieces: &[Excerpt<'_>],
        group: &[(usize, usize)],
        out: &mut [Option<Vec<f32>>],
    ) -> Result<(), GpuError> {
        let frame = self.config.frame_samples();
        let slots = self.places.len();
        let (cols, reach) = (self.cols(), self.reach());
        let block = self.block_frames;
        let mut vocs = [Voc::default(); WIDTH];
        let mut hists = [[0u64; WIDTH]; 2];
        let (mut f0_row, mut row, mut spec_row, mut top_row, mut pcm_row) = (0usize, 0usize, 0usize, 0usize, 0usize);
        let mut samples = Vec::with_capacity(group.len());
        for (n, &(i, to)) in group.iter().enumerate() {
            let p = &pieces[i];
            let place = self.places[p.slot];
            let last = p.last && to == p.total;
            let f0_to = if last { p.total } else { (to + 1).max(place.f0_done) };
            let from = place.done;
            let page_first = (p.frame0 + from.min(place.f0_done)) / block;
            let mut page = [0u64; PAGES];
            for (k, address) in page.iter_mut().enumerate() {
                *address = p.slabs.get(page_first + k).copied().unwrap_or(0);
            }
            let part = |b: &Buf| b.ptr + (p.slot * (b.bytes / slots)) as u64;
            let (side, other) = (place.side, 1 - place.side);
            hists[0][n] = part(&self.hist[side]);
            hists[1][n] = part(&self.hist[other]);
            let count = if last { to * frame } else { (to - 1) * frame } - from.saturating_sub(1) * frame;
            vocs[n] = Voc {
                f0_in: part(&self.f0_hist[side]),
                f0_out: part(&self.f0_hist[other]),
                post_in: part(&self.post_keep[side]),
                post_out: part(&self.post_keep[other]),
                tones: part(&self.tones),
                phase: part(&self.phase),
                frame0: p.frame0 as i32,
                f0_from: place.f0_done as i32,
                f0_to: f0_to as i32,
                from: from as i32,
                to: to as i32,
                total: p.total as i32,
                last: i32::from(last),
                f0_row: f0_row as i32,
                row: row as i32,
                spec_row: spec_row as i32,
                top_row: top_row as i32,
                pcm_row: pcm_row as i32,
                page_first: page_first as i32,
                live: 1,
                page,
            };
            f0_row += f0_to - place.f0_done;
            row += to - from;
            spec_row += (to - from) * cols + reach + 1;
            top_row += (to - from) * cols + usize::from(from == 0);
            pcm_row += count;
            samples.push(count);
        }
        let f0_frames = f0_row;
        let recorded = self.recorded(group.len(), row, f0_frames);
        let mut extent = match recorded {
            Some((pieces, frames)) => self.extent(pieces, frames, frames + pieces),
            None => self.extent(group.len(), row, f0_frames),
        };
        let mut tables: Vec<Vec<TileEntry>> = vec![Vec::new(); extent.entries.len()];
        for (n, v) in vocs.iter().take(group.len()).enumerate() {
            let frames = (v.to - v.from) as usize;
            cut(&mut tables[0], n, v.f0_row, (v.f0_to - v.f0_from) as usize, F0_SHAPES[extent.f0].frames);
            cut(&mut tables[1], n, v.row, frames, self.gemm.positions(extent.tiles[0]));
            let mut steps = 1;
            for (i, stage) in self.stages.iter().enumerate() {
                steps *= stage.rate;
                let (start, len) = if i + 1 == self.stages.len() {
                    (v.top_row, frames * steps + usize::from(v.from == 0))
                } else {
                    (v.row * steps as i32, frames * steps)
                };
                cut(&mut tables[i + 2], n, start, len, self.gemm.positions(extent.tiles[i + 1]));
            }
        }
        for (table, entries) in tables.iter_mut().zip(&mut extent.entries) {
            if recorded.is_some() {
                debug_assert!(table.len() <= *entries);
                table.resize(*entries, IDLE);
            }
            *entries = table.len();
        }
        self.describe(&extent, &vocs, &hists, &tables)?;
        match recorded.and_then(|key| self.graphs.get(&key)).filter(|_| !self.device.traced()) {
            Some(graph) => graph.launch()?,
            None => self.network(&extent)?,
        }
        self.bad.fetch(WIDTH * 4)?;
        self.scratch.pcm.fetch(pcm_row * 4)?;
        self.device.sync()?;
        let pcm = self.scratch.pcm.as_mut::<f32>();
        let flags = self.bad.as_mut::<i32>();
        let mut start = 0;
        for (n, (&(i, to), count)) in group.iter().zip(samples).enumerate() {
            let p = &pieces[i];
            let place = &mut self.places[p.slot];
            *place = Place { done: to, f0_done: vocs[n].f0_to as usize, side: 1 - place.side };
            match (&mut out[i], flags[n]) {
                (Some(list), 0) => list.extend_from_slice(&pcm[start..start + count]),
                (slot, _) => *slot = None,
            }
            start += count;
        }
        Ok(())
    }

    /// Columns of the spectrum a frame.
    fn cols(&self) -> usize {
        self.config.frame_samples() / self.config.hop
    }

    /// Columns before its first that a stage looks back at.
    fn reach(&self) -> usize {
        self.stages.iter().map(|s| s.down_stride - 1).max().unwrap_or(0)
    }

    /// What a pass of so many utterances and frames takes at most.
    fn extent(&self, pieces: usize, frames: usize, f0_frames: usize) -> Extent {
        let f0 = F0_SHAPES.iter().position(|shape| f0_frames <= shape.most).unwrap_or(F0_SHAPES.len() - 1);
        // Short blocks while there are too few long ones to go round.
        let mut tiles = vec![if frames < FEW_FRAMES { Tile::N64T32 } else { Tile::N64T64 }];
        // Each utterance's last block may be short, and at the last rate it may have a step more.
        let blocks = |rows: usize, by: usize| rows / by + pieces;
        let mut entries = vec![blocks(f0_frames, F0_SHAPES[f0].frames), blocks(frames, self.gemm.positions(tiles[0]))];
        let mut steps = 1;
        for stage in &self.stages {
            steps *= stage.rate;
            // The largest blocks of which there are enough for the residual blocks, which run side by side.
            let few = |(n, t): (usize, usize)| {
                BLOCKS * stage.channels.div_ceil(n) * (frames * steps).div_ceil(t) < ENOUGH_BLOCKS
            };
            let tile = match stage.channels {
                128.. if !few((128, 128)) => Tile::N128T128,
                _ if !few((64, 128)) => Tile::N64T128,
                _ => Tile::N64T32,
            };
            tiles.push(tile);
            entries.push(blocks(frames * steps, self.gemm.positions(tile)));
        }
        let columns = FRAMES.min(frames) * self.cols() + self.reach() + 1;
        Extent { pieces, frames, f0_frames, columns, f0, tiles, entries }
    }

    /// The utterances and frames of the smallest graph that such a pass fits into.
    fn recorded(&self, pieces: usize, frames: usize, f0_frames: usize) -> Option<(usize, usize)> {
        let fits = |&&(p, f): &&(usize, usize)| pieces <= p && frames <= f && f0_frames <= f + p;
        self.graphs.keys().filter(fits).min_by_key(|(p, f)| (*f, *p)).copied()
    }

    /// Records a graph for every size of a pass of up to `most` utterances that is worth one.
    pub(super) fn warm_up(&mut self, most: usize) -> Result<(), GpuError> {
        for pieces in RECORDED.0.into_iter().filter(|&p| p < 2 * most) {
            for each in RECORDED.1 {
                let key = (pieces, pieces * each);
                let extent = self.extent(pieces, key.1, key.1 + pieces);
                let tables: Vec<Vec<TileEntry>> = extent.entries.iter().map(|&n| vec![IDLE; n]).collect();
                self.describe(&extent, &[Voc::default(); WIDTH], &[[0; WIDTH]; 2], &tables)?;
                self.network(&extent)?;
                let graph = self.device.capture(|| self.network(&extent))?;
                self.graphs.insert(key, graph);
            }
        }
        Ok(())
    }

    /// Sends what the kernels of a pass are told: everything in one transfer.
    fn describe(
        &mut self,
        extent: &Extent,
        vocs: &[Voc; WIDTH],
        hists: &[[u64; WIDTH]; 2],
        tables: &[Vec<TileEntry>],
    ) -> Result<(), GpuError> {
        let words = self.desc.as_mut::<i32>();
        for (to, v) in words.chunks_exact_mut(VOC_WORDS).zip(vocs) {
            // SAFETY: `Voc` is plain data without padding, a whole number of words.
            to.copy_from_slice(unsafe { std::slice::from_raw_parts(std::ptr::from_ref(v).cast::<i32>(), VOC_WORDS) });
        }
        for (at, list) in Extent::histories().into_iter().zip(hists) {
            for (to, address) in words[at..].chunks_exact_mut(2).zip(list) {
                to.copy_from_slice(&[*address as i32, (*address >> 32) as i32]);
            }
        }
        let (starts, end) = extent.tables();
        for (at, table) in starts.into_iter().zip(tables) {
            words[at..][..4 * table.len()].copy_from_slice(table.as_flattened());
        }
        self.desc.send(end * 4)?;
        self.device.fill_zero(self.bad.dev.ptr, WIDTH * 4)
    }

    /// Starts everything that a pass computes.
    fn network(&self, extent: &Extent) -> Result<(), GpuError> {
        let (k, s, h, d) = (&self.kernels, &self.scratch, &self.config, &self.device);
        let Extent { pieces, frames: rows, f0_frames: f0_rows, columns: spectrum, tiles: ref shapes, .. } = *extent;
        let (n, reach) = (pieces as u32, self.reach());
        let vocs = self.desc.dev.ptr;
        let word = |at: usize| vocs + 4 * at as u64;
        let hist = Extent::histories().map(word);
        let levels: Vec<(u64, usize)> =
            extent.tables().0.into_iter().map(word).zip(extent.entries.iter().copied()).collect();
        if f0_rows > 0 {
            for (layer, (w, b)) in self.f0.iter().enumerate() {
                let (tiles, blocks) = levels[0];
                let shape = &F0_SHAPES[extent.f0];
                let grid = (blocks as u32, h.f0_channels.div_ceil(shape.channels) as u32, 1);
                let (from, to) = (s.f0[(layer + 1) % 2].ptr, s.f0[layer % 2].ptr);
                let (weights, results) = (w.bytes / 8, f0_rows * h.f0_channels);
                d.expect(
                    DOUBLE * 2.0 * (f0_rows * weights) as f64,
                    (w.bytes + (results + f0_rows * weights / h.f0_channels) * 8) as f64,
                );
                start!(d, k.f0[extent.f0], grid, shape.threads, shape.shared(); vocs, tiles, layer as i32, from, to, w.ptr, b.ptr)?;
            }
            let last = s.f0[(F0_LAYERS - 1) % 2].ptr;
            start!(d, k.f0_out, (f0_rows.div_ceil(4) as u32, 1, 1), 128, 0; last, self.f0_out.0.ptr, self.f0_out.1, s.f0_hz.ptr, f0_rows as i32)?;
            start!(d, k.tone, (n, 1, 1), 128, 0;
                vocs, s.f0_hz.ptr, self.source_weights.ptr, self.rate as f32, h.voiced_threshold as f32, h.sine_amp as f32, h.noise_std as f32)?;
        }
        start!(d, k.spectrum, (spectrum.div_ceil(128) as u32, n, 1), 128, 0;
            vocs, self.hiss.ptr, self.hiss_len as i32, self.window.ptr, self.basis.ptr, self.source_bias, s.spectrum.ptr, reach as i32)?;
        let wide = self.pre.cin as i32;
        start!(d, k.frames, (FRAMES as u32, n, 1), 128, 0; vocs, s.frames.ptr, h.look_right as i32, wide)?;
        let base = Conv { scale: 1.0, slope: h.slope as f32, ..Conv::default() };
        let x0 = Conv {
            x: s.frames.ptr,
            ldx: wide,
            oute: s.x0.ptr,
            lde: self.pre.n as i32,
            rows: rows as i32,
            act: Act::Leaky,
            ..base
        };
        self.gemm.conv(&self.pre, Tile::N64T64, 0, x0)?;
        let mut x = (s.x0.ptr, self.pre.n as i32);
        let mut steps = 1usize;
        let with =
            |p: Conv, hist_at: usize| Conv { hist_in: hist[0], hist_out: hist[1], hist_off: hist_at as i64, ..p };
        for (i, stage) in self.stages.iter().enumerate() {
            let top = i + 1 == self.stages.len();
            let (low, low_blocks) = levels[i + 1];
            let (tiles, blocks) = levels[i + 2];
            let c = stage.channels as i32;
            let (low_tile, tile) = (shapes[i], shapes[i + 1]);
            let up = Conv { x: x.0, ldx: x.1, out: s.up.ptr, ldo: stage.up.n as i32, tiles: low, ..base };
            self.gemm.conv(&stage.up, low_tile, low_blocks, with(up, stage.up_hist))?;
            steps *= stage.rate;
            let bt = self.gemm.positions(tile) as i32;
            let many = (blocks as u32, 8, 1);
            start!(d, k.columns, many, 256, 0;
                vocs, tiles, bt, s.spectrum.ptr, s.columns.ptr, stage.down_kernel as i32, stage.down_stride as i32,
                stage.down.cin as i32, reach as i32, steps as i32)?;
            let at = Conv { tiles, ldo: c, lde: c, ..base };
            // What the source contributes, through its own residual block.
            let first = &stage.source.layers[0][0];
            let down = Conv {
                x: s.columns.ptr,
                ldx: stage.down.cin as i32,
                out: s.run[0].ptr,
                oute: s.act[0].ptr,
                act: Act::Snake,
                alpha: first.alpha.ptr,
                ..at
            };
            self.gemm.conv(&stage.down, tile, blocks, down)?;
            let end = [Conv { out: s.source.ptr, ..at }];
            self.residual(std::slice::from_ref(&stage.source), tile, blocks, at, hist, s.run[0].ptr, &end)?;
            let alpha = |j: usize| stage.blocks.get(j).map_or(0, |b| b.layers[0][0].alpha.ptr);
            let act = |j: usize| if j < stage.blocks.len() { s.act[j].ptr } else { 0 };
            start!(d, k.merge, many, 256, 0;
                vocs, tiles, bt, s.up.ptr, s.source.ptr, s.x.ptr, act(0), act(1), act(2), alpha(0), alpha(1), alpha(2), c,
                i32::from(top), steps as i32)?;
            let last = stage.blocks.len() - 1;
            let ends: Vec<Conv> = (0..=last)
                .map(|j| {
                    let end = Conv { sum: if j == 0 { 0 } else { s.sum.ptr }, ..at };
                    if j < last {
                        return Conv { out: s.sum.ptr, ..end };
                    }
                    let slope = if top { DEFAULT_LEAKY_SLOPE } else { h.slope } as f32;
                    let scale = 1.0 / stage.blocks.len() as f32;
                    Conv { oute: s.next.ptr, act: Act::Leaky, slope, scale, ..end }
                })
                .collect();
            self.residual(&stage.blocks, tile, blocks, at, hist, s.x.ptr, &ends)?;
            x = (s.next.ptr, c);
        }
        let (tiles, blocks) = levels[levels.len() - 1];
        let ld = self.post.n as i32;
        let post = Conv { x: x.0, ldx: x.1, out: s.post.ptr, ldo: ld, tiles, ..base };
        let tile = if shapes[shapes.len() - 1] == Tile::N64T32 { Tile::N32T32 } else { Tile::N32T128 };
        self.gemm.conv(&self.post, tile, blocks, with(post, self.post_hist))?;
        start!(d, k.samples, (64, n, 1), 256, 0;
            vocs, s.post.ptr, ld, self.window.ptr, h.limit, s.pcm.dev.ptr, self.bad.dev.ptr)
    }

    /// Residual blocks of equally many layers, side by side: their first activations are in the scratch's `act`, `x`
    /// is what each adds to, `ends` says where each result goes; those may follow one another.
    #[expect(clippy::too_many_arguments, reason = "operands of the blocks")]
    fn residual(
        &self,
        list: &[ResBlock],
        tile: Tile,
        blocks: usize,
        at: Conv,
        hist: [u64; 2],
        x: u64,
        ends: &[Conv],
    ) -> Result<(), GpuError> {
        let s = &self.scratch;
        let c = at.ldo;
        let with =
            |p: Conv, hist_at: usize| Conv { hist_in: hist[0], hist_out: hist[1], hist_off: hist_at as i64, ..p };
        let layers = list.first().map_or(0, |b| b.layers.len());
        for d in 0..layers {
            let (mut firsts, mut seconds) = (Vec::with_capacity(BLOCKS), Vec::with_capacity(BLOCKS));
            // The longest kernels come last in the list and are started first.
            for (j, block) in list.iter().enumerate().rev() {
                let [one, two] = &block.layers[d];
                let (act, run, mid) = (s.act[j].ptr, s.run[j].ptr, s.mid[j].ptr);
                let first = Conv { x: act, ldx: c, oute: mid, act: Act::Snake, alpha: two.alpha.ptr, ..at };
                firsts.push((&one.conv, with(first, one.hist)));
                let second = match block.layers.get(d + 1) {
                    Some([next, _]) => Conv { out: run, oute: act, act: Act::Snake, alpha: next.alpha.ptr, ..at },
                    None => ends[j],
                };
                let second = Conv { x: mid, ldx: c, res: if d == 0 { x } else { run }, ..second };
                seconds.push((&two.conv, with(second, two.hist)));
            }
            self.gemm.side_by_side(&firsts, tile, blocks)?;
            if d + 1 < layers {
                self.gemm.side_by_side(&seconds, tile, blocks)?;
            } else {
                // Each adds to the one before.
                seconds.iter().rev().try_for_each(|(w, p)| self.gemm.conv(w, tile, blocks, *p))?;
            }
        }
        Ok(())
    }
}

/// The macros of hift.cu; `x_offset`: where mel frames lie in a slab.
pub(super) fn defines(config: &Config, x_offset: usize) -> Vec<(&'static str, i64)> {
    let h = &config.hift;
    vec![
        ("MEL", h.mel as i64),
        ("BLOCK", config.flow.block as i64),
        ("X_OFFSET", x_offset as i64),
        ("F0C", h.f0_channels as i64),
        ("HARM", h.harmonics as i64 + 1),
        ("FRAME", h.frame_samples() as i64),
        ("NFFT", h.n_fft as i64),
        ("HOP", h.hop as i64),
        ("RING", RING as i64),
    ]
}

/// Cuts `len` rows that start at `start` into blocks of `by`.
fn cut(table: &mut Vec<TileEntry>, seq: usize, start: i32, len: usize, by: usize) {
    table.extend((0..len).step_by(by).map(|t| [seq as i32, t as i32, start, len as i32]));
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
