//! `model pull` against a small hub on loopback that cuts connections and corrupts files on request.

use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

use antiphon::synth::cosyvoice::pull::{DEFAULT_ID, PullError, Pulled, pull};
use antiphon::synth::cosyvoice::random::{self, Size};
use antiphon::synth::cosyvoice::verify;
use sha2::{Digest, Sha256};

const ID: &str = "someone/a-model";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

#[derive(Default)]
struct Mischief {
    /// File, and after how many bytes of a transfer the connection is cut; how often.
    cut: Option<(String, usize, u32)>,
    /// File whose first byte is wrong, and in how many transfers.
    corrupt: Option<(String, u32)>,
}

struct Hub {
    address: String,
    mischief: Arc<Mutex<Mischief>>,
    /// Requests for content by file: the offset each began at.
    ranges: Arc<Mutex<HashMap<String, Vec<usize>>>>,
    /// Revisions whose list was asked for.
    listed: Arc<Mutex<Vec<String>>>,
}

/// The files of a checkpoint by their names in a repository.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    let names = ["cosyvoice3.yaml", "llm.pt", "flow.pt", "hift.pt"].map(String::from).into_iter();
    let blank =
        ["config.json", "vocab.json", "merges.txt", "tokenizer_config.json"].map(|n| format!("CosyVoice-BlankEN/{n}"));
    for name in names.chain(blank) {
        files.insert(name.clone(), std::fs::read(dir.join(&name)).expect("there"));
    }
    files.insert("README.md".into(), b"not wanted".to_vec());
    files.insert("../evil".into(), b"not wanted either".to_vec());
    files
}

impl Hub {
    fn start(files: BTreeMap<String, Vec<u8>>) -> Hub {
        let listener = TcpListener::bind("127.0.0.1:0").expect("binds");
        let address = format!("http://{}", listener.local_addr().expect("bound"));
        let hub = Hub { address, mischief: Arc::default(), ranges: Arc::default(), listed: Arc::default() };
        let (mischief, ranges, files) = (hub.mischief.clone(), hub.ranges.clone(), Arc::new(files));
        let listed = hub.listed.clone();
        // Ends with the test process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (mischief, ranges, files) = (mischief.clone(), ranges.clone(), files.clone());
                let listed = listed.clone();
                std::thread::spawn(move || serve(&stream, &files, &mischief, &ranges, &listed));
            }
        });
        hub
    }

    fn pull(&self, dir: &Path) -> Result<Pulled, PullError> {
        self.pull_of(ID, dir)
    }

    fn pull_of(&self, id: &str, dir: &Path) -> Result<Pulled, PullError> {
        pull(id, dir, Some(&self.address), &mut |_, done, total| assert!(done <= total))
    }

    fn starts(&self, file: &str) -> Vec<usize> {
        self.ranges.lock().expect("lock").get(file).cloned().unwrap_or_default()
    }
}

