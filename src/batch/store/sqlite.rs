//! The jobs of one gateway, in a file. One connection, behind a lock; every change is one transaction.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, Row, params};

use super::{Finish, Made, NewJob, NewPart, PartId, Store, Work, item_result, no_job, state_of};
use crate::audio_file::Format;
use crate::batch::{BatchError, ItemResult, Job, JobState};

/// Raised with every change of the tables.
const VERSION: i64 = 3;

const SCHEMA: &str = "
    CREATE TABLE job (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        created_ms INTEGER NOT NULL,
        ended_ms INTEGER,
        tenant TEXT NOT NULL,
        voice TEXT,
        language TEXT,
        instructions TEXT,
        speed REAL NOT NULL,
        format TEXT NOT NULL,
        state TEXT NOT NULL,
        total INTEGER NOT NULL,
        finished INTEGER NOT NULL DEFAULT 0,
        priority INTEGER NOT NULL DEFAULT 0
    );
    CREATE INDEX job_state ON job (state);
    CREATE INDEX job_order ON job (tenant, priority DESC, seq) WHERE state IN ('queued', 'running');
    CREATE TABLE part (
        job INTEGER NOT NULL REFERENCES job (seq) ON DELETE CASCADE,
        item INTEGER NOT NULL,
        part INTEGER NOT NULL,
        text TEXT NOT NULL,
        chars INTEGER NOT NULL,
        seed INTEGER NOT NULL,
        -- 0 waits, 1 has audio, 2 has none and never will
        state INTEGER NOT NULL DEFAULT 0,
        samples INTEGER NOT NULL DEFAULT 0,
        error TEXT,
        -- of the item, where it has its own
        voice TEXT,
        instructions TEXT,
        PRIMARY KEY (job, item, part)
    ) WITHOUT ROWID;
    CREATE INDEX part_waiting ON part (job, item, part) WHERE state = 0;
";

/// From version 1, where items had no voice and manner of their own.
const FROM_1: &str = "ALTER TABLE part ADD COLUMN voice TEXT; ALTER TABLE part ADD COLUMN instructions TEXT;";

/// From version 2, where jobs had no priority.
const FROM_2: &str = "
    ALTER TABLE job ADD COLUMN priority INTEGER NOT NULL DEFAULT 0;
    CREATE INDEX job_order ON job (tenant, priority DESC, seq) WHERE state IN ('queued', 'running');
";

/// The first waiting parts of a tenant's jobs, by priority and age.
///
/// The hints keep it to the rows that are asked for (SQLite never reorders a `CROSS JOIN`): left to itself the planner
/// reads and sorts every waiting sentence of every book before it gives out one.
const WAITING: &str = "
    SELECT job.seq, part.item, part.part, job.id, job.tenant, part.text, COALESCE(part.voice, job.voice),
           job.language, COALESCE(part.instructions, job.instructions), job.speed, part.seed
    FROM job INDEXED BY job_order CROSS JOIN part INDEXED BY part_waiting ON part.job = job.seq AND part.state = 0
    WHERE job.state IN ('queued', 'running') AND job.tenant = ?1
    ORDER BY job.priority DESC, job.seq, part.item, part.part LIMIT ?2";

/// The jobs of one gateway.
pub(in crate::batch) struct Sqlite {
    db: Connection,
}

impl Sqlite {
    pub(in crate::batch) fn open(path: &Path) -> Result<Self, BatchError> {
        let db = Connection::open(path)?;
        db.pragma_update(None, "journal_mode", "WAL")?;
        // With FULL a submitted job survives the loss of power too, not only of the process.
        db.pragma_update(None, "synchronous", "FULL")?;
        db.pragma_update(None, "foreign_keys", true)?;
        db.busy_timeout(Duration::from_secs(5))?;
        let version: i64 = db.pragma_query_value(None, "user_version", |row| row.get(0))?;
        let change = |steps: &str| db.execute_batch(&format!("BEGIN;{steps}PRAGMA user_version = {VERSION};COMMIT;"));
        match version {
            0 => change(SCHEMA)?,
            1 => change(&format!("{FROM_1}{FROM_2}"))?,
            2 => change(FROM_2)?,
            VERSION => {}
            newer => {
                let path = path.display();
                return Err(BatchError::Input(format!(
                    "{path} is of version {newer}, this program knows {VERSION}: use the newer program"
                )));
            }
        }
        Ok(Self { db })
    }

