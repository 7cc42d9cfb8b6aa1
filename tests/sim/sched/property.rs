//! What holds whatever happens: over thousands of small random worlds, each a function of its seed.
//!
//! The world itself asserts, in every run: no audio is lost, doubled or out of order on its stream (so a parked or
//! displaced utterance gives exactly what an undisturbed one gives); nothing runs for a cancelled stream; steps stay
//! within the engine's widths and memory; every job ends exactly once; live work is displaced only where memory ran
//! out.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use antiphon::sched::{Config, StreamNote};
use antiphon::turn::Class;

use super::engine::{Costs, Engine, TOKEN_BYTES};
use super::policy::Kind;
use super::rng::Rng;
use super::world::{Event, World};

const SCENARIOS: u64 = 10_000;
/// Longer than any scenario lasts.
const END: Duration = Duration::from_secs(3_600);

/// A small engine and a few streams that do everything streams do.
fn scenario(seed: u64) -> World {
    let mut rng = Rng::new(seed);
    let mut costs = Costs::named(["h200", "simple", "cpu"][rng.range(0, 2) as usize]);
    costs.slots = rng.range(1, 6) as u32;
    costs.width = costs.width.map(|width| if width == 0 { 0 } else { width.min(rng.range(1, 5) as u32) });
    costs.rounds = costs.rounds.map(|rounds| rounds.min(rng.range(1, 10) as u32));
    costs.parks = rng.chance(0.5);
    costs.concurrent = rng.chance(0.5).then(|| (1.0 + rng.unit(), rng.unit()));
    if rng.chance(0.5) {
        // Room for one to three of the longest utterances.
        costs.memory = 60 * TOKEN_BYTES * rng.range(1, 3);
        // Where there is a flow to grow by.
        costs.grows = rng.chance(0.5) && costs.width[2] > 0;
    }
    let config = Config {
        batch_patience_s: rng.range(1, 30) as u32,
        max_lead_ms: rng.range(1_000, 6_000) as u32,
        first_audio_target_ms: rng.range(20, 500) as u32,
        ..Config::default()
    };
    let policy = Kind::Ours(config).build(&costs);
    let mut world = World::new(Engine::new(costs, seed), policy);
    for stream in 0..rng.range(1, 8) {
        let class = if rng.chance(0.5) { Class::Live } else { Class::Batch };
        let tenant = ["", "a", "b"][rng.range(0, 2) as usize];
        for _ in 0..rng.range(1, 2) {
            let at = Duration::from_millis(rng.range(0, 4_000));
            let tokens = (0..rng.range(1, 3)).map(|_| rng.range(1, 60) as u32).collect();
            world.at(at, Event::Turn { stream, class, tenant, tokens });
        }
        let at = |rng: &mut Rng| Duration::from_millis(rng.range(0, 6_000));
        if rng.chance(0.2) {
            world.at(at(&mut rng), Event::Interrupt { stream });
        }
        if rng.chance(0.2) {
            let held = at(&mut rng);
            world.at(held, Event::Note { stream, note: StreamNote::Held });
            let resumed = held + Duration::from_millis(rng.range(1, 3_000));
            world.at(resumed, Event::Note { stream, note: StreamNote::Resumed });
        }
        if rng.chance(0.1) {
            world.at(at(&mut rng), Event::Note { stream, note: StreamNote::Unpaced });
        }
        if rng.chance(0.2) {
            world.at(at(&mut rng), Event::Note { stream, note: StreamNote::Closed });
        }
    }
    world
}

fn check(seed: u64, trace: bool) -> World {
    let mut world = scenario(seed);
    world.trace = trace;
    world.run(END);
    world.assert_empty();
    assert!(
        world.report.most_behind_batch <= 1,
        "live work waited for {} steps of batch",
        world.report.most_behind_batch
    );
    world
}

#[test]
fn ten_thousand_random_scenarios_keep_every_promise() {
    let (mut displaced, mut restarted, mut parked, mut resumed) = (0, 0, 0, 0);
    let (mut cancelled, mut refused, mut done) = (0, 0, 0);
    for seed in 0..SCENARIOS {
        match catch_unwind(AssertUnwindSafe(|| check(seed, false))) {
            Ok(world) => {
                displaced += world.report.displaced;
                restarted += world.report.restarted;
                parked += world.report.parked;
                resumed += world.engine.resumed;
                cancelled += world.report.cancelled;
                refused += world.report.refused;
                done += world.report.done;
            }
            Err(_) => panic!("seed {seed} failed: put `property {seed}` into tests/sim/sched/replay.txt to trace it"),
        }
    }
    println!(
        "{done} done, {cancelled} cancelled, {refused} refused, {displaced} displaced ({restarted} live), {parked} parked, {resumed} resumed"
    );
    // A test of what never happened would prove nothing. Live work gives way only where nothing else helps, so rarely.
    assert!(
        displaced > 100
            && restarted > 4
            && parked > 100
            && resumed > 100
            && cancelled > 100
            && refused > 100
            && done > 10_000
    );
}

/// What happened in a run, as far as it tells two runs apart.
fn summary(world: &World) -> (u64, u32, u32, Vec<Duration>, Vec<Duration>, Duration) {
    let report = &world.report;
    let (first, gaps) = (report.first_audio.clone(), report.underruns.clone());
    (report.steps, report.done, report.cancelled, first, gaps, world.engine.busy)
}

/// A seed is worth noting only if it does the same again: each of `replay.txt`, with every step printed, and some more.
#[test]
fn a_seed_replays() {
    let noted = include_str!("replay.txt").lines().filter_map(|line| line.strip_prefix("property "));
    let noted: Vec<u64> = noted.map(|seed| seed.trim().parse().expect("a number")).collect();
    assert!(!noted.is_empty(), "replay.txt names no seed");
    for seed in noted {
        assert_eq!(summary(&check(seed, true)), summary(&check(seed, false)), "seed {seed} went two ways");
    }
    let all: Vec<_> = (0..50).map(|seed| summary(&check(seed, false))).collect();
    assert_eq!(all, (0..50).map(|seed| summary(&check(seed, false))).collect::<Vec<_>>());
    // Another seed is another scenario.
    assert!(all.iter().filter(|other| **other == all[0]).count() == 1);
}
