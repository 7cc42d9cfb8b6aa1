//! Where media goes and whose is taken: nobody's but the peer's.

use crate::counted::counted;
use crate::support::{
    called, event, limited, loopback, packet,
    raw::{Raw, audio_port, body, header, sdp},
    start,
};
use crate::wire;
use antiphon::{
    media::{
        encode::{Encoder, OpusSettings},
        leg::{Codec, LegEvent, MediaLeg, OutPacket},
    },
    sip::{SipConfig, TrunkConfig},
};
use antiphon_loadgen as loadgen;
use tokio::net::UdpSocket;

/// One G.711 packet.
fn rtp(ssrc: u8, sequence: u16) -> [u8; 172] {
    let mut packet = [0; 172];
    packet[0] = 0x80;
    packet[2..4].copy_from_slice(&sequence.to_be_bytes());
    packet[11] = ssrc;
    packet
}

async fn socket(ip: &str) -> UdpSocket {
    UdpSocket::bind(format!("{ip}:0")).await.expect("a loopback address")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stranger_neither_hears_nor_is_heard() {
    let (endpoint, mut calls) = wire::endpoint().await;
    let (caller, stranger) = (socket("127.0.0.1").await, socket("127.0.0.2").await);
    let port = caller.local_addr().expect("bound").port();
    let (_raw, mut leg) = wire::call(&endpoint, &mut calls, "stranger", port).await;
    let target = format!("127.0.0.1:{}", leg.local_port().expect("bound"));
    // Before the caller has sent anything, and in its pauses.
    for round in 0..3_u16 {
        for n in 0..20 {
            stranger.send_to(&rtp(66, round * 20 + n), &target).await.expect("sends");
            let control = format!("127.0.0.1:{}", leg.local_port().expect("bound") + 1);
            stranger.send_to(&[0x81, 201, 0, 7], control).await.expect("sends");
        }
        // Another stream with the caller's address is no better.
        if round > 0 {
            caller.send_to(&rtp(67, 500 + round), &target).await.expect("sends");
        }
        caller.send_to(&rtp(7, 100 + round), &target).await.expect("sends");
        let heard = event(&mut leg, |e| matches!(e, LegEvent::Rtp(_))).await;
        assert!(matches!(&heard, LegEvent::Rtp(packet) if packet.ssrc == 7), "{heard:?}");
        assert_eq!(leg.remote(), caller.local_addr().ok());
    }
    leg.send(packet(&leg, 0, &[7; 160])).await.expect("up");
    let mut buffer = [0; 2_048];
    limited(caller.recv_from(&mut buffer)).await.expect("the caller hears");
    assert!(stranger.try_recv_from(&mut buffer).is_err(), "the stranger does not");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_telephone_reports_lost_is_told_and_shown() {
    assert_eq!(counted("antiphon_rtcp_fraction_lost "), 0.0);
    let (endpoint, mut calls) = wire::endpoint().await;
    let caller = socket("127.0.0.1").await;
    let (_raw, mut leg) =
        wire::call(&endpoint, &mut calls, "reports", caller.local_addr().expect("bound").port()).await;
    leg.send(packet(&leg, 0, &[7; 160])).await.expect("up");
    let mut buffer = [0; 2_048];
    limited(caller.recv_from(&mut buffer)).await.expect("the caller hears");
    // A receiver report (RFC 3550 section 6.4.2) on that stream: a quarter is lost.
    let mut report = [0; 32];
    report[..4].copy_from_slice(&[0x81, 201, 0, 7]);
    report[8..12].copy_from_slice(&buffer[8..12]);
    report[12] = 64;
    let control = format!("127.0.0.1:{}", leg.local_port().expect("bound") + 1);
    caller.send_to(&report, control).await.expect("sends");
    let told = event(&mut leg, |e| matches!(e, LegEvent::Report(_))).await;
    assert!(matches!(&told, LegEvent::Report(report) if report.fraction_lost == 0.25), "{told:?}");
    assert!(counted("antiphon_rtcp_fraction_lost ") > 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_sent_to_who_only_stands_in_a_description() {
    let (endpoint, mut calls) = wire::endpoint().await;
    let (victim, caller) = (socket("127.0.0.3").await, socket("127.0.0.1").await);
    let mut raw = Raw::new(endpoint.local_udp().expect("bound"), "reflector").await;
    let named = sdp(victim.local_addr().expect("bound").port(), "").replace("c=IN IP4 127.0.0.1", "c=IN IP4 127.0.0.3");
    let (_, mut leg) = called(&mut raw, &mut calls, "", &named).await;
    assert_eq!(leg.remote(), None);
    for n in 0..50 {
        leg.send(packet(&leg, n, &[7; 160])).await.expect("up");
    }
    // The host that signals is learned, as behind NAT.
    let target = format!("127.0.0.1:{}", leg.local_port().expect("bound"));
    for n in 0..2 {
        caller.send_to(&rtp(7, n), &target).await.expect("sends");
    }
    event(&mut leg, |e| matches!(e, LegEvent::Rtp(_))).await;
    leg.send(packet(&leg, 50, &[7; 160])).await.expect("up");
    let mut buffer = [0; 2_048];
    limited(caller.recv_from(&mut buffer)).await.expect("it is heard");
    assert!(victim.try_recv_from(&mut buffer).is_err(), "nothing was reflected");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trunk_that_must_encrypt_does_not_call_in_plain() {
    let trunk: TrunkConfig =
        toml::from_str("name = \"t\"\nhost = \"127.0.0.1:9\"\nsrtp = \"required\"").expect("valid");
    let (endpoint, mut calls) = start(SipConfig { trunk: vec![trunk], ..loopback() }).await;
    let mut plain = Raw::new(endpoint.local_udp().expect("bound"), "plain").await;
    let refusal = plain.ask("INVITE", "", &sdp(4_000, ""), "SIP/2.0 488").await;
    assert!(header(&refusal, "Warning").is_some_and(|why| why.contains("encryption")), "{refusal}");
    let key = "a=crypto:1 AES_CM_128_HMAC_SHA1_80 inline:MTIzNDU2Nzg5MDEyMzQ1Njc4OTAxMjM0NTY3ODkw\r\n";
    let secure = sdp(4_000, key).replace("RTP/AVP", "RTP/SAVP");
    let mut raw = Raw::new(endpoint.local_udp().expect("bound"), "secure").await;
    let (ok, leg) = called(&mut raw, &mut calls, "", &secure).await;
    assert!(body(&ok).contains("RTP/SAVP") && audio_port(&ok) > 0, "{ok}");
    raw.ask("INVITE", "", &sdp(4_000, ""), "SIP/2.0 488").await;
    raw.ack("").await;
    assert!(leg.encrypted());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn packets_are_as_long_as_the_peer_wants_them() {
    let (endpoint, mut calls) = wire::endpoint().await;
    let opus = "a=rtpmap:111 opus/48000/2\r\na=fmtp:111 usedtx=1\r\n";
    for (codec, ms) in [Codec::Pcmu, Codec::Opus].into_iter().flat_map(|codec| [10, 30, 40, 60].map(|ms| (codec, ms))) {
        let caller = socket("127.0.0.1").await;
        let port = caller.local_addr().expect("bound").port();
        let mut raw = Raw::new(endpoint.local_udp().expect("bound"), &format!("ptime-{ms}-{}", codec.label())).await;
        let wish = format!("a=ptime:{ms}\r\n");
        let offer = match codec {
            Codec::Opus => sdp(port, &format!("{opus}{wish}")).replace("AVP 0", "AVP 111"),
            _ => sdp(port, &wish),
        };
        let (ok, mut leg) = called(&mut raw, &mut calls, "", &offer).await;
        assert!(body(&ok).contains(&wish), "{ok}");
        assert_eq!((leg.format().codec, leg.format().opus_dtx), (codec, codec == Codec::Opus));
        let mut encoder = Encoder::new(leg.format(), OpusSettings::default()).expect("a codec");
        let talks = tokio::spawn(async move {
            for n in 0..50 {
                leg.send(OutPacket { payload: encoder.silence().expect("encodes"), ..packet(&leg, n, &[]) })
                    .await
                    .expect("up");
                // Packets whose time has not come leave while the leg is listened to.
                tokio::time::timeout(std::time::Duration::from_millis(20), leg.recv()).await.ok();
            }
            leg
        });
        let spoken = loadgen::codec::Codec::named(codec.label()).expect("known");
        let mut decoder = loadgen::codec::Decoder::new(spoken, 48_000).expect("a codec");
        let mut buffer = [0; 2_048];
        let mut next = None;
        for _ in 0..8 {
            let (length, _) = limited(caller.recv_from(&mut buffer)).await.expect("the caller hears");
            let mut pcm = Vec::new();
            decoder.decode(&buffer[12..length], &mut pcm).expect("decodes");
            assert_eq!(pcm.len(), ms * decoder.rate() as usize / 1_000, "{codec:?} {ms}");
            let sequence = u16::from_be_bytes([buffer[2], buffer[3]]);
            let timestamp = u32::from_be_bytes([buffer[4], buffer[5], buffer[6], buffer[7]]);
            assert_eq!(next.unwrap_or((sequence, timestamp)), (sequence, timestamp), "{codec:?} {ms}");
            let ticks = codec.clock_rate() / 1_000 * ms as u32;
            next = Some((sequence.wrapping_add(1), timestamp.wrapping_add(ticks)));
        }
        drop(limited(talks).await.expect("no panic"));
    }
}
