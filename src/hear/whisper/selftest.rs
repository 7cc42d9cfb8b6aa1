//! Compares every stage with the tensors of a kit: a checkpoint directory that also holds `golden.safetensors` and
//! `audio.wav`, computed by the reference implementation.
//!
//! What a kit holds is found by tensor name; nothing about sizes is known here. Tolerances are absolute and leave
//! the reference's own rounding (double against single precision) a factor of ten. Tokens must be equal in every
//! precision.

use std::path::{Path, PathBuf};

use candle_core::Tensor;
use safetensors::tensor::{Dtype, SafeTensors};

use super::engine::Engine;
use super::features::log_mel;
use super::rules::{likeliest, suppress};
use super::stop::Stop;
use super::{HearError, LoadError, Whisper};
use crate::voice::features::Matrix;
pub use crate::voice::selftest::{Report, Row};

/// The file of expected tensors.
const GOLDEN: &str = "golden.safetensors";
/// The file of sound.
const SOUND: &str = "audio.wav";

const FEATURES: f64 = 2e-4;
const WEIGHTS: f64 = 1e-4;

/// What states and scores may be off by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerances {
    /// States of the encoder.
    pub states: f64,
    /// Scores behind given states.
    pub scores: f64,
    /// From sound to scores.
    pub whole: f64,
}

impl Tolerances {
    /// In single precision.
    pub const EXACT: Self = Self { states: 5e-5, scores: 2e-4, whole: 5e-4 };
    /// With operands of half precision, whose 11 bits make each product of values near one wrong by some 5e-4; scores of
    /// the kit deviate by 4.8.
    pub const WORKING: Self = Self { states: 1e-2, scores: 5e-2, whole: 5e-2 };
}

/// Why a kit could not be run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SelftestError {
    /// A file cannot be read, or its tensors contradict each other.
    #[error("{path}: {reason}")]
    Kit {
        /// Which.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The checkpoint cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The network does not run.
    #[error(transparent)]
    Run(#[from] HearError),
}

impl From<candle_core::Error> for SelftestError {
    fn from(error: candle_core::Error) -> Self {
        Self::Run(error.into())
    }
}

/// Whether `dir` is a kit for [`run`].
pub fn is_kit(dir: &Path) -> bool {
    dir.join(GOLDEN).is_file() && super::is_checkpoint(dir)
}

/// Makes every comparison that the kit in `dir` allows.
///
/// # Errors
/// A file is malformed, or the network does not run.
pub fn run(dir: &Path) -> Result<Report, SelftestError> {
    run_on(&Whisper::load(dir)?, dir, Tolerances::EXACT)
}

/// As [`run`], with the checkpoint of `dir` loaded already, wherever it computes. What cannot be seen there is left out.
///
/// # Errors
/// As [`run`].
pub fn run_on(whisper: &Whisper, dir: &Path, tolerances: Tolerances) -> Result<Report, SelftestError> {
    let path = dir.join(GOLDEN);
    let kit = |reason: String| SelftestError::Kit { path: path.clone(), reason };
    let bytes = std::fs::read(&path).map_err(|e| kit(e.to_string()))?;
    let golden = Golden(SafeTensors::deserialize(&bytes).map_err(|e| kit(e.to_string()))?);
    let mut test = Test { whisper, golden: &golden, tolerances, report: Report::default() };
    let states = test.features_and_states(&dir.join(SOUND))?;
    if let Some(states) = states {
        test.scores(&states)?;
        test.tokens(&states)?;
    }
    Ok(test.report)
}

struct Test<'a> {
    whisper: &'a Whisper,
    golden: &'a Golden<'a>,
    tolerances: Tolerances,
    report: Report,
}

impl<'a> Test<'a> {
    /// Features of the sound and states of the encoder; gives the kit's states.
    fn features_and_states(&mut self, sound: &Path) -> Result<Option<Vec<f32>>, SelftestError> {
        let engine = self.engine();
        let sizes = &self.whisper.config.sizes;
        let frames = sizes.frames();
        let mut heard = None;
        match read_sound(sound)? {
            Some(samples) => {
                let ours =
                    log_mel(&samples, sizes.num_mel_bins, self.whisper.config.window).map_err(HearError::from)?;
                self.sound(&ours);
                heard = engine.states(ours, &Stop::default())?;
            }
            None => self.absent(SOUND),
        }
        if let (Some((shape, features)), Some((_, pad))) =
            (self.golden.floats("input_features"), self.golden.floats("input_features_pad_value"))
            && let ([bands, known], [pad]) = (&shape[..], &pad[..])
        {
            let value = |frame: usize, band: usize| match frame < *known {
                true => features[band * known + frame],
                false => *pad,
            };
            let data = (0..frames).flat_map(|frame| (0..*bands).map(move |band| value(frame, band))).collect();
            let stored = Matrix { rows: frames, cols: *bands, data };
            if let Some(states) = engine.states(stored, &Stop::default())? {
                self.compare("encoder_output", "encoder_output (stored features)", &states, self.tolerances.states);
            }
        }
        if let Some(states) = &heard {
            self.compare("encoder_output", "encoder_output (from sound)", states, 2.0 * self.tolerances.states);
            if let Some(forced) = self.golden.ids("forced_tokens") {
                let scores = engine.about(states)?.each(&forced)?;
                self.compare("decoder_logits", "decoder_logits (from sound)", &scores, self.tolerances.whole);
            }
        }
        let Some((_, states)) = self.golden.floats("encoder_output") else {
            self.absent("encoder_output");
            return Ok(None);
        };
        Ok(Some(states))
    }

