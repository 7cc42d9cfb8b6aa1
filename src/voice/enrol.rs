//! From a recording and its transcript to a [`Voice`].
//!
//! Owns the order of the steps and the conditions a recording must meet. Computes nothing itself, writes no file.
//!
//! Contract: the same recording, transcript and options give the same voice, bit for bit, on the same machine. It
//! takes seconds of CPU time; callers that serve anything else meanwhile run it on a thread of its own and give it
//! fewer threads than there are cores ([`Options::threads`]).
//!
//! # Why
//! The prompt's length is decided on the recording itself, before resampling, so that the mel (24 kHz) and the
//! tokens (16 kHz) come from the same instant and end together: two mel frames to a token, to the frame.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::campplus::{CamPlus, Pooling};
use super::decode::{self, DecodeError, Recording};
use super::features::{self, MEL_BANDS, MEL_HOP, MEL_RATE, SPEECH_HOP, SPEECH_RATE, TooShort};
use super::file::{Voice, hex};
use super::loudness;
use super::onnx::OnnxError;
use super::prompt::{self, MAX_FIRST_HOP, TOKENS};
use super::quality::{self, Activity, Facts, Quality, Script};
use super::resample::resample;
use super::speech_tokenizer::SpeechTokenizer;

/// Least speech, seconds.
pub const MIN_SPEECH: f64 = 3.0;
/// Most, from the first word to the last, seconds.
pub const MAX_SPEECH: f64 = 30.0;
/// Longest transcript, characters: far more than fits into 30 s.
pub const MAX_TRANSCRIPT: usize = 1500;
/// Longest consent text, characters.
pub const MAX_CONSENT: usize = 4000;

/// Samples at 24 kHz of one token.
const MEL_TOKEN: usize = 2 * MEL_HOP;
/// Samples at 16 kHz of one token.
const SPEECH_TOKEN: usize = 4 * SPEECH_HOP;
/// Where levelling leaves room, dB of full scale.
const PEAK_DBFS: f64 = -1.0;
/// The most that levelling raises, dB.
const MAX_GAIN_DB: f64 = 30.0;

/// How a voice is made.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Tokens before the first sound of an utterance to aim for, 8 to 15; see [`prompt`].
    pub first_hop: usize,
    /// How the speaker encoder pools.
    pub pooling: Pooling,
    /// Level that speech is brought to, dB of full scale (root mean square); `None` leaves it as it is.
    pub level_dbfs: Option<f64>,
    /// Threads for the matrix products, which are most of the work; 0: one a core. Element-wise work is spread by
    /// `candle` over a pool of its own, whose size only `CANDLE_NUM_THREADS` changes.
    pub threads: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { first_hop: 8, pooling: Pooling::Fixed, level_dbfs: Some(-20.0), threads: 0 }
    }
}

/// What a voice is made of.
#[derive(Clone, Debug)]
pub struct Request {
    /// A recording in any format of [`decode`].
    pub recording: Vec<u8>,
    /// What is said in it, word for word.
    pub transcript: String,
    /// By what right the voice is used, in the words of who gave it.
    pub consent: Option<String>,
    /// BCP 47 tags of what the voice speaks; empty: guessed from the script where that is possible.
    pub languages: Vec<String>,
    /// When, since the Unix epoch.
    pub now: Duration,
}

/// A voice and what to think of it.
#[derive(Clone, Debug)]
pub struct Enrolled {
    /// The voice.
    pub voice: Voice,
    /// The recording's quality, with advice.
    pub quality: Quality,
    /// Tokens before the first sound of an utterance.
    pub first_hop: usize,
}

