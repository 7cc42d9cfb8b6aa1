//! Spans of calls and turns, made of what the parts that take part tell.

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::time::{Duration, UNIX_EPOCH};

use metrics::counter;
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanExporter as _, SpanLinks};
use tokio::sync::mpsc;
use tracing::field::{Field, Visit};

use super::client::{Client, PATIENCE};
use super::gather::Signal;
use super::{resource, scope};
use crate::clock;
use crate::telemetry::context::{self, TraceContext};
use crate::telemetry::exemplars;

/// Utterances whose stages wait for their turn to sound (those of speech without a call never do), and calls that wait for
/// their end.
const KEPT: usize = 4_096;

/// Picks up what belongs to traces. Everything else is none of its business.
pub struct Layer {
    records: mpsc::Sender<Record>,
}

impl Layer {
    pub(super) fn new(records: mpsc::Sender<Record>) -> Self {
        Self { records }
    }
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
pub(super) struct Record {
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

/// What waits for something else to happen, by name; bounded, the oldest go first.
#[derive(Debug, Default)]
struct Waiting {
    by_name: HashMap<String, Vec<Record>>,
    order: VecDeque<String>,
}

impl Waiting {
    fn add(&mut self, name: &str, record: Record) {
        if !self.by_name.contains_key(name) {
            self.order.push_back(name.to_owned());
        }
        self.by_name.entry(name.to_owned()).or_default().push(record);
        while self.order.len() > KEPT {
            if let Some(oldest) = self.order.pop_front() {
                self.by_name.remove(&oldest);
            }
        }
    }

    fn take(&mut self, name: &str) -> Vec<Record> {
        let Some(taken) = self.by_name.remove(name) else { return Vec::new() };
        self.order.retain(|known| known != name);
        taken
    }
}

#[derive(Debug)]
pub(super) struct Spans {
    exporter: SpanExporter,
    scope: InstrumentationScope,
    stages: Waiting,
    parents: Waiting,
}

impl Spans {
    pub(super) fn new(base: &str, client: Client) -> Result<Self, String> {
        let builder = SpanExporter::builder().with_http().with_http_client(client).with_timeout(PATIENCE);
        let exporter = builder.with_endpoint(format!("{base}/v1/traces")).build();
        let mut exporter = exporter.map_err(|error| error.to_string())?;
        exporter.set_resource(&resource());
        Ok(Self { exporter, scope: scope(), stages: Waiting::default(), parents: Waiting::default() })
    }

    fn of(&mut self, record: Record) -> Vec<SpanData> {
        match record.name("kind") {
            "stage" => {
                let utterance = record.name("utterance").to_owned();
                self.stages.add(&utterance, record);
            }
            "parent" => {
                let call = record.name("call").to_owned();
                self.parents.add(&call, record);
            }
            "first" => {
                let stages = self.stages.take(record.name("utterance"));
                return self.first_audio(&record, &stages);
            }
            "answer" => return self.answer(&record),
            "turn" => return self.turn(&record),
            "call" => return self.call(&record),
            _ => {}
        }
        Vec::new()
    }

    /// The whole call: the root, or part of what asked for it.
    fn call(&mut self, record: &Record) -> Vec<SpanData> {
        let Some(began) = record.instant("began_us") else { return Vec::new() };
        let call = record.name("call");
        let parent = self.parents.take(call).pop();
        let parent = parent.and_then(|told| TraceContext::parse(told.name("parent")));
        let own = TraceContext::of_call(parent.as_ref(), call).span().clone();
        let attributes = described(record, &["call", "leg", "direction", "agent", "reason"]);
        let at = Place {
            context: own,
            parent: parent.map_or(SpanId::INVALID, |parent| parent.span().span_id()),
            remote: true,
        };
        let mut span = self.span(at, "call", (began, record.at), attributes);
        span.span_kind = SpanKind::Server;
        if record.name("reason") == "failed" {
            span.status = Status::error("failed");
        }
        vec![span]
    }

    /// The turn as a whole.
    fn turn(&self, record: &Record) -> Vec<SpanData> {
        let Some(began) = record.instant("accepted_us") else { return Vec::new() };
        let ids = Ids::of(record);
        let outcome = record.name("outcome");
        let mut attributes = described(record, &["call", "turn", "leg", "codec", "outcome"]);
        attributes.extend(record.number("sent_ms").map(|ms| number("antiphon.sent_ms", ms)));
        let mut span = self.span(ids.root(), "turn", (began, record.at), attributes);
        if matches!(outcome, "failed" | "refused") {
            span.status = Status::error(outcome.to_owned());
        }
        vec![span]
    }

