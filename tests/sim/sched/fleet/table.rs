//! From users to gateways and GPUs: policies, the loss of a node, updates, a day.
//!
//! `cargo test --test sim -- --ignored fleet --nocapture` prints the tables and runs a small form
//! of each part, with what must hold.

use super::super::engine::Costs;
use super::model::{Fate, Model, SPEECH, observe};
use super::nodes::{Fault, Outcome, Policy, SOON, Scene, run};

/// Turns a second at which the scheduler is watched: idle, busy, and past its knee.
const RATES: [f64; 9] = [8.0, 25.0, 45.0, 65.0, 80.0, 95.0, 110.0, 125.0, 140.0];
/// Of the small form.
const FEW_RATES: [f64; 5] = [20.0, 45.0, 75.0, 100.0, 125.0];
/// What is to be in time.
const WANTED: f64 = 0.999;
/// A call has so many turns on average, and the caller answers for so long.
const TURNS: f64 = 6.0;
const PAUSE: (f64, f64) = (2.0, 6.0);
/// From one turn of a caller to the next, seconds.
const CYCLE: f64 = SPEECH + f64::midpoint(PAUSE.0, PAUSE.1);
/// Until devices are as busy as they will be; not measured.
const WARM: f64 = 10.0;
/// After the loss of a node it is measured for so long.
const AFTER: f64 = 120.0;
/// One request of a user in five minutes, as published.
const REQUEST: f64 = 300.0;

/// So many turns a second on `nodes` of `devices`, for `seconds`.
fn steady<'a>(rate: &'a dyn Fn(f64) -> f64, nodes: usize, devices: usize, seconds: f64) -> Scene<'a> {
    let most = rate(0.0);
    let (from, until) = (WARM, WARM + seconds);
    let policy = Policy::Ours;
    Scene {
        nodes,
        devices,
        rate,
        most,
        turns: TURNS,
        pause: PAUSE,
        cycle: CYCLE,
        policy,
        faults: &[],
        from,
        until,
        seed: 1,
    }
}

/// The most turns a second, to a fiftieth, at which enough of them are in time.
fn most(model: &Model, nodes: usize, devices: usize, seconds: f64, faults: &[(f64, Fault)]) -> f64 {
    let fits = |rate: f64| {
        let constant = |_: f64| rate;
        run(&Scene { faults, ..steady(&constant, nodes, devices, seconds) }, model).in_time() >= WANTED
    };
    let count = (nodes * devices) as f64;
    let (mut good, mut bad) = (0.0, 150.0 * count);
    while bad - good > 2.0 * count {
        let middle = f64::midpoint(good, bad);
        if fits(middle) { good = middle } else { bad = middle }
    }
    good
}

/// The fewest nodes that carry so many turns a second, and what is heard there.
fn fewest(
    model: &Model,
    rate: f64,
    devices: usize,
    seconds: f64,
    faults: &[(f64, Fault)],
    from: usize,
) -> (usize, Outcome) {
    let constant = |_: f64| rate;
    let mut nodes = from;
    loop {
        let outcome = run(&Scene { faults, ..steady(&constant, nodes, devices, seconds) }, model);
        if outcome.in_time() >= WANTED {
            return (nodes, outcome);
        }
        nodes += 1;
    }
}

/// First audio of what the real scheduler spoke, seconds in order, and the share of turns within [`SOON`].
fn real(rate: f64, seconds: f64, seed: u64) -> (Vec<f64>, f64) {
    let (seen, _) = observe(&Costs::named("h200"), rate, seconds, seed);
    let first = |fate: &Fate| match fate {
        Fate::Spoken { first, .. } => Some(*first),
        Fate::Refused => None,
    };
    let mut heard: Vec<f64> = seen.iter().filter_map(|seen| first(&seen.fate)).collect();
    heard.sort_by(f64::total_cmp);
    let soon = heard.iter().filter(|first| **first <= SOON).count();
    (heard, soon as f64 / seen.len() as f64)
}

