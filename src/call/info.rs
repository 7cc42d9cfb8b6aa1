//! What a call shows of itself while it runs: counters that its task writes and others read.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::sync::{Notify, broadcast};

use super::bridge::{BridgeMode, Bridging};
use super::handle::CallMeta;
use super::messages::{self, Messages};
use super::settings::CallConfig;
use super::{CallEvent, CallId, EndReason};
use crate::media::leg::{Arrivals, Codec, PeerCause};
use crate::media::quality;

/// Events a slow listener may be behind before it loses the oldest.
pub const EVENTS: usize = 256;

/// Media frames a slow tap may be behind before it loses the oldest: 2.5 s of both directions.
pub const TAP_FRAMES: usize = 250;

/// A snapshot of one call, as `GET /v1/calls/{id}` shows it.
///
/// Why this struct is large: it is the JSON object of a route, one field a figure.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CallInfo {
    /// What was known before it began.
    #[serde(flatten)]
    pub meta: CallMeta,
    /// `sip` or `webrtc`.
    pub leg: &'static str,
    /// The trunk at the other end, of telephone calls by one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trunk: Option<String>,
    /// Codec on the wire.
    pub codec: &'static str,
    /// `connecting`, `connected` or `ended`.
    pub state: &'static str,
    /// Why it ended.
    pub end_reason: Option<EndReason>,
    /// Why the peer ended it, where it said so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer_cause: Option<PeerCause>,
    /// Unix time of its beginning in milliseconds.
    pub started_ms: u64,
    /// How long it has lasted, in milliseconds.
    pub duration_ms: u64,
    /// The gateway is speaking.
    pub speaking: bool,
    /// The caller is speaking.
    pub caller_speaking: bool,
    /// On hold.
    pub held: bool,
    /// Turns accepted.
    pub turns: u64,
    /// Turns cut off by the caller.
    pub interruptions: u64,
    /// Bytes of text that wait.
    pub backlog_bytes: u64,
    /// First audio of the latest turn that did not have to queue, in milliseconds.
    pub first_audio_ms: Option<f64>,
    /// Times that this machine was too busy to send for more than a frame.
    pub stalls: u64,
    /// Gaps the listener heard because speech came too late.
    pub underruns: u64,
    /// How long these were together, in milliseconds.
    pub underrun_ms: u64,
    /// Milliseconds of speech sent.
    pub spoken_ms: u64,
    /// The latest that a packet left after its due time, in milliseconds.
    pub lateness_max_ms: f64,
    /// RTP packets sent.
    pub packets_sent: u64,
    /// RTP packets received.
    pub packets_received: u64,
    /// Packets we sent that the peer reports as lost.
    pub lost: i64,
    /// Share of packets lost in the peer's last report.
    pub fraction_lost: f32,
    /// Round trip in milliseconds, when the peer reports allow it to be computed.
    pub round_trip_ms: Option<f64>,
    /// Interarrival jitter of what we send, as the peer reports it, in milliseconds.
    pub jitter_ms: Option<f64>,
    /// How good what we send can sound to the peer, by loss, delay and jitter of its reports; see [`quality`].
    pub mos: Option<f64>,
    /// Packets of the peer that never came.
    pub received_lost: u64,
    /// Interarrival jitter of what the peer sends, in milliseconds.
    pub received_jitter_ms: Option<f64>,
    /// How good what the peer sends can sound here.
    pub received_mos: Option<f64>,
    /// Frames that slow media taps have lost.
    pub tap_dropped: u64,
    /// The call that it is joined with, if it is.
    pub bridged_with: Option<CallId>,
    /// What its agent does meanwhile.
    pub bridge_mode: Option<BridgeMode>,
}

