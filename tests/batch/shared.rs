//! Jobs of several gateways on one PostgreSQL, a real one that each test starts: each sentence is made once, whoever is
//! killed, gateways or the database.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use antiphon::audio_file::Format;
use antiphon::batch::{Batch, BatchError, Changes, Config, Job, JobSpec, JobState};
use antiphon::postgres::{Address, Database, Error, Link, Setup};
use antiphon::sched;
use antiphon::secret::Secret;
use antiphon::synth::device::{Engine, Loader};
use antiphon::synth::tone::Tone;
use antiphon::synth::{Caps, Progress, Seeds, Slot, Stages, Step, SynthError, Synthesizer, VoiceInfo};
use antiphon::turn::Utterance;
use antiphon_skip::postgres::Postgres;

use super::found;

const SENTENCES: usize = 40;

/// A gate before the device: nothing is spoken while it is closed.
#[derive(Clone, Default)]
pub(super) struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    pub(super) fn set(&self, closed: bool) {
        *self.0.0.lock().expect("sound") = closed;
        self.0.1.notify_all();
    }

    fn pass(&self) {
        let closed = self.0.0.lock().expect("sound");
        drop(self.0.1.wait_while(closed, |closed| *closed).expect("sound"));
    }
}

/// The tone behind a gate.
struct Gated(Tone, Gate);

impl Synthesizer for Gated {
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
        self.1.pass();
        self.0.run(step, out)
    }

    fn close(&mut self, slot: Slot) {
        self.0.close(slot);
    }

    fn warm_up(&mut self) -> Result<Seeds, SynthError> {
        self.0.warm_up()
    }
}

fn engine(gate: &Gate) -> Engine {
    let gate = gate.clone();
    let loader: Loader = Box::new(move || Ok(Box::new(Gated(Tone::new(), gate.clone()))));
    Engine::start(vec![loader], sched::Config::default()).expect("starts")
}

/// A gateway's batch work on the database at `url`.
pub(super) fn gateway(url: &str, audio: &Path, lease_s: u32, gate: &Gate) -> Batch {
    Batch::open(Config { lease_s, ..config(url, audio) }, engine(gate)).expect("opens")
}

/// Of a gateway on the database at `url`.
pub(super) fn config(url: &str, audio: &Path) -> Config {
    let address = Address::new(Secret::new(url)).expect("an address");
    Config { database: Database::Postgres(address), audio_dir: audio.to_owned(), lanes: 4, ..Config::default() }
}

/// The undisturbed audio of [`spec`], by a gateway that is alone.
pub(super) async fn undisturbed(job: usize) -> Vec<u8> {
    let folder = tempfile::tempdir().expect("a folder");
    let database = folder.path().join("jobs.sqlite").into();
    let config = Config { database, audio_dir: folder.path().join("audio"), ..Config::default() };
    let batch = Batch::open(config, engine(&Gate::default())).expect("opens");
    let id = batch.submit(spec(job)).expect("accepted").id;
    let bytes = audio(&batch, &over(&batch, &id).await);
    batch.shutdown();
    bytes
}

pub(super) fn spec(job: usize) -> JobSpec {
    let text = |item: usize| -> String {
        (0..SENTENCES / 2).map(|n| format!("Sentence {n} of text {item} of book {job} is spoken here. ")).collect()
    };
    JobSpec {
        items: vec![text(0).into(), text(1).into()],
        voice: None,
        language: None,
        instructions: None,
        speed: 4.0,
        seed: job as u64,
        format: Format::Pcm,
        tenant: format!("tenant {}", job % 2),
        priority: 0,
    }
}

/// Waits for a job to be over, whatever the database does meanwhile.
pub(super) async fn over(batch: &Batch, id: &str) -> Job {
    let unfinished = |job: &Job| matches!(job.state, JobState::Queued | JobState::Running);
    found("the job is over", || batch.job(id).ok().filter(|job| !unfinished(job))).await
}

