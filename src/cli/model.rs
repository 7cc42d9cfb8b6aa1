//! `antiphon model`: fetch, check, invent and test checkpoints.

use std::path::{Path, PathBuf};

use clap::{Subcommand, ValueEnum};

use super::Failure;
use crate::clock;
use crate::config::Config;
use crate::hear::{RATE, whisper};
use crate::synth::cosyvoice::backend::{Hardware, LanguageModel, Options, Products};
use crate::synth::cosyvoice::cli;
use crate::synth::cosyvoice::config::Config as Sizes;
use crate::synth::cosyvoice::gpu::{self, GpuBackend, Precision};
use crate::synth::cosyvoice::{pull, random, selftest};
use crate::voice;

/// The files of a recogniser.
const WHISPER: pull::Set =
    pull::Set { what: "Whisper checkpoint", needed: &whisper::verify::NEEDED, welcome: &whisper::verify::WELCOME };

#[derive(Subcommand)]
pub(super) enum Command {
    /// Fetch a checkpoint of the voice, or of Whisper (`openai/whisper-tiny.en`), from a hub; `HF_ENDPOINT` names
    /// another hub. Resumes, checks sizes and hashes; of the default checkpoint those that are known beforehand.
    Pull {
        /// Which checkpoint; `ID@REVISION` for a certain commit of it.
        #[arg(default_value = pull::DEFAULT_ID)]
        id: String,
        /// Where to; default: the name's last part.
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
    /// Check every tensor's name, shape and type, all problems in one report.
    Verify {
        /// Checkpoint directory.
        dir: PathBuf,
        /// Which of its language models: llm, or llm.rl.
        #[arg(long, default_value_t)]
        llm: LanguageModel,
    },
    /// Write a randomly initialised checkpoint in the real layout, for measuring speed.
    Random {
        /// Where to.
        dir: PathBuf,
        /// Which sizes.
        #[arg(long, value_enum, default_value = "tiny")]
        size: Size,
        /// Same seed: same weights.
        #[arg(long, default_value_t = 0)]
        seed: u64,
    },
    /// Turn a Whisper checkpoint of CTranslate2 (`faster-whisper`) into the layout that `[recognizer] model` reads.
    Convert {
        /// Folder with `model.bin`, `config.json` and `tokenizer.json`.
        from: PathBuf,
        /// Where to.
        to: PathBuf,
    },
    /// Print what a Whisper checkpoint hears in recordings, on one core of the CPU, and what that costs.
    Transcribe {
        /// Checkpoint directory.
        dir: PathBuf,
        /// Recordings of at most a minute, in any common format.
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// What is spoken in them (BCP 47); default: the model finds out.
        #[arg(long)]
        language: Option<String>,
        /// Texts side by side, of which the likeliest counts; 1: the likeliest token counts.
        #[arg(long, default_value_t = whisper::BEAMS)]
        beams: usize,
    },
    /// Compare every stage with a kit of reference tensors.
    Selftest {
        /// Kit: a checkpoint of the voice or of Whisper and its expected tensors, or enrolment networks and theirs.
        kit: PathBuf,
        /// Where to compute: cpu or cuda:N.
        #[arg(long, default_value = "cpu")]
        device: String,
        /// Working precision on a GPU: f32 holds the kit's tolerances, auto is what calls are served with.
        #[arg(long, default_value = "f32", value_parser = ["f32", "auto"])]
        dtype: String,
        /// How the flow keeps keys and values, as `[engine] kv`.
        #[arg(long, default_value = "full", value_parser = ["full", "int8"])]
        kv: String,
        /// What the flow's layers multiply, as `[engine] products` has wide steps do.
        #[arg(long, default_value = "full", value_parser = ["full", "fp8"])]
        products: String,
    },
}

#[derive(Clone, Copy, ValueEnum)]
pub(super) enum Size {
    /// The 0.5B model: 3.4 GB.
    Full,
    /// Small enough for a test: 3 MB.
    Tiny,
}

/// A folder that a checkpoint may be written to, with what to type for `command`.
fn writable(dir: &Path, command: &str) -> Result<(), Failure> {
    match dir.exists() && !dir.is_dir() {
        true => Err(Failure::failed(format!(
            "{}: that is a file: name a folder, for example `antiphon model {command}`",
            dir.display()
        ))),
        false => Ok(()),
    }
}

/// Runs a model command.
pub(super) fn run(command: Command) -> Result<(), Failure> {
    let code = match command {
        Command::Pull { id, dir } => {
            let name = pull::name(&id);
            let dir = dir.unwrap_or_else(|| PathBuf::from(name));
            writable(&dir, "pull --dir Fun-CosyVoice3-0.5B-2512")?;
            let set = if name.to_ascii_lowercase().contains("whisper") { &WHISPER } else { &pull::COSYVOICE };
            cli::pull(&id, &dir, crate::config::hub_endpoint().as_deref(), set)
        }
        Command::Verify { dir, .. } if whisper::is_checkpoint(&dir) => {
            let report = whisper::verify::verify(&dir);
            println!("{report}");
            if report.passed() { cli::DONE } else { cli::FAILED }
        }
        Command::Verify { dir, llm } => cli::verify(&dir, llm),
        Command::Random { dir, size, seed } => {
            writable(&dir, "random random-model")?;
            let size = match size {
                Size::Full => random::Size::Full,
                Size::Tiny => random::Size::Tiny,
            };
            cli::random(&dir, size, seed)
        }
        Command::Convert { from, to } => {
            if !from.join("model.bin").is_file() {
                return Err(Failure::failed(format!(
                    "{}: there is no `model.bin` of CTranslate2: name a folder that has one, for example \
                     `antiphon model convert faster-whisper-tiny.en whisper-tiny.en`",
                    from.display()
                )));
            }
            let tensors = whisper::convert::convert(&from, &to).map_err(Failure::failed)?;
            println!("{}: {tensors} tensors", to.display());
            cli::DONE
        }
        Command::Transcribe { dir, files, language, beams } => transcribe(&dir, &files, language, beams)?,
        Command::Selftest { kit, device, dtype, kv, products } => {
            let products = if products == "fp8" { Products::Fp8Always } else { Products::Full };
            let modes = Hardware { int8_keys: kv == "int8", products, ..Hardware::default() };
            selftest(&kit, &device, &dtype, modes)?
        }
    };
    Failure::from_code(code)
}

/// One file that cannot be read fails the command after the others.
fn transcribe(dir: &Path, files: &[PathBuf], language: Option<String>, beams: usize) -> Result<u8, Failure> {
    use whisper::{Options, Stop};
    if !whisper::is_checkpoint(dir) {
        return Err(Failure::failed(format!(
            "{}: no checkpoint of Whisper is there: `antiphon model pull openai/whisper-tiny.en` fetches one",
            dir.display()
        )));
    }
    let whisper = whisper::Whisper::load(dir).map_err(Failure::failed)?;
    // Products of matrices use the threads of the pool that they are called in: one makes the time a cost.
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().map_err(Failure::failed)?;
    let options = Options { language, beams, ..Options::default() };
    let before = clock::cpu();
    let (mut heard, mut code) = (0.0, cli::DONE);
    for file in files {
        let recording = std::fs::read(file).map_err(|e| e.to_string());
        let recording = recording.and_then(|bytes| voice::decode::decode(bytes).map_err(|e| e.to_string()));
        let recording = match recording {
            Ok(recording) => recording,
            Err(why) => {
                eprintln!("{}: {why}", file.display());
                code = cli::FAILED;
                continue;
            }
        };
        let samples = voice::resample::resample(&recording.samples, recording.rate, RATE);
        let transcript = one.install(|| whisper.transcribe(&samples, &options, &Stop::default()));
        let transcript = transcript.map_err(Failure::failed)?.unwrap_or_default();
        println!("{}: {}", file.display(), transcript.text);
        heard += recording.seconds();
    }
    if let (Some(before), Some(after)) = (before, clock::cpu()) {
        let cost = after.saturating_sub(before).as_secs_f64();
        eprintln!("{heard:.1} s of sound; {cost:.1} s of a core, {:.3} for each second", cost / heard.max(0.001));
    }
    Ok(code)
}

/// `modes`: of the voice alone.
fn selftest(kit: &Path, device: &str, dtype: &str, modes: Hardware) -> Result<u8, Failure> {
    if whisper::selftest::is_kit(kit) {
        let report = whisper_selftest(kit, device, dtype)?;
        println!("{report}");
        return Ok(if report.passed() { cli::DONE } else { cli::FAILED });
    }
    // A kit may hold either part or both: the front end is compared first, as data flows.
    let mut code = cli::DONE;
    let front_end = voice::selftest::is_kit(kit);
    if !front_end && !cli::is_kit(kit) {
        return Err(Failure::failed(format!(
            "{}: no kit is there (a folder with `checkpoint` and the original's tensors): name one, for example \
             `antiphon model selftest tests/data/golden/cosyvoice3`",
            kit.display()
        )));
    }
    if front_end {
        let report = voice::selftest::run(kit).map_err(Failure::failed)?;
        println!("{report}");
        code = if report.passed() { cli::DONE } else { cli::FAILED };
    }
    if front_end && !cli::is_kit(kit) {
        return Ok(code);
    }
    Ok(code.max(engine_selftest(kit, device, dtype, modes)?))
}

fn whisper_selftest(kit: &Path, device: &str, dtype: &str) -> Result<whisper::selftest::Report, Failure> {
    use whisper::gpu::{Elt, Own, seat};
    use whisper::selftest::{Tolerances, run, run_on};
    if device == "cpu" {
        return run(kit).map_err(Failure::failed);
    }
    let (elt, tolerances) =
        if dtype == "f32" { (Elt::F32, Tolerances::EXACT) } else { (Elt::F16, Tolerances::WORKING) };
    let own = Own { ordinal: ordinal(device)?, hardware: Hardware::default() };
    let seat = seat(kit, elt).map_err(Failure::failed)?;
    let loaded = whisper::Whisper::on_gpu(kit, seat, Some(own)).map_err(Failure::failed)?;
    run_on(&loaded, kit, tolerances).map_err(Failure::failed)
}

/// The number of a GPU that can be tried.
fn ordinal(device: &str) -> Result<u32, Failure> {
    let Some(ordinal) = device.strip_prefix("cuda:").and_then(|n| n.parse::<u32>().ok()) else {
        return Err(Failure::failed(format!("device `{device}`: expected cpu or cuda:N, for example cuda:0")));
    };
    match gpu::absent() {
        Some(why) => Err(Failure::unavailable(why)),
        None => Ok(ordinal),
    }
}

fn engine_selftest(kit: &Path, device: &str, dtype: &str, modes: Hardware) -> Result<u8, Failure> {
    if device == "cpu" {
        return Ok(cli::selftest(kit, modes));
    }
    let ordinal = ordinal(device)?;
    let precision = if dtype == "f32" { Precision::EXACT } else { Precision::default() };
    let limits = selftest::limits(dtype != "f32", &modes);
    let shared = gpu::survey::survey(&Hardware::default()).devices.get(ordinal as usize).and_then(|d| d.shared_kib);
    let misfits = Sizes::load(&kit.join("checkpoint"))
        .map_or_else(|_| Vec::new(), |config| gpu::misfits(&config, precision, shared.unwrap_or(u32::MAX >> 10)));
    if !misfits.is_empty() {
        return Ok(cli::selftest_left_out(kit, &misfits));
    }
    Ok(cli::selftest_on(kit, &limits, |kit| {
        let options = Options { hardware: modes, ..selftest::options(kit) };
        GpuBackend::load(&kit.checkpoint_dir(), ordinal, options, precision)
    }))
}

/// Folders that `antiphon voice` uses where its arguments name none.
pub(super) fn voice_defaults(config: &Config) -> voice::cli::Defaults {
    voice::cli::Defaults { model: config.engine.model.clone(), voices: config.engine.voices.clone() }
}
