//! `antiphon doctor`: what this machine has for the gateway's voices, what is missing, and about how many calls it carries.
//!
//! Exit codes: 0 the configured voice can speak on the device that is meant for it, 1 it cannot.

use std::fmt::Write;
use std::time::Duration;

use serde::Serialize;

use super::Failure;
use crate::app::bench::{self, Plan};
use crate::app::engines;
use crate::call::bench::EgressPacing;
use crate::config::{Config, EngineKind};
use crate::synth::cosyvoice::config::Config as Sizes;
use crate::synth::cosyvoice::gpu::capacity::{self, Capacity, Roofline};
use crate::synth::cosyvoice::gpu::survey::{self, Survey};
use crate::synth::cosyvoice::random;
use crate::synth::device::{Engine, Phase};

/// What is said while the default voice is measured.
const TEXT: &str = "Your parcel left the depot this morning and should reach you before noon tomorrow.";
/// Share of the cores that may be busy before packets leave late (tests/bench/README.md).
const BUSY: f64 = 0.85;

#[derive(clap::Args)]
pub(super) struct Args {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Seconds for measuring; 0: only look.
    #[arg(long, default_value_t = 10.0, value_parser = seconds)]
    seconds: f64,
    /// Print what other GPUs would carry, computed from their published bandwidth and arithmetic.
    #[arg(long)]
    cards: bool,
    /// Configuration file.
    #[arg(short, long, value_name = "FILE")]
    config: Option<std::path::PathBuf>,
}

fn seconds(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|s| (0.0..=600.0).contains(s)).ok_or_else(|| "expected 0 to 600 seconds".to_owned())
}

/// All of it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Diagnosis {
    gpu: Survey,
    /// Of every device that can be used, in the same order as those.
    carries: Vec<Measured>,
    default_voice: DefaultVoice,
    /// What the configuration asks for that cannot be.
    wrong: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    cards: Vec<Roofline>,
}

/// What a device was found to carry.
#[derive(Serialize)]
struct Measured {
    ordinal: u32,
    capacity: Option<Capacity>,
    /// Why there is none.
    error: Option<String>,
}

/// The voice that needs no GPU.
#[derive(Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct DefaultVoice {
    cores: usize,
    /// Seconds of speech made per second by all cores.
    audio_per_second: Option<f64>,
    /// Share of one core that sending a call takes.
    core_per_call: Option<f64>,
    /// Calls that speak at once.
    calls: Option<u64>,
    /// Why it does not speak, with what would help.
    error: Option<String>,
}

/// Calls that `cores` carry, whose voice makes `made` seconds of speech per second with all of them, and each of which takes
/// `sent` of one to send.
fn carried(cores: usize, made: f64, sent: f64) -> u64 {
    let each = cores as f64 / made.max(f64::MIN_POSITIVE) + sent;
    (BUSY * cores as f64 / each) as u64
}

/// Looks, measures, prints.
pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let config = super::load(args.config.as_deref())?;
    let diagnosis = diagnose(&config, args)?;
    if args.json {
        let text = serde_json::to_string_pretty(&diagnosis).map_err(Failure::failed)?;
        println!("{text}");
    } else {
        print!("{}", describe(&diagnosis));
    }
    Failure::from_code(u8::from(!diagnosis.wrong.is_empty()))
}

fn diagnose(config: &Config, args: &Args) -> Result<Diagnosis, Failure> {
    let hardware = engines::hardware(&config.engine).map_err(Failure::failed)?;
    let gpu = survey::survey(&hardware);
    let usable: Vec<u32> = gpu.devices.iter().filter(|d| d.unusable.is_none()).map(|d| d.ordinal).collect();
    let measure = args.seconds > 0.0;
    let mut carries = Vec::new();
    for &ordinal in usable.iter().filter(|_| measure) {
        let measured =
            sizes(config).and_then(|sizes| capacity::measure(sizes, ordinal, &hardware).map_err(|e| e.to_string()));
        let (capacity, error) = match measured {
            Ok(capacity) => (Some(capacity), None),
            Err(error) => (None, Some(error)),
        };
        carries.push(Measured { ordinal, capacity, error });
    }
    let default_voice = default_voice(config, if measure { args.seconds } else { 0.0 });
    let mut wrong = Vec::new();
    // What `serve` would say: the device or the model that is asked for by name.
    match engines::choose(&config.engine) {
        Ok(_) => {}
        Err(error) => wrong.push(error.to_string()),
    }
    if let Some(model) = config.engine.model.as_ref().filter(|model| !model.join("cosyvoice3.yaml").is_file()) {
        wrong.push(format!("[engine] model: {} is no checkpoint: `antiphon model pull`", model.display()));
    }
    // With `auto` the placeholder tone speaks in its place, and what is missing is told beside it.
    let speaks = config.engine.kind == EngineKind::Espeak;
    if let (Some(error), true) = (&default_voice.error, speaks) {
        wrong.push(error.clone());
    }
    let cards = if args.cards { capacity::rooflines() } else { Vec::new() };
    Ok(Diagnosis { gpu, carries, default_voice, wrong, cards })
}

