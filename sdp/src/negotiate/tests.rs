//! Offer/answer by example, then by property.

use proptest::prelude::*;

use super::*;
use crate::parse;

fn negotiator(codecs: &[Codec]) -> Negotiator {
    with_policy(Policy { codecs: codecs.to_vec(), ..Policy::default() })
}

fn with_policy(policy: Policy) -> Negotiator {
    let local = LocalMedia {
        address: IpAddr::from([192, 0, 2, 9]),
        port: 20_000,
        session_id: 42,
        keys: [Key([1; 44]), Key([2; 44]), Key([3; 44]), Key([4; 44])],
        dtls: Some(LocalDtls {
            fingerprint: "sha-256 0A:0B".parse().expect("a fingerprint"),
            fragment: "here".to_owned(),
            password: "a-password-of-ours-that-is-long".to_owned(),
        }),
    };
    Negotiator::new(policy, local)
}

fn offer(body: &str) -> Description {
    let text = format!("v=0\r\no=- 1 1 IN IP4 198.51.100.7\r\ns=-\r\nc=IN IP4 198.51.100.7\r\nt=0 0\r\n{body}");
    parse(text.as_bytes()).expect("test offer parses")
}

const ALL: [Codec; 4] = [Codec::Opus, Codec::G722, Codec::Pcmu, Codec::Pcma];

#[test]
fn static_types_need_no_rtpmap() {
    let (answer, agreed) = negotiator(&[Codec::Pcma]).answer(&offer("m=audio 4000 RTP/AVP 0 8\r\n")).expect("common");
    assert_eq!((agreed.codec, agreed.payload_type), (Codec::Pcma, 8));
    assert_eq!(agreed.remote_rtp, Some("198.51.100.7:4000".parse().expect("address")));
    assert_eq!(agreed.remote_rtcp, Some("198.51.100.7:4001".parse().expect("address")));
    assert_eq!(agreed.telephone_event, None);
    let text = answer.to_string();
    assert!(text.contains("m=audio 20000 RTP/AVP 8\r\n"), "{text}");
    assert!(text.contains("a=ptime:20\r\n"));
    assert!(text.contains("a=sendrecv\r\n"));
}

#[test]
fn comfort_noise_is_agreed_where_both_want_it_and_the_codec_has_none() {
    let wants = |codec| with_policy(Policy { codecs: vec![codec], comfort_noise: true, ..Policy::default() });
    for (line, codec, agreed) in [
        ("m=audio 4000 RTP/AVP 8 13\r\n", Codec::Pcma, true),
        ("m=audio 4000 RTP/AVP 0 13\r\na=rtpmap:13 cn/8000\r\n", Codec::Pcmu, true),
        ("m=audio 4000 RTP/AVP 8\r\n", Codec::Pcma, false),
        ("m=audio 4000 RTP/AVP 8 13\r\na=rtpmap:13 G726-32/8000\r\n", Codec::Pcma, false),
        ("m=audio 4000 RTP/AVP 9 13\r\n", Codec::G722, false),
    ] {
        let mut ours = wants(codec);
        let (answer, found) = ours.answer(&offer(line)).expect("common");
        assert_eq!(found.comfort_noise, agreed, "{line}");
        assert_eq!(answer.to_string().contains("a=rtpmap:13 CN/8000\r\n"), agreed, "{answer}");
        assert_eq!(ours.offer().media[0].has_comfort_noise(), agreed, "it stays as agreed");
        let (_, without) = negotiator(&[codec]).answer(&offer(line)).expect("common");
        assert!(!without.comfort_noise, "not asked for");
    }
    let mut caller = wants(Codec::Pcma);
    let ours = caller.offer();
    assert!(ours.to_string().contains("m=audio 20000 RTP/AVP 8 101 13\r\n"), "{ours}");
    let (theirs, _) = wants(Codec::Pcma).answer(&ours).expect("common");
    assert!(caller.accept(&theirs).expect("fits").comfort_noise);
    let mut caller = wants(Codec::Pcma);
    let (theirs, _) = negotiator(&[Codec::Pcma]).answer(&caller.offer()).expect("common");
    assert!(!caller.accept(&theirs).expect("fits").comfort_noise);
    assert!(!wants(Codec::Opus).offer().media[0].has_comfort_noise());
}

