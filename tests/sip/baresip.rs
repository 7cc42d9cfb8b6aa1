//! A call from baresip, a telephone program that shares no code with us. Without it the test says that it
//! was skipped; continuous integration has it.

use std::{path::Path, process::Stdio, time::Duration};

use crate::support::{limited, loopback, start, within};
use antiphon::media::leg::{Codec, LegEnd, LegEvent, MediaLeg, OutPacket};
use tokio::process::Command;

/// Sends a tone from a file, keeps what it hears in another; needs no sound card and no network but loopback.
const CONFIG: &str = "
sip_listen 127.0.0.1:0
audio_player aufile,heard.wav
audio_source aufile,tone.wav
net_interface 127.0.0.1
module_path /usr/lib/baresip/modules
module CODEC.so
module aufile.so
module_tmp account.so
module_app menu.so
";

/// Ten seconds of 440 Hz in the form that the codec takes: baresip does not convert files.
fn tone(path: &Path, codec: Codec) {
    let (sample_rate, channels) = match codec {
        Codec::Opus => (48_000, 2),
        Codec::G722 => (16_000, 1),
        Codec::Pcmu | Codec::Pcma => (8_000, 1),
    };
    let spec = hound::WavSpec { channels, sample_rate, bits_per_sample: 16, sample_format: hound::SampleFormat::Int };
    let mut file = hound::WavWriter::create(path, spec).expect("creates");
    for n in 0..sample_rate * 10 {
        let phase = f64::from(n) / f64::from(sample_rate) * 440.0 * std::f64::consts::TAU;
        for _ in 0..channels {
            file.write_sample((phase.sin() * 8_000.0) as i16).expect("writes");
        }
    }
    file.finalize().expect("writes");
}

async fn call(codec: Codec) {
    let (endpoint, mut calls) = start(loopback()).await;
    let port = endpoint.local_udp().expect("bound").port();
    let folder = tempfile::tempdir().expect("a folder");
    let module = match codec {
        Codec::Opus => "opus",
        Codec::G722 => "g722",
        Codec::Pcmu | Codec::Pcma => "g711",
    };
    std::fs::write(folder.path().join("config"), CONFIG.replace("CODEC", module)).expect("writes");
    std::fs::write(folder.path().join("accounts"), "<sip:telephone@127.0.0.1>;regint=0\n").expect("writes");
    std::fs::write(folder.path().join("contacts"), "").expect("writes");
    tone(&folder.path().join("tone.wav"), codec);
    let dial = format!("/dial sip:demo@127.0.0.1:{port}");
    let mut telephone = Command::new("baresip")
        .current_dir(folder.path())
        .args(["-f", ".", "-t", "12", "-e", &dial])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("baresip runs");

    let incoming = limited(calls.recv()).await.expect("a call");
    incoming.ringing();
    let mut leg = limited(incoming.accept()).await.expect("accepted");
    leg.attach().await.expect("attaches");
    assert_eq!(leg.format().codec, codec);

    // A second of its tone, in order and without loss; and as much of it back.
    let mut last: Option<u16> = None;
    let mut heard = 0;
    limited(async {
        while heard < 50 {
            match leg.recv().await {
                LegEvent::Rtp(packet) if packet.payload_type == leg.format().payload_type => {
                    assert!(last.is_none_or(|l| packet.sequence == l.wrapping_add(1)), "loopback loses nothing");
                    last = Some(packet.sequence);
                    heard += 1;
                    let back = OutPacket {
                        payload_type: packet.payload_type,
                        marker: heard == 1,
                        sequence: packet.sequence,
                        timestamp: packet.timestamp,
                        payload: packet.payload,
                    };
                    leg.send(back).await.expect("up");
                }
                LegEvent::Closed(end) => panic!("ended too early: {end:?}"),
                _ => {}
            }
        }
    })
    .await;
    leg.hang_up().await;
    assert_eq!(limited(leg.recv()).await, LegEvent::Closed(LegEnd::Local));
    within("the call to be forgotten", || endpoint.calls() == 0).await;
    telephone.start_kill().ok();
    tokio::time::timeout(Duration::from_secs(5), telephone.wait()).await.ok();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn baresip_calls_and_is_heard_in_every_codec() {
    if std::process::Command::new("baresip").arg("-h").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
        eprintln!("SKIPPED: baresip is not installed");
        return;
    }
    for codec in [Codec::Pcmu, Codec::G722, Codec::Opus] {
        call(codec).await;
    }
}
