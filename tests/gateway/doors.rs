//! Every route with every wrong key: no token, a wrong one, an empty one, one of another scope, one of another owner;
//! asked for by a foreign name, and by a foreign page. The table of routes is the server's own.

use std::collections::BTreeSet;
use std::time::Duration;

use antiphon::call::EndReason;
use antiphon::clock::now;
use antiphon::config::Tenant;
use antiphon::gateway::tenants::Limits;
use antiphon::server::config::{Scope, Token};
use antiphon::server::routes::{Access, ROUTES, Route};
use antiphon::voice::file::Voice;
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::rtc;
use futures_util::{SinkExt, StreamExt};
use reqwest::{Method, Response, StatusCode};
use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::Message;

use super::support::{PATIENCE, Rig, SENTENCE};

const OPERATOR: &str = "operator-operator-operator";
const OWNER: &str = "owner-owner-owner-owner";
const OTHER: &str = "other-other-other-other";
const SPEAKER: &str = "speaker-speaker-speaker";
const CALLER: &str = "caller-caller-caller-caller";
const WRONG: &str = "wrong-wrong-wrong-wrong";

/// A gateway with a token of each kind.
async fn guarded() -> Rig {
    Rig::with(|config| {
        let all = || vec![Scope::Calls, Scope::Speech];
        config.http.tokens = vec![
            Token::new("", OPERATOR, Vec::new()),
            Token::new("owner", OWNER, all()),
            Token::new("other", OTHER, all()),
            Token::new("speaker", SPEAKER, vec![Scope::Speech]),
            Token::new("caller", CALLER, vec![Scope::Calls]),
        ];
        let mut agent = antiphon::agent::config::Agent::at("builtin:silent");
        agent.tenant = Some("owner".into());
        config.agent.insert("owned".into(), agent);
    })
    .await
}

/// What stands for the parameters of a path: objects of `owner`.
struct Objects {
    call: String,
    job: String,
    session: String,
}

impl Objects {
    fn fill(&self, path: &str) -> String {
        let id = match path {
            path if path.starts_with("/v1/jobs") => &self.job,
            // Devices are the operator's.
            path if path.starts_with("/v1/devices") => "0",
            _ => &self.call,
        };
        path.replace("{id}", id)
            .replace("{session}", &self.session)
            .replace("{name}", "x")
            .replace("{file}", "console.js")
    }
}

/// A request that carries what it must to be taken for what it is.
async fn ask(rig: &Rig, route: &Route, path: &str, token: Option<&str>, headers: &[(&str, &str)]) -> Response {
    let method = Method::from_bytes(route.method.as_bytes()).expect("a method");
    let mut request = rig.client.request(method, format!("{}{path}", rig.http));
    if let Some(token) = token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    if route.socket {
        request = request
            .header("connection", "upgrade")
            .header("upgrade", "websocket")
            .header("sec-websocket-version", "13")
            .header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==");
    }
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.send().await.expect("HTTP")
}

/// Tokens whose scopes do not open a route.
fn lacking(access: Access) -> &'static [&'static str] {
    match access {
        Access::Of(Scope::Admin | Scope::Metrics) | Access::Metrics => &[SPEAKER, CALLER, OWNER],
        Access::Of(Scope::Calls) | Access::Page => &[SPEAKER],
        Access::Of(Scope::Speech) => &[CALLER],
        Access::Public | Access::Loopback | Access::Any => &[],
    }
}

/// Whether a route answers by every name: who asks it learns nothing.
fn is_probe(route: &Route) -> bool {
    matches!(route.path, "/healthz" | "/readyz")
}

