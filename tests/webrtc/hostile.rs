//! Hostile datagrams, offers and fragments beside a live call, which must not notice.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::{Audio, Peer, call, gateway, within};
use antiphon::media::leg::LegEvent;
use antiphon::webrtc::{Gateway, WebRtcConfig, WebRtcError};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::net::UdpSocket;
use tokio::time::{MissedTickBehavior, interval};

static PANICS: AtomicUsize = AtomicUsize::new(0);

/// Panics in tasks end the task and would go unseen.
fn count_panics() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        default(info);
    }));
}

fn mutate(text: &str, random: &mut StdRng) -> String {
    let mut bytes = text.as_bytes().to_vec();
    for _ in 0..random.random_range(1..6) {
        let at = random.random_range(0..bytes.len());
        match random.random_range(0..6) {
            0 => bytes[at] = random.random(),
            1 => drop(bytes.drain(at..(at + random.random_range(1..40)).min(bytes.len()))),
            2 => bytes.insert(at, b"\r\n:=/ 0a"[random.random_range(0..8)]),
            3 => {
                // A line again, or a number that overflows.
                let end = (at + random.random_range(1..80)).min(bytes.len());
                let part = bytes[at..end].to_vec();
                bytes.splice(at..at, part);
            }
            4 => {
                bytes.splice(at..at, *b"99999999999999999999");
            }
            _ => bytes.truncate(bytes.len() - bytes.len().min(random.random_range(0..60))),
        }
        if bytes.is_empty() {
            bytes.push(b'v');
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn check(username: &str, random: &mut StdRng) -> Vec<u8> {
    let mut body = Vec::new();
    for (kind, value) in [(6_u16, username.as_bytes()), (8, &random.random::<[u8; 20]>()[..])] {
        body.extend(kind.to_be_bytes());
        body.extend((value.len() as u16).to_be_bytes());
        body.extend(value);
        body.resize(body.len().next_multiple_of(4), 0);
    }
    let mut message = vec![0, 1];
    message.extend((body.len() as u16).to_be_bytes());
    message.extend([0x21, 0x12, 0xa4, 0x42]);
    message.extend(random.random::<[u8; 12]>());
    message.extend(body);
    message
}

/// Garbage of every kind, some of it for the fragment of the live call.
async fn datagrams(gateway: &Gateway, fragment: &str) {
    let mut random = StdRng::seed_from_u64(1);
    let socket = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
    for round in 0..400 {
        for _ in 0..50 {
            let datagram = match random.random_range(0..5) {
                0 => check(&format!("{fragment}:peer"), &mut random),
                1 => check("nobody:peer", &mut random),
                2 => {
                    let mut cut = check(&format!("{fragment}:peer"), &mut random);
                    cut.truncate(random.random_range(0..cut.len()));
                    cut
                }
                first => {
                    let mut noise: Vec<u8> = (0..random.random_range(1..1400)).map(|_| random.random()).collect();
                    noise[0] = [0, 22, 128][first % 3];
                    noise
                }
            };
            let _ = socket.send_to(&datagram, gateway.local_addr()).await;
        }
        // Not a flood: how much of that the kernel drops is not what this is about.
        if round % 4 == 0 {
            tokio::time::sleep(Duration::from_millis(4)).await;
        }
    }
}

async fn offers(gateway: &Gateway, offer: &str) -> (usize, usize) {
    let mut random = StdRng::seed_from_u64(2);
    let (mut answered, mut refused) = (0, 0);
    for _ in 0..1000 {
        match gateway.answer(&mutate(offer, &mut random)).await {
            Ok(session) => {
                answered += 1;
                for _ in 0..2 {
                    let fragment = mutate("a=candidate:1 1 udp 2113937151 127.0.0.1 9 typ host\r\n", &mut random);
                    let _ = gateway.patch(&session.id, "*", &fragment).await;
                }
            }
            Err(WebRtcError::BadOffer(_) | WebRtcError::Full(_)) => refused += 1,
            Err(other) => panic!("not the offer's fault: {other}"),
        }
    }
    (answered, refused)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_live_call_does_not_notice() {
    count_panics();
    let gateway = gateway(WebRtcConfig::default()).await;
    let mut peer = Peer::new(Audio::SendRecv, None).await;
    let (id, _, mut session) = call(&gateway, &mut peer).await;
    session.next(|event| matches!(event, LegEvent::Connected)).await;
    let fragment = {
        let answer = peer.connection.remote_description().await.expect("an answer").sdp;
        answer.lines().find_map(|line| line.strip_prefix("a=ice-ufrag:")).expect("a fragment").to_owned()
    };
    let offer = Peer::new(Audio::SendRecv, Some("agent")).await.offer().await;

    let over = AtomicBool::new(false);
    let attack = async {
        let (_, counts) = tokio::join!(datagrams(&gateway, &fragment), offers(&gateway, &offer));
        over.store(true, Ordering::Relaxed);
        counts
    };
    let live = async {
        let mut tick = interval(Duration::from_millis(20));
        tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let mut sent = 0_u16;
        let mut heard = BTreeSet::new();
        while !over.load(Ordering::Relaxed) {
            tick.tick().await;
            peer.send(sent, u32::from(sent) * 960, b"live").await;
            heard.insert(peer.next_rtp().await.header.sequence_number);
            sent += 1;
        }
        (sent, heard.len())
    };
    let ((answered, refused), (sent, heard)) = within("the attack", async { tokio::join!(attack, live) }).await;
    println!("{answered} offers answered, {refused} refused, {sent} packets of the live call");
    assert!(answered > 100 && refused > 100, "{answered} answered, {refused} refused");
    assert_eq!(heard, usize::from(sent));
    assert_eq!(PANICS.load(Ordering::Relaxed), 0);
    assert!(gateway.delete(&id).await);
    session.end().await;
    within("the places", async {
        while gateway.count() > 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
}
