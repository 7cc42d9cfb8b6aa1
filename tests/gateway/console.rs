//! The console in a real browser: it calls, hears, shows what is said, and fits a desk and a telephone.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use antiphon::server::config::Token;
use antiphon_loadgen::synthetic;
use antiphon_loadgen::wav;
use serde_json::{Value, json};
use tokio::process::Command;

use super::chromium::Page;
use super::support::{PATIENCE, Rig};

/// Everything that the console shows, by the ids of its tabs.
pub(crate) const TABS: [&str; 8] =
    ["tab-talk", "tab-calls", "tab-devices", "tab-batch", "tab-voices", "tab-records", "tab-settings", "tab-operate"];
/// What a failed wait shows.
const STATE: &str = "document.getElementById('problem').textContent + ' / ' + \
    document.getElementById('state').textContent + ' / ' + document.getElementById('captions').textContent";

/// Longest time that axe-core may take to be installed.
const INSTALL: Duration = Duration::from_secs(240);

/// axe-core, the checker of accessibility, if it can be had.
async fn axe() -> Option<String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop/axe.sh");
    let output = Command::new("sh").arg(script).stdin(Stdio::null()).kill_on_drop(true).output();
    let output = tokio::time::timeout(INSTALL, output).await.expect("the script ends").expect("the script runs");
    if output.status.code() == Some(77) {
        antiphon_skip::skip("axe", "it cannot be installed");
        return None;
    }
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let path = String::from_utf8(output.stdout).expect("text");
    Some(std::fs::read_to_string(path.trim()).expect("readable"))
}

/// What of the page as it is shown now somebody cannot see, reach or have read aloud.
async fn barriers(page: &mut Page, axe: &str) -> Value {
    page.value(&format!("{axe};0")).await;
    page.value(
        "axe.run(document, { resultTypes: ['violations'] }).then(r => r.violations.map(v => \
           v.id + ': ' + v.nodes.slice(0, 3).map(n => n.html.slice(0, 100)).join(' | ')))",
    )
    .await
}

/// What is wider than its window, tab by tab, and what axe-core finds there.
async fn inspect(page: &mut Page, (width, height): (u32, u32), scheme: &str, axe: Option<&str>) {
    page.resize(width, height).await;
    let scheme = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
    page.ask("Emulation.setEmulatedMedia", scheme).await;
    for tab in TABS {
        page.click(tab).await;
        page.until(&format!("document.getElementById({tab:?}).getAttribute('aria-selected') == 'true'"), STATE).await;
        let wide = page
            .value(
                "(() => { const w = document.documentElement.clientWidth; \
                 if (document.documentElement.scrollWidth <= w) return []; \
                 return [...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > w + 1) \
                   .map(e => e.tagName + '#' + e.id + '.' + e.className).slice(0, 5); })()",
            )
            .await;
        assert_eq!(wide, json!([]), "{tab} at {width} x {height} is wider than its window");
        if let Some(axe) = axe {
            assert_eq!(barriers(page, axe).await, json!([]), "{tab} at {width} x {height}");
        }
    }
    page.click(TABS[0]).await;
}

/// `.github/console.png` and `console-phone.png` are these pictures:
/// `ANTIPHON_SCREENSHOTS=$PWD/.github cargo test --test gateway console`.
fn keep(shot: Vec<u8>, name: &str) {
    assert!(shot.starts_with(b"\x89PNG") && shot.len() < 200_000, "{} bytes", shot.len());
    #[allow(clippy::disallowed_methods, reason = "this variable belongs to the test")]
    if let Ok(folder) = std::env::var("ANTIPHON_SCREENSHOTS") {
        std::fs::write(Path::new(&folder).join(name), &shot).expect("written");
    }
}