fn serve(
    stream: &TcpStream,
    files: &BTreeMap<String, Vec<u8>>,
    mischief: &Mutex<Mischief>,
    ranges: &Mutex<HashMap<String, Vec<usize>>>,
    listed: &Mutex<Vec<String>>,
) {
    let mut reader = BufReader::new(stream);
    loop {
        let (mut line, mut range) = (String::new(), None);
        if reader.by_ref().take(8192).read_line(&mut line).unwrap_or_default() == 0 {
            return;
        }
        let path = line.split(' ').nth(1).unwrap_or_default().to_string();
        loop {
            let mut header = String::new();
            if reader.read_line(&mut header).unwrap_or_default() == 0 || header.trim().is_empty() {
                break;
            }
            if let Some(value) = header.to_ascii_lowercase().strip_prefix("range: bytes=") {
                let (from, to) = value.trim().split_once('-').expect("a range");
                range = Some((from.parse::<usize>().expect("a number"), to.parse::<usize>().ok()));
            }
        }
        let mut out = stream;
        if path.starts_with("/api/models/") {
            let asked = path.split("/revision/").nth(1).and_then(|rest| rest.split('?').next()).unwrap_or_default();
            listed.lock().expect("lock").push(asked.to_owned());
            // A commit is itself, also of the other checkpoint; one of zeros is none that it has.
            let commit = if asked.len() == 40 && !asked.starts_with("00") { asked } else { COMMIT };
            let body = listing(files, commit);
            let head =
                format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nContent-Type: application/json\r\n\r\n", body.len());
            out.write_all(&[head.as_bytes(), body.as_bytes()].concat()).ok();
            continue;
        }
        // By commit only: a branch is another in a moment.
        let (revision, name) =
            path.split_once("/resolve/").and_then(|(_, rest)| rest.split_once('/')).unwrap_or_default();
        let name = if revision.len() == 40 { name } else { "" };
        let Some(bytes) = files.get(name) else {
            out.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n").ok();
            continue;
        };
        let (from, to) = range.map_or((0, bytes.len()), |(from, to)| (from, to.map_or(bytes.len(), |t| t + 1)));
        let head = format!(
            "HTTP/1.1 206 Partial Content\r\nContent-Length: {}\r\nContent-Range: bytes {from}-{}/{}\r\nETag: \"{:x}\"\r\n\
             x-repo-commit: {COMMIT}\r\n\r\n",
            to - from,
            to - 1,
            bytes.len(),
            name.bytes().fold(7u64, |h, b| h.wrapping_mul(31).wrapping_add(b.into())),
        );
        out.write_all(head.as_bytes()).ok();
        let mut body = bytes[from..to].to_vec();
        if to - from > 1 || bytes.len() == 1 {
            ranges.lock().expect("lock").entry(name.into()).or_default().push(from);
            let mut mischief = mischief.lock().expect("lock");
            if let Some((file, times)) = &mut mischief.corrupt
                && file == name
                && *times > 0
                && from == 0
            {
                *times -= 1;
                body[0] ^= 0xff;
            }
            if let Some((file, after, times)) = &mut mischief.cut
                && file == name
                && *times > 0
                && body.len() > *after
            {
                *times -= 1;
                out.write_all(&body[..*after]).ok();
                stream.shutdown(Shutdown::Both).ok();
                return;
            }
        }
        if out.write_all(&body).is_err() {
            return;
        }
    }
}

fn listing(files: &BTreeMap<String, Vec<u8>>, commit: &str) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    let siblings: Vec<serde_json::Value> = files
        .iter()
        .map(|(name, bytes)| {
            let mut file = serde_json::json!({ "rfilename": name, "size": bytes.len() });
            if name.ends_with(".pt") {
                file["lfs"] = serde_json::json!({ "sha256": hex(&Sha256::digest(bytes)), "size": bytes.len() });
            }
            file
        })
        .collect();
    serde_json::json!({ "siblings": siblings, "sha": commit }).to_string()
}

fn checkpoint() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("temp dir");
    random::write(dir.path(), Size::Tiny, 9, |_, _| ()).expect("written");
    dir
}

#[test]
fn a_pulled_checkpoint_is_complete_and_only_what_is_wanted() {
    let source = checkpoint();
    let hub = Hub::start(files(source.path()));
    let dir = tempfile::tempdir().expect("temp dir");
    assert_eq!(hub.pull(dir.path()).expect("pulled").files, 8);
    assert!(verify::verify(dir.path(), "llm").passed());
    assert!(!dir.path().join("README.md").exists());
    assert!(!dir.path().parent().expect("parent").join("evil").exists());
    assert!(!dir.path().join(".pull").exists(), "nothing unfinished is left");
    // What is there and right is not fetched again.
    let before = hub.starts("llm.pt").len();
    assert_eq!(hub.pull(dir.path()).expect("pulled").files, 8);
    assert_eq!(hub.starts("llm.pt").len(), before);
}

#[test]
fn all_files_are_of_one_commit_and_of_the_one_that_is_asked_for() {
    let source = checkpoint();
    let hub = Hub::start(files(source.path()));
    let dir = tempfile::tempdir().expect("temp dir");
    // The hub gives nothing by the name of a branch.
    let pulled = hub.pull(dir.path()).expect("pulled");
    assert_eq!(pulled, Pulled { files: 8, revision: COMMIT.into(), known: 0 });
    let other = "89abcdef0123456789abcdef0123456789abcdef";
    let elsewhere = tempfile::tempdir().expect("temp dir");
    let pulled = hub.pull_of(&format!("{ID}@{other}"), elsewhere.path()).expect("pulled");
    assert_eq!(pulled.revision, other);
    assert_eq!(*hub.listed.lock().expect("lock"), ["main", other]);
    let refused = hub.pull_of(&format!("{ID}@{}", "0".repeat(40)), elsewhere.path());
    assert!(matches!(&refused, Err(PullError::OtherRevision { found, .. }) if found == COMMIT), "{refused:?}");
    let refused = hub.pull_of(&format!("{ID}@../evil"), elsewhere.path());
    assert!(matches!(&refused, Err(PullError::Unreachable { .. })), "{refused:?}");
}

