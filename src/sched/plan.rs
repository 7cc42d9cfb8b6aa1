//! What the scheduler asks of the device, and how opening can fail.

use std::time::{Duration, Instant};

#[cfg(doc)]
use super::Scheduler;
use super::job::{JobEnd, JobId};
use super::step::{Slot, Step};

/// What to do now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Prepare `slot` for `job`, then call [`Scheduler::opened`].
    Open {
        /// Where.
        slot: Slot,
        /// What.
        job: JobId,
    },
    /// Free `slot`: `job` gives it up for live work and starts its utterance again later.
    Displace {
        /// Where.
        slot: Slot,
        /// Whose.
        job: JobId,
    },
    /// Move the state in `slot` out of device memory; a later step that names the slot brings it back.
    Park {
        /// Where.
        slot: Slot,
        /// Whose.
        job: JobId,
    },
    /// `job` is over: free its slot if it has one, and tell its sink.
    End {
        /// Which.
        job: JobId,
        /// What it held.
        slot: Option<Slot>,
        /// How it ended.
        how: JobEnd,
        /// How long its live stream had unfinished work, if this was the last of it.
        holding: Option<Duration>,
    },
    /// Run this, then call [`Scheduler::record`].
    Run(Step),
    /// Start this and do not wait for it; when it is complete, call [`Scheduler::complete`]. Where it cannot be
    /// started so, run it, and call that at once.
    Launch(Step),
    /// Nothing to do until then, or until something is submitted or noted.
    Idle {
        /// When to ask again; `None`: only when something happens.
        until: Option<Instant>,
    },
}

/// Why a slot could not be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OpenError {
    /// No memory now; it is tried again when some was freed.
    Memory,
    /// It never will.
    Failed(String),
}