#[test]
fn packets_are_as_long_as_the_peer_wishes_and_can_take() {
    for (lines, codec, ours) in [
        ("", Codec::Pcma, 30),
        ("a=ptime:20\r\n", Codec::Pcma, 20),
        ("a=ptime:10\r\n", Codec::Pcma, 10),
        ("a=ptime:50\r\n", Codec::Pcma, 40),
        ("a=ptime:5\r\n", Codec::Pcma, 10),
        ("a=ptime:200\r\n", Codec::Pcma, 60),
        ("a=ptime:0\r\na=maxptime:0\r\n", Codec::Pcma, 30),
        ("a=maxptime:20\r\n", Codec::Pcma, 20),
        ("a=ptime:60\r\na=maxptime:40\r\n", Codec::Pcma, 40),
        ("a=ptime:60\r\n", Codec::Opus, 60),
        ("a=ptime:60\r\na=maxptime:40\r\n", Codec::Opus, 40),
        ("a=ptime:30\r\n", Codec::Opus, 30),
        ("a=ptime:10\r\n", Codec::Opus, 10),
        ("a=ptime:60\r\na=maxptime:10\r\n", Codec::Opus, 10),
        ("a=ptime:3\r\n", Codec::Opus, 10),
    ] {
        let mut both = with_policy(Policy { codecs: vec![codec], ptime: 30, ..Policy::default() });
        let asked = offer(&format!("m=audio 4000 RTP/AVP 8 111\r\na=rtpmap:111 opus/48000/2\r\n{lines}"));
        let (answer, agreed) = both.answer(&asked).expect("common");
        assert_eq!((agreed.ptime, answer.media[0].ptime), (ours, Some(ours)), "{lines}");
        let mut caller = with_policy(Policy { codecs: vec![codec], ptime: 30, ..Policy::default() });
        assert_eq!(caller.offer().media[0].ptime, Some(30));
        assert_eq!(caller.accept(&asked).expect("fits").ptime, ours, "{lines}");
    }
}

#[test]
fn our_preference_decides_and_their_numbers_hold() {
    let o = offer(
        "m=audio 4000 RTP/AVP 0 96 97 98\r\na=rtpmap:96 opus/48000/2\r\na=fmtp:96 useinbandfec=1; usedtx=1\r\n\
         a=rtpmap:97 telephone-event/8000\r\na=rtpmap:98 telephone-event/48000\r\n",
    );
    let (_, agreed) = negotiator(&ALL).answer(&o).expect("common");
    assert_eq!((agreed.codec, agreed.payload_type), (Codec::Opus, 96));
    assert!(agreed.opus.fec && agreed.opus.dtx);
    let event = agreed.telephone_event.expect("offered");
    assert_eq!((event.payload_type, event.clock_rate), (98, 48_000));

    let (_, agreed) = negotiator(&[Codec::Pcmu]).answer(&o).expect("common");
    let event = agreed.telephone_event.expect("offered");
    assert_eq!((event.payload_type, event.clock_rate), (97, 8_000));
}

#[test]
fn no_common_codec_says_what_was_offered() {
    let error = negotiator(&[Codec::Opus]).answer(&offer("m=audio 4000 RTP/AVP 18 0\r\n")).expect_err("none");
    assert_eq!(error, NegotiateError::NoCommonCodec { ours: "opus".into(), theirs: "18 0".into() });
    let error = negotiator(&ALL).answer(&offer("m=video 4000 RTP/AVP 31\r\n")).expect_err("none");
    assert_eq!(error, NegotiateError::NoAudio);
    let error = negotiator(&ALL).answer(&offer("m=audio 0 RTP/AVP 0\r\n")).expect_err("none");
    assert_eq!(error, NegotiateError::NoAudio);
}