/// 20 ms of one direction of a call.
#[derive(Clone, Debug, PartialEq)]
pub struct MediaFrame {
    /// Whose voice.
    pub direction: TapDirection,
    /// When it was heard or left, since the call connected.
    pub at: Duration,
    /// Its place in its own stream, by RTP time: exact, and by the sender's clock.
    pub position: Duration,
    /// 160 samples at 8 kHz.
    pub pcm: Arc<[i16]>,
    /// The same as 320 samples at 16 kHz, where a tap asked for that when it was made.
    pub wide: Option<Arc<[i16]>>,
}

/// Whose voice a tap carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TapDirection {
    /// What the caller says.
    Inbound,
    /// What we say.
    Outbound,
}

/// Hears both directions of a call.
#[derive(Debug)]
pub struct MediaTap {
    frames: broadcast::Receiver<MediaFrame>,
    shared: Arc<Shared>,
    wide: bool,
}

impl MediaTap {
    pub(super) fn new(shared: Arc<Shared>, wide: bool) -> Self {
        if wide {
            shared.tap.wide.fetch_add(1, Relaxed);
        }
        Self { frames: shared.tap.subscribe(), shared, wide }
    }

    /// The next frame; `None` when the call is over. Frames missed because the reader was slow are counted in
    /// [`CallInfo::tap_dropped`]. Cancel safe.
    pub async fn recv(&mut self) -> Option<MediaFrame> {
        loop {
            let frame = tokio::select! {
                biased;
                frame = self.frames.recv() => frame,
                _ = self.shared.wait_ended() => return None,
            };
            match frame {
                Ok(frame) => return Some(frame),
                Err(broadcast::error::RecvError::Lagged(missed)) => {
                    self.shared.tap_dropped.fetch_add(missed, Relaxed);
                    metrics::counter!("antiphon_tap_dropped_total").increment(missed);
                }
                Err(broadcast::error::RecvError::Closed) => return None,
            }
        }
    }
}

impl Drop for MediaTap {
    fn drop(&mut self) {
        if self.wide {
            self.shared.tap.wide.fetch_sub(1, Relaxed);
        }
    }
}

/// Where both halves of a call put what listeners hear.
#[derive(Clone, Debug)]
pub(super) struct TapSender {
    frames: broadcast::Sender<MediaFrame>,
    /// Listeners that want 16 kHz.
    wide: Arc<AtomicUsize>,
}

impl TapSender {
    pub(super) fn new() -> Self {
        Self { frames: broadcast::channel(TAP_FRAMES).0, wide: Arc::default() }
    }

    pub(super) fn subscribe(&self) -> broadcast::Receiver<MediaFrame> {
        self.frames.subscribe()
    }

    /// Whether anybody listens.
    pub(super) fn is_heard(&self) -> bool {
        self.frames.receiver_count() > 0
    }

    /// Whether anybody wants 16 kHz.
    pub(super) fn is_wide(&self) -> bool {
        self.wide.load(Relaxed) > 0
    }

    pub(super) fn send(&self, frame: MediaFrame) {
        // overflow: drops the oldest (counted by the tap); without listeners it is not missed
        let _ = self.frames.send(frame);
    }
}

/// Text accepted and not yet spoken, counted by the handles so that refusal needs no answer from the task.
#[derive(Debug)]
pub(super) struct Backlog {
    bytes: AtomicUsize,
    limit: usize,
}

impl Backlog {
    pub(super) fn new(limit: usize) -> Self {
        Self { bytes: AtomicUsize::new(0), limit }
    }

    pub(super) fn take(&self, bytes: usize) -> bool {
        let fits = |now: usize| now.checked_add(bytes).filter(|sum| *sum <= self.limit);
        self.bytes.fetch_update(Relaxed, Relaxed, fits).is_ok()
    }

    pub(super) fn give_back(&self, bytes: usize) {
        let before = self.bytes.fetch_sub(bytes, Relaxed);
        debug_assert!(before >= bytes, "more text given back than taken");
    }

    pub(super) fn used(&self) -> usize {
        self.bytes.load(Relaxed)
    }

    pub(super) fn limit(&self) -> usize {
        self.limit
    }
}

