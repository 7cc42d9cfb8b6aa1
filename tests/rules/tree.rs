//! The source tree as modules: what each file defines, and which modules its code names.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, File, ItemMod, ItemUse, UseTree, Visibility};

/// Segments of a module's path below `crate`.
pub(crate) type ModPath = Vec<String>;

/// One file of a crate.
pub(crate) struct Module {
    /// Below the repository's root.
    pub(crate) file: PathBuf,
    pub(crate) ast: File,
}

/// A library: its modules by path.
pub(crate) struct Crate {
    pub(crate) modules: BTreeMap<ModPath, Module>,
    /// What each module re-exports: name to full path.
    exports: BTreeMap<ModPath, BTreeMap<String, Vec<String>>>,
}

pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every file below `folders` with one of the endings, and its text; paths are below the repository's root.
pub(crate) fn files(folders: &[&str], endings: &[&str]) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut open: Vec<PathBuf> = folders.iter().map(|folder| root().join(folder)).collect();
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder).expect("readable source folder") {
            let path = entry.expect("readable entry").path();
            if path.is_dir() {
                if path.file_name().is_some_and(|name| name != "target") {
                    open.push(path);
                }
            } else if path.extension().is_some_and(|e| endings.iter().any(|ending| e == *ending)) {
                let text = fs::read_to_string(&path).expect("UTF-8 source");
                found.push((path.strip_prefix(root()).expect("below the root").to_owned(), text));
            }
        }
    }
    found.sort();
    found
}

/// Whether this is only compiled for tests.
pub(crate) fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.meta.require_list().is_ok_and(|list| {
                let tokens = list.tokens.to_string();
                tokens == "test" || tokens.starts_with("all (test")
            })
    })
}

impl Crate {
    /// The library whose sources lie in `folder`; binaries and files only compiled for tests are left out.
    pub(crate) fn read(folder: &str) -> Crate {
        let sources: BTreeMap<PathBuf, String> = files(&[folder], &["rs"]).into_iter().collect();
        let mut modules = BTreeMap::new();
        let mut open = vec![(Vec::new(), PathBuf::from(folder).join("lib.rs"))];
        while let Some((path, file)) = open.pop() {
            let text = sources.get(&file).unwrap_or_else(|| panic!("{} is a module but no file", file.display()));
            let ast = syn::parse_file(text).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
            let name = file.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let below = match name {
                "lib.rs" | "mod.rs" => file.parent().expect("a folder").to_owned(),
                _ => file.with_extension(""),
            };
            for item in &ast.items {
                let syn::Item::Mod(ItemMod { ident, content: None, attrs, .. }) = item else { continue };
                if is_test(attrs) {
                    continue;
                }
                let child: ModPath = path.iter().cloned().chain([ident.to_string()]).collect();
                let flat = below.join(format!("{ident}.rs"));
                let file =
                    if sources.contains_key(&flat) { flat } else { below.join(ident.to_string()).join("mod.rs") };
                open.push((child, file));
            }
            modules.insert(path, Module { file, ast });
        }
        let mut found = Crate { modules, exports: BTreeMap::new() };
        found.exports =
            found.modules.iter().map(|(path, module)| (path.clone(), found.exported(path, module))).collect();
        found
    }

    fn exported(&self, path: &ModPath, module: &Module) -> BTreeMap<String, Vec<String>> {
        let mut names = BTreeMap::new();
        for item in &module.ast.items {
            let syn::Item::Use(item) = item else { continue };
            if matches!(item.vis, Visibility::Inherited) {
                continue;
            }
            for (name, target) in leaves(&item.tree) {
                names.insert(name, self.absolute(path, &target).unwrap_or_default());
            }
        }
        names
    }

    /// `path` as written in module `from`, from the crate's root; `None`: it is of another crate.
    fn absolute(&self, from: &ModPath, path: &[String]) -> Option<Vec<String>> {
        let mut base = match path.first()?.as_str() {
            "crate" => return Some(path[1..].to_vec()),
            "self" => return Some(from.iter().chain(&path[1..]).cloned().collect()),
            "super" => from.clone(),
            name => {
                let child: ModPath = from.iter().cloned().chain([name.to_owned()]).collect();
                return self.modules.contains_key(&child).then(|| from.iter().chain(path).cloned().collect());
            }
        };
        let ups = path.iter().take_while(|segment| *segment == "super").count();
        base.truncate(base.len().checked_sub(ups)?);
        Some(base.into_iter().chain(path[ups..].iter().cloned()).collect())
    }

    /// The module in which what `path` names is defined, re-exports followed.
    fn module_of(&self, mut path: Vec<String>) -> ModPath {
        // Re-exports of re-exports end; a circle of them does not compile.
        for _ in 0..8 {
            let depth = (0..=path.len()).rev().find(|&n| self.modules.contains_key(&path[..n])).unwrap_or(0);
            let (module, rest) = path.split_at(depth);
            let target = rest.first().and_then(|name| self.exports.get(module)?.get(name)).filter(|to| !to.is_empty());
            match target {
                Some(target) => path = target.iter().chain(&rest[1..]).cloned().collect(),
                None => return module.to_vec(),
            }
        }
        path
    }

