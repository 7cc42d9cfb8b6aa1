//! `/v1/audio/speech/batch` and `/v1/jobs`: durable work that gives way to live calls.

use axum::body::Body as HttpBody;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures_util::stream;
use serde::Deserialize;
use tokio::sync::mpsc;

use super::auth::Caller;
use super::error::ApiError;
use super::extract::{Body, Parameters, Upload};
use super::speech::{format_of, speed_of, voice_of};
use crate::batch::{Batch, BatchError, Item, Job, JobPage, JobSpec, PAGE};
use crate::gateway::Gateway;
use crate::turn::Markup;

/// The longest text a job may have by default, in four-byte characters.
const MAX_BODY: usize = 24 << 20;
/// What a client may say of the urgency of its jobs among its own.
const PRIORITIES: std::ops::RangeInclusive<i32> = -100..=100;
/// Encoded pieces that may wait for the reader.
const PIECES: usize = 8;

pub(super) fn router() -> Router<Gateway> {
    Router::new()
        .route("/v1/audio/speech/batch", post(submit).layer(DefaultBodyLimit::max(MAX_BODY)))
        .route("/v1/jobs", get(list))
        .route("/v1/jobs/{id}", get(show).delete(cancel))
        .route("/v1/jobs/{id}/audio", get(audio))
}

/// Runs `work` on the job database, off the runtime's workers.
pub(super) async fn on_batch<T: Send + 'static>(
    gateway: &Gateway,
    work: impl FnOnce(Batch) -> Result<T, BatchError> + Send + 'static,
) -> Result<T, ApiError> {
    let jobs = gateway.jobs.clone();
    let done = tokio::task::spawn_blocking(move || work(jobs.batch()?)).await;
    let done = done.map_err(|_| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "job_failed", "batch work failed"))?;
    Ok(done?)
}

#[derive(Deserialize)]
pub(super) struct Submit {
    input: Option<String>,
    #[serde(default)]
    items: Vec<ItemOf>,
    voice: Option<String>,
    language: Option<String>,
    instructions: Option<String>,
    response_format: Option<String>,
    speed: Option<f32>,
    #[serde(default)]
    seed: u64,
    #[serde(default)]
    priority: i32,
    #[serde(default)]
    markup: Markup,
}

/// A text, or one with a voice, a manner and a seed of its own.
#[derive(Deserialize)]
#[serde(untagged, expecting = "an item is a string or { input, voice, instructions, seed, markup }")]
enum ItemOf {
    Text(String),
    Own(OwnItem),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OwnItem {
    input: String,
    voice: Option<String>,
    instructions: Option<String>,
    seed: Option<u64>,
    markup: Option<Markup>,
}

async fn submit(
    State(gateway): State<Gateway>,
    caller: Caller,
    _room: Upload,
    Body(request): Body<Submit>,
) -> Result<Response, ApiError> {
    let markup = request.markup;
    let items = match (request.input, request.items) {
        (Some(text), items) if items.is_empty() => vec![Item { markup, ..text.into() }],
        (None, items) => {
            let own = |item| match item {
                ItemOf::Text(text) => Ok(Item { markup, ..text.into() }),
                ItemOf::Own(OwnItem { input, voice, instructions, seed, markup: own }) => {
                    // A job's voice stands in where the item names none: only a name is translated.
                    let voice = match voice {
                        Some(voice) => voice_of(&gateway, &caller, Some(voice))?,
                        None => None,
                    };
                    Ok(Item { input, voice, instructions, seed, markup: own.unwrap_or(markup) })
                }
            };
            items.into_iter().map(own).collect::<Result<_, ApiError>>()?
        }
        (Some(_), _) => {
            return Err(ApiError::bad_request("invalid_job", "give `input` or `items`, not both").param("items"));
        }
    };
    if !PRIORITIES.contains(&request.priority) {
        let (low, high) = (PRIORITIES.start(), PRIORITIES.end());
        let message = format!("`priority` is {low} to {high}; jobs of a higher one come first");
        return Err(ApiError::bad_request("invalid_job", message).param("priority"));
    }
    let spec = JobSpec {
        items,
        voice: voice_of(&gateway, &caller, request.voice)?,
        language: request.language,
        instructions: request.instructions,
        speed: speed_of(request.speed)?,
        seed: request.seed,
        format: format_of(request.response_format.as_deref())?,
        tenant: caller.tenant.to_string(),
        priority: request.priority,
    };
    let limit = gateway.tenants.batch_chars_per_day(&caller.tenant);
    let job = on_batch(&gateway, move |batch| batch.submit_within(spec, limit)).await?;
    let location = format!("/v1/jobs/{}", job.id);
    Ok((StatusCode::ACCEPTED, [(header::LOCATION, location)], Json(job)).into_response())
}

/// Which of the jobs; a client asks on with the last job of the answer as `after` while that says `hasMore`.
#[derive(Deserialize)]
struct Listing {
    limit: Option<u32>,
    after: Option<String>,
}

async fn list(
    State(gateway): State<Gateway>,
    caller: Caller,
    Parameters(Listing { limit, after }): Parameters<Listing>,
) -> Result<Json<JobPage>, ApiError> {
    let limit = limit.unwrap_or(PAGE);
    if !(1..=PAGE).contains(&limit) {
        return Err(ApiError::bad_request("invalid_query", format!("`limit` is 1 to {PAGE}")).param("limit"));
    }
    Ok(Json(on_batch(&gateway, move |batch| batch.list_of(|owner| caller.sees(owner), limit, after.as_deref())).await?))
}

/// Nothing, where the job is the caller's.
///
/// # Errors
/// 404, as where there is none.
pub(super) fn own(batch: &Batch, caller: &Caller, id: &str) -> Result<(), BatchError> {
    match batch.owner(id)? {
        owner if caller.sees(&owner) => Ok(()),
        _ => Err(BatchError::NotFound(format!("job `{id}`"))),
    }
}

async fn show(State(gateway): State<Gateway>, caller: Caller, Path(id): Path<String>) -> Result<Json<Job>, ApiError> {
    Ok(Json(on_batch(&gateway, move |batch| own(&batch, &caller, &id).and_then(|()| batch.job(&id))).await?))
}

async fn cancel(State(gateway): State<Gateway>, caller: Caller, Path(id): Path<String>) -> Result<Json<Job>, ApiError> {
    Ok(Json(on_batch(&gateway, move |batch| own(&batch, &caller, &id).and_then(|()| batch.cancel(&id))).await?))
}

#[derive(Deserialize)]
struct Which {
    item: Option<u32>,
}

async fn audio(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
    Parameters(which): Parameters<Which>,
) -> Result<Response, ApiError> {
    let audio =
        on_batch(&gateway, move |batch| own(&batch, &caller, &id).and_then(|()| batch.audio(&id, which.item))).await?;
    let mime = audio.format().mime();
    let (pieces, body) = mpsc::channel(PIECES);
    // Reads and encodes on a thread that may block, no faster than the reader takes it.
    tokio::task::spawn_blocking(move || {
        for piece in audio {
            let piece = piece.map_err(std::io::Error::other);
            if pieces.blocking_send(piece).is_err() {
                return;
            }
        }
    });
    let body = stream::unfold(body, |mut body| async move { body.recv().await.map(|piece| (piece, body)) });
    Ok(([(header::CONTENT_TYPE, mime)], HttpBody::from_stream(body)).into_response())
}
