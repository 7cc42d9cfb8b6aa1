//! A load: calls that come and go by a rule, with turns on each, and the figures of all of them.
//!
//! *Closed loop*: a fixed number of callers, each with its next turn when the last one has been heard. *Open loop*:
//! calls arrive as a Poisson process (open loop), whether or not the gateway keeps up; that is how users behave, and
//! the only mode in which a gateway that falls behind is seen to fall behind.
//!
//! # Why
//! Throughput is counted inside a window in which all callers are there, each turn by the part of it that lies in
//! the window: neither the ramp at the beginning nor the last long turn at the end distort it.

mod tally;

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use self::tally::Tally;

use crate::caller::call::{Leg, Setup};
use crate::clock;
use crate::run::report::Level;
use crate::run::snapshot::Snapshot;
use crate::sound::heard::Clip;
use crate::turns::corpus::{self, Text};
use crate::turns::exchange::{Exchange, Interjection, Plan, Saying, Turn};
use crate::turns::stats::Spread;
use crate::under_test::stages::{Followed, ORDER};

/// When calls come.
#[derive(Clone, Debug, PartialEq)]
pub enum Arrivals {
    /// So many callers, each calling again when its call is over.
    Closed(u32),
    /// Poisson, so many a second.
    Poisson(f64),
    /// At random times, but exactly so many in the whole time: what differs between two loads is not how lucky they were.
    Counted(u64),
    /// Poisson, at a rate that grows evenly from the first to the second.
    Ramp(f64, f64),
    /// So many at once, again after each interval.
    Burst(u32, Duration),
    /// At these instants after the start.
    Trace(Vec<Duration>),
}

/// What callers do besides listening, at random for each turn.
#[derive(Clone, Debug, Default)]
pub struct Behaviour {
    /// Share of turns that are interrupted by speech.
    pub barge_in: f64,
    /// Share of turns that are interrupted by a key.
    pub dtmf: f64,
    /// Share of turns in which the caller hangs up.
    pub hang_up: f64,
    /// When, after the onset, seconds.
    pub after: (f64, f64),
    /// What is said to interrupt; `None`: such turns are not interrupted.
    pub speech: Option<Arc<Clip>>,
}

/// A whole load.
#[derive(Clone)]
pub struct Load {
    /// When calls come.
    pub arrivals: Arrivals,
    /// How long they come.
    pub duration: Duration,
    /// So long at the beginning nothing is counted but failures: calls of an open loop have to become as many as
    /// they are going to be.
    pub warm_up: Duration,
    /// Turns of a closed loop, by which its callers begin.
    pub cycles: Cycles,
    /// Kinds of calls and their weights.
    pub legs: Vec<(Leg, f64)>,
    /// Turns of a call; `None`: as many as fit (closed loop only).
    pub turns: Option<RangeInclusive<u32>>,
    /// Between the end of a turn and the next, seconds, evenly spread.
    pub think: (f64, f64),
    /// What is spoken.
    pub texts: Vec<&'static Text>,
    /// What callers say, in place of texts that are sent; the plan's trigger must be [`Trigger::Speech`] then.
    ///
    /// [`Trigger::Speech`]: crate::turns::exchange::Trigger::Speech
    pub says: Vec<Arc<Saying>>,
    /// What callers do.
    pub behaviour: Behaviour,
    /// The same seed gives the same calls, texts and pauses.
    pub seed: u64,
    /// Calls at a time at most; more fail as `generator_limit`.
    pub most: u32,
    /// One turn in so many is compared sample by sample.
    pub sampled: u64,
    /// Cancelled: the load ends at once, with the figures that it has.
    pub stop: CancellationToken,
}

/// How a load is going, for who watches.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// Calls at this moment.
    pub calls: u32,
    /// Turns heard.
    pub turns: u64,
    /// Failures.
    pub failures: u64,
    /// First audio so far, 95th percentile.
    pub first_audio_p95: f64,
    /// Share of the time that has passed, 0 to 1.
    pub done: f64,
}

