//! `attack`: what must hold while a gateway is attacked.

use std::time::Duration;

use antiphon_loadgen::attack::{self, Options, Row};
use clap::Args;

use super::{FAILED, Failure, UNAVAILABLE};

#[derive(Args)]
pub(crate) struct Attack {
    /// malformed, half-open, rtp, digest, toll, slow, descriptors; none: each, one after the other
    rows: Vec<Row>,
    /// Command that starts a gateway; its configuration is put behind it
    #[arg(long, value_name = "COMMAND", default_value = "antiphon serve")]
    spawn: String,
    /// Voice of that gateway: a `kind` of `[engine]`
    #[arg(long, default_value = "tone")]
    engine: String,
    /// Calls that are up and spoken on meanwhile
    #[arg(long, default_value_t = 50)]
    calls: usize,
    /// How long each attack lasts
    #[arg(long, default_value_t = 300)]
    seconds: u64,
    /// Share of the full rates and numbers
    #[arg(long, default_value_t = 1.0, value_parser = share)]
    scale: f64,
    /// Tell figures that depend on the speed of this computer, and do not fail by them
    #[arg(long)]
    slow_computer: bool,
}

impl Attack {
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let rows = if self.rows.is_empty() { Row::ALL.to_vec() } else { self.rows };
        let options = Options {
            spawn: self.spawn,
            engine: self.engine,
            calls: self.calls,
            lasts: Duration::from_secs(self.seconds),
            scale: self.scale,
        };
        let mut broken = Vec::new();
        for row in rows {
            let verdict = attack::run(row, &options).await;
            let verdict = verdict.map_err(|error| Failure::new(UNAVAILABLE, format!("{}: {error}", row.name())))?;
            print!("{verdict}");
            if !verdict.broken(!self.slow_computer).is_empty() {
                broken.push(row.name());
            }
        }
        match broken.is_empty() {
            true => Ok(()),
            false => Err(Failure::new(FAILED, format!("broken: {}", broken.join(", ")))),
        }
    }
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if share > 0.0 && share <= 1.0 => Ok(share),
        _ => Err(format!("{text:?} is no share: more than 0, at most 1")),
    }
}
