//! Where jobs are kept: in a file of this gateway ([`Sqlite`]), or in a PostgreSQL that gateways share ([`Postgres`]).
//!
//! # Why
//! Several gateways on one database need what one alone does not. A gateway that works on an utterance holds a *lease*, which ends
//! where its holder says nothing for a while, and a *fence*, a number that grows with each lease of that utterance. The
//! fence decides: an utterance is marked as finished by the one who holds the latest lease, and by no other, so that
//! one that was taken for dead and is not changes nothing. In the file of one gateway every fence is 0 and no lease ends.

pub(super) mod postgres;
pub(super) mod sqlite;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

pub(super) use self::postgres::Postgres;
pub(super) use self::sqlite::Sqlite;
use super::{BatchError, ItemResult, Job, JobSpec, JobState};
use crate::audio::duration_of;
use crate::audio_file::Format;
use crate::clock;

/// Names one utterance.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct PartId {
    /// The job's number; jobs of one priority are served in this order.
    pub(super) seq: i64,
    pub(super) item: u32,
    pub(super) part: u32,
}

/// An utterance to be made.
#[derive(Clone, Debug)]
pub(super) struct Work {
    pub(super) id: PartId,
    /// Of the lease under which it is made.
    pub(super) fence: i64,
    pub(super) job: String,
    pub(super) tenant: String,
    pub(super) text: String,
    pub(super) voice: Option<String>,
    pub(super) language: Option<String>,
    pub(super) instructions: Option<String>,
    pub(super) speed: f32,
    pub(super) seed: u64,
}

/// The audio of an utterance that is finished.
#[derive(Clone, Debug)]
pub(super) struct Made {
    pub(super) id: PartId,
    /// Of the lease under which it was made.
    pub(super) fence: i64,
    pub(super) samples: u64,
}

/// What came of marking an utterance as finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finish {
    /// It counts, with so many characters; 0: it was marked before.
    Counted(u64),
    /// Its job is over, or somebody else has a later lease: what was made is not wanted.
    Void,
}

/// A job to be taken on.
pub(super) struct NewJob<'a> {
    pub(super) id: &'a str,
    pub(super) now: Duration,
    pub(super) spec: &'a JobSpec,
    /// The utterances of each item.
    pub(super) items: &'a [Vec<String>],
    /// Most jobs that are not over.
    pub(super) max_jobs: u32,
    /// Characters that its tenant may hand in on a day (UTC); 0: any number.
    pub(super) chars_per_day: u64,
}

impl NewJob<'_> {
    /// One without limits.
    #[cfg(test)]
    pub(super) fn plain<'a>(id: &'a str, spec: &'a JobSpec, items: &'a [Vec<String>]) -> NewJob<'a> {
        NewJob { id, now: Duration::ZERO, spec, items, max_jobs: u32::MAX, chars_per_day: 0 }
    }

    /// When the day began by whose characters it is judged.
    fn day(&self) -> Duration {
        clock::midnight(self.now)
    }

    /// Whether it may be taken on where there are so many unfinished jobs and its tenant has handed in so many
    /// characters on this day.
    fn admit(&self, unfinished: u32, used: u64) -> Result<(), BatchError> {
        if unfinished >= self.max_jobs {
            return Err(BatchError::Full(unfinished));
        }
        let chars = self.items.iter().flatten().map(|part| part.chars().count() as u64).sum::<u64>();
        let limit = self.chars_per_day;
        if limit > 0 && used + chars > limit {
            let retry_after = self.day() + clock::DAY - self.now;
            return Err(BatchError::UsedUp { chars, used, limit, retry_after });
        }
        Ok(())
    }

    /// Every utterance with its place and seed.
    fn parts(&self) -> impl Iterator<Item = NewPart<'_>> {
        let mut number = 0u64;
        self.items
            .iter()
            .enumerate()
            .flat_map(|(item, parts)| parts.iter().enumerate().map(move |(part, text)| (item, part, text)))
            .map(move |(item, part, text)| {
                let own = self.spec.items.get(item);
                // Each part has a seed of its own.
                let seed = match own.and_then(|own| own.seed) {
                    Some(seed) => seed.wrapping_add(part as u64),
                    None => self.spec.seed.wrapping_add(number),
                };
                number += 1;
                NewPart {
                    item: item as u32,
                    part: part as u32,
                    text,
                    // Integers of databases are signed.
                    seed: seed as i64,
                    voice: own.and_then(|own| own.voice.as_deref()),
                    instructions: own.and_then(|own| own.instructions.as_deref()),
                }
            })
    }
}

/// One utterance of a job to be taken on.
struct NewPart<'a> {
    item: u32,
    part: u32,
    text: &'a str,
    seed: i64,
    voice: Option<&'a str>,
    instructions: Option<&'a str>,
}

