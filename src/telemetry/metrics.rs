//! Every metric's name, meaning and buckets, and their rendering for Prometheus.

use std::sync::OnceLock;

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

/// First audio is judged between a frame and the published systems' seconds.
const FIRST_AUDIO: &[f64] =
    &[0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0];
/// Requests last as long as what they say.
const REQUEST: &[f64] = &[0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];
/// Device steps and pacing: from tens of microseconds to a frame and beyond.
const FINE: &[f64] = &[0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5];
/// Slack may be spent: negative is a gap that the listener hears.
const SLACK: &[f64] = &[-1.0, -0.1, 0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0];
/// Gaps, from one frame to seconds.
const GAPS: &[f64] = &[0.02, 0.04, 0.06, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0];

/// The process's recorder. The first call installs it; later ones return the same.
pub fn recorder() -> &'static PrometheusHandle {
    static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();
    HANDLE.get_or_init(|| {
        let buckets: [(&str, &[f64]); 8] = [
            ("antiphon_first_audio_seconds", FIRST_AUDIO),
            ("voice_request_duration_seconds", REQUEST),
            ("antiphon_step_seconds", FINE),
            ("antiphon_pacing_lateness_seconds", FINE),
            ("antiphon_slack_seconds", SLACK),
            ("antiphon_stream_seconds", REQUEST),
            ("antiphon_line_seconds", REQUEST),
            ("antiphon_underrun_seconds", GAPS),
        ];
        let mut builder = PrometheusBuilder::new();
        for (name, bounds) in buckets {
            builder = builder
                .set_buckets_for_metric(Matcher::Full(name.to_owned()), bounds)
                .expect("every list of buckets is a non-empty constant");
        }
        let recorder = builder.build_recorder();
        let handle = recorder.handle();
        // Fails only when a test installed a recorder of its own; then this one renders nothing.
        let _ = metrics::set_global_recorder(recorder);
        describe();
        handle
    })
}

fn describe() {
    describe_counter!("voice_requests_total", "Speech requests by class and outcome");
    describe_histogram!("voice_request_duration_seconds", Unit::Seconds, "From acceptance to the last sample");
    describe_gauge!("voice_gpu_memory_bytes", Unit::Bytes, "Device memory by device and part; the parts add up");
    describe_gauge!("antiphon_device_up", "Whether a speech device works");
    describe_counter!("antiphon_device_failures_total", "Times a speech device failed and was loaded again");
    describe_histogram!(
        "antiphon_first_audio_seconds",
        Unit::Seconds,
        "From a turn's acceptance to its first RTP packet of speech, by leg and class"
    );
    describe_counter!("antiphon_underruns_total", "Gaps that a listener heard inside speech");
    describe_histogram!("antiphon_underrun_seconds", Unit::Seconds, "Length of such gaps");
    describe_gauge!("antiphon_scheduler_queue_depth", "Utterances that wait for the device, by class");
    describe_counter!("antiphon_preemptions_total", "Batch utterances that gave way to live ones");
    describe_histogram!("antiphon_step_seconds", Unit::Seconds, "Device time of one step, by stage");
    describe_histogram!(
        "antiphon_slack_seconds",
        Unit::Seconds,
        "Time left until a listener hears a gap, at each step"
    );
    describe_counter!("antiphon_fallback_total", "Utterances that the fallback voice spoke in place of the engine");
    describe_counter!("antiphon_stand_in_total", "Old name of antiphon_fallback_total; it goes with the next release");
    describe_histogram!(
        "antiphon_stream_seconds",
        Unit::Seconds,
        "How long a live stream had unfinished work: from its acceptance to its end"
    );
    describe_histogram!(
        "antiphon_line_seconds",
        Unit::Seconds,
        "The former name of antiphon_stream_seconds, for one release"
    );
    describe_gauge!("antiphon_calls", "Calls in progress, by leg");
    describe_histogram!("antiphon_pacing_lateness_seconds", Unit::Seconds, "How late packets leave");
    describe_counter!("antiphon_rtp_packets_total", "RTP packets by direction");
    describe_gauge!("antiphon_batch_jobs", "Batch jobs by state");
    describe_counter!("antiphon_traces_exported_total", "Spans that the collector took");
    describe_counter!("antiphon_traces_dropped_total", "Spans that were dropped, by reason: queue, delivery");
}

#[cfg(test)]
mod tests {
    /// An alert on a metric that is not there never fires.
    #[test]
    fn every_metric_of_the_shipped_alerts_is_described() {
        let described = include_str!("metrics.rs");
        let alerts = include_str!("../../config/alerts.yml");
        let words = alerts.split(|c: char| !(c.is_ascii_lowercase() || c == '_'));
        let names = words.filter(|word| word.starts_with("antiphon_") || word.starts_with("voice_"));
        let mut seen = 0;
        for name in names {
            let series = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
            assert!(
                described.contains(&format!("!(\"{series}\""))
                    || described.contains(&format!("!(\n        \"{series}\"")),
                "{name}"
            );
            seen += 1;
        }
        assert!(seen >= 9, "{seen}");
    }
}