    /// From the text to the first packet, and what happened on the way.
    fn first_audio(&self, record: &Record, stages: &[Record]) -> Vec<SpanData> {
        let Some(accepted) = record.instant("accepted_us") else { return Vec::new() };
        let ids = Ids::of(record);
        let first = ids.child("turn", "first audio");
        let leg = match record.name("leg") {
            "webrtc" => "webrtc",
            _ => "sip",
        };
        let labels = [("leg", leg), ("class", "live")];
        exemplars::note(
            "antiphon_first_audio_seconds",
            &labels,
            (record.at - accepted).as_secs_f64(),
            &first.context,
            record.at,
        );
        let attributes = described(record, &["call", "turn", "leg", "codec", "utterance"]);
        let mut spans = vec![self.span(first, "first audio", (accepted, record.at), attributes)];
        // A recording has neither been with the engine nor come from it.
        let (Some(submitted), Some(made)) = (record.instant("submitted_us"), record.instant("made_us")) else {
            return spans;
        };
        for (name, from, to) in
            [("text waits", accepted, submitted), ("synthesis", submitted, made), ("encode and pace", made, record.at)]
        {
            spans.push(self.span(ids.child("first audio", name), name, (from, to), Vec::new()));
        }
        for stage in stages {
            let (Some(began), Some(ended)) = (stage.instant("began_us"), stage.instant("ended_us")) else { continue };
            let name = stage.name("stage").to_owned();
            let steps = stage.number("steps").map(|n| number("antiphon.steps", n));
            let busy = stage.number("busy_us").map(|us| number("antiphon.device_us", us));
            let attributes = steps.into_iter().chain(busy).collect();
            spans.push(self.span(ids.child("synthesis", &name), name, (began, ended), attributes));
        }
        spans
    }

    /// From the caller's last sound to the first packet of the turn that answers, part by part.
    fn answer(&self, record: &Record) -> Vec<SpanData> {
        let Some(spoke) = record.instant("spoke_us") else { return Vec::new() };
        let ids = Ids::of(record);
        let whole = ids.child("turn", "mouth to ear");
        let seconds = (record.at - spoke).as_secs_f64();
        exemplars::note("antiphon_turn_seconds", &[("phase", "mouth_to_ear")], seconds, &whole.context, record.at);
        let attributes = described(record, &["call", "turn", "leg", "codec"]);
        let mut spans = vec![self.span(whole, "mouth to ear", (spoke, record.at), attributes)];
        let mut from = spoke;
        for (name, field) in [
            ("end of turn", "end_of_turn_us"),
            ("agent", "agent_us"),
            ("queue", "queue_us"),
            ("first PCM", "first_audio_us"),
            ("egress", "egress_us"),
        ] {
            let to = from + Duration::from_micros(record.number(field).unwrap_or_default());
            spans.push(self.span(ids.child("mouth to ear", name), name, (from, to), Vec::new()));
            from = to;
        }
        spans
    }

    fn span(
        &self,
        at: Place,
        name: impl Into<Cow<'static, str>>,
        (began, ended): (Duration, Duration),
        attributes: Vec<KeyValue>,
    ) -> SpanData {
        SpanData {
            parent_span_id: at.parent,
            parent_span_is_remote: at.remote && at.parent != SpanId::INVALID,
            span_context: at.context,
            span_kind: SpanKind::Internal,
            name: name.into(),
            start_time: UNIX_EPOCH + began,
            end_time: UNIX_EPOCH + ended.max(began),
            attributes,
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: self.scope.clone(),
        }
    }
}

impl Signal for Spans {
    type Record = Record;
    type Item = SpanData;
    const NAME: &'static str = "spans";

    fn take(&mut self, record: Record, items: &mut Vec<SpanData>) {
        // Who asked for a call may have decided that its trace is not kept.
        items.extend(self.of(record).into_iter().filter(|span| span.span_context.is_sampled()));
    }

    async fn deliver(&self, items: Vec<SpanData>) -> Result<(), String> {
        self.exporter.export(items).await.map_err(|error| error.to_string())
    }

    fn exported(count: u64) {
        counter!("antiphon_traces_exported_total").increment(count);
    }

