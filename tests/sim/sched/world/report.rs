//! What a world counts.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

#[derive(Default)]
pub(in super::super) struct Report {
    pub(in super::super) first_audio: Vec<Duration>,
    pub(in super::super) underruns: Vec<Duration>,
    /// Streams with a gap.
    pub(in super::super) gapped: BTreeSet<u64>,
    pub(in super::super) refused: u32,
    /// Refusals by tenant and reason.
    pub(in super::super) refused_by: BTreeMap<(&'static str, &'static str), u32>,
    /// First audio by tenant.
    pub(in super::super) first_by: BTreeMap<&'static str, Vec<Duration>>,
    /// Device seconds by tenant, each step's shared by its rows.
    pub(in super::super) device_by: BTreeMap<&'static str, f64>,
    /// Longest time between two steps with batch work, from the first on.
    pub(in super::super) longest_without_batch: Duration,
    pub(in super::super) turns: u32,
    pub(in super::super) live_samples: u64,
    pub(in super::super) batch_samples: u64,
    pub(in super::super) done: u32,
    pub(in super::super) cancelled: u32,
    /// Live, and without room long after their promise.
    pub(in super::super) unplaced: u32,
    pub(in super::super) submitted: u32,
    pub(in super::super) steps: u64,
    /// Most steps without live work that a first audio waited for after it was submitted.
    pub(in super::super) most_behind_batch: u32,
    pub(in super::super) displaced: u32,
    /// Of these, live.
    pub(in super::super) restarted: u32,
    pub(in super::super) parked: u32,
    /// Width of steps by device time, per stage: seconds and slot-seconds.
    pub(in super::super) widths: [(f64, f64); 4],
    /// Device seconds that live work alone would have taken in the same steps.
    pub(in super::super) live_busy: f64,
    /// Steps, their seconds and slots, by stage and by whose they were.
    pub(in super::super) kinds: BTreeMap<(&'static str, &'static str), (u64, f64, usize)>,
    /// Until first audio, by stage: seconds from the end of the stage before (the first: from the submission) to the end of
    /// its own, waiting included, of all turns.
    pub(in super::super) until_first: [f64; 4],
    /// Device seconds of steps.
    pub(in super::super) busy: f64,
    /// Seconds that were measured.
    pub(in super::super) seconds: f64,
}

impl Report {
    pub(in super::super) fn quantile(&self, q: f64) -> Duration {
        quantile(&self.first_audio, q)
    }
}

pub(in super::super) fn quantile(values: &[Duration], q: f64) -> Duration {
    let mut all = values.to_vec();
    all.sort();
    all.get(((all.len() as f64 * q) as usize).min(all.len().saturating_sub(1))).copied().unwrap_or_default()
}
