mod writing;

use std::collections::HashMap;

use super::latitude::Promise;
use super::*;
use crate::turn::Class;

const MS: Duration = Duration::from_millis(1);
/// What every job of the launched steps' tests needs.
const BYTES: u64 = 40;

pub(super) const LIMITS: EngineLimits = EngineLimits {
    slots: 4,
    width: PerStage::new([1, 2, 2, 2]),
    rounds: PerStage::splat(1),
    parks: true,
    launches: false,
    grows: false,
};

pub(super) fn spec(stream: u64, class: Class) -> JobSpec {
    JobSpec { stream: StreamId(stream), class, token: TurnToken::forever(), tenant: "".into(), chars: 100 }
}

fn scheduler(config: Config, limits: EngineLimits, memory: u64) -> Scheduler {
    Scheduler::new(config, limits, memory, &PerStage::splat(MS).into())
}

/// A device of two slots.
fn small(memory: u64) -> Scheduler {
    scheduler(Config::default(), EngineLimits { slots: 2, parks: false, ..LIMITS }, memory)
}

/// A device that can launch steps.
fn launching() -> Scheduler {
    let limits = EngineLimits { rounds: PerStage::new([1, 8, 8, 1]), parks: false, launches: true, ..LIMITS };
    scheduler(Config::default(), limits, 100)
}

fn only(stage: Stage) -> Stages {
    Stages::NONE.with(stage)
}

/// Submits a job that needs `bytes` and opens it.
fn opened(sched: &mut Scheduler, now: Instant, spec: JobSpec, bytes: u64, ready: Stages) -> (JobId, Slot) {
    let job = sched.submit(now, spec).expect("there is room");
    sched.sized(job, Need::exactly(bytes));
    let Plan::Open { slot, job: next } = sched.plan(now) else { panic!("it opens first") };
    assert_eq!(next, job);
    sched.opened(job, Ok(ready));
    (job, slot)
}

/// Seen when a job was cancelled that had waited for its patience: decoding ahead, which gives way to starving batch
/// work, never began again.
#[test]
fn batch_that_was_cancelled_starves_no_more() {
    let start = crate::clock::now();
    let mut sched = scheduler(Config::default(), LIMITS, 0);
    let (_, slot) = opened(&mut sched, start, spec(1, Class::Live), 0, only(Stage::Decode));
    sched.submit(start, spec(2, Class::Batch)).expect("batch always waits");
    let Plan::Run(step) = sched.plan(start) else { panic!("first audio is urgent") };
    let now = start + Config::default().batch_patience() + Duration::from_secs(1);
    assert!(sched.starvation.starves(now, &sched.config));
    sched.note(now, StreamId(2), StreamNote::Closed);
    assert!(matches!(sched.plan(now), Plan::End { how: JobEnd::Cancelled, .. }));
    let ahead = sched.submit(now, spec(1, Class::Live)).expect("goes on with an accepted turn");
    let all_decoded = Outcome { decoded: 24_000, ..Outcome::ready(slot, only(Stage::Flow)) };
    sched.record(now, MS, &step, &[all_decoded]);
    assert!(matches!(sched.plan(now), Plan::Open { job, .. } if job == ahead), "no batch work starves");
}

