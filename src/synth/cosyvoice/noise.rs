//! The two fixed noise tables, bit for bit as the reference draws them (section 9 of its description).
//!
//! A plain MT19937 seeded with 0, one 32-bit output a value. Only the prefix that is asked for is generated.

use super::backend::SineNoise;
use super::config::{Config, NOISE_SECONDS};

/// Samples that the original's excitation table has a second.
const TABLE_RATE: usize = 24_000;

/// MT19937 (Matsumoto and Nishimura, 1998), `init_genrand`.
pub struct MersenneTwister {
    state: [u32; 624],
    at: usize,
}

impl MersenneTwister {
    /// The generator for `seed`.
    pub fn new(seed: u32) -> Self {
        let mut state = [0u32; 624];
        let mut previous = seed;
        for (i, word) in state.iter_mut().enumerate() {
            if i > 0 {
                previous = 1_812_433_253u32.wrapping_mul(previous ^ previous >> 30).wrapping_add(i as u32);
            }
            *word = previous;
        }
        Self { state, at: 624 }
    }

    /// The next 32 bits.
    pub fn next_u32(&mut self) -> u32 {
        if self.at == 624 {
            self.refill();
        }
        let mut y = self.state[self.at];
        self.at += 1;
        y ^= y >> 11;
        y ^= y << 7 & 0x9d2c_5680;
        y ^= y << 15 & 0xefc6_0000;
        y ^ y >> 18
    }

    /// The next value in `[0, 1)` with 24 bits, as torch makes floats.
    pub fn next_unit(&mut self) -> f32 {
        (self.next_u32() & 0x00ff_ffff) as f32 / (1u32 << 24) as f32
    }

    /// Passes over `count` values.
    pub fn skip(&mut self, mut count: usize) {
        while count > 0 {
            if self.at == 624 {
                self.refill();
            }
            let now = count.min(624 - self.at);
            self.at += now;
            count -= now;
        }
    }

    fn refill(&mut self) {
        for i in 0..624 {
            let y = (self.state[i] & 0x8000_0000) | (self.state[(i + 1) % 624] & 0x7fff_ffff);
            let odd = if y & 1 == 0 { 0 } else { 0x9908_b0df };
            self.state[i] = self.state[(i + 397) % 624] ^ y >> 1 ^ odd;
        }
        self.at = 0;
    }
}

/// The flow's start: `[mel, frames]` row-major, `frames` = [`Config::noise_frames`], standard normal.
pub fn flow_table(config: &Config) -> Vec<f32> {
    let mut generator = MersenneTwister::new(0);
    let count = config.flow.mel * config.noise_frames();
    let mut values: Vec<f32> = (0..count).map(|_| generator.next_unit()).collect();
    // Blocks of sixteen; torch redraws a last partial block from the end, which no real size has.
    for block in values.chunks_exact_mut(16) {
        for j in 0..8 {
            let radius = (-2.0 * log(1.0 - block[j])).sqrt();
            let (sine, cosine) = sine_cosine(2.0 * std::f32::consts::PI * block[j + 8]);
            block[j] = radius * cosine;
            block[j + 8] = radius * sine;
        }
    }
    values
}

/// Natural logarithm by the Cephes polynomial, in single precision: what torch's vectorised generator uses. For
/// normal positive numbers.
fn log(x: f32) -> f32 {
    let bits = x.to_bits();
    let mut exponent = (bits >> 23) as i32 - 126;
    let mut x = f32::from_bits(bits & 0x007f_ffff | 0x3f00_0000);
    if x < std::f32::consts::FRAC_1_SQRT_2 {
        exponent -= 1;
        x += x;
    }
    x -= 1.0;
    let square = x * x;
    let polynomial = [
        7.037_683_6e-2,
        -1.151_461e-1,
        1.167_699_9e-1,
        -1.242_014_1e-1,
        1.424_932_3e-1,
        -1.666_805_8e-1,
        2.000_071_5e-1,
        -2.499_999_4e-1,
        3.333_333e-1,
    ];
    let e = exponent as f32;
    let mut y = horner(&polynomial, x) * x * square;
    y = fused(e, -2.121_944_4e-4, y);
    y = fused(square, -0.5, y);
    fused(e, 0.693_359_4, x + y)
}

