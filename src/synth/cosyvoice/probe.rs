//! Looking into a backend stage by stage, for comparing it with stored reference tensors.
//!
//! Each question is answered on fresh state, apart from any slot. What a backend cannot show because it is fused
//! away is `None` and reported as not shown; the outputs that are not optional every backend has.

use super::backend::{Embed, FinalChunk, FlowPrompt};
use crate::synth::SynthError;

/// A row-major array on the host.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Values {
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// `shape`'s product of values.
    pub data: Vec<f32>,
}

impl Values {
    /// A vector.
    pub fn vector(data: Vec<f32>) -> Self {
        Self { shape: vec![data.len()], data }
    }

    /// The matrix with its last two axes exchanged; others stay.
    #[must_use]
    pub fn transposed(&self) -> Self {
        let rank = self.shape.len();
        if rank < 2 {
            return self.clone();
        }
        let (rows, columns) = (self.shape[rank - 2], self.shape[rank - 1]);
        let mut data = Vec::with_capacity(self.data.len());
        for matrix in self.data.chunks_exact((rows * columns).max(1)) {
            for c in 0..columns {
                data.extend((0..rows).map(|r| matrix[r * columns + c]));
            }
        }
        let mut shape = self.shape.clone();
        shape.swap(rank - 2, rank - 1);
        Self { shape, data }
    }
}

/// One pass of the language model over a prefix and forced speech tokens.
#[derive(Clone, Debug, Default)]
pub struct LlmProbe {
    /// Input embeddings of the prefix, `[positions, hidden]`.
    pub input: Option<Values>,
    /// After the final norm, `[positions, hidden]`.
    pub hidden: Option<Values>,
    /// The residual stream after the first layer, `[positions, hidden]`.
    pub after_first: Option<Values>,
    /// Scores at the prefix' end and after each forced token, `[1 + forced, speech rows]`.
    pub scores: Values,
}

/// The input of one network evaluation; arrays are `[2, frames, channels]`, row 1 unconditional.
#[derive(Clone, Debug)]
pub struct DitInput {
    /// Noisy mel.
    pub x: Values,
    /// Token conditioning.
    pub mu: Values,
    /// Prompt mel.
    pub cond: Values,
    /// Projected speaker, `[2, spk]`.
    pub speaker: Values,
    /// Time of each row.
    pub times: [f32; 2],
    /// Chunk-causal mask, or full attention.
    pub streaming: bool,
}

/// What one network evaluation gives, `[2, frames, channels]`.
#[derive(Clone, Debug, Default)]
pub struct DitProbe {
    /// Time embedding, `[2, dim]`.
    pub time_embed: Option<Values>,
    /// After input projection and position embedding.
    pub input_embed: Option<Values>,
    /// Attention output of the first block.
    pub attention0: Option<Values>,
    /// Output of the first block.
    pub block0: Option<Values>,
    /// The velocity.
    pub out: Option<Values>,
}

/// What the vocoder makes of a whole mel; arrays are `[steps, channels]`.
#[derive(Clone, Debug, Default)]
pub struct HiftProbe {
    /// F0 of every frame, Hz.
    pub f0: Option<Values>,
    /// The excitation.
    pub source: Option<Values>,
    /// Its spectrum.
    pub spectrum: Option<Values>,
    /// Output of `conv_pre`.
    pub conv_pre: Option<Values>,
    /// Output of the first upsampling.
    pub up0: Option<Values>,
    /// Output of the first source block.
    pub source_block0: Option<Values>,
    /// Output of the first residual block.
    pub block0: Option<Values>,
    /// Output of `conv_post`.
    pub conv_post: Option<Values>,
    /// The waveform.
    pub wave: Values,
}

/// The choice of the next token from its scores and the ids so far; `None` ends.
pub type Choose<'a> = &'a mut dyn FnMut(&[f32], &[u32]) -> Option<u32>;

