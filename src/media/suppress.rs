//! Noise behind a caller, taken out of what is heard: the Wiener filter of the `WebRTC` project (`sonora-ns`, its port).
//!
//! # Why
//! Telephones and rooms full of people come as they are, and browsers suppress noise only where their page lets them. The filter
//! takes 12 dB off what is steady and leaves speech that has no noise behind it as it was; more than that costs more of the
//! words than it gains. It works at the rate of what is heard, 10 ms at a time, and delays it by 6 ms. Sentences with noise
//! 10 dB below (SI-SDR) have it 13.3 to 13.9 dB below then; RNNoise (`nnnoiseless`) made that 12.0 to 12.9 at eight times the
//! cost, and brought sentences without noise to 20 dB.

use sonora_ns::config::SuppressionLevel;
use sonora_ns::noise_suppressor::NoiseSuppressor;

use super::decode::FRAME;

/// Samples that the filter takes at a time: 10 ms at [`super::decode::RATE`].
const BLOCK: usize = FRAME / 2;

/// Root mean square of the noise that is added, of 16 bits: 84 dB below full scale, which the filter then takes down. Behind
/// digital silence it would take the first words for noise.
const DITHER: f32 = 2.0;

/// The filter of one stream.
#[derive(Debug)]
pub struct Suppressor {
    filter: Box<NoiseSuppressor>,
    random: u32,
}

impl Default for Suppressor {
    fn default() -> Self {
        Self { filter: Box::new(NoiseSuppressor::with_level(SuppressionLevel::K12dB)), random: 7 }
    }
}

impl Suppressor {
    /// Puts what the filter makes in place of the next 20 ms.
    pub fn frame(&mut self, frame: &mut [i16; FRAME]) {
        for block in frame.as_chunks_mut::<BLOCK>().0 {
            // Full scale is that of 16 bits.
            let mut sound = block.map(|sample| f32::from(sample) + self.dither());
            self.filter.analyze(&sound);
            self.filter.process(&mut sound);
            *block = sound.map(|sample| sample.round().clamp(-32_768.0, 32_767.0) as i16);
        }
    }

    fn dither(&mut self) -> f32 {
        // Numerical Recipes' generator; evenly spread numbers have a variance of a third.
        self.random = self.random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((self.random >> 8) as f32 / (1 << 23) as f32 - 1.0) * DITHER * 1.732
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By how much the filter delays: a block of its window that overlaps the one before.
    const DELAY: usize = 96;

    /// A second of nothing, three sentences; and the same with even noise behind it that is `below` dB quieter.
    fn speech(below: f64) -> (Vec<i16>, Vec<i16>) {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/smart_turn");
        let mut clean = vec![0; 16_000];
        for name in ["blue_whole.wav", "card_whole.wav", "office_whole.wav"] {
            let words = hound::WavReader::open(folder.join(name)).expect("recorded words");
            clean.extend(words.into_samples::<i16>().map(|sample| sample.expect("16 bits")));
        }
        let power = clean.iter().map(|s| f64::from(*s).powi(2)).sum::<f64>() / clean.len() as f64;
        // Evenly spread numbers have a variance of a third.
        let scale = (power / 10f64.powf(below / 10.0) * 3.0).sqrt();
        let mut state = 7_u32;
        let noisy = clean.iter().map(|sample| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (f64::from(*sample) + (f64::from(state >> 8) / f64::from(1 << 23) - 1.0) * scale) as i16
        });
        (clean.clone(), noisy.collect())
    }

    fn suppressed(pcm: &[i16]) -> Vec<i16> {
        let mut suppressor = Suppressor::default();
        let (frames, _) = pcm.as_chunks::<FRAME>();
        let mut out = frames.to_vec();
        out.iter_mut().for_each(|frame| suppressor.frame(frame));
        out.concat()
    }

    /// How far what is not `clean` lies below what is, in dB, whatever the level (SI-SDR, Le Roux et al. 2019).
    fn purity(heard: &[i16], clean: &[i16]) -> f64 {
        let sum = |one: &dyn Fn((f64, f64)) -> f64| -> f64 {
            heard.iter().zip(clean).map(|(a, b)| one((f64::from(*a), f64::from(*b)))).sum()
        };
        let gain = sum(&|(a, b)| a * b) / sum(&|(_, b)| b * b);
        let (speech, rest) = (sum(&|(_, b)| (gain * b).powi(2)), sum(&|(a, b)| (a - gain * b).powi(2)));
        10.0 * (speech / rest).log10()
    }

    #[test]
    fn speech_in_noise_comes_out_purer_and_pauses_quieter() {
        for (below, least) in [(5.0, 4.0), (10.0, 2.5), (20.0, -1.0)] {
            let (clean, noisy) = speech(below);
            let heard = suppressed(&noisy);
            let (before, after) = (purity(&noisy, &clean), purity(&heard[DELAY..], &clean));
            println!("noise {below} dB below: {before:.1} dB before, {after:.1} dB after");
            assert!(after > before + least, "noise {below} dB below: {before} dB before, {after} dB after");
            let power = |pcm: &[i16]| pcm[8_000..16_000].iter().map(|s| f64::from(*s).powi(2)).sum::<f64>();
            let quieter = 10.0 * (power(&noisy) / power(&heard)).log10();
            assert!(quieter > 10.0, "noise {below} dB below: {quieter} dB quieter in a pause");
        }
    }

    #[test]
    fn speech_without_noise_and_silence_stay_as_they_are() {
        let (clean, _) = speech(20.0);
        let heard = suppressed(&clean);
        let purity = purity(&heard[DELAY..], &clean);
        assert!(purity > 30.0, "{purity} dB");
        assert!(heard[..12_000].iter().all(|sample| sample.abs() < 8), "-72 dB and less");
        // Nothing that arrives can break it.
        let mut suppressor = Suppressor::default();
        for extreme in [i16::MIN, i16::MAX] {
            for _ in 0..50 {
                suppressor.frame(&mut [extreme; FRAME]);
            }
        }
    }
}
