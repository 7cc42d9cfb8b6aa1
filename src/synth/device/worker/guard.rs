//! What a voice's errors and panics mean for its device and for the slots of a step.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::synth::{Outcome, Progress, Slot, Step, SynthError};

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
