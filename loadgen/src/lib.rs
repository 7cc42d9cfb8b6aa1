//! Synthetic callers that listen: real SIP/RTP and WebRTC endpoints, and what can be said of what they heard.
//!
//! Modules, in reading order; each uses only those above it:
//!
//! - [`clock`] — time
//! - [`codec`], [`rtp`], [`dtmf`] — sound and packets on the wire
//! - [`heard`] — what arrived, and when
//! - [`listen`], [`mod@correlate`], [`wav`] — what that means to a listener
//! - [`synthetic`], [`speak`], [`call`] — what a caller says and does, on either kind of call
//! - [`relay`] — a bad network
//! - [`sip`], [`mod@rtc`] — a telephone and a browser
//! - [`agent`] — an agent server for a gateway that dials one
//! - [`http`], [`gateway`], [`process`] — the gateway as its HTTP interface and its process show it
//! - [`corpus`], [`judge`], [`stats`] — what is spoken, whether it was, and the figures of it
//! - [`dispatch`], [`exchange`] — one call of a test, with its turns
//! - [`report`], [`snapshot`], [`load`], [`ladder`] — many of them, and how far a gateway goes
//! - [`prepare`], [`scenario`] — from words to a test
//! - [`erlang`], [`predict`], [`size`], [`chart`], [`html`] — what follows from the figures, and how it is shown

pub mod agent;
pub mod call;
pub mod chart;
pub mod clock;
pub mod codec;
pub mod corpus;
pub mod correlate;
pub mod dispatch;
pub mod dtmf;
pub mod erlang;
pub mod exchange;
pub mod gateway;
pub mod heard;
pub mod html;
pub mod http;
pub mod judge;
pub mod ladder;
pub mod listen;
pub mod load;
pub mod predict;
pub mod prepare;
pub mod process;
pub mod relay;
pub mod report;
pub mod rtc;
pub mod rtp;
pub mod scenario;
pub mod sip;
pub mod size;
pub mod snapshot;
pub mod speak;
pub mod stats;
pub mod synthetic;
pub mod wav;