    fn dropped(count: u64, reason: &'static str) {
        dropped(count, reason);
    }
}

fn dropped(spans: u64, reason: &'static str) {
    counter!("antiphon_traces_dropped_total", "reason" => reason).increment(spans);
}

/// Which span, and whose.
struct Place {
    context: SpanContext,
    parent: SpanId,
    /// The parent may be somebody else's.
    remote: bool,
}

/// The ids of one turn's spans.
struct Ids<'a> {
    call: &'a str,
    turn: &'a str,
    /// What the turn is part of.
    parent: Option<TraceContext>,
}

impl<'a> Ids<'a> {
    fn of(record: &'a Record) -> Self {
        Self {
            call: record.name("call"),
            turn: record.name("turn"),
            parent: TraceContext::parse(record.name("parent")),
        }
    }

    fn trace(&self) -> (TraceId, TraceFlags) {
        match &self.parent {
            Some(parent) => (parent.span().trace_id(), parent.span().trace_flags()),
            None => (context::trace_id(self.call, self.turn), TraceFlags::SAMPLED),
        }
    }

    fn id(&self, name: &str) -> SpanId {
        context::span_id(self.call, self.turn, name)
    }

    fn place(&self, name: &str, parent: SpanId, remote: bool) -> Place {
        let (trace, flags) = self.trace();
        Place { context: SpanContext::new(trace, self.id(name), flags, false, TraceState::NONE), parent, remote }
    }

    fn root(&self) -> Place {
        let parent = self.parent.as_ref().map_or(SpanId::INVALID, |parent| parent.span().span_id());
        self.place("turn", parent, true)
    }