/// A database of jobs. Every change is one transaction; methods block.
pub(super) trait Store: Send {
    /// Takes a job on, unless a limit forbids it.
    fn insert(&mut self, job: &NewJob<'_>) -> Result<(), BatchError>;

    /// The first utterance of a tenant's jobs, by priority and age, that no gateway works on, and a lease of it. `busy`: on
    /// which this gateway works or has worked. `voices`: those that it is to be for, beside the default one; `None`: any.
    fn claim(&mut self, tenant: &str, busy: &[&PartId], voices: Option<&[String]>) -> Result<Option<Work>, BatchError>;

    /// One utterance that this gateway holds, if it is still to be made.
    fn part(&mut self, id: &PartId) -> Result<Option<Work>, BatchError>;

    /// Those who have unfinished jobs.
    fn tenants(&mut self) -> Result<Vec<String>, BatchError>;

    /// An utterance is over: with `samples` of audio, or with the reason why not. May be said again.
    fn finish(
        &mut self,
        id: &PartId,
        fence: i64,
        result: Result<u64, &str>,
        now: Duration,
    ) -> Result<Finish, BatchError>;

    /// How long a lease lasts; `None`: for ever.
    fn lease(&self) -> Option<Duration> {
        None
    }

    /// Makes the leases of this gateway last longer, and tells its speed, in characters a second. Which leases those are;
    /// `None`: all that it ever had.
    fn renew(&mut self, _speed: Option<f64>) -> Result<Option<BTreeSet<(PartId, i64)>>, BatchError> {
        Ok(None)
    }

    /// Gives the lease of one utterance back, which this gateway has no device for just now.
    fn give_back(&mut self, _id: &PartId, _fence: i64) -> Result<(), BatchError> {
        Ok(())
    }

    /// Gives the leases of this gateway back.
    fn release(&mut self) -> Result<(), BatchError> {
        Ok(())
    }

    /// Characters a second of all gateways; `own`: of this one.
    fn speed(&mut self, own: Option<f64>) -> Result<Option<f64>, BatchError> {
        Ok(own)
    }

    /// Ends a job before its time; whether it was unfinished.
    fn cancel(&mut self, id: &str, now: Duration) -> Result<bool, BatchError>;

    /// One job with its items.
    fn job(&mut self, id: &str) -> Result<Job, BatchError>;

    /// Those of `ids` that there are, without their items.
    fn named(&mut self, ids: &BTreeSet<Arc<str>>) -> Result<Vec<Job>, BatchError>;

    /// The newest jobs of those tenants that `whose` says, or the newest that are older than `after`, at most `limit`.
    fn list(&mut self, limit: u32, after: Option<&str>, whose: &dyn Fn(&str) -> bool) -> Result<Vec<Job>, BatchError>;

    /// The tenant of a job.
    fn owner(&mut self, id: &str) -> Result<String, BatchError>;

    /// The utterances that have audio, in order.
    fn made(&mut self, id: &str, item: Option<u32>) -> Result<(Format, Vec<Made>), BatchError>;

    /// Jobs in every state, also in those that none is in.
    fn counts(&mut self) -> Result<[(JobState, u32); 5], BatchError>;

    /// Characters that wait in each unfinished job and in those before it, by the job's name.
    fn chars_ahead(&mut self) -> Result<HashMap<String, u64>, BatchError>;

    /// Those of `jobs` that keep no audio: cancelled ones, and those that are not known.
    fn without_audio(&mut self, jobs: &BTreeSet<&str>) -> Result<BTreeSet<String>, BatchError>;

    /// Jobs that are over, oldest first: name, when, and bytes of audio.
    fn over(&mut self) -> Result<Vec<(String, Duration, u64)>, BatchError>;

    /// Bytes of audio in all: cancelled jobs keep none, whatever was made of them.
    fn bytes(&mut self) -> Result<u64, BatchError>;

    /// Removes a job.
    fn forget(&mut self, id: &str) -> Result<(), BatchError>;

    /// Makes the database full when it has grown by `pages` more, as a full disk does.
    #[cfg(test)]
    fn limit_growth(&self, _pages: u32) {}
}

/// Where audio lies, as far as gateways that share a database must agree on it.
pub(super) trait Marked: Send {
    /// Which place it is, and whether it was marked just now: the first who asks marks it.
    fn mark(&self) -> Result<(String, bool), BatchError>;

    /// Takes a mark back that was set just now.
    fn unmark(&self);

    /// What is said where it is not the place of the others.
    fn is_another(&self) -> String;
}

/// What is said of an item by its utterances: how many there are, have audio, have none and never will.
fn item_result(
    job: JobState,
    index: u32,
    (parts, done, failed): (u32, u32, u32),
    samples: u64,
    error: Option<String>,
) -> ItemResult {
    let status = match job {
        JobState::Cancelled => JobState::Cancelled,
        _ if done + failed == 0 => JobState::Queued,
        _ if done + failed < parts => JobState::Running,
        // With a sentence missing it is not what was asked for; `error` tells.
        _ if done == 0 => JobState::Failed,
        _ => JobState::Done,
    };
    ItemResult { index, status, duration_ms: duration_of(samples).as_millis() as u64, error }
}

fn state_of(name: &str) -> JobState {
    JobState::ALL.into_iter().find(|state| state.name() == name).unwrap_or(JobState::Queued)
}

fn no_job(id: &str) -> BatchError {
    BatchError::NotFound(format!("job `{id}`"))
}
