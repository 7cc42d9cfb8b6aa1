//! Kamailio as registrar and proxy, over datagrams and over TLS, as a trunk of which one host fails, and as what browsers reach
//! us through: it shares no code with us, asks for a password, and stays in the dialog by Record-Route. Without it the tests
//! are skipped, and counted.

use std::{path::Path, process::Stdio, time::Duration};

use crate::{
    sipp::free_port,
    support::{event, hold, limited, loopback, packet, raw::sdp, speak_until_heard, start, within},
    websocket::{connect, ends, expect, header, request},
};
use antiphon::{
    media::{
        leg::{LegEnd, LegEvent, MediaLeg},
        sip::SipLeg,
    },
    sip::{DialRequest, Endpoint, IncomingCall, SipConfig, TlsConfig, TrunkConfig},
};
use futures_util::SinkExt;
use tempfile::TempDir;
use tokio::{
    net::{TcpStream, UdpSocket},
    process::{Child, Command},
    sync::mpsc,
};
use tokio_tungstenite::tungstenite::Message;

/// Whether this module of it is here; each is of a package of its own.
fn have_module(name: &str) -> bool {
    let folders = std::fs::read_dir("/usr/lib").into_iter().flatten().flatten();
    folders.into_iter().any(|folder| folder.path().join(format!("kamailio/modules/{name}.so")).exists())
}

/// A running Kamailio, which ends with it.
struct Proxy {
    child: Child,
    port: u16,
    _folder: TempDir,
}

impl Proxy {
    fn start() -> Option<Proxy> {
        if !antiphon_skip::has_program("kamailio", "kamailio") {
            return None;
        }
        let port = free_port();
        let config = include_str!("../data/sip/kamailio.cfg");
        Some(Proxy::run(config, port, &[format!("udp:127.0.0.1:{port}")]))
    }

    /// One that takes TLS at its port, and WebSockets and datagrams at the port that comes with it.
    fn of_streams() -> Option<(Proxy, u16)> {
        if !antiphon_skip::has_program("kamailio", "kamailio") {
            return None;
        }
        for (module, package) in [("tls", "kamailio-tls-modules"), ("websocket", "kamailio-websocket-modules")] {
            if !have_module(module) {
                antiphon_skip::skip("kamailio-streams", format!("{module}.so is not here (Debian package {package})"));
                return None;
            }
        }
        let (port, plain) = (free_port(), free_port());
        let file = |name: &str| format!("{}/tests/data/sip/{name}", env!("CARGO_MANIFEST_DIR"));
        let config = include_str!("../data/sip/kamailio-streams.cfg");
        let config = config.replace("@CERT@", &file("test-only-cert.pem")).replace("@KEY@", &file("test-only-key.pem"));
        let listen =
            [format!("tls:127.0.0.1:{port}"), format!("tcp:127.0.0.1:{plain}"), format!("udp:127.0.0.1:{plain}")];
        Some((Proxy::run(&config, port, &listen), plain))
    }

