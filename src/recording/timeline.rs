//! Where a frame belongs in a recording: RTP time, held to the gateway's clock.
//!
//! A frame has two times: its place in its own stream, exact and by the sender's clock, and when it was here, by our clock
//! and late by what the network added. The place decides, so that neither jitter nor a lost packet shifts anything; the
//! difference of both, where it is least, is watched, so that a clock that runs fast or slow is followed.
//!
//! # Why
//! Placed by the sender's clock alone, an hour from a clock that is 200 ppm off ends 720 ms beside the other channel;
//! placed by arrival alone, every late packet is a gap. The least difference in some seconds is that of the packets which
//! were not delayed, as in any clock recovery from packets.

use std::time::Duration;

/// How long the least difference is looked for before the clock is corrected.
const WINDOW: Duration = Duration::from_secs(2);
/// A correction, in samples at 8 kHz: 1 ms in two seconds follows 500 ppm and is not heard.
const STEP: i64 = 8;
/// A difference beyond this, in samples, is corrected at once: the stream began late, or was held up.
const JUMP: i64 = 120;
/// A difference beyond this, in samples, is another stream: a transfer, a restart.
const RESTART: i64 = 8_000;

/// The clock of one direction.
#[derive(Debug)]
pub(super) struct Timeline {
    rate: u32,
    /// Samples from a place in the stream to one in the recording.
    base: Option<i64>,
    /// When the window began, and the least difference in it.
    window: (Duration, i64),
}

impl Timeline {
    pub(super) fn new(rate: u32) -> Self {
        Self { rate, base: None, window: (Duration::ZERO, i64::MAX) }
    }

    /// The sample at which a frame begins that is at `position` in its stream and was here at `at`.
    pub(super) fn place(&mut self, position: Duration, at: Duration) -> i64 {
        let (position, here) = (self.samples(position), self.samples(at));
        let difference = here - position;
        let base = match self.base {
            Some(base) if (difference - base).abs() < RESTART => base,
            _ => {
                self.window = (at, difference);
                difference
            }
        };
        self.window.1 = self.window.1.min(difference);
        let mut next = base;
        if at.saturating_sub(self.window.0) >= WINDOW {
            let error = self.window.1 - base;
            next += if error.abs() > JUMP { error } else { error.clamp(-STEP, STEP) };
            self.window = (at, i64::MAX);
        }
        self.base = Some(next);
        position + base
    }

    fn samples(&self, time: Duration) -> i64 {
        (time.as_nanos() * u128::from(self.rate) / 1_000_000_000) as i64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAME: Duration = Duration::from_millis(20);

    /// Places an hour of frames from a clock that is `ppm` off through a network that delays each by up to `jitter`;
    /// gives the largest distance, in samples, from where a frame was spoken, after the first ten seconds.
    fn worst(ppm: f64, jitter: Duration) -> i64 {
        let mut timeline = Timeline::new(8_000);
        let mut state = 7_u32;
        let mut worst = 0;
        for n in 0..180_000_u32 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let late = jitter.mul_f64(f64::from(state >> 8) / f64::from(1 << 24));
            // The sender's 20 ms are ours times the error of its clock.
            let spoken = FRAME.mul_f64(f64::from(n) * (1.0 + ppm / 1e6));
            let placed = timeline.place(FRAME * n, spoken + late);
            let here = (spoken.as_nanos() * 8_000 / 1_000_000_000) as i64;
            if n > 500 {
                worst = worst.max((placed - here).abs());
            }
        }
        worst
    }

    #[test]
    fn an_hour_from_a_clock_that_is_200_ppm_off_stays_within_20_ms() {
        for ppm in [-200.0, 0.0, 200.0] {
            for jitter in [0, 5, 60] {
                let worst = worst(ppm, Duration::from_millis(jitter));
                assert!(worst <= 160, "{ppm} ppm, {jitter} ms of jitter: {worst} samples");
            }
        }
    }

    #[test]
    fn jitter_moves_nothing_and_frames_follow_each_other() {
        let mut timeline = Timeline::new(8_000);
        let at = |ms| Duration::from_millis(ms);
        let places: Vec<i64> = [(0, 5), (20, 60), (40, 61), (60, 65), (80, 86)]
            .into_iter()
            .map(|(position, here)| timeline.place(at(position), at(here)))
            .collect();
        assert_eq!(places, [40, 200, 360, 520, 680]);
        // A pause of the caller is as long as it was.
        assert_eq!(timeline.place(at(1_080), at(1_100)), 8_680);
    }

    #[test]
    fn another_stream_begins_where_it_came() {
        let mut timeline = Timeline::new(8_000);
        timeline.place(Duration::ZERO, Duration::ZERO);
        assert_eq!(timeline.place(FRAME, Duration::from_secs(60)), 480_000);
        assert_eq!(timeline.place(FRAME * 2, Duration::from_secs(60) + FRAME), 480_160);
    }
}
