//! How long a file may be, and how much a struct may own.

use std::collections::BTreeMap;

use syn::{Attribute, Expr, ImplItem, Item, Lit, Meta, Type};

use crate::assert_only;
use crate::tree::{Crate, ModPath, files, is_test};

const MAX_LINES: usize = 600;
const MAX_FIELDS: usize = 15;
const MAX_METHODS: usize = 30;

/// Files past [`MAX_LINES`] that are still to be split.
const LONG: &[&str] = &[];

/// Structs past [`MAX_FIELDS`] or [`MAX_METHODS`] that are still to be split.
const LARGE: &[&str] = &[];

/// Modules whose structs are counted.
const COUNTED: &[&[&str]] = &[&["sched"], &["call"], &["sip"], &["synth", "cosyvoice", "gpu"]];

/// What excuses a long file, in its head.
const FILE_REASON: &str = "Why this file is long:";
/// What excuses a large struct, in its documentation.
const STRUCT_REASON: &str = "Why this struct is large:";

#[test]
fn files_stay_within_600_lines_or_say_why() {
    let mut offenders = Vec::new();
    for (path, text) in files(&["src", "sdp/src", "loadgen/src", "tests", "loadgen/tests"], &["rs", "cu", "cuh"]) {
        // Unit tests at the end of a file are not what makes it long.
        let lines = text.split("\n#[cfg(test)]\nmod tests").next().unwrap_or(&text).lines().count();
        if lines > MAX_LINES && !text.lines().take(40).any(|line| line.contains(FILE_REASON)) {
            offenders.push((path.display().to_string(), format!("{} has {lines} lines", path.display())));
        }
    }
    assert_only(LONG, offenders, &format!("past {MAX_LINES} lines without `{FILE_REASON} ...` in the head"));
}

/// A struct's fields and methods so far, and whether it says why they are many.
#[derive(Default)]
struct Size {
    fields: Option<usize>,
    methods: usize,
    excused: bool,
}

#[test]
fn structs_stay_small_or_say_why() {
    let gateway = Crate::read("src");
    // By top folder and name: a struct's methods may lie in several files of it.
    let mut sizes: BTreeMap<(String, String), Size> = BTreeMap::new();
    for (path, module) in &gateway.modules {
        let Some(room) = COUNTED.iter().find(|room| starts_with(path, room)) else { continue };
        for item in &module.ast.items {
            match item {
                Item::Struct(item) if !is_test(&item.attrs) => {
                    let size = sizes.entry((room.join("::"), item.ident.to_string())).or_default();
                    size.fields = Some(size.fields.unwrap_or_default().max(item.fields.len()));
                    size.excused |= documentation(&item.attrs).contains(STRUCT_REASON);
                }
                Item::Impl(item) if item.trait_.is_none() && !is_test(&item.attrs) => {
                    let Type::Path(of) = &*item.self_ty else { continue };
                    let Some(name) = of.path.segments.last().map(|segment| segment.ident.to_string()) else { continue };
                    let counted = |item: &&ImplItem| matches!(item, ImplItem::Fn(f) if !is_test(&f.attrs));
                    let size = sizes.entry((room.join("::"), name)).or_default();
                    size.methods += item.items.iter().filter(counted).count();
                }
                _ => {}
            }
        }
    }
    let mut offenders = Vec::new();
    for ((room, name), size) in sizes {
        let Some(fields) = size.fields else { continue };
        if (fields > MAX_FIELDS || size.methods > MAX_METHODS) && !size.excused {
            let name = format!("{room}::{name}");
            offenders.push((name.clone(), format!("{name} has {fields} fields and {} methods", size.methods)));
        }
    }
    let rule = format!(
        "more than {MAX_FIELDS} fields or {MAX_METHODS} methods without `{STRUCT_REASON} ...` in the documentation"
    );
    assert_only(LARGE, offenders, &rule);
}

fn starts_with(path: &ModPath, room: &[&str]) -> bool {
    path.len() >= room.len() && path.iter().zip(room).all(|(a, b)| a == b)
}

fn documentation(attributes: &[Attribute]) -> String {
    let lines = attributes.iter().filter(|a| a.path().is_ident("doc")).filter_map(|a| match &a.meta {
        Meta::NameValue(pair) => match &pair.value {
            Expr::Lit(lit) => match &lit.lit {
                Lit::Str(text) => Some(text.value()),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    });
    lines.collect::<Vec<_>>().join(" ")
}
