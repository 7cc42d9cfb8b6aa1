//! A peer that takes its time: while a REFER or a re-INVITE is unanswered, the call goes on sending.
//!
//! Judged by RTP sequence numbers and timestamps: a frame that was not sent when it was due shows as a jump of
//! the timestamp, however busy this machine is.

use antiphon::call::CallEvent;
use audio_codec::Decoder;
use audio_codec::pcmu::PcmuDecoder;
use serde_json::json;
use tokio::net::UdpSocket;
use tokio::sync::broadcast::Receiver;
use tokio::time::timeout;

use super::raw::{Raw, body, header, sdp};
use super::support::{PATIENCE, Rig, SENTENCE};

/// A G.711 telephone that hears packet by packet.
struct Ear {
    socket: UdpSocket,
    last: Option<(u16, u32)>,
}

impl Ear {
    async fn new() -> (Ear, u16) {
        let socket = UdpSocket::bind("127.0.0.1:0").await.expect("a free port");
        let port = socket.local_addr().expect("bound").port();
        (Ear { socket, last: None }, port)
    }

    /// Takes `count` packets, each the successor of the one before; gives how many of them are audible.
    async fn hear(&mut self, count: usize) -> usize {
        let mut packet = [0; 2_048];
        let mut audible = 0;
        for _ in 0..count {
            let length = timeout(PATIENCE, self.socket.recv(&mut packet)).await.expect("sound goes on").expect("open");
            let sequence = u16::from_be_bytes([packet[2], packet[3]]);
            let timestamp = u32::from_be_bytes([packet[4], packet[5], packet[6], packet[7]]);
            if let Some((before, then)) = self.last.replace((sequence, timestamp)) {
                assert_eq!((sequence, timestamp), (before.wrapping_add(1), then.wrapping_add(160)), "a gap");
            }
            let pcm = PcmuDecoder::new().decode(&packet[12..length]);
            let power: f64 = pcm.iter().map(|s| f64::from(*s).powi(2)).sum::<f64>() / pcm.len().max(1) as f64;
            audible += usize::from(power > 1e4);
        }
        audible
    }

    /// Reads on until something is audible. What is silent before is not judged: a voice's first pieces may come in the
    /// middle of a start.
    async fn onset(&mut self) {
        for _ in 0..500 {
            self.last = None;
            if self.hear(1).await == 1 {
                return;
            }
        }
        panic!("nothing was said");
    }
}

async fn told(events: &mut Receiver<CallEvent>, wanted: impl Fn(&CallEvent) -> bool) {
    let wait = async { while !wanted(&events.recv().await.expect("the call lives")) {} };
    timeout(PATIENCE, wait).await.expect("it is told");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_call_speaks_on_while_the_peer_makes_up_its_mind() {
    let rig = Rig::start().await;
    let (mut ear, port) = Ear::new().await;
    let mut telephone = Raw::new(rig.sip_udp(), "late").await;
    telephone.contact = format!("sip:silent@{}", rig.sip_udp());
    let invite = telephone.request("INVITE", "", &sdp(port, ""));
    telephone.send(&invite).await;
    let ok = telephone.expect("SIP/2.0 200").await;
    telephone.ack("").await;
    let id = header(&ok, "X-Antiphon-Call").expect("named").to_owned();
    let handle = rig.handle_of(&id).await;
    let mut events = handle.events();
    let ask = async |what: &str, body| {
        let (status, answer) = rig.post(&format!("/v1/calls/{id}/{what}"), body).await;
        assert_eq!(status, 202, "{answer}");
    };

    ask("turns", json!({ "text": SENTENCE.repeat(8) })).await;
    ear.onset().await;
    let underruns = handle.info().underruns;
    // A transfer that is taken on late, and then comes to nothing.
    ask("transfer", json!({ "to": "sip:other@127.0.0.1:9" })).await;
    let refer = telephone.next("REFER").await;
    assert!(ear.hear(75).await > 40);
    telephone.answer(&refer, "202 Accepted", "").await;
    told(&mut events, |event| *event == CallEvent::TransferAccepted).await;
    assert!(ear.hear(25).await > 12);
    let progress = "Event: refer\r\nSubscription-State: terminated\r\nContent-Type: message/sipfrag\r\n";
    telephone.ask("NOTIFY", progress, "SIP/2.0 486 Busy Here", "SIP/2.0 200").await;
    told(&mut events, |event| matches!(event, CallEvent::TransferFailed(why) if why.contains("486"))).await;
    assert!(ear.hear(25).await > 12);

    // Hold: silence, packet by packet, also before the answer. Its end: speech, also before the answer.
    ask("hold", json!({})).await;
    let held = telephone.next("INVITE").await;
    assert!(body(&held).contains("a=sendonly"), "{held}");
    ear.hear(5).await;
    assert_eq!(ear.hear(50).await, 0);
    telephone.answer_with(&held, "200 OK", "Content-Type: application/sdp\r\n", &sdp(port, "a=recvonly\r\n")).await;
    telephone.expect("ACK").await;
    // The second wish comes while the first exchange may still be open; it is not lost.
    ask("resume", json!({})).await;
    let resumed = telephone.next("INVITE").await;
    assert!(!body(&resumed).contains("a=sendonly"), "{resumed}");
    assert!(ear.hear(75).await > 40);
    telephone.answer_with(&resumed, "200 OK", "Content-Type: application/sdp\r\n", &sdp(port, "")).await;
    telephone.expect("ACK").await;
    assert!(ear.hear(25).await > 12);
    assert_eq!(handle.info().underruns, underruns);

    // A transfer that arrives ends the call; its NOTIFY overtakes the answer.
    ask("transfer", json!({ "to": "sip:other@127.0.0.1:9" })).await;
    let refer = telephone.next("REFER").await;
    telephone.ask("NOTIFY", progress, "SIP/2.0 200 OK", "SIP/2.0 200").await;
    assert!(ear.hear(25).await > 12);
    telephone.answer(&refer, "202 Accepted", "").await;
    told(&mut events, |event| *event == CallEvent::Transferred(Ok(()))).await;
    let bye = telephone.next("BYE").await;
    telephone.answer(&bye, "200 OK", "").await;
    rig.app.drain().await;
}
