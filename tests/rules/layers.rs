//! Which top-level module may use which.

use std::collections::BTreeMap;

use crate::tree::{Crate, root};

/// Each module of the gateway and its layer; a module may name only modules of lower layers.
const GATEWAY: &[(&str, u32)] = &[
    ("file", 0),
    ("clock", 1),
    ("audio", 1),
    ("host", 1),
    ("node", 1),
    ("fault", 1),
    ("pem", 1),
    ("reach", 1),
    ("seats", 1),
    ("secret", 1),
    ("weights_file", 1),
    ("supervise", 1),
    ("audio_file", 2),
    ("handover", 2),
    ("postgres", 3),
    ("certificate", 2),
    ("socket", 2),
    ("sqlite", 2),
    ("turn", 2),
    ("text", 3),
    ("acme", 3),
    ("telemetry", 2),
    ("sched", 3),
    ("voice", 3),
    ("webhook", 3),
    ("synth", 4),
    ("media", 4),
    ("cluster", 5),
    ("hear", 5),
    ("sip", 5),
    ("webrtc", 5),
    ("call", 6),
    ("agent", 7),
    ("batch", 7),
    ("records", 7),
    ("recording", 7),
    ("gateway", 8),
    ("server", 9),
    ("config", 10),
    ("app", 11),
    ("cli", 12),
];

/// The same for the load generator.
const LOADGEN: &[(&str, u32)] = &[
    ("clock", 1),
    ("wire", 2),
    ("sound", 3),
    ("caller", 4),
    ("under_test", 5),
    ("turns", 6),
    ("run", 7),
    ("attack", 7),
    ("forecast", 8),
    ("page", 9),
];

#[test]
fn modules_use_only_what_is_below_them() {
    let wrong: Vec<String> = [("src", GATEWAY), ("loadgen/src", LOADGEN)]
        .into_iter()
        .flat_map(|(folder, layers)| upward(&Crate::read(folder), layers))
        .collect();
    assert!(wrong.is_empty(), "imports that point up:\n{}", wrong.join("\n"));
}

/// Names in backquotes and in links, without the ending of a file or folder.
fn named(documentation: &str) -> impl Iterator<Item = &str> {
    documentation.split('`').skip(1).step_by(2).map(|name| name.trim_end_matches(".rs").trim_end_matches('/'))
}

/// A signboard that is complete and in the order of the layers stays true.
#[test]
fn the_head_of_each_library_names_its_modules_lower_layers_first() {
    for (folder, layers) in [("src", GATEWAY), ("loadgen/src", LOADGEN)] {
        let text = std::fs::read_to_string(root().join(folder).join("lib.rs")).expect("a library");
        let head: Vec<&str> = text.lines().map_while(|line| line.strip_prefix("//!")).collect();
        let head = head.join("\n");
        let layer = |name: &str| layers.iter().find(|(module, _)| *module == name).map(|(_, layer)| *layer);
        let told: Vec<(&str, u32)> = named(&head).filter_map(|name| Some((name, layer(name)?))).collect();
        let missing: Vec<_> = layers.iter().filter(|(name, _)| told.iter().all(|(other, _)| other != name)).collect();
        assert!(missing.is_empty(), "{folder}/lib.rs does not say what these are: {missing:?}");
        let wrong: Vec<_> = told.windows(2).filter(|pair| pair[0].1 > pair[1].1).collect();
        assert!(wrong.is_empty(), "{folder}/lib.rs names a lower layer after a higher one: {wrong:?}");
    }
}

/// What uses a module of its own layer or of a higher one.
fn upward(tree: &Crate, layers: &[(&str, u32)]) -> Vec<String> {
    let layers: BTreeMap<&str, u32> = layers.iter().copied().collect();
    let mut wrong = Vec::new();
    for (path, used) in tree.uses() {
        let Some(module) = path.first() else { continue };
        let file = tree.modules[&path].file.display();
        let Some(&own) = layers.get(module.as_str()) else {
            wrong.push(format!("{file}: module `{module}` has no layer"));
            continue;
        };
        for name in used.iter().filter_map(|to| to.first()).filter(|name| *name != module) {
            let layer = layers.get(name.as_str()).copied().unwrap_or(u32::MAX);
            if layer >= own {
                wrong.push(format!("{file}: `{module}` (layer {own}) uses `{name}` (layer {layer})"));
            }
        }
    }
    wrong
}
