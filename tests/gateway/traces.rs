//! Traces, logs and metrics, as a collector receives them.

use std::time::Duration;

use antiphon_loadgen::codec::Codec;
use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::post;
use futures_util::{SinkExt, StreamExt};
use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceRequest;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value;
use opentelemetry_proto::tonic::metrics::v1::metric;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::server::{Request, Response};

use super::program::Serve;
use super::support::{PATIENCE, Rig, SENTENCE, hear_turn};
use super::watch::Watch;

async fn take(State(spans): State<mpsc::Sender<Span>>, body: Bytes) -> StatusCode {
    for span in spans_of(&body) {
        spans.send(span).await.expect("the test listens");
    }
    StatusCode::OK
}

fn spans_of(body: &[u8]) -> Vec<Span> {
    let request = ExportTraceServiceRequest::decode(body).expect("OTLP");
    let scopes = request.resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
    scopes.flat_map(|scope| scope.spans).collect()
}

fn told<'a>(span: &'a Span, key: &str) -> Option<&'a str> {
    match span.attributes.iter().find(|attribute| attribute.key == key)?.value.as_ref()?.value.as_ref()? {
        any_value::Value::StringValue(value) => Some(value),
        _ => None,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
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
    let mut trace: Vec<Span> = Vec::new();
    let complete = async {
        let mut wanted = None;
        while trace.iter().all(|span| span.name != "turn") || trace.len() < 6 {
            let span = spans.recv().await.expect("the collector runs");
            if told(&span, "antiphon.call") == Some(&id) {
                wanted = Some(span.trace_id.clone());
            }
            if wanted.is_some() && Some(&span.trace_id) == wanted.as_ref() {
                trace.push(span);
            }
        }
    };
    timeout(PATIENCE, complete).await.expect("the trace arrives");
    let named = |name: &str| trace.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("{name}: {trace:?}"));
    let (turn, first, synthesis) = (named("turn"), named("first audio"), named("synthesis"));
    // What espeak has of stages.
    let stage = named("vocode");
    assert_eq!(first.parent_span_id, turn.span_id);
    assert_eq!(synthesis.parent_span_id, first.span_id);
    assert_eq!(stage.parent_span_id, synthesis.span_id);
    assert_eq!((told(turn, "antiphon.leg"), told(turn, "antiphon.outcome")), (Some("sip"), Some("done")));
    // One after the other, from the text to the packet. Ages are told by two threads, either of which may be
    // interrupted between its looks at the clock.
    let slack = Duration::from_millis(100).as_nanos() as u64;
    let waits = named("text waits");
    let paced = named("encode and pace");
    for (before, after) in [(waits, synthesis), (synthesis, paced)] {
        assert!(before.end_time_unix_nano <= after.start_time_unix_nano + slack);
    }
    assert!(first.start_time_unix_nano <= synthesis.start_time_unix_nano + slack);
    assert!(turn.end_time_unix_nano > first.end_time_unix_nano);
    call.hang_up().await;
    rig.app.drain().await;
    exporting.abort();
    collector.abort();
}

/// An agent that says one sentence as part of its own trace; tells the context that the handshake and `setup` had.
async fn agent(context: &'static str) -> (String, oneshot::Receiver<(Option<String>, Value)>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("ws://{}", listener.local_addr().expect("bound"));
    let (tell, told) = oneshot::channel();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.expect("the gateway dials");
        let mut header = None;
        #[allow(clippy::result_large_err, reason = "the callback's type is the library's")]
        let look = |request: &Request, response: Response| {
            let value = request.headers().get("traceparent").and_then(|value| value.to_str().ok());
            header = value.map(str::to_owned);
            Ok(response)
        };
        let mut socket = tokio_tungstenite::accept_hdr_async(stream, look).await.expect("a handshake");
        let first = socket.next().await.expect("a frame").expect("a frame").into_text().expect("text");
        let setup: Value = serde_json::from_str(&first).expect("JSON");
        let text = json!({ "type": "text", "token": SENTENCE, "last": true, "traceparent": context });
        socket.send(Message::text(text.to_string())).await.expect("sent");
        let _ = tell.send((header, setup["traceparent"].clone()));
        while socket.next().await.is_some_and(|frame| frame.is_ok()) {}
    });
    (url, told)
}

type Requests = mpsc::Receiver<(String, Bytes)>;

