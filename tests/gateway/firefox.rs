//! The console in Firefox, driven over WebDriver BiDi, which Firefox speaks by itself: a call is placed, heard and ended, and
//! every panel does what it is for. There is no sound card where tests run, and without one Firefox holds Web Audio up: what is heard is judged
//! by the energy of what it decoded, not by the console's meters.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream};

use super::browser::{self, Browser, axe};
use super::hears::{TEXT, service};
use super::support::{PATIENCE, Rig};

/// A browser starts slowly on a loaded machine.
const START: Duration = Duration::from_secs(60);
/// A microphone of which nobody is asked, sound without a click, a dark desk, the gateway on this computer called without asking
/// anybody (Local Network Access holds ICE up until somebody allows it), and nothing fetched from its maker.
const PREFERENCES: &[(&str, &str)] = &[
    ("media.navigator.streams.fake", "true"),
    ("media.navigator.permission.disabled", "true"),
    ("media.autoplay.default", "0"),
    ("media.autoplay.blocking_policy", "0"),
    ("media.autoplay.block-webaudio", "false"),
    ("layout.css.prefers-color-scheme.content-override", "0"),
    ("network.lna.enabled", "false"),
    ("network.lna.blocking", "false"),
    ("remote.prefs.recommended", "true"),
    ("browser.shell.checkDefaultBrowser", "false"),
    ("datareporting.policy.dataSubmissionEnabled", "false"),
    ("app.update.enabled", "false"),
    ("network.captive-portal-service.enabled", "false"),
    ("media.gmp-manager.updateEnabled", "false"),
    ("security.sandbox.warn_unprivileged_namespaces", "false"),
];

/// One page, and the browser around it, which is killed when this is dropped.
struct Firefox {
    socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    context: Value,
    last: u64,
    /// Exceptions that no script caught, and what scripts call errors.
    errors: Vec<Value>,
    _browser: Child,
    _profile: tempfile::TempDir,
}

