//! Two machines on one wire of virtual time: what leaves one reaches the other after the wire's delay.

use rsipstack::sip::Version;
use sdp::Policy;

use super::*;
use crate::clock;

const MS: Duration = Duration::from_millis(1);

fn negotiator() -> Negotiator {
    let policy = Policy { codecs: vec![sdp::Codec::Pcmu], ..Policy::default() };
    let identity = crate::media::sip::dtls::Identity::new().expect("made");
    Negotiator::new(policy, body::local_media([127, 0, 0, 1].into(), 4_000, &identity))
}

/// Caller's and called side's negotiators after INVITE and 200.
fn agreed() -> [Negotiator; 2] {
    let (mut caller, mut called) = (negotiator(), negotiator());
    let (answer, _) = called.answer(&caller.offer()).expect("the same codec");
    caller.accept(&answer).expect("an answer to it");
    [caller, called]
}

fn request(method: Method, headers: Vec<Header>, body: Vec<u8>) -> Request {
    let uri = "sip:a@b".try_into().expect("valid");
    Request { method, uri, version: Version::V2, headers: headers.into(), body }
}

fn response(status: u16, headers: Vec<Header>, body: Vec<u8>) -> Response {
    Response {
        status_code: StatusCode::from(status),
        headers: headers.into(),
        version: Version::V2,
        body,
        ..Response::default()
    }
}

/// What is under way on the wire, to which side.
enum Packet {
    Request(Request),
    Response(Response),
    Ack,
}

