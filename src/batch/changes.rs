//! Who is told that something about a job has changed: a sentence is over, the job has come, or it was cancelled.
//!
//! # Why
//! Only the job's name is told, and whoever wants to know more asks the database. So what is told twice, or by another gateway,
//! or late, does no harm, and a reader that was too slow has missed nothing that it cannot read.

use std::sync::Arc;

use tokio::sync::broadcast;

/// Names that may wait for a reader; one that falls behind looks at everything.
const WAITING: usize = 256;

/// Tells of changes. Clones tell the same readers.
#[derive(Clone, Debug)]
pub struct Changes(broadcast::Sender<Option<Arc<str>>>);

impl Default for Changes {
    fn default() -> Self {
        Self(broadcast::channel(WAITING).0)
    }
}

impl Changes {
    /// Something about job `id` has changed.
    pub fn of(&self, id: &str) {
        // overflow: drops the oldest, and that reader is told that it fell behind; without readers nothing is kept
        let _ = self.0.send(Some(id.into()));
    }

    /// Something may have changed about any job: what was told meanwhile was not heard.
    pub fn unknown(&self) {
        // overflow: as above
        let _ = self.0.send(None);
    }

    /// What is told from now on.
    pub fn reader(&self) -> ChangesReader {
        ChangesReader(self.0.subscribe())
    }
}

/// One who is told.
#[derive(Debug)]
pub struct ChangesReader(broadcast::Receiver<Option<Arc<str>>>);

impl ChangesReader {
    /// The next job about which something has changed; `None`: it may be any. Cancel safe; waits for ever once nobody can
    /// tell any more.
    pub async fn next(&mut self) -> Option<Arc<str>> {
        match self.0.recv().await {
            Ok(change) => change,
            Err(broadcast::error::RecvError::Lagged(_)) => None,
            Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_reader_is_told_which_job_and_one_that_falls_behind_that_it_may_be_any() {
        let changes = Changes::default();
        changes.of("before anybody listens");
        let mut reader = changes.reader();
        changes.of("a");
        changes.unknown();
        assert_eq!((reader.next().await.as_deref(), reader.next().await), (Some("a"), None));
        for _ in 0..=WAITING {
            changes.of("b");
        }
        assert_eq!(reader.next().await, None, "one was lost");
        assert_eq!(reader.next().await.as_deref(), Some("b"));
    }
}
