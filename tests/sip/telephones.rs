//! What keeps the way between telephones or carriers and us open, and what they ask in a call that moves it elsewhere.

use crate::{
    counted::Growth,
    support::{
        LIMIT, event, limited, loopback,
        raw::{Raw, audio_port, body, header, sdp},
        start, within,
    },
    wire,
};
use antiphon::{
    media::{
        leg::{Codec, LegEnd, LegEvent, MediaLeg},
        sip::SipLeg,
    },
    sip::{Endpoint, IncomingCall, SipConfig},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UdpSocket},
    sync::mpsc,
    time::timeout,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_keep_alive_in_stun_is_told_where_it_came_from() {
    let (endpoint, _calls) = start(loopback()).await;
    let at = endpoint.local_udp().expect("bound");
    let socket = UdpSocket::bind("127.0.0.1:0").await.expect("binds");
    let port = socket.local_addr().expect("bound").port();
    let mut request = vec![0, 1, 0, 0, 0x21, 0x12, 0xa4, 0x42];
    request.extend([7; 12]);
    // One whose length says more than there is gets nothing, and the next one its answer.
    let mut broken = request.clone();
    (broken[3], broken[19]) = (8, 1);
    socket.send_to(&broken, at).await.expect("sends");
    let mut answer = [0; 256];
    socket.send_to(&request, at).await.expect("sends");
    let (length, _) = limited(socket.recv_from(&mut answer)).await.expect("receives");
    let answer = &answer[..length];
    assert_eq!((&answer[..2], &answer[8..20]), (&[1, 1][..], &[7; 12][..]));
    // XOR-MAPPED-ADDRESS: the port of the sender, beside the cookie.
    assert_eq!(&answer[20..22], [0, 0x20]);
    assert_eq!(u16::from_be_bytes([answer[26], answer[27]]) ^ 0x2112, port);
    // And the double empty line of RFC 5626, for SIP in datagrams and in streams.
    socket.send_to(b"\r\n\r\n", at).await.expect("sends");
    let mut pong = [0; 16];
    let (length, _) = limited(socket.recv_from(&mut pong)).await.expect("receives");
    assert_eq!(&pong[..length], b"\r\n");
    let mut stream = TcpStream::connect(endpoint.local_tcp().expect("bound")).await.expect("connects");
    stream.write_all(b"\r\n\r\n").await.expect("writes");
    let mut pong = [0; 2];
    limited(stream.read_exact(&mut pong)).await.expect("reads");
    assert_eq!(&pong, b"\r\n");
}

