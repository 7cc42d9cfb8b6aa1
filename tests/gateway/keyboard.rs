//! The console without a mouse: a call is placed, spoken to, interrupted and ended, and a question is answered, by keys alone.

use serde_json::json;

use super::browser::{self, LONG, words};
use super::chromium::Page;
use super::console::open;
use super::support::Rig;

/// More keys than it takes to go once around the page.
const AROUND: usize = 80;

/// What has the keyboard.
const FOCUS: &str = "document.activeElement.id || document.activeElement.outerHTML.slice(0, 200)";

/// Presses `key` until what has this id has the keyboard.
async fn reach(page: &mut Page, key: &str, id: &str) {
    let mut passed = Vec::new();
    for _ in 0..AROUND {
        page.press(key).await;
        let focus = page.value(FOCUS).await;
        if focus == json!(id) {
            return;
        }
        passed.push(focus);
    }
    panic!("{key} does not lead to {id}: {passed:?}");
}

async fn has_focus(page: &mut Page, id: &str) {
    page.until(&format!("document.activeElement.id == {id:?}"), FOCUS).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_console_does_all_of_a_call_and_a_question_by_keys_alone() {
    if !antiphon_skip::has_program("chromium", "chromium") {
        return;
    }
    let rig = Rig::with(|config| {
        config.agent.insert("demo".into(), browser::patient());
    })
    .await;
    let folder = tempfile::tempdir().expect("a folder");
    let mut page = open(&rig, &words(folder.path(), 8)).await;

    // What is the same on every page can be passed by.
    page.press("Tab").await;
    assert_eq!(page.value("document.activeElement.className").await, json!("skip"));
    // From panel to panel.
    reach(&mut page, "Tab", "tab-talk").await;
    for (key, tab) in [
        ("ArrowRight", "calls"),
        ("ArrowLeft", "talk"),
        ("ArrowLeft", "operate"),
        ("Home", "talk"),
        ("End", "operate"),
        ("Home", "talk"),
    ] {
        page.press(key).await;
        has_focus(&mut page, &format!("tab-{tab}")).await;
        page.until(&format!("!document.getElementById('panel-{tab}').hidden"), "document.body.innerText").await;
    }

    // A call; the button that placed it is no more to be pressed, and the next key goes on from there.
    reach(&mut page, "Tab", "call").await;
    page.press("Enter").await;
    page.until("document.getElementById('state').textContent == 'connected'", "document.body.innerText").await;
    page.press("Tab").await;
    has_focus(&mut page, "hang").await;
    assert_eq!(rig.app.gateway().calls.list().len(), 1, "the gateway has the call");

    // A turn is typed over what stands there, spoken and cut off.
    reach(&mut page, "Tab", "text").await;
    for one in LONG.chars() {
        page.press(&one.to_string()).await;
    }
    assert_eq!(page.value("document.getElementById('text').value").await, json!(LONG));
    page.press("Tab").await;
    has_focus(&mut page, "speak").await;
    page.press(" ").await;
    page.until(&browser::begun(LONG), "document.getElementById('captions').innerHTML").await;
    reach(&mut page, "Tab", "interrupt").await;
    page.press("Enter").await;
    page.until(&browser::cut(LONG), "document.getElementById('captions').innerHTML").await;
    // A screen reader says what was heard of it. The greeting may have been cut off, too.
    let read = format!(
        "[...document.querySelectorAll('#captions del.unheard')].some(rest => {{ \
         const heard = rest.previousSibling.textContent; return heard + rest.textContent == {LONG:?} && \
         document.getElementById('announce').textContent == 'Agent: ' + heard; }})"
    );
    page.until(&read, "document.getElementById('announce').textContent").await;
    // The field itself speaks, too.
    reach(&mut page, "Shift+Tab", "text").await;
    page.press("Enter").await;
    page.until(&browser::begun(LONG), "document.getElementById('captions').innerHTML").await;

    reach(&mut page, "Shift+Tab", "hang").await;
    page.press(" ").await;
    page.until("document.getElementById('state').textContent == 'ended'", "document.body.innerText").await;

    // A question: answered with no, by Escape, and with yes. The keyboard stays where it was.
    reach(&mut page, "Shift+Tab", "tab-talk").await;
    page.press("End").await;
    reach(&mut page, "Tab", "drain").await;
    page.press("Enter").await;
    page.until("document.getElementById('confirm').open && document.activeElement.value == 'no'", FOCUS).await;
    page.press("Escape").await;
    page.until("!document.getElementById('confirm').open", FOCUS).await;
    has_focus(&mut page, "drain").await;
    page.press(" ").await;
    page.until("document.getElementById('confirm').open && document.activeElement.value == 'no'", FOCUS).await;
    page.press(" ").await;
    page.until("!document.getElementById('confirm').open", FOCUS).await;
    has_focus(&mut page, "drain").await;
    assert_eq!(rig.get("/readyz").await.1["draining"], json!(false), "nobody has said yes");
    page.press("Enter").await;
    page.until("document.getElementById('confirm').open", FOCUS).await;
    reach(&mut page, "Tab", "confirm-yes").await;
    page.press("Enter").await;
    page.until("document.getElementById('health').textContent == 'draining'", "document.body.innerText").await;
    // The button that was pressed is gone, and the one that undoes it has the keyboard.
    has_focus(&mut page, "undrain").await;
    page.press("Enter").await;
    page.until("document.getElementById('health').textContent == 'ready'", "document.body.innerText").await;
    has_focus(&mut page, "drain").await;
    // 503 of /readyz, which is what was asked for.
    page.errors.retain(|error| error["entry"]["source"] != "network");
    assert!(page.errors.is_empty(), "the page has errors: {:?}", page.errors);
    rig.app.drain().await;
}
