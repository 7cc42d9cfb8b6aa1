//! A browser that makes another connection for the call it has, as its network is another one: the call goes on there.

use antiphon::media::leg::{LegEnd, LegEvent};
use antiphon::webrtc::{WebRtcConfig, WebRtcError};
use webrtc::peer_connection::RTCPeerConnectionState;

use crate::support::{Audio, Call, Peer, call, gateway, within};

/// What the call saw since it was last looked at.
fn seen(call: &mut Call) -> Vec<LegEvent> {
    std::iter::from_fn(|| call.events.try_recv().ok()).collect()
}

/// Sends sound until some of it has come back.
async fn echoes(peer: &mut Peer, from: u16) {
    within("sound", async {
        for number in from.. {
            peer.send(number, u32::from(number) * 960, b"sound").await;
            let pause = tokio::time::sleep(std::time::Duration::from_millis(20));
            tokio::select! {
                packet = peer.next_rtp() => {
                    assert_eq!(&packet.payload[..], b"sound");
                    return;
                }
                () = pause => {}
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_goes_on_by_another_connection_of_its_browser() {
    let gateway = gateway(WebRtcConfig::default()).await;
    let mut first = Peer::new(Audio::SendRecv, Some("agent")).await;
    let (id, _, mut call) = call(&gateway, &mut first).await;
    first.channel_open().await;
    echoes(&mut first, 1).await;

    // One that never connects leaves the first in its place, and so does one that follows no session.
    let mut absent = Peer::new(Audio::SendRecv, None).await;
    let offer = absent.offer().await;
    let unused = gateway.succeed(&id, &offer).await.expect("a good offer");
    assert!(matches!(gateway.succeed(&"nobody".into(), &offer).await, Err(WebRtcError::NoSession)));
    echoes(&mut first, 100).await;

    let mut second = Peer::new(Audio::SendRecv, Some("agent")).await;
    let offer = second.offer().await;
    let next = gateway.succeed(&id, &offer).await.expect("a good offer");
    assert!(next.id != id && next.id != unused.id);
    second.accept(&next.sdp).await;
    second.state(RTCPeerConnectionState::Connected).await;
    second.channel_open().await;
    echoes(&mut second, 30_000).await;
    second.say("moved").await;
    assert_eq!(second.next_text().await, "heard moved");
    // What came before is given back, and nobody can follow it.
    within("the first session's end", async {
        while gateway.count() > 1 {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    })
    .await;
    assert!(matches!(gateway.succeed(&id, &offer).await, Err(WebRtcError::NoSession)));
    assert!(matches!(gateway.patch(&id, "*", "a=ice-ufrag:x\r\n").await, Err(WebRtcError::NoSession)));
    let events = seen(&mut call);
    assert_eq!(events.iter().filter(|event| matches!(event, LegEvent::Connected)).count(), 1, "{events:?}");
    assert!(!events.iter().any(|event| matches!(event, LegEvent::Closed(_))), "{events:?}");

    // It can move again, and hangs up as the last one.
    let mut third = Peer::new(Audio::SendRecv, Some("agent")).await;
    let offer = third.offer().await;
    let last = gateway.succeed(&next.id, &offer).await.expect("a good offer");
    third.accept(&last.sdp).await;
    third.state(RTCPeerConnectionState::Connected).await;
    echoes(&mut third, 1).await;
    assert!(gateway.delete(&last.id).await);
    assert_eq!(call.end().await, LegEnd::Remote);
    within("no session", async {
        while gateway.count() > 0 {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    })
    .await;
}
