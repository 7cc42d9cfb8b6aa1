//! What an endpoint says, message by message, to a telephone that does exactly as told.

use std::time::Duration;

use crate::support::{
    called, event, limited, loopback,
    raw::{Raw, audio_port, body, header, sdp},
    start, transfer, within,
};
use antiphon::{
    media::leg::{Codec, LegEnd, LegEvent, MediaLeg, PeerCause},
    sip::{DialRequest, Endpoint, IncomingCall, SipConfig, SipError, User},
};
use tokio::{net::UdpSocket, sync::mpsc};

pub(crate) async fn endpoint() -> (Endpoint, mpsc::Receiver<IncomingCall>) {
    start(loopback()).await
}

async fn raw(endpoint: &Endpoint, call_id: &str) -> Raw {
    Raw::new(endpoint.local_udp().expect("bound"), call_id).await
}

/// A call that is up, from `raw`.
pub(crate) async fn call(
    endpoint: &Endpoint,
    calls: &mut mpsc::Receiver<IncomingCall>,
    call_id: &str,
    port: u16,
) -> (Raw, antiphon::media::sip::SipLeg) {
    let mut raw = raw(endpoint, call_id).await;
    let (_, leg) = called(&mut raw, calls, "", &sdp(port, "")).await;
    (raw, leg)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn call_goes_trying_ringing_ok_and_bye() {
    let (endpoint, mut calls) = endpoint().await;
    let mut raw = raw(&endpoint, "basic").await;
    let invite = raw.request("INVITE", "Subject: hello\r\n", &sdp(4_000, ""));
    raw.send(&invite).await;
    raw.expect("SIP/2.0 100").await;
    let incoming = limited(calls.recv()).await.expect("a call");
    assert_eq!((incoming.user.as_str(), incoming.call_id.as_str()), ("demo", "basic"));
    assert_eq!(incoming.headers.get("Subject").map(String::as_str), Some("hello"));
    assert_eq!(incoming.offered, [Codec::Pcmu]);
    incoming.ringing();
    raw.expect("SIP/2.0 180").await;
    let mut leg = limited(incoming.accept()).await.expect("accepted");
    leg.attach().await.expect("attaches");
    let ok = raw.expect("SIP/2.0 200").await;
    assert!(body(&ok).contains("m=audio "), "{ok}");
    assert_eq!(header(&ok, "Content-Type"), Some("application/sdp"));
    assert!(header(&ok, "Contact").is_some());
    // What is required of a caller (RFC 3262) is among what is taken.
    let allow = header(&ok, "Allow").expect("Allow");
    for method in ["INVITE", "ACK", "CANCEL", "BYE", "OPTIONS", "INFO", "UPDATE", "PRACK", "NOTIFY", "REFER"] {
        assert!(allow.split(", ").any(|known| known == method), "{method}: {allow}");
    }

    // Without ACK the 200 is repeated; a repeated INVITE makes no second call.
    raw.send(&invite).await;
    raw.expect("SIP/2.0 200").await;
    raw.ack("").await;
    event(&mut leg, |e| *e == LegEvent::Connected).await;
    let why = "Reason: SIP;cause=503, Q.850;cause=34;text=\"No circuit\"\r\n";
    raw.ask("BYE", why, "", "SIP/2.0 200").await;
    let cause = PeerCause { q850: Some(34), sip: Some(503), text: Some("No circuit".to_owned()) };
    assert_eq!(
        event(&mut leg, |e| matches!(e, LegEvent::Cause(_) | LegEvent::Closed(_))).await,
        LegEvent::Cause(cause)
    );
    assert_eq!(event(&mut leg, |e| matches!(e, LegEvent::Closed(_))).await, LegEvent::Closed(LegEnd::Remote));
    raw.ask("BYE", "", "", "SIP/2.0 481").await;
    within("the call to be forgotten", || endpoint.calls() == 0).await;
    assert!(calls.try_recv().is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancel_brings_487_until_the_answer_is_sent() {
    let (endpoint, mut calls) = endpoint().await;
    for ringing in [false, true] {
        let mut raw = raw(&endpoint, if ringing { "cancel-ringing" } else { "cancel-trying" }).await;
        let invite = raw.request("INVITE", "", &sdp(4_000, ""));
        raw.send(&invite).await;
        let incoming = limited(calls.recv()).await.expect("a call");
        if ringing {
            incoming.ringing();
            raw.expect("SIP/2.0 180").await;
        }
        let farewell = incoming.farewell();
        let cancel = raw.request("CANCEL", "Reason: SIP;cause=200;text=\"Call completed elsewhere\"\r\n", "");
        raw.send(&cancel).await;
        raw.expect("SIP/2.0 487").await;
        raw.ack("").await;
        limited(incoming.cancelled()).await;
        assert_eq!(farewell().and_then(|cause| cause.sip), Some(200));
        assert!(matches!(limited(incoming.accept()).await, Err(SipError::Cancelled)));
    }
    // After the 200 it changes nothing.
    let (mut raw, mut leg) = call(&endpoint, &mut calls, "cancel-late", 4_000).await;
    let cancel = raw.request("CANCEL", "", "");
    raw.send(&cancel).await;
    leg.hang_up().await;
    let bye = raw.expect("BYE").await;
    raw.answer(&bye, "200 OK", "").await;
    let mut nobody = self::raw(&endpoint, "cancel-none").await;
    nobody.request("INVITE", "", "");
    let cancel = nobody.request("CANCEL", "", "");
    nobody.send(&cancel).await;
    nobody.expect("SIP/2.0 481").await;
    within("the calls to be forgotten", || endpoint.calls() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn offer_may_come_late_from_either_side() {
    let (endpoint, mut calls) = endpoint().await;
    let mut raw = raw(&endpoint, "late-offer").await;
    let invite = raw.request("INVITE", "", "");
    raw.send(&invite).await;
    let incoming = limited(calls.recv()).await.expect("a call");
    assert!(incoming.offered.is_empty());
    let accepting = tokio::spawn(incoming.accept());
    let ok = raw.expect("SIP/2.0 200").await;
    assert!(body(&ok).contains("opus/48000/2"), "everything is offered: {ok}");
    raw.ack(&sdp(4_000, "")).await;
    let mut leg = limited(accepting).await.expect("runs").expect("accepted");
    leg.attach().await.expect("attaches");
    assert_eq!(leg.format().codec, Codec::Pcmu);
    event(&mut leg, |e| *e == LegEvent::Connected).await;

    // The same inside the dialog; the answer in the ACK holds us.
    let ok = raw.ask("INVITE", "", "", "SIP/2.0 200").await;
    assert!(body(&ok).contains("m=audio "), "{ok}");
    raw.ack(&sdp(4_000, "a=sendonly\r\n")).await;
    assert_eq!(event(&mut leg, |e| matches!(e, LegEvent::Held(_))).await, LegEvent::Held(true));

    // An ACK without the answer ends a call that never had one.
    let mut raw = self::raw(&endpoint, "late-nothing").await;
    let invite = raw.request("INVITE", "", "");
    raw.send(&invite).await;
    let accepting = tokio::spawn(limited(calls.recv()).await.expect("a call").accept());
    raw.expect("SIP/2.0 200").await;
    raw.ack("").await;
    assert!(matches!(limited(accepting).await.expect("runs"), Err(SipError::NotAcceptable(_))));
    let bye = raw.expect("BYE").await;
    raw.answer(&bye, "200 OK", "").await;
    within("one call to be left", || endpoint.calls() == 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reinvite_and_update_change_the_session() {
    let (endpoint, mut calls) = endpoint().await;
    let (mut raw, mut leg) = call(&endpoint, &mut calls, "change", 4_000).await;
    let version = |text: &str| -> u64 {
        let origin = body(text).lines().find(|l| l.starts_with("o=")).expect("o=").to_owned();
        origin.split(' ').nth(2).expect("version").parse().expect("a number")
    };

    let held = raw.ask("INVITE", "", &sdp(4_000, "a=sendonly\r\n"), "SIP/2.0 200").await;
    raw.ack("").await;
    assert!(body(&held).contains("a=recvonly"), "{held}");
    assert_eq!(event(&mut leg, |e| matches!(e, LegEvent::Held(_))).await, LegEvent::Held(true));

    let resumed = raw.ask("UPDATE", "", &sdp(4_000, ""), "SIP/2.0 200").await;
    assert_eq!(version(&resumed), version(&held) + 1);
    assert_eq!(event(&mut leg, |e| matches!(e, LegEvent::Held(_))).await, LegEvent::Held(false));

    let alaw = sdp(4_000, "").replace("RTP/AVP 0 101", "RTP/AVP 8");
    raw.ask("INVITE", "", &alaw, "SIP/2.0 200").await;
    raw.ack("").await;
    let LegEvent::Format(format) = event(&mut leg, |e| matches!(e, LegEvent::Format(_))).await else { unreachable!() };
    assert_eq!((format.codec, format.payload_type, format.telephone_event), (Codec::Pcma, 8, None));

    // What cannot be agreed to leaves the session as it is.
    let g729 = sdp(4_000, "").replace("RTP/AVP 0 101", "RTP/AVP 18");
    let refused = raw.ask("INVITE", "", &g729, "SIP/2.0 488").await;
    raw.ack("").await;
    assert!(header(&refused, "Warning").expect("Warning").contains("codecs"), "{refused}");
    raw.ask("UPDATE", "", "v=0\r\no=broken\r\n", "SIP/2.0 400").await;
    raw.ask("UPDATE", "", "", "SIP/2.0 200").await;
    assert_eq!(leg.format().codec, Codec::Pcma);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_in_a_dialog_are_answered() {
    let (endpoint, mut calls) = endpoint().await;
    let (mut raw, mut leg) = call(&endpoint, &mut calls, "in-dialog", 4_000).await;
    let relay = "Content-Type: application/dtmf-relay\r\n";
    raw.ask("INFO", relay, "Signal=7\r\nDuration=160\r\n", "SIP/2.0 200").await;
    assert_eq!(event(&mut leg, |e| matches!(e, LegEvent::Digit(_))).await, LegEvent::Digit('7'));
    raw.ask("INFO", "Content-Type: text/plain\r\n", "hello", "SIP/2.0 415").await;
    raw.ask("OPTIONS", "", "", "SIP/2.0 200").await;
    raw.ask("MESSAGE", "Content-Type: text/plain\r\n", "hello", "SIP/2.0 405").await;
    raw.ask("REFER", "Refer-To: <sip:x@127.0.0.1>\r\n", "", "SIP/2.0 603").await;
    raw.ask("NOTIFY", "Event: refer\r\nSubscription-State: active\r\n", "", "SIP/2.0 481").await;
    raw.ask("PRACK", "RAck: 1 1 INVITE\r\n", "", "SIP/2.0 481").await;
    raw.ask("INVITE", "Require: nonsense\r\n", &sdp(4_000, ""), "SIP/2.0 420").await;
    raw.ack("").await;
    raw.ask("DANCE", "", "", "SIP/2.0 501").await;
    raw.ask("BYE", "", "", "SIP/2.0 200").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_timers_of_the_caller_are_answered_and_followed() {
    let (endpoint, mut calls) = endpoint().await;
    let mut raw = raw(&endpoint, "timer").await;
    let wishes = "Supported: timer\r\nRequire: timer\r\nSession-Expires: 1800;refresher=uac\r\n";
    let (ok, _leg) = called(&mut raw, &mut calls, wishes, &sdp(4_000, "")).await;
    assert_eq!(header(&ok, "Session-Expires"), Some("1800;refresher=uac"));
    assert_eq!(header(&ok, "Require"), Some("timer"));
    // Refreshes, with and without a description; the task may change hands, and the interval.
    let short = "Supported: timer\r\nSession-Expires: 20;refresher=uac\r\n";
    let refused = raw.ask("UPDATE", short, "", "SIP/2.0 422").await;
    assert_eq!(header(&refused, "Min-SE"), Some("90"));
    let ok = raw.ask("UPDATE", &short.replace("20;", "120;"), "", "SIP/2.0 200").await;
    assert_eq!(header(&ok, "Session-Expires"), Some("120;refresher=uac"));
    let ours = "Supported: timer\r\nSession-Expires: 240;refresher=uas\r\n";
    let ok = raw.ask("INVITE", ours, &sdp(4_000, ""), "SIP/2.0 200").await;
    raw.ack("").await;
    assert_eq!(header(&ok, "Session-Expires"), Some("240;refresher=uas"));
    // Without the header there is no timer any more.
    let ok = raw.ask("UPDATE", "", "", "SIP/2.0 200").await;
    assert_eq!(header(&ok, "Session-Expires"), None);
    // An answer does not wait for the PRACK of what brings no description.
    let mut strict = self::raw(&endpoint, "100rel").await;
    let invite = strict.request("INVITE", "Require: 100rel\r\n", &sdp(4_002, ""));
    strict.send(&invite).await;
    let incoming = limited(calls.recv()).await.expect("a call");
    incoming.ringing();
    let mut leg = limited(incoming.accept()).await.expect("accepted");
    leg.attach().await.expect("attaches");
    let mut next = strict.expect("SIP/2.0").await;
    while next.starts_with("SIP/2.0 1") {
        next = strict.expect("SIP/2.0").await;
    }
    assert!(next.starts_with("SIP/2.0 200"), "{next}");
    strict.ack("").await;
    event(&mut leg, |e| *e == LegEvent::Connected).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_called_party_may_answer_reliably_and_ask_for_refreshes() {
    let (endpoint, _calls) = endpoint().await;
    let mut raw = raw(&endpoint, "uac").await;
    let request = DialRequest { to: raw.uri(), ..DialRequest::default() };
    let dialling = tokio::spawn({
        let endpoint = endpoint.clone();
        async move { endpoint.dial(request).await }
    });
    let invite = raw.next("INVITE").await;
    let supported = header(&invite, "Supported").expect("Supported");
    assert!(supported.contains("timer") && supported.contains("100rel"), "{invite}");
    // The answer comes early and reliably, and not again.
    let reliable = "Require: 100rel\r\nRSeq: 7\r\nContent-Type: application/sdp\r\n";
    raw.answer_with(&invite, "183 Session Progress", reliable, &sdp(4_000, "")).await;
    let prack = raw.expect("PRACK").await;
    assert!(header(&prack, "RAck").is_some_and(|rack| rack.starts_with("7 ") && rack.ends_with("INVITE")), "{prack}");
    raw.answer(&prack, "200 OK", "").await;
    raw.answer(&invite, "200 OK", "Require: timer\r\nSession-Expires: 4;refresher=uac\r\n").await;
    raw.expect("ACK").await;
    let mut leg = limited(dialling).await.expect("runs").expect("answered");
    leg.attach().await.expect("attaches");
    event(&mut leg, |e| *e == LegEvent::Connected).await;
    assert_eq!(leg.format().codec, Codec::Pcmu);
    // Our refresh: the same session, and the same interval.
    let refresh = raw.next("INVITE").await;
    assert_eq!(header(&refresh, "Session-Expires"), Some("4;refresher=uac"));
    assert!(body(&refresh).contains("m=audio "), "{refresh}");
    let theirs = "Require: timer\r\nSession-Expires: 3;refresher=uas\r\nContent-Type: application/sdp\r\n";
    raw.answer_with(&refresh, "200 OK", theirs, &sdp(4_000, "")).await;
    raw.expect("ACK").await;
    // They never refresh it: it ends before its time is over.
    let bye = raw.next("BYE").await;
    assert!(header(&bye, "Reason").is_some_and(|reason| reason.contains("session expired")), "{bye}");
    raw.answer(&bye, "200 OK", "").await;
    assert_eq!(event(&mut leg, |e| matches!(e, LegEvent::Closed(_))).await, LegEvent::Closed(LegEnd::Lost));
    within("the call to be forgotten", || endpoint.calls() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_turned_away_is_told_when_to_come_again() {
    let (endpoint, mut calls) = endpoint().await;
    let mut raw = raw(&endpoint, "later").await;
    let invite = raw.request("INVITE", "", &sdp(4_000, ""));
    raw.send(&invite).await;
    let incoming = limited(calls.recv()).await.expect("a call");
    incoming.ringing();
    let ringing = raw.expect("SIP/2.0 180").await;
    incoming.reject_for(Duration::from_millis(1_200), "no device is free");
    let refusal = raw.expect("SIP/2.0 503").await;
    assert_eq!(header(&refusal, "Retry-After"), Some("2"), "{refusal}");
    assert_eq!(header(&refusal, "To"), header(&ringing, "To"), "one dialog");
    assert!(header(&refusal, "Reason").is_some_and(|reason| reason.contains("no device is free")), "{refusal}");
    within("the call to be forgotten", || endpoint.calls() == 0).await;
    // Whoever is going down says so, too, before anybody rings.
    endpoint.drain();
    for method in ["INVITE", "OPTIONS"] {
        let mut other = self::raw(&endpoint, method).await;
        let refusal = other.ask(method, "", "", "SIP/2.0 503").await;
        assert_eq!(header(&refusal, "Retry-After"), Some("30"), "{refusal}");
    }
}

/// How much has arrived at the UDP port and was not read, in the kernel's own measure.
fn waiting_at(port: u16) -> u64 {
    let table = std::fs::read_to_string("/proc/net/udp").expect("Linux");
    let fields = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let mut at_port = fields.filter(|fields| fields[1].ends_with(&format!(":{port:04X}")));
    let queues = at_port.next().expect("somebody listens")[4];
    let (_, unread) = queues.split_once(':').expect("two queues");
    u64::from_str_radix(unread, 16).expect("a number")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_sent_before_the_answer_is_not_taken_for_the_called() {
    let (endpoint, _calls) = endpoint().await;
    let mut raw = raw(&endpoint, "early").await;
    let request = DialRequest { to: raw.uri(), ..DialRequest::default() };
    let dialling = tokio::spawn({
        let endpoint = endpoint.clone();
        async move { endpoint.dial(request).await }
    });
    let invite = raw.next("INVITE").await;
    let port = audio_port(&invite);
    let media = UdpSocket::bind("127.0.0.1:0").await.expect("a free port");
    let ours = sdp(media.local_addr().expect("bound").port(), "");
    let say = async |number: u8| {
        let mut packet = [0; 172];
        (packet[0], packet[3], packet[7]) = (0x80, number, number);
        media.send_to(&packet, ("127.0.0.1", port)).await.expect("sent");
    };
    // An announcement of a second, then the answer.
    let kind = "Content-Type: application/sdp\r\n";
    raw.answer_with(&invite, "183 Session Progress", kind, &ours).await;
    say(0).await;
    within("the first packet", || waiting_at(port) > 0).await;
    let each = waiting_at(port);
    for number in 1..50 {
        say(number).await;
    }
    // Nothing else orders what goes to two sockets.
    within("the announcement", || waiting_at(port) == 50 * each).await;
    raw.answer_with(&invite, "200 OK", kind, &ours).await;
    raw.expect("ACK").await;
    let mut leg = limited(dialling).await.expect("runs").expect("answered");
    leg.attach().await.expect("attaches");
    say(50).await;
    let first = event(&mut leg, |e| matches!(e, LegEvent::Rtp(_))).await;
    assert!(matches!(&first, LegEvent::Rtp(packet) if packet.sequence == 50), "{first:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_hold_leaves_what_was_agreed_before() {
    let (endpoint, mut calls) = endpoint().await;
    let (mut raw, mut leg) = call(&endpoint, &mut calls, "refused-hold", 4_000).await;
    let kind = "Content-Type: application/sdp\r\n";
    leg.hold(true).expect("asked");
    let held = raw.next("INVITE").await;
    assert!(body(&held).contains("a=sendonly"), "{held}");
    raw.answer_with(&held, "200 OK", kind, &sdp(4_000, "a=recvonly\r\n")).await;
    raw.expect("ACK").await;
    assert!(matches!(
        event(&mut leg, |e| matches!(e, LegEvent::HoldAnswered { .. })).await,
        LegEvent::HoldAnswered { outcome: Ok(()), .. }
    ));
    // The end of it is refused, and so is another wish, whether it was seen before that or not: both leave the hold.
    leg.hold(false).expect("asked");
    let ended = raw.next("INVITE").await;
    assert!(!body(&ended).contains("a=sendonly"), "{ended}");
    leg.hold(true).expect("asked");
    raw.answer(&ended, "488 Not Acceptable Here", "").await;
    raw.expect("ACK").await;
    let again = raw.next("INVITE").await;
    raw.answer(&again, "488 Not Acceptable Here", "").await;
    raw.expect("ACK").await;
    // Of the end of the hold there is an outcome only if the other wish did not overtake it.
    event(&mut leg, |e| matches!(e, LegEvent::HoldAnswered { hold: true, outcome: Err(_) })).await;
    let answer = raw.ask("INVITE", "", &sdp(4_000, ""), "SIP/2.0 200").await;
    assert!(body(&answer).contains("a=sendonly"), "{answer}");
    raw.ack("").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_without_a_dialog_are_answered() {
    let (endpoint, _calls) = endpoint().await;
    for (method, headers, content, status) in [
        ("REGISTER", "", "", "405"),
        ("SUBSCRIBE", "Event: presence\r\n", "", "405"),
        ("MESSAGE", "", "", "405"),
        ("BYE", "", "", "481"),
        ("INFO", "", "", "481"),
        ("DANCE", "", "", "501"),
        ("OPTIONS", "Require: nonsense\r\n", "", "420"),
        ("INVITE", "Require: timer, nonsense\r\n", "", "420"),
        ("INVITE", "Supported: timer\r\nSession-Expires: 60\r\n", "", "422"),
        ("INVITE", "Content-Type: text/plain\r\n", "hello", "415"),
        ("INVITE", "", "v=0\r\nnonsense\r\n", "400"),
        ("INVITE", "Content-Length: 9999\r\n", "", "400"),
    ] {
        let mut raw = raw(&endpoint, &format!("none-{method}-{status}")).await;
        raw.ask(method, headers, content, &format!("SIP/2.0 {status}")).await;
    }
    assert_eq!(endpoint.calls(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn challenge_is_sent_before_anything_is_kept() {
    let users: Vec<User> = vec![toml::from_str("username = \"a\"\npassword = \"b\"").expect("valid")];
    let (endpoint, _calls) = start(SipConfig { users, ..loopback() }).await;
    let mut raw = raw(&endpoint, "challenge").await;
    let response = raw.ask("INVITE", "", &sdp(4_000, ""), "SIP/2.0 401").await;
    raw.ack("").await;
    let challenge = header(&response, "WWW-Authenticate").expect("a challenge");
    assert!(challenge.starts_with("Digest ") && challenge.contains("realm=\"antiphon\""), "{challenge}");
    assert_eq!(endpoint.calls(), 0);
    // Who is not allowed in does not even hear that.
    let allow = vec!["192.0.2.0/24".parse().expect("a network")];
    let (closed, _calls) = start(SipConfig { allow, ..loopback() }).await;
    let mut raw = Raw::new(closed.local_udp().expect("bound"), "outside").await;
    let options = raw.request("OPTIONS", "", "");
    raw.send(&options).await;
    assert!(!raw.hears("SIP/2.0", Duration::from_millis(300)).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transfer_follows_the_peers_progress() {
    let (endpoint, mut calls) = endpoint().await;
    let (mut raw, mut leg) = call(&endpoint, &mut calls, "transfer", 4_000).await;
    for (progress, ends) in [("503 Service Unavailable", false), ("200 OK", true)] {
        let (result, ()) = limited(async {
            tokio::join!(transfer(&mut leg, "sip:other@127.0.0.1:9", false), async {
                let refer = raw.expect("REFER").await;
                assert_eq!(header(&refer, "Refer-To"), Some("<sip:other@127.0.0.1:9>"));
                raw.answer(&refer, "202 Accepted", "").await;
            })
        })
        .await;
        result.expect("accepted");
        let headers = "Event: refer\r\nSubscription-State: active\r\nContent-Type: message/sipfrag\r\n";
        for step in ["100 Trying", "180 Ringing", "180 Ringing", progress] {
            raw.ask("NOTIFY", headers, &format!("SIP/2.0 {step}"), "SIP/2.0 200").await;
        }
        // Each step once, then what came of it.
        let status = progress[..3].parse().expect("a status");
        for step in [100, 180, status] {
            let told =
                event(&mut leg, |e| matches!(e, LegEvent::TransferProgress(_) | LegEvent::TransferEnded(_))).await;
            assert_eq!(told, LegEvent::TransferProgress(step));
        }
        let ended = event(&mut leg, |e| matches!(e, LegEvent::TransferProgress(_) | LegEvent::TransferEnded(_))).await;
        assert!(matches!(&ended, LegEvent::TransferEnded(outcome) if outcome.is_ok() == ends), "{ended:?}");
        if ends {
            let bye = raw.expect("BYE").await;
            raw.answer(&bye, "200 OK", "").await;
            assert_eq!(event(&mut leg, |e| matches!(e, LegEvent::Closed(_))).await, LegEvent::Closed(LegEnd::Local));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attended_transfer_offers_the_consultation_to_be_replaced() {
    let (endpoint, mut calls) = endpoint().await;
    let (target, mut consulted) = start(loopback()).await;
    let (mut raw, mut leg) = call(&endpoint, &mut calls, "attended", 4_000).await;
    let to = format!("sip:expert@{}", target.local_udp().expect("bound"));
    let (result, (), mut consultation) = limited(async {
        tokio::join!(
            transfer(&mut leg, &to, true),
            async {
                let refer = raw.expect("REFER").await;
                let refer_to = header(&refer, "Refer-To").expect("Refer-To");
                assert!(refer_to.starts_with(&format!("<{to}?Replaces=")), "{refer_to}");
                assert!(refer_to.contains("%3Bto-tag%3D"), "{refer_to}");
                raw.answer(&refer, "202 Accepted", "").await;
            },
            async { consulted.recv().await.expect("the consultation").accept().await.expect("accepted") }
        )
    })
    .await;
    result.expect("accepted");
    consultation.attach().await.expect("attaches");
    let headers = "Event: refer\r\nSubscription-State: terminated\r\nContent-Type: message/sipfrag\r\n";
    raw.ask("NOTIFY", headers, "SIP/2.0 200 OK", "SIP/2.0 200").await;
    let bye = raw.expect("BYE").await;
    raw.answer(&bye, "200 OK", "").await;
    // Nobody replaced it, so the consultation ends with the transfer.
    event(&mut consultation, |e| matches!(e, LegEvent::Closed(_))).await;
    within("both calls to be forgotten", || endpoint.calls() == 0 && target.calls() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_media_is_dropped_and_the_call_goes_on() {
    let (endpoint, mut calls) = endpoint().await;
    let rtp = UdpSocket::bind("127.0.0.1:0").await.expect("binds");
    let port = rtp.local_addr().expect("bound").port();
    let (_raw, mut leg) = call(&endpoint, &mut calls, "bad-media", port).await;
    let target = format!("127.0.0.1:{}", leg.local_port().expect("bound"));
    let mut good = vec![0x80, 0, 0, 1, 0, 0, 0, 160, 0, 0, 0, 9];
    good.extend([0xff; 160]);
    // Too short, wrong version, extension and padding beyond the end, contributing sources that are not
    // there, an unknown payload type.
    let bad: [&[u8]; 8] = [
        b"",
        b"\x80",
        &[0x80; 11],
        &[0x00; 172],
        &[0x90, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0xff, 0xff],
        &[0xa0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 9, 0xff],
        &[0x8f, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 9],
        &[0x80, 77, 0, 1, 0, 0, 0, 0, 0, 0, 0, 9, 1, 2, 3],
    ];
    for datagram in bad {
        rtp.send_to(datagram, &target).await.expect("sends");
    }
    rtp.send_to(&good, &target).await.expect("sends");
    let LegEvent::Rtp(packet) = event(&mut leg, |e| matches!(e, LegEvent::Rtp(_))).await else { unreachable!() };
    assert_eq!((packet.sequence, packet.ssrc, packet.payload.len()), (1, 9, 160), "the first that is sound");
    // Noise on the control port is no report.
    let control = format!("127.0.0.1:{}", leg.local_port().expect("bound") + 1);
    rtp.send_to(&[0xff; 100], &control).await.expect("sends");
    rtp.send_to(&good, &target).await.expect("sends");
    event(&mut leg, |e| matches!(e, LegEvent::Rtp(_))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ringing_is_repeated_until_its_prack_where_the_caller_knows_how() {
    let (endpoint, mut calls) = endpoint().await;
    for (n, demand) in ["Supported: 100rel\r\n", "Require: 100rel\r\n"].into_iter().enumerate() {
        let mut raw = Raw::new(endpoint.local_udp().expect("bound"), &format!("100rel-{n}")).await;
        let invite = raw.request("INVITE", demand, &sdp(4_000, ""));
        raw.send(&invite).await;
        let call = limited(calls.recv()).await.expect("a call");
        call.ringing();
        let first = raw.expect("SIP/2.0 180").await;
        assert_eq!(header(&first, "Require"), Some("100rel"), "{first}");
        let number = header(&first, "RSeq").expect("a number").to_owned();
        let again = raw.expect("SIP/2.0 180").await;
        assert_eq!(header(&again, "RSeq"), Some(number.as_str()), "the same response again");
        let wrong = format!("RAck: {number} 9 INVITE\r\n");
        raw.ask("PRACK", &wrong, "", "SIP/2.0 481").await;
        let right = format!("RAck: {number} 1 INVITE\r\n");
        raw.ask("PRACK", &right, "", "SIP/2.0 200").await;
        raw.ask("PRACK", &right, "", "SIP/2.0 481").await;
        let accepted = tokio::spawn(call.accept());
        let ok = raw.expect("SIP/2.0 200").await;
        assert!(header(&ok, "CSeq").is_some_and(|cseq| cseq.ends_with("INVITE")), "{ok}");
        drop(limited(accepted).await.expect("no panic").expect("accepted"));
    }
    // Who offers nothing in its INVITE would have to get our offer with it: it gets none, and the call.
    let mut late = Raw::new(endpoint.local_udp().expect("bound"), "100rel-late").await;
    let invite = late.request("INVITE", "Require: 100rel\r\n", "");
    late.send(&invite).await;
    let call = limited(calls.recv()).await.expect("a call");
    call.ringing();
    let accepted = tokio::spawn(call.accept());
    late.expect("SIP/2.0 200").await;
    accepted.abort();
    // What nobody knows is still refused.
    let mut odd = Raw::new(endpoint.local_udp().expect("bound"), "100rel-odd").await;
    let refusal = odd.ask("INVITE", "Require: 100rel, nonsense\r\n", &sdp(4_000, ""), "SIP/2.0 420").await;
    assert_eq!(header(&refusal, "Unsupported"), Some("nonsense"), "{refusal}");
}