#[test]
fn other_streams_are_refused_in_place() {
    let o = offer(
        "m=video 5000 RTP/AVP 31 34\r\nm=audio 4000 RTP/AVP 8\r\nm=audio 4002 RTP/AVP 0\r\nm=image 6000 udptl t38\r\n",
    );
    let (answer, agreed) = negotiator(&[Codec::Pcmu, Codec::Pcma]).answer(&o).expect("common");
    assert_eq!(agreed.codec, Codec::Pcma, "the first usable audio line is taken");
    let ports: Vec<_> = answer.media.iter().map(|m| (m.kind.as_str(), m.port)).collect();
    assert_eq!(ports, [("video", 0), ("audio", 20_000), ("audio", 0), ("image", 0)]);
    assert!(answer.to_string().contains("m=video 0 RTP/AVP 31 34\r\n"));
    assert!(answer.to_string().contains("m=image 0 udptl t38\r\n"));
}

#[test]
fn every_form_of_hold_is_seen() {
    for (attribute, ours, held) in [
        ("sendrecv", Direction::SendRecv, false),
        ("sendonly", Direction::RecvOnly, true),
        ("recvonly", Direction::SendOnly, false),
        ("inactive", Direction::Inactive, true),
    ] {
        let o = offer(&format!("m=audio 4000 RTP/AVP 0\r\na={attribute}\r\n"));
        let (answer, agreed) = negotiator(&ALL).answer(&o).expect("common");
        assert_eq!((agreed.direction, agreed.held), (ours, held), "{attribute}");
        assert_eq!(answer.media[0].direction, Some(ours));
    }
    let old = offer("m=audio 4000 RTP/AVP 0\r\nc=IN IP4 0.0.0.0\r\n");
    let (_, agreed) = negotiator(&ALL).answer(&old).expect("common");
    assert!(agreed.held && !agreed.direction.sends());
    assert_eq!(agreed.remote_rtp, None);

    let session = parse(
        b"v=0\r\no=- 1 1 IN IP4 1.2.3.4\r\ns=-\r\nc=IN IP4 1.2.3.4\r\nt=0 0\r\na=sendonly\r\nm=audio 4000 RTP/AVP 0\r\n",
    )
    .expect("parses");
    let (_, agreed) = negotiator(&ALL).answer(&session).expect("common");
    assert!(agreed.held, "a direction of the session holds for its streams");
}

#[test]
fn our_own_hold_is_offered_and_kept_in_answers() {
    let mut n = negotiator(&[Codec::Pcmu]);
    n.offer();
    n.accept(&offer("m=audio 4000 RTP/AVP 0\r\n")).expect("fits");
    n.set_holding(true);
    assert_eq!(n.offer().media[0].direction, Some(Direction::SendOnly));
    let agreed = n.accept(&offer("m=audio 4000 RTP/AVP 0\r\na=recvonly\r\n")).expect("fits");
    assert_eq!((agreed.direction, agreed.held), (Direction::SendOnly, false));
    let (answer, _) = n.answer(&offer("m=audio 4000 RTP/AVP 0\r\n")).expect("fits");
    assert_eq!(answer.media[0].direction, Some(Direction::SendOnly));
}

#[test]
fn version_rises_only_with_a_change() {
    let mut n = negotiator(&[Codec::Pcmu]);
    let plain = offer("m=audio 4000 RTP/AVP 0\r\n");
    assert_eq!(n.answer(&plain).expect("fits").0.origin.version, 1);
    assert_eq!(n.answer(&plain).expect("fits").0.origin.version, 1);
    let hold = offer("m=audio 4000 RTP/AVP 0\r\na=sendonly\r\n");
    assert_eq!(n.answer(&hold).expect("fits").0.origin.version, 2);
    assert_eq!(n.answer(&plain).expect("fits").0.origin.version, 3);
    assert_eq!(n.answer(&plain).expect("fits").0.origin.session_id, "42");
}

