//! Where a recogniser sits: on a device of its own, or beside a voice, which loads it and takes it along when it goes.
//!
//! A voice takes all memory that is left, so what sits beside it is loaded first, by the voice's own load. When the device
//! is lost the recogniser is gone at once, so that the context can go too, and sits again once the voice is loaded again.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::super::device::{Device, GpuError};
use super::{Place, Whisper};
use crate::synth::Precedence;
use crate::synth::cosyvoice::backend::Hardware;

/// Loads the recogniser.
type Load = Box<dyn Fn(&Place) -> Result<Whisper, GpuError> + Send + Sync>;

/// A place for one recogniser. Clones are the same place.
#[derive(Clone)]
pub struct Seat(Arc<Inner>);

struct Inner {
    load: Load,
    whisper: Mutex<Option<Whisper>>,
    /// How often one was loaded.
    generation: AtomicU64,
    precedence: Arc<Precedence>,
}

/// Why a step was not done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SeatError {
    /// No recogniser is there, or another than before.
    #[error("the GPU is not there now")]
    Empty,
    /// It failed; where the device did, its thread is gone.
    #[error(transparent)]
    Failed(#[from] GpuError),
}

impl Seat {
    /// An empty seat; `load` is called for each device that the recogniser comes to.
    pub fn new(load: impl Fn(&Place) -> Result<Whisper, GpuError> + Send + Sync + 'static) -> Self {
        let (load, precedence): (Load, _) = (Box::new(load), Arc::default());
        Self(Arc::new(Inner { load, whisper: Mutex::default(), generation: AtomicU64::new(0), precedence }))
    }

    fn whisper(&self) -> MutexGuard<'_, Option<Whisper>> {
        // One that was left in the middle of a step has its memory, and what was not written is zeros.
        self.0.whisper.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sit(&self, place: &Place) -> Result<(), GpuError> {
        let whisper = (self.0.load)(place)?;
        let mut seat = self.whisper();
        *seat = Some(whisper);
        self.0.generation.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Loads it onto device `ordinal`, in a context of its own.
    ///
    /// # Errors
    /// The device cannot be used, or the recogniser cannot be loaded onto it.
    pub fn open(&self, ordinal: u32, hardware: &Hardware) -> Result<(), GpuError> {
        self.sit(&Place::open(ordinal, hardware)?)
    }

    /// Loads it beside a voice that is being loaded. Where that fails the voice goes on by itself.
    pub(in super::super) fn settle(&self, device: &Device) -> Seated {
        match Place::beside(device).and_then(|place| self.sit(&place)) {
            Ok(()) => tracing::info!(device = device.name, "the recogniser is loaded beside the voice"),
            Err(error) => tracing::warn!(%error, "the recogniser is not loaded beside the voice"),
        }
        Seated(self.clone())
    }

    /// Which of those that sat here is there now; it changes with every load.
    pub fn generation(&self) -> u64 {
        self.0.generation.load(Ordering::Relaxed)
    }

    /// Whether one is there.
    pub fn is_taken(&self) -> bool {
        self.whisper().is_some()
    }

    /// What goes before a step of it.
    pub fn precedence(&self) -> &Arc<Precedence> {
        &self.0.precedence
    }

    /// Has the recogniser of that generation do something.
    ///
    /// # Errors
    /// It is not there, or it failed.
    pub fn with<T>(
        &self,
        generation: u64,
        work: impl FnOnce(&mut Whisper) -> Result<T, GpuError>,
    ) -> Result<T, SeatError> {
        let mut seat = self.whisper();
        let whisper = seat.as_mut().filter(|_| self.generation() == generation).ok_or(SeatError::Empty)?;
        let result = work(whisper);
        // A wrong request harms no other; everything else is the device's.
        if result.as_ref().is_err_and(|error| !matches!(error, GpuError::Model(_))) {
            *seat = None;
        }
        Ok(result?)
    }
}

/// Clears the seat when the voice goes.
pub(in super::super) struct Seated(Seat);

impl Seated {
    pub(in super::super) fn precedence(&self) -> Arc<Precedence> {
        self.0.precedence().clone()
    }
}

impl Drop for Seated {
    fn drop(&mut self) {
        *self.0.whisper() = None;
        self.0.0.precedence.set(false);
    }
}

impl PartialEq for Seat {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seat").field("generation", &self.generation()).finish_non_exhaustive()
    }
}
