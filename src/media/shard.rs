//! Media threads: a few OS threads, each with a current-thread runtime, on which calls live and stay.
//!
//! A task is placed once, on the shard with the fewest tasks, and never moves: its packets, timers and codec
//! state stay in one core's cache and need no lock. Shards never block; work that would (files, DNS) is done
//! before a task comes here.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio::task::{JoinSet, LocalSet};

use crate::clock;

/// Tasks that may wait to be started on one shard.
const INBOX: usize = 256;

/// How often a thread shows that it runs.
const BEAT: Duration = Duration::from_millis(500);
/// One that has not shown it for so long stands still: its callers have heard nothing for longer than any jitter buffer holds.
const STILL: Duration = Duration::from_secs(5);

type Start = Box<dyn FnOnce() -> Pin<Box<dyn Future<Output = ()>>> + Send>;

/// The media threads. Cheap to clone; the threads end when [`Shards::shutdown`] is called.
#[derive(Clone, Debug)]
pub struct Shards(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    shards: Vec<Shard>,
}

#[derive(Debug)]
struct Shard {
    /// Taken out to close it.
    inbox: Mutex<Option<mpsc::Sender<Start>>>,
    load: Arc<AtomicUsize>,
    /// When it was there last: milliseconds since `began`.
    seen: Arc<AtomicU64>,
    began: Instant,
    thread: Mutex<Option<thread::JoinHandle<()>>>,
}

/// Why a task could not be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShardError {
    /// The shards are shutting down.
    #[error("the media threads are shutting down")]
    Closed,
    /// Too many tasks wait to be started.
    #[error("too many calls are starting at once")]
    Full,
}

impl Shards {
    /// Starts `count` media threads; 0 is half the cores, but two where there are two: a few hundred Opus calls
    /// fill one core, and a full core is late.
    ///
    /// # Errors
    /// The operating system refuses a thread or a runtime.
    pub fn start(count: usize) -> std::io::Result<Self> {
        let count = match count {
            0 => thread::available_parallelism().map_or(1, |cores| (cores.get() / 2).max(cores.get().min(2))),
            count => count,
        };
        let shards = (0..count).map(Shard::start).collect::<std::io::Result<Vec<_>>>()?;
        Ok(Self(Arc::new(Inner { shards })))
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.shards.len()
    }

    /// Threads that stand still: something on them blocks or computes without end, and their calls are silent.
    pub fn still(&self, now: Instant) -> usize {
        self.0.shards.iter().filter(|shard| shard.is_still(now)).count()
    }

    /// Runs the future that `start` makes on the least loaded shard, of those that run. Both the closure and the future run
    /// there, so the future need not be `Send`. A panic in it ends it alone.
    ///
    /// # Errors
    /// Shutting down, or more than a few hundred tasks wait to be started.
    pub fn spawn<F, T>(&self, start: F) -> Result<(), ShardError>
    where
        F: FnOnce() -> T + Send + 'static,
        T: Future<Output = ()> + 'static,
    {
        let now = clock::now();
        let busy = |shard: &&Shard| (shard.is_still(now), shard.load.load(Relaxed));
        let shard = self.0.shards.iter().min_by_key(busy).ok_or(ShardError::Closed)?;
        let inbox = lock(&shard.inbox).clone().ok_or(ShardError::Closed)?;
        let share = Share::of(&shard.load);
        let start: Start = Box::new(move || {
            Box::pin(async move {
                // Held by the task, so that a panic, too, gives the share back.
                let _share = share;
                start().await;
            })
        });
        // overflow: refused
        inbox.try_send(start).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => ShardError::Full,
            mpsc::error::TrySendError::Closed(_) => ShardError::Closed,
        })
    }

    /// Takes no new tasks, lets those that run end by themselves, and joins the threads. Blocks: call it from a
    /// thread that may. Tasks that do not end keep it waiting, so end them first.
    pub fn shutdown(&self) {
        for shard in &self.0.shards {
            lock(&shard.inbox).take();
        }
        for shard in &self.0.shards {
            let thread = lock(&shard.thread).take();
            if let Some(Err(_)) = thread.map(thread::JoinHandle::join) {
                tracing::error!("a media thread panicked");
            }
        }
    }
}

