//! The published tables, row by row beside what a report measured.
//!
//! What was published is of other hardware and of requests that nobody listens to, as fast as the engine makes them; a
//! report is of calls, which take speech no faster than it is heard. What was not published is said to be so, and never
//! put together from something else.
//!
//! # Why
//! Ours is the measured level that is as heavy as the published one or the next heavier: a lighter load is answered no
//! later than that, so the comparison errs on the side of the published system.

use crate::forecast::cost::{S1_MINI_A10G, S1_MINI_PER_MINUTE};
use crate::forecast::size::{self, Demand, Measured};
use crate::run::report::{Level, Limits, P95_TURNS, PUBLISHED, RTX5090_20, RTX5090_80, RTX5090_80_PEAK, Report};

/// What stands where a figure was not published.
const UNPUBLISHED: &str = "not published";
/// What stands where the report has no level so heavy, or no figure.
const UNKNOWN: &str = "-";

/// One published table, with ours in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Of what.
    pub title: String,
    /// A name for each column.
    pub head: Vec<&'static str>,
    /// As many cells as there are columns in each.
    pub rows: Vec<Vec<String>>,
}

/// All published tables beside `report`, and its plan where there is one.
pub fn tables(report: &Report, measured: Option<&Measured>) -> Vec<Table> {
    let mut out = vec![ladder(report, RTX5090_20), ladder(report, RTX5090_80), expected(report), requests(report)];
    out.extend(measured.map(users));
    out
}

/// The lightest level that is no lighter than `calls`.
fn at(report: &Report, calls: u32) -> Option<&Level> {
    report.levels.iter().filter(|l| l.turns > 0 && l.level >= calls).min_by_key(|l| l.level)
}

/// A percentile, where there are turns enough for one.
fn p95(value: f64, count: u64) -> String {
    if count >= P95_TURNS { format!("{value:.3}") } else { UNKNOWN.to_owned() }
}

/// What a load is good for, by the limits of the report and our stricter ones.
fn advice(report: &Report, level: &Level) -> &'static str {
    match () {
        () if Limits::strict().broken(level).is_empty() => "interactive, strict",
        () if report.limits.broken(level).is_empty() => "interactive",
        () if level.audio_s_per_s >= 1.0 => "batch",
        () => "nothing",
    }
}

/// Device memory, or that of the process where there is no device that has its own.
fn memory(level: &Level) -> String {
    match level.gateway {
        _ if level.metrics.gpu_memory > 0.0 => format!("{:.1} GB", level.metrics.gpu_memory / 1e9),
        Some(usage) => format!("{:.2} GB, no GPU", usage.rss as f64 / 1e9),
        None => UNKNOWN.to_owned(),
    }
}

fn ladder(report: &Report, system: &'static str) -> Table {
    let head = vec![
        "at a time",
        "ours at",
        "first audio p95, s",
        "ours",
        "RTF p95",
        "ours",
        "chars/s",
        "ours",
        "peak memory",
        "ours",
        "good for",
        "ours",
    ];
    let row = |calls: u32, theirs: [String; 4]| {
        let [first, rtf, chars, good] = theirs;
        let ours = at(report, calls);
        let told = |tell: &dyn Fn(&Level) -> String| ours.map_or(UNKNOWN.to_owned(), tell);
        vec![
            calls.to_string(),
            told(&|l| l.level.to_string()),
            first,
            told(&|l| p95(l.first_audio.p95, l.first_audio.count)),
            rtf,
            told(&|l| p95(l.rtf.p95, l.rtf.count)),
            chars,
            told(&|l| format!("{:.1}", l.chars_per_s)),
            UNPUBLISHED.to_owned(),
            told(&memory),
            good,
            told(&|l| advice(report, l).to_owned()),
        ]
    };
    let limits = report.limits;
    let mut rows: Vec<Vec<String>> = PUBLISHED
        .iter()
        .filter(|p| p.system == system)
        .map(|p| {
            let good = p.first_audio_p95 <= limits.first_audio_p95 && p.rtf_p95 <= limits.rtf_p95;
            let chars = p.chars_per_s.map_or(UNPUBLISHED.to_owned(), |c| format!("{c:.1}"));
            let good = if good { "interactive" } else { "batch" };
            row(p.level, [format!("{:.2}", p.first_audio_p95), format!("{:.2}", p.rtf_p95), chars, good.to_owned()])
        })
        .collect();
    if system == RTX5090_80 {
        let (calls, chars) = RTX5090_80_PEAK;
        let unknown = || UNPUBLISHED.to_owned();
        rows.push(row(calls, [unknown(), unknown(), format!("{chars:.1}"), unknown()]));
    }
    Table { title: format!("{system} (\"good for\" by the limits of this report)"), head, rows }
}