pub(super) fn audio(batch: &Batch, job: &Job) -> Vec<u8> {
    assert_eq!((job.state, job.finished), (JobState::Done, job.total), "{job:?}");
    batch.audio(&job.id, None).expect("finished").map(|bytes| bytes.expect("readable")).collect::<Vec<_>>().concat()
}

/// The files of finished sentences below `folder`.
pub(super) fn files(folder: &Path) -> Vec<PathBuf> {
    let jobs = fs::read_dir(folder).expect("readable").flatten().map(|job| job.path()).filter(|path| path.is_dir());
    let files = jobs.flat_map(|job| fs::read_dir(job).expect("readable").flatten().map(|file| file.path()));
    files.filter(|path| path.extension().is_some_and(|ending| ending == "pcm")).collect()
}

/// A connection of the test's own.
pub(super) fn link(url: &str) -> Link {
    let address = Address::new(Secret::new(url)).expect("an address");
    let setup = Setup { part: "test", steps: &[], shown: false, listen: None, woken: Arc::default(), feed: None };
    Link::new(&address, setup).expect("a link")
}

/// The one number that `query` asks for.
pub(super) fn number(link: &mut Link, query: &str) -> i64 {
    link.run(async |client| Ok(client.query_one(query, &[]).await?.get(0))).expect("answered")
}

/// Seen where a gateway had no device for a sentence that it had taken: it kept it, and no other could speak it. And who
/// follows the job there is told of what another speaks.
#[tokio::test]
async fn what_one_gateway_has_no_device_for_another_speaks_and_both_tell_of_it() {
    let Some(server) = Postgres::start() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let broken: Loader = Box::new(|| Err(SynthError::Input("there is no voice".into())));
    let without = Engine::start(vec![broken], sched::Config::default()).expect("starts");
    let changes = Changes::default();
    let mut told = changes.reader();
    let mut next = async || tokio::time::timeout(super::LIMIT, told.next()).await.expect("told in time");
    let b = Batch::open_telling(config(&server.url(), folder.path()), without, changes).expect("opens");
    let job = b.submit(spec(0)).expect("accepted");
    // Of its own, and by the database.
    while next().await.as_deref() != Some(&*job.id) {}
    let a = gateway(&server.url(), folder.path(), 30, &Gate::default());
    assert_eq!(over(&a, &job.id).await.state, JobState::Done, "none of it is kept where nobody speaks");
    let other = a.submit(spec(1)).expect("accepted");
    // What is told of it can only have come by the database: the gateway without a voice does nothing to it.
    while next().await.as_deref() != Some(&*other.id) {}
    while b.job(&other.id).expect("known").state != JobState::Done {
        next().await;
    }
    a.shutdown();
    b.shutdown();
}

/// One that is killed between the file of a sentence and its row leaves the file.
#[tokio::test]
async fn what_a_killed_gateway_wrote_and_did_not_record_goes_when_another_has_spoken_it() {
    let Some(server) = Postgres::start() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let gate = Gate::default();
    gate.set(true);
    let a = gateway(&server.url(), folder.path(), 30, &gate);
    let job = a.submit(spec(0)).expect("accepted");
    let mut own = link(&server.url());
    let held = "SELECT COUNT(*) FROM antiphon.batch_part WHERE holder IS NOT NULL";
    found("the gateway is busy", || Some(number(&mut own, held)).filter(|count| *count == 4)).await;
    // The last sentence of the second text was leased three times, and two that held it left their files.
    let lost = "UPDATE antiphon.batch_part SET fence = 3 WHERE item = 1 AND part =
        (SELECT MAX(part) FROM antiphon.batch_part WHERE item = 1) RETURNING part";
    let part = own.run(async |client| Ok(client.query_one(lost, &[]).await?.get::<_, i32>(0))).expect("answered");
    let of_job = folder.path().join(&job.id);
    fs::create_dir_all(&of_job).expect("creates");
    for fence in [1, 3] {
        fs::write(of_job.join(format!("1-{part}.{fence}.pcm")), b"what was said").expect("writes");
    }
    gate.set(false);
    let done = over(&a, &job.id).await;
    assert_eq!(audio(&a, &done), undisturbed(0).await);
    found("one file of each sentence", || (files(folder.path()).len() == done.total as usize).then_some(())).await;
    a.shutdown();
}

