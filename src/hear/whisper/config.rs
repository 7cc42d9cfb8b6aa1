//! The sizes and rules of a checkpoint: `config.json`, `generation_config.json` and `preprocessor_config.json` of a
//! Hugging Face directory.
//!
//! Everything comes from outside: sizes are bounded before anything is allocated by them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Samples per second that the model hears.
pub const RATE: usize = 16_000;
/// Samples from one frame of features to the next.
pub const HOP: usize = 160;
/// Samples of one frame's window.
const WINDOW: usize = 400;
/// No published checkpoint is near this; it bounds what a file can make us allocate.
const MAX_WIDTH: usize = 8_192;
/// As [`MAX_WIDTH`], for layers.
const MAX_LAYERS: usize = 128;
/// As [`MAX_WIDTH`], for positions and entries of the vocabulary.
const MAX_ENTRIES: usize = 1 << 20;

/// Why a checkpoint cannot be used. The text names the file and what is wrong with it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// A file is missing or cannot be read.
    #[error("{path}: {reason}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A tensor is missing or has another shape.
    #[error("tensor `{name}`: expected {expected}, found {found}")]
    Tensor {
        /// Its name.
        name: String,
        /// The shape that the sizes ask for.
        expected: String,
        /// What is there.
        found: String,
    },
    /// The device failed.
    #[error("device: {0}")]
    Device(#[from] candle_core::Error),
}

impl LoadError {
    pub(super) fn file(path: &Path, reason: impl ToString) -> Self {
        Self::File { path: path.to_owned(), reason: reason.to_string() }
    }
}

/// Sizes of the network: `config.json`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Sizes {
    /// Width of every layer.
    pub d_model: usize,
    /// Layers of the encoder.
    pub encoder_layers: usize,
    /// Attention heads of the encoder.
    pub encoder_attention_heads: usize,
    /// Inner width of the encoder's feed-forward parts.
    pub encoder_ffn_dim: usize,
    /// Layers of the decoder.
    pub decoder_layers: usize,
    /// Attention heads of the decoder.
    pub decoder_attention_heads: usize,
    /// Inner width of the decoder's feed-forward parts.
    pub decoder_ffn_dim: usize,
    /// Bands of the features.
    pub num_mel_bins: usize,
    /// Positions of the encoder: half the frames of one window.
    pub max_source_positions: usize,
    /// Positions of the decoder: the longest prompt and text together.
    pub max_target_positions: usize,
    /// Entries of the vocabulary.
    pub vocab_size: usize,
    /// Whether token vectors are multiplied by the root of the width.
    #[serde(default)]
    pub scale_embedding: bool,
    #[serde(default = "gelu")]
    activation_function: String,
    model_type: String,
}

fn gelu() -> String {
    "gelu".into()
}

/// Ids and rules of decoding: `generation_config.json`, or the same keys of `config.json`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub(super) struct Generation {
    pub(super) decoder_start_token_id: Option<u32>,
    pub(super) eos_token_id: Option<u32>,
    pub(super) no_timestamps_token_id: Option<u32>,
    pub(super) is_multilingual: Option<bool>,
    pub(super) suppress_tokens: Option<Vec<i64>>,
    pub(super) begin_suppress_tokens: Option<Vec<i64>>,
    pub(super) lang_to_id: Option<BTreeMap<String, u32>>,
    pub(super) task_to_id: Option<BTreeMap<String, u32>>,
    pub(super) max_initial_timestamp_index: Option<u32>,
}

#[derive(Deserialize)]
struct Preprocessor {
    #[serde(default = "thirty")]
    chunk_length: usize,
    feature_size: usize,
    hop_length: usize,
    n_fft: usize,
    sampling_rate: usize,
}

fn thirty() -> usize {
    30
}

/// A checkpoint's files, read and checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Sizes of the network.
    pub sizes: Sizes,
    pub(super) generation: Generation,
    /// Samples of one window: 30 s.
    pub window: usize,
}

