//! How far the wall clock can be trusted with deleting things.
//!
//! # Why
//! Jobs, records and recordings are forgotten after days by the wall clock, for they outlive the process; and the wall
//! clock jumps: a machine boots in 1970 or in ten days, somebody sets it, a virtual machine wakes up. What is kept too long
//! costs some disk, what is deleted too early is lost. So the wall clock counts only once the process has run for [`SETTLE`],
//! time enough for the clock to be set, and never for more time than has passed on the monotonic clock since.

use std::time::{Duration, Instant};

/// How long a clock must have gone evenly.
const SETTLE: Duration = if cfg!(test) { Duration::ZERO } else { Duration::from_secs(3_600) };
/// What it may be off by meanwhile: slewing and daylight are no jumps.
const SLACK: Duration = Duration::from_secs(600);

/// Compares the two clocks. Owns the last pair of readings that agreed.
#[derive(Debug, Default)]
pub struct Age {
    anchor: Option<(Instant, Duration)>,
}

impl Age {
    /// The time to count ages by; `None`: there is none yet.
    pub fn trusted(&mut self, now: Instant, wall: Duration) -> Option<Duration> {
        let (began, at) = *self.anchor.get_or_insert((now, wall));
        let run = now.saturating_duration_since(began);
        let even = at + run;
        if wall + SLACK < even {
            // Set back: what was read before was wrong.
            self.anchor = Some((now, wall));
            return None;
        }
        // Set forward: only the time that has passed counts.
        (run >= SETTLE).then_some(wall.min(even + SLACK))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::{self, DAY};

    #[test]
    fn a_clock_that_jumps_makes_nothing_older() {
        let (mut age, start, wall) = (Age::default(), clock::now(), DAY * 20_000);
        let hours = |n: u32| Duration::from_secs(3_600) * n;
        assert_eq!(age.trusted(start, wall), Some(wall), "tests need not settle");
        assert_eq!(age.trusted(start + hours(2), wall + hours(2)), Some(wall + hours(2)));
        // Ten days ahead: two hours have passed, and no more.
        assert_eq!(age.trusted(start + hours(2), wall + 10 * DAY), Some(wall + hours(2) + SLACK));
        assert_eq!(age.trusted(start + hours(3), wall + hours(3)), Some(wall + hours(3)));
        // Ten days back: it is the earlier clock that was wrong, perhaps.
        assert_eq!(age.trusted(start + hours(4), wall - 10 * DAY), None);
        assert_eq!(age.trusted(start + hours(5), wall - 10 * DAY + hours(1)), Some(wall - 10 * DAY + hours(1)));
    }
}