#[tokio::test]
async fn a_job_that_one_gateway_takes_on_wakes_another_and_is_seen_by_both() {
    let Some(server) = Postgres::start() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let (shut, open) = (Gate::default(), Gate::default());
    shut.set(true);
    // With leases this long an idle gateway looks by itself every ten minutes only.
    let (a, b) =
        (gateway(&server.url(), folder.path(), 1_800, &shut), gateway(&server.url(), folder.path(), 1_800, &open));
    // Both are connected, and have found nothing to do.
    let mut own = link(&server.url());
    found("two gateways", || {
        let there = own.run(async |client| {
            let query = "SELECT COUNT(*) FROM antiphon.batch_holder";
            Ok(client.query_one(query, &[]).await?.get::<_, i64>(0))
        });
        there.ok().filter(|count| *count == 2)
    })
    .await;
    let job = a.submit(spec(0)).expect("accepted");
    // One has the first sentences and cannot speak; the other is given the rest, and those when the first one ends.
    found("the other works", || b.job(&job.id).ok().filter(|job| job.finished > 0)).await;
    let (there, here) = (a.list(10, None).expect("lists"), b.list(10, None).expect("lists"));
    assert_eq!((there.jobs.len(), here.jobs.len()), (1, 1));
    a.shutdown();
    shut.set(false);
    let job = over(&b, &job.id).await;
    assert_eq!(audio(&b, &job), undisturbed(0).await);
    assert_eq!(files(folder.path()).len(), job.total as usize, "each once");
    let counts = b.counts().expect("counted").map(|(state, jobs)| (state.name(), jobs));
    assert_eq!(counts, [("queued", 0), ("running", 0), ("done", 1), ("failed", 0), ("cancelled", 0)]);
    b.shutdown();
}

#[tokio::test]
async fn a_job_cancelled_at_one_gateway_ends_at_the_other() {
    let Some(server) = Postgres::start() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let gate = Gate::default();
    gate.set(true);
    let b = gateway(&server.url(), folder.path(), 1_800, &gate);
    let job = b.submit(spec(0)).expect("accepted");
    let mut own = link(&server.url());
    let held = "SELECT COUNT(*) FROM antiphon.batch_part WHERE holder IS NOT NULL";
    found("it is spoken", || Some(number(&mut own, held)).filter(|count| *count == 4)).await;
    let shut = Gate::default();
    shut.set(true);
    let a = gateway(&server.url(), folder.path(), 1_800, &shut);
    assert_eq!(a.cancel(&job.id).expect("known").state, JobState::Cancelled);
    assert!(matches!(a.cancel("nothing"), Err(BatchError::NotFound(_))));
    a.shutdown();
    // What was in its engine makes room for the next job, and leaves nothing behind.
    let next = b.submit(JobSpec { priority: 3, ..spec(1) }).expect("accepted");
    gate.set(false);
    let next = over(&b, &next.id).await;
    assert_eq!(audio(&b, &next), undisturbed(1).await);
    assert_eq!(b.job(&job.id).expect("known").state, JobState::Cancelled);
    assert!(matches!(b.audio(&job.id, None), Err(BatchError::NotFound(_))));
    found("only its files", || (files(folder.path()).len() == next.total as usize).then_some(())).await;
    assert_eq!(number(&mut own, held), 0);
    b.shutdown();
}

/// Not a test: the gateway that is killed. Its standard input says where the database and the folder are.
#[test]
#[ignore = "started by the tests below"]
fn worker() {
    let mut told = std::io::stdin().lines().map_while(Result::ok);
    let (Some(url), Some(folder)) = (told.next(), told.next()) else { return };
    let gate = Gate::default();
    gate.set(told.next().is_some_and(|word| word == "closed"));
    let _batch = gateway(&url, Path::new(&folder), 3, &gate);
    println!("\nopen");
    // Until it is killed.
    loop {
        std::thread::park();
    }
}

