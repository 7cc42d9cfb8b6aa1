//! Enrolment as a whole, on small random networks: recording in, voice out, through every door.

use std::path::Path;
use std::time::Duration;

use antiphon::voice::api::{Form, Service};
use antiphon::voice::bench::{speech, wav};
use antiphon::voice::cli::{self, Add, Command, Defaults, List, Remove};
use antiphon::voice::decode::Recording;
use antiphon::voice::enrol::{EnrolError, Enroller, Options, Request};
use antiphon::voice::file::Voice;
use antiphon::voice::onnx::Model;
use antiphon::voice::random::{self, CamPlusSize, TokenizerSize};
use antiphon::voice::store::{Store, VoiceName};

const NOW: Duration = Duration::from_secs(1_700_000_000);

fn checkpoint() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("temp dir");
    random::write_campplus(dir.path(), &CamPlusSize::tiny(), 1).expect("written");
    random::write_tokenizer(dir.path(), &TokenizerSize::tiny(6), 2).expect("written");
    dir
}

/// Seconds of silence, sound, silence, with faint noise.
fn recording(before: f64, seconds: u32, after: f64) -> Recording {
    let mut sound = speech(seconds);
    let rate = f64::from(sound.rate);
    let silence = sound.rate as usize / 5;
    let body = sound.samples[silence..sound.samples.len() - silence].to_vec();
    let all = [vec![0.0; (before * rate) as usize], body, vec![0.0; (after * rate) as usize]].concat();
    sound.samples = all.iter().enumerate().map(|(i, s)| s + 1e-3 * (i as f32 * 1.7).sin()).collect();
    sound
}

fn request(recording: &Recording) -> Request {
    Request {
        recording: wav(recording),
        transcript: "This is about as much as one says in the time that there is, give or take a word.".into(),
        consent: Some("I am the speaker and agree.".into()),
        languages: vec!["en".into()],
        now: NOW,
    }
}

#[test]
fn a_recording_becomes_a_voice_with_the_shortest_first_hop() {
    let model = checkpoint();
    let enroller = Enroller::open(model.path()).expect("opens");
    let enrolled = enroller.enrol(request(&recording(1.0, 6, 1.0)), &Options::default()).expect("enrols");
    let voice = &enrolled.voice;
    assert_eq!((voice.tokens.len() % 25, enrolled.first_hop), (17, 8));
    assert_eq!(voice.mel.len(), 2 * voice.tokens.len() * 80);
    assert_eq!((voice.mel_bins, voice.speaker.len()), (80, 192));
    assert!(voice.tokens.iter().all(|t| *t < 729));
    assert!((6.0..7.1).contains(&enrolled.quality.prompt_seconds), "{}", enrolled.quality.prompt_seconds);
    assert!(enrolled.quality.cut_seconds == 0.0);
    assert!((enrolled.quality.speech_seconds - 6.0).abs() < 0.1);
    let note = |key: &str| voice.notes.get(key).map(String::as_str);
    assert_eq!(note("created"), Some("2023-11-14T22:13:20Z"));
    assert_eq!(note("consent_date"), note("created"));
    assert_eq!(note("consent"), Some("I am the speaker and agree."));
    assert_eq!(note("languages"), Some("en"));
    assert_eq!(note("source_sha256").map(str::len), Some(64));
}

#[test]
fn the_same_recording_gives_the_same_voice_on_any_number_of_threads() {
    let model = checkpoint();
    let enroller = Enroller::open(model.path()).expect("opens");
    let make = |threads| {
        let options = Options { threads, ..Options::default() };
        enroller.enrol(request(&recording(0.5, 4, 0.7)), &options).expect("enrols").voice
    };
    let first = make(0);
    assert_eq!(first.to_bytes(), make(1).to_bytes());
    assert_eq!(first.to_bytes(), make(2).to_bytes());
}

#[test]
fn other_first_hops_can_be_asked_for() {
    let model = checkpoint();
    let enroller = Enroller::open(model.path()).expect("opens");
    for first_hop in [1, 10, 25] {
        let options = Options { first_hop, ..Options::default() };
        let enrolled = enroller.enrol(request(&recording(1.0, 4, 1.0)), &options).expect("enrols");
        assert_eq!((enrolled.voice.tokens.len() + first_hop) % 25, 0);
    }
    let options = Options { first_hop: 26, ..Options::default() };
    let error = enroller.enrol(request(&recording(1.0, 4, 1.0)), &options).expect_err("refused");
    assert!(matches!(error, EnrolError::FirstHop(26)));
}

