//! Egress pacing: many calls that all speak, over real sockets, with an engine that costs nothing. Shows how
//! punctually packets leave and what a call costs apart from its synthesis.
//!
//! The calls are those of the gateway: registry, shards, tasks, codecs, playout. Only the leg is smaller than a
//! SIP leg (RTP or SRTP on a socket of its own) and the engine plays canned speech, at most two seconds ahead of
//! the listener, as a scheduler would. CPU time is that of the media threads, by the kernel's account.

mod canned;
mod leg;

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::Serialize;

use self::canned::Canned;
use self::leg::{Sink, Traffic, UdpLeg};
use super::handle::TurnRequest;
use super::{BargeIn, CallConfig, CallId, CallMeta, Calls, Direction, EndReason, Interruptible};
use crate::clock;
use crate::media::leg::Codec;

/// How to measure.
#[derive(Clone, Debug)]
pub struct EgressPacing {
    /// Calls that speak at the same time.
    pub calls: usize,
    /// How long each codec is measured.
    pub time: Duration,
    /// Media threads; 0 as the gateway chooses.
    pub shards: usize,
}

impl Default for EgressPacing {
    fn default() -> Self {
        Self { calls: 200, time: Duration::from_secs(10), shards: 0 }
    }
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// One row a kind of call.
    pub rows: Vec<Row>,
    /// Cores of the machine.
    pub cores: usize,
}

/// One kind of call.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Row {
    /// Codec on the wire.
    pub codec: &'static str,
    /// Whether the callers send, too, and are listened to for barge-in.
    pub duplex: bool,
    /// Whether both directions are SRTP (`AES_CM_128_HMAC_SHA1_80`).
    pub srtp: bool,
    /// Calls that spoke.
    pub calls: usize,
    /// Packets that left in the measured time.
    pub packets: usize,
    /// Packets that arrived at the far end, of all that left.
    pub delivered: f64,
    /// How long after their due time packets were handed to the socket, in milliseconds.
    pub late_p50_ms: f64,
    /// As above.
    pub late_p99_ms: f64,
    /// As above.
    pub late_max_ms: f64,
    /// Times that the machine was too busy to send for more than a frame, of all packets.
    pub stalls: u64,
    /// Gaps heard because speech came too late.
    pub underruns: u64,
    /// Share of one core per call, in percent, by the CPU time of the media threads.
    pub cpu_percent_per_call: f64,
}

/// What rustpbx publishes for a call, as shares of one core in percent: relayed, and with Opus transcoded.
const PUBLISHED: [(&str, f64); 2] = [("rustpbx, relayed", 0.14), ("rustpbx, Opus", 0.42)];

