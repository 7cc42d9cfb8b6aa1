//! The folder of voices.
//!
//! Owns names, atomic writing and removing, and noticing what others change. Never decides what a voice is for.
//!
//! Contract: a voice is one file, `NAME.safetensors`. A reader of the folder sees a voice whole or not at all, also
//! after a power failure; two writers of one name cannot both succeed unless they say so. Several processes may use
//! the folder at once: each notices the others' changes at its next [`Store::refresh`]. Voices are told apart by
//! what they are ([`Entry::id`]), so the same voice under two names, or enrolled twice, is one to a device that keeps
//! something computed from it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, UNIX_EPOCH};

use serde::Serialize;

use super::file::{Voice, VoiceFileError};
use super::prompt::TOKENS;

/// How often [`Store::refresh`] looks at the folder.
pub const REFRESH: Duration = Duration::from_secs(1);
/// Longest name, bytes.
pub const MAX_NAME: usize = 64;
/// Most voices in a folder; what comes after them in order of name is not seen.
pub const MAX_VOICES: usize = 10_000;

const EXTENSION: &str = "safetensors";
/// A writer that has been at it for so long is gone.
const STALE: Duration = Duration::from_secs(3600);

/// A name that is safe as part of a path: ASCII letters, digits, `-`, `_` and `.`, first a letter or digit.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct VoiceName(String);

impl VoiceName {
    /// Checks a name.
    ///
    /// # Errors
    /// It has characters that names cannot have, or too many.
    pub fn new(name: &str) -> Result<Self, StoreError> {
        let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
        let fits = (1..=MAX_NAME).contains(&name.len())
            && name.bytes().all(allowed)
            && name.as_bytes().first().is_some_and(u8::is_ascii_alphanumeric)
            && !name.ends_with('.');
        if fits { Ok(Self(name.to_owned())) } else { Err(StoreError::Name(name.chars().take(80).collect())) }
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for VoiceName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why the folder could not do something.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Not a name.
    #[error(
        "`{0}` cannot be the name of a voice: take 1 to {MAX_NAME} of a-z, A-Z, 0-9, `-`, `_` and `.`, starting with a letter or digit"
    )]
    Name(String),
    /// The name is taken by another voice.
    #[error("there is a voice `{0}` already; remove it first or take another name")]
    Exists(VoiceName),
    /// No such voice.
    #[error("there is no voice `{0}`: `antiphon voice list` or GET /v1/voices shows those that there are")]
    Unknown(VoiceName),
    /// The file of a voice cannot be used.
    #[error(transparent)]
    File(#[from] VoiceFileError),
    /// The folder cannot be read or written.
    #[error("{path}: {source}")]
    Io {
        /// Which path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A voice of the folder.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// Its name.
    pub name: VoiceName,
    /// What it is: the same for equal voices, see [`Voice::content_id`].
    pub id: String,
    /// Length of its prompt, seconds.
    pub seconds: f64,
    /// What is said in its prompt.
    pub transcript: String,
    /// BCP 47 tags, if known.
    pub languages: Vec<String>,
    /// When it was made, RFC 3339, if known.
    pub created: Option<String>,
    /// Whether a consent is stored with it.
    pub consent: bool,
    /// The tenant whose token enrolled it; `None`: it is the operator's, and everybody may speak with it.
    #[serde(skip)]
    pub owner: Option<String>,
}

/// The note that holds [`Entry::owner`].
pub(super) const OWNER: &str = "owner";

impl Entry {
    fn new(name: VoiceName, voice: &Voice) -> Self {
        let languages = voice.notes.get("languages").map_or("", String::as_str);
        Self {
            name,
            id: voice.content_id(),
            seconds: voice.tokens.len() as f64 / TOKENS as f64,
            transcript: voice.transcript.clone(),
            languages: languages.split(',').filter(|l| !l.is_empty()).map(str::to_owned).collect(),
            created: voice.notes.get("created").cloned(),
            consent: voice.notes.contains_key("consent"),
            owner: voice.notes.get(OWNER).cloned(),
        }
    }
}

/// The folder. Cheap to clone; clones share what they know.
#[derive(Clone, Debug)]
pub struct Store {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    dir: PathBuf,
    state: Mutex<State>,
    /// Held while the folder is read, so that an older look never overwrites a newer one.
    looking: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    looked: Option<Instant>,
    known: BTreeMap<VoiceName, Known>,
}

/// What a file was when it was read.
#[derive(Clone, Debug, PartialEq)]
struct Known {
    stamp: Stamp,
    /// `None`: it is there and cannot be used; said once.
    entry: Option<Entry>,
}

/// Tells whether a file may have changed. Voices are replaced by renaming, so the number of the file changes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stamp {
    length: u64,
    modified: Option<Duration>,
    number: u64,
}

