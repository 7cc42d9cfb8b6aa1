//! A fleet in virtual time: callers, a balancer that needs no affinity, gateways with their devices, the registry in which
//! they tell of themselves, and what happens to them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use antiphon::sched::by_suitability;
use antiphon::turn::Class;

use super::super::rng::Rng;
use super::model::{Fate, Model, State};

/// Seconds in which device time of late fades to a third (`sched::load`).
const FADING: f64 = 10.0;
/// How often nodes tell of themselves (`cluster::registry`).
const TELLS: f64 = 1.0;
/// After a node has died, the registry and the balancer's OPTIONS have noticed (`cluster::view`).
const NOTICED: f64 = 5.0;
/// A call that was sent to a dead node is tried at another: a timer of the balancer.
const TRIED_AGAIN: f64 = 2.0;
/// Callers who were cut off wait so long, then call again.
const CALLS_AGAIN: (f64, f64) = (2.0, 20.0);
/// A drained node ends the calls that are left after so long; it is gone for so long.
const DRAINS: f64 = 300.0;
const RESTARTS: f64 = 20.0;
/// A turn that sounds later than this is late.
pub(super) const SOON: f64 = 0.2;
/// Shares are also kept for each minute.
const MINUTE: f64 = 60.0;

/// Where calls and their turns go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Policy {
    /// Node and device at random.
    Random,
    /// Nodes in turn; devices of a node in turn.
    RoundRobin,
    /// The node with the fewest calls, as a balancer counts them; the device with the fewest turns.
    LeastCalls,
    /// Nodes by what they told a second ago, the one with the most room first; devices by suitability.
    MostRoom,
    /// As the gateway does: the balancer takes nodes in turn, a full one sends the call on to the one with the most room;
    /// devices by suitability.
    Ours,
}

impl Policy {
    pub(super) const ALL: [Policy; 5] =
        [Policy::Random, Policy::RoundRobin, Policy::LeastCalls, Policy::MostRoom, Policy::Ours];

    pub(super) fn name(self) -> &'static str {
        match self {
            Policy::Random => "random",
            Policy::RoundRobin => "round robin",
            Policy::LeastCalls => "least calls",
            Policy::MostRoom => "most room",
            Policy::Ours => "ours",
        }
    }
}

/// What happens to nodes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    /// The first node loses its power, and stays away.
    Loss,
    /// All nodes are updated, so many at a time: drained, ended, started again.
    Deploy(usize),
}

/// What is simulated.
#[derive(Clone)]
pub(super) struct Scene<'a> {
    pub(super) nodes: usize,
    /// Of each node.
    pub(super) devices: usize,
    /// Turns a second that callers begin, at an instant in seconds; and the most that this ever is.
    pub(super) rate: &'a dyn Fn(f64) -> f64,
    pub(super) most: f64,
    /// Turns of a call on average; their number is geometric.
    pub(super) turns: f64,
    /// Between the end of a turn and the next: the caller speaks.
    pub(super) pause: (f64, f64),
    /// From one turn of a call to the next on average.
    pub(super) cycle: f64,
    pub(super) policy: Policy,
    pub(super) faults: &'a [(f64, Fault)],
    /// Not measured before, and until when.
    pub(super) from: f64,
    pub(super) until: f64,
    pub(super) seed: u64,
}

/// Turns of a minute.
#[derive(Clone, Copy, Debug, Default)]
struct Minute {
    turns: u64,
    late: u64,
}

/// What callers had.
#[derive(Default)]
pub(super) struct Outcome {
    /// Turns that were asked for, in calls that were answered or not.
    pub(super) turns: u64,
    /// Of these: those that sounded after [`SOON`] or not at all.
    pub(super) late: u64,
    /// Of these: those that no device took, or whose call no node took.
    pub(super) refused: u64,
    /// Turns with a gap.
    pub(super) gaps: u64,
    /// Turns that were heard when their node died, and calls that had to be placed again.
    pub(super) cut: u64,
    pub(super) dropped: u64,
    /// Calls that were sent to a node that was dead already.
    pub(super) misdirected: u64,
    /// First audio in tenths of milliseconds.
    first: Vec<u64>,
    minutes: Vec<Minute>,
    /// Turns of each device.
    shares: Vec<u64>,
}

impl Outcome {
    /// Share of turns that sounded soon.
    pub(super) fn in_time(&self) -> f64 {
        1.0 - self.late as f64 / self.turns.max(1) as f64
    }

    /// The worst minute of at least so many turns.
    pub(super) fn worst_minute(&self, least: u64) -> f64 {
        let shares = self.minutes.iter().filter(|minute| minute.turns >= least);
        shares.map(|minute| 1.0 - minute.late as f64 / minute.turns as f64).fold(1.0, f64::min)
    }

