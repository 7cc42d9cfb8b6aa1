//! CosyVoice3 on the CPU against the stored tensors of the original.

use std::path::{Path, PathBuf};

use antiphon::synth::cosyvoice::backend::{Hardware, Products};
use antiphon::synth::cosyvoice::selftest::{self, Report};

fn kit(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden").join(name)
}

fn note<'a>(report: &'a Report, name: &str) -> &'a str {
    report.lines.iter().find(|l| l.name == name).map(|l| l.note.as_str()).unwrap_or_default()
}

#[test]
fn every_golden_tensor_is_within_its_tolerance() {
    let report = selftest::run_on_cpu(&kit("cosyvoice3"), Hardware::default()).expect("the kit runs");
    println!("{report}");
    assert!(report.passed(), "{report}");
    let missing: Vec<&str> = report.lines.iter().filter(|l| l.pass.is_none()).map(|l| l.name.as_str()).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// What the modes of fewer bits cost in the flow, with everything else in single precision.
#[test]
fn modes_of_fewer_bits_are_within_their_stated_tolerances() {
    // The other stages, which the modes do not change, take most of the time.
    let (dir, whole) = (tempfile::tempdir().expect("temp dir"), kit("cosyvoice3").canonicalize().expect("there"));
    for name in ["checkpoint", "flow.safetensors"] {
        std::os::unix::fs::symlink(whole.join(name), dir.path().join(name)).expect("a link");
    }
    let full = Hardware::default();
    for (mode, mel) in [
        (Hardware { int8_keys: true, ..full.clone() }, 5e-5..5e-4),
        (Hardware { products: Products::Fp8Always, ..full.clone() }, 5e-3..0.04),
    ] {
        let report = selftest::run_on_cpu(dir.path(), mode.clone()).expect("the kit runs");
        println!("{mode:?}\n{report}");
        assert!(report.passed(), "{report}");
        for line in report.lines.iter().filter(|l| l.stage == "flow" && l.rms > 0.0) {
            println!("{:<36} {:>8.3} %", line.name, 100.0 * line.rms / line.scale);
        }
        let part = |name: &str| {
            let line = report.lines.iter().find(|l| l.name == name && l.pass == Some(true)).expect("the kit has it");
            line.rms / line.scale
        };
        assert!(mel.contains(&part("mel_stream_mask_final")), "it rounds, and no more");
        assert!(part("dit_input_embed") < 1e-5, "blocks alone");
    }
}

#[test]
fn nothing_of_one_kit_is_taken_for_granted() {
    let report = selftest::run_on_cpu(&kit("cosyvoice3-sizes"), Hardware::default()).expect("the kit runs");
    println!("{report}");
    assert!(report.passed(), "{report}");
    // What the kit's makers chose is found in the kit.
    assert_eq!(note(&report, "bi1_tokens"), "text by 1");
    assert_eq!(note(&report, "bi2_tokens"), "text by 5");
    assert_eq!(note(&report, "chunk_schedule"), "hops of 25 to 100 tokens, blocks of 15");
    assert_eq!(note(&report, "mel_odd_prompt"), "6 prompt tokens, 23 frames, 14 tokens");
    // What it lacks is said and does not fail.
    for name in ["text rules", "tokenizer cases", "mel_speed_"] {
        assert_eq!(note(&report, name), "absent", "{name}");
    }
    assert!(report.lines.iter().filter(|l| l.pass == Some(true)).count() > 65, "{report}");
}

#[test]
fn a_wrong_number_fails_at_the_stage_where_it_first_shows() {
    let dir = tempfile::tempdir().expect("temp dir");
    let from = kit("cosyvoice3-sizes");
    for name in ["checkpoint", "checkpoint/CosyVoice-BlankEN"] {
        std::fs::create_dir(dir.path().join(name)).expect("made");
        for entry in std::fs::read_dir(from.join(name)).expect("listed").map(|e| e.expect("read")) {
            if entry.path().is_file() {
                std::fs::copy(entry.path(), dir.path().join(name).join(entry.file_name())).expect("copied");
            }
        }
    }
    for name in ["flow.safetensors", "e2e.safetensors"] {
        std::fs::copy(from.join(name), dir.path().join(name)).expect("copied");
    }
    // Another guidance rate than the kit was made with: the network is right, what the solver makes of it is not.
    let yaml = dir.path().join("checkpoint/cosyvoice3.yaml");
    let text = std::fs::read_to_string(&yaml).expect("read");
    std::fs::write(&yaml, text.replace("inference_cfg_rate: 0.9", "inference_cfg_rate: 0.8")).expect("written");
    let report = selftest::run_on_cpu(dir.path(), Hardware::default()).expect("the kit runs");
    assert!(!report.passed(), "{report}");
    assert_eq!(report.first_failure().map(|l| l.name.as_str()), Some("mel_nonstream"), "{report}");
    assert!(report.lines.iter().any(|l| l.stage == "llm" && l.note == "absent"), "{report}");
}
