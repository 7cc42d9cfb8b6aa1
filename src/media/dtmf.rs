//! Digits: RFC 4733 telephone events in and out, and audible tones where events were not agreed.

use std::collections::VecDeque;

use bytes::Bytes;

use crate::audio::{FRAME_SAMPLES, RATE};

/// How long a digit sounds: 5 frames.
const TONE_FRAMES: u16 = 5;
/// Quiet between digits: 3 frames, in which the end packet is repeated.
const GAP_FRAMES: u16 = 3;
/// What `w` and a comma wait.
const PAUSE_FRAMES: u16 = 25;

/// Whether `c` can stand in a dial string.
pub fn is_dialable(c: char) -> bool {
    event_of(c).is_some() || is_pause(c)
}

fn is_pause(c: char) -> bool {
    matches!(c, 'w' | 'W' | ',')
}

/// The event code of a key (RFC 4733 section 3.2).
fn event_of(c: char) -> Option<u8> {
    match c.to_ascii_uppercase() {
        c @ '0'..='9' => Some(c as u8 - b'0'),
        '*' => Some(10),
        '#' => Some(11),
        c @ 'A'..='D' => Some(c as u8 - b'A' + 12),
        _ => None,
    }
}

/// The key of an event code.
fn key_of(event: u8) -> Option<char> {
    b"0123456789*#ABCD".get(usize::from(event)).map(|c| char::from(*c))
}

/// Finds digits in a stream of telephone-event packets. An event is many packets, the last one sent three
/// times; all share a timestamp. The digit counts when it begins, so that barge-in does not wait for the key
/// to be released, and a lost beginning counts at the first packet that arrives.
#[derive(Debug, Default)]
pub struct Receiver {
    current: Option<(u8, u32)>,
}

impl Receiver {
    /// Takes one packet; returns the digit that began with it. Anything malformed is ignored.
    pub fn push(&mut self, timestamp: u32, payload: &[u8]) -> Option<char> {
        let [event, _flags, _, _, ..] = *payload else { return None };
        let key = key_of(event)?;
        if self.current == Some((event, timestamp)) {
            return None;
        }
        // A reordered packet of the event before must not sound again: half the clock's circle is "before".
        // Segments of a long key press (section 2.5.1.3) begin anew without the marker; the machine that
        // holds a key for 8 s hears it twice, which is what most receivers do.
        if let Some((_, latest)) = self.current
            && timestamp.wrapping_sub(latest) > u32::MAX / 2
        {
            return None;
        }
        self.current = Some((event, timestamp));
        Some(key)
    }
}

/// What one 20 ms slot of a dial string carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Slot {
    /// An event packet. All packets of an event carry the timestamp of the slot with `first`.
    Event {
        /// The event begins here: marker bit set, its timestamp is this slot's.
        first: bool,
        /// The four bytes of RFC 4733 section 2.3.
        payload: Bytes,
    },
    /// Nothing.
    Quiet,
}

/// Turns dial strings into slots.
#[derive(Debug)]
pub struct Sender {
    clock_rate: u32,
    slots: VecDeque<Slot>,
}

impl Sender {
    /// For events whose durations count in `clock_rate` units per second.
    pub fn new(clock_rate: u32) -> Self {
        Self { clock_rate, slots: VecDeque::new() }
    }

    /// Appends `digits`; characters that are not dialable are skipped.
    pub fn dial(&mut self, digits: &str) {
        for c in digits.chars() {
            if is_pause(c) {
                self.slots.extend(std::iter::repeat_n(Slot::Quiet, usize::from(PAUSE_FRAMES)));
            } else if let Some(event) = event_of(c) {
                self.digit(event);
            }
        }
    }

    /// The next slot, while there is one.
    pub fn pop(&mut self) -> Option<Slot> {
        self.slots.pop_front()
    }

    /// Whether slots wait.
    pub fn is_idle(&self) -> bool {
        self.slots.is_empty()
    }

    /// Forgets what has not begun; the event that sounds is ended properly.
    pub fn clear(&mut self) {
        let next = self.slots.iter().position(|slot| matches!(slot, Slot::Event { first: true, .. }));
        if let Some(next) = next {
            self.slots.truncate(next);
        }
    }

