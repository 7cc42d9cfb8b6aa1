//! The capacity of a device: how long live streams hold a part of it, and how many the device could keep up with.

use std::time::{Duration, Instant};

use antiphon::sched::{Config, EngineLimits, JobSpec, Outcome, Plan, Scheduler, Seeds, Stage, Stages};
use antiphon::turn::{Class, StreamId, TurnToken};

use super::world::zero;

const MS: Duration = Duration::from_millis(1);
/// Device time of half a second of speech.
const STEP: Duration = Duration::from_millis(50);

/// Speaks what is there, one step of half a second for each utterance; gives the holding times, and the time.
fn drain(sched: &mut Scheduler, mut now: Instant) -> (Vec<Option<Duration>>, Instant) {
    let mut held = Vec::new();
    loop {
        match sched.plan(now) {
            Plan::Open { job, .. } => sched.opened(job, Ok(Stages::NONE.with(Stage::Vocode))),
            Plan::Run(step) => {
                now += STEP;
                let outcome = |slot| Outcome {
                    samples: 12_000,
                    decoded: 12_000,
                    done: true,
                    ..Outcome::ready(slot, Stages::NONE)
                };
                let outcomes: Vec<Outcome> = step.slots.iter().map(|slot| outcome(*slot)).collect();
                sched.record(now, STEP, &step, &outcomes);
            }
            Plan::End { holding, .. } => held.push(holding),
            Plan::Idle { .. } => return (held, now),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_stream_holds_its_part_from_the_first_utterance_to_the_end_of_the_last() {
    let limits = EngineLimits { parks: false, ..EngineLimits::of_one_stage(40, 1) };
    let mut sched = Scheduler::new(Config { load_limit: 0.9, ..Config::default() }, limits, 0, &Seeds::default());
    assert_eq!(sched.load(zero()).sustainable, 0.0, "nothing was spoken yet");
    let submit = |sched: &mut Scheduler, now, stream, class| {
        let spec =
            JobSpec { stream: StreamId(stream), class, token: TurnToken::forever(), tenant: "".into(), chars: 10 };
        sched.submit(now, spec).expect("accepted");
    };
    submit(&mut sched, zero(), 1, Class::Live);
    submit(&mut sched, zero() + 10 * MS, 1, Class::Live);
    assert_eq!(sched.load(zero() + 20 * MS).holding, 0.02, "it is held already");
    let (held, now) = drain(&mut sched, zero() + 20 * MS);
    assert_eq!(held, [None, Some(120 * MS)], "two utterances, one stream");
    submit(&mut sched, now, 2, Class::Batch);
    let (held, now) = drain(&mut sched, now);
    assert_eq!(held, [None], "batch work holds nothing of it");
    // A tenth of the device for each stream: nine of them within nine tenths.
    assert!((sched.load(now).sustainable - 9.0).abs() < 0.01, "{}", sched.load(now).sustainable);
    assert!((sched.load(now).holding - 0.12).abs() < 1e-9);
}
