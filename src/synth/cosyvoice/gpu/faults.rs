//! Failures on demand, so that what follows them can be tested on a device that works: the feature `fault-injection`,
//! which tests switch on and no shipped binary has.
//!
//! Nothing here runs unless [`super::GpuBackend::inject`] was called; until then it costs one atomic load a launch.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use super::compiler::Source;
use super::device::{Device, Elt, GpuError, start};
use super::flight::Acoustic;
use super::llm::Llm;
use super::slabs::Pool;
use crate::synth::{Slot, Stage, SynthError};

/// A kernel that fails, and one that goes on for so many nanoseconds.
static KERNELS: Source = Source { name: "faults", parts: &[FAULTS], checks: String::new };
const FAULTS: &str = r#"
extern "C" __global__ void fault_trap() { asm volatile("trap;"); }
extern "C" __global__ void fault_hang(unsigned long long ns) {
    unsigned long long from, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(from));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - from < ns);
}
"#;
/// Bytes of all ones are NaN in every operand type.
const NAN: u8 = 0xff;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The `n`-th allocation from now finds no memory; 1 is the next. Later ones work again.
    Allocation(u32),
    /// The `n`-th driver call from now fails, and so does every one after it: how a lost device looks.
    Lost(u32),
    /// A kernel traps: an error of the real driver, after which the context is of no more use. Other contexts and
    /// other programs are not touched.
    Trap,
    /// A kernel goes on for as long as `lasts`, and waits for the device are given up after `patience`.
    Hang {
        /// How long the kernel runs.
        lasts: Duration,
        /// How long the device may have nothing to say.
        patience: Duration,
    },
    /// State that the slot's next step of that stage reads becomes NaN.
    NotANumber(Slot, Stage),
    /// No slab is free until [`Fault::Slabs`] is undone by dropping the backend.
    Slabs,
}

/// Countdowns; 0 is off.
#[derive(Default)]
pub(super) struct Faults {
    armed: AtomicBool,
    allocation: AtomicU32,
    call: AtomicU32,
    lost: AtomicBool,
}

/// Counts down to the call that fails.
fn is_due(countdown: &AtomicU32) -> bool {
    countdown.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)) == Ok(1)
}

impl Faults {
    fn arm(&self, countdown: &AtomicU32, n: u32) {
        countdown.store(n.max(1), Ordering::Relaxed);
        self.armed.store(true, Ordering::Relaxed);
    }

    /// Before every driver call.
    pub(super) fn call(&self, what: &'static str) -> Result<(), GpuError> {
        if !self.armed.load(Ordering::Relaxed) {
            return Ok(());
        }
        if is_due(&self.call) {
            self.lost.store(true, Ordering::Relaxed);
        }
        if self.lost.load(Ordering::Relaxed) {
            return Err(GpuError::Driver { what, reason: "the device is lost (injected)".into() });
        }
        Ok(())
    }

    /// Before every allocation: whether it finds nothing.
    pub(super) fn no_memory(&self) -> bool {
        self.armed.load(Ordering::Relaxed) && is_due(&self.allocation)
    }
}

impl Fault {
    /// Makes it happen; see [`super::GpuBackend::inject`].
    pub(super) fn happen(self, device: &Arc<Device>, llm: &Llm, acoustic: &mut Acoustic) -> Result<(), SynthError> {
        let faults = &device.faults;
        match self {
            Fault::Allocation(n) => faults.arm(&faults.allocation, n),
            Fault::Lost(n) => faults.arm(&faults.call, n),
            Fault::Trap => {
                let module = device.compile(&KERNELS, Elt::F32, &[])?;
                start!(device, module.kernel("fault_trap", 0)?, (1, 1, 1), 32, 0;)?;
            }
            Fault::Hang { lasts, patience } => {
                let module = device.compile(&KERNELS, Elt::F32, &[])?;
                device.context.hurry(patience);
                start!(device, module.kernel("fault_hang", 0)?, (1, 1, 1), 32, 0; lasts.as_nanos() as u64)?;
            }
            Fault::NotANumber(slot, stage) => spoil(device, llm, acoustic, slot, stage)?,
            Fault::Slabs => while acoustic.solver.slabs.take().is_ok() {},
        }
        Ok(())
    }
}

/// Fills the state of `slot` that `stage` reads with what is no number.
fn spoil(device: &Arc<Device>, llm: &Llm, acoustic: &mut Acoustic, slot: Slot, stage: Stage) -> Result<(), SynthError> {
    if !acoustic.slots.contains_key(&slot) {
        return Err(super::not_open());
    }
    acoustic.begin(slot)?;
    let n = slot.0 as usize;
    let ranges = match stage {
        Stage::Prefill | Stage::Decode => vec![llm.slot_range(n)],
        Stage::Flow => vec![(acoustic.solver.hist_of(n), acoustic.solver.flow.hist_bytes)],
        Stage::Vocode => acoustic.hift.histories(n),
    };
    for (at, bytes) in ranges {
        device.fill(at, NAN, bytes)?;
    }
    Ok(device.sync()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_allocation_fails_and_only_it() {
        let faults = Faults::default();
        assert!(!faults.no_memory(), "off until armed");
        faults.arm(&faults.allocation, 2);
        assert_eq!([faults.no_memory(), faults.no_memory(), faults.no_memory()], [false, true, false]);
        assert!(faults.call("x").is_ok());
    }

    #[test]
    fn a_lost_device_stays_lost() {
        let faults = Faults::default();
        faults.arm(&faults.call, 2);
        assert!(faults.call("x").is_ok());
        assert!(faults.call("x").is_err());
        assert!(faults.call("x").is_err());
    }
}
