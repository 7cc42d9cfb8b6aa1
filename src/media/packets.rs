//! Packets that are longer or shorter than the 20 ms in which speech is made (RFC 4566 section 6, `ptime`).
//!
//! A state machine over `now`: frames of 20 ms in, packets of 10 to 60 ms out, each with the instant at which it leaves.
//! Owns the sequence numbers on the wire. Never encodes: a codec of one octet a tick (G.711, G.722) can be cut anywhere, and
//! frames of Opus are put into one packet (RFC 6716 section 3.2.5): those of 20 ms for 40 and 60, those of 10 ms, which the encoder
//! then makes and gives in pairs, for 10 and 30.
//!
//! # Why
//! *The pacing of speech stays as it is*, in frames of 20 ms: what is heard, cut off and acknowledged is counted there. Here
//! the peer's wish is met, and its reports are translated back.
//!
//! *A packet leaves when its place in the stream is due*: 20 ms cut into halves would otherwise leave as pairs, and packets
//! of 30 ms at intervals of 20 and 40.
//!
//! *The end of what is said waits for no more*: browsers are sent nothing in silence, so what has begun a packet leaves short when
//! the rest should have come.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use bytes::{BufMut, Bytes, BytesMut};

use super::leg::{Codec, OutPacket};
use crate::audio::FRAME;

/// Octets, and RTP ticks, of 10 ms.
const TEN: usize = 80;
/// Packets whose numbers are remembered: reports come every five seconds.
const LOG: usize = 2_048;
/// What waits for the rest of its packet so long was cut off by a hold, and is not sent behind it.
const STALE: Duration = Duration::from_millis(200);

/// RTP ticks of 10 ms of Opus.
const OPUS_TEN: u32 = 480;

/// What packets are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Length {
    /// So many times 10 ms, of a codec of one octet a tick.
    Tens(usize),
    /// So many Opus frames of 20 ms.
    Frames(usize),
    /// So many Opus frames of 10 ms.
    ShortFrames(usize),
}

/// What a packet of `ms` is made of; `None`: of as much as a frame has.
pub(super) fn length(codec: Codec, ms: u16) -> Option<Length> {
    let tens = usize::from(ms / 10).clamp(1, 6);
    match codec {
        _ if tens == 2 => None,
        Codec::Opus if short_frames(codec, ms) => Some(Length::ShortFrames(tens)),
        Codec::Opus => Some(Length::Frames(tens / 2)),
        Codec::G722 | Codec::Pcmu | Codec::Pcma => Some(Length::Tens(tens)),
    }
}

/// Whether packets of `ms` need Opus in frames of 10 ms.
pub(crate) fn short_frames(codec: Codec, ms: u16) -> bool {
    codec == Codec::Opus && (ms / 10) % 2 == 1
}

impl Length {
    fn duration(self) -> Duration {
        let tens = match self {
            Length::Tens(tens) | Length::ShortFrames(tens) => tens,
            Length::Frames(count) => 2 * count,
        };
        Duration::from_millis(10) * tens as u32
    }
}

/// The packets of one stream.
#[derive(Debug)]
pub(super) struct Packets {
    /// `None`: what a frame holds.
    length: Option<Length>,
    /// Sequence number of the next packet.
    next: Option<u16>,
    /// Timestamp that follows what came last.
    expected: Option<u32>,
    pending: Option<Pending>,
    /// When the first packet since the last hole left, and its timestamp.
    run: Option<(Instant, u32)>,
    ready: VecDeque<(Instant, OutPacket)>,
    /// Numbers of packets, and of the last frame that was whole with each.
    log: VecDeque<(u16, u16)>,
    acknowledged: u16,
}

/// The beginning of a packet.
#[derive(Debug)]
struct Pending {
    packet: OutPacket,
    bytes: BytesMut,
    /// Of Opus.
    frames: Vec<Bytes>,
    since: Instant,
}

impl Packets {
    pub(super) fn new(length: Option<Length>) -> Packets {
        Packets {
            length,
            next: None,
            expected: None,
            pending: None,
            run: None,
            ready: VecDeque::new(),
            log: VecDeque::new(),
            acknowledged: 0,
        }
    }

    /// Another length from now on.
    pub(super) fn set(&mut self, now: Instant, length: Option<Length>) {
        self.end_run(now);
        self.length = length;
    }

