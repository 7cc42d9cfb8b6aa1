//! What a listener would say about what was heard: when it began, when it fell silent, where it stalled.
//!
//! All of it is computed from decoded sound and arrival times ([`Heard`]), never from what the gateway says.
//! A sample is heard at the arrival of its packet (on telephone calls as the kernel notes it) plus its place in the
//! packet: the earliest a listener without any buffer could hear it. Stalls are those of a listener behind a buffer of
//! a given length.

use std::time::{Duration, Instant};

use crate::sound::heard::{Heard, Packet};
use crate::wire::codec::Codec;

/// Sound below this level is silence. Speech is 20 to 30 dB above it; the idle noise of G.711, the comfort noise
/// of a codec and the ringing of a decoder after a loss are below.
pub const AUDIBLE_DBFS: f32 = -46.0;

/// Loudness is judged over this long.
const WINDOW: Duration = Duration::from_millis(5);

/// Quiet shorter than this belongs to the speech around it (closures of plosives last up to about 150 ms).
pub const PAUSE: Duration = Duration::from_millis(200);

/// A stretch of audible sound.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// First audible sample.
    pub from: Instant,
    /// End of the last audible one.
    pub to: Instant,
}

impl Span {
    /// How long it lasts.
    pub fn duration(&self) -> Duration {
        self.to.saturating_duration_since(self.from)
    }
}

/// The first audible sample at or after `after`.
pub fn onset(heard: &Heard, after: Instant) -> Option<Instant> {
    windows(heard, after).find(|w| w.audible).map(|w| w.first.max(after))
}

/// When the packet came that holds what sounds at `at`; `at` where none does.
pub fn packet_at(heard: &Heard, at: Instant) -> Instant {
    // Longer packets are not sent.
    let mut packets = heard.packets_between(at - Duration::from_millis(60), at + Duration::from_nanos(1));
    packets.find(|packet| packet.arrived + heard.duration_of(packet) > at).map_or(at, |packet| packet.arrived)
}

/// The end of the last audible window at or after `after`.
pub fn last_audible(heard: &Heard, after: Instant) -> Option<Instant> {
    windows(heard, after).filter(|w| w.audible).map(|w| w.to).last()
}

/// When sound fell silent after `at` and stayed so for `quiet`: the end of the last audible sample before that
/// quiet, or `at` itself when there was none. `None` when it had not fallen silent by the end of what was heard.
pub fn silent_from(heard: &Heard, at: Instant, quiet: Duration) -> Option<Instant> {
    let mut last = at;
    for window in windows(heard, at).filter(|w| w.audible) {
        if window.from.saturating_duration_since(last) >= quiet {
            return Some(last);
        }
        last = window.to.max(last);
    }
    (heard.until.saturating_duration_since(last) >= quiet).then_some(last)
}

/// Audible stretches that begin within `from..to`; quiet shorter than `pause` does not part them.
pub fn spans(heard: &Heard, from: Instant, to: Instant, pause: Duration) -> Vec<Span> {
    let mut spans: Vec<Span> = Vec::new();
    for window in windows(heard, from).filter(|w| w.audible) {
        match spans.last_mut() {
            Some(span) if window.from.saturating_duration_since(span.to) < pause => span.to = window.to.max(span.to),
            _ if window.from >= to => break,
            _ => spans.push(Span { from: window.first.max(from), to: window.to }),
        }
    }
    spans
}

/// How much sound there is between `from` and `to` as the sender timed it: audible stretches and the short pauses
/// between them, without whatever the network or an underrun put in between.
pub fn speech_time(heard: &Heard, from: Instant, to: Instant) -> Duration {
    let mut packets = heard.packets_between(from, to).peekable();
    let mut total = Duration::ZERO;
    while let Some(packet) = packets.next() {
        // Loss takes sound away from the listener, not from the speech.
        let lost = match packets.peek() {
            Some(next) if next.stream == packet.stream && next.sequence > packet.sequence + 1 => {
                media_between(heard, packet, next).saturating_sub(heard.duration_of(packet))
            }
            _ => Duration::ZERO,
        };
        total += heard.duration_of(packet) + lost;
    }
    total
}

/// Why a listener had nothing to hear.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StallCause {
    /// Packets never came.
    Lost,
    /// A packet came after its time.
    Late,
    /// The sender left time out: its timestamps jump.
    Paused,
}

/// A stretch in which a listener behind a buffer had nothing to play.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stall {
    /// When it began for the listener, buffer included.
    pub at: Instant,
    /// How long it lasted.
    pub length: Duration,
    /// Why.
    pub cause: StallCause,
}

/// The stalls among the packets that arrived within `from..to`, for a listener who plays `buffer` behind the
/// first of them and, after running dry, behind the one that ended it.
pub fn stalls(heard: &Heard, from: Instant, to: Instant, buffer: Duration) -> Vec<Stall> {
    let mut stalls = Vec::new();
    // Where the listener's clock stands: the packet it was set by, and when that one is played.
    let mut play: Option<(&Packet, Instant)> = None;
    for packet in heard.packets_between(from, to) {
        let Some((last, played)) = play.filter(|(last, _)| last.stream == packet.stream) else {
            play = Some((packet, packet.arrived + buffer));
            continue;
        };
        let ends = played + heard.duration_of(last);
        let mut due = played + media_between(heard, last, packet);
        let hole = due.saturating_duration_since(ends);
        if hole > Duration::from_millis(1) {
            let cause = if packet.sequence > last.sequence + 1 { StallCause::Lost } else { StallCause::Paused };
            stalls.push(Stall { at: ends, length: hole, cause });
        }
        if packet.arrived > due {
            stalls.push(Stall { at: due, length: packet.arrived - due, cause: StallCause::Late });
            due = packet.arrived;
        }
        play = Some((packet, due));
    }
    // A pause by timestamps may have been no pause for the ear: what counts is whether time passed, and it did,
    // for `due` moved on. A late packet right after a pause is the same event: join them.
    stalls.dedup_by(|later, earlier| {
        let same = earlier.cause == StallCause::Paused && later.at <= earlier.at + earlier.length + WINDOW;
        if same {
            earlier.length += later.length;
        }
        same
    });
    stalls
}

