//! Pipecat's own client for browsers, as its authors publish it, in Chromium and on a call with the demo agent: what it tells a
//! page of the bot is what the bot says, and what the page writes reaches it.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use antiphon_loadgen::{synthetic, wav};
use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::response::Html;
use axum::routing::get;
use serde_json::{Value, json};
use tokio::process::Command;

use super::chromium::Page;
use super::support::{PATIENCE, Rig};

/// Longest time that the client may take to be installed.
const INSTALL: Duration = Duration::from_secs(240);
/// What a failed wait shows.
const STATE: &str = "JSON.stringify(window.seen)";

/// A page of a bot's builder, of the sort that the client's own documentation shows; `seen` has what the client told it. Sound
/// is handled by the client's own manager of devices, for the usual one loads a program from its maker.
const PAGE: &str = r#"<title>page</title><button id="go">go</button><audio id="bot" autoplay></audio><script type="module">
import { PipecatClient, SmallWebRTCTransport, WavMediaManager } from "./pipecat.js";
window.seen = [];
window.RTCPeerConnection = class extends RTCPeerConnection { constructor(...all) { super(...all); window.peer = this; } };
const callbacks = {
  onTrackStarted: (track, who) => {
    if (!who?.local) document.getElementById("bot").srcObject = new MediaStream([track]);
  },
};
for (const name of ["TransportStateChanged", "BotReady", "BotStartedSpeaking", "BotStoppedSpeaking", "BotTtsText", "BotOutput",
                    "UserTranscript", "Disconnected", "Error"]) {
  callbacks["on" + name] = data => window.seen.push([name, data?.text ?? data ?? null]);
}
const transport = new SmallWebRTCTransport({ mediaManager: new WavMediaManager() });
window.client = new PipecatClient({ transport, enableMic: true, enableCam: false, callbacks });
window.has = (name, text) => window.seen.some(one => one[0] == name && (text == null || one[1] == text));
document.getElementById("go").onclick = () => {
  client.connect({ webrtcRequestParams: { endpoint: "GATEWAY/api/offer?agent=demo" } })
    .catch(error => window.seen.push(["failed", String(error)]));
};
</script>"#;

/// The client as one module, if it can be had.
async fn client() -> Option<String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop/pipecat.sh");
    let output = Command::new(script).stdin(Stdio::null()).kill_on_drop(true).output();
    let output = tokio::time::timeout(INSTALL, output).await.expect("the script ends").expect("the script runs");
    let said = String::from_utf8(output.stdout).expect("text");
    if output.status.code() == Some(77) {
        antiphon_skip::skip("pipecat", said.trim());
        return None;
    }
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(std::fs::read_to_string(said.trim()).expect("readable"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pipecats_own_client_calls_hears_and_is_told_what_is_said() {
    if !antiphon_skip::has_program("chromium", "chromium") {
        return;
    }
    let Some(client) = client().await else { return };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let origin = format!("http://{}", listener.local_addr().expect("bound"));
    let rig = Rig::with(|config| config.http.cors = vec![origin.clone()]).await;
    let page = PAGE.replace("GATEWAY", &rig.http);
    let site = Router::new()
        .route("/", get(async || Html(page)))
        .route("/pipecat.js", get(async || ([(CONTENT_TYPE, "text/javascript")], client)));
    tokio::spawn(async { axum::serve(listener, site).await });

    let folder = tempfile::tempdir().expect("a folder");
    // A person who listens: anything louder might interrupt.
    let microphone = folder.path().join("quiet.wav");
    let mut room = synthetic::noise(1, 48_000, 5.0);
    room.pcm.iter_mut().for_each(|sample| *sample *= 0.000_5);
    wav::write(&microphone, &room).expect("written");
    let mut page = Page::open(&microphone).await;
    page.ask("Page.navigate", json!({ "url": origin })).await;
    page.until("document.getElementById('go')?.onclick != null", "document.body.innerText").await;
    page.click("go").await;
    page.until("has('BotReady') && has('TransportStateChanged', 'ready')", STATE).await;
    page.until("has('BotOutput', 'Hello, this is Antiphon.')", STATE).await;
    // Some seconds of speech, whose energy a second is some 0.03 of full scale; silence has none.
    page.until(
        "peer.getStats().then(all => [...all.values()].some(one => one.type == 'inbound-rtp' && one.totalAudioEnergy > 0.01))",
        STATE,
    )
    .await;
    page.until("has('BotStoppedSpeaking')", STATE).await;
    page.value("client.sendText('What is your name?'), 0").await;
    page.until("has('UserTranscript', 'What is your name?')", STATE).await;
    page.until("has('BotOutput', 'You said: What is your name?')", STATE).await;
    page.until("window.seen.at(-1)[0] == 'BotStoppedSpeaking'", STATE).await;
    let seen: Value = page.value("window.seen").await;
    assert!(!seen.as_array().expect("a list").iter().any(|one| one[0] == "Error" || one[0] == "failed"), "{seen}");

    let calls = &rig.app.gateway().calls;
    assert_eq!(calls.list().len(), 1);
    page.value("client.disconnect(), 0").await;
    page.until("has('Disconnected')", STATE).await;
    let gone = async {
        while !calls.list().is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, gone).await.expect("the gateway is told");
    rig.app.drain().await;
}
