//! Compares every stage of enrolment with stored reference tensors.
//!
//! Owns the list of comparisons and their tolerances. A kit is a folder with any of: `frontend.safetensors`
//! (signals and features), `frontend_cases.safetensors` (signals, features, embeddings, tokens) and the two
//! networks they were computed with (`campplus*.onnx`, `speech_tokenizer*.onnx`), of any width and depth. What a
//! kit holds is found by tensor name; nothing about sizes is known here.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, SafeTensors};

use super::campplus::{self, CamPlus, Pooling};
use super::features::{self, Matrix, TooShort};
use super::onnx::OnnxError;
use super::resample::resample;
use super::speech_tokenizer::{self, SpeechTokenizer};

/// A log energy of a filterbank so low (-50 dB of a full-scale bin) that rounding decides its digits.
const NEXT_TO_NOTHING: f32 = -11.5;

/// One comparison.
#[derive(Clone, Debug)]
pub struct Row {
    /// What was compared.
    pub name: String,
    /// Shape of the reference.
    pub shape: Vec<usize>,
    /// Largest absolute difference; for tokens, how many differ.
    pub max_abs: f64,
    /// Root of the mean squared difference.
    pub rms: f64,
    /// What `max_abs` may be.
    pub tolerance: f64,
    /// Whether it is met; `None`: the kit lacks it.
    pub pass: Option<bool>,
}

/// All comparisons of a kit.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// In the order they were made.
    pub rows: Vec<Row>,
}

impl Report {
    /// Whether every comparison passed, and there was at least one.
    pub fn passed(&self) -> bool {
        self.rows.iter().any(|r| r.pass.is_some()) && self.rows.iter().all(|r| r.pass != Some(false))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<44} {:>12} {:>10} {:>10} {:>10}  result", "tensor", "shape", "max abs", "rms", "allowed")?;
        for r in &self.rows {
            let shape = r.shape.iter().map(ToString::to_string).collect::<Vec<_>>().join("x");
            let result = match r.pass {
                Some(true) => "pass",
                Some(false) => "FAIL",
                None => "absent",
            };
            writeln!(
                f,
                "{:<44} {shape:>12} {:>10.2e} {:>10.2e} {:>10.0e}  {result}",
                r.name, r.max_abs, r.rms, r.tolerance
            )?;
        }
        let made = self.rows.iter().filter(|r| r.pass.is_some()).count();
        let failed = self.rows.iter().filter(|r| r.pass == Some(false)).count();
        writeln!(f, "{made} comparisons, {failed} failed, {} absent", self.rows.len() - made)
    }
}

