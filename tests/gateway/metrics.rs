//! `/metrics` of a gateway that has worked, against the table of metrics.

use std::io::Write;
use std::process::{Command, Stdio};

use antiphon::telemetry::metrics::{Kind, METRICS, Metric};
use antiphon_loadgen::codec::Codec;

use super::support::{Rig, SENTENCE, hear_turn};

pub(crate) async fn scrape(rig: &Rig) -> String {
    let response = rig.client.get(format!("{}/metrics", rig.http)).send().await.expect("HTTP");
    assert_eq!(response.status(), 200);
    response.text().await.expect("text")
}

/// The sum of the samples that begin with `series`, of all their labels.
fn value(text: &str, series: &str) -> f64 {
    let samples = text.lines().filter(|line| line.starts_with(series));
    samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

/// The metric of a sample, and its labels.
fn sample(line: &str) -> (&'static Metric, Vec<&str>) {
    let name = line.split(['{', ' ']).next().unwrap_or_default();
    let known = |name: &str| METRICS.iter().find(|metric| metric.name == name);
    let series = ["_bucket", "_sum", "_count"].iter().find_map(|end| known(name.strip_suffix(end)?));
    let metric = known(name).or(series).unwrap_or_else(|| panic!("`{name}` is not in the table of metrics"));
    let labels = line.split_once('{').and_then(|(_, rest)| rest.rsplit_once('}')).map_or("", |(labels, _)| labels);
    (metric, labels.split(',').filter_map(|label| Some(label.split_once('=')?.0)).collect())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_is_counted_and_nothing_is_shown_that_the_table_does_not_have() {
    let rig = Rig::start().await;
    let before = scrape(&rig).await;
    let call = rig.telephone("silent", Codec::Pcmu).await;
    let asked = rig.speak(&call, SENTENCE).await;
    hear_turn(&call, asked).await;
    assert!(value(&scrape(&rig).await, "antiphon_calls{leg=\"sip\"}") >= 1.0, "the call is in progress");
    let handle = rig.handle(&call).await;
    call.hang_up().await;
    handle.ended().await;
    let after = scrape(&rig).await;
    // Other tests of this process count, too, so that only growth can be told.
    let grew = |series: &str| value(&after, series) - value(&before, series);
    assert!(grew("antiphon_turns_total{") >= 1.0, "{after}");
    assert!(grew("antiphon_first_audio_seconds_count{") >= 1.0, "{after}");
    assert!(grew("antiphon_calls_ended_total{") >= 1.0, "{after}");
    assert!(grew("voice_requests_total{") >= 1.0, "{after}");
    assert!(grew("antiphon_step_seconds_count{") >= 1.0, "{after}");
    assert!(grew("antiphon_rtp_packets_total{direction=\"sent\"}") >= 50.0, "a second of speech: {after}");
    assert!(grew("antiphon_sip_messages_total{") >= 3.0, "INVITE, ACK and BYE: {after}");
    let mut seen = 0;
    for line in after.lines() {
        if let Some(told) = line.strip_prefix("# TYPE ") {
            let (metric, _) = sample(told);
            let kind = match metric.kind {
                Kind::Counter => "counter",
                Kind::Gauge => "gauge",
                Kind::Histogram(_) => "histogram",
            };
            assert!(told.ends_with(kind), "{told}: the table says {kind}");
        } else if !line.starts_with('#') && !line.is_empty() {
            let (metric, labels) = sample(line);
            let known = |label: &&str| metric.labels.contains(label) || *label == "le";
            assert!(labels.iter().all(known), "{line}: the table has the labels {:?}", metric.labels);
            seen += 1;
        }
    }
    assert!(seen > 30, "{after}");
    let helped = after.lines().filter(|line| line.starts_with("# HELP ")).count();
    assert_eq!(helped, after.lines().filter(|line| line.starts_with("# TYPE ")).count(), "each is described");
    rig.app.drain().await;
    is_well_formed(&after);
}

/// What Prometheus' own linter says of it: nothing but of a name that goes with the next release.
fn is_well_formed(text: &str) {
    let checker = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut checker = match checker {
        Ok(checker) => checker,
        Err(error) => return antiphon_skip::skip("promtool", error),
    };
    checker.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("read");
    let output = checker.wait_with_output().expect("it ends");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    let known = |line: &&str| line.starts_with("antiphon_recording_dropped_seconds ") || line.trim().is_empty();
    assert!(said.lines().all(|line| known(&line)), "{said}");
    assert!(said.contains("antiphon_recording_dropped_seconds "), "the linter ran: {said}");
}
