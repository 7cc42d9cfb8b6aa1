//! Where the code of others comes from, and under which licence. `cargo deny check --config .github/deny.toml` says the
//! same, and also knows of vulnerabilities; it takes minutes to build, so this test needs only what cargo itself knows.

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::Value;

use crate::tree::{files, root};

/// Where packages may come from.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Licences under which a binary may be given away with a notice. MPL-2.0 is by file: ours are not touched by it.
const LICENCES: [&str; 12] = [
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "MPL-2.0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Whether an SPDX expression is satisfied by licences of the list. `/` is the old way to write OR.
fn allowed(expression: &str) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = words.as_slice();
    let value = any(&mut rest);
    value && rest.is_empty()
}

fn any(words: &mut &[&str]) -> bool {
    let mut value = all(words);
    while let ["OR", rest @ ..] = *words {
        *words = rest;
        // Not short-circuited: what follows has to be read.
        value |= all(words);
    }
    value
}

fn all(words: &mut &[&str]) -> bool {
    let mut value = one(words);
    while let ["AND", rest @ ..] = *words {
        *words = rest;
        value &= one(words);
    }
    value
}

fn one(words: &mut &[&str]) -> bool {
    match *words {
        ["(", rest @ ..] => {
            *words = rest;
            let value = any(words);
            if let [")", rest @ ..] = *words {
                *words = rest;
                return value;
            }
            false
        }
        // An exception only permits more.
        [name, "WITH", _, rest @ ..] | [name, rest @ ..] => {
            *words = rest;
            LICENCES.contains(name)
        }
        [] => false,
    }
}

#[test]
fn an_expression_is_read_as_spdx_has_it() {
    for good in
        ["MIT", "MIT/Apache-2.0", "GPL-3.0 OR MIT", "(MIT OR GPL-3.0) AND Zlib", "Apache-2.0 WITH LLVM-exception"]
    {
        assert!(allowed(good), "{good}");
    }
    for bad in ["", "GPL-3.0", "MIT AND GPL-3.0", "(MIT OR GPL-3.0", "MIT Apache-2.0", "MIT AND (GPL-3.0 OR AGPL-3.0)"]
    {
        assert!(!allowed(bad), "{bad}");
    }
}

#[test]
fn every_package_comes_from_the_registry_with_its_checksum() {
    let text = std::fs::read_to_string(root().join("Cargo.lock")).expect("readable");
    let lock: toml::Table = text.parse().expect("TOML");
    let packages = lock["package"].as_array().expect("a list");
    let mut foreign = Vec::new();
    for package in packages {
        let (source, checksum) = (package.get("source"), package.get("checksum"));
        // Without a source it is one of the workspace.
        if source.is_some_and(|source| source.as_str() != Some(REGISTRY) || checksum.is_none()) {
            foreign.push(package["name"].to_string());
        }
    }
    assert!(packages.len() > 100 && foreign.is_empty(), "not from {REGISTRY}: {foreign:?}");
}

#[test]
fn every_package_has_a_licence_that_the_notice_satisfies() {
    let host = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--locked", "--offline", "--filter-platform", &host])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    if !output.status.success() {
        // A vendored or partial registry: the sources are checked above all the same.
        println!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let packages = metadata["packages"].as_array().expect("a list");
    let used: BTreeSet<&str> = metadata["resolve"]["nodes"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|node| node["id"].as_str())
        .collect();
    let mut wrong = Vec::new();
    for package in packages.iter().filter(|package| package["id"].as_str().is_some_and(|id| used.contains(id))) {
        let licence = package["license"].as_str().unwrap_or_default();
        if !allowed(licence) {
            wrong.push(format!("{} {}: `{licence}`", package["name"], package["version"]));
        }
    }
    assert!(used.len() > 100, "{}", used.len());
    assert!(
        wrong.is_empty(),
        "licences that are not in the list of this test and of .github/deny.toml:\n{}",
        wrong.join("\n")
    );
}

/// Names in the code that are not the package's own.
const CALLED: &[(&str, &str)] = &[("md-5", "md5")];

/// Whether `written` is in `text` with no longer name before it: `my_http::` does not use `http`.
fn begins(text: &str, written: &str) -> bool {
    text.match_indices(written).any(|(at, _)| !text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_'))
}

/// A dependency that no source names only costs time and trust.
#[test]
fn every_dependency_is_used() {
    let mut unused = Vec::new();
    for (manifest, sources, tests) in [
        ("Cargo.toml", &["src"][..], &["src", "tests"][..]),
        ("loadgen/Cargo.toml", &["loadgen/src"], &["loadgen"]),
        ("sdp/Cargo.toml", &["sdp/src"], &["sdp"]),
        ("src/webrtc/dtls/Cargo.toml", &["src/webrtc/dtls"], &["src/webrtc/dtls"]),
        ("src/paste/Cargo.toml", &["src/paste"], &["src/paste"]),
    ] {
        let text = std::fs::read_to_string(root().join(manifest)).expect("a manifest");
        let table: toml::Table = text.parse().expect("TOML");
        for (section, folders) in [("dependencies", sources), ("dev-dependencies", tests)] {
            let code: Vec<String> = files(folders, &["rs"]).into_iter().map(|(_, text)| text).collect();
            for name in table.get(section).and_then(|s| s.as_table()).into_iter().flatten().map(|(name, _)| name) {
                let called = CALLED.iter().find(|(package, _)| package == name).map_or(name.as_str(), |(_, c)| c);
                let called = called.replace('-', "_");
                let written = [format!("{called}::"), format!("use {called};"), format!("{called}!")];
                if !code.iter().any(|text| written.iter().any(|w| begins(text, w))) {
                    unused.push(format!("{manifest}: {section}: {name}"));
                }
            }
        }
    }
    assert!(unused.is_empty(), "no source names them:\n{}", unused.join("\n"));
}

#[test]
fn cargo_deny_is_told_the_same_licences() {
    let text = std::fs::read_to_string(root().join(".github/deny.toml")).expect("readable");
    let deny: toml::Table = text.parse().expect("TOML");
    let told: Vec<&str> =
        deny["licenses"]["allow"].as_array().expect("a list").iter().filter_map(|v| v.as_str()).collect();
    assert_eq!(told, LICENCES);
}
