//! Rules of the source tree that no compiler checks: which module may use which, how long a file may be,
//! that every non-awaited channel send says what happens when the channel is full.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Each module and its layer; a module may name only modules of lower layers, or of its own when listed as peers.
const LAYERS: &[(&str, u32)] = &[
    ("clock", 1),
    ("audio", 1),
    ("secret", 1),
    ("audio_file", 2),
    ("turn", 2),
    ("telemetry", 2),
    ("config", 10),
    ("synth", 4),
    ("sched", 3),
    ("voice", 3),
    ("media", 4),
    ("sip", 5),
    ("webrtc", 5),
    ("call", 6),
    ("agent", 7),
    ("batch", 7),
    ("gateway", 8),
    ("server", 9),
    ("app", 11),
    ("cli", 12),
];

/// Uses that go against the layers, each with its reason.
const EXCEPTIONS: &[(&str, &str, &str)] = &[];

const MAX_LINES: usize = 600;

fn sources() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    let mut folders = vec![root.join("src"), root.join("sdp/src"), root.join("loadgen/src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("readable source folder") {
            let path = entry.expect("readable entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs" || e == "cu") {
                let text = fs::read_to_string(&path).expect("UTF-8 source");
                found.push((path.strip_prefix(root).expect("below the root").to_owned(), text));
            }
        }
    }
    found.sort();
    found
}

fn is_test_file(path: &Path) -> bool {
    path.file_name().is_some_and(|n| n == "tests.rs") || path.components().any(|c| c.as_os_str() == "tests")
}

/// The file up to its unit tests.
fn body(text: &str) -> &str {
    text.split("\n#[cfg(test)]\nmod tests").next().unwrap_or(text)
}

#[test]
fn files_stay_within_600_lines_or_say_why() {
    let mut long = Vec::new();
    for (path, text) in sources() {
        let lines = body(&text).lines().count();
        let excused = text.lines().take(40).any(|l| l.contains("Why this file is long"));
        if lines > MAX_LINES && !excused && !is_test_file(&path) {
            long.push(format!("{} has {lines} lines", path.display()));
        }
    }
    assert!(
        long.is_empty(),
        "past {MAX_LINES} lines without a `Why this file is long` in the head:\n{}",
        long.join("\n")
    );
}

#[test]
fn modules_use_only_what_is_below_them() {
    let layers: BTreeMap<&str, u32> = LAYERS.iter().copied().collect();
    let mut wrong = Vec::new();
    for (path, text) in sources() {
        let Some(module) = top_module(&path) else { continue };
        let Some(&own) = layers.get(module.as_str()) else {
            wrong.push(format!("{}: module `{module}` has no layer", path.display()));
            continue;
        };
        for used in crate_uses(body(&text)) {
            let Some(&layer) = layers.get(used.as_str()) else { continue };
            let excused = EXCEPTIONS.iter().any(|(from, to, _)| *from == module && *to == used);
            if used != module && layer >= own && !excused {
                wrong.push(format!("{}: `{module}` (layer {own}) uses `{used}` (layer {layer})", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "imports that point up:\n{}", wrong.join("\n"));
}

fn top_module(path: &Path) -> Option<String> {
    let mut parts = path.components().map(|c| c.as_os_str().to_string_lossy().into_owned());
    if parts.next()? != "src" {
        return None;
    }
    let first = parts.next()?;
    let name = first.strip_suffix(".rs").unwrap_or(&first).to_owned();
    (!matches!(name.as_str(), "lib" | "main" | "bin")).then_some(name)
}

/// Modules named as `crate::x`, leaving documentation links out.
fn crate_uses(text: &str) -> Vec<String> {
    let mut used = Vec::new();
    for line in text.lines().filter(|l| !l.trim_start().starts_with("//")) {
        let mut rest = line;
        while let Some(at) = rest.find("crate::") {
            rest = &rest[at + "crate::".len()..];
            if let Some(group) = rest.strip_prefix('{') {
                used.extend(group.split([',', '}']).map(|s| s.trim().split("::").next().unwrap_or("").to_owned()));
            } else {
                used.push(rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect());
            }
        }
    }
    used
}

#[test]
fn every_send_that_does_not_wait_says_what_happens_when_full() {
    let mut silent = Vec::new();
    for (path, text) in sources() {
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
    for (path, text) in sources() {
        let cuda = path.starts_with("src/synth/cosyvoice/gpu");
        let lines: Vec<&str> = text.lines().collect();
        for (n, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap_or("");
            let opens = code.contains("unsafe {") || code.contains("unsafe impl") || code.contains("unsafe fn");
            if !opens {
                continue;
            }
            let stated = lines[n.saturating_sub(6)..=n].iter().any(|l| l.contains("SAFETY:") || l.contains("# Safety"));
            let mapped = lines[n..(n + 2).min(lines.len())].iter().any(|l| l.contains("Mmap"));
            if !stated || !(cuda || mapped) {
                wrong.push(format!("{}:{}: {}", path.display(), n + 1, line.trim()));
            }
        }
    }
    assert!(wrong.is_empty(), "unsafe outside its place, or without `SAFETY:`:\n{}", wrong.join("\n"));
}
