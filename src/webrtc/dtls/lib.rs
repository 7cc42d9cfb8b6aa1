//! Repeats of DTLS handshake messages (RFC 6347 section 4.2.4), kept from a stack that cannot bear them.
//!
//! `rtc-dtls` 0.21.1 stops its retransmission timer at every handshake record that arrives, and starts it again only when
//! that makes it send its next flight. A repeat does not. So when a flight of its own is lost, and the peer repeats the one
//! before it first (both sides wait a second from about the same time; browsers wait 50 ms), the stack never sends its own
//! again: the handshake hangs, and the peer's gives up after seven repeats, which the stack calls an "invalid state machine
//! transition". One datagram in a hundred lost cost one browser call in two hundred.
//!
//! [`Repeats`] stands between socket and stack: what the stack has already answered does not reach it again, so its own timer
//! runs on, and sends its flight again. Repeats that must be answered reach it: a ClientHello while the last word was
//! HelloVerifyRequest, for which there is no timer, and all that has something new, another epoch or another content type,
//! such as the last flight.

use std::collections::HashMap;

/// Content type of handshake records.
const HANDSHAKE: u8 = 22;
/// Message type of HelloVerifyRequest.
const HELLO_VERIFY_REQUEST: u8 = 3;
/// Headers of records and of messages, bytes (RFC 6347 sections 4.1 and 4.2.2).
const RECORD: usize = 13;
const MESSAGE: usize = 12;
/// Messages of a handshake, with room for fragments. What exceeds it is never taken for a repeat.
const MOST: usize = 256;

/// A message or a fragment of one: its type, its number, where the fragment begins.
type Part = (u8, u16, u32);

/// What has passed in both directions of one association.
#[derive(Clone, Debug, Default)]
pub struct Repeats {
    /// Parts that came, and how many handshake datagrams had been sent then.
    came: HashMap<Part, u64>,
    sent: u64,
    /// HelloVerifyRequest was sent last.
    verifying: bool,
}

impl Repeats {
    /// Whether `datagram` has to do with a handshake, so that the other methods have something to see in it.
    pub fn concerns(datagram: &[u8]) -> bool {
        datagram.first() == Some(&HANDSHAKE)
    }

    /// The stack sends `datagram`.
    pub fn sent(&mut self, datagram: &[u8]) {
        let (parts, _) = parts(datagram);
        if let Some((kind, ..)) = parts.first() {
            self.sent += 1;
            self.verifying = *kind == HELLO_VERIFY_REQUEST;
        }
    }

    /// Whether the stack has to be spared `datagram`, which came from the peer: all of it came before, and the stack has
    /// answered that.
    pub fn is_repeat(&mut self, datagram: &[u8]) -> bool {
        let (parts, whole) = parts(datagram);
        let mut repeat = whole && !self.verifying;
        for part in parts {
            match self.came.get(&part) {
                Some(before) => repeat &= *before < self.sent,
                None => {
                    repeat = false;
                    if self.came.len() < MOST {
                        self.came.insert(part, self.sent);
                    }
                }
            }
        }
        repeat
    }
}

