//! `antiphon model pull | verify | random | selftest`: each prints what it does and returns the exit code
//! (0 done, 1 ran and failed, 69 a needed service is not there).

use std::path::Path;

use indicatif::{ProgressBar, ProgressStyle};

use super::backend::{Hardware, LanguageModel};
use super::pull::{self, PullError};
use super::random::{self, Size};
use super::selftest::{self, Kit, KitError, Report};
use super::verify;
use crate::clock;

/// Done.
pub const DONE: u8 = 0;
/// Ran and failed.
pub const FAILED: u8 = 1;
/// A needed service is not there.
pub const UNAVAILABLE: u8 = 69;

/// `model verify DIR`: every problem of a checkpoint directory, or that there is none.
pub fn verify(dir: &Path, llm: LanguageModel) -> u8 {
    let trouble = match std::fs::read_dir(dir).map(|mut entries| entries.next().is_none()) {
        Err(error) => Some(format!("cannot be read: {error}")),
        Ok(true) => Some("is empty".to_owned()),
        Ok(false) => None,
    };
    if let Some(what) = trouble {
        eprintln!(
            "{}: {what}; `antiphon model pull --dir {0}` fetches a checkpoint there, `antiphon model random {0}` invents \
             one for measuring",
            dir.display()
        );
        return FAILED;
    }
    let report = verify::verify(dir, llm.stem());
    println!("{report}");
    if report.passed() { DONE } else { FAILED }
}

/// `model random DIR`: writes a random checkpoint and says where.
pub fn random(dir: &Path, size: Size, seed: u64) -> u8 {
    let bar = bytes_bar("writing");
    let written = random::write(dir, size, seed, |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    match written {
        Ok(()) => {
            println!("{}: random weights, seed {seed}", dir.display());
            DONE
        }
        Err(error) => complain(&error),
    }
}

/// Whether `dir` holds a checkpoint to compare with its kit's tensors.
pub fn is_kit(dir: &Path) -> bool {
    dir.join("checkpoint").is_dir()
}

/// `model selftest KIT` on the CPU, in the modes of `hardware`.
pub fn selftest(kit: &Path, hardware: Hardware) -> u8 {
    print_selftest(selftest::run_on_cpu(kit, hardware))
}

/// `model selftest KIT` on a backend that `load` makes from the kit's checkpoint. `limits` as in [`selftest::run`].
pub fn selftest_on<B, E>(kit: &Path, limits: &[(&str, f64)], load: impl FnOnce(&Kit) -> Result<B, E>) -> u8
where
    B: selftest::Testable,
    E: std::fmt::Display,
{
    let kit = match Kit::open(kit) {
        Ok(kit) => kit,
        Err(error) => return complain(&error),
    };
    match load(&kit) {
        Ok(mut backend) => print_selftest(selftest::run(&kit, &mut backend, limits)),
        Err(error) => {
            eprintln!("error: {error}");
            UNAVAILABLE
        }
    }
}

/// `model selftest KIT` where a device cannot run all of its networks: see [`selftest::left_out`].
pub fn selftest_left_out(kit: &Path, misfits: &[(&'static str, String)]) -> u8 {
    print_selftest(Kit::open(kit).and_then(|kit| selftest::left_out(&kit, misfits)))
}

/// `model pull [ID[@REVISION]]`: fetches the files of a checkpoint into `dir` from `endpoint` (`None`: the public hub).
pub fn pull(id: &str, dir: &Path, endpoint: Option<&str>, set: &pull::Set) -> u8 {
    let bar = bytes_bar("fetching");
    // What came now, and not what was there before or at an earlier try.
    let (began, mut fetched, mut last) = (clock::now(), 0, (String::new(), 0));
    let pulled = pull::pull_set(id, dir, endpoint, set, &mut |file, done, total| {
        if last.0 == file {
            fetched += done.saturating_sub(last.1);
        }
        last = (file.to_string(), done);
        bar.set_message(file.to_string());
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    match pulled {
        Ok(pulled) => {
            let pull::Pulled { files, revision, known } = pulled;
            let (megabytes, seconds) = (fetched as f64 / 1e6, (clock::now() - began).as_secs_f64());
            println!(
                "{}: {files} files of revision {revision}, sizes and hashes checked; {megabytes:.1} MB in {seconds:.1} s, {:.1} MB/s",
                dir.display(),
                megabytes / seconds.max(1e-3)
            );
            println!("{known} of them by hashes that are known beforehand, the others by what the hub lists");
            DONE
        }
        Err(error @ PullError::Unreachable { .. }) => {
            complain(&error);
            UNAVAILABLE
        }
        Err(error) => complain(&error),
    }
}

fn print_selftest(result: Result<Report, KitError>) -> u8 {
    match result {
        Ok(report) => {
            println!("{report}");
            if report.passed() { DONE } else { FAILED }
        }
        Err(error) => complain(&error),
    }
}

fn complain(error: &dyn std::error::Error) -> u8 {
    eprintln!("error: {error}");
    FAILED
}

/// Hidden where the output is no terminal.
fn bytes_bar(verb: &'static str) -> ProgressBar {
    let style = ProgressStyle::with_template("{prefix} {msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::no_length().with_style(style).with_prefix(verb)
}