/// What a device of the fleet is at such a rate, and the real scheduler beside it: median, 95th percentile, share in time.
fn beside(model: &Model, rate: f64, seconds: f64) -> [(f64, f64); 3] {
    let (heard, soon) = real(rate, seconds, 7);
    let constant = |_: f64| rate;
    let scene = Scene { turns: 1.0, ..steady(&constant, 1, 1, 10.0 * seconds) };
    let outcome = run(&scene, model);
    let at = |q: f64| heard[(heard.len() as f64 * q) as usize] * 1e3;
    let both = |q: f64| (at(q), outcome.quantile(q));
    let pairs = [both(0.5), both(0.95), (soon * 100.0, outcome.in_time() * 100.0)];
    println!(
        "{rate:>5.0} turns/s: p50 {:.0} ms, table {:.0}; p95 {:.0}, {:.0}; in time {:.2} %, {:.2} %",
        pairs[0].0, pairs[0].1, pairs[1].0, pairs[1].1, pairs[2].0, pairs[2].1
    );
    pairs
}

/// At a rate that the table was not made from, with other arrivals.
fn a_device_is_as_late_as_the_scheduler(model: &Model) {
    let [p50, p95, soon] = beside(model, 67.0, 8.0);
    let near = |(real, table): (f64, f64), share: f64| (real - table).abs() <= share * real;
    assert!(near(p50, 0.12) && near(p95, 0.15), "p50 {p50:?}, p95 {p95:?}");
    assert!((soon.0 - soon.1).abs() <= 0.5, "{soon:?} % in time");
}

fn devices_are_loaded_more_alike_than_at_random(model: &Model) {
    let rate = 4.0 * 4.0 * 60.0;
    let constant = |_: f64| rate;
    let with = |policy: Policy| run(&Scene { policy, ..steady(&constant, 4, 4, 30.0) }, model);
    let (ours, random) = (with(Policy::Ours), with(Policy::Random));
    println!("busiest device: {:.3} of the mean, at random {:.3}", ours.unevenness(), random.unevenness());
    assert!(ours.unevenness() < random.unevenness() && ours.in_time() >= WANTED, "{}", ours.in_time());
    let again = with(Policy::Ours);
    assert_eq!((again.turns, again.late, again.cut), (ours.turns, ours.late, ours.cut), "a function of its seed");
}

/// Just enough nodes cannot lose one, and some more can.
fn a_loss_is_borne_by_spare_nodes_only(model: &Model) {
    let rate = 620.0;
    let (enough, without) = fewest(model, rate, 1, 20.0, &[], 4);
    let constant = |_: f64| rate;
    let lost = |nodes: usize| {
        let faults = [(WARM, Fault::Loss)];
        run(&Scene { faults: &faults, ..steady(&constant, nodes, 1, 40.0) }, model)
    };
    let (just, spare) = (lost(enough), lost(enough + 2));
    println!(
        "{enough} nodes: {:.4} in time, {:.4} after a loss ({} turns cut); {} nodes: {:.4}",
        without.in_time(),
        just.in_time(),
        just.cut,
        enough + 2,
        spare.in_time()
    );
    assert!(just.in_time() < WANTED && just.cut > 0 && just.dropped >= just.cut && just.misdirected > 0);
    assert!(spare.in_time() >= WANTED, "{}", spare.in_time());
}

fn an_update_of_every_node_in_turn_is_not_heard(model: &Model) {
    let rate = 5.0 * 45.0;
    let constant = |_: f64| rate;
    let faults = [(WARM, Fault::Deploy(1))];
    let outcome = run(&Scene { faults: &faults, turns: 3.0, ..steady(&constant, 5, 1, 500.0) }, model);
    println!("update: {:.5} in time, {} calls ended by a drain", outcome.in_time(), outcome.dropped);
    assert!(outcome.in_time() >= WANTED && outcome.cut == 0 && outcome.misdirected == 0);
}

/// One test: the table is what takes its time.
#[test]
#[ignore = "not judged yet on a machine that does nothing else"]
fn a_fleet_in_small() {
    let model = &Model::of(&Costs::named("h200"), &FEW_RATES, 6.0);
    a_device_is_as_late_as_the_scheduler(model);
    devices_are_loaded_more_alike_than_at_random(model);
    a_loss_is_borne_by_spare_nodes_only(model);
    an_update_of_every_node_in_turn_is_not_heard(model);
}

