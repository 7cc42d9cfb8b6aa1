//! What the host knows of each utterance: where its flow stands, which slabs it holds, what comes next.
//!
//! No work of the model happens here; [`Stream::next`] says which chunks would be run and the backend runs it.

use std::collections::VecDeque;
use std::sync::Arc;

use super::device::{Buf, Device};
use super::llm::Sampled;
use super::slabs::{Place, Pool, Slab, pack, slabs_of};
use crate::synth::SynthError;
use crate::synth::cosyvoice::backend::{Embed, End, FinalChunk, SlotRequest, Stretch, VoiceHandle};
use crate::synth::cosyvoice::config::FlowConfig;
use crate::synth::cosyvoice::respeed::Respeed;

/// One utterance.
pub(super) struct SlotState {
    pub(super) voice: VoiceHandle,
    pub(super) request: SlotRequest,
    pub(super) prefilled: bool,
    pub(super) emitted: u32,
    pub(super) ended: Option<End>,
    /// Of an utterance whose text is still being written.
    pub(super) written: Option<Written>,
    pub(super) stream: Stream,
    /// The mel at another speed, where it is played at one.
    pub(super) stretched: Option<Stretched>,
    /// A value of it became no number: its memory is cleared before others get it.
    pub(super) poisoned: bool,
    /// What its flow goes on after; `None` once that is in its memory.
    pub(super) past: Option<Past>,
}

/// What the flow of a slot goes on after.
#[derive(Clone, Copy)]
pub(super) enum Past {
    Nothing,
    /// The histories behind a voice's prompt, where they lie; the slot holds the voice.
    Prompt(u64),
}

impl SlotState {
    /// Rounds gave this: how decoding has ended, if it has, and why the utterance cannot go on, if so.
    pub(super) fn sampled(&mut self, sampled: &Sampled) -> (Option<End>, Option<SynthError>) {
        self.emitted += sampled.tokens.len() as u32;
        let sampling = &self.request.sampling;
        let forced = sampling.forced.as_ref().map_or(u32::MAX, |f| f.len() as u32);
        let mut failed = None;
        if sampled.bad {
            self.poisoned = true;
            failed = Some(SynthError::Utterance("the language model's scores are not numbers".into()));
        } else if let Some(written) = &mut self.written {
            self.ended = written.sampled(&sampled.tokens, sampled.end);
        } else if sampled.end.is_some() {
            self.ended = Some(End::Eos);
        } else if self.emitted >= sampling.max_len.min(forced) {
            self.ended = Some(End::Length);
        }
        (self.ended, failed)
    }
}

/// A mel at another speed, on the device.
pub(super) struct Stretched {
    pub(super) respeed: Respeed,
    /// Nothing more will come.
    pub(super) ended: bool,
    /// One a block of frames; only the last is not full.
    pub(super) pages: Vec<Buf>,
    /// Frames in them.
    pub(super) frames: usize,
    /// What lies in the last page while it is not full.
    tail: Vec<f32>,
}

impl Stretched {
    /// `None` at the speed of the mel itself.
    pub(super) fn new(config: &FlowConfig, speed: f32) -> Option<Self> {
        let respeed = Respeed::new(config.mel, speed)?;
        Some(Self { respeed, ended: false, pages: Vec::new(), frames: 0, tail: Vec::new() })
    }

    /// Appends frames to those that lie there.
    pub(super) fn append(
        &mut self,
        device: &Arc<Device>,
        config: &FlowConfig,
        frames: &[f32],
    ) -> Result<(), SynthError> {
        let page = config.block * config.mel;
        let mut place = self.frames / config.block;
        self.frames += frames.len() / config.mel;
        self.tail.extend_from_slice(frames);
        while !self.tail.is_empty() {
            let length = page.min(self.tail.len());
            // A pass may read to the end of the last block.
            let mut values = self.tail[..length].to_vec();
            values.resize(page, 0.0);
            match self.pages.get(place) {
                Some(there) => device.write(there.ptr, &values)?,
                None => self.pages.push(device.upload("a mel", &values)?),
            }
            if length < page {
                break;
            }
            self.tail.drain(..page);
            place += 1;
        }
        Ok(())
    }
}

/// Where the language model stands in a text that is still being written.
#[derive(Debug, Default)]
pub(super) struct Written {
    /// Positions that the cache has.
    fed: usize,
    /// Sampled last and not fed yet.
    unfed: Option<u32>,
    /// What is fed in the next prefill.
    pub(super) input: Vec<Embed>,
    /// What is sampled after that.
    pub(super) stretch: Option<Stretch>,
}

impl Written {
    /// Takes what is to be run next. No more is sampled than there are positions.
    ///
    /// # Errors
    /// There is no room for it.
    pub(super) fn extend(&mut self, mut stretch: Stretch, positions: usize) -> Result<(), SynthError> {
        let input = self.unfed.map(Embed::Speech).into_iter().chain(std::mem::take(&mut stretch.input));
        let input: Vec<Embed> = input.collect();
        // Each sample but the first feeds the one before it.
        let left = positions.saturating_sub(self.fed + input.len());
        if left == 0 {
            return Err(SynthError::Input(format!("the text is too long: split it (over {positions} positions)")));
        }
        stretch.most = stretch.most.min(u32::try_from(left).unwrap_or(u32::MAX));
        (self.unfed, self.input, self.stretch) = (None, input, Some(stretch));
        Ok(())
    }

