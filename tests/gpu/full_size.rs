//! The GPU engine at full size: against the CPU engine, and its memory against the driver's account of it.

use std::path::Path;
use std::sync::Arc;

use antiphon::synth::cosyvoice::backend::{
    Backend, Embed, FlowPrompt, Hardware, MinLength, Options, Products, Sampling, SlotRequest,
};
use antiphon::synth::cosyvoice::config::Config;
use antiphon::synth::cosyvoice::cpu::CpuBackend;
use antiphon::synth::cosyvoice::gpu::{self, GpuBackend, Part, Precision};
use antiphon::synth::cosyvoice::probe::{Probe, Values};
use antiphon::synth::cosyvoice::random;
use antiphon::synth::{Slot, Stage};

use super::{KIT, checkpoint, device, full};

/// Speech tokens of the comparison: two seconds behind a prompt of three; and enough that the blocks that run side by side, each at
/// its own Euler step, make a wide one.
const SPOKEN: usize = 50;
const SPOKEN_WIDE: usize = 300;
const PROMPT: usize = 75;

/// How two results compare.
struct Difference {
    max: f64,
    rms: f64,
    /// Root mean square of what is expected.
    scale: f64,
}

fn compare(expected: &Values, actual: &Values) -> Difference {
    assert_eq!(expected.data.len(), actual.data.len(), "{:?} and {:?}", expected.shape, actual.shape);
    let (mut max, mut squares, mut scale) = (0f64, 0.0, 0.0);
    for (&e, &a) in expected.data.iter().zip(&actual.data) {
        let difference = (f64::from(a) - f64::from(e)).abs();
        max = max.max(if difference.is_nan() { f64::INFINITY } else { difference });
        squares += difference * difference;
        scale += f64::from(e) * f64::from(e);
    }
    let count = expected.data.len().max(1) as f64;
    Difference { max, rms: (squares / count).sqrt(), scale: (scale / count).sqrt() }
}

fn spoken(config: &Config, count: usize) -> Vec<u32> {
    random::voice(config, "spoken", count, 6).tokens
}

/// What the flow gives for `count` speech tokens.
fn mel<B: Probe>(backend: &mut B, config: &Config, count: usize) -> Values {
    let voice = random::voice(config, "compared", PROMPT, 5);
    let prompt = FlowPrompt { tokens: voice.tokens, mel: voice.mel, speaker: voice.speaker };
    backend.mel(&prompt, &spoken(config, count), true).expect("flow")
}

/// What each stage gives for the same input.
struct Outputs {
    scores: Values,
    mel: Values,
    f0: Values,
    wave: Values,
}

fn outputs<B: Probe>(backend: &mut B, config: &Config, mel: Option<&Values>) -> Outputs {
    let voice = random::voice(config, "compared", PROMPT, 5);
    let mut prefix = vec![Embed::Speech(config.llm.control(0))];
    prefix.extend((0..40u32).map(|i| Embed::Text(i * 3571 % config.llm.vocab as u32)));
    prefix.push(Embed::Speech(config.llm.control(2)));
    prefix.extend(voice.tokens.iter().map(|&t| Embed::Speech(t)));
    let scores = backend.llm(&prefix, &spoken(config, SPOKEN)).expect("language model").scores;
    let made = self::mel(backend, config, SPOKEN);
    // Each stage is judged by itself: the vocoder of both gets the same mel.
    let vocoder = backend.hift(mel.unwrap_or(&made), true).expect("vocoder");
    Outputs { scores, mel: made, f0: vocoder.f0.expect("both show F0"), wave: vocoder.wave }
}

/// Largest and root mean square difference that are allowed for scores, mel, F0 and samples, as shares of the root
/// mean square of what is expected.
type Limits = [(f64, f64); 4];

