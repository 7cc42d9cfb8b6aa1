//! The CosyVoice3 engine on a tiny random checkpoint: what a caller relies on, whatever the weights.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use antiphon::audio::RATE;
use antiphon::synth::cosyvoice::backend::{self, Backend as _, LanguageModel, Options};
use antiphon::synth::cosyvoice::config::Config;
use antiphon::synth::cosyvoice::cpu::CpuBackend;
use antiphon::synth::cosyvoice::random::{self, Size};
use antiphon::synth::cosyvoice::{CosyVoice, Settings, verify};
use antiphon::synth::{Slot, Stage, Stages, Step, SynthError, Synthesizer, TextOrder};
use antiphon::turn::{Class, Phonemes, Saying, Sound, StreamId, Utterance};
use antiphon::voice::enrol::LOUDNESS;
use antiphon::voice::loudness::measure;

type Engine = CosyVoice<CpuBackend>;

/// One checkpoint for all tests of this file.
pub(crate) fn checkpoint() -> &'static Path {
    static DIR: OnceLock<tempfile::TempDir> = OnceLock::new();
    DIR.get_or_init(|| {
        let dir = tempfile::tempdir().expect("temp dir");
        random::write(dir.path(), Size::Tiny, 1, |_, _| ()).expect("written");
        dir
    })
    .path()
}

pub(crate) fn engine() -> Engine {
    Engine::load_cpu(checkpoint(), Options::default(), Settings::default()).expect("loads")
}

pub(crate) fn utterance(text: &str, seed: u64) -> Utterance {
    Utterance { seed, ..Utterance::plain(StreamId::next(), Class::Live, text) }
}

/// Runs `open` slots to their ends. `order` picks the next stage among those ready, `rounds` how long a step is.
fn run(
    engine: &mut dyn Synthesizer,
    mut open: BTreeMap<Slot, Stages>,
    mut order: impl FnMut(&BTreeMap<Slot, Stages>) -> (Stage, u32),
) -> BTreeMap<Slot, Vec<f32>> {
    let mut pcm: BTreeMap<Slot, Vec<f32>> = open.keys().map(|&s| (s, Vec::new())).collect();
    let mut out = Vec::new();
    for _ in 0..100_000 {
        open.retain(|_, ready| !ready.is_empty());
        if open.is_empty() {
            return pcm;
        }
        let (stage, rounds) = order(&open);
        let width = engine.caps().limits.width[stage] as usize;
        let slots: Vec<Slot> = open.iter().filter(|(_, r)| r.has(stage)).map(|(&s, _)| s).take(width).collect();
        assert!(!slots.is_empty(), "{stage:?} is not ready");
        engine.run(&Step { stage, slots, rounds }, &mut out).expect("device works");
        for progress in out.drain(..) {
            assert!(progress.outcome.failed.is_none(), "{:?}", progress.outcome.failed);
            assert_eq!(progress.outcome.done, progress.outcome.ready.is_empty(), "done exactly when nothing is left");
            assert_eq!(progress.pcm.len() % 480, 0, "whole frames");
            pcm.get_mut(&progress.outcome.slot).expect("open").extend(progress.pcm);
            open.insert(progress.outcome.slot, progress.outcome.ready);
        }
    }
    panic!("no end");
}

/// The furthest stage first: what keeps first audio early.
fn eager(open: &BTreeMap<Slot, Stages>) -> (Stage, u32) {
    let stage = Stage::ALL.into_iter().rev().find(|&s| open.values().any(|r| r.has(s)));
    (stage.expect("something is ready"), 3)
}

pub(crate) fn speak(engine: &mut dyn Synthesizer, utterance: &Utterance) -> Vec<f32> {
    let ready = engine.open(Slot(0), utterance).expect("opens");
    let mut pcm = run(engine, [(Slot(0), ready)].into(), eager);
    engine.close(Slot(0));
    pcm.remove(&Slot(0)).expect("slot 0")
}

