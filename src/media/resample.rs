//! Rate conversion, one 20 ms frame at a time.
//!
//! # Why
//! *To and from the telephone's rates* by filters of our own, as every call does it fifty times a second: speech to 8 and 16 kHz
//! with 160 taps, 8 to 16 kHz with a half-band filter, of whose samples every other is one that came (0.3 us a frame, 2 ms of
//! delay). Those at 8 kHz are flat to 3.4 kHz, 60 dB are gone at 4.0 kHz and 70 at 4.1; that to 16 is flat to 7 kHz, and 65 dB
//! are gone at 8.2. Sums are taken for many samples at a time, which compilers make vector instructions of.
//!
//! *What a caller waits for has the least delay* that such a filter can have: in minimum phase speech is 0.24 ms late at 8 kHz and
//! 0.12 at 16 up to 1 kHz, and 1.1 and 0.6 at the edges, which nobody hears. In linear phase it was 3.3 ms at 8 kHz, for half as many
//! multiplications (1.5 us for some 2.5), and at 16 by FFT more.
//!
//! *Other rates* by FFT with blocks of 10 ms and a Blackman window, which took some 5 us for 24 to 8 kHz and 5 to 10 ms of delay. The combination was measured against others: the usual squared Blackman-Harris window already takes 10 dB
//! off 3.4 kHz with these blocks and 45 dB with blocks of 5 ms, which is heard as a muffled voice; blocks of 20 ms gain 200 Hz
//! and cost another 5 ms.

use std::sync::LazyLock;

use realfft::RealFftPlanner;
use realfft::num_complex::Complex;
use rubato::audioadapter_buffers::direct::InterleavedSlice;
use rubato::{Fft, FixedSync, Resampler, ResamplerConstructionError, WindowFunction};

/// Converts a stream of 20 ms frames. Built once a stream; converting allocates nothing.
pub struct Converter {
    inner: Inner,
    frame_in: usize,
    frame_out: usize,
}

/// How it is done.
enum Inner {
    Same,
    /// From the telephone's rate to twice that.
    Double(Box<HalfBand>),
    /// From the rate of speech to a telephone's, a third or two of it.
    Thirds(Box<Thirds>),
    Any(Box<Fft<f32>>),
}

impl Converter {
    /// From `from` to `to` samples per second. Equal rates pass through.
    ///
    /// # Errors
    /// The rates make no whole number of samples in 20 ms, or are zero.
    pub fn new(from: u32, to: u32) -> Result<Self, ResamplerConstructionError> {
        let (frame_in, frame_out) = (from as usize / 50, to as usize / 50);
        let inner = if from == to {
            Inner::Same
        } else if (from, to) == (TELEPHONE, 2 * TELEPHONE) {
            Inner::Double(Box::new(HalfBand::new(frame_in)))
        } else if (from, to) == (3 * TELEPHONE, TELEPHONE) {
            Inner::Thirds(Box::new(Thirds::new(frame_in, &ONE)))
        } else if (from, to) == (3 * TELEPHONE, 2 * TELEPHONE) {
            Inner::Thirds(Box::new(Thirds::new(frame_in, &TWO)))
        } else {
            Inner::Any(Box::new(Fft::new_custom(
                from as usize,
                to as usize,
                frame_in,
                SUB_CHUNKS,
                1,
                WindowFunction::Blackman,
                FixedSync::Input,
            )?))
        };
        Ok(Self { inner, frame_in, frame_out })
    }

    /// Samples of one frame going in.
    pub fn frame_in(&self) -> usize {
        self.frame_in
    }

    /// Samples of one frame coming out.
    pub fn frame_out(&self) -> usize {
        self.frame_out
    }

    /// Converts one frame of [`Converter::frame_in`] samples into the first [`Converter::frame_out`] of `out`.
    ///
    /// # Panics
    /// When a slice is shorter: lengths are the caller's invariant, never input.
    pub fn frame(&mut self, input: &[f32], out: &mut [f32]) {
        let inner = match &mut self.inner {
            Inner::Same => return out[..self.frame_out].copy_from_slice(&input[..self.frame_in]),
            Inner::Double(filter) => return filter.frame(&input[..self.frame_in], &mut out[..self.frame_out]),
            Inner::Thirds(filter) => return filter.frame(&input[..self.frame_in], &mut out[..self.frame_out]),
            Inner::Any(inner) => inner,
        };
        let from = InterleavedSlice::new(input, 1, self.frame_in).expect("the caller gives a whole frame");
        let mut to =
            InterleavedSlice::new_mut(out, 1, self.frame_out).expect("the caller gives room for a whole frame");
        inner.process_into_buffer(&from, &mut to, None).expect("a frame is a whole number of blocks");
    }

