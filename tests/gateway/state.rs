//! Where `antiphon serve` writes: into its state directory, never into the folder it was started in.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use super::support::PATIENCE;

/// The program, killed when the test is over.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("readable");
    let mut names: Vec<String> =
        entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Asks until `done` says so.
async fn until(url: &str, done: impl Fn(&Value) -> bool) {
    let client = reqwest::Client::new();
    let asked = async {
        loop {
            if let Ok(response) = client.get(url).send().await
                && let Ok(body) = response.json::<Value>().await
                && done(&body)
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(PATIENCE, asked).await.unwrap_or_else(|_| panic!("{url} never said so"));
}

#[test]
fn serve_and_check_refuse_to_be_open_to_others() {
    let folder = tempfile::tempdir().expect("a folder");
    for command in ["check", "serve"] {
        for (variable, key) in [("ANTIPHON_HTTP__BIND", "[http] tokens"), ("ANTIPHON_SIP__UDP", "[sip] allow")] {
            let output = Command::new(env!("CARGO_BIN_EXE_antiphon"))
                .arg(command)
                .env("XDG_STATE_HOME", folder.path())
                .env(variable, "0.0.0.0:0")
                .output()
                .expect("the program starts");
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(64), "{command} {variable}: {said}");
            assert!(said.contains(key), "{command}: {said}");
        }
    }
    assert_eq!(names(folder.path()), [""; 0], "nothing was begun");
}

#[tokio::test]
async fn serve_keeps_jobs_in_the_state_directory_and_leaves_the_folder_it_was_started_in_alone() {
    let (started_in, state) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    // Given back at once: the program binds it a moment later.
    let free = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a free port");
    let program = Command::new(env!("CARGO_BIN_EXE_antiphon"))
        .arg("serve")
        .current_dir(started_in.path())
        .env("XDG_STATE_HOME", state.path())
        .env("ANTIPHON_HTTP__BIND", free.to_string())
        .env("ANTIPHON_SIP__UDP", "off")
        .env("ANTIPHON_SIP__TCP", "off")
        .env("ANTIPHON_ENGINE__KIND", "tone")
        .stderr(Stdio::null())
        .spawn()
        .expect("the program starts");
    let _program = Program(program);
    let http = format!("http://{free}");
    until(&format!("{http}/readyz"), |body| body["ready"] == true).await;
    let client = reqwest::Client::new();
    let job = client.post(format!("{http}/v1/audio/speech/batch")).json(&json!({ "input": "Kept." }));
    let job: Value = job.send().await.expect("HTTP").json().await.expect("JSON");
    let id = job["id"].as_str().expect("the job is named");
    until(&format!("{http}/v1/jobs/{id}"), |body| body["state"] == "done").await;
    assert_eq!(names(started_in.path()), [""; 0], "nothing is written where it was started");
    let kept = names(&state.path().join("antiphon"));
    assert!(kept.contains(&"batch".into()) && kept.contains(&"batch.sqlite".into()), "{kept:?}");
    assert_eq!(names(&state.path().join("antiphon/batch")), [id]);
}
