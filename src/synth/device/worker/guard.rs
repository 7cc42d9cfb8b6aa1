//! What a voice's errors and panics mean for its device and for the slots of a step.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tokio::sync::watch;

use super::{Shared, serve};
use crate::clock;
use crate::sched::Config;
use crate::synth::device::{Loader, Phase, Recovery};
use crate::synth::{Outcome, Progress, Slot, Step, SynthError};

/// The body of a device thread, until it is stopped. What panics in a voice ends its device, which is loaded again; what panics
/// beside it does the same, and not the thread.
pub(in crate::synth::device) fn run(
    shared: &Shared,
    index: usize,
    loader: &Loader,
    config: &Config,
    recovery: Recovery,
    phase: &watch::Sender<Phase>,
) {
    let serving = || serve(shared, index, loader, config, recovery, phase);
    while catch_unwind(AssertUnwindSafe(serving)).is_err() {
        let again = clock::now() + recovery.first;
        tracing::error!(device = index, again_in = ?recovery.first, "the device thread panicked");
        let reason = "its thread panicked";
        let told = catch_unwind(AssertUnwindSafe(|| {
            let label = up(shared, index, false);
            metrics::counter!("antiphon_device_failures_total", "device" => label).increment(1);
            shared.abandon(reason, 1, Some(again), || phase.send_replace(Phase::Failed(reason.into())));
        }));
        if told.is_err() {
            phase.send_replace(Phase::Failed(reason.into()));
        }
        if !shared.rest(again) {
            phase.send_replace(Phase::Stopped);
            return;
        }
        phase.send_replace(Phase::Loading);
    }
}

/// Says in the metrics whether the device works; returns its label.
pub(super) fn up(shared: &Shared, index: usize, works: bool) -> String {
    let label = shared.state().caps.as_ref().map_or_else(|| index.to_string(), |caps| caps.device.clone());
    metrics::gauge!("antiphon_device_up", "device" => label.clone()).set(f64::from(u8::from(works)));
    label
}

/// What a step's result means for its slots: only what is not the device's is theirs, and those without a result
/// share it.
pub(super) fn share(
    result: Result<(), SynthError>,
    step: &Step,
    progress: &mut Vec<Progress>,
) -> Result<(), SynthError> {
    let error = match result {
        Ok(()) => return Ok(()),
        Err(error @ SynthError::Device(_)) => return Err(error),
        Err(error) => error,
    };
    let missing = step.slots.iter().filter(|slot| progress.iter().all(|p| p.outcome.slot != **slot));
    let missing: Vec<Slot> = missing.copied().collect();
    let reason = SynthError::Utterance(error.to_string()).to_string();
    progress.extend(missing.into_iter().map(|slot| Progress::new(Outcome::failed(slot, &*reason), Vec::new())));
    Ok(())
}

/// A panic inside a voice ends its device, not the process.
pub(super) fn guarded<T>(call: impl FnOnce() -> Result<T, SynthError>) -> Result<T, SynthError> {
    catch_unwind(AssertUnwindSafe(call))
        .unwrap_or_else(|panic| Err(SynthError::Device(format!("it panicked: {}", message(&*panic)))))
}

fn message(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
