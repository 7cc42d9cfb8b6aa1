//! `/v1/calls`: place, list, show, steer and end calls.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use serde::Deserialize;
use serde_json::json;

use super::Gateway;
use super::auth::Tenant;
use super::error::ApiError;
use super::extract::Body;
use super::speech::speed_of;
use crate::call::handle::Style;
use crate::call::speech::WithStandIn;
use crate::call::{
    CallHandle, CallId, CallInfo, CallMeta, Direction, EndReason, Interruptible, SpeakError, StartError, TurnId,
    TurnRequest,
};
use crate::sip::{DialError, DialRequest};
use crate::synth::device::{Refused, RefusedReason};

/// Where a full queue is worth trying again.
const QUEUE_RETRY: Duration = Duration::from_secs(1);
/// Where every place for calls is taken, or the gateway is going down.
pub const BUSY_RETRY: Duration = Duration::from_secs(5);

/// The routes of this module.
pub fn router() -> Router<Gateway> {
    Router::new()
        .route("/v1/calls", get(list).post(place))
        .route("/v1/calls/{id}", get(show).delete(end))
        .route("/v1/calls/{id}/turns", post(speak))
        .route("/v1/calls/{id}/interrupt", post(interrupt))
        .route("/v1/calls/{id}/hold", post(hold))
        .route("/v1/calls/{id}/resume", post(resume))
        .route("/v1/calls/{id}/transfer", post(transfer))
        .route("/v1/calls/{id}/dtmf", post(dtmf))
}

/// The live call named in a path.
///
/// # Errors
/// 404.
pub(super) async fn find(gateway: &Gateway, id: &str) -> Result<CallHandle, ApiError> {
    gateway.calls.find(&CallId::from(id)).await.ok_or_else(|| ApiError::not_found("call", id))
}

impl From<SpeakError> for ApiError {
    fn from(error: SpeakError) -> Self {
        let message = error.to_string();
        match error {
            SpeakError::Ended => ApiError::new(StatusCode::CONFLICT, "call_ended", message),
            SpeakError::Draining => ApiError::unavailable(message, Duration::from_secs(10)),
            SpeakError::Busy => {
                ApiError::new(StatusCode::TOO_MANY_REQUESTS, "call_busy", message).retry_after(QUEUE_RETRY)
            }
            SpeakError::Refused { retry_after, .. } => ApiError::unavailable(message, retry_after),
            SpeakError::Empty => ApiError::bad_request("nothing_to_speak", message).param("text"),
            SpeakError::Invalid(_) => ApiError::bad_request("invalid_request", message),
        }
    }
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> Self {
        let message = refused.to_string();
        match refused.reason {
            // The client is the cause: others are served.
            RefusedReason::RateLimited | RefusedReason::TenantFull => {
                ApiError::new(StatusCode::TOO_MANY_REQUESTS, refused.reason.label(), message)
                    .retry_after(refused.retry_after)
            }
            _ => ApiError::unavailable(message, refused.retry_after),
        }
    }
}

impl From<StartError> for ApiError {
    fn from(error: StartError) -> Self {
        ApiError::unavailable(error.to_string(), BUSY_RETRY)
    }
}

async fn list(State(gateway): State<Gateway>) -> Json<serde_json::Value> {
    Json(json!({ "calls": gateway.calls.list() }))
}

async fn show(State(gateway): State<Gateway>, Path(id): Path<String>) -> Result<Json<CallInfo>, ApiError> {
    Ok(Json(find(&gateway, &id).await?.info()))
}

