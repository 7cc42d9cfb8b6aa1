//! The hosts of a trunk: which is asked first, and which are left alone because they have failed.
//!
//! A state machine over `now`. Calls tell of hosts that fail and the health check of those that answer; [`Targets::order`]
//! is the order in which a call tries them: lower priority first, then by weight (as RFC 2782 has it), hosts
//! that have failed last.

use std::time::{Duration, Instant};

use super::config::TrunkConfig;

/// Health checks in a row that fail before a host counts as down: one may be lost.
const MISSED: u32 = 2;

/// The hosts of one trunk, in the order of its configuration.
#[derive(Debug)]
pub(super) struct Targets {
    hosts: Vec<Target>,
    /// How long a host that failed a call is left alone.
    blocked: Duration,
    checked: bool,
}

#[derive(Debug)]
struct Target {
    host: String,
    priority: u16,
    weight: u16,
    /// A call failed there.
    blocked_until: Option<Instant>,
    /// Health checks that failed in a row.
    missed: u32,
    /// Health, once known.
    up: Option<bool>,
    error: Option<String>,
}

/// What is known of one host of a trunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetStatus {
    /// Host, with its port where one is configured.
    pub host: String,
    /// Whether it answers OPTIONS; `None`: not asked, or not answered yet.
    pub up: Option<bool>,
    /// A call failed there a moment ago, and other hosts are tried first.
    pub blocked: bool,
    /// What went wrong last, while it is wrong.
    pub error: Option<String>,
}

impl Targets {
    pub(super) fn new(trunk: &TrunkConfig) -> Targets {
        let target = |(host, priority, weight)| Target {
            host,
            priority,
            weight,
            blocked_until: None,
            missed: 0,
            up: None,
            error: None,
        };
        Targets {
            hosts: trunk.hosts().map(target).collect(),
            blocked: Duration::from_secs(trunk.failed_target_s),
            checked: trunk.options_s > 0,
        }
    }

    /// Hosts in the order in which a call tries them. `random` gives numbers from 0 to 1.
    pub(super) fn order(&self, now: Instant, mut random: impl FnMut() -> f64) -> Vec<String> {
        let mut left: Vec<&Target> = self.hosts.iter().collect();
        let mut order = Vec::new();
        while let Some(first) = left.iter().map(|target| (target.is_out(now), target.priority)).min() {
            let group: Vec<usize> =
                (0..left.len()).filter(|n| (left[*n].is_out(now), left[*n].priority) == first).collect();
            let total: f64 = group.iter().map(|n| f64::from(left[*n].weight)).sum();
            let mut at = random() * total;
            let chosen = group.iter().copied().find(|n| {
                at -= f64::from(left[*n].weight);
                at < 0.0
            });
            // Of hosts without weight the first.
            order.push(left.remove(chosen.unwrap_or(group[0])).host.clone());
        }
        order
    }

    /// A call failed there for what another host may do better.
    pub(super) fn failed(&mut self, now: Instant, host: &str, error: &str) {
        let until = now + self.blocked;
        if let Some(target) = self.find(host) {
            target.blocked_until = Some(until);
            target.error = Some(error.to_owned());
        }
    }

    /// A call got through.
    pub(super) fn worked(&mut self, host: &str) {
        if let Some(target) = self.find(host) {
            target.blocked_until = None;
            target.error = None;
        }
    }

    /// What came of a health check. Whether the host's health has changed by it, and to what.
    pub(super) fn checked(&mut self, host: &str, result: Result<(), String>) -> Option<bool> {
        let target = self.find(host)?;
        let before = target.up;
        match result {
            Ok(()) => {
                (target.missed, target.up) = (0, Some(true));
                // A host that answers again need not wait.
                target.blocked_until = None;
                target.error = None;
            }
            Err(error) => {
                target.missed += 1;
                target.error = Some(error);
                if target.missed >= MISSED {
                    target.up = Some(false);
                }
            }
        }
        target.up.filter(|up| before != Some(*up))
    }

