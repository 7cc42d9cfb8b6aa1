//! Why a call is not set up.

use std::time::Duration;

use crate::call::StartError;
use crate::sip::DialError;
use crate::synth::device::Refused;

/// When another try is worth while where the limit of calls is reached, or the gateway is going down.
const BUSY_RETRY: Duration = Duration::from_secs(5);

/// Why a call is not set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GatewayError {
    /// There is neither a configured nor a built-in agent of this name.
    #[error("no agent `{0}`")]
    NoAgent(String),
    /// The limit of calls is reached, or the gateway is draining.
    #[error(transparent)]
    Start(#[from] StartError),
    /// No device can speak on it in time.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// Calls cannot be placed: no SIP transport is configured.
    #[error("outbound calls need [sip] udp, tcp or tls in the configuration")]
    NoSip,
    /// The call was given up before anybody answered.
    #[error("the call was cancelled before anybody answered")]
    Cancelled,
    /// The tenant may not have this.
    #[error("{0}")]
    Forbidden(String),
    /// A limit of the tenant is reached.
    #[error("{what}")]
    TenantFull {
        /// Which.
        what: String,
        /// When another try is worth while.
        retry_after: Duration,
    },
    /// The call has a bridge, or one is being dialled.
    #[error("the call is bridged already, or somebody is being called for it: end that first")]
    Bridged,
    /// The peer was not reached, or refused.
    #[error(transparent)]
    Dial(#[from] DialError),
}

impl GatewayError {
    /// When another try is worth while, where waiting helps.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            GatewayError::Start(_) | GatewayError::Dial(DialError::Overloaded) => Some(BUSY_RETRY),
            GatewayError::Refused(refused) => Some(refused.retry_after),
            GatewayError::TenantFull { retry_after, .. } => Some(*retry_after),
            GatewayError::NoSip => Some(Duration::from_secs(60)),
            GatewayError::NoAgent(_)
            | GatewayError::Forbidden(_)
            | GatewayError::Cancelled
            | GatewayError::Bridged
            | GatewayError::Dial(_) => None,
        }
    }
}
