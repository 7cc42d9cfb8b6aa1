//! Request bodies and query parameters whose mistakes come back in the one error shape.

use std::time::Duration;

use axum::extract::rejection::JsonRejection;
use axum::extract::{FromRequest, FromRequestParts, Multipart, Query, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use serde::de::DeserializeOwned;
use tokio::sync::{Semaphore, SemaphorePermit};

use super::error::ApiError;

/// A JSON body.
#[derive(Debug)]
pub(super) struct Body<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        match axum::Json::<T>::from_request(request, state).await {
            Ok(axum::Json(value)) => Ok(Body(value)),
            Err(rejection) => Err(of_json(&rejection)),
        }
    }
}

/// A form with files.
#[derive(Debug)]
pub(super) struct Form(pub(super) Multipart);

impl<S: Send + Sync> FromRequest<S> for Form {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        match Multipart::from_request(request, state).await {
            Ok(form) => Ok(Form(form)),
            Err(rejection) => {
                let message =
                    format!("the body must be multipart/form-data with a boundary: {}", rejection.body_text());
                Err(ApiError::new(rejection.status(), "invalid_form", message))
            }
        }
    }
}

/// The query parameters, after `?`.
#[derive(Debug)]
pub(super) struct Parameters<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Parameters<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        match Query::<T>::from_request_parts(parts, state).await {
            Ok(Query(value)) => Ok(Parameters(value)),
            Err(rejection) => Err(ApiError::bad_request("invalid_query", rejection.body_text())),
        }
    }
}

/// Refuses a `limit` of a list that is not within 1 and `most`.
pub(super) fn check_limit(limit: Option<u32>, most: u32) -> Result<(), ApiError> {
    match limit.filter(|limit| !(1..=most).contains(limit)) {
        None => Ok(()),
        Some(limit) => {
            let message = format!("`limit` is {limit}: expected 1 to {most}");
            Err(ApiError::bad_request("invalid_query", message).param("limit"))
        }
    }
}

fn of_json(rejection: &JsonRejection) -> ApiError {
    let (status, code) = match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => (StatusCode::PAYLOAD_TOO_LARGE, "body_too_large"),
        StatusCode::UNSUPPORTED_MEDIA_TYPE => (StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type"),
        _ => (StatusCode::BAD_REQUEST, "invalid_json"),
    };
    ApiError::new(status, code, rejection.body_text())
}

/// Large bodies that are read at a time: each may take 64 MB.
static UPLOADS: Semaphore = Semaphore::const_new(4);
/// When one of them will have been read.
const UPLOAD_RETRY: Duration = Duration::from_secs(10);

/// Room for a large body, taken before any of it is read. Stands before the body in a handler's arguments.
#[derive(Debug)]
pub(super) struct Upload {
    _permit: SemaphorePermit<'static>,
}

impl<S: Send + Sync> FromRequestParts<S> for Upload {
    type Rejection = ApiError;

    async fn from_request_parts(_: &mut Parts, _: &S) -> Result<Self, ApiError> {
        Self::of(&UPLOADS)
    }
}

impl Upload {
    fn of(room: &'static Semaphore) -> Result<Self, ApiError> {
        let permit = room
            .try_acquire()
            .map_err(|_| ApiError::unavailable("other large requests are being read; try again", UPLOAD_RETRY))?;
        Ok(Self { _permit: permit })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_large_bodies_are_read_than_fit() {
        static ROOM: Semaphore = Semaphore::const_new(2);
        let held: Vec<_> = (0..2).map(|_| Upload::of(&ROOM).expect("room")).collect();
        assert!(Upload::of(&ROOM).is_err());
        drop(held);
        assert!(Upload::of(&ROOM).is_ok());
    }
}
