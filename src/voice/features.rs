//! The three spectral views of a recording that enrolment needs.
//!
//! Owns: the prompt mel that the flow model continues, the Whisper log-mel that the speech tokenizer reads, and
//! the Kaldi filterbank that the speaker encoder reads. Pure functions of samples; never resamples, never trims.
//!
//! # Why
//! Arithmetic is in `f64` and rounded at the end: enrolment runs once a voice, and double precision is nearer to
//! each of the single-precision originals than they are to one another.

use std::f64::consts::PI;

use realfft::num_complex::Complex;
use realfft::{RealFftPlanner, RealToComplex};

/// Rate of the prompt mel's input, Hz.
pub const MEL_RATE: u32 = 24_000;
/// Rate of the log-mel's and the filterbank's input, Hz.
pub const SPEECH_RATE: u32 = 16_000;
/// Samples of one prompt mel frame at [`MEL_RATE`]: 50 frames a second.
pub const MEL_HOP: usize = 480;
/// Samples of one log-mel or filterbank frame at [`SPEECH_RATE`]: 100 frames a second.
pub const SPEECH_HOP: usize = 160;
/// Bands of the prompt mel.
pub const MEL_BANDS: usize = 80;
/// Bands of the filterbank.
pub const FBANK_BANDS: usize = 80;

const MEL_FFT: usize = 1920;
const WHISPER_FFT: usize = 400;
const KALDI_FRAME: usize = 400;
const KALDI_FFT: usize = 512;

/// Numbers in rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Row-major, `rows * cols`.
    pub data: Vec<f32>,
}

impl Matrix {
    /// One row.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.data[row * self.cols..][..self.cols]
    }

    /// Rows and columns exchanged.
    #[must_use]
    pub fn transposed(&self) -> Self {
        let data = (0..self.cols).flat_map(|c| (0..self.rows).map(move |r| self.data[r * self.cols + c])).collect();
        Self { rows: self.cols, cols: self.rows, data }
    }
}

/// The recording is too short to hold even one frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{samples} samples are too few for a spectrum, at least {needed} are needed")]
pub struct TooShort {
    /// How many there are.
    pub samples: usize,
    /// How many it takes.
    pub needed: usize,
}

/// Prompt mel `[samples / 480, 80]` of sound at 24 kHz: natural log of Slaney mel magnitudes, 0 to 12 kHz.
///
/// Frames are 1920 samples under a periodic Hann window, 480 apart, the first centred on sample 240
/// (reflected 720 samples at both ends).
///
/// # Errors
/// The sound is shorter than the reflection.
pub fn prompt_mel(samples: &[f32]) -> Result<Matrix, TooShort> {
    let padded = reflect(samples, (MEL_FFT - MEL_HOP) / 2)?;
    let filters = slaney_filters(f64::from(MEL_RATE), MEL_FFT, MEL_BANDS);
    let window = periodic_hann(MEL_FFT);
    let mut spectrum = Spectrum::new(MEL_FFT);
    let frames = samples.len() / MEL_HOP;
    let mut data = Vec::with_capacity(frames * MEL_BANDS);
    for frame in 0..frames {
        let magnitudes: Vec<f64> =
            spectrum.of(&padded[frame * MEL_HOP..], &window).iter().map(|c| (c.norm_sqr() + 1e-9).sqrt()).collect();
        data.extend(filters.iter().map(|f| f.apply(&magnitudes).max(1e-5).ln() as f32));
    }
    Ok(Matrix { rows: frames, cols: MEL_BANDS, data })
}

/// Whisper log-mel `[bands, samples / 160]` of sound at 16 kHz, not padded to 30 s.
///
/// # Errors
/// The sound is shorter than the reflection.
pub fn whisper_log_mel(samples: &[f32], bands: usize) -> Result<Matrix, TooShort> {
    let padded = reflect(samples, WHISPER_FFT / 2)?;
    let filters = slaney_filters(f64::from(SPEECH_RATE), WHISPER_FFT, bands);
    let window = periodic_hann(WHISPER_FFT);
    let mut spectrum = Spectrum::new(WHISPER_FFT);
    let frames = samples.len() / SPEECH_HOP;
    let mut logs = vec![0.0; bands * frames];
    for frame in 0..frames {
        let power: Vec<f64> =
            spectrum.of(&padded[frame * SPEECH_HOP..], &window).iter().map(Complex::norm_sqr).collect();
        for (band, filter) in filters.iter().enumerate() {
            logs[band * frames + frame] = filter.apply(&power).max(1e-10).log10();
        }
    }
    let floor = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max) - 8.0;
    let data = logs.iter().map(|v| ((v.max(floor) + 4.0) / 4.0) as f32).collect();
    Ok(Matrix { rows: bands, cols: frames, data })
}

