//! What a device's thread does while there is nothing to do, and how it wakes up.
//!
//! # Why
//! - **A call tells of a text before it takes it**: reading it, finding its device and handing it over takes a fifth of a millisecond,
//!   and so does waking a thread on a machine that idles. Both at once, and the thread is there when the utterance comes.
//! - **It rehearses meanwhile**: what an utterance needs first has left the processor's caches in a pause.

use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{RETRY, Shared, State, Worker};
use crate::clock;
use crate::synth::SynthError;

/// How long a thread that was roused looks out for what it was roused for: a call takes a text in less.
const ROUSED: Duration = Duration::from_millis(1);

impl Shared {
    /// Wakes the thread, where it sleeps, for an utterance that is on its way.
    pub(in crate::synth::device) fn rouse(&self) {
        let mut state = self.state();
        if std::mem::take(&mut state.asleep) {
            state.roused = Some(clock::now() + ROUSED);
            drop(state);
            self.wake.notify_one();
        }
    }
}

impl Worker<'_> {
    /// Sleeps until something happens; roused, it makes ready for what is on its way, and looks out for it.
    pub(super) fn sleep(&mut self, mut state: MutexGuard<'_, State>, until: Option<Instant>) -> Result<(), SynthError> {
        let idle = |state: &mut State| !self.shared.is_poked() && state.roused.is_none();
        state.spent.pass(clock::now(), false);
        // A full sink does not tell when it has room again.
        let full = !state.leaving.is_empty() || !state.blocked.is_empty();
        let until = if full { Some(clock::now() + RETRY) } else { until };
        state.asleep = true;
        let mut state = match until {
            Some(until) => {
                let wait = until.saturating_duration_since(clock::now());
                self.shared.wake.wait_timeout_while(state, wait, idle).unwrap_or_else(PoisonError::into_inner).0
            }
            None => self.shared.wake.wait_while(state, idle).unwrap_or_else(PoisonError::into_inner),
        };
        state.asleep = false;
        if let Some(until) = state.roused.take() {
            drop(state);
            if !self.shared.is_poked() {
                self.shared.calls.within(|| self.synth.rehearse())?;
            }
            while !self.shared.is_poked() && clock::now() < until {
                std::thread::yield_now();
            }
            state = self.shared.state();
        }
        state.spent.pass(clock::now(), true);
        Ok(())
    }
}