#[test]
fn a_random_checkpoint_verifies_and_speaks() {
    let report = verify::verify(checkpoint(), "llm");
    assert!(report.passed(), "{report}");
    let mut engine = engine();
    let pcm = speak(&mut engine, &utterance("Hello there, how are you?", 7));
    assert!(pcm.len() > 24_000 / 2, "{} samples", pcm.len());
    let rms = (pcm.iter().map(|v| v * v).sum::<f32>() / pcm.len() as f32).sqrt();
    assert!((0.005..0.7).contains(&rms), "rms {rms}");
    assert_eq!(pcm, speak(&mut engine, &utterance("Hello there, how are you?", 7)), "same seed, same audio");
    assert_ne!(pcm, speak(&mut engine, &utterance("Hello there, how are you?", 8)), "another seed, other audio");
}

/// A long step used to decode on while the listener waited for a chunk whose tokens were there.
#[test]
fn a_decode_step_ends_with_the_tokens_of_a_first_chunk() {
    let mut engine = engine();
    engine.force_length(Some(100));
    let long = engine.caps().limits.rounds[Stage::Decode];
    let mut out = Vec::new();
    let ready = engine.open(Slot(0), &utterance("One two three four five six.", 1)).expect("opens");
    assert!(ready.has(Stage::Prefill));
    engine.run(&Step { stage: Stage::Prefill, slots: vec![Slot(0)], rounds: 1 }, &mut out).expect("device works");
    let mut ran = 0;
    loop {
        out.clear();
        engine.run(&Step { stage: Stage::Decode, slots: vec![Slot(0)], rounds: long }, &mut out).expect("works");
        ran += engine.rounds_run().expect("it says so");
        if out[0].outcome.ready.has(Stage::Flow) {
            break;
        }
        assert!(ran < 100, "no chunk came");
    }
    // One step fewer would not have been enough; tokens that are dropped as silence may ask for another step.
    let tokens = out[0].outcome.decoded / 960;
    assert!(tokens <= u64::from(ran), "{tokens} tokens of {ran} rounds");
    // What is left of a second slot's step runs no longer than the silent one needs.
    let second = engine.open(Slot(1), &utterance("One two three four five six.", 2)).expect("opens");
    assert!(second.has(Stage::Prefill));
    out.clear();
    engine.run(&Step { stage: Stage::Prefill, slots: vec![Slot(1)], rounds: 1 }, &mut out).expect("device works");
    let mut both = 0;
    for _ in 0..100 {
        out.clear();
        engine
            .run(&Step { stage: Stage::Decode, slots: vec![Slot(0), Slot(1)], rounds: long }, &mut out)
            .expect("works");
        both += engine.rounds_run().expect("it says so");
        if out[1].outcome.ready.has(Stage::Flow) {
            break;
        }
    }
    assert!(both <= ran + 3, "{both} rounds beside another, {ran} alone");
}

#[test]
fn audio_does_not_depend_on_company_nor_on_how_steps_are_cut() {
    let mut engine = engine();
    let texts = ["One two.", "A somewhat longer sentence is spoken here.", "Hm?", "Numbers: 12 and 345.", "End of it."];
    let alone: Vec<Vec<f32>> =
        texts.iter().enumerate().map(|(n, t)| speak(&mut engine, &utterance(t, n as u64))).collect();
    let mut open = BTreeMap::new();
    for (n, text) in texts.iter().enumerate() {
        let slot = Slot(n as u32);
        open.insert(slot, engine.open(slot, &utterance(text, n as u64)).expect("opens"));
    }
    // Every stage in turn, with ever other lengths, pausing flows between their Euler steps.
    let mut turn = 0;
    let together = run(&mut engine, open, |open| {
        loop {
            turn += 1;
            let stage = Stage::ALL[turn * 7 % 4];
            if open.values().any(|r| r.has(stage)) {
                return (stage, 1 + turn as u32 % 5);
            }
        }
    });
    for (n, pcm) in alone.iter().enumerate() {
        assert_eq!(pcm, &together[&Slot(n as u32)], "utterance {n} is bit for bit the same in company");
    }
}