    /// First audio of those that sounded, in milliseconds.
    pub(super) fn quantile(&self, q: f64) -> f64 {
        let all: u64 = self.first.iter().sum();
        let mut left = (all as f64 * q) as u64;
        for (tenths, turns) in self.first.iter().enumerate() {
            if *turns > left {
                return tenths as f64 / 10.0;
            }
            left -= turns;
        }
        self.first.len() as f64 / 10.0
    }

    /// The busiest device over the mean one.
    pub(super) fn unevenness(&self) -> f64 {
        let mean = self.shares.iter().sum::<u64>() as f64 / self.shares.len().max(1) as f64;
        self.shares.iter().copied().max().unwrap_or(0) as f64 / mean.max(1e-9)
    }

    fn heard(&mut self, at: f64, from: f64, fate: Option<f64>) {
        if at < from {
            return;
        }
        let minute = ((at - from) / MINUTE) as usize;
        if self.minutes.len() <= minute {
            self.minutes.resize(minute + 1, Minute::default());
        }
        let late = fate.is_none_or(|first| first > SOON);
        self.turns += 1;
        self.late += u64::from(late);
        self.refused += u64::from(fate.is_none());
        self.minutes[minute].turns += 1;
        self.minutes[minute].late += u64::from(late);
        if let Some(first) = fate {
            let tenths = (first * 1e4) as usize;
            if self.first.len() <= tenths {
                self.first.resize(tenths + 1, 0);
            }
            self.first[tenths] += 1;
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The next of the Poisson process.
    Arrival,
    /// Somebody calls for so many turns.
    Call(u32),
    Turn(usize),
    Sounded(usize),
    Ended(usize),
    Tell,
    Fault(usize),
    Notice(usize),
    Ends(usize),
    Starts(usize),
}

#[derive(Clone, Default)]
struct Device {
    state: State,
    recent: f64,
    since: f64,
    /// Raised when its node ends: what was scheduled before is void.
    life: u32,
}

#[derive(Clone, Default)]
struct Node {
    up: bool,
    /// Takes no calls: drained, or noticed to be dead.
    out: bool,
    deployed: bool,
    calls: u32,
    /// The device that had the last turn.
    last: usize,
    /// Room that it told of, less the calls that were sent there since.
    told: f64,
}

struct Call {
    node: usize,
    device: Option<usize>,
    left: u32,
    /// Its turn is heard until then.
    until: f64,
    over: bool,
}

/// The fleet.
struct Fleet<'a> {
    scene: &'a Scene<'a>,
    model: &'a Model,
    rng: Rng,
    now: f64,
    /// When, in microseconds; in which order; what; in which life of its device.
    events: BinaryHeap<Reverse<(u64, u64, Event, u32)>>,
    order: u64,
    devices: Vec<Device>,
    nodes: Vec<Node>,
    calls: Vec<Call>,
    free: Vec<usize>,
    /// The node whose turn it is.
    next: usize,
    /// Nodes at a time of a deploy that goes on.
    deploy: usize,
    outcome: Outcome,
}

/// What callers have in a scene.
pub(super) fn run(scene: &Scene<'_>, model: &Model) -> Outcome {
    let node = Node { up: true, told: f64::from(model.full) * scene.devices as f64, ..Node::default() };
    let mut fleet = Fleet {
        scene,
        model,
        rng: Rng::new(scene.seed),
        now: 0.0,
        events: BinaryHeap::new(),
        order: 0,
        devices: vec![Device::default(); scene.nodes * scene.devices],
        nodes: vec![node; scene.nodes],
        calls: Vec::new(),
        free: Vec::new(),
        next: 0,
        deploy: 0,
        outcome: Outcome { shares: vec![0; scene.nodes * scene.devices], ..Outcome::default() },
    };
    // As many calls as there will be, somewhere between two turns; the turns that they have left are geometric again.
    let there = ((scene.rate)(0.0) * scene.cycle).round() as u64;
    for _ in 0..there {
        let (at, turns) = (fleet.between((0.0, scene.cycle)), fleet.turns());
        fleet.after(at, Event::Call(turns));
    }
    fleet.after(scene.cycle, Event::Arrival);
    fleet.after(0.0, Event::Tell);
    for (n, (at, _)) in scene.faults.iter().enumerate() {
        fleet.after(*at, Event::Fault(n));
    }
    while let Some(Reverse((at, _, event, life))) = fleet.events.pop() {
        fleet.now = at as f64 / 1e6;
        if fleet.now > scene.until {
            break;
        }
        fleet.handle(event, life);
    }
    fleet.outcome
}

impl Fleet<'_> {
    fn after(&mut self, seconds: f64, event: Event) {
        let life = match event {
            Event::Sounded(device) | Event::Ended(device) => self.devices[device].life,
            _ => 0,
        };
        self.order += 1;
        self.events.push(Reverse((((self.now + seconds) * 1e6) as u64, self.order, event, life)));
    }

