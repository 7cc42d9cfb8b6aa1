mod objects;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::sched;
use crate::synth::device::{Loader, Recovery};
use crate::synth::tone::Tone;
use crate::synth::{Caps, Progress, Seeds, Slot, Stages, Step, SynthError, Synthesizer, VoiceInfo};
use crate::text::Lexicon;
use crate::turn::Utterance;

pub(super) fn engine() -> Engine {
    let loader: Loader = Box::new(|| Ok(Box::new(Tone::new())));
    Engine::start(vec![loader], sched::Config::default()).expect("starts")
}

pub(super) fn config(folder: &Path) -> Config {
    Config {
        database: folder.join("jobs.sqlite").into(),
        audio_dir: folder.join("audio"),
        lanes: 4,
        ..Config::default()
    }
}

pub(super) fn spec(items: &[&str], format: Format) -> JobSpec {
    JobSpec {
        items: items.iter().map(|text| (*text).into()).collect(),
        voice: None,
        language: None,
        instructions: None,
        speed: 1.0,
        seed: 7,
        format,
        tenant: String::new(),
        priority: 0,
    }
}

/// Looks until there is what `look` looks for.
async fn found<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let wait = async {
        loop {
            if let Some(found) = look() {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), wait).await.expect("in time")
}

/// Waits for a job to be over.
async fn over(batch: &Batch, id: &str) -> Job {
    let unfinished = |job: &Job| matches!(job.state, JobState::Queued | JobState::Running);
    found(|| batch.job(id).ok().filter(|job| !unfinished(job))).await
}

/// Waits until a job says why it stands still.
async fn reason(batch: &Batch, id: &str) -> String {
    found(|| batch.job(id).expect("known").reason).await
}

fn bytes(batch: &Batch, id: &str, item: Option<u32>) -> Vec<u8> {
    batch.audio(id, item).expect("finished").map(|chunk| chunk.expect("readable")).collect::<Vec<_>>().concat()
}

#[tokio::test]
async fn a_job_becomes_one_file_of_all_its_items() {
    let folder = tempfile::tempdir().expect("temp dir");
    let batch = Batch::open(config(folder.path()), engine()).expect("opens");
    let job = batch
        .submit(spec(&["This is the first sentence. And here is a second one.", "Another text."], Format::Pcm))
        .expect("accepted");
    assert_eq!((job.state, job.total, job.results.len()), (JobState::Queued, 3, 2));
    let job = over(&batch, &job.id).await;
    assert_eq!((job.state, job.finished), (JobState::Done, 3));
    // Also those that no job is in any more, or a metric would go on telling of it.
    let counts = batch.counts().expect("counted").map(|(state, jobs)| (state.name(), jobs));
    assert_eq!(counts, [("queued", 0), ("running", 0), ("done", 1), ("failed", 0), ("cancelled", 0)]);
    let all = bytes(&batch, &job.id, None);
    assert_eq!(all, [bytes(&batch, &job.id, Some(0)), bytes(&batch, &job.id, Some(1))].concat());
    let samples: u64 = job.results.iter().map(|r| r.duration_ms * 24).sum();
    assert!(all.len() as u64 >= 2 * samples && all.len() as u64 - 2 * samples < 96);
    assert!(matches!(batch.audio(&job.id, Some(2)), Err(BatchError::NotFound(_))));
    let json = serde_json::to_value(&job).expect("serialises");
    assert_eq!(json["state"], "done");
    assert_eq!(json["results"][1]["status"], "done");
    batch.shutdown();
}

#[tokio::test]
async fn a_reopened_batch_goes_on_where_it_stopped() {
    let folder = tempfile::tempdir().expect("temp dir");
    let text = "Here is one more sentence to be spoken. ".repeat(40);
    let batch = Batch::open(config(folder.path()), engine()).expect("opens");
    let job = batch.submit(spec(&[&text], Format::Flac)).expect("accepted");
    batch.shutdown();
    let batch = Batch::open(config(folder.path()), engine()).expect("opens again");
    let job = over(&batch, &job.id).await;
    assert_eq!((job.state, job.finished), (JobState::Done, job.total));
    let again = batch.submit(spec(&[&text], Format::Flac)).expect("accepted");
    over(&batch, &again.id).await;
    assert_eq!(bytes(&batch, &job.id, None), bytes(&batch, &again.id, None));
    assert_eq!(batch.list(PAGE, None).expect("lists").jobs.len(), 2);
    batch.shutdown();
}