enum Event {
    Connected(Setup, Option<Duration>),
    Turn(Box<Turn>),
    /// A caller's next turn begins, so long after the one before it.
    Again(Duration),
    Failed(String),
}

/// Makes the load and gives its figures, the waterfall of a typical turn among the turns kept.
pub async fn run(
    plan: Arc<Plan>,
    load: Load,
    gateway_pid: Option<u32>,
    mut watch: impl FnMut(&Progress),
) -> (Level, Vec<Turn>) {
    let start = clock::now();
    let live = Arc::new(AtomicU32::new(0));
    // overflow: awaited; callers wait for the collector, which only adds numbers.
    let (events, mut received) = mpsc::channel(1_024);
    let ramp = match load.arrivals {
        // Callers that all began together would also speak together, and be refused as they never are later.
        Arrivals::Closed(n) if n > 1 => load.cycles.ramp(load.duration),
        Arrivals::Closed(_) => Duration::ZERO,
        _ => load.warm_up.min(load.duration / 2),
    };
    let window = (start + ramp, start + load.duration);
    let mode = if matches!(load.arrivals, Arrivals::Closed(_)) { "closed" } else { "open" };
    let lateness = AbortOnDropHandle::new(tokio::spawn(own_lateness(window.1)));
    let callers =
        AbortOnDropHandle::new(tokio::spawn(arrive(plan.clone(), load.clone(), start, ramp, live.clone(), events)));

    let inside = plan.gateway.clone().map(Followed::start);
    let mut tally = Tally::new(window, load.sampled.max(1));
    let (mut first, mut last) = (None, None);
    let mut tick = tokio::time::interval(Duration::from_millis(200));
    loop {
        tokio::select! {
            event = received.recv() => match event {
                Some(mut event) => {
                    if let (Event::Turn(turn), Some(inside)) = (&mut event, &inside) {
                        turn.stages = turn.name.as_ref().and_then(|name| inside.take(name)).unwrap_or_default();
                        let told = |stage: &&str| Some(((*stage).to_owned(), *turn.stages.get(*stage)?));
                        turn.waterfall.stages = ORDER.iter().filter_map(told).collect();
                    }
                    tally.add(event);
                }
                None => break,
            },
            () = load.stop.cancelled() => {
                tally.cut(clock::now());
                break;
            }
            _ = tick.tick() => {
                let now = clock::now();
                if now >= window.0 && now < window.1 {
                    tally.concurrency.add(f64::from(live.load(Ordering::Relaxed)));
                }
                if first.is_none() && now >= window.0 {
                    first = Some(Snapshot::take(&plan, gateway_pid).await);
                }
                if last.is_none() && now >= window.1 {
                    last = Some(Snapshot::take(&plan, gateway_pid).await);
                }
                let passed = now.saturating_duration_since(start).as_secs_f64() / load.duration.as_secs_f64();
                watch(&tally.progress(live.load(Ordering::Relaxed), passed.min(1.0)));
            }
        }
    }
    drop(callers);
    let last = match last {
        Some(last) => last,
        None => Snapshot::take(&plan, gateway_pid).await,
    };
    let deaf = match &plan.recognizer {
        // No caller listens any more: what this takes of the machine disturbs nobody.
        Some(recognizer) => tally.recognise(recognizer, &plan).await.err(),
        None => None,
    };
    let (mut level, turns) = tally.finish(&plan, mode);
    level.deaf = deaf.map(|error| error.to_string());
    level.incomplete = load.stop.is_cancelled();
    if let Arrivals::Counted(calls) = load.arrivals {
        level.offered = Some(calls as f64 / load.duration.as_secs_f64());
    }
    level.generator_lateness_p99 = match load.stop.is_cancelled() {
        true => 0.0,
        false => lateness.await.map_or(0.0, |s: Spread| s.summary().p99),
    };
    if let Some(first) = first {
        last.since(&first, &mut level);
    }
    (level, turns)
}

