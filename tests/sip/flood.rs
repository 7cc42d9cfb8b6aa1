//! Floods and oddities before the stack: what is over the rate is dropped, answers keep nothing, long messages are read
//! whole and smuggled lines not at all.

use std::time::Duration;

use crate::counted::Growth;
use crate::support::{
    event, limited, loopback,
    raw::{Raw, answers_options, header, sdp},
    start,
};
use crate::wire;
use antiphon::{
    media::leg::{LegEvent, MediaLeg},
    sip::{SipConfig, User},
};
use tokio::net::UdpSocket;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_datagram_of_sixty_thousand_bytes_is_read_whole() {
    let (endpoint, mut calls) = wire::endpoint().await;
    let mut raw = Raw::new(endpoint.local_udp().expect("bound"), "long").await;
    let line = format!("a=x-filler:{}\r\n", "f".repeat(1_000));
    for (kilobytes, headers) in [(9, ""), (50, "X-Last: here\r\n")] {
        let invite = raw.request("INVITE", headers, &sdp(4_000, &line.repeat(kilobytes)));
        assert!(invite.len() > 8_192);
        raw.send(&invite).await;
        let incoming = limited(calls.recv()).await.expect("a call");
        assert_eq!(incoming.headers.get("X-Last").map(String::as_str), (!headers.is_empty()).then_some("here"));
        incoming.reject(486, "busy");
        raw.expect("SIP/2.0 486").await;
        raw.remote_tag.clear();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_floods_is_dropped_and_others_are_answered() {
    let (endpoint, _calls) = start(SipConfig { messages_per_second: 5, ..loopback() }).await;
    let target = endpoint.local_udp().expect("bound");
    let flooder = UdpSocket::bind("127.0.0.2:0").await.expect("a loopback address");
    let local = flooder.local_addr().expect("bound");
    let mut answers = 0;
    for n in 0..100 {
        let options = format!(
            "OPTIONS sip:x@{target} SIP/2.0\r\nVia: SIP/2.0/UDP {local};branch=z9hG4bK{n};rport\r\nMax-Forwards: 9\r\n\
             From: <sip:a@b>;tag=1\r\nTo: <sip:x@y>\r\nCall-ID: {n}\r\nCSeq: 1 OPTIONS\r\nContent-Length: 0\r\n\r\n"
        );
        flooder.send_to(options.as_bytes(), target).await.expect("sends");
    }
    answers_options(target, "genuine").await;
    let mut buffer = [0; 2_048];
    while flooder.try_recv_from(&mut buffer).is_ok() {
        answers += 1;
    }
    assert!(answers < 60, "{answers} of 100");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancel_with_a_name_in_its_via_stalls_no_other_call() {
    let (endpoint, mut calls) = wire::endpoint().await;
    let target = endpoint.local_udp().expect("bound");
    let socket = UdpSocket::bind("127.0.0.1:0").await.expect("binds");
    for n in 0..20 {
        let cancel = format!(
            "CANCEL sip:x@{target} SIP/2.0\r\nVia: SIP/2.0/UDP slow{n}.name.invalid;branch=z9hG4bKc{n}\r\n\
             Max-Forwards: 9\r\nFrom: <sip:a@b>;tag=1\r\nTo: <sip:x@y>\r\nCall-ID: slow{n}\r\nCSeq: 1 CANCEL\r\n\
             Content-Length: 0\r\n\r\n"
        );
        socket.send_to(cancel.as_bytes(), target).await.expect("sends");
    }
    let (_raw, mut leg) = wire::call(&endpoint, &mut calls, "meanwhile", 4_000).await;
    leg.hang_up().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn smuggled_lines_and_endless_headers_are_not_read() {
    let (endpoint, mut calls) = wire::endpoint().await;
    let target = endpoint.local_udp().expect("bound");
    for (n, smuggled) in ["X: a\nVia: SIP/2.0/UDP evil", "X: a\rContact: <sip:evil>"].into_iter().enumerate() {
        let mut raw = Raw::new(target, &format!("smuggled-{n}")).await;
        let invite = raw.request("INVITE", &format!("{smuggled}\r\n"), &sdp(4_000, ""));
        raw.send(&invite).await;
    }
    let mut raw = Raw::new(target, "endless").await;
    let routes = format!("Via: SIP/2.0/UDP {};branch=z9hG4bK1\r\n", "h".repeat(500));
    let invite = raw.request("INVITE", &routes.repeat(40), &sdp(4_000, ""));
    raw.send(&invite).await;
    // The first call is one that is sound.
    let (_raw, mut leg) = wire::call(&endpoint, &mut calls, "sound", 4_000).await;
    leg.hang_up().await;
    assert!(calls.try_recv().is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_repeat_themselves_and_keep_nothing() {
    let users: Vec<User> = vec![toml::from_str("username = \"a\"\npassword = \"long enough\"").expect("valid")];
    let (endpoint, _calls) = start(SipConfig { users, ..loopback() }).await;
    let mut raw = Raw::new(endpoint.local_udp().expect("bound"), "again").await;
    let invite = raw.request("INVITE", "", &sdp(4_000, ""));
    let mut tags = Vec::new();
    for _ in 0..2 {
        raw.send(&invite).await;
        let refusal = raw.expect("SIP/2.0 401").await;
        tags.push(header(&refusal, "To").expect("To").to_owned());
    }
    assert_eq!(tags[0], tags[1], "the same answer to the same request (RFC 3261 section 8.2.7)");
    // A guess of a password that was wrong ten times is not looked at any more, whoever asks at that address.
    let mut seen = Vec::new();
    for n in 0..12 {
        let mut raw = Raw::new(endpoint.local_udp().expect("bound"), &format!("guess-{n}")).await;
        let challenged = raw.ask("INVITE", "", &sdp(4_000, ""), "SIP/2.0 401").await;
        let nonce = header(&challenged, "WWW-Authenticate").and_then(|c| c.split("nonce=\"").nth(1)).expect("a nonce");
        let nonce = nonce.split('"').next().expect("its end").to_owned();
        raw.remote_tag.clear();
        let contact = raw.contact.clone();
        let guess = format!(
            "Authorization: Digest username=\"a\", realm=\"antiphon\", nonce=\"{nonce}\", uri=\"{contact}\", \
             response=\"{n:032x}\", algorithm=MD5\r\n"
        );
        let answer = raw.ask("INVITE", &guess, &sdp(4_000, ""), "SIP/2.0 ").await;
        let answer = if answer.starts_with("SIP/2.0 100") { raw.expect("SIP/2.0 ").await } else { answer };
        seen.push(answer.get(8..11).expect("a status").to_owned());
    }
    assert_eq!(seen[..10], ["403"; 10]);
    assert_eq!(seen[10..], ["503"; 2]);
    assert_eq!(endpoint.calls(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guesses_that_answer_no_challenge_keep_nothing_and_shut_no_caller_out() {
    let users: Vec<User> = vec![toml::from_str("username = \"a\"\npassword = \"long enough\"").expect("valid")];
    let (endpoint, _calls) = start(SipConfig { users, messages_per_second: 0, ..loopback() }).await;
    let counts = Growth::of(&["antiphon_sip_auth_total{"]);
    let target = endpoint.local_udp().expect("bound");
    let guesser = UdpSocket::bind("127.0.0.2:0").await.expect("a loopback address");
    let local = guesser.local_addr().expect("bound");
    let (mut answers, mut buffer) = (0, [0; 2_048]);
    // More than the stack keeps answers of.
    for n in 0..10_000 {
        let guess = format!(
            "INVITE sip:x@{target} SIP/2.0\r\nVia: SIP/2.0/UDP {local};branch=z9hG4bK{n};rport\r\nMax-Forwards: 9\r\n\
             From: <sip:a@b>;tag=1\r\nTo: <sip:x@y>\r\nCall-ID: {n}\r\nCSeq: 1 INVITE\r\nContact: <sip:a@{local}>\r\n\
             Authorization: Digest username=\"a\", realm=\"antiphon\", nonce=\"0.00\", uri=\"sip:x@{target}\", \
             response=\"{n:032x}\", algorithm=MD5\r\nContent-Length: 0\r\n\r\n"
        );
        guesser.send_to(guess.as_bytes(), target).await.expect("sends");
        // One after the other: what is lost in a full buffer is not refused.
        limited(guesser.recv_from(&mut buffer)).await.expect("an answer");
        answers += usize::from(buffer.starts_with(b"SIP/2.0 401"));
    }
    assert_eq!(answers, 10_000);
    let mut raw = Raw::new(target, "genuine").await;
    raw.ask("INVITE", "", &sdp(4_000, ""), "SIP/2.0 401").await;
    counts.assert();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn digits_by_info_still_come_in_a_flood_of_options() {
    let (endpoint, mut calls) = wire::endpoint().await;
    let (mut raw, mut leg) = wire::call(&endpoint, &mut calls, "digits", 4_000).await;
    for n in 0..50 {
        let mut other = Raw::new(endpoint.local_udp().expect("bound"), &format!("noise-{n}")).await;
        let options = other.request("OPTIONS", "", "");
        other.send(&options).await;
    }
    raw.ask("INFO", "Content-Type: application/dtmf-relay\r\n", "Signal=7\r\n", "SIP/2.0 200").await;
    assert_eq!(event(&mut leg, |e| matches!(e, LegEvent::Digit(_))).await, LegEvent::Digit('7'));
    assert!(!raw.hears("BYE", Duration::from_millis(10)).await);
}