    /// Forgets the past, for a stream that begins anew.
    pub fn reset(&mut self) {
        match &mut self.inner {
            Inner::Same => {}
            Inner::Double(filter) => filter.heard.fill(0.0),
            Inner::Thirds(filter) => filter.phases.iter_mut().for_each(|phase| phase.fill(0.0)),
            Inner::Any(inner) => inner.reset(),
        }
    }
}

impl std::fmt::Debug for Converter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Converter({} -> {})", self.frame_in * 50, self.frame_out * 50)
    }
}

/// Samples per second of a telephone.
const TELEPHONE: u32 = 8_000;

/// Samples on each side of one that is made. What mirrors those up to 3.4 kHz is 70 dB down.
const SIDE: usize = 16;

/// Makes the samples between those that come.
struct HalfBand {
    taps: [f32; SIDE],
    /// The last samples of the frame before, then the frame.
    heard: Vec<f32>,
    between: Vec<f32>,
}

impl HalfBand {
    fn new(frame: usize) -> Self {
        Self { taps: low_pass(1.0, 7.0), heard: vec![0.0; 2 * SIDE - 1 + frame], between: vec![0.0; frame] }
    }

    fn frame(&mut self, input: &[f32], out: &mut [f32]) {
        let Self { taps, heard, between } = self;
        heard.copy_within(input.len().., 0);
        heard[2 * SIDE - 1..].copy_from_slice(input);
        between.fill(0.0);
        for (n, tap) in taps.iter().enumerate() {
            let pairs = heard[SIDE - 1 - n..].iter().zip(&heard[SIDE + n..]);
            for (sum, (left, right)) in between.iter_mut().zip(pairs) {
                *sum += tap * (left + right);
            }
        }
        for ((pair, own), made) in out.chunks_exact_mut(2).zip(&heard[SIDE - 1..]).zip(&*between) {
            (pair[0], pair[1]) = (*own, *made);
        }
    }
}

/// Taps of a filter, and half of them.
const TAPS: usize = 160;
const HALF: usize = TAPS / 2;
/// Samples of a phase that the next frame needs, too.
const KEPT: usize = TAPS / 3;

/// For each of the samples that are made of three by turns, the taps that make it.
type Turns = Vec<Vec<f32>>;

/// One of three: half of 3.7 kHz is left, of 12.
static ONE: LazyLock<Turns> = LazyLock::new(|| turns(3.7 / 12.0, 1));
/// Two of three, at twice the rate that comes, of which every other sample is nothing: half of 7.5 kHz is left, of 24.
static TWO: LazyLock<Turns> = LazyLock::new(|| turns(7.5 / 24.0, 2));

/// The taps of a filter with this edge, cut up for `count` samples of three.
fn turns(cut: f64, count: usize) -> Turns {
    let taps = minimum_phase(&low_pass(cut, 6.3));
    (0..count).map(|turn| taps[turn..].iter().step_by(count).map(|tap| count as f32 * tap).collect()).collect()
}

/// Makes one sample of three, or two, and of them what the new rate can carry.
struct Thirds {
    turns: &'static [Vec<f32>],
    /// Every third sample from the first, the second and the third on: the last ones of before, then those of the frame.
    phases: [Vec<f32>; 3],
    made: Vec<f32>,
}

impl Thirds {
    /// The first of a kind finds its taps out, a few FFTs: here, and not when a packet is due.
    fn new(frame: usize, turns: &'static LazyLock<Turns>) -> Self {
        Self {
            turns: turns.as_slice(),
            phases: std::array::from_fn(|_| vec![0.0; KEPT + frame / 3]),
            made: vec![0.0; frame / 3],
        }
    }

