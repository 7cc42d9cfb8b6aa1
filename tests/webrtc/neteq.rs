//! What we hear of a stream that a network has spoilt, beside what libwebrtc's own buffer (NetEq, in Chromium) plays of the
//! same packets, which arrive there at the same instants.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;

use antiphon::media::decode::RATE;
use antiphon::media::leg::{LegEvent, MediaLeg, OutPacket};
use antiphon::media::webrtc::WebRtcLeg;
use antiphon::server::auth::Caller;
use antiphon::server::error::ApiError;
use antiphon::server::whip::{AcceptCall, Asked, WhipState, router};
use antiphon::webrtc::{SessionId, WebRtcConfig};
use antiphon_loadgen::correlate::correlate;
use antiphon_loadgen::heard::Clip;
use antiphon_loadgen::{synthetic, wav};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;

use crate::chromium::Page;
use crate::loss::{arriving, hear};
use crate::support::gateway;

/// Share of packets lost, and the seed of the network.
type Network = (f64, u64);

/// Sends the words as a network leaves them.
#[derive(Clone)]
struct Spoilt(Arc<Mutex<Network>>);

impl AcceptCall for Spoilt {
    async fn accept(&self, leg: WebRtcLeg, _: Asked, session: &SessionId) -> Result<String, ApiError> {
        let network = *self.0.lock().expect("no panic");
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(send(leg, network));
        });
        Ok(session.to_string())
    }
}

/// Three sentences.
fn sentences() -> Clip {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/smart_turn");
    let names = ["blue_whole.wav", "card_whole.wav", "office_whole.wav"];
    let clips = names.map(|name| wav::read(folder.join(name)).expect("recorded words"));
    assert!(clips.iter().all(|clip| clip.rate == RATE));
    Clip { rate: RATE, pcm: clips.into_iter().flat_map(|clip| clip.pcm).collect() }
}

async fn send(mut leg: WebRtcLeg, (loss, seed): Network) {
    leg.attach().await.expect("a live session");
    while leg.recv().await != LegEvent::Connected {}
    let payload_type = leg.format().payload_type;
    let start = antiphon::clock::now() + std::time::Duration::from_millis(500);
    let mut packets = arriving(&sentences(), (loss, false, seed), start);
    packets.sort_by_key(|(at, _)| *at);
    for (at, packet) in packets {
        let due = tokio::time::sleep_until(at.into());
        tokio::pin!(due);
        loop {
            tokio::select! {
                () = &mut due => break,
                event = leg.recv() => if matches!(event, LegEvent::Closed(_)) { return },
            }
        }
        let _ = leg.send(OutPacket { payload_type, ..packet }).await;
    }
    while !matches!(leg.recv().await, LegEvent::Closed(_)) {}
}

const PAGE: &str = r#"<title>page</title><button id="go">go</button><script>
const tap = "registerProcessor('tap', class extends AudioWorkletProcessor { process([[block]]) { if (block) this.port.postMessage(block.slice()); return true; } })";
document.getElementById("go").onclick = async () => {
  try {
    const context = new AudioContext({ sampleRate: 16000 });
    await context.audioWorklet.addModule(URL.createObjectURL(new Blob([tap], { type: "text/javascript" })));
    await navigator.mediaDevices.getUserMedia({ audio: true }); // its addresses show
    window.heard = [];
    const peer = (window.peer = new RTCPeerConnection());
    peer.ontrack = event => {
      const stream = new MediaStream([event.track]);
      window.player = Object.assign(new Audio(), { srcObject: stream, muted: true });
      window.player.play();
      const node = new AudioWorkletNode(context, "tap");
      node.port.onmessage = message => window.heard.push(...message.data);
      context.createMediaStreamSource(stream).connect(node);
    };
    const sound = peer.addTransceiver("audio", { direction: "recvonly" });
    sound.setCodecPreferences(RTCRtpReceiver.getCapabilities("audio").codecs.filter(one => one.mimeType == "audio/opus"));
    await peer.setLocalDescription();
    await new Promise(done => {
      const look = () => peer.iceGatheringState == "complete" && done();
      peer.onicegatheringstatechange = look;
      look();
    });
    const offer = { method: "POST", body: peer.localDescription.sdp, headers: { "Content-Type": "application/sdp" } };
    await peer.setRemoteDescription({ type: "answer", sdp: await (await fetch("/whip", offer)).text() });
  } catch (error) { window.failed = String(error); }
};
window.received = async () => {
  for (const one of (await peer.getStats()).values()) if (one.type == "inbound-rtp") return one.packetsReceived;
};
window.taken = () => {
  const pcm = new Uint8Array(Int16Array.from(window.heard, s => Math.round(32767 * Math.max(-1, Math.min(1, s)))).buffer);
  let text = "";
  for (let at = 0; at < pcm.length; at += 8192) text += String.fromCharCode(...pcm.subarray(at, at + 8192));
  return btoa(text);
};
</script>"#;

