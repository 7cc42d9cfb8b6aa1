//! A voice on disk: `voices/NAME.safetensors`, what enrolment makes and CosyVoice3 speaks with.
//!
//! Tensors: `tokens` u32 `[n]`, `mel` f32 `[2n, bins]` (natural log, 50 frames a second), `speaker` f32 `[d]`
//! (raw, not normalised). Everything else travels as safetensors metadata (strings).

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors, TensorView};

/// What a voice prompt consists of.
#[derive(Clone, Debug, PartialEq)]
pub struct Voice {
    /// What was said in the recording, without system text; empty when unknown.
    pub transcript: String,
    /// Speech tokens of the recording, 25 a second.
    pub tokens: Vec<u32>,
    /// Mel frames, row-major `[2 * tokens.len(), mel_bins]`.
    pub mel: Vec<f32>,
    /// Mel channels.
    pub mel_bins: usize,
    /// Speaker vector as the speaker encoder gives it.
    pub speaker: Vec<f32>,
    /// How the voice was made: free keys such as `created`, `consent`, `source_sha256`, `sample_rate`.
    pub notes: BTreeMap<String, String>,
}

/// Why a voice file cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VoiceFileError {
    /// Reading or writing failed.
    #[error("{path}: {source}")]
    Io {
        /// Which file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// Not a safetensors file.
    #[error("{path}: not a voice file: {reason}")]
    Format {
        /// Which file.
        path: String,
        /// What is wrong.
        reason: String,
    },
}

const TRANSCRIPT: &str = "transcript";
const FORMAT: &str = "antiphon_voice";
const FORMAT_VERSION: &str = "1";
/// A voice of 30 s is about 0.6 MB; a file far larger is something else.
const MAX_BYTES: u64 = 16 << 20;

impl Voice {
    /// Reads a voice file.
    ///
    /// # Errors
    /// The file cannot be read, is no safetensors file, or its tensors do not fit together.
    pub fn load(path: &Path) -> Result<Self, VoiceFileError> {
        let format = |reason: String| VoiceFileError::Format { path: path.display().to_string(), reason };
        let io = |source| VoiceFileError::Io { path: path.display().to_string(), source };
        let size = std::fs::metadata(path).map_err(io)?.len();
        if size > MAX_BYTES {
            return Err(format(format!("{size} bytes is more than a voice can have ({MAX_BYTES})")));
        }
        let bytes = std::fs::read(path).map_err(io)?;
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|e| format(e.to_string()))?;
        let mut notes: BTreeMap<String, String> = header.metadata().clone().unwrap_or_default().into_iter().collect();
        let version = notes.remove(FORMAT);
        if version.as_deref() != Some(FORMAT_VERSION) {
            return Err(format(format!("`{FORMAT}` is {version:?} in its metadata, expected {FORMAT_VERSION:?}")));
        }
        let transcript = notes.remove(TRANSCRIPT).unwrap_or_default();
        let tensors = SafeTensors::deserialize(&bytes).map_err(|e| format(e.to_string()))?;
        let tokens = view(&tensors, "tokens", Dtype::U32, 1).map_err(format)?;
        let mel = view(&tensors, "mel", Dtype::F32, 2).map_err(format)?;
        let speaker = view(&tensors, "speaker", Dtype::F32, 1).map_err(format)?;
        if mel.shape()[0] != 2 * tokens.shape()[0] {
            return Err(format(format!(
                "{} mel frames for {} tokens, expected two a token",
                mel.shape()[0],
                tokens.shape()[0]
            )));
        }
        let voice = Self {
            transcript,
            tokens: words(tokens.data()).map(u32::from_le_bytes).collect(),
            mel: words(mel.data()).map(f32::from_le_bytes).collect(),
            mel_bins: mel.shape()[1],
            speaker: words(speaker.data()).map(f32::from_le_bytes).collect(),
            notes,
        };
        if voice.mel.iter().chain(&voice.speaker).any(|v| !v.is_finite()) {
            return Err(format("a mel or speaker value is not a finite number".into()));
        }
        Ok(voice)
    }

    /// The file's bytes. The same voice always gives the same bytes.
    ///
    /// # Panics
    /// If `mel` is not `2 * tokens.len()` rows of `mel_bins`.
    pub fn to_bytes(&self) -> Vec<u8> {
        let frames = 2 * self.tokens.len();
        assert_eq!(self.mel.len(), frames * self.mel_bins, "two mel frames a token");
        let tokens: Vec<u8> = self.tokens.iter().flat_map(|v| v.to_le_bytes()).collect();
        let mel: Vec<u8> = self.mel.iter().flat_map(|v| v.to_le_bytes()).collect();
        let speaker: Vec<u8> = self.speaker.iter().flat_map(|v| v.to_le_bytes()).collect();
        let tensors = [
            ("mel", TensorView::new(Dtype::F32, vec![frames, self.mel_bins], &mel)),
            ("speaker", TensorView::new(Dtype::F32, vec![self.speaker.len()], &speaker)),
            ("tokens", TensorView::new(Dtype::U32, vec![self.tokens.len()], &tokens)),
        ]
        .map(|(name, view)| (name, view.expect("length equals shape by construction")));
        let mut notes: HashMap<String, String> = self.notes.clone().into_iter().collect();
        notes.insert(FORMAT.into(), FORMAT_VERSION.into());
        notes.insert(TRANSCRIPT.into(), self.transcript.clone());
        safetensors::serialize(tensors, Some(notes)).expect("three well-formed tensors")
    }
}

fn view<'a>(tensors: &SafeTensors<'a>, name: &str, dtype: Dtype, rank: usize) -> Result<TensorView<'a>, String> {
    let view = tensors.tensor(name).map_err(|_| format!("tensor `{name}` is missing"))?;
    if view.dtype() != dtype || view.shape().len() != rank || view.shape().contains(&0) {
        return Err(format!(
            "tensor `{name}` is {:?} {:?}, expected {dtype:?} of rank {rank}",
            view.dtype(),
            view.shape()
        ));
    }
    Ok(view)
}

fn words(bytes: &[u8]) -> impl Iterator<Item = [u8; 4]> {
    bytes.chunks_exact(4).map(|c| [c[0], c[1], c[2], c[3]])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Voice {
        Voice {
            transcript: "hello".into(),
            tokens: vec![1, 2, 3],
            mel: (0..12).map(|v| v as f32 / 7.0).collect(),
            mel_bins: 2,
            speaker: vec![0.5, -0.25],
            notes: BTreeMap::from([("created".into(), "today".into())]),
        }
    }

    #[test]
    fn a_voice_survives_the_disk() {
        let dir = tempfile::tempdir().expect("temp dir");
        let path = dir.path().join("v.safetensors");
        std::fs::write(&path, sample().to_bytes()).expect("write");
        assert_eq!(Voice::load(&path).expect("load"), sample());
    }

    #[test]
    fn every_truncation_is_an_error() {
        let dir = tempfile::tempdir().expect("temp dir");
        let path = dir.path().join("v.safetensors");
        let bytes = sample().to_bytes();
        for len in 0..bytes.len() {
            std::fs::write(&path, &bytes[..len]).expect("write");
            assert!(Voice::load(&path).is_err(), "{len} of {} bytes", bytes.len());
        }
    }
}