/// Every panel does what it is for.
async fn panels(page: &mut Page) {
    let text = |id: &str| format!("document.getElementById('{id}').innerText");
    // A job of two lines is made, and heard.
    page.click("tab-batch").await;
    page.value(
        "document.getElementById('job-text').value = 'One.\\nTwo.'; document.getElementById('job').requestSubmit()",
    )
    .await;
    page.until(&format!("{}.includes('done · 2 of 2')", text("jobs")), &text("jobs")).await;
    page.value("document.querySelector('#jobs button').click()").await;
    page.until("document.getElementById('listen').currentTime > 0", &text("problem")).await;
    page.click("close-player").await;
    // The voice speaks, and a recording becomes none without a checkpoint, which is said.
    page.click("tab-voices").await;
    page.until("document.querySelector('#voices button') != null", &text("problem")).await;
    page.value("document.querySelector('#voices button').click()").await;
    page.until("document.getElementById('playing').textContent.startsWith('voice ')", &text("problem")).await;
    page.click("close-player").await;
    page.click("record").await;
    page.until("document.getElementById('recording').textContent.startsWith('recording, 3 s')", &text("problem")).await;
    page.click("record").await;
    page.until("document.getElementById('recording').textContent.endsWith(' s recorded')", &text("recording")).await;
    page.value(
        "document.getElementById('voice-name').value = 'anna'; document.getElementById('voice-text').value = 'Words.'; \
         document.getElementById('voice-consent').checked = true; document.getElementById('enrol').requestSubmit()",
    )
    .await;
    page.until("document.getElementById('enrolled').className.includes('bad')", &text("enrolled")).await;
    page.errors.retain(|error| error["entry"]["source"] != "network");
    // The call is on record with its words.
    page.click("tab-records").await;
    page.until("document.querySelector('#records tbody button') != null", &text("problem")).await;
    page.value("document.querySelector('#records tbody button').click()").await;
    page.until(&format!("{}.includes('How may I help you today?')", text("transcript")), &text("transcript")).await;
    // And with its sound, both sides of it.
    page.until("!document.getElementById('play-record').hidden", &text("problem")).await;
    page.click("play-record").await;
    page.until("document.getElementById('playing').textContent.startsWith('call from')", &text("problem")).await;
    page.until("document.getElementById('listen').currentTime > 0", &text("problem")).await;
    page.click("close-player").await;
    // The configuration, filtered.
    page.click("tab-settings").await;
    page.until("document.querySelectorAll('#settings tbody tr').length > 50", &text("problem")).await;
    page.value(
        "document.getElementById('setting-filter').value = 'http.bind'; \
         document.getElementById('setting-filter').dispatchEvent(new Event('input'))",
    )
    .await;
    page.until(&format!("{}.includes('127.0.0.1')", text("settings")), &text("settings")).await;
    // Metrics; drained, and not.
    page.click("tab-operate").await;
    page.until(&format!("{}.includes('antiphon_')", text("metrics")), &text("problem")).await;
    page.click("drain").await;
    page.until("document.getElementById('confirm').open", &text("problem")).await;
    page.click("confirm-yes").await;
    page.until("document.getElementById('health').textContent == 'draining'", &text("problem")).await;
    page.errors.retain(|error| error["entry"]["source"] != "network"); // 503 of /readyz
    page.until("!document.getElementById('undrain').hidden", &text("problem")).await;
    page.click("undrain").await;
    page.until("document.getElementById('health').textContent == 'ready'", &text("problem")).await;
    page.errors.retain(|error| error["entry"]["source"] != "network");
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
    })
    .await;
    let folder = tempfile::tempdir().expect("a folder");
    // A person who listens: anything louder might interrupt.
    let microphone = folder.path().join("quiet.wav");
    let mut room = synthetic::noise(1, 48_000, 5.0);
    room.pcm.iter_mut().for_each(|sample| *sample *= 0.000_5);
    wav::write(&microphone, &room).expect("written");

    let mut page = Page::open(&microphone).await;
    page.resize(1280, 800).await;
    page.ask("Page.navigate", json!({ "url": format!("{}/", rig.http) })).await;
    page.until("document.getElementById('health')?.textContent == 'ready'", "document.body.innerText").await;

    page.click("call").await;
    page.until("document.getElementById('state').textContent == 'connected'", STATE).await;
    let calls = &rig.app.gateway().calls;
    assert_eq!(calls.list().len(), 1, "the gateway has the call");
    page.until("document.getElementById('captions').textContent.includes('Hello, this is Antiphon')", STATE).await;
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
    page.value(
        "document.getElementById('text').value = 'There are three flights to Lisbon tomorrow, the first of them at seven \
         in the morning, the second a little after noon, and the last one late in the evening, when fares are lowest.'",
    )
    .await;
    page.click("speak").await;
    page.until("document.querySelector('#captions span.unheard')?.previousSibling?.textContent.length > 8", STATE)
        .await;
    keep(page.screenshot().await, "console.png");
    page.resize(390, 844).await;
    keep(page.screenshot().await, "console-phone.png");

    let axe = axe().await;
    inspect(&mut page, (1280, 800), "light", axe.as_deref()).await;
    inspect(&mut page, (390, 844), "dark", axe.as_deref()).await;
    page.resize(1280, 800).await;

    // By keyboard from one panel to the next.
    page.value("document.getElementById('tab-talk').focus()").await;
    for kind in ["keyDown", "keyUp"] {
        page.ask("Input.dispatchKeyEvent", json!({ "type": kind, "key": "ArrowRight", "code": "ArrowRight" })).await;
    }
    page.until("document.activeElement.id == 'tab-calls' && !document.getElementById('panel-calls').hidden", STATE)
        .await;
    page.until(
        "document.querySelectorAll('#calls tbody tr').length == 1",
        "document.getElementById('calls').innerText",
    )
    .await;
    page.click("tab-talk").await;
    page.click("interrupt").await;
    page.click("hang").await;
    page.until("document.getElementById('state').textContent == 'ended'", STATE).await;
    let gone = async {
        while !calls.list().is_empty() {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, gone).await.expect("the gateway is told");
    // Its recording is written to the end a moment after the call.
    let (_, records) = rig.get("/v1/records").await;
    let record = format!("/v1/records/{}", records["records"][0]["id"].as_str().expect("the call"));
    let written = async {
        while rig.get(&record).await.1["recording"]["durationMs"].is_null() {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, written).await.expect("the recording is complete");
    panels(&mut page).await;
    assert!(page.errors.is_empty(), "the page has errors: {:?}", page.errors);
    rig.app.drain().await;
}
