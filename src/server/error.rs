//! Where errors become status codes: one JSON shape for every route.

use std::time::Duration;

use axum::Json;
use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::batch::BatchError;
use crate::call::SpeakError;
use crate::clock::{self, Sparse};
use crate::gateway::GatewayError;
use crate::gateway::speaker::SpeechError;
use crate::postgres;
use crate::sip::DialError;
use crate::synth::device::{Refused, RefusedReason};
use crate::voice::api::Refusal;

/// When a full queue of a call is worth trying again.
const QUEUE_RETRY: Duration = Duration::from_secs(1);
/// When a gateway that shuts down may have been replaced.
const DRAIN_RETRY: Duration = Duration::from_secs(10);
/// When a database that was away may be back.
pub(super) const DATABASE_RETRY: Duration = Duration::from_secs(5);
/// When a job may have made room for another.
const JOBS_RETRY: Duration = Duration::from_secs(60);

/// `{"error":{"message","type","param","code"}}` with its status, and `Retry-After` on 429 and 503.
#[derive(Debug, Clone)]
pub struct ApiError {
    status: StatusCode,
    message: String,
    param: Option<&'static str>,
    code: &'static str,
    retry_after: Option<Duration>,
}

impl ApiError {
    /// 400: the request is wrong; the message says what to change.
    pub fn bad_request(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, code, message)
    }

    /// 404: there is no such thing.
    pub fn not_found(what: &str, id: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", format!("no {what} `{id}`"))
    }

    /// 503 with `Retry-After`: full, draining or not ready.
    pub fn unavailable(message: impl Into<String>, retry_after: Duration) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message).retry_after(retry_after)
    }

    /// Any status.
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code, retry_after: None }
    }

    /// Names the field that is wrong.
    #[must_use]
    pub fn param(mut self, param: &'static str) -> Self {
        self.param = Some(param);
        self
    }

    /// Says when trying again is worth while.
    #[must_use]
    pub fn retry_after(mut self, after: Duration) -> Self {
        self.retry_after = Some(after);
        self
    }

    fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "server_error",
        }
    }
}

impl std::fmt::Display for ApiError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        static LINES: Sparse = Sparse::new();
        if self.status.is_client_error()
            && let Some(missed) = LINES.admit(clock::now())
        {
            tracing::info!(status = self.status.as_u16(), code = self.code, reason = %self, missed, "a request was refused");
        }
        let body = json!({"error": {
            "message": self.message, "type": self.kind(), "param": self.param, "code": self.code,
        }});
        let mut response = (self.status, Json(body)).into_response();
        if let Some(after) = self.retry_after {
            // Whole seconds, rounded up: coming back too early is refused again.
            let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds.max(1)));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// Longest text of a refusal that is told again.
const MAX_REFUSAL: usize = 1_024;

/// Middleware: a refusal that a library worded as plain text (a body that is too large, a handshake that is none, a
/// path that is no UTF-8) leaves in the one shape, too. What has a type of its own passes.
pub(super) async fn in_one_shape(request: Request, next: Next) -> Response {
    let response = next.run(request).await;
    let status = response.status();
    let kind = response.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let plain = kind.is_none_or(|kind| kind.starts_with("text/plain"));
    if !(status.is_client_error() || status.is_server_error()) || !plain {
        return response;
    }
    let (parts, body) = response.into_parts();
    let text = axum::body::to_bytes(body, MAX_REFUSAL).await.unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let message = match text.trim() {
        "" => status.canonical_reason().unwrap_or("the request was refused").to_lowercase(),
        text => text.to_owned(),
    };
    let code = match status {
        StatusCode::PAYLOAD_TOO_LARGE => "body_too_large",
        StatusCode::UNSUPPORTED_MEDIA_TYPE => "unsupported_media_type",
        StatusCode::UPGRADE_REQUIRED => "upgrade_required",
        status if status.is_server_error() => "internal",
        _ => "invalid_request",
    };
    let mut error = ApiError::new(status, code, message).into_response();
    // `Allow`, `Upgrade` and the like say how to ask instead.
    for (name, value) in &parts.headers {
        if *name != header::CONTENT_TYPE && *name != header::CONTENT_LENGTH {
            error.headers_mut().entry(name).or_insert_with(|| value.clone());
        }
    }
    error
}

impl From<GatewayError> for ApiError {
    fn from(error: GatewayError) -> Self {
        let (message, retry_after) = (error.to_string(), error.retry_after());
        match (error, retry_after) {
            (GatewayError::Refused(refused), _) => refused.into(),
            (GatewayError::TenantFull { retry_after, .. }, _) => {
                ApiError::new(StatusCode::TOO_MANY_REQUESTS, "tenant_full", message).retry_after(retry_after)
            }
            (GatewayError::Bridged, _) => ApiError::new(StatusCode::CONFLICT, "call_bridged", message),
            (GatewayError::Forbidden(_), None) => ApiError::new(StatusCode::FORBIDDEN, "not_allowed", message),
            (_, Some(after)) => ApiError::unavailable(message, after),
            (GatewayError::NoAgent(name), None) => ApiError::not_found("agent", &name).param("agent"),
            (GatewayError::Dial(DialError::Address(_)), None) => {
                ApiError::bad_request("invalid_address", message).param("to")
            }
            (GatewayError::Dial(DialError::Denied(_)), None) => {
                ApiError::new(StatusCode::FORBIDDEN, "call_denied", message).param("to")
            }
            (GatewayError::Dial(DialError::UnknownTrunk(_)), None) => {
                ApiError::bad_request("unknown_trunk", message).param("trunk")
            }
            (_, None) => ApiError::new(StatusCode::BAD_GATEWAY, "call_failed", message),
        }
    }
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> Self {
        let message = refused.to_string();
        match refused.reason {
            // The client is the cause: others are served.
            RefusedReason::RateLimited | RefusedReason::TenantFull => {
                ApiError::new(StatusCode::TOO_MANY_REQUESTS, refused.reason.label(), message)
                    .retry_after(refused.retry_after)
            }
            _ => ApiError::unavailable(message, refused.retry_after),
        }
    }
}

