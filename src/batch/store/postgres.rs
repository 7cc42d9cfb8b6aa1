//! The jobs of several gateways, in one PostgreSQL, their audio in one folder or object store that all of them see.
//!
//! A gateway claims an utterance with `FOR UPDATE SKIP LOCKED`: two that ask at the same time get different ones, and
//! neither waits. The lease lasts by the clock of the database, so that those of the gateways may differ; each gateway makes
//! its leases longer before they end ([`Store::renew`]). `NOTIFY` wakes idle gateways when a job comes or is cancelled, and tells
//! all of them, on a channel of its own, which job has changed: so whichever one a client follows a job at knows at once what
//! another has spoken of it.
//!
//! # Why
//! - **The name of a file holds the fence**, so that one who comes late overwrites nothing, and the row says whose file
//!   counts.
//! - **Rows are locked in one order** (job, then its utterances in theirs), so that no two gateways wait for each other.
//! - **The place is checked**: it has a file or an object with a number that the database knows. A gateway whose disk is
//!   not mounted would mark as finished what no other can read.

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;

use super::{Finish, Made, Marked, NewJob, PartId, Store, Work, item_result, no_job, state_of};
use crate::audio_file::Format;
use crate::batch::{BatchError, Changes, Job, JobState, PAGE};
use crate::postgres::{Address, Client, Error, Feed, Health, Link, Row, Setup};

/// The channel that wakes gateways.
const CHANNEL: &str = "antiphon_batch";
/// The channel on which gateways tell each other the names of jobs about which something has changed.
const PROGRESS: &str = "antiphon_batch_progress";
/// Taken while a job is taken on, so that limits hold for all gateways together.
const ADMISSION: i64 = 0x6261_7463_6861_646d;

/// The tables, a step for each version. Times of leases are the database's, all others the gateways'.
const STEPS: &[&str] = &["
    CREATE TABLE antiphon.batch_setting (name text PRIMARY KEY, value text NOT NULL);
    CREATE TABLE antiphon.batch_job (
        seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        id text NOT NULL UNIQUE,
        created_ms bigint NOT NULL,
        ended_ms bigint,
        tenant text NOT NULL,
        voice text,
        language text,
        instructions text,
        speed double precision NOT NULL,
        format text NOT NULL,
        state text NOT NULL,
        priority integer NOT NULL,
        total integer NOT NULL,
        finished integer NOT NULL DEFAULT 0
    );
    CREATE INDEX batch_job_state ON antiphon.batch_job (state);
    CREATE INDEX batch_job_created ON antiphon.batch_job (tenant, created_ms);
    CREATE TABLE antiphon.batch_part (
        job bigint NOT NULL REFERENCES antiphon.batch_job (seq) ON DELETE CASCADE,
        item integer NOT NULL,
        part integer NOT NULL,
        -- of the job, here too so that one index finds the next
        tenant text NOT NULL,
        priority integer NOT NULL,
        text text NOT NULL,
        chars integer NOT NULL,
        seed bigint NOT NULL,
        -- of the item, where it has its own
        voice text,
        instructions text,
        -- 0 waits or is made, 1 has audio, 2 has none and never will, 3 was cancelled
        state smallint NOT NULL DEFAULT 0,
        samples bigint NOT NULL DEFAULT 0,
        error text,
        -- raised with every lease; of what is finished: of the lease under which it was made
        fence bigint NOT NULL DEFAULT 0,
        holder text,
        until timestamptz,
        PRIMARY KEY (job, item, part)
    );
    CREATE INDEX batch_part_waiting ON antiphon.batch_part (tenant, priority DESC, job, item, part) WHERE state = 0;
    CREATE INDEX batch_part_held ON antiphon.batch_part (holder) WHERE state = 0 AND holder IS NOT NULL;
    CREATE TABLE antiphon.batch_holder (id text PRIMARY KEY, until timestamptz NOT NULL, speed double precision);
"];

/// What of a part and its job an utterance is made from.
const WORK: &str = "part.job, part.item, part.part, part.fence, job.id, job.tenant, part.text,
    COALESCE(part.voice, job.voice), job.language, COALESCE(part.instructions, job.instructions), job.speed, part.seed";

/// The next utterance of tenant $1 for holder $2, for $3 ms; not those of $4, $5 and $6, and, where there are voices $7, of
/// those or of the default one.
const CLAIM: &str = "
    WITH next AS MATERIALIZED (
        SELECT job, item, part FROM antiphon.batch_part AS part
        WHERE tenant = $1 AND state = 0 AND (holder IS NULL OR holder = $2 OR until < clock_timestamp())
              AND NOT EXISTS (
                  SELECT FROM unnest($4::bigint[], $5::integer[], $6::integer[]) AS busy (job, item, part)
                  WHERE busy.job = part.job AND busy.item = part.item AND busy.part = part.part
              )
              AND ($7::text[] IS NULL OR COALESCE(
                  part.voice, (SELECT voice FROM antiphon.batch_job WHERE seq = part.job)
              ) = ANY ($7) IS NOT FALSE)
        ORDER BY priority DESC, job, item, part LIMIT 1 FOR UPDATE SKIP LOCKED
    )
    UPDATE antiphon.batch_part AS part
    SET holder = $2, fence = part.fence + 1, until = clock_timestamp() + $3::float8 * interval '1 millisecond'
    FROM next, antiphon.batch_job AS job
    WHERE part.job = next.job AND part.item = next.item AND part.part = next.part AND job.seq = part.job
    RETURNING ";

/// Those of holder $1, locked in order.
const HELD: &str = "(job, item, part) IN (
    SELECT job, item, part FROM antiphon.batch_part WHERE holder = $1 AND state = 0
    ORDER BY job, item, part FOR UPDATE
)";

