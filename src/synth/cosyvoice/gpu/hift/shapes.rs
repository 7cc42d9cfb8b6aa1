//! How the launches of a pass are cut into blocks.

use super::super::gemm::Tile;
use super::{F0_AHEAD, VOC_WORDS, WIDTH};

/// Block shapes of GEMMs at the mel's rate, shortest first.
pub(super) const LOW_SHAPES: [Tile; 2] = [Tile::N64T32, Tile::N64T64];
/// The same of a stage; the last is for 128 channels and more.
pub(super) const STAGE_SHAPES: [Tile; 3] = [Tile::N64T32, Tile::N64T128, Tile::N128T128];
/// The same of the last convolution, by whether the stage before it runs in the shortest.
pub(super) const POST_SHAPES: [Tile; 2] = [Tile::N32T32, Tile::N32T128];

/// A block shape of the F0 convolutions.
#[derive(Debug)]
pub(super) struct F0Shape {
    pub(super) kernel: &'static str,
    /// Frames and channels of a block.
    pub(super) frames: usize,
    pub(super) channels: usize,
    pub(super) threads: u32,
    /// Input channels of one of its four stages.
    pub(super) stage: usize,
    /// Frames of a pass up to which it is the fastest.
    pub(super) most: usize,
}

impl F0Shape {
    pub(super) fn shared(&self) -> u32 {
        let weights = 4 * self.stage * (self.channels + 4);
        (8 * (weights + (self.frames + F0_AHEAD) * (self.stage + 4))) as u32
    }
}

/// As measured at 12 and 50 frames of 1, 8 and 32 utterances.
pub(super) const F0_SHAPES: [F0Shape; 3] = [
    F0Shape { kernel: "voc_f0_16x32", frames: 16, channels: 32, threads: 512, stage: 64, most: 256 },
    F0Shape { kernel: "voc_f0_32x32", frames: 32, channels: 32, threads: 128, stage: 64, most: 1200 },
    F0Shape { kernel: "voc_f0_64x128", frames: 64, channels: 128, threads: 256, stage: 32, most: usize::MAX },
];

/// The one where a row's bits may not depend on how many there are.
pub(super) const F0_SAME: usize = 1;

/// Which of [`F0_SHAPES`] computes `frames` frames where a block has `room` bytes of shared memory. The two smallest fit
/// everywhere.
pub(super) fn f0_shape(frames: usize, room: u32) -> usize {
    let fit = F0_SHAPES.iter().take_while(|shape| shape.shared() <= room).count().max(1);
    F0_SHAPES[..fit].iter().position(|shape| frames <= shape.most).unwrap_or(fit - 1)
}

/// Everything that the launches of a pass depend on.
#[derive(Clone, Debug)]
pub(super) struct Extent {
    pub(super) pieces: usize,
    pub(super) frames: usize,
    pub(super) f0_frames: usize,
    /// Columns of an utterance's spectrum at most.
    pub(super) columns: usize,
    /// Which of [`F0_SHAPES`].
    pub(super) f0: usize,
    /// Block shapes: of the mel's rate, then of every stage's.
    pub(super) tiles: Vec<Tile>,
    /// Entries of the tile tables: F0, the mel's rate, every stage's.
    pub(super) entries: Vec<usize>,
}

impl Extent {
    /// Where the addresses of histories lie among the descriptors, in words: read, then written.
    pub(super) fn histories() -> [usize; 2] {
        [WIDTH * VOC_WORDS, WIDTH * (VOC_WORDS + 2)]
    }

    /// Where the tile tables lie, in words, and where they end.
    pub(super) fn tables(&self) -> (Vec<usize>, usize) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_f0_network_runs_in_the_largest_blocks_that_there_is_room_for() {
        let chosen = |room: u32| [1, 256, 257, 1200, 1201, 4000].map(|frames| f0_shape(frames, room << 10));
        assert_eq!(chosen(220), [0, 0, 1, 1, 2, 2]);
        assert_eq!(chosen(163), chosen(220));
        assert_eq!(chosen(99), [0, 0, 1, 1, 1, 1]);
        assert!(F0_SHAPES[..2].iter().all(|shape| shape.shared() <= 99 << 10));
    }
}
