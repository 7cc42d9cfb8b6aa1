//! What the tests of the console ask of a browser, so that one drive goes through every panel in each of them.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use antiphon::agent::config::Agent;
use antiphon::call::{CallEvent, Interruptible};
use antiphon_loadgen::heard::Clip;
use antiphon_loadgen::wav;
use serde_json::{Value, json};
use tokio::process::Command;

use super::chromium::Page;
use super::support::{PATIENCE, Rig};

/// Windows that are looked at: a desk, and a telephone.
pub(crate) const SIZES: [(u32, u32); 2] = [(1280, 800), (390, 844)];
/// Everything that the console shows, by the ids of its tabs.
pub(crate) const TABS: [&str; 8] =
    ["tab-talk", "tab-calls", "tab-devices", "tab-batch", "tab-voices", "tab-records", "tab-settings", "tab-operate"];

/// What takes some 20 seconds to say.
pub(crate) const LONG: &str = "There are three flights to Lisbon tomorrow, the first of them at seven in the morning, the \
    second a little after noon, and the last one late in the evening, when fares are lowest. The first one is almost full, \
    the second has a stop in Madrid, and the third arrives a little before midnight.";

/// Longest time that axe-core may take to be installed.
const INSTALL: Duration = Duration::from_secs(240);

/// A browser with one page.
pub(crate) trait Browser {
    /// The value of a JavaScript expression, awaited.
    async fn value(&mut self, expression: &str) -> Value;

    /// Clicks on what has this id, as a person does.
    async fn click(&mut self, id: &str);

    /// Sets the size of the window.
    async fn resize(&mut self, size: (u32, u32));

    /// Shows the page `light` or `dark`; whether this browser can be told so.
    async fn scheme(&mut self, scheme: &str) -> bool;

    /// The window as a PNG file.
    async fn screenshot(&mut self) -> Vec<u8>;

    /// Forgets errors of requests: those that a test wanted to fail.
    fn forgive_requests(&mut self);

    /// What went wrong on the page.
    fn errors(&self) -> &[Value];