    fn between(&mut self, (low, high): (f64, f64)) -> f64 {
        low + (high - low) * self.rng.unit()
    }

    fn handle(&mut self, event: Event, life: u32) {
        match event {
            Event::Arrival => self.arrival(),
            Event::Call(turns) => self.call(turns),
            Event::Turn(call) => self.turn(call),
            Event::Sounded(device) => {
                let device = &mut self.devices[device];
                device.state.starting -= u32::from(device.life == life);
            }
            Event::Ended(device) => {
                let device = &mut self.devices[device];
                device.state.live -= u32::from(device.life == life);
            }
            Event::Tell => {
                for node in 0..self.nodes.len() {
                    self.nodes[node].told = self.room(node);
                }
                self.after(TELLS, Event::Tell);
            }
            Event::Fault(n) => match self.scene.faults[n].1 {
                Fault::Loss => {
                    self.end_node(0, true);
                    self.after(NOTICED, Event::Notice(0));
                }
                Fault::Deploy(at_once) => {
                    self.deploy = at_once;
                    (0..at_once).for_each(|_| self.drain_next());
                }
            },
            Event::Notice(node) => self.nodes[node].out = true,
            Event::Ends(node) => self.restart(node),
            Event::Starts(node) => {
                let node = &mut self.nodes[node];
                (node.up, node.out) = (true, false);
                self.drain_next();
            }
        }
    }

    fn arrival(&mut self) {
        let gap = self.rng.gap(self.scene.most / self.scene.turns).as_secs_f64();
        self.after(gap, Event::Arrival);
        // Thinned to what it is at this instant (Lewis and Shedler, 1979).
        if self.rng.chance((self.scene.rate)(self.now) / self.scene.most) {
            let turns = self.turns();
            self.call(turns);
        }
    }

    /// Of a call.
    fn turns(&mut self) -> u32 {
        let more = 1.0 - 1.0 / self.scene.turns;
        let mut turns = 1;
        while self.rng.chance(more) {
            turns += 1;
        }
        turns
    }

    fn call(&mut self, turns: u32) {
        let Some(node) = self.node() else {
            // Told to come again later: what would have been its first turn did not sound.
            return self.outcome.heard(self.now, self.scene.from, None);
        };
        if !self.nodes[node].up {
            self.outcome.misdirected += 1;
            return self.after(TRIED_AGAIN, Event::Call(turns));
        }
        self.nodes[node].calls += 1;
        let call = Call { node, device: None, left: turns, until: 0.0, over: false };
        let id = match self.free.pop() {
            Some(id) => {
                self.calls[id] = call;
                id
            }
            None => {
                self.calls.push(call);
                self.calls.len() - 1
            }
        };
        self.turn(id);
    }

    fn turn(&mut self, id: usize) {
        let Call { node, device: last, left, over, .. } = self.calls[id];
        if over || left == 0 {
            self.free.push(id);
            self.calls[id].over = true;
            if !over {
                self.nodes[node].calls -= 1;
                if self.nodes[node].calls == 0 && self.nodes[node].out && self.nodes[node].up {
                    self.restart(node);
                }
            }
            return;
        }
        let device = self.device(node, last);
        let found = self.devices[device].state;
        let (now, from) = (self.now, self.scene.from);
        let fate = self.model.fate(found, now, &mut self.rng);
        self.devices[device].state.arrivals.add(now);
        let heard = match fate {
            Fate::Refused => {
                self.outcome.heard(now, from, None);
                0.0
            }
            Fate::Spoken { first, works, heard, gap } => {
                self.outcome.heard(now, from, Some(first));
                if now >= from {
                    self.outcome.gaps += u64::from(gap);
                    self.outcome.shares[device] += 1;
                }
                let faded = self.recent(device);
                let spoken = &mut self.devices[device];
                (spoken.recent, spoken.since) = (faded + self.model.each(), now);
                spoken.state.starting += 1;
                spoken.state.live += 1;
                self.after(first, Event::Sounded(device));
                self.after(works, Event::Ended(device));
                first + heard
            }
        };
        let pause = self.between(self.scene.pause);
        let call = &mut self.calls[id];
        (call.device, call.left, call.until) = (Some(device), left - 1, now + heard);
        self.after(heard + pause, Event::Turn(id));
    }