#[test]
fn every_rate_ends_at_two_mel_frames_a_token() {
    let model = checkpoint();
    let enroller = Enroller::open(model.path()).expect("opens");
    for rate in [8_000, 11_025, 16_000, 22_050, 44_056, 48_000, 96_000] {
        let mut sound = recording(0.8, 4, 0.8);
        sound.samples = antiphon::voice::resample::resample(&sound.samples, sound.rate, rate);
        sound.rate = rate;
        let enrolled = enroller.enrol(request(&sound), &Options::default()).unwrap_or_else(|e| panic!("{rate}: {e}"));
        assert_eq!(enrolled.voice.mel.len(), 160 * enrolled.voice.tokens.len(), "{rate}");
        assert_eq!(enrolled.first_hop, 8, "{rate}");
    }
}

#[test]
fn thirty_seconds_are_taken_whole_but_for_the_prompt_s_last_tokens() {
    let model = checkpoint();
    let enroller = Enroller::open(model.path()).expect("opens");
    let enrolled = enroller.enrol(request(&speech(30)), &Options::default()).expect("enrols");
    assert_eq!(enrolled.quality.speech_seconds, 30.0);
    assert!(enrolled.quality.cut_seconds < 1.0, "{}", enrolled.quality.cut_seconds);
    assert_eq!(enrolled.voice.tokens.len(), 742, "of 750, the most with a hop of 8 to 15");
}

#[test]
fn unusable_requests_say_why() {
    let model = checkpoint();
    let enroller = Enroller::open(model.path()).expect("opens");
    let fail = |request: Request| enroller.enrol(request, &Options::default()).expect_err("refused").to_string();
    assert!(fail(request(&recording(2.0, 2, 2.0))).contains("at least 3 s"));
    assert!(fail(request(&recording(0.5, 31, 0.5))).contains("at most 30 s"));
    let mut silent = recording(0.0, 4, 0.0);
    silent.samples.fill(0.0);
    assert!(fail(request(&silent)).contains("silent"));
    let ok = request(&recording(1.0, 4, 1.0));
    assert!(fail(Request { transcript: "  ".into(), ..ok.clone() }).contains("transcript is empty"));
    assert!(fail(Request { languages: vec!["e n".into()], ..ok.clone() }).contains("language tag"));
    assert!(fail(Request { consent: Some("x".repeat(5000)), ..ok.clone() }).contains("consent"));
    assert!(fail(Request { recording: b"<html>".to_vec(), ..ok }).contains("no recording"));
}

#[test]
fn advice_follows_from_the_recording() {
    let model = checkpoint();
    let enroller = Enroller::open(model.path()).expect("opens");
    let codes = |request: Request| {
        let enrolled = enroller.enrol(request, &Options::default()).expect("enrols");
        enrolled.quality.advice.into_iter().map(|a| a.code).collect::<Vec<_>>()
    };
    let mut clipped = recording(1.0, 6, 1.0);
    clipped.samples.iter_mut().for_each(|s| *s = (*s * 8.0).clamp(-1.0, 1.0));
    assert!(codes(request(&clipped)).contains(&"clipping"));
    let mut noisy = recording(1.0, 6, 1.0);
    noisy.samples.iter_mut().enumerate().for_each(|(i, s)| *s += 0.03 * (i as f32 * 2.1).sin());
    assert!(codes(request(&noisy)).contains(&"noise"));
    let mut short_text = request(&recording(1.0, 12, 1.0));
    short_text.transcript = "Only this.".into();
    assert!(codes(short_text).contains(&"transcript_short"));
    assert!(codes(request(&recording(0.0, 5, 0.0))).contains(&"cut"));
}

#[test]
fn a_checkpoint_without_the_networks_is_named() {
    let empty = tempfile::tempdir().expect("temp dir");
    let error = Enroller::open(empty.path()).err().expect("refused").to_string();
    assert!(error.contains("campplus.onnx"), "{error}");
    std::fs::write(empty.path().join("campplus.onnx"), "no onnx").expect("write");
    std::fs::write(empty.path().join("speech_tokenizer_v3.onnx"), "no onnx").expect("write");
    assert!(Enroller::open(empty.path()).is_err());
    // The networks exchanged: every parameter is reported.
    let model = checkpoint();
    let (a, b) = (model.path().join("campplus.onnx"), model.path().join("speech_tokenizer_v3.onnx"));
    std::fs::copy(&a, empty.path().join("speech_tokenizer_v3.onnx")).expect("copy");
    std::fs::copy(&b, empty.path().join("campplus.onnx")).expect("copy");
    let error = Enroller::open(empty.path()).err().expect("refused").to_string();
    assert!(error.contains("`/conv1/Conv` is missing") && error.contains("is not used"), "{error}");
}

