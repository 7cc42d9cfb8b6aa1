//! Batch work that opens its database when it is first needed.
//!
//! # Why
//! The database is opened at start only where there is one already, so that unfinished jobs go on; a gateway
//! that never sees a job writes no file.

use std::sync::{Arc, Mutex, PoisonError};

use super::{Batch, BatchError, Config};
use crate::synth::device::Engine;

/// Batch work, opened when it is first needed.
#[derive(Clone)]
pub struct Jobs(Arc<Inner>);

struct Inner {
    config: Config,
    engine: Engine,
    open: Mutex<Option<Batch>>,
}

impl Jobs {
    /// Goes on with unfinished jobs where there is a database.
    ///
    /// # Errors
    /// The database is there and cannot be used.
    pub fn new(config: Config, engine: Engine) -> Result<Self, BatchError> {
        let exists = config.database.exists();
        let jobs = Self(Arc::new(Inner { config, engine, open: Mutex::new(None) }));
        if exists {
            jobs.batch()?;
        }
        Ok(jobs)
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
        let batch = Batch::open(self.0.config.clone(), self.0.engine.clone())?;
        *open = Some(batch.clone());
        Ok(batch)
    }

    /// The open database, if any.
    pub fn opened(&self) -> Option<Batch> {
        self.0.open.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Stops handing out work; unfinished jobs go on after the next start. Blocks.
    pub fn shutdown(&self) {
        let open = self.0.open.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(batch) = open {
            batch.shutdown();
        }
    }
}
