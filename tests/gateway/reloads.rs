//! What a reload changes beside a call that goes on: accounts, trunks, limits, relays, and what is kept for how long.

use std::path::Path;

use antiphon_loadgen::call::Call;
use antiphon_loadgen::sip;
use serde_json::{Value, json};

use super::drains::{told, withdraws};
use super::program::{Serve, until};
use super::raw::{Raw, header, sdp};
use super::support::PATIENCE;

/// A served gateway with a file of its own.
pub(super) struct Served {
    pub(super) program: Serve,
    pub(super) file: std::path::PathBuf,
    pub(super) client: reqwest::Client,
}

impl Served {
    pub(super) async fn start(folder: &Path, text: &str) -> Served {
        let file = folder.join("gateway.toml");
        std::fs::write(&file, text).expect("written");
        let program = Serve::start(folder, folder, |command| {
            command.arg("-c").arg(&file).env("ANTIPHON_ENGINE__KIND", "tone");
        });
        program.ready().await;
        Served { program, file, client: reqwest::Client::new() }
    }

    pub(super) fn write(&self, text: &str) {
        std::fs::write(&self.file, text).expect("written");
    }

    /// Has what was written taken up; the status and what is said.
    pub(super) async fn take_up(&self) -> (u16, Value) {
        let asked = self.client.post(format!("{}/v1/admin/reload", self.program.http)).send().await.expect("HTTP");
        (asked.status().as_u16(), asked.json().await.expect("JSON"))
    }

    /// Has `text` taken up; gives what was applied.
    async fn reload(&self, text: &str) -> Value {
        self.write(text);
        let (status, report) = self.take_up().await;
        assert_eq!((status, &report["needsRestart"]), (200, &json!([])), "{report}");
        report["applied"].clone()
    }

    async fn call(&self) -> Result<Call, antiphon_loadgen::call::CallError> {
        let caller = sip::Caller::bind(sip::Config::default()).await.expect("free ports");
        caller.call(&format!("sip:silent@{}", self.program.sip)).await
    }

