//! The one place that reads time. Everything else is told `now`.

mod age;

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

pub use self::age::Age;

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

/// Processor time of this process so far, all its threads together; `None` where the system is not Linux.
pub fn cpu() -> Option<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The second field is a name in brackets that may hold anything; user and system time are 14 and 15.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let ticks = fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?;
    // The kernel counts in hundredths for every program, whatever its own clock.
    Some(Duration::from_millis(ticks * 10))
}

/// Processor time so far of the thread, or of the process of one thread, whose folder in `/proc` this is; `None` where it is gone or the
/// kernel keeps no such account (`schedstat`, nanoseconds).
pub fn cpu_of(task: &Path) -> Option<Duration> {
    let account = std::fs::read_to_string(task.join("schedstat")).ok()?;
    account.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
}

/// A day by UTC, leap seconds aside.
pub const DAY: Duration = Duration::from_secs(86_400);

/// When the day of `wall` began, by UTC.
pub fn midnight(wall: Duration) -> Duration {
    Duration::from_secs(wall.as_secs() - wall.as_secs() % DAY.as_secs())
}

/// How often a kind of event that strangers can cause makes a log line.
const SPARSE: Duration = Duration::from_secs(1);

/// Lets the first of many alike events through and then one a second, so that a peer that floods a socket with
/// rubbish is seen in the log and cannot fill it.
#[derive(Debug, Default)]
pub struct Sparse(Mutex<(Option<Instant>, u64)>);

impl Sparse {
    /// One that has let nothing through.
    pub const fn new() -> Self {
        Self(Mutex::new((None, 0)))
    }

    /// `Some(missed)`: tell of this one, and that so many before it were not told of.
    pub fn admit(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.0.is_some_and(|last| now.saturating_duration_since(last) < SPARSE) {
            state.1 += 1;
            return None;
        }
        state.0 = Some(now);
        Some(std::mem::take(&mut state.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_day_begins_at_midnight() {
        let day = DAY * 20_000;
        for wall in [day, day + Duration::from_millis(1), day + DAY - Duration::from_millis(1)] {
            assert_eq!(midnight(wall), day);
        }
        assert_eq!(midnight(day + DAY), day + DAY);
    }

    #[test]
    fn one_a_second_is_told_of_and_the_rest_counted() {
        let (sparse, start) = (Sparse::new(), now());
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(sparse.admit(at(0)), Some(0));
        assert_eq!((sparse.admit(at(1)), sparse.admit(at(999))), (None, None));
        assert_eq!(sparse.admit(at(1_000)), Some(2));
        assert_eq!(sparse.admit(at(9_000)), Some(0));
    }
}