impl Firefox {
    async fn open(url: &str) -> Firefox {
        let profile = tempfile::tempdir().expect("a folder");
        let preferences = PREFERENCES.iter().map(|(name, value)| format!("user_pref(\"{name}\", {value});\n"));
        std::fs::write(profile.path().join("user.js"), preferences.collect::<String>()).expect("written");
        let browser = Command::new("firefox-esr")
            .args(["--headless", "--no-remote", "--remote-debugging-port", "0", "--profile"])
            .arg(profile.path())
            .arg("about:blank")
            // Also where somebody else's is the home folder.
            .env("HOME", profile.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .expect("Firefox starts");
        let file = profile.path().join("WebDriverBiDiServer.json");
        let port = async {
            loop {
                // It may be half written.
                let told =
                    std::fs::read_to_string(&file).ok().and_then(|text| serde_json::from_str::<Value>(&text).ok());
                if let Some(port) = told.and_then(|told| told["ws_port"].as_u64()) {
                    return port;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let port = timeout(START, port).await.expect("Firefox listens");
        let url_of_session = format!("ws://127.0.0.1:{port}/session");
        let (socket, _) = tokio_tungstenite::connect_async(url_of_session).await.expect("Firefox answers");
        let mut page =
            Firefox { socket, context: Value::Null, last: 0, errors: Vec::new(), _browser: browser, _profile: profile };
        page.ask("session.new", json!({ "capabilities": {} })).await;
        page.ask("session.subscribe", json!({ "events": ["log.entryAdded"] })).await;
        let tree = page.ask("browsingContext.getTree", json!({})).await;
        page.context = tree["contexts"][0]["context"].clone();
        let there = json!({ "context": page.context, "url": url, "wait": "complete" });
        page.ask("browsingContext.navigate", there).await;
        page
    }

    /// Puts a person at the microphone of the page, who says what this file holds again and again: Firefox has no other
    /// microphone than one that hums. The file is played into a stream, as a page would play it to a listener.
    async fn listens_to(&mut self, file: &Path) {
        const PLAY: &str = "async file => {
            const sound = Uint8Array.from(atob(file), one => one.charCodeAt(0));
            const player = new Audio(URL.createObjectURL(new Blob([sound], { type: 'audio/wav' })));
            player.loop = true;
            await player.play();
            const said = player.mozCaptureStream();
            window.person = { player, said };
            // Who has finished with a track stops it: a copy each.
            navigator.mediaDevices.getUserMedia = async () =>
                new MediaStream(said.getAudioTracks().map(track => track.clone()));
            return said.getAudioTracks().length;
        }";
        let file = STANDARD.encode(std::fs::read(file).expect("readable"));
        let parameters = json!({
            "functionDeclaration": PLAY,
            "arguments": [{ "type": "string", "value": file }],
            "target": { "context": self.context },
            "awaitPromise": true,
            "userActivation": true,
        });
        let result = self.ask("script.callFunction", parameters).await;
        assert_eq!(plain(&result["result"]), json!(1), "a track: {result}");
    }

    async fn ask(&mut self, method: &str, parameters: Value) -> Value {
        self.last += 1;
        let id = self.last;
        let command = json!({ "id": id, "method": method, "params": parameters });
        self.socket.send(Message::text(command.to_string())).await.expect("Firefox listens");
        let answer = async {
            loop {
                let message = self.socket.next().await.expect("Firefox lives").expect("sound");
                let message = serde_json::from_str::<Value>(message.to_text().unwrap_or_default());
                let Ok(message) = message else { continue };
                if message["id"] == json!(id) {
                    return message;
                }
                if message["method"] == "log.entryAdded" && message["params"]["level"] == "error" {
                    self.errors.push(message["params"]["text"].clone());
                }
            }
        };
        let answer = timeout(START, answer).await.unwrap_or_else(|_| panic!("{method}: no answer"));
        assert_eq!(answer["type"], "success", "{method}: {answer}");
        answer["result"].clone()
    }
}

/// What BiDi tells of a value, as JSON.
fn plain(told: &Value) -> Value {
    let value = &told["value"];
    match told["type"].as_str() {
        Some("array") => value.as_array().map(|all| all.iter().map(plain).collect()).unwrap_or_default(),
        Some("object") => {
            let pair = |pair: &Value| Some((pair[0].as_str()?.to_owned(), plain(&pair[1])));
            value.as_array().into_iter().flatten().filter_map(pair).collect::<serde_json::Map<_, _>>().into()
        }
        _ => value.clone(),
    }
}

impl Browser for Firefox {
    async fn value(&mut self, expression: &str) -> Value {
        let target = json!({ "context": self.context });
        // As a click of the person who sits there would.
        let parameters =
            json!({ "expression": expression, "target": target, "awaitPromise": true, "userActivation": true });
        let result = self.ask("script.evaluate", parameters).await;
        assert_eq!(result["type"], "success", "{expression}: {result}");
        plain(&result["result"])
    }

    async fn click(&mut self, id: &str) {
        let middle = format!(
            "(async () => {{ const e = document.getElementById({id:?}); e.scrollIntoView({{ block: 'center' }}); \
             await new Promise(done => setTimeout(done, 100)); const r = e.getBoundingClientRect(); \
             return [Math.round(r.x + r.width / 2), Math.round(r.y + r.height / 2)]; }})()"
        );
        let place = self.value(&middle).await;
        let actions = json!([
            { "type": "pointerMove", "x": place[0], "y": place[1] },
            { "type": "pointerDown", "button": 0 },
            { "type": "pointerUp", "button": 0 },
        ]);
        let mouse = json!({ "type": "pointer", "id": "mouse", "actions": actions });
        self.ask("input.performActions", json!({ "context": self.context, "actions": [mouse] })).await;
    }

    async fn resize(&mut self, (width, height): (u32, u32)) {
        let viewport = json!({ "width": width, "height": height });
        self.ask("browsingContext.setViewport", json!({ "context": self.context, "viewport": viewport })).await;
    }

    async fn scheme(&mut self, scheme: &str) -> bool {
        // By a preference at its start.
        scheme == "dark"
    }

    async fn screenshot(&mut self) -> Vec<u8> {
        let shot = self.ask("browsingContext.captureScreenshot", json!({ "context": self.context })).await;
        STANDARD.decode(shot["data"].as_str().expect("an image")).expect("base64")
    }

    fn forgive_requests(&mut self) {
        // It tells of none.
    }

    fn errors(&self) -> &[Value] {
        &self.errors
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn firefox_calls_from_the_console_hears_and_shows_what_is_said() {
    if antiphon_skip::find("firefox-esr").is_none() {
        return antiphon_skip::skip("firefox", "the program is not installed (Debian: firefox-esr)");
    }
    // Firefox pairs no address of its own with loopback. Nothing is sent to this one: it shows which of ours is used.
    let probe = std::net::UdpSocket::bind("0.0.0.0:0").and_then(|socket| {
        socket.connect("198.51.100.1:9")?;
        socket.local_addr()
    });
    let Some(own) = probe.ok().map(|address| address.ip()).filter(|ip| !ip.is_loopback() && !ip.is_unspecified())
    else {
        return antiphon_skip::skip(
            "network",
            "this computer has no address but loopback, which Firefox does not call from",
        );
    };
    let service = service().await;
    let rig = Rig::with(|config| {
        config.webrtc.bind_ip = Some(own);
        config.recording.mode = antiphon::recording::Mode::All;
        config.recording.consent.clear();
        config.recognizer.url = Some(service);
        config.recognizer.timeout_ms = 20_000;
        config.agent.insert("demo".into(), browser::patient());
    })
    .await;
    let folder = tempfile::tempdir().expect("a folder");
    let mut page = Firefox::open(&format!("{}/", rig.http)).await;
    page.sees("document.getElementById('health')?.textContent == 'ready'").await;
    // The page's connections, to see what they decode.
    page.value(
        "window.peers = []; window.RTCPeerConnection = class extends RTCPeerConnection { \
         constructor(...args) { super(...args); window.peers.push(this); } }; 0",
    )
    .await;
    page.listens_to(&browser::words(folder.path(), 4)).await;
    page.click("call").await;
    page.sees("document.getElementById('state').textContent == 'connected'").await;
    let calls = &rig.app.gateway().calls;
    assert_eq!(calls.list().len(), 1, "the gateway has the call");
    page.sees("document.getElementById('captions').textContent.includes('Hello, this is Antiphon')").await;
    // What the caller says is heard, understood and answered.
    browser::words_are_heard(&rig).await;
    page.sees(&format!(
        "[...document.querySelectorAll('#captions .caller')].some(p => p.innerText.includes({TEXT:?}))"
    ))
    .await;
    page.sees("[...document.querySelectorAll('#captions .agent')].some(p => p.innerText.includes('You said'))").await;
    page.click("speak").await;
    let heard =
        "[...document.querySelectorAll('#captions p')].some(p => p.childNodes[1]?.textContent.endsWith('you today?'))";
    page.sees(heard).await;
    // Some seconds of speech, whose energy a second is some 0.03 of full scale; silence has none.
    page.sees(
        "(async () => [...(await window.peers.at(-1).getStats()).values()].some(report => \
         report.type == 'inbound-rtp' && report.totalAudioEnergy > 0.01))()",
    )
    .await;
    let axe = axe().await;
    browser::inspect_panels(&mut page, axe.as_deref()).await;
    browser::live(&mut page).await;
    browser::interrupts(&mut page).await;
    page.click("hang").await;
    page.sees("document.getElementById('state').textContent == 'ended'").await;
    let gone = async {
        while !calls.list().is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, gone).await.expect("the gateway is told");
    rig.recorded().await;
    browser::panels(&mut page, axe.as_deref()).await;
    assert!(page.errors.is_empty(), "the page has errors: {:?}", page.errors);
    rig.app.drain().await;
}
