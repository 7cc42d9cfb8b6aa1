//! Calls with sipp, which shares no code with us. Scenarios are in `tests/data/sip/`. Without sipp the tests are
//! skipped, and counted; continuous integration has it.

use std::{
    net::UdpSocket as StdUdpSocket,
    path::Path,
    process::{Output, Stdio},
    time::Duration,
};

use crate::support::{limited, loopback, start, within};
use antiphon::{
    media::{
        leg::{Codec, LegEnd, LegEvent, MediaLeg, OutPacket},
        sip::SipLeg,
    },
    sip::{DialError, DialRequest, Endpoint, IncomingCall, Provisional, SipConfig, TrunkConfig, User},
};
use tokio::{process::Command, sync::mpsc, task::JoinHandle, time::timeout};

/// Longest a scenario runs.
const SCENARIO: Duration = Duration::from_secs(30);

pub(crate) fn have_sipp() -> bool {
    antiphon_skip::has_program("sipp", "sip-tester")
}

/// Runs a scenario. `port` is sipp's own.
pub(crate) async fn sipp(scenario: &str, port: u16, arguments: &[&str]) -> Output {
    let folder = tempfile::tempdir().expect("a folder");
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/sip/{scenario}.xml"));
    let mut command = Command::new("sipp");
    command
        .current_dir(folder.path())
        .arg("-sf")
        .arg(file)
        .args(["-nostdin", "-i", "127.0.0.1", "-p", &port.to_string()])
        .args(["-timeout", "25s", "-timeout_error", "-trace_err", "-error_file", "errors"])
        .args(arguments)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let output = timeout(SCENARIO, command.output()).await.expect("sipp ends").expect("sipp runs");
    if !output.status.success() {
        let errors = std::fs::read_to_string(folder.path().join("errors")).unwrap_or_default();
        eprintln!("sipp {scenario}: {}\n{errors}", output.status);
    }
    output
}

