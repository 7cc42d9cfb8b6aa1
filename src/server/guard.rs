//! Which web pages may use the gateway, and the headers that keep its answers inside browsers.
//!
//! # Why
//! A gateway on loopback has no tokens, and every page that its user opens in a browser can reach it: by a form, by
//! a WebSocket (which no cross-origin rule holds back), and, with a host name that resolves to 127.0.0.1 after a
//! second look (DNS rebinding), as if it were a page of the gateway itself. So a request must name the gateway by
//! what a stranger's name server cannot answer for, and what changes something must not come from a foreign page.

use std::net::IpAddr;

use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::config::Http;
use super::console;
use super::error::ApiError;
use super::handed::Signed;
use super::policy::Policies;
use crate::cluster;

/// Tells a script's page from others where a browser sends no `Origin`.
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const CORP: HeaderName = HeaderName::from_static("cross-origin-resource-policy");
/// A year, as browsers' lists of HTTPS sites ask for.
const HSTS: HeaderValue = HeaderValue::from_static("max-age=31536000");
/// Answers that are no page may do nothing when a browser shows them.
const NO_PAGE: HeaderValue = HeaderValue::from_static("default-src 'none'; frame-ancestors 'none'");

/// The rules of `[http] hosts` and `cors`.
#[derive(Debug)]
pub(super) struct Pages {
    /// Names that `Host` may have beside addresses and `localhost`; `None`: any name.
    hosts: Option<Vec<String>>,
    /// Origins beside the gateway's own.
    origins: Vec<String>,
    /// Whether clients come over TLS that the gateway itself ends.
    tls: bool,
}

impl Pages {
    /// Names are checked wherever an answer would open something: a gateway without tokens, and any on loopback. One
    /// with tokens on a public address answers to every name unless `hosts` has some, for a page cannot guess a token.
    pub(super) fn new(config: &Http) -> Self {
        let open = config.tokens.is_empty() || config.bind.ip().to_canonical().is_loopback();
        let checked = open || !config.hosts.is_empty();
        // What the certificate is for is a name of the gateway.
        let names = config.hosts.iter().chain(config.acme.iter().flat_map(|acme| &acme.domains));
        Self {
            hosts: checked.then(|| names.map(|name| name.to_ascii_lowercase()).collect()),
            origins: config.cors.iter().map(|origin| origin.to_ascii_lowercase()).collect(),
            tls: config.is_secure(),
        }
    }

    /// Whether pages of `origin` may call from elsewhere.
    pub(super) fn allows(&self, origin: &str) -> bool {
        self.origins.iter().any(|allowed| allowed == "*" || allowed.eq_ignore_ascii_case(origin))
    }

    fn knows(&self, authority: &str) -> bool {
        let Some(hosts) = &self.hosts else { return true };
        let Some((name, _)) = split(authority) else { return false };
        name.parse::<IpAddr>().is_ok() || name == "localhost" || name.ends_with(".localhost") || hosts.contains(&name)
    }

