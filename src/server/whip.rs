//! Browser calls over HTTP: offers in, answers out.
//!
//! - `POST /v1/webrtc` and `/whip` (`application/sdp`), then `PATCH` and `DELETE` on the session's `Location`
//!   (WHIP, RFC 9725; unlike there, audio flows both ways)
//! - `POST` to a session below `/v1/webrtc`: an offer of another connection, on which the session's call goes on
//! - `GET /v1/webrtc`: the ICE servers, for pages that want relay candidates in their offer
//! - `POST` and `PATCH /api/offer` (JSON), which is what Pipecat's SmallWebRTC client speaks
//!
//! Owns no session: [`Gateway`] does. What becomes of a session's media is the business of [`AcceptCall`].

use std::future::Future;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, OriginalUri, Path, Query, Request, State};
use axum::http::header::{CONTENT_TYPE, ETAG, IF_MATCH, LINK, LOCATION};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, post};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::auth::Caller;
use super::error::ApiError;
use super::grants::Page;
use crate::clock;
use crate::media::webrtc::WebRtcLeg;
use crate::webrtc::{Answered, Gateway, IceServer, Patched, SessionId, WebRtcError};

/// Makes a call of an answered session.
pub trait AcceptCall: Clone + Send + Sync + 'static {
    /// Starts a call on `leg` as it was asked for; gives the call's id. Dropping `leg` ends
    /// the session.
    ///
    /// # Errors
    /// The answer to the browser: no such agent, draining, full.
    fn accept(
        &self,
        leg: WebRtcLeg,
        asked: Asked,
        session: &SessionId,
    ) -> impl Future<Output = Result<String, ApiError>> + Send;

    /// The browser ends `session`, which closes right after this. The leg says so by itself, as
    /// [`crate::media::leg::LegEnd::Remote`]; this is for those who keep sessions apart from calls.
    fn hang_up(&self, session: &SessionId) -> impl Future<Output = ()> + Send {
        let _ = session;
        async {}
    }
}

/// What a browser asked for.
#[derive(Clone, Debug)]
pub struct Asked {
    /// Name of the agent; `None`: the default one.
    pub agent: Option<String>,
    /// By whom.
    pub caller: Caller,
}

/// What the routes work on.
#[derive(Clone)]
pub struct WhipState<A> {
    /// The sessions.
    pub gateway: Gateway,
    /// The calls.
    pub accept: A,
}

/// The routes of browser calls.
pub fn router<A: AcceptCall>(state: WhipState<A>) -> Router {
    let session = || -> MethodRouter<WhipState<A>> { MethodRouter::new().patch(patch::<A>).delete(delete::<A>) };
    let succeeded = || session().post(succeed::<A>);
    Router::new()
        .route("/v1/webrtc", post(offer::<A>).get(ice_servers::<A>))
        .route("/whip", post(offer::<A>))
        .route("/v1/webrtc/{session}", succeeded())
        .route("/whip/{session}", session())
        .route("/api/offer", post(json_offer::<A>).patch(json_patch::<A>))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(state)
}

/// An offer of one audio section and one data channel with dozens of candidates is a tenth of this.
const MAX_BODY: usize = 64 * 1024;
/// Calls end all the time.
const RETRY_AFTER: Duration = Duration::from_secs(5);
const SDP: &str = "application/sdp";
const FRAGMENT: &str = "application/trickle-ice-sdpfrag";
pub(super) const ACCEPT_PATCH: HeaderName = HeaderName::from_static("accept-patch");
const ACCEPT_POST: HeaderName = HeaderName::from_static("accept-post");
/// Names the call, for the routes below `/v1/calls`.
pub(super) const CALL_ID: HeaderName = HeaderName::from_static("x-antiphon-call");

/// `?agent=`; others' parameters are theirs.
#[derive(Debug, Default, Deserialize)]
struct Parameters {
    agent: Option<String>,
}

type Parsed<T> = Result<Query<T>, QueryRejection>;

