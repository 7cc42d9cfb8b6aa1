//! What a GPU's modes of fewer bits round in the flow, rounded alike: the reference for what they cost in accuracy.

use candle_core::{Result, Tensor};

use crate::synth::cosyvoice::fp8;

/// Largest integer that a value of 8 bits is rounded to; as many below zero.
const LARGEST_INTEGER: f32 = 127.0;

/// `x` in numbers of 8 bits and back; none of it is larger than `largest`.
pub(super) fn fp8(x: &Tensor, largest: f32) -> Result<Tensor> {
    let by = fp8::scale(largest);
    let mut values = x.flatten_all()?.to_vec1()?;
    values.iter_mut().for_each(|v| *v = fp8::round(*v * by) / by);
    Tensor::from_vec(values, x.shape(), x.device())
}

/// `x` in integers of 8 bits and back, each row along the last axis by its own largest value.
pub(super) fn int8_rows(x: &Tensor) -> Result<Tensor> {
    let mut values = x.flatten_all()?.to_vec1()?;
    for row in values.chunks_exact_mut(x.dims().last().copied().unwrap_or(1).max(1)) {
        let scale = fp8::largest(row) / LARGEST_INTEGER;
        // A row of zeros has no largest value to divide by.
        if scale > 0.0 {
            row.iter_mut().for_each(|v| *v = (*v / scale).round_ties_even() * scale);
        }
    }
    Tensor::from_vec(values, x.shape(), x.device())
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn rows<const N: usize>(values: &[[f32; 4]; N]) -> Tensor {
        Tensor::new(values, &Device::Cpu).expect("a tensor")
    }

    fn back(x: Result<Tensor>) -> Vec<Vec<f32>> {
        x.and_then(|x| x.to_vec2()).expect("computes")
    }

    #[test]
    fn numbers_of_eight_bits_have_three_bits_of_mantissa_and_ties_go_to_even_ones() {
        let x = rows(&[[1.0, 1.0625, 1.125, 1.19], [-448.0, 0.017, 3.3, 0.0]]);
        let expected = [[1.0, 1.0, 1.125, 1.25], [-448.0, 0.017_578_125, 3.25, 0.0]];
        assert_eq!(back(fp8(&x, 448.0)), expected);
        // A scale moves the exponent and nothing else.
        let smaller = |x: f32| x / 1024.0;
        let small = rows(&[[1.0, 1.0625, 1.125, 1.19], [-448.0, 0.017, 3.3, 0.0]].map(|row| row.map(smaller)));
        assert_eq!(back(fp8(&small, 0.437_5)), expected.map(|row| row.map(smaller)));
        assert_eq!(back(fp8(&(x * 4.0).expect("computes"), 448.0))[1][0], -448.0, "the rest is as large as can be");
    }

    #[test]
    fn integers_of_eight_bits_share_their_rows_largest_value() {
        let x = rows(&[[127.0, 0.4, -63.6, 1.0], [0.0; 4]]);
        assert_eq!(back(int8_rows(&x)), [[127.0, 0.0, -64.0, 1.0], [0.0; 4]]);
    }
}
