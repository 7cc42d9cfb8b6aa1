//! Packets that are longer or shorter than the 20 ms in which speech is made (RFC 4566 section 6, `ptime`).
//!
//! A state machine over `now`: frames of 20 ms in, packets of 10 to 60 ms out, each with the instant at which it leaves.
//! Owns the sequence numbers on the wire. Never encodes: a codec of one octet a tick (G.711, G.722) can be cut anywhere, and
//! whole frames of Opus are put into one packet (RFC 6716 section 3.2.5), which so is 20, 40 or 60 ms long.
//!
//! # Why
//! *The pacing of speech stays as it is*, in frames of 20 ms: what is heard, cut off and acknowledged is counted there. Here
//! the peer's wish is met, and its reports are translated back.
//!
//! *A packet leaves when its place in the stream is due*: 20 ms cut into halves would otherwise leave as pairs, and packets
//! of 30 ms at intervals of 20 and 40.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use bytes::{BufMut, Bytes, BytesMut};
use sdp::Agreed;

use crate::media::leg::OutPacket;

/// Octets, and RTP ticks, of 10 ms.
const TEN: usize = 80;
/// Packets whose numbers are remembered: reports come every five seconds.
const LOG: usize = 2_048;
/// What waits for the rest of its packet so long was cut off by a hold, and is not sent behind it.
const STALE: Duration = Duration::from_millis(100);

/// RTP ticks of an Opus frame of 20 ms.
const OPUS: u32 = 960;

/// What packets are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Length {
    /// So many times 10 ms, of a codec of one octet a tick.
    Tens(usize),
    /// So many Opus frames of 20 ms.
    Frames(usize),
}

/// What the peer wants in a packet; `None`: as much as a frame has.
pub(super) fn length(agreed: &Agreed) -> Option<Length> {
    match agreed.codec {
        _ if agreed.ptime == 20 => None,
        sdp::Codec::Opus => Some(Length::Frames(usize::from(agreed.ptime / 20).clamp(1, 3))),
        _ => Some(Length::Tens(usize::from(agreed.ptime / 10))),
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
            Some(Length::Frames(count)) => return self.push_whole(now, frame, count),
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

    /// Takes an Opus frame, `count` of which make a packet. It leaves with its last frame, which is when it is due.
    fn push_whole(&mut self, now: Instant, frame: OutPacket, count: usize) {
        let toc = |payload: &Bytes| payload.first().copied();
        let alike =
            self.pending.as_ref().is_none_or(|pending| pending.frames.first().and_then(toc) == toc(&frame.payload));
        // Frames of several modes do not go into one packet.
        if frame.marker || self.expected != Some(frame.timestamp) || !alike {
            self.end_run(now);
        }
        self.expected = Some(frame.timestamp.wrapping_add(OPUS));
        // Alone: silence of no length, or what is a packet of several frames already.
        if toc(&frame.payload).is_none_or(|toc| toc & 3 != 0) {
            self.end_run(now);
            let number = frame.sequence;
            return self.leave(now, frame, number);
        }
        let pending = self.pending.get_or_insert_with(|| Pending {
            packet: OutPacket { payload: Bytes::new(), ..frame.clone() },
            bytes: BytesMut::new(),
            frames: Vec::with_capacity(count),
            since: now,
        });
        pending.packet.sequence = frame.sequence;
        pending.frames.push(frame.payload);
        if pending.frames.len() >= count
            && let Some(Pending { packet, frames, .. }) = self.pending.take()
        {
            let number = packet.sequence;
            self.leave(now, OutPacket { payload: joined(&frames), ..packet }, number);
        }
    }

    /// The packet that leaves now, if one is due.
    pub(super) fn poll(&mut self, now: Instant) -> Option<OutPacket> {
        self.ready.pop_front_if(|(due, _)| *due <= now).map(|(_, packet)| packet)
    }

    /// When to poll again.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.ready.front().map(|(due, _)| *due)
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

    /// What follows is no continuation: what waits leaves now, short as it is.
    fn end_run(&mut self, now: Instant) {
        (self.run, self.expected) = (None, None);
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

    #[test]
    fn opus_frames_share_packets_that_any_decoder_takes() {
        use crate::media::encode::{Encoder, OpusSettings};
        use crate::media::leg::{Codec, MediaFormat};
        let format = MediaFormat {
            codec: Codec::Opus,
            payload_type: 96,
            telephone_event: None,
            opus_fec: false,
            continuous: true,
        };
        for (bitrate, count) in [(32_000, 2), (32_000, 3), (160_000, 3)] {
            let settings = OpusSettings { bitrate, ..OpusSettings::default() };
            let mut encoder = Encoder::new(&format, settings).expect("a codec");
            let (mut packets, start) = (Packets::new(Some(Length::Frames(count))), clock::now());
            let (mut left, mut alone) = (Vec::new(), Vec::new());
            for n in 0..60_u16 {
                let tone =
                    |k: usize| 0.3 * ((usize::from(n) * 480 + k) as f32 * 0.115).sin() + 0.1 * (k as f32 * 1.7).sin();
                let payload = encoder.encode(&std::array::from_fn::<f32, 480, _>(tone)).expect("encodes");
                alone.push(payload.clone());
                let timestamp = u32::from(n) * OPUS;
                let frame = OutPacket { payload_type: 96, marker: n == 0, sequence: n, timestamp, payload };
                let now = start + 20 * MS * u32::from(n);
                packets.push(now, frame, true);
                left.extend(leaves(&mut packets, now, now + 20 * MS));
            }
            assert_eq!(left.len(), 60 / count, "{count}");
            let decode = |payloads: &mut dyn Iterator<Item = &Bytes>| {
                let mut decoder = opus::Decoder::new(24_000, opus::Channels::Mono).expect("a decoder");
                let mut sound = Vec::new();
                for payload in payloads {
                    let mut pcm = vec![0_i16; 2_880];
                    let samples = decoder.decode(payload, &mut pcm, false).expect("a packet");
                    sound.extend_from_slice(&pcm[..samples]);
                }
                sound
            };
            let (together, one_by_one) =
                (decode(&mut left.iter().map(|(_, packet)| &packet.payload)), decode(&mut alone.iter()));
            assert_eq!(together, one_by_one, "{bitrate} {count}: the same sound");
            assert!(bitrate < 100_000 || alone.iter().any(|payload| payload.len() > 253), "lengths of two octets, too");
            for pair in left.windows(2) {
                assert_eq!(pair[1].1.timestamp, pair[0].1.timestamp + OPUS * count as u32);
                assert_eq!(
                    (pair[1].1.sequence, pair[1].0 - pair[0].0),
                    (pair[0].1.sequence + 1, 20 * MS * count as u32)
                );
            }
        }
    }

    #[test]
    fn opus_frames_of_two_modes_and_those_before_a_gap_do_not_wait_for_each_other() {
        let (mut packets, now) = (Packets::new(Some(Length::Frames(3))), clock::now());
        let opus = |n: u16, marker, toc: u8| OutPacket {
            payload_type: 96,
            marker,
            sequence: n,
            timestamp: u32::from(n) * OPUS,
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