/// The jobs of several gateways.
pub(in crate::batch) struct Postgres {
    link: Link,
    /// This gateway, from start to end of its process.
    holder: String,
    lease: Duration,
    place: Box<dyn Marked>,
    /// Whether it is the place that the database means.
    known: bool,
}

impl Postgres {
    /// Those at `address`, with audio at `place`. Connects to nothing yet. `woken`: when there may be something to do;
    /// `changes`: told what all gateways do to jobs.
    pub(in crate::batch) fn new(
        address: &Address,
        place: Box<dyn Marked>,
        lease: Duration,
        woken: Arc<Notify>,
        changes: Changes,
    ) -> Result<Self, BatchError> {
        let told = Arc::new(move |job: Option<&str>| match job {
            Some(job) => changes.of(job),
            None => changes.unknown(),
        });
        let feed = Some(Feed { channel: PROGRESS, told });
        let setup = Setup { part: "batch", steps: STEPS, shown: true, listen: Some(CHANNEL), woken, feed };
        let link = Link::new(address, setup)?;
        let holder = uuid::Uuid::new_v4().simple().to_string();
        Ok(Self { link, holder, lease, place, known: false })
    }

    /// Whether the database can be used.
    pub(in crate::batch) fn health(&self) -> Arc<Health> {
        self.link.health().clone()
    }

    fn run<T>(&mut self, work: impl AsyncFnOnce(&mut Client) -> Result<T, Error>) -> Result<T, BatchError> {
        if !self.known {
            self.find_place()?;
            self.known = true;
        }
        Ok(self.link.run(work)?)
    }

    /// Whether the place of audio is that of the other gateways. The first of them says which it is.
    fn find_place(&mut self) -> Result<(), BatchError> {
        let (mark, is_new) = self.place.mark()?;
        let known = self.link.run(async |client| {
            let query =
                "INSERT INTO antiphon.batch_setting (name, value) VALUES ('audio_dir', $1) ON CONFLICT DO NOTHING";
            client.execute(query, &[&mark]).await?;
            let query = "SELECT value FROM antiphon.batch_setting WHERE name = 'audio_dir'";
            Ok(client.query_one(query, &[]).await?.get::<_, String>(0))
        })?;
        if known == mark {
            return Ok(());
        }
        if is_new {
            // Where a disk is mounted later it must not be found.
            self.place.unmark();
        }
        let reason = self.place.is_another();
        self.link.health().set(Some(reason.clone()));
        Err(Error::Unusable(reason).into())
    }
}

