//! The GPU engine against the golden kit, and its promises about batches and failures. Where there is no GPU every
//! test says so and passes.

mod behind;
mod failures;
mod full_size;
mod hear;
mod invariant;
#[path = "../cosyvoice/rows.rs"]
mod rows;
mod streaming;
mod text_rates;
#[path = "../bench/written.rs"]
mod written;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use antiphon::synth::cosyvoice::backend::{Hardware, Options, Products, TakenFor};
use antiphon::synth::cosyvoice::config::Config;
use antiphon::synth::cosyvoice::gpu::{self, GpuBackend, Precision};
use antiphon::synth::cosyvoice::random;
use antiphon::synth::cosyvoice::selftest::{self, Kit};

/// The kit lies beside this file's package, which is also where tests run.
const KIT: &str = "tests/data/golden/cosyvoice3";

/// The device, if there is one; says so if not. One test has it at a time: others would take its memory and its time.
fn device() -> Option<MutexGuard<'static, ()>> {
    static ONE: Mutex<()> = Mutex::new(());
    match gpu::absent() {
        Some(reason) => {
            antiphon_skip::skip("gpu", reason);
            None
        }
        // A test that failed leaves nothing behind that another could see.
        None => Some(ONE.lock().unwrap_or_else(PoisonError::into_inner)),
    }
}

#[expect(clippy::disallowed_methods, reason = "which card a test runs on is no part of a configuration")]
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// What the device is taken for, so that one card shows what others would do: `ANTIPHON_TEST_ARCH` (`compute_80`) and
/// `ANTIPHON_TEST_SHARED_KIB` (`99`, `163`). `ANTIPHON_TEST_CACHE`: a folder that keeps compiled kernels between tests.
/// `ANTIPHON_TEST_PRODUCTS`: `fp8` as `[engine] products` has it, `always` in every step.
fn hardware() -> Hardware {
    let shared_kib = variable("ANTIPHON_TEST_SHARED_KIB").map(|kib| kib.parse().expect("a number of KiB"));
    Hardware {
        taken_for: TakenFor { arch: variable("ANTIPHON_TEST_ARCH"), shared_kib },
        cache: variable("ANTIPHON_TEST_CACHE").map(Into::into),
        memory: None,
        invariant: false,
        int8_keys: false,
        products: match variable("ANTIPHON_TEST_PRODUCTS").as_deref() {
            None => Products::Full,
            Some("fp8") => Products::Fp8,
            Some("always") => Products::Fp8Always,
            Some(other) => panic!("ANTIPHON_TEST_PRODUCTS `{other}`: fp8 or always"),
        },
    }
}

/// How the kit's model is built on that.
fn options(kit: &Kit) -> Options {
    Options { hardware: hardware(), ..selftest::options(kit) }
}

/// Random weights of full size, where `antiphon bench` keeps them too.
fn checkpoint() -> PathBuf {
    let dir = std::env::temp_dir().join("antiphon-random-full");
    if !dir.join("voices/random-30s.safetensors").exists() {
        random::write(&dir, random::Size::Full, 0, |_, _| ()).expect("there is room for the weights");
    }
    dir
}

#[test]
fn every_kernel_compiles_for_every_architecture() {
    if !gpu::libraries::compiles() {
        return antiphon_skip::skip(
            "nvrtc",
            "there is no run-time compiler (libnvrtc): `pip install nvidia-cuda-nvrtc`",
        );
    }
    for (arch, shared_kib) in gpu::ARCHITECTURES {
        if let Err(error) = gpu::compile_all(&full(), arch, shared_kib).expect("the compiler is there") {
            panic!("{arch}: {error}");
        }
    }
}

