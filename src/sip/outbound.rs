//! x
use std::{collections::BTreeMap, time::Duration};

/// An outbound call.
#[derive(Clone, Debug, Default)]
pub struct DialRequest {
    /// `sip:user@host`, or a number or user for `trunk`.
    pub to: String,
    /// Our side, likewise; default: the trunk's user, or `antiphon`.
    pub from: Option<String>,
    /// `[[sip.trunk]]` to use; default: none for a full URI, the first one for a number.
    pub trunk: Option<String>,
    /// Further headers of the INVITE. Those that SIP itself needs are refused.
    pub headers: BTreeMap<String, String>,
    /// How long it may ring; default `[sip] ring_timeout_s`.
    pub timeout: Option<Duration>,
}
