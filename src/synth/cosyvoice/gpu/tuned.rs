//! What was found fastest on a kind of device, kept for as long as the process runs, and on disk for later ones.
//!
//! # Why
//! Kernels that do the same GEMM round differently, and which is fastest is found by timing. Were it found anew by
//! every load, a seed's audio would change when a lost device is loaded again, from card to card and from process to
//! process; and the timing takes seconds of a start.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

use super::compiler::{self, Source};
use super::device::{Device, Elt, GpuError};
use super::lt::Shape;

/// A finding, and how it is written down.
pub(super) trait Finding: Copy {
    /// A name that no other kind of finding has. It changes with the meaning of the bytes.
    const KIND: &'static str;
    /// The kernels of ours that are timed: what was found of others says nothing of these.
    const KERNELS: &'static [&'static Source];

    fn to_bytes(self) -> Vec<u8>;

    /// `None`: they are none of this kind.
    fn from_bytes(bytes: &[u8]) -> Option<Self>;
}

type Found<T> = HashMap<(String, Elt, Shape), T>;

/// Findings of one kind, by the device and all that they depend on, the operands' type and the GEMM.
pub(super) struct Tuned<T>(LazyLock<Mutex<Found<T>>>);

impl<T: Finding> Tuned<T> {
    pub(super) const fn new() -> Self {
        Self(LazyLock::new(Mutex::default))
    }

    /// What was found before, or what `find` finds now. Where two look at once, threads or processes that share a cache,
    /// both get what the first found.
    pub(super) fn of(
        &self,
        device: &Device,
        elt: Elt,
        shape: Shape,
        find: impl FnOnce() -> Result<T, GpuError>,
    ) -> Result<T, GpuError> {
        let key = (format!("{} {}", device.name, device.identity), elt, shape);
        let found = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = found().get(&key).copied() {
            return Ok(known);
        }
        let kernels = compiler::named("", T::KERNELS.iter().flat_map(|source| source.parts.iter().copied()));
        let name = format!("{} {elt:?} {shape:?} {kernels}", T::KIND);
        if let Some(known) = device.remembered(&name).and_then(|bytes| T::from_bytes(&bytes)) {
            return Ok(*found().entry(key).or_insert(known));
        }
        // Not under the lock: it takes a while.
        let new = find()?;
        // Another process may have looked at the same time: what the first of them wrote holds for all.
        let new = T::from_bytes(&device.remember(&name, new.to_bytes())).unwrap_or(new);
        Ok(*found().entry(key).or_insert(new))
    }
}
