//! From a recording to a live caller's ear: voices are enrolled while the gateway runs, over HTTP and by the command
//! line beside it, and calls are answered with them; who speaks meanwhile does not notice. The networks are small and
//! random; the way is the product's.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use antiphon::synth::cosyvoice::random as checkpoint;
use antiphon::voice::bench::{speech, wav};
use antiphon::voice::random::{self, CamPlusSize, TokenizerSize};
use antiphon_loadgen::call::{Call, now};
use antiphon_loadgen::clock::sleep_until;
use antiphon_loadgen::codec::Codec;
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::time::timeout;

use super::support::{PATIENCE, Rig, gaps, hear_turn_at_last, speak_with};

/// Ternary digits of a speech token of the small checkpoint.
pub(crate) const FITTING: usize = 5;

pub(crate) const TRANSCRIPT: &str = "This is about as much as one says in five seconds, give or take a word.";

/// A checkpoint with everything in it, the speech tokens and speaker vectors of both halves of one size.
pub(crate) fn write_model(dir: &Path, values: usize) {
    checkpoint::write(dir, checkpoint::Size::Tiny, 1, |_, _| ()).expect("written");
    random::write_campplus(dir, &CamPlusSize::tiny(), 1).expect("written");
    random::write_tokenizer(dir, &TokenizerSize::tiny(values), 2).expect("written");
}

async fn enrol(rig: &Rig, name: &str, recording: Vec<u8>) -> (u16, Value) {
    let fields = [("name", name), ("ref_text", TRANSCRIPT), ("consent", "I am the speaker and agree.")];
    let mut body = Vec::new();
    for (field, value) in fields {
        body.extend(format!("--part\r\nContent-Disposition: form-data; name=\"{field}\"\r\n\r\n{value}\r\n").bytes());
    }
    body.extend(b"--part\r\nContent-Disposition: form-data; name=\"audio_sample\"; filename=\"a.wav\"\r\n\r\n");
    body.extend(recording);
    body.extend(b"\r\n--part--\r\n");
    let request = rig.client.post(format!("{}/v1/audio/voices", rig.http));
    let request = request.header("content-type", "multipart/form-data; boundary=part").body(body);
    let response = request.send().await.expect("HTTP");
    (response.status().as_u16(), response.json().await.unwrap_or(Value::Null))
}

/// Has `voice` speak on `call`; gives the status.
async fn ask(rig: &Rig, call: &Call, voice: &str, text: &str) -> (u16, Value) {
    let id = call.id().expect("the answer names the call");
    rig.post(&format!("/v1/calls/{id}/turns"), json!({ "text": text, "voice": voice })).await
}