/// Sine and cosine by the Cephes polynomials, likewise. For `0 <= x < 2 pi`.
fn sine_cosine(x: f32) -> (f32, f32) {
    let octant = ((x * (4.0 / std::f32::consts::PI)) as i32 + 1) & !1;
    let y = octant as f32;
    let x = fused(y, -0.785_156_25, x);
    let x = fused(y, -2.418_756_5e-4, x);
    let x = fused(y, -3.774_895e-8, x);
    let square = x * x;
    let cosine = horner(&[2.443_315_7e-5, -1.388_731_6e-3, 4.166_664_6e-2], square) * square * square;
    let cosine = fused(square, -0.5, cosine) + 1.0;
    let sine = horner(&[-1.951_529_6e-4, 8.332_161e-3, -1.666_665_5e-1], square) * square;
    let sine = fused(sine, x, x);
    let (s, c) = if octant & 2 == 0 { (sine, cosine) } else { (cosine, sine) };
    let turned = |v: f32, flips: bool| if flips { -v } else { v };
    (turned(s, octant & 4 != 0), turned(c, (octant + 2) & 4 != 0))
}

fn horner(coefficients: &[f32], x: f32) -> f32 {
    coefficients.iter().copied().reduce(|y, c| fused(y, x, c)).unwrap_or_default()
}

/// `a * b + c` rounded once.
fn fused(a: f32, b: f32, c: f32) -> f32 {
    a.mul_add(b, c)
}

/// The vocoder's excitation noise by sample and harmonic, grown on demand.
pub struct SineTable {
    rows: usize,
    limit: usize,
    source: Source,
    values: Vec<f32>,
}

enum Source {
    Native(Box<MersenneTwister>),
    Formula(u32),
}

impl SineTable {
    /// A table for the sizes of `config`.
    pub fn new(config: &Config, noise: SineNoise) -> Self {
        let source = match noise {
            SineNoise::Formula(constant) => Source::Formula(constant),
            SineNoise::Native => {
                let mut generator = MersenneTwister::new(0);
                generator.skip(draws_before(config));
                Source::Native(Box::new(generator))
            }
        };
        Self { rows: config.hift.harmonics + 1, limit: NOISE_SECONDS * TABLE_RATE, source, values: Vec::new() }
    }

    /// Values per sample: harmonics and fundamental.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Samples the table can have: 300 s.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Rows `0..samples`, each [`Self::rows`] values in `[0, 1)`; fewer where the table ends.
    pub fn prefix(&mut self, samples: usize) -> &[f32] {
        let wanted = samples.min(self.limit) * self.rows;
        while self.values.len() < wanted {
            let value = match &mut self.source {
                Source::Native(generator) => generator.next_unit(),
                Source::Formula(constant) => formula(*constant, self.values.len() as u64),
            };
            self.values.push(value);
        }
        &self.values[..wanted]
    }
}

/// What a golden kit has in place of the reference's table, by the kit's constant and flat index.
pub fn formula(constant: u32, index: u64) -> f32 {
    let mut x = (index + 1 + (u64::from(constant) << 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    x ^= x >> 30;
    x = x.wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x ^= x >> 27;
    x = x.wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^= x >> 31;
    (x >> 40) as f32 / (1u32 << 24) as f32
}

/// Draws between the seed and the excitation table: the flow's table, then the initialisers of the layers that are
/// built before it (token embedding, speaker projection, F0 network), then the unused initial phases.
pub(super) fn draws_before(config: &Config) -> usize {
    let (flow, f0) = (&config.flow, config.hift.f0_channels);
    let table = flow.mel * config.noise_frames();
    let front = flow.vocab * flow.input + flow.speaker * flow.mel + flow.mel;
    let f0_net = f0 * config.hift.mel * 4 + f0 + 4 * (f0 * f0 * 3 + f0) + f0 + 1;
    table + front + f0_net + config.hift.harmonics + 1
}
