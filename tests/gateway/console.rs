//! The console in a real browser: it calls, hears, shows what is said, and fits a desk and a telephone.

use antiphon_loadgen::synthetic;
use antiphon_loadgen::wav;

use super::chromium::Page;
use super::support::{PATIENCE, Rig};

/// Everything that the console shows, by the ids of its tabs.
const TABS: [&str; 6] = ["tab-talk", "tab-calls", "tab-devices", "tab-batch", "tab-voices", "tab-operate"];
/// What a failed wait shows.
const STATE: &str = "document.getElementById('problem').textContent + ' / ' + \
    document.getElementById('state').textContent + ' / ' + document.getElementById('captions').textContent";

/// How far the page is wider than its window, tab by tab; what is too wide, for the message.
async fn overflows(page: &mut Page, width: u32, height: u32) {
    page.resize(width, height).await;
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
        assert_eq!(wide, serde_json::json!([]), "{tab} at {width} x {height} is wider than its window");
    }
    page.click(TABS[0]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_console_calls_hears_and_shows_what_is_said() {
    if !antiphon_skip::has_program("chromium", "chromium") {
        return;
    }
    let rig = Rig::start().await;
    let folder = tempfile::tempdir().expect("a folder");
    // A person who listens: anything louder might interrupt.
    let microphone = folder.path().join("quiet.wav");
    let mut room = synthetic::noise(1, 48_000, 5.0);
    room.pcm.iter_mut().for_each(|sample| *sample *= 0.000_5);
    wav::write(&microphone, &room).expect("written");

    let mut page = Page::open(&microphone).await;
    page.resize(1280, 800).await;
    page.ask("Page.navigate", serde_json::json!({ "url": format!("{}/", rig.http) })).await;
    page.until("document.getElementById('health')?.textContent == 'ready'", "document.body.innerText").await;

    page.click("call").await;
    page.until("document.getElementById('state').textContent == 'connected'", STATE).await;
    let calls = &rig.app.gateway().calls;
    assert_eq!(calls.list().len(), 1, "the gateway has the call");
    page.until("document.getElementById('captions').textContent.includes('Hello, this is Antiphon')", STATE).await;
    // It is heard: the level is that of what the browser plays.
    page.click("speak").await;
    page.until("document.getElementById('level-out').value > -40", STATE).await;
    page.until("document.getElementById('captions').textContent.includes('How may I help you today?')", STATE).await;
    page.until("document.querySelectorAll('#turns > *:not(.empty)').length >= 2", STATE).await;
    let shot = page.screenshot().await;
    assert!(shot.starts_with(b"\x89PNG") && shot.len() < 200_000, "{} bytes", shot.len());
    // `.github/console.png` is this picture: `ANTIPHON_SCREENSHOT=$PWD/.github/console.png cargo test --test gateway console`
    #[allow(clippy::disallowed_methods, reason = "this variable belongs to the test")]
    if let Ok(file) = std::env::var("ANTIPHON_SCREENSHOT") {
        std::fs::write(file, &shot).expect("written");
    }

    overflows(&mut page, 1280, 800).await;
    overflows(&mut page, 390, 844).await;

    page.click("hang").await;
    page.until("document.getElementById('state').textContent == 'ended'", STATE).await;
    let gone = async {
        while !calls.list().is_empty() {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, gone).await.expect("the gateway is told");
    assert!(page.errors.is_empty(), "the page has errors: {:?}", page.errors);
    rig.app.drain().await;
}
