//! Messages that pass, messages that get an answer, and bytes that must not panic.

use std::{fs, path::Path};

use proptest::prelude::*;

use super::*;

fn from() -> SocketAddr {
    SocketAddr::from(([192, 0, 2, 1], 5070))
}

fn request(start: &str, extra: &str) -> String {
    let method = start.split(' ').next().unwrap_or_default();
    format!(
        "{start}\r\nVia: SIP/2.0/UDP 10.0.0.1:5060;branch=z9hG4bKx;rport\r\nMax-Forwards: 70\r\n\
         From: <sip:a@example.com>;tag=1\r\nTo: <sip:b@example.com>\r\nCall-ID: c\r\nCSeq: 1 {method}\r\n{extra}\r\n"
    )
}

/// The status the screen answers with; 200 for passing, 0 for silence.
fn verdict(bytes: &[u8]) -> u16 {
    match screen(bytes, from(), "test") {
        Verdict::Pass { .. } => 200,
        Verdict::Ignore(_) => 0,
        Verdict::Answer(answer) => {
            let text = String::from_utf8(answer).expect("ours is UTF-8");
            assert!(text.ends_with("\r\n\r\n"));
            text[8..11].parse().expect("a status")
        }
    }
}

#[test]
fn sound_requests_pass() {
    for start in
        ["INVITE sip:b@example.com SIP/2.0", "OPTIONS sips:b@example.com SIP/2.0", "BYE sip:b@[::1]:5060 SIP/2.0"]
    {
        assert_eq!(verdict(request(start, "").as_bytes()), 200, "{start}");
    }
}

#[test]
fn each_defect_has_its_answer() {
    let cases = [
        (501, request("DANCE sip:b@example.com SIP/2.0", "")),
        (501, request("invite sip:b@example.com SIP/2.0", "")),
        (505, request("INVITE sip:b@example.com SIP/7.0", "")),
        (416, request("INVITE ftp:b@example.com SIP/2.0", "")),
        (400, request("INVITE sip:b@example.com  SIP/2.0", "")),
        (400, request("INVITE sip:b@example.com SIP/2.0", "Content-Length: 10\r\n")),
        (400, request("INVITE sip:b@example.com SIP/2.0", "Content-Length: -1\r\n")),
        (400, request("INVITE sip:b@example.com SIP/2.0", "").replace("CSeq: 1 INVITE", "CSeq: 1 BYE")),
        (400, request("INVITE sip:b@example.com SIP/2.0", "").replace("CSeq: 1", "CSeq: 4294967296")),
        (400, request("INVITE sip:b@example.com SIP/2.0", "").replace("70", "900")),
        (400, request("INVITE sip:b@example.com SIP/2.0", "Contact: <<<\r\n")),
        (
            400,
            request("INVITE sip:b@example.com SIP/2.0", "").replace("<sip:b@example.com>", "\"B <sip:b@example.com>"),
        ),
        // As RFC 2543 had it.
        (200, request("INVITE sip:b@example.com SIP/2.0", "").replace(";tag=1", "")),
        (400, request("INVITE sip:b@example.com SIP/2.0", "").replace("Call-ID: c\r\n", "")),
        (400, request("INVITE sip:b@example.com SIP/2.0", "Call-ID: d\r\n")),
        (0, request("INVITE sip:b@example.com SIP/2.0", "X: a\nVia: b\r\n")),
        (0, request("INVITE sip:b@example.com SIP/2.0", "X: a\rVia: b\r\n")),
        (0, request("INVITE sip:b@example.com SIP/2.0", &format!("Via: {}\r\n", "h".repeat(MAX_ECHO)))),
        (0, request("ACK sip:b@example.com SIP/2.0", "Content-Length: 10\r\n")),
        (0, "hello\r\n\r\n".to_owned()),
        (0, "GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_owned()),
        (0, "SIP/2.0 99 Low\r\n\r\n".to_owned()),
    ];
    for (status, text) in cases {
        assert_eq!(verdict(text.as_bytes()), status, "{text}");
    }
}

#[test]
fn bytes_that_are_not_utf8_are_refused_in_headers_only() {
    let mut message = request("INVITE sip:b@example.com SIP/2.0", "Subject: x\r\n").into_bytes();
    let at = message.windows(3).position(|w| w == b": x").expect("there") + 2;
    message[at] = 0xff;
    assert_eq!(verdict(&message), 400);
    let mut message = request("MESSAGE sip:b@example.com SIP/2.0", "Content-Length: 1\r\n").into_bytes();
    message.push(0xff);
    assert_eq!(verdict(&message), 200);
}

#[test]
fn responses_need_a_tag_where_it_makes_a_dialog() {
    let response = |status: &str, tag: &str| {
        let request = request("INVITE sip:b@example.com SIP/2.0", "");
        let rest = request.split_once("\r\n").expect("two lines").1;
        format!("SIP/2.0 {status}\r\n{rest}")
            .replace("To: <sip:b@example.com>", &format!("To: <sip:b@example.com>{tag}"))
    };
    for (status, tag, passes) in [
        ("100 Trying", "", true),
        ("180 Ringing", "", true),
        ("486 Busy Here", "", true),
        ("200 OK", "", false),
        ("200 OK", ";tag=2", true),
        ("099 Low", ";tag=2", false),
        ("abc", ";tag=2", false),
    ] {
        assert_eq!(verdict(response(status, tag).as_bytes()), if passes { 200 } else { 0 }, "{status} {tag}");
    }
}

#[test]
fn answers_go_back_where_the_request_came_from() {
    let Verdict::Answer(answer) = screen(request("DANCE sip:b@h SIP/2.0", "").as_bytes(), from(), "test") else {
        panic!("an answer")
    };
    let text = String::from_utf8(answer).expect("UTF-8");
    assert!(text.contains("branch=z9hG4bKx;rport=5070;received=192.0.2.1\r\n"), "{text}");
    assert!(text.contains("CSeq: 1 DANCE\r\n"));
}

#[test]
fn frames_end_where_they_should() {
    assert_eq!(frame(b""), Frame::More);
    assert_eq!(frame(b"\r\n"), Frame::More);
    assert_eq!(frame(b"\r\n\r\n"), Frame::KeepAlive(4, true));
    assert_eq!(frame(b"\r\nINV"), Frame::KeepAlive(2, false));
    assert_eq!(frame(b"A\r\nContent-Length: 2\r\n\r\nab"), Frame::Message(26));
    assert_eq!(frame(b"A\r\nl : 2\r\n\r\na"), Frame::More);
    assert_eq!(frame(b"A\r\n\r\n"), Frame::Message(5));
    assert!(matches!(frame(b"A\r\nContent-Length: 18446744073709551615\r\n\r\n"), Frame::Broken(_)));
    assert!(matches!(frame(b"A\r\nContent-Length: -1\r\n\r\n"), Frame::Broken(_)));
    assert!(matches!(frame(b"A\r\nl: 1\r\nContent-Length: 2\r\n\r\n"), Frame::Broken(_)));
    assert!(matches!(frame(&[b'a'; MAX_MESSAGE + 1]), Frame::Broken(_)));
}

#[test]
fn torture_messages_get_what_rfc_4475_asks_for() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/rfc4475");
    let verdict = |name: &str| verdict(&fs::read(folder.join(format!("{name}.dat"))).expect("torture message"));
    // Section 3.1.1: valid. (`unreason` and `noreason` are responses.)
    for name in [
        "wsinv",
        "inv2543",
        "esc01",
        "escnull",
        "esc02",
        "lwsdisp",
        "dblreq",
        "semiuri",
        "transports",
        "mpart01",
        "unreason",
        "noreason",
    ] {
        // `esc02` uses a method name made of escapes: valid and unknown.
        let expected = if name == "esc02" { 501 } else { 200 };
        assert_eq!(verdict(name), expected, "{name}");
    }
    // Section 3.1.2: invalid. Silence is right where no answer could be made.
    for (name, allowed) in [
        // Empty parameters in Via and Contact; passing them over is allowed.
        ("badinv01", &[200, 400][..]),
        ("clerr", &[400]),
        ("ncl", &[400]),
        ("scalar02", &[400]),
        ("scalarlg", &[0]),
        ("ltgtruri", &[400]),
        ("lwsruri", &[400]),
        ("lwsstart", &[400]),
        ("trws", &[400]),
        ("badvers", &[505]),
        ("mismatch01", &[400]),
        ("mismatch02", &[400, 501]),
        ("bigcode", &[0]),
        ("multi01", &[0, 400]),
        ("mcl01", &[400]),
        ("insuf", &[0, 400]),
        ("unkscm", &[416]),
    ] {
        let got = verdict(name);
        assert!(allowed.contains(&got), "{name}: {got}");
    }
}