/// Why no voice was made. Every message says what to change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnrolError {
    /// The transcript cannot be used.
    #[error("{0}")]
    Transcript(String),
    /// The consent text cannot be used.
    #[error("the consent text has more than {MAX_CONSENT} characters")]
    Consent,
    /// A language tag cannot be used.
    #[error("`{0}` is no language tag such as `en` or `pt-BR`")]
    Language(String),
    /// The options cannot be met.
    #[error("a first hop of {0} tokens is not possible; 8 to {MAX_FIRST_HOP} are useful")]
    FirstHop(usize),
    /// The recording cannot be decoded.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// Nothing is said in it.
    #[error("the recording is silent; check the microphone or the file")]
    Silent,
    /// Too little is said in it.
    #[error("the recording holds {seconds:.1} s of speech, at least {MIN_SPEECH:.0} s are needed (8 to 15 s are best)")]
    TooShort {
        /// Seconds of speech.
        seconds: f64,
    },
    /// Too much is said in it.
    #[error(
        "the speech lasts {seconds:.1} s, at most {MAX_SPEECH:.0} s are taken; cut the recording, and the transcript with it"
    )]
    TooLong {
        /// Seconds from the first to the last speech.
        seconds: f64,
    },
    /// The checkpoint has no enrolment networks.
    #[error("{dir}: no `{file}` there; enrolment needs it from the CosyVoice3 checkpoint")]
    Missing {
        /// Where it was looked for.
        dir: PathBuf,
        /// What.
        file: &'static str,
    },
    /// A network cannot be read.
    #[error(transparent)]
    Network(#[from] OnnxError),
    /// A network failed.
    #[error("computing the voice failed: {0}")]
    Compute(String),
}

impl From<candle_core::Error> for EnrolError {
    fn from(error: candle_core::Error) -> Self {
        Self::Compute(error.to_string())
    }
}

impl From<TooShort> for EnrolError {
    fn from(error: TooShort) -> Self {
        Self::Compute(error.to_string())
    }
}

/// The two networks of a checkpoint, checked and ready.
pub struct Enroller {
    campplus: PathBuf,
    tokenizer: SpeechTokenizer,
}

impl Enroller {
    /// Finds `campplus*.onnx` and `speech_tokenizer*.onnx` in a checkpoint directory and checks that every
    /// parameter is there. Keeps the larger one mapped; weights are read when a voice is made.
    ///
    /// # Errors
    /// A file is missing, or is not the network it should be.
    pub fn open(dir: &Path) -> Result<Self, EnrolError> {
        let find = |prefix: &str, file| {
            let missing = || EnrolError::Missing { dir: dir.to_owned(), file };
            let exact = dir.join(file);
            if exact.is_file() {
                return Ok(exact);
            }
            let entries = std::fs::read_dir(dir).map_err(|_| missing())?;
            let fits = |p: &PathBuf| {
                p.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.starts_with(prefix) && n.ends_with(".onnx"))
            };
            entries.filter_map(|e| Some(e.ok()?.path())).filter(fits).min().ok_or_else(missing)
        };
        let campplus = find("campplus", "campplus.onnx")?;
        let tokenizer = SpeechTokenizer::open(&find("speech_tokenizer", "speech_tokenizer_v3.onnx")?)?;
        CamPlus::load(&campplus)?;
        Ok(Self { campplus, tokenizer })
    }

    /// Makes a voice.
    ///
    /// # Errors
    /// Anything about the request that must change, or a failure of a network.
    pub fn enrol(&self, request: Request, options: &Options) -> Result<Enrolled, EnrolError> {
        self.enrol_telling(request, options, &|_| ())
    }

    /// As [`Enroller::enrol`]; `tell` hears now and then what share of the work is done.
    ///
    /// # Errors
    /// As [`Enroller::enrol`].
    pub fn enrol_telling(
        &self,
        request: Request,
        options: &Options,
        tell: &(dyn Fn(f64) + Sync),
    ) -> Result<Enrolled, EnrolError> {
        let transcript = check_transcript(&request.transcript)?;
        check_words(&request, options)?;
        let source = hex(&Sha256::digest(&request.recording));
        let recording = decode::decode(request.recording)?;
        let activity = speech_in(&recording)?;
        let length = recording.samples.len();
        let window = prompt::window(length, recording.rate, &activity.span, options.first_hop)
            .ok_or(EnrolError::TooShort { seconds: activity.seconds })?;
        let gain = options.level_dbfs.map_or(1.0, |level| gain(&activity, level));
        let samples: Vec<f32> = recording.samples[window.samples.clone()].iter().map(|s| s * gain).collect();
        let at = |rate, samples_of_token: usize| {
            let mut wave = resample(&samples, recording.rate, rate);
            wave.truncate(window.tokens * samples_of_token);
            wave
        };
        let (wave, speech) = (at(MEL_RATE, MEL_TOKEN), at(SPEECH_RATE, SPEECH_TOKEN));

        let (tokens, speaker) = on_threads(options.threads, || self.compute(&speech, options.pooling, tell))??;
        let mel = features::prompt_mel(&wave)?;
        if tokens.len() != window.tokens || mel.rows != 2 * window.tokens {
            let (frames, tokens, wanted) = (mel.rows, tokens.len(), window.tokens);
            return Err(EnrolError::Compute(format!(
                "{frames} mel frames and {tokens} tokens, expected {wanted} tokens"
            )));
        }
        let seconds = |samples: usize| samples as f64 / f64::from(recording.rate);
        let facts = Facts {
            rate: recording.rate,
            clipped: recording.clipped,
            cancels: recording.cancels,
            damaged_packets: recording.damaged_packets,
            voiced: quality::voiced_share(&speech),
            transcript: &transcript,
            prompt_seconds: window.tokens as f64 / TOKENS as f64,
            cut_seconds: seconds(window.cut),
            first_hop: (window.first_hop(), options.first_hop),
        };
        let quality = quality::assess(&activity, &facts);
        let mut notes = notes(&recording, &quality, options, source);
        let languages = if request.languages.is_empty() { guess(&quality) } else { request.languages };
        if let Some(loudness) = loudness::measure(&wave, MEL_RATE) {
            notes.insert(LOUDNESS.into(), format!("{loudness:.2}"));
        }
        if !languages.is_empty() {
            notes.insert("languages".into(), languages.join(","));
        }
        let created = rfc3339(request.now);
        if let Some(consent) = request.consent.filter(|c| !c.trim().is_empty()) {
            notes.insert("consent".into(), consent);
            notes.insert("consent_date".into(), created.clone());
        }
        notes.insert("created".into(), created);
        let voice = Voice { transcript, tokens, mel: mel.data, mel_bins: MEL_BANDS, speaker, notes };
        Ok(Enrolled { voice, quality, first_hop: window.first_hop() })
    }

    /// Tokens and speaker vector of sound at 16 kHz.
    fn compute(
        &self,
        speech: &[f32],
        pooling: Pooling,
        tell: &dyn Fn(f64),
    ) -> Result<(Vec<u32>, Vec<f32>), EnrolError> {
        let mel = features::whisper_log_mel(speech, self.tokenizer.bands())?;
        let tokens = self.tokenizer.tokens_telling(&mel, &|share| tell(TOKENIZING * share))?;
        let fbank = features::minus_time_mean(features::kaldi_fbank(speech)?);
        let speaker = CamPlus::load(&self.campplus)?.embed(&fbank, pooling)?;
        if speaker.iter().any(|v| !v.is_finite()) {
            return Err(EnrolError::Compute("the speaker vector holds values that are no numbers".into()));
        }
        tell(1.0);
        Ok((tokens, speaker))
    }
}

