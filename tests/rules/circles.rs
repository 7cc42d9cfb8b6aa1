//! Folders that need each other are one folder in two places: none may, however many steps the circle has.

use std::collections::{BTreeMap, BTreeSet};

use crate::assert_only;
use crate::tree::{Crate, ModPath};

/// Circles between folders that are still there, as `crate: folder <-> folder`.
const FOLDERS: &[&str] = &[];

/// Circles between the files of `sip` that are still there.
const SIP: &[&str] = &[];

type Graph = BTreeMap<String, BTreeSet<String>>;

/// Nodes that reach each other, each group sorted.
fn circles(graph: &Graph) -> Vec<Vec<String>> {
    let reach = |from: &String| -> BTreeSet<String> {
        let mut seen = BTreeSet::new();
        let mut open = vec![from];
        while let Some(node) = open.pop() {
            for next in graph.get(node).into_iter().flatten() {
                if seen.insert(next.clone()) {
                    open.push(next);
                }
            }
        }
        seen
    };
    let reached: BTreeMap<&String, BTreeSet<String>> = graph.keys().map(|node| (node, reach(node))).collect();
    let mut found: BTreeSet<Vec<String>> = BTreeSet::new();
    for (node, reaches) in &reached {
        let group: Vec<String> = reaches
            .iter()
            .filter(|other| reached.get(other).is_some_and(|back| back.contains(*node)))
            .cloned()
            .collect();
        if group.len() > 1 {
            found.insert(group);
        }
    }
    found.into_iter().collect()
}

/// The children of `parent` and what they use of each other. `own`: the parent's own file is a node, too.
fn children(uses: &BTreeMap<ModPath, BTreeSet<ModPath>>, parent: &[String], own: bool) -> Graph {
    let node = |path: &ModPath| -> Option<String> {
        let rest = path.strip_prefix(parent)?;
        rest.first().cloned().or_else(|| own.then(|| "mod".to_owned()))
    };
    let mut graph = Graph::new();
    for (from, used) in uses {
        let Some(from) = node(from) else { continue };
        let edges = graph.entry(from.clone()).or_default();
        edges.extend(used.iter().filter_map(node).filter(|to| *to != from));
    }
    graph
}

#[test]
fn no_two_folders_need_each_other() {
    let mut offenders = Vec::new();
    for folder in ["src", "loadgen/src", "sdp/src"] {
        let tree = Crate::read(folder);
        let uses = tree.uses();
        let is_folder = |path: &[String]| uses.keys().any(|other| other.len() > path.len() && other.starts_with(path));
        for parent in uses.keys().filter(|path| is_folder(path)) {
            let mut graph = children(&uses, parent, false);
            let folders: BTreeSet<String> = graph
                .keys()
                .filter(|child| is_folder(&[parent.as_slice(), &[(*child).clone()]].concat()))
                .cloned()
                .collect();
            graph.retain(|child, _| folders.contains(child));
            for group in circles(&graph) {
                let name = format!("{folder}/{}: {}", parent.join("/"), group.join(" <-> "));
                offenders.push((name.clone(), name));
            }
        }
    }
    assert_only(FOLDERS, offenders, "folders that need each other");
}

#[test]
fn files_of_sip_do_not_need_each_other() {
    let uses = Crate::read("src").uses();
    let graph = children(&uses, &["sip".to_owned()], true);
    let offenders = circles(&graph).into_iter().map(|group| {
        let inside: Vec<String> = group
            .iter()
            .map(|from| {
                let to: Vec<_> = graph[from].iter().filter(|to| group.contains(to)).cloned().collect();
                format!("  {from} uses {}", to.join(", "))
            })
            .collect();
        let name = group.join(" <-> ");
        let why = format!("{name}\n{}", inside.join("\n"));
        (name, why)
    });
    assert_only(SIP, offenders.collect(), "files of src/sip that need each other");
}

/// Each module of the load generator, whichever folder it lies in, uses only modules that do not use it.
#[test]
fn modules_of_the_load_generator_do_not_need_each_other() {
    let mut graph = Graph::new();
    for (from, used) in Crate::read("loadgen/src").uses() {
        let node = |path: &ModPath| path.iter().take(2).cloned().collect::<Vec<_>>().join("::");
        let edges = graph.entry(node(&from)).or_default();
        edges.extend(used.iter().map(node).filter(|to| *to != node(&from)));
    }
    let offenders = circles(&graph).into_iter().map(|group| (group.join(" <-> "), group.join(" <-> ")));
    assert_only(&[], offenders.collect(), "modules of loadgen/src that need each other");
}

#[test]
fn a_circle_of_three_is_one() {
    let edges = [("a", "b"), ("b", "c"), ("c", "a"), ("d", "a"), ("e", "e")];
    let mut graph = Graph::new();
    for (from, to) in edges {
        graph.entry(from.to_owned()).or_default().insert(to.to_owned());
    }
    assert_eq!(circles(&graph), [["a", "b", "c"]]);
}
