//! The program itself: what it refuses, and what it makes of a report.

use std::path::Path;
use std::process::{Command, Output};

use antiphon_loadgen::process::{Host, Usage};
use antiphon_loadgen::report::{FORMAT, Knee, Level, Report};
use antiphon_loadgen::scenario::Scenario;
use antiphon_loadgen::stats::Summary;

fn loadgen(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_antiphon-loadgen")).args(arguments).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_bad_scenario_ends_with_line_key_and_code() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bad.toml");
    std::fs::write(&path, "duration_s = 5\n[arrivals]\nkind = \"closed\"\ncallers = 2\n[turns]\nlangages = [\"en\"]\n")
        .unwrap();
    let output = loadgen(&["run", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(64));
    let said = said(&output);
    assert!(said.contains("bad.toml:6: turns.langages") && said.contains("languages"), "{said}");
}

#[test]
fn usage_and_unreachable_gateways_have_their_codes() {
    assert_eq!(loadgen(&["ladder", "--levels", "none"]).status.code(), Some(2));
    let output = loadgen(&["ladder"]);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("--target"), "{}", said(&output));
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("r.json");
    let spawn = "sh -c 'echo no such model; exit 64'";
    let output = loadgen(&["ladder", "--target", "http://127.0.0.1:1", "-o", json.to_str().unwrap(), "--spawn", spawn]);
    assert_eq!(output.status.code(), Some(69), "{}", said(&output));
    assert!(said(&output).contains("no such model"), "{}", said(&output));
    assert_eq!(loadgen(&["ladder", "--target", "http://127.0.0.1:8080", "--languages", "xx"]).status.code(), Some(2));
}

#[test]
fn shipped_scenarios_are_right() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios");
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if let Err(error) = Scenario::load(&path) {
            panic!("{error}");
        }
        seen += 1;
    }
    assert!(seen >= 3);
}

#[test]
fn a_report_becomes_a_page_and_a_size() {
    let folder = tempfile::tempdir().unwrap();
    let level = |n: u32| Level {
        level: n,
        mode: "closed".into(),
        seconds: 20.0,
        turns: u64::from(n) * 4,
        first_audio: Summary { count: 10, p50: 0.04, p95: 0.05, p99: 0.06, ..Summary::default() },
        rtf: Summary { count: 10, p95: 1.0, ..Summary::default() },
        service: Summary { count: 10, mean: 4.5, ..Summary::default() },
        audio_s_per_s: f64::from(n) * 0.8,
        gateway: Some(Usage { cores: f64::from(n) * 0.03, rss: 50_000_000 }),
        generator: Some(Usage { cores: f64::from(n) * 0.005, rss: 50_000_000 }),
        ..Level::default()
    };
    let report = Report {
        format: FORMAT,
        name: "ladder".into(),
        host: Host { cores: 2, ..Host::default() },
        levels: [4, 8, 16, 32].map(level).to_vec(),
        knee: Some(Knee { level: 32, broken_at: Some(36) }),
        ..Report::default()
    };
    let json = folder.path().join("r.json");
    let page = folder.path().join("r.html");
    std::fs::write(&json, serde_json::to_string(&report).unwrap()).unwrap();
    let output = loadgen(&["report", json.to_str().unwrap(), "-o", page.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let text = std::fs::read_to_string(&page).unwrap();
    assert!(text.starts_with("<!DOCTYPE html>") && text.contains("RTX 5090"));
    let output =
        loadgen(&["size", "--users", "1000,10000", "--turns-per-user-hour", "12", "--from", json.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        table.contains("GPUs")
            && table.contains("Erlang C")
            && table.contains("Prediction: 48 calls from levels 4, 8, 16"),
        "{table}"
    );
    std::fs::write(&json, "{}").unwrap();
    assert_eq!(loadgen(&["size", "--from", json.to_str().unwrap()]).status.code(), Some(64));
}
