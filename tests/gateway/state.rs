//! Where `antiphon serve` writes: into its state directory, never into the folder it was started in.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use antiphon_loadgen::call::End;
use antiphon_loadgen::sip;

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

/// What the handbook has SQLite do to `database` for a backup.
fn backup_of(database: &str) -> String {
    let handbook = Path::new(env!("CARGO_MANIFEST_DIR")).join("config/packaging/HANDBOOK.md");
    let handbook = fs::read_to_string(handbook).expect("readable");
    let line = handbook.lines().find_map(|line| line.strip_prefix(&format!("sqlite3 {database} \"")));
    line.expect("a command").trim_end_matches('"').to_owned()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("made");
    for entry in fs::read_dir(from).expect("readable").map(|entry| entry.expect("an entry")) {
        let to = to.join(entry.file_name());
        match entry.file_type().expect("a type").is_dir() {
            true => copy(&entry.path(), &to),
            false => fs::copy(entry.path(), to).map(|_| ()).expect("copied"),
        }
    }
}

#[tokio::test]
async fn what_is_backed_up_while_the_gateway_runs_is_there_when_it_is_restored() {
    let (folder, state) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let start = |state: &Path| Serve::start(folder.path(), state, |c| _ = c.env("ANTIPHON_ENGINE__KIND", "tone"));
    let mut program = start(state.path());
    program.ready().await;
    let client = reqwest::Client::new();
    let job = client.post(format!("{}/v1/audio/speech/batch", program.http)).json(&json!({ "input": "Kept." }));
    let job: Value = job.send().await.expect("HTTP").json().await.expect("JSON");
    let id = job["id"].as_str().expect("the job is named");
    let sound = async |program: &Serve| {
        until(&format!("{}/v1/jobs/{id}", program.http), |body| body["state"] == "done").await;
        let answer = client.get(format!("{}/v1/jobs/{id}/audio", program.http)).send().await.expect("HTTP");
        assert_eq!(answer.status(), 200);
        answer.bytes().await.expect("whole")
    };
    let spoken = sound(&program).await;
    // Two calls, of which one goes on.
    let caller = async || sip::Caller::bind(sip::Config::default()).await.expect("free ports");
    let to = format!("sip:silent@{}", program.sip);
    let (ended, open) = (caller().await.call(&to).await, caller().await.call(&to).await);
    let (ended, open) = (ended.expect("answered"), open.expect("answered"));
    assert_eq!(ended.hang_up().await, End::Local);
    let records = |body: &Value, state: &str| {
        body["records"].as_array().into_iter().flatten().filter(|record| record["state"] == state).count()
    };
    let url = format!("{}/v1/records", program.http);
    until(&url, |body| records(body, "ended") == 1 && records(body, "open") == 1).await;

    let (kept, backup) = (state.path().join("antiphon"), folder.path().join("restored/antiphon"));
    fs::create_dir_all(&backup).expect("made");
    for database in ["batch.sqlite", "records.sqlite"] {
        let sql = backup_of(database).replace("backup/", &format!("{}/", backup.display()));
        assert!(sql.starts_with("VACUUM INTO '/"), "{sql}");
        rusqlite::Connection::open(kept.join(database)).expect("opens").execute_batch(&sql).expect("backed up");
    }
    for part in ["batch", "voices"] {
        if kept.join(part).exists() {
            copy(&kept.join(part), &backup.join(part));
        }
    }
    assert_eq!(open.hang_up().await, End::Local);
    assert_eq!(program.terminate().await, Some(0));

    let mut restored = start(&folder.path().join("restored"));
    restored.ready().await;
    assert_eq!(sound(&restored).await, spoken);
    until(&format!("{}/v1/records", restored.http), |body| {
        let told = body["records"].as_array().map(Vec::as_slice).unwrap_or_default();
        records(body, "ended") == 2 && told.iter().any(|record| record["cause"] == "gateway stopped")
    })
    .await;
    assert_eq!(restored.terminate().await, Some(0));
}