impl Store for Postgres {
    fn insert(&mut self, job: &NewJob<'_>) -> Result<(), BatchError> {
        let spec = job.spec;
        let (mut items, mut parts, mut texts, mut chars, mut seeds) = (vec![], vec![], vec![], vec![], vec![]);
        let (mut voices, mut manners) = (vec![], vec![]);
        for part in job.parts() {
            items.push(part.item as i32);
            parts.push(part.part as i32);
            chars.push(part.text.chars().count() as i32);
            texts.push(clean(part.text));
            seeds.push(part.seed);
            voices.push(part.voice.map(clean));
            manners.push(part.instructions.map(clean));
        }
        let [voice, language, manner] = [&spec.voice, &spec.language, &spec.instructions].map(|text| {
            let text: Option<&str> = text.as_deref();
            text.map(clean)
        });
        let (now, total, tenant) = (job.now.as_millis() as i64, items.len() as i32, clean(&spec.tenant));
        let (limited, committing) = (Cell::new(None), Cell::new(false));
        let done = self.run(async |client| {
            let transaction = client.transaction().await?;
            transaction.execute("SELECT pg_advisory_xact_lock($1)", &[&ADMISSION]).await?;
            let query = "SELECT COUNT(*) FROM antiphon.batch_job WHERE state IN ('queued', 'running')";
            let unfinished: i64 = transaction.query_one(query, &[]).await?.get(0);
            let query = "SELECT COALESCE(SUM(part.chars), 0)::bigint FROM antiphon.batch_job AS job
                         JOIN antiphon.batch_part AS part ON part.job = job.seq
                         WHERE job.tenant = $1 AND job.created_ms >= $2";
            let used: i64 = match job.chars_per_day {
                0 => 0,
                _ => transaction.query_one(query, &[&tenant, &(job.day().as_millis() as i64)]).await?.get(0),
            };
            if let Err(error) = job.admit(unfinished.max(0) as u32, used.max(0) as u64) {
                limited.set(Some(error));
                return Ok(());
            }
            let query = "INSERT INTO antiphon.batch_job
                (id, created_ms, tenant, voice, language, instructions, speed, format, state, priority, total)
                VALUES ($1, $2, $3, $4, $5, $6, $7, $8, 'queued', $9, $10) RETURNING seq";
            let (speed, format) = (f64::from(spec.speed), spec.format.name());
            let row = transaction
                .query_one(
                    query,
                    &[&job.id, &now, &tenant, &voice, &language, &manner, &speed, &format, &spec.priority, &total],
                )
                .await?;
            let seq: i64 = row.get(0);
            let query = "INSERT INTO antiphon.batch_part
                (job, item, part, tenant, priority, text, chars, seed, voice, instructions)
                SELECT $1::bigint, item, part, $2::text, $3::integer, text, chars, seed, voice, instructions
                FROM unnest($4::integer[], $5::integer[], $6::text[], $7::integer[], $8::bigint[], $9::text[], $10::text[])
                     AS new (item, part, text, chars, seed, voice, instructions)";
            transaction
                .execute(
                    query,
                    &[&seq, &tenant, &spec.priority, &items, &parts, &texts, &chars, &seeds, &voices, &manners],
                )
                .await?;
            transaction.execute("SELECT pg_notify($1, ''), pg_notify($2, $3)", &[&CHANNEL, &PROGRESS, &job.id]).await?;
            committing.set(true);
            Ok(transaction.commit().await?)
        });
        match (limited.into_inner(), done) {
            (Some(limited), Ok(())) => Err(limited),
            (_, Err(BatchError::Postgres(Error::Gone(_)))) if committing.get() => {
                Err(BatchError::Uncertain(job.id.to_owned()))
            }
            (_, done) => done,
        }
    }

    fn claim(&mut self, tenant: &str, busy: &[&PartId], voices: Option<&[String]>) -> Result<Option<Work>, BatchError> {
        let jobs: Vec<i64> = busy.iter().map(|id| id.seq).collect();
        let items: Vec<i32> = busy.iter().map(|id| id.item as i32).collect();
        let parts: Vec<i32> = busy.iter().map(|id| id.part as i32).collect();
        let (holder, lease) = (self.holder.clone(), self.lease.as_secs_f64() * 1e3);
        self.run(async |client| {
            let query = format!("{CLAIM}{WORK}");
            let row = client.query_opt(&query, &[&tenant, &holder, &lease, &jobs, &items, &parts, &voices]).await?;
            Ok(row.as_ref().map(work_of))
        })
    }