    /// Where a call is sent; `None`: nobody has room. The balancer knows of nodes that are out; of one that has died only
    /// after a while.
    fn node(&mut self) -> Option<usize> {
        let wanted = |fleet: &Self, node: usize| !fleet.nodes[node].out;
        let nodes: Vec<usize> = (0..self.nodes.len()).filter(|node| wanted(self, *node)).collect();
        let by_told = |a: &usize, b: &usize| self.nodes[*a].told.total_cmp(&self.nodes[*b].told);
        let chosen = match self.scene.policy {
            Policy::Random => nodes.get(self.rng.next() as usize % nodes.len().max(1)).copied(),
            Policy::LeastCalls => nodes.iter().copied().min_by_key(|node| self.nodes[*node].calls),
            Policy::MostRoom => nodes.iter().copied().max_by(by_told),
            Policy::RoundRobin | Policy::Ours => {
                self.next = nodes.iter().copied().find(|node| *node > self.next).or(nodes.first().copied())?;
                Some(self.next)
            }
        }?;
        self.nodes[chosen].told -= 1.0;
        if !self.nodes[chosen].up || self.room(chosen) > 0.0 {
            return Some(chosen);
        }
        // Full: 302 to the one with the most room by the registry; else 503, and the balancer tries another at random.
        let other = if matches!(self.scene.policy, Policy::Ours | Policy::MostRoom) {
            let free = nodes.iter().copied().filter(|node| *node != chosen && self.nodes[*node].told > 0.0);
            free.max_by(|a, b| self.nodes[*a].told.total_cmp(&self.nodes[*b].told))
        } else {
            Some(nodes[self.rng.next() as usize % nodes.len()])
        }?;
        self.nodes[other].told -= 1.0;
        (!self.nodes[other].up || self.room(other) > 0.0).then_some(other)
    }

    /// Live turns that a node could take beside its own.
    fn room(&self, node: usize) -> f64 {
        let devices = &self.devices[node * self.scene.devices..(node + 1) * self.scene.devices];
        let room = |device: &Device| f64::from(self.model.full.saturating_sub(device.state.live));
        if self.nodes[node].up { devices.iter().map(room).sum() } else { 0.0 }
    }

    fn device(&mut self, node: usize, last: Option<usize>) -> usize {
        let (count, first) = (self.scene.devices, node * self.scene.devices);
        match self.scene.policy {
            Policy::Random => first + self.rng.next() as usize % count,
            Policy::RoundRobin => {
                self.nodes[node].last = (self.nodes[node].last + 1) % count;
                first + self.nodes[node].last
            }
            Policy::LeastCalls => {
                (first..first + count).min_by_key(|device| self.devices[*device].state.live).unwrap_or(first)
            }
            Policy::MostRoom | Policy::Ours => {
                let told = |device: usize| self.model.load(self.devices[device].state, self.recent(device));
                by_suitability(Class::Live, last, (first..first + count).map(|device| (device, told(device))).collect())
                    [0]
            }
        }
    }

    fn recent(&self, device: usize) -> f64 {
        let device = &self.devices[device];
        device.recent * (-(self.now - device.since) / FADING).exp()
    }

    /// The process of a node ends with all that it has.
    fn end_node(&mut self, node: usize, killed: bool) {
        (self.nodes[node].up, self.nodes[node].calls) = (false, 0);
        for device in &mut self.devices[node * self.scene.devices..(node + 1) * self.scene.devices] {
            *device = Device { life: device.life + 1, ..Device::default() };
        }
        let measured = self.now >= self.scene.from;
        for id in 0..self.calls.len() {
            let call = &mut self.calls[id];
            if call.node != node || call.over {
                continue;
            }
            call.over = true;
            // A drained node lets what is spoken end.
            let (left, cut) = (call.left, killed && call.until > self.now);
            self.outcome.cut += u64::from(measured && cut);
            let left = left + u32::from(cut);
            if left > 0 {
                self.outcome.dropped += u64::from(measured);
                let wait = self.between(CALLS_AGAIN);
                self.after(wait, Event::Call(left));
            }
        }
    }

    /// Drains the next node of a deploy.
    fn drain_next(&mut self) {
        if self.deploy == 0 {
            return;
        }
        let Some(node) = self.nodes.iter().position(|node| node.up && !node.out && !node.deployed) else { return };
        (self.nodes[node].out, self.nodes[node].deployed) = (true, true);
        if self.nodes[node].calls == 0 {
            self.restart(node);
        } else {
            self.after(DRAINS, Event::Ends(node));
        }
    }

    /// Of a node that is drained: what is left of its calls ends.
    fn restart(&mut self, node: usize) {
        // Told once by its last call, and once when its time is over.
        if self.nodes[node].up && self.nodes[node].out {
            self.end_node(node, false);
            self.after(RESTARTS, Event::Starts(node));
        }
    }
}
