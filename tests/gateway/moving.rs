//! A client that goes from one network to another in mid-word, as a telephone that leaves its Wi-Fi: the gateway and the
//! client live in network namespaces of their own with two links between them, of which one goes down. Where namespaces may
//! not be made, the tests are skipped.
//!
//! Besides how long a client is unheard and hears nothing, in time of the sound, what stays is looked at on the wire: an ICE restart
//! keeps the keys and the streams of both ways, and a client that goes over to another connection keeps its call.
//!
//! A namespace is entered with `ip netns exec`, so what happens in the client's is a test of its own (`inside_*`), which the
//! outer one runs there.

mod mouth;
mod wire;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use antiphon_loadgen::rtc::peer::{Peer, Shape};
use rtc::peer_connection::configuration::RTCOfferOptions;
use serde_json::{Value, json};
use tokio::time::timeout;
use webrtc::media_stream::track_remote::TrackRemoteEvent;
use webrtc::peer_connection::{RTCPeerConnectionState, RTCSessionDescription};

use super::chromium::Page;
use super::program::until;
use super::support::PATIENCE;
use mouth::Mouth;
use wire::Wire;

/// Where the gateway is, reached by either link.
const GATEWAY: &str = "10.213.9.1";
const URL: &str = "http://10.213.9.1:8080";
const KEY: &str = "key-key-key-key-key-key";
/// More than a quarter of a minute of speech.
const LONG: &str = "There are three flights to Lisbon tomorrow, the first of them at seven in the morning, the second a \
    little after noon, and the last one late in the evening, when fares are lowest. The first one is almost full, the \
    second has a stop in Madrid, and the third arrives a little before midnight, so that you would need a hotel.";
/// The longest gap in what is heard, in packets of 20 ms of the stream's own time: two seconds. It is
/// up to 25 of a peer that knows that it has moved, and 32 of Chromium that has the other network already. Of a network
/// that has just come up Chromium tells a connection two seconds after the last change of an address (its own wait for things to
/// settle), three where addresses of IPv6 are tried meanwhile; so `antiphon.js` goes over to a connection of another window,
/// which is told at once.
const GAP: u32 = 100;

/// Two namespaces and the links between them; gone when this is dropped.
struct Networks {
    client: String,
    gateway: String,
}

impl Networks {
    /// `None`, and the test is skipped, where they may not be made.
    fn make(tag: &str) -> Option<Networks> {
        if !antiphon_skip::has_program("ip", "iproute2") {
            return None;
        }
        let name = |side: &str| format!("antiphon-{tag}{side}-{}", std::process::id());
        let networks = Networks { client: name("c"), gateway: name("g") };
        let (c, g) = (&networks.client, &networks.gateway);
        let mut commands = vec![format!("netns add {c}"), format!("netns add {g}")];
        for link in 1..=2 {
            commands.push(format!("-n {c} link add c{link} type veth peer name g{link} netns {g}"));
            commands.push(format!("-n {c} addr add 10.213.{link}.2/24 dev c{link}"));
            commands.push(format!("-n {g} addr add 10.213.{link}.1/24 dev g{link}"));
            commands.push(format!("-n {g} link set g{link} up"));
        }
        commands.extend([
            format!("-n {c} link set c1 up"),
            format!("-n {c} link set lo up"),
            format!("-n {g} link set lo up"),
            format!("-n {g} addr add {GATEWAY}/32 dev lo"),
            format!("-n {c} route add default via 10.213.1.1"),
            format!("netns exec {c} true"),
        ]);
        for command in commands {
            if let Err(why) = ip(&command) {
                antiphon_skip::skip("netns", format_args!("`ip {command}`: {why}"));
                return None;
            }
        }
        Some(networks)
    }

