//! `/v1/calls`: place, list, show, steer and end calls.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Value, json};

use super::auth::Caller;
use super::error::ApiError;
use super::extract::{Body, Parameters, check_limit};
use super::speech::{own_voice, speed_of, volume_of};
use super::{forward, handed};
use crate::call::bridge::WaitTone;
use crate::call::handle::Style;
use crate::call::{BridgeMode, BridgeRequest, CallHandle, CallId, EndReason, Interruptible, TurnId, TurnRequest};
use crate::clock;
use crate::cluster::Nodes;
use crate::gateway::outgoing::RingingInfo;
use crate::gateway::{Detection, Gateway};
use crate::sip::DialRequest;
use crate::telemetry::context;

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
        .route("/v1/calls/{id}/bridge", post(bridge).delete(end_bridge))
        .route("/v1/calls/{id}/dtmf", post(dtmf))
}

/// The live call named in a path, if it is the caller's.
///
/// # Errors
/// 404, also for the calls of others: whether there is one is their business; 409 while it rings.
pub(super) async fn find(gateway: &Gateway, caller: &Caller, id: &str) -> Result<CallHandle, ApiError> {
    let id = CallId::from(id);
    let live = gateway.calls.get(&id);
    // A call that was answered a moment ago is waited for.
    if live.is_none() && ringing(gateway, caller, &id).is_some() {
        let message = format!("call `{id}` rings: wait for `answered` on /v1/events");
        return Err(ApiError::new(StatusCode::CONFLICT, "call_ringing", message));
    }
    let call = gateway.calls.find(&id).await.filter(|call| caller.sees(&call.meta().tenant));
    call.ok_or_else(|| ApiError::not_found("call", id.as_str()))
}

/// The caller's call with this id, while it has not been answered.
fn ringing(gateway: &Gateway, caller: &Caller, id: &CallId) -> Option<RingingInfo> {
    let ringing = gateway.outgoing.get(id)?;
    (ringing.state != "answered" && caller.sees(&ringing.meta.tenant)).then_some(ringing)
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

/// Which part of a list is wanted.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Page {
    limit: Option<u32>,
    after: Option<String>,
}

/// Most calls of one page.
const MAX_PAGE: u32 = 1_000;

/// The calls of all gateways, oldest first.
async fn list(
    State(gateway): State<Gateway>,
    caller: Caller,
    Parameters(page): Parameters<Page>,
    asker: handed::Asker,
) -> Result<Json<Value>, ApiError> {
    check_limit(page.limit, MAX_PAGE)?;
    let mut calls = gateway.calls.list();
    // A call that is heard before it is answered still rings.
    let rings = |id: &CallId| gateway.outgoing.get(id).is_some_and(|ringing| ringing.state != "answered");
    calls.retain(|call| caller.sees(&call.meta.tenant) && !rings(&call.meta.id));
    // Answered and not acknowledged yet: no agent has them, but they count towards capacity. They belong to no tenant yet.
    let half_open = gateway.sip.as_ref().filter(|_| caller.is_operator()).map(|sip| sip.half_open());
    let now = clock::now();
    let half_open = half_open.unwrap_or_default().into_iter().map(|call| {
        let age = now.saturating_duration_since(call.since).as_millis();
        json!({ "call_id": call.call_id, "source": call.source.to_string(), "age_ms": u64::try_from(age).unwrap_or(u64::MAX) })
    });
    let ringing = gateway.outgoing.list().into_iter().filter(|call| caller.sees(&call.meta.tenant));
    let calls: Vec<Value> = calls.into_iter().map(|call| json!(call)).chain(ringing.map(|call| json!(call))).collect();
    let mut all = json!({ "calls": calls, "half_open": half_open.collect::<Vec<_>>() });
    if let Some(nodes) = gateway.nodes.as_ref().filter(|_| !caller.passed_on) {
        add_others(nodes, &caller, &mut all).await;
    }
    if let Some(mut told) = handed::part(&gateway, asker, "/v1/calls").await {
        append(&mut all, &mut told);
    }
    cut(&mut all, &page)?;
    Ok(Json(all))
}

/// Adds what the other gateways have, and names those that did not say.
async fn add_others(nodes: &Nodes, caller: &Caller, all: &mut Value) {
    let mut unreached = Vec::new();
    for (name, told) in forward::gather(nodes, caller, "/v1/calls").await {
        let Some(mut told) = told else {
            unreached.push(name);
            continue;
        };
        append(all, &mut told);
    }
    all["unreached"] = json!(unreached);
}

/// Adds the calls that another gateway has told of.
fn append(all: &mut Value, told: &mut Value) {
    for list in ["calls", "half_open"] {
        if let (Some(all), Some(more)) = (all[list].as_array_mut(), told[list].as_array_mut()) {
            all.append(more);
        }
    }
}

/// A call's place in the list: it keeps it, also when the call is over.
fn place_of(call: &Value) -> (u64, &str) {
    (call["startedMs"].as_u64().unwrap_or_default(), call["id"].as_str().unwrap_or_default())
}