#[test]
fn offer_lists_everything_and_takes_their_numbers() {
    let mut n = negotiator(&ALL);
    let o = n.offer();
    assert_eq!(o.media[0].formats, ["111", "9", "0", "8", "110", "101"]);
    let answer = offer(
        "m=audio 4000 RTP/AVP 96 97\r\na=rtpmap:96 OPUS/48000/2\r\na=rtpmap:97 telephone-event/48000\r\na=rtcp:5000\r\n",
    );
    let agreed = n.accept(&answer).expect("fits");
    assert_eq!((agreed.codec, agreed.payload_type, agreed.receive_payload_type), (Codec::Opus, 96, 111));
    let event = agreed.telephone_event.expect("common");
    assert_eq!((event.payload_type, event.receive_payload_type), (97, 110));
    assert_eq!(agreed.remote_rtcp, Some("198.51.100.7:5000".parse().expect("address")));

    let again = n.offer();
    assert_eq!(again.media[0].formats, ["111", "110"], "a later offer keeps what is in use");
    assert_eq!(again.origin.version, 2);
}

#[test]
fn answers_that_do_not_fit_change_nothing() {
    let mut n = negotiator(&[Codec::Pcmu]);
    assert!(n.accept(&offer("m=audio 4000 RTP/AVP 0\r\n")).is_err(), "nothing was offered");
    n.offer();
    let agreed = n.accept(&offer("m=audio 4000 RTP/AVP 0\r\n")).expect("fits");
    n.offer();
    for bad in [
        "m=audio 0 RTP/AVP 0\r\n",
        "m=audio 4000 RTP/AVP 8\r\n",
        "m=audio 4000 RTP/SAVP 0\r\n",
        "m=video 4000 RTP/AVP 0\r\n",
        "",
        "m=audio 4000 RTP/AVP 0\r\nc=IN IP4 239.1.1.1\r\n",
    ] {
        assert!(n.accept(&offer(bad)).is_err(), "{bad}");
    }
    assert_eq!(n.agreed(), Some(&agreed));
}

#[test]
fn reinvite_keeps_lines_and_may_add_some() {
    let mut n = negotiator(&[Codec::Pcmu]);
    n.answer(&offer("m=audio 4000 RTP/AVP 0\r\n")).expect("fits");
    let (answer, _) =
        n.answer(&offer("m=audio 4000 RTP/AVP 0\r\nm=audio 4004 RTP/SAVP 0\r\na=crypto:1 AES_CM_128_HMAC_SHA1_80 inline:NzB4d1BINUAvLEw6UzF3WSJ+PSdFcGdUJShpX1Zj\r\n"))
            .expect("fits");
    let ports: Vec<_> = answer.media.iter().map(|m| m.port).collect();
    assert_eq!(ports, [20_000, 0], "the line in use stays in use");
    let ours = n.offer();
    let ports: Vec<_> = ours.media.iter().map(|m| m.port).collect();
    assert_eq!(ports, [20_000, 0], "lines are never dropped");
}