/// Both sides of a call, and what their legs were told.
struct World {
    now: Instant,
    began: Instant,
    sides: [Machine; 2],
    delay: Duration,
    wire: Vec<(Instant, usize, Packet)>,
    told: [Vec<String>; 2],
    over: [Option<(LegEnd, &'static str)>; 2],
    /// Side that answers nothing any more.
    dead: Option<usize>,
    random: [f64; 2],
}

impl World {
    fn new(timers: [Option<SessionTimer>; 2], now: Instant) -> World {
        let [caller, called] = agreed();
        let [one, other] = timers;
        let mut world = World {
            now,
            began: now,
            sides: [Machine::new(false, caller, one), Machine::new(true, called, other)],
            delay: 20 * MS,
            wire: Vec::new(),
            told: [Vec::new(), Vec::new()],
            over: [None, None],
            dead: None,
            random: [0.5, 0.5],
        };
        world.sides.iter_mut().for_each(|side| side.confirmed(None));
        world.drain();
        world
    }

    fn send(&mut self, to: usize, packet: Packet) {
        self.wire.push((self.now + self.delay, to, packet));
    }

    fn drain(&mut self) {
        for side in 0..2 {
            while let Some(action) = self.sides[side].poll(self.now) {
                match action {
                    Action::Signal(Signal::Media(agreed)) => {
                        self.told[side].push(if agreed.held { "held" } else { "live" }.to_owned());
                    }
                    Action::Signal(Signal::HoldAnswered(hold, outcome)) => {
                        self.told[side].push(format!("hold {hold}: {}", outcome.err().unwrap_or("ok".to_owned())));
                    }
                    Action::Signal(signal) => self.told[side].push(format!("{signal:?}")),
                    Action::Invite { headers, offer } => {
                        self.send(1 - side, Packet::Request(request(Method::Invite, headers, offer)));
                    }
                    Action::Refer { to, .. } => self.told[side].push(format!("refer {to}")),
                    Action::Digits(digits) => self.told[side].push(format!("digits {digits}")),
                    Action::EndConsultation => self.told[side].push("consultation ended".to_owned()),
                    Action::End(end, reason) => self.over[side] = self.over[side].or(Some((end, reason))),
                }
            }
        }
    }

    /// Lets time pass until `end`, event by event.
    fn run(&mut self, end: Duration) {
        let end = self.began + end;
        loop {
            self.drain();
            let packet = self.wire.iter().map(|(at, ..)| *at).min();
            let alive = |side: &usize| self.over[*side].is_none();
            let deadline = (0..2).filter(alive).filter_map(|side| self.sides[side].deadline()).min();
            let Some(next) = [packet, deadline].into_iter().flatten().min().filter(|at| *at <= end) else { break };
            self.now = self.now.max(next);
            while let Some(at) = self.wire.iter().position(|(at, ..)| *at <= self.now) {
                let (_, to, packet) = self.wire.remove(at);
                self.arrive(to, packet);
                self.drain();
            }
            for side in 0..2 {
                if self.sides[side].deadline().is_some_and(|at| at <= self.now) {
                    self.sides[side].handle_timeout(self.now);
                }
            }
        }
        self.now = end;
    }

    fn arrive(&mut self, to: usize, packet: Packet) {
        if self.dead == Some(to) {
            return;
        }
        match packet {
            Packet::Request(request) => {
                let Reply { status, headers, body } = self.sides[to].offered(self.now, &request);
                self.send(1 - to, Packet::Response(response(status.code(), headers, body.unwrap_or_default())));
            }
            Packet::Response(response) => {
                let success = response.status_code.kind() == StatusCodeKind::Successful;
                let random = self.random[to];
                self.sides[to].answered(self.now, Some(&response), random);
                if success {
                    self.send(1 - to, Packet::Ack);
                }
            }
            Packet::Ack => self.sides[to].confirmed(None),
        }
    }
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[test]
fn a_hold_and_a_resume_reach_the_other_side_and_are_answered() {
    let mut world = World::new([None, None], clock::now());
    world.sides[0].control(Control::Hold(true));
    world.run(seconds(1));
    world.sides[0].control(Control::Hold(false));
    world.run(seconds(2));
    assert_eq!(world.told[0], ["Connected", "live", "hold true: ok", "live", "hold false: ok"]);
    assert_eq!(world.told[1], ["Connected", "held", "live"]);
    assert_eq!(world.over, [None, None]);
}

#[test]
fn two_holds_that_meet_both_come_true() {
    let mut world = World::new([None, None], clock::now());
    world.sides[0].control(Control::Hold(true));
    world.sides[1].control(Control::Hold(true));
    // Before the first backoff is over nothing is answered: both were refused with 491.
    world.run(50 * MS);
    assert_eq!([world.told[0].len(), world.told[1].len()], [1, 1]);
    world.run(seconds(6));
    for side in 0..2 {
        assert!(world.told[side].contains(&"hold true: ok".to_owned()), "{side}: {:?}", world.told[side]);
        assert!(world.sides[side].negotiator.is_holding());
    }
    // The called side was first: the one that made the call waits longer (RFC 3261 section 14.1).
    assert_eq!(world.told[0][1], "held");
}

#[test]
fn glare_ends_for_every_pair_of_backoffs_and_every_delay() {
    for delay in [1, 20, 400, 1_900] {
        for random in [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [0.3, 0.9]] {
            let mut world = World::new([None, None], clock::now());
            (world.delay, world.random) = (delay * MS, random);
            world.sides[0].control(Control::Hold(true));
            world.sides[1].control(Control::Hold(true));
            world.run(seconds(60));
            for side in 0..2 {
                let answers = world.told[side].iter().filter(|told| told.starts_with("hold true")).count();
                assert_eq!(answers, 1, "{delay} ms, {random:?}, {side}: {:?}", world.told[side]);
            }
        }
    }
}

#[test]
fn the_last_wish_counts_and_the_one_before_is_not_answered() {
    let mut world = World::new([None, None], clock::now());
    world.sides[0].control(Control::Hold(true));
    world.drain();
    world.sides[0].control(Control::Hold(false));
    world.sides[0].control(Control::Hold(true));
    world.sides[0].control(Control::Hold(false));
    world.run(seconds(2));
    let answers: Vec<_> = world.told[0].iter().filter(|told| told.starts_with("hold")).collect();
    assert_eq!(answers, ["hold false: ok"]);
    assert!(!world.sides[0].negotiator.is_holding());
}

#[test]
fn a_refused_hold_leaves_what_was() {
    let mut world = World::new([None, None], clock::now());
    world.sides[0].control(Control::Hold(true));
    assert!(matches!(world.sides[0].poll(world.now), Some(Action::Invite { .. })));
    world.sides[0].answered(world.now, Some(&response(488, vec![], vec![])), 0.0);
    world.drain();
    assert_eq!(world.told[0][1], "hold true: the peer refused: 488 Not Acceptable Here");
    assert!(!world.sides[0].negotiator.is_holding());
    assert_eq!(world.over[0], None, "the call goes on");
}

#[test]
fn the_refresher_refreshes_for_hours_and_a_dead_peer_ends_the_call() {
    let now = clock::now();
    let wish = request(Method::Invite, vec![Header::Supported("timer".into())], vec![]);
    let ours = SessionTimer::asked(&wish, Some(600), now).expect("nothing to refuse").expect("asked for");
    let told = response(200, ours.answer_headers(&wish), vec![]);
    let theirs = SessionTimer::answered(&told, now).expect("named");
    let mut world = World::new([Some(theirs), Some(ours)], now);
    world.run(seconds(3 * 3_600));
    assert_eq!(world.over, [None, None]);
    let refreshes = world.told[1].iter().filter(|told| *told == "live").count();
    assert!((34..=36).contains(&refreshes), "every five minutes of three hours: {refreshes}");
    // The caller vanishes: nobody answers, and the stack says so after its time-out. The session ends before its time.
    world.dead = Some(0);
    world.run(seconds(3 * 3_600 + 600));
    assert_eq!(world.over[1], Some((LegEnd::Lost, "session expired")));
}

#[test]
fn an_interval_that_is_too_short_for_the_peer_is_asked_for_again_and_longer() {
    let now = clock::now();
    let answer = response(200, vec![Header::SessionExpires("100;refresher=uac".into())], vec![]);
    let mut world = World::new([SessionTimer::answered(&answer, now), None], now);
    let side = &mut world.sides[0];
    side.handle_timeout(now + seconds(50));
    let Some(Action::Invite { headers, .. }) = side.poll(now + seconds(50)) else { panic!("a refresh is due") };
    assert!(headers.iter().any(|header| header.to_string().contains("100;refresher=uac")));
    let refusal = response(422, vec![Header::MinSE("300".into())], vec![]);
    side.answered(now + seconds(50), Some(&refusal), 0.0);
    let Some(Action::Invite { headers, .. }) = side.poll(now + seconds(50)) else { panic!("it is tried again") };
    assert!(headers.iter().any(|header| header.to_string().contains("300;refresher=uac")), "{headers:?}");
    // A peer that demands nothing more is not asked for ever.
    side.answered(now + seconds(51), Some(&refusal), 0.0);
    assert!(side.poll(now + seconds(51)).is_none());
}

#[test]
fn a_transfer_is_told_step_by_step_and_ends_the_call_when_it_is_done() {
    let notify = |body: &str| {
        let state = vec![Header::SubscriptionState("active".into())];
        request(Method::Notify, state, body.as_bytes().to_vec())
    };
    let now = clock::now();
    let mut world = World::new([None, None], now);
    assert_eq!(world.sides[0].notified(&notify("SIP/2.0 200 OK")), StatusCode::CallTransactionDoesNotExist);
    let refer = || Control::Transfer { to: "sip:b@c".to_owned(), attended: true, limit: None };
    world.sides[0].control(refer());
    world.sides[0].control(refer());
    world.drain();
    world.sides[0].referred(now, Ok(()));
    for _ in 0..2 {
        assert_eq!(world.sides[0].notified(&notify("SIP/2.0 100 Trying")), StatusCode::OK);
    }
    world.sides[0].notified(&notify("SIP/2.0 486 Busy Here"));
    world.drain();
    assert_eq!(world.over[0], None, "the call comes back to the agent");
    assert_eq!(
        world.told[0][1..],
        [
            "refer sip:b@c",
            "TransferAnswered(Err(\"another transfer is under way\"))",
            "TransferAnswered(Ok(()))",
            "TransferProgress(100)",
            "TransferProgress(486)",
            "consultation ended",
            "TransferEnded(Err(\"the target answered 486 Busy Here\"))",
        ]
    );
    // A peer that never tells how it ended.
    world.sides[0].control(refer());
    world.drain();
    world.sides[0].referred(now, Ok(()));
    assert_eq!(world.sides[0].deadline(), Some(now + TRANSFER));
    world.sides[0].handle_timeout(now + TRANSFER);
    world.drain();
    assert_eq!(
        world.told[0][world.told[0].len() - 2..],
        ["consultation ended", "TransferEnded(Err(\"the destination did not answer in time\"))"]
    );
    // The agent may want the call back earlier.
    let limit = Duration::from_secs(20);
    let soon = Control::Transfer { to: "sip:b@c".to_owned(), attended: false, limit: Some(limit) };
    world.sides[0].control(soon);
    world.drain();
    world.sides[0].referred(now, Ok(()));
    assert_eq!(world.sides[0].deadline(), Some(now + limit));
    world.sides[0].handle_timeout(now + limit);
    assert!(!world.sides[0].is_transferring() && world.over[0].is_none(), "the call goes on");
    // The next one; how it ended is told before it is accepted.
    world.sides[0].control(refer());
    world.sides[0].notified(&notify("SIP/2.0 200 OK"));
    assert!(world.over[0].is_none());
    world.sides[0].referred(now, Ok(()));
    world.drain();
    assert_eq!(world.over[0], Some((LegEnd::Local, "transferred")));
}

#[test]
fn nothing_is_begun_before_the_call_is_confirmed() {
    let now = clock::now();
    let [caller, _] = agreed();
    let mut machine = Machine::new(false, caller, None);
    machine.control(Control::Hold(true));
    assert!(machine.poll(now).is_none());
    machine.control(Control::Transfer { to: "sip:b@c".to_owned(), attended: false, limit: None });
    assert!(matches!(machine.poll(now), Some(Action::Signal(Signal::TransferAnswered(Err(_))))));
    machine.confirmed(None);
    assert!(matches!(machine.poll(now), Some(Action::Signal(Signal::Connected))));
    assert!(matches!(machine.poll(now), Some(Action::Invite { .. })));
}

#[test]
fn an_offer_of_ours_in_a_2xx_waits_for_the_ack() {
    let now = clock::now();
    let mut world = World::new([None, None], now);
    let reply = world.sides[1].offered(now, &request(Method::Invite, vec![], vec![]));
    assert_eq!(reply.status, StatusCode::OK);
    let again = world.sides[1].offered(now, &request(Method::Invite, vec![], vec![]));
    assert_eq!(again.status, StatusCode::RequestPending);
    let offer = sdp::parse(&reply.body.expect("an offer")).expect("sound");
    let (answer, _) = negotiator().answer(&offer).expect("the same codec");
    let kind = vec![Header::ContentType("application/sdp".into())];
    world.sides[1].confirmed(Some(&request(Method::Ack, kind, answer.to_string().into_bytes())));
    world.drain();
    assert_eq!(world.told[1], ["Connected", "live"]);
    let after = world.sides[1].offered(now, &request(Method::Update, vec![], vec![]));
    assert_eq!(after.status, StatusCode::OK);
}
