//! `/v1/calls`: place, list, show, steer and end calls.

use std::collections::BTreeMap;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use serde::Deserialize;
use serde_json::json;

use super::auth::Tenant;
use super::error::ApiError;
use super::extract::Body;
use super::speech::speed_of;
use crate::call::handle::Style;
use crate::call::{CallHandle, CallId, CallInfo, EndReason, Interruptible, TurnId, TurnRequest};
use crate::clock;
use crate::gateway::Gateway;
use crate::sip::DialRequest;

/// The routes of this module.
pub fn router() -> Router<Gateway> {
    Router::new()
        .route("/v1/calls", get(list).post(place))
        .route("/v1/calls/{id}", get(show).delete(end))
        .route("/v1/calls/{id}/turns", post(speak))
        .route("/v1/calls/{id}/prompt", post(prompt))
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

async fn list(State(gateway): State<Gateway>) -> Json<serde_json::Value> {
    // Answered and not acknowledged yet: no agent has them, but they take places.
    let half_open = gateway.sip.as_ref().map(|sip| sip.half_open()).unwrap_or_default();
    let now = clock::now();
    let half_open = half_open.into_iter().map(|call| {
        let age = now.saturating_duration_since(call.since).as_millis();
        json!({ "call_id": call.call_id, "source": call.source.to_string(), "age_ms": u64::try_from(age).unwrap_or(u64::MAX) })
    });
    Json(json!({ "calls": gateway.calls.list(), "half_open": half_open.collect::<Vec<_>>() }))
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
    let Place { to, from, trunk, agent, headers } = body;
    let request = DialRequest { to, from, trunk, headers, timeout: None };
    let call = gateway.dial(request, agent, tenant).await?;
    let id = call.id();
    let location = format!("/v1/calls/{id}");
    Ok((StatusCode::CREATED, [("Location", location)], Json(json!({ "id": id }))).into_response())
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

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Prompt {
    text: String,
    #[serde(default)]
    lang: String,
}

/// What the caller would have said: agents get it as they get speech that a recogniser understood.
async fn prompt(
    State(gateway): State<Gateway>,
    Path(id): Path<String>,
    Body(body): Body<Prompt>,
) -> Result<StatusCode, ApiError> {
    find(&gateway, &id).await?.prompt(&body.text, &body.lang)?;
    Ok(StatusCode::ACCEPTED)
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
