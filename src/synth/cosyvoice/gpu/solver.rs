//! Advancing streams of mel frames through the flow: which chunks a round has, where each one's state lies, what became of it.
//!
//! Owns the network, the slabs and the histories of every slot. Whose streams are advanced comes with every call.

use std::sync::Arc;

use super::cpu;
use super::device::{self, Device};
use super::flow::{self, ChunkArgs, ChunkRun, Flow};
use super::slabs::{Place, Slab, Slabs};
use super::slots::{Next, Stream};
use super::voices::{Prefix, Voice, Voices};
use crate::synth::SynthError;
use crate::synth::cosyvoice::backend::{FinalChunk, FlowPrompt, VoiceHandle};
use crate::synth::cosyvoice::config::Config;

/// One stream that is to be advanced.
pub(super) struct Job<'a> {
    pub(super) voice: VoiceHandle,
    pub(super) hist: u64,
    pub(super) stream: &'a mut Stream,
}

pub(super) fn poisoned() -> SynthError {
    SynthError::Utterance("a mel value is not a number".into())
}

/// The flow and the memory that its streams take.
pub(super) struct Solver {
    pub(super) device: Arc<Device>,
    pub(super) config: Config,
    pub(super) final_chunk: FinalChunk,
    pub(super) flow: Flow,
    pub(super) slabs: Slabs,
    /// Histories of the flow's position convolutions, one a slot.
    pub(super) hists: device::Buf,
}

impl Solver {
    /// A stream that goes on after a prompt, whose first blocks may be shared.
    pub(super) fn stream(&self, prompt: &[u32], shared: &[Slab]) -> Stream {
        Stream::new(prompt.to_vec(), shared, &self.config.flow, self.config.token_mel_ratio, self.final_chunk)
    }

    /// Where the histories of a slot lie.
    pub(super) fn hist_of(&self, slot: usize) -> u64 {
        self.hists.ptr + (slot * self.flow.hist_bytes) as u64
    }

    /// A voice with one hold, its prompt on the device.
    pub(super) fn make_voice(&self, prompt: &Arc<FlowPrompt>) -> Result<Voice, SynthError> {
        cpu::check_voice(prompt, &self.config.flow)?;
        Ok(Voice {
            prompt: prompt.clone(),
            frames: prompt.mel.len() / self.config.flow.mel,
            cond: self.device.upload("a voice", &prompt.mel)?,
            speaker: self.device.upload("a voice", &self.flow.project(&prompt.speaker))?,
            prefix: None,
            holds: 1,
        })
    }

    /// The kernels' view of one chunk. `places`: of the utterance's blocks, at least up to the chunk's own.
    pub(super) fn chunk(
        &self,
        voice: &Voice,
        hist: u64,
        next: &Next,
        places: &[Place],
        seen: usize,
        flag: usize,
    ) -> ChunkArgs {
        let mut page = [0u64; flow::PAGES];
        for (to, place) in page.iter_mut().zip(places) {
            // Kernels add the offset of the Euler step itself, wherever the place has it.
            let step = (self.flow.step_bytes() * place.step(next.step)) as u64;
            *to = (self.slabs.address(place.slab) + step).wrapping_sub((self.flow.step_bytes() * next.step) as u64);
        }
        let block = self.config.flow.block;
        ChunkArgs {
            hist,
            cond: voice.cond.ptr,
            speaker: voice.speaker.ptr,
            own: places.get(next.start / block).map_or(0, |place| self.address(place)),
            unguided: 0,
            step: next.step as i32,
            frame0: next.start as i32,
            frames: next.frames as i32,
            keys: seen as i32,
            key0: self.flow.first_key(next.start) as i32,
            cond_frames: voice.frames as i32,
            row: flow::GUIDED,
            flag: flag as i32,
            page,
        }
    }

    pub(super) fn tokens_for(&self, tokens: &[u32], next: &Next, start: usize) -> Option<Vec<i32>> {
        (next.step == 0).then(|| self.flow.window(tokens, start / self.config.token_mel_ratio))
    }

    /// Runs one Euler step of a full solve.
    fn whole_step(&mut self, voice: &Voice, tokens: &[u32], next: &Next, own: &[Slab]) -> Result<bool, SynthError> {
        let (block, steps) = (self.config.flow.block, self.config.flow.steps);
        let places: Vec<Place> = own.iter().map(|&slab| Place::whole(slab, steps)).collect();
        let scratch = self.device.zeros("a full solve", own.len() * self.flow.hist_bytes)?;
        let runs: Vec<ChunkRun> = (0..own.len())
            .map(|n| {
                let part = Next { start: n * block, frames: block.min(next.frames - n * block), ..next.clone() };
                let hist = scratch.ptr + (n * self.flow.hist_bytes) as u64;
                let mut args = self.chunk(voice, hist, &part, &places, next.frames, 0);
                args.key0 = 0;
                ChunkRun { args, tokens: self.tokens_for(tokens, next, n * block) }
            })
            .collect();
        Ok(self.flow.run_whole(&runs)?)
    }

