//! Log lines as log records.

use std::time::{Duration, UNIX_EPOCH};

use metrics::counter;
use opentelemetry::logs::{AnyValue, LogRecord as _, Logger as _, LoggerProvider as _, Severity};
use opentelemetry::{InstrumentationScope, TraceFlags};
use opentelemetry_otlp::{LogExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::logs::{LogBatch, LogExporter as _, SdkLogRecord, SdkLogger, SdkLoggerProvider};
use serde_json::Value;
use tracing::Level;

use super::client::{Client, PATIENCE};
use super::gather::Signal;
use super::{resource, scope};
use crate::telemetry::context;

/// One line as it was written.
#[derive(Clone, Debug)]
pub(in crate::telemetry) struct Line {
    /// Wall clock.
    pub(in crate::telemetry) at: Duration,
    pub(in crate::telemetry) level: Level,
    pub(in crate::telemetry) target: String,
    pub(in crate::telemetry) message: String,
    pub(in crate::telemetry) fields: Vec<(&'static str, Value)>,
}

impl Line {
    /// Whether a line of `target` goes out: what delivers lines writes some itself, which would never end.
    pub(in crate::telemetry) fn wanted(target: &str) -> bool {
        let root = target.split("::").next().unwrap_or_default();
        !["hyper", "hyper_util", "h2", "reqwest", "rustls", "opentelemetry", "opentelemetry_sdk"].contains(&root)
    }
}

#[derive(Debug)]
pub(super) struct Logs {
    exporter: LogExporter,
    /// Makes empty records; nothing else can.
    blank: SdkLogger,
    scope: InstrumentationScope,
}

impl Logs {
    pub(super) fn new(base: &str, client: Client) -> Result<Self, String> {
        let builder = LogExporter::builder().with_http().with_http_client(client).with_timeout(PATIENCE);
        let exporter = builder.with_endpoint(format!("{base}/v1/logs")).build();
        let mut exporter = exporter.map_err(|error| error.to_string())?;
        exporter.set_resource(&resource());
        Ok(Self { exporter, blank: SdkLoggerProvider::builder().build().logger("antiphon"), scope: scope() })
    }

    fn record(&self, line: Line) -> SdkLogRecord {
        let mut record = self.blank.create_log_record();
        let (severity, name) = match line.level {
            Level::ERROR => (Severity::Error, "ERROR"),
            Level::WARN => (Severity::Warn, "WARN"),
            Level::INFO => (Severity::Info, "INFO"),
            Level::DEBUG => (Severity::Debug, "DEBUG"),
            Level::TRACE => (Severity::Trace, "TRACE"),
        };
        let at = UNIX_EPOCH + line.at;
        record.set_timestamp(at);
        record.set_observed_timestamp(at);
        record.set_severity_number(severity);
        record.set_severity_text(name);
        record.set_target(line.target);
        record.set_body(line.message.into());
        // The span of its call; where the call is part of another's trace the attribute still joins them.
        let call = line.fields.iter().find(|(name, _)| *name == "call").and_then(|(_, call)| call.as_str());
        if let Some(call) = call {
            let (trace, span) = (context::trace_id(call, ""), context::span_id(call, "", "call"));
            record.set_trace_context(trace, span, Some(TraceFlags::SAMPLED));
        }
        record.add_attributes(line.fields.into_iter().map(|(name, value)| (name, any(value))));
        record
    }
}

fn any(value: Value) -> AnyValue {
    match value {
        Value::Bool(value) => value.into(),
        Value::Number(number) => match number.as_i64() {
            Some(whole) => whole.into(),
            None => number.as_f64().unwrap_or(f64::NAN).into(),
        },
        Value::String(text) => text.into(),
        other => other.to_string().into(),
    }
}

impl Signal for Logs {
    type Record = Line;
    type Item = SdkLogRecord;
    const NAME: &'static str = "log lines";

    fn take(&mut self, line: Line, items: &mut Vec<SdkLogRecord>) {
        items.push(self.record(line));
    }

    async fn deliver(&self, items: Vec<SdkLogRecord>) -> Result<(), String> {
        let records: Vec<_> = items.iter().map(|record| (record, &self.scope)).collect();
        self.exporter.export(LogBatch::new(&records)).await.map_err(|error| error.to_string())
    }

    fn exported(count: u64) {
        counter!("antiphon_logs_exported_total").increment(count);
    }

    fn dropped(count: u64, reason: &'static str) {
        dropped(count, reason);
    }
}

pub(super) fn dropped(lines: u64, reason: &'static str) {
    counter!("antiphon_logs_dropped_total", "reason" => reason).increment(lines);
}

#[cfg(test)]
mod tests {
    use super::super::{QUEUE, pair};
    use super::*;
    use crate::telemetry::shown::Shown;

    fn line(message: &str) -> Line {
        Line {
            at: Duration::from_secs(1_000),
            level: Level::WARN,
            target: "antiphon::sip".into(),
            message: message.into(),
            fields: vec![("call", "c1".into()), ("count", 3.into()), ("share", 0.5.into()), ("ok", true.into())],
        }
    }

    #[tokio::test]
    async fn a_line_is_a_record_with_the_trace_of_its_call_and_a_dead_collector_is_an_error() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::new().expect("a client");
        let mut logs = Logs::new("http://127.0.0.1:9", client).expect("an exporter");
        let mut records = Vec::new();
        logs.take(line("something is odd"), &mut records);
        let record = &records[0];
        assert_eq!((record.severity_number(), record.severity_text()), (Some(Severity::Warn), Some("WARN")));
        assert_eq!(record.timestamp(), Some(UNIX_EPOCH + Duration::from_secs(1_000)));
        let of_call = record.trace_context().expect("it names a call");
        assert_eq!(of_call.trace_id, context::trace_id("c1", ""));
        let attributes: Vec<_> = record.attributes_iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
        assert_eq!(attributes[1..], [("count", 3i64.into()), ("share", 0.5.into()), ("ok", true.into())]);
        assert!(logs.deliver(records).await.is_err(), "nobody listens there");
    }

    #[test]
    fn lines_that_find_the_queue_full_are_dropped_and_counted() {
        let (shown, (_layer, collector, exporter)) = (Shown::here(), pair("http://127.0.0.1:9"));
        for _ in 0..QUEUE + 3 {
            collector.log(line("something is odd"));
        }
        assert_eq!((exporter.lines.len(), shown.sum("antiphon_logs_dropped_total{reason=\"queue\"}")), (QUEUE, 3.0));
    }

    #[test]
    fn what_delivers_lines_writes_none_that_are_delivered() {
        assert!(Line::wanted("antiphon::call") && Line::wanted("rsipstack"));
        assert!(!Line::wanted("hyper_util::client::legacy") && !Line::wanted("reqwest::connect"));
    }
}
