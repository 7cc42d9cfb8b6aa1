//! What the machine tells the outside: actions for the driver, in order, and the figures of the call.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::Action;
use crate::call::CallEvent;
use crate::call::info::Shared;
use crate::call::meters::Meters;

/// Actions that wait to be carried out, and where the figures of the call are counted.
pub(super) struct Outbox {
    actions: VecDeque<Action>,
    pub(super) meters: Meters,
    /// What handles see of the call.
    pub(super) shared: Arc<Shared>,
}

impl Outbox {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { actions: VecDeque::new(), meters: Meters::new(shared.leg), shared }
    }

    /// Tells the listeners.
    pub(super) fn event(&mut self, event: CallEvent) {
        self.actions.push_back(Action::Event(event));
    }

    /// Tells the listeners of something that could not be done.
    pub(super) fn error(&mut self, what: String) {
        self.event(CallEvent::Error(what));
    }

    pub(super) fn push(&mut self, action: Action) {
        self.actions.push_back(action);
    }

    pub(super) fn pop(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.actions.is_empty()
    }
}

/// Microseconds from `at` to `now`, for spans.
pub(super) fn age(now: Instant, at: Instant) -> u64 {
    now.saturating_duration_since(at).as_micros() as u64
}
