//! What a caller says, frame by frame: speech, digits and the silence between.
//!
//! A machine without I/O: [`Speaker::poll`] gives the packet that is due, [`Speaker::deadline`] when the next one
//! is. Frames leave on a fixed grid of 20 ms; after a long stall the grid is moved rather than made up for.

use std::collections::VecDeque;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::oneshot;

use crate::wire::codec::{Codec, CodecError, Encoder};
use crate::wire::dtmf;
use crate::wire::rtp;

const FRAME: Duration = Duration::from_millis(20);
/// A digit sounds this many frames, ends with three packets, and is followed by a pause (RFC 4733 section 2.5.1.2).
const DIGIT_FRAMES: u16 = 6;
const DIGIT_PAUSE: u8 = 3;

/// What to send while nothing is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Idle {
    /// A packet of silence every frame, as telephones do.
    Continuous,
    /// One packet of silence each time this passes, to keep the path open.
    KeepAlive(Duration),
}

/// The sending half of a call's audio.
///
/// Why this struct is large: one RTP stream with its clock, its numbers and what waits to be sent.
pub struct Speaker {
    codec: Codec,
    /// Made when something is said: most callers only listen, and an encoder takes a while to set up.
    encoder: Option<Encoder>,
    payload_type: u8,
    event: Option<u8>,
    frame_ticks: u32,
    ssrc: u32,
    sequence: u16,
    timestamp: u32,
    idle: Idle,
    last_sent: Option<Instant>,
    due: Instant,
    queue: VecDeque<Item>,
    /// A frame of silence, encoded once: most of what a caller sends, and at no cost.
    silence: Bytes,
    sends: bool,
    /// Packets and payload octets sent.
    sent: (u32, u32),
    speaking: bool,
}

enum Item {
    Speech { pcm: Vec<i16>, at: usize, began: Option<oneshot::Sender<Instant>> },
    Digit { digit: char, frame: u16, start: u32, done: Option<oneshot::Sender<Instant>> },
    Pause(u8),
}

impl Speaker {
    /// Speaks `codec` from `now` on.
    ///
    /// # Errors
    /// The encoder could not start.
    pub fn new(
        now: Instant,
        codec: Codec,
        payload_type: u8,
        event: Option<u8>,
        idle: Idle,
    ) -> Result<Speaker, CodecError> {
        Ok(Speaker {
            codec,
            encoder: None,
            payload_type,
            event,
            frame_ticks: codec.frame_ticks(),
            ssrc: rand::random(),
            sequence: rand::random(),
            timestamp: rand::random(),
            idle,
            last_sent: None,
            due: now,
            queue: VecDeque::new(),
            silence: silence(codec)?,
            sends: true,
            sent: (0, 0),
            speaking: false,
        })
    }

    /// Samples per second that [`Speaker::say`] takes.
    pub fn rate(&self) -> u32 {
        Encoder::rate_of(self.codec)
    }

    /// The sender's name on the wire.
    pub fn ssrc(&self) -> u32 {
        self.ssrc
    }

    /// Says `pcm` behind what is queued; tells when its first frame leaves.
    pub fn say(&mut self, pcm: Vec<i16>, began: oneshot::Sender<Instant>) {
        self.queue.push_back(Item::Speech { pcm, at: 0, began: Some(began) });
    }

    /// Presses `digits` behind what is queued; tells when the last one is released. Without RFC 4733, or when no
    /// digit is among them, `done` is dropped.
    pub fn press(&mut self, digits: &str, done: oneshot::Sender<Instant>) {
        if self.event.is_none() {
            return;
        }
        let mut done = Some(done);
        let known: Vec<char> = digits.chars().filter(|d| dtmf::event_of(*d).is_some()).collect();
        for (n, digit) in known.iter().enumerate() {
            let done = if n + 1 == known.len() { done.take() } else { None };
            self.queue.push_back(Item::Digit { digit: *digit, frame: 0, start: 0, done });
            self.queue.push_back(Item::Pause(DIGIT_PAUSE));
        }
    }

    /// Forgets what is not yet said.
    pub fn stop(&mut self) {
        self.queue.clear();
    }

    /// Whether anything is sent at all (not while held).
    pub fn set_sends(&mut self, sends: bool) {
        self.sends = sends;
    }

