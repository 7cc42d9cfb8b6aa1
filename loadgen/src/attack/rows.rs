//! The attacks, one by one. Rates and numbers are those of a scanner that means it; `scale` makes less of them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpSocket, UdpSocket};
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;

use super::bed::{Bed, PASSWORD, PATIENCE, Site, USER};
use super::flood::{Flood, source, status};
use super::noise::{DESCRIPTION, Noise};
use super::verdict::{Figure, LATE, MEMORY, Must, Options};
use crate::caller::call::CallError;
use crate::caller::sip::{Caller, Config, Credentials, answer_challenge};
use crate::clock;
use crate::wire::codec::Codec;

/// Addresses that a flood comes from.
const SOURCES: usize = 64;
/// What the addresses of the flood of half-open calls begin with; see [`source`].
const SOURCE: &str = "127.2.";
/// `[sip] max_calls`, for shares of it.
const PLACES: f64 = 1_000.0;
const NONE: Must = Must::AtMost(0.0);
/// The call whose one right answer is sent again and again.
const REPLAYED: &str = "replayed";
/// Memory for each connection of a kind that comes and says nothing, KiB; not all of them find a place.
const IDLE_CONNECTION: f64 = 48.0;

/// A minute as it shows in answers, which may be late by turns.
const MINUTE: Duration = Duration::from_secs(58);

/// Nothing but time: what the calls of the other rows have without an attack.
pub(super) async fn control(options: &Options) -> Result<Vec<Figure>, CallError> {
    let bed = Bed::start(options, Site::default()).await?;
    clock::sleep_until(clock::now() + options.lasts).await;
    // Late packets here are the computer's, and told for the other rows.
    let figures = bed.end().await.into_iter();
    Ok(figures
        .map(|figure| if figure.what == LATE { Figure { must: Must::Nothing, ..figure } } else { figure })
        .collect())
}

/// 5,000 malformed and 2,000 unauthenticated messages a second.
pub(super) async fn malformed(options: &Options) -> Result<Vec<Figure>, CallError> {
    let bed = Bed::start(options, Site { users: true, ..Site::default() }).await?;
    let (flood, sip) = (Flood::bind(1, SOURCES).await?, bed.sip);
    let mut noise = Noise::new(1, sip.to_string());
    let mut made = 0_u64;
    let back = flood
        .send(7_000.0 * options.scale, options.lasts, |_| {
            made += 1;
            (if made % 7 < 5 { noise.malformed() } else { noise.unauthenticated() }, sip)
        })
        .await;
    let mut figures = vec![
        Figure::new("messages sent", back.sent as f64, Must::AtLeast(1.0)),
        Figure::new("of them answered", back.count(|status| status > 0), Must::Nothing),
        // OPTIONS are answered to everybody.
        Figure::new("calls that the flood got", calls_of(&bed, "192.0.2.1").await?, NONE),
    ];
    figures.extend(bed.end().await);
    Ok(figures)
}

