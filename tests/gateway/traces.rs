//! The trace of a turn, as a collector receives it.

use std::time::Duration;

use antiphon_loadgen::codec::Codec;
use axum::Router;
use axum::extract::{Json, State};
use axum::http::StatusCode;
use axum::routing::post;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::support::{PATIENCE, Rig, SENTENCE, hear_turn};
use super::watch::Watch;

async fn take(State(spans): State<mpsc::Sender<Value>>, Json(document): Json<Value>) -> StatusCode {
    for span in document["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array().into_iter().flatten() {
        spans.send(span.clone()).await.expect("the test listens");
    }
    StatusCode::OK
}

fn told<'a>(span: &'a Value, key: &str) -> Option<&'a str> {
    let attributes = span["attributes"].as_array()?;
    attributes.iter().find(|attribute| attribute["key"] == key)?["value"]["stringValue"].as_str()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_reaches_the_collector_as_one_trace() {
    let (listener, exporter) = Watch::start().traces.lock().expect("no panic").take().expect("one test takes it");
    listener.set_nonblocking(true).expect("a socket");
    let listener = tokio::net::TcpListener::from_std(listener).expect("a socket");
    // Turns of other tests arrive here, too.
    let (sender, mut spans) = mpsc::channel(10_000);
    let collector = tokio::spawn(async move {
        axum::serve(listener, Router::new().route("/v1/traces", post(take)).with_state(sender)).await
    });
    // The gateway installs the TLS provider that the exporter's client asks for.
    let rig = Rig::start().await;
    let exporting = tokio::spawn(exporter.run(std::future::pending()));
    let call = rig.telephone("silent", Codec::Pcmu).await;
    let id = call.id().expect("named").to_owned();
    let asked = rig.speak(&call, SENTENCE).await;
    hear_turn(&call, asked).await;
    let mut trace: Vec<Value> = Vec::new();
    let complete = async {
        let mut wanted = None;
        while trace.iter().all(|span| span["name"] != "turn") || trace.len() < 6 {
            let span = spans.recv().await.expect("the collector runs");
            if told(&span, "antiphon.call") == Some(&id) {
                wanted = Some(span["traceId"].clone());
            }
            if wanted.is_some() && Some(&span["traceId"]) == wanted.as_ref() {
                trace.push(span);
            }
        }
    };
    timeout(PATIENCE, complete).await.expect("the trace arrives");
    let named =
        |name: &str| trace.iter().find(|span| span["name"] == name).unwrap_or_else(|| panic!("{name}: {trace:?}"));
    let nanos = |span: &Value, key: &str| span[key].as_str().and_then(|n| n.parse::<u64>().ok()).expect("a number");
    let (turn, first, synthesis) = (named("turn"), named("first audio"), named("synthesis"));
    // What espeak has of stages.
    let stage = named("vocode");
    assert_eq!(first["parentSpanId"], turn["spanId"]);
    assert_eq!(synthesis["parentSpanId"], first["spanId"]);
    assert_eq!(stage["parentSpanId"], synthesis["spanId"]);
    assert_eq!((told(turn, "antiphon.leg"), told(turn, "antiphon.outcome")), (Some("sip"), Some("done")));
    // One after the other, from the text to the packet. Ages are told by two threads, a millisecond apart at most
    // in each direction.
    let slack = Duration::from_millis(5).as_nanos() as u64;
    let waits = named("text waits");
    let paced = named("encode and pace");
    for (before, after) in [(waits, synthesis), (synthesis, paced)] {
        assert!(nanos(before, "endTimeUnixNano") <= nanos(after, "startTimeUnixNano") + slack);
    }
    assert!(nanos(first, "startTimeUnixNano") <= nanos(synthesis, "startTimeUnixNano") + slack);
    assert!(nanos(turn, "endTimeUnixNano") > nanos(first, "endTimeUnixNano"));
    call.hang_up().await;
    rig.app.drain().await;
    exporting.abort();
    collector.abort();
}
