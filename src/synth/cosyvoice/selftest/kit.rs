//! The files of a kit.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::noise_of;
use crate::synth::SynthError;
use crate::synth::cosyvoice::backend::{FlowPrompt, SineNoise};
use crate::synth::cosyvoice::checkpoint::{Checkpoint, CheckpointError, TensorFile};
use crate::synth::cosyvoice::config::{Config, ConfigError};
use crate::synth::cosyvoice::pickle::Element;
use crate::synth::cosyvoice::probe::Values;
use crate::synth::cosyvoice::text::Tokenizer;

/// Why a kit cannot be run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KitError {
    /// A tensor file is missing or damaged.
    #[error(transparent)]
    Tensors(#[from] CheckpointError),
    /// The sizes cannot be read.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Another file is missing or damaged.
    #[error("{path}: {reason}")]
    File {
        /// Which file.
        path: String,
        /// What is wrong.
        reason: String,
    },
    /// A tensor that comparisons start from is not there.
    #[error("{file}.safetensors: `{name}` is absent")]
    Absent {
        /// Which file.
        file: &'static str,
        /// Which tensor.
        name: String,
    },
    /// The device failed.
    #[error(transparent)]
    Device(#[from] SynthError),
}

/// A kit on disk.
pub struct Kit {
    dir: PathBuf,
    files: BTreeMap<&'static str, TensorFile>,
    pub(super) config: Config,
    pub(super) checkpoint: Checkpoint,
}

const FILES: [&str; 5] = ["llm", "flow", "hift", "e2e", "native_noise_tiny"];

impl Kit {
    /// Opens a kit directory.
    ///
    /// # Errors
    /// Its checkpoint or one of its files cannot be read.
    pub fn open(dir: &Path) -> Result<Self, KitError> {
        let mut files = BTreeMap::new();
        for name in FILES {
            let path = dir.join(format!("{name}.safetensors"));
            if path.exists() {
                files.insert(name, TensorFile::open(&path)?);
            }
        }
        let checkpoint = dir.join("checkpoint");
        Ok(Self {
            dir: dir.to_path_buf(),
            files,
            config: Config::load(&checkpoint)?,
            checkpoint: Checkpoint::open(&checkpoint)?,
        })
    }

    /// Where its checkpoint lies.
    pub fn checkpoint_dir(&self) -> PathBuf {
        self.dir.join("checkpoint")
    }

    /// The table its vocoder outputs were made with.
    pub fn sine_noise(&self) -> SineNoise {
        self.find("hift", "noise_head").map_or(SineNoise::Native, |head| noise_of(&head.data))
    }

    /// A tensor of a file as floats, whatever its type; `None` if there is none.
    pub(super) fn find(&self, file: &str, name: &str) -> Option<Values> {
        let file = self.files.get(file)?;
        let stored = file.stored(name).ok()?;
        let data = match stored.element {
            Element::I64 | Element::I32 | Element::U8 => file.integers(name).ok()?.iter().map(|&v| v as f32).collect(),
            _ => file.floats(name, &stored.shape).ok()?,
        };
        Some(Values { shape: stored.shape.clone(), data })
    }

    /// Names in a file that begin with `prefix`, in order.
    pub(super) fn names(&self, file: &str, prefix: &str) -> Vec<String> {
        let all = self.files.get(file).into_iter().flat_map(TensorFile::entries);
        let mut names: Vec<String> = all.map(|(name, _)| name.to_string()).filter(|n| n.starts_with(prefix)).collect();
        names.sort();
        names
    }

    /// A tensor that a comparison needs as input.
    pub(super) fn input(&self, file: &'static str, name: &str) -> Result<Values, KitError> {
        self.find(file, name).ok_or_else(|| KitError::Absent { file, name: name.into() })
    }

    /// Whole numbers of an input.
    pub(super) fn ids(&self, file: &'static str, name: &str) -> Result<Vec<u32>, KitError> {
        Ok(self.input(file, name)?.data.iter().map(|&v| v as u32).collect())
    }

    /// The id that ends a prompt's instructions.
    pub(super) fn end_of_prompt(&self) -> Option<u32> {
        Tokenizer::load(&self.checkpoint_dir()).ok().map(|t| t.end_of_prompt())
    }

    /// Whether a file is there.
    pub(super) fn has(&self, file: &str) -> bool {
        self.files.contains_key(file)
    }

    /// The kit's voice.
    pub(super) fn prompt(&self) -> Result<FlowPrompt, KitError> {
        Ok(FlowPrompt {
            tokens: self.ids("flow", "prompt_token")?,
            mel: self.input("flow", "prompt_feat")?.data,
            speaker: self.input("flow", "embedding")?.data,
        })
    }

    /// A JSON file beside the tensors; `None` if there is none.
    pub(super) fn json(&self, name: &str) -> Result<Option<serde_json::Value>, KitError> {
        let path = self.dir.join(name);
        if !path.exists() {
            return Ok(None);
        }
        let fail = |reason: String| KitError::File { path: path.display().to_string(), reason };
        let text = std::fs::read_to_string(&path).map_err(|e| fail(e.to_string()))?;
        serde_json::from_str(&text).map(Some).map_err(|e| fail(e.to_string()))
    }
}
