//! As much of STUN (RFC 8489) as it takes to say whose datagram this is.
//!
//! Reads borrowed bytes, allocates nothing, answers nothing.

/// A binding request, response or indication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// A connectivity check.
    Request,
    /// A keep-alive.
    Indication,
    /// The answer to a check, good or bad.
    Response,
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
            [0x01, 0x01] | [0x01, 0x11] => Class::Response,
            _ => return None,
        };
        let attributes = datagram.get(HEADER..)?;
        if usize::from(u16::from_be_bytes([l0, l1])) != attributes.len() || attributes.len() % 4 != 0 {
            return None;
        }
        let mut message = Self { class, transaction, username: None, integrity: None };
        let mut rest = attributes;
        while let Some((&[k0, k1, v0, v1], after)) = rest.split_first_chunk() {
            let length = usize::from(u16::from_be_bytes([v0, v1]));
            let value = after.get(..length)?;
            match u16::from_be_bytes([k0, k1]) {
                USERNAME if message.username.is_none() => message.username = Some(std::str::from_utf8(value).ok()?),
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

/// The transaction of a binding request that leaves, `None` for anything else.
pub(super) fn outgoing_request(datagram: &[u8]) -> Option<[u8; 12]> {
    match *datagram.first_chunk::<HEADER>()? {
        [0x00, 0x01, _, _, c0, c1, c2, c3, transaction @ ..] if [c0, c1, c2, c3] == MAGIC_COOKIE => Some(transaction),
        _ => None,
    }
}

const HEADER: usize = 20;
const MAGIC_COOKIE: [u8; 4] = [0x21, 0x12, 0xa4, 0x42];
const USERNAME: u16 = 0x0006;
const MESSAGE_INTEGRITY: u16 = 0x0008;
