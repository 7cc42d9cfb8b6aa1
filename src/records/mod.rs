//! Call records: what happened on each call, kept in a database.
//!
//! A record is written when its call begins, when it is answered and when it ends; each write is on disk before the
//! next one (WAL, `synchronous = FULL`). Records that a process left open are closed by the next one with the cause
//! `gateway stopped`, so that every call has an end whatever ended the gateway.
//!
//! # Why
//! *Telephony never waits.* A call's own task puts together its record in memory and hands copies to a thread through a
//! bounded queue; where that is full, because a disk hangs, the copy is dropped and counted
//! (`antiphon_records_dropped_total`). The record then stays as it was last written and is closed at the next start.
//!
//! Beside them [`usage`]: what each tenant had on each day.
//!
//! *Several gateways* may keep their records in one PostgreSQL. Those of a gateway that was killed are closed by another,
//! and what is written while the database is away waits in a file of the state directory ([`sink`]).
//!
//! *One JSON document a call*, with the columns that lists are filtered by beside it: a record is read whole.

mod ledger;
mod postgres;
mod record;
mod sink;
mod spool;
mod store;
mod usage;
mod webhook;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use dashmap::DashMap;
use serde::Deserialize;
use tokio::sync::Notify;

pub use self::ledger::Access;
use self::ledger::Ledger;
use self::record::Draft;
pub use self::store::{Filter, Page, RecordError};
pub use self::usage::{Period, Speech, Usage};
pub use self::webhook::{Deliveries, deliver};
use self::writer::Message;
use crate::call::{CallEvent, CallId, CallInfo, CallMeta, Dialling, Witness};
use crate::clock;
use crate::postgres::{Database, Health};
use crate::secret::Secret;
use crate::supervise::Part;
use crate::synth::device::Meter;
use crate::webhook::check;

/// Most records that are listed at once.
pub const PAGE: u32 = 1_000;
/// Writes that may wait for the disk: the set-up and the end of two thousand calls.
const QUEUE: usize = 4_096;

/// `[records]`
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Whether calls are recorded at all.
    pub enabled: bool,
    /// The SQLite file (in the configuration, empty: `records.sqlite` in the state directory), or the PostgreSQL that
    /// other gateways use, too.
    pub database: Database,
    /// With PostgreSQL: another gateway closes the records of one that has said nothing for so long, seconds.
    pub lease_s: u32,
    /// Records are forgotten so many days after their call; 0 is never.
    pub keep_days: u32,
    /// Whether what was said and heard is kept, or only how much.
    pub text: bool,
    /// Who is told of every call that has ended.
    pub webhook: Option<Webhook>,
    /// Where records wait for a PostgreSQL that is away.
    #[serde(skip)]
    pub spool: PathBuf,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            enabled: true,
            database: Database::default(),
            lease_s: 30,
            keep_days: 90,
            text: true,
            webhook: None,
            spool: PathBuf::new(),
        }
    }
}

/// `[records] webhook`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Webhook {
    /// Where records are sent by POST.
    pub url: String,
    /// What they are signed with.
    pub secret: Secret,
    /// How often a delivery is tried; the pauses double from five seconds to an hour.
    #[serde(default = "default_tries")]
    pub tries: u32,
}

fn default_tries() -> u32 {
    12
}

impl Config {
    /// Checks what the types cannot say.
    ///
    /// # Errors
    /// The key and what it must be.
    pub fn validate(&self) -> Result<(), String> {
        if self.lease_s == 0 {
            return Err("lease_s must be 1 or more: records would be closed while their calls go on".into());
        }
        let Some(hook) = &self.webhook else { return Ok(()) };
        check(&hook.url, &hook.secret, hook.tries).map_err(|error| format!("webhook.{error}"))
    }
}

/// The records of a gateway. Cheap to clone; the last one to be dropped ends the thread when it has written all.
#[derive(Clone)]
pub struct Records(Arc<Inner>);

