//! Flow and vocoder calls, and launched ones: started on the low-priority stream, taken when they have ended.
//!
//! One call is in flight at a time, since what it is told and what it finds out lie in buffers of its network. A call
//! in front that needs them waits for it ([`Acoustic::catch_up`]); the language model has its own and does not.
//!
//! # Why
//! A new turn would wait for the step in flight. Beside a wide flow step its decode rounds take a quarter longer than
//! alone and a narrow vocoder pass a tenth, and the step is worked on meanwhile (tests/gpu/LOG.md).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use super::context::Lane;
use super::device::{Device, GpuError};
use super::hift::{Excerpt, Hift, Pass};
use super::not_open;
use super::slots::{Past, SlotState};
use super::solver::{Job, Solver};
use super::voices::Voices;
use crate::clock;
use crate::synth::cosyvoice::backend::{FinalChunk, Flowed, Vocoded};
use crate::synth::{Slot, SynthError};

/// Flow and vocoder, and whose they work on.
pub(super) struct Acoustic {
    pub(super) device: Arc<Device>,
    pub(super) solver: Solver,
    pub(super) hift: Hift,
    pub(super) voices: Voices,
    pub(super) slots: BTreeMap<Slot, SlotState>,
    /// Set while a launched call is in flight or has not been taken.
    pub(super) flight: Option<Flight>,
}

/// A launched call.
pub(super) struct Flight {
    call: Call,
    since: Instant,
}

enum Call {
    Flow(FlowCall),
    Vocode(VocodeCall),
}

/// A flow call.
struct FlowCall {
    /// States of its slots, which are in no map while their chunks run.
    taken: Vec<(Slot, Option<SlotState>)>,
    /// Frames and Euler steps of windows that each had; `None`: it had no state.
    before: Vec<Option<(usize, u64)>>,
    /// Of those that had a state, in order.
    failed: Vec<Option<SynthError>>,
    /// Steps were started and have not been looked at.
    started: bool,
}

/// A vocoder call: one pass at most, so that it is bounded however long the chunks are.
struct VocodeCall {
    slots: Vec<Slot>,
    failures: BTreeMap<Slot, SynthError>,
    pieces: Vec<Piece>,
    /// Started and not looked at.
    pass: Option<Pass>,
    /// Of each piece.
    pcm: Vec<Option<Vec<f32>>>,
}

/// What a slot gives to a pass, as in [`Excerpt`].
struct Piece {
    slot: usize,
    total: usize,
    last: bool,
    /// Frames are left over.
    more: bool,
}

impl Acoustic {
    /// What flow and vocoder of `slots` go on after, where that is not in their memory yet: the caller puts it there.
    pub(super) fn take_pasts(&mut self, slots: &[Slot]) -> Vec<(Slot, Past)> {
        slots.iter().filter_map(|slot| Some((*slot, self.slots.get_mut(slot)?.past.take()?))).collect()
    }

    /// Puts into the memory of slots what [`Self::take_pasts`] gave.
    pub(super) fn put_pasts(&self, pasts: &[(Slot, Past)]) -> Result<(), GpuError> {
        pasts.iter().try_for_each(|(slot, past)| {
            let (number, bytes) = (slot.0 as usize, self.solver.flow.hist_bytes);
            let to = self.solver.hist_of(number);
            match past {
                Past::Nothing => self.device.fill_zero(to, bytes)?,
                Past::Prompt(from) => self.device.copy(to, *from, bytes)?,
            }
            self.hift.clear(number)
        })
    }

    /// The same for a slot that a flow begins in without a prefill, or whose memory is about to be changed otherwise.
    pub(super) fn begin(&mut self, slot: Slot) -> Result<(), GpuError> {
        let pasts = self.take_pasts(&[slot]);
        self.put_pasts(&pasts)
    }