#[test]
fn a_network_whose_file_is_cut_short_while_it_is_used_says_so() {
    let model = checkpoint();
    let file = model.path().join("campplus.onnx");
    let network = Model::open(&file).expect("it is whole");
    let stored: Vec<&str> = network.in_order().flat_map(|node| network.stored_inputs(node)).collect();
    assert!(!stored.is_empty() && stored.iter().all(|edge| matches!(network.stored(edge), Some(Ok(_)))));
    // What is mapped would end the process here.
    std::fs::OpenOptions::new().write(true).open(&file).and_then(|file| file.set_len(100)).expect("cut");
    let said: Vec<String> = stored.iter().filter_map(|edge| network.stored(edge)?.err()).collect();
    assert!(!said.is_empty() && said.iter().all(|why| why.contains("campplus.onnx was written to")), "{said:?}");
}

#[test]
fn networks_of_other_sizes_are_sized_from_their_files() {
    let dir = tempfile::tempdir().expect("temp dir");
    let sizes = [
        (
            CamPlusSize { head: 6, tdnn: 20, growth: 6, bottleneck: 12, layers: vec![1, 2], embedding: 64 },
            TokenizerSize { bands: 80, width: 192, blocks: 3, mlp: 256, memory: 5, values: 5 },
        ),
        (
            CamPlusSize { head: 2, tdnn: 8, growth: 2, bottleneck: 4, layers: vec![3, 1, 1, 2], embedding: 17 },
            TokenizerSize { bands: 128, width: 64, blocks: 1, mlp: 64, memory: 31, values: 1 },
        ),
    ];
    for (campplus, tokenizer) in sizes {
        random::write_campplus(dir.path(), &campplus, 3).expect("written");
        random::write_tokenizer(dir.path(), &tokenizer, 4).expect("written");
        let enroller = Enroller::open(dir.path()).expect("opens");
        let voice = enroller.enrol(request(&recording(1.0, 4, 1.0)), &Options::default()).expect("enrols").voice;
        assert_eq!(voice.speaker.len(), campplus.embedding);
        assert!(voice.tokens.iter().all(|t| *t < 3_u32.pow(tokenizer.values as u32)));
    }
}

fn add(name: &str, wav: &Path, text: &str) -> Add {
    Add {
        name: name.into(),
        wav: wav.to_owned(),
        text: text.into(),
        consent: None,
        languages: None,
        model: None,
        voices: None,
        replace: false,
        first_hop: 8,
        pooling: "fixed".into(),
        level: -20.0,
        keep_level: false,
    }
}

fn run(command: Command, defaults: &Defaults) -> (u8, String, String) {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let code = cli::run(&command, defaults, &mut out, &mut err);
    (code, String::from_utf8(out).expect("text"), String::from_utf8(err).expect("text"))
}

#[test]
fn the_command_line_adds_lists_and_removes() {
    let model = checkpoint();
    let folder = tempfile::tempdir().expect("temp dir");
    let file = folder.path().join("me.mp3");
    // A wav by the name of another format: the name is never asked.
    std::fs::write(&file, wav(&recording(1.0, 6, 1.0))).expect("write");
    let defaults = Defaults { model: Some(model.path().to_owned()), voices: folder.path().join("voices") };
    let text = "This is about as much as one says in the time that there is, give or take a word.";

    let (code, out, err) = run(Command::Add(add("ann", &file, text)), &defaults);
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("first sound after 8 tokens") && err.contains("no consent"), "{out}{err}");
    let voice = Voice::load(&folder.path().join("voices/ann.safetensors")).expect("a voice file");
    assert_eq!(voice.transcript, text);

    assert_eq!(run(Command::Add(add("ann", &file, text)), &defaults).0, 1, "the name is taken");
    assert_eq!(run(Command::Add(Add { replace: true, ..add("ann", &file, text) }), &defaults).0, 0);
    assert_eq!(run(Command::Add(add("../ann", &file, text)), &defaults).0, 2);
    assert_eq!(run(Command::Add(add("bob", &file, "")), &defaults).0, 2);
    assert_eq!(run(Command::Add(add("bob", Path::new("/nowhere.wav"), text)), &defaults).0, 1);
    let bare = Defaults { model: None, ..defaults.clone() };
    assert_eq!(run(Command::Add(add("bob", &file, text)), &bare).0, 69);

    let (code, out, _) = run(Command::List(List { voices: None, json: false }), &defaults);
    assert!(code == 0 && out.contains("ann") && out.contains("This is about"), "{out}");
    let (_, out, _) = run(Command::List(List { voices: None, json: true }), &defaults);
    let listed: serde_json::Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!(listed[0]["id"], voice.content_id());

    let rm = |name: &str| Command::Rm(Remove { name: name.into(), voices: None });
    assert_eq!(run(rm("ann"), &defaults).0, 0);
    assert_eq!(run(rm("ann"), &defaults).0, 1);
}

