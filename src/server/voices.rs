//! `/v1/audio/voices`: list, enrol and remove voices. What they do is [`crate::voice::api`]'s.

use axum::extract::multipart::MultipartError;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Value, json};

use super::auth::Caller;
use super::error::ApiError;
use super::extract::{self, Parameters, Upload};
use crate::clock;
use crate::gateway::Gateway;
use crate::synth::device::Phase;
use crate::voice::api::Form;
use crate::voice::decode::MAX_BYTES;

/// The recording, and room for the other fields.
const MAX_BODY: usize = MAX_BYTES + (1 << 20);

pub(super) fn router() -> Router<Gateway> {
    Router::new()
        .route("/v1/audio/voices", get(list).post(add).delete(remove_named))
        .route("/v1/audio/voices/{name}", get(file).delete(remove))
        .layer(DefaultBodyLimit::max(MAX_BODY))
}

/// Every voice that a request may name, the default first; enrolled ones with what is known of them.
async fn list(State(gateway): State<Gateway>, caller: Caller) -> Json<Value> {
    let enrolled = gateway.voices.list().voices;
    let own = enrolled.iter().filter(|entry| entry.owner.as_deref().is_none_or(|owner| caller.sees(owner)));
    let mut voices: Vec<Value> = own.map(|entry| json!(entry)).collect();
    for voice in gateway.engine.voices() {
        if !enrolled.iter().any(|entry| entry.name.as_str() == voice.name) {
            voices.push(json!({ "name": voice.name, "languages": voice.languages }));
        }
    }
    // What other nodes have is spoken here, too.
    for voice in gateway.nodes.as_ref().map(|nodes| nodes.voices()).unwrap_or_default() {
        let there = voices.iter().any(|known| known["name"] == voice.name);
        if !there && voice.owner.as_deref().is_none_or(|owner| caller.sees(owner)) {
            voices.push(json!({ "name": voice.name, "id": voice.id, "languages": voice.languages }));
        }
    }
    Json(json!({ "voices": voices }))
}

async fn add(
    State(gateway): State<Gateway>,
    caller: Caller,
    _room: Upload,
    extract::Form(mut body): extract::Form,
) -> Result<Response, ApiError> {
    // Before the recording is read: it may be large.
    gateway.voices.can_enrol()?;
    let owner = (!caller.is_operator()).then(|| caller.tenant.to_string());
    let mut form = Form { owner, ..Form::default() };
    while let Some(mut field) = body.next_field().await.map_err(malformed)? {
        let name = field.name().unwrap_or_default().to_owned();
        let limit = Form::limit(&name).unwrap_or(0);
        let mut value = Vec::new();
        while let Some(piece) = field.chunk().await.map_err(malformed)? {
            value.extend_from_slice(&piece);
            if value.len() > limit {
                // Refused by the form, which knows the words for it; the rest is not read.
                break;
            }
        }
        form.set(&name, value)?;
    }
    let voices = gateway.voices.clone();
    let added = tokio::task::spawn_blocking(move || voices.add(form, clock::wall())).await.map_err(|_| {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "enrolment_failed", "the enrolment failed unexpectedly")
    })??;
    gateway.engine.refresh_voices().await;
    if let Some(error) = unusable(&gateway, added.voice.name.as_str()) {
        return Err(error);
    }
    Ok((StatusCode::CREATED, Json(added)).into_response())
}

/// A voice that the loaded model does not take (its networks are of another model) is no success, though it is stored.
fn unusable(gateway: &Gateway, name: &str) -> Option<ApiError> {
    let ready = gateway.engine.status().iter().any(|device| {
        // Other voices than CosyVoice3's know nothing of the folder; a device that still loads will look.
        device.phase == Phase::Ready && device.caps.as_ref().is_some_and(|caps| caps.name == "cosyvoice3")
    });
    (ready && !gateway.engine.voices().iter().any(|voice| voice.name == name)).then(|| {
        let message = format!(
            "`{name}` was enrolled, but the loaded model cannot speak with it: the log says why; take \
             `speech_tokenizer_v3.onnx` and `campplus.onnx` from the same checkpoint as the model"
        );
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "voice_unusable", message)
    })
}

fn malformed(error: MultipartError) -> ApiError {
    ApiError::new(error.status(), "invalid_form", error.body_text())
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

async fn remove_named(
    State(gateway): State<Gateway>,
    caller: Caller,
    Parameters(named): Parameters<Named>,
) -> Result<StatusCode, ApiError> {
    remove(State(gateway), caller, Path(named.name)).await
}

/// The file of an enrolled voice, for whom it belongs to and for other nodes.
async fn file(State(gateway): State<Gateway>, caller: Caller, Path(name): Path<String>) -> Result<Response, ApiError> {
    is_own(&gateway, &caller, &name)?;
    let voices = gateway.voices.clone();
    let file = tokio::task::spawn_blocking(move || voices.file(&name))
        .await
        .map_err(|_| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "the voice could not be read"))??;
    Ok(([(header::CONTENT_TYPE, "application/octet-stream")], file).into_response())
}

/// Whether `caller` may do with the voice what its owner may.
///
/// # Errors
/// 404: to this caller there is none; 403: it is the operator's.
fn is_own(gateway: &Gateway, caller: &Caller, name: &str) -> Result<(), ApiError> {
    match gateway.voices.owner(name) {
        Some(owner) if !caller.sees(&owner) => Err(ApiError::not_found("voice", name).param("name")),
        // A voice that the operator put there is everybody's to speak with, and the operator's to remove.
        None if gateway.voices.knows(name) && !caller.is_operator() => {
            let message = format!("`{name}` belongs to the operator of the gateway");
            Err(ApiError::new(StatusCode::FORBIDDEN, "not_owner", message).param("name"))
        }
        _ => Ok(()),
    }
}

async fn remove(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(name): Path<String>,
) -> Result<StatusCode, ApiError> {
    is_own(&gateway, &caller, &name)?;
    gateway.voices.remove(&name)?;
    gateway.engine.refresh_voices().await;
    Ok(StatusCode::NO_CONTENT)
}