    fn frame(&mut self, input: &[f32], out: &mut [f32]) {
        let Self { turns, phases, made } = self;
        for (n, phase) in phases.iter_mut().enumerate() {
            phase.copy_within(made.len().., 0);
            for (to, from) in phase[KEPT..].iter_mut().zip(input[n..].iter().step_by(3)) {
                *to = *from;
            }
        }
        for (turn, taps) in turns.iter().enumerate() {
            made.fill(0.0);
            // The newest sample it takes is the first of three for the first turn, and the second for the second.
            for (n, tap) in taps.iter().enumerate() {
                let at = 3 * KEPT + turn - n;
                for (sum, sample) in made.iter_mut().zip(&phases[at % 3][at / 3..]) {
                    *sum += tap * sample;
                }
            }
            for (to, sample) in out[turn..].iter_mut().step_by(turns.len()).zip(&*made) {
                *to = *sample;
            }
        }
    }
}

/// The filter that lets pass what this one of linear phase does, of which the middle comes first, with the least delay: of the
/// cepstrum of its spectrum's size the half before time zero is folded onto the other (Oppenheim and Schafer, Discrete-Time Signal
/// Processing, 13.5).
fn minimum_phase(half: &[f32; HALF]) -> [f32; TAPS] {
    /// So many that the cepstrum has died away, and sizes are told apart down to 100 dB.
    const LENGTH: usize = 8_192;
    const FLOOR: f64 = 1e-5;
    let mut planner = RealFftPlanner::<f64>::new();
    let (there, back) = (planner.plan_fft_forward(LENGTH), planner.plan_fft_inverse(LENGTH));
    let (mut time, mut spectrum) = (there.make_input_vec(), there.make_output_vec());
    for (n, tap) in half.iter().enumerate() {
        (time[HALF + n], time[HALF - 1 - n]) = (f64::from(*tap), f64::from(*tap));
    }
    // The lengths are those of the plans, and the first and the last value of what is turned back are real.
    let mut turn = |time: &mut Vec<f64>, of: fn(Complex<f64>) -> Complex<f64>| {
        there.process(time, &mut spectrum).expect("lengths of the plan");
        spectrum.iter_mut().for_each(|value| *value = of(*value));
        for end in [0, LENGTH / 2] {
            spectrum[end].im = 0.0;
        }
        back.process(&mut spectrum, time).expect("lengths of the plan");
        time.iter_mut().for_each(|value| *value /= LENGTH as f64);
    };
    turn(&mut time, |value| Complex::new(value.norm().max(FLOOR).ln(), 0.0));
    time[1..LENGTH / 2].iter_mut().for_each(|value| *value *= 2.0);
    time[LENGTH / 2 + 1..].fill(0.0);
    turn(&mut time, Complex::exp);
    std::array::from_fn(|n| time[n] as f32)
}

/// One half of a low pass of `2 * N` taps, the middle first: `cut` is its edge as a share of half the rate, `beta` the shape of
/// Kaiser's window. All taps together are 1.
fn low_pass<const N: usize>(cut: f64, beta: f64) -> [f32; N] {
    let mut taps: [f32; N] = std::array::from_fn(|n| {
        let at = n as f64 + 0.5;
        let angle = std::f64::consts::PI * cut * at;
        let edge = at / N as f64;
        (angle.sin() / angle * bessel(beta * (1.0 - edge * edge).sqrt())) as f32
    });
    let sum = 2.0 * taps.iter().sum::<f32>();
    taps.iter_mut().for_each(|tap| *tap /= sum);
    taps
}

/// The modified Bessel function of order 0, by its series.
fn bessel(x: f64) -> f64 {
    let mut term = 1.0;
    (1..32).fold(1.0, |sum, n| {
        term *= (x / (2.0 * f64::from(n))).powi(2);
        sum + term
    })
}

/// Converts a whole recording; the delay is removed, so both begin together.
///
/// # Errors
/// A rate is zero or absurd.
pub fn whole(pcm: &[f32], from: u32, to: u32) -> Result<Vec<f32>, String> {
    if from == to {
        return Ok(pcm.to_vec());
    }
    if !(1_000..=384_000).contains(&from) {
        return Err("the sample rate must be between 1 and 384 kHz".into());
    }
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let mut resampler =
        Fft::<f32>::new(from as usize, to as usize, 1_024, 1, FixedSync::Both).map_err(|error| text(&error))?;
    let input = InterleavedSlice::new(pcm, 1, pcm.len()).map_err(|error| text(&error))?;
    let room = resampler.process_all_needed_output_len(pcm.len());
    let mut out = vec![0.0; room];
    let mut output = InterleavedSlice::new_mut(&mut out, 1, room).map_err(|error| text(&error))?;
    let (_, written) =
        resampler.process_all_into_buffer(&input, &mut output, pcm.len(), None).map_err(|error| text(&error))?;
    out.truncate(written);
    Ok(out)
}