/// 100 INVITEs a second without description, never acknowledged; a trunk calls meanwhile.
pub(super) async fn half_open(options: &Options) -> Result<Vec<Figure>, CallError> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(CallError::io("bind an agent"))?;
    let agent = listener.local_addr().map_err(CallError::io("bind an agent"))?;
    let counter = Arc::new(AtomicU64::new(0));
    let counting = counter.clone();
    let _dialled = AbortOnDropHandle::new(tokio::spawn(async move {
        while listener.accept().await.is_ok() {
            counting.fetch_add(1, Ordering::Relaxed);
        }
    }));
    let trunk = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 9));
    let more = format!(
        "[[sip.trunk]]\nname = \"carrier\"\nhost = \"{trunk}:5999\"\nprefixes = [\"+49\"]\n\
         [agent.counted]\nurl = \"ws://{agent}/\"\n"
    );
    let site = Site { more, prober: Some(trunk), ..Site::default() };
    // Half-open calls hold media ports as well; what is asked is who gets places.
    let bed = Bed::start_for(options, site, options.calls + PLACES as usize).await?;
    let (flood, sip) = (Flood::bind(2, SOURCES).await?, bed.sip);
    let mut noise = Noise::new(2, sip.to_string());
    let looking = async {
        let (mut most, until) = (0.0_f64, clock::now() + options.lasts);
        while clock::now() < until {
            most = most.max(bed.gateway.half_open(SOURCE).await.unwrap_or(0) as f64);
            clock::sleep_until(clock::now() + Duration::from_millis(500)).await;
        }
        most
    };
    let sending = flood
        .send(100.0 * options.scale, options.lasts, |_| (noise.request("INVITE", "counted", "", "").into_bytes(), sip));
    let (back, most) = tokio::join!(sending, looking);
    let mut figures = vec![
        Figure::new("INVITEs without description sent", back.sent as f64, Must::AtLeast(1.0)),
        Figure::new("of them refused", back.count(|status| status >= 400), Must::Nothing),
        Figure::new("places that the flood left, %", 100.0 * (1.0 - most / PLACES), Must::AtLeast(90.0)),
        Figure::new("agents dialled", counter.load(Ordering::Relaxed) as f64, NONE),
    ];
    figures.extend(bed.end().await);
    Ok(figures)
}

/// 10,000 packets a second at every media port, sound and digits of strangers; calls pause and hold.
pub(super) async fn rtp(options: &Options) -> Result<Vec<Figure>, CallError> {
    let bed = Bed::start(options, Site { pauses: true, ..Site::default() }).await?;
    let flood = Flood::bind(3, SOURCES / 4).await?;
    let mut noise = Noise::new(3, String::new());
    let (mut ports, host) = (bed.rtp.clone().cycle(), bed.sip.ip());
    let back = flood
        .send(10_000.0 * options.scale, options.lasts, |_| {
            (noise.rtp(), SocketAddr::new(host, ports.next().unwrap_or(9)))
        })
        .await;
    // They are counted when the calls' tasks come to them.
    let deadline = clock::now() + PATIENCE;
    let (metrics, discarded) = loop {
        let metrics = bed.metrics().await?;
        let discarded = metrics.total("antiphon_rtp_discarded_total");
        if discarded > 0.0 || clock::now() > deadline {
            break (metrics, discarded);
        }
        clock::sleep_until(clock::now() + Duration::from_millis(100)).await;
    };
    let mut figures = vec![
        Figure::new("packets sent to all media ports", back.sent as f64, Must::AtLeast(1.0)),
        Figure::new("of them dropped at calls", discarded, Must::AtLeast(1.0)),
        Figure::new("packets leaked to strangers", back.count(|_| true), NONE),
        // A digit or a voice that was taken for the caller's would have cut a turn off.
        Figure::new("turns cut off by what was injected", metrics.total("antiphon_interruptions_total"), NONE),
    ];
    figures.extend(bed.end().await);
    Ok(figures)
}

