//! `antiphon.js` in a real browser, on the page that the README shows, from another origin, with a single-use token.

mod features;
mod types;

use std::time::Duration;

use antiphon::agent::config::Agent;
use antiphon::call::{CallEvent, Interruptible};
use antiphon::server::config::{Scope, Token};
use antiphon_loadgen::agent::Server;
use antiphon_loadgen::call::now;
use antiphon_loadgen::heard::Clip;
use antiphon_loadgen::wav;
use axum::Router;
use axum::response::Html;
use axum::routing::get;
use serde_json::{Value, json};

use super::chromium::Page;
use super::support::{PATIENCE, Rig, SENTENCE};

const KEY: &str = "key-key-key-key-key-key";
/// What a failed wait shows.
const STATE: &str = "document.body.innerText + ' / ' + window.call?.state + ' / ' + JSON.stringify(window.seen)";

/// The page of the README, for this gateway and token; its call can be reached from outside.
fn page(gateway: &str, token: &str) -> String {
    let readme = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
    let readme = std::fs::read_to_string(readme).expect("readable");
    let page =
        readme.split("```html\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a page in the README");
    assert!(
        page.contains("https://gateway.example.com/") && page.contains(r#"connect({ agent: "support" })"#),
        "{page}"
    );
    let watch = "window.call = call; window.seen = []; \
        call.addEventListener('ended', e => (window.ended = e.detail.reason)); \
        call.addEventListener('level', e => (window.loudest = Math.max(window.loudest ?? -100, e.detail.input))); \
        call.addEventListener('caption', e => window.seen.push(e.detail));\n    call.addEventListener(";
    page.replace("https://gateway.example.com", gateway)
        .replace(r#"{ agent: "support" }"#, &format!(r#"{{ token: "{token}" }}"#))
        .replacen("call.addEventListener(", watch, 1)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_of_the_readme_calls_from_another_origin_and_shows_words_as_they_are_heard() {
    if !antiphon_skip::has_program("chromium", "chromium") {
        return;
    }
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let origin = format!("http://{}", listener.local_addr().expect("bound"));
    let mut server = Server::bind("127.0.0.1:0".parse().expect("an address")).await.expect("a free port");
    let rig = Rig::with(|config| {
        config.http.tokens = vec![Token::new("shop", KEY, vec![Scope::Calls])];
        config.http.cors = vec![origin.clone()];
        // The recording below is no interruption.
        config
            .agent
            .insert("support".into(), Agent { interruptible: Some(Interruptible::None), ..Agent::at(&server.url()) });
    })
    .await;
    let body = json!({ "agent": "support", "origin": origin });
    let issued = rig.client.post(format!("{}/v1/tokens", rig.http)).bearer_auth(KEY).json(&body);
    let issued: Value = issued.send().await.expect("HTTP").json().await.expect("JSON");
    let page = page(&rig.http, issued["token"].as_str().expect("a token"));
    let site = Router::new().route("/", get(async || Html(page)));
    tokio::spawn(async { axum::serve(listener, site).await });

    // A person who says something now and then.
    let folder = tempfile::tempdir().expect("a folder");
    let words = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/whisper/audio.wav");
    let mut words = wav::read(words).expect("recorded words");
    words.pcm.extend(vec![0.0; words.rate as usize * 2]);
    let microphone = folder.path().join("words.wav");
    wav::write(&microphone, &Clip { rate: words.rate, pcm: words.pcm }).expect("written");

    let mut page = Page::open(&microphone).await;
    page.ask("Page.navigate", json!({ "url": origin })).await;
    page.until("document.getElementById('call')?.onclick != null", "document.body.innerText").await;
    page.click("call").await;
    let mut session = server.next_session(PATIENCE).await.expect("the gateway dials the agent of the token");
    page.until("window.call?.state == 'connected'", STATE).await;
    session.recv_type("vad", PATIENCE).await.expect("the recorded words reach the agent");
    page.until("window.loudest > -50", STATE).await;

    session.say(SENTENCE).await.expect("sent");
    page.until(&format!("document.getElementById('said').textContent == {SENTENCE:?}"), STATE).await;
    page.until("window.seen.at(-1).final == true", STATE).await;
    let seen = page.value("window.seen.filter(c => c.who == 'agent')").await;
    let heard: Vec<&str> = seen.as_array().expect("captions").iter().filter_map(|c| c["heard"].as_str()).collect();
    assert!(heard.iter().all(|words| SENTENCE.starts_with(words)), "{heard:?}");
    let grows = heard.windows(2).filter(|pair| pair[1].len() > pair[0].len()).count();
    assert!(grows >= 2, "word after word: {heard:?}");
    let first = seen[0]["text"].as_str().expect("a text");
    assert!(!first.is_empty() && SENTENCE.starts_with(first), "{first}");

    page.value("window.call.hangUp()").await;
    rig.app.drain().await;
}

/// A browser that leaves silence out is heard: its words begin and end, and between them next to nothing comes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_browser_that_is_asked_for_dtx_sends_its_words_and_not_its_silence() {
    if !antiphon_skip::has_program("chromium", "chromium") {
        return;
    }
    let rig = Rig::with(|config| config.webrtc.dtx = true).await;
    let folder = tempfile::tempdir().expect("a folder");
    let words = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/whisper/audio.wav");
    let Clip { rate, mut pcm } = wav::read(words).expect("recorded words");
    pcm.extend(vec![0.0; rate as usize * 10]);
    let microphone = folder.path().join("words.wav");
    wav::write(&microphone, &Clip { rate, pcm }).expect("written");
    let mut page = Page::open(&microphone).await;
    page.ask("Page.navigate", json!({ "url": format!("{}/", rig.http) })).await;
    page.until("document.getElementById('health')?.textContent == 'ready'", "document.body.innerText").await;
    // The browser's own suppression of noise would do the same for another reason.
    page.value(
        "import('/antiphon.js').then(async ({ connect }) => { \
           window.call = await connect({ agent: 'silent', noiseSuppression: false, autoGainControl: false }); \
           window.sent = async () => [...(await call._peer.getStats()).values()] \
             .find(report => report.type == 'outbound-rtp').packetsSent; \
         }).catch(e => (window.failed = String(e))), 0",
    )
    .await;
    page.until("window.call?.state == 'connected' && window.sent != null", "String(window.failed)").await;
    let id = page.value("window.call.id").await;
    let call = rig.handle_of(id.as_str().expect("an id")).await;
    let mut events = call.events();
    let mut next = async |wanted: bool| {
        let heard = async {
            loop {
                if let CallEvent::Vad { speaking } = events.recv().await.expect("the call lives")
                    && speaking == wanted
                {
                    return;
                }
            }
        };
        tokio::time::timeout(PATIENCE, heard).await.expect("the detector sees it");
    };
    // From the end of its words to their next begin: ten seconds, or 500 packets of a browser that sends all.
    next(true).await;
    let sent = loop {
        next(false).await;
        let (before, began) = (page.value("window.sent()").await.as_u64().expect("a count"), now());
        next(true).await;
        let after = page.value("window.sent()").await.as_u64().expect("a count");
        // Shorter ones are pauses among its words.
        if began.elapsed() > Duration::from_secs(7) {
            break after - before;
        }
    };
    assert!(sent < 150, "{sent} packets in ten seconds of silence");
    page.value("window.call.hangUp()").await;
    rig.app.drain().await;
}
