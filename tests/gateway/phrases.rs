//! Phrases of the configuration: spoken before anybody calls, and heard as any other speech.

use std::time::Duration;

use antiphon::agent::config::Agent;
use antiphon::call::utterances;
use antiphon_loadgen::codec::Codec;
use tokio::time::timeout;

use super::counted::counted;
use super::support::{PATIENCE, Rig, hear_turn_at_last};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_greeting_is_spoken_before_the_first_call_and_heard_on_it() {
    let text = "Hello, you have reached the support desk.";
    let agent = Agent { greeting: Some(text.into()), apology: String::new(), ..Agent::at("builtin:silent") };
    let phrases = utterances(text, agent.style(), &Default::default()).expect("no markup");
    let rig = Rig::with(|config| {
        config.agent.insert("support".into(), agent);
    })
    .await;
    let engine = rig.app.gateway().engine.clone();
    let kept = async {
        while engine.fix_phrases(&phrases).is_none_or(|missing| !missing.is_empty()) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, kept).await.expect("it is kept");
    assert!(counted("antiphon_phrase_bytes{place=\"memory\"}") > 24_000.0, "a second of sound at least");
    let made = || engine.status()[0].produced;
    let before = made();
    assert!(before > 0, "a device has spoken it");
    let call = rig.telephone("support", Codec::Pcmu).await;
    let heard = hear_turn_at_last(&call, call.setup().asked).await;
    assert_eq!(made(), before, "no device spoke it again");
    rig.assert_heard(&call, text, heard, 0.6).await;
    call.hang_up().await;
    rig.app.drain().await;
}
