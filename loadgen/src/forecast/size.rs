//! How many gateways for how many users: Erlang's waiting formula on measured service times.
//!
//! A turn occupies one of the `c` streams of a gateway (its knee, or where none was found what [`predict`] expects) for
//! its service time (text to the end of its speech). Turns arrive as a Poisson process at the busy hour's rate; a turn
//! that finds all streams taken waits. The number of gateways is the smallest with which the wanted share of turns
//! waits no longer than allowed.
//!
//! # Why
//! Users times turns over capacity would be the mean load, and a system sized for its mean is overloaded half of the
//! time. Erlang C tells how much room random arrivals need; the larger the installation, the smaller its share.

use serde::Serialize;

use crate::forecast::erlang::{erlang_c, late_share};
use crate::forecast::predict;
use crate::run::report::{Level, Report};

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
    /// How long a turn may wait for a stream, seconds.
    pub wait: f64,
    /// Gateways more than these need, so that so many may be lost or replaced in the busy hour.
    pub spare: u64,
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
            spare: 0,
        }
    }
}

/// Where a capacity comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// A heavier load was seen to break the limits.
    Found,
    /// Nothing broke; by what calls cost, this is where something should run out.
    Predicted,
    /// Nothing broke, and nothing is known that would run out: a lower bound.
    Highest,
    /// Given on the command line.
    Told,
}

/// What a gateway was measured to do.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// Calls at a time.
    pub capacity: u32,
    /// Devices that it spoke with: each gateway of this kind needs as many.
    pub devices: u32,
    /// Whether these are GPUs.
    pub gpus: bool,
    /// Gateways that spoke with these devices at the same time, this one among them, and as much each.
    pub sharing: u32,
    /// Where the capacity comes from.
    pub origin: Origin,
    /// Mean seconds a turn occupies a stream.
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
    /// Streams needed at a time.
    pub streams: u64,
    /// Gateways, those that are spare among them.
    pub gateways: u64,
    /// GPUs of all gateways together; `None` where the measured one spoke without.
    pub gpus: Option<u64>,
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
        let predicted = predict::predict(report).map(|p| p.capacity.min(1e6) as u32).filter(|c| *c > knee.level);
        let (capacity, origin) = match (knee.broken_at, predicted) {
            (Some(_), _) => (knee.level, Origin::Found),
            (None, Some(predicted)) => (predicted, Origin::Predicted),
            (None, None) => (knee.level, Origin::Highest),
        };
        Some(Measured {
            capacity,
            devices: predict::ready(report).count().max(1) as u32,
            gpus: report.has_gpu(),
            sharing: 1,
            origin,
            service: level.service.mean,
            speech: mean_speech,
            occupied,
            cores_per_call: level.gateway.map(|u| u.cores / f64::from(knee.level)),
        })
    }

    /// What a gateway speaks with, in words.
    pub fn with(&self) -> String {
        let kind = if self.gpus { "GPU" } else { "device (no GPU)" };
        let many = if self.gpus { "GPUs" } else { "devices (no GPUs)" };
        let what = if self.devices == 1 { format!("one {kind}") } else { format!("{} {many}", self.devices) };
        match self.sharing {
            0 | 1 => what,
            sharing => format!("{what} that {sharing} gateways share"),
        }
    }

    /// Turns that a gateway can have in progress at a time: its calls, as far as they were occupied.
    pub fn streams(&self) -> f64 {
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
    // A turn of more speech occupies its stream for longer by just that.
    let extra = demand.speech_per_turn.map_or(0.0, |s| s - measured.speech);
    let service = (measured.service + extra).max(0.05);
    let calls = turns_per_s * service;
    let streams = streams_for(calls, service, demand.percentile, demand.wait);
    let gateways = ((streams as f64 / measured.streams()).ceil() as u64).max(1) + demand.spare;
    let devices = (gateways * u64::from(measured.devices)).div_ceil(u64::from(measured.sharing.max(1)));
    Row {
        users: demand.users,
        turns_per_s,
        calls,
        streams,
        gateways,
        gpus: measured.gpus.then(|| devices.max(u64::from(measured.devices))),
        cores: measured.cores_per_call.map(|c| c * calls / measured.occupied),
        waiting: erlang_c(streams, calls),
    }
}

/// The fewest streams with which `percentile` of turns waits no longer than `wait`.
pub fn streams_for(load: f64, service: f64, percentile: f64, wait: f64) -> u64 {
    let mut streams = (load.floor() as u64 + 1).max(1);
    // Each step lowers the waiting share; the square root of the load is the order of what random arrivals need.
    let most = streams + 100 + (load.sqrt() * 20.0) as u64;
    while streams < most && late_share(streams, load, service, 1.0, wait) > 1.0 - percentile {
        streams += 1;
    }
    streams
}