/// The handshake messages of a datagram that are not encrypted, and whether there is nothing else in it.
fn parts(datagram: &[u8]) -> (Vec<Part>, bool) {
    let mut found = Vec::new();
    let mut rest = datagram;
    while !rest.is_empty() {
        let Some((header, after)) = rest.split_first_chunk::<RECORD>() else { return (found, false) };
        let [kind, _, _, e0, e1, .., l0, l1] = *header;
        let length = usize::from(u16::from_be_bytes([l0, l1]));
        let Some((mut content, next)) = after.split_at_checked(length) else { return (found, false) };
        if kind != HANDSHAKE || [e0, e1] != [0, 0] {
            return (found, false);
        }
        while let Some((header, after)) = content.split_first_chunk::<MESSAGE>() {
            let [kind, _, _, _, s0, s1, o0, o1, o2, f0, f1, f2] = *header;
            found.push((kind, u16::from_be_bytes([s0, s1]), u32::from_be_bytes([0, o0, o1, o2])));
            let fragment = u32::from_be_bytes([0, f0, f1, f2]) as usize;
            let Some(next) = after.get(fragment..) else { return (found, false) };
            content = next;
        }
        if !content.is_empty() {
            return (found, false);
        }
        rest = next;
    }
    let whole = !found.is_empty();
    (found, whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENT_HELLO: u8 = 1;
    const SERVER_HELLO: u8 = 2;
    const CERTIFICATE: u8 = 11;
    const CLIENT_KEY_EXCHANGE: u8 = 16;

    fn record(content_type: u8, epoch: u16, content: &[u8]) -> Vec<u8> {
        let mut record = vec![content_type, 0xfe, 0xfd];
        record.extend(epoch.to_be_bytes());
        record.extend([0; 6]);
        record.extend((content.len() as u16).to_be_bytes());
        record.extend(content);
        record
    }

    fn message(kind: u8, number: u16, offset: u32, fragment: u32) -> Vec<u8> {
        let mut message = vec![kind, 0, 4, 0];
        message.extend(number.to_be_bytes());
        message.extend(&offset.to_be_bytes()[1..]);
        message.extend(&fragment.to_be_bytes()[1..]);
        message.extend(vec![7; fragment as usize]);
        message
    }

    fn flight(messages: &[(u8, u16)]) -> Vec<u8> {
        messages.iter().flat_map(|(kind, number)| record(HANDSHAKE, 0, &message(*kind, *number, 0, 20))).collect()
    }

    #[test]
    fn a_flight_that_was_answered_is_not_let_in_again() {
        let mut client = Repeats::default();
        client.sent(&flight(&[(CLIENT_HELLO, 0)]));
        let server = flight(&[(SERVER_HELLO, 0), (CERTIFICATE, 1)]);
        assert!(!client.is_repeat(&server));
        assert!(!client.is_repeat(&server), "nobody has answered it: the stack may not have been there yet");
        client.sent(&flight(&[(CERTIFICATE, 1), (CLIENT_KEY_EXCHANGE, 2)]));
        assert!(client.is_repeat(&server));
        assert!(client.is_repeat(&flight(&[(CERTIFICATE, 1)])), "also a part of it");
        assert!(!client.is_repeat(&flight(&[(CERTIFICATE, 1), (14, 2)])), "it has something new");
    }

    #[test]
    fn a_hello_is_answered_as_often_as_it_comes_until_its_cookie_does() {
        let mut server = Repeats::default();
        let hello = flight(&[(CLIENT_HELLO, 0)]);
        assert!(!server.is_repeat(&hello));
        server.sent(&flight(&[(HELLO_VERIFY_REQUEST, 0)]));
        assert!(!server.is_repeat(&hello), "no timer sends HelloVerifyRequest again");
        let cookie = flight(&[(CLIENT_HELLO, 1)]);
        assert!(!server.is_repeat(&cookie));
        server.sent(&flight(&[(SERVER_HELLO, 1), (CERTIFICATE, 2)]));
        assert!(server.is_repeat(&cookie) && server.is_repeat(&hello));
    }

    #[test]
    fn what_is_encrypted_or_no_handshake_passes_and_so_does_garbage() {
        let mut repeats = Repeats::default();
        let last: Vec<u8> = [record(20, 0, &[1]), record(HANDSHAKE, 1, &[9; 40])].concat();
        let key = flight(&[(CLIENT_KEY_EXCHANGE, 2)]);
        let mixed = [key.clone(), last.clone()].concat();
        assert!(!repeats.is_repeat(&mixed));
        repeats.sent(&last);
        repeats.sent(&flight(&[(SERVER_HELLO, 0)]));
        for datagram in [&last, &mixed, &Vec::new(), &vec![HANDSHAKE; 20], &record(HANDSHAKE, 0, &[1, 2, 3])] {
            assert!(!repeats.is_repeat(datagram) && !repeats.is_repeat(datagram), "{datagram:?}");
        }
        assert!(repeats.is_repeat(&key), "its messages came before");
        assert!(Repeats::concerns(&key) && !Repeats::concerns(&[20]) && !Repeats::concerns(&[]));
    }

    #[test]
    fn fragments_are_told_apart_and_a_flood_of_them_is_bounded() {
        let mut repeats = Repeats::default();
        let fragment = |offset| record(HANDSHAKE, 0, &message(CERTIFICATE, 1, offset, 10));
        assert!(!repeats.is_repeat(&fragment(0)));
        repeats.sent(&flight(&[(CLIENT_HELLO, 0)]));
        assert!(repeats.is_repeat(&fragment(0)) && !repeats.is_repeat(&fragment(10)));
        for offset in 0..1_000 {
            repeats.is_repeat(&fragment(offset));
        }
        assert_eq!(repeats.came.len(), MOST);
    }
}