#[test]
fn encryption_is_taken_when_offered_and_demanded_when_required() {
    let sdes = "m=audio 4000 RTP/SAVP 0\r\na=crypto:7 AES_CM_128_HMAC_SHA1_32 inline:NzB4d1BINUAvLEw6UzF3WSJ+PSdFcGdUJShpX1Zj\r\n";
    let plain = "m=audio 4002 RTP/AVP 0\r\n";
    let (answer, agreed) = negotiator(&ALL).answer(&offer(&format!("{plain}{sdes}"))).expect("fits");
    let keys = agreed.srtp.expect("preferred");
    assert_eq!((keys.suite, keys.local), (Suite::AesCm128Sha1_32, Key([2; 44])));
    assert_eq!(answer.media[0].port, 0);
    assert_eq!(answer.media[1].crypto[0].tag, 7);

    let mut strict = with_policy(Policy { srtp: SrtpPolicy::Required, ..Policy::default() });
    assert!(matches!(strict.answer(&offer(plain)), Err(NegotiateError::Encryption(_))));
    let o = strict.offer();
    assert_eq!(o.media[0].proto, "RTP/SAVP");
    assert_eq!(o.media[0].crypto.len(), 4);
    let agreed = strict
        .accept(&offer("m=audio 4000 RTP/SAVP 0\r\na=crypto:2 AES_CM_128_HMAC_SHA1_32 inline:NzB4d1BINUAvLEw6UzF3WSJ+PSdFcGdUJShpX1Zj\r\n"))
        .expect("fits");
    assert_eq!(agreed.srtp.expect("keys").local, Key([2; 44]));

    let mut never = with_policy(Policy { srtp: SrtpPolicy::Never, ..Policy::default() });
    assert!(never.answer(&offer(sdes)).is_err());
    assert!(negotiator(&ALL).answer(&offer("m=audio 4000 RTP/SAVP 0\r\n")).is_err(), "no key");
}

const PRINT: &str = "a=fingerprint:sha-256 AA:BB\r\n";

#[test]
fn a_browser_gets_a_lite_agent_that_waits_for_its_handshake() {
    let browser = |fragment: &str, more: &str| {
        let text = format!(
            "v=0\r\no=- 1 1 IN IP4 127.0.0.1\r\ns=-\r\nt=0 0\r\na=group:BUNDLE 0 1\r\na=msid-semantic: WMS\r\n{PRINT}\
             m=audio 9 UDP/TLS/RTP/SAVPF 111 0 126\r\nc=IN IP4 0.0.0.0\r\na=rtcp:9 IN IP4 0.0.0.0\r\n\
             a=ice-ufrag:{fragment}\r\na=ice-pwd:their-password-is-long-too\r\na=setup:actpass\r\na=mid:0\r\n\
             a=sendrecv\r\na=rtcp-mux\r\na=rtpmap:111 opus/48000/2\r\na=rtpmap:126 telephone-event/8000\r\n{more}\
             m=video 9 UDP/TLS/RTP/SAVPF 96\r\nc=IN IP4 0.0.0.0\r\na=mid:1\r\na=rtpmap:96 VP8/90000\r\n"
        );
        parse(text.as_bytes()).expect("parses")
    };
    let mut n = negotiator(&ALL);
    let (answer, agreed) = n.answer(&browser("them", "")).expect("fits");
    let dtls = agreed.dtls.clone().expect("DTLS");
    assert!(!dtls.client && !agreed.held && agreed.srtp.is_none() && agreed.rtcp_mux);
    assert_eq!((agreed.codec, agreed.direction, agreed.remote_rtp), (Codec::Opus, Direction::SendRecv, None));
    let ice = dtls.ice.expect("ICE");
    assert_eq!((ice.fragment.as_str(), ice.remote_fragment.as_str()), ("here", "them"));
    let text = answer.to_string();
    for line in [
        "a=ice-lite",
        "a=group:BUNDLE 0",
        "m=audio 20000 UDP/TLS/RTP/SAVPF 111 126",
        "a=mid:0",
        "a=rtcp-mux",
        "a=setup:passive",
        "a=fingerprint:sha-256 0A:0B",
        "a=ice-ufrag:here",
        "a=candidate:1 1 udp 2130706431 192.0.2.9 20000 typ host",
        "a=end-of-candidates",
        "m=video 0 UDP/TLS/RTP/SAVPF 96",
        "a=mid:1",
    ] {
        assert!(text.contains(&format!("{line}\r\n")), "{line} in {text}");
    }
    assert!(!text.contains(" 2 udp "), "RTCP has no port of its own");
    // A hold changes nothing of the path; new credentials ask for new ones of ours.
    let (_, held) = n.answer(&browser("them", "a=sendonly\r\n")).expect("fits");
    assert!(held.held && held.dtls == agreed.dtls);
    let (_, again) = n.answer(&browser("new!", "")).expect("fits");
    let ice = again.dtls.expect("DTLS").ice.expect("ICE");
    assert_eq!((ice.fragment.as_str(), ice.remote_fragment.as_str()), ("here1", "new!"));
    // Ours of later says the same path.
    let ours = n.offer().to_string();
    assert!(ours.contains("a=ice-ufrag:here1\r\n") && ours.contains("a=setup:actpass\r\n"), "{ours}");
    assert!(ours.contains("a=group:BUNDLE 0\r\n") && ours.contains("a=ice-lite\r\n"), "{ours}");
}

