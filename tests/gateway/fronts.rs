//! Three gateways behind balancers that share no code with us and know nothing of calls: haproxy, which gives every request to
//! the next node, and Kamailio's dispatcher. Whatever follows a first request comes to any node, and a deploy of all nodes
//! ends no call.
//!
//! `ANTIPHON_FRONTS_CALLS=10000` is the long form; what it said last is in `tests/README.md`.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use antiphon_loadgen::call::{Call, End, now};
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::{rtc, sip};
use futures_util::{StreamExt, stream};
use reqwest::Method;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::nodes::{Redis, TOKEN};
use super::program::{Serve, until};
use super::support::{PATIENCE, SENTENCE, losses};
use super::tour::offer;

const NODES: [&str; 3] = ["n0", "n1", "n2"];
/// Calls that are set up at a time.
const AT_ONCE: usize = 4;
/// Calls that live through the deploy; with the long form a hundred.
const LIVE: usize = 8;

/// How many calls and sessions to make.
#[allow(clippy::disallowed_methods, reason = "this variable belongs to the test")]
fn wanted() -> usize {
    std::env::var("ANTIPHON_FRONTS_CALLS").ok().and_then(|count| count.parse().ok()).unwrap_or(30)
}

/// A balancer, ended with the test.
struct Front(Child);

impl Front {
    fn start(program: &str, arguments: &[&str], folder: &Path) -> Front {
        let child = Command::new(program)
            .args(arguments)
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Front(child.unwrap_or_else(|error| panic!("{program}: {error}")))
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        // They have processes of their own, and end them when they are asked to end.
        let _ = Command::new("kill").arg(self.0.id().to_string()).status();
        let _ = self.0.wait();
    }
}

/// Nodes, what they share, and what stands before them.
struct Site {
    redis: Redis,
    folder: tempfile::TempDir,
    nodes: Vec<Serve>,
    _fronts: [Front; 2],
    /// haproxy, as in a URL.
    http: String,
    /// Kamailio.
    sip: SocketAddr,
    client: reqwest::Client,
}

impl Site {
    /// `None`: a program is not here, and the test is skipped.
    async fn start() -> Option<Site> {
        let found =
            antiphon_skip::has_program("haproxy", "haproxy") && antiphon_skip::has_program("kamailio", "kamailio");
        let redis = if found { Redis::start()? } else { return None };
        let _ = rustls::crypto::ring::default_provider().install_default();
        let folder = tempfile::tempdir().expect("a folder");
        let nodes: Vec<Serve> = NODES.iter().map(|name| node(folder.path(), &redis.url(), name, None)).collect();
        let (http, sip) = (free_tcp(), UdpSocket::bind("127.0.0.1:0").and_then(|s| s.local_addr()).expect("a port"));
        let fronts = [haproxy(folder.path(), http, &nodes), kamailio(folder.path(), sip, &nodes)];
        for node in &nodes {
            until(&format!("{}/readyz", node.http), |said| {
                said["ready"] == true && said["cluster"]["others"].as_array().map(Vec::len) == Some(NODES.len() - 1)
            })
            .await;
        }
        // One connection a request: haproxy would otherwise give all of one to the same node.
        let client = reqwest::Client::builder().pool_max_idle_per_host(0).build().expect("a client");
        let site = Site { redis, folder, nodes, _fronts: fronts, http: format!("http://{http}"), sip, client };
        until(&format!("{}/readyz", site.http), |said| said["ready"] == true).await;
        // Kamailio asks the nodes by OPTIONS, and gives calls to those that have answered.
        let answers = async {
            loop {
                match site.telephone().await {
                    Ok(call) => return drop(call.hang_up().await),
                    Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
                }
            }
        };
        timeout(PATIENCE, answers).await.expect("the balancer finds a node");
        Some(site)
    }

    async fn telephone(&self) -> Result<Call, antiphon_loadgen::call::CallError> {
        let caller = sip::Caller::bind(sip::Config { codecs: vec![Codec::Pcmu], ..sip::Config::default() }).await?;
        caller.call(&format!("sip:silent@{}", self.sip)).await
    }

    async fn browser(&self) -> Result<Call, antiphon_loadgen::call::CallError> {
        rtc::Caller::connect(rtc::Config { agent: Some("silent".into()), ..rtc::Config::new(self.http.clone()) }).await
    }

    /// A request by way of the balancer, which ends with this status.
    async fn ask(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: String,
        wanted: u16,
    ) -> Result<reqwest::Response, String> {
        let mut request = self.client.request(method.clone(), format!("{}{path}", self.http)).body(body);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let answer = request.send().await.map_err(|error| format!("{method} {path}: {error}"))?;
        if answer.status().as_u16() == wanted {
            return Ok(answer);
        }
        let status = answer.status();
        Err(format!("{method} {path}: {status} {}", answer.text().await.unwrap_or_default()))
    }

    /// A turn on a call, asked for at any node.
    async fn speak(&self, id: &str, text: &str) -> Result<Instant, String> {
        let asked = now();
        let turn = json!({ "text": text }).to_string();
        self.ask(Method::POST, &format!("/v1/calls/{id}/turns"), &JSON, turn, 202).await?;
        Ok(asked)
    }

