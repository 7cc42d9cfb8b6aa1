//! A browser behind a firewall: it reaches the gateway by coturn only, over UDP, TCP and TLS, with the password that the gateway
//! makes for it.

use antiphon_loadgen::{synthetic, wav};
use serde_json::{Value, json};

use super::chromium::Page;
use super::coturn::Turn;
use super::support::Rig;

/// What a failed wait shows.
const STATE: &str = "document.getElementById('problem').textContent + ' / ' + \
    document.getElementById('state').textContent + ' / ' + document.getElementById('captions').textContent";

/// Every connection of the page uses relays only, and is kept.
const RELAYS_ONLY: &str = "window.peers = []; window.RTCPeerConnection = class extends RTCPeerConnection { \
    constructor(options) { super({ ...options, iceTransportPolicy: 'relay' }); window.peers.push(this); } }; 0";

/// The browser's end of the path that the call takes, and what the gateway says it has had of the microphone.
const PATH: &str = "(async () => { \
    const stats = await window.peers.at(-1).getStats(), all = [...stats.values()]; \
    const pair = all.find(one => one.type == 'candidate-pair' && one.nominated && one.bytesReceived > 0); \
    const local = pair && stats.get(pair.localCandidateId); \
    return { type: local?.candidateType, by: local?.relayProtocol, \
             reported: all.some(one => one.type == 'remote-inbound-rtp' && one.fractionLost == 0) }; })()";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_browser_calls_by_a_relay_only_over_udp_tcp_and_tls() {
    if !antiphon_skip::has_program("chromium", "chromium") {
        return;
    }
    let Some(turn) = Turn::start().await else { return };
    let folder = tempfile::tempdir().expect("a folder");
    // A person who listens: anything louder might interrupt.
    let microphone = folder.path().join("quiet.wav");
    let mut room = synthetic::noise(1, 48_000, 5.0);
    room.pcm.iter_mut().for_each(|sample| *sample *= 0.000_5);
    wav::write(&microphone, &room).expect("written");
    // The certificate of the relay is its own.
    let mut page = Page::open_with(&microphone, &["--ignore-certificate-errors"]).await;
    for transport in ["udp", "tcp", "tls"] {
        let rig = Rig::with(|config| config.webrtc.ice_servers = vec![turn.by(transport)]).await;
        page.ask("Page.navigate", json!({ "url": format!("{}/", rig.http) })).await;
        page.until("document.getElementById('health')?.textContent == 'ready'", "document.body.innerText").await;
        page.value(RELAYS_ONLY).await;
        page.click("call").await;
        page.until("document.getElementById('state').textContent == 'connected'", STATE).await;
        page.until("document.getElementById('captions').textContent.includes('Hello, this is Antiphon')", STATE).await;
        page.until("document.getElementById('level-out').value > -40", STATE).await;
        page.until(&format!("{PATH}.then(path => path.reported)"), PATH).await;
        let path: Value = page.value(PATH).await;
        assert_eq!((&path["type"], &path["by"]), (&json!("relay"), &json!(transport)), "{path}");
        page.click("hang").await;
        page.until("document.getElementById('state').textContent == 'ended'", STATE).await;
        rig.app.drain().await;
    }
}
