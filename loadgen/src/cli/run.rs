//! `run`: a scenario.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use antiphon_loadgen::call::CallError;
use antiphon_loadgen::exchange::Plan;
use antiphon_loadgen::load::{self, Progress};
use antiphon_loadgen::prepare::{self, Prepared};
use antiphon_loadgen::report::Report;
use antiphon_loadgen::scenario::Scenario;
use antiphon_loadgen::{clock, ladder, synthetic};
use clap::Args;
use tokio_util::task::AbortOnDropHandle;

use super::ladder::finish;
use super::target::{RecognizerOptions, log_beside, refused};
use super::watch::Watch;
use super::{BAD_CONFIGURATION, Failure, begun, signals};

#[derive(Args)]
pub(crate) struct Run {
    /// The scenario
    scenario: PathBuf,
    /// Addresses in place of those of the scenario
    #[arg(long = "target", value_name = "URI")]
    targets: Vec<String>,
    /// Command that starts the gateway, in place of that of the scenario
    #[arg(long, value_name = "COMMAND")]
    spawn: Option<String>,
    /// Process of a gateway that runs already, to sample its CPU and memory
    #[arg(long)]
    pid: Option<u32>,
    #[command(flatten)]
    recognizer: RecognizerOptions,
    /// Where the report goes; the page is written beside it with the ending .html
    #[arg(short, long, default_value = "run.json")]
    output: PathBuf,
}

impl Run {
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let mut scenario =
            Scenario::load(&self.scenario).map_err(|e| Failure::new(BAD_CONFIGURATION, e.to_string()))?;
        if !self.targets.is_empty() {
            scenario.target.addresses = self.targets;
        }
        scenario.target.spawn = self.spawn.or(scenario.target.spawn);
        scenario.target.log = log_beside(&self.output);
        scenario.target.recognizer = self.recognizer.named();
        let words: Vec<&str> = scenario.load.texts.iter().map(|t| t.text).collect();
        let stop = signals::stop()?;
        let preparing = async { prepare::prepare(&scenario.target, &words).await.map_err(refused) };
        let Prepared { plan, legs, mut spawned, about } = signals::unless_stopped(&stop, preparing).await?;
        scenario.load.legs = legs;
        scenario.load.stop = stop.clone();
        let interrupting = Arc::new(plan.voice().unwrap_or_else(|| synthetic::babble(1, 16_000, 0.8)));
        scenario.load.behaviour.speech.get_or_insert(interrupting);
        let mut report = Report { name: scenario.name.clone(), limits: scenario.limits, ..begun(about) };
        let pid = spawned.as_ref().map(|s| s.pid()).or(self.pid);
        let batch = (scenario.batch > 0).then(|| Background::start(plan.clone(), scenario.batch, &words));
        let mut watch = Watch::new(scenario.load.duration);
        let (mut level, kept) =
            load::run(plan.clone(), scenario.load, pid, |p| watch.show(&scenario.name, p, None)).await;
        level.level = level.concurrency.round().max(1.0) as u32;
        level.broken = scenario.limits.broken(&level);
        watch.show(&scenario.name, &Progress::default(), Some(&level));
        report.levels.push(level);
        report.waterfall = ladder::typical(&kept);
        report.ended_early = match stop.is_cancelled() {
            true => Some(ladder::STOPPED.to_owned()),
            false => ladder::died(&plan, &mut spawned).await,
        };
        if let Some(batch) = batch {
            report.notes.push(batch.end().await);
        }
        if let Some(spawned) = spawned {
            spawned.stop(Duration::from_secs(10)).await;
        }
        finish(&report, &self.output, stop.is_cancelled())
    }
}

/// Batch work beside the calls: one job after the other.
struct Background {
    plan: Arc<Plan>,
    task: AbortOnDropHandle<Result<(), CallError>>,
    state: Arc<std::sync::Mutex<(u64, Option<String>)>>,
}

impl Background {
    fn start(plan: Arc<Plan>, texts: usize, words: &[&str]) -> Background {
        let texts: Vec<String> = words.iter().cycle().take(texts).map(|w| (*w).to_owned()).collect();
        let state = Arc::new(std::sync::Mutex::new((0, None)));
        let (of_task, shared) = (plan.clone(), state.clone());
        let task = AbortOnDropHandle::new(tokio::spawn(async move {
            let gateway = of_task.gateway.as_ref().ok_or_else(|| CallError::Target("no http: target".to_owned()))?;
            let mut before = 0;
            loop {
                let job = gateway.batch(&texts).await?;
                loop {
                    clock::sleep_until(clock::now() + Duration::from_millis(500)).await;
                    let (finished, over) = gateway.job(&job).await?;
                    // A poisoned lock holds two numbers that are right all the same.
                    *shared.lock().unwrap_or_else(|e| e.into_inner()) = (before + finished, Some(job.clone()));
                    if over {
                        before += finished;
                        break;
                    }
                }
            }
        }));
        Background { plan, task, state }
    }

    /// Ends it and says how far it came.
    async fn end(self) -> String {
        if self.task.is_finished()
            && let Ok(Err(error)) = self.task.await
        {
            return format!("batch work beside the calls failed: {error}");
        }
        let (finished, job) = self.state.lock().unwrap_or_else(|e| e.into_inner()).clone();
        if let (Some(gateway), Some(job)) = (&self.plan.gateway, job) {
            // Done already, perhaps.
            let _ = gateway.cancel_job(&job).await;
        }
        format!("batch work beside the calls: {finished} texts finished")
    }
}