/// 1,000 guesses a second, what was right once again and again, and a trunk that asks for the password of a foreign realm.
pub(super) async fn digest(options: &Options) -> Result<Vec<Figure>, CallError> {
    let carrier = UdpSocket::bind("127.0.0.8:0").await.map_err(CallError::io("bind a carrier"))?;
    let host = carrier.local_addr().map_err(CallError::io("bind a carrier"))?;
    let more = format!(
        "[[sip.trunk]]\nname = \"carrier\"\nhost = \"{host}\"\nprefixes = [\"+49\"]\nusername = \"us\"\n\
         password = \"what-the-carrier-knows\"\nrealm = \"carrier.example\"\n"
    );
    let bed = Bed::start(options, Site { more, users: true, ..Site::default() }).await?;
    let sip = bed.sip;
    let answering = AbortOnDropHandle::new(tokio::spawn(foreign_realm(carrier)));
    // The destination is allowed; what comes of it shows at the carrier.
    let _ = bed.gateway.place("+49301234567", None).await;

    let flood = Flood::bind(4, 4).await?;
    let mut noise = Noise::new(4, sip.to_string());
    let mut nonces = Vec::new();
    for turn in 0..4 {
        let asked = noise.request_of(&guessed_call(turn), "INVITE", "silent", "", DESCRIPTION);
        let challenge = flood.ask(turn, &asked, sip).await.unwrap_or_default();
        nonces.push(nonce(&challenge).unwrap_or_default());
    }
    // An authorisation that is right, once. Replays come from another port of the same address: what answers the right one
    // again and again is not theirs.
    let (genuine, replay) = (Flood::bind(5, 1).await?, Flood::bind(5, 1).await?);
    let asked = noise.request_of(REPLAYED, "INVITE", "silent", "", DESCRIPTION);
    let challenge = genuine.ask(0, &asked, sip).await.unwrap_or_default();
    let uri = format!("sip:silent@{sip}");
    let account = Credentials { username: USER.to_owned(), password: PASSWORD.to_owned() };
    let right = challenge
        .lines()
        .find_map(|line| line.strip_prefix("WWW-Authenticate: "))
        .and_then(|challenge| answer_challenge(challenge, &account, "INVITE", &uri));
    let right = format!("Authorization: {}\r\n", right.unwrap_or_default());
    let right_one = noise.request_of(REPLAYED, "INVITE", "silent", &right, DESCRIPTION);
    let accepted_once = status(genuine.ask(0, &right_one, sip).await.unwrap_or_default().as_bytes());
    let mut again = Noise::new(5, sip.to_string());
    let replaying = replay.send(20.0, options.lasts, |_| {
        (again.request_of(REPLAYED, "INVITE", "silent", &right, DESCRIPTION).into_bytes(), sip)
    });
    let mut guess = 0_u64;
    let guessing = flood.send(1_000.0 * options.scale, options.lasts, |turn| {
        guess += 1;
        let nonce = &nonces[turn];
        let lines = format!(
            "Authorization: Digest username=\"{USER}\", realm=\"antiphon\", nonce=\"{nonce}\", uri=\"sip:silent@{sip}\", \
             response=\"{guess:032x}\", algorithm=MD5\r\n"
        );
        (noise.request_of(&guessed_call(turn), "INVITE", "silent", &lines, DESCRIPTION).into_bytes(), sip)
    });
    let (guessed, replayed) = tokio::join!(guessing, replaying);
    // One that was never asked has got no password either.
    let foreign = if answering.is_finished() { answering.await.unwrap_or(1) } else { 0 };
    let is_in = |status: u16| status >= 180 && !matches!(status, 401 | 403 | 407 | 503);
    let mut figures = vec![
        Figure::new("guesses sent", guessed.sent as f64, Must::AtLeast(1.0)),
        Figure::new("evaluated of one source in a minute", guessed.most_in(MINUTE), Must::AtMost(10.0)),
        // None would say that nothing was tried.
        Figure::new("evaluated at all", guessed.count(|status| status == 403), Must::AtLeast(1.0)),
        Figure::new("guesses accepted", guessed.count(is_in), NONE),
        Figure::new(
            "the right answer was taken",
            f64::from(u8::from((200..300).contains(&accepted_once))),
            Must::AtLeast(1.0),
        ),
        Figure::new("replays sent", replayed.sent as f64, Must::AtLeast(1.0)),
        Figure::new("replays accepted", replayed.count(is_in), NONE),
        Figure::new("passwords answered to a foreign realm", f64::from(foreign), NONE),
    ];
    figures.extend(bed.end().await);
    Ok(figures)
}

/// A carrier that is busy, and counts who called.
async fn busy(socket: UdpSocket, invited: Arc<AtomicU64>) {
    let mut buffer = vec![0; 8_192];
    while let Ok((length, from)) = socket.recv_from(&mut buffer).await {
        let request = String::from_utf8_lossy(&buffer[..length]).into_owned();
        let line = match request.split(' ').next() {
            Some("INVITE") => {
                invited.fetch_add(1, Ordering::Relaxed);
                "486 Busy Here"
            }
            Some("ACK") => continue,
            _ => "200 OK",
        };
        let _ = socket.send_to(response(&request, line, "").as_bytes(), from).await;
    }
}

