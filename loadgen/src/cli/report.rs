//! `report` and `size`: what follows from a report that was written before.

use std::path::{Path, PathBuf};

use antiphon_loadgen::beside::{self, Table};
use antiphon_loadgen::cost::{self, Output};
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
    /// Without a report: GPUs that each gateway speaks with
    #[arg(long, default_value_t = 1, conflicts_with = "from")]
    gpus: u32,
    /// How many gateways spoke with the same GPUs while this one was measured, itself among them
    #[arg(long, value_name = "GATEWAYS", default_value_t = 1)]
    sharing: u32,
    /// Gateways more than needed: so many may be lost or replaced in the busy hour
    #[arg(long, value_name = "GATEWAYS", default_value_t = 0)]
    spare: u64,
    /// What one GPU costs an hour, in any currency: adds what calls and characters cost, and what a day brings
    #[arg(long, value_name = "PRICE", requires = "from")]
    gpu_hour: Option<f64>,
    /// What an interface asks for a million characters, in the same currency: adds from when on a GPU costs less
    #[arg(long, value_name = "PRICE", requires = "gpu_hour")]
    api_million: Option<f64>,
}

impl Size {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let prices = [self.gpu_hour.unwrap_or(1.0), self.api_million.unwrap_or(1.0)];
        let positive = [self.turns_per_user_hour, self.busy_hour, self.speech_per_turn.unwrap_or(1.0)];
        let mut positive = positive.into_iter().chain(prices);
        if positive.any(|v| !v.is_finite() || v <= 0.0) || !(0.0..100.0).contains(&self.percentile) || self.wait < 0.0 {
            return Err(Failure::new(2, "rates, times and prices must be positive, the percentile below 100"));
        }
        if self.sharing == 0 || self.gpus == 0 {
            return Err(Failure::new(2, "--sharing and --gpus are 1 or more"));
        }
        let report = self.from.as_deref().map(read).transpose()?;
        let mut measured = match (&report, self.capacity, self.service) {
            (Some(report), ..) => Measured::from_report(report).ok_or_else(|| {
                Failure::new(FAILED, "no level of that report kept within its limits: nothing to size by")
            })?,
            (None, Some(capacity), Some(service)) if capacity > 0 && service > 0.0 => Measured {
                capacity,
                devices: self.gpus,
                gpus: true,
                sharing: 1,
                origin: Origin::Told,
                service,
                speech: service,
                occupied: 1.0,
                cores_per_call: None,
            },
            _ => return Err(Failure::new(2, "give --from REPORT, or --capacity and --service")),
        };
        measured.sharing = self.sharing;
        let demand = |users| Demand {
            users,
            turns_per_user_hour: self.turns_per_user_hour,
            speech_per_turn: self.speech_per_turn,
            busy_hour: self.busy_hour,
            percentile: self.percentile / 100.0,
            wait: self.wait,
            spare: self.spare,
        };
        println!(
            "{:>10} {:>9} {:>14} {:>8} {:>9} {:>6} {:>8} {:>9}",
            "users", "turns/s", "calls at once", "streams", "gateways", "GPUs", "cores", "waiting"
        );
        for users in &self.users {
            let row = size::plan(&demand(*users), &measured);
            let cores = row.cores.map_or("-".to_owned(), |c| format!("{c:.1}"));
            let gpus = row.gpus.map_or("-".to_owned(), |g| g.to_string());
            println!(
                "{:>10} {:>9.2} {:>14.1} {:>8} {:>9} {gpus:>6} {cores:>8} {:>8.2}%",
                row.users,
                row.turns_per_s,
                row.calls,
                row.streams,
                row.gateways,
                row.waiting * 100.0
            );
        }
        println!("(a gateway: one as measured, with {})", measured.with());
        if let (Some(report), Some(gpu_hour)) = (&report, self.gpu_hour) {
            self.print_costs(report, gpu_hour);
        }
        for line in size::assumptions(&demand(0), &measured) {
            println!("- {line}");
        }
        for bound in report.as_ref().and_then(predict::predict).into_iter().flat_map(|p| p.bounds) {
            println!("- One gateway: {} runs out at {:.0} calls: {}.", bound.what, bound.calls, bound.basis);
        }
        if let Some(verdict) = report.as_ref().and_then(predict::verdict) {
            println!("- Prediction: {}.", verdict.text);
        }
        if let Some(report) = &report {
            println!("Published, on other hardware and with other voices, beside this report:");
            for table in beside::tables(report, Some(&measured)) {
                print_table(&table);
            }
        }
        Ok(())
    }
}

impl Size {
    fn print_costs(&self, report: &Report, gpu_hour: f64) {
        let Some(output) = Output::from_report(report) else {
            println!("- No price: the knee of that report tells no characters.");
            return;
        };
        // Of what is shared each gateway pays its part.
        let part = gpu_hour / f64::from(self.sharing);
        let full = output.cost(part, 1.0);
        let mean = output.cost(part, 1.0 / self.busy_hour.max(1.0));
        let shared = if self.sharing > 1 { format!(" that {} gateways share", self.sharing) } else { String::new() };
        println!(
            "At {gpu_hour} an hour for each of {} GPUs{shared}, at {} calls at a time:",
            output.devices, output.calls
        );
        println!("{:>28} {:>14} {:>14}", "", "all day at it", "by busy hour");
        println!("{:>28} {:>14.3} {:>14.3}", "a million characters", full.million_chars, mean.million_chars);
        println!("{:>28} {:>14.5} {:>14.5}", "a minute of a call", full.call_minute, mean.call_minute);
        println!(
            "- A day at that load: {:.1} million characters, {:.0} turns, {:.0} minutes of calls, for {:.2}.",
            full.chars_per_day / 1e6,
            full.turns_per_day,
            full.call_minutes_per_day,
            full.day
        );
        if let Some(price) = self.api_million {
            let (chars, share) = full.break_even(price);
            let when = if share <= 1.0 {
                format!("from {:.2} million characters a day on, {:.1} % of its day", chars / 1e6, share * 100.0)
            } else {
                format!("never: it would take {:.1} times what it makes a day", share)
            };
            println!("- It costs less than an interface at {price} for a million characters {when}.");
        }
        for (system, rate, million) in cost::published(gpu_hour) {
            println!(
                "- Published at the same price: {system}, at most {rate} chars/s: {million:.2} for a million characters."
            );
        }
    }
}

/// Columns as wide as what is in them.
fn print_table(table: &Table) {
    println!("- {}:", table.title);
    let width = |column: usize| {
        let cells = table.rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).chain([table.head[column].len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..table.head.len()).map(width).collect();
    let head: Vec<String> = table.head.iter().map(|name| (*name).to_owned()).collect();
    for row in std::iter::once(&head).chain(&table.rows) {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:>width$}")).collect();
        println!("  {}", cells.join("  "));
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
