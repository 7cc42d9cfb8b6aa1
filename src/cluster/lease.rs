//! Which trunks this node registers at: leases in Redis, each with a number that grows with every change of hands. No
//! I/O; time is an argument.
//!
//! # Why
//! A registrar sends calls to every contact that it has. Two nodes that register the same account would both ring. So one
//! of them does, as long as it holds the lease; the others wait for its end. A node that cannot ask Redis goes on with what
//! it held: where Redis is gone for all nobody else would, and the trunk would fall silent. Where only this node is cut off,
//! the registrar has two contacts until Redis answers it again, which is what registrars are made for: both ring, and who
//! answers first has the call.

use std::collections::BTreeMap;
use std::time::Duration;

/// How long a lease lasts unless it is renewed.
pub(super) const LEASE: Duration = Duration::from_secs(10);

/// The leases of this node.
#[derive(Debug, Default)]
pub(super) struct Leases(BTreeMap<String, Held>);

#[derive(Clone, Copy, Debug, PartialEq)]
struct Held {
    /// The number of this holding; later holders have greater ones.
    fence: i64,
}

impl Leases {
    /// Redis gave the lease of `trunk`, or said again that it is this node's; `None`: it is another's. Gives whether
    /// that is new.
    pub(super) fn answered(&mut self, trunk: &str, fence: Option<i64>) -> bool {
        let before = self.0.get(trunk).copied();
        match fence {
            // An answer that was overtaken by a later one.
            Some(fence) if before.is_some_and(|held| held.fence > fence) => false,
            Some(fence) => {
                self.0.insert(trunk.to_owned(), Held { fence });
                before != Some(Held { fence })
            }
            None => self.0.remove(trunk).is_some(),
        }
    }

    /// Whether this node is the one that registers at `trunk`.
    pub(super) fn holds(&self, trunk: &str) -> bool {
        self.0.contains_key(trunk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_is_who_redis_says_and_a_late_answer_changes_nothing() {
        let mut leases = Leases::default();
        assert!(!leases.holds("a") && !leases.answered("a", None));
        assert!(leases.answered("a", Some(3)) && leases.holds("a") && !leases.holds("b"));
        assert!(!leases.answered("a", Some(3)), "renewed");
        assert!(leases.answered("a", Some(5)), "lost and won again");
        leases.answered("a", Some(4));
        assert_eq!(leases.0["a"].fence, 5);
        assert!(leases.answered("a", None) && !leases.holds("a"));
    }
}
