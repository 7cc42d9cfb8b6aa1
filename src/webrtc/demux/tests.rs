use ::webrtc::peer_connection::crypto::default_provider;

use super::*;

const PASSWORD: &str = "0123456789012345678901";
const PEER: (&str, &str) = ("peer", "the peer's own password");

/// Where a datagram goes.
fn to<'a>(
    demux: &'a mut Demux<&'static str>,
    source: SocketAddr,
    datagram: &[u8],
) -> Result<(Key, &'a &'static str), Dropped> {
    demux.route(source, datagram).map(|(key, sink, _)| (key, sink))
}

fn demux() -> Demux<&'static str> {
    let mut demux = Demux::new(default_provider().expect("the ring provider"));
    for (key, sink, fragment) in [(Key(1), "one", "aaaa"), (Key(2), "two", "bbbb")] {
        demux.insert(key, sink);
        demux.credentials(key, fragment, PASSWORD, PEER);
    }
    demux
}

fn address(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

/// A binding message with USERNAME, and MESSAGE-INTEGRITY keyed by `password`, and FINGERPRINT behind it.
fn check(kind: [u8; 2], username: &str, password: &str) -> Vec<u8> {
    let mut body = Vec::new();
    let attribute = |body: &mut Vec<u8>, kind: u16, value: &[u8]| {
        body.extend(kind.to_be_bytes());
        body.extend((value.len() as u16).to_be_bytes());
        body.extend(value);
        body.resize(body.len().next_multiple_of(4), 0);
    };
    attribute(&mut body, 0x0006, username.as_bytes());
    let header = |length: usize| {
        let mut header = kind.to_vec();
        header.extend((length as u16).to_be_bytes());
        header.extend([0x21, 0x12, 0xa4, 0x42]);
        header.extend([9; 12]);
        header
    };
    let crypto = default_provider().expect("the ring provider");
    let mut mac = crypto.crypto().new_hmac(HmacAlgorithm::Sha1, password.as_bytes()).expect("HMAC-SHA1");
    let mut tag = [0; 20];
    mac.sign(&[&header(body.len() + 24), &body], &mut tag).expect("a tag");
    attribute(&mut body, 0x0008, &tag);
    attribute(&mut body, 0x8028, &[1, 2, 3, 4]);
    let mut message = header(body.len());
    message.extend(body);
    message
}

const REQUEST: [u8; 2] = [0, 1];
const RESPONSE: [u8; 2] = [1, 1];
const DTLS: [u8; 3] = [22, 254, 253];
const RTP: [u8; 3] = [128, 111, 0];

#[test]
fn a_proved_address_carries_everything() {
    let mut demux = demux();
    assert_eq!(to(&mut demux, address(5), &DTLS).err(), Some(Dropped::Stranger));
    assert_eq!(to(&mut demux, address(5), &check(REQUEST, "aaaa:peer", PASSWORD)), Ok((Key(1), &"one")));
    assert_eq!(to(&mut demux, address(5), &DTLS), Ok((Key(1), &"one")));
    assert_eq!(to(&mut demux, address(5), &RTP), Ok((Key(1), &"one")));
    assert_eq!(to(&mut demux, address(6), &RTP).err(), Some(Dropped::Stranger));
    demux.remove(Key(1));
    assert_eq!(to(&mut demux, address(5), &RTP).err(), Some(Dropped::Stranger));
    assert_eq!(to(&mut demux, address(5), &check(REQUEST, "aaaa:peer", PASSWORD)).err(), Some(Dropped::NoSession));
}

#[test]
fn an_address_is_bound_only_by_who_knows_the_password() {
    let mut demux = demux();
    assert!(to(&mut demux, address(5), &check(REQUEST, "aaaa:peer", PASSWORD)).is_ok());
    let forged = check(REQUEST, "bbbb:peer", "another password ......");
    assert_eq!(to(&mut demux, address(5), &forged).err(), Some(Dropped::Integrity));
    assert_eq!(to(&mut demux, address(6), &forged).err(), Some(Dropped::Integrity));
    assert_eq!(to(&mut demux, address(5), &RTP), Ok((Key(1), &"one")), "the live call kept its address");
    let mut unsigned = check(REQUEST, "bbbb:peer", PASSWORD);
    unsigned.truncate(20 + 16);
    unsigned[2..4].copy_from_slice(&16_u16.to_be_bytes());
    assert_eq!(to(&mut demux, address(6), &unsigned).err(), Some(Dropped::Malformed));
    assert!(to(&mut demux, address(5), &check(REQUEST, "bbbb:peer", PASSWORD)).is_ok(), "ports are used again");
    assert_eq!(to(&mut demux, address(5), &RTP), Ok((Key(2), &"two")));
    demux.remove(Key(1));
    assert_eq!(to(&mut demux, address(5), &RTP), Ok((Key(2), &"two")), "the new owner keeps it");
}

#[test]
fn an_answer_goes_to_the_session_that_asked() {
    let mut demux = demux();
    let answer = check(RESPONSE, "", PASSWORD);
    assert_eq!(to(&mut demux, address(7), &answer).err(), Some(Dropped::Stranger));
    demux.expect(Key(2), [9; 12]);
    assert_eq!(to(&mut demux, address(7), &answer), Ok((Key(2), &"two")));
    assert_eq!(to(&mut demux, address(7), &RTP).err(), Some(Dropped::Stranger), "an answer proves no address");
}

#[test]
fn both_generations_of_a_restart_are_let_in_and_the_one_before_is_not() {
    let mut demux = demux();
    demux.credentials(Key(1), "cccc", PASSWORD, PEER);
    assert!(to(&mut demux, address(5), &check(REQUEST, "aaaa:peer", PASSWORD)).is_ok());
    assert!(to(&mut demux, address(6), &check(REQUEST, "cccc:peer", PASSWORD)).is_ok());
    demux.credentials(Key(1), "dddd", PASSWORD, PEER);
    assert_eq!(to(&mut demux, address(7), &check(REQUEST, "aaaa:peer", PASSWORD)).err(), Some(Dropped::NoSession));
}

#[test]
fn tables_stay_bounded() {
    let mut demux = demux();
    for port in 1..1000 {
        assert!(to(&mut demux, address(port), &check(REQUEST, "aaaa:peer", PASSWORD)).is_ok());
        demux.expect(Key(1), [(port % 251) as u8; 12]);
    }
    assert_eq!(demux.addresses.len(), ADDRESSES);
    assert!(demux.transactions.len() <= TRANSACTIONS);
    demux.remove(Key(1));
    assert!(demux.addresses.is_empty() && demux.transactions.is_empty());
}

#[test]
fn cut_and_mutated_checks_are_dropped_without_panic() {
    let good = check(REQUEST, "aaaa:peer", PASSWORD);
    let mut demux = demux();
    for length in 0..good.len() {
        assert!(to(&mut demux, address(9), &good[..length]).is_err());
    }
    for position in 0..good.len() - 8 {
        for bit in 0..8 {
            let mut bad = good.clone();
            bad[position] ^= 1 << bit;
            // Whatever it became, it did not prove the address.
            let _ = to(&mut demux, address(9), &bad);
            assert!(!demux.addresses.contains_key(&address(9)), "byte {position} bit {bit}");
        }
    }
}

#[test]
fn a_claim_needs_the_password_and_binds_nothing() {
    let demux = demux();
    assert_eq!(demux.claim(&check(REQUEST, "aaaa:peer", PASSWORD)), Ok(&"one"));
    assert_eq!(demux.claim(&check(REQUEST, "aaaa:peer", "another password ......")).err(), Some(Dropped::Integrity));
    assert_eq!(demux.claim(&check(RESPONSE, "aaaa:peer", PASSWORD)).err(), Some(Dropped::Malformed));
    assert_eq!(demux.claim(&DTLS).err(), Some(Dropped::Malformed));
    assert!(demux.addresses.is_empty());
}

/// An SRTP packet of SSRC 7.
const SOUND: [u8; 12] = [128, 111, 0, 1, 0, 0, 0, 0, 0, 0, 0, 7];

/// The answer to one of our checks, signed with `password`.
fn answer(asked: &[u8], password: &str) -> Vec<u8> {
    let mut answer = check(RESPONSE, "", password);
    // The transaction is signed too.
    answer.truncate(20);
    answer[8..20].copy_from_slice(&asked[8..20]);
    answer[2..4].copy_from_slice(&24_u16.to_be_bytes());
    let crypto = default_provider().expect("the ring provider");
    let mut mac = crypto.crypto().new_hmac(HmacAlgorithm::Sha1, password.as_bytes()).expect("HMAC-SHA1");
    let mut tag = [0; 20];
    mac.sign(&[&answer], &mut tag).expect("a tag");
    answer.extend([0, 8, 0, 20]);
    answer.extend(tag);
    answer
}

#[test]
fn a_stranger_with_the_sound_of_a_session_is_asked_and_bound_by_its_answer() {
    let (mut demux, now) = (demux(), crate::clock::now());
    assert!(to(&mut demux, address(5), &check(REQUEST, "aaaa:peer", PASSWORD)).is_ok());
    assert_eq!(demux.stranger(now, address(6), &SOUND), Stranger::Unknown, "nobody's sound yet");
    assert!(to(&mut demux, address(5), &SOUND).is_ok());
    let Stranger::Ask(asked) = demux.stranger(now, address(6), &SOUND) else { panic!("a question") };
    let message = Message::parse(&asked).expect("a check");
    assert_eq!((message.class, message.username), (Class::Request, Some("peer:aaaa")));
    assert!(demux.signed(&message, PEER.1).is_ok(), "signed with the peer's password");
    // Not again at once, whoever asks for it.
    assert_eq!(demux.stranger(now + ASKING / 2, address(7), &SOUND), Stranger::Unknown);
    // Answers from elsewhere, or by who does not know the password, prove nothing.
    assert_eq!(demux.stranger(now, address(7), &answer(&asked, PEER.1)), Stranger::Unknown);
    assert_eq!(demux.stranger(now, address(6), &answer(&asked, PASSWORD)), Stranger::Unknown);
    assert_eq!(to(&mut demux, address(6), &SOUND).err(), Some(Dropped::Stranger));
    assert_eq!(demux.stranger(now, address(6), &answer(&asked, PEER.1)), Stranger::Proved(&"one"));
    assert_eq!(to(&mut demux, address(6), &SOUND), Ok((Key(1), &"one")));
    assert_eq!(demux.stranger(now, address(6), &answer(&asked, PEER.1)), Stranger::Unknown, "one answer a question");
    demux.remove(Key(1));
    assert!(demux.sources.is_empty() && demux.asked.is_empty());
}

#[test]
fn a_session_does_not_take_the_sound_of_another_by_naming_it() {
    let (mut demux, now) = (demux(), crate::clock::now());
    for (port, user) in [(5, "aaaa:peer"), (6, "bbbb:peer")] {
        assert!(to(&mut demux, address(port), &check(REQUEST, user, PASSWORD)).is_ok());
        assert!(to(&mut demux, address(port), &SOUND).is_ok());
    }
    let Stranger::Ask(asked) = demux.stranger(now, address(9), &SOUND) else { panic!("a question") };
    assert_eq!(Message::parse(&asked).expect("a check").username, Some("peer:aaaa"));
    for ssrc in 0..100 {
        let mut sound = SOUND;
        sound[8..].copy_from_slice(&(1_000_u32 + ssrc).to_be_bytes());
        assert!(to(&mut demux, address(6), &sound).is_ok());
    }
    assert!(demux.sources.len() <= 2 * SOURCES);
}