impl Stamp {
    fn of(path: &Path) -> Option<Self> {
        let metadata = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
        let modified = metadata.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok());
        #[cfg(unix)]
        let number = std::os::unix::fs::MetadataExt::ino(&metadata);
        #[cfg(not(unix))]
        let number = 0;
        Some(Self { length: metadata.len(), modified, number })
    }
}

impl Store {
    /// The folder `dir`; it need not exist before the first voice.
    pub fn open(dir: &Path) -> Self {
        let store = Self {
            shared: Arc::new(Shared { dir: dir.to_owned(), state: Mutex::default(), looking: Mutex::default() }),
        };
        store.rescan();
        store
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.shared.dir
    }

    /// Where the voice of that name lies, whether it exists or not.
    pub fn path(&self, name: &VoiceName) -> PathBuf {
        self.shared.dir.join(format!("{name}.{EXTENSION}"))
    }

    /// Looks for changes made by others, at most once in [`REFRESH`]. Returns whether there were any. Does not wait
    /// for a look that is under way elsewhere: the next one will see.
    pub fn refresh(&self, now: Instant) -> bool {
        {
            let mut state = self.state();
            if state.looked.is_some_and(|at| now.saturating_duration_since(at) < REFRESH) {
                return false;
            }
            state.looked = Some(now);
        }
        match self.shared.looking.try_lock() {
            Ok(guard) => self.look(&guard),
            Err(_) => false,
        }
    }

    /// Every usable voice, by name.
    pub fn list(&self) -> Vec<Entry> {
        self.state().known.values().filter_map(|known| known.entry.clone()).collect()
    }

    /// One voice, if it is there and usable.
    pub fn entry(&self, name: &VoiceName) -> Option<Entry> {
        self.state().known.get(name).and_then(|known| known.entry.clone())
    }

    /// Reads a voice.
    ///
    /// # Errors
    /// There is none of that name, or its file is damaged.
    pub fn load(&self, name: &VoiceName) -> Result<Voice, StoreError> {
        let path = self.path(name);
        if !path.is_file() {
            return Err(StoreError::Unknown(name.clone()));
        }
        Ok(Voice::load(&path)?)
    }

