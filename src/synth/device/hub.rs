//! The thread on which this machine talks to workers.
//!
//! # Why
//! Nothing computes there: one thread copies the audio of all workers, and takes no time from the threads of calls. It is
//! started with the first worker, which may be found long after the engine has started.

use std::sync::Mutex;

use futures_util::future::BoxFuture;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::lock;

/// Connections that may wait for the thread, which takes them at once.
const NEW: usize = 64;

/// Where connections are run. The thread ends when this is dropped and the last of them has ended.
#[derive(Default)]
pub(super) struct Hub(Mutex<Option<mpsc::Sender<BoxFuture<'static, ()>>>>);

impl Hub {
    /// Runs `connection` until it ends.
    ///
    /// # Errors
    /// There is no thread, or it takes no more.
    pub(super) fn run(&self, connection: impl Future<Output = ()> + Send + 'static) -> Result<(), String> {
        let mut thread = lock(&self.0);
        let to = match &*thread {
            Some(to) => to,
            None => thread.insert(start().map_err(|error| format!("no thread for workers: {error}"))?),
        };
        // overflow: refused
        to.try_send(Box::pin(connection)).map_err(|_| "too many workers at once".to_owned())
    }
}

fn start() -> std::io::Result<mpsc::Sender<BoxFuture<'static, ()>>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (to, mut new) = mpsc::channel::<BoxFuture<'static, ()>>(NEW);
    let run = async move {
        let mut running = JoinSet::new();
        loop {
            tokio::select! {
                connection = new.recv() => match connection {
                    Some(connection) => drop(running.spawn(connection)),
                    None => break,
                },
                // One that panicked ends alone.
                Some(_) = running.join_next() => {}
            }
        }
        // They were told to stop, and tell their listeners so.
        while running.join_next().await.is_some() {}
    };
    std::thread::Builder::new().name("workers".into()).spawn(move || runtime.block_on(run))?;
    Ok(to)
}
