//! How long enrolment takes and how much memory it needs.
//!
//! Owns the measurement; computes nothing of its own. Without a checkpoint it measures randomly initialised
//! networks of full size: the work is the same.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::decode::Recording;
use super::enrol::{EnrolError, Enroller, Options, Request};
use super::random::{self, CamPlusSize, TokenizerSize};
use crate::clock;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Config {
    /// Lengths of speech, seconds, 3 to 30.
    pub seconds: Vec<u32>,
    /// A checkpoint directory; `None` writes networks of full size into `scratch` and removes them after.
    pub model: Option<PathBuf>,
    /// Where to write them: about 1 GB.
    pub scratch: PathBuf,
    /// Threads to compute on; 0: one a core.
    pub threads: usize,
}

/// One length.
#[derive(Clone, Debug, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Row {
    /// Seconds of speech.
    pub seconds: u32,
    /// Tokens of the voice.
    pub tokens: usize,
    /// Recording to voice.
    pub took: Duration,
    /// Processor time of all threads meanwhile: what `took` would be on one idle core. `None` where the system
    /// does not tell.
    pub cpu: Option<Duration>,
    /// The most memory that the process held meanwhile, pages of the mapped file included; bytes. `None` where
    /// the system does not tell.
    pub peak: Option<u64>,
}

/// What was measured.
#[derive(Clone, Debug, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Threads.
    pub threads: usize,
    /// Opening and checking both networks.
    pub open: Duration,
    /// By length.
    pub rows: Vec<Row>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "enrolment on {} threads; networks opened in {:.2} s", self.threads, self.open.as_secs_f64())?;
        writeln!(
            f,
            "{:>8} {:>7} {:>9} {:>9} {:>12} {:>10}",
            "speech s", "tokens", "took s", "cpu s", "x real time", "peak MiB"
        )?;
        for row in &self.rows {
            let took = row.took.as_secs_f64();
            let cpu = row.cpu.map_or("-".into(), |c| format!("{:.2}", c.as_secs_f64()));
            let peak = row.peak.map_or("-".into(), |p| (p >> 20).to_string());
            let factor = f64::from(row.seconds) / took;
            writeln!(f, "{:>8} {:>7} {took:>9.2} {cpu:>9} {factor:>12.2} {peak:>10}", row.seconds, row.tokens)?;
        }
        Ok(())
    }
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// The networks cannot be written.
    #[error("{path}: {source}")]
    Scratch {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Enrolment failed.
    #[error(transparent)]
    Enrol(#[from] EnrolError),
}

/// Measures.
///
/// # Errors
/// The networks cannot be written or do not run.
pub fn run(config: &Config) -> Result<Report, BenchError> {
    let scratch = match &config.model {
        Some(_) => None,
        None => Some(Scratch::write(&config.scratch)?),
    };
    let dir = scratch.as_ref().map(|s| s.0.as_path()).or(config.model.as_deref()).unwrap_or(Path::new("."));
    let start = clock::now();
    let enroller = Enroller::open(dir)?;
    let open = clock::now().saturating_duration_since(start);
    let options = Options { threads: config.threads, ..Options::default() };
    let mut rows = Vec::new();
    for seconds in &config.seconds {
        let request = Request {
            recording: wav(&speech(*seconds)),
            transcript: "Words that nobody said, as many as there is time for. ".repeat(*seconds as usize / 4 + 1),
            consent: None,
            languages: Vec::new(),
            now: Duration::ZERO,
        };
        reset_peak();
        let (start, cpu_before) = (clock::now(), clock::cpu());
        let enrolled = enroller.enrol(request, &options)?;
        let took = clock::now().saturating_duration_since(start);
        let cpu = clock::cpu().zip(cpu_before).map(|(after, before)| after.saturating_sub(before));
        rows.push(Row { seconds: *seconds, tokens: enrolled.voice.tokens.len(), took, cpu, peak: peak() });
    }
    let cores = std::thread::available_parallelism().map_or(1, Into::into);
    Ok(Report { threads: if config.threads == 0 { cores } else { config.threads }, open, rows })
}

/// A vowel-like sound that swells and fades four times a second, a little silence around it.
pub fn speech(seconds: u32) -> Recording {
    let rate = 24_000;
    let silence = rate as usize / 5;
    let mut samples = vec![0.0; silence];
    let mut phase = 0.0_f32;
    for i in 0..seconds * rate {
        let t = i as f32 / rate as f32;
        phase += std::f32::consts::TAU * (130.0 + 25.0 * (t * 3.0).sin()) / rate as f32;
        let harmonics: f32 = (1..24_u8).map(|k| (phase * f32::from(k)).sin() / f32::from(k)).sum();
        samples.push(0.12 * harmonics * (0.65 + 0.35 * (t * std::f32::consts::TAU * 4.0).sin()));
        phase %= std::f32::consts::TAU;
    }
    samples.extend(vec![0.0; silence]);
    Recording { rate, channels: 1, samples, clipped: 0.0, cancels: false, damaged_packets: 0, container: "wav" }
}

/// A recording as 16-bit wav.
pub fn wav(recording: &Recording) -> Vec<u8> {
    let spec = hound::WavSpec {
        channels: 1,
        sample_rate: recording.rate,
        bits_per_sample: 16,
        sample_format: hound::SampleFormat::Int,
    };
    let mut out = io::Cursor::new(Vec::new());
    let mut writer = hound::WavWriter::new(&mut out, spec).expect("memory takes any header");
    for sample in &recording.samples {
        writer.write_sample(crate::audio::to_i16(*sample)).expect("memory takes any sample");
    }
    writer.finalize().expect("memory can be sought in");
    out.into_inner()
}

/// A folder with networks of full size, removed when it is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn write(parent: &Path) -> Result<Self, BenchError> {
        let path = parent.join(format!("antiphon-enrol-{}", std::process::id()));
        let failed = |source| BenchError::Scratch { path: path.clone(), source };
        fs::create_dir_all(&path).map_err(failed)?;
        let scratch = Self(path.clone());
        random::write_campplus(&path, &CamPlusSize::full(), 1).map_err(failed)?;
        random::write_tokenizer(&path, &TokenizerSize::full(), 2).map_err(failed)?;
        Ok(scratch)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A folder of temporary files that cannot be removed is the system's to clean.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The most memory this process held since the last reset, bytes (Linux).
fn peak() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// Starts the measurement of [`peak`] anew, where the system lets us; else it is the peak since the start.
fn reset_peak() {
    let _ = fs::write("/proc/self/clear_refs", "5");
}
