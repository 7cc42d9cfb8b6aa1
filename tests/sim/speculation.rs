//! Answers that are made before it is certain that the caller has finished: nothing leaves before, and what turns out to
//! be wrong never does.

use std::time::Duration;

use antiphon::call::event::Stages;
use antiphon::call::{CallEvent, StreamState, Style, TextDelta, TurnHow, TurnId};
use antiphon::hear::{HearEvent, Phase, TurnEvent};

use super::world::{MS, World};

const ANSWER: &str = "We are open until nine.";

fn event(world: &World, phase: Phase, text: &str, spoke: Duration, eager: u64) -> HearEvent {
    let end = (world.now - world.start).min(spoke);
    let language = "en".into();
    HearEvent::Turn(TurnEvent {
        phase,
        text: text.into(),
        language,
        start: Duration::ZERO,
        end,
        confidence: 1.0,
        eager,
    })
}

fn hear(world: &mut World, phase: Phase, text: &str, spoke: Duration, eager: u64) {
    let event = event(world, phase, text, spoke, eager);
    world.machine.handle_heard(world.now, event);
    world.settle();
}

fn answer(world: &mut World, id: &str, speculation: Option<u64>) {
    let style = Style { speculation, ..Style::default() };
    let delta = TextDelta { id: Some(TurnId::from(id)), token: ANSWER.into(), last: true, style };
    world.handle.push_text(delta).expect("a piece that is taken");
    world.settle();
}

/// A caller who stops at one second is answered by an agent that takes 100 ms and an engine that takes 150; the turn
/// ends 600 ms behind the last word. Gives the stages of the answer.
fn exchange(speculates: bool) -> (World, Stages) {
    let mut world = World::new();
    world.engine.set_speed(150 * MS, 0.1);
    let spoke = 1_000 * MS;
    world.run(spoke + 250 * MS);
    hear(&mut world, Phase::EagerEndOfTurn, "when do you close", spoke, 1);
    world.run(100 * MS);
    if speculates {
        answer(&mut world, "a", Some(1));
    }
    world.run(250 * MS);
    assert!(world.audible().is_empty(), "nothing leaves before the turn has ended");
    hear(&mut world, Phase::EndOfTurn, "When do you close?", spoke, 1);
    if !speculates {
        world.run(100 * MS);
        answer(&mut world, "a", None);
    }
    world.run(3_000 * MS);
    let stages = world.events.iter().find_map(|(_, event)| match event {
        CallEvent::Answered { stages, .. } => Some(*stages),
        _ => None,
    });
    (world, stages.expect("an answer"))
}

#[test]
fn speculation_saves_the_time_of_the_agent_and_of_the_engine() {
    let (plain, without) = exchange(false);
    let (early, with) = exchange(true);
    assert_eq!((without.end_of_turn, without.agent, without.first_audio), (600 * MS, 100 * MS, 150 * MS));
    assert_eq!((with.end_of_turn, with.agent, with.first_audio), (600 * MS, Duration::ZERO, Duration::ZERO));
    assert!(without.mouth_to_ear() >= 850 * MS && with.mouth_to_ear() <= 660 * MS, "{without:?} {with:?}");
    println!("mouth to ear: {:?} without, {:?} with speculation", without.mouth_to_ear(), with.mouth_to_ear());
    for world in [plain, early] {
        let first = world.audible().first().expect("it is spoken").0;
        let told = world.when(|event| matches!(event, CallEvent::Answered { .. })).expect("told");
        assert!(first >= told && first <= told + 40 * MS, "{first:?} {told:?}");
        let heard = world.events.iter().find_map(|(_, event)| match event {
            CallEvent::TurnEnded { how: TurnHow::Done, heard, .. } => Some(heard.text.as_str()),
            _ => None,
        });
        assert_eq!(heard, Some(ANSWER));
    }
}

#[test]
fn the_engine_is_told_that_the_caller_does_not_listen_yet() {
    let (world, _) = exchange(true);
    let notes = world.engine.notes();
    let at = |wanted: StreamState| notes.iter().position(|note| *note == wanted).expect("told");
    assert!(at(StreamState::Held) < at(StreamState::Resumed), "{notes:?}");
    let (world, _) = exchange(false);
    assert!(!world.engine.notes().contains(&StreamState::Held));
}

#[test]
fn a_caller_who_goes_on_never_hears_the_answer_to_half_a_sentence() {
    let mut world = World::new();
    world.engine.set_speed(150 * MS, 0.5);
    world.run(1_250 * MS);
    hear(&mut world, Phase::EagerEndOfTurn, "when do you close", 1_000 * MS, 1);
    answer(&mut world, "a", Some(1));
    world.run(200 * MS);
    hear(&mut world, Phase::TurnResumed, "when do you close", 1_000 * MS, 1);
    // Its rest is still on the way, and so is that of an agent that is slow to listen.
    answer(&mut world, "a", Some(1));
    answer(&mut world, "b", Some(1));
    world.run(2_000 * MS);
    hear(&mut world, Phase::EndOfTurn, "When do you close on Sundays?", 3_000 * MS, 1);
    world.run(5_000 * MS);
    assert!(world.audible().is_empty());
    assert_eq!(world.handle.info().backlog_bytes, 0);
    assert_eq!(world.handle.info().interruptions, 0, "nobody was interrupted");
    assert!(world.engine.cancelled() > 0, "the engine stops, too");
    let ends: Vec<_> = world.events.iter().filter(|(_, event)| matches!(event, CallEvent::TurnEnded { .. })).collect();
    assert!(matches!(&ends[..], [(_, CallEvent::TurnEnded { how: TurnHow::Cancelled, .. })]), "{ends:?}");
    let prompts = world.events.iter().filter_map(|(_, event)| match event {
        CallEvent::Prompt { text, eager, .. } => Some((text.as_str(), *eager)),
        _ => None,
    });
    assert_eq!(prompts.collect::<Vec<_>>(), [("When do you close on Sundays?", None)], "it is to be answered");
}

#[test]
fn an_answer_waits_behind_what_sounds_and_holds_nothing_up_before_it() {
    let mut world = World::new();
    let filler = world.say("One moment, please.");
    world.run(100 * MS);
    hear(&mut world, Phase::EagerEndOfTurn, "when do you close", 50 * MS, 7);
    answer(&mut world, "a", Some(7));
    world.run(4_000 * MS);
    assert!(world.when(|event| matches!(event, CallEvent::TurnEnded { turn, .. } if *turn == filler)).is_some());
    let before = world.audible().len();
    hear(&mut world, Phase::EndOfTurn, "when do you close", 50 * MS, 7);
    world.run(4_000 * MS);
    assert!(world.audible().len() > before);
}