impl From<SpeakError> for ApiError {
    fn from(error: SpeakError) -> Self {
        let message = error.to_string();
        match error {
            SpeakError::Ended => ApiError::new(StatusCode::CONFLICT, "call_ended", message),
            SpeakError::Draining => ApiError::unavailable(message, DRAIN_RETRY),
            SpeakError::Busy => {
                ApiError::new(StatusCode::TOO_MANY_REQUESTS, "call_busy", message).retry_after(QUEUE_RETRY)
            }
            SpeakError::Refused { retry_after, .. } => ApiError::unavailable(message, retry_after),
            SpeakError::Bridged => ApiError::new(StatusCode::CONFLICT, "call_bridged", message),
            SpeakError::Empty => ApiError::bad_request("nothing_to_speak", message).param("text"),
            SpeakError::Invalid(_) => ApiError::bad_request("invalid_request", message),
        }
    }
}

impl From<SpeechError> for ApiError {
    fn from(error: SpeechError) -> Self {
        let message = error.to_string();
        match error {
            SpeechError::Refused(refused) => refused.into(),
            SpeechError::Failed(_) => ApiError::bad_request("speech_failed", message),
            SpeechError::Closed => ApiError::unavailable(message, DRAIN_RETRY),
        }
    }
}

impl From<BatchError> for ApiError {
    fn from(error: BatchError) -> Self {
        let message = error.to_string();
        match error {
            BatchError::Input(_) => ApiError::bad_request("invalid_job", message),
            BatchError::Full(_) | BatchError::Parked => ApiError::unavailable(message, JOBS_RETRY),
            BatchError::UsedUp { retry_after, .. } => {
                ApiError::new(StatusCode::TOO_MANY_REQUESTS, "tenant_full", message).retry_after(retry_after)
            }
            BatchError::NotFound(_) => ApiError::new(StatusCode::NOT_FOUND, "not_found", message),
            BatchError::Uncertain(_) | BatchError::Postgres(postgres::Error::Gone(_)) => {
                ApiError::unavailable(message, DATABASE_RETRY)
            }
            BatchError::Objects(_) => ApiError::unavailable(message, JOBS_RETRY),
            BatchError::Unfinished(_) => ApiError::new(StatusCode::CONFLICT, "unfinished", message),
            _ => {
                tracing::error!(%message, "batch work failed");
                // 507: the disk, nearly always.
                ApiError::new(StatusCode::INSUFFICIENT_STORAGE, "storage_failed", message)
            }
        }
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let status = StatusCode::from_u16(refusal.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut error = ApiError::new(status, refusal.code, refusal.message);
        if let Some(param) = refusal.param {
            error = error.param(param);
        }
        match refusal.retry_after {
            Some(after) => error.retry_after(after),
            None => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_body_has_the_four_fields_and_retry_after_rounds_up() {
        let response = ApiError::unavailable("full", Duration::from_millis(1200)).into_response();
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(response.headers()[header::RETRY_AFTER], "2");
        let body = axum::body::to_bytes(response.into_body(), 4096).await.expect("small body");
        let value: serde_json::Value = serde_json::from_slice(&body).expect("JSON");
        for field in ["message", "type", "param", "code"] {
            assert!(value["error"].get(field).is_some(), "{field} in {value}");
        }
    }

    #[tokio::test]
    async fn what_a_library_refuses_in_plain_text_leaves_in_the_same_form() {
        use axum::body::{Body, Bytes};
        use axum::extract::{DefaultBodyLimit, Multipart};
        use axum::routing::{get, post};
        use tower::ServiceExt;
        let router = axum::Router::new()
            .route("/bytes", post(async |_: Bytes| "taken").layer(DefaultBodyLimit::max(4)))
            .route("/form", post(async |_: Multipart| "taken"))
            .route("/own", get(async || (StatusCode::NOT_FOUND, axum::Json(json!({ "ready": false })))))
            .layer(axum::middleware::from_fn(in_one_shape));
        let ask = async |method: &str, path: &str, body: &'static str| {
            let request = Request::builder().method(method).uri(path).body(Body::from(body)).expect("a request");
            let response = router.clone().oneshot(request).await.expect("infallible");
            let status = response.status().as_u16();
            let body = axum::body::to_bytes(response.into_body(), 4096).await.expect("small body");
            (status, String::from_utf8_lossy(&body).into_owned())
        };
        for (method, path, body, status, code) in [
            ("POST", "/bytes", "too large", 413, "body_too_large"),
            ("POST", "/form", "no form", 400, "invalid_request"),
            ("DELETE", "/form", "", 405, "invalid_request"),
            ("GET", "/nowhere", "", 404, "invalid_request"),
        ] {
            let (found, text) = ask(method, path, body).await;
            assert_eq!(found, status, "{path}: {text}");
            let value: serde_json::Value = serde_json::from_str(&text).unwrap_or_else(|_| panic!("{path}: {text}"));
            assert_eq!(value["error"]["code"], code, "{text}");
            assert!(value["error"]["message"].as_str().is_some_and(|message| !message.is_empty()), "{text}");
        }
        assert_eq!(ask("GET", "/own", "").await.1, r#"{"ready":false}"#);
        assert_eq!(ask("POST", "/bytes", "fits").await, (200, "taken".into()));
    }
}
