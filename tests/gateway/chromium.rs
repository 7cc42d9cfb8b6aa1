//! A headless Chromium with one page, driven over its DevTools protocol.

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

use super::support::PATIENCE;

/// A browser starts slowly on a loaded machine.
const START: Duration = Duration::from_secs(60);

/// The page, and the browser around it, which is killed when this is dropped.
pub(crate) struct Page {
    socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    session: Option<String>,
    last: u64,
    /// Exceptions that no script caught and errors on the console, such as what the content policy refused.
    pub(crate) errors: Vec<Value>,
    _browser: Child,
    _profile: tempfile::TempDir,
}

impl Page {
    /// Starts Chromium with an empty page; `microphone` is a WAV file that it takes for one, again and again.
    pub(crate) async fn open(microphone: &Path) -> Page {
        Page::open_with(microphone, &[]).await
    }

    /// The same with more of its switches.
    pub(crate) async fn open_with(microphone: &Path, switches: &[&str]) -> Page {
        let profile = tempfile::tempdir().expect("a folder");
        let browser = Command::new("chromium")
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
            .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
            .args(["--disable-dev-shm-usage", "--remote-debugging-port=0", "--mute-audio"])
            .args(["--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream"])
            .arg(format!("--use-file-for-fake-audio-capture={}", microphone.display()))
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .args(switches)
            .arg("about:blank")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .expect("Chromium starts");
        let file = profile.path().join("DevToolsActivePort");
        let port = async {
            loop {
                // Its first line is the port, its second the browser's own address.
                if let Ok(text) = std::fs::read_to_string(&file)
                    && let Some((port, path)) = text.split_once('\n')
                {
                    return format!("ws://127.0.0.1:{port}{}", path.trim());
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let url = timeout(START, port).await.expect("Chromium listens");
        let (socket, _) = tokio_tungstenite::connect_async(url).await.expect("Chromium answers");
        let mut page =
            Page { socket, session: None, last: 0, errors: Vec::new(), _browser: browser, _profile: profile };
        let target = page.ask("Target.createTarget", json!({ "url": "about:blank" })).await;
        let attached =
            page.ask("Target.attachToTarget", json!({ "targetId": target["targetId"], "flatten": true })).await;
        page.session = Some(attached["sessionId"].as_str().expect("a session").to_owned());
        for domain in ["Page.enable", "Runtime.enable", "Log.enable"] {
            page.ask(domain, json!({})).await;
        }
        page
    }

    /// Sends a command and gives its result; events that come before it are looked through for errors.
    pub(crate) async fn ask(&mut self, method: &str, parameters: Value) -> Value {
        self.last += 1;
        let id = self.last;
        let mut command = json!({ "id": id, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            command["sessionId"] = json!(session);
        }
        self.socket.send(Message::text(command.to_string())).await.expect("Chromium listens");
        let answer = async {
            loop {
                let message = self.socket.next().await.expect("Chromium lives").expect("sound");
                let Ok(message) = serde_json::from_str::<Value>(message.to_text().unwrap_or_default()) else {
                    continue;
                };
                if message["id"] == json!(id) {
                    return message;
                }
                let thrown = message["method"] == "Runtime.exceptionThrown";
                let logged = message["method"] == "Log.entryAdded" && message["params"]["entry"]["level"] == "error";
                if thrown || logged {
                    self.errors.push(message["params"].clone());
                }
            }
        };
        let answer = timeout(START, answer).await.unwrap_or_else(|_| panic!("{method}: no answer"));
        assert!(answer["error"].is_null(), "{method}: {answer}");
        answer["result"].clone()
    }

    /// The value of a JavaScript expression, awaited.
    pub(crate) async fn value(&mut self, expression: &str) -> Value {
        let parameters = json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let result = self.ask("Runtime.evaluate", parameters).await;
        assert!(result["exceptionDetails"].is_null(), "{expression}: {result}");
        result["result"]["value"].clone()
    }

    /// Waits until `condition`, an expression, is true; `shown` is evaluated for the message if it never is.
    pub(crate) async fn until(&mut self, condition: &str, shown: &str) {
        let begun = antiphon_loadgen::call::now();
        while self.value(condition).await != json!(true) {
            if antiphon_loadgen::call::now() - begun > PATIENCE {
                let shown = self.value(shown).await;
                panic!("never true: {condition}; {shown}; errors: {:?}", self.errors);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Sets the size of the window.
    pub(crate) async fn resize(&mut self, width: u32, height: u32) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.ask("Emulation.setDeviceMetricsOverride", size).await;
    }

    /// Clicks into the middle of what has this id, as a mouse does: what lies over it gets the click. Like a person it waits
    /// until the page holds still; what moves away in the moment of the click is missed.
    pub(crate) async fn click(&mut self, id: &str) {
        let still = format!(
            "(async () => {{ const e = document.getElementById({id:?}); e.scrollIntoView({{block: 'center'}}); \
             const middle = () => {{ const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; }}; \
             const before = middle(); await new Promise(done => setTimeout(done, 100)); const now = middle(); \
             return before[0] == now[0] && before[1] == now[1] ? now : null; }})()"
        );
        let begun = antiphon_loadgen::call::now();
        let place = loop {
            let place = self.value(&still).await;
            if !place.is_null() {
                break place;
            }
            assert!(antiphon_loadgen::call::now() - begun < PATIENCE, "{id} never holds still");
        };
        for kind in ["mousePressed", "mouseReleased"] {
            let event = json!({ "type": kind, "x": place[0], "y": place[1], "button": "left", "clickCount": 1 });
            self.ask("Input.dispatchMouseEvent", event).await;
        }
    }

    /// Presses a key, which is a character or the name of one (`Shift+Tab`), and lets it go.
    pub(crate) async fn press(&mut self, key: &str) {
        let (modifiers, key) = key.strip_prefix("Shift+").map_or((0, key), |key| (8, key));
        // Where a key has a text of its own it does what that text does.
        let (code, number, text) = match key {
            "Tab" => ("Tab", 9, ""),
            "Enter" => ("Enter", 13, "\r"),
            "Escape" => ("Escape", 27, ""),
            " " => ("Space", 32, " "),
            "End" => ("End", 35, ""),
            "Home" => ("Home", 36, ""),
            "ArrowLeft" => ("ArrowLeft", 37, ""),
            "ArrowRight" => ("ArrowRight", 39, ""),
            one => ("", 0, one),
        };
        for kind in ["keyDown", "keyUp"] {
            let mut event = json!({
                "type": kind, "key": key, "code": code, "modifiers": modifiers, "windowsVirtualKeyCode": number,
            });
            if kind == "keyDown" && !text.is_empty() {
                event["text"] = json!(text);
            }
            self.ask("Input.dispatchKeyEvent", event).await;
        }
    }

    /// The window as a PNG file.
    pub(crate) async fn screenshot(&mut self) -> Vec<u8> {
        let shot = self.ask("Page.captureScreenshot", json!({ "format": "png" })).await;
        STANDARD.decode(shot["data"].as_str().expect("an image")).expect("base64")
    }
}