/// Counters of one call. Written by its task only.
///
/// Why this struct is large: each is a figure of [`CallInfo`] that is read while the task writes; they have no
/// invariant between them.
#[derive(Debug, Default)]
pub(super) struct Stats {
    pub(super) connected: AtomicBool,
    pub(super) speaking: AtomicBool,
    pub(super) caller_speaking: AtomicBool,
    pub(super) held: AtomicBool,
    pub(super) codec: AtomicU8,
    pub(super) turns: AtomicU64,
    pub(super) interruptions: AtomicU64,
    pub(super) first_audio_us: AtomicU64,
    pub(super) stalls: AtomicU64,
    pub(super) underruns: AtomicU64,
    pub(super) underrun_us: AtomicU64,
    pub(super) frames_spoken: AtomicU64,
    pub(super) lateness_max_us: AtomicU64,
    pub(super) packets_sent: AtomicU64,
    pub(super) packets_received: AtomicU64,
    pub(super) lost: AtomicU64,
    pub(super) fraction_lost_bits: AtomicU32,
    pub(super) round_trip_us: AtomicU64,
    pub(super) jitter_us: AtomicU64,
    /// The peer has reported, so that what it has lost is known.
    pub(super) reported: AtomicBool,
    pub(super) received_expected: AtomicU64,
    pub(super) received_lost: AtomicU64,
    pub(super) received_jitter_us: AtomicU64,
}

impl Stats {
    /// What arrived of the peer's stream.
    pub(super) fn arrivals(&self, arrivals: Arrivals) {
        self.received_expected.store(u64::from(arrivals.expected), Relaxed);
        self.received_lost.store(u64::from(arrivals.lost()), Relaxed);
        self.received_jitter_us.store(arrivals.jitter.as_micros() as u64, Relaxed);
    }

    /// How long a packet travels: half of the last round trip, where the peer's reports gave one.
    pub(super) fn one_way(&self) -> Option<Duration> {
        let trip = self.round_trip_us.load(Relaxed);
        (trip > 0).then(|| Duration::from_micros(trip / 2))
    }

    /// Scores of what we send and of what the peer sends, where enough is known.
    fn scores(&self) -> (Option<f64>, Option<f64>) {
        let micros = |value: &AtomicU64| Duration::from_micros(value.load(Relaxed));
        // Both ways take half of it: nothing says otherwise.
        let delay = micros(&self.round_trip_us) / 2;
        let share = |lost: f64, of: u64| lost.max(0.0) / (of.max(1) as f64);
        let (sent, expected) = (self.packets_sent.load(Relaxed), self.received_expected.load(Relaxed));
        let lost = self.lost.load(Relaxed) as i64 as f64;
        let out = || quality::mos(share(lost, sent), delay, micros(&self.jitter_us));
        let missed = self.received_lost.load(Relaxed) as f64;
        let inward = || quality::mos(share(missed, expected), delay, micros(&self.received_jitter_us));
        (self.reported.load(Relaxed).then(out), (expected > 0).then(inward))
    }
}

/// The task's ends of what it tells, so that listeners end with the call.
pub(super) struct Tellers {
    pub(super) events: broadcast::Sender<CallEvent>,
    pub(super) deliver: messages::Sender,
}

/// What the task and the handles of one call share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) meta: CallMeta,
    pub(super) config: Arc<CallConfig>,
    pub(super) leg: &'static str,
    pub(super) trunk: OnceLock<Arc<str>>,
    pub(super) started: Instant,
    pub(super) started_wall: Duration,
    pub(super) stats: Stats,
    pub(super) backlog: Backlog,
    /// The task owns the sender, so that listeners end with the call.
    events: broadcast::WeakSender<CallEvent>,
    pub(super) tap: TapSender,
    /// Frames dropped by taps that fell behind, as their readers report it.
    pub(super) tap_dropped: AtomicU64,
    /// Keeps the first events for the first listener. A mutex, because taking it out needs one; it is
    /// locked once a listener and never by the task.
    first_listener: Mutex<Option<broadcast::Receiver<CallEvent>>>,
    /// Text of the peer, until its one reader takes it. Locked once, as above.
    messages: Mutex<Option<Messages>>,
    ending: Ending,
    pub(super) bridging: Bridging,
}

