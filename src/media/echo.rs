//! Our own voice, as it comes back from the other side: from which level on a caller's sound is not an echo.
//!
//! Owns what was learned of one line. Compares levels only: a canceller would need the delay to the sample, and telephones
//! and browsers have one already; what they leave is quieter than what was sent.
//!
//! # Why
//! A fixed threshold is deaf to quiet callers or interrupts itself. So a frame counts as the caller's where it is louder
//! than the echo can be: what was sent of late, less what the line takes away.
//!
//! *What the line can return is known after a second of our own voice.* An echo follows what was sent frame by frame, and
//! what the caller adds only makes it louder: an echo of a gain `g` behind a delay `d` leaves no frame that is quieter than
//! `g` times what was sent `d` before. So the quietest frames, at the delay that suits best, say how loud an echo may be,
//! also while another person speaks. Until every delay was looked at, the line is taken for a bad one.
//!
//! *Where frames keep the same distance to what was sent, an echo is there*: it is believed at once, also a louder one.
//! From then on the threshold falls slowly only, since echoes that a suppressor lets through come and go.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::audio::FRAME;

/// The longest way there and back: jitter buffers of both sides, and a satellite.
const REACH: Duration = Duration::from_millis(600);
/// [`REACH`] in frames: the delays that are looked at.
const DELAYS: usize = 30;
/// Frames that came back of late, half a second: a few syllables.
const WINDOW: usize = 25;
/// Frames of what was sent that frames of the window may be echoes of, and room for those that came late.
const CELLS: usize = DELAYS + WINDOW * 2;
/// Frames of them that must have been sent loud, for a delay to count as looked at.
const ENOUGH: usize = 10;
/// How often is looked, in frames.
const EVERY: usize = 5;
/// Share of the energy that comes back of what is sent, before anything was learned: -15 dB.
const FIRST: f32 = 0.031_6;
/// The least that is assumed: -40 dB.
const LEAST: f32 = 0.000_1;
/// The most: -9 dB. A line that returns more is no telephone, and its caller could not be heard at all.
const MOST: f32 = 0.126;
/// How far above the expected echo a caller must be: 4 dB, as frames of sender and listener do not coincide.
const MARGIN: f32 = 2.5;
/// How much the expectation falls each time that is looked, where an echo was there once: 0.6 dB, so 6 dB in a second.
const FALL: f32 = 0.87;
/// Frames sent this much quieter than the loudest tell nothing: 25 dB.
const QUIET: f32 = 0.003;
/// What was sent must rise and fall by so much for it to be seen whether what comes follows: 6 dB.
const RISE: f32 = 4.0;
/// The distance of an echo to what was sent varies by no more: 5 dB. Measured with recorded speech, its echo dry and with
/// 50 ms of reverberation, and other speech.
const STEADY: f32 = 3.2;

/// Levels of what is sent on one line and of what comes back.
#[derive(Debug)]
pub struct EchoGuard {
    /// Mean squares of frames that left, and when; each louder than all behind it.
    loudest: VecDeque<(Instant, f32)>,
    /// The same of all frames, as far back as the oldest of `back` may be an echo of.
    sent: VecDeque<(Instant, f32)>,
    /// Frames that came, newest last.
    back: VecDeque<(Instant, f32)>,
    /// Frames that came since it was looked.
    unseen: usize,
    gain: f32,
    /// An echo was there on this line.
    echoes: bool,
}

impl Default for EchoGuard {
    fn default() -> Self {
        Self {
            loudest: VecDeque::new(),
            sent: VecDeque::new(),
            back: VecDeque::new(),
            unseen: 0,
            gain: FIRST,
            echoes: false,
        }
    }
}

impl EchoGuard {
    /// A frame of speech with this mean square leaves.
    pub fn sent(&mut self, now: Instant, energy: f32) {
        while self.loudest.back().is_some_and(|(_, quieter)| *quieter <= energy) {
            self.loudest.pop_back();
        }
        self.loudest.push_back((now, energy));
        // At most a second of them.
        if self.sent.len() > DELAYS + WINDOW {
            self.sent.pop_front();
        }
        self.sent.push_back((now, energy));
    }

    /// The mean square up to which a caller's frame may be our own voice; 0 where nothing was sent of late.
    pub fn floor(&mut self, now: Instant) -> f32 {
        self.loudest(now) * self.gain * MARGIN
    }

    /// A caller's frame with this mean square came.
    pub fn learn(&mut self, now: Instant, energy: f32) {
        // While next to nothing is sent, nothing that matters can come back.
        if self.loudest(now) < 1e-6 {
            return self.back.clear();
        }
        if self.back.len() == WINDOW {
            self.back.pop_front();
        }
        self.back.push_back((now, energy));
        self.unseen += 1;
        if self.unseen >= EVERY && self.back.len() >= ENOUGH {
            self.unseen = 0;
            self.look();
        }
    }

