//! A voice bot as somebody makes one who has read the README: its table, `antiphon serve`, a telephone and a browser. Callers
//! speak recorded words, hear the answer, and interrupt it. The model and the recogniser behind it are imitations on this
//! machine, which answer as their documentation says.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use antiphon_loadgen::call::{Call, now};
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::heard::Clip;
use antiphon_loadgen::{rtc, sip, wav};
use axum::Json;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::post;
use serde_json::{Value, json};

use super::chromium::Page;
use super::hears::{TEXT, service};
use super::program::Serve;
use super::support::{PATIENCE, SENTENCE};
use super::voice::voice;

/// Of a first answer that is interrupted.
const SENTENCES: usize = 8;
/// Every later answer.
const SHORT: &str = "Very well.";

/// What the model was asked: the messages of each request.
type Asked = Arc<Mutex<Vec<Vec<(String, String)>>>>;

/// A model's server. It answers the first message at length and later ones shortly, word by word.
async fn model() -> (String, Asked) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}/v1", listener.local_addr().expect("bound"));
    let asked = Asked::default();
    let app = axum::Router::new().route("/v1/chat/completions", post(complete)).with_state(asked.clone());
    tokio::spawn(async move { axum::serve(listener, app).await });
    (url, asked)
}

async fn complete(State(asked): State<Asked>, Json(body): Json<Value>) -> impl IntoResponse {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let messages = body["messages"].as_array().expect("messages").iter();
    let messages: Vec<_> = messages.map(|one| (text(&one["role"]), text(&one["content"]))).collect();
    let first = messages.iter().filter(|(role, _)| role == "user").count() == 1;
    asked.lock().expect("whole").push(messages);
    let answer = if first { SENTENCE.to_owned() + &format!(" {SENTENCE}").repeat(SENTENCES - 1) } else { SHORT.into() };
    let chunk = |delta: Value, finish: Value| {
        let choice = json!({ "index": 0, "delta": delta, "finish_reason": finish });
        format!("data: {}\n\n", json!({ "object": "chat.completion.chunk", "choices": [choice] }))
    };
    let words: String =
        answer.split_inclusive(' ').map(|word| chunk(json!({ "content": word }), Value::Null)).collect();
    let stream = format!("{words}{}data: [DONE]\n\n", chunk(json!({}), json!("stop")));
    ([(CONTENT_TYPE, "text/event-stream")], stream)
}

/// `antiphon serve -c bot.toml` with the README's configuration, but for the addresses of what is behind it.
async fn serve(folder: &Path) -> (Serve, Asked) {
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).expect("readable");
    let toml = readme.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a configuration");
    let (model, asked) = model().await;
    let (there, hears) = ("http://127.0.0.1:8000/v1", "model = \"whisper-tiny.en\"");
    assert!(toml.contains(there) && toml.contains(hears), "{toml}");
    let toml = toml.replace(there, &model).replace(hears, &format!("url = \"{}\"", service().await));
    std::fs::write(folder.join("bot.toml"), toml).expect("written");
    let serve = Serve::start(folder, &folder.join("state"), |command| {
        command.args(["-c", "bot.toml"]);
        // A busy machine is late, and refuses nothing here.
        command
            .env("ANTIPHON_SCHEDULER__FIRST_AUDIO_TARGET_MS", "60000")
            .env("ANTIPHON_RECOGNIZER__TIMEOUT_MS", "20000");
    });
    serve.ready().await;
    (serve, asked)
}

