//! What a scheduler tells of itself: numbers for people, metrics and placement on one of several devices. It changes
//! nothing.

use std::cmp::Ordering;
use std::time::Instant;

use super::stream::Stream;
use super::table::Table;
use crate::turn::Class;

/// A device with more load than this is not slowed down any further by it, as far as placement goes.
const BUSY: f64 = 0.99;

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
    /// Predicted seconds until a new turn sounds if it is the only work; `None` until that is known.
    pub first_audio: Option<f64>,
    /// Bytes reserved by open jobs.
    pub memory: u64,
    /// Batch jobs displaced or parked for live ones, and steps that left ready batch work out, so far.
    pub preemptions: u64,
    /// Time until the listener with the least audio left runs dry, in seconds; `None` when none listens.
    pub slack: Option<f64>,
}

impl Load {
    /// Seconds until one more live turn is predicted to sound: what it needs, slowed down by what others need.
    fn turn_delay(&self) -> Option<f64> {
        Some(self.first_audio? / (1.0 - self.load.min(BUSY)))
    }
}

/// Devices, each with what it tells of itself, in the order in which they suit new work: where a live turn will sound
/// first, where the fewest jobs are for batch. `last`: where the stream spoke before, which wins a tie.
pub fn by_suitability(class: Class, last: Option<usize>, mut devices: Vec<(usize, Load)>) -> Vec<usize> {
    let jobs = |load: &Load| load.live + load.batch;
    // A device that has not spoken yet knows nothing of its speed: then all are taken to be alike.
    let known = class == Class::Live && devices.iter().all(|(_, load)| load.first_audio.is_some());
    devices.sort_by(|(a, left), (b, right)| {
        let delays = left.turn_delay().unwrap_or(0.0).total_cmp(&right.turn_delay().unwrap_or(0.0));
        let delays = if known { delays } else { Ordering::Equal };
        delays.then(jobs(left).cmp(&jobs(right))).then((last != Some(*a), a).cmp(&(last != Some(*b), b)))
    });
    devices.into_iter().map(|(device, _)| device).collect()
}

/// What the table tells; holding time of streams that still have work only.
pub(super) fn of(table: &Table, now: Instant) -> Load {
    let (live, batch) = table.counts();
    let open = |live: bool| table.open_jobs().filter(|(_, job)| job.is_live() == live).count() as u32;
    let counted = table.streams().filter_map(|stream| stream.counted.as_ref());
    let dry = table.streams().filter(|stream| !stream.jobs.is_empty()).filter_map(Stream::dry_at).min();
    Load {
        live,
        batch,
        live_open: open(true),
        batch_open: open(false),
        holding: counted.map(|(since, _)| now.saturating_duration_since(*since).as_secs_f64()).sum(),
        memory: table.reserved(),
        slack: dry.map(|dry| {
            let ahead = dry.saturating_duration_since(now).as_secs_f64();
            ahead - now.saturating_duration_since(dry).as_secs_f64()
        }),
        ..Load::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(live: u32, load: f64, first_audio: Option<f64>) -> Load {
        Load { live, load, first_audio, ..Load::default() }
    }

    #[test]
    fn a_turn_goes_where_it_will_sound_first() {
        let live = |last, devices| by_suitability(Class::Live, last, devices);
        let slow = device(1, 0.1, Some(0.5));
        let busy = device(90, 0.8, Some(0.02));
        assert_eq!(live(None, vec![(0, slow), (1, busy)]), [1, 0], "0.1 s against 0.56 s");
        let idle = device(0, 0.0, Some(0.02));
        assert_eq!(live(Some(0), vec![(0, busy), (1, idle)]), [1, 0], "it leaves a busy device");
        assert_eq!(live(Some(1), vec![(0, idle), (1, idle)]), [1, 0], "it stays where nothing is gained by a move");
        assert_eq!(live(None, vec![(0, busy), (1, device(2, 0.0, None))]), [1, 0], "by jobs until speeds are known");
        let batch = by_suitability(Class::Batch, None, vec![(0, device(5, 0.0, Some(0.01))), (1, busy)]);
        assert_eq!(batch, [0, 1]);
    }
}
