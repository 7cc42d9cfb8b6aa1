use antiphon::call::{CallConfig, CallEvent, EndReason, SpeakError, TextDelta, TurnHow, TurnRequest};
use antiphon::media::leg::{Codec, LegEnd, LegEvent};

use super::world::{MS, World, format};

#[test]
fn an_agent_that_floods_is_refused_and_holds_bounded_memory() {
    let mut world = World::new();
    let sentence = "A sentence that is repeated without end by an agent. ";
    let (mut taken, mut refused) = (0, 0);
    for _ in 0..10_000 {
        let delta = TextDelta { id: None, token: sentence.into(), last: false, style: Default::default() };
        match world.handle.push_text(delta) {
            Ok(()) => taken += 1,
            Err(SpeakError::Busy) => refused += 1,
            Err(other) => panic!("{other}"),
        }
        world.settle();
    }
    assert!(taken * sentence.len() <= 64 * 1_024 && refused > 8_000);
    // Only a window of it is with the engine.
    world.run(1_000 * MS);
    assert!(world.engine.submitted().len() < 10, "{}", world.engine.submitted().len());
    assert!(world.events.iter().any(|(_, e)| *e == CallEvent::Flow { open: false }));
    world.handle.interrupt().unwrap();
    world.run(100 * MS);
    assert!(world.events.iter().any(|(_, e)| *e == CallEvent::Flow { open: true }));
    assert_eq!(world.handle.info().backlog_bytes, 0);
}

#[test]
fn many_small_turns_are_bounded_by_their_number() {
    let mut world = World::new();
    let mut refused = 0;
    for _ in 0..300 {
        match world.speak(TurnRequest::new("Hi.")) {
            Ok(_) => {}
            Err(SpeakError::Busy) => refused += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!(refused, 300 - 256);
    for n in 0..300 {
        world.handle.mark(format!("{n}")).unwrap();
        world.settle();
    }
    assert!(world.events.iter().filter(|(_, e)| matches!(e, CallEvent::Mark { played: false, .. })).count() >= 299);
}

#[test]
fn a_call_that_never_connects_ends() {
    let mut world = World::unconnected(CallConfig::default(), format(Codec::Opus, false));
    world.say("Nobody is there yet.");
    world.run(29_000 * MS);
    assert!(world.packets.is_empty());
    assert_eq!(world.ended(), None);
    world.run(2_000 * MS);
    assert_eq!(world.ended(), Some(EndReason::SetupTimeout));
}

#[test]
fn speech_queued_before_the_connection_sounds_with_it() {
    let mut world = World::unconnected(CallConfig::default(), format(Codec::Pcmu, false));
    world.say("Welcome to the show.");
    world.run(500 * MS);
    assert!(world.packets.is_empty());
    world.leg(LegEvent::Connected);
    assert_eq!(world.packets.len(), 1);
    world.run(2_000 * MS);
    assert_eq!(world.packets.len(), 51);
}

#[test]
fn idle_and_endless_calls_end() {
    let config = CallConfig { max_idle_s: 60, max_duration_s: 300, ..CallConfig::default() };
    let mut world = World::with(config.clone(), format(Codec::Pcmu, true));
    world.run(50_000 * MS);
    world.leg(LegEvent::Digit('1'));
    world.run(59_000 * MS);
    assert_eq!(world.ended(), None);
    world.run(2_000 * MS);
    assert_eq!(world.ended(), Some(EndReason::Idle));
    let mut world = World::with(config, format(Codec::Pcmu, false));
    for _ in 0..10 {
        world.leg(LegEvent::Digit('1'));
        world.run(29_000 * MS);
    }
    assert_eq!(world.ended(), None);
    world.run(10_000 * MS);
    assert_eq!(world.ended(), Some(EndReason::TooLong));
}

#[test]
fn a_peer_that_hangs_up_ends_every_turn_once() {
    let mut world = World::new();
    world.say("This will not be heard to its end. Nor this.");
    world.say("Nor this one.");
    world.run(200 * MS);
    world.leg(LegEvent::Closed(LegEnd::Remote));
    world.run(1_000 * MS);
    let events = world.take_events();
    let ends = events.iter().filter(|e| matches!(e, CallEvent::TurnEnded { how: TurnHow::CallEnded, .. })).count();
    assert_eq!(ends, 2);
    assert_eq!(events.last(), Some(&CallEvent::Ended(EndReason::Remote)));
    assert_eq!(events.iter().filter(|e| matches!(e, CallEvent::Ended(_))).count(), 1);
    assert_eq!(world.speak(TurnRequest::new("Hello?")), Err(SpeakError::Ended));
    assert_eq!(world.handle.info().backlog_bytes, 0);
}