#[test]
fn telephones_shake_hands_without_ice_in_either_role() {
    for (setup, client, ours) in
        [("actpass", false, "passive"), ("active", false, "passive"), ("passive", true, "active")]
    {
        let mut n = negotiator(&ALL);
        let text = format!("m=audio 4000 UDP/TLS/RTP/SAVP 0\r\n{PRINT}a=setup:{setup}\r\n");
        let (answer, agreed) = n.answer(&offer(&text)).expect("fits");
        let dtls = agreed.dtls.expect("DTLS");
        assert_eq!((dtls.client, dtls.ice), (client, None), "{setup}");
        assert_eq!(agreed.remote_rtp, Some("198.51.100.7:4000".parse().expect("address")));
        let answer = answer.to_string();
        assert!(answer.contains(&format!("a=setup:{ours}\r\n")) && !answer.contains("ice"), "{answer}");
        // Whichever side asks again, the association and its roles stay.
        let (_, again) = n.answer(&offer(&text.replace(setup, "actpass"))).expect("fits");
        assert_eq!(again.dtls.expect("DTLS").client, client, "{setup}");
    }
    // Some write the fingerprint beside the transport of SDES.
    let mixed = format!("m=audio 4000 RTP/SAVPF 0\r\n{PRINT}");
    assert!(negotiator(&ALL).answer(&offer(&mixed)).expect("fits").1.dtls.is_some());
    let mut without = negotiator(&ALL);
    without.local.dtls = None;
    assert!(matches!(without.answer(&offer(&mixed)), Err(NegotiateError::Encryption(_))), "no certificate here");
}

#[test]
fn we_offer_a_handshake_where_it_is_wanted() {
    let mut n = with_policy(Policy { srtp: SrtpPolicy::Dtls, ..Policy::default() });
    let ours = n.offer().to_string();
    assert!(
        ours.contains(" UDP/TLS/RTP/SAVP ") && ours.contains("a=setup:actpass\r\n") && ours.contains("a=rtcp-mux\r\n")
    );
    let answer = |more: &str| offer(&format!("m=audio 4000 UDP/TLS/RTP/SAVP 0\r\n{more}"));
    assert!(n.accept(&answer("")).is_err(), "no fingerprint");
    let agreed = n.accept(&answer(&format!("{PRINT}a=setup:active\r\n"))).expect("fits");
    assert!(!agreed.dtls.expect("DTLS").client && agreed.srtp.is_none());
    let mut n = with_policy(Policy { srtp: SrtpPolicy::Dtls, ..Policy::default() });
    n.offer();
    let agreed = n.accept(&answer(&format!("{PRINT}a=setup:passive\r\n"))).expect("fits");
    assert!(agreed.dtls.expect("DTLS").client);
    assert!(n.answer(&offer("m=audio 4000 RTP/AVP 0\r\n")).is_err(), "not in the clear");
}

#[test]
fn multiplexing_is_answered_when_offered() {
    let (answer, agreed) = negotiator(&ALL).answer(&offer("m=audio 4000 RTP/AVP 0\r\na=rtcp-mux\r\n")).expect("fits");
    assert!(agreed.rtcp_mux && answer.media[0].rtcp_mux);
    assert_eq!(agreed.remote_rtcp, agreed.remote_rtp);
}

