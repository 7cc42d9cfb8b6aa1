//! Examples of what histograms counted: for each bucket of a series the latest value whose trace is known.
//!
//! # Why
//! The exporter for Prometheus keeps no exemplars, so they are kept beside it and joined with its text: as OpenMetrics has them
//! (`/metrics` for who accepts `application/openmetrics-text`) and for the collector. Only turns have traces, so only two
//! metrics have exemplars, and at most some hundred are kept.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use opentelemetry::trace::{SpanContext, SpanId, TraceId};

use super::metrics::{Kind, METRICS};

/// One observed value, and the trace that says how it came about.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Exemplar {
    pub(super) value: f64,
    pub(super) trace: TraceId,
    pub(super) span: SpanId,
    /// Wall clock.
    pub(super) at: Duration,
}

/// Metric, labels in the order of their names, number of the bucket.
type Key = (&'static str, Vec<(String, String)>, usize);

static KEPT: Mutex<BTreeMap<Key, Exemplar>> = Mutex::new(BTreeMap::new());

/// `value` was observed in the series of `metric` with `labels`, all of which are of the table of metrics.
pub(super) fn note(
    metric: &'static str,
    labels: &[(&'static str, &'static str)],
    value: f64,
    span: &SpanContext,
    at: Duration,
) {
    let Some(bucket) = bucket(metric, value).filter(|_| span.is_sampled()) else { return };
    let labels = sorted(labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
    let exemplar = Exemplar { value, trace: span.trace_id(), span: span.span_id(), at };
    KEPT.lock().unwrap_or_else(PoisonError::into_inner).insert((metric, labels, bucket), exemplar);
}

/// The exemplar of a bucket; of the last one (`+Inf`) `bucket` is the number of bounds.
pub(super) fn find(metric: &'static str, labels: &[(String, String)], bucket: usize) -> Option<Exemplar> {
    let key = (metric, sorted(labels.iter().cloned()), bucket);
    KEPT.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned()
}

fn bucket(metric: &str, value: f64) -> Option<usize> {
    let bounds = METRICS.iter().find_map(|row| match row.kind {
        Kind::Histogram(bounds) if row.name == metric => Some(bounds),
        _ => None,
    })?;
    Some(bounds.iter().position(|bound| value <= *bound).unwrap_or(bounds.len()))
}

fn sorted(labels: impl Iterator<Item = (String, String)>) -> Vec<(String, String)> {
    let mut labels: Vec<_> = labels.collect();
    labels.sort();
    labels
}