    fn child(&self, parent: &str, name: &str) -> Place {
        self.place(name, self.id(parent), false)
    }
}

fn described(record: &Record, fields: &[&str]) -> Vec<KeyValue> {
    let told = fields.iter().filter(|field| !record.name(field).is_empty());
    told.map(|field| KeyValue::new(format!("antiphon.{field}"), record.name(field).to_owned())).collect()
}

fn number(key: &'static str, value: u64) -> KeyValue {
    KeyValue::new(key, i64::try_from(value).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use opentelemetry::Value;

    use super::*;

    fn spans() -> Spans {
        // Its client asks for the provider of TLS that the gateway installs.
        let _ = rustls::crypto::ring::default_provider().install_default();
        Spans::new("http://collector:4318", Client::new().expect("a client")).expect("an exporter")
    }

    fn record(names: &[(&'static str, &str)], ages: &[(&'static str, u64)]) -> Record {
        Record {
            at: Duration::from_secs(1_000),
            names: names.iter().map(|(name, value)| (*name, (*value).to_owned())).collect(),
            ages: ages.to_vec(),
        }
    }

    fn exported(records: Vec<Record>) -> Vec<SpanData> {
        let (mut signal, mut spans) = (spans(), Vec::new());
        records.into_iter().for_each(|record| signal.take(record, &mut spans));
        spans
    }

    fn names(spans: &[SpanData]) -> Vec<&str> {
        spans.iter().map(|span| span.name.as_ref()).collect()
    }

    #[test]
    fn an_answer_shows_what_the_caller_waited_for() {
        let named = [("kind", "answer"), ("call", "c"), ("turn", "t")];
        let ages = [("spoke_us", 600_000), ("end_of_turn_us", 400_000), ("agent_us", 150_000), ("egress_us", 50_000)];
        let spans = exported(vec![record(&named, &ages)]);
        assert_eq!(names(&spans), ["mouth to ear", "end of turn", "agent", "queue", "first PCM", "egress"]);
        assert!(spans[1..].iter().all(|span| span.parent_span_id == spans[0].span_context.span_id()));
        assert_eq!(spans[2].start_time, spans[1].end_time);
        assert_eq!(spans[5].end_time, spans[0].end_time);
    }

    #[test]
    fn a_turn_is_one_trace_from_its_text_to_its_first_packet() {
        let turn = [("call", "c"), ("turn", "t"), ("leg", "sip"), ("codec", "pcmu")];
        let named = |kind, more: &[(&'static str, &'static str)]| {
            let mut names = vec![("kind", kind)];
            names.extend(turn);
            names.extend(more);
            names
        };
        let stage = [("kind", "stage"), ("utterance", "u7"), ("stage", "flow")];
        let spans = exported(vec![
            record(&stage, &[("began_us", 9_000), ("ended_us", 4_000), ("busy_us", 3_000), ("steps", 2)]),
            record(
                &named("first", &[("utterance", "u7")]),
                &[("accepted_us", 20_000), ("submitted_us", 19_000), ("made_us", 3_000)],
            ),
            record(&named("turn", &[("outcome", "failed")]), &[("accepted_us", 500_000), ("sent_ms", 480)]),
        ]);
        assert_eq!(names(&spans), ["first audio", "text waits", "synthesis", "encode and pace", "flow", "turn"]);
        let root = spans.last().expect("six");
        assert_eq!(root.parent_span_id, SpanId::INVALID);
        assert_eq!(root.status, Status::error("failed"));
        assert!(spans.iter().all(|span| span.span_context.trace_id() == root.span_context.trace_id()));
        assert_eq!(spans[0].parent_span_id, root.span_context.span_id());
        assert_eq!(spans[4].parent_span_id, spans[2].span_context.span_id());
        assert_eq!(spans[0].start_time, UNIX_EPOCH + Duration::from_millis(999_980));
        assert_eq!(spans[3].end_time, UNIX_EPOCH + Duration::from_secs(1_000));
        assert_eq!(spans[4].attributes[0], KeyValue::new("antiphon.steps", Value::I64(2)));
    }

    #[test]
    fn a_call_is_part_of_what_asked_for_it_and_its_turns_of_what_the_agent_says() {
        let given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let call = || record(&[("kind", "call"), ("call", "c"), ("reason", "remote")], &[("began_us", 5_000_000)]);
        let turn = |parent: &str| {
            record(&[("kind", "turn"), ("call", "c"), ("turn", "t"), ("parent", parent)], &[("accepted_us", 1)])
        };
        let told = record(&[("kind", "parent"), ("call", "c"), ("parent", given)], &[]);
        let own = TraceContext::of_call(TraceContext::parse(given).as_ref(), "c").to_string();
        let spans = exported(vec![told, turn(&own), call()]);
        let given = TraceContext::parse(given).expect("valid");
        assert!(spans.iter().all(|span| span.span_context.trace_id() == given.span().trace_id()));
        assert_eq!(spans[1].parent_span_id, given.span().span_id(), "the call's is whoever asked");
        assert!(spans[1].parent_span_is_remote);
        assert_eq!(spans[0].parent_span_id, spans[1].span_context.span_id(), "the turn's is the call");
        // No client asked, and the agent has a trace of its own, which it does not keep.
        let other = "00-00000000000000000000000000000007-0000000000000009-00";
        let spans = exported(vec![turn(other), call()]);
        assert_eq!((names(&spans), spans[0].parent_span_id), (vec!["call"], SpanId::INVALID));
    }

    #[test]
    fn stages_of_turns_that_never_end_are_forgotten() {
        let mut stages = Waiting::default();
        for n in 0..KEPT * 2 {
            stages.add(&format!("u{n}"), record(&[], &[]));
        }
        assert_eq!((stages.by_name.len(), stages.order.len()), (KEPT, KEPT));
        assert!(stages.take("u0").is_empty());
        assert_eq!(stages.take(&format!("u{}", KEPT * 2 - 1)).len(), 1);
    }

    #[test]
    fn events_become_records_and_a_full_queue_drops_them() {
        use tracing_subscriber::layer::SubscriberExt;

        use crate::telemetry::otlp::{QUEUE, pair};
        use crate::telemetry::shown::Shown;
        let shown = Shown::here();
        let (layer, _collector, mut exporter) = pair("http://127.0.0.1:9");
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            for _ in 0..QUEUE * 2 {
                tracing::trace!(target: "antiphon::spans", kind = "turn", call = %"c", turn = ?7, accepted_us = 5u64);
            }
        });
        let first = exporter.spans.try_recv().expect("one came");
        assert_eq!((first.name("kind"), first.name("call"), first.name("turn")), ("turn", "c", "7"));
        assert_eq!(first.number("accepted_us"), Some(5));
        let mut left = 0;
        while exporter.spans.try_recv().is_ok() {
            left += 1;
        }
        assert_eq!(left, QUEUE - 1);
        assert_eq!(shown.sum("antiphon_traces_dropped_total{reason=\"queue\"}"), QUEUE as f64);
    }
}