    /// Starts Euler steps of `streams` up to `rounds` each, chunks that end at or before `limit`. Returns whether there
    /// were any, whose flags are then to be waited for, and what failed before.
    pub(super) fn advance(
        &mut self,
        voices: &Voices,
        streams: &mut [Job<'_>],
        rounds: usize,
        limit: usize,
    ) -> Result<(bool, Vec<Option<SynthError>>), SynthError> {
        let mut failed: Vec<Option<SynthError>> = streams.iter().map(|_| None).collect();
        let mut plan: Vec<Vec<ChunkRun>> = Vec::with_capacity(rounds);
        for _ in 0..rounds.min(self.config.flow.steps) {
            let mut round = Vec::with_capacity(streams.len());
            // Blocks of one stream in a round beyond its first: as many as keep the round below what pays.
            let mut spare = flow::PAYS.saturating_sub(streams.len());
            let mut rows = 0;
            for (n, job) in streams.iter_mut().enumerate() {
                // Where more chunks than usual are past their first step, who comes last waits for the next round.
                if failed[n].is_some() || rows + 2 > 2 * flow::WIDTH {
                    continue;
                }
                let chunks = match job.stream.next(limit, 1 + spare, &mut self.slabs) {
                    Ok(chunks) => chunks,
                    Err(e) => {
                        failed[n] = Some(e);
                        continue;
                    }
                };
                spare -= chunks.len().saturating_sub(1);
                let Some(voice) = voices.get(job.voice) else { continue };
                for next in chunks {
                    if let Some(own) = &next.whole {
                        match self.whole_step(voice, &job.stream.tokens, &next, own) {
                            Ok(false) => {}
                            Ok(true) => failed[n] = Some(poisoned()),
                            Err(e @ SynthError::Device(_)) => return Err(e),
                            Err(e) => failed[n] = Some(e),
                        }
                        continue;
                    }
                    let args = self.chunk(voice, job.hist, &next, &job.stream.places, next.start + next.frames, n);
                    rows += self.flow.rows_of(&args);
                    round.push(ChunkRun { args, tokens: self.tokens_for(&job.stream.tokens, &next, next.start) });
                }
            }
            if round.is_empty() {
                continue;
            }
            plan.push(round);
        }
        if !plan.is_empty() {
            self.flow.start(&plan)?;
        }
        Ok((!plan.is_empty(), failed))
    }

    /// Runs every Euler step of one stream's next chunks that end at or before `limit`. Returns what failed.
    pub(super) fn advance_now(
        &mut self,
        voices: &Voices,
        job: Job<'_>,
        limit: usize,
    ) -> Result<Option<SynthError>, SynthError> {
        let (started, mut failed) = self.advance(voices, &mut [job], self.config.flow.steps, limit)?;
        self.device.sync()?;
        self.settle(started, &mut failed);
        Ok(failed.pop().flatten())
    }

    /// Adds what the steps that have ended say to what failed before.
    pub(super) fn settle(&mut self, started: bool, failed: &mut [Option<SynthError>]) {
        let flags = if started { self.flow.flags() } else { Vec::new() };
        for (flag, failed) in flags.into_iter().zip(failed) {
            if flag && failed.is_none() {
                *failed = Some(poisoned());
            }
        }
    }

    /// Frames a voice's utterances share.
    fn shared_frames(&self, prompt: &FlowPrompt) -> usize {
        let flow = &self.config.flow;
        let known = prompt.tokens.len().saturating_sub(flow.lookahead) * self.config.token_mel_ratio;
        known / flow.block * flow.block
    }

    /// An address such that a block's x and mu lie where those of a slab's first part would.
    fn address(&self, place: &Place) -> u64 {
        self.slabs.address(place.slab) + (place.part * self.flow.part_bytes()) as u64
    }

    /// The same of every block of an utterance.
    pub(super) fn addresses(&self, places: &[Place]) -> Vec<u64> {
        places.iter().map(|place| self.address(place)).collect()
    }

    /// Mel frames `from..to` (prompt included in the count) of a stream, `[frames, mel]`.
    pub(super) fn read_mel(&self, places: &[Place], from: usize, to: usize) -> Result<Vec<f32>, SynthError> {
        let (block, mel) = (self.config.flow.block, self.config.flow.mel);
        let mut out = vec![0f32; to.saturating_sub(from) * mel];
        let mut at = from;
        while at < to {
            let Some(place) = places.get(at / block) else { break };
            // Frames of a block lie side by side.
            let end = to.min((at / block + 1) * block);
            let there = self.address(place) + (self.flow.x_offset + at % block * mel * 4) as u64;
            self.device.read(there, &mut out[(at - from) * mel..(end - from) * mel])?;
            at = end;
        }
        Ok(out)
    }

    /// A block of mel frames as the vocoder finds slabs: an address such that its frames lie where a slab's would.
    pub(super) fn page_of(&self, mel: &device::Buf) -> u64 {
        mel.ptr.wrapping_sub(self.flow.x_offset as u64)
    }

    /// The same of a mel of several blocks in one piece.
    pub(super) fn pages_of(&self, mel: &device::Buf, frames: usize) -> Vec<u64> {
        let block = self.config.flow.block;
        let bytes = (block * self.config.flow.mel * 4) as u64;
        (0..frames.div_ceil(block) as u64).map(|n| self.page_of(mel).wrapping_add(n * bytes)).collect()
    }

    /// Solves the blocks of a voice's prompt that its utterances share.
    pub(super) fn solve_prefix(&mut self, voices: &mut Voices, handle: VoiceHandle) -> Result<(), SynthError> {
        let Some(voice) = voices.get(handle).filter(|v| v.prefix.is_none()) else { return Ok(()) };
        let prompt = voice.prompt.clone();
        let frames = self.shared_frames(&prompt);
        let hist = self.device.zeros("a voice", self.flow.hist_bytes)?;
        let mut stream = self.stream(&prompt.tokens, &[]);
        while stream.done < frames {
            let job = Job { voice: handle, hist: hist.ptr, stream: &mut stream };
            if let Some(e) = self.advance_now(voices, job, frames)? {
                if matches!(e, SynthError::Utterance(_)) {
                    stream.own().try_for_each(|slab| self.slabs.scrub(slab))?;
                }
                stream.free(&mut self.slabs);
                return Err(e);
            }
        }
        if let Some(voice) = voices.get_mut(handle) {
            voice.prefix = Some(Prefix { slabs: stream.into_slabs(), hist });
        }
        Ok(())
    }
}
