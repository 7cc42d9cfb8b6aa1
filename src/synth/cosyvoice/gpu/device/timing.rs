//! Timestamps on the stream: one event, a pair of them, and one after every launch while a stage is looked into.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::result as cu;
use cudarc::driver::sys;

use super::super::context::Context;
use super::super::libraries;
use super::{Device, GpuError};

/// When each launch ended, while someone looks.
#[derive(Default)]
pub(super) struct Trace(Mutex<Traced>);

/// What was started, and the mark after it.
#[derive(Default)]
struct Traced {
    list: Option<Vec<(Launch, Event)>>,
    /// Least work of the next launch: operations and bytes.
    next: (f64, f64),
}

/// One timed launch.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Launch {
    pub(in super::super) name: &'static str,
    pub(in super::super) blocks: u64,
    pub(in super::super) seconds: f64,
    /// Floating-point operations and bytes that it cannot do without; 0: not said.
    pub(in super::super) flops: f64,
    pub(in super::super) bytes: f64,
}

impl Device {
    /// Whether launches are being timed one by one; recorded graphs would hide them.
    pub(in super::super) fn traced(&self) -> bool {
        self.trace.0.lock().unwrap_or_else(PoisonError::into_inner).list.is_some()
    }

    /// Says what the next launch cannot do without: operations, and bytes read and written.
    pub(in super::super) fn expect(&self, flops: f64, bytes: f64) {
        self.trace.0.lock().unwrap_or_else(PoisonError::into_inner).next = (flops, bytes);
    }

    /// Notes the end of what was started last, while someone looks.
    pub(in super::super) fn note(&self, name: &'static str, blocks: u64) -> Result<(), GpuError> {
        let mut trace = self.trace.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (flops, bytes) = std::mem::take(&mut trace.next);
        let Some(list) = &mut trace.list else { return Ok(()) };
        let event = Event::new(self)?;
        event.mark()?;
        list.push((Launch { name, blocks, seconds: 0.0, flops, bytes }, event));
        Ok(())
    }

    /// Runs `work` with every launch timed, in order.
    pub(in super::super) fn timed<E: From<GpuError>>(
        &self,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<Vec<Launch>, E> {
        self.trace.0.lock().unwrap_or_else(PoisonError::into_inner).list = Some(Vec::new());
        let done = self.note("", 0).map_err(E::from).and_then(|()| work());
        let list = self.trace.0.lock().unwrap_or_else(PoisonError::into_inner).list.take().unwrap_or_default();
        self.sync()?;
        let mut out = Vec::with_capacity(list.len());
        for pair in list.windows(2) {
            out.push(Launch { seconds: pair[1].1.since(&pair[0].1)?, ..pair[1].0 });
        }
        done.map(|()| out)
    }
}

/// A timestamp on the stream, once it is marked.
struct Event {
    raw: sys::CUevent,
    marked: AtomicBool,
    context: Arc<Context>,
}

// SAFETY: an event may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    fn new(device: &Device) -> Result<Self, GpuError> {
        device.enter("create an event")?;
        let raw = cu::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)
            .map_err(device.context.failed("create an event"))?;
        Ok(Self { raw, marked: AtomicBool::new(false), context: device.context.clone() })
    }

    /// Takes the time when everything started before has ended.
    fn mark(&self) -> Result<(), GpuError> {
        self.context.bind()?;
        // SAFETY: the event is this value's own; the stream lives as long as the context.
        unsafe { cu::event::record(self.raw, self.context.stream()) }
            .map_err(self.context.failed("record an event"))?;
        self.marked.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Seconds from `earlier` to this one; waits for both. One that was never marked is an error of the caller's, for
    /// which the driver is not asked: its answer would end the context.
    fn since(&self, earlier: &Event) -> Result<f64, GpuError> {
        const WHAT: &str = "read a timer";
        if ![self, earlier].iter().all(|e| e.marked.load(Ordering::Relaxed)) {
            return Err(GpuError::Driver { what: WHAT, reason: "it was not started and stopped".into() });
        }
        self.context.wait()?;
        let ms = elapsed(earlier.raw, self.raw).map_err(self.context.failed(WHAT))?;
        Ok(f64::from(ms) * 1e-3)
    }
}

/// Milliseconds between two events that are alive, were recorded and have passed. Drivers before 12.8 lack the newer call.
fn elapsed(from: sys::CUevent, to: sys::CUevent) -> Result<f32, cudarc::driver::DriverError> {
    type Old = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;
    if libraries::driver_call::<Old>(b"cuEventElapsedTime_v2\0").is_none()
        && let Some(old) = libraries::driver_call::<Old>(b"cuEventElapsedTime\0")
    {
        let mut ms = 0f32;
        // SAFETY: the call has these parameters (CUDA driver API); events as said.
        return unsafe { old(&raw mut ms, from, to) }.result().map(|()| ms);
    }
    // SAFETY: events as said.
    unsafe { cu::event::elapsed(from, to) }
}

impl Drop for Event {
    fn drop(&mut self) {
        // What a lost context has goes with it.
        if !self.context.is_lost() {
            // SAFETY: created in `new`, destroyed only here; the context is still there.
            let _ = unsafe { cu::event::destroy(self.raw) };
        }
    }
}

/// A pair of timestamps on the stream.
pub(in super::super) struct Timer([Event; 2]);

impl Timer {
    pub(in super::super) fn new(device: &Device) -> Result<Self, GpuError> {
        Ok(Self([Event::new(device)?, Event::new(device)?]))
    }

    pub(in super::super) fn mark(&self, which: usize) -> Result<(), GpuError> {
        self.0[which].mark()
    }

    /// Seconds between the two marks; waits for the second. Both were made.
    pub(in super::super) fn seconds(&self) -> Result<f64, GpuError> {
        let [from, to] = &self.0;
        to.since(from)
    }
}
