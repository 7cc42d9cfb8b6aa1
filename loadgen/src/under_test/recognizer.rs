//! A recogniser that says which words are in what callers heard: a service of the OpenAI API, or a Whisper checkpoint.
//!
//! # Why
//! Loudness and waveform tell wrong words only where the voice says the same text the same way twice. A voice that samples
//! does not; then somebody must listen, and no caller's ear understands words.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use reqwest::header::CONTENT_TYPE;
use serde_json::Value;
use thiserror::Error;

use crate::sound::heard::Clip;
use crate::sound::wav;
use crate::wire::http;

/// A minute of speech on a slow machine.
const ANSWER: Duration = Duration::from_secs(120);
/// What separates the parts of a form. No WAV file of 16-bit samples has it by chance.
const BOUNDARY: &str = "antiphon-loadgen-7d3f1c9ab2e84056";

/// Why there are no words.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RecognizerError {
    /// The service does not answer as it should.
    #[error("{0}: {1}")]
    Service(String, String),
    /// The program does not.
    #[error("{0}")]
    Program(String),
}

/// Who listens.
#[derive(Clone, Debug)]
pub enum Recognizer {
    /// `POST {url}/v1/audio/transcriptions`.
    Service {
        /// Without that path.
        url: String,
        /// `model` of the request.
        model: String,
        /// Bearer token.
        token: Option<String>,
    },
    /// `antiphon model transcribe` with this checkpoint.
    Checkpoint {
        /// Its folder.
        folder: PathBuf,
        /// The program.
        program: PathBuf,
    },
}

impl Recognizer {
    /// An `http:` or `https:` address, or the folder of a checkpoint, for which the program `antiphon` beside this one is
    /// used, or that of the path.
    pub fn named(name: &str, model: &str, token: Option<String>) -> Recognizer {
        if name.starts_with("http://") || name.starts_with("https://") {
            let url = name.trim_end_matches('/').trim_end_matches("/v1/audio/transcriptions").to_owned();
            return Recognizer::Service { url, model: model.to_owned(), token };
        }
        let beside = std::env::current_exe().ok().and_then(|own| Some(own.parent()?.join("antiphon")));
        let program = beside.filter(|path| path.exists()).unwrap_or_else(|| PathBuf::from("antiphon"));
        Recognizer::Checkpoint { folder: PathBuf::from(name), program }
    }

    /// For the report.
    pub fn about(&self) -> String {
        match self {
            Recognizer::Service { url, model, .. } => format!("{model} at {url}"),
            Recognizer::Checkpoint { folder, .. } => folder.display().to_string(),
        }
    }

    /// What is said in each of `clips`.
    ///
    /// # Errors
    /// The recogniser does not do its work, with any of them.
    pub async fn words(&self, clips: &[&Clip]) -> Result<Vec<String>, RecognizerError> {
        match self {
            Recognizer::Service { url, model, token } => {
                let failed = |error: String| RecognizerError::Service(url.clone(), error);
                let client = http::client().map_err(|e| failed(e.to_string()))?;
                let mut out = Vec::new();
                for clip in clips {
                    let mut request = client.post(format!("{url}/v1/audio/transcriptions")).timeout(ANSWER);
                    if let Some(token) = token {
                        request = request.bearer_auth(token);
                    }
                    let kind = format!("multipart/form-data; boundary={BOUNDARY}");
                    let body = form(model, clip).map_err(|e| failed(e.to_string()))?;
                    let response = request.header(CONTENT_TYPE, kind).body(body).send().await;
                    let response = response.and_then(reqwest::Response::error_for_status);
                    let answer: Value = match response {
                        Ok(response) => response.json().await.map_err(|e| failed(e.to_string()))?,
                        Err(error) => return Err(failed(error.to_string())),
                    };
                    let text = answer["text"].as_str().ok_or_else(|| failed("its answer has no text".to_owned()))?;
                    out.push(text.to_owned());
                }
                Ok(out)
            }
            Recognizer::Checkpoint { folder, program } => {
                static NUMBER: AtomicU64 = AtomicU64::new(0);
                let number = NUMBER.fetch_add(1, Ordering::Relaxed);
                let files = std::env::temp_dir().join(format!("antiphon-loadgen-{}-{number}", std::process::id()));
                let outcome = transcribe(program, folder, &files, clips).await;
                // What is left behind is in the folder of what may be.
                let _ = std::fs::remove_dir_all(&files);
                outcome.map_err(RecognizerError::Program)
            }
        }
    }
}

/// The bytes of a form with a WAV file.
fn form(model: &str, clip: &Clip) -> Result<Vec<u8>, hound::Error> {
    let mut body = Vec::new();
    for (name, value) in [("model", model), ("response_format", "json"), ("temperature", "0")] {
        let part = format!("--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n");
        body.extend_from_slice(part.as_bytes());
    }
    let head = format!(
        "--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"file\"; filename=\"turn.wav\"\r\n\
         Content-Type: audio/wav\r\n\r\n"
    );
    body.extend_from_slice(head.as_bytes());
    body.extend_from_slice(&wav::bytes(clip)?);
    body.extend_from_slice(format!("\r\n--{BOUNDARY}--\r\n").as_bytes());
    Ok(body)
}

/// Has `program` say what is in `clips`, which are put into files below `folder`.
async fn transcribe(program: &Path, model: &Path, folder: &Path, clips: &[&Clip]) -> Result<Vec<String>, String> {
    std::fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let mut files = Vec::new();
    for (n, clip) in clips.iter().enumerate() {
        let file = folder.join(format!("{n}.wav"));
        wav::write(&file, clip).map_err(|e| format!("{}: {e}", file.display()))?;
        files.push(file);
    }
    if files.is_empty() {
        return Ok(Vec::new());
    }
    let mut command = tokio::process::Command::new(program);
    command.args(["model", "transcribe"]).arg(model).args(&files).stdin(Stdio::null()).kill_on_drop(true);
    let limit = ANSWER * files.len() as u32;
    let output = tokio::time::timeout(limit, command.output()).await;
    let output = output.map_err(|_| format!("{}: no answer", program.display()))?;
    let output = output.map_err(|e| format!("{}: {e}", program.display()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(format!("{} model transcribe: {said}", program.display()));
    }
    // A line each: the file's name, and what was said.
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = |file: &PathBuf| {
        let mark = format!("{}:", file.display());
        let line = text.lines().find_map(|line| line.strip_prefix(&mark));
        line.map(|line| line.trim().to_owned()).ok_or_else(|| format!("nothing was said of {}", file.display()))
    };
    files.iter().map(said).collect()
}
