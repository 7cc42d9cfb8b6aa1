//! Calls that are answered and never acknowledged: few, listed, punished, and nothing begins on them.

use std::time::Duration;

use crate::support::{
    limited, loopback,
    raw::{Raw, sdp},
    start, within,
};
use antiphon::{
    media::leg::MediaLeg,
    media::sip::SipLeg,
    sip::{Endpoint, IncomingCall, SipConfig},
};
use tokio::{sync::mpsc, time::timeout};

/// An INVITE that is answered; its ACK is up to the test.
async fn answered(endpoint: &Endpoint, calls: &mut mpsc::Receiver<IncomingCall>, id: &str) -> (Raw, SipLeg) {
    let mut raw = Raw::new(endpoint.local_udp().expect("bound"), id).await;
    let invite = raw.request("INVITE", "", &sdp(4_000, ""));
    raw.send(&invite).await;
    let leg = limited(limited(calls.recv()).await.expect("a call").accept()).await.expect("accepted");
    raw.expect("SIP/2.0 200").await;
    (raw, leg)
}

async fn refused(endpoint: &Endpoint, id: &str) {
    let mut raw = Raw::new(endpoint.local_udp().expect("bound"), id).await;
    raw.ask("INVITE", "", &sdp(4_000, ""), "SIP/2.0 503").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_source_has_few_half_open_calls_and_they_are_listed() {
    let (endpoint, mut calls) = start(SipConfig { half_open_per_source: 2, ..loopback() }).await;
    let (mut first, mut leg) = answered(&endpoint, &mut calls, "first").await;
    let (_second, _unheard) = answered(&endpoint, &mut calls, "second").await;
    let listed: Vec<_> = endpoint.half_open().into_iter().map(|call| call.call_id).collect();
    assert_eq!(listed, ["first", "second"]);
    refused(&endpoint, "third").await;
    // The ACK makes room.
    first.ack("").await;
    limited(leg.acknowledged()).await.expect("the ACK is here");
    within("one to be acknowledged", || endpoint.half_open().len() == 1).await;
    let (_fourth, _leg) = answered(&endpoint, &mut calls, "fourth").await;
    leg.hang_up().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_never_acknowledges_is_refused_and_holds_nothing() {
    let (endpoint, mut calls) = start(loopback()).await;
    let mut half_open = Vec::new();
    for n in 0..12 {
        half_open.push(answered(&endpoint, &mut calls, &format!("never-{n}")).await);
    }
    // With and without a description: the latter waits for the ACK to bring one.
    let mut late = Raw::new(endpoint.local_udp().expect("bound"), "late").await;
    let invite = late.request("INVITE", "", "");
    late.send(&invite).await;
    let accepting = tokio::spawn(limited(calls.recv()).await.expect("a call").accept());
    late.expect("SIP/2.0 200").await;
    assert_eq!((endpoint.calls(), endpoint.half_open().len()), (13, 13));
    // 64 * T1 (RFC 3261 section 13.3.1.4), with time to spare for a busy machine.
    let forgotten = async {
        while endpoint.calls() > 0 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    assert!(timeout(Duration::from_secs(60), forgotten).await.is_ok(), "{} are left", endpoint.calls());
    assert!(limited(accepting).await.expect("runs").is_err());
    assert!(endpoint.half_open().is_empty());
    refused(&endpoint, "again").await;
}