    /// Waits until `condition`, an expression, is true.
    async fn sees(&mut self, condition: &str) {
        let begun = antiphon_loadgen::call::now();
        while self.value(condition).await != json!(true) {
            if antiphon_loadgen::call::now() - begun > PATIENCE {
                let shown = self.value("document.body.innerText").await;
                panic!("never true: {condition}; errors: {:?}; {shown}", self.errors());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Opens a panel.
    async fn opens(&mut self, tab: &str) {
        self.click(tab).await;
        self.sees(&format!("document.getElementById({tab:?}).getAttribute('aria-selected') == 'true'")).await;
    }
}

impl Browser for Page {
    async fn value(&mut self, expression: &str) -> Value {
        Page::value(self, expression).await
    }

    async fn click(&mut self, id: &str) {
        Page::click(self, id).await;
    }

    async fn resize(&mut self, (width, height): (u32, u32)) {
        Page::resize(self, width, height).await;
    }

    async fn scheme(&mut self, scheme: &str) -> bool {
        let feature = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.ask("Emulation.setEmulatedMedia", feature).await;
        true
    }

    async fn screenshot(&mut self) -> Vec<u8> {
        Page::screenshot(self).await
    }

    fn forgive_requests(&mut self) {
        self.errors.retain(|error| error["entry"]["source"] != "network");
    }

    fn errors(&self) -> &[Value] {
        &self.errors
    }
}

/// axe-core, the checker of accessibility, if it can be had.
pub(crate) async fn axe() -> Option<String> {
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

/// Nothing of the page as it is shown now is wider than its window, and there is nothing that somebody cannot see, reach or have
/// read aloud.
async fn judge(page: &mut impl Browser, what: &str, axe: Option<&str>) {
    let wide = page
        .value(
            "(() => { const w = document.documentElement.clientWidth; \
             if (document.documentElement.scrollWidth <= w) return []; \
             return [...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > w + 1) \
               .map(e => e.tagName + '#' + e.id + '.' + e.className).slice(0, 5); })()",
        )
        .await;
    assert_eq!(wide, json!([]), "{what} is wider than its window");
    let Some(axe) = axe else { return };
    page.value(&format!("{axe};0")).await;
    let barriers = page
        .value(
            "axe.run(document, { resultTypes: ['violations'] }).then(r => r.violations.map(v => \
               v.id + ': ' + v.nodes.slice(0, 3).map(n => n.html.slice(0, 100)).join(' | ')))",
        )
        .await;
    assert_eq!(barriers, json!([]), "{what}");
}

/// The page as it is, in windows of both sizes and in each scheme that the browser can be told.
pub(crate) async fn inspect(page: &mut impl Browser, what: &str, axe: Option<&str>) {
    for size in SIZES {
        page.resize(size).await;
        for scheme in ["light", "dark"] {
            if page.scheme(scheme).await {
                page.sees(&format!("matchMedia('(prefers-color-scheme: {scheme})').matches")).await;
                let name = format!("{what}-{}-{scheme}", size.0);
                judge(page, &name, axe).await;
                keep(page.screenshot().await, &format!("{}-{name}.png", browser_name(page)), true);
            }
        }
    }
    page.resize(SIZES[0]).await;
    page.scheme("light").await;
}

fn browser_name<B: Browser>(_: &B) -> &'static str {
    std::any::type_name::<B>().rsplit("::").next().unwrap_or("browser")
}

/// Every panel, likewise.
pub(crate) async fn inspect_panels(page: &mut impl Browser, axe: Option<&str>) {
    for tab in TABS {
        page.opens(tab).await;
        inspect(page, tab, axe).await;
    }
    page.opens(TABS[0]).await;
}

/// Keeps a picture where somebody wants to look at it: all of them in `ANTIPHON_LOOK`, those for `.github` in
/// `ANTIPHON_SCREENSHOTS` (`ANTIPHON_SCREENSHOTS=$PWD/.github cargo test --test gateway console`).
pub(crate) fn keep(shot: Vec<u8>, name: &str, only_to_look: bool) {
    assert!(shot.starts_with(b"\x89PNG") && shot.len() < 300_000, "{} bytes", shot.len());
    let wanted = if only_to_look { "ANTIPHON_LOOK" } else { "ANTIPHON_SCREENSHOTS" };
    #[allow(clippy::disallowed_methods, reason = "these variables belong to the test")]
    if let Ok(folder) = std::env::var(wanted) {
        std::fs::write(Path::new(&folder).join(name), &shot).expect("written");
    }
}

/// A microphone with a person at it: three sentences, and so many seconds of silence behind them.
pub(crate) fn words(folder: &Path, silence: usize) -> PathBuf {
    let said = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/smart_turn");
    let clips =
        ["office", "blue", "card"].map(|name| wav::read(said.join(format!("{name}_whole.wav"))).expect("words"));
    let rate = clips[0].rate;
    let mut pcm = clips.into_iter().flat_map(|clip| clip.pcm).collect::<Vec<_>>();
    pcm.extend(vec![0.0; rate as usize * silence]);
    let microphone = folder.join("words.wav");
    wav::write(&microphone, &Clip { rate, pcm }).expect("written");
    microphone
}

/// The demo agent, whose words those of the microphone do not cut off.
pub(crate) fn patient() -> Agent {
    Agent { interruptible: Some(Interruptible::None), ..Agent::at("builtin:demo") }
}

/// Waits until the gateway has heard the caller of its one call begin to speak, and stop.
pub(crate) async fn words_are_heard(rig: &Rig) {
    let (_, listed) = rig.get("/v1/calls").await;
    let call = rig.handle_of(listed["calls"][0]["id"].as_str().expect("a call")).await;
    let mut events = call.events();
    for wanted in [true, false] {
        let heard = async {
            loop {
                match events.recv().await.expect("the call lives") {
                    CallEvent::Vad { speaking } if speaking == wanted => return,
                    _ => {}
                }
            }
        };
        let heard = tokio::time::timeout(PATIENCE, heard).await;
        heard
            .unwrap_or_else(|_| panic!("the caller's words are not heard to {}", if wanted { "begin" } else { "end" }));
    }
}

/// Has `text` spoken on the call of the page.
pub(crate) async fn speaks(page: &mut impl Browser, text: &str) {
    page.opens("tab-talk").await;
    page.value(&format!("document.getElementById('text').value = {text:?}")).await;
    page.click("speak").await;
}

/// A turn is cut off by the button in its middle: what was heard stays, the rest is struck through, and the call goes on.
pub(crate) async fn interrupts(page: &mut impl Browser) {
    speaks(page, LONG).await;
    page.sees(&begun(LONG)).await;
    page.click("interrupt").await;
    page.sees(&cut(LONG)).await;
    page.sees(
        "[...document.querySelectorAll('#turns .figures-line')].some(line => line.innerText.includes('interrupted'))",
    )
    .await;
    page.sees("document.getElementById('state').textContent == 'connected'").await;
}

/// Whether captions show some words of `text` as heard and the rest of it as still to come.
pub(crate) fn begun(text: &str) -> String {
    format!(
        "[...document.querySelectorAll('#captions .agent > span.unheard')].some(rest => \
         rest.previousSibling.textContent.length > 8 && rest.previousSibling.textContent + rest.textContent == {text:?})"
    )
}

/// Whether captions show some words of `text` as heard and the rest of it as cut off.
pub(crate) fn cut(text: &str) -> String {
    format!(
        "[...document.querySelectorAll('#captions .agent > del.unheard')].some(rest => \
         rest.previousSibling.textContent.length > 8 && rest.previousSibling.textContent + rest.textContent == {text:?} \
         && getComputedStyle(rest).textDecorationLine == 'line-through' && rest.nextSibling?.textContent == 'interrupted')"
    )
}

/// What stands under this name in the part of the page with this id: the first, where there are several.
pub(crate) fn figure(part: &str, name: &str) -> String {
    format!(
        "([...document.querySelectorAll('#{part} dt')].find(one => one.textContent == {name:?})?.nextElementSibling\
         .textContent ?? '')"
    )
}

/// What the panels tell while a call is live that has heard the caller and was spoken to, and a job runs beside it.
pub(crate) async fn live(page: &mut impl Browser) {
    // A job in its middle.
    page.opens("tab-batch").await;
    page.value(&format!(
        "document.getElementById('job-text').value = Array(300).fill({LONG:?}).join('\\n'); \
         document.getElementById('job-format').value = 'opus'; document.getElementById('job').requestSubmit()"
    ))
    .await;
    page.sees("[...document.querySelectorAll('#jobs progress')].some(one => one.value > 0 && one.value < one.max)")
        .await;
    // Its streams and the call's, on the device that speaks both.
    speaks(page, &[LONG; 4].join(" ")).await;
    page.opens("tab-devices").await;
    let both = format!(
        "parseInt({}) >= 1 && parseInt({}) >= 1 && /^-?\\d+\\.\\d\\d s$/.test({})",
        figure("devices", "live streams of capacity"),
        figure("devices", "batch streams"),
        figure("devices", "least slack")
    );
    page.sees(&both).await;
    // What both ends have measured of the call.
    page.opens("tab-calls").await;
    let cells = [
        ("Leg", "^webrtc, opus$"),
        ("State", "^(speaking|listening)$"),
        ("First audio", "^\\\\d+ ms$"),
        ("Lost", "^\\\\d+(\\\\.\\\\d)? %$"),
        ("Round trip", "^\\\\d+ ms$"),
        ("MOS out, in", "^\\\\d\\\\.\\\\d, \\\\d\\\\.\\\\d$"),
    ];
    for (name, form) in cells {
        page.sees(&format!(
            "new RegExp('{form}').test(document.querySelector('#calls tbody [data-label=\"{name}\"]')?.textContent)"
        ))
        .await;
    }
    // The job has no end of its own here.
    page.opens("tab-batch").await;
    page.value("[...document.querySelectorAll('#jobs button')].find(one => one.textContent == 'Cancel').click()").await;
    page.sees("document.getElementById('jobs').innerText.includes('cancelled')").await;
    page.value("document.getElementById('job-format').value = 'wav'").await;
}

/// Every panel does what it is for, on a gateway that has had a call with its recording. A microphone is there.
pub(crate) async fn panels(page: &mut impl Browser, axe: Option<&str>) {
    let text = |id: &str| format!("document.getElementById('{id}').innerText");
    let plays = "document.getElementById('listen').currentTime > 0";
    // Steps of the calls, on a timeline.
    page.opens("tab-devices").await;
    page.sees("document.querySelectorAll('#devices .timeline rect').length > 0").await;
    // A job of two lines is made, and heard.
    page.opens("tab-batch").await;
    page.value(
        "document.getElementById('job-text').value = 'One.\\nTwo.'; document.getElementById('job').requestSubmit()",
    )
    .await;
    page.sees(&format!("{}.includes('done · 2 of 2')", text("jobs"))).await;
    page.value("document.querySelector('#jobs button').click()").await;
    page.sees(plays).await;
    page.click("close-player").await;
    // The voice speaks, and a recording becomes none without a checkpoint, which is said.
    page.opens("tab-voices").await;
    page.sees("document.querySelector('#voices button') != null").await;
    page.value("document.querySelector('#voices button').click()").await;
    page.sees("document.getElementById('playing').textContent.startsWith('voice ')").await;
    page.click("close-player").await;
    record(page, 3).await;
    enrol(page, "anna", "Words.").await;
    page.sees("document.getElementById('enrolled').className.includes('bad')").await;
    page.forgive_requests();
    // The call is on record with its words.
    page.opens("tab-records").await;
    page.sees("document.querySelector('#records tbody button') != null").await;
    page.value("document.querySelector('#records tbody button').click()").await;
    page.sees(&format!("{}.includes('How may I help you today?')", text("transcript"))).await;
    // How good each way can have sounded, which was known when it ended.
    for name in ["MOS sent", "MOS received"] {
        page.sees(&format!("/^\\d\\.\\d/.test({})", figure("record-figures", name))).await;
    }
    // And with its sound, both sides of it.
    page.sees("!document.getElementById('play-record').hidden").await;
    inspect(page, "record", axe).await;
    page.click("play-record").await;
    page.sees("document.getElementById('playing').textContent.startsWith('call from')").await;
    page.sees(plays).await;
    page.click("close-player").await;
    // The configuration, filtered.
    page.opens("tab-settings").await;
    page.sees("document.querySelectorAll('#settings tbody tr').length > 50").await;
    page.value(
        "document.getElementById('setting-filter').value = 'http.bind'; \
         document.getElementById('setting-filter').dispatchEvent(new Event('input'))",
    )
    .await;
    page.sees(&format!("{}.includes('127.0.0.1')", text("settings"))).await;
    // Metrics; drained, and not.
    page.opens("tab-operate").await;
    page.sees(&format!("{}.includes('antiphon_')", text("metrics"))).await;
    // Asked again before the page is told that the first question was closed: its answer is not the second's.
    page.value(
        "document.getElementById('drain').click(); document.querySelector('#confirm [value=no]').click(); \
         document.getElementById('drain').click()",
    )
    .await;
    page.sees("document.getElementById('confirm').open").await;
    inspect(page, "confirm", axe).await;
    page.click("confirm-yes").await;
    page.sees("document.getElementById('health').textContent == 'draining'").await;
    page.forgive_requests(); // 503 of /readyz
    page.sees("!document.getElementById('undrain').hidden").await;
    page.click("undrain").await;
    page.sees("document.getElementById('health').textContent == 'ready'").await;
    page.forgive_requests();
}

/// Records `seconds` of the microphone for a voice; its panel is open.
pub(crate) async fn record(page: &mut impl Browser, seconds: u32) {
    page.click("record").await;
    page.sees(&format!("document.getElementById('recording').textContent.startsWith('recording, {seconds} s')")).await;
    page.click("record").await;
    page.sees("document.getElementById('recording').textContent.endsWith(' s recorded')").await;
}

/// Enrols what was recorded.
pub(crate) async fn enrol(page: &mut impl Browser, name: &str, words: &str) {
    page.value(&format!(
        "document.getElementById('voice-name').value = '{name}'; document.getElementById('voice-text').value = {words:?}; \
         document.getElementById('voice-consent').checked = true; document.getElementById('enrol').requestSubmit()"
    ))
    .await;
}
