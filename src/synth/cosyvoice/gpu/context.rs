//! A driver context with two streams, made for one load of a model and gone with it.
//!
//! Owns them. Every wait for the device is made here and is bounded: a device that has nothing to say for [`PATIENCE`]
//! is lost, as is one whose driver reports an error. A lost context takes no more work.
//!
//! [`Context::beside`] is one more stream in it, for another thread: whatever loses one of them loses both.
//!
//! Work goes to [`Lane::Front`] unless [`Context::low_priority`] says otherwise. Blocks of its launches go before those of
//! [`Lane::Back`] wherever a multiprocessor has room; nothing else orders the two, so a user of both waits.
//!
//! # Why
//! - **A context of its own**, not the device's primary one: a new one works while a lost one still waits for a kernel
//!   that does not end. After a kernel that failed (a trap, an illegal address) the driver creates none, neither kind,
//!   whatever became of the old one: seen on driver 580. That device is lost until there is a new process.
//! - **What a lost context holds is not freed piece by piece**: each call would fail, or wait for a kernel that does
//!   not end. Destroying the context frees all of it, on a thread of its own in case that does not end either.
//! - **A context whose kernel goes on is destroyed when the kernel ends**, and its device is not opened before: there would
//!   be little memory, and what the driver locks meanwhile is not said.
//! - **Few launches wait at a time** ([`QUEUE`]): the driver makes room for about a thousand, and starting one more
//!   would block in the driver, where no deadline reaches.

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use cudarc::driver::DriverError;
use cudarc::driver::result as cu;
use cudarc::driver::sys;

use super::{GpuError, libraries};
use crate::clock;

/// How long one wait may take: far beyond any step, tuning at load included.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the release of a lost context is waited for.
const RELEASE_LIMIT: Duration = Duration::from_secs(3);
/// How often a kernel that was given up is looked at.
const LOOK: Duration = Duration::from_millis(100);
/// Launches that may wait to be run.
const QUEUE: u32 = 512;
/// Questions asked of the stream between two looks at the clock.
const POLLS: u32 = 64;

/// Whether this process has lost a context.
static LOST_BEFORE: AtomicBool = AtomicBool::new(false);
/// Devices that still run a kernel that was given up.
static GIVEN_UP: Mutex<Vec<u32>> = Mutex::new(Vec::new());

fn given_up<T>(look: impl FnOnce(&mut Vec<u32>) -> T) -> T {
    look(&mut GIVEN_UP.lock().unwrap_or_else(PoisonError::into_inner))
}

/// A device of that list may be opened again.
fn ended(ordinal: u32) {
    given_up(|list| list.iter().position(|at| *at == ordinal).map(|n| list.swap_remove(n)));
}

/// Which of the two streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// What is waited for.
    Front,
    /// What may take longer.
    Back,
}

const LANES: [Lane; 2] = [Lane::Front, Lane::Back];

/// One context and its streams.
pub(super) struct Context {
    ordinal: u32,
    device: sys::CUdevice,
    raw: sys::CUcontext,
    /// By [`Lane`].
    streams: [sys::CUstream; 2],
    /// Whether work goes to [`Lane::Back`] now.
    low_priority: AtomicBool,
    lost: AtomicBool,
    /// The stream that a kernel does not end on; null: none.
    hung: AtomicPtr<sys::CUstream_st>,
    /// Launches since each stream was last seen empty.
    waiting: [AtomicU32; 2],
    /// Launches are being recorded, not run.
    recording: AtomicBool,
    /// [`PATIENCE`] in milliseconds, unless a test is in a hurry.
    patience: AtomicU64,
    /// Whose context it is, where this one only has a stream in it.
    owner: Option<Arc<Context>>,
}

// SAFETY: the driver's handles may be used from any thread; what changes here is atomic.
unsafe impl Send for Context {}
// SAFETY: as above; the order of calls is the model's, which is used from one thread at a time.
unsafe impl Sync for Context {}

/// A context that is out of use, handed to the thread that destroys it.
struct AbandonedContext {
    raw: sys::CUcontext,
    /// Where a kernel goes on: the stream and the device.
    hung: Option<(sys::CUstream, u32)>,
}

// SAFETY: a context and its stream may be used from any thread.
unsafe impl Send for AbandonedContext {}

