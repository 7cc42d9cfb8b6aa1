//! What the host knows of each utterance and voice: where its flow stands, which slabs it holds, what comes next.
//!
//! No device work happens here; [`Stream::next`] says which chunk would be run and the backend runs it.

use std::sync::Arc;

use super::device::Buf;
use super::slabs::{Slab, Slabs};
use crate::synth::SynthError;
use crate::synth::cosyvoice::backend::{End, FinalChunk, FlowPrompt, SlotRequest, VoiceHandle};
use crate::synth::cosyvoice::config::{EULER_STEPS, FlowConfig};

/// A voice and what its utterances share.
pub(super) struct Voice {
    pub(super) prompt: Arc<FlowPrompt>,
    /// Frames of the prompt's mel.
    pub(super) frames: usize,
    /// The mel `[frames, mel]`.
    pub(super) cond: Buf,
    /// The projected speaker vector.
    pub(super) speaker: Buf,
    pub(super) prefix: Option<Prefix>,
    /// The caller and every slot that uses it.
    pub(super) holds: u32,
}

/// Solved blocks of a prompt.
pub(super) struct Prefix {
    pub(super) slabs: Vec<Slab>,
    /// Histories of the position convolutions after the last of them.
    pub(super) hist: Buf,
}

/// One utterance.
pub(super) struct SlotState {
    pub(super) voice: VoiceHandle,
    pub(super) request: SlotRequest,
    pub(super) prefilled: bool,
    pub(super) emitted: u32,
    pub(super) ended: Option<End>,
    pub(super) stream: Stream,
    /// A finished mel at another speed: its frames and where they lie.
    pub(super) stretched: Option<(Buf, usize)>,
    /// A value of it became no number: its memory is cleared before others get it.
    pub(super) poisoned: bool,
}

/// The flow of one utterance.
pub(super) struct Stream {
    /// Prompt and generated tokens.
    pub(super) tokens: Vec<u32>,
    pub(super) last: bool,
    /// Frames that were complete before the last push: always solved block by block.
    settled: usize,
    /// Frames of finished windows, prompt included.
    pub(super) done: usize,
    window: Option<Window>,
    /// One a block; the first `shared` belong to the voice.
    pub(super) slabs: Vec<Slab>,
    shared: usize,
    final_chunk: FinalChunk,
    ratio: usize,
    block: usize,
    lookahead: usize,
}

struct Window {
    start: usize,
    frames: usize,
    step: usize,
    /// A full solve's own slabs, for every block from the start.
    whole: Option<Vec<Slab>>,
}

/// A chunk that is to be run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Next {
    pub(super) step: usize,
    pub(super) start: usize,
    pub(super) frames: usize,
    /// Slabs of a full solve over everything.
    pub(super) whole: Option<Vec<Slab>>,
}

impl Stream {
    /// A stream behind `tokens`, whose first blocks may be shared.
    pub(super) fn new(
        tokens: Vec<u32>,
        shared: &[Slab],
        config: &FlowConfig,
        ratio: usize,
        final_chunk: FinalChunk,
    ) -> Self {
        Self {
            tokens,
            last: false,
            settled: 0,
            done: shared.len() * config.block,
            window: None,
            slabs: shared.to_vec(),
            shared: shared.len(),
            final_chunk,
            ratio,
            block: config.block,
            lookahead: config.lookahead,
        }
    }

    /// Appends generated tokens; with `last` nothing follows.
    pub(super) fn push(&mut self, tokens: &[u32], last: bool) {
        self.tokens.extend_from_slice(tokens);
        self.last |= last;
        if !last {
            self.settled = self.ready();
        }
    }

    /// Frames whose tokens and look-ahead are known.
    fn ready(&self) -> usize {
        let ahead = if self.last { 0 } else { self.lookahead };
        self.tokens.len().saturating_sub(ahead) * self.ratio
    }

    /// Euler steps until everything pushed so far is out.
    pub(super) fn pending(&self) -> usize {
        let ready = self.ready();
        let in_flight = self.window.as_ref().map_or(0, |w| EULER_STEPS - w.step);
        let done = self.window.as_ref().map_or(self.done, |w| w.start + w.frames);
        if done >= ready {
            return in_flight;
        }
        let windows = if self.last && self.final_chunk == FinalChunk::Reference {
            self.settled.saturating_sub(done).div_ceil(self.block) + usize::from(ready > self.settled)
        } else if self.last {
            (ready - done).div_ceil(self.block)
        } else {
            (ready - done) / self.block
        };
        in_flight + windows * EULER_STEPS
    }

    /// Whether every frame is out and none will follow.
    pub(super) fn complete(&self) -> bool {
        self.last && self.pending() == 0
    }

    /// The chunk that comes next, if there is one that ends at or before frame `limit`; takes the slabs it needs.
    /// Each call stands for one Euler step that will be run.
    pub(super) fn next(&mut self, limit: usize, slabs: &mut Slabs) -> Result<Option<Next>, SynthError> {
        if self.window.is_none() {
            self.window = self.start_window(limit, slabs)?;
        }
        let Some(window) = &mut self.window else { return Ok(None) };
        let next = Next { step: window.step, start: window.start, frames: window.frames, whole: window.whole.clone() };
        window.step += 1;
        if window.step == EULER_STEPS {
            let end = window.start + window.frames;
            if let Some(whole) = self.window.take().and_then(|w| w.whole) {
                // The new frames are read from the solve's own slabs; what came before stays.
                let keep = self.done / self.block;
                for (n, slab) in whole.into_iter().enumerate() {
                    if n < keep { slabs.put(slab) } else { self.slabs.push(slab) }
                }
            }
            self.done = end;
        }
        Ok(Some(next))
    }

    fn start_window(&mut self, limit: usize, slabs: &mut Slabs) -> Result<Option<Window>, SynthError> {
        let ready = self.ready().min(limit);
        if self.done >= ready {
            return Ok(None);
        }
        let whole = self.last && self.final_chunk == FinalChunk::Reference && self.done >= self.settled;
        if whole {
            let mut own = Vec::new();
            for _ in 0..ready.div_ceil(self.block) {
                match slabs.take() {
                    Ok(slab) => own.push(slab),
                    Err(e) => {
                        own.into_iter().for_each(|s| slabs.put(s));
                        return Err(e);
                    }
                }
            }
            return Ok(Some(Window { start: 0, frames: ready, step: 0, whole: Some(own) }));
        }
        let frames = self.block.min(ready - self.done);
        if frames < self.block && !self.last {
            return Ok(None);
        }
        self.slabs.push(slabs.take()?);
        Ok(Some(Window { start: self.done, frames, step: 0, whole: None }))
    }

    /// Gives back every slab that is not shared.
    pub(super) fn free(&mut self, slabs: &mut Slabs) {
        for slab in self.slabs.drain(..).skip(self.shared) {
            slabs.put(slab);
        }
        for slab in self.window.take().and_then(|w| w.whole).into_iter().flatten() {
            slabs.put(slab);
        }
    }

    /// The slabs that are this utterance's own.
    pub(super) fn own(&self) -> impl Iterator<Item = Slab> {
        let whole = self.window.as_ref().and_then(|w| w.whole.as_ref());
        self.slabs.iter().skip(self.shared).chain(whole.into_iter().flatten()).copied()
    }

    /// The slabs of a finished prefix, now the caller's.
    pub(super) fn into_slabs(mut self) -> Vec<Slab> {
        std::mem::take(&mut self.slabs)
    }
}
