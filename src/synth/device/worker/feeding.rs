//! Utterances whose text is still being written: each further piece goes to the voice as soon as the thread is free.
//!
//! A piece costs no device work: the voice says what it can run now, and the scheduler decides when.

use std::sync::MutexGuard;

use super::{Shared, State, Worker};
use crate::clock;
use crate::sched::{JobEnd, JobId};
use crate::synth::device::feed::Feed;
use crate::synth::{Slot, Stages, SynthError, Synthesizer, TextOrder};
use crate::turn::{Saying, Utterance, UtteranceId};

impl Shared {
    /// More text of a streamed utterance; one that is over, or whose text has ended, takes none.
    pub(in super::super) fn append(&self, utterance: UtteranceId, said: &Saying, last: bool) {
        self.poke(|state| {
            let State { sched: Some(sched), cycle, payloads, feeds, .. } = state else { return };
            let Some(&job) = feeds.get(&utterance) else { return };
            let Some(feed) = payloads.get_mut(&job).and_then(|payload| payload.feed.as_mut()) else { return };
            // Bounded by who writes: a call by its backlog, and each utterance by its longest part of a text.
            if !feed.push(said, last) {
                return;
            }
            sched.written(job, said.text.chars().count().try_into().unwrap_or(u32::MAX));
            cycle.written(job);
        });
    }
}

impl Worker<'_> {
    /// Hands the voice what was written on of utterances that are open; the others get it when they are opened.
    pub(super) fn feed(&mut self, mut state: MutexGuard<'_, State>, written: Vec<JobId>) -> Result<(), SynthError> {
        let mut wanted = Vec::new();
        for job in written {
            let Some(slot) = state.sched.as_ref().and_then(|sched| sched.slot_of(job)) else { continue };
            if let Some(feed) = state.payloads.get_mut(&job).and_then(|payload| payload.feed.as_mut()) {
                wanted.push((job, slot, feed.take()));
            }
        }
        drop(state);
        for (job, slot, pieces) in wanted {
            let result = match self.shared.calls.within(|| Ok(give(self.synth, slot, &pieces)))? {
                Err(error @ SynthError::Device(_)) => return Err(error),
                result => result,
            };
            let Some(sched) = &mut self.shared.state().sched else { return Ok(()) };
            match result {
                Ok(Some((ready, last))) => sched.fed(clock::now(), job, ready, last),
                Ok(None) => {}
                Err(error) => sched.end(job, JobEnd::Failed(error.to_string())),
            }
        }
        Ok(())
    }

    /// Opens a slot for a text that is still being written, with what there is of it; also whether that is all.
    pub(super) fn open_streamed(
        &mut self,
        slot: Slot,
        job: JobId,
        utterance: &Utterance,
    ) -> Result<(Stages, bool), SynthError> {
        let pieces = {
            let mut state = self.shared.state();
            let feed = state.payloads.get_mut(&job).and_then(|payload| payload.feed.as_mut());
            feed.map(|feed| {
                feed.rewind();
                Feed::take(feed)
            })
        };
        let nothing = Utterance { text: String::new(), sounds: Vec::new(), ..utterance.clone() };
        let ready = self.synth.open_streamed(slot, &nothing, TextOrder::Fixed)?;
        match give(self.synth, slot, &pieces.unwrap_or_default()) {
            Ok(given) => Ok(given.unwrap_or((ready, false))),
            Err(error) => {
                self.synth.close(slot);
                Err(error)
            }
        }
    }
}

/// Gives the voice `pieces`; what the slot can run then, and whether it has all of its text.
fn give(
    synth: &mut dyn Synthesizer,
    slot: Slot,
    pieces: &[(Saying, bool)],
) -> Result<Option<(Stages, bool)>, SynthError> {
    let mut now = None;
    for (piece, last) in pieces {
        now = Some((synth.append(slot, piece, *last)?, *last));
    }
    Ok(now)
}