/// A vocoder step costs a millisecond a slot.
#[test]
fn batch_steps_are_longer_where_no_turn_came_for_a_minute() {
    let start = crate::clock::now();
    let limits = EngineLimits { slots: 40, width: PerStage::new([1, 2, 2, 40]), ..LIMITS };
    let mut seeds = Seeds::default();
    for width in [1, 2, 4, 8, 16, 32] {
        seeds.add(Stage::Vocode, width, MS * width as u32);
    }
    let mut sched = Scheduler::new(Config { batch_step_ms: 6, ..Config::default() }, limits, 0, &seeds);
    let vocodes = only(Stage::Vocode);
    for stream in 0..30 {
        opened(&mut sched, start, spec(stream, Class::Batch), 0, vocodes);
    }
    let members = |sched: &mut Scheduler, now| {
        let Plan::Run(step) = sched.plan(now) else { panic!("there is work") };
        let outcomes: Vec<Outcome> = step.slots.iter().map(|slot| Outcome::ready(*slot, vocodes)).collect();
        sched.record(now, MS * step.slots.len() as u32, &step, &outcomes);
        step.slots.len()
    };
    assert_eq!(members(&mut sched, start), 12, "nobody was there yet");
    let (_, slot) = opened(&mut sched, start, spec(99, Class::Live), 0, vocodes);
    let Plan::Run(step) = sched.plan(start) else { panic!("a first audio") };
    assert!(step.slots.contains(&slot));
    let done = |slot: &Slot| Outcome { done: true, ..Outcome::ready(*slot, Stages::NONE) };
    sched.record(start, MS, &Step { slots: vec![slot], ..step }, &[done(&slot)]);
    assert!(matches!(sched.plan(start), Plan::End { .. }));
    for (after, most) in [(0, 6), (59, 6), (60, 12)] {
        assert_eq!(members(&mut sched, start + Duration::from_secs(after)), most, "after {after} s");
    }
}

/// What is parked holds nothing: waiting for it to give something up would be waiting for ever.
#[test]
fn what_finds_no_memory_on_an_empty_device_fails_though_others_are_parked() {
    let now = crate::clock::now();
    let mut sched = scheduler(Config::default(), LIMITS, 100);
    let (batch, _) = opened(&mut sched, now, spec(1, Class::Batch), 60, only(Stage::Vocode));
    let live = sched.submit(now, spec(2, Class::Live)).expect("an idle device takes it");
    sched.sized(live, Need::exactly(60));
    assert!(matches!(sched.plan(now), Plan::Park { job, .. } if job == batch));
    assert!(matches!(sched.plan(now), Plan::Open { job, .. } if job == live));
    sched.opened(live, Err(OpenError::Memory));
    assert!(matches!(sched.plan(now), Plan::End { job, how: JobEnd::Failed(_), .. } if job == live));
    assert!(matches!(sched.plan(now), Plan::Run(_)), "batch comes back");
}

#[test]
fn as_many_streams_are_taken_as_there_is_capacity_for() {
    let now = crate::clock::now();
    for max_live in [2, 1_000] {
        let mut sched = scheduler(Config { max_live, ..Config::default() }, LIMITS, 0);
        let capacity = sched.load(now).capacity;
        for stream in 1..=capacity {
            sched.submit(now, spec(stream.into(), Class::Live)).expect("there is room");
        }
        assert!(sched.has_room(now).is_err());
        assert!(sched.submit(now, spec(99, Class::Live)).is_err(), "a capacity of {capacity}");
    }
}

/// The next sentence of a turn is written while the one before it sounds, which was made long ago.
#[test]
fn what_follows_speech_that_is_still_heard_is_no_new_turn() {
    let now = crate::clock::now();
    let mut sched = scheduler(Config { max_live: 1, ..Config::default() }, LIMITS, 0);
    let vocodes = only(Stage::Vocode);
    let (_, slot) = opened(&mut sched, now, spec(1, Class::Live), 0, vocodes);
    let step = Step { stage: Stage::Vocode, slots: vec![slot], rounds: 1 };
    assert_eq!(sched.plan(now), Plan::Run(step.clone()));
    let second = Duration::from_secs(1);
    let samples = crate::audio::samples_in(2 * second);
    sched.record(now, MS, &step, &[Outcome { samples, done: true, ..Outcome::ready(slot, Stages::NONE) }]);
    while !matches!(sched.plan(now), Plan::Idle { .. }) {}
    // Another stream takes the only place; a third would be refused.
    sched.submit(now, spec(2, Class::Live)).expect("there is room");
    assert!(sched.submit(now, spec(3, Class::Live)).is_err());
    sched.submit(now + second, spec(1, Class::Live)).expect("its listener hears it for a second more");
    sched.note(now + second, StreamId(1), StreamNote::Closed);
    assert!(sched.submit(now + second, spec(1, Class::Live)).is_err(), "it begins anew");
}