    fn part(&mut self, id: &PartId) -> Result<Option<Work>, BatchError> {
        let holder = self.holder.clone();
        self.run(async |client| {
            let query = format!(
                "SELECT {WORK} FROM antiphon.batch_part AS part JOIN antiphon.batch_job AS job ON job.seq = part.job
                 WHERE part.job = $1 AND part.item = $2 AND part.part = $3 AND part.state = 0 AND part.holder = $4"
            );
            let row = client.query_opt(&query, &[&id.seq, &(id.item as i32), &(id.part as i32), &holder]).await?;
            Ok(row.as_ref().map(work_of))
        })
    }

    fn tenants(&mut self) -> Result<Vec<String>, BatchError> {
        self.run(async |client| {
            let query =
                "SELECT DISTINCT tenant FROM antiphon.batch_job WHERE state IN ('queued', 'running') ORDER BY 1";
            Ok(client.query(query, &[]).await?.iter().map(|row| row.get(0)).collect())
        })
    }

    fn finish(
        &mut self,
        id: &PartId,
        fence: i64,
        result: Result<u64, &str>,
        now: Duration,
    ) -> Result<Finish, BatchError> {
        let (state, samples, error) = match result {
            Ok(samples) => (1i16, samples as i64, None),
            Err(error) => (2, 0, Some(clean(error))),
        };
        let (seq, item, part, now) = (id.seq, id.item as i32, id.part as i32, now.as_millis() as i64);
        self.run(async |client| {
            let transaction = client.transaction().await?;
            // The job first: what changes both locks them in this order.
            let query = "SELECT id FROM antiphon.batch_job WHERE seq = $1 FOR UPDATE";
            let Some(job) = transaction.query_opt(query, &[&seq]).await? else { return Ok(Finish::Void) };
            let query = "UPDATE antiphon.batch_part
                SET state = $5, samples = $6, error = $7, holder = NULL, until = NULL
                WHERE job = $1 AND item = $2 AND part = $3 AND fence = $4 AND state = 0 RETURNING chars";
            let row = transaction.query_opt(query, &[&seq, &item, &part, &fence, &state, &samples, &error]).await?;
            let Some(row) = row else {
                // Said before, and the answer was lost; or the lease is another's by now.
                let query = "SELECT FROM antiphon.batch_part
                    WHERE job = $1 AND item = $2 AND part = $3 AND fence = $4 AND state IN (1, 2)";
                let said = transaction.query_opt(query, &[&seq, &item, &part, &fence]).await?.is_some();
                return Ok(if said { Finish::Counted(0) } else { Finish::Void });
            };
            let query = "UPDATE antiphon.batch_job SET finished = finished + 1, state = 'running' WHERE seq = $1";
            transaction.execute(query, &[&seq]).await?;
            let query = "UPDATE antiphon.batch_job SET ended_ms = $2, state =
                    CASE WHEN EXISTS (SELECT FROM antiphon.batch_part WHERE job = $1 AND state = 1)
                         THEN 'done' ELSE 'failed' END
                WHERE seq = $1 AND finished = total";
            transaction.execute(query, &[&seq, &now]).await?;
            transaction.execute("SELECT pg_notify($1, $2)", &[&PROGRESS, &job.get::<_, &str>(0)]).await?;
            transaction.commit().await?;
            Ok(Finish::Counted(row.get::<_, i32>(0).max(0) as u64))
        })
    }

    fn lease(&self) -> Option<Duration> {
        Some(self.lease)
    }

