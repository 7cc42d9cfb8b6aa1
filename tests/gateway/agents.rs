//! Agents over WebSocket: they speak, hear of interruptions, die and flood; only their own call notices.

use std::time::Duration;

use antiphon::agent::config::Agent;
use antiphon_loadgen::agent::Server;
use antiphon_loadgen::call::{End, now};
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::listen;
use serde_json::json;

use super::support::{PATIENCE, Rig, SENTENCE, hear_turn};

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
    let asked = session.say_by_tokens(&SENTENCE.repeat(5), Duration::from_millis(1)).await.expect("sent");
    call.onset(asked, PATIENCE).await.expect("speech is heard");
    call.press("1").await.expect("keys go out");
    let (_, frame) = session.recv_type("dtmf", PATIENCE).await.expect("the key arrives");
    assert_eq!(frame["digit"], "1");
    let (_, frame) = session.recv_type("interrupt", PATIENCE).await.expect("the cut is reported");
    assert!(frame["durationUntilInterruptMs"].as_u64().is_some(), "{frame}");
    call.silence(now(), Duration::from_secs(1), PATIENCE).await.expect("it is silent");
    session.end().await.expect("sent");
    assert_eq!(call.ended(PATIENCE).await, Some(End::Remote));
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
    let (_, end) = hear_turn(&other, began).await;
    let stalls = listen::stalls(&other.ear().heard(), onset, end, Duration::from_millis(100));
    assert!(stalls.is_empty(), "{stalls:?}");
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
    assert_eq!(call.ended(PATIENCE).await, Some(End::Remote));
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
    let handle = rig.app.gateway().calls.get(&call.id().expect("named").into()).expect("live");
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
