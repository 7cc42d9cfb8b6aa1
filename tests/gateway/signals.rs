//! Signals of a served gateway: they reload and tell, and none but those that mean it ends the process.

use std::time::Duration;

use serde_json::json;
use tokio::time::timeout;

use super::reloads::Served;
use super::support::PATIENCE;

#[tokio::test]
async fn signals_reload_and_tell_and_only_three_of_them_end_the_process() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut served = Served::start(folder.path(), "[call]\nmax_calls = 7\n").await;
    let console = async || {
        let request = served.client.get(format!("{}/", served.program.http)).header("host", "voice.example");
        request.send().await.expect("it lives").status().as_u16()
    };
    assert_eq!(console().await, 421);

    // A mistake changes nothing, by either way.
    served.write("[http]\nhosts = [\"voice.example\"]\nnonsense = 1\n");
    served.program.signal("HUP");
    let (status, refused) = served.take_up().await;
    let told = refused["error"]["message"].as_str().unwrap_or_default();
    assert!(status == 422 && told.contains("nonsense"), "{status} {refused}");
    assert_eq!(console().await, 421);

    served.write("[http]\nhosts = [\"voice.example\"]\n[call]\nmax_calls = 8\n[log]\nlevel = \"warn\"\n");
    for signal in ["USR1", "USR2", "USR2", "HUP"] {
        served.program.signal(signal);
    }
    let reloaded = async {
        while console().await != 200 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, reloaded).await.expect("SIGHUP takes the name up");
    assert_eq!(served.take_up().await, (200, json!({ "applied": [], "needsRestart": [] })));
    assert_eq!(served.program.end_by("QUIT").await, Some(0), "it drains");
}
