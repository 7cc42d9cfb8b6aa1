//! `antiphon voice add|list|rm`.
//!
//! Owns what these commands print and how they exit: 0 done, 1 ran and failed, 2 the arguments are wrong, 69 the
//! checkpoint is not there. Reads no configuration: the caller passes the folders that apply.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use super::api::tags;
use super::campplus::Pooling;
use super::decode::{DecodeError, MAX_BYTES};
use super::enrol::{EnrolError, Enrolled, Enroller, Options, Request};
use super::store::{Entry, Store, StoreError, VoiceName};

const DONE: u8 = 0;
const FAILED: u8 = 1;
const USAGE: u8 = 2;
const UNAVAILABLE: u8 = 69;

/// Enrol, list and remove voices.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Enrol a voice from 3 to 30 s of speech and its transcript.
    Add(Add),
    /// List the enrolled voices.
    List(List),
    /// Remove a voice.
    Rm(Remove),
}

/// Arguments of `voice add`.
#[derive(Debug, clap::Args)]
pub struct Add {
    /// Name of the voice.
    pub name: String,
    /// Recording: wav, flac, mp3, m4a, ogg or webm.
    #[arg(long, value_name = "FILE")]
    pub wav: PathBuf,
    /// What is said in the recording, word for word.
    #[arg(long, value_name = "TRANSCRIPT")]
    pub text: String,
    /// By what right the voice is used; stored with it, and the date.
    #[arg(long, value_name = "TEXT")]
    pub consent: Option<String>,
    /// What the voice speaks: tags such as `en` or `pt-BR`, comma-separated.
    #[arg(long, value_name = "TAGS")]
    pub languages: Option<String>,
    /// CosyVoice3 checkpoint directory.
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Folder of the voices.
    #[arg(long, value_name = "DIR")]
    pub voices: Option<PathBuf>,
    /// Give the name to this voice even if another has it.
    #[arg(long)]
    pub replace: bool,
    /// Tokens before the first sound to aim for, 8 to 15.
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub first_hop: usize,
    /// How partial pooling windows of the speaker encoder are divided: `fixed` as the checkpoint's own runtime
    /// does, `spec` as the ONNX specification says.
    #[arg(long, value_name = "KIND", default_value = "fixed", value_parser = ["fixed", "spec"])]
    pub pooling: String,
    /// Level that speech is brought to, dB of full scale.
    #[arg(long, value_name = "DBFS", default_value_t = -20.0, allow_negative_numbers = true)]
    pub level: f64,
    /// Leave the level as recorded.
    #[arg(long)]
    pub keep_level: bool,
}

/// Arguments of `voice list`.
#[derive(Debug, clap::Args)]
pub struct List {
    /// Folder of the voices.
    #[arg(long, value_name = "DIR")]
    pub voices: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `voice rm`.
#[derive(Debug, clap::Args)]
pub struct Remove {
    /// Name of the voice.
    pub name: String,
    /// Folder of the voices.
    #[arg(long, value_name = "DIR")]
    pub voices: Option<PathBuf>,
}

/// What applies where the arguments name none.
#[derive(Clone, Debug)]
pub struct Defaults {
    /// CosyVoice3 checkpoint directory.
    pub model: Option<PathBuf>,
    /// Folder of the voices.
    pub voices: PathBuf,
}

/// Runs a command; results go to `out`, complaints and advice to `err`. Returns the exit code.
pub fn run(command: &Command, defaults: &Defaults, out: &mut dyn Write, err: &mut dyn Write) -> u8 {
    let outcome = match command {
        Command::Add(args) => add(args, defaults, out, err),
        Command::List(args) => list(args, defaults, out),
        Command::Rm(args) => remove(args, defaults, out),
    };
    outcome.unwrap_or_else(|failure| {
        // With standard error closed there is no one to tell.
        let _ = writeln!(err, "antiphon: {}", failure.message);
        failure.code
    })
}

/// Enrols a voice.
fn add(args: &Add, defaults: &Defaults, out: &mut dyn Write, err: &mut dyn Write) -> Result<u8, Failure> {
    let name = VoiceName::new(&args.name)?;
    let store = Store::open(args.voices.as_deref().unwrap_or(&defaults.voices));
    if !args.replace && store.path(&name).exists() {
        let message = format!("there is a voice `{name}` already; remove it, take another name, or give --replace");
        return Err(Failure { code: FAILED, message });
    }
    let Some(model) = args.model.as_deref().or(defaults.model.as_deref()) else {
        let message = "enrolment needs a CosyVoice3 checkpoint: give --model DIR, or set `[engine] model` \
                       (`antiphon model pull` fetches one)";
        return Err(Failure { code: UNAVAILABLE, message: message.into() });
    };
    let enroller = Enroller::open(model)?;
    let options = Options {
        first_hop: args.first_hop,
        pooling: if args.pooling == "spec" { Pooling::Spec } else { Pooling::Fixed },
        level_dbfs: (!args.keep_level).then_some(args.level),
        threads: 0,
    };
    let request = Request {
        recording: read(&args.wav)?,
        transcript: args.text.clone(),
        consent: args.consent.clone(),
        languages: args.languages.as_deref().map(tags).unwrap_or_default(),
        now: crate::clock::wall(),
    };
    // Drawn on a terminal only.
    let bar = ProgressBar::new(1_000);
    if let Ok(style) =
        ProgressStyle::with_template("computing the voice {bar:30} {percent} %, {elapsed} elapsed, {eta} left")
    {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(100));
    let enrolled = enroller.enrol_telling(request, &options, &|share| bar.set_position((1e3 * share) as u64));
    bar.finish_and_clear();
    let enrolled = enrolled?;
    let entry = store.add(&name, &enrolled.voice, args.replace)?;
    report(&entry, &store, &enrolled, out, err)?;
    Ok(DONE)
}

/// Lists the voices.
fn list(args: &List, defaults: &Defaults, out: &mut dyn Write) -> Result<u8, Failure> {
    let voices = Store::open(args.voices.as_deref().unwrap_or(&defaults.voices)).list();
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &voices).map_err(io::Error::from)?;
        writeln!(out)?;
        return Ok(DONE);
    }
    let width = voices.iter().map(|v| v.name.as_str().len()).max().unwrap_or(0).max(4);
    writeln!(
        out,
        "{:<width$}  {:>7}  {:<20}  {:<9}  {:<12}  transcript",
        "name", "seconds", "created", "languages", "id"
    )?;
    for voice in &voices {
        let start: String = voice.transcript.chars().take(40).collect();
        let dots = if start.len() < voice.transcript.len() { "..." } else { "" };
        writeln!(
            out,
            "{:<width$}  {:>7.2}  {:<20}  {:<9}  {:<12}  {start}{dots}",
            voice.name.as_str(),
            voice.seconds,
            voice.created.as_deref().unwrap_or("-"),
            if voice.languages.is_empty() { "-".to_owned() } else { voice.languages.join(",") },
            voice.id.get(..12).unwrap_or(&voice.id),
        )?;
    }
    Ok(DONE)
}

