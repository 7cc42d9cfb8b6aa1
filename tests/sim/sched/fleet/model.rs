//! One device of a fleet: what became of turns on the simulated scheduler, by how busy the device was when they came.
//!
//! The scheduler plans some 500 steps for each second of a device, too many for a day of 200 devices. So a device of the
//! fleet is a table. The real scheduler speaks Poisson arrivals at rising rates on the recorded costs; each turn is filed
//! under the state that it found: turns that had not sounded yet, turns that still had work, and how many came of late. In the fleet a turn that
//! finds a device in that state is given the fate of one of them at random: refused, or when it sounds, how long it has
//! work, and how long it is heard. Tails are therefore those of the scheduler and of no fitted curve.
//!
//! The state at arrival does not say all; `a_device_is_as_late_as_the_scheduler` holds the table against the
//! scheduler at rates that it was not made from.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::time::Duration;

use antiphon::sched::Load;
use antiphon::turn::Class;

use super::super::engine::{Costs, Engine};
use super::super::policy::Kind;
use super::super::rng::Rng;
use super::super::world::{Event, World, zero};

/// Tokens a second.
const TOKENS: f64 = 25.0;
/// Learning and filling up; not measured.
const WARM: f64 = 4.0;
/// Turns of so many seconds on average, each up to a quarter longer or shorter: the published requests of 2.5 s and more.
pub(super) const SPEECH: f64 = 2.7;
/// Fewest turns that a state is judged by; states nearby help out.
const FEWEST: usize = 16;
/// States by turns that have work.
const LIVE: [u32; 22] = [0, 3, 6, 9, 12, 16, 20, 25, 30, 36, 42, 49, 56, 64, 76, 90, 106, 124, 144, 166, 190, 220];
/// States by turns that have not sounded.
const STARTING: [u32; 14] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 13, 17, 23, 31];
/// States by how many turns came of late, so many a second each.
const STEP: f64 = 15.0;
const STEPS: usize = 10;
/// Seconds in which what came fades to a third.
const LATELY: f64 = 2.0;

/// What a turn finds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct State {
    /// Turns that have not sounded yet.
    pub(super) starting: u32,
    /// Turns that have work, those included.
    pub(super) live: u32,
    pub(super) arrivals: Arrivals,
}

/// How many turns came of late.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Arrivals {
    rate: f64,
    until: f64,
}

impl Arrivals {
    /// A second.
    fn at(self, now: f64) -> f64 {
        self.rate * (-(now - self.until) / LATELY).exp()
    }

    /// One comes.
    pub(super) fn add(&mut self, now: f64) {
        *self = Self { rate: self.at(now) + 1.0 / LATELY, until: now };
    }
}

/// What becomes of a turn.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fate {
    Refused,
    /// All in seconds.
    Spoken {
        /// Until it sounds.
        first: f64,
        /// Until its last work is done.
        works: f64,
        /// How long it is heard.
        heard: f64,
        /// It had a gap.
        gap: bool,
    },
}

/// A turn that the scheduler was given.
pub(super) struct Seen {
    cell: usize,
    pub(super) fate: Fate,
}

/// Poisson arrivals of turns at one device for so many seconds, as the real scheduler serves them; and what it tells of itself.
pub(super) fn observe(costs: &Costs, rate: f64, seconds: f64, seed: u64) -> (Vec<Seen>, Load) {
    let mut world = World::new(Engine::new(costs.clone(), seed), Kind::ours().build(costs));
    let mut rng = Rng::new(seed);
    let (mut at, end) = (Duration::ZERO, Duration::from_secs_f64(WARM + seconds));
    let mut turns = Vec::new();
    loop {
        at += rng.gap(rate);
        if at > end {
            break;
        }
        let tokens = (SPEECH * TOKENS * (0.75 + 0.5 * rng.unit())).round();
        turns.push((at.as_secs_f64(), tokens / TOKENS));
        let stream = turns.len() as u64;
        world.at(at, Event::Turn { stream, class: Class::Live, tenant: "", tokens: vec![tokens as u32] });
    }
    world.run(end);
    let load = world.load(zero() + end);
    // Until the last of them is heard out.
    world.run(end + Duration::from_secs(30));
    let seconds = |events: &[(u64, std::time::Instant)]| -> HashMap<u64, f64> {
        events.iter().map(|(stream, at)| (*stream, (*at - zero()).as_secs_f64())).collect()
    };
    let (sounded, ended) = (seconds(&world.sounded), seconds(&world.ended));
    // What ends at an instant has left before what comes at it.
    let mut changes: Vec<(f64, i32, i32, usize)> = Vec::new();
    for (n, (at, _)) in turns.iter().enumerate() {
        let stream = n as u64 + 1;
        let (Some(first), Some(end)) = (sounded.get(&stream), ended.get(&stream)) else {
            changes.push((*at, 0, 0, n));
            continue;
        };
        changes.extend([(*first, -1, 0, n), (*end, 0, -1, n), (*at, 1, 1, n)]);
    }
    changes.sort_by(|a, b| a.0.total_cmp(&b.0).then((a.1 + a.2).cmp(&(b.1 + b.2))));
    let mut state = State::default();
    let mut seen = Vec::new();
    for (time, starting, live, n) in changes {
        let (at, heard) = turns[n];
        let stream = n as u64 + 1;
        if time == at && starting >= 0 && live >= 0 && at >= WARM {
            let fate = match (sounded.get(&stream), ended.get(&stream)) {
                (Some(first), Some(end)) => Fate::Spoken {
                    first: first - at,
                    works: end - at,
                    heard,
                    gap: world.report.gapped.contains(&stream),
                },
                _ => Fate::Refused,
            };
            seen.push(Seen { cell: cell(state, at), fate });
        }
        if time == at && starting >= 0 && live >= 0 {
            state.arrivals.add(at);
        }
        state.starting = state.starting.saturating_add_signed(starting);
        state.live = state.live.saturating_add_signed(live);
    }
    (seen, load)
}

