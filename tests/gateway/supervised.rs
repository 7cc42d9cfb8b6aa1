//! Parts that calls cannot do without panic: the gateway says so, calls that are up go on, and the program ends to be started
//! anew. The panics are those of `fault-injection`, which tests alone switch on.

use std::path::Path;
use std::time::Duration;

use antiphon::call::TurnRequest;
use antiphon::config::EngineKind;
use antiphon::fault;
use antiphon::server::config::Tls;
use antiphon::sip::TlsConfig;
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::sip::{self, Transport};
use antiphon_loadgen::speak::Idle;
use tokio::time::timeout;

use super::acme::handshake;
use super::program::Serve;
use super::raw::{Raw, sdp};
use super::support::{PATIENCE, Rig, SENTENCE, gaps, hear_turn, hear_turn_at_last};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_part_that_panics_makes_the_gateway_unready_and_calls_go_on() {
    for (part, shown) in [("sip", "sip"), ("sip socket", "sip"), ("dispatcher", "dispatcher")] {
        let rig = Rig::start().await;
        let call = rig.telephone("silent", Codec::Pcmu).await;
        let asked = rig.speak(&call, "One moment, please.").await;
        let onset = call.onset(asked, PATIENCE).await.expect("speech is heard");
        assert!(rig.app.gateway().faults().is_empty());
        fault::arm(part, rig.sip_udp().port());
        let mut telephone = Raw::new(rig.sip_udp(), "unlucky").await;
        let invite = telephone.request("INVITE", "", &sdp(4_000, ""));
        let unready = async {
            loop {
                // Again, as a telephone does that hears nothing.
                telephone.send(&invite).await;
                let (status, body) = rig.get("/readyz").await;
                if status == 503 {
                    return body;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        let body = timeout(PATIENCE, unready).await.expect("it is noticed");
        assert_eq!((&body["ready"], &body["faults"][0]["part"]), (&false.into(), &shown.into()), "{body}");
        // `serve` ends for such a fault.
        let faults = rig.app.gateway().faults();
        assert!(faults.iter().any(|fault| fault.part == shown && fault.fatal && !fault.mends), "{faults:?}");
        let (_, end) = hear_turn(&call, asked).await;
        let stalls = gaps(&call.ear().heard(), onset, end);
        assert!(stalls.is_empty(), "{part}: {stalls:?}");
        rig.app.drain().await;
    }
}

#[tokio::test]
async fn the_program_ends_with_an_error_when_a_part_is_gone_that_only_a_new_process_brings_back() {
    let (folder, state) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let mut program = Serve::start(folder.path(), state.path(), |command| {
        command.env("ANTIPHON_PANIC_IN", "dispatcher").env("ANTIPHON_ENGINE__KIND", "tone");
    });
    program.ready().await;
    let mut telephone = Raw::new(program.sip, "unlucky").await;
    let invite = telephone.request("INVITE", "", &sdp(4_000, ""));
    telephone.send(&invite).await;
    assert_eq!(program.ended().await, Some(1));
}

#[tokio::test]
async fn a_dead_name_server_leaves_a_gateway_ready() {
    let (folder, state) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let file = folder.path().join("gateway.toml");
    // Names below `invalid` are nowhere (RFC 6761 section 6.4), so every question fails.
    let trunk = "[[sip.trunk]]\nname = \"gone\"\nhost = \"carrier.invalid\"\nprefixes = [\"+49\"]\nusername = \"u\"\n\
                 password = \"long-enough\"\nregister = true\n";
    std::fs::write(&file, trunk).expect("written");
    let mut program = Serve::start(folder.path(), state.path(), |command| {
        command.arg("-c").arg(&file).env("ANTIPHON_ENGINE__KIND", "tone");
    });
    program.ready().await;
    let placing = reqwest::Client::new()
        .post(format!("{}/v1/calls?wait=answer", program.http))
        .json(&serde_json::json!({ "to": "+49301234567", "ringTimeoutS": 10 }))
        .send();
    let placing = tokio::spawn(placing);
    // Meanwhile, and after it.
    let mut telephone = Raw::new(program.sip, "meanwhile").await;
    telephone.ask("OPTIONS", "", "", "SIP/2.0 200").await;
    let status = timeout(PATIENCE, placing).await.expect("answered").expect("no panic").expect("HTTP").status();
    assert!(!status.is_success(), "{status}");
    program.ready().await;
    assert_eq!(program.terminate().await, Some(0));
}

/// HTTPS and SIP over TLS, with fifty calls whose signalling is on connections of the old certificate.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_certificate_is_taken_up_beside_fifty_calls() {
    const CALLS: usize = 50;
    const SPEAKING: usize = 4;
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let folder = tempfile::tempdir().expect("a folder");
    let (cert, key) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
    let put = |from: &str, from_key: &str| {
        // The key first: a pair that does not fit is told of and left, until the other half is there.
        std::fs::copy(data.join(from_key), &key).expect("copied");
        std::fs::copy(data.join(from), &cert).expect("copied");
    };
    put("sip/test-only-cert.pem", "sip/test-only-key.pem");
    let rig = Rig::with(|config| {
        config.engine.kind = EngineKind::Tone;
        config.http.tls = Some(Tls { cert: cert.clone(), key: key.clone() });
        config.sip.tls = Some(TlsConfig { bind: ([127, 0, 0, 1], 0).into(), cert: cert.clone(), key: key.clone() });
    })
    .await;
    let sip_tls = rig.app.gateway().sip.as_ref().and_then(|sip| sip.local_tls()).expect("SIP listens");
    // Each question on a connection of its own, which is what a certificate is for.
    let shown = async || {
        let of = async |address| handshake(address, "localhost", &[]).await.expect("TLS").0;
        [of(rig.app.http()).await, of(sip_tls).await]
    };
    let first = shown().await;
    let mut calls = Vec::new();
    for _ in 0..CALLS {
        let idle = Idle::KeepAlive(Duration::from_secs(1));
        let config = sip::Config {
            transport: Transport::Tls,
            codecs: vec![Codec::Pcmu],
            idle,
            patience: PATIENCE,
            ..sip::Config::default()
        };
        let telephone = sip::Caller::bind(config).await.expect("free ports");
        calls.push(telephone.call(&format!("sip:silent@{sip_tls}")).await.expect("answered"));
    }
    // Some speak all the while; that all of them do is a matter of how fast this computer is.
    let asked = antiphon_loadgen::call::now();
    for call in &calls[..SPEAKING] {
        rig.handle(call).await.speak(TurnRequest::new(SENTENCE.repeat(2))).await.expect("taken");
    }
    let mut onsets = Vec::new();
    for call in &calls[..SPEAKING] {
        onsets.push(call.onset(asked, PATIENCE).await.expect("speech is heard"));
    }
    put("cluster/node.pem", "cluster/node-key.pem");
    let swapped = async {
        loop {
            let now = shown().await;
            if now[0] != first[0] && now[1] != first[1] {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    timeout(PATIENCE, swapped).await.expect("both show the other one");
    for (call, onset) in calls[..SPEAKING].iter().zip(onsets) {
        let (_, end) = hear_turn_at_last(call, asked).await;
        let stalls = gaps(&call.ear().heard(), onset, end);
        assert!(stalls.is_empty(), "{stalls:?}");
    }
    for call in &calls {
        // On the connection that it has had all the time.
        call.hold(true).await.expect("the gateway answers");
        assert!(call.status().end.is_none());
    }
    assert_eq!(rig.app.gateway().calls.count(), CALLS);
    for call in &calls {
        call.hang_up().await;
    }
    rig.app.drain().await;
}