async fn offer<A: AcceptCall>(
    State(state): State<WhipState<A>>,
    caller: Caller,
    OriginalUri(uri): OriginalUri,
    query: Parsed<Parameters>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let Query(parameters) = query.map_err(|error| ApiError::bad_request("invalid_query", error.body_text()))?;
    require(&headers, SDP)?;
    let mut agent = parameters.agent;
    let claim = caller.page.as_ref().map(Page::claim).transpose()?;
    if let Some(page) = &caller.page {
        // The token names the agent, whatever the page says.
        agent.clone_from(&page.grant.agent);
    }
    let (answered, call) = establish(&state, &text(body)?, Asked { agent, caller }).await?;
    if let Some(claim) = claim {
        claim.used(&answered.id);
    }
    let location = format!("{}/{}", uri.path().trim_end_matches('/'), answered.id);
    let mut response = (StatusCode::CREATED, answered.sdp).into_response();
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(SDP));
    headers.insert(ACCEPT_PATCH, HeaderValue::from_static(FRAGMENT));
    headers.insert(LOCATION, ascii(&location)?);
    headers.insert(ETAG, ascii(&answered.etag)?);
    headers.insert(CALL_ID, ascii(&call)?);
    for link in state.gateway.ice_servers().iter().flat_map(links) {
        headers.append(LINK, ascii(&link)?);
    }
    Ok(response)
}

async fn patch<A: AcceptCall>(
    State(state): State<WhipState<A>>,
    caller: Caller,
    Path(session): Path<String>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    if let Err(error) = require(&headers, FRAGMENT) {
        return Ok(([(ACCEPT_PATCH, FRAGMENT)], error).into_response());
    }
    let session = own(&state, &caller, &session)?;
    let Some(tag) = headers.get(IF_MATCH).and_then(|tag| tag.to_str().ok()) else {
        let message = "PATCH needs If-Match with the ETag of the session, or `*` to restart ICE";
        return Err(ApiError::new(StatusCode::PRECONDITION_REQUIRED, "precondition_required", message));
    };
    match state.gateway.patch(&session, tag, &text(body)?).await.map_err(|error| refusal(error, &session))? {
        Patched::Trickled => Ok(StatusCode::NO_CONTENT.into_response()),
        Patched::Restarted { fragment, etag } => {
            let headers = [(CONTENT_TYPE, HeaderValue::from_static(FRAGMENT)), (ETAG, ascii(&etag)?)];
            Ok((StatusCode::OK, headers, fragment).into_response())
        }
    }
}

/// Another connection of the same page, whose network the first one does not know: the call goes on there.
async fn succeed<A: AcceptCall>(
    State(state): State<WhipState<A>>,
    caller: Caller,
    OriginalUri(uri): OriginalUri,
    Path(session): Path<String>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    // Whose it is comes first: of another's session nothing is told.
    let session = own(&state, &caller, &session)?;
    require(&headers, SDP)?;
    let succeeded = state.gateway.succeed(&session, &text(body)?).await.map_err(|error| refusal(error, &session))?;
    if let Some(page) = &caller.page {
        page.goes_on(&succeeded.id);
    }
    let place = uri.path().trim_end_matches(session.as_str()).trim_end_matches('/');
    let headers = [
        (CONTENT_TYPE, HeaderValue::from_static(SDP)),
        (ACCEPT_PATCH, HeaderValue::from_static(FRAGMENT)),
        (LOCATION, ascii(&format!("{place}/{}", succeeded.id))?),
        (ETAG, ascii(&succeeded.etag)?),
    ];
    Ok((StatusCode::CREATED, headers, succeeded.sdp).into_response())
}

async fn delete<A: AcceptCall>(
    State(state): State<WhipState<A>>,
    caller: Caller,
    Path(session): Path<String>,
) -> Result<StatusCode, ApiError> {
    let session = own(&state, &caller, &session)?;
    state.accept.hang_up(&session).await;
    if state.gateway.delete(&session).await {
        Ok(StatusCode::OK)
    } else {
        Err(refusal(WebRtcError::NoSession, &session))
    }
}

/// The session of this name, if it is the caller's.
///
/// # Errors
/// 404, also for the sessions of others.
fn own<A>(state: &WhipState<A>, caller: &Caller, id: &str) -> Result<SessionId, ApiError> {
    let session = SessionId::from(id);
    let own = match (&caller.page, state.gateway.owner(&session)) {
        (Some(page), Some(_)) => page.began(&session),
        (None, Some(owner)) => caller.sees(&owner),
        (_, None) => false,
    };
    match own {
        true => Ok(session),
        false => Err(refusal(WebRtcError::NoSession, &session)),
    }
}

