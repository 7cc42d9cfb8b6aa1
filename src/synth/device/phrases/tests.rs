use std::time::Duration;

use proptest::prelude::*;
use tokio::sync::mpsc;

use super::disk::{decode, encode};
use super::*;
use crate::synth::device::{Engine, Loader};
use crate::synth::tone::Tone;
use crate::turn::{Class, Epoch, StreamId, WordEnd};

fn engine(config: &Config) -> Engine {
    let loader: Loader = Box::new(|| Ok(Box::new(Tone::new())));
    let engine = Engine::start(vec![loader], crate::sched::Config::default()).expect("starts");
    engine.keep_phrases(config);
    engine
}

fn memory_only(keep: Keep) -> Config {
    Config { keep, memory_mib: 1, disk_mib: 0, ..Config::default() }
}

fn utterance(text: &str) -> Utterance {
    Utterance::plain(StreamId::next(), Class::Batch, text)
}

async fn spoken(engine: &Engine, utterance: Utterance) -> (Vec<f32>, UtteranceEnd) {
    let (sink, mut events) = mpsc::channel(64);
    engine.submit(utterance, sink).expect("taken");
    let mut all = Vec::new();
    loop {
        match events.recv().await.expect("it ends") {
            SpeechEvent::Audio { pcm, .. } => all.extend(pcm),
            SpeechEvent::End { how, .. } => return (all, how),
        }
    }
}

/// Samples that the device has made.
fn made(engine: &Engine) -> u64 {
    engine.status()[0].produced
}

async fn until(what: &str, is: impl Fn() -> bool) {
    let wait = async {
        while !is() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), wait).await.unwrap_or_else(|_| panic!("{what}"));
}

fn table(engine: &Engine) -> MutexGuard<'_, Table> {
    engine.inner.phrases.get().expect("phrases are kept").shared.table()
}

#[tokio::test]
async fn what_was_spoken_once_is_given_again_to_the_bit_and_costs_no_device_time() {
    let engine = engine(&memory_only(Keep::All));
    engine.ready().await;
    let (first, _) = spoken(&engine, utterance("one three")).await;
    let device = made(&engine);
    assert_eq!(spoken(&engine, utterance("one three")).await, (first.clone(), UtteranceEnd::Done));
    assert_eq!(made(&engine), device, "no device spoke it");
    spoken(&engine, Utterance { seed: 7, ..utterance("one three") }).await;
    assert!(made(&engine) > device, "another seed is another phrase");
    let epoch = Epoch::default();
    let cancelled = Utterance { token: epoch.token(), ..utterance("one three") };
    epoch.raise();
    assert_eq!(spoken(&engine, cancelled).await, (Vec::new(), UtteranceEnd::Cancelled));
    // A sink without room for it in one piece: the device speaks, and waits.
    let before = made(&engine);
    let (sink, mut events) = mpsc::channel(1);
    engine.submit(utterance("one three"), sink).expect("taken");
    let mut again = Vec::new();
    while let Some(SpeechEvent::Audio { pcm, .. }) = events.recv().await {
        again.extend(pcm);
    }
    assert_eq!(again, first);
    assert!(made(&engine) > before);
    engine.shutdown();
}

#[tokio::test]
async fn only_phrases_of_the_configuration_are_kept_unless_all_are() {
    let engine = engine(&memory_only(Keep::Fixed));
    engine.ready().await;
    let phrases = [utterance("good day"), utterance("so long")];
    let missing = engine.fix_phrases(&phrases).expect("the voice is known");
    assert_eq!(missing.len(), 2);
    for phrase in missing {
        spoken(&engine, phrase).await;
    }
    spoken(&engine, utterance("something else")).await;
    assert_eq!(table(&engine).kept.len(), 2);
    assert!(engine.fix_phrases(&phrases).expect("known").is_empty());
    assert_eq!(engine.fix_phrases(&[utterance("welcome")]).expect("known").len(), 1);
    engine.shutdown();
}

#[tokio::test]
async fn what_was_used_longest_ago_makes_room_and_phrases_of_the_configuration_do_last() {
    let engine = engine(&memory_only(Keep::All));
    engine.ready().await;
    // Some three and a half seconds each, and room for less than eleven.
    let text = |letter: &str| format!("{letter} ").repeat(21);
    engine.fix_phrases(&[utterance(&text("a"))]).expect("known");
    for letter in ["a", "b", "c", "b", "d"] {
        spoken(&engine, utterance(&text(letter))).await;
    }
    let before = made(&engine);
    for letter in ["a", "b", "d"] {
        spoken(&engine, utterance(&text(letter))).await;
    }
    assert_eq!(made(&engine), before, "these are kept");
    assert!(table(&engine).bytes <= 1 << 20);
    spoken(&engine, utterance(&text("c"))).await;
    assert!(made(&engine) > before, "this one is not");
    engine.shutdown();
}

