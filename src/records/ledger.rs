//! Where records are kept: in a file of this gateway ([`Store`]), or in a PostgreSQL that gateways share ([`Postgres`]).

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::postgres::Postgres;
use super::record::Record;
use super::store::{Due, Filter, Page, Store};
use super::usage::{Period, Usage};
use super::{Config, RecordError};
use crate::postgres::Database;

/// A database of records, as it is read and as deliveries use it.
pub(super) trait Ledger {
    /// One record.
    fn get(&mut self, id: &str) -> Result<Option<Value>, RecordError>;

    /// Records from the newest on.
    fn list(&mut self, filter: &Filter) -> Result<Page, RecordError>;

    /// Usage, the latest day first.
    fn usage(&mut self, period: &Period) -> Result<Vec<Usage>, RecordError>;

    /// Usage of the day of `now`.
    fn usage_on_day_of(&mut self, now: Duration) -> Result<Vec<Usage>, RecordError>;

    /// Records whose delivery is due, at most `limit`; no other gateway is given them for a while.
    fn due(&mut self, now: Duration, limit: u32) -> Result<Vec<Due>, RecordError>;

    /// When the next delivery is due.
    fn next_due(&mut self) -> Result<Option<Duration>, RecordError>;

    /// A delivery was tried: it is due again at `again`, or never.
    fn tried(&mut self, seq: i64, again: Option<Duration>) -> Result<(), RecordError>;
}

/// The database, for those who read it. Clones mean the same.
#[derive(Clone)]
pub struct Access(Kind);

#[derive(Clone)]
enum Kind {
    /// Opened for each question; the first call makes it.
    File(PathBuf),
    /// One connection.
    Shared(Arc<Mutex<Postgres>>),
}

impl Access {
    pub(super) fn new(config: &Config) -> Result<Self, RecordError> {
        Ok(Self(match &config.database {
            Database::File(path) => Kind::File(path.clone()),
            Database::Postgres(address) => Kind::Shared(Arc::new(Mutex::new(Postgres::new(address)?))),
        }))
    }

    /// Does `work`, which blocks; `None`: there is no database yet.
    pub(super) fn on<T>(
        &self,
        work: impl FnOnce(&mut dyn Ledger) -> Result<T, RecordError>,
    ) -> Result<Option<T>, RecordError> {
        match &self.0 {
            Kind::File(path) if !path.exists() => Ok(None),
            Kind::File(path) => work(&mut Store::open(path)?).map(Some),
            // What is behind it is sound between any two requests.
            Kind::Shared(shared) => work(&mut *shared.lock().unwrap_or_else(PoisonError::into_inner)).map(Some),
        }
    }
}

/// A record on its way to a database that several gateways share: what is looked for, beside the whole.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Entry {
    pub(super) id: String,
    pub(super) started_ms: i64,
    pub(super) answered_ms: Option<i64>,
    pub(super) ended_ms: Option<i64>,
    pub(super) written_ms: i64,
    pub(super) direction: String,
    pub(super) tenant: String,
    pub(super) agent: String,
    pub(super) caller: String,
    pub(super) called: String,
    pub(super) cause: Option<String>,
    /// JSON.
    pub(super) body: String,
}

impl Entry {
    pub(super) fn of(record: &Record, now: Duration) -> Self {
        // Zero bytes, which the database does not take, are escaped in JSON.
        let body = serde_json::to_string(record).expect("records hold only strings, numbers and lists");
        let direction = serde_json::to_value(record.direction).unwrap_or_default();
        let clean = |text: &str| text.replace('\0', "");
        Self {
            id: clean(&record.id),
            started_ms: record.started_ms as i64,
            answered_ms: record.answered_ms.map(|ms| ms as i64),
            ended_ms: record.ended_ms.map(|ms| ms as i64),
            written_ms: now.as_millis() as i64,
            direction: direction.as_str().unwrap_or_default().to_owned(),
            tenant: clean(&record.tenant),
            agent: clean(&record.agent),
            caller: clean(&record.from),
            called: clean(&record.to),
            cause: record.cause.clone(),
            body,
        }
    }

    /// The same, ended when it was last written, because its gateway is gone.
    pub(super) fn stopped(mut self) -> Self {
        let mut body: Value = serde_json::from_str(&self.body).unwrap_or_default();
        if let Some(body) = body.as_object_mut() {
            for (key, value) in [
                ("state", Value::from("ended")),
                ("cause", STOPPED.into()),
                ("endedBy", "gateway".into()),
                ("endedMs", self.written_ms.into()),
                ("durationMs", (self.written_ms - self.started_ms).max(0).into()),
            ] {
                body.insert(key.to_owned(), value);
            }
        }
        (self.ended_ms, self.cause) = (Some(self.written_ms), Some(STOPPED.to_owned()));
        self.body = body.to_string();
        self
    }

    /// A call that came and was never live: no usage.
    pub(super) fn is_missed(&self) -> bool {
        self.direction == "inbound" && matches!(self.cause.as_deref(), Some("refused" | "cancelled"))
    }

    /// Time from answer to end.
    pub(super) fn call_ms(&self) -> i64 {
        let talked = self.ended_ms.zip(self.answered_ms).map_or(0, |(ended, answered)| ended - answered);
        talked.max(0)
    }
}

/// The cause of records that their gateway did not end.
pub(super) const STOPPED: &str = "gateway stopped";