/// How a call ends: asked for by handles, carried out by its task.
#[derive(Debug, Default)]
struct Ending {
    asked: OnceLock<EndReason>,
    wanted: Notify,
    /// What the peer says of why it ends it.
    said: OnceLock<PeerCause>,
    /// Why it ended, and how long it had lasted.
    over: OnceLock<(EndReason, Duration)>,
    ended: Notify,
}

impl Shared {
    pub(super) fn new(
        meta: CallMeta,
        config: Arc<CallConfig>,
        leg: &'static str,
        codec: Codec,
        started: Instant,
        started_wall: Duration,
    ) -> (Self, Tellers) {
        let (events, first) = broadcast::channel(EVENTS);
        let (deliver, messages) = messages::channel();
        let stats = Stats { codec: AtomicU8::new(codec_number(codec)), ..Stats::default() };
        let shared = Self {
            meta,
            leg,
            trunk: OnceLock::new(),
            started,
            started_wall,
            stats,
            backlog: Backlog::new(config.max_backlog_bytes),
            config,
            events: events.downgrade(),
            tap: TapSender::new(),
            tap_dropped: AtomicU64::new(0),
            first_listener: Mutex::new(Some(first)),
            messages: Mutex::new(Some(messages)),
            ending: Ending::default(),
            bridging: Bridging::default(),
        };
        (shared, Tellers { events, deliver })
    }

    /// Text of the peer; `None` when it was taken before.
    pub(super) fn messages(&self) -> Option<Messages> {
        self.messages.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take()
    }

    pub(super) fn events(&self) -> broadcast::Receiver<CallEvent> {
        let first = self.first_listener.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        if let Some(first) = first {
            return first;
        }
        if let Some(events) = self.events.upgrade() {
            return events.subscribe();
        }
        // Over: the end is all there is to hear.
        let (events, late) = broadcast::channel(1);
        let _ = events.send(CallEvent::Ended(self.ended().unwrap_or(EndReason::Failed)));
        late
    }

    pub(super) fn ask_to_end(&self, reason: EndReason) {
        // The first reason stands.
        let _ = self.ending.asked.set(reason);
        self.ending.wanted.notify_one();
    }

    pub(super) fn end_asked(&self) -> Option<EndReason> {
        self.ending.asked.get().copied()
    }

    /// Waits for [`Shared::ask_to_end`]. Cancel safe.
    pub(super) async fn end_wanted(&self) {
        self.ending.wanted.notified().await;
    }

    /// The peer says why it ends the call.
    pub(super) fn set_peer_cause(&self, cause: PeerCause) {
        // There is one only.
        let _ = self.ending.said.set(cause);
    }

    pub(super) fn set_ended(&self, reason: EndReason, after: Duration) {
        let _ = self.ending.over.set((reason, after));
        self.ending.ended.notify_waiters();
    }

    pub(super) fn ended(&self) -> Option<EndReason> {
        self.ending.over.get().map(|(reason, _)| *reason)
    }

    pub(super) async fn wait_ended(&self) -> EndReason {
        loop {
            // Registered before the look, so that an end in between is not missed.
            let notified = self.ending.ended.notified();
            if let Some(reason) = self.ended() {
                return reason;
            }
            notified.await;
        }
    }

