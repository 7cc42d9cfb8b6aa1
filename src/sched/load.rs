//! What a scheduler tells of itself: numbers for people, metrics and placement on one of several devices. It changes
//! nothing.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::job::Job;
use super::stream::Stream;
use super::table::Table;
use crate::turn::Class;

/// A device with more load than this is not slowed down any further by it, as far as placement goes.
const BUSY: f64 = 0.99;
/// Seconds in which device time of late fades to a third.
const FADING: f64 = 10.0;
/// Jobs that a second of device time of late counts for: devices are to be as busy as each other, not only as full.
/// Utterances differ fourfold in length; placed by their number alone, one of four devices was 6 % busier than the rest.
const LATELY: f64 = 5.0;
/// Devices of which one sustains no more than this multiple of what the other does are alike.
const ALIKE: f64 = 1.5;

/// Numbers for people and metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Load {
    /// Live jobs that have not ended.
    pub live: u32,
    /// Batch jobs that have not ended.
    pub batch: u32,
    /// Live streams that may have unfinished work at once, whatever the device could compute.
    pub capacity: u32,
    /// Live streams that the device could keep speaking, by what steps have cost so far; 0 until that is known.
    pub sustainable: f64,
    /// Live streams that memory has room for at once, by what utterances of late were promised; 0: it is not what limits,
    /// or that is not known yet.
    pub memory_streams: f64,
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
    /// Seconds that steps had the device lately: those of the last ten seconds, mostly.
    pub recent: f64,
    /// Bytes reserved by open jobs.
    pub memory: u64,
    /// Batch jobs displaced or parked for live ones, and steps that left ready batch work out, so far.
    pub preemptions: u64,
    /// Time until the listener with the least audio left hears a gap, in seconds; `None` when none listens.
    pub slack: Option<f64>,
}

/// Device time of late, which fades.
#[derive(Debug, Default)]
pub(super) struct Recent {
    seconds: f64,
    until: Option<Instant>,
}

impl Recent {
    pub(super) fn at(&self, now: Instant) -> f64 {
        let passed = self.until.map_or(Duration::ZERO, |until| now.saturating_duration_since(until));
        self.seconds * (-passed.as_secs_f64() / FADING).exp()
    }

    pub(super) fn add(&mut self, now: Instant, took: Duration) {
        self.seconds = self.at(now) + took.as_secs_f64();
        self.until = Some(now);
    }
}

impl Load {
    /// Seconds until one more live turn is predicted to sound: what it needs, slowed down by what others need.
    fn turn_delay(&self) -> Option<f64> {
        Some(self.first_audio? / (1.0 - self.load.min(BUSY)))
    }
}

/// Devices, each with what it tells of itself, in the order in which they suit new work: where a live turn will sound
/// first, and of those that are alike where the least is under way and was of late; where the fewest jobs are for
/// batch. `last`: where the stream spoke before, which wins a tie.
///
/// # Why
/// What devices have learned of themselves differs by some ten percent though they are alike; placed by that, one of two
/// had four times the work of the other.
pub fn by_suitability(class: Class, last: Option<usize>, mut devices: Vec<(usize, Load)>) -> Vec<usize> {
    let least = devices.iter().filter_map(|(_, load)| load.turn_delay()).reduce(f64::min);
    let most = devices.iter().map(|(_, load)| load.sustainable).fold(0.0, f64::max);
    // A device that has not spoken yet knows nothing of its speed: then all are taken to be alike.
    let known = class == Class::Live && devices.iter().all(|(_, load)| load.first_audio.is_some());
    let slower = |load: &Load| match (load.turn_delay(), least) {
        (Some(delay), Some(least)) if known => (delay / least).log2().floor(),
        _ => 0.0,
    };
    let work = |load: &Load| {
        let jobs = if class == Class::Live { load.live } else { load.live + load.batch };
        let smaller = most / load.sustainable;
        let jobs = f64::from(jobs) * if known && smaller.is_finite() && smaller > ALIKE { smaller } else { 1.0 };
        jobs + LATELY * load.recent
    };
    devices.sort_by(|(a, left), (b, right)| {
        let by_delay = slower(left).total_cmp(&slower(right));
        by_delay.then(work(left).total_cmp(&work(right))).then((last != Some(*a), a).cmp(&(last != Some(*b), b)))
    });
    devices.into_iter().map(|(device, _)| device).collect()
}

/// What the table tells; holding time of streams that still have work only.
pub(super) fn of(table: &Table, now: Instant) -> Load {
    let (live, batch) = table.counts();
    let open = |live: bool| table.open_jobs().filter(|(_, job)| job.is_live() == live).count() as u32;
    let counted = table.streams().filter_map(|stream| stream.counted.as_ref());
    // Silence before text that is not written yet is not the device's.
    let waits = |stream: &Stream| stream.jobs.front().and_then(|id| table.job(*id)).is_none_or(Job::awaits_text);
    let underrun = table.streams().filter(|stream| !waits(stream)).filter_map(Stream::underrun_at).min();
    Load {
        live,
        batch,
        live_open: open(true),
        batch_open: open(false),
        holding: counted.map(|(since, _)| now.saturating_duration_since(*since).as_secs_f64()).sum(),
        memory: table.reserved(),
        slack: underrun.map(|underrun| {
            let ahead = underrun.saturating_duration_since(now).as_secs_f64();
            ahead - now.saturating_duration_since(underrun).as_secs_f64()
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
        let idle = device(0, 0.0, Some(0.022));
        assert_eq!(live(Some(0), vec![(0, busy), (1, idle)]), [1, 0], "it leaves a busy device");
        assert_eq!(live(Some(1), vec![(0, idle), (1, idle)]), [1, 0], "it stays where nothing is gained by a move");
        assert_eq!(live(None, vec![(0, busy), (1, device(2, 0.0, None))]), [1, 0], "by jobs until speeds are known");
        let worked = Load { recent: 3.0, ..idle };
        assert_eq!(live(Some(0), vec![(0, worked), (1, idle)]), [1, 0], "turns are spread while there are few");
        let batch = by_suitability(Class::Batch, None, vec![(0, device(5, 0.0, Some(0.01))), (1, busy)]);
        assert_eq!(batch, [0, 1]);
    }
}
