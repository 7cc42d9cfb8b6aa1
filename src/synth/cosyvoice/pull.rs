//! `antiphon model pull`: fetches a checkpoint from a hub, resumably, and checks what arrived.
//!
//! Only the files that are read are fetched; a [`Set`] lists them for each kind of checkpoint. Each lands under a
//! temporary name, is compared with the size and hash that the hub lists, and only then takes its place: a file in the
//! directory is a good file.
//!
//! # Why
//! *All files are of one commit*, which the hub names first: a branch may move in between. Who writes `ID@REVISION` chooses it.
//!
//! *Of the default checkpoint the revision and the hashes are [`known`]*: that a hub lists a hash says only that the file is
//! what this hub has.

mod known;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use reqwest::header::{CONTENT_RANGE, RANGE};
use reqwest::{Client, StatusCode};
use serde::Deserialize;
use sha1::Sha1;
use sha2::{Digest, Sha256};

use self::known::Known;

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
/// The public hub.
const PUBLIC: &str = "https://huggingface.co";
/// Tried again this often after a connection was cut that had brought nothing; one that brought something does not count.
const RETRIES: u32 = 5;
/// Before the first of these, doubled for each further one.
const PAUSE: Duration = Duration::from_millis(200);
/// Longest wait for a connection, and for the next bytes of one.
const PATIENCE: Duration = Duration::from_secs(30);
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
    /// The hub has another revision under this name.
    #[error("`{id}`: the hub gives revision {found}, not {wanted}")]
    OtherRevision {
        /// Which checkpoint.
        id: String,
        /// Which was asked for.
        wanted: String,
        /// Which it says that it gives.
        found: String,
    },
    /// A file arrived with other content than the hub lists, or than is known of it, twice.
    #[error("{file}: {what} is {found}, expected {expected}")]
    Corrupt {
        /// Which file.
        file: String,
        /// `size` or the hash's name.
        what: &'static str,
        /// What the hub says, or is known.
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
    /// The commit.
    sha: Option<String>,
    siblings: Vec<Sibling>,
}

/// What a pull has brought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pulled {
    /// Files of the checkpoint that are there now.
    pub files: usize,
    /// The commit that they are of, as `ID@REVISION` asks for it again.
    pub revision: String,
    /// How many of them were compared with a hash that is known beforehand, and not only with the hub's.
    pub known: usize,
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

/// Fetches what `dir` lacks of checkpoint `id`, which may be `ID@REVISION`. `endpoint` is the hub's address, `None` the public
/// one.
///
/// # Errors
/// See [`PullError`]; what has arrived stays for the next call.
pub fn pull(id: &str, dir: &Path, endpoint: Option<&str>, progress: OnProgress<'_>) -> Result<Pulled, PullError> {
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
) -> Result<Pulled, PullError> {
    let io = |path: &Path| {
        let path = path.display().to_string();
        move |source| PullError::Io { path, source }
    };
    let parts = dir.join(PARTS);
    fs::create_dir_all(&parts).map_err(io(&parts))?;
    let (id, wanted) = id.split_once('@').map_or((id, None), |(id, revision)| (id, Some(revision)));
    let known = Known::find(id, wanted);
    let wanted = wanted.or(known.map(|known| known.revision));
    let hub = Hub { base: endpoint.unwrap_or(PUBLIC).trim_end_matches('/'), id, wanted, known, dir, client: client() };
    // Its own thread of control, so that commands without a runtime can call this.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(io(&parts))?;
    let pulled = runtime.block_on(hub.fetch_set(set, progress))?;
    fs::remove_dir_all(&parts).map_err(io(&parts))?;
    Ok(pulled)
}

/// What a folder for `ID@REVISION` is called: the last part of the name.
pub fn name(id: &str) -> &str {
    let id = id.split('@').next().unwrap_or(id);
    id.rsplit('/').next().unwrap_or(id)
}

