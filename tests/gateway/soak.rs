//! Everything at once, from a seed, for as long as is wanted: what is left of it in the end is nothing.
//!
//! `ANTIPHON_SOAK_S=1800 ANTIPHON_SOAK_SEED=7 cargo test --test gateway soak -- --ignored --nocapture` runs half an hour, prints a line
//! every ten seconds and leaves them in `target/soak-7.csv` (seconds, calls, memory, descriptors, threads, UDP sockets, tasks,
//! gaps). A minute of it runs with the other tests. `ANTIPHON_SOAK_CALLERS=16` has more callers at a time;
//! `ANTIPHON_SOAK_BRIEF=1` makes every call as short as it can be, so that what a call leaves behind shows in minutes;
//! `ANTIPHON_SOAK_VOICE=tone` speaks with a tone in place of `espeak-ng`.
//!
//! Callers come by telephone and by browser, over networks that lose and delay packets, interrupt, hang up at any
//! moment, and meet agents that are dead or leave in the middle of a turn. Meanwhile jobs are handed in and cancelled, voices
//! enrolled and removed, the configuration is read again, garbage comes in, and things go wrong (`soak/trouble.rs`). What happens
//! to a call beside one of those is forgiven; everything else is not: a gap inside speech, a record or a job that is missing,
//! anything that is held in the end and was not in the beginning.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use antiphon_loadgen::call::{Call, now};
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::relay::Impairment;
use antiphon_loadgen::{rtc, sip};
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;

use self::trouble::{Windows, datagram_sockets};
use super::program::{Serve, until};
use super::support::PATIENCE;
use super::voices::{FITTING, TRANSCRIPT, write_model};

mod trouble;

/// Callers at a time, where nobody says.
const CALLERS: u64 = 3;
/// How long it takes with the other tests.
const SHORT: Duration = Duration::from_secs(60);
/// From this length on memory is judged: before, caches fill.
const LONG: Duration = Duration::from_secs(600);
/// What a call may cost for ever, in the second half of a long run: noise of the allocator.
const BYTES_A_CALL: u64 = 2_000;

pub(crate) fn setting(name: &str, default: u64) -> u64 {
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) rss: u64,
    pub(crate) descriptors: usize,
    pub(crate) threads: u64,
}

impl Held {
    pub(crate) fn of(process: u32) -> Held {
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
    /// Calls whose agent was dead or left.
    faulted: AtomicU64,
    /// Calls that were answered.
    answered: Mutex<Vec<Talked>>,
    /// Jobs, and whether each was cancelled.
    jobs: Mutex<Vec<(String, bool)>>,
    /// Voices that were enrolled.
    enrolled: AtomicU64,
    /// What was not as it should be, and between which instants.
    failures: Mutex<Vec<(std::time::Instant, std::time::Instant, String)>>,
}

/// A call that was answered, and when it was placed and over.
#[derive(Clone)]
struct Talked {
    id: String,
    from: std::time::Instant,
    to: std::time::Instant,
}

struct Caller {
    http: String,
    sip: String,
    client: reqwest::Client,
    rng: Rng,
    /// Calls as short as they can be.
    brief: bool,
    /// Something to enrol, and what its voice is called.
    recording: Arc<[u8]>,
    name: String,
    done: Arc<Done>,
    /// When what it does now began.
    began: std::time::Instant,
}

impl Caller {
    async fn run(mut self, until: std::time::Instant) {
        while now() < until {
            self.began = now();
            match self.rng.below(24) {
                0 => self.batch(false).await,
                1 => self.batch(true).await,
                2 => self.reload().await,
                3 => self.garbage().await,
                4 => self.enrol().await,
                5..=11 => self.call(true).await,
                _ => self.call(false).await,
            }
        }
    }

