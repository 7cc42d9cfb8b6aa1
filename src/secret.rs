//! Values that never appear in logs.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{Deserializer, Error};

/// Longest file that holds a secret, bytes.
pub const MAX_FILE: usize = 64 << 10;

/// A secret from the configuration: a string, `{ env = "NAME" }` or `{ file = "PATH" }`.
///
/// It is resolved while the configuration is read, so a missing variable or file is a configuration error
/// with its key; afterwards only [`Secret::reveal`] shows it.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Secret(String);

impl Secret {
    /// A secret known already.
    pub fn new(value: impl Into<String>) -> Self {
        Self(value.into())
    }

    /// The value of an environment variable.
    ///
    /// # Errors
    /// It is not set, or empty: an empty secret would open what it should close.
    pub fn from_env(name: &str) -> Result<Self, String> {
        match variable(name) {
            None => Err(format!("the environment variable `{name}` is not set")),
            Some(value) if value.is_empty() => Err(format!("the environment variable `{name}` is empty")),
            Some(value) => Ok(Self(value)),
        }
    }

    /// The text of a file, without the newline at its end.
    ///
    /// # Errors
    /// It cannot be read, is empty, or is longer than [`MAX_FILE`].
    pub fn from_file(path: &Path) -> Result<Self, String> {
        let file = path.display();
        let unreadable = |reason: String| format!("the secret file `{file}` cannot be read: {reason}");
        let bytes = crate::file::read_at_most(path, MAX_FILE).map_err(|error| unreadable(error.to_string()))?;
        let text = String::from_utf8(bytes).map_err(|_| unreadable("it is not UTF-8".to_owned()))?;
        // Newlines are what editors and `echo` leave; they are never part of a secret.
        match text.trim_end_matches(['\r', '\n']) {
            "" => Err(format!("the secret file `{file}` is empty")),
            text => Ok(Self(text.to_owned())),
        }
    }

    /// The value, for the one place that needs it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

/// Equality in a time that tells nothing of how much was right, only whether the lengths are equal.
pub fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differs, (x, y)| differs | (x ^ y)) == 0
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[redacted]")
    }
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "a string, { env = \"NAME\" } or { file = \"PATH\" }")]
enum Source {
    Plain(String),
    Env(FromEnv),
    File(FromFile),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FromEnv {
    env: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FromFile {
    file: PathBuf,
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Source::deserialize(deserializer)? {
            Source::Plain(value) if value.is_empty() => Err("a secret is empty".to_owned()),
            Source::Plain(value) => Ok(Self(value)),
            Source::Env(FromEnv { env }) => Self::from_env(&env),
            Source::File(FromFile { file }) => Self::from_file(&file),
        }
        .map_err(D::Error::custom)
    }
}

#[expect(clippy::disallowed_methods, reason = "secrets are read here, everything else in `config`")]
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize, Debug)]
    struct Holder {
        token: Secret,
    }

    #[test]
    fn debug_never_shows_it() {
        let holder: Holder = toml::from_str("token = \"hunter2\"").expect("parses");
        assert_eq!(holder.token.reveal(), "hunter2");
        assert!(!format!("{holder:?}").contains("hunter2"));
    }

    #[test]
    fn a_file_is_read_without_its_newline() {
        let dir = tempfile::tempdir().expect("temp dir");
        let path = dir.path().join("s");
        std::fs::write(&path, "abc\n").expect("write");
        let holder: Holder = toml::from_str(&format!("token = {{ file = {path:?} }}")).expect("parses");
        assert_eq!(holder.token.reveal(), "abc");
    }

    #[test]
    fn an_empty_secret_is_refused_with_where_it_is_from() {
        let dir = tempfile::tempdir().expect("temp dir");
        let path = dir.path().join("s");
        std::fs::write(&path, "\n").expect("write");
        for text in ["token = \"\"".to_owned(), format!("token = {{ file = {path:?} }}")] {
            let error = toml::from_str::<Holder>(&text).expect_err("empty").to_string();
            assert!(error.contains("is empty"), "{error}");
        }
    }

    #[test]
    fn a_missing_variable_is_named() {
        let error = toml::from_str::<Holder>("token = { env = \"ANTIPHON_NO_SUCH_VARIABLE\" }").expect_err("not set");
        assert!(error.to_string().contains("ANTIPHON_NO_SUCH_VARIABLE"), "{error}");
    }
}
