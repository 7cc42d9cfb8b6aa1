//! Connectivity checks, answered (RFC 8445): we are a lite agent, whose peers find the path and choose it.

use std::net::SocketAddr;

use rtc::{
    crypto::RTCCryptoProvider,
    stun::{
        attributes::{ATTR_USE_CANDIDATE, ATTR_USERNAME},
        fingerprint::FINGERPRINT,
        integrity::MessageIntegrity,
        message::{BINDING_REQUEST, BINDING_SUCCESS, Message, TransactionId},
        xoraddr::XorMappedAddress,
    },
};
use sdp::Ice;

/// A check of the peer.
pub(super) struct Check {
    /// What it is answered with, to where it came from.
    pub(super) answer: Vec<u8>,
    /// Whether the peer chooses this path.
    pub(super) nominates: bool,
}

/// Reads a datagram as a check that is signed with our password; `None`: it is none.
pub(super) fn check(crypto: &dyn RTCCryptoProvider, ice: &Ice, datagram: &[u8], from: SocketAddr) -> Option<Check> {
    let mut message = Message::new();
    message.raw = datagram.to_vec();
    message.decode().ok()?;
    if message.typ != BINDING_REQUEST {
        return None;
    }
    let username = message.get(ATTR_USERNAME).ok()?;
    let (own, theirs) = std::str::from_utf8(&username).ok()?.split_once(':')?;
    if own != ice.fragment || theirs != ice.remote_fragment {
        return None;
    }
    MessageIntegrity::check(&mut message, ice.password.as_bytes(), crypto.crypto()).ok()?;
    let integrity = MessageIntegrity::new_short_term_integrity_with_provider(ice.password.clone(), crypto.crypto());
    let mut answer = Message::new();
    answer
        .build(&[
            Box::new(BINDING_SUCCESS),
            Box::new(TransactionId(message.transaction_id.0)),
            Box::new(XorMappedAddress { ip: from.ip().to_canonical(), port: from.port() }),
            Box::new(integrity),
            Box::new(FINGERPRINT),
        ])
        .ok()?;
    Some(Check { answer: answer.raw, nominates: message.contains(ATTR_USE_CANDIDATE) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rtc::{crypto::default_provider, ice::attributes::use_candidate::UseCandidateAttr, stun::textattrs::Username};

    #[test]
    fn checks_with_our_password_are_answered_and_others_are_not() {
        let provider = default_provider().expect("there");
        let ice =
            Ice { fragment: "here".into(), password: "a-password-of-22-chars".into(), remote_fragment: "them".into() };
        let from: SocketAddr = "192.0.2.7:4000".parse().expect("an address");
        let request = |username: &str, password: &str, nominates: bool| {
            let integrity =
                MessageIntegrity::new_short_term_integrity_with_provider(password.to_owned(), provider.crypto());
            let mut setters: Vec<Box<dyn rtc::stun::message::Setter>> = vec![
                Box::new(BINDING_REQUEST),
                Box::new(TransactionId([7; 12])),
                Box::new(Username::new(ATTR_USERNAME, username.to_owned())),
            ];
            if nominates {
                setters.push(Box::new(UseCandidateAttr::new()));
            }
            setters.push(Box::new(integrity));
            let mut message = Message::new();
            message.build(&setters).expect("builds");
            message.raw
        };
        for nominates in [false, true] {
            let good = request("here:them", &ice.password, nominates);
            let check = check(&*provider, &ice, &good, from).expect("a check");
            assert_eq!(check.nominates, nominates);
            let mut answer = Message::new();
            answer.raw = check.answer;
            answer.decode().expect("reads");
            assert_eq!((answer.typ, answer.transaction_id.0), (BINDING_SUCCESS, [7; 12]));
            let mut mapped = XorMappedAddress::default();
            rtc::stun::message::Getter::get_from(&mut mapped, &answer).expect("there");
            assert_eq!(SocketAddr::new(mapped.ip, mapped.port), from);
            MessageIntegrity::check(&mut answer, ice.password.as_bytes(), provider.crypto()).expect("signed");
            for length in 0..good.len() {
                assert!(super::check(&*provider, &ice, &good[..length], from).is_none(), "{length}");
            }
        }
        for (username, password) in [
            ("here:them", "another"),
            ("there:them", &ice.password),
            ("here:other", &ice.password),
            ("here", &ice.password),
        ] {
            assert!(check(&*provider, &ice, &request(username, password, true), from).is_none(), "{username}");
        }
    }
}
