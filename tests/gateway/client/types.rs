//! `antiphon.d.ts` says of `antiphon.js` all that a page may use, and nothing else; and TypeScript takes it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

const CLIENT: &str = include_str!("../../../src/server/console/antiphon.js");
const TYPES: &str = include_str!("../../../src/server/console/antiphon.d.ts");
/// A page that uses all of it.
const PAGE: &str = include_str!("../../interop/typescript/page.ts");
/// Longest time that the compiler may take to be installed, and to run.
const INSTALL: Duration = Duration::from_secs(240);

type Names = BTreeSet<String>;

/// The name that `text` begins with.
fn name(text: &str) -> Option<&str> {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_' && c != '$').unwrap_or(text.len());
    Some(&text[..end]).filter(|name| name.starts_with(|c: char| c.is_alphabetic()))
}

/// The names that stand behind `mark` in `text`.
fn behind(text: &str, mark: &str) -> Names {
    text.split(mark).skip(1).filter_map(name).map(str::to_owned).collect()
}

/// What stands between the line that begins with `head` and the next line that is `end`.
fn block<'a>(text: &'a str, head: &str, end: &str) -> &'a str {
    let from = text.find(&format!("\n{head}")).unwrap_or_else(|| panic!("{head}")) + 1;
    let body = text[from..].find('\n').expect("more lines") + from;
    &text[body..body + text[body..].find(&format!("\n{end}")).expect("an end") + 1]
}

/// The names of the members in the block below `head` of the types: fields and methods.
fn declared(head: &str) -> Names {
    let members = block(TYPES, head, "}").lines().filter_map(|line| line.strip_prefix("  "));
    members.map(|line| line.trim_start_matches("readonly ")).filter_map(name).map(str::to_owned).collect()
}

/// The keys of an object literal, or the names that a pattern takes out of one.
fn keys(list: &str) -> Names {
    list.split(',').filter_map(|one| name(one.trim())).map(str::to_owned).collect()
}

/// The inside of the first braces behind `mark`.
fn braces<'a>(text: &'a str, mark: &str) -> &'a str {
    let inside = text.split(mark).nth(1).unwrap_or_else(|| panic!("{mark}")).split('{').nth(1).expect("braces");
    inside.split('}').next().expect("some text")
}

fn names(all: &[&str]) -> Names {
    all.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn the_types_of_the_client_name_what_it_has_and_nothing_else() {
    let exported = |text: &str| {
        &(&behind(text, "\nexport class ") | &behind(text, "\nexport function "))
            | &behind(text, "\nexport async function ")
    };
    assert_eq!(exported(TYPES), exported(CLIENT));

    // What begins with `_` is no page's; a page has no other way to a call than `connect`.
    let class = block(CLIENT, "export class Call ", "}");
    let methods = class.lines().filter_map(|line| line.strip_prefix("  ")).filter(|line| line.ends_with('{'));
    let methods: Names = methods
        .map(|line| line.trim_start_matches("async "))
        .filter_map(|line| name(line).filter(|name| line[name.len()..].starts_with('(')))
        .filter(|name| *name != "constructor")
        .map(str::to_owned)
        .collect();
    assert!(methods.contains("say") && methods.contains("levels"), "{methods:?}");
    // Set, and not only looked at.
    let fields = class.split("this.").skip(1).filter_map(|rest| {
        let name = name(rest)?;
        let then = rest[name.len()..].trim_start();
        (then.starts_with('=') && !then.starts_with("==")).then(|| name.to_owned())
    });
    let inherited = names(&["private", "addEventListener", "removeEventListener"]);
    assert_eq!(&declared("export class Call ") - &inherited, &methods | &fields.collect::<Names>());
    let fields = behind(block(CLIENT, "export class CallError ", "}"), "this.");
    assert_eq!(declared("export class CallError "), &fields - &names(&["name"]), "`Error` has a name");

    assert_eq!(declared("export interface CallEvents "), behind(CLIENT, "_tell(\""));
    let destructured = CLIENT.lines().filter(|line| line.ends_with("} = this._options;"));
    let destructured: Names = destructured.flat_map(|line| keys(braces(line, "const"))).collect();
    assert_eq!(declared("export interface ConnectOptions "), &behind(CLIENT, "options.") | &destructured);
    assert_eq!(declared("export interface SayOptions "), keys(braces(CLIENT, "async say(text, ")));
    let caption = CLIENT.lines().find(|line| line.contains("const caption = { who: \"agent\"")).expect("a caption");
    let caption = &keys(braces(caption, "const caption =")) | &behind(CLIENT, "caption.");
    assert_eq!(declared("export interface Caption "), caption);
    assert_eq!(declared("export interface CallStats "), keys(braces(CLIENT, "const found =")));

    // So that the compiler sees all of it.
    for head in [
        "class Call ",
        "class CallError ",
        "interface CallEvents ",
        "interface ConnectOptions ",
        "interface SayOptions ",
        "interface Caption ",
        "interface CallStats ",
    ] {
        for name in declared(&format!("export {head}")) {
            let used = [format!(".{name}"), format!("  {name}:"), format!(" {name}:"), format!("\"{name}\"")];
            assert!(
                name == "private" || used.iter().any(|used| PAGE.contains(used)),
                "page.ts does not use {name} of {head}"
            );
        }
    }
}

#[tokio::test]
async fn a_page_in_typescript_uses_all_of_the_client_and_is_told_what_it_may_not() {
    let interop = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop");
    let script = Command::new(interop.join("typescript.sh")).stdin(Stdio::null()).kill_on_drop(true).output();
    let output = tokio::time::timeout(INSTALL, script).await.expect("the script ends").expect("the script runs");
    let said = String::from_utf8(output.stdout).expect("text");
    if output.status.code() == Some(77) {
        return antiphon_skip::skip("typescript", said.trim());
    }
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let compiler = PathBuf::from(said.trim());
    let checked = Command::new(compiler)
        .args(["--noEmit", "--strict", "--target", "es2022", "--lib", "es2022,dom,dom.iterable"])
        .args(["--module", "esnext", "--moduleResolution", "bundler"])
        .arg(interop.join("typescript/page.ts"))
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(INSTALL, checked).await.expect("it ends").expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}
