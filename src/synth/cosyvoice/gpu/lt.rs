//! Large GEMMs of the flow through cuBLASLt: one plan per shape, tuned the first time in a process.
//!
//! `y[m, n] = act(alpha x[m, k] w[n, k]^T + bias[n])`, all row-major 16 bit, sums in single precision, never split over k. Operands
//! of 8 bits (E4M3) are what values were multiplied with powers of two before they were rounded: `alpha` takes that back, and
//! what GELU gives is rounded to 8 bits in its turn.

use std::collections::HashMap;
use std::sync::Arc;

use cudarc::cublaslt::{result as lt, sys};

use super::compiler::Source;
use super::device::{Buf, Device, Elt, GpuError, Timer};
use super::tuned::{Finding, Tuned};

/// Algorithms tried for each shape.
const CANDIDATES: usize = 8;
const WORKSPACE: usize = 32 << 20;

/// The fastest algorithms.
static ALGORITHMS: Tuned<sys::cublasLtMatmulAlgo_t> = Tuned::new();

/// The library's own description of an algorithm, for one version of it.
impl Finding for sys::cublasLtMatmulAlgo_t {
    const KIND: &'static str = "library 1";
    const KERNELS: &'static [&'static Source] = &[];

    fn to_bytes(self) -> Vec<u8> {
        self.data.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (words, rest) = bytes.as_chunks::<8>();
        let data = words.iter().map(|word| u64::from_le_bytes(*word)).collect::<Vec<_>>().try_into().ok()?;
        rest.is_empty().then_some(Self { data })
    }
}

/// Which GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    /// GELU (tanh form) after the bias.
    pub(super) gelu: bool,
    /// Whether operands are of 8 bits, and results of GELU.
    pub(super) fp8: bool,
}

impl Shape {
    /// Operations, and the fewest bytes that are moved.
    fn least(self) -> (f64, f64) {
        let Self { m, n, k, gelu, fp8 } = self;
        let (operand, result) = (if fp8 { 1 } else { 2 }, if fp8 && gelu { 1 } else { 2 });
        (2.0 * (m * n * k) as f64, (operand * (n + m) * k + result * m * n) as f64)
    }
}

/// Operands of one GEMM: device addresses.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    pub(super) x: u64,
    pub(super) w: u64,
    pub(super) bias: u64,
    pub(super) y: u64,
    pub(super) alpha: f32,
    /// What results of 8 bits are multiplied with, one value in single precision; others: null.
    pub(super) by: u64,
}

impl Operands {
    /// Of 16 bits.
    pub(super) fn whole(x: u64, w: u64, bias: u64, y: u64) -> Self {
        Self { x, w, bias, y, alpha: 1.0, by: 0 }
    }
}

struct Plan {
    desc: sys::cublasLtMatmulDesc_t,
    /// Of the weight, the input, what is added (nothing) and the result.
    layouts: [sys::cublasLtMatrixLayout_t; 4],
    algo: sys::cublasLtMatmulAlgo_t,
}

/// The library and the plans made so far.
pub(super) struct Lt {
    device: Arc<Device>,
    handle: sys::cublasLtHandle_t,
    elt: Elt,
    kind: sys::cudaDataType,
    plans: HashMap<Shape, Plan>,
    workspace: Buf,
}

// SAFETY: the handle and the descriptors may be used from any thread; the model uses them from one at a time.
unsafe impl Send for Lt {}

fn blas(e: cudarc::cublaslt::result::CublasError) -> GpuError {
    GpuError::Blas(e.to_string())
}

impl Lt {
    pub(super) fn new(device: &Arc<Device>, elt: Elt) -> Result<Self, GpuError> {
        device.enter("open cuBLASLt")?;
        let kind = match elt {
            Elt::Bf16 => sys::cudaDataType::CUDA_R_16BF,
            Elt::F16 => sys::cudaDataType::CUDA_R_16F,
            Elt::F32 => return Err(GpuError::Model("single precision GEMMs do not go through cuBLASLt".into())),
        };
        let workspace = device.alloc("cuBLASLt workspace", WORKSPACE)?;
        Ok(Self {
            device: device.clone(),
            handle: lt::create_handle().map_err(blas)?,
            elt,
            kind,
            plans: HashMap::new(),
            workspace,
        })
    }

