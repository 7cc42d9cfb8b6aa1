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
    /// The default voice, where it is not what speaks anyway: for agents with `overload = "default_voice"`.
    pub fallback: Option<Loader>,
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
    Choice { loaders: vec![loader], fallback: None, reasons: vec![reason] }
}

fn spoken(config: &EngineConfig) -> Result<Choice, SynthError> {
    let mut settings = espeak::Config::default();
    if let Some(voice) = &config.voice {
        settings.voice.clone_from(voice);
    }
    // Tried here, not only on the device thread, so that a missing program is known before anything starts.
    drop(Espeak::new(settings.clone())?);
    let loader: Loader = Box::new(move || Ok(Box::new(Espeak::new(settings.clone())?)));
    Ok(Choice { loaders: vec![loader], fallback: None, reasons: vec!["espeak-ng speaks".into()] })
}

fn neural(config: &EngineConfig, tokens: Option<u32>) -> Result<Choice, SynthError> {
    let Some(model) = config.model.clone() else {
        return Err(SynthError::Input("CosyVoice3 needs [engine] model, the checkpoint directory".into()));
    };
    let (devices, reason) = devices(&config.device, gpu::absent(), gpu::count())?;
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
    let loaders = devices.into_iter().map(|device| {
        let (model, options, settings) = (model.clone(), options.clone(), settings.clone());
        let loader: Loader = Box::new(move || match device {
            Device::Cpu => {
                let mut voice = CosyVoice::load_cpu(&model, options.clone(), settings.clone())?;
                voice.force_length(tokens);
                Ok(Box::new(voice))
            }
            Device::Cuda(ordinal) => {
                let mut voice = CosyVoice::load_gpu(&model, ordinal, options.clone(), precision, settings.clone())?;
                voice.force_length(tokens);
                Ok(Box::new(voice))
            }
        });
        loader
    });
    let mut reasons = vec![reason];
    // The default voice needs neither model nor device; it is loaded only where an agent wants it.
    let fallback = Espeak::new(espeak::Config::default()).map(|_| {
        let loader: Loader = Box::new(|| Ok(Box::new(Espeak::new(espeak::Config::default())?)));
        loader
    });
    if let Err(error) = &fallback {
        reasons.push(format!("there is no fallback voice where CosyVoice3 cannot speak: {error}"));
    }
    Ok(Choice { loaders: loaders.collect(), fallback: fallback.ok(), reasons })
}

/// Where a network computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Device {
    Cpu,
    Cuda(u32),
}

/// The devices that `[engine] device` means, and why. `absent`: why there is no GPU; `count`: how many there are.
fn devices(device: &str, absent: Option<String>, count: u32) -> Result<(Vec<Device>, String), SynthError> {
    if device == "cpu" {
        return Ok((vec![Device::Cpu], "CosyVoice3 on the CPU, as configured".into()));
    }
    let one = device.strip_prefix("cuda:").and_then(|n| n.parse::<u32>().ok());
    if one.is_none() && !["auto", "cuda:all"].contains(&device) {
        let message = format!("[engine] device = \"{device}\": say \"auto\", \"cpu\", \"cuda:all\" or \"cuda:0\"");
        return Err(SynthError::Input(message));
    }
    match absent {
        None => {}
        Some(why) if device == "auto" => return Ok((vec![Device::Cpu], format!("CosyVoice3 on the CPU: {why}"))),
        Some(why) => return Err(SynthError::Device(format!("[engine] device = \"{device}\": {why}"))),
    }
    match one {
        Some(ordinal) if ordinal >= count => {
            let message = format!("[engine] device = \"{device}\": there are {count} GPUs, numbered from 0");
            Err(SynthError::Device(message))
        }
        Some(ordinal) => Ok((vec![Device::Cuda(ordinal)], format!("CosyVoice3 on GPU {ordinal}"))),
        None => Ok(((0..count).map(Device::Cuda).collect(), format!("CosyVoice3 on {count} GPU(s)"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_takes_every_gpu_and_without_one_says_in_a_line_why_it_is_on_the_cpu() {
        let (found, reason) = devices("auto", None, 3).expect("three");
        assert_eq!(found, [Device::Cuda(0), Device::Cuda(1), Device::Cuda(2)]);
        assert!(reason.contains("3 GPU"));
        let (found, reason) = devices("auto", Some("no GPU engine: no driver".into()), 0).expect("the CPU");
        assert_eq!((found, reason.as_str()), (vec![Device::Cpu], "CosyVoice3 on the CPU: no GPU engine: no driver"));
        assert_eq!(reason.lines().count(), 1);
        assert_eq!(devices("cuda:1", None, 2).expect("the second").0, [Device::Cuda(1)]);
        assert_eq!(devices("cuda:all", None, 2).expect("both").0.len(), 2);
    }

    #[test]
    fn what_is_not_there_or_not_a_device_is_refused_by_name() {
        for (device, absent, count) in [
            ("cuda:2", None, 2),
            ("cuda:0", Some("no driver".into()), 0),
            ("cuda:all", Some("no driver".into()), 0),
            ("gpu", None, 1),
            ("cuda:x", None, 1),
        ] {
            let error = devices(device, absent, count).expect_err("refused").to_string();
            assert!(error.contains(device), "{error}");
        }
    }
}
