//! Several devices: where new turns go, by the rule that the engine uses. Then many machines of them ([`table`]).

mod model;
mod nodes;
mod table;

use std::time::Duration;

use antiphon::sched::by_suitability;
use antiphon::turn::Class;

use super::engine::{Costs, Engine};
use super::policy::Kind;
use super::rng::Rng;
use super::world::{Event, World, zero};

/// Until all devices have spoken and are as busy as they will be; not measured.
const WARM: f64 = 5.0;
const MEASURED: f64 = 20.0;

/// The device that takes a turn of a call that spoke on `last`, as the engine does it: where the one that suits best refuses, the next
/// one is asked.
pub(super) fn taker(worlds: &[World], last: Option<usize>, at: Duration) -> usize {
    let at = zero() + at;
    let loads = worlds.iter().enumerate().map(|(device, world)| (device, world.load(at))).collect();
    let suited = by_suitability(Class::Live, last, loads);
    suited.iter().copied().find(|device| worlds[*device].has_room(at)).unwrap_or(suited[0])
}

/// Calls of several turns each, as a Poisson process, over `devices` alike; the device seconds that each spent on live steps, and
/// how many turns were refused.
fn fleet(devices: usize, turns_per_device: f64, seed: u64) -> (Vec<f64>, u32) {
    let costs = Costs::named("h200");
    let mut worlds: Vec<World> = (0..devices)
        .map(|device| {
            let mut world = World::new(Engine::new(costs.clone(), seed + device as u64), Kind::ours().build(&costs));
            world.measure_from = zero() + Duration::from_secs_f64(WARM);
            world
        })
        .collect();
    let mut rng = Rng::new(seed);
    let end = Duration::from_secs_f64(WARM + MEASURED);
    // Where each call spoke last, and when it will have been heard.
    let mut calls: Vec<(usize, Duration)> = Vec::new();
    let mut at = Duration::ZERO;
    loop {
        at += rng.gap(turns_per_device * devices as f64);
        if at > end {
            break;
        }
        worlds.iter_mut().for_each(|world| world.run(at));
        let tokens = rng.range(50, 200) as u32;
        let heard = at + Duration::from_millis(u64::from(tokens) * 40) + Duration::from_secs(1);
        // A call that has been heard out goes on, or a new one begins.
        let free = calls.iter().position(|(_, until)| *until <= at).filter(|_| rng.chance(0.8));
        let last = free.map(|call| calls[call].0);
        let device = taker(&worlds, last, at);
        let call = free.unwrap_or(calls.len());
        calls.resize(calls.len().max(call + 1), (device, heard));
        calls[call] = (device, heard);
        let (stream, class) = (call as u64, Class::Live);
        worlds[device].at(at, Event::Turn { stream, class, tenant: "", tokens: vec![tokens] });
    }
    worlds.iter_mut().for_each(|world| world.run(end));
    (worlds.iter().map(|world| world.report.busy).collect(), worlds.iter().map(|world| world.report.refused).sum())
}

#[test]
fn devices_are_loaded_alike() {
    for devices in [2, 4] {
        for (turns, seed) in [(4.0, 1), (16.0, 2)] {
            let (busy, refused) = fleet(devices, turns, seed);
            let even = busy.iter().sum::<f64>() / devices as f64;
            let most = busy.iter().fold(0.0f64, |most, one| most.max(*one));
            println!(
                "{devices} devices, {turns} turns a second each: busy {busy:.2?} s of {MEASURED}, {refused} refused"
            );
            assert_eq!(refused, 0);
            assert!(most <= 1.05 * even, "{busy:?} is not within 5 % of even");
        }
    }
}
