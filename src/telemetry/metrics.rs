//! Every metric of the gateway: name, kind, labels, meaning and buckets, in one table, and their rendering for
//! Prometheus. A test compares the table with the source tree, another with what a gateway that has worked shows.

use std::sync::OnceLock;
use std::time::Duration;

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::sync::watch;

/// First audio is judged between a frame and the published systems' seconds.
const FIRST_AUDIO: &[f64] =
    &[0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0];
/// Requests last as long as what they say.
const REQUEST: &[f64] = &[0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];
/// Device steps and pacing: from tens of microseconds to a frame and beyond.
const FINE: &[f64] = &[0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5];
/// Slack may be spent: negative is a gap that the listener hears.
const SLACK: &[f64] = &[-1.0, -0.1, 0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0];
/// Jitter, from what a switch makes to what no buffer bears.
const JITTER: &[f64] = &[0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5];
/// The way there and back: within a town, a continent, by satellite.
const ROUND_TRIP: &[f64] = &[0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0];
/// Shares of packets that are lost.
const LOSS: &[f64] = &[0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5];
/// Opinion scores: below 3.6 many are dissatisfied.
const MOS: &[f64] = &[1.5, 2.0, 2.5, 3.0, 3.3, 3.6, 3.8, 4.0, 4.2, 4.3, 4.4];
/// Gaps, from one frame to seconds.
const GAPS: &[f64] = &[0.02, 0.04, 0.06, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0];

/// Content type of the Prometheus text format.
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";
/// Content type of OpenMetrics.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What a metric measures.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// What is now.
    Gauge,
    /// A histogram with these upper bounds: what several gateways have observed can be added up.
    Histogram(&'static [f64]),
}

/// One metric.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Metric {
    /// Its name in `/metrics`.
    pub name: &'static str,
    /// What it measures.
    pub kind: Kind,
    /// Names of its labels.
    pub labels: &'static [&'static str],
    /// What it says, for people.
    pub help: &'static str,
}

