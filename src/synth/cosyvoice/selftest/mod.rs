//! `antiphon model selftest KIT`: every stage of a backend against stored reference tensors.
//!
//! A kit is a directory with `checkpoint/` and files of named inputs and outputs (`llm`, `flow`, `hift`, `e2e`
//! `.safetensors`, `tokenizer_cases.json`, `text_normalize_cases.json`); its sizes are those of its checkpoint.
//! What a kit lacks is listed as absent, what a backend cannot show as not shown; neither fails. What a kit's makers
//! chose and wrote down nowhere is recovered from the kit itself, see `derive`.

mod audio;
mod derive;
mod kit;
mod llm;
mod tables;
mod whole;

use std::fmt;
use std::path::Path;

pub use kit::{Kit, KitError};

use super::backend::{Backend, FinalChunk, Hardware, Options, SineNoise};
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
    /// Root mean square difference as a part of the expected values' own: silence is at 1, noise above.
    Part(f64),
}

impl fmt::Display for Tolerance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Tolerance::Exact => write!(f, "exact"),
            Tolerance::Abs(t) => write!(f, "{t:.0e}"),
            Tolerance::Rel(t) => write!(f, "{t:.0e} rel"),
            Tolerance::AbsOrRms(t, r) => write!(f, "{t:.0e} or rms {r:.0e}"),
            Tolerance::Part(t) => write!(f, "rms {} %", t * 100.0),
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
    /// Root mean square of what is expected.
    pub scale: f64,
    /// What is allowed.
    pub tolerance: Tolerance,
    /// `None`: the kit lacks it or the backend cannot show it.
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
            scale: 0.0,
            tolerance,
            pass: Some(true),
            note: String::new(),
        };
        if trim(&expected.shape) != trim(&actual.shape) {
            line.pass = Some(false);
            (line.max, line.rms) = (f64::INFINITY, f64::INFINITY);
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
        let count = expected.data.len().max(1) as f64;
        line.rms = (squares / count).sqrt();
        line.scale = rms(&expected.data);
        line.pass = Some(match tolerance {
            Tolerance::Exact => line.max == 0.0,
            Tolerance::Abs(t) => line.max <= t,
            Tolerance::Rel(t) => relative <= t,
            Tolerance::AbsOrRms(t, rms) => line.max <= t || line.rms < rms,
            Tolerance::Part(t) => line.rms <= t * line.scale,
        });
        self.lines.push(line);
    }

    /// Says about the last line what was recovered from the kit.
    fn explain(&mut self, what: &str) {
        if let Some(line) = self.lines.last_mut().filter(|line| line.pass.is_some()) {
            let gap = if line.note.is_empty() { "" } else { "; " };
            line.note = format!("{what}{gap}{}", line.note);
        }
    }

    fn absent(&mut self, stage: &'static str, name: &str) {
        let nothing = Values { shape: Vec::new(), data: Vec::new() };
        self.not_shown(stage, name, &nothing, Tolerance::Exact);
        if let Some(line) = self.lines.last_mut() {
            line.note = "absent".into();
        }
    }

    fn not_shown(&mut self, stage: &'static str, name: &str, expected: &Values, tolerance: Tolerance) {
        self.lines.push(Line {
            stage,
            name: name.into(),
            shape: expected.shape.clone(),
            max: 0.0,
            rms: 0.0,
            scale: 0.0,
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
        let skipped = self.lines.iter().filter(|l| l.pass.is_none()).count();
        let passed = self.lines.iter().filter(|l| l.pass == Some(true)).count();
        let failed = self.lines.iter().filter(|l| l.pass == Some(false)).count();
        write!(f, "{passed} passed, {failed} failed")?;
        if skipped > 0 {
            write!(f, ", {skipped} absent or not shown")?;
        }
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

/// What the working precision of a GPU may differ by, stage by stage, as a part of what is expected ([`Tolerance::Part`]):
/// some three times what was measured on an H200 (0.5 %, 0.04 %, 0.06 %). End to end the tone's phase drifts with the last
/// bits of F0: 24 to 37 %.
pub const WORKING: &[(&str, f64)] = &[("llm", 0.015), ("flow", 0.002), ("hift", 0.002), ("e2e", 0.5)];

/// The same of a flow that keeps keys and values in 8 bits ([`Hardware::int8_keys`]): no more than 16 bits are allowed. Measured on the
/// CPU, which computes all else in single precision: attention of the first block 0.13 %, a mel 0.01 %.
pub const INT8: &[(&str, f64)] = &[("flow", 0.002), ("e2e", 0.5)];

/// The same of a flow that multiplies numbers of 8 bits ([`Hardware::products`]); a mel, 1.2 %. Samples follow F0 as above: half of
/// them is what was measured.
pub const FP8: &[(&str, f64)] = &[("flow", 0.15), ("e2e", 1.5)];

/// What stages may differ by in the modes of `hardware`, in the working precision of a GPU or (`working` is not set) in single
/// precision: for [`run`].
pub fn limits(working: bool, hardware: &Hardware) -> Vec<(&'static str, f64)> {
    let of = |limits: &'static [(&'static str, f64)], apply: bool| limits.iter().copied().filter(move |_| apply);
    // The first that names a stage counts.
    of(FP8, hardware.products.fp8()).chain(of(INT8, hardware.int8_keys)).chain(of(WORKING, working)).collect()
}

/// Runs everything that `kit` has on `backend`. `limits` replaces the tolerance of a stage, for devices that compute in
/// less than single precision: the difference as a part of what is expected.
///
/// # Errors
/// The kit cannot be read or the device failed.
pub fn run<B: Testable>(kit: &Kit, backend: &mut B, limits: &[(&str, f64)]) -> Result<Report, KitError> {
    let mut report = Report::default();
    let limit = |stage: &str| limits.iter().find(|(name, _)| *name == stage).map(|&(_, limit)| limit);
    tables::text(kit, &mut report)?;
    tables::noise(kit, backend, &mut report)?;
    let windows = of_what_is_there(llm::llm(kit, backend, &mut report), "llm", &mut report)?;
    of_what_is_there(audio::flow(kit, backend, &mut report, limit("flow")), "flow", &mut report)?;
    of_what_is_there(audio::hift(kit, backend, &mut report), "hift", &mut report)?;
    let windows = windows.unwrap_or_else(|| vec![derive::KIT_WINDOW]);
    of_what_is_there(whole::end_to_end(kit, backend, &mut report, &windows), "e2e", &mut report)?;
    for line in &mut report.lines {
        let measured = line.tolerance != Tolerance::Exact && line.pass.is_some();
        if let (Some(limit), true) = (limit(line.stage), measured) {
            line.tolerance = Tolerance::Part(limit);
            line.pass = Some(line.rms <= limit * line.scale);
        }
    }
    Ok(report)
}

/// What can be compared where a backend cannot run all of the networks: the text, and of each stage why it is left out.
/// `misfits`: stages that do not fit, and why; the others need them, since a backend is one of all three.
///
/// # Errors
/// The kit cannot be read.
pub fn left_out(kit: &Kit, misfits: &[(&'static str, String)]) -> Result<Report, KitError> {
    let mut report = Report::default();
    tables::text(kit, &mut report)?;
    for stage in ["llm", "flow", "hift", "e2e"] {
        report.absent(stage, "all outputs");
        let own = misfits.iter().find(|(other, _)| *other == stage).or(misfits.first());
        if let (Some(line), Some((of, why))) = (report.lines.last_mut(), own) {
            line.note = if *of == stage { format!("skipped: {why}") } else { format!("skipped, as {of} is: {why}") };
        }
    }
    Ok(report)
}

/// A stage that lacks an input ends there, and says which.
fn of_what_is_there<T>(
    result: Result<T, KitError>,
    stage: &'static str,
    report: &mut Report,
) -> Result<Option<T>, KitError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(KitError::Absent { file, name }) => {
            report.absent(stage, &if file == stage { name } else { format!("{file} {name}") });
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Root mean square.
fn rms(values: &[f32]) -> f64 {
    (values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / values.len().max(1) as f64).sqrt()
}

/// Compares an optional output with an optional expectation.
fn check(report: &mut Report, kit: &Kit, at: (&'static str, &str), actual: Option<&Values>, tolerance: Tolerance) {
    let (stage, name) = at;
    match (kit.find(stage, name), actual) {
        (None, _) => report.absent(stage, name),
        (Some(expected), Some(actual)) => {
            report.compare(stage, name, &expected, &first(actual, &expected), tolerance);
        }
        (Some(expected), None) => report.not_shown(stage, name, &expected, tolerance),
    }
}

/// Kits store only the first steps of some long outputs: as many as `expected` has along the last axis.
fn first(actual: &Values, expected: &Values) -> Values {
    let (Some(&have), Some(&want)) = (actual.shape.last(), expected.shape.last()) else { return actual.clone() };
    if want >= have {
        return actual.clone();
    }
    let mut shape = actual.shape.clone();
    if let Some(last) = shape.last_mut() {
        *last = want;
    }
    let data = actual.data.chunks_exact(have).flat_map(|row| row[..want].iter().copied()).collect();
    Values { shape, data }
}

fn whole(values: impl IntoIterator<Item = u32>) -> Values {
    Values::vector(values.into_iter().map(|v| v as f32).collect())
}

/// Opens a kit and runs it on the CPU, in the modes of `hardware`.
///
/// # Errors
/// As [`run`]; or the checkpoint cannot be loaded.
pub fn run_on_cpu(dir: &Path, hardware: Hardware) -> Result<Report, KitError> {
    let kit = Kit::open(dir)?;
    let limits = limits(false, &hardware);
    let options = Options { hardware, ..options(&kit) };
    let mut backend = super::cpu::CpuBackend::load(&kit.checkpoint_dir(), options)
        .map_err(|e| KitError::Device(SynthError::Device(e.to_string())))?;
    run(&kit, &mut backend, &limits)
}

/// Largest constant of a kit's noise formula that is looked for.
const LARGEST_CONSTANT: u32 = 1 << 16;

/// The noise table a kit's vocoder outputs were made with, from its own first rows.
fn noise_of(head: &[f32]) -> SineNoise {
    let fits =
        |constant: &u32| head.iter().zip(0..).all(|(&v, i)| (v - super::noise::formula(*constant, i)).abs() < 1e-6);
    // A few values tell constants apart; a kit without any says nothing.
    let found = (0..=LARGEST_CONSTANT).find(fits).filter(|_| !head.is_empty());
    found.map_or(SineNoise::Native, SineNoise::Formula)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_that_a_device_cannot_run_are_left_out_with_a_line_each() {
        let kit = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden/cosyvoice3");
        let kit = Kit::open(&kit).expect("the kit opens");
        let report = left_out(&kit, &[("flow", "sizes do not fit".into())]).expect("runs");
        let note = |stage: &str| report.lines.iter().find(|l| l.stage == stage).map(|l| (l.pass, l.note.clone()));
        assert_eq!(note("flow"), Some((None, "skipped: sizes do not fit".into())));
        assert_eq!(note("e2e"), Some((None, "skipped, as flow is: sizes do not fit".into())));
        assert!(report.passed(), "what was compared passed: {report}");
    }

    #[test]
    fn the_constant_of_the_excitation_noise_is_read_from_a_kits_first_rows() {
        for constant in [0, 7, 11, LARGEST_CONSTANT] {
            let head: Vec<f32> = (0..72).map(|i| crate::synth::cosyvoice::noise::formula(constant, i)).collect();
            assert_eq!(noise_of(&head), SineNoise::Formula(constant));
        }
        assert_eq!(noise_of(&[]), SineNoise::Native);
        assert_eq!(noise_of(&[0.1, 0.2, 0.3, 0.4]), SineNoise::Native, "no formula at all");
    }

    /// What a stage of the GPU's working precision may give for a wave that peaks at 0.34.
    #[test]
    fn silence_and_noise_fail_where_rounding_passes() {
        let wave: Vec<f32> = (0..4800).map(|i| 0.34 * (i as f32 * 0.05).sin()).collect();
        let values = |data: Vec<f32>| Values { shape: vec![data.len()], data };
        // Noise as loud as the wave, and much softer.
        let noise = |gain: f32| {
            let mut x = 1u32;
            let mut draw = move || {
                x ^= x << 13;
                x ^= x >> 17;
                x ^= x << 5;
                gain * (x as f32 / u32::MAX as f32 - 0.5)
            };
            wave.iter().map(|_| draw()).collect::<Vec<f32>>()
        };
        let rounded: Vec<f32> = wave.iter().map(|v| (v * 2048.0).round() / 2048.0).collect();
        for (stage, limit) in WORKING {
            let passes = |data: Vec<f32>| {
                let mut report = Report::default();
                report.compare("hift", "wave", &values(wave.clone()), &values(data), Tolerance::Part(*limit));
                report.passed()
            };
            assert!(passes(rounded.clone()), "{stage}: rounding");
            for (what, data) in [("silence", vec![0.0; wave.len()]), ("noise", noise(0.8)), ("soft noise", noise(0.1))]
            {
                assert!(!passes(data), "{stage}: {what}");
            }
        }
    }
}