#[test]
fn long_text_is_spoken_in_segments() {
    let mut engine = engine();
    let sentence = "This sentence is repeated so that the text becomes long. ";
    let short = speak(&mut engine, &utterance(sentence, 3));
    let long = speak(&mut engine, &utterance(&sentence.repeat(6), 3));
    assert!(long.len() > 2 * short.len(), "{} against {}", long.len(), short.len());
}

#[test]
fn nothing_to_say_ends_at_once() {
    let mut engine = engine();
    for text in ["", "...", "  \n "] {
        assert!(speak(&mut engine, &utterance(text, 0)).is_empty());
    }
}

#[test]
fn instructions_speed_and_voices_change_the_audio() {
    let mut engine = engine();
    let plain = utterance("The same words again.", 5);
    let base = speak(&mut engine, &plain);
    let told = Utterance { instructions: Some("Please speak slowly.".into()), ..plain.clone() };
    assert_ne!(base, speak(&mut engine, &told));
    let other = Utterance { voice: Some("random-k10".into()), ..plain.clone() };
    assert_ne!(base, speak(&mut engine, &other));
    let fast = Utterance { speed: 1.25, ..plain };
    let ratio = base.len() as f64 / speak(&mut engine, &fast).len() as f64;
    assert!((1.2..1.3).contains(&ratio), "{ratio}");
}

/// Samples of the first vocoder call and of all, at `speed`: one call for each push of tokens, or one at the end.
fn respeeded(speed: f32, early: bool) -> (usize, Vec<f32>) {
    let config = Config::load(checkpoint()).expect("sizes");
    let mut cpu = CpuBackend::load(checkpoint(), Options::default()).expect("loads");
    let made = random::voice(&config, "voice", 40, 5);
    let prompt = backend::FlowPrompt { tokens: made.tokens, mel: made.mel, speaker: made.speaker };
    let voice = cpu.add_voice(Arc::new(prompt)).expect("a voice");
    let min_length = backend::MinLength::Intended;
    let sampling = backend::Sampling { key: [0; 2], min_len: 0, max_len: 0, min_length, forced: None };
    cpu.open(Slot(0), backend::SlotRequest { voice, prefix: Vec::new(), sampling, speed }).expect("opens");
    // What is pushed before the end fills whole blocks of the flow.
    let (block, ahead) = (config.block_tokens(), config.flow.lookahead);
    let begin = block - (40 - ahead) % block + block;
    let tokens: Vec<u32> = (1..=130).collect();
    let (mut first, mut pcm) = (0, Vec::new());
    for (n, piece) in [&tokens[..begin], &tokens[begin..begin + block], &tokens[begin + block..]].iter().enumerate() {
        let last = n == 2;
        cpu.flow_push(Slot(0), piece, last).expect("tokens");
        cpu.flow(&[Slot(0)], 100, &mut Vec::new()).expect("the device works");
        if early || last {
            let mut out = Vec::new();
            cpu.vocode(&[Slot(0)], &mut out).expect("the device works");
            assert_eq!(out[0].done, last);
            pcm.append(&mut out[0].pcm);
        }
        if n == 0 {
            first = pcm.len();
        }
    }
    (first, pcm)
}

#[test]
fn another_speed_is_heard_before_the_end_is_made_and_joins_without_a_seam() {
    for speed in [0.8f32, 1.25, 1.7] {
        let (first, streamed) = respeeded(speed, true);
        let (_, whole) = respeeded(speed, false);
        assert!(first > 0, "{speed}: the first chunk is heard at once");
        assert_eq!(streamed, whole, "{speed}: the same samples however it is cut");
        let written: f64 = speed.to_string().parse().expect("a number");
        assert_eq!(whole.len(), (260.0 / written) as usize * 480, "{speed}");
    }
}