    /// `POST /v1/calls`; its status and error.
    async fn dial(&self, to: &str) -> (u16, Value) {
        let asked = self.client.post(format!("{}/v1/calls", self.program.http)).json(&json!({ "to": to }));
        let answer = asked.send().await.expect("HTTP");
        (answer.status().as_u16(), answer.json().await.unwrap_or_default())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn accounts_trunks_and_limits_change_beside_a_live_call() {
    let folder = tempfile::tempdir().expect("a folder");
    let served = Served::start(folder.path(), "").await;
    let live = served.call().await.expect("answered");

    // Accounts: from the next request on.
    let users = "[sip]\nusers = [{ username = \"alice\", password = \"correct-horse\" }]\n";
    assert_eq!(served.reload(users).await, json!(["sip.users"]));
    let mut stranger = Raw::new(served.program.sip, "stranger").await;
    let asked = stranger.ask("INVITE", "", &sdp(4_000, ""), "SIP/2.0 4").await;
    assert!(asked.starts_with("SIP/2.0 401"), "{asked}");
    stranger.ack("").await;

    // A limit below what is up ends nothing.
    let full = "[call]\nmax_calls = 1\n[records]\nkeep_days = 3\n[recording]\nkeep_days = 2\n[batch]\nkeep_days = 1\n\
                [[webrtc.ice_servers]]\nurls = [\"stun:stun.example.com\"]\n";
    let applied = served.reload(full).await;
    let keys = [
        "batch.keep_days",
        "call.max_calls",
        "recording.keep_days",
        "records.keep_days",
        "sip.users",
        "webrtc.ice_servers",
    ];
    assert_eq!(applied, json!(keys));
    assert!(served.call().await.is_err(), "the one place is taken");
    let get = async |route: &str| -> Value {
        let response = served.client.get(format!("{}{route}", served.program.http)).send().await.expect("HTTP");
        response.json().await.expect("JSON")
    };
    assert_eq!(get("/readyz").await["maxCalls"], 1, "as a load generator asks");
    let told_servers = get("/v1/webrtc").await;
    assert!(told_servers.to_string().contains("stun:stun.example.com"), "{told_servers}");

    // A trunk that is new, changes and goes.
    let mut carrier = Raw::new("127.0.0.1:9".parse().expect("an address"), "carrier").await;
    let password = folder.path().join("password");
    std::fs::write(&password, "the-first-one").expect("written");
    let host = carrier.uri().replace("sip:raw@", "");
    let trunk = |prefixes: &str| {
        format!(
            "[[sip.trunk]]\nname = \"carrier\"\nhost = \"{host}\"\nregister = true\nusername = \"us\"\n\
             password = {{ file = \"{}\" }}\nprefixes = [{prefixes}]\n",
            password.display()
        )
    };
    let keys = [
        "batch.keep_days",
        "call.max_calls",
        "recording.keep_days",
        "records.keep_days",
        "sip.trunk",
        "webrtc.ice_servers",
    ];
    assert_eq!(served.reload(&trunk("\"+49\"")).await, json!(keys));
    told(&mut carrier, true).await;
    let ready = format!("{}/readyz", served.program.http);
    until(&ready, |said| said["trunks"][0]["name"] == "carrier" && said["trunks"][0]["registered"] == true).await;
    let dialled = served.dial("+4930123456");
    let picked = async {
        let invite = carrier.next("INVITE").await;
        carrier.answer(&invite, "486 Busy Here", "").await;
    };
    let ((status, answer), ()) = tokio::join!(dialled, picked);
    assert_eq!(status, 201, "{answer}");

    assert_eq!(served.reload(&trunk("\"+43\"")).await, json!(["sip.trunk"]));
    let (status, answer) = served.dial("+4930123456").await;
    assert!(status == 403 && answer.to_string().contains("prefixes"), "{status} {answer}");

    // Another password in the same file: registered anew, with it.
    std::fs::write(&password, "the-second-one").expect("written");
    assert_eq!(served.reload(&trunk("\"+43\"")).await, json!(["sip.trunk"]));
    let challenged = loop {
        let request = carrier.expect("REGISTER").await;
        if withdraws(&request) {
            carrier.answer(&request, "200 OK", "Expires: 0\r\n").await;
        } else {
            break request;
        }
    };
    let challenge = "WWW-Authenticate: Digest realm=\"r\", nonce=\"n\", algorithm=MD5\r\n";
    carrier.answer(&challenged, "401 Unauthorized", challenge).await;
    let proven = loop {
        let request = carrier.expect("REGISTER").await;
        if header(&request, "Authorization").is_some() {
            break request;
        }
    };
    let response = header(&proven, "Authorization").expect("credentials").split("response=\"").nth(1).expect("one");
    let uri = header(&proven, "Authorization").expect("credentials").split("uri=\"").nth(1).expect("one");
    let (response, uri) = (response.split('"').next(), uri.split('"').next().expect("one"));
    let md5 = |text: String| {
        use md5::Digest;
        md5::Md5::digest(text).iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    let secret = md5("us:r:the-second-one".into());
    assert_eq!(response, Some(md5(format!("{secret}:n:{}", md5(format!("REGISTER:{uri}")))).as_str()), "{proven}");
    carrier.answer(&proven, "200 OK", "Expires: 600\r\n").await;

    // Gone: said to the registrar, and nobody calls through it.
    assert_eq!(served.reload("").await, json!(["sip.trunk"]));
    told(&mut carrier, false).await;
    until(&ready, |said| said["trunks"] == json!([])).await;
    assert_eq!(served.dial("+43123").await.0, 403);

    // A mistake in a trunk changes nothing, and is told with its line.
    let address = "host = \"127.0.0.1\"\n";
    for (mistake, line) in [
        (format!("{address}srtp = \"perhaps\"\n"), 6),
        ("host = \"not a host\"\n".to_owned(), 5),
        (format!("{address}targets = [{{ host = \"carrier.example/\" }}]\n"), 6),
    ] {
        served.write(&format!("[call]\nmax_calls = 9\n[[sip.trunk]]\nname = \"x\"\n{mistake}"));
        let (status, refused) = served.take_up().await;
        let told = refused["error"]["message"].as_str().unwrap_or_default();
        assert!(status == 422 && told.contains(&format!(".toml:{line}:")), "{mistake}: {status} {refused}");
    }

    assert_eq!(live.ended(std::time::Duration::ZERO).await, None, "the call has gone on all the time");
    served.call().await.expect("room again").hang_up().await;
    live.hang_up().await;
    let mut program = served.program;
    assert_eq!(tokio::time::timeout(PATIENCE, program.terminate()).await.expect("it ends"), Some(0));
}
