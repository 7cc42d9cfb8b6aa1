//! Speech that nobody wants any more stops within a step of the device and holds no memory.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use antiphon::app::engines::Choice;
use antiphon_loadgen::call::End;
use antiphon_loadgen::codec::Codec;
use futures_util::StreamExt;
use serde_json::json;

use super::support::{PATIENCE, Rig};
use super::watched::Watch;

/// Sentences of ten seconds each: longer than any lead, so that some are open at any time.
fn long_text() -> String {
    "one more word and then another one is said in the same long breath again and again and again. ".repeat(40)
}

async fn rig() -> (Rig, Arc<Watch>) {
    let watch = Arc::new(Watch::default());
    let choice = Choice { loaders: vec![watch.loader()], fallback: None, reasons: Vec::new() };
    (Rig::with_voices(|_| {}, choice).await, watch)
}

/// Waits until `wanted` of the watched voice.
async fn becomes(watch: &Watch, wanted: impl Fn(&Watch) -> bool) {
    let waiting = async {
        while !wanted(watch) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting).await.expect("the voice gets there");
}

/// All of it is given back, by the voice's count and by the scheduler's, and no step was run for nobody but the one
/// that may have been on its way.
async fn nothing_is_left(rig: &Rig, watch: &Watch) {
    becomes(watch, |watch| watch.used.load(SeqCst) == 0).await;
    assert!(watch.for_nobody.load(SeqCst) <= 1, "{} steps for nobody", watch.for_nobody.load(SeqCst));
    let settled = async {
        loop {
            let status = &rig.app.gateway().engine.status()[0];
            if (status.load.live, status.load.live_open, status.load.memory, status.memory.used) == (0, 0, 0, 0) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(PATIENCE, settled).await.expect("the scheduler forgets it");
    let steps = watch.steps.load(SeqCst);
    tokio::task::yield_now().await;
    assert_eq!(watch.steps.load(SeqCst), steps, "the device works for nobody");
}

async fn speaking(rig: &Rig, watch: &Watch) -> antiphon_loadgen::call::Call {
    let call = rig.telephone("silent", Codec::Pcmu).await;
    rig.speak(&call, &long_text()).await;
    becomes(watch, |watch| watch.used.load(SeqCst) > 0 && watch.steps.load(SeqCst) > 3).await;
    call
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interruption_stops_the_device() {
    let (rig, watch) = rig().await;
    let call = speaking(&rig, &watch).await;
    let id = call.id().expect("named").to_owned();
    assert_eq!(rig.post(&format!("/v1/calls/{id}/interrupt"), json!({})).await.0, 202);
    nothing_is_left(&rig, &watch).await;
    call.hang_up().await;
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_callers_key_stops_the_device() {
    let (rig, watch) = rig().await;
    let call = speaking(&rig, &watch).await;
    call.press("1").await.expect("keys go out");
    nothing_is_left(&rig, &watch).await;
    call.hang_up().await;
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hanging_up_stops_the_device() {
    let (rig, watch) = rig().await;
    let call = speaking(&rig, &watch).await;
    assert_eq!(call.hang_up().await, End::Local);
    nothing_is_left(&rig, &watch).await;
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_stops_the_device() {
    let (rig, watch) = rig().await;
    let body = json!({ "input": long_text().chars().take(4_000).collect::<String>(), "response_format": "pcm" });
    let response = rig.client.post(format!("{}/v1/audio/speech", rig.http)).json(&body).send().await.expect("HTTP");
    let mut body = response.bytes_stream();
    body.next().await.expect("sound").expect("whole");
    becomes(&watch, |watch| watch.used.load(SeqCst) > 0).await;
    drop(body);
    nothing_is_left(&rig, &watch).await;
    rig.app.drain().await;
}
