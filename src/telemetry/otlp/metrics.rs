//! What `/metrics` shows, for the collector.

use std::time::Duration;

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as AnyOf;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Exemplar, Gauge, Histogram, HistogramDataPoint, Metric as Sent, NumberDataPoint,
    ResourceMetrics, ScopeMetrics, Sum, exemplar, metric, number_data_point,
};
use opentelemetry_proto::tonic::resource::v1::Resource;
use prost::Message as _;
use tokio::sync::watch;

use super::client::Client;
use crate::clock;
use crate::telemetry::exemplars;
use crate::telemetry::exposition::{Sample, samples};
use crate::telemetry::metrics::{Kind, METRICS, Metric, recorder, unit};

/// How often: as Prometheus usually asks.
pub(super) const PERIOD: Duration = Duration::from_secs(15);

/// Delivers every [`PERIOD`] and at the end, until `stop` says so. What is not delivered is nothing lost: counters go on.
pub(super) async fn export(client: Client, url: String, began: u64, mut stop: watch::Receiver<bool>) {
    let mut reachable = true;
    loop {
        let stopping = tokio::select! {
            _ = stop.wait_for(|stop| *stop) => true,
            () = tokio::time::sleep(PERIOD) => false,
        };
        // With many calls rendering takes some milliseconds, in which no packet is to wait.
        let encoded = tokio::task::spawn_blocking(move || {
            request(&recorder().render(), began, clock::wall().as_nanos() as u64).encode_to_vec()
        });
        // A panic there was logged when it happened.
        let Ok(encoded) = encoded.await else { return };
        match client.post(&url, encoded).await {
            Ok(()) if !std::mem::replace(&mut reachable, true) => tracing::info!("the collector takes metrics again"),
            Err(reason) if std::mem::replace(&mut reachable, false) => {
                tracing::warn!(reason, "the collector takes no metrics");
            }
            Ok(()) | Err(_) => {}
        }
        if stopping {
            return;
        }
    }
}

/// The samples of `text` as counted since `began` and seen `now`, both Unix time in nanoseconds.
fn request(text: &str, began: u64, now: u64) -> ExportMetricsServiceRequest {
    let all: Vec<Sample> = samples(text).collect();
    let metrics = METRICS.iter().filter_map(|metric| {
        let of: Vec<&Sample> = all.iter().filter(|sample| sample.metric.name == metric.name).collect();
        (!of.is_empty()).then(|| sent(metric, &of, (began, now)))
    });
    let version = env!("CARGO_PKG_VERSION").to_owned();
    let scope = InstrumentationScope { name: "antiphon".into(), version: version.clone(), ..Default::default() };
    let attributes = vec![attribute("service.name", "antiphon"), attribute("service.version", &version)];
    let scope_metrics = ScopeMetrics { scope: Some(scope), metrics: metrics.collect(), schema_url: String::new() };
    let resource_metrics = ResourceMetrics {
        resource: Some(Resource { attributes, ..Default::default() }),
        scope_metrics: vec![scope_metrics],
        schema_url: String::new(),
    };
    ExportMetricsServiceRequest { resource_metrics: vec![resource_metrics] }
}

fn sent(metric: &Metric, samples: &[&Sample], times: (u64, u64)) -> Sent {
    let cumulative = AggregationTemporality::Cumulative as i32;
    let data = match metric.kind {
        Kind::Counter => metric::Data::Sum(Sum {
            data_points: numbers(samples, times),
            aggregation_temporality: cumulative,
            is_monotonic: true,
        }),
        Kind::Gauge => metric::Data::Gauge(Gauge { data_points: numbers(samples, times) }),
        Kind::Histogram(bounds) => metric::Data::Histogram(Histogram {
            data_points: series(samples).into_iter().map(|of| histogram(metric.name, bounds, &of, times)).collect(),
            aggregation_temporality: cumulative,
        }),
    };
    Sent {
        name: metric.name.to_owned(),
        description: metric.help.to_owned(),
        unit: unit(metric.name).to_owned(),
        metadata: Vec::new(),
        data: Some(data),
    }
}

/// Samples of the same labels together, in the order in which they came.
fn series<'a>(samples: &[&'a Sample]) -> Vec<Vec<&'a Sample>> {
    let mut all: Vec<Vec<&Sample>> = Vec::new();
    for sample in samples {
        match all.iter_mut().find(|of| of.first().is_some_and(|first| first.labels == sample.labels)) {
            Some(of) => of.push(sample),
            None => all.push(vec![sample]),
        }
    }
    all
}

fn numbers(samples: &[&Sample], (began, now): (u64, u64)) -> Vec<NumberDataPoint> {
    let point = |sample: &&Sample| NumberDataPoint {
        attributes: attributes(sample),
        start_time_unix_nano: began,
        time_unix_nano: now,
        exemplars: Vec::new(),
        flags: 0,
        value: Some(number_data_point::Value::AsDouble(sample.value)),
    };
    samples.iter().map(point).collect()
}

