//! The database of records.

use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, Row, params};
use serde::Serialize;
use serde_json::Value;

use super::ledger::Ledger;
use super::record::Record;
use super::usage::{self, Pending, Period, Usage};

/// How long others may hold the file.
const BUSY: Duration = if cfg!(test) { Duration::from_millis(50) } else { Duration::from_secs(5) };
/// Raised with every change of the tables.
const VERSION: i64 = 2;

pub(super) const SCHEMA: &str = "
    CREATE TABLE record (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        started_ms INTEGER NOT NULL,
        ended_ms INTEGER,
        written_ms INTEGER NOT NULL,
        direction TEXT NOT NULL,
        tenant TEXT NOT NULL,
        agent TEXT NOT NULL,
        caller TEXT NOT NULL,
        called TEXT NOT NULL,
        cause TEXT,
        body TEXT NOT NULL,
        -- when the webhook is due; none: delivered, given up, or not configured
        hook_ms INTEGER,
        hook_tries INTEGER NOT NULL DEFAULT 0
    );
    CREATE INDEX record_ended ON record (ended_ms);
    CREATE INDEX record_hook ON record (hook_ms) WHERE hook_ms IS NOT NULL;
";

/// Which records.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// At most so many, and at most [`super::PAGE`].
    pub limit: u32,
    /// Those that began before this one.
    pub after: Option<String>,
    /// `inbound` or `outbound`.
    pub direction: Option<String>,
    /// Of calls that this API token placed.
    pub tenant: Option<String>,
    /// Of this agent.
    pub agent: Option<String>,
    /// With this cause.
    pub cause: Option<String>,
    /// Whose caller or called party contains this.
    pub party: Option<String>,
    /// Begun at this Unix time in milliseconds or later.
    pub since_ms: Option<i64>,
    /// Begun before this one.
    pub until_ms: Option<i64>,
}

/// Some of the records, the newest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Page {
    /// These.
    pub records: Vec<Value>,
    /// Whether there are older ones.
    pub has_more: bool,
}

/// Why records cannot be kept or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// No such record.
    #[error("there is no such record")]
    NotFound,
    /// The database failed.
    #[error("record database: {0}")]
    Database(#[from] rusqlite::Error),
    /// The database of several gateways failed.
    #[error("record database: {0}")]
    Postgres(#[from] crate::postgres::Error),
    /// What waits for it cannot be kept on disk.
    #[error("records that wait for their database: {0}")]
    Spool(std::io::Error),
    /// Its folder cannot be made.
    #[error("{0}")]
    Folder(std::io::Error),
    /// The database is of another version of this program.
    #[error("{0}")]
    Version(String),
    /// No thread.
    #[error("cannot start the thread of records: {0}")]
    Thread(std::io::Error),
}

/// A record that is to be delivered.
pub(super) struct Due {
    pub(super) seq: i64,
    pub(super) id: String,
    pub(super) body: String,
    pub(super) tries: u32,
}

pub(super) struct Store {
    db: Connection,
}

impl Store {
    pub(super) fn open(path: &Path) -> Result<Self, RecordError> {
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder).map_err(RecordError::Folder)?;
        }
        let mut db = Connection::open(path)?;
        db.busy_timeout(BUSY)?;
        db.pragma_update(None, "journal_mode", "WAL")?;
        // With FULL a record survives the loss of power too, not only of the process.
        db.pragma_update(None, "synchronous", "FULL")?;
        match Self::version(&db)? {
            0 | 1 => Self::change(&mut db)?,
            VERSION => {}
            newer => {
                let path = path.display();
                return Err(RecordError::Version(format!(
                    "{path} is of version {newer}, this program knows {VERSION}: use the newer program"
                )));
            }
        }
        Ok(Self { db })
    }

    fn version(db: &Connection) -> rusqlite::Result<i64> {
        db.pragma_query_value(None, "user_version", |row| row.get(0))
    }

    /// Brings the tables to this version.
    fn change(db: &mut Connection) -> rusqlite::Result<()> {
        let transaction = db.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
        // Another process may have done it meanwhile: from here on no other process writes.
        match Self::version(&transaction)? {
            0 => transaction.execute_batch(&[SCHEMA, usage::SCHEMA].concat())?,
            1 => transaction.execute_batch(usage::SCHEMA)?,
            _ => return Ok(()),
        }
        transaction.pragma_update(None, "user_version", VERSION)?;
        transaction.commit()
    }

    /// Writes records in one transaction. `hook`: those that have ended are due for delivery.
    pub(super) fn write(&mut self, records: &[Record], now: Duration, hook: bool) -> rusqlite::Result<()> {
        let now = now.as_millis() as i64;
        let transaction = self.db.transaction()?;
        {
            let mut write = transaction.prepare(
                "INSERT INTO record (id, started_ms, ended_ms, written_ms, direction, agent, caller, called, cause, body,
                                     hook_ms, tenant)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)
                 ON CONFLICT (id) DO UPDATE SET ended_ms = ?3, written_ms = ?4, cause = ?9, body = ?10, hook_ms = ?11",
            )?;
            let mut is_over = transaction.prepare("SELECT 1 FROM record WHERE id = ?1 AND ended_ms IS NOT NULL")?;
            for record in records {
                let body = serde_json::to_string(record).expect("records hold only strings, numbers and lists");
                let direction = serde_json::to_value(record.direction).unwrap_or_default();
                // Ended once: a record that is written again counts no more.
                let open = record.ended_ms.is_some() && !is_over.exists([&record.id])?;
                write.execute(params![
                    record.id,
                    record.started_ms as i64,
                    record.ended_ms.map(|ms| ms as i64),
                    now,
                    direction.as_str().unwrap_or_default(),
                    record.agent,
                    record.from,
                    record.to,
                    record.cause,
                    body,
                    record.ended_ms.filter(|_| hook).map(|_| now),
                    record.tenant,
                ])?;
                if open {
                    usage::count_calls(&transaction, "ended_ms", "id = ?1", [&record.id])?;
                }
            }
        }
        transaction.commit()
    }

    /// Ends records that no process works on any more, at the time when they were last written.
    pub(super) fn close_open(&mut self, now: Duration, hook: bool) -> Result<usize, RecordError> {
        let transaction = self.db.transaction()?;
        usage::count_calls(&transaction, "written_ms", "ended_ms IS NULL", [])?;
        let closed = transaction.execute(
            "UPDATE record SET ended_ms = written_ms, cause = 'gateway stopped', hook_ms = ?1,
                 body = json_set(body, '$.state', 'ended', '$.cause', 'gateway stopped', '$.endedBy', 'gateway',
                                 '$.endedMs', written_ms, '$.durationMs', written_ms - started_ms)
             WHERE ended_ms IS NULL",
            [hook.then_some(now.as_millis() as i64)],
        )?;
        transaction.commit()?;
        Ok(closed)
    }

    /// Forgets records that ended before `before`, unless they are still to be delivered.
    pub(super) fn forget(&self, before: Duration) -> rusqlite::Result<usize> {
        self.db.execute("DELETE FROM record WHERE ended_ms < ?1 AND hook_ms IS NULL", [before.as_millis() as i64])
    }

    /// Adds speech to the usage of today.
    pub(super) fn spoken(&mut self, pending: &mut Pending, now: Duration) -> rusqlite::Result<()> {
        pending.write(&mut self.db, now)
    }
}

