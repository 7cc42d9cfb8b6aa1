//! Numbers of 8 bits with four bits of exponent and three of mantissa (E4M3 of the OCP 8-bit floating point specification):
//! how the inputs of the flow's products are brought into their range.
//!
//! # Why
//! Every range is known from the weights: what a layer norm gives has a length that only its modulation changes, and what a
//! layer makes of that no more than the length of its weights allows. So nothing is looked for while a step runs, what a row
//! becomes depends on no other, and whoever makes a value writes it in 8 bits at once. Such a bound is some 5 bits above what
//! occurs; of the 15 that the exponent spans, that leaves more than values near zero need. Scales are powers of two, which
//! add no rounding of their own.

/// Largest of these numbers.
pub(super) const LARGEST: f32 = 448.0;

/// What numbers of which none is larger than `largest` are multiplied with; a power of two.
pub(super) fn scale(largest: f32) -> f32 {
    const EXPONENT: u32 = 0x7f80_0000;
    // What is as small as that is nothing, and has no scale to divide by.
    f32::from_bits((LARGEST / largest.max(1e-30)).to_bits() & EXPONENT)
}

/// The nearest of these numbers, of two that are as near the even one; what is larger than all of them becomes the largest.
pub(super) fn round(x: f32) -> f32 {
    // Steps of an eighth of the power of two below, and below 2^-6 all alike.
    let power = (x.to_bits() >> 23 & 0xff).max(127 - 6);
    let step = f32::from_bits((power - 3) << 23);
    ((x / step).round_ties_even() * step).clamp(-LARGEST, LARGEST)
}

/// The largest magnitude among `values`.
pub(super) fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |most, v| most.max(v.abs()))
}

/// What happens to each channel behind a layer norm, in whichever Euler step that is most.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Modulated {
    gain: Vec<f32>,
    shift: Vec<f32>,
}

impl Modulated {
    /// `steps`: by what each channel is multiplied, and what is added.
    pub(super) fn of(steps: impl IntoIterator<Item = (Vec<f32>, Vec<f32>)>) -> Self {
        let mut this = Self { gain: Vec::new(), shift: Vec::new() };
        for (gain, shift) in steps {
            for (most, values) in [(&mut this.gain, gain), (&mut this.shift, shift)] {
                most.resize(values.len(), 0.0);
                most.iter_mut().zip(values).for_each(|(most, v)| *most = most.max(v.abs()));
            }
        }
        this
    }

    /// The length of what a layer norm gives, at most.
    fn length(&self) -> f32 {
        (self.gain.len() as f32).sqrt()
    }

    /// What no value is larger than: all of the length may be one channel's.
    pub(super) fn bound(&self) -> f32 {
        let length = self.length();
        self.gain.iter().zip(&self.shift).map(|(gain, shift)| length * gain + shift).fold(0.0, f32::max)
    }

    /// What no output of a layer over these channels is larger than; `weight` `[outputs][channels]`. A value may point where an
    /// output's weights do.
    pub(super) fn product_bound(&self, weight: &[f32], bias: &[f32]) -> f32 {
        let (length, channels) = (self.length(), self.gain.len().max(1));
        let of = |(row, bias): (&[f32], &f32)| {
            let (mut squares, mut shifted) = (0f32, 0f32);
            for ((w, gain), shift) in row.iter().zip(&self.gain).zip(&self.shift) {
                squares += (w * gain) * (w * gain);
                shifted += w.abs() * shift;
            }
            length * squares.sqrt() + shifted + bias.abs()
        };
        weight.chunks_exact(channels).zip(bias).map(of).fold(0.0, f32::max)
    }
}

/// A layer's weight, `[outputs][inputs]`, and bias.
pub(super) type Layer<'a> = (&'a [f32], &'a [f32]);

/// What no input of a block's products is larger than.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Ranges {
    pub(super) qkv: f32,
    pub(super) out: f32,
    pub(super) up: f32,
    pub(super) down: f32,
}