#[test]
fn word_times_come_with_a_phrase_also_where_they_were_found_later() {
    let phrases = Phrases::start(&memory_only(Keep::All), Arc::default()).expect("kept");
    let told = utterance("two words");
    // As a call does, which asks when its words sound.
    let _asked = told.words.clone();
    let mut recorder = phrases.record([1; 32], &told).expect("to be kept");
    recorder.hear(&[0.5; 960]);
    recorder.keep();
    let ends = vec![WordEnd { text: 3, samples: 400 }, WordEnd { text: 9, samples: 960 }];
    told.words.tell(ends.clone());
    let (sink, mut events) = mpsc::channel(2);
    let again = utterance("two words");
    assert!(phrases.speak([1; 32], &again, &sink, &Weak::new()));
    assert!(matches!(events.try_recv(), Ok(SpeechEvent::Audio { pcm, .. }) if pcm == [0.5; 960]));
    assert_eq!(again.words.known(), Some(&*ends));
}

#[tokio::test]
async fn phrases_outlive_the_process_and_a_damaged_file_is_spoken_anew() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path().join("phrases");
    let config = Config { keep: Keep::All, dir: dir.clone(), memory_mib: 8, disk_mib: 8 };
    let files = || {
        let entries = std::fs::read_dir(&dir).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|ending| ending == "phrase"))
    };
    let first = engine(&config);
    first.ready().await;
    let (sound, _) = spoken(&first, utterance("one three")).await;
    until("it is written", || files().count() == 1).await;
    first.shutdown();

    let second = engine(&config);
    second.ready().await;
    until("it is found", || table(&second).stored.len() == 1).await;
    assert_eq!(spoken(&second, utterance("one three")).await, (sound.clone(), UtteranceEnd::Done));
    assert_eq!(made(&second), 0, "it came from the disk");
    second.shutdown();

    let file = files().next().expect("still there");
    let mut bytes = std::fs::read(&file).expect("readable");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&file, &bytes).expect("written");
    // A crash left this one; and this is somebody else's.
    std::fs::write(dir.join("half.1.part"), "half").expect("written");
    std::fs::write(dir.join("notes.txt"), "mine").expect("written");
    let third = engine(&config);
    third.ready().await;
    until("it is found", || table(&third).stored.len() == 1).await;
    assert_eq!(spoken(&third, utterance("one three")).await, (sound, UtteranceEnd::Done));
    assert!(made(&third) > 0, "the device spoke it");
    until("it is written anew", || std::fs::read(&file).is_ok_and(|now| now != bytes && !now.is_empty())).await;
    assert!(!dir.join("half.1.part").exists() && dir.join("notes.txt").exists());
    third.shutdown();
}

#[tokio::test]
async fn the_disk_is_bounded() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = Config { keep: Keep::All, dir: folder.path().to_path_buf(), memory_mib: 8, disk_mib: 1 };
    let engine = engine(&config);
    engine.ready().await;
    let size = || {
        let entries = std::fs::read_dir(folder.path()).expect("readable").flatten();
        entries.filter_map(|entry| Some(entry.metadata().ok()?.len())).sum::<u64>()
    };
    let text = |letter: &str| format!("{letter} ").repeat(21);
    for letter in ["a", "b", "c", "d", "e"] {
        spoken(&engine, utterance(&text(letter))).await;
    }
    let last = engine.inner.phrase(&utterance(&text("e"))).expect("known").1;
    until("the last is written", || table(&engine).stored.contains(&last)).await;
    assert!(size() <= 1 << 20, "{}", size());
    assert!(table(&engine).stored.len() < 5);
    engine.shutdown();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_file_is_read_as_it_was_written_or_not_at_all(
        pcm in prop::collection::vec(-1f32..1.0, 0..200),
        ends in prop::collection::vec((0usize..1_000, 0u64..100_000), 0..20),
        at in any::<prop::sample::Index>(),
        bit in 0u8..8,
    ) {
        let words: Vec<WordEnd> = ends.into_iter().map(|(text, samples)| WordEnd { text, samples }).collect();
        let key = [9; 32];
        let bytes = encode(&key, &pcm, &words);
        prop_assert_eq!(decode(&key, &bytes), Some((pcm, words)));
        prop_assert_eq!(decode(&[8; 32], &bytes), None, "another phrase's");
        let mut wrong = bytes.clone();
        wrong[at.index(bytes.len())] ^= 1 << bit;
        prop_assert_eq!(decode(&key, &wrong), None);
        prop_assert_eq!(decode(&key, &bytes[..at.index(bytes.len())]), None);
    }
}