    /// The first waiting parts of a tenant's jobs, at most `limit`.
    pub(in crate::batch) fn waiting(&self, tenant: &str, limit: usize) -> rusqlite::Result<Vec<Work>> {
        let mut query = self.db.prepare(WAITING)?;
        query.query_map(params![tenant, limit as i64], work_of)?.collect()
    }

    /// Unfinished jobs and their waiting parts, for recovery.
    pub(in crate::batch) fn unfinished_parts(&self) -> rusqlite::Result<BTreeMap<String, Vec<PartId>>> {
        let mut query = self.db.prepare(
            "SELECT job.id, job.seq, part.item, part.part FROM job LEFT JOIN part ON part.job = job.seq AND part.state = 0
             WHERE job.state IN ('queued', 'running')",
        )?;
        let mut jobs: BTreeMap<String, Vec<PartId>> = BTreeMap::new();
        let mut rows = query.query([])?;
        while let Some(row) = rows.next()? {
            let parts = jobs.entry(row.get(0)?).or_default();
            if let Some(item) = row.get(2)? {
                parts.push(PartId { seq: row.get(1)?, item, part: row.get(3)? });
            }
        }
        Ok(jobs)
    }

    /// Whether a job of this name is known and may have audio.
    pub(in crate::batch) fn keeps_audio(&self, id: &str) -> rusqlite::Result<bool> {
        let query = "SELECT 1 FROM job WHERE id = ?1 AND state <> 'cancelled'";
        Ok(self.db.query_row(query, [id], |_| Ok(())).optional()?.is_some())
    }

    fn results(&self, seq: i64, job: JobState) -> rusqlite::Result<Vec<ItemResult>> {
        let mut query = self.db.prepare(
            "SELECT item, COUNT(*), SUM(state = 1), SUM(state = 2), SUM(samples), MIN(error)
             FROM part WHERE job = ?1 GROUP BY item ORDER BY item",
        )?;
        let result = |row: &Row<'_>| {
            let parts = (row.get(1)?, row.get(2)?, row.get(3)?);
            Ok(item_result(job, row.get(0)?, parts, row.get::<_, i64>(4)? as u64, row.get(5)?))
        };
        query.query_map([seq], result)?.collect()
    }

    fn seq(&self, id: &str) -> Result<i64, BatchError> {
        let seq = self.db.query_row("SELECT seq FROM job WHERE id = ?1", [id], |row| row.get(0)).optional()?;
        seq.ok_or_else(|| no_job(id))
    }
}

impl Store for Sqlite {
    #[cfg(test)]
    fn limit_growth(&self, pages: u32) {
        let now: u32 = self.db.pragma_query_value(None, "page_count", |row| row.get(0)).expect("readable");
        self.db.query_row(&format!("PRAGMA max_page_count = {}", now + pages), [], |_| Ok(())).expect("limited");
    }

