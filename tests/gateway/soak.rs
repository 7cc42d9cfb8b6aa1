//! Everything at once, from a seed, for as long as is wanted: what is left of it in the end is nothing.
//!
//! `ANTIPHON_SOAK_S=1200 ANTIPHON_SOAK_SEED=7 cargo test --test gateway soak -- --nocapture` runs twenty minutes and prints
//! a line every ten seconds (memory, descriptors, threads, calls so far). Without the variables it is short.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use antiphon_loadgen::call::{Call, now};
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::{rtc, sip};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::program::{Serve, until};
use super::support::PATIENCE;

/// Callers at a time.
const CALLERS: u64 = 3;
/// From this length on memory is judged: before, caches fill.
const LONG: Duration = Duration::from_secs(600);
/// What a call may cost for ever, in the second half of a long run: noise of the allocator.
const BYTES_A_CALL: u64 = 2_000;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var_os(name).and_then(|value| value.to_str()?.parse().ok()).unwrap_or(default)
}

/// SplitMix64 (Steele, Lea and Flood, 2014): the same plan from the same seed.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

/// What a process holds.
#[derive(Clone, Copy, Debug)]
struct Held {
    rss: u64,
    descriptors: usize,
    threads: u64,
}

impl Held {
    fn of(process: u32) -> Held {
        let status = fs::read_to_string(format!("/proc/{process}/status")).expect("it lives");
        let number = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a line of it");
            line.trim_matches(|c: char| !c.is_ascii_digit()).parse::<u64>().expect("a number")
        };
        let descriptors = fs::read_dir(format!("/proc/{process}/fd")).expect("readable").count();
        Held { rss: number("VmRSS:") * 1_024, descriptors, threads: number("Threads:") }
    }
}

/// What was done, for all callers.
#[derive(Default)]
struct Done {
    calls: AtomicU64,
    reloads: AtomicU64,
    jobs: Mutex<Vec<String>>,
    failures: Mutex<Vec<String>>,
}

struct Caller {
    http: String,
    sip: String,
    client: reqwest::Client,
    rng: Rng,
    done: Arc<Done>,
}

impl Caller {
    async fn run(mut self, until: std::time::Instant) {
        while now() < until {
            match self.rng.below(20) {
                0 => self.batch().await,
                1 => self.reload().await,
                2 => self.garbage().await,
                3..=8 => self.call(true).await,
                _ => self.call(false).await,
            }
        }
    }

    async fn call(&mut self, browser: bool) {
        let call = if browser {
            let config = rtc::Config { agent: Some("demo".into()), ..rtc::Config::new(self.http.clone()) };
            rtc::Caller::connect(config).await
        } else {
            let codec = [Codec::Pcmu, Codec::Pcma, Codec::G722][self.rng.below(3) as usize];
            let caller = sip::Caller::bind(sip::Config { codecs: vec![codec], ..sip::Config::default() });
            caller.await.expect("free ports").call(&self.sip).await
        };
        match call {
            Ok(call) => self.talk(call).await,
            Err(error) => self.failed(format!("browser {browser}: {error}")),
        }
        self.done.calls.fetch_add(1, Relaxed);
    }

    /// Some hang up at once, some interrupt what they hear, some wait for its end.
    async fn talk(&mut self, call: Call) {
        let kind = self.rng.below(5);
        if kind > 0 {
            for _ in 0..=self.rng.below(2) {
                let Ok(pressed) = call.press("5").await else { break };
                if call.onset(pressed, PATIENCE).await.is_none() {
                    self.failed(format!("{:?}: silence", call.leg()));
                }
                if kind > 2 {
                    call.silence(pressed, Duration::from_millis(400), PATIENCE).await;
                }
            }
        }
        call.hang_up().await;
    }

    async fn batch(&self) {
        let job = self.client.post(format!("{}/v1/audio/speech/batch", self.http)).json(&json!({ "input": "Later." }));
        let answer: Value = job.send().await.expect("HTTP").json().await.expect("JSON");
        match answer["id"].as_str() {
            Some(id) => self.done.jobs.lock().expect("no panic").push(id.to_owned()),
            None => self.failed(format!("batch: {answer}")),
        }
    }

