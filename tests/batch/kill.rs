//! Accepted batch jobs survive `kill -9` at any instant: this test executable starts itself as the process that
//! works, kills it over and over, and compares what comes out with a run that nobody disturbed.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use antiphon::audio_file::Format;
use antiphon::batch::{Batch, Config, JobSpec, JobState, PAGE};
use antiphon::sched;
use antiphon::synth::device::{Engine, Loader};
use antiphon::synth::tone::Tone;

const JOBS: usize = 3;
const SENTENCES: usize = 60;
const LIMIT: Duration = Duration::from_secs(60);

fn open(folder: &Path) -> Batch {
    let loader: Loader = Box::new(|| Ok(Box::new(Tone::new())));
    let engine = Engine::start(vec![loader], sched::Config::default()).expect("starts");
    let config = Config {
        database: folder.join("jobs.sqlite").into(),
        audio_dir: folder.join("audio"),
        lanes: 4,
        ..Config::default()
    };
    Batch::open(config, engine).expect("opens")
}

fn submit(batch: &Batch) -> Vec<String> {
    let text = |job: usize| -> String {
        (0..SENTENCES).map(|n| format!("Sentence {n} of book {job} is spoken here for the test. ")).collect()
    };
    let spec = |job: usize| JobSpec {
        items: vec![text(job).into(), text(job + 10).into()],
        voice: None,
        language: None,
        instructions: None,
        speed: 4.0,
        seed: job as u64,
        format: Format::ALL[job % Format::ALL.len()],
        tenant: format!("tenant {}", job % 2),
        priority: 0,
    };
    (0..JOBS).map(|job| batch.submit(spec(job)).expect("accepted").id).collect()
}

async fn finish(batch: &Batch) {
    let all_over = || batch.list(PAGE, None).expect("lists").jobs.iter().all(|job| job.state == JobState::Done);
    let wait = async {
        while !all_over() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(LIMIT, wait).await.expect("finished in time");
}

fn audio(batch: &Batch, id: &str) -> Vec<u8> {
    batch.audio(id, None).expect("finished").map(|bytes| bytes.expect("readable")).collect::<Vec<_>>().concat()
}

/// Every finished utterance's file and the inode that it was given.
fn files(folder: &Path) -> BTreeMap<PathBuf, u64> {
    let mut found = BTreeMap::new();
    for job in fs::read_dir(folder.join("audio")).expect("readable") {
        for file in fs::read_dir(job.expect("readable").path()).expect("readable") {
            let path = file.expect("readable").path();
            if path.extension().is_some_and(|e| e == "pcm") {
                found.insert(path.clone(), fs::metadata(&path).expect("there").ino());
            }
        }
    }
    found
}

/// Not a test: the process that is killed. It is told where to work by its standard input.
#[test]
#[ignore = "started by the tests below"]
fn worker() {
    let mut folder = String::new();
    std::io::stdin().read_line(&mut folder).expect("told where");
    if folder.trim().is_empty() {
        return;
    }
    let batch = open(Path::new(folder.trim()));
    println!("\nopen");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("runtime");
    runtime.block_on(finish(&batch));
    batch.shutdown();
}

fn start(folder: &Path) -> Child {
    let mut child = Command::new(std::env::current_exe().expect("known"))
        .args(["--ignored", "--exact", "kill::worker", "--nocapture"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("starts");
    writeln!(child.stdin.take().expect("piped"), "{}", folder.display()).expect("told");
    child
}

async fn survive(kills: u64) {
    let calm = tempfile::tempdir().expect("temp dir");
    let batch = open(calm.path());
    let reference = submit(&batch);
    finish(&batch).await;
    let reference: Vec<Vec<u8>> = reference.iter().map(|id| audio(&batch, id)).collect();
    batch.shutdown();
    let utterances = files(calm.path()).len();

    let folder = tempfile::tempdir().expect("temp dir");
    let batch = open(folder.path());
    let mut ids = submit(&batch);
    batch.shutdown();
    let mut finished = files(folder.path());
    let mut interrupted = 0;
    let mut seed = 0x2545_f491_4f6c_dd1du64;
    for _ in 0..kills {
        let mut child = start(folder.path());
        let out = child.stdout.take().expect("piped");
        // From the opening of the database on, any instant will do.
        let opened = BufReader::new(out).lines().map_while(Result::ok).any(|line| line == "open");
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        tokio::time::sleep(Duration::from_micros(seed % 12_000)).await;
        interrupted += u64::from(child.try_wait().expect("ours").is_none());
        child.kill().expect("killed or over");
        child.wait().expect("reaped");
        assert!(opened, "the worker did not start");
        let now = files(folder.path());
        for (path, inode) in &finished {
            assert_eq!(now.get(path), Some(inode), "{} was made again", path.display());
        }
        finished = now;
        if finished.len() == utterances * ids.len() / JOBS {
            // All is done: a kill would prove nothing without new work.
            let batch = open(folder.path());
            ids.extend(submit(&batch));
            batch.shutdown();
            finished = files(folder.path());
        }
    }
    let batch = open(folder.path());
    finish(&batch).await;
    let now = files(folder.path());
    assert!(finished.iter().all(|(path, inode)| now.get(path) == Some(inode)), "finished work was made again");
    for (id, reference) in ids.iter().zip(reference.iter().cycle()) {
        assert!(audio(&batch, id) == *reference, "audio of {id} differs from the undisturbed run");
    }
    batch.shutdown();
    println!("{interrupted} of {kills} kills came in the middle of work; {} utterances", now.len());
    assert!(interrupted > 0);
}

#[tokio::test]
async fn jobs_survive_twenty_kills() {
    survive(20).await;
}

#[tokio::test]
#[ignore = "takes minutes; the short form runs always"]
async fn jobs_survive_two_hundred_kills() {
    survive(200).await;
}
