//! `antiphon model selftest KIT`: every stage of a backend against stored reference tensors.
//!
//! A kit is a directory with `checkpoint/` and files of named inputs and outputs (`llm`, `flow`, `hift`, `e2e`
//! `.safetensors`, `tokenizer_cases.json`, `text_normalize_cases.json`); its sizes are those of its checkpoint.
//! Names that a kit lacks are left out; names that a backend cannot show are listed as not shown.

mod kit;
mod stages;

use std::fmt;
use std::path::Path;

pub use kit::{Kit, KitError};

use super::backend::{Backend, FinalChunk, Options, SineNoise};
use super::probe::{Probe, Values};
use crate::synth::SynthError;

/// How far a result may be off.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Tolerance {
    /// Not at all.
    Exact,
    /// Largest absolute difference.
    Abs(f64),
    /// Largest difference relative to the expected value (of at least 1).
    Rel(f64),
    /// Largest absolute difference, or else root mean square.
    AbsOrRms(f64, f64),
}

impl fmt::Display for Tolerance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Tolerance::Exact => write!(f, "exact"),
            Tolerance::Abs(t) => write!(f, "{t:.0e}"),
            Tolerance::Rel(t) => write!(f, "{t:.0e} rel"),
            Tolerance::AbsOrRms(t, r) => write!(f, "{t:.0e} or rms {r:.0e}"),
        }
    }
}

/// How one output compared.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// Which part: `text`, `llm`, `flow`, `hift`, `e2e`, `noise`.
    pub stage: &'static str,
    /// The tensor's name in the kit.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Largest absolute difference.
    pub max: f64,
    /// Root mean square difference.
    pub rms: f64,
    /// What is allowed.
    pub tolerance: Tolerance,
    /// `None`: the backend cannot show it.
    pub pass: Option<bool>,
    /// What went wrong beyond numbers; empty otherwise.
    pub note: String,
}

/// All lines, in the order in which data flows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// The comparisons.
    pub lines: Vec<Line>,
}

impl Report {
    /// Whether nothing failed and anything was compared.
    pub fn passed(&self) -> bool {
        self.first_failure().is_none() && self.lines.iter().any(|l| l.pass == Some(true))
    }

    /// The first output that is off: later ones follow from it.
    pub fn first_failure(&self) -> Option<&Line> {
        self.lines.iter().find(|l| l.pass == Some(false))
    }

    /// Compares `actual` with `expected` and keeps the line. Leading axes of size one are ignored.
    fn compare(&mut self, stage: &'static str, name: &str, expected: &Values, actual: &Values, tolerance: Tolerance) {
        let trim = |shape: &[usize]| shape.iter().copied().skip_while(|&d| d == 1).collect::<Vec<_>>();
        let mut line = Line {
            stage,
            name: name.into(),
            shape: expected.shape.clone(),
            max: 0.0,
            rms: 0.0,
            tolerance,
            pass: Some(true),
            note: String::new(),
        };
        if trim(&expected.shape) != trim(&actual.shape) {
            line.pass = Some(false);
            line.note = format!("shape is {:?}", actual.shape);
            self.lines.push(line);
            return;
        }
        let (mut squares, mut relative) = (0.0, 0f64);
        for (&e, &a) in expected.data.iter().zip(&actual.data) {
            let difference = (f64::from(a) - f64::from(e)).abs();
            // A NaN must not vanish in a maximum.
            let difference = if difference.is_nan() { f64::INFINITY } else { difference };
            line.max = line.max.max(difference);
            relative = relative.max(difference / f64::from(e).abs().max(1.0));
            squares += difference * difference;
        }
        line.rms = (squares / expected.data.len().max(1) as f64).sqrt();
        line.pass = Some(match tolerance {
            Tolerance::Exact => line.max == 0.0,
            Tolerance::Abs(t) => line.max <= t,
            Tolerance::Rel(t) => relative <= t,
            Tolerance::AbsOrRms(t, rms) => line.max <= t || line.rms < rms,
        });
        self.lines.push(line);
    }