#[test]
fn without_a_length_the_body_ends_with_the_datagram() {
    let text = |length: &str| {
        format!(
            "INVITE sip:x@h SIP/2.0\r\nVia: SIP/2.0/WS h.invalid;branch=z9hG4bK1\r\nFrom: <sip:a@b>;tag=1\r\n\
             To: <sip:x@h>\r\nCall-ID: 1\r\nCSeq: 1 INVITE\r\n{length}Content-Type: application/sdp\r\n\r\nv=0\r\n"
        )
    };
    for (length, body, same) in [("", "v=0\r\n", false), ("l: 5\r\n", "v=0\r\n", true), ("l: 0\r\n", "", true)] {
        let Verdict::Pass { message, verbatim } = screen(text(length).as_bytes(), from(), "test") else {
            panic!("{length}: passes");
        };
        let SipMessage::Request(request) = *message else { panic!("a request") };
        assert_eq!((String::from_utf8_lossy(&request.body), verbatim), (body.into(), same), "{length}");
    }
    let answer = text("").replace("INVITE sip:x@h SIP/2.0", "SIP/2.0 183 Progress");
    let Verdict::Pass { message, .. } = screen(answer.as_bytes(), from(), "test") else { panic!("passes") };
    assert!(matches!(*message, SipMessage::Response(response) if response.body == b"v=0\r\n"));
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = screen(&bytes, from(), "test");
        let _ = frame(&bytes);
    }

    #[test]
    fn no_mutation_panics(at in 0..2_000_usize, byte in any::<u8>(), cut in 0..2_000_usize, file in 0..49_usize) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/rfc4475");
        let mut files: Vec<_> = fs::read_dir(folder).expect("folder").map(|f| f.expect("entry").path()).collect();
        files.sort();
        files.retain(|f| f.extension().is_some_and(|e| e == "dat"));
        let mut bytes = fs::read(&files[file % files.len()]).expect("file");
        let length = bytes.len();
        bytes[at % length] = byte;
        if cut % 3 == 0 {
            bytes.remove(cut % length);
        }
        let _ = screen(&bytes, from(), "test");
        let _ = frame(&bytes);
    }
}
