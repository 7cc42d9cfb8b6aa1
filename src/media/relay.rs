//! Sound of one leg on its way to another: 20 ms frames between two clocks.
//!
//! Owns what waits and how much of it there should be. Never decodes, encodes, or reads a clock: frames go in when the
//! one leg hears them, and come out when the other has a packet to fill.
//!
//! # Why
//! What a leg hears passes its own buffer at once ([`super::jitter`]: a recogniser wants it early), so that the unevenness
//! of its network ends here. The queue holds as many frames as were lately needed: one more after each time that it ran
//! dry, one fewer after ten seconds in which it did not. A frame that is always to spare, because the one clock is faster
//! than the other, is dropped where the speaker pauses.

use std::collections::VecDeque;

use super::decode;
use super::encode::CodecError;
use super::resample::Converter;
use crate::audio::{FRAME_SAMPLES, RATE, from_i16};

/// 20 ms at [`RATE`].
pub type Sound = [f32; FRAME_SAMPLES];

/// Fewest frames that wait when sound begins: packets of 20 ms on a good network need no more.
const LEAST: usize = 2;
/// Most: 200 ms are delay enough.
const MOST: usize = 10;
/// Frames beyond which the oldest are dropped: the other side takes none, as when it is on hold.
const FULL: usize = MOST + 5;
/// Frames after which it is looked whether fewer would do: two seconds.
const WINDOW: u32 = 100;
/// Windows without a hole after which fewer are tried: ten seconds.
const STEADY: u32 = 5;
/// Mean square below which a frame is a pause: -50 dB of full scale.
const PAUSE: f32 = 1e-5;

/// The queue of one direction.
#[derive(Debug)]
pub struct Relay {
    frames: VecDeque<Sound>,
    /// Frames to wait for before sound begins.
    target: usize,
    /// Waiting for them.
    filling: bool,
    /// The last frame that came out: a hole begins with its echo.
    last: Option<Sound>,
    /// The last hole made the target longer. Taken back where it turns out that the speaker was silent.
    raised: bool,
    /// Fewest frames that waited in this window, and how many frames came out in it.
    spare: (usize, u32),
    /// Windows without a hole.
    steady: u32,
    /// Windows in a row in which a frame was to spare.
    surplus: u32,
    wider: Converter,
    /// Frames dropped because the other side took none.
    pub dropped: u64,
}

impl Relay {
    /// An empty queue.
    ///
    /// # Errors
    /// The resampler refuses, which it does not.
    pub fn new() -> Result<Self, CodecError> {
        Ok(Self {
            frames: VecDeque::with_capacity(FULL + 1),
            target: LEAST,
            filling: true,
            last: None,
            raised: false,
            spare: (usize::MAX, 0),
            steady: 0,
            surplus: 0,
            wider: Converter::new(decode::RATE, RATE)?,
            dropped: 0,
        })
    }

    /// Takes a frame as it was heard, at [`decode::RATE`].
    pub fn push_heard(&mut self, frame: &[i16; decode::FRAME]) {
        let mut narrow = [0.0; decode::FRAME];
        for (to, from) in narrow.iter_mut().zip(frame) {
            *to = from_i16(*from);
        }
        let mut wide = [0.0; FRAME_SAMPLES];
        self.wider.frame(&narrow, &mut wide);
        self.push(wide);
    }

    /// Takes a frame.
    pub fn push(&mut self, frame: Sound) {
        self.raised = false;
        self.frames.push_back(frame);
        while self.frames.len() > FULL {
            // overflow: drops the oldest (counted): late sound is worse than none
            self.frames.pop_front();
            self.dropped += 1;
        }
    }

    /// The speaker chose to send nothing: what ran dry was no hole.
    pub fn silence(&mut self) {
        if std::mem::take(&mut self.raised) {
            self.target = (self.target - 1).max(LEAST);
        }
    }

    /// The next 20 ms; `None`: nothing sounds.
    pub fn pop(&mut self) -> Option<Sound> {
        if self.filling {
            if self.frames.len() < self.target {
                return None;
            }
            self.filling = false;
        }
        self.thin_out();
        match self.frames.pop_front() {
            Some(frame) => {
                self.observe();
                self.last = Some(frame);
                Some(frame)
            }
            None => {
                self.filling = true;
                self.raised = self.target < MOST;
                self.target = (self.target + 1).min(MOST);
                (self.spare, self.steady, self.surplus) = ((usize::MAX, 0), 0, 0);
                // Its echo dies away within the frame, which is heard less than a break.
                let mut echo = self.last.take()?;
                for (n, sample) in echo.iter_mut().enumerate() {
                    *sample *= 1.0 - n as f32 / FRAME_SAMPLES as f32;
                }
                Some(echo)
            }
        }
    }

    /// Frames that wait.
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Whether none does.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    fn observe(&mut self) {
        let (fewest, popped) = &mut self.spare;
        *fewest = (*fewest).min(self.frames.len());
        *popped += 1;
        if *popped < WINDOW {
            return;
        }
        self.surplus = if *fewest >= self.target { self.surplus + 1 } else { 0 };
        self.spare = (usize::MAX, 0);
        self.steady += 1;
        if self.steady >= STEADY {
            self.steady = 0;
            self.target = (self.target - 1).max(LEAST);
        }
    }

