//! What a scheduler tells of itself: numbers for people, metrics and placement. It changes nothing.

use std::time::{Duration, Instant};

use super::stream::Stream;
use super::{Scheduler, Stage};
use crate::turn::Class;

/// Numbers for people and metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Live jobs that have not ended.
    pub live: u32,
    /// Batch jobs that have not ended.
    pub batch: u32,
    /// Live streams that may have unfinished work at once, whatever the device could compute.
    pub places: u32,
    /// Live streams that the device could keep speaking, by what steps have cost so far; 0 until that is known.
    pub carries: f64,
    /// How long live streams have held their places so far, all together, in seconds.
    pub held: f64,
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
    /// Time until the listener with the least audio left runs dry, in seconds; `None` when nobody listens.
    pub slack: Option<f64>,
}

impl Scheduler {
    /// Numbers for people and metrics.
    pub fn load(&self, now: Instant) -> Load {
        let mut load = Load {
            live: self.live_jobs,
            batch: self.jobs.len() as u32 - self.live_jobs,
            load: self.predicted_load(self.live_streams),
            places: self.config.max_live.min(self.live_slots()),
            carries: self.carries(),
            held: self.held(now).as_secs_f64(),
            memory: self.reserved(),
            preemptions: self.preemptions,
            ..Load::default()
        };
        for id in self.slots.iter().flatten() {
            match self.jobs.get(id).map(|job| job.spec.class) {
                Some(Class::Live) => load.live_open += 1,
                Some(Class::Batch) => load.batch_open += 1,
                None => {}
            }
        }
        let dry = self.streams.values().filter(|stream| !stream.jobs.is_empty()).filter_map(Stream::dry_at).min();
        load.slack = dry.map(|dry| {
            let ahead = dry.saturating_duration_since(now).as_secs_f64();
            ahead - now.saturating_duration_since(dry).as_secs_f64()
        });
        load
    }

    /// How long live streams have held their places so far, those that still do so included.
    fn held(&self, now: Instant) -> Duration {
        let counted = self.streams.values().filter_map(|stream| stream.counted);
        self.held + counted.map(|(_, since)| now.saturating_duration_since(since)).sum::<Duration>()
    }

    /// Predicted seconds of the narrowest step, per stage.
    pub fn step_seconds(&self) -> [f64; 4] {
        Stage::ALL.map(|stage| self.costs.predict(stage, 1, 1))
    }
}
