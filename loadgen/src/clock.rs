//! The one place of this crate that reads time. Everything else is told `now`.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The monotonic clock, for every measurement. Callers and gateway share a host, so shares of one clock compare.
#[expect(clippy::disallowed_methods, reason = "this is the one reader of the clock")]
pub fn now() -> Instant {
    Instant::now()
}

/// Wall-clock time since the Unix epoch, for stamps in reports and NTP fields.
#[expect(clippy::disallowed_methods, reason = "this is the one reader of the clock")]
pub fn wall() -> Duration {
    // A clock set before 1970 is reported as 1970 rather than refused.
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Waits until `at`; returns at once when that has passed.
pub fn sleep_until(at: Instant) -> tokio::time::Sleep {
    tokio::time::sleep_until(at.into())
}
