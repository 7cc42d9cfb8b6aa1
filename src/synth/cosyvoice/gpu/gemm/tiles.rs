//! Tile configurations: how convolutions and warpgroup GEMMs are cut into blocks (skinny GEMMs: `gemm.rs`, `flow/linear.rs`), and the
//! shared memory that a block of each shape takes.
//!
//! A device gives a block 99, 163 or 227 KiB ([`super::super::target`]). Shapes that do not fit are not chosen; where a
//! GEMM cannot do without one, its kernel is compiled with fewer stages ([`Room`]), which does not change a sum.

use super::super::weights::Packed;

/// Stages of weights in flight, as in gemm.cu.
const STAGES: usize = 4;
/// The same for small blocks.
const DEEP: usize = 8;
/// Parts of the inputs' axis, as SPLITS of gemm.cuh.
pub(in super::super) const PARTS: usize = 16;
/// Most inputs of which every part is 64: 64 results are a part of the next GEMM's inputs. Parts of more inputs are
/// added in pairs.
pub(in super::super) const WHOLE_PARTS: usize = 64 * PARTS;

/// Shared memory of a block on a device, and what the kernels of gemm.cu are compiled with because of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    /// Bytes of a block at most.
    pub(super) bytes: u32,
    /// Stages of the largest blocks.
    tall: usize,
    /// Groups of warps of [`Tile::Split64`] and stages of their rings.
    groups: usize,
    stages: usize,
}

impl Room {
    pub(super) fn of(bytes: u32) -> Self {
        let (groups, stages) = match bytes >> 10 {
            192.. => (4, STAGES),
            // The sums of all parts take as much as three stages.
            144.. => (4, 3),
            _ => (2, STAGES),
        };
        Self { bytes, tall: if bytes >= 128 << 10 { STAGES } else { 3 }, groups, stages }
    }

    /// The macros of gemm.cu.
    pub(super) fn defines(self) -> [(&'static str, i64); 3] {
        [("TALL", self.tall as i64), ("GROUPS", self.groups as i64), ("SPLIT_STAGES", self.stages as i64)]
    }

    /// Threads of a block of `tile`.
    pub(super) fn threads(self, tile: Tile) -> u32 {
        match tile {
            Tile::N32T32 | Tile::N64T32 | Tile::N64T64 | Tile::N32T128 => 128,
            Tile::Split64 => 128 * self.groups as u32,
            Tile::N64T128 | Tile::N128T128 | Tile::Split128 => 256,
        }
    }
}

/// Block shape of a convolution, outputs by positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Tile {
    N32T32,
    N64T32,
    N64T64,
    N64T128,
    N128T128,
    N32T128,
    /// Fixed order of sums, for more rows than a skinny GEMM has.
    Split64,
    Split128,
}

impl Tile {
    /// Outputs and positions of a block.
    pub(in super::super) fn shape(self) -> (usize, usize) {
        match self {
            Tile::N32T32 => (32, 32),
            Tile::N64T32 => (64, 32),
            Tile::N64T64 => (64, 64),
            Tile::N64T128 => (64, 128),
            Tile::N128T128 => (128, 128),
            Tile::N32T128 => (32, 128),
            Tile::Split64 => (64, 32),
            Tile::Split128 => (128, 64),
        }
    }
}

/// Groups of warps that share the sums of a block of 64 outputs by 32 positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Groups {
    One = 1,
    Two = 2,
    Four = 4,
}

impl Groups {
    /// As many as leave a place for every block of `grid`, one or two a multiprocessor, and as a block has `room` bytes
    /// for; `shared`: what it takes with so many.
    pub(super) fn of(
        tile: Tile,
        grid: (u32, u32, u32),
        multiprocessors: usize,
        room: u32,
        shared: impl Fn(Self) -> u32,
    ) -> Self {
        let blocks = grid.0 as usize * grid.1 as usize * grid.2 as usize;
        let most = match tile {
            Tile::N64T32 if blocks <= multiprocessors => Groups::Four,
            Tile::N64T32 if blocks <= 2 * multiprocessors => Groups::Two,
            _ => Groups::One,
        };
        let fits = |groups: &Self| *groups as usize <= most as usize && shared(*groups) <= room;
        [Groups::Four, Groups::Two].into_iter().find(fits).unwrap_or(Groups::One)
    }

