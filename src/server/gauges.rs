//! Gauges that are read off the parts when somebody asks for metrics.

use std::time::Duration;

use metrics::gauge;
use tokio::sync::watch;

use crate::gateway::Gateway;

/// Sets them to what they are now. The devices' own gauges are kept by their threads.
pub(super) async fn refresh(gateway: &Gateway) {
    let load = gateway.room.load();
    gauge!("antiphon_active_calls").set(f64::from(load.calls));
    gauge!("antiphon_stream_capacity", "state" => "used").set(f64::from(load.calls));
    gauge!("antiphon_stream_capacity", "state" => "free").set(load.free);
    let Some(jobs) = gateway.jobs.opened() else { return };
    // The database may be busy writing.
    let Ok(Ok(counts)) = tokio::task::spawn_blocking(move || jobs.counts()).await else { return };
    for (state, jobs) in counts {
        gauge!("antiphon_batch_jobs", "state" => state.name()).set(f64::from(jobs));
    }
}

/// Sets them every `period` until `stop`: for a collector, which gets metrics without asking.
pub async fn keep(gateway: Gateway, period: Duration, mut stop: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            // Also when its sender is gone.
            _ = stop.changed() => return,
            () = tokio::time::sleep(period) => refresh(&gateway).await,
        }
    }
}
