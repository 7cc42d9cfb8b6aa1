//! Which trunks this node registers at: leases in Redis, each with a number that grows with every change of hands. No
//! I/O; time is an argument.
//!
//! # Why
//! A registrar sends calls to every contact that it has. Two nodes that register the same account would both ring. So one
//! of them does, as long as it holds the lease; the others wait for its end. Redis counts the lease from when it heard
//! of it, the holder from before it asked, by its own monotonic clock, and shorter: so it has stopped, and said so to the
//! registrar, before another can have the lease, whichever is cut off from which.
//!
//! Where Redis is gone for all, no other node could register, and the trunk would fall silent. So a holder that gets no
//! answer asks the other nodes; if each of them says that it has none either, the holder goes on for as long as an answer of Redis
//! would let it. That is safe since a node that was without Redis takes no lease before [`LEASE`] has passed with it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long a lease lasts in Redis unless it is renewed.
pub(super) const LEASE: Duration = Duration::from_secs(10);
/// How long its holder uses it, from before it asked: the rest is for its last word to the registrar.
pub(super) const USED: Duration = Duration::from_secs(6);

/// The leases of this node.
#[derive(Debug, Default)]
pub(super) struct Leases {
    held: BTreeMap<String, Held>,
    /// Since when every round with Redis went well, after one that did not.
    healed: Option<Healed>,
}

/// Whether Redis answers again.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Healed {
    /// Not yet.
    No,
    /// Since then.
    Since(Instant),
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Held {
    /// The number of this holding; later holders have greater ones.
    fence: i64,
    /// By when it ends unless it is renewed.
    until: Instant,
}

impl Leases {
    /// Redis gave the lease of `trunk`, or said again that it is this node's; `None`: it is another's, or no node's yet. Gives
    /// whether that is new. `asked`: an instant before the question was sent.
    pub(super) fn answered(&mut self, asked: Instant, trunk: &str, fence: Option<i64>) -> bool {
        let before = self.held.get(trunk).copied();
        match fence {
            // An answer that was overtaken by a later one.
            Some(fence) if before.is_some_and(|held| held.fence > fence) => false,
            Some(fence) => {
                self.held.insert(trunk.to_owned(), Held { fence, until: asked + USED });
                before.is_none_or(|held| held.fence != fence)
            }
            None => self.held.remove(trunk).is_some(),
        }
    }

    /// How a round with Redis went that is over.
    pub(super) fn reached(&mut self, now: Instant, reached: bool) {
        self.healed = match (self.healed, reached) {
            (_, false) => Some(Healed::No),
            (Some(Healed::No), true) => Some(Healed::Since(now)),
            (healed, true) => healed,
        };
    }

    /// Whether a lease may be taken that no node has: another node may go on with one for as long as this one was without Redis
    /// a moment ago.
    pub(super) fn may_take(&self, now: Instant) -> bool {
        match self.healed {
            None => true,
            Some(Healed::No) => false,
            Some(Healed::Since(since)) => now.saturating_duration_since(since) >= LEASE,
        }
    }

    /// Every other node has said, after `asked`, that it is without Redis: what is held goes on.
    pub(super) fn alone(&mut self, asked: Instant) {
        for held in self.held.values_mut().filter(|held| asked < held.until) {
            held.until = held.until.max(asked + USED);
        }
    }

    /// The number of this node's holding of `trunk`, while it lasts.
    pub(super) fn fence(&self, now: Instant, trunk: &str) -> Option<i64> {
        self.held.get(trunk).filter(|held| now < held.until).map(|held| held.fence)
    }

    /// Whether this node is the one that registers at `trunk`.
    pub(super) fn holds(&self, now: Instant, trunk: &str) -> bool {
        self.fence(now, trunk).is_some()
    }

