//! Batch work of one, two and four devices, in one gateway, in as many gateways on one PostgreSQL, and in as many processes
//! that speak for a gateway without a voice, as `antiphon worker` does. Each device is throttled to a speed of its own, so that the cores of this machine are not what is measured.
//!
//! `cargo test --test batch -- --ignored speed --nocapture` measures it; without that the tests look whether all devices
//! are at it at the same time, whatever time that takes.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::park_timeout;
use std::time::Duration;

use antiphon::audio::{RATE, duration_of};
use antiphon::audio_file::Format;
use antiphon::batch::{Batch, Config, JobSpec};
use antiphon::clock;
use antiphon::sched;
use antiphon::synth::device::{Engine, Loader};
use antiphon::synth::tone::Tone;
use antiphon::synth::{Caps, Progress, Seeds, Slot, Stages, Step, SynthError, Synthesizer, VoiceInfo};
use antiphon::turn::Utterance;
use antiphon_skip::postgres::Postgres;

use super::found;
use super::shared::{config, over};

/// Seconds of speech that a throttled device makes in a second.
const SPEED: f64 = 40.0;
/// How long a step waits for the other devices.
const PATIENCE: Duration = Duration::from_secs(1);

/// What a device waits for in each step.
#[derive(Clone)]
enum Brake {
    /// The time that its speech takes at [`SPEED`].
    Speed,
    /// Until as many devices as this are in a step at once.
    Others(Arc<Meeting>),
}

/// Who has been in a step while all others were.
struct Meeting {
    wanted: usize,
    there: Mutex<BTreeSet<usize>>,
    changed: Condvar,
}

/// The tone, held back.
struct Held(Tone, usize, Brake);

impl Synthesizer for Held {
    fn caps(&self) -> &Caps {
        self.0.caps()
    }

    fn voices(&self) -> Vec<VoiceInfo> {
        self.0.voices()
    }

    fn open(&mut self, slot: Slot, utterance: &Utterance) -> Result<Stages, SynthError> {
        self.0.open(slot, utterance)
    }

    fn run(&mut self, step: &Step, out: &mut Vec<Progress>) -> Result<(), SynthError> {
        let begun = clock::now();
        let before = out.len();
        self.0.run(step, out)?;
        match &self.2 {
            Brake::Speed => {
                let samples: usize = out[before..].iter().map(|progress| progress.pcm.len()).sum();
                let takes = Duration::from_secs_f64(samples as f64 / f64::from(RATE) / SPEED);
                while let Some(left) = takes.checked_sub(begun.elapsed()).filter(|left| !left.is_zero()) {
                    park_timeout(left);
                }
            }
            Brake::Others(meeting) => {
                let mut there = meeting.there.lock().expect("sound");
                there.insert(self.1);
                meeting.changed.notify_all();
                // Not for as long as a device that hangs would be given up.
                drop(meeting.changed.wait_timeout_while(there, PATIENCE, |there| there.len() < meeting.wanted));
            }
        }
        Ok(())
    }

    fn close(&mut self, slot: Slot) {
        self.0.close(slot);
    }

    fn warm_up(&mut self) -> Result<Seeds, SynthError> {
        self.0.warm_up()
    }
}

/// An engine of the devices `numbers`.
fn engine(numbers: std::ops::Range<usize>, brake: &Brake) -> Engine {
    let loader = |number: usize| -> Loader {
        let brake = brake.clone();
        Box::new(move || Ok(Box::new(Held(Tone::new(), number, brake.clone()))))
    };
    Engine::start(numbers.map(loader).collect(), sched::Config::default()).expect("starts")
}

/// One gateway with all devices.
fn alone(folder: &Path, devices: usize, brake: &Brake) -> Vec<Batch> {
    let (database, audio_dir) = (folder.join("jobs.sqlite").into(), folder.join("audio"));
    vec![Batch::open(Config { database, audio_dir, ..Config::default() }, engine(0..devices, brake)).expect("opens")]
}

/// As many gateways, each with one device.
fn together(url: &str, folder: &Path, devices: usize, brake: &Brake) -> Vec<Batch> {
    let open = |n: usize| {
        let config = Config { lanes: 16, ..config(url, folder) };
        Batch::open(config, engine(n..n + 1, brake)).expect("opens")
    };
    (0..devices).map(open).collect()
}

/// A book of so many sentences.
fn book(sentences: usize) -> JobSpec {
    let text: String =
        (0..sentences).map(|n| format!("Sentence {n} of the book is neither short nor very long. ")).collect();
    JobSpec {
        items: vec![text.into()],
        voice: None,
        language: None,
        instructions: None,
        speed: 1.0,
        seed: 1,
        format: Format::Pcm,
        tenant: String::new(),
        priority: 0,
    }
}

/// Seconds of speech that one job becomes, and in how many seconds.
async fn spoken(gateways: &[Batch], sentences: usize) -> (f64, f64) {
    let begun = clock::now();
    let job = gateways[0].submit(book(sentences)).expect("accepted");
    let job = over(&gateways[0], &job.id).await;
    let took = begun.elapsed().as_secs_f64();
    let bytes: usize =
        gateways[0].audio(&job.id, None).expect("done").map(|bytes| bytes.expect("readable").len()).sum();
    (duration_of(bytes as u64 / 2).as_secs_f64(), took)
}

