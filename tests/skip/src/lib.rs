//! How a test says that what it needs is not here: on the real standard error, counted, and as a failure where that
//! was required.
//!
//! `ANTIPHON_REQUIRE=all` makes every skip a failure; a list (`ANTIPHON_REQUIRE=sipp,espeak`) those of what it names.
//! `ANTIPHON_SKIPS=FILE` collects one line a skip, for a total at the end: runners that start a process for each
//! test show nothing that a passing test wrote. `.ci/run` sets both.

pub mod postgres;

use std::env;
use std::ffi::OsStr;
use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Skips of this process so far.
static SKIPPED: AtomicUsize = AtomicUsize::new(0);

/// Says that the calling test tests nothing because `what` is not here. The caller returns at once.
///
/// # Panics
///
/// Where `ANTIPHON_REQUIRE` names `what`, or is `all`.
#[allow(clippy::disallowed_methods, reason = "these variables belong to the tests, not to the gateway")]
pub fn skip(what: &str, why: impl Display) {
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    let required = env::var("ANTIPHON_REQUIRE").unwrap_or_default();
    assert!(!is_required(&required, what), "{test}: {what} is required by ANTIPHON_REQUIRE, but {why}");
    let total = SKIPPED.fetch_add(1, Ordering::Relaxed) + 1;
    let line = format!("SKIPPED {test}: {what}: {why}\n");
    // Written past the test harness, which shows only what failing tests print. A closed stream or a full disk
    // is no reason to fail.
    let _ = std::io::stderr().write_all(format!("{} ({total} in this process)\n", line.trim_end()).as_bytes());
    if let Ok(file) = env::var("ANTIPHON_SKIPS") {
        let opened = OpenOptions::new().create(true).append(true).open(file);
        let _ = opened.and_then(|mut file| file.write_all(line.as_bytes()));
    }
}

/// Whether the program `name`, of Debian's package `package`, can be started from here; skips the calling test if not.
pub fn has_program(name: &str, package: &str) -> bool {
    let found = find(name).is_some();
    if !found {
        skip(name, format_args!("the program is not installed (Debian: {package})"));
    }
    found
}

/// Where the program `name` is.
pub fn find(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(AsRef::<OsStr>::as_ref(&path)).map(|folder| folder.join(name)).find(|file| file.is_file())
}

fn is_required(required: &str, what: &str) -> bool {
    required.split(',').map(str::trim).any(|name| name == "all" || name == what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_requires_what_it_names_and_all_requires_everything() {
        assert!(is_required("all", "sipp"));
        assert!(is_required("espeak, sipp", "sipp"));
        assert!(!is_required("", "sipp"));
        assert!(!is_required("sipp2,espeak", "sipp"));
    }

    #[test]
    fn programs_are_found_on_the_path() {
        assert!(find("sh").is_some_and(|path| path.is_absolute()));
        assert_eq!(find("no-program-has-this-name"), None);
    }
}
