//! Where a configuration was read from, and what tells one state of it from the next.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::in_force;
use crate::file;

/// The file, and of each key a digest and what may be shown: enough to name what changed, without a copy of the secrets.
#[derive(Clone, Default)]
pub struct Source {
    /// `None`: only defaults and the environment.
    pub file: Option<PathBuf>,
    keys: BTreeMap<String, Key>,
}

/// The value of a key.
#[derive(Clone, PartialEq, Eq)]
struct Key {
    digest: [u8; 32],
    shown: serde_json::Value,
}

impl Source {
    pub(super) fn new(file: Option<PathBuf>, table: &toml::Table) -> Self {
        let mut keys = BTreeMap::new();
        for (section, value) in table {
            match value {
                toml::Value::Table(inner) => {
                    keys.extend(inner.iter().map(|(key, value)| {
                        let shown = in_force::shown(section, key, value);
                        (format!("{section}.{key}"), Key { digest: digest(value), shown })
                    }));
                }
                value => {
                    // No section is anything but a table; the types have refused it before.
                    keys.insert(section.clone(), Key { digest: digest(value), shown: serde_json::Value::Null });
                }
            }
        }
        Self { file, keys }
    }

    /// The file and every key that can be set, with the value it has, without secrets: for operators to look at.
    pub fn in_force(&self) -> serde_json::Value {
        let set = self.keys.iter().map(|(name, key)| (name.as_str(), &key.shown));
        serde_json::json!({ "file": self.file, "settings": in_force::settings(set) })
    }

    /// The keys (`section.key`) that are there in one of the two only, or have another value.
    pub fn changes(&self, to: &Source) -> BTreeSet<String> {
        let all = self.keys.keys().chain(to.keys.keys());
        all.filter(|key| self.keys.get(*key) != to.keys.get(*key)).cloned().collect()
    }

    /// Makes these keys what they are in `from`.
    pub fn take(&mut self, from: &Source, keys: &BTreeSet<String>) {
        for key in keys {
            match from.keys.get(key) {
                Some(value) => self.keys.insert(key.clone(), value.clone()),
                None => self.keys.remove(key),
            };
        }
    }
}

/// A secret that is read from a file counts by its text, so that another text is a change.
fn digest(value: &toml::Value) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(value.to_string());
    add_files(value, &mut hash);
    hash.finalize().into()
}

fn add_files(value: &toml::Value, hash: &mut Sha256) {
    match value {
        toml::Value::Table(table) => {
            if let Some(path) = table.get("file").and_then(toml::Value::as_str) {
                // What cannot be read was refused before, where it is a secret.
                hash.update(file::read_at_most(Path::new(path), file::MAX_NAMED).unwrap_or_default());
            }
            table.values().for_each(|value| add_files(value, hash));
        }
        toml::Value::Array(values) => values.iter().for_each(|value| add_files(value, hash)),
        _ => {}
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Source")
    }
}