async fn at_once(gateways: Vec<Batch>, meeting: &Meeting) {
    let job = gateways[0].submit(book(80)).expect("accepted");
    found("all devices speak at the same time", || {
        (meeting.there.lock().expect("sound").len() == meeting.wanted).then_some(())
    })
    .await;
    over(&gateways[0], &job.id).await;
    gateways.into_iter().for_each(Batch::shutdown);
}

fn meeting(wanted: usize) -> Arc<Meeting> {
    Arc::new(Meeting { wanted, there: Mutex::default(), changed: Condvar::new() })
}

#[tokio::test]
async fn one_job_is_spoken_by_all_devices_of_a_gateway_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let meeting = meeting(4);
    at_once(alone(folder.path(), 4, &Brake::Others(meeting.clone())), &meeting).await;
}

#[tokio::test]
async fn one_job_is_spoken_by_the_devices_of_four_gateways_at_once() {
    let Some(server) = Postgres::start() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let meeting = meeting(4);
    at_once(together(&server.url(), folder.path(), 4, &Brake::Others(meeting.clone())), &meeting).await;
}

/// Processes that lease what the gateway before them took on, and speak it.
struct Workers(Vec<Child>);

impl Workers {
    fn start(url: &str, folder: &Path, count: usize) -> Self {
        let start = || {
            let mut child = Command::new(std::env::current_exe().expect("known"))
                .args(["--ignored", "--exact", "speed::process", "--nocapture"])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .expect("starts");
            writeln!(child.stdin.take().expect("piped"), "{url}\n{}", folder.display()).expect("told");
            let lines = BufReader::new(child.stdout.take().expect("piped")).lines().map_while(Result::ok);
            assert!(lines.into_iter().any(|line| line == "open"), "the worker did not start");
            child
        };
        Self((0..count).map(|_| start()).collect())
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Not a test: one of those processes. Its standard input says where the database and the folder are.
#[test]
#[ignore = "started by the tests below"]
fn process() {
    let mut told = std::io::stdin().lines().map_while(Result::ok);
    let (Some(url), Some(folder)) = (told.next(), told.next()) else { return };
    let _gateway = together(&url, Path::new(&folder), 1, &Brake::Speed);
    println!("\nopen");
    // Until it is killed.
    loop {
        std::thread::park();
    }
}

/// A gateway that takes jobs on and has nothing to speak them with.
fn silent(url: &str, folder: &Path) -> Vec<Batch> {
    let none: Loader = Box::new(|| Err(SynthError::Input("there is no voice".into())));
    let engine = Engine::start(vec![none], sched::Config::default()).expect("starts");
    vec![Batch::open(config(url, folder), engine).expect("opens")]
}

#[tokio::test]
async fn processes_speak_the_jobs_of_a_gateway_that_has_no_voice() {
    let Some(server) = Postgres::start() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let gateway = silent(&server.url(), folder.path());
    let _workers = Workers::start(&server.url(), folder.path(), 2);
    assert!(spoken(&gateway, 40).await.0 > 40.0, "a second and more of speech for each sentence");
    gateway.into_iter().for_each(Batch::shutdown);
}

#[tokio::test]
#[ignore = "measures time, which a busy machine has none of"]
async fn speed() {
    let server = Postgres::start();
    for (what, shared, apart) in [
        ("one gateway", false, false),
        ("a gateway each, PostgreSQL", true, false),
        ("a process each, PostgreSQL", true, true),
    ] {
        let mut first = None;
        for devices in [1, 2, 4] {
            let folder = tempfile::tempdir().expect("a folder");
            let mut workers = None;
            let gateways = match &server {
                Some(server) if apart => {
                    workers = Some(Workers::start(&server.url(), folder.path(), devices));
                    silent(&server.url(), folder.path())
                }
                Some(server) if shared => together(&server.url(), folder.path(), devices, &Brake::Speed),
                None if shared => return,
                _ => alone(folder.path(), devices, &Brake::Speed),
            };
            // All are loaded and know their speed.
            spoken(&gateways, 40 * devices).await;
            let (made, took) = spoken(&gateways, 400 * devices).await;
            let speed = made / took;
            let linear = speed / (*first.get_or_insert(speed) * devices as f64);
            println!(
                "{devices} devices, {what}: {made:.0} s of speech in {took:.1} s, {speed:.1} a second of {:.0}, {:.1} % of linear",
                SPEED * devices as f64,
                linear * 100.0
            );
            gateways.into_iter().for_each(Batch::shutdown);
            drop(workers);
            if let (Some(server), true) = (&server, shared) {
                // The next gateways have a folder of their own.
                let mut own = super::shared::link(&server.url());
                own.run(async |client| Ok(client.batch_execute("DROP SCHEMA antiphon CASCADE").await?))
                    .expect("dropped");
            }
            assert!(linear >= 0.95, "{linear} of linear with {devices} devices");
        }
    }
}
