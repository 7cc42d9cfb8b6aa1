//! The small random checkpoint of `tests/data/whisper` against what the reference makes of it.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::*;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/whisper")
}

fn whisper() -> &'static Whisper {
    static LOADED: OnceLock<Whisper> = OnceLock::new();
    LOADED.get_or_init(|| Whisper::load(&folder()).expect("the kit loads"))
}

fn sound() -> Vec<f32> {
    let reader = hound::WavReader::open(folder().join("audio.wav")).expect("there");
    reader.into_samples::<i16>().map(|sample| crate::audio::from_i16(sample.expect("whole"))).collect()
}

#[test]
fn every_stage_gives_the_numbers_of_the_reference() {
    let report = selftest::run(&folder()).expect("the kit runs");
    assert!(report.passed(), "{report}");
    assert!(report.rows.iter().all(|row| row.pass == Some(true)), "{report}");
    assert!(report.rows.len() >= 13, "{report}");
}

#[test]
fn a_turn_gives_the_same_text_every_time_and_no_longer_than_it_can_be() {
    let options = Options { seed: 3, ..Options::default() };
    let text = || whisper().transcribe(&sound(), &options, &Stop::default()).expect("runs").expect("not stopped");
    let first = text();
    assert_eq!(first, text());
    assert_eq!(first.language, "en");
    assert!((0.0..=1.0).contains(&first.confidence) && (0.0..=1.0).contains(&first.no_speech), "{first:?}");
    // Random weights write until they may not: at most so many tokens of at most some bytes each.
    assert!(first.text.len() < (16 + 24 * 6) * 16, "{}", first.text.len());
}

#[test]
fn sound_longer_than_a_window_is_heard_to_its_end() {
    let long = sound().repeat(13);
    let options = Options {
        temperatures: vec![0.0],
        limits: Limits { compression: 1e9, ..Limits::default() },
        ..Options::default()
    };
    let heard = whisper().transcribe(&long, &options, &Stop::default()).expect("runs").expect("not stopped");
    let seconds = long.len() as f64 / RATE as f64;
    assert!(heard.segments.iter().all(|s| 0.0 <= s.start && s.start <= s.end && s.end <= seconds), "{heard:?}");
    assert!(heard.segments.windows(2).all(|pair| pair[0].start <= pair[1].start), "{heard:?}");
    assert!(whisper().transcribe(&[], &options, &Stop::default()).expect("runs").expect("whole").text.is_empty());
}

#[test]
fn a_recognition_that_is_given_up_stops_and_a_language_it_does_not_know_is_refused() {
    let stop = Stop::default();
    stop.set();
    assert_eq!(whisper().transcribe(&sound(), &Options::default(), &stop).expect("runs"), None);
    let options = Options { language: Some("de-DE".into()), ..Options::default() };
    let error = whisper().transcribe(&sound(), &options, &Stop::default()).expect_err("English only");
    assert!(error.to_string().contains("de-DE"), "{error}");
    assert!(whisper().knows("en-US") && !whisper().knows("de"));
}

#[test]
fn a_directory_is_checked_in_one_report() {
    let report = verify::verify(&folder());
    assert!(report.passed(), "{report}");
    assert_eq!(report.values, 418_816);
    let copy = tempfile::tempdir().expect("a folder");
    for name in ["config.json", "generation_config.json", "preprocessor_config.json", "tokenizer.json"] {
        std::fs::copy(folder().join(name), copy.path().join(name)).expect("copied");
    }
    let missing = verify::verify(copy.path());
    assert!(missing.problems[0].contains("model.safetensors"), "{missing}");
    let weights = std::fs::read(folder().join("model.safetensors")).expect("there");
    std::fs::write(copy.path().join("model.safetensors"), &weights[..weights.len() - 4]).expect("written");
    assert!(verify::verify(copy.path()).problems[0].contains("asks for"));
    std::fs::write(copy.path().join("model.safetensors"), &weights).expect("written");
    let config = std::fs::read_to_string(folder().join("config.json")).expect("there");
    let wider = config.replace("\"decoder_ffn_dim\": 256", "\"decoder_ffn_dim\": 128");
    std::fs::write(copy.path().join("config.json"), wider).expect("written");
    // Weight and bias of one layer, the weight of the other, in both layers of the decoder.
    let narrower = verify::verify(copy.path());
    assert_eq!(narrower.problems.len(), 6, "{narrower}");
    assert!(matches!(Whisper::load(copy.path()), Err(LoadError::Tensor { .. })));
    std::fs::write(copy.path().join("config.json"), config.replace("\"d_model\": 64", "\"d_model\": 9999999999"))
        .expect("written");
    assert!(verify::verify(copy.path()).problems[0].contains("d_model"));
}
