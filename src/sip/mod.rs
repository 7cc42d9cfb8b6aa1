//! Telephone signalling: one SIP endpoint, its listeners, trunks, calls in and calls out.

mod auth;
mod body;
mod challenge;
pub mod config;
mod endpoint;
mod inbound;
mod limits;
mod listen;
mod outbound;
mod refer;
mod screen;
mod session;
mod tls;
mod trunk;

use thiserror::Error;

pub use self::{
    config::{CodecName, Network, RtpConfig, Secret, SipConfig, TlsConfig, TrunkConfig, User},
    endpoint::Endpoint,
    inbound::IncomingCall,
    outbound::DialRequest,
    trunk::TrunkStatus,
};

/// Why the endpoint could not do something.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SipError {
    /// A listener could not be opened.
    #[error("cannot listen for SIP on {address} ({transport}): {source}")]
    Listen {
        /// What was to be bound.
        address: std::net::SocketAddr,
        /// `udp`, `tcp` or `tls`.
        transport: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// The configuration cannot work.
    #[error("{0}")]
    Config(String),
    /// The caller gave up before the call was answered.
    #[error("the caller cancelled")]
    Cancelled,
    /// No RTP port is free.
    #[error("all RTP ports of [rtp] port_min..port_max are in use")]
    NoPort(#[source] std::io::Error),
    /// Offer and policy have no common codec (answered 488).
    #[error("{0}")]
    NotAcceptable(String),
    /// The endpoint was shut down.
    #[error("the SIP endpoint is shut down")]
    Closed,
    /// The stack below refused.
    #[error("{0}")]
    Stack(String),
}

/// Why an outbound call was not answered.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DialError {
    /// `to` is not a SIP address or telephone number, or a trunk is needed to reach it.
    #[error("{0}")]
    Address(String),
    /// No trunk has that name.
    #[error("no [[sip.trunk]] is named `{0}`")]
    UnknownTrunk(String),
    /// The called side declined.
    #[error("the call was declined: {status} {reason}")]
    Declined {
        /// SIP status code, 300 to 699.
        status: u16,
        /// Reason phrase.
        reason: String,
    },
    /// Nobody answered in `ring_timeout_s`.
    #[error("nobody answered")]
    NoAnswer,
    /// As many calls as `[sip] max_calls` are up.
    #[error("as many calls as [sip] max_calls allows are up")]
    Overloaded,
    /// The answer cannot be used.
    #[error("the answer cannot be used: {0}")]
    Answer(String),
    /// As for inbound calls.
    #[error(transparent)]
    Sip(#[from] SipError),
}
