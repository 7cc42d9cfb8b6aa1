use super::*;
use crate::sched::tests::{LIMITS, spec};
use crate::sched::{Config, Limits, Outcome};

/// A device of two slots.
fn small(memory: u64) -> Scheduler {
    Scheduler::new(Config::default(), Limits { slots: 2, parks: false, memory, ..LIMITS })
}

/// Seen with hops of 100 tokens and three of look-ahead under a lead limit of 100 tokens: decoding stopped
/// short of the next chunk and the listener ran dry for ever.
#[test]
fn decoding_goes_on_to_the_next_chunk_past_the_lead_limit() {
    let now = crate::clock::now();
    let mut sched = small(0);
    let job = sched.submit(now, spec(1, Class::Live)).expect("an idle device takes it");
    let Plan::Open { slot, job: opened } = sched.plan(now) else { panic!("it opens first") };
    assert_eq!(opened, job);
    let decodes = Stages::NONE.with(Stage::Decode);
    sched.opened(job, Ok(decodes));
    let step = Step { stage: Stage::Decode, slots: vec![slot], rounds: 1 };
    assert_eq!(sched.plan(now), Plan::Run(step.clone()));
    let decoded = crate::audio::samples_in(Config::default().max_lead());
    let outcome = Outcome { slot, ready: decodes, samples: 0, decoded, done: false, failed: None };
    sched.record(now, Duration::from_millis(1), &step, std::slice::from_ref(&outcome));
    assert_eq!(sched.plan(now), Plan::Run(step.clone()), "the chunk is not complete yet");
    let complete = Outcome { ready: decodes.with(Stage::Flow), ..outcome };
    sched.record(now, Duration::from_millis(1), &step, &[complete]);
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
        sched.learned.spoken(crate::audio::samples_in(Duration::from_secs(8)), 100);
        let job = sched.submit(now, spec(1, Class::Live)).expect("an idle device takes it");
        sched.sized(job, 60);
        let Plan::Open { slot, .. } = sched.plan(now) else { panic!("it opens first") };
        let ready = Stages::NONE.with(Stage::Vocode);
        sched.opened(job, Ok(ready));
        let step = Step { stage: Stage::Vocode, slots: vec![slot], rounds: 1 };
        assert_eq!(sched.plan(now), Plan::Run(step.clone()));
        let samples = crate::audio::samples_in(Duration::from_millis(7_400));
        let outcome = Outcome { slot, ready, samples, decoded: samples, done: false, failed: None };
        sched.record(now, Duration::from_millis(1), &step, &[outcome]);
        sched.plan(now)
    };
    assert!(matches!(after_most_of_it(1_000), Plan::Idle { .. }), "there is memory enough: it rests");
    assert!(matches!(after_most_of_it(100), Plan::Run(_)), "memory is short: it is finished");
}
