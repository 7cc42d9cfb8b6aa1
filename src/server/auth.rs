//! Bearer tokens: who may use the API, as whom, and whose objects they see.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::{ConnectInfo, FromRequestParts, MatchedPath, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;

use super::config::{Scope, Token, digest};
use super::error::ApiError;
use super::forward;
use super::grants::{self, Page};
use super::handed;
use super::policy::Policies;
use super::routes::{self, Access, Route};
use crate::clock;
use crate::cluster::{self, Pass};
use crate::gateway::dialers::Dialer;
use crate::secret::same;

/// Who makes a request, in its extensions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The name of the token: the owner of what is made with it, and whose limits that counts to. May be empty.
    pub tenant: Arc<str>,
    /// Whether everybody's objects are seen.
    all: bool,
    /// Where this is a page with a single-use token.
    pub(super) page: Option<Page>,
    /// Where the token has limits of its own for calls out.
    pub(super) dialer: Option<Arc<Dialer>>,
    /// Whether another gateway has passed the request on: this one answers for itself.
    pub(super) passed_on: bool,
}

impl Caller {
    /// Who calls a gateway without tokens: everything is theirs.
    pub fn anybody() -> Self {
        Self { tenant: "".into(), all: true, page: None, dialer: None, passed_on: false }
    }

    /// Whether everybody's objects are theirs.
    pub fn is_operator(&self) -> bool {
        self.all
    }

    /// Whether this one may see and steer what belongs to `owner`: their own, and everybody's where the token is one
    /// of the operator's (with the scope `admin`, or with all scopes).
    pub fn sees(&self, owner: &str) -> bool {
        self.all || *self.tenant == *owner
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        // Put there by `require`; a router without it answers no request.
        parts.extensions.get::<Self>().cloned().ok_or_else(|| {
            ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "the route has no check of tokens")
        })
    }
}

/// The tokens of `[http]`.
#[derive(Debug)]
pub(super) struct Tokens(Vec<Known>);

#[derive(Debug)]
struct Known {
    digest: [u8; 32],
    caller: Caller,
    scopes: Vec<Scope>,
}

impl Tokens {
    /// Without tokens every request is allowed.
    pub(super) fn new(tokens: &[Token]) -> Self {
        let known = tokens.iter().map(|token| Known {
            digest: token.digest,
            caller: Caller {
                tenant: token.name.as_str().into(),
                all: token.scopes.is_empty() || token.scopes.contains(&Scope::Admin),
                page: None,
                dialer: token.dialer().map(Arc::new),
                passed_on: false,
            },
            scopes: token.scopes.clone(),
        });
        Self(known.collect())
    }

    fn check(&self, presented: Option<&str>, access: Access) -> Result<Caller, ApiError> {
        if self.0.is_empty() {
            return Ok(Caller::anybody());
        }
        let Some(presented) = presented else {
            let message = "this route needs `Authorization: Bearer TOKEN`";
            return Err(ApiError::new(StatusCode::UNAUTHORIZED, "missing_token", message));
        };
        let presented = digest(presented);
        // Every token is compared in full, so the time taken tells nothing about how much of one was right.
        let mut found = None;
        for known in &self.0 {
            if same(&known.digest, &presented) {
                found = Some(known);
            }
        }
        let Some(known) = found else {
            return Err(ApiError::new(StatusCode::UNAUTHORIZED, "invalid_token", "the bearer token is not known"));
        };
        let scope = match access {
            Access::Of(scope) => Some(scope),
            Access::Metrics if known.scopes.contains(&Scope::Metrics) => None,
            Access::Metrics => Some(Scope::Admin),
            Access::Page => Some(Scope::Calls),
            Access::Public | Access::Loopback | Access::Any => None,
        };
        match scope {
            Some(scope) if !known.scopes.is_empty() && !known.scopes.contains(&scope) => {
                let message = format!("this token lacks the scope `{scope:?}`").to_lowercase();
                Err(ApiError::new(StatusCode::FORBIDDEN, "missing_scope", message))
            }
            _ => Ok(known.caller.clone()),
        }
    }
}