/// Seen with hops of 100 tokens and three of look-ahead under a lead limit of 100 tokens: decoding stopped
/// short of the next chunk and the listener heard a gap that never ended.
#[test]
fn decoding_goes_on_to_the_next_chunk_past_the_lead_limit() {
    let now = crate::clock::now();
    let mut sched = small(0);
    let decodes = only(Stage::Decode);
    let (_, slot) = opened(&mut sched, now, spec(1, Class::Live), 0, decodes);
    let step = Step { stage: Stage::Decode, slots: vec![slot], rounds: 1 };
    assert_eq!(sched.plan(now), Plan::Run(step.clone()));
    let decoded = crate::audio::samples_in(Config::default().max_lead());
    let outcome = Outcome { decoded, ..Outcome::ready(slot, decodes) };
    sched.record(now, MS, &step, std::slice::from_ref(&outcome));
    assert_eq!(sched.plan(now), Plan::Run(step.clone()), "the chunk is not complete yet");
    let complete = Outcome { ready: decodes.with(Stage::Flow), ..outcome };
    sched.record(now, MS, &step, &[complete]);
    let Plan::Run(next) = sched.plan(now) else { panic!("there is work") };
    assert_eq!(next.stage, Stage::Flow);
}

/// Seen with 200 listeners: most of the memory was held by utterances of which the last half second was missing,
/// resting at their lead limit, and new turns were refused.
#[test]
fn a_stream_goes_on_past_its_lead_limit_when_that_frees_memory() {
    let after_most_of_it = |memory: u64| {
        let now = crate::clock::now();
        let mut sched = small(memory);
        sched.forecast.spoken(crate::audio::samples_in(Duration::from_secs(8)), 100);
        let ready = only(Stage::Vocode);
        let (_, slot) = opened(&mut sched, now, spec(1, Class::Live), 60, ready);
        let step = Step { stage: Stage::Vocode, slots: vec![slot], rounds: 1 };
        assert_eq!(sched.plan(now), Plan::Run(step.clone()));
        let samples = crate::audio::samples_in(Duration::from_millis(7_400));
        sched.record(now, MS, &step, &[Outcome { samples, decoded: samples, ..Outcome::ready(slot, ready) }]);
        sched.plan(now)
    };
    assert!(matches!(after_most_of_it(1_000), Plan::Idle { .. }), "there is memory enough: it rests");
    assert!(matches!(after_most_of_it(100), Plan::Run(_)), "memory is short: it is finished");
}

#[test]
fn a_new_turn_runs_while_a_step_is_in_flight_until_it_needs_the_same_stage() {
    let now = crate::clock::now();
    let mut sched = launching();
    let (_, batch) = opened(&mut sched, now, spec(1, Class::Batch), BYTES, only(Stage::Flow));
    let Plan::Launch(flow) = sched.plan(now) else { panic!("it is not waited for") };
    assert_eq!((flow.stage, &flow.slots[..]), (Stage::Flow, &[batch][..]));
    assert!(matches!(sched.plan(now), Plan::Idle { .. }), "its slot is busy");
    let (_, live) = opened(&mut sched, now, spec(2, Class::Live), BYTES, only(Stage::Prefill));
    let Plan::Run(prefill) = sched.plan(now) else { panic!("first audio is urgent") };
    assert_eq!((prefill.stage, &prefill.slots[..]), (Stage::Prefill, &[live][..]));
    sched.record(now, MS, &prefill, &[Outcome::ready(live, only(Stage::Flow))]);
    assert!(matches!(sched.plan(now), Plan::Idle { .. }), "the flow has one step at a time");
    sched.complete(now, 7 * MS, &flow, &[Outcome::ready(batch, only(Stage::Flow))]);
    let Plan::Launch(next) = sched.plan(now) else { panic!("first audio goes on") };
    assert_eq!(next.slots[0], live);
    // What ran while another was in flight taught nothing about what it takes alone.
    assert!((sched.forecast.cost(Stage::Flow, 1, 1) - MS.as_secs_f64()).abs() < 1e-9);
}

