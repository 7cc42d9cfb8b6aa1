//! The one place that reads time. Everything else is told `now`.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The monotonic clock, for deadlines and measurements.
#[expect(clippy::disallowed_methods, reason = "this is the one reader of the clock")]
pub fn now() -> Instant {
    Instant::now()
}

/// Wall-clock time since the Unix epoch, for stamps that people and other hosts read.
#[expect(clippy::disallowed_methods, reason = "this is the one reader of the clock")]
pub fn wall() -> Duration {
    // A clock set before 1970 is reported as 1970 rather than refused.
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
