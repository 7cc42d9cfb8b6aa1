//! The rows without guidance of the first Euler step: constants of the checkpoint, solved once.
//!
//! # Why
//! Such a row starts from the noise of its frames, which is the same in every utterance, and sees neither text nor voice nor
//! prompt, only rows like it. So of the twenty rows that ten Euler steps of a chunk take, one need not be run: 5 % of the flow.
//! A chunk with fewer frames than a block has, an utterance's last, attends to fewer keys, so that its row is run. It finds the
//! keys, values and histories of the blocks before it, which were not, here. The same holds for what comes after
//! [`BLOCKS`].

use std::sync::Arc;

use super::super::device::{Buf, Device, GpuError};
use super::{ChunkArgs, Flow, PAGES, UNGUIDED, result_bytes};
use crate::synth::cosyvoice::config::FlowConfig;

/// Blocks that are solved beforehand, a second each with a prompt's counted: longer texts are split before they come here,
/// and each block's keys and values take 4.5 MB at full size.
const BLOCKS: usize = 32;

/// What the first Euler step gives without guidance, of every block.
pub(super) struct Unguided {
    device: Arc<Device>,
    /// Blocks that there is room for, and how many of them are known.
    room: usize,
    blocks: usize,
    /// Frames of a block.
    block: usize,
    /// As a step leaves them.
    results: Buf,
    result_bytes: usize,
    /// Keys and values, one Euler step of a slab for two blocks: the second lies where a slab has its guided row.
    pages: Buf,
    step_bytes: usize,
    /// From a layer's keys and values of a guided row to those of the other.
    row_bytes: usize,
    /// Both histories before each block, and those after the last.
    hists: Buf,
    hist_bytes: usize,
}

impl Unguided {
    /// Room for all that will be known, of slabs with `step_bytes` an Euler step and histories of `hist_bytes` a row; `most`:
    /// blocks of an utterance.
    pub(super) fn new(
        device: &Arc<Device>,
        f: &FlowConfig,
        most: usize,
        step_bytes: usize,
        hist_bytes: usize,
    ) -> Result<Self, GpuError> {
        let room = BLOCKS.min(most);
        let result_bytes = result_bytes(f);
        let zeros = |bytes: usize| device.zeros("unguided rows", bytes);
        Ok(Self {
            device: device.clone(),
            room,
            blocks: 0,
            block: f.block,
            results: zeros(room * result_bytes)?,
            result_bytes,
            pages: zeros(room.div_ceil(2) * step_bytes)?,
            step_bytes,
            row_bytes: step_bytes / (2 * f.depth),
            hists: zeros((room + 1) * hist_bytes)?,
            hist_bytes,
        })
    }

    /// Where the keys and values of the `n`th block lie, as the kernels take a page at the first step.
    fn page(&self, n: usize) -> u64 {
        let step = self.pages.ptr + (n / 2 * self.step_bytes) as u64;
        if n.is_multiple_of(2) { step } else { step.wrapping_sub(self.row_bytes as u64) }
    }

    /// The histories before the `n`th block.
    fn history(&self, n: usize) -> u64 {
        self.hists.ptr + (n * self.hist_bytes) as u64
    }

    /// Where the result for the chunk that `guided` is of lies, if it is known.
    pub(super) fn result(&self, guided: &ChunkArgs) -> Option<u64> {
        let n = guided.frame0 as usize / self.block;
        let known = guided.step == 0 && n < self.blocks && guided.frames as usize == self.block;
        known.then(|| self.results.ptr + (n * self.result_bytes) as u64)
    }

    /// The row without guidance of a chunk at its first step whose result is not known: it goes on after those that are.
    pub(super) fn continued(&self, guided: &ChunkArgs) -> Result<ChunkArgs, GpuError> {
        let n = guided.frame0 as usize / self.block;
        let mut row = ChunkArgs { row: UNGUIDED, ..*guided };
        for (before, page) in row.page.iter_mut().enumerate().take(n.min(self.blocks)) {
            *page = self.page(before);
        }
        // After the first of them the slot has its own.
        if n <= self.blocks {
            self.device.copy(row.hist + self.hist_bytes as u64, self.history(n), self.hist_bytes)?;
        }
        Ok(row)
    }
}

/// Solves the rows that are known from then on.
pub(super) fn solve(flow: &mut Flow) -> Result<(), GpuError> {
    for n in flow.unguided.blocks..flow.unguided.room {
        let (known, block) = (&flow.unguided, flow.config.block);
        let mut page = [0; PAGES];
        page[n] = known.page(n);
        let row = known.continued(&ChunkArgs {
            // The step replaces what came before the block by what comes after it.
            hist: known.history(n + 1).wrapping_sub(known.hist_bytes as u64),
            // The noise lies where its x would.
            own: (flow.front.noise.ptr + (n * flow.part_bytes() / 2) as u64).wrapping_sub(flow.x_offset as u64),
            frame0: (n * block) as i32,
            frames: block as i32,
            keys: ((n + 1) * block) as i32,
            key0: flow.first_key(n * block) as i32,
            page,
            ..flow.idle()
        })?;
        flow.solve(0, &[row])?;
        let known = &flow.unguided;
        let result = known.results.ptr + (n * known.result_bytes) as u64;
        flow.device.copy(result, flow.scratch.v.ptr, known.result_bytes)?;
        flow.device.sync()?;
        flow.unguided.blocks = n + 1;
    }
    Ok(())
}
