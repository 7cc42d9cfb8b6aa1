//! What may be shown of a configuration: every key with its value, secrets left out.
//!
//! # Why
//! The schema says which values are secrets, and a test keeps the schema equal to the types: what it does not know is
//! not shown either. So a key that is added later cannot leak because somebody forgot a list here.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde_json::{Map, Value, json};

use super::SCHEMA;

/// In place of a secret.
const REDACTED: &str = "[redacted]";
/// The reference that marks a secret in the schema.
const SECRET: &str = "#/$defs/secret";

static KNOWN: LazyLock<Value> = LazyLock::new(|| serde_json::from_str(SCHEMA).expect("a test reads it, too"));

/// `value` of the key `section.key` without what is secret in it.
pub(super) fn shown(section: &str, key: &str, value: &toml::Value) -> Value {
    let section = &KNOWN["properties"][section];
    let node = match &section["properties"][key] {
        Value::Null => &section["additionalProperties"],
        node => node,
    };
    redacted(value, node)
}

/// Every key that can be set, with the value that is set or the default, and what it means.
pub(super) fn settings<'a>(set: impl Iterator<Item = (&'a str, &'a Value)>) -> Vec<Value> {
    let mut set: BTreeMap<&str, &Value> = set.collect();
    let mut all = Vec::new();
    for (section, node) in KNOWN["properties"].as_object().into_iter().flatten() {
        for (key, node) in node["properties"].as_object().into_iter().flatten() {
            let name = format!("{section}.{key}");
            let found = set.remove(name.as_str());
            all.push(json!({
                "key": name, "value": over(defaults(node), found), "isSet": found.is_some(),
                "description": node["description"],
            }));
        }
    }
    // Agents, tenants and the like: their names are the user's own.
    all.extend(set.into_iter().map(|(key, value)| {
        let section = key.split('.').next().unwrap_or_default();
        let description = &KNOWN["properties"][section]["description"];
        json!({ "key": key, "value": value, "isSet": true, "description": description })
    }));
    all
}

/// The default of a key; of a table, those of its keys.
fn defaults(node: &Value) -> Value {
    match (&node["default"], node["properties"].as_object()) {
        (Value::Null, Some(keys)) => {
            let known = keys.iter().map(|(key, node)| (key.clone(), defaults(node)));
            let known: Map<String, Value> = known.filter(|(_, value)| !value.is_null()).collect();
            if known.is_empty() { Value::Null } else { known.into() }
        }
        (default, _) => default.clone(),
    }
}

/// `base` with what is set in its place; tables key by key.
fn over(base: Value, set: Option<&Value>) -> Value {
    match (base, set) {
        (base, None) => base,
        (Value::Object(mut base), Some(Value::Object(set))) => {
            for (key, value) in set {
                let below = base.remove(key).unwrap_or_default();
                base.insert(key.clone(), over(below, Some(value)));
            }
            base.into()
        }
        (_, Some(set)) => set.clone(),
    }
}

fn redacted(value: &toml::Value, node: &Value) -> Value {
    if node["$ref"] == SECRET {
        return secret(value);
    }
    if let Some(branches) = node["anyOf"].as_array() {
        return match branches.iter().find(|branch| takes(branch, value)) {
            Some(branch) => redacted(value, branch),
            None => REDACTED.into(),
        };
    }
    match value {
        toml::Value::Table(table) => {
            let mut shown = Map::new();
            for (key, value) in table {
                let inner = match &node["properties"][key] {
                    Value::Null => &node["additionalProperties"],
                    inner => inner,
                };
                shown.insert(key.clone(), if inner.is_object() { redacted(value, inner) } else { REDACTED.into() });
            }
            shown.into()
        }
        toml::Value::Array(values) => values.iter().map(|value| redacted(value, &node["items"])).collect(),
        _ if node.is_null() => REDACTED.into(),
        toml::Value::String(text) => without_credentials(text).into(),
        other => json!(other),
    }
}

/// Where a secret is read from is none.
fn secret(value: &toml::Value) -> Value {
    match value {
        toml::Value::Table(table) if table.keys().all(|key| key == "env" || key == "file") => json!(table),
        _ => REDACTED.into(),
    }
}

