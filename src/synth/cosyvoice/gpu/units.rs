//! The CUDA sources and what each is compiled from.

use super::compiler::{Source, Unit};
use super::device::GpuError;
use super::mirror::checks;
use super::{Elt, Precision, flow, gemm, hift, libraries, llm, whisper};
use crate::synth::cosyvoice::config::Config;

const COMMON: &str = include_str!("kernels/common.cuh");
const GEMM_COMMON: &str = include_str!("kernels/gemm.cuh");
const HOPPER: &str = include_str!("kernels/hopper.cuh");

/// Packing of weights and GEMMs at load.
pub(super) static SETUP: Source =
    Source { name: "setup.cu", parts: &[COMMON, include_str!("kernels/setup.cu")], checks: String::new };
/// GEMMs and convolutions.
pub(super) static GEMM: Source = Source {
    name: "gemm.cu",
    parts: &[COMMON, GEMM_COMMON, HOPPER, include_str!("kernels/gemm.cu"), include_str!("kernels/gemv.cu")],
    checks: || checks(&[gemm::Conv::LAYOUT]),
};
/// Warpgroup GEMMs on Hopper.
pub(super) static WARPGROUP: Source = Source {
    name: "warpgroup.cu",
    parts: &[COMMON, GEMM_COMMON, HOPPER, include_str!("kernels/warpgroup.cu")],
    checks: || checks(&[gemm::Conv::LAYOUT]),
};
/// The language model.
pub(super) static LLM: Source = Source {
    name: "llm.cu",
    parts: &[COMMON, include_str!("kernels/llm.cu"), include_str!("kernels/sample.cu")],
    checks: || checks(&llm::LAYOUTS),
};
/// The flow.
pub(super) static FLOW: Source = Source {
    name: "flow.cu",
    parts: &[
        COMMON,
        HOPPER,
        include_str!("kernels/flow.cu"),
        include_str!("kernels/attend.cu"),
        include_str!("kernels/attend_wide.cu"),
        include_str!("kernels/position.cu"),
        include_str!("kernels/skinny.cu"),
        include_str!("kernels/narrow.cu"),
    ],
    checks: || checks(&[flow::ChunkArgs::LAYOUT]),
};
/// The vocoder.
pub(super) static HIFT: Source = Source {
    name: "hift.cu",
    parts: &[COMMON, include_str!("kernels/hift.cu")],
    checks: || checks(&[hift::Voc::LAYOUT]),
};

/// The recogniser.
pub(super) static WHISPER: Source =
    Source { name: "whisper.cu", parts: &[COMMON, include_str!("kernels/whisper.cu")], checks: String::new };

/// Architectures that kernels are compiled for here, and the shared memory of a block there in KiB.
pub const ARCHITECTURES: [(&str, u32); 6] =
    [("sm_80", 163), ("sm_86", 99), ("sm_89", 99), ("sm_90a", 227), ("sm_100", 227), ("sm_120", 99)];

/// Whether kernels for `arch` have products in 8 bits.
fn multiplies_fp8(arch: &str) -> bool {
    let number = arch.trim_start_matches("sm_").trim_end_matches('a').parse::<u32>();
    number.is_ok_and(super::target::has_fp8)
}

/// Compiles every kernel that a load for `arch` compiles, with the sizes of `config`, in every type of operands that
/// [`Precision`] has a name for; without optimising them, as only errors are asked for. Needs the run-time compiler but no
/// device; `None` where that is missing.
///
/// # Errors
/// What does not compile.
pub fn compile_all(config: &Config, arch: &str, shared_kib: u32) -> Option<Result<(), GpuError>> {
    libraries::open_compiler().then(|| {
        let (llm, hift) = (llm::defines(&config.llm), hift::defines(config, 0));
        let [flow, int8, fp8, both] = [(false, false), (true, false), (false, true), (true, true)]
            .map(|(int8, fp8)| flow::defines(&config.flow, int8, fp8));
        let (gemm, heads) = (gemm::defines(shared_kib << 10), whisper::defines(64, 64));
        for Precision { llm: l, flow: f, hift: h } in [Precision::default(), Precision::EXACT] {
            let mut units = vec![
                Unit { source: &LLM, elt: l, defines: &llm },
                Unit { source: &WARPGROUP, elt: l, defines: &[] },
                Unit { source: &FLOW, elt: f, defines: &flow },
                Unit { source: &HIFT, elt: h, defines: &hift },
                Unit { source: &WHISPER, elt: f, defines: &heads },
            ];
            if f != Elt::F32 {
                units.push(Unit { source: &FLOW, elt: f, defines: &int8 });
                if multiplies_fp8(arch) {
                    units.extend([&fp8, &both].map(|defines| Unit { source: &FLOW, elt: f, defines }));
                }
            }
            let mut elts = vec![l, f, h];
            elts.dedup();
            for elt in elts {
                units.push(Unit { source: &SETUP, elt, defines: &[] });
                units.push(Unit { source: &GEMM, elt, defines: &gemm });
            }
            units.iter().try_for_each(|unit| unit.check(arch))?;
        }
        Ok(())
    })
}
