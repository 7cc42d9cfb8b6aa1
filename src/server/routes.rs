//! Every route with who may use it.
//!
//! # Why
//! The rule lies beside the name of the route and nowhere else, and [`super::auth`] lets nothing pass that has no
//! rule: a route that is added without one answers 405 to everybody, which its first test notices. Tests run through
//! this table, so that it is also what they cover.

use axum::http::Method;

use super::config::Scope;

/// Who may use a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Everybody.
    Public,
    /// Everybody on loopback, elsewhere the bearer of any token.
    Loopback,
    /// The bearer of any token.
    Any,
    /// The bearer of a token with this scope.
    Of(Scope),
    /// The bearer of a token with the scope `admin` or `metrics`.
    Metrics,
    /// As [`Access::Of`] calls, and a page with a single-use token, for its own call.
    Page,
}

/// One method of one path.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// In capitals.
    pub method: &'static str,
    /// As the router has it, with parameters in braces.
    pub path: &'static str,
    /// Who.
    pub access: Access,
    /// Whether it becomes a WebSocket. Only then may the token stand in the query, for browsers can put it nowhere
    /// else there; in other URLs it would end in logs and histories.
    pub socket: bool,
}

const fn http(method: &'static str, path: &'static str, access: Access) -> Route {
    Route { method, path, access, socket: false }
}

const fn socket(path: &'static str, access: Access) -> Route {
    Route { method: "GET", path, access, socket: true }
}

const CALLS: Access = Access::Of(Scope::Calls);
const SPEECH: Access = Access::Of(Scope::Speech);
const ADMIN: Access = Access::Of(Scope::Admin);

/// All of them.
pub const ROUTES: &[Route] = &[
    http("GET", "/", Access::Loopback),
    http("GET", "/console/{file}", Access::Loopback),
    http("GET", "/antiphon.js", Access::Public),
    http("GET", "/antiphon.d.ts", Access::Public),
    http("GET", "/healthz", Access::Public),
    http("GET", "/readyz", Access::Public),
    http("GET", "/openapi.json", Access::Any),
    http("GET", "/metrics", Access::Metrics),
    http("GET", "/v1/events", ADMIN),
    http("POST", "/v1/admin/drain", ADMIN),
    http("DELETE", "/v1/admin/drain", ADMIN),
    http("POST", "/v1/admin/reload", ADMIN),
    http("GET", "/v1/admin/config", ADMIN),
    http("GET", "/v1/devices/{id}/steps", ADMIN),
    http("GET", "/debug/tasks", ADMIN),
    http("GET", "/debug/turns", ADMIN),
    http("POST", "/debug/profile", ADMIN),
    http("POST", "/v1/tokens", CALLS),
    http("GET", "/v1/calls", CALLS),
    http("POST", "/v1/calls", CALLS),
    http("GET", "/v1/calls/{id}", CALLS),
    http("DELETE", "/v1/calls/{id}", CALLS),
    http("POST", "/v1/calls/{id}/turns", CALLS),
    http("POST", "/v1/calls/{id}/prompt", CALLS),
    http("POST", "/v1/calls/{id}/interrupt", CALLS),
    http("POST", "/v1/calls/{id}/hold", CALLS),
    http("POST", "/v1/calls/{id}/resume", CALLS),
    http("POST", "/v1/calls/{id}/transfer", CALLS),
    http("POST", "/v1/calls/{id}/bridge", CALLS),
    http("DELETE", "/v1/calls/{id}/bridge", CALLS),
    http("POST", "/v1/calls/{id}/dtmf", CALLS),
    http("GET", "/v1/calls/{id}/recording", CALLS),
    http("POST", "/v1/calls/{id}/recording", CALLS),
    http("GET", "/v1/records", CALLS),
    http("GET", "/v1/records/{id}", CALLS),
    http("GET", "/v1/usage", Access::Any),
    socket("/v1/calls/{id}/agent", CALLS),
    socket("/v1/calls/{id}/media", CALLS),
    http("GET", "/v1/webrtc", Access::Page),
    http("POST", "/v1/webrtc", Access::Page),
    http("POST", "/v1/webrtc/{session}", Access::Page),
    http("PATCH", "/v1/webrtc/{session}", Access::Page),
    http("DELETE", "/v1/webrtc/{session}", Access::Page),
    http("POST", "/whip", Access::Page),
    http("PATCH", "/whip/{session}", Access::Page),
    http("DELETE", "/whip/{session}", Access::Page),
    http("POST", "/api/offer", CALLS),
    http("PATCH", "/api/offer", CALLS),
    http("POST", "/v1/audio/speech", SPEECH),
    socket("/v1/audio/speech/stream", SPEECH),
    http("POST", "/v1/audio/speech/batch", SPEECH),
    http("GET", "/v1/jobs", SPEECH),
    http("GET", "/v1/jobs/{id}", SPEECH),
    http("DELETE", "/v1/jobs/{id}", SPEECH),
    http("GET", "/v1/jobs/{id}/audio", SPEECH),
    http("GET", "/v1/jobs/{id}/events", SPEECH),
    http("GET", "/v1/audio/voices", SPEECH),
    http("POST", "/v1/audio/voices", SPEECH),
    http("DELETE", "/v1/audio/voices", SPEECH),
    http("GET", "/v1/audio/voices/{name}", SPEECH),
    http("DELETE", "/v1/audio/voices/{name}", SPEECH),
];

/// The rule of a request whose path matched `path`.
pub(super) fn find(method: &Method, path: &str) -> Option<&'static Route> {
    // The router answers HEAD where it answers GET.
    let method = if *method == Method::HEAD { "GET" } else { method.as_str() };
    ROUTES.iter().find(|route| route.method == method && route.path == path)
}
