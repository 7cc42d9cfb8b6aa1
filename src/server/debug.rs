//! What somebody looks at who is called at night: what runs, the latest turns, and where CPU time goes.
//!
//! # Why
//! *Threads and counts of tasks*, not a dump of every task's stack: tokio makes those only in builds with unstable features, and
//! stops each runtime while it does. Calls name what their tasks do.
//!
//! *A profile by signals* (`pprof`, the timer counts CPU time): what sleeps costs nothing, and a running gateway needs no other
//! program, no symbols elsewhere and no right to trace. Samples inside the system's libraries are left out, as a stack cannot be
//! unwound safely there. One profile at a time.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use pprof::{ProfilerGuardBuilder, Report};
use serde::Deserialize;
use serde_json::{Value, json};

use super::admin;
use super::error::ApiError;
use super::extract::Parameters;
use crate::clock;
use crate::gateway::Gateway;

/// Samples in a second of CPU time: not in step with what runs 50 or 100 times a second.
const FREQUENCY: i32 = 99;
/// How long a profile takes unless it is said, and at most, in seconds.
const USUAL_S: u64 = 10;
const MAX_S: u64 = 60;
/// Clock ticks in a second of `/proc/PID/stat`: fixed by the kernel's interface on every architecture (USER_HZ).
const TICKS: f64 = 100.0;

pub(super) fn router() -> Router<Gateway> {
    Router::new()
        .route("/debug/tasks", get(tasks))
        .route("/debug/turns", get(turns))
        .route("/debug/profile", post(profile))
}

async fn turns(State(gateway): State<Gateway>) -> Json<Value> {
    Json(json!({ "turns": gateway.recent.list() }))
}

async fn tasks(State(gateway): State<Gateway>) -> Json<Value> {
    let runtime = tokio::runtime::Handle::current().metrics();
    // Reads files, if not of a disk.
    let threads = tokio::task::spawn_blocking(|| threads(Path::new("/proc/self/task"))).await.unwrap_or_default();
    let shards = gateway.calls.shards();
    let faults = gateway.faults();
    let faults: Vec<Value> = faults.iter().map(|fault| json!({ "part": fault.part, "reason": fault.reason })).collect();
    Json(json!({
        "threads": threads,
        "control": {
            "workers": runtime.num_workers(),
            "tasks": runtime.num_alive_tasks(),
            "queued": runtime.global_queue_depth(),
        },
        "media": { "threads": shards.count(), "still": shards.still(clock::now()), "calls": gateway.calls.count() },
        "sip": gateway.sip.as_ref().map(|sip| sip.calls()),
        "webrtc": gateway.webrtc.count(),
        "ringing": gateway.outgoing.list().len(),
        "devices": admin::devices(&gateway),
        "faults": faults,
    }))
}

/// The threads below `folder`: name, state (proc(5): `R` runs, `S` sleeps, `D` waits for a disk) and CPU time.
fn threads(folder: &Path) -> Vec<Value> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<Value> = entries
        .filter_map(|entry| {
            // One that has ended meanwhile is none.
            let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
            let (name, state, cpu) = thread(&stat)?;
            Some(json!({ "id": entry.file_name().to_string_lossy(), "name": name, "state": state, "cpuSeconds": cpu }))
        })
        .collect();
    let cpu = |thread: &Value| thread["cpuSeconds"].as_f64().unwrap_or_default();
    found.sort_by(|a, b| cpu(b).total_cmp(&cpu(a)));
    found
}

