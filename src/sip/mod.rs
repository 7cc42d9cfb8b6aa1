//! Telephone signalling: one SIP endpoint, its listeners, trunks, calls in and calls out.
//!
//! Built on `rsipstack` for transactions, dialogs and digest. What is ours, top down:
//!
//! - [`Endpoint`]: listeners, limits, and where each request goes; `shared`: what every task of it sees
//! - [`IncomingCall`], [`DialRequest`]: a call until it is answered; then it is a
//!   [`SipLeg`](crate::media::sip::SipLeg)
//! - `ringing`: a call in until its answer; `early`: what is said, asked and settled before the answer; `calling`: the way to a call out that rings; `requests`: what
//!   becomes of a request
//! - `session`: the signalling of an answered call; `machine` decides (hold, refresh, transfer), the task does
//! - `trunk`: registrations and health; `flow`: the connections that calls of a trunk come by; `targets`: the hosts of a trunk; `routes`, `resolve`: their addresses; `number`: how it writes numbers;
//!   `headers`: those of a call out; `identity`: who a caller is said to be; `auth`, `challenge`: digest as server and as client
//! - `dialplan`, `quota`: who may be called, and how much
//! - `listen`, `websocket`, `stun`, `screen`, `tidy`, `parked`, `inspect`: sockets, and what stands between them and the stack
//! - `bridge`: what belongs to the gateway whose place this one took
//! - `door`, `stateless`: how fast a source may talk, and answers that keep nothing
//! - `places`: how many calls, half-open ones, and who is turned away; `names`: what peers may have us send to
//! - `cause`, `refused`: why calls end, and those that never were; `explain`: how a call would go, without placing it; `reliable`: provisional responses that are acknowledged; `body`, `refer`, `reload`,
//!   `referred`, `replaces`, `up`, `timer`, `tls`: what the names say
//!
//! Never touches media: the session task and the leg meet in two channels.
//!
//! # What it does
//! UDP, TCP, TLS and WebSocket (RFC 7118). Media is RTP, or SRTP with keys in the description (SDES) or of a handshake (DTLS),
//! to an address of the description or one that the peer's ICE finds: telephones and the SIP libraries of browsers both. INVITE both ways with early and late offers, CANCEL, re-INVITE and UPDATE, OPTIONS,
//! INFO with digits, REFER out (blind, or attended with Replaces), and in, where the configuration allows it; INVITE with Replaces,
//! of calls that are answered and of ours that ring. Requests of either side while it rings (RFC 3311). Session timers
//! in either role (RFC 4028), asked for and followed. Trunks of several hosts, with failover and health. Refusals: 400
//! with a reason, 401 and 403, 405, 415, 416, 420, 422, 481, 482, 488 with a reason, 491, 500 and 503 with `Retry-After`,
//! 501, 505. Sound that the called side sends before it answers is heard; provisional responses are reliable both ways
//! (RFC 3262). Not done: registration of others.
//!
//! # Why
//! *A task a call.* All signalling state of a call has one owner, which outlives neither the dialog nor the
//! leg; `max_calls` is a permit that this task holds, so nothing that ends can leave a call counted.
//!
//! *Sockets of our own.* See `listen` and `screen` for what the stack (0.7.14) does with bad input. Its
//! dialogs have gaps too, closed in `requests`: some requests are never answered (an old CSeq, anything but
//! BYE before the ACK), a re-INVITE before the ACK would wait for ever, and the target of a dialog stays the first one.
//!
//! *The stack logs whole messages at `info`*, credentials included: run it with `rsipstack=warn`.

mod auth;
mod body;
mod bridge;
mod bye;
mod calling;
mod cause;
mod challenge;
pub mod config;
mod dialplan;
mod door;
mod early;
mod endpoint;
mod explain;
mod flow;
mod fuzz;
mod headers;
mod identity;
mod inbound;
mod incoming;
mod inspect;
mod listen;
mod machine;
mod names;
mod neighbours;
mod number;
mod outbound;
mod parked;
mod places;
pub mod quota;
mod refer;
mod referred;
mod refused;
mod reliable;
mod reload;
mod replaces;
mod requests;
mod resolve;
mod ringing;
mod routes;
mod screen;
mod session;
mod shared;
mod stateless;
mod stun;
mod targets;
mod tidy;
mod timer;
mod tls;
mod trunk;
mod up;
mod websocket;

use thiserror::Error;

use crate::media::leg::PeerCause;

pub use self::{
    config::{
        CodecName, DigestName, EarlyMedia, Format, Network, Numbers, Outbound, PublicIp, RtpConfig, Rule, Secret,
        SipConfig, TargetConfig, TlsConfig, TrunkConfig, User,
    },
    dialplan::DialRequest,
    early::Provisional,
    endpoint::Endpoint,
    explain::{Explanation, addresses, explain, probe, ways},
    fuzz::fuzz,
    incoming::IncomingCall,
    neighbours::{Addresses, Admission, Beside, Neighbours},
    places::HalfOpen,
    refused::RefusedCall,
    resolve::{NameSource, Naptr},
    shared::TrunkStatus,
    targets::TargetStatus,
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
        /// `udp`, `tcp`, `tls`, `ws` or `wss`.
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
    /// The configuration does not allow this call; the text names the key.
    #[error("this call is not allowed: {0}")]
    Denied(String),
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
        /// What it says beside that.
        cause: Option<PeerCause>,
    },
    /// The called side did not answer in `ring_timeout_s`.
    #[error("the called side did not answer")]
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
