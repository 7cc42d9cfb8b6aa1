//! Traces, logs and metrics for an OpenTelemetry collector: OTLP over HTTP in protobuf, by the crates of the OpenTelemetry
//! project and our own HTTP client.
//!
//! A call is one trace: the call itself and its turns; of each turn the way from its text to its first RTP packet, in that the
//! wait for the engine, the synthesis with its stages, and the way of the first PCM to the wire. A turn whose text came with a
//! context ([`super::context`]) belongs to that instead. The parts that take part say so with `tracing` events of the target
//! [`TARGET`]; [`Layer`] picks those up. Log lines go out as they are written (cut, redacted, throttled: `lines.rs`), with the
//! trace of their call. Metrics are what `/metrics` shows, every [`metrics::PERIOD`], with exemplars.
//!
//! Contract: nothing here ever waits on a call's behalf. What finds a queue full, or cannot be delivered, is dropped and
//! counted in `antiphon_traces_dropped_total` and `antiphon_logs_dropped_total`. Only the configuration says where the collector
//! is; of the project's environment variables those for headers (`OTEL_EXPORTER_OTLP_HEADERS`: tokens) count for traces and logs.
//!
//! # Why
//! *Events with ages* rather than `tracing` spans (and so no `tracing-opentelemetry`): a turn lives in three threads that know
//! nothing of each other's spans, and a span entered and left for every frame would cost the media threads what an event a turn
//! does not. Ages in microseconds survive the way from the monotonic clock to the collector's wall clock.
//!
//! *Exporters of the crates, queues of our own*: the SDK's batch processors have a thread each and drop without saying so; what
//! is lost here is counted. Spans and log records are the SDK's, so encoding, retries and `Retry-After` are its own, too.
//!
//! *Metrics by their message types, not by the SDK's instruments*: what the SDK exports can be made by its own instruments
//! only, and a second set of these beside those of `/metrics` would record every packet twice (50 a second and call into the
//! histogram of pacing alone). So one registry, rendered once a period: 600 samples in 4 to 17 ms, by an unoptimised build on a busy
//! machine, on a thread that may block.
//!
//! *Weight*: with default features off the crates add eight to the tree (the project's five, `prost`, `prost-derive`,
//! `anyhow`), no second HTTP stack and no gRPC.

mod client;
mod gather;
mod logs;
mod metrics;
mod traces;

use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_sdk::Resource;
use tokio::sync::{mpsc, watch};

use self::client::Client;
pub(super) use self::logs::Line;
use self::logs::Logs;
pub use self::traces::Layer;
use self::traces::{Record, Spans};
use crate::clock;

/// The target of events that are spans in the making. Fields: `kind` (`stage`, `first`, `answer`, `turn`, `call`, or `parent` of
/// a call), names, and ages in microseconds (`*_us`).
pub const TARGET: &str = "antiphon::spans";

/// Records that may wait for the exporter, of traces and of logs.
const QUEUE: usize = 4_096;

/// Where log lines go on their way to the collector.
#[derive(Clone)]
pub struct Collector {
    lines: mpsc::Sender<Line>,
}

impl Collector {
    pub(super) fn log(&self, line: Line) {
        // overflow: drops (counted)
        if self.lines.try_send(line).is_err() {
            logs::dropped(1, "queue");
        }
    }
}

/// Makes spans, log records and metrics of what is told, and delivers them.
pub struct Exporter {
    base: String,
    spans: mpsc::Receiver<Record>,
    lines: mpsc::Receiver<Line>,
    /// Unix time in nanoseconds: since when counters count.
    began: u64,
}

/// What picks up traces and log lines, and the exporter that both feed. `endpoint` is the collector's base address
/// (`http://host:4318`); the paths of the signals are added.
pub fn pair(endpoint: &str) -> (Layer, Collector, Exporter) {
    let base = endpoint.trim_end_matches('/');
    let base = base.strip_suffix("/v1/traces").unwrap_or(base).to_owned();
    // overflow: drops (counted), both
    let (records, spans) = mpsc::channel(QUEUE);
    let (sender, lines) = mpsc::channel(QUEUE);
    let began = clock::wall().as_nanos() as u64;
    (Layer::new(records), Collector { lines: sender }, Exporter { base, spans, lines, began })
}

impl Exporter {
    /// Delivers until `stop` completes, and then what is left; bounded in time.
    pub async fn run(self, stop: impl Future<Output = ()>) {
        let client = match Client::new() {
            Ok(client) => client,
            Err(error) => return tracing::error!(%error, "[log] otlp: no HTTP client; the collector gets nothing"),
        };
        let built = Spans::new(&self.base, client.clone())
            .and_then(|spans| Ok((spans, Logs::new(&self.base, client.clone())?)));
        let (spans, logs) = match built {
            Ok(built) => built,
            Err(reason) => return tracing::error!(reason, "[log] otlp: the collector gets nothing"),
        };
        let (end, ended) = watch::channel(false);
        let metrics = metrics::export(client, format!("{}/v1/metrics", self.base), self.began, ended.clone());
        let stopping = async {
            stop.await;
            end.send_replace(true);
        };
        tokio::join!(
            gather::gather(spans, self.spans, ended.clone()),
            gather::gather(logs, self.lines, ended),
            metrics,
            stopping
        );
    }
}

/// Who tells.
fn resource() -> Resource {
    Resource::builder_empty()
        .with_service_name("antiphon")
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
        .build()
}

fn scope() -> InstrumentationScope {
    InstrumentationScope::builder("antiphon").with_version(env!("CARGO_PKG_VERSION")).build()
}