impl AbandonedContext {
    /// Returns when the context is gone, which takes as long as a kernel in it.
    fn release(self) -> Result<(), DriverError> {
        if let Some((stream, _)) = self.hung {
            // SAFETY: context and stream are there until below.
            let running = || unsafe { sys::cuStreamQuery(stream) } == sys::CUresult::CUDA_ERROR_NOT_READY;
            // SAFETY: as above. Without a context the query fails, and there is nothing to wait for.
            let _ = unsafe { cu::ctx::set_current(self.raw) };
            while running() {
                std::thread::park_timeout(LOOK);
            }
            // SAFETY: null leaves this thread without a context.
            let _ = unsafe { cu::ctx::set_current(std::ptr::null_mut()) };
        }
        // SAFETY: created by `Context::open` and destroyed only here; whatever lies in it is not used any more.
        let result = unsafe { sys::cuCtxDestroy_v2(self.raw) }.result();
        if let Some((_, ordinal)) = self.hung {
            ended(ordinal);
        }
        result
    }
}

fn refused(what: &'static str) -> impl Fn(DriverError) -> GpuError {
    move |e| GpuError::Driver { what, reason: e.to_string() }
}

/// Who has device `ordinal`, and what would help, where `code` says that another program has.
fn taken(ordinal: u32, code: sys::CUresult) -> Option<String> {
    match code {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Some(format!(
            "another program has filled GPU {ordinal}: not even a context fits; `nvidia-smi` says who holds its memory"
        )),
        sys::CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE => Some(format!(
            "GPU {ordinal} is in use by a program that has it alone: end that, or `nvidia-smi -i {ordinal} -c DEFAULT`"
        )),
        _ => None,
    }
}

/// A new context, with what the driver has for it: drivers before 12.5 lack the newest call.
fn create(device: sys::CUdevice) -> Result<sys::CUcontext, DriverError> {
    type Old = unsafe extern "C" fn(*mut sys::CUcontext, std::ffi::c_uint, sys::CUdevice) -> sys::CUresult;
    if libraries::driver_call::<Old>(b"cuCtxCreate_v4\0").is_none()
        && let Some(old) = libraries::driver_call::<Old>(b"cuCtxCreate_v2\0")
    {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the call has these parameters (CUDA driver API); the device is one that there is.
        return unsafe { old(&raw mut raw, 0, device) }.result().map(|()| raw);
    }
    // SAFETY: the device is one that there is; null asks for no parameters beyond it.
    unsafe { cu::ctx::create_v4(std::ptr::null_mut(), 0, device) }
}

/// A stream for each lane, in the order of [`Lane`].
fn streams() -> Result<[sys::CUstream; 2], DriverError> {
    use cu::stream::{StreamKind, create_with_priority, get_priority_range};
    let (least, greatest) = get_priority_range()?;
    Ok([
        create_with_priority(StreamKind::NonBlocking, greatest)?,
        create_with_priority(StreamKind::NonBlocking, least)?,
    ])
}

impl Context {
    /// A context on device `ordinal`, current on this thread.
    pub(super) fn open(ordinal: u32) -> Result<Self, GpuError> {
        if given_up(|list| list.contains(&ordinal)) {
            let reason = "a kernel that was given up has not ended yet".into();
            return Err(GpuError::Driver { what: "create a context", reason });
        }
        cu::init().map_err(refused("start the driver"))?;
        let device = cu::device::get(ordinal as i32).map_err(refused("open the device"))?;
        let raw = create(device).map_err(|e| match taken(ordinal, e.0) {
            Some(why) => GpuError::Taken(why),
            None if !LOST_BEFORE.load(Ordering::Relaxed) => refused("create a context")(e),
            None => GpuError::Driver {
                what: "create a context",
                reason: format!("{e}; once a kernel has failed, the driver gives this process none: start a new one"),
            },
        })?;
        let streams = streams().map_err(|e| {
            // What failed first is what is told.
            let _ = AbandonedContext { raw, hung: None }.release();
            taken(ordinal, e.0).map_or_else(|| refused("create a stream")(e), GpuError::Taken)
        })?;
        Ok(Self::of(ordinal, device, raw, streams, None))
    }

