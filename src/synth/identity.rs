//! What decides how a voice sounds, so that what was spoken once can be known again.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use sha2::{Digest, Sha256};

use crate::audio::RATE;
use crate::turn::Utterance;
use crate::voice::file::hex;

/// Names what an utterance sounds like: a SHA-256 of everything that decides it.
pub type Key = [u8; 32];

/// Largest file beside the networks that counts to a model: vocabularies and settings.
const SMALL: u64 = 64 << 20;

/// Everything besides the utterance that decides how a voice sounds.
#[derive(Clone, Debug, Default)]
pub struct Identity {
    /// Program, version, device, settings.
    settings: String,
    /// What the model's files hold; known when they have been read.
    model: Arc<OnceLock<String>>,
    /// Voices that are files and what each holds, the default first. None: a voice's name says all.
    voices: Vec<(String, String)>,
}

impl Identity {
    /// Of a voice without files of its own.
    pub fn of_program(settings: impl Into<String>) -> Self {
        let model = Arc::new(OnceLock::new());
        let _ = model.set(String::new());
        Self { settings: settings.into(), model, voices: Vec::new() }
    }

    /// Of a model whose files may still be read. `voices`: names and contents, the default first.
    pub fn of_model(settings: String, model: Arc<OnceLock<String>>, voices: Vec<(String, String)>) -> Self {
        Self { settings, model, voices }
    }

    /// Of a worker by what it tells: its model as [`Identity::model`] names it, and its voices as [`Identity::of_model`] has
    /// them.
    pub fn of_worker(model: &str, voices: Vec<(String, String)>) -> Self {
        Self { voices, ..Self::of_program(format!("worker {model}")) }
    }

    /// Voices that are files and what each holds, the default first.
    pub fn voices(&self) -> &[(String, String)] {
        &self.voices
    }

    /// Whether the files have been read.
    pub fn is_known(&self) -> bool {
        self.model.get().is_some()
    }

    /// Names the program, the device and the model together, whichever voice: where it is equal, equal utterances sound
    /// equal. None: the model's files have not been read yet.
    pub fn model(&self) -> Option<String> {
        let mut hash = Sha256::new();
        for part in [env!("CARGO_PKG_VERSION"), &self.settings, self.model.get()?] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        Some(hex(&hash.finalize()[..16]))
    }

    /// The key of `utterance`. None: its text is still being written, there is no such voice, or the model's files have not
    /// been read yet.
    pub fn key(&self, utterance: &Utterance) -> Option<Key> {
        let model = self.model.get().filter(|_| !utterance.streamed)?;
        let voice = match (&utterance.voice, self.voices.first()) {
            (named, None) => format!("by name {named:?}"),
            // The name counts, too: what is sampled depends on it.
            (None, Some(default)) => format!("{default:?}"),
            (Some(name), Some(_)) => format!("{:?}", self.voices.iter().find(|(known, _)| known == name)?),
        };
        let Utterance { text, language, instructions, seed, speed, markup, sounds, .. } = utterance;
        let manner =
            format!("{RATE} {language:?} {instructions:?} {seed} {:08x} {markup:?} {sounds:?}", speed.to_bits());
        let mut hash = Sha256::new();
        for part in [build(), &self.settings, model, &voice, &manner, text] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        Some(hash.finalize().into())
    }
}

/// This build of the program: another one may compute other samples.
fn build() -> &'static str {
    static BUILD: OnceLock<String> = OnceLock::new();
    BUILD.get_or_init(|| {
        let program = std::env::current_exe().and_then(std::fs::metadata).ok();
        let file = program.map(|file| (file.len(), file.modified().ok()));
        format!("{} {file:?}", env!("CARGO_PKG_VERSION"))
    })
}

/// Reads `networks` and the small files in `dir` (two folders deep, without `voices`) on a thread of its own: gigabytes,
/// which nothing waits for. The result is a SHA-256 of them all, told once.
pub fn read_model(dir: &Path, networks: Vec<PathBuf>) -> Arc<OnceLock<String>> {
    let told = Arc::new(OnceLock::new());
    let (dir, tell) = (dir.to_path_buf(), told.clone());
    let thread = std::thread::Builder::new().name("model-hash".into());
    let spawned = thread.spawn(move || match content(&dir, networks) {
        Ok(content) => drop(tell.set(content)),
        Err(error) => tracing::warn!(%error, "the model's files cannot be read again: no phrases are kept"),
    });
    if let Err(error) = spawned {
        tracing::warn!(%error, "no phrases are kept");
    }
    told
}

