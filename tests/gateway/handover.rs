//! An upgrade under live calls: a second process takes the sockets and the new calls, the first keeps its own; and sockets from
//! systemd.

use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use antiphon_loadgen::call::{Call, End, now};
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::{rtc, sip};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::program::Serve;
use super::support::{PATIENCE, Rig, SENTENCE, losses};
use super::tour::offer;

/// Calls that are up while the place changes hands; `ANTIPHON_TAKEOVER_CALLS=100` for a big gateway's.
#[allow(clippy::disallowed_methods, reason = "this variable belongs to the test")]
fn calls_before() -> usize {
    std::env::var("ANTIPHON_TAKEOVER_CALLS").map_or(4, |count| count.parse().expect("a number of calls"))
}

/// Where telephones reach a gateway.
#[derive(Clone, Copy)]
struct Lines {
    udp: SocketAddr,
    tcp: SocketAddr,
    tls: SocketAddr,
}

impl Lines {
    /// Free ports for TCP and TLS, given back at once: the program binds them a moment later.
    fn free(udp: SocketAddr) -> Self {
        let free = || TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a free port");
        Self { udp, tcp: free(), tls: free() }
    }

    /// What makes a gateway listen there; where it listens on UDP is said already.
    fn set(self, command: &mut Command) {
        let file = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/sip").join(name);
        command
            .env("ANTIPHON_SIP__TCP", self.tcp.to_string())
            .env("ANTIPHON_SIP__TLS__BIND", self.tls.to_string())
            .env("ANTIPHON_SIP__TLS__CERT", file("test-only-cert.pem"))
            .env("ANTIPHON_SIP__TLS__KEY", file("test-only-key.pem"));
    }

    /// A call by the transport whose turn it is, from a port of its own, as telephones are.
    async fn telephone(self, turn: usize) -> Call {
        let (transport, to) = match turn % 3 {
            0 => (sip::Transport::Udp, self.udp),
            1 => (sip::Transport::Tcp, self.tcp),
            _ => (sip::Transport::Tls, self.tls),
        };
        let config = sip::Config { codecs: vec![Codec::Pcmu], transport, ..sip::Config::default() };
        let caller = sip::Caller::bind(config).await.expect("free ports");
        caller.call(&format!("sip:silent@{to}")).await.unwrap_or_else(|error| panic!("{transport:?}: {error}"))
    }

    /// As [`Lines::telephone`], and browsers, too.
    async fn any(self, turn: usize, http: &str) -> Call {
        if turn % 4 == 3 { browser(http).await } else { self.telephone(turn % 4).await }
    }
}

async fn telephone(to: &str) -> Call {
    let config = sip::Config { codecs: vec![Codec::Pcmu], ..sip::Config::default() };
    let caller = sip::Caller::bind(config).await.expect("free ports");
    caller.call(to).await.expect("answered")
}

async fn browser(http: &str) -> Call {
    let config = rtc::Config { agent: Some("silent".into()), ..rtc::Config::new(http) };
    rtc::Caller::connect(config).await.expect("answered")
}

/// Asks whoever has the place: a connection that is there stays with the process that accepted it, so each question has its
/// own.
#[derive(Clone)]
struct Asker {
    http: String,
    client: reqwest::Client,
}