/// What Chromium plays of the words through `network`.
async fn played(page: &mut Page, site: &str, expected: usize) -> Clip {
    page.ask("Page.navigate", json!({ "url": site })).await;
    page.until("document.readyState == 'complete' && window.taken != null", "location.href").await;
    page.click("go").await;
    let all = format!("window.peer != null && received().then(count => count >= {expected})");
    page.until(&all, "window.failed + ' ' + window.peer?.connectionState").await;
    // What it still holds, and its buffer's own time.
    page.value("new Promise(done => setTimeout(done, 1500))").await;
    let pcm = page.value("window.taken()").await;
    page.value("window.peer.close()").await;
    let pcm = STANDARD.decode(pcm.as_str().expect("text")).expect("base64");
    let pcm = pcm.as_chunks().0.iter().map(|bytes| f32::from(i16::from_le_bytes(*bytes)) / 32_768.0);
    Clip { rate: RATE, pcm: pcm.collect() }
}

fn keep(clip: &Clip, name: &str) {
    #[allow(clippy::disallowed_methods, reason = "this variable belongs to the test")]
    if let Ok(folder) = std::env::var("ANTIPHON_HEARD") {
        wav::write(Path::new(&folder).join(name), clip).expect("written");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes a minute and Chromium"]
async fn what_we_hear_is_as_good_as_what_chromium_plays_of_the_same_packets() {
    if !antiphon_skip::has_program("chromium", "chromium") {
        return;
    }
    let network = Arc::new(Mutex::new((0.0, 1)));
    let gateway = gateway(WebRtcConfig::default()).await;
    let state = WhipState { gateway: gateway.clone(), accept: Spoilt(network.clone()) };
    let pages = axum::Router::new().route("/", axum::routing::get(async || axum::response::Html(PAGE)));
    let router = pages.merge(router(state).layer(axum::Extension(Caller::anybody())));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let site = format!("http://{}/", listener.local_addr().expect("bound"));
    tokio::spawn(async move { axum::serve(listener, router).await });
    let folder = tempfile::tempdir().expect("a folder");
    let microphone = folder.path().join("quiet.wav");
    wav::write(&microphone, &synthetic::noise(1, 48_000, 0.1)).expect("written");
    let mut page = Page::open(&microphone).await;

    let said = sentences();
    let whole = hear(arriving(&said, (0.0, false, 1), antiphon::clock::now())).clip;
    for loss in [0.0, 0.05, 0.15] {
        let seeds = if loss == 0.0 { 1..=1 } else { 1..=3 };
        let (mut ours, mut chromium, count) = (0.0, 0.0, seeds.clone().count() as f32);
        for seed in seeds {
            *network.lock().expect("no panic") = (loss, seed);
            let packets = arriving(&said, (loss, false, seed), antiphon::clock::now());
            let expected = packets.len();
            let own = hear(packets).clip;
            let theirs = played(&mut page, &site, expected).await;
            keep(&own, &format!("ours-{loss}-{seed}.wav"));
            keep(&theirs, &format!("chromium-{loss}-{seed}.wav"));
            ours += correlate(&own, &whole).expect("comparable").value / count;
            chromium += correlate(&theirs, &whole).expect("comparable").value / count;
        }
        println!("loss {loss}, jitter 60 ms: correlation {ours:.3} here, {chromium:.3} in Chromium");
        assert!(chromium > 0.5, "the words do not come through Chromium: {chromium}");
        assert!(ours > chromium - 0.02, "loss {loss}: {ours} here, {chromium} in Chromium");
    }
    gateway.shutdown().await;
}
