//! A quiet bed: noise at the level of a calm room, for silence that should not sound like a dead line.
//!
//! # Why
//! Frames of digital silence keep a stream alive, but not every carrier or ear: some take a stream without any energy for a
//! broken call and end it, and people ask whether anybody is there. Comfort noise as a payload of its own (RFC 3389) would
//! have to be negotiated, and few trunks do; noise in the agreed codec is understood by all.

use crate::audio::FRAME_SAMPLES;

/// Root mean square of the noise: -60 dB of full scale, where ITU-T P.56 no longer finds speech.
const LEVEL: f32 = 0.001;
/// How much of a sample stays in the next: less hiss.
const COLOUR: f32 = 0.7;

/// The noise of one stream.
#[derive(Debug)]
pub struct Bed {
    state: u32,
    last: f32,
}

impl Bed {
    /// `seed`: any; equal seeds sound the same.
    pub fn new(seed: u32) -> Self {
        Self { state: seed, last: 0.0 }
    }

    /// The next 20 ms.
    pub fn frame(&mut self) -> [f32; FRAME_SAMPLES] {
        // Uniform noise has a variance of a third, and the filter leaves (1 - c) / (1 + c) of it.
        let gain = LEVEL / ((1.0 - COLOUR) / (1.0 + COLOUR) / 3.0).sqrt();
        std::array::from_fn(|_| {
            // Numerical Recipes' generator; its upper bits are good enough to be heard.
            self.state = self.state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let white = (self.state >> 8) as f32 / (1 << 23) as f32 - 1.0;
            self.last = COLOUR * self.last + (1.0 - COLOUR) * white;
            self.last * gain
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bed_is_quiet_even_and_never_the_same() {
        let mut bed = Bed::new(7);
        let frames: Vec<_> = (0..500).map(|_| bed.frame()).collect();
        for second in frames.chunks(50) {
            let energy: f32 = second.iter().flatten().map(|s| s * s).sum::<f32>() / (50 * FRAME_SAMPLES) as f32;
            assert!((energy.sqrt() / LEVEL - 1.0).abs() < 0.1, "{}", energy.sqrt());
        }
        assert!(frames.iter().flatten().all(|sample| sample.abs() < 0.006));
        assert!(frames.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
