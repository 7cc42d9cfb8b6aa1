//! Redundant audio (RFC 2198): a packet that carries, before its own frame, those of the packets before it.
//!
//! Owns what was seen and sent lately of one stream each way. Never decodes and reads no clock.
//!
//! # Why
//! - What comes is opened before the jitter buffer: a frame that was lost is there again 20 ms later, whole, where Opus'
//!   own error correction has a coarser copy of it. The buffer then sees no hole and waits for nothing.
//! - What goes is doubled only while the peer reports loss, and trebled while it reports much: the copies cost as much
//!   bandwidth as the speech, and on a path that is lossy for being full they would make it worse.
//! - Sequence numbers of copies are counted back from the packet's own, as every sender does it: one copy for each packet
//!   that was sent before.

use std::collections::VecDeque;

use bytes::{BufMut, Bytes, BytesMut};

use super::leg::{InPacket, OutPacket};

/// Copies in one packet that are looked at; browsers send one or two.
const COPIES: usize = 8;
/// RFC 2198 section 3: 14 bits of timestamp offset, 10 bits of length.
const MAX_OFFSET: u32 = (1 << 14) - 1;
const MAX_LENGTH: usize = (1 << 10) - 1;
/// With all copies a packet stays well within what any path carries.
const MAX_PACKET: usize = 1_000;
/// Share of lost packets from which one copy is sent, and two.
const ONE_FROM: f32 = 0.03;
const TWO_FROM: f32 = 0.10;
/// Reports in a row with less than [`CLEAN`] that end it.
const CLEAN_AFTER: u8 = 3;
const CLEAN: f32 = 0.01;

/// One copy of an earlier frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copy {
    /// Payload type of what it carries.
    pub payload_type: u8,
    /// How much earlier than the packet's own frame it is, in timestamp units.
    pub offset: u32,
    /// The frame.
    pub payload: Bytes,
}

/// Opens `payload`: the copies, oldest first, and the packet's own frame with its payload type. `None`: its lengths
/// contradict each other, or it has more than eight copies.
pub fn open(payload: &Bytes) -> Option<(Vec<Copy>, u8, Bytes)> {
    let mut heads = Vec::new();
    let mut at = 0;
    let own = loop {
        let first = *payload.get(at)?;
        if first & 0x80 == 0 {
            at += 1;
            break first;
        }
        if heads.len() == COPIES {
            return None;
        }
        let &[a, b, c] = payload.get(at + 1..at + 4)?.first_chunk::<3>()?;
        let offset = (u32::from(a) << 6) | u32::from(b >> 2);
        let length = (usize::from(b & 3) << 8) | usize::from(c);
        heads.push((first & 0x7f, offset, length));
        at += 4;
    };
    let mut copies = Vec::with_capacity(heads.len());
    for (payload_type, offset, length) in heads {
        let end = at.checked_add(length).filter(|end| *end <= payload.len())?;
        copies.push(Copy { payload_type, offset, payload: payload.slice(at..end) });
        at = end;
    }
    Some((copies, own, payload.slice(at..)))
}

/// Takes packets of a stream that may be redundant, gives each frame once.
#[derive(Debug)]
pub struct Receiver {
    red: u8,
    audio: u8,
    ssrc: Option<u32>,
    highest: u16,
    /// Bit `n`: the packet `n` before the highest has been given.
    given: u64,
    /// Frames that came as copies only.
    pub recovered: u64,
}

impl Receiver {
    /// `red` is the payload type of redundant packets, `audio` of the frames in them.
    pub fn new(red: u8, audio: u8) -> Self {
        Self { red, audio, ssrc: None, highest: 0, given: 0, recovered: 0 }
    }

    /// Puts the frames of `packet` that are new into `out`, in their order.
    pub fn take(&mut self, packet: InPacket, out: &mut VecDeque<InPacket>) {
        if self.ssrc != Some(packet.ssrc) {
            self.ssrc = Some(packet.ssrc);
            // The stream begins with this packet: what was before is not asked for.
            self.highest = packet.sequence.wrapping_sub(1);
            self.given = u64::MAX;
        }
        if packet.payload_type != self.red {
            if self.give(packet.sequence, true) {
                out.push_back(packet);
            }
            return;
        }
        // What cannot be opened is lost.
        let Some((copies, own, payload)) = open(&packet.payload) else { return };
        let count = copies.len();
        for (index, copy) in copies.into_iter().enumerate() {
            let sequence = packet.sequence.wrapping_sub((count - index) as u16);
            if copy.payload_type != self.audio || copy.offset == 0 || copy.payload.is_empty() {
                continue;
            }
            if self.give(sequence, false) {
                self.recovered += 1;
                out.push_back(InPacket {
                    payload_type: self.audio,
                    marker: false,
                    sequence,
                    timestamp: packet.timestamp.wrapping_sub(copy.offset),
                    ssrc: packet.ssrc,
                    arrived: packet.arrived,
                    payload: copy.payload,
                });
            }
        }
        if self.give(packet.sequence, true) {
            out.push_back(InPacket { payload_type: own, payload, ..packet });
        }
    }

