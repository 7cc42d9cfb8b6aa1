//! Voices of other machines: kept by what they are, beside the folder of this machine's own.
//!
//! A copy's name is its [`Voice::content_id`], so it is the same wherever it came from and cannot take the place of another.
//! A voice that is spoken from a copy is called `NAME@ID` ([`copied`]): by the name it was enrolled under, for what is
//! sampled depends on that, too, and by what it is.
//!
//! # Why
//! Who enrols a voice may remove it again. A copy is forgotten after a day and sent again where it is still wanted, so that
//! no machine speaks for long with what its owner has deleted.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::file::{Voice, VoiceFileError};
use super::store::{Store, StoreError, VoiceName};

/// The folder of copies in the folder of voices.
pub const FOLDER: &str = "copies";
/// How long a copy is kept after it has come.
const KEPT: Duration = Duration::from_secs(86_400);
/// Copies at most, half a gigabyte of them; what came first goes first.
const MOST: usize = 1_000;
/// Between the name and what the voice is; no name has it.
const AT: char = '@';

/// What a voice is called that is spoken from a copy.
pub fn copied(name: &str, content: &str) -> String {
    format!("{name}{AT}{content}")
}

/// The name and what the voice is, of what [`copied`] gives.
pub fn parts(voice: &str) -> Option<(&str, &str)> {
    voice.rsplit_once(AT).filter(|(_, content)| is_content(content))
}