/// Leaves one page of calls, and says where the next begins, if there is one.
fn cut(all: &mut Value, page: &Page) -> Result<(), ApiError> {
    let after = page.after.as_deref().map(|after| {
        let (started, id) = after.split_once('-')?;
        Some((started.parse::<u64>().ok()?, id.to_owned()))
    });
    if let Some(None) = after {
        return Err(
            ApiError::bad_request("invalid_query", "`after` is what the page before gave as `next`").param("after")
        );
    }
    let after = after.flatten();
    let Some(calls) = all["calls"].as_array_mut() else { return Ok(()) };
    calls.sort_by(|a, b| place_of(a).cmp(&place_of(b)));
    if let Some((started, id)) = &after {
        calls.retain(|call| place_of(call) > (*started, id.as_str()));
    }
    let Some(limit) = page.limit.map(|limit| limit as usize).filter(|limit| *limit < calls.len()) else {
        return Ok(());
    };
    calls.truncate(limit);
    let next = calls.last().map(place_of).map(|(started, id)| format!("{started}-{id}"));
    all["next"] = json!(next);
    Ok(())
}

async fn show(State(gateway): State<Gateway>, caller: Caller, Path(id): Path<String>) -> Result<Json<Value>, ApiError> {
    Ok(Json(match ringing(&gateway, &caller, &CallId::from(id.as_str())) {
        Some(ringing) => json!(ringing),
        None => json!(find(&gateway, &caller, &id).await?.info()),
    }))
}