    /// Whether `sequence` is given for the first time. Beyond what is remembered only the `original` is.
    fn give(&mut self, sequence: u16, original: bool) -> bool {
        let ahead = sequence.wrapping_sub(self.highest);
        if (1..0x8000).contains(&ahead) {
            self.given = self.given.checked_shl(u32::from(ahead)).unwrap_or(0) | 1;
            self.highest = sequence;
            return true;
        }
        let bit = 1_u64.checked_shl(u32::from(self.highest.wrapping_sub(sequence)));
        match bit {
            Some(bit) if self.given & bit == 0 => {
                self.given |= bit;
                true
            }
            Some(_) => false,
            None => original,
        }
    }
}

/// Adds copies to what is sent, as many as the peer's reports ask for.
#[derive(Debug)]
pub struct Sender {
    red: u8,
    audio: u8,
    copies: usize,
    clean: u8,
    /// Sequence number, timestamp and frame of the last packets, newest last.
    past: VecDeque<(u16, u32, Bytes)>,
}

impl Sender {
    /// As [`Receiver::new`].
    pub fn new(red: u8, audio: u8) -> Self {
        Self { red, audio, copies: 0, clean: 0, past: VecDeque::with_capacity(3) }
    }

    /// Takes the share of packets (0..=1) that the peer reports as lost since its report before.
    pub fn report(&mut self, lost: f32) {
        match lost {
            lost if lost >= TWO_FROM => (self.copies, self.clean) = (2, 0),
            lost if lost >= ONE_FROM => (self.copies, self.clean) = (self.copies.max(1), 0),
            lost if lost < CLEAN => {
                self.clean = self.clean.saturating_add(1);
                if self.clean >= CLEAN_AFTER {
                    self.copies = 0;
                }
            }
            _ => self.clean = 0,
        }
    }

    /// Copies that each packet carries now.
    pub fn copies(&self) -> usize {
        self.copies
    }

