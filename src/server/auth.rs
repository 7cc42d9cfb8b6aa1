//! Bearer tokens: who may use the API, and as whom.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::{ConnectInfo, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;

use super::config::{Scope, Token};
use super::console;
use super::error::ApiError;

/// The caller of a request, in its extensions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant(pub Arc<str>);

/// The tokens of `[http]`.
#[derive(Clone, Debug)]
pub struct Tokens(Arc<Vec<Token>>);

impl Tokens {
    /// Without tokens every request is allowed.
    pub fn new(tokens: Vec<Token>) -> Self {
        Self(Arc::new(tokens))
    }

    fn check(&self, presented: Option<&str>, scope: Scope) -> Result<Tenant, ApiError> {
        if self.0.is_empty() {
            return Ok(Tenant("".into()));
        }
        let Some(presented) = presented else {
            let message = "this route needs `Authorization: Bearer TOKEN`";
            return Err(ApiError::new(StatusCode::UNAUTHORIZED, "missing_token", message));
        };
        // Every token is compared in full, so the time taken tells nothing about how much of one was right.
        let mut found = None;
        for token in self.0.iter() {
            if same(token.token.reveal().as_bytes(), presented.as_bytes()) {
                found = Some(token);
            }
        }
        let Some(token) = found else {
            return Err(ApiError::new(StatusCode::UNAUTHORIZED, "invalid_token", "the bearer token is not known"));
        };
        if !token.scopes.is_empty() && !token.scopes.contains(&scope) {
            let message = format!("this token lacks the scope `{scope:?}`").to_lowercase();
            return Err(ApiError::new(StatusCode::FORBIDDEN, "missing_scope", message));
        }
        Ok(Tenant(token.name.as_str().into()))
    }
}

fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |acc, (x, y)| acc | (x ^ y)) == 0
}

/// Middleware: refuses requests without a fitting token, else tells the handler its [`Tenant`].
///
/// # Errors
/// 401 or 403.
pub async fn require(State(tokens): State<Tokens>, mut request: Request, next: Next) -> Result<Response, ApiError> {
    let path = request.uri().path();
    let loopback = request
        .extensions()
        .get::<ConnectInfo<SocketAddr>>()
        .is_some_and(|ConnectInfo(peer)| peer.ip().to_canonical().is_loopback());
    let console = path == "/" || path.starts_with(console::FOLDER);
    if matches!(path, "/healthz" | "/readyz") || console::PUBLIC.contains(&path) || (console && loopback) {
        return Ok(next.run(request).await);
    }
    let presented = bearer(&request).or_else(|| access_token(&request));
    let tenant = tokens.check(presented.as_deref(), scope_of(path))?;
    request.extensions_mut().insert(tenant);
    Ok(next.run(request).await)
}

fn bearer(request: &Request) -> Option<String> {
    let value = request.headers().get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim().to_owned())
}

/// Browsers cannot set headers on a WebSocket, so those may name the token in the query.
fn access_token(request: &Request) -> Option<String> {
    let upgrade = request.headers().get(header::UPGRADE)?.to_str().ok()?;
    if !upgrade.eq_ignore_ascii_case("websocket") {
        return None;
    }
    let uri = request.uri();
    let query: axum::extract::Query<Vec<(String, String)>> = axum::extract::Query::try_from_uri(uri).ok()?;
    query.0.into_iter().find(|(key, _)| key == "access_token").map(|(_, value)| value)
}

fn scope_of(path: &str) -> Scope {
    if path.starts_with("/v1/audio") || path.starts_with("/v1/jobs") {
        Scope::Speech
    } else if path == "/metrics" || path == "/v1/events" || path.starts_with("/v1/admin") {
        Scope::Admin
    } else {
        Scope::Calls
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secret::Secret;

    fn tokens() -> Tokens {
        let token = |name: &str, value: &str, scopes| Token { name: name.into(), token: Secret::new(value), scopes };
        Tokens::new(vec![token("all", "a-secret", vec![]), token("ops", "b-secret", vec![Scope::Admin])])
    }

    #[test]
    fn a_token_opens_what_its_scopes_say() {
        let tokens = tokens();
        assert_eq!(tokens.check(Some("a-secret"), Scope::Calls).expect("allowed"), Tenant("all".into()));
        assert!(tokens.check(Some("b-secret"), Scope::Admin).is_ok());
        assert!(tokens.check(Some("b-secret"), Scope::Calls).is_err());
        assert!(tokens.check(Some("a-secre"), Scope::Calls).is_err());
        assert!(tokens.check(None, Scope::Calls).is_err());
    }

    #[test]
    fn without_tokens_everything_is_open() {
        assert!(Tokens::new(Vec::new()).check(None, Scope::Admin).is_ok());
    }
}
