//! Sound that no voice has spoken: for callers who barge in without a recording at hand, and for tests.

use crate::sound::heard::Clip;
use crate::wire::codec::to_i16;

/// Quieter frames are pauses.
const AUDIBLE: f32 = 0.005;

/// Something like speech: a gliding voice with formants, syllables and hiss; another `seed`, another sentence.
/// `rate` in Hz.
pub fn babble(seed: u32, rate: u32, seconds: f32) -> Clip {
    let mut state = seed.wrapping_mul(2_654_435_761).max(1);
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / u32::MAX as f32
    };
    let mut phase = 0.0f32;
    let mut pcm = Vec::new();
    while (pcm.len() as f32) < rate as f32 * seconds {
        let (pitch, glide) = (90.0 + 120.0 * random(), 40.0 * random() - 20.0);
        let formants = [300.0 + 500.0 * random(), 900.0 + 1_200.0 * random(), 2_300.0 + 600.0 * random()];
        let length = (rate as f32 * (0.08 + 0.17 * random())) as usize;
        let hiss = random() < 0.2;
        for n in 0..length {
            let t = n as f32 / length as f32;
            let hz = pitch + glide * t;
            phase = (phase + hz / rate as f32).fract();
            let envelope = (t * std::f32::consts::PI).sin();
            let voice: f32 = (1..=(3_200.0 / hz) as usize)
                .map(|k| {
                    let f = k as f32 * hz;
                    let gain: f32 = formants.iter().map(|c| 1.0 / (1.0 + ((f - c) / 120.0).powi(2))).sum();
                    (phase * k as f32 * std::f32::consts::TAU).sin() * gain
                })
                .sum();
            let sample = if hiss { (random() - 0.5) * 0.12 } else { voice * 0.12 };
            pcm.push((sample * envelope).clamp(-0.9, 0.9));
        }
        let pause = (rate as f32 * 0.04 * random()) as usize;
        pcm.resize(pcm.len() + pause, 0.0);
    }
    pcm.truncate((rate as f32 * seconds) as usize);
    Clip { rate, pcm }
}

/// A steady tone at a third of full scale.
pub fn tone(rate: u32, hz: f32, seconds: f32) -> Clip {
    let step = hz * std::f32::consts::TAU / rate as f32;
    Clip { rate, pcm: (0..(rate as f32 * seconds) as usize).map(|n| (n as f32 * step).sin() * 0.33).collect() }
}

/// White noise at a third of full scale.
pub fn noise(seed: u32, rate: u32, seconds: f32) -> Clip {
    let mut state = seed.wrapping_mul(2_654_435_761).max(1);
    let pcm = (0..(rate as f32 * seconds) as usize)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            (state as f32 / u32::MAX as f32 - 0.5) * 0.66
        })
        .collect();
    Clip { rate, pcm }
}

/// The noise of a street: low rumble, the hiss of tyres, and vehicles that come and go. Peaks at about a third of full scale.
pub fn street(seed: u32, rate: u32, seconds: f32) -> Clip {
    let mut clip = noise(seed, rate, seconds);
    let low = 1.0 - (-std::f32::consts::TAU * 250.0 / rate as f32).exp();
    let (mut rumble, mut deeper) = (0.0, 0.0);
    for (n, sample) in clip.pcm.iter_mut().enumerate() {
        rumble += (*sample - rumble) * low;
        deeper += (rumble - deeper) * low;
        let t = n as f32 / rate as f32 + (seed % 97) as f32;
        // Two lanes, on which something passes every seven and every eleven seconds.
        let passing = [7.0, 11.0].map(|every: f32| (t / every * std::f32::consts::PI).sin().powi(4));
        *sample = deeper * (1.0 + 2.0 * passing[0]) + *sample * (0.04 + 0.08 * passing[1]);
    }
    clip
}

impl Clip {
    /// The clip with `noise` over it, which is repeated as needed, `decibels` below the speech (by mean power, of the
    /// clip where it is audible). A `noise` without power changes nothing.
    pub fn over(&self, noise: &Clip, decibels: f32) -> Clip {
        let power = |pcm: &[f32]| pcm.iter().map(|s| s * s).sum::<f32>() / pcm.len().max(1) as f32;
        let frame = (self.rate / 100).max(1) as usize;
        let loud: Vec<f32> = self.pcm.chunks(frame).filter(|f| power(f).sqrt() > AUDIBLE).flatten().copied().collect();
        let gain = (power(&loud) / power(&noise.pcm)).sqrt() * 10f32.powf(-decibels / 20.0);
        let gain = if gain.is_finite() { gain } else { 0.0 };
        let noise = noise.pcm.iter().cycle().chain(std::iter::repeat(&0.0));
        let pcm = self.pcm.iter().zip(noise).map(|(s, n)| (s + n * gain).clamp(-1.0, 1.0)).collect();
        Clip { rate: self.rate, pcm }
    }

    /// The samples in 16 bits.
    pub fn to_i16(&self) -> Vec<i16> {
        self.pcm.iter().map(|s| to_i16(*s)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_lies_as_far_below_the_speech_as_asked() {
        let power = |pcm: &[f32]| pcm.iter().map(|s| s * s).sum::<f32>() / pcm.len() as f32;
        let speech = tone(16_000, 440.0, 1.0);
        // Silence before and behind it is not speech, and is no louder for it.
        let mut padded = speech.clone();
        padded.pcm.extend([0.0; 16_000]);
        let noisy = padded.over(&street(3, 16_000, 0.7), 10.0);
        let difference: Vec<f32> = noisy.pcm.iter().zip(&padded.pcm).map(|(a, b)| a - b).collect();
        let below = 10.0 * (power(&speech.pcm) / power(&difference)).log10();
        assert!((below - 10.0).abs() < 0.5, "{below} dB");
        assert!(power(&noisy.pcm[16_000..]) > 0.0, "and lies under the pauses too");
        assert_eq!(speech.over(&Clip { rate: 16_000, pcm: Vec::new() }, 10.0), speech);
    }
}