fn registering(at: &str, more: &str) -> SipConfig {
    let trunk = format!(
        "name = \"t\"\nhost = \"{at}\"\nregister = true\nusername = \"a\"\npassword = \"b\"\nprefixes = [\"*\"]\n\
         keep_alive_s = 1\n{more}"
    );
    SipConfig { trunk: vec![toml::from_str(&trunk).expect("valid")], ..loopback() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_way_from_a_registrar_is_kept_open_in_datagrams() {
    let mut registrar = Raw::new(([127, 0, 0, 1], 9).into(), "registrar").await;
    let at = registrar.uri().split_once('@').expect("a host").1.to_owned();
    let (endpoint, _calls) = start(registering(&at, "")).await;
    registrar.target = endpoint.local_udp().expect("bound");
    let register = registrar.next("REGISTER").await;
    registrar.answer(&register, "200 OK", "Expires: 600\r\n").await;
    let mut asked = Vec::new();
    while asked.len() < 2 {
        let ping = registrar.expect("OPTIONS").await;
        // What it says is no matter.
        registrar.answer(&ping, "404 Not Found", "").await;
        let id = header(&ping, "Call-ID").expect("Call-ID").to_owned();
        if !asked.contains(&id) {
            asked.push(id);
        }
    }
    assert_eq!((endpoint.trunks()[0].registered, endpoint.trunks()[0].up), (Some(true), None));
}

/// One end of a connection that the endpoint has made.
struct Line {
    stream: TcpStream,
    unread: String,
}

impl Line {
    async fn accept(listener: &TcpListener) -> Line {
        let (stream, _) = limited(listener.accept()).await.expect("connects");
        Line { stream, unread: String::new() }
    }

    /// The next request; none of them has a body.
    async fn next(&mut self) -> String {
        loop {
            if let Some(end) = self.unread.find("\r\n\r\n") {
                let rest = self.unread.split_off(end + 4);
                return std::mem::replace(&mut self.unread, rest);
            }
            let mut buffer = [0; 2_048];
            let length = limited(self.stream.read(&mut buffer)).await.expect("reads");
            assert!(length > 0, "closed after {}", self.unread);
            self.unread.push_str(&String::from_utf8_lossy(&buffer[..length]));
        }
    }

    /// Waits for this request and answers it.
    async fn answer(&mut self, method: &str) {
        let request = self.next().await;
        assert!(request.starts_with(method), "{request}");
        let kept = ["Via", "From", "To", "Call-ID", "CSeq", "Contact"];
        let lines = request.lines().filter(|line| kept.contains(&line.split(':').next().unwrap_or_default()));
        let lines: String = lines.map(|line| format!("{line}\r\n")).collect();
        let answer = format!("SIP/2.0 200 OK\r\n{lines}Expires: 600\r\nContent-Length: 0\r\n\r\n");
        limited(self.stream.write_all(answer.as_bytes())).await.expect("writes");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_registration_whose_connection_is_gone_is_made_anew() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("binds");
    let at = listener.local_addr().expect("bound").to_string();
    let counts = Growth::of(&["antiphon_trunk_flows_lost_total"]);
    let (endpoint, _calls) = start(registering(&at, "transport = \"tcp\"")).await;
    // Registered for minutes, were it not for the connection: the registrar closes it.
    let mut line = Line::accept(&listener).await;
    line.answer("REGISTER ").await;
    line.answer("OPTIONS ").await;
    drop(line);
    // The second one is still open, but whoever was behind it has forgotten it.
    let mut silent = Line::accept(&listener).await;
    silent.answer("REGISTER ").await;
    silent.answer("OPTIONS ").await;
    silent.next().await;
    let mut line = Line::accept(&listener).await;
    line.answer("REGISTER ").await;
    // The dead one is closed from this side.
    let mut rest = Vec::new();
    timeout(LIMIT, silent.stream.read_to_end(&mut rest)).await.expect("closed").ok();
    counts.assert();
    assert_eq!(endpoint.trunks()[0].registered, Some(true));
}

/// A gateway with one trunk, whose host is the telephone that comes with it, and a call of that trunk.
async fn trunk_call(more: &str) -> Called {
    let mut carrier = Raw::new(([127, 0, 0, 1], 9).into(), "carrier").await;
    let host = carrier.uri().split_once('@').expect("a host").1.to_owned();
    let trunk = format!("name = \"t\"\nhost = \"{host}\"\nprefixes = [\"+49\"]\n{more}");
    let config = SipConfig { trunk: vec![toml::from_str(&trunk).expect("valid")], ..loopback() };
    let (endpoint, mut calls) = start(config).await;
    carrier.target = endpoint.local_udp().expect("bound");
    let (raw, leg) = wire::call(&endpoint, &mut calls, "first", 4_000).await;
    Called { endpoint, calls, carrier, host, raw, leg }
}

struct Called {
    endpoint: Endpoint,
    calls: mpsc::Receiver<IncomingCall>,
    /// The trunk's host.
    carrier: Raw,
    host: String,
    /// Who has called.
    raw: Raw,
    leg: SipLeg,
}

/// The next NOTIFY, answered: what it tells, and whether more is to come.
async fn told(raw: &mut Raw) -> (String, bool) {
    let notify = raw.next("NOTIFY").await;
    raw.answer(&notify, "200 OK", "").await;
    assert_eq!(header(&notify, "Event"), Some("refer"), "{notify}");
    let kind = header(&notify, "Content-Type").expect("Content-Type");
    assert!(kind.starts_with("message/sipfrag"), "{notify}");
    let over = header(&notify, "Subscription-State").is_some_and(|state| state.starts_with("terminated"));
    (body(&notify).trim().to_owned(), over)
}

/// Sends a REFER and returns the INVITE that comes of it, when the peer knows that it is on its way.
async fn referred(raw: &mut Raw, carrier: &mut Raw, headers: &str) -> String {
    raw.ask("REFER", headers, "", "SIP/2.0 202").await;
    assert_eq!(told(raw).await, ("SIP/2.0 100 Trying".to_owned(), false));
    carrier.next("INVITE").await
}

async fn over(leg: &mut SipLeg, raw: &mut Raw) {
    leg.hang_up().await;
    let bye = raw.next("BYE").await;
    raw.answer(&bye, "200 OK", "").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_is_handed_over_where_its_trunk_may_and_comes_back_without_an_answer() {
    let Called { endpoint, mut calls, mut carrier, host, mut raw, mut leg } = trunk_call("refer = true").await;
    // What may not be called is not, and nobody is asked where nobody is named.
    raw.ask("REFER", &format!("Refer-To: <sip:+88301@{host}>\r\n"), "", "SIP/2.0 403").await;
    raw.ask("REFER", "Refer-To: <sip:+49301@192.0.2.9>\r\n", "", "SIP/2.0 403").await;
    raw.ask("REFER", "", "", "SIP/2.0 400").await;
    let to = |number: &str| format!("Refer-To: <sip:{number}@{host}>\r\nReferred-By: <sip:raw@{host}>\r\n");
    let invite = referred(&mut raw, &mut carrier, &to("+49301")).await;
    assert!(invite.starts_with("INVITE sip:+49301@"), "{invite}");
    assert_eq!(header(&invite, "Referred-By"), Some(format!("<sip:raw@{host}>").as_str()));
    // One at a time.
    raw.ask("REFER", &to("+49302"), "", "SIP/2.0 491").await;
    carrier.answer(&invite, "180 Ringing", "").await;
    assert_eq!(told(&mut raw).await, ("SIP/2.0 180 Ringing".to_owned(), false));
    carrier.answer(&invite, "486 Busy Here", "").await;
    carrier.expect("ACK").await;
    assert_eq!(told(&mut raw).await, ("SIP/2.0 486 Busy Here".to_owned(), true));
    // The call is still here, and is handed over in the end.
    raw.ask("INFO", "Content-Type: application/dtmf-relay\r\n", "Signal=7\r\n", "SIP/2.0 200").await;
    event(&mut leg, |e| *e == LegEvent::Digit('7')).await;
    // A number at our own address is one of a trunk, and who wants no news gets none.
    let here = format!("Refer-To: <sip:+49302@{}>\r\nRefer-Sub: false\r\n", raw.target);
    let accepted = raw.ask("REFER", &here, "", "SIP/2.0 202").await;
    assert_eq!(header(&accepted, "Refer-Sub"), Some("false"));
    let invite = carrier.next("INVITE").await;
    assert!(invite.starts_with("INVITE sip:+49302@"), "{invite}");
    let alaw = sdp(4_002, "").replace("RTP/AVP 0 101", "RTP/AVP 8");
    carrier.answer_with(&invite, "200 OK", "Content-Type: application/sdp\r\n", &alaw).await;
    carrier.expect("ACK").await;
    let bye = loop {
        let message = raw.expect("").await;
        assert!(!body(&message).starts_with("SIP/2.0 200"), "it wants no news: {message}");
        if message.starts_with("BYE") {
            break message;
        }
    };
    raw.answer(&bye, "200 OK", "").await;
    let moved = event(&mut leg, |e| matches!(e, LegEvent::Moved(_))).await;
    assert_eq!(moved, LegEvent::Moved("+49302".to_owned()));
    let LegEvent::Format(format) = event(&mut leg, |e| matches!(e, LegEvent::Format(_))).await else { unreachable!() };
    assert_eq!(format.codec, Codec::Pcma);
    event(&mut leg, |e| *e == LegEvent::Connected).await;
    assert_eq!(leg.local_port(), Some(audio_port(&invite)));
    over(&mut leg, &mut carrier).await;
    within("both calls to be forgotten", || endpoint.calls() == 0).await;
    assert!(calls.try_recv().is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_hands_a_call_over_may_hang_up_at_once() {
    let Called { endpoint, calls: _calls, mut carrier, host, mut raw, mut leg } = trunk_call("refer = true").await;
    // Attended: the call that the target knows is named to it.
    let replaces = "?Replaces=a%40b%3Bto-tag%3D1%3Bfrom-tag%3D2";
    let invite = referred(&mut raw, &mut carrier, &format!("Refer-To: <sip:+49301@{host}{replaces}>\r\n")).await;
    assert_eq!(header(&invite, "Replaces"), Some("a@b;to-tag=1;from-tag=2"));
    raw.ask("BYE", "", "", "SIP/2.0 200").await;
    carrier.answer_with(&invite, "200 OK", "Content-Type: application/sdp\r\n", &sdp(4_002, "")).await;
    carrier.expect("ACK").await;
    event(&mut leg, |e| *e == LegEvent::Connected).await;
    assert_eq!(leg.local_port(), Some(audio_port(&invite)));
    within("the first call to be forgotten", || endpoint.calls() == 1).await;
    // The other one may hand it over in its turn. Nobody answers there, and nobody is left here.
    let tag = header(&invite, "From").and_then(|from| from.split(";tag=").nth(1)).expect("a tag").to_owned();
    let id = header(&invite, "Call-ID").expect("Call-ID").to_owned();
    let refer = |number: u32, method: &str, headers: &str| {
        format!(
            "{method} sip:t@{} SIP/2.0\r\nVia: SIP/2.0/UDP {host};branch=z9hG4bKsecond{number};rport\r\n\
             Max-Forwards: 70\r\nFrom: <sip:raw@{host}>;tag=raw\r\nTo: <sip:t@{host}>;tag={tag}\r\nCall-ID: {id}\r\n\
             CSeq: {number} {method}\r\nContact: <sip:raw@{host}>\r\n{headers}Content-Length: 0\r\n\r\n",
            carrier.target
        )
    };
    let away = refer(1, "REFER", &format!("Refer-To: <sip:+49302@{host}>\r\n"));
    let gone = refer(2, "BYE", "");
    carrier.send(&away).await;
    carrier.expect("SIP/2.0 202").await;
    told(&mut carrier).await;
    let invite = carrier.next("INVITE").await;
    carrier.send(&gone).await;
    carrier.expect("SIP/2.0 200").await;
    carrier.answer(&invite, "404 Not Found", "").await;
    carrier.expect("ACK").await;
    assert_eq!(event(&mut leg, |e| matches!(e, LegEvent::Closed(_))).await, LegEvent::Closed(LegEnd::Remote));
    within("both calls to be forgotten", || endpoint.calls() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_invite_takes_the_place_of_the_call_that_it_names() {
    let Called { endpoint, mut calls, carrier: _carrier, host: _host, mut raw, mut leg } = trunk_call("").await;
    let target = endpoint.local_udp().expect("bound");
    let named = |tag: &str| format!("Require: replaces\r\nReplaces: first;to-tag={tag};from-tag=raw\r\n");
    // What nobody knows cannot be replaced, nor what is answered where that is not meant.
    let known = named(&raw.remote_tag);
    for (headers, status) in [
        (named("guessed"), "481"),
        (known.replace("from-tag=raw", "from-tag=raw;early-only"), "486"),
        (known.replace(";from-tag=raw", ""), "400"),
        (format!("{known}{known}"), "400"),
    ] {
        let mut other = Raw::new(target, &format!("refused-{}-{}", status, headers.len())).await;
        other.ask("INVITE", &headers, &sdp(4_002, ""), &format!("SIP/2.0 {status}")).await;
        other.ack("").await;
    }
    let mut second = Raw::new(target, "second").await;
    let ok = second.ask("INVITE", &known, &sdp(4_002, ""), "SIP/2.0 200").await;
    second.ack("").await;
    // The agent's leg goes on, with the other one.
    let moved = event(&mut leg, |e| matches!(e, LegEvent::Moved(_))).await;
    assert!(matches!(&moved, LegEvent::Moved(with) if with.starts_with("sip:raw@")), "{moved:?}");
    let bye = raw.next("BYE").await;
    raw.answer(&bye, "200 OK", "").await;
    event(&mut leg, |e| *e == LegEvent::Connected).await;
    assert_eq!(leg.local_port(), Some(audio_port(&ok)));
    second.ask("INFO", "Content-Type: application/dtmf-relay\r\n", "Signal=7\r\n", "SIP/2.0 200").await;
    event(&mut leg, |e| *e == LegEvent::Digit('7')).await;
    over(&mut leg, &mut second).await;
    within("both calls to be forgotten", || endpoint.calls() == 0).await;
    assert!(calls.try_recv().is_err(), "it is no call of its own");

    // Without a trunk nobody has proven anything.
    let (endpoint, mut calls) = start(loopback()).await;
    let (raw, _leg) = wire::call(&endpoint, &mut calls, "first", 4_000).await;
    let mut other = Raw::new(endpoint.local_udp().expect("bound"), "stranger").await;
    other.ask("INVITE", &named(&raw.remote_tag), &sdp(4_002, ""), "SIP/2.0 403").await;
    other.ack("").await;
}