fn is_open(status: StatusCode) -> bool {
    status.is_success() || status == StatusCode::SWITCHING_PROTOCOLS
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_route_opens_to_a_wrong_key_a_foreign_name_or_a_foreign_page() {
    let rig = guarded().await;
    let call = rig.telephone("owned", Codec::Pcmu).await;
    let browser = rtc::Config { token: Some(OWNER.into()), ..rtc::Config::new(rig.http.clone()) };
    let browser = rtc::Caller::connect(browser).await.expect("the browser call is answered");
    let job = rig.client.post(format!("{}/v1/audio/speech/batch", rig.http)).bearer_auth(OWNER);
    let job: Value = job.json(&json!({ "input": SENTENCE })).send().await.expect("HTTP").json().await.expect("JSON");
    let from = rig.handle(&browser).await.meta().from.clone();
    let objects = Objects {
        call: call.id().expect("named").to_owned(),
        job: job["id"].as_str().expect("accepted").to_owned(),
        session: from.strip_prefix("webrtc:").expect("a browser's").to_owned(),
    };

    let foreign =
        [[("host", "evil.example"), ("accept", "*/*")], [("origin", "https://evil.example"), ("accept", "*/*")]];
    let mut asked = 0;
    for route in ROUTES {
        let path = objects.fill(route.path);
        let name = format!("{} {}", route.method, route.path);
        if !matches!(route.access, Access::Public | Access::Loopback) {
            // Without a key, with a wrong one and with an empty one; also in the query, which counts on sockets only.
            for token in [None, Some(WRONG), Some("")] {
                let status = ask(&rig, route, &path, token, &[]).await.status();
                assert_eq!(status, StatusCode::UNAUTHORIZED, "{name} with {token:?}");
                asked += 1;
            }
            if route.socket {
                for token in ["", WRONG] {
                    let status = ask(&rig, route, &format!("{path}?access_token={token}"), None, &[]).await.status();
                    assert_eq!(status, StatusCode::UNAUTHORIZED, "{name} with `{token}` in the query");
                }
            } else {
                let query = format!("{path}?access_token={OPERATOR}");
                let upgrade = [("upgrade", "websocket"), ("connection", "upgrade")];
                let status = ask(&rig, route, &query, None, &upgrade).await.status();
                assert_eq!(status, StatusCode::UNAUTHORIZED, "{name} with a token in the query");
            }
        }
        for token in lacking(route.access) {
            let status = ask(&rig, route, &path, Some(token), &[]).await.status();
            assert_eq!(status, StatusCode::FORBIDDEN, "{name} with another scope");
            asked += 1;
        }
        // To another owner there is no such thing.
        if path.contains(&objects.call) || path.contains(&objects.job) || path.contains(&objects.session) {
            let kind =
                if route.access == Access::Page { "application/trickle-ice-sdpfrag" } else { "application/json" };
            let body = [("content-type", kind), ("if-match", "*")];
            let response = ask(&rig, route, &path, Some(OTHER), &body).await;
            let status = response.status();
            assert!(!is_open(status), "{name} of another owner: {status}");
            // A body that is missing may be found first.
            assert!([400, 404].contains(&status.as_u16()), "{name} of another owner: {status}");
            asked += 1;
        }
        // A wrong key is none the better for a foreign name or page.
        let wrong = [None, Some(WRONG), Some("")].into_iter().chain(lacking(route.access).iter().copied().map(Some));
        for (token, headers) in wrong.flat_map(|token| foreign.iter().map(move |headers| (token, headers))) {
            let status = ask(&rig, route, &path, token, headers).await.status();
            let public = matches!(route.access, Access::Public | Access::Loopback);
            assert!(public || !is_open(status), "{name} with {token:?} and {headers:?}: {status}");
            assert!(headers[0].0 != "host" || !is_open(status) || is_probe(route), "{name} with {headers:?}: {status}");
            asked += 1;
        }
        for headers in &foreign {
            let status = ask(&rig, route, &path, Some(OPERATOR), headers).await.status();
            let (wanted, refused) = match headers[0].0 {
                "host" => (StatusCode::MISDIRECTED_REQUEST, !is_probe(route)),
                // Another page may ask what changes nothing; it cannot read the answer.
                _ => (StatusCode::FORBIDDEN, route.method != "GET" || route.socket),
            };
            if refused {
                assert_eq!(status, wanted, "{name} with {headers:?}");
            }
            asked += 1;
        }
    }
    assert!(asked > 500, "{asked}");

    // Nothing of this was done.
    assert!(!rig.handle(&call).await.has_ended() && !rig.handle(&browser).await.has_ended());
    assert!(!rig.app.gateway().calls.is_draining());
    let listed = async |token: &str, path: &str| -> Value {
        rig.client
            .get(format!("{}{path}", rig.http))
            .bearer_auth(token)
            .send()
            .await
            .expect("HTTP")
            .json()
            .await
            .expect("JSON")
    };
    for (path, key, count) in [("/v1/calls", "calls", 2), ("/v1/jobs", "jobs", 1)] {
        assert_eq!(listed(OTHER, path).await[key].as_array().map(Vec::len), Some(0), "{path}");
        for token in [OWNER, OPERATOR] {
            assert_eq!(listed(token, path).await[key].as_array().map(Vec::len), Some(count), "{path} {token}");
        }
    }
    // And the right key opens.
    for path in ["/v1/calls/{id}", "/v1/jobs/{id}"] {
        let route = ROUTES.iter().find(|route| route.path == path && route.method == "GET").expect("there");
        let response = ask(&rig, route, &objects.fill(path), Some(OWNER), &[("origin", "https://evil.example")]).await;
        assert_eq!(response.status(), StatusCode::OK, "{path}");
        assert_eq!(response.headers()["x-content-type-options"], "nosniff");
        assert!(!response.headers().contains_key("access-control-allow-origin"));
    }
    let socket = ROUTES.iter().find(|route| route.path == "/v1/calls/{id}/media").expect("there");
    let path = format!("{}?access_token={OWNER}", objects.fill(socket.path));
    assert_eq!(ask(&rig, socket, &path, None, &[]).await.status(), StatusCode::SWITCHING_PROTOCOLS);
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_of_one_tenant_is_none_to_another() {
    let rig = guarded().await;
    for (token, status) in [(OTHER, 404), (OWNER, 201), (OPERATOR, 201)] {
        let config = rtc::Config {
            agent: Some("owned".into()),
            token: Some(token.into()),
            ..rtc::Config::new(rig.http.clone())
        };
        let outcome = rtc::Caller::connect(config).await;
        assert_eq!(outcome.is_ok(), status == 201, "{token}: {:?}", outcome.err());
    }
    rig.app.drain().await;
}

/// Nobody sees, removes or speaks with what another tenant enrolled: by requests, in jobs, and by frames of an agent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_voice_of_one_tenant_is_none_to_another() {
    let folder = tempfile::tempdir().expect("a folder");
    let enrolled = |name: &str, owner: Option<&str>| {
        let notes = owner.map(|owner| ("owner".to_owned(), owner.to_owned())).into_iter().collect();
        let (tokens, mel) = (vec![1, 2, 3], vec![0.5; 12]);
        let voice = Voice { transcript: "hello".into(), tokens, mel, mel_bins: 2, speaker: vec![0.5, -0.25], notes };
        std::fs::write(folder.path().join(format!("{name}.safetensors")), voice.to_bytes()).expect("written");
    };
    enrolled("anna", Some("owner"));
    enrolled("house", None);
    let rig = Rig::with(|config| {
        let all = || vec![Scope::Calls, Scope::Speech];
        config.http.tokens = vec![Token::new("owner", OWNER, all()), Token::new("other", OTHER, all())];
        config.engine.voices = folder.path().to_owned();
    })
    .await;
    let ask = async |method: Method, path: &str, token: &str, body: Value| {
        let request = rig.client.request(method, format!("{}{path}", rig.http)).bearer_auth(token).json(&body);
        let response = request.send().await.expect("HTTP");
        (response.status().as_u16(), response.json::<Value>().await.unwrap_or_default())
    };
    let voices = "/v1/audio/voices";
    for (token, sees) in [(OWNER, true), (OTHER, false)] {
        let (_, listed) = ask(Method::GET, voices, token, Value::Null).await;
        let names: Vec<&str> =
            listed["voices"].as_array().into_iter().flatten().filter_map(|voice| voice["name"].as_str()).collect();
        assert_eq!((names.contains(&"anna"), names.contains(&"house")), (sees, true), "{listed}");
    }
    for (method, path, status) in [
        (Method::GET, "/v1/audio/voices/anna", 404),
        (Method::DELETE, "/v1/audio/voices/anna", 404),
        (Method::DELETE, "/v1/audio/voices?name=anna", 404),
        (Method::DELETE, "/v1/audio/voices/house", 403),
    ] {
        assert_eq!(ask(method.clone(), path, OTHER, Value::Null).await.0, status, "{method} {path}");
    }
    let text = json!({ "input": SENTENCE, "voice": "anna" });
    for path in ["/v1/audio/speech", "/v1/audio/speech/batch"] {
        let (status, error) = ask(Method::POST, path, OTHER, text.clone()).await;
        assert_eq!((status, &error["error"]["param"]), (404, &json!("voice")), "{path}: {error}");
    }

    // On a call of its own, by request and by the agent that it attaches.
    let config = |token: &str| rtc::Config {
        agent: Some("silent".into()),
        token: Some(token.into()),
        ..rtc::Config::new(rig.http.clone())
    };
    for (token, refused) in [(OTHER, true), (OWNER, false)] {
        let call = rtc::Caller::connect(config(token)).await.expect("the browser call is answered");
        let id = call.id().expect("named").to_owned();
        let turn = json!({ "text": SENTENCE, "voice": "anna" });
        let (status, error) = ask(Method::POST, &format!("/v1/calls/{id}/turns"), token, turn).await;
        assert!(!refused || (status == 404 && error["error"]["param"] == "voice"), "{status}: {error}");
        let url = format!("{}/v1/calls/{id}/agent?access_token={token}", rig.http.replace("http", "ws"));
        let (mut socket, _) = tokio_tungstenite::connect_async(url).await.expect("upgraded");
        for (voice, wrong) in [("anna", refused), ("house", false)] {
            let text = json!({ "type": "text", "token": "One.", "last": true, "voice": voice });
            socket.send(Message::text(text.to_string())).await.expect("sent");
            let mark = json!({ "type": "transfer", "to": "x", "mode": "answers at once" });
            socket.send(Message::text(mark.to_string())).await.expect("sent");
            let mut told = false;
            // What is wrong with the second frame is told behind what is wrong with the first.
            let answered = async {
                loop {
                    let frame = socket.next().await.expect("open").expect("sound");
                    let Ok(frame) = serde_json::from_str::<Value>(frame.to_text().unwrap_or_default()) else {
                        continue;
                    };
                    let why = frame["description"].as_str().unwrap_or_default();
                    told |= why.contains("there is no voice `anna` on this call");
                    if why.contains("transfer mode") {
                        return;
                    }
                }
            };
            tokio::time::timeout(PATIENCE, answered).await.expect("it is answered");
            assert_eq!(told, wrong, "{voice} with {token}");
        }
    }
    assert_eq!(ask(Method::DELETE, "/v1/audio/voices/anna", OWNER, Value::Null).await.0, 204);
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_table_of_routes_is_the_description_and_the_router() {
    let rig = Rig::start().await;
    let (_, api) = rig.get("/openapi.json").await;
    // Files of the console, and the second name of a route, need no description.
    let plain = |path: &str| !path.starts_with("/console/") && path != "/antiphon.d.ts" && path != "/whip/{session}";
    let named = |path: &str| path.replace("{session}", "{id}");
    let told: BTreeSet<(String, String)> = ROUTES
        .iter()
        .filter(|route| plain(route.path))
        .map(|route| (route.method.to_lowercase(), named(route.path)))
        .collect();
    let described: BTreeSet<(String, String)> = api["paths"]
        .as_object()
        .expect("paths")
        .iter()
        .flat_map(|(path, operations)| {
            operations.as_object().expect("operations").keys().map(|method| (method.clone(), path.clone()))
        })
        .collect();
    assert_eq!(told, described);
    for route in ROUTES.iter().filter(|route| route.path != "/v1/admin/drain") {
        let path = route.path.replace("{file}", "console.js").replace(['{', '}'], "");
        let response = ask(&rig, route, &path, None, &[]).await;
        let status = response.status();
        if status == StatusCode::NOT_FOUND {
            let error: Value = response.json().await.expect("JSON");
            assert_ne!(error["error"]["code"], "unknown_route", "{} {}", route.method, route.path);
        }
        assert_ne!(status, StatusCode::METHOD_NOT_ALLOWED, "{} {}", route.method, route.path);
    }
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_cannot_drain_and_an_operator_can_take_a_drain_back() {
    let rig = Rig::start().await;
    let drain = format!("{}/v1/admin/drain", rig.http);
    // What a form of any page can send.
    let form = rig.client.post(&drain).header("origin", "https://evil.example");
    let form = form.header("content-type", "application/x-www-form-urlencoded").body("").send().await.expect("HTTP");
    assert_eq!(form.status(), StatusCode::FORBIDDEN);
    assert_eq!(rig.get("/readyz").await.0, 200);

    let (status, drained) = rig.post("/v1/admin/drain", json!({ "drain": true })).await;
    assert_eq!((status, &drained["draining"]), (200, &json!(true)), "{drained}");
    assert_eq!(rig.get("/readyz").await.0, 503);
    let (status, _) = rig.post("/v1/admin/drain", json!({ "drain": false })).await;
    assert_eq!((status, rig.get("/readyz").await.0), (200, 200));
    assert_eq!(rig.client.post(&drain).send().await.expect("HTTP").status(), StatusCode::OK);
    assert_eq!(rig.client.delete(&drain).send().await.expect("HTTP").status(), StatusCode::OK);
    assert_eq!(rig.get("/readyz").await.0, 200);
    assert_eq!(rig.post("/v1/admin/drain", json!({ "drane": true })).await.0, 400);
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_is_held_to_its_limits_and_sees_its_own_usage() {
    let rig = Rig::with(|config| {
        let all = || vec![Scope::Calls, Scope::Speech];
        config.http.tokens = vec![
            Token::new("", OPERATOR, Vec::new()),
            Token::new("owner", OWNER, all()),
            Token::new("other", OTHER, all()),
        ];
        let limits = Limits { calls: 1, batch_chars_per_day: SENTENCE.len() as u64, ..Limits::default() };
        let voices = vec!["en-gb".to_owned()];
        config.tenant.insert("owner".into(), Tenant { limits, voices, ..Tenant::default() });
    })
    .await;
    let silent = |token: &str| rtc::Config {
        agent: Some("silent".into()),
        token: Some(token.into()),
        ..rtc::Config::new(rig.http.clone())
    };
    let call = rtc::Caller::connect(silent(OWNER)).await.expect("the first call");
    let error = rtc::Caller::connect(silent(OWNER)).await.err().expect("the second is refused");
    assert!(error.to_string().contains("429"), "{error}");
    rtc::Caller::connect(silent(OTHER)).await.expect("the limit is not of others");
    let handle = rig.handle(&call).await;
    handle.hang_up(EndReason::HungUp);
    handle.ended().await;

    let ask = async |token: &str, path: &str, body: Value| -> (u16, Value) {
        let request = rig.client.post(format!("{}{path}", rig.http)).bearer_auth(token).json(&body);
        let response = request.send().await.expect("HTTP");
        (response.status().as_u16(), response.json().await.unwrap_or_default())
    };
    let batch = "/v1/audio/speech/batch";
    assert_eq!(ask(OWNER, batch, json!({ "input": SENTENCE })).await.0, 202);
    let (status, error) = ask(OWNER, batch, json!({ "input": SENTENCE })).await;
    assert_eq!((status, &error["error"]["code"]), (429, &json!("tenant_full")), "{error}");
    assert_eq!(ask(OTHER, batch, json!({ "input": SENTENCE })).await.0, 202);
    let (status, error) = ask(OWNER, "/v1/audio/speech", json!({ "input": SENTENCE, "voice": "de" })).await;
    assert_eq!((status, &error["error"]["code"]), (403, &json!("not_allowed")), "{error}");

    // The writer is behind by a moment.
    let usage = async |token: &str, query: &str| -> Vec<Value> {
        let request = rig.client.get(format!("{}/v1/usage{query}", rig.http)).bearer_auth(token);
        let body: Value = request.send().await.expect("HTTP").json().await.expect("JSON");
        body["usage"].as_array().cloned().unwrap_or_default()
    };
    let asked = now();
    let row = loop {
        match usage(OWNER, "").await.into_iter().find(|row| row["inboundCalls"] == 1) {
            Some(row) => break row,
            None => assert!(asked.elapsed() < PATIENCE, "{:?}", usage(OPERATOR, "").await),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert_eq!(row["tenant"], "owner");
    assert!(usage(OTHER, "?tenant=owner").await.iter().all(|row| row["tenant"] == "other"));
    assert!(usage(OPERATOR, "?tenant=owner").await.iter().any(|row| row["tenant"] == "owner"));
    let (status, _) = rig.get("/v1/usage?from=yesterday").await;
    assert_eq!(status, 401, "without a token");
    let request = rig.client.get(format!("{}/v1/usage?from=yesterday", rig.http)).bearer_auth(OPERATOR);
    let response = request.send().await.expect("HTTP");
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    assert_eq!(response.json::<Value>().await.expect("JSON")["error"]["code"], "invalid_query");
    rig.app.drain().await;
}
