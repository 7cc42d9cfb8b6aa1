//! `dictate`: how well a gateway hears.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use antiphon_loadgen::call::Leg;
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::dictation::{self, Condition, Outcome};
use antiphon_loadgen::exchange::Saying;
use antiphon_loadgen::gateway::Gateway;
use antiphon_loadgen::prepare::{self, Prepared, Target, Via};
use antiphon_loadgen::sentences::SENTENCES;
use antiphon_loadgen::wav;
use clap::Args;

use super::target::{codec, log_beside, refused};
use super::{FAILED, Failure, signals};

#[derive(Args)]
pub(crate) struct Dictate {
    /// `http://host:port`; and `sip:agent@host:port` where the SIP side is elsewhere
    #[arg(long = "target", value_name = "URI", default_value = "http://127.0.0.1:8080")]
    targets: Vec<String>,
    /// Bearer token of the gateway's HTTP side
    #[arg(long, env = "ANTIPHON_TOKEN", hide_env_values = true)]
    token: Option<String>,
    /// Command that starts the gateway; it is stopped at the end
    #[arg(long, value_name = "COMMAND")]
    spawn: Option<String>,
    /// Folder of recordings: NAME.wav with what is said in NAME.txt. Default: a hundred sentences in the gateway's own voice
    #[arg(long, value_name = "FOLDER")]
    sentences: Option<PathBuf>,
    /// The first so many sentences
    #[arg(long, default_value_t = usize::MAX, hide_default_value = true)]
    count: usize,
    /// Codecs; opus is a WebRTC call, the others are telephone calls
    #[arg(long, value_delimiter = ',', value_parser = codec, default_value = "pcmu,opus")]
    codecs: Vec<Codec>,
    /// Per cent of packets that are lost, each with every codec
    #[arg(long, value_delimiter = ',', value_parser = percent, default_value = "0,3")]
    loss: Vec<f64>,
    /// Decibels that the noise of a street lies below the speech, or `none`; each with every codec and loss
    #[arg(long, value_delimiter = ',', value_parser = decibels, default_value = "none,10")]
    noise: Vec<Decibels>,
    /// Calls at a time
    #[arg(long, default_value_t = 1)]
    calls: usize,
    /// Write what is said here, with a list of it, so that another recogniser may hear the same
    #[arg(long, value_name = "FOLDER")]
    keep: Option<PathBuf>,
    /// Where the figures and all words go
    #[arg(short, long, default_value = "dictate.json")]
    output: PathBuf,
}

/// Noise that far below the speech, or none.
type Decibels = Option<f32>;

fn percent(text: &str) -> Result<f64, String> {
    let share = text.parse::<f64>().map(|percent| percent / 1e2);
    share.ok().filter(|share| (0.0..1.0).contains(share)).ok_or_else(|| format!("{text:?} is not from 0 to 100"))
}

fn decibels(text: &str) -> Result<Decibels, String> {
    match text {
        "none" => Ok(None),
        _ => text
            .parse()
            .ok()
            .filter(|d: &f32| d.is_finite())
            .map(Some)
            .ok_or_else(|| format!("{text:?}: \"none\" or decibels")),
    }
}

