//! One CUDA device: memory, kernels compiled at load, launches and graphs.
//!
//! Owns the [`Context`] and what is made in it. Knows nothing of the model. All of it is used from one thread at a
//! time. Libraries are opened at run time ([`libraries`]); nothing of CUDA is needed to build or to start elsewhere.
//!
//! [`buffers`] is what lies in its memory, [`timing`] measures.

mod buffers;
mod timing;

use std::ffi::{CString, c_void};
use std::sync::Arc;

use cudarc::driver::result as cu;
use cudarc::driver::sys;
use cudarc::driver::{CudaContext, DriverError};

pub(super) use self::buffers::{Buf, Graph, Staging};
use self::timing::Trace;
pub(super) use self::timing::{Launch, Timer};
use super::compiler::{self, Kept, Source, Unit};
use super::context::Context;
use super::facts::Facts;
#[cfg(feature = "fault-injection")]
use super::faults::Faults;
use super::ledger::{Ledger, Part};
use super::libraries;
use super::target::Target;
use crate::synth::SynthError;
use crate::synth::cosyvoice::backend::{Hardware, MemoryLimit, Products};

/// Least memory of a device: weights and scratch of the released model, and a few utterances.
const LEAST_MEMORY: u64 = 6_000_000_000;

/// Why something on the device did not work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// There is no usable device; the text says what is missing.
    #[error("{0}")]
    Absent(String),
    /// Another program has the device, or all of its memory; the text says how to find out which.
    #[error("{0}")]
    Taken(String),
    /// A driver call failed.
    #[error("CUDA: {what}: {reason}")]
    Driver {
        /// What was tried.
        what: &'static str,
        /// What the driver says.
        reason: String,
    },
    /// A kernel does not compile on this device.
    #[error("kernels of {unit} do not compile:\n{log}")]
    Compile {
        /// Which source.
        unit: &'static str,
        /// The compiler's messages.
        log: String,
    },
    /// cuBLASLt refused.
    #[error("cuBLASLt: {0}")]
    Blas(String),
    /// An allocation failed.
    #[error(
        "device memory: {:.2} GB for {what} cannot be had, {:.2} GB are free: see with `nvidia-smi` who holds the rest",
        *bytes as f64 * 1e-9, *free as f64 * 1e-9
    )]
    Memory {
        /// For what.
        what: &'static str,
        /// How much.
        bytes: u64,
        /// How much there is.
        free: u64,
    },
    /// The model does not fit these kernels, or the checkpoint is not usable.
    #[error("{0}")]
    Model(String),
}

impl From<GpuError> for SynthError {
    fn from(e: GpuError) -> Self {
        match e {
            GpuError::Memory { bytes, free, .. } => SynthError::Memory { needed: bytes, free },
            other => SynthError::Device(other.to_string()),
        }
    }
}

/// Type of operands and caches; sums are single precision throughout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Elt {
    /// Single precision, for comparing with the reference.
    F32,
    /// bfloat16: the range of single precision, 8 bits of it.
    Bf16,
    /// Half: 11 bits, saturating at 65504.
    F16,
}

impl Elt {
    /// Bytes of one value.
    pub fn size(self) -> usize {
        if self == Elt::F32 { 4 } else { 2 }
    }

    pub(super) fn define(self) -> u32 {
        match self {
            Elt::F32 => 0,
            Elt::Bf16 => 1,
            Elt::F16 => 2,
        }
    }
}

/// Why there is no GPU engine here, in one line that says what would help; `None` when one can be tried.
pub fn absent() -> Option<String> {
    libraries::open().err().or_else(|| match CudaContext::device_count() {
        Ok(0) => Some("no GPU engine: the NVIDIA driver finds no device: look at `nvidia-smi`".into()),
        Ok(_) => None,
        Err(e) => Some(format!("no GPU engine: the NVIDIA driver does not start ({e}): look at `nvidia-smi`")),
    })
}

