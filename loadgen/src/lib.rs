//! Synthetic callers that listen: real SIP/RTP and WebRTC endpoints, and what can be said of what they heard.
//!
//! Modules, in reading order; each uses only those above it:
//!
//! - [`clock`]: time
//! - [`codec`], [`rtp`], [`dtmf`]: sound and packets on the wire
//! - [`heard`]: what arrived, and when
//! - [`listen`], [`mod@correlate`], [`wav`]: what that means to a listener
//! - [`synthetic`], [`speak`], [`call`]: what a caller says and does, on either kind of call
//! - [`relay`]: a bad network
//! - [`sip`], [`mod@rtc`]: a telephone and a browser
//! - [`agent`]: an agent server for a gateway that dials one
//! - [`http`], [`gateway`], [`process`]: the gateway as its HTTP interface and its process show it
//! - [`corpus`], [`judge`], [`stats`]: what is spoken, whether it was, and the figures of it

pub mod agent;
pub mod call;
pub mod clock;
pub mod codec;
pub mod corpus;
pub mod correlate;
pub mod dtmf;
pub mod gateway;
pub mod heard;
pub mod http;
pub mod judge;
pub mod listen;
pub mod process;
pub mod relay;
pub mod rtc;
pub mod rtp;
pub mod sip;
pub mod speak;
pub mod stats;
pub mod synthetic;
pub mod wav;