#[test]
fn a_forced_length_is_kept_and_announced() {
    let mut engine = engine();
    engine.force_length(Some(83));
    assert_eq!(speak(&mut engine, &utterance("Any text.", 1)).len(), 83 * 960);
    let ready = engine.open(Slot(2), &utterance("Any text.", 1)).expect("opens");
    assert!(ready.has(Stage::Prefill));
    let mut out = Vec::new();
    for (stage, rounds) in [(Stage::Prefill, 1), (Stage::Decode, 30)] {
        engine.run(&Step { stage, slots: vec![Slot(2)], rounds }, &mut out).expect("runs");
    }
    let progress = out.pop().expect("progress");
    assert!(progress.outcome.decoded >= 25 * 960 && progress.outcome.decoded <= 30 * 960);
    assert!(progress.outcome.ready.has(Stage::Decode));
}

/// Seen with `antiphon say` of 90 words without a full stop: "split it (over 2048 positions)".
#[test]
fn a_long_clause_without_stops_is_split_and_not_refused() {
    let mut engine = engine();
    let long = utterance(&"word ".repeat(90), 1);
    let need = engine.prepare(&long).expect("it can be spoken");
    let short = engine.prepare(&utterance("word", 1)).expect("it can be spoken");
    assert!(need.most > short.most && need.most < 90 * short.most, "{need:?} in pieces, {short:?} for a word");
    assert!(engine.open(Slot(0), &long).expect("it opens").has(Stage::Prefill));
}

#[test]
fn bad_requests_are_refused_with_reasons() {
    let mut engine = engine();
    let nobody = Utterance { voice: Some("nobody".into()), ..utterance("Hi.", 0) };
    match engine.open(Slot(0), &nobody) {
        Err(SynthError::UnknownVoice { name, known }) => {
            assert_eq!(name, "nobody");
            assert_eq!(known, "random, random-k10");
        }
        other => panic!("{other:?}"),
    }
    let rushed = Utterance { speed: 40.0, ..utterance("Hi.", 0) };
    assert!(matches!(engine.open(Slot(0), &rushed), Err(SynthError::Input(_))));
    let mut out = Vec::new();
    engine.run(&Step { stage: Stage::Flow, slots: vec![Slot(5)], rounds: 1 }, &mut out).expect("device works");
    assert!(out[0].outcome.failed.is_some());
}

#[test]
fn voices_come_and_go_while_running() {
    let dir = tempfile::tempdir().expect("temp dir");
    let settings = Settings { voice_dirs: vec![dir.path().into()], ..Settings::default() };
    let mut engine = Engine::load_cpu(checkpoint(), Options::default(), settings).expect("loads");
    let file = dir.path().join("anna.safetensors");
    std::fs::copy(checkpoint().join("voices/random.safetensors"), &file).expect("copied");
    engine.refresh_voices();
    let names = |e: &Engine| e.voices().into_iter().map(|v| v.name).collect::<Vec<_>>();
    assert_eq!(names(&engine), ["anna", "random", "random-k10"]);
    let ready = engine.open(Slot(1), &utterance("Still spoken.", 1)).expect("opens");
    std::fs::remove_file(&file).expect("removed");
    engine.refresh_voices();
    assert_eq!(names(&engine), ["random", "random-k10"]);
    // An utterance that began with it ends with it.
    assert!(!run(&mut engine, [(Slot(1), ready)].into(), eager)[&Slot(1)].is_empty());
}

