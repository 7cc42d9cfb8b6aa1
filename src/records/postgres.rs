//! Records and usage of several gateways, in one PostgreSQL.
//!
//! Each gateway is a *holder*, who says every now and then that it lives ([`Postgres::tend`]). Open records of one that has
//! not said so for the length of a lease are closed by another. A record that was closed so and is ended by its own gateway
//! after all, which was only cut off, has that end.
//!
//! # Why
//! - **Everything may be said again**: what was under way when the connection was lost may be there or not. A record that
//!   is over stays as it is; speech that was counted carries a number of its gateway, and a number is added once.
//! - **Rows are locked in one order** (records by name, then usage by day and tenant), so that no two gateways wait for each
//!   other.
//! - **No gateway is taken for dead in the first moments of a connection**: where the database was away for all, all leases have
//!   ended, and each gateway needs a moment to say that it lives.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::RecordError;
use super::ledger::{Entry, Ledger, STOPPED};
use super::store::{Due, Filter, Page};
use super::usage::{Counted, Period, Speech, Usage};
use crate::postgres::{Address, Client, Error, Health, Link, Row, Setup, Transaction};

/// Another gateway does not deliver a record for so long once one has begun to.
const DELIVERY: Duration = Duration::from_secs(120);
/// Open records that are closed in one transaction.
const CLOSED: i64 = 200;

