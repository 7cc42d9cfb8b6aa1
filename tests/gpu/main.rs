//! The GPU engine against the golden kit, and its promises about batches and failures. Where there is no GPU every
//! test says so and passes.

use std::path::Path;

use antiphon::synth::cosyvoice::config::Config;
use antiphon::synth::cosyvoice::gpu::{self, GpuBackend, Precision};
use antiphon::synth::cosyvoice::selftest::{self, Kit};

/// The kit lies beside this file's package, which is also where tests run.
const KIT: &str = "tests/golden/cosyvoice3";

/// Whether a device is there; says so if not.
fn device() -> bool {
    match gpu::absent() {
        Some(reason) => {
            println!("skipped: {reason}");
            false
        }
        None => true,
    }
}

#[test]
fn every_kernel_compiles_for_hopper() {
    let config = Config::load(&Path::new(KIT).join("checkpoint")).expect("the kit's sizes");
    match gpu::compile_all(&config, "sm_90a") {
        Some(result) => result.expect("kernels compile"),
        None => println!("skipped: no run-time compiler (libnvrtc) here"),
    }
}

fn selftest(precision: Precision, limits: &[(&str, f64)]) {
    let kit = Kit::open(Path::new(KIT)).expect("the kit opens");
    let mut backend = GpuBackend::load(&kit.checkpoint_dir(), 0, selftest::options(&kit), precision).expect("the model loads");
    let report = selftest::run(&kit, &mut backend, limits).expect("the kit runs");
    println!("{report}");
    assert!(report.passed(), "first: {:?}", report.first_failure());
}

#[test]
fn single_precision_is_within_the_kits_tolerances() {
    if device() {
        selftest(Precision::EXACT, &[]);
    }
}

#[test]
fn working_precision_is_within_its_stated_tolerances() {
    if device() {
        selftest(Precision::default(), &[("llm", 0.1), ("flow", 0.1), ("hift", 0.1), ("e2e", 0.5)]);
    }
}

/// Sizes of the 0.5B model.
fn full() -> Config {
    use antiphon::synth::cosyvoice::config::{FlowConfig, HiftConfig, LlmConfig, RasConfig};
    let three = |v: [usize; 3]| vec![v.to_vec(), v.to_vec(), v.to_vec()];
    Config {
        sample_rate: 24000,
        token_rate: 25,
        token_mel_ratio: 2,
        llm: LlmConfig {
            hidden: 896,
            layers: 24,
            heads: 14,
            kv_heads: 2,
            head_dim: 64,
            intermediate: 4864,
            rms_eps: 1e-6,
            rope_theta: 1e6,
            vocab: 151_936,
            tied: true,
            speech_tokens: 6561,
            mix_ratio: [5, 15],
            sampling: RasConfig { top_p: 0.8, top_k: 25, window: 10, tau: 0.1 },
        },
        flow: FlowConfig {
            input: 80,
            mel: 80,
            speaker: 192,
            vocab: 6561,
            lookahead: 3,
            lookahead_channels: 1024,
            dim: 1024,
            depth: 22,
            heads: 16,
            head_dim: 64,
            ff_mult: 2,
            spk_dim: 80,
            block: 50,
            left_blocks: None,
            guidance: 0.7,
        },
        hift: HiftConfig {
            mel: 80,
            base_channels: 512,
            harmonics: 8,
            sine_amp: 0.1,
            noise_std: 0.003,
            voiced_threshold: 10.0,
            upsample_rates: vec![8, 5, 3],
            upsample_kernels: vec![16, 11, 7],
            n_fft: 16,
            hop: 4,
            resblock_kernels: vec![3, 7, 11],
            resblock_dilations: three([1, 3, 5]),
            source_kernels: vec![7, 7, 11],
            source_dilations: three([1, 3, 5]),
            slope: 0.1,
            limit: 0.99,
            look_right: 4,
            f0_channels: 512,
        },
    }
}

#[test]
#[ignore = "measures; run it on a quiet device"]
fn stage_costs() {
    if !device() {
        return;
    }
    for cost in gpu::bench::ceilings(0).expect("ceilings") {
        println!("{cost}");
    }
    let options = antiphon::synth::cosyvoice::backend::Options::default();
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

#[test]
#[ignore = "debug"]
fn margins() {
    use antiphon::synth::cosyvoice::backend::Embed;
    use antiphon::synth::cosyvoice::probe::Probe;
    let kit = Kit::open(Path::new(KIT)).expect("the kit opens");
    let config = Config::load(&kit.checkpoint_dir()).expect("sizes");
    let c = &config.llm;
    let mut prefix = vec![Embed::Speech(c.control(0))];
    prefix.extend((0..67).map(|i| Embed::Text(i * 7 + 3)));
    prefix.push(Embed::Speech(c.control(2)));
    let limit = c.speech_tokens;
    let mut cpu = antiphon::synth::cosyvoice::cpu::CpuBackend::load(&kit.checkpoint_dir(), selftest::options(&kit)).expect("cpu");
    let mut gpu = device().then(|| GpuBackend::load(&kit.checkpoint_dir(), 0, selftest::options(&kit), Precision::EXACT).expect("gpu"));
    let mut all: Vec<Vec<f32>> = Vec::new();
    let tokens = cpu
        .llm_decode(&prefix, &mut |s, ids| {
            if ids.len() >= 230 {
                return None;
            }
            let recent = &ids[ids.len().saturating_sub(10)..];
            let mut o: Vec<u32> = (0..limit as u32).filter(|i| !recent.contains(i)).collect();
            o.sort_by(|a, b| s[*b as usize].total_cmp(&s[*a as usize]));
            let m = s[o[0] as usize] - s[o[1] as usize];
            if m < 2e-3 {
                println!("cpu step {} margin {m:e} {} {}", ids.len(), o[0], o[1]);
            }
            all.push(s.to_vec());
            Some(o[0])
        })
        .expect("decode");
    if let Some(gpu) = &mut gpu {
        let mut n = 0;
        gpu.llm_decode(&prefix, &mut |s, _| {
            let d = s.iter().zip(&all[n]).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            if n % 20 == 0 || d > 1e-3 {
                println!("step {n} difference {d:e}");
            }
            n += 1;
            tokens.get(n - 1).copied()
        })
        .expect("decode");
    }
}

/// One pass of every stage for a profiler to look at.
#[test]
#[ignore = "for a profiler"]
fn profile() {
    if !device() {
        return;
    }
    let options = antiphon::synth::cosyvoice::backend::Options { slots: Some(64), ..Default::default() };
    let source = gpu::bench::random_source(1);
    let mut backend = GpuBackend::new(full(), &source, 0, options, Precision::default()).expect("the model loads");
    let effort = gpu::bench::Effort { visible: 350, repeats: 1, rounds: 1, widths: vec![1, 32, 64] };
    gpu::bench::profiler(true);
    backend.stage_costs(&effort).expect("the stages run");
    gpu::bench::profiler(false);
}
