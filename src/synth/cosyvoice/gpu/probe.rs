//! What the GPU engine shows of itself: the outputs that every backend has. Stages that are fused away are not shown.

use std::sync::Arc;

use super::flight::Acoustic;
use super::hift::Excerpt;
use super::slots::Stream;
use super::solver::{Job, poisoned};
use super::{GpuBackend, device};
use crate::synth::SynthError;
use crate::synth::cosyvoice::backend::{BackendCaps, Embed, FinalChunk, FlowPrompt, MinLength, Sampling};
use crate::synth::cosyvoice::noise;
use crate::synth::cosyvoice::probe::{DitInput, DitProbe, Feed, HiftProbe, LlmProbe, Probe, Values};
use crate::synth::cosyvoice::respeed;

/// Frames by which a mel grows while its F0 is looked at.
const F0_PIECE: usize = 32;

/// The slot that no caller has.
fn spare(caps: &BackendCaps) -> usize {
    caps.limits.slots as usize
}

fn sampling(forced: Option<Arc<[u32]>>) -> Sampling {
    Sampling { key: [0, 0], min_len: 0, max_len: u32::MAX, min_length: MinLength::Intended, forced }
}

/// Flow and vocoder as a question uses them: by the slot that no caller has.
struct Asked<'a> {
    acoustic: &'a mut Acoustic,
    slot: usize,
}

impl Asked<'_> {
    fn solve(
        &mut self,
        prompt: &FlowPrompt,
        tokens: &[u32],
        cuts: &[usize],
        end: FinalChunk,
    ) -> Result<Values, SynthError> {
        let Acoustic { solver, voices, .. } = &mut *self.acoustic;
        let voice = solver.make_voice(&Arc::new(prompt.clone()))?;
        let frames = voice.frames;
        let voice = voices.add(voice);
        let hist = solver.hist_of(self.slot);
        solver.device.fill_zero(hist, solver.flow.hist_bytes)?;
        let (flow, ratio) = (&solver.config.flow, solver.config.token_mel_ratio);
        let mut stream = Stream::new(prompt.tokens.clone(), &[], flow, ratio, end);
        let (mut mel, mut from, mut out) = (Vec::new(), 0, frames);
        for (n, &to) in cuts.iter().enumerate() {
            let chunk = tokens.get(from..to).ok_or_else(|| SynthError::Input("a cut is past the tokens".into()))?;
            stream.push(chunk, n + 1 == cuts.len());
            from = to;
            while stream.pending() > 0 {
                let job = Job { voice, hist, stream: &mut stream };
                if solver.advance_now(voices, job, usize::MAX)?.is_some() {
                    return Err(poisoned());
                }
            }
            // Read before the next push: a full solve at the end replaces nothing that was out.
            if stream.done > out {
                mel.extend(solver.read_mel(&stream.places, out, stream.done)?);
                out = stream.done;
            }
        }
        stream.free(&mut solver.slabs);
        voices.release(voice, &mut solver.slabs);
        let width = solver.config.flow.mel;
        Ok(Values { shape: vec![mel.len() / width, width], data: mel })
    }

    /// F0 of every frame of a whole mel.
    fn f0(&mut self, mel: &Values) -> Result<Values, SynthError> {
        let frames = mel.data.len() / self.acoustic.solver.config.flow.mel;
        let (buf, slot) = (self.padded(mel)?, self.slot);
        let slabs = self.acoustic.solver.pages_of(&buf, frames);
        self.acoustic.hift.open(slot)?;
        let mut out = Vec::with_capacity(frames);
        while out.len() < frames {
            // Short enough for one pass each, also with what was withheld before.
            let total = frames.min(out.len() + F0_PIECE);
            let excerpt = Excerpt { slot, frame0: 0, total, last: total == frames, slabs: &slabs };
            let before = self.acoustic.hift.f0_done(slot);
            self.acoustic.hift.run(&[excerpt])?;
            let count = self.acoustic.hift.f0_done(slot) - before;
            if count == 0 && total == frames {
                break;
            }
            out.extend(self.acoustic.hift.last_f0(count)?);
        }
        Ok(Values { shape: vec![1, out.len()], data: out })
    }

    /// A mel on the device, to the end of its last block.
    fn padded(&self, mel: &Values) -> Result<device::Buf, SynthError> {
        let width = self.acoustic.solver.config.flow.mel;
        let mut padded = mel.data.clone();
        padded.resize((mel.data.len() / width).next_multiple_of(self.acoustic.solver.config.flow.block) * width, 0.0);
        Ok(self.acoustic.device.upload("a mel", &padded)?)
    }

    fn wave(&mut self, mel: &Values, cuts: &[usize], ends: bool) -> Result<Values, SynthError> {
        let width = self.acoustic.solver.config.flow.mel;
        let frames = mel.data.len() / width;
        let (buf, slot) = (self.padded(mel)?, self.slot);
        let slabs = self.acoustic.solver.pages_of(&buf, frames);
        self.acoustic.hift.open(slot)?;
        let mut wave = Vec::new();
        for (n, &total) in cuts.iter().enumerate() {
            let last = ends && n + 1 == cuts.len();
            let excerpt = Excerpt { slot, frame0: 0, total, last, slabs: &slabs };
            match self.acoustic.hift.run(&[excerpt])?.pop().flatten() {
                Some(pcm) => wave.extend(pcm),
                None => return Err(SynthError::Utterance("a sample is not a number".into())),
            }
        }
        Ok(Values::vector(wave))
    }
}

