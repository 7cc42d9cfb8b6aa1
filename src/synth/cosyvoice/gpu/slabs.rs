//! Memory of the flow: equal slabs for blocks of mel frames.
//!
//! A slab holds keys and values for every (Euler step, layer, guidance row) of one block, then x and mu of up to [`PARTS`]
//! blocks. One that a voice shares is counted; the others belong to one slot.
//!
//! # Why
//! Later blocks read a block's keys and values at the step that they are at themselves. Where more blocks will follow, that
//! is any step, and the block has a slab of its own. The last blocks of an utterance run one step after each other, so
//! what the first of `n` wrote is read for `n - 1` rounds more and never again: it needs `n` steps' memory and not all of
//! them, its neighbour one less, and the last one step's. [`pack`] puts several of them into a slab: with ten steps, four
//! blocks into one and seven into three. Each second of speech takes 90 MB otherwise, at full
//! size.

use std::sync::Arc;

use super::device::{Buf, Device, GpuError};
use super::weights::round_up;
use crate::synth::SynthError;

/// A slab's number.
pub(super) type Slab = u32;

/// Blocks whose x and mu a slab has room for.
pub(super) const PARTS: usize = 4;

/// Where the keys and values of a block lie, and its x and mu.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) slab: Slab,
    /// Which of the slab's steps are its: so many from this one on, used in turn.
    pub(super) first: usize,
    pub(super) steps: usize,
    /// Which x and mu of the slab are its.
    pub(super) part: usize,
}

impl Place {
    /// All of a slab, for every one of `steps` Euler steps.
    pub(super) fn whole(slab: Slab, steps: usize) -> Self {
        Self { slab, first: 0, steps, part: 0 }
    }

    /// Which of the slab's steps has the keys and values of Euler step `step`.
    pub(super) fn step(&self, step: usize) -> usize {
        self.first + step % self.steps
    }
}

/// How the last `blocks` of an utterance share slabs, each for as many steps as are read after it; slabs are counted from
/// none on, in the order in which they are first used.
pub(super) fn pack(blocks: usize, steps: usize) -> Vec<Place> {
    // Steps and parts that are taken of each slab.
    let mut taken: Vec<(usize, usize)> = Vec::new();
    let place = |before: usize| {
        let needed = (blocks - before).min(steps);
        let fits = |(used, parts): &(usize, usize)| used + needed <= steps && *parts < PARTS;
        let slab = taken.iter().position(fits).unwrap_or_else(|| {
            taken.push((0, 0));
            taken.len() - 1
        });
        let (first, part) = taken[slab];
        taken[slab] = (first + needed, part + 1);
        Place { slab: slab as Slab, first, steps: needed, part }
    };
    (0..blocks).map(place).collect()
}

/// Slabs that `places` of [`pack`] take.
pub(super) fn slabs_of(places: &[Place]) -> usize {
    places.iter().map(|place| place.slab as usize + 1).max().unwrap_or(0)
}

/// All slabs of a device.
pub(super) struct Slabs {
    memory: Buf,
    size: usize,
    free: Vec<Slab>,
    count: usize,
}

/// Where slabs come from and go back to.
pub(super) trait Pool {
    /// Takes a slab.
    fn take(&mut self) -> Result<Slab, SynthError>;

    /// Gives one back.
    fn put(&mut self, slab: Slab);
}

impl Pool for Slabs {
    fn take(&mut self) -> Result<Slab, SynthError> {
        self.free.pop().ok_or(SynthError::Memory { needed: self.size as u64, free: 0 })
    }

    fn put(&mut self, slab: Slab) {
        debug_assert!(!self.free.contains(&slab));
        self.free.push(slab);
    }
}

impl Slabs {
    /// As many slabs of `size` bytes as fit `budget`, at least one.
    pub(super) fn new(device: &Arc<Device>, size: usize, budget: u64) -> Result<Self, GpuError> {
        let size = round_up(size, 512);
        let count = (budget / size as u64) as usize;
        if count == 0 {
            return Err(GpuError::Memory { what: "one block of the flow", bytes: size as u64, free: budget });
        }
        // The last block of an utterance is read to its end, where nothing was written: it must be numbers.
        let memory = device.zeros("flow slabs", size * count)?;
        // Taken from the end: low numbers first.
        Ok(Self { memory, size, free: (0..count as Slab).rev().collect(), count })
    }

    /// Clears a slab whose values became no numbers, so that its next owner does not read them.
    pub(super) fn scrub(&self, slab: Slab) -> Result<(), GpuError> {
        self.memory.device.fill_zero(self.address(slab), self.size)
    }

    /// Where it lies.
    pub(super) fn address(&self, slab: Slab) -> u64 {
        self.memory.ptr + u64::from(slab) * self.size as u64
    }

    /// Bytes of one.
    pub(super) fn size(&self) -> u64 {
        self.size as u64
    }

    /// Bytes in all.
    pub(super) fn total(&self) -> u64 {
        (self.count * self.size) as u64
    }

    /// Bytes taken.
    pub(super) fn used(&self) -> u64 {
        ((self.count - self.free.len()) * self.size) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_blocks_share_slabs_and_nothing_in_them() {
        for steps in [1, 2, 4, 10] {
            for blocks in 1..=40 {
                let places = pack(blocks, steps);
                assert_eq!(places.len(), blocks);
                for (n, place) in places.iter().enumerate() {
                    assert_eq!(place.steps, (blocks - n).min(steps), "block {n} of {blocks}");
                    assert!(place.first + place.steps <= steps && place.part < PARTS, "{place:?}");
                    let apart = |other: &Place| {
                        let steps =
                            place.first + place.steps <= other.first || other.first + other.steps <= place.first;
                        other.slab != place.slab || steps && other.part != place.part
                    };
                    assert!(places[..n].iter().all(apart), "{places:?}");
                }
            }
        }
        assert_eq!([1, 2, 4, 5, 7, 10].map(|blocks| slabs_of(&pack(blocks, 10))), [1, 1, 1, 2, 3, 6]);
        assert_eq!(slabs_of(&pack(4, 1)), 4, "with a single step each is a slab");
    }
}