/// Devices that there are.
pub fn count() -> u32 {
    if absent().is_some() { 0 } else { CudaContext::device_count().map_or(0, |n| n.max(0) as u32) }
}

/// Why device `ordinal` cannot run the engine, in one line; `None` where it can be tried. Needs no context.
pub fn unusable(ordinal: u32, hardware: &Hardware) -> Option<String> {
    if let Some(reason) = absent() {
        return Some(reason);
    }
    let memory = |facts: Facts| match hardware.memory.map_or(facts.memory, |limit| limit.of(facts.memory)) {
        bytes if bytes < LEAST_MEMORY => {
            Err(format!("{} has {:.1} GB for the engine, {:.0} GB are needed", facts.name, gb(bytes), gb(LEAST_MEMORY)))
        }
        _ => Ok(()),
    };
    let target = target_of(ordinal, &compiler::supported(), hardware).map_err(|e| e.to_string());
    target.and_then(|_| Facts::of(ordinal)).and_then(memory).err()
}

/// What device `ordinal` would be compiled for; `None` where nothing can be.
pub(super) fn planned(ordinal: u32, hardware: &Hardware) -> Option<Target> {
    target_of(ordinal, &compiler::supported(), hardware).ok()
}

fn gb(bytes: u64) -> f64 {
    bytes as f64 * 1e-9
}

/// Fewer bits for the flow, as [`Hardware`] has them.
#[derive(Clone, Copy)]
pub(super) struct Modes {
    pub(super) int8_keys: bool,
    pub(super) products: Products,
}

/// One device and its streams.
pub(super) struct Device {
    /// Shared with its events, which must not outlive it.
    pub(super) context: Arc<Context>,
    pub(super) name: String,
    pub(super) target: Target,
    /// Where compiled kernels are kept.
    kept: Option<Kept>,
    /// How much of its memory may be used.
    memory_limit: Option<MemoryLimit>,
    /// Everything that what was found fastest on it depends on.
    pub(super) identity: String,
    /// Dynamic shared memory that a block may ask for, in bytes.
    pub(super) shared: u32,
    /// Whether no kernel's shape may change the order of a sum with the number of rows ([`Hardware::invariant`]).
    pub(super) invariant: bool,
    pub(super) modes: Modes,
    /// Whether it has Hopper's warpgroup MMAs and bulk copies, which no other generation has.
    pub(super) hopper: bool,
    /// How many there are: block shapes are chosen so that each has something to do.
    pub(super) multiprocessors: usize,
    trace: Trace,
    /// One with all that is beside it.
    pub(super) ledger: Arc<Ledger>,
    /// What all its memory is booked under; `None`: each piece by its name.
    books: Option<Part>,
    #[cfg(feature = "fault-injection")]
    pub(super) faults: Arc<Faults>,
}