/// In the modes of `hardware`.
fn selftest(precision: Precision, hardware: Hardware) {
    let kit = Kit::open(Path::new(KIT)).expect("the kit opens");
    let limits = selftest::limits(precision != Precision::EXACT, &hardware);
    let options = Options { hardware, ..options(&kit) };
    let mut backend = GpuBackend::load(&kit.checkpoint_dir(), 0, options, precision).expect("the model loads");
    let working = precision != Precision::EXACT;
    let report = selftest::run(&kit, &mut backend, &limits).expect("the kit runs");
    println!("{report}");
    // A sampled token is one of two that are closer than sixteen bits resolve; scores are what is compared then.
    let wrong = report.lines.iter().find(|l| l.pass == Some(false) && !(working && l.name.contains("tokens")));
    assert!(wrong.is_none(), "first: {wrong:?}");
}

#[test]
fn single_precision_is_within_the_kits_tolerances() {
    if let Some(_device) = device() {
        selftest(Precision::EXACT, hardware());
    }
}

#[test]
fn working_precision_is_within_its_stated_tolerances() {
    if let Some(_device) = device() {
        selftest(Precision::default(), hardware());
    }
}

/// `[engine] kv = "int8"`, and products in 8 bits in every step.
#[test]
fn modes_of_fewer_bits_are_within_their_stated_tolerances() {
    if let Some(_device) = device() {
        selftest(Precision::default(), Hardware { int8_keys: true, ..hardware() });
        let products = Products::Fp8Always;
        selftest(Precision::default(), Hardware { products, ..hardware() });
        selftest(Precision::default(), Hardware { int8_keys: true, products, ..hardware() });
    }
}

/// A row's results are the same bits however many rows are multiplied with it, by every kernel that may be chosen.
#[test]
fn gemms_do_not_depend_on_the_batch() {
    use gpu::gemm_checks::{Size, disagreements};
    let Some(_device) = device() else { return };
    for (n, k) in [(1152, 896), (896, 4864), (192, 64), (64, 128)] {
        let found = disagreements(0, &hardware(), Size { n, k }).expect("the GEMMs run");
        assert!(found.is_empty(), "{found:#?}");
    }
}

/// As many scores as the full model has; also such as no model gives.
#[test]
fn sampling_draws_what_its_specification_does() {
    let Some(_device) = device() else { return };
    let found = gpu::sample_checks::disagreements(0, &hardware(), &full().llm).expect("sampling runs");
    assert!(found.is_empty(), "{found:#?}");
}

/// What the language model's GEMMs cost with each kernel and tile configuration.
#[test]
#[ignore = "measures; run it on a quiet device"]
fn gemm_costs() {
    use gpu::gemm_checks::{Size, costs};
    let Some(_device) = device() else { return };
    let sizes = [(1152, 896), (896, 896), (9728, 896), (896, 4864), (6784, 896)].map(|(n, k)| Size { n, k });
    for cost in costs(0, &hardware(), &sizes, &[1, 8, 16, 32, 64, 128, 256, 350]).expect("the GEMMs run") {
        println!("{cost}");
    }
}

/// Sizes of the 0.5B model.
fn full() -> Config {
    let dir = tempfile::tempdir().expect("temp dir");
    random::write_texts(dir.path(), random::Size::Full).expect("written");
    Config::load(dir.path()).expect("sizes")
}

#[test]
#[ignore = "measures; run it on a quiet device"]
fn stage_costs() {
    let Some(_device) = device() else { return };
    for cost in gpu::bench::ceilings(0, &hardware()).expect("ceilings") {
        println!("{cost}");
    }
    let options = Options { hardware: hardware(), ..Options::default() };
    let source = gpu::bench::random_source(1);
    let mut backend = GpuBackend::new(full(), &source, 0, options, Precision::default()).expect("the model loads");
    println!("{}", backend.device_name());
    for (what, bytes) in backend.inventory() {
        println!("{what:<24} {:>9.1} MB", bytes as f64 / 1e6);
    }
    for cost in backend.stage_costs(&gpu::bench::Effort::default()).expect("the stages run") {
        println!("{cost}");
    }
}