impl Dictate {
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let stop = signals::stop()?;
        let target = Target {
            addresses: self.targets.clone(),
            token: self.token.clone(),
            spawn: self.spawn.clone(),
            legs: vec![(Leg::Sip, 1.0), (Leg::Webrtc, 1.0)],
            via: Via::Agent,
            log: log_beside(&self.output),
            verify: false,
            ..Target::default()
        };
        let preparing = async { prepare::prepare(&target, &[]).await.map_err(refused) };
        let Prepared { plan, spawned, .. } = signals::unless_stopped(&stop, preparing).await?;
        let measuring = async {
            let sentences = self.said(plan.gateway.as_ref()).await?;
            self.keep(&sentences)?;
            let mut outcomes: Vec<Outcome> = Vec::new();
            for condition in self.conditions() {
                let run = dictation::run(&plan, &sentences, condition, self.calls);
                let outcome = run.await.map_err(|e| failed(format!("{condition}: {e}")))?;
                println!("{outcome}");
                outcomes.push(outcome);
                let text = serde_json::to_string_pretty(&outcomes).map_err(|e| failed(e.to_string()))?;
                fs::write(&self.output, text).map_err(|e| unwritable(&self.output, &e.to_string()))?;
            }
            Ok(())
        };
        let measured = tokio::select! {
            measured = measuring => measured,
            () = stop.cancelled() => Err(failed("stopped; the conditions that were complete are written".to_owned())),
        };
        if let Some(spawned) = spawned {
            spawned.stop(Duration::from_secs(10)).await;
        }
        measured
    }

    fn conditions(&self) -> impl Iterator<Item = Condition> + '_ {
        let of = move |codec: Codec| {
            let each = move |loss: f64| self.noise.iter().map(move |noise| Condition { codec, loss, noise: *noise });
            self.loss.iter().copied().flat_map(each)
        };
        self.codecs.iter().copied().flat_map(of)
    }

    async fn said(&self, gateway: Option<&Gateway>) -> Result<Vec<Saying>, Failure> {
        let mut all = Vec::new();
        if let Some(folder) = &self.sentences {
            let entries = fs::read_dir(folder).map_err(|e| failed(format!("{}: {e}", folder.display())))?;
            let mut files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
            files.retain(|path| path.extension().is_some_and(|ending| ending == "wav"));
            files.sort();
            for file in files.into_iter().take(self.count) {
                let wrong = |why: String| failed(format!("{}: {why}", file.display()));
                let text = fs::read_to_string(file.with_extension("txt"))
                    .map_err(|e| wrong(format!("what it says should be beside it, in .txt: {e}")))?;
                let clip = wav::read(&file).map_err(|e| wrong(e.to_string()))?;
                all.push(dictation::sentence(text.trim(), &clip).ok_or_else(|| wrong("nothing audible".to_owned()))?);
            }
        } else {
            let gateway = gateway.ok_or_else(|| failed("the gateway's voice needs an http: target".to_owned()))?;
            for text in SENTENCES.iter().take(self.count) {
                let clip = gateway.synthesise(text).await.map_err(|e| failed(format!("{text:?}: {e}")))?;
                all.push(dictation::sentence(text, &clip).ok_or_else(|| failed(format!("{text:?} is not audible")))?);
            }
        }
        if all.is_empty() {
            Err(failed("no sentence: the folder should have NAME.wav and NAME.txt".to_owned()))
        } else {
            Ok(all)
        }
    }

    /// Writes `NUMBER-NOISE.wav` and a line of `said.jsonl` for each.
    fn keep(&self, sentences: &[Saying]) -> Result<(), Failure> {
        let Some(folder) = &self.keep else { return Ok(()) };
        fs::create_dir_all(folder).map_err(|e| unwritable(folder, &e.to_string()))?;
        let mut list = String::new();
        for noise in &self.noise {
            let label = noise.map_or("none".to_owned(), |decibels| decibels.to_string());
            for (n, saying) in dictation::in_noise(sentences, *noise).iter().enumerate() {
                let file = folder.join(format!("{n:03}-{label}.wav"));
                wav::write(&file, saying.clip()).map_err(|e| unwritable(&file, &e.to_string()))?;
                let name = file.file_name().unwrap_or_default().to_string_lossy();
                let line = serde_json::json!({ "file": name, "said": saying.name(), "noise": label });
                list.push_str(&format!("{line}\n"));
            }
        }
        let file = folder.join("said.jsonl");
        fs::write(&file, list).map_err(|e| unwritable(&file, &e.to_string()))
    }
}

fn failed(message: String) -> Failure {
    Failure::new(FAILED, message)
}

fn unwritable(path: &Path, why: &str) -> Failure {
    failed(format!("{} cannot be written: {why}", path.display()))
}
