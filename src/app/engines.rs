//! Which voices speak: from `[engine]` to loaders, with a line for the log that says why.
//!
//! What a device lacks is asked before anything is loaded. With `kind = "auto"` the default voice speaks where no GPU can
//! be used, also where that shows only while the model is loaded, or where another program holds it ([`or_spare`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::config::{Engine as EngineConfig, EngineKind};
use crate::synth::cosyvoice::backend::{FinalChunk, Hardware, MemoryLimit, Options, Products, TakenFor};
use crate::synth::cosyvoice::gpu::whisper::Seat;
use crate::synth::cosyvoice::gpu::{self, Precision};
use crate::synth::cosyvoice::{CosyVoice, Settings};
use crate::synth::device::Loader;
use crate::synth::espeak::{self, Espeak};
use crate::synth::tone::Tone;
use crate::synth::{Caps, SynthError, Synthesizer};
use crate::voice::copies;

/// What was chosen.
pub struct Choice {
    /// One a device.
    pub loaders: Vec<Loader>,
    /// The default voice, where it is not what speaks anyway: for agents with `overload = "default_voice"`.
    pub fallback: Option<Loader>,
    /// For the log: what speaks, and why.
    pub reasons: Vec<String>,
}

impl Choice {
    /// Whether a loaded voice with these `caps` speaks in place of what was chosen ([`or_spare`]).
    pub fn is_spare(&self, caps: &Caps) -> bool {
        self.fallback.is_some() && caps.name == espeak::NAME
    }
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
    choose_beside(config, tokens, &mut None)
}