fn start(url: &str, folder: &Path, word: &str) -> Child {
    let mut child = Command::new(std::env::current_exe().expect("known"))
        .args(["--ignored", "--exact", "shared::worker", "--nocapture"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("starts");
    writeln!(child.stdin.take().expect("piped"), "{url}\n{}\n{word}", folder.display()).expect("told");
    child
}

#[tokio::test]
async fn what_a_killed_gateway_was_speaking_is_spoken_by_another_once() {
    let Some(server) = Postgres::start() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let mut child = start(&server.url(), folder.path(), "closed");
    let opened =
        BufReader::new(child.stdout.take().expect("piped")).lines().map_while(Result::ok).any(|line| line == "open");
    assert!(opened, "the worker did not start");
    let shut = Gate::default();
    shut.set(true);
    let a = gateway(&server.url(), folder.path(), 3, &shut);
    let job = a.submit(spec(0)).expect("accepted");
    let mut own = link(&server.url());
    let held = "SELECT COUNT(*) FROM antiphon.batch_part WHERE holder IS NOT NULL";
    found("both are at it", || Some(number(&mut own, held)).filter(|count| *count == 8)).await;
    child.kill().expect("killed");
    child.wait().expect("reaped");
    shut.set(false);
    let job = over(&a, &job.id).await;
    assert_eq!(audio(&a, &job), undisturbed(0).await);
    assert_eq!(files(folder.path()).len(), job.total as usize, "each once");
    let twice = "SELECT COUNT(*) FROM antiphon.batch_part WHERE fence > 1";
    assert!(number(&mut own, twice) >= 4, "those of the killed one were leased again");
    a.shutdown();
}

#[tokio::test]
async fn a_gateway_that_was_taken_for_dead_changes_nothing() {
    let Some(server) = Postgres::start() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let (slow, open) = (Gate::default(), Gate::default());
    slow.set(true);
    let a = gateway(&server.url(), folder.path(), 1_800, &slow);
    let job = a.submit(spec(0)).expect("accepted");
    let mut own = link(&server.url());
    let held = "SELECT COUNT(*) FROM antiphon.batch_part WHERE holder IS NOT NULL";
    found("it is spoken", || Some(number(&mut own, held)).filter(|count| *count == 4)).await;
    // As where it slept for longer than its leases last, and nobody told it.
    own.run(async |client| {
        client.execute("UPDATE antiphon.batch_part SET until = clock_timestamp() - interval '1 s'", &[]).await?;
        Ok(())
    })
    .expect("done");
    let b = gateway(&server.url(), folder.path(), 1_800, &open);
    let done = over(&b, &job.id).await;
    let before = files(folder.path());
    slow.set(false);
    // The late ones are made, refused, and removed.
    let own_job = a.submit(spec(1)).expect("accepted");
    over(&a, &own_job.id).await;
    found("the late ones are gone", || {
        let mut late = files(folder.path());
        late.retain(|path| path.to_string_lossy().contains(&done.id) && !before.contains(path));
        late.is_empty().then_some(())
    })
    .await;
    assert_eq!(audio(&b, &done), undisturbed(0).await);
    assert!(before.iter().all(|path| path.exists()));
    a.shutdown();
    b.shutdown();
}

async fn survive_the_database(kills: u64) {
    let Some(mut server) = Postgres::start() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let open = Gate::default();
    let gateways = [gateway(&server.url(), folder.path(), 30, &open), gateway(&server.url(), folder.path(), 30, &open)];
    let (mut taken, mut refused, mut seed) = (Vec::new(), 0, 0x2545_f491_4f6c_dd1du64);
    for round in 0..kills as usize {
        if round % 2 == 0 {
            found("it is found again", || gateways[0].fault().is_none().then_some(())).await;
        }
        match gateways[round % 2].submit(spec(round % 3)) {
            Ok(job) => taken.push((round % 3, job.id)),
            Err(BatchError::Postgres(Error::Gone(_)) | BatchError::Uncertain(_)) => refused += 1,
            Err(other) => panic!("{other}"),
        }
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        tokio::time::sleep(Duration::from_micros(seed % 60_000)).await;
        server.kill();
        let lost = &gateways[round % 2];
        found("it is told", || lost.fault()).await;
        assert!(matches!(lost.submit(spec(0)), Err(BatchError::Postgres(Error::Gone(_)))), "there is nobody");
        server.run();
    }
    found("it is found again", || gateways.iter().all(|gateway| gateway.fault().is_none()).then_some(())).await;
    let references = [undisturbed(0).await, undisturbed(1).await, undisturbed(2).await];
    let mut sentences = 0;
    for (n, (book, id)) in taken.iter().enumerate() {
        let job = over(&gateways[n % 2], id).await;
        assert!(audio(&gateways[n % 2], &job) == references[*book], "audio of {id} differs from the undisturbed run");
        sentences += job.total as usize;
    }
    let [a, b] = gateways;
    a.shutdown();
    b.shutdown();
    let of_taken = |path: &PathBuf| taken.iter().any(|(_, id)| path.to_string_lossy().contains(id.as_str()));
    let made = files(folder.path()).into_iter().filter(of_taken).count();
    assert_eq!(made, sentences, "each sentence once");
    println!("{} jobs taken, {refused} refused, {sentences} sentences, {kills} kills", taken.len());
    assert!(!taken.is_empty());
}

#[tokio::test]
async fn jobs_survive_six_kills_of_the_database() {
    survive_the_database(6).await;
}

#[tokio::test]
#[ignore = "takes minutes; the short form runs always"]
async fn jobs_survive_two_hundred_kills_of_the_database() {
    survive_the_database(200).await;
}

#[tokio::test]
async fn a_folder_that_others_do_not_see_is_refused() {
    let Some(server) = Postgres::start() else { return };
    let (shared, other) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let open = Gate::default();
    let a = gateway(&server.url(), shared.path(), 30, &open);
    let job = a.submit(spec(0)).expect("accepted");
    let b = gateway(&server.url(), other.path(), 30, &open);
    let error = b.job(&job.id).expect_err("refused").to_string();
    assert!(error.contains("audio_dir") && error.contains("mount"), "{error}");
    assert!(found("it is told", || b.fault()).await.contains("audio_dir"));
    assert_eq!(over(&a, &job.id).await.state, JobState::Done);
    a.shutdown();
    b.shutdown();
}

#[tokio::test]
async fn a_certificate_is_verified_and_a_password_proved() {
    let data = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/cluster").join(name);
    let Some(server) = Postgres::start_secured(&data("node.pem"), &data("node-key.pem"), "sesame") else { return };
    let ask = |url: &str| {
        let address = Address::new(Secret::new(url)).expect("an address");
        let setup = Setup { part: "test", steps: &[], shown: false, listen: None, woken: Arc::default(), feed: None };
        Link::new(&address, setup)?.run(async |client| {
            let query = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
            Ok(client.query_one(query, &[]).await?.get::<_, bool>(0))
        })
    };
    let (url, ca) = (server.secured_url("sesame"), data("ca.pem"));
    let verified = format!("{url}?sslmode=verify-full&sslrootcert={}", ca.display());
    assert!(ask(&verified).expect("secured"));
    for wrong in [
        // An authority that did not vouch for it, those of the system, no TLS, and another password.
        format!("{url}?sslmode=require&sslrootcert={}", data("stranger.pem").display()),
        format!("{url}?sslmode=verify-full"),
        format!("{url}?sslmode=disable"),
        verified.replace("sesame", "guess"),
    ] {
        let error = ask(&wrong).expect_err("refused").to_string();
        assert!(!error.contains("sesame") && !error.contains("guess"), "{error}");
    }
}
