//! A browser calls a WebRTC server over real sockets: speech both ways, text both ways, and a proper end.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::support::{Reply, Whip};
use antiphon_loadgen::agent::text_frame;
use antiphon_loadgen::call::{CallError, End, now};
use antiphon_loadgen::correlate::correlate;
use antiphon_loadgen::rtc::{Caller, Config};
use antiphon_loadgen::{listen, synthetic};

const LONG: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_by_text_is_heard_as_it_was_said() {
    let clip = synthetic::babble(11, 24_000, 1.5);
    let said = clip.clone();
    let server = Whip::start(move |_, _| Reply::plain(Duration::from_millis(150), said.clone())).await;
    let mut call = Caller::connect(Config::new(&server.url)).await.unwrap();
    assert_eq!(call.id(), Some("c0"));
    assert!(call.status_becomes(LONG, |s| s.channel).await);
    let sent = call.send_text(&text_frame("hello", true).to_string()).await.unwrap();
    let onset = call.onset(sent, LONG).await.expect("speech is heard");
    let first = onset - sent;
    assert!(first >= Duration::from_millis(140), "{first:?}");
    let ended = call.silence(onset, Duration::from_millis(400), LONG).await.unwrap();
    let heard = call.take_heard();
    let found = correlate(&heard.clip_between(sent, now()), &clip).unwrap();
    assert!(found.value > 0.9, "{found:?}");
    assert_eq!(heard.counts.lost, 0);
    assert!(listen::spans(&heard, sent, now(), listen::PAUSE).last().unwrap().to == ended);
    assert!(call.next_text(LONG).await.unwrap().1.contains("hello"));

    // The other way.
    let began = call.say(&clip).await.unwrap();
    let ear = server.ears.lock().unwrap()[0].clone();
    let onset = ear.onset(began, LONG).await.expect("the server hears");
    ear.silence(onset, Duration::from_millis(400), LONG).await.unwrap();
    let found = correlate(&ear.heard().clip_between(began, now()), &clip).unwrap();
    assert!(found.value > 0.9, "{found:?}");

    assert_eq!(call.hang_up().await, End::Local);
    assert_eq!(server.deleted.load(Ordering::SeqCst), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_is_told_with_its_status() {
    let server = Whip::start(|_, _| unreachable!()).await;
    let config = Config { agent: Some("nobody".to_owned()), ..Config::new(&server.url) };
    let refused = Caller::connect(config).await;
    assert!(matches!(refused, Err(CallError::Refused { code: 404, .. })), "{:?}", refused.err());
    let nobody = Caller::connect(Config::new("http://127.0.0.1:1")).await;
    assert!(matches!(nobody, Err(CallError::Http(_))), "{:?}", nobody.err());
    let nonsense = Caller::connect(Config::new("sip:x")).await;
    assert!(matches!(nonsense, Err(CallError::Target(_))), "{:?}", nonsense.err());
}
