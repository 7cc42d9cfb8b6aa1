//! Jobs whose text is still being written.

use super::*;
use crate::sched::rank::{Rank, Ranking};

/// A live job that was given its first words: too few to run anything with, where `ready` is empty.
fn written(sched: &mut Scheduler, now: Instant, stream: u64, ready: Stages) -> (JobId, Slot) {
    let job = sched.submit(now, spec(stream, Class::Live)).expect("there is room");
    sched.begin_writing(job);
    sched.sized(job, Need::exactly(0));
    let Plan::Open { slot, job: next } = sched.plan(now) else { panic!("it opens first") };
    assert_eq!(next, job);
    sched.opened(job, Ok(ready));
    sched.fed(now, job, ready, false);
    (job, slot)
}

fn rank(sched: &Scheduler, now: Instant, job: JobId) -> Option<Rank> {
    Ranking::of(sched).candidates(now).iter().find(|c| c.job == job).map(|c| c.rank)
}

#[test]
fn a_job_that_waits_for_text_is_in_no_step_and_what_it_goes_on_with_is_not_late() {
    let now = crate::clock::now();
    let mut sched = small(0);
    let (job, slot) = written(&mut sched, now, 1, Stages::NONE);
    assert!(matches!(sched.plan(now), Plan::Idle { .. }));
    sched.written(job, 20);
    sched.fed(now, job, only(Stage::Prefill), false);
    let step = Step { stage: Stage::Prefill, slots: vec![slot], rounds: 1 };
    assert_eq!(sched.plan(now), Plan::Run(step.clone()));
    let sounded = Outcome { samples: 2_400, decoded: 2_400, ..Outcome::ready(slot, Stages::NONE) };
    sched.record(now, MS, &step, std::slice::from_ref(&sounded));
    assert_eq!(rank(&sched, now, job), None);
    // The listener hears silence for two seconds: the writer's.
    let later = now + 2_000 * MS;
    assert!(matches!(sched.plan(later), Plan::Idle { .. }));
    assert_eq!(sched.load(later).slack, None, "the device is late for nobody");
    sched.fed(later, job, only(Stage::Prefill), false);
    assert_eq!(rank(&sched, later, job), Some(Rank::First));
    sched.record(later, MS, &step, &[sounded]);
    sched.fed(later + 50 * MS, job, only(Stage::Decode), true);
    assert_eq!(rank(&sched, later + 200 * MS, job), Some(Rank::Critical), "a gap in the midst of text that is there");
}

#[test]
fn the_next_job_of_a_stream_waits_until_all_of_the_text_before_it_is_written() {
    let now = crate::clock::now();
    let mut sched = small(0);
    let (job, _) = written(&mut sched, now, 1, Stages::NONE);
    let next = sched.submit(now, spec(1, Class::Live)).expect("it goes on");
    assert!(matches!(sched.plan(now), Plan::Idle { .. }));
    sched.fed(now, job, only(Stage::Vocode), true);
    assert!(matches!(sched.plan(now), Plan::Open { job, .. } if job == next) || sched.table.slots.free() < 2);
}

/// Half of the streams wait for text most of the time, the others speak: nobody who speaks hears a gap, no step names a
/// slot that waits, and all of them come to their end.
#[test]
fn streams_that_wait_for_text_take_nothing_from_those_that_speak() {
    const STREAMS: usize = 16;
    /// Steps of vocoding that a text is worth, and how many each piece of a written one allows.
    const CHUNKS: usize = 20;
    const PIECE: usize = 2;
    let limits = EngineLimits {
        slots: STREAMS as u32 + 1,
        width: PerStage::new([0, 0, 0, STREAMS as u32]),
        parks: false,
        ..LIMITS
    };
    let mut sched = scheduler(Config::default(), limits, 0);
    let start = crate::clock::now();
    let mut now = start;
    let (mut left, mut allowed) = ([CHUNKS; STREAMS], [CHUNKS; STREAMS]);
    let mut underrun: [Option<Instant>; STREAMS] = [None; STREAMS];
    let mut slots = HashMap::new();
    let mut jobs = Vec::new();
    for (stream, allowed) in allowed.iter_mut().enumerate() {
        let job = sched.submit(now, spec(stream as u64, Class::Live)).expect("there is room");
        if stream % 2 == 0 {
            sched.begin_writing(job);
            *allowed = 0;
        }
        jobs.push(job);
    }
    let stream_of = |jobs: &[JobId], job: JobId| jobs.iter().position(|other| *other == job).expect("known");
    let ready = |left: usize, allowed: usize| {
        if left > 0 && allowed > CHUNKS - left { only(Stage::Vocode) } else { Stages::NONE }
    };
    let mut pieces = 0;
    for _ in 0..100_000 {
        // Every writer gives a piece each 300 ms.
        while pieces < CHUNKS / PIECE && now >= start + (pieces as u32 + 1) * 300 * MS {
            pieces += 1;
            for stream in (0..STREAMS).step_by(2) {
                allowed[stream] += PIECE;
                sched.written(jobs[stream], 5);
                let last = allowed[stream] >= CHUNKS;
                if sched.slot_of(jobs[stream]).is_some() {
                    sched.fed(now, jobs[stream], ready(left[stream], allowed[stream]), last);
                }
            }
        }
        match sched.plan(now) {
            Plan::Open { slot, job } => {
                let stream = stream_of(&jobs, job);
                slots.insert(slot, stream);
                sched.opened(job, Ok(ready(left[stream], allowed[stream])));
                sched.fed(now, job, ready(left[stream], allowed[stream]), allowed[stream] >= CHUNKS);
            }
            Plan::Run(step) => {
                now += 5 * MS;
                let outcomes: Vec<Outcome> = step
                    .slots
                    .iter()
                    .map(|slot| {
                        let stream = slots[slot];
                        assert!(allowed[stream] > CHUNKS - left[stream], "stream {stream} waits for text");
                        if stream % 2 == 1 {
                            assert!(underrun[stream].is_none_or(|at| at >= now), "stream {stream} hears a gap");
                        }
                        left[stream] -= 1;
                        underrun[stream] = Some(underrun[stream].unwrap_or(now) + 100 * MS);
                        let ready = ready(left[stream], allowed[stream]);
                        let made = Outcome { samples: 2_400, decoded: 2_400, ..Outcome::ready(*slot, ready) };
                        Outcome { done: left[stream] == 0, ..made }
                    })
                    .collect();
                sched.record(now, 5 * MS, &step, &outcomes);
            }
            Plan::End { how, .. } => assert_eq!(how, JobEnd::Done),
            Plan::Idle { .. } if left.iter().all(|left| *left == 0) => return,
            Plan::Idle { until } => now = until.unwrap_or(now + MS).max(now + MS).min(now + 10 * MS),
            other => panic!("{other:?}"),
        }
    }
    panic!("some never ended: {left:?}");
}
