//! The two position convolutions of a step: the kernels that run them, and their weights.
//!
//! # Why
//! A convolution reads the end of the chunk before from a history and leaves the end of its own there. On Hopper, one
//! kernel has whole rows of chunks and does both (position.cu). Elsewhere the general convolution of gemm.cu does where a block has a whole
//! sequence and a whole group of channels; for few chunks smaller blocks share the sums, and the histories are written
//! afterwards.

use super::super::device::{Buf, Elt, GpuError, Kernel, Module, start};
use super::super::gemm::{Act, Conv, Tile};
use super::super::weights::{Packed, Packer, Piece, Source};
use super::Flow;
use super::load::ROOT;
use crate::synth::cosyvoice::checkpoint::Part;
use crate::synth::cosyvoice::config::{CONV_POS_GROUPS, CONV_POS_KERNEL, FlowConfig};

/// Block shape of the general convolution: a whole sequence and a whole group of channels, because the block writes the history
/// that it reads, and nothing orders it and another.
pub(super) const TILE: Tile = Tile::N64T64;
/// What narrow steps take in its place, so that groups of warps share the sums.
pub(super) const NARROW_TILE: Tile = Tile::N64T32;

/// Channels of a group that position.cu is made for, and most frames of a chunk.
const CHANNELS: usize = 64;
const FRAMES: usize = 64;
/// Rows of chunks of a block, taps in flight, and rows of inputs that an MMA of the last tap reads, as in position.cu.
const ROWS: usize = 2;
const STAGES: usize = 6;
const INPUTS: usize = (FRAMES + CONV_POS_KERNEL - 1).next_multiple_of(8);
/// Dynamic shared memory: weights in flight, inputs, and two barriers for each tap in flight.
const SHARED: u32 = (STAGES * CHANNELS * CHANNELS * 2 + ROWS * INPUTS * CHANNELS * 2 + STAGES * 16) as u32;

/// The weights of both, and the kernel of position.cu with its own copy of them where device and sizes are for it.
pub(super) struct Positions {
    packed: [Packed; 2],
    warpgroups: Option<(Kernel, [Buf; 2])>,
}

impl Positions {
    pub(super) fn load(
        packer: &Packer,
        source: &dyn Source,
        f: &FlowConfig,
        module: &Module,
    ) -> Result<Self, GpuError> {
        let (dim, cin, device) = (f.dim, f.dim / CONV_POS_GROUPS, &packer.device);
        let values = |n: usize| -> Result<(Vec<f32>, Vec<f32>), GpuError> {
            let get = |what: &str, shape: &[usize]| {
                source.floats(Part::Flow, &format!("{ROOT}.input_embed.conv_pos_embed.conv{n}.0.{what}"), shape)
            };
            Ok((get("weight", &[dim, cin, CONV_POS_KERNEL])?, get("bias", &[dim])?))
        };
        let pack = |(w, b): &(Vec<f32>, Vec<f32>)| {
            let piece = [Piece { values: w, n: dim, mul: 1, off: 0 }];
            packer.pack_groups(&piece, dim, cin, CONV_POS_KERNEL, CONV_POS_GROUPS, Some(b), None)
        };
        let both = [values(1)?, values(2)?];
        let fits =
            device.hopper && packer.elt != Elt::F32 && cin == CHANNELS && f.block <= FRAMES && SHARED <= device.shared;
        Ok(Self {
            packed: [pack(&both[0])?, pack(&both[1])?],
            warpgroups: match fits {
                true => Some((
                    module.kernel("flow_position", SHARED)?,
                    [packer.elements(&by_tap(&both[0].0))?, packer.elements(&by_tap(&both[1].0))?],
                )),
                false => None,
            },
        })
    }
}

/// `[outputs][inputs of a group][taps]` as position.cu reads it: `[group][tap][outputs][inputs]`, where of each row of 64
/// inputs the pieces of eight change places with the row.
fn by_tap(w: &[f32]) -> Vec<f32> {
    let (row, group) = (CHANNELS * CONV_POS_KERNEL, CHANNELS * CHANNELS * CONV_POS_KERNEL);
    let mut to = vec![0f32; w.len()];
    for (at, v) in w.iter().enumerate() {
        let (g, out, input, tap) = (at / group, at % group / row, at % row / CONV_POS_KERNEL, at % CONV_POS_KERNEL);
        let place = ((input / 8) ^ (out % 8)) * 8 + input % 8;
        to[((g * CONV_POS_KERNEL + tap) * CHANNELS + out) * CHANNELS + place] = *v;
    }
    to
}

