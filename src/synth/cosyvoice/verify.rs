//! `antiphon model verify DIR`: everything about a checkpoint directory in one report, before anything is loaded.

use std::collections::BTreeSet;
use std::fmt;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::checkpoint::{Part, TensorFile, find, nested};
use super::config::{Config, YAML};
use super::layout::{self, LM_HEAD, WEIGHT_NORM};
use super::pickle::Element;
use super::text::Tokenizer;

/// Threads that look at values at once at most: more are bound by memory.
const CHECKERS: usize = 8;

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// In which file.
    pub file: PathBuf,
    /// Which tensor, where it is one.
    pub key: Option<String>,
    /// What was expected.
    pub expected: String,
    /// What was found.
    pub found: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.file.display())?;
        if let Some(key) = &self.key {
            write!(f, "`{key}`: ")?;
        }
        write!(f, "expected {}, found {}", self.expected, self.found)
    }
}

/// What a check of a checkpoint's directory found; `P` tells of one fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report<P = Problem> {
    /// Tensors that were compared.
    pub tensors: usize,
    /// Values in them.
    pub values: u64,
    /// Everything that is wrong, in file order.
    pub problems: Vec<P>,
}

impl<P> Default for Report<P> {
    fn default() -> Self {
        Self { tensors: 0, values: 0, problems: Vec::new() }
    }
}

impl<P> Report<P> {
    /// Whether the directory can be loaded.
    pub fn passed(&self) -> bool {
        self.problems.is_empty()
    }
}

impl Report {
    fn add(&mut self, file: &Path, key: Option<&str>, expected: impl Into<String>, found: impl Into<String>) {
        let (expected, found) = (expected.into(), found.into());
        self.problems.push(Problem { file: file.to_path_buf(), key: key.map(Into::into), expected, found });
    }
}

impl<P: fmt::Display> fmt::Display for Report<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for problem in &self.problems {
            writeln!(f, "{problem}")?;
        }
        match self.problems.len() {
            0 => write!(f, "{} tensors, {} values: all as expected", self.tensors, self.values),
            n => write!(f, "{n} problem{} in {} tensors", if n == 1 { "" } else { "s" }, self.tensors),
        }
    }
}

/// Checks `dir` with `llm` as the language model's file stem (`llm` or `llm.rl`).
pub fn verify(dir: &Path, llm: &str) -> Report {
    let mut report = Report::default();
    let config = match Config::load(dir) {
        Ok(config) => config,
        Err(error) => {
            report.add(dir, None, "readable sizes (cosyvoice3.yaml, CosyVoice-BlankEN/config.json)", error.to_string());
            return report;
        }
    };
    if let Err(reason) = config.playable() {
        report.add(&dir.join(YAML), None, "rates that fit together", reason);
    }
    match Tokenizer::load(dir) {
        Err(error) => report.add(dir, None, "a tokenizer in CosyVoice-BlankEN", error.to_string()),
        Ok(tokenizer) => {
            let last = tokenizer.end_of_prompt();
            if last as usize >= config.llm.vocab {
                let found = format!("id {last} for <|endofprompt|>");
                report.add(dir, None, format!("text ids below {}", config.llm.vocab), found);
            }
        }
    }
    let expected = layout::expected(&config);
    for part in Part::ALL {
        let path = find(dir, if part == Part::Llm { llm } else { part.stem() });
        match TensorFile::open(&path) {
            Ok(file) => tensors(&file, part, &expected, &mut report),
            Err(error) => report.add(&path, None, "a readable list of tensors", error.to_string()),
        }
    }
    let saved = dir.join("spk2info.pt");
    if saved.exists()
        && let Err(error) = nested(&saved)
    {
        report.add(&saved, None, "saved voices", error.to_string());
    }
    report
}

fn tensors(file: &TensorFile, part: Part, expected: &[layout::Expected], report: &mut Report) {
    let mut known = BTreeSet::new();
    let mut found = Vec::new();
    for tensor in expected.iter().filter(|t| t.part == part) {
        let key = spelling(file, &tensor.key);
        known.insert(key.clone());
        let Some(key) = Some(key).filter(|k| file.has(k)) else {
            // Safetensors cannot hold a tensor twice, so the tied head may be left out.
            if tensor.key != LM_HEAD {
                // A weight stored whole needs no norm.
                let whole = WEIGHT_NORM[0].iter().find_map(|s| tensor.key.strip_suffix(s));
                let plain = whole.map(|name| format!("{name}weight")).filter(|k| file.has(k));
                match plain {
                    Some(plain) => drop(known.insert(plain)),
                    None => report.add(file.path(), Some(&tensor.key), format!("{:?}", tensor.shape), "nothing"),
                }
            }
            continue;
        };
        found.push((key, &tensor.shape[..]));
    }
    report.tensors += found.len();
    for checked in check_all(file, &found) {
        report.values += checked.values;
        report.problems.extend(checked.problems);
    }
    for (key, _) in file.entries() {
        if !known.contains(key) {
            report.add(file.path(), Some(key), "nothing", "a tensor that this model does not have");
        }
    }
}

/// The key under which a file holds what the layout calls `key`.
fn spelling(file: &TensorFile, key: &str) -> String {
    for (new, old) in WEIGHT_NORM[0].iter().zip(WEIGHT_NORM[1]) {
        if let Some(name) = key.strip_suffix(new)
            && !file.has(key)
            && file.has(&format!("{name}{old}"))
        {
            return format!("{name}{old}");
        }
    }
    key.into()
}

/// What [`check`] says of each of `tensors`, in their order. Every value of a checkpoint is looked at before each start: by one core
/// that took a third of it.
fn check_all(file: &TensorFile, tensors: &[(String, &[usize])]) -> Vec<Report> {
    let next = AtomicUsize::new(0);
    let some = || {
        let mut checked = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some((key, shape)) = tensors.get(at) else { return checked };
            let mut report = Report::default();
            check(file, key, shape, &mut report);
            checked.push((at, report));
        }
    };
    let cores = thread::available_parallelism().map_or(1, NonZero::get).min(CHECKERS);
    let mut all: Vec<(usize, Report)> = thread::scope(|scope| {
        let others: Vec<_> = (1..cores).map(|_| scope.spawn(some)).collect();
        let mut all = some();
        for other in others {
            match other.join() {
                Ok(checked) => all.extend(checked),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        all
    });
    all.sort_by_key(|(at, _)| *at);
    all.into_iter().map(|(_, report)| report).collect()
}

fn check(file: &TensorFile, key: &str, shape: &[usize], report: &mut Report) {
    let stored = match file.stored(key) {
        Ok(stored) => stored,
        Err(error) => return report.add(file.path(), Some(key), format!("{shape:?}"), error.to_string()),
    };
    if stored.shape != shape {
        return report.add(file.path(), Some(key), format!("shape {shape:?}"), format!("shape {:?}", stored.shape));
    }
    if !matches!(stored.element, Element::F32 | Element::F16 | Element::Bf16) {
        return report.add(file.path(), Some(key), "float32, float16 or bfloat16", stored.element.name());
    }
    match file.floats(key, shape) {
        Err(error) => report.add(file.path(), Some(key), "readable values", error.to_string()),
        Ok(values) => {
            report.values += values.len() as u64;
            let bad = values.iter().filter(|v| !v.is_finite()).count();
            if bad > 0 {
                report.add(file.path(), Some(key), "finite values", format!("{bad} that are infinite or not a number"));
            }
        }
    }
}
