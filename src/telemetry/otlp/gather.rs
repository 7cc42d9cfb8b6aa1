//! What one signal's records have in common: they are gathered for a moment, delivered together, and dropped and counted where
//! that fails.

use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout, timeout_at};

use super::client::PATIENCE;

/// Items of one request at most.
const BATCH: usize = 512;
/// How long items wait for others.
const LINGER: Duration = Duration::from_secs(2);

/// Traces or logs.
pub(super) trait Signal: Send {
    /// What parts of the gateway told.
    type Record: Send;
    /// What the collector gets.
    type Item: Send;
    /// For people.
    const NAME: &'static str;

    /// What follows from one more record.
    fn take(&mut self, record: Self::Record, items: &mut Vec<Self::Item>);

    /// Gives them to the collector; the error is for people.
    fn deliver(&self, items: Vec<Self::Item>) -> impl Future<Output = Result<(), String>> + Send;

    /// The collector took so many.
    fn exported(count: u64);

    /// So many are lost, for want of room (`queue`) or because of the collector (`delivery`).
    fn dropped(count: u64, reason: &'static str);
}

/// Delivers until `stop` says so, and then what is left; bounded in time.
pub(super) async fn gather<S: Signal>(
    mut signal: S,
    mut records: mpsc::Receiver<S::Record>,
    mut stop: watch::Receiver<bool>,
) {
    let (mut reachable, mut stopping) = (true, false);
    while !stopping {
        let mut items = Vec::new();
        let first = tokio::select! {
            biased;
            record = records.recv() => record,
            _ = stop.wait_for(|stop| *stop) => None,
        };
        match first {
            Some(record) => signal.take(record, &mut items),
            None => stopping = true,
        }
        let mut deadline = Instant::now() + if stopping { Duration::ZERO } else { LINGER };
        while items.len() < BATCH {
            let record = tokio::select! {
                biased;
                record = timeout_at(deadline, records.recv()) => record,
                _ = stop.wait_for(|stop| *stop), if !stopping => {
                    stopping = true;
                    // What waits is taken yet; nothing is waited for.
                    deadline = Instant::now();
                    continue;
                }
            };
            match record {
                Ok(Some(record)) => signal.take(record, &mut items),
                Ok(None) | Err(_) => break,
            }
        }
        if items.is_empty() {
            continue;
        }
        let count = items.len() as u64;
        let delivered = timeout(PATIENCE * 2, signal.deliver(items)).await;
        match delivered.unwrap_or_else(|_| Err("no answer".into())) {
            Ok(()) => {
                S::exported(count);
                if !std::mem::replace(&mut reachable, true) {
                    tracing::info!("the collector takes {} again", S::NAME);
                }
            }
            Err(reason) => {
                S::dropped(count, "delivery");
                // Once, not with every batch.
                if std::mem::replace(&mut reachable, false) {
                    tracing::warn!(reason, "the collector takes no {}; they are dropped", S::NAME);
                }
            }
        }
    }
    S::dropped(records.len() as u64, "queue");
}
