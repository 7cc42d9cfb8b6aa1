//! Two endpoints on loopback, and what tests do with the legs between them.

pub(crate) mod raw;

use std::{future::Future, time::Duration};

use antiphon::{
    media::{
        leg::{LegEvent, MediaLeg, OutPacket},
        sip::SipLeg,
    },
    sip::{DialRequest, Endpoint, IncomingCall, RtpConfig, SipConfig},
};
use bytes::Bytes;
use tokio::{sync::mpsc, time::timeout};

/// Longer than anything here takes unless it is broken.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// Listeners on free loopback ports.
pub(crate) fn loopback() -> SipConfig {
    SipConfig { udp: Some(([127, 0, 0, 1], 0).into()), tcp: Some(([127, 0, 0, 1], 0).into()), ..SipConfig::default() }
}

/// An endpoint and the calls that reach it.
pub(crate) async fn start(config: SipConfig) -> (Endpoint, mpsc::Receiver<IncomingCall>) {
    let (sender, receiver) = mpsc::channel(16);
    let endpoint = Endpoint::start(config, RtpConfig::default(), sender).await.expect("starts");
    (endpoint, receiver)
}

/// The next call, picked up.
pub(crate) async fn picked_up(calls: &mut mpsc::Receiver<IncomingCall>) -> SipLeg {
    let call = limited(calls.recv()).await.expect("a call");
    let mut leg = limited(call.accept()).await.expect("accepted");
    leg.attach().await.expect("attaches");
    leg
}

/// Calls as `raw` does, with `headers` and `body`: the answer, and our leg of the call that is up.
pub(crate) async fn called(
    raw: &mut raw::Raw,
    calls: &mut mpsc::Receiver<IncomingCall>,
    headers: &str,
    body: &str,
) -> (String, SipLeg) {
    let invite = raw.request("INVITE", headers, body);
    raw.send(&invite).await;
    let mut leg = picked_up(calls).await;
    let ok = raw.expect("SIP/2.0 200").await;
    raw.ack("").await;
    event(&mut leg, |e| *e == LegEvent::Connected).await;
    (ok, leg)
}

/// A call that is up.
pub(crate) struct Pair {
    pub(crate) caller: SipLeg,
    pub(crate) called: SipLeg,
    pub(crate) at: (Endpoint, Endpoint),
    pub(crate) calls: mpsc::Receiver<IncomingCall>,
}

pub(crate) async fn pair() -> Pair {
    pair_with(loopback(), loopback(), "").await
}

/// A call from an endpoint of one configuration to one of another; `parameters` go into the URI.
pub(crate) async fn pair_with(caller: SipConfig, called: SipConfig, parameters: &str) -> Pair {
    let (a, _) = start(caller).await;
    let (b, mut calls) = start(called).await;
    let port = if parameters.contains("tcp") { b.local_tcp() } else { b.local_udp() }.expect("bound").port();
    let request = DialRequest { to: format!("sip:demo@127.0.0.1:{port}{parameters}"), ..DialRequest::default() };
    let answer = async {
        let call = calls.recv().await.expect("a call");
        call.ringing();
        call.accept().await.expect("accepted")
    };
    let (caller, called) = limited(async { tokio::join!(a.dial(request), answer) }).await;
    let (mut caller, mut called) = (caller.expect("answered"), called);
    caller.attach().await.expect("attaches");
    called.attach().await.expect("attaches");
    event(&mut caller, |e| *e == LegEvent::Connected).await;
    event(&mut called, |e| *e == LegEvent::Connected).await;
    Pair { caller, called, at: (a, b), calls }
}

pub(crate) async fn limited<F: Future>(future: F) -> F::Output {
    timeout(LIMIT, future).await.expect("within the limit")
}

/// The first event that fits, passing over others.
pub(crate) async fn event(leg: &mut SipLeg, fits: impl Fn(&LegEvent) -> bool) -> LegEvent {
    limited(async {
        loop {
            let event = leg.recv().await;
            if fits(&event) {
                return event;
            }
        }
    })
    .await
}

/// Asks for hold or its end, and waits for the peer's answer.
pub(crate) async fn hold(leg: &mut SipLeg, hold: bool) -> Result<(), String> {
    leg.hold(hold)?;
    match event(leg, |e| matches!(e, LegEvent::HoldAnswered { .. } | LegEvent::Closed(_))).await {
        LegEvent::HoldAnswered { outcome, .. } => outcome,
        _ => Err("closed".to_owned()),
    }
}

/// Asks for a transfer, and waits for the peer's answer.
pub(crate) async fn transfer(leg: &mut SipLeg, to: &str, attended: bool) -> Result<(), String> {
    leg.transfer(to, attended, None)?;
    match event(leg, |e| matches!(e, LegEvent::TransferAnswered(_))).await {
        LegEvent::TransferAnswered(outcome) => outcome,
        other => unreachable!("{other:?}"),
    }
}

/// A packet of the leg's own format with a payload that tells it apart.
pub(crate) fn packet(leg: &SipLeg, sequence: u16, payload: &'static [u8]) -> OutPacket {
    OutPacket {
        payload_type: leg.format().payload_type,
        marker: sequence == 0,
        sequence,
        timestamp: u32::from(sequence) * leg.format().codec.frame_ticks(),
        payload: Bytes::from_static(payload),
    }
}

/// Sends a packet every 20 ms until one of them is heard at the other end.
pub(crate) async fn speak_until_heard(from: &mut SipLeg, to: &mut SipLeg) {
    const PAYLOAD: &[u8] = b"known signal";
    let mut frames = tokio::time::interval(Duration::from_millis(20));
    let mut sequence = 0;
    limited(async {
        loop {
            tokio::select! {
                _ = frames.tick() => {
                    from.send(packet(from, sequence, PAYLOAD)).await.expect("the leg is up");
                    sequence += 1;
                }
                event = to.recv() => {
                    if matches!(&event, LegEvent::Rtp(packet) if packet.payload == PAYLOAD) {
                        return;
                    }
                }
            }
        }
    })
    .await;
}

/// Waits for a condition that another task brings about.
pub(crate) async fn within(what: &str, condition: impl Fn() -> bool) {
    let polled = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(timeout(LIMIT, polled).await.is_ok(), "waited in vain for {what}");
}
