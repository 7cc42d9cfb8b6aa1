//! `antiphon model pull`: fetches a checkpoint from a hub, resumably, and checks what arrived.
//!
//! Only the files that are read are fetched; a [`Set`] lists them for each kind of checkpoint. Each lands under a temporary name, is compared with the size
//! and hash that the hub lists, and only then takes its place: a file in the directory is a good file.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use hf_hub::api::Progress;
use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::sha1::Sha1;

/// The published checkpoint.
pub const DEFAULT_ID: &str = "FunAudioLLM/Fun-CosyVoice3-0.5B-2512";

/// The files of one kind of checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct Set {
    /// What such a checkpoint is called.
    pub what: &'static str,
    /// What cannot be done without.
    pub needed: &'static [&'static str],
    /// What is used when there.
    pub welcome: &'static [&'static str],
}

/// The files of the voice.
pub const COSYVOICE: Set = Set { what: "CosyVoice3 checkpoint", needed: &NEEDED, welcome: &WELCOME };

/// What the engine cannot do without.
const NEEDED: [&str; 8] = [
    "cosyvoice3.yaml",
    "CosyVoice-BlankEN/config.json",
    "CosyVoice-BlankEN/vocab.json",
    "CosyVoice-BlankEN/merges.txt",
    "CosyVoice-BlankEN/tokenizer_config.json",
    "llm.pt",
    "flow.pt",
    "hift.pt",
];
/// What it uses when there: enrolment networks, saved voices.
const WELCOME: [&str; 3] = ["campplus.onnx", "speech_tokenizer_v3.onnx", "spk2info.pt"];
/// Continued this often after a connection was cut.
const RETRIES: usize = 5;
/// Fetched again this often after a wrong hash.
const ATTEMPTS: usize = 2;
/// Where unfinished files lie, so that a later call goes on with them.
const PARTS: &str = ".pull";

/// Why a checkpoint is not there.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PullError {
    /// The hub does not answer, or not as a hub.
    #[error("{endpoint}: cannot list `{id}`: {reason}; is the name right and the hub reachable (HF_ENDPOINT)?")]
    Unreachable {
        /// Which hub.
        endpoint: String,
        /// Which checkpoint.
        id: String,
        /// Why.
        reason: String,
    },
    /// The repository is something else.
    #[error("`{id}` has no {file}: it is no {what}")]
    NotACheckpoint {
        /// What was expected.
        what: &'static str,
        /// Which repository.
        id: String,
        /// What it lacks.
        file: String,
    },
    /// A file did not arrive; calling again goes on where it stopped.
    #[error("{file}: {reason}; run the command again to go on")]
    Transfer {
        /// Which file.
        file: String,
        /// Why.
        reason: String,
    },
    /// A file arrived with other content than the hub lists, twice.
    #[error("{file}: {what} is {found}, the hub lists {expected}")]
    Corrupt {
        /// Which file.
        file: String,
        /// `size` or the hash's name.
        what: &'static str,
        /// What the hub says.
        expected: String,
        /// What arrived.
        found: String,
    },
    /// The directory cannot be written.
    #[error("{path}: {source}")]
    Io {
        /// Where.
        path: String,
        /// Why.
        source: io::Error,
    },
}

#[derive(Deserialize)]
struct Listing {
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: String,
    size: u64,
}

impl Sibling {
    fn size(&self) -> Option<u64> {
        self.lfs.as_ref().map(|l| l.size).or(self.size)
    }
}

/// Told the file, bytes of it here, and its size.
pub type OnProgress<'a> = &'a mut dyn FnMut(&str, u64, u64);

/// Fetches what `dir` lacks of checkpoint `id` and returns how many files are there now. `endpoint` is the hub's
/// address, `None` the public one.
///
/// # Errors
/// See [`PullError`]; what has arrived stays for the next call.
pub fn pull(id: &str, dir: &Path, endpoint: Option<&str>, progress: OnProgress<'_>) -> Result<usize, PullError> {
    pull_set(id, dir, endpoint, &COSYVOICE, progress)
}

/// As [`pull`], the files of `set`.
///
/// # Errors
/// As there.
pub fn pull_set(
    id: &str,
    dir: &Path,
    endpoint: Option<&str>,
    set: &Set,
    progress: OnProgress<'_>,
) -> Result<usize, PullError> {
    let io = |path: &Path| {
        let path = path.display().to_string();
        move |source| PullError::Io { path, source }
    };
    let parts = dir.join(PARTS);
    fs::create_dir_all(&parts).map_err(io(&parts))?;
    let mut builder = ApiBuilder::from_cache(Cache::new(parts.clone())).with_progress(false).with_retries(RETRIES);
    if let Some(endpoint) = endpoint {
        builder = builder.with_endpoint(endpoint.trim_end_matches('/').into());
    }
    let unreachable = |reason: String| PullError::Unreachable {
        endpoint: endpoint.unwrap_or("https://huggingface.co").into(),
        id: id.into(),
        reason,
    };
    let repo = builder.build().map_err(|e| unreachable(e.to_string()))?.repo(Repo::model(id.into()));
    let listing = list(&repo).map_err(unreachable)?;
    let mut count = 0;
    for (name, needed) in set.needed.iter().map(|n| (n, true)).chain(set.welcome.iter().map(|n| (n, false))) {
        match listing.siblings.iter().find(|s| s.rfilename == **name) {
            Some(file) => {
                fetch(&repo, file, dir, progress)?;
                count += 1;
            }
            None if needed => {
                return Err(PullError::NotACheckpoint { what: set.what, id: id.into(), file: (*name).into() });
            }
            None => {}
        }
    }
    fs::remove_dir_all(&parts).map_err(io(&parts))?;
    Ok(count)
}