async fn end(State(gateway): State<Gateway>, caller: Caller, Path(id): Path<String>) -> Result<StatusCode, ApiError> {
    let wanted = CallId::from(id.as_str());
    if ringing(&gateway, &caller, &wanted).is_none() || !gateway.outgoing.cancel(&wanted) {
        find(&gateway, &caller, &id).await?.hang_up(EndReason::HungUp);
    }
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Place {
    to: String,
    from: Option<String>,
    trunk: Option<String>,
    agent: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    /// Answer when somebody has picked up, not at once.
    #[serde(default)]
    wait: bool,
    /// Whether it is found out who answers: `off`, `report`, `hold`.
    #[serde(rename = "machineDetection", default)]
    machine_detection: Detection,
    /// How long it may ring.
    #[serde(rename = "ringTimeoutS")]
    ring_timeout_s: Option<u64>,
}

/// `?wait=answer` is the same as `"wait": true`.
#[derive(Deserialize)]
struct Waiting {
    wait: Option<String>,
}

/// Longest that a call may ring.
const MAX_RING_S: u64 = 600;

fn check_ring_timeout(seconds: Option<u64>) -> Result<(), ApiError> {
    match seconds.filter(|seconds| !(1..=MAX_RING_S).contains(seconds)) {
        Some(seconds) => {
            let message = format!("ringTimeoutS is {seconds}: expected 1 to {MAX_RING_S}");
            Err(ApiError::bad_request("invalid_request", message).param("ringTimeoutS"))
        }
        None => Ok(()),
    }
}

async fn place(
    State(gateway): State<Gateway>,
    caller: Caller,
    Parameters(waiting): Parameters<Waiting>,
    Body(body): Body<Place>,
) -> Result<Response, ApiError> {
    let Place { to, from, trunk, agent, headers, wait, machine_detection, ring_timeout_s } = body;
    let waits = match waiting.wait.as_deref() {
        None => wait,
        Some("answer") => true,
        Some(other) => {
            return Err(
                ApiError::bad_request("invalid_query", format!("wait={other}: expected `answer`")).param("wait")
            );
        }
    };
    check_ring_timeout(ring_timeout_s)?;
    may_use(&gateway, &caller, agent.as_deref())?;
    let request = DialRequest { to, from, trunk, headers, timeout: ring_timeout_s.map(Duration::from_secs) };
    let placed = gateway.place(request, agent, caller.tenant, machine_detection, caller.dialer.as_deref())?;
    let id = placed.id().clone();
    if waits {
        placed.answered().await?;
    }
    let location = format!("/v1/calls/{id}");
    Ok((StatusCode::CREATED, [("Location", location)], Json(json!({ "id": id }))).into_response())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Turn {
    text: String,
    #[serde(default)]
    interrupt: bool,
    priority: Option<Priority>,
    voice: Option<String>,
    language: Option<String>,
    normalise: Option<crate::text::Normalise>,
    instructions: Option<String>,
    seed: Option<u64>,
    speed: Option<f32>,
    interruptible: Option<Interruptible>,
    #[serde(default)]
    markup: crate::turn::Markup,
    volume: Option<f32>,
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
        patient: false,
        style: Style {
            voice: own_voice(&gateway, &caller, turn.voice)?.or_else(|| agent.as_ref().and_then(|a| a.voice.clone())),
            language: turn.language.or_else(|| agent.as_ref().and_then(|a| a.language.clone())),
            normalise: turn.normalise.or_else(|| agent.as_ref().map(|a| a.normalise)).unwrap_or_default(),
            instructions: turn.instructions,
            seed: turn.seed.unwrap_or(0),
            speed: speed_of(turn.speed)?,
            lexicon: agent.as_ref().map_or_else(|| gateway.agents.lexicon(), |a| a.lexicon.said.clone()),
            interruptible: turn.interruptible.or_else(|| agent.and_then(|a| a.interruptible)),
            preemptible: false,
            markup: turn.markup,
            volume: volume_of(turn.volume)?,
            trace: context::current(),
            ..Style::default()
        },
    };
    let utterance = handle.speak(request).await?;
    Ok((StatusCode::ACCEPTED, Json(json!({ "utteranceId": utterance }))).into_response())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Prompt {
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
pub(super) struct Transfer {
    to: String,
    #[serde(default)]
    mode: TransferMode,
    /// Seconds after which the call comes back if the destination has not answered.
    #[serde(rename = "timeoutS")]
    timeout_s: Option<u64>,
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
    if let Some(seconds) = body.timeout_s.filter(|seconds| !(1..=MAX_RING_S).contains(seconds)) {
        let message = format!("timeoutS is {seconds}: expected 1 to {MAX_RING_S}");
        return Err(ApiError::bad_request("invalid_request", message).param("timeoutS"));
    }
    let call = find(&gateway, &caller, &id).await?;
    if let Some(dialer) = &caller.dialer {
        // The peer places this call: it counts to the token's calls a minute.
        drop(gateway.dialers.begin(dialer)?);
    }
    let limit = body.timeout_s.map(Duration::from_secs);
    call.transfer_within(body.to, body.mode == TransferMode::Attended, limit)?;
    Ok(StatusCode::ACCEPTED)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct Bridge {
    /// Whom to call; without it the mode of the bridge is changed.
    to: Option<String>,
    from: Option<String>,
    trunk: Option<String>,
    mode: Option<BridgeMode>,
    #[serde(default)]
    wait: WaitTone,
    ring_timeout_s: Option<u64>,
}

/// Joins the peer of a call with a human who is called for it, or changes what the agent does meanwhile.
async fn bridge(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
    Body(body): Body<Bridge>,
) -> Result<Response, ApiError> {
    let call = find(&gateway, &caller, &id).await?;
    let Bridge { to, from, trunk, mode, wait, ring_timeout_s } = body;
    check_ring_timeout(ring_timeout_s)?;
    let Some(to) = to else {
        let Some(mode) = mode else {
            let message = "either `to` (whom to call) or `mode` (of a call that is bridged) is needed";
            return Err(ApiError::bad_request("invalid_request", message).param("to"));
        };
        call.set_bridge_mode(mode)?;
        return Ok(StatusCode::ACCEPTED.into_response());
    };
    let mode = mode.unwrap_or_default();
    let request = BridgeRequest { to, from, trunk, mode, wait, ring_timeout_s };
    let human = gateway.bridge(&call, request, caller.dialer.as_deref())?;
    let location = format!("/v1/calls/{human}");
    Ok((StatusCode::CREATED, [("Location", location)], Json(json!({ "id": human }))).into_response())
}

/// The peer is with its agent again; the human's call ends.
async fn end_bridge(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<StatusCode, ApiError> {
    find(&gateway, &caller, &id).await?.end_bridge()?;
    Ok(StatusCode::ACCEPTED)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Digits {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_hold_every_call_once_though_calls_end_between_them() {
        let call = |started: u64, id: &str| json!({ "startedMs": started, "id": id });
        let whole = || json!({ "calls": [call(5, "b.2"), call(3, "a.1"), call(5, "a-2.1"), call(9, "c.1")] });
        let ids = |page: &Value| -> Vec<String> {
            let calls = page["calls"].as_array().expect("a list").iter();
            calls.map(|call| call["id"].as_str().expect("an id").to_owned()).collect()
        };
        let page =
            |all: &mut Value, limit, after: Option<&str>| cut(all, &Page { limit, after: after.map(str::to_owned) });
        let mut first = whole();
        page(&mut first, Some(2), None).expect("valid");
        assert_eq!(ids(&first), ["a.1", "a-2.1"]);
        let next = first["next"].as_str().expect("there is more").to_owned();
        let mut second = whole();
        // The one that the page ended with is over.
        second["calls"].as_array_mut().expect("a list").retain(|call| call["id"] != "a-2.1");
        page(&mut second, Some(2), Some(&next)).expect("valid");
        assert_eq!((ids(&second), &second["next"]), (vec!["b.2".to_owned(), "c.1".to_owned()], &Value::Null));
        for wrong in ["", "x", "x-a.1"] {
            assert!(page(&mut whole(), None, Some(wrong)).is_err(), "{wrong}");
        }
    }
}
