//! What the handle and the thread of jobs share.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::audio::Place;
use super::changes::Changes;
use super::store::Store;
use crate::supervise::Part;

/// What the handle and the thread share.
pub(super) struct Shared {
    store: Mutex<Box<dyn Store>>,
    /// Where audio lies.
    pub(super) place: Place,
    /// There may be something to do, or to stop.
    pub(super) changed: Arc<Notify>,
    /// Who is told what has become of jobs.
    pub(super) changes: Changes,
    stopped: AtomicBool,
    /// The thread that works on jobs.
    pub(super) part: Part,
    /// Days that jobs which are over are kept.
    pub(super) keep_days: AtomicU32,
    pub(super) stalled: Mutex<Option<String>>,
    /// Characters a second, smoothed.
    pub(super) speed: Mutex<Option<f64>>,
}

impl Shared {
    pub(super) fn new(store: Box<dyn Store>, changed: Arc<Notify>, place: Place, changes: Changes) -> Self {
        Self {
            store: Mutex::new(store),
            place,
            changed,
            changes,
            stopped: AtomicBool::new(false),
            part: Part::new("batch"),
            keep_days: AtomicU32::default(),
            stalled: Mutex::default(),
            speed: Mutex::default(),
        }
    }

    pub(super) fn store(&self) -> MutexGuard<'_, Box<dyn Store>> {
        lock(&self.store)
    }

    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.changed.notify_one();
    }

    pub(super) fn stalled(&self) -> Option<String> {
        lock(&self.stalled).clone()
    }

    pub(super) fn chars_per_second(&self) -> Option<f64> {
        *lock(&self.speed)
    }

    pub(super) fn is_down(&self) -> bool {
        self.part.is_down()
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
