//! The vocoder on the device: pieces of many utterances, of any lengths, in one pass.
//!
//! Owns weights, scratch, and per slot the histories of every convolution. Rows of all utterances lie one after
//! another at each rate; tile tables say which block of a launch belongs to whom. Passes of few utterances run as
//! graphs, recorded for so many utterances and frames at most: what a launch has too much of is told to do nothing.
//! [`load`] makes the model, [`network`] says what a pass starts.
//!
//! Operands are 16 bit with sums and the residual stream in single precision; F0 is computed in double.

pub(super) mod load;
mod network;
mod shapes;

use std::collections::BTreeMap;
use std::sync::Arc;

use self::shapes::{Extent, F0_SAME, F0_SHAPES, LOW_SHAPES, STAGE_SHAPES, f0_shape};
use super::device::{Buf, Device, GpuError, Graph, Kernel, Staging};
use super::gemm::{Gemm, Tile, TileEntry};
use super::mirror::mirrored;
use super::weights::Packed;
use crate::synth::cosyvoice::config::{Config, HiftConfig};

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
/// Frames of a pass below which blocks of its first GEMMs are short.
const SHORT_PASS: usize = 256;
/// Utterances of a pass that a graph is recorded for, and frames of each on average. Wider passes take so long that
/// starting their launches one by one costs nothing.
const RECORDED: ([usize; 4], [usize; 3]) = ([1, 2, 4, 8], [16, 32, FRAMES]);

/// `Voc` of hift.cu.
///
/// Why this struct is large: all that a pass is told of one utterance.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Voc {
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

mirrored!(Voc as "Voc" {
    f0_in, f0_out, post_in, post_out, tones, phase, frame0, f0_from, f0_to, from, to, total, last, f0_row, row, spec_row,
    top_row, pcm_row, page_first, live, page,
});

const VOC_WORDS: usize = size_of::<Voc>() / 4;
/// A block that has nothing to do.
const IDLE: TileEntry = [-1, 0, 0, 0];

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

/// A pass that was started, piece by piece.
pub(super) struct Pass(Vec<Part>);

struct Part {
    /// Which of the pieces it was started with.
    piece: usize,
    slot: usize,
    /// Where the slot's stream stands then.
    place: Place,
    samples: usize,
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

impl Stage {
    /// Block shapes that it may run in, shortest first.
    fn shapes(&self) -> &'static [Tile] {
        if self.channels < 128 { &STAGE_SHAPES[..2] } else { &STAGE_SHAPES }
    }
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
}

/// Weights and tables.
struct Weights {
    f0: Vec<(Buf, Buf)>,
    f0_out: (Buf, f32),
    /// Of the tones: one a harmonic, and a bias.
    source: (Buf, f32),
    /// The weighted sum of the tones' noise, and how many samples of it there are.
    hiss: (Buf, usize),
    window: Buf,
    basis: Buf,
    pre: Packed,
    stages: Vec<Stage>,
    post: Packed,
    post_hist: usize,
}

/// What every slot keeps between passes; two copies of what a pass reads and writes.
struct Slots {
    hist: [Buf; 2],
    f0_hist: [Buf; 2],
    post_keep: [Buf; 2],
    tones: Buf,
    phase: Buf,
    places: Vec<Place>,
}

impl Slots {
    /// Where `slot`'s part of a buffer lies.
    fn part(&self, buf: &Buf, slot: usize) -> u64 {
        buf.ptr + (slot * self.each(buf)) as u64
    }

    /// Bytes of a buffer that one slot has.
    fn each(&self, buf: &Buf) -> usize {
        buf.bytes / self.places.len()
    }
}

/// The model.
pub(super) struct Hift {
    device: Arc<Device>,
    config: HiftConfig,
    rate: usize,
    block_frames: usize,
    gemm: Gemm,
    kernels: Kernels,
    weights: Weights,
    slots: Slots,
    scratch: Scratch,
    desc: Staging,
    bad: Staging,
    pcm: Staging,
    /// By utterances and frames.
    graphs: BTreeMap<(usize, usize), Graph>,
}

impl Hift {
    /// Frames the network withholds while the mel goes on.
    fn ahead(&self) -> usize {
        self.config.look_right.max(F0_AHEAD + 1)
    }

    /// Frames whose samples are withheld: the last of the network's is not complete without the next.
    pub(super) fn hold_back(&self) -> usize {
        self.ahead() + 1
    }

