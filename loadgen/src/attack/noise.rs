//! What attackers send: sound requests, and requests with things done to them.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Bytes that parsers stumble over.
const PIECES: [&[u8]; 10] =
    [b"\0", b"\r\n", b"\r\n\r\n", b"\xff\xff\xff\xff", b"-1", b"99999999999", b":", b";tag=", b"\"", b"%00"];

/// A source of requests; the same ones from the same seed.
pub(super) struct Noise {
    rng: StdRng,
    made: u64,
    /// Where the gateway's SIP is.
    target: String,
}

impl Noise {
    pub(super) fn new(seed: u64, target: String) -> Noise {
        Noise { rng: StdRng::seed_from_u64(seed), made: 0, target }
    }

    /// A sound request without credentials; `lines` are further headers, each with its end.
    pub(super) fn request(&mut self, method: &str, user: &str, lines: &str, body: &str) -> String {
        let call = format!("{}-{:x}", self.made, self.rng.random::<u32>());
        self.request_of(&call, method, user, lines, body)
    }

    /// The same with this Call-ID: a nonce is good for one.
    pub(super) fn request_of(&mut self, call: &str, method: &str, user: &str, lines: &str, body: &str) -> String {
        self.made += 1;
        let (n, salt, target) = (self.made, self.rng.random::<u32>(), &self.target);
        let kind = if body.is_empty() { "" } else { "Content-Type: application/sdp\r\n" };
        format!(
            "{method} sip:{user}@{target} SIP/2.0\r\nVia: SIP/2.0/UDP 192.0.2.1:5060;branch=z9hG4bK{n}x{salt:x};rport\r\n\
             Max-Forwards: 70\r\nFrom: <sip:x{n}@192.0.2.1>;tag={salt:x}\r\nTo: <sip:{user}@{target}>\r\n\
             Call-ID: {call}\r\nCSeq: {n} {method}\r\nContact: <sip:x{n}@192.0.2.1>\r\n{kind}{lines}\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        )
    }

    /// One of the requests that scanners send.
    pub(super) fn unauthenticated(&mut self) -> Vec<u8> {
        let method = ["INVITE", "REGISTER", "OPTIONS"][self.rng.random_range(0..3)];
        let body = if method == "INVITE" { DESCRIPTION } else { "" };
        self.request(method, "100", "User-Agent: friendly-scanner\r\n", body).into_bytes()
    }

    /// A request with one to five things done to it, or nothing like one.
    pub(super) fn malformed(&mut self) -> Vec<u8> {
        if self.rng.random_ratio(1, 20) {
            let length = self.rng.random_range(0..1_400);
            return (0..length).map(|_| self.rng.random()).collect();
        }
        let mut bytes = self.unauthenticated();
        for _ in 0..self.rng.random_range(1..=5) {
            let at = self.rng.random_range(0..=bytes.len());
            let end = (at + self.rng.random_range(0..80)).min(bytes.len());
            let piece = PIECES[self.rng.random_range(0..PIECES.len())];
            match self.rng.random_range(0..5) {
                0 => bytes.truncate(at),
                1 => drop(bytes.drain(at..end)),
                2 => drop(bytes.splice(at..end, piece.iter().copied())),
                3 => {
                    let repeated = bytes[at..end].repeat(8);
                    drop(bytes.splice(at..at, repeated));
                }
                _ => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 0x20),
            }
        }
        bytes.truncate(1_400);
        bytes
    }

    /// An RTP packet of an unknown stream: sound, or every other time the digit 5.
    pub(super) fn rtp(&mut self) -> Vec<u8> {
        self.made += 1;
        let digit = self.made.is_multiple_of(2);
        let mut packet = vec![0x80, if digit { 101 } else { 0 }];
        packet.extend((self.made as u16).to_be_bytes());
        packet.extend((160 * self.made as u32).to_be_bytes());
        packet.extend(self.rng.random::<u32>().to_be_bytes());
        match digit {
            true => packet.extend([5, 0x0a, 0, 160]),
            false => packet.extend((0..160).map(|_| self.rng.random::<u8>())),
        }
        packet
    }
}

/// G.711 at an address that no call has.
pub(super) const DESCRIPTION: &str = "v=0\r\no=- 1 1 IN IP4 192.0.2.1\r\ns=-\r\nc=IN IP4 192.0.2.1\r\nt=0 0\r\n\
    m=audio 4000 RTP/AVP 0\r\n";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_spoils_the_same_way_and_requests_are_sound() {
        let noise = || Noise::new(7, "127.0.0.1:5060".into());
        let (mut one, mut other) = (noise(), noise());
        let all: Vec<_> = (0..200).map(|_| one.malformed()).collect();
        assert!(all.iter().all(|bytes| *bytes == other.malformed() && bytes.len() <= 1_400));
        let request = one.request("INVITE", "100", "", DESCRIPTION);
        let (head, body) = request.split_once("\r\n\r\n").expect("an end of headers");
        assert!(head.contains(&format!("Content-Length: {}", body.len())), "{head}");
        assert_eq!(one.rtp().len() + one.rtp().len(), 172 + 16);
    }
}
