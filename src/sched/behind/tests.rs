use super::*;
use crate::sched::{Config, JobEnd, JobId, JobSpec, Limits, LineNote, OpenError, Stages};
use crate::turn::{Class, LineId, TurnToken};

const MS: Duration = Duration::from_millis(1);

/// A device of three slots that can begin steps.
fn device() -> Scheduler {
    let limits = Limits {
        slots: 3,
        width: [1, 2, 2, 2],
        rounds: [1, 8, 8, 1],
        parks: false,
        background: true,
        memory: 100,
        seeds: [MS; 4],
    };
    Scheduler::new(Config::default(), limits)
}

/// Submits a job of 40 bytes and opens it.
fn opened(sched: &mut Scheduler, now: Instant, line: u64, class: Class, ready: Stages) -> (JobId, Slot) {
    let spec = JobSpec { line: LineId(line), class, token: TurnToken::forever(), tenant: "".into(), chars: 100 };
    let job = sched.submit(now, spec).expect("there is room");
    sched.sized(job, 40);
    let Plan::Open { slot, job: next } = sched.plan(now) else { panic!("it opens first") };
    assert_eq!(next, job);
    sched.opened(job, Ok(ready));
    (job, slot)
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
    let (_, batch) = opened(&mut sched, now, 1, Class::Batch, only(Stage::Flow));
    let Plan::Begin(flow) = sched.plan(now) else { panic!("nobody waits for it") };
    assert_eq!((flow.stage, &flow.slots[..]), (Stage::Flow, &[batch][..]));
    sched.begun(now, flow.clone());
    assert!(matches!(sched.plan(now), Plan::Idle { .. }), "its slot is busy");
    let (_, live) = opened(&mut sched, now, 2, Class::Live, only(Stage::Prefill));
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
        opened(&mut sched, now, 1, class, only(Stage::Flow));
        let Plan::Begin(flow) = sched.plan(now) else { panic!("a sound step") };
        sched.begun(now, flow);
        opened(&mut sched, now, 2, Class::Live, only(Stage::Decode));
        let Plan::Run(decode) = sched.plan(now) else { panic!("first audio is urgent") };
        *rounds = decode.rounds;
    }
    assert_eq!(rounds, [1, 4], "a millisecond, a quarter of the longest step");
}

#[test]
fn a_job_that_ends_under_its_step_gives_back_slot_and_memory_when_that_has_ended() {
    let now = crate::clock::now();
    let mut sched = device();
    let (job, slot) = opened(&mut sched, now, 1, Class::Live, only(Stage::Flow));
    let Plan::Begin(flow) = sched.plan(now) else { panic!("a sound step") };
    sched.begun(now, flow.clone());
    sched.note(now, LineId(1), LineNote::Closed);
    assert!(!sched.knows(LineId(1)), "the line is gone at once");
    let (_, other) = opened(&mut sched, now, 2, Class::Live, only(Stage::Prefill));
    assert_ne!(other, slot);
    // 40 bytes are still held, as many are the other's.
    let third =
        JobSpec { line: LineId(3), class: Class::Batch, token: TurnToken::forever(), tenant: "".into(), chars: 100 };
    let third = sched.submit(now, third).expect("batch may wait");
    sched.sized(third, 40);
    assert_eq!(sched.reserved(), 80);
    let Plan::Run(prefill) = sched.plan(now) else { panic!("first audio is urgent") };
    sched.record(now, MS, &prefill, &[outcome(other, only(Stage::Flow))]);
    sched.finished(now, MS, &flow, &[outcome(slot, only(Stage::Vocode))]);
    let Plan::End { job: ended, slot: freed, how, .. } = sched.plan(now) else { panic!("its end is told now") };
    assert_eq!((ended, freed, how), (job, Some(slot), JobEnd::Cancelled));
    assert_eq!(sched.reserved(), 40);
}

#[test]
fn what_finds_no_memory_under_a_step_whose_job_is_over_waits_for_that_step() {
    let now = crate::clock::now();
    let mut sched = device();
    let (_, slot) = opened(&mut sched, now, 1, Class::Live, only(Stage::Flow));
    let Plan::Begin(flow) = sched.plan(now) else { panic!("a sound step") };
    sched.begun(now, flow.clone());
    sched.note(now, LineId(1), LineNote::Closed);
    let spec =
        JobSpec { line: LineId(2), class: Class::Live, token: TurnToken::forever(), tenant: "".into(), chars: 100 };
    let job = sched.submit(now, spec).expect("there is room");
    assert!(matches!(sched.plan(now), Plan::Open { job: next, .. } if next == job));
    sched.opened(job, Err(OpenError::Memory));
    assert!(matches!(sched.plan(now), Plan::Idle { .. }), "it waits, and does not fail");
    sched.finished(now, MS, &flow, &[outcome(slot, only(Stage::Vocode))]);
    assert!(matches!(sched.plan(now), Plan::End { .. }));
    assert!(matches!(sched.plan(now), Plan::Open { job: next, .. } if next == job));
}