    /// Its kernel among those for few blocks.
    pub(super) fn index(self) -> Option<usize> {
        match self {
            Groups::One => None,
            Groups::Two => Some(0),
            Groups::Four => Some(1),
        }
    }
}

/// What the shared memory of a convolution depends on besides its block shape.
#[derive(Clone, Copy)]
pub(super) struct Window {
    cin: usize,
    taps: usize,
    /// Positions before a block that it needs.
    halo: usize,
}

impl Window {
    pub(super) fn of(w: &Packed) -> Self {
        Self { cin: w.cin, taps: w.taps, halo: (w.taps - 1) * w.dil }
    }

    /// Bytes of a block in single precision, whose shape is the same for all.
    pub(super) fn shared_f32(self) -> u32 {
        ((64 + self.halo) * 17 * 4) as u32
    }

    /// Bytes of a block in 16 bit where blocks have `room`.
    pub(super) fn shared(self, tile: Tile, groups: Groups, room: Room) -> u32 {
        let (outputs, positions) = tile.shape();
        let stages = match tile {
            Tile::N32T32 | Tile::N64T32 if groups == Groups::One => DEEP,
            Tile::N128T128 => room.tall,
            Tile::Split64 => room.stages,
            _ => STAGES,
        };
        let (groups, ring, sums) = match tile {
            // It has no taps and stages of both operands; then come the sums of every part, where all groups have
            // room for theirs.
            Tile::Split64 => (room.groups, stages, if room.groups == 4 { PARTS } else { 1 }),
            _ => (groups as usize, ((stages - 2) / self.taps + 2).min(self.cin.div_ceil(64)), groups as usize),
        };
        let rings = groups * (stages * outputs * 128 + ring * (positions + self.halo) * 128);
        // In their place come the sums, padded.
        rings.max(sums * positions * (outputs + 8) * 4) as u32
    }
}

/// Block shapes worth trying for a plain GEMM.
pub(in super::super) const PLAIN: [Tile; 5] = [Tile::N32T32, Tile::N64T32, Tile::N64T64, Tile::N64T128, Tile::N128T128];

/// A tile table: `{sequence, first position, first row, length}` a block.
pub(in super::super) type TileEntry = [i32; 4];

/// Tile configuration of a warpgroup GEMM, outputs by rows (warpgroup.cu). Each gives the same sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum WarpgroupTile {
    N64T32,
    N64T64,
    N128T64,
    N192T128,
    /// For inputs whose parts are longer than a step.
    N64T64Long,
    N128T128Long,
    /// The same in clusters of eight, each block with an eighth of the inputs.
    N64T64Shared,
    N128T64Shared,
    N128T128Shared,
}

/// All of them.
pub(in super::super) const WARPGROUP_TILES: [WarpgroupTile; 9] = [
    WarpgroupTile::N64T32,
    WarpgroupTile::N64T64,
    WarpgroupTile::N128T64,
    WarpgroupTile::N192T128,
    WarpgroupTile::N64T64Long,
    WarpgroupTile::N128T128Long,
    WarpgroupTile::N64T64Shared,
    WarpgroupTile::N128T64Shared,
    WarpgroupTile::N128T128Shared,
];

