//! What comes over TCP and TLS, whole, in pieces or malformed.

use std::sync::Arc;

use crate::support::{
    event, limited, loopback,
    raw::{answers_options, answers_options_tcp, sdp},
    start, within,
};
use crate::wire::{call, endpoint};
use antiphon::{
    media::leg::{LegEvent, MediaLeg},
    sip::{Endpoint, SipConfig, TlsConfig},
};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UdpSocket},
    sync::mpsc,
};
use tokio_rustls::TlsConnector;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn torture_messages_over_udp_and_tcp_leave_everything_working() {
    let (endpoint, mut calls) = endpoint().await;
    let (mut speaking, mut leg) = call(&endpoint, &mut calls, "bystander", 4_000).await;
    let (udp, tcp) = (endpoint.local_udp().expect("bound"), endpoint.local_tcp().expect("bound"));
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/rfc4475");
    let mut files: Vec<_> = std::fs::read_dir(folder).expect("folder").map(|f| f.expect("entry").path()).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "dat"));
    files.sort();
    assert_eq!(files.len(), 49);
    let socket = UdpSocket::bind("127.0.0.1:0").await.expect("binds");
    for (n, file) in files.iter().enumerate() {
        let bytes = std::fs::read(file).expect("file");
        socket.send_to(&bytes, udp).await.expect("sends");
        let mut stream = TcpStream::connect(tcp).await.expect("connects");
        stream.write_all(&bytes).await.expect("writes");
        // Cut short in the middle, too.
        let mut half = TcpStream::connect(tcp).await.expect("connects");
        half.write_all(&bytes[..bytes.len() / 2]).await.expect("writes");
        drop(half);
        answers_options(udp, &format!("torture-udp-{n}")).await;
        answers_options_tcp(tcp, &format!("torture-tcp-{n}")).await;
    }
    // Whatever of it became a call is declined as nobody takes it; the bystander never noticed.
    while let Ok(call) = calls.try_recv() {
        call.reject(486, "");
    }
    speaking.ask("INFO", "", "", "SIP/2.0 200").await;
    leg.hang_up().await;
    let bye = speaking.expect("BYE").await;
    speaking.answer(&bye, "200 OK", "").await;
    within("the calls to be forgotten", || endpoint.calls() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_come_over_tls() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/sip");
    let (cert, key) = (folder.join("test-only-cert.pem"), folder.join("test-only-key.pem"));
    let tls = TlsConfig { bind: ([127, 0, 0, 1], 0).into(), cert: cert.clone(), key };
    let (endpoint, mut calls) = start(SipConfig { tls: Some(tls.clone()), ..loopback() }).await;
    let target = endpoint.local_tls().expect("bound");

    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&cert).expect("reads")).expect("a certificate");
    let config = rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let tcp = TcpStream::connect(target).await.expect("connects");
    let name = "localhost".try_into().expect("a name");
    let mut stream = limited(TlsConnector::from(Arc::new(config)).connect(name, tcp)).await.expect("shakes hands");
    let content = sdp(4_000, "");
    let invite = format!(
        "INVITE sip:demo@{target} SIP/2.0\r\nVia: SIP/2.0/TLS 127.0.0.1:9;branch=z9hG4bKtls\r\nMax-Forwards: 9\r\n\
         From: <sip:a@b>;tag=1\r\nTo: <sip:x@y>\r\nCall-ID: tls\r\nCSeq: 1 INVITE\r\nContact: <sip:a@127.0.0.1:9;transport=tls>\r\n\
         Content-Type: application/sdp\r\nContent-Length: {}\r\n\r\n{content}",
        content.len()
    );
    stream.write_all(invite.as_bytes()).await.expect("writes");
    let mut leg = limited(limited(calls.recv()).await.expect("a call").accept()).await.expect("accepted");
    let mut text = String::new();
    let mut buffer = vec![0; 8_192];
    while !text.contains("SIP/2.0 200") {
        let length = limited(stream.read(&mut buffer)).await.expect("reads");
        assert!(length > 0, "closed early: {text}");
        text.push_str(&String::from_utf8_lossy(&buffer[..length]));
    }
    assert!(text.contains(";transport=TLS") || text.contains(";transport=tls"), "our Contact leads back here: {text}");
    let tag = text.split("\r\nTo: ").nth(2).and_then(|t| t.split(";tag=").nth(1)).and_then(|t| t.split("\r\n").next());
    let ack = format!(
        "ACK sip:demo@{target} SIP/2.0\r\nVia: SIP/2.0/TLS 127.0.0.1:9;branch=z9hG4bKack\r\nMax-Forwards: 9\r\n\
         From: <sip:a@b>;tag=1\r\nTo: <sip:x@y>;tag={}\r\nCall-ID: tls\r\nCSeq: 1 ACK\r\nContent-Length: 0\r\n\r\n",
        tag.expect("a tag")
    );
    stream.write_all(ack.as_bytes()).await.expect("writes");
    leg.attach().await.expect("attaches");
    event(&mut leg, |e| *e == LegEvent::Connected).await;
    // BYE comes down the same stream: nothing else leads to that address.
    leg.hang_up().await;
    let mut text = String::new();
    while !text.contains("BYE ") {
        let length = limited(stream.read(&mut buffer)).await.expect("reads");
        assert!(length > 0, "closed early: {text}");
        text.push_str(&String::from_utf8_lossy(&buffer[..length]));
    }

    // A peer that speaks no TLS, and files that are none.
    let mut plain = TcpStream::connect(target).await.expect("connects");
    plain.write_all(b"OPTIONS sip:x SIP/2.0\r\n\r\n").await.expect("writes");
    while limited(plain.read(&mut buffer)).await.is_ok_and(|length| length > 0) {}
    let wrong = TlsConfig { cert: folder.join("basic.xml"), ..tls };
    let (sender, _receiver) = mpsc::channel(1);
    let config = SipConfig { tls: Some(wrong), ..loopback() };
    let error = Endpoint::start(config, antiphon::sip::RtpConfig::default(), sender).await.err().expect("refused");
    assert!(error.to_string().contains("basic.xml"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_are_framed_and_bounded() {
    let (endpoint, _calls) = endpoint().await;
    let tcp = endpoint.local_tcp().expect("bound");
    // A ping, two requests in pieces, one of which is unknown.
    let mut stream = TcpStream::connect(tcp).await.expect("connects");
    stream.write_all(b"\r\n\r\n").await.expect("writes");
    let mut buffer = vec![0; 8_192];
    let length = limited(stream.read(&mut buffer)).await.expect("reads");
    assert_eq!(&buffer[..length], b"\r\n");
    let one = |method: &str| {
        format!(
            "{method} sip:x@{tcp} SIP/2.0\r\nVia: SIP/2.0/TCP 127.0.0.1:9;branch=z9hG4bK{method}\r\nMax-Forwards: 9\r\n\
             From: <sip:a@b>;tag=1\r\nTo: <sip:x@y>\r\nCall-ID: {method}\r\nCSeq: 1 {method}\r\nContent-Length: 0\r\n\r\n"
        )
    };
    let both = one("DANCE") + &one("OPTIONS");
    for piece in both.as_bytes().chunks(100) {
        stream.write_all(piece).await.expect("writes");
        stream.flush().await.expect("flushes");
    }
    let mut text = String::new();
    while !(text.contains("SIP/2.0 501") && text.contains("SIP/2.0 200")) {
        let length = limited(stream.read(&mut buffer)).await.expect("reads");
        assert!(length > 0, "closed early: {text}");
        text.push_str(&String::from_utf8_lossy(&buffer[..length]));
    }
    // Lengths that cannot be framed close the stream.
    for bad in ["18446744073709551615", "-1", "99999999"] {
        let mut stream = TcpStream::connect(tcp).await.expect("connects");
        let text = one("OPTIONS").replace("Content-Length: 0", &format!("Content-Length: {bad}"));
        stream.write_all(text.as_bytes()).await.expect("writes");
        let read = limited(stream.read(&mut buffer)).await;
        assert!(matches!(read, Ok(0) | Err(_)), "{bad}");
    }
    answers_options_tcp(tcp, "after").await;
}
