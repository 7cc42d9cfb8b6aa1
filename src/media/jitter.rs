//! Packets of one incoming stream in their order.
//!
//! Owns what arrived too early and the judgement that a packet is lost. Never decodes. Contract: after every
//! push call [`Jitter::poll`] until it returns nothing, then again at [`Jitter::deadline`].
//!
//! # Why
//! This stream is not played on a clock: it goes to a speech detector and to recognisers, for which every
//! millisecond counts and even spacing does not. So a packet in sequence passes at once, and only a hole makes
//! the buffer wait: as long as reordering lately took on this path, then the hole is reported as loss.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::leg::InPacket;

/// Packets kept while one before them is missing.
const CAPACITY: usize = 64;
/// A jump of the sequence number beyond this is another stream, not loss.
const MAX_JUMP: u16 = 500;
/// Losses in a row that are worth concealing; beyond, concealment is noise.
const MAX_CONCEALED: u32 = 5;
/// Bounds of the wait for a missing packet.
const MIN_WAIT: Duration = Duration::from_millis(20);
const MAX_WAIT: Duration = Duration::from_millis(120);

/// What comes out, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Item {
    /// The next packet.
    Packet {
        /// RTP timestamp.
        timestamp: u32,
        /// Payload type.
        payload_type: u8,
        /// The payload.
        payload: Bytes,
    },
    /// One packet was lost.
    Lost {
        /// The packet after it, if that is here: Opus may carry the lost one in it.
        next: Option<Bytes>,
    },
    /// The stream began, or began anew: forget the past.
    Restart,
}

/// Orders one stream.
#[derive(Debug, Default)]
pub struct Jitter {
    ssrc: Option<u32>,
    next: u16,
    /// By distance from `next`; the front is `next` itself.
    window: VecDeque<Option<InPacket>>,
    /// When the first packet behind the present hole arrived.
    hole_since: Option<Instant>,
    concealed: u32,
    restarted: bool,
    /// How far behind a packet of higher number the worst one lately came.
    reordering: Duration,
    /// Packets that came too late to be of use.
    pub late: u64,
    /// Packets that never came.
    pub lost: u64,
}

impl Jitter {
    /// Takes one packet.
    pub fn push(&mut self, packet: InPacket) {
        let distance = packet.sequence.wrapping_sub(self.next);
        let ahead = distance < MAX_JUMP;
        let behind = distance > u16::MAX - MAX_JUMP;
        if self.ssrc != Some(packet.ssrc) || !(ahead || behind) {
            self.ssrc = Some(packet.ssrc);
            self.next = packet.sequence;
            self.window.clear();
            self.hole_since = None;
            self.concealed = 0;
            self.restarted = true;
            self.window.push_back(Some(packet));
            return;
        }
        if behind {
            self.late += 1;
            // It was given up too soon: wait longer.
            self.reordering = (self.reordering + Duration::from_millis(10)).min(MAX_WAIT);
            return;
        }
        let place = usize::from(distance);
        if place > 0 && self.window.front().is_none_or(Option::is_none) {
            self.hole_since.get_or_insert(packet.arrived);
        }
        if place == 0
            && let Some(since) = self.hole_since
        {
            let waited = packet.arrived.saturating_duration_since(since);
            // Rises at once, falls slowly.
            self.reordering = self.reordering.max(waited.min(MAX_WAIT));
        }
        if place >= self.window.len() {
            self.window.resize(place + 1, None);
        }
        self.window[place] = Some(packet);
    }

    /// The next item, if one is certain.
    pub fn poll(&mut self, now: Instant) -> Option<Item> {
        if std::mem::take(&mut self.restarted) {
            return Some(Item::Restart);
        }
        match self.window.front()? {
            Some(_) => {
                let packet = self.advance()?;
                self.concealed = 0;
                self.reordering = self.reordering.mul_f32(0.999);
                Some(Item::Packet {
                    timestamp: packet.timestamp,
                    payload_type: packet.payload_type,
                    payload: packet.payload,
                })
            }
            None => {
                let waited = now.saturating_duration_since(self.hole_since?);
                if waited < self.wait() && self.window.len() < CAPACITY {
                    return None;
                }
                self.lost += 1;
                self.concealed += 1;
                if self.concealed > MAX_CONCEALED {
                    // A long hole: go to the next packet there is.
                    while self.window.front().is_some_and(Option::is_none) {
                        self.advance();
                    }
                    return self.poll(now);
                }
                self.advance();
                let next = self.window.front().and_then(Option::as_ref).map(|packet| packet.payload.clone());
                Some(Item::Lost { next })
            }
        }
    }

    /// When the present hole will be given up.
    pub fn deadline(&self) -> Option<Instant> {
        let hole = self.window.front().is_some_and(Option::is_none);
        self.hole_since.filter(|_| hole).map(|since| since + self.wait())
    }

    fn wait(&self) -> Duration {
        (self.reordering * 2).clamp(MIN_WAIT, MAX_WAIT)
    }