/// As [`choose_with`]; a recogniser that wants a GPU sits beside the first voice that speaks on it, or on any where it names
/// none, and is taken out of `seat` then.
///
/// # Errors
/// What was asked for by name is not there.
pub fn choose_beside(
    config: &EngineConfig,
    tokens: Option<u32>,
    seat: &mut Option<(Seat, Option<u32>)>,
) -> Result<Choice, SynthError> {
    match config.kind {
        EngineKind::Tone => Ok(tone("[engine] kind = \"tone\"".into())),
        EngineKind::Espeak => spoken(config),
        EngineKind::Cosyvoice3 => neural(config, tokens, seat),
        EngineKind::Auto => match &config.model {
            Some(_) => neural(config, tokens, seat),
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
    let mut settings = espeak::Config { loudness: loudness(config), ..espeak::Config::default() };
    if let Some(voice) = &config.voice {
        settings.voice.clone_from(voice);
    }
    // Tried here, not only on the device thread, so that a missing program is known before anything starts.
    drop(Espeak::new(settings.clone())?);
    let loader: Loader = Box::new(move || Ok(Box::new(Espeak::new(settings.clone())?)));
    Ok(Choice { loaders: vec![loader], fallback: None, reasons: vec!["espeak-ng speaks".into()] })
}

fn neural(
    config: &EngineConfig,
    tokens: Option<u32>,
    seat: &mut Option<(Seat, Option<u32>)>,
) -> Result<Choice, SynthError> {
    let Some(model) = config.model.clone() else {
        return Err(SynthError::Input(
            "CosyVoice3 needs [engine] model, the checkpoint directory, for example the one that `antiphon model pull` fetches"
                .into(),
        ));
    };
    let (auto, wanted) = (config.kind == EngineKind::Auto, loudness(config));
    let hardware = hardware(config)?;
    let found = match gpu::absent() {
        Some(why) => Err(why),
        None => Ok((0..gpu::count()).map(|ordinal| gpu::unusable(ordinal, &hardware)).collect()),
    };
    let (mut devices, mut reasons) = devices(&config.device, &found)?;
    if devices.is_empty() {
        // Slower than anybody speaks: taken by itself only where there is no other voice, or where CosyVoice3 is asked for.
        match spare_voice(wanted) {
            Ok(_) if auto => {
                reasons.push(
                    "espeak-ng speaks in place of CosyVoice3; on the CPU that is slower than real time: [engine] device = \"cpu\""
                        .into(),
                );
                let loader: Loader = Box::new(move || spare_voice(wanted));
                return Ok(Choice { loaders: vec![loader], fallback: None, reasons });
            }
            _ => devices.push(Device::Cpu),
        }
        reasons.push("CosyVoice3 on the CPU, slower than real time".into());
    }
    let pace = config.tokens_per_id;
    let options = Options {
        llm: config.llm.parse().map_err(|e| SynthError::Input(format!("[engine] llm: {e}")))?,
        final_chunk: if config.final_chunk == "reference" { FinalChunk::Reference } else { FinalChunk::Causal },
        hardware,
        ..Options::default()
    };
    let settings = Settings {
        voice_dirs: vec![config.voices.clone(), config.voices.join(copies::FOLDER)],
        default_voice: config.voice.clone(),
        loudness: loudness(config),
        ..Settings::default()
    };
    let precision = if config.dtype == "f32" { Precision::EXACT } else { Precision::default() };
    let takes = |device: &Device| match (&seat, device) {
        (Some((_, named)), Device::Cuda(ordinal)) => named.is_none_or(|named| named == *ordinal),
        _ => false,
    };
    let beside = devices.iter().position(takes);
    let mut sits = beside.and_then(|at| Some((at, seat.take()?.0)));
    let loaders = devices.into_iter().enumerate().map(|(at, device)| {
        let (model, settings) = (model.clone(), settings.clone());
        let seat = sits.take_if(|(beside, _)| *beside == at).map(|(_, seat)| seat);
        let options = Options { seat, ..options.clone() };
        let loader: Loader = Box::new(move || match device {
            Device::Cpu => {
                // It would round as a GPU does and gain nothing by it.
                let hardware = Hardware { int8_keys: false, products: Products::Full, ..options.hardware.clone() };
                let options = Options { hardware, ..options.clone() };
                let mut voice = CosyVoice::load_cpu(&model, options, settings.clone())?;
                voice.force_length(tokens);
                voice.force_pace(pace);
                Ok(Box::new(voice))
            }
            Device::Cuda(ordinal) => {
                let mut voice = CosyVoice::load_gpu(&model, ordinal, options.clone(), precision, settings.clone())?;
                voice.force_length(tokens);
                voice.force_pace(pace);
                Ok(Box::new(voice))
            }
        });
        loader
    });
    let mut loaders: Vec<Loader> = loaders.collect();
    if auto {
        loaders = or_spare(loaders, move || spare_voice(wanted));
    }
    // The default voice needs neither model nor device; it is loaded only where an agent wants it.
    let fallback = spare_voice(wanted).map(|_| {
        let loader: Loader = Box::new(move || spare_voice(wanted));
        loader
    });
    if let Err(error) = &fallback {
        reasons.push(format!("there is no fallback voice where CosyVoice3 cannot speak: {error}"));
    }
    Ok(Choice { loaders, fallback: fallback.ok(), reasons })
}

pub(crate) fn hardware(config: &EngineConfig) -> Result<Hardware, SynthError> {
    let limit =
        |text: &str| text.parse::<MemoryLimit>().map_err(|e| SynthError::Input(format!("[engine] memory: {e}")));
    Ok(Hardware {
        taken_for: TakenFor { arch: config.arch.clone(), shared_kib: config.shared_kib },
        cache: Some(config.cache.clone()).filter(|path| !path.as_os_str().is_empty()),
        memory: config.memory.as_deref().map(limit).transpose()?,
        invariant: config.invariant,
        int8_keys: config.kv == "int8",
        products: if config.products == "fp8" { Products::Fp8 } else { Products::Full },
    })
}

/// How loud voices are to be, if they are not to stay as they are.
fn loudness(config: &EngineConfig) -> Option<f32> {
    (config.loudness < 0.0).then_some(config.loudness)
}

/// The default voice, whatever `[engine] voice` says: that names one of CosyVoice3's.
fn spare_voice(loudness: Option<f32>) -> Result<Box<dyn Synthesizer>, SynthError> {
    Ok(Box::new(Espeak::new(espeak::Config { loudness, ..espeak::Config::default() })?))
}

/// What became of a device's loads.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Open,
    /// It has failed, and never spoken.
    Failed,
    /// It was loaded and has spoken: what fails later may work again.
    Loaded,
    /// The spare voice speaks on it.
    Spare,
}

/// Loaders that take `spare` at the first failure of the last device that might have been loaded, so that calls are
/// answered: whether it cannot be used ([`SynthError::Unusable`]) or fails for now ([`SynthError::Device`]: another
/// program holds its memory, say), be it only at the first that it is to say. The other devices leave the work to those that
/// can; one that failed for now is tried again as any is, and speaks beside the spare once it works.
pub fn or_spare(
    loaders: Vec<Loader>,
    spare: impl Fn() -> Result<Box<dyn Synthesizer>, SynthError> + Send + Clone + 'static,
) -> Vec<Loader> {
    // Those that have not failed yet, or were loaded.
    let hopes = Arc::new(AtomicUsize::new(loaders.len()));
    let guarded = loaders.into_iter().map(|load| {
        let (hopes, spare, fate) = (hopes.clone(), spare.clone(), Mutex::new(Fate::Open));
        let loader: Loader = Box::new(move || {
            let mut fate = fate.lock().unwrap_or_else(PoisonError::into_inner);
            if *fate == Fate::Spare {
                return spare();
            }
            // One that is loaded and cannot speak is of no more use than one that is not: both show it here.
            let result = load().and_then(|mut voice| voice.warm_up().map(|_| voice));
            match (&result, *fate) {
                (Ok(_), before) => {
                    *fate = Fate::Loaded;
                    if before == Fate::Failed {
                        hopes.fetch_add(1, Ordering::Relaxed);
                    }
                }
                (Err(error), Fate::Open) => {
                    *fate = Fate::Failed;
                    let last = hopes.fetch_sub(1, Ordering::Relaxed) == 1;
                    if last && let Ok(voice) = spare() {
                        *fate = Fate::Spare;
                        let tried = "it is not tried again: start the gateway anew once that is mended";
                        tracing::warn!("espeak-ng speaks in place of CosyVoice3: {error}; {tried}");
                        return Ok(voice);
                    }
                }
                (Err(_), Fate::Failed | Fate::Loaded | Fate::Spare) => {}
            }
            result
        });
        loader
    });
    guarded.collect()
}

/// Where a network computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Device {
    Cpu,
    Cuda(u32),
}

