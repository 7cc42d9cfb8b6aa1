//! Calls from other people's stacks: aiortc and Chromium, driven by the scripts in `tests/interop`.
//!
//! The calls here speak a tone and echo texts; the scripts can be pointed at a whole gateway as well. A client that
//! is not installed is skipped, and counted.

use std::f32::consts::TAU;
use std::path::Path;
use std::process::{Output, Stdio};
use std::thread;
use std::time::Duration;

use crate::support::gateway;
use antiphon::media::encode::{Encoder, OpusSettings};
use antiphon::media::leg::{LegEvent, MediaLeg, OutPacket};
use antiphon::media::webrtc::WebRtcLeg;
use antiphon::server::auth::Caller;
use antiphon::server::error::ApiError;
use antiphon::server::whip::{AcceptCall, Asked, WhipState, router};
use antiphon::webrtc::{SessionId, WebRtcConfig};
use tokio::process::Command;
use tokio::time::{MissedTickBehavior, interval};

/// Speaks a tone that comes and goes like syllables, and echoes.
#[derive(Clone)]
struct Speaker;

impl AcceptCall for Speaker {
    async fn accept(&self, leg: WebRtcLeg, _: Asked, session: &SessionId) -> Result<String, ApiError> {
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(speak(leg, drop));
        });
        Ok(session.to_string())
    }
}

/// Speaks a tone that comes and goes through the encoder of calls, echoes texts, and hands on what else the leg tells.
pub(crate) async fn speak(mut leg: WebRtcLeg, mut told: impl FnMut(LegEvent)) {
    leg.attach().await.expect("a live session");
    let format = leg.format().clone();
    let mut encoder = Encoder::new(&format, OpusSettings::default()).expect("an encoder");
    let mut tick = interval(Duration::from_millis(20));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut sequence = 0_u16;
    loop {
        tokio::select! {
            _ = tick.tick() => {
                let frame: Vec<f32> = (0..480).map(|sample| {
                    let time = (u32::from(sequence) * 480 + sample) as f32 / 24_000.0;
                    0.3 * (TAU * 300.0 * time).sin() * (0.5 + 0.5 * (TAU * 3.0 * time).sin())
                }).collect();
                let packet = OutPacket {
                    payload_type: format.payload_type,
                    marker: sequence == 0,
                    sequence,
                    timestamp: u32::from(sequence) * format.codec.frame_ticks(),
                    payload: encoder.encode(&frame).expect("a frame"),
                };
                sequence = sequence.wrapping_add(1);
                let _ = leg.send(packet).await;
            }
            event = leg.recv() => match event {
                LegEvent::Message(text) => assert!(leg.send_message(&text)),
                LegEvent::Closed(_) => return,
                other => told(other),
            }
        }
    }
}

/// Runs a script against a gateway of its own; `client` is what it needs.
async fn run(client: &str, script: &str, arguments: &[&str]) {
    let gateway = gateway(WebRtcConfig { tcp: true, ..WebRtcConfig::default() }).await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let state = WhipState { gateway, accept: Speaker };
    let routes = router(state).layer(axum::Extension(Caller::anybody()));
    tokio::spawn(async move { axum::serve(listener, routes).await });
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop").join(script);
    let child = Command::new(path).arg(url).args(arguments).stdin(Stdio::null()).kill_on_drop(true).output();
    // Installing aiortc may come first.
    let output = tokio::time::timeout(Duration::from_secs(300), child).await.expect("the script ends in time");
    let Output { status, stdout, stderr } = output.expect("the script can be started");
    let said = format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    match status.code() {
        Some(0) => println!("{script}: {said}"),
        Some(77) => antiphon_skip::skip(client, said.replace('\n', " ")),
        other => panic!("{script} ended with {other:?}: {said}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn aiortc_hears_speech_and_gets_its_text_back() {
    run("aiortc", "aiortc.sh", &[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chromium_hears_speech_and_gets_its_text_back() {
    run("chromium", "chromium_call.py", &[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chromium_without_udp_and_without_opus_calls_over_tcp() {
    run("chromium", "chromium_call.py", &["--tcp", "--codec", "PCMU"]).await;
}