impl Asker {
    fn new(http: &str) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder().pool_max_idle_per_host(0).build().expect("a client");
        Self { http: http.to_owned(), client }
    }

    async fn json(&self, path: &str) -> Value {
        let answer = self.client.get(format!("{}{path}", self.http)).send().await.expect("somebody always answers");
        answer.json().await.expect("JSON")
    }

    /// Has the agent's side of `id` say `text`; whichever process has the call.
    async fn speak(&self, id: &str, text: &str) -> Instant {
        let asked = now();
        let turn = self.client.post(format!("{}/v1/calls/{id}/turns", self.http)).json(&json!({ "text": text }));
        let answer = turn.send().await.expect("answered");
        assert_eq!(answer.status(), 202, "{}", answer.text().await.unwrap_or_default());
        asked
    }

    /// A metric of the process that has the place.
    async fn metric(&self, name: &str) -> f64 {
        let text = self.client.get(format!("{}/metrics", self.http)).send().await.expect("answered").text().await;
        let text = text.expect("text");
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        value.unwrap_or_else(|| panic!("{name} is not there"))
    }

    /// Waits until so many calls are written down: then the database is made, too.
    async fn recorded(&self, count: usize) {
        let written = async {
            while self.json("/v1/records?limit=100").await["records"].as_array().is_none_or(|all| all.len() < count) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        timeout(PATIENCE, written).await.expect("they are written");
    }

    /// Waits until the process that has the place says that the one before it has `calls`.
    async fn handed_over(&self, calls: impl Fn(f64) -> bool) {
        let waited = async {
            while !calls(self.metric("antiphon_handover_calls").await) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        timeout(PATIENCE, waited).await.expect("the place changes hands");
    }

    /// The ids of all calls, whichever process has them, when they are `count`: a call is one once it is acknowledged.
    async fn calls(&self, count: usize) -> Vec<String> {
        let counted = async {
            loop {
                let calls = self.json("/v1/calls").await;
                let calls = calls["calls"].as_array().cloned().unwrap_or_default();
                if calls.len() == count {
                    return calls.iter().filter_map(|call| call["id"].as_str().map(str::to_owned)).collect();
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        timeout(PATIENCE, counted).await.expect("so many calls are up")
    }
}

/// A gateway that is ready.
async fn first(folder: &Path, state: &Path) -> (Serve, Lines) {
    // Four ports that are free now; on a busy machine somebody else may get one of them before the program does.
    for _ in 0..5 {
        let udp = UdpSocket::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a free port");
        let lines = Lines::free(udp);
        let mut first = Serve::start(folder, state, |command| {
            command.env("ANTIPHON_ENGINE__KIND", "tone").env("ANTIPHON_SIP__UDP", udp.to_string());
            lines.set(command);
        });
        first.sip = udp;
        if first.comes().await {
            return (first, lines);
        }
    }
    panic!("five gateways found their ports taken");
}

fn successor(folder: &Path, state: &Path, of: &Serve, lines: Lines) -> Serve {
    let (http, sip) = (of.http.clone(), of.sip);
    let mut second = Serve::start(folder, state, |command| {
        command
            .arg("--takeover")
            .env("ANTIPHON_ENGINE__KIND", "tone")
            .env("ANTIPHON_HTTP__BIND", http.trim_start_matches("http://"))
            .env("ANTIPHON_SIP__UDP", sip.to_string());
        lines.set(command);
    });
    (second.http, second.sip) = (http, sip);
    second
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_process_takes_the_place_of_the_first_and_no_call_is_lost() {
    let (folder, state) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let (mut first, lines) = first(folder.path(), state.path()).await;
    let asker = Asker::new(&first.http);
    let mut before = Vec::new();
    for turn in 0..calls_before() {
        before.push(lines.any(turn, &first.http).await);
    }
    let ids = asker.calls(before.len()).await;
    asker.recorded(1).await;
    // They listen to something while the place changes hands.
    let long = SENTENCE.repeat(3);
    let mut asked = now();
    for id in &ids {
        asked = asker.speak(id, &long).await;
    }
    let mut onsets = Vec::new();
    for call in &before {
        onsets.push(call.onset(asked - Duration::from_secs(5), PATIENCE).await.expect("speech is heard"));
    }

    // Calls come in all the time, each of which is answered.
    let stop = Arc::new(AtomicBool::new(false));
    let coming = {
        let (stop, http) = (stop.clone(), first.http.clone());
        tokio::spawn(async move {
            let mut answered = 0;
            while !stop.load(Ordering::Relaxed) {
                let call = lines.any(answered, &http).await;
                assert_eq!(call.hang_up().await, End::Local);
                answered += 1;
            }
            answered
        })
    };
    let mut second = successor(folder.path(), state.path(), &first, lines);
    asker.handed_over(|calls| calls >= before.len() as f64).await;
    stop.store(true, Ordering::Relaxed);
    assert!(coming.await.expect("every call is answered") > 0);

    let mut after = Vec::new();
    for turn in 0..4 {
        after.push(lines.any(turn, &first.http).await);
    }
    for (call, onset) in before.iter().zip(&onsets) {
        let end = call.silence(*onset, Duration::from_millis(1_500), PATIENCE).await.expect("the turn ends");
        let stalls = losses(&call.ear().heard(), *onset, end);
        assert!(stalls.is_empty(), "{:?}: {stalls:?}", call.leg());
    }
    let all = asker.calls(before.len() + after.len()).await;
    assert!(ids.iter().all(|id| all.contains(id)), "the calls of both: {all:?}");
    // Every call is reached over HTTP by its id, and over its own leg.
    let asked = asker.speak(&ids[0], "Still here.").await;
    for id in all.iter().filter(|id| **id != ids[0]) {
        asker.speak(id, "Still here.").await;
    }
    for call in before.iter().chain(&after) {
        assert!(call.onset(asked, PATIENCE).await.is_some(), "{:?} is spoken to", call.leg());
    }
    for call in &before {
        // A BYE over UDP and a browser's DELETE reach the second process first, one on an open connection the first.
        assert_eq!(call.hang_up().await, End::Local, "{:?}", call.leg());
    }
    assert_eq!(first.ended().await, Some(0), "the first ends with its last call");
    asker.handed_over(|calls| calls == 0.0).await;
    let asked = now();
    for id in asker.calls(after.len()).await {
        asker.speak(&id, "Only these.").await;
    }
    for call in after.drain(..) {
        assert!(call.onset(asked, PATIENCE).await.is_some(), "{:?} goes on", call.leg());
        assert_eq!(call.hang_up().await, End::Local);
    }
    // Each call's record was closed by the process that had the call, as its caller ended it.
    let closed = async {
        for id in &ids {
            loop {
                let record = asker.json(&format!("/v1/records/{id}")).await;
                if !record["endedMs"].is_null() {
                    assert_eq!(record["cause"], "remote", "{record:#}");
                    break;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    };
    timeout(PATIENCE, closed).await.expect("every call has its record");
    assert_eq!(second.terminate().await, Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_successor_that_dies_gives_the_place_back() {
    let (folder, state) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let (mut first, lines) = first(folder.path(), state.path()).await;
    let (asker, to) = (Asker::new(&first.http), format!("sip:silent@{}", first.sip));
    let call = telephone(&to).await;
    let id = asker.calls(1).await.remove(0);
    asker.recorded(1).await;
    let mut second = successor(folder.path(), state.path(), &first, lines);
    asker.handed_over(|calls| calls >= 1.0).await;
    // A third is told why not, and changes nothing.
    let mut third = successor(folder.path(), state.path(), &first, lines);
    assert_eq!(third.ended().await, Some(1), "the second has still to wait for the first");
    second.signal("KILL");
    second.ended().await;
    // Of the first again: who connected to the second meanwhile was refused.
    first.ready().await;
    let again = telephone(&to).await;
    asker.calls(2).await;
    let asked = asker.speak(&id, "Still here.").await;
    assert!(call.onset(asked, PATIENCE).await.is_some(), "the call of the first goes on");
    for call in [call, again] {
        assert_eq!(call.hang_up().await, End::Local);
    }
    assert_eq!(first.terminate().await, Some(0));
}

/// What a connection that was kept says to `request`; it is over with that.
async fn last_answer(mut kept: TcpStream, request: &str) -> String {
    kept.write_all(request.as_bytes()).await.expect("written");
    let mut answer = String::new();
    timeout(PATIENCE, kept.read_to_string(&mut answer)).await.expect("it ends").expect("text");
    assert!(answer.to_lowercase().contains("connection: close"), "{answer}");
    answer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kept_connection_to_the_process_before_reaches_calls_of_the_one_after() {
    let (before, after) = (Rig::start().await, Rig::start().await);
    // As over the Unix socket between two processes, but for the path.
    let address = after.app.http();
    let client = reqwest::Client::builder().resolve("antiphon", address).build().expect("a client");
    let call = browser(&after.http).await;
    let id = call.id().expect("named").to_owned();
    let connect = async || TcpStream::connect(before.app.http()).await.expect("connects");
    let mut kept = [connect().await, connect().await, connect().await];
    for stream in &mut kept {
        // Accepted before the place is lent.
        stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").await.expect("written");
        let mut head = [0; 12];
        timeout(PATIENCE, stream.read_exact(&mut head)).await.expect("answered").expect("read");
        assert_eq!(&head, b"HTTP/1.1 200");
    }
    let place = &before.app.gateway().place;
    place.precede(Some(client));
    place.hold(false);
    let [one, all, new] = kept;
    let shown = last_answer(one, &format!("GET /v1/calls/{id} HTTP/1.1\r\nHost: localhost\r\n\r\n")).await;
    assert!(shown.contains("HTTP/1.1 200") && shown.contains(&id), "{shown}");
    let list = last_answer(all, "GET /v1/calls HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
    assert!(list.contains(&id), "{list}");
    // A new call is the other one's.
    let (_peer, sdp) = offer().await;
    let made = last_answer(
        new,
        &format!(
            "POST /whip?agent=silent HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/sdp\r\n\
             Content-Length: {}\r\n\r\n{sdp}",
            sdp.len()
        ),
    )
    .await;
    assert!(made.contains("HTTP/1.1 201"), "{made}");
    assert_eq!((before.app.gateway().webrtc.count(), after.app.gateway().webrtc.count()), (0, 2));
    assert_eq!(call.hang_up().await, End::Local);
}

/// `antiphon serve` with two sockets, as systemd starts it: they are descriptors 3 and 4, and variables say so.
fn activated(folder: &Path, names: &str, http: TcpListener, sip: UdpSocket) -> Serve {
    let addresses: (SocketAddr, SocketAddr) = (http.local_addr().expect("bound"), sip.local_addr().expect("bound"));
    let mut command = Command::new("sh");
    // The shell keeps its number when it becomes the program.
    command
        .args(["-c", "export LISTEN_PID=$$; exec \"$0\" serve 3<&0 4<&1 </dev/null >/dev/null"])
        .arg(env!("CARGO_BIN_EXE_antiphon"))
        .current_dir(folder)
        .env("XDG_STATE_HOME", folder)
        .env("LISTEN_FDS", "2")
        .env("LISTEN_FDNAMES", names)
        .env("ANTIPHON_ENGINE__KIND", "tone")
        .env("ANTIPHON_HTTP__BIND", addresses.0.to_string())
        .env("ANTIPHON_SIP__UDP", addresses.1.to_string())
        .env("ANTIPHON_SIP__TCP", "off")
        .stdin(Stdio::from(OwnedFd::from(http)))
        .stdout(Stdio::from(OwnedFd::from(sip)))
        .stderr(Stdio::null());
    Serve::of(command.spawn().expect("a shell"), addresses.0, addresses.1)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sockets_from_systemd_are_used_by_their_names() {
    let folder = tempfile::tempdir().expect("a folder");
    let sockets = || {
        let http = TcpListener::bind("127.0.0.1:0").expect("a port");
        (http, UdpSocket::bind("127.0.0.1:0").expect("a port"))
    };
    let (http, sip) = sockets();
    // Who comes before the program does waits.
    let address = http.local_addr().expect("bound");
    let early = tokio::net::TcpStream::connect(address).await.expect("it waits");
    let mut program = activated(folder.path(), "http:sip-udp", http, sip);
    program.ready().await;
    early.writable().await.expect("still there");
    let call = telephone(&format!("sip:demo@{}", program.sip)).await;
    assert!(call.onset(call.setup().asked, PATIENCE).await.is_some(), "the agent greets");
    assert_eq!(call.hang_up().await, End::Local);
    assert_eq!(program.terminate().await, Some(0));

    let (http, sip) = sockets();
    let mut program = activated(folder.path(), "http:antiphon.socket", http, sip);
    assert_eq!(program.ended().await, Some(1), "a name that no socket has");
}
