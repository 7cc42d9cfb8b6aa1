//! Attended transfers with linphone, a telephone program that shares no code with us and knows Replaces (RFC 3891): it consults
//! somebody and hands its call over, and is handed over itself. What counts is who hears whom afterwards. Without it the
//! tests are skipped, and counted; continuous integration has it.

use std::{net::SocketAddr, process::Stdio};

use antiphon::{
    media::{
        leg::{Codec, LegEnd, LegEvent, MediaLeg},
        sip::SipLeg,
    },
    sip::{CodecName, Endpoint, IncomingCall, SipConfig},
};
use antiphon_loadgen::codec;
use tokio::{
    io::AsyncWriteExt,
    process::{Child, ChildStdin, Command},
    sync::mpsc,
};

use crate::{
    baresip::{share_of_the_tone, tone},
    sipp::free_port,
    support::{event, limited, loopback, picked_up, speak_until_heard, start, transfer, within},
};

fn have_linphone() -> bool {
    antiphon_skip::has_program("linphonec", "linphone-cli")
}

/// A telephone whose microphone is a tone from a file, and which does as it is told by lines.
struct Telephone {
    process: Child,
    lines: ChildStdin,
    _folder: tempfile::TempDir,
}

impl Telephone {
    async fn start() -> Telephone {
        let folder = tempfile::tempdir().expect("a folder");
        let (port, media) = (free_port(), free_port() & !1);
        // Loopback is enough: no name servers, no STUN, no account. The key of the migration keeps what is said of IPv6.
        let config = format!(
            "[sip]\nsip_port={port}\nsip_tcp_port=0\nsip_tls_port=0\nuse_ipv6=0\nipv6_migration_done=1\n[rtp]\n\
             audio_rtp_port={media}\n[net]\nfirewall_policy=0\ndns_srv_enabled=0\n[video]\ncapture=0\ndisplay=0\n\
             automatically_initiate=0\nautomatically_accept=0\n"
        );
        // Without a place for its database it starts and opens no socket.
        std::fs::create_dir_all(folder.path().join(".local/share/linphone")).expect("creates");
        std::fs::write(folder.path().join("linphonerc"), config).expect("writes");
        tone(&folder.path().join("tone.wav"), Codec::Pcmu);
        let mut process = Command::new("linphonec")
            .current_dir(folder.path())
            .env("HOME", folder.path())
            .args(["-c", "linphonerc"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .expect("linphone runs");
        let lines = process.stdin.take().expect("piped");
        let mut telephone = Telephone { process, lines, _folder: folder };
        telephone.told("soundcard use files").await;
        telephone
    }

    async fn told(&mut self, line: &str) {
        self.lines.write_all(format!("{line}\n").as_bytes()).await.expect("it listens");
        self.lines.flush().await.expect("it listens");
    }

    /// Calls `user` at `endpoint`, which picks up.
    async fn calls(&mut self, user: &str, endpoint: &Endpoint, calls: &mut mpsc::Receiver<IncomingCall>) -> SipLeg {
        let at = endpoint.local_udp().expect("bound");
        self.told(&format!("call sip:{user}@{at}")).await;
        let mut leg = picked_up(calls).await;
        event(&mut leg, |e| *e == LegEvent::Connected).await;
        self.told("play tone.wav").await;
        leg
    }
}

/// Takes calls at `at`. Who transfers and who is transferred come from one exchange, so that they may.
async fn taking(at: SocketAddr) -> (Endpoint, mpsc::Receiver<IncomingCall>) {
    let trunk = toml::from_str("name = \"pbx\"\nhost = \"127.0.0.1:9\"\nrefer = true").expect("valid");
    let config =
        SipConfig { udp: Some(at), tcp: None, trunk: vec![trunk], codecs: vec![CodecName::Pcmu], ..loopback() };
    start(config).await
}

/// A telephone whose user talks to the agent, and somebody else who can be called.
struct Talk {
    agent: Endpoint,
    _agents: mpsc::Receiver<IncomingCall>,
    expert: Endpoint,
    experts: mpsc::Receiver<IncomingCall>,
    telephone: Telephone,
    /// The agent's side of the call.
    leg: SipLeg,
}

impl Talk {
    async fn begin() -> Talk {
        let (agent, mut agents) = taking(([127, 0, 0, 1], 0).into()).await;
        let (expert, experts) = taking(usual_port()).await;
        let mut telephone = Telephone::start().await;
        let mut leg = telephone.calls("demo", &agent, &mut agents).await;
        hears_the_tone(&mut leg).await;
        Talk { agent, _agents: agents, expert, experts, telephone, leg }
    }
}

/// Linphone leaves the port out of where it sends a call, so who is meant then is at the usual one, of an address of its own.
fn usual_port() -> SocketAddr {
    let octet = || rand::random_range(1..=254);
    SocketAddr::from(([127, octet(), octet(), octet()], 5_060))
}

/// Waits until the tone of the telephone is what comes.
async fn hears_the_tone(leg: &mut SipLeg) {
    let payload_type = leg.format().payload_type;
    let mut decoder = codec::Decoder::new(codec::Codec::Pcmu, 8_000).expect("a codec");
    let mut heard: Vec<f32> = Vec::new();
    let half = decoder.rate() as usize / 2;
    limited(async {
        loop {
            let LegEvent::Rtp(packet) = leg.recv().await else { continue };
            if packet.payload_type != payload_type {
                continue;
            }
            let mut pcm = Vec::new();
            decoder.decode(&packet.payload, &mut pcm).expect("decodes");
            heard.extend(pcm.into_iter().map(codec::from_i16));
            if heard.len() >= half && share_of_the_tone(&heard[heard.len() - half..], decoder.rate()) > 0.9 {
                return;
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn linphone_consults_somebody_and_hands_its_call_over() {
    if !have_linphone() {
        return;
    }
    let Talk { agent, _agents, expert, mut experts, mut telephone, leg: mut first } = Talk::begin().await;
    telephone.told("pause").await;
    event(&mut first, |e| *e == LegEvent::Held(true)).await;
    let mut second = telephone.calls("expert", &expert, &mut experts).await;
    telephone.told("transfer 1 --to-call 2").await;
    // Each goes over to the other, and nobody else is left.
    let (one, two) = tokio::join!(
        event(&mut first, |e| matches!(e, LegEvent::Moved(_) | LegEvent::Closed(_))),
        event(&mut second, |e| matches!(e, LegEvent::Moved(_) | LegEvent::Closed(_)))
    );
    assert!(matches!((&one, &two), (LegEvent::Moved(_), LegEvent::Moved(_))), "{one:?} {two:?}");
    within("the telephone to be gone", || (agent.calls(), expert.calls()) == (1, 1)).await;
    speak_until_heard(&mut first, &mut second).await;
    speak_until_heard(&mut second, &mut first).await;
    first.hang_up().await;
    let closed = event(&mut second, |e| matches!(e, LegEvent::Closed(_))).await;
    assert_eq!(closed, LegEvent::Closed(LegEnd::Remote));
    telephone.process.kill().await.expect("ends");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn linphone_is_handed_over_to_who_was_consulted_for_it() {
    if !have_linphone() {
        return;
    }
    let Talk { agent, _agents, expert, mut experts, mut telephone, leg: mut first } = Talk::begin().await;
    let to = format!("sip:expert@{}", expert.local_udp().expect("bound"));
    let (taken, mut second) =
        limited(async { tokio::join!(transfer(&mut first, &to, true), picked_up(&mut experts)) }).await;
    taken.expect("taken on");
    let ended = event(&mut first, |e| matches!(e, LegEvent::TransferEnded(_) | LegEvent::Closed(_))).await;
    assert_eq!(ended, LegEvent::TransferEnded(Ok(())));
    event(&mut second, |e| matches!(e, LegEvent::Moved(_))).await;
    within("the first call to be forgotten", || (agent.calls(), expert.calls()) == (0, 1)).await;
    hears_the_tone(&mut second).await;
    telephone.told("terminate").await;
    event(&mut second, |e| matches!(e, LegEvent::Closed(_))).await;
    telephone.process.kill().await.expect("ends");
}