    fn engine(&self) -> &'a dyn Engine {
        &*self.whisper.engine
    }

    /// The features of the sound, the beginning of which the kit holds.
    fn sound(&mut self, ours: &Matrix) {
        let known = self.golden.floats("input_features").and_then(|(shape, _)| shape.get(1).copied()).unwrap_or(0);
        let known = known.min(ours.rows);
        let by_band = (0..ours.cols).flat_map(|band| (0..known).map(move |frame| ours.data[frame * ours.cols + band]));
        self.compare("input_features", "input_features", &by_band.collect::<Vec<_>>(), FEATURES);
        if let Some((_, pad)) = self.golden.floats("input_features_pad_value")
            && let [pad] = pad[..]
        {
            let rest = &ours.data[known * ours.cols..];
            self.compare_with(
                &vec![pad; rest.len()],
                vec![ours.rows - known, ours.cols],
                "silent features",
                rest,
                FEATURES,
            );
        }
    }

    /// Scores and attention over given tokens, in one pass and token by token.
    fn scores(&mut self, states: &[f32]) -> Result<(), SelftestError> {
        let Some(forced) = self.golden.ids("forced_tokens") else {
            self.absent("forced_tokens");
            return Ok(());
        };
        let mut text = self.engine().about(states)?;
        let (scores, seen) = text.watched(&forced)?;
        let tolerance = self.tolerances.scores;
        self.compare("decoder_logits", "decoder_logits (one pass)", &scores, tolerance);
        text.rewind(0)?;
        let mut single = Vec::new();
        for token in &forced {
            single.extend(text.next(&[*token])?);
        }
        self.compare("decoder_logits", "decoder_logits (with cache)", &single, tolerance);
        match seen {
            Some(seen) => self.attention(&seen),
            None => {
                for name in ["cross_attn_max", "cross_attn_second", "cross_attn_argmax"] {
                    self.absent(name);
                }
                Ok(())
            }
        }
    }

    fn attention(&mut self, seen: &[Tensor]) -> Result<(), SelftestError> {
        let (mut places, mut first, mut second) = (Vec::new(), Vec::new(), Vec::new());
        for layer in seen {
            for row in layer.flatten_to(1)?.to_vec2::<f32>()? {
                let (place, most) = row.iter().enumerate().fold((0, f32::NEG_INFINITY), |best, (at, weight)| {
                    if *weight > best.1 { (at, *weight) } else { best }
                });
                let others = row.iter().enumerate().filter(|(at, _)| *at != place).map(|(_, weight)| *weight);
                places.push(place as u32);
                first.push(most);
                second.push(others.fold(f32::NEG_INFINITY, f32::max));
            }
        }
        self.compare("cross_attn_max", "cross_attn_max", &first, WEIGHTS);
        self.compare("cross_attn_second", "cross_attn_second", &second, WEIGHTS);
        let clear = match (self.golden.floats("cross_attn_max"), self.golden.floats("cross_attn_second")) {
            (Some((_, first)), Some((_, second))) => {
                first.iter().zip(&second).map(|(a, b)| f64::from(a - b) > WEIGHTS).collect()
            }
            _ => Vec::new(),
        };
        self.ids("cross_attn_argmax", &places, &clear);
        Ok(())
    }

    /// Texts by the likeliest token, with and without the checkpoint's rules.
    fn tokens(&mut self, states: &[f32]) -> Result<(), SelftestError> {
        let Some(prompt) = self.golden.ids("prompt_tokens") else {
            self.absent("prompt_tokens");
            return Ok(());
        };
        let tokens = &self.whisper.tokens;
        let given = prompt.get(1).copied().filter(|id| tokens.languages.values().any(|known| known == id));
        let timestamps = !prompt.contains(&tokens.no_timestamps);
        let ours: Vec<u32> = [tokens.start].into_iter().chain(tokens.prompt(given, timestamps)).collect();
        self.ids("prompt_tokens", &ours, &[]);
        for (name, ruled) in [("greedy_tokens", false), ("ruled_tokens", true)] {
            let Some(expected) = self.golden.ids(name) else {
                self.absent(name);
                continue;
            };
            let mut text = self.engine().about(states)?;
            let mut scores = text.next(&prompt)?;
            let mut written = Vec::new();
            while written.len() < expected.len() {
                if ruled {
                    suppress(&mut scores, tokens, written.is_empty());
                }
                let (token, _) = likeliest(&scores);
                written.push(token);
                if ruled && token == tokens.end {
                    // The reference fills up what it stopped short of.
                    written.resize(expected.len(), tokens.end);
                }
                if written.len() < expected.len() {
                    scores = text.next(&[token])?;
                }
            }
            self.ids(name, &written, &[]);
        }
        Ok(())
    }

    fn compare(&mut self, name: &str, label: &str, ours: &[f32], tolerance: f64) {
        match self.golden.floats(name) {
            Some((shape, theirs)) => self.compare_with(&theirs, shape, label, ours, tolerance),
            None => self.absent(label),
        }
    }

    fn compare_with(&mut self, theirs: &[f32], shape: Vec<usize>, label: &str, ours: &[f32], tolerance: f64) {
        let same = ours.len() == theirs.len();
        let (mut max_abs, mut squares) = (0.0_f64, 0.0);
        for (a, b) in ours.iter().zip(theirs) {
            let difference = (f64::from(*a) - f64::from(*b)).abs();
            // A value that is no number is wrong, and must not be lost in a maximum.
            max_abs = if difference.is_nan() { f64::INFINITY } else { max_abs.max(difference) };
            squares += difference * difference;
        }
        let rms = (squares / theirs.len().max(1) as f64).sqrt();
        let pass = Some(same && max_abs <= tolerance);
        let max_abs = if same { max_abs } else { f64::INFINITY };
        self.report.rows.push(Row { name: label.into(), shape, max_abs, rms, tolerance, pass });
    }

    /// Ids must be equal; where `clear` is given, only where it is set.
    fn ids(&mut self, name: &str, ours: &[u32], clear: &[bool]) {
        let Some(theirs) = self.golden.ids(name) else { return self.absent(name) };
        let counts = |at: &usize| clear.get(*at).copied().unwrap_or(true);
        let differing = (0..theirs.len()).filter(counts).filter(|at| ours.get(*at) != theirs.get(*at)).count();
        let pass = Some(ours.len() == theirs.len() && differing == 0);
        let shape = self.golden.shape(name);
        self.report.rows.push(Row {
            name: name.into(),
            shape,
            max_abs: differing as f64,
            rms: 0.0,
            tolerance: 0.0,
            pass,
        });
    }

    fn absent(&mut self, name: &str) {
        let row = Row { name: name.into(), shape: Vec::new(), max_abs: 0.0, rms: 0.0, tolerance: 0.0, pass: None };
        self.report.rows.push(row);
    }
}