    fn run(config: &str, port: u16, listen: &[String]) -> Proxy {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("kamailio.cfg");
        std::fs::write(&file, config).expect("written");
        let child = Command::new("kamailio")
            .arg("-f")
            .arg(file)
            .args(listen.iter().flat_map(|address| ["-l", address.as_str()]))
            .args(["-DD", "-E", "-m", "32", "-M", "8"])
            .arg("-w")
            .arg(folder.path())
            .arg("-Y")
            .arg(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("kamailio runs");
        Proxy { child, port, _folder: folder }
    }

    /// Ends it, and waits until it has.
    async fn end(mut self) {
        self.ask_to_end();
        limited(self.child.wait()).await.expect("it ends");
    }

    fn ask_to_end(&self) {
        // It has processes of its own, and ends them when it is asked to end.
        if let Some(id) = self.child.id() {
            let _ = std::process::Command::new("kill").arg(id.to_string()).status();
        }
    }

    /// It as a trunk.
    fn trunk(&self, more: &str) -> TrunkConfig {
        toml::from_str(&format!("name = \"proxy\"\nhost = \"127.0.0.1:{}\"\n{more}", self.port)).expect("valid")
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.ask_to_end();
    }
}

/// A call of `caller` to alice, in which both hear each other; and the port that it reached her from.
async fn talk(caller: &Endpoint, calls: &mut mpsc::Receiver<IncomingCall>) -> (SipLeg, SipLeg, u16) {
    let request = DialRequest { to: "alice".to_owned(), ..DialRequest::default() };
    let dialled = limited(caller.dial(request));
    let accepted = async {
        let call = limited(calls.recv()).await.expect("a call");
        let port = call.source.port();
        (limited(call.accept()).await, port)
    };
    let (dialled, (accepted, port)) = tokio::join!(dialled, accepted);
    let (mut here, mut there) = (dialled.expect("answered"), accepted.expect("accepted"));
    here.attach().await.expect("attaches");
    there.attach().await.expect("attaches");
    event(&mut there, |e| *e == LegEvent::Connected).await;
    speak_until_heard(&mut here, &mut there).await;
    speak_until_heard(&mut there, &mut here).await;
    (here, there, port)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kamailio_is_registered_with_and_calls_pass_through_it() {
    let Some(proxy) = Proxy::start() else { return };
    let registered = proxy.trunk("username = \"alice\"\npassword = \"wonderland\"\nregister = true");
    let (called, mut calls) = start(SipConfig { trunk: vec![registered], ..loopback() }).await;
    within("the registration", || called.trunks()[0].registered == Some(true)).await;
    let trunk = proxy.trunk("codecs = [\"pcma\"]\nprefixes = [\"*\"]\noptions_s = 1");
    let (caller, _none) = start(SipConfig { trunk: vec![trunk], ..loopback() }).await;
    let nobody = DialRequest { to: "nobody".to_owned(), ..DialRequest::default() };
    assert!(limited(caller.dial(nobody)).await.is_err(), "who is not registered cannot be called");
    let (mut here, mut there, _) = talk(&caller, &mut calls).await;
    // In the dialog both ways, by the route that was recorded.
    hold(&mut here, true).await.expect("held through the proxy");
    hold(&mut here, false).await.expect("and resumed");
    there.hang_up().await;
    assert_eq!(event(&mut here, |e| matches!(e, LegEvent::Closed(_))).await, LegEvent::Closed(LegEnd::Remote));
    within("the health of the trunk", || caller.trunks()[0].up == Some(true)).await;
    within("every call to be forgotten", || caller.calls() + called.calls() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kamailio_is_registered_with_and_calls_pass_through_it_over_tls() {
    let Some((proxy, _)) = Proxy::of_streams() else { return };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/sip");
    let (cert, key) = (folder.join("test-only-cert.pem"), folder.join("test-only-key.pem"));
    let tls = TlsConfig { bind: ([127, 0, 0, 1], 0).into(), cert: cert.clone(), key };
    let config = |trunk| {
        let roots = Some(cert.clone());
        SipConfig { trunk: vec![trunk], tls: Some(tls.clone()), tls_roots: roots, ..loopback() }
    };
    let registered =
        proxy.trunk("transport = \"tls\"\nusername = \"alice\"\npassword = \"wonderland\"\nregister = true");
    let (called, mut calls) = start(config(registered)).await;
    within("the registration", || called.trunks()[0].registered == Some(true)).await;
    let trunk = proxy.trunk("transport = \"tls\"\nsrtp = \"required\"\nprefixes = [\"*\"]");
    let (caller, _none) = start(config(trunk)).await;
    let (mut here, mut there, _) = talk(&caller, &mut calls).await;
    assert!(here.encrypted() && there.encrypted());
    hold(&mut here, true).await.expect("held through the proxy");
    hold(&mut there, true).await.expect("from either side");
    there.hang_up().await;
    assert_eq!(event(&mut here, |e| matches!(e, LegEvent::Closed(_))).await, LegEvent::Closed(LegEnd::Remote));
    within("every call to be forgotten", || caller.calls() + called.calls() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_kamailios_the_other_takes_the_call_where_one_is_gone() {
    let (Some(first), Some(second)) = (Proxy::start(), Proxy::start()) else { return };
    let registered = |proxy: &Proxy, name: &str| -> TrunkConfig {
        toml::from_str(&format!(
            "name = \"{name}\"\nhost = \"127.0.0.1:{}\"\nusername = \"alice\"\npassword = \"wonderland\"\nregister = true",
            proxy.port
        ))
        .expect("valid")
    };
    let trunk = vec![registered(&first, "first"), registered(&second, "second")];
    let (called, mut calls) = start(SipConfig { trunk, ..loopback() }).await;
    within("both registrations", || called.trunks().iter().all(|trunk| trunk.registered == Some(true))).await;
    let more = format!(
        "prefixes = [\"*\"]\nfailed_target_s = 60\ntargets = [{{ host = \"127.0.0.1:{}\", priority = 2 }}]",
        second.port
    );
    let (caller, _none) = start(SipConfig { trunk: vec![first.trunk(&more)], ..loopback() }).await;
    let (mut here, mut there, port) = talk(&caller, &mut calls).await;
    assert_eq!(port, first.port);
    here.hang_up().await;
    event(&mut there, |e| matches!(e, LegEvent::Closed(_))).await;
    first.end().await;
    // The one that is gone costs the first call some seconds, and later ones nothing: it is left alone.
    for _ in 0..2 {
        let (mut here, mut there, port) = talk(&caller, &mut calls).await;
        assert_eq!(port, second.port);
        there.hang_up().await;
        event(&mut here, |e| matches!(e, LegEvent::Closed(_))).await;
        assert!(caller.trunks()[0].targets[0].blocked && !caller.trunks()[0].targets[1].blocked);
    }
    within("every call to be forgotten", || caller.calls() + called.calls() == 0).await;
}

/// A browser whose WebSocket ends at Kamailio: we see datagrams, and what we send finds its connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn browsers_call_through_kamailio() {
    let Some((_proxy, port)) = Proxy::of_streams() else { return };
    let (endpoint, mut calls) = start(loopback()).await;
    let at = format!("127.0.0.1:{port}");
    let stream = limited(async {
        loop {
            match TcpStream::connect(&at).await {
                Ok(stream) => return stream,
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    })
    .await;
    let mut socket =
        connect(stream, &format!("ws://{at}/"), &[("sec-websocket-protocol", "sip")]).await.expect("taken");
    let ear = UdpSocket::bind("127.0.0.1:0").await.expect("binds");
    let description = sdp(ear.local_addr().expect("bound").port(), "");
    let uri = format!("sip:demo@{}", endpoint.local_udp().expect("bound"));
    let kind = "Content-Type: application/sdp\r\n";
    socket.send(request("INVITE", &uri, "", kind, &description)).await.expect("sends");
    let call = limited(calls.recv()).await.expect("a call");
    assert_eq!(call.source.port(), port);
    let accepting = tokio::spawn(call.accept());
    let ok = expect(&mut socket, "SIP/2.0 200").await;
    let mut leg = limited(accepting).await.expect("no panic").expect("accepted");
    // In the dialog: to our Contact, by the recorded routes in reverse.
    let contact = header(&ok, "Contact");
    let target = contact.trim_start_matches('<').split('>').next().expect("an address").to_owned();
    let routes = ok.lines().filter_map(|line| line.strip_prefix("Record-Route:"));
    let routes: Vec<_> = routes.flat_map(|value| value.split(',')).map(str::trim).collect();
    let routes: String = routes.iter().rev().map(|route| format!("Route: {route}\r\n")).collect();
    let tag = format!(";tag={}", header(&ok, "To").split(";tag=").nth(1).expect("a tag"));
    let Message::Text(ack) = request("ACK", &uri, &tag, &routes, "") else { panic!("text") };
    let ack = ack.replacen(&format!("ACK {uri}"), &format!("ACK {target}"), 1);
    socket.send(Message::text(ack)).await.expect("sends");
    leg.attach().await.expect("attaches");
    event(&mut leg, |e| *e == LegEvent::Connected).await;
    leg.send(packet(&leg, 7, b"heard")).await.expect("up");
    let mut buffer = [0; 2_048];
    let (length, _) = limited(ear.recv_from(&mut buffer)).await.expect("receives");
    assert_eq!(&buffer[12..length], b"heard");
    leg.hang_up().await;
    ends(&mut socket).await;
    within("the call to be forgotten", || endpoint.calls() == 0).await;
}