/// Why a kit could not be run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SelftestError {
    /// The folder holds nothing to compare with.
    #[error("{0}: neither `frontend.safetensors` nor `frontend_cases.safetensors` is there")]
    Empty(PathBuf),
    /// A file cannot be read.
    #[error("{path}: {reason}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A network does not load.
    #[error(transparent)]
    Network(#[from] OnnxError),
    /// A network does not run.
    #[error("running a network: {0}")]
    Run(#[from] candle_core::Error),
    /// A signal of the kit is too short.
    #[error(transparent)]
    Short(#[from] TooShort),
}

/// Whether `dir` is a kit for [`run`].
pub fn is_kit(dir: &Path) -> bool {
    ["frontend.safetensors", "frontend_cases.safetensors"].iter().any(|name| dir.join(name).is_file())
}

/// Makes every comparison that the kit in `dir` allows.
///
/// # Errors
/// There is no kit, a file is malformed, or a network does not fit.
pub fn run(dir: &Path) -> Result<Report, SelftestError> {
    if !is_kit(dir) {
        return Err(SelftestError::Empty(dir.to_owned()));
    }
    let mut report = Report::default();
    let frontend = dir.join("frontend.safetensors");
    if frontend.is_file() {
        Reference::with(&frontend, |reference| compare_frontend(reference, &mut report))?;
    }
    let cases = dir.join("frontend_cases.safetensors");
    if cases.is_file() {
        let campplus = find(dir, "campplus")?.map(|p| CamPlus::load(&p)).transpose()?;
        let tokenizer = find(dir, "speech_tokenizer")?.map(|p| SpeechTokenizer::open(&p)).transpose()?;
        if campplus.is_none() {
            report.absent("campplus*.onnx");
        }
        if tokenizer.is_none() {
            report.absent("speech_tokenizer*.onnx");
        }
        Reference::with(&cases, |reference| {
            compare_resampling(reference, &mut report)?;
            for case in reference.cases() {
                compare_features(reference, &case, &mut report)?;
                if let Some(network) = &campplus {
                    compare_campplus(reference, &case, network, &mut report)?;
                }
                if let Some(network) = &tokenizer {
                    compare_tokens(reference, &case, network, &mut report)?;
                }
            }
            tokenizer.as_ref().map_or(Ok(()), |network| compare_padded(reference, network, &mut report))
        })?;
    }
    Ok(report)
}

fn compare_frontend(reference: &Reference<'_>, report: &mut Report) -> Result<(), SelftestError> {
    let wave = |name: &str| reference.f32(name).map(|(_, values)| values);
    for name in ["wav_24k", "wav_16k"] {
        if !reference.has(name) {
            report.absent(name);
        }
    }
    if let Some(wav) = wave("wav_24k") {
        report.compare(reference, "wav_16k", &resample(&wav, 24_000, 16_000), 1e-5);
        compare_beginning(reference, &wav, report);
        report.compare(reference, "mel80", &features::prompt_mel(&wav)?.transposed().data, 1e-4);
    }
    let filters = [("mel80_filters", features::MEL_RATE), ("whisper_filters", features::SPEECH_RATE)];
    for (name, rate) in filters {
        if let Some((shape, _)) = reference.f32(name)
            && let [bands, bins] = shape[..]
        {
            let ours = features::slaney_filter_matrix(rate, 2 * (bins.max(1) - 1), bands);
            report.compare(reference, name, &ours.data, 1e-7);
        }
    }
    if let Some(wav) = wave("wav_16k") {
        if let Some((shape, _)) = reference.f32("whisper128") {
            let bands = shape.iter().rev().nth(1).copied().unwrap_or(128);
            report.compare(reference, "whisper128", &features::whisper_log_mel(&wav, bands)?.data, 1e-4);
        }
        let fbank = features::kaldi_fbank(&wav)?;
        // Where a band holds next to no energy the logarithm magnifies rounding: ten times the tolerance there.
        let raw = reference.f32("fbank80").map(|(_, values)| values).unwrap_or_default();
        let loose = |i: usize, _| if raw.get(i).is_some_and(|v| *v < NEXT_TO_NOTHING) { 2e-3 } else { 2e-4 };
        report.compare_by(reference, "fbank80", &fbank.data, loose);
        report.compare_by(reference, "fbank80_cmn", &features::minus_time_mean(fbank).data, loose);
    }
    Ok(())
}

/// The beginning of the 24 kHz signal taken for one at 44.1 kHz. How long a beginning, the length of the result says
/// but for one sample.
fn compare_beginning(reference: &Reference<'_>, wav: &[f32], report: &mut Report) {
    const NAME: &str = "wav_44k1_as_24k";
    const FROM: usize = 44_100;
    let Some((_, theirs)) = reference.f32(NAME) else { return report.absent(NAME) };
    let longest = (theirs.len() * FROM / 24_000).min(wav.len());
    let made = |count: usize| resample(&wav[..count], FROM as u32, 24_000);
    let off = |ours: &[f32]| ours.iter().zip(&theirs).fold(0.0f32, |max, (a, b)| max.max((a - b).abs()));
    let ours = (longest.saturating_sub(2)..=longest).map(made).filter(|ours| ours.len() == theirs.len());
    let closest = ours.min_by(|a, b| off(a).total_cmp(&off(b)));
    report.compare(reference, NAME, &closest.unwrap_or_else(|| made(longest)), 1e-5);
}

fn compare_resampling(reference: &Reference<'_>, report: &mut Report) -> Result<(), SelftestError> {
    let stereo = reference.i16("resample.wave_44k1_stereo_i16");
    if stereo.is_none() {
        report.absent("resample.wave_44k1_stereo_i16");
    }
    if let Some((shape, stereo)) = stereo
        && let [channels, length] = shape[..]
    {
        let mono: Vec<f32> =
            (0..length).map(|t| (0..channels).map(|c| stereo[c * length + t]).sum::<f32>() / channels as f32).collect();
        for (name, rate) in [("resample.wave_16k", 16_000), ("resample.wave_24k", 24_000)] {
            report.compare(reference, name, &resample(&mono, 44_100, rate), 1e-5);
        }
    }
    if let Some((_, wave)) = reference.f32("resample.wave_24k") {
        report.compare(reference, "resample.prompt_mel_24k", &features::prompt_mel(&wave)?.data, 1e-4);
    }
    Ok(())
}

fn compare_features(reference: &Reference<'_>, case: &str, report: &mut Report) -> Result<(), SelftestError> {
    let Some(wave) = reference.wave(case) else { return Ok(()) };
    let fbank = features::minus_time_mean(features::kaldi_fbank(&wave)?);
    report.compare(reference, &format!("{case}.fbank"), &fbank.data, 5e-3);
    report.require_mean(reference, &format!("{case}.fbank"), &fbank.data, 5e-5);
    let name = format!("{case}.logmel");
    if let Some((shape, _)) = reference.f32(&name) {
        report.compare(reference, &name, &features::whisper_log_mel(&wave, shape[0])?.data, 1e-4);
    }
    Ok(())
}

fn compare_campplus(
    reference: &Reference<'_>,
    case: &str,
    network: &CamPlus,
    report: &mut Report,
) -> Result<(), SelftestError> {
    let Some(fbank) = reference.matrix(&format!("{case}.fbank")) else {
        // The features have said so.
        return Ok(());
    };
    let probes = [
        ("campplus_head", campplus::Probe::Head),
        ("campplus_tdnn", campplus::Probe::Tdnn),
        ("campplus_segpool_spec", campplus::Probe::Segments),
        ("campplus_layer1_spec", campplus::Probe::Layer1),
        ("campplus_stats_spec", campplus::Probe::Stats),
    ];
    for (part, probe) in probes {
        let name = format!("{case}.{part}");
        if reference.has(&name) {
            let ours = network.probe(&fbank, Pooling::Spec, probe)?.flatten_all()?.to_vec1::<f32>()?;
            report.compare_by(reference, &name, &ours, |_, value: f32| 1e-4 * f64::from(value.abs()).max(1.0));
        }
    }
    for (part, pooling) in [("embedding_div100", Pooling::Fixed), ("embedding_spec", Pooling::Spec)] {
        let name = format!("{case}.{part}");
        report.compare(reference, &name, &network.embed(&fbank, pooling)?, 2e-4);
        if let Some(wave) = reference.wave(case) {
            let ours = features::minus_time_mean(features::kaldi_fbank(&wave)?);
            let ours = network.embed(&ours, pooling)?;
            report.compare_as(reference, &name, &format!("{name} (from wave)"), &ours, |_, _| 5e-3);
            report.require_cosine(reference, &name, &ours, 0.99999);
        }
    }
    Ok(())
}

fn compare_tokens(
    reference: &Reference<'_>,
    case: &str,
    network: &SpeechTokenizer,
    report: &mut Report,
) -> Result<(), SelftestError> {
    use speech_tokenizer::Probe;
    let Some(mel) = reference.matrix(&format!("{case}.logmel")) else { return Ok(()) };
    let probes = [("tok_subsample", Probe::Subsampled), ("tok_block0", Probe::Block0), ("tok_proj", Probe::Projection)];
    for (part, probe) in probes {
        let name = format!("{case}.{part}");
        if reference.has(&name) {
            let ours = network.probe(&mel, mel.cols, probe)?.flatten_all()?.to_vec1::<f32>()?;
            report.compare(reference, &name, &ours, 2e-4);
        }
    }
    let name = format!("{case}.tokens");
    let Some(expected) = reference.ids(&name) else {
        report.absent(&name);
        return Ok(());
    };
    let near = reference.near_ties(&format!("{case}.tok_proj"));
    report.tokens(&name, &network.tokens(&mel)?, &expected, &near);
    if let Some(wave) = reference.wave(case) {
        let mel = features::whisper_log_mel(&wave, network.bands())?;
        report.tokens(&format!("{name} (from wave)"), &network.tokens(&mel)?, &expected, &near);
    }
    Ok(())
}

/// The padded case: a log-mel of which only the first frames count.
fn compare_padded(
    reference: &Reference<'_>,
    network: &SpeechTokenizer,
    report: &mut Report,
) -> Result<(), SelftestError> {
    let (Some(expected), Some(length)) = (reference.ids("padded.tokens"), reference.ids("padded.source_len")) else {
        report.absent("padded.tokens");
        return Ok(());
    };
    let length = length.first().map_or(0, |l| *l as usize);
    let source = reference.cases().into_iter().find_map(|case| {
        let mel = reference.matrix(&format!("{case}.logmel"))?;
        (mel.cols > length && mel.cols.div_ceil(4) == expected.len()).then_some(mel)
    });
    let Some(mel) = source else {
        report.absent("padded.tokens' source");
        return Ok(());
    };
    let count = length.div_ceil(4).min(expected.len());
    let padded = network.tokens_of(&mel, length)?;
    report.tokens("padded.tokens", &padded[..count], &expected[..count], &[]);
    let data = (0..mel.rows).flat_map(|r| mel.row(r)[..length].to_vec()).collect();
    let cut = network.tokens(&Matrix { rows: mel.rows, cols: length, data })?;
    report.tokens("padded.tokens (cut input)", &cut, &expected[..count], &[]);
    Ok(())
}

impl Report {
    fn compare(&mut self, reference: &Reference<'_>, name: &str, ours: &[f32], tolerance: f64) {
        self.compare_as(reference, name, name, ours, |_, _| tolerance);
    }

    fn compare_by(
        &mut self,
        reference: &Reference<'_>,
        name: &str,
        ours: &[f32],
        tolerance: impl Fn(usize, f32) -> f64,
    ) {
        self.compare_as(reference, name, name, ours, tolerance);
    }

    /// `tolerance` is asked for each place and its expected value.
    fn compare_as(
        &mut self,
        reference: &Reference<'_>,
        name: &str,
        label: &str,
        ours: &[f32],
        tolerance: impl Fn(usize, f32) -> f64,
    ) {
        let Some((shape, theirs)) = reference.f32(name) else {
            // Said once, not again for what else is compared with it.
            if name == label {
                self.absent(name);
            }
            return;
        };
        let same_length = ours.len() == theirs.len();
        let (mut max_abs, mut squares, mut allowed, mut pass) = (0.0_f64, 0.0, 0.0_f64, same_length);
        for (i, (a, b)) in ours.iter().zip(&theirs).enumerate() {
            let difference = (f64::from(*a) - f64::from(*b)).abs();
            pass &= difference <= tolerance(i, *b);
            max_abs = max_abs.max(difference);
            squares += difference * difference;
            allowed = allowed.max(tolerance(i, *b));
        }
        let rms = (squares / theirs.len().max(1) as f64).sqrt();
        let max_abs = if same_length { max_abs } else { f64::INFINITY };
        self.rows.push(Row { name: label.into(), shape, max_abs, rms, tolerance: allowed, pass: Some(pass) });
    }

    fn absent(&mut self, name: &str) {
        let row = Row { name: name.into(), shape: Vec::new(), max_abs: 0.0, rms: 0.0, tolerance: 0.0, pass: None };
        self.rows.push(row);
    }

    fn require_mean(&mut self, reference: &Reference<'_>, name: &str, ours: &[f32], tolerance: f64) {
        let Some((shape, theirs)) = reference.f32(name) else { return };
        let sum: f64 = ours.iter().zip(&theirs).map(|(a, b)| f64::from((a - b).abs())).sum();
        let mean = sum / theirs.len().max(1) as f64;
        let pass = mean <= tolerance && ours.len() == theirs.len();
        self.rows.push(Row {
            name: format!("{name} (mean)"),
            shape,
            max_abs: mean,
            rms: mean,
            tolerance,
            pass: Some(pass),
        });
    }

    fn require_cosine(&mut self, reference: &Reference<'_>, name: &str, ours: &[f32], least: f64) {
        let Some((shape, theirs)) = reference.f32(name) else { return };
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
        let distance = 1.0 - dot(ours, &theirs) / (dot(ours, ours) * dot(&theirs, &theirs)).sqrt();
        let (tolerance, name) = (1.0 - least, format!("{name} (from wave, 1 - cosine)"));
        let pass = Some(distance < tolerance);
        self.rows.push(Row { name, shape, max_abs: distance, rms: distance, tolerance, pass });
    }

    /// Ids must be equal, except at places of `near` where the reference itself is a near-tie.
    fn tokens(&mut self, name: &str, ours: &[u32], theirs: &[u32], near: &[bool]) {
        let differing: Vec<usize> = (0..theirs.len()).filter(|i| ours.get(*i) != theirs.get(*i)).collect();
        let excused = differing.iter().all(|i| near.get(*i).copied().unwrap_or(false));
        let max_abs = differing.len() as f64;
        let pass = Some(ours.len() == theirs.len() && excused);
        self.rows.push(Row { name: name.into(), shape: vec![theirs.len()], max_abs, rms: 0.0, tolerance: 0.0, pass });
    }
}

/// A file of reference tensors.
struct Reference<'a>(SafeTensors<'a>);

impl Reference<'_> {
    fn with<T>(path: &Path, then: impl FnOnce(&Reference<'_>) -> Result<T, SelftestError>) -> Result<T, SelftestError> {
        let failed = |reason: String| SelftestError::File { path: path.to_owned(), reason };
        let bytes = std::fs::read(path).map_err(|e| failed(e.to_string()))?;
        then(&Reference(SafeTensors::deserialize(&bytes).map_err(|e| failed(e.to_string()))?))
    }

    fn has(&self, name: &str) -> bool {
        self.0.tensor(name).is_ok()
    }

    fn f32(&self, name: &str) -> Option<(Vec<usize>, Vec<f32>)> {
        let view = self.0.tensor(name).ok().filter(|v| v.dtype() == Dtype::F32)?;
        let values = view.data().as_chunks().0.iter().map(|c| f32::from_le_bytes(*c)).collect();
        Some((view.shape().to_vec(), values))
    }

    /// Samples as fractions of full scale.
    fn i16(&self, name: &str) -> Option<(Vec<usize>, Vec<f32>)> {
        let view = self.0.tensor(name).ok().filter(|v| v.dtype() == Dtype::I16)?;
        let values = view.data().as_chunks().0.iter().map(|c| crate::audio::from_i16(i16::from_le_bytes(*c)));
        Some((view.shape().to_vec(), values.collect()))
    }

    fn ids(&self, name: &str) -> Option<Vec<u32>> {
        let view = self.0.tensor(name).ok().filter(|v| v.dtype() == Dtype::I32)?;
        Some(view.data().as_chunks().0.iter().map(|c| i32::from_le_bytes(*c).max(0).cast_unsigned()).collect())
    }

    fn matrix(&self, name: &str) -> Option<Matrix> {
        let (shape, data) = self.f32(name)?;
        let [rows, cols] = shape[..] else { return None };
        Some(Matrix { rows, cols, data })
    }

    fn wave(&self, case: &str) -> Option<Vec<f32>> {
        self.i16(&format!("{case}.wave_i16")).map(|(_, values)| values)
    }

    /// Names of the cases that have a signal.
    fn cases(&self) -> Vec<String> {
        let names: BTreeSet<&str> =
            self.0.names().into_iter().filter_map(|name| name.strip_suffix(".wave_i16")).collect();
        names.into_iter().map(str::to_owned).collect()
    }

    /// Which tokens have a value within 1e-4 of a rounding threshold.
    fn near_ties(&self, name: &str) -> Vec<bool> {
        let Some(values) = self.matrix(name) else { return Vec::new() };
        let threshold = (0.5_f32 / 0.999).atanh();
        (0..values.rows).map(|r| values.row(r).iter().any(|v| (v.abs() - threshold).abs() < 1e-4)).collect()
    }
}

/// The one `PREFIX*.onnx` of the folder, if there is one.
fn find(dir: &Path, prefix: &str) -> Result<Option<PathBuf>, SelftestError> {
    let failed = |e: std::io::Error| SelftestError::File { path: dir.to_owned(), reason: e.to_string() };
    let mut found: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        if name.to_str().is_some_and(|n| n.starts_with(prefix) && n.ends_with(".onnx")) {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found.into_iter().next())
}
