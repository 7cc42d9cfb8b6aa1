//! Whisper on threads of its own, so that neither media nor signalling ever wait for a network.
//!
//! Owns the queue of recognitions: bounded, those that somebody waits for first. Each worker computes on a thread
//! pool of its own size, since the matrix products would otherwise take every core; or on a GPU, whose steps they share.
//!
//! # Failures
//! A recognition whose GPU fails under it, or is not there, is done again on the CPU, one at a time ([`Spare`]): calls
//! hear on, later than usual. It goes back to the GPU as soon as that is there.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use tokio::sync::oneshot;

use super::whisper::gpu::{Own, Seat, TEXTS};
use super::whisper::{BEAMS, HearError, LoadError, Options, Stop, Suppressed, Transcript, Whisper};
use super::{Answer, Recogniser, Request, Trouble, Words};
use crate::audio::from_i16;

/// Recognitions that may wait: seconds of work for one worker. More are refused.
const QUEUE: usize = 64;
/// Threads of one worker: more make one turn faster, fewer make many turns faster.
const THREADS: usize = 4;

/// Whisper, for all calls.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<thread::JoinHandle<()>>,
}

struct Shared {
    queue: Mutex<Queue>,
    work: Condvar,
}

#[derive(Default)]
struct Queue {
    urgent: VecDeque<Job>,
    idle: VecDeque<Job>,
    closed: bool,
}

struct Job {
    request: Request,
    answer: oneshot::Sender<Result<Option<Words>, Trouble>>,
}

/// Why the threads do not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The checkpoint cannot be used.
    #[error("[recognizer] model: {0}; `antiphon model verify` tells more")]
    Load(#[from] LoadError),
    /// The checkpoint does not know the language.
    #[error("[recognizer] language = \"{0}\": the model does not know it")]
    Language(String),
    /// The operating system refuses a thread.
    #[error("cannot start threads for recognition: {0}")]
    Threads(String),
}

impl Pool {
    /// Loads the checkpoint in `model` and starts `threads` threads (0: half the cores). Blocks while it loads.
    ///
    /// # Errors
    /// The checkpoint cannot be used, does not know `language`, or there are no threads.
    pub fn start(model: &Path, language: Option<&str>, threads: usize) -> Result<Self, PoolError> {
        let whisper = Arc::new(Whisper::load(model)?);
        if let Some(language) = language.filter(|language| !whisper.knows(language)) {
            return Err(PoolError::Language(language.into()));
        }
        let mut pool = Self::empty();
        let threads = threads_of(threads);
        for number in 0..threads.div_ceil(THREADS) {
            let cores = cores(number, (threads - number * THREADS).min(THREADS))?;
            pool.add(number, Hearer::Cpu(whisper.clone(), cores))?;
        }
        Ok(pool)
    }

    /// As [`Self::start`], on a GPU: in `seat`, onto which a voice loads the checkpoint, or which is `own`, and is loaded
    /// now. `threads`: of the CPU, while the GPU is not there.
    ///
    /// # Errors
    /// As [`Self::start`]; or its own device cannot be used.
    pub fn start_on(
        seat: Seat,
        own: Option<Own>,
        model: &Path,
        language: Option<&str>,
        threads: usize,
    ) -> Result<Self, PoolError> {
        let whisper = Arc::new(Whisper::on_gpu(model, seat, own)?);
        if let Some(language) = language.filter(|language| !whisper.knows(language)) {
            return Err(PoolError::Language(language.into()));
        }
        let spare = Arc::new(Spare::new(model, threads_of(threads)));
        let mut pool = Self::empty();
        // They wait for the device most of the time.
        for number in 0..TEXTS {
            pool.add(number, Hearer::Gpu(whisper.clone(), spare.clone()))?;
        }
        Ok(pool)
    }

    fn empty() -> Self {
        let shared = Arc::new(Shared { queue: Mutex::default(), work: Condvar::new() });
        Self { shared, workers: Vec::new() }
    }

    fn add(&mut self, number: usize, hearer: Hearer) -> Result<(), PoolError> {
        let shared = self.shared.clone();
        let worker = thread::Builder::new().name(format!("hear-{number}")).spawn(move || {
            while let Some(job) = shared.next() {
                work(&hearer, job);
            }
        });
        self.workers.push(worker.map_err(|e| PoolError::Threads(e.to_string()))?);
        Ok(())
    }
}

fn threads_of(threads: usize) -> usize {
    match threads {
        0 => thread::available_parallelism().map_or(1, |cores| cores.get() / 2).max(1),
        threads => threads,
    }
}

/// Threads for the products of worker `number`.
fn cores(number: usize, width: usize) -> Result<rayon::ThreadPool, PoolError> {
    let cores = rayon::ThreadPoolBuilder::new().num_threads(width).thread_name(move |n| format!("hear-{number}-{n}"));
    cores.build().map_err(|e| PoolError::Threads(e.to_string()))
}