/// How long turns of a closed loop take with the pause after them, and so when its callers begin.
///
/// Callers begin such that turns are asked for as often from the first moment on as they are later: each as if it had been
/// there for ever and its next turn were due, which is the time until the next event of a renewal process (Cox, "Renewal Theory", 1962).
///
/// # Why
/// Callers who begin evenly ask for half as many again as soon as those of the first are back, while the last ones begin. If turns
/// are taken to be of any length between the shortest and the longest, where half of them take 1.5 s and half 5.5, 450 callers ask for
/// as many turns as 600 two seconds after they begin: a gateway then refuses some, and its knee seems to be a quarter lower than it is.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cycles(Vec<f64>);

impl Cycles {
    /// Turns that took so long, each as many of all, with a pause of `think` seconds after them, evenly spread. From turn to turn
    /// it is `mean` seconds, which may be more: a caller hears first that a turn has ended.
    pub fn of(turns: &[Duration], think: (f64, f64), mean: f64) -> Self {
        const PAUSES: u32 = 8;
        let pause = |n: u32| think.0 + (think.1 - think.0) * (f64::from(n) + 0.5) / f64::from(PAUSES);
        let with_pauses = |turn: &Duration| {
            let turn = turn.as_secs_f64();
            (0..PAUSES).map(move |n| turn + pause(n))
        };
        let mut cycles: Vec<f64> = turns.iter().flat_map(with_pauses).collect();
        cycles.sort_by(f64::total_cmp);
        let more = (mean - cycles.iter().sum::<f64>() / cycles.len().max(1) as f64).max(0.0);
        cycles.iter_mut().for_each(|cycle| *cycle += more);
        Self(cycles)
    }

    /// Of the longest turn with its pause; zero where none is known.
    pub fn longest(&self) -> Duration {
        Duration::from_secs_f64(self.0.last().copied().unwrap_or(0.0).max(0.0))
    }

    /// When a caller begins, of whom `share` have begun before, in seconds after the start; `None` where no turn is known.
    pub fn begins(&self, share: f64) -> Option<f64> {
        // Before an instant as many begin as there is of all cycles before it.
        let wanted = share * self.0.iter().sum::<f64>();
        let mut shorter = 0.0;
        for (n, cycle) in self.0.iter().enumerate() {
            let left = (self.0.len() - n) as f64;
            if shorter + left * cycle >= wanted {
                return Some((wanted - shorter) / left);
            }
            shorter += cycle;
        }
        self.0.last().copied()
    }

    /// How long callers begin in a load of `duration`: as long as the longest turn takes, or some times that to be a quarter of it at
    /// least; and half of it at most.
    ///
    /// # Why
    /// Where callers begin over one turn and a part of the next, the first of them speak again while the last ones begin, and both do so
    /// together ever after. Computed for turns of a few words, 2.7 s from one to the next: where callers begin over 3 s, there are tenths
    /// of a second in each turn in which a seventh more of them speak up than on average; where they begin over two turns, 4 % more.
    fn ramp(&self, duration: Duration) -> Duration {
        let (longest, least) = (self.longest(), duration / 4);
        let times = if longest.is_zero() { 1.0 } else { least.div_duration_f64(longest).ceil().max(1.0) };
        longest.mul_f64(times).clamp(least, duration / 2)
    }

    /// After what share of such a ramp a caller begins, of whom `share` have begun before: those of each cycle of it after those of the
    /// one before.
    fn begins_within(&self, ramp: Duration, share: f64) -> f64 {
        let longest = self.longest();
        if longest.is_zero() {
            return share;
        }
        let times = ramp.div_duration_f64(longest).round().max(1.0);
        let before = (share * times).floor();
        let at = self.begins(share * times - before).unwrap_or(0.0) / longest.as_secs_f64();
        ((before + at) / times).clamp(0.0, 1.0)
    }
}

