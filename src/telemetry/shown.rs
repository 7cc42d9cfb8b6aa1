//! What is counted, for unit tests of what counts: by one thread, or by the whole process.

use metrics::LocalRecorderGuard;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};

/// The sum of the samples of the whole process that begin with `series`, since the first call. Other tests may count, too: of a
/// counter only growth can be told.
pub(crate) fn counted(series: &str) -> f64 {
    sum(&super::metrics::recorder().render(), series)
}

fn sum(text: &str, series: &str) -> f64 {
    let samples = text.lines().filter(|line| line.starts_with(series));
    samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

/// The metrics of this thread, for as long as it lives.
pub(crate) struct Shown {
    handle: PrometheusHandle,
    _guard: LocalRecorderGuard<'static>,
}

impl Shown {
    /// Counts what this thread does from now on.
    pub(crate) fn here() -> Self {
        // The guard borrows it; a test's process ends soon.
        let recorder = Box::leak(Box::new(PrometheusBuilder::new().build_recorder()));
        Self { handle: recorder.handle(), _guard: metrics::set_default_local_recorder(recorder) }
    }

    /// The sum of the samples that begin with `series`, of all their labels.
    pub(crate) fn sum(&self, series: &str) -> f64 {
        sum(&self.handle.render(), series)
    }
}
