//! Packets, codecs, pacing and legs.

pub mod leg;
pub mod rtcp;
pub mod sip;
