//! Sound that no voice has spoken: for callers who barge in without a recording at hand, and for tests.

use crate::sound::heard::Clip;
use crate::wire::codec::to_i16;

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

impl Clip {
    /// The samples in 16 bits.
    pub fn to_i16(&self) -> Vec<i16> {
        self.pcm.iter().map(|s| to_i16(*s)).collect()
    }
}