fn histogram(name: &'static str, bounds: &[f64], of: &[&Sample], (began, now): (u64, u64)) -> HistogramDataPoint {
    let labels = of.first().map(|sample| sample.labels.as_slice()).unwrap_or_default();
    // Those of the text count what is below them, too.
    let mut below = 0;
    let buckets = of.iter().filter(|sample| sample.part == "_bucket").map(|sample| {
        let count = sample.value as u64;
        count.saturating_sub(std::mem::replace(&mut below, count))
    });
    let found = (0..=bounds.len()).filter_map(|bucket| exemplars::find(name, labels, bucket));
    let exemplars = found.map(|found| Exemplar {
        filtered_attributes: Vec::new(),
        time_unix_nano: found.at.as_nanos() as u64,
        span_id: found.span.to_bytes().to_vec(),
        trace_id: found.trace.to_bytes().to_vec(),
        value: Some(exemplar::Value::AsDouble(found.value)),
    });
    HistogramDataPoint {
        attributes: of.first().map(|sample| attributes(sample)).unwrap_or_default(),
        start_time_unix_nano: began,
        time_unix_nano: now,
        count: part(of, "_count").unwrap_or_default() as u64,
        sum: part(of, "_sum"),
        bucket_counts: buckets.collect(),
        explicit_bounds: bounds.to_vec(),
        exemplars: exemplars.collect(),
        ..Default::default()
    }
}

fn part(of: &[&Sample], part: &str) -> Option<f64> {
    of.iter().find(|sample| sample.part == part).map(|sample| sample.value)
}

fn attributes(sample: &Sample) -> Vec<KeyValue> {
    sample.labels.iter().map(|(name, value)| attribute(name, value)).collect()
}

fn attribute(key: &str, value: &str) -> KeyValue {
    let value = AnyValue { value: Some(AnyOf::StringValue(value.to_owned())) };
    KeyValue { key: key.to_owned(), value: Some(value), ..Default::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::context::TraceContext;

    #[test]
    fn every_kind_of_metric_is_sent_as_what_it_is() {
        let parent = TraceContext::parse("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").expect("valid");
        // A phase that no other test has an example of.
        exemplars::note("antiphon_turn_seconds", &[("phase", "egress")], 0.04, parent.span(), Duration::from_secs(5));
        let bounds = METRICS.iter().find(|metric| metric.name == "antiphon_turn_seconds").map(|metric| metric.kind);
        let Some(Kind::Histogram(bounds)) = bounds else { panic!("a histogram") };
        let mut text =
            "antiphon_underruns_total 2\nantiphon_calls{leg=\"sip\"} 3\nantiphon_calls{leg=\"webrtc\"} 0\n".to_owned();
        for bound in bounds {
            let count = if *bound < 0.05 { 1 } else { 4 };
            text.push_str(&format!("antiphon_turn_seconds_bucket{{phase=\"egress\",le=\"{bound}\"}} {count}\n"));
        }
        text.push_str("antiphon_turn_seconds_bucket{phase=\"egress\",le=\"+Inf\"} 5\n");
        text.push_str(
            "antiphon_turn_seconds_sum{phase=\"egress\"} 9.5\nantiphon_turn_seconds_count{phase=\"egress\"} 5\n",
        );
        let sent = request(&text, 1, 2);
        let sent = ExportMetricsServiceRequest::decode(sent.encode_to_vec().as_slice()).expect("what was encoded");
        let metrics = &sent.resource_metrics[0].scope_metrics[0].metrics;
        let of = |name: &str| metrics.iter().find(|metric| metric.name == name).and_then(|metric| metric.data.clone());
        let Some(metric::Data::Sum(sum)) = of("antiphon_underruns_total") else { panic!("a sum") };
        assert!(sum.is_monotonic && sum.data_points[0].start_time_unix_nano == 1, "{sum:?}");
        assert_eq!(sum.data_points[0].value, Some(number_data_point::Value::AsDouble(2.0)));
        let Some(metric::Data::Gauge(gauge)) = of("antiphon_calls") else { panic!("a gauge") };
        assert_eq!((gauge.data_points.len(), gauge.data_points[1].attributes[0].key.as_str()), (2, "leg"));
        let Some(metric::Data::Histogram(histogram)) = of("antiphon_turn_seconds") else { panic!("a histogram") };
        let point = &histogram.data_points[0];
        assert_eq!((point.count, point.sum, point.bucket_counts.iter().sum()), (5, Some(9.5), 5));
        assert_eq!((point.bucket_counts[0], point.bucket_counts.len()), (1, bounds.len() + 1));
        assert_eq!(point.exemplars[0].trace_id, parent.span().trace_id().to_bytes());
        assert_eq!(metrics.iter().find(|metric| metric.name == "antiphon_turn_seconds").expect("there").unit, "s");
    }

    #[test]
    fn what_the_recorder_shows_at_the_start_is_sent_whole() {
        let sent = request(&recorder().render(), 1, 2);
        let names: Vec<_> =
            sent.resource_metrics[0].scope_metrics[0].metrics.iter().map(|metric| &metric.name).collect();
        for name in ["antiphon_calls", "antiphon_first_audio_seconds", "antiphon_underruns_total"] {
            assert!(names.iter().any(|sent| *sent == name), "{name}: {names:?}");
        }
    }
}
