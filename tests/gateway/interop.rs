//! Other people's programs use the whole gateway: sipp, baresip, aiortc and Chromium call it and hear the greeting,
//! OpenAI's client has it speak. One that is not installed is skipped, and counted; continuous integration has all.

use std::path::Path;
use std::process::{Output, Stdio};
use std::time::Duration;

use antiphon::agent::builtin::GREETING;
use antiphon_loadgen::{correlate, wav};
use audio_codec::Decoder;
use audio_codec::pcmu::PcmuDecoder;
use tokio::net::UdpSocket;
use tokio::process::Command;
use tokio::time::timeout;

use super::support::{PATIENCE, Rig};

/// A browser starts slowly on a loaded machine, and a script may have to install what it needs first.
const SCRIPT: Duration = Duration::from_secs(240);
/// What the scripts exit with when their program is not there.
const SKIPPED: i32 = 77;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sipp_hears_the_greeting() {
    if !antiphon_skip::has_program("sipp", "sip-tester") {
        return;
    }
    let rig = Rig::start().await;
    // The scenario tells the gateway to send media here; sipp itself has no ears.
    let ear = UdpSocket::bind("127.0.0.1:0").await.expect("a free port");
    let port = ear.local_addr().expect("bound").port().to_string();
    let listening = tokio::spawn(async move {
        let mut packet = [0; 2_048];
        let mut loud = 0;
        while loud < 25 {
            let length = ear.recv(&mut packet).await.expect("open");
            // A header of 12 bytes, then G.711 mu-law.
            let pcm = PcmuDecoder::new().decode(packet.get(12..length).unwrap_or_default());
            let power: f64 = pcm.iter().map(|s| f64::from(*s).powi(2)).sum::<f64>() / pcm.len().max(1) as f64;
            loud += usize::from(power > 1e5);
        }
    });
    let folder = tempfile::tempdir().expect("a folder");
    let scenario = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/sip/listen.xml");
    let output = Command::new("sipp")
        .current_dir(folder.path())
        .arg("-sf")
        .arg(scenario)
        .args(["-nostdin", "-i", "127.0.0.1", "-m", "1", "-s", "demo", "-key", "ear", &port])
        .args(["-timeout", "25s", "-timeout_error", &rig.sip_udp().to_string()])
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = timeout(PATIENCE, output).await.expect("sipp ends").expect("sipp runs");
    assert!(output.status.success(), "{}", text(&output));
    timeout(PATIENCE, listening).await.expect("the greeting is heard").expect("no panic");
    rig.app.drain().await;
}

/// Sends silence from a file, keeps what it decodes in another; needs no sound card and no network but loopback.
const BARESIP: &str = "
sip_listen 127.0.0.1:0
audio_player aufile,unused
audio_source aufile,silence.wav
net_interface 127.0.0.1
snd_path .
module_path /usr/lib/baresip/modules
module g711.so
module aufile.so
module sndfile.so
module_tmp account.so
module_app menu.so
";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn baresip_hears_the_greeting() {
    if !antiphon_skip::has_program("baresip", "baresip-core") {
        return;
    }
    let rig = Rig::start().await;
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str| folder.path().join(name);
    std::fs::write(file("config"), BARESIP).expect("writes");
    std::fs::write(file("accounts"), "<sip:telephone@127.0.0.1>;regint=0\n").expect("writes");
    std::fs::write(file("contacts"), "").expect("writes");
    let spec = hound::WavSpec {
        channels: 1,
        sample_rate: 8_000,
        bits_per_sample: 16,
        sample_format: hound::SampleFormat::Int,
    };
    let mut silence = hound::WavWriter::create(file("silence.wav"), spec).expect("creates");
    (0..8_000 * 20).for_each(|_| silence.write_sample(0i16).expect("writes"));
    silence.finalize().expect("writes");
    let dial = format!("/dial sip:demo@{}", rig.sip_udp());
    let output = Command::new("baresip")
        .current_dir(folder.path())
        .args(["-f", ".", "-t", "12", "-e", &dial])
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    timeout(PATIENCE, output).await.expect("baresip ends").expect("baresip runs");
    let kept = std::fs::read_dir(folder.path())
        .expect("readable")
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.to_string_lossy().ends_with("-dec.wav"))
        .expect("baresip kept what it heard");
    let heard = wav::read(kept).expect("a sound file");
    let found = correlate::correlate(&heard, &rig.reference(GREETING).await).expect("comparable rates");
    assert!(found.found > 0.5, "{found:?}");
    rig.app.drain().await;
}

/// Runs a script of `tests/interop` with `program` against a gateway of its own; `client` is what it needs.
async fn script(client: &str, program: &str, name: &str, arguments: &[&str]) {
    let rig = Rig::start().await;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop").join(name);
    let output = Command::new(program)
        .arg(script)
        .arg(&rig.http)
        .args(arguments)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = timeout(SCRIPT, output).await.expect("the script ends").expect("the script runs");
    if output.status.code() == Some(SKIPPED) {
        antiphon_skip::skip(client, text(&output).replace('\n', " "));
    } else {
        assert!(output.status.success(), "{}", text(&output));
    }
    rig.app.drain().await;
}

fn text(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    format!("{}\n{out}\n{err}", output.status)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_openai_client_speaks_unchanged() {
    script("openai", "sh", "openai.sh", &[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn aiortc_hears_the_greeting() {
    script("aiortc", "sh", "aiortc.sh", &[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chromium_hears_the_greeting() {
    script("chromium", "python3", "chromium_call.py", &[]).await;
}
