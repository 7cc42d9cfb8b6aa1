//! What a device is to the kernels: the architecture that they are compiled for, and what a block may have there.
//!
//! | compute capability | cards | shared memory of a block | has |
//! | --- | --- | --- | --- |
//! | 8.0 | A100 | 163 KiB | tensor cores with bfloat16, asynchronous copies: what every kernel needs |
//! | 8.6 | A10, RTX 30 | 99 KiB | the same |
//! | 8.9 | L4, L40S, RTX 40 | 99 KiB | MMAs of 8 bits |
//! | 9.0 | H100, H200 | 227 KiB | these and early launches; warpgroup MMAs and bulk copies, which no other has |
//! | 10.0, 12.0 | B200; RTX 50 | 227 KiB, 99 KiB | MMAs of 8 bits, early launches |
//!
//! (CUDA C++ Programming Guide, "Compute Capabilities".) Before 8.0 there is no bfloat16 and no asynchronous copy.
//!
//! # Why
//! Machine code is made for the device's own architecture. A compiler that is older than the device does not know it: then
//! it makes the newest code that it can for the driver to finish ([`Target::finished_by_driver`]).

use super::device::Elt;
use crate::synth::cosyvoice::backend::{Hardware, TakenFor};

/// Least compute capability, times ten.
const LEAST: u32 = 80;
/// From here on there are numbers of 8 bits and MMAs of them.
const FP8: u32 = 89;
/// From here on a launch may start before the one before it has ended.
const EARLY: u32 = 90;
/// Least shared memory of a block, in bytes: what every device from [`LEAST`] on has.
const LEAST_SHARED: u32 = 99 << 10;
/// Most that the kernels ask for.
const MOST_SHARED: u32 = 220 << 10;

/// Whether devices of compute capability `capability` (times ten) have products in 8 bits.
pub(super) fn has_fp8(capability: u32) -> bool {
    capability >= FP8
}

/// What kernels are compiled for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    /// As the compiler calls it: `sm_90a`, or `compute_80` for code that the driver finishes.
    pub(super) arch: String,
    /// The same, times ten.
    generation: u32,
    /// Shared memory that a block may have, in bytes.
    pub(super) limit: u32,
}

impl Target {
    /// The target for a device called `name`, of compute capability `capability` (times ten), whose blocks may have `room`
    /// bytes of shared memory. `supported`: what the compiler knows; empty: it does not say.
    ///
    /// # Errors
    /// Why there is none, in one line.
    pub(super) fn of(
        name: &str,
        capability: u32,
        room: u32,
        supported: &[u32],
        taken_for: &TakenFor,
    ) -> Result<Self, String> {
        let refuse = |why: String| Err(format!("no GPU engine: {name} {why}"));
        if capability < LEAST {
            let (major, minor) = (capability / 10, capability % 10);
            return refuse(format!(
                "is of compute capability {major}.{minor}; 8.0 (A100, A10, RTX 30 and later) or newer is needed"
            ));
        }
        let limit = taken_for.shared_kib.map_or(room, |kib| room.min(kib.saturating_mul(1 << 10)));
        if limit < LEAST_SHARED {
            let (has, needed) = (limit >> 10, LEAST_SHARED >> 10);
            return refuse(format!("has {has} KiB of shared memory for a block, {needed} KiB are needed"));
        }
        if let Some(arch) = &taken_for.arch {
            let number = arch.strip_prefix("compute_").and_then(|n| n.parse().ok());
            return match number.filter(|n| (LEAST..=capability).contains(n)) {
                Some(generation) => Ok(Self { arch: arch.clone(), generation, limit }),
                None => refuse(format!(
                    "cannot run [engine] arch = \"{arch}\": say compute_80 or another up to compute_{capability}"
                )),
            };
        }
        if supported.is_empty() || supported.contains(&capability) {
            let suffix = if capability == 90 { "a" } else { "" };
            return Ok(Self { arch: format!("sm_{capability}{suffix}"), generation: capability, limit });
        }
        let known = supported.iter().copied().filter(|n| (LEAST..capability).contains(n)).max();
        match known {
            Some(generation) => Ok(Self { arch: format!("compute_{generation}"), generation, limit }),
            None => refuse("is not known to this CUDA run-time compiler: `pip install nvidia-cuda-nvrtc`".into()),
        }
    }

    /// Whether it has warpgroup MMAs, bulk copies and clusters.
    pub(super) fn hopper(&self) -> bool {
        self.arch == "sm_90a"
    }

    /// Whether launches may start before the one before them has ended: the kernels wait for it themselves.
    pub(super) fn early(&self) -> bool {
        self.generation >= EARLY
    }