/// A kernel of a loaded module, and its name.
#[derive(Clone, Copy)]
pub(super) struct Kernel(sys::CUfunction, &'static str);

impl Kernel {
    /// The same kernel; launches are listed under `name` unless that is empty.
    pub(super) fn called(self, name: &'static str) -> Self {
        Self(self.0, if name.is_empty() { self.1 } else { name })
    }
}

// SAFETY: a function handle may be used from any thread; the model that holds it is used from one at a time.
unsafe impl Send for Kernel {}

/// Kernels of one source, compiled for this device; they stay loaded for as long as its context.
pub(super) struct Module {
    module: sys::CUmodule,
    unit: &'static str,
    /// Shared memory that a block may have.
    limit: u32,
}

// SAFETY: as for `Kernel`.
unsafe impl Send for Module {}

impl Device {
    /// Opens device `ordinal`.
    pub(super) fn open(ordinal: u32, hardware: &Hardware) -> Result<Arc<Self>, GpuError> {
        use sys::CUdevice_attribute_enum as Of;
        if let Some(reason) = absent() {
            return Err(GpuError::Absent(reason));
        }
        let known = compiler::supported();
        let asked = target_of(ordinal, &known, hardware)?;
        let context = Context::open(ordinal)?;
        let this = Self {
            multiprocessors: context.attribute(Of::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.max(1) as usize,
            name: context.name()?,
            context: Arc::new(context),
            kept: hardware.cache.as_deref().map(Kept::new),
            memory_limit: hardware.memory,
            identity: identity(&asked)?,
            shared: asked.shared(),
            invariant: hardware.invariant,
            modes: Modes { int8_keys: hardware.int8_keys, products: hardware.products },
            hopper: asked.hopper(),
            target: asked,
            trace: Trace::default(),
            ledger: Arc::default(),
            books: None,
            #[cfg(feature = "fault-injection")]
            faults: Arc::default(),
        };
        this.settle(Part::Context)?;
        Ok(Arc::new(this))
    }

    /// The same device for another thread: a stream of its own in the same context ([`Context::beside`]), its memory in
    /// the same books, under `part`.
    pub(super) fn beside(&self, part: Part) -> Result<Arc<Self>, GpuError> {
        Ok(Arc::new(Self {
            context: Arc::new(self.context.beside()?),
            name: self.name.clone(),
            target: self.target.clone(),
            kept: self.kept.clone(),
            identity: self.identity.clone(),
            trace: Trace::default(),
            ledger: self.ledger.clone(),
            books: Some(part),
            #[cfg(feature = "fault-injection")]
            faults: self.faults.clone(),
            ..*self
        }))
    }

    /// What was found out before, under a name made of `what` and of [`Self::identity`].
    pub(super) fn remembered(&self, what: &str) -> Option<Vec<u8>> {
        self.kept.as_ref()?.read(&self.kept_name(what))
    }

    /// Keeps it for later starts and other processes, unless one of those was first; gives what is kept.
    pub(super) fn remember(&self, what: &str, bytes: Vec<u8>) -> Vec<u8> {
        match &self.kept {
            Some(kept) => kept.first(&self.kept_name(what), bytes),
            None => bytes,
        }
    }

    fn kept_name(&self, what: &str) -> String {
        compiler::named("fastest", [self.name.as_str(), &self.identity, what])
    }

    /// Books what the driver took by itself since the last time under `part`.
    pub(super) fn settle(&self, part: Part) -> Result<(), GpuError> {
        let (free, total) = self.memory()?;
        self.ledger.settle(part, total.saturating_sub(free));
        Ok(())
    }

    /// Before a driver call: whether a test has it fail.
    #[cfg(feature = "fault-injection")]
    fn injected(&self, what: &'static str) -> Result<(), GpuError> {
        self.faults.call(what)
    }

    #[cfg(not(feature = "fault-injection"))]
    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "as with the feature")]
    fn injected(&self, _: &'static str) -> Result<(), GpuError> {
        Ok(())
    }

    /// Before a driver call: makes the device current on this thread.
    pub(super) fn enter(&self, what: &'static str) -> Result<(), GpuError> {
        self.injected(what)?;
        self.context.bind()
    }

    /// Before a driver call that may wait for what was started where work goes now: nothing else bounds that.
    fn enter_idle(&self, what: &'static str) -> Result<(), GpuError> {
        self.injected(what)?;
        self.context.wait()
    }

    /// The same, for calls that may wait for everything.
    fn enter_still(&self, what: &'static str) -> Result<(), GpuError> {
        self.injected(what)?;
        self.context.wait_all()
    }

    /// Bytes that may still be taken: what is free, less what is not to be used.
    pub(super) fn room(&self) -> Result<u64, GpuError> {
        let (free, total) = self.memory()?;
        let left = self.memory_limit.map_or(u64::MAX, |limit| limit.of(total).saturating_sub(self.ledger.own()));
        Ok(free.min(left))
    }

    /// Bytes free and in all.
    pub(super) fn memory(&self) -> Result<(u64, u64), GpuError> {
        self.context.bind()?;
        let (free, total) = cu::mem_get_info().map_err(self.context.failed("read the memory's state"))?;
        Ok((free as u64, total as u64))
    }

    /// Waits for everything that was started.
    pub(super) fn sync(&self) -> Result<(), GpuError> {
        self.enter_idle("wait for the device")
    }

    /// Uninitialised memory.
    pub(super) fn alloc(self: &Arc<Self>, what: &'static str, bytes: usize) -> Result<Buf, GpuError> {
        self.enter_still("allocate memory")?;
        #[cfg(feature = "fault-injection")]
        if self.faults.no_memory() {
            return Err(short_of(self, what, bytes));
        }
        // SAFETY: a plain allocation; `Buf` frees it once.
        let ptr = unsafe { cu::malloc_sync(bytes.max(256)) }
            .map_err(|e| self.short_or_failed("allocate memory", what, bytes, e))?;
        let part = self.books.unwrap_or_else(|| Part::of(what));
        self.ledger.add(part, bytes as u64);
        Ok(Buf { ptr, bytes, part, device: self.clone() })
    }

    /// What it means that the driver refused `call`, which needs `bytes` bytes for `what`. An error other than want of
    /// memory is the device's, and is not answered by asking for less.
    fn short_or_failed(&self, call: &'static str, what: &'static str, bytes: usize, error: DriverError) -> GpuError {
        match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => short_of(self, what, bytes),
            _ => self.context.failed(call)(error),
        }
    }

    /// Memory of zeros.
    pub(super) fn zeros(self: &Arc<Self>, what: &'static str, bytes: usize) -> Result<Buf, GpuError> {
        let buf = self.alloc(what, bytes)?;
        self.fill_zero(buf.ptr, bytes)?;
        self.sync()?;
        Ok(buf)
    }

    /// Memory that holds `values`.
    pub(super) fn upload<T: Copy>(self: &Arc<Self>, what: &'static str, values: &[T]) -> Result<Buf, GpuError> {
        let buf = self.alloc(what, std::mem::size_of_val(values))?;
        self.write(buf.ptr, values)?;
        Ok(buf)
    }

    /// Copies `values` to `ptr`, after everything that was started before; returns when they are there.
    ///
    /// # Why
    /// The driver's blocking copy runs on the default stream, which ours does not wait for, and for few bytes of
    /// pageable memory it returns before they have arrived: a kernel started next may read what was there before.
    pub(super) fn write<T: Copy>(&self, ptr: u64, values: &[T]) -> Result<(), GpuError> {
        self.enter_idle("copy to the device")?;
        // SAFETY: callers pass ranges of buffers they own; `values` outlives the copy, which is waited for.
        unsafe { cu::memcpy_htod_async(ptr, values, self.context.stream()) }
            .map_err(self.context.failed("copy to the device"))?;
        self.sync()
    }

    /// Sets `bytes` bytes at `ptr` to zero, in the order of the stream.
    pub(super) fn fill_zero(&self, ptr: u64, bytes: usize) -> Result<(), GpuError> {
        self.fill(ptr, 0, bytes)
    }

    /// Sets `bytes` bytes at `ptr` to `value`, in the order of the stream.
    pub(super) fn fill(&self, ptr: u64, value: u8, bytes: usize) -> Result<(), GpuError> {
        self.enter("set memory")?;
        // SAFETY: callers pass ranges of buffers they own.
        unsafe { sys::cuMemsetD8Async(ptr, value, bytes, self.context.stream()).result() }
            .map_err(self.context.failed("set memory"))?;
        self.context.started(1)
    }

    /// Copies between two ranges of the device, in the order of the stream.
    pub(super) fn copy(&self, dst: u64, src: u64, bytes: usize) -> Result<(), GpuError> {
        self.enter("copy on the device")?;
        // SAFETY: callers pass ranges of buffers they own.
        unsafe { cu::memcpy_dtod_async(dst, src, bytes, self.context.stream()) }
            .map_err(self.context.failed("copy on the device"))?;
        self.context.started(1)
    }

    /// Reads `out.len()` values; waits for the stream.
    pub(super) fn read<T: Copy>(&self, ptr: u64, out: &mut [T]) -> Result<(), GpuError> {
        self.enter_idle("copy from the device")?;
        // SAFETY: callers pass ranges of buffers they own; nothing that writes them runs any more.
        unsafe { cu::memcpy_dtoh_sync(out, ptr) }.map_err(self.context.failed("copy from the device"))
    }

    /// Compiles `source` with the given macros.
    pub(super) fn compile(
        self: &Arc<Self>,
        source: &Source,
        elt: Elt,
        defines: &[(&str, i64)],
    ) -> Result<Module, GpuError> {
        let image = Unit { source, elt, defines }.code(&self.target.arch, self.kept.as_ref())?;
        self.enter_still("load a module")?;
        // SAFETY: the image is a complete module that the compiler made for this device, text ending in a zero.
        let loaded = unsafe { cu::module::load_data(image.as_ptr().cast()) };
        let module = loaded.map_err(|e| self.short_or_failed("load a module", "kernels", image.len(), e))?;
        Ok(Module { module, unit: source.name, limit: self.target.limit })
    }

    /// Starts a kernel; `cluster` neighbouring blocks of the grid's first axis see each other's shared memory.
    ///
    /// # Safety
    /// `args` must point to values of exactly the kernel's parameter types, and every pointer among them to
    /// memory that is large enough and outlives the launch (for a captured launch: the graph).
    pub(super) unsafe fn launch(
        &self,
        kernel: Kernel,
        cluster: u32,
        grid: (u32, u32, u32),
        block: u32,
        shared: u32,
        args: &[*const c_void],
    ) -> Result<(), GpuError> {
        use sys::CUlaunchAttributeID as Id;
        use sys::CUlaunchAttributeValue as Value;
        self.enter("start a kernel")?;
        let attribute = |id, value| sys::CUlaunchAttribute { id, pad: [0; 4], value };
        let mut size = Value { pad: [0; 64] };
        size.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: cluster, y: 1, z: 1 };
        let overlap = Value { programmaticStreamSerializationAllowed: 1 };
        // Before Hopper there is neither, and one block a cluster: kernels made for it do not wait by themselves.
        let mut attributes = [
            attribute(Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, overlap),
            attribute(Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, size),
        ];
        let config = sys::CUlaunchConfig {
            gridDimX: grid.0,
            gridDimY: grid.1,
            gridDimZ: grid.2,
            blockDimX: block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: self.context.stream(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: u32::from(self.target.early()) * if cluster > 1 { 2 } else { 1 },
        };
        // SAFETY: the caller's promise; the driver copies the arguments before it returns.
        unsafe {
            sys::cuLaunchKernelEx(&raw const config, kernel.0, args.as_ptr().cast_mut().cast(), std::ptr::null_mut())
        }
        .result()
        .map_err(self.context.failed("start a kernel"))?;
        self.context.started(1)?;
        self.note(kernel.1, u64::from(grid.0) * u64::from(grid.1) * u64::from(grid.2))
    }

    /// Records what `work` starts into a graph, without running it.
    pub(super) fn capture(self: &Arc<Self>, work: impl FnOnce() -> Result<(), GpuError>) -> Result<Graph, GpuError> {
        self.sync()?;
        let (stream, failed) = (self.context.stream(), self.context.failed("record a graph"));
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive and records nothing yet.
        unsafe { cu::stream::begin_capture(stream, mode) }.map_err(&failed)?;
        self.context.record(true);
        let done = work();
        self.context.record(false);
        // SAFETY: the stream records since above.
        let graph = unsafe { cu::stream::end_capture(stream) };
        if let Err(error) = done {
            if let Ok(graph) = graph {
                // SAFETY: the graph was just made, and nothing was made of it.
                let _ = unsafe { cu::graph::destroy(graph) };
            }
            return Err(error);
        }
        let graph = graph.map_err(&failed)?;
        // SAFETY: the graph was just made, and is needed only to make what is launched.
        unsafe {
            let exec = cu::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            let _ = cu::graph::destroy(graph);
            // How much a graph takes, the driver does not say.
            let exec = exec.map_err(|e| self.short_or_failed("record a graph", "a graph", 0, e))?;
            Ok(Graph { exec, device: self.clone() })
        }
    }
}

