use antiphon::call::event::{BargeInOutcome, Cause, Precision};
use antiphon::call::{
    BargeIn, CallConfig, CallEvent, Interruptible, StreamState, Style, TextDelta, TurnHow, TurnRequest,
};
use antiphon::media::leg::{Codec, LegEvent, PeerReport};

use super::world::{MS, World, format};

const LONG: &str = "This is a rather long sentence that goes on and on for quite a while. And here is another one.";

#[test]
fn a_caller_who_speaks_is_given_silence_at_once() {
    for (codec, continuous) in [(Codec::Pcmu, false), (Codec::Pcmu, true)] {
        let mut world = World::with(CallConfig::default(), format(codec, continuous));
        world.caller(false, 200 * MS);
        let turn = world.say(LONG);
        world.caller(false, 1_000 * MS);
        world.caller(true, 800 * MS);
        let decided = world.when(|e| *e == CallEvent::Vad { speaking: true }).expect("speech was noticed");
        assert!(decided < 1_200 * MS + 400 * MS, "{decided:?}");
        let last = world.audible().last().unwrap().0;
        assert!(last <= decided + 20 * MS, "sound at {last:?} after {decided:?}");
        let interrupted = world.events.iter().find_map(|(_, event)| match event {
            CallEvent::Interrupted { turn, cause, heard } => Some((turn.clone(), *cause, heard.clone())),
            _ => None,
        });
        let (id, cause, heard) = interrupted.expect("an interruption");
        assert_eq!((id, cause), (turn, Cause::Speech));
        assert!(heard.text.starts_with("This is a rather") && heard.text.len() < 45, "{}", heard.text);
        assert_eq!(heard.precision, Precision::Proportional);
        assert!(heard.sent_ms.abs_diff((decided - 200 * MS).as_millis() as u64) <= 40, "{heard:?}");
        // What the engine still held is cancelled and nothing waits.
        world.run(5_000 * MS);
        assert_eq!(world.handle.info().backlog_bytes, 0);
        assert_eq!(world.handle.info().interruptions, 1);
        assert_eq!(world.audible().last().unwrap().0, last);
    }
}

#[test]
fn the_engine_stops_working_for_what_was_cut_off() {
    let mut world = World::new();
    world.engine.set_speed(10 * MS, 0.5);
    world.say(LONG);
    world.run(300 * MS);
    world.handle.interrupt().unwrap();
    world.run(10_000 * MS);
    assert_eq!(world.engine.cancelled(), 2);
    let how = world.take_events().into_iter().find_map(|event| match event {
        CallEvent::TurnEnded { how, heard, .. } => Some((how, heard.precision)),
        _ => None,
    });
    assert_eq!(how, Some((TurnHow::Interrupted(Cause::Agent), Precision::Estimated)));
}

#[test]
fn what_was_sent_and_acknowledged_is_told_in_milliseconds() {
    let mut world = World::new();
    world.say(LONG);
    world.run(1_001 * MS);
    // Packets from 10 ms on: 50 of them by 990 ms.
    let highest = world.packets[24].1.sequence;
    world.leg(LegEvent::Report(PeerReport {
        highest_sequence: u32::from(highest),
        fraction_lost: 0.0,
        lost: 0,
        jitter: 0,
        round_trip: None,
    }));
    world.handle.interrupt().unwrap();
    world.settle();
    let heard = world.take_events().into_iter().find_map(|event| match event {
        CallEvent::Interrupted { heard, .. } => Some(heard),
        _ => None,
    });
    let heard = heard.unwrap();
    assert_eq!((heard.sent_ms, heard.acked_ms), (1_000, 500));
}

#[test]
fn turns_that_may_not_be_interrupted_go_on() {
    let mut world = World::new();
    let style = |interruptible| Style { interruptible: Some(interruptible), ..Style::default() };
    let turn = |text, interruptible| TurnRequest { style: style(interruptible), ..TurnRequest::new(text) };
    world.speak(turn("This legal notice has to be heard to its end.", Interruptible::None)).unwrap();
    world.run(500 * MS);
    world.leg(LegEvent::Digit('1'));
    world.caller(true, 500 * MS);
    world.run(5_000 * MS);
    world.speak(turn("Press a key, but do not speak, to skip this.", Interruptible::Dtmf)).unwrap();
    world.caller(false, 1_000 * MS);
    world.caller(true, 500 * MS);
    world.leg(LegEvent::Digit('1'));
    world.run(5_000 * MS);
    let ends = world.take_events().into_iter().filter_map(|event| match event {
        CallEvent::TurnEnded { how, .. } => Some(how),
        _ => None,
    });
    assert_eq!(ends.collect::<Vec<_>>(), [TurnHow::Done, TurnHow::Interrupted(Cause::Dtmf)]);
}

