//! How many gateways for how many users: Erlang's waiting formula on measured service times.
//!
//! A turn occupies one of the `c` places of a gateway (its knee) for its service time (text to the end of its
//! speech). Turns arrive by chance at the busy hour's rate; a turn that finds all places taken waits. The number of
//! gateways is the smallest with which the wanted share of turns waits no longer than allowed.
//!
//! # Why
//! Users times turns over capacity would be the mean load, and a system sized for its mean is overloaded half of the
//! time. Erlang C tells how much room chance needs; the larger the installation, the smaller its share.

use serde::Serialize;

use crate::report::{Knee, Level, Report};

/// What users do.
#[derive(Clone, Debug, PartialEq)]
pub struct Demand {
    /// How many there are.
    pub users: u64,
    /// Turns of each in a mean hour.
    pub turns_per_user_hour: f64,
    /// Seconds of speech of a turn; the measured ones when `None`.
    pub speech_per_turn: Option<f64>,
    /// The busiest hour over the mean one.
    pub busy_hour: f64,
    /// Share of turns that must not wait longer than allowed, 0 to 1.
    pub percentile: f64,
    /// How long a turn may wait for a place, seconds.
    pub wait: f64,
}

impl Default for Demand {
    fn default() -> Self {
        // One request per user in five minutes, as the published tables count.
        Demand {
            users: 1_000,
            turns_per_user_hour: 12.0,
            speech_per_turn: None,
            busy_hour: 1.0,
            percentile: 0.95,
            wait: 0.2,
        }
    }
}

/// What a gateway was measured to do.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// Calls at a time that kept within the limits.
    pub capacity: u32,
    /// Whether a heavier load was seen to break them; if not, the capacity is only a lower bound.
    pub found: bool,
    /// Mean seconds a turn occupies a place.
    pub service: f64,
    /// Mean seconds of speech of a turn.
    pub speech: f64,
    /// Share of the time a call of the measurement was occupied by a turn.
    pub occupied: f64,
    /// Cores of the gateway for each call at a time, where they were sampled.
    pub cores_per_call: Option<f64>,
}

/// What is needed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Users.
    pub users: u64,
    /// Turns a second in the busy hour.
    pub turns_per_s: f64,
    /// Turns in progress at a time, on average (erlangs).
    pub calls: f64,
    /// Places needed.
    pub places: u64,
    /// Gateways (each with one device of the measured kind).
    pub gateways: u64,
    /// Cores of all gateways together.
    pub cores: Option<f64>,
    /// Share of turns that wait at all.
    pub waiting: f64,
}

impl Measured {
    /// Takes the figures of the knee out of a report; `None` when no level passed.
    pub fn from_report(report: &Report) -> Option<Measured> {
        let knee = report.knee.filter(|k| k.level > 0)?;
        let level = report.at(knee.level)?;
        let mean_speech = level.audio_s_per_s / turns_per_s(level)?;
        let occupied = (level.service.mean * turns_per_s(level)? / f64::from(knee.level)).clamp(0.01, 1.0);
        Some(Measured {
            capacity: knee.level,
            found: knee.broken_at.is_some(),
            service: level.service.mean,
            speech: mean_speech,
            occupied,
            cores_per_call: level.gateway.map(|u| u.cores / f64::from(knee.level)),
        })
    }

    /// Turns that a gateway can have in progress at a time: its calls, as far as they were occupied.
    pub fn places(&self) -> f64 {
        (f64::from(self.capacity) * self.occupied).max(1.0)
    }
}

/// Turns a second of a level, by its throughput.
fn turns_per_s(level: &Level) -> Option<f64> {
    // Characters of the mean turn are not kept; service times of a closed loop are, and Little's law gives the rate
    // of an open one.
    let rate = level.turns as f64 / level.seconds;
    (rate > 0.0 && rate.is_finite() && level.service.mean > 0.0).then_some(rate)
}

/// Plans for `demand` with gateways as measured.
pub fn plan(demand: &Demand, measured: &Measured) -> Row {
    let turns_per_s = demand.users as f64 * demand.turns_per_user_hour * demand.busy_hour / 3_600.0;
    // A turn of more speech occupies its place for longer by just that.
    let extra = demand.speech_per_turn.map_or(0.0, |s| s - measured.speech);
    let service = (measured.service + extra).max(0.05);
    let calls = turns_per_s * service;
    let places = places_for(calls, service, demand.percentile, demand.wait);
    let gateways = ((places as f64 / measured.places()).ceil() as u64).max(1);
    Row {
        users: demand.users,
        turns_per_s,
        calls,
        places,
        gateways,
        cores: measured.cores_per_call.map(|c| c * calls / measured.occupied),
        waiting: erlang_c(places, calls),
    }
}

