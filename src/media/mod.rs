//! Packets, codecs, pacing and legs.
//!
//! - [`leg`]: the seam to a session's transport
//! - [`playout`]: when each packet leaves, with which numbers, and so what was heard
//! - [`encode`], [`decode`], [`resample`]: sound to payload and back
//! - [`jitter`]: packets in order; [`red`]: packets that carry those before them
//! - `packets`: those that are longer or shorter than what is encoded at a time
//! - [`vad`], [`dtmf`]: what the caller does
//! - [`sip`], [`webrtc`], [`rtcp`]: the legs and their reports
//! - [`noise`]: what silence is filled with; [`suppress`]: noise behind a caller, taken out; [`gain`]: quiet callers, made louder
//! - [`relay`]: sound of one leg on its way to another; [`ringback`]: what is heard until it is there
//! - [`quality`]: how good a call can have sounded
//! - [`shard`]: the threads on which calls live
//! - [`bench`]: what encoding costs

pub mod answer;
#[cfg(feature = "bench")]
pub mod bench;
pub mod decode;
pub mod dtmf;
pub mod echo;
pub mod encode;
pub mod gain;
pub mod jitter;
pub mod leg;
pub mod noise;
pub(crate) mod packets;
pub mod playout;
pub mod quality;
pub mod red;
pub mod relay;
pub mod resample;
pub mod ringback;
pub mod rtcp;
pub mod shard;
pub mod sip;
pub mod suppress;
pub mod vad;
pub mod webrtc;