/// What the plan rests on, in words.
pub fn assumptions(demand: &Demand, measured: &Measured) -> Vec<String> {
    let mut out = vec![
        format!(
            "{} turns per user and hour, busy hour {} times the mean, arriving at random (Poisson).",
            demand.turns_per_user_hour, demand.busy_hour
        ),
        format!(
            "A turn occupies a stream for {:.2} s on average{}; service times are taken as exponential, which is \
             pessimistic: measured ones vary less.",
            measured.service + demand.speech_per_turn.map_or(0.0, |s| s - measured.speech),
            demand.speech_per_turn.map_or(String::new(), |s| format!(" ({s} s of speech)"))
        ),
        format!(
            "{:.0} % of turns wait no longer than {} s for a stream (Erlang C over all gateways as one pool).",
            demand.percentile * 100.0,
            demand.wait
        ),
        format!(
            "One gateway with {} sustains {} calls at a time within the limits, each occupied {:.0} % of the time.",
            measured.with(),
            measured.capacity,
            measured.occupied * 100.0
        ),
    ];
    if demand.spare > 0 {
        out.push(format!(
            "{} of the gateways are spare: as many may be lost or replaced in the busy hour.",
            demand.spare
        ));
    }
    match measured.origin {
        Origin::Found | Origin::Told => {}
        Origin::Predicted => out.push("No knee was found: the capacity is predicted, not measured.".to_owned()),
        Origin::Highest => {
            out.push("No knee was found: the capacity is a lower bound, and so fewer gateways may do.".to_owned());
        }
    }
    if measured.cores_per_call.is_none() {
        out.push("The gateway's CPU was not sampled: no cores are given.".to_owned());
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::run::report::Knee;
    use crate::turns::stats::Summary;

    fn measured() -> Measured {
        Measured {
            capacity: 40,
            devices: 1,
            gpus: true,
            sharing: 1,
            origin: Origin::Found,
            service: 5.0,
            speech: 4.0,
            occupied: 0.9,
            cores_per_call: Some(0.01),
        }
    }

    /// Seen in a plan made from four cards in one process: it asked for a quarter of the cards that it took.
    #[test]
    fn gateways_of_several_devices_are_counted_with_all_of_them() {
        let level = Level {
            level: 800,
            seconds: 10.0,
            turns: 1_600,
            audio_s_per_s: 640.0,
            service: Summary { count: 1_600, mean: 5.0, ..Summary::default() },
            ..Level::default()
        };
        let ready = |device: &str| json!({ "state": "ready", "device": device });
        let devices =
            json!([ready("cuda:0"), ready("cuda:1"), ready("cuda:2"), { "state": "failed" }, ready("cuda:3")]);
        let knee = Some(Knee { level: 800, broken_at: Some(900) });
        let report = Report { devices, levels: vec![level], knee, ..Report::default() };
        let four = Measured::from_report(&report).expect("a level passed");
        assert_eq!((four.devices, four.gpus, four.with()), (4, true, "4 GPUs".to_owned()));
        let demand = Demand { users: 100_000, ..Demand::default() };
        let row = plan(&demand, &four);
        assert_eq!((row.gateways, row.gpus), (3, Some(12)), "1,667 turns at a time of 800 a gateway");
        assert!(assumptions(&demand, &four)[3].contains("with 4 GPUs sustains 800 calls"));
        let spare = plan(&Demand { spare: 2, ..demand.clone() }, &four);
        assert_eq!((spare.gateways, spare.gpus), (5, Some(20)));
        // Two gateways on one card, which was measured while both spoke: five of them need three cards.
        let shared = Measured { sharing: 2, ..measured() };
        let row = plan(&Demand { users: 10_000, spare: 0, ..demand }, &shared);
        assert_eq!((row.gateways, row.gpus), (6, Some(3)), "{row:?}");
        let alone = plan(&Demand::default(), &Measured { devices: 2, sharing: 4, ..measured() });
        assert_eq!((alone.gateways, alone.gpus), (1, Some(2)), "one gateway still speaks with both");
        let without = Measured { gpus: false, ..measured() };
        assert_eq!((plan(&Demand::default(), &without).gpus, without.with()), (None, "one device (no GPU)".to_owned()));
    }

    #[test]
    fn more_users_need_more_gateways_but_less_room_for_chance() {
        let measured = measured();
        let rows: Vec<Row> =
            [1_000, 10_000, 50_000].map(|users| plan(&Demand { users, ..Demand::default() }, &measured)).to_vec();
        assert!(rows.windows(2).all(|w| w[1].gateways > w[0].gateways));
        let room: Vec<f64> = rows.iter().map(|r| r.streams as f64 / r.calls).collect();
        assert!(room.windows(2).all(|w| w[1] < w[0]), "{room:?}");
        // 1 000 users: 3.33 turns/s of 5 s are 16.7 erlang.
        assert!((rows[0].calls - 16.67).abs() < 0.01);
        assert_eq!(rows[0].gateways, 1);
    }
}
