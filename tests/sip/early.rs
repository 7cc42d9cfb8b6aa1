//! Calls that ring: what the other side asks, changes and ends before the answer, and calls that take their place.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use crate::counted::counted;
use crate::support::{
    event, limited, loopback, packet,
    raw::{Raw, audio_port, body, header, sdp},
    start, within,
};
use antiphon::{
    media::{
        leg::{LegEnd, LegEvent, MediaLeg},
        sip::SipLeg,
    },
    sip::{DialError, DialRequest, Endpoint, IncomingCall, SipConfig},
};
use tokio::{net::UdpSocket, task::JoinHandle};

const SDP: &str = "Content-Type: application/sdp\r\n";
const DIGIT: &str = "Content-Type: application/dtmf-relay\r\n";

/// A caller that acknowledges the answer and asks at once for something else: the network may turn the two around.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_overtook_the_ack_waits_for_it() {
    let (endpoint, mut calls) = start(loopback()).await;
    let mut raw = Raw::new(endpoint.local_udp().expect("bound"), "overtakes").await;
    let invite = raw.request("INVITE", "", &sdp(4_000, ""));
    raw.send(&invite).await;
    let call = limited(calls.recv()).await.expect("a call");
    let accepting = tokio::spawn(call.accept());
    raw.expect("SIP/2.0 200").await;
    let ack = raw.request("ACK", "", "");
    let again = raw.request("INVITE", "", &sdp(4_000, "a=sendonly\r\n"));
    raw.send(&again).await;
    tokio::time::sleep(Duration::from_millis(40)).await;
    raw.send(&ack).await;
    let mut leg = limited(accepting).await.expect("no panic").expect("accepted");
    leg.attach().await.expect("attaches");
    // Either final answer of the second one.
    let answer = loop {
        let answer = raw.expect("SIP/2.0 ").await;
        if header(&answer, "CSeq").is_some_and(|number| number.starts_with("2 ")) && !answer.starts_with("SIP/2.0 1") {
            break answer;
        }
    };
    assert!(answer.starts_with("SIP/2.0 200") && answer.contains("a=recvonly"), "{answer}");
    raw.ack("").await;
    assert_eq!(event(&mut leg, |e| matches!(e, LegEvent::Held(_))).await, LegEvent::Held(true));
    leg.hang_up().await;
    let bye = raw.next("BYE").await;
    raw.answer(&bye, "200 OK", "").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_is_answered_while_it_rings() {
    // Counting begins here.
    counted("antiphon_sip_transactions ");
    let (endpoint, mut calls) = start(loopback()).await;
    let mut raw = Raw::new(endpoint.local_udp().expect("bound"), "rings").await;
    let invite = raw.request("INVITE", "", &sdp(4_000, ""));
    raw.send(&invite).await;
    let call = limited(calls.recv()).await.expect("a call");
    call.ringing();
    raw.expect("SIP/2.0 180").await;
    assert!(counted("antiphon_sip_transactions ") >= 1.0, "its INVITE is not answered yet");
    let options = raw.ask("OPTIONS", "", "", "SIP/2.0 200").await;
    assert!(header(&options, "Allow").expect("Allow").contains("UPDATE"), "{options}");
    raw.ask("INFO", "", "", "SIP/2.0 200").await;
    raw.ask("INFO", DIGIT, "Signal=7\r\n", "SIP/2.0 200").await;
    raw.ask("INFO", "Content-Type: text/plain\r\n", "hello", "SIP/2.0 415").await;
    raw.ask("PRACK", "RAck: 1 1 INVITE\r\n", "", "SIP/2.0 481").await;
    raw.ask("UPDATE", "Require: nonsense\r\n", "", "SIP/2.0 420").await;
    // Its own offer is not answered yet (RFC 3311 section 5.2).
    let refused = raw.ask("UPDATE", "", &sdp(4_002, ""), "SIP/2.0 500").await;
    let wait: u64 = header(&refused, "Retry-After").expect("when to come again").parse().expect("seconds");
    assert!(wait <= 10, "{refused}");
    // It has moved: that is where requests go from then on.
    let update = raw.request("UPDATE", "", "").replace("Contact: <sip:raw@", "Contact: <sip:moved@");
    raw.send(&update).await;
    let ok = raw.expect("SIP/2.0 200").await;
    assert!(header(&ok, "Contact").is_some(), "{ok}");
    // Nobody may take the place of a call that rings here (RFC 3891 section 3).
    let mut other = Raw::new(raw.target, "other").await;
    let replaces = format!("Replaces: rings;to-tag={};from-tag=raw\r\n", raw.remote_tag);
    other.ask("INVITE", &replaces, &sdp(4_004, ""), "SIP/2.0 481").await;
    other.ack("").await;

    // The INVITE's own number is due in the ACK, which is the first that came.
    let accepting = tokio::spawn(call.accept());
    let ok = raw.expect("SIP/2.0 200").await;
    let number = header(&ok, "CSeq").expect("CSeq").split(' ').next().expect("a number").to_owned();
    let ack = raw.request("ACK", "", "");
    let own = header(&ack, "CSeq").expect("CSeq").to_owned();
    raw.send(&ack.replace(&format!("CSeq: {own}"), &format!("CSeq: {number} ACK"))).await;
    let mut leg = limited(accepting).await.expect("no panic").expect("accepted");
    leg.attach().await.expect("attaches");
    assert_eq!(event(&mut leg, |e| matches!(e, LegEvent::Digit(_))).await, LegEvent::Digit('7'));
    event(&mut leg, |e| *e == LegEvent::Connected).await;
    leg.hang_up().await;
    let bye = raw.next("BYE").await;
    assert!(bye.starts_with("BYE sip:moved@"), "{bye}");
    raw.answer(&bye, "200 OK", "").await;
    within("the call to be forgotten", || endpoint.calls() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_may_end_by_bye_what_rings() {
    let (endpoint, mut calls) = start(loopback()).await;
    let mut raw = Raw::new(endpoint.local_udp().expect("bound"), "rings").await;
    let invite = raw.request("INVITE", "", &sdp(4_000, ""));
    raw.send(&invite).await;
    let call = limited(calls.recv()).await.expect("a call");
    call.ringing();
    raw.expect("SIP/2.0 180").await;
    let bye = raw.request("BYE", "", "");
    raw.send(&bye).await;
    // Both are answered (RFC 3261 section 15.1.2), in whichever order.
    let (mut ended, mut over) = (false, false);
    while !(ended && over) {
        let response = raw.expect("SIP/2.0 ").await;
        ended |= response.starts_with("SIP/2.0 200") && header(&response, "CSeq").is_some_and(|c| c.ends_with("BYE"));
        over |= response.starts_with("SIP/2.0 487");
    }
    limited(call.cancelled()).await;
    within("the call to be forgotten", || endpoint.calls() == 0).await;
}

/// An endpoint with one trunk, and that trunk's host.
async fn trunk() -> (Endpoint, Raw) {
    let mut host = Raw::new(([127, 0, 0, 1], 9).into(), "host").await;
    let at = host.uri().split_once('@').expect("a host").1.to_owned();
    let trunk = format!("name = \"t\"\nhost = \"{at}\"\nprefixes = [\"*\"]");
    let trunk = vec![toml::from_str(&trunk).expect("valid")];
    let (endpoint, _calls) = start(SipConfig { trunk, ..loopback() }).await;
    host.target = endpoint.local_udp().expect("bound");
    (endpoint, host)
}

/// Calls, and says when it rings.
fn dial(endpoint: &Endpoint) -> (JoinHandle<Result<SipLeg, DialError>>, Arc<AtomicBool>) {
    let (endpoint, rings) = (endpoint.clone(), Arc::new(AtomicBool::new(false)));
    let told = rings.clone();
    let call = async move { endpoint.dial_watched(request(), &|_| told.store(true, Ordering::Relaxed)).await };
    (tokio::spawn(call), rings)
}

fn request() -> DialRequest {
    DialRequest { to: "+49301234".to_owned(), ..DialRequest::default() }
}

fn tag(value: &str) -> &str {
    value.split(";tag=").nth(1).expect("a tag")
}

/// Sends a request of the called side in the dialog that its answers to `invite` have made, and returns the final response.
async fn ask_back(host: &mut Raw, invite: &str, (method, headers, body): (&str, &str, &str), wanted: &str) -> String {
    host.remote_tag = tag(header(invite, "From").expect("From")).to_owned();
    let call_id = header(invite, "Call-ID").expect("Call-ID");
    let request = host.request(method, headers, body);
    host.send(&request.replace("Call-ID: host\r\n", &format!("Call-ID: {call_id}\r\n"))).await;
    host.expect(wanted).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_called_side_is_answered_while_it_rings_and_may_change_what_is_agreed() {
    let (endpoint, mut host) = trunk().await;
    let (sender, early) = tokio::sync::oneshot::channel();
    let dialling = endpoint.clone();
    let call = tokio::spawn(async move { dialling.dial_early(request(), &|_| (), sender).await });
    let invite = host.next("INVITE").await;
    host.answer(&invite, "180 Ringing", "").await;
    // Until the 180 is known nothing rings.
    let options = limited(async {
        loop {
            let answer = ask_back(&mut host, &invite, ("OPTIONS", "", ""), "SIP/2.0 ").await;
            if !answer.starts_with("SIP/2.0 481") {
                return answer;
            }
        }
    })
    .await;
    assert!(options.starts_with("SIP/2.0 200") && header(&options, "Allow").is_some(), "{options}");
    ask_back(&mut host, &invite, ("INFO", "", ""), "SIP/2.0 200").await;
    let ok = ask_back(&mut host, &invite, ("UPDATE", "", ""), "SIP/2.0 200").await;
    assert!(header(&ok, "Contact").is_some(), "{ok}");
    // Our offer has no answer yet.
    ask_back(&mut host, &invite, ("UPDATE", "", &sdp(4_002, "")), "SIP/2.0 491").await;
    ask_back(&mut host, &invite, ("UPDATE", "Require: nonsense\r\n", ""), "SIP/2.0 420").await;
    ask_back(&mut host, &invite, ("INVITE", "", &sdp(4_002, "")), "SIP/2.0 491").await;

    // A reliable response brings it, and what follows it is another exchange.
    let reliable = format!("Require: 100rel\r\nRSeq: 1\r\n{SDP}");
    host.answer_with(&invite, "183 Session Progress", &reliable, &sdp(4_000, "")).await;
    let prack = host.expect("PRACK").await;
    host.answer(&prack, "200 OK", "").await;
    let mut leg = limited(early).await.expect("its leg");
    assert_eq!(leg.remote().map(|remote| remote.port()), Some(4_000));
    leg.attach().await.expect("attaches");
    let ok = ask_back(&mut host, &invite, ("UPDATE", "", &sdp(4_002, "")), "SIP/2.0 200").await;
    assert_eq!(Some(audio_port(&ok)), leg.local_port(), "{}", body(&ok));
    ask_back(&mut host, &invite, ("INFO", DIGIT, "Signal=5\r\n"), "SIP/2.0 200").await;
    event(&mut leg, |e| *e == LegEvent::Digit('5')).await;
    assert_eq!(leg.remote().map(|remote| remote.port()), Some(4_002));

    // The 200 repeats the first answer, which does not count any more.
    host.answer_with(&invite, "200 OK", SDP, &sdp(4_000, "")).await;
    host.expect("ACK").await;
    assert!(limited(call).await.expect("runs").expect("answered").is_none(), "its leg was there before");
    event(&mut leg, |e| *e == LegEvent::Connected).await;
    assert_eq!(leg.remote().map(|remote| remote.port()), Some(4_002));
    leg.hang_up().await;
    let bye = host.next("BYE").await;
    host.answer(&bye, "200 OK", "").await;
    within("the call to be forgotten", || endpoint.calls() == 0).await;
}

/// The INVITE of a telephone that picks up what rings at `host`; `more` goes into Replaces.
async fn pick_up(endpoint: &Endpoint, invite: &str, more: &str, wanted: &str) -> (Raw, String) {
    let call_id = header(invite, "Call-ID").expect("Call-ID");
    let ours = tag(header(invite, "From").expect("From"));
    let name = format!("pick-up{}", more.replace([';', '='], "-"));
    let mut other = Raw::new(endpoint.local_udp().expect("bound"), &name).await;
    let headers = format!("Require: replaces\r\nReplaces: {call_id};to-tag={ours};{more}\r\n");
    let answer = other.ask("INVITE", &headers, &sdp(4_010, ""), wanted).await;
    other.ack("").await;
    (other, answer)
}

/// The called side is told that it need not ring any more.
async fn cancelled(host: &mut Raw, invite: &str) {
    let cancel = host.expect("CANCEL").await;
    host.answer(&cancel, "200 OK", "").await;
    host.answer(invite, "487 Request Terminated", "").await;
    host.expect("ACK").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_rings_elsewhere_is_picked_up() {
    let (endpoint, mut host) = trunk().await;
    let (call, rings) = dial(&endpoint);
    let invite = host.next("INVITE").await;
    host.answer(&invite, "180 Ringing", "").await;
    within("it to ring", || rings.load(Ordering::Relaxed)).await;
    pick_up(&endpoint, &invite, "from-tag=guessed", "SIP/2.0 481").await;
    // What is meant for calls that ring only is as good.
    let (mut other, ok) = pick_up(&endpoint, &invite, "from-tag=raw;early-only", "SIP/2.0 200").await;
    let mut leg = limited(call).await.expect("runs").expect("answered");
    assert_eq!(leg.local_port(), Some(audio_port(&ok)));
    cancelled(&mut host, &invite).await;
    leg.attach().await.expect("attaches");
    event(&mut leg, |e| *e == LegEvent::Connected).await;
    other.ask("BYE", "", "", "SIP/2.0 200").await;
    assert_eq!(event(&mut leg, |e| matches!(e, LegEvent::Closed(_))).await, LegEvent::Closed(LegEnd::Remote));
    within("both calls to be forgotten", || endpoint.calls() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_sounds_elsewhere_is_picked_up() {
    let (endpoint, mut host) = trunk().await;
    let (sender, early) = tokio::sync::oneshot::channel();
    let dialling = endpoint.clone();
    let call = tokio::spawn(async move { dialling.dial_early(request(), &|_| (), sender).await });
    let invite = host.next("INVITE").await;
    host.answer_with(&invite, "183 Session Progress", SDP, &sdp(4_000, "")).await;
    let mut leg = limited(early).await.expect("its leg");
    leg.attach().await.expect("attaches");
    let (mut other, ok) = pick_up(&endpoint, &invite, "from-tag=raw", "SIP/2.0 200").await;
    assert!(limited(call).await.expect("runs").expect("answered").is_none(), "its leg was there before");
    cancelled(&mut host, &invite).await;
    event(&mut leg, |e| matches!(e, LegEvent::Moved(_))).await;
    event(&mut leg, |e| *e == LegEvent::Connected).await;
    assert_eq!(leg.local_port(), Some(audio_port(&ok)));
    leg.hang_up().await;
    let bye = other.next("BYE").await;
    other.answer(&bye, "200 OK", "").await;
    within("both calls to be forgotten", || endpoint.calls() == 0).await;
    assert!(!host.hears("BYE", Duration::from_millis(50)).await, "it was never answered there");
}

/// Invites with sound wanted before the answer; gives the 183, and where its own media is heard.
async fn sounding(
    raw: &mut Raw,
    calls: &mut tokio::sync::mpsc::Receiver<IncomingCall>,
    headers: &str,
) -> (IncomingCall, SipLeg, String, UdpSocket) {
    let media = UdpSocket::bind("127.0.0.1:0").await.expect("binds");
    let invite = raw.request("INVITE", headers, &sdp(media.local_addr().expect("bound").port(), ""));
    raw.send(&invite).await;
    let call = limited(calls.recv()).await.expect("a call");
    call.ringing();
    let rings = raw.expect("SIP/2.0 180").await;
    if headers.contains("100rel") {
        let number = header(&rings, "RSeq").expect("reliable").to_owned();
        raw.ask("PRACK", &format!("RAck: {number} 1 INVITE\r\n"), "", "SIP/2.0 200").await;
    }
    let mut leg = limited(call.sound(&[("X-Antiphon-Call", "7")])).await.expect("a leg");
    let progress = raw.expect("SIP/2.0 183").await;
    assert_eq!(header(&progress, "X-Antiphon-Call"), Some("7"), "{progress}");
    leg.attach().await.expect("attaches");
    assert_eq!(limited(leg.recv()).await, LegEvent::Early { sends: true, speaks: true });
    leg.send(packet(&leg, 0, b"hello")).await.expect("sends");
    let mut buffer = [0; 2_048];
    let (length, from) = limited(media.recv_from(&mut buffer)).await.expect("heard before the answer");
    assert!(buffer[..length].ends_with(b"hello"));
    assert_eq!(from.port(), audio_port(&progress));
    (call, leg, progress, media)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_hear_us_before_the_answer_which_waits_for_their_prack() {
    let (endpoint, mut calls) = start(loopback()).await;
    let mut raw = Raw::new(endpoint.local_udp().expect("bound"), "sound").await;
    let (call, mut leg, progress, _media) = sounding(&mut raw, &mut calls, "Supported: 100rel\r\n").await;
    assert_eq!(header(&progress, "Require"), Some("100rel"));
    // It is repeated until it is acknowledged, description and all, and nothing is answered before (RFC 3262 section 3).
    let again = raw.expect("SIP/2.0 183").await;
    assert_eq!((header(&again, "RSeq"), body(&again)), (header(&progress, "RSeq"), body(&progress)));
    let answering = tokio::spawn(call.answer(&[]));
    assert!(!raw.hears("SIP/2.0 200", Duration::from_millis(300)).await);
    leg.transfer("sip:x@y", false, None).expect("asked");
    assert!(matches!(
        event(&mut leg, |e| matches!(e, LegEvent::TransferAnswered(_))).await,
        LegEvent::TransferAnswered(Err(_))
    ));
    let number = header(&progress, "RSeq").expect("RSeq").to_owned();
    let prack = raw.request("PRACK", &format!("RAck: {number} 1 INVITE\r\n"), "");
    raw.send(&prack).await;
    let mut answer = String::new();
    while !header(&answer, "CSeq").is_some_and(|number| number.ends_with("INVITE")) {
        answer = raw.expect("SIP/2.0 200").await;
    }
    assert_eq!(body(&answer), body(&progress), "the answer of before");
    limited(answering).await.expect("runs").expect("answered");
    let ack = raw.request("ACK", "", "");
    let own = header(&ack, "CSeq").expect("CSeq").to_owned();
    raw.send(&ack.replace(&format!("CSeq: {own}"), "CSeq: 1 ACK")).await;
    event(&mut leg, |e| *e == LegEvent::Connected).await;
    leg.hang_up().await;
    let bye = raw.next("BYE").await;
    raw.answer(&bye, "200 OK", "").await;
    within("the call to be forgotten", || endpoint.calls() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sound_before_the_answer_ends_with_either_side() {
    let (endpoint, mut calls) = start(loopback()).await;
    let at = endpoint.local_udp().expect("bound");
    // Who knows no 100rel gets an ordinary 183; CANCEL ends the leg.
    let mut raw = Raw::new(at, "cancelled").await;
    let (call, mut leg, progress, _media) = sounding(&mut raw, &mut calls, "").await;
    assert_eq!(header(&progress, "Require"), None);
    let cancel = raw.request("CANCEL", "", "").replace(&format!(";tag={}", raw.remote_tag), "");
    raw.send(&cancel).await;
    assert_eq!(event(&mut leg, |e| matches!(e, LegEvent::Closed(_))).await, LegEvent::Closed(LegEnd::Remote));
    assert!(limited(call.answer(&[])).await.is_err());
    within("the call to be forgotten", || endpoint.calls() == 0).await;
    // Where we hang up it is declined.
    let mut raw = Raw::new(at, "declined").await;
    let (call, mut leg, ..) = sounding(&mut raw, &mut calls, "").await;
    leg.hang_up().await;
    raw.expect("SIP/2.0 480").await;
    drop(call);
    within("the call to be forgotten", || endpoint.calls() == 0).await;
    // An INVITE without an offer has nowhere to send to: it can be answered still.
    let mut raw = Raw::new(at, "no-offer").await;
    let invite = raw.request("INVITE", "", "");
    raw.send(&invite).await;
    let call = limited(calls.recv()).await.expect("a call");
    assert!(limited(call.sound(&[])).await.is_err());
    let answering = tokio::spawn(call.accept());
    raw.expect("SIP/2.0 200").await;
    raw.ack(&sdp(4_000, "")).await;
    limited(answering).await.expect("runs").expect("answered").hang_up().await;
    raw.next("BYE").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn digits_go_by_info_to_a_trunk_that_wants_them_so() {
    let mut host = Raw::new(([127, 0, 0, 1], 9).into(), "host").await;
    let at = host.uri().split_once('@').expect("a host").1.to_owned();
    let trunk = format!("name = \"t\"\nhost = \"{at}\"\nprefixes = [\"*\"]\ndtmf = \"info\"");
    let trunk = vec![toml::from_str(&trunk).expect("valid")];
    let (endpoint, _calls) = start(SipConfig { trunk, ..loopback() }).await;
    host.target = endpoint.local_udp().expect("bound");
    let (call, _) = dial(&endpoint);
    let invite = host.next("INVITE").await;
    host.answer_with(&invite, "200 OK", SDP, &sdp(4_000, "")).await;
    host.expect("ACK").await;
    let mut leg = limited(call).await.expect("runs").expect("answered");
    leg.attach().await.expect("attaches");
    assert!(leg.signals_digits());
    leg.dial("1w#").expect("asked");
    leg.dial("d").expect("asked");
    // One after the other; one that is refused keeps the others from nothing.
    for (signal, status) in
        [("Signal=1\r\n", "200 OK"), ("Signal=#\r\n", "415 Unsupported Media Type"), ("Signal=D\r\n", "200 OK")]
    {
        let info = host.next("INFO").await;
        assert_eq!(header(&info, "Content-Type"), Some("application/dtmf-relay"));
        assert!(body(&info).starts_with(signal), "{info}");
        host.answer(&info, status, "").await;
    }
    leg.hang_up().await;
    let bye = host.next("BYE").await;
    host.answer(&bye, "200 OK", "").await;
    within("the call to be forgotten", || endpoint.calls() == 0).await;
}
