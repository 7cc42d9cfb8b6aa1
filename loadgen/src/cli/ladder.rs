//! `ladder`: one level after the other.

use std::path::{Path, PathBuf};
use std::time::Duration;

use antiphon_loadgen::corpus::{self, Length};
use antiphon_loadgen::html;
use antiphon_loadgen::ladder::{self, LEVELS, Options};
use antiphon_loadgen::load::Behaviour;
use antiphon_loadgen::prepare::{self, Prepared};
use antiphon_loadgen::report::{Limits, Report};
use clap::Args;
use serde::Deserialize;
use serde::de::IntoDeserializer;

use super::target::{TargetOptions, refused};
use super::watch::{Watch, conclude};
use super::{FAILED, Failure, begun, signals};

#[derive(Args)]
pub(crate) struct Ladder {
    #[command(flatten)]
    target: TargetOptions,
    /// Calls at a time, one level after the other
    #[arg(long, value_delimiter = ',', default_values_t = LEVELS, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    levels: Vec<u32>,
    /// Highest level that doubling tries
    #[arg(long, default_value_t = 512)]
    most: u32,
    /// Only the levels given, no search for the knee
    #[arg(long)]
    no_search: bool,
    /// Seconds for each level; twice its longest turn at least
    #[arg(long, default_value_t = 20.0, value_parser = seconds)]
    seconds: f64,
    /// Open loop: calls arrive as a Poisson process, whether or not the gateway keeps up
    #[arg(long)]
    open_loop: bool,
    /// Open loop: calls per second for each unit of level; measured when left out
    #[arg(long, requires = "open_loop")]
    rate: Option<f64>,
    /// Languages of the texts (en, de, fr, ...)
    #[arg(long, value_delimiter = ',', default_value = "en")]
    languages: Vec<String>,
    /// Lengths of the texts: short (a few words), medium (a sentence), long (two or three sentences)
    #[arg(long, value_delimiter = ',', default_value = "short,medium", value_parser = length)]
    lengths: Vec<Length>,
    /// Seconds between the end of a turn and the next
    #[arg(long, default_value_t = 0.3)]
    think: f64,
    /// Limit of first audio, 95th percentile, seconds
    #[arg(long, default_value_t = Limits::default().first_audio_p95)]
    limit_first_audio: f64,
    /// Draws texts and pauses
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Where the report goes; the page is written beside it with the ending .html
    #[arg(short, long, default_value = "ladder.json")]
    output: PathBuf,
}

impl Ladder {
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let texts = corpus::select(&self.languages, &self.lengths);
        if texts.is_empty() {
            let known = corpus::languages().join(", ");
            return Err(Failure::new(2, format!("no texts in {:?}; there are {known}", self.languages)));
        }
        let words: Vec<&str> = texts.iter().map(|t| t.text).collect();
        let stop = signals::stop()?;
        let target = self.target.target(&self.output);
        let preparing = async { prepare::prepare(&target, &words).await.map_err(refused) };
        let Prepared { plan, legs, mut spawned, about } = signals::unless_stopped(&stop, preparing).await?;
        let options = Options {
            levels: self.levels,
            most: self.most,
            duration: Duration::from_secs_f64(self.seconds),
            open_loop: self.open_loop,
            rate: self.rate,
            turns: 1..=3,
            legs,
            texts,
            think: (self.think * 0.5, self.think * 1.5),
            behaviour: Behaviour::default(),
            limits: Limits { first_audio_p95: self.limit_first_audio, ..Limits::default() },
            seed: self.seed,
            sampled: 8,
            find_knee: !self.no_search,
            stop: stop.clone(),
        };
        let mut report = Report { name: "ladder".to_owned(), limits: options.limits, ..begun(about) };
        let pid = spawned.as_ref().map(|s| s.pid()).or(self.target.pid);
        let mut watch = Watch::new(options.duration);
        ladder::climb(plan, &options, &mut spawned, pid, &mut report, |level, progress, done| {
            watch.show(&format!("{level} calls"), progress, done);
        })
        .await;
        if let Some(spawned) = spawned {
            spawned.stop(Duration::from_secs(10)).await;
        }
        finish(&report, &self.output, stop.is_cancelled())
    }
}

/// Writes the report and says what it says. `stopped`: a signal ended the measurement.
pub(crate) fn finish(report: &Report, output: &Path, stopped: bool) -> Result<(), Failure> {
    let page = output.with_extension("html");
    let json = serde_json::to_string_pretty(report).map_err(|e| Failure::new(FAILED, e.to_string()))?;
    let write = |path: &Path, text: &str| {
        std::fs::write(path, text).map_err(|e| Failure::new(FAILED, format!("write {}: {e}", path.display())))
    };
    write(output, &json)?;
    write(&page, &html::page(report))?;
    conclude(report);
    println!("  report               {} and {}", output.display(), page.display());
    if let Some(why) = &report.ended_early {
        let code = if stopped { signals::INTERRUPTED } else { FAILED };
        return Err(Failure::new(code, format!("ended early: {why}")));
    }
    if report.levels.iter().all(|l| l.turns == 0) {
        return Err(Failure::new(FAILED, "no turn was heard"));
    }
    Ok(())
}

/// A length as scenarios name it.
fn length(text: &str) -> Result<Length, serde::de::value::Error> {
    Length::deserialize(text.into_deserializer())
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.5..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err("expected 0.5 to 86400 seconds".to_owned()),
    }
}