/// The fewest places with which `percentile` of turns waits no longer than `wait`.
pub fn places_for(load: f64, service: f64, percentile: f64, wait: f64) -> u64 {
    let mut places = (load.floor() as u64 + 1).max(1);
    // Each step lowers the waiting share; the square root of the load is the order of what chance needs.
    let most = places + 100 + (load.sqrt() * 20.0) as u64;
    while places < most && late_share(places, load, service, wait) > 1.0 - percentile {
        places += 1;
    }
    places
}

/// Share of turns that wait longer than `wait` (M/M/c).
pub fn late_share(places: u64, load: f64, service: f64, wait: f64) -> f64 {
    if load >= places as f64 {
        return 1.0;
    }
    erlang_c(places, load) * (-(places as f64 - load) * wait / service).exp()
}

/// Share of turns that find all places taken (Erlang's second formula), by the recursion of the first, which does
/// not overflow.
pub fn erlang_c(places: u64, load: f64) -> f64 {
    if load <= 0.0 {
        return 0.0;
    }
    if load >= places as f64 {
        return 1.0;
    }
    let blocked = erlang_b(places, load);
    let used = load / places as f64;
    blocked / (1.0 - used * (1.0 - blocked))
}

/// What the plan rests on, in words.
pub fn assumptions(demand: &Demand, measured: &Measured) -> Vec<String> {
    let mut out = vec![
        format!(
            "{} turns per user and hour, busy hour {} times the mean, arriving by chance (Poisson).",
            demand.turns_per_user_hour, demand.busy_hour
        ),
        format!(
            "A turn occupies a place for {:.2} s on average{}; service times are taken as exponential, which is \
             pessimistic: measured ones vary less.",
            measured.service + demand.speech_per_turn.map_or(0.0, |s| s - measured.speech),
            demand.speech_per_turn.map_or(String::new(), |s| format!(" ({s} s of speech)"))
        ),
        format!(
            "{:.0} % of turns wait no longer than {} s for a place (Erlang C over all gateways as one pool).",
            demand.percentile * 100.0,
            demand.wait
        ),
        format!(
            "One gateway with one device carries {} calls at a time within the limits, each occupied {:.0} % of the time.",
            measured.capacity,
            measured.occupied * 100.0
        ),
    ];
    if !measured.found {
        out.push("No knee was found: the capacity is a lower bound, and so fewer gateways may do.".to_owned());
    }
    if measured.cores_per_call.is_none() {
        out.push("The gateway's CPU was not sampled: no cores are told.".to_owned());
    }
    out
}

/// How many calls at a time a gateway should carry, by what calls cost where there was plenty of everything.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// Calls at a time.
    pub capacity: f64,
    /// What runs out: `cpu`, `device` or `places` (the lines that the gateway admits at once).
    pub bound: &'static str,
    /// Highest level that the prediction used.
    pub from: u32,
}

impl Prediction {
    /// By how much it is above (or, negative, below) the knee, as a share; `None` while nothing broke.
    pub fn deviation(&self, knee: &Knee) -> Option<f64> {
        knee.broken_at.map(|_| self.capacity / f64::from(knee.level.max(1)) - 1.0)
    }
}

/// Predicts the knee from the levels up to half of it (and at least the two lowest): cost grows evenly with calls,
/// and the knee is where the cores of the host (shared with the generator) or the device's time are used up, or where
/// the lines that the gateway admits at once are all taken.
pub fn predict(report: &Report) -> Option<Prediction> {
    let half = report.knee.map_or(u32::MAX, |k| k.level / 2);
    let mut used: Vec<&Level> = report.levels.iter().filter(|l| l.level <= half && l.turns > 0).collect();
    if used.len() < 2 {
        used = report.levels.iter().filter(|l| l.turns > 0).take(2).collect();
    }
    let from = used.iter().map(|l| l.level).max()?;
    let cost = |value: fn(&Level) -> Option<f64>, limit: f64| {
        let points: Vec<(f64, f64)> = used.iter().filter_map(|l| Some((f64::from(l.level), value(l)?))).collect();
        let (base, each) = line(&points)?;
        (each > 0.0).then(|| ((limit - base) / each).max(0.0))
    };
    let cpu = cost(|l| Some(l.gateway?.cores + l.generator?.cores), report.host.cores as f64).map(|c| (c, "cpu"));
    let busy = |l: &Level| {
        let seconds: f64 = l.metrics.stage_seconds.values().sum();
        (seconds > 0.0).then(|| seconds / l.seconds)
    };
    let device = cost(busy, 1.0).map(|c| (c, "device"));
    let places = admitted(report, &used).map(|c| (c, "places"));
    let (capacity, bound) = [cpu, device, places].into_iter().flatten().min_by(|a, b| a.0.total_cmp(&b.0))?;
    Some(Prediction { capacity, bound, from })
}