    fn insert(&mut self, job: &NewJob<'_>) -> Result<(), BatchError> {
        let (spec, now) = (job.spec, job.now.as_millis() as i64);
        let total: usize = job.items.iter().map(Vec::len).sum();
        let transaction = self.db.transaction()?;
        let query = "SELECT COUNT(*) FROM job WHERE state IN ('queued', 'running')";
        let unfinished = transaction.query_row(query, [], |row| row.get(0))?;
        // Cancelled ones, too.
        let query = "SELECT COALESCE(SUM(part.chars), 0) FROM job JOIN part ON part.job = job.seq
                     WHERE job.tenant = ?1 AND job.created_ms >= ?2";
        let used: i64 = match job.chars_per_day {
            0 => 0,
            _ => transaction.query_row(query, params![spec.tenant, job.day().as_millis() as i64], |row| row.get(0))?,
        };
        job.admit(unfinished, used.max(0) as u64)?;
        transaction.execute(
            "INSERT INTO job (id, created_ms, tenant, voice, language, instructions, speed, format, state, total, priority)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, 'queued', ?9, ?10)",
            params![
                job.id,
                now,
                spec.tenant,
                spec.voice,
                spec.language,
                spec.instructions,
                f64::from(spec.speed),
                spec.format.name(),
                total as i64,
                spec.priority
            ],
        )?;
        let seq = transaction.last_insert_rowid();
        let mut insert = transaction.prepare(
            "INSERT INTO part (job, item, part, text, chars, seed, voice, instructions)
                      VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
        )?;
        for NewPart { item, part, text, seed, voice, instructions } in job.parts() {
            let chars = text.chars().count() as i64;
            insert.execute(params![seq, item, part, text, chars, seed, voice, instructions])?;
        }
        drop(insert);
        transaction.commit()?;
        Ok(())
    }

    fn claim(
        &mut self,
        tenant: &str,
        busy: &[&PartId],
        _voices: Option<&[String]>,
    ) -> Result<Option<Work>, BatchError> {
        // Who works on a database alone leaves nothing to others.
        let waiting = self.waiting(tenant, busy.len() + 1)?;
        Ok(waiting.into_iter().find(|work| !busy.contains(&&work.id)))
    }

    fn part(&mut self, id: &PartId) -> Result<Option<Work>, BatchError> {
        let mut query = self.db.prepare(
            "SELECT job.seq, part.item, part.part, job.id, job.tenant, part.text,
                    COALESCE(part.voice, job.voice), job.language,
                    COALESCE(part.instructions, job.instructions), job.speed, part.seed
             FROM part JOIN job ON job.seq = part.job
             WHERE part.job = ?1 AND part.item = ?2 AND part.part = ?3 AND part.state = 0
                   AND job.state IN ('queued', 'running')",
        )?;
        Ok(query.query_row(params![id.seq, id.item, id.part], work_of).optional()?)
    }

    fn tenants(&mut self) -> Result<Vec<String>, BatchError> {
        let mut query =
            self.db.prepare("SELECT DISTINCT tenant FROM job WHERE state IN ('queued', 'running') ORDER BY tenant")?;
        Ok(query.query_map([], |row| row.get(0))?.collect::<rusqlite::Result<_>>()?)
    }

    fn finish(
        &mut self,
        id: &PartId,
        _fence: i64,
        result: Result<u64, &str>,
        now: Duration,
    ) -> Result<Finish, BatchError> {
        let transaction = self.db.transaction()?;
        let (state, samples, error) = match result {
            Ok(samples) => (1, samples as i64, None),
            Err(error) => (2, 0, Some(error)),
        };
        let chars: Option<i64> = transaction
            .query_row(
                "UPDATE part SET state = ?4, samples = ?5, error = ?6
                 WHERE job = ?1 AND item = ?2 AND part = ?3 AND state = 0 RETURNING chars",
                params![id.seq, id.item, id.part, state, samples, error],
                |row| row.get(0),
            )
            .optional()?;
        // Nothing changes for a job that was cancelled or forgotten meanwhile.
        if chars.is_some() {
            transaction.execute(
                "UPDATE job SET finished = finished + 1, state = 'running' WHERE seq = ?1 AND state IN ('queued', 'running')",
                [id.seq],
            )?;
            transaction.execute(
                "UPDATE job SET ended_ms = ?2, state =
                     CASE WHEN EXISTS (SELECT 1 FROM part WHERE job = ?1 AND state = 1) THEN 'done' ELSE 'failed' END
                 WHERE seq = ?1 AND state = 'running' AND finished = total",
                params![id.seq, now.as_millis() as i64],
            )?;
        }
        transaction.commit()?;
        Ok(Finish::Counted(chars.unwrap_or(0) as u64))
    }

