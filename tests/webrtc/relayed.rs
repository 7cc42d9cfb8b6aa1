//! A gateway whose port no peer can reach: through a real TURN server (coturn), over UDP, TCP and TLS.
//!
//! The certificate of that server is its own, and which authorities are believed is read once in the life of a process: a process
//! that `SSL_CERT_FILE` has believe it runs the test of TLS (`inside_*`), beside one that does not.

use std::net::UdpSocket;
use std::process::Stdio;

use crate::coturn::{Turn, at};
use crate::support::{Audio, PATIENCE, Peer, echo, gateway};
use antiphon::media::leg::LegEvent;
use antiphon::webrtc::{IceServer, WebRtcConfig};
use webrtc::peer_connection::RTCPeerConnectionState;

/// The URL of the server, for the process that believes it.
const SERVER: &str = "ANTIPHON_TEST_TURN";

/// An offer of a peer whose address is known and whose port is not: a permission is for an address with all its ports, so this
/// names the address and reaches nobody.
async fn offer(peer: &mut Peer) -> (String, UdpSocket) {
    let nobody = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let elsewhere =
        format!("a=candidate:1 1 udp 2130706431 127.0.0.1 {} typ host\r\n", nobody.local_addr().expect("bound").port());
    let offer = peer.offer().await;
    let kept = offer.lines().filter(|line| !line.starts_with("a=candidate") && *line != "a=end-of-candidates");
    (kept.fold(String::new(), |sdp, line| sdp + line + "\r\n") + &elsewhere, nobody)
}

/// A whole call of a gateway that is reached through `server` only.
async fn call_through(server: IceServer, transport: &str) {
    let gateway = gateway(WebRtcConfig { turn: Some(server), ..WebRtcConfig::default() }).await;
    let mut peer = Peer::new(Audio::SendRecv, Some("agent")).await;
    let (offer, _nobody) = offer(&mut peer).await;
    let answered = gateway.answer(&offer).await.expect("a good offer");
    let own = format!(" {} typ host", gateway.local_addr().port());
    let relayed: Vec<&str> = answered.sdp.lines().filter(|line| line.contains(" typ relay ")).collect();
    assert!(!relayed.is_empty(), "{transport}: {}", answered.sdp);
    assert!(relayed.iter().all(|line| line.ends_with("raddr 0.0.0.0 rport 0")), "{relayed:?}");
    // The gateway's own port is nowhere to the peer.
    let reached: Vec<&str> = answered.sdp.lines().filter(|line| !line.contains(&own)).collect();
    let mut call = echo(answered.leg);
    peer.accept(&(reached.join("\r\n") + "\r\n")).await;
    peer.state(RTCPeerConnectionState::Connected).await;
    call.next(|event| matches!(event, LegEvent::Connected)).await;
    peer.channel_open().await;
    peer.say(transport).await;
    assert_eq!(peer.next_text().await, format!("heard {transport}"));
    for number in 1..=20_u16 {
        peer.send(number, u32::from(number) * 960, b"sound").await;
        assert_eq!(&peer.next_rtp().await.payload[..], b"sound");
    }
    gateway.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_cannot_be_reached_is_called_through_its_relay() {
    let Some(turn) = Turn::start().await else { return };
    for transport in ["udp", "tcp"] {
        call_through(turn.by(transport), transport).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_over_tls_is_used_where_its_certificate_is_believed_and_nowhere_else() {
    let Some(turn) = Turn::start().await else { return };
    let server = turn.by("tls");
    let inside = tokio::process::Command::new(std::env::current_exe().expect("a program"))
        .args(["relayed::inside_a_process_that_believes_the_relay", "--exact", "--ignored", "--nocapture"])
        .env("SSL_CERT_FILE", turn.certificate())
        .env(SERVER, &server.urls[0])
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(2 * PATIENCE, inside).await.expect("it ends").expect("it runs");
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.contains("1 passed"), "{said}");

    // Here nobody vouches for it: the call is answered, by the port alone.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let gateway = gateway(WebRtcConfig { turn: Some(server), ..WebRtcConfig::default() }).await;
    let mut peer = Peer::new(Audio::SendRecv, None).await;
    let (offer, _nobody) = offer(&mut peer).await;
    let answered = gateway.answer(&offer).await.expect("a good offer");
    assert!(!answered.sdp.contains(" typ relay ") && answered.sdp.contains(" typ host"), "{}", answered.sdp);
    gateway.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "another test runs it in a process of its own"]
async fn inside_a_process_that_believes_the_relay() {
    #[allow(clippy::disallowed_methods, reason = "this variable belongs to the test")]
    let Ok(server) = std::env::var(SERVER) else { return };
    let _ = rustls::crypto::ring::default_provider().install_default();
    call_through(at(server), "tls").await;
}