    /// Whether there is a plan for `shape`.
    pub(super) fn prepared(&self, shape: Shape) -> bool {
        self.plans.contains_key(&shape)
    }

    /// Makes the plan for `shape`; `on`: real operands, on which the library's proposals are timed.
    pub(super) fn prepare(&mut self, shape: Shape, on: Operands) -> Result<(), GpuError> {
        if self.plans.contains_key(&shape) {
            return Ok(());
        }
        let Shape { m, n, k, gelu, fp8 } = shape;
        let epilogue = if gelu {
            sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_BIAS
        } else {
            sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS
        };
        use sys::cublasLtMatmulDescAttributes_t as D;
        use sys::cublasLtMatmulPreferenceAttributes_t as P;
        // SAFETY: descriptors are created and filled with values of the documented types and sizes; the result
        // array holds as many entries as are asked for.
        let (desc, layouts, found) = unsafe {
            let desc =
                lt::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType::CUDA_R_32F)
                    .map_err(blas)?;
            let set = |what, value: *const std::ffi::c_void, size| {
                lt::set_matmul_desc_attribute(desc, what, value, size).map_err(blas)
            };
            let transposed = 1i32;
            set(D::CUBLASLT_MATMUL_DESC_TRANSA, (&raw const transposed).cast(), 4)?;
            set(D::CUBLASLT_MATMUL_DESC_EPILOGUE, (&raw const epilogue).cast(), 4)?;
            set(D::CUBLASLT_MATMUL_DESC_BIAS_POINTER, (&raw const on.bias).cast(), 8)?;
            let layout = |kind, rows: usize, cols: usize| {
                lt::create_matrix_layout(kind, rows as u64, cols as u64, rows as i64).map_err(blas)
            };
            let (mut operand, mut result) = (self.kind, self.kind);
            if fp8 {
                // Sums in the MMA's own registers: what they lose is far below what 8 bits do.
                let fast = 1i8;
                set(D::CUBLASLT_MATMUL_DESC_FAST_ACCUM, (&raw const fast).cast(), 1)?;
                set(D::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, (&raw const self.kind).cast(), 4)?;
                operand = sys::cudaDataType::CUDA_R_8F_E4M3;
                if gelu {
                    result = operand;
                    set(D::CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, (&raw const on.by).cast(), 8)?;
                }
            }
            let layouts =
                [layout(operand, k, n)?, layout(operand, k, m)?, layout(self.kind, n, m)?, layout(result, n, m)?];
            let pref = lt::create_matmul_pref().map_err(blas)?;
            let size = WORKSPACE;
            let set = |what, value: *const std::ffi::c_void, size| {
                lt::set_matmul_pref_attribute(pref, what, value, size).map_err(blas)
            };
            set(P::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (&raw const size).cast(), 8)?;
            // No partial sums over k: their order would follow the shape.
            let none = 0u32;
            set(P::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (&raw const none).cast(), 4)?;
            let mut found: Vec<sys::cublasLtMatmulHeuristicResult_t> = vec![std::mem::zeroed(); CANDIDATES];
            let mut count = 0i32;
            let code = sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                desc,
                layouts[0],
                layouts[1],
                layouts[2],
                layouts[3],
                pref,
                CANDIDATES as i32,
                found.as_mut_ptr(),
                &raw mut count,
            );
            let _ = lt::destroy_matmul_pref(pref);
            code.result().map_err(blas)?;
            found.truncate(count.max(0) as usize);
            (desc, layouts, found)
        };
        let algo = ALGORITHMS.of(&self.device, self.elt, shape, || self.fastest(desc, layouts, &found, on))?;
        let mut plan = Plan { desc, layouts, algo };
        // One that was written down elsewhere may be none of this library's, for all that the names say.
        if self.run_plan(&plan, on).is_err() {
            plan.algo = self.fastest(desc, layouts, &found, on)?;
        }
        self.plans.insert(shape, plan);
        Ok(())
    }

    /// Which of the proposals is the fastest.
    fn fastest(
        &self,
        desc: sys::cublasLtMatmulDesc_t,
        layouts: [sys::cublasLtMatrixLayout_t; 4],
        found: &[sys::cublasLtMatmulHeuristicResult_t],
        on: Operands,
    ) -> Result<sys::cublasLtMatmulAlgo_t, GpuError> {
        let timer = Timer::new(&self.device)?;
        let mut best: Option<(f64, sys::cublasLtMatmulAlgo_t)> = None;
        for candidate in found {
            let plan = Plan { desc, layouts, algo: candidate.algo };
            if self.run_plan(&plan, on).is_err() || self.device.sync().is_err() {
                continue;
            }
            let mut times = [0f64; 3];
            for time in &mut times {
                timer.mark(0)?;
                for _ in 0..4 {
                    self.run_plan(&plan, on)?;
                }
                timer.mark(1)?;
                *time = timer.seconds()?;
            }
            times.sort_by(f64::total_cmp);
            if best.as_ref().is_none_or(|(t, _)| times[1] < *t) {
                best = Some((times[1], candidate.algo));
            }
        }
        best.map(|(_, algo)| algo).ok_or_else(|| GpuError::Blas("no algorithm for a GEMM".into()))
    }

    /// Starts a GEMM whose plan was made.
    pub(super) fn run(&self, shape: Shape, on: Operands) -> Result<(), GpuError> {
        match self.plans.get(&shape) {
            Some(plan) => {
                let (operations, bytes) = shape.least();
                self.device.expect(operations, bytes);
                self.run_plan(plan, on)
            }
            None => Err(GpuError::Blas(format!("no plan for {shape:?}"))),
        }
    }

    fn run_plan(&self, plan: &Plan, on: Operands) -> Result<(), GpuError> {
        let (alpha, zero) = (on.alpha, 0f32);
        use sys::cublasLtMatmulDescAttributes_t as D;
        // SAFETY: the descriptors are alive; operands have the plan's sizes by the caller's contract.
        unsafe {
            let set = |what, address: u64| {
                lt::set_matmul_desc_attribute(plan.desc, what, (&raw const address).cast(), 8).map_err(blas)
            };
            set(D::CUBLASLT_MATMUL_DESC_BIAS_POINTER, on.bias)?;
            if on.by != 0 {
                set(D::CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, on.by)?;
            }
            lt::matmul(
                self.handle,
                plan.desc,
                (&raw const alpha).cast(),
                (&raw const zero).cast(),
                on.w as *const _,
                plan.layouts[0],
                on.x as *const _,
                plan.layouts[1],
                // What would be added, but nothing is: it may not lie where results of another type do.
                if on.by == 0 { on.y as *const _ } else { std::ptr::null() },
                plan.layouts[2],
                on.y as *mut _,
                plan.layouts[3],
                &raw const plan.algo,
                self.workspace.ptr as *mut _,
                WORKSPACE,
                self.device.context.stream().cast(),
            )
            .map_err(blas)?;
        }
        self.device.context.started(1)?;
        self.device.note("cublasLt", 0)
    }
}

impl Drop for Lt {
    fn drop(&mut self) {
        // The library frees what it has on the device; in a lost context that goes with it. Destroying the handle would
        // call into that context, so what the handle has on the host stays until the process ends.
        let lost = self.device.context.wait().is_err();
        // SAFETY: each was created once and is destroyed once.
        unsafe {
            for plan in self.plans.values() {
                let _ = lt::destroy_matmul_desc(plan.desc);
                for layout in plan.layouts {
                    let _ = lt::destroy_matrix_layout(layout);
                }
            }
            if !lost {
                let _ = lt::destroy_handle(self.handle);
            }
        }
    }
}