    /// Brings what is new of the mel of a slot to the speed that it is played at, if that is another.
    fn stretch(&mut self, slot: Slot) -> Result<(), SynthError> {
        let Some(state) = self.slots.get_mut(&slot) else { return Ok(()) };
        let (done, complete, prompt) = (state.stream.done, state.stream.complete(), self.voices.frames(state.voice));
        let Some(stretched) = state.stretched.as_mut().filter(|stretched| !stretched.ended) else { return Ok(()) };
        let from = prompt + stretched.respeed.received();
        if done <= from && !complete {
            return Ok(());
        }
        let mel = self.solver.read_mel(&state.stream.places, from, done)?;
        let frames = stretched.respeed.push(&mel, complete);
        stretched.ended = complete;
        stretched.append(&self.device, &self.solver.config.flow, &frames)
    }

    pub(super) fn run_flow(&mut self, slots: &[Slot], rounds: u32, out: &mut Vec<Flowed>) -> Result<(), SynthError> {
        self.catch_up()?;
        let mut call = self.take_slots(slots);
        let ran = self.start_flow(&mut call, rounds).and_then(|()| Ok(self.device.sync()?));
        self.settle_flow(&mut call, ran.is_ok());
        self.give_back(call, ran.is_ok().then_some(out));
        ran
    }

    /// [`super::Backend::launch_flow`].
    pub(super) fn launch_flow(&mut self, slots: &[Slot], rounds: u32) -> Result<bool, SynthError> {
        if self.flight.is_some() || !self.overlaps() {
            return Ok(false);
        }
        // What it reads was written in front.
        self.device.sync()?;
        self.start_flight(slots, rounds)?;
        Ok(true)
    }

    /// [`super::Backend::overlaps`]: a full solve allocates and waits.
    pub(super) fn overlaps(&self) -> bool {
        self.solver.final_chunk != FinalChunk::Reference
    }

    /// Launches a flow call while no other is in flight, whatever runs in front: what the call reads is there.
    pub(super) fn start_flight(&mut self, slots: &[Slot], rounds: u32) -> Result<(), SynthError> {
        debug_assert!(self.flight.is_none(), "one call is in flight at a time");
        let mut call = self.take_slots(slots);
        let device = self.device.clone();
        if let Err(error) = device.context.low_priority(|| self.start_flow(&mut call, rounds)) {
            self.give_back(call, None);
            return Err(error);
        }
        self.flight = Some(Flight { call: Call::Flow(call), since: clock::now() });
        Ok(())
    }

    fn take_slots(&mut self, slots: &[Slot]) -> FlowCall {
        let taken: Vec<_> = slots.iter().map(|&slot| (slot, self.slots.remove(&slot))).collect();
        let before = taken.iter().map(|(_, state)| state.as_ref().map(|s| (s.stream.done, s.stream.stepped))).collect();
        FlowCall { taken, before, failed: Vec::new(), started: false }
    }

    fn start_flow(&mut self, call: &mut FlowCall, rounds: u32) -> Result<(), SynthError> {
        let hists: Vec<u64> = call.taken.iter().map(|(slot, _)| self.solver.hist_of(slot.0 as usize)).collect();
        let states = call.taken.iter_mut().zip(hists);
        let mut jobs: Vec<Job<'_>> = states
            .filter_map(|((_, s), hist)| s.as_mut().map(|s| Job { voice: s.voice, hist, stream: &mut s.stream }))
            .collect();
        (call.started, call.failed) = self.solver.advance(&self.voices, &mut jobs, rounds as usize, usize::MAX)?;
        Ok(())
    }

    /// Once the steps have ended: what they found out.
    fn settle_flow(&mut self, call: &mut FlowCall, ran: bool) {
        let started = std::mem::take(&mut call.started) && ran;
        self.solver.settle(started, &mut call.failed);
    }