/// Says on OPTIONS what the routes of browser calls take (RFC 9725). It lies around the CORS layer, which
/// answers every OPTIONS request itself.
pub(super) async fn advertise(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let asked = request.method() == Method::OPTIONS && (path.starts_with("/v1/webrtc") || path.starts_with("/whip"));
    let mut response = next.run(request).await;
    if asked {
        response.headers_mut().insert(ACCEPT_POST, HeaderValue::from_static(SDP));
        response.headers_mut().insert(ACCEPT_PATCH, HeaderValue::from_static(FRAGMENT));
    }
    response
}

/// What a SmallWebRTC client posts; fields it adds for its own application are ignored.
#[derive(Debug, Deserialize)]
pub(super) struct JsonOffer {
    sdp: String,
    #[serde(rename = "type")]
    kind: String,
    pc_id: Option<String>,
    #[serde(default)]
    restart_pc: Option<bool>,
    #[serde(default, alias = "requestData")]
    request_data: Option<RequestData>,
}

#[derive(Debug, Deserialize)]
struct RequestData {
    agent: Option<String>,
}

#[derive(Debug, Serialize)]
struct JsonAnswer {
    sdp: String,
    #[serde(rename = "type")]
    kind: &'static str,
    pc_id: String,
}

async fn json_offer<A: AcceptCall>(
    State(state): State<WhipState<A>>,
    caller: Caller,
    query: Parsed<Parameters>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let Query(parameters) = query.map_err(|error| ApiError::bad_request("invalid_query", error.body_text()))?;
    let offer: JsonOffer = json(&headers, body)?;
    if offer.kind != "offer" {
        return Err(ApiError::bad_request("invalid_type", "`type` must be `offer`").param("type"));
    }
    // A session that has ended, or is another's: the client gets a new one, under a new name.
    if let Some(id) = offer.pc_id.as_deref().and_then(|id| own(&state, &caller, id).ok()) {
        if offer.restart_pc == Some(true) {
            // The client has thrown its connection away; the call on it is over.
            state.accept.hang_up(&id).await;
            state.gateway.delete(&id).await;
        } else {
            match state.gateway.renegotiate(&id, &offer.sdp).await {
                Ok(sdp) => {
                    return Ok(axum::Json(JsonAnswer { sdp, kind: "answer", pc_id: id.to_string() }).into_response());
                }
                Err(WebRtcError::NoSession) => {}
                Err(error) => return Err(refusal(error, &id)),
            }
        }
    }
    let agent = parameters.agent.or_else(|| offer.request_data.and_then(|data| data.agent));
    let (answered, call) = establish(&state, &offer.sdp, Asked { agent, caller }).await?;
    let answer = JsonAnswer { sdp: answered.sdp, kind: "answer", pc_id: answered.id.to_string() };
    Ok(([(CALL_ID, ascii(&call)?)], axum::Json(answer)).into_response())
}

#[derive(Debug, Deserialize)]
pub(super) struct JsonPatch {
    pc_id: String,
    candidates: Vec<JsonCandidate>,
}

/// `sdp_mid` and `sdp_mline_index` come too; everything is bundled, so they do not matter.
#[derive(Debug, Deserialize)]
struct JsonCandidate {
    candidate: String,
}

#[derive(Debug, Serialize)]
struct JsonPatched {
    status: &'static str,
}