    fn renew(&mut self, speed: Option<f64>) -> Result<Option<BTreeSet<(PartId, i64)>>, BatchError> {
        let (holder, lease) = (self.holder.clone(), self.lease.as_secs_f64() * 1e3);
        self.run(async |client| {
            let until = "clock_timestamp() + $2::float8 * interval '1 millisecond'";
            let query =
                format!("UPDATE antiphon.batch_part SET until = {until} WHERE {HELD} RETURNING job, item, part, fence");
            let held = client.query(&query, &[&holder, &lease]).await?;
            let query = format!(
                "INSERT INTO antiphon.batch_holder (id, until, speed) VALUES ($1, {until}, $3)
                 ON CONFLICT (id) DO UPDATE SET until = EXCLUDED.until, speed = EXCLUDED.speed"
            );
            client.execute(&query, &[&holder, &lease, &speed]).await?;
            let query = "DELETE FROM antiphon.batch_holder WHERE until < clock_timestamp() - interval '1 day'";
            client.execute(query, &[]).await?;
            Ok(Some(held.iter().map(|row| (part_of(row), row.get(3))).collect()))
        })
    }

    fn give_back(&mut self, id: &PartId, fence: i64) -> Result<(), BatchError> {
        let holder = self.holder.clone();
        self.run(async |client| {
            let query = "UPDATE antiphon.batch_part SET holder = NULL, until = NULL
                WHERE job = $1 AND item = $2 AND part = $3 AND fence = $4 AND state = 0 AND holder = $5";
            client.execute(query, &[&id.seq, &(id.item as i32), &(id.part as i32), &fence, &holder]).await?;
            client.execute("SELECT pg_notify($1, '')", &[&CHANNEL]).await?;
            Ok(())
        })
    }

    fn release(&mut self) -> Result<(), BatchError> {
        let holder = self.holder.clone();
        self.run(async |client| {
            let transaction = client.transaction().await?;
            let query = format!("UPDATE antiphon.batch_part SET holder = NULL, until = NULL WHERE {HELD}");
            transaction.execute(&query, &[&holder]).await?;
            transaction.execute("DELETE FROM antiphon.batch_holder WHERE id = $1", &[&holder]).await?;
            transaction.execute("SELECT pg_notify($1, '')", &[&CHANNEL]).await?;
            Ok(transaction.commit().await?)
        })
    }

    fn speed(&mut self, own: Option<f64>) -> Result<Option<f64>, BatchError> {
        self.run(async |client| {
            let query = "SELECT SUM(speed) FROM antiphon.batch_holder WHERE until > clock_timestamp()";
            Ok(client.query_one(query, &[]).await?.get::<_, Option<f64>>(0).or(own))
        })
    }

    fn cancel(&mut self, id: &str, now: Duration) -> Result<bool, BatchError> {
        let now = now.as_millis() as i64;
        let cancelled = self.run(async |client| {
            let transaction = client.transaction().await?;
            let query = "UPDATE antiphon.batch_job SET state = 'cancelled', ended_ms = $2
                WHERE id = $1 AND state IN ('queued', 'running') RETURNING seq";
            let Some(row) = transaction.query_opt(query, &[&id, &now]).await? else {
                let query = "SELECT FROM antiphon.batch_job WHERE id = $1";
                return Ok(transaction.query_opt(query, &[&id]).await?.map(|_| false));
            };
            let query = "UPDATE antiphon.batch_part SET state = 3, holder = NULL, until = NULL
                WHERE (job, item, part) IN (
                    SELECT job, item, part FROM antiphon.batch_part WHERE job = $1 AND state = 0
                    ORDER BY job, item, part FOR UPDATE
                )";
            transaction.execute(query, &[&row.get::<_, i64>(0)]).await?;
            transaction.execute("SELECT pg_notify($1, ''), pg_notify($2, $3)", &[&CHANNEL, &PROGRESS, &id]).await?;
            transaction.commit().await?;
            Ok(Some(true))
        })?;
        cancelled.ok_or_else(|| no_job(id))
    }

