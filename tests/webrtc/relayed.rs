//! A gateway whose port no peer can reach: through a real TURN server (coturn), over UDP and over TCP.

use std::net::UdpSocket;

use crate::coturn::Turn;
use crate::support::{Audio, Peer, echo, gateway};
use antiphon::media::leg::LegEvent;
use antiphon::webrtc::WebRtcConfig;
use webrtc::peer_connection::RTCPeerConnectionState;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_cannot_be_reached_is_called_through_its_relay() {
    let Some(turn) = Turn::start().await else { return };
    for transport in ["udp", "tcp"] {
        let server = turn.by(transport);
        let gateway = gateway(WebRtcConfig { turn: Some(server), ..WebRtcConfig::default() }).await;
        let mut peer = Peer::new(Audio::SendRecv, Some("agent")).await;
        // A permission is for an address with all its ports: this one names the address and reaches nobody.
        let nobody = UdpSocket::bind("127.0.0.1:0").expect("a port");
        let elsewhere = format!(
            "a=candidate:1 1 udp 2130706431 127.0.0.1 {} typ host\r\n",
            nobody.local_addr().expect("bound").port()
        );
        let offer = peer.offer().await;
        let kept = offer.lines().filter(|line| !line.starts_with("a=candidate") && *line != "a=end-of-candidates");
        let offer = kept.fold(String::new(), |sdp, line| sdp + line + "\r\n") + &elsewhere;
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
}
