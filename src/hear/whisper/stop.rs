//! A flag that ends work whose result is not wanted any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Set from outside, looked at between the steps of a recognition. Clones are the same flag.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Ends the work at its next step.
    pub fn set(&self) {
        self.0.store(true, Relaxed);
    }

    /// Whether it is to end.
    pub fn is_set(&self) -> bool {
        self.0.load(Relaxed)
    }
}
