//! A configuration that is one file, or a folder of them.

use std::path::{Path, PathBuf};

use super::ConfigError;

/// One file.
pub(super) struct Part {
    pub(super) origin: String,
    pub(super) text: String,
}

/// The file at `path`, or those with the ending `.toml` in the folder there, by name; none where there is no path.
pub(super) fn read(path: Option<&Path>) -> Result<Vec<Part>, ConfigError> {
    let Some(path) = path else { return Ok(Vec::new()) };
    let wrong = |path: &Path, message: String| ConfigError { origin: path.display().to_string(), message };
    let files = match path.is_dir() {
        false => vec![path.to_owned()],
        true => listed(path).map_err(|error| wrong(path, unreadable(&error)))?,
    };
    if files.is_empty() {
        return Err(wrong(path, "has no file that ends in .toml".into()));
    }
    let parts = files.iter().map(|file| match std::fs::read_to_string(file) {
        Ok(text) => Ok(Part { origin: file.display().to_string(), text }),
        Err(error) => Err(wrong(file, unreadable(&error))),
    });
    parts.collect()
}

fn unreadable(error: &std::io::Error) -> String {
    format!(
        "cannot be read: {error}; without -c the defaults hold, and packages keep theirs in /etc/antiphon/gateway.toml"
    )
}

fn listed(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        // Kubernetes keeps the files of a ConfigMap behind links in folders that begin with two dots.
        let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if !hidden && path.extension().is_some_and(|ending| ending == "toml") && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Adds the keys of `from`: sections and lists of sections (`[[sip.trunk]]`) grow together, and no key is set twice.
///
/// # Errors
/// `[section] key` of one that is.
pub(super) fn merge(into: &mut toml::Table, from: toml::Table, section: &str) -> Result<(), String> {
    let of_tables = |list: &[toml::Value]| !list.is_empty() && list.iter().all(toml::Value::is_table);
    for (key, value) in from {
        match (into.get_mut(&key), value) {
            (None, value) => drop(into.insert(key, value)),
            (Some(toml::Value::Table(there)), toml::Value::Table(value)) => {
                let inner = if section.is_empty() { key } else { format!("{section}.{key}") };
                merge(there, value, &inner)?;
            }
            (Some(toml::Value::Array(there)), toml::Value::Array(value)) if of_tables(there) && of_tables(&value) => {
                there.extend(value);
            }
            (Some(_), _) => return Err(format!("[{section}] {key}")),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).expect("written");
        }
        folder
    }

    #[test]
    fn the_files_of_a_folder_are_one_configuration() {
        let trunk = |name: &str| format!("[[sip.trunk]]\nname = \"{name}\"\nhost = \"{name}.example\"\n");
        let folder = folder(&[
            ("10-http.toml", "[http]\nbind = \"127.0.0.1:1\"\n[call]\nmax_calls = 7\n"),
            ("20-a.toml", &format!("{}[agent.a]\nurl = \"builtin:silent\"\n", trunk("a"))),
            ("30-b.toml", &format!("{}[agent.b]\nurl = \"builtin:demo\"\n[call]\nshards = 1\n", trunk("b"))),
            ("notes.txt", "no configuration"),
            (".hidden.toml", "nor this"),
        ]);
        let config = Config::load(Some(folder.path()), []).expect("valid");
        assert_eq!((config.http.bind.port(), config.call.max_calls, config.call.shards), (1, 7, 1));
        let trunks: Vec<&str> = config.sip.trunk.iter().map(|trunk| trunk.name.as_str()).collect();
        assert_eq!(trunks, ["a", "b"]);
        assert!(config.agent.contains_key("a") && config.agent.contains_key("b"));
    }

    #[test]
    fn a_mistake_in_a_folder_is_told_with_its_file_and_line() {
        for (files, place, what) in [
            (
                vec![("a.toml", "[call]\nmax_calls = 7\n"), ("b.toml", "[call]\n\nmax_calls = 8\n")],
                "b.toml:3",
                "sets, too",
            ),
            (vec![("a.toml", ""), ("b.toml", "[call]\nmax_cals = 8\n")], "b.toml:2", "did you mean"),
            (vec![("a.toml", ""), ("b.toml", "[call.vad]\nonset_ms = 500\n")], "b.toml", "onset_ms"),
            (vec![("a.txt", "")], "", "no file that ends in .toml"),
        ] {
            let folder = folder(&files);
            let error = Config::load(Some(folder.path()), []).expect_err(what).to_string();
            assert!(error.contains(place) && error.contains(what), "{error}");
        }
    }
}
