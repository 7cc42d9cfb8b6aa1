//! New turns begin together.
//!
//! What a new turn does before its flow, the prefill and some ten rounds of decoding, costs nearly as much for one as for
//! eight. Begun one by one, each as soon as it comes and beside the flow of the one before, 100 turns a second took half of
//! the device for it, at one or two rows a step. So where many come ([`CROWDED`]) and other urgent work is there, new turns
//! wait for each other: until they are [`TOGETHER`], or the first of them has waited for a fifth of the first audio target.
//! Without other urgent work they begin at once.
//!
//! # Why
//! Simulated with the costs of one H200, turns of 2.7 s: at 100 a second first audio p95 is 128 ms when each begins at once
//! and 78 ms when they wait for each other; at 125 a second half of the turns have gaps, and none has. With faster kernels 125 and
//! 150 a second have 87 and 122 ms where the first waits for a tenth of its target at most, and 80 and 110 where it waits for a fifth; of
//! 50 a second that last 10 s 16 % are refused, and 5 % (both with 256 slots). Beside batch work, and beside speech that is far
//! ahead of its listeners, no turn waits: nothing else there is urgent.

use std::time::{Duration, Instant};

use super::config::Config;
use super::rank::{Candidate, Rank};
use super::step::Stage;
use super::table::Table;

/// So many new turns do not wait for more.
pub(super) const TOGETHER: usize = 8;
/// Turns a second of late from which on they wait for each other. Below that the device has time for each by itself, and beside
/// batch, whose rows make every step longer, a turn that waits is heard: p95 at 5.6 turns a second 41 ms instead of 33.
pub(super) const CROWDED: f64 = 40.0;
/// The part of the first audio target that a new turn waits for others at most.
const PART: u32 = 5;

/// How long a new turn waits for others at most.
fn patience(config: &Config) -> Duration {
    config.first_audio_target() / PART
}

/// From one group of new turns to the next on a device in full use: the first of them waits for others, half of the longest in
/// the mean, and then for the end of a step.
pub(super) fn period(config: &Config) -> Duration {
    patience(config) / 2 + config.batch_step()
}

/// Takes new turns from `candidates` that are to begin with others a little later. `busy`: a step
/// that is as urgent is in flight.
pub(super) fn hold_back(candidates: &mut Vec<Candidate>, table: &Table, config: &Config, now: Instant, busy: bool) {
    let begins = |c: &Candidate| c.rank == Rank::First && c.stage == Stage::Prefill;
    if !busy && candidates.iter().all(|c| !c.rank.is_urgent() || begins(c)) {
        return;
    }
    let left = config.first_audio_target() - patience(config);
    let (mut waiting, mut due) = (0, false);
    for job in candidates.iter().filter(|c| begins(c)).filter_map(|c| table.job(c.job)) {
        waiting += 1;
        due |= now + left >= job.deadline;
    }
    if !due && waiting < TOGETHER {
        candidates.retain(|c| !begins(c));
    }
}