/// Lets calls arrive until the time is over, then waits for the last of them.
async fn arrive(
    plan: Arc<Plan>,
    load: Load,
    start: Instant,
    ramp: Duration,
    live: Arc<AtomicU32>,
    events: mpsc::Sender<Event>,
) {
    let mut rng = StdRng::seed_from_u64(load.seed);
    let until = start + load.duration;
    let mut tasks = tokio::task::JoinSet::new();
    let load = Arc::new(load);
    let spawn = |tasks: &mut tokio::task::JoinSet<()>, seed: u64, forever: bool| {
        let caller = Caller {
            plan: plan.clone(),
            load: load.clone(),
            events: events.clone(),
            live: live.clone(),
            rng: StdRng::seed_from_u64(seed),
            until,
        };
        tasks.spawn(caller.run(forever));
    };
    if let Arrivals::Closed(callers) = load.arrivals {
        for n in 0..callers {
            let share = f64::from(n) / f64::from(callers.max(1));
            clock::sleep_until(start + ramp.mul_f64(load.cycles.begins_within(ramp, share))).await;
            spawn(&mut tasks, rng.random(), true);
        }
    } else {
        let mut at = start;
        let mut number = 0usize;
        while let Some(next) = next_arrival(&load.arrivals, start, at, load.duration, number, &mut rng) {
            if next >= until {
                break;
            }
            (at, number) = (next, number + 1);
            clock::sleep_until(at).await;
            if live.load(Ordering::Relaxed) >= load.most {
                let _ = events.send(Event::Failed("generator_limit".to_owned())).await;
                continue;
            }
            spawn(&mut tasks, rng.random(), false);
        }
    }
    // Every turn is bounded in time, and so is this.
    while tasks.join_next().await.is_some() {}
}

/// When call `number` arrives, the one before having arrived at `last`.
pub(crate) fn next_arrival(
    arrivals: &Arrivals,
    start: Instant,
    last: Instant,
    duration: Duration,
    number: usize,
    rng: &mut impl Rng,
) -> Option<Instant> {
    let chance = |rate: f64, rng: &mut dyn rand::RngCore| {
        let uniform: f64 = rng.random_range(f64::EPSILON..1.0);
        (rate > 0.0).then(|| Duration::from_secs_f64((-uniform.ln() / rate).min(86_400.0)))
    };
    match arrivals {
        Arrivals::Closed(_) => None,
        Arrivals::Poisson(rate) => Some(last + chance(*rate, rng)?),
        Arrivals::Counted(calls) => {
            // The first of those that are left, each as likely at any instant that is left.
            let left = calls.checked_sub(number as u64).filter(|left| *left > 0)?;
            let uniform: f64 = rng.random_range(f64::EPSILON..1.0);
            let time = (start + duration).saturating_duration_since(last);
            Some(last + time.mul_f64(1.0 - uniform.powf(1.0 / left as f64)))
        }
        Arrivals::Ramp(from, to) => {
            // Thinning: candidates at the highest rate, each kept with the share the rate has of it by then.
            let most = from.max(*to);
            let mut at = last;
            loop {
                at += chance(most, rng)?;
                let passed = at.saturating_duration_since(start).as_secs_f64() / duration.as_secs_f64();
                if passed >= 1.0 || rng.random_bool(((from + (to - from) * passed) / most).clamp(0.0, 1.0)) {
                    return Some(at);
                }
            }
        }
        Arrivals::Burst(size, every) => Some(start + *every * (number as u32 / (*size).max(1))),
        Arrivals::Trace(instants) => instants.get(number).map(|at| start + *at),
    }
}

struct Caller {
    plan: Arc<Plan>,
    load: Arc<Load>,
    events: mpsc::Sender<Event>,
    live: Arc<AtomicU32>,
    rng: StdRng,
    until: Instant,
}

impl Caller {
    async fn run(mut self, forever: bool) {
        loop {
            self.live.fetch_add(1, Ordering::Relaxed);
            let good = self.call().await;
            self.live.fetch_sub(1, Ordering::Relaxed);
            if !forever || clock::now() >= self.until {
                return;
            }
            if !good {
                // A gateway that refuses is not hammered by a caller who would not redial at once either.
                clock::sleep_until((clock::now() + Duration::from_secs(1)).min(self.until)).await;
            }
        }
    }

