//! Texts that are still being written, and when words sound, through workers. The networks are small and random; the way is
//! the product's.

use std::path::Path;

use super::voices::patient;
use super::*;
use crate::synth::cosyvoice::backend::Options;
use crate::synth::cosyvoice::{CosyVoice, Settings, random};
use crate::synth::{Caps, Progress, Seeds, Slot, Stages, Step, SynthError, Synthesizer, VoiceInfo};
use crate::turn::{NotBefore, WordEnd, WordTimes};

const PIECES: [&str; 4] = ["Here is a longer ", "sentence, which somebody ", "writes while others ", "listen to it."];
/// Speech tokens of a text id: random weights do not end by themselves.
const PACE: f64 = 3.5;

fn neural(model: &Path) -> Vec<Loader> {
    let model = model.to_owned();
    vec![Box::new(move || {
        let mut voice = CosyVoice::load_cpu(&model, Options::default(), Settings::default())?;
        voice.force_pace(Some(PACE));
        Ok(Box::new(voice))
    })]
}

fn streamed(words: &WordTimes) -> Utterance {
    let (streamed, words, stream) = (true, words.clone(), StreamId::next());
    // Batch work waits where there is no room, and is not measured by its deadlines.
    Utterance { class: Class::Batch, streamed, words, ..utterance(stream, PIECES[0]) }
}

fn begin(engine: &Engine, utterance: &Utterance) -> mpsc::Receiver<SpeechEvent> {
    let (sink, events) = mpsc::channel(8);
    engine.note(utterance.stream, StreamNote::Unpaced);
    engine.submit(utterance.clone(), sink).expect("accepted");
    events
}

fn write(engine: &Engine, utterance: &Utterance, pieces: std::ops::Range<usize>) {
    for n in pieces {
        engine.append(utterance.stream, utterance.id, &PIECES[n].into(), n + 1 == PIECES.len());
    }
}

/// All pieces, spoken by `engine`.
async fn whole(engine: &Engine) -> (Vec<f32>, Vec<NotBefore>) {
    let words = WordTimes::default();
    words.keep();
    let utterance = streamed(&words);
    let mut events = begin(engine, &utterance);
    write(engine, &utterance, 1..PIECES.len());
    let (heard, how) = rest(&mut events).await;
    assert_eq!(how, UtteranceEnd::Done);
    (heard, words.begins())
}

#[tokio::test]
async fn a_text_is_spoken_as_it_is_written_and_its_words_sound_no_sooner() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model");
    random::write(&model, random::Size::Tiny, 1, |_, _| ()).expect("written");
    let there = Engine::start(neural(&model), patient()).expect("starts");
    there.ready().await;
    let running = Running::serving(Service::new(there)).await;
    let engine = gateway(vec![running.worker(TOKEN)], Vec::new());
    ready(&engine, 1).await;
    assert!(engine.starts_after(None).is_some_and(|ids| Some(ids) == running.engine.starts_after(None)));
    assert_eq!(engine.voices(), running.engine.voices());

    let (wanted, begins) = whole(&running.engine).await;
    assert!(!wanted.is_empty() && !begins.is_empty());
    assert!(whole(&engine).await == (wanted.clone(), begins), "to the bit");

    // Some of the text comes long after the voice has begun.
    let words = WordTimes::default();
    let utterance = streamed(&words);
    let mut events = begin(&engine, &utterance);
    write(&engine, &utterance, 1..3);
    let taken = async {
        while running.engine.status()[0].load.batch_open == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, taken).await.expect("it is begun");
    write(&engine, &utterance, 3..4);
    engine.append(utterance.stream, utterance.id, &"Too late.".into(), true);
    let (heard, how) = rest(&mut events).await;
    assert!(how == UtteranceEnd::Done && heard == wanted, "{} samples of {}", heard.len(), wanted.len());
    running.stop().await;
}

