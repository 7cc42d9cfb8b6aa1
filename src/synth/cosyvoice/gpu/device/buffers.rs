//! What lies in a device's memory: plain ranges, staging with a page-locked copy on the host, and recorded graphs.

use std::sync::Arc;

use cudarc::driver::result as cu;
use cudarc::driver::sys;

use super::super::ledger::Part;
use super::{Device, GpuError};

/// A range of device memory, freed when dropped.
pub(in super::super) struct Buf {
    pub(in super::super) ptr: u64,
    pub(in super::super) bytes: usize,
    pub(super) part: Part,
    pub(in super::super) device: Arc<Device>,
}

impl Drop for Buf {
    fn drop(&mut self) {
        self.device.ledger.sub(self.part, self.bytes as u64);
        // What is left in a lost context goes with it. The wait is ours, not the driver's: it ends.
        if self.device.context.wait_all().is_ok() {
            // SAFETY: allocated by `Device::alloc`, freed only here; nothing runs any more.
            let _ = unsafe { cu::free_sync(self.ptr) };
        }
    }
}

/// A recorded sequence of launches.
pub(in super::super) struct Graph {
    pub(super) exec: sys::CUgraphExec,
    pub(super) device: Arc<Device>,
}

// SAFETY: a graph may be launched from any thread, one at a time; the model that holds it is used that way.
unsafe impl Send for Graph {}

/// Launches of a queue that one graph stands for: its nodes take less room than launches of their own.
const GRAPH_LAUNCHES: u32 = 8;

impl Graph {
    pub(in super::super) fn launch(&self) -> Result<(), GpuError> {
        self.device.enter("launch a graph")?;
        let context = &self.device.context;
        // SAFETY: graph and stream are alive; what the graph's launches use outlives it, as `Device::launch` demands.
        unsafe { cu::graph::launch(self.exec, context.stream()) }.map_err(context.failed("launch a graph"))?;
        context.started(GRAPH_LAUNCHES)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.device.context.wait_all().is_ok() {
            // SAFETY: made by `Device::capture`, destroyed only here; nothing runs any more.
            let _ = unsafe { cu::graph::exec_destroy(self.exec) };
        }
    }
}

/// A page-locked host copy of a small device buffer: what the host decides goes over in one asynchronous copy,
/// what the device found comes back in one.
pub(in super::super) struct Staging {
    host: *mut u8,
    pub(in super::super) dev: Buf,
}

// SAFETY: the host memory belongs to this value alone.
unsafe impl Send for Staging {}

impl Staging {
    pub(in super::super) fn new(device: &Arc<Device>, what: &'static str, bytes: usize) -> Result<Self, GpuError> {
        let dev = device.zeros(what, bytes)?;
        // SAFETY: a plain allocation, freed in `drop`.
        let host = unsafe { cu::malloc_host(bytes.max(256), 0) }
            .map_err(device.context.failed("allocate page-locked memory"))?;
        let host = host.cast::<u8>();
        // SAFETY: `host` has that many bytes.
        unsafe { std::ptr::write_bytes(host, 0, bytes) };
        Ok(Self { host, dev })
    }

    /// The host's copy as `T`s. What a copy in flight covers must not be written, and after [`Self::fetch`] not be read
    /// either, until the next wait: callers wait once per call of the engine. What lies after an earlier
    /// [`Self::send`] may be written meanwhile, and sent together with the same values before it, as the flow does.
    pub(in super::super) fn as_mut<T: Copy>(&mut self) -> &mut [T] {
        let count = self.dev.bytes / std::mem::size_of::<T>();
        // SAFETY: page-locked memory is page-aligned and initialised; `T` is plain data.
        unsafe { std::slice::from_raw_parts_mut(self.host.cast(), count) }
    }

    /// Sends the first `bytes` bytes to the device.
    pub(in super::super) fn send(&self, bytes: usize) -> Result<(), GpuError> {
        self.send_from(0, bytes)
    }

    /// Sends `bytes` bytes, from byte `from` on, to the first of the device's.
    pub(in super::super) fn send_from(&self, from: usize, bytes: usize) -> Result<(), GpuError> {
        let from = from.min(self.dev.bytes);
        let bytes = bytes.min(self.dev.bytes - from);
        self.dev.device.enter("copy to the device")?;
        let context = &self.dev.device.context;
        // SAFETY: both sides have as many bytes as the device's, which `from + bytes` does not exceed, and live as long as
        // `self`.
        unsafe {
            sys::cuMemcpyHtoDAsync_v2(self.dev.ptr, self.host.add(from).cast(), bytes, context.stream()).result()
        }
        .map_err(context.failed("copy to the device"))?;
        context.started(1)
    }

    /// Fetches the first `bytes` bytes; valid after the next wait.
    pub(in super::super) fn fetch(&self, bytes: usize) -> Result<(), GpuError> {
        let bytes = bytes.min(self.dev.bytes);
        self.dev.device.enter("copy from the device")?;
        let context = &self.dev.device.context;
        // SAFETY: as in `send`.
        unsafe { sys::cuMemcpyDtoHAsync_v2(self.host.cast(), self.dev.ptr, bytes, context.stream()).result() }
            .map_err(context.failed("copy from the device"))?;
        context.started(1)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.dev.device.context.wait_all().is_ok() {
            // SAFETY: allocated in `new`, freed only here; nothing runs any more.
            let _ = unsafe { cu::free_host(self.host.cast()) };
        }
    }
}