    fn job(&mut self, id: &str) -> Result<Job, BatchError> {
        let found = self.run(async |client| {
            let query = "SELECT seq, id, state, total, finished FROM antiphon.batch_job WHERE id = $1";
            let Some(row) = client.query_opt(query, &[&id]).await? else { return Ok(None) };
            let mut job = job_of(&row);
            let query = "SELECT item, COUNT(*), COUNT(*) FILTER (WHERE state = 1), COUNT(*) FILTER (WHERE state = 2),
                    SUM(samples)::bigint, MIN(error)
                FROM antiphon.batch_part WHERE job = $1 GROUP BY item ORDER BY item";
            let rows = client.query(query, &[&row.get::<_, i64>(0)]).await?;
            job.results = rows
                .iter()
                .map(|row| {
                    let [parts, done, failed] = [1, 2, 3].map(|column| row.get::<_, i64>(column) as u32);
                    let (index, samples) = (row.get::<_, i32>(0) as u32, row.get::<_, i64>(4) as u64);
                    item_result(job.state, index, (parts, done, failed), samples, row.get(5))
                })
                .collect();
            Ok(Some(job))
        })?;
        found.ok_or_else(|| no_job(id))
    }

    fn named(&mut self, ids: &BTreeSet<Arc<str>>) -> Result<Vec<Job>, BatchError> {
        let ids: Vec<&str> = ids.iter().map(|id| &**id).collect();
        self.run(async |client| {
            let query = "SELECT seq, id, state, total, finished FROM antiphon.batch_job WHERE id = ANY ($1::text[])";
            Ok(client.query(query, &[&ids]).await?.iter().map(job_of).collect())
        })
    }

    fn list(&mut self, limit: u32, after: Option<&str>, whose: &dyn Fn(&str) -> bool) -> Result<Vec<Job>, BatchError> {
        let found = self.run(async |client| {
            let mut before = i64::MAX;
            if let Some(id) = after {
                let query = "SELECT seq FROM antiphon.batch_job WHERE id = $1";
                let Some(row) = client.query_opt(query, &[&id]).await? else { return Ok(None) };
                before = row.get(0);
            }
            let query = "SELECT seq, id, state, total, finished, tenant FROM antiphon.batch_job
                WHERE seq < $1 ORDER BY seq DESC LIMIT $2";
            let mut jobs = Vec::new();
            loop {
                let rows = client.query(query, &[&before, &i64::from(PAGE)]).await?;
                jobs.extend(rows.iter().filter(|row| whose(row.get(5))).map(job_of));
                match rows.last() {
                    Some(last) if jobs.len() < limit as usize => before = last.get(0),
                    _ => break,
                }
            }
            jobs.truncate(limit as usize);
            Ok(Some(jobs))
        })?;
        found.ok_or_else(|| no_job(after.unwrap_or_default()))
    }

    fn owner(&mut self, id: &str) -> Result<String, BatchError> {
        let found = self.run(async |client| {
            let row = client.query_opt("SELECT tenant FROM antiphon.batch_job WHERE id = $1", &[&id]).await?;
            Ok(row.map(|row| row.get(0)))
        })?;
        found.ok_or_else(|| no_job(id))
    }

    fn made(&mut self, id: &str, item: Option<u32>) -> Result<(Format, Vec<Made>), BatchError> {
        let found = self.run(async |client| {
            let query = "SELECT seq, format FROM antiphon.batch_job WHERE id = $1";
            let Some(job) = client.query_opt(query, &[&id]).await? else { return Ok(None) };
            let query = "SELECT job, item, part, fence, samples FROM antiphon.batch_part
                WHERE job = $1 AND state = 1 AND ($2::integer IS NULL OR item = $2) ORDER BY item, part";
            let rows = client.query(query, &[&job.get::<_, i64>(0), &item.map(|item| item as i32)]).await?;
            let made = |row: &Row| Made { id: part_of(row), fence: row.get(3), samples: row.get::<_, i64>(4) as u64 };
            Ok(Some((Format::named(job.get(1)).unwrap_or_default(), rows.iter().map(made).collect())))
        })?;
        found.ok_or_else(|| no_job(id))
    }

    fn counts(&mut self) -> Result<[(JobState, u32); 5], BatchError> {
        self.run(async |client| {
            let rows = client.query("SELECT state, COUNT(*) FROM antiphon.batch_job GROUP BY state", &[]).await?;
            let of = |state: JobState| {
                let row = rows.iter().find(|row| state_of(row.get(0)) == state);
                row.map_or(0, |row| row.get::<_, i64>(1) as u32)
            };
            Ok(JobState::ALL.map(|state| (state, of(state))))
        })
    }

