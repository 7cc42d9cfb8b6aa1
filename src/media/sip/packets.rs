//! Packets that are longer or shorter than the 20 ms in which speech is made (RFC 4566 section 6, `ptime`).
//!
//! A state machine over `now`: frames of 20 ms in, packets of 10 to 60 ms out, each with the instant at which it leaves.
//! Owns the sequence numbers on the wire. Never encodes: a codec of one octet a tick (G.711, G.722) can be cut anywhere,
//! and frames of any other go out as they come.
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

use bytes::BytesMut;

use crate::media::leg::OutPacket;

/// Octets, and RTP ticks, of 10 ms.
const TEN: usize = 80;
/// Packets whose numbers are remembered: reports come every five seconds.
const LOG: usize = 2_048;
/// What waits for the rest of its packet so long was cut off by a hold, and is not sent behind it.
const STALE: Duration = Duration::from_millis(100);

/// The packets of one stream.
#[derive(Debug)]
pub(super) struct Packets {
    /// Packets hold so many times 10 ms; `None`: what a frame holds.
    tens: Option<usize>,
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
    since: Instant,
}

impl Packets {
    pub(super) fn new(tens: Option<usize>) -> Packets {
        Packets {
            tens,
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
    pub(super) fn set(&mut self, now: Instant, tens: Option<usize>) {
        self.end_run(now);
        self.tens = tens;
    }

    /// Takes a frame; `audio`: it is of the codec, and no telephone event.
    pub(super) fn push(&mut self, now: Instant, frame: OutPacket, audio: bool) {
        if self.next.is_none() {
            self.next = Some(frame.sequence);
            self.acknowledged = frame.sequence.wrapping_sub(1);
        }
        let Some(length) = self.tens.filter(|_| audio).map(|tens| tens * TEN) else {
            self.end_run(now);
            let number = frame.sequence;
            return self.leave(now, frame, number);
        };
        if frame.marker || self.expected != Some(frame.timestamp) {
            self.end_run(now);
        }
        self.expected = Some(frame.timestamp.wrapping_add(frame.payload.len() as u32));
        let pending = self.pending.get_or_insert_with(|| Pending {
            packet: OutPacket { payload: bytes::Bytes::new(), ..frame.clone() },
            bytes: BytesMut::with_capacity(length + 2 * TEN),
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
        let Some(Pending { packet, bytes, since }) = self.pending.take() else { return };
        if now.saturating_duration_since(since) < STALE {
            let number = packet.sequence;
            self.leave(now, OutPacket { payload: bytes.freeze(), ..packet }, number);
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

#[cfg(test)]
mod tests {
    use bytes::Bytes;

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
            let (mut packets, start) = (Packets::new(Some(tens)), clock::now());
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
    fn reports_are_read_in_frames() {
        let (mut packets, now) = (Packets::new(Some(3)), clock::now());
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
        let (mut packets, now) = (Packets::new(Some(6)), clock::now());
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
