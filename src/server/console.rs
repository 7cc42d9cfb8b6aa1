//! `GET /`, the console, and `GET /antiphon.js`, the browser client: static files compiled into the program.
//!
//! The console's content policy forbids inline code and any other host, so that text of a caller or an agent which
//! slipped into the page as markup could neither run nor load anything.

use axum::Router;
use axum::extract::Path;
use axum::http::{HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use super::error::ApiError;

/// One file: its name below `/console/`, content type and text.
type File = (&'static str, &'static str, &'static str);

const PAGE: File = ("", "text/html; charset=utf-8", include_str!("console/index.html"));
const CLIENT: File = ("antiphon.js", JAVASCRIPT, include_str!("console/antiphon.js"));
const TYPES: File = ("antiphon.d.ts", "application/typescript; charset=utf-8", include_str!("console/antiphon.d.ts"));
/// What the page loads.
const FILES: [File; 12] = [
    ("console.js", JAVASCRIPT, include_str!("console/console.js")),
    ("base.js", JAVASCRIPT, include_str!("console/base.js")),
    ("batch.js", JAVASCRIPT, include_str!("console/batch.js")),
    ("calls.js", JAVASCRIPT, include_str!("console/calls.js")),
    ("operate.js", JAVASCRIPT, include_str!("console/operate.js")),
    ("records.js", JAVASCRIPT, include_str!("console/records.js")),
    ("scheduler.js", JAVASCRIPT, include_str!("console/scheduler.js")),
    ("talk.js", JAVASCRIPT, include_str!("console/talk.js")),
    ("turns.js", JAVASCRIPT, include_str!("console/turns.js")),
    ("voices.js", JAVASCRIPT, include_str!("console/voices.js")),
    ("console.css", "text/css; charset=utf-8", include_str!("console/console.css")),
    ("icon.svg", "image/svg+xml", include_str!("console/icon.svg")),
];
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

/// Scripts, styles and requests of this origin only; sound also from what the page made itself.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
    media-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
const NOSNIFF: (HeaderName, &str) = (header::X_CONTENT_TYPE_OPTIONS, "nosniff");
/// The files change with the program: a browser asks each time.
const FRESH: (HeaderName, &str) = (header::CACHE_CONTROL, "no-cache");

/// Paths that pages of any origin load as a module: they hold no secret and need no token.
pub(super) const PUBLIC: [&str; 2] = ["/antiphon.js", "/antiphon.d.ts"];

/// The routes of this module.
pub(super) fn router<S: Clone + Send + Sync + 'static>() -> Router<S> {
    Router::new()
        .route("/", get(|| async { own(PAGE) }))
        .route("/console/{file}", get(file))
        .route("/antiphon.js", get(|| async { public(CLIENT) }))
        .route("/antiphon.d.ts", get(|| async { public(TYPES) }))
}

async fn file(Path(name): Path<String>) -> Response {
    match FILES.into_iter().find(|(known, ..)| *known == name) {
        Some(file) => own(file),
        None => ApiError::new(StatusCode::NOT_FOUND, "unknown_route", format!("the console has no file `{name}`"))
            .into_response(),
    }
}

fn own((_, kind, text): File) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::REFERRER_POLICY, "no-referrer"),
        NOSNIFF,
        FRESH,
    ];
    (headers, text).into_response()
}

fn public((_, kind, text): File) -> Response {
    let headers = [(header::CONTENT_TYPE, kind), (header::ACCESS_CONTROL_ALLOW_ORIGIN, "*"), NOSNIFF, FRESH];
    (headers, text).into_response()
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::Request;
    use tower::ServiceExt;

    use super::*;

    async fn get_path(path: &str) -> Response {
        router::<()>().oneshot(Request::get(path).body(Body::empty()).expect("a request")).await.expect("infallible")
    }

    #[tokio::test]
    async fn every_file_that_the_page_names_is_there_and_typed() {
        let mut seen = 0;
        let scripts = FILES.iter().filter(|file| file.1 == JAVASCRIPT).map(|file| file.2);
        let imported: Vec<&str> = scripts
            .flat_map(str::lines)
            .filter(|line| line.starts_with("import "))
            .map(|line| line.split('"').nth(1).expect("a name in quotes"))
            .collect();
        assert!(imported.len() > 10, "{imported:?}");
        let names = PAGE.2.split('"').filter(|part| part.starts_with('/') && part.len() > 1).chain(imported);
        for name in names.filter(|name| *name != "/openapi.json") {
            let response = get_path(name).await;
            assert_eq!(response.status(), StatusCode::OK, "{name}");
            assert_eq!(response.headers()[header::X_CONTENT_TYPE_OPTIONS], "nosniff", "{name}");
            seen += 1;
        }
        assert!(seen >= 3, "the page names its icon, style and script: {seen}");
        assert_eq!(get_path("/console/secrets.toml").await.status(), StatusCode::NOT_FOUND);
    }

    #[tokio::test]
    async fn the_page_has_nothing_inline_that_its_policy_would_block() {
        assert_eq!(get_path("/").await.headers()[header::CONTENT_SECURITY_POLICY], POLICY);
        assert!(!PAGE.2.contains("<style") && !PAGE.2.contains(" style="), "inline style");
        assert!(!PAGE.2.contains(" onclick=") && !PAGE.2.contains("javascript:"), "inline handlers");
        let scripts = PAGE.2.matches("<script").count();
        assert_eq!(scripts, PAGE.2.matches("src=\"/console/console.js\"").count(), "inline script");
    }

    #[tokio::test]
    async fn pages_of_other_origins_may_load_the_client() {
        for path in PUBLIC {
            assert_eq!(get_path(path).await.headers()[header::ACCESS_CONTROL_ALLOW_ORIGIN], "*", "{path}");
        }
    }
}