const fn counter(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Metric {
    Metric { name, kind: Kind::Counter, labels, help }
}

const fn gauge(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Metric {
    Metric { name, kind: Kind::Gauge, labels, help }
}

const fn histogram(
    name: &'static str,
    labels: &'static [&'static str],
    bounds: &'static [f64],
    help: &'static str,
) -> Metric {
    Metric { name, kind: Kind::Histogram(bounds), labels, help }
}

/// Every metric, by the part that it is about.
pub const METRICS: &[Metric] = &[
    // Speech.
    counter("voice_requests_total", &["class", "outcome"], "Utterances that ended or were refused"),
    counter(
        "antiphon_refusals_total",
        &["class", "reason"],
        "Utterances that no device took on, by the last one's reason",
    ),
    histogram(
        "voice_request_duration_seconds",
        &["class"],
        REQUEST,
        "Utterances of requests, calls and batch, from acceptance to the last sample made",
    ),
    counter(
        "antiphon_phrases_total",
        &["result"],
        "Utterances that were kept and needed no device (hit), and those that a device spoke (miss)",
    ),
    gauge("antiphon_phrase_bytes", &["place"], "Phrases that are kept, in memory and on disk"),
    counter("antiphon_fallback_total", &[], "Utterances that the fallback voice spoke in place of the engine"),
    counter("antiphon_stand_in_total", &[], "Old name of antiphon_fallback_total, for one release"),
    // Devices.
    gauge("voice_gpu_memory_bytes", &["device", "part"], "Device memory; the parts add up"),
    gauge(
        "antiphon_gpu_utilization_ratio",
        &["gpu"],
        "Share of the time in which a GPU ran anything, as its driver says",
    ),
    gauge("antiphon_gpu_clock_hertz", &["gpu", "part"], "Clock of a GPU's processors and of its memory"),
    gauge("antiphon_gpu_temperature_celsius", &["gpu"], "Temperature of a GPU"),
    gauge("antiphon_gpu_power_watts", &["gpu"], "Power that a GPU draws"),
    counter(
        "antiphon_gpu_errors_total",
        &["gpu", "kind"],
        "Memory errors of a GPU, corrected or not, and its Xid errors",
    ),
    gauge("antiphon_device_up", &["device"], "Whether a speech device works"),
    counter("antiphon_device_failures_total", &["device"], "Times a speech device failed and was loaded again"),
    gauge("antiphon_worker_up", &["worker"], "Whether a worker on another machine can be used"),
    counter("antiphon_voices_copied_total", &[], "Voices of this gateway that were sent to workers"),
    counter("antiphon_worker_handovers_total", &[], "Utterances that a lost worker began and another device finished"),
    gauge("antiphon_scheduler_queue_depth", &["class", "device"], "Utterances that wait for the device"),
    counter("antiphon_preemptions_total", &[], "Batch utterances that gave way to live ones"),
    histogram("antiphon_step_seconds", &["stage"], FINE, "Device time of one step"),
    histogram(
        "antiphon_background_cpu_seconds",
        &[],
        FINE,
        "CPU time of child processes that give way to everything else: those of batch, and those that find word times",
    ),
    histogram(
        "antiphon_slack_seconds",
        &[],
        SLACK,
        "Time left until a listener hears a gap, at each step and whenever a worker tells",
    ),
    histogram(
        "antiphon_stream_seconds",
        &[],
        REQUEST,
        "How long a live stream occupied its place: from acceptance to the end of its unfinished work",
    ),
    histogram("antiphon_line_seconds", &[], REQUEST, "Old name of antiphon_stream_seconds, for one release"),
    gauge("antiphon_batch_jobs", &["state"], "Batch jobs"),
    gauge("antiphon_database_up", &["part"], "Whether the PostgreSQL of a part (batch, records) can be used"),
    // Calls.
    gauge("antiphon_active_calls", &[], "Calls in progress, for scaling"),
    gauge("antiphon_stream_capacity", &["state"], "Calls in progress, and how many more could be taken, for scaling"),
    gauge("antiphon_calls", &["leg"], "Calls in progress"),
    counter("antiphon_calls_ended_total", &["leg", "reason"], "Calls that ended"),
    gauge("antiphon_handover_calls", &[], "Calls that the gateway whose place this one took still has"),
    counter(
        "antiphon_handover_datagrams_total",
        &["outcome"],
        "Datagrams of calls that were sent on between a gateway and the one that took its place",
    ),
    counter("antiphon_turns_total", &["leg", "how"], "Turns that ended"),
    counter("antiphon_interruptions_total", &["cause"], "Times that speech was cut off"),
    histogram(
        "antiphon_first_audio_seconds",
        &["leg", "class"],
        FIRST_AUDIO,
        "From a turn's acceptance to its first RTP packet of speech",
    ),
    histogram(
        "antiphon_turn_seconds",
        &["phase"],
        FIRST_AUDIO,
        "From the caller's last sound to the first packet of the answer: its parts, and all of it (mouth_to_ear)",
    ),
    counter("antiphon_underruns_total", &[], "Gaps that a listener heard inside speech"),
    histogram("antiphon_underrun_seconds", &[], GAPS, "Length of such gaps"),
    histogram(
        "antiphon_text_starved_seconds",
        &[],
        GAPS,
        "Silence inside a turn because the agent had not written on: no underrun",
    ),
    gauge("antiphon_bridges", &[], "Callers who speak with a human who was called for them"),
    counter("antiphon_bridges_total", &["outcome"], "Humans called for a caller, by what came of it"),
    counter("antiphon_bridge_dropped_total", &[], "Pieces of sound that a bridged call was too slow to take"),
    counter("antiphon_tap_dropped_total", &[], "Media frames that slow readers of /v1/calls/{id}/media lost"),
    // Language models.
    counter("antiphon_llm_requests_total", &["agent", "outcome"], "Requests to language models that ended"),
    histogram(
        "antiphon_llm_first_token_seconds",
        &["agent"],
        FIRST_AUDIO,
        "From a request to a language model to the first word of its answer",
    ),
    counter("antiphon_llm_tokens_total", &["agent", "kind"], "Tokens that servers of language models counted"),
    counter("antiphon_llm_cost_micros_total", &["agent"], "What they cost by `prices`, in millionths"),
    counter("antiphon_llm_tools_total", &["agent", "tool", "outcome"], "Tools that language models called"),
    // Records.
    counter("antiphon_records_dropped_total", &[], "Writes of call records that the disk was too slow for"),
    gauge("antiphon_records_spooled_bytes", &[], "Call records on disk that wait for PostgreSQL"),
    counter("antiphon_recording_errors_total", &[], "Recordings that could not be written"),
    counter(
        "antiphon_recording_dropped_seconds_total",
        &[],
        "Sound of recordings that was lost because the disk did not keep up",
    ),
    counter(
        "antiphon_recording_dropped_seconds",
        &[],
        "Old name of antiphon_recording_dropped_seconds_total, for one release",
    ),
    counter("antiphon_webhooks_total", &["outcome"], "Deliveries of call records, by what came of them"),
    counter(
        "antiphon_webhook_events_total",
        &["webhook", "outcome"],
        "Events for a webhook: delivered, failed (sent again), given_up, dropped (no room)",
    ),
    // Hearing.
    histogram(
        "antiphon_recognizer_seconds",
        &["kind"],
        FIRST_AUDIO,
        "From a question about a stretch of speech to its words",
    ),
    counter(
        "antiphon_recognizer_errors_total",
        &["kind"],
        "Stretches of speech that a recogniser failed at; of one that streams, links that failed",
    ),
    counter("antiphon_recognizer_audio_seconds_total", &["kind"], "Sound that services were streamed"),
    counter("antiphon_recognizer_cost_micros_total", &["kind"], "What it cost by `price`, in millionths"),
    counter(
        "antiphon_recognizer_suppressed_total",
        &["reason"],
        "Texts dropped because there was no speech or they repeat themselves",
    ),
    histogram("antiphon_deaf_seconds", &[], GAPS, "Speech of callers that was not heard"),
    // Media.
    histogram("antiphon_pacing_lateness_seconds", &[], FINE, "How long after its due time a packet leaves"),
    counter("antiphon_pacing_stalls_total", &[], "Times that the machine was too busy to send for more than a frame"),
    counter("antiphon_rtp_packets_total", &["direction"], "RTP packets of calls"),
    counter("antiphon_rtp_discarded_total", &["reason"], "RTP packets of telephones that could not be used"),
    counter("antiphon_rtcp_packets_total", &["direction"], "RTCP packets of telephone calls"),
    gauge("antiphon_rtcp_fraction_lost", &[], "Share of packets lost in the latest report of a telephone"),
    histogram(
        "antiphon_rtcp_loss_ratio",
        &["trunk", "codec"],
        LOSS,
        "Share of packets lost, by each report of a telephone",
    ),
    histogram(
        "antiphon_rtcp_jitter_seconds",
        &["trunk", "codec"],
        JITTER,
        "Interarrival jitter that telephones report",
    ),
    histogram(
        "antiphon_rtcp_local_jitter_seconds",
        &["trunk", "codec"],
        JITTER,
        "Interarrival jitter of what telephones send",
    ),
    histogram(
        "antiphon_call_mos",
        &["leg", "direction", "codec", "trunk"],
        MOS,
        "How good a call can have sounded by loss, delay and jitter (E-model, 1 to 4.5), one value a call and direction",
    ),
    histogram("antiphon_rtcp_round_trip_seconds", &["trunk", "codec"], ROUND_TRIP, "Round trip to telephones"),
    // Signalling.
    counter("antiphon_sip_messages_total", &["outcome"], "SIP messages that came, by what became of them"),
    gauge("antiphon_trunk_up", &["trunk"], "Whether calls through the trunk can be expected to get through (0 or 1)"),
    counter("antiphon_trunk_checks_total", &["outcome"], "OPTIONS to hosts of trunks, by what came of them"),
    counter(
        "antiphon_trunk_flows_lost_total",
        &[],
        "Connections of registrations that closed or died; each was made anew",
    ),
    counter("antiphon_trunk_failovers_total", &[], "Calls out that went on to another host of their trunk"),
    counter(
        "antiphon_sip_auth_total",
        &["outcome"],
        "Digest challenges sent and credentials of callers, by what they were worth",
    ),
    gauge("antiphon_sip_transactions", &[], "SIP server transactions in progress"),
    gauge("antiphon_webrtc_sessions", &[], "Browser sessions in progress"),
    counter("antiphon_webrtc_sessions_total", &["end"], "Browser sessions that ended"),
    counter(
        "antiphon_webrtc_datagrams_dropped_total",
        &["reason"],
        "Datagrams at the browsers' port that were dropped",
    ),
    counter(
        "antiphon_webrtc_moves_total",
        &[],
        "Times that a browser's media moved to another of its addresses in a call",
    ),
    counter("antiphon_webrtc_packets_lost_total", &["reason"], "RTP packets that could not be sent to a browser"),
    counter("antiphon_webrtc_recovered_total", &[], "Packets of browsers that were lost and came as copies (RED)"),
    counter("antiphon_webrtc_sends_failed_total", &["reason"], "Datagrams that the system did not take"),
    counter("antiphon_webrtc_tcp_refused_total", &[], "ICE connections over TCP that were refused"),
    // Parts.
    counter("antiphon_part_panics_total", &["part"], "Panics of parts that are started again"),
    // Other gateways.
    gauge("antiphon_cluster_nodes", &[], "Gateways that the registry has, this one too"),
    gauge("antiphon_registry_up", &[], "Whether the registry of gateways can be used"),
    counter("antiphon_passed_on_total", &["outcome"], "Requests that were passed on to another gateway"),
    // The collector.
    counter("antiphon_traces_exported_total", &[], "Spans that the collector took"),
    counter("antiphon_traces_dropped_total", &["reason"], "Spans that were dropped: queue, delivery"),
    counter("antiphon_logs_exported_total", &[], "Log lines that the collector took"),
    counter("antiphon_logs_dropped_total", &["reason"], "Log lines that the collector did not get: queue, delivery"),
];

/// Values of labels, as (metric, label, values); an empty name stands for every metric. A series all of whose labels are
/// known shows zero from the first scrape, so that `rate()` and alerts see its first increment. Labels whose values are not
/// known before (agents, devices, trunks) have no row: those series appear with their owner.
const VALUES: &[(&str, &str, &[&str])] = &[
    ("antiphon_part_panics_total", "part", &["batch", "records", "recordings", "webhooks"]),
    ("", "leg", &["sip", "webrtc"]),
    ("antiphon_first_audio_seconds", "class", &["live"]),
    ("", "class", &["live", "batch"]),
    ("", "stage", &["prefill", "decode", "flow", "vocode"]),
    ("", "outcome", &["done", "cancelled", "refused", "failed"]),
    ("antiphon_bridges_total", "outcome", &["connected", "busy", "no_answer", "refused", "cancelled", "failed"]),
    ("antiphon_webhooks_total", "outcome", &["delivered", "failed", "given_up"]),
    ("antiphon_handover_datagrams_total", "outcome", &["passed", "arrived", "dropped"]),
    ("antiphon_passed_on_total", "outcome", &["answered", "unreached", "failed"]),
    ("antiphon_stream_capacity", "state", &["used", "free"]),
    ("antiphon_trunk_checks_total", "outcome", &["answered", "failed"]),
    ("antiphon_sip_auth_total", "outcome", &["challenged", "right", "stale", "wrong", "throttled"]),
    ("antiphon_sip_messages_total", "outcome", &["passed", "passed_on", "answered", "ignored", "refused", "overload"]),
    ("", "how", &["done", "interrupted", "cancelled", "refused", "failed", "call_ended"]),
    ("", "phase", &["end_of_turn", "agent", "queue", "first_audio", "egress", "mouth_to_ear"]),
    ("", "cause", &["speech", "dtmf", "agent", "preempted"]),
    ("", "state", &["queued", "running", "done", "failed", "cancelled"]),
    ("antiphon_recognizer_seconds", "kind", &["whisper", "http"]),
    ("antiphon_recognizer_errors_total", "kind", &["whisper", "http", "deepgram", "openai"]),
    ("antiphon_recognizer_audio_seconds_total", "kind", &["deepgram", "openai"]),
    ("antiphon_recognizer_cost_micros_total", "kind", &["deepgram", "openai"]),
    ("antiphon_recognizer_suppressed_total", "reason", &["no_speech", "repetition"]),
    ("antiphon_refusals_total", "reason", &["overloaded", "full", "rate_limited", "tenant_full", "not_ready"]),
    ("antiphon_traces_dropped_total", "reason", &["queue", "delivery"]),
    ("antiphon_logs_dropped_total", "reason", &["queue", "delivery"]),
    ("antiphon_rtcp_packets_total", "direction", &["in", "out", "out_dropped"]),
    ("", "direction", &["sent", "received"]),
    ("", "result", &["hit", "miss"]),
    ("", "place", &["memory", "disk"]),
    ("", "end", &["remote", "local", "lost", "failed"]),
    (
        "antiphon_calls_ended_total",
        "reason",
        &[
            "remote",
            "hung_up",
            "transferred",
            "lost",
            "failed",
            "setup_timeout",
            "idle",
            "too_long",
            "drained",
            "agent_lost",
            "cancelled",
        ],
    ),
];

/// The series of `metric` that are known before anything has happened; none where a label's values are not.
fn known(metric: &Metric) -> Vec<Vec<metrics::Label>> {
    let mut series = vec![Vec::new()];
    for label in metric.labels {
        let of = |name: &str| VALUES.iter().find(|row| row.0 == name && row.1 == *label);
        let values = of(metric.name).or_else(|| of("")).map_or(&[][..], |row| row.2);
        let longer = |labels: &Vec<metrics::Label>| {
            let labels = labels.clone();
            values.iter().map(move |value| {
                let mut labels = labels.clone();
                labels.push(metrics::Label::from_static_parts(label, value));
                labels
            })
        };
        series = series.iter().flat_map(longer).collect();
    }
    series
}

/// The process's recorder. The first call installs it; later ones return the same.
pub fn recorder() -> &'static PrometheusHandle {
    static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();
    HANDLE.get_or_init(|| {
        let mut builder = PrometheusBuilder::new();
        for metric in METRICS {
            if let Kind::Histogram(bounds) = metric.kind {
                builder = builder
                    .set_buckets_for_metric(Matcher::Full(metric.name.to_owned()), bounds)
                    .expect("the list of buckets is not empty");
            }
        }
        let recorder = builder.build_recorder();
        let handle = recorder.handle();
        // Fails only when a test installed a recorder of its own; then this one renders nothing.
        let _ = metrics::set_global_recorder(recorder);
        METRICS.iter().for_each(describe);
        METRICS.iter().for_each(begin);
        handle
    })
}

