//! Faults of the machine around a gateway; the table of all is config/packaging/FAULTS.md.

use std::process::{Command, Stdio};

use antiphon::sip::RtpConfig;
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::sip;
use tokio::time::timeout;

use super::program::{Serve, until};
use super::support::{PATIENCE, Rig};

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
