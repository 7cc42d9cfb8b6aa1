//! Batch work that opens its database when it is first needed.
//!
//! # Why
//! The database is opened at start only where there is one already, so that unfinished jobs go on; a gateway
//! that never sees a job writes no file.
//!
//! A database that cannot be used costs batch work only: calls need none. One that is damaged is put aside under
//! another name, so that new jobs are taken and somebody can look at it; one that is locked, full or forbidden is
//! tried again, and [`Jobs::fault`] says so meanwhile. A PostgreSQL may have jobs of other gateways: it is connected to
//! at once, by the thread of jobs, and again whenever it was away.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::{Batch, BatchError, Changes, ChangesReader, Config};
use crate::sqlite::{is_damaged, put_aside};
use crate::synth::device::Engine;

/// Batch work, opened when it is first needed.
#[derive(Clone)]
pub struct Jobs(Arc<Inner>);

struct Inner {
    config: Config,
    engine: Engine,
    open: Mutex<Option<Batch>>,
    /// Of whichever database is open.
    changes: Changes,
    /// Another process does the work, or the gateway drains.
    parked: AtomicBool,
    /// Held while work is being parked: what is in hand ends before anybody takes it up again.
    parking: Mutex<()>,
    /// Days that jobs which are over are kept.
    keep_days: AtomicU32,
    /// Why the database could not be opened the last time.
    fault: Mutex<Option<String>>,
}

/// Why there is no batch work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobsFault {
    /// Its thread panicked, and is about to be started again.
    Thread,
    /// The database cannot be used; the text says why.
    Database(String),
}

impl Jobs {
    /// Goes on with unfinished jobs where there is a database that can be used.
    pub fn new(config: Config, engine: Engine) -> Self {
        let exists = config.database.path().is_none_or(Path::exists);
        let keep_days = AtomicU32::new(config.keep_days);
        let (open, parked, fault) = (Mutex::default(), AtomicBool::new(false), Mutex::default());
        let (changes, parking) = (Changes::default(), Mutex::default());
        let jobs = Self(Arc::new(Inner { config, engine, open, changes, parked, parking, keep_days, fault }));
        if exists {
            // Told by the log and by `fault`.
            let _ = jobs.batch();
        }
        jobs
    }

    /// Why there is no batch work, if there is none.
    pub fn fault(&self) -> Option<JobsFault> {
        // The thread that opens the database holds the lock for as long as that takes, and then there is no thread yet.
        let open = self.0.open.try_lock().ok().and_then(|open| open.clone());
        if open.as_ref().is_some_and(Batch::is_down) {
            return Some(JobsFault::Thread);
        }
        if let Some(fault) = open.and_then(|batch| batch.fault()) {
            return Some(JobsFault::Database(fault));
        }
        self.0.fault.lock().unwrap_or_else(PoisonError::into_inner).clone().map(JobsFault::Database)
    }

    /// Whether other gateways see the same jobs.
    pub fn are_shared(&self) -> bool {
        self.0.config.database.is_shared()
    }

    /// What is told of jobs from now on, whichever database is open then.
    pub fn changes(&self) -> ChangesReader {
        self.0.changes.reader()
    }

    /// Tries again to open a database that could not be opened. Blocks for milliseconds.
    pub fn retry(&self) {
        if let Some(JobsFault::Database(_)) = self.fault() {
            let _ = self.batch();
        }
    }

