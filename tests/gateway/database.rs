//! Gateways on one PostgreSQL, a real one: a job and a record are answered for by whichever lives, and while the database is
//! away calls go on.

use std::path::Path;
use std::time::Duration;

use antiphon::app::engines::Choice;
use antiphon::config::{Config, EngineKind};
use antiphon::postgres::{Address, Database};
use antiphon::secret::Secret;
use antiphon::synth::SynthError;
use antiphon::synth::device::Loader;
use antiphon_loadgen::codec::Codec;
use antiphon_skip::postgres::Postgres;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::metrics::scrape;
use super::nodes::{Redis, knows};
use super::support::{PATIENCE, Rig, SENTENCE, hear_turn};

/// Puts jobs and records at `url`, and the audio of jobs in `audio`.
pub(crate) fn share(config: &mut Config, url: &str, audio: &Path) {
    let database = Database::Postgres(Address::new(Secret::new(url)).expect("an address"));
    config.engine.kind = EngineKind::Tone;
    (config.batch.database, config.records.database) = (database.clone(), database);
    config.batch.audio_dir = audio.to_owned();
}

/// Waits until `path` says what is wanted.
async fn until(rig: &Rig, path: &str, wanted: impl Fn(u16, &Value) -> bool) -> Value {
    let look = async {
        loop {
            let (status, said) = rig.get(path).await;
            if wanted(status, &said) {
                return said;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(PATIENCE, look).await.unwrap_or_else(|_| panic!("{path} never says so"))
}

fn parts(said: &Value) -> Vec<&str> {
    said["faults"].as_array().into_iter().flatten().filter_map(|fault| fault["part"].as_str()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_and_records_outlive_their_gateway_and_calls_the_database() {
    let Some(mut server) = Postgres::start() else { return };
    let audio = tempfile::tempdir().expect("a folder");
    let a = Rig::with(|config| share(config, &server.url(), audio.path())).await;
    let b = Rig::with(|config| share(config, &server.url(), audio.path())).await;
    let call = b.telephone("silent", Codec::Pcmu).await;
    let id = call.id().expect("named").to_owned();
    call.hang_up().await;
    let (status, job) = b.post("/v1/audio/speech/batch", json!({ "input": SENTENCE, "priority": 7 })).await;
    assert_eq!(status, 202, "{job}");
    let (status, error) = b.post("/v1/audio/speech/batch", json!({ "input": SENTENCE, "priority": 101 })).await;
    assert_eq!((status, &error["error"]["param"]), (400, &json!("priority")));
    let record = format!("/v1/records/{id}");
    until(&a, &record, |status, said| status == 200 && said["state"] == "ended").await;
    b.app.drain().await;
    let job = format!("/v1/jobs/{}", job["id"].as_str().expect("an id"));
    until(&a, &job, |_, said| said["state"] == "done").await;
    let heard = a.client.get(format!("{}{job}/audio", a.http)).send().await.expect("HTTP");
    assert!(heard.bytes().await.expect("whole").len() > 1_000);
    assert_eq!(a.get(&record).await.0, 200);

    // One call goes on without the database, and its record follows.
    let call = a.telephone("silent", Codec::Pcmu).await;
    server.kill();
    until(&a, "/readyz", |status, said| status == 200 && parts(said) == ["batch", "records"]).await;
    let asked = a.speak(&call, SENTENCE).await;
    hear_turn(&call, asked).await;
    let shown = scrape(&a).await;
    assert!(shown.lines().any(|line| line.starts_with("antiphon_database_up") && line.ends_with(" 0")), "{shown}");
    let (status, error) = a.get(&job).await;
    assert_eq!((status, &error["error"]["code"]), (503, &json!("unavailable")), "{error}");
    assert_eq!(a.get(&record).await.0, 503);
    let id = call.id().expect("named").to_owned();
    call.hang_up().await;
    server.run();
    until(&a, "/readyz", |_, said| parts(said).is_empty()).await;
    until(&a, &format!("/v1/records/{id}"), |status, said| status == 200 && said["state"] == "ended").await;
    assert_eq!(a.get(&job).await.1["state"], "done");
    a.app.drain().await;
}

/// The events in `text`: name and data of each.
fn events(text: &str) -> Vec<(String, Value)> {
    let field = |event: &str, name: &str| {
        event.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": ")).map(str::to_owned)
    };
    let event = |event: &str| Some((field(event, "event")?, serde_json::from_str(&field(event, "data")?).ok()?));
    text.split("\n\n").filter_map(event).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_is_followed_at_a_gateway_that_speaks_nothing_of_it() {
    let Some(server) = Postgres::start() else { return };
    let audio = tempfile::tempdir().expect("a folder");
    let broken: Loader = Box::new(|| Err(SynthError::Input("there is no voice".into())));
    let silent = Choice { loaders: vec![broken], fallback: None, reasons: Vec::new() };
    let b = Rig::with_voices(|config| share(config, &server.url(), audio.path()), silent).await;
    let mut all = b.client.get(format!("{}/v1/events", b.http)).send().await.expect("HTTP");
    let (status, job) =
        b.post("/v1/audio/speech/batch", json!({ "items": ["One.", SENTENCE, "Two. And three."] })).await;
    assert_eq!(status, 202, "{job}");
    let id = job["id"].as_str().expect("an id").to_owned();
    let mut stream = b.client.get(format!("{}/v1/jobs/{id}/events", b.http)).send().await.expect("HTTP");
    assert_eq!(stream.status(), 200);
    let mut text = String::new();
    let begun = async {
        while events(&text).is_empty() {
            text.push_str(&String::from_utf8_lossy(&stream.chunk().await.expect("open").expect("no end")));
        }
    };
    timeout(PATIENCE, begun).await.expect("it tells at once");
    let (name, first) = events(&text).remove(0);
    assert_eq!(
        (name.as_str(), &first["state"], first["results"].as_array().map(Vec::len)),
        ("job", &json!("queued"), Some(3))
    );
    // Nobody has spoken any of it. Another gateway comes, and speaks it.
    let a = Rig::with(|config| share(config, &server.url(), audio.path())).await;
    let rest = timeout(PATIENCE, stream.text()).await.expect("it ends with the job").expect("whole");
    let told = events(&format!("{text}{rest}"));
    let (name, last) = told.last().expect("events");
    assert_eq!(
        (name.as_str(), &last["state"], &last["finished"]),
        ("job", &json!("done"), &first["total"]),
        "{told:?}"
    );
    for index in 0..3 {
        let of_it = |(name, item): &&(String, Value)| name == "item" && item["index"] == json!(index);
        let item = &told.iter().rfind(of_it).unwrap_or_else(|| panic!("item {index}: {told:?}")).1;
        assert!(item["status"] == "done" && item["durationMs"].as_u64().is_some_and(|ms| ms > 0), "{item}");
    }
    // It is over: who asks again is told so, at once.
    let again = a.client.get(format!("{}/v1/jobs/{id}/events", a.http)).send().await.expect("HTTP");
    assert_eq!(events(&timeout(PATIENCE, again.text()).await.expect("it ends").expect("whole")).len(), 1);
    let (status, _) = a.get("/v1/jobs/none/events").await;
    assert_eq!(status, 404);
    let mut text = String::new();
    let done =
        |text: &str| events(text).iter().any(|(name, of)| name == "job" && of["id"] == *id && of["state"] == "done");
    let heard = async {
        while !done(&text) {
            text.push_str(&String::from_utf8_lossy(&all.chunk().await.expect("open").expect("no end")));
        }
    };
    timeout(PATIENCE, heard).await.expect("/v1/events tells of jobs");
    for rig in [a, b] {
        rig.app.drain().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_a_cluster_what_a_gateway_left_is_answered_for_by_another() {
    let (Some(server), Some(redis)) = (Postgres::start(), Redis::start()) else { return };
    let audio = tempfile::tempdir().expect("a folder");
    let a = redis.gateway("a", |config| share(config, &server.url(), audio.path())).await;
    let b = redis.gateway("b", |config| share(config, &server.url(), audio.path())).await;
    knows(&a, &["b"]).await;
    knows(&b, &["a"]).await;
    let call = b.telephone("silent", Codec::Pcmu).await;
    let record = format!("/v1/records/{}", call.id().expect("named"));
    call.hang_up().await;
    until(&a, &record, |status, said| status == 200 && said["state"] == "ended").await;
    let (status, job) = b.post("/v1/audio/speech/batch", json!({ "input": SENTENCE })).await;
    assert_eq!(status, 202, "{job}");
    let job = format!("/v1/jobs/{}", job["id"].as_str().expect("an id"));
    assert!(job.starts_with("/v1/jobs/b."), "{job}");
    b.app.drain().await;
    knows(&a, &[]).await;
    until(&a, &job, |_, said| said["state"] == "done").await;
    assert_eq!(a.get(&record).await.0, 200);
    a.app.drain().await;
}