/// What `/metrics` answers to who accepts `accept`, and its content type: OpenMetrics with exemplars for who asks for it, as
/// Prometheus does, else the older text.
pub fn answer(handle: &PrometheusHandle, accept: &str) -> (&'static str, String) {
    let text = handle.render();
    if accept.split(',').any(|kind| kind.trim_start().starts_with("application/openmetrics-text")) {
        return (OPENMETRICS, super::exposition::openmetrics(&text));
    }
    (PROMETHEUS, text)
}

/// How often what was observed is added up.
const UPKEEP: Duration = Duration::from_secs(5);

/// Adds up what histograms observed, until `stop`.
///
/// # Why
/// The exporter keeps every observation until it is asked for them, and who scrapes nothing never asks: the lateness of 50
/// packets a second alone made a call of half a minute cost 10 kB for ever.
pub async fn keep(handle: PrometheusHandle, stop: watch::Receiver<bool>) {
    again(UPKEEP, move || handle.run_upkeep(), stop).await;
}

async fn again(period: Duration, run: impl Fn() + Clone + Send + 'static, mut stop: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            // Also when its sender is gone.
            _ = stop.changed() => return,
            () = tokio::time::sleep(period) => {}
        }
        // With many calls it takes some milliseconds, in which no packet is to wait.
        let _ = tokio::task::spawn_blocking(run.clone()).await;
    }
}