/// Where speech is counted.
type Meters = Arc<Mutex<Vec<Arc<Meter>>>>;

struct Inner {
    config: Config,
    /// Days that records are kept; 0: for ever.
    keep_days: Arc<AtomicU32>,
    drafts: DashMap<CallId, Draft>,
    queue: SyncSender<Message>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// A record is due for delivery.
    due: Arc<Notify>,
    meters: Meters,
    access: Access,
    /// Why the file of this gateway takes no records.
    fault: Arc<Mutex<Option<String>>>,
    /// Of a database that may be away.
    health: Option<Arc<Health>>,
    /// The thread, and what delivers.
    part: Arc<Part>,
}

impl Records {
    /// Closes what an earlier process left open, where there is a database, and starts the thread that writes. The
    /// database is made by the first call. One that is damaged is put aside; one that is locked or full is closed later, and
    /// [`Records::fault`] says so meanwhile. A PostgreSQL is connected to by the thread, and may be away for the time being.
    ///
    /// # Errors
    /// The database is of a newer version of this program, or there is no thread.
    pub fn start(config: Config) -> Result<Self, RecordError> {
        Self::start_beside(config, false)
    }

    /// As [`Records::start`]; `others`: another process still has calls whose records are open, and closes them itself.
    ///
    /// # Errors
    /// As there.
    pub fn start_beside(config: Config, others: bool) -> Result<Self, RecordError> {
        let left = config.enabled && !others && config.database.path().is_some_and(Path::exists);
        let (queue, messages) = std::sync::mpsc::sync_channel(QUEUE);
        let due = Arc::new(Notify::new());
        let meters = Meters::default();
        let access = Access::new(&config)?;
        let keep_days = Arc::new(AtomicU32::new(config.keep_days));
        let mut writer = writer::Writer::new(config.clone(), keep_days.clone(), due.clone(), meters.clone())?;
        if left {
            writer.close_left()?;
        }
        let (fault, health) = (writer.fault(), writer.health());
        let part = Arc::new(Part::new("records"));
        let own = part.clone();
        let thread = std::thread::Builder::new().name("records".into()).spawn(move || writer.run(&messages, &own));
        let thread = Mutex::new(Some(thread.map_err(RecordError::Thread)?));
        Ok(Self(Arc::new(Inner {
            config,
            keep_days,
            drafts: DashMap::new(),
            queue,
            thread,
            due,
            meters,
            access,
            fault,
            health,
            part,
        })))
    }

    /// Keeps records for so many days from now on; 0: for ever.
    pub fn keep(&self, days: u32) {
        self.0.keep_days.store(days, Ordering::Relaxed);
    }

    /// One record, as JSON. Reads the disk: call it where blocking is allowed.
    ///
    /// # Errors
    /// The database cannot be read.
    pub fn get(&self, id: &str) -> Result<Option<serde_json::Value>, RecordError> {
        Ok(self.read(|store| store.get(id))?.flatten())
    }

    /// Records from the newest on. Reads the disk, as above.
    ///
    /// # Errors
    /// The database cannot be read, or there is no record `after`.
    pub fn list(&self, filter: &Filter) -> Result<Page, RecordError> {
        match self.read(|store| store.list(filter))? {
            Some(page) => Ok(page),
            None if filter.after.is_some() => Err(RecordError::NotFound),
            None => Ok(Page::default()),
        }
    }

    /// Adds the speech that `meter` counts to the usage.
    pub fn count(&self, meter: Arc<Meter>) {
        if self.0.config.enabled {
            self.0.meters.lock().unwrap_or_else(PoisonError::into_inner).push(meter);
        }
    }

    /// Usage by tenant and day, the latest first; what was spoken in the last seconds may be missing. Reads the disk, as
    /// above.
    ///
    /// # Errors
    /// The database cannot be read.
    pub fn usage(&self, period: &Period) -> Result<Vec<Usage>, RecordError> {
        Ok(self.read(|store| store.usage(period))?.unwrap_or_default())
    }