    /// The gateway, in its namespace.
    fn serve(&self, folder: &Path) -> Gateway {
        let child = Command::new("ip")
            .args(["netns", "exec", &self.gateway, env!("CARGO_BIN_EXE_antiphon"), "serve"])
            .current_dir(folder)
            .env("XDG_STATE_HOME", folder)
            .env("ANTIPHON_HTTP__BIND", format!("{GATEWAY}:8080"))
            .env("ANTIPHON_HTTP__TOKENS", format!("[\"{KEY}\"]"))
            .env("ANTIPHON_HTTP__CORS", "[\"*\"]")
            .env("ANTIPHON_WEBRTC__BIND_IP", GATEWAY)
            // Who speaks all the time interrupts nobody.
            .env("ANTIPHON_CALL__BARGE_IN__INTERRUPTIBLE", "none")
            .env("ANTIPHON_RECORDING__MODE", "all")
            .env("ANTIPHON_RECORDING__CONSENT", "")
            .env("ANTIPHON_RECORDING__FORMAT", "wav")
            .env("ANTIPHON_SIP__UDP", "127.0.0.1:0")
            .env("ANTIPHON_SIP__TCP", "off")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(folder.join("log")).expect("a file"))
            .spawn();
        Gateway { child: child.expect("the program starts"), log: folder.join("log") }
    }

    /// Runs the test `name` of this module in the client's namespace.
    async fn inside(&self, name: &str, gateway: &Gateway) {
        let program = std::env::current_exe().expect("a program");
        let output = tokio::process::Command::new("ip")
            .args(["netns", "exec", &self.client])
            .arg(program)
            .args([&format!("moving::{name}"), "--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .env("ANTIPHON_TEST_NETWORK", &self.client)
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output();
        let output = timeout(Duration::from_secs(240), output).await.expect("it ends").expect("it runs");
        let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        let log = std::fs::read_to_string(&gateway.log).unwrap_or_default();
        let tail: Vec<&str> = log.lines().rev().take(20).collect();
        assert!(output.status.success() && said.contains("1 passed"), "{said}\n{tail:#?}");
        println!("{}", said.lines().filter(|line| line.contains("unheard")).collect::<Vec<_>>().join("\n"));
    }
}

impl Drop for Networks {
    fn drop(&mut self) {
        for name in [&self.client, &self.gateway] {
            let _ = ip(&format!("netns del {name}"));
        }
    }
}

struct Gateway {
    child: std::process::Child,
    log: PathBuf,
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ip(command: &str) -> Result<(), String> {
    let output = Command::new("ip").args(command.split(' ')).stdin(Stdio::null()).output();
    let output = output.map_err(|error| error.to_string())?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()) }
}

/// The namespace that this test was started in by another; `None` for who runs it by itself.
#[allow(clippy::disallowed_methods, reason = "this variable belongs to the test")]
fn network() -> Option<String> {
    std::env::var("ANTIPHON_TEST_NETWORK").ok()
}

/// From link `from` to link `to`: nothing is left of the old network but sockets that know its address.
fn move_over(network: &str, from: u8, to: u8) {
    for command in [
        format!("-n {network} link set c{to} up"),
        format!("-n {network} route replace default via 10.213.{to}.1"),
        format!("-n {network} link set c{from} down"),
    ] {
        ip(&command).unwrap_or_else(|error| panic!("ip {command}: {error}"));
    }
}