    /// Nothing came for `time` until `now`.
    pub fn silence(&mut self, now: Instant, time: Duration) {
        let frames = (time.min(REACH).as_micros() / FRAME.as_micros()) as u32;
        for n in (0..frames).rev() {
            if let Some(at) = now.checked_sub(FRAME * n) {
                self.learn(at, 0.0);
            }
        }
    }

    fn look(&mut self) {
        let Some((oldest, _)) = self.back.front() else { return };
        // What was sent in each 20 ms before and while the frames came.
        let Some(first) = oldest.checked_sub(REACH) else { return };
        let place = |at: Instant| (at.saturating_duration_since(first).as_micros() / FRAME.as_micros()) as usize;
        let mut grid = [0f32; CELLS];
        for (at, energy) in self.sent.iter().filter(|(at, _)| *at >= first) {
            if let Some(cell) = grid.get_mut(place(*at)) {
                *cell = cell.max(*energy);
            }
        }
        let loud = grid.iter().copied().fold(0.0, f32::max) * QUIET;
        let back = self.back.iter().map(|(at, energy)| (place(*at), *energy));
        let mut frames = [(0usize, 0f32); WINDOW];
        frames.iter_mut().zip(back).for_each(|(frame, heard)| *frame = heard);
        let back = &frames[..self.back.len().min(WINDOW)];
        // What the delays have in common, once: the quieter of two frames that were sent, and the mean of four.
        let (mut pairs, mut fours) = ([0f32; CELLS], [0f32; CELLS]);
        for at in 1..CELLS {
            pairs[at] = grid[at].min(grid[at - 1]);
        }
        for (four, cells) in fours.iter_mut().zip(grid.windows(4)) {
            *four = cells.iter().sum::<f32>() / 4.0;
        }
        let mut threes = [(0usize, 0f32); WINDOW];
        for (three, frames) in threes.iter_mut().zip(back.windows(3)) {
            *three = (frames[1].0, frames.iter().map(|(_, energy)| energy).sum::<f32>() / 3.0);
        }
        let threes = &threes[..back.len().saturating_sub(2)];
        let (mut most, mut unknown, mut echo) = (0f32, false, None::<f32>);
        for delay in 0..=DELAYS {
            // A frame that comes is of two that were sent, and no quieter than what the quieter one leaves.
            let mut shares = Least::default();
            for (place, energy) in back {
                let sent = place.checked_sub(delay).and_then(|at| pairs.get(at)).copied().unwrap_or(0.0);
                if sent > loud {
                    shares.add(energy / sent);
                }
            }
            match shares.reached() {
                Some(share) => most = most.max(share),
                None => unknown = true,
            }
            // Over three frames and more it matters little how those of both sides lie.
            let mut smooth = Smooth::default();
            for (place, came) in threes {
                let sent = place.checked_sub(delay + 2).and_then(|at| fours.get(at)).copied().unwrap_or(0.0);
                if sent > loud {
                    smooth.add(sent, came / sent);
                }
            }
            echo = echo.into_iter().chain(smooth.echo()).reduce(f32::max);
        }
        match echo {
            Some(found) => {
                self.echoes = true;
                self.gain = found.max(self.gain * FALL).clamp(LEAST, MOST);
            }
            None if unknown => {}
            None => {
                let least = if self.echoes { self.gain * FALL } else { LEAST };
                self.gain = self.gain.min(most.max(least)).max(LEAST);
            }
        }
    }

    fn loudest(&mut self, now: Instant) -> f32 {
        while self.loudest.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) > REACH) {
            self.loudest.pop_front();
        }
        self.loudest.front().map_or(0.0, |(_, energy)| *energy)
    }
}

/// The least of some numbers but for a tenth of them, which may be anything: a lost packet leaves a hole. Keeps no more of them than
/// that takes, as it is asked for every delay, many times a second.
#[derive(Clone, Copy, Debug)]
struct Least {
    count: usize,
    /// Ascending.
    low: [f32; WINDOW / 10 + 1],
}

impl Default for Least {
    fn default() -> Self {
        Self { count: 0, low: [f32::INFINITY; WINDOW / 10 + 1] }
    }
}

impl Least {
    fn add(&mut self, mut number: f32) {
        self.count += 1;
        for low in &mut self.low {
            (*low, number) = (low.min(number), low.max(number));
        }
    }

    /// `None`: too few tell.
    fn reached(&self) -> Option<f32> {
        self.low.get(self.count / 10).copied().filter(|_| self.count >= ENOUGH)
    }
}

/// What was sent, and the share of it that came back.
#[derive(Clone, Copy, Debug, Default)]
struct Smooth {
    quietest: Least,
    /// Of the negative.
    loudest: Least,
    least: Least,
    /// Of the negative.
    most: Least,
}

