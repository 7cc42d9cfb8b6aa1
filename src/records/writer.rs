//! The thread that writes records: many in one transaction, tried again while the disk refuses.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::record::Record;
use super::sink::Sink;
use super::store::Store;
use super::usage::{COLLECT, Pending};
use super::{Config, Meters, RecordError};
use crate::clock::{self, Age, DAY, Sparse};
use crate::fault;
use crate::postgres::{Database, Health};
use crate::sqlite::{is_damaged, put_aside};
use crate::supervise::Part;

/// Records of one transaction.
pub(super) const BATCH: usize = 512;
/// Records that are kept in memory while the database refuses them; then the oldest are dropped.
pub(super) const KEPT: usize = 20_000;
/// How long to wait after the database refused.
const STALL: Duration = if cfg!(test) { Duration::from_millis(20) } else { Duration::from_secs(1) };
/// A record that makes writing panic is tried so often.
const TRIES: u32 = 3;
/// How often old records are forgotten.
const TIDY: Duration = Duration::from_secs(3_600);

pub(super) enum Message {
    Write(Box<Record>),
    /// Write what waits and end.
    Stop,
}

pub(super) struct Writer {
    config: Config,
    keep_days: Arc<AtomicU32>,
    due: Arc<Notify>,
    /// The file of this gateway, while it is open.
    store: Option<Store>,
    /// In place of it, the way to the database of several.
    sink: Option<Sink>,
    waiting: VecDeque<Record>,
    tidied: Option<Instant>,
    age: Age,
    meters: Meters,
    spoken: Pending,
    collected: Option<Instant>,
    /// The file has records that an earlier process left open.
    left: bool,
    /// Why the file takes no records.
    fault: Arc<Mutex<Option<String>>>,
    /// Write what waits and end.
    stopping: bool,
    /// The database is being written to; still so after a panic there.
    writing: bool,
    /// So many of those that wait are written one at a time, since one of them makes writing panic.
    singly: usize,
    /// How often the first that waits did, one after the other.
    panics: u32,
}

impl Writer {
    pub(super) fn new(
        config: Config,
        keep_days: Arc<AtomicU32>,
        due: Arc<Notify>,
        meters: Meters,
    ) -> Result<Self, RecordError> {
        let (waiting, spoken) = (VecDeque::new(), Pending::default());
        let sink = match &config.database {
            Database::Postgres(address) if config.enabled => Some(Sink::new(&config, address, due.clone())?),
            _ => None,
        };
        Ok(Self {
            config,
            keep_days,
            due,
            store: None,
            sink,
            waiting,
            tidied: None,
            age: Age::default(),
            meters,
            spoken,
            collected: None,
            left: false,
            fault: Arc::default(),
            stopping: false,
            writing: false,
            singly: 0,
            panics: 0,
        })
    }

    /// Whether the database can be used, where it is one that may be away.
    pub(super) fn health(&self) -> Option<Arc<Health>> {
        self.sink.as_ref().map(Sink::health)
    }

    /// Why the file of this gateway takes no records, if it does not.
    pub(super) fn fault(&self) -> Arc<Mutex<Option<String>>> {
        self.fault.clone()
    }

    /// Closes what an earlier process left open; later, where the database cannot be used now.
    ///
    /// # Errors
    /// It is of another version of this program.
    pub(super) fn close_left(&mut self) -> Result<(), RecordError> {
        self.left = true;
        match self.open().map(drop) {
            Err(error @ RecordError::Version(_)) => Err(error),
            outcome => {
                self.judge(&outcome);
                Ok(())
            }
        }
    }

    /// The database, open. A damaged one is put aside; what it had is not lost, and new records have a place.
    fn open(&mut self) -> Result<&mut Store, RecordError> {
        if self.store.is_none() {
            // Without a path its records go another way.
            let path = self.config.database.path().ok_or(RecordError::NotFound)?;
            let mut store = Store::open(path)?;
            if self.left {
                let closed = store.close_open(clock::wall(), self.config.webhook.is_some())?;
                if closed > 0 {
                    tracing::warn!(calls = closed, "records of calls that an earlier gateway left open were closed");
                }
                self.left = false;
            }
            self.store = Some(store);
        }
        self.store.as_mut().ok_or(RecordError::NotFound)
    }

