//! Whisper as the reference computes it, on the CPU or a GPU: sound to text.
//!
//! Reads the directory of a Hugging Face checkpoint (`openai/whisper-*`, tiny to large-v3-turbo). One [`Whisper`]
//! serves all calls; what a recognition needs besides the weights lives as long as the recognition. [`decode`] is the same
//! for both kinds of [`engine`]: [`network`] on the CPU, and [`steps`], which many recognitions share, on [`gpu`].
//!
//! Contract: the numbers are those of `transformers` within the tolerances of [`selftest`]; a text that the model
//! made up is dropped ([`Suppressed`]) and never given out as speech.

mod beams;
pub mod config;
pub mod convert;
mod decode;
mod engine;
mod features;
pub mod gpu;
mod layers;
mod network;
mod quality;
pub mod rehearsal;
mod rules;
pub mod selftest;
mod steps;
mod stop;
#[cfg(test)]
mod tests;
mod tokens;
pub mod verify;

use std::path::Path;

pub use beams::BEAMS;
pub use config::{LoadError, RATE, is_checkpoint};
pub use decode::{Options, Segment, Transcript};
pub use quality::{Limits, Suppressed};
pub use stop::Stop;

use config::Config;
use engine::{Engine, Text};
use layers::Weights;
use network::Cpu;
use tokens::Tokens;

/// Why a recognition failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HearError {
    /// The device failed.
    #[error("device: {0}")]
    Device(#[from] candle_core::Error),
    /// The GPU failed, or is not there any more: what was begun on it is lost.
    #[error("the GPU: {0}")]
    Lost(String),
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
    engine: Box<dyn Engine>,
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
        let engine = Box::new(Cpu::load(&mut weights, &config.sizes)?);
        Ok(Self { config, tokens, engine })
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

    /// A text about one window, still empty; `None` when stopped.
    fn listen(&self, samples: &[f32], stop: &Stop) -> Result<Option<Box<dyn Text + '_>>, HearError> {
        let features = features::log_mel(samples, self.config.sizes.num_mel_bins, self.config.window)?;
        self.engine.hear(features, stop)
    }
}

impl std::fmt::Debug for Whisper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Whisper").field("sizes", &self.config.sizes).finish_non_exhaustive()
    }
}
