use super::*;
use crate::sched::tests::{LIMITS, opened, spec};
use crate::sched::{Config, JobEnd, Limits, OpenError, Stages, StreamNote};
use crate::turn::{Class, StreamId};

const MS: Duration = Duration::from_millis(1);
/// What every job here needs.
const BYTES: u64 = 40;

/// A device that can begin steps.
fn device() -> Scheduler {
    let limits = Limits { rounds: [1, 8, 8, 1], parks: false, background: true, memory: 100, ..LIMITS };
    Scheduler::new(Config::default(), limits)
}

fn only(stage: Stage) -> Stages {
    Stages::NONE.with(stage)
}

fn outcome(slot: Slot, ready: Stages) -> Outcome {
    Outcome { slot, ready, samples: 0, decoded: 0, done: false, failed: None }
}

#[test]
fn a_new_turn_runs_beside_the_step_that_nobody_waits_for_until_it_needs_the_same_stage() {
    let now = crate::clock::now();
    let mut sched = device();
    let (_, batch) = opened(&mut sched, now, spec(1, Class::Batch), BYTES, only(Stage::Flow));
    let Plan::Begin(flow) = sched.plan(now) else { panic!("nobody waits for it") };
    assert_eq!((flow.stage, &flow.slots[..]), (Stage::Flow, &[batch][..]));
    assert!(matches!(sched.plan(now), Plan::Idle { .. }), "its slot is busy");
    let (_, live) = opened(&mut sched, now, spec(2, Class::Live), BYTES, only(Stage::Prefill));
    let Plan::Run(prefill) = sched.plan(now) else { panic!("first audio is urgent") };
    assert_eq!((prefill.stage, &prefill.slots[..]), (Stage::Prefill, &[live][..]));
    sched.record(now, MS, &prefill, &[outcome(live, only(Stage::Flow))]);
    assert!(matches!(sched.plan(now), Plan::Idle { .. }), "the flow has one step at a time");
    sched.finished(now, 7 * MS, &flow, &[outcome(batch, only(Stage::Flow))]);
    let Plan::Begin(next) = sched.plan(now) else { panic!("first audio goes on") };
    assert_eq!(next.slots[0], live);
    // What ran beside another taught nothing about what it takes alone.
    assert!((sched.costs.predict(Stage::Flow, 1, 1) - MS.as_secs_f64()).abs() < 1e-9);
}

#[test]
fn beside_a_step_that_makes_first_audio_only_short_ones_run() {
    let now = crate::clock::now();
    let mut rounds = [0, 0];
    for (class, rounds) in [Class::Live, Class::Batch].into_iter().zip(&mut rounds) {
        let mut sched = device();
        opened(&mut sched, now, spec(1, class), BYTES, only(Stage::Flow));
        assert!(matches!(sched.plan(now), Plan::Begin(_)), "a sound step");
        opened(&mut sched, now, spec(2, Class::Live), BYTES, only(Stage::Decode));
        let Plan::Run(decode) = sched.plan(now) else { panic!("first audio is urgent") };
        *rounds = decode.rounds;
    }
    assert_eq!(rounds, [1, 4], "a millisecond, a quarter of the longest step");
}

#[test]
fn a_job_that_ends_under_its_step_gives_back_slot_and_memory_when_that_has_ended() {
    let now = crate::clock::now();
    let mut sched = device();
    let (job, slot) = opened(&mut sched, now, spec(1, Class::Live), BYTES, only(Stage::Flow));
    let Plan::Begin(flow) = sched.plan(now) else { panic!("a sound step") };
    sched.note(now, StreamId(1), StreamNote::Closed);
    assert!(!sched.knows(StreamId(1)), "the stream is gone at once");
    let (_, other) = opened(&mut sched, now, spec(2, Class::Live), BYTES, only(Stage::Prefill));
    assert_ne!(other, slot);
    // 40 bytes are still held, as many are the other's.
    let third = sched.submit(now, spec(3, Class::Batch)).expect("batch may wait");
    sched.sized(third, BYTES);
    assert_eq!(sched.reserved(), 2 * BYTES);
    let Plan::Run(prefill) = sched.plan(now) else { panic!("first audio is urgent") };
    sched.record(now, MS, &prefill, &[outcome(other, only(Stage::Flow))]);
    sched.finished(now, MS, &flow, &[outcome(slot, only(Stage::Vocode))]);
    let Plan::End { job: ended, slot: freed, how, .. } = sched.plan(now) else { panic!("its end is told now") };
    assert_eq!((ended, freed, how), (job, Some(slot), JobEnd::Cancelled));
    assert_eq!(sched.reserved(), BYTES);
}

#[test]
fn what_finds_no_memory_under_a_step_whose_job_is_over_waits_for_that_step() {
    let now = crate::clock::now();
    let mut sched = device();
    let (_, slot) = opened(&mut sched, now, spec(1, Class::Live), BYTES, only(Stage::Flow));
    let Plan::Begin(flow) = sched.plan(now) else { panic!("a sound step") };
    sched.note(now, StreamId(1), StreamNote::Closed);
    let job = sched.submit(now, spec(2, Class::Live)).expect("there is room");
    assert!(matches!(sched.plan(now), Plan::Open { job: next, .. } if next == job));
    sched.opened(job, Err(OpenError::Memory));
    assert!(matches!(sched.plan(now), Plan::Idle { .. }), "it waits, and does not fail");
    sched.finished(now, MS, &flow, &[outcome(slot, only(Stage::Vocode))]);
    assert!(matches!(sched.plan(now), Plan::End { .. }));
    assert!(matches!(sched.plan(now), Plan::Open { job: next, .. } if next == job));
}
