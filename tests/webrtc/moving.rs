//! A peer whose address changes under it: the NAT on its way forgets the mapping and makes another.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::counted::Growth;
use crate::support::{Audio, Peer, echo, gateway, within};
use antiphon::media::leg::LegEvent;
use antiphon::webrtc::WebRtcConfig;
use tokio::net::UdpSocket;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;
use webrtc::peer_connection::RTCPeerConnectionState;

/// The longest that a peer may be unheard, in packets of 20 ms; on an idle machine it is 10. After 600 it would be lost.
const GAP: u16 = 500;

/// A NAT before one peer. The gateway knows [`Nat::outer`] only, which changes.
struct Nat {
    inner: SocketAddr,
    outer: watch::Sender<Arc<UdpSocket>>,
    _task: AbortOnDropHandle<()>,
}

impl Nat {
    async fn start(gateway: SocketAddr) -> Nat {
        let bind = || UdpSocket::bind("127.0.0.1:0");
        let inner = bind().await.expect("a free port");
        let address = inner.local_addr().expect("bound");
        let outer = watch::Sender::new(Arc::new(bind().await.expect("a free port")));
        let mut mapping = outer.subscribe();
        let task = tokio::spawn(async move {
            let mut peer = None;
            let (mut out, mut back) = (vec![0; 2048], vec![0; 2048]);
            loop {
                let socket = mapping.borrow_and_update().clone();
                tokio::select! {
                    Ok((length, from)) = inner.recv_from(&mut out) => {
                        peer = Some(from);
                        let _ = socket.send_to(&out[..length], gateway).await;
                    }
                    Ok((length, _)) = socket.recv_from(&mut back) => if let Some(peer) = peer {
                        let _ = inner.send_to(&back[..length], peer).await;
                    },
                    // The old one is closed: what is sent to it is lost.
                    _ = mapping.changed() => {}
                }
            }
        });
        Nat { inner: address, outer, _task: AbortOnDropHandle::new(task) }
    }

    /// The mapping is gone; the next packet makes another.
    async fn forget(&self) {
        self.outer.send_replace(Arc::new(UdpSocket::bind("127.0.0.1:0").await.expect("a free port")));
    }
}

fn without_candidates(sdp: &str) -> String {
    let kept = sdp.lines().filter(|line| !line.starts_with("a=candidate") && *line != "a=end-of-candidates");
    kept.fold(String::new(), |sdp, line| sdp + line + "\r\n")
}

/// Sends a packet every 20 ms until one of them has come back; says which, and the SSRC that it came back by.
async fn until_heard(peer: &mut Peer, from: u16) -> (u16, u32) {
    within("sound", async {
        for number in from.. {
            peer.send(number, u32::from(number) * 960, b"sound").await;
            let pause = tokio::time::sleep(Duration::from_millis(20));
            tokio::pin!(pause);
            loop {
                tokio::select! {
                    packet = peer.next_rtp() => if packet.header.sequence_number >= from {
                        return (packet.header.sequence_number, packet.header.ssrc);
                    },
                    () = &mut pause => break,
                }
            }
        }
        unreachable!()
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_behind_a_nat_that_forgets_stays_in_its_call() {
    let gateway = gateway(WebRtcConfig::default()).await;
    let nat = Nat::start(gateway.local_addr()).await;
    let mut peer = Peer::new(Audio::SendRecv, Some("agent")).await;
    // The gateway learns of no address but by what comes from it.
    let offer = without_candidates(&peer.offer().await);
    let answered = gateway.answer(&offer).await.expect("a good offer");
    let (own, shown) = (gateway.local_addr().port(), nat.inner.port());
    let mut call = echo(answered.leg);
    peer.accept(&answered.sdp.replace(&format!(" {own} typ host"), &format!(" {shown} typ host"))).await;
    peer.state(RTCPeerConnectionState::Connected).await;
    call.next(|event| matches!(event, LegEvent::Connected)).await;
    peer.channel_open().await;
    let (mut number, ssrc) = until_heard(&mut peer, 1).await;
    let counts = Growth::of(&["antiphon_webrtc_moves_total"]);

    for round in 0..3 {
        nat.forget().await;
        let begun = number + 1_000;
        let (heard, source) = until_heard(&mut peer, begun).await;
        println!("move {round}: unheard for {} packets", heard - begun);
        assert!(heard - begun < GAP, "unheard for {} packets", heard - begun);
        assert_eq!(source, ssrc);
        number = heard;
    }
    counts.assert();
    peer.say("moved").await;
    assert_eq!(peer.next_text().await, "heard moved");

    // Longer than a peer may be silent before it is lost: its consent is asked for where it is now.
    tokio::time::sleep(Duration::from_secs(14)).await;
    until_heard(&mut peer, number + 1_000).await;
    while let Ok(event) = call.events.try_recv() {
        assert!(!matches!(event, LegEvent::Closed(_)), "{event:?}");
    }
    assert_eq!(gateway.count(), 1);
    gateway.shutdown().await;
}
