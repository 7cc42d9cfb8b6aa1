//! Rules of single lines: sends, `unsafe`, documentation, links.

use std::fs;

use crate::tree::{files, root};

const SOURCES: &[&str] = &["src", "sdp/src", "loadgen/src"];

/// The file up to its unit tests.
fn body(text: &str) -> &str {
    text.split("\n#[cfg(test)]\nmod tests").next().unwrap_or(text)
}

#[test]
fn every_send_that_does_not_wait_says_what_happens_when_full() {
    let mut silent = Vec::new();
    for (path, text) in files(SOURCES, &["rs"]) {
        let text = body(&text);
        let lines: Vec<&str> = text.lines().collect();
        for (n, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap_or("");
            if code.contains(".try_send(") && !code.contains("socket") {
                let around = &lines[n.saturating_sub(5)..(n + 2).min(lines.len())];
                if !around.iter().any(|l| l.contains("overflow:")) {
                    silent.push(format!("{}:{}: {}", path.display(), n + 1, line.trim()));
                }
            }
        }
    }
    assert!(silent.is_empty(), "sends without `// overflow: ...`:\n{}", silent.join("\n"));
}

#[test]
fn unsafe_code_stays_in_the_cuda_module_and_states_its_invariant() {
    let mut wrong = Vec::new();
    for (path, text) in files(SOURCES, &["rs"]) {
        let cuda = path.starts_with("src/synth/cosyvoice/gpu");
        let lines: Vec<&str> = text.lines().collect();
        for (n, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap_or("");
            let opens = code.contains("unsafe {") || code.contains("unsafe impl") || code.contains("unsafe fn");
            if !opens {
                continue;
            }
            let stated = lines[n.saturating_sub(6)..=n].iter().any(|l| l.contains("SAFETY:") || l.contains("# Safety"));
            if !stated || !cuda {
                wrong.push(format!("{}:{}: {}", path.display(), n + 1, line.trim()));
            }
        }
    }
    assert!(wrong.is_empty(), "unsafe outside its place, or without `SAFETY:`:\n{}", wrong.join("\n"));
}

/// `.ci/run` does not take the minutes of a pass that would find nothing.
#[test]
fn documentation_has_no_code_to_run() {
    let mut found = Vec::new();
    for (path, text) in files(SOURCES, &["rs"]) {
        let mut fenced = false;
        for (n, line) in text.lines().enumerate() {
            let line = line.trim_start();
            let Some(doc) = line.strip_prefix("///").or_else(|| line.strip_prefix("//!")) else { continue };
            if let Some(kind) = doc.trim().strip_prefix("```") {
                fenced = !fenced;
                if fenced && !matches!(kind, "text" | "toml" | "json" | "sh") {
                    found.push(format!("{}:{}", path.display(), n + 1));
                }
            }
        }
    }
    assert!(found.is_empty(), "name the language (text, toml, json, sh), or have .ci/run test it: {found:?}");
}

/// What a link names is there. Links that leave the repository are not followed.
#[test]
fn links_between_documents_lead_somewhere() {
    let mut documents = files(&["src", "sdp", "loadgen", "tests", "config", ".github"], &["md"]);
    documents.push(("README.md".into(), fs::read_to_string(root().join("README.md")).expect("README.md")));
    let mut followed = 0;
    let mut broken = Vec::new();
    for (path, text) in documents {
        for link in text.split("](").skip(1) {
            let Some((target, _)) = link.split_once(')') else { continue };
            let target = target.split('#').next().unwrap_or("");
            if target.is_empty() || target.contains("://") {
                continue;
            }
            followed += 1;
            if !root().join(&path).with_file_name("").join(target).exists() {
                broken.push(format!("{}: {target}", path.display()));
            }
        }
    }
    assert!(followed > 20, "only {followed} links were found: has their form changed?");
    assert!(broken.is_empty(), "links to what is not there:\n{}", broken.join("\n"));
}

/// A skip that the test prints by itself is neither counted nor can it be made a failure.
#[test]
fn what_a_test_skips_it_says_by_the_shared_helper() {
    let mut silent = Vec::new();
    for (path, text) in files(&["src", "sdp", "loadgen", "tests"], &["rs"]) {
        if path.starts_with("tests/skip") || path.starts_with("tests/rules") {
            continue;
        }
        for (n, line) in text.lines().enumerate() {
            let prints = ["println!(", "print!(", "dbg!("].iter().any(|print| line.contains(print));
            if prints && line.to_lowercase().contains("skip") {
                silent.push(format!("{}:{}: {}", path.display(), n + 1, line.trim()));
            }
        }
    }
    assert!(silent.is_empty(), "say it with `antiphon_skip::skip`:\n{}", silent.join("\n"));
}