#[test]
fn the_service_enrols_for_a_running_gateway() {
    let model = checkpoint();
    let folder = tempfile::tempdir().expect("temp dir");
    let store = Store::open(folder.path());
    let enroller = Enroller::open(model.path()).expect("opens");
    let service = Service::new(store.clone(), Some(enroller), Options { threads: 1, ..Options::default() });
    let form = Form {
        audio_sample: wav(&recording(1.0, 6, 1.0)),
        name: "eve".into(),
        ref_text: "This is about as much as one says in the time that there is, give or take.".into(),
        consent: Some("yes".into()),
        languages: Some("en, de".into()),
        replace: false,
        owner: None,
    };
    let added = service.add(form.clone(), NOW).expect("added");
    assert_eq!(added.first_hop_tokens, 8);
    assert_eq!(added.voice.languages, ["en", "de"]);
    assert!(added.voice.consent);
    assert_eq!(service.list().voices, std::slice::from_ref(&added.voice));
    let json = serde_json::to_value(&added).expect("JSON");
    assert!(json["quality"]["speechSeconds"].as_f64().is_some_and(|s| (s - 6.0).abs() < 0.1), "{json}");

    let refused = |form: Form| {
        let refusal = service.add(form, NOW).expect_err("refused");
        (refusal.status, refusal.code, refusal.param)
    };
    assert_eq!(refused(form.clone()), (409, "voice_exists", Some("name")));
    assert_eq!(refused(Form { name: "a/b".into(), ..form.clone() }), (400, "invalid_name", Some("name")));
    let other = Form { name: "other".into(), ..form };
    assert_eq!(
        refused(Form { audio_sample: b"<html>".to_vec(), ..other.clone() }),
        (400, "invalid_audio", Some("audio_sample"))
    );
    assert_eq!(
        refused(Form { audio_sample: Vec::new(), ..other.clone() }),
        (400, "missing_field", Some("audio_sample"))
    );
    assert_eq!(refused(Form { ref_text: String::new(), ..other.clone() }).1, "invalid_transcript");
    let without = Service::new(store, None, Options::default());
    assert_eq!(without.add(other, NOW).expect_err("refused").status, 501);

    service.remove("eve").expect("removed");
    assert_eq!(service.remove("eve").expect_err("gone").status, 404);
    assert!(!service.store().path(&VoiceName::new("eve").expect("name")).exists());
}

#[test]
fn a_form_is_filled_field_by_field() {
    let mut form = Form::default();
    let fields = [("audio_sample", "RIFF"), ("name", "eve"), ("ref_text", "what is said"), ("replace", "true")];
    for (field, value) in fields {
        assert!(Form::limit(field).is_some_and(|limit| limit >= value.len()), "{field}");
        form.set(field, value.into()).expect("a known field");
    }
    assert_eq!((form.name.as_str(), form.audio_sample.as_slice(), form.replace), ("eve", &b"RIFF"[..], true));
    let refused = |field: &str, value: &[u8]| Form::default().set(field, value.to_vec()).expect_err("refused").message;
    assert!(refused("nome", b"eve").contains("`audio_sample`"));
    assert!(refused("name", b"\xff").contains("UTF-8"));
    assert!(refused("replace", b"perhaps").contains("true or false"));
    assert!(refused("name", &[b'a'; 5000]).contains("at most"));
}

#[test]
fn only_one_voice_is_enrolled_at_a_time() {
    let model = checkpoint();
    let folder = tempfile::tempdir().expect("temp dir");
    let enroller = Enroller::open(model.path()).expect("opens");
    let service = Service::new(Store::open(folder.path()), Some(enroller), Options::default());
    let audio_sample = wav(&recording(1.0, 10, 1.0));
    let form = |name: String| Form {
        audio_sample: audio_sample.clone(),
        name,
        ref_text: "This is about as much as one says in the time that there is.".into(),
        ..Form::default()
    };
    let (service, form) = (&service, &form);
    let mut outcomes = Vec::new();
    // Two at once, until one was told to come back: threads that never meet prove nothing.
    for round in 0..20 {
        outcomes.extend(std::thread::scope(|scope| {
            let add = |n: usize| scope.spawn(move || service.add(form(format!("v{round}-{n}")), NOW));
            [add(0), add(1)].map(|thread| thread.join().expect("no panic"))
        }));
        if outcomes.iter().any(Result::is_err) {
            break;
        }
    }
    let busy: Vec<_> = outcomes.iter().filter_map(|o| o.as_ref().err()).collect();
    assert!(!busy.is_empty(), "two were enrolled at a time");
    assert!(busy.iter().all(|b| b.code == "enrolment_busy" && b.retry_after.is_some()), "{busy:?}");
    assert_eq!(service.list().voices.len() + busy.len(), outcomes.len());
}
