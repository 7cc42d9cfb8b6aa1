//! Requests that another gateway answers: those for its calls and sessions, and new calls that this one has no room for.
//!
//! # Why
//! Nothing may depend on which gateway a balancer picks. The id of an object names its owner, so one look suffices, and a
//! request is passed on once at most: the owner answers for itself, whatever it finds. The rights of the caller are judged
//! where the request came in; the owner is told for whom it is (see [`crate::cluster::Pass`]).

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{MatchedPath, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::future::join_all;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use metrics::counter;
use serde_json::Value;

use super::MAX_BODY;
use super::auth::Caller;
use super::error::ApiError;
use crate::clock;
use crate::cluster::{self, Nodes, Owner, Peer};
use crate::gateway::Gateway;
use crate::node::NodeName;
use crate::reach::cause;

/// Longest wait for the first byte of an answer.
const ANSWER: Duration = Duration::from_secs(30);
/// The same where the request waits for somebody to pick up a telephone.
const ANSWER_OF_CALLED: Duration = Duration::from_secs(660);
/// The same for lists that all gateways have a part of: one that is slow is left out.
const PART: Duration = Duration::from_secs(3);
/// Gateways that a new call is offered to before it is refused.
const OFFERS: usize = 3;
/// Longest part of a list, bytes.
const MAX_PART: usize = 16 << 20;

/// Headers of one connection (RFC 9110 section 7.6.1), and those by which the first gateway alone judges.
const LEFT_OUT: [HeaderName; 11] = [
    header::HOST,
    header::CONNECTION,
    header::UPGRADE,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::EXPECT,
    header::AUTHORIZATION,
    header::ORIGIN,
    header::VARY,
    HeaderName::from_static(cluster::HEADER),
];

/// Middleware behind the check of tokens: passes on what is another gateway's.
pub(super) async fn route(State(gateway): State<Gateway>, request: Request, next: Next) -> Response {
    let caller = request.extensions().get::<Caller>();
    let judged = caller.filter(|caller| !caller.passed_on && caller.page.is_none()).cloned();
    let (Some(nodes), Some(caller)) = (&gateway.nodes, judged) else { return next.run(request).await };
    let matched = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned()).unwrap_or_default();
    let (request, id) = match named(&matched, request).await {
        Ok(named) => named,
        Err(error) => return error.into_response(),
    };
    // Jobs of one database are every gateway's, also where the one that took them on is gone.
    let id = id.filter(|_| !(matched.starts_with("/v1/jobs/") && gateway.jobs.are_shared()));
    // So are records; but their sound is only where it was recorded.
    let here_too = matched == "/v1/records/{id}" && gateway.records.are_shared();
    match id.as_deref().map(|id| nodes.owner(id)) {
        Some(Owner::There(peer)) => {
            let (parts, body) = request.into_parts();
            let again = here_too.then(|| Request::from_parts(parts.clone(), Body::empty()));
            let request = Request::from_parts(parts, body);
            return match (pass_on(nodes, &peer, Judged::Here(&caller), request).await, again) {
                (Ok(response), _) => response,
                (Err(Failed::Unreached(_) | Failed::Silent(_)), Some(again)) => next.run(again).await,
                (Err(failed), _) => failed.told(&peer.name).into_response(),
            };
        }
        Some(Owner::Gone(_)) if here_too => {}
        Some(Owner::Gone(name)) => return gone(&name, &id.unwrap_or_default()).into_response(),
        Some(Owner::Here) | None => {}
    }
    if !begins_a_call(request.method(), &matched) {
        return next.run(request).await;
    }
    match elsewhere(&gateway, nodes, &caller, request).await {
        Ok(response) => response,
        Err(request) => {
            let mut response = next.run(request).await;
            tell_when(nodes, &mut response);
            response
        }
    }
}

/// Passes on what only `peer` can judge, with its token. `nodes` is there where a peer is.
///
/// # Errors
/// The peer cannot be reached.
pub(super) async fn with_its_token(
    nodes: Option<&Nodes>,
    peer: &Peer,
    origin: Option<String>,
    request: Request,
) -> Result<Response, ApiError> {
    let Some(nodes) = nodes else { return Err(gone(&peer.name, "")) };
    pass_on(nodes, peer, Judged::There(origin), request).await.map_err(|failed| failed.told(&peer.name))
}