    /// Why a request is not answered, if it is not.
    fn refusal(&self, request: &Request) -> Option<ApiError> {
        let headers = request.headers();
        // A probe names what it likes and learns nothing worth a name.
        let probe = matches!(request.uri().path(), "/healthz" | "/readyz");
        let mut named = Vec::new();
        named.extend(request.uri().authority().map(|authority| authority.as_str().to_owned()));
        for host in headers.get_all(header::HOST) {
            named.push(host.to_str().unwrap_or_default().to_owned());
        }
        if let Some(host) = named.iter().find(|host| !probe && !self.knows(host)) {
            let host: String = host.chars().take(100).collect();
            let message = format!(
                "this gateway does not go by the name `{host}`; use its address or localhost, or add the name to \
                 [http] hosts"
            );
            return Some(ApiError::new(StatusCode::MISDIRECTED_REQUEST, "unknown_host", message));
        }
        let upgrade = headers.contains_key(header::UPGRADE);
        if matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS) && !upgrade {
            // Another page may ask, and cannot read the answer.
            return None;
        }
        let foreign = |origin: &HeaderValue| {
            let origin = origin.to_str().unwrap_or_default();
            !self.allows(origin) && !named.iter().any(|host| same_origin(origin, host))
        };
        let mut origins = headers.get_all(header::ORIGIN).iter().peekable();
        let from_elsewhere = match origins.peek() {
            Some(_) => origins.any(foreign),
            None => headers.get(SEC_FETCH_SITE).is_some_and(|site| site == "cross-site" || site == "same-site"),
        };
        from_elsewhere.then(|| {
            let message = "pages of this origin may not use the gateway; add it to [http] cors";
            ApiError::new(StatusCode::FORBIDDEN, "foreign_origin", message)
        })
    }

    /// Adds what is not there.
    fn seal(&self, path: &str, response: &mut Response) {
        let headers = response.headers_mut();
        let mut set = |name: HeaderName, value: HeaderValue| {
            headers.entry(name).or_insert(value);
        };
        set(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        set(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
        set(header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
        set(header::CONTENT_SECURITY_POLICY, NO_PAGE);
        let whose = if console::PUBLIC.contains(&path) { "cross-origin" } else { "same-origin" };
        set(CORP, HeaderValue::from_static(whose));
        if path.starts_with("/v1/") {
            // Numbers and texts of callers stay in no cache.
            set(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        }
        if self.tls {
            set(header::STRICT_TRANSPORT_SECURITY, HSTS);
        }
    }
}

/// Name in small letters and port of an authority, if it can be read.
fn split(authority: &str) -> Option<(String, Option<u16>)> {
    let (name, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (name, rest) = rest.split_once(']')?;
            (name, rest.strip_prefix(':').or_else(|| rest.is_empty().then_some("")))
        }
        None => match authority.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (authority, Some("")),
        },
    };
    let port = match port? {
        "" => None,
        port => Some(port.parse().ok()?),
    };
    let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    (!name.is_empty()).then_some((name, port))
}

/// Whether `host`, a `Host` header, belongs to `origin`. The scheme may differ: a proxy may end TLS.
fn same_origin(origin: &str, host: &str) -> bool {
    let Some((scheme, authority)) = origin.split_once("://") else { return false };
    let usual = if scheme.eq_ignore_ascii_case("https") { 443 } else { 80 };
    let whole = |authority| split(authority).map(|(name, port)| (name, port.unwrap_or(usual)));
    matches!((whole(authority), whole(host)), (Some(a), Some(b)) if a == b)
}

/// Whether another gateway has passed the request on; what it says of it is among the extensions then.
///
/// # Errors
/// 401: it says so, and is not believed.
fn passed_on(policies: &Policies, request: &mut Request) -> Result<bool, ApiError> {
    let Some(said) = request.headers_mut().remove(cluster::HEADER) else { return Ok(false) };
    // A gateway alone has no other that could say so.
    let Some(nodes) = &policies.nodes else { return Ok(false) };
    let line = request.uri().path_and_query().map_or("/", |path| path.as_str());
    match nodes.verify(said.to_str().unwrap_or_default(), request.method().as_str(), line) {
        Ok(pass) => {
            request.extensions_mut().insert(pass);
            request.extensions_mut().insert(Signed(said));
            Ok(true)
        }
        Err(why) => {
            let message = format!("a gateway passed this on, and is not believed: {why}");
            Err(ApiError::new(StatusCode::UNAUTHORIZED, "not_passed_on", message))
        }
    }
}

/// Middleware around everything: refuses what pages of others send, and seals the answers.
pub(super) async fn protect(State(policies): State<Policies>, mut request: Request, next: Next) -> Response {
    let policy = policies.get();
    let path = request.uri().path().to_owned();
    let pass = passed_on(&policies, &mut request);
    let refusal = match pass {
        // The gateway that it came to has looked at its page and at the name it was called by.
        Ok(true) => None,
        Ok(false) => policy.pages.refusal(&request),
        Err(error) => Some(error),
    };
    let mut response = match refusal {
        Some(error) => error.into_response(),
        None => next.run(request).await,
    };
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        policy.pages.seal(&path, &mut response);
    }
    response
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;
    use crate::server::config::Token;

    fn pages(change: impl FnOnce(&mut Http)) -> Pages {
        let mut config = Http::default();
        change(&mut config);
        Pages::new(&config)
    }

    fn code(pages: &Pages, method: Method, headers: &[(&str, &str)]) -> u16 {
        let mut request = Request::builder().method(method).uri("/v1/admin/drain");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::empty()).expect("a request");
        pages.refusal(&request).map_or(200, |error| error.into_response().status().as_u16())
    }

    #[test]
    fn a_rebound_name_is_refused_on_loopback_with_or_without_tokens() {
        let token = || vec![Token::new("ops", "0123456789abcdef", Vec::new())];
        for pages in [pages(|_| {}), pages(|http| http.tokens = token())] {
            for good in ["127.0.0.1:8080", "localhost", "LOCALHOST:8080", "[::1]:8080", "192.0.2.7", "x.localhost:1"] {
                assert_eq!(code(&pages, Method::GET, &[("host", good)]), 200, "{good}");
            }
            for bad in ["evil.example", "evil.example:8080", "localhost.evil.example", "", "[::1", "127.0.0.1:x"] {
                assert_eq!(code(&pages, Method::GET, &[("host", bad)]), 421, "{bad}");
            }
            assert_eq!(code(&pages, Method::GET, &[("host", "localhost"), ("host", "evil.example")]), 421);
        }
        let named = pages(|http| http.hosts = vec!["Voice.Example".into()]);
        assert_eq!(code(&named, Method::GET, &[("host", "voice.example.:80")]), 200);
        let public = pages(|http| {
            http.bind = "192.0.2.7:80".parse().expect("an address");
            http.tokens = token();
        });
        assert_eq!(code(&public, Method::GET, &[("host", "voice.example")]), 200);
    }

    #[test]
    fn what_changes_something_comes_from_no_foreign_page() {
        let pages = pages(|http| http.cors = vec!["https://app.example".into()]);
        let post = |headers: &[(&str, &str)]| {
            let headers: Vec<_> = [("host", "127.0.0.1:8080")].iter().chain(headers).copied().collect();
            code(&pages, Method::POST, &headers)
        };
        for good in ["http://127.0.0.1:8080", "https://app.example", "HTTPS://APP.example"] {
            assert_eq!(post(&[("origin", good)]), 200, "{good}");
        }
        for bad in ["https://evil.example", "null", "http://127.0.0.1:8081", "http://localhost:8080", ""] {
            assert_eq!(post(&[("origin", bad)]), 403, "{bad}");
        }
        assert_eq!(post(&[]), 200, "a program sends none");
        assert_eq!(post(&[("sec-fetch-site", "cross-site")]), 403);
        assert_eq!(post(&[("origin", "https://app.example"), ("origin", "https://evil.example")]), 403);
        let socket = [("host", "127.0.0.1:8080"), ("upgrade", "websocket"), ("origin", "https://evil.example")];
        assert_eq!(code(&pages, Method::GET, &socket), 403);
        assert_eq!(code(&pages, Method::GET, &socket[..1]), 200);
        assert_eq!(code(&pages, Method::DELETE, &[("host", "[::1]"), ("origin", "http://[::1]:80")]), 200);
    }

    #[test]
    fn every_answer_is_sealed_and_keeps_what_it_says_itself() {
        let pages = pages(|_| {});
        let mut response = StatusCode::OK.into_response();
        response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static("mine"));
        pages.seal("/v1/calls", &mut response);
        let value = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
        assert_eq!(value("content-security-policy"), Some("mine"));
        assert_eq!(value("x-content-type-options"), Some("nosniff"));
        assert_eq!(value("x-frame-options"), Some("DENY"));
        assert_eq!(value("referrer-policy"), Some("no-referrer"));
        assert_eq!(value("cache-control"), Some("no-store"));
        assert_eq!(value("strict-transport-security"), None);
    }
}