fn asked(backend: &mut GpuBackend) -> Asked<'_> {
    Asked { slot: spare(&backend.caps), acoustic: &mut backend.acoustic }
}

impl Probe for GpuBackend {
    fn llm(&mut self, prefix: &[Embed], forced: &[u32]) -> Result<LlmProbe, SynthError> {
        let mut ids = forced.iter().copied();
        let mut all = Vec::new();
        let mut count = 0;
        self.llm_decode(prefix, &mut |scores: &[f32], _: &[u32]| {
            all.extend_from_slice(scores);
            count += 1;
            ids.next()
        })?;
        let rows = self.config.llm.speech_rows();
        Ok(LlmProbe { scores: Values { shape: vec![count, rows], data: all }, ..LlmProbe::default() })
    }

    fn llm_feed(&mut self, feed: Feed<'_>) -> Result<(), SynthError> {
        let Some(mut sequence) = feed(None) else { return Ok(()) };
        let slot = spare(&self.caps);
        let sampling = sampling(None);
        self.llm.prefill(&[(slot, &sequence, &sampling)])?;
        loop {
            self.llm.decode(&[slot], 1, || ())?;
            let scores = self.llm.scores(0)?;
            let Some(next) = feed(Some(&scores)) else { return Ok(()) };
            let one = next.len() == 1;
            sequence.extend(next);
            if one {
                self.llm.rewind(slot, &sequence, &sampling)?;
            } else {
                // Several positions at once only happen while looking: the whole sequence is simply run again.
                self.llm.prefill(&[(slot, &sequence, &sampling)])?;
            }
        }
    }

    fn times(&self) -> Vec<f32> {
        self.config.flow.times()
    }

    fn flow_noise(&mut self, frames: usize) -> Result<Values, SynthError> {
        let (mel, all) = (self.config.flow.mel, self.config.noise_frames());
        let table = noise::flow_table(&self.config);
        let data = table.chunks_exact(all).flat_map(|row| row[..frames.min(all)].iter().copied()).collect();
        Ok(Values { shape: vec![mel, frames.min(all)], data })
    }

    fn angles(&self, _frames: usize) -> Option<Values> {
        None
    }

    fn speaker(&mut self, raw: &[f32]) -> Result<Option<Values>, SynthError> {
        let data = self.acoustic.solver.flow.project(raw);
        Ok(Some(Values { shape: vec![1, data.len()], data }))
    }

    fn look_ahead(&mut self, _tokens: &[u32], _last: bool) -> Result<Option<Values>, SynthError> {
        Ok(None)
    }

    fn dit(&mut self, _input: &DitInput) -> Result<DitProbe, SynthError> {
        Ok(DitProbe::default())
    }

    fn mel(&mut self, prompt: &FlowPrompt, tokens: &[u32], streaming: bool) -> Result<Values, SynthError> {
        let end = if streaming { FinalChunk::Causal } else { FinalChunk::Reference };
        asked(self).solve(prompt, tokens, &[tokens.len()], end)
    }

    fn mel_chunks(
        &mut self,
        prompt: &FlowPrompt,
        tokens: &[u32],
        cuts: &[usize],
        end: FinalChunk,
    ) -> Result<Values, SynthError> {
        asked(self).solve(prompt, tokens, cuts, end)
    }

    fn respeed(&mut self, mel: &Values, speed: f32) -> Result<Values, SynthError> {
        let width = self.config.flow.mel;
        let data = respeed::whole(&mel.data, width, speed);
        Ok(Values { shape: vec![data.len() / width, width], data })
    }

    fn hift(&mut self, mel: &Values, last: bool) -> Result<HiftProbe, SynthError> {
        let frames = mel.data.len() / self.config.flow.mel;
        let wave = asked(self).wave(mel, &[frames], last)?;
        let f0 = if last { Some(asked(self).f0(mel)?) } else { None };
        Ok(HiftProbe { wave, f0, ..HiftProbe::default() })
    }

    fn hift_chunks(&mut self, mel: &Values, cuts: &[usize]) -> Result<Values, SynthError> {
        asked(self).wave(mel, cuts, true)
    }
}