    /// Takes a frame; `audio`: it is of the codec, and no telephone event.
    pub(super) fn push(&mut self, now: Instant, frame: OutPacket, audio: bool) {
        if self.next.is_none() {
            self.next = Some(frame.sequence);
            self.acknowledged = frame.sequence.wrapping_sub(1);
        }
        let length = match self.length.filter(|_| audio) {
            Some(Length::Tens(tens)) => tens * TEN,
            Some(Length::Frames(count)) => return self.push_opus(now, frame, count, false),
            Some(Length::ShortFrames(count)) => return self.push_opus(now, frame, count, true),
            None => {
                self.end_run(now);
                let number = frame.sequence;
                return self.leave(now, frame, number);
            }
        };
        if frame.marker || self.expected != Some(frame.timestamp) {
            self.end_run(now);
        }
        self.expected = Some(frame.timestamp.wrapping_add(frame.payload.len() as u32));
        let pending = self.pending.get_or_insert_with(|| Pending {
            packet: OutPacket { payload: Bytes::new(), ..frame.clone() },
            bytes: BytesMut::with_capacity(length + 2 * TEN),
            frames: Vec::new(),
            since: now,
        });
        pending.bytes.extend_from_slice(&frame.payload);
        let mut out = Vec::new();
        while pending.bytes.len() >= length {
            let payload = pending.bytes.split_to(length).freeze();
            // The frame of what is left is not whole yet.
            let whole = if pending.bytes.is_empty() { frame.sequence } else { frame.sequence.wrapping_sub(1) };
            out.push((OutPacket { payload, ..pending.packet.clone() }, whole));
            pending.packet.marker = false;
            pending.packet.timestamp = pending.packet.timestamp.wrapping_add(length as u32);
            pending.since = now;
        }
        pending.packet.sequence = frame.sequence;
        if pending.bytes.is_empty() {
            self.pending = None;
        }
        for (packet, whole) in out {
            let (begun, from) = *self.run.get_or_insert((now, packet.timestamp));
            let ticks = u64::from(packet.timestamp.wrapping_sub(from));
            let due = begun + Duration::from_millis(10) * u32::try_from(ticks / TEN as u64).unwrap_or(0);
            self.leave(due.max(now), packet, whole);
        }
    }

    /// Takes 20 ms of Opus: a frame, or, where they are `short`, two, `count` of which make a packet. It leaves when its last frame
    /// is due, the second of two 10 ms after the first.
    fn push_opus(&mut self, now: Instant, packet: OutPacket, count: usize, short: bool) {
        let number = packet.sequence;
        let split = if short { halves(&packet.payload) } else { None };
        let single = packet.payload.first().is_some_and(|toc| toc & 3 == 0);
        if packet.marker || self.expected != Some(packet.timestamp) {
            self.end_run(now);
        }
        self.expected = Some(packet.timestamp.wrapping_add(2 * OPUS_TEN));
        match split {
            Some([first, second]) => {
                let later = OutPacket {
                    marker: false,
                    timestamp: packet.timestamp.wrapping_add(OPUS_TEN),
                    payload: second,
                    ..packet.clone()
                };
                // The frame of the first is not whole yet.
                self.push_frame(now, now, OutPacket { payload: first, ..packet }, number.wrapping_sub(1), count);
                self.push_frame(now, now + FRAME / 2, later, number, count);
            }
            None if single && !short => self.push_frame(now, now, packet, number, count),
            // Alone: silence of no length, or what is a packet already and cannot be taken apart.
            None => {
                self.hasten(now);
                self.leave(now, packet, number);
            }
        }
    }

    /// Takes one Opus frame, which is due at `due`, as a packet of its own; `whole` is the last frame of 20 ms that is whole with it.
    fn push_frame(&mut self, now: Instant, due: Instant, frame: OutPacket, whole: u16, count: usize) {
        let toc = |payload: &Bytes| payload.first().copied();
        let waiting = self.pending.as_ref().and_then(|pending| pending.frames.first());
        // Frames of several modes do not go into one packet.
        if waiting.is_some_and(|first| toc(first) != toc(&frame.payload)) {
            self.hasten(now);
        }
        let pending = self.pending.get_or_insert_with(|| Pending {
            packet: OutPacket { payload: Bytes::new(), ..frame.clone() },
            bytes: BytesMut::new(),
            frames: Vec::with_capacity(count),
            since: now,
        });
        pending.packet.sequence = whole;
        pending.frames.push(frame.payload);
        if pending.frames.len() >= count
            && let Some(Pending { packet, frames, .. }) = self.pending.take()
        {
            self.leave(due, OutPacket { payload: joined(&frames), ..packet }, whole);
        }
    }