    pub(super) fn info(&self) -> CallInfo {
        let stats = &self.stats;
        let ended = self.ending.over.get();
        let duration = ended.map_or_else(|| crate::clock::now() - self.started, |(_, after)| *after);
        let micros = |value: &AtomicU64| Some(value.load(Relaxed)).filter(|us| *us > 0).map(|us| us as f64 / 1_000.0);
        let (mos, received_mos) = stats.scores();
        let (bridged_with, bridge_mode) = self.bridging.with().unzip();
        CallInfo {
            meta: self.meta.clone(),
            leg: self.leg,
            trunk: self.trunk.get().map(ToString::to_string),
            codec: codec_of(stats.codec.load(Relaxed)).map_or("unknown", Codec::label),
            state: match ended {
                Some(_) => "ended",
                None if stats.connected.load(Relaxed) => "connected",
                None => "connecting",
            },
            end_reason: ended.map(|(reason, _)| *reason),
            peer_cause: self.ending.said.get().cloned(),
            started_ms: self.started_wall.as_millis() as u64,
            duration_ms: duration.as_millis() as u64,
            speaking: stats.speaking.load(Relaxed),
            caller_speaking: stats.caller_speaking.load(Relaxed),
            held: stats.held.load(Relaxed),
            turns: stats.turns.load(Relaxed),
            interruptions: stats.interruptions.load(Relaxed),
            backlog_bytes: self.backlog.used() as u64,
            first_audio_ms: micros(&stats.first_audio_us),
            stalls: stats.stalls.load(Relaxed),
            underruns: stats.underruns.load(Relaxed),
            underrun_ms: stats.underrun_us.load(Relaxed) / 1_000,
            spoken_ms: stats.frames_spoken.load(Relaxed) * 20,
            lateness_max_ms: micros(&stats.lateness_max_us).unwrap_or(0.0),
            packets_sent: stats.packets_sent.load(Relaxed),
            packets_received: stats.packets_received.load(Relaxed),
            // Stored as the bits of a signed number: RFC 3550 lets the cumulative loss be negative.
            lost: stats.lost.load(Relaxed) as i64,
            fraction_lost: f32::from_bits(stats.fraction_lost_bits.load(Relaxed)),
            round_trip_ms: micros(&stats.round_trip_us),
            jitter_ms: micros(&stats.jitter_us),
            mos,
            received_lost: stats.received_lost.load(Relaxed),
            received_jitter_ms: micros(&stats.received_jitter_us),
            received_mos,
            tap_dropped: self.tap_dropped.load(Relaxed),
            bridged_with,
            bridge_mode,
        }
    }
}

/// A codec as a number, so that a renegotiated one can be shown without a lock.
pub(super) fn codec_number(codec: Codec) -> u8 {
    match codec {
        Codec::Opus => 0,
        Codec::G722 => 1,
        Codec::Pcmu => 2,
        Codec::Pcma => 3,
    }
}

/// The codec of a number; `None`: no codec has it.
fn codec_of(number: u8) -> Option<Codec> {
    Codec::ALL.into_iter().find(|codec| codec_number(*codec) == number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::machine::fixture;
    use crate::clock;
    use crate::media::leg::MediaFormat;
    use crate::telemetry::shown::Shown;

    #[tokio::test]
    async fn a_reader_of_a_calls_sound_that_falls_behind_misses_the_oldest_and_is_told_how_much() {
        let shown = Shown::here();
        let (_machine, handle, _inbox) = fixture::machine(clock::now(), &MediaFormat::plain(Codec::Pcmu));
        let mut tap = MediaTap::new(handle.shared.clone(), false);
        let length = Duration::from_millis(20);
        for n in 0..2 * TAP_FRAMES as u32 {
            let (direction, pcm) = (TapDirection::Inbound, Arc::from([0; 160]));
            handle.shared.tap.send(MediaFrame { direction, at: length * n, position: length * n, pcm, wide: None });
        }
        let missed = tap.recv().await.expect("the call goes on").at.as_millis() as u64 / 20;
        assert!(missed >= TAP_FRAMES as u64 / 2, "{missed}");
        assert_eq!((handle.info().tap_dropped, shown.sum("antiphon_tap_dropped_total")), (missed, missed as f64));
    }
}