    /// Holds or resumes. A request that overtakes the ACK before it is answered 500 with Retry-After (RFC 3261 section 14.2),
    /// and said again.
    async fn hold(&self, call: &Call, hold: bool) -> Result<(), antiphon_loadgen::call::CallError> {
        let again = async {
            loop {
                match call.hold(hold).await {
                    Err(error) if error.to_string().contains("500") => {
                        tokio::time::sleep(Duration::from_millis(100)).await
                    }
                    other => return other,
                }
            }
        };
        timeout(PATIENCE, again).await.expect("the ACK arrives")
    }

    /// A telephone call with follow-ups by SIP and HTTP; gives its id.
    async fn telephone_call(&self) -> Result<String, String> {
        let call = self.telephone().await.map_err(|error| format!("INVITE: {error}"))?;
        let id = call.id().ok_or("no id")?.to_owned();
        for hold in [true, false] {
            self.hold(&call, hold).await.map_err(|error| format!("{id}: re-INVITE: {error}"))?;
        }
        self.speak(&id, "Yes.").await?;
        let shown = self.ask(Method::GET, &format!("/v1/calls/{id}"), &[], String::new(), 200).await?;
        let shown: Value = shown.json().await.map_err(|error| error.to_string())?;
        if shown["id"] != id.as_str() {
            return Err(format!("{id}: {shown}"));
        }
        match call.hang_up().await {
            End::Local => Ok(id),
            other => Err(format!("{id}: BYE: {other:?}")),
        }
    }

    /// A browser's session with its follow-ups; gives its id.
    async fn browser_session(&self) -> Result<String, String> {
        let (_peer, sdp) = offer().await;
        let kind = [("content-type", "application/sdp")];
        let made = self.ask(Method::POST, "/whip?agent=silent", &kind, sdp.clone(), 201).await?;
        let header =
            |name: &str| made.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or("").to_owned();
        let (location, tag, id) = (header("location"), header("etag"), header("x-antiphon-call"));
        let of_it = ["a=ice-ufrag:", "a=ice-pwd:", "a=candidate:"];
        let lines = sdp.lines().filter(|line| of_it.iter().any(|start| line.starts_with(start)));
        let fragment = lines.collect::<Vec<_>>().join("\r\n") + "\r\n";
        let headers = [("content-type", "application/trickle-ice-sdpfrag"), ("if-match", &*tag)];
        for _ in 0..2 {
            self.ask(Method::PATCH, &location, &headers, fragment.clone(), 204).await?;
        }
        let url = format!("{}/v1/calls/{id}/media", self.http.replace("http", "ws"));
        let (mut socket, _) = tokio_tungstenite::connect_async(url).await.map_err(|error| format!("{id}: {error}"))?;
        let first = timeout(PATIENCE, socket.next()).await.map_err(|_| format!("{id}: a silent socket"))?;
        if !first
            .is_some_and(|frame| frame.is_ok_and(|frame| frame.to_text().is_ok_and(|text| text.contains("connected"))))
        {
            return Err(format!("{id}: the socket says something else"));
        }
        self.ask(Method::DELETE, &location, &[], String::new(), 200).await?;
        Ok(id)
    }
}

const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

fn free_tcp() -> SocketAddr {
    // Given back at once: the program binds it a moment later.
    TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a free port")
}

/// The node of this name; with `of`, the one that takes that one's place.
fn node(folder: &Path, redis: &str, name: &str, of: Option<&Serve>) -> Serve {
    let state = folder.join(name);
    let mut node = Serve::start(folder, &state, |command| {
        command
            .env("ANTIPHON_ENGINE__KIND", "tone")
            .env("ANTIPHON_CLUSTER__REDIS", redis)
            .env("ANTIPHON_CLUSTER__NODE", name)
            .env("ANTIPHON_CLUSTER__ADVERTISE", "http://127.0.0.1:0")
            .env("ANTIPHON_CLUSTER__TOKEN", TOKEN);
        if let Some(of) = of {
            command
                .arg("--takeover")
                .env("ANTIPHON_HTTP__BIND", of.http.trim_start_matches("http://"))
                .env("ANTIPHON_SIP__UDP", of.sip.to_string());
        }
    });
    if let Some(of) = of {
        (node.http, node.sip) = (of.http.clone(), of.sip);
    }
    node
}

fn haproxy(folder: &Path, address: SocketAddr, nodes: &[Serve]) -> Front {
    let servers: String = nodes
        .iter()
        .enumerate()
        .map(|(number, node)| format!("    server n{number} {} check\n", node.http.trim_start_matches("http://")))
        .collect();
    let config = format!(
        "global\n    maxconn 4000\ndefaults\n    mode http\n    timeout connect 5s\n    timeout client 60s\n    \
         timeout server 60s\n    timeout tunnel 1h\n    timeout check 10s\n    retries 3\n    option redispatch\nfrontend all\n    \
         bind {address}\n    default_backend nodes\nbackend nodes\n    balance roundrobin\n    \
         option httpchk GET /readyz\n    default-server inter 500ms fall 3 rise 1\n{servers}"
    );
    std::fs::write(folder.join("haproxy.cfg"), config).expect("written");
    Front::start("haproxy", &["-db", "-f", "haproxy.cfg"], folder)
}

