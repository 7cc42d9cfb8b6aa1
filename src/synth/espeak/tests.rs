use std::path::Path;

use super::*;
use crate::audio::FRAME_SAMPLES;
use crate::turn::{Class, StreamId};

pub(crate) fn utterance(text: &str) -> Utterance {
    Utterance::plain(StreamId::next(), Class::Live, text)
}

/// All audio of one utterance, by steps as a scheduler would run them.
pub(crate) fn speak(voice: &mut dyn Synthesizer, utterance: Utterance) -> Vec<f32> {
    let slot = Slot(1);
    voice.open(slot, &utterance).expect("opens");
    let step = Step { stage: Stage::Vocode, slots: vec![slot], rounds: 1 };
    let mut pcm = Vec::new();
    for _ in 0..10_000 {
        let mut out = Vec::new();
        voice.run(&step, &mut out).expect("runs");
        let progress = out.pop().expect("one slot, one progress");
        assert!(progress.outcome.failed.is_none(), "{:?}", progress.outcome.failed);
        assert!(progress.outcome.done || progress.pcm.len().is_multiple_of(FRAME_SAMPLES));
        pcm.extend(progress.pcm);
        if progress.outcome.done {
            voice.close(slot);
            return pcm;
        }
    }
    panic!("not done after 10,000 steps");
}

/// `None`, and the test is skipped, where the program is not installed.
fn espeak() -> Option<Espeak> {
    match Espeak::new(Config::default()) {
        Ok(espeak) => Some(espeak),
        Err(error) => {
            antiphon_skip::skip("espeak", error);
            None
        }
    }
}

#[test]
fn a_child_is_bounded_before_it_gets_text() {
    let Some(_voice) = espeak() else { return };
    let manner = Manner { voice: "en-gb".into(), words_per_minute: 175 };
    let mut child = Child::start(Path::new("espeak-ng"), &manner, Share::Live).expect("starts");
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", child.id())).expect("it waits for text");
    child.kill();
    child.wait();
    let files = limits.lines().find(|line| line.starts_with("Max open files")).expect("known to the system");
    assert_eq!(files.split_whitespace().nth(3), Some("64"), "{files}");
}

#[test]
fn the_same_text_gives_the_same_audio() {
    let Some(mut voice) = espeak() else { return };
    let first = speak(&mut voice, utterance("Hello there, how are you today?"));
    assert!(first.len() > 24_000, "{} samples", first.len());
    assert!(first.iter().any(|s| s.abs() > 0.1));
    assert_eq!(first, speak(&mut voice, utterance("Hello there, how are you today?")));
}

#[test]
fn voices_languages_and_speed_change_the_audio() {
    let Some(mut voice) = espeak() else { return };
    let text = "Guten Tag, zusammen.";
    let plain = speak(&mut voice, utterance(text));
    let german = speak(&mut voice, Utterance { voice: Some("de".into()), ..utterance(text) });
    let tagged = speak(&mut voice, Utterance { language: Some("de-DE".into()), ..utterance(text) });
    let woman = speak(&mut voice, Utterance { voice: Some("de+f3".into()), ..utterance(text) });
    let fast = speak(&mut voice, Utterance { speed: 2.0, ..utterance(text) });
    assert_ne!(plain, german);
    assert_eq!(german, tagged);
    assert_ne!(german, woman);
    assert!(fast.len() < plain.len() * 3 / 4, "{} of {}", fast.len(), plain.len());
}

#[test]
fn nothing_to_say_ends_at_once() {
    let Some(mut voice) = espeak() else { return };
    for text in ["", "   ", "\u{7}\u{1b}"] {
        let pcm = speak(&mut voice, utterance(text));
        assert!(pcm.iter().all(|s| s.abs() < 0.01), "{text:?} is audible");
    }
}