/// The tables, a step for each version.
const STEPS: &[&str] = &["
    CREATE TABLE antiphon.record (
        seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        id text NOT NULL UNIQUE,
        holder text NOT NULL,
        started_ms bigint NOT NULL,
        answered_ms bigint,
        ended_ms bigint,
        written_ms bigint NOT NULL,
        -- time from answer to end that is in the usage
        counted_ms bigint NOT NULL DEFAULT 0,
        direction text NOT NULL,
        tenant text NOT NULL,
        agent text NOT NULL,
        caller text NOT NULL,
        called text NOT NULL,
        cause text,
        body text NOT NULL,
        -- when the webhook is due; none: delivered, given up, or not configured
        hook_ms bigint,
        hook_tries integer NOT NULL DEFAULT 0
    );
    CREATE INDEX record_ended ON antiphon.record (ended_ms);
    CREATE INDEX record_open ON antiphon.record (holder) WHERE ended_ms IS NULL;
    CREATE INDEX record_hook ON antiphon.record (hook_ms) WHERE hook_ms IS NOT NULL;
    CREATE TABLE antiphon.record_holder (id text PRIMARY KEY, until timestamptz NOT NULL);
    -- the number of what a gateway has counted last, and when
    CREATE TABLE antiphon.record_counted (holder text PRIMARY KEY, number bigint NOT NULL, at timestamptz NOT NULL);
    CREATE TABLE antiphon.usage (
        day text NOT NULL,
        tenant text NOT NULL,
        inbound_calls bigint NOT NULL DEFAULT 0,
        outbound_calls bigint NOT NULL DEFAULT 0,
        call_ms bigint NOT NULL DEFAULT 0,
        live_utterances bigint NOT NULL DEFAULT 0,
        live_characters bigint NOT NULL DEFAULT 0,
        live_ms bigint NOT NULL DEFAULT 0,
        batch_utterances bigint NOT NULL DEFAULT 0,
        batch_characters bigint NOT NULL DEFAULT 0,
        batch_ms bigint NOT NULL DEFAULT 0,
        PRIMARY KEY (day, tenant)
    );
"];

/// The day (UTC) of a column of days since 1970.
const DAY: &str = "to_char(DATE '1970-01-01' + day, 'YYYY-MM-DD')";

/// Records of several gateways.
pub(super) struct Postgres {
    link: Link,
    /// This gateway, from start to end of its process; empty for one that only reads.
    holder: String,
    /// Since when it has told without a break that it lives.
    steady: Option<Instant>,
}

impl Postgres {
    /// Those at `address`, to be read. Connects to nothing yet.
    pub(super) fn new(address: &Address) -> Result<Self, RecordError> {
        Self::with(address, String::new())
    }

    /// The same, to be written by the gateway `holder`.
    pub(super) fn of(address: &Address, holder: String) -> Result<Self, RecordError> {
        Self::with(address, holder)
    }

    fn with(address: &Address, holder: String) -> Result<Self, RecordError> {
        // Who writes asks every few seconds, and so knows.
        let shown = !holder.is_empty();
        let setup = Setup { part: "records", steps: STEPS, shown, listen: None, woken: Arc::default(), feed: None };
        Ok(Self { link: Link::new(address, setup)?, holder, steady: None })
    }

    pub(super) fn health(&self) -> Arc<Health> {
        self.link.health().clone()
    }

    fn run<T>(&mut self, work: impl AsyncFnOnce(&mut Client) -> Result<T, Error>) -> Result<T, RecordError> {
        let outcome = self.link.run(work);
        if matches!(outcome, Err(Error::Gone(_))) {
            self.steady = None;
        }
        Ok(outcome?)
    }

    /// Writes records, and counts the calls of those that end. `hook`: these are due for delivery.
    pub(super) fn write(&mut self, entries: Vec<Entry>, now: Duration, hook: bool) -> Result<(), RecordError> {
        let (holder, due) = (self.holder.clone(), hook.then_some(now.as_millis() as i64));
        self.run(async |client| {
            let transaction = client.transaction().await?;
            put(&transaction, entries, &holder, due).await?;
            Ok(transaction.commit().await?)
        })
    }

    /// Adds speech to the usage of its day, once.
    pub(super) fn count(&mut self, counted: &Counted) -> Result<(), RecordError> {
        self.run(async |client| {
            let transaction = client.transaction().await?;
            let query =
                "INSERT INTO antiphon.record_counted AS known (holder, number, at) VALUES ($1, $2, clock_timestamp())
                ON CONFLICT (holder) DO UPDATE SET number = EXCLUDED.number, at = EXCLUDED.at
                WHERE known.number < EXCLUDED.number";
            if transaction.execute(query, &[&counted.holder, &counted.number]).await? > 0 {
                let days = vec![counted.day; counted.spoken.len()];
                let tenants: Vec<&str> = counted.spoken.iter().map(|spoken| spoken.tenant.as_str()).collect();
                let of = |column: usize| -> Vec<i64> {
                    counted.spoken.iter().map(|spoken| spoken.figures[column]).collect()
                };
                let figures = [of(0), of(1), of(2), of(3), of(4), of(5)];
                let [a, b, c, d, e, f] = &figures;
                let query = format!(
                    "INSERT INTO antiphon.usage AS known (day, tenant, live_utterances, live_characters, live_ms,
                                                          batch_utterances, batch_characters, batch_ms)
                     SELECT {DAY}, tenant, a, b, c, d, e, f
                     FROM unnest($1::integer[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[],
                                 $7::bigint[], $8::bigint[]) AS new (day, tenant, a, b, c, d, e, f)
                     ORDER BY 1, 2
                     ON CONFLICT (day, tenant) DO UPDATE SET
                        live_utterances = known.live_utterances + EXCLUDED.live_utterances,
                        live_characters = known.live_characters + EXCLUDED.live_characters,
                        live_ms = known.live_ms + EXCLUDED.live_ms,
                        batch_utterances = known.batch_utterances + EXCLUDED.batch_utterances,
                        batch_characters = known.batch_characters + EXCLUDED.batch_characters,
                        batch_ms = known.batch_ms + EXCLUDED.batch_ms"
                );
                transaction.execute(&query, &[&days, &tenants, a, b, c, d, e, f]).await?;
            }
            Ok(transaction.commit().await?)
        })
    }

    /// Says that this gateway lives, for another `lease`, and closes the open records of those who have not said so for as
    /// long. How many it closed.
    pub(super) fn tend(
        &mut self,
        lease: Duration,
        (now, wall): (Instant, Duration),
        hook: bool,
    ) -> Result<usize, RecordError> {
        let (holder, ms) = (self.holder.clone(), lease.as_secs_f64() * 1e3);
        self.run(async |client| {
            let query = "INSERT INTO antiphon.record_holder (id, until)
                VALUES ($1, clock_timestamp() + $2::float8 * interval '1 millisecond')
                ON CONFLICT (id) DO UPDATE SET until = EXCLUDED.until";
            client.execute(query, &[&holder, &ms]).await?;
            Ok(())
        })?;
        let steady = *self.steady.get_or_insert(now);
        let mut closed = 0;
        while now.saturating_duration_since(steady) >= lease {
            match self.close_one(wall, hook)? {
                0 => break,
                some => closed += some - 1,
            }
        }
        Ok(closed)
    }

    /// Closes records of one holder whose lease has ended: one more than how many; 0: there is no such holder.
    fn close_one(&mut self, wall: Duration, hook: bool) -> Result<usize, RecordError> {
        let due = hook.then_some(wall.as_millis() as i64);
        self.run(async |client| {
            let transaction = client.transaction().await?;
            let query = "SELECT id FROM antiphon.record_holder WHERE until < clock_timestamp()
                ORDER BY until LIMIT 1 FOR UPDATE SKIP LOCKED";
            let Some(row) = transaction.query_opt(query, &[]).await? else { return Ok(0) };
            let holder: String = row.get(0);
            let query =
                "SELECT id, started_ms, answered_ms, ended_ms, written_ms, direction, tenant, agent, caller, called,
                    cause, body
                FROM antiphon.record WHERE holder = $1 AND ended_ms IS NULL ORDER BY id LIMIT $2 FOR UPDATE";
            let open = transaction.query(query, &[&holder, &CLOSED]).await?;
            let stopped: Vec<Entry> = open.iter().map(|row| entry_of(row).stopped()).collect();
            let count = stopped.len();
            put(&transaction, stopped, &holder, due).await?;
            if (count as i64) < CLOSED {
                transaction.execute("DELETE FROM antiphon.record_holder WHERE id = $1", &[&holder]).await?;
            }
            transaction.commit().await?;
            Ok(count + 1)
        })
    }

    /// Says that this gateway ends: what it left open is closed by the next one that looks.
    pub(super) fn leave(&mut self) -> Result<(), RecordError> {
        let holder = self.holder.clone();
        self.run(async |client| {
            let query = "UPDATE antiphon.record_holder SET until = clock_timestamp() WHERE id = $1";
            client.execute(query, &[&holder]).await?;
            Ok(())
        })
    }

    /// Forgets records that ended before `before`, unless they are still to be delivered.
    pub(super) fn forget(&mut self, before: Duration) -> Result<(), RecordError> {
        let before = before.as_millis() as i64;
        self.run(async |client| {
            let query = "DELETE FROM antiphon.record WHERE ended_ms < $1 AND hook_ms IS NULL";
            client.execute(query, &[&before]).await?;
            // Of gateways that will not come back to bring their spooled lines.
            let query = "DELETE FROM antiphon.record_counted WHERE at < clock_timestamp() - interval '1 year'";
            client.execute(query, &[]).await?;
            Ok(())
        })
    }
}

impl Ledger for Postgres {
    fn get(&mut self, id: &str) -> Result<Option<Value>, RecordError> {
        self.run(async |client| {
            let row = client.query_opt("SELECT body FROM antiphon.record WHERE id = $1", &[&id]).await?;
            Ok(row.as_ref().map(|row| body_of(row, 0)))
        })
    }

    fn list(&mut self, filter: &Filter) -> Result<Page, RecordError> {
        let limit = filter.limit.clamp(1, super::PAGE);
        let found = self.run(async |client| {
            let mut before = i64::MAX;
            if let Some(id) = &filter.after {
                let row = client.query_opt("SELECT seq FROM antiphon.record WHERE id = $1", &[id]).await?;
                let Some(row) = row else { return Ok(None) };
                before = row.get(0);
            }
            let query = "SELECT body FROM antiphon.record
                WHERE seq < $1 AND ($2::text IS NULL OR direction = $2) AND ($3::text IS NULL OR agent = $3)
                      AND ($4::text IS NULL OR cause = $4)
                      AND ($5::text IS NULL OR strpos(caller, $5) > 0 OR strpos(called, $5) > 0)
                      AND ($6::bigint IS NULL OR started_ms >= $6) AND ($7::bigint IS NULL OR started_ms < $7)
                      AND ($8::text IS NULL OR tenant = $8)
                ORDER BY seq DESC LIMIT $9";
            let Filter { direction, tenant, agent, cause, party, since_ms, until_ms, .. } = filter;
            let most = i64::from(limit) + 1;
            let rows = client
                .query(query, &[&before, direction, agent, cause, party, since_ms, until_ms, tenant, &most])
                .await?;
            let mut records: Vec<Value> = rows.iter().map(|row| body_of(row, 0)).collect();
            let has_more = records.len() > limit as usize;
            records.truncate(limit as usize);
            Ok(Some(Page { records, has_more }))
        })?;
        found.ok_or(RecordError::NotFound)
    }

    fn usage(&mut self, period: &Period) -> Result<Vec<Usage>, RecordError> {
        self.run(async |client| {
            let query = "SELECT day, tenant, inbound_calls, outbound_calls, call_ms, live_utterances, live_characters,
                    live_ms, batch_utterances, batch_characters, batch_ms
                FROM antiphon.usage
                WHERE ($1::text IS NULL OR day >= $1) AND ($2::text IS NULL OR day <= $2)
                      AND ($3::text IS NULL OR tenant = $3)
                ORDER BY day DESC, tenant";
            let rows = client.query(query, &[&period.from, &period.to, &period.tenant]).await?;
            Ok(rows.iter().map(usage_of).collect())
        })
    }

    fn usage_on_day_of(&mut self, now: Duration) -> Result<Vec<Usage>, RecordError> {
        let day = self.run(async |client| {
            let query = format!("SELECT {DAY} FROM (SELECT $1::integer AS day) AS asked");
            Ok(client.query_one(&query, &[&day_of(now.as_millis() as i64)]).await?.get::<_, String>(0))
        })?;
        self.usage(&Period { from: Some(day.clone()), to: Some(day), tenant: None })
    }

    fn due(&mut self, now: Duration, limit: u32) -> Result<Vec<Due>, RecordError> {
        let (now, later) = (now.as_millis() as i64, (now + DELIVERY).as_millis() as i64);
        self.run(async |client| {
            let query = "UPDATE antiphon.record SET hook_ms = $2 WHERE seq IN (
                    SELECT seq FROM antiphon.record WHERE hook_ms <= $1 ORDER BY hook_ms LIMIT $3 FOR UPDATE SKIP LOCKED
                ) RETURNING seq, id, body, hook_tries";
            let rows = client.query(query, &[&now, &later, &i64::from(limit)]).await?;
            let due = |row: &Row| Due {
                seq: row.get(0),
                id: row.get(1),
                body: row.get(2),
                tries: row.get::<_, i32>(3).max(0) as u32,
            };
            Ok(rows.iter().map(due).collect())
        })
    }

    fn next_due(&mut self) -> Result<Option<Duration>, RecordError> {
        self.run(async |client| {
            let query = "SELECT MIN(hook_ms) FROM antiphon.record WHERE hook_ms IS NOT NULL";
            let next: Option<i64> = client.query_one(query, &[]).await?.get(0);
            Ok(next.map(|ms| Duration::from_millis(ms.max(0) as u64)))
        })
    }

    fn tried(&mut self, seq: i64, again: Option<Duration>) -> Result<(), RecordError> {
        let again = again.map(|at| at.as_millis() as i64);
        self.run(async |client| {
            let query = "UPDATE antiphon.record SET hook_ms = $2, hook_tries = hook_tries + 1 WHERE seq = $1";
            client.execute(query, &[&seq, &again]).await?;
            Ok(())
        })
    }
}

