//! `config/schema.json` against the types: the same keys, required and not, the same defaults, the same words.
//!
//! The types tell their keys themselves: serde names every known one when it refuses an unknown one.

use std::collections::BTreeSet;

use serde_json::Value;

use super::*;

/// An object of the schema, and the TOML that leads there with `@` for it.
struct Place {
    name: String,
    node: Value,
    around: String,
}

fn schema() -> Value {
    serde_json::from_str(SCHEMA).expect("JSON")
}

/// Follows `$ref` within the document.
fn resolved(node: &Value) -> Value {
    match node["$ref"].as_str().and_then(|path| path.strip_prefix('#')) {
        Some(path) => schema().pointer(path).expect("a definition").clone(),
        None => node.clone(),
    }
}

/// Every object with fixed keys, from the root on. `around` has `@` where the value of `node` stands.
fn objects(name: &str, node: &Value, around: &str, found: &mut Vec<Place>) {
    let node = resolved(node);
    if let Some(keys) = node["properties"].as_object() {
        found.push(Place { name: name.to_owned(), node: node.clone(), around: around.to_owned() });
        for (key, inner) in keys {
            // What must be there so that only the key in question is wrong.
            let required = node["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
            let mut all: Vec<String> = required
                .filter(|other| *other != key)
                .map(|other| format!("{other} = {}", sample(&keys[other])))
                .collect();
            all.push(format!("{key} = @"));
            let around = around.replace('@', &format!("{{ {} }}", all.join(", ")));
            objects(&format!("{name}.{key}"), inner, &around, found);
        }
    }
    if node["additionalProperties"].is_object() {
        objects(&format!("{name}.x"), &node["additionalProperties"], &around.replace('@', "{ x = @ }"), found);
    }
    if node["items"].is_object() {
        objects(&format!("{name}[]"), &node["items"], &around.replace('@', "[@]"), found);
    }
}

/// A value that the schema allows.
fn sample(node: &Value) -> String {
    let node = resolved(node);
    if node["anyOf"].is_array() {
        return sample(&node["anyOf"][0]);
    }
    if let Some(first) = node["enum"].get(0).or(node["examples"].get(0)) {
        return first.to_string();
    }
    match node["type"].as_str() {
        Some("integer") => "100".into(),
        Some("number") => "0.5".into(),
        Some("boolean") => "true".into(),
        Some("array") => "[]".into(),
        Some("object") => "{}".into(),
        _ => "\"127.0.0.1:1\"".into(),
    }
}

fn read(text: &str) -> Result<Config, String> {
    toml::from_str::<Config>(text).map_err(|error| error.message().to_owned())
}

/// The text of `place` with `inner` in its table.
fn at(place: &Place, inner: &str) -> String {
    if place.name.is_empty() { inner.to_owned() } else { place.around.replace('@', &format!("{{ {inner} }}")) }
}

fn places() -> Vec<Place> {
    let mut found = Vec::new();
    let schema = schema();
    found.push(Place { name: String::new(), node: schema.clone(), around: String::new() });
    for (key, node) in schema["properties"].as_object().expect("sections") {
        objects(key, node, &format!("{key} = @"), &mut found);
    }
    found
}

#[test]
fn the_schema_has_the_keys_of_the_types() {
    let mut seen = 0;
    for place in places() {
        let error = read(&at(&place, "nonsense = 1")).expect_err(&place.name);
        // Where several forms are possible the types only say that none fits.
        if !error.starts_with("unknown field") {
            assert!(place.name.contains("tokens") || place.name.contains("password"), "{}: {error}", place.name);
            continue;
        }
        let known: BTreeSet<&str> = error.split('`').skip(3).step_by(2).collect();
        let keys = place.node["properties"].as_object().expect("an object").keys();
        assert_eq!(keys.map(String::as_str).collect::<BTreeSet<_>>(), known, "{}", place.name);
        seen += 1;
    }
    assert!(seen > 18, "{seen}");
}

#[test]
fn the_schema_allows_and_demands_what_the_types_do() {
    for place in places() {
        let keys = place.node["properties"].as_object().expect("an object");
        let required: BTreeSet<&str> =
            place.node["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let with = |but: &str, more: &str| {
            let needed =
                required.iter().filter(|key| **key != but).map(|key| format!("{key} = {}", sample(&keys[*key])));
            let mut all: Vec<String> = needed.collect();
            all.extend((!more.is_empty()).then(|| more.to_owned()));
            at(&place, &all.join(if place.name.is_empty() { "\n" } else { ", " }))
        };
        for key in &required {
            assert!(read(&with(key, "")).is_err(), "{}: {key} is required", place.name);
        }
        for (key, node) in keys {
            let node = resolved(node);
            for word in node["enum"].as_array().into_iter().flatten() {
                let text = with(key, &format!("{key} = {word}"));
                read(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
            }
            // Words that the types know and the schema does not: an unknown one makes them name theirs.
            if node["enum"].is_array()
                && let Err(error) = read(&with(key, &format!("{key} = \"nonsense\"")))
                && error.starts_with("unknown variant")
            {
                let known: BTreeSet<&str> = error.split('`').skip(3).step_by(2).collect();
                let words: BTreeSet<&str> =
                    node["enum"].as_array().expect("words").iter().filter_map(Value::as_str).collect();
                assert_eq!(words, known, "{}.{key}", place.name);
            }
            let wrong = if matches!(node["type"].as_str(), Some("string")) { "5" } else { "\"?\"" };
            if node["anyOf"].is_null() {
                let text = with(key, &format!("{key} = {wrong}"));
                assert!(read(&text).is_err(), "{text}: a value of another type is taken");
            }
        }
    }
}

#[test]
fn the_schema_has_the_defaults_of_the_shipped_file() {
    // Which another test keeps equal to those of the types.
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("config/gateway.toml");
    let shipped: Value = toml::from_str(&std::fs::read_to_string(path).expect("the file")).expect("TOML");
    let mut compared = 0;
    for place in places().iter().filter(|place| !place.name.contains(['[', ' '])) {
        let pointer: String =
            place.name.split('.').filter(|part| !part.is_empty()).map(|part| format!("/{part}")).collect();
        let Some(table) = shipped.pointer(&pointer).and_then(Value::as_object) else { continue };
        for (key, node) in place.node["properties"].as_object().expect("an object") {
            match (table.get(key), node.get("default")) {
                (Some(there), Some(told)) => assert_eq!(there, told, "{}.{key}", place.name),
                (Some(Value::Object(_)), None) | (None, None) => continue,
                (None, Some(told)) => panic!("{}.{key} has the default {told}, the shipped file has none", place.name),
                (Some(there), None) => {
                    panic!("{}.{key}: the shipped file has {there}, the schema no default", place.name)
                }
            }
            compared += 1;
        }
    }
    assert!(compared > 60, "{compared}");
}
