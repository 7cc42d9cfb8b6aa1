//! The state of one utterance on the CPU, and one round of decoding over several.

use candle_core::{Device, Result, Tensor};

use super::flow::Stream;
use super::hift::{Hift, Voice};
use super::llm::{Llm, Row, position_bytes};
use super::ops::LoadError;
use super::{ending, join};
use crate::synth::SynthError;
use crate::synth::cosyvoice::backend::{Controls, Decoded, Embed, End, Sampling, SlotRequest, Stretch, VoiceHandle};
use crate::synth::cosyvoice::config::{Config, LlmConfig};
use crate::synth::cosyvoice::noise::SineTable;
use crate::synth::cosyvoice::respeed::Respeed;
use crate::synth::cosyvoice::sample;
use crate::turn::checked_speed;

/// Mel frames vocoded at once: bounds the memory of the widest layer.
const VOCODE_FRAMES: usize = 100;

/// One open slot.
pub(super) struct SlotState {
    pub(super) voice: VoiceHandle,
    prefix: Vec<Embed>,
    sampling: Sampling,
    /// Where it is played at another speed than it is made.
    respeed: Option<Respeed>,
    row: Row,
    /// The state after the last position fed, `[1, hidden]`.
    hidden: Option<Tensor>,
    /// Sampled but not fed yet: fed when the next one is wanted.
    unfed: Option<u32>,
    emitted: Vec<u32>,
    ended: Option<End>,
    /// Of a slot that is given its text in stretches.
    controls: Option<Controls>,
    pub(super) stream: Stream,
    /// Frames not vocoded yet.
    pub(super) mel: Vec<Tensor>,
    /// No frames will follow.
    pub(super) mel_ended: bool,
    checked: usize,
    pub(super) vocoder: Voice,
}

/// Refuses ids that the tables do not have.
pub(in crate::synth::cosyvoice) fn check(
    request: &SlotRequest,
    config: &Config,
) -> std::result::Result<(), SynthError> {
    let llm = &config.llm;
    check_ids(&request.prefix, llm)?;
    if let Some(id) = request.sampling.forced.iter().flat_map(|f| f.iter()).find(|&&t| t as usize >= llm.speech_tokens)
    {
        return Err(SynthError::Input(format!(
            "forced speech token {id} is past the codebook of {}",
            llm.speech_tokens
        )));
    }
    checked_speed(request.speed).map(drop).map_err(SynthError::Input)
}

/// Whether ids that are to be fed are in the model's tables; the same on every device.
pub(in crate::synth::cosyvoice) fn check_ids(ids: &[Embed], config: &LlmConfig) -> std::result::Result<(), SynthError> {
    for id in ids {
        let (id, rows) = match *id {
            Embed::Text(id) => (id, config.vocab),
            Embed::Speech(id) => (id, config.speech_rows()),
        };
        if id as usize >= rows {
            return Err(SynthError::Input(format!("id {id} is past the model's table of {rows}")));
        }
    }
    Ok(())
}

impl SlotState {
    pub(super) fn new(request: SlotRequest, config: &Config, stream: Stream, vocoder: Voice) -> Self {
        Self {
            voice: request.voice,
            prefix: request.prefix,
            sampling: request.sampling,
            respeed: Respeed::new(config.flow.mel, request.speed),
            row: Row::new(&config.llm),
            hidden: None,
            unfed: None,
            emitted: Vec::new(),
            ended: None,
            controls: None,
            stream,
            mel: Vec::new(),
            mel_ended: false,
            checked: 0,
            vocoder,
        }
    }

    /// Runs the prefix; once.
    pub(super) fn prefill(&mut self, llm: &Llm) -> std::result::Result<(), LoadError> {
        if self.hidden.is_some() || self.prefix.is_empty() {
            return Ok(());
        }
        let trace = llm.extend(&mut self.row, &llm.embed(&self.prefix)?)?;
        let last = trace.hidden.dim(0)? - 1;
        self.hidden = Some(trace.hidden.narrow(0, last, 1)?);
        Ok(())
    }

    /// Gives the language model more to run behind what it has run.
    pub(super) fn extend(
        &mut self,
        stretch: Stretch,
        config: &LlmConfig,
        positions: usize,
    ) -> std::result::Result<(), SynthError> {
        check_ids(&stretch.input, config)?;
        // What is sampled takes a position each; where they end, the stretch does.
        let left = positions.saturating_sub(self.row.len() + 1 + stretch.input.len());
        if left == 0 {
            return Err(SynthError::Input(format!("the text is too long: split it (over {positions} positions)")));
        }
        self.prefix = self.unfed.take().map(Embed::Speech).into_iter().chain(stretch.input).collect();
        self.hidden = None;
        self.ended = None;
        let most = stretch.most.min(u32::try_from(left).unwrap_or(u32::MAX));
        self.sampling.max_len = (stretch.items.len() as u32).saturating_add(most);
        self.emitted = stretch.items;
        self.controls = Some(stretch.controls);
        Ok(())
    }

    pub(super) fn is_prefilled(&self) -> bool {
        self.hidden.is_some()
    }

    pub(super) fn ended(&self) -> Option<End> {
        self.ended
    }

