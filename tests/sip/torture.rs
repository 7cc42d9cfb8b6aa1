//! The 49 messages of RFC 4475 over UDP and TCP, each with its reaction.

use std::path::Path;

use crate::support::{limited, loopback, start};
use antiphon::sip::IncomingCall;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UdpSocket},
    sync::mpsc,
};

/// A message that is not answered: a response, or one whose end cannot be known.
const SILENT: &[u16] = &[0];
/// Taken for a call, which the test declines.
const CALL: &[u16] = &[486];

/// The final responses that are right over UDP, and over TCP where they are others.
type Row = (&'static str, &'static [u16], Option<&'static [u16]>);

const TABLE: [Row; 49] = [
    // 3.1.1: valid. Registration and messages are no service of ours; `wsinv` is of a dialog that is not here.
    ("wsinv", &[481], None),
    ("intmeth", &[501], None),
    ("esc01", CALL, None),
    ("escnull", &[405], None),
    ("esc02", &[501], None),
    ("lwsdisp", &[200], None),
    ("longreq", CALL, None),
    ("dblreq", &[405], None),
    ("semiuri", &[200], None),
    ("transports", &[200], None),
    ("mpart01", &[405], None),
    ("unreason", SILENT, None),
    ("noreason", SILENT, None),
    // 3.1.2: invalid. Where the RFC lets an element be liberal, both are right.
    ("badinv01", &[400, 486], None),
    // Over a stream the rest of the body may still come.
    ("clerr", &[400], Some(SILENT)),
    ("ncl", &[400], Some(SILENT)),
    ("scalar02", &[400], None),
    ("scalarlg", SILENT, None),
    ("quotbal", &[400], None),
    ("ltgtruri", &[400], None),
    ("lwsruri", &[400], None),
    ("lwsstart", &[400], None),
    ("trws", &[400], None),
    ("escruri", &[400, 486], None),
    ("baddate", &[400, 486], None),
    ("regbadct", &[400, 405], None),
    ("badaspec", &[200, 400], None),
    ("baddn", &[200, 400], None),
    ("badvers", &[505], None),
    ("mismatch01", &[400], None),
    ("mismatch02", &[400, 501], None),
    ("bigcode", SILENT, None),
    // 3.2: transactions.
    ("badbranch", &[200, 400], None),
    // 3.3: application.
    ("insuf", &[400], None),
    ("unkscm", &[416], None),
    ("novelsc", &[416], None),
    ("unksm2", &[400, 405], None),
    ("bext01", &[420], None),
    ("invut", &[415], None),
    ("regaut01", &[405], None),
    ("multi01", &[400], None),
    ("mcl01", &[400], Some(SILENT)),
    ("bcast", SILENT, None),
    ("zeromf", &[200, 483], None),
    ("cparam01", &[405], None),
    ("cparam02", &[405], None),
    ("regescrt", &[405], None),
    ("sdp01", &[406], None),
    // 3.4: of RFC 2543.
    ("inv2543", CALL, None),
];

fn message(name: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/rfc4475");
    std::fs::read(folder.join(format!("{name}.dat"))).expect("a message of the RFC")
}

/// The status of a final response that `text` begins with.
fn status(text: &[u8]) -> Option<u16> {
    let code = text.strip_prefix(b"SIP/2.0 ")?.get(..3)?;
    std::str::from_utf8(code).ok()?.parse().ok().filter(|code| *code >= 200)
}

fn decline(mut calls: mpsc::Receiver<IncomingCall>) {
    tokio::spawn(async move {
        while let Some(call) = calls.recv().await {
            call.reject(486, "busy");
        }
    });
}

fn probe(local: &str, transport: &str) -> String {
    format!(
        "OPTIONS sip:probe@127.0.0.1 SIP/2.0\r\nVia: SIP/2.0/{transport} {local};branch=z9hG4bKprobe;rport\r\n\
         Max-Forwards: 70\r\nFrom: <sip:probe@{local}>;tag=probe\r\nTo: <sip:probe@127.0.0.1>\r\nCall-ID: probe\r\n\
         CSeq: 1 OPTIONS\r\nContent-Length: 0\r\n\r\n"
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_of_the_49_gets_its_reaction_over_udp() {
    let (endpoint, calls) = start(loopback()).await;
    decline(calls);
    let target = endpoint.local_udp().expect("bound");
    let mut wrong = Vec::new();
    for (name, expected, _) in TABLE {
        let socket = UdpSocket::bind("127.0.0.1:0").await.expect("binds");
        socket.send_to(&message(name), target).await.expect("sends");
        let silent = expected == SILENT;
        if silent {
            // What comes before the answer to this would be the answer to that.
            let probe = probe(&socket.local_addr().expect("bound").to_string(), "UDP");
            socket.send_to(probe.as_bytes(), target).await.expect("sends");
        }
        let mut buffer = vec![0; 65_536];
        let got = limited(async {
            loop {
                let (length, _) = socket.recv_from(&mut buffer).await.expect("receives");
                let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
                match status(&buffer[..length]) {
                    Some(_) if silent && text.contains("Call-ID: probe") => return 0,
                    Some(code) => return code,
                    None => {}
                }
            }
        })
        .await;
        if !expected.contains(&got) {
            wrong.push(format!("{name}: {got}, not {expected:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_of_the_49_gets_its_reaction_over_tcp() {
    let (endpoint, calls) = start(loopback()).await;
    decline(calls);
    let target = endpoint.local_tcp().expect("bound");
    let mut wrong = Vec::new();
    for (name, udp, tcp) in TABLE {
        let expected = tcp.unwrap_or(udp);
        let mut bytes = message(name);
        // One file lacks the empty line, without which a stream goes on.
        if !bytes.windows(4).any(|window| window == b"\r\n\r\n") {
            bytes.extend_from_slice(b"\r\n");
        }
        let mut stream = TcpStream::connect(target).await.expect("connects");
        stream.write_all(&bytes).await.expect("writes");
        let mut text = Vec::new();
        let got = limited(async {
            if expected == SILENT {
                stream.shutdown().await.ok();
                stream.read_to_end(&mut text).await.ok();
                return status(&text).unwrap_or(0);
            }
            loop {
                let mut buffer = vec![0; 65_536];
                let length = stream.read(&mut buffer).await.unwrap_or(0);
                text.extend_from_slice(&buffer[..length]);
                let lines = text.windows(8).enumerate().filter(|(_, window)| *window == b"SIP/2.0 ");
                // Provisional responses come before; a Via says the same with a slash.
                if let Some(code) = lines.filter_map(|(at, _)| status(&text[at..])).next() {
                    return code;
                }
                if length == 0 {
                    return 0;
                }
            }
        })
        .await;
        if !expected.contains(&got) {
            wrong.push(format!("{name}: {got}, not {expected:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
