//! The voices of a checkpoint: `voices/NAME.safetensors` in one or more folders, and `spk2info.pt`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::checkpoint::{CheckpointError, TensorFile, nested};
use super::config::Config;
use super::text::{END_OF_PROMPT, Tokenizer};
use crate::voice::file::Voice;

/// Saved voices of the original, in a checkpoint directory.
pub const SPK2INFO: &str = "spk2info.pt";

/// What a folder scan found.
#[derive(Debug, Default)]
pub struct Scan {
    /// Voices that are new or changed.
    pub changed: BTreeMap<String, Voice>,
    /// Names that are gone.
    pub removed: Vec<String>,
    /// Files that are no voices, and why.
    pub refused: Vec<String>,
}

/// Watches folders of voice files.
#[derive(Debug, Default)]
pub struct Folders {
    dirs: Vec<PathBuf>,
    known: BTreeMap<String, (PathBuf, Option<SystemTime>)>,
}

impl Folders {
    /// Looks in `dirs`; where two hold the same name the first wins. A folder need not exist.
    pub fn new(dirs: Vec<PathBuf>) -> Self {
        Self { dirs, known: BTreeMap::new() }
    }

    /// What changed since the last call.
    pub fn scan(&mut self, config: &Config) -> Scan {
        let mut scan = Scan::default();
        let mut found = BTreeMap::new();
        for dir in &self.dirs {
            let Ok(entries) = std::fs::read_dir(dir) else { continue };
            let mut paths: Vec<PathBuf> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
            paths.sort();
            for path in paths.into_iter().filter(|p| p.extension().is_some_and(|e| e == "safetensors")) {
                let Some(name) = path.file_stem().map(|s| s.to_string_lossy().into_owned()) else { continue };
                let stamp = std::fs::metadata(&path).and_then(|m| m.modified()).ok();
                found.entry(name).or_insert((path, stamp));
            }
        }
        for (name, entry) in &found {
            if self.known.get(name) == Some(entry) {
                continue;
            }
            match Voice::load(&entry.0).map_err(|e| e.to_string()).and_then(|v| fits(v, config)) {
                Ok(voice) => drop(scan.changed.insert(name.clone(), voice)),
                Err(reason) => scan.refused.push(format!("voice `{name}`: {reason}")),
            }
        }
        scan.removed = self.known.keys().filter(|k| !found.contains_key(*k)).cloned().collect();
        self.known = found;
        scan
    }
}

fn fits(voice: Voice, config: &Config) -> Result<Voice, String> {
    if voice.mel_bins != config.flow.mel {
        return Err(format!("its mel has {} channels, the model wants {}", voice.mel_bins, config.flow.mel));
    }
    if voice.speaker.len() != config.flow.speaker {
        return Err(format!(
            "its speaker vector has {} values, the model wants {}",
            voice.speaker.len(),
            config.flow.speaker
        ));
    }
    match voice.tokens.iter().find(|&&t| t as usize >= config.flow.vocab) {
        Some(token) => Err(format!("it holds speech token {token}, the model knows {}", config.flow.vocab)),
        None => Ok(voice),
    }
}

/// The zero-shot voices of a `spk2info.pt`, trimmed to two mel frames a token. What lacks a prompt (voices of older
/// models) is listed in the second result.
///
/// # Errors
/// The file cannot be read.
pub fn spk2info(
    path: &Path,
    tokenizer: &Tokenizer,
    config: &Config,
) -> Result<(BTreeMap<String, Voice>, Vec<String>), CheckpointError> {
    let mut voices = BTreeMap::new();
    let mut refused = Vec::new();
    for (name, file) in nested(path)? {
        let voice = saved(&file, tokenizer, config).map_err(|e| e.to_string()).and_then(|v| fits(v, config));
        match voice {
            Ok(voice) => drop(voices.insert(name, voice)),
            Err(reason) => refused.push(format!("voice `{name}`: {reason}")),
        }
    }
    Ok((voices, refused))
}

fn saved(file: &TensorFile, tokenizer: &Tokenizer, config: &Config) -> Result<Voice, CheckpointError> {
    let ids = |key: &str| -> Result<Vec<u32>, CheckpointError> {
        Ok(file.integers(key)?.into_iter().map(|v| u32::try_from(v).unwrap_or_default()).collect())
    };
    let mut tokens = ids("flow_prompt_speech_token")?;
    let shape = file.shape("prompt_speech_feat")?.to_vec();
    let mut mel = file.floats("prompt_speech_feat", &shape)?;
    let speaker_shape = file.shape("flow_embedding")?.to_vec();
    let speaker = file.floats("flow_embedding", &speaker_shape)?;
    let bins = config.flow.mel;
    let ratio = config.token_mel_ratio;
    let count = tokens.len().min(mel.len() / bins / ratio);
    tokens.truncate(count);
    mel.truncate(count * ratio * bins);
    let text = tokenizer.decode(&ids("prompt_text").unwrap_or_default());
    let transcript = text.rsplit(END_OF_PROMPT).next().unwrap_or_default().trim().to_string();
    let notes = [("created".to_string(), format!("from {SPK2INFO}"))].into();
    Ok(Voice { transcript, tokens, mel, mel_bins: bins, speaker, notes })
}