/// Waits until the model is asked about the second thing that a caller said; gives what of the first answer it was told.
async fn cut_off(asked: &Asked) -> String {
    let began = now();
    loop {
        let requests = std::mem::take(&mut *asked.lock().expect("whole"));
        for messages in &requests {
            assert_eq!(messages[0], ("system".into(), "Be brief.".into()));
            let said = messages.iter().filter(|(role, _)| role == "user");
            assert!(said.clone().all(|(_, text)| text == TEXT), "{messages:?}");
            if said.count() >= 2 {
                let answer = messages.iter().find(|(role, _)| role == "assistant");
                return answer.map(|(_, text)| text.clone()).unwrap_or_default();
            }
        }
        assert!(now() - began < PATIENCE, "the second question does not come: {requests:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// That a model was told of its first answer what the caller heard of it, and that it was cut off.
fn assert_interrupted(heard: &str) {
    let whole = SENTENCE.to_owned() + &format!(" {SENTENCE}").repeat(SENTENCES - 1);
    let words = heard.strip_suffix(" …").unwrap_or_else(|| panic!("not cut off: {heard:?}"));
    assert!(whole.starts_with(words) && words.len() > 10 && words.len() < whole.len(), "{heard:?}");
}

/// The caller speaks, hears the answer, speaks over it, and hears the next one.
async fn talks(call: &Call, asked: &Asked) {
    let said = call.say(&voice()).await.expect("the caller speaks") + voice().duration();
    let answer = call.onset(said, PATIENCE).await.expect("an answer is heard");
    // Some words of it.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let over = call.say(&voice()).await.expect("the caller speaks over it");
    assert!(over > answer);
    let silent = call.silence(over, Duration::from_millis(300), PATIENCE).await.expect("the answer stops");
    assert_interrupted(&cut_off(asked).await);
    call.onset(silent.max(over + voice().duration()), PATIENCE).await.expect("the next answer is heard");
    call.hang_up().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_bot_of_the_readme_hears_answers_and_is_interrupted_by_telephone_and_browser() {
    let folder = tempfile::tempdir().expect("a folder");
    let (mut serve, asked) = serve(folder.path()).await;
    let telephone = sip::Config { codecs: vec![Codec::Pcmu], ..sip::Config::default() };
    let telephone = sip::Caller::bind(telephone).await.expect("free ports");
    let call = telephone.call(&format!("sip:bot@{}", serve.sip)).await.expect("answered");
    talks(&call, &asked).await;
    let browser = rtc::Config { agent: Some("bot".into()), ..rtc::Config::new(serve.http.clone()) };
    talks(&rtc::Caller::connect(browser).await.expect("answered"), &asked).await;
    assert_eq!(serve.terminate().await, Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_bot_of_the_readme_hears_and_is_interrupted_by_somebody_at_chromium() {
    if !antiphon_skip::has_program("chromium", "chromium") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let (serve, asked) = serve(folder.path()).await;
    // The same words again and again, which speak over the first answer.
    let Clip { rate, pcm: words } = voice();
    let pause = |seconds: u32| std::iter::repeat_n(0.0, (rate * seconds) as usize);
    let microphone = folder.path().join("words.wav");
    let pcm = pause(1).chain(words).chain(pause(5)).collect();
    wav::write(&microphone, &Clip { rate, pcm }).expect("written");
    let mut page = Page::open(&microphone).await;
    page.ask("Page.navigate", json!({ "url": serve.http })).await;
    page.until("document.readyState == 'complete'", "document.readyState").await;
    // Without a click a page may not make a sound.
    page.click("tab-talk").await;
    page.value(
        "window.seen = []; import('/antiphon.js').then(async ({ connect }) => { \
           window.call = await connect({ agent: 'bot' }); \
           window.call.addEventListener('level', e => (window.loudest = Math.max(window.loudest ?? -100, e.detail.output))); \
           window.call.addEventListener('caption', e => window.seen.push(e.detail)); })",
    )
    .await;
    let state = "window.call?.state + ' ' + JSON.stringify(window.seen?.slice(-5))";
    page.until(&format!("window.seen.some(c => c.who == 'caller' && c.text == {TEXT:?})"), state).await;
    page.until("window.seen.some(c => c.who == 'agent' && c.heard?.startsWith('The quick brown fox'))", state).await;
    page.until("window.loudest > -50", "window.loudest").await;
    assert_interrupted(&cut_off(&asked).await);
    page.until(&format!("window.seen.some(c => c.who == 'agent' && c.text == {SHORT:?})"), state).await;
    page.value("window.call.hangUp()").await;
}