/// How late each packet within `from..to` was against the most punctual one of its talk spurt: the unevenness
/// of the sender's pacing plus that of the network.
pub fn lateness(heard: &Heard, from: Instant, to: Instant) -> Vec<Duration> {
    let mut out = Vec::new();
    let mut spurt: Vec<(i128, i128)> = Vec::new();
    let mut last: Option<&Packet> = None;
    let close = |spurt: &mut Vec<(i128, i128)>, out: &mut Vec<Duration>| {
        let base = spurt.iter().map(|(arrived, sent)| arrived - sent).min().unwrap_or(0);
        out.extend(
            spurt
                .drain(..)
                .map(|(arrived, sent)| Duration::from_nanos(u64::try_from(arrived - sent - base).unwrap_or(0))),
        );
    };
    for packet in heard.packets_between(from, to) {
        let follows = last.is_some_and(|l| {
            l.stream == packet.stream
                && !packet.marker
                && media_between(heard, l, packet)
                    <= heard.duration_of(l) * (packet.sequence - l.sequence).clamp(1, 50) as u32
        });
        if !follows {
            close(&mut spurt, &mut out);
        }
        let sent = i128::from(packet.timestamp) * 1_000_000_000 / i128::from(heard.codec.clock_rate());
        spurt.push((packet.arrived.saturating_duration_since(from).as_nanos() as i128, sent));
        last = Some(packet);
    }
    close(&mut spurt, &mut out);
    out
}

/// Mean opinion score by the E-model (ITU-T G.107 with the codec figures of G.113 appendix I), from loss as a
/// fraction and one-way mouth-to-ear delay. An estimate of what the network costs, not of the voice.
pub fn mos(codec: Codec, loss: f64, delay: Duration) -> f64 {
    // Equipment impairment and robustness to loss. Opus is not in G.113; its published fits put it near the
    // wide-band codecs, taken here as no impairment of its own and the robustness of concealment with FEC.
    let (ie, bpl) = match codec {
        Codec::Pcmu | Codec::Pcma => (0.0, 25.1),
        Codec::G722 => (0.0, 20.0),
        Codec::Opus => (0.0, 20.0),
    };
    let ms = delay.as_secs_f64() * 1_000.0;
    let delay_impairment = 0.024 * ms + if ms > 177.3 { 0.11 * (ms - 177.3) } else { 0.0 };
    let percent = loss.clamp(0.0, 1.0) * 100.0;
    let effective = ie + (95.0 - ie) * percent / (percent + bpl);
    let r = (93.2 - delay_impairment - effective).clamp(0.0, 100.0);
    // The curve dips below 1 for very small R; no score is less than 1.
    (1.0 + 0.035 * r + r * (r - 60.0) * (100.0 - r) * 7.0e-6).max(1.0)
}

/// Playing time from the start of `a` to the start of `b`, by their timestamps.
fn media_between(heard: &Heard, a: &Packet, b: &Packet) -> Duration {
    let ticks = (b.timestamp - a.timestamp).max(0);
    Duration::from_secs_f64(ticks as f64 / f64::from(heard.codec.clock_rate()))
}

/// One stretch of [`WINDOW`] of one packet.
struct Window {
    from: Instant,
    to: Instant,
    /// First sample over the threshold; `from` when there is none.
    first: Instant,
    audible: bool,
}

/// The windows that end after `after`, in order.
fn windows(heard: &Heard, after: Instant) -> impl Iterator<Item = Window> + '_ {
    let threshold = 32_768.0 * 10f32.powf(AUDIBLE_DBFS / 20.0);
    let size = (heard.rate as usize / 200).max(1);
    let at = |packet: &Packet, n: usize| packet.arrived + Duration::from_secs_f64(n as f64 / f64::from(heard.rate));
    // Packets are in order of sequence and very nearly in order of arrival: start a little early.
    let start = heard.packets.partition_point(|p| p.arrived + Duration::from_millis(250) < after);
    heard.packets.get(start..).unwrap_or_default().iter().flat_map(move |packet| {
        let samples = heard.samples(packet);
        samples.chunks(size).enumerate().filter_map(move |(n, chunk)| {
            let to = at(packet, n * size + chunk.len());
            if to <= after {
                return None;
            }
            let energy = chunk.iter().map(|s| f32::from(*s).powi(2)).sum::<f32>() / chunk.len() as f32;
            let audible = energy > threshold * threshold;
            let offset = chunk.iter().position(|s| f32::from(*s).abs() > threshold).unwrap_or(0);
            Some(Window { from: at(packet, n * size), to, first: at(packet, n * size + offset), audible })
        })
    })
}

#[cfg(test)]
mod tests;
