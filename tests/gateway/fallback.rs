//! What the engine refuses or fails at is refused at once, or spoken by the default voice where the agent says so.

use std::time::Duration;

use antiphon::agent::config::{Agent, Overload};
use antiphon::app::engines::{self, Choice};
use antiphon::config::Config;
use antiphon::synth::SynthError;
use antiphon::synth::cosyvoice::random::{self, Size};
use antiphon::synth::device::Loader;
use antiphon::synth::espeak::{self, Espeak};
use antiphon::synth::tone::Tone;
use antiphon_loadgen::call::{Call, now};
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::{correlate, sip};
use serde_json::json;

use super::counted::Growth;
use super::program::Serve;
use super::raw::{Raw, header, sdp};
use super::support::{PATIENCE, Rig, SENTENCE, hear_turn, hear_turn_at_last};
use super::watched::Watch;

fn agents(config: &mut Config) {
    let overload = Overload::DefaultVoice;
    config.agent.insert("patient".into(), Agent { overload, ..Agent::at("builtin:silent") });
    config.agent.insert("strict".into(), Agent::at("builtin:silent"));
}

/// `first` speaks, `espeak-ng` is the fallback; `None` where that is not installed.
async fn rig(change: impl FnOnce(&mut Config), first: Loader) -> Option<Rig> {
    if let Err(error) = Espeak::new(espeak::Config::default()) {
        antiphon_skip::skip("espeak", error);
        return None;
    }
    let fallback: Loader = Box::new(|| Ok(Box::new(Espeak::new(espeak::Config::default())?)));
    let choice = Choice { loaders: vec![first], fallback: Some(fallback), reasons: Vec::new() };
    let change = |config: &mut Config| {
        agents(config);
        change(config);
    };
    Some(Rig::with_voices(change, choice).await)
}

/// Whether `call` hears the sentence in the default voice.
async fn hears_the_default_voice(rig: &Rig, call: &Call) {
    let asked = rig.speak(call, SENTENCE).await;
    let (_, end) = hear_turn(call, asked).await;
    let heard = call.ear().heard().clip_between(asked, end + Duration::from_millis(200));
    let other = rig.app.gateway().fallback.as_ref().expect("it runs");
    let found = correlate::correlate(&heard, &Rig::spoken_by(other, SENTENCE).await).expect("comparable rates");
    assert!(found.value > 0.8, "{found:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_no_device_speaks_a_call_is_refused_or_has_the_default_voice() {
    let counts = Growth::of(&["antiphon_device_failures_total{", "antiphon_fallback_total", "antiphon_stand_in_total"]);
    let broken: Loader = Box::new(|| Err(SynthError::Device("no such device".into())));
    let Some(rig) = rig(|_| {}, broken).await else { return };
    assert!(!rig.app.gateway().is_ready());
    let call = rig.telephone("patient", Codec::Pcmu).await;
    hears_the_default_voice(&rig, &call).await;
    counts.assert();
    call.hang_up().await;
    let caller = sip::Caller::bind(sip::Config::default()).await.expect("free ports");
    let refused = caller.call(&format!("sip:strict@{}", rig.sip_udp())).await.err().expect("refused");
    assert!(refused.to_string().contains("503"), "{refused}");
    let mut telephone = Raw::new(rig.sip_udp(), "strict").await;
    telephone.contact = format!("sip:strict@{}", rig.sip_udp());
    let refused = telephone.ask("INVITE", "", &sdp(4_000, ""), "SIP/2.0 503").await;
    assert!(header(&refused, "Retry-After").and_then(|wait| wait.parse::<u64>().ok()) > Some(0), "{refused}");
    let speech = rig.client.post(format!("{}/v1/audio/speech", rig.http)).json(&json!({ "input": "Hello." }));
    let speech = speech.send().await.expect("HTTP");
    assert_eq!(speech.status(), 503);
    assert!(speech.headers().contains_key("retry-after"));
    rig.app.drain().await;
}

/// A GPU that turns out to be of no use while the model is loaded: calls are answered all the same, on the default voice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_with_an_unusable_gpu_speaks_on_the_default_voice() {
    if let Err(error) = Espeak::new(espeak::Config::default()) {
        antiphon_skip::skip("espeak", error);
        return;
    }
    let unusable: Loader = Box::new(|| Err(SynthError::Unusable("no GPU engine: compute capability 7.5".into())));
    let loaders = engines::or_spare(vec![unusable], || Ok(Box::new(Espeak::new(espeak::Config::default())?)));
    let rig = Rig::with_voices(agents, Choice { loaders, fallback: None, reasons: Vec::new() }).await;
    assert!(rig.app.gateway().is_ready());
    let call = rig.telephone("strict", Codec::Pcmu).await;
    let asked = rig.speak(&call, SENTENCE).await;
    let (_, end) = hear_turn(&call, asked).await;
    let heard = call.ear().heard().clip_between(asked, end + Duration::from_millis(200));
    let spoken = Rig::spoken_by(&rig.app.gateway().engine, SENTENCE).await;
    let found = correlate::correlate(&heard, &spoken).expect("comparable rates");
    assert!(found.value > 0.8, "{found:?}");
    call.hang_up().await;
    rig.app.drain().await;
}

