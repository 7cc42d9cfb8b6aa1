//! Single-use tokens of pages, and HTTPS.

use std::path::Path;

use antiphon::agent::config::Agent;
use antiphon::server::config::{Scope, Tls, Token};
use antiphon_loadgen::agent::Server;
use antiphon_loadgen::call::CallError;
use antiphon_loadgen::rtc;
use serde_json::{Value, json};

use super::support::{PATIENCE, Rig};

const KEY: &str = "key-key-key-key-key-key";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_begins_one_call_with_its_token_and_its_agent_learns_why() {
    let mut server = Server::bind("127.0.0.1:0".parse().expect("an address")).await.expect("a free port");
    let agent = Agent::at(&server.url());
    let rig = Rig::with(|config| {
        config.http.tokens = vec![Token::new("shop", KEY, vec![Scope::Calls])];
        config.agent.insert("remote".into(), agent);
    })
    .await;
    let issue = async |token: &str, body: Value| -> (u16, Value) {
        let request = rig.client.post(format!("{}/v1/tokens", rig.http)).bearer_auth(token).json(&body);
        let response = request.send().await.expect("HTTP");
        (response.status().as_u16(), response.json().await.expect("JSON"))
    };
    for (body, field) in [
        (json!({ "expiresIn": 0 }), "expiresIn"),
        (json!({ "origin": "app.example" }), "origin"),
        (json!({ "metadata": { "k": "v".repeat(2_000) } }), "metadata"),
        (json!({ "limits": { "durationSeconds": 0 } }), "limits"),
        (json!({ "agent": "nobody" }), "agent"),
    ] {
        let (status, error) = issue(KEY, body).await;
        assert!(status == 400 || status == 404, "{error}");
        assert_eq!(error["error"]["param"], field, "{error}");
    }
    let body = json!({
        "agent": "remote", "expiresIn": 60, "metadata": { "customer": "4711" }, "limits": { "durationSeconds": 600 },
    });
    let (status, answer) = issue(KEY, body).await;
    assert_eq!((status, &answer["expiresIn"]), (201, &json!(60)), "{answer}");
    let token = answer["token"].as_str().expect("a token").to_owned();

    // It is no key to anything else.
    for path in ["/v1/calls", "/v1/jobs", "/metrics", "/v1/events"] {
        let response = rig.client.get(format!("{}{path}", rig.http)).bearer_auth(&token).send().await.expect("HTTP");
        assert_eq!(response.status(), 401, "{path}");
    }
    assert_eq!(issue(&token, json!({})).await.0, 401);

    // The page may ask for another agent; the token says which.
    let connect = |token: &str| {
        let config = rtc::Config {
            token: Some(token.into()),
            agent: Some("silent".into()),
            ..rtc::Config::new(rig.http.clone())
        };
        rtc::Caller::connect(config)
    };
    let call = connect(&token).await.expect("answered");
    let session = server.next_session(PATIENCE).await.expect("the gateway dials the agent of the token");
    assert_eq!(session.setup()["customParameters"], json!({ "customer": "4711" }));
    let handle = rig.handle(&call).await;
    assert_eq!((&*handle.meta().tenant, handle.meta().agent.as_str()), ("shop", "remote"));
    match connect(&token).await {
        Err(CallError::Refused { code, .. }) => assert_eq!(code, 401),
        other => panic!("a second call: {:?}", other.err()),
    }
    // It steers its own session, and no other.
    let other = connect(KEY).await.expect("answered");
    let other = rig.handle(&other).await;
    let end = async |id: &str| {
        let path = format!("{}/v1/webrtc/{}", rig.http, id.trim_start_matches("webrtc:"));
        rig.client.delete(path).bearer_auth(&token).send().await.expect("HTTP").status()
    };
    assert_eq!(end(&other.meta().from).await, 404);
    assert!(!other.has_ended());
    assert_eq!(end(&handle.meta().from).await, 200);
    tokio::time::timeout(PATIENCE, handle.ended()).await.expect("it ends");

    // Bound to an origin: a program, which sends none, cannot use it.
    let (_, bound) = issue(KEY, json!({ "origin": "https://app.example" })).await;
    match connect(bound["token"].as_str().expect("a token")).await {
        Err(CallError::Refused { code, .. }) => assert_eq!(code, 401),
        other => panic!("without its origin: {:?}", other.err()),
    }
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn https_is_spoken_with_hsts_and_nothing_else_is() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/sip");
    let rig = Rig::with(|config| {
        config.http.tls = Some(Tls { cert: folder.join("test-only-cert.pem"), key: folder.join("test-only-key.pem") });
    })
    .await;
    // The certificate is nobody's; what is tested is that it is used.
    let client = reqwest::Client::builder().danger_accept_invalid_certs(true).build().expect("a client");
    let url = format!("https://{}", rig.app.http());
    let response = client.get(format!("{url}/v1/calls")).send().await.expect("HTTPS");
    assert_eq!(response.status(), 200);
    assert!(response.headers()["strict-transport-security"].to_str().expect("text").starts_with("max-age="));
    assert!(rig.client.get(format!("{url}/healthz")).send().await.is_err(), "an unknown authority");
    assert!(rig.client.get(format!("{}/healthz", rig.http)).send().await.is_err(), "HTTP on the port of HTTPS");
    rig.app.drain().await;
}