#[test]
fn of_the_published_checkpoint_a_hub_can_bring_no_other_files_than_those_that_are_known() {
    let source = checkpoint();
    // Its hashes are those of what it sends.
    let hub = Hub::start(files(source.path()));
    let dir = tempfile::tempdir().expect("temp dir");
    match hub.pull_of(DEFAULT_ID, dir.path()) {
        Err(PullError::Corrupt { file, what, expected, .. }) => {
            assert_eq!((file.as_str(), what, expected.len()), ("cosyvoice3.yaml", "SHA-256", 64));
        }
        other => panic!("{other:?}"),
    }
    assert!(!dir.path().join("cosyvoice3.yaml").exists());
    let listed = hub.listed.lock().expect("lock").clone();
    assert!(listed.len() == 1 && listed[0].len() == 40, "at a commit: {listed:?}");
}

#[test]
fn model_pull_fetches_from_a_hub() {
    let source = checkpoint();
    let hub = Hub::start(files(source.path()));
    let folder = tempfile::tempdir().expect("temp dir");
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_antiphon"))
        .args(["model", "pull", ID])
        .current_dir(folder.path())
        .env("HF_ENDPOINT", &hub.address)
        .output()
        .expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(verify::verify(&folder.path().join("a-model"), "llm").passed());
}

#[test]
fn a_cut_connection_is_gone_on_with() {
    let source = checkpoint();
    let hub = Hub::start(files(source.path()));
    hub.mischief.lock().expect("lock").cut = Some(("flow.pt".into(), 5000, 2));
    let dir = tempfile::tempdir().expect("temp dir");
    hub.pull(dir.path()).expect("pulled in spite of it");
    assert_eq!(hub.starts("flow.pt"), [0, 5000, 10_000], "each request begins where the last one ended");
    assert_eq!(std::fs::read(dir.path().join("flow.pt")).ok(), std::fs::read(source.path().join("flow.pt")).ok());
}

#[test]
fn a_corrupted_file_is_fetched_again_and_then_refused() {
    let source = checkpoint();
    let hub = Hub::start(files(source.path()));
    let dir = tempfile::tempdir().expect("temp dir");
    hub.mischief.lock().expect("lock").corrupt = Some(("hift.pt".into(), 1));
    hub.pull(dir.path()).expect("the second transfer is right");
    std::fs::remove_file(dir.path().join("hift.pt")).expect("removed");
    hub.mischief.lock().expect("lock").corrupt = Some(("hift.pt".into(), 99));
    match hub.pull(dir.path()) {
        Err(PullError::Corrupt { file, what, .. }) => assert_eq!((file.as_str(), what), ("hift.pt", "SHA-256")),
        other => panic!("{other:?}"),
    }
    assert!(!dir.path().join("hift.pt").exists(), "a bad file never takes a good one's place");
}

#[test]
fn what_is_no_checkpoint_and_no_hub_is_said_clearly() {
    let source = checkpoint();
    let mut some = files(source.path());
    some.remove("hift.pt");
    let hub = Hub::start(some);
    let dir = tempfile::tempdir().expect("temp dir");
    assert!(matches!(hub.pull(dir.path()), Err(PullError::NotACheckpoint { file, .. }) if file == "hift.pt"));
    let nobody = TcpListener::bind("127.0.0.1:0").expect("binds");
    let address = format!("http://{}", nobody.local_addr().expect("bound"));
    drop(nobody);
    let refused = pull(ID, dir.path(), Some(&address), &mut |_, _, _| ());
    assert!(matches!(refused, Err(PullError::Unreachable { .. })), "{refused:?}");
}