/// What each kernel costs inside its stage.
#[test]
#[ignore = "measures; run it on a quiet device"]
fn kernel_costs() {
    let Some(_device) = device() else { return };
    let options = Options { slots: Some(256), memory: Some(60 << 30), hardware: hardware(), ..Options::default() };
    let source = gpu::bench::random_source(1);
    let mut backend = GpuBackend::new(full(), &source, 0, options, Precision::default()).expect("the model loads");
    for width in [1, 2, 32, 64, 256] {
        let effort = gpu::bench::Effort { widths: vec![width], ..Default::default() };
        for (stage, kernels) in backend.kernel_costs(&effort).expect("the stages run") {
            println!("-- {stage}, width {width}");
            for k in kernels {
                println!("{k}");
            }
        }
    }
}

/// The same seeds give the same tokens alone and inside a batch of any width, to the bit.
#[test]
fn tokens_do_not_depend_on_the_batch() {
    use antiphon::synth::Slot;
    use antiphon::synth::cosyvoice::backend::{Backend, Embed, FlowPrompt, MinLength, Sampling, SlotRequest};
    let Some(_device) = device() else { return };
    let kit = Kit::open(Path::new(KIT)).expect("the kit opens");
    let options = Options { slots: Some(256), memory: Some(4 << 30), ..options(&kit) };
    let mut backend =
        GpuBackend::load(&kit.checkpoint_dir(), 0, options, Precision::default()).expect("the model loads");
    let config = backend.config().clone();
    let prompt = FlowPrompt {
        tokens: vec![1; 30],
        mel: vec![0.0; 60 * config.flow.mel],
        speaker: vec![1.0; config.flow.speaker],
    };
    let voice = backend.add_voice(std::sync::Arc::new(prompt)).expect("a voice");
    let mut speak = |slots: &[u32]| {
        for &n in slots {
            // Lengths differ, so that rows of a pass are not alike.
            let mut prefix = vec![Embed::Speech(config.llm.control(0))];
            prefix.extend((0..20 + n).map(|i| Embed::Text((i * 13 + n) % 900)));
            prefix.push(Embed::Speech(config.llm.control(2)));
            let sampling =
                Sampling { key: [n, 7], min_len: 60, max_len: 60, min_length: MinLength::Intended, forced: None };
            backend.open(Slot(n), SlotRequest { voice, prefix, sampling, speed: 1.0 }).expect("opens");
        }
        let all: Vec<Slot> = slots.iter().map(|&n| Slot(n)).collect();
        let mut first = Vec::new();
        for some in all.chunks(64) {
            backend.prefill(some, &mut first).expect("prefill");
        }
        let mut tokens: Vec<Vec<u32>> = first.into_iter().map(|p| p.tokens).collect();
        for rounds in [1, 7, 32, 32] {
            let mut out = Vec::new();
            backend.decode(&all, rounds, &mut out).expect("decode");
            assert_eq!(out.len(), all.len());
            for ((list, slot), d) in tokens.iter_mut().zip(&all).zip(out) {
                assert_eq!(d.slot, *slot);
                assert!(d.failed.is_none(), "{:?}", d.failed);
                list.extend(d.tokens);
            }
        }
        tokens
    };
    // What every slot says among 64.
    let together: Vec<Vec<u32>> =
        [0, 64, 128, 192].into_iter().flat_map(|from| speak(&(from..from + 64).collect::<Vec<_>>())).collect();
    assert!(together.iter().all(|t| t.len() == 60));
    for n in [0, 5, 33, 63, 255] {
        assert_eq!(speak(&[n]), together[n as usize..][..1], "slot {n}");
    }
    for count in [20, 65, 100, 128, 150, 256] {
        let wide = speak(&(0..count).collect::<Vec<_>>());
        assert_eq!(wide, together[..count as usize], "{count} at once");
    }
}