    /// The modules that the code of each module names, itself left out. Re-exports are no use: they only pass names on.
    pub(crate) fn uses(&self) -> BTreeMap<ModPath, BTreeSet<ModPath>> {
        let mut all = BTreeMap::new();
        for (path, module) in &self.modules {
            let mut names = Names { at: path.clone(), found: Vec::new() };
            names.visit_file(&module.ast);
            let mut used: BTreeSet<ModPath> = BTreeSet::new();
            for (at, name) in names.found {
                if let Some(name) = self.absolute(&at, &name) {
                    used.insert(self.module_of(name));
                }
            }
            used.remove(path);
            all.insert(path.clone(), used);
        }
        all
    }
}

/// Each name that a `use` brings in, and its path as written.
fn leaves(tree: &UseTree) -> Vec<(String, Vec<String>)> {
    match tree {
        UseTree::Path(path) => leaves(&path.tree)
            .into_iter()
            .map(|(name, rest)| {
                let own = path.ident.to_string();
                // `a::{self}` is `a`.
                let name = if name == "self" { own.clone() } else { name };
                let rest = if rest == ["self"] { Vec::new() } else { rest };
                (name, [own].into_iter().chain(rest).collect())
            })
            .collect(),
        UseTree::Name(name) => vec![(name.ident.to_string(), vec![name.ident.to_string()])],
        UseTree::Rename(rename) => vec![(rename.rename.to_string(), vec![rename.ident.to_string()])],
        UseTree::Glob(_) => vec![("*".to_owned(), Vec::new())],
        UseTree::Group(group) => group.items.iter().flat_map(leaves).collect(),
    }
}

/// Collects paths outside of tests, in `use`, in code and in the arguments of macros.
struct Names {
    at: ModPath,
    found: Vec<(ModPath, Vec<String>)>,
}

impl Names {
    fn add(&mut self, path: Vec<String>) {
        self.found.push((self.at.clone(), path));
    }

    /// A name alone in code is a variable, a macro or an import that was seen before.
    fn add_path(&mut self, path: Vec<String>) {
        if path.len() > 1 {
            self.add(path);
        }
    }

    fn tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(ident) if path.is_empty() || colons == 2 => {
                    path.push(ident.to_string());
                    colons = 0;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' && colons < 2 => colons += 1,
                other => {
                    self.add_path(std::mem::take(&mut path));
                    colons = 0;
                    match other {
                        TokenTree::Group(group) => self.tokens(group.stream()),
                        TokenTree::Ident(ident) => path.push(ident.to_string()),
                        _ => {}
                    }
                }
            }
        }
        self.add_path(path);
    }
}

impl<'ast> Visit<'ast> for Names {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        let attributes = match item {
            syn::Item::Fn(item) => &item.attrs,
            syn::Item::Impl(item) => &item.attrs,
            syn::Item::Mod(item) => &item.attrs,
            syn::Item::Use(item) => &item.attrs,
            syn::Item::Struct(item) => &item.attrs,
            syn::Item::Const(item) => &item.attrs,
            _ => return visit::visit_item(self, item),
        };
        if !is_test(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        if item.content.is_some() {
            self.at.push(item.ident.to_string());
            visit::visit_item_mod(self, item);
            self.at.pop();
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        if matches!(item.vis, Visibility::Inherited) {
            leaves(&item.tree).into_iter().for_each(|(_, path)| self.add(path));
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            self.add_path(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.tokens(call.tokens.clone());
    }

    // Documentation may name anything.
    fn visit_attribute(&mut self, _: &'ast Attribute) {}
}

#[test]
fn imports_of_many_lines_are_seen() {
    let file = syn::parse_file(
        "use crate::{\n    media::{\n        leg::{Codec, LegEnd},\n        sip,\n    },\n    turn::*,\n};\n\
         pub use crate::call::Call;\n#[cfg(test)]\nmod tests { use crate::app::App; }\n\
         fn f() { tracing::info!(x = crate::clock::now()); let _: crate::audio::Pcm; }",
    )
    .expect("Rust");
    let mut names = Names { at: vec!["here".to_owned()], found: Vec::new() };
    names.visit_file(&file);
    let found: BTreeSet<String> = names.found.into_iter().map(|(_, path)| path.join("::")).collect();
    for wanted in
        ["crate::media::leg::Codec", "crate::media::sip", "crate::turn", "crate::clock::now", "crate::audio::Pcm"]
    {
        assert!(found.contains(wanted), "{wanted}: {found:?}");
    }
    assert!(!found.iter().any(|path| path.contains("Call") || path.contains("App")), "{found:?}");
}
