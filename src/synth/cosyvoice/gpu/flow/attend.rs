//! Which attention kernel a step takes, how it is launched, and what shared memory it needs.
//!
//! # Why
//! Many chunks fill the device with a block for each head of each row. On Hopper these multiply by warpgroup MMAs
//! (attend_wide.cu), elsewhere by warps (attend.cu). With few chunks more groups of warps share a row's keys, then its
//! queries, while there is a multiprocessor for every block.

use super::super::device::{Device, Elt, GpuError, Kernel, Module};
use super::{MOST_SHARED, PAGES};
use crate::synth::cosyvoice::config::FlowConfig;

/// Queries of a row, a whole number of sixteens, as in attend.cu.
pub(super) const QUERIES: usize = 64;
/// Shared memory that attention has besides what it is launched with: where the pages lie.
const STATIC: u32 = (PAGES * 8) as u32;

/// A kernel of attend.cu.
struct Cut {
    name: &'static str,
    /// Warps of a block that have sixteen queries each.
    warps: usize,
    /// Groups of as many warps, which share a row's keys.
    groups: usize,
    /// Keys of a tile.
    tile: usize,
}

/// From those for many blocks, with few warps each, to those for few blocks.
const CUTS: [Cut; 5] = [
    Cut { name: "flow_attend_4x1", warps: 4, groups: 1, tile: 32 },
    Cut { name: "flow_attend_4x2", warps: 4, groups: 2, tile: 32 },
    Cut { name: "flow_attend_4x4", warps: 4, groups: 4, tile: 64 },
    Cut { name: "flow_attend_2x4", warps: 2, groups: 4, tile: 64 },
    Cut { name: "flow_attend_1x8", warps: 1, groups: 8, tile: 32 },
];

impl Cut {
    /// Dynamic shared memory: queries, the chunk's own keys and values, then two tiles of keys and of values a group, and of
    /// 8 bit ones two scales for each key.
    fn shared(&self, head_dim: usize, int8: bool) -> u32 {
        let keys = self.groups * self.tile;
        ((16 * self.warps + 2 * QUERIES + 4 * keys) * head_dim * 2 + usize::from(int8) * 16 * keys) as u32
    }

    /// Blocks that share the queries of a row.
    fn blocks(&self) -> usize {
        QUERIES / (16 * self.warps)
    }
}

/// Whether a block that has `shared` bytes can attend in 16 bits; `int8`: to keys and values in 8.
pub(super) fn fits(head_dim: usize, shared: u32, int8: bool) -> bool {
    CUTS[0].shared(head_dim, int8) + STATIC <= shared
}

/// What the kernel of attend_wide.cu is made for: the width of a head, and most frames of a block.
const WIDE_HEAD: usize = 64;
const WIDE_FRAMES: usize = 56;
/// Its dynamic shared memory: two blocks of earlier keys and values, the chunk's own, and its queries.
const WIDE_SHARED: u32 = (7 * QUERIES * WIDE_HEAD * 2) as u32;
const WIDE_THREADS: u32 = 128;

/// How one step attends.
pub(super) struct Launch {
    pub(super) kernel: Kernel,
    pub(super) grid: (u32, u32, u32),
    pub(super) threads: u32,
    pub(super) shared: u32,
}

/// The kernels.
pub(super) struct Attention {
    /// As [`CUTS`]; in single precision the first alone.
    cuts: Vec<Kernel>,
    wide: Option<Kernel>,
    heads: usize,
    head_dim: usize,
    int8: bool,
    /// Shared memory of a block.
    room: u32,
    multiprocessors: usize,
    /// Whether every width attends alike.
    invariant: bool,
}

impl Attention {
    pub(super) fn load(device: &Device, module: &Module, elt: Elt, f: &FlowConfig) -> Result<Self, GpuError> {
        let wide = device.hopper
            && elt != Elt::F32
            && !device.modes.int8_keys
            && f.head_dim == WIDE_HEAD
            && f.block <= WIDE_FRAMES
            && WIDE_SHARED <= device.shared;
        Ok(Self {
            cuts: match elt {
                Elt::F32 => vec![module.kernel("flow_attend", 0)?],
                _ => CUTS.iter().map(|cut| module.kernel(cut.name, MOST_SHARED)).collect::<Result<_, _>>()?,
            },
            wide: wide.then(|| module.kernel("flow_attend_wide", WIDE_SHARED)).transpose()?,
            heads: f.heads,
            head_dim: f.head_dim,
            int8: device.modes.int8_keys,
            room: device.shared,
            multiprocessors: device.multiprocessors,
            invariant: device.invariant,
        })
    }

    /// How `width` chunks attend; `whole`: to keys and values that are all in their slabs already.
    pub(super) fn launch(&self, width: usize, whole: bool) -> Launch {
        let (heads, rows) = (self.heads as u32, 2 * width as u32);
        let one = |kernel, threads, shared| Launch { kernel, grid: (heads, rows, 1), threads, shared };
        if self.cuts.len() == 1 {
            return one(self.cuts[0], 256, 0);
        }
        let (blocks, at_once) = (2 * width * self.heads, self.multiprocessors);
        // From here on warpgroups are faster than two groups of warps.
        if let Some(wide) = self.wide.filter(|_| !whole && (self.invariant || 2 * blocks > 3 * at_once)) {
            return one(wide, WIDE_THREADS, WIDE_SHARED);
        }
        let wanted = [2 * at_once, at_once, at_once / 2, at_once / 4].iter().filter(|&&most| blocks <= most).count();
        let wanted = if self.invariant { 0 } else { wanted };
        let shared = |which: usize| CUTS[which].shared(self.head_dim, self.int8);
        let which = (0..=wanted).rev().find(|&which| shared(which) + STATIC <= self.room).unwrap_or(0);
        let cut = &CUTS[which];
        Launch {
            kernel: self.cuts[which],
            grid: (heads, rows, cut.blocks() as u32),
            threads: (32 * cut.warps * cut.groups) as u32,
            shared: shared(which),
        }
    }
}
