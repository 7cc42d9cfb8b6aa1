//! Signals of a served gateway: they reload and tell, and none but those that mean it ends the process.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::timeout;

use super::program::Serve;
use super::support::PATIENCE;

#[tokio::test]
async fn signals_reload_and_tell_and_only_three_of_them_end_the_process() {
    let (folder, state) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let file = folder.path().join("gateway.toml");
    std::fs::write(&file, "[call]\nmax_calls = 7\n").expect("written");
    let mut program = Serve::start(folder.path(), state.path(), |command| {
        command.arg("-c").arg(&file).env("ANTIPHON_SIP__UDP", "off").env("ANTIPHON_ENGINE__KIND", "tone");
    });
    program.ready().await;
    let client = reqwest::Client::new();
    let console = async || {
        let request = client.get(format!("{}/", program.http)).header("host", "voice.example");
        request.send().await.expect("it lives").status().as_u16()
    };
    assert_eq!(console().await, 421);

    // A mistake changes nothing, by either way.
    std::fs::write(&file, "[http]\nhosts = [\"voice.example\"]\nnonsense = 1\n").expect("written");
    program.signal("HUP");
    let reload = client.post(format!("{}/v1/admin/reload", program.http));
    let refused = reload.send().await.expect("HTTP");
    assert_eq!(refused.status(), 422);
    let refused: Value = refused.json().await.expect("JSON");
    assert!(refused["error"]["message"].as_str().is_some_and(|text| text.contains("nonsense")), "{refused}");
    assert_eq!(console().await, 421);

    std::fs::write(&file, "[http]\nhosts = [\"voice.example\"]\n[call]\nmax_calls = 8\n[log]\nlevel = \"warn\"\n")
        .expect("written");
    for signal in ["USR1", "USR2", "USR2", "HUP"] {
        program.signal(signal);
    }
    let reloaded = async {
        while console().await != 200 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, reloaded).await.expect("SIGHUP takes the name up");
    let report: Value = client
        .post(format!("{}/v1/admin/reload", program.http))
        .send()
        .await
        .expect("HTTP")
        .json()
        .await
        .expect("JSON");
    assert_eq!(report, json!({ "applied": [], "needsRestart": [] }));
    assert_eq!(program.end_by("QUIT").await, Some(0), "it drains");
}
