//! Where `antiphon serve` writes: into its state directory, never into the folder it was started in.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use super::program::{Serve, until};

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("readable");
    let mut names: Vec<String> =
        entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
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
    let mut program = Serve::start(started_in.path(), state.path(), |command| {
        command.env("ANTIPHON_SIP__UDP", "off").env("ANTIPHON_ENGINE__KIND", "tone");
    });
    program.ready().await;
    let client = reqwest::Client::new();
    let job = client.post(format!("{}/v1/audio/speech/batch", program.http)).json(&json!({ "input": "Kept." }));
    let job: Value = job.send().await.expect("HTTP").json().await.expect("JSON");
    let id = job["id"].as_str().expect("the job is named");
    until(&format!("{}/v1/jobs/{id}", program.http), |body| body["state"] == "done").await;
    assert_eq!(names(started_in.path()), [""; 0], "nothing is written where it was started");
    let kept = names(&state.path().join("antiphon"));
    assert!(kept.contains(&"batch".into()) && kept.contains(&"batch.sqlite".into()), "{kept:?}");
    assert_eq!(names(&state.path().join("antiphon/batch")), [id]);
    assert_eq!(program.terminate().await, Some(0), "SIGTERM drains it");
}