    fn cancel(&mut self, id: &str, now: Duration) -> Result<bool, BatchError> {
        self.seq(id)?;
        let changed = self.db.execute(
            "UPDATE job SET state = 'cancelled', ended_ms = ?2 WHERE id = ?1 AND state IN ('queued', 'running')",
            params![id, now.as_millis() as i64],
        )?;
        Ok(changed > 0)
    }

    fn job(&mut self, id: &str) -> Result<Job, BatchError> {
        let seq = self.seq(id)?;
        let mut job = self.db.query_row("SELECT id, state, total, finished FROM job WHERE seq = ?1", [seq], job_of)?;
        job.results = self.results(seq, job.state)?;
        Ok(job)
    }

    fn named(&mut self, ids: &BTreeSet<Arc<str>>) -> Result<Vec<Job>, BatchError> {
        let mut query = self.db.prepare("SELECT id, state, total, finished FROM job WHERE id = ?1")?;
        let mut jobs = Vec::new();
        for id in ids {
            jobs.extend(query.query_row([&**id], job_of).optional()?);
        }
        Ok(jobs)
    }

    fn list(&mut self, limit: u32, after: Option<&str>, whose: &dyn Fn(&str) -> bool) -> Result<Vec<Job>, BatchError> {
        let before = after.map_or(Ok(i64::MAX), |id| self.seq(id))?;
        let mut query =
            self.db.prepare("SELECT id, state, total, finished, tenant FROM job WHERE seq < ?1 ORDER BY seq DESC")?;
        let (mut rows, mut jobs) = (query.query([before])?, Vec::new());
        while jobs.len() < limit as usize
            && let Some(row) = rows.next()?
        {
            if whose(row.get_ref(4)?.as_str().unwrap_or_default()) {
                jobs.push(job_of(row)?);
            }
        }
        Ok(jobs)
    }

    fn owner(&mut self, id: &str) -> Result<String, BatchError> {
        let seq = self.seq(id)?;
        Ok(self.db.query_row("SELECT tenant FROM job WHERE seq = ?1", [seq], |row| row.get(0))?)
    }

