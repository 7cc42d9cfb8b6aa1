//! Who has used how much: one row a tenant and day (UTC), kept beside the records and never forgotten.
//!
//! Calls count in the transaction that ends their record, so exactly once and also where the process was killed. Speech
//! is counted in memory where it is made ([`Meter`]) and added every [`COLLECT`]: what a killed process had spoken since
//! the last time is missing.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use rusqlite::{Connection, Row, params};
use serde::{Deserialize, Serialize};

use crate::synth::device::{Meter, Spoken};
use crate::turn::Class;

/// How often counted speech is written.
pub(super) const COLLECT: Duration = Duration::from_secs(10);

/// The table, of version 2 of the database on.
pub(super) const SCHEMA: &str = "
    CREATE TABLE usage (
        day TEXT NOT NULL,
        tenant TEXT NOT NULL,
        inbound_calls INTEGER NOT NULL DEFAULT 0,
        outbound_calls INTEGER NOT NULL DEFAULT 0,
        call_ms INTEGER NOT NULL DEFAULT 0,
        live_utterances INTEGER NOT NULL DEFAULT 0,
        live_characters INTEGER NOT NULL DEFAULT 0,
        live_ms INTEGER NOT NULL DEFAULT 0,
        batch_utterances INTEGER NOT NULL DEFAULT 0,
        batch_characters INTEGER NOT NULL DEFAULT 0,
        batch_ms INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (day, tenant)
    );
";

/// What a tenant used on a day.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    /// The day, UTC, as `2026-11-22`. A call counts to the day on which it ended.
    pub day: String,
    /// The tenant, or the name of the token; empty: calls and requests of no tenant.
    pub tenant: String,
    /// Calls that came in.
    pub inbound_calls: u64,
    /// Calls that were placed, whatever became of them.
    pub outbound_calls: u64,
    /// Time from answer to end of all calls, in seconds.
    pub call_seconds: f64,
    /// On calls and by speech requests.
    pub live: Speech,
    /// By jobs.
    pub batch: Speech,
}

/// Speech that was made; see [`Spoken`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Speech {
    /// Utterances.
    pub utterances: u64,
    /// Characters of text.
    pub characters: u64,
    /// Seconds of audio.
    pub audio_seconds: f64,
}

/// Which rows; days as `2026-11-22`, both ends included.
#[derive(Clone, Debug, Default)]
pub struct Period {
    /// From this day on.
    pub from: Option<String>,
    /// To this day.
    pub to: Option<String>,
    /// Of this tenant.
    pub tenant: Option<String>,
}

/// Speech that was counted and is not written yet.
#[derive(Debug, Default)]
pub(super) struct Pending(HashMap<(Arc<str>, Class), Spoken>);

impl Pending {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes over what `meter` has counted.
    pub(super) fn collect(&mut self, meter: &Meter) {
        for (key, spoken) in meter.take() {
            let sum = self.0.entry(key).or_default();
            sum.utterances += spoken.utterances;
            sum.characters += spoken.characters;
            sum.audio += spoken.audio;
        }
    }

    /// Takes everything, as of the day of `now`.
    pub(super) fn freeze(&mut self, holder: &str, number: i64, now: Duration) -> Counted {
        let mut of = BTreeMap::<String, [i64; 6]>::new();
        for ((tenant, class), spoken) in self.0.drain() {
            let figures = of.entry(tenant.replace('\0', "")).or_default();
            let first = if class == Class::Live { 0 } else { 3 };
            figures[first] += spoken.utterances as i64;
            figures[first + 1] += spoken.characters as i64;
            figures[first + 2] += spoken.audio.as_millis() as i64;
        }
        let spoken = of.into_iter().map(|(tenant, figures)| OfTenant { tenant, figures }).collect();
        let day = (now.as_secs() / 86_400) as i32;
        Counted { holder: holder.to_owned(), number, day, spoken }
    }