/// A collector, and what it is sent, by signal.
async fn collector() -> (String, Requests) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let (sender, requests) = mpsc::channel(10_000);
    let take = async |State(sender): State<mpsc::Sender<(String, Bytes)>>, Path(signal): Path<String>, body: Bytes| {
        sender.send((signal, body)).await.expect("the test listens");
        StatusCode::OK
    };
    let router = Router::new().route("/v1/{signal}", post(take)).with_state(sender);
    tokio::spawn(async move { axum::serve(listener, router).await });
    (url, requests)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_gets_spans_logs_and_metrics_and_the_agent_its_part_of_the_trace() {
    const AGENTS: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let (folder, state) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let (otlp, mut requests) = collector().await;
    let (agent, heard) = agent(AGENTS).await;
    let mut program = Serve::start(folder.path(), state.path(), |command| {
        command.env("ANTIPHON_LOG__OTLP", otlp).env("ANTIPHON_AGENT__BOT__URL", agent);
        command.env("ANTIPHON_ENGINE__KIND", "tone").env("ANTIPHON_CALL__DRAIN_GRACE_S", "1");
    });
    program.ready().await;
    let config = antiphon_loadgen::sip::Config { codecs: vec![Codec::Pcmu], ..Default::default() };
    let caller = antiphon_loadgen::sip::Caller::bind(config).await.expect("free ports");
    let call = caller.call(&format!("sip:bot@{}", program.sip)).await.expect("answered");
    hear_turn(&call, call.setup().asked).await;
    let (header, setup) = timeout(PATIENCE, heard).await.expect("dialled").expect("it tells");
    let own = header.expect("the handshake says so");
    assert_eq!(setup, own.as_str(), "and so does the first frame");

    // What the turn counts as shows its trace, for who asks for it.
    let client = reqwest::Client::new();
    let shows = async {
        loop {
            let asked = client.get(format!("{}/metrics", program.http));
            let asked = asked.header("accept", "application/openmetrics-text;version=1.0.0,text/plain;q=0.5").send();
            let answer = asked.await.expect("answered");
            let kind = answer.headers()["content-type"].to_str().expect("text").to_owned();
            assert!(kind.starts_with("application/openmetrics-text"), "{kind}");
            let text = answer.text().await.expect("text");
            assert!(text.ends_with("# EOF\n"), "{text}");
            let slow = text.lines().find(|line| line.contains(&AGENTS[3..35]));
            if let Some(line) = slow {
                assert!(line.starts_with("antiphon_first_audio_seconds_bucket{"), "{line}");
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(PATIENCE, shows).await.expect("the turn is an example");
    call.hang_up().await;
    assert_eq!(program.terminate().await, Some(0));

    let (mut spans, mut metrics, mut logs) = (Vec::new(), Vec::new(), Vec::new());
    while let Ok((signal, body)) = requests.try_recv() {
        match signal.as_str() {
            "traces" => spans.extend(spans_of(&body)),
            "metrics" => metrics.push(ExportMetricsServiceRequest::decode(body).expect("OTLP")),
            "logs" => logs.push(ExportLogsServiceRequest::decode(body).expect("OTLP")),
            other => panic!("{other}"),
        }
    }
    let named = |name: &str| spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("{name}: {spans:?}"));
    let (call, turn) = (named("call"), named("turn"));
    assert_eq!(format!("00-{}-{}-01", hex(&call.trace_id), hex(&call.span_id)), own);
    assert_eq!(told(call, "antiphon.reason"), Some("remote"));
    assert_eq!(hex(&turn.trace_id), AGENTS[3..35], "the turn is part of what the agent said");
    assert_eq!(hex(&turn.parent_span_id), AGENTS[36..52]);
    let sent = metrics.last().expect("at the end at the latest").resource_metrics[0].scope_metrics[0].metrics.clone();
    let of = |name: &str| sent.iter().find(|metric| metric.name == name).and_then(|metric| metric.data.clone());
    let Some(metric::Data::Histogram(histogram)) = of("antiphon_first_audio_seconds") else { panic!("{sent:?}") };
    let examples = histogram.data_points.iter().flat_map(|point| &point.exemplars);
    assert!(examples.clone().any(|example| hex(&example.trace_id) == AGENTS[3..35]), "{histogram:?}");
    assert!(matches!(of("antiphon_turns_total"), Some(metric::Data::Sum(_))));
    let scopes = logs.into_iter().flat_map(|request| request.resource_logs).flat_map(|resource| resource.scope_logs);
    let lines: Vec<_> = scopes.flat_map(|scope| scope.log_records).collect();
    let said = |line: &opentelemetry_proto::tonic::logs::v1::LogRecord| match line.body.as_ref()?.value.as_ref()? {
        any_value::Value::StringValue(text) => Some(text.clone()),
        _ => None,
    };
    let draining = lines.iter().find(|line| said(line).is_some_and(|text| text.starts_with("draining")));
    assert_eq!(draining.expect("it is logged").severity_text, "INFO");
}