async fn json_patch<A: AcceptCall>(
    State(state): State<WhipState<A>>,
    caller: Caller,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<axum::Json<JsonPatched>, ApiError> {
    let patch: JsonPatch = json(&headers, body)?;
    let id = own(&state, &caller, &patch.pc_id)?;
    // An empty candidate says that there are no more.
    let candidates = patch.candidates.into_iter().map(|candidate| candidate.candidate);
    let candidates: Vec<String> = candidates.filter(|candidate| !candidate.trim().is_empty()).collect();
    state.gateway.trickle(&id, &candidates).await.map_err(|error| refusal(error, &id))?;
    Ok(axum::Json(JsonPatched { status: "success" }))
}

/// What the answer to a browser needs of a session whose leg has gone to its call.
struct Established {
    id: SessionId,
    sdp: String,
    etag: String,
}

async fn establish<A: AcceptCall>(
    state: &WhipState<A>,
    offer: &str,
    asked: Asked,
) -> Result<(Established, String), ApiError> {
    let none = SessionId::from("");
    let Answered { id, sdp, etag, leg } =
        state.gateway.answer_for(offer, asked.caller.tenant.clone()).await.map_err(|error| refusal(error, &none))?;
    // On an error the leg is dropped there, and the session ends with it.
    let call = state.accept.accept(leg, asked, &id).await?;
    Ok((Established { id, sdp, etag }, call))
}

fn refusal(error: WebRtcError, session: &SessionId) -> ApiError {
    let message = error.to_string();
    match error {
        WebRtcError::BadOffer(_) => ApiError::bad_request("invalid_offer", message).param("sdp"),
        WebRtcError::BadFragment(_) => ApiError::bad_request("invalid_fragment", message),
        WebRtcError::NoSession => ApiError::not_found("session", session.as_str()),
        WebRtcError::Stale { .. } => ApiError::new(StatusCode::PRECONDITION_FAILED, "stale_etag", message),
        WebRtcError::Full(_) | WebRtcError::Closing => ApiError::unavailable(message, RETRY_AFTER),
        WebRtcError::Config(_) | WebRtcError::Bind { .. } | WebRtcError::Stack(_) => {
            tracing::error!(error = message, "WebRTC");
            ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "the WebRTC stack failed")
        }
    }
}

/// Checks the media type; parameters are ignored.
fn require(headers: &HeaderMap, expected: &'static str) -> Result<(), ApiError> {
    let given = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    let essence = given.split(';').next().unwrap_or("").trim();
    if essence.eq_ignore_ascii_case(expected) {
        return Ok(());
    }
    let message = format!("Content-Type must be `{expected}`, not `{essence}`");
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message))
}

fn bytes(body: Result<Bytes, BytesRejection>) -> Result<Bytes, ApiError> {
    body.map_err(|error| match error.status() {
        StatusCode::PAYLOAD_TOO_LARGE => {
            let message = format!("the body is larger than {MAX_BODY} bytes");
            ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message)
        }
        status => ApiError::new(status, "invalid_body", error.body_text()),
    })
}

fn text(body: Result<Bytes, BytesRejection>) -> Result<String, ApiError> {
    let bytes = bytes(body)?;
    String::from_utf8(bytes.into()).map_err(|_| ApiError::bad_request("invalid_body", "the body is not UTF-8"))
}

fn json<T: for<'de> Deserialize<'de>>(headers: &HeaderMap, body: Result<Bytes, BytesRejection>) -> Result<T, ApiError> {
    require(headers, "application/json")?;
    serde_json::from_slice(&bytes(body)?).map_err(|error| ApiError::bad_request("invalid_json", error.to_string()))
}

/// One `Link` of each URL (RFC 9725 section 4.6).
fn links(server: &IceServer) -> impl Iterator<Item = String> {
    let credentials = server.credentials(clock::wall());
    server.urls.iter().map(move |url| {
        let mut link = format!("<{url}>; rel=\"ice-server\"");
        if let Some((username, credential)) = &credentials {
            link.push_str(&format!(
                "; username={}; credential={}; credential-type=\"password\"",
                quoted(username),
                quoted(credential)
            ));
        }
        link
    })
}

/// What `new RTCPeerConnection(...)` takes, for pages that want relay candidates in their offer.
async fn ice_servers<A: AcceptCall>(State(state): State<WhipState<A>>) -> Json<Value> {
    let servers = state.gateway.ice_servers();
    let servers = servers.iter().map(|server| match server.credentials(clock::wall()) {
        Some((username, credential)) => json!({ "urls": server.urls, "username": username, "credential": credential }),
        None => json!({ "urls": server.urls }),
    });
    Json(json!({ "iceServers": servers.collect::<Vec<_>>() }))
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

fn ascii(text: &str) -> Result<HeaderValue, ApiError> {
    HeaderValue::from_str(text).map_err(|_| {
        let message = "a configured value does not fit into an HTTP header";
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", message)
    })
}