    async fn call(&mut self, browser: bool) {
        let agent = match self.rng.below(12) {
            0 => "dead",
            1 => "leaves",
            _ => "demo",
        };
        let lossy =
            (self.rng.below(5) == 0).then(|| Impairment { loss: 0.01, jitter_ms: 10.0, ..Impairment::default() });
        let call = if browser {
            let config =
                rtc::Config { agent: Some(agent.into()), impairment: lossy, ..rtc::Config::new(self.http.clone()) };
            rtc::Caller::connect(config).await
        } else {
            let codec = [Codec::Pcmu, Codec::Pcma, Codec::G722, Codec::Opus][self.rng.below(4) as usize];
            let config = sip::Config { codecs: vec![codec], impairment: lossy, ..sip::Config::default() };
            let caller = sip::Caller::bind(config).await.expect("free ports");
            caller.call(&format!("sip:{agent}@{}", self.sip)).await
        };
        match call {
            Ok(call) => {
                let id = call.id().map(str::to_owned);
                if agent == "demo" {
                    self.talk(call).await;
                } else {
                    self.done.faulted.fetch_add(1, Relaxed);
                    // The apology, if any, and the end; whoever has no patience hangs up.
                    if self.rng.below(2) == 0 && call.ended(2 * PATIENCE).await.is_none() {
                        self.failed(format!("{:?}: the call with the agent `{agent}` never ends", call.leg()));
                    }
                    call.hang_up().await;
                }
                if let Some(id) = id {
                    self.done.answered.lock().expect("no panic").push(Talked { id, from: self.began, to: now() });
                }
            }
            Err(error) => self.failed(format!("browser {browser}, agent {agent}: {error}")),
        }
        self.done.calls.fetch_add(1, Relaxed);
    }

    /// Some hang up at once, some interrupt what they hear, some wait for its end.
    async fn talk(&mut self, call: Call) {
        let kind = if self.brief { 0 } else { self.rng.below(5) };
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

    async fn batch(&self, cancelled: bool) {
        let job = self.client.post(format!("{}/v1/audio/speech/batch", self.http)).json(&json!({ "input": "Later." }));
        let answer: Value = job.send().await.expect("HTTP").json().await.expect("JSON");
        let Some(id) = answer["id"].as_str() else { return self.failed(format!("batch: {answer}")) };
        let mut cancelled = cancelled;
        if cancelled {
            let answer = self.client.delete(format!("{}/v1/jobs/{id}", self.http)).send().await.expect("HTTP");
            if !answer.status().is_success() {
                cancelled = false;
                self.failed(format!("cancelling a job: {}", answer.status()));
            }
        }
        self.done.jobs.lock().expect("no panic").push((id.to_owned(), cancelled));
    }

    /// A voice that is none, or one that comes and goes.
    async fn enrol(&mut self) {
        let real = self.rng.below(2) == 0;
        let mut body = Vec::new();
        for (field, value) in [("name", self.name.as_str()), ("ref_text", TRANSCRIPT), ("consent", "I am the speaker.")]
        {
            body.extend(
                format!("--part\r\nContent-Disposition: form-data; name=\"{field}\"\r\n\r\n{value}\r\n").bytes(),
            );
        }
        body.extend(b"--part\r\nContent-Disposition: form-data; name=\"audio_sample\"; filename=\"a.wav\"\r\n\r\n");
        body.extend_from_slice(if real { &self.recording } else { b"no WAV" });
        body.extend(b"\r\n--part--\r\n");
        let request = self.client.post(format!("{}/v1/audio/voices", self.http)).body(body);
        let request = request.header("content-type", "multipart/form-data; boundary=part");
        let status = request.send().await.expect("HTTP").status();
        if status.is_success() != real {
            self.failed(format!("enrolling, real {real}: {status}"));
        }
        if status.is_success() {
            self.done.enrolled.fetch_add(1, Relaxed);
            let removed = self.client.delete(format!("{}/v1/audio/voices/{}", self.http, self.name)).send().await;
            if removed.expect("HTTP").status() != 204 {
                self.failed("a voice stays that was removed".into());
            }
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
        socket.send_to(b"INVITE sip:x SIP/2.0\r\nVia: \0\r\n\r\n", &self.sip).await.expect("sent");
    }

    fn failed(&self, what: String) {
        self.done.failures.lock().expect("no panic").push((self.began, now(), what));
    }
}

/// An agent that says something to some callers, and leaves in the middle of it.
async fn leaver() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let Ok(mut socket) = tokio_tungstenite::accept_async(stream).await else { return };
                let _setup = socket.next().await;
                let text = json!({ "type": "text", "token": "I was about to say that", "last": false });
                let _ = socket.send(Message::text(text.to_string())).await;
            });
        }
    });
    port
}

/// Gaps inside speech that the gateway knows of.
async fn gaps(http: &str) -> u64 {
    let metrics = reqwest::get(format!("{http}/metrics")).await.expect("HTTP").text().await.expect("text");
    let value = metrics.lines().find_map(|line| line.strip_prefix("antiphon_underruns_total "));
    value.and_then(|value| value.trim().parse::<f64>().ok()).unwrap_or(0.0) as u64
}