#[test]
fn bad_requests_say_what_to_change() {
    let Some(mut voice) = espeak() else { return };
    let long = utterance(&"a".repeat(MAX_TEXT + 1));
    assert!(matches!(voice.open(Slot(0), &long), Err(SynthError::Input(m)) if m.contains("split")));
    let nobody = Utterance { voice: Some("nobody".into()), ..utterance("x") };
    assert!(matches!(voice.open(Slot(0), &nobody), Err(SynthError::UnknownVoice { .. })));
    let stopped = Utterance { speed: 0.0, ..utterance("x") };
    assert!(matches!(voice.open(Slot(0), &stopped), Err(SynthError::Input(_))));
}

#[test]
fn text_is_never_a_command() {
    let given = |text: &str| form::joined(&form::tokens(&utterance(text)), |_| String::new());
    assert_eq!(given("[[[x"), "[ [ [x\n");
    assert_eq!(given("a\u{1}b\nc"), "a b c\n");
}

#[test]
fn a_missing_program_names_the_package() {
    let config = Config { program: "espeak-ng-that-is-not-there".into(), ..Config::default() };
    let Err(error) = Espeak::new(config) else { panic!("it is there") };
    assert!(error.to_string().contains("apt-get install espeak-ng"), "{error}");
}

#[test]
fn closing_kills_the_child_and_a_killed_child_fails_one_utterance() {
    let Some(mut voice) = espeak() else { return };
    let long = "This is a long sentence that takes a while. ".repeat(200);
    voice.open(Slot(0), &utterance(&long)).expect("opens");
    voice.open(Slot(1), &utterance(&long)).expect("opens");
    voice.close(Slot(0));
    assert!(!voice.open.contains_key(&Slot(0)));
    voice.open.get_mut(&Slot(1)).expect("open").kill();
    let step = Step { stage: Stage::Vocode, slots: vec![Slot(1)], rounds: 1 };
    for _ in 0..10_000 {
        let mut out = Vec::new();
        voice.run(&step, &mut out).expect("the device goes on");
        if out[0].outcome.failed.is_some() {
            assert!(speak(&mut voice, utterance("still here")).len() > 4_800);
            return;
        }
        assert!(!out[0].outcome.done, "a killed child is not a finished one");
    }
    panic!("the death of the child went unnoticed");
}

#[test]
fn a_child_that_gives_way_may_be_silent_for_longer() {
    let Some(voice) = espeak() else { return };
    let manner = voice.manner(None, None, 1.0).expect("the default");
    let now = clock::now();
    for (share, dead) in [(Share::Live, true), (Share::Batch, false)] {
        // It has no text, so it says nothing.
        let mut child = Child::start(&voice.config.program, &manner, share).expect("starts");
        assert!(child.read(Slot(0), now, None).outcome.failed.is_none());
        let later = child.read(Slot(0), now + 2 * STALLED, None);
        assert_eq!(later.outcome.failed.is_some(), dead, "{share:?}");
        child.kill();
        child.wait();
    }
}

/// Seen with 100 calls: each held a process until it had been heard out, and 37 were refused at a quarter of one core.
#[test]
fn a_child_ends_when_it_has_computed_its_utterance() {
    let Some(mut voice) = espeak() else { return };
    let text = "This is a long sentence that takes a while. ".repeat(10);
    voice.open(Slot(0), &utterance(&text)).expect("opens");
    // Nothing of it is taken by a step; other utterances are spoken meanwhile.
    for _ in 0..1_000 {
        speak(&mut voice, utterance("one"));
        if !voice.open.get_mut(&Slot(0)).expect("open").is_alive() {
            let mut out = Vec::new();
            let step = Step { stage: Stage::Vocode, slots: vec![Slot(0)], rounds: 1 };
            voice.run(&step, &mut out).expect("runs");
            assert!(!out[0].pcm.is_empty() && !out[0].outcome.done, "its audio is still there");
            return;
        }
    }
    panic!("the process waits for its listener");
}

