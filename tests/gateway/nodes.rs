//! Several gateways behind one number, with a real Redis: whichever one a request comes to answers it, calls go where there
//! is room, and who is gone is noticed.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use antiphon::clock;
use antiphon::cluster::{Caller, HEADER, Nodes, Owner, Told};
use antiphon::config::{Config, EngineKind};
use antiphon::secret::Secret;
use antiphon::server::config::{Scope, Token};
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::sip;
use futures_util::StreamExt;
use reqwest::{Method, Response};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::timeout;

use super::counted::sum;
use super::metrics::scrape;
use super::program::Serve;
use super::raw::{Raw, header, sdp};
use super::support::{PATIENCE, Rig, SENTENCE, hear_turn};
use super::tour::offer;

pub(crate) const TOKEN: &str = "between-these-gateways";

/// A Redis of the test's own, in memory.
pub(crate) struct Redis {
    process: Option<Child>,
    folder: tempfile::TempDir,
    port: u16,
}

impl Redis {
    /// `None`: the program is not here, and the test is skipped.
    pub(crate) fn start() -> Option<Self> {
        if !antiphon_skip::has_program("redis-server", "redis-server") {
            return None;
        }
        // Given back at once: the program binds it a moment later.
        let free = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a free port");
        let folder = tempfile::tempdir().expect("a folder");
        let mut redis = Self { process: None, folder, port: free.port() };
        redis.run();
        Some(redis)
    }

