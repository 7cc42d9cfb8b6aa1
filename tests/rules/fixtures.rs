//! Every file that tests read says where it is from and under which licence.

use std::path::PathBuf;

use crate::tree::root;

/// What the licence column may say.
const LICENCES: &[&str] = &["Apache-2.0", "Apache-2.0 AND MIT", "BCP 78"];

/// Every file below `tests/data`, relative to it.
fn data() -> Vec<String> {
    let base = root().join("tests/data");
    let (mut found, mut open) = (Vec::new(), vec![PathBuf::new()]);
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(base.join(&folder)).expect("readable folder") {
            let entry = entry.expect("readable entry");
            let path = folder.join(entry.file_name());
            if entry.file_type().expect("a type").is_dir() {
                open.push(path);
            } else {
                found.push(path.to_str().expect("UTF-8").to_owned());
            }
        }
    }
    found
}

/// The rows of the table: path, origin, licence.
fn rows(table: &str) -> Vec<(&str, &str, &str)> {
    table
        .lines()
        .filter(|line| line.starts_with("| `"))
        .map(|line| {
            let mut cells = line.trim_matches('|').split(" | ").map(str::trim);
            let mut next = || cells.next().unwrap_or_default();
            (next().trim_matches('`'), next(), next())
        })
        .collect()
}

fn covers(row: &str, file: &str) -> bool {
    if row.ends_with('/') { file.starts_with(row) } else { file == row }
}

#[test]
fn every_fixture_says_its_source_and_licence() {
    let table = std::fs::read_to_string(root().join("tests/data/README.md")).expect("the table");
    let (rows, files) = (rows(&table), data());
    let mut wrong = Vec::new();
    for file in &files {
        if rows.iter().filter(|(path, ..)| covers(path, file)).count() != 1 {
            wrong.push(format!("{file}: give it a row in tests/data/README.md, and only one"));
        }
    }
    for (path, origin, licence) in &rows {
        if !files.iter().any(|file| covers(path, file)) {
            wrong.push(format!("{path}: there is no such file"));
        }
        if origin.is_empty() || !LICENCES.contains(licence) {
            wrong.push(format!("{path}: origin `{origin}`, licence `{licence}` (one of {LICENCES:?})"));
        }
    }
    assert!(files.len() > 50 && wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The program carries no recording and no other file of the tests; unit tests may.
#[test]
fn test_data_is_not_embedded_in_the_program() {
    let mut wrong = Vec::new();
    for (path, text) in crate::tree::files(&["src", "sdp/src", "loadgen/src"], &["rs"]) {
        let body = text.split("\n#[cfg(test)]\nmod tests").next().unwrap_or(&text);
        let tests = path.file_stem().is_some_and(|name| name == "tests");
        // The path may stand on a line of its own.
        for (at, _) in body.match_indices("include_").filter(|_| !tests) {
            let call = &body[at..body[at..].find(')').map_or(body.len(), |end| at + end)];
            if call.contains("tests/") {
                wrong.push(format!("{}:{}: {call}", path.display(), body[..at].lines().count()));
            }
        }
    }
    assert!(wrong.is_empty(), "test data in the program:\n{}", wrong.join("\n"));
}
