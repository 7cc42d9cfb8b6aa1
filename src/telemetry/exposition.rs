//! The text that the exporter for Prometheus renders, read again: as samples for the collector, and as OpenMetrics 1.0 with
//! exemplars (<https://github.com/prometheus/OpenMetrics>).

use std::fmt::Write as _;

use super::exemplars::{self, Exemplar};
use super::metrics::{Kind, METRICS, Metric, unit_word};

/// One sample.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sample {
    pub(super) metric: &'static Metric,
    /// What follows the metric's name: `_bucket`, `_sum`, `_count` or nothing.
    pub(super) part: &'static str,
    /// Without `le`.
    pub(super) labels: Vec<(String, String)>,
    /// The bound of a bucket.
    pub(super) at: Option<f64>,
    pub(super) value: f64,
}

/// The samples of `text`; lines that are none are left out.
pub(super) fn samples(text: &str) -> impl Iterator<Item = Sample> {
    text.lines().filter_map(sample)
}

fn sample(line: &str) -> Option<Sample> {
    if line.starts_with('#') {
        return None;
    }
    let (series, value) = line.rsplit_once(' ')?;
    let (name, labels) = match series.split_once('{') {
        Some((name, labels)) => (name, labels.strip_suffix('}')?),
        None => (series, ""),
    };
    let (metric, part) = metric(name)?;
    let (mut at, mut others) = (None, Vec::new());
    for (name, value) in pairs(labels) {
        match name.as_str() {
            "le" => at = value.parse().ok(),
            _ => others.push((name, value)),
        }
    }
    Some(Sample { metric, part, labels: others, at, value: value.parse().ok()? })
}

/// The metric that a sample of this name is of, and which part of it.
fn metric(name: &str) -> Option<(&'static Metric, &'static str)> {
    let of = |name: &str| METRICS.iter().find(|metric| metric.name == name);
    let parts = ["_bucket", "_sum", "_count"].into_iter();
    let of_part = |part: &'static str| {
        let metric = of(name.strip_suffix(part)?)?;
        matches!(metric.kind, Kind::Histogram(_)).then_some((metric, part))
    };
    of(name).map(|metric| (metric, "")).or_else(|| parts.into_iter().find_map(of_part))
}

/// `a="x",b="y"`, whose values may have `\\`, `\"` and `\n` (as backslash and n).
fn pairs(mut text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    while let Some((name, rest)) = text.split_once("=\"") {
        let (mut value, mut escaped, mut end) = (String::new(), false, None);
        for (at, c) in rest.char_indices() {
            match (escaped, c) {
                (true, 'n') => value.push('\n'),
                (true, c) => value.push(c),
                (false, '\\') => {}
                (false, '"') => {
                    end = Some(at);
                    break;
                }
                (false, c) => value.push(c),
            }
            escaped = !escaped && c == '\\';
        }
        let Some(end) = end else { break };
        found.push((name.trim_start_matches(',').to_owned(), value));
        text = &rest[end + 1..];
    }
    found
}

/// `text` as OpenMetrics, with the exemplars that are kept.
pub(super) fn openmetrics(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + text.len() / 8);
    for line in text.lines().filter(|line| !line.is_empty()) {
        if let Some(described) = line.strip_prefix("# ") {
            describe(&mut out, described);
            continue;
        }
        out.push_str(line);
        if let Some(exemplar) = sample(line).and_then(|sample| of_bucket(&sample)) {
            let Exemplar { value, trace, span, at } = exemplar;
            // Writing to a string does not fail.
            let _ = write!(out, " # {{trace_id=\"{trace}\",span_id=\"{span}\"}} {value} {:.3}", at.as_secs_f64());
        }
        out.push('\n');
    }
    out.push_str("# EOF\n");
    out
}