    /// When the next frame is due: at once for what was just queued, and not before the next sign of life while there
    /// is nothing to say and silence is not sent.
    pub fn deadline(&self) -> Instant {
        match (self.idle, self.last_sent) {
            (Idle::KeepAlive(every), Some(sent)) if self.queue.is_empty() => self.due.max(sent + every),
            _ => self.due,
        }
    }

    /// The packets due at `now`, if any (the end of a digit is sent three times).
    pub fn poll(&mut self, now: Instant) -> Vec<rtp::Packet> {
        if now < self.due {
            return Vec::new();
        }
        // More than five frames late: a caller that was starved of CPU does not send a burst.
        // Nor does one that slept while it had nothing to say.
        let late = now - self.due;
        let slept = matches!(self.idle, Idle::KeepAlive(_)) && !self.speaking && late >= FRAME;
        if late > FRAME * 5 || slept {
            let missed = (late.as_nanos() / FRAME.as_nanos()) as u32;
            self.due += FRAME * missed;
            self.timestamp = self.timestamp.wrapping_add(self.frame_ticks.wrapping_mul(missed));
        }
        let packets = self.frame(now);
        self.timestamp = self.timestamp.wrapping_add(self.frame_ticks);
        self.due += FRAME;
        if !self.sends {
            return Vec::new();
        }
        for packet in &packets {
            self.sent.0 = self.sent.0.wrapping_add(1);
            self.sent.1 = self.sent.1.wrapping_add(packet.payload.len() as u32);
            self.last_sent = Some(now);
        }
        packets
    }

    /// The sender's part of an RTCP report; `None` before the first packet.
    pub fn report(&self, ntp: u64) -> Option<rtp::SenderInfo> {
        self.last_sent.map(|_| rtp::SenderInfo { ntp, rtp: self.timestamp, packets: self.sent.0, octets: self.sent.1 })
    }

    fn frame(&mut self, now: Instant) -> Vec<rtp::Packet> {
        match self.queue.front_mut() {
            None => self.idle_frame(now),
            Some(Item::Pause(left)) => {
                *left = left.saturating_sub(1);
                if *left == 0 {
                    self.queue.pop_front();
                }
                self.idle_frame(now)
            }
            Some(Item::Speech { pcm, at, began }) => {
                let size = Encoder::rate_of(self.codec) as usize / 50;
                let mut frame = pcm.get(*at..(*at + size).min(pcm.len())).unwrap_or_default().to_vec();
                frame.resize(size, 0);
                *at += size;
                if let Some(began) = began.take() {
                    // The waiting task may have gone.
                    let _ = began.send(now);
                }
                if *at >= pcm.len() {
                    self.queue.pop_front();
                }
                let marker = !std::mem::replace(&mut self.speaking, true);
                if self.encoder.is_none() {
                    // `silence` has shown that there is such an encoder.
                    self.encoder = Encoder::new(self.codec).ok();
                }
                let payload = self.encoder.as_mut().and_then(|encoder| encoder.encode(&frame).ok());
                payload.map(|payload| vec![self.packet(marker, payload)]).unwrap_or_default()
            }
            Some(Item::Digit { digit, frame, start, done }) => {
                if *frame == 0 {
                    *start = self.timestamp;
                }
                *frame += 1;
                let (digit, frame, start) = (*digit, *frame, *start);
                let end = frame >= DIGIT_FRAMES;
                if end {
                    if let Some(done) = done.take() {
                        let _ = done.send(now);
                    }
                    self.queue.pop_front();
                }
                let duration = frame.saturating_mul(self.frame_ticks as u16);
                let Some(payload) = (dtmf::Event { digit, end, duration }).to_bytes() else { return Vec::new() };
                (0..if end { 3 } else { 1 })
                    .map(|_| {
                        let packet = self.packet(frame == 1, payload.to_vec());
                        rtp::Packet { payload_type: self.event.unwrap_or(101), timestamp: start, ..packet }
                    })
                    .collect()
            }
        }
    }

    fn idle_frame(&mut self, now: Instant) -> Vec<rtp::Packet> {
        self.speaking = false;
        if let Idle::KeepAlive(every) = self.idle
            && self.last_sent.is_some_and(|sent| now.saturating_duration_since(sent) < every)
        {
            return Vec::new();
        }
        vec![self.packet(false, self.silence.clone())]
    }

    fn packet(&mut self, marker: bool, payload: impl Into<Bytes>) -> rtp::Packet {
        self.sequence = self.sequence.wrapping_add(1);
        rtp::Packet {
            payload_type: self.payload_type,
            marker,
            sequence: self.sequence,
            timestamp: self.timestamp,
            ssrc: self.ssrc,
            payload: payload.into(),
        }
    }
}

