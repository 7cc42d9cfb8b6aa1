//! The table of faults: every row names a test that there is.

use std::fs;

use crate::tree::{files, root};

#[test]
fn every_fault_of_the_handbook_has_its_test() {
    let table = fs::read_to_string(root().join("config/packaging/FAULTS.md")).expect("the table");
    let rows: Vec<&str> = table.lines().filter(|line| line.starts_with("| ")).skip(2).collect();
    assert!(rows.len() > 20, "{} rows", rows.len());
    let sources = files(&["src", "tests", "sdp/src", "loadgen"], &["rs"]);
    let mut wrong = Vec::new();
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let name = cells.last().map(|cell| cell.trim_matches('`')).unwrap_or_default();
        let there = format!("fn {name}(");
        let tested = sources.iter().any(|(_, text)| {
            text.find(&there).is_some_and(|at| {
                let head: Vec<&str> = text[..at].lines().rev().take(4).collect();
                head.iter().any(|line| line.contains("test]") || line.contains("test("))
            })
        });
        if cells.len() != 5 || cells.iter().any(|cell| cell.is_empty()) || !tested {
            wrong.push(row);
        }
    }
    assert!(wrong.is_empty(), "rows without five cells or without a test of that name:\n{}", wrong.join("\n"));
}