    /// The batch work; opens the database unless it is open. Blocks for milliseconds.
    ///
    /// # Errors
    /// The database cannot be used.
    pub fn batch(&self) -> Result<Batch, BatchError> {
        let mut open = self.0.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(batch) = &*open {
            return Ok(batch.clone());
        }
        if self.0.parked.load(Ordering::Acquire) {
            return Err(BatchError::Parked);
        }
        let outcome = self.open();
        let reason = outcome.as_ref().err().map(ToString::to_string);
        let mut fault = self.0.fault.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reason) = reason.as_ref().filter(|reason| fault.as_ref() != Some(*reason)) {
            tracing::error!(%reason, "there is no batch work until this is mended; calls go on");
        }
        *fault = reason;
        let batch = outcome?;
        batch.keep(self.0.keep_days.load(Ordering::Relaxed));
        *open = Some(batch.clone());
        Ok(batch)
    }

    /// Opens the database; a damaged one is put aside first.
    fn open(&self) -> Result<Batch, BatchError> {
        let Inner { config, engine, changes, .. } = &*self.0;
        let open = || Batch::open_telling(config.clone(), engine.clone(), changes.clone());
        match (open(), config.database.path()) {
            (Err(BatchError::Database(error)), Some(path)) if is_damaged(&error) => {
                let aside = put_aside(path).map_err(super::io(path))?;
                tracing::error!(%error, "the database of jobs is damaged; it lies at {} now", aside.display());
                open()
            }
            (outcome, _) => outcome,
        }
    }

    /// Keeps jobs that are over for so many days from now on.
    pub fn keep(&self, days: u32) {
        self.0.keep_days.store(days, Ordering::Relaxed);
        self.opened().iter().for_each(|batch| batch.keep(days));
    }

    /// The open database, if any.
    pub fn opened(&self) -> Option<Batch> {
        self.0.open.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// As [`Jobs::shutdown`], and opens nothing until [`Jobs::resume`]: another process does the work, or nobody. Blocks.
    pub fn park(&self) {
        let _parking = self.0.parking.lock().unwrap_or_else(PoisonError::into_inner);
        // Before: who asks meanwhile would open the database again.
        self.0.parked.store(true, Ordering::Release);
        self.stop();
    }

    /// Goes on after [`Jobs::park`], whose end it waits for. Blocks.
    pub fn resume(&self) {
        let _parking = self.0.parking.lock().unwrap_or_else(PoisonError::into_inner);
        self.0.parked.store(false, Ordering::Release);
        if self.0.config.database.path().is_none_or(Path::exists) {
            // Told by the log and by `fault`.
            let _ = self.batch();
        }
    }

    /// Stops handing out work; unfinished jobs go on after the next start. Blocks.
    pub fn shutdown(&self) {
        let _parking = self.0.parking.lock().unwrap_or_else(PoisonError::into_inner);
        self.stop();
    }

    fn stop(&self) {
        let open = self.0.open.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(batch) = open {
            batch.shutdown();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{config, engine, spec};
    use super::*;
    use crate::audio_file::Format;

    #[test]
    fn parked_work_is_not_opened_until_it_is_resumed() {
        let folder = tempfile::tempdir().expect("temp dir");
        let jobs = Jobs::new(config(folder.path()), engine());
        let job = jobs.batch().expect("opened").submit(spec(&["Hello."], Format::Wav)).expect("taken");
        jobs.park();
        assert!(matches!(jobs.batch(), Err(BatchError::Parked)));
        jobs.retry();
        assert!(jobs.opened().is_none() && jobs.fault().is_none());
        jobs.resume();
        assert_eq!(jobs.opened().expect("open").job(&job.id).expect("still there").total, 1);
        jobs.shutdown();
    }

    #[test]
    fn a_damaged_database_is_put_aside_and_a_locked_one_waited_for() {
        let folder = tempfile::tempdir().expect("temp dir");
        let config = config(folder.path());
        let database = folder.path().join("jobs.sqlite");
        std::fs::write(&database, b"this is no database, and long enough to look at".repeat(100)).expect("written");
        let jobs = Jobs::new(config.clone(), engine());
        assert_eq!(jobs.fault(), None);
        let job = jobs.batch().expect("a new one").submit(spec(&["Hello."], Format::Wav)).expect("taken");
        let names = || std::fs::read_dir(folder.path()).expect("readable").map(|file| file.expect("there").file_name());
        assert_eq!(names().filter(|name| name.to_string_lossy().contains(".damaged-")).count(), 1);
        jobs.shutdown();

        // It may not be opened: as where the disk was mounted without rights, or another program holds it.
        let hidden = folder.path().join("hidden");
        std::fs::rename(&database, &hidden).expect("renamed");
        std::fs::create_dir(&database).expect("made");
        let jobs = Jobs::new(config.clone(), engine());
        assert!(matches!(jobs.fault(), Some(JobsFault::Database(_))), "{:?}", jobs.fault());
        assert!(jobs.batch().is_err());
        std::fs::remove_dir(&database).expect("removed");
        std::fs::rename(&hidden, &database).expect("renamed");
        jobs.retry();
        assert_eq!(jobs.fault(), None);
        assert_eq!(jobs.batch().expect("open").job(&job.id).expect("still there").total, 1);
        jobs.shutdown();
    }
}
