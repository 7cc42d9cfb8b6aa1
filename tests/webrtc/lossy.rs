//! Handshakes that lose a flight: the call comes about all the same. What is lost is chosen so that the peer repeats its own
//! flight before ours, which stopped the DTLS stack's timer for good (see the crate `dtls-repeats`). And sound that is lost,
//! where both sides ask for it again.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use antiphon::media::leg::LegEvent;
use antiphon::webrtc::{Gateway, SessionId, WebRtcConfig};
use antiphon_loadgen::rtc::peer::Shape;
use tokio::net::UdpSocket;
use tokio::task::JoinHandle;
use tokio_util::task::AbortOnDropHandle;
use webrtc::peer_connection::RTCPeerConnectionState;

use crate::support::{Audio, PEER_OPUS, Peer, echo, gateway, within};

const CLIENT_HELLO: u8 = 1;
const SERVER_HELLO: u8 = 2;

/// Types of the handshake messages that begin the records of a datagram; none where it is encrypted or something else.
fn messages(mut datagram: &[u8]) -> Vec<u8> {
    let mut found = Vec::new();
    while let Some((&[content_type, _, _, e0, e1, .., l0, l1], after)) = datagram.split_first_chunk::<13>() {
        let Some((content, next)) = after.split_at_checked(usize::from(u16::from_be_bytes([l0, l1]))) else { break };
        if (content_type, e0, e1) == (22, 0, 0) {
            found.extend(content.first());
        }
        datagram = next;
    }
    found
}

/// Passes datagrams between a peer and `gateway`, but for those of which `lose(to_gateway, datagram)` says otherwise. Each address
/// of the peer's has a way of its own, as through a NAT.
pub(crate) async fn relay(
    gateway: SocketAddr,
    lose: impl FnMut(bool, &[u8]) -> bool + Send + 'static,
) -> (SocketAddr, JoinHandle<()>) {
    let front = Arc::new(UdpSocket::bind("127.0.0.1:0").await.expect("a port"));
    let address = front.local_addr().expect("bound");
    let lose = Arc::new(Mutex::new(lose));
    let relaying = tokio::spawn(async move {
        let mut ways: HashMap<SocketAddr, (Arc<UdpSocket>, AbortOnDropHandle<()>)> = HashMap::new();
        let mut here = vec![0; 2_048];
        loop {
            let Ok((length, from)) = front.recv_from(&mut here).await else { continue };
            if let Entry::Vacant(way) = ways.entry(from) {
                let back = Arc::new(UdpSocket::bind("127.0.0.1:0").await.expect("a port"));
                let (front, inward, lose) = (front.clone(), back.clone(), lose.clone());
                let task = tokio::spawn(async move {
                    let mut there = vec![0; 2_048];
                    loop {
                        let Ok((length, _)) = inward.recv_from(&mut there).await else { continue };
                        let lost = lose.lock().expect("no panic")(false, &there[..length]);
                        if !lost {
                            let _ = front.send_to(&there[..length], from).await;
                        }
                    }
                });
                way.insert((back, AbortOnDropHandle::new(task)));
            }
            let lost = lose.lock().expect("no panic")(true, &here[..length]);
            if !lost {
                let _ = ways[&from].0.send_to(&here[..length], gateway).await;
            }
        }
    });
    (address, relaying)
}

/// A call through a relay that loses what `lose` says: it is connected.
async fn connects(lose: impl FnMut(bool, &[u8]) -> bool + Send + 'static) {
    let gateway = gateway(WebRtcConfig { connect_timeout_s: 60, ..WebRtcConfig::default() }).await;
    let mut peer = Peer::new(Audio::SendRecv, None).await;
    let (id, relaying) = called(&gateway, &mut peer, lose).await;
    assert!(gateway.delete(&id).await);
    peer.close().await;
    relaying.abort();
}

/// Calls through a relay that loses what `lose` says.
async fn called(
    gateway: &Gateway,
    peer: &mut Peer,
    lose: impl FnMut(bool, &[u8]) -> bool + Send + 'static,
) -> (SessionId, JoinHandle<()>) {
    let (relayed, relaying) = relay(gateway.local_addr(), lose).await;
    // Neither learns of the other's own address, so that everything passes through the relay.
    let offer: String =
        peer.offer().await.split_inclusive('\n').filter(|line| !line.contains("a=candidate:")).collect();
    let answered = gateway.answer(&offer).await.expect("a good offer");
    let mut call = echo(answered.leg);
    let port = format!(" {} typ host", gateway.local_addr().port());
    assert!(answered.sdp.contains(&port) && answered.sdp.contains("a=setup:active"), "{}", answered.sdp);
    peer.accept(&answered.sdp.replace(&port, &format!(" {} typ host", relayed.port()))).await;
    call.next(|event| matches!(event, LegEvent::Connected)).await;
    peer.state(RTCPeerConnectionState::Connected).await;
    (answered.id, relaying)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_last_flight_of_ours_is_sent_again_though_the_peer_repeats_its_own_first() {
    let mut hellos = 0;
    connects(move |to_gateway, datagram| {
        hellos += i32::from(to_gateway && messages(datagram).contains(&SERVER_HELLO));
        // Certificate, keys and all, until the peer repeats its flight.
        !to_gateway && hellos == 1 && matches!(datagram.first(), Some(20..=22))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_flight_of_the_synthetic_browser_is_sent_again_though_we_repeat_ours_first() {
    let (mut answered, mut repeated) = (false, false);
    connects(move |to_gateway, datagram| {
        let messages = messages(datagram);
        answered |= to_gateway && messages.contains(&SERVER_HELLO);
        repeated |= !to_gateway && answered && messages.contains(&CLIENT_HELLO);
        to_gateway && answered && !repeated && matches!(datagram.first(), Some(20..=22))
    })
    .await;
}

/// The number of the packet of sound in a datagram; `None` for anything else. RTP headers are not encrypted.
fn number(datagram: &[u8]) -> Option<u16> {
    let [first, payload_type, high, low, ..] = datagram else { return None };
    (first >> 6 == 2 && payload_type & 0x7f == PEER_OPUS).then(|| u16::from_be_bytes([*high, *low]))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_sound_is_asked_for_again_and_sent_again_where_the_peer_offers_it() {
    let gateway = gateway(WebRtcConfig::default()).await;
    let shape = Shape { audio: PEER_OPUS, repeats: true, ..Shape::default() };
    let mut peer = Peer::shaped(shape, None).await;
    // The third packet of each twenty on its way there, the seventh on its way back; what is sent again comes through.
    let mut gone = Vec::new();
    let lose = move |to_gateway: bool, datagram: &[u8]| {
        let wanted = if to_gateway { 3 } else { 7 };
        let Some(number) = number(datagram).filter(|number| number % 20 == wanted) else { return false };
        let first = !gone.contains(&(to_gateway, number));
        gone.push((to_gateway, number));
        first
    };
    let (_, relaying) = called(&gateway, &mut peer, lose).await;
    let count = 60;
    let mut missing: Vec<u16> = (1..=count).collect();
    within("every packet", async {
        for number in 1.. {
            // After the last that counts come others, behind which the last hole shows.
            peer.send(number, u32::from(number) * 960, b"sound").await;
            let pause = tokio::time::sleep(std::time::Duration::from_millis(20));
            tokio::pin!(pause);
            loop {
                tokio::select! {
                    packet = peer.next_rtp() => missing.retain(|number| *number != packet.header.sequence_number),
                    () = &mut pause => break,
                }
            }
            if missing.is_empty() {
                return;
            }
        }
    })
    .await;
    peer.close().await;
    relaying.abort();
}