    /// `owner`: whose context it is, if it is shared.
    fn of(
        ordinal: u32,
        device: sys::CUdevice,
        raw: sys::CUcontext,
        streams: [sys::CUstream; 2],
        owner: Option<Arc<Self>>,
    ) -> Self {
        Self {
            ordinal,
            device,
            raw,
            streams,
            low_priority: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            hung: AtomicPtr::default(),
            waiting: Default::default(),
            recording: AtomicBool::new(false),
            patience: AtomicU64::new(PATIENCE.as_millis() as u64),
            owner,
        }
    }

    /// One stream in this context, both lanes of what is returned, for work of another thread. Its blocks go after those
    /// of [`Lane::Front`] and before those of [`Lane::Back`] wherever a multiprocessor has room.
    pub(super) fn beside(self: &Arc<Self>) -> Result<Self, GpuError> {
        use cu::stream::{StreamKind, create_with_priority, get_priority_range};
        self.bind()?;
        let stream = get_priority_range()
            .and_then(|(least, greatest)| create_with_priority(StreamKind::NonBlocking, (least + greatest) / 2))
            .map_err(refused("create a stream"))?;
        Ok(Self::of(self.ordinal, self.device, self.raw, [stream; 2], Some(self.clone())))
    }

    /// The device's name.
    pub(super) fn name(&self) -> Result<String, GpuError> {
        cu::device::get_name(self.device).map_err(refused("read the device's name"))
    }

    /// One of the numbers that the driver has of the device.
    pub(super) fn attribute(&self, which: sys::CUdevice_attribute) -> Result<i32, GpuError> {
        // SAFETY: the device is one that there is.
        unsafe { cu::device::get_attribute(self.device, which) }.map_err(refused("read the device's properties"))
    }

    fn lane(&self) -> Lane {
        if self.low_priority.load(Ordering::Relaxed) { Lane::Back } else { Lane::Front }
    }

    /// The stream that work goes to now.
    pub(super) fn stream(&self) -> sys::CUstream {
        self.streams[self.lane() as usize]
    }

    /// What `work` starts, and waits for, is on [`Lane::Back`].
    pub(super) fn low_priority<T>(&self, work: impl FnOnce() -> T) -> T {
        self.low_priority.store(true, Ordering::Relaxed);
        let result = work();
        self.low_priority.store(false, Ordering::Relaxed);
        result
    }