async fn start(networks: &Networks, folder: &Path, inside: &str) {
    let gateway = networks.serve(folder);
    networks.inside(inside, &gateway).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_changes_its_network_in_mid_word_stays_in_its_call() {
    let Some(networks) = Networks::make("p") else { return };
    let folder = tempfile::tempdir().expect("a folder");
    start(&networks, folder.path(), "inside_a_peer_moves").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn antiphon_js_stays_in_its_call_when_the_browser_changes_its_network() {
    if !antiphon_skip::has_program("chromium", "chromium") {
        return;
    }
    let Some(networks) = Networks::make("b") else { return };
    let folder = tempfile::tempdir().expect("a folder");
    start(&networks, folder.path(), "inside_a_browser_moves").await;
}

/// What a peer hears: how many packets of its stream have not come since the last that did.
struct Ear {
    peer: Peer,
    track: Option<std::sync::Arc<dyn webrtc::media_stream::track_remote::TrackRemote>>,
    ssrc: Option<u32>,
    last: Option<u16>,
}

impl Ear {
    /// Hears `count` packets more; gives the longest run that was missing among them.
    async fn hear(&mut self, count: usize) -> u32 {
        let mut longest = 0;
        let all = async {
            for _ in 0..count {
                let packet = self.next().await;
                let ssrc = *self.ssrc.get_or_insert(packet.header.ssrc);
                assert_eq!(packet.header.ssrc, ssrc, "the stream is the same");
                let number = packet.header.sequence_number;
                let missing = self.last.map_or(0, |last| number.wrapping_sub(last).wrapping_sub(1));
                // One that was overtaken is none that is missing.
                if missing < u16::MAX / 2 {
                    longest = longest.max(u32::from(missing));
                    self.last = Some(number);
                }
            }
        };
        timeout(PATIENCE, all).await.expect("speech");
        longest
    }

    async fn next(&mut self) -> rtc::rtp::Packet {
        loop {
            let Some(track) = &self.track else {
                self.track = self.peer.tracks.recv().await;
                continue;
            };
            if let TrackRemoteEvent::OnRtpPacket(packet) = track.poll().await.expect("a live track") {
                return packet;
            }
        }
    }
}

/// As a browser's client does: its sockets belong to the old network, so it asks for an ICE restart and has others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "another test runs it in a network namespace"]
async fn inside_a_peer_moves() {
    let Some(network) = network() else { return };
    until(&format!("{URL}/readyz"), |body| body["ready"] == true).await;
    let wire = Wire::tap(GATEWAY);
    let client = reqwest::Client::new();
    let shape = Shape { address: "0.0.0.0".parse().expect("an address"), eager: true, roams: true, ..Shape::default() };
    let mut peer = Peer::new(shape).await.expect("a peer");
    let offer = peer.connection.create_offer(None).await.expect("an offer");
    peer.connection.set_local_description(offer).await.expect("an offer");
    let offer = timeout(PATIENCE, peer.description()).await.expect("candidates").expect("an offer");
    let posted = client.post(format!("{URL}/whip?agent=silent")).bearer_auth(KEY);
    let answer = posted.header("content-type", "application/sdp").body(offer.clone()).send().await.expect("HTTP");
    assert_eq!(answer.status(), 201);
    let header = |name: &str| answer.headers()[name].to_str().expect("text").to_owned();
    let (session, tag, id) = (header("location"), header("etag"), header("x-antiphon-call"));
    let answer = answer.text().await.expect("SDP");
    let description = RTCSessionDescription::answer(answer.clone()).expect("an answer");
    peer.connection.set_remote_description(description).await.expect("an answer");
    let connected = peer.state.wait_for(|state| *state == RTCPeerConnectionState::Connected);
    timeout(PATIENCE, connected).await.expect("connected").expect("a driver");
    // As long as the call lasts.
    let mouth = Mouth::open(peer.microphone.clone().expect("a microphone"));

    let connection = peer.connection.clone();
    let mut ear = Ear { peer, track: None, ssrc: None, last: None };
    let (mut local, mut remote, mut tag) = (offer, answer, tag);
    speak(&client, &id).await;
    ear.hear(50).await;
    let before = wire.seen();
    assert!(before.handshake > 0, "{before:?}");
    for (from, to) in [(1, 2), (2, 1)] {
        ear.hear(50).await;
        move_over(&network, from, to);
        let offer = connection.create_offer(Some(RTCOfferOptions { ice_restart: true })).await.expect("an offer");
        connection.set_local_description(offer).await.expect("an offer");
        let fresh = async {
            loop {
                let sdp = connection.local_description().await.expect("an offer").sdp;
                if value(&sdp, "a=ice-ufrag:") != value(&local, "a=ice-ufrag:") {
                    return sdp;
                }
                tokio::task::yield_now().await;
            }
        };
        local = timeout(PATIENCE, fresh).await.expect("new credentials");
        let fragment = format!("{}\r\n{}\r\n", value(&local, "a=ice-ufrag:"), value(&local, "a=ice-pwd:"));
        // The connection of the first request went with its network.
        let patch = reqwest::Client::new().patch(format!("{URL}{session}")).bearer_auth(KEY).header("if-match", &tag);
        let patched = patch.header("content-type", "application/trickle-ice-sdpfrag").body(fragment).send().await;
        let patched = patched.expect("HTTP");
        assert_eq!(patched.status(), 200);
        let renewed = patched.headers()["etag"].to_str().expect("text").to_owned();
        assert_ne!(renewed, tag);
        tag = renewed;
        let fragment = patched.text().await.expect("SDP");
        for name in ["a=ice-ufrag:", "a=ice-pwd:"] {
            remote = remote.replace(&value(&remote, name), &value(&fragment, name));
        }
        let description = RTCSessionDescription::answer(remote.clone()).expect("an answer");
        connection.set_remote_description(description).await.expect("an answer");
        let gap = ear.hear(50).await;
        println!("a peer, from {from} to {to}: unheard for {gap} packets of 20 ms");
        assert!(gap < GAP, "unheard for {gap} packets");
    }

    // Another client: connections of the old one may be of the network that is gone.
    let client = reqwest::Client::new();
    assert_eq!(calls(&client).await, std::slice::from_ref(&id));

    // No handshake, so the keys are the first one's; and one stream each way, from both networks.
    let after = wire.seen();
    assert_eq!(after.handshake, before.handshake);
    assert_eq!((&after.there, &after.back), (&before.there, &before.back));
    assert_eq!((after.there.len(), after.back.len()), (1, 1), "{after:?}");
    assert_eq!(after.clients.len(), 2, "{after:?}");

    // What the client said meanwhile is on the recording, where it belongs.
    let said = mouth.said();
    connection.close().await.expect("closed");
    let record = format!("{URL}/v1/records/{id}");
    let complete = async {
        while get(&client, &record).await["recording"]["durationMs"].is_null() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, complete).await.expect("the recording is complete");
    let file = client.get(format!("{URL}/v1/calls/{id}/recording")).bearer_auth(KEY).send().await.expect("HTTP");
    let heard = mouth::caller(&file.bytes().await.expect("a file"));
    let gap = mouth::gap(&said, &heard);
    println!("a peer: unheard by the gateway for {gap:.1} s of sound");
    assert!(gap < 2.0, "{gap} s were not heard");
}

/// The module that pages use, in a browser whose network goes away while the agent speaks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "another test runs it in a network namespace"]
async fn inside_a_browser_moves() {
    let Some(network) = network() else { return };
    until(&format!("{URL}/readyz"), |body| body["ready"] == true).await;
    let wire = Wire::tap(GATEWAY);
    // Renewed with each network: its connections are of the old one.
    let mut client = reqwest::Client::new();
    let folder = tempfile::tempdir().expect("a folder");
    let microphone = folder.path().join("quiet.wav");
    let silence = antiphon_loadgen::heard::Clip { rate: 48_000, pcm: vec![0.0; 48_000] };
    antiphon_loadgen::wav::write(&microphone, &silence).expect("written");
    // Of this computer, for browsers give a microphone to no other without TLS.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let site = format!("http://{}", listener.local_addr().expect("bound"));
    let pages =
        axum::Router::new().route("/", axum::routing::get(async || axum::response::Html("<title>page</title>")));
    tokio::spawn(async { axum::serve(listener, pages).await });
    // It has both networks, as a telephone has, and then one after the other.
    ip(&format!("-n {network} link set c2 up")).expect("the other link");
    let mut page = Page::open(&microphone).await;
    page.ask("Page.navigate", json!({ "url": site })).await;
    let state = "window.call?.state + ' / ' + window.failed + ' / ' + JSON.stringify(window.seen)";
    let script = format!(
        "import('{URL}/antiphon.js').then(async ({{ connect }}) => {{ \
           window.seen = []; \
           const call = window.call = await connect({{ token: '{KEY}', agent: 'silent' }}); \
           for (const name of ['state', 'moved', 'renewed', 'ended']) \
             call.addEventListener(name, e => window.seen.push(name + ' ' + JSON.stringify(e.detail))); \
           let peer = call._peer, before = 0, had = 0; \
           window.others = 0; \
           window.codec = async () => {{ \
             const all = await call._peer.getStats(), values = [...all.values()]; \
             const sound = values.find(one => one.type == 'inbound-rtp' && one.packetsReceived > 0); \
             return all.get(sound?.codecId)?.mimeType; \
           }}; \
           window.networks = async () => {{ \
             const probe = new RTCPeerConnection(), found = new Set(); \
             probe.createDataChannel(''); \
             const all = new Promise(done => (probe.onicecandidate = e => \
               e.candidate ? found.add(e.candidate.candidate.split(' ')[4]) : done())); \
             await probe.setLocalDescription(); \
             await all; \
             probe.close(); \
             return [...found].filter(one => one).join(); \
           }}; \
           window.had = async () => {{ \
             const now = call._peer; \
             if (peer != now) [peer, before] = [now, had], window.others++; \
             const {{ received }} = await call.stats(); \
             if (now != call._peer) return window.had(); \
             had = before + received; \
             const [played] = now.getReceivers()[0].getSynchronizationSources(); \
             return [had, (played?.rtpTimestamp ?? 0) / 960]; \
           }}; \
         }}).catch(e => (window.failed = String(e))), 0"
    );
    page.until("document.readyState == 'complete'", "location.href").await;
    page.value(&script).await;
    page.until("window.call?.state == 'connected' && window.had != null", state).await;
    let id = page.value("window.call.id").await;
    let id = id.as_str().expect("an id");
    let what = ["agent", "codec", "leg", "state"];
    let first = get(&client, &format!("{URL}/v1/calls/{id}")).await;
    assert_eq!(
        what.map(|name| &first[name]),
        ["silent", "opus", "webrtc", "connected"].map(|value| json!(value)).each_ref()
    );
    let mut links = (1, 2);
    for round in 0..2 {
        if round == 1 {
            // The browser has forgotten the network that it left before that comes up again.
            let known = format!("networks().then(known => known == '10.213.{}.2')", links.0);
            page.until(&known, "networks()").await;
        }
        speak(&client, id).await;
        let (before, _) = had(&mut page).await;
        hear(&mut page, before + 50).await;
        move_over(&network, links.0, links.1);
        let (received, played) = had(&mut page).await;
        // The tail of what was on its way, and then more than a second of what came by the new network.
        hear(&mut page, received + 70).await;
        let (received_then, played_then) = had(&mut page).await;
        // Each packet is 20 ms of the stream's time, whether it came or not. The browser holds some before it plays them.
        let gap = (played_then - played) as i64 - (received_then as i64 - received as i64);
        println!("browser, move {round}: unheard for about {gap} packets of 20 ms");
        let seen = page.value("window.seen.join()").await.to_string();
        assert!(gap < i64::from(GAP), "unheard for {gap} packets; {seen}");
        client = reqwest::Client::new();
        assert_eq!(calls(&client).await, [id.to_owned()]);
        // Another connection has keys and streams of its own; call, agent and codec are the same.
        let now = get(&client, &format!("{URL}/v1/calls/{id}")).await;
        assert_eq!(what.map(|name| &now[name]), what.map(|name| &first[name]), "{now}");
        page.until("codec().then(codec => codec == 'audio/opus')", "codec()").await;
        let (others, streams) = (page.value("window.others").await, wire.seen());
        assert_eq!(others == json!(0), streams.there.len() == 1 && streams.back.len() == 1, "{others}: {streams:?}");
        assert!(!seen.contains("renewed") && !seen.contains("ended"), "{seen}");
        // The second network has just come up.
        assert!(round == 0 || seen.contains("moved"), "{seen}");
        let stop = client.post(format!("{URL}/v1/calls/{id}/interrupt")).bearer_auth(KEY).send().await.expect("HTTP");
        assert!(stop.status().is_success());
        links = (links.1, links.0);
    }
    page.value("window.call.hangUp()").await;
}

/// Packets that the page has had, and the time of its stream that it has played, in packets.
async fn had(page: &mut Page) -> (u64, f64) {
    let had = page.value("window.had()").await;
    (had[0].as_u64().expect("a count"), had[1].as_f64().expect("a time"))
}

/// Waits until the page has had `count` packets.
async fn hear(page: &mut Page, count: u64) {
    page.until(&format!("window.had().then(had => had[0] >= {count})"), "JSON.stringify(window.seen)").await;
}

async fn speak(client: &reqwest::Client, id: &str) {
    let said = client.post(format!("{URL}/v1/calls/{id}/turns")).bearer_auth(KEY).json(&json!({ "text": LONG }));
    let said = said.send().await.expect("HTTP");
    assert_eq!(said.status(), 202, "{:?}", said.text().await);
}

/// The first line of `sdp` that begins so.
fn value(sdp: &str, begin: &str) -> String {
    sdp.lines().find(|line| line.starts_with(begin)).unwrap_or_else(|| panic!("{begin} in {sdp}")).to_owned()
}

async fn get(client: &reqwest::Client, url: &str) -> Value {
    client.get(url).bearer_auth(KEY).send().await.expect("HTTP").json().await.expect("JSON")
}

/// The ids of the calls that there are.
async fn calls(client: &reqwest::Client) -> Vec<String> {
    let calls = get(client, &format!("{URL}/v1/calls")).await;
    let calls = calls["calls"].as_array().unwrap_or_else(|| panic!("{calls}"));
    calls.iter().map(|call| call["id"].as_str().expect("an id").to_owned()).collect()
}
