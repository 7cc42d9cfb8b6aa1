//! x
use std::{collections::BTreeMap, net::SocketAddr};

use super::SipError;
use crate::media::{leg::Codec, sip::SipLeg};

/// A call that rings here. Dropping it unanswered declines it with 480.
pub struct IncomingCall {
    /// URI of the caller (From), without display name.
    pub from: String,
    /// URI that was called (To).
    pub to: String,
    /// User part of the request URI: names the agent.
    pub user: String,
    /// Call-ID.
    pub call_id: String,
    /// Where the INVITE came from.
    pub source: SocketAddr,
    /// Digest user, when `[sip] users` is set.
    pub account: Option<String>,
    /// Headers that the stack does not use itself (`X-...`, `User-Agent`, `Diversion`), by name as written.
    pub headers: BTreeMap<String, String>,
    /// Codecs offered, the caller's favourite first; empty for an INVITE without an offer.
    pub offered: Vec<Codec>,
}

impl IncomingCall {
    /// Sends 180.
    pub fn ringing(&self) {}

    /// Answers with 200. The leg says `Connected` when the ACK is here.
    ///
    /// # Errors
    /// The caller cancelled, no port is free, or nothing common was offered (answered 488).
    pub async fn accept(self) -> Result<SipLeg, SipError> {
        Err(SipError::Closed)
    }

    /// Declines with a status of 300 to 699; others count as 480.
    pub fn reject(self, _status: u16, _reason: &str) {}

    /// Returns when the caller gives up. Cancel safe.
    pub async fn cancelled(&self) {}
}
