//! Our own voice, as it comes back from the other side: from which level on a caller's sound is not an echo.
//!
//! Owns what was learned of one line. Compares levels only: a canceller would need the delay to the sample, and telephones
//! and browsers have one already; what they leave is quieter than what was sent.
//!
//! # Why
//! A fixed threshold is deaf to quiet callers or interrupts itself. So a frame counts as the caller's where it is louder
//! than the echo can be: what was sent of late, less what the line takes away. The line is taken for a bad one at first;
//! where little comes back while we speak and nobody else does, the threshold falls with it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The longest way there and back: jitter buffers of both sides, and a satellite.
const REACH: Duration = Duration::from_millis(600);
/// Share of the energy that comes back of what is sent, before anything was learned: -15 dB.
const FIRST: f32 = 0.031_6;
/// The least that is assumed: -40 dB.
const LEAST: f32 = 0.000_1;
/// The most: -9 dB. A line that returns more is no telephone, and its caller could not be heard at all.
const MOST: f32 = 0.126;
/// How far above the expected echo a caller must be: 4 dB, as frames of sender and listener do not coincide.
const MARGIN: f32 = 2.5;
/// Frames of 20 ms after which what was learned counts.
const WINDOW: u32 = 50;
/// How much the expectation falls in one window without a louder echo: 6 dB.
const FALL: f32 = 0.25;

/// Levels of what is sent on one line and of what comes back.
#[derive(Debug)]
pub struct EchoGuard {
    /// Mean squares of frames that left, and when; each louder than all behind it.
    sent: VecDeque<(Instant, f32)>,
    gain: f32,
    /// The largest share seen in this window, and its frames.
    seen: (f32, u32),
}

impl Default for EchoGuard {
    fn default() -> Self {
        Self { sent: VecDeque::new(), gain: FIRST, seen: (0.0, 0) }
    }
}

impl EchoGuard {
    /// A frame of speech with this mean square leaves.
    pub fn sent(&mut self, now: Instant, energy: f32) {
        while self.sent.back().is_some_and(|(_, quieter)| *quieter <= energy) {
            self.sent.pop_back();
        }
        self.sent.push_back((now, energy));
    }

    /// The mean square up to which a caller's frame may be our own voice; 0 where nothing was sent of late.
    pub fn floor(&mut self, now: Instant) -> f32 {
        self.loudest(now) * self.gain * MARGIN
    }

    /// A caller's frame with this mean square came, and nobody counts as speaking.
    pub fn learn(&mut self, now: Instant, energy: f32) {
        let loudest = self.loudest(now);
        // What is louder than an echo is somebody; what is next to nothing returns nothing that matters.
        if loudest < 1e-6 || energy > loudest * self.gain * MARGIN {
            return;
        }
        let (most, frames) = self.seen;
        self.seen = (most.max(energy / loudest), frames + 1);
        if self.seen.1 >= WINDOW {
            self.gain = self.seen.0.max(self.gain * FALL).clamp(LEAST, MOST);
            self.seen = (0.0, 0);
        }
    }

    fn loudest(&mut self, now: Instant) -> f32 {
        while self.sent.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) > REACH) {
            self.sent.pop_front();
        }
        self.sent.front().map_or(0.0, |(_, energy)| *energy)
    }
}

/// The mean square of samples in -1..=1.
pub fn energy(pcm: impl ExactSizeIterator<Item = f32>) -> f32 {
    let count = pcm.len().max(1) as f32;
    pcm.map(|sample| sample * sample).sum::<f32>() / count
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    const FRAME: Duration = Duration::from_millis(20);

    /// Speech and pauses of ours for so many frames; the caller's side returns `echo` of it 120 ms later.
    fn speak(guard: &mut EchoGuard, now: &mut Instant, frames: usize, echo: f32) -> usize {
        let level = |n: usize| if n % 20 < 15 { 0.01 * (1.0 + (n % 5) as f32 / 5.0) } else { 1e-7 };
        let mut over = 0;
        for n in 0..frames {
            *now += FRAME;
            guard.sent(*now, level(n));
            let back = echo * if n < 6 { 0.0 } else { level(n - 6) };
            over += usize::from(back > guard.floor(*now));
            guard.learn(*now, back);
        }
        over
    }

    #[test]
    fn an_echo_of_15_db_less_is_never_a_caller_and_a_caller_is() {
        let (mut guard, mut now) = (EchoGuard::default(), clock::now());
        assert_eq!(speak(&mut guard, &mut now, 1_000, 0.031_6), 0);
        // As loud as we are.
        assert!(0.01 > guard.floor(now));
    }

    #[test]
    fn on_a_line_without_echo_a_quiet_caller_is_heard_after_some_seconds() {
        let (mut guard, mut now) = (EchoGuard::default(), clock::now());
        let quiet = 0.02 * 0.001;
        speak(&mut guard, &mut now, 10, 0.0);
        assert!(quiet < guard.floor(now), "at first it might be our own voice");
        speak(&mut guard, &mut now, 500, 0.0);
        assert!(quiet > guard.floor(now));
    }

    #[test]
    fn nothing_is_held_against_a_caller_while_we_are_silent() {
        let (mut guard, now) = (EchoGuard::default(), clock::now());
        assert_eq!(guard.floor(now), 0.0);
        guard.sent(now, 0.1);
        assert!(guard.floor(now + REACH) > 0.0);
        assert_eq!(guard.floor(now + REACH + FRAME), 0.0);
    }

    #[test]
    fn a_caller_who_speaks_over_us_does_not_count_as_echo() {
        let (mut guard, mut now) = (EchoGuard::default(), clock::now());
        for _ in 0..200 {
            now += FRAME;
            guard.sent(now, 0.01);
            guard.learn(now, 0.01);
        }
        assert_eq!(guard.gain, FIRST);
    }
}