/// There are no `bytes` bytes for `what`.
fn short_of(device: &Device, what: &'static str, bytes: usize) -> GpuError {
    GpuError::Memory { what, bytes: bytes as u64, free: device.memory().map_or(0, |m| m.0) }
}

/// Versions and limits that decide what runs and how fast: of the driver, the libraries, and the target.
fn identity(target: &Target) -> Result<String, GpuError> {
    let driver = libraries::driver().map_err(GpuError::Absent)?;
    // SAFETY: the library is open; the call only tells a number.
    let blas = unsafe { cudarc::cublaslt::sys::cublasLtGetVersion() };
    Ok(format!("{driver} {} {blas} {} {}", compiler::version(), target.arch, target.limit))
}

/// What device `ordinal` is to the kernels. Needs no context.
fn target_of(ordinal: u32, known: &[u32], hardware: &Hardware) -> Result<Target, GpuError> {
    use sys::CUdevice_attribute_enum as Of;
    let facts = Facts::of(ordinal).map_err(GpuError::Absent)?;
    let room = facts.attribute(Of::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN).map_err(GpuError::Absent)?;
    Target::of(&facts.name, facts.capability, room.max(0) as u32, known, &hardware.taken_for).map_err(GpuError::Absent)
}

impl Module {
    /// The kernel of that name, allowed `shared` bytes of dynamic shared memory, or what a block has besides its own.
    pub(super) fn kernel(&self, name: &'static str, shared: u32) -> Result<Kernel, GpuError> {
        use sys::CUfunction_attribute_enum as Of;
        let missing = |reason: String| GpuError::Compile { unit: self.unit, log: format!("{name}: {reason}") };
        let c = CString::new(name).map_err(|e| missing(e.to_string()))?;
        // SAFETY: the module is loaded and stays so for the life of the device.
        let function = unsafe { cu::module::get_function(self.module, c) }.map_err(|e| missing(e.to_string()))?;
        if shared > 48 << 10 {
            let mut own = 0;
            // SAFETY: `function` is a valid handle, `own` is alive.
            unsafe { sys::cuFuncGetAttribute(&raw mut own, Of::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function) }
                .result()
                .map_err(|e| missing(e.to_string()))?;
            let shared = shared.min(self.limit.saturating_sub(own.max(0) as u32));
            let attribute = Of::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: `function` is a valid handle.
            unsafe { cu::function::set_function_attribute(function, attribute, shared as i32) }
                .map_err(|e| missing(e.to_string()))?;
        }
        // CUDA loads a kernel when it is first used, for which it may wait for everything that runs: a pause of tens of
        // milliseconds among callers, at the first pass that is as wide as this kernel is for.
        // SAFETY: `function` is a valid handle.
        unsafe { sys::cuFuncLoad(function) }.result().map_err(|e| missing(e.to_string()))?;
        Ok(Kernel(function, name))
    }
}

/// Starts a kernel: `start!(device, kernel, grid, block, shared; arguments)`. Each argument's type must be the
/// kernel's parameter type: `u64` for pointers.
macro_rules! start {
    ($device:expr, $kernel:expr, $grid:expr, $block:expr, $shared:expr; $($arg:expr),* $(,)?) => {
        // SAFETY: argument types are those of the kernel's declaration, beside which each call was written;
        // pointers are to buffers that the calling model owns.
        unsafe {
            $device.launch($kernel, 1, $grid, $block, $shared, &[$(std::ptr::from_ref(&$arg).cast::<std::ffi::c_void>()),*])
        }
    };
}
pub(super) use start;