#[tokio::test]
async fn jobs_are_listed_from_the_newest_on_a_page_at_a_time() {
    let folder = tempfile::tempdir().expect("temp dir");
    let batch = Batch::open(config(folder.path()), engine()).expect("opens");
    let ids: Vec<String> =
        (0..5).map(|_| batch.submit(spec(&["Hello there."], Format::Wav)).expect("accepted").id).collect();
    let (mut listed, mut pages) = (Vec::<String>::new(), Vec::new());
    loop {
        let page = batch.list(2, listed.last().map(String::as_str)).expect("lists");
        pages.push(page.jobs.len());
        listed.extend(page.jobs.into_iter().map(|job| job.id));
        if !page.has_more {
            break;
        }
    }
    listed.reverse();
    assert_eq!((listed, &pages[..]), (ids, &[2, 2, 1][..]));
    let all = batch.list(u32::MAX, None).expect("lists");
    assert_eq!((all.jobs.len(), all.has_more), (5, false));
    assert!(matches!(batch.list(2, Some("nothing")), Err(BatchError::NotFound(_))));
    batch.shutdown();
}

#[tokio::test]
async fn a_cancelled_job_leaves_nothing_behind() {
    let folder = tempfile::tempdir().expect("temp dir");
    let batch = Batch::open(config(folder.path()), engine()).expect("opens");
    let text = "Here is one more sentence to be spoken. ".repeat(500);
    let job = batch.submit(spec(&[&text], Format::Wav)).expect("accepted");
    let job = batch.cancel(&job.id).expect("known");
    assert_eq!((job.state, job.results[0].status), (JobState::Cancelled, JobState::Cancelled));
    assert!(matches!(batch.audio(&job.id, None), Err(BatchError::NotFound(_))));
    batch.shutdown();
    let batch = Batch::open(config(folder.path()), engine()).expect("opens again");
    assert!(!folder.path().join("audio").join(&job.id).exists());
    batch.shutdown();
}

#[tokio::test]
async fn what_cannot_be_spoken_fails_with_its_reason() {
    let folder = tempfile::tempdir().expect("temp dir");
    let batch = Batch::open(config(folder.path()), engine()).expect("opens");
    let job = batch
        .submit(JobSpec { voice: Some("nobody".into()), ..spec(&["Hello there."], Format::Wav) })
        .expect("accepted");
    let job = over(&batch, &job.id).await;
    assert_eq!(job.state, JobState::Failed);
    assert!(job.results[0].error.as_ref().is_some_and(|e| e.contains("nobody")), "{job:?}");
    for bad in [spec(&[], Format::Wav), spec(&["  "], Format::Wav), JobSpec { speed: 9.0, ..spec(&["x"], Format::Wav) }]
    {
        assert!(matches!(batch.submit(bad), Err(BatchError::Input(_))));
    }
    assert!(matches!(batch.job("nothing"), Err(BatchError::NotFound(_))));
    batch.shutdown();
}

#[tokio::test]
async fn a_folder_that_cannot_be_written_stops_work_and_says_why() {
    let folder = tempfile::tempdir().expect("temp dir");
    let batch = Batch::open(config(folder.path()), engine()).expect("opens");
    // A file where the job's folder should be fails every write, as a full disk does.
    let audio = folder.path().join("audio");
    std::fs::remove_dir(&audio).expect("empty");
    std::fs::write(&audio, b"in the way").expect("writes");
    let job = batch.submit(spec(&["Hello there."], Format::Wav)).expect("accepted");
    assert!(reason(&batch, &job.id).await.contains("audio"));
    batch.shutdown();
    std::fs::remove_file(&audio).expect("removes");
    let batch = Batch::open(config(folder.path()), engine()).expect("opens again");
    assert_eq!(over(&batch, &job.id).await.state, JobState::Done);
    batch.shutdown();
}

/// A tone that speaks only once it is released.
fn waiting_engine() -> (Engine, std::sync::mpsc::SyncSender<()>) {
    let (go, gone) = std::sync::mpsc::sync_channel::<()>(1);
    let loader: Loader = Box::new(move || {
        // A test that panicked lets go as well.
        let _ = gone.recv();
        Ok(Box::new(Tone::new()))
    });
    (Engine::start(vec![loader], sched::Config::default()).expect("starts"), go)
}