/// The answers of all other gateways to `GET path`, for `caller`; an error for one that gave none.
pub(super) async fn gather(nodes: &Nodes, caller: &Caller, path: &str) -> Vec<(NodeName, Option<Value>)> {
    let ask = async |peer: Peer| {
        let request = nodes.request(&peer, Method::GET, path, Some(said(caller)), None).ok()?;
        let response = request.timeout(PART).send().await.ok()?.error_for_status().ok()?;
        let body = axum::body::to_bytes(Body::from_stream(response.bytes_stream()), MAX_PART).await.ok()?;
        serde_json::from_slice(&body).ok()
    };
    let asked = nodes.others().into_iter().map(async |peer| (peer.name.clone(), ask(peer).await));
    join_all(asked).await
}

/// For whom another gateway is asked.
pub(super) fn said(caller: &Caller) -> cluster::Caller {
    let dialer = caller.dialer.as_ref().map(|dialer| dialer.key);
    cluster::Caller { tenant: caller.tenant.to_string(), all: caller.is_operator(), dialer }
}

/// The id that a request is about: in its path, or, of the JSON offers, in its body, which is read for that.
pub(super) async fn named(matched: &str, request: Request) -> Result<(Request, Option<String>), ApiError> {
    if matched == "/api/offer" {
        let (parts, body) = request.into_parts();
        let bytes = whole(body).await?;
        let pc_id =
            serde_json::from_slice::<Value>(&bytes).ok().and_then(|body| body["pc_id"].as_str().map(str::to_owned));
        return Ok((Request::from_parts(parts, bytes.into()), pc_id));
    }
    let mut segments = matched.split('/').zip(request.uri().path().split('/'));
    let id = segments.find(|(pattern, _)| matches!(*pattern, "{id}" | "{session}")).map(|(_, id)| id.to_owned());
    Ok((request, id))
}

pub(super) async fn whole(body: Body) -> Result<Bytes, ApiError> {
    axum::body::to_bytes(body, MAX_BODY).await.map_err(|_| {
        let message = format!("the body could not be read, or is larger than {MAX_BODY} bytes");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
    })
}

pub(super) fn begins_a_call(method: &Method, matched: &str) -> bool {
    *method == Method::POST && matches!(matched, "/v1/calls" | "/v1/webrtc" | "/whip" | "/api/offer")
}

/// Offers a new call to others where this gateway would not take it. `Err`: it is this one's after all.
async fn elsewhere(gateway: &Gateway, nodes: &Nodes, caller: &Caller, request: Request) -> Result<Response, Request> {
    if gateway.room.check().is_ok() {
        return Err(request);
    }
    let peers = nodes.with_room(clock::now());
    if peers.is_empty() {
        return Err(request);
    }
    let (parts, body) = request.into_parts();
    let bytes = match whole(body).await {
        Ok(bytes) => bytes,
        Err(error) => return Ok(error.into_response()),
    };
    let again = || {
        let mut request = Request::new(Body::from(bytes.clone()));
        (*request.method_mut(), *request.uri_mut()) = (parts.method.clone(), parts.uri.clone());
        *request.headers_mut() = parts.headers.clone();
        request
    };
    for peer in peers.into_iter().take(OFFERS) {
        nodes.sent(&peer);
        match pass_on(nodes, &peer, Judged::Here(caller), again()).await {
            // It has filled up meanwhile.
            Ok(response) if response.status() == StatusCode::SERVICE_UNAVAILABLE => {}
            Ok(response) => return Ok(response),
            // Nothing was said to it, so that no call can come of it twice.
            Err(Failed::Unreached(_)) => {}
            Err(failed) => return Ok(failed.told(&peer.name).into_response()),
        }
    }
    Err(Request::from_parts(parts, bytes.into()))
}

/// Makes `Retry-After` of a refusal that of all gateways.
fn tell_when(nodes: &Nodes, response: &mut Response) {
    if response.status() != StatusCode::SERVICE_UNAVAILABLE {
        return;
    }
    let own = response.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
    let Some(own) = own.map(Duration::from_secs) else { return };
    let wait = nodes.retry_after(clock::now(), own).as_millis().div_ceil(1_000).max(1);
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(wait as u64));
}

fn gone(name: &NodeName, id: &str) -> ApiError {
    let message = format!("`{id}` was on the gateway `{name}`, which is gone: what it had in progress has ended");
    ApiError::new(StatusCode::NOT_FOUND, "node_gone", message)
}

/// Who has judged a request.
enum Judged<'a> {
    /// This gateway, for this caller.
    Here(&'a Caller),
    /// The other one will; the page that it came from.
    There(Option<String>),
}

/// Why a request was not answered by another gateway.
pub(super) enum Failed {
    /// There was no connection: nothing has happened.
    Unreached(String),
    /// It did not answer in time, or broke off.
    Silent(String),
    /// It cannot be said to another.
    Unsayable(String),
}

