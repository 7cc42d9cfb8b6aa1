use super::*;
use crate::turn::TurnToken;

pub(super) const LIMITS: Limits = Limits {
    slots: 4,
    width: [1, 2, 2, 2],
    rounds: [1; 4],
    parks: true,
    background: false,
    memory: 0,
    seeds: [Duration::from_millis(1); 4],
};

pub(super) fn spec(stream: u64, class: Class) -> JobSpec {
    JobSpec { stream: StreamId(stream), class, token: TurnToken::forever(), tenant: "".into(), chars: 100 }
}

/// Submits a job that needs `bytes` and opens it.
pub(super) fn opened(sched: &mut Scheduler, now: Instant, spec: JobSpec, bytes: u64, ready: Stages) -> (JobId, Slot) {
    let job = sched.submit(now, spec).expect("there is room");
    sched.sized(job, bytes);
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
    let mut sched = Scheduler::new(Config::default(), LIMITS);
    let decodes = Stages::NONE.with(Stage::Decode);
    let (_, slot) = opened(&mut sched, start, spec(1, Class::Live), 0, decodes);
    sched.submit(start, spec(2, Class::Batch)).expect("batch always waits");
    let Plan::Run(step) = sched.plan(start) else { panic!("first audio is urgent") };
    let now = start + Config::default().batch_patience() + Duration::from_secs(1);
    assert!(sched.batch_starves(now));
    sched.note(now, StreamId(2), StreamNote::Closed);
    assert!(matches!(sched.plan(now), Plan::End { how: JobEnd::Cancelled, .. }));
    let ahead = sched.submit(now, spec(1, Class::Live)).expect("goes on with an accepted turn");
    let all_decoded =
        Outcome { slot, ready: Stages::NONE.with(Stage::Flow), samples: 0, decoded: 24_000, done: false, failed: None };
    sched.record(now, Duration::from_millis(1), &step, &[all_decoded]);
    assert!(matches!(sched.plan(now), Plan::Open { job, .. } if job == ahead), "nobody is starving");
}

/// What is parked holds nothing: waiting for it to give something up would be waiting for ever.
#[test]
fn what_finds_no_memory_on_an_empty_device_fails_though_others_are_parked() {
    let now = crate::clock::now();
    let mut sched = Scheduler::new(Config::default(), Limits { memory: 100, ..LIMITS });
    let vocodes = Stages::NONE.with(Stage::Vocode);
    let (batch, _) = opened(&mut sched, now, spec(1, Class::Batch), 60, vocodes);
    let live = sched.submit(now, spec(2, Class::Live)).expect("an idle device takes it");
    sched.sized(live, 60);
    assert!(matches!(sched.plan(now), Plan::Park { job, .. } if job == batch));
    assert!(matches!(sched.plan(now), Plan::Open { job, .. } if job == live));
    sched.opened(live, Err(OpenError::Memory));
    assert!(matches!(sched.plan(now), Plan::End { job, how: JobEnd::Failed(_), .. } if job == live));
    assert!(matches!(sched.plan(now), Plan::Run(_)), "batch comes back");
}

#[test]
fn as_many_streams_are_taken_as_there_are_places() {
    let now = crate::clock::now();
    for max_live in [2, 1_000] {
        let mut sched = Scheduler::new(Config { max_live, ..Config::default() }, LIMITS);
        let places = sched.load(now).places;
        for stream in 1..=places {
            sched.submit(now, spec(stream.into(), Class::Live)).expect("there is a place");
        }
        assert!(sched.has_room(now).is_err());
        assert!(sched.submit(now, spec(99, Class::Live)).is_err(), "{places} places");
    }
}
