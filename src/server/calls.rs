//! `/v1/calls`: place, list, show, steer and end calls.

use std::collections::BTreeMap;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::json;

use super::auth::Caller;
use super::error::ApiError;
use super::extract::Body;
use super::speech::{own_voice, speed_of};
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

/// The live call named in a path, if it is the caller's.
///
/// # Errors
/// 404, also for the calls of others: whether there is one is their business.
pub(super) async fn find(gateway: &Gateway, caller: &Caller, id: &str) -> Result<CallHandle, ApiError> {
    let call = gateway.calls.find(&CallId::from(id)).await.filter(|call| caller.sees(&call.meta().tenant));
    call.ok_or_else(|| ApiError::not_found("call", id))
}

/// Whether the caller may have a call with this agent (`None`: the default one).
///
/// # Errors
/// 404: the agent is another tenant's.
pub(super) fn may_use(gateway: &Gateway, caller: &Caller, agent: Option<&str>) -> Result<(), ApiError> {
    let name = agent.unwrap_or(&gateway.default_agent);
    match gateway.agents.find(name).and_then(|agent| agent.tenant) {
        Some(owner) if !caller.sees(&owner) => Err(ApiError::not_found("agent", name).param("agent")),
        _ => Ok(()),
    }
}

async fn list(State(gateway): State<Gateway>, caller: Caller) -> Json<serde_json::Value> {
    let mut calls = gateway.calls.list();
    calls.retain(|call| caller.sees(&call.meta.tenant));
    // Answered and not acknowledged yet: no agent has them, but they take places. They are nobody's yet.
    let half_open = gateway.sip.as_ref().filter(|_| caller.is_operator()).map(|sip| sip.half_open());
    let now = clock::now();
    let half_open = half_open.unwrap_or_default().into_iter().map(|call| {
        let age = now.saturating_duration_since(call.since).as_millis();
        json!({ "call_id": call.call_id, "source": call.source.to_string(), "age_ms": u64::try_from(age).unwrap_or(u64::MAX) })
    });
    Json(json!({ "calls": calls, "half_open": half_open.collect::<Vec<_>>() }))
}

async fn show(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<CallInfo>, ApiError> {
    Ok(Json(find(&gateway, &caller, &id).await?.info()))
}

async fn end(State(gateway): State<Gateway>, caller: Caller, Path(id): Path<String>) -> Result<StatusCode, ApiError> {
    find(&gateway, &caller, &id).await?.hang_up(EndReason::HungUp);
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

async fn place(State(gateway): State<Gateway>, caller: Caller, Body(body): Body<Place>) -> Result<Response, ApiError> {
    let Place { to, from, trunk, agent, headers } = body;
    may_use(&gateway, &caller, agent.as_deref())?;
    let request = DialRequest { to, from, trunk, headers, timeout: None };
    let call = gateway.dial(request, agent, caller.tenant).await?;
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
    caller: Caller,
    Path(id): Path<String>,
    Body(turn): Body<Turn>,
) -> Result<Response, ApiError> {
    let handle = find(&gateway, &caller, &id).await?;
    let agent = gateway.agents.find(&handle.meta().agent);
    let request = TurnRequest {
        id: turn.utterance_id.as_deref().map(TurnId::from),
        text: turn.text,
        interrupt: turn.interrupt,
        ahead: matches!(turn.priority, Some(Priority::High)),
        style: Style {
            voice: own_voice(&gateway, &caller, turn.voice)?.or_else(|| agent.as_ref().and_then(|a| a.voice.clone())),
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
    caller: Caller,
    Path(id): Path<String>,
    Body(body): Body<Prompt>,
) -> Result<StatusCode, ApiError> {
    find(&gateway, &caller, &id).await?.prompt(&body.text, &body.lang)?;
    Ok(StatusCode::ACCEPTED)
}

async fn interrupt(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<StatusCode, ApiError> {
    find(&gateway, &caller, &id).await?.interrupt()?;
    Ok(StatusCode::ACCEPTED)
}

async fn hold(State(gateway): State<Gateway>, caller: Caller, Path(id): Path<String>) -> Result<StatusCode, ApiError> {
    find(&gateway, &caller, &id).await?.hold()?;
    Ok(StatusCode::ACCEPTED)
}

async fn resume(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<StatusCode, ApiError> {
    find(&gateway, &caller, &id).await?.resume()?;
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
    caller: Caller,
    Path(id): Path<String>,
    Body(body): Body<Transfer>,
) -> Result<StatusCode, ApiError> {
    find(&gateway, &caller, &id).await?.transfer(body.to, body.mode == TransferMode::Attended)?;
    Ok(StatusCode::ACCEPTED)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Digits {
    digits: String,
}

async fn dtmf(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
    Body(body): Body<Digits>,
) -> Result<StatusCode, ApiError> {
    find(&gateway, &caller, &id).await?.dtmf(&body.digits)?;
    Ok(StatusCode::ACCEPTED)
}