impl Ledger for Store {
    fn get(&mut self, id: &str) -> Result<Option<Value>, RecordError> {
        let query = "SELECT body FROM record WHERE id = ?1";
        Ok(self.db.query_row(query, [id], body_of).optional()?)
    }

    fn list(&mut self, filter: &Filter) -> Result<Page, RecordError> {
        let before: i64 = match &filter.after {
            None => i64::MAX,
            Some(id) => {
                let seq =
                    self.db.query_row("SELECT seq FROM record WHERE id = ?1", [id], |row| row.get(0)).optional()?;
                seq.ok_or(RecordError::NotFound)?
            }
        };
        let limit = filter.limit.clamp(1, super::PAGE);
        let mut query = self.db.prepare(
            "SELECT body FROM record
             WHERE seq < ?1 AND (?2 IS NULL OR direction = ?2) AND (?3 IS NULL OR agent = ?3)
                   AND (?4 IS NULL OR cause = ?4) AND (?5 IS NULL OR instr(caller, ?5) OR instr(called, ?5))
                   AND (?6 IS NULL OR started_ms >= ?6) AND (?7 IS NULL OR started_ms < ?7)
                   AND (?8 IS NULL OR tenant = ?8)
             ORDER BY seq DESC LIMIT ?9",
        )?;
        let Filter { direction, tenant, agent, cause, party, since_ms, until_ms, .. } = filter;
        let wanted = params![before, direction, agent, cause, party, since_ms, until_ms, tenant, limit + 1];
        let mut records: Vec<Value> = query.query_map(wanted, body_of)?.collect::<rusqlite::Result<_>>()?;
        let has_more = records.len() > limit as usize;
        records.truncate(limit as usize);
        Ok(Page { records, has_more })
    }

    fn usage(&mut self, period: &Period) -> Result<Vec<Usage>, RecordError> {
        Ok(usage::read(&self.db, period)?)
    }

    fn usage_on_day_of(&mut self, now: Duration) -> Result<Vec<Usage>, RecordError> {
        let day = usage::day(&self.db, now)?;
        self.usage(&Period { from: Some(day.clone()), to: Some(day), tenant: None })
    }

    fn due(&mut self, now: Duration, limit: u32) -> Result<Vec<Due>, RecordError> {
        let mut query = self
            .db
            .prepare("SELECT seq, id, body, hook_tries FROM record WHERE hook_ms <= ?1 ORDER BY hook_ms LIMIT ?2")?;
        let due = |row: &Row<'_>| Ok(Due { seq: row.get(0)?, id: row.get(1)?, body: row.get(2)?, tries: row.get(3)? });
        Ok(query.query_map(params![now.as_millis() as i64, limit], due)?.collect::<rusqlite::Result<_>>()?)
    }

    fn next_due(&mut self) -> Result<Option<Duration>, RecordError> {
        let next: Option<i64> =
            self.db.query_row("SELECT MIN(hook_ms) FROM record WHERE hook_ms IS NOT NULL", [], |row| row.get(0))?;
        Ok(next.map(|ms| Duration::from_millis(ms.max(0) as u64)))
    }

    fn tried(&mut self, seq: i64, again: Option<Duration>) -> Result<(), RecordError> {
        let again = again.map(|at| at.as_millis() as i64);
        self.db.execute(
            "UPDATE record SET hook_ms = ?2, hook_tries = hook_tries + 1 WHERE seq = ?1",
            params![seq, again],
        )?;
        Ok(())
    }
}

fn body_of(row: &Row<'_>) -> rusqlite::Result<Value> {
    let text: String = row.get(0)?;
    serde_json::from_str(&text)
        .map_err(|error| rusqlite::Error::FromSqlConversionFailure(0, rusqlite::types::Type::Text, Box::new(error)))
}
