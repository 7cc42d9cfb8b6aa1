//! Outbound calls: who answered decides when the gateway begins to speak.

use antiphon::call::CallEvent;
use antiphon::media::answer::Answerer;

use super::world::{MS, World};

const GREETING: &str = "Good morning, this is the clinic.";

#[test]
fn a_person_is_greeted_when_they_have_said_hello_and_interrupts_nothing_by_it() {
    let mut world = World::new();
    world.handle.detect_answer(true).expect("taken");
    world.say(GREETING);
    world.caller(false, 400 * MS);
    world.caller(true, 700 * MS);
    world.caller(false, 1_500 * MS);
    let known = world.when(|event| *event == CallEvent::AnsweredBy(Answerer::Human)).expect("told");
    let first = world.audible().first().expect("a greeting").0;
    assert!(first >= known && first <= known + 40 * MS, "{first:?} after {known:?}");
    assert!(known > 1_100 * MS && known < 2_400 * MS, "{known:?}");
    assert_eq!(world.handle.info().interruptions, 0);
    let counted = world.events.iter().any(|(_, event)| matches!(event, CallEvent::FirstAudio { immediate: true, .. }));
    assert!(!counted, "the wait for the callee is not the gateway's latency");
}

#[test]
fn a_machine_is_spoken_to_after_its_message() {
    let mut world = World::new();
    world.handle.detect_answer(true).expect("taken");
    world.say(GREETING);
    world.caller(true, 4_000 * MS);
    world.caller(false, 4_500 * MS);
    let known = world.when(|event| *event == CallEvent::AnsweredBy(Answerer::Machine)).expect("told");
    assert!(known < 3_200 * MS, "within three seconds of speech: {known:?}");
    let over = world.when(|event| *event == CallEvent::MessageOver { beep: false }).expect("told");
    let first = world.audible().first().expect("a message").0;
    assert!(first >= over && first <= over + 40 * MS, "{first:?} after {over:?}");
}

#[test]
fn a_peer_that_sends_nothing_is_spoken_to_all_the_same() {
    let mut world = World::new();
    world.handle.detect_answer(true).expect("taken");
    world.say(GREETING);
    world.run(6_000 * MS);
    let known = world.when(|event| *event == CallEvent::AnsweredBy(Answerer::Silence)).expect("told");
    assert!(known > 3_900 * MS && known < 4_500 * MS, "{known:?}");
    assert!(world.audible().first().expect("a greeting").0 >= known);
}

#[test]
fn without_holding_the_greeting_sounds_at_once() {
    let mut world = World::new();
    world.handle.detect_answer(false).expect("taken");
    world.say(GREETING);
    world.caller(false, 4_500 * MS);
    assert!(world.audible().first().expect("a greeting").0 < 500 * MS);
    assert!(world.when(|event| *event == CallEvent::AnsweredBy(Answerer::Silence)).is_some());
}