#[tokio::test]
async fn a_text_that_is_written_while_its_worker_is_lost_is_spoken_whole_by_another() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model");
    random::write(&model, random::Size::Tiny, 1, |_, _| ()).expect("written");
    let mut workers = Vec::new();
    for _ in 0..2 {
        let there = Engine::start(neural(&model), patient()).expect("starts");
        there.ready().await;
        workers.push(Running::serving(Service::new(there)).await);
    }
    let (wanted, _) = whole(&workers[0].engine).await;
    let engine = gateway(workers.iter().map(|running| running.worker(TOKEN)).collect(), Vec::new());
    ready(&engine, 2).await;
    let utterance = streamed(&WordTimes::default());
    let mut events = begin(&engine, &utterance);
    write(&engine, &utterance, 1..2);
    let taken = async {
        while workers.iter().all(|running| running.service.open() == 0) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, taken).await.expect("one of them has it");
    let lost = workers.remove(usize::from(workers[0].service.open() == 0));
    lost.stop().await;
    // Whether or not the gateway knows already.
    write(&engine, &utterance, 2..4);
    let (heard, how) = rest(&mut events).await;
    assert!(how == UtteranceEnd::Done && heard == wanted, "{how:?}, {} samples of {}", heard.len(), wanted.len());
    workers.remove(0).stop().await;
}

/// A text whose words are found behind its speech.
const LATE: &str = "Six ten.";

/// The tone, which says when its words end only once it is told to.
struct Telling(Tone, WordTimes, Vec<WordTimes>);

impl Synthesizer for Telling {
    fn caps(&self) -> &Caps {
        self.0.caps()
    }

    fn voices(&self) -> Vec<VoiceInfo> {
        self.0.voices()
    }

    fn open(&mut self, slot: Slot, utterance: &Utterance) -> Result<Stages, SynthError> {
        if utterance.text == LATE {
            self.2.push(utterance.words.clone());
        }
        self.0.open(slot, utterance)
    }

    fn run(&mut self, step: &Step, out: &mut Vec<Progress>) -> Result<(), SynthError> {
        self.0.run(step, out)
    }

    fn close(&mut self, slot: Slot) {
        self.0.close(slot);
        // This and the utterance hold them, and whoever wants to know.
        if let Some(words) = self.2.pop().filter(|words| words.holders() > 2) {
            let known = self.1.clone();
            tokio::runtime::Builder::new_current_thread().build().expect("a runtime").block_on(known.told());
            words.tell(known.known().unwrap_or_default().to_vec());
        }
    }

    fn warm_up(&mut self) -> Result<Seeds, SynthError> {
        self.0.warm_up()
    }
}

#[tokio::test]
async fn words_that_are_found_behind_the_speech_are_told_and_only_to_who_asks() {
    let known = WordTimes::default();
    let telling = known.clone();
    let loader: Loader = Box::new(move || Ok(Box::new(Telling(Tone::new(), telling.clone(), Vec::new()))));
    let there = Engine::start(vec![loader], Config::default()).expect("starts");
    there.ready().await;
    let running = Running::serving(Service::new(there)).await;
    let engine = gateway(vec![running.worker(TOKEN)], Vec::new());
    ready(&engine, 1).await;
    assert!(!spoken(&engine, "One two.").await.is_empty());

    let words = WordTimes::default();
    let (sink, mut events) = mpsc::channel(64);
    let one = Utterance { words: words.clone(), ..utterance(StreamId::next(), LATE) };
    engine.submit(one, sink).expect("accepted");
    let first = timeout(PATIENCE, events.recv()).await.expect("in time");
    assert!(matches!(first, Some(SpeechEvent::Audio { .. })) && words.known().is_none());
    let ends = vec![WordEnd { text: 3, samples: 480 }, WordEnd { text: 8, samples: 960 }];
    known.tell(ends.clone());
    timeout(PATIENCE, words.told()).await.expect("in time");
    assert_eq!(words.known(), Some(&ends[..]));
    running.stop().await;
}
