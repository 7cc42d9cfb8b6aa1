//! The CPU executor shows all its stages.

use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::dit::{Input, Mask, StepState};
use super::flow::Stream;
use super::hift::{Trace, respeed};
use super::llm::Row;
use super::{CpuBackend, device, load_failed};
use crate::synth::SynthError;
use crate::synth::cosyvoice::backend::{Embed, FinalChunk, FlowPrompt};
use crate::synth::cosyvoice::checkpoint::{TensorFile, find};
use crate::synth::cosyvoice::probe::{DitInput, DitProbe, Feed, HiftProbe, LlmProbe, Probe, Values};

impl Probe for CpuBackend {
    fn llm(&mut self, prefix: &[Embed], forced: &[u32]) -> Result<LlmProbe, SynthError> {
        let all: Vec<Embed> = prefix.iter().copied().chain(forced.iter().map(|&t| Embed::Speech(t))).collect();
        let x = self.llm.embed(&all).map_err(load_failed)?;
        let mut row = Row::new(&self.config.llm);
        let trace = self.llm.extend(&mut row, &x).map_err(device)?;
        let tail = trace.hidden.narrow(0, prefix.len().max(1) - 1, forced.len() + 1).map_err(device)?;
        Ok(LlmProbe {
            input: Some(values(&x.narrow(0, 0, prefix.len()).map_err(device)?)?),
            hidden: Some(values(&trace.hidden)?),
            after_first: Some(values(&trace.after_first)?),
            scores: values(&self.llm.scores(&tail).map_err(device)?)?,
        })
    }

    fn llm_feed(&mut self, feed: Feed<'_>) -> Result<(), SynthError> {
        let mut row = Row::new(&self.config.llm);
        let mut scores: Option<Values> = None;
        while let Some(ids) = feed(scores.as_ref().map(|s| s.data.as_slice())) {
            let x = self.llm.embed(&ids).map_err(load_failed)?;
            // One position takes the path of batched decoding, so that both are seen.
            let hidden = match ids.len() {
                1 => self.llm.step(&mut [&mut row], &x),
                n => self.llm.extend(&mut row, &x).and_then(|t| t.hidden.narrow(0, n - 1, 1)),
            };
            scores = Some(values(&hidden.and_then(|h| self.llm.scores(&h)).map_err(device)?)?);
        }
        Ok(())
    }

    fn times(&self) -> Vec<f32> {
        self.flow.times()
    }

    fn flow_noise(&mut self, frames: usize) -> Result<Values, SynthError> {
        Ok(values(&self.flow.noise(frames).map_err(device)?)?.transposed())
    }

    fn angles(&self, frames: usize) -> Option<Values> {
        let data = self.flow.dit().angles(frames);
        Some(Values { shape: vec![frames, data.len() / frames.max(1)], data })
    }

    fn speaker(&mut self, raw: &[f32]) -> Result<Option<Values>, SynthError> {
        values(&self.flow.project(raw).map_err(device)?).map(Some)
    }

    fn look_ahead(&mut self, tokens: &[u32], last: bool) -> Result<Option<Values>, SynthError> {
        let ahead = if last { 0 } else { self.config.flow.lookahead };
        values(&self.flow.look_ahead(tokens, 0, tokens.len().saturating_sub(ahead)).map_err(device)?).map(Some)
    }

    fn dit(&mut self, input: &DitInput) -> Result<DitProbe, SynthError> {
        // The unfolded modulation layers are not kept: they are read again for the times asked for.
        let file = TensorFile::open(&find(&self.dir, "flow")).map_err(|e| SynthError::Device(e.to_string()))?;
        let mask = if input.streaming { Mask::Blocks } else { Mask::Full };
        let mut rows: [Vec<Tensor>; 5] = Default::default();
        for (row, &t) in input.times.iter().enumerate() {
            let modulation = self.flow.dit().modulation(&file, t).map_err(load_failed)?;
            let pick = |v: &Values| tensor(v)?.narrow(0, row, 1).map_err(device);
            let input = Input {
                x: &pick(&input.x)?,
                cond: &pick(&input.cond)?,
                mu: &pick(&input.mu)?,
                speaker: &pick(&input.speaker)?,
            };
            let trace =
                self.flow.dit().forward(&input, &modulation, &mut StepState::default(), mask).map_err(device)?;
            let embedding = modulation.embedding.unsqueeze(0).map_err(device)?;
            for (all, one) in
                rows.iter_mut().zip([embedding, trace.input_embed, trace.attention0, trace.block0, trace.out])
            {
                all.push(one);
            }
        }
        let [time_embed, input_embed, attention0, block0, out] =
            rows.map(|parts| Tensor::cat(&parts, 0).map_err(device).and_then(|t| values(&t)));
        Ok(DitProbe {
            time_embed: Some(time_embed?),
            input_embed: Some(input_embed?),
            attention0: Some(attention0?),
            block0: Some(block0?),
            out: Some(out?),
        })
    }

