//! The full-size layout with random weights on the CPU. Takes minutes, 3.4 GB of disk and under 6 GB of memory:
//! `cargo test --test cosyvoice full:: -- --ignored --nocapture`.

use std::time::Instant;

use antiphon::synth::cosyvoice::backend::Options;
use antiphon::synth::cosyvoice::cpu::CpuBackend;
use antiphon::synth::cosyvoice::random::{self, Size};
use antiphon::synth::cosyvoice::{CosyVoice, Settings, verify};
use antiphon::synth::{Slot, Stage, Step, Synthesizer};
use antiphon::turn::{Class, StreamId, Utterance};

/// What the process has held at most, bytes.
fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|l| l.starts_with("VmHWM:")).unwrap_or_default();
    let kilobytes: u64 = line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap_or_default();
    kilobytes << 10
}

#[test]
#[ignore = "takes minutes and gigabytes"]
#[expect(clippy::disallowed_methods, reason = "this measures")]
fn the_full_size_speaks_within_six_gigabytes() {
    let started = Instant::now();
    let dir = tempfile::tempdir().expect("temp dir");
    random::write(dir.path(), Size::Full, 1, |_, _| ()).expect("written");
    println!("written in {:.1?}", started.elapsed());
    let started = Instant::now();
    let report = verify::verify(dir.path(), "llm");
    assert!(report.passed(), "{report}");
    assert_eq!(report.tensors, 951);
    println!("verified in {:.1?}, peak {} MB", started.elapsed(), peak_memory() >> 20);
    let started = Instant::now();
    let mut engine =
        CosyVoice::<CpuBackend>::load_cpu(dir.path(), Options::default(), Settings::default()).expect("loads");
    println!("loaded in {:.1?}, peak {} MB", started.elapsed(), peak_memory() >> 20);
    engine.force_length(Some(60));
    let utterance = Utterance { seed: 1, ..Utterance::plain(StreamId::next(), Class::Live, "The full size speaks.") };
    let mut ready = engine.open(Slot(0), &utterance).expect("opens");
    let (mut samples, mut times, mut out) = (Vec::new(), [0f64; 4], Vec::new());
    let started = Instant::now();
    let mut first = None;
    while let Some(stage) = Stage::ALL.into_iter().rev().find(|&s| ready.has(s)) {
        let step = Instant::now();
        out.clear();
        engine.run(&Step { stage, slots: vec![Slot(0)], rounds: 5 }, &mut out).expect("runs");
        times[stage as usize] += step.elapsed().as_secs_f64();
        let progress = out.pop().expect("one result");
        assert!(progress.outcome.failed.is_none(), "{:?}", progress.outcome.failed);
        if first.is_none() && !progress.pcm.is_empty() {
            first = Some(started.elapsed());
        }
        samples.extend(progress.pcm);
        ready = progress.outcome.ready;
    }
    let took = started.elapsed().as_secs_f64();
    let audio = samples.len() as f64 / 24_000.0;
    println!("{audio:.1} s of audio in {took:.1} s: real-time factor {:.1}, first audio {first:.1?}", took / audio);
    println!("prefill (with the voice prefix), decode, flow, vocode: {times:.1?} s");
    let rms = (samples.iter().map(|v| v * v).sum::<f32>() / samples.len() as f32).sqrt();
    println!("rms {rms}, peak memory {} MB", peak_memory() >> 20);
    assert!((0.002..0.9).contains(&rms));
    assert!(peak_memory() < 6_000_000_000);
}
