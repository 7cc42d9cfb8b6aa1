//! The console in a real browser: it calls, hears, shows what is said, and fits a desk and a telephone.

use std::path::Path;

use antiphon::agent::config::Agent;
use antiphon::server::config::Token;
use antiphon_loadgen::synthetic;
use antiphon_loadgen::wav;
use serde_json::json;

use super::browser::{self, Browser, axe, inspect, inspect_panels, keep, words};
use super::chromium::Page;
use super::hears::{TEXT, service};
use super::support::{PATIENCE, Rig, speak_with};
use super::workers::{self, Worker};

/// What a failed wait shows.
const STATE: &str = "document.getElementById('problem').textContent + ' / ' + \
    document.getElementById('state').textContent + ' / ' + document.getElementById('captions').textContent";

/// The console of `rig`, ready.
pub(crate) async fn open(rig: &Rig, microphone: &Path) -> Page {
    let mut page = Page::open(microphone).await;
    page.resize(1280, 800).await;
    page.ask("Page.navigate", json!({ "url": format!("{}/", rig.http) })).await;
    page.until("document.getElementById('health')?.textContent == 'ready'", "document.body.innerText").await;
    page
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_console_asks_for_a_token_once() {
    if !antiphon_skip::has_program("chromium", "chromium") {
        return;
    }
    const KEY: &str = "key-key-key-key-key-key";
    let rig = Rig::with(|config| config.http.tokens = vec![Token::new("ops", KEY, Vec::new())]).await;
    let folder = tempfile::tempdir().expect("a folder");
    let microphone = folder.path().join("quiet.wav");
    wav::write(&microphone, &synthetic::noise(1, 48_000, 0.1)).expect("written");
    let mut page = Page::open(&microphone).await;
    page.ask("Page.navigate", json!({ "url": format!("{}/", rig.http) })).await;
    page.until("document.getElementById('access')?.open == true", "document.body.innerText").await;
    inspect(&mut page, "access", axe().await.as_deref()).await;
    let refused = |page: &Page| page.errors.iter().filter(|e| e["entry"]["text"].to_string().contains("401")).count();
    // Dismissed: what the page does by itself asks no more, and leaves no line of errors.
    page.value("document.querySelector('#access button[value=no]').click()").await;
    page.until("!document.getElementById('access').open", "document.body.innerText").await;
    let before = refused(&page);
    assert!((1..=4).contains(&before), "{:?}", page.errors);
    page.until("document.getElementById('health').textContent == 'ready'", "document.body.innerText").await;
    page.click("sign-in").await;
    page.until("document.getElementById('access').open", "document.body.innerText").await;
    page.value(&format!("document.getElementById('token').value = '{KEY}'")).await;
    page.click("token-yes").await;
    page.click("tab-settings").await;
    page.until("document.querySelectorAll('#settings tbody tr').length > 50", "document.body.innerText").await;
    assert_eq!(page.value("document.body.innerText.includes('key-key')").await, json!(false));
    page.click("tab-devices").await;
    page.until("document.querySelectorAll('#devices .card').length == 1", "document.body.innerText").await;
    assert!(refused(&page) <= before + 1, "{:?}", page.errors);
    page.errors.retain(|error| error["entry"]["source"] != "network");
    assert!(page.errors.is_empty(), "{:?}", page.errors);
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_console_calls_hears_and_shows_what_is_said() {
    if !antiphon_skip::has_program("chromium", "chromium") {
        return;
    }
    let rig = Rig::with(|config| {
        config.recording.mode = antiphon::recording::Mode::All;
        config.recording.consent.clear();
        config.agent.insert("demo".into(), browser::patient());
    })
    .await;
    let folder = tempfile::tempdir().expect("a folder");
    let mut page = open(&rig, &words(folder.path(), 4)).await;
    page.click("call").await;
    page.until("document.getElementById('state').textContent == 'connected'", STATE).await;
    let calls = &rig.app.gateway().calls;
    assert_eq!(calls.list().len(), 1, "the gateway has the call");
    page.until("document.getElementById('captions').textContent.includes('Hello, this is Antiphon')", STATE).await;
    // The caller is heard, here and there.
    page.until("document.getElementById('level-in').value > -40", STATE).await;
    browser::words_are_heard(&rig).await;
    // It is heard: the level is that of what the browser plays.
    page.click("speak").await;
    page.until("document.getElementById('level-out').value > -40", STATE).await;
    // To its last word: the first text in the line is what has been heard.
    let heard =
        "[...document.querySelectorAll('#captions p')].some(p => p.childNodes[1]?.textContent.endsWith('you today?'))";
    page.until(heard, STATE).await;
    page.until("document.querySelectorAll('#turns > *:not(.empty)').length >= 2", STATE).await;
    // What it says of the wait is what the gateway measured.
    let measured = calls.list()[0].first_audio_ms.expect("measured");
    let headline = format!("Math.abs(parseFloat(document.getElementById('first').textContent) - {measured}) <= 1");
    page.until(&headline, "document.getElementById('first').textContent").await;
    // In the middle of a sentence some words are heard and the others grey.
    browser::speaks(&mut page, browser::LONG).await;
    page.until(&browser::begun(browser::LONG), STATE).await;
    keep(page.screenshot().await, "console.png", false);
    page.resize(390, 844).await;
    keep(page.screenshot().await, "console-phone.png", false);

    let axe = axe().await;
    inspect_panels(&mut page, axe.as_deref()).await;
    browser::live(&mut page).await;
    browser::interrupts(&mut page).await;
    page.click("hang").await;
    page.until("document.getElementById('state').textContent == 'ended'", STATE).await;
    let gone = async {
        while !calls.list().is_empty() {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, gone).await.expect("the gateway is told");
    rig.recorded().await;
    browser::panels(&mut page, axe.as_deref()).await;
    assert!(page.errors.is_empty(), "the page has errors: {:?}", page.errors);
    rig.app.drain().await;
}

/// Whether the line below some turn tells of all of these.
fn a_turn_tells(stages: &[&str]) -> String {
    let all =
        stages.iter().map(|stage| format!("line.innerText.includes('{stage} ')")).collect::<Vec<_>>().join(" && ");
    format!("[...document.querySelectorAll('#turns .figures-line')].some(line => {all})")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_console_shows_what_a_caller_says_and_where_the_wait_for_the_answer_went() {
    if !antiphon_skip::has_program("chromium", "chromium") {
        return;
    }
    let service = service().await;
    let rig = Rig::with(|config| {
        config.recognizer.url = Some(service);
        config.recognizer.timeout_ms = 20_000;
    })
    .await;
    let folder = tempfile::tempdir().expect("a folder");
    let mut page = open(&rig, &words(folder.path(), 8)).await;
    page.click("call").await;
    page.until("document.getElementById('state').textContent == 'connected'", STATE).await;
    page.until("document.getElementById('level-in').value > -40", STATE).await;
    let said = format!("[...document.querySelectorAll('#captions .caller')].some(p => p.innerText.includes({TEXT:?}))");
    page.until(&said, STATE).await;
    let answered = "[...document.querySelectorAll('#captions .agent')].some(p => p.innerText.includes('You said'))";
    page.until(answered, STATE).await;
    // To the caller's ear, once the browser has reported a round trip.
    let all = a_turn_tells(&["end of turn", "agent", "first PCM", "first packet", "heard"]);
    page.until(&all, "document.getElementById('turns').innerText").await;
    keep(page.screenshot().await, "talk.png", true);
    page.click("hang").await;
    assert!(page.errors.is_empty(), "the page has errors: {:?}", page.errors);
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_voice_is_recorded_in_the_console_and_speaks() {
    if !antiphon_skip::has_program("chromium", "chromium") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let (model, voices) = (folder.path().join("model"), folder.path().join("voices"));
    std::fs::create_dir(&model).expect("a folder");
    super::voices::write_model(&model, super::voices::FITTING);
    let rig = Rig::with(|config| {
        speak_with(config, &model);
        config.engine.voices = voices;
        config.agent.insert("anna".into(), Agent { voice: Some("anna".into()), ..browser::patient() });
    })
    .await;
    let mut page = open(&rig, &words(folder.path(), 0)).await;
    page.opens("tab-voices").await;
    browser::record(&mut page, 6).await;
    browser::enrol(&mut page, "anna", "Words.").await;
    let told = "document.getElementById('enrolled').innerText";
    page.until("document.getElementById('enrolled').className.includes('good')", told).await;
    // So few words for so many seconds.
    page.until(&format!("{told}.includes('are words missing from it?')"), told).await;
    inspect(&mut page, "enrolled", axe().await.as_deref()).await;
    page.until(
        "[...document.querySelectorAll('#voices button')].some(one => one.ariaLabel == 'Remove anna')",
        "document.getElementById('voices').innerText",
    )
    .await;
    page.value(
        "[...document.querySelectorAll('#voices button')].find(one => one.ariaLabel == 'Listen to anna').click()",
    )
    .await;
    page.until("document.getElementById('playing').textContent == 'voice anna'", STATE).await;
    page.until("document.getElementById('listen').currentTime > 0", STATE).await;
    page.click("close-player").await;
    // What the device did for it, stage by stage.
    page.opens("tab-devices").await;
    page.until("document.querySelectorAll('#devices .lanes > span').length >= 4", "document.body.innerText").await;
    let memory = format!("/^\\d+ MB of \\d+(\\.\\d)? [MG]B$/.test({})", browser::figure("devices", "memory"));
    page.until(&memory, "document.getElementById('devices').innerText").await;
    keep(page.screenshot().await, "scheduler.png", true);
    // On a call, where the wait for it went: through each stage of the model.
    page.opens("tab-talk").await;
    page.value("document.getElementById('agent').value = 'anna'").await;
    page.click("call").await;
    page.until("document.getElementById('state').textContent == 'connected'", STATE).await;
    browser::speaks(&mut page, "Hello, it is me.").await;
    let all = a_turn_tells(&["queued", "prefill", "first token", "first mel", "first PCM", "first packet"]);
    page.until(&all, "document.getElementById('turns').innerText").await;
    page.click("hang").await;
    page.until("document.getElementById('state').textContent == 'ended'", STATE).await;
    assert!(page.errors.is_empty(), "the page has errors: {:?}", page.errors);
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_console_shows_each_device_and_what_becomes_of_it() {
    if !antiphon_skip::has_program("chromium", "chromium") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let mut worker = Worker::start_in(folder.path(), "");
    let rig = Rig::with(|config| {
        workers::speaks_through(config, std::slice::from_ref(&worker));
        config.agent.insert("demo".into(), browser::patient());
    })
    .await;
    let mut page = open(&rig, &words(folder.path(), 8)).await;
    page.opens("tab-devices").await;
    let shown = "document.getElementById('devices').innerText";
    page.until("document.querySelectorAll('#devices .card').length == 2", shown).await;
    page.until("document.querySelectorAll('#devices .card .pill.good').length == 2", shown).await;
    let name = format!("worker {}", worker.address);
    page.until(&format!("document.querySelector('#devices h2').innerText.includes({name:?})"), shown).await;
    page.opens("tab-talk").await;
    page.click("call").await;
    page.until("document.getElementById('state').textContent == 'connected'", STATE).await;
    // One speaks, the first unless it is late, and the other has nothing to do. A worker tells no steps.
    browser::speaks(&mut page, &[browser::LONG; 4].join(" ")).await;
    page.opens("tab-devices").await;
    let live = |speaks: usize| {
        let card = |at| {
            format!("parseInt(document.querySelectorAll('#devices .card')[{at}].querySelector('dl dd').innerText)")
        };
        format!("{} >= 1 && {} == 0", card(speaks), card(1 - speaks))
    };
    page.until(&format!("({}) || ({})", live(0), live(1)), shown).await;
    page.until("document.querySelector('#devices .card').innerText.includes('does not tell its steps')", shown).await;
    inspect(&mut page, "two-devices", axe().await.as_deref()).await;
    // It is gone: that is said with the reason, and the other one speaks on.
    worker.kill();
    let reason =
        format!("document.querySelector('#devices .card .note.bad')?.innerText.includes({:?})", worker.address);
    page.until(&reason, shown).await;
    page.until("document.querySelectorAll('#devices .card .pill.bad').length == 1", shown).await;
    page.until(&live(1), shown).await;
    page.click("tab-talk").await;
    page.click("hang").await;
    assert!(page.errors.is_empty(), "the page has errors: {:?}", page.errors);
    rig.app.drain().await;
}