/// How loud a voice was recorded does not decide how loud it speaks: what it makes is turned down or up by as much as the
/// recording is off what is wanted.
#[test]
fn a_voice_is_brought_to_the_loudness_of_the_others_by_its_recording() {
    let config = Config::load(checkpoint()).expect("sizes");
    let spoken = |measured: Option<f32>| {
        let mut voice = random::voice(&config, "anna", 40, 5);
        voice.notes.extend(measured.map(|measured| (LOUDNESS.to_owned(), format!("{measured:.2}"))));
        let dir = tempfile::tempdir().expect("temp dir");
        std::fs::write(dir.path().join("anna.safetensors"), voice.to_bytes()).expect("written");
        let settings = Settings { voice_dirs: vec![dir.path().into()], loudness: Some(-22.0), ..Settings::default() };
        let mut engine = Engine::load_cpu(checkpoint(), Options::default(), settings).expect("loads");
        engine.force_length(Some(60));
        speak(&mut engine, &Utterance { voice: Some("anna".into()), ..utterance("As loud as all.", 2) })
    };
    let plain = spoken(None);
    let as_it_is = measure(&plain, RATE).expect("sound");
    for recorded in [-22.0, -17.0, -12.0] {
        let level = measure(&spoken(Some(recorded)), RATE).expect("sound");
        assert!(
            (level - as_it_is - (-22.0 - recorded)).abs() < 0.1,
            "{recorded}: {level}, {as_it_is} without a measure"
        );
    }
}

#[test]
fn one_voice_under_many_names_is_prepared_once() {
    let dir = tempfile::tempdir().expect("temp dir");
    let settings = Settings { voice_dirs: vec![dir.path().into()], ..Settings::default() };
    let mut engine = Engine::load_cpu(checkpoint(), Options::default(), settings).expect("loads");
    engine.warm_up().expect("warm");
    let before = engine.backend_mut().prefixes();
    assert_eq!(before, 2, "the two voices of the checkpoint");
    for name in ["anna", "berta"] {
        let file = dir.path().join(format!("{name}.safetensors"));
        std::fs::copy(checkpoint().join("voices/random.safetensors"), &file).expect("copied");
    }
    engine.refresh_voices();
    let say = |engine: &mut Engine, voice: &str| {
        let utterance = Utterance { voice: Some(voice.into()), ..utterance("The same.", 3) };
        speak(engine, &utterance)
    };
    let (anna, berta) = (say(&mut engine, "anna"), say(&mut engine, "berta"));
    // The name is part of what seeds the sampling: the same voice, another take.
    assert!(!anna.is_empty() && !berta.is_empty());
    assert_eq!(engine.backend_mut().prefixes(), before, "the same voice is already there");
    // As long as one name is left, so is what was computed.
    std::fs::remove_file(dir.path().join("anna.safetensors")).expect("removed");
    engine.refresh_voices();
    assert_eq!(say(&mut engine, "berta"), berta);
    assert_eq!(engine.backend_mut().prefixes(), before);
}

#[test]
fn memory_is_accounted_and_given_back() {
    let mut engine = engine();
    engine.warm_up().expect("warm");
    let empty = engine.memory().used;
    let u = utterance("Memory is counted.", 2);
    let need = engine.prepare(&u).expect("it can be spoken");
    assert!(need.expected > 0 && need.most >= need.expected, "{need:?}");
    let ready = engine.open(Slot(0), &u).expect("opens");
    run(&mut engine, [(Slot(0), ready)].into(), eager);
    assert!(engine.memory().used > empty);
    engine.close(Slot(0));
    assert_eq!(engine.memory().used, empty);
}

#[test]
fn given_tokens_are_spoken_without_the_language_model() {
    let mut engine = engine();
    let tokens: Vec<u32> = (0..95).map(|n| n * 7 % 243).collect();
    let ready = engine.open_tokens(Slot(0), None, &tokens).expect("opens");
    assert!(ready.has(Stage::Flow) && !ready.has(Stage::Prefill));
    assert_eq!(run(&mut engine, [(Slot(0), ready)].into(), eager)[&Slot(0)].len(), 95 * 960);
}

