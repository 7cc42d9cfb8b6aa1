//! `GET /v1/events`: what happens on all calls and devices, as server-sent events.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::Method;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::routing::get;
use axum::{Extension, Router};
use futures_util::stream::{self, Stream};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, broadcast, mpsc};
use tokio::task::{AbortHandle, JoinHandle, JoinSet};

use super::auth::Caller;
use super::error::ApiError;
use super::forward;
use crate::cluster::{self, Nodes, Peer};
use crate::gateway::Gateway;
use crate::node::NodeName;

/// How often the state of the devices is told.
const DEVICES_EVERY: Duration = Duration::from_secs(1);
/// Events of other gateways that may wait for the reader.
const THEIR_EVENTS: usize = 256;
/// Longest silence of another gateway.
const ANSWER: Duration = Duration::from_secs(5);
/// Longest event of another gateway, bytes.
const MAX_EVENT: usize = 1 << 20;

/// How many may read at once: for each of them every event is written, and devices are asked every second.
const READERS: usize = 256;
/// When another may have left.
const RETRY: Duration = Duration::from_secs(10);

/// Room for readers.
#[derive(Clone)]
struct Readers(Arc<Semaphore>);

pub(super) fn router() -> Router<Gateway> {
    let readers = Readers(Arc::new(Semaphore::new(READERS)));
    Router::new().route("/v1/events", get(stream)).layer(Extension(readers))
}

/// The stream, of the calls of all gateways and the devices and trunks of this one. A reader that falls behind is told how
/// many events it lost. Trunks are told of when it begins, and when something about them has changed.
async fn stream(
    State(gateway): State<Gateway>,
    Extension(Readers(readers)): Extension<Readers>,
    caller: Caller,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, ApiError> {
    let place = readers.try_acquire_owned();
    let place = place.map_err(|_| ApiError::unavailable(format!("{READERS} read events already"), RETRY))?;
    let events = gateway.calls.events();
    let tick = tokio::time::interval(DEVICES_EVERY);
    let trunks = Vec::new();
    let nodes = gateway.nodes.clone().filter(|_| !caller.passed_on);
    let others = nodes.map(|nodes| Others::follow(nodes, caller));
    let parts = (events, tick, trunks, others, gateway, place);
    let stream = stream::unfold(parts, |(mut events, mut tick, mut trunks, mut others, gateway, place)| async move {
        let event = tokio::select! {
            event = events.recv() => match event {
                Ok((id, event)) => told("call", event.describe(&id)),
                Err(broadcast::error::RecvError::Lagged(lost)) => told("lagged", json!({ "lost": lost })),
                Err(broadcast::error::RecvError::Closed) => return None,
            },
            event = theirs(&mut others) => event,
            _ = tick.tick() => {
                let before = std::mem::replace(&mut trunks, super::admin::trunks(&gateway));
                if before != trunks {
                    told("trunks", json!({ "trunks": trunks }))
                } else {
                    told("scheduler", json!({ "devices": super::admin::devices(&gateway) }))
                }
            }
        };
        Some((Ok(event), (events, tick, trunks, others, gateway, place)))
    });
    Ok(Sse::new(stream).keep_alive(KeepAlive::default()))
}

fn told(name: &str, data: Value) -> Event {
    Event::default().event(name).json_data(data).expect("plain JSON")
}

/// Cancel safe; waits for ever where there are no others.
async fn theirs(others: &mut Option<Others>) -> Event {
    let event = match others {
        Some(others) => others.events.recv().await,
        None => None,
    };
    match event {
        Some((name, data)) => Event::default().event(name).data(data),
        None => std::future::pending().await,
    }
}

/// The events of calls at other gateways. Dropped, it listens no more.
struct Others {
    events: mpsc::Receiver<(String, String)>,
    following: JoinHandle<()>,
}

impl Drop for Others {
    fn drop(&mut self) {
        self.following.abort();
    }
}

impl Others {
    fn follow(nodes: Nodes, caller: Caller) -> Self {
        let (tell, events) = mpsc::channel(THEIR_EVENTS);
        Self { events, following: tokio::spawn(follow(nodes, caller, tell)) }
    }
}

/// Listens to every gateway that there is, and again where it broke off.
async fn follow(nodes: Nodes, caller: Caller, tell: mpsc::Sender<(String, String)>) {
    let mut tick = tokio::time::interval(DEVICES_EVERY);
    let mut listening: HashMap<NodeName, AbortHandle> = HashMap::new();
    // Dropped with this task, it ends all of them.
    let mut tasks = JoinSet::new();
    loop {
        tick.tick().await;
        while tasks.try_join_next().is_some() {}
        listening.retain(|_, task| !task.is_finished());
        for peer in nodes.others() {
            if !listening.contains_key(&peer.name) {
                let name = peer.name.clone();
                listening.insert(name, tasks.spawn(listen(nodes.clone(), peer, forward::said(&caller), tell.clone())));
            }
        }
    }
}

/// Passes on what one gateway tells of its calls until it breaks off; then the next look tries again.
async fn listen(nodes: Nodes, peer: Peer, caller: cluster::Caller, tell: mpsc::Sender<(String, String)>) {
    let Ok(request) = nodes.request(&peer, Method::GET, "/v1/events", Some(caller), None) else { return };
    let Ok(Ok(response)) = tokio::time::timeout(ANSWER, request.send()).await else { return };
    let Ok(mut response) = response.error_for_status() else { return };
    let mut read = Vec::new();
    // It ticks every second: silence is an end.
    while let Ok(Ok(Some(piece))) = tokio::time::timeout(ANSWER, response.chunk()).await {
        read.extend_from_slice(&piece);
        while let Some(end) = read.windows(2).position(|two| two == b"\n\n") {
            let event: Vec<u8> = read.drain(..end + 2).collect();
            if let Some(event) = parse(&event) {
                // overflow: awaited; the other gateway counts what its reader is too slow for
                if tell.send(event).await.is_err() {
                    return;
                }
            }
        }
        if read.len() > MAX_EVENT {
            tracing::warn!(node = %peer.name, "events of another gateway cannot be read");
            return;
        }
    }
}

/// Name and data of an event that is about calls; others are the business of their own gateway.
fn parse(event: &[u8]) -> Option<(String, String)> {
    let text = std::str::from_utf8(event).ok().filter(|text| !text.contains('\r'))?;
    let field =
        |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim_start);
    let name = field("event").filter(|name| matches!(*name, "call" | "lagged"))?;
    Some((name.to_owned(), field("data")?.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_another_gateway_only_its_calls_are_told() {
        let call = b"event: call\ndata: {\"callId\":\"b.1\"}\n\n";
        assert_eq!(parse(call), Some(("call".to_owned(), r#"{"callId":"b.1"}"#.to_owned())));
        for other in
            [&b"event: scheduler\ndata: {}\n\n"[..], b":\n\n", b"data: {}\n\n", b"event: call\n\n", b"\xff\n\n"]
        {
            assert_eq!(parse(other), None);
        }
    }
}