    /// One call; whether it went well.
    async fn call(&mut self) -> bool {
        let leg = pick(&self.load.legs, &mut self.rng);
        let (mut exchange, setup) = match Exchange::open(self.plan.clone(), leg).await {
            Ok(opened) => opened,
            Err(error) => {
                self.tell(Event::Failed(format!("{}_{}", leg.label(), error.cause()))).await;
                return false;
            }
        };
        self.tell(Event::Connected(setup, exchange.greeting)).await;
        let turns = self.load.turns.clone().map(|range| self.rng.random_range(range));
        let mut good = true;
        let mut said = 0;
        let mut last: Option<Instant> = None;
        while turns.is_none_or(|n| said < n) && (turns.is_some() || clock::now() < self.until) {
            let now = clock::now();
            if let Some(last) = last.replace(now) {
                self.tell(Event::Again(now.saturating_duration_since(last))).await;
            }
            let (turn, interjection) = if self.load.says.is_empty() {
                let Some(text) = corpus::sample(&self.load.texts, &mut self.rng) else { break };
                let interjection = self.interjection();
                (exchange.turn(text.text, interjection.as_ref()).await, interjection)
            } else {
                let saying = &self.load.says[self.rng.random_range(0..self.load.says.len())];
                (exchange.converse(saying).await, None)
            };
            said += 1;
            let over = turn.fault.as_deref() == Some("call_lost") || interjection.is_some_and(|i| i.hang_up);
            good &= turn.fault.is_none();
            self.tell(Event::Turn(Box::new(turn))).await;
            if over || (!good && turns.is_none()) {
                break;
            }
            let (least, most) = self.load.think;
            let think = if most > least { self.rng.random_range(least..most) } else { least };
            clock::sleep_until(clock::now() + Duration::from_secs_f64(think.max(0.0))).await;
        }
        exchange.close().await;
        good
    }

    fn interjection(&mut self) -> Option<Interjection> {
        let behaviour = &self.load.behaviour;
        let sample: f64 = self.rng.random();
        let (least, most) = behaviour.after;
        let after = if most > least { self.rng.random_range(least..most) } else { least };
        let after = Duration::from_secs_f64(after.max(0.0));
        let nothing = Interjection { after, ..Interjection::default() };
        if sample < behaviour.barge_in {
            Some(Interjection { speech: behaviour.speech.clone(), ..nothing })
        } else if sample < behaviour.barge_in + behaviour.dtmf {
            Some(Interjection { digits: Some("5".to_owned()), ..nothing })
        } else if sample < behaviour.barge_in + behaviour.dtmf + behaviour.hang_up {
            Some(Interjection { hang_up: true, ..nothing })
        } else {
            None
        }
    }

    async fn tell(&self, event: Event) {
        // overflow: awaited. The collector going away ends the load.
        let _ = self.events.send(event).await;
    }
}

fn pick(legs: &[(Leg, f64)], rng: &mut impl Rng) -> Leg {
    let total: f64 = legs.iter().map(|(_, weight)| weight.max(0.0)).sum();
    let mut sample = rng.random_range(0.0..total.max(f64::MIN_POSITIVE));
    for (leg, weight) in legs {
        sample -= weight.max(0.0);
        if sample < 0.0 {
            return *leg;
        }
    }
    legs.last().map_or(Leg::Sip, |(leg, _)| *leg)
}

/// How late timers of this process are: what the generator itself adds to any figure.
async fn own_lateness(until: Instant) -> Spread {
    let mut spread = Spread::default();
    let mut at = clock::now();
    while at < until {
        at += Duration::from_millis(20);
        clock::sleep_until(at).await;
        spread.add(clock::now().saturating_duration_since(at));
    }
    spread
}

#[cfg(test)]
mod tests;
