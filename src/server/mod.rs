//! HTTP and WebSocket: every route of the gateway, as listed in `openapi.json`.
//!
//! Handlers translate: they check a request, ask the [`Gateway`] or one of its parts, and answer in the one error
//! shape. No state lives here.

pub mod admin;
pub mod auth;
pub mod calls;
pub mod config;
mod console;
mod crowd;
mod debug;
mod devices;
pub mod error;
mod events;
mod extract;
mod forward;
mod gauges;
mod grants;
mod guard;
mod handed;
mod http2;
mod job_events;
pub mod jobs;
mod listen;
mod media;
mod policy;
mod recording;
mod records;
pub mod routes;
mod sockets;
pub mod speech;
mod speech_socket;
mod stall;
mod voices;
pub mod whip;
pub mod worker;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Request};
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Extension, Router};
pub use crowd::Bounds;
use error::ApiError;
pub use gauges::keep as keep_gauges;
pub use listen::{Manners, serve, serve_passed};
pub use policy::Policies;
use serde_json::{Value, json};
use tower_http::cors::{AllowOrigin, CorsLayer};

use crate::call::EndReason;
use crate::gateway::Gateway;
use crate::media::webrtc::WebRtcLeg;
use crate::synth::device::{DeviceStatus, Phase};
use crate::telemetry::context;
use crate::webrtc::SessionId;

/// What a page may say of the trace that its request is part of.
const TRACEPARENT: header::HeaderName = header::HeaderName::from_static(context::TRACEPARENT);
/// Largest body of routes that take JSON or SDP.
const MAX_BODY: usize = 1 << 20;

impl whip::AcceptCall for Gateway {
    async fn accept(&self, leg: WebRtcLeg, asked: whip::Asked, session: &SessionId) -> Result<String, ApiError> {
        let whip::Asked { agent, caller } = asked;
        calls::may_use(self, &caller, agent.as_deref())?;
        let grant = caller.page.map(|page| page.grant);
        let metadata = grant.as_ref().map(|grant| grant.metadata.clone()).unwrap_or_default();
        let call = Gateway::accept(self, leg, agent, caller.tenant, metadata, session)?;
        let id = call.id().to_string();
        if let Some(limit) = grant.and_then(|grant| grant.duration) {
            tokio::spawn(async move {
                if tokio::time::timeout(limit, call.ended()).await.is_err() {
                    call.hang_up(EndReason::TooLong);
                }
            });
        }
        Ok(id)
    }
}

/// The configuration of the gateway, which a higher layer reads.
pub trait Configuration: Send + Sync {
    /// Takes up a changed file and says what that did. Blocks.
    ///
    /// # Errors
    /// Why nothing has changed.
    fn reload(&self) -> Result<Value, String>;

    /// What is in force, without secrets.
    fn in_force(&self) -> Value;
}

/// All routes, for whom `policies` say.
pub fn router(gateway: Gateway, policies: Policies, configuration: Arc<dyn Configuration>) -> Router {
    let passing = middleware::from_fn_with_state(gateway.clone(), forward::route);
    // Outside the check of tokens: the gateway before this one checks for itself.
    let before = middleware::from_fn_with_state(gateway.clone(), handed::route);
    let router = Router::new()
        .merge(admin::router())
        .merge(console::router())
        .merge(calls::router())
        .merge(debug::router())
        .merge(devices::router())
        .merge(jobs::router())
        .merge(job_events::router())
        .merge(recording::router())
        .merge(records::router())
        .merge(voices::router())
        .merge(events::router())
        .route("/v1/calls/{id}/agent", get(sockets::attach))
        .route("/v1/calls/{id}/media", get(media::stream))
        .route("/v1/tokens", post(grants::issue))
        .route("/v1/audio/speech", post(speech::speech))
        .route("/v1/audio/speech/stream", get(speech_socket::stream))
        .with_state(gateway.clone())
        .merge(whip::router(whip::WhipState { gateway: gateway.webrtc.clone(), accept: gateway }))
        // Of a URL only the path is told: the query may hold a token, and errors are logged.
        .fallback(async |uri: Uri| {
            let message = format!("there is no route {}; see /openapi.json", uri.path());
            ApiError::new(StatusCode::NOT_FOUND, "unknown_route", message)
        })
        .method_not_allowed_fallback(async |method: Method, uri: Uri| auth::not_allowed(&method, uri.path()))
        .layer(middleware::from_fn(traced))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .layer(Extension(policies.grants.clone()))
        .layer(Extension(configuration))
        .layer(passing)
        .layer(middleware::from_fn_with_state(policies.clone(), auth::require))
        .layer(before);
    let origins = policies.clone();
    let origins =
        AllowOrigin::predicate(move |origin, _| origin.to_str().is_ok_and(|origin| origins.get().pages.allows(origin)));
    router
        .layer(middleware::from_fn(error::in_one_shape))
        .layer(cors(origins))
        .layer(middleware::from_fn(whip::advertise))
        .layer(middleware::from_fn_with_state(policies, guard::protect))
}