    /// Keeps what is wrong with the database for whoever asks; puts it aside where that is damage.
    fn judge(&mut self, outcome: &Result<(), RecordError>) {
        static LINES: Sparse = Sparse::new();
        let error = match outcome {
            Ok(()) => None,
            Err(error) => {
                // The connection may be what is wrong.
                self.store = None;
                // What waits on disk is told of by the health of the database.
                let on_disk = self.sink.is_some() && matches!(error, RecordError::Postgres(_));
                if !on_disk && let Some(missed) = LINES.admit(clock::now()) {
                    tracing::error!(%error, waiting = self.waiting.len(), missed, "records cannot be written");
                }
                if let (RecordError::Database(error), Some(path)) = (error, self.config.database.path())
                    && is_damaged(error)
                {
                    match put_aside(path) {
                        Ok(aside) => {
                            self.left = false;
                            tracing::error!("the database of records is damaged; it lies at {} now", aside.display());
                        }
                        Err(error) => tracing::error!(%error, "the damaged database of records cannot be put aside"),
                    }
                }
                (!on_disk).then(|| error.to_string())
            }
        };
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = error;
    }

    /// Until it is told to stop, also when it panics: what waits is kept.
    pub(super) fn run(mut self, messages: &Receiver<Message>, part: &Part) {
        while catch_unwind(AssertUnwindSafe(|| self.work(messages))).is_err() {
            part.fell().rest_here();
            self.recover();
        }
        if let Some(sink) = self.sink {
            sink.leave();
        }
        if !self.waiting.is_empty() {
            tracing::error!(records = self.waiting.len(), "records were lost: the database takes none");
        }
    }

    /// After a panic. What is being written then is written one by one, and left out where it happens with it again and again.
    fn recover(&mut self) {
        // The connection may be what is wrong; what it had begun is undone with it.
        self.store = None;
        if !std::mem::take(&mut self.writing) {
            return;
        }
        self.singly = self.waiting.len().min(BATCH);
        self.panics += 1;
        if self.panics >= TRIES && self.waiting.pop_front().is_some() {
            self.panics = 0;
            metrics::counter!("antiphon_records_dropped_total").increment(1);
            tracing::error!("a record was left out: writing it panics");
        }
    }

    fn work(&mut self, messages: &Receiver<Message>) {
        while !self.stopping {
            let written = self.waiting.is_empty() && self.spoken.is_empty();
            let wait = match &self.sink {
                Some(sink) if written && sink.is_empty() => sink.patience().min(COLLECT),
                None if written => COLLECT,
                _ => STALL,
            };
            match messages.recv_timeout(wait) {
                Ok(message) => self.take(message),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => self.stopping = true,
            }
            // What goes to another machine may take seconds each time, and then takes all that there is.
            let most = if self.sink.is_some() { KEPT } else { BATCH };
            while !self.stopping && self.waiting.len() < most {
                match messages.try_recv() {
                    Ok(message) => self.take(message),
                    Err(_) => break,
                }
            }
            fault::point("records", self.config.database.path().unwrap_or(Path::new("")).display());
            self.collect(self.stopping);
            let flushed = self.flush();
            self.judge(&flushed);
            self.tidy(clock::now(), clock::wall());
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Stop => self.stopping = true,
            Message::Write(record) => self.waiting.push_back(*record),
        }
        if self.waiting.len() > KEPT {
            self.waiting.pop_front();
            metrics::counter!("antiphon_records_dropped_total").increment(1);
        }
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
        if self.left {
            self.open()?;
        }
        while !self.waiting.is_empty() {
            let count = if self.singly > 0 { 1 } else { self.waiting.len().min(BATCH) };
            self.open()?;
            let Some(store) = &mut self.store else { return Err(RecordError::NotFound) };
            let records = &self.waiting.make_contiguous()[..count];
            self.writing = true;
            let written = store.write(records, clock::wall(), hook);
            self.writing = false;
            written?;
            (self.panics, self.singly) = (0, self.singly.saturating_sub(count));
            let ended = self.waiting.drain(..count).any(|record| record.ended_ms.is_some());
            if hook && ended {
                self.due.notify_one();
            }
        }
        if !self.spoken.is_empty() {
            self.open()?;
            let Some(store) = &mut self.store else { return Err(RecordError::NotFound) };
            store.spoken(&mut self.spoken, clock::wall())?;
        }
        Ok(())
    }