#[test]
fn a_queued_turn_that_must_be_heard_survives_the_interruption_of_another() {
    let mut world = World::new();
    world.say(LONG);
    let style = Style { interruptible: Some(Interruptible::None), ..Style::default() };
    world.speak(TurnRequest { style, ..TurnRequest::new("You must hear this.") }).unwrap();
    world.run(500 * MS);
    world.leg(LegEvent::Digit('#'));
    world.run(5_000 * MS);
    let ends = world.take_events().into_iter().filter_map(|event| match event {
        CallEvent::TurnEnded { how, heard, .. } => Some((how, heard.text)),
        _ => None,
    });
    let ends = ends.collect::<Vec<_>>();
    assert_eq!(ends[0].0, TurnHow::Interrupted(Cause::Dtmf));
    assert_eq!(ends[1], (TurnHow::Done, "You must hear this.".into()));
}

fn with_grace(confirm_by_default: bool) -> World {
    let barge_in = BargeIn { grace_ms: 400, confirm_by_default, ..BargeIn::default() };
    World::with(CallConfig { barge_in, ..CallConfig::default() }, format(Codec::Pcmu, false))
}

#[test]
fn a_rejected_barge_in_goes_on_where_it_stopped() {
    let mut world = with_grace(true);
    world.say("A sentence of forty characters exactly..");
    world.run(500 * MS);
    world.leg(LegEvent::Digit('1'));
    let silent_from = world.now;
    world.run(300 * MS);
    assert!(world.packets.iter().all(|(at, _)| *at < silent_from), "silence while it is undecided");
    world.handle.resolve_barge_in(false).unwrap();
    world.run(5_000 * MS);
    let events = world.take_events();
    assert!(events.iter().any(|e| matches!(e, CallEvent::BargeInResolved { outcome: BargeInOutcome::Rejected, .. })));
    assert!(
        events
            .iter()
            .any(|e| matches!(e, CallEvent::TurnEnded { how: TurnHow::Done, heard, .. } if heard.sent_ms == 2_000))
    );
    assert_eq!(world.handle.info().underruns, 0);
    assert_eq!(world.packets.len(), 101);
    assert!(world.engine.notes().contains(&StreamState::Held) && world.engine.notes().contains(&StreamState::Resumed));
}

#[test]
fn a_confirmed_or_unanswered_barge_in_cuts_off() {
    for (answer, default, cut, outcome) in [
        (Some(true), false, true, BargeInOutcome::Confirmed),
        (None, true, true, BargeInOutcome::TimedOutConfirmed),
        (None, false, false, BargeInOutcome::TimedOutRejected),
    ] {
        let mut world = with_grace(default);
        world.say(LONG);
        world.run(500 * MS);
        world.leg(LegEvent::Digit('1'));
        if let Some(answer) = answer {
            world.handle.resolve_barge_in(answer).unwrap();
        }
        world.run(10_000 * MS);
        let events = world.take_events();
        assert!(events.iter().any(|e| matches!(e, CallEvent::BargeInResolved { outcome: o, .. } if *o == outcome)));
        assert_eq!(events.iter().any(|e| matches!(e, CallEvent::Interrupted { .. })), cut);
        // Speech is possible again afterwards.
        world.say("Hello again.");
        world.run(2_000 * MS);
        assert!(world.take_events().iter().any(|e| matches!(e, CallEvent::FirstAudio { .. })));
    }
}

#[test]
fn the_rest_of_a_stream_that_was_cut_off_is_not_a_new_turn() {
    let mut world = World::new();
    world.push("This is a stream of words that is being written, ", false);
    world.run(300 * MS);
    world.leg(LegEvent::Digit('1'));
    for _ in 0..5 {
        world.run(50 * MS);
        world.push("and it does not know yet. ", false);
    }
    // A new reply after a pause is one.
    world.run(1_000 * MS);
    world.push("A new reply.", true);
    world.run(3_000 * MS);
    let heard = world.take_events().into_iter().filter_map(|event| match event {
        CallEvent::TurnEnded { heard, how: TurnHow::Done, .. } => Some(heard.text),
        _ => None,
    });
    assert_eq!(heard.collect::<Vec<_>>(), ["A new reply."]);
    assert_eq!(world.handle.info().backlog_bytes, 0);
    // With an id it is certain.
    let named = |id: &str, token: &str| TextDelta {
        id: Some(id.into()),
        token: token.into(),
        last: false,
        style: Style::default(),
    };
    world.handle.push_text(named("a", "A named stream of words, which is cut off. And")).unwrap();
    world.run(200 * MS);
    world.handle.interrupt().unwrap();
    world.run(2_000 * MS);
    world.handle.push_text(named("a", " this is its rest. And more.")).unwrap();
    world.handle.push_text(named("b", "And this is a new one. ")).unwrap();
    world.run(2_000 * MS);
    assert_eq!(world.engine.submitted().last().unwrap(), "And this is a new one.");
}

#[test]
fn marks_behind_what_was_cut_off_say_so() {
    let mut world = World::new();
    world.say(LONG);
    world.handle.mark("never").unwrap();
    world.run(300 * MS);
    world.handle.clear().unwrap();
    world.settle();
    assert!(world.take_events().contains(&CallEvent::Mark { name: "never".into(), played: false }));
}
