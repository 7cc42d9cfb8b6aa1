//! Traces of turns for an OpenTelemetry collector: OTLP over HTTP in its JSON encoding (OTLP 1.x; proto3 JSON
//! mapping with ids as lower-case hex).
//!
//! A turn is one trace: the turn itself, the way from its text to its first RTP packet, and in that the wait for the
//! engine, the synthesis with its stages, and the way of the first PCM to the wire. The parts that take part say so
//! with `tracing` events of the target [`TARGET`]; [`Layer`] picks those up and [`Exporter`] makes spans of them.
//!
//! Contract: nothing here ever waits on a call's behalf. What finds a queue full, or cannot be delivered, is
//! dropped and counted in `antiphon_traces_dropped_total`.
//!
//! # Why
//! *An exporter of our own*: the one of the OpenTelemetry project brings a dozen crates (an SDK with its own
//! processors, protobuf with its macros) for a document of five kinds of object, and HTTP and JSON are here already.
//!
//! *Events with ages* rather than `tracing` spans: a turn lives in three threads that know nothing of each other's
//! spans, and a span entered and left for every frame would cost the media threads what an event a turn does not.
//! Ages in microseconds survive the way from the monotonic clock to the collector's wall clock.
//!
//! *Ids by hash* of call and turn: call and scheduler name the same trace of a turn without having to tell each other.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::time::Duration;

use metrics::counter;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::field::{Field, Visit};

use crate::clock;

/// The target of events that are spans in the making. Fields: `kind` (`stage`, `first`, `answer` or `turn`), names, and ages
/// in microseconds (`*_us`).
pub const TARGET: &str = "antiphon::spans";

/// Events that may wait for the exporter.
const QUEUE: usize = 4_096;
/// Spans of one request at most.
const BATCH: usize = 512;
/// How long spans wait for others.
const LINGER: Duration = Duration::from_secs(2);
/// How long a collector may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Utterances whose stages wait for their turn to sound. Those of speech without a call never do.
const UTTERANCES: usize = 1_024;
/// An OTLP span kind: `SPAN_KIND_INTERNAL`.
const INTERNAL: u8 = 1;
/// An OTLP status code: `STATUS_CODE_ERROR`.
const ERROR: u8 = 2;

/// Picks up what belongs to traces. Everything else is none of its business.
pub struct Layer {
    records: mpsc::Sender<Record>,
}

/// Makes spans of records and delivers them.
pub struct Exporter {
    url: String,
    records: mpsc::Receiver<Record>,
    stages: Stages,
}

/// A layer and the exporter it feeds. `endpoint` is the collector's base address (`http://host:4318`); `/v1/traces`
/// is added where it is not there.
pub fn pair(endpoint: &str) -> (Layer, Exporter) {
    let base = endpoint.trim_end_matches('/');
    let url = if base.ends_with("/v1/traces") { base.to_owned() } else { format!("{base}/v1/traces") };
    let (sender, records) = mpsc::channel(QUEUE);
    (Layer { records: sender }, Exporter { url, records, stages: Stages::default() })
}

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Layer {
    fn on_event(&self, event: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
        let mut record = Record { at: clock::wall(), ..Record::default() };
        event.record(&mut record);
        // overflow: drops (counted)
        if self.records.try_send(record).is_err() {
            dropped(1, "queue");
        }
    }
}

/// One event as it came.
#[derive(Clone, Debug, Default)]
struct Record {
    /// Wall clock of the event: ages count back from it.
    at: Duration,
    names: Vec<(&'static str, String)>,
    ages: Vec<(&'static str, u64)>,
}

impl Record {
    fn name(&self, field: &str) -> &str {
        self.names.iter().find(|(name, _)| *name == field).map_or("", |(_, value)| value)
    }

    fn number(&self, field: &str) -> Option<u64> {
        self.ages.iter().find(|(name, _)| *name == field).map(|(_, value)| *value)
    }

    /// The instant that the age in `field` means.
    fn instant(&self, field: &str) -> Option<Duration> {
        self.number(field).map(|age| self.at.saturating_sub(Duration::from_micros(age)))
    }
}

impl Visit for Record {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.ages.push((field.name(), value));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.names.push((field.name(), value.to_owned()));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.names.push((field.name(), format!("{value:?}")));
    }
}

/// Stages of utterances whose turn has not sounded yet; bounded, the oldest go first.
#[derive(Debug, Default)]
struct Stages {
    by_utterance: HashMap<String, Vec<Record>>,
    order: VecDeque<String>,
}

impl Stages {
    fn add(&mut self, record: Record) {
        let utterance = record.name("utterance").to_owned();
        if !self.by_utterance.contains_key(&utterance) {
            self.order.push_back(utterance.clone());
        }
        self.by_utterance.entry(utterance).or_default().push(record);
        while self.order.len() > UTTERANCES {
            if let Some(oldest) = self.order.pop_front() {
                self.by_utterance.remove(&oldest);
            }
        }
    }