impl Failed {
    fn told(self, name: &NodeName) -> ApiError {
        match self {
            Failed::Unreached(why) => {
                let message = format!("the gateway `{name}`, whose this is, cannot be reached: {why}");
                ApiError::new(StatusCode::BAD_GATEWAY, "node_unreachable", message)
            }
            Failed::Silent(why) => {
                let message = format!("the gateway `{name}`, whose this is, did not answer: {why}");
                ApiError::new(StatusCode::BAD_GATEWAY, "node_silent", message)
            }
            Failed::Unsayable(why) => ApiError::bad_request("invalid_path", why),
        }
    }
}

async fn pass_on(nodes: &Nodes, peer: &Peer, judged: Judged<'_>, request: Request) -> Result<Response, Failed> {
    let passed = send(nodes, peer, judged, request).await;
    let outcome = match &passed {
        Ok(_) => "answered",
        Err(Failed::Unreached(_)) => "unreached",
        Err(Failed::Silent(_) | Failed::Unsayable(_)) => "failed",
    };
    counter!("antiphon_passed_on_total", "outcome" => outcome).increment(1);
    passed
}

async fn send(nodes: &Nodes, peer: &Peer, judged: Judged<'_>, mut request: Request) -> Result<Response, Failed> {
    let upgrades = request.headers().contains_key(header::UPGRADE);
    let upgrade = upgrades.then(|| hyper::upgrade::on(&mut request));
    let (parts, body) = request.into_parts();
    let path = match judged {
        Judged::Here(_) => without_token(parts.uri.path(), parts.uri.query()),
        Judged::There(_) => parts.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned(),
    };
    let (body, limit) = patience(&parts, body).await?;
    let mut headers = passable(&parts.headers);
    for name in [header::CONNECTION, header::UPGRADE].iter().filter(|_| upgrades) {
        headers.extend(parts.headers.get(name).map(|value| (name.clone(), value.clone())));
    }
    let (caller, origin) = match judged {
        Judged::Here(caller) => (Some(said(caller)), None),
        Judged::There(origin) => {
            headers
                .extend(parts.headers.get(header::AUTHORIZATION).map(|value| (header::AUTHORIZATION, value.clone())));
            (None, origin)
        }
    };
    let has_body =
        [header::CONTENT_LENGTH, header::TRANSFER_ENCODING].iter().any(|name| parts.headers.contains_key(name));
    let mut asked =
        nodes.request(peer, parts.method, &path, caller, origin).map_err(Failed::Unsayable)?.headers(headers);
    if has_body {
        asked = asked.body(reqwest::Body::wrap_stream(body.into_data_stream()));
    }
    relay(asked, limit, upgrade).await
}

/// Longest wait for the first byte of an answer to a request that is passed on, and its body.
pub(super) async fn patience(parts: &Parts, body: Body) -> Result<(Body, Duration), Failed> {
    if parts.method != Method::POST || parts.uri.path() != "/v1/calls" {
        return Ok((body, ANSWER));
    }
    let bytes = whole(body).await.map_err(|_| Failed::Unsayable("the body could not be read".into()))?;
    let waits = waits_for_answer(parts.uri.query(), &bytes);
    Ok((Body::from(bytes), if waits { ANSWER_OF_CALLED } else { ANSWER }))
}

/// Whether a request that places a call is answered when somebody has picked up.
fn waits_for_answer(query: Option<&str>, body: &[u8]) -> bool {
    query.unwrap_or_default().split('&').any(|pair| pair == "wait=answer")
        || serde_json::from_slice::<Value>(body).is_ok_and(|body| body["wait"] == Value::Bool(true))
}

/// The answer to `asked`, whose first byte comes within `limit`; where both sides switch protocols, `upgrade` is the
/// client's side of that.
pub(super) async fn relay(
    asked: reqwest::RequestBuilder,
    limit: Duration,
    upgrade: Option<OnUpgrade>,
) -> Result<Response, Failed> {
    let response = match tokio::time::timeout(limit, asked.send()).await {
        Ok(Ok(response)) => response,
        Ok(Err(error)) if error.is_connect() => return Err(Failed::Unreached(cause(&error))),
        Ok(Err(error)) => return Err(Failed::Silent(cause(&error))),
        Err(_) => return Err(Failed::Silent(format!("nothing within {} s", limit.as_secs()))),
    };
    let (status, mut headers) = (response.status(), passable(response.headers()));
    let upgrade = upgrade.filter(|_| status == StatusCode::SWITCHING_PROTOCOLS);
    let Some(upgrade) = upgrade else {
        let mut answer = Response::new(Body::from_stream(response.bytes_stream()));
        (*answer.status_mut(), *answer.headers_mut()) = (status, headers);
        return Ok(answer);
    };
    for name in [header::CONNECTION, header::UPGRADE] {
        headers.extend(response.headers().get(&name).map(|value| (name, value.clone())));
    }
    let mut theirs = response.upgrade().await.map_err(|error| Failed::Silent(cause(&error)))?;
    tokio::spawn(async move {
        // A client that is gone before it has the answer ends both.
        let Ok(ours) = upgrade.await else { return };
        // Either end may close or break; then so does the other.
        let _ = tokio::io::copy_bidirectional(&mut TokioIo::new(ours), &mut theirs).await;
    });
    let mut answer = Response::new(Body::empty());
    (*answer.status_mut(), *answer.headers_mut()) = (status, headers);
    Ok(answer)
}

