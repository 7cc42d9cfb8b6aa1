//! A sipp scenario for each thing that carriers ask for, or of us, in a call. Where sound is concerned, what is heard counts: sipp
//! sends back what it gets.

use std::{
    net::{SocketAddr, UdpSocket as StdUdpSocket},
    process::Output,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU16, Ordering},
    },
    time::Duration,
};

use antiphon::{
    media::{
        leg::{LegEnd, LegEvent, MediaLeg, OutPacket},
        sip::SipLeg,
    },
    sip::{DialRequest, Endpoint, IncomingCall, SipConfig, TrunkConfig},
};
use bytes::Bytes;
use tokio::{net::UdpSocket, sync::mpsc, task::JoinHandle};

use crate::{
    sipp::{free_port, have_sipp, sipp},
    support::{event, hold, limited, loopback, picked_up, start, transfer, within},
};

/// An even port that sipp may take for sound, with the one two above it, which it takes for pictures. Below the system's ephemeral
/// ports, of which another test could be given this one before sipp binds it.
fn media_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Tests run side by side, each in a process of its own.
    let first = (std::process::id() % 1_000) as u16 * 8;
    let free = |port: u16| StdUdpSocket::bind(("127.0.0.1", port)).is_ok();
    std::iter::repeat_with(|| 12_000 + (first + 4 * NEXT.fetch_add(1, Ordering::Relaxed)) % 8_000)
        .find(|&base| free(base) && free(base + 2))
        .expect("without end")
}

/// A sipp that answers or calls, and sends back what it hears.
struct Peer {
    port: u16,
    scenario: &'static str,
    running: JoinHandle<Output>,
}

impl Peer {
    /// One that is called.
    fn answers(scenario: &'static str, keys: &[(&str, &str)]) -> Peer {
        Peer::run(scenario, keys, None)
    }

    /// One that calls `endpoint`.
    fn calls(scenario: &'static str, endpoint: &Endpoint, keys: &[(&str, &str)]) -> Peer {
        Peer::run(scenario, keys, endpoint.local_udp())
    }

    fn run(scenario: &'static str, keys: &[(&str, &str)], target: Option<SocketAddr>) -> Peer {
        let (port, media) = (free_port(), media_port());
        let mut arguments = vec!["-m".to_owned(), "1".to_owned(), "-rtp_echo".to_owned()];
        arguments.extend(["-mp".to_owned(), media.to_string()]);
        for (key, value) in keys {
            arguments.extend(["-key".to_owned(), (*key).to_owned(), (*value).to_owned()]);
        }
        arguments.extend(target.map(|target| target.to_string()));
        let running = tokio::spawn(async move {
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            sipp(scenario, port, &arguments).await
        });
        Peer { port, scenario, running }
    }

