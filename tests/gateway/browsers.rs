//! What browser calls cost the gateway, and whether those that come and go leave something behind. Printed, for
//! `tests/bench/README.md`; alone and with a gateway that was built for speed:
//!
//! `ANTIPHON_BROWSERS=500 cargo test --release --test gateway browsers::cost -- --ignored --nocapture`
//! `ANTIPHON_LEAVES=20000 cargo test --release --test gateway browsers::leave -- --ignored --nocapture`

use std::fs;
use std::time::Duration;

use antiphon_loadgen::call::now;
use antiphon_loadgen::rtc;
use futures_util::future::join_all;
use serde_json::json;

use super::program::{Serve, until};
use super::support::PATIENCE;

/// Over how long cost is measured.
const SPAN: Duration = Duration::from_secs(10);
/// Calls that are placed at a time.
const AT_ONCE: usize = 8;
/// More speech than [`SPAN`].
const LONG: &str = "There are three flights to Lisbon tomorrow, the first of them at seven in the morning, the second a \
    little after noon, and the last one late in the evening, when fares are lowest. The first one is almost full, the \
    second has a stop in Madrid, and the third arrives a little before midnight, so that you would need a hotel. ";

fn setting(name: &str, default: usize) -> usize {
    std::env::var_os(name).and_then(|value| value.to_str()?.parse().ok()).unwrap_or(default)
}

/// Time of a core that the process has used: clock ticks of 10 ms, fields 14 and 15 of proc(5)'s stat.
fn used(process: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).expect("it lives");
    let after = stat.rsplit(") ").next().expect("fields");
    let ticks = after.split(' ').skip(11).take(2).map(|field| field.parse::<u64>().expect("a number"));
    Duration::from_millis(10 * ticks.sum::<u64>())
}

/// Resident memory in kB and open descriptors.
fn held(process: u32) -> (u64, usize) {
    let status = fs::read_to_string(format!("/proc/{process}/status")).expect("it lives");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a line of it");
    let memory = line.trim().trim_end_matches(" kB").parse().expect("a number");
    (memory, fs::read_dir(format!("/proc/{process}/fd")).expect("readable").count())
}

/// A gateway whose voice costs nothing: what is left is the calls.
async fn gateway(state: &std::path::Path) -> Serve {
    let program = Serve::start(state, state, |command| {
        command.env("ANTIPHON_ENGINE__KIND", "tone").env("ANTIPHON_WEBRTC__MAX_SESSIONS", "2000");
        command.env("ANTIPHON_SIP__UDP", "off").env("ANTIPHON_CALL__MAX_CALLS", "2000");
    });
    program.ready().await;
    program
}

fn browser(program: &Serve) -> rtc::Config {
    rtc::Config { agent: Some("silent".into()), ..rtc::Config::new(program.http.clone()) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes the whole machine"]
async fn cost() {
    let (count, state) = (setting("ANTIPHON_BROWSERS", 50), tempfile::tempdir().expect("a folder"));
    let program = gateway(state.path()).await;
    let mut calls = Vec::new();
    while calls.len() < count {
        let some = (0..AT_ONCE.min(count - calls.len())).map(|_| rtc::Caller::connect(browser(&program)));
        calls.extend(join_all(some).await.into_iter().map(|call| call.expect("connected")));
    }
    let measure = async || {
        let (before, began) = (used(program.id()), now());
        tokio::time::sleep(SPAN).await;
        (used(program.id()) - before).as_secs_f64() / began.elapsed().as_secs_f64()
    };
    let quiet = measure().await;
    let client = reqwest::Client::new();
    let speaking = count * 2 / 5;
    let first = join_all(calls.iter().take(speaking).map(async |call| {
        let (asked, id) = (now(), call.id().expect("the answer names the call"));
        let turn =
            client.post(format!("{}/v1/calls/{id}/turns", program.http)).json(&json!({ "text": LONG.repeat(2) }));
        assert_eq!(turn.send().await.expect("HTTP").status(), 202);
        call.onset(asked, PATIENCE).await.map(|onset| onset - asked)
    }));
    let mut first: Vec<Duration> = first.await.into_iter().map(|wait| wait.expect("heard")).collect();
    let loud = measure().await;
    first.sort();
    println!(
        "{count} browsers: {:.1} % of a core; {speaking} of them spoken to: {:.1} %; one more that is spoken to: {:.3} %; \
         first audio of all at once p50 {:?}, p95 {:?}; {} kB resident",
        quiet * 100.0,
        loud * 100.0,
        (loud - quiet) / speaking as f64 * 100.0 + quiet / count as f64 * 100.0,
        first[first.len() / 2],
        first[first.len() * 95 / 100],
        held(program.id()).0
    );
    join_all(calls.iter().map(|call| call.hang_up())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes the whole machine"]
async fn leave() {
    let (count, state) = (setting("ANTIPHON_LEAVES", 400), tempfile::tempdir().expect("a folder"));
    let program = gateway(state.path()).await;
    let mut curve = Vec::new();
    for round in 0..10 {
        let before = used(program.id());
        let rounds = (count / 10).div_ceil(AT_ONCE);
        for _ in 0..rounds {
            let some = (0..AT_ONCE).map(|_| rtc::Caller::connect(browser(&program)));
            for call in join_all(some).await {
                call.expect("connected").hang_up().await;
            }
        }
        until(&format!("{}/v1/calls", program.http), |body| body["calls"].as_array().is_some_and(Vec::is_empty)).await;
        let (memory, descriptors) = held(program.id());
        let left = (round + 1) * rounds * AT_ONCE;
        let each = (used(program.id()) - before).as_secs_f64() * 1e3 / (rounds * AT_ONCE) as f64;
        println!("{left:>6} came and left: {memory:>7} kB, {descriptors:>3} descriptors, {each:.1} ms of a core each");
        curve.push((left, memory, descriptors));
    }
    let (half, last) = (curve[4], curve[9]);
    let each = last.1.saturating_sub(half.1) as f64 * 1024.0 / (last.0 - half.0) as f64;
    println!("each of the second half left {each:.0} bytes");
    assert!(each < 1_024.0, "memory is given back: {curve:?}");
    assert!(last.2 <= half.2 + AT_ONCE * 2, "descriptors are given back: {curve:?}");
}
