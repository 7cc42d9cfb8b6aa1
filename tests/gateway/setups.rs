//! Calls that are set up and ended one after the other, at a rate: sipp makes them, nothing may stay of any, and each has a
//! record.
//!
//! `ANTIPHON_SETUPS=10000 cargo test --test gateway setups -- --nocapture` is the long form; `ANTIPHON_SETUPS_RATE=100` are the
//! calls of a second. What it said last is in `tests/bench/README.md`.

use std::collections::HashSet;
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use tokio::process::Command;
use tokio::time::timeout;

use super::program::{Serve, until};
use super::soak::{Held, setting};
use super::support::PATIENCE;

/// sipp makes so many calls of 200 ms at `program`.
async fn make(program: &Serve, calls: u64, rate: u64) {
    let folder = tempfile::tempdir().expect("a folder");
    let scenario = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/sip/basic.xml");
    let (calls, rate, limit) = (calls.to_string(), rate.to_string(), (calls / rate * 4 + 60).to_string());
    let output = Command::new("sipp")
        .current_dir(folder.path())
        .args(["-sf", scenario, "-nostdin", "-i", "127.0.0.1", "-m", &calls, "-r", &rate, "-l", "500"])
        .args(["-timeout", &limit, "-timeout_error", "-trace_err", "-error_file", "errors", &program.sip.to_string()])
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .expect("sipp runs");
    let errors = std::fs::read_to_string(folder.path().join("errors")).unwrap_or_default();
    assert!(output.status.success(), "{}: {}", output.status, &errors[..errors.len().min(4_000)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_at_a_rate_leave_records_and_nothing_else() {
    if !antiphon_skip::has_program("sipp", "sip-tester") {
        return;
    }
    let (calls, rate) = (setting("ANTIPHON_SETUPS", 100).max(100), setting("ANTIPHON_SETUPS_RATE", 100));
    // Of the memory: what every table and pool has once.
    let first = calls / 2;
    let (folder, state) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let config = "[agent.demo]\nurl = \"builtin:silent\"\n";
    std::fs::write(folder.path().join("gateway.toml"), config).expect("written");
    let mut program = Serve::start(folder.path(), state.path(), |command| {
        command
            .env("ANTIPHON_ENGINE__KIND", "tone")
            // All of them come from one address.
            .env("ANTIPHON_SIP__HALF_OPEN_PER_SOURCE", "1000")
            .args(["-c", "gateway.toml"]);
    });
    program.ready().await;
    let idle = Held::of(program.id());
    let began = antiphon_loadgen::call::now();
    make(&program, first, rate).await;
    let half = Held::of(program.id());
    make(&program, calls - first, rate).await;
    let lasted = began.elapsed();
    until(&format!("{}/v1/calls", program.http), |body| body["calls"].as_array().is_some_and(Vec::is_empty)).await;

    // Every call has a record, which is closed and says how it ended.
    let client = reqwest::Client::new();
    let export = async || -> Vec<Value> {
        let request = client.get(format!("{}/v1/records", program.http)).header("accept", "application/jsonl");
        let text = request.send().await.expect("HTTP").text().await.expect("text");
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    };
    let wanted = calls;
    let complete = async {
        loop {
            let records = export().await;
            let ended = records.iter().filter(|record| record["state"] == "ended").count() as u64;
            if ended >= wanted {
                return records;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    let records = timeout(PATIENCE, complete).await.expect("every record is closed");
    let ids: HashSet<_> = records.iter().filter_map(|record| record["id"].as_str()).collect();
    assert_eq!((records.len() as u64, ids.len() as u64), (wanted, wanted), "one each");
    for record in &records {
        let at = |key: &str| record[key].as_u64().unwrap_or_else(|| panic!("{key}: {record}"));
        assert!(at("startedMs") <= at("answeredMs") && at("answeredMs") <= at("endedMs"), "{record}");
        assert!(record["cause"].is_string(), "{record}");
    }
    // Sockets close a moment after their calls; this test's own questions keep a few.
    let closed = async {
        while Held::of(program.id()).descriptors > idle.descriptors + 12 {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    timeout(PATIENCE, closed).await.expect("descriptors are given back");
    let held = Held::of(program.id());
    assert_eq!(held.threads, half.threads, "threads");
    println!(
        "{wanted} calls in {:.1} s; descriptors {} before and {} after; memory {} kB before, {} after half, {} after all",
        lasted.as_secs_f64(),
        idle.descriptors,
        held.descriptors,
        idle.rss / 1_024,
        half.rss / 1_024,
        held.rss / 1_024
    );
    assert_eq!(program.terminate().await, Some(0));
}
