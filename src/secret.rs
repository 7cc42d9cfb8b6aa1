//! Values that never appear in logs.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error};

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

    /// The value, for the one place that needs it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
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
    file: String,
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Source::deserialize(deserializer)? {
            Source::Plain(value) => Ok(Self(value)),
            Source::Env(FromEnv { env }) => variable(&env)
                .map(Self)
                .ok_or_else(|| D::Error::custom(format!("the environment variable `{env}` is not set"))),
            Source::File(FromFile { file }) => match std::fs::read_to_string(&file) {
                // One trailing newline is what editors and `echo` leave; it is never part of a secret.
                Ok(text) => Ok(Self(text.trim_end_matches(['\r', '\n']).to_owned())),
                Err(e) => Err(D::Error::custom(format!("the secret file `{file}` cannot be read: {e}"))),
            },
        }
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
    fn a_missing_variable_is_named() {
        let error = toml::from_str::<Holder>("token = { env = \"ANTIPHON_NO_SUCH_VARIABLE\" }").expect_err("not set");
        assert!(error.to_string().contains("ANTIPHON_NO_SUCH_VARIABLE"), "{error}");
    }
}