impl Tokens {
    /// Who makes a request that another gateway has judged. The limits of a token are counted here, too.
    fn passed_on(&self, said: cluster::Caller) -> Result<Caller, ApiError> {
        let dialer = match said.dialer {
            None => None,
            Some(key) => {
                let mut known = self.0.iter().filter_map(|known| known.caller.dialer.clone());
                let found = known.find(|dialer| dialer.key == key);
                Some(found.ok_or_else(|| {
                    let message =
                        "the gateway that this came to knows a token that its owner does not: give all the same";
                    ApiError::new(StatusCode::UNAUTHORIZED, "invalid_token", message)
                })?)
            }
        };
        Ok(Caller { tenant: said.tenant.into(), all: said.all, page: None, dialer, passed_on: true })
    }
}

/// Middleware: refuses requests without a fitting token, else tells the handler its [`Caller`].
///
/// # Errors
/// 401, 403, or 405 where the route is not in the table of routes.
pub(super) async fn require(
    State(policies): State<Policies>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let matched = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let route = matched.as_deref().and_then(|path| routes::find(request.method(), path));
    let loopback = request
        .extensions()
        .get::<ConnectInfo<SocketAddr>>()
        .is_some_and(|ConnectInfo(peer)| peer.ip().to_canonical().is_loopback());
    let access = route.map_or(Access::Any, |route| route.access);
    if access == Access::Public || (access == Access::Loopback && loopback) {
        return Ok(next.run(request).await);
    }
    let presented = bearer(&request).or_else(|| access_token(&request, route));
    let pass = request.extensions().get::<Pass>().cloned();
    let mut caller = match (pass, presented.as_deref()) {
        // The gateway that passed the request on has asked for the token, and for its scopes.
        (Some(Pass { caller: Some(said), .. }), _) => policies.get().tokens.passed_on(said)?,
        (Some(pass), Some(token)) if token.starts_with(grants::PREFIX) => {
            Caller { passed_on: true, ..page(&policies, token, access, pass.origin.as_deref())? }
        }
        (None, Some(token)) if token.starts_with(grants::PREFIX) => {
            let origin = request.headers().get(header::ORIGIN).and_then(|origin| origin.to_str().ok());
            let origin = origin.map(str::to_owned);
            // Such a token is known to the gateway that issued it.
            if let Some(peer) = grants::issuer(&policies, token).filter(|_| access == Access::Page) {
                let nodes = policies.nodes.as_ref();
                return forward::with_its_token(nodes, &peer, origin, request).await;
            }
            page(&policies, token, access, origin.as_deref())?
        }
        (pass, presented) => Caller { passed_on: pass.is_some(), ..policies.get().tokens.check(presented, access)? },
    };
    if matched.is_some() && route.is_none() {
        return Err(not_allowed(request.method(), request.uri().path()));
    }
    caller.passed_on |= request.extensions().get::<handed::Passed>().is_some();
    request.extensions_mut().insert(caller);
    Ok(next.run(request).await)
}

/// The bearer of a single-use token.
fn page(policies: &Policies, token: &str, access: Access, origin: Option<&str>) -> Result<Caller, ApiError> {
    let found = policies.grants.find(clock::now(), token, origin).filter(|_| access == Access::Page);
    let Some(page) = found else {
        let message = "this single-use token is not known, has expired, or is not for this page or route";
        return Err(ApiError::new(StatusCode::UNAUTHORIZED, "invalid_token", message));
    };
    Ok(Caller { tenant: page.grant.tenant.clone(), all: false, page: Some(page), dialer: None, passed_on: false })
}

/// 405. Names the path only: a query may hold a token.
pub(super) fn not_allowed(method: &Method, path: &str) -> ApiError {
    let message = format!("{path} does not take {method}; see /openapi.json");
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

fn bearer(request: &Request) -> Option<String> {
    let value = request.headers().get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim().to_owned())
}

/// Browsers cannot set headers on a WebSocket, so those may name the token in the query.
fn access_token(request: &Request, route: Option<&Route>) -> Option<String> {
    if !route?.socket || !is_handshake(request.headers()) {
        return None;
    }
    let query: axum::extract::Query<Vec<(String, String)>> = axum::extract::Query::try_from_uri(request.uri()).ok()?;
    query.0.into_iter().find(|(key, _)| key == "access_token").map(|(_, value)| value)
}