    fn made(&mut self, id: &str, item: Option<u32>) -> Result<(Format, Vec<Made>), BatchError> {
        let seq = self.seq(id)?;
        let format: String = self.db.query_row("SELECT format FROM job WHERE seq = ?1", [seq], |row| row.get(0))?;
        let mut query = self.db.prepare(
            "SELECT item, part, samples FROM part
             WHERE job = ?1 AND state = 1 AND (?2 IS NULL OR item = ?2) ORDER BY item, part",
        )?;
        let part = |row: &Row<'_>| {
            let id = PartId { seq, item: row.get(0)?, part: row.get(1)? };
            Ok(Made { id, fence: 0, samples: row.get::<_, i64>(2)? as u64 })
        };
        let parts = query.query_map(params![seq, item], part)?.collect::<rusqlite::Result<_>>()?;
        Ok((Format::named(&format).unwrap_or_default(), parts))
    }

    fn counts(&mut self) -> Result<[(JobState, u32); 5], BatchError> {
        let mut counts = JobState::ALL.map(|state| (state, 0));
        let mut query = self.db.prepare("SELECT state, COUNT(*) FROM job GROUP BY state")?;
        let mut rows = query.query([])?;
        while let Some(row) = rows.next()? {
            let state = state_of(&row.get::<_, String>(0)?);
            if let Some((_, count)) = counts.iter_mut().find(|(known, _)| *known == state) {
                *count = row.get(1)?;
            }
        }
        Ok(counts)
    }

    fn chars_ahead(&mut self) -> Result<HashMap<String, u64>, BatchError> {
        let mut query = self.db.prepare(
            "SELECT job.id, COALESCE(SUM(part.chars), 0)
             FROM job NOT INDEXED LEFT JOIN part ON part.job = job.seq AND part.state = 0
             WHERE job.state IN ('queued', 'running') GROUP BY job.seq ORDER BY job.priority DESC, job.seq",
        )?;
        let mut ahead = 0;
        let upto = |row: &Row<'_>| {
            ahead += row.get::<_, i64>(1)? as u64;
            Ok((row.get(0)?, ahead))
        };
        Ok(query.query_map([], upto)?.collect::<rusqlite::Result<_>>()?)
    }

    fn without_audio(&mut self, jobs: &BTreeSet<&str>) -> Result<BTreeSet<String>, BatchError> {
        let mut without = BTreeSet::new();
        for job in jobs {
            if !self.keeps_audio(job)? {
                without.insert((*job).to_owned());
            }
        }
        Ok(without)
    }

    fn over(&mut self) -> Result<Vec<(String, Duration, u64)>, BatchError> {
        let mut query = self.db.prepare(
            "SELECT job.id, job.ended_ms, 2 * COALESCE(SUM(part.samples) FILTER (WHERE job.state <> 'cancelled'), 0)
             FROM job JOIN part ON part.job = job.seq
             WHERE job.state NOT IN ('queued', 'running') GROUP BY job.seq ORDER BY job.ended_ms",
        )?;
        let over = |row: &Row<'_>| {
            let ended: Option<i64> = row.get(1)?;
            Ok((
                row.get(0)?,
                Duration::from_millis(ended.unwrap_or(0).max(0) as u64),
                row.get::<_, i64>(2)?.max(0) as u64,
            ))
        };
        Ok(query.query_map([], over)?.collect::<rusqlite::Result<_>>()?)
    }

    fn bytes(&mut self) -> Result<u64, BatchError> {
        let query = "SELECT COALESCE(SUM(samples), 0) FROM part JOIN job ON job.seq = part.job
                     WHERE job.state <> 'cancelled'";
        let samples: i64 = self.db.query_row(query, [], |row| row.get(0))?;
        Ok(2 * samples.max(0) as u64)
    }

    fn forget(&mut self, id: &str) -> Result<(), BatchError> {
        self.db.execute("DELETE FROM job WHERE id = ?1", [id])?;
        Ok(())
    }
}

fn work_of(row: &Row<'_>) -> rusqlite::Result<Work> {
    Ok(Work {
        id: PartId { seq: row.get(0)?, item: row.get(1)?, part: row.get(2)? },
        fence: 0,
        job: row.get(3)?,
        tenant: row.get(4)?,
        text: row.get(5)?,
        voice: row.get(6)?,
        language: row.get(7)?,
        instructions: row.get(8)?,
        speed: row.get::<_, f64>(9)? as f32,
        seed: row.get::<_, i64>(10)? as u64,
    })
}

