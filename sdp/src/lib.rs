//! Session descriptions for telephone calls: bounded parsing, typed attributes, offer/answer, printing.
//!
//! Built on `sdp-types`, which knows the lines; this crate knows what they mean for one audio stream:
//!
//! - [`Description`], [`Media`]: a description with the attributes that matter typed ([`parse`])
//! - [`RtpMap`], [`Fmtp`], [`Direction`], [`Crypto`]: those attributes
//! - [`Dtls`], [`Fingerprint`]: keys that come of a handshake, and ICE
//! - [`Negotiator`]: RFC 3264 for one call, as offerer and as answerer, over re-INVITEs
//!
//! Nothing here does I/O, reads a clock or draws random numbers, and no input makes it panic.
//!
//! # Why
//! *Liberal in what is read*: a line that is not needed is kept or ignored, never a reason to refuse a
//! call. A line that is needed and broken is an error that names it.
//!
//! *One codec in an answer*: peers that are answered with several may switch between them at any packet.
//! Answering with one keeps the decoder and the meter of the call simple, and every peer handles it.

mod attr;
mod dtls;
mod error;
mod negotiate;
mod parse;
mod print;
mod session;

pub use self::{
    attr::{Codec, Crypto, Direction, Fmtp, Key, RtcpPort, RtpMap, Suite},
    dtls::{Dtls, Fingerprint, Ice, LocalDtls},
    error::{NegotiateError, ParseError},
    negotiate::{
        Agreed, LocalMedia, Negotiator, OpusParams, Policy, SrtpKeys, SrtpPolicy, TelephoneEvent, packet_time,
    },
    parse::parse,
    session::{Attribute, Description, Media, Origin},
};
