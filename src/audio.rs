//! Units of sound that every part agrees on.
//!
//! Inside the gateway speech is mono `f32` in -1..=1 at 24 kHz, the rate of the voices. One CosyVoice3
//! speech token is 40 ms = 2 mel frames = 960 samples = two 20 ms frames, so no chunk ever ends inside
//! a frame; the other voices are resampled to this rate where they enter.

use std::time::Duration;

/// Samples per second of all speech inside the gateway.
pub const RATE: u32 = 24_000;

/// Length of one encoded frame, and so of one RTP packet.
pub const FRAME: Duration = Duration::from_millis(20);

/// Samples of one frame at [`RATE`].
pub const FRAME_SAMPLES: usize = 480;

/// How long `samples` at [`RATE`] last.
pub fn duration_of(samples: u64) -> Duration {
    // u64 nanoseconds hold 584 years; samples * 1e9 would overflow after 213 hours, so split off seconds.
    let rate = u64::from(RATE);
    Duration::from_secs(samples / rate) + Duration::from_nanos(samples % rate * 1_000_000_000 / rate)
}

/// How many whole samples at [`RATE`] fit into `time`.
pub fn samples_in(time: Duration) -> u64 {
    let rate = u64::from(RATE);
    time.as_secs() * rate + u64::from(time.subsec_nanos()) * rate / 1_000_000_000
}

/// `f32` in -1..=1 to 16-bit, rounding and saturating.
pub fn to_i16(sample: f32) -> i16 {
    // `as` saturates and maps NaN to 0, which is silence.
    (sample * 32_767.0).round() as i16
}

/// 16-bit to `f32` in -1..=1.
pub fn from_i16(sample: i16) -> f32 {
    f32::from(sample) / 32_768.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_480_samples() {
        assert_eq!(samples_in(FRAME), FRAME_SAMPLES as u64);
        assert_eq!(duration_of(FRAME_SAMPLES as u64), FRAME);
    }

    #[test]
    fn conversion_saturates_and_silences_nan() {
        assert_eq!(to_i16(2.0), i16::MAX);
        assert_eq!(to_i16(-2.0), i16::MIN);
        assert_eq!(to_i16(f32::NAN), 0);
    }
}