/// Kaldi filterbank `[1 + (samples - 400) / 160, 80]` of sound at 16 kHz: natural log of power, 20 Hz to 8 kHz,
/// no dither, only whole frames.
///
/// # Errors
/// The sound is shorter than one frame of 400 samples.
pub fn kaldi_fbank(samples: &[f32]) -> Result<Matrix, TooShort> {
    if samples.len() < KALDI_FRAME {
        return Err(TooShort { samples: samples.len(), needed: KALDI_FRAME });
    }
    let filters = kaldi_filters();
    let window = povey(KALDI_FRAME);
    let mut spectrum = Spectrum::new(KALDI_FFT);
    let frames = 1 + (samples.len() - KALDI_FRAME) / SPEECH_HOP;
    let mut data = Vec::with_capacity(frames * FBANK_BANDS);
    for frame in 0..frames {
        let raw = &samples[frame * SPEECH_HOP..][..KALDI_FRAME];
        let mean = raw.iter().map(|v| f64::from(*v)).sum::<f64>() / KALDI_FRAME as f64;
        let mut emphasised = [0.0; KALDI_FRAME];
        let mut last = f64::from(raw[0]) - mean;
        for (out, sample) in emphasised.iter_mut().zip(raw) {
            let sample = f64::from(*sample) - mean;
            *out = sample - 0.97 * last;
            last = sample;
        }
        let power: Vec<f64> = spectrum.of(&emphasised, &window).iter().map(Complex::norm_sqr).collect();
        data.extend(filters.iter().map(|f| f.apply(&power).max(f64::from(f32::EPSILON)).ln() as f32));
    }
    Ok(Matrix { rows: frames, cols: FBANK_BANDS, data })
}

/// Subtracts from every band its mean over time.
#[must_use]
pub fn minus_time_mean(mut features: Matrix) -> Matrix {
    for band in 0..features.cols {
        let column = features.data.iter().skip(band).step_by(features.cols);
        let mean = column.map(|v| f64::from(*v)).sum::<f64>() / features.rows.max(1) as f64;
        for value in features.data.iter_mut().skip(band).step_by(features.cols) {
            *value = (f64::from(*value) - mean) as f32;
        }
    }
    features
}

/// Slaney-scale, Slaney-normalised triangular filters `[bands, fft / 2 + 1]` from 0 Hz to half of `rate`.
pub fn slaney_filter_matrix(rate: u32, fft: usize, bands: usize) -> Matrix {
    let cols = fft / 2 + 1;
    let mut data = vec![0.0; bands * cols];
    for (band, filter) in slaney_filters(f64::from(rate), fft, bands).iter().enumerate() {
        for (offset, weight) in filter.weights.iter().enumerate() {
            data[band * cols + filter.first + offset] = *weight as f32;
        }
    }
    Matrix { rows: bands, cols, data }
}

/// One filter: its weights, and the spectrum bin of the first.
struct Filter {
    first: usize,
    weights: Vec<f64>,
}

impl Filter {
    /// Keeps the non-zero stretch of `weight(bin)` for `bin` in `0..bins`.
    fn new(bins: usize, weight: impl Fn(usize) -> f64) -> Self {
        let first = (0..bins).find(|b| weight(*b) > 0.0).unwrap_or(0);
        let weights = (first..bins).map(weight).take_while(|w| *w > 0.0).collect();
        Self { first, weights }
    }

    fn apply(&self, spectrum: &[f64]) -> f64 {
        self.weights.iter().zip(&spectrum[self.first..]).map(|(w, v)| w * v).sum()
    }
}

/// Slaney's mel scale: linear to 1 kHz (15 mel), logarithmic above, 27 mel to the factor 6.4.
fn slaney_hz(mel: f64) -> f64 {
    if mel < 15.0 { mel * 200.0 / 3.0 } else { 1000.0 * ((mel - 15.0) * 6.4_f64.ln() / 27.0).exp() }
}

fn slaney_mel(hz: f64) -> f64 {
    if hz < 1000.0 { hz * 3.0 / 200.0 } else { 15.0 + (hz / 1000.0).ln() * 27.0 / 6.4_f64.ln() }
}

fn slaney_filters(rate: f64, fft: usize, bands: usize) -> Vec<Filter> {
    let top = slaney_mel(rate / 2.0);
    let edge = |i: usize| slaney_hz(top * i as f64 / (bands + 1) as f64);
    (0..bands)
        .map(|band| {
            let (low, centre, high) = (edge(band), edge(band + 1), edge(band + 2));
            Filter::new(fft / 2 + 1, |bin| {
                let hz = bin as f64 * rate / fft as f64;
                let slope = ((hz - low) / (centre - low)).min((high - hz) / (high - centre));
                // The area of every triangle is the same: bands differ in width, not in weight.
                slope.max(0.0) * 2.0 / (high - low)
            })
        })
        .collect()
}

