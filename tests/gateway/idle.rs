//! What a gateway costs that nobody calls, how soon it is there, and what a call adds. A measurement, of the program as built:
//!
//! `cargo test --release --test gateway idle -- --ignored --nocapture`; `ANTIPHON_IDLE_S` (60) and `ANTIPHON_IDLE_CALLS` (50)
//! change its length and number of calls. Figures: tests/bench/README.md.

use std::time::Duration;

use antiphon_loadgen::call::{End, now};
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::process::Sample;
use antiphon_loadgen::sip;

use super::program::Serve;

/// Most of a core that a gateway may cost that has nothing to do.
const IDLE: f64 = 0.005;

#[allow(clippy::disallowed_methods, reason = "this variable belongs to the test")]
fn number(name: &str, usual: u64) -> u64 {
    std::env::var(name).map_or(usual, |value| value.parse().unwrap_or_else(|_| panic!("{name}: a number")))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes two minutes of an idle machine"]
async fn idle_a_gateway_costs_next_to_nothing() {
    let (folder, state) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let began = now();
    let mut program = Serve::start(folder.path(), state.path(), |_| {});
    program.ready().await;
    let ready = now().saturating_duration_since(began);
    let read = || Sample::of(program.id()).expect("it lives");
    // The configuration's phrases are spoken a second after the start.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let before = read();
    tokio::time::sleep(Duration::from_secs(number("ANTIPHON_IDLE_S", 60))).await;
    let idle = read().since(&before);
    let mut calls = Vec::new();
    let count = number("ANTIPHON_IDLE_CALLS", 50);
    for _ in 0..count {
        let config = sip::Config { codecs: vec![Codec::Pcmu], ..sip::Config::default() };
        let caller = sip::Caller::bind(config).await.expect("free ports");
        calls.push(caller.call(&format!("sip:silent@{}", program.sip)).await.expect("answered"));
    }
    tokio::time::sleep(Duration::from_secs(5)).await;
    let quiet = read();
    tokio::time::sleep(Duration::from_secs(10)).await;
    let busy = read().since(&quiet);
    println!(
        "ready after {} ms; idle {:.3} % of a core, {:.1} MB; {count} silent calls: {:.0} kB and {:.3} % of a core each",
        ready.as_millis(),
        idle.cores * 100.0,
        idle.rss as f64 / 1e6,
        busy.rss.saturating_sub(idle.rss) as f64 / 1e3 / count as f64,
        (busy.cores - idle.cores).max(0.0) * 100.0 / count as f64,
    );
    for call in calls {
        assert_eq!(call.hang_up().await, End::Local);
    }
    assert_eq!(program.terminate().await, Some(0));
    assert!(idle.cores < IDLE, "{:.4} of a core", idle.cores);
}
