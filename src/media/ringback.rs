//! The tone that says "it rings there".
//!
//! # Why
//! Who waits for somebody else to pick up takes silence for a broken line and hangs up. 425 Hz, one second of five, is the
//! ringing tone of most of the world (ITU-T E.180 section 2 and its supplement 2); elsewhere it is understood.

use crate::audio::{FRAME_SAMPLES, RATE};

/// Hertz.
const PITCH: f32 = 425.0;
/// Samples of sound, and of sound and pause together.
const SOUND: usize = RATE as usize;
const PERIOD: usize = 5 * RATE as usize;
/// -20 dB of full scale: beside speech neither loud nor missed.
const AMPLITUDE: f32 = 0.1;
/// Samples over which it swells and dies away: 10 ms, so that it does not click.
const SLOPE: usize = RATE as usize / 100;

/// The tone of one call.
#[derive(Debug, Default)]
pub struct Ringback(usize);

impl Ringback {
    /// The next 20 ms.
    pub fn frame(&mut self) -> [f32; FRAME_SAMPLES] {
        std::array::from_fn(|_| {
            let at = self.0 % PERIOD;
            self.0 = at + 1;
            let slope = at.min(SOUND.saturating_sub(at)).min(SLOPE) as f32 / SLOPE as f32;
            AMPLITUDE * slope * (std::f32::consts::TAU * PITCH * at as f32 / RATE as f32).sin()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_sounds_one_second_of_five_at_425_hertz_without_a_click() {
        let mut tone = Ringback::default();
        let sound: Vec<f32> = (0..500).flat_map(|_| tone.frame()).collect();
        for (second, samples) in sound.chunks(RATE as usize).enumerate() {
            let crossings = samples.windows(2).filter(|pair| pair[0] < 0.0 && pair[1] >= 0.0).count();
            let expected: usize = if second % 5 == 0 { 425 } else { 0 };
            assert!(crossings.abs_diff(expected) <= 2, "second {second}: {crossings}");
        }
        assert!(sound.windows(2).all(|pair| (pair[1] - pair[0]).abs() < 0.02), "no click");
    }
}
