//! Every reader of strangers' bytes, fed with spoilt versions of good ones: none may panic, abort or hang.
//!
//! A bounded number of runs from a fixed seed, on any toolchain. The same functions are the targets of cargo-fuzz,
//! which is guided by coverage and needs a nightly one.

use std::path::{Path, PathBuf};

use antiphon::clock;

/// Spoilt inputs a target.
const RUNS: u32 = 3_000;
/// Largest input.
const MAX: usize = 64 << 10;

/// Xorshift64*: the same inputs on every machine.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }
}

/// What numbers and text formats stumble over.
const PIECES: [&[u8]; 14] = [
    b"\0",
    b"\r\n",
    b"\r\n\r\n",
    b"\xff\xff\xff\xff",
    b"\x80",
    b"-1",
    b"99999999999999999999",
    b"4294967296",
    b":",
    b"=",
    b"\"",
    b"\xc3\x28",
    b"{\"a\":",
    b"%n",
];

/// `good` with one to four things done to it; `other` is what parts are taken from.
fn spoil(rng: &mut Rng, good: &[u8], other: &[u8]) -> Vec<u8> {
    let mut bytes = good.to_vec();
    for _ in 0..=rng.below(4) {
        let at = rng.below(bytes.len() + 1);
        let end = (at + rng.below(64)).min(bytes.len());
        match rng.below(7) {
            0 if !bytes.is_empty() => {
                let at = rng.below(bytes.len());
                bytes[at] ^= 1 << rng.below(8);
            }
            1 => bytes.truncate(at),
            2 => drop(bytes.drain(at..end)),
            3 => drop(bytes.splice(at..at, PIECES[rng.below(PIECES.len())].iter().copied())),
            4 => drop(bytes.splice(at..end, PIECES[rng.below(PIECES.len())].iter().copied())),
            5 => {
                let piece = bytes[at..end].to_vec();
                bytes.splice(at..at, piece);
            }
            _ => {
                let from = rng.below(other.len() + 1);
                let to = (from + rng.below(200)).min(other.len());
                bytes.splice(at..end, other[from..to].iter().copied());
            }
        }
    }
    bytes.truncate(MAX);
    bytes
}

/// Feeds `target` with the corpus as it is and with `runs` spoilt inputs.
fn feed(runs: u32, corpus: &[Vec<u8>], mut target: impl FnMut(&[u8])) {
    let mut rng = Rng(0x5eed_0000 + corpus.len() as u64);
    corpus.iter().for_each(|good| target(good));
    for _ in 0..runs {
        let (good, other) = (rng.below(corpus.len()), rng.below(corpus.len()));
        let bytes = spoil(&mut rng, &corpus[good], &corpus[other]);
        target(&bytes);
    }
}

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

/// Every file below `folder` with this ending.
fn files(folder: &Path, ending: &str) -> Vec<Vec<u8>> {
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(folder).expect("readable").map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    paths.retain(|path| path.extension().is_some_and(|end| end == ending));
    assert!(!paths.is_empty(), "{}", folder.display());
    paths.iter().map(|path| std::fs::read(path).expect("readable")).collect()
}

const OFFER: &str = "v=0\r\no=- 1 2 IN IP4 127.0.0.1\r\ns=-\r\nt=0 0\r\na=group:BUNDLE 0 1\r\n\
    m=audio 9 UDP/TLS/RTP/SAVPF 111 0\r\nc=IN IP4 0.0.0.0\r\na=mid:0\r\na=ice-ufrag:abcd\r\n\
    a=ice-pwd:0123456789abcdef01234567\r\na=fingerprint:sha-256 00:11:22:33:44:55:66:77:88:99:AA:BB:CC:DD:EE:FF:00:11:22:33:44:55:66:77:88:99:AA:BB:CC:DD:EE:FF\r\n\
    a=setup:actpass\r\na=sendrecv\r\na=rtcp-mux\r\na=rtpmap:111 opus/48000/2\r\na=fmtp:111 minptime=10;useinbandfec=1\r\n\
    a=candidate:1 1 UDP 2122252543 192.0.2.1 50000 typ host\r\na=crypto:1 AES_CM_128_HMAC_SHA1_80 inline:WVNfX19zZW1jdGwgKCkgewkyMjA7fQp9CnVubGVz\r\n\
    m=application 9 UDP/DTLS/SCTP webrtc-datachannel\r\nc=IN IP4 0.0.0.0\r\na=mid:1\r\na=sctp-port:5000\r\n";

