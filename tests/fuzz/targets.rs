//! Every reader of strangers' bytes: the functions that `smoke.rs` and cargo-fuzz run.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use antiphon::clock;

#[path = "dialogs.rs"]
mod dialogs;

/// A reader.
pub(crate) struct Target {
    /// Also of its corpus, and of its binary for cargo-fuzz.
    pub(crate) name: &'static str,
    /// Reads; what it makes of the bytes is its business, as long as it comes back.
    read: fn(&[u8]),
    /// Good inputs beside the corpus: a folder of `tests/data` and what their names end with.
    data: &'static [(&'static str, &'static str)],
    /// Spoilt inputs where nobody says for how long.
    pub(crate) runs: u32,
}

const fn target(name: &'static str, read: fn(&[u8])) -> Target {
    Target { name, read, data: &[], runs: 3_000 }
}

pub(crate) const TARGETS: [Target; 16] = [
    Target { data: &[("rfc4475", "dat")], runs: 1_000, ..target("sip", antiphon::sip::fuzz) },
    // Transactions and dialogs, by scripts.
    Target { runs: 150, ..target("dialogs", dialogs::converse) },
    target("sdp", describe),
    // Offers, fragments of trickle ICE, and STUN.
    target("whip", antiphon::webrtc::fuzz),
    // SRTP as well.
    Target { runs: 1_000, ..target("rtp", antiphon::media::sip::fuzz) },
    target("rtcp", report),
    target("agent_frames", frame),
    target("requests", antiphon::server::fuzz),
    target("recogniser", recognise),
    target("llm", complete),
    target("worker", antiphon::synth::device::remote::fuzz),
    target("pickle", antiphon::synth::cosyvoice::pickle::fuzz),
    Target { data: &[("golden/cosyvoice3/checkpoint", "yaml")], ..target("yaml", yaml) },
    target("onnx", antiphon::voice::onnx::fuzz),
    Target {
        data: &[("voice", "ogg"), ("voice", "mp3"), ("voice", "m4a"), ("voice", "webm")],
        runs: 300,
        ..target("audio", antiphon::voice::decode::fuzz)
    },
    Target { data: &[("", "toml")], runs: 1_000, ..target("config", antiphon::config::fuzz) },
];

/// Runs the reader called `name`.
#[allow(dead_code, reason = "cargo-fuzz calls it")]
pub(crate) fn run(name: &str, bytes: &[u8]) {
    let target = TARGETS.iter().find(|target| target.name == name).expect("a target of the table");
    target.run(bytes);
}

/// Called once before a fuzzer's first run: its own hook aborts on panics, also on those that `decode` catches and turns
/// into errors; what a target panics with still ends it.
#[allow(dead_code, reason = "cargo-fuzz calls it")]
pub(crate) fn begin() {
    std::panic::set_hook(Box::new(|_| {}));
}

impl Target {
    pub(crate) fn run(&self, bytes: &[u8]) {
        (self.read)(bytes);
    }

    /// Good inputs. Of a long one the beginning and the end are kept: headers stand there, and numbers between.
    pub(crate) fn corpus(&self) -> Vec<Vec<u8>> {
        let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
        // cargo-fuzz builds a crate of its own inside this folder.
        let tests = if tests.ends_with("fuzz") { tests.join("..") } else { tests.join("tests") };
        let mut paths = files(&tests.join("fuzz/corpus").join(self.name), "");
        for (folder, ending) in self.data {
            paths.extend(files(&tests.join("data").join(folder), ending));
        }
        assert!(!paths.is_empty(), "{} has a corpus", self.name);
        let read = |path: &PathBuf| {
            let mut bytes = std::fs::read(path).expect("readable");
            if bytes.len() > 48 << 10 {
                bytes.drain(40 << 10..bytes.len() - (8 << 10));
            }
            bytes
        };
        paths.iter().map(read).collect()
    }
}

/// The files of a folder whose names end so, in order; none where there is no such folder.
fn files(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.retain(|path| path.is_file() && path.to_string_lossy().ends_with(ending));
    paths.sort();
    paths
}

/// A description as an offer, and as the answer to one of ours.
fn describe(bytes: &[u8]) {
    let Ok(description) = sdp::parse(bytes) else { return };
    let local = sdp::LocalMedia {
        address: IpAddr::V4(Ipv4Addr::LOCALHOST),
        port: 40_000,
        session_id: 1,
        keys: [1, 2, 3, 4].map(|n| sdp::Key([n; sdp::Key::LENGTH])),
        dtls: Some(sdp::LocalDtls {
            fingerprint: "sha-256 0A:0B".parse().expect("a fingerprint"),
            fragment: "here".to_owned(),
            password: "a-password-that-is-long-enough".to_owned(),
        }),
    };
    use sdp::SrtpPolicy::{Allowed, Dtls, Never, Required};
    for srtp in [Never, Allowed, Required, Dtls] {
        let policy = sdp::Policy { srtp, ..sdp::Policy::default() };
        let mut answering = sdp::Negotiator::new(policy.clone(), local.clone());
        if answering.answer(&description).is_ok() {
            let _ = answering.answer(&description);
        }
        let mut offering = sdp::Negotiator::new(policy, local.clone());
        let _ = offering.offer();
        let _ = offering.accept(&description);
    }
    assert!(sdp::parse(description.to_string().as_bytes()).is_ok(), "what is written can be read again");
}

fn report(bytes: &[u8]) {
    let now = clock::now();
    let mut rtcp = antiphon::media::rtcp::Rtcp::new(now, 1, "c".into(), 8_000);
    let _ = rtcp.on_rtcp(now, Duration::ZERO, bytes);
}

fn frame(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let _ = antiphon::agent::frames::parse(&text);
    let _ = antiphon::telemetry::context::TraceContext::parse(&text);
}

/// A message of a recogniser, twice: the second one meets what the first has left.
fn recognise(bytes: &[u8]) {
    use antiphon::hear::stream::protocol::{Dialect, Talk};
    let text = String::from_utf8_lossy(bytes);
    for dialect in [Dialect::Listen, Dialect::Flux, Dialect::OpenAi] {
        let mut talk = Talk::new(dialect, None, Some("en"));
        let _ = (talk.read(&text), talk.read(&text));
    }
}

/// A streamed answer of a language model, cut anywhere.
fn complete(bytes: &[u8]) {
    use antiphon::agent::llm::{answer, sse};
    let (mut parser, mut events) = (sse::Parser::default(), Vec::new());
    for piece in bytes.chunks(7) {
        if parser.push(piece, &mut events).is_err() {
            return;
        }
    }
    for event in &events {
        let _ = answer::read(event);
    }
}

fn yaml(bytes: &[u8]) {
    let _ = antiphon::synth::cosyvoice::yaml::parse(&String::from_utf8_lossy(bytes));
}
