//! A telephone calls another over real sockets: every codec, both transports, both directions.

use std::time::Duration;

use antiphon_loadgen::call::{Call, CallError, End, now};
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::correlate::correlate;
use antiphon_loadgen::heard::Clip;
use antiphon_loadgen::sip::{Caller, Config, Transport};
use antiphon_loadgen::{listen, synthetic};

const LONG: Duration = Duration::from_secs(10);

async fn connect(caller: Config, called: Config) -> (Call, Call) {
    let called = Caller::bind(called).await.unwrap();
    let uri = called.uri();
    let answering = tokio::spawn(called.answer(LONG));
    let call = Caller::bind(caller).await.unwrap().call(&uri).await.unwrap();
    (call, answering.await.unwrap().unwrap())
}

fn only(codec: Codec) -> Config {
    Config { codecs: vec![codec], ..Config::default() }
}

/// `a` says two seconds, `b` hears them; gives the correlation.
async fn speak(a: &Call, b: &Call, clip: &Clip) -> f32 {
    let began = a.say(clip).await.unwrap();
    let onset = b.onset(began, LONG).await.expect("speech is heard");
    assert!(onset >= began);
    b.silence(onset, Duration::from_millis(300), LONG).await.expect("it ends");
    let heard = b.ear().heard();
    assert_eq!(heard.counts.lost, 0);
    correlate(&heard.clip_between(began, now()), clip).unwrap().value
}

#[tokio::test(flavor = "multi_thread")]
async fn every_codec_carries_speech_both_ways() {
    let clip = synthetic::babble(5, 24_000, 1.5);
    for codec in Codec::ALL {
        let (a, b) = connect(only(codec), Config::default()).await;
        assert_eq!((a.codec(), b.codec()), (codec, codec));
        let least = if matches!(codec, Codec::Opus | Codec::G722) { 0.9 } else { 0.8 };
        let (there, back) = tokio::join!(speak(&a, &b, &clip), speak(&b, &a, &clip));
        assert!(there > least && back > least, "{codec:?}: {there} {back}");
        assert_eq!(a.hang_up().await, End::Local);
        assert_eq!(b.ended(LONG).await, Some(End::Remote));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_called_may_hang_up_and_tcp_serves_as_well() {
    let tcp = Config { transport: Transport::Tcp, ..Config::default() };
    let (a, b) = connect(tcp.clone(), tcp).await;
    assert_eq!(b.hang_up().await, End::Local);
    assert_eq!(a.ended(LONG).await, Some(End::Remote));
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_a_call_hangs_up() {
    let (a, b) = connect(Config::default(), Config::default()).await;
    drop(a);
    assert_eq!(b.ended(LONG).await, Some(End::Remote));
}

#[tokio::test(flavor = "multi_thread")]
async fn digits_are_heard_once_each() {
    let (a, b) = connect(only(Codec::Pcma), Config::default()).await;
    let start = now();
    a.press("15#").await.unwrap();
    let digits = b.ear().wait(LONG, |h| (h.digits.len() == 3).then(|| h.digits.clone())).await.unwrap();
    assert_eq!(digits.iter().map(|d| d.digit).collect::<String>(), "15#");
    assert!(digits.iter().all(|d| d.at >= start));
}

#[tokio::test(flavor = "multi_thread")]
async fn protected_media_is_understood() {
    let srtp = || Config { srtp: true, ..only(Codec::Pcmu) };
    let (a, b) = connect(srtp(), srtp()).await;
    let clip = synthetic::babble(6, 8_000, 0.6);
    assert!(speak(&a, &b, &clip).await > 0.8);
    // One side without protection does not get through.
    let called = Caller::bind(srtp()).await.unwrap();
    let uri = called.uri();
    let answering = tokio::spawn(called.answer(LONG));
    let refused = Caller::bind(only(Codec::Pcmu)).await.unwrap().call(&uri).await;
    assert!(matches!(refused, Err(CallError::Refused { code: 488, .. })), "{:?}", refused.err());
    assert!(answering.await.unwrap().is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn hold_silences_the_other_side_until_it_is_taken_back() {
    let (a, b) = connect(Config::default(), Config::default()).await;
    a.hold(true).await.unwrap();
    assert!(b.status_becomes(LONG, |s| s.held).await);
    // What was under way has arrived once nothing has come for a while.
    let quiet = a.ear().wait(LONG, |h| {
        let last = h.packets.last().map_or(h.until, |p| p.arrived);
        (h.until.saturating_duration_since(last) > Duration::from_millis(200)).then_some(())
    });
    let _ = tokio::time::timeout(Duration::from_millis(500), quiet).await;
    let held_at = now();
    let clip = synthetic::babble(7, 8_000, 0.5);
    b.say(&clip).await.unwrap();
    assert_eq!(a.onset(held_at, Duration::from_millis(400)).await, None);
    a.hold(false).await.unwrap();
    assert!(b.status_becomes(LONG, |s| !s.held).await);
    let began = b.say(&clip).await.unwrap();
    assert!(a.onset(began, LONG).await.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_tell_the_round_trip() {
    let (a, b) = connect(Config::default(), Config::default()).await;
    assert!(a.status_becomes(LONG, |s| s.peer.round_trip.is_some()).await, "{:?}", a.status());
    drop(b);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_who_loses_patience_cancels() {
    let called = Caller::bind(Config { ringing: LONG, ..Config::default() }).await.unwrap();
    let uri = called.uri();
    let answering = tokio::spawn(called.answer(LONG));
    let impatient = Config { patience: Duration::from_millis(300), ..Config::default() };
    let gave_up = Caller::bind(impatient).await.unwrap().call(&uri).await;
    assert!(matches!(gave_up, Err(CallError::Unanswered(_))));
    assert!(matches!(answering.await.unwrap(), Err(CallError::Refused { code: 487, .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_called_is_said() {
    let refused = Caller::bind(Config::default()).await.unwrap().call("mailto:x").await;
    assert!(matches!(refused, Err(CallError::Target(_))));
    let tcp = Config { transport: Transport::Tcp, ..Config::default() };
    let nobody = Caller::bind(tcp).await.unwrap().call("sip:x@127.0.0.1:1").await;
    assert!(matches!(nobody, Err(CallError::Io { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn barging_in_is_measured_to_the_end_of_sound() {
    let (a, b) = connect(Config::default(), Config::default()).await;
    let began = b.say(&synthetic::tone(8_000, 400.0, 5.0)).await.unwrap();
    a.onset(began, LONG).await.unwrap();
    let at = now();
    b.stop_speaking().await.unwrap();
    let silent = a.silence(at, Duration::from_millis(200), LONG).await.unwrap();
    let heard = a.take_heard();
    // Three frames, and what the machine added: how late packets came by their RTP timestamps.
    let late = listen::lateness(&heard, began, silent).into_iter().max().unwrap_or_default();
    assert!(
        silent.saturating_duration_since(at) < Duration::from_millis(60) + late,
        "{:?}, {late:?} late",
        silent - at
    );
    assert_eq!(listen::silent_from(&heard, at, Duration::from_millis(100)), Some(silent));
}