/// The heaviest level at which, by the formulas of Erlang (calls by chance) and Engset (a fixed number of callers), no
/// more turns find all places of the gateway taken than the limits allow; less than one turn of a level where they
/// allow none. `None` for a gateway that does not tell its places.
fn admitted(report: &Report, used: &[&Level]) -> Option<f64> {
    let told = report.devices.as_array()?.iter().filter_map(|device| device["places"].as_u64());
    let places = told.sum::<u64>();
    if places == 0 {
        return None;
    }
    // Of each call: turns in a level, and the share of the time that one is in progress.
    let (mut calls, mut turns, mut busy) = (0.0, 0.0, 0.0);
    for level in used {
        calls += f64::from(level.level);
        turns += level.turns as f64;
        busy += level.turns as f64 * level.service.mean / level.seconds;
    }
    let occupied = (busy / calls).clamp(0.0, 1.0);
    let open = used.iter().any(|level| level.mode == "open");
    let refused = |level: u64| match open {
        true => erlang_b(places, occupied * level as f64),
        false => engset(places, level, occupied),
    };
    // Where even twice the places would do, they are not what runs out.
    let fits = |level: &u64| {
        let turns = turns / calls * *level as f64;
        refused(*level) * turns <= (report.limits.failures * turns).max(0.5)
    };
    let most = (1..=places.saturating_mul(4)).take_while(fits).last().unwrap_or(0);
    (occupied > 0.0 && most < places.saturating_mul(4)).then_some(most as f64)
}

/// Share of arrivals that find all places taken and go away (Erlang's first formula).
pub fn erlang_b(places: u64, load: f64) -> f64 {
    (1..=places).fold(1.0, |b, n| load * b / (n as f64 + load * b))
}

/// Share of turns of `callers`, each in a turn for `occupied` of its time, that find all places taken by the others.
pub fn engset(places: u64, callers: u64, occupied: f64) -> f64 {
    let others = callers.saturating_sub(1);
    if others < places || occupied <= 0.0 {
        return 0.0;
    }
    if occupied >= 1.0 {
        return 1.0;
    }
    // Binomial, from its first term up; logarithms, as the first term of many callers is no number any more.
    let odds = (occupied / (1.0 - occupied)).ln();
    let mut term = others as f64 * (1.0 - occupied).ln();
    let mut taken = 0.0;
    for n in 0..=others {
        if n >= places {
            taken += term.exp();
        }
        term += ((others - n) as f64 / (n + 1) as f64).ln() + odds;
    }
    taken.min(1.0)
}

/// The prediction beside the knee that was found, in words; nothing when there is nothing to compare.
pub fn check(report: &Report) -> Option<String> {
    let predicted = predict(report)?;
    let knee = report.knee?;
    let off = predicted.deviation(&knee);
    let Prediction { capacity, bound, from } = predicted;
    Some(match off {
        Some(off) => format!(
            "Predicted from the levels up to {from}: {capacity:.0} calls ({bound} runs out); found: {} ({:+.0} %).",
            knee.level,
            off * 100.0
        ),
        None => format!(
            "Predicted from the levels up to {from}: {capacity:.0} calls ({bound} runs out); the knee was not reached at {}.",
            knee.level
        ),
    })
}