/// Kaldi's filters are triangles on the mel axis itself, and leave out the Nyquist bin.
///
/// # Why
/// In `f32`, unlike everything else here: beside the edge of a triangle the difference of two mel values is mostly
/// rounding, and the networks know the filters with that rounding in them.
fn kaldi_filters() -> Vec<Filter> {
    let mel = |hz: f64| 1127.0 * (1.0 + hz / 700.0).ln();
    let (low, high) = (mel(20.0), mel(f64::from(SPEECH_RATE) / 2.0));
    let step = ((high - low) / (FBANK_BANDS + 1) as f64) as f32;
    let edge = |i: usize| low as f32 + i as f32 * step;
    let width = SPEECH_RATE as f32 / KALDI_FFT as f32;
    (0..FBANK_BANDS)
        .map(|band| {
            let (left, centre, right) = (edge(band), edge(band + 1), edge(band + 2));
            Filter::new(KALDI_FFT / 2, |bin| {
                let m = 1127.0 * (1.0 + width * bin as f32 / 700.0).ln();
                f64::from(((m - left) / (centre - left)).min((right - m) / (right - centre)).max(0.0))
            })
        })
        .collect()
}

fn periodic_hann(len: usize) -> Vec<f64> {
    (0..len).map(|i| 0.5 - 0.5 * (2.0 * PI * i as f64 / len as f64).cos()).collect()
}

/// Kaldi's default window: a symmetric Hann window to the power of 0.85.
fn povey(len: usize) -> Vec<f64> {
    (0..len).map(|i| (0.5 - 0.5 * (2.0 * PI * i as f64 / (len - 1) as f64).cos()).powf(0.85)).collect()
}

/// `samples` with `pad` mirrored samples at both ends; the outermost sample itself is not repeated.
fn reflect(samples: &[f32], pad: usize) -> Result<Vec<f64>, TooShort> {
    if samples.len() <= pad {
        return Err(TooShort { samples: samples.len(), needed: pad + 1 });
    }
    let before = samples[1..=pad].iter().rev();
    let after = samples[samples.len() - 1 - pad..samples.len() - 1].iter().rev();
    Ok(before.chain(samples).chain(after).map(|v| f64::from(*v)).collect())
}

/// A real FFT with its buffers.
struct Spectrum {
    fft: std::sync::Arc<dyn RealToComplex<f64>>,
    input: Vec<f64>,
    output: Vec<Complex<f64>>,
    scratch: Vec<Complex<f64>>,
}

impl Spectrum {
    fn new(len: usize) -> Self {
        let fft = RealFftPlanner::new().plan_fft_forward(len);
        let (input, output, scratch) = (fft.make_input_vec(), fft.make_output_vec(), fft.make_scratch_vec());
        Self { fft, input, output, scratch }
    }

    /// Spectrum of the first samples under `window`, zero-padded to the transform's length.
    fn of(&mut self, samples: &[f64], window: &[f64]) -> &[Complex<f64>] {
        self.input.fill(0.0);
        for (slot, (sample, weight)) in self.input.iter_mut().zip(samples.iter().zip(window)) {
            *slot = sample * weight;
        }
        self.fft
            .process_with_scratch(&mut self.input, &mut self.output, &mut self.scratch)
            .expect("the buffers were made by this transform");
        &self.output
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_at_the_floor_of_each() {
        assert!(prompt_mel(&[0.0; 4800]).expect("long enough").data.iter().all(|v| *v < -6.0 && v.is_finite()));
        assert!(whisper_log_mel(&[0.0; 1600], 128).expect("long enough").data.iter().all(|v| *v == -1.5));
        let floor = f32::EPSILON.ln();
        assert!(kaldi_fbank(&[0.0; 1600]).expect("long enough").data.iter().all(|v| (v - floor).abs() < 1e-4));
    }

    #[test]
    fn frames_follow_from_samples() {
        assert_eq!(prompt_mel(&[0.1; 4801]).expect("long enough").rows, 10);
        assert_eq!(whisper_log_mel(&[0.1; 1759], 80).map(|m| (m.rows, m.cols)), Ok((80, 10)));
        assert_eq!(kaldi_fbank(&[0.1; 560]).expect("long enough").rows, 2);
    }

    #[test]
    fn what_is_too_short_is_refused() {
        assert_eq!(prompt_mel(&[0.0; 720]), Err(TooShort { samples: 720, needed: 721 }));
        assert!(whisper_log_mel(&[0.0; 200], 128).is_err());
        assert!(kaldi_fbank(&[0.0; 399]).is_err());
    }

    #[test]
    fn the_time_mean_becomes_zero() {
        let m = minus_time_mean(Matrix { rows: 2, cols: 2, data: vec![1.0, 5.0, 3.0, 5.0] });
        assert_eq!(m.data, [-1.0, 0.0, 1.0, 0.0]);
    }
}
