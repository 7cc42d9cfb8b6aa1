//! Transactions and dialogs: what a stranger sends in the middle of calls, to an endpoint that runs, over a real socket.
//!
//! An input is a script: steps between lines of `%%`. A step that begins with `!` is what the gateway does meanwhile (`!ringing`,
//! `!accept`, `!refuse`, `!hold`, `!resume`, `!transfer`, `!hangup`, `!dial`); any other is a datagram, in which these are replaced:
//!
//! | | by |
//! | --- | --- |
//! | `<gw>`, `<me>` | the addresses of the gateway and of who sends |
//! | `<n>` | the number of the step: a branch of its own |
//! | `<tag>` | `;tag=...` of the gateway, as its last answer had it |
//! | `<echo>`, `<invite>` | the lines of the gateway's last request, and of its last INVITE, that an answer repeats |
//! | `<swap>` | `From`, `To` and `Call-ID` of a request in the dialog of the gateway's last request |
//! | `<len>` | how many bytes there are behind the empty line |
//!
//! Each input has an endpoint of its own, so that one alone can be run again. No task may panic, and the endpoint has to answer
//! somebody else when the script is over.

use std::cell::Cell;
use std::net::SocketAddr;
use std::sync::Once;
use std::time::Duration;

use antiphon::media::leg::{LegEvent, MediaLeg};
use antiphon::media::sip::SipLeg;
use antiphon::sip::{DialRequest, Endpoint, IncomingCall, RtpConfig, SipConfig};
use tokio::net::UdpSocket;
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Steps of a script that are done.
const STEPS: usize = 40;
/// How long an answer may take where there is one. What comes later meets the next step, as it does on a network.
const MOMENT: Duration = Duration::from_millis(2);
/// How long the last answer may take, on the busiest computer.
const PATIENCE: Duration = Duration::from_secs(30);

thread_local! {
    /// Panics of this thread, on which all tasks of an input run.
    static PANICS: Cell<u64> = const { Cell::new(0) };
}

/// A task's panic ends the task and nothing else: it has to be counted where it happens.
fn count_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            PANICS.with(|panics| panics.set(panics.get() + 1));
            before(panic);
        }));
    });
}

/// Runs a script.
pub(crate) fn converse(bytes: &[u8]) {
    count_panics();
    let before = PANICS.with(Cell::get);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(talk(&String::from_utf8_lossy(bytes), MOMENT));
    runtime.shutdown_background();
    assert_eq!(PANICS.with(Cell::get), before, "a task of the endpoint panicked");
}

/// Gives the first lines of what came back. `moment`: how long an answer may take.
async fn talk(script: &str, moment: Duration) -> Vec<String> {
    let (mut peer, endpoint, mut calls) = start().await;
    let mut lines: Vec<mpsc::Sender<Order>> = Vec::new();
    let mut waiting: Vec<IncomingCall> = Vec::new();
    for (n, step) in script.split("%%").take(STEPS).enumerate() {
        let step = step.trim_start_matches(['\r', '\n']);
        let order = match step.trim_end() {
            "!ringing" => {
                waiting.iter().for_each(IncomingCall::ringing);
                None
            }
            "!refuse" => {
                waiting.drain(..).for_each(|call| call.reject(486, "Busy Here"));
                None
            }
            "!accept" => {
                for call in waiting.drain(..) {
                    let (orders, given) = mpsc::channel(4);
                    lines.push(orders);
                    tokio::spawn(async move {
                        if let Ok(leg) = call.accept().await {
                            attend(leg, given).await;
                        }
                    });
                }
                None
            }
            "!dial" => {
                let (orders, given) = mpsc::channel(4);
                lines.push(orders);
                let (endpoint, to) = (endpoint.clone(), "+49301".to_owned());
                tokio::spawn(async move {
                    if let Ok(leg) = endpoint.dial(DialRequest { to, ..DialRequest::default() }).await {
                        attend(leg, given).await;
                    }
                });
                None
            }
            "!hold" => Some(Order::Hold(true)),
            "!resume" => Some(Order::Hold(false)),
            "!transfer" => Some(Order::Transfer),
            "!hangup" => Some(Order::HangUp),
            _ => {
                peer.say(n, step).await;
                None
            }
        };
        if let Some(order) = order {
            // overflow: drops: a line that does not listen is left alone
            for line in &lines {
                let _ = line.try_send(order);
            }
        }
        peer.listen(moment).await;
        while let Ok(call) = calls.try_recv() {
            waiting.push(call);
        }
    }
    assert!(!endpoint.is_broken(), "a part of the endpoint is gone");
    answers_others(peer.gateway).await;
    peer.heard
}

