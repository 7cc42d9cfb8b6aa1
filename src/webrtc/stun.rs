//! As much of STUN (RFC 8489) as it takes to say whose datagram this is, and to ask a stranger whether it is a peer.
//!
//! Reads borrowed bytes and answers nothing.

use ::webrtc::peer_connection::crypto::RTCCryptoProvider;
use rtc::ice::attributes::control::AttrControlled;
use rtc::ice::attributes::priority::PriorityAttr;
use rtc::stun::attributes::ATTR_USERNAME;
use rtc::stun::fingerprint::FINGERPRINT as SUM;
use rtc::stun::integrity::MessageIntegrity;
use rtc::stun::message::{BINDING_REQUEST, Message as Outgoing, TransactionId};
use rtc::stun::textattrs::Username;

use super::path::Kind;

/// A binding request, response or indication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// A connectivity check.
    Request,
    /// A keep-alive.
    Indication,
    /// The answer to a check that accepts it.
    Success,
    /// The answer to a check that does not.
    Failure,
}

/// A STUN message whose lengths are consistent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Message<'a> {
    /// What kind of binding message it is.
    pub(super) class: Class,
    /// RFC 8489 section 5.
    pub(super) transaction: [u8; 12],
    /// The USERNAME attribute: `local fragment:remote fragment` as its sender sees... the receiver first.
    pub(super) username: Option<&'a str>,
    /// Whether its sender uses the pair (USE-CANDIDATE, RFC 8445 section 7.1.1.2).
    pub(super) nominates: bool,
    integrity: Option<Integrity<'a>>,
}

#[derive(Clone, Copy, Debug)]
struct Integrity<'a> {
    header: [u8; HEADER],
    body: &'a [u8],
    tag: &'a [u8; 20],
}

impl<'a> Message<'a> {
    /// Reads a binding message; `None` if it is not one, or its lengths contradict each other.
    pub(super) fn parse(datagram: &'a [u8]) -> Option<Self> {
        let header: &[u8; HEADER] = datagram.first_chunk()?;
        let [t0, t1, l0, l1, c0, c1, c2, c3, transaction @ ..] = *header;
        if [c0, c1, c2, c3] != MAGIC_COOKIE {
            return None;
        }
        let class = match [t0, t1] {
            [0x00, 0x01] => Class::Request,
            [0x00, 0x11] => Class::Indication,
            [0x01, 0x01] => Class::Success,
            [0x01, 0x11] => Class::Failure,
            _ => return None,
        };
        let attributes = datagram.get(HEADER..)?;
        if usize::from(u16::from_be_bytes([l0, l1])) != attributes.len() || attributes.len() % 4 != 0 {
            return None;
        }
        let mut message = Self { class, transaction, username: None, nominates: false, integrity: None };
        let mut rest = attributes;
        while let Some((&[k0, k1, v0, v1], after)) = rest.split_first_chunk() {
            let length = usize::from(u16::from_be_bytes([v0, v1]));
            let value = after.get(..length)?;
            match u16::from_be_bytes([k0, k1]) {
                USERNAME if message.username.is_none() => message.username = Some(std::str::from_utf8(value).ok()?),
                USE_CANDIDATE => message.nominates = true,
                MESSAGE_INTEGRITY => {
                    // What follows is not protected, but for the checksum.
                    let offset = attributes.len() - rest.len();
                    message.integrity = Some(integrity(header, attributes.get(..offset)?, value.try_into().ok()?)?);
                    break;
                }
                _ => {}
            }
            rest = after.get(length.next_multiple_of(4)..)?;
        }
        Some(message)
    }

    /// What MESSAGE-INTEGRITY covers, in two pieces, and its tag: HMAC-SHA1 keyed by the password
    /// (RFC 8489 section 14.5). `None` without that attribute.
    pub(super) fn protected(&self) -> Option<([&[u8]; 2], &'a [u8; 20])> {
        self.integrity.as_ref().map(|integrity| ([&integrity.header[..], integrity.body], integrity.tag))
    }
}

/// The tag is computed as if the message ended right behind it.
fn integrity<'a>(header: &[u8; HEADER], body: &'a [u8], tag: &'a [u8; 20]) -> Option<Integrity<'a>> {
    let length = u16::try_from(body.len() + 24).ok()?.to_be_bytes();
    let mut header = *header;
    header[2..4].copy_from_slice(&length);
    Some(Integrity { header, body, tag })
}

/// What a datagram of the agent is.
pub(super) fn outgoing(datagram: &[u8]) -> Kind {
    let Some(header) = datagram.first_chunk::<HEADER>() else { return Kind::Media };
    match *header {
        [0x00, 0x01, _, _, c0, c1, c2, c3, transaction @ ..] if [c0, c1, c2, c3] == MAGIC_COOKIE => {
            Kind::Check { nominates: false, transaction }
        }
        [0x01, _, _, _, c0, c1, c2, c3, transaction @ ..] if [c0, c1, c2, c3] == MAGIC_COOKIE => {
            Kind::Answer(transaction)
        }
        _ => Kind::Media,
    }
}

/// A connectivity check of our own, as the controlled side, to who is known by `username` (its fragment, `:`, ours) and
/// `password`; `None` when it cannot be made.
pub(super) fn check(
    crypto: &dyn RTCCryptoProvider,
    transaction: [u8; 12],
    username: String,
    password: String,
) -> Option<Vec<u8>> {
    let mut message = Outgoing::new();
    let integrity = MessageIntegrity::new_short_term_integrity_with_provider(password, crypto.crypto());
    message
        .build(&[
            Box::new(BINDING_REQUEST),
            Box::new(TransactionId(transaction)),
            Box::new(Username::new(ATTR_USERNAME, username)),
            Box::new(AttrControlled(rand::random())),
            Box::new(PriorityAttr(PEER_REFLEXIVE)),
            Box::new(integrity),
            Box::new(SUM),
        ])
        .ok()?;
    Some(message.raw)
}

const HEADER: usize = 20;
const MAGIC_COOKIE: [u8; 4] = [0x21, 0x12, 0xa4, 0x42];
const USERNAME: u16 = 0x0006;
const USE_CANDIDATE: u16 = 0x0025;
const MESSAGE_INTEGRITY: u16 = 0x0008;
/// The priority of a candidate that would be learned from the check (RFC 8445 section 7.1.1): type preference 110.
const PEER_REFLEXIVE: u32 = (110 << 24) + (65_535 << 8) + 255;