    /// Puts the states back and says what became of each. Without `out` the device failed: they can only be closed.
    fn give_back(&mut self, call: FlowCall, mut out: Option<&mut Vec<Flowed>>) {
        let mut failures = call.failed.into_iter();
        for ((slot, state), before) in call.taken.into_iter().zip(call.before) {
            // Also of one that was closed meanwhile, whose state is gone.
            let failed = before.and_then(|_| failures.next().flatten());
            let (Some(mut state), Some((before, stepped))) = (state, before) else {
                if let Some(out) = &mut out {
                    out.push(Flowed { slot, frames: 0, windows: 0, pending: 0, failed: Some(not_open()) });
                }
                continue;
            };
            let prompt = self.voices.frames(state.voice);
            let frames = (state.stream.done.max(prompt) - before.max(prompt)) as u32;
            let windows = (state.stream.stepped - stepped) as u32;
            let pending = state.stream.pending() as u32;
            state.poisoned |= matches!(failed, Some(SynthError::Utterance(_)));
            if let Some(out) = &mut out {
                out.push(Flowed { slot, frames, windows, pending, failed });
            }
            self.slots.insert(slot, state);
        }
    }

    pub(super) fn run_vocode(&mut self, slots: &[Slot], out: &mut Vec<Vocoded>) -> Result<(), SynthError> {
        self.catch_up()?;
        let mut call = self.prepare_vocode(slots)?;
        self.start_vocode(&mut call)?;
        self.device.sync()?;
        self.settle_vocode(&mut call);
        self.report_vocode(call, out);
        Ok(())
    }

    /// [`super::Backend::launch_vocode`].
    pub(super) fn launch_vocode(&mut self, slots: &[Slot]) -> Result<bool, SynthError> {
        if self.flight.is_some() {
            return Ok(false);
        }
        let mut call = self.prepare_vocode(slots)?;
        // What it reads was written in front.
        self.device.sync()?;
        let device = self.device.clone();
        device.context.low_priority(|| self.start_vocode(&mut call))?;
        self.flight = Some(Flight { call: Call::Vocode(call), since: clock::now() });
        Ok(true)
    }

    /// What each slot gives to the pass; what is new of mels that are played at another speed is made first.
    fn prepare_vocode(&mut self, slots: &[Slot]) -> Result<VocodeCall, SynthError> {
        let mut failures = BTreeMap::new();
        for &slot in slots {
            match self.stretch(slot) {
                Ok(()) => {}
                Err(e @ SynthError::Device(_)) => return Err(e),
                Err(e) => drop(failures.insert(slot, e)),
            }
        }
        Ok(VocodeCall { slots: slots.to_vec(), failures, pieces: Vec::new(), pass: None, pcm: Vec::new() })
    }

    fn start_vocode(&mut self, call: &mut VocodeCall) -> Result<(), SynthError> {
        let mut wholes = Vec::with_capacity(call.slots.len());
        for slot in call.slots.iter().filter(|slot| !call.failures.contains_key(slot)) {
            let Some(state) = self.slots.get(slot) else { continue };
            let prompt = self.voices.frames(state.voice);
            let (slabs, frame0, total) = match &state.stretched {
                Some(mel) => (mel.pages.iter().map(|page| self.solver.page_of(page)).collect(), 0, mel.frames),
                None => (self.solver.addresses(&state.stream.places), prompt, state.stream.done.saturating_sub(prompt)),
            };
            wholes.push((slot.0 as usize, slabs, frame0, total, state.stream.complete()));
        }
        let mut excerpts: Vec<Excerpt<'_>> = Vec::with_capacity(wholes.len());
        for (slot, slabs, frame0, total, last) in &wholes {
            let whole = Excerpt { slot: *slot, frame0: *frame0, total: *total, last: *last, slabs };
            let part = self.hift.for_one_pass(whole);
            let more = (part.total, part.last) != (*total, *last);
            call.pieces.push(Piece { slot: *slot, total: part.total, last: part.last, more });
            excerpts.push(part);
        }
        call.pcm = excerpts.iter().map(|_| Some(Vec::new())).collect();
        call.pass = self.hift.start(&excerpts, &call.pcm)?;
        Ok(())
    }

    /// Once the pass has ended: its samples.
    fn settle_vocode(&mut self, call: &mut VocodeCall) {
        if let Some(pass) = call.pass.take() {
            self.hift.take(pass, &mut call.pcm);
        }
    }

