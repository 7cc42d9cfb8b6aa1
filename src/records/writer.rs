//! The thread that writes records: many in one transaction, tried again while the disk refuses.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::record::Record;
use super::sink::Sink;
use super::store::Store;
use super::usage::{COLLECT, Pending};
use super::{Config, Meters, RecordError};
use crate::clock::{self, Sparse};
use crate::postgres::{Database, Health};

/// Records of one transaction.
pub(super) const BATCH: usize = 512;
/// Records that are kept in memory while the database refuses them; then the oldest are dropped.
pub(super) const KEPT: usize = 20_000;
/// How long to wait after the database refused.
const STALL: Duration = if cfg!(test) { Duration::from_millis(20) } else { Duration::from_secs(1) };
/// How often old records are forgotten.
const TIDY: Duration = Duration::from_secs(3_600);

pub(super) enum Message {
    Write(Box<Record>),
    /// Write what waits and end.
    Stop,
}

pub(super) struct Writer {
    config: Config,
    due: Arc<Notify>,
    /// The file of this gateway, while it is open.
    store: Option<Store>,
    /// In place of it, the way to the database of several.
    sink: Option<Sink>,
    waiting: VecDeque<Record>,
    tidied: Option<Instant>,
    meters: Meters,
    spoken: Pending,
    collected: Option<Instant>,
}

impl Writer {
    pub(super) fn new(config: Config, due: Arc<Notify>, meters: Meters) -> Result<Self, RecordError> {
        let (waiting, spoken) = (VecDeque::new(), Pending::default());
        let sink = match &config.database {
            Database::Postgres(address) if config.enabled => Some(Sink::new(&config, address, due.clone())?),
            _ => None,
        };
        Ok(Self { config, due, store: None, sink, waiting, tidied: None, meters, spoken, collected: None })
    }

    /// Whether the database can be used, where it is one that may be away.
    pub(super) fn health(&self) -> Option<Arc<Health>> {
        self.sink.as_ref().map(Sink::health)
    }

    pub(super) fn run(mut self, messages: &Receiver<Message>) {
        static LINES: Sparse = Sparse::new();
        let mut stopping = false;
        while !stopping {
            let written = self.waiting.is_empty() && self.spoken.is_empty();
            let wait = match &self.sink {
                Some(sink) if written && sink.is_empty() => sink.patience().min(COLLECT),
                None if written => COLLECT,
                _ => STALL,
            };
            match messages.recv_timeout(wait) {
                Ok(message) => stopping = self.take(message),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => stopping = true,
            }
            // What goes to another machine may take seconds each time, and then takes all that there is.
            let most = if self.sink.is_some() { KEPT } else { BATCH };
            while !stopping && self.waiting.len() < most {
                match messages.try_recv() {
                    Ok(message) => stopping = self.take(message),
                    Err(_) => break,
                }
            }
            self.collect(stopping);
            if let Err(error) = self.flush() {
                // The connection may be what is wrong.
                self.store = None;
                // What waits on disk is told of by the health of the database.
                let on_disk = self.sink.is_some() && matches!(error, RecordError::Postgres(_));
                if !on_disk && let Some(missed) = LINES.admit(clock::now()) {
                    tracing::error!(%error, waiting = self.waiting.len(), missed, "records cannot be written");
                }
            }
            self.tidy();
        }
        if let Some(sink) = self.sink {
            sink.leave();
        }
        if !self.waiting.is_empty() {
            tracing::error!(records = self.waiting.len(), "records were lost: the database takes none");
        }
    }

    fn take(&mut self, message: Message) -> bool {
        match message {
            Message::Stop => return true,
            Message::Write(record) => self.waiting.push_back(*record),
        }
        if self.waiting.len() > KEPT {
            self.waiting.pop_front();
            metrics::counter!("antiphon_records_dropped_total").increment(1);
        }
        false
    }

    fn collect(&mut self, stopping: bool) {
        let now = clock::now();
        if !stopping && self.collected.is_some_and(|at| now.saturating_duration_since(at) < COLLECT) {
            return;
        }
        self.collected = Some(now);
        for meter in &*self.meters.lock().unwrap_or_else(PoisonError::into_inner) {
            self.spoken.collect(meter);
        }
    }

    fn flush(&mut self) -> Result<(), RecordError> {
        if let Some(sink) = &mut self.sink {
            // Who has not said that it lives writes all the same: others only close what it left open.
            let tended = sink.tend(clock::now());
            let flushed = sink.flush(&mut self.waiting, &mut self.spoken, clock::wall());
            return tended.and(flushed);
        }
        let hook = self.config.webhook.is_some();
        while !self.waiting.is_empty() {
            let store = opened(&mut self.store, &self.config)?;
            let count = self.waiting.len().min(BATCH);
            let records = &self.waiting.make_contiguous()[..count];
            store.write(records, clock::wall(), hook)?;
            let ended = records.iter().any(|record| record.ended_ms.is_some());
            self.waiting.drain(..count);
            if hook && ended {
                self.due.notify_one();
            }
        }
        if !self.spoken.is_empty() {
            opened(&mut self.store, &self.config)?.spoken(&mut self.spoken, clock::wall())?;
        }
        Ok(())
    }

    fn tidy(&mut self) {
        let days @ 1.. = self.config.keep_days else { return };
        if self.store.is_none() && self.sink.is_none() {
            return;
        }
        let now = clock::now();
        if self.tidied.is_some_and(|at| now.saturating_duration_since(at) < TIDY) {
            return;
        }
        self.tidied = Some(now);
        let keep = Duration::from_secs(u64::from(days) * 86_400);
        let before = clock::wall().saturating_sub(keep);
        let forgotten = match (&self.store, &mut self.sink) {
            (_, Some(sink)) => sink.forget(before),
            (Some(store), None) => store.forget(before).map(|_| ()).map_err(RecordError::from),
            (None, None) => Ok(()),
        };
        if let Err(error) = forgotten {
            tracing::warn!(%error, "old records were not forgotten");
        }
    }
}

fn opened<'a>(store: &'a mut Option<Store>, config: &Config) -> Result<&'a mut Store, RecordError> {
    Ok(match store {
        Some(store) => store,
        closed => match config.database.path() {
            Some(path) => closed.insert(Store::open(path)?),
            // Its records go another way.
            None => return Err(RecordError::NotFound),
        },
    })
}