    /// Positions before those that the next prefill feeds.
    pub(super) fn from(&self) -> usize {
        self.fed
    }

    /// The prefill ran: its last position is the first input of decoding.
    pub(super) fn prefilled(&mut self) {
        self.fed += self.input.len().saturating_sub(1);
        self.input.clear();
    }

    /// Rounds drew `tokens`, and a control id where they ended with one; how the stretch ended, if it did.
    pub(super) fn sampled(&mut self, tokens: &[u32], control: Option<u32>) -> Option<End> {
        let stretch = self.stretch.as_mut()?;
        // Each round feeds what the one before it drew.
        self.fed += tokens.len() + usize::from(control.is_some());
        stretch.most = stretch.most.saturating_sub(tokens.len() as u32);
        let end = match control {
            Some(id) => End::Control(id),
            None if stretch.most == 0 => End::Length,
            None => return None,
        };
        // A control id is not fed, so that nothing is left over after it.
        self.unfed = tokens.last().copied().filter(|_| control.is_none());
        self.stretch = None;
        Some(end)
    }
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
    /// Euler steps of single windows so far.
    pub(super) stepped: u64,
    /// Windows in flight, in order; each is at least one step later than the one before it.
    windows: VecDeque<Window>,
    /// One a block.
    pub(super) places: Vec<Place>,
    /// Its own slabs; those of the first blocks may belong to the voice.
    own: Vec<Slab>,
    final_chunk: FinalChunk,
    ratio: usize,
    block: usize,
    lookahead: usize,
    /// Euler steps of a block.
    steps: usize,
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
    /// A stream that goes on after `tokens`, whose first blocks may be shared.
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
            stepped: 0,
            windows: VecDeque::new(),
            places: shared.iter().map(|&slab| Place::whole(slab, config.steps)).collect(),
            own: Vec::new(),
            final_chunk,
            ratio,
            block: config.block,
            lookahead: config.lookahead,
            steps: config.steps,
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

    /// End of what is done or in flight.
    fn begun(&self) -> usize {
        self.windows.back().map_or(self.done, |w| w.start + w.frames)
    }

    /// Rounds until everything pushed so far is out, if windows never wait for room.
    pub(super) fn pending(&self) -> usize {
        let (ready, begun) = (self.ready(), self.begun());
        // Each ends a round after the one before it at the earliest.
        let in_flight = self.windows.iter().fold(0, |rounds, w| (self.steps - w.step).max(rounds + 1));
        if begun >= ready {
            return in_flight;
        }
        let last = self.windows.back().map(|w| w.step);
        let (windows, whole) = if self.last && self.final_chunk == FinalChunk::Reference {
            (self.settled.saturating_sub(begun).div_ceil(self.block), ready > self.settled)
        } else if self.last {
            ((ready - begun).div_ceil(self.block), false)
        } else {
            ((ready - begun) / self.block, false)
        };
        // The first of them starts beside the last one in flight, once that has made a step; each further one a
        // round later.
        let chain = match (windows, last) {
            (0, _) => in_flight,
            (n, Some(0)) => (self.steps + 1).max(in_flight + 1) + n - 1,
            (n, _) => self.steps.max(in_flight + 1) + n - 1,
        };
        chain + if whole { self.steps } else { 0 }
    }

    /// Slabs of its own that it has once everything pushed so far is out.
    pub(super) fn slabs_in_the_end(&self) -> usize {
        let (ready, begun) = (self.ready(), self.begun());
        let left = ready.saturating_sub(begun);
        let more = match (self.last, self.final_chunk) {
            (false, _) => left / self.block,
            (true, FinalChunk::Causal) => slabs_of(&pack(left.div_ceil(self.block), self.steps)),
            // Those of before stay beside those of the full solve while it runs.
            (true, FinalChunk::Reference) => {
                self.settled.saturating_sub(begun).div_ceil(self.block) + ready.div_ceil(self.block)
            }
        };
        self.own.len() + more
    }

    /// Whether every frame is out and none will follow.
    pub(super) fn complete(&self) -> bool {
        self.last && self.pending() == 0
    }

