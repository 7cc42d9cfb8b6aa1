//! One window of sound as the model hears it: log-mel features as `WhisperFeatureExtractor` makes them.

use super::config::HOP;
use crate::voice::features::{Matrix, TooShort, whisper_log_mel};

/// Silence behind the sound that is transformed: two frames' windows of it are silent throughout, so that the last
/// frame is what every later one would be.
const SILENCE: usize = 800;

/// Features `[window / 160, bands]` of at most `window` samples at 16 kHz, with silence behind what is shorter.
///
/// # Errors
/// The window is shorter than the transform's.
///
/// # Why
/// The reference pads to 30 s and transforms all of it. A turn has a few seconds: the silent frames are one value,
/// known from the first of them.
pub(super) fn log_mel(samples: &[f32], bands: usize, window: usize) -> Result<Matrix, TooShort> {
    let mut sound = samples[..samples.len().min(window)].to_vec();
    sound.resize((sound.len() + SILENCE).next_multiple_of(HOP).min(window), 0.0);
    let mut features = whisper_log_mel(&sound, bands)?.transposed();
    let silent = features.data[features.data.len() - bands..].to_vec();
    while features.rows < window / HOP {
        features.data.extend_from_slice(&silent);
        features.rows += 1;
    }
    Ok(features)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(samples: usize) -> Vec<f32> {
        let mut state = 7u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        (0..samples).map(|_| next()).collect()
    }

    #[test]
    fn the_short_way_gives_what_transforming_all_the_silence_gives() {
        let window = 48_000;
        for length in [0, 1, 159, 16_000, 16_001, 47_100, 47_999, 48_000, 60_000] {
            let sound = noise(length);
            let ours = log_mel(&sound, 80, window).expect("long enough");
            let mut padded = sound[..length.min(window)].to_vec();
            padded.resize(window, 0.0);
            let reference = whisper_log_mel(&padded, 80).expect("long enough").transposed();
            assert_eq!((ours.rows, ours.cols), (300, 80));
            assert_eq!(ours.data, reference.data, "{length}");
        }
    }
}
