//! `/v1/records`: what happened on calls, by page, by filter, or all as JSON lines.

use axum::body::Body as HttpBody;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use futures_util::stream;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::auth::Caller;
use super::error::{ApiError, DATABASE_RETRY};
use super::extract::{Parameters, check_limit};
use crate::gateway::Gateway;
use crate::postgres;
use crate::records::{Filter, PAGE, Period, RecordError, Records};

/// Pages that may wait for the reader of an export.
const PAGES: usize = 2;
/// Records of one page of an export.
const EXPORT: u32 = 200;
const JSON_LINES: &str = "application/jsonl";

pub(super) fn router() -> Router<Gateway> {
    Router::new().route("/v1/records", get(list)).route("/v1/records/{id}", get(show)).route("/v1/usage", get(usage))
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Query {
    limit: Option<u32>,
    after: Option<String>,
    direction: Option<String>,
    agent: Option<String>,
    cause: Option<String>,
    party: Option<String>,
    since_ms: Option<i64>,
    until_ms: Option<i64>,
}

async fn list(
    State(gateway): State<Gateway>,
    caller: Caller,
    headers: HeaderMap,
    Parameters(query): Parameters<Query>,
) -> Result<Response, ApiError> {
    check_limit(query.limit, PAGE)?;
    let Query { limit, after, direction, agent, cause, party, since_ms, until_ms } = query;
    let page = limit.unwrap_or(100);
    // Their own calls only, unless they are the operator's.
    let tenant = (!caller.is_operator()).then(|| caller.tenant.to_string());
    let filter = Filter { limit: page, after, direction, tenant, agent, cause, party, since_ms, until_ms };
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if accept.contains(JSON_LINES) {
        return Ok(export(gateway.records, filter, limit.is_none()));
    }
    let page = on_records(gateway.records, move |records| records.list(&filter)).await?;
    Ok(Json(page).into_response())
}

async fn show(State(gateway): State<Gateway>, caller: Caller, Path(id): Path<String>) -> Result<Json<Value>, ApiError> {
    let wanted = id.clone();
    let record = on_records(gateway.records, move |records| records.get(&wanted)).await?;
    let record = record.filter(|record| caller.sees(record["tenant"].as_str().unwrap_or_default()));
    let mut record = record.ok_or_else(|| ApiError::not_found("record", &id))?;
    // Recordings are deleted earlier than records, so this is looked up and not written down.
    let recordings = gateway.recordings.clone();
    let found = tokio::task::spawn_blocking(move || recordings.find(&id)).await;
    record["recording"] = match found {
        Ok(Ok((found, _))) => json!({ "format": found.format, "durationMs": found.duration_ms, "gaps": found.gaps }),
        // Also one that is still written: it cannot be had yet.
        _ => Value::Null,
    };
    Ok(Json(record))
}

/// Days as `2026-11-22`, both ends included.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Days {
    from: Option<String>,
    to: Option<String>,
    tenant: Option<String>,
}

async fn usage(
    State(gateway): State<Gateway>,
    caller: Caller,
    Parameters(Days { from, to, tenant }): Parameters<Days>,
) -> Result<Json<Value>, ApiError> {
    for (name, day) in [("from", &from), ("to", &to)] {
        if let Some(day) = day.as_ref().filter(|day| !is_day(day)) {
            let message = format!("`{name}` is `{day}`: expected a day such as 2026-11-22");
            return Err(ApiError::bad_request("invalid_query", message).param(name));
        }
    }
    // Theirs only, unless they are the operator.
    let tenant = if caller.is_operator() { tenant } else { Some(caller.tenant.to_string()) };
    let period = Period { from, to, tenant };
    let usage = on_records(gateway.records, move |records| records.usage(&period)).await?;
    Ok(Json(json!({ "usage": usage })))
}

/// Whether `text` has the form of a day, by which rows are compared as text.
fn is_day(text: &str) -> bool {
    let form = b"0000-00-00";
    text.len() == form.len()
        && text.bytes().zip(form).all(|(byte, form)| if *form == b'0' { byte.is_ascii_digit() } else { byte == *form })
}

/// One record a line, no faster than the reader takes them; with `all`, page after page.
fn export(records: Records, filter: Filter, all: bool) -> Response {
    let (pages, body) = mpsc::channel(PAGES);
    tokio::task::spawn_blocking(move || {
        let mut filter = if all { Filter { limit: EXPORT, ..filter } } else { filter };
        loop {
            let page = match records.list(&filter) {
                Ok(page) => page,
                // The connection breaks off, so that a part is not taken for the whole.
                Err(error) => return drop(pages.blocking_send(Err(std::io::Error::other(error)))),
            };
            let lines: String = page.records.iter().map(|record| format!("{record}\n")).collect();
            let last = page.records.last().and_then(|record| record["id"].as_str()).map(str::to_owned);
            if pages.blocking_send(Ok(lines)).is_err() || !all || !page.has_more || last.is_none() {
                return;
            }
            filter.after = last;
        }
    });
    let body = stream::unfold(body, |mut body| async move { body.recv().await.map(|page| (page, body)) });
    ([(header::CONTENT_TYPE, JSON_LINES)], HttpBody::from_stream(body)).into_response()
}

/// Reads the database off the runtime's workers.
async fn on_records<T: Send + 'static>(
    records: Records,
    work: impl FnOnce(Records) -> Result<T, RecordError> + Send + 'static,
) -> Result<T, ApiError> {
    let failed = |message: String| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "storage_failed", message);
    match tokio::task::spawn_blocking(move || work(records)).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(RecordError::NotFound)) => {
            Err(ApiError::bad_request("invalid_query", "no record `after`").param("after"))
        }
        Ok(Err(error @ RecordError::Postgres(postgres::Error::Gone(_)))) => {
            Err(ApiError::unavailable(error.to_string(), DATABASE_RETRY))
        }
        Ok(Err(error)) => Err(failed(error.to_string())),
        Err(_) => Err(failed("reading records failed".into())),
    }
}
