//! What a scheduler tells of itself: numbers for people, metrics and placement. It changes nothing.

use std::time::Instant;

use super::stream::Stream;
use super::table::Table;

/// Numbers for people and metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Live jobs that have not ended.
    pub live: u32,
    /// Batch jobs that have not ended.
    pub batch: u32,
    /// Live streams that may have unfinished work at once, whatever the device could compute.
    pub capacity: u32,
    /// Live streams that the device could keep speaking, by what steps have cost so far; 0 until that is known.
    pub sustainable: f64,
    /// Holding time: how long live streams have had unfinished work so far, all together, in seconds.
    pub holding: f64,
    /// Live jobs in slots.
    pub live_open: u32,
    /// Batch jobs in slots.
    pub batch_open: u32,
    /// Predicted share of the device that live streams need, 1.0 is all of it.
    pub load: f64,
    /// Bytes reserved by open jobs.
    pub memory: u64,
    /// Batch jobs displaced or parked for live ones, and steps that left ready batch work out, so far.
    pub preemptions: u64,
    /// Time until the listener with the least audio left runs dry, in seconds; `None` when none listens.
    pub slack: Option<f64>,
}

/// What the table tells; holding time of streams that still have work only.
pub(super) fn of(table: &Table, now: Instant) -> Load {
    let (live, batch) = table.counts();
    let open = |live: bool| table.open_jobs().filter(|(_, job)| job.is_live() == live).count() as u32;
    let counted = table.streams().filter_map(|stream| stream.counted);
    let dry = table.streams().filter(|stream| !stream.jobs.is_empty()).filter_map(Stream::dry_at).min();
    Load {
        live,
        batch,
        live_open: open(true),
        batch_open: open(false),
        holding: counted.map(|(_, since)| now.saturating_duration_since(since).as_secs_f64()).sum(),
        memory: table.reserved(),
        slack: dry.map(|dry| {
            let ahead = dry.saturating_duration_since(now).as_secs_f64();
            ahead - now.saturating_duration_since(dry).as_secs_f64()
        }),
        ..Load::default()
    }
}
