//! GEMMs of wide steps over numbers of 8 bits (E4M3), where an operator chose them: a mode of its own, since a mel differs by it.
//!
//! Weights are rounded at load, each matrix by a power of two. What comes in is rounded by whoever makes it, the norms, attention
//! and the GEMM before: ranges are known beforehand ([`Ranges`](crate::synth::cosyvoice::fp8::Ranges)), so that each layer has one constant for each of them. What comes
//! out has 16 bits again, but for what GELU gives, which is the next GEMM's input.
//!
//! # Why
//! Narrow steps wait for weights and have kernels of their own, in 16 bits; wide ones wait for the MMAs, which do twice as many
//! operations on 8.

use super::super::device::{Buf, GpuError};
use super::super::lt::{Lt, Operands, Shape};
use super::super::weights::Packer;
use super::linear::SKINNY_ROWS;
use crate::synth::cosyvoice::backend::Products;
use crate::synth::cosyvoice::fp8::{largest, scale};

/// A GEMM's weight in 8 bits, and by what its operands were multiplied.
pub(super) struct Fp8 {
    weight: Buf,
    /// In the operands' type.
    bias: Buf,
    /// Of the inputs.
    pub(super) inputs: f32,
    /// Takes both back.
    alpha: f32,
    /// Of results in 8 bits, on the device; others have none.
    results: Option<Buf>,
}

impl Fp8 {
    /// `weight` `[n][k]`; `range`: what no input is larger than; `results`: the same of results that are to have 8 bits.
    pub(super) fn new(
        packer: &Packer,
        weight: &[f32],
        bias: &[f32],
        range: f32,
        results: Option<f32>,
    ) -> Result<Self, GpuError> {
        let (by, inputs) = (scale(largest(weight)), scale(range));
        Ok(Self {
            weight: packer.fp8(weight, by)?,
            bias: packer.elements(bias)?,
            inputs,
            alpha: 1.0 / (by * inputs),
            results: results.map(|range| packer.device.upload("a scale", &[scale(range)])).transpose()?,
        })
    }

    pub(super) fn operands(&self, x: u64, y: u64) -> Operands {
        let by = self.results.as_ref().map_or(0, |by| by.ptr);
        Operands { x, w: self.weight.ptr, bias: self.bias.ptr, y, alpha: self.alpha, by }
    }

    /// Has `lt` make a plan for GEMMs of `shape`, on real operands.
    pub(super) fn prepare(&self, lt: &mut Lt, shape: Shape, x: u64, y: u64) -> Result<(), GpuError> {
        lt.prepare(shape, self.operands(x, y)).map_err(|error| match error {
            // Which of them there are depends on the card and on the library's version.
            GpuError::Blas(why) => {
                GpuError::Blas(format!("{why}: no GEMM of 8 bits for {shape:?} on this card: `products` \"full\""))
            }
            other => other,
        })
    }
}

/// Rows from which GEMMs are in 8 bits; `None`: none are.
pub(super) fn least_rows(products: Products) -> Option<usize> {
    match products {
        Products::Full => None,
        Products::Fp8 => Some(SKINNY_ROWS + 1),
        Products::Fp8Always => Some(0),
    }
}
