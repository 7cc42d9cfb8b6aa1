//! The first Euler step of the block that completes a voice's prompt, beside the decoding of the block after it.
//!
//! # Why
//! Where the tokens that complete the prompt's last block are too few to start with, the first chunk is that block and the next
//! one, which follows it a step later: with ten steps, eleven rounds of flow, of which the first has one block. Its tokens are
//! there while most of the chunk is still decoded. Beside decode rounds the step takes half of the time that it does alone, and
//! ten rounds are left. A second step ahead would save no further round, and a step costs more beside decoding than in a round
//! that the next block has anyway.
//!
//! Only for an utterance that has the device to itself and of which nothing was heard: others would wait for that step, or
//! have rounds of their own that the block can join.

use std::collections::BTreeMap;

use super::super::backend::{Backend, Decoded};
use super::super::probe::Probe;
use super::{CosyVoice, Made};
use crate::synth::{Slot, SynthError};

impl<B: Backend + Probe> CosyVoice<B> {
    /// The slot whose first Euler step runs beside a decode step of `slots`, if one does.
    pub(super) fn ahead(&self, slots: &[Slot]) -> Option<Slot> {
        let [slot] = *slots else { return None };
        let alone = self.jobs.len() == 1 && self.launched.is_none();
        let job = self.jobs.get(&slot).filter(|_| alone)?;
        (job.now.ahead && job.before == 0).then_some(slot)
    }

    /// Decodes for `slot` as [`Backend::decode`] does, beside that Euler step; why the flow failed, if it did, goes to `results`.
    pub(super) fn decode_ahead(
        &mut self,
        slot: Slot,
        rounds: u32,
        out: &mut Vec<Decoded>,
        results: &mut BTreeMap<Slot, Made>,
    ) -> Result<(), SynthError> {
        let mut flowed = Vec::with_capacity(1);
        self.backend.decode_beside_flow(slot, rounds, out, &mut flowed)?;
        for result in flowed {
            if let Some(job) = self.jobs.get_mut(&result.slot) {
                job.now.ahead = false;
                job.now.frames += result.frames;
            }
            results.entry(result.slot).or_default().failed = result.failed;
        }
        Ok(())
    }
}
