//! What operators see: logs and metrics.

pub mod metrics;

use serde::Deserialize;
use tracing_subscriber::EnvFilter;

/// `[log]`
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// `text` for people, `json` for machines.
    pub format: LogFormat,
    /// `error`, `warn`, `info`, `debug`, `trace`, or directives such as `info,antiphon::sip=debug`.
    pub level: String,
}

impl Default for Log {
    fn default() -> Self {
        Self { format: LogFormat::Text, level: "info".into() }
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

/// Starts logging to standard error. Later calls do nothing, so that tests may call it too.
///
/// # Errors
/// `level` is no valid filter.
pub fn init(log: &Log) -> Result<(), String> {
    // The WebRTC stack warns of what is normal before a session is up; its errors still show. The SIP stack
    // writes whole messages, credentials included, at `info`. What the operator writes comes later and so
    // overrides this.
    let quiet = "rsipstack=warn,rtc=error,rtc_dtls=error,rtc_ice=error,rtc_srtp=error,rtc_sctp=error,webrtc=error";
    let filter = EnvFilter::try_new(format!("{quiet},{}", log.level))
        .map_err(|e| format!("[log] level `{}`: {e}", log.level))?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // An error means that a subscriber is there already.
    let _ = match log.format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    Ok(())
}