/// The table.
pub(super) struct Model {
    cells: Vec<Vec<Fate>>,
    /// The same with every state that too few turns found filled up from those nearest to it, when it is first asked for.
    filled: Vec<OnceLock<Vec<Fate>>>,
    /// Live turns from which on most turns are refused.
    pub(super) full: u32,
    /// Of the device while it is in use, for placement.
    told: Load,
    /// Seconds of device time that a turn takes.
    each: f64,
}

impl Model {
    /// From the scheduler at each of `rates`, for so many seconds.
    pub(super) fn of(costs: &Costs, rates: &[f64], seconds: f64) -> Self {
        let mut cells = vec![Vec::new(); STARTING.len() * LIVE.len() * STEPS];
        let (mut told, mut each) = (Load::default(), 0.0);
        for (n, rate) in rates.iter().enumerate() {
            let (seen, load) = observe(costs, *rate, seconds, 100 + n as u64);
            let spoken = seen.iter().filter(|seen| matches!(seen.fate, Fate::Spoken { .. })).count();
            // Device time of late fades to a third in ten seconds; past its knee a device is busy all of the time.
            if load.recent > 0.0 && spoken == seen.len() {
                let faded = 10.0 * (1.0 - (-(WARM + seconds) / 10.0).exp());
                (told, each) = (load, load.recent / faded / rate);
            }
            for seen in seen {
                cells[seen.cell].push(seen.fate);
            }
        }
        let refused = |band: usize| {
            let turns = (0..cells.len()).filter(|at| coordinates(*at)[1] == band).flat_map(|at| &cells[at]);
            let count = |(refused, all), fate: &Fate| (refused + usize::from(matches!(fate, Fate::Refused)), all + 1);
            let (refused, all) = turns.fold((0usize, 0usize), count);
            2 * refused > all
        };
        let full = (0..LIVE.len()).find(|band| refused(*band)).map_or(u32::MAX, |band| LIVE[band]);
        let filled = cells.iter().map(|_| OnceLock::new()).collect();
        Self { cells, filled, full, told, each }
    }

    /// The fate of a turn that finds a device so.
    pub(super) fn fate(&self, found: State, now: f64, rng: &mut Rng) -> Fate {
        let at = cell(found, now);
        let fates = match &self.cells[at] {
            own if own.len() >= FEWEST => own,
            _ => self.filled[at].get_or_init(|| self.around(at)),
        };
        fates[(rng.next() % fates.len() as u64) as usize]
    }

    /// What turns met in the states nearest to one.
    fn around(&self, at: usize) -> Vec<Fate> {
        let here = coordinates(at);
        let distance = |other: usize| {
            let there = coordinates(other);
            (0..3).map(|n| here[n].abs_diff(there[n]).pow(2)).sum::<usize>()
        };
        let mut order: Vec<usize> = (0..self.cells.len()).filter(|other| !self.cells[*other].is_empty()).collect();
        order.sort_by_key(|other| distance(*other));
        let mut fates = Vec::new();
        for other in order {
            fates.extend_from_slice(&self.cells[other]);
            if fates.len() >= FEWEST {
                break;
            }
        }
        assert!(!fates.is_empty(), "a table of no turns");
        fates
    }

    /// Seconds of device time that a turn takes.
    pub(super) fn each(&self) -> f64 {
        self.each
    }

    /// What such a device tells of itself, with so much device time of late.
    pub(super) fn load(&self, found: State, recent: f64) -> Load {
        let load = f64::from(found.live) / self.told.sustainable.max(1.0);
        Load { live: found.live, live_open: found.live, load, recent, ..self.told }
    }
}

fn cell(state: State, now: f64) -> usize {
    let of = |bounds: &[u32], number: u32| bounds.iter().rposition(|from| *from <= number).unwrap_or(0);
    let step = ((state.arrivals.at(now) / STEP) as usize).min(STEPS - 1);
    (of(&STARTING, state.starting) * LIVE.len() + of(&LIVE, state.live)) * STEPS + step
}

/// Of a cell: by turns that had not sounded, by turns that had work, by arrivals.
fn coordinates(cell: usize) -> [usize; 3] {
    [cell / STEPS / LIVE.len(), cell / STEPS % LIVE.len(), cell % STEPS]
}
