//! Every key of the configuration, set: `tests/data/every-key.toml` has each once, with another value than its default.

use std::path::{Path, PathBuf};

use antiphon::config::{Config, SCHEMA};
use serde_json::Value;

use super::program::succeeds;

/// One step from the root to a key.
#[derive(Clone, Debug, PartialEq)]
enum Step {
    Key(String),
    /// Any name, of a table whose names are free.
    Any,
    /// Any entry of a list.
    Entry,
}

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/every-key.toml")
}

/// Excluded by the login that the file has there (`ice_servers`, of the same kind, has both), and by `invariant`.
const EXCLUDED: [&[&str]; 3] = [&["webrtc", "turn", "secret"], &["webrtc", "turn", "ttl_s"], &["engine", "products"]];

/// Every key of the schema that holds a value, with its default.
fn keys() -> Vec<(Vec<Step>, Option<Value>)> {
    let schema: Value = serde_json::from_str(SCHEMA).expect("JSON");
    let mut found = Vec::new();
    walk(&schema, &schema, Vec::new(), &mut found);
    let named = |keys: &[&str]| keys.iter().map(|&key| Step::Key(key.to_owned())).collect::<Vec<_>>();
    let excluded = |path: &[Step]| EXCLUDED.iter().any(|keys| path == named(keys));
    found.retain(|(path, _)| !excluded(path));
    found
}

fn walk(schema: &Value, node: &Value, path: Vec<Step>, found: &mut Vec<(Vec<Step>, Option<Value>)>) {
    let target = node["$ref"].as_str().and_then(|to| schema.pointer(to.strip_prefix('#')?));
    let inside = target.unwrap_or(node);
    let below = |step: Step| path.iter().cloned().chain([step]).collect::<Vec<_>>();
    if let Some(keys) = inside["properties"].as_object() {
        for (key, node) in keys {
            walk(schema, node, below(Step::Key(key.clone())), found);
        }
    } else if inside["additionalProperties"].is_object() {
        walk(schema, &inside["additionalProperties"], below(Step::Any), found);
    } else if inside["items"]["properties"].is_object() || inside["items"]["$ref"].is_string() {
        walk(schema, &inside["items"], below(Step::Entry), found);
    } else {
        found.push((path, node.get("default").or_else(|| inside.get("default")).cloned()));
    }
}

/// The value at `path`; where names are free or a list is, of the first entry that has it.
fn find<'a>(value: &'a toml::Value, path: &[Step]) -> Option<&'a toml::Value> {
    let Some((step, rest)) = path.split_first() else { return Some(value) };
    match step {
        Step::Key(key) => find(value.get(key)?, rest),
        Step::Any => value.as_table()?.values().find_map(|inner| find(inner, rest)),
        Step::Entry => value.as_array()?.iter().find_map(|inner| find(inner, rest)),
    }
}

/// `value` without what is at `path`.
fn remove(value: &mut toml::Value, path: &[Step]) {
    let Some((step, rest)) = path.split_first() else { return };
    match (step, value) {
        (Step::Key(key), toml::Value::Table(table)) if rest.is_empty() => drop(table.remove(key)),
        (Step::Key(key), toml::Value::Table(table)) => {
            if let Some(inner) = table.get_mut(key) {
                remove(inner, rest);
            }
        }
        (Step::Any, toml::Value::Table(table)) if rest.is_empty() => table.clear(),
        (Step::Any, toml::Value::Table(table)) => table.iter_mut().for_each(|(_, inner)| remove(inner, rest)),
        (Step::Entry, toml::Value::Array(list)) if rest.is_empty() => list.clear(),
        (Step::Entry, toml::Value::Array(list)) => list.iter_mut().for_each(|inner| remove(inner, rest)),
        (_, other) => panic!("{step:?} in {other}"),
    }
}

/// What the program makes of `text`; `None` where it refuses it.
fn read(text: &str) -> Option<String> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("c.toml");
    std::fs::write(&path, text).expect("written");
    Config::load(Some(&path), []).ok().map(|config| format!("{config:#?}"))
}

#[test]
fn every_key_is_set_read_and_no_default() {
    let text = std::fs::read_to_string(file()).expect("readable");
    let all: toml::Value = toml::from_str(&text).expect("TOML");
    let whole = read(&text).expect("a valid file");
    let keys = keys();
    assert!(keys.len() > 100, "{}", keys.len());
    for (path, default) in keys {
        let value = find(&all, &path).unwrap_or_else(|| panic!("{} does not set {path:?}", file().display()));
        if let Some(default) = default {
            assert_ne!(serde_json::to_value(value).expect("JSON"), default, "{path:?} has its default");
        }
        let mut without = all.clone();
        remove(&mut without, &path);
        let without = read(&toml::to_string(&without).expect("TOML"));
        assert_ne!(without.as_ref(), Some(&whole), "{path:?} is not read");
    }
}

#[tokio::test]
async fn check_takes_every_key() {
    let folder = tempfile::tempdir().expect("a folder");
    let said = succeeds(folder.path(), &["check", "-c", file().to_str().expect("a path")]).await;
    assert!(said.contains("valid"), "{said}");
}