#[tokio::test]
async fn shutting_down_does_not_wait_for_a_voice_that_loads() {
    let folder = tempfile::tempdir().expect("temp dir");
    let (engine, go) = waiting_engine();
    let batch = Batch::open(config(folder.path()), engine.clone()).expect("opens");
    batch.submit(spec(&["Hello there."], Format::Wav)).expect("accepted");
    let joined = tokio::task::spawn_blocking(move || {
        batch.shutdown();
        engine.shutdown();
    });
    let joined = tokio::time::timeout(Duration::from_secs(30), joined).await;
    // Released before it is looked at: a runtime waits for its blocking tasks.
    drop(go);
    joined.expect("the voice still loads").expect("no panic");
}

/// What a job of these texts sounds like where nothing goes wrong.
async fn undisturbed(spec: &JobSpec) -> Vec<u8> {
    let folder = tempfile::tempdir().expect("temp dir");
    let batch = Batch::open(config(folder.path()), engine()).expect("opens");
    let job = batch.submit(spec.clone()).expect("accepted");
    over(&batch, &job.id).await;
    let audio = bytes(&batch, &job.id, None);
    batch.shutdown();
    audio
}

/// `/dev/full` answers every write as a full disk does, with the error of the kernel.
#[tokio::test]
async fn a_job_that_finds_the_disk_full_waits_and_goes_on() {
    let device = Path::new("/dev/full");
    if !device.exists() {
        antiphon_skip::skip("/dev/full", "this system has none");
        return;
    }
    let folder = tempfile::tempdir().expect("temp dir");
    let (engine, go) = waiting_engine();
    let batch = Batch::open(config(folder.path()), engine).expect("opens");
    let spec = spec(&["Hello there. This is one more sentence.", "And here is another text."], Format::Wav);
    let job = batch.submit(spec.clone()).expect("accepted");
    let audio = folder.path().join("audio").join(&job.id);
    std::fs::create_dir_all(&audio).expect("makes");
    std::os::unix::fs::symlink(device, audio.join("1-0.partial")).expect("links");
    go.send(()).expect("waits");
    // What did not fit is removed at once, and with it the link: there is room again.
    assert!(reason(&batch, &job.id).await.contains("No space left"));
    assert_eq!(over(&batch, &job.id).await.state, JobState::Done);
    assert_eq!(batch.job(&job.id).expect("known").reason, None);
    assert_eq!(bytes(&batch, &job.id, None), undisturbed(&spec).await);
    batch.shutdown();
}

#[tokio::test]
async fn a_full_database_refuses_new_jobs_and_makes_nothing_twice() {
    let folder = tempfile::tempdir().expect("temp dir");
    let (engine, go) = waiting_engine();
    let batch = Batch::open(config(folder.path()), engine).expect("opens");
    let long = "Here is one more sentence to be spoken. ".repeat(200);
    let spec = spec(&[&long], Format::Pcm);
    let job = batch.submit(spec.clone()).expect("accepted");
    // Accepted work needs room for its results, too: the tables are rewritten as rows grow.
    batch.store().limit_growth(0);
    let refused = batch.submit(spec.clone()).expect_err("refused");
    assert!(refused.to_string().contains("full"), "{refused}");
    assert_eq!(batch.list(PAGE, None).expect("lists").jobs.len(), 1, "a refused job leaves nothing");
    go.send(()).expect("waits");
    // The accepted job may need a page or not; with room for it, it ends whichever way it went.
    tokio::time::sleep(Duration::from_millis(200)).await;
    batch.store().limit_growth(10_000);
    assert_eq!(over(&batch, &job.id).await.state, JobState::Done);
    assert_eq!(bytes(&batch, &job.id, None), undisturbed(&spec).await);
    batch.submit(spec).expect("accepted again");
    batch.shutdown();
}

/// A file system of a megabyte, unmounted when dropped; `None` where this process may not mount.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount() -> Option<Self> {
        let folder = tempfile::tempdir().expect("temp dir");
        let mount = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"])
            .arg(folder.path())
            .output();
        mount.is_ok_and(|output| output.status.success()).then(|| Self(folder))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(self.0.path()).output();
    }
}