/// Whether `value` may be of this branch of an `anyOf`.
fn takes(branch: &Value, value: &toml::Value) -> bool {
    let is_secret = branch["$ref"] == SECRET;
    match value {
        toml::Value::Table(table) => {
            let known = |key: &String| match is_secret {
                true => key == "env" || key == "file",
                false => !branch["properties"][key].is_null() || branch["additionalProperties"].is_object(),
            };
            (is_secret || branch["type"] == "object") && table.keys().all(known)
        }
        toml::Value::Array(_) => branch["type"] == "array",
        toml::Value::String(_) => is_secret || branch["type"] == "string",
        _ => !is_secret && branch["type"] != "object" && branch["type"] != "array",
    }
}

/// A URL may have a password before its host and a token in its query.
fn without_credentials(text: &str) -> String {
    let Some((scheme, rest)) = text.split_once("://") else { return text.to_owned() };
    let (rest, query) = match rest.split_once('?') {
        Some((rest, _)) => (rest, "?[redacted]"),
        None => (rest, ""),
    };
    let host = rest.find('/').unwrap_or(rest.len());
    let rest = match rest[..host].rfind('@') {
        Some(at) => format!("[redacted]{}", &rest[at..]),
        None => rest.to_owned(),
    };
    format!("{scheme}://{rest}{query}")
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    #[test]
    fn every_key_is_shown_with_its_value_and_no_secret_is() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("gateway.toml");
        let text = r#"
            [http]
            tokens = ["sesame-sesame-sesame-1", { name = "crm", token = "sesame-sesame-sesame-2", scopes = ["calls"] }]
            [log]
            level = "debug"
            [call.barge_in]
            grace_ms = 321
            [agent.shop]
            url = "wss://bot:sesame@agent.example/relay?key=sesame"
            headers = { authorization = "Bearer sesame" }
            [agent.bot]
            llm = { base_url = "http://127.0.0.1:8000/v1", model = "m", api_key = "sesame" }
        "#;
        std::fs::write(&file, text).expect("written");
        let config = Config::load(Some(&file), []).expect("valid");
        let shown = config.source.in_force();
        assert!(!shown.to_string().contains("sesame"), "{shown}");
        let of = |key: &str| {
            let all = shown["settings"].as_array().expect("a list");
            all.iter().find(|one| one["key"] == key).unwrap_or_else(|| panic!("{key}: {shown}")).clone()
        };
        assert_eq!(of("http.tokens")["value"][1]["name"], "crm");
        assert_eq!((&of("log.level")["value"], &of("log.level")["isSet"]), (&"debug".into(), &true.into()));
        assert_eq!(of("http.bind")["value"], "127.0.0.1:8080");
        assert_eq!(of("http.bind")["isSet"], false);
        let barge_in = &of("call.barge_in")["value"];
        assert_eq!(barge_in["grace_ms"], 321);
        assert!(barge_in.as_object().is_some_and(|keys| keys.len() > 2), "with its other defaults: {barge_in}");
        assert!(of("http.bind")["description"].as_str().is_some_and(|text| !text.is_empty()));
        assert_eq!(of("agent.shop")["value"]["url"], "wss://[redacted]@agent.example/relay?[redacted]");
        assert_eq!(of("agent.bot")["value"]["llm"]["model"], "m");
        assert_eq!(shown["file"], file.display().to_string());
    }

    #[test]
    fn the_file_that_sets_every_key_shows_none_of_its_secrets() {
        let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/every-key.toml");
        let text = std::fs::read_to_string(&file).expect("readable");
        let table: toml::Table = text.parse().expect("TOML");
        let shown = crate::config::Source::new(Some(file), &table).in_force().to_string();
        // What the file calls by these names is secret, wherever it stands.
        fn secrets(value: &toml::Value, found: &mut Vec<String>) {
            match value {
                toml::Value::Table(table) => {
                    for (key, value) in table {
                        let is_secret =
                            ["password", "token", "api_key", "credential", "secret"].contains(&key.as_str());
                        match value.as_str() {
                            Some(text) if is_secret => found.push(text.to_owned()),
                            _ => secrets(value, found),
                        }
                    }
                }
                toml::Value::Array(values) => values.iter().for_each(|value| secrets(value, found)),
                _ => {}
            }
        }
        let mut found = Vec::new();
        secrets(&toml::Value::Table(table), &mut found);
        assert!(found.len() >= 3, "{found:?}");
        for secret in found.iter().filter(|secret| secret.len() > 3) {
            assert!(!shown.contains(&format!("\"{secret}\"")), "{secret}");
        }
    }
}
