//! A caller is joined with a human who is called for them: who hears whom, by what arrives at sockets.

use std::time::Duration;

use antiphon::call::{BridgeMode, BridgeRequest, BridgeState, CallEvent, CallHandle, CallId, Dialling, EndReason};
use antiphon_loadgen::call::{Call, End, now};
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::heard::Clip;
use antiphon_loadgen::sip;
use serde_json::{Value, json};
use tokio::sync::broadcast;

use super::counted::{Growth, counted};
use super::raw::Raw;
use super::support::{PATIENCE, Rig, SENTENCE, hear_turn};

/// What the human's telephone sends: 1 kHz.
const HUMAN: f32 = 1_000.0;
/// What the caller's says: 600 Hz.
const CALLER: f32 = 600.0;

/// How much of `pcm`, 0 to 1, is a tone of `pitch`; 0 of silence.
fn share(pcm: &[f32], rate: u32, pitch: f32) -> f32 {
    let (mut re, mut im, mut all) = (0.0_f64, 0.0_f64, 0.0_f64);
    for (n, sample) in pcm.iter().enumerate() {
        let turn = std::f64::consts::TAU * f64::from(pitch) * n as f64 / f64::from(rate);
        let sample = f64::from(*sample);
        re += sample * turn.cos();
        im += sample * turn.sin();
        all += sample * sample;
    }
    let count = pcm.len().max(1) as f64;
    // -50 dB of full scale is silence.
    if all / count < 1e-5 { 0.0 } else { (2.0 * (re * re + im * im) / count / all) as f32 }
}

/// Whether nothing in it is louder than the noise of a codec.
fn is_silent(pcm: &[f32]) -> bool {
    pcm.iter().all(|sample| sample.abs() < 0.01)
}

