//! Whisper on the CPU, as the reference computes it: sound to text.
//!
//! Reads the directory of a Hugging Face checkpoint (`openai/whisper-*`, tiny to large-v3-turbo). One [`Whisper`]
//! serves all calls; what a recognition needs besides the weights lives as long as the recognition.
//!
//! Contract: the numbers are those of `transformers` within the tolerances of [`selftest`]; a text that the model
//! made up is dropped ([`Suppressed`]) and never given out as speech.

pub mod config;
pub mod convert;
mod decode;
mod features;
mod layers;
mod network;
mod quality;
mod rules;
pub mod selftest;
mod stop;
#[cfg(test)]
mod tests;
mod tokens;
pub mod verify;

use std::path::Path;

use candle_core::{Device, Tensor};

pub use config::{LoadError, RATE, is_checkpoint};
pub use decode::{Options, Segment, Transcript};
pub use quality::{Limits, Suppressed};
pub use stop::Stop;

use config::Config;
use layers::Weights;
use network::{Decoder, Encoder};
use tokens::Tokens;

use crate::voice::features::Matrix;

/// Why a recognition failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HearError {
    /// The device failed.
    #[error("device: {0}")]
    Device(#[from] candle_core::Error),
    /// The model does not know the language.
    #[error("the model does not know the language `{0}`")]
    Language(String),
    /// The window of the checkpoint is too short for any features.
    #[error(transparent)]
    Features(#[from] crate::voice::features::TooShort),
}

/// A checkpoint in memory. Threads may share it.
pub struct Whisper {
    config: Config,
    tokens: Tokens,
    encoder: Encoder,
    decoder: Decoder,
}

impl Whisper {
    /// Reads the checkpoint in `dir`: sizes, vocabulary and weights, which become `f32`.
    ///
    /// # Errors
    /// The first thing that is missing or does not fit; `antiphon model verify` tells all of them.
    pub fn load(dir: &Path) -> Result<Self, LoadError> {
        let config = Config::load(dir)?;
        let tokens = Tokens::load(dir, &config)?;
        let mut weights = Weights::read(&dir.join(verify::WEIGHTS))?;
        let encoder = Encoder::load(&mut weights, &config.sizes)?;
        let decoder = Decoder::load(&mut weights, &config.sizes)?;
        Ok(Self { config, tokens, encoder, decoder })
    }

    /// Whether it can be told to expect this language (a BCP 47 tag). A model of one language knows English.
    pub fn knows(&self, language: &str) -> bool {
        match self.tokens.languages.is_empty() {
            true => language.split(['-', '_']).next().is_some_and(|code| code.eq_ignore_ascii_case("en")),
            false => self.tokens.language(language).is_some(),
        }
    }

    /// The language of models that know only one.
    pub fn only_language(&self) -> Option<&'static str> {
        self.tokens.languages.is_empty().then_some("en")
    }

    /// What the encoder makes of one window; `None` when stopped.
    fn listen(&self, samples: &[f32], stop: &Stop) -> Result<Option<Tensor>, HearError> {
        let features = features::log_mel(samples, self.config.sizes.num_mel_bins, self.config.window)?;
        Ok(self.encoder.forward(&tensor(features)?, stop)?)
    }
}

impl std::fmt::Debug for Whisper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Whisper").field("sizes", &self.config.sizes).finish_non_exhaustive()
    }
}

fn tensor(matrix: Matrix) -> candle_core::Result<Tensor> {
    Tensor::from_vec(matrix.data, (matrix.rows, matrix.cols), &Device::Cpu)
}
