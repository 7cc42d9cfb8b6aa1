//! The database of jobs. One connection, behind a lock; every change is one transaction.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, Row, params};

use super::{BatchError, ItemResult, Job, JobSpec, JobState};
use crate::audio::duration_of;
use crate::audio_file::Format;

/// Raised with every change of the tables.
const VERSION: i64 = 2;

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
        finished INTEGER NOT NULL DEFAULT 0
    );
    CREATE INDEX job_state ON job (state);
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

/// The first waiting parts of a tenant's oldest jobs.
///
/// The hints keep it to the rows that are asked for (SQLite never reorders a `CROSS JOIN`): left to itself the planner
/// reads and sorts every waiting sentence of every book before it gives out one.
const WAITING: &str = "
    SELECT job.seq, part.item, part.part, job.id, job.tenant, part.text, COALESCE(part.voice, job.voice),
           job.language, COALESCE(part.instructions, job.instructions), job.speed, part.seed
    FROM job NOT INDEXED CROSS JOIN part INDEXED BY part_waiting ON part.job = job.seq AND part.state = 0
    WHERE job.state IN ('queued', 'running') AND job.tenant = ?1
    ORDER BY job.seq, part.item, part.part LIMIT ?2";

/// Names one utterance.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct PartId {
    /// The job's number; jobs are served in this order.
    pub(super) seq: i64,
    pub(super) item: u32,
    pub(super) part: u32,
}

/// An utterance to be made.
#[derive(Clone, Debug)]
pub(super) struct Work {
    pub(super) id: PartId,
    pub(super) job: String,
    pub(super) tenant: String,
    pub(super) text: String,
    pub(super) voice: Option<String>,
    pub(super) language: Option<String>,
    pub(super) instructions: Option<String>,
    pub(super) speed: f32,
    pub(super) seed: u64,
}

pub(super) struct Store {
    db: Connection,
}

