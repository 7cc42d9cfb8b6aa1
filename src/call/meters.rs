//! The metrics of one call: handles looked up once, because packets are frequent.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

use super::event::{Stages, TurnHow};
use super::info::Stats;
use super::{Cause, EndReason};

/// Metrics of one call.
pub(super) struct Meters {
    leg: &'static str,
    calls: Gauge,
    first_audio: Histogram,
    lateness: Histogram,
    stalls: Counter,
    underruns: Counter,
    underrun: Histogram,
    starved: Histogram,
    sent: Counter,
    received: Counter,
}

impl Meters {
    pub(super) fn new(leg: &'static str) -> Self {
        let calls = gauge!("antiphon_calls", "leg" => leg);
        calls.increment(1.0);
        Self {
            leg,
            calls,
            first_audio: histogram!("antiphon_first_audio_seconds", "leg" => leg, "class" => "live"),
            lateness: histogram!("antiphon_pacing_lateness_seconds"),
            stalls: counter!("antiphon_pacing_stalls_total"),
            underruns: counter!("antiphon_underruns_total"),
            underrun: histogram!("antiphon_underrun_seconds"),
            starved: histogram!("antiphon_text_starved_seconds"),
            sent: counter!("antiphon_rtp_packets_total", "direction" => "sent"),
            received: counter!("antiphon_rtp_packets_total", "direction" => "received"),
        }
    }

    pub(super) fn sent(&self, stats: &Stats, late: Duration, stalled: bool) {
        if stalled {
            self.stalls.increment(1);
            stats.stalls.fetch_add(1, Relaxed);
        }
        self.sent.increment(1);
        self.lateness.record(late);
        stats.packets_sent.fetch_add(1, Relaxed);
        stats.lateness_max_us.fetch_max(late.as_micros() as u64, Relaxed);
    }

    pub(super) fn received(&self, stats: &Stats) {
        self.received.increment(1);
        stats.packets_received.fetch_add(1, Relaxed);
    }

    pub(super) fn first_audio(&self, stats: &Stats, after: Duration) {
        self.first_audio.record(after);
        // 0 means none yet.
        stats.first_audio_us.store((after.as_micros() as u64).max(1), Relaxed);
    }

    pub(super) fn answered(&self, stages: &Stages) {
        for (phase, time) in stages.parts().into_iter().chain([("mouth_to_ear", stages.mouth_to_ear())]) {
            histogram!("antiphon_turn_seconds", "phase" => phase).record(time);
        }
    }

    pub(super) fn underrun(&self, stats: &Stats, gap: Duration) {
        self.underruns.increment(1);
        self.underrun.record(gap);
        stats.underruns.fetch_add(1, Relaxed);
        stats.underrun_us.fetch_add(gap.as_micros() as u64, Relaxed);
    }

    pub(super) fn starved(&self, gap: Duration) {
        self.starved.record(gap);
    }

    pub(super) fn turn_ended(&self, how: &TurnHow) {
        counter!("antiphon_turns_total", "leg" => self.leg, "how" => how.label()).increment(1);
    }

    pub(super) fn interrupted(&self, stats: &Stats, cause: Cause) {
        stats.interruptions.fetch_add(1, Relaxed);
        counter!("antiphon_interruptions_total", "cause" => cause.label()).increment(1);
    }

    pub(super) fn ended(&self, reason: EndReason) {
        counter!("antiphon_calls_ended_total", "leg" => self.leg, "reason" => reason.label()).increment(1);
    }
}

impl Drop for Meters {
    fn drop(&mut self) {
        self.calls.decrement(1.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::shown::Shown;

    #[test]
    fn a_call_counts_what_leaves_late_and_what_its_listener_misses() {
        let (shown, stats) = (Shown::here(), Stats::default());
        let meters = Meters::new("sip");
        assert_eq!(shown.sum("antiphon_calls{leg=\"sip\"}"), 1.0);
        meters.sent(&stats, Duration::from_millis(1), false);
        meters.sent(&stats, Duration::from_millis(250), true);
        assert_eq!(shown.sum("antiphon_rtp_packets_total{direction=\"sent\"}"), 2.0);
        assert_eq!(shown.sum("antiphon_pacing_stalls_total"), 1.0);
        meters.underrun(&stats, Duration::from_millis(500));
        meters.starved(Duration::from_secs(2));
        assert_eq!((shown.sum("antiphon_underruns_total"), shown.sum("antiphon_underrun_seconds_sum")), (1.0, 0.5));
        assert_eq!(shown.sum("antiphon_text_starved_seconds_sum"), 2.0);
        drop(meters);
        assert_eq!(shown.sum("antiphon_calls{leg=\"sip\"}"), 0.0);
    }
}
