//! A voice on disk: `voices/NAME.safetensors`, what enrolment makes and CosyVoice3 speaks with.
//!
//! Tensors: `tokens` u32 `[n]`, `mel` f32 `[2n, bins]` (natural log, 50 frames a second), `speaker` f32 `[d]`
//! (raw, not normalised). Everything else travels as safetensors metadata (strings), among it the
//! [`Voice::content_id`], which is checked on loading.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use sha2::{Digest, Sha256};

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
const CONTENT: &str = "content_sha256";
/// A voice of 30 s is about 0.6 MB; a file far larger is something else.
const MAX_BYTES: u64 = 16 << 20;

impl Voice {
    /// A small voice of two languages for tests: 0.68 s, each of its speech tokens `token`.
    #[cfg(test)]
    pub(super) fn of_token(token: u32) -> Self {
        Self {
            transcript: "hello".into(),
            tokens: vec![token; 17],
            mel: vec![0.5; 34 * 4],
            mel_bins: 4,
            speaker: vec![1.0],
            notes: BTreeMap::from([("languages".into(), "en,de".into())]),
        }
    }

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
        Self::parse(&std::fs::read(path).map_err(io)?, &path.display().to_string())
    }

    /// Reads the bytes of a voice file; `path` is for errors.
    ///
    /// # Errors
    /// They are no safetensors file, or its tensors do not fit together.
    pub fn parse(bytes: &[u8], path: &str) -> Result<Self, VoiceFileError> {
        let format = |reason: String| VoiceFileError::Format { path: path.to_owned(), reason };
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(|e| format(e.to_string()))?;
        let mut notes: BTreeMap<String, String> = header.metadata().clone().unwrap_or_default().into_iter().collect();
        let version = notes.remove(FORMAT);
        if version.as_deref() != Some(FORMAT_VERSION) {
            return Err(format(format!("`{FORMAT}` is {version:?} in its metadata, expected {FORMAT_VERSION:?}")));
        }
        let transcript = notes.remove(TRANSCRIPT).unwrap_or_default();
        let content = notes.remove(CONTENT);
        let tensors = SafeTensors::deserialize(bytes).map_err(|e| format(e.to_string()))?;
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
        if content.is_some_and(|content| content != voice.content_id()) {
            return Err(format("its content is not what was written; enrol the voice again".into()));
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
        let mut notes = self.notes.clone();
        notes.insert(FORMAT.into(), FORMAT_VERSION.into());
        notes.insert(CONTENT.into(), self.content_id());
        notes.insert(TRANSCRIPT.into(), self.transcript.clone());
        // Written here because the library keeps metadata in a hash map, whose order changes from run to run.
        let mut header = serde_json::Map::new();
        header.insert("__metadata__".into(), serde_json::json!(notes));
        let mut data = Vec::new();
        let mut add = |name: &str, dtype: &str, shape: &[usize], values: &mut dyn Iterator<Item = [u8; 4]>| {
            let start = data.len();
            data.extend(values.flatten());
            let entry = serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, data.len()] });
            header.insert(name.into(), entry);
        };
        add("mel", "F32", &[frames, self.mel_bins], &mut self.mel.iter().map(|v| v.to_le_bytes()));
        add("speaker", "F32", &[self.speaker.len()], &mut self.speaker.iter().map(|v| v.to_le_bytes()));
        add("tokens", "U32", &[self.tokens.len()], &mut self.tokens.iter().map(|v| v.to_le_bytes()));
        let mut header = serde_json::Value::Object(header).to_string().into_bytes();
        // Tensors start at a multiple of eight bytes.
        header.resize(header.len().next_multiple_of(8), b' ');
        [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()
    }

    /// What the voice is, as a SHA-256 in hexadecimal: of everything that changes how it speaks, and of nothing
    /// that only describes it. Whatever is computed from a voice can be kept under this key.
    pub fn content_id(&self) -> String {
        let mut hash = Sha256::new();
        let mut part = |bytes: &mut dyn Iterator<Item = [u8; 4]>| {
            let bytes: Vec<u8> = bytes.flatten().collect();
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(&bytes);
        };
        part(&mut self.tokens.iter().map(|v| v.to_le_bytes()));
        part(&mut self.mel.iter().map(|v| v.to_le_bytes()));
        part(&mut self.speaker.iter().map(|v| v.to_le_bytes()));
        hash.update(self.transcript.as_bytes());
        hex(&hash.finalize())
    }
}

/// Bytes in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
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
    fn the_same_voice_gives_the_same_bytes() {
        let mut voice = sample();
        voice.notes.extend((0..20).map(|i| (format!("note {i}"), "x".to_owned())));
        assert_eq!(voice.to_bytes(), voice.clone().to_bytes());
    }

    #[test]
    fn notes_do_not_change_what_a_voice_is() {
        let (plain, mut noted, mut other) = (sample(), sample(), sample());
        noted.notes.insert("consent".into(), "given".into());
        other.speaker[0] += 0.25;
        assert_eq!(plain.content_id(), noted.content_id());
        assert_ne!(plain.content_id(), other.content_id());
    }

    #[test]
    fn a_changed_value_is_noticed() {
        let dir = tempfile::tempdir().expect("temp dir");
        let path = dir.path().join("v.safetensors");
        let mut bytes = sample().to_bytes();
        let last = bytes.len() - 1;
        bytes[last - 3] ^= 1;
        std::fs::write(&path, &bytes).expect("write");
        assert!(Voice::load(&path).expect_err("changed").to_string().contains("not what was written"));
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