/// How the engine computes, and what is allowed then.
type Way = (&'static str, Precision, Hardware, Limits);

fn ways() -> [Way; 4] {
    let full = super::hardware();
    let single = [(1e-4, 1e-5), (1e-4, 1e-5), (1e-3, 1e-4), (1e-3, 1e-4)];
    let working = [(0.06, 0.01), WORKING_MEL, (1e-3, 1e-4), (0.03, 0.005)];
    let mel = |limit: (f64, f64)| [working[0], limit, working[2], working[3]];
    let int8 = Hardware { int8_keys: true, ..full.clone() };
    let fp8 = Hardware { products: Products::Fp8Always, ..full.clone() };
    [
        ("single", Precision::EXACT, full.clone(), single),
        ("working", Precision::default(), full, working),
        ("int8", Precision::default(), int8, mel(INT8_MEL)),
        ("fp8", Precision::default(), fp8, mel(FP8_MEL)),
    ]
}

/// What of a mel is allowed to differ; and from the CPU's that rounds to fewer bits alike.
const WORKING_MEL: (f64, f64) = (0.01, 0.002);
const INT8_MEL: (f64, f64) = (0.05, 0.01);
const FP8_MEL: (f64, f64) = (0.25, 0.04);
const ALIKE: (f64, f64) = (0.08, 0.015);

/// Teacher-forced scores, mel, F0 and samples of the checkpoint in `dir` on the GPU against the CPU.
fn agrees(dir: &Path) {
    let config = Config::load(dir).expect("sizes");
    let expected = {
        let mut cpu = CpuBackend::load(dir, Options::default()).expect("the CPU engine loads");
        outputs(&mut cpu, &config, None)
    };
    let mut wrong = Vec::new();
    println!("{:<8} {:<8} {:>10} {:>10} {:>10}  max and rms allowed", "", "", "max", "rms", "of");
    for (name, precision, hardware, limits) in ways() {
        let alike = (hardware != super::hardware()).then(|| {
            let options = Options { hardware: hardware.clone(), ..Options::default() };
            mel(&mut CpuBackend::load(dir, options).expect("the CPU engine loads"), &config, SPOKEN)
        });
        let options = Options { slots: Some(8), memory: Some(8 << 30), hardware, ..Options::default() };
        let mut backend = GpuBackend::load(dir, 0, options, precision).expect("the GPU engine loads");
        let actual = outputs(&mut backend, &config, Some(&expected.mel));
        let pairs = [
            ("scores", &expected.scores, &actual.scores),
            ("mel", &expected.mel, &actual.mel),
            ("f0", &expected.f0, &actual.f0),
            ("wave", &expected.wave, &actual.wave),
        ];
        let alike = alike.iter().map(|alike| (("alike", alike, &actual.mel), ALIKE));
        for ((what, expected, actual), (most, rms)) in pairs.into_iter().zip(limits).chain(alike) {
            let d = compare(expected, actual);
            let (most, rms) = (most * d.scale, rms * d.scale);
            println!("{name:<8} {what:<8} {:>10.2e} {:>10.2e} {:>10.2e}  {most:.1e} {rms:.1e}", d.max, d.rms, d.scale);
            if d.max > most || d.rms > rms {
                wrong.push((name, what));
                println!("  by tenths: {}", by_tenths(expected, actual));
            }
        }
    }
    assert!(wrong.is_empty(), "past their tolerances: {wrong:?}");
}

/// Steps of many rows have kernels of their own: in every mode they give what single precision gives, which the CPU does.
#[test]
fn wide_steps_agree_with_single_precision() {
    let Some(_device) = device() else { return };
    let made = |precision, hardware| {
        let options = Options { slots: Some(8), memory: Some(8 << 30), hardware, ..Options::default() };
        let source = gpu::bench::random_source(1);
        let mut backend = GpuBackend::new(full(), &source, 0, options, precision).expect("the model loads");
        mel(&mut backend, &full(), SPOKEN_WIDE)
    };
    let plain = super::hardware();
    let expected = made(Precision::EXACT, plain.clone());
    let mode = |int8_keys, products| Hardware { int8_keys, products, ..plain.clone() };
    for (name, hardware, (most, rms)) in [
        ("working", mode(false, Products::Full), WORKING_MEL),
        ("fp8", mode(false, Products::Fp8), FP8_MEL),
        ("both", mode(true, Products::Fp8Always), FP8_MEL),
    ] {
        let actual = made(Precision::default(), hardware);
        let d = compare(&expected, &actual);
        println!("{name:<12} {:>10.2e} {:>10.2e} {:>10.2e}  {}", d.max, d.rms, d.scale, by_tenths(&expected, &actual));
        assert!(d.max <= most * d.scale && d.rms <= rms * d.scale, "{name}");
    }
}

/// Where along time two results differ: the root mean square difference of each tenth.
fn by_tenths(expected: &Values, actual: &Values) -> String {
    let size = expected.data.len().div_ceil(10).max(1);
    let part = |(e, a): (&[f32], &[f32])| {
        let squares: f64 = e.iter().zip(a).map(|(e, a)| f64::from(e - a).powi(2)).sum();
        format!("{:.1e}", (squares / e.len() as f64).sqrt())
    };
    let parts: Vec<String> = expected.data.chunks(size).zip(actual.data.chunks(size)).map(part).collect();
    parts.join(" ")
}

#[test]
#[ignore = "needs 16 GB of memory and some CPU cores"]
fn full_size_agrees_with_the_cpu() {
    if let Some(_device) = device() {
        agrees(&checkpoint());
    }
}

/// The same lengths at the kit's sizes: tells a fault of length from one of width.
#[test]
fn the_kit_s_model_agrees_with_the_cpu_over_seconds() {
    if let Some(_device) = device() {
        agrees(&Path::new(KIT).join("checkpoint"));
    }
}

/// A description that asks for fewer steps, at other times.
#[test]
fn a_distilled_flow_agrees_with_the_cpu() {
    if let Some(_device) = device() {
        let (dir, kit) = (tempfile::tempdir().expect("a folder"), Path::new(KIT).join("checkpoint"));
        for entry in std::fs::read_dir(kit.canonicalize().expect("there")).expect("a folder") {
            let entry = entry.expect("an entry");
            std::os::unix::fs::symlink(entry.path(), dir.path().join(entry.file_name())).expect("a link");
        }
        let described = std::fs::read_to_string(kit.join("cosyvoice3.yaml")).expect("readable");
        let distilled =
            described.replace("t_scheduler: 'cosine'", "t_scheduler: 'linear'\n                n_timesteps: 3");
        std::fs::remove_file(dir.path().join("cosyvoice3.yaml")).expect("a link");
        std::fs::write(dir.path().join("cosyvoice3.yaml"), distilled).expect("written");
        agrees(dir.path());
    }
}

/// The parts of the device's memory add up to what the driver says is used, with 200 utterances resident.
#[test]
#[ignore = "takes the whole device"]
fn memory_is_accounted_at_two_hundred_utterances() {
    let Some(_device) = device() else { return };
    let source = gpu::bench::random_source(1);
    let mut backend = GpuBackend::new(
        full(),
        &source,
        0,
        Options { hardware: super::hardware(), ..Options::default() },
        Precision::default(),
    )
    .expect("the model loads");
    let made = random::voice(&full(), "voice", PROMPT, 5);
    let prompt = FlowPrompt { tokens: made.tokens, mel: made.mel, speaker: made.speaker };
    let voice = backend.add_voice(Arc::new(prompt)).expect("a voice");
    backend.prepare_voice(voice).expect("its blocks");
    let empty = backend.memory();
    let slots: Vec<Slot> = (0..200).map(Slot).collect();
    let spoken: Arc<[u32]> = random::voice(&full(), "spoken", 150, 6).tokens.into();
    for &slot in &slots {
        let prefix = (0..120).map(|i| Embed::Text(i * 31 + slot.0)).collect();
        let sampling = Sampling {
            key: [slot.0, 1],
            min_len: 0,
            max_len: 150,
            min_length: MinLength::Intended,
            forced: Some(spoken.clone()),
        };
        backend.open(slot, SlotRequest { voice, prefix, sampling, speed: 1.0 }).expect("opens");
    }
    let width = |backend: &GpuBackend, stage: Stage| backend.caps().limits.width[stage] as usize;
    for some in slots.chunks(width(&backend, Stage::Prefill)) {
        backend.prefill(some, &mut Vec::new()).expect("prefill");
    }
    backend.decode(&slots, 32, &mut Vec::new()).expect("decode");
    for &slot in &slots {
        backend.flow_push(slot, &spoken, true).expect("fits");
    }
    // Three blocks of six, and as many samples: in the middle of their turns.
    for some in slots.chunks(width(&backend, Stage::Flow)) {
        for _ in 0..3 {
            let mut out = Vec::new();
            backend.flow(some, full().flow.steps as u32, &mut out).expect("flow");
            assert!(out.iter().all(|f| f.failed.is_none()));
        }
    }
    for some in slots.chunks(width(&backend, Stage::Vocode)) {
        backend.vocode(some, &mut Vec::new()).expect("vocode");
    }
    let driver = backend.driver_used().expect("the driver answers");
    let parts = backend.inventory();
    for (part, bytes) in &parts {
        println!("{part:<16} {:>10.1} MB", *bytes as f64 / 1e6);
    }
    let sum: u64 = parts.iter().map(|(_, bytes)| bytes).sum();
    let slabs: u64 = parts.iter().filter(|(p, _)| matches!(p, Part::SlabsFree | Part::SlabsUsed)).map(|p| p.1).sum();
    let off = |sum: u64, driver: u64| (sum as f64 - driver as f64) / driver as f64;
    let (all, rest) = (off(sum, driver), off(sum - slabs, driver - slabs));
    println!(
        "{:<16} {:>10.1} MB\n{:<16} {:>10.1} MB: {:+.3} %, without slabs {:+.3} %",
        "sum",
        sum as f64 / 1e6,
        "driver",
        driver as f64 / 1e6,
        100.0 * all,
        100.0 * rest
    );
    let used = backend.memory().used;
    println!("{:<16} {:>10.1} MB of {:.1}", "utterances", used as f64 / 1e6, empty.total as f64 / 1e6);
    assert!(all.abs() < 0.02 && rest.abs() < 0.02);
    assert!(used > 0, "resident");
    slots.iter().for_each(|&slot| backend.close(slot));
    assert_eq!(backend.memory(), empty, "all of it came back");
}