async fn end(State(gateway): State<Gateway>, Path(id): Path<String>) -> Result<StatusCode, ApiError> {
    find(&gateway, &id).await?.hang_up(EndReason::HungUp);
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Place {
    to: String,
    from: Option<String>,
    trunk: Option<String>,
    agent: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
}

async fn place(
    State(gateway): State<Gateway>,
    Extension(Tenant(tenant)): Extension<Tenant>,
    Body(body): Body<Place>,
) -> Result<Response, ApiError> {
    let Some(sip) = gateway.sip.clone() else {
        let message = "outbound calls need [sip] udp, tcp or tls in the configuration";
        return Err(ApiError::unavailable(message, Duration::from_secs(60)));
    };
    let agent_name = body.agent.unwrap_or_else(|| gateway.default_agent.to_string());
    // Before the peer's telephone rings.
    let Some(agent) = gateway.agents.find(&agent_name) else {
        return Err(ApiError::not_found("agent", &agent_name).param("agent"));
    };
    gateway.calls.has_room()?;
    gateway.has_room_for(&agent)?;
    let id = CallId::random();
    let to = body.to.clone();
    let from = body.from.clone().unwrap_or_default();
    let request =
        DialRequest { to: body.to, from: body.from, trunk: body.trunk, headers: body.headers.clone(), timeout: None };
    let leg = sip.dial(request).await.map_err(refused_dial)?;
    let meta = CallMeta {
        id: id.clone(),
        direction: Direction::Outbound,
        from,
        to,
        agent: agent_name,
        headers: body.headers,
        tenant,
    };
    begin(&gateway, meta, leg)?;
    let location = format!("/v1/calls/{id}");
    Ok((StatusCode::CREATED, [("Location", location)], Json(json!({ "id": id }))).into_response())
}

fn refused_dial(error: DialError) -> ApiError {
    let message = error.to_string();
    match error {
        DialError::Address(_) => ApiError::bad_request("invalid_address", message).param("to"),
        DialError::UnknownTrunk(_) => ApiError::bad_request("unknown_trunk", message).param("trunk"),
        DialError::Overloaded => ApiError::unavailable(message, BUSY_RETRY),
        _ => ApiError::new(StatusCode::BAD_GATEWAY, "call_failed", message),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Turn {
    text: String,
    #[serde(default)]
    interrupt: bool,
    priority: Option<Priority>,
    voice: Option<String>,
    language: Option<String>,
    instructions: Option<String>,
    seed: Option<u64>,
    speed: Option<f32>,
    interruptible: Option<Interruptible>,
    #[serde(rename = "utteranceId")]
    utterance_id: Option<String>,
}

/// Order among the turns that wait on one call.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Priority {
    Normal,
    High,
}

async fn speak(
    State(gateway): State<Gateway>,
    Path(id): Path<String>,
    Body(turn): Body<Turn>,
) -> Result<Response, ApiError> {
    let handle = find(&gateway, &id).await?;
    let agent = gateway.agents.find(&handle.meta().agent);
    let request = TurnRequest {
        id: turn.utterance_id.as_deref().map(TurnId::from),
        text: turn.text,
        interrupt: turn.interrupt,
        ahead: matches!(turn.priority, Some(Priority::High)),
        style: Style {
            voice: turn.voice.or_else(|| agent.as_ref().and_then(|a| a.voice.clone())),
            language: turn.language.or_else(|| agent.as_ref().and_then(|a| a.language.clone())),
            instructions: turn.instructions,
            seed: turn.seed.unwrap_or(0),
            speed: speed_of(turn.speed)?,
            interruptible: turn.interruptible.or_else(|| agent.and_then(|a| a.interruptible)),
            preemptible: false,
        },
    };
    let utterance = handle.speak(request).await?;
    Ok((StatusCode::ACCEPTED, Json(json!({ "utteranceId": utterance }))).into_response())
}

async fn interrupt(State(gateway): State<Gateway>, Path(id): Path<String>) -> Result<StatusCode, ApiError> {
    find(&gateway, &id).await?.interrupt()?;
    Ok(StatusCode::ACCEPTED)
}

async fn hold(State(gateway): State<Gateway>, Path(id): Path<String>) -> Result<StatusCode, ApiError> {
    find(&gateway, &id).await?.hold()?;
    Ok(StatusCode::ACCEPTED)
}

async fn resume(State(gateway): State<Gateway>, Path(id): Path<String>) -> Result<StatusCode, ApiError> {
    find(&gateway, &id).await?.resume()?;
    Ok(StatusCode::ACCEPTED)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Transfer {
    to: String,
    #[serde(default)]
    mode: TransferMode,
}

#[derive(Default, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum TransferMode {
    #[default]
    Blind,
    Attended,
}

async fn transfer(
    State(gateway): State<Gateway>,
    Path(id): Path<String>,
    Body(body): Body<Transfer>,
) -> Result<StatusCode, ApiError> {
    find(&gateway, &id).await?.transfer(body.to, body.mode == TransferMode::Attended)?;
    Ok(StatusCode::ACCEPTED)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Digits {
    digits: String,
}

async fn dtmf(
    State(gateway): State<Gateway>,
    Path(id): Path<String>,
    Body(body): Body<Digits>,
) -> Result<StatusCode, ApiError> {
    find(&gateway, &id).await?.dtmf(&body.digits)?;
    Ok(StatusCode::ACCEPTED)
}

/// A call that arrives or is placed, told to its agent.
///
/// # Errors
/// There is no agent of that name, or no place for the call; the leg is dropped.
pub fn begin<L: crate::media::leg::MediaLeg>(
    gateway: &Gateway,
    meta: CallMeta,
    leg: L,
) -> Result<CallHandle, ApiError> {
    let Some(agent) = gateway.agents.find(&meta.agent) else {
        return Err(ApiError::not_found("agent", &meta.agent).param("agent"));
    };
    let handle = match gateway.stand_in(&agent) {
        Some(other) => {
            let speech = WithStandIn::new(gateway.engine.clone(), other.clone());
            gateway.calls.start_with(meta, leg, Arc::new(speech))?
        }
        None => gateway.calls.start(meta, leg)?,
    };
    gateway.agents.serve(handle.clone(), agent);
    Ok(handle)
}

/// The tenant of calls that come without an API token.
pub fn nobody() -> Arc<str> {
    "".into()
}
