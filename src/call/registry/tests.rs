//! The registry and the task in real time: what simulations cannot show. Waits are for events, bounded by one
//! limit; nothing is asserted about how long anything took.

use std::collections::BTreeMap;
use std::sync::Mutex;

use tokio::time::timeout;

use super::*;
use crate::audio::FRAME_SAMPLES;
use crate::call::handle::TurnRequest;
use crate::call::speech::{Refusal, StreamState};
use crate::call::{Direction, SpeakError, TurnHow};
use crate::media::leg::{Codec, LegEnd, LegEvent, MediaFormat, OutPacket};
use crate::turn::{SpeechEvent, SpeechSink, StreamId, Utterance, UtteranceEnd};

const LIMIT: Duration = Duration::from_secs(10);

/// Speaks 100 ms for every utterance, at once.
#[derive(Default)]
struct Quick {
    closed: Mutex<Vec<StreamId>>,
}

impl Speech for Quick {
    fn submit(&self, utterance: Utterance, sink: SpeechSink) -> Result<(), Refusal> {
        let id = utterance.id;
        // overflow: fails the test
        sink.try_send(SpeechEvent::Audio { utterance: id, pcm: vec![0.3; FRAME_SAMPLES * 5] }).unwrap();
        // overflow: fails the test
        sink.try_send(SpeechEvent::End { utterance: id, how: UtteranceEnd::Done }).unwrap();
        Ok(())
    }

    fn note(&self, stream: StreamId, note: StreamState) {
        if note == StreamState::Closed {
            self.closed.lock().unwrap().push(stream);
        }
    }
}

/// A leg whose far end is the test.
struct Loop {
    format: MediaFormat,
    events: mpsc::Receiver<LegEvent>,
    packets: mpsc::Sender<OutPacket>,
    /// What `attach` and `send` do.
    fault: Fault,
}

#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    Attach,
    Send,
    Panic,
    /// It takes its time to go.
    Slow,
}

impl Drop for Loop {
    #[expect(clippy::disallowed_methods, reason = "a socket that is slow to close blocks like this")]
    fn drop(&mut self) {
        if self.fault == Fault::Slow {
            std::thread::sleep(Duration::from_millis(300));
        }
    }
}

impl MediaLeg for Loop {
    fn kind(&self) -> &'static str {
        "test"
    }

    fn format(&self) -> &MediaFormat {
        &self.format
    }

    async fn attach(&mut self) -> std::io::Result<()> {
        match self.fault {
            Fault::Attach => Err(std::io::Error::other("on purpose")),
            _ => Ok(()),
        }
    }

    async fn send(&mut self, packet: OutPacket) -> Result<(), LegEnd> {
        assert!(self.fault != Fault::Panic, "on purpose");
        // overflow: drops: the test reads what it needs
        let _ = self.packets.try_send(packet);
        if self.fault == Fault::Send { Err(LegEnd::Failed) } else { Ok(()) }
    }

    fn send_message(&mut self, _text: &str) -> bool {
        false
    }

    async fn recv(&mut self) -> LegEvent {
        self.events.recv().await.unwrap_or(LegEvent::Closed(LegEnd::Lost))
    }

    async fn hang_up(&mut self) {}

    fn hold(&mut self, _hold: bool) -> Result<(), String> {
        // The peer never answers.
        Ok(())
    }

    fn transfer(&mut self, _to: &str, _attended: bool, _limit: Option<Duration>) -> Result<(), String> {
        Err("nobody there".into())
    }
}

struct Far {
    events: mpsc::Sender<LegEvent>,
    packets: mpsc::Receiver<OutPacket>,
}

fn leg(fault: Fault) -> (Loop, Far) {
    let (events, theirs) = mpsc::channel(16);
    let (packets, ours) = mpsc::channel(1_024);
    let format = MediaFormat::plain(Codec::Pcmu);
    // overflow: fails the test
    events.try_send(LegEvent::Connected).unwrap();
    (Loop { format, events: theirs, packets, fault }, Far { events, packets: ours })
}

fn meta(id: &str) -> CallMeta {
    CallMeta {
        id: id.into(),
        direction: Direction::Inbound,
        from: String::new(),
        to: String::new(),
        agent: "demo".into(),
        headers: BTreeMap::new(),
        tenant: "".into(),
        trace: None,
    }
}

fn calls(max_calls: usize) -> (Calls, Arc<Quick>) {
    let engine = Arc::new(Quick::default());
    let config = CallConfig { max_calls, shards: 1, ..CallConfig::default() };
    (Calls::new(config, engine.clone()).unwrap(), engine)
}

/// Everything a call tells, to its end.
async fn story(handle: &CallHandle) -> Vec<CallEvent> {
    let mut events = handle.events();
    let mut all = Vec::new();
    while let Ok(Ok(event)) = timeout(LIMIT, events.recv()).await {
        all.push(event);
    }
    all
}