/// Where a worker computes.
enum Hearer {
    Cpu(Arc<Whisper>, rayon::ThreadPool),
    Gpu(Arc<Whisper>, Arc<Spare>),
}

impl Hearer {
    fn knows(&self, language: &str) -> bool {
        let (Hearer::Cpu(whisper, _) | Hearer::Gpu(whisper, _)) = self;
        whisper.knows(language)
    }

    fn transcribe(&self, samples: &[f32], options: &Options, stop: &Stop) -> Result<Option<Transcript>, HearError> {
        match self {
            Hearer::Cpu(whisper, cores) => cores.install(|| whisper.transcribe(samples, options, stop)),
            Hearer::Gpu(whisper, spare) => match whisper.transcribe(samples, options, stop) {
                Err(HearError::Lost(reason)) => spare.transcribe(&reason, samples, options, stop),
                result => {
                    spare.rest();
                    result
                }
            },
        }
    }
}

/// The CPU, for what the GPU could not do. Its weights are read when they are needed first.
struct Spare {
    model: PathBuf,
    threads: usize,
    loaded: OnceLock<Result<(Whisper, rayon::ThreadPool), String>>,
    /// One at a time, with all threads: so the first answers come soonest.
    turn: Mutex<()>,
    /// It did the last recognition.
    serves: AtomicBool,
}

impl Spare {
    fn new(model: &Path, threads: usize) -> Self {
        let (loaded, turn) = (OnceLock::new(), Mutex::default());
        Self { model: model.to_owned(), threads, loaded, turn, serves: AtomicBool::new(false) }
    }

    fn transcribe(
        &self,
        reason: &str,
        samples: &[f32],
        options: &Options,
        stop: &Stop,
    ) -> Result<Option<Transcript>, HearError> {
        if !self.serves.swap(true, Ordering::Relaxed) {
            tracing::warn!("Whisper recognises on the CPU: {reason}");
        }
        let load = || {
            let whisper = Whisper::load(&self.model).map_err(|e| e.to_string())?;
            Ok((whisper, cores(0, self.threads).map_err(|e| e.to_string())?))
        };
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        match self.loaded.get_or_init(load) {
            Ok((whisper, cores)) => cores.install(|| whisper.transcribe(samples, options, stop)),
            Err(why) => Err(HearError::Lost(format!("{reason}; and the CPU: {why}"))),
        }
    }

    /// The GPU works.
    fn rest(&self) {
        if self.serves.swap(false, Ordering::Relaxed) {
            tracing::info!("Whisper recognises on the GPU again");
        }
    }
}

