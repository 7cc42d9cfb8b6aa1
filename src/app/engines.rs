//! Which voices speak: from `[engine]` to loaders, with a line for the log that says why.

use std::path::Path;

use crate::config::{Engine as EngineConfig, EngineKind};
use crate::synth::SynthError;
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
    match config.kind {
        EngineKind::Tone => Ok(tone("[engine] kind = \"tone\"".into())),
        EngineKind::Espeak => spoken(config),
        EngineKind::Cosyvoice3 => neural(config),
        EngineKind::Auto => match &config.model {
            Some(_) => neural(config),
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

fn neural(config: &EngineConfig) -> Result<Choice, SynthError> {
    let Some(model) = &config.model else {
        return Err(SynthError::Input("CosyVoice3 needs [engine] model, the checkpoint directory".into()));
    };
    Err(SynthError::Device(format!("{}: this build cannot load CosyVoice3 yet", Path::display(model))))
}
