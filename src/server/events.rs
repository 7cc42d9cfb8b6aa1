//! `GET /v1/events`: what happens on all calls, devices, trunks and jobs, of all gateways, as server-sent events.

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
use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast, mpsc};
use tokio::task::{AbortHandle, JoinHandle, JoinSet};
use tokio::time::Interval;

use super::auth::Caller;
use super::error::ApiError;
use super::forward;
use crate::call::{CallEvent, CallId};
use crate::cluster::{self, Nodes, Peer};
use crate::gateway::Gateway;
use crate::node::NodeName;

/// How often the state of the devices is told.
const DEVICES_EVERY: Duration = Duration::from_secs(1);
/// Events of other gateways that may wait for the reader.
const THEIR_EVENTS: usize = 256;
/// Jobs that may wait for the reader.
const JOBS: usize = 64;
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

/// The stream, of the calls, devices, trunks and jobs of all gateways; devices and trunks say whose they are where there are
/// several. A reader that falls behind is told how many events it lost. Trunks are told of when it begins, and when something
/// about them has changed, jobs when something about them has changed.
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
    // Jobs of one database are told by this gateway, whoever works on them.
    let theirs_too = !gateway.jobs.are_shared();
    let others = nodes.map(|nodes| Others::follow(nodes, caller, theirs_too));
    let (tell, jobs) = mpsc::channel(JOBS);
    // It ends when the stream is dropped.
    tokio::spawn(super::job_events::gather(gateway.clone(), tell));
    let parts = (events, tick, trunks, others, jobs, gateway, place);
    let next = |(mut events, mut tick, mut trunks, mut others, mut jobs, gateway, place): Parts| async move {
        let event = tokio::select! {
            event = events.recv() => match event {
                Ok((id, event)) => told("call", event.describe(&id)),
                Err(broadcast::error::RecvError::Lagged(lost)) => told("lagged", json!({ "lost": lost })),
                Err(broadcast::error::RecvError::Closed) => return None,
            },
            event = theirs(&mut others) => event,
            Some(job) = jobs.recv() => told("job", job),
            _ = tick.tick() => {
                let before = std::mem::replace(&mut trunks, super::admin::trunks(&gateway));
                if before != trunks {
                    told("trunks", owned(&gateway, json!({ "trunks": trunks })))
                } else {
                    told("scheduler", owned(&gateway, json!({ "devices": super::admin::devices(&gateway) })))
                }
            }
        };
        Some((Ok(event), (events, tick, trunks, others, jobs, gateway, place)))
    };
    let stream = stream::unfold(parts, next);
    Ok(Sse::new(stream).keep_alive(KeepAlive::default()))
}

/// What one stream reads from, and its place among readers.
type Parts = (
    broadcast::Receiver<(CallId, CallEvent)>,
    Interval,
    Vec<Value>,
    Option<Others>,
    mpsc::Receiver<Value>,
    Gateway,
    OwnedSemaphorePermit,
);

/// Says whose this is, where there are several gateways.
fn owned(gateway: &Gateway, mut data: Value) -> Value {
    if let Some(nodes) = &gateway.nodes {
        data["node"] = json!(nodes.name().as_str());
    }
    data
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

/// The events of other gateways. Dropped, it listens no more.
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
    /// `jobs`: their jobs, too.
    fn follow(nodes: Nodes, caller: Caller, jobs: bool) -> Self {
        let (tell, events) = mpsc::channel(THEIR_EVENTS);
        Self { events, following: tokio::spawn(follow(nodes, caller, jobs, tell)) }
    }
}

/// Listens to every gateway that there is, and again where it broke off.
async fn follow(nodes: Nodes, caller: Caller, jobs: bool, tell: mpsc::Sender<(String, String)>) {
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
                let listen = listen(nodes.clone(), peer, forward::said(&caller), jobs, tell.clone());
                listening.insert(name, tasks.spawn(listen));
            }
        }
    }
}

/// Passes on what one gateway tells until it breaks off; then the next look tries again.
async fn listen(nodes: Nodes, peer: Peer, caller: cluster::Caller, jobs: bool, tell: mpsc::Sender<(String, String)>) {
    let Ok(request) = nodes.request(&peer, Method::GET, "/v1/events", Some(caller), None) else { return };
    let Ok(Ok(response)) = tokio::time::timeout(ANSWER, request.send()).await else { return };
    let Ok(mut response) = response.error_for_status() else { return };
    let mut read = Vec::new();
    // It ticks every second: silence is an end.
    while let Ok(Ok(Some(piece))) = tokio::time::timeout(ANSWER, response.chunk()).await {
        read.extend_from_slice(&piece);
        while let Some(end) = read.windows(2).position(|two| two == b"\n\n") {
            let event: Vec<u8> = read.drain(..end + 2).collect();
            if let Some(event) = parse(&event, &peer.name, jobs) {
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

/// Name and data of an event of the gateway `node`; `jobs`: those of its jobs, too.
fn parse(event: &[u8], node: &NodeName, jobs: bool) -> Option<(String, String)> {
    let text = std::str::from_utf8(event).ok().filter(|text| !text.contains('\r'))?;
    let field =
        |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim_start);
    let (name, data) = (field("event")?, field("data")?);
    match name {
        "call" | "lagged" => Some((name.to_owned(), data.to_owned())),
        "job" => jobs.then(|| (name.to_owned(), data.to_owned())),
        "scheduler" | "trunks" => {
            // Who sends it knows best, but one of the last release does not say.
            let mut data: Value = serde_json::from_str(data).ok()?;
            data.as_object_mut()?.insert("node".to_owned(), json!(node.as_str()));
            Some((name.to_owned(), data.to_string()))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_gateway_tells_is_passed_on_with_its_name() {
        let node: NodeName = "b".parse().expect("a name");
        let parse = |event: &[u8], jobs| parse(event, &node, jobs);
        let call = b"event: call\ndata: {\"callId\":\"b.1\"}\n\n";
        assert_eq!(parse(call, false), Some(("call".to_owned(), r#"{"callId":"b.1"}"#.to_owned())));
        let devices = parse(b"event: scheduler\ndata: {\"devices\":[]}\n\n", false);
        assert_eq!(devices, Some(("scheduler".to_owned(), r#"{"devices":[],"node":"b"}"#.to_owned())));
        let trunks = parse(b"event: trunks\ndata: {\"node\":\"b\",\"trunks\":[]}\n\n", false);
        assert_eq!(trunks, Some(("trunks".to_owned(), r#"{"node":"b","trunks":[]}"#.to_owned())));
        let job = b"event: job\ndata: {\"id\":\"b.2\"}\n\n";
        assert_eq!((parse(job, false), parse(job, true).is_some()), (None, true));
        for other in [
            &b"event: scheduler\ndata: []\n\n"[..],
            b"event: scheduler\ndata: {\n\n",
            b"event: another\ndata: {}\n\n",
            b":\n\n",
            b"data: {}\n\n",
            b"event: call\n\n",
            b"\xff\n\n",
        ] {
            assert_eq!(parse(other, true), None);
        }
    }
}