    /// Adds everything to the day of `now`, or nothing.
    pub(super) fn write(&mut self, db: &mut Connection, now: Duration) -> rusqlite::Result<()> {
        let transaction = db.transaction()?;
        for ((tenant, class), spoken) in &self.0 {
            let class = match class {
                Class::Live => "live",
                Class::Batch => "batch",
            };
            let query = format!(
                "INSERT INTO usage (day, tenant, {class}_utterances, {class}_characters, {class}_ms)
                 VALUES (date(?1 / 1000, 'unixepoch'), ?2, ?3, ?4, ?5)
                 ON CONFLICT (day, tenant) DO UPDATE SET
                    {class}_utterances = {class}_utterances + ?3, {class}_characters = {class}_characters + ?4,
                    {class}_ms = {class}_ms + ?5"
            );
            transaction.execute(
                &query,
                params![
                    now.as_millis() as i64,
                    &**tenant,
                    spoken.utterances as i64,
                    spoken.characters as i64,
                    spoken.audio.as_millis() as i64
                ],
            )?;
        }
        transaction.commit()?;
        self.0.clear();
        Ok(())
    }
}

/// Speech of some seconds, on its way to a database that gateways share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Counted {
    /// The process that counted it.
    pub(super) holder: String,
    /// Raised with each of that process, so that each is added once.
    pub(super) number: i64,
    /// Days since 1970 (UTC).
    pub(super) day: i32,
    pub(super) spoken: Vec<OfTenant>,
}

/// What of it is of one tenant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct OfTenant {
    pub(super) tenant: String,
    /// Utterances, characters and milliseconds, live; the same of batch.
    pub(super) figures: [i64; 6],
}

/// Adds the calls (of those that came not the missed) of the records that `which` (SQL) finds, as ended at `ended` (SQL).
pub(super) fn count_calls(
    db: &Connection,
    ended: &str,
    which: &str,
    of: impl rusqlite::Params,
) -> rusqlite::Result<()> {
    let query = format!(
        "INSERT INTO usage (day, tenant, inbound_calls, outbound_calls, call_ms)
         SELECT date({ended} / 1000, 'unixepoch'), tenant, SUM(direction = 'inbound' AND COALESCE(json_extract(body, '$.cause'), '') NOT IN ('refused', 'cancelled')),
                SUM(direction <> 'inbound'),
                SUM(COALESCE(MAX({ended} - json_extract(body, '$.answeredMs'), 0), 0))
         FROM record WHERE {which} GROUP BY 1, 2
         ON CONFLICT (day, tenant) DO UPDATE SET
            inbound_calls = inbound_calls + excluded.inbound_calls,
            outbound_calls = outbound_calls + excluded.outbound_calls, call_ms = call_ms + excluded.call_ms"
    );
    db.execute(&query, of).map(|_| ())
}

/// The day of `now`.
pub(super) fn day(db: &Connection, now: Duration) -> rusqlite::Result<String> {
    db.query_row("SELECT date(?1, 'unixepoch')", [now.as_secs() as i64], |row| row.get(0))
}

/// The rows of a period, the latest day first.
pub(super) fn read(db: &Connection, period: &Period) -> rusqlite::Result<Vec<Usage>> {
    let mut query = db.prepare(
        "SELECT day, tenant, inbound_calls, outbound_calls, call_ms, live_utterances, live_characters, live_ms,
                batch_utterances, batch_characters, batch_ms
         FROM usage WHERE (?1 IS NULL OR day >= ?1) AND (?2 IS NULL OR day <= ?2) AND (?3 IS NULL OR tenant = ?3)
         ORDER BY day DESC, tenant",
    )?;
    let seconds = |row: &Row<'_>, column| Ok::<_, rusqlite::Error>(row.get::<_, i64>(column)? as f64 / 1e3);
    let count = |row: &Row<'_>, column| Ok::<_, rusqlite::Error>(row.get::<_, i64>(column)?.max(0) as u64);
    let speech = |row: &Row<'_>, first| {
        let (utterances, characters) = (count(row, first)?, count(row, first + 1)?);
        Ok::<_, rusqlite::Error>(Speech { utterances, characters, audio_seconds: seconds(row, first + 2)? })
    };
    let usage = |row: &Row<'_>| {
        Ok(Usage {
            day: row.get(0)?,
            tenant: row.get(1)?,
            inbound_calls: count(row, 2)?,
            outbound_calls: count(row, 3)?,
            call_seconds: seconds(row, 4)?,
            live: speech(row, 5)?,
            batch: speech(row, 8)?,
        })
    };
    query.query_map(params![period.from, period.to, period.tenant], usage)?.collect()
}
