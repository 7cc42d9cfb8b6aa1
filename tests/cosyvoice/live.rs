//! Texts that are still being written on a device's thread: beside others, waiting, cancelled.

use std::time::Duration;

use antiphon::sched::Config;
use antiphon::synth::cosyvoice::backend::Options;
use antiphon::synth::cosyvoice::cpu::CpuBackend;
use antiphon::synth::cosyvoice::{CosyVoice, Settings};
use antiphon::synth::device::{Engine, Loader, StreamNote};
use antiphon::synth::{Progress, Slot, Stage, Stages, Step, Synthesizer, TextOrder};
use antiphon::turn::{Class, Epoch, SpeechEvent, Utterance, UtteranceEnd, WordTimes};
use tokio::sync::mpsc;

use super::engine::{checkpoint, utterance};

/// Speech tokens of a text id: random weights do not end by themselves.
const PACE: f64 = 3.5;
const WAIT: Duration = Duration::from_secs(300);
const PIECES: [&str; 5] = ["Here is a longer ", "sentence, which somebody ", "writes while ", "others ", "listen."];

fn voice(slots: u32) -> CosyVoice<CpuBackend> {
    let options = Options { slots: Some(slots), ..Options::default() };
    let mut voice = CosyVoice::load_cpu(checkpoint(), options, Settings::default()).expect("loads");
    voice.force_pace(Some(PACE));
    voice
}

/// The latest of the stages that `slot` is ready for.
fn step(voice: &mut CosyVoice<CpuBackend>, slot: Slot, ready: Stages) -> Progress {
    let stage = Stage::ALL.into_iter().rev().find(|stage| ready.has(*stage)).expect("it has not ended");
    let mut out = Vec::new();
    voice.run(&Step { stage, slots: vec![slot], rounds: 8 }, &mut out).expect("works");
    let progress = out.pop().expect("one");
    assert_eq!(progress.outcome.failed, None);
    progress
}

async fn engine(slots: u32) -> Engine {
    let loader: Loader = Box::new(move || Ok(Box::new(voice(slots))));
    let engine = Engine::start(vec![loader], Config::default()).expect("starts");
    engine.ready().await;
    assert!(engine.starts_after(None).is_some());
    engine
}

/// What the voice makes of all pieces when nothing else runs.
fn alone(seed: u64) -> Vec<f32> {
    let (mut voice, slot) = (voice(1), Slot(0));
    let mut ready = voice.open_streamed(slot, &utterance("", seed), TextOrder::Fixed).expect("opens");
    for (n, piece) in PIECES.iter().enumerate() {
        ready = voice.append(slot, &(*piece).into(), n + 1 == PIECES.len()).expect("takes it");
    }
    let mut pcm = Vec::new();
    loop {
        let progress = step(&mut voice, slot, ready);
        pcm.extend(progress.pcm);
        ready = progress.outcome.ready;
        if progress.outcome.done {
            return pcm;
        }
    }
}

/// Submits the first piece of a text, or a whole one, for a listener who takes it as it comes.
fn submit(engine: &Engine, utterance: &Utterance) -> mpsc::Receiver<SpeechEvent> {
    let (sink, events) = mpsc::channel(4_096);
    engine.note(utterance.stream, StreamNote::Unpaced);
    engine.submit(utterance.clone(), sink).expect("there is room");
    events
}

fn streamed(seed: u64) -> Utterance {
    Utterance { streamed: true, ..utterance(PIECES[0], seed) }
}

/// Gives what is missing behind the first `given` pieces.
fn complete(engine: &Engine, utterance: &Utterance, given: usize) {
    for (n, piece) in PIECES.iter().enumerate().skip(given) {
        engine.append(utterance.stream, utterance.id, &(*piece).into(), n + 1 == PIECES.len());
    }
}

async fn next(events: &mut mpsc::Receiver<SpeechEvent>) -> SpeechEvent {
    tokio::time::timeout(WAIT, events.recv()).await.expect("in time").expect("its end comes first")
}

/// Everything that comes, behind `pcm`, and how it ends.
async fn rest(events: &mut mpsc::Receiver<SpeechEvent>, mut pcm: Vec<f32>) -> (Vec<f32>, UtteranceEnd) {
    loop {
        match next(events).await {
            SpeechEvent::Audio { pcm: more, .. } => pcm.extend(more),
            SpeechEvent::End { how, .. } => return (pcm, how),
        }
    }
}

#[tokio::test]
async fn a_text_that_waits_holds_no_other_up_and_is_spoken_as_it_would_be_alone() {
    let engine = engine(4).await;
    let text = streamed(7);
    let mut events = submit(&engine, &text);
    // Others come and go while it waits for more than its first words. As batch: a machine as slow as this one would take on
    // no second listener.
    let other = |text: &str, seed| Utterance { class: Class::Batch, ..utterance(text, seed) };
    for seed in 0..3 {
        let (pcm, how) = rest(&mut submit(&engine, &other("A whole one.", seed)), Vec::new()).await;
        assert!(how == UtteranceEnd::Done && !pcm.is_empty(), "{how:?}");
    }
    let beside = submit(&engine, &other("And another one beside it.", 4));
    complete(&engine, &text, 1);
    let (pcm, how) = rest(&mut events, Vec::new()).await;
    assert_eq!(how, UtteranceEnd::Done);
    assert_eq!(pcm, alone(7));
    drop(beside);
    engine.append(text.stream, text.id, &"too late".into(), true);
    tokio::task::spawn_blocking(|| engine.shutdown()).await.expect("ends");
}

