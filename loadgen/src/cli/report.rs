//! `report` and `size`: what follows from a report that was written before.

use std::path::{Path, PathBuf};

use antiphon_loadgen::report::{FORMAT, Report};
use antiphon_loadgen::size::{self, Demand, Measured, Origin};
use antiphon_loadgen::{html, predict};
use clap::Args;

use super::{BAD_CONFIGURATION, FAILED, Failure};

#[derive(Args)]
pub(crate) struct Page {
    /// A report as `ladder` or `run` writes it
    report: PathBuf,
    /// Another report to compare it with, level by level
    #[arg(long, value_name = "REPORT")]
    before: Option<PathBuf>,
    /// Where the page goes
    #[arg(short, long)]
    output: Option<PathBuf>,
}

impl Page {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let report = read(&self.report)?;
        let output = self.output.clone().unwrap_or_else(|| self.report.with_extension("html"));
        let before = self.before.as_deref().map(read).transpose()?;
        std::fs::write(&output, html::compared(&report, before.as_ref()))
            .map_err(|e| Failure::new(FAILED, format!("write {}: {e}", output.display())))?;
        super::watch::conclude(&report);
        println!("  page                 {}", output.display());
        Ok(())
    }
}

#[derive(Args)]
pub(crate) struct Size {
    /// Numbers of users
    #[arg(long, value_delimiter = ',', default_value = "1000,10000,50000")]
    users: Vec<u64>,
    /// Turns of each user in a mean hour
    #[arg(long, default_value_t = Demand::default().turns_per_user_hour)]
    turns_per_user_hour: f64,
    /// Seconds of speech of a turn; measured ones when left out
    #[arg(long)]
    speech_per_turn: Option<f64>,
    /// The busiest hour over the mean one
    #[arg(long, default_value_t = Demand::default().busy_hour)]
    busy_hour: f64,
    /// Percentage of turns that must not wait longer than --wait
    #[arg(long, default_value_t = 95.0)]
    percentile: f64,
    /// Seconds a turn may wait for a place
    #[arg(long, default_value_t = Demand::default().wait)]
    wait: f64,
    /// A report of `ladder`, for service times and capacity
    #[arg(long, value_name = "REPORT")]
    from: Option<PathBuf>,
    /// Without a report: calls at a time that one gateway sustains
    #[arg(long, conflicts_with = "from", requires = "service")]
    capacity: Option<u32>,
    /// Without a report: seconds from a text to the end of its speech
    #[arg(long)]
    service: Option<f64>,
}

impl Size {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let positive = [self.turns_per_user_hour, self.busy_hour, self.speech_per_turn.unwrap_or(1.0)];
        if positive.iter().any(|v| !v.is_finite() || *v <= 0.0)
            || !(0.0..100.0).contains(&self.percentile)
            || self.wait < 0.0
        {
            return Err(Failure::new(2, "rates and times must be positive, the percentile below 100"));
        }
        let report = self.from.as_deref().map(read).transpose()?;
        let measured = match (&report, self.capacity, self.service) {
            (Some(report), ..) => Measured::from_report(report).ok_or_else(|| {
                Failure::new(FAILED, "no level of that report kept within its limits: nothing to size by")
            })?,
            (None, Some(capacity), Some(service)) if capacity > 0 && service > 0.0 => Measured {
                capacity,
                origin: Origin::Told,
                service,
                speech: service,
                occupied: 1.0,
                cores_per_call: None,
            },
            _ => return Err(Failure::new(2, "give --from REPORT, or --capacity and --service")),
        };
        let demand = |users| Demand {
            users,
            turns_per_user_hour: self.turns_per_user_hour,
            speech_per_turn: self.speech_per_turn,
            busy_hour: self.busy_hour,
            percentile: self.percentile / 100.0,
            wait: self.wait,
        };
        println!(
            "{:>10} {:>9} {:>14} {:>8} {:>6} {:>8} {:>9}",
            "users", "turns/s", "calls at once", "streams", "GPUs", "cores", "waiting"
        );
        for users in &self.users {
            let row = size::plan(&demand(*users), &measured);
            let cores = row.cores.map_or("-".to_owned(), |c| format!("{c:.1}"));
            println!(
                "{:>10} {:>9.2} {:>14.1} {:>8} {:>6} {cores:>8} {:>8.2}%",
                row.users,
                row.turns_per_s,
                row.calls,
                row.streams,
                row.gateways,
                row.waiting * 100.0
            );
        }
        println!("(a GPU: one gateway with one device of the measured kind)");
        for line in size::assumptions(&demand(0), &measured) {
            println!("- {line}");
        }
        for bound in report.as_ref().and_then(predict::predict).into_iter().flat_map(|p| p.bounds) {
            println!("- One gateway: {} runs out at {:.0} calls: {}.", bound.what, bound.calls, bound.basis);
        }
        if let Some(verdict) = report.as_ref().and_then(predict::verdict) {
            println!("- Prediction: {}.", verdict.text);
        }
        Ok(())
    }
}

fn read(path: &Path) -> Result<Report, Failure> {
    let wrong = |e: String| Failure::new(BAD_CONFIGURATION, format!("{}: {e}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|e| wrong(e.to_string()))?;
    let report: Report = serde_json::from_str(&text).map_err(|e| wrong(e.to_string()))?;
    if report.format != FORMAT {
        return Err(wrong(format!("format {} is not the {FORMAT} this program reads", report.format)));
    }
    Ok(report)
}
