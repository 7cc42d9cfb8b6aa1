//! Faults of the machine around a gateway; the table of all is config/packaging/FAULTS.md.

use std::process::{Command, Stdio};

use antiphon::sip::RtpConfig;
use antiphon::synth::device::{Engine, Phase};
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::sip;
use tokio::time::timeout;

use super::full_disk::may_write;
use super::program::{Serve, until};
use super::support::{self, PATIENCE, Rig, hear_turn_at_last};
use super::voices::{FITTING, write_model};

#[tokio::test]
async fn a_log_without_a_reader_stops_nothing() {
    let (folder, state) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    // A reader that goes away at once.
    let mut reader = Command::new("true").stdin(Stdio::piped()).spawn().expect("true runs");
    let pipe = reader.stdin.take().expect("a pipe");
    reader.wait().expect("it ended");
    let mut program = Serve::start(folder.path(), state.path(), |command| {
        command
            .env("ANTIPHON_SIP__UDP", "off")
            .env("ANTIPHON_ENGINE__KIND", "tone")
            .env("ANTIPHON_LOG__LEVEL", "debug");
        command.stderr(Stdio::from(pipe));
    });
    program.ready().await;
    // Some more lines.
    for _ in 0..3 {
        program.signal("USR1");
        until(&format!("{}/readyz", program.http), |body| body["ready"] == true).await;
    }
    assert_eq!(program.terminate().await, Some(0), "it drains and ends well");
}

#[tokio::test]
async fn a_log_on_a_full_disk_stops_nothing_and_goes_on_with_room() {
    let (folder, state) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let path = folder.path().join("log");
    let log = std::fs::File::create(&path).expect("made");
    let mut program = Serve::start(folder.path(), state.path(), |command| {
        command.env("ANTIPHON_ENGINE__KIND", "tone").stderr(Stdio::from(log));
    });
    program.ready().await;
    let length = || std::fs::metadata(&path).expect("there").len();
    may_write(program.id(), length());
    for _ in 0..3 {
        program.signal("USR1");
        until(&format!("{}/readyz", program.http), |body| body["ready"] == true).await;
    }
    let caller = sip::Caller::bind(sip::Config::default()).await.expect("free ports");
    let call = caller.call(&format!("sip:demo@{}", program.sip)).await.expect("answered");
    assert!(call.onset(call.setup().asked, PATIENCE).await.is_some(), "the agent greets");
    call.hang_up().await;
    let full = length();
    may_write(program.id(), u64::MAX);
    program.signal("USR1");
    let again = async {
        while length() <= full {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, again).await.expect("lines again");
    assert_eq!(program.terminate().await, Some(0));
}

/// The CPU speaks with that model and its only voice.
fn speak_with(config: &mut antiphon::config::Config, model: &std::path::Path) {
    support::speak_with(config, model);
    config.engine.voice = Some("random".into());
}

/// As a copy does that is not careful: the same files, written anew from their beginning.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_is_written_over_under_a_gateway_ends_its_device_and_not_the_process() {
    let model = tempfile::tempdir().expect("a folder");
    write_model(model.path(), FITTING);
    let rig = Rig::with(|config| speak_with(config, model.path())).await;
    let call = rig.telephone("silent", Codec::Pcmu).await;
    for entry in std::fs::read_dir(model.path()).expect("readable").flatten().filter(|entry| entry.path().is_file()) {
        std::fs::write(entry.path(), b"this is no model").expect("written");
    }
    rig.speak(&call, "Whose numbers are these?").await;
    let told = async {
        loop {
            let status = &rig.app.gateway().engine.status()[0];
            if let Phase::Failed(why) = &status.phase {
                return (why.clone(), status.retry_in);
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    let (why, retry) = timeout(PATIENCE, told).await.expect("it is found out");
    assert!(why.contains("llm.pt") && retry.is_some(), "it is loaded again once the files are right: {why}");
    let handle = rig.handle(&call).await;
    assert!(!handle.has_ended(), "the call goes on");
    call.hang_up().await;
    rig.app.drain().await;
}

/// Its weights are read from the file that was there, whatever has its name now.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_is_replaced_under_a_gateway_speaks_on_and_a_broken_one_says_so_at_the_next_start() {
    let model = tempfile::tempdir().expect("a folder");
    write_model(model.path(), FITTING);
    let configure = |config: &mut antiphon::config::Config| speak_with(config, model.path());
    let rig = Rig::with(configure).await;
    for entry in std::fs::read_dir(model.path()).expect("readable").flatten().filter(|entry| entry.path().is_file()) {
        let new = model.path().join("new");
        std::fs::write(&new, b"this is no model").expect("written");
        std::fs::rename(&new, entry.path()).expect("in its place");
    }
    let call = rig.telephone("silent", Codec::Pcmu).await;
    let asked = rig.speak(&call, "Nothing has changed.").await;
    hear_turn_at_last(&call, asked).await;
    call.hang_up().await;
    rig.app.drain().await;
    let config = {
        let mut config = antiphon::config::Config::default();
        configure(&mut config);
        config
    };
    let told = match antiphon::app::engines::choose(&config.engine) {
        Err(error) => Phase::Failed(error.to_string()),
        Ok(choice) => {
            let engine = Engine::start(choice.loaders, config.scheduler.clone()).expect("its thread starts");
            engine.ready().await;
            engine.status()[0].phase.clone()
        }
    };
    assert!(matches!(&told, Phase::Failed(why) if !why.is_empty()), "it is found out when it is read again: {told:?}");
}

#[tokio::test]
async fn without_media_ports_a_call_is_refused_and_the_next_one_is_served() {
    // One pair, below the ports that kernels give out.
    let rig = Rig::with(|config| config.rtp = RtpConfig { port_min: 31_906, port_max: 31_907 }).await;
    let first = rig.telephone("silent", Codec::Pcmu).await;
    let caller = sip::Caller::bind(sip::Config { codecs: vec![Codec::Pcmu], ..sip::Config::default() });
    let refused = caller.await.expect("free ports").call(&format!("sip:silent@{}", rig.sip_udp())).await;
    let refused = refused.err().expect("no port is left").to_string();
    assert!(refused.contains("50") || refused.contains("48"), "with a status: {refused}");
    let handle = rig.handle(&first).await;
    assert!(!handle.has_ended(), "the call that has the ports goes on");
    first.hang_up().await;
    timeout(PATIENCE, handle.ended()).await.expect("it ends");
    // The ports are free when the leg is gone, a moment after its call has ended.
    let served = async {
        loop {
            let caller = sip::Caller::bind(sip::Config { codecs: vec![Codec::Pcmu], ..sip::Config::default() });
            if let Ok(call) = caller.await.expect("free ports").call(&format!("sip:silent@{}", rig.sip_udp())).await {
                return call;
            }
        }
    };
    timeout(PATIENCE, served).await.expect("the next is served").hang_up().await;
}
