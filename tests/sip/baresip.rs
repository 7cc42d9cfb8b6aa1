//! Calls from baresip, a telephone program that shares no code with us: its tone is heard here, and it hears its
//! tone back; it sends keys, holds, is held and is sent elsewhere. Without it the tests are skipped, and counted; continuous
//! integration has it. Debian's release knows no Replaces: attended transfers are in `linphone.rs` and `scenarios.rs`.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use crate::support::{LIMIT, event, hold, limited, loopback, picked_up, start, transfer, within};
use antiphon::{
    media::leg::{Codec, LegEnd, LegEvent, MediaLeg, OutPacket},
    sip::{CodecName, SipConfig},
};
use antiphon_loadgen::{codec, wav};
use tokio::{
    io::AsyncWriteExt,
    net::TcpStream,
    process::{Child, Command},
};

/// Sends a tone from a file, keeps what it decodes in another; needs no sound card and no network but loopback.
const CONFIG: &str = "
sip_listen 127.0.0.1:0
audio_player aufile,unused
audio_source aufile,tone.wav
net_interface 127.0.0.1
snd_path .
module_path /usr/lib/baresip/modules
module CODEC.so
module aufile.so
module sndfile.so
module_tmp account.so
module_app menu.so
";
/// What baresip sends.
const TONE_HZ: f64 = 440.0;

/// Ten seconds of 440 Hz in the form that the codec takes: baresip does not convert files.
pub(crate) fn tone(path: &Path, codec: Codec) {
    let (sample_rate, channels) = match codec {
        Codec::Opus => (48_000, 2),
        Codec::G722 => (16_000, 1),
        Codec::Pcmu | Codec::Pcma => (8_000, 1),
    };
    let spec = hound::WavSpec { channels, sample_rate, bits_per_sample: 16, sample_format: hound::SampleFormat::Int };
    let mut file = hound::WavWriter::create(path, spec).expect("creates");
    for n in 0..sample_rate * 10 {
        let phase = f64::from(n) / f64::from(sample_rate) * TONE_HZ * std::f64::consts::TAU;
        for _ in 0..channels {
            file.write_sample((phase.sin() * 8_000.0) as i16).expect("writes");
        }
    }
    file.finalize().expect("writes");
}

/// The share of the power of `pcm` that is at [`TONE_HZ`].
pub(crate) fn share_of_the_tone(pcm: &[f32], rate: u32) -> f64 {
    let (mut sine, mut cosine, mut power) = (0.0, 0.0, 0.0);
    for (n, sample) in pcm.iter().enumerate() {
        let phase = n as f64 / f64::from(rate) * TONE_HZ * std::f64::consts::TAU;
        sine += f64::from(*sample) * phase.sin();
        cosine += f64::from(*sample) * phase.cos();
        power += f64::from(*sample).powi(2);
    }
    2.0 * (sine * sine + cosine * cosine) / (pcm.len() as f64 * power.max(f64::MIN_POSITIVE))
}

/// What baresip kept of what it decoded, of which half a second is the tone; it may still be writing.
fn kept(folder: &Path) -> Option<PathBuf> {
    let mut entries = std::fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let file = entries.find(|path| path.to_string_lossy().ends_with("-dec.wav"))?;
    let clip = wav::read(&file).ok()?;
    // Where the tone begins in it depends on when the call was answered.
    let half = clip.rate as usize / 2;
    let heard = clip.pcm.windows(half).step_by(half / 10);
    heard.map(|part| share_of_the_tone(part, clip.rate)).any(|share| share > 0.9).then_some(file)
}

/// How its media is keyed: a module of baresip and what its account says, whether the two ports are one, and whether that
/// is encrypted.
#[derive(Clone, Copy, Debug)]
struct Keys {
    module: &'static str,
    account: &'static str,
    mux: bool,
    encrypted: bool,
}

const PLAIN: Keys = Keys { module: "", account: "", mux: false, encrypted: false };