/// The response `line` to `request`, with further `headers`.
fn response(request: &str, line: &str, headers: &str) -> String {
    let same = |line: &&str| ["Via:", "From:", "To:", "Call-ID:", "CSeq:"].iter().any(|name| line.starts_with(name));
    let same: String = request.lines().filter(same).map(|line| format!("{line}\r\n")).collect();
    format!("SIP/2.0 {line}\r\n{same}{headers}Content-Length: 0\r\n\r\n")
}

/// A carrier that asks for a password of another realm; how often it got one. Ends when the caller has given up.
async fn foreign_realm(socket: UdpSocket) -> u32 {
    let mut buffer = vec![0; 8_192];
    loop {
        let Ok((length, from)) = socket.recv_from(&mut buffer).await else { return 0 };
        let request = String::from_utf8_lossy(&buffer[..length]).into_owned();
        let answer = match request.split(' ').next() {
            Some("INVITE")
                if request.contains("\r\nAuthorization:") || request.contains("\r\nProxy-Authorization:") =>
            {
                return 1;
            }
            Some("INVITE") => {
                let challenge =
                    "WWW-Authenticate: Digest realm=\"elsewhere.example\", nonce=\"abc\", algorithm=MD5\r\n";
                response(&request, "401 Unauthorized", challenge)
            }
            Some("ACK") => return 0,
            _ => response(&request, "200 OK", ""),
        };
        let _ = socket.send_to(answer.as_bytes(), from).await;
    }
}

/// A call of a carrier's own, in which it may send us elsewhere.
struct Dialog {
    socket: UdpSocket,
    gateway: SocketAddr,
    own: SocketAddr,
    tag: String,
    sequence: u32,
}

impl Dialog {
    /// Calls from this address.
    async fn open(from: IpAddr, gateway: SocketAddr) -> Result<Dialog, CallError> {
        let socket = UdpSocket::bind((from, 0)).await.map_err(CallError::io("bind a carrier"))?;
        let own = socket.local_addr().map_err(CallError::io("bind a carrier"))?;
        let mut dialog = Dialog { socket, gateway, own, tag: String::new(), sequence: 0 };
        let answer = dialog.ask("INVITE", "Content-Type: application/sdp\r\n", DESCRIPTION).await.unwrap_or_default();
        let to = answer.lines().find(|line| line.starts_with("To:")).unwrap_or_default();
        dialog.tag = to.split_once(";tag=").map(|(_, tag)| format!(";tag={tag}")).unwrap_or_default();
        let ack = dialog.request("ACK", "", "");
        let _ = dialog.socket.send_to(ack.as_bytes(), gateway).await;
        match status(answer.as_bytes()) {
            200 => Ok(dialog),
            _ => Err(CallError::BadAnswer(format!(
                "a call of the carrier: {}",
                answer.lines().next().unwrap_or_default()
            ))),
        }
    }

    fn request(&self, method: &str, lines: &str, body: &str) -> String {
        let Dialog { gateway, own, tag, sequence, .. } = self;
        format!(
            "{method} sip:silent@{gateway} SIP/2.0\r\nVia: SIP/2.0/UDP {own};branch=z9hG4bK{sequence}{method}{};rport\r\n\
             Max-Forwards: 70\r\nFrom: <sip:carrier@{own}>;tag=c\r\nTo: <sip:silent@{gateway}>{tag}\r\n\
             Call-ID: carrier-{}\r\nCSeq: {sequence} {method}\r\nContact: <sip:carrier@{own}>\r\n{lines}\
             Content-Length: {}\r\n\r\n{body}",
            own.port(),
            own.port(),
            body.len()
        )
    }