impl Recogniser for Pool {
    fn kind(&self) -> &'static str {
        "whisper"
    }

    fn recognise(&self, request: Request) -> Answer {
        let (answer, result) = oneshot::channel();
        let refused = self.shared.add(Job { request, answer });
        Box::pin(async move {
            match refused {
                Some(trouble) => Err(trouble),
                None => result.await.unwrap_or_else(|_| Err(Trouble::Failed("the recogniser has stopped".into()))),
            }
        })
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let mut queue = self.shared.lock();
        queue.closed = true;
        for job in queue.urgent.drain(..).collect::<Vec<_>>().into_iter().chain(queue.idle.drain(..)) {
            job.request.stop.set();
        }
        drop(queue);
        self.shared.work.notify_all();
        for worker in self.workers.drain(..) {
            // A panic was reported when it happened; every recognition is guarded by itself.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // A panic while it was held leaves whole jobs in it.
        self.queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn add(&self, job: Job) -> Option<Trouble> {
        let mut queue = self.lock();
        // Their calls do not wait for these any more, and they must not make the queue look full.
        queue.urgent.retain(|job| !job.is_over());
        queue.idle.retain(|job| !job.is_over());
        if !job.request.urgent {
            if !queue.urgent.is_empty() || !queue.idle.is_empty() {
                return Some(Trouble::Busy);
            }
            queue.idle.push_back(job);
        } else if queue.urgent.len() >= QUEUE {
            return Some(Trouble::Overloaded);
        } else {
            queue.urgent.push_back(job);
        }
        drop(queue);
        self.work.notify_one();
        None
    }

    /// The next job that somebody still wants; `None`: there will be none.
    fn next(&self) -> Option<Job> {
        let mut queue = self.lock();
        loop {
            if queue.closed {
                return None;
            }
            let job = queue.urgent.pop_front().or_else(|| queue.idle.pop_front());
            match job {
                Some(job) if job.is_over() => {}
                Some(job) => return Some(job),
                None => queue = self.work.wait(queue).unwrap_or_else(|poisoned| poisoned.into_inner()),
            }
        }
    }
}

impl Job {
    fn is_over(&self) -> bool {
        self.request.stop.is_set() || self.answer.is_closed()
    }
}

fn work(hearer: &Hearer, job: Job) {
    let Job { request, answer } = job;
    let samples: Vec<f32> = request.pcm.iter().map(|sample| from_i16(*sample)).collect();
    // An agent may name a language that the model does not know: then it listens for those it does.
    let language = request.language.clone().filter(|language| hearer.knows(language));
    // A text that the next one replaces is not worth more than one try.
    let beams = if request.urgent { BEAMS } else { 1 };
    let options = Options { language, beams, ..Options::default() };
    let compute = || hearer.transcribe(&samples, &options, &request.stop);
    let result = match catch_unwind(AssertUnwindSafe(compute)) {
        Ok(Ok(Some(transcript))) => {
            if let Some(reason) = transcript.suppressed {
                count(reason);
            }
            let (text, language, confidence) = (transcript.text, transcript.language, transcript.confidence);
            Ok(Some(Words { text, language, confidence }))
        }
        Ok(Ok(None)) => Ok(None),
        Ok(Err(error)) => Err(Trouble::Failed(error.to_string())),
        Err(_) => Err(Trouble::Failed("the recogniser failed on this sound".into())),
    };
    // The call may not wait any more.
    let _ = answer.send(result);
}

fn count(reason: Suppressed) {
    metrics::counter!("antiphon_recognizer_suppressed_total", "reason" => reason.label()).increment(1);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hear::Stop;
    use crate::telemetry::shown::Shown;

    fn request(urgent: bool) -> Request {
        Request { pcm: vec![0; 1_600], language: None, urgent, stop: Stop::default() }
    }

    fn job(urgent: bool) -> (Job, oneshot::Receiver<Result<Option<Words>, Trouble>>) {
        let (answer, result) = oneshot::channel();
        (Job { request: request(urgent), answer }, result)
    }

    #[test]
    fn what_is_waited_for_goes_first_and_the_queue_has_an_end() {
        let shared = Shared { queue: Mutex::default(), work: Condvar::new() };
        let mut waiting = Vec::new();
        let mut add = |urgent: bool| {
            let (job, result) = job(urgent);
            waiting.push(result);
            shared.add(job)
        };
        assert_eq!(add(false), None);
        assert_eq!(add(false), Some(Trouble::Busy));
        for _ in 0..QUEUE {
            assert_eq!(add(true), None);
        }
        assert_eq!(add(true), Some(Trouble::Overloaded));
        assert!(shared.next().expect("a job").request.urgent);
        // Everybody hangs up but the last.
        let last = waiting.split_off(waiting.len() - 2);
        waiting.clear();
        assert!(shared.next().expect("the last").request.urgent);
        assert!(shared.lock().urgent.is_empty() && shared.lock().idle.iter().all(Job::is_over));
        drop(last);
    }

    /// Without a voice the checkpoint is not loaded into a seat.
    #[tokio::test]
    async fn the_cpu_recognises_while_no_gpu_is_there_and_gives_the_same_words() {
        use super::super::whisper::gpu::{Elt, seat};
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/whisper");
        let seat = seat(&model, Elt::F16).expect("a checkpoint");
        let pool = Pool::start_on(seat, None, &model, Some("en"), 1).expect("it starts");
        let sound = Request { pcm: (0..16_000).map(|n| (n % 97) * 300).collect(), ..request(true) };
        let words = pool.recognise(sound.clone()).await.expect("an answer").expect("not stopped");
        let cpu = Pool::start(&model, Some("en"), 1).expect("it loads");
        assert_eq!(words, cpu.recognise(sound).await.expect("an answer").expect("not stopped"));
    }

    #[test]
    fn words_that_are_not_believed_are_counted_by_why() {
        let shown = Shown::here();
        for reason in [Suppressed::NoSpeech, Suppressed::Repetition] {
            count(reason);
            assert_eq!(
                shown.sum(&format!("antiphon_recognizer_suppressed_total{{reason=\"{}\"}}", reason.label())),
                1.0
            );
        }
    }

    #[tokio::test]
    async fn a_small_checkpoint_answers_and_a_request_that_was_given_up_does_not() {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/whisper");
        assert!(matches!(Pool::start(&model, Some("de"), 1), Err(PoolError::Language(_))));
        let pool = Pool::start(&model, Some("en"), 1).expect("it loads");
        let words = pool.recognise(request(true)).await.expect("an answer").expect("not stopped");
        assert_eq!(words.language, "en");
        let given_up = request(true);
        given_up.stop.set();
        // Never computed: it is refused, or answered without words.
        assert!(!matches!(pool.recognise(given_up).await, Ok(Some(_))));
    }
}
