//! The vocoder's short transforms, one column at a time: source analysis and waveform synthesis.
//!
//! Both are centred with a periodic Hann window, as torch's `stft` and `istft`, and both go on from call to call.

use std::f64::consts::TAU;

/// Centred STFT of a signal that arrives in pieces; reflected at both ends.
#[derive(Clone)]
pub(super) struct Analysis {
    n_fft: usize,
    hop: usize,
    window: Vec<f32>,
    /// `[bins][n_fft]` cosines, then sines negated.
    basis: Vec<f32>,
    /// Samples from `from` on.
    samples: Vec<f32>,
    from: usize,
    /// Columns given out.
    done: usize,
}

impl Analysis {
    pub(super) fn new(n_fft: usize, hop: usize) -> Self {
        let bins = n_fft / 2 + 1;
        let angle = |k: usize, n: usize| TAU * ((k * n) % n_fft) as f64 / n_fft as f64;
        let row = |f: fn(f64) -> f64, sign: f64| {
            (0..bins).flat_map(move |k| (0..n_fft).map(move |n| (sign * f(angle(k, n))) as f32))
        };
        let basis = row(f64::cos, 1.0).chain(row(f64::sin, -1.0)).collect();
        Self { n_fft, hop, window: hann(n_fft), basis, samples: Vec::new(), from: 0, done: 0 }
    }

    /// Takes new samples.
    pub(super) fn push(&mut self, samples: &[f32]) {
        self.samples.extend_from_slice(samples);
    }

    /// Columns up to `to`, each real parts then imaginary parts. With `last` the signal ends here; else it must
    /// reach half a window past the last column.
    pub(super) fn columns(&mut self, to: usize, last: bool) -> Vec<f32> {
        let half = self.n_fft / 2;
        let total = self.from + self.samples.len();
        let mut out = Vec::with_capacity((to - self.done) * (self.n_fft + 2));
        let mut frame = vec![0f32; self.n_fft];
        for column in self.done..to {
            for (n, value) in frame.iter_mut().enumerate() {
                let at = (column * self.hop + n) as i64 - half as i64;
                let at = if at < 0 {
                    -at
                } else if last && at >= total as i64 {
                    2 * (total as i64 - 1) - at
                } else {
                    at
                };
                let sample = usize::try_from(at - self.from as i64).ok().and_then(|i| self.samples.get(i));
                *value = sample.copied().unwrap_or_default() * self.window[n];
            }
            out.extend(
                self.basis.chunks_exact(self.n_fft).map(|b| b.iter().zip(&frame).map(|(b, x)| b * x).sum::<f32>()),
            );
        }
        self.done = to;
        // The next column reaches half a window back, the end's reflection as far again.
        let keep = (to * self.hop).saturating_sub(2 * self.n_fft).max(self.from).min(total);
        self.samples.drain(..keep - self.from);
        self.from = keep;
        out
    }
}

/// Centred inverse STFT by overlap-add, from log-magnitudes and phase arguments.
#[derive(Clone)]
pub(super) struct Synthesis {
    n_fft: usize,
    hop: usize,
    limit: f32,
    window: Vec<f32>,
    /// `[n_fft][bins]` cosines and sines with the inverse transform's weights.
    cosines: Vec<f32>,
    sines: Vec<f32>,
    /// Sums of windowed columns and of squared windows, for samples not complete yet; the first is sample
    /// `column * hop - n_fft / 2`.
    sum: Vec<f32>,
    weight: Vec<f32>,
    column: usize,
}

impl Synthesis {
    pub(super) fn new(n_fft: usize, hop: usize, limit: f32) -> Self {
        let bins = n_fft / 2 + 1;
        let angle = |k: usize, n: usize| TAU * ((k * n) % n_fft) as f64 / n_fft as f64;
        let weight = |k: usize| if k == 0 || k == n_fft / 2 { 1.0 } else { 2.0 } / n_fft as f64;
        let table = |f: fn(f64) -> f64| {
            (0..n_fft).flat_map(move |n| (0..bins).map(move |k| (weight(k) * f(angle(k, n))) as f32)).collect()
        };
        Self {
            n_fft,
            hop,
            limit,
            window: hann(n_fft),
            cosines: table(f64::cos),
            sines: table(f64::sin),
            sum: vec![0.0; n_fft],
            weight: vec![0.0; n_fft],
            column: 0,
        }
    }

    /// Adds columns and returns the samples they complete. `end`: the signal has so many samples and ends here.
    pub(super) fn push(&mut self, columns: &[f32], end: Option<usize>) -> Vec<f32> {
        let (bins, half) = (self.n_fft / 2 + 1, self.n_fft / 2);
        let mut out = Vec::with_capacity(columns.len() / (self.n_fft + 2) * self.hop + self.n_fft);
        let mut real = vec![0f32; bins];
        let mut imaginary = vec![0f32; bins];
        for column in columns.chunks_exact(2 * bins) {
            for k in 0..bins {
                let magnitude = column[k].exp().min(100.0);
                let phase = column[bins + k].sin();
                real[k] = magnitude * phase.cos();
                imaginary[k] = magnitude * phase.sin();
            }
            for n in 0..self.n_fft {
                let row = n * bins..(n + 1) * bins;
                let cosine: f32 = self.cosines[row.clone()].iter().zip(&real).map(|(c, r)| c * r).sum();
                let sine: f32 = self.sines[row].iter().zip(&imaginary).map(|(s, i)| s * i).sum();
                self.sum[n] += (cosine - sine) * self.window[n];
                self.weight[n] += self.window[n] * self.window[n];
            }
            self.shift(self.hop, half, None, &mut out);
        }
        if end.is_some() {
            self.shift(self.n_fft - self.hop, half, end, &mut out);
        }
        out
    }

    /// Gives out the oldest `count` samples; those before the signal's start or after its end are padding.
    fn shift(&mut self, count: usize, half: usize, end: Option<usize>, out: &mut Vec<f32>) {
        let start = self.column * self.hop;
        for n in 0..count {
            let at = start + n;
            if at >= half && end.is_none_or(|end| at - half < end) {
                out.push((self.sum[n] / self.weight[n]).clamp(-self.limit, self.limit));
            }
        }
        self.column += count / self.hop;
        for values in [&mut self.sum, &mut self.weight] {
            values.drain(..count);
            values.resize(self.n_fft, 0.0);
        }
    }
}

/// Periodic Hann window.
fn hann(n: usize) -> Vec<f32> {
    (0..n).map(|i| (0.5 - 0.5 * (TAU * i as f64 / n as f64).cos()) as f32).collect()
}