    /// Sends a request, again after a second, and gives its final response. Requests that come meanwhile are answered.
    async fn ask(&mut self, method: &str, lines: &str, body: &str) -> Option<String> {
        self.sequence += 1;
        let (request, number) = (self.request(method, lines, body), format!("CSeq: {} {method}", self.sequence));
        let answered = async {
            let mut buffer = vec![0; 8_192];
            loop {
                let (length, from) = self.socket.recv_from(&mut buffer).await.ok()?;
                let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
                match status(text.as_bytes()) {
                    200.. if text.lines().any(|line| line == number) => return Some(text),
                    0 if !text.starts_with("ACK ") => {
                        let _ = self.socket.send_to(response(&text, "200 OK", "").as_bytes(), from).await;
                    }
                    _ => {}
                }
            }
        };
        let mut answered = std::pin::pin!(answered);
        for _ in 0..5 {
            self.socket.send_to(request.as_bytes(), self.gateway).await.ok()?;
            if let Ok(answer) = tokio::time::timeout(Duration::from_secs(1), &mut answered).await {
                return answer;
            }
        }
        None
    }
}

/// 100 destinations that the trunk's rules do not allow: by the API, by transfers of a call, and by REFER, of strangers and in a
/// call of the trunk, which may send us elsewhere.
pub(super) async fn toll(options: &Options) -> Result<Vec<Figure>, CallError> {
    let carrier = UdpSocket::bind("127.0.0.8:0").await.map_err(CallError::io("bind a carrier"))?;
    let host = carrier.local_addr().map_err(CallError::io("bind a carrier"))?;
    let more = format!("[[sip.trunk]]\nname = \"carrier\"\nhost = \"{host}\"\nprefixes = [\"+49\"]\nrefer = true\n");
    let invited = Arc::new(AtomicU64::new(0));
    let _carrying = AbortOnDropHandle::new(tokio::spawn(busy(carrier, invited.clone())));
    let bed = Bed::start(options, Site { more, ..Site::default() }).await?;
    let forbidden: Vec<String> = (0..100)
        .map(|n| match n % 10 {
            7 => format!("sip:+4930{n}@192.0.2.7"),
            8 => format!("sip:+88{n}1234@{host}"),
            9 => format!("+49;phone-context=+1{n}"),
            country => format!("+{}{n:02}1234567", [1, 7, 88, 23, 252, 960, 675][country]),
        })
        .collect();
    let (mut placed, mut transferred) = (0, 0);
    for to in &forbidden {
        placed += usize::from(bed.gateway.place(to, None).await.is_ok());
        placed += usize::from(bed.gateway.place(to, Some("carrier")).await.is_ok());
        if let Some(call) = bed.calls.first() {
            for mode in ["blind", "attended"] {
                let body = json!({ "to": to, "mode": mode });
                // It is taken and fails: what counts is what the carrier sees.
                let taken = bed.gateway.post(&format!("v1/calls/{call}/transfer"), &body).await;
                transferred += usize::from(taken.is_ok());
            }
        }
    }
    let flood = Flood::bind(6, 1).await?;
    let (mut noise, mut next, sip) = (Noise::new(6, bed.sip.to_string()), forbidden.iter().cycle(), bed.sip);
    let back = flood
        .send(50.0, Duration::from_secs(2), |_| {
            let to = next.next().map_or("", String::as_str);
            let to = if to.starts_with("sip:") { to.to_owned() } else { format!("sip:{to}@{host}") };
            (noise.request("REFER", "silent", &format!("Refer-To: <{to}>\r\n"), "").into_bytes(), sip)
        })
        .await;
    let deadline = clock::now() + PATIENCE;
    let mut dialog = loop {
        // A busy gateway may refuse it at first.
        match Dialog::open(host.ip(), sip).await {
            Ok(dialog) => break dialog,
            Err(error) if clock::now() > deadline => return Err(error),
            Err(_) => clock::sleep_until(clock::now() + Duration::from_millis(100)).await,
        }
    };
    let (mut refused, mut followed) = (0, 0);
    for (n, to) in forbidden.iter().enumerate() {
        let to = match (to.starts_with("sip:"), n % 2 == 0) {
            (true, _) => to.clone(),
            // At the gateway, which makes it one of a trunk, or without a host.
            (false, true) => format!("sip:{to}@{sip}"),
            (false, false) => format!("tel:{to}"),
        };
        let answer = dialog.ask("REFER", &format!("Refer-To: <{to}>\r\n"), "").await.unwrap_or_default();
        match status(answer.as_bytes()) {
            200..300 => followed += 1,
            400.. => refused += 1,
            _ => {}
        }
    }
    let dialled = invited.load(Ordering::Relaxed);
    // What is allowed is followed, so it is the rules that refused the others.
    let refer = format!("Refer-To: <sip:+49301234567@{sip}>\r\nRefer-Sub: false\r\n");
    let taken = status(dialog.ask("REFER", &refer, "").await.unwrap_or_default().as_bytes());
    let deadline = clock::now() + PATIENCE;
    while invited.load(Ordering::Relaxed) == dialled && clock::now() < deadline {
        clock::sleep_until(clock::now() + Duration::from_millis(20)).await;
    }
    let by_refer = invited.load(Ordering::Relaxed) - dialled;
    let before = invited.load(Ordering::Relaxed);
    let _ = dialog.ask("BYE", "", "").await;
    // And one that is allowed gets there: the carrier was listening. A busy gateway may refuse it at first.
    let deadline = clock::now() + PATIENCE;
    while invited.load(Ordering::Relaxed) == before && clock::now() < deadline {
        let _ = bed.gateway.place("+49301234567", None).await;
        let seen = clock::now() + Duration::from_secs(3);
        while invited.load(Ordering::Relaxed) == before && clock::now() < seen {
            clock::sleep_until(clock::now() + Duration::from_millis(20)).await;
        }
    }
    let allowed = invited.load(Ordering::Relaxed) - before;
    let referred: f64 = back.count(|status| (200..300).contains(&status));
    let mut figures = vec![
        Figure::new("forbidden destinations", forbidden.len() as f64, Must::Nothing),
        Figure::new("accepted by the API", placed as f64, NONE),
        Figure::new("transfers that were tried", transferred as f64, Must::Nothing),
        Figure::new("REFERs of a stranger accepted", referred, NONE),
        Figure::new("REFERs in a call of the trunk refused", f64::from(refused), Must::AtLeast(forbidden.len() as f64)),
        Figure::new("REFERs in a call of the trunk followed", f64::from(followed), NONE),
        Figure::new("one to an allowed destination accepted", f64::from(u8::from(taken == 202)), Must::AtLeast(1.0)),
        Figure::new("INVITEs that reached the carrier", dialled as f64, NONE),
        Figure::new("of an allowed destination, by REFER", by_refer as f64, Must::AtLeast(1.0)),
        Figure::new("of an allowed destination, by the API", allowed as f64, Must::AtLeast(1.0)),
    ];
    figures.extend(bed.end().await);
    Ok(figures)
}