/// Parking is not being scheduled: between any two steps, also between two Euler steps of a window, with others at
/// work meanwhile. Giving the slot up and starting again from the text gives the same audio as well.
#[test]
fn an_utterance_left_alone_between_any_two_steps_goes_on_to_the_bit() {
    let mut engine = engine();
    let text = utterance("Left alone and taken up again.", 11);
    let alone = speak(&mut engine, &text);
    let ready = engine.open(Slot(0), &text).expect("opens");
    let (mut ready, mut pcm, mut out) = (ready, Vec::new(), Vec::new());
    let mut steps = [0; 4];
    while !ready.is_empty() {
        engine.park(Slot(0));
        let other = utterance("Hm?", steps.iter().sum::<u64>());
        let opened = engine.open(Slot(1), &other).expect("opens");
        // Every few steps a whole other utterance; else one that is given up in the middle.
        if steps.iter().sum::<u64>().is_multiple_of(8) {
            run(&mut engine, [(Slot(1), opened)].into(), eager);
        } else {
            engine.run(&Step { stage: Stage::Prefill, slots: vec![Slot(1)], rounds: 1 }, &mut out).expect("works");
        }
        engine.close(Slot(1));
        out.clear();
        let stage = Stage::ALL.into_iter().rev().find(|&s| ready.has(s)).expect("something is ready");
        engine.run(&Step { stage, slots: vec![Slot(0)], rounds: 1 }, &mut out).expect("works");
        let progress = out.pop().expect("one result");
        assert!(progress.outcome.failed.is_none());
        pcm.extend(progress.pcm);
        ready = progress.outcome.ready;
        steps[stage as usize] += 1;
    }
    engine.close(Slot(0));
    assert!(steps[Stage::Flow as usize] >= 20, "several windows of ten Euler steps: {steps:?}");
    assert_eq!(pcm, alone);
    let given_up = engine.open(Slot(0), &text).expect("opens");
    assert!(given_up.has(Stage::Prefill));
    for stage in [Stage::Prefill, Stage::Decode] {
        engine.run(&Step { stage, slots: vec![Slot(0)], rounds: 2 }, &mut out).expect("works");
    }
    engine.close(Slot(0));
    assert_eq!(speak(&mut engine, &text), alone);
}

/// Speaks a text that comes in `pieces`, each given when there is nothing else to do. Also how many samples were out
/// before the last piece.
fn speak_streamed(engine: &mut Engine, pieces: &[&str], order: TextOrder) -> Result<(Vec<f32>, usize), SynthError> {
    let pieces: Vec<Saying> = pieces.iter().map(|piece| (*piece).into()).collect();
    speak_said(engine, &pieces, order)
}

fn speak_said(engine: &mut Engine, pieces: &[Saying], order: TextOrder) -> Result<(Vec<f32>, usize), SynthError> {
    let slot = Slot(0);
    let mut ready = engine.open_streamed(slot, &utterance("", 3), order)?;
    let (mut pcm, mut early, mut out) = (Vec::new(), 0, Vec::new());
    let mut left = pieces.iter();
    for _ in 0..100_000 {
        let Some(stage) = Stage::ALL.into_iter().rev().find(|&s| ready.has(s)) else {
            let piece = left.next().expect("there is text left while it waits");
            let last = left.as_slice().is_empty();
            if last {
                early = pcm.len();
            }
            ready = engine.append(slot, piece, last)?;
            continue;
        };
        engine.run(&Step { stage, slots: vec![slot], rounds: 4 }, &mut out)?;
        let progress = out.pop().expect("one result");
        if let Some(error) = progress.outcome.failed {
            return Err(SynthError::Utterance(error));
        }
        pcm.extend(progress.pcm);
        ready = progress.outcome.ready;
        if progress.outcome.done {
            engine.close(slot);
            return Ok((pcm, early));
        }
    }
    panic!("no end");
}