    fn report_vocode(&self, mut call: VocodeCall, out: &mut Vec<Vocoded>) {
        let mut results: BTreeMap<usize, _> =
            call.pieces.iter().map(|p| p.slot).zip(call.pieces.iter().zip(call.pcm)).collect();
        for &slot in &call.slots {
            let result = results.remove(&(slot.0 as usize)).filter(|_| self.slots.contains_key(&slot));
            let Some((piece, pcm)) = result else {
                let failed = Some(call.failures.remove(&slot).unwrap_or_else(not_open));
                out.push(Vocoded { slot, pcm: Vec::new(), done: false, more: false, failed });
                continue;
            };
            let failed = pcm.is_none().then(|| SynthError::Utterance("a sample is not a number".into()));
            let done = self.hift.finished(piece.slot, piece.total, piece.last);
            out.push(Vocoded { slot, pcm: pcm.unwrap_or_default(), done, more: piece.more, failed });
        }
    }

    /// Whether the launched call has ended.
    pub(super) fn flight_has_ended(&self) -> Result<bool, SynthError> {
        match &self.flight {
            Some(flight) => Ok(self.device.context.has_ended(Lane::Back, flight.since)?),
            None => Ok(true),
        }
    }

    /// Waits for the launched call and takes what it found out, so that its network's buffers are free.
    pub(super) fn catch_up(&mut self) -> Result<(), SynthError> {
        let Some(mut flight) = self.flight.take() else { return Ok(()) };
        let device = self.device.clone();
        let waited = device.context.low_priority(|| device.sync());
        match &mut flight.call {
            Call::Flow(call) => self.settle_flow(call, waited.is_ok()),
            Call::Vocode(call) if waited.is_ok() => self.settle_vocode(call),
            Call::Vocode(_) => {}
        }
        self.flight = Some(flight);
        Ok(waited?)
    }

    /// [`super::Backend::complete_flow`].
    pub(super) fn land_flow(&mut self, out: &mut Vec<Flowed>) -> Result<(), SynthError> {
        let waited = self.catch_up();
        match self.flight.take() {
            Some(Flight { call: Call::Flow(call), .. }) => self.give_back(call, waited.is_ok().then_some(out)),
            other => self.flight = other,
        }
        waited
    }

    /// [`super::Backend::complete_vocode`].
    pub(super) fn land_vocode(&mut self, out: &mut Vec<Vocoded>) -> Result<(), SynthError> {
        self.catch_up()?;
        match self.flight.take() {
            Some(Flight { call: Call::Vocode(call), .. }) => self.report_vocode(call, out),
            other => self.flight = other,
        }
        Ok(())
    }

    /// The state of a slot that is to be closed; a call that runs for it is waited for.
    pub(super) fn take_for_closing(&mut self, slot: Slot) -> Option<SlotState> {
        let flies = |flight: &Flight| match &flight.call {
            Call::Flow(call) => call.taken.iter().any(|(other, _)| *other == slot),
            Call::Vocode(call) => call.slots.contains(&slot),
        };
        if self.flight.as_ref().is_some_and(flies)
            && let Err(error) = self.catch_up()
        {
            tracing::error!(%error, slot = slot.0, "a slot was closed under a call that failed");
        }
        let flown = match &mut self.flight {
            Some(Flight { call: Call::Flow(call), .. }) => call.take(slot),
            _ => None,
        };
        flown.or_else(|| self.slots.remove(&slot))
    }
}

impl FlowCall {
    /// The state of `slot`, if it has one here, and what its steps made of it.
    fn take(&mut self, slot: Slot) -> Option<SlotState> {
        let at = self.taken.iter().position(|(other, _)| *other == slot)?;
        let job = self.before[..at].iter().flatten().count();
        let mut state = self.taken[at].1.take()?;
        state.poisoned |= matches!(self.failed.get(job), Some(Some(SynthError::Utterance(_))));
        Some(state)
    }
}