    /// Forgets what is older than `keep_days`, as far as the wall clock can be trusted with that.
    fn tidy(&mut self, now: Instant, wall: Duration) {
        let days @ 1.. = self.keep_days.load(Ordering::Relaxed) else { return };
        if self.store.is_none() && self.sink.is_none() {
            return;
        }
        if self.tidied.is_some_and(|at| now.saturating_duration_since(at) < TIDY) {
            return;
        }
        self.tidied = Some(now);
        let Some(today) = self.age.trusted(now, wall) else { return };
        let before = today.saturating_sub(DAY * days);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Dialling;
    use crate::records::ledger::Ledger as _;
    use crate::records::record::Draft;

    /// A writer with one record, of a call that ends at `wall`.
    fn with_a_record(folder: &std::path::Path, wall: Duration) -> Writer {
        let config = Config { database: folder.join("records.sqlite").into(), keep_days: 7, ..Config::default() };
        let keep_days = Arc::new(AtomicU32::new(config.keep_days));
        let mut writer = Writer::new(config, keep_days, Arc::default(), Meters::default()).expect("no other machine");
        let mut draft = Draft::new(&super::super::tests::meta("1"), wall);
        draft.dialling(None, &Dialling::Cancelled, wall);
        writer.take(Message::Write(Box::new(draft.record())));
        writer.flush().expect("written");
        writer
    }

    fn kept(writer: &mut Writer) -> bool {
        writer.open().expect("open").get("1").expect("reads").is_some()
    }

    #[test]
    fn a_record_that_makes_writing_panic_is_left_out_and_no_other() {
        let folder = tempfile::tempdir().expect("temp dir");
        let mut writer = with_a_record(folder.path(), clock::wall());
        for id in ["2", "3"] {
            let mut draft = Draft::new(&super::super::tests::meta(id), clock::wall());
            draft.dialling(None, &Dialling::Cancelled, clock::wall());
            writer.take(Message::Write(Box::new(draft.record())));
        }
        // As if the first of them did it, in the company of the other and alone.
        for tries in 1..=TRIES {
            writer.writing = true;
            writer.recover();
            assert_eq!((writer.waiting.len(), writer.writing), (if tries < TRIES { 2 } else { 1 }, false));
        }
        writer.flush().expect("written");
        assert_eq!(writer.singly, 1);
        let store = writer.open().expect("open");
        let there = ["1", "2", "3"].map(|id| store.get(id).expect("reads").is_some());
        assert_eq!(there, [true, false, true]);
        // A panic elsewhere is no record's fault.
        writer.recover();
        assert_eq!(writer.panics, 0);
    }

    #[test]
    fn a_clock_that_jumps_ten_days_deletes_nothing() {
        let folder = tempfile::tempdir().expect("temp dir");
        let (start, wall, ten) = (clock::now(), clock::wall(), DAY * 10);
        let mut writer = with_a_record(folder.path(), wall);
        for jumped in [wall, wall + ten, wall - ten, wall] {
            // Looked at each time, though no hour has passed.
            writer.tidied = None;
            writer.tidy(start, jumped);
            assert!(kept(&mut writer), "{jumped:?} in place of {wall:?}");
        }
        // From the earliest reading on ages are counted by what has passed: too long is better than too short.
        for (days, there) in [(6, true), (16, true), (18, false)] {
            writer.tidied = None;
            writer.tidy(start + DAY * days, wall + DAY * days);
            assert_eq!(kept(&mut writer), there, "after {days} days on both clocks");
        }
    }
}