    fn at(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// It has ended, and all was as it expected.
    async fn content(self) {
        let output = limited(self.running).await.expect("runs");
        assert!(output.status.success(), "{}", self.scenario);
    }
}

/// An endpoint with one trunk at `host`.
async fn with_trunk(host: &str, more: &str) -> (Endpoint, mpsc::Receiver<IncomingCall>) {
    let trunk = format!("name = \"c\"\nhost = \"{host}\"\ncodecs = [\"pcmu\"]\nprefixes = [\"+49\"]\n{more}");
    let trunk: TrunkConfig = toml::from_str(&trunk).expect("valid");
    start(SipConfig { trunk: vec![trunk], ..loopback() }).await
}

async fn dial(endpoint: &Endpoint) -> SipLeg {
    let request =
        DialRequest { to: "+49301234".to_owned(), from: Some("+4930555".to_owned()), ..DialRequest::default() };
    let mut leg = limited(endpoint.dial(request)).await.expect("answered");
    leg.attach().await.expect("attaches");
    leg
}

/// Takes a call that rings.
async fn connected(calls: &mut mpsc::Receiver<IncomingCall>) -> SipLeg {
    let mut leg = picked_up(calls).await;
    event(&mut leg, |e| *e == LegEvent::Connected).await;
    leg
}

/// The call is heard, and we end it: `peer` has seen what it expected, and nothing of it is left.
async fn heard_and_ended(mut leg: SipLeg, peer: Peer, endpoint: &Endpoint) {
    hears_itself(&mut leg).await;
    leg.hang_up().await;
    done(peer, endpoint).await;
}

/// `peer` has ended the call.
async fn ended_by(mut leg: SipLeg, peer: Peer, endpoint: &Endpoint) {
    assert_eq!(closed(&mut leg).await, LegEvent::Closed(LegEnd::Remote));
    done(peer, endpoint).await;
}

async fn done(peer: Peer, endpoint: &Endpoint) {
    peer.content().await;
    within("every call to be forgotten", || endpoint.calls() == 0).await;
}

/// Sends sound until it has come back from the other side.
async fn hears_itself(leg: &mut SipLeg) {
    let payload = Bytes::from((0..160_u32).map(|n| (n * 7 % 251) as u8).collect::<Vec<_>>());
    let mut frames = tokio::time::interval(Duration::from_millis(20));
    let mut sequence = 0_u16;
    limited(async {
        loop {
            tokio::select! {
                _ = frames.tick() => {
                    let packet = OutPacket {
                        payload_type: leg.format().payload_type,
                        marker: sequence == 0,
                        sequence,
                        timestamp: u32::from(sequence) * 160,
                        payload: payload.clone(),
                    };
                    leg.send(packet).await.expect("the leg is up");
                    sequence += 1;
                }
                event = leg.recv() => match event {
                    LegEvent::Rtp(packet) if packet.payload == payload => return,
                    LegEvent::Closed(end) => panic!("the call ended: {end:?}"),
                    _ => {}
                }
            }
        }
    })
    .await;
}

async fn closed(leg: &mut SipLeg) -> LegEvent {
    event(leg, |e| matches!(e, LegEvent::Closed(_))).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_carrier_gets_numbers_that_say_so() {
    if !have_sipp() {
        return;
    }
    let carrier = Peer::answers("quirk-user-phone", &[]);
    let (endpoint, _calls) = with_trunk(&carrier.at(), "user_phone = true").await;
    let leg = dial(&endpoint).await;
    heard_and_ended(leg, carrier, &endpoint).await;
}

/// What a carrier at another port was sent there.
type Methods = Arc<Mutex<Vec<String>>>;

/// A port that passes on to `carrier` what comes, and answers back.
async fn door(carrier: SocketAddr) -> (SocketAddr, Methods) {
    let socket = UdpSocket::bind("127.0.0.1:0").await.expect("binds");
    let at = socket.local_addr().expect("bound");
    let methods = Methods::default();
    let seen = methods.clone();
    tokio::spawn(async move {
        let (mut buffer, mut caller) = ([0; 65_536], None);
        loop {
            let Ok((length, from)) = socket.recv_from(&mut buffer).await else { continue };
            let to = if from == carrier { caller } else { Some(carrier) };
            if from != carrier {
                caller = Some(from);
                let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
                let method = text.split(' ').next().unwrap_or_default().to_owned();
                seen.lock().expect("sound").push(method);
            }
            if let Some(to) = to {
                socket.send_to(&buffer[..length], to).await.ok();
            }
        }
    });
    (at, methods)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_carrier_is_followed_to_the_port_of_its_answer() {
    if !have_sipp() {
        return;
    }
    let carrier = Peer::answers("quirk-port", &[]);
    let (at, methods) = door(carrier.at().parse().expect("an address")).await;
    let (endpoint, _calls) = with_trunk(&at.to_string(), "").await;
    let leg = dial(&endpoint).await;
    heard_and_ended(leg, carrier, &endpoint).await;
    let methods = methods.lock().expect("sound").clone();
    assert!(!methods.is_empty() && methods.iter().all(|method| method == "INVITE"), "{methods:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_goes_on_to_the_next_host_and_to_where_it_is_sent() {
    if !have_sipp() {
        return;
    }
    for (first, second) in [("unavailable", "plain"), ("moved", "moved-here")] {
        let next = Peer::answers(second, &[]);
        let first = Peer::answers(first, &[("elsewhere", &next.at())]);
        let targets = format!("targets = [{{ host = \"{}\", priority = 0 }}]\nredirects = 1", first.at());
        let (endpoint, _calls) = with_trunk(&next.at(), &targets).await;
        let mut leg = dial(&endpoint).await;
        hears_itself(&mut leg).await;
        leg.hang_up().await;
        // Who says 503 is left alone for a while.
        let blocked = endpoint.trunks()[0].targets.iter().filter(|target| target.blocked).count();
        assert_eq!(blocked, usize::from(second == "plain"));
        first.content().await;
        done(next, &endpoint).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_who_pick_up_the_first_has_the_call() {
    if !have_sipp() {
        return;
    }
    let carrier = Peer::answers("fork", &[]);
    let (endpoint, _calls) = with_trunk(&carrier.at(), "").await;
    let mut leg = dial(&endpoint).await;
    hears_itself(&mut leg).await;
    // The second answer is ended by the stack, in its own time: the scenario takes the end of that one first.
    tokio::time::sleep(Duration::from_millis(500)).await;
    leg.hang_up().await;
    done(carrier, &endpoint).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_go_by_info_both_ways() {
    if !have_sipp() {
        return;
    }
    let (endpoint, mut calls) = start(loopback()).await;
    let caller = Peer::calls("info", &endpoint, &[]);
    let mut leg = connected(&mut calls).await;
    let mut typed = String::new();
    while typed != "5#" {
        match limited(leg.recv()).await {
            LegEvent::Digit(digit) => typed.push(digit),
            LegEvent::Closed(_) => break,
            _ => {}
        }
    }
    assert_eq!(typed, "5#");
    ended_by(leg, caller, &endpoint).await;

    let carrier = Peer::answers("info-typed", &[]);
    let (endpoint, _calls) = with_trunk(&carrier.at(), "dtmf = \"info\"").await;
    let mut leg = dial(&endpoint).await;
    event(&mut leg, |e| *e == LegEvent::Connected).await;
    leg.dial("5*d").expect("digits go by INFO");
    hears_itself(&mut leg).await;
    // A BYE would overtake them.
    tokio::time::sleep(Duration::from_millis(500)).await;
    leg.hang_up().await;
    done(carrier, &endpoint).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_is_sent_to_somebody_else_and_tells_how_that_goes() {
    if !have_sipp() {
        return;
    }
    let (endpoint, mut calls) = with_trunk("127.0.0.1:9", "").await;
    let caller = Peer::calls("referred", &endpoint, &[]);
    let mut leg = connected(&mut calls).await;
    hears_itself(&mut leg).await;
    limited(transfer(&mut leg, "+49301234", false)).await.expect("taken on");
    let mut steps = Vec::new();
    loop {
        match limited(leg.recv()).await {
            LegEvent::TransferProgress(status) => steps.push(status),
            LegEvent::TransferEnded(outcome) => break outcome.expect("they talk"),
            _ => {}
        }
    }
    assert_eq!(steps, [100, 180, 200]);
    assert_eq!(closed(&mut leg).await, LegEvent::Closed(LegEnd::Local));
    done(caller, &endpoint).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transfer_that_comes_to_nothing_leaves_the_call_as_it_was() {
    if !have_sipp() {
        return;
    }
    let (endpoint, mut calls) = with_trunk("127.0.0.1:9", "").await;
    let caller = Peer::calls("referred-busy", &endpoint, &[]);
    let mut leg = connected(&mut calls).await;
    limited(transfer(&mut leg, "+49301234", false)).await.expect("taken on");
    let ended = event(&mut leg, |e| matches!(e, LegEvent::TransferEnded(_))).await;
    assert!(matches!(&ended, LegEvent::TransferEnded(Err(why)) if why.contains("486")), "{ended:?}");
    hears_itself(&mut leg).await;
    let refused = limited(transfer(&mut leg, "+49301235", false)).await.expect_err("declined");
    assert!(refused.contains("603"), "{refused}");
    ended_by(leg, caller, &endpoint).await;
}

/// Blind, and after a call to the target, which is named to it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_carrier_hands_its_call_over_and_the_agent_hears_the_new_party() {
    if !have_sipp() {
        return;
    }
    for (caller, target) in [("refer", "plain"), ("refer-attended", "refer-target")] {
        let target = Peer::answers(target, &[]);
        let (endpoint, mut calls) = with_trunk(&target.at(), "refer = true").await;
        let caller = Peer::calls(caller, &endpoint, &[("host", &target.at())]);
        let mut leg = connected(&mut calls).await;
        let moved = event(&mut leg, |e| matches!(e, LegEvent::Moved(_))).await;
        assert!(matches!(&moved, LegEvent::Moved(to) if to.contains("+49305678")), "{moved:?}");
        event(&mut leg, |e| *e == LegEvent::Connected).await;
        caller.content().await;
        // The first call is gone: it is the other party that is heard.
        heard_and_ended(leg, target, &endpoint).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_is_put_in_the_place_of_another() {
    if !have_sipp() {
        return;
    }
    let (endpoint, mut calls) = with_trunk("127.0.0.1:9", "").await;
    let caller = Peer::calls("replaces", &endpoint, &[]);
    let mut leg = connected(&mut calls).await;
    event(&mut leg, |e| matches!(e, LegEvent::Moved(_))).await;
    event(&mut leg, |e| *e == LegEvent::Connected).await;
    within("the first call to be forgotten", || endpoint.calls() == 1).await;
    heard_and_ended(leg, caller, &endpoint).await;
    assert!(calls.try_recv().is_err(), "it is no call of its own");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_that_meets_another_change_comes_again() {
    if !have_sipp() {
        return;
    }
    let (endpoint, mut calls) = start(loopback()).await;
    let caller = Peer::calls("glare", &endpoint, &[]);
    let mut leg = connected(&mut calls).await;
    hears_itself(&mut leg).await;
    limited(hold(&mut leg, true)).await.expect("held in the end");
    ended_by(leg, caller, &endpoint).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_in_the_description_are_taken_and_demanded() {
    if !have_sipp() {
        return;
    }
    let (endpoint, mut calls) = with_trunk("127.0.0.1:9", "srtp = \"required\"").await;
    let caller = Peer::calls("sdes", &endpoint, &[]);
    let leg = connected(&mut calls).await;
    assert!(leg.encrypted());
    ended_by(leg, caller, &endpoint).await;
    done(Peer::calls("sdes-plain", &endpoint, &[]), &endpoint).await;
}
