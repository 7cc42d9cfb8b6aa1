//! CosyVoice3 on the CPU against the stored tensors of the original.

use std::path::Path;

use antiphon::synth::cosyvoice::selftest;

#[test]
fn every_golden_tensor_is_within_its_tolerance() {
    let kit = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/cosyvoice3");
    let report = selftest::run_on_cpu(&kit).expect("the kit runs");
    println!("{report}");
    assert!(report.passed(), "{report}");
}
