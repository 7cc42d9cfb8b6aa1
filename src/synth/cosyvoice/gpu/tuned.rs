//! What was found fastest on a kind of device, kept for as long as the process runs.
//!
//! # Why
//! Kernels that do the same product round differently, and which is fastest is found by timing. Were it found anew by
//! every load, a seed's audio would change when a lost device is loaded again, and from card to card.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

use super::device::{Device, Elt, GpuError};
use super::lt::Shape;

type Found<T> = HashMap<(String, Elt, Shape), T>;

/// Findings of one kind, by the device's name, the operands' type and the product.
pub(super) struct Tuned<T>(LazyLock<Mutex<Found<T>>>);

impl<T: Copy> Tuned<T> {
    pub(super) const fn new() -> Self {
        Self(LazyLock::new(Mutex::default))
    }

    /// What was found before, or what `find` finds now. Where two look at once, both get what the first found.
    pub(super) fn of(
        &self,
        device: &Device,
        elt: Elt,
        shape: Shape,
        find: impl FnOnce() -> Result<T, GpuError>,
    ) -> Result<T, GpuError> {
        let key = (device.name.clone(), elt, shape);
        let found = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = found().get(&key).copied() {
            return Ok(known);
        }
        // Not under the lock: it takes a while.
        let new = find()?;
        Ok(*found().entry(key).or_insert(new))
    }
}