/// Headers that may go on: what is of one connection, of cross-origin rules and of proof stays here.
fn passable(headers: &HeaderMap) -> HeaderMap {
    let of_pages = |name: &HeaderName| {
        let name = name.as_str();
        name.starts_with("access-control-")
            || name.starts_with("sec-fetch-")
            || name.starts_with("proxy-")
            || name == "keep-alive"
    };
    let kept = headers.iter().filter(|(name, _)| !LEFT_OUT.contains(name) && !of_pages(name));
    let mut passed = HeaderMap::new();
    kept.for_each(|(name, value)| {
        passed.append(name, value.clone());
    });
    passed
}

/// A path with its query, but for a token in it: whose it is was found.
fn without_token(path: &str, query: Option<&str>) -> String {
    let kept: Vec<&str> = query
        .unwrap_or_default()
        .split('&')
        .filter(|pair| !pair.is_empty() && !pair.starts_with("access_token="))
        .collect();
    if kept.is_empty() { path.to_owned() } else { format!("{path}?{}", kept.join("&")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_id_of_a_request_is_found_in_its_path_or_its_offer() {
        let id = async |matched: &str, path: &str, body: &'static str| {
            let request = Request::builder().uri(path).body(Body::from(body)).expect("a request");
            let (request, id) = named(matched, request).await.expect("read");
            let body = axum::body::to_bytes(request.into_body(), 1_000).await.expect("there still");
            (id, body)
        };
        let (found, _) = id("/v1/calls/{id}/turns", "/v1/calls/b.1/turns", "").await;
        assert_eq!(found.as_deref(), Some("b.1"));
        assert_eq!(id("/whip/{session}", "/whip/c.2", "").await.0.as_deref(), Some("c.2"));
        assert_eq!(id("/v1/calls", "/v1/calls", "").await.0, None);
        let offer = r#"{"sdp": "", "pc_id": "d.3"}"#;
        assert_eq!(id("/api/offer", "/api/offer", offer).await, (Some("d.3".to_owned()), Bytes::from(offer)));
        assert_eq!(id("/api/offer", "/api/offer", "no JSON").await.0, None);
    }

    #[test]
    fn what_proves_or_belongs_to_one_connection_stays_here() {
        let mut headers = HeaderMap::new();
        for name in ["host", "authorization", "origin", "sec-fetch-site", "connection", "access-control-x", "if-match"]
        {
            headers.insert(name, HeaderValue::from_static("x"));
        }
        headers.append("link", HeaderValue::from_static("1"));
        headers.append("link", HeaderValue::from_static("2"));
        let passed = passable(&headers);
        assert_eq!(passed.len(), 3, "{passed:?}");
        assert_eq!(passed.get_all("link").iter().count(), 2);
        assert!(passed.contains_key("if-match"));
    }

    #[test]
    fn only_who_asks_to_wait_for_the_answer_waits_as_long_as_a_telephone_rings() {
        let plain = br#"{"to":"sip:a@b"}"#;
        assert!(!waits_for_answer(None, plain) && !waits_for_answer(Some("wait=no"), b"no JSON"));
        assert!(!waits_for_answer(None, br#"{"to":"sip:a@b","wait":false}"#));
        assert!(waits_for_answer(Some("x=1&wait=answer"), plain));
        assert!(waits_for_answer(None, br#"{"to":"sip:a@b","wait":true}"#));
    }

    #[test]
    fn a_token_in_the_query_goes_no_further() {
        assert_eq!(without_token("/a", Some("x=1&access_token=secret&y=2")), "/a?x=1&y=2");
        assert_eq!(without_token("/a", Some("access_token=secret")), "/a");
        assert_eq!(without_token("/a", None), "/a");
    }
}