#[test]
fn while_a_step_that_makes_first_audio_is_in_flight_only_short_ones_run() {
    let now = crate::clock::now();
    let mut rounds = [0, 0];
    for (class, rounds) in [Class::Live, Class::Batch].into_iter().zip(&mut rounds) {
        let mut sched = launching();
        opened(&mut sched, now, spec(1, class), BYTES, only(Stage::Flow));
        assert!(matches!(sched.plan(now), Plan::Launch(_)), "a sound step");
        opened(&mut sched, now, spec(2, Class::Live), BYTES, only(Stage::Decode));
        let Plan::Run(decode) = sched.plan(now) else { panic!("first audio is urgent") };
        *rounds = decode.rounds;
    }
    assert_eq!(rounds, [1, 4], "a millisecond, a quarter of the longest step");
}

/// Seen with 255 streams that speak: new turns decoded by themselves while a step was in flight, speaking ones had no
/// tokens when their listeners came near a gap.
#[test]
fn speaking_streams_decode_with_a_new_turn_beside_the_step_in_flight() {
    let now = crate::clock::now();
    let mut sched = launching();
    let decodes = only(Stage::Decode);
    let (_, speaking) = opened(&mut sched, now, spec(1, Class::Live), 0, decodes.with(Stage::Vocode));
    let vocode = Step { stage: Stage::Vocode, slots: vec![speaking], rounds: 1 };
    assert_eq!(sched.plan(now), Plan::Launch(vocode.clone()));
    let samples = crate::audio::samples_in(Duration::from_millis(900));
    let spoken = Outcome { samples, decoded: samples, ..Outcome::ready(speaking, decodes) };
    sched.complete(now, MS, &vocode, &[spoken]);
    let (_, flowing) = opened(&mut sched, now, spec(2, Class::Live), 0, only(Stage::Flow));
    let flow = Step { stage: Stage::Flow, slots: vec![flowing], rounds: 4 };
    assert_eq!(sched.plan(now), Plan::Launch(flow));
    let (_, new) = opened(&mut sched, now, spec(3, Class::Live), 0, decodes);
    let Plan::Run(step) = sched.plan(now) else { panic!("the new turn is urgent") };
    assert_eq!((step.stage, step.slots), (Stage::Decode, vec![new, speaking]));
}

/// Some eighty batch utterances a second were opened between two steps, for each of which the device stood still.
#[test]
fn batch_is_opened_beside_a_step_in_flight_unless_that_makes_first_audio() {
    let now = crate::clock::now();
    for (class, beside) in [(Class::Batch, true), (Class::Live, false)] {
        let mut sched = scheduler(Config::default(), limits_of_many(), 0);
        let (_, slot) = opened(&mut sched, now, spec(1, class), 0, only(Stage::Flow));
        let next = sched.submit(now, spec(2, Class::Batch)).expect("batch may wait");
        let Plan::Launch(flow) = sched.plan(now) else { panic!("the device does not wait for it") };
        let opens = |plan: Plan| matches!(plan, Plan::Open { job, .. } if job == next);
        assert_eq!(opens(sched.plan(now)), beside);
        if !beside {
            sched.complete(now, MS, &flow, &[Outcome::ready(slot, Stages::NONE)]);
            assert!(opens(sched.plan(now)), "nothing is left to run");
        }
    }
}

fn limits_of_many() -> EngineLimits {
    EngineLimits { slots: 20, width: PerStage::splat(16), launches: true, ..LIMITS }
}

