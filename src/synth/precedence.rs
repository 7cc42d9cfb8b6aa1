//! Who goes first on a device that a voice shares: its first audio.
//!
//! The device's thread says whether a listener in silence is waiting, or one who is about to hear a gap; what else
//! computes on the device asks before each of its steps.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Instant;

use crate::clock;

/// Whether a device has something urgent to do. Shared by its voice and by who computes beside it.
#[derive(Debug, Default)]
pub struct Precedence {
    urgent: Mutex<bool>,
    changed: Condvar,
}

impl Precedence {
    /// Says whether there is urgent work now.
    pub fn set(&self, urgent: bool) {
        let mut now = self.urgent.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut *now, urgent) && !urgent {
            drop(now);
            self.changed.notify_all();
        }
    }

    /// Waits until there is none, at most until then.
    pub fn give_way(&self, until: Instant) {
        let mut urgent = self.urgent.lock().unwrap_or_else(PoisonError::into_inner);
        while *urgent {
            let left = until.saturating_duration_since(clock::now());
            if left.is_zero() {
                return;
            }
            urgent = self.changed.wait_timeout(urgent, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn no_work_waits_where_nothing_is_urgent_and_none_for_ever() {
        let precedence = Arc::new(Precedence::default());
        let far = clock::now() + Duration::from_secs(3_600);
        precedence.give_way(far);
        precedence.set(true);
        precedence.give_way(clock::now());
        let other = precedence.clone();
        let waiting = std::thread::spawn(move || other.give_way(far));
        precedence.set(false);
        waiting.join().expect("it goes on");
    }
}