    fn not_shown(&mut self, stage: &'static str, name: &str, expected: &Values, tolerance: Tolerance) {
        self.lines.push(Line {
            stage,
            name: name.into(),
            shape: expected.shape.clone(),
            max: 0.0,
            rms: 0.0,
            tolerance,
            pass: None,
            note: "not shown by this device".into(),
        });
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<6} {:<34} {:<14} {:>9} {:>9}  {:<18} result",
            "stage", "output", "shape", "max abs", "rms", "tolerance"
        )?;
        for line in &self.lines {
            let shape: Vec<String> = line.shape.iter().map(usize::to_string).collect();
            let result = match line.pass {
                Some(true) => "pass",
                Some(false) => "FAIL",
                None => "-",
            };
            write!(
                f,
                "{:<6} {:<34} {:<14} {:>9.2e} {:>9.2e}  {:<18} {result}",
                line.stage,
                line.name,
                shape.join("x"),
                line.max,
                line.rms,
                line.tolerance.to_string()
            )?;
            writeln!(f, "{}{}", if line.note.is_empty() { "" } else { "  " }, line.note)?;
        }
        let passed = self.lines.iter().filter(|l| l.pass == Some(true)).count();
        let failed = self.lines.iter().filter(|l| l.pass == Some(false)).count();
        write!(f, "{passed} passed, {failed} failed")?;
        match self.first_failure() {
            Some(line) => write!(f, "; first wrong: {} {}", line.stage, line.name),
            None => Ok(()),
        }
    }
}

/// What a backend must be for a test of all its stages.
pub trait Testable: Backend + Probe {}

impl<T: Backend + Probe> Testable for T {}

/// The options a backend must be built with for `kit`: the original's last chunk, and whatever noise table the kit
/// was made with.
pub fn options(kit: &Kit) -> Options {
    Options { final_chunk: FinalChunk::Reference, sine_noise: kit.sine_noise(), ..Options::default() }
}

/// Runs everything that `kit` has on `backend`. `limits` replaces the tolerance of a stage by an absolute one, for
/// devices that compute in less than single precision.
///
/// # Errors
/// The kit cannot be read or the device failed.
pub fn run<B: Testable>(kit: &Kit, backend: &mut B, limits: &[(&str, f64)]) -> Result<Report, KitError> {
    let mut report = Report::default();
    stages::text(kit, &mut report)?;
    stages::noise(kit, backend, &mut report)?;
    stages::llm(kit, backend, &mut report)?;
    stages::flow(kit, backend, &mut report)?;
    stages::hift(kit, backend, &mut report)?;
    stages::end_to_end(kit, backend, &mut report)?;
    for line in &mut report.lines {
        let limit = limits.iter().find(|(stage, _)| *stage == line.stage);
        if let (Some(&(_, limit)), true) = (limit, line.tolerance != Tolerance::Exact && line.note.is_empty()) {
            line.tolerance = Tolerance::Abs(limit);
            line.pass = Some(line.max <= limit);
        }
    }
    Ok(report)
}

/// Opens a kit and runs it on the CPU.
///
/// # Errors
/// As [`run`]; or the checkpoint cannot be loaded.
pub fn run_on_cpu(dir: &Path) -> Result<Report, KitError> {
    let kit = Kit::open(dir)?;
    let mut backend = super::cpu::CpuBackend::load(&kit.checkpoint_dir(), options(&kit))
        .map_err(|e| KitError::Device(SynthError::Device(e.to_string())))?;
    run(&kit, &mut backend, &[])
}

/// The noise table a kit's vocoder outputs were made with, from its own first rows.
fn noise_of(head: &[f32]) -> SineNoise {
    let is_formula = head.iter().enumerate().all(|(i, &v)| (v - super::noise::formula(i as u64)).abs() < 1e-6);
    if is_formula { SineNoise::Formula } else { SineNoise::Native }
}