fn content(dir: &Path, networks: Vec<PathBuf>) -> io::Result<String> {
    let mut files = networks;
    for folder in [dir.to_path_buf()].into_iter().chain(folders(dir)?) {
        for entry in std::fs::read_dir(folder)? {
            let (path, metadata) = entry.and_then(|entry| Ok((entry.path(), entry.path().metadata()?)))?;
            if metadata.is_file() && metadata.len() <= SMALL && !files.contains(&path) {
                files.push(path);
            }
        }
    }
    files.sort();
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    for path in files {
        let mut name = String::new();
        let _ = write!(name, "{:?}", path.strip_prefix(dir).unwrap_or(&path));
        hash.update((name.len() as u64).to_le_bytes());
        hash.update(&name);
        let mut file = File::open(&path)?;
        hash.update(file.metadata()?.len().to_le_bytes());
        loop {
            let count = file.read(&mut buffer)?;
            if count == 0 {
                break;
            }
            hash.update(&buffer[..count]);
        }
    }
    Ok(hex(&hash.finalize()))
}

fn folders(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() && path.file_name().is_some_and(|name| name != "voices") {
            found.push(path);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::turn::{Class, Markup, Phonemes, StreamId};

    fn utterance() -> Utterance {
        Utterance::plain(StreamId::next(), Class::Live, "Hello.")
    }

    #[test]
    fn everything_that_is_heard_changes_the_key_and_nothing_else_does() {
        let voices = vec![("anna".to_owned(), "a".to_owned()), ("bob".to_owned(), "b".to_owned())];
        let model = Arc::new(OnceLock::new());
        let identity = Identity::of_model("gpu".into(), model.clone(), voices.clone());
        assert_eq!(identity.key(&utterance()), None, "the model is not known yet");
        assert_eq!(identity.model(), None);
        model.set("m".to_owned()).expect("once");
        let key = identity.key(&utterance()).expect("known");
        assert_eq!(identity.key(&Utterance { class: Class::Batch, tenant: "crm".into(), ..utterance() }), Some(key));
        assert_eq!(identity.key(&Utterance { voice: Some("anna".into()), ..utterance() }), Some(key), "the default");
        assert_eq!(identity.key(&Utterance { voice: Some("nobody".into()), ..utterance() }), None);
        assert_eq!(identity.key(&Utterance { streamed: true, ..utterance() }), None);
        let told = |content: &str| {
            let model = Arc::new(OnceLock::new());
            model.set(content.to_owned()).expect("once");
            model
        };
        let of = |settings: &str, model: &str| Identity::of_model(settings.into(), told(model), Vec::new());
        let mut enrolled_anew = voices.clone();
        enrolled_anew[0].1 = "c".into();
        let others = [
            identity.key(&Utterance { text: "Hello!".into(), ..utterance() }),
            identity.key(&Utterance { voice: Some("bob".into()), ..utterance() }),
            identity.key(&Utterance { language: Some("en".into()), ..utterance() }),
            identity.key(&Utterance { instructions: Some("softly".into()), ..utterance() }),
            identity.key(&Utterance { seed: 1, ..utterance() }),
            identity.key(&Utterance { speed: 1.1, ..utterance() }),
            identity.key(&Utterance { markup: Markup::Tags, ..utterance() }),
            identity.key(&Utterance { sounds: vec![(0..5, Phonemes::Espeak("ma1".into()))], ..utterance() }),
            identity.key(&Utterance { sounds: vec![(0..5, Phonemes::Pinyin { pinyin: "ma1".into() })], ..utterance() }),
            Identity::of_model("cpu".into(), told("m"), voices.clone()).key(&utterance()),
            Identity::of_model("gpu".into(), told("n"), voices).key(&utterance()),
            Identity::of_model("gpu".into(), told("m"), enrolled_anew).key(&utterance()),
            Identity::of_program("gpu").key(&utterance()),
        ];
        let names: std::collections::HashSet<_> =
            [("gpu", "m"), ("gpu", "n"), ("cpu", "m")].map(|(settings, model)| of(settings, model).model()).into();
        assert_eq!(names.len(), 3);
        assert_eq!(identity.model(), of("gpu", "m").model(), "whichever voices it has");
        let different: std::collections::HashSet<_> = others.iter().flatten().chain([&key]).collect();
        assert_eq!(different.len(), others.len() + 1);
    }

    #[test]
    fn a_model_is_its_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("written");
        std::fs::create_dir_all(folder.path().join("voices")).expect("a folder");
        std::fs::create_dir_all(folder.path().join("words")).expect("a folder");
        write("llm.pt", "weights");
        write("words/vocab.json", "{}");
        let now = || content(folder.path(), vec![folder.path().join("llm.pt")]).expect("readable");
        let first = now();
        write("voices/anna", "a voice counts by itself");
        assert_eq!(now(), first);
        write("words/vocab.json", "[]");
        let second = now();
        assert_ne!(second, first);
        write("llm.pt", "weighty");
        assert_ne!(now(), second);
    }
}
