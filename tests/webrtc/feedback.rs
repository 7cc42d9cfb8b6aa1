//! What the gateway knows of a network that loses what it sends to Chromium: from what the browser says of each packet
//! (transport-wide feedback), long before its receiver reports, which come every five seconds.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use antiphon::media::leg::{LegEvent, PeerReport};
use antiphon::media::webrtc::WebRtcLeg;
use antiphon::server::error::ApiError;
use antiphon::server::whip::{AcceptCall, Asked, WhipState, router};
use antiphon::webrtc::{SessionId, WebRtcConfig};
use serde_json::json;
use tokio::sync::mpsc;

use crate::interop::speak;
use crate::lossy::relay;
use crate::support::{gateway, site_and_browser, within};

/// The header extension by which packets are numbered for it.
const TRANSPORT_CC: &str = "http://www.ietf.org/id/draft-holmer-rmcat-transport-wide-cc-extensions-01";
/// One of so many packets is lost.
const EACH: usize = 10;
/// Figures from feedback that are waited for; there is one a second.
const FIGURES: usize = 5;

/// Speaks, and hands on what the peer reports.
#[derive(Clone)]
struct Reported(mpsc::Sender<PeerReport>);

impl AcceptCall for Reported {
    async fn accept(&self, leg: WebRtcLeg, _: Asked, session: &SessionId) -> Result<String, ApiError> {
        let reports = self.0.clone();
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(speak(leg, |event| {
                if let LegEvent::Report(report) = event {
                    // overflow: drops; a later report tells as much.
                    let _ = reports.try_send(report);
                }
            }));
        });
        Ok(session.to_string())
    }
}

/// A call of a page whose way to the gateway is the relay: neither learns of the other's own address.
const PAGE: &str = r#"<title>page</title><button id="go">go</button><script>
document.getElementById("go").onclick = async () => {
  try {
    const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    const peer = (window.peer = new RTCPeerConnection());
    peer.ontrack = ({ streams, track }) => {
      window.player = Object.assign(new Audio(), { srcObject: streams[0] ?? new MediaStream([track]), muted: true });
      window.player.play();
    };
    peer.addTrack(stream.getTracks()[0], stream);
    await peer.setLocalDescription();
    const lines = peer.localDescription.sdp.split("\r\n").filter(line => !line.startsWith("a=candidate:"));
    window.offer = lines.join("\r\n");
    const posted = await fetch("/whip", { method: "POST", body: window.offer, headers: { "Content-Type": "application/sdp" } });
    window.answer = (await posted.text()).replaceAll(" OWN typ host", " RELAY typ host");
    await peer.setRemoteDescription({ type: "answer", sdp: window.answer });
  } catch (error) { window.failed = String(error); }
};
</script>"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_chromium_says_of_each_packet_tells_the_loss_between_its_reports() {
    if !antiphon_skip::has_program("chromium", "chromium") {
        return;
    }
    let gateway = gateway(WebRtcConfig::default()).await;
    let (sent, is_lossy) = (AtomicUsize::new(0), Arc::new(AtomicBool::new(true)));
    let losing = is_lossy.clone();
    let (relayed, relaying) = relay(gateway.local_addr(), move |to_gateway, datagram| {
        // RTP, which RTCP differs from by its second octet (RFC 5761).
        let is_sound = matches!(datagram, [128..=191, kind, ..] if !(192..=223).contains(kind));
        is_sound
            && !to_gateway
            && losing.load(Ordering::Relaxed)
            && sent.fetch_add(1, Ordering::Relaxed) % EACH == EACH - 1
    })
    .await;
    let (tell, mut reports) = mpsc::channel(64);
    let state = WhipState { gateway: gateway.clone(), accept: Reported(tell) };
    let page =
        PAGE.replace("OWN", &gateway.local_addr().port().to_string()).replace("RELAY", &relayed.port().to_string());
    let (site, mut page, _microphone) = site_and_browser(page, router(state)).await;
    page.ask("Page.navigate", json!({ "url": site })).await;
    page.until("document.getElementById('go')?.onclick != null", "location.href").await;
    page.click("go").await;
    page.until("window.peer?.connectionState == 'connected'", "window.failed + ' ' + window.answer").await;
    for description in ["offer", "answer"] {
        let sdp = page.value(&format!("window.{description}")).await;
        assert!(sdp.as_str().expect("a description").contains(TRANSPORT_CC), "{sdp}");
    }

    // A receiver report has another highest number. What changes nothing but the share that was lost is from feedback.
    let mut last: Option<PeerReport> = None;
    let mut next = async || loop {
        let report = reports.recv().await.expect("a live call");
        let of = |report: &PeerReport| (report.highest_sequence, report.lost, report.jitter, report.round_trip);
        let before = last.replace(report);
        if before.is_some_and(|before| of(&before) == of(&report)) {
            return report.fraction_lost;
        }
    };
    let mut figures = Vec::new();
    within("feedback", async {
        while figures.len() < FIGURES {
            figures.push(next().await);
        }
    })
    .await;
    let mean = figures.iter().sum::<f32>() / figures.len() as f32;
    println!("one of {EACH} packets was lost; figures from feedback: {figures:?}");
    assert!((mean - 1.0 / EACH as f32).abs() < 0.03, "{figures:?}");

    is_lossy.store(false, Ordering::Relaxed);
    within("a network without loss", async { while next().await > 0.01 {} }).await;
    page.value("window.peer.close()").await;
    gateway.shutdown().await;
    relaying.abort();
}
