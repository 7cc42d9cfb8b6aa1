//! Parts of the gateway that are started again when they panic: that it is seen, counted, and not at once again.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// How long a part that panicked rests: what panics each time must not fill the log.
pub const RESTART: Duration = if cfg!(test) { Duration::from_millis(50) } else { Duration::from_secs(1) };

/// A part, of one thread or several tasks.
#[derive(Debug)]
pub struct Part {
    name: &'static str,
    down: AtomicUsize,
}

/// The part rests, until this is dropped.
#[derive(Debug)]
#[must_use]
pub struct Down<'a>(&'a Part);

impl Part {
    /// One that works. `name` is what its panics are counted by.
    pub const fn new(name: &'static str) -> Self {
        Self { name, down: AtomicUsize::new(0) }
    }

    /// Whether it has panicked and was not started again yet.
    pub fn is_down(&self) -> bool {
        self.down.load(Ordering::Acquire) > 0
    }

    /// It has panicked, and rests until the answer is dropped.
    pub fn fell(&self) -> Down<'_> {
        self.down.fetch_add(1, Ordering::AcqRel);
        metrics::counter!("antiphon_part_panics_total", "part" => self.name).increment(1);
        tracing::error!(part = self.name, again_in = ?RESTART, "it panicked and is started again");
        Down(self)
    }
}

impl Down<'_> {
    /// Rests in a task.
    pub async fn rest(self) {
        tokio::time::sleep(RESTART).await;
    }

    /// Rests in a thread.
    pub fn rest_here(self) {
        let (still, never) = (Mutex::new(()), Condvar::new());
        let still = still.lock().unwrap_or_else(PoisonError::into_inner);
        // Nobody notifies it: only the time passes.
        drop(never.wait_timeout(still, RESTART));
    }
}

impl Drop for Down<'_> {
    fn drop(&mut self) {
        self.0.down.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_part_is_down_until_the_last_of_its_tasks_has_rested() {
        let part = Part::new("batch");
        assert!(!part.is_down());
        let (one, other) = (part.fell(), part.fell());
        one.rest().await;
        assert!(part.is_down());
        other.rest_here();
        assert!(!part.is_down());
    }
}