/// Whether `revision` is the full name of a commit, which means the same for ever.
fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn client() -> Result<Client, String> {
    // The TLS stack wants one provider for the process; a second call only says that it is there.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Client::builder()
        .user_agent(concat!("antiphon/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(PATIENCE)
        .read_timeout(PATIENCE)
        .build()
        .map_err(|error| reason(&error))
}

/// An error with its causes: the outermost says only that a request failed.
fn reason(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// A hub, and the directory that is filled from it.
struct Hub<'a> {
    base: &'a str,
    id: &'a str,
    /// Branch, tag or commit; `None`: the main branch.
    wanted: Option<&'a str>,
    known: Option<&'static Known>,
    dir: &'a Path,
    client: Result<Client, String>,
}

/// How one request for the rest of a file ended.
enum Rest {
    /// All of it is here.
    Whole,
    /// The part that was there is none of this file's.
    NoPart,
    /// The connection broke.
    Cut(String),
    /// The hub refuses.
    Refused(String),
}

impl Hub<'_> {
    async fn fetch_set(&self, set: &Set, progress: OnProgress<'_>) -> Result<Pulled, PullError> {
        let unreachable = |reason| PullError::Unreachable { endpoint: self.base.into(), id: self.id.into(), reason };
        let client = self.client.as_ref().map_err(|error| unreachable(error.clone()))?;
        let listing = self.list(client).await.map_err(unreachable)?;
        let (revision, mut files, mut known) = (self.revision(&listing)?, 0, 0);
        for (name, needed) in set.needed.iter().map(|n| (n, true)).chain(set.welcome.iter().map(|n| (n, false))) {
            match listing.siblings.iter().find(|s| s.rfilename == **name) {
                Some(file) => {
                    self.fetch(client, &revision, file, progress).await?;
                    files += 1;
                    known += usize::from(self.known.is_some_and(|known| known.hash(name).is_some()));
                }
                None if needed => {
                    return Err(PullError::NotACheckpoint { what: set.what, id: self.id.into(), file: (*name).into() });
                }
                None => {}
            }
        }
        Ok(Pulled { files, revision, known })
    }

    /// The commit of a listing, in which no other part of a path can hide.
    fn revision(&self, listing: &Listing) -> Result<String, PullError> {
        let found = listing.sha.clone().unwrap_or_default();
        let other = self.wanted.is_some_and(|wanted| is_commit(wanted) && !wanted.eq_ignore_ascii_case(&found));
        if other || !is_commit(&found) {
            let wanted = self.wanted.unwrap_or("a commit").to_owned();
            return Err(PullError::OtherRevision { id: self.id.to_owned(), wanted, found });
        }
        Ok(found)
    }

    async fn list(&self, client: &Client) -> Result<Listing, String> {
        let wanted = self.wanted.unwrap_or("main");
        if wanted.is_empty() || !wanted.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte)) {
            return Err(format!("`{wanted}` is no revision: write the commit, or a branch or tag without `/`"));
        }
        let url = format!("{}/api/models/{}/revision/{wanted}?blobs=true", self.base, self.id);
        let response = client.get(url).send().await.and_then(reqwest::Response::error_for_status);
        let text = response.map_err(|e| reason(&e))?.text().await.map_err(|e| reason(&e))?;
        serde_json::from_str(&text).map_err(|e| format!("its list of files is malformed: {e}"))
    }

    async fn fetch(
        &self,
        client: &Client,
        revision: &str,
        file: &Sibling,
        progress: OnProgress<'_>,
    ) -> Result<(), PullError> {
        let name = &file.rfilename;
        let place = self.dir.join(name);
        let size = file.size().unwrap_or_default();
        let known = self.known.and_then(|known| known.hash(name));
        if place.exists() && check(file, known, &place).is_ok() {
            progress(name, size, size);
            return Ok(());
        }
        let part = self.dir.join(PARTS).join(name.replace('/', "--"));
        let mut wrong = None;
        for _ in 0..ATTEMPTS {
            self.download(client, revision, file, &part, progress).await?;
            match check(file, known, &part) {
                Ok(()) => {
                    let io = |source| PullError::Io { path: place.display().to_string(), source };
                    if let Some(parent) = place.parent() {
                        fs::create_dir_all(parent).map_err(io)?;
                    }
                    return fs::rename(&part, &place).map_err(io);
                }
                Err(error) => {
                    wrong = Some(error);
                    forget(&part)?;
                }
            }
        }
        let never = || PullError::Transfer { file: name.clone(), reason: "it did not arrive".into() };
        Err(wrong.unwrap_or_else(never))
    }

    /// Adds to `part` what it lacks of `file`.
    async fn download(
        &self,
        client: &Client,
        revision: &str,
        file: &Sibling,
        part: &Path,
        progress: OnProgress<'_>,
    ) -> Result<(), PullError> {
        let transfer = |reason| PullError::Transfer { file: file.rfilename.clone(), reason };
        let mut fruitless = 0;
        loop {
            let before = length(part);
            match self.rest(client, revision, file, part, progress).await? {
                Rest::Whole => return Ok(()),
                Rest::Refused(reason) => return Err(transfer(reason)),
                Rest::NoPart => forget(part)?,
                Rest::Cut(_) if length(part) > before => {
                    fruitless = 0;
                    continue;
                }
                Rest::Cut(reason) if fruitless == RETRIES => return Err(transfer(reason)),
                Rest::Cut(_) => tokio::time::sleep(PAUSE * 2u32.pow(fruitless)).await,
            }
            fruitless += 1;
            if fruitless > RETRIES {
                return Err(transfer("the hub sends other parts than it is asked for".into()));
            }
        }
    }

    /// One request, from the end of `part` on.
    async fn rest(
        &self,
        client: &Client,
        revision: &str,
        file: &Sibling,
        part: &Path,
        progress: OnProgress<'_>,
    ) -> Result<Rest, PullError> {
        let io = |source| PullError::Io { path: part.display().to_string(), source };
        let name = &file.rfilename;
        let mut here = length(part);
        match file.size() {
            Some(size) if here == size => return Ok(Rest::Whole),
            Some(size) if here > size => return Ok(Rest::NoPart),
            _ => {}
        }
        let mut request = client.get(format!("{}/{}/resolve/{revision}/{name}", self.base, self.id));
        if here > 0 {
            request = request.header(RANGE, format!("bytes={here}-"));
        }
        let mut response = match request.send().await {
            Ok(response) => response,
            Err(error) => return Ok(Rest::Cut(reason(&error))),
        };
        match response.status() {
            StatusCode::PARTIAL_CONTENT => {
                let from = response.headers().get(CONTENT_RANGE).and_then(|range| range.to_str().ok());
                if from.is_none_or(|range| !range.starts_with(&format!("bytes {here}-"))) {
                    return Ok(Rest::NoPart);
                }
            }
            StatusCode::OK => here = 0,
            StatusCode::RANGE_NOT_SATISFIABLE => return Ok(Rest::NoPart),
            status if status.is_server_error() => return Ok(Rest::Cut(status.to_string())),
            status => return Ok(Rest::Refused(status.to_string())),
        }
        let mut out = OpenOptions::new().create(true).append(true).open(part).map_err(io)?;
        // The whole file comes although a part was asked for.
        if here == 0 {
            out.set_len(0).map_err(io)?;
        }
        loop {
            match response.chunk().await {
                Ok(Some(bytes)) => {
                    out.write_all(&bytes).map_err(io)?;
                    here += bytes.len() as u64;
                    let size = file.size().unwrap_or(here);
                    // What is longer than listed is wrong already, and must not fill the disk.
                    if here > size {
                        return Ok(Rest::Whole);
                    }
                    progress(name, here, size);
                }
                Ok(None) if file.size().is_some_and(|size| here < size) => {
                    return Ok(Rest::Cut("the connection ended early".into()));
                }
                Ok(None) => return Ok(Rest::Whole),
                Err(error) => return Ok(Rest::Cut(reason(&error))),
            }
        }
    }
}

