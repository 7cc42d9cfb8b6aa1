//! `attack`: what must hold while a gateway is attacked.

use std::path::{Path, PathBuf};
use std::time::Duration;

use antiphon_loadgen::attack::{self, Findings, Options, Row};
use antiphon_loadgen::clock;
use antiphon_loadgen::process::Host;
use clap::Args;
use futures_util::{StreamExt, stream};

use super::{FAILED, Failure, UNAVAILABLE};

#[derive(Args)]
pub(crate) struct Attack {
    /// control (the same calls without an attack, which packets that come late are judged by), malformed, half-open, rtp, digest,
    /// toll, slow, descriptors. Without any: each of them
    rows: Vec<Row>,
    /// Command that starts a gateway; its configuration is put behind it. Default: the `antiphon` beside this program,
    /// else of the PATH, with `serve`
    #[arg(long, value_name = "COMMAND")]
    spawn: Option<String>,
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
    /// Attacks at a time, each on a gateway of its own. All eight at once take about seven cores
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..))]
    at_once: u8,
    /// Write the figures here as JSON, anew after each attack
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Tell figures that depend on the speed of this computer, and do not fail by them
    #[arg(long)]
    slow_computer: bool,
}

impl Attack {
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let rows = if self.rows.is_empty() { Row::ALL.to_vec() } else { self.rows };
        let options = Options {
            spawn: self.spawn.unwrap_or_else(gateway),
            engine: self.engine,
            calls: self.calls,
            lasts: Duration::from_secs(self.seconds),
            scale: self.scale,
        };
        let mut findings = Findings {
            when: clock::wall().as_secs(),
            command: std::env::args().collect::<Vec<_>>().join(" "),
            host: Host::here(),
            calls: options.calls,
            seconds: options.lasts.as_secs_f64(),
            scale: options.scale,
            rows: Vec::new(),
            failed: Vec::new(),
        };
        let with_control = rows.contains(&Row::Control);
        // Tasks of their own, so that a flood does not slow the others down.
        let made = stream::iter(rows).map(|row| {
            let options = options.clone();
            let making =
                tokio::spawn(async move { attack::run(row, &options).await.map_err(|error| error.to_string()) });
            async move { (row, making.await.unwrap_or_else(|panic| Err(panic.to_string()))) }
        });
        let mut made = std::pin::pin!(made.buffer_unordered(usize::from(self.at_once)));
        let mut unjudged = Vec::new();
        while let Some((row, outcome)) = made.next().await {
            match outcome {
                Ok(verdict) => unjudged.push(verdict),
                Err(error) => {
                    println!("{}: {error}\n", row.name());
                    findings.failed.push((row, error));
                }
            }
            let control = findings.rows.iter().chain(&unjudged).find(|verdict| verdict.row == Row::Control).cloned();
            // It may end after those that it is compared with.
            if with_control && control.is_none() && !findings.failed.iter().any(|(row, _)| *row == Row::Control) {
                continue;
            }
            for mut verdict in unjudged.drain(..) {
                if let Some(control) = control.as_ref().filter(|_| verdict.row != Row::Control) {
                    verdict.beside(control);
                }
                println!("{verdict}");
                findings.rows.push(verdict);
            }
            if let Some(file) = &self.json {
                write(file, &findings)?;
            }
        }
        let broken = |row: &&attack::Verdict| !row.broken(!self.slow_computer).is_empty();
        let broken: Vec<&str> = findings.rows.iter().filter(broken).map(|row| row.row.name()).collect();
        if let Some((row, error)) = findings.failed.first() {
            return Err(Failure::new(UNAVAILABLE, format!("{}: {error}", row.name())));
        }
        match broken.is_empty() {
            true => Ok(()),
            false => Err(Failure::new(FAILED, format!("broken: {}", broken.join(", ")))),
        }
    }
}

/// The gateway that was built with this program, if it is there.
fn gateway() -> String {
    let beside = std::env::current_exe().ok().and_then(|own| Some(own.parent()?.join("antiphon")));
    match beside.filter(|path| path.is_file()) {
        Some(path) => format!("'{}' serve", path.display()),
        None => "antiphon serve".to_owned(),
    }
}

fn write(file: &Path, findings: &Findings) -> Result<(), Failure> {
    let failed =
        |error: &dyn std::fmt::Display| Failure::new(FAILED, format!("cannot write {}: {error}", file.display()));
    let json = serde_json::to_string_pretty(findings).map_err(|error| failed(&error))?;
    std::fs::write(file, json + "\n").map_err(|error| failed(&error))
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if share > 0.0 && share <= 1.0 => Ok(share),
        _ => Err(format!("{text:?} is no share: more than 0, at most 1")),
    }
}