impl WarpgroupTile {
    /// Its kernel in warpgroup.cu.
    pub(super) fn kernel(self) -> &'static str {
        match self {
            WarpgroupTile::N64T32 => "warpgroup_64x32",
            WarpgroupTile::N64T64 => "warpgroup_64x64",
            WarpgroupTile::N128T64 => "warpgroup_128x64",
            WarpgroupTile::N192T128 => "warpgroup_192x128",
            WarpgroupTile::N64T64Long => "warpgroup_64x64_long",
            WarpgroupTile::N128T128Long => "warpgroup_128x128_long",
            WarpgroupTile::N64T64Shared => "warpgroup_64x64_shared",
            WarpgroupTile::N128T64Shared => "warpgroup_128x64_shared",
            WarpgroupTile::N128T128Shared => "warpgroup_128x128_shared",
        }
    }

    /// Outputs and rows of a block, and stages of its ring.
    pub(super) fn shape(self) -> (usize, usize, usize) {
        match self {
            WarpgroupTile::N64T32 => (64, 32, 8),
            WarpgroupTile::N64T64 | WarpgroupTile::N64T64Long | WarpgroupTile::N64T64Shared => (64, 64, 6),
            WarpgroupTile::N128T64 | WarpgroupTile::N128T64Shared => (128, 64, 4),
            WarpgroupTile::N192T128 => (192, 128, 5),
            WarpgroupTile::N128T128Long | WarpgroupTile::N128T128Shared => (128, 128, 6),
        }
    }

    /// Blocks of a cluster.
    pub(super) fn cluster(self) -> u32 {
        if matches!(self, WarpgroupTile::N64T64Shared | WarpgroupTile::N128T64Shared | WarpgroupTile::N128T128Shared) {
            8
        } else {
            1
        }
    }

    /// Whether it is for weights of so many inputs.
    pub(in super::super) fn fits(self, w: &Packed) -> bool {
        let long = matches!(self, WarpgroupTile::N64T64Long | WarpgroupTile::N128T128Long) || self.cluster() > 1;
        long == (w.cin > WHOLE_PARTS)
    }

    /// The ring starts at a multiple of 1024 bytes; in its place comes a padded table of sums, which is smaller.
    pub(super) fn shared(self) -> u32 {
        let (outputs, rows, stages) = self.shape();
        (1024 + stages * (outputs + rows) * 128) as u32
    }

    /// Four warps for 64 outputs, and one that copies; four where they leave their registers to the others.
    pub(super) fn threads(self) -> u32 {
        let copying = if matches!(self, WarpgroupTile::N192T128 | WarpgroupTile::N128T128Long) { 128 } else { 32 };
        2 * self.shape().0 as u32 + copying
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGE: u32 = 220 << 10;

    fn groups(windows: &[Window], blocks: u32, bytes: u32) -> Groups {
        let room = Room::of(bytes);
        let shared = |groups| windows.iter().map(|w| w.shared(Tile::N64T32, groups, room)).max().unwrap_or(0);
        let groups = Groups::of(Tile::N64T32, (blocks, 1, 1), 132, bytes, shared);
        assert!(shared(groups) <= bytes, "{groups:?} of {blocks} blocks");
        groups
    }

    #[test]
    fn fewer_groups_share_a_sum_where_all_of_them_have_no_room() {
        let window = |halo| Window { cin: 256, taps: 7, halo };
        assert_eq!(groups(&[window(60)], 132, LARGE), Groups::Four);
        assert_eq!(groups(&[window(66)], 132, LARGE), Groups::Two);
        assert_eq!(groups(&[window(300)], 132, LARGE), Groups::One);
        assert_eq!(groups(&[window(60)], 133, LARGE), Groups::Two);
        assert_eq!(groups(&[window(60)], 265, LARGE), Groups::One);
        assert_eq!(groups(&[window(12), window(300), window(60)], 1, LARGE), Groups::One, "the longest decides");
        assert_eq!(groups(&[window(30)], 132, 99 << 10), Groups::Two);
        assert_eq!(groups(&[window(60)], 132, 99 << 10), Groups::One);
    }

    /// Bytes of the released model's convolutions in every block shape that they may run in, and of plain GEMMs.
    #[test]
    fn every_block_of_the_model_fits_the_smallest_device() {
        let windows = [(1, 1), (3, 1), (3, 3), (3, 5), (7, 1), (7, 3), (7, 5), (11, 1), (11, 3), (11, 5), (31, 1)];
        let all = PLAIN.into_iter().chain([Tile::N32T128, Tile::Split64, Tile::Split128]);
        for kib in [99, 163, 220] {
            let room = Room::of(kib << 10);
            for tile in all.clone() {
                for (taps, dil) in windows {
                    let plain = matches!(tile, Tile::Split64 | Tile::Split128);
                    if plain && taps > 1 {
                        continue;
                    }
                    let window = Window { cin: 1024, taps, halo: (taps - 1) * dil };
                    let bytes = window.shared(tile, Groups::One, room);
                    assert!(bytes <= kib << 10, "{tile:?} with {taps} taps takes {bytes} of {kib} KiB");
                }
            }
        }
    }

    #[test]
    fn the_largest_device_keeps_its_shapes() {
        let room = Room::of(LARGE);
        assert_eq!((room.tall, room.groups, room.stages), (4, 4, 4));
        assert_eq!(Window { cin: 896, taps: 1, halo: 0 }.shared(Tile::Split64, Groups::One, room), 196_608);
        assert_eq!(room.threads(Tile::Split64), 512);
    }
}
