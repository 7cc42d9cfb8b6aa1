//! What a device did last, for the console: steps on a timeline.

use std::time::Instant;

use axum::extract::{Path, State};
use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Value, json};

use super::error::ApiError;
use crate::clock;
use crate::gateway::Gateway;

pub(super) fn router() -> Router<Gateway> {
    Router::new().route("/v1/devices/{id}/steps", get(steps))
}

/// The latest steps of a device of this machine, in the order in which they ended, and its slack. Times are Unix time in
/// milliseconds.
async fn steps(State(gateway): State<Gateway>, Path(number): Path<String>) -> Result<Json<Value>, ApiError> {
    let found = number.parse().ok().and_then(|number| gateway.engine.timeline(number));
    let Some((status, timeline)) = found else { return Err(ApiError::not_found("device", &number)) };
    let (now, wall) = (clock::now(), clock::wall());
    let at = |instant: Instant| (wall.saturating_sub(now.saturating_duration_since(instant))).as_secs_f64() * 1e3;
    let device = status.caps.as_ref().map(|caps| caps.device.as_str());
    let Some(timeline) = timeline else {
        return Ok(Json(json!({ "device": device, "elsewhere": true, "steps": [], "slack": [] })));
    };
    let steps: Vec<Value> = timeline
        .steps
        .iter()
        .map(|step| {
            json!({
                "stage": step.stage.label(), "beganMs": at(step.began), "lastedMs": step.lasted.as_secs_f64() * 1e3,
                "live": step.live, "batch": step.batch, "rounds": step.rounds,
            })
        })
        .collect();
    let slack: Vec<Value> =
        timeline.slack.iter().map(|(when, seconds)| json!({ "atMs": at(*when), "seconds": seconds })).collect();
    Ok(Json(json!({ "device": device, "elsewhere": false, "steps": steps, "slack": slack })))
}
