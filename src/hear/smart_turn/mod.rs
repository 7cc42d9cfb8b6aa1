//! Smart Turn: how likely a caller has finished, by how it sounds. A network of Daily (pipecat-ai, BSD-2-Clause), version 3:
//! the encoder of Whisper tiny, attention pooling, and three linear layers, quantised to eight bits.
//!
//! Contract: [`SmartTurn::ask`] returns at once. Where there is more to judge than the threads can, an answer does not come,
//! and the words alone decide.
//!
//! # Why
//! - *The graph as it is written, in float.* Integer kernels disagree with it, and with each other, by up to 0.7.
//! - *Silence in front*: the network was trained on turns that end where its window of eight seconds does.

mod graph;

use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use candle_core::{Device, Tensor};
use tokio::sync::oneshot;

use self::graph::Graph;
use super::RATE;
use crate::audio::from_i16;
use crate::clock;
use crate::voice::features::whisper_log_mel;
use crate::voice::onnx::OnnxError;

/// Samples that are looked at: eight seconds.
pub const WINDOW: usize = 8 * RATE as usize;
/// From this on a turn is taken as complete.
pub const COMPLETE: f32 = 0.5;
/// Mel bands.
const BANDS: usize = 80;
/// Turns that may wait: what a thread does in half a second. Later an answer is of no use.
const QUEUE: usize = 8;
/// The metric label.
const KIND: &str = "smart_turn";

/// The network, for all calls.
#[derive(Debug)]
pub struct SmartTurn {
    queue: SyncSender<Job>,
}

struct Job {
    pcm: Vec<i16>,
    answer: oneshot::Sender<f32>,
}

/// Why it does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SmartTurnError {
    /// The file cannot be used.
    #[error("[turns] smart_turn: {0}; expected the file smart-turn-v3.2-cpu.onnx of the Python package pipecat-ai")]
    File(#[from] OnnxError),
    /// It gives no probability.
    #[error("[turns] smart_turn: {0}")]
    Run(String),
    /// The operating system refuses a thread.
    #[error("cannot start threads for turns: {0}")]
    Threads(String),
}

/// The network, to be asked one question at a time.
struct Network(Graph);

impl Network {
    fn load(path: &Path) -> Result<Self, SmartTurnError> {
        Ok(Self(Graph::load(path, "input_features", "logits")?))
    }

    /// How likely a turn is complete that ends with `pcm`, 16 kHz: 0 to 1.
    fn judge(&self, pcm: &[i16]) -> Result<f32, String> {
        let features = features(pcm)?;
        let result = self.0.run(features)?;
        let values = result.flatten_all().and_then(|flat| flat.to_vec1::<f32>()).map_err(|error| error.to_string())?;
        match values[..] {
            // Despite its name it has passed the sigmoid.
            [value] if (0.0..=1.0).contains(&value) => Ok(value),
            _ => Err(format!("it gives {} numbers, expected one probability", values.len())),
        }
    }
}

/// `[1, 80, 800]`: the last eight seconds, silence in front of less, brought to mean 0 and variance 1, as Whisper's
/// log-mel.
fn features(pcm: &[i16]) -> Result<Tensor, String> {
    let pcm = &pcm[pcm.len().saturating_sub(WINDOW)..];
    let mut sound = vec![0f32; WINDOW - pcm.len()];
    sound.extend(pcm.iter().map(|sample| from_i16(*sample)));
    let count = WINDOW as f64;
    let mean = sound.iter().map(|sample| f64::from(*sample)).sum::<f64>() / count;
    let variance = sound.iter().map(|sample| (f64::from(*sample) - mean).powi(2)).sum::<f64>() / count;
    let scale = (variance + 1e-7).sqrt();
    for sample in &mut sound {
        *sample = ((f64::from(*sample) - mean) / scale) as f32;
    }
    let mel = whisper_log_mel(&sound, BANDS).map_err(|error| error.to_string())?;
    Tensor::from_vec(mel.data, (1, mel.rows, mel.cols), &Device::Cpu).map_err(|error| error.to_string())
}

impl SmartTurn {
    /// Loads the network in the ONNX file at `path` and starts `threads` threads (0: a quarter of the cores). Blocks while it
    /// loads.
    ///
    /// # Errors
    /// The file is not one of this network, or there are no threads.
    pub fn start(path: &Path, threads: usize) -> Result<Self, SmartTurnError> {
        let network = Arc::new(Network::load(path)?);
        // What it cannot do shows here, and not on a call.
        network.judge(&[]).map_err(SmartTurnError::Run)?;
        let threads = match threads {
            0 => thread::available_parallelism().map_or(1, |cores| cores.get() / 4).max(1),
            threads => threads,
        };
        let (queue, jobs) = sync_channel(QUEUE * threads);
        let jobs = Arc::new(Mutex::new(jobs));
        for number in 0..threads {
            // The matrix products would otherwise take every core.
            let core = rayon::ThreadPoolBuilder::new().num_threads(1).thread_name(move |_| format!("turns-{number}"));
            let core = core.build().map_err(|error| SmartTurnError::Threads(error.to_string()))?;
            let (network, jobs) = (network.clone(), jobs.clone());
            let worker = move || {
                while let Some(job) = next(&jobs) {
                    core.install(|| work(&network, job));
                }
            };
            let started = thread::Builder::new().name(format!("turn-{number}")).spawn(worker);
            started.map_err(|error| SmartTurnError::Threads(error.to_string()))?;
        }
        Ok(Self { queue })
    }

