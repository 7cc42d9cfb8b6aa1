//! What operators see: logs, metrics and traces.

pub mod context;
mod exemplars;
mod exposition;
pub mod gpu;
mod lines;
pub mod metrics;
pub mod otlp;
#[cfg(test)]
pub(crate) mod shown;

use std::sync::OnceLock;

use serde::Deserialize;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _, Registry, reload};

use self::lines::Lines;
use crate::host;

/// `[log]`
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// `text` for people, `json` for machines.
    pub format: LogFormat,
    /// `error`, `warn`, `info`, `debug`, `trace`, or directives such as `info,antiphon::sip=debug`.
    pub level: String,
    /// Base address of an OpenTelemetry collector (OTLP over HTTP, `http://host:4318`) that gets traces of calls and
    /// turns, these log lines, and the metrics; absent: none.
    pub otlp: Option<String>,
    /// Leaves telephone numbers, and what callers and agents say, out of log lines.
    pub redact: bool,
}

impl Default for Log {
    fn default() -> Self {
        Self { format: LogFormat::Text, level: "info".into(), otlp: None, redact: true }
    }
}

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// One readable line an event.
    #[default]
    Text,
    /// One JSON object an event.
    Json,
}

impl Log {
    /// Checks what the types cannot say.
    ///
    /// # Errors
    /// The key and what it must be.
    pub fn validate(&self) -> Result<(), String> {
        filter(&self.level)?;
        if let Some(collector) = &self.otlp {
            host::url(collector, &["http", "https"])
                .map_err(|error| format!("otlp: the collector's address {error}"))?;
        }
        Ok(())
    }
}

fn filter(level: &str) -> Result<EnvFilter, String> {
    // The WebRTC stack warns of what is normal before a session is up; its errors still show. The SIP stack
    // writes whole messages, credentials included, at `info`. Spans in the making are no log lines. What the
    // operator writes comes later and so overrides this.
    let quiet = "rsipstack=warn,rtc=error,rtc_dtls=error,rtc_ice=error,rtc_srtp=error,rtc_sctp=error,webrtc=error,\
        antiphon::spans=off";
    EnvFilter::try_new(format!("{quiet},{level}")).map_err(|e| format!("level `{level}`: {e}"))
}

/// Starts logging to standard error and, where one is configured, to a collector, which gets traces and metrics, too, while the
/// exporter runs.
/// Later calls do nothing, so that tests may call it too.
///
/// # Errors
/// `level` is no valid filter.
pub fn init(log: &Log) -> Result<Option<otlp::Exporter>, String> {
    let filter = filter(&log.level).map_err(|e| format!("[log] {e}"))?;
    let (mut spans, mut collector, mut exporter) = (None, None, None);
    if let Some(endpoint) = log.otlp.as_deref() {
        let (layer, lines, made) = otlp::pair(endpoint);
        (spans, collector, exporter) = (Some(layer), Some(lines), Some(made));
    }
    let spans = spans.map(|layer| layer.with_filter(Targets::new().with_target(otlp::TARGET, LevelFilter::TRACE)));
    let (filter, level) = reload::Layer::new(filter);
    let lines = Lines::new(log.format, log.redact).beside(collector).with_filter(filter);
    // An error means that a subscriber is there already.
    if tracing_subscriber::registry().with(lines).with(spans).try_init().is_ok() {
        let _ = LEVEL.set(level);
    }
    Ok(exporter)
}

/// What [`set_level`] changes.
static LEVEL: OnceLock<reload::Handle<EnvFilter, Registry>> = OnceLock::new();

/// Logs at another level from now on. Does nothing where `level` is no filter, or logging was not started here.
pub fn set_level(level: &str) {
    if let (Some(handle), Ok(filter)) = (LEVEL.get(), filter(level)) {
        // An error means that the subscriber is gone.
        let _ = handle.reload(filter);
    }
}