/// Whether `name` is that of a copy.
pub fn is_content(name: &str) -> bool {
    name.len() == 64 && name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Why a copy was not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CopyError {
    /// It is no voice.
    #[error(transparent)]
    File(#[from] VoiceFileError),
    /// It is another voice than was said.
    #[error("the copy of a voice is another one than was said")]
    Other,
    /// The folder cannot be written.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The folder of copies. Clones mean the same.
#[derive(Clone, Debug)]
pub struct Copies(Store);

impl Copies {
    /// Below the folder of voices `voices`; it need not exist before the first copy.
    pub fn open(voices: &Path) -> Self {
        Self(Store::open(&voices.join(FOLDER)))
    }

    /// Whether it is there.
    pub fn has(&self, content: &str) -> bool {
        VoiceName::new(content).is_ok_and(|name| self.0.entry(&name).is_some())
    }

    /// Keeps the voice in `file`, which is `content`. Blocks.
    ///
    /// # Errors
    /// It is not, or the folder cannot be written.
    pub fn take(&self, content: &str, file: &[u8]) -> Result<(), CopyError> {
        let voice = Voice::parse(file, "a copied voice")?;
        if voice.content_id() != content {
            return Err(CopyError::Other);
        }
        self.sweep(MOST - 1);
        self.0.add(&VoiceName::new(content)?, &voice, true)?;
        Ok(())
    }

    /// The copy of this voice, as a file. Blocks.
    pub fn file(&self, content: &str) -> Option<Vec<u8>> {
        let name = VoiceName::new(content).ok()?;
        self.0.load(&name).ok().map(|voice| voice.to_bytes())
    }

    /// Removes what came too long ago; gives whether there was any. Blocks. Utterances that speak with it are not disturbed.
    pub fn forget_old(&self) -> bool {
        self.sweep(MOST)
    }

    /// Removes what is old, and of the rest all but the `most` that came last.
    fn sweep(&self, most: usize) -> bool {
        let now = crate::clock::wall();
        let age = |path: &Path| {
            let modified = std::fs::metadata(path).and_then(|file| file.modified()).ok()?;
            Some(now.saturating_sub(modified.duration_since(std::time::UNIX_EPOCH).ok()?))
        };
        let copies = self.0.list().into_iter().map(|entry| entry.name);
        let mut by_age: Vec<_> = copies.filter_map(|name| Some((age(&self.0.path(&name))?, name))).collect();
        by_age.sort();
        let before = by_age.len();
        let mut kept = 0;
        for (number, (age, name)) in by_age.iter().enumerate() {
            if number >= most || *age > KEPT {
                // Another process may have removed it first.
                let _ = self.0.remove(name);
            } else {
                kept += 1;
            }
        }
        kept < before
    }
}

/// Voices that other machines have.
pub trait Elsewhere: Send + Sync {
    /// What the voice of this name is, where some machine says that it has one.
    fn content(&self, name: &str) -> Option<String>;

    /// Its file. The error is for the log.
    fn fetch(&self, name: String, content: String) -> BoxFuture<'static, Result<Vec<u8>, String>>;
}

/// The voices that this machine can give to others.
#[derive(Clone)]
pub struct Library {
    own: Store,
    copies: Copies,
    elsewhere: Option<Arc<dyn Elsewhere>>,
}

impl Library {
    /// Of the folder of this machine's voices, and of copies.
    pub fn new(own: Store, copies: Copies) -> Self {
        Self { own, copies, elsewhere: None }
    }

    /// With voices of other machines, which are fetched when somebody wants to hear them.
    pub fn with_others(self, elsewhere: Arc<dyn Elsewhere>) -> Self {
        Self { elsewhere: Some(elsewhere), ..self }
    }

    /// What the voice of this name is; `None`: there is no such file. This machine's own come first.
    pub fn content(&self, name: &str) -> Option<String> {
        if let Some((_, content)) = parts(name) {
            return Some(content.to_owned());
        }
        let own = self.own.entry(&VoiceName::new(name).ok()?).map(|entry| entry.id);
        own.or_else(|| self.elsewhere.as_ref()?.content(name))
    }

    /// Whether the file of this voice is here.
    pub fn has(&self, name: &str, content: &str) -> bool {
        let own = VoiceName::new(name).ok().and_then(|name| self.own.entry(&name));
        own.is_some_and(|entry| entry.id == content) || self.copies.has(content)
    }

    /// Has a copy made of a voice that another machine has.
    ///
    /// # Errors
    /// It cannot be had, or kept.
    pub async fn fetch(&self, name: &str, content: &str) -> Result<(), String> {
        let elsewhere = self.elsewhere.as_ref().ok_or("there are no other machines")?;
        let file = elsewhere.fetch(name.to_owned(), content.to_owned()).await?;
        let (copies, content) = (self.copies.clone(), content.to_owned());
        let kept = tokio::task::spawn_blocking(move || copies.take(&content, &file)).await;
        kept.map_err(|error| error.to_string())?.map_err(|error| error.to_string())
    }

    /// The voice as a file. Blocks for a read of half a megabyte.
    pub fn file(&self, name: &str, content: &str) -> Option<Vec<u8>> {
        let base = parts(name).map_or(name, |(base, _)| base);
        let own = VoiceName::new(base).ok().and_then(|name| self.own.load(&name).ok());
        match own.filter(|voice| voice.content_id() == content) {
            Some(voice) => Some(voice.to_bytes()),
            None => self.copies.file(content),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn voice(token: u32) -> Voice {
        Voice::of_token(token)
    }

    #[test]
    fn a_copy_is_what_it_says_and_no_other() {
        let folder = tempfile::tempdir().expect("a folder");
        let copies = Copies::open(folder.path());
        let (anna, berta) = (voice(1), voice(2));
        copies.take(&anna.content_id(), &anna.to_bytes()).expect("taken");
        copies.take(&anna.content_id(), &anna.to_bytes()).expect("and again");
        assert!(matches!(copies.take(&anna.content_id(), &berta.to_bytes()), Err(CopyError::Other)));
        assert!(matches!(copies.take(&anna.content_id(), b"no voice"), Err(CopyError::File(_))));
        assert_eq!(copies.file(&anna.content_id()), Some(anna.to_bytes()));
        assert_eq!(copies.file(&berta.content_id()), None);
        assert_eq!(copies.file("../anna"), None);
    }

    #[test]
    fn copies_are_forgotten_after_a_day_and_when_there_are_too_many() {
        let folder = tempfile::tempdir().expect("a folder");
        let copies = Copies::open(folder.path());
        let voices: Vec<Voice> = (0..3).map(voice).collect();
        for voice in &voices {
            copies.take(&voice.content_id(), &voice.to_bytes()).expect("taken");
        }
        let there = || voices.iter().map(|voice| copies.file(&voice.content_id()).is_some()).collect::<Vec<_>>();
        let aged = |voice: &Voice, age: Duration| {
            let path = folder.path().join(FOLDER).join(format!("{}.safetensors", voice.content_id()));
            let file = std::fs::File::options().write(true).open(path).expect("there");
            let at = std::time::UNIX_EPOCH + crate::clock::wall() - age;
            file.set_modified(at).expect("set");
        };
        aged(&voices[0], 2 * KEPT);
        aged(&voices[1], KEPT / 2);
        assert!(copies.forget_old() && !copies.forget_old());
        assert_eq!(there(), [false, true, true]);
        assert!(!copies.has(&voices[0].content_id()) && copies.has(&voices[1].content_id()));
        copies.sweep(1);
        assert_eq!(there(), [false, false, true]);
    }

    #[test]
    fn a_library_gives_what_is_there_by_name_or_by_copy() {
        let folder = tempfile::tempdir().expect("a folder");
        let (own, copies) = (Store::open(folder.path()), Copies::open(folder.path()));
        let (anna, berta) = (voice(1), voice(2));
        own.add(&VoiceName::new("anna").expect("a name"), &anna, false).expect("written");
        copies.take(&berta.content_id(), &berta.to_bytes()).expect("taken");
        let library = Library::new(own, copies);
        assert_eq!(library.content("anna"), Some(anna.content_id()));
        assert_eq!(library.content("berta"), None);
        let name = copied("berta", &berta.content_id());
        assert_eq!(parts(&name), Some(("berta", &*berta.content_id())));
        assert_eq!(library.content(&name), Some(berta.content_id()));
        assert_eq!(library.file(&name, &berta.content_id()), Some(berta.to_bytes()));
        assert_eq!(library.file("anna", &anna.content_id()), Some(anna.to_bytes()));
        assert_eq!(library.file("anna", &berta.content_id()), Some(berta.to_bytes()), "enrolled anew meanwhile");
        assert_eq!(parts("anna@example.com"), None);
    }
}