#[test]
fn a_text_is_spoken_while_it_is_written() {
    let mut engine = engine();
    let text = "Here is a longer sentence, which somebody writes while somebody else listens to what is already there, \
                and so on until at last it ends.";
    let (half, rest) = text.split_at(80);
    let (pcm, early) = speak_streamed(&mut engine, &[half, rest], TextOrder::Fixed).expect("speaks");
    assert!(early >= 480 && early < pcm.len(), "{early} of {} samples before the text was complete", pcm.len());
    // The same words, cut elsewhere, even inside words.
    let letters: Vec<&str> = text.split_inclusive(|c: char| "aeiou".contains(c)).collect();
    let (again, _) = speak_streamed(&mut engine, &letters, TextOrder::Fixed).expect("speaks");
    assert_eq!(pcm, again, "what is heard does not depend on how the text came");
}

/// Words whose sound is given, in a text that comes bit by bit: the voice gets the same tokens wherever it is cut, also
/// behind the space within such a word.
#[test]
fn given_sounds_are_spoken_while_a_text_is_written() {
    let mut engine = engine();
    let york = || (0.."New York".len(), Phonemes::Espeak("nu:'jo@k".into()));
    let give = || (0.."给予".len(), Phonemes::Pinyin { pinyin: "ji3 yu3".into() });
    let said = |text: &str, sound: Option<Sound>| Saying { text: text.into(), sounds: sound.into_iter().collect() };
    let english = [
        said("We saw ", None),
        said("New York", Some(york())),
        said(" and it was very good to see, as everybody ", None),
        said("says.", None),
    ];
    let chinese = [said("大家都", None), said("给予", Some(give())), said("好评。", None)];
    for pieces in [&english[..], &chinese[..]] {
        let mut whole = Saying::default();
        pieces.iter().for_each(|piece| whole.push(&piece.text, piece.sounds.clone()));
        let written = whole.text.clone();
        let (at_once, _) = speak_said(&mut engine, &[whole], TextOrder::Fixed).expect("speaks");
        let (bit_by_bit, _) = speak_said(&mut engine, pieces, TextOrder::Fixed).expect("speaks");
        assert!(at_once == bit_by_bit, "{written}: what is heard does not depend on how the text came");
        let (written, _) = speak_streamed(&mut engine, &[&written], TextOrder::Fixed).expect("speaks");
        assert!(at_once != written, "what is given is not what is written");
    }
}

#[test]
fn a_streamed_text_without_words_is_silence() {
    let mut engine = engine();
    let (pcm, _) = speak_streamed(&mut engine, &[" ", "\n"], TextOrder::Fixed).expect("ends");
    assert!(pcm.is_empty());
    let ready = engine.open(Slot(0), &utterance("A whole one.", 1)).expect("opens");
    assert!(!ready.is_empty());
    assert!(engine.append(Slot(0), &"more".into(), true).is_err(), "a whole text has no more");
}

#[test]
fn the_other_language_model_is_a_choice() {
    let dir = tempfile::tempdir().expect("temp dir");
    random::write(dir.path(), Size::Tiny, 1, |_, _| ()).expect("written");
    let other = tempfile::tempdir().expect("temp dir");
    random::write(other.path(), Size::Tiny, 2, |_, _| ()).expect("written");
    let options = Options { llm: LanguageModel::Reinforced, ..Options::default() };
    let missing = Engine::load_cpu(dir.path(), options.clone(), Settings::default()).err().expect("there is none");
    assert!(missing.to_string().contains("llm.rl"), "{missing}");
    std::fs::copy(other.path().join("llm.pt"), dir.path().join("llm.rl.pt")).expect("copied");
    let text = utterance("Which of the two speaks?", 5);
    let plain = speak(&mut engine(), &text);
    let tuned = speak(&mut Engine::load_cpu(dir.path(), options, Settings::default()).expect("loads"), &text);
    assert_ne!(plain, tuned);
}