    fn advance(&mut self) -> Option<InPacket> {
        let packet = self.window.pop_front().flatten();
        self.next = self.next.wrapping_add(1);
        match self.window.front() {
            // The hole's clock keeps running while the same run of losses lasts.
            Some(None) if packet.is_none() => {}
            Some(None) => self.hole_since = self.window.iter().flatten().map(|packet| packet.arrived).min(),
            Some(Some(_)) | None => self.hole_since = None,
        }
        packet
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::clock;

    const MS: Duration = Duration::from_millis(1);

    fn packet(sequence: u16, arrived: Instant) -> InPacket {
        InPacket {
            payload_type: 0,
            marker: false,
            sequence,
            timestamp: u32::from(sequence) * 160,
            ssrc: 7,
            arrived,
            payload: Bytes::copy_from_slice(&sequence.to_be_bytes()),
        }
    }

    fn drain(jitter: &mut Jitter, now: Instant) -> Vec<String> {
        std::iter::from_fn(|| jitter.poll(now))
            .map(|item| match item {
                Item::Packet { payload, .. } => u16::from_be_bytes([payload[0], payload[1]]).to_string(),
                Item::Lost { next } => format!("lost{}", if next.is_some() { "+" } else { "" }),
                Item::Restart => "restart".into(),
            })
            .collect()
    }

    #[test]
    fn packets_in_order_pass_at_once() {
        let (mut jitter, now) = (Jitter::default(), clock::now());
        jitter.push(packet(65_535, now));
        assert_eq!(drain(&mut jitter, now), ["restart", "65535"]);
        jitter.push(packet(0, now));
        assert_eq!(drain(&mut jitter, now), ["0"]);
        assert_eq!(jitter.deadline(), None);
    }

    #[test]
    fn a_hole_waits_a_little_and_is_then_loss() {
        let (mut jitter, now) = (Jitter::default(), clock::now());
        jitter.push(packet(10, now));
        jitter.push(packet(12, now));
        assert_eq!(drain(&mut jitter, now), ["restart", "10"]);
        assert_eq!(jitter.deadline(), Some(now + 20 * MS));
        assert!(drain(&mut jitter, now + 19 * MS).is_empty());
        assert_eq!(drain(&mut jitter, now + 20 * MS), ["lost+", "12"]);
        jitter.push(packet(11, now + 30 * MS));
        assert_eq!((jitter.late, jitter.lost), (1, 1));
    }

    #[test]
    fn reordering_is_put_right_and_remembered() {
        let (mut jitter, now) = (Jitter::default(), clock::now());
        let mut out = Vec::new();
        for (sequence, at) in [(1, 0), (3, 40), (2, 55)] {
            jitter.push(packet(sequence, now + at * MS));
            out.extend(drain(&mut jitter, now + at * MS));
        }
        assert_eq!(out, ["restart", "1", "2", "3"]);
        jitter.push(packet(5, now + 80 * MS));
        let wait = jitter.deadline().unwrap() - (now + 80 * MS);
        assert!(wait > 29 * MS && wait <= 30 * MS, "{wait:?}");
    }

    #[test]
    fn a_new_sender_or_a_jump_starts_anew() {
        let (mut jitter, now) = (Jitter::default(), clock::now());
        jitter.push(packet(1, now));
        jitter.push(InPacket { ssrc: 8, ..packet(30_000, now) });
        assert_eq!(drain(&mut jitter, now), ["restart", "30000"]);
        jitter.push(InPacket { ssrc: 8, ..packet(40_000, now) });
        assert_eq!(drain(&mut jitter, now), ["restart", "40000"]);
    }

    #[test]
    fn a_long_hole_is_not_concealed_to_its_end() {
        let (mut jitter, now) = (Jitter::default(), clock::now());
        jitter.push(packet(1, now));
        jitter.push(packet(100, now));
        let out = drain(&mut jitter, now + 200 * MS);
        assert_eq!(out.iter().filter(|item| item.starts_with("lost")).count(), 5);
        assert_eq!(out.last().map(String::as_str), Some("100"));
    }

    proptest! {
        /// Any storm of packets leaves in order, once each, in bounded memory.
        #[test]
        fn order_is_restored(sequences in proptest::collection::vec((0u16..2_000, 0u32..30), 1..300)) {
            let (mut jitter, mut now) = (Jitter::default(), clock::now());
            let mut last: Option<u16> = None;
            for (sequence, after) in sequences {
                now += after * MS;
                jitter.push(packet(sequence, now));
                prop_assert!(jitter.window.len() <= usize::from(MAX_JUMP) + 1);
                while let Some(item) = jitter.poll(now) {
                    match item {
                        Item::Restart => last = None,
                        Item::Lost { .. } => {}
                        Item::Packet { payload, .. } => {
                            let sequence = u16::from_be_bytes([payload[0], payload[1]]);
                            prop_assert!(last.is_none_or(|last| sequence > last));
                            last = Some(sequence);
                        }
                    }
                }
            }
        }
    }
}