    /// Whether any is held.
    pub(super) fn any(&self, now: Instant) -> bool {
        self.held.values().any(|held| now < held.until)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::clock;

    #[test]
    fn the_holder_is_who_redis_says_and_a_late_answer_changes_nothing() {
        let (mut leases, now) = (Leases::default(), clock::now());
        assert!(!leases.holds(now, "a") && !leases.answered(now, "a", None));
        assert!(leases.answered(now, "a", Some(3)) && leases.holds(now, "a") && !leases.holds(now, "b"));
        assert!(!leases.answered(now, "a", Some(3)), "renewed");
        assert!(leases.answered(now, "a", Some(5)), "lost and won again");
        leases.answered(now, "a", Some(4));
        assert_eq!(leases.fence(now, "a"), Some(5));
        assert!(leases.answered(now, "a", None) && !leases.holds(now, "a"));
    }

    #[test]
    fn a_holder_without_an_answer_stops_before_its_lease_ends_in_redis() {
        let (mut leases, asked) = (Leases::default(), clock::now());
        let just = Duration::from_millis(1);
        leases.answered(asked, "a", Some(1));
        assert!(leases.holds(asked + USED - just, "a") && leases.any(asked + USED - just));
        assert!(!leases.holds(asked + USED, "a") && !leases.any(asked + USED));
        // A second until it is noticed, two for the registrar.
        assert!(USED + Duration::from_secs(3) < LEASE);
        // No other node has Redis either: it goes on from then, and does not come back once it has stopped.
        leases.alone(asked + Duration::from_secs(2));
        assert!(leases.holds(asked + Duration::from_secs(2) + USED - just, "a"));
        leases.alone(asked + Duration::from_secs(9));
        assert!(!leases.holds(asked + Duration::from_secs(9), "a"));
    }

    #[test]
    fn who_was_without_redis_takes_no_lease_for_a_while() {
        let (mut leases, now) = (Leases::default(), clock::now());
        assert!(leases.may_take(now));
        leases.reached(now, true);
        assert!(leases.may_take(now));
        leases.reached(now, false);
        assert!(!leases.may_take(now + LEASE));
        leases.reached(now + LEASE, true);
        leases.reached(now + LEASE + USED, true);
        assert!(!leases.may_take(now + LEASE + USED) && leases.may_take(now + LEASE + LEASE));
    }

    /// Redis as the script there says it: whose the lease is, until when, and how often it changed hands.
    #[derive(Default)]
    struct Redis {
        holder: Option<(usize, Instant)>,
        counter: i64,
    }

    impl Redis {
        fn hold(&mut self, now: Instant, node: usize, own: Option<i64>, may_take: bool) -> Option<i64> {
            if self.holder.is_some_and(|(holder, until)| holder != node && now < until) {
                return None;
            }
            if own != Some(self.counter) {
                if !may_take {
                    return None;
                }
                self.counter += 1;
            }
            self.holder = Some((node, now + LEASE));
            Some(self.counter)
        }
    }

    proptest! {
        /// Three nodes, each of which asks every second and reaches Redis and the others, or does not; answers are lost, and late.
        #[test]
        fn whoever_is_cut_off_from_whom_one_node_at_most_registers(
            spans in proptest::collection::vec((0u8..32, 1usize..20, 0u64..1_000), 5..40)
        ) {
            // Who is cut off stays so for a while.
            let rounds = spans.into_iter().flat_map(|(links, seconds, delay)| vec![(links, delay); seconds]);

            let start = clock::now();
            let (mut redis, mut nodes) = (Redis::default(), [(); 3].map(|()| Leases::default()));
            let (mut last, mut fences) = (None::<usize>, 0);
            for (second, (links, delay)) in rounds.enumerate() {
                for node in 0..3 {
                    let asked = start + Duration::from_millis(second as u64 * 1_000 + node as u64 * 333);
                    let heard = asked + Duration::from_millis(delay / 3);
                    let up = links & (1 << node) != 0;
                    if up {
                        let (own, may_take) = (nodes[node].fence(asked, "t"), nodes[node].may_take(asked));
                        let fence = redis.hold(asked, node, own, may_take);
                        // The answer may be lost behind what was asked.
                        let answered = links & 8 == 0;
                        nodes[node].reached(heard, answered);
                        if answered {
                            nodes[node].answered(asked, "t", fence);
                        }
                    } else {
                        nodes[node].reached(heard, false);
                        // Each other one that answers says whether its last round went well.
                        let others = (0..3).filter(|other| *other != node);
                        let all = others.clone().all(|other| matches!(nodes[other].healed, Some(Healed::No)));
                        if all && links & 16 != 0 {
                            nodes[node].alone(asked);
                        }
                    }
                    let holders: Vec<usize> = (0..3).filter(|node| nodes[*node].holds(heard, "t")).collect();
                    prop_assert!(holders.len() <= 1, "{holders:?} at {second}");
                    if let [holder] = holders[..] {
                        let fence = nodes[holder].fence(heard, "t").unwrap_or_default();
                        prop_assert!(fence > fences || (fence == fences && last == Some(holder)), "{fence} {fences}");
                        (last, fences) = (Some(holder), fence);
                    }
                }
            }
        }
    }
}