/// What is at work in the gateway: tasks of its control runtime, and everything that only calls and speech need.
async fn at_work(http: &str) -> (u64, Value) {
    let answer = reqwest::get(format!("{http}/debug/tasks")).await.expect("HTTP");
    let tasks: Value = answer.json().await.expect("JSON");
    let devices = tasks["devices"].as_array().cloned().unwrap_or_default();
    let device = |device: &Value| json!([device["live"], device["batch"], device["queued"], device["memoryUsed"]]);
    let work = json!({
        "calls": tasks["media"]["calls"], "sip": tasks["sip"], "webrtc": tasks["webrtc"], "ringing": tasks["ringing"],
        "still": tasks["media"]["still"], "faults": tasks["faults"], "devices": devices.iter().map(device).collect::<Vec<_>>(),
    });
    (tasks["control"]["tasks"].as_u64().expect("a number"), work)
}

#[tokio::test]
#[ignore = "for as long as is wanted; a minute of it is a test like any other"]
async fn soak() {
    run(Duration::from_secs(setting("ANTIPHON_SOAK_S", SHORT.as_secs()))).await;
}

#[tokio::test]
async fn a_minute_of_everything_at_once_leaves_nothing_behind() {
    run(SHORT).await;
}

/// The configuration: agents, and networks that enrol voices beside a voice that needs none.
fn configuration(model: &std::path::Path, leaver: u16) -> String {
    // Port 9 is that of a service that discards, and of nobody on loopback.
    format!(
        "[engine]\nmodel = {model:?}\n[agent.demo]\nurl = \"builtin:demo\"\n[agent.dead]\nurl = \"ws://127.0.0.1:9/\"\n\
         [agent.leaves]\nurl = \"ws://127.0.0.1:{leaver}/\"\n"
    )
}

async fn run(length: Duration) {
    let seed = setting("ANTIPHON_SOAK_SEED", 1);
    let (number, brief) = (setting("ANTIPHON_SOAK_CALLERS", CALLERS), setting("ANTIPHON_SOAK_BRIEF", 0) > 0);
    let (folder, state) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let model = folder.path().join("model");
    write_model(&model, FITTING);
    fs::write(folder.path().join("gateway.toml"), configuration(&model, leaver().await)).expect("written");
    // `auto` beside networks that only enrol would be CosyVoice3.
    let voice = std::env::var_os("ANTIPHON_SOAK_VOICE").and_then(|voice| voice.into_string().ok());
    let voice = voice.unwrap_or_else(|| "espeak".into());
    if voice == "espeak" && !antiphon_skip::has_program("espeak-ng", "espeak-ng") {
        return;
    }
    let mut program = Serve::start(folder.path(), state.path(), |command| {
        command.env("ANTIPHON_ENGINE__KIND", &voice).args(["-c", "gateway.toml"]);
    });
    program.ready().await;
    let (http, process) = (program.http.clone(), program.id());
    let (done, windows) = (Arc::new(Done::default()), Windows::default());
    let (before, ports, (tasks, work)) = (Held::of(process), datagram_sockets(process), at_work(&http).await);
    let began = now();
    let recording: Arc<[u8]> = antiphon::voice::bench::wav(&antiphon::voice::bench::speech(4)).into();
    let callers: Vec<_> = (0..number)
        .map(|n| {
            let (http, sip, client) = (http.clone(), program.sip.to_string(), reqwest::Client::new());
            let (recording, name, done, rng) =
                (recording.clone(), format!("caller-{n}"), done.clone(), Rng(seed * 1_000 + n));
            let caller = Caller { http, sip, client, rng, brief, recording, name, done, began };
            tokio::spawn(caller.run(began + length))
        })
        .collect();
    let troubles = trouble::make(process, state.path().to_owned(), Rng(seed), windows.clone(), began + length);
    let troubles = tokio::spawn(troubles);
    // (calls so far, memory)
    let mut curve: Vec<(u64, Held)> = Vec::new();
    let mut report = String::from("seconds,calls,rss_kb,descriptors,threads,udp_sockets,tasks,gaps\n");
    let mut all = Box::pin(async {
        for caller in callers {
            caller.await.expect("no caller panics");
        }
        troubles.await.expect("no panic");
    });
    loop {
        let ended = timeout(Duration::from_secs(10), &mut all).await.is_ok();
        let (calls, held, gaps) = (done.calls.load(Relaxed), Held::of(process), gaps(&http).await);
        let (udp, (tasks, _)) = (datagram_sockets(process), at_work(&http).await);
        let Held { rss, descriptors, threads } = held;
        let (seconds, kb) = (began.elapsed().as_secs(), rss / 1_024);
        println!(
            "{seconds:>5} s {calls:>6} calls {kb:>7} kB {descriptors:>4} descriptors {threads:>3} threads {udp:>4} UDP sockets \
             {tasks:>4} tasks {gaps:>3} gaps"
        );
        report += &format!("{seconds},{calls},{kb},{descriptors},{threads},{udp},{tasks},{gaps}\n");
        curve.push((calls, held));
        if ended {
            break;
        }
    }
    drop(all);
    if length >= LONG {
        let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("target/soak-{seed}.csv"));
        fs::write(&file, report).expect("written");
        println!("the curves: {}", file.display());
    }
    let (calls, jobs) = (done.calls.load(Relaxed), done.jobs.lock().expect("no panic").clone());
    let answered = done.answered.lock().expect("no panic").clone();
    println!(
        "seed {seed}, {voice}: {calls} calls, {} answered and named, {} with a dead or leaving agent, {} jobs, {} voices, {} reloads; {}",
        answered.len(),
        done.faulted.load(Relaxed),
        jobs.len(),
        done.enrolled.load(Relaxed),
        done.reloads.load(Relaxed),
        windows.told()
    );
    let (forgiven, failures): (Vec<_>, Vec<_>) = std::mem::take(&mut *done.failures.lock().expect("no panic"))
        .into_iter()
        .partition(|(from, to, _)| windows.touch(*from, *to));
    println!("forgiven: {:#?}", forgiven.iter().map(|(.., what)| what).collect::<Vec<_>>());
    assert!(failures.is_empty(), "{} of {calls}: {failures:#?}", failures.len());
    assert!(calls >= number, "{calls} calls");
    until(&format!("{http}/v1/calls"), |body| body["calls"].as_array().is_some_and(Vec::is_empty)).await;
    for (job, cancelled) in &jobs {
        // One that was over before it was cancelled is done.
        let over =
            |job: &Value| job["state"] == "done" && job["finished"] == 1 || *cancelled && job["state"] == "cancelled";
        until(&format!("{http}/v1/jobs/{job}"), over).await;
    }
    let gaps = gaps_of(&http, &answered, &windows).await;
    assert!(gaps.is_empty(), "gaps inside speech beside nothing that was wrong: {gaps:#?}");
    let settled = nothing_is_held(&http, process, (before, ports, tasks, &work), number).await;
    settled.expect("everything is given back");
    let (first, last) = (curve[curve.len() / 2], curve[curve.len() - 1]);
    let each = last.1.rss.saturating_sub(first.1.rss) / (last.0 - first.0).max(1);
    println!("each call of the second half left {each} bytes");
    if length >= LONG {
        assert!(each <= BYTES_A_CALL, "each call of the second half left {each} bytes: {curve:#?}");
        // Threads for work that blocks come and go; media threads and devices do not multiply.
        let threads = Held::of(process).threads;
        assert!(threads <= first.1.threads + 8, "{} threads became {threads}", first.1.threads);
    }
    assert_eq!(program.terminate().await, Some(0));
}

