//! How calls behave, as configured. Durations are milliseconds or seconds as their names say.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::host;

/// The longest window of the speech detector: it remembers 64 frames of 16 ms.
const MAX_ONSET_WINDOW_MS: u64 = 1_024;

/// Settings of all calls.
///
/// Why this struct is large: it is a section of the configuration, one field for each of its keys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CallConfig {
    /// Calls at once; more are refused.
    pub max_calls: usize,
    /// Media threads; 0 is half the cores, but two where there are two.
    pub shards: usize,
    /// A call whose media has not connected by then is ended.
    pub setup_timeout_s: u64,
    /// A call is ended after this long; 0 is never.
    pub max_duration_s: u64,
    /// A call in which nothing is received or said for this long is ended; 0 is never.
    pub max_idle_s: u64,
    /// Bytes of text that may wait in one call.
    pub max_backlog_bytes: usize,
    /// Turns, marks and clips that may wait in one call.
    pub max_backlog_entries: usize,
    /// Seconds of recorded audio (clips, streamed audio) that may wait in one call.
    pub max_clip_s: u64,
    /// Folder from which `play` may read; none: only `data:` sources.
    pub media_dir: Option<PathBuf>,
    /// Recordings of the web that `play` may name.
    pub play: PlayWeb,
    /// Whether what is sent between turns is a quiet noise in place of digital silence.
    pub quiet_bed: bool,
    /// Whether steady noise behind callers is taken out before they are heard.
    pub suppress_noise: bool,
    /// Whether quiet callers are made louder for the speech detector and for recognisers.
    pub agc: bool,
    /// How long a drain takes calls while balancers and registrars are told that none are taken.
    pub drain_notice_s: u64,
    /// How long a drain then lets turns end.
    pub drain_grace_s: u64,
    /// The same for calls that are joined with a human.
    pub drain_bridged_s: u64,
    /// How the caller may interrupt.
    pub barge_in: BargeIn,
    /// When the caller counts as speaking.
    pub vad: crate::media::vad::VadConfig,
    /// How streamed text is cut.
    pub segment: super::segment::SegmentConfig,
}

impl Default for CallConfig {
    fn default() -> Self {
        Self {
            max_calls: 1_000,
            shards: 0,
            setup_timeout_s: 30,
            max_duration_s: 4 * 3_600,
            max_idle_s: 600,
            max_backlog_bytes: 64 * 1_024,
            max_backlog_entries: 256,
            max_clip_s: 300,
            media_dir: None,
            play: PlayWeb::default(),
            quiet_bed: false,
            suppress_noise: false,
            agc: true,
            drain_notice_s: 5,
            drain_grace_s: 30,
            drain_bridged_s: 30,
            barge_in: BargeIn::default(),
            vad: crate::media::vad::VadConfig::default(),
            segment: super::segment::SegmentConfig::default(),
        }
    }
}

impl CallConfig {
    /// Checks what the types cannot say.
    ///
    /// # Errors
    /// The section, the key and what it must be.
    pub fn validate(&self) -> Result<(), String> {
        let vad = &self.vad;
        let wrong = |message: String| Err(format!("[call.vad] {message}"));
        for (name, score) in [("onset_score", vad.onset_score), ("offset_score", vad.offset_score)] {
            if !(0.0..=1.0).contains(&score) {
                return wrong(format!("{name} = {score}: expected 0 to 1"));
            }
        }
        if vad.offset_score > vad.onset_score {
            let (offset, onset) = (vad.offset_score, vad.onset_score);
            return wrong(format!("offset_score = {offset} is above onset_score = {onset}: speech would never begin"));
        }
        let (onset, window) = (vad.onset_ms, vad.onset_window_ms);
        if onset > window {
            return wrong(format!(
                "onset_ms = {onset} does not fit into onset_window_ms = {window}: set onset_window_ms to {onset} or more"
            ));
        }
        if window > MAX_ONSET_WINDOW_MS {
            return wrong(format!("onset_window_ms = {window}: expected at most {MAX_ONSET_WINDOW_MS}"));
        }
        self.play.validate().map_err(|error| format!("[call.play] {error}"))
    }
}