/// Begun one by one beside the flow of the one before, 100 turns a second took half of the device before their flow.
#[test]
fn new_turns_begin_together_while_a_first_audio_is_in_flight() {
    let now = crate::clock::now();
    let prefills = |sched: &mut Scheduler, now| match sched.plan(now) {
        Plan::Run(step) if step.stage == Stage::Prefill => step.slots.len(),
        _ => 0,
    };
    let crowded = || {
        let mut sched = scheduler(Config::default(), limits_of_many(), 0);
        (0..100).for_each(|_| sched.arrivals.add(now));
        sched
    };
    let mut sched = crowded();
    opened(&mut sched, now, spec(1, Class::Live), 0, only(Stage::Flow));
    assert!(matches!(sched.plan(now), Plan::Launch(_)));
    for stream in 2..4 {
        opened(&mut sched, now, spec(stream, Class::Live), 0, only(Stage::Prefill));
    }
    assert_eq!(prefills(&mut sched, now), 0);
    assert_eq!(prefills(&mut sched, now + 59 * MS), 0);
    assert_eq!(prefills(&mut sched, now + 60 * MS), 2, "a fifth of the target is over");
    let mut sched = crowded();
    opened(&mut sched, now, spec(1, Class::Live), 0, only(Stage::Flow));
    assert!(matches!(sched.plan(now), Plan::Launch(_)));
    for stream in 2..2 + gather::TOGETHER as u64 {
        assert_eq!(prefills(&mut sched, now), 0);
        opened(&mut sched, now, spec(stream, Class::Live), 0, only(Stage::Prefill));
    }
    assert_eq!(prefills(&mut sched, now), gather::TOGETHER, "they are enough");
}

/// Turns of some seconds are made in one: a device that could keep up with many more streams has no time for all that is
/// due at once.
#[test]
fn turns_are_refused_when_more_is_due_than_there_is_time_for() {
    let now = crate::clock::now();
    let mut sched = scheduler(Config::default(), limits_of_many(), 0);
    let (_, first) = opened(&mut sched, now, spec(1, Class::Live), 0, only(Stage::Vocode));
    // A second of speech in two steps of 40 ms: all of twenty streams in real time would be less than half of the device.
    let samples = crate::audio::samples_in(Duration::from_millis(500));
    for made in 1..=2 {
        let Plan::Launch(step) = sched.plan(now) else { panic!("it can run") };
        let outcome = Outcome { samples, decoded: made * samples, ..Outcome::ready(first, only(Stage::Vocode)) };
        sched.complete(now, 40 * MS, &step, &[Outcome { done: made == 2, ..outcome }]);
    }
    while matches!(sched.plan(now), Plan::End { .. }) {}
    while sched.latitude.is_left() {
        sched.latitude.taken(Promise::Late);
    }
    let accepted = (2..20).take_while(|stream| sched.submit(now, spec(*stream, Class::Live)).is_ok()).count();
    assert!((2..12).contains(&accepted), "{accepted} turns at once");
    assert!(sched.forecast.load(20) < 0.5, "{}", sched.forecast.load(20));
    let refused = sched.submit(now, spec(99, Class::Live)).expect_err("no time for it");
    assert_eq!(refused.reason, RefusedReason::Overloaded);
    // Where few were late before, some more may be.
    sched.latitude = Latitude::default();
    let late = (20..40).take_while(|stream| sched.submit(now, spec(*stream, Class::Live)).is_ok()).count();
    assert!((1..=8).contains(&late), "{late} more, behind {accepted}");
    assert!(sched.submit(now, spec(99, Class::Live)).is_err());
}