/// 8,000 connections of each kind that say next to nothing: half a head, half a body, an idle WebSocket, half a SIP message.
pub(super) async fn slow(options: &Options) -> Result<Vec<Figure>, CallError> {
    let _ = rlimit::increase_nofile_limit(u64::MAX);
    let bed = Bed::start(options, Site::default()).await?;
    let each = ((8_000.0 * options.scale) as usize).max(1);
    let kinds: [(&str, SocketAddr, String); 4] = [
        ("half a head", bed.http, format!("GET /v1/calls HTTP/1.1\r\nHost: {}\r\nX-Slow: ", bed.http)),
        (
            "half a body",
            bed.http,
            format!(
                "POST /v1/calls HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n{{",
                bed.http
            ),
        ),
        (
            "an idle WebSocket",
            bed.http,
            format!(
                "GET /v1/audio/speech/stream HTTP/1.1\r\nHost: {}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                 Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
                bed.http
            ),
        ),
        ("half a SIP message", bed.sip, format!("INVITE sip:silent@{} SIP/2.0\r\nVia: SIP/2.0/TCP ", bed.sip)),
    ];
    let mut figures = Vec::new();
    for (net, (kind, target, words)) in kinds.into_iter().enumerate() {
        let mut opening = JoinSet::new();
        for n in 0..each {
            let (words, address) = (words.clone(), source(10 + net as u8, n));
            opening.spawn(async move {
                let socket = TcpSocket::new_v4().ok()?;
                socket.bind((address, 0).into()).ok()?;
                let connected = tokio::time::timeout(Duration::from_secs(5), socket.connect(target)).await;
                let mut stream = connected.ok()?.ok()?;
                stream.write_all(words.as_bytes()).await.ok()?;
                Some(stream)
            });
        }
        let mut held = Vec::new();
        while let Some(opened) = opening.join_next().await {
            held.extend(opened.ok().flatten());
        }
        figures.push(Figure::new(format!("connections with {kind}"), held.len() as f64, Must::AtLeast(1.0)));
        // They stay, while telephones and health checks come and go.
        clock::sleep_until(clock::now() + options.lasts / 4).await;
        drop(held);
    }
    let connections = each as f64 * IDLE_CONNECTION / 1_024.0;
    figures.extend(bed.end().await.into_iter().map(|figure| match (figure.what.as_str(), figure.must) {
        (MEMORY, Must::AtMost(most)) => Figure { must: Must::AtMost((most + connections).floor()), ..figure },
        _ => figure,
    }));
    Ok(figures)
}