/// Share of the work that the tokens take; the speaker vector takes the rest (15 s of speech, two cores).
const TOKENIZING: f64 = 0.9;

/// Runs `work` on a pool of its own, or on the process's when `threads` is 0.
fn on_threads<T: Send>(threads: usize, work: impl FnOnce() -> T + Send) -> Result<T, EnrolError> {
    if threads == 0 {
        return Ok(work());
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("enrol-{i}")).build();
    Ok(pool.map_err(|e| EnrolError::Compute(e.to_string()))?.install(work))
}

fn check_transcript(transcript: &str) -> Result<String, EnrolError> {
    let transcript = transcript.split_whitespace().collect::<Vec<_>>().join(" ");
    let wrong = |reason: String| Err(EnrolError::Transcript(reason));
    let characters = transcript.chars().count();
    if quality::spoken(&transcript).units == 0 {
        return wrong("the transcript is empty; write down word for word what is said in the recording".into());
    }
    if characters > MAX_TRANSCRIPT {
        return wrong(format!("the transcript has {characters} characters, at most {MAX_TRANSCRIPT} are taken"));
    }
    if transcript.contains("<|") || transcript.contains("|>") {
        return wrong(
            "the transcript contains `<|` or `|>`, which are control marks of the model; leave them out".into(),
        );
    }
    if let Some(c) = transcript.chars().find(|c| c.is_control()) {
        return wrong(format!("the transcript contains the control character {c:?}"));
    }
    Ok(transcript)
}

