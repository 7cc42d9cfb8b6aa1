//! What a caller heard: every packet with the instant it arrived, and the sound it decoded to.
//!
//! [`Recorder`] is the machine (packets in, [`Heard`] out, time as an argument); an [`Ear`](crate::ear::Ear) shares one
//! between the task that receives and the one that judges. Nothing is smoothed, concealed or buffered here: a packet
//! that did not come is missing, and the instant of a sample is the arrival of its packet plus its place in it. What a
//! listener behind a jitter buffer would make of that is computed in [`crate::listen`].
//!
//! # Why
//! Packets are decoded when what was heard is asked for, not when they arrive. The result is the same, for the
//! instants are those of arrival; but a decoder that runs over a second of packets at once finds its tables in the
//! cache, which one that is called between two datagrams never does. That is a large part of what a caller costs.

mod spoken;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bytes::Bytes;

pub use self::spoken::Spoken;
use crate::wire::codec::{Codec, Decoder, from_i16};
use crate::wire::dtmf;
use crate::wire::rtp;

/// Sound without a time: mono, -1..=1.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Clip {
    /// Samples per second.
    pub rate: u32,
    /// Samples.
    pub pcm: Vec<f32>,
}

impl Clip {
    /// How long it lasts.
    pub fn duration(&self) -> Duration {
        Duration::from_secs_f64(self.pcm.len() as f64 / f64::from(self.rate.max(1)))
    }
}

/// One packet of speech that arrived.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Packet {
    /// When it arrived.
    pub arrived: Instant,
    /// Raised when the sender changes (another SSRC); sequence and timestamp do not compare across.
    pub stream: u16,
    /// Sequence number, unwrapped.
    pub sequence: i64,
    /// RTP timestamp, unwrapped.
    pub timestamp: i64,
    /// First after a silence, says the sender.
    pub marker: bool,
    /// First of its samples in [`Heard::pcm`].
    pub start: usize,
    /// How many samples it decoded to.
    pub samples: usize,
}

/// A digit that arrived as an RTP event.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Digit {
    /// When its first packet arrived.
    pub at: Instant,
    /// Which.
    pub digit: char,
}

/// Counts of what arrived (RFC 3550 section 6.4.1 and appendix A).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counts {
    /// Packets.
    pub received: u64,
    /// Payload octets.
    pub octets: u64,
    /// Sequence numbers that never came.
    pub lost: u64,
    /// Packets behind a later one.
    pub reordered: u64,
    /// Packets that came twice.
    pub duplicates: u64,
    /// Packets whose payload could not be decoded or was of no agreed type.
    pub undecodable: u64,
    /// Interarrival jitter, seconds.
    pub jitter: f64,
}

/// Everything heard on a call, or since it was last taken.
#[derive(Clone, Debug)]
pub struct Heard {
    /// What was spoken.
    pub codec: Codec,
    /// Samples per second of [`Heard::pcm`].
    pub rate: u32,
    /// In order of sequence.
    pub packets: Vec<Packet>,
    /// The sound of all packets, one after the other.
    pub pcm: Vec<i16>,
    /// Digits in order.
    pub digits: Vec<Digit>,
    /// Since the call began.
    pub counts: Counts,
    /// Until when was listened.
    pub until: Instant,
}

impl Heard {
    /// How long the sound of `packet` lasts.
    pub fn duration_of(&self, packet: &Packet) -> Duration {
        Duration::from_secs_f64(packet.samples as f64 / f64::from(self.rate))
    }

    /// The samples of `packet`.
    pub fn samples(&self, packet: &Packet) -> &[i16] {
        self.pcm.get(packet.start..packet.start + packet.samples).unwrap_or_default()
    }

    /// The packets that arrived within `from..to`.
    pub fn packets_between(&self, from: Instant, to: Instant) -> impl Iterator<Item = &Packet> {
        self.packets.iter().filter(move |p| p.arrived >= from && p.arrived < to)
    }

    /// The sound that arrived within `from..to`, packet behind packet.
    pub fn clip_between(&self, from: Instant, to: Instant) -> Clip {
        let mut pcm = Vec::with_capacity(self.packets_between(from, to).map(|p| p.samples).sum());
        for packet in self.packets_between(from, to) {
            pcm.extend(self.samples(packet).iter().map(|s| from_i16(*s)));
        }
        Clip { rate: self.rate, pcm }
    }