    /// Whether a call has a host to go to that answers; `None`: they are not asked, or none is known yet.
    pub(super) fn is_up(&self) -> Option<bool> {
        let health = self.hosts.iter().map(|target| target.up);
        match self.checked {
            true if health.clone().any(|up| up == Some(true)) => Some(true),
            true if health.clone().all(|up| up == Some(false)) => Some(false),
            _ => None,
        }
    }

    pub(super) fn status(&self, now: Instant) -> Vec<TargetStatus> {
        let status = |target: &Target| TargetStatus {
            host: target.host.clone(),
            up: target.up,
            blocked: target.blocked_until.is_some_and(|until| until > now),
            error: target.error.clone(),
        };
        self.hosts.iter().map(status).collect()
    }

    fn find(&mut self, host: &str) -> Option<&mut Target> {
        self.hosts.iter_mut().find(|target| target.host == host)
    }
}

impl Target {
    fn is_out(&self, now: Instant) -> bool {
        self.up == Some(false) || self.blocked_until.is_some_and(|until| until > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    fn targets(more: &str) -> Targets {
        let trunk: TrunkConfig = toml::from_str(&format!(
            "name = \"t\"\nhost = \"a\"\nfailed_target_s = 30\noptions_s = 5\ntargets = [{more}]"
        ))
        .expect("valid");
        Targets::new(&trunk)
    }

    #[test]
    fn priority_comes_first_and_weight_decides_between_equals() {
        let targets = targets(
            "{ host = \"b\", priority = 1, weight = 3 }, { host = \"c\", priority = 2 }, { host = \"d\", priority = 0 }",
        );
        let now = clock::now();
        assert_eq!(targets.order(now, || 0.0), ["d", "a", "b", "c"]);
        assert_eq!(targets.order(now, || 0.99), ["d", "b", "a", "c"]);
        let mut state = 1_u32;
        let mut random = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f64::from(state >> 8) / f64::from(1 << 24)
        };
        let heavy = (0..4_000).filter(|_| targets.order(now, &mut random)[1] == "b").count();
        assert!((2_850..=3_150).contains(&heavy), "three in four: {heavy}");
    }

    #[test]
    fn who_failed_is_asked_last_until_the_time_is_over_or_it_answers() {
        let now = clock::now();
        let mut targets = targets("{ host = \"b\", priority = 2 }");
        targets.failed(now, "a", "503 Service Unavailable");
        let later = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(targets.order(later(29), || 0.5), ["b", "a"], "it is still tried where nothing else is left");
        assert!(targets.status(later(29))[0].blocked);
        assert_eq!(targets.order(later(30), || 0.5), ["a", "b"]);
        targets.failed(later(30), "a", "no answer");
        assert_eq!(targets.checked("a", Ok(())), Some(true));
        assert_eq!(targets.order(later(31), || 0.5), ["a", "b"]);
        targets.failed(later(31), "a", "no answer");
        targets.worked("a");
        assert_eq!(targets.status(later(31))[0].error, None);
    }

    #[test]
    fn a_host_is_down_after_two_checks_and_up_after_one() {
        let now = clock::now();
        let mut targets = targets("{ host = \"b\" }");
        assert_eq!(targets.is_up(), None);
        assert_eq!(targets.checked("a", Err("no answer".into())), None, "one check may be lost");
        assert_eq!(targets.checked("a", Err("no answer".into())), Some(false));
        assert_eq!(targets.checked("a", Err("no answer".into())), None, "told once");
        assert_eq!((targets.is_up(), targets.order(now, || 0.0)), (None, vec!["b".to_owned(), "a".to_owned()]));
        targets.checked("b", Err("no answer".into()));
        targets.checked("b", Err("no answer".into()));
        assert_eq!(targets.is_up(), Some(false));
        assert_eq!(targets.checked("b", Ok(())), Some(true));
        assert_eq!(targets.is_up(), Some(true));
        assert_eq!(targets.checked("nobody", Ok(())), None);
    }
}