    /// The chunks of the next round, at most `most`, of those that end at or before frame `limit`: of each window
    /// in flight its next Euler step, and the first of a new one after them. Takes the slabs they need. Each call
    /// stands for one round that will be run.
    ///
    /// # Why
    /// A block at some Euler step sees earlier blocks at the same step only. So one that is a step later than its
    /// neighbour can be computed beside it: `n` blocks take `10 + n - 1` rounds, not `10 n`, with the same values.
    /// Once the last tokens are there, the blocks that are left begin together and share slabs ([`pack`]): none of them
    /// gets further ahead of the last than its part of a slab has steps.
    pub(super) fn next(&mut self, limit: usize, most: usize, slabs: &mut impl Pool) -> Result<Vec<Next>, SynthError> {
        let free = self.windows.back().is_none_or(|w| w.step > 0 && w.whole.is_none());
        if free
            && self.windows.len() < most
            && let Err(e) = self.start_windows(limit, slabs)
            // Those in flight can go on, and others may give memory back meanwhile.
            && self.windows.is_empty()
        {
            return Err(e);
        }
        let mut round = Vec::with_capacity(self.windows.len().min(most));
        let slowest = self.windows.back().map_or(0, |w| w.step);
        let mut ahead = usize::MAX;
        for window in &mut self.windows {
            if round.len() == most {
                break;
            }
            // What the neighbour has finished before this round; and what it would write over is still read.
            let kept = self.places.get(window.start / self.block).map_or(self.steps, |place| place.steps);
            let waits = window.step >= ahead || window.whole.is_none() && window.step >= slowest + kept;
            ahead = window.step;
            if waits {
                continue;
            }
            round.push(Next {
                step: window.step,
                start: window.start,
                frames: window.frames,
                whole: window.whole.clone(),
            });
            window.step += 1;
            self.stepped += 1;
        }
        while let Some(window) = self.windows.pop_front_if(|w| w.step == self.steps) {
            let end = window.start + window.frames;
            if let Some(whole) = window.whole {
                // The new frames are read from the solve's own slabs; what came before stays.
                let keep = self.done / self.block;
                for (n, slab) in whole.into_iter().enumerate() {
                    if n < keep {
                        slabs.put(slab);
                    } else {
                        self.places.push(Place::whole(slab, self.steps));
                        self.own.push(slab);
                    }
                }
            }
            self.done = end;
        }
        Ok(round)
    }

    fn start_windows(&mut self, limit: usize, slabs: &mut impl Pool) -> Result<(), SynthError> {
        let ready = self.ready().min(limit);
        let begun = self.begun();
        if begun >= ready {
            return Ok(());
        }
        let whole = self.last && self.final_chunk == FinalChunk::Reference && begun >= self.settled;
        if whole {
            // It solves everything anew, and no window of its own length runs beside it.
            if self.windows.is_empty() {
                let own = take(slabs, ready.div_ceil(self.block))?;
                self.windows.push_back(Window { start: 0, frames: ready, step: 0, whole: Some(own) });
            }
            return Ok(());
        }
        if ready - begun < self.block && !self.last {
            return Ok(());
        }
        let all = self.last && self.final_chunk == FinalChunk::Causal && ready == self.ready();
        let blocks = if all { (ready - begun).div_ceil(self.block) } else { 1 };
        if all {
            let places = pack(blocks, self.steps);
            let new = take(slabs, slabs_of(&places))?;
            self.places
                .extend(places.into_iter().filter_map(|p| Some(Place { slab: *new.get(p.slab as usize)?, ..p })));
            self.own.extend(new);
        } else {
            self.take_blocks(1, slabs)?;
        }
        for start in (0..blocks).map(|n| begun + n * self.block) {
            self.windows.push_back(Window { start, frames: self.block.min(ready - start), step: 0, whole: None });
        }
        Ok(())
    }

    /// Takes a slab for each of so many blocks more, as if they had begun: what is measured comes after them.
    pub(super) fn take_blocks(&mut self, blocks: usize, slabs: &mut impl Pool) -> Result<(), SynthError> {
        let new = take(slabs, blocks)?;
        self.places.extend(new.iter().map(|&slab| Place::whole(slab, self.steps)));
        self.own.extend(new);
        Ok(())
    }

    /// Gives back every slab that is not shared.
    pub(super) fn free(&mut self, slabs: &mut impl Pool) {
        self.places.clear();
        for slab in self.own.drain(..) {
            slabs.put(slab);
        }
        for slab in self.windows.drain(..).filter_map(|w| w.whole).flatten() {
            slabs.put(slab);
        }
    }

    /// The slabs that are this utterance's own.
    pub(super) fn own(&self) -> impl Iterator<Item = Slab> {
        let whole = self.windows.iter().filter_map(|w| w.whole.as_ref());
        self.own.iter().chain(whole.flatten()).copied()
    }

    /// The slabs of a finished prefix, now the caller's.
    pub(super) fn into_slabs(mut self) -> Vec<Slab> {
        std::mem::take(&mut self.own)
    }
}

/// So many slabs, or none.
fn take(slabs: &mut impl Pool, count: usize) -> Result<Vec<Slab>, SynthError> {
    let mut own = Vec::with_capacity(count);
    while own.len() < count {
        match slabs.take() {
            Ok(slab) => own.push(slab),
            Err(e) => {
                own.into_iter().for_each(|slab| slabs.put(slab));
                return Err(e);
            }
        }
    }
    Ok(own)
}

#[cfg(test)]
mod tests;