#[test]
fn a_job_that_ends_under_its_step_gives_back_slot_and_memory_when_that_is_complete() {
    let now = crate::clock::now();
    let mut sched = launching();
    let (job, slot) = opened(&mut sched, now, spec(1, Class::Live), BYTES, only(Stage::Flow));
    let Plan::Launch(flow) = sched.plan(now) else { panic!("a sound step") };
    sched.note(now, StreamId(1), StreamNote::Closed);
    assert!(!sched.knows(StreamId(1)), "the stream is gone at once");
    let (_, other) = opened(&mut sched, now, spec(2, Class::Live), BYTES, only(Stage::Prefill));
    assert_ne!(other, slot);
    // 40 bytes are still held, as many are the other's.
    let third = sched.submit(now, spec(3, Class::Batch)).expect("batch may wait");
    sched.sized(third, Need::exactly(BYTES));
    assert_eq!(sched.table.reserved(), 2 * BYTES);
    let Plan::Run(prefill) = sched.plan(now) else { panic!("first audio is urgent") };
    sched.record(now, MS, &prefill, &[Outcome::ready(other, only(Stage::Flow))]);
    sched.complete(now, MS, &flow, &[Outcome::ready(slot, only(Stage::Vocode))]);
    let Plan::End { job: ended, slot: freed, how, .. } = sched.plan(now) else { panic!("its end is told now") };
    assert_eq!((ended, freed, how), (job, Some(slot), JobEnd::Cancelled));
    assert_eq!(sched.table.reserved(), BYTES);
}

#[test]
fn what_finds_no_memory_under_a_step_whose_job_is_over_waits_for_that_step() {
    let now = crate::clock::now();
    let mut sched = launching();
    let (_, slot) = opened(&mut sched, now, spec(1, Class::Live), BYTES, only(Stage::Flow));
    let Plan::Launch(flow) = sched.plan(now) else { panic!("a sound step") };
    sched.note(now, StreamId(1), StreamNote::Closed);
    let job = sched.submit(now, spec(2, Class::Live)).expect("there is room");
    assert!(matches!(sched.plan(now), Plan::Open { job: next, .. } if next == job));
    sched.opened(job, Err(OpenError::Memory));
    assert!(matches!(sched.plan(now), Plan::Idle { .. }), "it waits, and does not fail");
    sched.complete(now, MS, &flow, &[Outcome::ready(slot, only(Stage::Vocode))]);
    assert!(matches!(sched.plan(now), Plan::End { .. }));
    assert!(matches!(sched.plan(now), Plan::Open { job: next, .. } if next == job));
}

/// A device on which utterances take memory as they go, of 100 bytes.
fn growing() -> Scheduler {
    scheduler(Config::default(), EngineLimits { parks: false, grows: true, ..LIMITS }, 100)
}

/// Opens a job that is expected to need `expected` and wants `wants` for its next flow step.
fn wanting(sched: &mut Scheduler, now: Instant, spec: JobSpec, expected: u64, wants: u64) -> (JobId, Slot) {
    let job = sched.submit(now, spec).expect("there is room");
    sched.sized(job, Need { expected, most: 3 * expected });
    let Plan::Open { slot, job: next } = sched.plan(now) else { panic!("it opens first") };
    assert_eq!(next, job);
    sched.opened(job, Ok(only(Stage::Decode)));
    let step = Step { stage: Stage::Decode, slots: vec![slot], rounds: 1 };
    assert_eq!(sched.plan(now), Plan::Run(step.clone()));
    sched.record(now, MS, &step, &[Outcome { memory: wants, ..Outcome::ready(slot, only(Stage::Flow)) }]);
    (job, slot)
}

#[test]
fn memory_is_taken_when_it_is_used() {
    let now = crate::clock::now();
    let mut sched = growing();
    let (_, slot) = wanting(&mut sched, now, spec(1, Class::Live), 90, 30);
    assert_eq!((sched.table.reserved(), sched.table.claimed()), (0, 30), "a third of what is expected is promised");
    let Plan::Run(flow) = sched.plan(now) else { panic!("there is memory") };
    assert_eq!(sched.table.reserved(), 30);
    sched.record(now, MS, &flow, &[Outcome { memory: 30, done: true, ..Outcome::ready(slot, Stages::NONE) }]);
    assert_eq!(sched.table.reserved(), 0, "it is given back");
    // So much of what was expected was needed.
    let job = sched.submit(now, spec(2, Class::Live)).expect("there is room");
    sched.sized(job, Need { expected: 90, most: 270 });
    assert_eq!(sched.table.job(job).map(|job| job.memory.expected), Some(30));
}

