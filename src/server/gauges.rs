//! Gauges that are read off the parts when somebody asks for metrics.

use metrics::gauge;

use super::Gateway;
use crate::batch::JobState;
use crate::turn::Class;

/// Sets every gauge to what it is now.
pub(super) fn refresh(gateway: &Gateway) {
    for device in gateway.engine.status() {
        let Some(caps) = device.caps else { continue };
        for (part, bytes) in [("used", device.memory.used), ("total", device.memory.total)] {
            gauge!("voice_gpu_memory_bytes", "device" => caps.device.clone(), "part" => part).set(bytes as f64);
        }
    }
    if let Some(counts) = gateway.jobs.opened().and_then(|jobs| jobs.counts().ok()) {
        for (state, jobs) in counts {
            gauge!("antiphon_batch_jobs", "state" => label(state)).set(f64::from(jobs));
        }
    }
    let (mut live, mut batch) = (0, 0);
    for device in gateway.engine.status() {
        live += device.load.live - device.load.live_open;
        batch += device.load.batch - device.load.batch_open;
    }
    gauge!("antiphon_scheduler_queue_depth", "class" => Class::Live.label()).set(f64::from(live));
    gauge!("antiphon_scheduler_queue_depth", "class" => Class::Batch.label()).set(f64::from(batch));
}

fn label(state: JobState) -> &'static str {
    match state {
        JobState::Queued => "queued",
        JobState::Running => "running",
        JobState::Done => "done",
        JobState::Failed => "failed",
        JobState::Cancelled => "cancelled",
    }
}
