//! What we hear of a stream that a network has spoilt, beside what others play of the same packets, which arrive there at the same
//! instants: libwebrtc's own buffer (NetEq, in Chromium), and the crate `neteq`, which is modelled on it.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use antiphon::media::decode::RATE;
use antiphon::media::leg::{LegEvent, MediaLeg, OutPacket};
use antiphon::media::webrtc::WebRtcLeg;
use antiphon::server::error::ApiError;
use antiphon::server::whip::{AcceptCall, Asked, WhipState, router};
use antiphon::webrtc::{SessionId, WebRtcConfig};
use antiphon_loadgen::correlate::correlate;
use antiphon_loadgen::heard::Clip;
use antiphon_loadgen::wav;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;

use crate::chromium::Page;
use crate::loss::{arriving, hear};
use crate::support::{gateway, site_and_browser};

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
    let start = antiphon::clock::now() + Duration::from_millis(500);
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
    let (site, mut page, _microphone) = site_and_browser(PAGE.into(), router(state)).await;

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

/// What the crate needs to know of Opus.
struct Opus(opus::Decoder);

/// Samples a second at which the crate works: its clock is that of RTP.
const CRATE_RATE: u32 = 48_000;

impl ::neteq::codec::AudioDecoder for Opus {
    fn sample_rate(&self) -> u32 {
        CRATE_RATE
    }

    fn channels(&self) -> u8 {
        1
    }

    fn decode(&mut self, encoded: &[u8]) -> ::neteq::Result<Vec<f32>> {
        let mut pcm = vec![0.0; 5_760];
        let length = self.0.decode_float(encoded, &mut pcm, false);
        pcm.truncate(length.map_err(|error| ::neteq::NetEqError::DecoderError(error.to_string()))?);
        Ok(pcm)
    }
}

/// What the crate plays of `packets` from `start` on, 10 ms at a time, with a delay of at least so many milliseconds. It takes the
/// time from the clock of the machine, so this lasts as long as the sound does.
fn played_by_the_crate(
    mut packets: Vec<(Instant, OutPacket)>,
    (start, length): (Instant, Duration),
    min_delay_ms: u32,
) -> Clip {
    packets.sort_by_key(|(at, _)| *at);
    let mut packets = packets.into_iter().peekable();
    let config = ::neteq::NetEqConfig { sample_rate: CRATE_RATE, channels: 1, min_delay_ms, ..Default::default() };
    let mut buffer = ::neteq::NetEq::new(config).expect("a buffer");
    let decoder = opus::Decoder::new(CRATE_RATE, opus::Channels::Mono).expect("a decoder");
    #[expect(clippy::disallowed_methods, reason = "the crate goes by the machine's clock, so its sound takes its time")]
    let wait = |until: Instant| thread::sleep(until.saturating_duration_since(antiphon::clock::now()));
    let mut clip = Clip { rate: CRATE_RATE, pcm: Vec::new() };
    let mut decoder = Some(decoder);
    let mut due = start;
    while due < start + length {
        while let Some((at, packet)) = packets.next_if(|(at, _)| *at <= due) {
            wait(at);
            if let Some(decoder) = decoder.take() {
                buffer.register_decoder(packet.payload_type, Box::new(Opus(decoder)));
            }
            let header =
                ::neteq::RtpHeader::new(packet.sequence, packet.timestamp, 1, packet.payload_type, packet.marker);
            let packet = ::neteq::AudioPacket::new(header, packet.payload.to_vec(), CRATE_RATE, 1, 20);
            buffer.insert_packet(packet).expect("taken");
        }
        wait(due);
        clip.pcm.extend(buffer.get_audio().expect("sound").samples);
        due += Duration::from_millis(10);
    }
    clip
}

/// How late the sound of `whole` is in `played`, seconds: the middle of what pieces of it are that are found there.
fn lateness(played: &Clip, whole: &Clip) -> f64 {
    let cut = |clip: &Clip, from: f64, length: f64| {
        let at = |seconds: f64| ((seconds * f64::from(clip.rate)) as usize).min(clip.pcm.len());
        Clip { rate: clip.rate, pcm: clip.pcm[at(from)..at(from + length)].to_vec() }
    };
    let mut lags = Vec::new();
    for piece in 0..whole.pcm.len() / (RATE as usize / 5) {
        let from = piece as f64 * 0.2;
        let found = correlate(&cut(played, from, 1.2), &cut(whole, from, 0.4)).expect("comparable");
        if found.value > 0.8 {
            lags.push(found.offset);
        }
    }
    lags.sort_by(f64::total_cmp);
    lags[lags.len() / 2]
}

/// A figure of each way, and how long after it was sent a sound came, in seconds.
#[derive(Debug, Default)]
struct Figures {
    correlation: f64,
    late: f64,
}

#[test]
#[ignore = "takes minutes"]
fn what_we_hear_is_better_and_sooner_than_what_the_crate_neteq_plays_of_the_same_packets() {
    let said = sentences();
    let length = said.pcm.len() as f64 / f64::from(RATE);
    let lasts = Duration::from_secs_f64(length + 1.0);
    let whole = hear(arriving(&said, (0.0, false, 1), antiphon::clock::now())).clip;
    for loss in [0.0, 0.05, 0.15] {
        let seeds = if loss == 0.0 { 1..=1 } else { 1..=3 };
        let count = seeds.clone().count() as f64;
        // The crate as it is, and with as much delay as the network shakes.
        let (mut ours, mut theirs) = (Figures::default(), [0, 80].map(|least| (least, Figures::default())));
        for seed in seeds {
            let start = antiphon::clock::now() + Duration::from_millis(100);
            let packets = arriving(&said, (loss, false, seed), start);
            let played = thread::scope(|scope| {
                let all = theirs.each_ref().map(|(least, _)| {
                    let packets = packets.clone();
                    scope.spawn(move || played_by_the_crate(packets, (start, lasts), *least))
                });
                all.map(|thread| thread.join().expect("no panic"))
            });
            for (played, (least, figures)) in played.iter().zip(&mut theirs) {
                keep(played, &format!("crate-{least}-{loss}-{seed}.wav"));
                figures.correlation += f64::from(correlate(played, &whole).expect("comparable").value) / count;
                figures.late += lateness(played, &whole) / count;
            }
            let own = hear(packets);
            let late = own.came.iter().map(|(at, samples)| {
                at.saturating_duration_since(start).as_secs_f64() - *samples as f64 / f64::from(RATE)
            });
            let mut late: Vec<f64> = late.collect();
            late.sort_by(f64::total_cmp);
            ours.late += late[late.len() / 2] / count;
            ours.correlation += f64::from(correlate(&own.clip, &whole).expect("comparable").value) / count;
        }
        println!(
            "loss {loss}, jitter 60 ms: {ours:.3?} here, {theirs:.3?} by the crate with at least such a delay, ms"
        );
        for (least, theirs) in &theirs {
            assert!(theirs.correlation > 0.3, "{least} ms: the words do not come through the crate");
            assert!(ours.correlation > theirs.correlation && ours.late < theirs.late, "loss {loss}, {least} ms");
        }
    }
}