/// Free for datagrams and for connections.
pub(crate) fn free_port() -> u16 {
    let port = || StdUdpSocket::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a free port").port();
    std::iter::repeat_with(port)
        .find(|port| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .expect("without end")
}

/// Answers every call and sends back what it hears, silence otherwise.
fn echo(mut calls: mpsc::Receiver<IncomingCall>) -> JoinHandle<()> {
    tokio::spawn(async move {
        while let Some(call) = calls.recv().await {
            tokio::spawn(async move {
                call.ringing();
                if let Ok(mut leg) = call.accept().await {
                    leg.attach().await.expect("attaches");
                    talk(&mut leg).await;
                }
            });
        }
    })
}

async fn talk(leg: &mut SipLeg) -> LegEnd {
    let mut sequence = 0_u16;
    loop {
        match leg.recv().await {
            LegEvent::Closed(end) => return end,
            LegEvent::Rtp(packet) => {
                let timestamp = u32::from(sequence) * leg.format().codec.frame_ticks();
                let packet = OutPacket {
                    payload_type: packet.payload_type,
                    marker: sequence == 0,
                    sequence,
                    timestamp,
                    payload: packet.payload,
                };
                sequence = sequence.wrapping_add(1);
                leg.send(packet).await.ok();
            }
            _ => {}
        }
    }
}

async fn passes(endpoint: &Endpoint, scenario: &str, transport: &str, arguments: &[&str]) {
    let target =
        if transport == "t1" { endpoint.local_tcp() } else { endpoint.local_udp() }.expect("bound").to_string();
    let mut all = vec!["-t", transport, target.as_str()];
    all.extend(arguments);
    let output = sipp(scenario, free_port(), &all).await;
    assert!(output.status.success(), "scenario {scenario} over {transport}");
    within("every call to be forgotten", || endpoint.calls() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sipp_calls_over_udp_and_tcp() {
    if !have_sipp() {
        return;
    }
    let (endpoint, calls) = start(loopback()).await;
    let _echo = echo(calls);
    for transport in ["u1", "t1"] {
        for scenario in ["options", "basic", "hold"] {
            passes(&endpoint, scenario, transport, &["-m", "1"]).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sipp_calls_in_numbers_leave_nothing_behind() {
    if !have_sipp() {
        return;
    }
    let (endpoint, calls) = start(loopback()).await;
    let _echo = echo(calls);
    passes(&endpoint, "basic", "u1", &["-m", "100", "-r", "50", "-l", "50"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sipp_hears_us_before_the_answer() {
    if !have_sipp() {
        return;
    }
    let (endpoint, mut calls) = start(loopback()).await;
    let announcing = tokio::spawn(async move {
        let call = calls.recv().await.expect("a call");
        let mut leg = call.sound(&[]).await.expect("an offer");
        leg.attach().await.expect("attaches");
        call.answer(&[]).await.expect("acknowledged");
        talk(&mut leg).await
    });
    passes(&endpoint, "early", "u1", &["-m", "1"]).await;
    assert_eq!(limited(announcing).await.expect("runs"), LegEnd::Remote);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sipp_gives_up_while_it_rings() {
    if !have_sipp() {
        return;
    }
    let (endpoint, mut calls) = start(loopback()).await;
    let ringing = tokio::spawn(async move {
        let call = calls.recv().await.expect("a call");
        call.ringing();
        call.cancelled().await;
    });
    passes(&endpoint, "cancel", "u1", &["-m", "1"]).await;
    limited(ringing).await.expect("was told");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sipp_is_asked_for_a_password() {
    if !have_sipp() {
        return;
    }
    let users: Vec<User> = vec![toml::from_str("username = \"alice\"\npassword = \"wonder\"").expect("valid")];
    let (endpoint, calls) = start(SipConfig { users, ..loopback() }).await;
    let _echo = echo(calls);
    passes(&endpoint, "auth", "u1", &["-m", "1", "-au", "alice", "-ap", "wonder"]).await;
    let target = endpoint.local_udp().expect("bound").to_string();
    let output = sipp("auth", free_port(), &["-m", "1", "-au", "alice", "-ap", "guess", &target]).await;
    assert!(!output.status.success(), "a wrong password is no password");
    within("every call to be forgotten", || endpoint.calls() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sipp_is_called() {
    if !have_sipp() {
        return;
    }
    let port = free_port();
    let trunk = |transport: &str| -> TrunkConfig {
        toml::from_str(&format!(
            "name = \"{transport}\"\nhost = \"127.0.0.1:{port}\"\nusername = \"alice\"\npassword = \"wonder\"\n\
             codecs = [\"pcmu\"]\nprefixes = [\"+49\"]\ntransport = \"{transport}\""
        ))
        .expect("valid")
    };
    let (endpoint, _calls) = start(SipConfig { trunk: vec![trunk("udp"), trunk("tcp")], ..loopback() }).await;
    for (transport, name) in [("u1", "udp"), ("t1", "tcp")] {
        let carrier = tokio::spawn(async move { sipp("answer", port, &["-m", "1", "-t", transport]).await });
        let request =
            DialRequest { to: "+49301234".to_owned(), trunk: Some(name.to_owned()), ..DialRequest::default() };
        // sipp takes a moment to listen: UDP is repeated by the stack, TCP must be tried again.
        let mut leg = limited(async {
            loop {
                match endpoint.dial(request.clone()).await {
                    Ok(leg) => return leg,
                    Err(DialError::Sip(_)) => tokio::time::sleep(Duration::from_millis(100)).await,
                    Err(error) => panic!("{transport}: {error}"),
                }
            }
        })
        .await;
        leg.attach().await.expect("attaches");
        assert_eq!(leg.format().codec, Codec::Pcmu);
        leg.hang_up().await;
        assert!(carrier.await.expect("runs").status.success());
    }
    let busy = tokio::spawn(async move { sipp("busy", port, &["-m", "1"]).await });
    let result = limited(endpoint.dial(DialRequest { to: "+49301234".to_owned(), ..DialRequest::default() })).await;
    assert!(matches!(result, Err(DialError::Declined { status: 486, .. })), "{:?}", result.err());
    assert!(busy.await.expect("runs").status.success());
}

/// A trunk at `port`, and a call by it.
async fn through(port: u16) -> (Endpoint, DialRequest) {
    let trunk =
        format!("name = \"c\"\nhost = \"127.0.0.1:{port}\"\ncodecs = [\"pcmu\"]\nprefixes = [\"*\"]\nredirects = 1");
    let trunk = vec![toml::from_str(&trunk).expect("valid")];
    let (endpoint, _calls) = start(SipConfig { trunk, ..loopback() }).await;
    (endpoint, DialRequest { to: "+49301234".to_owned(), ..DialRequest::default() })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sipp_rings_reliably_and_is_elsewhere() {
    if !have_sipp() {
        return;
    }
    let port = free_port();
    let (endpoint, request) = through(port).await;
    let carrier = tokio::spawn(async move { sipp("reliable", port, &["-m", "1"]).await });
    let mut leg = limited(endpoint.dial(request.clone())).await.expect("answered by what rang");
    leg.attach().await.expect("attaches");
    assert_eq!(leg.format().codec, Codec::Pcmu);
    leg.hang_up().await;
    assert!(carrier.await.expect("runs").status.success());
    let carrier = tokio::spawn(async move { sipp("redirect", port, &["-m", "1"]).await });
    let result = limited(endpoint.dial(request)).await;
    assert!(matches!(result, Err(DialError::Declined { status: 302, .. })), "{:?}", result.err());
    assert!(carrier.await.expect("runs").status.success());
    within("every call to be forgotten", || endpoint.calls() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sipp_is_registered_with() {
    if !have_sipp() {
        return;
    }
    let port = free_port();
    let registrar = tokio::spawn(async move { sipp("register", port, &["-m", "1"]).await });
    let trunk: TrunkConfig = toml::from_str(&format!(
        "name = \"carrier\"\nhost = \"127.0.0.1:{port}\"\nusername = \"alice\"\npassword = \"wonder\"\nregister = true"
    ))
    .expect("valid");
    let (endpoint, _calls) = start(SipConfig { trunk: vec![trunk], ..loopback() }).await;
    within("the registration", || endpoint.trunks()[0].registered == Some(true)).await;
    assert_eq!(endpoint.trunks()[0].error, None);
    assert!(registrar.await.expect("runs").status.success());
}

/// What carriers are known to do, as they call. Each scenario names the thread that it comes from.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn carriers_call_in_their_own_ways() {
    if !have_sipp() {
        return;
    }
    let (endpoint, calls) = start(loopback()).await;
    let _echo = echo(calls);
    for scenario in ["quirk-late-offer", "quirk-short-timer", "quirk-two-events", "quirk-packet-time", "quirk-ping"] {
        passes(&endpoint, scenario, "u1", &["-m", "1"]).await;
    }
}

/// The same where they are called.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn carriers_are_called_in_their_own_ways() {
    if !have_sipp() {
        return;
    }
    // Whether the carrier ends the call.
    for (scenario, theirs) in
        [("quirk-hold", true), ("quirk-refresh", true), ("quirk-route", false), ("quirk-ringing-sdp", false)]
    {
        let port = free_port();
        let trunk: TrunkConfig = toml::from_str(&format!(
            "name = \"c\"\nhost = \"127.0.0.1:{port}\"\ncodecs = [\"pcmu\"]\nprefixes = [\"*\"]"
        ))
        .expect("valid");
        let (endpoint, _calls) = start(SipConfig { trunk: vec![trunk], ..loopback() }).await;
        let carrier = tokio::spawn(async move { sipp(scenario, port, &["-m", "1"]).await });
        let early = std::sync::atomic::AtomicBool::new(false);
        let tell = |told| {
            let sound = matches!(told, Provisional::EarlyMedia { status: 180 });
            early.fetch_or(sound, std::sync::atomic::Ordering::Relaxed);
        };
        let request = DialRequest { to: "+49301234".to_owned(), ..DialRequest::default() };
        let mut leg = limited(endpoint.dial_watched(request, &tell)).await.expect(scenario);
        leg.attach().await.expect("attaches");
        if theirs {
            assert_eq!(limited(talk(&mut leg)).await, LegEnd::Remote, "{scenario}");
        } else {
            leg.hang_up().await;
        }
        assert!(carrier.await.expect("runs").status.success(), "{scenario}");
        assert_eq!(early.into_inner(), scenario == "quirk-ringing-sdp", "{scenario}");
        within("every call to be forgotten", || endpoint.calls() == 0).await;
    }
}

/// One that announces from one port and answers with another: what is sent goes where the answer says.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn carriers_move_their_media_with_the_answer() {
    if !have_sipp() {
        return;
    }
    let port = free_port();
    let trunk: TrunkConfig =
        toml::from_str(&format!("name = \"c\"\nhost = \"127.0.0.1:{port}\"\ncodecs = [\"pcmu\"]\nprefixes = [\"*\"]"))
            .expect("valid");
    let (endpoint, _calls) = start(SipConfig { trunk: vec![trunk], ..loopback() }).await;
    let carrier = tokio::spawn(async move { sipp("quirk-moved-media", port, &["-m", "1"]).await });
    let (sender, early) = tokio::sync::oneshot::channel();
    let request = DialRequest { to: "+49301234".to_owned(), ..DialRequest::default() };
    let answered = limited(endpoint.dial_early(request, &|_| (), sender)).await.expect("answered");
    assert!(answered.is_none(), "its leg was there before");
    let mut leg = limited(early).await.expect("a leg");
    let announced = leg.remote().expect("the port of the announcement").port();
    leg.attach().await.expect("attaches");
    assert_eq!(limited(leg.recv()).await, LegEvent::Early { sends: false, speaks: false });
    assert_eq!(limited(leg.recv()).await, LegEvent::Connected);
    assert_eq!(leg.remote().map(|address| address.port()), Some(announced + 2));
    leg.hang_up().await;
    assert!(carrier.await.expect("runs").status.success());
    within("every call to be forgotten", || endpoint.calls() == 0).await;
}
