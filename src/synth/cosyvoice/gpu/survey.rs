//! What is there for the engine and what is missing, without opening a device: for people who set up a machine.

use serde::Serialize;

use super::device::{absent, count, planned, unusable};
use super::facts::Facts;
use super::libraries;
use crate::synth::cosyvoice::backend::Hardware;

/// Everything that the engine would use on this machine.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Survey {
    /// CUDA that the driver knows, such as `13.0`; `None`: there is no driver, or one that is too old.
    pub driver: Option<String>,
    /// Libraries and where they were found.
    pub libraries: Vec<Library>,
    /// Why there is no GPU engine, with the command that would help.
    pub absent: Option<String>,
    /// Every device.
    pub devices: Vec<Found>,
}

/// A library that was opened.
#[derive(Clone, Debug, Serialize)]
pub struct Library {
    /// `nvrtc`, `cublasLt`.
    pub name: &'static str,
    /// Where; a plain name where the loader found it.
    pub path: String,
}

/// One device.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Found {
    /// As in `cuda:0`.
    pub ordinal: u32,
    /// What it calls itself.
    pub name: String,
    /// Compute capability, such as `8.6`.
    pub capability: String,
    /// Bytes of memory in all.
    pub memory: u64,
    /// Architecture that kernels are compiled for; `None`: none fits.
    pub architecture: Option<String>,
    /// Shared memory that a block may have, KiB.
    pub shared_kib: Option<u32>,
    /// Whether Hopper's own kernels run; else the general ones.
    pub hopper: bool,
    /// Why it cannot be used, with what would help; `None`: it can.
    pub unusable: Option<String>,
}

/// Looks at this machine.
pub fn survey(hardware: &Hardware) -> Survey {
    let absent = absent();
    let driver = libraries::driver().ok().map(|version| format!("{}.{}", version / 1000, version % 1000 / 10));
    let opened = libraries::list().into_iter();
    let libraries =
        opened.map(|o| Library { name: o.part.stem(), path: o.path.display().to_string() }).collect::<Vec<_>>();
    let devices = (0..count()).map(|ordinal| found(ordinal, hardware)).collect();
    Survey { driver, libraries, absent, devices }
}

fn found(ordinal: u32, hardware: &Hardware) -> Found {
    let unusable = unusable(ordinal, hardware);
    let target = planned(ordinal, hardware);
    let facts = Facts::of(ordinal);
    let (name, capability, memory) = match facts {
        Ok(facts) => (facts.name, format!("{}.{}", facts.capability / 10, facts.capability % 10), facts.memory),
        Err(_) => (String::new(), String::new(), 0),
    };
    Found {
        ordinal,
        name,
        capability,
        memory,
        architecture: target.as_ref().map(|t| t.arch.clone()),
        shared_kib: target.as_ref().map(|t| t.limit >> 10),
        hopper: target.is_some_and(|t| t.hopper()),
        unusable,
    }
}