    fn chars_ahead(&mut self) -> Result<HashMap<String, u64>, BatchError> {
        self.run(async |client| {
            let query = "SELECT job.id, COALESCE(SUM(part.chars), 0)::bigint
                FROM antiphon.batch_job AS job
                LEFT JOIN antiphon.batch_part AS part ON part.job = job.seq AND part.state = 0
                WHERE job.state IN ('queued', 'running') GROUP BY job.seq ORDER BY job.priority DESC, job.seq";
            let mut ahead = 0;
            let upto = |row: &Row| {
                ahead += row.get::<_, i64>(1) as u64;
                (row.get(0), ahead)
            };
            Ok(client.query(query, &[]).await?.iter().map(upto).collect())
        })
    }

    fn without_audio(&mut self, jobs: &BTreeSet<&str>) -> Result<BTreeSet<String>, BatchError> {
        if jobs.is_empty() {
            return Ok(BTreeSet::new());
        }
        let jobs: Vec<&str> = jobs.iter().copied().collect();
        self.run(async |client| {
            let query = "SELECT asked.id FROM unnest($1::text[]) AS asked (id) WHERE NOT EXISTS (
                    SELECT FROM antiphon.batch_job AS job WHERE job.id = asked.id AND job.state <> 'cancelled'
                )";
            Ok(client.query(query, &[&jobs]).await?.iter().map(|row| row.get(0)).collect())
        })
    }

    fn over(&mut self) -> Result<Vec<(String, Duration, u64)>, BatchError> {
        self.run(async |client| {
            let query = "SELECT job.id, COALESCE(job.ended_ms, 0),
                    COALESCE(2 * SUM(part.samples) FILTER (WHERE job.state <> 'cancelled'), 0)::bigint
                FROM antiphon.batch_job AS job JOIN antiphon.batch_part AS part ON part.job = job.seq
                WHERE job.state NOT IN ('queued', 'running') GROUP BY job.seq ORDER BY job.ended_ms";
            let over = |row: &Row| {
                let ended = Duration::from_millis(row.get::<_, i64>(1).max(0) as u64);
                (row.get(0), ended, row.get::<_, i64>(2).max(0) as u64)
            };
            Ok(client.query(query, &[]).await?.iter().map(over).collect())
        })
    }

    fn bytes(&mut self) -> Result<u64, BatchError> {
        self.run(async |client| {
            let query = "SELECT COALESCE(SUM(part.samples), 0)::bigint
                FROM antiphon.batch_part AS part JOIN antiphon.batch_job AS job ON job.seq = part.job
                WHERE job.state <> 'cancelled'";
            Ok(2 * client.query_one(query, &[]).await?.get::<_, i64>(0).max(0) as u64)
        })
    }

    fn forget(&mut self, id: &str) -> Result<(), BatchError> {
        self.run(async |client| {
            client.execute("DELETE FROM antiphon.batch_job WHERE id = $1", &[&id]).await?;
            Ok(())
        })
    }
}

/// PostgreSQL keeps no zero bytes, which are not spoken either.
fn clean(text: &str) -> String {
    text.replace('\0', "")
}

fn part_of(row: &Row) -> PartId {
    PartId { seq: row.get(0), item: row.get::<_, i32>(1) as u32, part: row.get::<_, i32>(2) as u32 }
}

fn work_of(row: &Row) -> Work {
    Work {
        id: part_of(row),
        fence: row.get(3),
        job: row.get(4),
        tenant: row.get(5),
        text: row.get(6),
        voice: row.get(7),
        language: row.get(8),
        instructions: row.get(9),
        speed: row.get::<_, f64>(10) as f32,
        seed: row.get::<_, i64>(11) as u64,
    }
}

/// Of a row that begins with the number, name, state, total and finished of a job.
fn job_of(row: &Row) -> Job {
    Job {
        id: row.get(1),
        state: state_of(row.get(2)),
        total: row.get::<_, i32>(3) as u32,
        finished: row.get::<_, i32>(4) as u32,
        eta_seconds: None,
        reason: None,
        results: Vec::new(),
    }
}