/// The sizes of the configured model, or of the released one.
fn sizes(config: &Config) -> Result<Sizes, String> {
    if let Some(model) = &config.engine.model
        && let Ok(sizes) = Sizes::load(model)
    {
        return Ok(sizes);
    }
    let dir = std::env::temp_dir().join(format!("antiphon-doctor-{}", std::process::id()));
    let written = random::write_texts(&dir, random::Size::Full).map_err(|e| e.to_string());
    let sizes = written.and_then(|()| Sizes::load(&dir).map_err(|e| e.to_string()));
    let _ = std::fs::remove_dir_all(&dir);
    sizes
}

/// Starts the default voice; with `seconds` measures what it and the sending of its calls cost.
fn default_voice(config: &Config, seconds: f64) -> DefaultVoice {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut found = DefaultVoice { cores, ..DefaultVoice::default() };
    let engine = crate::config::Engine { kind: EngineKind::Espeak, voice: None, ..config.engine.clone() };
    let choice = match engines::choose(&engine) {
        Ok(choice) => choice,
        Err(error) => {
            found.error = Some(error.to_string());
            return found;
        }
    };
    if seconds <= 0.0 {
        return found;
    }
    match measure_voice(choice, config, cores, seconds / 2.0) {
        Ok(made) => found.audio_per_second = Some(made),
        Err(error) => found.error = Some(error),
    }
    let pacing = EgressPacing { calls: 20, time: Duration::from_secs_f64(seconds / 8.0), ..EgressPacing::default() };
    match pacing.run() {
        Ok(report) => {
            let percent = report.rows.iter().map(|row| row.cpu_percent_per_call).fold(0.0, f64::max);
            found.core_per_call = Some(percent / 100.0);
        }
        Err(error) => found.error = Some(error.to_string()),
    }
    if let (Some(made), Some(sent)) = (found.audio_per_second, found.core_per_call) {
        found.calls = Some(carried(cores, made, sent));
    }
    found
}

fn measure_voice(choice: engines::Choice, config: &Config, cores: usize, seconds: f64) -> Result<f64, String> {
    let engine = Engine::start(choice.loaders, config.scheduler.clone()).map_err(|e| e.to_string())?;
    let plan = Plan {
        levels: vec![cores as u32 * 2],
        time: Duration::from_secs_f64(seconds),
        arrivals: None,
        text: TEXT.into(),
        voice: None,
        paced: false,
        batch: 0,
        seed: 1,
    };
    let measured = super::block_on(async {
        engine.ready().await;
        if let Some(Phase::Failed(reason)) = engine.status().into_iter().map(|device| device.phase).next() {
            return Err(Failure::failed(reason));
        }
        Ok(bench::run(&engine, &plan, |_| {}).await)
    });
    engine.shutdown();
    match measured {
        Ok(levels) => levels.first().map(|level| level.audio_per_second).ok_or_else(|| "nothing was said".to_owned()),
        Err(failure) => Err(failure.message),
    }
}

