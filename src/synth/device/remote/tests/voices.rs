//! Voices that only the gateway has, spoken by workers. The networks are small and random; the way is the product's.

use std::path::{Path, PathBuf};

use super::*;
use crate::synth::cosyvoice::backend::Options;
use crate::synth::cosyvoice::config::Config as Model;
use crate::synth::cosyvoice::{CosyVoice, Settings, random};
use crate::telemetry::shown::counted;
use crate::voice::copies::{Copies, FOLDER, Library};
use crate::voice::store::{Store, VoiceName};

/// How much this machine computes is not judged here.
pub(super) fn patient() -> Config {
    Config { first_audio_target_ms: 60_000, load_limit: 1.0, ..Config::default() }
}

/// CosyVoice3 with the voices of these folders; what it says is short.
fn neural(model: &Path, folders: Vec<PathBuf>) -> Vec<Loader> {
    let model = model.to_owned();
    vec![Box::new(move || {
        let settings = Settings { voice_dirs: folders.clone(), ..Settings::default() };
        let mut voice = CosyVoice::load_cpu(&model, Options::default(), settings)?;
        voice.force_length(Some(12));
        Ok(Box::new(voice))
    })]
}

async fn said(engine: &Engine, voice: Option<&str>, text: &str) -> (Vec<f32>, UtteranceEnd) {
    let (sink, mut events) = mpsc::channel(8);
    let stream = StreamId::next();
    engine.note(stream, StreamNote::Unpaced);
    // Batch work waits where there is no room.
    let voice = voice.map(str::to_owned);
    let utterance = Utterance { voice, class: Class::Batch, ..utterance(stream, text) };
    engine.submit(utterance, sink).expect("accepted");
    rest(&mut events).await
}

#[tokio::test]
async fn a_voice_that_only_the_gateway_has_is_sent_once_and_sounds_as_in_process() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let (model, own, theirs) = (path("model"), path("own"), path("theirs"));
    random::write(&model, random::Size::Tiny, 1, |_, _| ()).expect("written");
    let sizes = Model::load(&model).expect("readable");
    let (store, anna) = (Store::open(&own), VoiceName::new("anna").expect("a name"));
    let first = random::voice(&sizes, "anna", 30, 1);
    store.add(&anna, &first, false).expect("written");

    let there = Engine::start(neural(&model, vec![theirs.clone(), theirs.join(FOLDER)]), patient()).expect("starts");
    let here = Engine::start(neural(&model, vec![own.clone()]), patient()).expect("starts");
    there.ready().await;
    here.ready().await;
    let service = Service::new(there.clone()).with_copies(Copies::open(&theirs));
    let running = Running::serving(service).await;
    let workers = vec![running.worker(TOKEN)];
    let engine = Engine::start_with_workers(workers, Vec::new(), patient(), Recovery::default()).expect("starts");
    ready(&engine, 1).await;
    let text = "Hello, it is me.";
    let (_, unknown) = said(&engine, Some("anna"), text).await;
    assert!(matches!(unknown, UtteranceEnd::Failed(_)), "nobody has that voice: {unknown:?}");
    engine.lend_voices(Library::new(store.clone(), Copies::open(&own)));

    let sent = || counted("antiphon_voices_copied_total");
    let before = sent();
    // Two at once, of which one waits for the voice that the other brings, and one that needs none.
    let ((one, one_end), (two, two_end), (other, other_end)) =
        tokio::join!(said(&engine, Some("anna"), text), said(&engine, Some("anna"), text), said(&engine, None, text));
    for end in [one_end, two_end, other_end] {
        assert_eq!(end, UtteranceEnd::Done);
    }
    let (wanted, _) = said(&here, Some("anna"), text).await;
    assert!(one == wanted && two == wanted, "to the bit: {} and {} samples of {}", one.len(), two.len(), wanted.len());
    let (default, _) = said(&there, None, text).await;
    assert!(other == default && other != wanted, "a copy is nobody's default voice");
    let copies = || std::fs::read_dir(theirs.join(FOLDER)).map_or(0, |files| files.count());
    assert_eq!(copies(), 1);
    assert!(sent() > before);
    assert!(there.voices_and_copies().iter().any(|voice| voice.name == first.content_id()));
    assert!(!there.voices().iter().chain(&engine.voices()).any(|voice| voice.name == first.content_id()));

    // Enrolled anew under the same name it is another voice; the first one is still there.
    let second = random::voice(&sizes, "anna", 40, 2);
    store.add(&anna, &second, true).expect("written");
    here.refresh_voices().await;
    let (heard, end) = said(&engine, Some("anna"), text).await;
    let (wanted_now, _) = said(&here, Some("anna"), text).await;
    assert!(end == UtteranceEnd::Done && heard == wanted_now && heard != wanted);
    assert_eq!(copies(), 2);

    // A copy that was forgotten is sent again.
    Store::open(&theirs.join(FOLDER)).remove(&VoiceName::new(&second.content_id()).expect("a name")).expect("there");
    there.refresh_voices().await;
    let told = async {
        loop {
            let (heard, end) = said(&engine, Some("anna"), text).await;
            // Between two words of the worker about its voices one may be missed.
            if end == UtteranceEnd::Done {
                return heard;
            }
        }
    };
    assert!(timeout(PATIENCE, told).await.expect("in time") == wanted_now);
    assert_eq!(copies(), 2);
    running.stop().await;
}

#[tokio::test]
async fn a_voice_is_sent_when_a_text_for_it_is_begun_and_streams_then() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let (model, own, theirs) = (path("model"), path("own"), path("theirs"));
    random::write(&model, random::Size::Tiny, 1, |_, _| ()).expect("written");
    let sizes = Model::load(&model).expect("readable");
    let (store, anna) = (Store::open(&own), VoiceName::new("anna").expect("a name"));
    store.add(&anna, &random::voice(&sizes, "anna", 30, 1), false).expect("written");
    let there = Engine::start(neural(&model, vec![theirs.clone(), theirs.join(FOLDER)]), patient()).expect("starts");
    there.ready().await;
    let running = Running::serving(Service::new(there).with_copies(Copies::open(&theirs))).await;
    let engine = Engine::start_with_workers(vec![running.worker(TOKEN)], Vec::new(), patient(), Recovery::default());
    let engine = engine.expect("starts");
    ready(&engine, 1).await;
    engine.lend_voices(Library::new(store, Copies::open(&own)));
    // Nothing is spoken: it is only asked, as for the first word of a text.
    assert_eq!(engine.starts_after(Some("anna")), None, "the worker has not got it");
    let told = async {
        while engine.starts_after(Some("anna")).is_none() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(PATIENCE, told).await.expect("it has it, and speaks what is being written");
    assert_eq!(std::fs::read_dir(theirs.join(FOLDER)).map_or(0, |files| files.count()), 1, "sent once");
    running.stop().await;
}