/// Shows zero for what is known of `metric`.
fn begin(metric: &Metric) {
    let name = metric.name;
    for labels in known(metric) {
        match metric.kind {
            Kind::Counter => metrics::counter!(name, labels).increment(0),
            Kind::Gauge => metrics::gauge!(name, labels).increment(0.0),
            // A histogram is there without an observation.
            Kind::Histogram(_) => drop(metrics::histogram!(name, labels)),
        }
    }
}

/// The unit of a metric as its name ends, which is how OpenMetrics writes it; `None`: it has none.
pub(super) fn unit_word(name: &str) -> Option<&'static str> {
    let name = name.strip_suffix("_total").unwrap_or(name);
    let known = ["seconds", "bytes", "celsius", "hertz", "watts", "ratio"];
    known.into_iter().find(|unit| name.strip_suffix(unit).is_some_and(|rest| rest.ends_with('_')))
}

/// The unit of a metric by its name, as UCUM writes it.
pub(super) fn unit(name: &str) -> &'static str {
    let name = name.strip_suffix("_total").unwrap_or(name);
    let known = [("_seconds", "s"), ("_bytes", "By"), ("_celsius", "Cel"), ("_hertz", "Hz"), ("_watts", "W")];
    known.iter().find(|(end, _)| name.ends_with(end)).map_or("1", |(_, unit)| unit)
}

