//! Windowed-sinc resampling, for enrolment only.
//!
//! Owns the kernel and its application to a whole signal. Never streams.
//!
//! # Why
//! Everything else resamples with `rubato`. A voice prompt must not: speech tokens are near-ties, and another
//! filter flips about a third of them. The checkpoint was trained on prompts resampled with torchaudio's default
//! kernel (sinc under a Hann window six zero crossings wide, cut-off at 0.99 of the lower Nyquist frequency), so
//! this is that kernel, matched to 1e-5. It is applied once a voice, to at most two minutes of sound.

/// Zero crossings of the sinc on each side.
const WIDTH: f64 = 6.0;
/// Cut-off as a share of the lower of the two Nyquist frequencies.
const ROLLOFF: f64 = 0.99;

/// Resamples `input` from `from` Hz to `to` Hz. The result has `ceil(len * to / from)` samples; sound beyond
/// either end of `input` counts as silence.
///
/// # Panics
/// If a rate is 0.
pub fn resample(input: &[f32], from: u32, to: u32) -> Vec<f32> {
    assert!(from > 0 && to > 0, "rates are checked where sound enters");
    if from == to {
        return input.to_vec();
    }
    let divisor = gcd(from, to);
    let (from, to) = ((from / divisor) as usize, (to / divisor) as usize);
    let phases: Vec<Phase> = (0..to).map(|phase| Phase::new(phase, from, to)).collect();
    let length = (input.len() * to).div_ceil(from);
    (0..length).map(|n| phases[n % to].apply(input, (n / to * from) as isize)).collect()
}

/// The taps that give one of the `to` output positions between two blocks of `from` input samples.
struct Phase {
    /// Position of the first tap relative to the block.
    first: isize,
    taps: Vec<f32>,
}

impl Phase {
    fn new(phase: usize, from: usize, to: usize) -> Self {
        let cutoff = from.min(to) as f64 * ROLLOFF;
        // A tap at input position i lies (i / from - phase / to) * cutoff zero crossings from the centre.
        let centre = phase as f64 / to as f64 * from as f64;
        let reach = WIDTH * from as f64 / cutoff;
        let first = (centre - reach).ceil() as isize;
        let last = (centre + reach).floor() as isize;
        let taps = (first..=last)
            .map(|i| {
                let t = (i as f64 / from as f64 - phase as f64 / to as f64) * cutoff;
                let window = (t.clamp(-WIDTH, WIDTH) * std::f64::consts::PI / WIDTH / 2.0).cos().powi(2);
                let angle = t * std::f64::consts::PI;
                let sinc = if angle == 0.0 { 1.0 } else { angle.sin() / angle };
                (sinc * window * cutoff / from as f64) as f32
            })
            .collect();
        Self { first, taps }
    }

    fn apply(&self, input: &[f32], block: isize) -> f32 {
        let start = block + self.first;
        let skip = (-start).max(0) as usize;
        let from = (start.max(0) as usize).min(input.len());
        let taps = self.taps.get(skip..).unwrap_or_default();
        // f64 sums: the result does not depend on how many taps a rate pair happens to have.
        input[from..].iter().zip(taps).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>() as f32
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_is_rounded_up() {
        for (len, from, to, expected) in
            [(20_000, 44_100, 24_000, 10_885), (3, 8_000, 24_000, 9), (7, 192_000, 16_000, 1), (0, 8_000, 16_000, 0)]
        {
            assert_eq!(resample(&vec![0.1; len], from, to).len(), expected);
        }
    }

    #[test]
    fn a_constant_stays_a_constant() {
        for from in [8_000, 11_025, 22_050, 44_100, 48_000, 96_000, 191_999] {
            let out = resample(&vec![0.5; from as usize / 10], from, 16_000);
            assert!(out[200..1400].iter().all(|v| (v - 0.5).abs() < 2e-3), "{from} Hz");
        }
    }

    #[test]
    fn equal_rates_change_nothing() {
        assert_eq!(resample(&[0.1, -0.2], 16_000, 16_000), [0.1, -0.2]);
    }
}