#[tokio::test]
async fn who_hears_of_the_end_of_a_call_finds_it_gone_and_room_for_another() {
    let (calls, _) = calls(1);
    let (slow, _far) = leg(Fault::Slow);
    let handle = calls.start(meta("a"), slow).unwrap();
    handle.hang_up(EndReason::HungUp);
    assert_eq!(timeout(LIMIT, handle.ended()).await.unwrap(), EndReason::HungUp);
    assert_eq!((calls.count(), calls.has_room()), (0, Ok(())));
}

#[tokio::test]
async fn a_call_speaks_and_ends_and_leaves_nothing_behind() {
    let (calls, engine) = calls(1);
    let (leg, mut far) = leg(Fault::None);
    let handle = calls.start(meta("a"), leg).unwrap();
    assert_eq!(calls.count(), 1);
    let turn = handle.speak(TurnRequest::new("Hello there.")).await.unwrap();
    handle.finish(EndReason::HungUp).unwrap();
    let story = timeout(LIMIT, story(&handle)).await.unwrap();
    // The turn may have been asked for before the leg connected, but never sounds before.
    let place = |wanted: &dyn Fn(&CallEvent) -> bool| story.iter().position(wanted);
    assert!(place(&|e| *e == CallEvent::Connected) < place(&|e| matches!(e, CallEvent::FirstAudio { .. })));
    assert_eq!(story.last(), Some(&CallEvent::Ended(EndReason::HungUp)));
    assert!(story.iter().any(|e| matches!(e, CallEvent::TurnEnded { turn: t, how: TurnHow::Done, .. } if *t == turn)));
    assert_eq!(handle.ended().await, EndReason::HungUp);
    let mut packets = 0;
    while far.packets.recv().await.is_some() {
        packets += 1;
    }
    assert_eq!(packets, 6);
    // Removal follows the end within the same task.
    timeout(LIMIT, async {
        while calls.count() > 0 {
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
    assert_eq!(engine.closed.lock().unwrap().len(), 1);
    assert_eq!(handle.info().state, "ended");
    assert_eq!(handle.speak(TurnRequest::new("Hello?")).await, Err(SpeakError::Ended));
    // A listener that comes too late hears the end.
    assert_eq!(handle.events().recv().await.unwrap(), CallEvent::Ended(EndReason::HungUp));
    tokio::task::spawn_blocking(move || calls.shutdown()).await.unwrap();
}

/// A peer that was told the id may ask for the call before it is live.
#[tokio::test]
async fn an_announced_call_is_waited_for_until_it_is_live_or_will_not_be() {
    let (calls, _) = calls(2);
    let id = CallId::from("a");
    assert!(calls.find(&id).await.is_none(), "nobody announced it");
    let arriving = calls.announce(id.clone());
    let mut early = Box::pin(calls.find(&id));
    assert!(futures_util::poll!(early.as_mut()).is_pending());
    let (one, _far) = leg(Fault::None);
    let handle = calls.start(meta("a"), one).unwrap();
    drop(arriving);
    assert_eq!(timeout(LIMIT, early).await.unwrap().map(|call| call.id().clone()), Some(id.clone()));
    let arriving = calls.announce("b".into());
    let other = CallId::from("b");
    let mut never = Box::pin(calls.find(&other));
    assert!(futures_util::poll!(never.as_mut()).is_pending());
    drop(arriving);
    assert!(timeout(LIMIT, never).await.unwrap().is_none());
    handle.hang_up(EndReason::HungUp);
    timeout(LIMIT, handle.ended()).await.unwrap();
    tokio::task::spawn_blocking(move || calls.shutdown()).await.unwrap();
}

#[tokio::test]
async fn places_are_limited_ids_unique_and_places_come_back() {
    let (calls, _) = calls(2);
    let ((one, _far1), (two, _far2), (three, _far3)) = (leg(Fault::None), leg(Fault::None), leg(Fault::None));
    let first = calls.start(meta("a"), one).unwrap();
    assert_eq!(calls.start(meta("a"), two).unwrap_err(), StartError::Duplicate);
    let (two, _far4) = leg(Fault::None);
    calls.start(meta("b"), two).unwrap();
    assert_eq!(calls.start(meta("c"), three).unwrap_err(), StartError::Full(2));
    assert_eq!(calls.list().len(), 2);
    assert!(calls.get(&"b".into()).is_some() && calls.get(&"c".into()).is_none());
    first.hang_up(EndReason::HungUp);
    assert_eq!(timeout(LIMIT, first.ended()).await.unwrap(), EndReason::HungUp);
    timeout(LIMIT, async {
        loop {
            let (again, _far) = leg(Fault::None);
            if calls.start(meta("d"), again).is_ok() {
                break;
            }
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn faults_of_a_leg_end_that_call_alone() {
    let (calls, _) = calls(10);
    let (leg_ok, mut far) = leg(Fault::None);
    let healthy = calls.start(meta("ok"), leg_ok).unwrap();
    for (n, fault) in [Fault::Attach, Fault::Send, Fault::Panic].into_iter().enumerate() {
        let (bad, _far) = leg(fault);
        let bad = calls.start(meta(&format!("bad{n}")), bad).unwrap();
        let _ = bad.speak(TurnRequest::new("Hello there.")).await;
        assert_eq!(timeout(LIMIT, bad.ended()).await.unwrap(), EndReason::Failed);
    }
    healthy.speak(TurnRequest::new("Hello there.")).await.unwrap();
    assert!(timeout(LIMIT, far.packets.recv()).await.unwrap().is_some());
    // The far end goes away.
    far.events.send(LegEvent::Closed(LegEnd::Remote)).await.unwrap();
    assert_eq!(timeout(LIMIT, healthy.ended()).await.unwrap(), EndReason::Remote);
}

#[tokio::test]
async fn draining_lets_the_last_words_be_said_and_cuts_off_who_goes_on() {
    let (calls, _) = calls(10);
    let ((one, _far1), (two, _far2)) = (leg(Fault::None), leg(Fault::None));
    let polite = calls.start(meta("polite"), one).unwrap();
    polite.speak(TurnRequest::new("Goodbye.")).await.unwrap();
    let endless = calls.start(meta("endless"), two).unwrap();
    endless.speak(TurnRequest::new("And so on. ".repeat(2_000))).await.unwrap();
    let listener = polite.clone();
    let listening = tokio::spawn(async move { story(&listener).await });
    let cut_off = timeout(LIMIT, calls.drain(Duration::from_secs(1))).await.unwrap();
    assert_eq!(cut_off, 1);
    let story = listening.await.unwrap();
    assert!(story.iter().any(|e| matches!(e, CallEvent::TurnEnded { how: TurnHow::Done, .. })), "{story:?}");
    assert_eq!(endless.ended().await, EndReason::Drained);
    let (late, _far3) = leg(Fault::None);
    assert_eq!(calls.start(meta("late"), late).unwrap_err(), StartError::Draining);
    tokio::task::spawn_blocking(move || calls.shutdown()).await.unwrap();
}

#[tokio::test]
async fn a_tap_hears_what_is_said_and_ends_with_the_call() {
    let (calls, _) = calls(1);
    let (leg, _far) = leg(Fault::None);
    let handle = calls.start(meta("a"), leg).unwrap();
    let mut tap = handle.wide_tap();
    handle.speak(TurnRequest::new("Hello there.")).await.unwrap();
    handle.finish(EndReason::HungUp).unwrap();
    let mut frames = 0;
    while let Some(frame) = timeout(LIMIT, tap.recv()).await.unwrap() {
        assert_eq!(frame.pcm.len(), 160);
        assert_eq!(frame.wide.map(|wide| wide.len()), Some(320), "at 16 kHz where that was asked for");
        frames += 1;
    }
    assert_eq!(frames, 6);
}

#[tokio::test]
async fn a_drain_can_be_taken_back_and_a_close_cannot() {
    let (calls, _) = calls(2);
    let (stuck, _far) = leg(Fault::None);
    let handle = calls.start(meta("a"), stuck).unwrap();
    // Most of a minute of speech: a drain would wait for its end.
    handle.speak(TurnRequest::new("This is one sentence of a long turn. ".repeat(400))).await.unwrap();
    let draining = tokio::spawn({
        let calls = calls.clone();
        async move { calls.drain(LIMIT * 100).await }
    });
    timeout(LIMIT, async {
        while calls.has_room().is_ok() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("it drains");
    assert!(calls.resume());
    assert_eq!(timeout(LIMIT, draining).await.expect("it stops waiting").unwrap(), 0);
    assert!(calls.has_room().is_ok() && !handle.has_ended());
    handle.hang_up(EndReason::HungUp);
    assert_eq!(calls.close(LIMIT).await, 0);
    assert!(!calls.resume());
    assert_eq!(calls.has_room(), Err(StartError::Draining));
}

#[tokio::test]
async fn a_notice_takes_calls_and_is_begun_once_and_a_last_one_is_never_taken_back() {
    let (calls, _) = calls(4);
    let leaving = |notice: Duration| {
        let calls = calls.clone();
        tokio::spawn(async move { calls.leave(notice, false).await })
    };
    let begun = async || {
        timeout(LIMIT, async {
            while !calls.is_leaving() {
                tokio::task::yield_now().await;
            }
        })
        .await
        .expect("it begins");
    };
    let first = leaving(LIMIT * 100);
    begun().await;
    assert!(!calls.is_draining() && calls.has_room().is_ok());
    let (late, _far) = leg(Fault::None);
    let late = calls.start(meta("late"), late).expect("it is taken");
    // Taken back: who waited is told.
    assert!(calls.resume() && !calls.is_leaving());
    assert!(!timeout(LIMIT, first).await.expect("it waits no longer").expect("no panic"));
    let second = leaving(LIMIT / 50);
    begun().await;
    let last = timeout(LIMIT, calls.leave(LIMIT * 100, true)).await;
    assert!(last.expect("the one that is under way is waited for"));
    assert!(second.await.expect("no panic") && !calls.resume(), "the process ends");
    late.hang_up(EndReason::HungUp);
    assert_eq!(calls.close(LIMIT).await, 0);
    assert!(calls.is_leaving() && calls.is_draining() && !calls.resume());
    assert!(timeout(LIMIT, calls.leave(LIMIT * 100, true)).await.expect("it was closed before"));
}
