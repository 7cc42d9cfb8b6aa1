//! `antiphon model random DIR`: a checkpoint with random weights in the real layout.
//!
//! For measuring speed, and for tests, where the real files are not. Scales keep activations near one, F0 between
//! 10 and 250 Hz and the waveform near a speaking level, so that timing, sampling and voicing take usual paths.

mod files;

use std::io;
use std::path::Path;

use super::archive::{self, Tensor};
use super::checkpoint::Part;
use super::config::{BLANK, Config, ConfigError, YAML};
use super::layout::{self, Expected, LM_HEAD, TEXT_TABLE};
use crate::voice::file::Voice;

/// Which sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Size {
    /// The 0.5B model: 3.4 GB.
    Full,
    /// Small enough for a test: 3 MB.
    Tiny,
}

/// Why a checkpoint cannot be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RandomError {
    /// Writing failed.
    #[error("{path}: {source}")]
    Io {
        /// Which file.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// What was written cannot be read again.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// Prompt lengths of the random voices, speech tokens: one whose blocks end with it, and one that lacks ten tokens
/// to a block, so that speech can start after ten.
const VOICES: [(&str, usize); 2] = [("random", 75), ("random-k10", 65)];
/// At full size one more, of a recording of thirty seconds: the longest that anybody enrols.
const LONG_VOICE: (&str, usize) = ("random-30s", 750);

/// Writes a checkpoint directory; the same seed gives the same bytes. `progress` is told bytes written and in all.
///
/// # Errors
/// A file cannot be written.
pub fn write(dir: &Path, size: Size, seed: u64, mut progress: impl FnMut(u64, u64)) -> Result<(), RandomError> {
    write_texts(dir, size)?;
    let config = Config::load(dir)?;
    let all = layout::expected(&config);
    let total: u64 =
        all.iter().filter(|t| t.key != LM_HEAD).map(|t| 4 * t.shape.iter().product::<usize>() as u64).sum();
    let mut done = 0;
    for part in Part::ALL {
        let tensors: Vec<&Expected> = all.iter().filter(|t| t.part == part).collect();
        let mut storages: Vec<&Expected> = Vec::new();
        let mut entries = Vec::new();
        for &tensor in &tensors {
            let shared = (tensor.key == LM_HEAD && config.llm.tied)
                .then(|| storages.iter().position(|s| s.key == TEXT_TABLE))
                .flatten();
            let storage = shared.unwrap_or_else(|| {
                storages.push(tensor);
                storages.len() - 1
            });
            entries.push(Tensor { key: tensor.key.clone(), shape: tensor.shape.clone(), storage });
        }
        let path = dir.join(format!("{}.pt", part.stem()));
        let write = archive::write(&path, &entries, |storage, bytes| {
            fill(storages[storage], &config, seed, bytes);
            done += bytes.len() as u64;
            progress(done, total);
        });
        write.map_err(|source| RandomError::Io { path: path.display().to_string(), source })?;
    }
    let voices = dir.join("voices");
    folder(&voices)?;
    for (name, tokens) in VOICES.into_iter().chain((size == Size::Full).then_some(LONG_VOICE)) {
        save(&voices.join(format!("{name}.safetensors")), &voice(&config, name, tokens, seed).to_bytes())?;
    }
    Ok(())
}

/// Writes only the text files: the sizes and the tokenizer.
///
/// # Errors
/// A file cannot be written.
pub fn write_texts(dir: &Path, size: Size) -> Result<(), RandomError> {
    let blank = dir.join(BLANK);
    folder(&blank)?;
    save(&dir.join(YAML), files::yaml(size).as_bytes())?;
    for (name, text) in files::blank(size) {
        save(&blank.join(name), text.as_bytes())?;
    }
    Ok(())
}

fn save(path: &Path, bytes: &[u8]) -> Result<(), RandomError> {
    std::fs::write(path, bytes).map_err(|source| RandomError::Io { path: path.display().to_string(), source })
}

fn folder(path: &Path) -> Result<(), RandomError> {
    std::fs::create_dir_all(path).map_err(|source| RandomError::Io { path: path.display().to_string(), source })
}

/// A voice of random numbers.
pub fn voice(config: &Config, name: &str, tokens: usize, seed: u64) -> Voice {
    let mut numbers = Numbers::new(seed, name);
    let codebook = config.flow.vocab.min(config.llm.speech_tokens) as u64;
    let frames = tokens * config.token_mel_ratio;
    Voice {
        transcript: "The quick brown fox jumps over the lazy dog.".into(),
        tokens: (0..tokens).map(|_| (numbers.bits() % codebook) as u32).collect(),
        mel: (0..frames * config.flow.mel).map(|_| 1.6 * numbers.unit_variance()).collect(),
        mel_bins: config.flow.mel,
        speaker: (0..config.flow.speaker).map(|_| numbers.unit_variance()).collect(),
        notes: [("created".to_string(), "random".to_string())].into(),
    }
}

/// SplitMix64: one state, good enough for weights that mean nothing.
struct Numbers(u64);

impl Numbers {
    fn new(seed: u64, name: &str) -> Self {
        // FNV-1a, so that a tensor's values do not depend on the others.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        Self(hash ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    /// Uniform, mean zero, variance one.
    fn unit_variance(&mut self) -> f32 {
        const SPREAD: f32 = 3.464_101_6;
        ((self.bits() >> 40) as f32 / (1u32 << 24) as f32 - 0.5) * SPREAD
    }
}

fn fill(tensor: &Expected, config: &Config, seed: u64, bytes: &mut Vec<u8>) {
    let count: usize = tensor.shape.iter().product();
    bytes.reserve(4 * count);
    if tensor.key.ends_with("inv_freq") {
        for i in 0..count {
            let value = 1.0 / 10_000f32.powf(2.0 * i as f32 / config.flow.head_dim as f32);
            bytes.extend(value.to_le_bytes());
        }
        return;
    }
    let (mean, spread) = scale(tensor, config);
    let mut numbers = Numbers::new(seed, &tensor.key);
    for i in 0..count {
        let mut value = mean + spread * numbers.unit_variance();
        if tensor.key == "conv_post.bias" {
            // Magnitudes are exponentials: quiet ones make a speaking level.
            value += if i <= config.hift.n_fft / 2 { -1.5 } else { 0.0 };
        }
        bytes.extend(value.to_le_bytes());
    }
}

/// Mean and standard deviation of a tensor's values.
fn scale(tensor: &Expected, config: &Config) -> (f32, f32) {
    let key = tensor.key.as_str();
    let inputs = tensor.shape.iter().skip(1).product::<usize>().max(1) as f32;
    let plain = 1.0 / inputs.sqrt();
    let has = |part: &str| key.contains(part);
    if key == "f0_predictor.classifier.weight" {
        return (0.0, 60.0 * plain);
    }
    if key == "f0_predictor.classifier.bias" {
        return (130.0, 0.0);
    }
    if has("original0") {
        // Gains: what a unit-variance input comes out as.
        let gain = match () {
            () if has("convs2") => 0.3,
            () if has("convs1") => 0.7,
            () if has("conv_post") => 0.5,
            () if has("ups.") => 1.2,
            () => 1.0,
        };
        return (gain, 0.0);
    }
    if has("original1") || has("embed_tokens") || has("speech_embedding") || has("input_embedding") {
        return (0.0, 1.0);
    }
    if has("alpha") || has("layernorm") || has("model.norm") {
        return (1.0, 0.1);
    }
    if key.ends_with("bias") {
        return (0.0, 0.02);
    }
    if has("o_proj") || has("down_proj") {
        return (0.0, plain / (config.llm.layers as f32).sqrt());
    }
    if has("llm_decoder") || has("lm_head") {
        return (0.0, 1.7 * plain);
    }
    if has("attn_norm.linear") || has("norm_out.linear") {
        return (0.0, 0.5 * plain);
    }
    if has("spk_embed_affine") {
        return (0.0, 1.0);
    }
    (0.0, plain)
}