/// The niceness of a process.
fn niceness(process: u32) -> i32 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).expect("it runs");
    // The fields behind the name in parentheses, from the third of `proc_pid_stat(5)` on; niceness is the 19th.
    let fields = stat.rsplit_once(')').expect("a name").1;
    fields.split_whitespace().nth(16).expect("19 fields").parse().expect("a number")
}

#[test]
fn children_give_way_to_what_sends_packets() {
    let Some(voice) = espeak() else { return };
    let manner = voice.manner(None, None, 1.0).expect("the default");
    let own = niceness(std::process::id());
    for (share, lower) in [(Share::Live, 5), (Share::Batch, 19)] {
        // It waits for its text, so it does not end before it is looked at.
        let mut child = Child::start(&voice.config.program, &manner, share).expect("starts");
        let found = niceness(child.id());
        child.kill();
        child.wait();
        assert_eq!(found, (own + lower).min(19), "{share:?}");
    }
}

/// Voices of different loudness come within a unit of each other, and of what is wanted, in what they say.
#[test]
fn voices_are_equally_loud() {
    let Ok(mut plain) = Espeak::new(Config::default()) else {
        return antiphon_skip::skip("espeak", "espeak-ng is not installed");
    };
    let mut level = Espeak::new(Config { loudness: Some(-22.0), ..Config::default() }).expect("as before");
    let text = "Thank you for calling. Your parcel will arrive on Tuesday afternoon, between two and four.";
    let spread = |voice: &mut Espeak| {
        let loudness = ["en-us", "en-gb", "fr", "en-us+f3", "en-us+m7"].map(|name| {
            let spoken = speak(voice, Utterance { voice: Some(name.into()), ..utterance(text) });
            assert!(spoken.iter().all(|sample| sample.abs() <= 1.0));
            loudness::measure(&spoken, crate::audio::RATE).expect("speech")
        });
        println!("{loudness:?}");
        let (least, most) = loudness.iter().fold((0f32, -99f32), |(a, b), one| (a.min(*one), b.max(*one)));
        most - least
    };
    let (before, after) = (spread(&mut plain), spread(&mut level));
    assert!(before > 1.5 && after <= 1.0, "{before} LU before, {after} after");
}

/// Each speaks its own language; numbers would leave two units between them.
#[test]
fn voices_of_other_languages_are_as_loud() {
    let Ok(mut voice) = Espeak::new(Config { loudness: Some(-22.0), ..Config::default() }) else {
        return antiphon_skip::skip("espeak", "espeak-ng is not installed");
    };
    let texts = [
        (
            "en-us",
            "Thank you for calling. Your parcel will arrive on Tuesday afternoon, between two and four. If you are not at \
             home, a neighbour can take it for you.",
        ),
        (
            "de",
            "Vielen Dank für Ihren Anruf. Ihr Paket kommt am Dienstag Nachmittag, zwischen zwei und vier Uhr. Wenn Sie \
             nicht zu Hause sind, kann ein Nachbar es annehmen.",
        ),
        (
            "fr",
            "Merci de votre appel. Votre colis arrivera mardi après-midi, entre deux et quatre heures. Si vous n'êtes pas \
             chez vous, un voisin peut le prendre.",
        ),
        (
            "es",
            "Gracias por su llamada. Su paquete llegará el martes por la tarde, entre las dos y las cuatro. Si no está en \
             casa, un vecino puede recogerlo.",
        ),
    ];
    let loudness = texts.map(|(name, text)| {
        let spoken = speak(&mut voice, Utterance { voice: Some(name.into()), ..utterance(text) });
        loudness::measure(&spoken, crate::audio::RATE).expect("speech")
    });
    println!("{loudness:?}");
    let (least, most) = loudness.iter().fold((0f32, -99f32), |(a, b), one| (a.min(*one), b.max(*one)));
    assert!(most - least <= 1.0, "{loudness:?}");
}