/// An endpoint with one trunk, at the stranger's own address, who may send it elsewhere and knows a password.
async fn start() -> (Peer, Endpoint, mpsc::Receiver<IncomingCall>) {
    let socket = UdpSocket::bind("127.0.0.1:0").await.expect("a free port");
    let own = socket.local_addr().expect("bound");
    let trunk = format!(
        "name = \"t\"\nhost = \"{own}\"\nprefixes = [\"+49\"]\nrefer = true\nusername = \"us\"\npassword = \"long enough\"\n"
    );
    let config = SipConfig {
        udp: Some(([127, 0, 0, 1], 0).into()),
        tcp: None,
        trunk: vec![toml::from_str(&trunk).expect("valid")],
        ..SipConfig::default()
    };
    let (sender, calls) = mpsc::channel(16);
    let endpoint = Endpoint::start(config, RtpConfig::default(), sender).await.expect("it starts");
    let gateway = endpoint.local_udp().expect("bound");
    (
        Peer {
            socket,
            gateway,
            own,
            tag: String::new(),
            asked: String::new(),
            invited: String::new(),
            heard: Vec::new(),
        },
        endpoint,
        calls,
    )
}

#[derive(Clone, Copy)]
enum Order {
    Hold(bool),
    Transfer,
    HangUp,
}

/// What the gateway's side of a call does.
async fn attend(mut leg: SipLeg, mut orders: mpsc::Receiver<Order>) {
    if leg.attach().await.is_err() {
        return;
    }
    loop {
        tokio::select! {
            event = leg.recv() => if matches!(event, LegEvent::Closed(_)) {
                return;
            },
            order = orders.recv() => match order {
                Some(Order::Hold(hold)) => {
                    let _ = leg.hold(hold);
                }
                Some(Order::Transfer) => {
                    let _ = leg.transfer("+49302", false, None);
                }
                Some(Order::HangUp) => return leg.hang_up().await,
                None => return,
            },
        }
    }
}

/// The stranger.
struct Peer {
    socket: UdpSocket,
    gateway: SocketAddr,
    own: SocketAddr,
    /// Of the gateway's last answer.
    tag: String,
    /// The gateway's last request, and its last INVITE.
    asked: String,
    invited: String,
    /// First lines of all that came.
    heard: Vec<String>,
}

impl Peer {
    async fn say(&self, n: usize, step: &str) {
        let line = |name: &str| line(&self.asked, name);
        let behind = |name: &str| line(name).split_once(':').map(|(_, value)| value.to_owned()).unwrap_or_default();
        let ours = if line("To:").contains(";tag=") { "" } else { ";tag=peer" };
        let (echo, invite) = (repeated(&self.asked), repeated(&self.invited));
        let swap = format!("From:{}{ours}\r\nTo:{}\r\n{}", behind("To:"), behind("From:"), line("Call-ID:"));
        let (own, gateway, n) = (self.own.to_string(), self.gateway.to_string(), n.to_string());
        let mut text = step.to_owned();
        for (name, value) in [
            ("<echo>", &echo),
            ("<invite>", &invite),
            ("<swap>", &swap),
            ("<tag>", &self.tag),
            ("<me>", &own),
            ("<gw>", &gateway),
            ("<n>", &n),
        ] {
            text = text.replace(name, value);
        }
        let text = text.replace("\r\n", "\n").replace('\n', "\r\n");
        let length = text.find("\r\n\r\n").map_or(0, |at| text.len() - at - 4);
        // What is larger than a datagram is not sent.
        let _ = self.socket.send_to(text.replace("<len>", &length.to_string()).as_bytes(), self.gateway).await;
    }

