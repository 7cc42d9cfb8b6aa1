//! What this process counts of itself, for tests that provoke it. Shared with the suites of SIP, WebRTC and batch work.

use antiphon::telemetry::metrics::recorder;

/// The sum of the samples that begin with `series`, of all their labels, since the first call. Other tests of this process
/// may count, too: of a counter only growth can be told.
pub(crate) fn counted(series: &str) -> f64 {
    sum(&recorder().render(), series)
}

/// The same in a text of samples.
pub(crate) fn sum(text: &str, series: &str) -> f64 {
    let samples = text.lines().filter(|line| line.starts_with(series));
    samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

/// What grows while a test runs.
pub(crate) struct Growth(Vec<(&'static str, f64)>);

impl Growth {
    /// From now on, of these series.
    pub(crate) fn of(series: &[&'static str]) -> Self {
        Self(series.iter().map(|series| (*series, counted(series))).collect())
    }

    /// That each has grown by one at least.
    pub(crate) fn assert(&self) {
        for (series, before) in &self.0 {
            assert!(counted(series) >= before + 1.0, "{series}: {before} before, {} now", counted(series));
        }
    }

    /// Waits for it.
    pub(crate) async fn comes(&self) {
        let grown = || self.0.iter().all(|(series, before)| counted(series) >= before + 1.0);
        for _ in 0..1_500 {
            if grown() {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        self.assert();
    }
}