    /// All of the sound as the sender timed it: silence where timestamps jump or packets are missing, up to
    /// `longest` at one place.
    pub fn clip(&self, longest: Duration) -> Clip {
        let mut pcm = Vec::with_capacity(self.pcm.len());
        let longest = longest.as_secs_f64();
        let mut last: Option<&Packet> = None;
        for packet in &self.packets {
            if let Some(last) = last.filter(|l| l.stream == packet.stream) {
                let apart = (packet.timestamp - last.timestamp) as f64 / f64::from(self.codec.clock_rate());
                let missing = apart - last.samples as f64 / f64::from(self.rate);
                let silence = (missing.clamp(0.0, longest) * f64::from(self.rate)).round() as usize;
                pcm.resize(pcm.len() + silence, 0.0);
            }
            pcm.extend(self.samples(packet).iter().map(|s| from_i16(*s)));
            last = Some(packet);
        }
        Clip { rate: self.rate, pcm }
    }
}

/// Which payload types mean what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PayloadTypes {
    /// Speech.
    pub audio: u8,
    /// RFC 4733 events.
    pub event: Option<u8>,
}

/// A packet that waits for one before it.
struct Raw {
    arrived: Instant,
    packet: rtp::Packet,
}

/// A packet of speech in its place, not decoded yet: `packet` lacks its samples.
struct Undecoded {
    packet: Packet,
    payload: Bytes,
}

/// Puts packets in order, decodes them and keeps what they said.
pub struct Recorder {
    types: PayloadTypes,
    decoder: Decoder,
    opus_rate: u32,
    heard: Heard,
    /// Samples kept at most; what comes beyond is counted but not kept.
    limit: usize,
    stream: u16,
    ssrc: Option<u32>,
    highest: Option<(i64, i64)>,
    first_sequence: i64,
    /// Next sequence number to decode.
    next: i64,
    waiting: BTreeMap<i64, Raw>,
    undecoded: Vec<Undecoded>,
    digits: dtmf::Receiver,
    jitter: Option<f64>,
    transit: Option<f64>,
    epoch: Instant,
    reported: (u64, u64),
    /// Received and expected of streams that ended.
    past: (u64, u64),
    stream_received: u64,
}

/// A packet waits for a missing one before it no longer than this many others.
const REORDER: usize = 4;

/// What is kept of one call at most, unless it is taken in between.
const KEEP: Duration = Duration::from_secs(900);

/// Packets that wait to be decoded at most: about twenty seconds of speech that was not asked for.
const UNDECODED: usize = 1_024;

/// Room kept for what is heard next, samples: a long turn, not the longest ever.
const ROOM: usize = 480_000;

impl Recorder {
    /// Listens from `now` on to `codec`; Opus is decoded to `opus_rate`.
    ///
    /// # Errors
    /// `opus_rate` is not one of Opus' rates.
    pub fn new(
        now: Instant,
        codec: Codec,
        types: PayloadTypes,
        opus_rate: u32,
    ) -> Result<Recorder, crate::wire::codec::CodecError> {
        let decoder = Decoder::new(codec, opus_rate)?;
        let rate = decoder.rate();
        Ok(Recorder {
            types,
            decoder,
            opus_rate,
            heard: Heard {
                codec,
                rate,
                packets: Vec::new(),
                pcm: Vec::new(),
                digits: Vec::new(),
                counts: Counts::default(),
                until: now,
            },
            limit: KEEP.as_secs() as usize * rate as usize,
            stream: 0,
            ssrc: None,
            highest: None,
            first_sequence: 0,
            next: 0,
            waiting: BTreeMap::new(),
            undecoded: Vec::new(),
            digits: dtmf::Receiver::default(),
            jitter: None,
            transit: None,
            epoch: now,
            reported: (0, 0),
            past: (0, 0),
            stream_received: 0,
        })
    }