fn check_words(request: &Request, options: &Options) -> Result<(), EnrolError> {
    if request.consent.as_ref().is_some_and(|c| c.chars().count() > MAX_CONSENT) {
        return Err(EnrolError::Consent);
    }
    for tag in &request.languages {
        let fits = |part: &str| (1..=8).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_alphanumeric());
        if tag.len() > 35 || !tag.split('-').all(fits) {
            return Err(EnrolError::Language(tag.chars().take(40).collect()));
        }
    }
    if !(1..=prompt::BLOCK).contains(&options.first_hop) {
        return Err(EnrolError::FirstHop(options.first_hop));
    }
    Ok(())
}

fn speech_in(recording: &Recording) -> Result<Activity, EnrolError> {
    let activity = quality::activity(&recording.samples, recording.rate).ok_or(EnrolError::Silent)?;
    // Half a frame of the analysis: three seconds to the sample are enough.
    if activity.seconds + 0.01 < MIN_SPEECH {
        return Err(EnrolError::TooShort { seconds: activity.seconds });
    }
    let seconds = activity.span.len() as f64 / f64::from(recording.rate);
    if seconds > MAX_SPEECH {
        return Err(EnrolError::TooLong { seconds });
    }
    Ok(activity)
}

/// The note that says how loud the prompt is, in LUFS: what is spoken in the voice is about as loud.
pub const LOUDNESS: &str = "loudness";

/// Factor that brings speech to `level`, as far as its peak allows.
fn gain(activity: &Activity, level: f64) -> f32 {
    let wanted = (level - activity.level_dbfs).min(MAX_GAIN_DB).min(PEAK_DBFS - activity.peak_dbfs);
    10.0_f64.powf(wanted / 20.0) as f32
}

fn notes(recording: &Recording, quality: &Quality, options: &Options, source: String) -> BTreeMap<String, String> {
    let pooling = match options.pooling {
        Pooling::Fixed => "fixed",
        Pooling::Spec => "spec",
    };
    let mut notes = BTreeMap::from([
        ("source_sha256".to_owned(), source),
        ("source_format".to_owned(), recording.container.to_owned()),
        ("source_rate".to_owned(), recording.rate.to_string()),
        ("sample_rate".to_owned(), MEL_RATE.to_string()),
        ("pooling".to_owned(), pooling.to_owned()),
    ]);
    if let Ok(quality) = serde_json::to_string(quality) {
        notes.insert("quality".into(), quality);
    }
    notes
}

/// Scripts that tell the language. Chinese characters alone may be Japanese, but seldom are for a whole sentence.
fn guess(quality: &Quality) -> Vec<String> {
    let tag = match quality.transcript.script {
        Script::Han => "zh",
        Script::Kana => "ja",
        Script::Hangul => "ko",
        Script::Letters => return Vec::new(),
    };
    vec![tag.to_owned()]
}

/// A time since the Unix epoch as RFC 3339, to the second, in UTC.
pub fn rfc3339(time: Duration) -> String {
    let (days, second) = (time.as_secs() / 86_400, time.as_secs() % 86_400);
    // Days since 0000-03-01: years then end with their leap day. 719,468 days lie between that and 1970.
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = if month < 10 { (year, month + 3) } else { (year + 1, month - 9) };
    let year = year + era * 400;
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", second / 3600, second / 60 % 60, second % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let cases = [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ];
        for (seconds, date) in cases {
            assert_eq!(rfc3339(Duration::from_secs(seconds)), date);
        }
    }

    #[test]
    fn transcripts_are_tidied_or_refused() {
        assert_eq!(check_transcript("  one\n two ").expect("fine"), "one two");
        for bad in ["", " . ", "[breath]", "a<|endofprompt|>b", "a\u{7}b", &"long ".repeat(400)] {
            assert!(check_transcript(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn levelling_stops_at_the_peak_and_at_its_limit() {
        let activity =
            |level_dbfs, peak_dbfs| Activity { span: 0..1, seconds: 5.0, level_dbfs, noise_dbfs: None, peak_dbfs };
        let decibel = |a: &Activity| 20.0 * f64::from(gain(a, -20.0)).log10();
        assert!((decibel(&activity(-35.0, -20.0)) - 15.0).abs() < 1e-3);
        assert!((decibel(&activity(-35.0, -6.0)) - 5.0).abs() < 1e-3);
        assert!((decibel(&activity(-70.0, -60.0)) - 30.0).abs() < 1e-3);
        assert!((decibel(&activity(-10.0, 0.0)) + 10.0).abs() < 1e-3);
    }
}