fn list(repo: &ApiRepo) -> Result<Listing, String> {
    let response = repo.info_request().query("blobs", "true").call().map_err(|e| e.to_string())?;
    let text = response.into_body().read_to_string().map_err(|e| e.to_string())?;
    serde_json::from_str(&text).map_err(|e| format!("its list of files is malformed: {e}"))
}

fn fetch(repo: &ApiRepo, file: &Sibling, dir: &Path, progress: OnProgress<'_>) -> Result<(), PullError> {
    let name = &file.rfilename;
    let place = dir.join(name);
    let size = file.size().unwrap_or_default();
    if place.exists() && check(file, &place).is_ok() {
        progress(name, size, size);
        return Ok(());
    }
    let transfer = |reason: String| PullError::Transfer { file: name.clone(), reason };
    let mut wrong = None;
    for _ in 0..ATTEMPTS {
        let bar = Bar { name, done: 0, total: size, tell: &mut *progress };
        let pointer = match repo.download_with_progress(name, bar) {
            Ok(pointer) => pointer,
            Err(ApiError::InvalidResume) => {
                // What lies there is longer than the file: not a part of it.
                forget(&dir.join(PARTS));
                continue;
            }
            Err(error) => return Err(transfer(error.to_string())),
        };
        let blob = fs::canonicalize(&pointer).map_err(|e| transfer(e.to_string()))?;
        match check(file, &blob) {
            Ok(()) => {
                let io = |source| PullError::Io { path: place.display().to_string(), source };
                if let Some(parent) = place.parent() {
                    fs::create_dir_all(parent).map_err(io)?;
                }
                fs::rename(&blob, &place).map_err(io)?;
                fs::remove_file(&pointer).map_err(io)?;
                return Ok(());
            }
            Err(error) => {
                wrong = Some(error);
                for path in [blob, pointer] {
                    fs::remove_file(&path)
                        .map_err(|source| PullError::Io { path: path.display().to_string(), source })?;
                }
            }
        }
    }
    Err(wrong.unwrap_or_else(|| transfer("the part that was there did not fit".into())))
}

fn forget(parts: &Path) {
    // Failing leaves the part where it is, and the next attempt fails with the same clear error.
    if let Err(error) = fs::remove_dir_all(parts).and_then(|()| fs::create_dir_all(parts)) {
        tracing::warn!("{}: {error}", parts.display());
    }
}

/// Compares a file with what the hub lists: its size, and SHA-256 of large files or the git blob hash of others.
fn check(file: &Sibling, path: &Path) -> Result<(), PullError> {
    let io = |source| PullError::Io { path: path.display().to_string(), source };
    let corrupt = |what, expected: String, found: String| PullError::Corrupt {
        file: file.rfilename.clone(),
        what,
        expected,
        found,
    };
    let size = fs::metadata(path).map_err(io)?.len();
    if let Some(expected) = file.size().filter(|&s| s != size) {
        return Err(corrupt("size", expected.to_string(), size.to_string()));
    }
    let mut reader = File::open(path).map_err(io)?;
    let (what, expected, found) = if let Some(lfs) = &file.lfs {
        let mut hash = Sha256::new();
        feed(&mut reader, |bytes| hash.update(bytes)).map_err(io)?;
        ("SHA-256", &lfs.sha256, hex(&hash.finalize()))
    } else if let Some(blob) = &file.blob {
        let mut hash = Sha1::default();
        hash.update(format!("blob {size}\0").as_bytes());
        feed(&mut reader, |bytes| hash.update(bytes)).map_err(io)?;
        ("git hash", blob, hex(&hash.finish()))
    } else {
        return Ok(());
    };
    if expected.eq_ignore_ascii_case(&found) { Ok(()) } else { Err(corrupt(what, expected.clone(), found)) }
}

fn feed(reader: &mut impl Read, mut take: impl FnMut(&[u8])) -> io::Result<()> {
    let mut buffer = vec![0; 1 << 20];
    loop {
        match reader.read(&mut buffer)? {
            0 => return Ok(()),
            n => take(&buffer[..n]),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Where a checkpoint of that name belongs below `models`.
pub fn folder(models: &Path, id: &str) -> PathBuf {
    models.join(id.rsplit('/').next().filter(|n| !n.is_empty() && *n != "..").unwrap_or("checkpoint"))
}

struct Bar<'a> {
    name: &'a str,
    done: u64,
    total: u64,
    tell: OnProgress<'a>,
}

impl Progress for Bar<'_> {
    fn init(&mut self, size: usize, _filename: &str) {
        self.done = 0;
        self.total = size as u64;
    }

    fn update(&mut self, size: usize) {
        self.done += size as u64;
        (self.tell)(self.name, self.done, self.total);
    }

    fn finish(&mut self) {}
}
