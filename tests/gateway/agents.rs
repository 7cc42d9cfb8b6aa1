//! Agents over WebSocket: they speak, hear of interruptions, die and flood; only their own call notices.

use std::time::Duration;

use antiphon::agent::config::Agent;
use antiphon::call::EndReason;
use antiphon_loadgen::agent::Server;
use antiphon_loadgen::call::{End, now};
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::correlate;
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};

use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::tungstenite::Message;

use super::support::{PATIENCE, Rig, SENTENCE, gaps, hear_turn};

async fn rig_with_agent(change: impl FnOnce(&mut Agent)) -> (Rig, Server) {
    let server = Server::bind("127.0.0.1:0".parse().expect("an address")).await.expect("a free port");
    let mut agent = Agent::at(&server.url());
    change(&mut agent);
    let rig = Rig::with(|config| {
        config.agent.insert("remote".into(), agent);
    })
    .await;
    (rig, server)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_streamed_turn_is_spoken_and_an_interruption_reported() {
    let (rig, mut server) = rig_with_agent(|_| {}).await;
    let call = rig.telephone("remote", Codec::Pcmu).await;
    let mut session = server.next_session(PATIENCE).await.expect("the gateway dials");
    assert_eq!(session.setup()["type"], "setup");
    assert_eq!(session.setup()["callSid"], json!(call.id()));
    let text = SENTENCE.repeat(5);
    let asked = session.say_by_tokens(&text, Duration::from_millis(1)).await.expect("sent");
    let onset = call.onset(asked, PATIENCE).await.expect("speech is heard");
    // Let some of it sound: what was heard is then neither nothing nor all.
    call.ear()
        .wait(PATIENCE, |heard| (heard.clip_between(onset, now()).duration() > Duration::from_secs(2)).then_some(()))
        .await
        .expect("two seconds of it are heard");
    call.press("1").await.expect("keys go out");
    let (_, frame) = session.recv_type("dtmf", PATIENCE).await.expect("the key arrives");
    assert_eq!(frame["digit"], "1");
    let (_, frame) = session.recv_type("interrupt", PATIENCE).await.expect("the cut is reported");
    let heard = frame["utteranceUntilInterrupt"].as_str().expect("a text").trim_end();
    assert!(!heard.is_empty() && text.starts_with(heard) && heard.len() < text.len(), "{frame}");
    assert!(frame["durationUntilInterruptMs"].as_u64() > Some(1_000), "{frame}");
    assert!(frame["heardWords"].as_u64() > Some(0) && frame["sentMs"].as_u64() > Some(1_000), "{frame}");
    call.silence(now(), Duration::from_secs(1), PATIENCE).await.expect("it is silent");
    session.end().await.expect("sent");
    assert_eq!(call.ended(PATIENCE).await, Some(End::Remote));
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_caller_writes_reaches_the_agent_as_what_is_said_would() {
    let (rig, mut server) = rig_with_agent(|agent| agent.language = Some("en-GB".into())).await;
    let call = rig.telephone("remote", Codec::Pcmu).await;
    let mut session = server.next_session(PATIENCE).await.expect("the gateway dials");
    let path = format!("/v1/calls/{}/prompt", call.id().expect("named"));
    assert_eq!(rig.post(&path, json!({ "text": " Where is my parcel? " })).await.0, 202);
    let (_, frame) = session.recv_type("prompt", PATIENCE).await.expect("the prompt arrives");
    assert_eq!(
        (&frame["voicePrompt"], &frame["lang"], &frame["last"]),
        (&json!("Where is my parcel?"), &json!("en-GB"), &json!(true))
    );
    for text in [" ".to_owned(), "a".repeat(8_193)] {
        let (status, error) = rig.post(&path, json!({ "text": text })).await;
        assert_eq!((status, &error["error"]["code"]), (400, &json!("invalid_request")));
    }
    call.hang_up().await;
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_dies_costs_its_call_an_apology_and_others_nothing() {
    let (rig, mut server) = rig_with_agent(|agent| agent.apology = "Sorry, goodbye.".into()).await;
    let other = rig.telephone("silent", Codec::Pcma).await;
    let began = rig.speak(&other, &SENTENCE.repeat(3)).await;
    let onset = other.onset(began, PATIENCE).await.expect("speech is heard");
    let call = rig.telephone("remote", Codec::Pcmu).await;
    let session = server.next_session(PATIENCE).await.expect("the gateway dials");
    let died = now();
    drop(session);
    call.onset(died, PATIENCE).await.expect("the apology is heard");
    assert_eq!(call.ended(PATIENCE).await, Some(End::Remote));
    rig.assert_heard(&call, "Sorry, goodbye.", (died, now()), 0.8).await;
    let (_, end) = hear_turn(&other, began).await;
    assert_eq!(gaps(&other.ear().heard(), onset, end), []);
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_cannot_be_reached_ends_the_call() {
    let rig = Rig::with(|config| {
        // Port 9 is discard; nobody listens there.
        let agent = Agent { apology: String::new(), ..Agent::at("ws://127.0.0.1:9/") };
        config.agent.insert("gone".into(), agent);
    })
    .await;
    let call = rig.telephone("gone", Codec::Pcmu).await;
    let handle = rig.app.gateway().calls.get(&call.id().expect("named").into());
    assert_eq!(call.ended(PATIENCE).await, Some(End::Remote));
    // Where the call was over before it could be looked up there is nothing to ask.
    if let Some(handle) = handle {
        assert_eq!(handle.ended().await, EndReason::AgentLost);
    }
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_floods_is_slowed_and_its_call_stays_bounded() {
    let (rig, mut server) = rig_with_agent(|_| {}).await;
    let call = rig.telephone("remote", Codec::Pcmu).await;
    let mut session = server.next_session(PATIENCE).await.expect("the gateway dials");
    let paused = async {
        loop {
            let (_, frame) = session.recv(PATIENCE).await.expect("back-pressure is told");
            if frame["type"] == "flow" && frame["state"] == "pause" {
                return;
            }
        }
    };
    let handle = rig.handle(&call).await;
    let flood = async {
        let url = format!("{}/v1/calls/{}/turns", rig.http, handle.id());
        loop {
            let body = json!({ "text": SENTENCE.repeat(20) });
            let status = rig.client.post(&url).json(&body).send().await.expect("HTTP").status();
            if status == 429 {
                return;
            }
            assert_eq!(status, 202);
        }
    };
    flood.await;
    paused.await;
    assert!(handle.info().backlog_bytes <= 64 << 10, "{}", handle.info().backlog_bytes);
    call.hang_up().await;
    rig.app.drain().await;
}

/// Seen where memory was short: turns were accepted and then silent for half a minute, with no word to anybody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_that_cannot_be_spoken_costs_an_apology_and_its_agent_is_told() {
    let (rig, mut server) = rig_with_agent(|agent| agent.apology = SENTENCE.into()).await;
    let call = rig.telephone("remote", Codec::Pcmu).await;
    let mut session = server.next_session(PATIENCE).await.expect("the gateway dials");
    let turn = json!({ "type": "text", "token": "Hello there.", "last": true, "voice": "nobody at all" });
    let asked = session.send(&turn).await.expect("sent");
    let (_, error) = session.recv_type("error", PATIENCE).await.expect("it is told");
    assert!(error["description"].as_str().is_some_and(|text| text.contains("nobody at all")), "{error}");
    let (_, end) = hear_turn(&call, asked).await;
    let heard = call.ear().heard().clip_between(asked, end + Duration::from_millis(200));
    let found = correlate::correlate(&heard, &rig.reference(SENTENCE).await).expect("comparable rates");
    assert!(found.value > 0.8, "the apology is not what was heard: {found:?}");
    // The call goes on.
    let asked = session.say(SENTENCE).await.expect("still there");
    hear_turn(&call, asked).await;
    call.hang_up().await;
    rig.app.drain().await;
}

/// How an agent goes on after it has accepted the connection.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stall {
    /// The handshake is never answered.
    Handshake,
    /// Nothing is read or said after it: no pong either.
    Silent,
    /// A turn is begun, and then nothing is read or said.
    MidTurn,
}

/// The next connection to `listener`, which stalls and stays open.
async fn stalled(listener: &TcpListener, stall: Stall) -> Box<dyn std::any::Any + Send> {
    let (stream, _) = tokio::time::timeout(PATIENCE, listener.accept()).await.expect("dialled").expect("open");
    if stall == Stall::Handshake {
        return Box::new(stream);
    }
    let mut socket = tokio_tungstenite::accept_async(stream).await.expect("upgraded");
    if stall == Stall::MidTurn {
        let text = json!({ "type": "text", "token": SENTENCE.repeat(10), "last": false });
        socket.send(Message::text(text.to_string())).await.expect("sent");
    }
    Box::new(socket)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_stalls_costs_its_call_an_apology_and_others_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("ws://{}/", listener.local_addr().expect("bound"));
    let rig = Rig::with(|config| {
        let agent = Agent { apology: "Sorry, goodbye.".into(), stall_s: 1, ..Agent::at(&url) };
        config.agent.insert("remote".into(), agent);
    })
    .await;
    let other = rig.telephone("silent", Codec::Pcma).await;
    let began = rig.speak(&other, &SENTENCE.repeat(8)).await;
    let onset = other.onset(began, PATIENCE).await.expect("speech is heard");
    for stall in [Stall::Handshake, Stall::Silent, Stall::MidTurn] {
        let called = now();
        let call = rig.telephone("remote", Codec::Pcmu).await;
        let handle = rig.handle(&call).await;
        let kept = stalled(&listener, stall).await;
        call.onset(called, PATIENCE).await.unwrap_or_else(|| panic!("{stall:?}: nothing is heard"));
        assert_eq!(call.ended(PATIENCE).await, Some(End::Remote), "{stall:?}");
        assert_eq!(handle.ended().await, EndReason::AgentLost, "{stall:?}");
        // The unfinished turn was cut for the apology, which was said to its end.
        rig.assert_heard(&call, "Sorry, goodbye.", (called, now()), 0.8).await;
        assert_eq!(handle.info().turns, if stall == Stall::MidTurn { 2 } else { 1 }, "{stall:?}");
        drop(kept);
    }
    let (_, end) = hear_turn(&other, began).await;
    assert_eq!(gaps(&other.ear().heard(), onset, end), []);
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_attaches_takes_the_place_of_one_that_never_answers() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("ws://{}/", listener.local_addr().expect("bound"));
    let rig = Rig::with(|config| {
        config.agent.insert("remote".into(), Agent { apology: "Sorry, goodbye.".into(), ..Agent::at(&url) });
    })
    .await;
    let call = rig.telephone("remote", Codec::Pcmu).await;
    // From when it is dialled the other agent has to be there within the five seconds that this one is waited for.
    let _kept = stalled(&listener, Stall::Handshake).await;
    let url = format!("{}/v1/calls/{}/agent", rig.http.replace("http", "ws"), call.id().expect("named"));
    let (mut socket, _) = tokio_tungstenite::connect_async(url).await.expect("upgraded");
    let setup = tokio::time::timeout(PATIENCE, socket.next()).await.expect("it is served").expect("open");
    assert!(setup.expect("sound").to_text().is_ok_and(|text| text.contains("\"setup\"")));
    let asked = now();
    let text = json!({ "type": "text", "token": SENTENCE, "last": true });
    socket.send(Message::text(text.to_string())).await.expect("sent");
    hear_turn(&call, asked).await;
    call.hang_up().await;
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_answers_slowly_is_waited_for() {
    let (rig, mut server) = rig_with_agent(|agent| agent.stall_s = 1).await;
    let call = rig.telephone("remote", Codec::Pcmu).await;
    let called = now();
    let session = server.next_session(PATIENCE).await.expect("the gateway dials");
    // It reads, and so it lives: three times what counts as stalled.
    assert_eq!(call.onset(called, Duration::from_secs(3)).await, None, "nothing is said meanwhile");
    let asked = session.say(SENTENCE).await.expect("still there");
    let (onset, end) = hear_turn(&call, asked).await;
    let recording = call.ear().heard().clip_between(asked, end + Duration::from_millis(200));
    let found = correlate::correlate(&recording, &rig.reference(SENTENCE).await).expect("comparable rates");
    assert!(onset > asked && found.value > 0.8, "{found:?}");
    session.end().await.expect("sent");
    assert_eq!(call.ended(PATIENCE).await, Some(End::Remote));
    rig.app.drain().await;
}

/// Bytes of memory of this process that are resident.
fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    pages.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).expect("a number") * 4_096
}

/// Sends `frame` again and again until the other side takes no more for a while, or `most` bytes are gone.
async fn flood(socket: &mut tokio_tungstenite::WebSocketStream<TcpStream>, frame: &str, most: usize) -> usize {
    let mut sent = 0;
    while sent < most {
        let write = socket.send(Message::text(frame.to_owned()));
        match tokio::time::timeout(Duration::from_secs(2), write).await {
            Ok(Ok(())) => sent += frame.len(),
            Ok(Err(_)) | Err(_) => break,
        }
    }
    sent
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_floods_its_socket_is_slowed_by_it_and_memory_stays_bounded() {
    /// More than every buffer between two sockets of this machine and the gateway's own.
    const FLOOD: usize = 256 << 20;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("ws://{}/", listener.local_addr().expect("bound"));
    let rig = Rig::with(|config| {
        config.agent.insert("remote".into(), Agent { stall_s: 60, ..Agent::at(&url) });
    })
    .await;
    let other = rig.telephone("silent", Codec::Pcma).await;
    let began = rig.speak(&other, &SENTENCE.repeat(3)).await;
    let onset = other.onset(began, PATIENCE).await.expect("speech is heard");
    let whole = json!({ "type": "text", "token": SENTENCE.repeat(16), "last": true });
    // One that no call could ever hold is refused, and does not stop what comes after it.
    let huge = json!({ "type": "text", "token": SENTENCE.repeat(8_000), "last": true });
    for (kind, frame) in [("turns", whole), ("turns too long", huge), ("nonsense", json!({ "type": "x" }))] {
        let call = rig.telephone("remote", Codec::Pcmu).await;
        let handle = rig.handle(&call).await;
        let (stream, _) = tokio::time::timeout(PATIENCE, listener.accept()).await.expect("dialled").expect("open");
        let mut socket = tokio_tungstenite::accept_async(stream).await.expect("upgraded");
        let before = resident();
        // An agent that reads nothing of what it is told either.
        let most = if kind == "nonsense" { 1 << 20 } else { FLOOD };
        let sent = flood(&mut socket, &frame.to_string(), most).await;
        let grown = resident().saturating_sub(before);
        assert!(grown < 96 << 20, "{kind}: {grown} bytes more after {sent}");
        assert!(handle.info().backlog_bytes <= 64 << 10, "{kind}: {}", handle.info().backlog_bytes);
        if kind == "turns" {
            assert!(sent < FLOOD, "nothing slowed the agent");
            assert_eq!(handle.info().state, "connected");
        }
        call.hang_up().await;
    }
    let (_, end) = hear_turn(&other, began).await;
    assert_eq!(gaps(&other.ear().heard(), onset, end), []);
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_browser_is_its_own_agent_on_the_data_channel() {
    let rig = Rig::start().await;
    let mut call = rig.browser("client").await;
    assert!(call.status_becomes(PATIENCE, |status| status.channel).await, "the channel opens");
    let asked = now();
    call.send_text(&json!({ "type": "text", "token": SENTENCE, "last": true }).to_string()).await.expect("sent");
    hear_turn(&call, asked).await;
    let mut ended = false;
    while let Some((_, text)) = call.next_text(Duration::from_secs(5)).await {
        ended |= text.contains("turnEnded");
        if ended {
            break;
        }
    }
    assert!(ended, "the browser is told that its turn ended");
    call.hang_up().await;
    rig.app.drain().await;
}

/// What a built-in agent has told a page is not told again when another agent takes over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_is_told_of_each_turn_once_whichever_agent_it_has() {
    let rig = Rig::start().await;
    let mut call = rig.browser("client").await;
    assert!(call.status_becomes(PATIENCE, |status| status.channel).await, "the channel opens");
    let text = |id: &str| json!({ "type": "text", "token": "Yes.", "last": true, "utteranceId": id }).to_string();
    call.send_text(&text("first")).await.expect("sent");
    let mut ended: Vec<String> = Vec::new();
    let mut socket = None;
    while !ended.iter().any(|id| id == "second") {
        let (_, frame) = call.next_text(PATIENCE).await.expect("the page is told");
        let frame: Value = serde_json::from_str(&frame).expect("JSON");
        if frame["name"] == "turnEnded" {
            ended.push(frame["utteranceId"].as_str().expect("a turn").to_owned());
        }
        if socket.is_none() && !ended.is_empty() {
            let url = format!("{}/v1/calls/{}/agent", rig.http.replace("http", "ws"), call.id().expect("named"));
            let (mut other, _) = tokio_tungstenite::connect_async(url).await.expect("upgraded");
            other.send(Message::text(text("second"))).await.expect("sent");
            socket = Some(other);
        }
    }
    assert_eq!(ended, ["first", "second"]);
    call.hang_up().await;
    rig.app.drain().await;
}

/// What a browser writes while its call holds as much as it may waits in order, and none of it is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_browser_that_writes_faster_than_is_spoken_is_spoken_in_full() {
    const TURNS: usize = 8;
    let rig = Rig::with(|config| config.call.max_backlog_bytes = 16).await;
    let mut call = rig.browser("client").await;
    assert!(call.status_becomes(PATIENCE, |status| status.channel).await, "the channel opens");
    for n in 0..TURNS {
        let turn = json!({ "type": "text", "token": format!("Yes {n}."), "last": true, "utteranceId": n.to_string() });
        call.send_text(&turn.to_string()).await.expect("sent");
    }
    let mut ended = Vec::new();
    while ended.len() < TURNS {
        let (_, text) = call.next_text(PATIENCE).await.expect("every turn is told of");
        let frame: Value = serde_json::from_str(&text).expect("JSON");
        assert_ne!(frame["type"], "error", "{text}");
        if frame["name"] == "turnEnded" {
            assert_eq!(frame["how"], "done", "{text}");
            ended.push(frame["utteranceId"].as_str().expect("named").parse::<usize>().expect("a number"));
        }
    }
    assert_eq!(ended, (0..TURNS).collect::<Vec<_>>());
    call.hang_up().await;
    rig.app.drain().await;
}