/// Waits for the record of every call; those with gaps inside speech, unless something was wrong at the time.
async fn gaps_of(http: &str, answered: &[Talked], windows: &Windows) -> Vec<String> {
    let mut gaps = Vec::new();
    for Talked { id, from, to } in answered {
        let underruns = std::cell::Cell::new(0);
        until(&format!("{http}/v1/records/{id}"), |record| {
            underruns.set(record["underruns"].as_u64().unwrap_or_default());
            record["state"] == "ended"
        })
        .await;
        if underruns.get() > 0 && !windows.touch(*from, *to) {
            gaps.push(format!("{} in {id}", underruns.get()));
        }
    }
    gaps
}

/// Waits until nothing is held that was not before: descriptors, ports, tasks, slots and memory of devices.
async fn nothing_is_held(
    http: &str,
    process: u32,
    (before, ports, tasks, work): (Held, usize, u64, &Value),
    number: u64,
) -> Result<(), String> {
    // Connections of the questions above stay for a while, each a descriptor and a task.
    let (files, tasks) = (before.descriptors + 2 * number as usize + 12, tasks + 2 * number + 12);
    let mut state = String::new();
    let given_back = async {
        loop {
            let (held, udp, (now, doing)) = (Held::of(process), datagram_sockets(process), at_work(http).await);
            if held.descriptors <= files && udp == ports && now <= tasks && doing == *work {
                return;
            }
            state = format!(
                "{before:?}, {ports} ports, {tasks} tasks at most, {work} became {held:?}, {udp}, {now}, {doing}"
            );
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    timeout(2 * PATIENCE, given_back).await.map_err(|_| state)
}