    /// Why a flow in `flow` cannot run here in the modes that `hardware` asks for, in one line that says what to change; `name`: the
    /// device's.
    pub(super) fn refuses(&self, name: &str, hardware: &Hardware, flow: Elt) -> Option<String> {
        let fp8 = hardware.products.fp8();
        if hardware.int8_keys && flow == Elt::F32 {
            return Some("keys and values in 8 bits need a flow in 16 bits: `dtype` \"auto\"".into());
        }
        if fp8 && flow == Elt::F32 {
            return Some("products in 8 bits need a flow in 16 bits: `dtype` \"auto\"".into());
        }
        if fp8 && hardware.invariant {
            return Some(
                "products in 8 bits are those of wide steps: `products` \"full\", or `invariant` false".into(),
            );
        }
        (fp8 && !has_fp8(self.generation)).then(|| {
            format!("{name} has no products in 8 bits, as L4, RTX 40, H100 and later have: `products` \"full\"")
        })
    }

    /// Dynamic shared memory that the kernels may ask for.
    pub(super) fn shared(&self) -> u32 {
        self.limit.min(MOST_SHARED)
    }

    /// Whether the compiler makes code that is not the device's yet.
    pub(super) fn finished_by_driver(arch: &str) -> bool {
        arch.starts_with("compute_")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth::cosyvoice::backend::Products;

    const NEW: &[u32] = &[75, 80, 86, 89, 90, 100, 120];

    fn target(capability: u32, kib: u32, supported: &[u32]) -> Result<Target, String> {
        Target::of("A card", capability, kib << 10, supported, &TakenFor::default())
    }

    #[test]
    fn every_generation_from_ampere_on_gets_code_of_its_own() {
        for (capability, kib, arch, hopper, early, shared) in [
            (80, 163, "sm_80", false, false, 163),
            (86, 99, "sm_86", false, false, 99),
            (89, 99, "sm_89", false, false, 99),
            (90, 227, "sm_90a", true, true, 220),
            (100, 227, "sm_100", false, true, 220),
            (120, 99, "sm_120", false, true, 99),
        ] {
            let found = target(capability, kib, NEW).expect("usable");
            assert_eq!((&*found.arch, found.hopper(), found.early()), (arch, hopper, early));
            assert_eq!(found.shared(), shared << 10, "{arch}");
        }
    }

    #[test]
    fn modes_that_a_card_or_a_type_has_not_are_refused_with_what_to_say_instead() {
        let refused = |capability, hardware: Hardware, flow| {
            target(capability, 99, NEW).expect("usable").refuses("A card", &hardware, flow)
        };
        let (plain, fp8) = (Hardware::default(), Hardware { products: Products::Fp8, ..Hardware::default() });
        let int8 = Hardware { int8_keys: true, ..plain.clone() };
        assert_eq!(refused(80, plain, Elt::F32), None);
        assert_eq!(refused(80, int8.clone(), Elt::F16), None);
        assert!(refused(80, int8, Elt::F32).is_some_and(|why| why.contains("`dtype` \"auto\"")));
        assert!(refused(90, fp8.clone(), Elt::F32).is_some_and(|why| why.contains("`dtype` \"auto\"")));
        for (capability, taken) in [(80, false), (86, false), (89, true), (90, true), (120, true)] {
            let refused = refused(capability, fp8.clone(), Elt::F16);
            assert_eq!(refused.is_none(), taken, "{capability}: {refused:?}");
            assert!(refused.is_none_or(|why| why.contains("A card") && why.contains("`products` \"full\"")));
        }
        let both = Hardware { invariant: true, ..fp8 };
        assert!(refused(90, both, Elt::F16).is_some_and(|why| why.contains("`invariant` false")));
    }

    #[test]
    fn an_older_card_is_refused_in_one_line() {
        for capability in [61, 70, 75] {
            let why = target(capability, 64, NEW).expect_err("too old");
            assert!(why.contains(&format!("{}.{}", capability / 10, capability % 10)) && why.contains("8.0"), "{why}");
            assert_eq!(why.lines().count(), 1);
        }
    }

    #[test]
    fn a_compiler_older_than_the_card_makes_what_the_driver_finishes() {
        let found = target(120, 99, &[75, 80, 86, 89, 90]).expect("usable");
        assert_eq!((&*found.arch, found.early(), found.hopper()), ("compute_90", true, false));
        assert!(Target::finished_by_driver(&found.arch) && !Target::finished_by_driver("sm_90a"));
        assert!(target(120, 99, &[70, 75]).expect_err("nothing").contains("nvrtc"));
    }

    #[test]
    fn a_card_can_be_taken_for_a_smaller_one() {
        let taken = |arch: Option<&str>, shared_kib| {
            let taken_for = TakenFor { arch: arch.map(Into::into), shared_kib };
            Target::of("A card", 90, 227 << 10, NEW, &taken_for)
        };
        let found = taken(Some("compute_80"), Some(99)).expect("usable");
        assert_eq!((&*found.arch, found.early(), found.hopper()), ("compute_80", false, false));
        assert_eq!(found.shared(), 99 << 10);
        assert_eq!(taken(None, Some(163)).expect("usable").limit, 163 << 10);
        assert_eq!(taken(None, Some(500)).expect("no more than there is").limit, 227 << 10);
        for wrong in ["compute_75", "compute_100", "sm_80", "Ampere"] {
            assert!(taken(Some(wrong), None).expect_err(wrong).contains(wrong));
        }
        assert!(taken(None, Some(48)).expect_err("too little").contains("48 KiB"));
    }
}