    /// Takes what comes, until nothing does for a moment.
    async fn listen(&mut self, moment: Duration) {
        let mut buffer = vec![0; 65_536];
        for _ in 0..16 {
            let Ok(Ok((length, _))) = timeout(moment, self.socket.recv_from(&mut buffer)).await else { return };
            let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
            self.heard.push(text.lines().next().unwrap_or_default().to_owned());
            if !text.starts_with("SIP/2.0 ") {
                if text.starts_with("INVITE ") {
                    self.invited.clone_from(&text);
                }
                self.asked = text;
            } else if let Some((_, tag)) =
                text.lines().find(|line| line.starts_with("To:")).and_then(|to| to.split_once(";tag="))
            {
                self.tag = format!(";tag={tag}");
            }
        }
    }
}

/// The first line of `text` that begins so.
fn line(text: &str, name: &str) -> String {
    text.lines().find(|line| line.starts_with(name)).unwrap_or_default().to_owned()
}

/// What an answer to `request` repeats, with a tag of ours.
fn repeated(request: &str) -> String {
    let [via, from, to, call, sequence] = ["Via:", "From:", "To:", "Call-ID:", "CSeq:"].map(|name| line(request, name));
    let ours = if to.contains(";tag=") { "" } else { ";tag=peer" };
    format!("{via}\r\n{from}\r\n{to}{ours}\r\n{call}\r\n{sequence}")
}

/// Asks as somebody else does.
async fn answers_others(gateway: SocketAddr) {
    let socket = UdpSocket::bind("127.0.0.2:0").await.expect("a free port");
    let own = socket.local_addr().expect("bound");
    let options = format!(
        "OPTIONS sip:x@{gateway} SIP/2.0\r\nVia: SIP/2.0/UDP {own};branch=z9hG4bKlast;rport\r\nMax-Forwards: 70\r\n\
         From: <sip:o@{own}>;tag=o\r\nTo: <sip:x@{gateway}>\r\nCall-ID: last\r\nCSeq: 1 OPTIONS\r\n\
         Contact: <sip:o@{own}>\r\nContent-Length: 0\r\n\r\n"
    );
    socket.send_to(options.as_bytes(), gateway).await.expect("sent");
    let mut answer = [0; 4_096];
    let answered = timeout(PATIENCE, socket.recv_from(&mut answer)).await;
    assert!(answered.is_ok(), "the endpoint answers nobody any more");
    assert!(answer.starts_with(b"SIP/2.0 200"), "{}", String::from_utf8_lossy(&answer));
}

/// What is spoilt has to get somewhere where it is not.
#[tokio::test]
async fn good_scripts_get_through_calls() {
    for (script, wanted) in [
        (
            include_str!("corpus/dialogs/inbound.txt"),
            &["SIP/2.0 180", "SIP/2.0 200 OK", "SIP/2.0 202", "NOTIFY sip:", "INVITE sip:+49302@"][..],
        ),
        (include_str!("corpus/dialogs/cancelled.txt"), &["SIP/2.0 487", "SIP/2.0 200 OK"]),
        (include_str!("corpus/dialogs/reliable.txt"), &["SIP/2.0 180", "REFER sip:", "BYE sip:"]),
        (include_str!("corpus/dialogs/outbound.txt"), &["INVITE sip:+49301@", "PRACK sip:", "ACK sip:", "BYE sip:"]),
        (include_str!("corpus/dialogs/challenged.txt"), &["INVITE sip:+49301@", "ACK sip:", "SIP/2.0 200"]),
    ] {
        let heard = talk(script, Duration::from_millis(300)).await;
        for line in wanted {
            assert!(heard.iter().any(|heard| heard.starts_with(line)), "{line}: {heard:#?}");
        }
    }
}
