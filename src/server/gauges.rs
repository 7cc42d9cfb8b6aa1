//! Gauges that are read off the parts when somebody asks for metrics.

use metrics::gauge;

use super::Gateway;
use crate::batch::JobState;

const STATES: [(JobState, &str); 5] = [
    (JobState::Queued, "queued"),
    (JobState::Running, "running"),
    (JobState::Done, "done"),
    (JobState::Failed, "failed"),
    (JobState::Cancelled, "cancelled"),
];

/// Sets them to what they are now. The devices' own gauges are kept by their threads.
pub(super) async fn refresh(gateway: &Gateway) {
    let Some(jobs) = gateway.jobs.opened() else { return };
    // The database may be busy writing.
    let Ok(Ok(counts)) = tokio::task::spawn_blocking(move || jobs.counts()).await else { return };
    for (state, jobs) in all_states(&counts) {
        gauge!("antiphon_batch_jobs", "state" => state).set(f64::from(jobs));
    }
}

/// Every state, because the database names only those that some job has, and a gauge keeps what it was set to last.
fn all_states(counts: &[(JobState, u32)]) -> [(&'static str, u32); 5] {
    STATES.map(|(state, label)| {
        (label, counts.iter().find(|(counted, _)| *counted == state).map_or(0, |(_, jobs)| *jobs))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_that_no_job_has_any_more_is_zero() {
        let all = all_states(&[(JobState::Done, 3), (JobState::Failed, 1)]);
        assert_eq!(all, [("queued", 0), ("running", 0), ("done", 3), ("failed", 1), ("cancelled", 0)]);
    }
}