#[test]
#[ignore = "takes minutes"]
fn fleet() {
    let began = antiphon::clock::now();
    let model = &Model::of(&Costs::named("h200"), &RATES, 12.0);
    println!("## One device, beside the real scheduler\n");
    for rate in [35.0, 72.0, 102.0, 118.0] {
        beside(model, rate, 10.0);
    }
    println!("\n## Users to gateways and GPUs\n");
    println!(
        "| users | turns/s | nodes x GPUs | in time | p99.9 | nodes x GPUs, one lost | in time after | turns cut |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    for (what, interval, devices) in [("a request in 5 minutes", REQUEST, 1), ("all talk at once", CYCLE, 4)] {
        for users in [1_000.0, 10_000.0, 50_000.0] {
            let rate = users / interval;
            let least = (rate / (100.0 * devices as f64)).floor().max(1.0) as usize;
            let seconds = (30_000.0 / rate).clamp(30.0, 3_000.0);
            let (nodes, calm) = fewest(model, rate, devices, seconds, &[], least);
            let faults = [(WARM, Fault::Loss)];
            let (more, lost) = fewest(model, rate, devices, AFTER, &faults, (nodes + 1).max(2));
            println!(
                "| {users} ({what}) | {rate:.1} | {nodes} x {devices} | {:.3} % | {:.0} ms | {more} x {devices} | {:.3} % | {} of {} |",
                calm.in_time() * 100.0,
                calm.quantile(0.999),
                lost.in_time() * 100.0,
                lost.cut,
                lost.turns
            );
        }
    }
    println!(
        "\n## Placement, 50 nodes of 4\n\n| turns/s a GPU | policy | in time | p50 | p99.9 | refused | busiest GPU |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for each in [80.0, 100.0, 110.0] {
        for policy in Policy::ALL {
            let constant = |_: f64| each * 200.0;
            let outcome = run(&Scene { policy, ..steady(&constant, 50, 4, 8.0) }, model);
            println!(
                "| {each} | {} | {:.3} % | {:.0} ms | {:.0} ms | {} of {} | {:.3} of the mean |",
                policy.name(),
                outcome.in_time() * 100.0,
                outcome.quantile(0.5),
                outcome.quantile(0.999),
                outcome.refused,
                outcome.turns,
                outcome.unevenness()
            );
        }
    }
    println!("\n## What GPUs carry: turns a second of each at 99.9 % in time\n");
    println!(
        "| fleet | GPUs | turns/s a GPU | callers at once | users, a request in 5 minutes |\n| --- | --- | --- | --- | --- |"
    );
    for (nodes, devices) in [(1, 1), (2, 1), (1, 4), (4, 4), (10, 4), (50, 4)] {
        let count = (nodes * devices) as f64;
        let rate = most(model, nodes, devices, 200.0 / count.sqrt(), &[]);
        println!(
            "| {nodes} x {devices} | {count} | {:.1} | {:.0} | {:.0} |",
            rate / count,
            rate * CYCLE,
            rate * REQUEST
        );
    }
    day(model);
    println!("\n(simulated in {:.0?})", antiphon::clock::now() - began);
}

/// A day in an hour on the fewest nodes that carry its busiest hour with one lost: all are updated and one is lost when
/// it is busiest.
fn day(model: &Model) {
    const DAY: f64 = 3_600.0;
    let callers = 50_000.0;
    let peak = callers / CYCLE;
    let rate = |at: f64| peak * (0.5 - 0.45 * ((at - WARM) / DAY * std::f64::consts::TAU).cos()) / 0.95;
    println!(
        "\n## A day in an hour, 50,000 callers at once at its peak\n\n| nodes x GPUs | what happens | in time | worst minute | gaps | dropped calls |"
    );
    println!("| --- | --- | --- | --- | --- | --- |");
    for nodes in [17, 20] {
        for (what, faults) in [
            ("nothing", vec![]),
            ("update, two at a time, through the peak", vec![(WARM + DAY * 0.4, Fault::Deploy(2))]),
            ("a node lost at the peak", vec![(WARM + DAY * 0.5, Fault::Loss)]),
        ] {
            let scene = steady(&rate, nodes, 4, DAY);
            let outcome = run(&Scene { most: peak, faults: &faults, ..scene }, model);
            println!(
                "| {nodes} x 4 | {what} | {:.3} % | {:.2} % | {} of {} | {} |",
                outcome.in_time() * 100.0,
                outcome.worst_minute(1_000) * 100.0,
                outcome.gaps,
                outcome.turns,
                outcome.dropped
            );
        }
    }
}