impl Ranges {
    /// `attention` and `feed`: what comes before attention's products and the feed-forward layers'. `values`: the layer that
    /// makes them.
    pub(super) fn of(attention: &Modulated, feed: &Modulated, values: Layer<'_>, up: Layer<'_>) -> Self {
        Self {
            qkv: attention.bound(),
            // Attention gives means of values.
            out: attention.product_bound(values.0, values.1),
            up: feed.bound(),
            // GELU makes nothing larger.
            down: feed.product_bound(up.0, up.1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_is_the_power_of_two_that_brings_the_largest_number_into_the_upper_half_of_the_range() {
        for largest in [1e-6, 0.3, 1.0, 1.75, 1.76, 447.9, 448.0, 449.0, 60_000.0] {
            let scale = scale(largest);
            assert_eq!(scale.log2().fract(), 0.0, "{largest}");
            assert!((LARGEST / 2.0..=LARGEST * 1.0001).contains(&(largest * scale)), "{largest}: {scale}");
        }
        assert!(scale(0.0).is_finite(), "of zeros");
        assert_eq!(scale(f32::INFINITY), 0.0, "what is infinite becomes no number, which is found");
    }

    #[test]
    fn every_number_of_eight_bits_is_itself_and_others_go_to_the_nearest() {
        // Sign aside: 15 powers of two of eight numbers each, the lowest of them one step below the next, and no infinity.
        let all: Vec<f32> = (0u32..0x7f)
            .map(|bits| {
                let (power, fraction) = ((bits >> 3) as i32, (bits & 7) as f32);
                if power == 0 { fraction * 2f32.powi(-9) } else { (8.0 + fraction) * 2f32.powi(power - 10) }
            })
            .collect();
        assert_eq!(all.last(), Some(&LARGEST));
        for (n, pair) in all.windows(2).enumerate() {
            let &[low, high] = pair else { continue };
            let middle = f32::midpoint(low, high);
            assert_eq!((round(low), round(-high)), (low, -high));
            assert_eq!(round(middle), if n % 2 == 0 { low } else { high }, "{middle}");
            assert_eq!(round(f32::from_bits(middle.to_bits() - 1)), low);
            assert_eq!(round(-f32::from_bits(middle.to_bits() + 1)), -high);
        }
        assert_eq!([1e9, -f32::INFINITY].map(round), [LARGEST, -LARGEST]);
        assert!(round(f32::NAN).is_nan());
    }

    /// What a layer norm makes of `x`, without modulation.
    fn normed(x: &[f32]) -> Vec<f32> {
        let mean = x.iter().sum::<f32>() / x.len() as f32;
        let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / x.len() as f32;
        x.iter().map(|v| (v - mean) / variance.sqrt()).collect()
    }

    const CHANNELS: usize = 64;

    #[test]
    fn no_normed_value_passes_its_bound() {
        // All of it in one channel.
        let mut x = vec![0f32; CHANNELS];
        x[3] = 1e4;
        let bound = Modulated::of([(vec![-1.5; CHANNELS], vec![0.25; CHANNELS])]).bound();
        let most = largest(&normed(&x).iter().map(|v| v * -1.5 - 0.25).collect::<Vec<_>>());
        assert!(most <= bound && most > 0.95 * bound, "{most} of {bound}");
    }

    #[test]
    fn no_output_of_a_layer_passes_its_bound() {
        // Weights of no mean, so that a normed value may point where they do; the second output's are larger.
        let row: Vec<f32> =
            (0..CHANNELS).map(|c| if c % 2 == 0 { 0.5 } else { -0.5 } * (1 + c / 2 % 7) as f32).collect();
        let weight: Vec<f32> = row.iter().map(|w| w / 3.0).chain(row.iter().copied()).collect();
        let (gain, shift) = (vec![1.25; CHANNELS], row.iter().map(|w| 0.1 * w.signum()).collect::<Vec<_>>());
        let layer = |x: &[f32]| -> f32 {
            row.iter().zip(x.iter().zip(&shift)).map(|(w, (x, shift))| w * (x * 1.25 + shift)).sum::<f32>() + 0.5
        };
        let bound = Modulated::of([(gain, shift.clone())]).product_bound(&weight, &[0.5, 0.5]);
        let most = layer(&normed(&row));
        assert!(most <= bound && most > 0.99 * bound, "{most} of {bound}");
        assert!(layer(&normed(&weight[..CHANNELS].iter().rev().copied().collect::<Vec<_>>())).abs() < bound);
    }

    #[test]
    fn each_channel_counts_in_the_step_where_it_is_most() {
        let steps = [(vec![1.0, -3.0], vec![0.5, 0.0]), (vec![2.0, 1.0], vec![-1.0, 0.25])];
        assert_eq!(Modulated::of(steps), Modulated { gain: vec![2.0, 3.0], shift: vec![1.0, 0.25] });
    }
}