/// The expected tensors.
struct Golden<'a>(SafeTensors<'a>);

impl Golden<'_> {
    fn floats(&self, name: &str) -> Option<(Vec<usize>, Vec<f32>)> {
        let view = self.0.tensor(name).ok().filter(|view| view.dtype() == Dtype::F32)?;
        let values = view.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        Some((view.shape().to_vec(), values))
    }

    fn ids(&self, name: &str) -> Option<Vec<u32>> {
        let view = self.0.tensor(name).ok().filter(|view| view.dtype() == Dtype::I64)?;
        let ids = view.data().as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes));
        // What is no id equals none of ours.
        Some(ids.map(|id| u32::try_from(id).unwrap_or(u32::MAX)).collect())
    }

    fn shape(&self, name: &str) -> Vec<usize> {
        self.0.tensor(name).map(|view| view.shape().to_vec()).unwrap_or_default()
    }
}

/// Samples of a 16-bit mono file at 16 kHz; `None` when there is none.
fn read_sound(path: &Path) -> Result<Option<Vec<f32>>, SelftestError> {
    if !path.is_file() {
        return Ok(None);
    }
    let failed = |reason: String| SelftestError::Kit { path: path.to_owned(), reason };
    let reader = hound::WavReader::open(path).map_err(|e| failed(e.to_string()))?;
    let spec = reader.spec();
    if (spec.channels, spec.sample_rate, spec.bits_per_sample) != (1, super::RATE as u32, 16) {
        return Err(failed("expected mono of 16 bits at 16 kHz".into()));
    }
    let samples = reader.into_samples::<i16>().map(|sample| sample.map(crate::audio::from_i16));
    samples.collect::<Result<Vec<_>, _>>().map(Some).map_err(|e| failed(e.to_string()))
}