    fn take(&mut self, utterance: &str) -> Vec<Record> {
        self.order.retain(|known| known != utterance);
        self.by_utterance.remove(utterance).unwrap_or_default()
    }
}

impl Exporter {
    /// Delivers until `stop` completes, and then what is left; bounded in time.
    pub async fn run(mut self, stop: impl Future<Output = ()>) {
        let client = match reqwest::Client::builder().timeout(PATIENCE).build() {
            Ok(client) => client,
            Err(error) => return tracing::error!(%error, "[log] otlp: no HTTP client; traces are off"),
        };
        let mut stop = std::pin::pin!(stop);
        let (mut reachable, mut stopping) = (true, false);
        while !stopping {
            let mut spans = Vec::new();
            let first = tokio::select! {
                biased;
                record = self.records.recv() => record,
                () = &mut stop => None,
            };
            match first {
                Some(record) => self.spans(record, &mut spans),
                None => stopping = true,
            }
            let mut deadline = Instant::now() + if stopping { Duration::ZERO } else { LINGER };
            while spans.len() < BATCH {
                let record = tokio::select! {
                    biased;
                    record = timeout_at(deadline, self.records.recv()) => record,
                    () = &mut stop, if !stopping => {
                        stopping = true;
                        // What waits is taken yet; nothing is waited for.
                        deadline = Instant::now();
                        continue;
                    }
                };
                match record {
                    Ok(Some(record)) => self.spans(record, &mut spans),
                    Ok(None) | Err(_) => break,
                }
            }
            if spans.is_empty() {
                continue;
            }
            let count = spans.len() as u64;
            match timeout(PATIENCE * 2, deliver(&client, &self.url, spans)).await.unwrap_or(Err("no answer".into())) {
                Ok(()) => {
                    counter!("antiphon_traces_exported_total").increment(count);
                    if !std::mem::replace(&mut reachable, true) {
                        tracing::info!(url = self.url, "the trace collector takes spans again");
                    }
                }
                Err(reason) => {
                    dropped(count, "delivery");
                    // Once, not with every batch.
                    if std::mem::replace(&mut reachable, false) {
                        tracing::warn!(url = self.url, reason, "the trace collector takes no spans; they are dropped");
                    }
                }
            }
        }
        dropped(self.records.len() as u64, "queue");
    }

    fn spans(&mut self, record: Record, spans: &mut Vec<Value>) {
        match record.name("kind") {
            "stage" => self.stages.add(record),
            "first" => {
                let stages = self.stages.take(record.name("utterance"));
                first_audio(&record, &stages, spans);
            }
            "answer" => answer(&record, spans),
            "turn" => turn(&record, spans),
            _ => {}
        }
    }
}

fn dropped(spans: u64, reason: &'static str) {
    counter!("antiphon_traces_dropped_total", "reason" => reason).increment(spans);
}

/// The turn as a whole: the root.
fn turn(record: &Record, spans: &mut Vec<Value>) {
    let Some(began) = record.instant("accepted_us") else { return };
    let ids = Ids::of(record);
    let outcome = record.name("outcome");
    let mut attributes = described(record, &["call", "turn", "leg", "codec", "outcome"]);
    attributes.extend(record.number("sent_ms").map(|ms| attribute("antiphon.sent_ms", Value::from(ms))));
    let mut span = span(&ids, ids.root(), "", "turn", (began, record.at), attributes);
    if matches!(outcome, "failed" | "refused") {
        span["status"] = json!({ "code": ERROR, "message": outcome });
    }
    spans.push(span);
}

/// From the text to the first packet, and what happened on the way.
fn first_audio(record: &Record, stages: &[Record], spans: &mut Vec<Value>) {
    let Some(accepted) = record.instant("accepted_us") else { return };
    let ids = Ids::of(record);
    let first = ids.child("first audio");
    let attributes = described(record, &["call", "turn", "leg", "codec", "utterance"]);
    spans.push(span(&ids, first.clone(), &ids.root(), "first audio", (accepted, record.at), attributes));
    // A recording has neither been with the engine nor come from it.
    let (Some(submitted), Some(made)) = (record.instant("submitted_us"), record.instant("made_us")) else { return };
    let synthesis = ids.child("synthesis");
    for (name, id, from, to) in [
        ("text waits", ids.child("text waits"), accepted, submitted),
        ("synthesis", synthesis.clone(), submitted, made),
        ("encode and pace", ids.child("encode and pace"), made, record.at),
    ] {
        spans.push(span(&ids, id, &first, name, (from, to), Vec::new()));
    }
    for stage in stages {
        let (Some(began), Some(ended)) = (stage.instant("began_us"), stage.instant("ended_us")) else { continue };
        let name = stage.name("stage");
        let steps = stage.number("steps").map(|n| attribute("antiphon.steps", Value::from(n)));
        let busy = stage.number("busy_us").map(|us| attribute("antiphon.device_us", Value::from(us)));
        let attributes = steps.into_iter().chain(busy).collect();
        spans.push(span(&ids, ids.child(name), &synthesis, name, (began, ended), attributes));
    }
}

/// From the caller's last sound to the first packet of the turn that answers, part by part.
fn answer(record: &Record, spans: &mut Vec<Value>) {
    let Some(spoke) = record.instant("spoke_us") else { return };
    let ids = Ids::of(record);
    let whole = ids.child("mouth to ear");
    let attributes = described(record, &["call", "turn", "leg", "codec"]);
    spans.push(span(&ids, whole.clone(), &ids.root(), "mouth to ear", (spoke, record.at), attributes));
    let mut from = spoke;
    for (name, field) in [
        ("end of turn", "end_of_turn_us"),
        ("agent", "agent_us"),
        ("queue", "queue_us"),
        ("first PCM", "first_audio_us"),
        ("egress", "egress_us"),
    ] {
        let to = from + Duration::from_micros(record.number(field).unwrap_or_default());
        spans.push(span(&ids, ids.child(name), &whole, name, (from, to), Vec::new()));
        from = to;
    }
}

/// The ids of one turn's trace.
struct Ids {
    call: String,
    turn: String,
}

impl Ids {
    fn of(record: &Record) -> Self {
        Self { call: record.name("call").to_owned(), turn: record.name("turn").to_owned() }
    }