/// Writes records of `holder` and counts the calls of those that end; they are due for delivery at `due`.
async fn put(transaction: &Transaction<'_>, entries: Vec<Entry>, holder: &str, due: Option<i64>) -> Result<(), Error> {
    // Of each record the latest; a statement changes a row once.
    let mut latest: BTreeMap<String, Entry> = entries.into_iter().map(|entry| (entry.id.clone(), entry)).collect();
    if latest.is_empty() {
        return Ok(());
    }
    let ids: Vec<&str> = latest.keys().map(String::as_str).collect();
    let query = "SELECT id, ended_ms IS NOT NULL, cause, counted_ms, written_ms FROM antiphon.record
        WHERE id = ANY ($1) ORDER BY id FOR UPDATE";
    let known: HashMap<String, (bool, Option<String>, i64, i64)> = transaction
        .query(query, &[&ids])
        .await?
        .iter()
        .map(|row| (row.get(0), (row.get(1), row.get(2), row.get(3), row.get(4))))
        .collect();
    // What is over stays so, unless it was closed for a gateway that lived; what is older says nothing.
    latest.retain(|id, entry| match known.get(id) {
        Some((true, cause, ..)) => {
            entry.ended_ms.is_some() && entry.cause != *cause && cause.as_deref() == Some(STOPPED)
        }
        Some((false, _, _, written)) => entry.ended_ms.is_some() || entry.written_ms >= *written,
        None => true,
    });
    let mut usage: BTreeMap<(i32, &str), [i64; 3]> = BTreeMap::new();
    for (id, entry) in &latest {
        let Some(ended) = entry.ended_ms else { continue };
        let of = usage.entry((day_of(ended), entry.tenant.as_str())).or_default();
        match known.get(id) {
            Some((true, _, counted, _)) => of[2] += entry.call_ms() - counted,
            _ => {
                of[usize::from(entry.direction != "inbound")] += i64::from(!entry.is_missed());
                of[2] += entry.call_ms();
            }
        }
    }
    let all = || latest.values();
    let text = |of: fn(&Entry) -> &str| -> Vec<&str> { all().map(of).collect() };
    let (ids, directions, tenants) = (text(|e| &e.id), text(|e| &e.direction), text(|e| &e.tenant));
    let (agents, callers, called) = (text(|e| &e.agent), text(|e| &e.caller), text(|e| &e.called));
    let (bodies, causes) = (text(|e| &e.body), all().map(|e| e.cause.as_deref()).collect::<Vec<_>>());
    let (started, written): (Vec<i64>, Vec<i64>) = all().map(|e| (e.started_ms, e.written_ms)).unzip();
    let (answered, ended): (Vec<_>, Vec<_>) = all().map(|e| (e.answered_ms, e.ended_ms)).unzip();
    let counted: Vec<i64> = all().map(Entry::call_ms).collect();
    let hooks: Vec<Option<i64>> = all().map(|e| due.filter(|_| e.ended_ms.is_some())).collect();
    let query = "INSERT INTO antiphon.record
            (id, holder, started_ms, answered_ms, ended_ms, written_ms, counted_ms, direction, tenant, agent, caller,
             called, cause, body, hook_ms)
        SELECT id, $1::text, started, answered, ended, written, counted, direction, tenant, agent, caller, called, cause,
               body, hook
        FROM unnest($2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[], $8::text[],
                    $9::text[], $10::text[], $11::text[], $12::text[], $13::text[], $14::text[], $15::bigint[])
             AS new (id, started, answered, ended, written, counted, direction, tenant, agent, caller, called, cause, body,
                     hook)
        ORDER BY id
        ON CONFLICT (id) DO UPDATE SET
            holder = EXCLUDED.holder, answered_ms = EXCLUDED.answered_ms, ended_ms = EXCLUDED.ended_ms,
            written_ms = EXCLUDED.written_ms, counted_ms = EXCLUDED.counted_ms, cause = EXCLUDED.cause,
            body = EXCLUDED.body, hook_ms = EXCLUDED.hook_ms";
    transaction
        .execute(
            query,
            &[
                &holder,
                &ids,
                &started,
                &answered,
                &ended,
                &written,
                &counted,
                &directions,
                &tenants,
                &agents,
                &callers,
                &called,
                &causes,
                &bodies,
                &hooks,
            ],
        )
        .await?;
    let days: Vec<i32> = usage.keys().map(|(day, _)| *day).collect();
    let tenants: Vec<&str> = usage.keys().map(|(_, tenant)| *tenant).collect();
    let [inbound, outbound, ms] = [0, 1, 2].map(|column| usage.values().map(|of| of[column]).collect::<Vec<i64>>());
    let query = format!(
        "INSERT INTO antiphon.usage AS known (day, tenant, inbound_calls, outbound_calls, call_ms)
         SELECT {DAY}, tenant, inbound, outbound, ms
         FROM unnest($1::integer[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[])
              AS new (day, tenant, inbound, outbound, ms)
         ORDER BY 1, 2
         ON CONFLICT (day, tenant) DO UPDATE SET
            inbound_calls = known.inbound_calls + EXCLUDED.inbound_calls,
            outbound_calls = known.outbound_calls + EXCLUDED.outbound_calls, call_ms = known.call_ms + EXCLUDED.call_ms"
    );
    if !days.is_empty() {
        transaction.execute(&query, &[&days, &tenants, &inbound, &outbound, &ms]).await?;
    }
    Ok(())
}

/// Days since 1970 of a Unix time in milliseconds.
pub(super) fn day_of(ms: i64) -> i32 {
    (ms.div_euclid(86_400_000)).clamp(0, i64::from(i32::MAX)) as i32
}

fn entry_of(row: &Row) -> Entry {
    Entry {
        id: row.get(0),
        started_ms: row.get(1),
        answered_ms: row.get(2),
        ended_ms: row.get(3),
        written_ms: row.get(4),
        direction: row.get(5),
        tenant: row.get(6),
        agent: row.get(7),
        caller: row.get(8),
        called: row.get(9),
        cause: row.get(10),
        body: row.get(11),
    }
}

/// One that cannot be read says nothing, and does not hide the others.
fn body_of(row: &Row, column: usize) -> Value {
    serde_json::from_str(row.get(column)).unwrap_or_default()
}

fn usage_of(row: &Row) -> Usage {
    let count = |column: usize| row.get::<_, i64>(column).max(0) as u64;
    let seconds = |column: usize| row.get::<_, i64>(column) as f64 / 1e3;
    let speech = |first: usize| Speech {
        utterances: count(first),
        characters: count(first + 1),
        audio_seconds: seconds(first + 2),
    };
    Usage {
        day: row.get(0),
        tenant: row.get(1),
        inbound_calls: count(2),
        outbound_calls: count(3),
        call_seconds: seconds(4),
        live: speech(5),
        batch: speech(8),
    }
}