    /// Whether it is of no more use.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed) || self.owner.as_ref().is_some_and(|owner| owner.is_lost())
    }

    fn lose(&self) {
        self.lost.store(true, Ordering::Relaxed);
        if let Some(owner) = &self.owner {
            owner.lose();
        }
        LOST_BEFORE.store(true, Ordering::Relaxed);
    }

    /// What an error of the driver means: it is told, and the context is lost.
    pub(super) fn failed(&self, what: &'static str) -> impl Fn(DriverError) -> GpuError {
        move |e| {
            self.lose();
            refused(what)(e)
        }
    }

    /// Makes it current on this thread.
    pub(super) fn bind(&self) -> Result<(), GpuError> {
        if self.is_lost() {
            return Err(GpuError::Driver { what: "use the device", reason: "it was lost before".into() });
        }
        // SAFETY: the context lives as long as `self`.
        unsafe { cu::ctx::set_current(self.raw) }.map_err(self.failed("bind the device to a thread"))
    }

    /// Waits until everything that was started has ended, on the stream that work goes to now.
    pub(super) fn wait(&self) -> Result<(), GpuError> {
        self.wait_for(self.lane())
    }

    /// Waits until everything that was started has ended.
    pub(super) fn wait_all(&self) -> Result<(), GpuError> {
        LANES.into_iter().try_for_each(|lane| self.wait_for(lane))
    }

    fn wait_for(&self, lane: Lane) -> Result<(), GpuError> {
        self.bind()?;
        let from = clock::now();
        for polls in 1u64.. {
            // The clock is not asked every time.
            if self.poll(lane, from, polls % u64::from(POLLS) == 0)? {
                break;
            }
            if polls % u64::from(POLLS) == 0 {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
        Ok(())
    }

    /// Whether what was started on `lane`, the last of it no later than `since`, has ended.
    pub(super) fn has_ended(&self, lane: Lane, since: Instant) -> Result<bool, GpuError> {
        self.bind()?;
        self.poll(lane, since, true)
    }

    /// Asks the stream once; gives it up where it has had nothing to say since `from` for too long.
    fn poll(&self, lane: Lane, from: Instant, look: bool) -> Result<bool, GpuError> {
        const WHAT: &str = "wait for the device";
        let stream = self.streams[lane as usize];
        let patience = Duration::from_millis(self.patience.load(Ordering::Relaxed));
        let late = look && from.elapsed() > patience;
        // SAFETY: the stream lives as long as `self`.
        match unsafe { sys::cuStreamQuery(stream) } {
            // Asked after the clock was read: a process that was paused in between is not the device's fault.
            sys::CUresult::CUDA_ERROR_NOT_READY if late => {
                self.lose();
                self.owner.as_deref().unwrap_or(self).hung.store(stream, Ordering::Relaxed);
                let reason = format!("no answer for {} s: a kernel does not end", patience.as_secs_f32());
                Err(GpuError::Driver { what: WHAT, reason })
            }
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => {
                self.waiting[lane as usize].store(0, Ordering::Relaxed);
                other.result().map_err(self.failed(WHAT)).map(|()| true)
            }
        }
    }

    /// Counts launches that were just started; waits where too many are in flight.
    pub(super) fn started(&self, launches: u32) -> Result<(), GpuError> {
        let waiting = self.waiting[self.lane() as usize].fetch_add(launches, Ordering::Relaxed) + launches;
        if waiting < QUEUE || self.recording.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.wait()
    }

    /// Whether launches are recorded instead of run.
    pub(super) fn record(&self, on: bool) {
        self.recording.store(on, Ordering::Relaxed);
        // What was recorded does not wait.
        self.waiting[self.lane() as usize].store(0, Ordering::Relaxed);
    }

    /// Waits are given up after `patience` from now on.
    #[cfg(feature = "fault-injection")]
    pub(super) fn hurry(&self, patience: Duration) {
        self.patience.store(patience.as_millis() as u64, Ordering::Relaxed);
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.owner.is_some() {
            // In a lost context the stream goes with it.
            if self.bind().is_ok() {
                // SAFETY: created by `beside`, destroyed only here.
                let _ = unsafe { cu::stream::destroy(self.streams[0]) };
            }
            // SAFETY: null leaves this thread without a context: this may be the last that holds it.
            let _ = unsafe { cu::ctx::set_current(std::ptr::null_mut()) };
            return;
        }
        // SAFETY: null leaves the thread without a context, so that none is current that is gone.
        let _ = unsafe { cu::ctx::set_current(std::ptr::null_mut()) };
        let hung = Some(self.hung.load(Ordering::Relaxed)).filter(|stream| !stream.is_null());
        let hung = hung.map(|stream| (stream, self.ordinal));
        let abandoned = AbandonedContext { raw: self.raw, hung };
        if !self.is_lost() {
            if let Err(error) = abandoned.release() {
                tracing::warn!(%error, "a device's context could not be released");
            }
            return;
        }
        if hung.is_some() {
            given_up(|list| list.push(self.ordinal));
        }
        let (told, gone) = mpsc::sync_channel(1);
        let thread = std::thread::Builder::new().name("lost-device".into()).spawn(move || {
            // overflow: one message in a channel of one; an error means that the wait was given up.
            let _ = told.send(abandoned.release());
        });
        if hung.is_some() && thread.is_err() {
            // No thread watches for the kernel's end: the device must not be kept closed for ever.
            ended(self.ordinal);
        }
        // A kernel that goes on is not waited for.
        let patience = if hung.is_some() { Duration::ZERO } else { RELEASE_LIMIT };
        let result = thread
            .map_err(|e| e.to_string())
            .and_then(|_| gone.recv_timeout(patience).map_err(|e| e.to_string())?.map_err(|e| e.to_string()));
        match result {
            Ok(()) => tracing::info!("the lost device's context is gone, and its memory free"),
            Err(error) => tracing::error!(
                %error,
                "the lost device's context is not gone: its memory is taken until it is, at the latest when the process ends"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_another_program_has_is_told_from_one_that_fails() {
        let filled = taken(1, sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY).expect("taken");
        assert!(filled.contains("GPU 1") && filled.contains("nvidia-smi"), "{filled}");
        let alone = taken(0, sys::CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE).expect("taken");
        assert!(alone.contains("nvidia-smi -i 0 -c DEFAULT") && alone.lines().count() == 1, "{alone}");
        assert_eq!(taken(0, sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS), None);
    }
}