impl Store {
    pub(super) fn open(path: &Path) -> Result<Self, BatchError> {
        let db = Connection::open(path)?;
        db.pragma_update(None, "journal_mode", "WAL")?;
        // With FULL a submitted job survives the loss of power too, not only of the process.
        db.pragma_update(None, "synchronous", "FULL")?;
        db.pragma_update(None, "foreign_keys", true)?;
        db.busy_timeout(Duration::from_secs(5))?;
        let version: i64 = db.pragma_query_value(None, "user_version", |row| row.get(0))?;
        match version {
            0 => db.execute_batch(&format!("BEGIN;{SCHEMA}PRAGMA user_version = {VERSION};COMMIT;"))?,
            1 => db.execute_batch(&format!("BEGIN;{FROM_1}PRAGMA user_version = {VERSION};COMMIT;"))?,
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

    /// Makes the database full when it has grown by `pages` more, as a full disk does.
    #[cfg(test)]
    pub(super) fn limit_growth(&self, pages: u32) {
        let now: u32 = self.db.pragma_query_value(None, "page_count", |row| row.get(0)).expect("readable");
        self.db.query_row(&format!("PRAGMA max_page_count = {}", now + pages), [], |_| Ok(())).expect("limited");
    }

    pub(super) fn insert(
        &mut self,
        id: &str,
        now: Duration,
        spec: &JobSpec,
        items: &[Vec<String>],
    ) -> Result<(), BatchError> {
        let total: usize = items.iter().map(Vec::len).sum();
        let transaction = self.db.transaction()?;
        transaction.execute(
            "INSERT INTO job (id, created_ms, tenant, voice, language, instructions, speed, format, state, total)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, 'queued', ?9)",
            params![
                id,
                now.as_millis() as i64,
                spec.tenant,
                spec.voice,
                spec.language,
                spec.instructions,
                f64::from(spec.speed),
                spec.format.name(),
                total as i64
            ],
        )?;
        let seq = transaction.last_insert_rowid();
        let mut insert = transaction.prepare(
            "INSERT INTO part (job, item, part, text, chars, seed, voice, instructions)
                      VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
        )?;
        let mut number = 0u64;
        for (item, parts) in items.iter().enumerate() {
            let own = spec.items.get(item);
            let (voice, instructions) =
                (own.and_then(|own| own.voice.as_deref()), own.and_then(|own| own.instructions.as_deref()));
            for (part, text) in parts.iter().enumerate() {
                // Each part has a seed of its own; SQLite's integers are signed.
                let seed = match own.and_then(|own| own.seed) {
                    Some(seed) => seed.wrapping_add(part as u64),
                    None => spec.seed.wrapping_add(number),
                } as i64;
                number += 1;
                let chars = text.chars().count() as i64;
                insert.execute(params![seq, item as i64, part as i64, text, chars, seed, voice, instructions])?;
            }
        }
        drop(insert);
        transaction.commit()?;
        Ok(())
    }

    /// Characters of the jobs that `tenant` has handed in since then, cancelled ones too.
    pub(super) fn chars_since(&self, tenant: &str, since: Duration) -> rusqlite::Result<u64> {
        let sum: i64 = self.db.query_row(
            "SELECT COALESCE(SUM(part.chars), 0) FROM job JOIN part ON part.job = job.seq
             WHERE job.tenant = ?1 AND job.created_ms >= ?2",
            params![tenant, since.as_millis() as i64],
            |row| row.get(0),
        )?;
        Ok(sum.max(0) as u64)
    }

    /// The first waiting parts of a tenant's oldest jobs, at most `limit`.
    pub(super) fn waiting(&self, tenant: &str, limit: usize) -> rusqlite::Result<Vec<Work>> {
        let mut query = self.db.prepare(WAITING)?;
        query.query_map(params![tenant, limit as i64], work_of)?.collect()
    }

    /// One part, if it is still to be made.
    pub(super) fn part(&self, id: &PartId) -> rusqlite::Result<Option<Work>> {
        let mut query = self.db.prepare(
            "SELECT job.seq, part.item, part.part, job.id, job.tenant, part.text,
                    COALESCE(part.voice, job.voice), job.language,
                    COALESCE(part.instructions, job.instructions), job.speed, part.seed
             FROM part JOIN job ON job.seq = part.job
             WHERE part.job = ?1 AND part.item = ?2 AND part.part = ?3 AND part.state = 0
                   AND job.state IN ('queued', 'running')",
        )?;
        query.query_row(params![id.seq, id.item, id.part], work_of).optional()
    }

    /// Those who have work waiting.
    pub(super) fn tenants(&self) -> rusqlite::Result<Vec<String>> {
        let mut query =
            self.db.prepare("SELECT DISTINCT tenant FROM job WHERE state IN ('queued', 'running') ORDER BY tenant")?;
        query.query_map([], |row| row.get(0))?.collect()
    }

    /// A part is over: with `samples` of audio, or with the reason why not. Returns its length in characters.
    pub(super) fn finish(&mut self, id: &PartId, result: Result<u64, &str>, now: Duration) -> rusqlite::Result<u64> {
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
        Ok(chars.unwrap_or(0) as u64)
    }

    /// Whether the job was unfinished.
    pub(super) fn cancel(&mut self, id: &str, now: Duration) -> Result<bool, BatchError> {
        self.seq(id)?;
        let changed = self.db.execute(
            "UPDATE job SET state = 'cancelled', ended_ms = ?2 WHERE id = ?1 AND state IN ('queued', 'running')",
            params![id, now.as_millis() as i64],
        )?;
        Ok(changed > 0)
    }

    pub(super) fn job(&self, id: &str) -> Result<Job, BatchError> {
        let seq = self.seq(id)?;
        let mut job = self.db.query_row("SELECT id, state, total, finished FROM job WHERE seq = ?1", [seq], job_of)?;
        job.results = self.results(seq, job.state)?;
        Ok(job)
    }

    /// The newest jobs of those that `whose` says, or the newest that are older than `after`, at most `limit`.
    pub(super) fn list(
        &self,
        limit: u32,
        after: Option<&str>,
        whose: impl Fn(&str) -> bool,
    ) -> Result<Vec<Job>, BatchError> {
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

    pub(super) fn owner(&self, id: &str) -> Result<String, BatchError> {
        let seq = self.seq(id)?;
        Ok(self.db.query_row("SELECT tenant FROM job WHERE seq = ?1", [seq], |row| row.get(0))?)
    }

    fn results(&self, seq: i64, job: JobState) -> rusqlite::Result<Vec<ItemResult>> {
        let mut query = self.db.prepare(
            "SELECT item, COUNT(*), SUM(state = 1), SUM(state = 2), SUM(samples), MIN(error)
             FROM part WHERE job = ?1 GROUP BY item ORDER BY item",
        )?;
        let result = |row: &Row<'_>| {
            let (parts, done, failed): (u32, u32, u32) = (row.get(1)?, row.get(2)?, row.get(3)?);
            let status = match job {
                JobState::Cancelled => JobState::Cancelled,
                _ if done + failed == 0 => JobState::Queued,
                _ if done + failed < parts => JobState::Running,
                // With a sentence missing it is not what was asked for; `error` tells.
                _ if done == 0 => JobState::Failed,
                _ => JobState::Done,
            };
            let samples: i64 = row.get(4)?;
            let duration = duration_of(samples as u64);
            Ok(ItemResult { index: row.get(0)?, status, duration_ms: duration.as_millis() as u64, error: row.get(5)? })
        };
        query.query_map([seq], result)?.collect()
    }

    /// The parts that have audio, in order, with their samples.
    pub(super) fn parts(&self, id: &str, item: Option<u32>) -> Result<(Format, Vec<(PartId, u64)>), BatchError> {
        let seq = self.seq(id)?;
        let format: String = self.db.query_row("SELECT format FROM job WHERE seq = ?1", [seq], |row| row.get(0))?;
        let mut query = self.db.prepare(
            "SELECT item, part, samples FROM part
             WHERE job = ?1 AND state = 1 AND (?2 IS NULL OR item = ?2) ORDER BY item, part",
        )?;
        let part =
            |row: &Row<'_>| Ok((PartId { seq, item: row.get(0)?, part: row.get(1)? }, row.get::<_, i64>(2)? as u64));
        let parts = query.query_map(params![seq, item], part)?.collect::<rusqlite::Result<_>>()?;
        Ok((Format::named(&format).unwrap_or_default(), parts))
    }

    pub(super) fn unfinished(&self) -> rusqlite::Result<u32> {
        self.db.query_row("SELECT COUNT(*) FROM job WHERE state IN ('queued', 'running')", [], |row| row.get(0))
    }

    /// Jobs in every state, also in those that none is in.
    pub(super) fn counts(&self) -> rusqlite::Result<[(JobState, u32); 5]> {
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

    /// Characters that wait in each unfinished job and in those before it, by the job's name.
    pub(super) fn chars_ahead(&self) -> rusqlite::Result<HashMap<String, u64>> {
        let mut query = self.db.prepare(
            "SELECT job.id, COALESCE(SUM(part.chars), 0)
             FROM job NOT INDEXED LEFT JOIN part ON part.job = job.seq AND part.state = 0
             WHERE job.state IN ('queued', 'running') GROUP BY job.seq ORDER BY job.seq",
        )?;
        let mut ahead = 0;
        let upto = |row: &Row<'_>| {
            ahead += row.get::<_, i64>(1)? as u64;
            Ok((row.get(0)?, ahead))
        };
        query.query_map([], upto)?.collect()
    }

    /// Unfinished jobs and their waiting parts, for recovery.
    pub(super) fn unfinished_parts(&self) -> rusqlite::Result<BTreeMap<String, Vec<PartId>>> {
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
    pub(super) fn keeps_audio(&self, id: &str) -> rusqlite::Result<bool> {
        let query = "SELECT 1 FROM job WHERE id = ?1 AND state <> 'cancelled'";
        Ok(self.db.query_row(query, [id], |_| Ok(())).optional()?.is_some())
    }

    /// Jobs that are over, oldest first: name, when, and bytes of audio.
    pub(super) fn over(&self) -> rusqlite::Result<Vec<(String, Duration, u64)>> {
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
        query.query_map([], over)?.collect()
    }

    /// Bytes of audio in all: cancelled jobs keep none, whatever was made of them.
    pub(super) fn bytes(&self) -> rusqlite::Result<u64> {
        let query = "SELECT COALESCE(SUM(samples), 0) FROM part JOIN job ON job.seq = part.job
                     WHERE job.state <> 'cancelled'";
        let samples: i64 = self.db.query_row(query, [], |row| row.get(0))?;
        Ok(2 * samples.max(0) as u64)
    }

    pub(super) fn forget(&mut self, id: &str) -> rusqlite::Result<()> {
        self.db.execute("DELETE FROM job WHERE id = ?1", [id])?;
        Ok(())
    }

    fn seq(&self, id: &str) -> Result<i64, BatchError> {
        let seq = self.db.query_row("SELECT seq FROM job WHERE id = ?1", [id], |row| row.get(0)).optional()?;
        seq.ok_or_else(|| BatchError::NotFound(format!("job `{id}`")))
    }
}

fn work_of(row: &Row<'_>) -> rusqlite::Result<Work> {
    Ok(Work {
        id: PartId { seq: row.get(0)?, item: row.get(1)?, part: row.get(2)? },
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

fn state_of(name: &str) -> JobState {
    JobState::ALL.into_iter().find(|state| state.name() == name).unwrap_or(JobState::Queued)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_sentence_is_found_without_looking_at_the_rest_of_the_books() {
        let folder = tempfile::tempdir().expect("temp dir");
        let store = Store::open(&folder.path().join("jobs.sqlite")).expect("opens");
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
        let older_schema = SCHEMA.replace(
            "        -- of the item, where it has its own\n        voice TEXT,\n        instructions TEXT,\n",
            "",
        );
        assert_ne!(older_schema, SCHEMA);
        older.execute_batch(&format!("{older_schema}PRAGMA user_version = 1;")).expect("made");
        drop(older);
        let mut store = Store::open(&path).expect("brought up to date");
        let mut spec = super::super::tests::spec(&["One.", "Two. Three."], Format::Wav);
        (spec.voice, spec.instructions, spec.seed) = (Some("anna".into()), Some("calmly".into()), 100);
        spec.items[1] = super::super::Item {
            voice: Some("ben".into()),
            instructions: Some("loudly".into()),
            seed: Some(7),
            ..spec.items[1].clone()
        };
        let texts = [vec!["One.".to_owned()], vec!["Two.".into(), "Three.".into()]];
        store.insert("job", Duration::ZERO, &spec, &texts).expect("inserts");
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
    fn the_audio_of_cancelled_jobs_does_not_count() {
        let folder = tempfile::tempdir().expect("temp dir");
        let mut store = Store::open(&folder.path().join("jobs.sqlite")).expect("opens");
        let spec = super::super::tests::spec(&["One. Two."], Format::Wav);
        for id in ["kept", "cancelled"] {
            store.insert(id, Duration::ZERO, &spec, &[vec!["One.".into(), "Two.".into()]]).expect("inserts");
        }
        for work in store.waiting("", 3).expect("reads") {
            store.finish(&work.id, Ok(100), Duration::ZERO).expect("finishes");
        }
        assert!(store.cancel("cancelled", Duration::ZERO).expect("known"));
        assert_eq!(store.bytes().expect("reads"), 400);
        let sizes: Vec<u64> = store.over().expect("reads").into_iter().map(|(_, _, bytes)| bytes).collect();
        assert_eq!(sizes.iter().sum::<u64>(), 400);
    }
}