/// Has a request done as part of the trace that it names; calls and turns that it begins are part of it.
async fn traced(request: Request, next: Next) -> Response {
    let named = request.headers().get(context::TRACEPARENT).and_then(|value| value.to_str().ok());
    let named = named.and_then(context::TraceContext::parse);
    context::within(named, next.run(request)).await
}

/// `router` for pages of these origins, too; `*` allows all. Answers OPTIONS on every route.
pub fn across_origins(router: Router, origins: &[String]) -> Router {
    let origins = if origins.iter().any(|origin| origin == "*") {
        AllowOrigin::any()
    } else {
        // An origin that is no header value can match no request.
        AllowOrigin::list(origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok()))
    };
    router.layer(cors(origins)).layer(middleware::from_fn(whip::advertise))
}

fn cors(origins: AllowOrigin) -> CorsLayer {
    CorsLayer::new()
        .allow_origin(origins)
        .allow_methods([Method::GET, Method::POST, Method::PATCH, Method::DELETE, Method::OPTIONS])
        .allow_headers([header::AUTHORIZATION, header::CONTENT_TYPE, header::IF_MATCH, TRACEPARENT])
        .expose_headers([
            header::LOCATION,
            header::ETAG,
            header::LINK,
            header::RETRY_AFTER,
            whip::ACCEPT_PATCH,
            whip::CALL_ID,
        ])
        .max_age(Duration::from_secs(3_600))
}

/// One device for `/readyz`, the console and events.
fn device_json(status: &DeviceStatus) -> Value {
    let (phase, error) = match &status.phase {
        Phase::Loading => ("loading", None),
        Phase::Ready => ("ready", None),
        Phase::Failed(reason) => ("failed", Some(reason)),
        Phase::Stopped => ("stopped", None),
    };
    let caps = status.caps.as_ref();
    json!({
        "device": caps.map(|caps| caps.device.as_str()),
        "engine": caps.map(|caps| caps.name),
        "state": phase,
        "error": error,
        "live": status.load.live,
        "capacity": status.load.capacity,
        "sustainableStreams": status.load.sustainable,
        "memoryStreams": status.load.memory_streams,
        "holdingSeconds": status.load.holding,
        // The former names of these three, for one release.
        "places": status.load.capacity,
        "carries": status.load.sustainable,
        "heldSeconds": status.load.holding,
        "batch": status.load.batch,
        "queued": status.load.live + status.load.batch - status.load.live_open - status.load.batch_open,
        "load": status.load.load,
        "slackSeconds": status.load.slack,
        "memoryUsed": status.memory.used,
        "memoryTotal": status.memory.total,
        "memoryParts": status.parts.iter().copied().collect::<BTreeMap<_, _>>(),
        "failures": status.failures,
        "retryInSeconds": status.retry_in.map(|wait| wait.as_secs_f64()),
    })
}

/// Reads `bytes` as the body of every route that takes JSON, and as a frame of every socket; for fuzzing.
pub fn fuzz(bytes: &[u8]) {
    fn read<T: serde::de::DeserializeOwned>(bytes: &[u8]) {
        let _ = serde_json::from_slice::<T>(bytes);
    }
    read::<calls::Place>(bytes);
    read::<calls::Turn>(bytes);
    read::<calls::Prompt>(bytes);
    read::<calls::Transfer>(bytes);
    read::<calls::Digits>(bytes);
    read::<jobs::Submit>(bytes);
    read::<speech::Request>(bytes);
    read::<speech_socket::FromClient>(bytes);
    read::<grants::Issue>(bytes);
    read::<whip::JsonOffer>(bytes);
    read::<whip::JsonPatch>(bytes);
    media::fuzz(&String::from_utf8_lossy(bytes));
}
