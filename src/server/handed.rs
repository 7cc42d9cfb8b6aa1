//! Requests for calls and sessions of the gateway whose place this one took ([`crate::handover`]): it answers them itself,
//! over a Unix socket.
//!
//! # Why
//! A client knows an id and one address. Ids of a gateway that is alone name no process, so whatever names a call or session
//! that is not known here goes to the one before, as it came: both have one configuration, and that one judges tokens anew.
//! A new call with a single-use token goes there, too, where this gateway has not issued it: the call is then that one's.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{ConnectInfo, MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde_json::Value;

use super::error::ApiError;
use super::forward::{Failed, begins_a_call, named, relay, whole};
use crate::call::CallId;
use crate::gateway::Gateway;
use crate::webrtc::SessionId;

/// Who made the request, where that is not the other end of the connection. Believed on the Unix socket only.
const PEER: HeaderName = HeaderName::from_static("x-antiphon-peer");
/// Longest wait for the first byte of an answer.
const ANSWER: Duration = Duration::from_secs(30);
/// The same for a list, which is shown without the other's part where it is slow.
const PART: Duration = Duration::from_secs(3);
/// Longest part of a list, bytes.
const MAX_PART: usize = 16 << 20;

/// Headers of one connection (RFC 9110 section 7.6.1).
const LEFT_OUT: [HeaderName; 6] =
    [header::CONNECTION, header::UPGRADE, header::TE, header::TRAILER, header::TRANSFER_ENCODING, header::EXPECT];

/// Takes out of `headers` who made a request that was passed on. What says nothing is treated as a stranger's.
pub(super) fn peer(headers: &mut HeaderMap) -> SocketAddr {
    let peer = headers.remove(PEER);
    let peer = peer.and_then(|peer| peer.to_str().ok()?.parse().ok());
    peer.unwrap_or(SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0))
}

/// Middleware: passes on what is the gateway's before this one.
pub(super) async fn route(State(gateway): State<Gateway>, request: Request, next: Next) -> Response {
    let Some(client) = gateway.place.client() else { return next.run(request).await };
    let matched = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned()).unwrap_or_default();
    let (request, id) = match named(&matched, request).await {
        Ok(named) => named,
        Err(error) => return error.into_response(),
    };
    match id {
        Some(id) if !is_known(&gateway, &matched, &id) => pass_on(&client, request).await,
        None if begins_a_call(request.method(), &matched) => {
            let (parts, body) = request.into_parts();
            let bytes = match whole(body).await {
                Ok(bytes) => bytes,
                Err(error) => return error.into_response(),
            };
            let mut again = Request::new(Body::from(bytes.clone()));
            (*again.method_mut(), *again.uri_mut()) = (parts.method.clone(), parts.uri.clone());
            *again.headers_mut() = parts.headers.clone();
            if let Some(peer) = parts.extensions.get::<ConnectInfo<SocketAddr>>() {
                again.extensions_mut().insert(*peer);
            }
            let response = next.run(Request::from_parts(parts, bytes.into())).await;
            // Perhaps the other gateway has issued its token.
            if response.status() == StatusCode::UNAUTHORIZED { pass_on(&client, again).await } else { response }
        }
        _ => next.run(request).await,
    }
}

/// Whether what a route is about is this gateway's, or not the business of a process at all.
fn is_known(gateway: &Gateway, matched: &str, id: &str) -> bool {
    if matched.starts_with("/v1/calls/") {
        let id = CallId::from(id);
        return gateway.calls.get(&id).is_some() || gateway.outgoing.get(&id).is_some();
    }
    if matched.starts_with("/v1/webrtc/") || matched.starts_with("/whip/") || matched == "/api/offer" {
        return gateway.webrtc.owner(&SessionId::from(id)).is_some();
    }
    true
}

async fn pass_on(client: &reqwest::Client, mut request: Request) -> Response {
    let upgrades = request.headers().contains_key(header::UPGRADE);
    let upgrade = upgrades.then(|| hyper::upgrade::on(&mut request));
    let (parts, body) = request.into_parts();
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
    let mut headers = said(&parts.headers);
    for name in [header::CONNECTION, header::UPGRADE].iter().filter(|_| upgrades) {
        headers.extend(parts.headers.get(name).map(|value| (name.clone(), value.clone())));
    }
    if let Some(ConnectInfo(peer)) = parts.extensions.get::<ConnectInfo<SocketAddr>>()
        && let Ok(peer) = HeaderValue::from_str(&peer.to_string())
    {
        headers.insert(PEER, peer);
    }
    let has_body =
        [header::CONTENT_LENGTH, header::TRANSFER_ENCODING].iter().any(|name| parts.headers.contains_key(name));
    let mut asked = client.request(parts.method, format!("http://antiphon{path}")).headers(headers);
    if has_body {
        asked = asked.body(reqwest::Body::wrap_stream(body.into_data_stream()));
    }
    match relay(asked, ANSWER, upgrade).await {
        Ok(response) => response,
        Err(Failed::Unsayable(why)) => ApiError::bad_request("invalid_path", why).into_response(),
        Err(Failed::Unreached(why) | Failed::Silent(why)) => {
            let message = format!("the gateway before this one, whose this is, did not answer: {why}");
            ApiError::new(StatusCode::BAD_GATEWAY, "node_unreachable", message).into_response()
        }
    }
}

/// Headers that go on as they are. Who stands in the way of a request cannot say who made it.
fn said(headers: &HeaderMap) -> HeaderMap {
    let mut headers = headers.clone();
    for name in LEFT_OUT.iter().chain([&PEER]) {
        headers.remove(name);
    }
    headers
}

/// What the gateway before this one answers to `GET path` from who has sent `headers`; `None`: there is none, or no answer.
pub(super) async fn part(gateway: &Gateway, headers: &HeaderMap, path: &str) -> Option<Value> {
    let asked = gateway.place.client()?.request(Method::GET, format!("http://antiphon{path}")).headers(said(headers));
    let response = asked.timeout(PART).send().await.ok()?.error_for_status().ok()?;
    let body = axum::body::to_bytes(Body::from_stream(response.bytes_stream()), MAX_PART).await.ok()?;
    serde_json::from_slice(&body).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_is_said_by_the_other_gateway_and_by_nobody_else() {
        let mut headers = HeaderMap::new();
        assert!(!peer(&mut headers).ip().is_loopback(), "a stranger");
        headers.insert(PEER, HeaderValue::from_static("127.0.0.1:9"));
        headers.insert(header::AUTHORIZATION, HeaderValue::from_static("Bearer x"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        let said = said(&headers);
        assert!(said.contains_key(header::AUTHORIZATION) && said.len() == 1, "{said:?}");
        assert!(peer(&mut headers).ip().is_loopback());
        assert!(!headers.contains_key(PEER));
    }
}