    fn mel(&mut self, prompt: &FlowPrompt, tokens: &[u32], streaming: bool) -> Result<Values, SynthError> {
        let prompt = Arc::new(self.flow.prompt(prompt).map_err(device)?);
        let mask = if streaming { Mask::Blocks } else { Mask::Full };
        values(&self.flow.solve(&prompt, tokens, mask).map_err(device)?)
    }

    fn mel_chunks(
        &mut self,
        prompt: &FlowPrompt,
        tokens: &[u32],
        cuts: &[usize],
        end: FinalChunk,
    ) -> Result<Values, SynthError> {
        let prompt = Arc::new(self.flow.prompt(prompt).map_err(device)?);
        let prefix = self.flow.prefix(&prompt).map_err(device)?;
        let mut stream = Stream::new(prompt, Some(&prefix), self.config.flow.steps, end);
        stream.cut_blocks();
        let mut parts = Vec::new();
        let mut from = 0;
        for (n, &to) in cuts.iter().enumerate() {
            let chunk = tokens.get(from..to).ok_or_else(|| SynthError::Input("a cut is past the tokens".into()))?;
            self.flow.push(&mut stream, chunk, n + 1 == cuts.len());
            while self.flow.pending(&stream) > 0 {
                parts.extend(self.flow.advance(&mut stream, usize::MAX).map_err(device)?);
            }
            from = to;
        }
        values(&Tensor::cat(&parts, 0).map_err(device)?)
    }

    fn cuts_blocks(&self) -> bool {
        true
    }

    fn respeed(&mut self, mel: &Values, speed: f32) -> Result<Values, SynthError> {
        values(&respeed(&tensor(mel)?, speed).map_err(device)?)
    }

    fn hift(&mut self, mel: &Values, last: bool) -> Result<HiftProbe, SynthError> {
        let mut voice = self.hift.start();
        let mut trace = Trace::default();
        let wave = self
            .hift
            .push_traced(&mut voice, &tensor(mel)?, last, &mut self.noise, Some(&mut trace))
            .map_err(device)?;
        let show = |t: Option<Tensor>| t.map(|t| values(&t)).transpose();
        Ok(HiftProbe {
            f0: Some(Values::vector(trace.f0)),
            source: Some(Values::vector(trace.source)),
            spectrum: show(trace.spectrum)?,
            conv_pre: show(trace.conv_pre)?,
            up0: show(trace.up0)?,
            source_block0: show(trace.source_block0)?,
            block0: show(trace.block0)?,
            conv_post: show(trace.conv_post)?,
            wave: Values::vector(wave),
        })
    }

    fn hift_chunks(&mut self, mel: &Values, cuts: &[usize]) -> Result<Values, SynthError> {
        let mel = tensor(mel)?;
        let mut voice = self.hift.start();
        let mut wave = Vec::new();
        let mut from = 0;
        for (n, &to) in cuts.iter().enumerate() {
            let piece = mel.narrow(0, from, to - from).map_err(device)?;
            wave.extend(self.hift.push(&mut voice, &piece, n + 1 == cuts.len(), &mut self.noise).map_err(device)?);
            from = to;
        }
        Ok(Values::vector(wave))
    }
}

fn values(tensor: &Tensor) -> Result<Values, SynthError> {
    let data = tensor.flatten_all().and_then(|t| t.to_vec1::<f32>()).map_err(device)?;
    Ok(Values { shape: tensor.dims().to_vec(), data })
}

fn tensor(values: &Values) -> Result<Tensor, SynthError> {
    Tensor::from_slice(&values.data, &values.shape[..], &Device::Cpu).map_err(device)
}