/// Least squares; a single point is taken as a line through nothing.
fn line(points: &[(f64, f64)]) -> Option<(f64, f64)> {
    let n = points.len() as f64;
    let (mx, my) = (points.iter().map(|p| p.0).sum::<f64>() / n, points.iter().map(|p| p.1).sum::<f64>() / n);
    let spread: f64 = points.iter().map(|p| (p.0 - mx).powi(2)).sum();
    match points {
        [] => None,
        [(x, y)] => (*x > 0.0).then(|| (0.0, y / x)),
        _ if spread <= 0.0 => None,
        _ => {
            let each = points.iter().map(|p| (p.0 - mx) * (p.1 - my)).sum::<f64>() / spread;
            Some((my - each * mx, each))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn erlang_c_is_that_of_the_tables() {
        // Hand-computed: 2 places, 1 erlang: B = 1/5, C = 1/3. 10 places, 8 erlang: C = 0.4092 (published tables).
        assert!((erlang_c(2, 1.0) - 1.0 / 3.0).abs() < 1e-12);
        assert!((erlang_c(10, 8.0) - 0.4092).abs() < 0.0005, "{}", erlang_c(10, 8.0));
        assert_eq!((erlang_c(3, 0.0), erlang_c(3, 3.0)), (0.0, 1.0));
        assert!(erlang_c(100_000, 99_000.0) < 0.1, "large systems do not overflow");
    }

    #[test]
    fn an_m_m_c_queue_waits_as_the_formula_says() {
        use rand::{Rng, SeedableRng};
        let mut rng = rand::rngs::StdRng::seed_from_u64(5);
        let mut draw = |rate: f64| -rng.random_range(f64::EPSILON..1.0f64).ln() / rate;
        let (places, service, load) = (12usize, 3.0, 9.6);
        let mut free = vec![0.0f64; places];
        let (mut now, mut late, turns) = (0.0, 0u32, 200_000);
        for _ in 0..turns {
            now += draw(load / service);
            let first = (0..places).min_by(|a, b| free[*a].total_cmp(&free[*b])).unwrap();
            let start = free[first].max(now);
            late += u32::from(start - now > 0.5);
            free[first] = start + draw(1.0 / service);
        }
        let simulated = f64::from(late) / f64::from(turns);
        let formula = late_share(places as u64, load, service, 0.5);
        assert!((simulated - formula).abs() < 0.01, "{simulated} {formula}");
    }

    #[test]
    fn more_users_need_more_gateways_but_less_room_for_chance() {
        let measured = Measured {
            capacity: 40,
            found: true,
            service: 5.0,
            speech: 4.0,
            occupied: 0.9,
            cores_per_call: Some(0.01),
        };
        let rows: Vec<Row> =
            [1_000, 10_000, 50_000].map(|users| plan(&Demand { users, ..Demand::default() }, &measured)).to_vec();
        assert!(rows.windows(2).all(|w| w[1].gateways > w[0].gateways));
        let room: Vec<f64> = rows.iter().map(|r| r.places as f64 / r.calls).collect();
        assert!(room.windows(2).all(|w| w[1] < w[0]), "{room:?}");
        // 1 000 users: 3.33 turns/s of 5 s are 16.7 erlang.
        assert!((rows[0].calls - 16.67).abs() < 0.01);
        assert_eq!(rows[0].gateways, 1);
    }

    #[test]
    fn places_that_are_taken_refuse_as_the_formulas_say() {
        // Hand-computed: B(1, 1) = 1/2, B(2, 1) = 1/5; published tables: B(10, 4.46) = 1 %.
        assert!((erlang_b(1, 1.0) - 0.5).abs() < 1e-12 && (erlang_b(2, 1.0) - 0.2).abs() < 1e-12);
        assert!((erlang_b(10, 4.461) - 0.01).abs() < 1e-4, "{}", erlang_b(10, 4.461));
        // The one place is taken when the other caller speaks; of two others at least one does: 1 - 0.7 * 0.7.
        assert!((engset(1, 2, 0.3) - 0.3).abs() < 1e-12 && (engset(1, 3, 0.3) - 0.51).abs() < 1e-12);
        assert_eq!((engset(5, 5, 0.9), engset(2, 9, 0.0), engset(2, 9, 1.0)), (0.0, 0.0, 1.0));
        assert!((engset(100, 20_000, 0.9) - 1.0).abs() < 1e-6, "many callers are no problem");
    }

    #[test]
    fn a_knee_is_predicted_from_what_calls_cost_below_it() {
        use crate::process::{Host, Usage};
        let level = |n: u32| Level {
            level: n,
            turns: 10,
            seconds: 10.0,
            gateway: Some(Usage { cores: 0.1 + 0.03 * f64::from(n), rss: 0 }),
            generator: Some(Usage { cores: 0.01 * f64::from(n), rss: 0 }),
            ..Level::default()
        };
        let report = Report {
            host: Host { cores: 2, ..Host::default() },
            levels: [4, 8, 16, 32, 47, 48].map(level).to_vec(),
            knee: Some(Knee { level: 47, broken_at: Some(48) }),
            ..Report::default()
        };
        let predicted = predict(&report).unwrap();
        assert!((predicted.capacity - 47.5).abs() < 0.1 && predicted.from == 16, "{predicted:?}");
        assert!(check(&report).unwrap().contains("+1 %"), "{:?}", check(&report));
    }
}