    pub(crate) fn run(&mut self) {
        let port = self.port.to_string();
        let process = Command::new("redis-server")
            .args(["--bind", "127.0.0.1", "--port", &port, "--save", "", "--appendonly", "no", "--dir"])
            .arg(self.folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        self.process = Some(process.expect("the program starts"));
    }

    pub(crate) fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            // It may have ended by itself.
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// The gateway of this name.
    pub(crate) async fn gateway(&self, name: &str, change: impl FnOnce(&mut Config)) -> Rig {
        let url = self.url();
        Rig::with(|config| {
            config.engine.kind = EngineKind::Tone;
            config.cluster.redis = Some(Secret::new(url));
            config.cluster.token = Some(Secret::new(TOKEN));
            config.cluster.node = Some(name.parse().expect("a name"));
            config.cluster.advertise = Some("http://127.0.0.1:0".into());
            change(config);
        })
        .await
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Waits until what `/readyz` of a gateway says is as wanted.
pub(crate) async fn until(rig: &Rig, wanted: impl Fn(&Value) -> bool) {
    let look = async {
        while !wanted(&rig.get("/readyz").await.1) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let said = timeout(PATIENCE, look).await;
    assert!(said.is_ok(), "{}", rig.get("/readyz").await.1);
}

/// Waits until a gateway knows these others.
pub(crate) async fn knows(rig: &Rig, others: &[&str]) {
    until(rig, |said| said["cluster"]["others"] == json!(others) && said["cluster"]["registry"] == true).await;
}

async fn ask(rig: &Rig, method: Method, path: &str, headers: &[(&str, &str)], body: &str) -> Response {
    let mut request = rig.client.request(method, format!("{}{path}", rig.http)).body(body.to_owned());
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.send().await.expect("HTTP")
}

fn told(response: &Response, name: &str) -> String {
    response.headers().get(name).unwrap_or_else(|| panic!("a header {name}")).to_str().expect("ASCII").to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whichever_gateway_a_request_comes_to_the_owner_answers_it() {
    let Some(redis) = Redis::start() else { return };
    let trunk = |config: &mut Config| {
        let line = "name = 'line'\nhost = '127.0.0.1:9'";
        config.sip.trunk = vec![toml::from_str(line).expect("a trunk")];
    };
    let rigs = [redis.gateway("a", |_| {}).await, redis.gateway("b", |_| {}).await, redis.gateway("c", trunk).await];
    knows(&rigs[0], &["b", "c"]).await;
    knows(&rigs[1], &["a", "c"]).await;
    knows(&rigs[2], &["a", "b"]).await;

    let mut calls = Vec::new();
    for rig in &rigs {
        calls.push(rig.telephone("silent", Codec::Pcmu).await);
    }
    let ids: Vec<String> = calls.iter().map(|call| call.id().expect("named").to_owned()).collect();
    for (id, name) in ids.iter().zip(["a.", "b.", "c."]) {
        assert!(id.starts_with(name), "{id}");
    }
    for rig in &rigs {
        for id in &ids {
            let (status, call) = rig.get(&format!("/v1/calls/{id}")).await;
            assert_eq!((status, &call["id"]), (200, &json!(id)));
        }
        let (_, list) = rig.get("/v1/calls").await;
        let mut listed: Vec<&str> =
            list["calls"].as_array().expect("a list").iter().filter_map(|call| call["id"].as_str()).collect();
        listed.sort_unstable();
        let mut all: Vec<&str> = ids.iter().map(String::as_str).collect();
        all.sort_unstable();
        assert_eq!((listed, &list["unreached"]), (all, &json!([])));
    }
    // A turn that is asked for at another gateway is heard on the call.
    let asked = rigs[1].speak(&calls[0], SENTENCE).await;
    hear_turn(&calls[0], asked).await;

    // A WebSocket and the stream of events, too.
    let url = format!("{}/v1/calls/{}/media", rigs[2].http.replace("http", "ws"), ids[0]);
    let (mut socket, _) = tokio_tungstenite::connect_async(url).await.expect("upgraded");
    let first = timeout(PATIENCE, socket.next()).await.expect("in time").expect("open").expect("sound");
    assert!(first.to_text().expect("text").contains("connected"), "{first}");
    drop(socket);
    let mut events = ask(&rigs[1], Method::GET, "/v1/events", &[], "").await;
    let mut read = String::new();
    let heard = async {
        let wanted = format!("\"callId\":\"{}\"", ids[2]);
        let trunks = |line: &str| line.contains("\"trunks\":[{") && line.contains("\"node\":\"c\"");
        let devices =
            |line: &str, node: &str| line.contains("\"devices\":[{") && line.contains(&format!("\"node\":\"{node}\""));
        let told = |read: &str| {
            read.contains(&wanted)
                && read.lines().any(trunks)
                && ["a", "b", "c"].iter().all(|node| read.lines().any(|line| devices(line, node)))
        };
        while !told(&read) {
            // It begins to listen to the others within a second.
            if !read.contains(&wanted) {
                rigs[2].speak(&calls[2], "Here.").await;
            }
            let piece = events.chunk().await.expect("open").expect("no end");
            read.push_str(&String::from_utf8_lossy(&piece));
        }
    };
    timeout(PATIENCE, heard).await.expect("a call, devices and trunks of another gateway");
    drop(events);

    // A call that ends at another gateway is over, and its record is read there.
    let ended = ask(&rigs[0], Method::DELETE, &format!("/v1/calls/{}", ids[2]), &[], "").await;
    assert_eq!(ended.status(), 204);
    let gone = async { while rigs[1].get(&format!("/v1/calls/{}", ids[2])).await.0 != 404 {} };
    timeout(PATIENCE, gone).await.expect("it is over");
    assert_eq!(rigs[1].get(&format!("/v1/records/{}", ids[2])).await.0, 200);

    // Browsers: offer, candidates and end at three gateways.
    for (path, kind) in
        [("/whip", "application/trickle-ice-sdpfrag"), ("/v1/webrtc", "application/trickle-ice-sdpfrag")]
    {
        let (_peer, sdp) = offer().await;
        let made = ask(&rigs[0], Method::POST, path, &[("content-type", "application/sdp")], &sdp).await;
        assert_eq!(made.status(), 201);
        let (location, tag) = (told(&made, "location"), told(&made, "etag"));
        assert!(location.starts_with(&format!("{path}/a.")), "{location}");
        let of_it = ["a=ice-ufrag:", "a=ice-pwd:", "a=candidate:"];
        let lines = sdp.lines().filter(|line| of_it.iter().any(|start| line.starts_with(start)));
        let fragment = lines.collect::<Vec<_>>().join("\r\n") + "\r\n";
        let headers = [("content-type", kind), ("if-match", &*tag), ("origin", &*rigs[1].http)];
        let trickled = ask(&rigs[1], Method::PATCH, &location, &headers, &fragment).await;
        assert_eq!(trickled.status(), 204);
        assert_eq!(ask(&rigs[2], Method::DELETE, &location, &[], "").await.status(), 200);
        assert_eq!(ask(&rigs[2], Method::DELETE, &location, &[], "").await.status(), 404);
    }
    let (_peer, sdp) = offer().await;
    let (status, answer) = rigs[0].post("/api/offer", json!({ "sdp": sdp, "type": "offer" })).await;
    assert_eq!(status, 200, "{answer}");
    let patch = json!({ "pc_id": answer["pc_id"], "candidates": [] }).to_string();
    let json = [("content-type", "application/json")];
    assert_eq!(ask(&rigs[2], Method::PATCH, "/api/offer", &json, &patch).await.status(), 200);

    // A page's token is good at every gateway, for its one call.
    let (_, issued) = rigs[0].post("/v1/tokens", json!({ "agent": "silent" })).await;
    let bearer = format!("Bearer {}", issued["token"].as_str().expect("a token"));
    let (_peer, sdp) = offer().await;
    let page = [("content-type", "application/sdp"), ("authorization", &*bearer)];
    let made = ask(&rigs[1], Method::POST, "/whip", &page, &sdp).await;
    assert_eq!(made.status(), 201);
    assert!(told(&made, "location").starts_with("/whip/a."));
    assert_eq!(ask(&rigs[2], Method::POST, "/whip", &page, &sdp).await.status(), 401, "used");
    let over = ask(&rigs[2], Method::DELETE, &told(&made, "location"), &page[1..], "").await;
    assert_eq!(over.status(), 200);

    let (status, job) = rigs[1].post("/v1/audio/speech/batch", json!({ "input": SENTENCE })).await;
    assert_eq!(status, 202, "{job}");
    let job = format!("/v1/jobs/{}", job["id"].as_str().expect("an id"));
    assert_eq!(rigs[0].get(&job).await.0, 200);

    // Nobody's, forged, and passed on twice.
    let (status, error) = rigs[0].get("/v1/calls/z.0123456789").await;
    assert_eq!((status, &error["error"]["code"]), (404, &json!("node_gone")));
    let forged = ask(&rigs[0], Method::GET, &format!("/v1/calls/{}", ids[0]), &[(HEADER, "e30.AAAA")], "").await;
    assert_eq!(forged.status(), 401);
    let nodes = rigs[0].app.gateway().nodes.as_ref().expect("a cluster");
    let c = nodes.others().into_iter().find(|peer| peer.name.as_str() == "c").expect("known");
    let path = format!("/v1/calls/{}", ids[1]);
    let anybody = Some(Caller { tenant: String::new(), all: true, dialer: None });
    let twice = nodes.request(&c, Method::GET, &path, anybody, None).expect("sayable").send().await.expect("HTTP");
    assert_eq!(twice.status(), 404, "c answers for itself, and b has the call");
    // Each gateway of this process sets the same gauges; one registry or another is up.
    let shown = scrape(&rigs[0]).await;
    let tells = |series: &str| shown.lines().any(|line| line.starts_with(series) && !line.ends_with(" 0"));
    for series in ["antiphon_passed_on_total{outcome=\"answered\"}", "antiphon_cluster_nodes "] {
        assert!(tells(series), "{series}: {shown}");
    }
    for rig in rigs {
        rig.app.drain().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rights_are_judged_where_a_request_comes_in_and_hold_at_the_owner() {
    let Some(redis) = Redis::start() else { return };
    let tokens = |config: &mut Config| {
        config.http.tokens = vec![
            Token::new("crm", "crm-of-sixteen-characters", vec![Scope::Calls]),
            Token::new("shop", "shop-of-sixteen-characters", vec![Scope::Calls]),
            Token::new("ops", "ops-of-sixteen-characters", Vec::new()),
        ];
    };
    let (a, b) = (redis.gateway("a", tokens).await, redis.gateway("b", tokens).await);
    knows(&a, &["b"]).await;
    knows(&b, &["a"]).await;
    let bearer = |name: &str| format!("Bearer {name}-of-sixteen-characters");
    let (_peer, sdp) = offer().await;
    let headers = [("content-type", "application/sdp"), ("authorization", &*bearer("crm"))];
    let made = ask(&a, Method::POST, "/whip", &headers, &sdp).await;
    assert_eq!(made.status(), 201);
    let call = format!("/v1/calls/{}", told(&made, "x-antiphon-call"));
    for (who, wanted) in [("crm", 200), ("ops", 200), ("shop", 404), ("nobody", 401)] {
        for rig in [&a, &b] {
            let response = ask(rig, Method::GET, &call, &[("authorization", &bearer(who))], "").await;
            assert_eq!(response.status(), wanted, "{who}");
            let listed = ask(rig, Method::GET, "/v1/calls", &[("authorization", &bearer(who))], "").await;
            let listed: Value = listed.json().await.expect("JSON");
            let seen = listed["calls"].as_array().map_or(0, Vec::len);
            assert_eq!(seen, usize::from(wanted == 200), "{who}");
        }
    }
    // A socket brings its token in the query, and takes it no further.
    let id = told(&made, "x-antiphon-call");
    let socket = |token: &str| format!("{}/v1/calls/{id}/media?access_token={token}", b.http.replace("http", "ws"));
    assert!(tokio_tungstenite::connect_async(socket("crm-of-sixteen-characters")).await.is_ok());
    assert!(tokio_tungstenite::connect_async(socket("shop-of-sixteen-characters")).await.is_err());
    for rig in [a, b] {
        rig.app.drain().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_one_gateway_has_no_room_for_goes_to_another() {
    let Some(redis) = Redis::start() else { return };
    let a = redis.gateway("a", |config| config.call.max_calls = 1).await;
    let b = redis.gateway("b", |_| {}).await;
    knows(&a, &["b"]).await;
    knows(&b, &["a"]).await;
    let mut telephone = Raw::new(a.sip_udp(), "room").await;
    telephone.ask("OPTIONS", "", "", "200").await;
    let call = a.telephone("silent", Codec::Pcmu).await;

    // It says so, by HTTP and by SIP, and sends callers on.
    until(&a, |said| said["ready"] == false && said["room"] == false).await;
    let mut telephone = Raw::new(a.sip_udp(), "no-room").await;
    let options = telephone.ask("OPTIONS", "", "", "503").await;
    assert!(header(&options, "Retry-After").is_some(), "{options}");
    let mut telephone = Raw::new(a.sip_udp(), "elsewhere").await;
    let moved = telephone.ask("INVITE", "", &sdp(40_000, ""), "302").await;
    let contact = header(&moved, "Contact").expect("where to").to_owned();
    assert!(contact.contains(&format!("sip:demo@{}", b.sip_udp())), "{moved}");
    telephone.ack("").await;

    let (_peer, sdp) = offer().await;
    let made = ask(&a, Method::POST, "/whip?agent=silent", &[("content-type", "application/sdp")], &sdp).await;
    assert_eq!(made.status(), 201);
    assert!(told(&made, "location").starts_with("/whip/b."), "{:?}", made.headers());
    assert_eq!(ask(&a, Method::DELETE, &told(&made, "location"), &[], "").await.status(), 200);

    let mut called = Raw::new(b.sip_udp(), "called").await;
    let (status, placed) = a.post("/v1/calls", json!({ "to": called.uri(), "agent": "silent" })).await;
    let id = placed["id"].as_str().unwrap_or_default().to_owned();
    assert!(status == 201 && id.starts_with("b."), "{placed}");
    called.next("INVITE").await;
    assert_eq!(ask(&a, Method::DELETE, &format!("/v1/calls/{id}"), &[], "").await.status(), 204);

    // A gateway that drains takes none either; then there is nobody, and it is said when to come again.
    let (status, _) = b.post("/v1/admin/drain", json!({ "drain": true })).await;
    assert_eq!(status, 200);
    until(&b, |said| said["ready"] == false && said["draining"] == true).await;
    let mut telephone = Raw::new(b.sip_udp(), "draining").await;
    let options = telephone.ask("OPTIONS", "", "", "503").await;
    assert!(header(&options, "Retry-After").is_some(), "{options}");
    // The last that takes requests does not say that it wants none.
    until(&a, |said| said["ready"] == true && said["room"] == false).await;
    let (_peer, sdp) = offer().await;
    let refused = ask(&a, Method::POST, "/whip", &[("content-type", "application/sdp")], &sdp).await;
    assert_eq!(refused.status(), 503);
    assert!(told(&refused, "retry-after").parse::<u64>().is_ok_and(|seconds| seconds >= 1));
    call.hang_up().await;
    for rig in [a, b] {
        rig.app.drain().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_goes_on_without_redis_and_notices_one_that_was_killed() {
    let Some(mut redis) = Redis::start() else { return };
    let a = redis.gateway("a", |_| {}).await;
    let folder = tempfile::tempdir().expect("a folder");
    let url = redis.url();
    let b = Serve::start(folder.path(), folder.path(), |command| {
        command.env("ANTIPHON_ENGINE__KIND", "tone").env("ANTIPHON_CLUSTER__REDIS", &url);
        command.env("ANTIPHON_CLUSTER__NODE", "b").env("ANTIPHON_CLUSTER__ADVERTISE", "http://127.0.0.1:0");
        command.env("ANTIPHON_CLUSTER__TOKEN", TOKEN);
    });
    b.ready().await;
    knows(&a, &["b"]).await;
    let caller = sip::Caller::bind(sip::Config::default()).await.expect("free ports");
    let call = caller.call(&format!("sip:silent@{}", b.sip)).await.expect("answered");
    let path = format!("/v1/calls/{}", call.id().expect("named"));
    assert_eq!(a.get(&path).await.0, 200);
    // Of the program, which is alone with its metrics.
    let registry = async |up: f64| {
        let told = async {
            while sum(&b.metrics().await, "antiphon_registry_up ") != up {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(PATIENCE, told).await.unwrap_or_else(|_| panic!("the registry is never told to be {up}"));
    };
    registry(1.0).await;

    redis.kill();
    until(&a, |said| said["cluster"]["registry"] == false && said["cluster"]["error"].is_string()).await;
    let own = a.telephone("silent", Codec::Pcmu).await;
    let asked = a.speak(&own, SENTENCE).await;
    hear_turn(&own, asked).await;
    let (status, said) = a.get("/readyz").await;
    assert_eq!((status, &said["ready"]), (200, &json!(true)), "alone and complete: {said}");
    assert_eq!(a.get(&path).await.0, 200, "what was known of the other is still tried");
    registry(0.0).await;
    redis.run();
    knows(&a, &["b"]).await;
    registry(1.0).await;

    b.signal("KILL");
    knows(&a, &[]).await;
    let (status, error) = a.get(&path).await;
    assert_eq!((status, &error["error"]["code"]), (502, &json!("node_unreachable")), "{error}");
    let (_, list) = a.get("/v1/calls").await;
    assert_eq!(list["calls"].as_array().map(Vec::len), Some(1), "{list}");
    own.hang_up().await;
    call.hang_up().await;
    a.app.drain().await;
}

/// The next registration at `registrar`, which takes it: the gateway's address.
async fn registration(registrar: &mut Raw) -> String {
    let request = registrar.expect("REGISTER").await;
    let contact = header(&request, "Contact").expect("a contact").to_owned();
    let address = contact.split(['@', '>', ';']).nth(1).expect("an address").to_owned();
    registrar.target = address.parse().expect("an address");
    registrar.answer(&request, "200 OK", &format!("Contact: {contact}\r\nExpires: 600\r\n")).await;
    address
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_gateway_registers_at_a_trunk_and_another_after_it() {
    let Some(redis) = Redis::start() else { return };
    let mut registrar = Raw::new("127.0.0.1:9".parse().expect("an address"), "registrar").await;
    let host = registrar.uri().replace("sip:raw@", "");
    let trunk = format!("name = 'carrier'\nhost = '{host}'\nregister = true\nusername = 'us'\npassword = 'secret'");
    let with_trunk = |config: &mut Config| config.sip.trunk = vec![toml::from_str(&trunk).expect("a trunk")];
    let (a, b) = (redis.gateway("a", with_trunk).await, redis.gateway("b", with_trunk).await);
    let first = registration(&mut registrar).await;
    let (holder, other) = if a.sip_udp().to_string() == first { (a, b) } else { (b, a) };
    assert_eq!(holder.sip_udp().to_string(), first);
    let registered = |state: Value| move |said: &Value| said["trunks"][0]["registered"] == state;
    until(&holder, registered(json!(true))).await;
    knows(&other, &[holder.app.gateway().nodes.as_ref().expect("a cluster").name().as_str()]).await;
    until(&other, registered(Value::Null)).await;

    let next = other.sip_udp().to_string();
    let taken_over = async {
        // What the other one says at its end may come first.
        while registration(&mut registrar).await != next {}
    };
    let ((), taken_over) = tokio::join!(holder.app.drain(), timeout(PATIENCE, taken_over));
    taken_over.expect("the other one registers");
    until(&other, registered(json!(true))).await;
    let leave = async { while registration(&mut registrar).await != next {} };
    let ((), left) = tokio::join!(other.app.drain(), timeout(PATIENCE, leave));
    left.expect("it says that it ends");
}

#[tokio::test]
async fn a_node_whose_place_is_taken_is_known_throughout() {
    let Some(redis) = Redis::start() else { return };
    let _ = rustls::crypto::ring::default_provider().install_default();
    let node = |name: &str| {
        let mut config = Config::default();
        config.cluster.redis = Some(Secret::new(redis.url()));
        config.cluster.token = Some(Secret::new(TOKEN));
        config.cluster.node = Some(name.parse().expect("a name"));
        config.cluster.advertise = Some("http://127.0.0.1:0".into());
        Nodes::new(&config.cluster, 8080).expect("valid").expect("a cluster")
    };
    // In the registry, until `stop` is sent or dropped.
    let keeping = |nodes: &Nodes, ends: bool| {
        let (stop, stopped) = watch::channel(false);
        (stop, tokio::spawn(nodes.clone().keep(Told::default, Vec::new(), stopped, move || ends)))
    };
    let listed = async |nodes: &Nodes| {
        let listed = async {
            while !nodes.status(clock::now()).registry {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(PATIENCE, listed).await.expect("it is in the registry");
    };
    let before = node("a");
    let (stop, kept) = keeping(&before, false);
    listed(&before).await;
    stop.send_replace(true);
    kept.await.expect("no panic");
    // Who comes now knows it, though no process tells of it in this moment.
    let other = node("b");
    other.look().await;
    assert!(matches!(other.owner("a.1"), Owner::There(_)), "{:?}", other.status(clock::now()));
    let after = node("a");
    let (stop, kept) = keeping(&after, true);
    listed(&after).await;
    assert_eq!(after.status(clock::now()).error, None, "the name is free for it");
    stop.send_replace(true);
    kept.await.expect("no panic");
    let late = node("c");
    late.look().await;
    assert!(matches!(late.owner("a.1"), Owner::Gone(_)), "the last process of the node said that it ends");
}