    /// Usage of today.
    ///
    /// # Errors
    /// As [`Records::usage`].
    pub fn usage_today(&self) -> Result<Vec<Usage>, RecordError> {
        Ok(self.read(|store| store.usage_on_day_of(clock::wall()))?.unwrap_or_default())
    }

    /// Writes what waits and joins the thread. Blocks.
    pub fn shutdown(&self) {
        // overflow: awaited, the thread empties the queue
        let _ = self.0.queue.send(Message::Stop);
        let thread = self.0.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // A panic there was logged when it happened.
            let _ = thread.join();
        }
    }

    /// Where records are due for delivery, who wants them, and which part delivers them.
    pub fn deliveries(&self) -> Option<Deliveries> {
        let config = &self.0.config;
        let hook = config.webhook.clone().filter(|_| config.enabled)?;
        Some(Deliveries { hook, database: self.0.access.clone(), due: self.0.due.clone(), part: self.0.part.clone() })
    }

    /// Whether what writes or delivers has panicked and is about to be started again.
    pub fn are_down(&self) -> bool {
        self.0.part.is_down()
    }

    /// Why the database cannot be used. What is to be written waits meanwhile.
    pub fn fault(&self) -> Option<String> {
        let own = self.0.fault.lock().unwrap_or_else(PoisonError::into_inner).clone();
        own.or_else(|| self.0.health.as_ref().and_then(|health| health.fault()))
    }

    /// Whether other gateways see the same records.
    pub fn are_shared(&self) -> bool {
        self.0.config.enabled && self.0.config.database.is_shared()
    }

    fn read<T>(&self, work: impl FnOnce(&mut dyn Ledger) -> Result<T, RecordError>) -> Result<Option<T>, RecordError> {
        if self.0.config.enabled { self.0.access.on(work) } else { Ok(None) }
    }

    fn write(&self, draft: &Draft) {
        // overflow: drops (counted); see the head
        if self.0.queue.try_send(Message::Write(Box::new(draft.record()))).is_err() {
            metrics::counter!("antiphon_records_dropped_total").increment(1);
        }
    }
}

impl Witness for Records {
    fn dialling(&self, meta: &CallMeta, trunk: Option<&str>, state: &Dialling) {
        if !self.0.config.enabled {
            return;
        }
        let now = clock::wall();
        let mut draft = self.0.drafts.entry(meta.id.clone()).or_insert_with(|| Draft::new(meta, now));
        draft.dialling(trunk, state, now);
        if matches!(state, Dialling::Trying) || state.is_over() {
            self.write(&draft);
        }
        drop(draft);
        if state.is_over() {
            self.0.drafts.remove(&meta.id);
        }
    }

    fn begun(&self, call: &CallInfo) {
        if !self.0.config.enabled {
            return;
        }
        let now = clock::wall();
        let mut draft = self.0.drafts.entry(call.meta.id.clone()).or_insert_with(|| Draft::new(&call.meta, now));
        draft.begun(call);
        self.write(&draft);
    }

    fn happened(&self, call: &CallMeta, event: &CallEvent) {
        if let CallEvent::Missed(missed) = event {
            if self.0.config.enabled {
                let now = clock::wall();
                let mut draft = Draft::new(call, now);
                draft.missed(missed, now);
                self.write(&draft);
            }
            return;
        }
        let Some(mut draft) = self.0.drafts.get_mut(&call.id) else { return };
        if draft.happened(event, clock::wall(), self.0.config.text) {
            self.write(&draft);
        }
    }

    fn ended(&self, call: &CallInfo) {
        if let Some(mut draft) = self.0.drafts.get_mut(&call.meta.id).filter(|draft| draft.is_dialling()) {
            return draft.media(call);
        }
        if let Some((_, mut draft)) = self.0.drafts.remove(&call.meta.id) {
            draft.ended(call, clock::wall());
            self.write(&draft);
        }
    }
}

impl std::fmt::Debug for Records {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Records").field("open", &self.0.drafts.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
