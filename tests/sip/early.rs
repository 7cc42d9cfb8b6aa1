//! Calls that ring: what the other side asks, changes and ends before the answer, and calls that take their place.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use crate::support::{
    event, limited, loopback,
    raw::{Raw, audio_port, body, header, sdp},
    start, within,
};
use antiphon::{
    media::{
        leg::{LegEnd, LegEvent, MediaLeg},
        sip::SipLeg,
    },
    sip::{DialError, DialRequest, Endpoint, SipConfig},
};
use tokio::task::JoinHandle;

const SDP: &str = "Content-Type: application/sdp\r\n";
const DIGIT: &str = "Content-Type: application/dtmf-relay\r\n";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_is_answered_while_it_rings() {
    let (endpoint, mut calls) = start(loopback()).await;
    let mut raw = Raw::new(endpoint.local_udp().expect("bound"), "rings").await;
    let invite = raw.request("INVITE", "", &sdp(4_000, ""));
    raw.send(&invite).await;
    let call = limited(calls.recv()).await.expect("a call");
    call.ringing();
    raw.expect("SIP/2.0 180").await;
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
