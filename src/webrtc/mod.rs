//! Browser calls: sessions negotiated by offer and answer over one UDP port (and, if wanted, one TCP port).
//!
//! Owns sessions from offer to end, the shared port and ICE. Never sees audio: that is
//! [`crate::media::webrtc::WebRtcLeg`], which each session yields once.
//!
//! - [`Gateway`] answers offers, takes trickled candidates and restarts, and ends sessions
//! - [`WebRtcConfig`] is `[webrtc]`

mod config;
mod demux;
mod gateway;
mod negotiate;
mod offer;
mod path;
mod relay;
mod runtime;
mod socket;
mod stun;
mod tcp;
mod trickle;

use std::io;

use thiserror::Error;

pub use config::{IceServer, Login, WebRtcConfig};
pub use gateway::{Answered, Gateway, Patched, SessionId};

/// What can be wrong with a session.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WebRtcError {
    /// The configuration asks for what is not there.
    #[error("{0}")]
    Config(String),
    /// The port cannot be used.
    #[error("cannot use UDP port {port}: {source}")]
    Bind {
        /// The configured port.
        port: u16,
        /// Why.
        source: io::Error,
    },
    /// The offer cannot be answered; the message says what to change.
    #[error("{0}")]
    BadOffer(String),
    /// The trickled fragment cannot be read; the message says what to change.
    #[error("{0}")]
    BadFragment(String),
    /// There is no such session, or no longer.
    #[error("no such session")]
    NoSession,
    /// `If-Match` names another generation of the session's ICE credentials.
    #[error("the session's entity tag is {current}, not the one given in If-Match")]
    Stale {
        /// The tag it has now.
        current: String,
    },
    /// As many sessions as are allowed.
    #[error("all {0} sessions are in use")]
    Full(usize),
    /// The gateway ends.
    #[error("the gateway takes no more sessions")]
    Closing,
    /// The WebRTC stack failed at something an offer cannot cause.
    #[error("WebRTC: {0}")]
    Stack(#[from] ::webrtc::error::Error),
}

/// Reads `bytes` as a datagram, an offer and a fragment; for fuzzing.
pub fn fuzz(bytes: &[u8]) {
    if let Some(message) = stun::Message::parse(bytes) {
        let _ = message.protected();
    }
    let _ = stun::outgoing(bytes);
    let text = String::from_utf8_lossy(bytes);
    let _ = offer::Offer::read(&text);
    let _ = trickle::Fragment::read(&text);
}
