//! Packets, codecs, pacing and legs.

pub mod leg;
pub mod sip;