    /// The packet that leaves now, if one is due.
    pub(super) fn poll(&mut self, now: Instant) -> Option<OutPacket> {
        if self.patience().is_some_and(|until| until <= now) {
            self.hasten(now);
        }
        self.ready.pop_front_if(|(due, _)| *due <= now).map(|(_, packet)| packet)
    }

    /// When to poll again.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.ready.front().map(|(due, _)| *due).into_iter().chain(self.patience()).min()
    }

    /// Until when what has begun a packet waits for the rest of it: as long as that takes, and two frames,
    /// by which what leaves may be late.
    fn patience(&self) -> Option<Instant> {
        Some(self.pending.as_ref()?.since + self.length?.duration() + FRAME * 2)
    }

    /// The last frame that the peer has, as its report on packets up to `highest` shows.
    pub(super) fn acknowledged(&mut self, highest: u32) -> u32 {
        // The rounds of a peer's count are its own.
        let highest = highest as u16;
        if self.log.iter().any(|(number, _)| *number == highest) {
            while let Some((number, frame)) = self.log.pop_front() {
                self.acknowledged = frame;
                if number == highest {
                    break;
                }
            }
        }
        u32::from(self.acknowledged)
    }

    /// What follows is no continuation.
    fn end_run(&mut self, now: Instant) {
        self.hasten(now);
        self.expected = None;
    }

    /// What waits leaves now, short as it is.
    fn hasten(&mut self, now: Instant) {
        self.run = None;
        self.ready.iter_mut().for_each(|(due, _)| *due = now);
        let Some(Pending { packet, bytes, frames, since }) = self.pending.take() else { return };
        if now.saturating_duration_since(since) < STALE {
            let number = packet.sequence;
            let payload = if frames.is_empty() { bytes.freeze() } else { joined(&frames) };
            self.leave(now, OutPacket { payload, ..packet }, number);
        }
    }

    fn leave(&mut self, due: Instant, packet: OutPacket, frame: u16) {
        let sequence = self.next.unwrap_or(packet.sequence);
        self.next = Some(sequence.wrapping_add(1));
        if self.log.len() == LOG {
            self.log.pop_front();
        }
        self.log.push_back((sequence, frame));
        self.ready.push_back((due, OutPacket { sequence, ..packet }));
    }
}

/// The two packets of one that has two frames of lengths of their own (code 2, RFC 6716 section 3.2.4).
fn halves(payload: &Bytes) -> Option<[Bytes; 2]> {
    let (toc, low) = (*payload.first()?, usize::from(*payload.get(1)?));
    let (length, start) = match low {
        252.. => (low + 4 * usize::from(*payload.get(2)?), 3),
        _ => (low, 2),
    };
    let first = payload.get(start..start + length).filter(|_| toc & 3 == 2)?;
    let alone = |frame: &[u8]| Bytes::from([&[toc & !3], frame].concat());
    Some([alone(first), alone(&payload[start + length..])])
}