/// 1,000 calls where the process may open 1,024 files. The gateway itself needs some of them, so that there are at least 256.
pub(super) async fn descriptors(options: &Options) -> Result<Vec<Figure>, CallError> {
    let _ = rlimit::increase_nofile_limit(u64::MAX);
    let (wanted, files) = ((1_000.0 * options.scale).max(100.0) as usize, (1_024.0 * options.scale).max(256.0) as u64);
    // By the shell itself: `prlimit` is not everywhere.
    let site = Site { prefix: format!("sh -c 'ulimit -n {files}; exec \"$@\"' sh"), ..Site::default() };
    let bed = Bed::start_for(options, site, wanted + options.calls).await?;
    let mut dialling = JoinSet::new();
    let began = clock::now();
    for n in 0..wanted {
        let target = format!("sip:silent@{}", bed.sip);
        dialling.spawn(async move {
            // 100 a second: what is measured is what there is room for.
            clock::sleep_until(began + Duration::from_millis(10) * n as u32).await;
            let address = source(20, n);
            let config = Config { address, codecs: vec![Codec::Pcmu], patience: PATIENCE, ..Config::default() };
            Caller::bind(config).await?.call(&target).await
        });
    }
    let (mut up, mut refused, mut silent) = (Vec::new(), 0, 0);
    while let Some(dialled) = dialling.join_next().await {
        match dialled {
            Ok(Ok(call)) => up.push(call),
            Ok(Err(CallError::Refused { code: 503, .. })) => refused += 1,
            _ => silent += 1,
        }
    }
    let mut figures = vec![
        Figure::new("calls wanted", wanted as f64, Must::Nothing),
        Figure::new("calls up", up.len() as f64, Must::AtLeast(1.0)),
        Figure::new("refused with 503", f64::from(refused), Must::AtLeast(1.0)),
        Figure::timed("neither up nor refused", f64::from(silent), NONE),
    ];
    drop(up);
    // While places were taken the genuine caller was refused like others, which is what must happen.
    figures.extend(bed.end().await.into_iter().map(|figure| match figure.what.as_str() {
        "genuine INVITEs refused" => Figure { must: Must::Nothing, ..figure },
        _ => figure,
    }));
    Ok(figures)
}

/// The call that the guesses from socket `turn` are for: a nonce is good for one.
fn guessed_call(turn: usize) -> String {
    format!("guessed-{turn}")
}

/// Live calls whose caller mentions `name`.
async fn calls_of(bed: &Bed, name: &str) -> Result<f64, CallError> {
    Ok(f64::from(u8::from(bed.gateway.find_call(name).await?.is_some())))
}

fn nonce(response: &str) -> Option<String> {
    Some(response.split("nonce=\"").nth(1)?.split('"').next()?.to_owned())
}
