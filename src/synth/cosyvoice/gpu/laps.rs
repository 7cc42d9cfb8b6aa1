//! How long the parts of a load take.

use std::time::{Duration, Instant};

use crate::clock;

/// What the parts of a load take: a start that is slow says where.
pub(super) struct Laps {
    since: Instant,
    pub(super) took: Vec<(&'static str, Duration)>,
}

impl Laps {
    pub(super) fn start() -> Self {
        Self { since: clock::now(), took: Vec::new() }
    }

    pub(super) fn end(&mut self, part: &'static str) {
        let now = clock::now();
        self.took.push((part, now.saturating_duration_since(self.since)));
        self.since = now;
    }
}
