//! Gauges that are read off the parts when somebody asks for metrics.

use metrics::gauge;

use super::Gateway;

/// Sets them to what they are now. The devices' own gauges are kept by their threads.
pub(super) fn refresh(gateway: &Gateway) {
    if let Some(counts) = gateway.jobs.opened().and_then(|jobs| jobs.counts().ok()) {
        for (state, jobs) in counts {
            gauge!("antiphon_batch_jobs", "state" => state.name()).set(f64::from(jobs));
        }
    }
}
