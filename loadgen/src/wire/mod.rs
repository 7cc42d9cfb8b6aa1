//! Sound and packets on the wire, and the client for HTTP.

pub(crate) mod arrival;
pub mod codec;
pub mod dtmf;
pub mod http;
pub mod rtp;
