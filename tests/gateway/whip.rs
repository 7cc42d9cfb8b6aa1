//! A WHIP client of others (RFC 9725), as its authors publish it, in Chromium: what it publishes is a call, and it is heard.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use antiphon::call::TapDirection;
use antiphon_loadgen::codec::resample;
use antiphon_loadgen::correlate::correlate;
use antiphon_loadgen::heard::Clip;
use antiphon_loadgen::wav;
use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::response::Html;
use axum::routing::get;
use serde_json::json;
use tokio::process::Command;
use tokio::time::timeout;

use super::chromium::Page;
use super::support::{PATIENCE, Rig, SENTENCE};

/// Longest time that the client may take to be installed.
const INSTALL: Duration = Duration::from_secs(240);
/// Samples a second of what is heard of a browser.
const RATE: u32 = 16_000;
/// What a failed wait shows.
const STATE: &str = "window.failed + ' ' + window.peer?.connectionState";

/// A page that publishes its microphone and plays the agent; what browsers do to sound is switched off.
const PAGE: &str = r#"<title>page</title><button id="go">go</button><audio id="agent" autoplay></audio><script type="module">
import { WHIPClient } from "./whip.js";
const audio = { echoCancellation: false, noiseSuppression: false, autoGainControl: false };
document.getElementById("go").onclick = async () => {
  try {
    const stream = await navigator.mediaDevices.getUserMedia({ audio });
    const peer = (window.peer = new RTCPeerConnection());
    peer.ontrack = ({ track }) => (document.getElementById("agent").srcObject = new MediaStream([track]));
    for (const track of stream.getTracks()) peer.addTrack(track, stream);
    window.client = new WHIPClient();
    await client.publish(peer, "GATEWAY/whip?agent=silent");
  } catch (error) { window.failed = String(error); }
};
</script>"#;

/// The client as one module, if it can be had.
async fn client() -> Option<String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop/whip.sh");
    let output = Command::new(script).stdin(Stdio::null()).kill_on_drop(true).output();
    let output = timeout(INSTALL, output).await.expect("the script ends").expect("the script runs");
    let said = String::from_utf8(output.stdout).expect("text");
    if output.status.code() == Some(77) {
        antiphon_skip::skip("whip", said.trim());
        return None;
    }
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(std::fs::read_to_string(said.trim()).expect("readable"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whip_client_of_others_publishes_words_that_a_call_hears() {
    if !antiphon_skip::has_program("chromium", "chromium") {
        return;
    }
    let Some(client) = client().await else { return };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let origin = format!("http://{}", listener.local_addr().expect("bound"));
    let rig = Rig::with(|config| {
        config.http.cors = vec![origin.clone()];
        // The microphone never pauses.
        config.call.barge_in.interruptible = antiphon::call::Interruptible::None;
    })
    .await;
    let page = PAGE.replace("GATEWAY", &rig.http);
    let site = Router::new()
        .route("/", get(async || Html(page)))
        .route("/whip.js", get(async || ([(CONTENT_TYPE, "text/javascript")], client)));
    tokio::spawn(async { axum::serve(listener, site).await });

    let words = wav::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/smart_turn/office_whole.wav"));
    let words = words.expect("recorded words");
    let folder = tempfile::tempdir().expect("a folder");
    let microphone = folder.path().join("words.wav");
    let said = Clip { rate: 48_000, pcm: resample(&words.pcm, words.rate, 48_000).expect("a rate") };
    wav::write(&microphone, &said).expect("written");
    let mut page = Page::open(&microphone).await;
    page.ask("Page.navigate", json!({ "url": origin })).await;
    page.until("document.getElementById('go')?.onclick != null", "document.body.innerText").await;
    page.click("go").await;
    page.until("window.peer?.connectionState == 'connected'", STATE).await;
    let (_, listed) = rig.get("/v1/calls").await;
    let call = &listed["calls"][0];
    assert_eq!(listed["calls"].as_array().map(Vec::len), Some(1), "{listed}");
    assert_eq!((&call["agent"], &call["leg"]), (&json!("silent"), &json!("webrtc")), "{call}");
    assert_eq!(call["codec"], json!("opus"), "{call}");
    let id = call["id"].as_str().expect("an id");

    let mut tap = rig.handle_of(id).await.wide_tap();
    let hears = async {
        loop {
            let mut heard = Clip { rate: RATE, pcm: Vec::new() };
            while heard.pcm.len() < 2 * words.pcm.len() + RATE as usize {
                let frame = tap.recv().await.expect("the call lives");
                let wide = frame.wide.filter(|_| frame.direction == TapDirection::Inbound);
                heard.pcm.extend(wide.iter().flat_map(|pcm| pcm.iter()).map(|s| f32::from(*s) / 32_768.0));
            }
            let found = correlate(&heard, &words).expect("comparable");
            if found.value > 0.8 {
                return;
            }
        }
    };
    timeout(3 * PATIENCE, hears).await.expect("the words are heard");

    // What publishes is on a call, and is spoken to. A second of speech has some 0.03 of full scale of energy, silence none.
    let (status, body) = rig.post(&format!("/v1/calls/{id}/turns"), json!({ "text": SENTENCE })).await;
    assert_eq!(status, 202, "{body}");
    let spoken = "peer.getStats().then(all => [...all.values()].some(one => \
                  one.type == 'inbound-rtp' && one.totalAudioEnergy > 0.005))";
    page.until(spoken, STATE).await;
    page.value("client.stop()").await;
    let gone = async {
        while !rig.app.gateway().calls.list().is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, gone).await.expect("the gateway is told");
    rig.app.drain().await;
}
