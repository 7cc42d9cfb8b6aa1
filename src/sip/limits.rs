//! Who is turned away before a call costs anything.
//!
//! Pure state with time as an argument. Sources that leave answered calls without ACK, which is how a
//! forged or broken caller looks, collect strikes and are refused until the strikes have run off.

use std::{
    collections::HashMap,
    net::IpAddr,
    time::{Duration, Instant},
};

/// Strikes at which a source is refused.
const ALLOWED: f64 = 10.0;
/// A strike runs off in this time.
const FORGIVEN: Duration = Duration::from_secs(10);
/// Sources remembered; beyond it the least guilty are forgotten.
const MAX_SOURCES: usize = 4_096;

/// Strikes by source.
#[derive(Debug, Default)]
pub(super) struct Strikes {
    sources: HashMap<IpAddr, (f64, Instant)>,
}

impl Strikes {
    /// A call from `source` was answered and never acknowledged.
    pub(super) fn strike(&mut self, now: Instant, source: IpAddr) {
        if self.sources.len() >= MAX_SOURCES {
            self.sources.retain(|_, entry| level(*entry, now) > 1.0);
        }
        if self.sources.len() < MAX_SOURCES || self.sources.contains_key(&source) {
            let entry = self.sources.entry(source).or_insert((0.0, now));
            *entry = (level(*entry, now) + 1.0, now);
        }
    }

    /// How long `source` must wait; `None`: it is welcome.
    pub(super) fn refused(&self, now: Instant, source: IpAddr) -> Option<Duration> {
        let excess = level(*self.sources.get(&source)?, now) - ALLOWED;
        (excess >= 0.0).then(|| FORGIVEN.mul_f64(excess.max(1.0)))
    }
}

fn level((strikes, at): (f64, Instant), now: Instant) -> f64 {
    (strikes - now.saturating_duration_since(at).div_duration_f64(FORGIVEN)).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strikes_add_up_and_run_off() {
        let now = crate::clock::now();
        let (bad, good) = (IpAddr::from([192, 0, 2, 1]), IpAddr::from([192, 0, 2, 2]));
        let mut strikes = Strikes::default();
        for _ in 0..9 {
            strikes.strike(now, bad);
        }
        assert_eq!(strikes.refused(now, bad), None);
        strikes.strike(now, bad);
        assert_eq!(strikes.refused(now, bad), Some(FORGIVEN));
        assert_eq!(strikes.refused(now, good), None);
        assert_eq!(strikes.refused(now + FORGIVEN * 2, bad), None);
    }

    #[test]
    fn memory_is_bounded() {
        let now = crate::clock::now();
        let mut strikes = Strikes::default();
        for n in 0..10_000_u32 {
            strikes.strike(now, IpAddr::from(n.to_be_bytes()));
        }
        assert!(strikes.sources.len() <= MAX_SOURCES);
    }
}