    /// Writes a voice. With `replace` a voice of that name gives way; without, adding the same voice again is
    /// fine and another one is refused.
    ///
    /// # Errors
    /// The name is taken, or the folder cannot be written.
    pub fn add(&self, name: &VoiceName, voice: &Voice, replace: bool) -> Result<Entry, StoreError> {
        let dir = &self.shared.dir;
        fs::create_dir_all(dir).map_err(|source| StoreError::Io { path: dir.clone(), source })?;
        self.sweep();
        let path = self.path(name);
        let failed = |source| StoreError::Io { path: path.clone(), source };
        let mut draft = Draft::create(dir, name).map_err(failed)?;
        draft.file.write_all(&voice.to_bytes()).map_err(failed)?;
        draft.file.sync_all().map_err(failed)?;
        if replace {
            fs::rename(&draft.path, &path).map_err(failed)?;
        } else {
            match claim(&draft.path, &path) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                    let there = self.load(name).ok().map(|v| v.content_id());
                    if there.as_ref() != Some(&voice.content_id()) {
                        return Err(StoreError::Exists(name.clone()));
                    }
                }
                Err(e) => return Err(failed(e)),
            }
        }
        sync(dir).map_err(failed)?;
        drop(draft);
        self.rescan();
        Ok(Entry::new(name.clone(), voice))
    }

    /// Removes a voice. Utterances that speak with it already are not disturbed.
    ///
    /// # Errors
    /// There is none of that name, or the folder cannot be written.
    pub fn remove(&self, name: &VoiceName) -> Result<(), StoreError> {
        let path = self.path(name);
        let failed = |source| StoreError::Io { path: path.clone(), source };
        match fs::remove_file(&path) {
            Ok(()) => sync(&self.shared.dir).map_err(failed)?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(StoreError::Unknown(name.clone())),
            Err(e) => return Err(failed(e)),
        }
        self.rescan();
        Ok(())
    }

    fn rescan(&self) {
        self.look(&self.shared.looking.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Reads the folder and whatever changed in it. Those who list meanwhile do not wait.
    fn look(&self, _looking: &MutexGuard<'_, ()>) -> bool {
        let before = self.state().known.clone();
        let mut after = BTreeMap::new();
        for (name, path) in self.files() {
            let Some(stamp) = Stamp::of(&path) else { continue };
            let known = match before.get(&name) {
                Some(known) if known.stamp == stamp => known.clone(),
                _ => Known { stamp, entry: read(&name, &path) },
            };
            after.insert(name, known);
        }
        let mut state = self.state();
        let changed = state.known != after;
        state.known = after;
        changed
    }

    fn files(&self) -> Vec<(VoiceName, PathBuf)> {
        let Ok(entries) = fs::read_dir(&self.shared.dir) else { return Vec::new() };
        let named = |path: PathBuf| {
            let stem = path.file_name()?.to_str()?.strip_suffix(EXTENSION)?.strip_suffix('.')?;
            Some((VoiceName::new(stem).ok()?, path))
        };
        let mut files: Vec<_> = entries.filter_map(|entry| named(entry.ok()?.path())).collect();
        files.sort();
        files.truncate(MAX_VOICES);
        files
    }

    /// Removes what writers left that were killed.
    fn sweep(&self) {
        let Ok(entries) = fs::read_dir(&self.shared.dir) else { return };
        for entry in entries.filter_map(Result::ok) {
            let name = entry.file_name();
            let ours = name.to_str().is_some_and(|n| n.starts_with('.') && n.ends_with(".tmp"));
            let modified = entry.metadata().ok().and_then(|m| m.modified().ok()?.duration_since(UNIX_EPOCH).ok());
            if ours && modified.is_some_and(|at| crate::clock::wall().saturating_sub(at) > STALE) {
                // Another writer may have swept it first.
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing in the state is ever half-written: it is replaced whole.
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read(name: &VoiceName, path: &Path) -> Option<Entry> {
    match Voice::load(path) {
        Ok(voice) => Some(Entry::new(name.clone(), &voice)),
        Err(error) => {
            tracing::warn!(voice = %name, %error, "voice file cannot be used");
            None
        }
    }
}

/// A file being written, removed when it is dropped.
struct Draft {
    path: PathBuf,
    file: File,
}

impl Draft {
    fn create(dir: &Path, name: &VoiceName) -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // The leading dot keeps it out of the list: names do not start with one.
        let path = dir.join(format!(".{name}.{}-{number}.tmp", std::process::id()));
        let file = File::create_new(&path)?;
        Ok(Self { path, file })
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // Gone already when it was renamed.
        let _ = fs::remove_file(&self.path);
    }
}

/// Gives `draft` the name `path` unless that is taken, in one step where the file system has links.
fn claim(draft: &Path, path: &Path) -> io::Result<()> {
    match fs::hard_link(draft, path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
            if path.exists() {
                Err(io::ErrorKind::AlreadyExists.into())
            } else {
                fs::rename(draft, path)
            }
        }
        done => done,
    }
}

/// Makes names in `dir` last.
fn sync(dir: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(dir)?.sync_all() } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn voice(token: u32) -> Voice {
        Voice::of_token(token)
    }

    fn name(name: &str) -> VoiceName {
        VoiceName::new(name).expect("a name")
    }

    #[test]
    fn names_cannot_leave_the_folder() {
        for bad in ["", ".", "..", "../x", "a/b", "a\\b", "/etc/passwd", ".hidden", "-x", "a\0b", "ä", "a b", "x."] {
            assert!(VoiceName::new(bad).is_err(), "{bad:?}");
        }
        assert!(VoiceName::new(&"a".repeat(65)).is_err());
        for good in ["a", "Ann-2", "v1.2_final", "0"] {
            assert!(VoiceName::new(good).is_ok(), "{good:?}");
        }
    }

    #[test]
    fn a_voice_is_added_listed_loaded_and_removed() {
        let dir = tempfile::tempdir().expect("temp dir");
        let store = Store::open(&dir.path().join("new/folder"));
        assert!(store.list().is_empty());
        let entry = store.add(&name("ann"), &voice(1), false).expect("added");
        assert_eq!(store.list(), std::slice::from_ref(&entry));
        assert_eq!((entry.seconds, entry.languages), (0.68, vec!["en".to_owned(), "de".to_owned()]));
        assert_eq!(store.load(&name("ann")).expect("loads"), voice(1));
        store.remove(&name("ann")).expect("removed");
        assert!(store.list().is_empty());
        assert!(matches!(store.remove(&name("ann")), Err(StoreError::Unknown(_))));
        assert!(matches!(store.load(&name("ann")), Err(StoreError::Unknown(_))));
    }

    #[test]
    fn a_name_is_given_once_unless_replaced() {
        let dir = tempfile::tempdir().expect("temp dir");
        let store = Store::open(dir.path());
        store.add(&name("ann"), &voice(1), false).expect("added");
        store.add(&name("ann"), &voice(1), false).expect("the same again is fine");
        assert!(matches!(store.add(&name("ann"), &voice(2), false), Err(StoreError::Exists(_))));
        assert_eq!(store.load(&name("ann")).expect("loads"), voice(1));
        store.add(&name("ann"), &voice(2), true).expect("replaced");
        assert_eq!(store.load(&name("ann")).expect("loads"), voice(2));
        assert_eq!(fs::read_dir(dir.path()).expect("folder").count(), 1, "no draft is left");
    }

    #[test]
    fn another_process_is_noticed_at_the_next_refresh() {
        let dir = tempfile::tempdir().expect("temp dir");
        let (ours, theirs) = (Store::open(dir.path()), Store::open(dir.path()));
        let start = crate::clock::now();
        assert!(!ours.refresh(start));
        theirs.add(&name("bob"), &voice(1), false).expect("added");
        assert!(!ours.refresh(start + REFRESH / 2), "too soon to look");
        assert!(ours.refresh(start + REFRESH));
        assert_eq!(ours.list().len(), 1);
        let first = ours.list()[0].id.clone();
        theirs.add(&name("bob"), &voice(2), true).expect("replaced");
        assert!(ours.refresh(start + 2 * REFRESH));
        assert_ne!(ours.list()[0].id, first);
        theirs.remove(&name("bob")).expect("removed");
        assert!(ours.refresh(start + 3 * REFRESH));
        assert!(ours.list().is_empty());
    }

    #[test]
    fn what_is_no_voice_is_passed_over() {
        let dir = tempfile::tempdir().expect("temp dir");
        fs::write(dir.path().join("junk.safetensors"), "junk").expect("write");
        fs::write(dir.path().join(".x.1-1.tmp"), "half").expect("write");
        fs::write(dir.path().join("readme.txt"), "text").expect("write");
        fs::create_dir(dir.path().join("folder.safetensors")).expect("folder");
        let store = Store::open(dir.path());
        assert!(store.list().is_empty());
        assert!(store.load(&name("junk")).is_err());
    }

    #[test]
    fn of_many_writers_of_one_name_one_wins_and_readers_see_whole_voices() {
        let dir = tempfile::tempdir().expect("temp dir");
        let store = Store::open(dir.path());
        let won: usize = std::thread::scope(|scope| {
            let writers: Vec<_> = (0..8)
                .map(|i| {
                    let store = store.clone();
                    scope.spawn(move || usize::from(store.add(&name("one"), &voice(i), false).is_ok()))
                })
                .collect();
            for _ in 0..50 {
                match store.load(&name("one")) {
                    Ok(_) | Err(StoreError::Unknown(_)) => {}
                    Err(e) => panic!("half a voice: {e}"),
                }
            }
            writers.into_iter().map(|w| w.join().expect("no panic")).sum()
        });
        assert_eq!(won, 1);
        assert_eq!(store.list().len(), 1);
    }
}