fn job_of(row: &Row<'_>) -> rusqlite::Result<Job> {
    Ok(Job {
        id: row.get(0)?,
        state: state_of(&row.get::<_, String>(1)?),
        total: row.get(2)?,
        finished: row.get(3)?,
        eta_seconds: None,
        reason: None,
        results: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_sentence_is_found_without_looking_at_the_rest_of_the_books() {
        let folder = tempfile::tempdir().expect("temp dir");
        let store = Sqlite::open(&folder.path().join("jobs.sqlite")).expect("opens");
        let mut query = store.db.prepare(&format!("EXPLAIN QUERY PLAN {WAITING}")).expect("valid");
        let plan = query.query_map(params!["", 1], |row| row.get::<_, String>(3)).expect("planned");
        let plan: Vec<String> = plan.collect::<rusqlite::Result<_>>().expect("read");
        assert!(plan.iter().any(|step| step.contains("part_waiting")), "{plan:?}");
        assert!(plan.iter().all(|step| !step.contains("TEMP B-TREE")), "it sorts: {plan:?}");
    }

    #[test]
    fn items_may_have_a_voice_a_manner_and_a_seed_of_their_own_also_in_an_older_database() {
        let folder = tempfile::tempdir().expect("temp dir");
        let path = folder.path().join("jobs.sqlite");
        let older = Connection::open(&path).expect("opens");
        let mut older_schema = SCHEMA.to_owned();
        for (newer, older) in [
            ("        -- of the item, where it has its own\n        voice TEXT,\n        instructions TEXT,\n", ""),
            (" DEFAULT 0,\n        priority INTEGER NOT NULL DEFAULT 0\n", " DEFAULT 0\n"),
            (
                "    CREATE INDEX job_order ON job (tenant, priority DESC, seq) WHERE state IN ('queued', 'running');\n",
                "",
            ),
        ] {
            assert!(older_schema.contains(newer), "{newer}");
            older_schema = older_schema.replace(newer, older);
        }
        older.execute_batch(&format!("{older_schema}PRAGMA user_version = 1;")).expect("made");
        drop(older);
        let mut store = Sqlite::open(&path).expect("brought up to date");
        let mut spec = crate::batch::tests::spec(&["One.", "Two. Three."], Format::Wav);
        (spec.voice, spec.instructions, spec.seed) = (Some("anna".into()), Some("calmly".into()), 100);
        spec.items[1] = crate::batch::Item {
            voice: Some("ben".into()),
            instructions: Some("loudly".into()),
            seed: Some(7),
            ..spec.items[1].clone()
        };
        let texts = [vec!["One.".to_owned()], vec!["Two.".into(), "Three.".into()]];
        store.insert(&NewJob::plain("job", &spec, &texts)).expect("inserts");
        let work = store.waiting("", 9).expect("reads");
        let told: Vec<_> = work
            .iter()
            .map(|work| (work.voice.as_deref(), work.instructions.as_deref(), work.seed))
            .map(|(voice, manner, seed)| (voice.unwrap_or("-"), manner.unwrap_or("-"), seed))
            .collect();
        assert_eq!(told, [("anna", "calmly", 100), ("ben", "loudly", 7), ("ben", "loudly", 8)]);
        assert_eq!(store.part(&work[1].id).expect("reads").and_then(|work| work.voice).as_deref(), Some("ben"));
    }

    #[test]
    fn a_job_of_higher_priority_comes_before_an_older_one_of_its_tenant() {
        let folder = tempfile::tempdir().expect("temp dir");
        let mut store = Sqlite::open(&folder.path().join("jobs.sqlite")).expect("opens");
        let plain = crate::batch::tests::spec(&["One. Two."], Format::Wav);
        let texts = [vec!["One.".to_owned(), "Two.".into()]];
        for (id, priority) in [("old", 0), ("urgent", 5), ("low", -1), ("new", 0)] {
            let spec = crate::batch::JobSpec { priority, ..plain.clone() };
            store.insert(&NewJob::plain(id, &spec, &texts)).expect("inserts");
        }
        let mut order = Vec::<Work>::new();
        while let Some(work) =
            store.claim("", &order.iter().map(|work| &work.id).collect::<Vec<_>>(), None).expect("reads")
        {
            order.push(work);
        }
        let order: Vec<&str> = order.iter().map(|work| work.job.as_str()).collect();
        assert_eq!(order, ["urgent", "urgent", "old", "old", "new", "new", "low", "low"]);
    }

    #[test]
    fn the_audio_of_cancelled_jobs_does_not_count() {
        let folder = tempfile::tempdir().expect("temp dir");
        let mut store = Sqlite::open(&folder.path().join("jobs.sqlite")).expect("opens");
        let spec = crate::batch::tests::spec(&["One. Two."], Format::Wav);
        for id in ["kept", "cancelled"] {
            store.insert(&NewJob::plain(id, &spec, &[vec!["One.".into(), "Two.".into()]])).expect("inserts");
        }
        for work in store.waiting("", 3).expect("reads") {
            store.finish(&work.id, work.fence, Ok(100), Duration::ZERO).expect("finishes");
        }
        assert!(store.cancel("cancelled", Duration::ZERO).expect("known"));
        assert_eq!(store.bytes().expect("reads"), 400);
        let sizes: Vec<u64> = store.over().expect("reads").into_iter().map(|(_, _, bytes)| bytes).collect();
        assert_eq!(sizes.iter().sum::<u64>(), 400);
    }
}