#[test]
fn broken_lines_are_named() {
    let text = "v=0\r\no=- 1 1 IN IP4 1.2.3.4\r\ns=-\r\nc=IN IP4 1.2.3.4\r\nt=0 0\r\nm=audio 4000 RTP/AVP 0\r\na=rtpmap:0 PCMU/no\r\n";
    let error = parse(text.as_bytes()).expect_err("broken");
    assert_eq!(error.line, 7, "{error}");
    let error = parse(b"v=0\r\no=broken\r\n").expect_err("broken");
    assert_eq!(error.line, 2, "{error}");
    assert!(parse(&vec![b'a'; 100_000]).is_err());
    assert!(parse(b"").is_err());
}

#[test]
fn sloppy_offers_are_taken() {
    for text in [
        // Bare line feeds, no s= and no t=, a huge session id.
        "v=0\no=- 99999999999999999999999 1 IN IP4 1.2.3.4\nc=IN IP4 1.2.3.4\nm=audio 4000 RTP/AVP 0 101\na=rtpmap:101 telephone-event/8000\n",
        // A fraction in ptime, an fmtp without parameters, an unknown attribute.
        "v=0\r\no=x 1 1 IN IP4 1.2.3.4\r\ns= \r\nc=IN IP4 1.2.3.4\r\nt=0 0\r\nm=audio 4000 RTP/AVP 8\r\na=ptime:20.0\r\na=fmtp:8\r\na=silenceSupp:off - - - -\r\n",
        // A name for an address.
        "v=0\r\no=x 1 1 IN IP4 host.example\r\ns=-\r\nc=IN IP4 host.example\r\nt=0 0\r\nm=audio 4000 RTP/AVP 8\r\n",
        // A broken map on a stream that is refused anyway.
        "v=0\r\no=x 1 1 IN IP4 1.2.3.4\r\ns=-\r\nc=IN IP4 1.2.3.4\r\nt=0 0\r\nm=audio 4000 RTP/AVP 8\r\nm=video 5000 RTP/AVP 99\r\na=rtpmap:99 H264\r\n",
    ] {
        let parsed = parse(text.as_bytes()).unwrap_or_else(|e| panic!("{e}: {text}"));
        negotiator(&ALL).answer(&parsed).unwrap_or_else(|e| panic!("{e}: {text}"));
    }
}

/// Lines that make interesting offers when thrown together.
fn line() -> impl Strategy<Value = String> {
    prop_oneof![
        3 => (0..3_usize, 0..=65_535_u16, 0..5_usize, proptest::collection::vec(0..130_u8, 0..6)).prop_map(
            |(kind, port, proto, formats)| {
                let kind = ["audio", "video", "image"][kind];
                let proto = ["RTP/AVP", "RTP/SAVP", "RTP/AVPF", "udptl", "UDP/TLS/RTP/SAVPF"][proto];
                let formats: Vec<_> = formats.iter().map(u8::to_string).collect();
                format!("m={kind} {port} {proto} {}", formats.join(" "))
            }
        ),
        3 => (0..130_u8, 0..6_usize).prop_map(|(pt, i)| {
            let map =
                ["opus/48000/2", "PCMU/8000", "G722/8000", "telephone-event/8000", "telephone-event/48000", "x/1"][i];
            format!("a=rtpmap:{pt} {map}")
        }),
        1 => (0..130_u8).prop_map(|pt| format!("a=fmtp:{pt} useinbandfec=1;maxaveragebitrate=9")),
        2 => (0..8_usize).prop_map(|i| {
            ["a=sendonly", "a=recvonly", "a=inactive", "a=rtcp-mux", "a=rtcp:0", "a=ptime:20", "a=maxptime:0",
             "a=crypto:1 AES_CM_128_HMAC_SHA1_80 inline:NzB4d1BINUAvLEw6UzF3WSJ+PSdFcGdUJShpX1Zj"][i].to_owned()
        }),
        2 => (0..7_usize).prop_map(|i| {
            ["a=fingerprint:sha-256 AA:BB", "a=fingerprint:x", "a=setup:passive", "a=setup:actpass", "a=ice-ufrag:abcd",
             "a=ice-pwd:0123456789012345678901", "a=mid:0"][i].to_owned()
        }),
        1 => (0..4_usize).prop_map(|i| {
            ["c=IN IP4 0.0.0.0", "c=IN IP6 ::1", "c=IN IP4 224.0.0.1/127", "c=IN IP4 192.0.2.3"][i].to_owned()
        }),
        1 => "[a-z]=[ -~]{0,20}",
    ]
}

