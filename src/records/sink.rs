//! The way of records into a database that may be away: what it does not take waits on disk.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::ledger::Entry;
use super::postgres::Postgres;
use super::record::Record;
use super::spool::{Line, Spool};
use super::usage::Pending;
use super::writer::{BATCH, KEPT};
use super::{Config, RecordError};
use crate::clock::{self, Sparse};
use crate::postgres::{Address, Error, Health};

/// Owns the connection that writes, and the file of what waits.
pub(super) struct Sink {
    db: Postgres,
    spool: Spool,
    /// Neither in the database nor on disk yet.
    ready: VecDeque<Line>,
    /// This process, among all that write.
    holder: String,
    /// Of the speech that was counted last.
    number: i64,
    lease: Duration,
    tended: Option<Instant>,
    /// Whether records that have ended are to be delivered, and who does.
    hook: Option<Arc<Notify>>,
}

impl Sink {
    /// The way to `address`; sends what an earlier process left on disk first.
    ///
    /// # Errors
    /// The address or the file on disk cannot be used.
    pub(super) fn new(config: &Config, address: &Address, due: Arc<Notify>) -> Result<Self, RecordError> {
        let holder = uuid::Uuid::new_v4().simple().to_string();
        Ok(Self {
            db: Postgres::of(address, holder.clone())?,
            spool: Spool::open(&config.spool).map_err(RecordError::Spool)?,
            ready: VecDeque::new(),
            holder,
            number: 0,
            lease: Duration::from_secs(config.lease_s.max(1).into()),
            tended: None,
            hook: config.webhook.is_some().then_some(due),
        })
    }

    /// Whether the database can be used.
    pub(super) fn health(&self) -> Arc<Health> {
        self.db.health()
    }

    /// Whether everything is in the database.
    pub(super) fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.spool.is_empty()
    }

    /// How often this is to be called, whether there is something to write or not.
    pub(super) fn patience(&self) -> Duration {
        self.lease / 3
    }

    /// Takes what is to be written, and brings it into the database or onto the disk.
    ///
    /// # Errors
    /// Why something is not in the database yet.
    pub(super) fn flush(
        &mut self,
        waiting: &mut VecDeque<Record>,
        spoken: &mut Pending,
        now: Duration,
    ) -> Result<(), RecordError> {
        self.ready.extend(waiting.drain(..).map(|record| Line::Record(Box::new(Entry::of(&record, now)))));
        if !spoken.is_empty() {
            self.number += 1;
            self.ready.push_back(Line::Speech(spoken.freeze(&self.holder, self.number, now)));
        }
        while self.ready.len() > KEPT {
            self.ready.pop_front();
            metrics::counter!("antiphon_records_dropped_total").increment(1);
        }
        let sent = self.forward(now);
        if sent.is_err() && !self.ready.is_empty() {
            self.put_aside()?;
        }
        metrics::gauge!("antiphon_records_spooled_bytes").set(self.spool.waiting() as f64);
        sent
    }

    /// What is on disk first, then the rest: a number of counted speech must not overtake an earlier one.
    fn forward(&mut self, now: Duration) -> Result<(), RecordError> {
        while !self.spool.is_empty() {
            let (lines, length) = self.spool.next(BATCH).map_err(RecordError::Spool)?;
            self.send(&lines, now)?;
            self.spool.sent(length).map_err(RecordError::Spool)?;
        }
        while !self.ready.is_empty() {
            let lines: Vec<Line> = self.ready.iter().take(BATCH).cloned().collect();
            self.send(&lines, now)?;
            self.ready.drain(..lines.len());
        }
        Ok(())
    }

    fn put_aside(&mut self) -> Result<(), RecordError> {
        let dropped = self.spool.push(self.ready.make_contiguous()).map_err(RecordError::Spool)?;
        metrics::counter!("antiphon_records_dropped_total").increment(dropped as u64);
        self.ready.clear();
        Ok(())
    }

    /// Writes lines; one that the database refuses by itself is left out, so that it does not hold up the others.
    fn send(&mut self, lines: &[Line], now: Duration) -> Result<(), RecordError> {
        static LINES: Sparse = Sparse::new();
        match self.write(lines, now) {
            Err(RecordError::Postgres(Error::Refused(_))) => {}
            outcome => return outcome,
        }
        for line in lines {
            match self.write(std::slice::from_ref(line), now) {
                Err(RecordError::Postgres(Error::Refused(error))) => {
                    metrics::counter!("antiphon_records_dropped_total").increment(1);
                    if let Some(missed) = LINES.admit(clock::now()) {
                        tracing::error!(%error, missed, "the database refuses a record, which is left out");
                    }
                }
                outcome => outcome?,
            }
        }
        Ok(())
    }

    fn write(&mut self, lines: &[Line], now: Duration) -> Result<(), RecordError> {
        let records = lines.iter().filter_map(|line| match line {
            Line::Record(entry) => Some((**entry).clone()),
            Line::Speech(_) => None,
        });
        let records: Vec<Entry> = records.collect();
        let ended = records.iter().any(|entry| entry.ended_ms.is_some());
        if !records.is_empty() {
            self.db.write(records, now, self.hook.is_some())?;
        }
        for line in lines {
            if let Line::Speech(counted) = line {
                self.db.count(counted)?;
            }
        }
        if let Some(due) = self.hook.as_ref().filter(|_| ended) {
            due.notify_one();
        }
        Ok(())
    }

    /// Says that this gateway lives, and closes records of those that do not.
    ///
    /// # Errors
    /// The database is away.
    pub(super) fn tend(&mut self, now: Instant) -> Result<(), RecordError> {
        if self.tended.is_some_and(|at| now.saturating_duration_since(at) < self.patience()) {
            return Ok(());
        }
        let closed = self.db.tend(self.lease, (now, clock::wall()), self.hook.is_some())?;
        self.tended = Some(now);
        if closed > 0 {
            tracing::warn!(calls = closed, "records of calls that another gateway left open were closed");
            if let Some(due) = &self.hook {
                due.notify_one();
            }
        }
        Ok(())
    }

    /// Forgets records that ended before `before`.
    pub(super) fn forget(&mut self, before: Duration) -> Result<(), RecordError> {
        self.db.forget(before)
    }

    /// The gateway ends.
    pub(super) fn leave(mut self) {
        // Where this cannot be said the lease ends by itself.
        let _ = self.db.leave();
        if !self.is_empty() {
            tracing::warn!("records wait on disk for the next start: the database is away");
        }
    }
}