/// One packet of Opus frames with the same first octet, each a packet of one frame: code 3 with lengths of their own
/// (RFC 6716 section 3.2.5), at most 255 octets of 20 ms at 102 kb/s and more where need be.
fn joined(frames: &[Bytes]) -> Bytes {
    let (Some(first), true) = (frames.first(), frames.len() > 1) else {
        return frames.first().cloned().unwrap_or_default();
    };
    let mut out = BytesMut::with_capacity(frames.iter().map(|frame| frame.len() + 2).sum::<usize>() + 2);
    out.put_u8(first.first().copied().unwrap_or_default() | 3);
    // Variable lengths, no padding; there are three at most.
    out.put_u8(0x80 | frames.len() as u8);
    for frame in &frames[..frames.len() - 1] {
        let length = frame.len() - 1;
        if length < 252 {
            out.put_u8(length as u8);
        } else {
            // Section 3.2.1: the second octet counts fours.
            let low = 252 + (length & 3);
            out.put_u8(low as u8);
            out.put_u8(((length - low) >> 2) as u8);
        }
    }
    for frame in frames {
        out.extend_from_slice(&frame[1..]);
    }
    out.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;
    use crate::media::decode::Inbound;
    use crate::media::encode::{Encoder, OpusSettings};
    use crate::media::leg::{InPacket, MediaFormat};

    const MS: Duration = Duration::from_millis(1);

    fn frame(n: u16) -> OutPacket {
        let payload = Bytes::from((0..160).map(|k| (u32::from(n) * 160 + k) as u8).collect::<Vec<_>>());
        let (sequence, timestamp) = (65_530_u16.wrapping_add(n), 4_294_967_000_u32.wrapping_add(u32::from(n) * 160));
        OutPacket { payload_type: 0, marker: n == 0, sequence, timestamp, payload }
    }

    /// What leaves until `end`, and when.
    fn leaves(packets: &mut Packets, from: Instant, end: Instant) -> Vec<(Instant, OutPacket)> {
        let mut left = Vec::new();
        let mut now = from;
        loop {
            left.extend(std::iter::from_fn(|| packets.poll(now)).map(|packet| (now, packet)));
            match packets.deadline().filter(|at| *at < end) {
                Some(at) => now = now.max(at),
                None => return left,
            }
        }
    }

    #[test]
    fn every_length_carries_the_same_sound_at_its_own_pace() {
        for tens in [1, 3, 4, 6] {
            let (mut packets, start) = (Packets::new(Some(Length::Tens(tens))), clock::now());
            let mut left = Vec::new();
            for n in 0..60 {
                let now = start + 20 * MS * u32::from(n);
                packets.push(now, frame(n), true);
                left.extend(leaves(&mut packets, now, now + 20 * MS));
            }
            left.extend(leaves(&mut packets, start + 1_200 * MS, start + 1_300 * MS));
            assert_eq!(left.len(), 120 / tens, "{tens}");
            let sound: Vec<u8> = left.iter().flat_map(|(_, packet)| packet.payload.to_vec()).collect();
            assert!(sound.iter().enumerate().all(|(n, byte)| *byte == n as u8), "{tens}");
            for (n, pair) in left.windows(2).enumerate() {
                let ((at, one), (then, other)) = (&pair[0], &pair[1]);
                assert_eq!(one.payload.len(), tens * TEN);
                assert_eq!(other.sequence, one.sequence.wrapping_add(1));
                assert_eq!(other.timestamp, one.timestamp.wrapping_add((tens * TEN) as u32));
                assert_eq!(*then - *at, 10 * MS * tens as u32, "{tens}: packet {n}");
                assert!(!other.marker);
            }
            assert!(left[0].1.marker);
            assert_eq!(left[0].1.sequence, frame(0).sequence);
        }
    }

    /// 1.2 s of a tone in packets of `ms`: what leaves, and when, and what was encoded.
    fn tone_in(ms: u16, settings: OpusSettings, loss: f32) -> (Vec<(Instant, OutPacket)>, Vec<Bytes>) {
        let format = MediaFormat {
            codec: Codec::Opus,
            payload_type: 96,
            telephone_event: None,
            opus_fec: true,
            opus_dtx: false,
            continuous: true,
            short_frames: short_frames(Codec::Opus, ms),
        };
        let mut encoder = Encoder::new(&format, settings).expect("a codec");
        encoder.report_loss(loss).expect("reported");
        let (mut packets, start) = (Packets::new(length(Codec::Opus, ms)), clock::now());
        let (mut left, mut encoded) = (Vec::new(), Vec::new());
        for n in 0..60_u16 {
            let tone =
                |k: usize| 0.3 * ((usize::from(n) * 480 + k) as f32 * 0.115).sin() + 0.1 * (k as f32 * 1.7).sin();
            let payload = encoder.encode(&std::array::from_fn::<f32, 480, _>(tone)).expect("encodes");
            encoded.push(payload.clone());
            let timestamp = u32::from(n) * 2 * OPUS_TEN;
            let frame = OutPacket { payload_type: 96, marker: n == 0, sequence: n, timestamp, payload };
            let now = start + FRAME * u32::from(n);
            packets.push(now, frame, true);
            left.extend(leaves(&mut packets, now, now + FRAME));
        }
        left.extend(leaves(&mut packets, start + FRAME * 60, start + FRAME * 70));
        (left, encoded)
    }

    fn came(packet: &OutPacket, arrived: Instant) -> InPacket {
        let OutPacket { payload_type, marker, sequence, timestamp, payload } = packet.clone();
        InPacket { payload_type, marker, sequence, timestamp, ssrc: 1, arrived, payload }
    }

    fn decoded(payloads: impl Iterator<Item = Bytes>) -> Vec<i16> {
        let mut decoder = opus::Decoder::new(24_000, opus::Channels::Mono).expect("a decoder");
        let mut sound = Vec::new();
        for payload in payloads {
            let mut pcm = vec![0_i16; 2_880];
            let samples = decoder.decode(&payload, &mut pcm, false).expect("a packet");
            sound.extend_from_slice(&pcm[..samples]);
        }
        sound
    }

    #[test]
    fn opus_frames_share_packets_that_any_decoder_takes() {
        // In the profile for clean networks and in that for lossy ones, and with lengths of two octets.
        for (bitrate, loss) in [(32_000, 0.0), (32_000, 0.1), (160_000, 0.0), (400_000, 0.0)] {
            for ms in [10, 30, 40, 60] {
                let (left, encoded) = tone_in(ms, OpusSettings { bitrate, ..OpusSettings::default() }, loss);
                let together = decoded(left.iter().map(|(_, packet)| packet.payload.clone()));
                assert!(together.iter().any(|sample| sample.unsigned_abs() > 5_000));
                assert!(together == decoded(encoded.iter().cloned()), "{bitrate} {loss} {ms}: the same sound");
                assert!(bitrate < 100_000 || encoded.iter().any(|payload| payload.len() > 253));
                assert!(left[0].1.marker);
                // The lossy profile changes its mode once: a packet ends there.
                assert!(
                    left.len() == 1_200 / usize::from(ms) || loss > 0.0 && left.len() == 1_200 / usize::from(ms) + 1
                );
                for pair in left.windows(2) {
                    let ((at, one), (then, other)) = (&pair[0], &pair[1]);
                    let length = opus::packet::get_nb_samples(&one.payload, 48_000).expect("a packet") as u32;
                    assert_eq!(other.timestamp, one.timestamp + length, "{ms}");
                    assert_eq!((other.sequence, other.marker), (one.sequence + 1, false), "{ms}");
                    assert!(loss > 0.0 || *then - *at == MS * u32::from(ms), "{ms}");
                }
                // Our own ear takes them as well, and a lost one is as long as the others.
                let mut inbound = Inbound::new(Codec::Opus).expect("a codec");
                let mut heard = 0;
                for (n, (at, packet)) in left.iter().enumerate().filter(|(n, _)| *n != 5) {
                    inbound.push(came(packet, *at));
                    heard += std::iter::from_fn(|| inbound.poll(*at + MS * 1_000 * n as u32)).count();
                }
                assert!(heard == 60 || loss > 0.0, "{ms}: {heard}");
            }
        }
    }

    #[test]
    fn pairs_are_taken_apart_and_nothing_else_is() {
        let payload = |octets: &[u8]| Bytes::copy_from_slice(octets);
        assert_eq!(halves(&payload(&[10, 1, 7, 8, 9])), Some([payload(&[8, 7]), payload(&[8, 8, 9])]));
        for octets in [&[][..], &[2], &[2, 252], &[2, 5, 1], &[3, 1, 1], &[8, 1, 1], &[9, 1, 1]] {
            assert_eq!(halves(&payload(octets)), None, "{octets:?}");
        }
        // One of 20 ms among pairs, where the mode has changed, keeps its place and its length.
        let opus = |n: u16, octets: &[u8]| OutPacket {
            payload_type: 96,
            marker: n == 0,
            sequence: n,
            timestamp: u32::from(n) * 2 * OPUS_TEN,
            payload: payload(octets),
        };
        let (mut packets, now) = (Packets::new(Some(Length::ShortFrames(3))), clock::now());
        packets.push(now, opus(0, &[10, 1, 0, 1]), true);
        packets.push(now + FRAME, opus(1, &[16, 2]), true);
        packets.push(now + FRAME * 2, opus(2, &[10, 1, 3, 4]), true);
        packets.push(now + FRAME * 3, opus(3, &[10, 1, 5, 6]), true);
        let left = leaves(&mut packets, now + FRAME * 3, now + FRAME * 4);
        let parts: Vec<_> = left.iter().map(|(_, p)| (p.sequence, p.timestamp / OPUS_TEN, &p.payload[..])).collect();
        let together = [11, 0x83, 1, 1, 3, 4, 5];
        assert_eq!(parts, [(0, 0, &[11, 0x82, 1, 0, 1][..]), (1, 2, &[16, 2]), (2, 4, &together)]);
        // The last holds half of frame 3.
        assert_eq!([0, 1, 2].map(|number| packets.acknowledged(number)), [0, 1, 2]);
    }

    #[test]
    fn the_end_of_what_is_said_leaves_without_the_rest_of_its_packet() {
        for (wanted, frames) in [(Length::Frames(3), 4), (Length::ShortFrames(3), 2), (Length::Tens(6), 4)] {
            let (mut packets, start) = (Packets::new(Some(wanted)), clock::now());
            let mut last = start;
            for n in 0..frames {
                let payload = match wanted {
                    Length::Tens(_) => frame(n).payload,
                    Length::Frames(_) => Bytes::from_static(&[8, 1]),
                    Length::ShortFrames(_) => Bytes::from_static(&[10, 1, 1, 1]),
                };
                last = start + FRAME * u32::from(n);
                let ticks = if matches!(wanted, Length::Tens(_)) { 160 } else { 2 * OPUS_TEN };
                let timestamp = u32::from(n) * ticks;
                let frame = OutPacket { payload_type: 0, marker: n == 0, sequence: n, timestamp, payload };
                packets.push(last, frame, true);
            }
            let left = leaves(&mut packets, last, last + 200 * MS);
            assert_eq!(left.len(), 2, "{wanted:?}");
            assert!(left[1].0 <= last + 100 * MS && packets.deadline().is_none(), "{wanted:?}");
        }
    }

    #[test]
    fn opus_frames_of_two_modes_and_those_before_a_gap_do_not_wait_for_each_other() {
        let (mut packets, now) = (Packets::new(Some(Length::Frames(3))), clock::now());
        let opus = |n: u16, marker, toc: u8| OutPacket {
            payload_type: 96,
            marker,
            sequence: n,
            timestamp: u32::from(n) * 2 * OPUS_TEN,
            payload: Bytes::from(vec![toc, n as u8]),
        };
        packets.push(now, opus(0, true, 0xf8), true);
        packets.push(now, opus(1, false, 0x78), true);
        packets.push(now, opus(2, false, 0x78), true);
        packets.push(now, opus(9, true, 0x78), true);
        let left = leaves(&mut packets, now, now + MS);
        let payloads: Vec<&[u8]> = left.iter().map(|(_, packet)| &packet.payload[..]).collect();
        assert_eq!(payloads, [&[0xf8, 0][..], &[0x7b, 0x82, 1, 1, 2]]);
    }

    #[test]
    fn reports_are_read_in_frames() {
        let (mut packets, now) = (Packets::new(Some(Length::Tens(3))), clock::now());
        (0..6).for_each(|n| packets.push(now + 20 * MS * u32::from(n), frame(n), true));
        let first = frame(0).sequence;
        // Nothing yet; one packet holds frame 0 and half of frame 1; the second ends with frame 2.
        for (highest, whole) in [(first.wrapping_sub(1), -1), (first, 0), (first.wrapping_add(1), 2), (first, 2)] {
            let frame = packets.acknowledged(u32::from(highest) + (7 << 16));
            assert_eq!(frame as u16, first.wrapping_add_signed(whole), "{highest}");
        }
    }

    #[test]
    fn what_is_cut_off_leaves_short_and_what_is_stale_does_not() {
        let (mut packets, now) = (Packets::new(Some(Length::Tens(6))), clock::now());
        packets.push(now, frame(0), true);
        // A key is pressed: its packet follows what was said, and keeps its own length.
        let event = OutPacket { payload_type: 101, payload: Bytes::from_static(&[1, 2, 3, 4]), ..frame(1) };
        packets.push(now + 20 * MS, event, false);
        let left = leaves(&mut packets, now + 20 * MS, now + 30 * MS);
        assert_eq!(
            left.iter().map(|(_, p)| (p.payload_type, p.payload.len())).collect::<Vec<_>>(),
            [(0, 160), (101, 4)]
        );
        packets.push(now + 40 * MS, frame(2), true);
        // On hold for a minute.
        let later = OutPacket { marker: true, ..frame(3_000) };
        packets.push(now + 60_000 * MS, later, true);
        packets.set(now + 60_020 * MS, None);
        packets.push(now + 60_020 * MS, frame(3_001), true);
        let left = leaves(&mut packets, now + 60_020 * MS, now + 60_030 * MS);
        assert_eq!(left.len(), 2, "the frame before the hold is gone: {left:?}");
        assert_eq!(left[1].1.payload, frame(3_001).payload);
        assert_eq!(left[1].1.sequence, frame(0).sequence.wrapping_add(3), "numbers go on without a hole");
    }
}