impl Smooth {
    fn add(&mut self, sent: f32, share: f32) {
        self.quietest.add(sent);
        self.loudest.add(-sent);
        self.least.add(share);
        self.most.add(-share);
    }

    /// The gain of an echo, where one is there.
    fn echo(&self) -> Option<f32> {
        let (least, most) = (self.least.reached()?, -self.most.reached()?);
        let rise = -self.loudest.reached()? / self.quietest.reached()?;
        // Less than that is no echo that matters, and silence is as steady as can be.
        (most >= LEAST && rise >= RISE && most / least.max(1e-12) <= rise.sqrt().min(STEADY)).then_some(most)
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

    /// The level of a voice's frame: syllables of `length` frames, each of its own loudness, and a pause behind seven.
    fn voice(n: usize, length: usize) -> f32 {
        let (syllable, phase) = (n / length, (n % length) as f32 / length as f32);
        let loudness = 0.15 + ((syllable * 37 + length * 11) % 17) as f32 / 20.0;
        let shape = (std::f32::consts::PI * phase).sin().powi(2);
        if syllable % 8 == 7 { 1e-7 } else { 0.01 * (0.02 + loudness * shape) }
    }

    fn level(n: usize) -> f32 {
        voice(n, 9)
    }

    /// Speech and pauses of ours for so many frames. The caller's side returns `echo` of it 120 ms later, and what the
    /// caller adds. Gives how many frames counted as a caller's.
    fn speak(
        guard: &mut EchoGuard,
        now: &mut Instant,
        frames: usize,
        echo: f32,
        mut caller: impl FnMut(usize) -> f32,
    ) -> usize {
        let mut over = 0;
        for n in 0..frames {
            *now += FRAME;
            guard.sent(*now, level(n));
            let back = echo * if n < 6 { 0.0 } else { level(n - 6) } + caller(n);
            over += usize::from(back > guard.floor(*now));
            guard.learn(*now, back);
        }
        over
    }

    fn nobody(_: usize) -> f32 {
        0.0
    }

    #[test]
    fn an_echo_of_15_db_less_is_never_a_caller_and_a_caller_is() {
        let (mut guard, mut now) = (EchoGuard::default(), clock::now());
        assert_eq!(speak(&mut guard, &mut now, 1_000, 0.031_6, nobody), 0);
        // As loud as we are.
        assert!(0.01 > guard.floor(now));
    }

    #[test]
    fn on_a_line_without_echo_a_quiet_caller_is_heard_after_a_second_of_our_voice() {
        let (mut guard, mut now) = (EchoGuard::default(), clock::now());
        let quiet = 0.000_3;
        speak(&mut guard, &mut now, 10, 0.0, nobody);
        assert!(quiet < guard.floor(now), "at first it might be our own voice");
        speak(&mut guard, &mut now, 55, 0.0, nobody);
        assert!(quiet > guard.floor(now));
        assert!(quiet / 30.0 > guard.floor(now), "nothing came back");
    }

    #[test]
    fn a_quiet_caller_who_speaks_all_the_time_is_told_from_an_echo() {
        let (mut guard, mut now) = (EchoGuard::default(), clock::now());
        // 11 dB less than we are, with syllables of its own.
        let caller = |n: usize| 0.08 * voice(n + 5, 13);
        let over = speak(&mut guard, &mut now, 50, 0.0, caller);
        assert!(over < 10, "at first it might be our own voice: {over}");
        let over = speak(&mut guard, &mut now, 200, 0.0, caller);
        assert!(over >= 30, "{over} of 200 frames, with its own pauses");
    }

    #[test]
    fn what_the_caller_adds_does_not_hide_an_echo() {
        let (mut guard, mut now) = (EchoGuard::default(), clock::now());
        speak(&mut guard, &mut now, 100, 0.02, |n| if n % 40 < 15 { 0.005 } else { 0.0 });
        assert_eq!(speak(&mut guard, &mut now, 200, 0.02, nobody), 0);
    }

    #[test]
    fn an_echo_that_begins_later_is_learned() {
        let (mut guard, mut now) = (EchoGuard::default(), clock::now());
        speak(&mut guard, &mut now, 200, 0.0, nobody);
        assert!(speak(&mut guard, &mut now, 60, 0.02, nobody) > 0, "for a moment it is somebody");
        assert_eq!(speak(&mut guard, &mut now, 500, 0.02, nobody), 0);
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
    fn a_caller_as_loud_as_we_are_raises_no_threshold() {
        let (mut guard, mut now) = (EchoGuard::default(), clock::now());
        for _ in 0..200 {
            now += FRAME;
            guard.sent(now, 0.01);
            guard.learn(now, 0.01);
        }
        assert!(guard.gain <= FIRST, "{}", guard.gain);
    }
}