/// How much of it is here.
fn length(part: &Path) -> u64 {
    fs::metadata(part).map_or(0, |metadata| metadata.len())
}

fn forget(part: &Path) -> Result<(), PullError> {
    match fs::remove_file(part) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(PullError::Io { path: part.display().to_string(), source })
        }
        _ => Ok(()),
    }
}

/// Compares a file with its SHA-256 where that is known, else with what the hub lists: its size, and SHA-256 of large files or
/// the git blob hash of others.
fn check(file: &Sibling, known: Option<&str>, path: &Path) -> Result<(), PullError> {
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
    let (what, expected, found) = if let Some(sha256) = known.or(file.lfs.as_ref().map(|lfs| lfs.sha256.as_str())) {
        let mut hash = Sha256::new();
        feed(&mut reader, |bytes| hash.update(bytes)).map_err(io)?;
        ("SHA-256", sha256, hex(&hash.finalize()))
    } else if let Some(blob) = &file.blob {
        // Git's name of a blob tells damage, not malice. This crate is of an older generation of the same traits.
        use sha1::digest::{FixedOutput as _, Update as _};
        let mut hash = Sha1::default();
        hash.update(format!("blob {size}\0").as_bytes());
        feed(&mut reader, |bytes| hash.update(bytes)).map_err(io)?;
        ("git hash", blob.as_str(), hex(&hash.finalize_fixed()))
    } else {
        return Ok(());
    };
    if expected.eq_ignore_ascii_case(&found) { Ok(()) } else { Err(corrupt(what, expected.to_owned(), found)) }
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