    /// Asks how likely the turn is complete that ends with `pcm`, 16 kHz. The answer never comes where there is too much to
    /// do, or the network failed. Dropping the receiver gives it up.
    pub fn ask(&self, pcm: Vec<i16>) -> oneshot::Receiver<f32> {
        let (answer, asked) = oneshot::channel();
        // overflow: refused and counted; the words alone decide
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) = self.queue.try_send(Job { pcm, answer }) {
            metrics::counter!("antiphon_recognizer_errors_total", "kind" => KIND).increment(1);
        }
        asked
    }
}

/// The next job; `None`: there are no more askers.
fn next(jobs: &Mutex<Receiver<Job>>) -> Option<Job> {
    // A panic while it was held left the channel whole.
    jobs.lock().unwrap_or_else(PoisonError::into_inner).recv().ok()
}

fn work(network: &Network, job: Job) {
    // The caller speaks on, or the call is over.
    if job.answer.is_closed() {
        return;
    }
    let asked = clock::now();
    match network.judge(&job.pcm) {
        Ok(complete) => {
            let took = clock::now().saturating_duration_since(asked);
            metrics::histogram!("antiphon_recognizer_seconds", "kind" => KIND).record(took);
            // Given up meanwhile.
            let _ = job.answer.send(complete);
        }
        Err(error) => {
            metrics::counter!("antiphon_recognizer_errors_total", "kind" => KIND).increment(1);
            tracing::warn!(error, "a turn could not be judged");
        }
    }
}

/// What one call has asked: one question at a time, the latest.
#[derive(Debug, Default)]
pub(super) struct Asked {
    judge: Option<Arc<SmartTurn>>,
    waiting: Option<(u64, oneshot::Receiver<f32>)>,
}

impl Asked {
    pub(super) fn new(judge: Option<Arc<SmartTurn>>) -> Self {
        Self { judge, waiting: None }
    }

    /// Whether there is anybody to ask.
    pub(super) fn is_there(&self) -> bool {
        self.judge.is_some()
    }

    /// Asks about `pcm`, in place of what was asked before.
    pub(super) fn ask(&mut self, id: u64, pcm: Vec<i16>) {
        self.waiting = self.judge.as_ref().map(|judge| (id, judge.ask(pcm)));
    }

    /// The answer to the latest question; never where there is none. Cancel safe.
    pub(super) async fn answer(&mut self) -> (u64, f32) {
        if let Some((id, waiting)) = &mut self.waiting {
            let (id, answer) = (*id, waiting.await);
            self.waiting = None;
            if let Ok(complete) = answer {
                return (id, complete);
            }
        }
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn clip(name: &str) -> Vec<i16> {
        let path = format!("tests/data/smart_turn/{name}.wav");
        let mut wav = hound::WavReader::open(&path).expect(&path);
        assert_eq!(wav.spec().sample_rate, RATE);
        wav.samples::<i16>().map(|sample| sample.expect("sound")).collect()
    }

    /// The published file, where the environment says that it is there.
    fn published() -> Option<PathBuf> {
        let path = std::env::var_os("ANTIPHON_SMART_TURN").map(PathBuf::from).filter(|path| path.exists());
        if path.is_none() {
            antiphon_skip::skip("smart_turn", "ANTIPHON_SMART_TURN names no file");
        }
        path
    }

    #[test]
    fn features_are_those_of_the_reference() {
        let path = "tests/data/smart_turn/office_whole.safetensors";
        let stored = candle_core::safetensors::load(path, &Device::Cpu).expect(path);
        let wanted = stored["input_features"].flatten_all().and_then(|flat| flat.to_vec1::<f32>()).expect("numbers");
        let ours = features(&clip("office_whole")).expect("features");
        assert_eq!(ours.dims(), [1, 80, 800]);
        let ours = ours.flatten_all().and_then(|flat| flat.to_vec1::<f32>()).expect("numbers");
        let off = ours.iter().zip(&wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(off <= 2e-4, "{off}");
    }

    /// Computed by ONNX Runtime with its optimisations off.
    ///
    /// The network is not stable to more digits: up to the first attention all agree to the last level of eight bits; then
    /// one of 150,000 values that lies between two levels tips, by the order of a sum, and the normalisations behind it
    /// make 0.11 of 0.04, in NumPy as here. What a wrong step costs is more: without the normalisation of the sound
    /// `office_cut` is 0.54, with the silence behind it 0.89.
    const MEASURED: [(&str, f32); 6] = [
        ("office_whole", 0.977),
        ("office_cut", 0.041),
        ("blue_whole", 0.951),
        ("blue_cut", 0.021),
        ("card_whole", 0.936),
        ("card_cut", 0.058),
    ];

    #[test]
    fn the_published_network_tells_whole_sentences_from_halves() {
        let Some(path) = published() else { return };
        let network = Network::load(&path).expect("a network");
        for (name, measured) in MEASURED {
            let complete = network.judge(&clip(name)).expect("a probability");
            println!("{name}: {complete:.3}, measured {measured:.3}");
            assert_eq!(complete >= COMPLETE, measured >= COMPLETE, "{name}: {complete}, measured {measured}");
        }
    }

    #[tokio::test]
    async fn answers_come_from_threads_of_their_own_and_a_file_that_is_none_is_refused() {
        let error = SmartTurn::start(Path::new("tests/data/speech-8k.wav"), 1).expect_err("no network");
        assert!(error.to_string().contains("smart_turn") && error.to_string().contains("pipecat-ai"), "{error}");
        let Some(path) = published() else { return };
        let judge = Arc::new(SmartTurn::start(&path, 1).expect("a network"));
        let mut asked = Asked::new(Some(judge));
        asked.ask(1, clip("card_cut"));
        asked.ask(2, clip("card_whole"));
        let (id, complete) = asked.answer().await;
        assert_eq!((id, complete > COMPLETE), (2, true), "the latest question");
    }
}