#[tokio::test]
async fn a_disk_that_is_really_full_stops_jobs_until_there_is_room() {
    let Some(disk) = SmallDisk::mount() else {
        antiphon_skip::skip("mount", "only root may mount a small disk");
        return;
    };
    let folder = disk.0.path();
    let (engine, go) = waiting_engine();
    let batch = Batch::open(config(folder), engine).expect("opens");
    let spec = spec(&["Hello there. This is one more sentence.", "And here is another text."], Format::Flac);
    let job = batch.submit(spec.clone()).expect("accepted");
    let ballast = folder.join("ballast");
    let mut full = std::fs::File::create(&ballast).expect("creates");
    while std::io::Write::write_all(&mut full, &[0; 512]).is_ok() {}
    let refused =
        batch.submit(JobSpec { items: vec!["word ".repeat(20_000).into()], ..spec.clone() }).expect_err("refused");
    assert!(matches!(refused, BatchError::Database(_)), "{refused}");
    go.send(()).expect("waits");
    let reason = reason(&batch, &job.id).await;
    assert!(reason.contains("No space left") || reason.contains("full"), "{reason}");
    assert_eq!(batch.list(PAGE, None).expect("still answers").jobs.len(), 1);
    drop(full);
    std::fs::remove_file(&ballast).expect("removes");
    assert_eq!(over(&batch, &job.id).await.state, JobState::Done);
    assert_eq!(bytes(&batch, &job.id, None), undisturbed(&spec).await);
    batch.shutdown();
}

/// The tone on a device that is lost at a word, or at anything.
struct Frail {
    tone: Tone,
    deadly: std::collections::HashSet<Slot>,
    broken: Arc<AtomicBool>,
}

impl Synthesizer for Frail {
    fn caps(&self) -> &Caps {
        self.tone.caps()
    }

    fn voices(&self) -> Vec<VoiceInfo> {
        self.tone.voices()
    }

    fn open(&mut self, slot: Slot, utterance: &Utterance) -> Result<Stages, SynthError> {
        if utterance.text.contains("deadly") {
            self.deadly.insert(slot);
        }
        self.tone.open(slot, utterance)
    }

    fn run(&mut self, step: &Step, out: &mut Vec<Progress>) -> Result<(), SynthError> {
        if self.broken.load(Ordering::Relaxed) || step.slots.iter().any(|slot| self.deadly.contains(slot)) {
            return Err(SynthError::Device("the cable was pulled".into()));
        }
        self.tone.run(step, out)
    }

    fn close(&mut self, slot: Slot) {
        self.deadly.remove(&slot);
        self.tone.close(slot);
    }

    fn warm_up(&mut self) -> Result<Seeds, SynthError> {
        self.tone.warm_up()
    }
}

fn frail_engine(broken: &Arc<AtomicBool>) -> Engine {
    let broken = broken.clone();
    let loader: Loader =
        Box::new(move || Ok(Box::new(Frail { tone: Tone::new(), deadly: Default::default(), broken: broken.clone() })));
    let soon = Recovery { first: Duration::from_millis(1), most: Duration::from_millis(4), ..Recovery::default() };
    Engine::start_with(vec![loader], sched::Config::default(), soon).expect("starts")
}

#[tokio::test]
async fn a_sentence_that_makes_the_device_fail_is_left_out_and_its_job_goes_on() {
    let folder = tempfile::tempdir().expect("temp dir");
    let engine = frail_engine(&Arc::default());
    let batch = Batch::open(config(folder.path()), engine.clone()).expect("opens");
    let texts = ["Hello there.", "This is a deadly sentence.", "And here is another text.", "One more.", "The last."];
    let job = batch.submit(spec(&texts, Format::Wav)).expect("accepted");
    let job = over(&batch, &job.id).await;
    let states: Vec<JobState> = job.results.iter().map(|item| item.status).collect();
    let done = JobState::Done;
    assert_eq!((job.state, &states[..]), (done, &[done, JobState::Failed, done, done, done][..]));
    let error = job.results[1].error.as_deref().expect("it says why");
    assert!(error.contains("alone") && error.contains("the cable was pulled"), "{error}");
    // Among others, and then alone.
    assert_eq!(engine.status()[0].failures, 1 + blame::LOSSES);
    batch.shutdown();
}