/// Whether these are the headers of a WebSocket handshake (RFC 6455 section 4.1).
fn is_handshake(headers: &HeaderMap) -> bool {
    let has = |name, wanted: &str| {
        let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
        values.flat_map(|value| value.split(',')).any(|value| value.trim().eq_ignore_ascii_case(wanted))
    };
    has(header::UPGRADE, "websocket")
        && has(header::CONNECTION, "upgrade")
        && has(header::SEC_WEBSOCKET_VERSION, "13")
        && headers.contains_key(header::SEC_WEBSOCKET_KEY)
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    const ALL: &str = "all-of-sixteen-characters";
    const OPS: &str = "ops-of-sixteen-characters";
    const CRM: &str = "crm-of-sixteen-characters";

    fn tokens() -> Tokens {
        Tokens::new(&[
            Token::new("all", ALL, vec![]),
            Token::new("ops", OPS, vec![Scope::Admin]),
            Token::new("crm", CRM, vec![Scope::Calls]),
        ])
    }

    #[test]
    fn a_token_opens_what_its_scopes_say() {
        let tokens = tokens();
        let calls = Access::Of(Scope::Calls);
        assert_eq!(&*tokens.check(Some(ALL), calls).expect("allowed").tenant, "all");
        assert!(tokens.check(Some(OPS), Access::Of(Scope::Admin)).is_ok());
        let scraper = Tokens::new(&[
            Token::new("scraper", CRM, vec![Scope::Metrics]),
            Token::new("ops", OPS, vec![Scope::Admin]),
        ]);
        for (token, access, may) in [
            (CRM, Access::Metrics, true),
            (OPS, Access::Metrics, true),
            (CRM, Access::Of(Scope::Admin), false),
            (CRM, Access::Of(Scope::Calls), false),
        ] {
            assert_eq!(scraper.check(Some(token), access).is_ok(), may, "{access:?}");
        }
        assert!(tokens.check(Some(CRM), Access::Metrics).is_err() && tokens.check(Some(ALL), Access::Metrics).is_ok());
        assert!(tokens.check(Some(OPS), calls).is_err());
        assert!(tokens.check(Some(OPS), Access::Any).is_ok());
        for wrong in ["", &ALL[1..], "all-of-sixteen-characterz"] {
            assert!(tokens.check(Some(wrong), Access::Any).is_err(), "{wrong}");
        }
        assert!(tokens.check(None, Access::Any).is_err());
    }

    #[test]
    fn a_scoped_token_sees_its_own_and_an_operator_everything() {
        let tokens = tokens();
        let crm = tokens.check(Some(CRM), Access::Any).expect("known");
        assert!(crm.sees("crm") && !crm.sees("") && !crm.sees("ops"));
        for operator in [ALL, OPS] {
            assert!(tokens.check(Some(operator), Access::Any).expect("known").sees("crm"));
        }
    }

    #[test]
    fn who_is_passed_on_has_the_limits_of_their_token_here_too() {
        let limited = Token { outbound: Some(Default::default()), ..Token::new("crm", CRM, vec![Scope::Calls]) };
        let tokens = Tokens::new(&[limited]);
        let key = tokens.0[0].digest;
        let said = |dialer| cluster::Caller { tenant: "crm".into(), all: false, dialer };
        let crm = tokens.passed_on(said(Some(key))).expect("known");
        assert!(crm.passed_on && crm.sees("crm") && !crm.sees("ops") && crm.dialer.is_some_and(|d| d.key == key));
        assert!(tokens.passed_on(said(Some([7; 32]))).is_err(), "whose limits nobody here knows");
        assert!(tokens.passed_on(said(None)).expect("no limits").dialer.is_none());
    }

    #[test]
    fn without_tokens_everything_is_open() {
        assert_eq!(Tokens::new(&[]).check(None, Access::Of(Scope::Admin)).expect("open"), Caller::anybody());
    }

    #[test]
    fn a_token_in_the_query_counts_on_a_whole_handshake_of_a_websocket_only() {
        let handshake = [
            ("connection", "keep-alive, Upgrade"),
            ("upgrade", "websocket"),
            ("sec-websocket-version", "13"),
            ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
        ];
        let ask = |path: &str, headers: &[(&str, &str)]| {
            let mut request = Request::builder().uri(format!("{path}?access_token=t"));
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            access_token(&request.body(Body::empty()).expect("a request"), routes::find(&Method::GET, path))
        };
        assert_eq!(ask("/v1/audio/speech/stream", &handshake).as_deref(), Some("t"));
        assert_eq!(ask("/v1/audio/speech/stream", &handshake[1..]), None);
        assert_eq!(ask("/v1/audio/speech/stream", &handshake[..3]), None);
        assert_eq!(ask("/v1/jobs", &handshake), None);
    }
}