fn kamailio(folder: &Path, address: SocketAddr, nodes: &[Serve]) -> Front {
    let list: String = nodes.iter().map(|node| format!("1 sip:{}\n", node.sip)).collect();
    std::fs::write(folder.join("dispatcher.list"), list).expect("written");
    let config = include_str!("../data/sip/dispatcher.cfg");
    let list = folder.join("dispatcher.list").display().to_string();
    std::fs::write(folder.join("kamailio.cfg"), config.replace("@LIST@", &list)).expect("written");
    let listen = format!("udp:{address}");
    let here = folder.display().to_string();
    let arguments = ["-f", "kamailio.cfg", "-l", &listen, "-DD", "-E", "-m", "32", "-M", "8", "-w", &here, "-Y", &here];
    Front::start("kamailio", &arguments, folder)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_balancers_no_follow_up_is_misrouted() {
    let Some(site) = Site::start().await else { return };
    let began = now();
    let made = stream::iter(0..wanted()).map(async |number: usize| {
        if number % 3 == 2 { site.browser_session().await } else { site.telephone_call().await }
    });
    let made: Vec<Result<String, String>> = made.buffer_unordered(AT_ONCE).collect().await;
    let wrong: Vec<&String> = made.iter().filter_map(|made| made.as_ref().err()).collect();
    println!("{} calls and sessions in {:?}, {} misrouted", made.len(), began.elapsed(), wrong.len());
    assert!(wrong.is_empty(), "{} of {}: {:#?}", wrong.len(), made.len(), &wrong[..wrong.len().min(10)]);
    let owners: BTreeSet<&str> = made.iter().flatten().filter_map(|id| id.split('.').next()).collect();
    assert_eq!(owners, BTreeSet::from(NODES), "every node has had calls");
}

/// Callers listen, and new calls come in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deploy_of_all_nodes_ends_no_call() {
    let Some(mut site) = Site::start().await else { return };
    let live = if wanted() > 1_000 { 100 } else { LIVE };
    let mut calls = Vec::new();
    for number in 0..live {
        let call = if number % 4 == 3 { site.browser().await } else { site.telephone().await };
        calls.push(call.expect("answered"));
    }
    let long = SENTENCE.repeat(2);
    let mut begun = Vec::new();
    for call in &calls {
        let asked = site.speak(call.id().expect("named"), &long).await.expect("taken");
        begun.push(call.onset(asked, PATIENCE).await.expect("speech is heard"));
    }
    let mut nodes = std::mem::take(&mut site.nodes);
    let (stop, site) = (AtomicBool::new(false), &site);
    let coming = async {
        let mut answered = 0;
        while !stop.load(Ordering::Relaxed) {
            let made = if answered % 3 == 2 { site.browser_session().await } else { site.telephone_call().await };
            made.unwrap_or_else(|error| panic!("call {answered} during the deploy: {error}"));
            answered += 1;
        }
        answered
    };
    let deploy = async {
        let mut before = Vec::new();
        for (number, name) in NODES.iter().enumerate() {
            let next = node(site.folder.path(), &site.redis.url(), name, Some(&nodes[number]));
            before.push(std::mem::replace(&mut nodes[number], next));
            // The calls of the one before are told by the one that has the place.
            let taken = async {
                while handed_over(site, &nodes[number].http).await == 0.0 {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            };
            timeout(PATIENCE, taken).await.unwrap_or_else(|_| panic!("{name} is not taken over"));
        }
        stop.store(true, Ordering::Relaxed);
        before
    };
    let (mut before, answered) = tokio::join!(deploy, coming);
    println!("{} live calls, and {answered} that came in during the deploy of {} nodes", calls.len(), NODES.len());
    assert!(answered > 0);
    for (call, onset) in calls.iter().zip(&begun) {
        let end = call.silence(*onset, Duration::from_millis(1_500), PATIENCE).await.expect("the turn ends");
        let stalls = losses(&call.ear().heard(), *onset, end);
        assert!(stalls.is_empty(), "{:?}: {stalls:?}", call.leg());
    }
    for call in &calls {
        let asked = site.speak(call.id().expect("named"), "Still here.").await.expect("taken");
        assert!(call.onset(asked, PATIENCE).await.is_some(), "{:?} is spoken to", call.leg());
        assert_eq!(call.hang_up().await, End::Local, "{:?}", call.leg());
    }
    for (node, name) in before.iter_mut().zip(NODES) {
        assert_eq!(node.ended().await, Some(0), "{name} of before ends with its last call");
    }
}

/// How many calls the process before has that now has the place at `http`.
async fn handed_over(site: &Site, http: &str) -> f64 {
    let Ok(answer) = site.client.get(format!("{http}/metrics")).send().await else { return 0.0 };
    let text = answer.text().await.unwrap_or_default();
    let told = text.lines().find_map(|line| line.strip_prefix("antiphon_handover_calls ")?.trim().parse().ok());
    told.unwrap_or_default()
}