fn any_offer() -> impl Strategy<Value = String> {
    proptest::collection::vec(line(), 0..14)
        .prop_map(|lines| format!("v=0\r\no=- 1 1 IN IP4 192.0.2.3\r\ns=-\r\nt=0 0\r\n{}\r\n", lines.join("\r\n")))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        if let Ok(description) = parse(&bytes) {
            let _ = negotiator(&ALL).answer(&description);
        }
    }

    #[test]
    fn an_answer_fits_its_offer(text in any_offer(), again in any_offer()) {
        let mut n = negotiator(&ALL);
        for text in [text, again] {
            let Ok(offer) = parse(text.as_bytes()) else { continue };
            let Ok((answer, agreed)) = n.answer(&offer) else { continue };
            // RFC 3264 section 6: as many lines, in the same order, of the same kind and transport.
            prop_assert_eq!(answer.media.len(), offer.media.len());
            for (ours, theirs) in answer.media.iter().zip(&offer.media) {
                prop_assert_eq!(&ours.kind, &theirs.kind);
                prop_assert_eq!(&ours.proto, &theirs.proto);
                prop_assert!(theirs.port != 0 || ours.port == 0, "what was disabled stays so");
                if ours.port != 0 {
                    // Only formats that were offered, and the codec first.
                    for format in &ours.formats {
                        prop_assert!(theirs.formats.contains(format));
                    }
                    prop_assert_eq!(&ours.formats[0], &agreed.payload_type.to_string());
                    let (o, t) = (answer.direction(ours), offer.direction(theirs));
                    prop_assert!(!o.sends() || t.receives());
                    prop_assert!(!o.receives() || t.sends());
                }
            }
            prop_assert_eq!(answer.media.iter().filter(|m| m.port != 0).count(), 1);
            // What is printed reads back as the same.
            let printed = answer.to_string();
            prop_assert_eq!(parse(printed.as_bytes()).expect("ours parses"), answer);
        }
    }

    #[test]
    fn two_negotiators_agree(first in 0..4_usize, second in 0..4_usize, secure in any::<bool>()) {
        let srtp = if secure { SrtpPolicy::Required } else { SrtpPolicy::Allowed };
        let mut a = with_policy(Policy { codecs: vec![ALL[first], ALL[second]], srtp, ..Policy::default() });
        let mut b = negotiator(&[ALL[second], ALL[first]]);
        b.local.keys = [Key([5; 44]), Key([6; 44]), Key([7; 44]), Key([8; 44])];
        let (answer, at_b) = b.answer(&parse(a.offer().to_string().as_bytes()).expect("parses")).expect("common");
        let at_a = a.accept(&parse(answer.to_string().as_bytes()).expect("parses")).expect("fits");
        prop_assert_eq!(at_a.codec, at_b.codec);
        prop_assert_eq!(at_a.payload_type, at_b.receive_payload_type);
        prop_assert_eq!(at_a.receive_payload_type, at_b.payload_type);
        prop_assert_eq!(at_a.telephone_event.map(|e| e.clock_rate), at_b.telephone_event.map(|e| e.clock_rate));
        let used = |suite: Suite, key: &Key| (key.master(suite).to_vec(), key.salt(suite).to_vec());
        let here = at_a.srtp.map(|k| (used(k.suite, &k.local), used(k.suite, &k.remote)));
        let there = at_b.srtp.map(|k| (used(k.suite, &k.remote), used(k.suite, &k.local)));
        prop_assert_eq!(here, there);
    }
}
