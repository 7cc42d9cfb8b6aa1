//! CosyVoice3: text and a voice prompt to speech tokens, tokens to mel, mel to samples.
//!
//! In reading order:
//! - [`config`], [`checkpoint`], [`layout`], [`verify`]: the files; [`yaml`], [`pickle`], [`archive`] read and write
//!   their formats, [`random`] makes them up, [`pull`] fetches them
//! - [`text`], [`prompt`], [`voices`]: what goes in
//! - [`sample`], [`noise`], [`schedule`]: the parts of the model that are not networks
//! - [`fp8`]: the range of products in 8 bits
//! - [`backend`]: the networks on a device, as stages over slots; [`cpu`] and [`gpu`] implement it
//! - [`CosyVoice`]: the slot state machine over any backend
//! - [`bistream`]: speech while the text is being written
//! - [`probe`], [`selftest`]: a backend against stored tensors
//! - [`cli`]: `antiphon model ...`

pub mod archive;
pub mod backend;
pub mod bistream;
pub mod checkpoint;
pub mod cli;
pub mod config;
pub mod cpu;
mod fp8;
pub mod gpu;
pub mod layout;
pub mod noise;
pub mod pickle;
pub mod probe;
pub mod prompt;
pub mod pull;
pub mod random;
mod respeed;
pub mod sample;
pub mod schedule;
pub mod selftest;
mod synthesizer;
pub mod text;
pub mod times;
pub mod verify;
pub mod voices;
pub mod yaml;

use std::panic::resume_unwind;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::thread;

pub use synthesizer::{CosyVoice, Settings};

use self::backend::Options;
use self::config::Config;
use self::cpu::CpuBackend;
use self::gpu::{GpuBackend, GpuError, Precision};
use crate::synth::{SynthError, identity};

impl CosyVoice<CpuBackend> {
    /// Checks and loads the checkpoint in `dir` on the CPU.
    ///
    /// # Errors
    /// Everything that is wrong with the checkpoint, in one report.
    pub fn load_cpu(dir: &Path, options: Options, settings: Settings) -> Result<Self, SynthError> {
        let (content, loaded) = content(dir, &options, "cpu");
        let (config, backend) = checked(dir, options, |options| {
            CpuBackend::load(dir, options).map_err(|e| SynthError::Device(e.to_string()))
        })?;
        let mut this = Self::new(backend, dir, config, settings)?;
        this.identify(content, loaded);
        Ok(this)
    }
}

impl CosyVoice<GpuBackend> {
    /// Checks and loads the checkpoint in `dir` on CUDA device `ordinal`.
    ///
    /// # Errors
    /// Everything that is wrong with the checkpoint, in one report; [`SynthError::Unusable`]: what the device lacks;
    /// [`SynthError::Device`]: what may pass, such as another program that holds its memory.
    pub fn load_gpu(
        dir: &Path,
        ordinal: u32,
        options: Options,
        precision: Precision,
        settings: Settings,
    ) -> Result<Self, SynthError> {
        let (content, loaded) = content(dir, &options, &format!("{precision:?}"));
        let (config, backend) = checked(dir, options, |options| {
            GpuBackend::load(dir, ordinal, options, precision).map_err(|e| match e {
                GpuError::Absent(_) | GpuError::Compile { .. } | GpuError::Model(_) => {
                    SynthError::Unusable(e.to_string())
                }
                GpuError::Taken(_) | GpuError::Memory { .. } | GpuError::Driver { .. } | GpuError::Blas(_) => {
                    SynthError::Device(e.to_string())
                }
            })
        })?;
        let mut this = Self::new(backend, dir, config, settings)?;
        this.identify(content, loaded);
        Ok(this)
    }
}

/// What the checkpoint's files hold, which is told when they have been read, and how they are used.
fn content(dir: &Path, options: &Options, precision: &str) -> (Arc<OnceLock<String>>, String) {
    let stems = [options.llm.stem(), checkpoint::Part::Flow.stem(), checkpoint::Part::Hift.stem()];
    let networks = stems.map(|stem| checkpoint::find(dir, stem)).to_vec();
    let Options { llm, final_chunk, sine_noise, hardware, .. } = options;
    let how = format!("{} {} {:?}", hardware.invariant, hardware.int8_keys, hardware.products);
    let loaded = format!("{precision} {llm:?} {final_chunk:?} {sine_noise:?} {how} {:?}", hardware.taken_for);
    (identity::read_model(dir, networks), loaded)
}

/// The sizes of a checkpoint in which nothing is wrong, and what `load` makes of it. Looking at every value takes a second,
/// which passes beside the load: what is wrong with the files goes before what loading them says.
fn checked<T>(
    dir: &Path,
    options: Options,
    load: impl FnOnce(Options) -> Result<T, SynthError>,
) -> Result<(Config, T), SynthError> {
    let llm = options.llm.stem();
    let (report, loaded) = thread::scope(|scope| {
        let check = scope.spawn(|| verify::verify(dir, llm));
        let loaded = load(options);
        (check.join().unwrap_or_else(|panic| resume_unwind(panic)), loaded)
    });
    if !report.passed() {
        return Err(SynthError::Device(format!("{} cannot be used:\n{report}", dir.display())));
    }
    let config = Config::load(dir).map_err(|e| SynthError::Device(e.to_string()))?;
    Ok((config, loaded?))
}