/// The diagnosis for people.
fn describe(found: &Diagnosis) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ =
        writeln!(text, "driver          {}", found.gpu.driver.as_ref().map_or("none".into(), |v| format!("CUDA {v}")));
    for library in &found.gpu.libraries {
        let _ = writeln!(text, "library         {} ({})", library.name, library.path);
    }
    if let Some(absent) = &found.gpu.absent {
        let _ = writeln!(text, "GPU             {absent}");
    }
    for device in &found.gpu.devices {
        let _ = writeln!(
            text,
            "cuda:{}          {}, compute capability {}, {:.0} GB",
            device.ordinal,
            device.name,
            device.capability,
            device.memory as f64 * 1e-9
        );
        if let (Some(arch), Some(kib)) = (&device.architecture, device.shared_kib) {
            let kernels = if device.hopper { "Hopper's own kernels" } else { "the general kernels" };
            let _ = writeln!(text, "                kernels for {arch}, {kib} KiB of shared memory a block: {kernels}");
        }
        if let Some(why) = &device.unusable {
            let _ = writeln!(text, "                cannot be used: {why}");
        }
        for measured in found.carries.iter().filter(|m| m.ordinal == device.ordinal) {
            let _ = match (&measured.capacity, &measured.error) {
                (Some(c), _) => writeln!(
                    text,
                    "                carries about {} talking calls (3 s turns, 0.3 s apart): first audio alone {:.0} ms, {:.0} \
                     seconds of speech a second, room for {} utterances of 8 s",
                    c.calls,
                    c.alone * 1e3,
                    c.sustained,
                    c.resident
                ),
                (None, error) => {
                    writeln!(text, "                not measured: {}", error.as_deref().unwrap_or("no reason given"))
                }
            };
        }
    }
    let voice = &found.default_voice;
    let _ = match (voice.calls, &voice.error) {
        (_, Some(error)) => writeln!(text, "default voice   {error}"),
        (None, None) => writeln!(text, "default voice   espeak-ng speaks on {} core(s)", voice.cores),
        (Some(calls), None) => writeln!(
            text,
            "default voice   espeak-ng on {} core(s) carries about {calls} speaking calls: {:.0} seconds of speech a second, \
             {:.2} % of a core to send a call",
            voice.cores,
            voice.audio_per_second.unwrap_or_default(),
            100.0 * voice.core_per_call.unwrap_or_default()
        ),
    };
    if !found.cards.is_empty() {
        let _ = writeln!(
            text,
            "\nComputed from published bandwidth and arithmetic, not measured (expected: the part of it that an H200 reaches):\n\
             {:<12} {:>7} {:>8} {:>9} {:>12} {:>12} {:>12} {:>7}",
            "card", "GB", "TB/s", "TFLOP/s", "limit ms", "expected ms", "audio-s/s", "calls"
        );
        for line in &found.cards {
            let _ = writeln!(
                text,
                "{:<12} {:>7.0} {:>8.2} {:>9.0} {:>12.1} {:>12.1} {:>12.0} {:>7}",
                line.card.name,
                line.card.memory * 1e-9,
                line.card.bandwidth * 1e-12,
                line.card.arithmetic * 1e-12,
                line.limit_alone * 1e3,
                line.expected.alone * 1e3,
                line.expected.sustained,
                line.expected.calls
            );
        }
    }
    for wrong in &found.wrong {
        let _ = writeln!(text, "wrong           {wrong}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing() -> Diagnosis {
        Diagnosis {
            gpu: Survey {
                driver: None,
                libraries: Vec::new(),
                absent: Some("no GPU engine: install it".into()),
                devices: Vec::new(),
            },
            carries: Vec::new(),
            default_voice: DefaultVoice { cores: 2, ..DefaultVoice::default() },
            wrong: Vec::new(),
            cards: Vec::new(),
        }
    }

    #[test]
    fn a_machine_without_a_gpu_is_told_what_would_help_and_what_speaks() {
        let text = describe(&nothing());
        assert!(text.contains("no GPU engine: install it") && text.contains("espeak-ng speaks on 2 core(s)"), "{text}");
    }

    #[test]
    fn a_device_is_described_with_what_it_carries_or_why_not() {
        let device = |ordinal, unusable: Option<&str>| survey::Found {
            ordinal,
            name: "A card".into(),
            capability: "8.6".into(),
            memory: 24_000_000_000,
            architecture: Some("sm_86".into()),
            shared_kib: Some(99),
            hopper: false,
            unusable: unusable.map(Into::into),
        };
        let mut found = nothing();
        found.gpu.devices = vec![device(0, None), device(1, Some("it is of compute capability 7.5"))];
        let capacity = Capacity { alone: 0.025, sustained: 300.0, resident: 20, calls: 90 };
        found.carries = vec![Measured { ordinal: 0, capacity: Some(capacity), error: None }];
        found.cards = capacity::rooflines();
        let text = describe(&found);
        for part in ["about 90 talking calls", "sm_86", "99 KiB", "7.5", "RTX 5090", "not measured"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn calls_follow_cores_and_what_each_costs() {
        // Two cores make 100 s of speech a second, so a call takes 2 % of a core, and 1 % to send.
        assert_eq!(carried(2, 100.0, 0.01), 56);
        assert_eq!(carried(2, 0.0, 0.01), 0);
    }
}