impl Config {
    /// Reads the three files of `dir`; only `config.json` must be there.
    ///
    /// # Errors
    /// A file cannot be read, is no Whisper configuration, or asks for something that is not supported.
    pub fn load(dir: &Path) -> Result<Self, LoadError> {
        let path = dir.join("config.json");
        let sizes: Sizes = read(&path)?;
        sizes.check().map_err(|reason| LoadError::file(&path, reason))?;
        let mut generation: Generation = read(&path)?;
        let path = dir.join("generation_config.json");
        if path.is_file() {
            generation = read::<Generation>(&path)?.or(generation);
        }
        let path = dir.join("preprocessor_config.json");
        let mut seconds = thirty();
        if path.is_file() {
            let found: Preprocessor = read(&path)?;
            let wrong = |key: &str, found: usize, wanted: usize| {
                Err(LoadError::file(&path, format!("`{key}` is {found}; only {wanted} is supported")))
            };
            for (key, found, wanted) in [
                ("hop_length", found.hop_length, HOP),
                ("n_fft", found.n_fft, WINDOW),
                ("sampling_rate", found.sampling_rate, RATE),
                ("feature_size", found.feature_size, sizes.num_mel_bins),
            ] {
                if found != wanted {
                    return wrong(key, found, wanted);
                }
            }
            seconds = found.chunk_length;
        }
        // Two frames a position: the second convolution halves them.
        if seconds * RATE != sizes.max_source_positions * 2 * HOP {
            let reason = format!(
                "a window of {seconds} s has {} positions, config.json says `max_source_positions` {}",
                seconds * RATE / HOP / 2,
                sizes.max_source_positions
            );
            return Err(LoadError::file(&path, reason));
        }
        Ok(Self { sizes, generation, window: seconds * RATE })
    }
}

impl Sizes {
    /// Frames of one window.
    pub fn frames(&self) -> usize {
        self.max_source_positions * 2
    }

    fn check(&self) -> Result<(), String> {
        if self.model_type != "whisper" {
            return Err(format!("`model_type` is \"{}\", not \"whisper\"", self.model_type));
        }
        if self.activation_function != "gelu" {
            return Err(format!("`activation_function` is \"{}\"; only gelu is supported", self.activation_function));
        }
        for (key, value, most) in [
            ("d_model", self.d_model, MAX_WIDTH),
            ("encoder_ffn_dim", self.encoder_ffn_dim, 8 * MAX_WIDTH),
            ("decoder_ffn_dim", self.decoder_ffn_dim, 8 * MAX_WIDTH),
            ("num_mel_bins", self.num_mel_bins, 256),
            ("encoder_layers", self.encoder_layers, MAX_LAYERS),
            ("decoder_layers", self.decoder_layers, MAX_LAYERS),
            ("max_source_positions", self.max_source_positions, MAX_ENTRIES),
            ("max_target_positions", self.max_target_positions, MAX_ENTRIES),
            ("vocab_size", self.vocab_size, MAX_ENTRIES),
        ] {
            if !(1..=most).contains(&value) {
                return Err(format!("`{key}` is {value}: expected 1 to {most}"));
            }
        }
        for (key, heads) in [
            ("encoder_attention_heads", self.encoder_attention_heads),
            ("decoder_attention_heads", self.decoder_attention_heads),
        ] {
            if heads == 0 || !self.d_model.is_multiple_of(heads) {
                return Err(format!("`{key}` is {heads}, which does not divide `d_model` {}", self.d_model));
            }
        }
        Ok(())
    }
}

impl Generation {
    /// These keys, and where one is missing that of `other`.
    fn or(self, other: Self) -> Self {
        Self {
            decoder_start_token_id: self.decoder_start_token_id.or(other.decoder_start_token_id),
            eos_token_id: self.eos_token_id.or(other.eos_token_id),
            no_timestamps_token_id: self.no_timestamps_token_id.or(other.no_timestamps_token_id),
            is_multilingual: self.is_multilingual.or(other.is_multilingual),
            suppress_tokens: self.suppress_tokens.or(other.suppress_tokens),
            begin_suppress_tokens: self.begin_suppress_tokens.or(other.begin_suppress_tokens),
            lang_to_id: self.lang_to_id.or(other.lang_to_id),
            task_to_id: self.task_to_id.or(other.task_to_id),
            max_initial_timestamp_index: self.max_initial_timestamp_index.or(other.max_initial_timestamp_index),
        }
    }
}

/// Whether `dir` holds a Whisper configuration, of whatever sizes.
pub fn is_checkpoint(dir: &Path) -> bool {
    #[derive(Deserialize)]
    struct Kind {
        model_type: String,
    }
    read::<Kind>(&dir.join("config.json")).is_ok_and(|kind| kind.model_type == "whisper")
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<T, LoadError> {
    let text = std::fs::read_to_string(path).map_err(|e| LoadError::file(path, e))?;
    serde_json::from_str(&text).map_err(|e| LoadError::file(path, e))
}
