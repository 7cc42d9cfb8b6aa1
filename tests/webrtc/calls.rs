//! Browser calls over real ICE, DTLS, SRTP and SCTP on loopback, all through the gateway's one UDP port.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::time::Duration;

use crate::counted::Growth;
use crate::interop::speak;
use crate::support::{Audio, PEER_EVENTS, PEER_OPUS, Peer, call, echo, gateway, within};
use antiphon::media::leg::{Codec, LegEnd, LegEvent, MediaLeg, OutPacket};
use antiphon::media::webrtc::WebRtcLeg;
use antiphon::webrtc::{Gateway, WebRtcConfig, WebRtcError};
use antiphon_loadgen::codec::Codec as Spoken;
use antiphon_loadgen::rtc::peer::Shape;
use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use webrtc::data_channel::DataChannelEvent;
use webrtc::peer_connection::RTCPeerConnectionState;

/// `EAFNOSUPPORT` of Linux: a kernel without IPv6.
const NO_SUCH_FAMILY: i32 = 97;

fn is_connected(event: &LegEvent) -> bool {
    matches!(event, LegEvent::Connected)
}

/// Sends numbered packets until one comes back, then checks that a run of them does.
async fn hears_itself(peer: &mut Peer, salt: u8) {
    let start = u16::from(salt) * 20;
    for number in start..start + 20 {
        peer.send(number, u32::from(number) * 960, &[salt, number as u8, 1, 2, 3]).await;
    }
    for number in start..start + 20 {
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
    let timed = |event: &LegEvent| matches!(event, LegEvent::Report(report) if report.round_trip.is_some());
    let LegEvent::Report(report) = call.next(timed).await else { unreachable!() };
    assert_eq!((report.lost, report.highest_sequence & 0xffff), (0, 7 * 20 + 19));
    assert!(report.round_trip < Some(Duration::from_secs(1)), "{report:?}");
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
async fn hanging_up_closes_the_peer_and_frees_the_place() {
    let gateway = gateway(WebRtcConfig { max_sessions: 1, ..WebRtcConfig::default() }).await;
    let mut peer = Peer::new(Audio::SendRecv, Some("agent")).await;
    let mut answered = gateway.answer(&peer.offer().await).await.expect("a good offer");
    answered.leg.attach().await.expect("a live session");
    assert!(answered.leg.send_message("early"), "it waits for the channel");
    peer.accept(&answered.sdp).await;
    while !is_connected(&within("connecting", answered.leg.recv()).await) {}
    peer.channel_open().await;
    tokio::select! {
        text = peer.next_text() => assert_eq!(text, "early"),
        event = answered.leg.recv() => panic!("{event:?}"),
    }
    within("hanging up", answered.leg.hang_up()).await;
    assert_eq!(within("the end", answered.leg.recv()).await, LegEvent::Closed(LegEnd::Local));
    // The peer's channel ends with its DTLS transport, by our alert.
    within("the channel's end", async {
        let channel = peer.channel.as_ref().expect("a channel");
        while !matches!(channel.poll().await, Some(DataChannelEvent::OnClose) | None) {}
    })
    .await;
    let packet =
        OutPacket { payload_type: PEER_OPUS, marker: true, sequence: 1, timestamp: 1, payload: Bytes::from("x") };
    assert_eq!(answered.leg.send(packet).await, Err(LegEnd::Local));
    assert!(!answered.leg.send_message("late"));
    free(&gateway).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leg_that_is_dropped_ends_its_session() {
    let gateway = gateway(WebRtcConfig { max_sessions: 1, ..WebRtcConfig::default() }).await;
    let offer = Peer::new(Audio::SendRecv, None).await.offer().await;
    let answered = gateway.answer(&offer).await.expect("a good offer");
    assert!(matches!(gateway.answer(&offer).await, Err(WebRtcError::Full(1))));
    drop(answered);
    free(&gateway).await;
    assert!(gateway.answer(&offer).await.is_ok());
    gateway.shutdown().await;
    assert!(matches!(gateway.answer(&offer).await, Err(WebRtcError::Closing)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_socket_carries_both_families() {
    // What else goes wrong with such a socket is the gateway's.
    if let Err(error) = UdpSocket::bind((Ipv6Addr::LOCALHOST, 0))
        && (error.kind() == ErrorKind::AddrNotAvailable || error.raw_os_error() == Some(NO_SUCH_FAMILY))
    {
        antiphon_skip::skip("ipv6", error);
        return;
    }
    let config = WebRtcConfig {
        bind_ip: Some(Ipv6Addr::UNSPECIFIED.into()),
        public_ip: vec![Ipv6Addr::LOCALHOST.into(), Ipv4Addr::LOCALHOST.into()],
        ..WebRtcConfig::default()
    };
    let gateway = Gateway::start(config).await.expect("a socket of both families");
    // Each peer has one family only, and both public addresses stand in the answer, in the order of the configuration.
    for (salt, address) in [(3, IpAddr::from(Ipv4Addr::LOCALHOST)), (4, Ipv6Addr::LOCALHOST.into())] {
        let mut peer = Peer::shaped(Shape { address, audio: PEER_OPUS, ..Shape::default() }, None).await;
        let answered = gateway.answer(&peer.offer().await).await.expect("a good offer");
        let told = answered.sdp.lines().filter(|line| line.starts_with("a=candidate:"));
        let told: Vec<&str> = told.filter_map(|line| line.split(' ').nth(4)).collect();
        assert_eq!(told, ["::1", "127.0.0.1"], "{}", answered.sdp);
        let mut call = echo(answered.leg);
        peer.accept(&answered.sdp).await;
        peer.state(RTCPeerConnectionState::Connected).await;
        call.next(is_connected).await;
        hears_itself(&mut peer, salt).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn packets_are_as_long_as_the_offer_wants_them() {
    let gateway = gateway(WebRtcConfig::default()).await;
    // Frames of 20 ms go in, two of 10 ms each where 30 are wanted of Opus; what comes out is counted in frames of `each` ticks.
    let (law, pair) = ((Spoken::Pcmu, 0, vec![0xff; 160], 160), (Spoken::Opus, PEER_OPUS, vec![10, 1, 7, 8], 960));
    for ((codec, audio, frame, ticks), wish, ms, last) in [
        (law.clone(), "a=ptime:10\r\n", 10, 80),
        (law, "a=ptime:60\r\na=maxptime:40\r\n", 40, 320),
        (pair, "a=ptime:30\r\n", 30, 7),
    ] {
        let mut peer = Peer::shaped(Shape { codec, audio, ..Shape::default() }, None).await;
        let rtpmap = format!("a=rtpmap:{audio} ");
        let offer = peer.offer().await.replace(&rtpmap, &format!("{wish}{rtpmap}"));
        let answered = gateway.answer(&offer).await.expect("a good offer");
        assert_eq!(answered.leg.format().short_frames, codec == Spoken::Opus);
        let mut call = echo(answered.leg);
        peer.accept(&answered.sdp).await;
        peer.state(RTCPeerConnectionState::Connected).await;
        call.next(is_connected).await;
        for n in 0..6 {
            peer.send(n, u32::from(n) * ticks, &frame).await;
        }
        for n in 0..120 / ms {
            let packet = peer.next_rtp().await;
            assert_eq!(u32::from(packet.header.sequence_number), n, "{wish}");
            assert_eq!(packet.header.timestamp, n * ms * ticks / 20, "{wish}");
            assert_eq!(packet.payload.len(), last, "{wish}");
        }
    }
}

/// What is spoken goes through the encoder of calls, frame by frame, as a call sends it. A machine that is busy may be late with a
/// frame, and its packet then leaves without it; so what counts is a run of packets, each as long as it was asked for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn speech_comes_in_packets_of_the_length_that_the_offer_asks_for() {
    /// Packets of a run.
    const RUN: usize = 8;
    let gateway = gateway(WebRtcConfig::default()).await;
    for (codec, audio) in [(Spoken::Opus, PEER_OPUS), (Spoken::Pcmu, 0)] {
        for (wish, ms) in [
            ("a=ptime:10\r\n", 10),
            ("a=maxptime:10\r\n", 10),
            ("a=maxptime:60\r\n", 20),
            ("a=ptime:20\r\na=maxptime:60\r\n", 20),
            ("a=ptime:40\r\n", 40),
            ("a=ptime:60\r\na=maxptime:40\r\n", 40),
            ("a=ptime:60\r\na=maxptime:120\r\n", 60),
        ] {
            let told = format!("{codec:?}, {}", wish.replace("\r\n", " "));
            let mut peer = Peer::shaped(Shape { codec, audio, ..Shape::default() }, None).await;
            let rtpmap = format!("a=rtpmap:{audio} ");
            let offer = peer.offer().await.replace(&rtpmap, &format!("{wish}{rtpmap}"));
            assert!(offer.contains(wish), "{told}: {offer}");
            let answered = gateway.answer(&offer).await.expect("a good offer");
            let clock = answered.leg.format().codec.clock_rate();
            speaks(answered.leg);
            peer.accept(&answered.sdp).await;
            peer.state(RTCPeerConnectionState::Connected).await;
            let wanted = ms * clock / 1_000;
            let mut decoder = opus::Decoder::new(clock, opus::Channels::Mono).expect("a decoder");
            let (mut last, mut run, mut loud) = (None, 0, false);
            within(&told, async {
                while run < RUN || !loud {
                    let packet = peer.next_rtp().await;
                    let (sequence, timestamp) = (packet.header.sequence_number, packet.header.timestamp);
                    let ticks = match codec {
                        Spoken::Opus => opus::packet::get_nb_samples(&packet.payload, clock).expect("a packet") as u32,
                        _ => packet.payload.len() as u32,
                    };
                    assert!(ticks <= wanted, "{told}: {ticks} ticks");
                    let follows =
                        last.is_none_or(|last| last == (sequence.wrapping_sub(1), timestamp.wrapping_sub(wanted)));
                    run = if ticks == wanted && follows { run + 1 } else { 0 };
                    last = (ticks == wanted).then_some((sequence, timestamp));
                    loud |= match codec {
                        Spoken::Opus => {
                            let mut pcm = [0.0; 5_760];
                            let length = decoder.decode_float(&packet.payload, &mut pcm, false).expect("sound");
                            assert_eq!(length as u32, ticks, "{told}");
                            pcm[..length].iter().any(|sample| sample.abs() > 0.1)
                        }
                        // Of mu-law, 0xff and 0x7f are silence, and what is louder has smaller numbers.
                        _ => packet.payload.iter().any(|octet| octet & 0x7f < 0x40),
                    };
                }
            })
            .await;
            peer.close().await;
        }
    }
    gateway.shutdown().await;
}

/// A call of `leg` that speaks, on a thread of its own.
fn speaks(leg: WebRtcLeg) {
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(speak(leg, drop));
    });
}

/// RFC 7587 section 6.1.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_wants_no_silence_is_sent_none() {
    let gateway = gateway(WebRtcConfig::default()).await;
    for (wish, dtx) in [("useinbandfec=1", false), ("useinbandfec=1;usedtx=1", true), ("usedtx=1;useinbandfec=0", true)]
    {
        let mut peer = Peer::new(Audio::SendRecv, None).await;
        let offer = peer.offer().await.replace("useinbandfec=1", wish);
        assert!(offer.contains(wish));
        let answered = gateway.answer(&offer).await.expect("a good offer");
        assert_eq!(answered.leg.format().opus_dtx, dtx, "{wish}");
        let mut call = echo(answered.leg);
        peer.accept(&answered.sdp).await;
        peer.state(RTCPeerConnectionState::Connected).await;
        call.next(is_connected).await;
        hears_itself(&mut peer, 1).await;
    }
}

/// Devices and gateways of telephones that have no Opus.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_without_opus_is_spoken_to_in_what_it_has() {
    let gateway = gateway(WebRtcConfig::default()).await;
    for (codec, audio, ours) in
        [(Spoken::G722, 9, Codec::G722), (Spoken::Pcmu, 0, Codec::Pcmu), (Spoken::Pcma, 8, Codec::Pcma)]
    {
        let mut peer = Peer::shaped(Shape { codec, audio, events: Some(PEER_EVENTS), ..Shape::default() }, None).await;
        let answered = gateway.answer(&peer.offer().await).await.expect("a good offer");
        let format = answered.leg.format();
        assert_eq!((format.codec, format.payload_type), (ours, audio));
        assert_eq!(format.telephone_event, Some((PEER_EVENTS, 8_000)));
        let mut call = echo(answered.leg);
        peer.accept(&answered.sdp).await;
        peer.state(RTCPeerConnectionState::Connected).await;
        call.next(is_connected).await;
        peer.send(1, 160, &[0xff; 160]).await;
        let packet = peer.next_rtp().await;
        assert_eq!((packet.header.payload_type, packet.header.timestamp, packet.payload.len()), (audio, 160, 160));
    }
    // A session keeps to its codec.
    let mut peer = Peer::shaped(Shape { codec: Spoken::Pcmu, audio: 0, ..Shape::default() }, None).await;
    let offer = peer.offer().await;
    let answered = gateway.answer(&offer).await.expect("a good offer");
    let other = offer.replace("PCMU/8000", "G722/8000");
    let error = gateway.renegotiate(&answered.id, &other).await.expect_err("another codec").to_string();
    assert!(error.contains("speaks pcmu"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_without_udp_goes_over_tcp_and_strangers_are_turned_away() {
    let gateway = gateway(WebRtcConfig { tcp: true, ..WebRtcConfig::default() }).await;
    let mut peer = Peer::new(Audio::OverTcp, Some("agent")).await;
    let (_, _, mut call) = call(&gateway, &mut peer).await;
    call.next(is_connected).await;
    hears_itself(&mut peer, 4).await;
    peer.channel_open().await;
    peer.say("hello").await;
    assert_eq!(peer.next_text().await, "heard hello");

    let counts = Growth::of(&["antiphon_webrtc_tcp_refused_total"]);
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0, 0], &[0, 3, 1, 2, 3], &[0xff; 4096]] {
        let mut stranger = TcpStream::connect(gateway.local_addr()).await.expect("the port listens");
        let _ = stranger.write_all(garbage).await;
        let mut reply = Vec::new();
        // Closed without a word, be it by a reset.
        let _ = within("the refusal", stranger.read_to_end(&mut reply)).await;
        assert!(reply.is_empty());
    }
    counts.comes().await;
    hears_itself(&mut peer, 5).await;
    peer.close().await;
    assert_eq!(call.end().await, LegEnd::Remote);
}

/// An address that nothing can be sent to from where the gateway is: its checks fail, and the call comes by another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_candidate_that_cannot_be_sent_to_is_counted_and_costs_the_call_nothing() {
    let config = WebRtcConfig { bind_ip: Some(Ipv4Addr::LOCALHOST.into()), ..WebRtcConfig::default() };
    let gateway = gateway(config).await;
    let mut peer = Peer::new(Audio::SendRecv, None).await;
    let offer = peer.offer().await;
    let line = offer.lines().find(|line| line.starts_with("a=candidate:")).expect("a candidate");
    // Documentation's network (RFC 5737): no way leads there from a socket that is bound to loopback.
    let elsewhere = "a=candidate:77 1 udp 2130706431 198.51.100.1 9 typ host";
    let offer = offer.replacen(line, &format!("{elsewhere}\r\n{line}"), 1);
    let counts = Growth::of(&[
        "antiphon_webrtc_sends_failed_total{reason=\"unreachable\"}",
        "antiphon_webrtc_packets_lost_total{reason=\"connecting\"}",
    ]);
    let mut answered = gateway.answer(&offer).await.expect("a good offer");
    // Sound before there is a key to protect it with goes nowhere, and is no error of who sends it.
    let packet =
        OutPacket { payload_type: PEER_OPUS, marker: true, sequence: 1, timestamp: 1, payload: Bytes::from("x") };
    assert_eq!(answered.leg.send(packet).await, Ok(()));
    let mut call = echo(answered.leg);
    peer.accept(&answered.sdp).await;
    peer.state(RTCPeerConnectionState::Connected).await;
    call.next(is_connected).await;
    hears_itself(&mut peer, 6).await;
    counts.comes().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn telephone_events_of_the_browser_reach_the_call() {
    let gateway = gateway(WebRtcConfig::default()).await;
    let mut peer = Peer::new(Audio::SendRecv, None).await;
    let offer = peer.offer().await;
    let answered = gateway.answer(&offer).await.expect("a good offer");
    assert_eq!(answered.leg.format().telephone_event, Some((PEER_EVENTS, 8_000)));
    let mut call = echo(answered.leg);
    peer.accept(&answered.sdp).await;
    call.next(is_connected).await;
    peer.state(RTCPeerConnectionState::Connected).await;
    peer.send(1, 960, b"audio").await;
    // RFC 4733: digit 5, the end of it, volume 10, 800 ticks.
    peer.send_as(PEER_EVENTS, 2, 1920, &[5, 0x80 | 10, 3, 32]).await;
    let is_event = |event: &LegEvent| matches!(event, LegEvent::Rtp(packet) if packet.payload_type == PEER_EVENTS);
    let LegEvent::Rtp(packet) = call.next(is_event).await else { unreachable!() };
    assert_eq!(&packet.payload[..], [5, 0x80 | 10, 3, 32]);
}

/// What Chromium offers: redundant audio and other codecs; and two channels, as a page may have it do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redundant_audio_is_answered_and_two_channels_are_not() {
    let gateway = gateway(WebRtcConfig::default()).await;
    let mut peer = Peer::new(Audio::SendRecv, None).await;
    let offer = peer.offer().await;
    let (plain, more) = (format!("a=rtpmap:{PEER_OPUS} opus/48000/2\r\n"), format!("{PEER_OPUS}/{PEER_OPUS}"));
    assert!(offer.contains(&plain), "{offer}");
    let audio = offer.lines().find(|line| line.starts_with("m=audio")).expect("audio");
    let offer = offer
        .replace(audio, &format!("{audio} 63 0"))
        .replace(&plain, &format!("{plain}a=rtpmap:63 red/48000/2\r\na=fmtp:63 {more}\r\na=rtpmap:0 PCMU/8000\r\n"))
        .replace("useinbandfec=1", "useinbandfec=1;stereo=1;sprop-stereo=1");
    let answered = gateway.answer(&offer).await.expect("a good offer");
    let sdp = &answered.sdp;
    assert!(sdp.contains(&format!(" 63 {PEER_OPUS} ")), "redundant packets first: {sdp}");
    assert!(sdp.contains("a=rtpmap:63 red/48000/2\r\n") && sdp.contains(&format!("a=fmtp:63 {more}\r\n")), "{sdp}");
    assert!(!sdp.contains("stereo=1") && !sdp.contains("PCMU"), "{sdp}");
    assert_eq!(answered.leg.format().payload_type, PEER_OPUS, "what we send is Opus until it gets lost");
}

/// RFC 7587 section 6.1: who offers `usedtx` gets it back, and who does not is asked for it where that is wanted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn peers_are_asked_to_leave_silence_out_where_that_is_wanted() {
    for (dtx, offered, wanted) in [(false, false, false), (false, true, true), (true, false, true), (true, true, true)]
    {
        let gateway = gateway(WebRtcConfig { dtx, ..WebRtcConfig::default() }).await;
        let mut peer = Peer::new(Audio::SendRecv, None).await;
        let offer = peer.offer().await;
        let offer = if offered { offer.replace("useinbandfec=1", "useinbandfec=1;usedtx=1") } else { offer };
        let sdp = gateway.answer(&offer).await.expect("a good offer").sdp;
        let line = sdp.lines().find(|line| line.starts_with(&format!("a=fmtp:{PEER_OPUS} "))).expect("parameters");
        assert_eq!(line.matches("usedtx=1").count(), usize::from(wanted), "{dtx} {offered}: {line}");
        assert!(line.contains("useinbandfec=1"), "{line}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn video_is_declined_and_the_call_goes_on() {
    let gateway = gateway(WebRtcConfig::default()).await;
    let mut peer = Peer::new(Audio::SendRecv, Some("agent")).await;
    let offer = peer.offer().await;
    let line = |name: &str| offer.lines().find(|line| line.starts_with(name)).expect(name).to_owned();
    let group = line("a=group:BUNDLE");
    let section = format!(
        "m=video 9 UDP/TLS/RTP/SAVPF 96\r\nc=IN IP4 0.0.0.0\r\na=mid:v\r\na=sendrecv\r\na=rtcp-mux\r\n\
         a=rtpmap:96 VP8/90000\r\na=setup:actpass\r\n{}\r\n{}\r\n",
        line("a=ice-ufrag"),
        line("a=ice-pwd")
    );
    let offer = format!("{}{section}", offer.replace(&group, &format!("{group} v")));
    let answered = gateway.answer(&offer).await.expect("a good offer");
    assert!(answered.sdp.contains("m=video 0 "), "{}", answered.sdp);
    assert!(answered.sdp.contains("m=audio 9 "), "{}", answered.sdp);
}

#[tokio::test]
async fn what_cannot_be_configured_is_said() {
    let cases = [
        WebRtcConfig { max_sessions: 0, ..WebRtcConfig::default() },
        WebRtcConfig {
            public_ip: vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()],
            bind_ip: Some(Ipv4Addr::LOCALHOST.into()),
            ..WebRtcConfig::default()
        },
    ];
    for config in cases {
        assert!(matches!(Gateway::start(config).await, Err(WebRtcError::Config(_))));
    }
    let first = gateway(WebRtcConfig::default()).await;
    let taken = WebRtcConfig { bind_port: first.local_addr().port(), ..WebRtcConfig::default() };
    assert!(matches!(Gateway::start(taken).await, Err(WebRtcError::Bind { .. })));
}

async fn free(gateway: &Gateway) {
    within("the place", async {
        while gateway.count() > 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
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