    /// Listens to another codec from here on (a new offer was answered). What was heard in a codec of another
    /// rate is dropped, for a recording has one rate; take it before.
    ///
    /// # Errors
    /// As [`Recorder::new`].
    pub fn change(&mut self, codec: Codec, types: PayloadTypes) -> Result<(), crate::wire::codec::CodecError> {
        if types == self.types && codec == self.heard.codec {
            return Ok(());
        }
        self.flush();
        self.decode();
        self.decoder = Decoder::new(codec, self.opus_rate)?;
        if self.decoder.rate() != self.heard.rate {
            self.heard.rate = self.decoder.rate();
            self.heard.pcm.clear();
            self.heard.packets.clear();
        }
        self.heard.codec = codec;
        self.types = types;
        self.begin_stream();
        Ok(())
    }

    /// Takes one packet that arrived at `now`.
    pub fn push(&mut self, now: Instant, packet: rtp::Packet) {
        self.heard.until = now;
        self.heard.counts.received += 1;
        self.heard.counts.octets += packet.payload.len() as u64;
        if self.ssrc != Some(packet.ssrc) {
            self.flush();
            self.begin_stream();
            self.ssrc = Some(packet.ssrc);
        }
        let (sequence, timestamp) = match self.highest {
            None => {
                let first = (i64::from(packet.sequence), i64::from(packet.timestamp));
                self.first_sequence = first.0;
                self.next = first.0;
                first
            }
            Some((sequence, timestamp)) => (
                sequence + i64::from(packet.sequence.wrapping_sub(sequence as u16) as i16),
                timestamp + i64::from(packet.timestamp.wrapping_sub(timestamp as u32) as i32),
            ),
        };
        self.stream_received += 1;
        match self.highest {
            Some((highest, _)) if sequence <= highest => {
                if self.waiting.contains_key(&sequence) || sequence == highest {
                    self.heard.counts.duplicates += 1;
                    return;
                }
                self.heard.counts.reordered += 1;
            }
            _ => self.highest = Some((sequence, timestamp)),
        }
        if packet.payload_type == self.types.audio {
            self.measure_jitter(now, timestamp);
        }
        if sequence < self.next {
            // Too late to be decoded in order; it counts as received and is not heard, as with a real listener.
            return;
        }
        let raw = Raw { arrived: now, packet };
        if sequence == self.next && self.waiting.is_empty() {
            self.place(sequence, raw);
        } else {
            self.waiting.insert(sequence, raw);
            self.drain();
        }
    }

    /// What was heard so far, up to `now`.
    pub fn heard(&mut self, now: Instant) -> &Heard {
        self.decode();
        self.heard.until = now;
        self.count_lost();
        &self.heard
    }

    /// Takes what was heard so far out, up to `now`; counts go on.
    pub fn take(&mut self, now: Instant) -> Heard {
        self.flush();
        self.decode();
        self.heard.until = now;
        self.count_lost();
        let heard = &mut self.heard;
        // The next turn is about as long: room for it at once, instead of by doubling.
        let (packets, samples) = (heard.packets.len(), heard.pcm.len().min(ROOM));
        Heard {
            packets: std::mem::replace(&mut heard.packets, Vec::with_capacity(packets)),
            pcm: std::mem::replace(&mut heard.pcm, Vec::with_capacity(samples)),
            digits: std::mem::take(&mut heard.digits),
            ..heard.clone()
        }
    }

    /// The report block about the stream heard, for RTCP; `None` before the first packet.
    pub fn block(&mut self) -> Option<rtp::Block> {
        let (highest, _) = self.highest?;
        let expected = self.past.1 + (highest - self.first_sequence + 1).max(0) as u64;
        let received = self.past.0 + self.stream_received;
        let (last_expected, last_received) = self.reported;
        self.reported = (expected, received);
        let expected_since = expected.saturating_sub(last_expected);
        let lost_since = expected_since.saturating_sub(received.saturating_sub(last_received));
        let fraction = (lost_since * 256).checked_div(expected_since).unwrap_or(0).min(255);
        Some(rtp::Block {
            ssrc: self.ssrc?,
            fraction_lost: fraction as u8,
            lost: (expected as i64 - received as i64).clamp(-0x80_0000, 0x7f_ffff) as i32,
            highest: highest as u32,
            jitter: (self.jitter.unwrap_or(0.0) * f64::from(self.heard.codec.clock_rate())) as u32,
            last_report: 0,
            delay: 0,
        })
    }

