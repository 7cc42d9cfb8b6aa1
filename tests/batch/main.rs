//! Batch jobs and records across restarts and kills of the processes that work on them, and of their database.

#[allow(dead_code, reason = "the gateway's tests use the rest")]
#[path = "../gateway/counted.rs"]
mod counted;
mod kill;
mod records;
mod shared;
mod speed;
mod worker;

use std::time::Duration;

/// How long a test waits for what is to come.
const LIMIT: Duration = Duration::from_secs(120);

/// What `look` finds in the end.
async fn found<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let wait = async {
        loop {
            if let Some(found) = look() {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(LIMIT, wait).await.unwrap_or_else(|_| panic!("never: {what}"))
}