    /// `packet`, with copies where they are wanted and fit.
    pub fn add(&mut self, packet: OutPacket) -> OutPacket {
        if packet.payload_type != self.audio {
            return packet;
        }
        let mut room = MAX_PACKET.saturating_sub(packet.payload.len());
        let mut chosen = VecDeque::with_capacity(2);
        for (back, (sequence, timestamp, payload)) in self.past.iter().rev().take(self.copies).enumerate() {
            let offset = packet.timestamp.wrapping_sub(*timestamp);
            let follows = packet.sequence.wrapping_sub(*sequence) == back as u16 + 1;
            let fits = payload.len() <= MAX_LENGTH.min(room);
            if !follows || !fits || !(1..=MAX_OFFSET).contains(&offset) {
                break;
            }
            room -= payload.len();
            chosen.push_front((offset, payload.clone()));
        }
        if self.past.len() == 2 {
            self.past.pop_front();
        }
        self.past.push_back((packet.sequence, packet.timestamp, packet.payload.clone()));
        if chosen.is_empty() {
            return packet;
        }
        let mut payload = BytesMut::with_capacity(MAX_PACKET + 16);
        for (offset, frame) in &chosen {
            payload.put_u8(0x80 | self.audio);
            // 14 bits and 10 bits: both were checked.
            payload.put_uint((u64::from(*offset) << 10) | frame.len() as u64, 3);
        }
        payload.put_u8(self.audio);
        for (_, frame) in &chosen {
            payload.put_slice(frame);
        }
        payload.put_slice(&packet.payload);
        OutPacket { payload_type: self.red, payload: payload.freeze(), ..packet }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::clock;

    const RED: u8 = 63;
    const OPUS: u8 = 111;

    fn sent(sequence: u16) -> OutPacket {
        let payload = Bytes::from(vec![sequence as u8; 40]);
        let timestamp = u32::from(sequence).wrapping_mul(960);
        OutPacket { payload_type: OPUS, marker: false, sequence, timestamp, payload }
    }

    fn came(packet: OutPacket) -> InPacket {
        let OutPacket { payload_type, marker, sequence, timestamp, payload } = packet;
        InPacket { payload_type, marker, sequence, timestamp, ssrc: 7, arrived: clock::now(), payload }
    }

    /// What a receiver gives of the packets `numbers` of a sender that adds `copies`.
    fn through(copies: f32, numbers: &[u16]) -> Vec<u16> {
        let (mut sender, mut receiver) = (Sender::new(RED, OPUS), Receiver::new(RED, OPUS));
        sender.report(copies);
        let packets: Vec<OutPacket> = (0..100).map(|n| sender.add(sent(n))).collect();
        let mut out = VecDeque::new();
        for number in numbers {
            receiver.take(came(packets[usize::from(*number)].clone()), &mut out);
        }
        for packet in &out {
            assert_eq!((packet.payload_type, packet.timestamp), (OPUS, u32::from(packet.sequence) * 960));
            assert_eq!(packet.payload, vec![packet.sequence as u8; 40]);
        }
        out.into_iter().map(|packet| packet.sequence).collect()
    }

    #[test]
    fn a_lost_packet_is_in_the_next_and_two_are_in_the_one_after() {
        assert_eq!(through(0.05, &[10, 12, 13]), [10, 11, 12, 13]);
        assert_eq!(through(0.05, &[10, 13]), [10, 12, 13]);
        assert_eq!(through(0.15, &[10, 13]), [10, 11, 12, 13]);
        assert_eq!(through(0.0, &[10, 13]), [10, 13]);
    }

    #[test]
    fn what_comes_twice_or_late_is_given_once() {
        assert_eq!(through(0.15, &[10, 12, 11, 12, 13]), [10, 11, 12, 13]);
        // Without copies in between, what comes late is new.
        assert_eq!(through(0.0, &[10, 12, 11]), [10, 12, 11]);
    }

    #[test]
    fn copies_come_with_loss_and_go_with_its_end() {
        let mut sender = Sender::new(RED, OPUS);
        for (lost, copies) in [(0.02, 0), (0.04, 1), (0.12, 2), (0.04, 2), (0.0, 2), (0.0, 2), (0.02, 2), (0.0, 2)] {
            sender.report(lost);
            assert_eq!(sender.copies(), copies, "{lost}");
        }
        sender.report(0.0);
        sender.report(0.0);
        assert_eq!(sender.copies(), 0);
        sender.report(f32::NAN);
        assert_eq!(sender.copies(), 0);
    }

    #[test]
    fn only_what_was_sent_just_before_is_copied() {
        let mut sender = Sender::new(RED, OPUS);
        sender.report(0.2);
        assert_eq!(sender.add(sent(1)).payload_type, OPUS, "there is nothing to copy yet");
        // A telephone event in between has the number 2.
        let event = OutPacket { payload_type: 101, ..sent(2) };
        assert_eq!(sender.add(event.clone()), event);
        assert_eq!(sender.add(sent(3)).payload_type, OPUS);
        assert_eq!(sender.add(sent(4)).payload_type, RED);
        // After a pause of more than 341 ms.
        let later = OutPacket { timestamp: 4 * 960 + 20_000, ..sent(5) };
        assert_eq!(sender.add(later).payload_type, OPUS);
        // A frame as long as none is.
        let long = OutPacket { payload: Bytes::from(vec![0; 1_200]), timestamp: 25_000, ..sent(6) };
        assert_eq!(sender.add(long).payload_type, OPUS);
        assert_eq!(sender.add(OutPacket { timestamp: 26_000, ..sent(7) }).payload_type, OPUS);
    }

    #[test]
    fn the_form_is_that_of_the_standard() {
        let mut sender = Sender::new(RED, OPUS);
        sender.report(0.05);
        sender.add(sent(1));
        let packet = sender.add(sent(2));
        // Header of a copy: follows, payload type, 960 ticks, 40 octets; of the frame itself: its payload type.
        assert_eq!(packet.payload[..5], [0x80 | 111, 15, 0, 40, 111]);
        assert_eq!(packet.payload.len(), 5 + 80);
        let (copies, own, frame) = open(&packet.payload).expect("sound");
        assert_eq!(copies, [Copy { payload_type: OPUS, offset: 960, payload: Bytes::from(vec![1; 40]) }]);
        assert_eq!((own, frame), (OPUS, Bytes::from(vec![2; 40])));
    }

    proptest! {
        /// No payload panics, and nothing comes out twice.
        #[test]
        fn any_payload_is_survived(payloads in proptest::collection::vec((0..40_u16, proptest::collection::vec(any::<u8>(), 0..60)), 1..60)) {
            let mut receiver = Receiver::new(RED, OPUS);
            let mut out = VecDeque::new();
            for (sequence, payload) in payloads {
                let packet = OutPacket { payload_type: RED, payload: payload.into(), ..sent(sequence) };
                receiver.take(came(packet), &mut out);
            }
            let mut numbers: Vec<u16> = out.iter().map(|packet| packet.sequence).collect();
            numbers.sort_unstable();
            let count = numbers.len();
            numbers.dedup();
            prop_assert_eq!(numbers.len(), count);
        }
    }
}