/// Removes a voice.
fn remove(args: &Remove, defaults: &Defaults, out: &mut dyn Write) -> Result<u8, Failure> {
    let name = VoiceName::new(&args.name)?;
    Store::open(args.voices.as_deref().unwrap_or(&defaults.voices)).remove(&name)?;
    writeln!(out, "removed voice `{name}`")?;
    Ok(DONE)
}

fn report(
    entry: &Entry,
    store: &Store,
    enrolled: &Enrolled,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> io::Result<()> {
    let q = &enrolled.quality;
    let decibel = |value: Option<f64>| value.map_or("-".to_owned(), |v| format!("{v:.1}"));
    writeln!(out, "voice `{}` -> {}", entry.name, store.path(&entry.name).display())?;
    writeln!(out, "  id          {}", entry.id)?;
    writeln!(out, "  prompt      {:.2} s, first sound after {} tokens", q.prompt_seconds, enrolled.first_hop)?;
    writeln!(out, "  speech      {:.1} s at {} Hz", q.speech_seconds, q.sample_rate)?;
    writeln!(out, "  transcript  about {:.1} s to say", q.transcript.seconds)?;
    writeln!(out, "  level       {:.1} dBFS, peak {:.1} dBFS", q.level_dbfs, q.peak_dbfs)?;
    writeln!(out, "  noise       {} dBFS, {} dB below speech", decibel(q.noise_dbfs), decibel(q.snr_db))?;
    writeln!(out, "  clipped     {:.2} %", q.clipped_percent)?;
    for advice in &q.advice {
        writeln!(err, "advice ({}): {}", advice.code, advice.message)?;
    }
    if !entry.consent {
        writeln!(
            err,
            "advice (consent): no consent is stored with this voice; --consent TEXT keeps it beside the voice"
        )?;
    }
    Ok(())
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    let failed = |e: io::Error| Failure { code: FAILED, message: format!("{}: {e}", path.display()) };
    // A device or a pipe has no length: the bound is kept while reading, not by asking.
    let file = std::fs::File::open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    io::Read::read_to_end(&mut io::Read::take(file, MAX_BYTES as u64 + 1), &mut bytes).map_err(failed)?;
    if bytes.len() > MAX_BYTES {
        return Err(EnrolError::from(DecodeError::TooLarge { bytes: bytes.len() }).into());
    }
    Ok(bytes)
}

/// An exit code and what to say.
struct Failure {
    code: u8,
    message: String,
}

impl From<EnrolError> for Failure {
    fn from(error: EnrolError) -> Self {
        let code = match &error {
            EnrolError::Missing { .. } => UNAVAILABLE,
            EnrolError::Transcript(_) | EnrolError::Consent | EnrolError::Language(_) | EnrolError::FirstHop(_) => {
                USAGE
            }
            _ => FAILED,
        };
        Self { code, message: error.to_string() }
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        let code = if matches!(error, StoreError::Name(_)) { USAGE } else { FAILED };
        Self { code, message: error.to_string() }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self { code: FAILED, message: error.to_string() }
    }
}