/// One that shows it only at the first that it is to say, when its model is loaded: no call waits for what will not come.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_that_fails_as_its_voice_is_warmed_up_leaves_calls_to_the_default_voice() {
    if let Err(error) = Espeak::new(espeak::Config::default()) {
        antiphon_skip::skip("espeak", error);
        return;
    }
    let cold = Watch::never_warm().loader();
    let loaders = engines::or_spare(vec![cold], || Ok(Box::new(Espeak::new(espeak::Config::default())?)));
    let rig = Rig::with_voices(agents, Choice { loaders, fallback: None, reasons: Vec::new() }).await;
    let status = &rig.app.gateway().engine.status()[0];
    assert_eq!((status.caps.as_ref().map(|caps| caps.name), status.failures), (Some(espeak::NAME), 0));
    let call = rig.telephone("strict", Codec::Pcmu).await;
    let asked = rig.speak(&call, SENTENCE).await;
    hear_turn(&call, asked).await;
    call.hang_up().await;
    rig.app.drain().await;
}

/// The program on a machine whose GPU cannot be used, a driver without a device: from its start to what its first caller hears.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_served_machine_with_an_unusable_gpu_answers_its_first_call_soon() {
    if let Err(error) = Espeak::new(espeak::Config::default()) {
        antiphon_skip::skip("espeak", error);
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model");
    random::write(&model, Size::Tiny, 7, |_, _| {}).expect("written");
    let log = folder.path().join("log");
    let began = now();
    let mut program = Serve::start(folder.path(), folder.path(), |command| {
        command
            .env("ANTIPHON_ENGINE__KIND", "auto")
            .env("ANTIPHON_ENGINE__MODEL", &model)
            .env("CUDA_VISIBLE_DEVICES", "")
            .env("RUST_LOG", "info")
            .stderr(std::fs::File::create(&log).expect("created"));
    });
    assert!(program.comes().await, "{}", std::fs::read_to_string(&log).unwrap_or_default());
    let ready = now().saturating_duration_since(began);
    let caller = sip::Caller::bind(sip::Config { codecs: vec![Codec::Pcmu], ..sip::Config::default() });
    let call = caller.await.expect("free ports").call(&format!("sip:demo@{}", program.sip)).await.expect("answered");
    let (onset, _) = hear_turn(&call, now()).await;
    println!(
        "on the fallback voice: ready {} ms after the start, its first caller hears something after {} ms",
        ready.as_millis(),
        onset.saturating_duration_since(began).as_millis()
    );
    call.hang_up().await;
    let said = std::fs::read_to_string(&log).expect("a log");
    assert_eq!(said.matches("espeak-ng speaks in place of CosyVoice3").count(), 1, "{said}");
    assert_eq!(program.terminate().await, Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_whose_device_fails_is_spoken_by_the_default_voice() {
    let watch = Watch::failing_after(2);
    let Some(rig) = rig(|_| {}, watch.loader()).await else { return };
    assert!(rig.app.gateway().is_ready());
    let call = rig.browser("patient").await;
    // Two steps of the first voice are heard, then the whole sentence; later turns find no device at all.
    hears_the_default_voice(&rig, &call).await;
    assert!(!rig.app.gateway().is_ready(), "the device did not fail");
    hears_the_default_voice(&rig, &call).await;
    call.hang_up().await;
    rig.app.drain().await;
}

/// A kernel that never returns: silence for as long as it takes to be sure of it, then the default voice on the same call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_that_hangs_costs_a_turn_and_not_the_call() {
    let watch = Watch::failing_after(0);
    let Some(rig) = rig(|_| {}, watch.loader()).await else { return };
    let call = rig.telephone("patient", Codec::Pcmu).await;
    watch.hangs.store(true, std::sync::atomic::Ordering::SeqCst);
    let asked = rig.speak(&call, SENTENCE).await;
    hear_turn_at_last(&call, asked).await;
    assert!(!rig.app.gateway().is_ready(), "the device hangs");
    let faults = rig.app.gateway().faults();
    let told = faults.iter().find(|fault| fault.part == "devices").expect("it is told");
    assert!(!told.fatal && told.reason.contains("start the gateway anew"), "{told:?}");
    hears_the_default_voice(&rig, &call).await;
    watch.hangs.store(false, std::sync::atomic::Ordering::SeqCst);
    call.hang_up().await;
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_too_many_is_refused_with_retry_after_or_has_the_default_voice() {
    let tone: Loader = Box::new(|| Ok(Box::new(Tone::new())));
    let Some(rig) = rig(|config| config.scheduler.max_live = 1, tone).await else { return };
    let [first, strict, patient] = [
        rig.telephone("strict", Codec::Pcmu).await,
        rig.telephone("strict", Codec::Pcmu).await,
        rig.telephone("patient", Codec::Pcmu).await,
    ];
    let long = SENTENCE.repeat(20);
    rig.speak(&first, &long).await;
    let turns = format!("{}/v1/calls/{}/turns", rig.http, strict.id().expect("named"));
    let refused = rig.client.post(turns).json(&json!({ "text": SENTENCE })).send().await.expect("HTTP");
    assert_eq!(refused.status(), 503);
    assert!(refused.headers().contains_key("retry-after"));
    hears_the_default_voice(&rig, &patient).await;
    // It recovers by itself: once the engine has room again, the strict call is served.
    let id = first.id().expect("named").to_owned();
    assert_eq!(rig.post(&format!("/v1/calls/{id}/interrupt"), json!({})).await.0, 202);
    // Another call's task and the device's thread have to see it first.
    let turns = format!("/v1/calls/{}/turns", strict.id().expect("named"));
    let asked = tokio::time::timeout(PATIENCE, async {
        loop {
            let asked = now();
            match rig.post(&turns, json!({ "text": SENTENCE })).await.0 {
                202 => return asked,
                503 => tokio::time::sleep(Duration::from_millis(50)).await,
                other => panic!("{other}"),
            }
        }
    });
    hear_turn(&strict, asked.await.expect("room in time")).await;
    rig.app.drain().await;
}
