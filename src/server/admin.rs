//! Operations: health, readiness, metrics, drain and the API's description.

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};

use crate::gateway::Gateway;

/// Content type of the Prometheus text format.
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

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
        .route("/v1/admin/drain", post(drain))
}

/// The state of every device, for `/readyz`, the console and the event stream.
pub fn devices(gateway: &Gateway) -> Vec<Value> {
    gateway.engine.status().iter().map(super::device_json).collect()
}

/// Ready: some device speaks and new calls are welcome.
async fn ready(State(gateway): State<Gateway>) -> Response {
    let draining = gateway.calls.is_draining();
    let ready = gateway.is_ready() && !draining;
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let body =
        json!({ "ready": ready, "draining": draining, "calls": gateway.calls.count(), "devices": devices(&gateway) });
    (status, Json(body)).into_response()
}

async fn metrics(State(gateway): State<Gateway>) -> Response {
    super::gauges::refresh(&gateway).await;
    ([(header::CONTENT_TYPE, PROMETHEUS)], gateway.metrics.render()).into_response()
}

/// Refuses new calls, lets the live ones finish what they say, then answers.
async fn drain(State(gateway): State<Gateway>) -> Json<Value> {
    let before = gateway.calls.count();
    let cut_off = gateway.calls.drain(gateway.drain_grace).await;
    Json(json!({ "drained": before, "cutOff": cut_off }))
}