    /// Where the convolution histories of a slot lie, and their bytes.
    #[cfg(feature = "fault-injection")]
    pub(super) fn histories(&self, slot: usize) -> Vec<(u64, usize)> {
        self.slots.hist.iter().map(|b| (self.slots.part(b, slot), self.slots.each(b))).collect()
    }

    /// F0 in Hz of the first `count` frames that the last pass looked at.
    pub(super) fn last_f0(&self, count: usize) -> Result<Vec<f32>, GpuError> {
        let mut out = vec![0f32; count];
        self.device.read(self.scratch.f0_hz.ptr, &mut out)?;
        Ok(out)
    }

    /// Frames of a slot whose F0 is known.
    pub(super) fn f0_done(&self, slot: usize) -> usize {
        self.slots.places[slot].f0_done
    }

    /// As much of a piece as one pass can turn into samples.
    pub(super) fn for_one_pass<'a>(&self, piece: Excerpt<'a>) -> Excerpt<'a> {
        let end = self.slots.places[piece.slot].done + FRAMES;
        let last = piece.last && piece.total <= end;
        Excerpt { total: piece.total.min(end + if last { 0 } else { self.ahead() }), last, ..piece }
    }

    /// The start of a stream.
    pub(super) fn open(&mut self, slot: usize) -> Result<(), GpuError> {
        self.reset(slot);
        self.clear(slot)
    }

    /// What the host does of that.
    pub(super) fn reset(&mut self, slot: usize) {
        self.slots.places[slot] = Place::default();
    }

    /// What the device does of it: before the stream's first pass.
    pub(super) fn clear(&self, slot: usize) -> Result<(), GpuError> {
        let slots = &self.slots;
        for b in [&slots.hist[0], &slots.f0_hist[0], &slots.post_keep[0], &slots.phase] {
            self.device.fill_zero(slots.part(b, slot), slots.each(b))?;
        }
        Ok(())
    }

    /// Whether a stream has given out everything.
    pub(super) fn finished(&self, slot: usize, total: usize, last: bool) -> bool {
        last && self.slots.places[slot].done >= total
    }

    /// New samples of each piece, everything that is exact; `None` for one whose values are no longer finite.
    pub(super) fn run(&mut self, pieces: &[Excerpt<'_>]) -> Result<Vec<Option<Vec<f32>>>, GpuError> {
        let mut out: Vec<Option<Vec<f32>>> = pieces.iter().map(|_| Some(Vec::new())).collect();
        while let Some(pass) = self.start(pieces, &out)? {
            self.device.sync()?;
            self.take(pass, &mut out);
        }
        Ok(out)
    }

    /// Starts a pass over those of `pieces` that have something left and a place in `out` still; `None`: there are
    /// none. Nothing else may be started here before it has ended and [`Self::take`] was called.
    pub(super) fn start(&mut self, pieces: &[Excerpt<'_>], out: &[Option<Vec<f32>>]) -> Result<Option<Pass>, GpuError> {
        let mut group = Vec::new();
        for (i, (p, out)) in pieces.iter().zip(out).enumerate() {
            let done = self.slots.places[p.slot].done;
            let target = if p.last { p.total } else { p.total.saturating_sub(self.ahead()) };
            if done < target && group.len() < WIDTH && out.is_some() {
                group.push((i, target.min(done + FRAMES)));
            }
        }
        if group.is_empty() {
            return Ok(None);
        }
        self.pass(pieces, &group).map(Some)
    }

    fn pass(&mut self, pieces: &[Excerpt<'_>], group: &[(usize, usize)]) -> Result<Pass, GpuError> {
        let frame = self.config.frame_samples();
        let slots = &self.slots;
        let (cols, reach) = (self.cols(), self.reach());
        let block = self.block_frames;
        let mut vocs = [Voc::default(); WIDTH];
        let mut hists = [[0u64; WIDTH]; 2];
        let (mut f0_row, mut row, mut spec_row, mut top_row, mut pcm_row) = (0usize, 0usize, 0usize, 0usize, 0usize);
        let mut parts = Vec::with_capacity(group.len());
        for (n, &(i, to)) in group.iter().enumerate() {
            let p = &pieces[i];
            let place = self.slots.places[p.slot];
            let last = p.last && to == p.total;
            let f0_to = if last { p.total } else { (to + 1).max(place.f0_done) };
            let from = place.done;
            let page_first = (p.frame0 + from.min(place.f0_done)) / block;
            let mut page = [0u64; PAGES];
            for (k, address) in page.iter_mut().enumerate() {
                *address = p.slabs.get(page_first + k).copied().unwrap_or(0);
            }
            let part = |b: &Buf| slots.part(b, p.slot);
            let (side, other) = (place.side, 1 - place.side);
            hists[0][n] = part(&slots.hist[side]);
            hists[1][n] = part(&slots.hist[other]);
            let count = if last { to * frame } else { (to - 1) * frame } - from.saturating_sub(1) * frame;
            vocs[n] = Voc {
                f0_in: part(&slots.f0_hist[side]),
                f0_out: part(&slots.f0_hist[other]),
                post_in: part(&slots.post_keep[side]),
                post_out: part(&slots.post_keep[other]),
                tones: part(&slots.tones),
                phase: part(&slots.phase),
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
            let place = Place { done: to, f0_done: f0_to, side: other };
            parts.push(Part { piece: i, slot: p.slot, place, samples: count });
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
            for (i, stage) in self.weights.stages.iter().enumerate() {
                steps *= stage.rate;
                let (start, len) = if i + 1 == self.weights.stages.len() {
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
        self.pcm.fetch(pcm_row * 4)?;
        Ok(Pass(parts))
    }

    /// The samples of a pass that has ended, appended to `out`; `None` for a piece whose values are no longer
    /// finite.
    pub(super) fn take(&mut self, pass: Pass, out: &mut [Option<Vec<f32>>]) {
        let pcm = self.pcm.as_mut::<f32>();
        let flags = self.bad.as_mut::<i32>();
        let mut start = 0;
        for (part, bad) in pass.0.into_iter().zip(flags) {
            self.slots.places[part.slot] = part.place;
            match (&mut out[part.piece], *bad) {
                (Some(list), 0) => list.extend_from_slice(&pcm[start..start + part.samples]),
                (slot, _) => *slot = None,
            }
            start += part.samples;
        }
    }

    /// Columns of the spectrum a frame.
    fn cols(&self) -> usize {
        self.config.frame_samples() / self.config.hop
    }

    /// Columns before its first that a stage looks back at.
    fn reach(&self) -> usize {
        reach(&self.weights.stages)
    }

    /// What a pass of so many utterances and frames takes at most.
    fn extent(&self, pieces: usize, frames: usize, f0_frames: usize) -> Extent {
        let same = self.device.invariant;
        let f0 = if same { F0_SAME } else { f0_shape(f0_frames, self.device.shared) };
        // Short blocks while there are too few long ones to go round.
        let mut tiles = vec![LOW_SHAPES[usize::from(same || frames >= SHORT_PASS)]];
        // Two a multiprocessor keep the device busy.
        let enough = 2 * self.device.multiprocessors;
        // Each utterance's last block may be short, and at the last rate it may have a step more.
        let blocks = |rows: usize, by: usize| rows / by + pieces;
        let mut entries = vec![blocks(f0_frames, F0_SHAPES[f0].frames), blocks(frames, self.gemm.positions(tiles[0]))];
        let mut steps = 1;
        for stage in &self.weights.stages {
            steps *= stage.rate;
            // The largest blocks of which there are enough for the residual blocks, which run side by side.
            let busy = |tile: &Tile| {
                let (n, t) = tile.shape();
                BLOCKS * stage.channels.div_ceil(n) * (frames * steps).div_ceil(t) >= enough
            };
            let tile = match same {
                true => STAGE_SHAPES[1],
                false => stage.shapes().iter().copied().rev().find(busy).unwrap_or(STAGE_SHAPES[0]),
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

/// Columns before its first that one of the stages looks back at.
fn reach(stages: &[Stage]) -> usize {
    stages.iter().map(|s| s.down_stride - 1).max().unwrap_or(0)
}

/// Slabs that the mel of one pass may lie in: its frames and those it looks ahead at, from anywhere in a block of
/// `block` frames.
fn pages(block: usize) -> usize {
    (block - 1 + FRAMES + F0_AHEAD) / block + 1
}

/// Cuts `len` rows that start at `start` into blocks of `by`.
fn cut(table: &mut Vec<TileEntry>, seq: usize, start: i32, len: usize, by: usize) {
    table.extend((0..len).step_by(by).map(|t| [seq as i32, t as i32, start, len as i32]));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_of_a_block_of_ten_frames_and_more_finds_room_for_its_slabs() {
        for block in 1..200 {
            // Every place in a block where a pass may start; the last frame it reads.
            let most = (0..block).map(|at| (at + FRAMES + F0_AHEAD) / block + 1).max();
            assert_eq!(most, Some(pages(block)), "blocks of {block}");
            assert_eq!(pages(block) <= PAGES, block >= 10, "blocks of {block}");
        }
    }
}