/// A busy machine computes too little for two who speak: there is room again when the other has been computed.
async fn is_heard(rig: &Rig, voice: &str) {
    let call = rig.telephone_at_last("silent", Codec::Pcmu).await;
    let until = now() + PATIENCE;
    let asked = loop {
        let asked = now();
        match ask(rig, &call, voice, "Hello, it is me.").await {
            (202, _) => break asked,
            (503, _) if now() < until => sleep_until(now() + Duration::from_millis(100)).await,
            answer => panic!("{answer:?}"),
        }
    };
    hear_turn_at_last(&call, asked).await;
    call.hang_up().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recording_becomes_a_voice_on_live_calls_and_other_callers_notice_nothing() {
    let model = tempfile::tempdir().expect("a folder");
    write_model(model.path(), FITTING);
    let voices = tempfile::tempdir().expect("a folder");
    let rig = Rig::with(|config| {
        speak_with(config, model.path());
        config.engine.voices = voices.path().to_owned();
        config.engine.voice = Some("random".into());
    })
    .await;

    // Somebody speaks all the while.
    let other = rig.telephone("silent", Codec::Pcmu).await;
    let asked = rig.speak(&other, &"And this goes on while voices come and go. ".repeat(6)).await;
    let onset = other.onset(asked, PATIENCE).await.expect("speech is heard");

    // Over HTTP: it speaks when the answer is there.
    let (status, added) = enrol(&rig, "anna", wav(&speech(5))).await;
    assert_eq!(status, 201, "{added}");
    assert!(voices.path().join("anna.safetensors").is_file());
    is_heard(&rig, "anna").await;

    // By the command line beside the gateway: it speaks soon.
    let recording = voices.path().join("berta.wav");
    std::fs::write(&recording, wav(&speech(6))).expect("written");
    let output = Command::new(env!("CARGO_BIN_EXE_antiphon"))
        .args(["voice", "add", "berta", "--text", TRANSCRIPT, "--wav"])
        .arg(&recording)
        .arg("--model")
        .arg(model.path())
        .arg("--voices")
        .arg(voices.path())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = timeout(PATIENCE, output).await.expect("it ends").expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let deadline = now() + PATIENCE;
    while !rig.app.gateway().engine.voices().iter().any(|voice| voice.name == "berta") {
        assert!(now() < deadline, "the running gateway notices the file");
        sleep_until(now() + Duration::from_millis(50)).await;
    }
    is_heard(&rig, "berta").await;
    let (_, listed) = rig.get("/v1/audio/voices").await;
    let names: Vec<&str> =
        listed["voices"].as_array().into_iter().flatten().filter_map(|voice| voice["name"].as_str()).collect();
    assert!(["anna", "berta", "random"].iter().all(|name| names.contains(name)), "{listed}");

    let (_, end) = hear_turn_at_last(&other, asked).await;
    assert_eq!(gaps(&other.ear().heard(), onset, end), []);
    other.hang_up().await;

    // And away again.
    let response = rig.client.delete(format!("{}/v1/audio/voices/anna", rig.http)).send().await.expect("HTTP");
    assert_eq!(response.status(), 204);
    assert!(!rig.app.gateway().engine.voices().iter().any(|voice| voice.name == "anna"));
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recording_that_cannot_be_used_is_refused_with_the_reason() {
    let model = tempfile::tempdir().expect("a folder");
    // Its tokenizer makes tokens that the flow does not know.
    write_model(model.path(), FITTING + 1);
    let rig = Rig::with(|config| {
        speak_with(config, model.path());
        config.engine.voices = model.path().join("enrolled");
    })
    .await;
    for (recording, code) in [
        (b"<html>".to_vec(), "invalid_audio"),
        (wav(&speech(2)), "speech_too_short"),
        (wav(&speech(32)), "speech_too_long"),
    ] {
        let (status, error) = enrol(&rig, "nobody", recording).await;
        assert_eq!((status, error["error"]["code"].as_str()), (400, Some(code)), "{error}");
    }
    let (status, error) = enrol(&rig, "foreign", wav(&speech(4))).await;
    assert_eq!((status, error["error"]["code"].as_str()), (500, Some("voice_unusable")), "{error}");
    let (status, error) = enrol(&rig, "../nobody", wav(&speech(4))).await;
    assert_eq!((status, error["error"]["code"].as_str()), (400, Some("invalid_name")), "{error}");
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_voice_that_was_enrolled_at_one_gateway_is_spoken_by_another() {
    let Some(redis) = super::nodes::Redis::start() else { return };
    let model = tempfile::tempdir().expect("a folder");
    write_model(model.path(), FITTING);
    let folders = [tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder")];
    std::fs::rename(model.path().join("voices/random-k10.safetensors"), folders[0].path().join("anna.safetensors"))
        .expect("moved");
    let gateway = async |name: &str, folder: &Path| {
        let (model, folder) = (model.path().to_owned(), folder.to_owned());
        let change = move |config: &mut antiphon::config::Config| {
            speak_with(config, &model);
            config.engine.voices = folder;
        };
        redis.gateway(name, change).await
    };
    let (a, b) = (gateway("a", folders[0].path()).await, gateway("b", folders[1].path()).await);
    super::nodes::knows(&b, &["a"]).await;
    let named = async |rig: &Rig| rig.get("/v1/audio/voices").await.1.to_string().contains("\"anna\"");
    let told = async {
        while !named(&b).await {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(PATIENCE, told).await.expect("the other gateway hears of it");
    assert!(!folders[1].path().join("copies").exists(), "and takes it when somebody wants to hear it");
    let say = async |rig: &Rig| {
        let body = json!({ "model": "m", "input": "Hello.", "voice": "anna", "response_format": "pcm", "seed": 7 });
        let answer = rig.client.post(format!("{}/v1/audio/speech", rig.http)).json(&body).send().await.expect("HTTP");
        assert_eq!(answer.status(), 200);
        answer.bytes().await.expect("whole")
    };
    let (there, here) = tokio::join!(say(&a), say(&b));
    assert!(there.len() > 1_000 && there == here, "{} and {} bytes", there.len(), here.len());
    assert_eq!(say(&b).await, there);
    assert_eq!(std::fs::read_dir(folders[1].path().join("copies")).expect("made").count(), 1);
    for rig in [a, b] {
        rig.app.drain().await;
    }
}