/// The convolutions of `width` chunks, from the input that the scratch has to what the first block reads; `whole`: they are
/// all blocks of one utterance.
pub(super) fn convolve(flow: &Flow, width: usize, whole: bool) -> Result<(), GpuError> {
    let (f, s) = (&flow.config, &flow.scratch);
    let (rows, halo) = (2 * width, CONV_POS_KERNEL - 1);
    // The second history lies behind the first.
    let behind = (halo * f.dim) as i64;
    if let Some((kernel, weights)) = flow.positions.warpgroups.as_ref().filter(|_| !whole) {
        let grid = (CONV_POS_GROUPS as u32, rows.div_ceil(ROWS) as u32, 1);
        let [first, second] = &flow.positions.packed;
        for (w, packed, x, off, post, out, oute) in [
            (&weights[0], first, s.h0e.ptr, 0, 0, 0, s.c1.ptr),
            (&weights[1], second, s.c1.ptr, behind, s.h0.ptr, s.h.ptr, 0),
        ] {
            let bias = packed.bias.as_ref().map_or(0, |b| b.ptr);
            let (outputs, inputs) = ((rows * f.block * f.dim) as f64, (CHANNELS * CONV_POS_KERNEL) as f64);
            flow.device.expect(2.0 * outputs * inputs, 2.0 * (2.0 * outputs + f.dim as f64 * inputs));
            start!(flow.device, *kernel, grid, (128 * ROWS + 32) as u32, SHARED;
                x, w.ptr, bias, s.hist.ptr, off, post, out, oute, rows as i32)?;
        }
        return Ok(());
    }
    let narrow = !whole && is_narrow(flow, width);
    let (tile, tiles, blocks) = match narrow {
        true => (NARROW_TILE, &s.narrow_tiles, rows * f.block.div_ceil(NARROW_TILE.shape().1)),
        false => (TILE, &s.tiles, rows),
    };
    let dim = f.dim as i32;
    let position = Conv {
        tiles: tiles.ptr,
        hist_in: s.hist.ptr,
        hist_out: if whole || narrow { 0 } else { s.hist.ptr },
        ldx: dim,
        ldo: dim,
        lde: dim,
        act: Act::Mish,
        rows: (rows * f.block) as i32,
        scale: 1.0,
        ..Conv::default()
    };
    let neighbours = |x: u64, off: i64| match whole {
        true => start!(flow.device, flow.kernels.neighbours, (halo as u32, rows as u32, 1), 128, 0;
            x, s.hist.ptr, off, halo as i32),
        false => Ok(()),
    };
    let [first, second] = &flow.positions.packed;
    neighbours(s.h0e.ptr, 0)?;
    let one = Conv { x: s.h0e.ptr, oute: s.c1.ptr, ..position };
    flow.linears.gemm.conv(first, tile, blocks, one)?;
    neighbours(s.c1.ptr, behind)?;
    let two = Conv { x: s.c1.ptr, post: s.h0.ptr, out: s.h.ptr, hist_off: behind, ..position };
    flow.linears.gemm.conv(second, tile, blocks, two)?;
    if narrow {
        start!(flow.device, flow.kernels.keep, (halo as u32, rows as u32, 2), 128, 0;
            s.h0e.ptr, s.c1.ptr, s.hist.ptr, behind, halo as i32)?;
    }
    Ok(())
}

/// Whether `width` chunks leave so many multiprocessors idle that smaller blocks are faster: their sums may differ.
pub(super) fn is_narrow(flow: &Flow, width: usize) -> bool {
    let (f, (outputs, positions)) = (&flow.config, NARROW_TILE.shape());
    let blocks = 2 * width * f.block.div_ceil(positions) * f.dim.div_ceil(outputs);
    let kept = f.block >= CONV_POS_KERNEL - 1;
    let plain = flow.linears.gemm.elt == Elt::F32 || flow.device.invariant;
    kept && !plain && blocks <= 2 * flow.device.multiprocessors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_of_a_tap_lie_together_and_swizzled() {
        let (groups, row) = (2, CHANNELS * CONV_POS_KERNEL);
        let value = |out: usize, input: usize, tap: usize| (out * row + input * CONV_POS_KERNEL + tap) as f32;
        let w: Vec<f32> = (0..groups * CHANNELS * row).map(|at| at as f32).collect();
        let to = by_tap(&w);
        let at = |group: usize, tap: usize, out: usize, place: usize| {
            to[((group * CONV_POS_KERNEL + tap) * CHANNELS + out) * CHANNELS + place]
        };
        assert_eq!(at(0, 0, 0, 9), value(0, 9, 0));
        // The first piece of the third row is where its third would be.
        assert_eq!(at(1, 30, 2, 17), value(CHANNELS + 2, 1, 30));
        let mut all = to;
        all.sort_by(f32::total_cmp);
        assert_eq!(all, w, "each once");
    }
}