    fn hash(&self, what: &str) -> [u8; 32] {
        let mut hash = Sha256::new();
        for part in [self.call.as_str(), "\0", &self.turn, "\0", what] {
            hash.update(part);
        }
        hash.finalize().into()
    }

    fn trace(&self) -> String {
        hex(&self.hash("")[..16])
    }

    fn root(&self) -> String {
        self.child("turn")
    }

    fn child(&self, name: &str) -> String {
        hex(&self.hash(name)[..8])
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn span(
    ids: &Ids,
    id: String,
    parent: &str,
    name: &str,
    (began, ended): (Duration, Duration),
    attributes: Vec<Value>,
) -> Value {
    // 64-bit numbers are strings in the JSON encoding.
    json!({
        "traceId": ids.trace(),
        "spanId": id,
        "parentSpanId": parent,
        "name": name,
        "kind": INTERNAL,
        "startTimeUnixNano": began.as_nanos().to_string(),
        "endTimeUnixNano": ended.max(began).as_nanos().to_string(),
        "attributes": attributes,
    })
}

fn described(record: &Record, fields: &[&str]) -> Vec<Value> {
    let told = fields.iter().filter(|field| !record.name(field).is_empty());
    told.map(|field| attribute(&format!("antiphon.{field}"), Value::from(record.name(field)))).collect()
}

fn attribute(key: &str, value: Value) -> Value {
    let value = match value {
        Value::Number(number) => json!({ "intValue": number.to_string() }),
        other => json!({ "stringValue": other }),
    };
    json!({ "key": key, "value": value })
}

fn document(spans: Vec<Value>) -> Value {
    let version = env!("CARGO_PKG_VERSION");
    let resource =
        [attribute("service.name", Value::from("antiphon")), attribute("service.version", Value::from(version))];
    json!({ "resourceSpans": [{
        "resource": { "attributes": resource },
        "scopeSpans": [{ "scope": { "name": "antiphon", "version": version }, "spans": spans }],
    }] })
}

/// One request, and one more where the collector asks for it.
async fn deliver(client: &reqwest::Client, url: &str, spans: Vec<Value>) -> Result<(), String> {
    let document = document(spans);
    let mut again = true;
    loop {
        let answer = client.post(url).json(&document).send().await.map_err(|error| error.to_string())?;
        let status = answer.status().as_u16();
        match status {
            200..=299 => return Ok(()),
            // The statuses that OTLP calls retryable.
            429 | 502 | 503 | 504 if again => {
                again = false;
                let wait = answer.headers().get("retry-after").and_then(|value| value.to_str().ok()?.parse().ok());
                tokio::time::sleep(Duration::from_secs(wait.unwrap_or(1)).min(PATIENCE / 2)).await;
            }
            _ => return Err(format!("status {status}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(names: &[(&'static str, &str)], ages: &[(&'static str, u64)]) -> Record {
        Record {
            at: Duration::from_secs(1_000),
            names: names.iter().map(|(name, value)| (*name, (*value).to_owned())).collect(),
            ages: ages.to_vec(),
        }
    }

    fn exported(exporter: &mut Exporter, records: Vec<Record>) -> Vec<Value> {
        let mut spans = Vec::new();
        records.into_iter().for_each(|record| exporter.spans(record, &mut spans));
        spans
    }

    #[test]
    fn an_answer_shows_what_the_caller_waited_for() {
        let (_layer, mut exporter) = pair("http://collector:4318/");
        let names = [("kind", "answer"), ("call", "c"), ("turn", "t")];
        let ages = [("spoke_us", 600_000), ("end_of_turn_us", 400_000), ("agent_us", 150_000), ("egress_us", 50_000)];
        let spans = exported(&mut exporter, vec![record(&names, &ages)]);
        let names: Vec<_> = spans.iter().map(|span| span["name"].as_str().expect("a name")).collect();
        assert_eq!(names, ["mouth to ear", "end of turn", "agent", "queue", "first PCM", "egress"]);
        assert!(spans[1..].iter().all(|span| span["parentSpanId"] == spans[0]["spanId"]));
        assert_eq!(spans[2]["startTimeUnixNano"], spans[1]["endTimeUnixNano"]);
        assert_eq!(spans[5]["endTimeUnixNano"], spans[0]["endTimeUnixNano"]);
    }

    #[test]
    fn a_turn_is_one_trace_from_its_text_to_its_first_packet() {
        let (_layer, mut exporter) = pair("http://collector:4318/");
        assert_eq!(exporter.url, "http://collector:4318/v1/traces");
        let turn = [("call", "c"), ("turn", "t"), ("leg", "sip"), ("codec", "pcmu")];
        let named = |kind, more: &[(&'static str, &'static str)]| {
            let mut names = vec![("kind", kind)];
            names.extend(turn);
            names.extend(more);
            names
        };
        let stage = [("kind", "stage"), ("utterance", "u7"), ("stage", "flow")];
        let spans = exported(
            &mut exporter,
            vec![
                record(&stage, &[("began_us", 9_000), ("ended_us", 4_000), ("busy_us", 3_000), ("steps", 2)]),
                record(
                    &named("first", &[("utterance", "u7")]),
                    &[("accepted_us", 20_000), ("submitted_us", 19_000), ("made_us", 3_000)],
                ),
                record(&named("turn", &[("outcome", "failed")]), &[("accepted_us", 500_000), ("sent_ms", 480)]),
            ],
        );
        let names: Vec<_> = spans.iter().map(|span| span["name"].as_str().expect("a name")).collect();
        assert_eq!(names, ["first audio", "text waits", "synthesis", "encode and pace", "flow", "turn"]);
        let root = spans.last().expect("six");
        assert_eq!(root["parentSpanId"], "");
        assert_eq!(root["status"]["code"], 2);
        assert!(spans.iter().all(|span| span["traceId"] == root["traceId"]));
        assert_eq!(root["traceId"].as_str().map(str::len), Some(32));
        assert_eq!((&spans[0]["parentSpanId"], root["spanId"].as_str().map(str::len)), (&root["spanId"], Some(16)));
        assert_eq!(spans[4]["parentSpanId"], spans[2]["spanId"]);
        assert_eq!(spans[0]["startTimeUnixNano"], "999980000000");
        assert_eq!(spans[3]["endTimeUnixNano"], "1000000000000");
        assert_eq!(spans[4]["attributes"][0], json!({ "key": "antiphon.steps", "value": { "intValue": "2" } }));
        let document = document(spans);
        assert_eq!(document["resourceSpans"][0]["resource"]["attributes"][0]["value"]["stringValue"], "antiphon");
    }

    #[test]
    fn stages_of_turns_that_never_end_are_forgotten() {
        let mut stages = Stages::default();
        for n in 0..UTTERANCES * 2 {
            stages.add(record(&[("utterance", &format!("u{n}"))], &[]));
        }
        assert_eq!((stages.by_utterance.len(), stages.order.len()), (UTTERANCES, UTTERANCES));
        assert!(stages.take("u0").is_empty());
        assert_eq!(stages.take(&format!("u{}", UTTERANCES * 2 - 1)).len(), 1);
    }

    #[test]
    fn events_become_records_and_a_full_queue_drops_them() {
        use tracing_subscriber::layer::SubscriberExt;
        let (layer, mut exporter) = pair("http://127.0.0.1:9");
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            for _ in 0..QUEUE * 2 {
                tracing::trace!(target: "antiphon::spans", kind = "turn", call = %"c", turn = ?7, accepted_us = 5u64);
            }
        });
        let first = exporter.records.try_recv().expect("one came");
        assert_eq!((first.name("kind"), first.name("call"), first.name("turn")), ("turn", "c", "7"));
        assert_eq!(first.number("accepted_us"), Some(5));
        let mut left = 0;
        while exporter.records.try_recv().is_ok() {
            left += 1;
        }
        assert_eq!(left, QUEUE - 1);
    }
}
