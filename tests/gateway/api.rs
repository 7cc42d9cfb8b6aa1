//! The description of the API against the API, batch jobs and voices over HTTP.

use std::time::Duration;

use antiphon_loadgen::call::now;
use antiphon_loadgen::heard::Clip;
use antiphon_loadgen::{correlate, wav};
use reqwest::Method;
use serde_json::{Value, json};

use super::support::{PATIENCE, Rig, SENTENCE};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn so_many_read_events_and_one_more_is_told_to_come_again() {
    let rig = Rig::start().await;
    let read = || rig.client.get(format!("{}/v1/events", rig.http)).send();
    let mut readers = Vec::new();
    let refused = loop {
        let response = read().await.expect("HTTP");
        if response.status() != 200 {
            break response;
        }
        readers.push(response);
        assert!(readers.len() <= 1_000, "there is a bound");
    };
    assert_eq!(refused.status(), 503);
    assert!(refused.headers().contains_key("retry-after"));
    drop(readers.split_off(1));
    let wait = async {
        while read().await.expect("HTTP").status() != 200 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.expect("who leaves makes room");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_described_route_is_there() {
    let rig = Rig::start().await;
    let (status, api) = rig.get("/openapi.json").await;
    assert_eq!(status, 200);
    for (path, operations) in api["paths"].as_object().expect("paths") {
        for (method, operation) in operations.as_object().expect("operations") {
            // This one would end the test's gateway, that one never ends.
            if path == "/v1/admin/drain" || path == "/v1/events" {
                continue;
            }
            let url = format!("{}{}", rig.http, path.replace("{id}", "x").replace("{name}", "x"));
            let method = Method::from_bytes(method.to_uppercase().as_bytes()).expect("a method");
            let response = rig.client.request(method.clone(), url).send().await.expect("HTTP");
            let status = response.status().as_u16();
            let body: Value = response.json().await.unwrap_or(Value::Null);
            let code = body["error"]["code"].as_str().unwrap_or("");
            assert!(status < 400 || !code.is_empty(), "{method} {path}: {status} not in the form of errors: {body}");
            assert!(status != 405 && code != "unknown_route", "{method} {path}: {status} {body}");
            // What is asked for here is nonsense: it is refused, or the answer is one that the description has.
            let told = &operation["responses"][status.to_string()];
            let fits = (400..500).contains(&status) || told.is_object();
            assert!(fits, "{method} {path} answers {status}, which is not described: {body}");
        }
    }
    // The shape of a job and the formats, as the code has them.
    let schemas = &api["components"]["schemas"];
    let job = antiphon::batch::Job {
        id: String::new(),
        state: antiphon::batch::JobState::Queued,
        total: 0,
        finished: 0,
        eta_seconds: None,
        reason: Some(String::new()),
        results: vec![antiphon::batch::ItemResult {
            index: 0,
            status: antiphon::batch::JobState::Queued,
            duration_ms: 0,
            error: Some(String::new()),
        }],
    };
    let job = serde_json::to_value(job).expect("JSON");
    let names = |value: &Value| -> Vec<String> { value.as_object().expect("an object").keys().cloned().collect() };
    assert_eq!(names(&job), names(&schemas["Job"]["properties"]));
    assert_eq!(names(&job["results"][0]), names(&schemas["Job"]["properties"]["results"]["items"]["properties"]));
    let formats = antiphon::audio_file::Format::ALL.map(|format| format.name());
    for schema in ["Speech", "Batch"] {
        assert_eq!(schemas[schema]["properties"]["response_format"]["enum"], json!(formats), "{schema}");
    }
    // Browsers ask before they call from elsewhere, and clients of browser calls ask what is taken.
    let options = rig.client.request(Method::OPTIONS, format!("{}/whip", rig.http)).send().await.expect("HTTP");
    assert_eq!(options.headers()["accept-post"], "application/sdp");
    assert_eq!(options.headers()["accept-patch"], "application/trickle-ice-sdpfrag");
    let (status, error) = rig.get("/v2").await;
    assert_eq!((status, &error["error"]["code"]), (404, &json!("unknown_route")));
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_job_is_accepted_finished_and_heard() {
    let rig = Rig::start().await;
    let own = json!({ "input": "And that is all.", "seed": 5, "instructions": "calmly" });
    let body = json!({ "items": [SENTENCE, own], "response_format": "wav" });
    let (status, job) = rig.post("/v1/audio/speech/batch", body).await;
    assert_eq!((status, &job["total"]), (202, &json!(2)), "{job}");
    let id = job["id"].as_str().expect("an id").to_owned();
    let begun = now();
    loop {
        let (status, job) = rig.get(&format!("/v1/jobs/{id}")).await;
        assert_eq!(status, 200);
        if job["state"] == "done" {
            break;
        }
        assert!(now() - begun < PATIENCE, "{job}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let whole = rig.client.get(format!("{}/v1/jobs/{id}/audio", rig.http)).send().await.expect("HTTP");
    assert_eq!(whole.headers()["content-type"], "audio/wav");
    let whole = wav::parse(&whole.bytes().await.expect("a body")).expect("a sound file");
    let first = rig.client.get(format!("{}/v1/jobs/{id}/audio?item=0", rig.http)).send().await.expect("HTTP");
    let first = wav::parse(&first.bytes().await.expect("a body")).expect("a sound file");
    let found = correlate::correlate(&first, &rig.reference(SENTENCE).await).expect("comparable rates");
    assert!(found.value > 0.95, "{found:?}");
    assert_eq!(whole.pcm[..first.pcm.len()], first.pcm, "the whole begins with its first item");
    let second = Clip { pcm: whole.pcm[first.pcm.len()..].to_vec(), ..whole };
    let found = correlate::correlate(&second, &rig.reference("And that is all.").await).expect("comparable rates");
    assert!(found.value > 0.95, "{found:?}");
    let (status, error) = rig.post("/v1/audio/speech/batch", json!({ "items": [] })).await;
    assert_eq!((status, &error["error"]["code"]), (400, &json!("invalid_job")));
    let (status, error) = rig.post("/v1/audio/speech/batch", json!({ "items": [{ "text": "Hello." }] })).await;
    assert_eq!((status, &error["error"]["code"]), (400, &json!("invalid_json")), "{error}");
    let (_, newer) = rig.post("/v1/audio/speech/batch", json!({ "input": SENTENCE })).await;
    let (_, page) = rig.get("/v1/jobs?limit=1").await;
    assert_eq!((&page["jobs"][0]["id"], &page["hasMore"]), (&newer["id"], &json!(true)), "{page}");
    let (_, page) = rig.get(&format!("/v1/jobs?limit=1&after={}", newer["id"].as_str().expect("an id"))).await;
    assert_eq!((&page["jobs"][0]["id"], &page["hasMore"]), (&json!(id), &json!(false)), "{page}");
    for (query, expected) in [("limit=0", 400), ("limit=some", 400), ("after=nothing", 404)] {
        let (status, error) = rig.get(&format!("/v1/jobs?{query}")).await;
        assert!(status == expected && error["error"]["message"].is_string(), "{query}: {status} {error}");
    }
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn voices_are_listed_and_enrolment_without_a_checkpoint_says_what_it_needs() {
    let folder = tempfile::tempdir().expect("a folder");
    let rig = Rig::with(|config| config.engine.voices = folder.path().to_owned()).await;
    let (status, list) = rig.get("/v1/audio/voices").await;
    assert_eq!(status, 200);
    assert!(!list["voices"].as_array().expect("a list").is_empty());
    let boundary = "b0undary";
    let mut body = String::new();
    for (name, value) in [("name", "anna"), ("ref_text", "Hello."), ("audio_sample", "not a recording")] {
        body.push_str(&format!("--{boundary}\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n"));
    }
    body.push_str(&format!("--{boundary}--\r\n"));
    let response = rig
        .client
        .post(format!("{}/v1/audio/voices", rig.http))
        .header("content-type", format!("multipart/form-data; boundary={boundary}"))
        .body(body)
        .send()
        .await
        .expect("HTTP");
    assert_eq!(response.status(), 501);
    let gone = rig.client.delete(format!("{}/v1/audio/voices/nobody", rig.http)).send().await.expect("HTTP");
    assert_eq!(gone.status(), 404);
    rig.app.drain().await;
}
