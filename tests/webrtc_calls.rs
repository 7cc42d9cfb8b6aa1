//! Browser calls over real ICE, DTLS, SRTP and SCTP on loopback, all through the gateway's one UDP port.

mod webrtc_support;

use antiphon::media::leg::{LegEnd, LegEvent, MediaLeg};
use antiphon::webrtc::{Patched, WebRtcConfig, WebRtcError};
use webrtc::peer_connection::RTCPeerConnectionState;
use webrtc_support::{Audio, PEER_OPUS, Peer, call, echo, gateway, within};

fn is_connected(event: &LegEvent) -> bool {
    matches!(event, LegEvent::Connected)
}

/// Sends numbered packets until one comes back, then checks that a run of them does.
async fn hears_itself(peer: &mut Peer, salt: u8) {
    for number in 0..20_u16 {
        peer.send(number, u32::from(number) * 960, &[salt, number as u8, 1, 2, 3]).await;
    }
    for number in 0..20_u16 {
        let packet = peer.next_rtp().await;
        assert_eq!(packet.header.payload_type, PEER_OPUS);
        assert_eq!(packet.header.sequence_number, number);
        assert_eq!(packet.header.timestamp, u32::from(number) * 960);
        assert_eq!(&packet.payload[..], [salt, number as u8, 1, 2, 3]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn audio_and_text_flow_both_ways_through_the_shared_port() {
    let gateway = gateway(WebRtcConfig::default()).await;
    let mut peer = Peer::new(Audio::SendRecv, Some("agent")).await;
    let offer = peer.offer().await;
    let answered = gateway.answer(&offer).await.expect("a good offer");
    let port = format!(" {} typ host", gateway.local_addr().port());
    let candidates: Vec<&str> = answered.sdp.lines().filter(|line| line.starts_with("a=candidate:")).collect();
    assert!(!candidates.is_empty() && candidates.iter().all(|line| line.contains(&port)), "{candidates:?}");
    assert_eq!(answered.leg.format().payload_type, PEER_OPUS);
    assert!(answered.leg.format().opus_fec);
    let mut call = echo(answered.leg);
    peer.accept(&answered.sdp).await;
    call.next(is_connected).await;
    peer.channel_open().await;
    peer.say("hello").await;
    assert_eq!(peer.next_text().await, "heard hello");
    hears_itself(&mut peer, 7).await;
    // The peer reports about what it was sent once a second.
    let LegEvent::Report(report) = call.next(|event| matches!(event, LegEvent::Report(_))).await else {
        unreachable!()
    };
    assert_eq!(report.lost, 0);
    assert!(gateway.delete(&answered.id).await);
    assert_eq!(call.end().await, LegEnd::Remote);
    assert_eq!(gateway.count(), 0);
    assert!(!gateway.delete(&answered.id).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_sessions_share_the_port_and_hear_only_themselves() {
    let gateway = gateway(WebRtcConfig::default()).await;
    let mut first = Peer::new(Audio::SendRecv, None).await;
    let mut second = Peer::new(Audio::SendRecv, None).await;
    let (_, _, mut one) = call(&gateway, &mut first).await;
    let (_, _, mut two) = call(&gateway, &mut second).await;
    one.next(is_connected).await;
    two.next(is_connected).await;
    tokio::join!(hears_itself(&mut first, 1), hears_itself(&mut second, 2));
    gateway.shutdown().await;
    assert_eq!(one.end().await, LegEnd::Local);
    assert_eq!(two.end().await, LegEnd::Local);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_the_page_ends_the_call_at_once() {
    let gateway = gateway(WebRtcConfig::default()).await;
    let mut peer = Peer::new(Audio::SendRecv, Some("agent")).await;
    let (_, _, mut call) = call(&gateway, &mut peer).await;
    call.next(is_connected).await;
    peer.close().await;
    // By the DTLS alert, or this would take the twelve seconds of the ICE timeouts and end as lost.
    assert_eq!(call.end().await, LegEnd::Remote);
}
