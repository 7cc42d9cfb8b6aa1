//! What a leg counts: packets that it cannot use, and what reports say of its line.

use std::sync::Arc;

use metrics::{Counter, Histogram, SharedString, counter, histogram};

use crate::media::leg::Codec;

/// Packets that were dropped, by `reason`.
pub(super) struct Counters {
    pub(super) malformed: Counter,
    pub(super) stranger: Counter,
    pub(super) unexpected: Counter,
    pub(super) full: Counter,
    pub(super) line: Line,
}

/// What reports of both sides say, by `trunk` (empty: none) and `codec`.
pub(super) struct Line {
    pub(super) loss: Histogram,
    pub(super) jitter: Histogram,
    pub(super) local_jitter: Histogram,
    pub(super) round_trip: Histogram,
}

impl Counters {
    pub(super) fn new(trunk: Option<&Arc<str>>, codec: Codec) -> Counters {
        let discarded = |reason: &'static str| counter!("antiphon_rtp_discarded_total", "reason" => reason);
        Counters {
            malformed: discarded("malformed"),
            stranger: discarded("stranger"),
            unexpected: discarded("unexpected"),
            full: discarded("full"),
            line: Line::new(trunk, codec),
        }
    }
}

impl Line {
    pub(super) fn new(trunk: Option<&Arc<str>>, codec: Codec) -> Line {
        let trunk = || trunk.map_or(SharedString::const_str(""), |trunk| SharedString::from(trunk.clone()));
        let codec = codec.label();
        Line {
            loss: histogram!("antiphon_rtcp_loss_ratio", "trunk" => trunk(), "codec" => codec),
            jitter: histogram!("antiphon_rtcp_jitter_seconds", "trunk" => trunk(), "codec" => codec),
            local_jitter: histogram!("antiphon_rtcp_local_jitter_seconds", "trunk" => trunk(), "codec" => codec),
            round_trip: histogram!("antiphon_rtcp_round_trip_seconds", "trunk" => trunk(), "codec" => codec),
        }
    }
}
