//! `/v1/calls/{id}/recording`: the sound of a call as a file, and its pauses while the call goes on.

use std::io::Read as _;
use std::path::PathBuf;

use axum::body::Body as HttpBody;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::AsyncReadExt as _;
use tokio::sync::mpsc;

use super::auth::Caller;
use super::error::ApiError;
use super::extract::Body;
use crate::gateway::Gateway;
use crate::recording::{Description, RecordingError, Recordings, State as Recording};

/// Bytes that are read from disk at a time.
const CHUNK: usize = 64 << 10;

/// The routes of this module.
pub(super) fn router() -> Router<Gateway> {
    Router::new().route("/v1/calls/{id}/recording", get(download).post(set))
}

/// The file, once it is complete.
async fn download(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let (recordings, wanted) = (gateway.recordings.clone(), id.clone());
    let found = tokio::task::spawn_blocking(move || recordings.find(&wanted)).await;
    let (description, path) = match found {
        Ok(Ok(found)) => found,
        Ok(Err(error)) => return Err(refused(&error, &id)),
        Err(_) => return Err(broken("reading the recording failed")),
    };
    // No other client learns whose it is.
    if !caller.sees(&description.tenant) {
        return Err(ApiError::not_found("recording", &id));
    }
    let name = format!("attachment; filename=\"{}.{}\"", description.id, description.format.extension());
    let headers = [
        (header::CONTENT_TYPE, description.format.mime().to_owned()),
        (header::CONTENT_DISPOSITION, name),
        (header::CACHE_CONTROL, "private, no-store".to_owned()),
    ];
    if description.encrypted {
        let recordings = gateway.recordings.clone();
        return Ok((headers, opened(recordings, description, path)).into_response());
    }
    let file = match tokio::fs::File::open(&path).await {
        Ok(file) => file,
        Err(error) => return Err(broken(&error.to_string())),
    };
    let length = file.metadata().await.map_err(|error| broken(&error.to_string()))?.len();
    let body = futures_util::stream::unfold(file, |mut file| async move {
        let mut chunk = vec![0; CHUNK];
        match file.read(&mut chunk).await {
            Ok(0) => None,
            Ok(read) => {
                chunk.truncate(read);
                Some((Ok(chunk), file))
            }
            // The connection breaks off, so that a client does not take a part for the whole.
            Err(error) => Some((Err(error), file)),
        }
    });
    let length = [(header::CONTENT_LENGTH, length.to_string())];
    Ok((headers, length, HttpBody::from_stream(body)).into_response())
}

/// The sound of an encrypted recording. Its length shows only when it is read.
fn opened(recordings: Recordings, description: Description, path: PathBuf) -> HttpBody {
    let (sender, parts) = mpsc::channel(2);
    tokio::task::spawn_blocking(move || {
        let mut sound = match recordings.open(&description, &path) {
            Ok(sound) => sound,
            Err(error) => return drop(sender.blocking_send(Err(std::io::Error::other(error)))),
        };
        loop {
            let mut part = vec![0; CHUNK];
            let part = sound.read(&mut part).map(|read| {
                part.truncate(read);
                part
            });
            let over = !matches!(&part, Ok(part) if !part.is_empty());
            if matches!(&part, Ok(part) if part.is_empty()) {
                return;
            }
            // overflow: awaited; a client that is gone ends it
            if sender.blocking_send(part).is_err() || over {
                return;
            }
        }
    });
    let parts = futures_util::stream::unfold(parts, |mut parts| async move { Some((parts.recv().await?, parts)) });
    HttpBody::from_stream(parts)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Change {
    state: Recording,
}

/// Pauses (`{"state": "paused"}`) or goes on (`{"state": "recording"}`).
async fn set(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
    Body(Change { state }): Body<Change>,
) -> Result<Json<Value>, ApiError> {
    let call = super::calls::find(&gateway, &caller, &id).await?;
    gateway.recordings.set(call.id(), state).map_err(|error| refused(&error, &id))?;
    Ok(Json(json!({ "id": call.id(), "state": state })))
}

fn refused(error: &RecordingError, id: &str) -> ApiError {
    match error {
        RecordingError::NotFound => ApiError::not_found("recording", id),
        RecordingError::Open => ApiError::new(StatusCode::CONFLICT, "recording_open", error.to_string()),
        RecordingError::NotRecorded => ApiError::new(StatusCode::CONFLICT, "not_recorded", error.to_string()),
        RecordingError::Io(error) => broken(&error.to_string()),
    }
}

fn broken(reason: &str) -> ApiError {
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "storage_failed", reason.to_owned())
}
