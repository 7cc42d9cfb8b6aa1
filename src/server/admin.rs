//! Operations: health, readiness, metrics, drain and the API's description.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use metrics_exporter_prometheus::PrometheusHandle;
use serde::Deserialize;
use serde_json::{Value, json};

use super::Configuration;
use super::error::ApiError;
use crate::clock;
use crate::gateway::Gateway;
use crate::sip::{TargetStatus, TrunkStatus};
use crate::telemetry;

/// The routes of this module.
pub fn router() -> Router<Gateway> {
    Router::new()
        .route("/healthz", get(|| async { Json(json!({ "status": "ok" })) }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .route(
            "/openapi.json",
            get(|| async { ([(header::CONTENT_TYPE, "application/json")], include_str!("openapi.json")) }),
        )
        .route("/v1/admin/drain", post(drain).delete(resume))
        .route("/v1/admin/reload", post(reload))
        .route("/v1/admin/config", get(config))
}

/// The state of every device, for `/readyz`, the console and the event stream.
pub fn devices(gateway: &Gateway) -> Vec<Value> {
    gateway.engine.status().iter().map(super::device_json).collect()
}

/// The state of every trunk and its hosts, for the event stream.
pub fn trunks(gateway: &Gateway) -> Vec<Value> {
    let trunks = gateway.sip.as_ref().map(|sip| sip.trunks()).unwrap_or_default();
    let target = |target: &TargetStatus| json!({ "host": target.host, "up": target.up, "blocked": target.blocked, "error": target.error });
    let trunk = |trunk: &TrunkStatus| {
        json!({
            "name": trunk.name, "registered": trunk.registered, "up": trunk.up, "error": trunk.error,
            "targets": trunk.targets.iter().map(target).collect::<Vec<_>>(),
        })
    };
    trunks.iter().map(trunk).collect()
}

/// Ready: some device speaks and new calls are welcome.
async fn ready(State(gateway): State<Gateway>) -> Response {
    let draining = gateway.calls.is_leaving();
    let ready = gateway.is_ready() && !draining;
    let faults = gateway.faults();
    // Where others have room, a balancer had better ask them.
    let ready = ready && !faults.iter().any(|fault| fault.fatal) && gateway.room.is_wanted();
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let faults: Vec<Value> =
        faults.into_iter().map(|fault| json!({ "part": fault.part, "reason": fault.reason })).collect();
    // A prober need not know where the trunks are.
    let up = |trunk: &TrunkStatus| json!({ "name": trunk.name, "registered": trunk.registered, "up": trunk.up });
    let trunks: Vec<Value> = gateway.sip.as_ref().map(|sip| sip.trunks().iter().map(up).collect()).unwrap_or_default();
    let nodes = gateway.nodes.as_ref().map(|nodes| {
        let status = nodes.status(clock::now());
        json!({ "node": status.node, "registry": status.registry, "error": status.error, "others": status.others })
    });
    let room = gateway.room.check().is_ok();
    let body = json!({ "faults": faults, "ready": ready, "draining": draining, "room": room, "cluster": nodes, "calls": gateway.calls.count(), "maxCalls": gateway.calls.most(), "devices": devices(&gateway), "trunks": trunks });
    (status, Json(body)).into_response()
}

async fn metrics(State(gateway): State<Gateway>, headers: HeaderMap) -> Response {
    super::gauges::refresh(&gateway).await;
    show_metrics(gateway.metrics, &headers)
}

/// The metrics, in the form that is asked for.
pub(super) fn show_metrics(handle: &PrometheusHandle, headers: &HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    let (kind, text) = telemetry::metrics::answer(handle, accept);
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

/// The body of `POST /v1/admin/drain`, which may also be empty.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Drain {
    drain: bool,
}

/// Tells others that no calls are taken, refuses them after the notice, lets the live ones finish what they say, then answers;
/// `{"drain": false}` takes calls again.
async fn drain(State(gateway): State<Gateway>, body: Bytes) -> Result<Response, ApiError> {
    let wanted = body.is_empty()
        || serde_json::from_slice::<Option<Drain>>(&body)
            .map_err(|e| {
                ApiError::bad_request("invalid_json", format!("the body is {{\"drain\": true}} or false: {e}"))
            })?
            .is_none_or(|body| body.drain);
    if !wanted {
        return resume(State(gateway)).await.map(IntoResponse::into_response);
    }
    let before = gateway.calls.count();
    // Of its own, for it goes on when who asked has gone.
    let draining = gateway.clone();
    let cut_off = tokio::spawn(async move { draining.drain().await }).await;
    let cut_off = cut_off.map_err(|_| {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "the drain failed; the log says why")
    })?;
    Ok(Json(json!({ "drained": before, "cutOff": cut_off, "draining": gateway.calls.is_leaving() })).into_response())
}

/// Takes calls again. Those that were told to finish still end.
async fn resume(State(gateway): State<Gateway>) -> Result<Json<Value>, ApiError> {
    if gateway.resume().await {
        return Ok(Json(json!({ "draining": false })));
    }
    Err(ApiError::new(StatusCode::CONFLICT, "shutting_down", "the gateway is being stopped and takes no more calls"))
}

/// Takes up what of a changed configuration file can change, names the rest, and drops no call.
async fn reload(Extension(configuration): Extension<Arc<dyn Configuration>>) -> Result<Json<Value>, ApiError> {
    let done = tokio::task::spawn_blocking(move || configuration.reload()).await;
    match done {
        Ok(Ok(report)) => Ok(Json(report)),
        Ok(Err(error)) => {
            let message = format!("nothing has changed: {error}");
            Err(ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid_configuration", message))
        }
        Err(_) => Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "the reload failed")),
    }
}

/// The configuration in force: every key, its value and what it means; secrets are left out.
async fn config(Extension(configuration): Extension<Arc<dyn Configuration>>) -> Json<Value> {
    Json(configuration.in_force())
}