/// Starts it in `folder`, with a tone of the codec as its microphone; it calls `dial`.
fn telephone(folder: &Path, codec: Codec, keys: Keys, more: &str, dial: &str) -> Child {
    let module = match codec {
        Codec::Opus => "opus",
        Codec::G722 => "g722",
        Codec::Pcmu | Codec::Pcma => "g711",
    };
    let mut config = CONFIG.replace("CODEC", module);
    if !keys.module.is_empty() {
        config.push_str(&format!("module {}.so\n", keys.module));
    }
    config.push_str(if keys.mux { "rtcp_mux yes\n" } else { "rtcp_mux no\n" });
    config.push_str(more);
    std::fs::write(folder.join("config"), config).expect("writes");
    let account = format!("<sip:telephone@127.0.0.1>;regint=0{}\n", keys.account);
    std::fs::write(folder.join("accounts"), account).expect("writes");
    std::fs::write(folder.join("contacts"), "").expect("writes");
    tone(&folder.join("tone.wav"), codec);
    Command::new("baresip")
        .current_dir(folder)
        .args(["-f", ".", "-t", "60", "-e", &format!("/dial {dial}")])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .expect("baresip runs")
}

async fn call(codec: Codec, keys: Keys) {
    // It offers both laws, the other one first.
    let codecs = if codec == Codec::Pcma { vec![CodecName::Pcma] } else { loopback().codecs };
    let (endpoint, mut calls) = start(SipConfig { codecs, ..loopback() }).await;
    let port = endpoint.local_udp().expect("bound").port();
    let folder = tempfile::tempdir().expect("a folder");
    let mut telephone = telephone(folder.path(), codec, keys, "", &format!("sip:demo@127.0.0.1:{port}"));

    let incoming = limited(calls.recv()).await.expect("a call");
    incoming.ringing();
    let mut leg = limited(incoming.accept()).await.expect("accepted");
    leg.attach().await.expect("attaches");
    assert_eq!((leg.format().codec, leg.encrypted()), (codec, keys.encrypted), "{keys:?}");

    // Two seconds of its tone, in order and without loss; and as much of it back.
    let mut decoder = codec::Decoder::new(
        match codec {
            Codec::Opus => codec::Codec::Opus,
            Codec::G722 => codec::Codec::G722,
            Codec::Pcmu => codec::Codec::Pcmu,
            Codec::Pcma => codec::Codec::Pcma,
        },
        48_000,
    )
    .expect("a decoder");
    let mut pcm = Vec::new();
    let mut last: Option<u16> = None;
    let mut heard = 0;
    limited(async {
        while heard < 100 {
            match leg.recv().await {
                LegEvent::Rtp(packet) if packet.payload_type == leg.format().payload_type => {
                    assert!(last.is_none_or(|l| packet.sequence == l.wrapping_add(1)), "loopback loses nothing");
                    last = Some(packet.sequence);
                    heard += 1;
                    decoder.decode(&packet.payload, &mut pcm).expect("a packet of the codec");
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
    // Packets that were read before may wait in front of it.
    assert_eq!(event(&mut leg, |e| matches!(e, LegEvent::Closed(_))).await, LegEvent::Closed(LegEnd::Local));
    within("the call to be forgotten", || endpoint.calls() == 0).await;
    let pcm: Vec<f32> = pcm.into_iter().map(codec::from_i16).collect();
    // Codecs need a moment to begin.
    let share = share_of_the_tone(&pcm[pcm.len() / 4..], decoder.rate());
    assert!(share > 0.9, "{codec:?}: {share} of what baresip sent is its tone");
    // It closes its file when the call is over.
    let folder = folder.path();
    let back = async {
        while kept(folder).is_none() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let back = tokio::time::timeout(LIMIT, back).await;
    let files: Vec<_> = std::fs::read_dir(folder).expect("readable").flatten().map(|entry| entry.file_name()).collect();
    assert!(back.is_ok(), "{codec:?}: baresip did not hear its tone: {files:?}");
    telephone.start_kill().ok();
    tokio::time::timeout(Duration::from_secs(5), telephone.wait()).await.ok();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn baresip_calls_and_is_heard_in_every_codec() {
    if !antiphon_skip::has_program("baresip", "baresip-core") {
        return;
    }
    for codec in [Codec::Pcmu, Codec::Pcma, Codec::G722, Codec::Opus] {
        call(codec, PLAIN).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn baresip_calls_and_is_heard_with_keys_of_either_kind() {
    if !antiphon_skip::has_program("baresip", "baresip-core") {
        return;
    }
    let handshake = Keys { module: "dtls_srtp", account: ";mediaenc=dtls_srtp", mux: true, encrypted: true };
    for keys in [
        handshake,
        Keys { mux: false, ..handshake },
        Keys { module: "srtp", account: ";mediaenc=srtp-mand", mux: false, encrypted: true },
    ] {
        call(Codec::Pcmu, keys).await;
    }
}

/// Tells a running baresip what to do (its module `ctrl_tcp`: JSON in netstrings).
async fn tell(control: &mut TcpStream, command: &str, parameter: &str) {
    let text = serde_json::json!({ "command": command, "params": parameter }).to_string();
    control.write_all(format!("{}:{text},", text.len()).as_bytes()).await.expect("it listens");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn baresip_sends_keys_holds_is_held_and_is_sent_elsewhere() {
    if !antiphon_skip::has_program("baresip", "baresip-core") {
        return;
    }
    let (endpoint, mut calls) = start(loopback()).await;
    let (expert, mut asked) = start(loopback()).await;
    let folder = tempfile::tempdir().expect("a folder");
    let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a port");
    let control = format!("module_app ctrl_tcp.so\nctrl_tcp_listen {free}\n");
    let to = format!("sip:demo@{}", endpoint.local_udp().expect("bound"));
    let mut telephone = telephone(folder.path(), Codec::Pcmu, PLAIN, &control, &to);
    let mut leg = picked_up(&mut calls).await;
    event(&mut leg, |e| *e == LegEvent::Connected).await;
    let mut control = limited(async {
        loop {
            match TcpStream::connect(free).await {
                Ok(stream) => return stream,
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    })
    .await;

    // RFC 4733: the event's number is the first byte of its packets.
    let (keys, _) = leg.format().telephone_event.expect("it knows them");
    for (key, number) in [("5", 5), ("#", 11)] {
        tell(&mut control, "sndcode", key).await;
        event(
            &mut leg,
            |e| matches!(e, LegEvent::Rtp(packet) if packet.payload_type == keys && packet.payload[0] == number),
        )
        .await;
    }

    for (command, held) in [("hold", true), ("resume", false)] {
        tell(&mut control, command, "").await;
        assert_eq!(event(&mut leg, |e| matches!(e, LegEvent::Held(_))).await, LegEvent::Held(held));
    }
    hold(&mut leg, true).await.expect("it lets itself be held");
    hold(&mut leg, false).await.expect("and resumed");

    // It calls whom it is sent to, and tells us how that went.
    let target = format!("sip:expert@{}", expert.local_udp().expect("bound"));
    transfer(&mut leg, &target, false).await.expect("it takes the transfer on");
    let mut there = limited(limited(asked.recv()).await.expect("a call").accept()).await.expect("accepted");
    there.attach().await.expect("attaches");
    event(&mut there, |e| *e == LegEvent::Connected).await;
    event(&mut there, |e| matches!(e, LegEvent::Rtp(_))).await;
    let ended = event(&mut leg, |e| matches!(e, LegEvent::TransferEnded(_))).await;
    assert_eq!(ended, LegEvent::TransferEnded(Ok(())));
    event(&mut leg, |e| matches!(e, LegEvent::Closed(_))).await;
    there.hang_up().await;
    within("every call to be forgotten", || endpoint.calls() + expert.calls() == 0).await;
    telephone.start_kill().ok();
    tokio::time::timeout(Duration::from_secs(5), telephone.wait()).await.ok();
}
