//! Keep-alives in STUN (RFC 5626 section 4.4.2): what a telephone behind NAT asks on the port of its signalling.

use std::net::SocketAddr;

use rtc::stun::{
    attributes::ATTR_FINGERPRINT,
    fingerprint::FINGERPRINT,
    message::{BINDING_REQUEST, BINDING_SUCCESS, Message, Setter, TransactionId},
    xoraddr::XorMappedAddress,
};

/// RFC 8489 section 5: no SIP message begins like this.
const COOKIE: [u8; 4] = [0x21, 0x12, 0xa4, 0x42];
const HEADER: usize = 20;

/// What a binding request is answered with: where it came from. `None`: it is none, or one whose lengths contradict each
/// other. The answer is at most a few octets longer, so that a forged source gains nothing.
pub(super) fn answer(datagram: &[u8], from: SocketAddr) -> Option<Vec<u8>> {
    let length = u16::from_be_bytes([*datagram.get(2)?, *datagram.get(3)?]);
    if datagram.get(..2)? != [0, 1] || datagram.get(4..8)? != COOKIE {
        return None;
    }
    if datagram.len() != HEADER + usize::from(length) {
        return None;
    }
    let mut request = Message::new();
    request.raw = datagram.to_vec();
    request.decode().ok()?;
    if request.typ != BINDING_REQUEST {
        return None;
    }
    let mut parts: Vec<Box<dyn Setter>> = vec![
        Box::new(BINDING_SUCCESS),
        Box::new(TransactionId(request.transaction_id.0)),
        Box::new(XorMappedAddress { ip: from.ip().to_canonical(), port: from.port() }),
    ];
    if request.contains(ATTR_FINGERPRINT) {
        FINGERPRINT.check(&request).ok()?;
        parts.push(Box::new(FINGERPRINT));
    }
    let mut answer = Message::new();
    answer.build(&parts).ok()?;
    Some(answer.raw)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rtc::stun::message::Getter;

    fn request(parts: Vec<Box<dyn Setter>>) -> Vec<u8> {
        let mut all: Vec<Box<dyn Setter>> = vec![Box::new(BINDING_REQUEST), Box::new(TransactionId([7; 12]))];
        all.extend(parts);
        let mut request = Message::new();
        request.build(&all).expect("builds");
        request.raw
    }

    #[test]
    fn a_binding_request_is_told_where_it_came_from() {
        for (from, long) in [("192.0.2.7:4000", 12), ("[2001:db8::7]:4000", 24), ("[::ffff:192.0.2.7]:4000", 12)] {
            let from: SocketAddr = from.parse().expect("an address");
            for (parts, sum) in [(vec![], 0), (vec![Box::new(FINGERPRINT) as Box<dyn Setter>], 8)] {
                let told = answer(&request(parts), from).expect("a request");
                assert_eq!(told.len(), HEADER + long + sum);
                let mut read = Message::new();
                read.raw = told;
                read.decode().expect("reads");
                let mut mapped = XorMappedAddress::default();
                mapped.get_from(&read).expect("there");
                assert_eq!((mapped.ip, mapped.port), (from.ip().to_canonical(), from.port()));
                assert_eq!((read.typ, read.transaction_id.0), (BINDING_SUCCESS, [7; 12]));
                assert_eq!(read.contains(ATTR_FINGERPRINT), sum > 0);
            }
        }
    }

    #[test]
    fn anything_else_is_not_answered() {
        let from: SocketAddr = "192.0.2.7:4000".parse().expect("an address");
        let good = request(vec![]);
        let mut summed = request(vec![Box::new(FINGERPRINT)]);
        *summed.last_mut().expect("a sum") ^= 1;
        let mut indication = good.clone();
        indication[1] = 0x11;
        let mut old = good.clone();
        old[4] = 0;
        let told = answer(&good, from).expect("a request");
        let longer = [&good[..], &[0, 0, 0, 0]].concat();
        let short = &good[..19];
        let request = b"INVITE sip:x@y SIP/2.0\r\n";
        let others: [&[u8]; 9] = [&told, &summed, &indication, &old, &longer, short, b"", b"\0\x01", request];
        for other in others {
            assert_eq!(answer(other, from), None, "{other:?}");
        }
    }
}