    async fn reload(&self) {
        let answer = self.client.post(format!("{}/v1/admin/reload", self.http)).send().await.expect("HTTP");
        if answer.status() != 200 {
            self.failed(format!("reload: {}", answer.status()));
        }
        self.done.reloads.fetch_add(1, Relaxed);
    }

    /// What is no offer and no message.
    async fn garbage(&self) {
        let offer = self.client.post(format!("{}/v1/webrtc", self.http)).header("content-type", "application/sdp");
        let refused = offer.body("v=0\r\nno offer").send().await.expect("HTTP").status();
        if !refused.is_client_error() {
            self.failed(format!("garbage: {refused}"));
        }
        let socket = tokio::net::UdpSocket::bind("127.0.0.1:0").await.expect("a free port");
        let to = self.sip.rsplit('@').next().unwrap_or_default();
        socket.send_to(b"INVITE sip:x SIP/2.0\r\nVia: \0\r\n\r\n", to).await.expect("sent");
    }

    fn failed(&self, what: String) {
        self.done.failures.lock().expect("no panic").push(what);
    }
}

#[tokio::test]
async fn soak() {
    let (length, seed) = (setting("ANTIPHON_SOAK_S", 12), setting("ANTIPHON_SOAK_SEED", 1));
    let length = Duration::from_secs(length);
    let (folder, state) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let mut program = Serve::start(folder.path(), state.path(), |command| {
        command.env("ANTIPHON_ENGINE__KIND", "tone");
    });
    program.ready().await;
    let (http, process) = (program.http.clone(), program.id());
    let done = Arc::new(Done::default());
    let before = Held::of(process);
    let began = now();
    let callers: Vec<_> = (0..CALLERS)
        .map(|n| {
            let (http, sip) = (http.clone(), format!("sip:demo@{}", program.sip));
            let caller =
                Caller { http, sip, client: reqwest::Client::new(), rng: Rng(seed * 1_000 + n), done: done.clone() };
            tokio::spawn(caller.run(began + length))
        })
        .collect();
    // (calls so far, memory)
    let mut curve: Vec<(u64, Held)> = Vec::new();
    let mut all = Box::pin(async {
        for caller in callers {
            caller.await.expect("no caller panics");
        }
    });
    loop {
        let ended = timeout(Duration::from_secs(10), &mut all).await.is_ok();
        let (calls, held) = (done.calls.load(Relaxed), Held::of(process));
        let Held { rss, descriptors, threads } = held;
        let seconds = began.elapsed().as_secs();
        println!(
            "{seconds:>5} s {calls:>6} calls {:>7} kB {descriptors:>4} descriptors {threads:>3} threads",
            rss / 1_024
        );
        curve.push((calls, held));
        if ended {
            break;
        }
    }
    let (calls, jobs) = (done.calls.load(Relaxed), done.jobs.lock().expect("no panic").clone());
    println!("seed {seed}: {calls} calls, {} jobs, {} reloads", jobs.len(), done.reloads.load(Relaxed));
    let failures = done.failures.lock().expect("no panic").clone();
    assert!(failures.is_empty(), "{} of {calls}: {failures:#?}", failures.len());
    assert!(calls >= CALLERS, "{calls} calls");
    until(&format!("{http}/v1/calls"), |body| body["calls"].as_array().is_some_and(Vec::is_empty)).await;
    for job in &jobs {
        until(&format!("{http}/v1/jobs/{job}"), |job| job["state"] == "done" && job["finished"] == 1).await;
    }
    // Sockets of sessions close a moment after their calls; connections of the questions above stay for a while.
    let closed = async {
        while Held::of(process).descriptors > before.descriptors + 2 * CALLERS as usize + 12 {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let held = |_| format!("{before:?} became {:?}", Held::of(process));
    timeout(2 * PATIENCE, closed).await.map_err(held).expect("descriptors are given back");
    if length >= LONG {
        let half = curve[curve.len() / 2];
        let last = curve[curve.len() - 1];
        let each = last.1.rss.saturating_sub(half.1.rss) / (last.0 - half.0).max(1);
        assert!(each <= BYTES_A_CALL, "each call of the second half left {each} bytes: {curve:#?}");
    }
    assert_eq!(program.terminate().await, Some(0));
}
