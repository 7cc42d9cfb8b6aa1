//! Every reader of strangers' bytes, fed with spoilt versions of good ones: none may panic, abort or hang.
//!
//! A bounded number of runs from a fixed seed, on any toolchain. `ANTIPHON_FUZZ_SECONDS=60` gives each target so long, from a
//! seed that is printed; `ANTIPHON_FUZZ_SEED` is another. `.ci/run` gives each a minute. The same functions are the targets of cargo-fuzz, which is guided by coverage and needs a nightly
//! toolchain.

#[path = "targets.rs"]
mod targets;

use std::path::Path;
use std::time::{Duration, Instant};

use antiphon::clock;

use self::targets::{TARGETS, Target};

/// Largest input.
const MAX: usize = 64 << 10;

/// Xorshift64*: the same inputs on every machine.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }
}

/// What numbers and text formats stumble over.
const PIECES: [&[u8]; 14] = [
    b"\0",
    b"\r\n",
    b"\r\n\r\n",
    b"\xff\xff\xff\xff",
    b"\x80",
    b"-1",
    b"99999999999999999999",
    b"4294967296",
    b":",
    b"=",
    b"\"",
    b"\xc3\x28",
    b"{\"a\":",
    b"%n",
];

/// `good` with one to four things done to it; `other` is what parts are taken from.
fn spoil(rng: &mut Rng, good: &[u8], other: &[u8]) -> Vec<u8> {
    let mut bytes = good.to_vec();
    for _ in 0..=rng.below(4) {
        let at = rng.below(bytes.len() + 1);
        let end = (at + rng.below(64)).min(bytes.len());
        match rng.below(7) {
            0 if !bytes.is_empty() => {
                let at = rng.below(bytes.len());
                bytes[at] ^= 1 << rng.below(8);
            }
            1 => bytes.truncate(at),
            2 => drop(bytes.drain(at..end)),
            3 => drop(bytes.splice(at..at, PIECES[rng.below(PIECES.len())].iter().copied())),
            4 => drop(bytes.splice(at..end, PIECES[rng.below(PIECES.len())].iter().copied())),
            5 => {
                let piece = bytes[at..end].to_vec();
                bytes.splice(at..at, piece);
            }
            _ => {
                let from = rng.below(other.len() + 1);
                let to = (from + rng.below(200)).min(other.len());
                bytes.splice(at..end, other[from..to].iter().copied());
            }
        }
    }
    bytes.truncate(MAX);
    bytes
}

/// Feeds a target with its corpus as it is and with spoilt inputs.
fn feed(target: &Target) {
    let corpus = target.corpus();
    corpus.iter().for_each(|good| target.run(good));
    let seconds = number("ANTIPHON_FUZZ_SECONDS").map(Duration::from_secs);
    let usual = seconds.map_or(0x5eed_0000 + corpus.len() as u64, |_| clock::wall().as_nanos() as u64);
    // Zero would stay zero.
    let seed = number("ANTIPHON_FUZZ_SEED").unwrap_or(usual) | 1;
    let (mut rng, until): (Rng, Option<Instant>) = (Rng(seed), seconds.map(|seconds| clock::now() + seconds));
    let mut runs = 0_u64;
    while until.map_or(runs < u64::from(target.runs), |until| clock::now() < until) {
        let (good, other) = (rng.below(corpus.len()), rng.below(corpus.len()));
        let bytes = spoil(&mut rng, &corpus[good], &corpus[other]);
        let last = LAST.with(|last| last.replace(bytes.clone()));
        target.run(&bytes);
        drop(last);
        runs += 1;
    }
    if seconds.is_some() {
        println!("{}: {runs} inputs from seed {seed:#x}", target.name);
    }
}

/// A variable of the environment.
#[allow(clippy::disallowed_methods, reason = "these variables belong to the test")]
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}

thread_local! {
    /// What is being read, for who has to find out what it panicked on.
    static LAST: std::cell::RefCell<Vec<u8>> = const { std::cell::RefCell::new(Vec::new()) };
}

fn fuzz(name: &str) {
    let target = TARGETS.iter().find(|target| target.name == name).expect("a target of the table");
    if let Err(panic) = std::panic::catch_unwind(|| feed(target)) {
        let input = LAST.with(|last| last.borrow().escape_ascii().to_string());
        println!("{name} panicked on b\"{input}\"");
        std::panic::resume_unwind(panic);
    }
}

macro_rules! targets {
    ($($name:ident),* $(,)?) => {
        const NAMES: &[&str] = &[$(stringify!($name)),*];
        $(#[test] fn $name() { fuzz(stringify!($name)); })*
    };
}

targets!(
    sip,
    dialogs,
    sdp,
    whip,
    rtp,
    rtcp,
    agent_frames,
    requests,
    recogniser,
    llm,
    worker,
    pickle,
    yaml,
    onnx,
    audio,
    config,
);

#[test]
fn every_target_has_a_test_and_a_binary_for_cargo_fuzz() {
    let all: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
    assert_eq!(all, NAMES);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz");
    let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).expect("readable");
    for name in all {
        assert!(manifest.contains(&format!("name = \"{name}\"")), "{name}");
        let text = std::fs::read_to_string(folder.join(format!("fuzz_targets/{name}.rs"))).expect("readable");
        assert!(text.contains(&format!("run(\"{name}\"")), "{name}");
    }
    let checks = std::fs::read_to_string(folder.join("../../.ci/run")).expect("readable");
    assert!(checks.contains("ANTIPHON_FUZZ_SECONDS=60 "), "each has a minute in what a change must pass");
}