/// A line of meta data: `HELP name text` or `TYPE name kind`. The name of a counter is without its `_total`; a counter that has
/// none in its name cannot be one.
fn describe(out: &mut String, line: &str) {
    let mut words = line.splitn(3, ' ');
    let (Some(what), Some(name), Some(rest)) = (words.next(), words.next(), words.next()) else { return };
    let counter = metric(name).is_some_and(|(metric, _)| metric.kind == Kind::Counter);
    let (name, rest) = match (counter, name.strip_suffix("_total")) {
        (true, Some(family)) => (family, rest),
        (true, None) if what == "TYPE" => (name, "unknown"),
        _ => (name, rest),
    };
    let _ = writeln!(out, "# {what} {name} {rest}");
    if let Some(unit) = unit_word(name).filter(|_| what == "TYPE") {
        let _ = writeln!(out, "# UNIT {name} {unit}");
    }
}

fn of_bucket(sample: &Sample) -> Option<Exemplar> {
    let Kind::Histogram(bounds) = sample.metric.kind else { return None };
    let upper = sample.at.filter(|_| sample.part == "_bucket")?;
    let bucket = bounds.iter().position(|bound| *bound == upper).unwrap_or(bounds.len());
    exemplars::find(sample.metric.name, &sample.labels, bucket)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::telemetry::context::TraceContext;

    #[test]
    fn samples_are_read_with_their_labels_whatever_these_have() {
        let text = "# TYPE antiphon_turn_seconds histogram\nantiphon_turn_seconds_bucket{phase=\"a\\\"b,\\\\\",le=\"0.1\"} 3\n\
            antiphon_underruns_total 2\nantiphon_recording_dropped_seconds 0.5\nsomething_else 1\nantiphon_turn_seconds_bucket{x 1\n";
        let found: Vec<_> = samples(text).collect();
        assert_eq!(found.len(), 3, "{found:?}");
        assert_eq!((found[0].part, found[0].at, found[0].value), ("_bucket", Some(0.1), 3.0));
        assert_eq!(found[0].labels, [("phase".to_owned(), "a\"b,\\".to_owned())]);
        assert_eq!((found[1].metric.name, found[1].value), ("antiphon_underruns_total", 2.0));
    }

    #[test]
    fn openmetrics_names_families_ends_well_and_shows_the_trace_of_a_slow_turn() {
        let parent = TraceContext::parse("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").expect("valid");
        let labels = [("leg", "webrtc"), ("class", "live")];
        exemplars::note("antiphon_first_audio_seconds", &labels, 0.42, parent.span(), Duration::from_millis(1_500));
        let text = "# HELP antiphon_underruns_total Gaps\n# TYPE antiphon_underruns_total counter\nantiphon_underruns_total 2\n\n\
            # TYPE antiphon_recording_dropped_seconds counter\nantiphon_recording_dropped_seconds 0\n\n\
            # TYPE antiphon_first_audio_seconds histogram\n\
            antiphon_first_audio_seconds_bucket{leg=\"webrtc\",class=\"live\",le=\"0.3\"} 1\n\
            antiphon_first_audio_seconds_bucket{leg=\"webrtc\",class=\"live\",le=\"0.5\"} 2\n";
        let shown = openmetrics(text);
        for line in [
            "# HELP antiphon_underruns Gaps",
            "# TYPE antiphon_underruns counter",
            "antiphon_underruns_total 2",
            "# TYPE antiphon_recording_dropped_seconds unknown",
            "# UNIT antiphon_recording_dropped_seconds seconds",
            "# UNIT antiphon_first_audio_seconds seconds",
            "antiphon_first_audio_seconds_bucket{leg=\"webrtc\",class=\"live\",le=\"0.3\"} 1",
            "antiphon_first_audio_seconds_bucket{leg=\"webrtc\",class=\"live\",le=\"0.5\"} 2 # \
             {trace_id=\"0af7651916cd43dd8448eb211c80319c\",span_id=\"b7ad6b7169203331\"} 0.42 1.500",
        ] {
            assert!(shown.lines().any(|shown| shown == line), "{line}: {shown}");
        }
        assert!(!shown.contains("# UNIT antiphon_underruns"), "a count has none: {shown}");
        assert!(shown.ends_with("# EOF\n") && !shown.contains("\n\n"), "{shown}");
    }
}