/// Blocks of 10 ms.
const SUB_CHUNKS: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;

    /// Level of `hertz` (in dB to its input) behind the converter, and of everything else together.
    fn response(from: u32, to: u32, hertz: f32) -> (f32, f32) {
        let mut converter = Converter::new(from, to).unwrap();
        let mut out = vec![0.0; converter.frame_out()];
        let mut all = Vec::new();
        for frame in 0..50 {
            let wave = |n: usize| {
                let n = (frame * converter.frame_in() + n) as f64;
                (std::f64::consts::TAU * f64::from(hertz) * n / f64::from(from)).sin() as f32
            };
            let input = (0..converter.frame_in()).map(wave).collect::<Vec<_>>();
            converter.frame(&input, &mut out);
            all.extend_from_slice(&out);
        }
        let steady = &all[to as usize / 10..];
        let (re, im) = steady.iter().enumerate().fold((0.0f64, 0.0f64), |(re, im), (n, s)| {
            let angle = std::f64::consts::TAU * f64::from(hertz) * n as f64 / f64::from(to);
            (re + f64::from(*s) * angle.cos(), im + f64::from(*s) * angle.sin())
        });
        let amplitude = 2.0 * re.hypot(im) / steady.len() as f64;
        let power = steady.iter().map(|s| f64::from(*s).powi(2)).sum::<f64>() / steady.len() as f64;
        let rest = (power - amplitude * amplitude / 2.0).max(1e-12);
        (20.0 * amplitude.log10() as f32, 10.0 * (rest * 2.0).log10() as f32)
    }

    #[test]
    fn the_telephone_band_passes_and_aliases_do_not() {
        for (from, to, edge) in [(24_000, 8_000, 3_400.0), (24_000, 16_000, 7_000.0), (8_000, 16_000, 3_400.0)] {
            for hertz in [300.0, 1_000.0, 2_000.0, 3_000.0, edge] {
                let (level, rest) = response(from, to, hertz);
                assert!(level.abs() < 0.5, "{from} to {to}, {hertz} Hz: {level} dB");
                assert!(rest < -60.0, "{from} to {to}, {hertz} Hz: rest {rest} dB");
            }
        }
        for (to, hertz) in [4_100.0, 4_600.0, 5_000.0, 7_000.0, 11_000.0]
            .map(|hertz| (8_000, hertz))
            .into_iter()
            .chain([8_300.0, 9_000.0, 11_000.0].map(|hertz| (16_000, hertz)))
        {
            // What folds back is found under its own name, too: the rates differ by whole turns.
            let (level, rest) = response(24_000, to, hertz);
            assert!(level.max(rest) < -60.0, "{hertz} Hz aliases at {level} and {rest} dB at {to}");
        }
    }

    #[test]
    fn frames_are_converted_as_one_piece_and_anew_after_a_reset() {
        for (from, to, delay) in [(8_000, 16_000, 16.0), (24_000, 8_000, 5.759), (24_000, 16_000, 2.925)] {
            let (step, frame) = (0.7 * 8_000.0 / from as f32, from / 50);
            let mut converter = Converter::new(from as u32, to as u32).unwrap();
            let mut convert = || {
                let mut out = vec![0.0; to / 50];
                let mut all = Vec::new();
                for part in 0..5 {
                    let input: Vec<f32> = (0..frame).map(|n| ((part * frame + n) as f32 * step).sin()).collect();
                    converter.frame(&input, &mut out);
                    all.extend_from_slice(&out);
                }
                converter.reset();
                all
            };
            let (once, again) = (convert(), convert());
            assert_eq!(once, again);
            // The same wave, so many samples of what came later, also where two frames meet. Filters in linear phase of as many
            // taps as those from 24 kHz would be 79.5 and 39.75 later.
            for (n, sample) in once.iter().enumerate().skip(to / 50) {
                let at = n as f32 * from as f32 / to as f32 - delay;
                let wanted = (at * step).sin();
                assert!((sample - wanted).abs() < 2e-3, "{from} to {to}, {n}: {sample} for {wanted}");
            }
        }
    }

    #[test]
    fn equal_rates_pass_through() {
        let mut converter = Converter::new(24_000, 24_000).unwrap();
        let mut out = vec![0.0; 480];
        converter.frame(&[0.5; 480], &mut out);
        assert_eq!(out, [0.5; 480]);
    }
}