#[test]
fn what_lacks_memory_waits_for_the_one_nearest_to_its_end() {
    let now = crate::clock::now();
    let mut sched = growing();
    let (job, near) = wanting(&mut sched, now, spec(1, Class::Batch), 40, 50);
    let Plan::Run(flow) = sched.plan(now) else { panic!("there is memory") };
    sched.record(now, MS, &flow, &[Outcome { memory: 60, decoded: 96_000, ..Outcome::ready(near, only(Stage::Flow)) }]);
    sched.block(job, true);
    let (_, far) = wanting(&mut sched, now, spec(2, Class::Batch), 40, 45);
    sched.block(job, false);
    let Plan::Run(flow) = sched.plan(now) else { panic!("the first gets on") };
    assert_eq!(flow.slots, [near], "there is no room for 45 bytes beside its 60");
    sched.record(now, MS, &flow, &[Outcome { memory: 60, done: true, ..Outcome::ready(near, Stages::NONE) }]);
    assert!(matches!(sched.plan(now), Plan::End { slot: Some(slot), .. } if slot == near));
    let Plan::Run(flow) = sched.plan(now) else { panic!("now there is memory") };
    assert_eq!(flow.slots, [far]);
}

#[test]
fn a_first_audio_takes_memory_from_batch_and_then_from_a_listener_with_enough_ahead() {
    let now = crate::clock::now();
    for class in [Class::Batch, Class::Live] {
        let mut sched = growing();
        let (first, slot) = wanting(&mut sched, now, spec(1, class), 60, 65);
        let Plan::Run(flow) = sched.plan(now) else { panic!("there is memory") };
        let samples = crate::audio::samples_in(Duration::from_secs(3));
        // All of it is decoded: it has no part in the step in which the turn decodes.
        let made = Outcome { samples, decoded: 2 * samples, memory: 70, ..Outcome::ready(slot, only(Stage::Flow)) };
        sched.record(now, MS, &flow, &[made]);
        let turn = wanting(&mut sched, now, spec(2, Class::Live), 40, 40);
        assert_eq!(sched.plan(now), Plan::Displace { slot, job: first }, "{class:?}");
        let Plan::Run(flow) = sched.plan(now) else { panic!("now there is memory") };
        assert_eq!(flow.slots, [turn.1]);
        assert_eq!(sched.table.stream(StreamId(1)).map(|stream| stream.lead(now)), Some(Duration::from_secs(3)));
    }
}

#[test]
fn an_utterance_that_needs_more_than_there_is_fails_and_says_so() {
    let now = crate::clock::now();
    let mut sched = growing();
    let (job, _) = wanting(&mut sched, now, spec(1, Class::Live), 90, 101);
    let Plan::End { job: ended, how: JobEnd::Failed(reason), .. } = sched.plan(now) else { panic!("it cannot go on") };
    assert_eq!(ended, job);
    assert!(reason.contains("101 bytes of device memory, 100 are there"), "{reason}");
}

/// Seen on a small card: turns were accepted and then silent for half a minute, with no word to the caller.
#[test]
fn an_accepted_turn_that_gets_no_room_fails_and_says_why() {
    let now = crate::clock::now();
    let mut sched = scheduler(Config::default(), EngineLimits { parks: false, ..LIMITS }, 100);
    let jobs = [1, 2].map(|stream| sched.submit(now, spec(stream, Class::Live)).expect("nothing is known of its need"));
    jobs.into_iter().for_each(|job| sched.sized(job, Need::exactly(60)));
    assert!(matches!(sched.plan(now), Plan::Open { job, .. } if job == jobs[0]));
    sched.opened(jobs[0], Ok(Stages::NONE));
    assert!(matches!(sched.plan(now + Duration::from_secs(10)), Plan::Idle { .. }));
    let Plan::End { job, how: JobEnd::Failed(reason), .. } = sched.plan(now + Duration::from_secs(11)) else {
        panic!("it does not wait for ever");
    };
    assert_eq!(job, jobs[1]);
    assert!(reason.contains("no room for it for 10 s"), "{reason}");
}