/// What `play` may fetch: nothing where no host is named.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PlayWeb {
    /// `media.example.com`, `*.example.com` (every name below), with `:PORT` where it is not 443; `*`: every host.
    pub hosts: Vec<String>,
    /// Largest file.
    pub max_bytes: usize,
    /// Longest time until it is there.
    pub timeout_s: u64,
    /// Whether these hosts may have addresses of a private network.
    pub allow_private: bool,
}

impl Default for PlayWeb {
    fn default() -> Self {
        Self { hosts: Vec::new(), max_bytes: 16 << 20, timeout_s: 10, allow_private: false }
    }
}

impl PlayWeb {
    /// Whether a host is named.
    pub fn allows(&self, host: &str, port: u16) -> bool {
        self.hosts.iter().any(|entry| {
            let (name, wanted) = split(entry);
            let below = |parent: &str| host.len() > parent.len() + 1 && is_below(host, parent);
            let named = name == "*" || name.strip_prefix("*.").map_or_else(|| name.eq_ignore_ascii_case(host), below);
            named && wanted.unwrap_or(443) == port
        })
    }

    fn validate(&self) -> Result<(), String> {
        for entry in &self.hosts {
            let (name, port) = split(entry);
            let plain = name.strip_prefix("*.").unwrap_or(name);
            let bad_port = port == Some(0) || (port.is_none() && entry.contains(':') && !entry.ends_with(']'));
            if bad_port || (name != "*" && host::split(plain) != Ok((plain, None))) {
                return Err(format!("hosts `{entry}`: expected media.example.com, *.example.com, host:8443 or *"));
            }
        }
        if !(1..=60).contains(&self.timeout_s) {
            return Err(format!("timeout_s = {}: expected 1 to 60", self.timeout_s));
        }
        let largest = crate::voice::decode::MAX_BYTES;
        if !(1..=largest).contains(&self.max_bytes) {
            return Err(format!("max_bytes = {}: expected 1 to {largest}", self.max_bytes));
        }
        Ok(())
    }
}

/// Host and port of an entry; an IPv6 address stands in brackets.
fn split(entry: &str) -> (&str, Option<u16>) {
    match entry.rsplit_once(':') {
        Some((name, port)) if !port.ends_with(']') => match port.parse() {
            Ok(port) => (name, Some(port)),
            Err(_) => (entry, None),
        },
        _ => (entry, None),
    }
}

fn is_below(host: &str, parent: &str) -> bool {
    let (head, tail) = host.split_at(host.len() - parent.len());
    head.ends_with('.') && tail.eq_ignore_ascii_case(parent)
}

/// How a caller may interrupt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BargeIn {
    /// What interrupts, where the turn does not say.
    pub interruptible: Interruptible,
    /// How long the agent may take to confirm or reject; 0: the decision is made here, at once.
    pub grace_ms: u64,
    /// What silence of the agent means after the grace, and that of a recogniser.
    pub confirm_by_default: bool,
    /// Where a recogniser listens: speech pauses until it is known what the caller says. After a cough or "mm-hm" it goes on
    /// where it stopped.
    pub reversible: bool,
}

impl Default for BargeIn {
    fn default() -> Self {
        Self { interruptible: Interruptible::Any, grace_ms: 0, confirm_by_default: true, reversible: true }
    }
}

impl BargeIn {
    /// The grace as a duration.
    pub fn grace(&self) -> Duration {
        Duration::from_millis(self.grace_ms)
    }
}

/// What the caller can do to interrupt a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Interruptible {
    /// Nothing.
    None,
    /// Speak.
    Speech,
    /// Press a key.
    Dtmf,
    /// Either.
    Any,
}

impl Interruptible {
    /// Whether `cause` may interrupt.
    pub fn by(self, cause: super::Cause) -> bool {
        match cause {
            super::Cause::Speech => matches!(self, Self::Speech | Self::Any),
            super::Cause::Dtmf => matches!(self, Self::Dtmf | Self::Any),
            super::Cause::Agent | super::Cause::Preempted => true,
        }
    }
}
