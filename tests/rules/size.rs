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

/// Modules of the gateway whose structs are counted.
const COUNTED: &[&[&str]] = &[&["sched"], &["call"], &["sip"], &["synth", "cosyvoice", "gpu"]];
/// And of the load generator.
const COUNTED_OF_LOADGEN: &[&[&str]] = &[&["caller"]];

/// What excuses a long file, in its head.
const FILE_REASON: &str = "Why this file is long:";
/// What excuses a large struct, in its documentation.
const STRUCT_REASON: &str = "Why this struct is large:";

#[test]
fn files_stay_within_600_lines_or_say_why() {
    let mut offenders = Vec::new();
    for (path, text) in files(&["src", "sdp/src", "loadgen/src", "tests", "loadgen/tests"], &["rs", "cu", "cuh", "js"])
    {
        // Unit tests at the end of a file are not what makes it long.
        let lines = text.split("\n#[cfg(test)]\nmod tests").next().unwrap_or(&text).lines().count();
        if lines > MAX_LINES && !text.lines().take(40).any(|line| line.contains(FILE_REASON)) {
            offenders.push((path.display().to_string(), format!("{} has {lines} lines", path.display())));
        }
    }
    assert_only(LONG, offenders, &format!("past {MAX_LINES} lines without `{FILE_REASON} ...` in the head"));
}

/// Types whose methods lie in more than one file still, by the module of the others: what a handle asks for beside what it is
/// about, and GPU networks whose loading and graphs have files of their own.
const SPLIT: &[&str] = &[
    "CallEvent in call::event::kind",
    "CallHandle in call::bridge",
    "CallHandle in call::source",
    "Device in synth::cosyvoice::gpu::device::timing",
    "Flow in synth::cosyvoice::gpu::flow::load",
    "Hift in synth::cosyvoice::gpu::hift::load",
    "Hift in synth::cosyvoice::gpu::hift::network",
    "Llm in synth::cosyvoice::gpu::llm::load",
    "Whisper in synth::cosyvoice::gpu::whisper::load",
];

/// A type that is cut by file is not cut by state.
#[test]
fn the_methods_of_a_type_lie_in_its_own_file() {
    let gateway = Crate::read("src");
    let mut offenders = Vec::new();
    for room in COUNTED {
        let inside = || gateway.modules.iter().filter(|(path, _)| starts_with(path, room));
        let mut defined: BTreeMap<String, Vec<&ModPath>> = BTreeMap::new();
        for (path, module) in inside() {
            for item in &module.ast.items {
                let name = match item {
                    Item::Struct(item) => &item.ident,
                    Item::Enum(item) => &item.ident,
                    _ => continue,
                };
                defined.entry(name.to_string()).or_default().push(path);
            }
        }
        for (path, module) in inside() {
            for item in &module.ast.items {
                let Item::Impl(item) = item else { continue };
                let Type::Path(of) = &*item.self_ty else { continue };
                if item.trait_.is_some() || is_test(&item.attrs) {
                    continue;
                }
                let Some(name) = of.path.segments.last().map(|segment| segment.ident.to_string()) else { continue };
                if defined.get(&name).is_some_and(|places| !places.contains(&path)) {
                    let offender = format!("{name} in {}", path.join("::"));
                    offenders.push((offender.clone(), offender));
                }
            }
        }
    }
    assert_only(
        SPLIT,
        offenders,
        "methods outside of the file that defines their type: parts that own their state, or functions",
    );
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
    let (gateway, loadgen) = (Crate::read("src"), Crate::read("loadgen/src"));
    let modules = gateway.modules.iter().map(|of| (COUNTED, of));
    let modules = modules.chain(loadgen.modules.iter().map(|of| (COUNTED_OF_LOADGEN, of)));
    // By top folder and name: a struct's methods may lie in several files of it.
    let mut sizes: BTreeMap<(String, String), Size> = BTreeMap::new();
    for (rooms, (path, module)) in modules {
        let Some(room) = rooms.iter().find(|room| starts_with(path, room)) else { continue };
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