/// There is one place: that somebody else was spoken to his end, while the text was not complete, shows that it gave way.
#[tokio::test]
async fn a_text_that_gives_way_in_its_midst_is_spoken_as_if_it_had_not() {
    let engine = engine(1).await;
    let text = Utterance { class: Class::Batch, ..streamed(9) };
    let mut events = submit(&engine, &text);
    engine.append(text.stream, text.id, &PIECES[1].into(), false);
    // Some of it was made and given out.
    let mut made = Vec::new();
    while made.is_empty() {
        match next(&mut events).await {
            SpeechEvent::Audio { pcm, .. } => made.extend(pcm),
            SpeechEvent::End { how, .. } => panic!("{how:?} before its end was written"),
        }
    }
    let (pcm, how) = rest(&mut submit(&engine, &utterance("Now me.", 3)), Vec::new()).await;
    assert!(how == UtteranceEnd::Done && !pcm.is_empty(), "{how:?}");
    complete(&engine, &text, 2);
    let (pcm, how) = rest(&mut events, made).await;
    assert_eq!(how, UtteranceEnd::Done);
    assert_eq!(pcm, alone(9), "from the same tokens");
    tokio::task::spawn_blocking(move || engine.shutdown()).await.expect("ends");
}

#[tokio::test]
async fn a_text_that_waits_is_cancelled_by_its_epoch_and_one_that_never_came_is_silence() {
    let engine = engine(2).await;
    let epoch = Epoch::default();
    let text = Utterance { token: epoch.token(), ..streamed(1) };
    let mut events = submit(&engine, &text);
    epoch.raise();
    let how = rest(&mut events, Vec::new()).await.1;
    assert_eq!(how, UtteranceEnd::Cancelled);
    let text = Utterance { text: String::new(), ..streamed(2) };
    let mut events = submit(&engine, &text);
    engine.append(text.stream, text.id, &"".into(), true);
    assert_eq!(rest(&mut events, Vec::new()).await, (Vec::new(), UtteranceEnd::Done));
    tokio::task::spawn_blocking(|| engine.shutdown()).await.expect("ends");
}

/// A text in many pieces, each given when the voice has said what it could of those before.
const WRITTEN: [&str; 8] = [
    "We have been looking at all ",
    "the numbers which you sent us ",
    "last week, and most of them ",
    "seem to be in very good ",
    "order, but some of the older ",
    "ones from the second half of ",
    "the year are still missing, so ",
    "please send them again.",
];

/// What came of it: sound before each piece was given, samples of speech decoded before it, all sound.
fn written(speed: f32, words: &WordTimes) -> (Vec<usize>, Vec<u64>, Vec<f32>) {
    let (mut voice, slot) = (voice(1), Slot(0));
    let text = Utterance { speed, words: words.clone(), ..utterance("", 3) };
    voice.open_streamed(slot, &text, TextOrder::Fixed).expect("opens");
    let (mut heard, mut decoded, mut pcm, mut now) = (Vec::new(), Vec::new(), Vec::new(), 0);
    for (n, piece) in WRITTEN.iter().enumerate() {
        heard.push(pcm.len());
        decoded.push(now);
        let mut ready = voice.append(slot, &(*piece).into(), n + 1 == WRITTEN.len()).expect("takes it");
        while !ready.is_empty() {
            let progress = step(&mut voice, slot, ready);
            pcm.extend(progress.pcm);
            now = progress.outcome.decoded;
            ready = progress.outcome.ready;
        }
    }
    (heard, decoded, pcm)
}

#[test]
fn an_unfinished_text_sounds_at_any_speed() {
    let plain = written(1.0, &WordTimes::default()).2.len() as f64;
    for speed in [0.8f32, 1.25, 2.0] {
        let (heard, _, pcm) = written(speed, &WordTimes::default());
        assert!(heard[WRITTEN.len() - 1] > 0, "{speed}: nothing sounds before the last words are written: {heard:?}");
        let ratio = plain / pcm.len() as f64 / f64::from(speed);
        assert!((0.98..1.02).contains(&ratio), "{speed}: {ratio}");
    }
}

#[test]
fn no_word_sounds_before_the_model_had_it_and_the_voice_says_so() {
    for speed in [1.0, 1.25] {
        let words = WordTimes::default();
        let (_, decoded, pcm) = written(speed, &words);
        let letters = |text: &str| text.chars().filter(|c| !c.is_whitespace()).count();
        let begins = words.begins();
        assert!(begins.len() > WRITTEN.len() / 2, "{begins:?}");
        for bound in &begins {
            let piece = (0..WRITTEN.len())
                .find(|n| WRITTEN[..*n].iter().map(|text| letters(text)).sum::<usize>() == bound.letters);
            let piece = piece.expect("a bound lies before a piece");
            assert!(bound.samples >= decoded[piece] && bound.samples <= pcm.len() as u64, "{bound:?} of {decoded:?}");
        }
        assert!(begins.windows(2).all(|pair| pair[0].letters < pair[1].letters && pair[0].samples <= pair[1].samples));
        assert!(begins.last().is_some_and(|last| last.samples > 0), "{begins:?}");
    }
}

#[test]
fn a_whole_text_sounds_at_another_speed_before_it_is_decoded() {
    for speed in [0.8f32, 1.25] {
        let (mut voice, slot) = (voice(1), Slot(0));
        let text = Utterance { speed, ..utterance(&WRITTEN.concat(), 3) };
        let mut ready = voice.open(slot, &text).expect("opens");
        let mut early = false;
        while !ready.is_empty() {
            let progress = step(&mut voice, slot, ready);
            ready = progress.outcome.ready;
            early |= !progress.pcm.is_empty() && ready.has(Stage::Decode);
        }
        assert!(early, "{speed}");
    }
}
