//! x
use std::net::SocketAddr;

use tokio::sync::mpsc;

use super::{DialError, DialRequest, IncomingCall, RtpConfig, SipConfig, SipError};
use crate::media::sip::SipLeg;

/// The gateway's SIP side: listeners, registrations and the table of calls. Cheap to clone.
#[derive(Clone)]
pub struct Endpoint {}

/// Registration state of a trunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrunkStatus {
    /// Its name.
    pub name: String,
    /// `None` when it is not to register; else whether it is registered now.
    pub registered: Option<bool>,
    /// What went wrong last, while it is wrong.
    pub error: Option<String>,
}

impl Endpoint {
    /// Binds the listeners, starts registering, and sends each inbound call to `incoming`.
    ///
    /// Calls that find `incoming` full are answered 503.
    ///
    /// # Errors
    /// A listener cannot be opened or the configuration cannot work.
    pub async fn start(
        _config: SipConfig,
        _rtp: RtpConfig,
        _incoming: mpsc::Sender<IncomingCall>,
    ) -> Result<Endpoint, SipError> {
        Err(SipError::Closed)
    }

    /// Calls out and waits for the answer. Dropping the future cancels the call.
    ///
    /// # Errors
    /// See [`DialError`].
    pub async fn dial(&self, _request: DialRequest) -> Result<SipLeg, DialError> {
        Err(DialError::NoAnswer)
    }

    /// Where UDP is bound.
    pub fn local_udp(&self) -> Option<SocketAddr> {
        None
    }

    /// Where TCP is bound.
    pub fn local_tcp(&self) -> Option<SocketAddr> {
        None
    }

    /// Where TLS is bound.
    pub fn local_tls(&self) -> Option<SocketAddr> {
        None
    }

    /// Calls up or being set up.
    pub fn calls(&self) -> usize {
        0
    }

    /// State of each trunk, in the order of the configuration.
    pub fn trunks(&self) -> Vec<TrunkStatus> {
        Vec::new()
    }

    /// Answers new calls with 503 from now on; calls that are up go on.
    pub fn drain(&self) {}

    /// Ends every call with BYE, unregisters, closes the listeners.
    pub async fn shutdown(&self) {}
}
