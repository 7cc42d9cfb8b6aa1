//! Requests for calls and sessions of the other gateway while one takes the other's place ([`crate::handover`]): each answers for
//! its own, over a Unix socket.
//!
//! # Why
//! A client knows an id and one address. Ids of a gateway that is alone name no process, so whatever names a call or session
//! that is not known here goes to the other, as it came: both have one configuration, and that one judges tokens anew. What came
//! so is answered where it is, so that an id that no gateway knows does not go to and fro.
//!
//! The gateway before asks the one after, too: clients, balancers and other nodes keep connections to it, and ask there for
//! calls that the one after has taken. Closing those connections would lose the requests on their way. So each request is
//! answered, and the answer says that the connection ends (`listen.rs`).
//!
//! A new call belongs to the gateway after. With a single-use token it is the one's that has issued the token.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{ConnectInfo, FromRequestParts, MatchedPath, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde_json::Value;

use super::error::ApiError;
use super::forward::{Failed, begins_a_call, named, patience, relay, whole};
use crate::call::CallId;
use crate::cluster::{self, Owner};
use crate::gateway::Gateway;
use crate::webrtc::SessionId;

/// Who made the request, where that is not the other end of the connection. Believed on the Unix socket only.
const PEER: HeaderName = HeaderName::from_static("x-antiphon-peer");
/// Longest wait for a list, which is shown without the other's part where it is slow.
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

/// In the extensions of a request that the other gateway has passed on: this one answers for itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct Passed;

/// In the extensions of a request that another node has signed ([`crate::cluster::Pass`]): the signature, which the other gateway
/// of this node believes, too.
#[derive(Clone, Debug)]
pub(super) struct Signed(pub(super) HeaderValue);

/// Middleware: passes on what is the other gateway's.
pub(super) async fn route(State(gateway): State<Gateway>, request: Request, next: Next) -> Response {
    let client = gateway.place.client().filter(|_| request.extensions().get::<Passed>().is_none());
    let Some(client) = client else { return next.run(request).await };
    let matched = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned()).unwrap_or_default();
    let (request, id) = match named(&matched, request).await {
        Ok(named) => named,
        Err(error) => return error.into_response(),
    };
    match id {
        Some(id) if !is_known(&gateway, &matched, &id) => {
            pass_on(&client, request).await.unwrap_or_else(|failed| told(failed).into_response())
        }
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
            if let Some(signed) = parts.extensions.get::<Signed>() {
                again.extensions_mut().insert(signed.clone());
            }
            let here = next.run(Request::from_parts(parts, bytes.into()));
            // Where one does not know the token, perhaps the other has issued it.
            if gateway.place.is_held() {
                let response = here.await;
                match response.status() {
                    StatusCode::UNAUTHORIZED => {
                        pass_on(&client, again).await.unwrap_or_else(|failed| told(failed).into_response())
                    }
                    _ => response,
                }
            } else {
                match pass_on(&client, again).await {
                    Ok(response) if response.status() != StatusCode::UNAUTHORIZED => response,
                    // What may have reached the other may be a call there.
                    Err(failed @ (Failed::Silent(_) | Failed::Unsayable(_))) => told(failed).into_response(),
                    Ok(_) | Err(Failed::Unreached(_)) => here.await,
                }
            }
        }
        _ => next.run(request).await,
    }
}

fn told(failed: Failed) -> ApiError {
    match failed {
        Failed::Unsayable(why) => ApiError::bad_request("invalid_path", why),
        Failed::Unreached(why) | Failed::Silent(why) => {
            let message = format!("the other gateway of this machine, whose this is, did not answer: {why}");
            ApiError::new(StatusCode::BAD_GATEWAY, "node_unreachable", message)
        }
    }
}

/// Whether what a route is about is this gateway's, or not the business of a process at all.
fn is_known(gateway: &Gateway, matched: &str, id: &str) -> bool {
    match gateway.nodes.as_ref().map(|nodes| nodes.owner(id)) {
        // Passed on to that node (`forward.rs`).
        Some(Owner::There(_)) => return true,
        // Who has lent its place hears of no new nodes.
        Some(Owner::Gone(_)) => return gateway.place.is_held(),
        Some(Owner::Here) | None => {}
    }
    if matched.starts_with("/v1/calls/") {
        let id = CallId::from(id);
        return gateway.calls.get(&id).is_some() || gateway.outgoing.get(&id).is_some();
    }
    if matched.starts_with("/v1/webrtc/") || matched.starts_with("/whip/") || matched == "/api/offer" {
        return gateway.webrtc.owner(&SessionId::from(id)).is_some();
    }
    true
}

async fn pass_on(client: &reqwest::Client, mut request: Request) -> Result<Response, Failed> {
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
    if let Some(Signed(signed)) = parts.extensions.get::<Signed>() {
        headers.insert(cluster::HEADER, signed.clone());
    }
    let has_body =
        [header::CONTENT_LENGTH, header::TRANSFER_ENCODING].iter().any(|name| parts.headers.contains_key(name));
    let (body, limit) = patience(&parts, body).await?;
    let mut asked = client.request(parts.method, format!("http://antiphon{path}")).headers(headers);
    if has_body {
        asked = asked.body(reqwest::Body::wrap_stream(body.into_data_stream()));
    }
    relay(asked, limit, upgrade).await
}

/// Headers that go on as they are. Who stands in the way of a request cannot say who made it.
fn said(headers: &HeaderMap) -> HeaderMap {
    let mut headers = headers.clone();
    for name in LEFT_OUT.iter().chain([&PEER]) {
        headers.remove(name);
    }
    headers
}

/// Who asks for a list of which the other gateway has a part.
pub(super) struct Asker {
    /// With the proof of who asks; `None`: the other gateway itself does.
    headers: Option<HeaderMap>,
}

impl<S: Send + Sync> FromRequestParts<S> for Asker {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        let asks = parts.extensions.get::<Passed>().is_none();
        let mut headers = asks.then(|| said(&parts.headers));
        if let (Some(headers), Some(Signed(signed))) = (&mut headers, parts.extensions.get::<Signed>()) {
            headers.insert(cluster::HEADER, signed.clone());
        }
        Ok(Self { headers })
    }
}

/// What the other gateway answers to `GET path` from `asker`; `None`: there is none, or no answer.
pub(super) async fn part(gateway: &Gateway, asker: Asker, path: &str) -> Option<Value> {
    let asked = gateway.place.client()?.request(Method::GET, format!("http://antiphon{path}")).headers(asker.headers?);
    let response = asked.timeout(PART).send().await.ok()?.error_for_status().ok()?;
    let body = axum::body::to_bytes(Body::from_stream(response.bytes_stream()), MAX_PART).await.ok()?;
    serde_json::from_slice(&body).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_is_said_by_the_other_gateway_and_by_no_client() {
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