#[test]
fn sip_messages() {
    let corpus = files(&data().join("rfc4475"), "dat");
    feed(RUNS, &corpus, antiphon::sip::fuzz);
}

#[test]
fn browser_offers_fragments_and_datagrams() {
    // A binding request with USERNAME, PRIORITY and MESSAGE-INTEGRITY (RFC 5769 section 2.1).
    let mut stun = vec![0, 1, 0, 0x2c, 0x21, 0x12, 0xa4, 0x42];
    stun.extend([7; 12]);
    stun.extend([0, 6, 0, 9, b'e', b'v', b't', b'j', b':', b'h', b'6', b'v', b'Y', 0, 0, 0]);
    stun.extend([0, 0x24, 0, 4, 0x6e, 0, 1, 0xff, 0, 8, 0, 20]);
    stun.extend([9; 20]);
    let corpus = [OFFER.as_bytes().to_vec(), stun];
    feed(RUNS, &corpus, antiphon::webrtc::fuzz);
}

#[test]
fn rtcp() {
    let sender_report = [
        &[0x81, 200, 0, 12][..],
        &[0, 0, 0, 1],
        &[1; 20],
        &[0, 0, 0, 2, 5, 0, 0, 9],
        &[3; 16],
        &[0x81, 202, 0, 3, 0, 0, 0, 1, 1, 4, b'n', b'a', b'm', b'e', 0, 0],
    ]
    .concat();
    let goodbye = vec![0x81, 203, 0, 3, 0, 0, 0, 1, 3, b'b', b'y', b'e', 0, 0, 0, 0];
    let now = clock::now();
    feed(RUNS, &[sender_report, goodbye], |bytes| {
        let mut rtcp = antiphon::media::rtcp::Rtcp::new(now, 1, "c".into(), 8_000);
        let _ = rtcp.on_rtcp(now, std::time::Duration::ZERO, bytes);
    });
}

#[test]
fn frames_of_agents() {
    let corpus = [
        r#"{"type":"text","token":"Hello.","last":true,"lang":"en","utteranceId":"u","seed":7,"interruptible":"any"}"#,
        r#"{"type":"play","source":"data:audio/wav;base64,UklGRg==","loop":2}"#,
        r#"{"type":"end","handoffData":"{\"a\":[1,2]}"}"#,
        r#"{"type":"transfer","to":"sip:a@b","mode":"attended"}"#,
    ]
    .map(|text| text.as_bytes().to_vec());
    feed(RUNS, &corpus, |bytes| {
        let _ = antiphon::agent::frames::parse(&String::from_utf8_lossy(bytes));
    });
}

#[test]
fn checkpoints() {
    let folder = data().join("golden/cosyvoice3/checkpoint");
    let pickles: Vec<Vec<u8>> = files(&folder, "pt")
        .into_iter()
        .map(|mut bytes| {
            // The pickle comes first, the numbers after it; the directory of the archive is at the end.
            let end = bytes.len().saturating_sub(8 << 10);
            if bytes.len() > 48 << 10 {
                bytes.drain(40 << 10..end.max(40 << 10));
            }
            bytes
        })
        .collect();
    feed(RUNS, &pickles, |bytes| {
        let _ = antiphon::synth::cosyvoice::pickle::read(bytes);
    });
    feed(RUNS, &files(&folder, "yaml"), |bytes| {
        let _ = antiphon::synth::cosyvoice::yaml::parse(&String::from_utf8_lossy(bytes));
    });
}