/// The devices that `[engine] device` means, and lines that say why. `found`: for each GPU why it cannot be used, or why
/// there is none at all. None: `auto`, and there is no GPU that can be used.
fn devices(
    device: &str,
    found: &Result<Vec<Option<String>>, String>,
) -> Result<(Vec<Device>, Vec<String>), SynthError> {
    if device == "cpu" {
        return Ok((vec![Device::Cpu], vec!["CosyVoice3 on the CPU, as configured".into()]));
    }
    let one = device.strip_prefix("cuda:").and_then(|n| n.parse::<u32>().ok());
    if one.is_none() && !["auto", "cuda:all"].contains(&device) {
        let message = format!("[engine] device = \"{device}\": say \"auto\", \"cpu\", \"cuda:all\" or \"cuda:0\"");
        return Err(SynthError::Input(message));
    }
    let refuse = |why: &str| Err(SynthError::Device(format!("[engine] device = \"{device}\": {why}")));
    let gpus = match found {
        Ok(gpus) => gpus,
        Err(why) if device == "auto" => return Ok((Vec::new(), vec![why.clone()])),
        Err(why) => return refuse(why),
    };
    if let Some(ordinal) = one {
        return match gpus.get(ordinal as usize) {
            None => refuse(&format!("there are {} GPUs, numbered from 0", gpus.len())),
            Some(Some(why)) => refuse(why),
            Some(None) => Ok((vec![Device::Cuda(ordinal)], vec![format!("CosyVoice3 on GPU {ordinal}")])),
        };
    }
    let numbered = || gpus.iter().enumerate().map(|(n, why)| (n as u32, why));
    let usable: Vec<Device> = numbered().filter(|(_, why)| why.is_none()).map(|(n, _)| Device::Cuda(n)).collect();
    let mut reasons: Vec<String> =
        numbered().filter_map(|(n, why)| why.as_ref().map(|why| format!("GPU {n} is not used: {why}"))).collect();
    if usable.is_empty() && device != "auto" {
        return refuse(&reasons.join("; "));
    }
    if !usable.is_empty() {
        reasons.push(format!("CosyVoice3 on {} GPU(s)", usable.len()));
    }
    Ok((usable, reasons))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus(list: &[Option<&str>]) -> Result<Vec<Option<String>>, String> {
        Ok(list.iter().map(|why| why.map(Into::into)).collect())
    }

    fn none() -> Result<Vec<Option<String>>, String> {
        Err("no GPU engine: no driver".into())
    }

    #[test]
    fn auto_takes_every_gpu_that_can_be_used_and_says_in_a_line_why_others_cannot() {
        let (found, reasons) = devices("auto", &gpus(&[None, None, None])).expect("three");
        assert_eq!(found, [Device::Cuda(0), Device::Cuda(1), Device::Cuda(2)]);
        assert!(reasons[0].contains("3 GPU"));
        let old = "no GPU engine: Tesla T4 is of compute capability 7.5";
        let (found, reasons) = devices("auto", &gpus(&[Some(old), None])).expect("the second");
        assert_eq!(found, [Device::Cuda(1)]);
        assert!(reasons[0].contains("GPU 0") && reasons[0].contains("7.5"), "{reasons:?}");
        assert!(reasons.iter().all(|reason| reason.lines().count() == 1));
        for found in [gpus(&[Some(old)]), none()] {
            let (devices, reasons) = devices("auto", &found).expect("none");
            assert!(devices.is_empty() && reasons[0].contains("no GPU engine"), "{reasons:?}");
        }
        assert_eq!(devices("cuda:1", &gpus(&[None, None])).expect("the second").0, [Device::Cuda(1)]);
        assert_eq!(devices("cuda:all", &gpus(&[None, None])).expect("both").0.len(), 2);
    }

    #[test]
    fn what_is_not_there_or_not_a_device_is_refused_by_name() {
        for (device, found) in [
            ("cuda:2", gpus(&[None, None])),
            ("cuda:0", gpus(&[Some("too old"), None])),
            ("cuda:0", none()),
            ("cuda:all", none()),
            ("cuda:all", gpus(&[Some("too old")])),
            ("gpu", gpus(&[None])),
            ("cuda:x", gpus(&[None])),
        ] {
            let error = devices(device, &found).expect_err("refused").to_string();
            assert!(error.contains(device), "{error}");
        }
    }

    #[test]
    fn the_default_voice_speaks_where_the_last_device_turns_out_to_be_unusable() {
        let unusable = || -> Loader { Box::new(|| Err(SynthError::Unusable("too little memory".into()))) };
        let tone = || -> Result<Box<dyn Synthesizer>, SynthError> { Ok(Box::new(Tone::new())) };
        let loaders = or_spare(vec![unusable(), unusable()], tone);
        assert!(matches!(loaders[0](), Err(SynthError::Unusable(_))));
        assert_eq!(loaders[1]().expect("the spare").caps().name, tone().expect("it").caps().name);
        assert!(loaders[1]().is_ok(), "it is loaded again as itself");

        let loaders = or_spare(vec![unusable(), Box::new(tone)], tone);
        assert!(loaders[1]().is_ok());
        assert!(matches!(loaders[0](), Err(SynthError::Unusable(_))), "another speaks");

        // What has worked may work again: it gets no fallback.
        let loaders = or_spare(vec![at_times([true, false])], tone);
        assert!(loaders[0]().is_ok());
        assert!(matches!(loaders[0](), Err(SynthError::Device(_))));
    }

    /// Loads at each call as `works` says, and at the last of them for ever.
    fn at_times<const N: usize>(works: [bool; N]) -> Loader {
        let calls = AtomicUsize::new(0);
        Box::new(move || {
            let call = calls.fetch_add(1, Ordering::Relaxed).min(N - 1);
            if works[call] { Ok(Box::new(Tone::new())) } else { Err(SynthError::Device("no memory".into())) }
        })
    }

    #[test]
    fn the_default_voice_speaks_at_the_first_failure_of_a_device_that_never_loaded() {
        let spare = || -> Result<Box<dyn Synthesizer>, SynthError> { Ok(Box::new(Tone::new())) };
        let none = || -> Result<Box<dyn Synthesizer>, SynthError> { Err(SynthError::Device("not installed".into())) };
        // Another program has filled the only card: no second try comes before the spare.
        let loaders = or_spare(vec![at_times([false])], spare);
        assert!(loaders[0]().is_ok() && loaders[0]().is_ok());

        // Of two, the one that fails first is tried on: it works later, beside the spare of the other.
        let loaders = or_spare(vec![at_times([false, false, true]), at_times([false])], spare);
        assert!(loaders[0]().is_err());
        assert!(loaders[1]().is_ok(), "the spare");
        assert!(loaders[0]().is_err(), "one spare is enough");
        assert!(loaders[0]().is_ok(), "it works by now");

        // One that failed at first and works by now is a hope again: the other needs no spare.
        let loaders = or_spare(vec![at_times([false, true]), at_times([false])], spare);
        assert!(loaders[0]().is_err() && loaders[0]().is_ok());
        assert!(loaders[1]().is_err());

        // Without a spare the failure is told as it is, each time.
        let loaders = or_spare(vec![at_times([false])], none);
        assert!(loaders[0]().is_err() && matches!(loaders[0](), Err(SynthError::Device(_))));
    }
}
