//! Enrolment against reference numbers: every tensor of `tests/data/golden/voice` within its tolerance, tokens exact.

use std::path::{Path, PathBuf};

use antiphon::voice::selftest;

fn kit() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden/voice")
}

#[test]
fn every_reference_tensor_is_met() {
    let report = selftest::run(&kit()).expect("the kit is readable");
    print!("{report}");
    let failed: Vec<&str> = report.rows.iter().filter(|r| r.pass != Some(true)).map(|r| r.name.as_str()).collect();
    assert!(failed.is_empty(), "{failed:?}\n{report}");
    assert!(report.rows.len() >= 60, "only {} comparisons", report.rows.len());
}

#[test]
fn an_empty_folder_is_refused() {
    let dir = tempfile::tempdir().expect("temp dir");
    assert!(selftest::run(dir.path()).is_err());
}
