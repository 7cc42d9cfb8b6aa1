//! Voices that are equally loud, by EBU R128.
//!
//! How loud a voice speaks is measured once, by its integrated loudness (ITU-R BS.1770, with gating): of a recording when
//! it is enrolled, of a few spoken numbers where a program speaks. From that and the loudness that is wanted comes one
//! factor for all that it says. Which sentence is said moves the loudness by some tenths of a unit; the voice by several.

use ebur128::{EbuR128, Mode};

use crate::audio::RATE;

/// Bounds of the factor: 12 dB either way. A voice that needs more was measured on something else than speech.
const MOST: f32 = 4.0;
/// What limiting keeps samples below: full scale, a hair less for what rounds.
const CEILING: f32 = 0.999;
/// How fast a limiter lets go: by a factor of e in 50 ms.
const RELEASE: f32 = RATE as f32 * 0.05;

/// The integrated loudness of mono speech at `rate`, in LUFS; `None`: there is too little of it, or silence.
pub fn measure(pcm: &[f32], rate: u32) -> Option<f32> {
    let mut meter = EbuR128::new(1, rate, Mode::I).ok()?;
    meter.add_frames_f32(pcm).ok()?;
    let loudness = meter.loudness_global().ok()?;
    loudness.is_finite().then_some(loudness as f32)
}

/// The factor that brings a voice of the loudness `measured` to `wanted`, both in LUFS.
pub fn factor(wanted: f32, measured: f32) -> f32 {
    10f32.powf((wanted - measured) / 20.0).clamp(1.0 / MOST, MOST)
}

/// Multiplies sound and keeps it below full scale.
///
/// # Why
/// It looks at one sample after the other and at nothing ahead, so that sound that comes in other pieces is the same
/// sound, and none of it waits. A peak turns it down at once, and it lets go slowly: what is heard is a softer word, not
/// the edge of a clipped one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Leveller {
    factor: f32,
    /// How far it is turned down: 1 is not at all.
    down: f32,
}

impl Leveller {
    /// Multiplies by `factor`.
    pub fn new(factor: f32) -> Self {
        Self { factor, down: 1.0 }
    }

    /// The next samples. With a factor of 1 they stay as they are, to the bit.
    pub fn process(&mut self, pcm: &mut [f32]) {
        if self.factor == 1.0 {
            return;
        }
        for sample in pcm {
            let loud = *sample * self.factor;
            self.down += (1.0 - self.down) / RELEASE;
            if loud.abs() * self.down > CEILING {
                self.down = CEILING / loud.abs();
            }
            *sample = loud * self.down;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tone(amplitude: f32, seconds: usize) -> Vec<f32> {
        let at = |n: usize| amplitude * (std::f32::consts::TAU * 997.0 * n as f32 / RATE as f32).sin();
        (0..seconds * RATE as usize).map(at).collect()
    }

    #[test]
    fn loudness_is_that_of_the_standard_and_silence_has_none() {
        // EBU Tech 3341: 0 dBFS at 997 Hz in one channel is -3.01 LUFS.
        let loudness = measure(&tone(1.0, 4), RATE).expect("a tone");
        assert!((loudness + 3.01).abs() < 0.1, "{loudness}");
        let quiet = measure(&tone(0.1, 4), RATE).expect("a tone");
        assert!((loudness - quiet - 20.0).abs() < 0.1, "{quiet}");
        assert_eq!(measure(&vec![0.0; 4 * RATE as usize], RATE), None);
        assert_eq!(measure(&[], RATE), None);
    }

    #[test]
    fn a_measured_voice_comes_to_what_is_wanted() {
        for amplitude in [0.05, 0.2, 0.5] {
            let mut pcm = tone(amplitude, 4);
            let measured = measure(&pcm, RATE).expect("a tone");
            Leveller::new(factor(-20.0, measured)).process(&mut pcm);
            let levelled = measure(&pcm, RATE).expect("a tone");
            assert!((levelled + 20.0).abs() < 0.1, "{amplitude}: {levelled}");
        }
        assert_eq!((factor(-20.0, -80.0), factor(-20.0, 3.0)), (MOST, 1.0 / MOST));
    }

    proptest! {
        #[test]
        fn nothing_clips_and_pieces_change_nothing(
            pcm in prop::collection::vec(-1f32..=1.0, 1..2_000),
            factor in 0.25f32..4.0,
            cut in any::<prop::sample::Index>(),
        ) {
            let mut whole = pcm.clone();
            Leveller::new(factor).process(&mut whole);
            prop_assert!(whole.iter().all(|sample| sample.abs() <= 1.0));
            let mut pieces = pcm.clone();
            let (first, second) = pieces.split_at_mut(cut.index(pcm.len()));
            let mut leveller = Leveller::new(factor);
            leveller.process(first);
            leveller.process(second);
            prop_assert_eq!(pieces, whole);
        }
    }
}
