//! What one pass of the vocoder starts, in order.

use super::super::device::{GpuError, start};
use super::super::gemm::{Act, Conv, Tile};
use super::shapes::{Extent, F0_SHAPES, POST_SHAPES, STAGE_SHAPES};
use super::{BLOCKS, DOUBLE, F0_LAYERS, FRAMES, Hift, ResBlock};
use crate::synth::cosyvoice::config::DEFAULT_LEAKY_SLOPE;

impl Hift {
    /// Starts everything that a pass computes.
    pub(super) fn network(&self, extent: &Extent) -> Result<(), GpuError> {
        let (k, s, h, d, m) = (&self.kernels, &self.scratch, &self.config, &self.device, &self.weights);
        let Extent { pieces, frames: rows, f0_frames: f0_rows, columns: spectrum, tiles: ref shapes, .. } = *extent;
        let (n, reach) = (pieces as u32, self.reach());
        let vocs = self.desc.dev.ptr;
        let word = |at: usize| vocs + 4 * at as u64;
        let hist = Extent::histories().map(word);
        let levels: Vec<(u64, usize)> =
            extent.tables().0.into_iter().map(word).zip(extent.entries.iter().copied()).collect();
        if f0_rows > 0 {
            for (layer, (w, b)) in m.f0.iter().enumerate() {
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
            start!(d, k.f0_out, (f0_rows.div_ceil(4) as u32, 1, 1), 128, 0; last, m.f0_out.0.ptr, m.f0_out.1, s.f0_hz.ptr, f0_rows as i32)?;
            start!(d, k.tone, (n, 1, 1), 128, 0;
                vocs, s.f0_hz.ptr, m.source.0.ptr, self.rate as f32, h.voiced_threshold as f32, h.sine_amp as f32, h.noise_std as f32)?;
        }
        start!(d, k.spectrum, (spectrum.div_ceil(128) as u32, n, 1), 128, 0;
            vocs, m.hiss.0.ptr, m.hiss.1 as i32, m.window.ptr, m.basis.ptr, m.source.1, s.spectrum.ptr, reach as i32)?;
        let ldx = m.pre.cin as i32;
        start!(d, k.frames, (FRAMES as u32, n, 1), 128, 0; vocs, s.frames.ptr, h.look_right as i32, ldx)?;
        let base = Conv { scale: 1.0, slope: h.slope as f32, ..Conv::default() };
        let x0 = Conv {
            x: s.frames.ptr,
            ldx,
            oute: s.x0.ptr,
            lde: m.pre.n as i32,
            rows: rows as i32,
            act: Act::Leaky,
            ..base
        };
        self.gemm.conv(&m.pre, Tile::N64T64, 0, x0)?;
        let mut x = (s.x0.ptr, m.pre.n as i32);
        let mut steps = 1usize;
        let with =
            |p: Conv, hist_at: usize| Conv { hist_in: hist[0], hist_out: hist[1], hist_off: hist_at as i64, ..p };
        for (i, stage) in m.stages.iter().enumerate() {
            let top = i + 1 == m.stages.len();
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
        let ld = m.post.n as i32;
        let post = Conv { x: x.0, ldx: x.1, out: s.post.ptr, ldo: ld, tiles, ..base };
        let tile = POST_SHAPES[usize::from(shapes[shapes.len() - 1] != STAGE_SHAPES[0])];
        self.gemm.conv(&m.post, tile, blocks, with(post, m.post_hist))?;
        start!(d, k.samples, (64, n, 1), 256, 0;
            vocs, s.post.ptr, ld, m.window.ptr, h.limit, self.pcm.dev.ptr, self.bad.dev.ptr)
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
