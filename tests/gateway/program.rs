//! The program itself, as somebody starts it.

use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use tokio::time::timeout;

use super::support::PATIENCE;

/// Longest that a command may take which computes: on a busy machine it shares the cores with others.
const COMMAND: Duration = Duration::from_secs(200);

/// `antiphon serve`, killed when the test is over.
pub(crate) struct Serve {
    child: Child,
    /// Its address, as in a URL.
    pub(crate) http: String,
    /// Where telephones reach it, unless `change` says otherwise.
    pub(crate) sip: SocketAddr,
}

impl Serve {
    /// Starts it in `folder` with its state in `state`; `change` has the last word.
    pub(crate) fn start(folder: &Path, state: &Path, change: impl FnOnce(&mut Command)) -> Serve {
        // Given back at once: the program binds them a moment later.
        let free = || TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a free port");
        let sip = UdpSocket::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a free port");
        let http = free();
        let mut command = Command::new(env!("CARGO_BIN_EXE_antiphon"));
        command
            .arg("serve")
            .current_dir(folder)
            .env("XDG_STATE_HOME", state)
            .env("ANTIPHON_HTTP__BIND", http.to_string())
            .env("ANTIPHON_SIP__UDP", sip.to_string())
            .env("ANTIPHON_SIP__TCP", "off")
            .env("ANTIPHON_CALL__DRAIN_NOTICE_S", "0")
            .stdin(Stdio::null())
            .stderr(Stdio::null());
        change(&mut command);
        let child = command.spawn().expect("the program starts");
        Serve { child, http: format!("http://{http}"), sip }
    }

    /// A program that was started in another way.
    pub(crate) fn of(child: Child, http: SocketAddr, sip: SocketAddr) -> Serve {
        Serve { child, http: format!("http://{http}"), sip }
    }

    /// Waits until it takes calls.
    pub(crate) async fn ready(&self) {
        until(&format!("{}/readyz", self.http), |body| body["ready"] == true).await;
    }

    /// Waits until it takes calls (`true`) or has ended, as it does where somebody else got one of its ports meanwhile.
    pub(crate) async fn comes(&mut self) -> bool {
        let url = format!("{}/readyz", self.http);
        // The client is built without a TLS provider of its own; a second call says that there is one already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::new();
        let asked = async {
            loop {
                if self.child.try_wait().expect("a child").is_some() {
                    return false;
                }
                if client.get(&url).send().await.is_ok_and(|answer| answer.status().is_success()) {
                    return true;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        timeout(PATIENCE, asked).await.expect("it is ready or ends")
    }

    /// What it counts.
    pub(crate) async fn metrics(&self) -> String {
        let answer = reqwest::get(format!("{}/metrics", self.http)).await.expect("HTTP");
        answer.text().await.expect("text")
    }

    /// Its process.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal by name.
    pub(crate) fn signal(&self, name: &str) {
        let sent = Command::new("kill").args(["-s", name, &self.child.id().to_string()]).status().expect("kill runs");
        assert!(sent.success(), "{name}");
    }

    /// Asks it to end as an operator does; gives its exit code.
    pub(crate) async fn terminate(&mut self) -> Option<i32> {
        self.end_by("TERM").await
    }

    /// Asks it to end by this signal; gives its exit code.
    pub(crate) async fn end_by(&mut self, signal: &str) -> Option<i32> {
        self.signal(signal);
        self.ended().await
    }

    /// Waits until it has ended; gives its exit code.
    pub(crate) async fn ended(&mut self) -> Option<i32> {
        let ended = async {
            loop {
                if let Some(status) = self.child.try_wait().expect("a child") {
                    return status.code();
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        timeout(COMMAND, ended).await.expect("it ends")
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Asks until `done` says so.
pub(crate) async fn until(url: &str, done: impl Fn(&Value) -> bool) {
    // The client is built without a TLS provider of its own; a second call says that there is one already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = reqwest::Client::new();
    let mut said = String::from("nothing");
    let asked = async {
        loop {
            if let Ok(response) = client.get(url).send().await
                && let Ok(text) = response.text().await
            {
                match serde_json::from_str::<Value>(&text) {
                    Ok(body) if done(&body) => return,
                    _ => said = text,
                }
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let waited = timeout(PATIENCE, asked).await;
    assert!(waited.is_ok(), "{url} never said so, but at last: {said}");
}

/// Runs `antiphon` with `arguments` in `folder` to its end; its state lies in `folder`, too.
pub(crate) async fn antiphon(folder: &Path, arguments: &[&str]) -> Output {
    let output = tokio::process::Command::new(env!("CARGO_BIN_EXE_antiphon"))
        .args(arguments)
        .current_dir(folder)
        .env("XDG_STATE_HOME", folder.join("state"))
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    timeout(COMMAND, output).await.unwrap_or_else(|_| panic!("{arguments:?} does not end")).expect("it runs")
}

/// As [`antiphon`], of a command that has to succeed; gives what it printed.
pub(crate) async fn succeeds(folder: &Path, arguments: &[&str]) -> String {
    let output = antiphon(folder, arguments).await;
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {} {said}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}
