//! Memory of the flow: equal slabs, one per block of mel frames.
//!
//! A slab holds keys and values of its block for every (Euler step, layer, guidance row), then the block's x and
//! mu. One that a voice shares is counted; the others belong to one slot.

use std::sync::Arc;

use super::device::{Buf, Device, GpuError};
use super::weights::round_up;
use crate::synth::SynthError;

/// A slab's number.
pub(super) type Slab = u32;

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