/// What an encoder that has settled says of silence; asked once for each codec.
fn silence(codec: Codec) -> Result<Bytes, CodecError> {
    static KNOWN: [OnceLock<Bytes>; Codec::ALL.len()] = [const { OnceLock::new() }; Codec::ALL.len()];
    let known = Codec::ALL.iter().position(|c| *c == codec).and_then(|n| KNOWN.get(n));
    if let Some(known) = known.and_then(OnceLock::get) {
        return Ok(known.clone());
    }
    let mut encoder = Encoder::new(codec)?;
    let frame = vec![0; encoder.frame()];
    for _ in 0..9 {
        encoder.encode(&frame)?;
    }
    let silence = Bytes::from(encoder.encode(&frame)?);
    Ok(known.map_or(silence.clone(), |known| known.get_or_init(|| silence).clone()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    fn run(speaker: &mut Speaker, start: Instant, frames: u32) -> Vec<rtp::Packet> {
        (0..frames).flat_map(|n| speaker.poll(start + FRAME * n)).collect()
    }

    #[test]
    fn speech_takes_the_place_of_silence_without_a_break_in_the_stream() {
        let start = clock::now();
        let mut speaker = Speaker::new(start, Codec::Pcmu, 0, None, Idle::Continuous).unwrap();
        let before = run(&mut speaker, start, 3);
        let (began, when) = oneshot::channel();
        speaker.say(vec![8_000; 170], began);
        let after = run(&mut speaker, start + FRAME * 3, 3);
        assert_eq!(when.blocking_recv(), Ok(start + FRAME * 3));
        let all: Vec<_> = before.iter().chain(&after).collect();
        assert_eq!(all.len(), 6);
        for pair in all.windows(2) {
            assert_eq!(pair[1].sequence, pair[0].sequence.wrapping_add(1));
            assert_eq!(pair[1].timestamp, pair[0].timestamp.wrapping_add(160));
        }
        assert_eq!(all.iter().map(|p| p.marker).collect::<Vec<_>>(), [false, false, false, true, false, false]);
    }

    #[test]
    fn a_digit_is_six_frames_of_one_timestamp_and_three_ends() {
        let start = clock::now();
        let mut speaker = Speaker::new(start, Codec::Pcmu, 0, Some(101), Idle::Continuous).unwrap();
        let (done, when) = oneshot::channel();
        speaker.press("x1", done);
        let events: Vec<_> = run(&mut speaker, start, 12).into_iter().filter(|p| p.payload_type == 101).collect();
        assert_eq!(when.blocking_recv(), Ok(start + FRAME * 5));
        assert_eq!(events.len(), 8);
        assert!(events.iter().all(|p| p.timestamp == events[0].timestamp));
        let ends = events.iter().filter_map(|p| dtmf::Event::parse(&p.payload)).filter(|e| e.end);
        assert_eq!(ends.map(|e| (e.digit, e.duration)).collect::<Vec<_>>(), [('1', 960); 3]);
    }

    #[test]
    fn keep_alive_sends_now_and_then() {
        let start = clock::now();
        let idle = Idle::KeepAlive(Duration::from_millis(100));
        let mut speaker = Speaker::new(start, Codec::Opus, 111, None, idle).unwrap();
        assert_eq!(run(&mut speaker, start, 20).len(), 4);
        // In between no task need be woken, unless there is something to say.
        assert!(speaker.deadline() >= start + Duration::from_millis(300 + 100));
        let (began, _) = oneshot::channel();
        speaker.say(vec![0; 960], began);
        assert!(speaker.deadline() <= start + FRAME * 20);
        assert_eq!(speaker.poll(start + FRAME * 24).len(), 1);
        assert_eq!(speaker.deadline(), start + FRAME * 25, "no burst");
    }

    #[test]
    fn a_starved_speaker_does_not_burst() {
        let start = clock::now();
        let mut speaker = Speaker::new(start, Codec::Pcmu, 0, None, Idle::Continuous).unwrap();
        let first = speaker.poll(start);
        let next = speaker.poll(start + FRAME * 50);
        assert_eq!((first.len(), next.len()), (1, 1));
        assert_eq!(next[0].timestamp.wrapping_sub(first[0].timestamp), 160 * 50);
        assert!(speaker.deadline() > start + FRAME * 50);
    }
}