/// What to append next, given the scores after the last position (`None` at the start); `None` ends.
pub type Feed<'a> = &'a mut dyn FnMut(Option<&[f32]>) -> Option<Vec<Embed>>;

/// What a backend shows of itself.
pub trait Probe {
    /// One pass over prefix and forced tokens.
    ///
    /// # Errors
    /// The device failed; as for every other method.
    fn llm(&mut self, prefix: &[Embed], forced: &[u32]) -> Result<LlmProbe, SynthError>;

    /// One sequence from the cache, fed as `feed` says.
    ///
    /// # Errors
    /// The device failed.
    fn llm_feed(&mut self, feed: Feed<'_>) -> Result<(), SynthError>;

    /// Token by token from the cache: scores go to `choose`, what it returns is fed.
    ///
    /// # Errors
    /// The device failed.
    fn llm_decode(&mut self, prefix: &[Embed], choose: Choose<'_>) -> Result<Vec<u32>, SynthError> {
        let mut ids = Vec::new();
        self.llm_feed(&mut |scores| match scores {
            None => Some(prefix.to_vec()),
            Some(scores) => {
                let id = choose(scores, &ids)?;
                ids.push(id);
                Some(vec![Embed::Speech(id)])
            }
        })?;
        Ok(ids)
    }

    /// The solver's times.
    fn times(&self) -> Vec<f32>;

    /// The first `frames` columns of the fixed noise, `[mel, frames]`.
    ///
    /// # Errors
    /// The device failed.
    fn flow_noise(&mut self, frames: usize) -> Result<Values, SynthError>;

    /// Rotation angles, `[frames, head_dim]`, each pair doubled.
    fn angles(&self, frames: usize) -> Option<Values>;

    /// A raw speaker vector normalised and projected.
    ///
    /// # Errors
    /// The device failed.
    fn speaker(&mut self, raw: &[f32]) -> Result<Option<Values>, SynthError>;

    /// The pre-lookahead layer over `tokens`, `[outputs, input]`. With `last`, zeros follow the last token; else
    /// the newest ones are context only.
    ///
    /// # Errors
    /// The device failed.
    fn look_ahead(&mut self, tokens: &[u32], last: bool) -> Result<Option<Values>, SynthError>;

    /// One evaluation of the estimator.
    ///
    /// # Errors
    /// The device failed.
    fn dit(&mut self, input: &DitInput) -> Result<DitProbe, SynthError>;

    /// Mel of a whole utterance in one call, `[frames, mel]`, with full attention or the chunk-causal mask.
    ///
    /// # Errors
    /// The device failed.
    fn mel(&mut self, prompt: &FlowPrompt, tokens: &[u32], streaming: bool) -> Result<Values, SynthError>;

    /// Mel by pushes that end after `cuts` tokens, the last of them final: `[frames, mel]` joined.
    ///
    /// # Errors
    /// The device failed.
    fn mel_chunks(
        &mut self,
        prompt: &FlowPrompt,
        tokens: &[u32],
        cuts: &[usize],
        end: FinalChunk,
    ) -> Result<Values, SynthError>;

    /// Whether [`Self::mel_chunks`] takes cuts inside a static block, which the original's fixed hop makes where the
    /// block is of another length. Frames of a cut block are solved again when its rest is there.
    fn cuts_blocks(&self) -> bool {
        false
    }

    /// `mel` (`[frames, mel]`) at another speed.
    ///
    /// # Errors
    /// The device failed.
    fn respeed(&mut self, mel: &Values, speed: f32) -> Result<Values, SynthError>;

    /// The vocoder over a whole mel `[frames, mel]`; without `last` only what is exact so far.
    ///
    /// # Errors
    /// The device failed.
    fn hift(&mut self, mel: &Values, last: bool) -> Result<HiftProbe, SynthError>;

    /// The vocoder over pieces of a mel that end after `cuts` frames: the waveform.
    ///
    /// # Errors
    /// The device failed.
    fn hift_chunks(&mut self, mel: &Values, cuts: &[usize]) -> Result<Values, SynthError>;
}