/// Why nothing could be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// The operating system refuses.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// A call could not be started.
    #[error("a call could not be started: {0}")]
    Start(#[from] super::StartError),
    /// A call could not speak.
    #[error("a call could not speak: {0}")]
    Speak(#[from] super::SpeakError),
}

impl EgressPacing {
    /// Measures G.711 and Opus calls: speaking only, with callers who send, and with SRTP both ways. Blocks for about six times
    /// the configured time; call it outside any runtime.
    ///
    /// # Errors
    /// Sockets or threads are refused.
    pub fn run(&self) -> Result<Report, BenchError> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let mut rows = Vec::new();
        for codec in [Codec::Pcmu, Codec::Opus] {
            for (duplex, srtp) in [(false, false), (true, false), (true, true)] {
                rows.push(runtime.block_on(self.measure(codec, duplex, srtp))?);
            }
        }
        Ok(Report { rows, cores: std::thread::available_parallelism().map_or(1, |cores| cores.get()) })
    }

    async fn measure(&self, codec: Codec, duplex: bool, srtp: bool) -> Result<Row, BenchError> {
        let engine = Arc::new(Canned::start()?);
        // Callers who speak are heard, but must not stop what is measured.
        let barge_in = BargeIn { interruptible: Interruptible::None, ..BargeIn::default() };
        let config = CallConfig { shards: self.shards, max_calls: self.calls, barge_in, ..CallConfig::default() };
        let calls = Calls::new(config, engine.clone())?;
        let sink = Sink::start()?;
        let lateness = Arc::new(Mutex::new(Vec::new()));
        let mut handles = Vec::new();
        let mut callers = Vec::new();
        for n in 0..self.calls {
            let leg = UdpLeg::new(codec, srtp, sink.address(), lateness.clone())?;
            callers.push(leg.address());
            let handle = calls.start(meta(n), leg)?;
            // More than is measured, so that no call falls silent before the end.
            let sentences = self.time.as_secs() as usize + SETTLE.as_secs() as usize + 10;
            let text = format!("This is said on call {n}. ").repeat(sentences);
            handle.speak(TurnRequest::new(text)).await?;
            handles.push(handle);
            // Callers come at any time: the frames of the calls must not fall together.
            tokio::time::sleep(Duration::from_micros(1_370)).await;
        }
        let traffic = if duplex { Some(Traffic::start(codec, srtp, callers)?) } else { None };
        tokio::time::sleep(SETTLE).await;
        let begun = clock::now();
        let sent = || handles.iter().map(|handle| handle.info().packets_sent).sum::<u64>();
        let (cpu_before, sent_before) = (media_cpu()?, sent());
        tokio::time::sleep(self.time).await;
        let (cpu, packets) = (media_cpu()? - cpu_before, sent() - sent_before);
        let took = clock::now() - begun;
        let stalls = handles.iter().map(|handle| handle.info().stalls).sum();
        let underruns = handles.iter().map(|handle| handle.info().underruns).sum();
        for handle in &handles {
            handle.hang_up(EndReason::HungUp);
        }
        calls.drain(Duration::from_secs(5)).await;
        drop(traffic);
        let all = sent();
        let arrived = sink.stop();
        tokio::task::block_in_place(|| calls.shutdown());
        let mut late = std::mem::take(&mut *lateness.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
        late.sort_unstable();
        let at = |share: f64| {
            let place = (late.len().saturating_sub(1) as f64 * share) as usize;
            late.get(place).map_or(0.0, |us| f64::from(*us) / 1_000.0)
        };
        Ok(Row {
            codec: codec.label(),
            duplex,
            srtp,
            calls: self.calls,
            packets: packets as usize,
            delivered: arrived as f64 / all.max(1) as f64,
            late_p50_ms: at(0.5),
            late_p99_ms: at(0.99),
            late_max_ms: at(1.0),
            stalls,
            underruns,
            cpu_percent_per_call: cpu.as_secs_f64() / took.as_secs_f64() / self.calls.max(1) as f64 * 100.0,
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "codec  callers send  SRTP  calls  packets  delivered  late p50/p99/max ms   stalls  underruns  % core per call"
        )?;
        for row in &self.rows {
            writeln!(
                f,
                "{:<6} {:<13} {:<5} {:>5} {:>8} {:>9.2}%  {:>6.2} {:>6.2} {:>6.2}  {:>7}  {:>9}  {:>15.3}",
                row.codec,
                if row.duplex { "yes" } else { "no" },
                if row.srtp { "yes" } else { "no" },
                row.calls,
                row.packets,
                row.delivered * 100.0,
                row.late_p50_ms,
                row.late_p99_ms,
                row.late_max_ms,
                row.stalls,
                row.underruns,
                row.cpu_percent_per_call
            )?;
        }
        for (name, percent) in PUBLISHED {
            writeln!(f, "published: {name:<20} {percent:>77.2}")?;
        }
        write!(f, "{} cores", self.cores)
    }
}

/// How long calls speak before anything is counted.
const SETTLE: Duration = Duration::from_secs(1);

fn meta(n: usize) -> CallMeta {
    CallMeta {
        id: CallId::random(),
        direction: Direction::Inbound,
        from: format!("sip:{n}@bench.invalid"),
        to: "sip:bench@bench.invalid".into(),
        agent: "bench".into(),
        headers: Default::default(),
        tenant: "".into(),
        trace: None,
    }
}

/// CPU time of the media threads so far.
fn media_cpu() -> std::io::Result<Duration> {
    let mut total = Duration::ZERO;
    for task in std::fs::read_dir("/proc/self/task")? {
        let path = task?.path();
        // A thread may end between the two reads.
        let name = std::fs::read_to_string(path.join("comm")).unwrap_or_default();
        if name.starts_with("media-") {
            total += clock::cpu_of(&path).unwrap_or_default();
        }
    }
    Ok(total)
}
