//! Which datagrams belong to the gateway whose place this one took ([`crate::handover`]): those of its Call-IDs.
//!
//! Reads the Call-ID and nothing else: whether the message is sound is for the process to judge that has the call.

use std::net::SocketAddr;

use crate::handover::{Kind, Place};

/// Passes a datagram on to the gateway before this one; `false`: it is none of that one's.
pub(super) fn passes(place: &Place, from: SocketAddr, datagram: &[u8]) -> bool {
    place.follows() && call_id(datagram).is_some_and(|id| place.is_theirs(id)) && place.pass(Kind::Sip, from, datagram)
}

/// The Call-ID of a message (RFC 3261 section 20.8, in its short form `i`), whatever else it holds.
fn call_id(datagram: &[u8]) -> Option<&str> {
    for line in datagram.split(|byte| *byte == b'\n').skip(1) {
        let line = line.trim_ascii();
        if line.is_empty() {
            return None;
        }
        let Some(colon) = line.iter().position(|byte| *byte == b':') else { continue };
        let (name, value) = line.split_at(colon);
        let name = name.trim_ascii();
        if name.eq_ignore_ascii_case(b"call-id") || name.eq_ignore_ascii_case(b"i") {
            return std::str::from_utf8(value.get(1..)?.trim_ascii()).ok();
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::*;
    use crate::handover::{Datagram, Word};

    fn message(name: &str, id: &str) -> Vec<u8> {
        format!("BYE sip:x@y SIP/2.0\r\nVia: SIP/2.0/UDP h\r\n{name}: {id} \r\nCSeq: 1 BYE\r\n\r\nCall-ID: body\r\n")
            .into_bytes()
    }

    #[test]
    fn a_call_id_is_found_in_both_forms_and_not_in_a_body() {
        for name in ["Call-ID", "CALL-ID", "i", "I "] {
            assert_eq!(call_id(&message(name, "a@b")), Some("a@b"), "{name}");
        }
        assert_eq!(call_id(&message("To", "x")), None);
        assert_eq!(call_id(b""), None);
        assert_eq!(call_id(b"\r\n\r\n"), None);
    }

    #[test]
    fn what_belongs_to_the_gateway_before_goes_to_it_as_it_came() {
        let (place, from) = (Place::default(), SocketAddr::from(([192, 0, 2, 7], 5060)));
        assert!(!passes(&place, from, &message("i", "up")), "alone it keeps everything");
        let _ = rustls::crypto::ring::default_provider().install_default();
        let (outlet, mut words) = mpsc::channel(4);
        place.follow(vec!["up".into()], outlet, reqwest::Client::new());
        assert!(!passes(&place, from, &message("i", "next")));
        assert!(passes(&place, from, &message("i", "up")));
        let passed = Word::Passed(Kind::Sip, Datagram { from, bytes: message("i", "up").into() });
        assert_eq!(words.try_recv(), Ok(passed));
    }
}