/// Waits until the last 200 ms that `call` heard are `wanted`.
async fn hears(call: &Call, what: &str, wanted: impl Fn(&[f32], u32) -> bool) {
    let heard = async {
        loop {
            let until = now();
            let from = until.checked_sub(Duration::from_millis(400)).expect("later");
            // What arrived in the latest moments may not be whole yet.
            let Clip { pcm, rate } = call.ear().heard().clip_between(from, until - Duration::from_millis(200));
            if wanted(&pcm, rate) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, heard).await.unwrap_or_else(|_| panic!("nobody ever heard {what}"));
}

/// The next news of a bridge of `call`.
async fn news(events: &mut broadcast::Receiver<(CallId, CallEvent)>, call: &CallHandle) -> BridgeState {
    loop {
        let event = tokio::time::timeout(PATIENCE, events.recv()).await.expect("there is news").expect("not behind");
        if let (id, CallEvent::Bridge { state, .. }) = event
            && id == *call.id()
        {
            return state;
        }
    }
}

fn tone(pitch: f32, seconds: usize) -> Clip {
    let sample = |n: usize| 0.3 * (n as f32 * pitch * std::f32::consts::TAU / 24_000.0).sin();
    Clip { rate: 24_000, pcm: (0..24_000 * seconds).map(sample).collect() }
}

async fn bridge(rig: &Rig, call: &CallHandle, body: Value) -> (u16, Value) {
    rig.post(&format!("/v1/calls/{}/bridge", call.id()), body).await
}

/// A human, joined with `call`; the id of their call.
pub(crate) async fn joined(rig: &Rig, call: &CallHandle, mode: &str) -> (Call, String) {
    let mut events = rig.app.gateway().calls.events();
    let telephone = sip::Caller::bind(sip::Config { codecs: vec![Codec::Pcma], ..sip::Config::default() });
    let telephone = telephone.await.expect("free ports");
    let uri = telephone.uri();
    let answering = tokio::spawn(telephone.answer(PATIENCE));
    let (status, placed) = bridge(rig, call, json!({ "to": uri, "mode": mode })).await;
    assert_eq!(status, 201, "{placed}");
    let human = answering.await.expect("no panic").expect("answered");
    assert_eq!(news(&mut events, call).await, BridgeState::Dialling(Dialling::Trying));
    loop {
        match news(&mut events, call).await {
            BridgeState::Dialling(state) if !state.is_over() => {}
            BridgeState::Connected(_) => break,
            other => panic!("{other:?}"),
        }
    }
    (human, placed["id"].as_str().expect("an id").to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_speaks_with_a_human_the_agent_whispers_and_comes_back() {
    let rig = Rig::start().await;
    let caller = rig.telephone("silent", Codec::Pcmu).await;
    let call = rig.handle(&caller).await;
    let mut events = rig.app.gateway().calls.events();
    let counts = Growth::of(&["antiphon_bridges_total{outcome=\"connected\"}"]);
    let (human, id) = joined(&rig, &call, "leave").await;
    counts.comes().await;
    assert!(counted("antiphon_bridges ") >= 1.0, "it is there now");
    human.say(&tone(HUMAN, 60)).await.expect("they speak");
    hears(&caller, "the human", |pcm, rate| share(pcm, rate, HUMAN) > 0.8).await;
    caller.say(&tone(CALLER, 60)).await.expect("they speak");
    hears(&human, "the caller", |pcm, rate| share(pcm, rate, CALLER) > 0.8).await;
    caller.stop_speaking().await.expect("they stop");
    caller.press("5").await.expect("pressed");
    let pressed = human.ear().wait(PATIENCE, |heard| heard.digits.iter().any(|key| key.digit == '5').then_some(()));
    pressed.await.expect("the key gets to the human");
    // One bridge at a time, and who has left is not heard.
    let (status, error) = bridge(&rig, &call, json!({ "to": "sip:somebody@127.0.0.1" })).await;
    assert_eq!((status, &error["error"]["code"]), (409, &json!("call_bridged")), "{error}");
    let (status, error) = rig.post(&format!("/v1/calls/{}/turns", call.id()), json!({ "text": "Hello." })).await;
    assert_eq!((status, &error["error"]["code"]), (409, &json!("call_bridged")), "{error}");
    let (_, shown) = rig.get(&format!("/v1/calls/{}", call.id())).await;
    assert_eq!((&shown["bridgedWith"], &shown["bridgeMode"]), (&json!(id), &json!("leave")));
    // A whisper is heard by the human, and the caller hears nothing of it.
    human.stop_speaking().await.expect("they stop");
    hears(&human, "the end of what the caller says", |pcm, _| !pcm.is_empty() && is_silent(pcm)).await;
    hears(&caller, "the end of what the human says", |pcm, _| !pcm.is_empty() && is_silent(pcm)).await;
    let (status, _) = bridge(&rig, &call, json!({ "mode": "whisper" })).await;
    assert_eq!(status, 202);
    while news(&mut events, &call).await != BridgeState::Connected(BridgeMode::Whisper) {}
    let asked = rig.speak(&caller, SENTENCE).await;
    hears(&human, "the whisper", |pcm, _| !is_silent(pcm)).await;
    let heard = caller.ear().heard().clip_between(asked, now());
    assert!(is_silent(&heard.pcm), "the caller hears no whisper");
    human.say(&tone(HUMAN, 60)).await.expect("they speak");
    hears(&caller, "the human again", |pcm, rate| share(pcm, rate, HUMAN) > 0.8).await;
    // The human hangs up: the caller is with the agent again.
    assert_eq!(human.hang_up().await, End::Local);
    assert_eq!(news(&mut events, &call).await, BridgeState::Ended(Some(EndReason::Remote)));
    let asked = rig.speak(&caller, SENTENCE).await;
    hear_turn(&caller, asked).await;
    let _ = caller.hang_up().await;
    let record = async {
        loop {
            let (status, record) = rig.get(&format!("/v1/records/{}", call.id())).await;
            if status == 200 && record["state"] == "ended" {
                return record;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let record = tokio::time::timeout(PATIENCE, record).await.expect("written");
    let bridged = &record["bridges"][0];
    assert_eq!(
        (&bridged["call"], &bridged["mode"], &bridged["state"]),
        (&json!(id), &json!("whisper"), &json!("ended"))
    );
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_browser_is_joined_with_a_telephone_as_well() {
    let rig = Rig::start().await;
    let caller = rig.browser("silent").await;
    let call = rig.handle(&caller).await;
    let (human, _) = joined(&rig, &call, "listen").await;
    human.say(&tone(HUMAN, 60)).await.expect("they speak");
    hears(&caller, "the human", |pcm, rate| share(pcm, rate, HUMAN) > 0.8).await;
    caller.say(&tone(CALLER, 60)).await.expect("they speak");
    hears(&human, "the caller", |pcm, rate| share(pcm, rate, CALLER) > 0.8).await;
    // The caller goes, and the human's call with it.
    let _ = caller.hang_up().await;
    assert_eq!(human.ended(PATIENCE).await, Some(End::Remote));
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_human_who_does_not_come_leaves_the_caller_with_the_agent_who_is_told_why() {
    let rig = Rig::start().await;
    let caller = rig.telephone("silent", Codec::Pcmu).await;
    let call = rig.handle(&caller).await;
    let mut events = rig.app.gateway().calls.events();
    let ask = |to: String, ring_timeout_s| {
        call.bridge(BridgeRequest { to, ring_timeout_s, ..BridgeRequest::default() }).expect("taken");
    };
    let mut over = async |call: &CallHandle| loop {
        match news(&mut events, call).await {
            BridgeState::Dialling(state) if state.is_over() => return state,
            BridgeState::Dialling(_) => {}
            other => panic!("{other:?}"),
        }
    };
    // Asked for as an agent does, by the call itself.
    let mut busy = Raw::new(rig.sip_udp(), "busy-human").await;
    ask(busy.uri(), None);
    let invite = busy.next("INVITE").await;
    busy.answer(&invite, "180 Ringing", "").await;
    hears(&caller, "that it rings", |pcm, rate| share(pcm, rate, 425.0) > 0.8).await;
    busy.answer(&invite, "486 Busy Here", "").await;
    assert_eq!(over(&call).await, Dialling::Busy { status: 486 });
    let mut asleep = Raw::new(rig.sip_udp(), "asleep-human").await;
    ask(asleep.uri(), Some(1));
    let invite = asleep.next("INVITE").await;
    asleep.answer(&invite, "180 Ringing", "").await;
    assert_eq!(over(&call).await, Dialling::NoAnswer { status: None });
    // Somebody changes their mind.
    let mut late = Raw::new(rig.sip_udp(), "late-human").await;
    ask(late.uri(), None);
    let invite = late.next("INVITE").await;
    late.answer(&invite, "180 Ringing", "").await;
    let url = format!("{}/v1/calls/{}/bridge", rig.http, call.id());
    assert_eq!(rig.client.delete(&url).send().await.expect("HTTP").status(), 202);
    let cancel = late.next("CANCEL").await;
    late.answer(&cancel, "200 OK", "").await;
    late.answer(&invite, "487 Request Terminated", "").await;
    assert_eq!(over(&call).await, Dialling::Cancelled);
    // What may not be dialled is not, and the agent hears why.
    ask("sip:".into(), None);
    assert!(matches!(over(&call).await, Dialling::Failed { .. }));
    let (status, error) = bridge(&rig, &call, json!({ "to": "sip:" })).await;
    assert_eq!((status, &error["error"]["code"]), (400, &json!("invalid_address")), "{error}");
    for wrong in [json!({}), json!({ "mode": "leave" }), json!({ "to": "sip:a@127.0.0.1", "ringTimeoutS": 0 })] {
        assert_eq!(bridge(&rig, &call, wrong.clone()).await.0, 400, "{wrong}");
    }
    assert_eq!(rig.client.delete(url).send().await.expect("HTTP").status(), 400, "there is none");
    // The agent was there all the time.
    let asked = rig.speak(&caller, SENTENCE).await;
    hear_turn(&caller, asked).await;
    // The caller goes while it rings.
    let mut unneeded = Raw::new(rig.sip_udp(), "unneeded-human").await;
    ask(unneeded.uri(), None);
    let invite = unneeded.next("INVITE").await;
    unneeded.answer(&invite, "180 Ringing", "").await;
    assert_eq!(caller.hang_up().await, End::Local);
    let cancel = unneeded.next("CANCEL").await;
    unneeded.answer(&cancel, "200 OK", "").await;
    unneeded.answer(&invite, "487 Request Terminated", "").await;
    rig.app.drain().await;
}