#[tokio::test]
async fn a_device_that_fails_at_everything_costs_no_sentence() {
    let folder = tempfile::tempdir().expect("temp dir");
    let broken = Arc::new(AtomicBool::new(true));
    let engine = frail_engine(&broken);
    let batch = Batch::open(config(folder.path()), engine.clone()).expect("opens");
    let spec = spec(&["Hello there. This is one more sentence.", "And here is another text."], Format::Wav);
    let job = batch.submit(spec.clone()).expect("accepted");
    found(|| (engine.status()[0].failures > 2 + blame::LOSSES).then_some(())).await;
    let waiting = batch.job(&job.id).expect("known");
    assert_eq!((waiting.state, waiting.finished), (JobState::Queued, 0));
    assert!(waiting.reason.is_some_and(|reason| reason.contains("the cable was pulled")));
    broken.store(false, Ordering::Relaxed);
    let job = over(&batch, &job.id).await;
    assert!(job.state == JobState::Done && job.results.iter().all(|item| item.error.is_none()), "{job:?}");
    assert_eq!(bytes(&batch, &job.id, None), undisturbed(&spec).await);
    batch.shutdown();
}

#[tokio::test]
async fn finished_jobs_are_forgotten_when_there_is_too_much_audio() {
    let folder = tempfile::tempdir().expect("temp dir");
    let batch = Batch::open(config(folder.path()), engine()).expect("opens");
    let job = batch.submit(spec(&["Hello there."], Format::Wav)).expect("accepted");
    over(&batch, &job.id).await;
    batch.shutdown();
    let batch = Batch::open(Config { max_audio_mib: 0, ..config(folder.path()) }, engine()).expect("opens again");
    found(|| batch.job(&job.id).err()).await;
    assert!(!folder.path().join("audio").join(&job.id).exists());
    batch.shutdown();
}

#[tokio::test]
async fn words_of_the_lexicon_are_said_as_it_says_and_not_cut() {
    let folder = tempfile::tempdir().expect("temp dir");
    let config = config(folder.path());
    let batch = Batch::open(config.clone(), engine()).expect("opens");
    let entries = toml::from_str("Siobhan = 'shivawn'\n'Yahoo! Search' = 'the search'").expect("entries");
    config.lexicon.set(Lexicon::new(&entries, &crate::text::Entries::new()).expect("a lexicon"));
    let texts = ["Siobhan found it with Yahoo! Search today.", "shivawn found it with the search today."];
    let job = batch.submit(JobSpec { language: Some("en".into()), ..spec(&texts, Format::Pcm) }).expect("taken");
    assert_eq!(job.total, 2, "an entry is not cut");
    assert_eq!(over(&batch, &job.id).await.state, JobState::Done);
    let [entry, spelled] = [0, 1].map(|item| bytes(&batch, &job.id, Some(item)));
    assert!(!entry.is_empty() && entry == spelled);
    batch.shutdown();
}

#[tokio::test]
async fn markup_is_markup_where_a_text_says_so() {
    let folder = tempfile::tempdir().expect("temp dir");
    let batch = Batch::open(config(folder.path()), engine()).expect("opens");
    let english = |texts: &[&str]| JobSpec { language: Some("en".into()), ..spec(texts, Format::Pcm) };
    let mut marked = english(&["<speak>Hello there. <break time='700ms'/>Goodbye now.</speak>"]);
    marked.items[0].markup = Markup::Ssml;
    let marked = batch.submit(marked).expect("taken");
    let plain = batch.submit(english(&["Hello there.", "Goodbye now."])).expect("taken");
    assert_eq!((marked.total, plain.total), (3, 2));
    for job in [&marked, &plain] {
        assert_eq!(over(&batch, &job.id).await.state, JobState::Done);
    }
    let silence = 2 * 24 * 700;
    let [marked, plain] = [&marked, &plain].map(|job| bytes(&batch, &job.id, None));
    assert_eq!(marked.len(), plain.len() + silence);
    let begins = marked.iter().zip(&plain).take_while(|(a, b)| a == b).count();
    assert_eq!(marked[begins + silence..], plain[begins..], "the words are the same");
    let mut wrong = spec(&["One.", "<speak>Two <brake/>.</speak>"], Format::Pcm);
    wrong.items[1].markup = Markup::Ssml;
    let refused = batch.submit(wrong).expect_err("a mistake").to_string();
    assert!(refused.contains("text 1") && refused.contains("brake"), "{refused}");
    batch.shutdown();
}