    fn digit(&mut self, event: u8) {
        // The duration field has 16 bits: 5 frames at 48 kHz are 4,800, far below.
        let ticks = self.clock_rate / 50;
        let payload = |frames: u16, end: bool| {
            let duration = (u32::from(frames) * ticks).min(u32::from(u16::MAX)) as u16;
            // Volume 10 dBm0 below the reference level, the common choice.
            let flags = u8::from(end) << 7 | 10;
            let [high, low] = duration.to_be_bytes();
            Bytes::copy_from_slice(&[event, flags, high, low])
        };
        for frame in 0..TONE_FRAMES {
            self.slots.push_back(Slot::Event { first: frame == 0, payload: payload(frame + 1, false) });
        }
        // The end is sent three times, as one loss must not leave the key pressed (section 2.5.1.4).
        for _ in 0..GAP_FRAMES {
            self.slots.push_back(Slot::Event { first: false, payload: payload(TONE_FRAMES, true) });
        }
    }
}

/// `digits` as audible tone pairs (ITU-T Q.23) at [`RATE`], for peers that agreed on no events.
pub fn tones(digits: &str) -> Vec<f32> {
    const ROWS: [f32; 4] = [697.0, 770.0, 852.0, 941.0];
    const COLUMNS: [f32; 4] = [1_209.0, 1_336.0, 1_477.0, 1_633.0];
    let mut pcm = Vec::new();
    for c in digits.chars() {
        let Some(place) = "123A456B789C*0#D".find(c.to_ascii_uppercase()) else {
            if is_pause(c) {
                pcm.resize(pcm.len() + FRAME_SAMPLES * usize::from(PAUSE_FRAMES), 0.0);
            }
            continue;
        };
        let (row, column) = (ROWS[place / 4], COLUMNS[place % 4]);
        let wave = |n: usize, hertz: f32| (std::f32::consts::TAU * hertz * n as f32 / RATE as f32).sin();
        pcm.extend((0..FRAME_SAMPLES * usize::from(TONE_FRAMES)).map(|n| 0.25 * (wave(n, row) + wave(n, column))));
        pcm.resize(pcm.len() + FRAME_SAMPLES * usize::from(GAP_FRAMES), 0.0);
    }
    pcm
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_dialled_is_received_once_each() {
        let mut sender = Sender::new(8_000);
        sender.dial("159#*0D1,1");
        let mut receiver = Receiver::default();
        let (mut heard, mut timestamp, mut begun) = (String::new(), 4_294_967_000u32, 0);
        while let Some(slot) = sender.pop() {
            if let Slot::Event { first, payload } = slot {
                begun = if first { timestamp } else { begun };
                heard.extend(receiver.push(begun, &payload));
            }
            timestamp = timestamp.wrapping_add(160);
        }
        assert_eq!(heard, "159#*0D11");
    }

    #[test]
    fn an_event_grows_and_ends_three_times() {
        let mut sender = Sender::new(8_000);
        sender.dial("5");
        let payloads = std::iter::from_fn(|| sender.pop())
            .map(|slot| match slot {
                Slot::Event { payload, .. } => {
                    (payload[0], payload[1] >> 7, u16::from_be_bytes([payload[2], payload[3]]))
                }
                Slot::Quiet => unreachable!("a digit has no quiet slot"),
            })
            .collect::<Vec<_>>();
        let expected =
            [(5, 0, 160), (5, 0, 320), (5, 0, 480), (5, 0, 640), (5, 0, 800), (5, 1, 800), (5, 1, 800), (5, 1, 800)];
        assert_eq!(payloads, expected);
    }

    #[test]
    fn lost_and_reordered_packets_give_one_digit() {
        let mut receiver = Receiver::default();
        assert_eq!(receiver.push(1_000, &[1, 0x8a, 3, 0x20]), Some('1'));
        assert_eq!(receiver.push(3_000, &[2, 10, 0, 160]), Some('2'));
        assert_eq!(receiver.push(1_000, &[1, 0x8a, 3, 0x20]), None);
        assert_eq!(receiver.push(3_000, &[2]), None);
        assert_eq!(receiver.push(5_000, &[200, 10, 0, 160]), None);
    }

    #[test]
    fn clearing_lets_the_sounding_digit_end() {
        let mut sender = Sender::new(8_000);
        sender.dial("12");
        sender.pop();
        sender.clear();
        assert_eq!(sender.slots.len(), 7);
    }

    #[test]
    fn a_tone_has_its_two_frequencies() {
        let pcm = tones("5");
        let power = |hertz: f32| {
            let wave = |n: usize, s: f32| s * std::f32::consts::TAU * hertz * n as f32 / RATE as f32;
            let (re, im) = pcm[..2_400]
                .iter()
                .enumerate()
                .fold((0.0, 0.0), |(re, im), (n, s)| (re + s * wave(n, 1.0).cos(), im + s * wave(n, 1.0).sin()));
            f32::hypot(re, im) / 2_400.0
        };
        assert!(power(770.0) > 0.1 && power(1_336.0) > 0.1);
        assert!(power(697.0) < 0.02 && power(1_477.0) < 0.02);
    }
}