    /// The error of a mel with a value that is no number, looked for in new frames only.
    pub(super) fn poisoned(&mut self) -> Result<Option<SynthError>> {
        for mel in self.mel.iter().skip(self.checked) {
            if !mel.sum_all()?.to_scalar::<f32>()?.is_finite() {
                return Ok(Some(SynthError::Utterance("a mel value is not a number".into())));
            }
        }
        self.checked = self.mel.len();
        Ok(None)
    }

    /// Samples of the new frames.
    pub(super) fn vocode(&mut self, hift: &Hift, noise: &mut SineTable) -> Result<Vec<f32>> {
        let mut mel = join(&std::mem::take(&mut self.mel))?;
        self.checked = 0;
        if let Some(respeed) = &mut self.respeed {
            let fresh = mel.map(|mel| mel.contiguous()?.flatten_all()?.to_vec1::<f32>()).transpose()?;
            let values = respeed.push(&fresh.unwrap_or_default(), self.mel_ended);
            let (frames, width) = (values.len() / hift.mel_channels(), hift.mel_channels());
            mel = (frames > 0).then(|| Tensor::from_vec(values, (frames, width), &Device::Cpu)).transpose()?;
        }
        let Some(mel) = mel else {
            let width = hift.mel_channels();
            let none = Tensor::zeros((0, width), candle_core::DType::F32, &Device::Cpu)?;
            return if self.mel_ended { hift.push(&mut self.vocoder, &none, true, noise) } else { Ok(Vec::new()) };
        };
        let frames = mel.dim(0)?;
        let mut pcm = Vec::new();
        for start in (0..frames).step_by(VOCODE_FRAMES) {
            let count = VOCODE_FRAMES.min(frames - start);
            let last = self.mel_ended && start + count == frames;
            pcm.extend(hift.push(&mut self.vocoder, &mel.narrow(0, start, count)?, last, noise)?);
        }
        Ok(pcm)
    }

    /// Bytes held, the shared prefix included.
    pub(super) fn bytes(&self, config: &Config) -> u64 {
        self.stream.bytes() + self.row.len() as u64 * position_bytes(&config.llm)
    }
}

/// Feeds what was sampled last and samples one more id for every row.
pub(super) fn decode_round(
    llm: &Llm,
    config: &LlmConfig,
    rows: &mut [(&mut SlotState, &mut Decoded)],
) -> std::result::Result<(), LoadError> {
    let mut feeding: Vec<(Embed, &mut Row, &mut Option<Tensor>)> = Vec::with_capacity(rows.len());
    for (state, _) in rows.iter_mut() {
        if let Some(id) = state.unfed.take() {
            feeding.push((Embed::Speech(id), &mut state.row, &mut state.hidden));
        }
    }
    if !feeding.is_empty() {
        let ids: Vec<Embed> = feeding.iter().map(|f| f.0).collect();
        let x = llm.embed(&ids)?;
        let mut caches: Vec<&mut Row> = Vec::with_capacity(feeding.len());
        let mut hiddens = Vec::with_capacity(feeding.len());
        for (_, row, hidden) in feeding {
            caches.push(row);
            hiddens.push(hidden);
        }
        let stepped = llm.step(&mut caches, &x)?;
        for (r, hidden) in hiddens.into_iter().enumerate() {
            *hidden = Some(stepped.narrow(0, r, 1)?);
        }
    }
    let hidden: Vec<&Tensor> = rows.iter().filter_map(|(state, _)| state.hidden.as_ref()).collect();
    let scores = llm.scores(&Tensor::cat(&hidden, 0)?)?.to_vec2::<f32>()?;
    for ((state, result), scores) in rows.iter_mut().zip(scores) {
        state.sample(scores, config, result);
    }
    Ok(())
}

impl SlotState {
    fn sample(&mut self, mut scores: Vec<f32>, config: &LlmConfig, result: &mut Decoded) {
        let index = self.emitted.len() as u32;
        let sampling = &self.sampling;
        match self.controls {
            Some(controls) => sample::hide(&mut scores, config, controls),
            None => sample::mask(&mut scores, config, index, sampling.min_len, sampling.min_length),
        }
        let Some(sampled) = sample::next_id(&scores, &self.emitted, &config.sampling, sampling.key, index) else {
            result.failed = Some(SynthError::Utterance("the language model's scores are not numbers".into()));
            return;
        };
        let (id, max_len) = match &sampling.forced {
            Some(forced) => match forced.get(index as usize) {
                Some(&id) => (id, (forced.len() as u32).min(sampling.max_len)),
                None => {
                    self.ended = Some(End::Length);
                    result.ended = self.ended;
                    return;
                }
            },
            None => (sampled, sampling.max_len),
        };
        self.ended = match ending(id, self.emitted.len() + 1, config, max_len) {
            Some(End::Eos) if self.controls.is_some() => Some(End::Control(id)),
            ended => ended,
        };
        if !matches!(self.ended, Some(End::Eos | End::Control(_))) {
            self.emitted.push(id);
            result.tokens.push(id);
            self.unfed = Some(id);
        }
        result.ended = self.ended;
    }
}