fn describe(metric: &Metric) {
    let Metric { name, kind, help, .. } = *metric;
    let unit = match name {
        name if name.ends_with("_seconds") => Unit::Seconds,
        name if name.ends_with("_bytes") => Unit::Bytes,
        _ => Unit::Count,
    };
    match kind {
        Kind::Counter => describe_counter!(name, unit, help),
        Kind::Gauge => describe_gauge!(name, unit, help),
        Kind::Histogram(_) => describe_histogram!(name, unit, help),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    /// The metrics that the source tree records, as kind and name.
    fn recorded() -> BTreeSet<(&'static str, String)> {
        let mut found = BTreeSet::new();
        let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).expect("readable") {
                let path = entry.expect("an entry").path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|end| end == "rs") {
                    let text = std::fs::read_to_string(&path).expect("UTF-8");
                    for kind in ["counter", "gauge", "histogram"] {
                        for (at, _) in text.match_indices(&format!("{kind}!(")) {
                            // Not `describe_counter!`, and not a macro of this test.
                            let described = text[..at].ends_with('_');
                            let literal = text[at + kind.len() + 2..].trim_start().strip_prefix('"');
                            if let (false, Some(name)) = (described, literal.and_then(|rest| rest.split('"').next())) {
                                found.insert((kind, name.to_owned()));
                            }
                        }
                    }
                }
            }
        }
        found
    }

    #[tokio::test]
    async fn what_is_observed_is_added_up_again_and_again_until_the_end() {
        let (ran, mut runs) = tokio::sync::mpsc::channel(1);
        let (stop, stopped) = watch::channel(false);
        let run = move || {
            // The receiver is gone at the end.
            let _ = ran.blocking_send(());
        };
        let kept = tokio::spawn(again(Duration::from_millis(1), run, stopped));
        for _ in 0..3 {
            runs.recv().await.expect("it goes on");
        }
        drop((stop, runs));
        kept.await.expect("it ends");
    }

    #[test]
    fn the_table_has_every_metric_that_the_source_records_and_no_other() {
        let told = METRICS.iter().map(|metric| {
            let kind = match metric.kind {
                Kind::Counter => "counter",
                Kind::Gauge => "gauge",
                Kind::Histogram(_) => "histogram",
            };
            (kind, metric.name.to_owned())
        });
        let told: BTreeSet<_> = told.collect();
        assert_eq!(told.len(), METRICS.len(), "one of them is there twice");
        let recorded = recorded();
        assert!(recorded.len() > 30, "{recorded:?}");
        assert_eq!(told, recorded);
    }

    /// An alert on a metric that is not there never fires.
    #[test]
    fn every_metric_whose_series_are_known_is_there_from_the_first_scrape() {
        let text = recorder().render();
        let lines = |name: &str| text.lines().filter(|line| line.starts_with(name)).count();
        for metric in METRICS {
            let series = known(metric).len();
            assert!(lines(metric.name) >= series, "{} of {series} series of {}", lines(metric.name), metric.name);
            let open = ["agent", "device", "end", "gpu", "part", "reason", "trunk", "webhook", "worker"]
                .iter()
                .any(|label| metric.labels.contains(label));
            assert!(series > 0 || open, "{} has no value of its labels in VALUES", metric.name);
        }
        assert!(text.contains("antiphon_calls{leg=\"sip\"} "), "{text}");
        assert!(text.contains("antiphon_sip_auth_total{outcome=\"wrong\"} "), "{text}");
        assert!(text.contains("antiphon_first_audio_seconds_count{leg=\"webrtc\",class=\"live\"} "), "{text}");
    }

    #[test]
    fn every_metric_of_the_shipped_alerts_and_dashboard_is_in_the_table() {
        let shipped = concat!(
            include_str!("../../config/alerts.yml"),
            include_str!("../../config/alerts.test.yml"),
            include_str!("../../config/packaging/grafana/antiphon.json"),
            include_str!("../../config/packaging/HANDBOOK.md"),
            include_str!("../../config/packaging/FAULTS.md"),
        );
        let words = shipped.split(|c: char| !(c.is_ascii_lowercase() || c == '_'));
        let names = words.filter(|word| word.starts_with("antiphon_") || word.starts_with("voice_"));
        let mut seen = 0;
        for name in names {
            let series = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
            assert!(METRICS.iter().any(|metric| metric.name == series), "{name}");
            seen += 1;
        }
        assert!(seen >= 40, "{seen}");
    }
}