    fn begin_stream(&mut self) {
        if let Some((highest, _)) = self.highest.take() {
            self.past.0 += self.stream_received;
            self.past.1 += (highest - self.first_sequence + 1).max(0) as u64;
        }
        self.stream_received = 0;
        self.transit = None;
        self.ssrc = None;
        self.stream = self.stream.wrapping_add(1);
    }

    /// RFC 3550 section 6.4.1 and appendix A.8.
    fn measure_jitter(&mut self, now: Instant, timestamp: i64) {
        let arrival = now.saturating_duration_since(self.epoch).as_secs_f64();
        let transit = arrival - timestamp as f64 / f64::from(self.heard.codec.clock_rate());
        if let Some(last) = self.transit {
            let jitter = self.jitter.get_or_insert(0.0);
            *jitter += ((transit - last).abs() - *jitter) / 16.0;
            self.heard.counts.jitter = *jitter;
        }
        self.transit = Some(transit);
    }

    fn count_lost(&mut self) {
        let (expected, received) = match self.highest {
            Some((highest, _)) => {
                (self.past.1 + (highest - self.first_sequence + 1).max(0) as u64, self.past.0 + self.stream_received)
            }
            None => (self.past.1, self.past.0),
        };
        self.heard.counts.lost = expected.saturating_sub(received - self.heard.counts.duplicates.min(received));
    }

    /// Puts into place what is in order, and what has waited for a missing packet long enough.
    fn drain(&mut self) {
        while let Some((sequence, _)) = self.waiting.first_key_value() {
            if *sequence != self.next && self.waiting.len() < REORDER {
                return;
            }
            self.place_first();
        }
    }

    fn flush(&mut self) {
        while !self.waiting.is_empty() {
            self.place_first();
        }
    }

    fn place_first(&mut self) {
        if let Some((sequence, raw)) = self.waiting.pop_first() {
            self.place(sequence, raw);
        }
    }

    /// Takes a packet whose turn it is.
    fn place(&mut self, sequence: i64, Raw { arrived, packet }: Raw) {
        self.next = sequence + 1;
        if Some(packet.payload_type) == self.types.event {
            if let Some(digit) = self.digits.push(packet.timestamp, &packet.payload) {
                self.heard.digits.push(Digit { at: arrived, digit });
            }
            return;
        }
        if packet.payload_type != self.types.audio {
            self.heard.counts.undecodable += 1;
            return;
        }
        let near = self.highest.map_or(i64::from(packet.timestamp), |(_, timestamp)| timestamp);
        self.undecoded.push(Undecoded {
            packet: Packet {
                arrived,
                stream: self.stream,
                sequence,
                timestamp: near + i64::from(packet.timestamp.wrapping_sub(near as u32) as i32),
                marker: packet.marker,
                start: 0,
                samples: 0,
            },
            payload: packet.payload,
        });
        if self.undecoded.len() >= UNDECODED {
            self.decode();
        }
    }

    /// Decodes what has not been yet.
    fn decode(&mut self) {
        let mut undecoded = std::mem::take(&mut self.undecoded);
        for Undecoded { packet, payload } in undecoded.drain(..) {
            let start = self.heard.pcm.len();
            if start >= self.limit {
                continue;
            }
            match self.decoder.decode(&payload, &mut self.heard.pcm) {
                Ok(samples) => self.heard.packets.push(Packet { start, samples, ..packet }),
                Err(_) => self.heard.counts.undecodable += 1,
            }
        }
        // Its room serves the next packets.
        self.undecoded = undecoded;
    }
}

/// A packet of silence or speech to hand to [`Recorder::push`], for tests and for callers that build their own.
pub fn packet(payload_type: u8, sequence: u16, timestamp: u32, payload: impl Into<Bytes>) -> rtp::Packet {
    rtp::Packet { payload_type, marker: false, sequence, timestamp, ssrc: 1, payload: payload.into() }
}

#[cfg(test)]
mod tests;
