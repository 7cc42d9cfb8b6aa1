//! The HTTP of `antiphon worker`: health, readiness and metrics, by the rules of the gateway's routes of the same names.

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router, middleware};
use metrics::gauge;
use serde_json::{Value, json};

use super::{Policies, auth, device_json, error};
use crate::synth::device::Phase;
use crate::synth::device::remote::serve::Service;
use crate::telemetry;

/// Its routes, for whom `policies` say: health and readiness for everybody, metrics for administrators.
pub fn router(service: Service, policies: Policies) -> Router {
    Router::new()
        .route("/healthz", get(|| async { Json(json!({ "status": "ok" })) }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .with_state(service)
        .layer(middleware::from_fn_with_state(policies, auth::require))
        .layer(middleware::from_fn(error::in_one_shape))
}

/// Ready: some device speaks and new streams are welcome.
async fn ready(State(service): State<Service>) -> Response {
    let devices = service.engine().status();
    let draining = service.is_draining();
    let ready = !draining && devices.iter().any(|device| device.phase == Phase::Ready);
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let devices: Vec<Value> = devices.iter().map(device_json).collect();
    let room = !draining && service.engine().has_room().is_ok();
    let body = json!({
        "ready": ready, "draining": draining, "room": room, "open": service.open(),
        "model": service.engine().model(), "devices": devices,
    });
    (status, Json(body)).into_response()
}

async fn metrics(State(service): State<Service>, headers: HeaderMap) -> Response {
    let told = service.told();
    gauge!("antiphon_stream_capacity", "state" => "used").set(f64::from(told.live));
    gauge!("antiphon_stream_capacity", "state" => "free").set((told.sustainable - f64::from(told.live)).max(0.0));
    super::admin::show_metrics(telemetry::metrics::recorder(), &headers)
}
