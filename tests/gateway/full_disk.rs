//! A disk that takes no more: calls go on, what cannot be kept is refused aloud, and with room again nothing is missing.
//!
//! The kernel refuses writes beyond a size to the program, as it does with a full disk; no file system has to be mounted for it.

use std::time::Duration;

use antiphon_loadgen::call::now;
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::sip;
use rlimit::Resource;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::program::{Serve, until};
use super::support::{PATIENCE, hear_turn_at_last};

/// Less than any database has already.
const LITTLE: u64 = 1_024;

/// Writes behind this offset of any file are refused to `process` from now on.
pub(crate) fn may_write(process: u32, bytes: u64) {
    let process = i32::try_from(process).expect("an id");
    let (mut soft, mut hard) = (0, 0);
    rlimit::prlimit(process, Resource::FSIZE, None, Some((&mut soft, &mut hard))).expect("readable");
    rlimit::prlimit(process, Resource::FSIZE, Some((bytes.min(hard), hard)), None).expect("its own child");
}

/// A telephone call with one turn, which is heard; gives its id.
async fn call(program: &Serve, client: &reqwest::Client) -> String {
    let config = sip::Config { codecs: vec![Codec::Pcmu], ..sip::Config::default() };
    let telephone = sip::Caller::bind(config).await.expect("free ports");
    let call = telephone.call(&format!("sip:silent@{}", program.sip)).await.expect("answered");
    let id = call.id().expect("the answer names the call").to_owned();
    let asked = now();
    let turn = client.post(format!("{}/v1/calls/{id}/turns", program.http)).json(&json!({ "text": "All is well." }));
    assert_eq!(turn.send().await.expect("HTTP").status(), 202);
    hear_turn_at_last(&call, asked).await;
    call.hang_up().await;
    id
}

/// Waits until the recording of a call can be fetched.
async fn recorded(program: &Serve, client: &reqwest::Client, id: &str) {
    let url = format!("{}/v1/calls/{id}/recording", program.http);
    let there = async {
        while !client.get(&url).send().await.expect("HTTP").status().is_success() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(PATIENCE, there).await.expect("it was recorded");
}

/// Asks for a batch job; its id, or why there is none.
async fn submit(program: &Serve, client: &reqwest::Client) -> Result<String, Value> {
    let job = json!({ "items": ["Here is a text for later."] });
    let asked = client.post(format!("{}/v1/audio/speech/batch", program.http)).json(&job).send();
    let response = asked.await.expect("HTTP");
    let accepted = response.status().is_success();
    let body: Value = response.json().await.expect("JSON");
    if accepted { Ok(body["id"].as_str().expect("an id").to_owned()) } else { Err(body) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_go_on_beside_a_full_disk_and_with_room_again_nothing_is_missing() {
    let (folder, state) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let mut program = Serve::start(folder.path(), state.path(), |command| {
        command.env("ANTIPHON_ENGINE__KIND", "tone");
        command.env("ANTIPHON_RECORDING__MODE", "all").env("ANTIPHON_RECORDING__CONSENT", "");
    });
    program.ready().await;
    let client = reqwest::Client::new();
    let (first_call, first_job) = (call(&program, &client).await, submit(&program, &client).await.expect("accepted"));
    let job = |id: &str| format!("{}/v1/jobs/{id}", program.http);
    let record = |id: &str| format!("{}/v1/records/{id}", program.http);
    until(&job(&first_job), |job| job["state"] == "done").await;
    until(&record(&first_call), |record| record["endedMs"].is_u64()).await;
    recorded(&program, &client, &first_call).await;

    may_write(program.id(), LITTLE);
    let refused = submit(&program, &client).await.expect_err("there is no room");
    assert!(refused["error"]["message"].as_str().is_some_and(|why| !why.is_empty()), "{refused}");
    let during = call(&program, &client).await;
    // Its caller heard everything; that its recording has not is told.
    let told = async {
        loop {
            let metrics = client.get(format!("{}/metrics", program.http)).send().await.expect("HTTP").text().await;
            let metrics = metrics.expect("text");
            let errors = metrics.lines().find_map(|line| line.strip_prefix("antiphon_recording_errors_total "));
            if errors.is_some_and(|errors| errors != "0") {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(PATIENCE, told).await.expect("an error is counted");
    // What was there is still read, and the program takes calls.
    until(&job(&first_job), |job| job["state"] == "done").await;
    program.ready().await;

    may_write(program.id(), u64::MAX);
    let again = async {
        loop {
            match submit(&program, &client).await {
                Ok(id) => return id,
                Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
            }
        }
    };
    let last_job = timeout(2 * PATIENCE, again).await.expect("there is room");
    until(&job(&last_job), |job| job["state"] == "done").await;
    // The record of the call that had no room waited in memory.
    until(&record(&during), |record| record["endedMs"].is_u64()).await;
    let after = call(&program, &client).await;
    recorded(&program, &client, &after).await;
    assert_eq!(program.terminate().await, Some(0));
}
