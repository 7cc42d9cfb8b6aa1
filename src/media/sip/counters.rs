//! What becomes of packets that a leg cannot use.

use metrics::{Counter, counter};

/// Packets that were dropped, by `reason`.
pub(super) struct Counters {
    pub(super) malformed: Counter,
    pub(super) stranger: Counter,
    pub(super) unexpected: Counter,
    pub(super) full: Counter,
}

impl Counters {
    pub(super) fn new() -> Counters {
        let discarded = |reason: &'static str| counter!("antiphon_rtp_discarded_total", "reason" => reason);
        Counters {
            malformed: discarded("malformed"),
            stranger: discarded("stranger"),
            unexpected: discarded("unexpected"),
            full: discarded("full"),
        }
    }
}