/// What TensorRT-LLM was hoped to do, beside the heaviest load of its users that was measured.
fn expected(report: &Report) -> Table {
    let row = |users: u32| {
        let ours = at(report, users);
        let told = |tell: &dyn Fn(&Level) -> String| ours.map_or(UNKNOWN.to_owned(), tell);
        vec![
            users.to_string(),
            told(&|l| l.level.to_string()),
            "0.1 to 0.2".to_owned(),
            told(&|l| p95(l.first_audio.p95, l.first_audio.count)),
            "0.04 to 0.05".to_owned(),
            told(&|l| l.metrics.engine_rtf.map_or(UNKNOWN.to_owned(), |r| format!("{r:.4}"))),
            "over 300".to_owned(),
            told(&|l| format!("{:.0}", l.chars_per_s)),
        ]
    };
    Table {
        title: "CosyVoice3-0.5B, TensorRT-LLM, expected and not measured".to_owned(),
        head: vec!["users", "ours at", "first audio, s", "ours, p95", "engine's RTF", "ours", "chars/s", "ours"],
        rows: vec![row(100), row(150)],
    }
}

/// Requests a minute on one A10G, beside turns a minute of calls.
fn requests(report: &Report) -> Table {
    let row = |(batch, rate): (u32, Option<f64>)| {
        let ours = at(report, batch);
        let turns = |l: &Level| format!("{:.0}", l.turns as f64 / l.seconds.max(f64::MIN_POSITIVE) * 60.0);
        vec![
            batch.to_string(),
            ours.map_or(UNKNOWN.to_owned(), |l| l.level.to_string()),
            rate.map_or(UNPUBLISHED.to_owned(), |rate| format!("{rate:.0}")),
            ours.map_or(UNKNOWN.to_owned(), turns),
        ]
    };
    Table {
        title: "S1-mini service on one A10G: 2.5 s a request".to_owned(),
        head: vec!["batch or calls", "ours at", "requests a minute", "our turns a minute"],
        rows: S1_MINI_PER_MINUTE.map(row).to_vec(),
    }
}

/// Cards for users who ask once in five minutes.
fn users(measured: &Measured) -> Table {
    let row = |(users, cards): (u64, u64)| {
        let ours = size::plan(&Demand { users, ..Demand::default() }, measured);
        let gpus = ours.gpus.map_or(UNKNOWN.to_owned(), |gpus| gpus.to_string());
        vec![users.to_string(), cards.to_string(), gpus, ours.gateways.to_string()]
    };
    Table {
        title: "S1-mini service, one request per user in five minutes".to_owned(),
        head: vec!["users", "A10G cards", "our GPUs", "our gateways"],
        rows: S1_MINI_A10G.map(row).to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forecast::size::Origin;
    use crate::run::report::GatewayMetrics;
    use crate::turns::stats::Summary;

    #[test]
    fn every_published_row_stands_beside_the_level_that_is_as_heavy_or_heavier() {
        let level = |n: u32, p95: f64, count: u64| Level {
            level: n,
            seconds: 10.0,
            turns: u64::from(n) * 2,
            first_audio: Summary { count, p95, ..Summary::default() },
            rtf: Summary { count, p95: 1.0, ..Summary::default() },
            chars_per_s: f64::from(n) * 10.0,
            audio_s_per_s: f64::from(n) * 0.6,
            metrics: GatewayMetrics { gpu_memory: 9.04e9, engine_rtf: Some(0.002), ..GatewayMetrics::default() },
            ..Level::default()
        };
        let levels = vec![level(4, 0.021, 10), level(10, 0.025, 40), level(100, 2.5, 400)];
        let report = Report { levels, ..Report::default() };
        let measured = Measured {
            capacity: 100,
            devices: 2,
            gpus: true,
            sharing: 1,
            origin: Origin::Found,
            service: 3.0,
            speech: 2.7,
            occupied: 1.0,
            cores_per_call: None,
        };
        let all = tables(&report, Some(&measured));
        let cells = |table: usize, row: usize| all[table].rows[row].iter().map(String::as_str).collect::<Vec<_>>();
        for table in &all {
            assert!(table.rows.iter().all(|row| row.len() == table.head.len()), "{table:?}");
        }
        assert_eq!(all[0].rows.len(), 9, "4 to 48");
        // Of ten turns there is no 95th percentile.
        assert_eq!(cells(0, 0)[..6], ["4", "4", "1.83", "-", "1.15", "-"]);
        let unknown = UNPUBLISHED;
        assert_eq!(cells(0, 1)[..8], ["8", "10", "1.94", "0.025", "0.94", "1.000", "51.8", "100.0"]);
        assert_eq!(cells(0, 1)[8..], [unknown, "9.0 GB", "interactive", "interactive, strict"]);
        assert_eq!(cells(0, 8)[1..4], ["100", "12.48", "2.500"]);
        assert_eq!(cells(0, 8)[10..], ["batch", "batch"]);
        assert_eq!(cells(1, 3)[..8], ["24", "100", unknown, "2.500", unknown, "1.000", "55.0", "1000.0"]);
        assert_eq!(cells(2, 0), ["100", "100", "0.1 to 0.2", "2.500", "0.04 to 0.05", "0.0020", "over 300", "1000"]);
        assert_eq!(cells(2, 1)[1..4], ["-", "0.1 to 0.2", "-"], "no level is so heavy");
        assert_eq!(cells(3, 0), ["1", "4", "24", "48"]);
        assert_eq!(cells(3, 2), ["8", "10", unknown, "120"]);
        assert_eq!(cells(4, 0), ["1000", "3", "2", "1"]);
        assert_eq!(tables(&report, None).len(), 4);
    }
}