/// Name, state and CPU seconds in a line of `/proc/.../stat`.
fn thread(stat: &str) -> Option<(&str, &str, f64)> {
    // A name may have anything in it, spaces and brackets too.
    let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let ticks = |at: usize| fields.get(at)?.parse::<f64>().ok();
    Some((name, fields.first()?, (ticks(11)? + ticks(12)?) / TICKS))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Length {
    seconds: Option<u64>,
}

/// Whether a profile is being made.
static BUSY: AtomicBool = AtomicBool::new(false);

/// Takes it for as long as it lives, also when the client is gone before the end.
struct Turn;

impl Turn {
    fn take() -> Option<Self> {
        // Not `then_some`: a value that is made and dropped at once would give away what somebody else has.
        if BUSY.swap(true, Ordering::AcqRel) { None } else { Some(Self) }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        BUSY.store(false, Ordering::Release);
    }
}

async fn profile(Parameters(length): Parameters<Length>) -> Result<Response, ApiError> {
    let seconds = length.seconds.unwrap_or(USUAL_S);
    if !(1..=MAX_S).contains(&seconds) {
        let message = format!("`seconds` is {seconds}: expected 1 to {MAX_S}");
        return Err(ApiError::bad_request("invalid_query", message).param("seconds"));
    }
    let Some(_turn) = Turn::take() else {
        let message = "a profile is being made; ask again when it is done";
        return Err(ApiError::new(StatusCode::CONFLICT, "busy", message));
    };
    let failed =
        |error: String| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", format!("no profile: {error}"));
    let builder = ProfilerGuardBuilder::default().frequency(FREQUENCY);
    let guard = builder.blocklist(&["libc", "libgcc", "pthread", "vdso"]).build();
    let guard = guard.map_err(|error| failed(error.to_string()))?;
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    // Reads the program's symbols, which takes a second.
    let made = tokio::task::spawn_blocking(move || guard.report().build().map(|report| folded(&report)));
    let made = made.await.map_err(|error| failed(error.to_string()))?.map_err(|error| failed(error.to_string()))?;
    Ok(([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], made).into_response())
}

/// One line a stack: thread and functions from the outermost in, joined by `;`, and how often it was seen. What flame graph
/// programs read.
fn folded(report: &Report) -> String {
    let mut stacks: BTreeMap<String, isize> = BTreeMap::new();
    for (frames, count) in &report.data {
        let mut line = frames.thread_name.clone();
        for symbol in frames.frames.iter().rev().flat_map(|inlined| inlined.iter().rev()) {
            line.push(';');
            line.push_str(&symbol.name().replace([';', '\n'], ","));
        }
        *stacks.entry(line).or_default() += count;
    }
    stacks.into_iter().fold(String::new(), |mut text, (stack, count)| {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{stack} {count}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_read_whatever_its_name() {
        let stat = "17 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 150 50 13";
        assert_eq!(thread(stat), Some(("a) b (c", "S", 2.0)));
        assert_eq!((thread(""), thread("17 (x) S 1")), (None, None));
        let own = threads(Path::new("/proc/self/task"));
        assert!(own.iter().any(|thread| thread["state"] == "R"), "this one runs: {own:?}");
    }

    #[tokio::test]
    async fn a_profile_shows_what_computes_and_there_is_one_at_a_time() {
        let computing = std::sync::Arc::new(AtomicBool::new(true));
        let go_on = computing.clone();
        let thread = std::thread::Builder::new().name("computing".into()).spawn(move || {
            let mut sum = 0u64;
            while go_on.load(Ordering::Relaxed) {
                sum = std::hint::black_box(sum.wrapping_mul(31).wrapping_add(7));
            }
        });
        let taken = Turn::take();
        assert!(taken.is_some() && Turn::take().is_none() && Turn::take().is_none(), "who is refused frees nothing");
        drop(taken);
        let asked = |seconds| profile(Parameters(Length { seconds }));
        assert!(asked(Some(0)).await.is_err() && asked(Some(61)).await.is_err());
        let mut text = String::new();
        // On a busy machine a second may have no sample of it.
        for _ in 0..30 {
            let (first, second) = tokio::join!(asked(Some(1)), asked(Some(1)));
            assert!(second.is_err(), "one at a time");
            assert!(!BUSY.load(Ordering::Acquire), "and none afterwards");
            let body = axum::body::to_bytes(first.expect("made").into_body(), 1 << 24).await.expect("text");
            text = String::from_utf8_lossy(&body).into_owned();
            if text.contains("computing;") {
                break;
            }
        }
        let found = text.lines().find(|line| line.starts_with("computing;"));
        assert!(found.is_some_and(|line| line.rsplit(' ').next().is_some_and(|n| n.parse::<u32>().is_ok())), "{text}");
        computing.store(false, Ordering::Relaxed);
        thread.expect("started").join().expect("ended");
        assert!(Turn::take().is_some(), "and then another");
    }
}
