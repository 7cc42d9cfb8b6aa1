//! Which voices speak: from `[engine]` to loaders, with a line for the log that says why.

use crate::config::{Engine as EngineConfig, EngineKind};
use crate::synth::SynthError;
use crate::synth::cosyvoice::backend::{FinalChunk, Options};
use crate::synth::cosyvoice::gpu::{self, Precision};
use crate::synth::cosyvoice::{CosyVoice, Settings};
use crate::synth::device::Loader;
use crate::synth::espeak::{self, Espeak};
use crate::synth::tone::Tone;

/// What was chosen.
pub struct Choice {
    /// One a device.
    pub loaders: Vec<Loader>,
    /// For the log: what speaks, and why.
    pub reasons: Vec<String>,
}

/// The engines of a configuration.
///
/// # Errors
/// What was asked for by name is not there.
pub fn choose(config: &EngineConfig) -> Result<Choice, SynthError> {
    choose_with(config, None)
}

/// As [`choose`]; every CosyVoice3 utterance has `tokens` speech tokens, whatever it decodes: random weights
/// never end by themselves, and measurements want equal work.
///
/// # Errors
/// What was asked for by name is not there.
pub fn choose_with(config: &EngineConfig, tokens: Option<u32>) -> Result<Choice, SynthError> {
    match config.kind {
        EngineKind::Tone => Ok(tone("[engine] kind = \"tone\"".into())),
        EngineKind::Espeak => spoken(config),
        EngineKind::Cosyvoice3 => neural(config, tokens),
        EngineKind::Auto => match &config.model {
            Some(_) => neural(config, tokens),
            None => match spoken(config) {
                Ok(choice) => Ok(choice),
                Err(error) => Ok(tone(format!("no voice but the placeholder tone: {error}"))),
            },
        },
    }
}

fn tone(reason: String) -> Choice {
    let loader: Loader = Box::new(|| Ok(Box::new(Tone::new())));
    Choice { loaders: vec![loader], reasons: vec![reason] }
}

fn spoken(config: &EngineConfig) -> Result<Choice, SynthError> {
    let mut settings = espeak::Config::default();
    if let Some(voice) = &config.voice {
        settings.voice.clone_from(voice);
    }
    // Made here rather than on the device thread, so that a missing program is known before anything starts.
    let espeak = Espeak::new(settings)?;
    let loader: Loader = Box::new(|| Ok(Box::new(espeak)));
    Ok(Choice { loaders: vec![loader], reasons: vec!["espeak-ng speaks".into()] })
}

fn neural(config: &EngineConfig, tokens: Option<u32>) -> Result<Choice, SynthError> {
    let Some(model) = config.model.clone() else {
        return Err(SynthError::Input("CosyVoice3 needs [engine] model, the checkpoint directory".into()));
    };
    let (places, reason) = places(&config.device)?;
    let options = Options {
        llm: config.llm.parse().map_err(|e| SynthError::Input(format!("[engine] llm: {e}")))?,
        final_chunk: if config.final_chunk == "reference" { FinalChunk::Reference } else { FinalChunk::Causal },
        ..Options::default()
    };
    let settings = Settings {
        voice_dirs: vec![config.voices.clone()],
        default_voice: config.voice.clone(),
        ..Settings::default()
    };
    let precision = if config.dtype == "f32" { Precision::EXACT } else { Precision::default() };
    let loaders = places.into_iter().map(|place| {
        let (model, options, settings) = (model.clone(), options.clone(), settings.clone());
        let loader: Loader = Box::new(move || match place {
            Place::Cpu => {
                let mut voice = CosyVoice::load_cpu(&model, options, settings)?;
                voice.force_length(tokens);
                Ok(Box::new(voice))
            }
            Place::Cuda(ordinal) => {
                let mut voice = CosyVoice::load_gpu(&model, ordinal, options, precision, settings)?;
                voice.force_length(tokens);
                Ok(Box::new(voice))
            }
        });
        loader
    });
    Ok(Choice { loaders: loaders.collect(), reasons: vec![reason] })
}

/// Where a network computes.
enum Place {
    Cpu,
    Cuda(u32),
}

/// The devices that `[engine] device` means, and why.
fn places(device: &str) -> Result<(Vec<Place>, String), SynthError> {
    if device == "cpu" {
        return Ok((vec![Place::Cpu], "CosyVoice3 on the CPU, as configured".into()));
    }
    let count = match gpu::absent() {
        None => gpu::count(),
        Some(why) if device == "auto" => return Ok((vec![Place::Cpu], format!("CosyVoice3 on the CPU: {why}"))),
        Some(why) => return Err(SynthError::Device(format!("[engine] device = \"{device}\": {why}"))),
    };
    if let Some(ordinal) = device.strip_prefix("cuda:").and_then(|n| n.parse::<u32>().ok()) {
        if ordinal >= count {
            let message = format!("[engine] device = \"{device}\": there are {count} GPUs, numbered from 0");
            return Err(SynthError::Device(message));
        }
        return Ok((vec![Place::Cuda(ordinal)], format!("CosyVoice3 on GPU {ordinal}")));
    }
    Ok(((0..count).map(Place::Cuda).collect(), format!("CosyVoice3 on {count} GPU(s)")))
}