    /// Drops the frame that is to spare: in a pause, or wherever it is after ten seconds in which there was none.
    fn thin_out(&mut self) {
        let quiet = |frame: &Sound| frame.iter().map(|s| s * s).sum::<f32>() < PAUSE * FRAME_SAMPLES as f32;
        let due = self.surplus >= STEADY || self.surplus > 0 && self.frames.front().is_some_and(quiet);
        if due && self.frames.len() > self.target {
            self.surplus = 0;
            self.frames.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(level: f32) -> Sound {
        [level; FRAME_SAMPLES]
    }

    /// Plays `seconds` of frames that arrive every `interval_us`, each `late_us(n)` after its time, to a clock of 20 ms;
    /// what came out: the level of each frame, 0 for none.
    fn played(seconds: u64, interval_us: u64, late_us: impl Fn(u64) -> u64, level: impl Fn(u64) -> f32) -> Vec<f32> {
        let mut relay = Relay::new().expect("a queue");
        let mut heard = Vec::new();
        let mut next = 0;
        for slot in 0..seconds * 50 {
            while next * interval_us + late_us(next) <= slot * 20_000 {
                relay.push(frame(level(next)));
                next += 1;
            }
            heard.push(relay.pop().map_or(0.0, |sound| sound[0]));
        }
        assert!(relay.len() <= MOST, "{relay:?}");
        heard
    }

    fn holes(heard: &[f32]) -> usize {
        heard.iter().filter(|level| **level == 0.0).count()
    }

    #[test]
    fn an_even_stream_passes_after_40_ms_and_whole() {
        let heard = played(60, 20_000, |_| 7_000, |n| 1.0 + n as f32);
        assert_eq!(heard[..3], [0.0, 0.0, 1.0], "{:?}", &heard[..5]);
        assert!(heard[2..].windows(2).all(|pair| pair[1] == pair[0] + 1.0), "every frame, in order");
    }

    #[test]
    fn a_network_that_jitters_costs_a_few_holes_and_then_delay() {
        // Up to 90 ms late, in an order that repeats late; jitter of the leg before gives them in order.
        let late = |n: u64| [0, 60_000, 40_000, 20_000, 0, 90_000, 70_000, 50_000, 30_000, 10_000, 0][n as usize % 11];
        let heard = played(60, 20_000, late, |_| 1.0);
        let settled = &heard[heard.len() / 2..];
        assert!(holes(&heard) < 80, "{}", holes(&heard));
        assert!(holes(settled) <= 20, "now and then a shorter queue is tried: {}", holes(settled));
        assert!(holes(settled) * 50 <= settled.len(), "under 2 %");
    }

    #[test]
    fn a_clock_that_is_fast_makes_no_queue_and_a_slow_one_no_more_than_its_holes() {
        // 0.2 %, far more than telephones are off: over ten minutes 60 frames too many or too few.
        let talk = |n: u64| if n / 50 % 5 == 4 { 0.0001 } else { 0.5 };
        let fast = played(600, 19_960, |_| 0, talk);
        assert_eq!(holes(&fast[10..]), 0, "nothing is missing where there is too much");
        let loud = fast.iter().filter(|level| **level > 0.1).count();
        let expected = fast.len() * 4 / 5;
        assert!(loud + 30 >= expected, "pauses were shortened, not words: {loud} of {expected}");
        let slow = played(600, 20_040, |_| 0, talk);
        assert!(holes(&slow[10..]) <= 60 * 4, "{}", holes(&slow[10..]));
    }

    #[test]
    fn silence_that_was_meant_makes_no_delay_and_a_side_that_takes_nothing_no_queue() {
        let mut relay = Relay::new().expect("a queue");
        for _ in 0..20 {
            relay.push(frame(0.5));
            relay.push(frame(0.5));
            assert!(relay.pop().is_some() && relay.pop().is_some());
            // A pause: the speaker's telephone sends nothing, and says so with its next packet.
            assert!(relay.pop().is_some_and(|echo| echo[0] == 0.5 && echo[FRAME_SAMPLES - 1] < 0.01));
            assert!(relay.pop().is_none());
            relay.silence();
        }
        assert_eq!(relay.target, LEAST);
        for _ in 0..100 {
            relay.push(frame(0.5));
        }
        assert_eq!((relay.len(), relay.dropped), (FULL, 100 - FULL as u64));
    }

    #[test]
    fn what_was_heard_at_16_khz_keeps_its_pitch() {
        let mut relay = Relay::new().expect("a queue");
        let mut heard = Vec::new();
        for n in 0..50 {
            let sample = |k: usize| {
                (8_000.0 * ((n * decode::FRAME + k) as f32 * 440.0 * std::f32::consts::TAU / 16_000.0).sin()) as i16
            };
            relay.push_heard(&std::array::from_fn(sample));
            heard.extend(relay.pop().into_iter().flatten());
        }
        let second = &heard[heard.len() - 12_000..];
        let crossings = second.windows(2).filter(|pair| pair[0] < 0.0 && pair[1] >= 0.0).count();
        assert!((218..=222).contains(&crossings), "440 Hz for half a second: {crossings}");
    }
}
