//! The program itself: what it refuses, and what it makes of a report.

use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use antiphon_loadgen::process::{Host, Usage};
use antiphon_loadgen::report::{FORMAT, Knee, Level, Report};
use antiphon_loadgen::scenario::Scenario;
use antiphon_loadgen::stats::Summary;
use antiphon_loadgen::synthetic;

use crate::support::{Reply, Whip};

/// Longer than anything takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

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
        chars_per_s: f64::from(n) * 12.0,
        gateway: Some(Usage { cores: f64::from(n).powf(0.8) * 0.065, rss: 50_000_000, ..Usage::default() }),
        generator: Some(Usage { cores: f64::from(n).powf(0.8) * 0.011, rss: 50_000_000, ..Usage::default() }),
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
    let card =
        |n: usize| serde_json::json!({ "engine": "cosyvoice3", "device": format!("cuda:{n}"), "state": "ready" });
    let report = Report { devices: serde_json::json!([card(0), card(1)]), ..report };
    let json = folder.path().join("r.json");
    let page = folder.path().join("r.html");
    std::fs::write(&json, serde_json::to_string(&report).unwrap()).unwrap();
    let output = loadgen(&["report", json.to_str().unwrap(), "-o", page.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let text = std::fs::read_to_string(&page).unwrap();
    assert!(text.starts_with("<!DOCTYPE html>") && text.contains("RTX 5090"));
    assert!(text.contains("<th>gateways<th>GPUs<th>cores") && text.contains("A gateway has 2 GPUs."));
    assert!(text.contains("Beside published systems") && text.contains("not published"));
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
    let cells = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let rows: Vec<Vec<String>> = table.lines().map(cells).collect();
    let planned = rows.iter().find(|row| row.first().is_some_and(|users| users == "10000")).expect("a row");
    assert_eq!(planned[4..6], ["6", "12"], "six gateways of two cards each: {table}");
    // The published users' table, with cards and not gateways beside it.
    assert!(rows.contains(&["10000", "30", "12", "6"].map(str::to_owned).to_vec()), "{table}");
    assert!(table.contains("A10G cards") && table.contains("80 % memory") && table.contains("TensorRT-LLM"), "{table}");
    let from = json.to_str().unwrap();
    let output = loadgen(&["size", "--from", from, "--gpu-hour", "2.5", "--api-million", "15", "--busy-hour", "2"]);
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    let costs = ["a million characters", "a minute of a call", "A day at that load", "an interface at 15", "RTX 5090"];
    assert!(costs.iter().all(|words| table.contains(words)), "{}", said(&output));
    assert_eq!(loadgen(&["size", "--from", from, "--gpu-hour", "-1"]).status.code(), Some(2));
    assert_eq!(loadgen(&["size", "--from", from, "--sharing", "0"]).status.code(), Some(2));
    let output = loadgen(&["size", "--from", from, "--users", "10000", "--sharing", "2", "--spare", "2"]);
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(cells(table.lines().nth(1).expect("a row"))[4..6], ["8", "8"], "{table}");
    std::fs::write(&json, "{}").unwrap();
    assert_eq!(loadgen(&["size", "--from", json.to_str().unwrap()]).status.code(), Some(64));
}

/// Whether a process with these arguments runs.
fn runs(arguments: &[&str]) -> bool {
    let wanted = arguments.join("\0");
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    processes.filter_map(|p| std::fs::read(p.path().join("cmdline")).ok()).any(|line| {
        let line = String::from_utf8_lossy(&line).into_owned();
        line.trim_end_matches('\0').ends_with(&wanted) && !line.contains("ladder")
    })
}

async fn becomes(what: &str, mut wanted: impl FnMut() -> bool) {
    let waiting = async {
        while !wanted() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting).await.unwrap_or_else(|_| panic!("{what}"));
}

/// Seen when a measurement was interrupted: the gateway that it had started kept a whole GPU, and there was no report.
#[tokio::test(flavor = "multi_thread")]
async fn a_signal_ends_the_gateway_that_was_started_and_the_report_has_what_was_measured() {
    for (n, signal) in ["TERM", "KILL"].into_iter().enumerate() {
        let turns = Arc::new(AtomicUsize::new(0));
        let counter = turns.clone();
        let server = Whip::start(move |_, _| {
            counter.fetch_add(1, Ordering::Relaxed);
            Reply::plain(Duration::from_millis(40), synthetic::babble(5, 24_000, 0.4))
        })
        .await;
        let folder = tempfile::tempdir().unwrap();
        let json = folder.path().join("r.json");
        // What is started need not be a gateway: one is there already.
        let seconds = (100_000 + 2 * std::process::id() as usize + n).to_string();
        let mut child = Command::new(env!("CARGO_BIN_EXE_antiphon-loadgen"))
            .args(["ladder", "--target", &server.url, "--legs", "webrtc", "--levels", "1", "--seconds", "3600"])
            .args(["--no-search", "--no-verify", "--spawn", &format!("sleep {seconds}")])
            .args(["-o", json.to_str().unwrap()])
            .spawn()
            .unwrap();
        becomes("turns are heard", || turns.load(Ordering::Relaxed) >= 3).await;
        assert!(runs(&["sleep", &seconds]), "it was not started");
        let sent = Command::new("kill").args([&format!("-{signal}"), &child.id().to_string()]).status().unwrap();
        assert!(sent.success());
        let mut ended = None;
        becomes("it ends", || {
            ended = child.try_wait().unwrap();
            ended.is_some()
        })
        .await;
        let has_setpriv = Command::new("setpriv").arg("--version").output().is_ok();
        if signal == "TERM" || has_setpriv {
            becomes("what it started ends, too", || !runs(&["sleep", &seconds])).await;
        }
        if signal == "TERM" {
            assert_eq!(ended.and_then(|status| status.code()), Some(130));
            let report: Report = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
            assert!(report.ended_early.is_some_and(|why| why.contains("signal")));
            let level = &report.levels[0];
            assert!(level.turns >= 1 && level.incomplete && level.first_audio.count == level.turns, "{level:?}");
            assert!(folder.path().join("r.html").exists());
        }
    }
}