impl Shard {
    fn start(number: usize) -> std::io::Result<Self> {
        let (inbox, mut starts) = mpsc::channel::<Start>(INBOX);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (seen, began) = (Arc::new(AtomicU64::new(0)), clock::now());
        let shown = seen.clone();
        let thread = thread::Builder::new().name(format!("media-{number}")).spawn(move || {
            let local = LocalSet::new();
            local.block_on(&runtime, async move {
                let mut tasks = JoinSet::new();
                let mut beat = tokio::time::interval(BEAT);
                loop {
                    tokio::select! {
                        _ = beat.tick() => shown.store((clock::now() - began).as_millis() as u64, Relaxed),
                        start = starts.recv() => match start {
                            Some(start) => { tasks.spawn_local(async move { start().await }); }
                            None => break,
                        },
                        // Reaps, so that ended tasks do not pile up; a panic has been reported by the hook.
                        Some(_) = tasks.join_next() => {}
                    }
                }
                while tasks.join_next().await.is_some() {}
            });
        })?;
        let (inbox, thread) = (Mutex::new(Some(inbox)), Mutex::new(Some(thread)));
        Ok(Self { inbox, load: Arc::default(), seen, began, thread })
    }

    fn is_still(&self, now: Instant) -> bool {
        let seen = self.began + Duration::from_millis(self.seen.load(Relaxed));
        // One that is being closed waits for its tasks and for nothing else.
        now.saturating_duration_since(seen) > STILL && lock(&self.inbox).is_some()
    }
}

/// One task's part of a shard's load.
struct Share(Arc<AtomicUsize>);

impl Share {
    fn of(load: &Arc<AtomicUsize>) -> Self {
        load.fetch_add(1, Relaxed);
        Self(load.clone())
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // A panic while it was held leaves an `Option` that is either there or not: both are fine.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;

    #[test]
    fn tasks_spread_run_and_end_before_shutdown_returns() {
        let shards = Shards::start(2).unwrap();
        let (sender, mut receiver) = mpsc::channel(8);
        for n in 0..4 {
            let sender = sender.clone();
            shards
                .spawn(move || async move {
                    let local = Rc::new(n);
                    tokio::task::yield_now().await;
                    sender.send((*local, thread::current().name().map(str::to_owned))).await.unwrap();
                })
                .unwrap();
        }
        drop(sender);
        shards.shutdown();
        let mut seen = Vec::new();
        while let Some((n, name)) = receiver.blocking_recv() {
            assert!(name.unwrap().starts_with("media-"));
            seen.push(n);
        }
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2, 3]);
        assert_eq!(shards.spawn(|| async {}), Err(ShardError::Closed));
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "threads are looked at while real time passes")]
    fn a_thread_that_stands_still_is_told_and_gets_no_new_tasks() {
        let shards = Shards::start(2).unwrap();
        let (free, blocked) = std::sync::mpsc::sync_channel::<()>(1);
        let (sender, mut receiver) = mpsc::channel(1);
        let begun = sender.clone();
        // It stands until the test lets it go on.
        shards
            .spawn(move || async move {
                begun.send(()).await.unwrap();
                let _ = blocked.recv();
            })
            .unwrap();
        assert_eq!(receiver.blocking_recv(), Some(()));
        let wait = |wanted: usize| {
            while shards.still(clock::now()) != wanted {
                thread::sleep(BEAT / 5);
            }
        };
        wait(1);
        // The other has more to do and is chosen all the same.
        for _ in 0..3 {
            let sender = sender.clone();
            shards.spawn(move || async move { sender.send(()).await.unwrap() }).unwrap();
            assert_eq!(receiver.blocking_recv(), Some(()));
        }
        drop(free);
        wait(0);
        shards.shutdown();
        assert_eq!(shards.still(clock::now() + 2 * STILL), 0, "nobody asks any more");
    }

    #[test]
    fn a_panicking_task_costs_the_others_nothing() {
        let shards = Shards::start(1).unwrap();
        let (sender, mut receiver) = mpsc::channel(1);
        shards.spawn(|| async { panic!("on purpose") }).unwrap();
        shards.spawn(move || async move { sender.send(()).await.unwrap() }).unwrap();
        assert_eq!(receiver.blocking_recv(), Some(()));
        shards.shutdown();
        assert_eq!(shards.0.shards[0].load.load(Relaxed), 0);
    }
}
