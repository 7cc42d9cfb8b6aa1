//! Synthetic callers that listen: real SIP/RTP and WebRTC endpoints, and what can be said of what they heard.
//!
//! Modules, in reading order; each uses only those above it:
//!
//! - [`clock`]: time
//! - [`codec`], [`rtp`], [`dtmf`]: sound and packets on the wire
//! - [`heard`]: what arrived, and when
//! - [`listen`], [`mod@correlate`], [`wav`]: what that means to a listener
//! - [`synthetic`], [`speak`], [`call`]: what a caller says and does, on either kind of call
//! - [`sip`], [`mod@rtc`]: a telephone and a browser
//! - [`agent`]: an agent server for a gateway that dials one

pub mod agent;
pub mod call;
pub mod clock;
pub mod codec;
pub mod correlate;
pub mod dtmf;
pub mod heard;
pub mod http;
pub mod listen;
pub mod rtc;
pub mod rtp;
pub mod sip;
pub mod speak;
pub mod synthetic;
pub mod wav;
