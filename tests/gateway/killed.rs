//! `kill -9` in the middle of calls: what is known of each is kept, and each has an end.

use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::sip;
use serde_json::Value;

use super::program::{Serve, until};

/// How often the program is killed.
const KILLS: usize = 20;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_twenty_gateways_that_are_killed_in_mid_call_every_record_ends_with_a_cause() {
    let (folder, state) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let mut calls = Vec::new();
    let start = || {
        Serve::start(folder.path(), state.path(), |command| {
            command.env("ANTIPHON_ENGINE__KIND", "tone");
        })
    };
    for _ in 0..KILLS {
        let mut program = start();
        program.ready().await;
        let telephone = sip::Caller::bind(sip::Config { codecs: vec![Codec::Pcmu], ..sip::Config::default() });
        let telephone = telephone.await.expect("free ports");
        let call = telephone.call(&format!("sip:silent@{}", program.sip)).await.expect("answered");
        let id = call.id().expect("the answer names the call").to_owned();
        // What is not on the disk yet is no record: its answer is what is waited for.
        let url = format!("{}/v1/records/{id}", program.http);
        until(&url, |record| record["state"] == "open" && !record["answeredMs"].is_null()).await;
        assert_eq!(program.end_by("KILL").await, None, "no exit code: it was killed");
        calls.push(id);
    }
    let mut program = start();
    program.ready().await;
    let client = reqwest::Client::new();
    let page = client.get(format!("{}/v1/records?limit=100", program.http)).send().await.expect("HTTP");
    let page: Value = page.json().await.expect("JSON");
    let records = page["records"].as_array().expect("a list");
    assert_eq!(records.len(), KILLS);
    for id in &calls {
        let record = records.iter().find(|record| record["id"] == id.as_str()).expect("every call has a record");
        assert_eq!((&record["state"], &record["cause"]), (&"ended".into(), &"gateway stopped".into()), "{record}");
        let at = |key: &str| record[key].as_u64().unwrap_or_else(|| panic!("{key}: {record}"));
        assert!(at("startedMs") <= at("answeredMs") && at("answeredMs") <= at("endedMs"), "{record}");
    }
    assert_eq!(program.terminate().await, Some(0));
}
